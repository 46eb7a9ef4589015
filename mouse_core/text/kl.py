"""KL divergence of a policy from a reference policy: estimates, reward penalties, and controllers of the coefficient.

The functions are pure and use the array API, so they accept NumPy, torch and JAX, also under ``jax.jit``.
Log-probabilities of sampled tokens have the shape ``[..., L]``, with tokens along the last axis. Results have the dtype
of the log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest import host_array
from mouse_core.dtypes import kind_of, namespace, widened
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.spec import check_choice, check_count, check_number

Array = Any

ESTIMATORS = ("k1", "k2", "k3")
"""Names of the estimators of ``kl_estimates``."""

# Limit of the relative error in one update of the coefficient.
_LARGEST_ERROR = 0.2


def kl_estimates(
    logprobs: Array, reference_logprobs: Array, mask: Array | None = None, *, estimator: str = "k1"
) -> Array:
    """Return an estimate of the divergence KL(policy, reference) for each token that the policy sampled.

    With d = log policy - log reference of a token:

    == ================ ==============================================================================
    k1 ``d``            unbiased; may be negative for single tokens
    k2 ``d * d / 2``    never negative, low variance, biased; its gradient is the divergence's gradient
    k3 ``e^-d - 1 + d`` unbiased and never negative; GRPO adds this estimate to its loss
    == ================ ==============================================================================

    Schulman, "Approximating KL divergence" (2020); Shao et al., "DeepSeekMath" (2024), equation 4, for k3 in GRPO.

    Args:
        logprobs: Log-probabilities of the tokens under the policy, floating ``[..., L]``.
        reference_logprobs: Log-probabilities of the same tokens under the reference, ``[..., L]``.
        mask: The mask of the tokens that the policy sampled, bool ``[..., L]``. Values of tokens outside of the mask
            are ignored, even NaN. None stands for all tokens.
        estimator: "k1", "k2" or "k3".

    Returns:
        Estimates ``[..., L]``; values and gradients are 0 outside of the mask.

    Raises:
        ConfigError: The estimator is unknown.
        SchemaError: An argument is not an array, shapes differ, log-probabilities are not floating, or the mask is not
            bool.

    Example:
        >>> import numpy as np
        >>> from mouse_core.text import kl_estimates
        >>> policy, reference = np.log([0.5, 0.25]), np.log([0.25, 0.5])
        >>> for name in ("k1", "k2", "k3"):
        ...     print(name, kl_estimates(policy, reference, estimator=name).round(3))
        k1 [ 0.693 -0.693]
        k2 [0.24 0.24]
        k3 [0.193 0.307]
    """
    check_choice("estimator", estimator, ESTIMATORS)
    _check_arrays(logprobs=logprobs, reference_logprobs=reference_logprobs, mask=mask)
    _check(logprobs, reference_logprobs, mask)
    xp = namespace(logprobs)
    ratio = logprobs - reference_logprobs
    if mask is not None:
        # Masked before the subtraction, because NumPy warns when the difference of two infinities is NaN.
        nothing = xp.zeros_like(logprobs)
        ratio = xp.where(mask, logprobs, nothing) - xp.where(mask, reference_logprobs, nothing)
    if estimator == "k1":
        return ratio
    return ratio * ratio / 2 if estimator == "k2" else xp.expm1(-ratio) + ratio


def kl_penalized_rewards(
    rewards: Array,
    logprobs: Array,
    reference_logprobs: Array,
    mask: Array | None = None,
    *,
    coef: float | Array,
    estimator: str = "k1",
) -> Array:
    """Return the rewards of tokens minus a KL penalty: ``reward - coef * kl``.

    A reward for an answer is added at the answer's last token in the mask. Ziegler et al., "Fine-tuning language models
    from human preferences" (2019), section 2.2; Stiennon et al., "Learning to summarize from human feedback" (2020).
    RLOO uses the sum of the result over the tokens of an answer.

    Args:
        rewards: A reward for each answer, ``[...]``, or for each token, ``[..., L]``.
        logprobs, reference_logprobs, mask: As in ``kl_estimates``. Gradients are not stopped.
        coef: The weight of the divergence, such as ``controller.coef``.
        estimator: As in ``kl_estimates``.

    Returns:
        Rewards of tokens, ``[..., L]``, 0 outside of the mask. An answer without a token in the mask has no reward.

    Raises:
        ConfigError, SchemaError: An error of ``kl_estimates``, or rewards have another shape (SchemaError).

    Example:
        Two tokens and a token of padding; the first is likelier under the policy than under the reference:

        >>> import numpy as np
        >>> from mouse_core.text import kl_penalized_rewards
        >>> logprobs, reference = np.log([[0.5, 0.5, 0.5]]), np.log([[0.25, 0.5, 0.5]])
        >>> mask = np.array([[True, True, False]])
        >>> print(kl_penalized_rewards(np.array([1.0]), logprobs, reference, mask, coef=0.1).round(3))
        [[-0.069  1.     0.   ]]
    """
    _check_arrays(rewards=rewards)
    kl = kl_estimates(logprobs, reference_logprobs, mask, estimator=estimator)
    xp = namespace(kl)
    shape = tuple(kl.shape)
    if tuple(rewards.shape) not in (shape, shape[:-1]):
        raise SchemaError(
            f"rewards: expected a reward for each answer, {list(shape[:-1])}, or each token, {list(shape)}, "
            f"found {list(rewards.shape)}"
        )
    nothing = xp.zeros_like(kl)
    given = xp.astype(rewards, kl.dtype)
    counts = xp.ones_like(kl, dtype=xp.bool) if mask is None else mask
    if tuple(rewards.shape) != shape:
        # The last token of a mask is where the running count reaches the total: for [1 0 1 0], counts [1 1 2 2], the
        # third.
        so_far = xp.cumulative_sum(xp.astype(counts, xp.int32), axis=-1)
        counts = counts & (so_far == so_far[..., -1:])
        given = given[..., None]
    return xp.where(counts, given, nothing) - coef * kl


@dataclass(frozen=True)
class ConstantKLController:
    """A constant coefficient.

    Args:
        coef: The weight of the divergence; 0 or more.

    Raises:
        ConfigError: The coefficient is out of range.
    """

    coef: float

    def __post_init__(self) -> None:
        check_number("coef", self.coef)

    def update(self, kl: npt.ArrayLike, *, count: int | None = None) -> ConstantKLController:
        """Return this controller, unchanged. The arguments are the same as for ``AdaptiveKLController.update``."""
        return self


@dataclass(frozen=True)
class AdaptiveKLController:
    """A coefficient that increases while the divergence is above a target, and decreases while it is below the target.

    coef' = coef (1 + clip(kl / target - 1, -0.2, 0.2) count / horizon), from Ziegler et al., "Fine-tuning language
    models from human preferences" (2019), section 2.2. To save a controller, use ``dataclasses.asdict``;
    ``AdaptiveKLController(**saved)`` restores the controller.

    Args:
        coef: The current weight of the divergence; above 0, because a weight of 0 would never change.
        target: The target divergence, in nats; above 0.
        horizon: The number of answers over which the coefficient changes by the complete clipped relative error; at
            least 1.

    Raises:
        ConfigError: A number is out of range.

    Example:
        The divergence is twice the target, so the relative error of 100% is clipped to 20%. For 10 answers and a
            horizon of 100, a tenth of the 20% is applied:

        >>> from mouse_core.text import AdaptiveKLController
        >>> AdaptiveKLController(0.1, target=6.0, horizon=100).update(12.0, count=10)
        AdaptiveKLController(coef=0.10200000000000001, target=6.0, horizon=100)
    """

    coef: float
    target: float
    horizon: int

    def __post_init__(self) -> None:
        check_number("coef", self.coef, above=True)
        check_number("target", self.target, above=True)
        check_count("AdaptiveKLController: horizon", self.horizon)

    def update(self, kl: npt.ArrayLike, *, count: int | None = None) -> AdaptiveKLController:
        """Return a new controller, updated with the divergences of some answers.

        Args:
            kl: The divergence of each answer in nats (usually the sum over its tokens), or the mean over answers.
                Tensors on any device are accepted, with or without gradients.
            count: The number of answers; by default the number of values in ``kl``.

        Raises:
            ConfigError: ``kl`` is empty or has a number that is not finite; ``count`` is below 1; or ``count`` is at
                least five times ``horizon``, so that the coefficient could become 0.
        """
        found = np.asarray(host_array(widened(kl)), np.float64)
        if not found.size or not np.isfinite(found).all():
            raise ConfigError(f"kl: expected one or more finite numbers, found {kl!r:.100}")
        number = found.size if count is None else check_count("AdaptiveKLController.update: count", count)
        if number * _LARGEST_ERROR >= self.horizon:
            raise ConfigError(
                f"count: expected fewer than {5 * self.horizon} answers (5 times the horizon), found {number}"
            )
        error = min(max(float(found.mean()) / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return replace(self, coef=self.coef * (1 + error * number / self.horizon))


def _check_arrays(**given: Any) -> None:
    for name, values in given.items():
        if values is not None and not (hasattr(values, "shape") and hasattr(values, "dtype")):
            raise SchemaError(f"{name}: expected an array of NumPy, torch or JAX, found {values!r:.80}")


def _check(logprobs: Array, reference_logprobs: Array, mask: Array | None) -> None:
    shape = tuple(logprobs.shape)
    for name, values in (("logprobs", logprobs), ("reference_logprobs", reference_logprobs)):
        if not shape or kind_of(values.dtype) != "f":
            raise SchemaError(f"{name}: expected floats [..., L], found {values.dtype} {list(values.shape)}")
    if tuple(reference_logprobs.shape) != shape:
        raise SchemaError(
            f"reference_logprobs: expected the shape of logprobs, {list(shape)}, found {list(reference_logprobs.shape)}"
        )
    if mask is not None and (tuple(mask.shape) != shape or kind_of(mask.dtype) != "b"):
        raise SchemaError(f"mask: expected bool {list(shape)}, found {mask.dtype} {list(mask.shape)}")
