"""``RowMap``: a map from rows to values; its operations take many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import state_number
from mouse_core._base.locks import ProcessLock
from mouse_core._base.tracing import refuse_traced
from mouse_core.columns.memory import RowSchema
from mouse_core.errors import ConfigError, DataError, MissingRowError, SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.maps.hashing import KeyRows, fields_of, filled, hash_rows, last_of, pick, schema_words
from mouse_core.nested import FieldKey, as_lists, copied, flatten, is_varying, map_tree
from mouse_core.randomness import check_seed
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.spec import check_count

Integers = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class GrowingRows:
    """The keys or the values of a map, stored by index: rows in memory that is enlarged when needed.

    Args:
        capacity: The number of rows for which the first write allocates memory; None: memory for a few rows.
    """

    def __init__(self, capacity: int | None) -> None:
        self.storage = ArrayStorage(_FIRST_CAPACITY if capacity is None else capacity)
        self._schema: RowSchema | None = None

    @classmethod
    def of(cls, state: Any, capacity: int | None) -> GrowingRows:
        """Return the rows of a state.

        Raises:
            StateError: The state is damaged.
        """
        made = cls(capacity)
        if capacity is None and isinstance(state, Mapping):
            size = state_number("size", state.get("size"), where="storage")
            made.storage = ArrayStorage(max(_FIRST_CAPACITY, size))
            state = {**state, "capacity": made.storage.capacity}
        made.storage.load(state)
        if made.written > len(made.storage):
            raise StateError(f"map: expected {made.written} rows in the state, found {len(made.storage)}")
        return made

    @property
    def written(self) -> int:
        """The number of rows."""
        return self.storage.written

    @property
    def schema(self) -> RowSchema | None:
        """The schema of the rows; None before the first row is written."""
        if self._schema is None and self.written:
            first = self.storage.get(np.zeros(1, np.int64))
            ragged = [
                key for key, leaf in flatten(first).items() if is_varying(leaf) and isinstance(leaf[0], np.ndarray)
            ]
            self._schema = RowSchema.of(first, 1, 1, ragged)
        return self._schema

    def write(self, rows: Any, schema: RowSchema, n: int, first: int) -> None:
        """Write rows to the indices from ``first`` on. ``first`` is the next unused index or, after a write that
        failed, an earlier index.
        """
        if not n:
            return
        if first + n > self.storage.capacity:
            larger = ArrayStorage(max(2 * self.storage.capacity, first + n))
            if self.written:
                larger.load({**self.storage.state(), "capacity": larger.capacity})
            self.storage = larger
        there = min(n, self.written - first)
        if there > 0:
            tree = map_tree(lambda leaf: leaf[:there], rows)
            self.storage.put(np.arange(first, first + there), tree)
            rows = map_tree(lambda leaf: leaf[there:], rows)
        if there < n:
            self.storage.append(rows)
        self._schema = schema


Hashes = npt.NDArray[np.uint64]

_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_LEAST_BITS = 6
_ONE_MARK = np.uint64(1 << 32)
_MOST = (1 << 31) - 2


class RowTable:
    """A hash table that maps hashes of rows to the indices of the rows.

    An entry has 64 bits: 31 bits of the hash, one bit that is 1, and 32 bits with the index of a row plus 1. An empty
    entry is 0. Another 32 bits of the hash determine the first slot to probe. These 32 bits are stored in a second
    array, so that the table can be enlarged without reading rows. At most half of the entries are used.
    """

    def __init__(self) -> None:
        self._bits = _LEAST_BITS
        self._entries = np.zeros(1 << _LEAST_BITS, np.uint64)
        self._places = np.zeros(1 << _LEAST_BITS, np.uint32)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """The size of the table in bytes."""
        return self._entries.nbytes + self._places.nbytes

    def find(self, hashes: Hashes, same: Callable[[Integers, Integers], npt.NDArray[np.bool_]]) -> Integers:
        """Return the index of each row; -1 for a row that is absent.

        Args:
            hashes: The hashes of the rows, ``[n]``.
            same: A function that returns whether stored rows, given by their indices, equal the rows at given positions
                of ``hashes``.
        """
        return self._settle(hashes, same, None)[0]

    def add(
        self,
        hashes: Hashes,
        same: Callable[[Integers, Integers], npt.NDArray[np.bool_]],
        following: int,
        later: int = 0,
    ) -> tuple[Integers, Integers]:
        """Return the index of each row; absent rows are added with the indices ``following``, ``following + 1``, ...

        Args:
            hashes: The hashes of the rows, ``[n]``.
            same: See ``find``; here, stored indices also include ``following + p``, which means the row at position
                ``p``.
            following: The index of the next new row.
            later: The number of rows that are expected in later calls.

        Returns:
            Two arrays: the indices, ``[n]``; and the positions of the first occurrences of new rows, in ascending
            order.
        """
        self._make_room(len(hashes), following, later)
        numbers, at = self._settle(hashes, same, following)
        new = np.flatnonzero(at >= 0)
        if not new.size:
            return numbers, new
        if new[-1] >= new.size:  # repeated rows left gaps between the numbers
            rank = np.full(len(hashes), -1, np.int64)
            rank[new] = np.arange(new.size)
            fresh = numbers >= following
            numbers[fresh] = following + rank[numbers[fresh] - following]
            self._entries[at[new]] = self._entry(hashes[new], numbers[new])
        self._places[at[new]] = hashes[new] >> _HALF
        self._used += new.size
        return numbers, new

    def _entry(self, hashes: Hashes, numbers: Integers) -> npt.NDArray[np.uint64]:
        return _marks(hashes) | (numbers + 1).astype(np.uint64)

    def _first(self, hashes: Hashes) -> Integers:
        """Return the first slot to probe for each hash."""
        first: Integers = (hashes >> np.uint64(64 - self._bits)).view(np.int64)
        return first

    def _settle(
        self, hashes: Hashes, same: Callable[[Integers, Integers], npt.NDArray[np.bool_]], following: int | None
    ) -> tuple[Integers, Integers]:
        """Return two arrays: the index of each row; and the position of the entry of each new row, -1 for rows that are
        not new.
        """
        marks, position = _marks(hashes), self._first(hashes)
        todo = np.arange(len(hashes))
        numbers, new = np.full(len(hashes), -1, np.int64), np.full(len(hashes), -1, np.int64)
        while todo.size:
            found, at, claimed = self._probe(marks, position, todo, following)
            if claimed.size:
                new[todo[claimed]] = at[claimed]
            numbers[todo] = found
            old = found >= 0
            old[claimed] = False
            met = np.flatnonzero(old)
            wrong = met[~same(found[met], todo[met])]
            # Entries of other rows with equal hash bits, about one in 2**31, are skipped.
            todo, position = todo[wrong], (at[wrong] + 1) & self._most
            marks = marks[wrong]
        return numbers, new

    def _probe(
        self, marks: npt.NDArray[np.uint64], position: Integers, places: Integers, following: int | None
    ) -> tuple[Integers, Integers, Integers]:
        """Probe from the given positions on, up to the first entry that has the same hash bits or is empty.

        All rows are probed in parallel, round by round. Rows that reach an empty entry write their own entry. If
        several rows reach the same entry, the first row is written last, so its entry stays; the other rows find this
        entry in the next round.

        Returns:
            Three arrays. Two arrays have an element for each row: the index in the entry, or -1 for an empty entry; and
            the position of the entry. The third array lists the rows that have just written their entries.
        """
        claimed = []
        entries = self._entries.take(position)
        found, at = self._numbers(entries), position
        rows = np.flatnonzero((entries ^ marks) >= _ONE_MARK)
        if rows.size:
            entries, position, at = entries[rows], position[rows], position.copy()
        while rows.size:
            free = entries == 0
            position = position + ~free
            if free.any():
                empty, leaving = np.flatnonzero(free), free
                if following is None:
                    found[rows[empty]] = -1
                else:
                    there, claims = position[empty], rows[empty]
                    mine = marks[claims] | (places[claims] + (following + 1)).astype(np.uint64)
                    self._entries[there[::-1]] = mine[::-1]
                    won = self._entries.take(there) == mine
                    winners = claims[won]
                    at[winners], found[winners] = there[won], following + places[winners]
                    claimed.append(winners)
                    leaving[empty[~won]] = False
                left = np.flatnonzero(~leaving)
                rows, position = rows[left], position[left]
            position &= self._most
            entries = self._entries.take(position)
            alike = (entries ^ marks[rows]) < _ONE_MARK
            met, left = np.flatnonzero(alike), np.flatnonzero(~alike)
            done = rows[met]
            found[done], at[done] = self._numbers(entries[met]), position[met]
            rows, entries, position = rows[left], entries[left], position[left]
        return found, at, np.concatenate(claimed) if claimed else np.empty(0, np.int64)

    def _numbers(self, entries: npt.NDArray[np.uint64]) -> Integers:
        """Return the row indices that entries contain."""
        numbers = (entries & _LOW).view(np.int64)
        numbers -= 1
        return numbers

    @property
    def _most(self) -> int:
        return len(self._entries) - 1

    def _make_room(self, coming: int, following: int, later: int) -> None:
        """Enlarge the table, if necessary, for ``coming`` more rows."""
        if following + coming > _MOST:
            raise DataError(f"map: expected at most {_MOST} rows, found {following + coming}")
        if 2 * (self._used + coming) <= len(self._entries):
            return
        there = self._entries != 0
        entries, places = self._entries[there], self._places[there]
        self._bits = max(_LEAST_BITS, (2 * (self._used + coming + later) - 1).bit_length())
        self._entries = np.zeros(1 << self._bits, np.uint64)
        self._places = np.zeros(1 << self._bits, np.uint32)
        # In the order of entries, which is the order in memory.
        order = np.argsort(places)
        entries, places = entries[order], places[order]
        position = (places >> np.uint32(32 - self._bits)).astype(np.int64)
        while entries.size:
            free = self._entries.take(position) == 0
            self._entries[position[free]] = entries[free]
            won = self._entries.take(position) == entries
            self._places[position[won]] = places[won]
            entries, places, position = entries[~won], places[~won], (position[~won] + 1) & self._most


def _marks(hashes: Hashes) -> npt.NDArray[np.uint64]:
    """Return those bits of hashes that entries contain. A result is never 0, because 0 marks an empty entry."""
    marks: npt.NDArray[np.uint64] = (hashes << _HALF) | _ONE_MARK
    return marks


# Number of rows, and of 32-bit words of rows, that are looked up together; they fit into the processor's cache.
_STEP = 1 << 14
_STEP_WORDS = 1 << 20


class RowIndex:
    """An index of distinct rows. Rows get the indices 0, 1, 2, ... in the order of their first writes.

    Args:
        keys: The keys.
        values: The values.
        seed: The seed of the hash function.
        capacity: The largest number of rows; None: no limit.
    """

    def __init__(self, keys: GrowingRows, values: GrowingRows, seed: int, capacity: int | None) -> None:
        self.keys, self.values, self._seed, self._capacity = keys, values, seed, capacity
        self.forget()

    def forget(self) -> None:
        """Mark the table as stale; ``catch_up`` rebuilds the table."""
        self.table = RowTable()
        self._indexed = 0  # number of rows that are in the table

    def catch_up(self) -> None:
        """Add the rows that are missing in the table to the table. Rows are missing after a state was loaded or a write
        failed.

        Raises:
            StateError: Rows occur twice, or have no values.
        """
        keys, values = self.keys, self.values
        if keys.written == self._indexed:
            return
        if 0 < values.written < keys.written:
            raise StateError(
                f"map: expected the values of {keys.written} rows, found the values of {values.written} rows"
            )
        schema = keys.schema
        while self._indexed < keys.written:
            assert schema is not None
            step = min(keys.written - self._indexed, _step(schema_words(schema)))
            begin = self._indexed
            rows = KeyRows.of(keys.storage.get(np.arange(begin, begin + step)), schema)

            def same(found: Integers, at: Integers, rows: KeyRows = rows, begin: int = begin) -> Any:
                alike, old = found >= begin, found < begin
                alike[alike] = ~rows.differ(at[alike], rows, found[alike] - begin)
                alike[old] = self._is_stored(rows, at[old], found[old])
                return alike

            later = keys.written - begin - step
            new = self.table.add(self._hashes(rows, slice(0, step)), same, begin, later)[1]
            if new.size != step:
                raise StateError("map: expected distinct keys, found a key twice")
            self._indexed += step

    def write(self, rows: KeyRows, values: KeyRows | None) -> Integers:
        """Write checked rows; see ``extend``."""
        keys, valued = self.keys, self.values.written > 0
        if keys.written and valued != (values is not None):
            raise SchemaError(
                f"map: expected {'' if valued else 'no '}values, as in earlier writes, "
                f"found {'no ' if valued else ''}values"
            )
        if not rows.n:
            return np.empty(0, np.int64)
        self._check_room(rows)
        first = keys.written
        try:
            numbers, new = self._added(rows, first)
            if values is not None:  # values first, because a row counts when its key is written
                self._put_values(numbers, values, first, new.size)
            keys.write(rows.take(_places(new, rows.n)), rows.schema, new.size, first)
        except BaseException:
            self.forget()
            raise
        self._indexed = keys.written
        return numbers

    def _check_room(self, rows: KeyRows) -> None:
        """Raise DataError if the new rows would exceed the capacity; nothing was changed before."""
        capacity, here = self._capacity, self.keys.written
        if capacity is None or here + rows.n <= capacity:
            return
        new = np.flatnonzero(self.find(rows) < 0)
        distinct = self.distinct(rows, new)[1].size
        if here + distinct > capacity:
            raise DataError(
                f"map: expected at most {capacity - here} new rows, found {distinct}: {here} of {capacity} are used"
            )

    def distinct(self, rows: KeyRows, chosen: Integers | None) -> tuple[Integers, Integers]:
        """Assign the indices 0, 1, 2, ... to the distinct rows; return the index of each row, and the position of the
        first occurrence of each index.
        """
        places = np.arange(rows.n) if chosen is None else chosen
        return RowTable().add(
            self._hashes(rows, places), lambda found, at: ~rows.differ(places[at], rows, places[found]), 0
        )

    def _added(self, rows: KeyRows, first: int) -> tuple[Integers, Integers]:
        """Return the index of each row, and the position of the first occurrence of each new row. New rows get the
        indices from ``first`` on.
        """
        numbers, news = np.empty(rows.n, np.int64), np.empty(rows.n, np.int64)
        following = first
        for part in _parts(rows):

            def same(found: Integers, at: Integers, begin: int = part.start, now: int = following) -> Any:
                alike = np.zeros(len(found), np.bool_)
                stored = found < first
                if stored.any():
                    alike[stored] = self._is_stored(rows, begin + at[stored], found[stored])
                # rows of this write: from earlier parts, in the order of their numbers, or from this part
                if not stored.all():
                    own = np.flatnonzero(found >= first)
                    places = np.where(
                        found[own] < now, news[(found[own] - first).clip(max=rows.n - 1)], found[own] - now + begin
                    )
                    alike[own] = ~rows.differ(begin + at[own], rows, places)
                return alike

            # The share of new rows so far is an estimate for the rest.
            later = (following - first) * (rows.n - part.stop) // max(part.start, 1)
            numbers[part], new = self.table.add(self._hashes(rows, part), same, following, later)
            news[following - first : following - first + new.size] = part.start + new
            following += new.size
        return numbers, news[: following - first]

    def _put_values(self, numbers: Integers, values: KeyRows, first: int, new: int) -> None:
        """Write the values of the rows with the indices ``numbers``; the last ``new`` indices belong to new rows."""
        if new == values.n and (numbers == np.arange(first, first + new)).all():
            self.values.write(values.take(None), values.schema, new, first)
            return
        there, last = last_of(numbers)
        known = int(np.searchsorted(there, first))
        if known:
            self.values.storage.put(there[:known], values.take(last[:known]))
        self.values.write(values.take(last[known:]), values.schema, new, first)

    # ------------------------------------------------------------------ rows and their numbers

    def find(self, rows: KeyRows, chosen: Integers | None = None) -> Integers:
        """Return the index of each row; -1 for a row that is absent."""
        n = rows.n if chosen is None else chosen.size
        numbers = np.empty(n, np.int64)
        for part in _parts(rows, n):
            where = np.arange(part.start, part.stop) if chosen is None else chosen[part]

            def same(found: Integers, at: Integers, where: Integers = where) -> Any:
                return self._is_stored(rows, where if at.size == where.size else where[at], found)

            numbers[part] = self.table.find(self._hashes(rows, part if chosen is None else where), same)
        return numbers

    def _is_stored(self, rows: KeyRows, places: Integers, numbers: Integers) -> Any:
        """Return whether each row at the positions ``places`` equals the stored row with the corresponding index in
        ``numbers``.
        """
        if not places.size:
            return np.zeros(0, np.bool_)
        return ~rows.differ(places, KeyRows.of(self.keys.storage.get(numbers), rows.schema), None)

    def _hashes(self, rows: KeyRows, places: slice | Integers) -> npt.NDArray[np.uint64]:
        return hash_rows(rows, self._seed, places)[:, 0]


def _places(new: Integers, n: int) -> Integers | None:
    """Return the positions of new rows. Return None if all ``n`` rows are new: their positions are 0, 1, 2, ..."""
    return None if new.size == n and (new == np.arange(n)).all() else new


def _step(words: int) -> int:
    """Return the number of rows that are looked up at a time, for rows of ``words`` words."""
    return max(1, min(_STEP, _STEP_WORDS // words))


def _parts(rows: KeyRows, n: int | None = None) -> Iterator[slice]:
    n, step = rows.n if n is None else n, _step(rows.words)
    for begin in range(0, n, step):
        yield slice(begin, min(begin + step, n))


_KIND = "row map"
_FORMAT = 1


class RowMap:
    """A map whose keys and values are rows, with fields of any dtype. Keys are compared exactly.

    Rows are trees of arrays ``[n, ...]`` with the fields of the first write; one call writes or looks up ``n`` keys.
    Rows are found by the first word of ``row_hash`` and then compared byte by byte, so different rows are never merged.
    -0.0 and 0.0 are different keys; NaNs with the same bits are the same key.

    If a row occurs twice in one write, its last values count. A map without values is a set of rows.

    Each row has an index, int64: 0, 1, 2, ... in the order of first writes. The index can be used to address the
    elements of other arrays.

    Args:
        keys: The fields of rows that form the key; None: all fields.
        values: The fields of values that are stored; None: all fields.
        capacity: The largest number of rows, for which the first write allocates memory; None: no limit. A write whose
            new rows would exceed the capacity raises DataError.
        seed: The seed of the hash function, in ``[0, 2**64)``; results do not depend on the seed.

    Raises:
        ConfigError: An argument is out of range.

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

    __contains__ = __iter__ = None  # use contains(), which checks many rows

    def __init__(
        self,
        keys: Iterable[FieldKey] | None = None,
        *,
        values: Iterable[FieldKey] | None = None,
        capacity: int | None = None,
        seed: int = 0,
    ) -> None:
        self._key_fields = fields_of("keys", keys)
        self._value_fields = fields_of("values", values)
        self._seed = check_seed(seed)
        self._capacity = None if capacity is None else check_count("capacity", capacity)
        self._rows = RowIndex(GrowingRows(capacity), GrowingRows(capacity), self._seed, self._capacity)
        self._lock = ProcessLock()

    def __repr__(self) -> str:
        room = "" if self._capacity is None else f" of {self._capacity}"
        return f"{type(self).__name__}({len(self)}{room} rows)"

    def __len__(self) -> int:
        """The number of rows."""
        with self._held():
            return self._rows.keys.written

    @property
    def capacity(self) -> int | None:
        """The largest number of rows; None means no limit."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """The size in bytes of the hash table, the keys and the values."""
        rows = self._rows
        return rows.table.nbytes + rows.keys.storage.nbytes + rows.values.storage.nbytes

    # ------------------------------------------------------------------ looking up

    def index(self, rows: Any) -> Any:
        """Return the index of each row, int64 ``[n]``; -1 for a row that is absent.

        Raises:
            SchemaError: The fields, shapes or dtypes of the rows differ from the first write.
        """
        picked = self._picked(rows)
        with self._held():
            found = self._rows.find(picked)
        return self._deliver(found)

    def contains(self, rows: Any) -> Any:
        """Return whether the map contains each row, bool ``[n]``; raise the errors of ``index``."""
        return self.index(rows) >= 0

    def __getitem__(self, rows: Any) -> Any:
        """Return the values of rows: a tree of arrays ``[n, ...]`` in new memory.

        Raises:
            MissingRowError: A row is absent (also a KeyError); ``get`` returns a default instead.
            SchemaError: The fields, shapes or dtypes of the rows differ from the first write, or no values were ever
                written.
        """
        picked = self._picked(rows)
        with self._held():
            slots = self._rows.find(picked)
            missing = np.flatnonzero(slots < 0)
            if missing.size:
                raise MissingRowError(
                    f"map: expected only rows that the map has, found {missing.size} of {slots.size} rows missing, the "
                    f"first at index {missing[0]}: {picked.take(missing[:1])!r:.120}; get(rows, default) accepts "
                    "missing rows, and contains(rows) finds them"
                )
            return self._deliver(self._written("values").get(slots))

    def get(self, rows: Any, default: Any = 0) -> Any:
        """Return the values of rows, and ``default`` for absent rows.

        Args:
            rows: The rows.
            default: A number, or a tree with the fields of the values and one value for each field. Before the first
                write of values, the result is nested like ``default``.

        Raises:
            SchemaError: The fields, shapes or dtypes of the rows differ from the first write, or ``default`` does not
                have the fields of the values, or a default has another shape than its field.
        """
        picked, default = self._picked(rows), self._accept(default)
        with self._held():
            slots = self._rows.find(picked)
            if not self._rows.values.written:
                return self._deliver(map_tree(lambda leaf: np.repeat(np.asarray(leaf)[None], slots.size, 0), default))
            there = slots >= 0
            found = self._rows.values.storage.get(np.where(there, slots, 0))
            return self._deliver(found if there.all() else filled(found, ~there, default))

    def rows(self, index: Any = None) -> Any:
        """Return the keys of the rows with the given indices, or of all rows in the order of their indices, in new
        memory.

        Raises:
            IndexError: An index is not in use.
            SchemaError: The index does not contain integers, or no rows were ever written.
        """
        return self._by_index("keys", index)

    def values(self, index: Any = None) -> Any:
        """Return the values of the rows with the given indices, or of all rows; see ``rows``.

        Raises:
            IndexError: An index is not in use.
            SchemaError: The index does not contain integers, or no values were ever written.
        """
        return self._by_index("values", index)

    # ------------------------------------------------------------------ writing

    def __setitem__(self, rows: Any, values: Any) -> None:
        """Write the values of rows; earlier values are replaced. See ``extend``."""
        self.extend(rows, values)

    def extend(self, rows: Any, values: Any = None) -> Any:
        """Write the values of rows, and add absent rows.

        Args:
            rows: ``n`` rows; if a row occurs twice, its last values count.
            values: A tree of arrays ``[n, ...]``; a single number applies to every row. None only for a map without
                values.

        Returns:
            The index of each row, int64 ``[n]``.

        Raises:
            SchemaError: The fields, shapes or dtypes of the rows or values differ from the first write, or only some
                writes have values.
            DataError: ``values`` and ``rows`` differ in length, or the new rows would exceed the capacity. The map is
                unchanged.
        """
        picked = self._picked(rows)
        with self._held():
            written = self._rows.write(picked, None if values is None else self._as_values(values, picked.n))
        return self._deliver(written)

    def accumulate(self, rows: Any, values: Any, how: np.ufunc = np.add) -> Any:
        """Combine ``values`` with the stored values of rows by the operation ``how``, once for each occurrence of a
        row; a new row gets its first value.

        Return the index of each row, int64 ``[n]``.

        ``visits.accumulate(rows, 1)`` counts every occurrence, while ``visits[rows] = visits.get(rows) + 1`` counts a
        row that occurs twice only once.

        Args:
            rows: ``n`` rows.
            values: See ``extend``; all fields must be numbers.
            how: A ufunc of two numbers, such as ``np.add``, ``np.maximum`` or ``np.minimum``.

        Raises:
            SchemaError, DataError: See ``extend``.
            ConfigError: ``how`` is not a ufunc of two numbers.
        """
        if not isinstance(how, np.ufunc) or (how.nin, how.nout) != (2, 1):
            raise ConfigError(f"how: expected a ufunc of two numbers, such as numpy.maximum, found {how!r:.80}")
        picked = self._picked(rows)
        with self._held():
            given = self._as_values(values, picked.n)
            if given.schema.varying:
                raise SchemaError(
                    "accumulate: expected only numeric fields, found fields of text or "
                    f"ragged rows, {list(given.schema.varying)}"
                )
            which, first = self._rows.distinct(picked, None)
            slots = self._rows.find(picked, first)
            known = np.flatnonzero(slots >= 0)
            stored = flatten(self._written("values").get(slots[known])) if known.size else {}
            sums = [array[first] for array in given.arrays]
            again = np.ones(picked.n, np.bool_)
            again[first] = False
            for total, (key, array) in zip(sums, zip(given.schema.fields, given.arrays, strict=True), strict=True):
                how.at(total, which[again], array[again])
                if known.size:
                    total[known] = how(stored[key], total[known])
            written = self._rows.write(picked.only(first), KeyRows(given.schema, sums, sums, first.size))
        return self._deliver(written[which])

    def empty(self) -> None:
        """Remove all rows."""
        with self._held():
            self._rows.keys.storage.empty()
            self._rows.values.storage.empty()
            self._rows.forget()

    # ------------------------------------------------------------------ what users give and get

    def _picked(self, rows: Any) -> KeyRows:
        """Check the keys of rows, and return the keys."""
        refuse_traced("map")
        picked = pick(self._accept(rows), self._key_fields)
        with self._held():
            return KeyRows.of(picked, self._rows.keys.schema)

    def _as_values(self, values: Any, n: int) -> KeyRows:
        """Check the values of ``n`` rows, and return the values."""
        given = KeyRows.of(pick(self._accept(values), self._value_fields), self._rows.values.schema, n=n)
        if given.n != n:
            raise DataError(f"map: expected the values of {n} rows, found the values of {given.n} rows")
        return given

    def _accept(self, rows: Any) -> Any:
        """Convert rows of a framework to a tree of NumPy arrays; a subclass overrides this method."""
        return rows

    def _deliver(self, rows: Any) -> Any:
        """Convert a tree of NumPy arrays, or indices, to arrays of a framework; a subclass overrides this method."""
        return as_lists(rows)

    def _written(self, what: Literal["keys", "values"]) -> ArrayStorage:
        """Return the storage of keys or values; raise SchemaError if no keys (or values) were ever written."""
        rows: GrowingRows = getattr(self._rows, what)
        if not rows.written:
            raise SchemaError(f"map: expected at least one write of {what} before this call, found none")
        return rows.storage

    def _by_index(self, what: Literal["keys", "values"], index: Any) -> Any:
        with self._held():
            if index is None:
                slots = np.arange(self._rows.keys.written)
            else:
                slots = np.asarray(self._accept(index))
                if slots.size and slots.dtype.kind not in "iu":
                    raise SchemaError(f"index: expected integers, found {slots.dtype}")
                slots = slots.astype(np.int64)
            return self._deliver(self._written(what).get(slots))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Return a context that holds the map's lock and updates the table."""
        with self._lock:
            self._rows.catch_up()
            yield

    # ------------------------------------------------------------------ saved

    def state_dict(self) -> dict[str, Any]:
        """Return keys and values as nested dicts of plain values and arrays; the result is as large as the data."""
        with self._held():
            return dict(copied(self._state()))

    def _state(self) -> dict[str, Any]:
        parts = {"keys": self._rows.keys.storage.state()}
        if self._rows.values.written:
            parts["values"] = self._rows.values.storage.state()
        return {"kind": _KIND, "format": _FORMAT, "grows": self._capacity is None, **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rows, values and indices of a state.

        Raises:
            StateError: The state is damaged, is not the state of a map, belongs to a map of another capacity, or was
                written by a newer release. The map is unchanged.
        """
        kind = state.get("kind") if isinstance(state, Mapping) else state
        if not isinstance(state, Mapping) or kind != _KIND:
            raise StateError(f"state: expected the state of a {_KIND}, found {kind!r:.80}")
        if (version := state.get("format")) != _FORMAT:
            raise StateError(f"state: expected format {_FORMAT}, found {version!r:.80} (of a newer release?)")
        if state.get("grows") is not (self._capacity is None):
            raise StateError(
                f"state: expected the state of a map with the capacity {self.capacity}, found the state of another map"
            )
        with self._held():
            keys = GrowingRows.of(state.get("keys"), self._capacity)
            values = GrowingRows(self._capacity)
            if state.get("values") is not None:
                values = GrowingRows.of(state["values"], self._capacity)
            rows = RowIndex(keys, values, self._seed, self._capacity)
            rows.catch_up()
            self._rows = rows

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save the state to a file; the file is as large as the data. After an error, an existing file is unchanged.

        Args:
            path: A file; or an existing directory, in which the file ``replay.mouse`` is written.

        Raises:
            StorageError: The file cannot be written (also an OSError).
        """
        with self._held():
            write_checkpoint(path, self._state())

    def loads(self, path: str | PathLike[str]) -> None:
        """Restore the state that ``dumps`` saved.

        Raises:
            StateError: The file is damaged or has other content; the map is unchanged.
            StorageError: The file cannot be read (also an OSError).
        """
        self.load_state_dict(read_checkpoint(path))
