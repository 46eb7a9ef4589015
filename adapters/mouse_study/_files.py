"""Files of a study: written beside their place and given their name when they are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mouse_core.errors import StorageError
from mouse_core.files import writing
from mouse_core.files.reading import read_json_object


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; on success, the file written there replaces the file at ``path``.

    Raises:
        StorageError: The file cannot be written; the old file at ``path`` is unchanged.
    """
    try:
        with writing.replacing(path) as partial:
            yield partial
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"file {os.fspath(path)}: expected to be able to write it, found: {reason}") from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, or leave the one that is there.

    Raises:
        StorageError: It cannot be written.
    """
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file; None if the file does not exist.

    Raises:
        DataError: The file is damaged, or holds no JSON object.
    """
    return read_json_object(path) if path.exists() else None
