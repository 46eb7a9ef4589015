"""Properties that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class memo(Generic[T]):
    """A property whose value is computed at the first read, and is then kept in the instance.

    Unlike ``functools.cached_property`` before Python 3.12, a memo has no lock, so two threads can both compute the
    value. ``cached_property`` shares one lock among all instances: threads wait for each other, and in a forked child
    the lock can stay locked forever.

    Args:
        compute: The pure function that returns the value.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> memo[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> memo[T] | T:
        if instance is None:
            return self
        # As there is no __set__, Python finds the value in the instance's dict first from now on.
        value = self._compute(instance)
        return instance.__dict__.setdefault(self._name, value)  # type: ignore[no-any-return]
