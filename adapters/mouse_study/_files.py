"""Files of a study: written beside their place and given their name when they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mouse_core.errors import StorageError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write a file, which takes the place of the one at ``path`` if no error is raised inside.

    Raises:
        StorageError: It cannot be written; what was at ``path`` is still there.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        try:
            yield partial
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"file {target}: expected to be able to write it, found: {reason}") from error
