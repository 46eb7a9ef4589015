"""The byte ranges that the floor of a benchmark copies."""

import ctypes
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import DatasetStore
from tests.bench.floor import floor, pieces_of

ROWS = 30
VECTORS = np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3)
ENDS = np.arange(0, 3 * ROWS + 1, 3)


def observations(kind: str) -> pa.Array:
    flat = pa.array(VECTORS.reshape(-1))
    if kind == "list":
        return pa.ListArray.from_arrays(ENDS.astype(np.int32), flat)
    return (
        pa.LargeListArray.from_arrays(ENDS, flat)
        if kind == "large list"
        else pa.FixedSizeListArray.from_arrays(flat, 3)
    )


@pytest.mark.parametrize("kind", ["list", "large list", "fixed"])
@pytest.mark.parametrize("cuts", [(), (7,), (4, 5, 22)])
@pytest.mark.parametrize("steps", [[10, 10, 10, 10], [10, 1, 6, 3]])
def test_pieces_are_the_stored_values_of_windows(kind: str, cuts: tuple[int, ...], steps: list[int]) -> None:
    columns = {"observation": observations(kind), "reward": np.arange(ROWS, dtype=np.float32)}
    table = pa.table(columns | dict.fromkeys(("action", "done"), np.zeros(ROWS, np.int64)))
    edges = [0, *cuts, ROWS]
    parts = [table.slice(a, b - a).combine_chunks() for a, b in pairwise(edges)]
    snapshot = DatasetStore().from_dataset(pa.concat_tables(parts)).snapshot()
    starts = np.array([0, 3, 5, 20])
    shorter = np.array(steps) if min(steps) < 10 else None
    pieces = pieces_of(snapshot, ["obs_continuous", "reward"], starts, 10, shorter)
    windows = list(zip(starts.tolist(), steps, strict=True))
    wanted = [values[start : start + n] for values in (VECTORS, VECTORS[:, 0] / 3) for start, n in windows]
    found = zip(pieces.source.tolist(), pieces.size.tolist(), strict=True)
    expected = b"".join(values.astype(np.float32).tobytes() for values in wanted)
    assert b"".join(ctypes.string_at(address, size) for address, size in found) == expected
    assert pieces.nbytes == len(expected)
    floor([pieces])(5)
