"""A store with computed fields: each is computed once a snapshot, some episodes at a time, when it is first read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.dense import UNKNOWN
from mouse_core._base.identity import derivation_identity
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.dtypes import RowError, convert, to_numpy
from mouse_core.errors import ConfigError, DataError, MissingFieldError, StorageError
from mouse_core.files.checksum import digest
from mouse_core.files.writing import make_folder, replacing, storing
from mouse_core.spec import Field, FieldSpec
from mouse_core.store._chosen import ChosenSegment
from mouse_core.store._segments import Segment, SegmentView
from mouse_core.store.derived.fields import Derivation, EpisodeRows, digest_of
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.about.dataset import About
    from mouse_core.store._episode_table import Episodes

Array = npt.NDArray[Any]


class DerivedSegment(SegmentView):
    """A segment of another snapshot, read as it is, and the derived columns for its rows.

    Args:
        segment: That one.
        number: Which one it is.
        derived: The Arrow types of the derived columns, by name.
        values: Gives the values of such a column for the rows of a segment's table, ``[rows, *shape]``.
    """

    def __init__(
        self, segment: Segment, number: int, derived: Mapping[str, pa.DataType], values: Callable[[str, int], Array]
    ) -> None:
        super().__init__(segment, segment.num_rows)
        self._number, self._derived, self._values = number, derived, values
        # Rows that are appended may change what is derived for the rows before: memory of its own for each snapshot.
        self.extent = None if segment.extent is None else object()

    @property
    def recorded(self) -> Segment:
        """The segment of the recorded rows, without computed columns."""
        return self.whole.recorded

    @memo
    def table(self) -> pa.Table:
        """The steps, with the derived columns."""
        table = self.whole.table
        for name in self._derived:
            table = table.append_column(name, self._column(name))
        return table

    def _slice(self, row: int, count: int) -> pa.Table:
        # Not of the table, which has all rows wherever they lie.
        taken = self.whole.take(row, count)
        for name in self._derived:
            taken = taken.append_column(name, self._column(name).slice(row, count))
        return taken

    def column(self, name: str) -> pa.ChunkedArray | None:
        """A column, of those of the segment without computing the others."""
        return self._column(name) if name in self._derived else self.whole.column(name)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return {**self.whole.types, **self._derived}

    def part(self, name: str) -> ColumnPart:
        """One column; of those of the segment its own part, which keeps what is known of its chunks."""
        if name not in self._derived:
            return self.whole.part(name)
        if name not in self._parts:
            values = partial(self._values, name, self._number)
            self._parts.setdefault(name, _DerivedPart(values, self.chunk_starts))
        return self._parts[name]

    def _column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([to_arrow(self._values(name, self._number))])

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """See ``Segment``; a derived column has a value in every row and is not computed to learn that."""
        if name not in self._derived:
            return self.whole.first_value(name, rows)
        return (0, 0) if rows > 0 else None

    def has_value(self, name: str, rows: int) -> bool:
        """Whether some value among the first ``rows`` rows is not null."""
        return name in self._derived or self.whole.has_value(name, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedSegment, (self.whole, self._number, self._derived, self._values)


class _DerivedPart(ColumnPart):
    """A derived column of one segment, which is one stretch of memory whatever chunks the segment has.

    Args:
        values: Gives that, ``[rows, *shape]``.
        starts: The first row of every chunk, and the end.
    """

    def __init__(self, values: Any, starts: npt.NDArray[np.int64]) -> None:
        super().__init__(lambda: pa.chunked_array([to_arrow(values())]), starts, same_chunks=False)
        self._values = values

    def known(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the address of every chunk's values, and the values of a row; computes the column."""
        if (self.begin == UNKNOWN).any():
            values: Array = self._values()
            with self.lock:
                self.width[:] = prod(values.shape[1:])
                self.begin[:] = values.ctypes.data + self._starts[:-1] * values.strides[0]
        return super().known()


def to_arrow(values: Array) -> pa.Array:
    """Values ``[n, *shape]`` as an Arrow array over the same memory."""
    flat = pa.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


