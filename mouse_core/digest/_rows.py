"""The hashes of rows: fields laid side by side in the widths that count, and one hash for each row."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest.values import make_one_nan

# In a row of so many columns a value that needs more than 32 bits is found before all are looked at.
_LOOKED_AT_FIRST = 8
# Rows are laid out in so many bytes at a time, which stay in a processor's cache from the copying to the hashing.
_MOST_BYTES = 1 << 20
# For batches of so many kinds a thread keeps the memory. Fresh memory comes from the kernel page by page, which takes
# as long as all the hashing.
_MOST_KEPT = 4
_PLACE_BYTES = 3 * 8
_kept = threading.local()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Memory in which rows lie side by side, and views of it.

    Wide values come first, so that all lie at multiples of their size: the three integers of the place at 0, 8 and 16,
    float64, int64 and uint64 from 24 on, then float32, then booleans, filled up with zeros to a multiple of 8.

    Args:
        seed: A hash of names, kinds and shapes.
        places: Of each row the batch's index, the row in the whole batch, and the view, int64 ``[B, 3]``.
        fields: ``[B, ...]``, in the order in which fields are given.
        rows: The bytes of each row.
    """

    seed: int
    places: npt.NDArray[np.int64]
    fields: list[npt.NDArray[Any]]
    rows: list[memoryview]

    @classmethod
    def of(cls, kinds: _Kinds, rows: int, length: int) -> _Layout:
        """Of so many rows of so many bytes."""
        import xxhash  # which comes with datasets

        memory = np.zeros((rows, length), np.uint8)
        places = memory[:, :_PLACE_BYTES].view("<i8")
        fields, begin, said = {}, _PLACE_BYTES, ""
        for dtype, name, shape in sorted(((np.dtype(kind), name, shape) for name, kind, shape in kinds), key=_by_width):
            end = begin + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            values = memory[:, begin:end].view(dtype) if end > begin else np.empty((rows, 0), dtype)
            fields[name] = values.reshape(rows, *shape)
            said += f"{name!r} {dtype.str} {shape};"
            begin = end
        whole = memoryview(memory.data).cast("B")
        pieces = [whole[number * length : (number + 1) * length] for number in range(rows)]
        return cls(xxhash.xxh3_64_intdigest(said.encode()), places, [fields[name] for name, *_ in kinds], pieces)


_Kinds = tuple[tuple[str, str, tuple[int, ...]], ...]


def _by_width(field: tuple[np.dtype[Any], str, tuple[int, ...]]) -> tuple[int, str, str]:
    dtype, name, _ = field
    return -dtype.itemsize, dtype.str, name


def sum_of_rows(leaves: Mapping[str, npt.NDArray[Any]], index: int, rows: npt.NDArray[np.int64], view: int) -> int:
    """The sum of the hashes of all rows.

    Where a field needs float64 or uint64 in some rows and not in others, those of each kind are taken for themselves:
    what a row is hashed to does not depend on those beside it.

    Args:
        leaves: Fields ``[B, ...]`` by name, in the order of names.
        index: The batch's index.
        rows: Which row of the whole batch each is, ``[B]``.
        view: The number of the view.
    """
    kinds = {name: _kind_of(values) for name, values in leaves.items()}
    needs = {name: kind for name, kind in kinds.items() if not isinstance(kind, str)}
    if not needs:
        return _sum_of_alike(leaves, kinds, index, rows, view)
    combinations, which = np.unique(np.stack([*needs.values()], axis=1), axis=0, return_inverse=True)
    total = 0
    for number, wider in enumerate(combinations.tolist()):
        part = which.reshape(-1) == number
        own = {name: values[part] for name, values in leaves.items()}
        settled = {name: _KINDS[leaves[name].dtype.kind in "iu"][wide] for name, wide in zip(needs, wider, strict=True)}
        total += _sum_of_alike(own, {**kinds, **settled}, index, rows[part], view)
    return total


