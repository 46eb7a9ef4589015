"""Where the values of a column lie, as the measurements take it from Arrow's buffers."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from mouse_core.bench import ColumnAddresses, Pieces, plain_copies

VECTORS = np.arange(90, dtype=np.float32).reshape(30, 3)


def column(kind: str) -> pa.Array:
    flat = pa.array(VECTORS.reshape(-1))
    if kind == "scalar":
        return pa.array(np.arange(30))
    if kind == "list":
        return pa.ListArray.from_arrays(np.arange(0, 91, 3, dtype=np.int32), flat)
    if kind == "large list":
        return pa.LargeListArray.from_arrays(np.arange(0, 91, 3), flat)
    return pa.FixedSizeListArray.from_arrays(flat, 3)


@pytest.mark.parametrize("kind", ["scalar", "list", "large list", "fixed"])
@pytest.mark.parametrize("cuts", [(), (7,), (4, 4, 5, 22)])
def test_pieces_hold_the_rows(kind: str, cuts: tuple[int, ...]) -> None:
    array = pa.concat_arrays([column(kind)[:2], column(kind)])[2:]
    edges = [0, *cuts, 30]
    addresses = ColumnAddresses([array[a:b] for a, b in pairwise(edges)])
    starts = np.array([0, 3, 5, 20])
    found = addresses.pieces(starts, 10)
    assert found is not None
    values = np.arange(30) if kind == "scalar" else VECTORS
    expected = b"".join(values[start : start + 10].tobytes() for start in starts.tolist())
    assert b"".join(ctypes.string_at(address, size) for address, size in found) == expected
    pieces = Pieces.of_columns([found, found])
    assert pieces.nbytes == 2 * len(expected)
    plain_copies([pieces])(5)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1.0], [2.0, 3.0]]),
        pa.array([1, None]),
        pa.array([[1, None], [3, 4]]),
        pa.array([True, False]),
        pa.array(["a", "b"]),
        pa.array([1, 2]).dictionary_encode(),
    ],
    ids=str,
)
def test_what_does_not_lie_side_by_side_is_no_place(array: pa.Array) -> None:
    assert ColumnAddresses([array]).pieces(np.array([0]), 2) is None
