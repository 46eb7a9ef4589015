"""RowMap: values by rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core._base.tracing import refuse_traced
from mouse_core.errors import ConfigError, DataError, MissingRowError, SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.maps._index import Full, RowIndex
from mouse_core.maps._rows import KeyRows, as_index, check_combining, fields_of, filled, pick, shown
from mouse_core.maps._stored import Stored
from mouse_core.nested import FieldKey, as_lists, copied, flatten, map_tree
from mouse_core.randomness import check_seed
from mouse_core.replay.protocols import Storage

Integers = npt.NDArray[np.int64]

_KIND = "row map"
_FORMAT = 1


class RowMap:
    """A map whose keys are rows: fields of any dtype, compared exactly, and values that are rows, too.

    Rows are trees of arrays ``[n, ...]`` with the fields of the first write; ``n`` keys are written or looked up by one
    call. They are found by the first word of ``row_hash`` and then compared byte by byte, so that no two rows are ever
    taken for one. -0.0 and 0.0 are two keys; a NaN is the same key as one of the same bits.

    Of a row that comes twice in one write the last values count. A map to which no values are given is a set of rows.

    Each row has an index, int64, in the order of the first writes: what else is known of it can stand in arrays.

    Args:
        keys: The fields of rows that are the key; None: all that they have.
        values: The fields of values that are kept; None: all that they have.
        capacity: How many rows it holds; None: as many as come.
        full: What happens to rows that are new to a full map: "refuse" raises and changes nothing; "oldest" drops those
            that were added first, whose indices the new ones take. Rows of the write itself stay.
        storage: Where rows lie: a storage of keys, or a pair of storages of keys and of values, such as two
            ``MemmapStorage`` that several processes share; None: in memory. Their capacity is the map's.
        seed: Names the hash, in ``[0, 2**64)``; nothing that is delivered depends on it.

    Raises:
        ConfigError: An argument out of range, or storages that do not go together.
        StateError: Storages whose rows are no keys and values.

    Example:
        >>> import numpy as np
        >>> from mouse_core.maps import RowMap
        >>> visits = RowMap(keys=["observation"])
        >>> rows = {"observation": np.array([[0.5, 1.0], [2.0, 3.0], [0.5, 1.0]])}
        >>> visits.accumulate(rows, 1).tolist()
        [0, 1, 0]
        >>> visits[rows].tolist()
        [2, 1, 2]
        >>> visits.contains({"observation": np.zeros((1, 2))}).tolist()
        [False]
    """

    __contains__ = __iter__ = None  # contains() asks of many rows at once

    def __init__(
        self,
        keys: Iterable[FieldKey] | None = None,
        *,
        values: Iterable[FieldKey] | None = None,
        capacity: int | None = None,
        full: Full = "refuse",
        storage: Storage | tuple[Storage, Storage] | None = None,
        seed: int = 0,
    ) -> None:
        self._key_fields = fields_of("keys", keys)
        self._value_fields = fields_of("values", values)
        if full not in ("refuse", "oldest"):
            raise ConfigError(f"full: expected 'refuse' or 'oldest', found {full!r}")
        self._full = full
        self._seed = check_seed(seed)
        self._keys, self._values = Stored.pair(storage, capacity)
        self._rows = RowIndex(self._keys, self._values, full, self._seed)
        if full == "oldest" and self._keys.grows:
            raise ConfigError("full: expected a capacity for 'oldest', found none")
        self._lock = ProcessLock()
        with self._held():
            pass

    def __repr__(self) -> str:
        room = "" if self._keys.grows else f" of {self.capacity}"
        return f"{type(self).__name__}({len(self)}{room} rows)"

    def __len__(self) -> int:
        """Rows there are."""
        with self._held():
            return self._rows.size

    @property
    def capacity(self) -> int | None:
        """The largest number of rows; None for no limit."""
        return None if self._keys.grows else self._keys.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of memory: of the table in which rows are found, and of storages that tell theirs."""
        return self._rows.table.nbytes + self._keys.nbytes + self._values.nbytes

    # ------------------------------------------------------------------ looking up

    def index(self, rows: Any) -> Integers:
        """The index of each row, int64 ``[n]``; -1 of those that are not there.

        Raises:
            SchemaError: Rows unlike those of the first write.
        """
        picked = self._picked(rows)
        with self._held():
            return self._rows.slots(self._rows.find(picked))

    def contains(self, rows: Any) -> npt.NDArray[np.bool_]:
        """Whether each row is there, bool ``[n]``; errors as ``index``."""
        return self.index(rows) >= 0

    def __getitem__(self, rows: Any) -> Any:
        """The values of rows: a tree of arrays ``[n, ...]`` in fresh memory.

        Raises:
            MissingRowError: A row that is not there (also a KeyError); ``get`` gives another value in its place.
            SchemaError: Rows unlike those of the first write, or no values were ever written.
        """
        picked = self._picked(rows)
        with self._held():
            slots = self._rows.slots(self._rows.find(picked))
            missing = np.flatnonzero(slots < 0)
            if missing.size:
                row = int(missing[0])
                raise MissingRowError(
                    f"map: expected rows that are there, found {missing.size} of {slots.size} that are not, first "
                    f"row {row}, {shown(picked, row)}; get(rows, default) takes them, contains(rows) tells which"
                )
            return self._deliver(self._values.get(slots))

    def get(self, rows: Any, default: Any = 0) -> Any:
        """The values of rows, and ``default`` where a row is not there.

        Args:
            rows: The rows.
            default: A number, or a tree like the values with one value a field. As long as no values were written it
                alone says what the result is like.

        Raises:
            SchemaError: Rows unlike those of the first write; a default that is unlike the values.
        """
        picked, default = self._picked(rows), self._accept(default)
        with self._held():
            slots = self._rows.slots(self._rows.find(picked))
            if not len(self._values):
                return self._deliver(map_tree(lambda leaf: np.repeat(np.asarray(leaf)[None], slots.size, 0), default))
            there = slots >= 0
            found = self._values.get(np.where(there, slots, 0))
            return self._deliver(found if there.all() else filled(found, ~there, default))

    def rows(self, index: Any = None) -> Any:
        """The keys of rows by their index, or of all in the order of their index, in fresh memory.

        Raises:
            IndexError: An index that is not in use.
            SchemaError: No integers, or no rows were ever written.
        """
        return self._by_index(self._keys, index)

    def values(self, index: Any = None) -> Any:
        """The values of rows by their index, or of all, as ``rows``.

        Raises:
            IndexError: An index that is not in use.
            SchemaError: No integers, or no values were ever written.
        """
        return self._by_index(self._values, index)

    # ------------------------------------------------------------------ writing

    def __setitem__(self, rows: Any, values: Any) -> None:
        """Write values under rows: what stood there goes. See ``extend``."""
        self.extend(rows, values)

    def extend(self, rows: Any, values: Any = None) -> Integers:
        """Write values under rows, which are added if they are not there.

        Args:
            rows: ``n`` rows; of one that comes twice the last values count.
            values: A tree of arrays ``[n, ...]``; a number alone stands in every row. None: none, in a map that
                has rows alone.

        Returns:
            Each row's index, int64 ``[n]``.

        Raises:
            SchemaError: Rows or values unlike those of the first write, or values in some writes and none in others.
            DataError: As many values as rows are expected, or there is no room. Nothing has changed then.
        """
        picked = self._picked(rows)
        with self._held():
            return self._rows.write(picked, None if values is None else self._as_values(values, picked.n))

    def accumulate(self, rows: Any, values: Any, how: np.ufunc = np.add) -> Integers:
        """Add values to those that stand under rows, each row as often as it comes; new rows begin with theirs.

        Gives each row's index, int64 ``[n]``.

        ``visits.accumulate(rows, 1)`` counts, where ``visits[rows] = visits.get(rows) + 1`` counts a row that comes
        twice only once.

        Args:
            rows: ``n`` rows.
            values: As for ``extend``; all fields are numbers.
            how: A ufunc of two numbers, such as ``np.add``, ``np.maximum`` or ``np.minimum``.

        Raises:
            SchemaError, DataError: As ``extend``.
            ConfigError: ``how`` is none.
        """
        check_combining(how)
        picked = self._picked(rows)
        with self._held():
            given = self._as_values(values, picked.n)
            if given.schema.varying:
                raise SchemaError(f"accumulate: expected numbers, found {list(given.schema.varying)}")
            which, first = self._rows.distinct(picked, None)
            slots = self._rows.slots(self._rows.find(picked, first))
            known = np.flatnonzero(slots >= 0)
            stored = flatten(self._values.get(slots[known])) if known.size else {}
            sums = [array[first] for array in given.arrays]
            again = np.ones(picked.n, np.bool_)
            again[first] = False
            for total, (key, array) in zip(sums, zip(given.schema.fields, given.arrays, strict=True), strict=True):
                how.at(total, which[again], array[again])
                if known.size:
                    total[known] = how(stored[key], total[known])
            written = self._rows.write(picked.only(first), KeyRows(given.schema, sums, sums, first.size))
            return written[which]

    def empty(self) -> None:
        """Forget all rows."""
        with self._held():
            self._keys.empty()
            self._values.empty()

    # ------------------------------------------------------------------ what users give and get

    def _picked(self, rows: Any) -> KeyRows:
        """The keys of rows, checked."""
        refuse_traced("map")
        picked = pick(self._accept(rows), self._key_fields)
        with self._held():
            return KeyRows.of(picked, self._keys.schema, ragged=self._keys.ragged)

    def _as_values(self, values: Any, n: int) -> KeyRows:
        """Values of ``n`` rows, checked."""
        kept = self._values
        given = KeyRows.of(pick(self._accept(values), self._value_fields), kept.schema, n=n, ragged=kept.ragged)
        if given.n != n:
            raise DataError(f"map: expected the values of {n} rows, found those of {given.n}")
        return given

    def _accept(self, rows: Any) -> Any:
        """Rows of a framework as trees of NumPy arrays; for a subclass to override."""
        return rows

    def _deliver(self, rows: Any) -> Any:
        """A tree of NumPy arrays as a framework takes it; for a subclass to override."""
        return as_lists(rows)

    def _by_index(self, part: Stored, index: Any) -> Any:
        with self._held():
            if index is None:
                slots = np.sort(self._keys.slots(np.arange(self._rows.oldest, self._keys.written)))
            else:
                slots = as_index(self._accept(index))
            return self._deliver(part.get(slots))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Nobody else reads or writes meanwhile, and what others wrote before is known."""
        with self._lock, self._keys.lock(), self._values.lock():
            self._rows.catch_up()
            yield

    # ------------------------------------------------------------------ saved

    def state_dict(self) -> dict[str, Any]:
        """All there is: keys and values, as long as the data, in nested dicts of plain values and arrays."""
        with self._held():
            return dict(copied(self._state()))

    def _state(self) -> dict[str, Any]:
        parts = {"keys": self._keys.storage.state()}
        if self._values.written:
            parts["values"] = self._values.storage.state()
        return {"kind": _KIND, "format": _FORMAT, "grows": self._keys.grows, **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have exactly the rows, values and indices that were there when ``state`` was taken.

        Raises:
            StateError: The state is of something else, of a map of another capacity, of a newer release, or damaged.
                Nothing has changed then.
        """
        kind = state.get("kind") if isinstance(state, Mapping) else state
        if not isinstance(state, Mapping) or kind != _KIND:
            raise StateError(f"state: expected that of a {_KIND}, found {kind!r:.80}")
        if (version := state.get("format")) != _FORMAT:
            raise StateError(f"state: expected format {_FORMAT}, found {version!r:.80} (of a newer release?)")
        if state.get("grows") is not self._keys.grows:
            raise StateError(f"state: expected that of a map with the capacity {self.capacity}, found another")
        with self._held():
            parts = self._keys.loaded(state.get("keys")), self._values.loaded(state.get("values"))
            keys, values = Stored(parts[0], "keys"), Stored(parts[1], "values")
            RowIndex(keys, values, self._full, self._seed).catch_up()  # finds what is damaged
            self._keys.take_over(parts[0])
            self._values.take_over(parts[1])
            self._rows.forget()

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save all there is to a file, as long as the data, or leave what was there.

        Args:
            path: A file; or a directory that exists, in which it is called ``replay.mouse``.

        Raises:
            StorageError: The file cannot be written (also an OSError).
        """
        with self._held():
            write_checkpoint(path, self._state())

    def loads(self, path: str | PathLike[str]) -> None:
        """Have exactly what was there when ``dumps`` was called.

        Raises:
            StateError: The file is damaged, or of something else; nothing has changed then.
            StorageError: It cannot be read (also an OSError).
        """
        self.load_state_dict(read_checkpoint(path))
