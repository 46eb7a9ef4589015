"""How large values of a template may become, told before they are made, and for how long it may run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol

# A number that says how long a text is to be; and of one value, how many characters or items it may have, with all
# that is in it.
LARGEST_NUMBER, LARGEST_VALUE = 1_000_000, 8_000_000
# Places for values in a text, as ``str.format`` and as ``%`` have them.
BRACES, PERCENTS = re.compile(r"\{([^{}]*\{?)"), re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
_DIGITS = re.compile(r"[0-9]+")
# What a number, a name or a comma counts for.
_ITEM = 32


class Limits(Protocol):
    """How much a rendering may do; a ``ChatTemplate`` says it."""

    @property
    def max_chars(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def max_seconds(self) -> float: ...


_end: ContextVar[float] = ContextVar("end", default=float("inf"))


class TooMuch(Exception):
    """A limit was met."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What runs in it, in this thread, is over before that: ``check_time`` says when it is not."""
    before = _end.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _end.reset(before)


def check_time() -> None:
    """That there is some left. What is done between two of these calls has values of bounded size, and is short."""
    if time.monotonic() > _end.get():
        raise TooMuch("expected to be done within max_seconds")


def size_of(value: Any, indent: int = 0) -> int:
    """About how many characters a value has as text, each time that it stands in it.

    Args:
        value: Of any type; what is made one by one is not looked at.
        indent: By how many characters each level is indented.

    Raises:
        TooMuch: More than a value may have.
    """
    check_time()
    waiting, total = [(value, 0)], 0
    while waiting:
        one, depth = waiting.pop()
        total += (len(one) if isinstance(one, str | bytes) else _ITEM) + depth * indent
        check_size(total + _ITEM * len(waiting))
        if isinstance(one, Mapping):
            waiting += [(item, depth + 1) for pair in one.items() for item in pair]
        elif isinstance(one, list | tuple | set | frozenset):
            check_size(_ITEM * len(one))
            waiting += [(item, depth + 1) for item in one]
    return total


def listed(value: Any) -> Any:
    """What is made one by one as a list, and all else as it is.

    Raises:
        TooMuch: All of it is more than a value may have.
    """
    if not isinstance(value, Iterator):
        return value
    made, total = [], 0
    for one in value:
        made.append(one)
        total += size_of(one)
        check_size(total)
    return made


def check_replace(text: str, old: Any, new: Any) -> None:
    """Of a text in which another is replaced."""
    if isinstance(old, str) and isinstance(new, str):
        check_size(len(text) + text.count(old) * len(new))


def check_join(between: str, values: Any) -> None:
    """Of values with a text between them."""
    if hasattr(values, "__len__"):
        check_size(size_of(values) + len(between) * len(values))


def check_format(form: str, values: Any, places: re.Pattern[str]) -> None:
    """Of a text with places for values, each as wide as any number in a place says."""
    found = list(places.findall(form.replace("{{", "").replace("%%", "")))
    if any("{" in place for place in found):
        raise TooMuch("expected no widths within widths")
    said = [int(number[:9]) for place in found for number in _DIGITS.findall(place)]
    widest = max([0, *said, *(abs(one) for one in values if isinstance(one, int))])
    check_numbers((*values, widest))
    check_size(len(form) + len(found) * (widest + max([0, *map(size_of, values)])))


def check_numbers(values: Any) -> None:
    """Of numbers that may say how long a text is to be."""
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise TooMuch(f"expected numbers of at most {LARGEST_NUMBER}, found a larger one")


def check_size(size: int) -> None:
    """Of a value."""
    if size > LARGEST_VALUE:
        raise TooMuch(f"expected values of at most {LARGEST_VALUE} characters or items, found {size}")


def check_made(value: Any) -> None:
    """Of what an operation made."""
    check_time()
    if isinstance(value, str | bytes):
        check_size(len(value))
    elif isinstance(value, list | tuple | dict):
        size_of(value)


def timed(function: Any) -> Callable[..., Any]:
    """A test that no loop can go on calling."""

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        check_time()
        return function(*args, **kwargs)

    return timed
