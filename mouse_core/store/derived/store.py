"""A store with fields that are computed from those of another."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mouse_core._arrow.column_types import column_type
from mouse_core._base.identity import derivation_identity
from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError
from mouse_core.spec import Field
from mouse_core.store.derived.columns import DerivedColumns
from mouse_core.store.derived.rows import Derivation
from mouse_core.store.derived.segment import DerivedSegment
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.about.dataset import About
    from mouse_core.store._episodes.table import Episodes


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
        """What is known of the rows of the store, and which fields are derived, for whoever reads them when written."""
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
