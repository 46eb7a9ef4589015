"""Checks of the arguments ``device`` and ``pin_memory``, and a decorator that excludes host code from
``torch.compile``, because a traced draw would raise an error or always return the same batch.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

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


_REASON = (
    "mouse_torch draws batches on the host, which torch.compile cannot trace; compile the step that takes a batch, or "
    "leave fullgraph=True out"
)
_OVER = object()

C = TypeVar("C", bound=type)


def untraced(*names: str) -> Callable[[C], C]:
    """Return a class decorator that excludes the methods ``names``, including inherited methods, from
    ``torch.compile``.

    A compiled function that calls an excluded method is split: the code before the call and the code after it are
    compiled separately. With ``fullgraph=True``, torch raises an error whose text says what to do.
    """

    def changed(cls: C) -> C:
        for name in names:
            method = getattr(cls, name)
            setattr(cls, name, _steps_apart(method) if inspect.isgeneratorfunction(method) else _apart(method))
        return cls

    return changed


def _apart(call: Callable[..., Any]) -> Callable[..., Any]:
    # torch.compiler marks the function itself, so every class gets its own wrapper.
    disable: Any = torch.compiler.disable
    wrapped: Callable[..., Any] = disable(call, reason=_REASON)
    return wrapped


def _steps_apart(generator: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return a generator function that is excluded from tracing in every step of the iteration, not only at the first
    call.
    """

    @wraps(generator)
    def steps(*args: Any, **options: Any) -> Iterator[Any]:
        made: Any = generator(*args, **options)
        try:
            while (item := _advanced(made)) is not _OVER:
                yield item
        finally:
            made.close()

    return steps


@_apart
def _advanced(iterator: Iterator[Any]) -> Any:
    return next(iterator, _OVER)


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting: the tensor is on the host and not traced."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
