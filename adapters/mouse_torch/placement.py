"""Placement of batches in torch: checks of ``device`` and ``pin_memory``."""

from __future__ import annotations

import warnings

import torch

from mouse_core import ConfigError


def check_device(device: str | torch.device | None) -> torch.device:
    """The device that is meant, the host by default; ConfigError where it is not there."""
    try:
        target = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a torch device, found {device!r}") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: expected a device of this machine, found {device!r} and no CUDA")
    try:
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device: expected a device of this machine, found {device!r}: {reason}") from error
    return target


def check_pin(pin_memory: bool | None) -> bool:
    """Whether to pin host memory: by default where there is an accelerator. Without one, True warns."""
    there = torch.accelerator.is_available()
    if pin_memory and not there:
        warnings.warn(
            "pin_memory: expected an accelerator for pinned memory, found none; batches are not pinned",
            UserWarning,
            stacklevel=2,
        )
    return there and pin_memory is not False
