"""A process that writes rows with checksums to a mapped buffer until its input ends, for tests: FOLDER NAME SIZE."""

import sys
import threading
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH = 37
PIXELS = 1500


def rows_of(writer: int, first: int, n: int) -> dict[str, Any]:
    numbers = np.arange(first, first + n, dtype=np.int64)
    values = (numbers[:, None] * 7 + np.arange(WIDTH) + writer * 13).astype(np.float64)
    pixels = ((numbers[:, None] + np.arange(PIXELS) + writer) % 251).astype(np.uint8)
    rows = {"writer": np.full(n, writer), "number": numbers, "inner": {"values": values, "pixels": pixels}}
    return {**rows, "checksum": checksums(rows)}


def checksums(rows: dict[str, Any]) -> npt.NDArray[np.int64]:
    return np.array(
        [
            zlib.crc32(b"".join(part.tobytes() for part in row))
            for row in zip(
                rows["writer"], rows["number"], rows["inner"]["values"], rows["inner"]["pixels"], strict=True
            )
        ],
        np.int64,
    )


def main(folder: str, writer: int, size: int) -> None:
    from mouse_core.replay import MemmapStorage, ReplayBuffer

    buffer = ReplayBuffer(MemmapStorage(size, folder))
    print("ready", flush=True)
    until_told = threading.Thread(target=sys.stdin.read, daemon=True)
    until_told.start()
    first, turn = 0, 0
    while until_told.is_alive():
        n = (1, 3, 40, 1, 300)[turn % 5]
        rows = rows_of(writer, first, n)
        if n == 1:
            buffer.append(_first(rows))
        else:
            buffer.extend(rows)
        first += n
        turn += 1
        if turn % 7 == 0:
            buffer[turn % len(buffer)] = _first(rows_of(writer, first, 1))
    print(first, flush=True)


def _first(tree: Any) -> Any:
    return {name: _first(child) for name, child in tree.items()} if isinstance(tree, dict) else tree[0]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
