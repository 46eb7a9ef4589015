"""Derived columns of one snapshot: computed when somebody reads them, once, some episodes at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.identity import derivation_identity
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.dtypes import RowError, convert, to_numpy
from mouse_core.errors import ConfigError, DataError, MissingFieldError, StorageError
from mouse_core.files.writing import make_folder, replacing, storing
from mouse_core.spec import FieldSpec
from mouse_core.store._chosen import ChosenSegment
from mouse_core.store._segments import Segment
from mouse_core.store.derived.rows import Derivation, EpisodeRows, digest_of
from mouse_core.store.derived.segment import to_arrow
from mouse_core.store.snapshot import Snapshot

Array = npt.NDArray[Any]

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
    """What a file says of itself: the version of its form, and what decides about its values."""
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
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))


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
    """What is derived from one snapshot, for each of its segments.

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
        """What is derived from a snapshot of the same store, with what both have in common as it is.

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
        """That of a field's values; see ``digest_of``."""
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
    """How many first rows two snapshots have in common, as far as their segments say so."""
    rows = 0
    for one, other in zip(before.segments, after.segments, strict=False):
        if not one.begins_as(other):
            break
        rows += min(one.num_rows, other.num_rows)
        if one.num_rows != other.num_rows:
            break
    return min(rows, before.num_rows, after.num_rows)
