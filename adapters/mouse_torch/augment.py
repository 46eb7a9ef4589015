"""TokenAugmenter for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from mouse_core import ConfigError
from mouse_core.augment import Augmenter, AugmentMaskProbConfig, AugmentScalarSpec, AugmentTokensConfig, Draws
from mouse_torch.tracing import untraced

__all__ = ["AugmentMaskProbConfig", "AugmentScalarSpec", "AugmentTokensConfig", "TokenAugmenter"]


@untraced("update_augmentations", "next_draws")
class TokenAugmenter(Augmenter[TensorDict]):
    """Augments batches ``TensorDict[B, S]``, on the device where they are.

    ``update_augmentations(batch)`` draws permutations and scalars once; every call then augments with these, and with
    fresh masks. Numbers are drawn on the host, the same as in ``mouse_core`` for the same seed, and copied to the
    device; they are small. For one update and one batch, the values are those of NumPy to the bit.

    Args:
        augment: What is augmented.
        max_num_actions: Number of actions; 0: as ``augment`` says, or as many as ``q_star`` has columns.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0: as ``augment`` says.
        device: Where batches are; None: wherever each is.
        seed: In ``[0, 2**64)``.
        image_shape: ``(H, W, C)`` of a flattened ``obs_image`` that is to be cropped, or of several fields by name.
        validate: Whether actions, done codes and states out of range are an error. None: on the CPU, yes; on a device,
            no, since the check waits for everything queued there. Where it is not checked, such a code stays as it is.
        batch_dims: 2, or 1 for batches ``[B, ...]`` without steps, as ``windows=`` of a source gives them.

    Raises:
        ConfigError: Arguments of another kind.

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
        try:
            return None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device: expected a torch device, found {device!r}") from error

    def _read(self, step_stream: TensorDict) -> Mapping[str, torch.Tensor]:
        # Nested and non-tensor entries pass through as they are.
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
