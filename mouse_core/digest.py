"""Digests of delivered batches. The digests are equal for every framework, and for every division of the batches among
ranks.

A ``StreamDigest`` is the sum, modulo 2**128, of a hash for each row of each batch. The sum does not depend on the order
of the rows, nor on which rank hashes a row. ``canonical`` defines which values of different dtypes are equal, and
``whole_state`` joins the states of several ranks. Example: ranks 0 and 1 deliver rows 0..1 and 2..3 of a batch; the sum
of their two digests equals the digest of one process that delivers all four rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE, state_number
from mouse_core.dtypes import is_ml_float, widened
from mouse_core.errors import DataError, StateError


def canonical(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert values to a little-endian dtype that does not depend on the dtype of ``values``; every NaN gets the same
    bit pattern.

    Integers become int32 if int32 can represent all values of the array; otherwise int64 or, if necessary, uint64.
    Floats become float32 if no value changes, else float64.
    """
    kind = values.dtype.kind
    if is_ml_float(values.dtype):
        values, kind = values.astype(np.float32), "f"
    if kind == "b":
        return values.astype("|b1", copy=False)
    if kind in "iu":
        return _canonical_integers(values)
    if kind == "f":
        return _canonical_floats(values)
    return values


def _canonical_integers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    for dtype in ("<i4", "<i8"):
        limits = np.iinfo(dtype)
        if not values.size or (values.min() >= limits.min and values.max() <= limits.max):
            return values.astype(dtype)
    return values.astype("<u8")


