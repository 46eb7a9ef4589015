"""A `print` for pages that show their output: what is printed must be what their `text` blocks say."""

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.test_docs import ROOT, blocks


def checked_print(page: str) -> Callable[..., None]:
    """A `print` that holds every line to the next one of the page's `text` blocks.

    Lines that were not printed when the program ends are a failure too.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    expected = [line for block in blocks(text) if block.language == "text" for line in block.code.splitlines()]
    printed: list[str] = []

    def checked(*values: Any) -> None:
        for line in " ".join(str(value) for value in values).splitlines():
            shown = expected[len(printed)] if len(printed) < len(expected) else "no more output"
            assert line == shown, f"{page} shows\n  {shown}\nand its code prints\n  {line}"
            printed.append(line)

    @atexit.register
    def finish() -> None:
        # Only where the program got to its end; a failure before says more.
        if len(printed) < len(expected) and not hasattr(sys, "last_value"):
            sys.stderr.write(f"{page} shows what its code does not print:\n  {expected[len(printed)]}\n")
            sys.stderr.flush()
            os._exit(1)

    return checked
