"""The records of a run: a line of JSON for each step, appended, and cut back to a checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "records.jsonl"
_FLUSHED_EVERY = 0.5  # seconds
_TAIL = 4096  # bytes, which hold the last line


class Records:
    """The file that a run appends to.

    Args:
        path: The file, made if it is not there.
        size: Bytes of it that hold; what is behind them was recorded after the checkpoint, and is recorded again.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._file = open(path, "ab")  # noqa: SIM115  closed by close()
        self._file.truncate(size)
        self._flushed = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Record what a step had."""
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        if time.monotonic() - self._flushed > _FLUSHED_EVERY:
            self._file.flush()
            self._flushed = time.monotonic()

    def settle(self) -> int:
        """Wait until all of it is on the disk; how many bytes it has."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records up to the first incomplete line, which a crash may leave after the last checkpoint."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def last_record(path: Path) -> dict[str, Any] | None:
    """The last whole line, of a file that somebody may be appending to."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")[:-1]
        return dict(json.loads(lines[-1])) if lines else None
    except (OSError, ValueError):  # not there yet, or a line longer than what was read
        return None
