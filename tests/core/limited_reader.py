"""Reads batches with little memory: python -m tests.core.limited_reader ROWS.arrow GROUP SAMPLING COUNT.

What it has imported and opened by then is not counted: it enters the group before the first batch. Prints as JSON the
checksum of each batch, bytes delivered, and bytes read from disks meanwhile.
"""

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

from mouse_core import BatchSource, DatasetStore


def checksum(batch: dict[str, Any]) -> int:
    """Of the bytes of all fields."""
    found = 0
    for name in sorted(batch):
        found = zlib.crc32(batch[name].tobytes(), found)
    return found


def main(rows: str, group: str, sampling: str, count: str) -> None:
    """Read ``count`` batches."""
    source = BatchSource(DatasetStore.open(rows), 32, 32, sampling, seed=3)  # type: ignore[arg-type]
    file = os.open(rows, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    Path(group).write_text(str(os.getpid()))
    before, sums, delivered = bytes_read(), [], 0
    for index in range(int(count)):
        batch = source[index]
        sums.append(checksum(batch))
        delivered += sum(values.nbytes for values in batch.values())
    print(json.dumps({"sums": sums, "delivered": delivered, "read": bytes_read() - before}))


def bytes_read() -> int:
    """Bytes that this process had read from disks so far."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