def _canonical_floats(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype("<f4")
    if narrow.size and not ((narrow == values) | np.isnan(values)).all():
        narrow = values.astype("<f8")
    make_one_nan(narrow)
    return narrow


def as_arrays(batch: Any) -> dict[str, npt.NDArray[Any]]:
    """Return a batch of any framework (a dict, a TensorDict, or another mapping) as NumPy arrays by name."""
    return {name: as_numpy(batch[name]) for name in batch.keys()}  # noqa: SIM118  a TensorDict iterates over its rows


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Return an array or tensor of any framework as a NumPy array of numbers, copied from its device if necessary.

    Raises:
        TypeError: The values are not numbers, or support none of ``__array__``, ``__dlpack__`` and torch's
            ``detach().cpu()``.
    """
    array = host_array(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected an array of numbers, found {type(values).__name__} ({array.dtype})")
    return array


def host_array(values: Any) -> npt.NDArray[Any]:
    """Return an array or tensor of any framework as a NumPy array of any dtype, copied from its device if necessary."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
        return np.from_dlpack(values)
    return np.asarray(values)


def make_one_nan(values: npt.NDArray[Any]) -> None:
    """Overwrite every NaN with the same bit pattern, in place."""
    # The minimum is NaN if any value is NaN; computing it is faster than testing each value.
    if values.size and np.isnan(values.min()):
        values[np.isnan(values)] = np.nan


# Number of columns that are checked for values of more than 32 bits before all columns are checked.
_LOOKED_AT_FIRST = 8
# Largest number of bytes that are copied and hashed at a time, so that they stay in the processor's cache.
_MOST_BYTES = 1 << 20
# Number of layouts whose memory a thread keeps. New memory causes page faults, which take as long as the hashing.
_MOST_KEPT = 4
_PLACE_BYTES = 3 * 8
_kept = threading.local()


@dataclass(frozen=True, slots=True)
class _Layout:
    """A buffer in which the bytes of each row are contiguous, with one view per field.

    Wide values are stored first, so that every value is aligned: the three integers of ``places`` at bytes 0, 8 and 16;
    float64, int64 and uint64 from byte 24; then float32; then booleans; then zeros up to a multiple of 8 bytes.

    Args:
        seed: A hash of the fields' names, dtypes and shapes.
        places: For each row, the index of the batch, the index of the row in the whole batch, and the index of the
            augmented view (see ``views``), int64 ``[B, 3]``.
        fields: The memory of the fields, NumPy views ``[B, ...]``, in the order of ``kinds``.
        rows: The bytes of each row.
    """

    seed: int
    places: npt.NDArray[np.int64]
    fields: list[npt.NDArray[Any]]
    rows: list[memoryview]

    @classmethod
    def of(cls, kinds: _Kinds, rows: int, length: int) -> _Layout:
        """Create the layout of ``rows`` rows of ``length`` bytes."""
        import xxhash  # installed with datasets

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
    """Return the sum of the hashes of all rows of a batch.

    If only some rows of a field need float64 or uint64, these rows are hashed separately, because the hash of a row
    must not depend on other rows.

    Args:
        leaves: Fields ``[B, ...]`` by name, sorted by name.
        index: The batch's index.
        rows: The index of each row in the whole batch, ``[B]``.
        view: The index of the view.
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
    """Return the sum of the hashes of rows whose fields have the dtypes ``kinds``.

    For 32 windows with 6 fields, the function copies 6 arrays and computes 32 hashes. Computing 192 hashes without
    copies would take twice as long.
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
    with np.errstate(invalid="ignore"):  # some processors flag NaN as invalid
        for field, values in zip(layout.fields, leaves.values(), strict=True):
            np.copyto(field, values, casting="unsafe")
            if field.dtype.kind == "f" and field.size:
                # The minimum is NaN if any value is NaN. The caller's array is usually contiguous and read faster than
                # the view; but floats of 16 bits and less are compared slowly.
                looked_at = values if values.dtype.kind == "f" and values.dtype.itemsize >= 4 else field
                least = np.minimum.reduce(looked_at, axis=None)
                if least != least:
                    make_one_nan(field)
    digest, seed = xxhash.xxh3_128_intdigest, layout.seed
    return sum([digest(row, seed) for row in layout.rows])


def _layout(kinds: _Kinds, rows: int) -> tuple[_Layout | None, int]:
    """Return this thread's layout for ``rows`` rows, and ``rows``. If one layout has no room for
    ``rows`` rows, return None and the number of rows that fit.
    """
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


# For floats and for integers: the usual dtype of the digest, and the wider one for values that do not fit.
_KINDS = (("<f4", "<f8"), ("<i8", "<u8"))


def _kind_of(values: npt.NDArray[Any]) -> str | npt.NDArray[np.bool_]:
    """Return the dtype in which an array is hashed: bool, int64 or float32; or uint64 or float64 if int64 or float32 is
    too narrow.

    If int64 or float32 is too narrow for some rows only, return the mask of these rows instead, bool ``[B]``.
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
    """Return a mask of the rows of uint64 or float64 that do not fit in int64 or float32, bool ``[B]``."""
    flat = values.reshape(len(values), -1)
    if values.dtype.kind == "u":
        beyond: npt.NDArray[np.bool_] = flat.max(axis=1) > np.uint64(2**63 - 1)
        return beyond
    # If a row needs 64 bits, nearly all of its values need 64 bits. So a few columns are checked first. All columns are
    # checked only for rows in which these few columns fit in 32 bits.
    wide = _loses(flat[:, :: max(1, flat.shape[1] // _LOOKED_AT_FIRST)])
    if not wide.any():
        return _loses(flat)
    if not wide.all():
        wide[~wide] = _loses(flat[~wide])
    return wide


def _loses(flat: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows whose values float32 cannot represent exactly, bool ``[B]``."""
    with np.errstate(over="ignore", invalid="ignore"):
        # Converted back, because two arrays of one dtype are compared three times as fast.
        differs = flat.astype(np.float32).astype(flat.dtype) != flat
    if not differs.any():
        return np.zeros(len(flat), np.bool_)
    differs &= flat == flat  # a NaN differs from itself
    lost: npt.NDArray[np.bool_] = differs.any(axis=1)
    return lost


_MODULUS = 1 << 128


@dataclass(frozen=True)
class StreamDigest:
    """A 128-bit digest of delivered batches; digests of batches and of ranks can be added in any order.

    The digest is the sum modulo 2**128 of one XXH3 hash for each window. The hash of a window covers the index of the
    batch, the row of the window in the whole batch, and the names, kinds, shapes and values of the window's fields. Two
    digests are equal if they cover the same windows, each with the same batch index and row. Two different streams have
    equal digests with a probability below 2**-64. The order in which batches were requested does not matter. The digest
    detects mistakes, not deliberate forgery.

    Values are compared as in ``mouse_core.testing.stream_digest``, window by window: two equal numbers count as equal
    even if their dtypes have different widths, all NaNs are equal, and -0.0 differs from 0.0.

    Args:
        total: The sum, in ``[0, 2**128)``.
        windows: Number of windows in the sum.

    Example:
        >>> batch = {"reward": np.arange(6.0).reshape(2, 3)}
        >>> halves = np.split(batch["reward"], 2)
        >>> parts = [StreamDigest.of(7, {"reward": half}, first_row=row) for row, half in enumerate(halves)]
        >>> sum(parts, StreamDigest()) == StreamDigest.of(7, batch)
        True
    """

    total: int = 0
    windows: int = 0

    @classmethod
    def of(cls, index: int, batch: Any, first_row: int | Sequence[int] | npt.NDArray[np.int64] = 0) -> StreamDigest:
        """Return the digest of one batch, or of one rank's share of a batch.

        Args:
            index: The index of the batch in the stream.
            batch: A mapping of names to arrays ``[B, ...]`` of any framework, possibly nested, or a tuple of several
                views of this form. A single number or text in place of an array counts as the value of every window.
            first_row: The index of the first row in the whole batch; or an array with the index of each row. Rows with
                a negative index, and rows after the end of the array, are left out.

        Raises:
            DataError: The arrays have different numbers of rows, or two names are equal as text, such as 1 and "1".
            TypeError: A value is not an array of numbers or texts. Pass ``vars(object)`` for the fields of an object.
        """
        total, windows = 0, 0
        for number, view in enumerate(batch if isinstance(batch, tuple) else (batch,)):
            leaves = _leaves(view)
            windows = _rows_of(leaves)
            rows: Any = first_row
            if not isinstance(first_row, int):
                rows = np.asarray(first_row)
                kept = np.flatnonzero(rows >= 0)
                if len(kept) < windows:
                    leaves = {name: values[kept] for name, values in leaves.items()}
                    rows, windows = rows[kept], len(kept)
            rows = np.arange(rows, rows + windows) if isinstance(rows, int) else rows
            total += sum_of_rows(leaves, index, rows, number)
        return cls(total % _MODULUS, windows)

    def __add__(self, other: StreamDigest) -> StreamDigest:
        """Return the digest of the windows of both digests, which must have no window in common."""
        if not isinstance(other, StreamDigest):
            return NotImplemented
        return StreamDigest((self.total + other.total) % _MODULUS, self.windows + other.windows)

    def hexdigest(self) -> str:
        """Return the sum as 32 hexadecimal digits."""
        return f"{self.total:032x}"

    def __str__(self) -> str:
        return f"{self.hexdigest()} of {self.windows} windows"

    def state_dict(self) -> dict[str, Any]:
        """Return the digest as a dict of a text and an integer."""
        return {"total": self.hexdigest(), "windows": self.windows}

    @classmethod
    def from_state(cls, state: Any) -> StreamDigest:
        """Return the digest from a ``state_dict()``; raise StateError if the state is invalid."""
        try:
            total = int(state["total"], 16)
            windows = state_number("windows", state["windows"])
        except UNREADABLE as error:
            raise StateError(
                f"state: expected a dict with 'total' and 'windows' of a digest, found {state!r:.100}"
            ) from error
        if not 0 <= total < _MODULUS:
            raise StateError(f"state: expected a digest of 32 hexadecimal digits, found {state['total']!r:.100}")
        return cls(total, windows)


# ---------------------------------------------------------------------- batches


def _leaves(batch: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the fields of a batch of any framework, including nested fields, in a dict from path (a text) to field,
    sorted by path.

    A single value in place of an array, such as a temperature, counts as the value of every window.
    """
    if type(batch) is dict and all(map(_is_plain, batch.values())) and set(map(type, batch)) == {str}:
        # Most batches are flat; the general case takes 3 us alone, and 20 us between the steps of a training.
        return {path: batch[name] for path, name in _paths(tuple(batch))}
    found: dict[str, npt.NDArray[Any]] = {}
    ones: set[str] = set()
    _collect(batch, "", found, ones)
    if ones:
        rows = {len(values) for name, values in found.items() if name not in ones}
        for name in ones if len(rows) == 1 else ():
            found[name] = np.broadcast_to(found[name], (*rows, *found[name].shape[1:]))
    return dict(sorted(found.items()))


def _is_plain(values: Any) -> bool:
    """Whether a field is a NumPy array of plain numbers."""
    return type(values) is np.ndarray and values.ndim > 0 and values.dtype.kind in "biuf"


@lru_cache(maxsize=256)
def _paths(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return pairs of the path and the name of each field of a flat batch, sorted by path."""
    return sorted((f"/{_escaped(name)}", name) for name in names)


def _collect(tree: Any, path: str, found: dict[str, npt.NDArray[Any]], ones: set[str]) -> None:
    """Add the fields that are nested under ``path`` to ``found``, and add the paths of single values to ``ones``."""
    if hasattr(tree, "keys"):  # a mapping or a TensorDict; iterating over a TensorDict yields rows, not names
        for name in tree.keys():  # noqa: SIM118
            _collect(tree[name], f"{path}/{_escaped(str(name))}", found, ones)
    elif isinstance(tree, tuple):
        for number, child in enumerate(tree):
            _collect(child, f"{path}/{number}", found, ones)
    elif tree is not None:
        if path in found:
            raise DataError(
                f"digest: expected field names that differ when they are converted to text, found {path[1:]!r} twice"
            )
        found[path] = _leaf(tree, path)
        if not isinstance(tree, list) and not getattr(tree, "ndim", 0):
            ones.add(path)


def _escaped(name: str) -> str:
    """Return a name escaped as in a JSON pointer, so that the field "a/b" differs from the field "b" in "a"."""
    return name.replace("~", "~0").replace("/", "~1") if "/" in name or "~" in name else name


def _leaf(values: Any, path: str) -> npt.NDArray[Any]:
    """Return a field as an array ``[B, ...]`` of numbers; texts and objects become hashes, and a single value becomes
    an array ``[1]``."""
    if isinstance(values, list):  # rows of differing length
        return _hashed(values, path)
    if hasattr(values, "detach"):
        values = widened(values)  # torch cannot convert bfloat16 to NumPy
    array = host_array(values)
    if array.dtype.kind in "SU" or _is_of_rows(array):
        return _hashed(array.tolist() if array.ndim else [array.item()], path)
    if array.dtype.kind == "c":  # the two parts, side by side
        array = np.stack([array.real, array.imag], axis=-1)
    if array.dtype.kind not in "biuf" and not is_ml_float(array.dtype):
        raise TypeError(
            f"digest: expected an array of numbers or texts, found {type(values).__name__} ({array.dtype}) in "
            f"{path[1:] or 'place of the batch'}; pass the fields of an object as a dict, such as vars(value)"
        )
    return array if array.ndim else array[None]


def _is_of_rows(array: npt.NDArray[Any]) -> bool:
    """Whether an array contains one Python object per row, or is a single text."""
    return array.dtype.kind == "O" and (array.ndim > 0 or isinstance(array.item(), str | bytes))


def _hashed(rows: Sequence[Any], path: str) -> npt.NDArray[np.uint8]:
    """Return the digest of each row, uint8 ``[B, 16]``."""
    digests = [_hash_of(row, path) for row in rows]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(rows), 16)


def _hash_of(row: Any, path: str) -> bytes:
    import xxhash

    if row is None or isinstance(row, str | bytes):
        return xxhash.xxh3_128_digest(repr(row).encode())
    values = row if isinstance(row, list) else np.asarray(_leaf(row, path))[None]
    return StreamDigest.of(0, {"row": values}).total.to_bytes(16)


def _rows_of(leaves: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return the common number of rows of all fields."""
    rows = {len(values) for values in leaves.values()}
    if len(rows) != 1:
        said = {name: list(values.shape) for name, values in leaves.items()}
        raise DataError(f"digest: expected fields with equal numbers of rows, found shapes {said!r:.300}")
    return rows.pop()


# ---------------------------------------------------------------------- in the states of loaders

KEY = "digest"
"""Key of the digest in a state dict."""


def rank_state(digest: StreamDigest, shard: tuple[int, int]) -> dict[str, Any]:
    """Return the part of a state that holds a digest, the rank that computed the digest, and the number of ranks."""
    rank, count = shard
    return {**digest.state_dict(), "rank": rank, "ranks": count}


def rank_digest(state: Any, shard: tuple[int, int]) -> StreamDigest:
    """Return the digest with which a rank continues: on rank 0 the digest of the whole stream, on other ranks an empty
    digest.

    A state with the digest of one process, or with the joined digest of all ranks (``whole_state``), is continued only
    by rank 0, so that the sum over ranks counts this digest once. If the state has the digest of only one of several
    ranks, every rank starts with an empty digest, because the other ranks can load either this state or their own
    states.

    Raises:
        StateError: The digest in the state is invalid.
    """
    if state is None:
        return StreamDigest()
    found = StreamDigest.from_state(state)
    is_whole = (state.get("rank"), state.get("ranks")) == (0, 1)
    return found if is_whole and shard[0] == 0 else StreamDigest()


def whole_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks of a loader with ``digest=True`` into the state of one process.

    The digest of the joined state covers the whole stream. A run with any number of ranks can load the state on all
    ranks: rank 0 continues the digest, and the other ranks start with an empty digest. So the digests of all ranks
    always add up to the digest of the stream.

    Args:
        states: One state from each rank, in any order; all states were saved at the same batch.

    Raises:
        StateError: A rank is missing or occurs twice, the states are of different batches or sources, or a state has no
            digest.

    Example:
        >>> from mouse_core import PrefetchBatchifier
        >>> from mouse_core.testing import example_store
        >>> store = example_store()
        >>> loaders = [PrefetchBatchifier(store, 8, 4, shard=(rank, 2), digest=True) for rank in range(2)]
        >>> rewards = [loader.next_batch()["reward"] for loader in loaders]
        >>> state = whole_state([loader.state_dict() for loader in loaders])
        >>> digest = state["digest"]
        >>> digest["windows"], digest["ranks"]
        (4, 1)
    """
    if not states:
        raise StateError("states: expected the states of all ranks, found none")
    total, seen = StreamDigest(), []
    rest = _without_digest(states[0])
    for place, state in enumerate(states):
        if not isinstance(state, Mapping) or not isinstance(state.get(KEY), Mapping):
            raise StateError(f"states: expected a state with a digest at index {place}, found {state!r:.200}")
        differing = [name for name in {**rest, **_without_digest(state)} if rest.get(name) != state.get(name)]
        if differing:
            said = {name: (rest.get(name), state.get(name)) for name in differing}
            raise StateError(
                f"states: expected states of the same batch, found states of different batches at 0 and at "
                f"{place}: {said!r:.200}"
            )
        total += StreamDigest.from_state(state[KEY])
        seen.append((state[KEY].get("ranks"), state[KEY].get("rank")))
    if sorted(seen, key=repr) != sorted(((len(states), rank) for rank in range(len(states))), key=repr):
        found = ", ".join(f"rank {rank} of {count}" for count, rank in seen)
        raise StateError(f"states: expected each of {len(states)} ranks once, found {found:.200}")
    return {**rest, KEY: rank_state(total, (0, 1))}


def _without_digest(state: Any) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != KEY} if isinstance(state, Mapping) else {}
