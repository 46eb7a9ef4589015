"""TokenAugmenter for JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mouse_core import ConfigError
from mouse_core.augment import Augmenter, AugmentMaskProbConfig, AugmentScalarSpec, AugmentTokensConfig, Draws

__all__ = ["AugmentMaskProbConfig", "AugmentScalarSpec", "AugmentTokensConfig", "TokenAugmenter"]


class TokenAugmenter(Augmenter[dict[str, jax.Array]]):
    """Augments batches of ``jax.Array``, ``{field: [B, S, ...]}``, where they are.

    ``update_augmentations(batch)`` draws permutations and scalars once; every call then augments with these, and with
    fresh masks. Numbers are drawn on the host, the same as in ``mouse_core`` for the same seed, and values are those of
    NumPy to the bit (subnormal numbers aside, which XLA flushes to zero on the CPU).

    In a compiled step, take the draws out and apply them inside: draws are a pytree, and for one shape of batch
    ``jax.jit`` compiles once.

        augmenter.update_augmentations(batch)
        state = train_step(state, batch, augmenter.next_draws(batch))  # calls mouse_core.augment.apply

    Args:
        augment: What is augmented.
        max_num_actions: Number of actions; 0: as ``augment`` says, or as many as ``q_star`` has columns.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0: as ``augment`` says.
        device: Ignored here: draws go where the batch is.
        seed: In ``[0, 2**64)``.
        image_shape: ``(H, W, C)`` of a flattened ``obs_image`` that is to be cropped, or of several fields by name.
        validate: Whether actions, done codes and states out of range are an error. None: on the CPU, yes; on a device,
            no, since the check waits for everything queued there. Where it is not checked, such a code stays as it is.
        batch_dims: 2, or 1 for batches ``[B, ...]`` without steps, as ``windows=`` of a source gives them.

    Raises:
        ConfigError: Arguments of another kind.

    Example:
        >>> import jax.numpy as jnp
        >>> from mouse_jax.augment import AugmentScalarSpec, AugmentTokensConfig, TokenAugmenter
        >>> batch = {"reward": jnp.ones((1, 2))}
        >>> augmenter = TokenAugmenter(AugmentTokensConfig(scale_reward=AugmentScalarSpec(mean=2.0)))
        >>> augmenter.update_augmentations(batch)
        >>> augmenter(batch)["reward"]
        Array([[2., 2.]], dtype=float32)
    """

    def _read(self, step_stream: dict[str, jax.Array]) -> Mapping[str, jax.Array]:
        if any(isinstance(values, jax.core.Tracer) for values in step_stream.values()):
            raise ConfigError(
                "augmenter: expected arrays, found traced ones; it draws on the host, so call next_draws(batch) "
                "outside of jax.jit and mouse_core.augment.apply(batch, draws) inside"
            )
        return step_stream

    def _write(self, step_stream: dict[str, jax.Array], changed: Mapping[str, Any]) -> dict[str, jax.Array]:
        return {**step_stream, **changed}

    def _place(self, draws: Draws, fields: Mapping[str, Any]) -> Draws:
        # Not committed to a device: operations take them to where the batch is.
        return draws.map(jnp.asarray)

    def _checks(self, fields: Mapping[str, Any]) -> bool | None:
        if self._validate is not None:
            return self._validate
        return all(
            values.is_fully_addressable and all(device.platform == "cpu" for device in values.devices())
            for values in fields.values()
        )