def _sum_of_alike(
    leaves: Mapping[str, npt.NDArray[Any]], kinds: Mapping[str, Any], index: int, rows: npt.NDArray[np.int64], view: int
) -> int:
    """The sum of the hashes of rows whose fields have these dtypes.

    Of 32 windows with 6 fields 6 arrays are copied and 32 hashes made, where 192 hashes of what lies in place would
    take twice as long.
    """
    import xxhash

    if not len(rows):
        return 0
    layout, most = _layout(tuple([(name, kinds[name], values.shape[1:]) for name, values in leaves.items()]), len(rows))
    if layout is None:
        total = 0
        for begin in range(0, len(rows), most):
            part = slice(begin, begin + most)
            own = {name: values[part] for name, values in leaves.items()}
            total += _sum_of_alike(own, kinds, index, rows[part], view)
        return total
    layout.places[:, 0], layout.places[:, 1], layout.places[:, 2] = index, rows, view
    with np.errstate(invalid="ignore"):  # which a NaN is to some processors
        for field, values in zip(layout.fields, leaves.values(), strict=True):
            np.copyto(field, values, casting="unsafe")
            if field.dtype.kind == "f" and field.size:
                # The least of values is NaN if one of them is. What was given mostly lies in one piece and is read
                # faster, but of floats of 16 bits and less, which are compared one by one.
                looked_at = values if values.dtype.kind == "f" and values.dtype.itemsize >= 4 else field
                least = np.minimum.reduce(looked_at, axis=None)
                if least != least:
                    make_one_nan(field)
    digest, seed = xxhash.xxh3_128_intdigest, layout.seed
    return sum([digest(row, seed) for row in layout.rows])


def _layout(kinds: _Kinds, rows: int) -> tuple[_Layout | None, int]:
    """Memory of this thread for rows like these, or None and how many rows to take at a time."""
    kept: dict[tuple[_Kinds, int], _Layout] | None = getattr(_kept, "layouts", None)
    if kept is None:
        kept = _kept.layouts = {}
    found = kept.get((kinds, rows))
    if found is not None:
        return found, rows
    sizes = [np.dtype(kind).itemsize * int(np.prod(shape, dtype=np.int64)) for _, kind, shape in kinds]
    length = -(-(_PLACE_BYTES + sum(sizes)) // 8) * 8
    most = max(1, _MOST_BYTES // length)
    if rows > most:
        return None, most
    made = _Layout.of(kinds, rows, length)
    if len(kept) >= _MOST_KEPT:
        del kept[next(iter(kept))]
    if rows * length <= _MOST_BYTES:
        kept[kinds, rows] = made
    return made, rows


# ---------------------------------------------------------------------- widths


# Of floats and of integers the dtype in which values count, and that where it is too narrow.
_KINDS = (("<f4", "<f8"), ("<i8", "<u8"))


def _kind_of(values: npt.NDArray[Any]) -> str | npt.NDArray[np.bool_]:
    """The dtype in which values count: bool, int64 or float32, or, where these are too narrow, uint64 or float64.

    Where they are too narrow for some rows and not for others, which these are, bool ``[B]``.
    """
    kind, itemsize = values.dtype.kind, values.dtype.itemsize
    if kind == "b":
        return "|b1"
    if kind in "iu":
        fits = kind == "i" or itemsize < 8 or not values.size or values.max() < 1 << 63
    else:
        fits = kind != "f" or itemsize < 8 or not values.size
    usual, wider = _KINDS[kind in "iu"]
    if fits:
        return usual
    needs = _needs_wider(values)
    return wider if needs.all() else needs if needs.any() else usual


def _needs_wider(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """By row of uint64 or float64, whether it does not fit in int64 or float32, bool ``[B]``."""
    flat = values.reshape(len(values), -1)
    if values.dtype.kind == "u":
        beyond: npt.NDArray[np.bool_] = flat.max(axis=1) > np.uint64(2**63 - 1)
        return beyond
    # Of values that need 64 bits nearly each does, so a few of a row say it; only other rows are looked at in whole.
    wide = _loses(flat[:, :: max(1, flat.shape[1] // _LOOKED_AT_FIRST)])
    if not wide.any():
        return _loses(flat)
    if not wide.all():
        wide[~wide] = _loses(flat[~wide])
    return wide


def _loses(flat: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """By row, whether float32 loses something of it, bool ``[B]``."""
    with np.errstate(over="ignore", invalid="ignore"):
        # Back again: two arrays of one dtype are compared three times as fast.
        differs = flat.astype(np.float32).astype(flat.dtype) != flat
    if not differs.any():
        return np.zeros(len(flat), np.bool_)
    differs &= flat == flat  # a NaN differs from itself
    lost: npt.NDArray[np.bool_] = differs.any(axis=1)
    return lost
