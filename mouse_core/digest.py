"""Digests of delivered batches: equal in every framework, and for every way in which ranks share the work.

A ``StreamDigest`` is the sum, modulo 2**128, of a hash for each row of each batch. Rows that are hashed in another
order, or by several ranks, give the same sum. ``canonical`` defines which values of different dtypes are equal, and
``whole_state`` joins the states of several ranks. Example: ranks 0 and 1 deliver rows 0..1 and 2..3 of a batch; their
two digests add up to the digest of one process that delivers all four rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import state_number
from mouse_core.dtypes import is_ml_float, widened
from mouse_core.errors import ConfigError, DataError, StateError


def canonical(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert values to the narrowest of the digest's dtypes, little-endian, with one NaN.

    An integer becomes int32 where all values of the array fit, else int64, else uint64; a float float32 where that
    loses nothing, else float64.
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
    """A batch of any framework (a dict, a TensorDict, or another mapping) as NumPy arrays by name."""
    return {name: as_numpy(batch[name]) for name in batch.keys()}  # noqa: SIM118  a TensorDict iterates over its rows


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """An array or tensor of any framework as a NumPy array, copied from its device if need be.

    Raises:
        TypeError: It knows none of ``__array__``, ``__dlpack__`` and torch's ``detach().cpu()``.
    """
    array = host_array(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected an array of numbers, found {type(values).__name__} ({array.dtype})")
    return array


def host_array(values: Any) -> npt.NDArray[Any]:
    """An array or tensor of any framework as NumPy has it, of numbers or not, copied from its device if need be."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
        return np.from_dlpack(values)
    return np.asarray(values)


def make_one_nan(values: npt.NDArray[Any]) -> None:
    """Make all NaNs of some floats one, where they lie."""
    # The least of values is NaN if one of them is, and that is faster than to ask each.
    if values.size and np.isnan(values.min()):
        values[np.isnan(values)] = np.nan


# Columns that are checked first for a value of more than 32 bits, before all columns are.
_LOOKED_AT_FIRST = 8
# Bytes in which rows are laid out at a time; they stay in a processor's cache from the copying to the hashing.
_MOST_BYTES = 1 << 20
# Kinds of batches for which a thread keeps the memory. Fresh memory comes from the kernel page by page, which takes
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
        """Create the layout of ``rows`` rows of ``length`` bytes."""
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

    If only some rows of a field need float64 or uint64, the two kinds of rows are hashed separately: the hash of a row
    does not depend on the rows beside it.

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
    """Return a mask of the rows of uint64 or float64 that do not fit in int64 or float32, bool ``[B]``."""
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
    """Return a mask of the rows in which float32 would lose information, bool ``[B]``."""
    with np.errstate(over="ignore", invalid="ignore"):
        # Back again: two arrays of one dtype are compared three times as fast.
        differs = flat.astype(np.float32).astype(flat.dtype) != flat
    if not differs.any():
        return np.zeros(len(flat), np.bool_)
    differs &= flat == flat  # a NaN differs from itself
    lost: npt.NDArray[np.bool_] = differs.any(axis=1)
    return lost


_MODULUS = 1 << 128


