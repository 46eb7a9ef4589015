"""A check that a call raises an error, in one line."""

from collections.abc import Callable
from typing import Any

import pytest


def assert_raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    match: str,
    call: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> None:
    """Check that ``call(*arguments, **options)`` raises ``error`` with a text in which ``match`` is found."""
    __tracebackhide__ = True
    with pytest.raises(error, match=match):
        call(*arguments, **options)
