"""Files of a study: written beside their place and given their name when they are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mouse_core.errors import DataError, StorageError


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


@contextmanager
def held(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock file for as long as this process lives, however it ends.

    Args:
        path: The file, made if it is not there.
        wait: Whether to wait for whoever holds it.

    Yields:
        Whether it is held; always where the system has no such locks.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield _lock(file, wait)
    finally:
        os.close(file)


def _lock(file: int, wait: bool) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, or leave the one that is there.

    Raises:
        StorageError: It cannot be written.
    """
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is none.

    Raises:
        DataError: It holds something else.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path}: expected JSON, found {error}") from error