@dataclass(frozen=True)
class StreamDigest:
    """A 128-bit digest of delivered batches, which may be added over batches and ranks in any order.

    It is the sum modulo 2**128 of one hash (XXH3) for each window, of the batch's index, the window's row in the whole
    batch, and the names, kinds, shapes and values of all its fields. Two digests with as many windows are equal if the
    same windows came at the same places, and, but for accidents of one in 2**64 and less, only then. A sum does
    not say in which order batches were taken, only which number each had. It finds what goes wrong by mistake; who
    wants to can make two streams of one digest.

    Values are compared as ``mouse_core.testing.stream_digest`` does, window by window: how wide a number is stored is
    not a difference, all NaNs are one value, -0.0 and 0.0 are two.

    Args:
        total: The sum, in ``[0, 2**128)``.
        windows: How many windows are in it.

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
        """The digest of one batch, or of a rank's share of it.

        Args:
            index: Its number in the stream.
            batch: A mapping of names to arrays ``[B, ...]`` of any framework, nested as rows are, or a tuple of such
                views. A number or a text in place of an array is that of every window.
            first_row: Which row of the whole batch the first one here is; or that of each of them, where rows of the
                batch beyond those named are left out, and those of which it is negative.

        Raises:
            DataError: The arrays differ in how many rows they have, or two names are the same as texts.
            TypeError: Something that is no array of numbers or texts; an object's fields are given as ``vars(it)``.
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
        """The digest of both, which should have no window in common."""
        if not isinstance(other, StreamDigest):
            return NotImplemented
        return StreamDigest((self.total + other.total) % _MODULUS, self.windows + other.windows)

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.total:032x}"

    def __str__(self) -> str:
        return f"{self.hexdigest()} of {self.windows} windows"

    def state_dict(self) -> dict[str, Any]:
        """The digest as a text and an integer."""
        return {"total": self.hexdigest(), "windows": self.windows}

    @classmethod
    def from_state(cls, state: Any) -> StreamDigest:
        """The digest that ``state_dict()`` is of; StateError where it is of none."""
        try:
            total = int(state["total"], 16)
            windows = state_number("windows", state["windows"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"state: expected a digest with total and windows, found {state!r:.100}") from error
        if not 0 <= total < _MODULUS:
            raise StateError(f"state: expected a digest of 32 hexadecimal digits, found {state['total']!r:.100}")
        return cls(total, windows)


# ---------------------------------------------------------------------- batches


def _leaves(batch: Any) -> dict[str, npt.NDArray[Any]]:
    """The fields of a batch of any framework, nested ones too, by their names as text, in the order of these.

    What is one value and no array of them, such as a temperature, is that of every window.
    """
    if type(batch) is dict and all(map(_is_plain, batch.values())) and set(map(type, batch)) == {str}:
        # Most are, and what takes 3 us here alone takes 20 between the steps of a training.
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
    """Whether a field is an array of plain numbers in NumPy's own memory."""
    return type(values) is np.ndarray and values.ndim > 0 and values.dtype.kind in "biuf"


@lru_cache(maxsize=256)
def _paths(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """The fields of a flat batch, as ``_collect`` calls them and by their names, in the order of the former."""
    return sorted((f"/{_escaped(name)}", name) for name in names)


def _collect(tree: Any, path: str, found: dict[str, npt.NDArray[Any]], ones: set[str]) -> None:
    """Put the fields below ``path`` into ``found``, and the names of those that are one value into ``ones``."""
    if hasattr(tree, "keys"):  # a TensorDict is no Mapping
        for name in tree.keys():  # noqa: SIM118  and iterates over its rows
            _collect(tree[name], f"{path}/{_escaped(str(name))}", found, ones)
    elif isinstance(tree, tuple):
        for number, child in enumerate(tree):
            _collect(child, f"{path}/{number}", found, ones)
    elif tree is not None:
        if path in found:
            raise DataError(f"digest: expected names that differ as texts, found {path[1:]!r} twice")
        found[path] = _leaf(tree, path)
        if not isinstance(tree, list) and not getattr(tree, "ndim", 0):
            ones.add(path)


def _escaped(name: str) -> str:
    """A name as in a JSON pointer: the field "a/b" is not "b" of "a"."""
    return name.replace("~", "~0").replace("/", "~1") if "/" in name or "~" in name else name


def _leaf(values: Any, path: str) -> npt.NDArray[Any]:
    """A field as an array ``[B, ...]`` of a dtype with bytes of its own; one value is ``[1]``."""
    if isinstance(values, list):  # rows of differing length
        return _hashed(values, path)
    if hasattr(values, "detach"):
        values = widened(values)  # NumPy has no bfloat16 to offer to torch
    array = host_array(values)
    if array.dtype.kind in "SU" or _is_of_rows(array):
        return _hashed(array.tolist() if array.ndim else [array.item()], path)
    if array.dtype.kind == "c":  # the two parts, side by side
        array = np.stack([array.real, array.imag], axis=-1)
    if array.dtype.kind not in "biuf" and not is_ml_float(array.dtype):
        raise TypeError(
            f"digest: expected an array of numbers or texts, found {type(values).__name__} ({array.dtype}) in "
            f"{path[1:] or 'place of the batch'}; give the fields of an object by name, as vars(it) does"
        )
    return array if array.ndim else array[None]


def _is_of_rows(array: npt.NDArray[Any]) -> bool:
    """Whether it is an array of Python's objects, and not one of them that came as no array."""
    return array.dtype.kind == "O" and (array.ndim > 0 or isinstance(array.item(), str | bytes))


def _hashed(rows: Sequence[Any], path: str) -> npt.NDArray[np.uint8]:
    """A digest of each row in place of the row, uint8 ``[B, 16]``."""
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
        raise DataError(f"digest: expected fields of as many rows each, found {said!r:.300}")
    return rows.pop()


# ---------------------------------------------------------------------- in the states of loaders and buffers

KEY = "digest"
"""What the digest is called in a state."""


def digest_state(digest: StreamDigest | None) -> dict[str, Any]:
    """Return the state of a running digest; empty without one."""
    return {} if digest is None else {KEY: digest.state_dict()}


def digest_of(state: Mapping[str, Any], digest: StreamDigest | None) -> StreamDigest | None:
    """The digest to go on with, in place of ``digest``, where one runs along: that of the state, or one of nothing.

    Raises:
        StateError: That of the state is none.
    """
    if digest is None:
        return None
    return StreamDigest.from_state(state[KEY]) if KEY in state else StreamDigest()


def asked_for(digest: StreamDigest | None, maker: str) -> StreamDigest:
    """The digest that runs along; ConfigError where none does."""
    if digest is None:
        raise ConfigError(f"digest: expected a {maker} made with digest=True, found one without")
    return digest


def rank_state(digest: StreamDigest, shard: tuple[int, int]) -> dict[str, Any]:
    """A digest as a part of a state, with the rank whose it is and how many there are."""
    rank, count = shard
    return {**digest.state_dict(), "rank": rank, "ranks": count}


def rank_digest(state: Any, shard: tuple[int, int]) -> StreamDigest:
    """The digest with which a rank goes on: that of a whole stream in the first rank; else one of nothing.

    What one process delivered, or all ranks together (``whole_state``), is carried on by rank 0 and by nobody else, so
    that the sum over ranks has it once. Of the digest of one rank among several none can know whether the others were
    given theirs, or all were given this one. If some went on and others began again, the sum would be no stream's; so
    all begin again.

    Raises:
        StateError: It is none.
    """
    if state is None:
        return StreamDigest()
    found = StreamDigest.from_state(state)
    is_whole = (state.get("rank"), state.get("ranks")) == (0, 1)
    return found if is_whole and shard[0] == 0 else StreamDigest()


def whole_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks of a loader with ``digest=True`` as one: that of a single process that delivered it all.

    Its digest is that of the whole stream. Loaded by all ranks of a run of any size it is carried on by rank 0, while
    the others begin with nothing: at any later moment the digests of all ranks add up to the stream's.

    Args:
        states: Of every rank, each once, in any order, taken at the same batch.

    Raises:
        StateError: A rank is missing or there twice, the states are of other moments or sources, or one has no digest.

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
        raise StateError("states: expected those of all ranks, found none")
    total, seen = StreamDigest(), []
    rest = _without_digest(states[0])
    for place, state in enumerate(states):
        if not isinstance(state, Mapping) or not isinstance(state.get(KEY), Mapping):
            raise StateError(f"states: expected a state with a digest at {place}, found {state!r:.200}")
        differing = [name for name in {**rest, **_without_digest(state)} if rest.get(name) != state.get(name)]
        if differing:
            said = {name: (rest.get(name), state.get(name)) for name in differing}
            raise StateError(f"states: expected those of one batch, found others at 0 and at {place}: {said!r:.200}")
        total += StreamDigest.from_state(state[KEY])
        seen.append((state[KEY].get("ranks"), state[KEY].get("rank")))
    if sorted(seen, key=repr) != sorted(((len(states), rank) for rank in range(len(states))), key=repr):
        found = ", ".join(f"rank {rank} of {count}" for count, rank in seen)
        raise StateError(f"states: expected each of {len(states)} ranks once, found {found:.200}")
    return {**rest, KEY: rank_state(total, (0, 1))}


def _without_digest(state: Any) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != KEY} if isinstance(state, Mapping) else {}