_VERSION = 1
_KEY = b"mouse_derived"


def is_lasting(snapshot: Snapshot) -> bool:
    """Whether all rows are those of datasets, and so there in the next process."""
    segments = snapshot.segments
    return all(_is_lasting(segment) for segment in segments) and snapshot.num_rows == sum(
        segment.num_rows for segment in segments
    )


def _is_lasting(segment: Segment) -> bool:
    segment = segment.recorded
    return _is_lasting(segment.whole) if isinstance(segment, ChosenSegment) else segment.extent is None


def said_of(snapshot: Snapshot, how: object, spec: FieldSpec) -> dict[str, Any]:
    """Return the metadata of a file: its version, and everything that its values depend on."""
    return {
        "version": _VERSION,
        "rows": snapshot.num_rows,
        "fingerprint": snapshot.fingerprint,
        "how": derivation_identity(how),
        "dtype": spec.stored_dtype.name,
        "shape": list(spec.shape),
    }


def load(file: Path, said: Mapping[str, Any], digest: Callable[[str], str]) -> Array | None:
    """The values of a file, ``[rows, *shape]``, mapped; None where there is none of which all that is said holds.

    ``digest`` gives that of a field's values; the file says which fields it was computed from, and what theirs was.
    A file that is damaged or cut counts as none, for what was in it can be computed again.
    """
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            found = json.loads((reader.schema.metadata or {}).get(_KEY, b"null"))
            read, checksum = (found.pop(name) for name in ("read", "values"))
            if found != said or any(digest(name) != read[name] for name in read):
                return None
            batch = reader.get_batch(0)
            batch.validate()
        column = batch.column(0)
        while pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        values: Array = column.to_numpy(zero_copy_only=True)
        # Values of another type, or another number of them, are damage, too.
        shaped: Array = values.view(said["dtype"]).reshape(said["rows"], *said["shape"])
        return shaped if _checksum_of(shaped) == checksum else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MissingFieldError, pa.ArrowException):
        return None


