"""Placement of batches on torch devices: checks of the arguments ``device`` and ``pin_memory``."""

from __future__ import annotations

import warnings

import torch

from mouse_core import ConfigError


def check_device(device: str | torch.device | None) -> torch.device:
    """Return the device with its index, as "cuda:0"; None: the CPU. Raise ConfigError if the device does not exist."""
    try:
        target = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a torch device, found {device!r}") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: expected a device of this machine, found {device!r}, but CUDA is not available")
    try:
        return torch.empty(0, device=target).device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device: expected a device of this machine, found {device!r}: {reason}") from error


def check_pin(pin_memory: bool | None) -> bool:
    """Return whether to pin host memory. By default, memory is pinned if there is an accelerator; if there is none,
    True causes a warning.
    """
    there = torch.accelerator.is_available()
    if pin_memory and not there:
        warnings.warn(
            "pin_memory: expected an accelerator for pinned memory, found none; batches are not pinned",
            UserWarning,
            stacklevel=2,
        )
    return there and pin_memory is not False
