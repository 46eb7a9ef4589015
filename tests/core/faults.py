"""Classes that are wrong in one way, for tests that a conformance suite finds it out."""

from collections.abc import Callable
from typing import Any


def wrong(base: Any, **others: Any) -> Any:
    """A class with other attributes; functions stand for methods, with the object, its right method and arguments."""
    made = type(f"Wrong{base.__name__}", (base,), {})

    def method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            return function(self, getattr(super(made, self), name), *arguments, **options)  # type: ignore[arg-type]

        return call

    for name, other in others.items():
        setattr(made, name, method(name, other) if callable(other) else other)
    return made
