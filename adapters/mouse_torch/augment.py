"""TokenAugmenter, which augments batches of torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from mouse_core.augment import Augmenter, AugmentMaskProbConfig, AugmentScalarSpec, AugmentTokensConfig, Draws
from mouse_torch.placement import check_device, untraced

__all__ = ["AugmentMaskProbConfig", "AugmentScalarSpec", "AugmentTokensConfig", "TokenAugmenter"]


@untraced("update_augmentations", "next_draws")
class TokenAugmenter(Augmenter[TensorDict]):
    """Augments batches ``TensorDict[B, S]`` on their device.

    ``update_augmentations(batch)`` draws permutations, scales and shifts. Every later call augments a batch with these
    permutations, scales and shifts, and with new masks. Random numbers are drawn on the host and copied to the device;
    the copies are small. For the same seed, the random numbers equal the random numbers of ``mouse_core``. For the same
    update and batch, the augmented values are bit-identical to the values that ``mouse_core`` computes with NumPy.

    Args:
        augment: The augmentations.
        max_num_actions: Number of actions; 0: the number in ``augment``, or the number of columns of ``q_star``.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0: the number in ``augment``.
        device: The device of batches; None: the device of each batch.
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
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from mouse_torch.augment import AugmentScalarSpec, AugmentTokensConfig, TokenAugmenter
        >>> batch = TensorDict({"reward": torch.ones(1, 2)}, batch_size=[1, 2])
        >>> augmenter = TokenAugmenter(AugmentTokensConfig(scale_reward=AugmentScalarSpec(mean=2.0)))
        >>> augmenter.update_augmentations(batch)
        >>> augmenter(batch)["reward"]
        tensor([[2., 2.]])
    """

    def _checked_device(self, device: Any) -> torch.device | None:
        return None if device is None else check_device(device)

    def _read(self, step_stream: TensorDict) -> Mapping[str, torch.Tensor]:
        # Nested and non-tensor entries are unchanged.
        return {
            name: value
            for name, value in step_stream.items()
            if isinstance(name, str) and isinstance(value, torch.Tensor)
        }

    def _write(self, step_stream: TensorDict, changed: Mapping[str, Any]) -> TensorDict:
        augmented: TensorDict = step_stream.clone(recurse=False)
        for name, value in changed.items():
            augmented.set(name, value)
        return augmented

    def _place(self, draws: Draws, fields: Mapping[str, Any]) -> Draws:
        device = self._device or next(iter(fields.values())).device
        return draws.map(lambda values: torch.as_tensor(values, device=device))
