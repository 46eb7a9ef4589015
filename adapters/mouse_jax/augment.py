"""TokenAugmenter, which augments batches of JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mouse_core import ConfigError
from mouse_core.augment import Augmenter, AugmentMaskProbConfig, AugmentScalarSpec, AugmentTokensConfig, Draws

__all__ = ["AugmentMaskProbConfig", "AugmentScalarSpec", "AugmentTokensConfig", "TokenAugmenter"]


class TokenAugmenter(Augmenter[dict[str, jax.Array]]):
    """Augments batches of ``jax.Array``, ``{field: [B, S, ...]}``, on their devices.

    ``update_augmentations(batch)`` draws permutations, scales and shifts. Every later call augments a batch with these
    permutations, scales and shifts, and with new masks. Random numbers are drawn on the host; for the same seed, they
    equal the random numbers of ``mouse_core``. The augmented values are bit-identical to the values that ``mouse_core``
    computes with NumPy (except subnormal numbers, which XLA flushes to zero on the CPU).

    For a compiled training step, draw the random numbers outside of the step, and apply them inside the step. The draws
    are a pytree, and ``jax.jit`` compiles the step once for each shape of batch.

        augmenter.update_augmentations(batch)
        state = train_step(state, batch, augmenter.next_draws(batch))  # calls mouse_core.augment.apply

    Args:
        augment: The augmentations.
        max_num_actions: Number of actions; 0: the number in ``augment``, or the number of columns of ``q_star``.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0: the number in ``augment``.
        device: Ignored, because draws are transferred to the device of the batch.
        seed: An integer in ``[0, 2**64)``.
        image_shape: The shape ``(H, W, C)`` of a flattened ``obs_image``, or a dict from field to shape for several
            fields; required for crops.
        validate: Whether actions, done codes and states that are out of range raise an error. If ``validate`` is None,
            codes are checked on the CPU but not on other devices, where the check would wait for all queued work.
            Without the check, codes that are out of range stay unchanged.
        batch_dims: Number of batch axes: 2, or 1 for batches ``[B, ...]`` without steps, as from a source with
            ``windows=``.

    Raises:
        ConfigError: An argument is invalid.

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
                "augmenter: expected arrays, found traced arrays; the augmenter draws on the host, so call "
                "next_draws(batch) "
                "outside of jax.jit and mouse_core.augment.apply(batch, draws) inside"
            )
        return step_stream

    def _write(self, step_stream: dict[str, jax.Array], changed: Mapping[str, Any]) -> dict[str, jax.Array]:
        return {**step_stream, **changed}

    def _place(self, draws: Draws, fields: Mapping[str, Any]) -> Draws:
        # Not committed to a device, so that operations move the draws to the device of the batch.
        return draws.map(jnp.asarray)

    def _checks(self, fields: Mapping[str, Any]) -> bool | None:
        if self._validate is not None:
            return self._validate
        return all(
            values.is_fully_addressable and all(device.platform == "cpu" for device in values.devices())
            for values in fields.values()
        )
