"""Decorators that exclude host code from ``torch.compile``, because a traced draw would raise an error or always return
the same batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

import torch

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
