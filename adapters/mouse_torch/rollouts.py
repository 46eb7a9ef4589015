"""Rollouts as torch tensors on their device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mouse_core import ConfigError, rollouts
from mouse_core.dtypes import refuse_hidden
from mouse_core.rollouts.fields import HostArrays
from mouse_torch import _philox
from mouse_torch.tracing import untraced
from mouse_torch.transfer import sent, torch_dtype


class TensorArrays(HostArrays):
    """The arrays of a storage as torch tensors on one device.

    Args:
        device: Where they are; None: the CPU.

    Raises:
        ConfigError: A device that is not there.
    """

    def __init__(self, device: Any = None) -> None:
        try:
            # The number of the current device belongs to it: tensors say "cuda:0".
            self.device = torch.empty(0, device="cpu" if device is None else device).device
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ConfigError(f"device: expected a torch device that is there, found {device!r}") from error

    def array(self, value: Any) -> torch.Tensor:
        """A value as a tensor, detached from the graph."""
        refuse_hidden(value)
        return torch.as_tensor(value, device=self.device).detach()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        """A tensor of zeros of a NumPy or torch dtype."""
        # A tensor that is made in inference mode can be written to only there, and rollouts are often begun there.
        with torch.inference_mode(False):
            return torch.zeros(
                shape, dtype=dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype), device=self.device
            )

    def index(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Row numbers as a tensor; nothing waits for them."""
        return sent({"rows": rows}, self.device)["rows"]

    def may_look(self, array: torch.Tensor) -> bool:
        """Whether no device has to be waited for."""
        return bool(self.device.type == "cpu")

    def without_gradients(self) -> torch.no_grad:
        """``torch.no_grad()``."""
        return torch.no_grad()


@untraced("add_transitions", "mini_batch_generator", "recurrent_mini_batch_generator", "generator", "_read", "_steps")
class RolloutStorage(rollouts.RolloutStorage):
    """``mouse_core.rollouts.RolloutStorage`` with torch tensors, which are kept, computed and delivered on one device.

    It has the same arguments and methods, and for one seed the same order of rows, which is computed on a GPU where
    rows are there. What is added is detached from the graph and moved to the device. Nothing waits for a GPU, except
    the checks where ``validate=True``, and splitting trajectories, whose number must be known. What
    ``torch.compile(fullgraph=True)`` compiles and CUDA graphs capture takes ``mouse_torch.device.RolloutStorage``.

    Args:
        num_envs, num_transitions_per_env, fields, seed, hidden_axis, validate, digest: As there.
        amp_cfg: Likewise; the extractors are called without gradients.
        device: Where tensors are; None: the CPU.

    Raises:
        ConfigError: An argument that cannot be used.

    Example:
        >>> import torch
        >>> from mouse_torch import RolloutStorage
        >>> storage = RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={"values": ()})
        >>> storage.add_transitions({"values": torch.zeros(2), "rewards": torch.ones(2), "dones": torch.zeros(2)})
        >>> storage.compute_returns(torch.zeros(2), gamma=0.99, lam=0.95)
        >>> storage.returns
        tensor([[[1.],
                 [1.]]])
    """

    kind_of_arrays = TensorArrays

    def _order(self, count: int, *, shuffle: bool) -> torch.Tensor:
        if self.device.type not in ("cuda", "meta"):
            host: torch.Tensor = super()._order(count, shuffle=shuffle)
            return host
        if not shuffle:
            return torch.arange(count, device=self.device)
        seed, epoch = (
            torch.full((), number, dtype=torch.int64, device=self.device)
            for number in (_philox.signed(self.seed), self.epoch)
        )
        return _philox.permutation(seed, epoch, count)