def _checksum_of(values: Array) -> str:
    return digest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def write(file: Path, values: Array, said: Mapping[str, Any], read: Mapping[str, str]) -> None:
    """Write the values of a file, which replace any that it has; ``read`` are digests of the fields behind them.

    Raises:
        StorageError: It cannot be written; the file that was there still is.
    """
    column = to_arrow(np.ascontiguousarray(values))
    whole = {**said, "read": dict(read), "values": _checksum_of(values)}
    schema = pa.schema([(file.stem, column.type)], metadata={_KEY: json.dumps(whole).encode()})
    with storing(f"derived fields: {str(file)!r}"):
        make_folder(file.parent)
        with (
            replacing(file) as partial,
            pa.OSFile(str(partial), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            writer.write_batch(pa.record_batch([column], schema=schema))


# What is computed at a time, in whole episodes: so few rows that intermediate results stay in the processor's cache.
_ROWS = 1 << 17


class DerivedColumns:
    """Derived columns of one snapshot, by segment.

    Args:
        base: The snapshot.
        derivations: How fields are computed, by name.
        computed: Arrays by field and segment that are known already.
        path: A folder in which values are kept, if they are.
        digests: Those that are known of the values of fields that others are computed from, by name.
    """

    def __init__(
        self,
        base: Snapshot,
        derivations: Mapping[str, Derivation],
        computed: Mapping[str, list[Array]] | None = None,
        path: Path | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self.base, self.derivations, self.path = base, derivations, path
        self._computed: dict[str, list[Array]] = dict(computed or {})
        # By field, an earlier snapshot of the store, and what is known of it.
        self._begun: dict[str, tuple[Snapshot, list[Array]]] = {}
        self._digests = dict(digests or {})
        self._fields_read: dict[str, set[str]] = {}
        self._lock = ProcessLock()

    @memo
    def specs(self) -> dict[str, FieldSpec]:
        """The fields, by name.

        Raises:
            ConfigError: A field that is there, or something that is no derivation.
            MissingFieldError: A field is missing that one is computed from.
        """
        found = {}
        for name, derivation in self.derivations.items():
            if name in self.base.spec or name in self.base.config.types:
                raise ConfigError(f"derived fields: expected a name that is not taken, found {name!r}")
            found[name] = derivation.spec(name, self.base.spec)
        return found

    @memo
    def types(self) -> dict[str, pa.DataType]:
        """The columns' Arrow types, by name."""
        return {name: to_arrow(np.empty((0, *one.shape), one.stored_dtype)).type for name, one in self.specs.items()}

    def values(self, name: str, segment: int) -> Array:
        """A field's values for the rows of a segment's table, ``[rows, *shape]``, in the dtype they are kept in.

        Rows that the snapshot does not have are 0.
        """
        with self._lock:
            if name not in self._computed:
                self._computed[name] = self._by_segment(name)
            return self._computed[name][segment]

    def taken_over(self, base: Snapshot) -> DerivedColumns:
        """Return the columns of a later snapshot of the same store, with common rows as they are.

        Episodes that both have whole are not computed again. Where the first snapshot ends, or is another than the
        second, the episode there may go on in the second.
        """
        later = DerivedColumns(base, self.derivations, path=self.path)
        with self._lock:
            # What nobody read of this snapshot may have been read of one before.
            later._begun = {**self._begun, **{name: (self.base, arrays) for name, arrays in self._computed.items()}}
        return later

    def _known_before(self, name: str) -> tuple[int, list[Array] | None]:
        """The first row that must be computed, and arrays by segment that have the rows before it."""
        if name not in self._begun:
            return 0, None
        earlier, arrays = self._begun.pop(name)
        common = _common_rows(earlier, self.base)
        starts = self.base.episode_starts
        first = int(starts[np.searchsorted(starts, common) - 1]) if common else 0
        return first, arrays if first else None

    def _by_segment(self, name: str) -> list[Array]:
        """A field's values, computed or taken over."""
        first, before = self._known_before(name)
        values = self._kept(name) if before is None else self._compute(name, first)
        found: list[Array] = []
        begin = 0
        for number, segment in enumerate(self.base.segments):
            end = min(begin + segment.num_rows, self.base.num_rows)
            if before is not None and end <= first:
                found.append(before[number])
            else:
                known = before[number] if before is not None and begin < first else None
                found.append(self._placed(name, number, begin, values[max(begin - first, 0) : end - first], known))
            begin = end
        return found

    def _placed(self, name: str, number: int, begin: int, values: Array, known: Array | None) -> Array:
        """The values of a segment's last rows, and what is known of those before, where its table has the rows."""
        segment = self.base.segments[number]
        rows = int(segment.chunk_starts[-1])
        if not segment.has_indices and len(values) == rows:
            return values
        placed = np.zeros((rows, *values.shape[1:]), values.dtype)
        there = min(segment.num_rows, self.base.num_rows - begin)
        if not segment.has_indices:
            if known is not None:
                placed[: there - len(values)] = known[: there - len(values)]
            placed[there - len(values) : there] = values
            return placed
        numbers = segment.row_numbers(np.arange(there))
        if known is not None:
            taken = numbers[: there - len(values)]
            placed[taken] = known[taken]
        placed[numbers[there - len(values) :]] = values
        is_there = np.zeros(rows, np.bool_)
        is_there[numbers] = True
        if np.count_nonzero(is_there) < there:
            raise DataError(
                f"expected each row of a dataset at most once in the store, found some of rows {begin}.."
                f"{begin + there - 1} twice, for which {name!r} would have two values; flatten_indices() of the "
                "dataset makes rows of its own of them"
            )
        return placed

    def _kept(self, name: str) -> Array:
        """All of a field's values, from the disk where they are kept there."""
        if not self._is_kept:
            return self._compute(name, 0)
        assert self.path is not None
        file = self.path / f"{quote(name, safe='')}.arrow"
        said = said_of(self.base, self.derivations[name], self.specs[name])
        found = load(file, said, self._digest)
        if found is None:
            values = self._compute(name, 0)
            read = {field: self._digest(field) for field in sorted({"", *self._fields_read[name]})}
            write(file, values, said, read)
            found = load(file, said, self._digest)
        if found is None:
            raise StorageError(f"{file}: expected the values that were written, found others")
        return found

    def _digest(self, field: str) -> str:
        """Return the digest of a field's values; see ``digest_of``."""
        if field not in self._digests:
            edges = np.append(np.arange(0, self.base.num_rows, _ROWS), self.base.num_rows)
            self._digests[field] = digest_of(self.base, field, edges)
        return self._digests[field]

    @memo
    def _is_kept(self) -> bool:
        return self.path is not None and is_lasting(self.base)

    def _compute(self, name: str, first: int) -> Array:
        """A field's values from an episode that begins at row ``first`` on, ``[num_rows - first, *shape]``."""
        spec, derivation = self.specs[name], self.derivations[name]
        values = np.empty((self.base.num_rows - first, *spec.shape), spec.stored_dtype)
        for rows, begin in self._blocks(first):
            made = derivation.compute(rows)
            try:
                found = to_numpy(made)
            except RowError as error:
                raise DataError(f"{derivation!r}: {error} at row {begin + error.row}") from error
            self._fields_read.setdefault(name, set()).update(rows.fields_read)
            wanted = (len(rows), *spec.shape)
            if found.shape != wanted:
                raise DataError(f"{derivation!r}: expected values of shape {list(wanted)}, found {found.shape}")
            if not np.can_cast(found.dtype, spec.stored_dtype, "same_kind"):
                raise DataError(f"{derivation!r}: expected {spec.stored_dtype}, found {found.dtype}")
            try:
                values[begin - first :][: len(rows)] = convert(found, spec.stored_dtype)
            except RowError as error:
                raise DataError(f"{derivation!r}: {error} at row {begin + error.row}") from error
        return values

    def _blocks(self, first: int) -> Iterator[tuple[EpisodeRows, int]]:
        """The rows from ``first`` on, some whole episodes at a time, and the first row of each block."""
        starts = self.base.episode_starts
        edges = np.append(starts[np.searchsorted(starts, first) :], self.base.num_rows)
        at = 0
        while at < len(edges) - 1:
            end = max(at + 1, int(np.searchsorted(edges, edges[at] + _ROWS, side="right")) - 1)
            yield EpisodeRows(self.base, int(edges[at]), np.diff(edges[at : end + 1])), int(edges[at])
            at = end

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            # What a dataset's rows take to be read again is less than what is computed of them.
            computed = {} if is_lasting(self.base) else dict(self._computed)
            return DerivedColumns, (self.base, self.derivations, computed, self.path, self._digests)


def _common_rows(before: Snapshot, after: Snapshot) -> int:
    """Return how many first rows two snapshots have in common, by their segments."""
    rows = 0
    for one, other in zip(before.segments, after.segments, strict=False):
        if not one.begins_as(other):
            break
        rows += min(one.num_rows, other.num_rows)
        if one.num_rows != other.num_rows:
            break
    return min(rows, before.num_rows, after.num_rows)


class DerivedStore(Store):
    """The rows of a store, with more fields: returns-to-go, times, the previous action, and others that are computed.

    They are delivered like any field, by every loader. A field is computed when it is first read, once for a snapshot,
    and kept in memory, in 4 bytes a row for most. Rows that the store has later are in the next snapshot: what is
    derived for an episode that was not finished changes in it, and in no earlier one. Where all rows are those of
    datasets a pickled store has none of what was computed: another process computes it again, or maps it from ``path``.

    Args:
        store: Any store.
        fields: How they are computed, by name, such as ``{"returns_to_go": Return()}``. They are computed from the
            fields of ``store``, and not from each other; for that make a store of this one.
        path: A folder in which what is computed is kept, a file for each field, which the next process maps. It says
            which values it was computed from, and how, and is replaced where that is no longer so: all values of the
            fields that it is computed from are read to see that they are the same. Only where all rows
            are those of datasets: appended ones are not there in the next process. None: in memory.

    Raises:
        StorageError: When a field is first read: what is computed cannot be written.
        ConfigError: No store, or something that computes nothing. The first snapshot of rows raises one for a name that
            the store has, and ``MissingFieldError`` where a field is missing that another is computed from.

    Example:
        >>> from mouse_core import BatchSource
        >>> from mouse_core.store.derived import DerivedStore, Return, TimeToEnd
        >>> from mouse_core.testing import example_store
        >>> store = DerivedStore(example_store(), {"returns_to_go": Return(), "steps_left": TimeToEnd()})
        >>> batch = BatchSource(store, 8, 4)[0]
        >>> batch["returns_to_go"].shape
        (4, 8)
    """

    def __init__(
        self, store: Store, fields: Mapping[str, Derivation], *, path: str | os.PathLike[str] | None = None
    ) -> None:
        if not isinstance(store, Store):
            raise ConfigError(f"store: expected a Store, found {type(store).__name__}")
        if store.has_shares:
            raise ConfigError(
                "store: expected a member of a mixture, as in Mixture({name: DerivedStore(member, ...)}), found the "
                "mixture, whose shares would be lost"
            )
        for name, derivation in fields.items():
            if not hasattr(derivation, "compute") or not hasattr(derivation, "spec") or isinstance(derivation, type):
                raise ConfigError(f"derived fields: {name!r}: expected one such as Return(), found {derivation!r:.80}")
            derivation_identity(derivation)  # which refuses one that has none
        self._store, self._derivations = store, dict(fields)
        self._path = None if path is None else Path(path)
        self._columns: DerivedColumns | None = None
        self._kept: Snapshot | None = None
        self._lock = ProcessLock()

    def __repr__(self) -> str:
        return f"DerivedStore({self._store!r}, {self._derivations!r})"

    def __len__(self) -> int:
        return len(self._store)

    @property
    def about(self) -> About:
        """The metadata of the store's rows, with the derived fields."""
        said = self._store.about
        if not len(self._store):
            return said
        derived = [one for name, one in self.snapshot().config.fields.items() if name in self._derivations]
        return said.replace(fields=(*said.fields, *derived))

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """The rows there are now, or those that there were; see ``Store``."""
        return self._derived(self._store.snapshot(rows), is_latest=rows is None)

    def _look(self, rows: int | None = None) -> tuple[Snapshot, Episodes]:
        # The episodes are those of the store, with the numbers that they have there.
        base, episodes = self._store._look(rows)
        snapshot = self._derived(base, is_latest=rows is None)
        return snapshot, replace(episodes, rows=snapshot)

    def _derived(self, base: Snapshot, *, is_latest: bool) -> Snapshot:
        if not base.num_rows:
            return base
        with self._lock:
            if self._kept is not None and self._columns is not None and self._columns.base is base:
                return self._kept
            before = self._columns
            if before is None:
                columns = DerivedColumns(base, self._derivations, path=self._path)
            else:
                columns = before.taken_over(base)
            made = derived_snapshot(columns)
            if is_latest:
                self._kept, self._columns = made, columns
        return made


def derived_snapshot(columns: DerivedColumns) -> Snapshot:
    """A snapshot with the fields that are derived from it."""
    base = columns.base
    fields = {
        name: Field(
            name,
            dtype=one.dtype,
            shape=one.shape,
            transition=bool(getattr(columns.derivations[name], "transition", False)),
        )
        for name, one in columns.specs.items()
    }
    config = replace(
        base.config,
        fields={**base.config.fields, **fields},
        types={**base.config.types, **{name: column_type(kind) for name, kind in columns.types.items()}},
        made={**base.config.made, **{name: derivation_identity(one) for name, one in columns.derivations.items()}},
    )
    numbered = enumerate(base.segments)
    segments = [DerivedSegment(segment, number, columns.types, columns.values) for number, segment in numbered]
    return base.with_columns(segments, config)
