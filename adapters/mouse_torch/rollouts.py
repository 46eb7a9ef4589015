"""RolloutStorage, which stores rollouts as torch tensors on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mouse_core import rollouts
from mouse_core.dtypes import refuse_hidden
from mouse_core.rollouts.fields import HostArrays
from mouse_torch import _philox
from mouse_torch.placement import check_device, untraced
from mouse_torch.transfer import sent, torch_dtype


class TensorArrays(HostArrays):
    """The arrays of a storage as torch tensors on one device.

    Args:
        device: The device of the tensors; None: the CPU.

    Raises:
        ConfigError: The device does not exist.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = check_device(device)

    def array(self, value: Any) -> torch.Tensor:
        """Convert a value to a tensor without gradients."""
        refuse_hidden(value)
        return torch.as_tensor(value, device=self.device).detach()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        """Return a tensor of zeros of a NumPy or torch dtype."""
        # A tensor that is created in inference mode can be written only in inference mode, and rollouts often begin in
        # it.
        with torch.inference_mode(False):
            return torch.zeros(
                shape, dtype=dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype), device=self.device
            )

    def index(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return indices of rows as a tensor, without waiting for the device."""
        return sent({"rows": rows}, self.device)["rows"]

    def may_look(self, array: torch.Tensor) -> bool:
        """Whether values can be read without waiting for a device."""
        return bool(self.device.type == "cpu")

    def without_gradients(self) -> torch.no_grad:
        """Return ``torch.no_grad()``."""
        return torch.no_grad()


@untraced("add_transitions", "mini_batch_generator", "recurrent_mini_batch_generator", "generator", "_read", "_steps")
class RolloutStorage(rollouts.RolloutStorage):
    """``mouse_core.rollouts.RolloutStorage`` with torch tensors on one device.

    The class has the same arguments and methods as ``mouse_core.rollouts.RolloutStorage``. For equal seeds, the order
    of rows is also the same; this order is computed on the device of the rows. Values that are added are detached from
    the autograd graph and moved to the device. Only two operations wait for a GPU: the checks of ``validate=True``, and
    the split into trajectories, because this split must know the number of trajectories. Call the methods outside of
    code that ``torch.compile`` compiles; the policy and the update with a mini-batch can be compiled.

    Args:
        num_envs, num_transitions_per_env, fields, seed, validate: The arguments of
            ``mouse_core.rollouts.RolloutStorage``.
        amp_cfg: The argument of ``mouse_core.rollouts.RolloutStorage``; the extractors are called without gradients.
        device: The device of the tensors; None: the CPU.

    Raises:
        ConfigError: An argument is invalid.

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
