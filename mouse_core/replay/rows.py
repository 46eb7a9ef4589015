"""RowBuffer: the rows of a buffer as they are written, read and changed, under its lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.tracing import refuse_traced
from mouse_core.columns.memory import ring_slots
from mouse_core.digest.values import host_array
from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.nested import flatten, is_varying, map_tree, opened
from mouse_core.replay._assembly import named_time, patched, priorities_in, row_of, slots_of, time_first
from mouse_core.replay._parts import BufferCore
from mouse_core.replay.base import BaseBuffer
from mouse_core.replay.generations import alike
from mouse_core.replay.protocols import EPISODE, FieldKey, Slots, Storage
from mouse_core.replay.samplers.episodes import StorageEpisodes, find_fields, marks_of
from mouse_core.spec import Alignment

if TYPE_CHECKING:
    from mouse_core.store.dataset_store import DatasetStore

# The field of rows that were copied out of a store; one of ``TRAJ_KEYS``.
EPISODE_FIELD = "episode"


class RowBuffer(BaseBuffer):
    """What a ``ReplayBuffer`` has for its rows: writing, reading and changing them. It is no buffer by itself."""

    _parts: BufferCore
    _inverse: Callable[[Any], Any] | None
    _grid: bool
    _priority_key: FieldKey
    _priority_reduction: str | None = None
    _copies: tuple[Any, bool] = (None, False)  # a snapshot, and whether only it knows where an episode begins

    def __len__(self) -> int:
        """Rows there are: all time steps of all environments."""
        return len(self._parts.storage)

    @property
    def storage(self) -> Any:
        """Where the rows lie."""
        return self._parts.storage

    def __getitem__(self, index: Any) -> Any:
        """Rows as they are stored, without transforms.

        Args:
            index: As ``append`` and ``sample`` give it: an integer gives one row; a slice, integers of any shape, or a
                mask give rows with as many axes in front.

        Raises:
            IndexError: Out of range; also -1, the index of a row that the writer did not keep.

        Rows of a store in which an episode ends without ``done`` have a field "episode", the number of their episode:
        copied into another buffer, they would go on behind it otherwise.
        """
        refuse_traced("buffer[index]")
        with self._lock, self._shared():
            slots = slots_of(index, len(self._parts.storage))
            rows = self._rows_at(slots.reshape(1) if not slots.ndim else slots)
        return self._deliver_rows(rows if slots.ndim else row_of(rows, 0), slots.shape)

    def _deliver_rows(self, rows: Any, shape: tuple[int, ...]) -> Any:
        """Rows with these axes, of a ``ListStorage`` lists of them, as a framework takes them; for a subclass."""
        return self._deliver(rows)

    def in_order(self) -> Any:
        """All rows in the order in which they were written, as they are stored: ``[n, ...]``, oldest first.

        Of a ring that came round, ``buffer[:]`` has the newest rows in front of the oldest. With ``ndim=2`` rows are
        ``[time, env, ...]``, as ``extend`` takes them.

        Raises:
            ConfigError: The writer keeps no order of rows.
        """
        refuse_traced("in_order")
        with self._lock, self._shared():
            slots = self._slots_in_order()
            rows = self._rows_at(slots)
        return self._deliver_rows(rows, slots.shape)

    def _rows_at(self, slots: Slots) -> Any:
        """Rows as they are stored; where only a store knows that an episode begins, "episode" says it of copies."""
        storage = self._parts.storage
        rows = storage.get(slots)
        if self._hides_begins() and EPISODE_FIELD not in rows:
            with suppress(MissingFieldError):
                rows = {**rows, EPISODE_FIELD: storage.read(EPISODE, slots)}
        return rows

    def _hides_begins(self) -> bool:
        """Whether rows are those of a store, of which a copy would not show where each episode begins."""
        snapshot = getattr(self._parts.storage, "snapshot", None)
        if snapshot is not self._copies[0]:
            self._copies = snapshot, _hides_begins(self._parts.storage)
        return self._copies[1]

    def _slots_in_order(self) -> Slots:
        storage = self._parts.storage
        if not self._parts.writer.ordered:
            raise ConfigError(f"in_order: expected a writer that keeps rows in order, found {self._parts.writer!r:.80}")
        slots = ring_slots(storage.written - len(storage), len(storage), storage.capacity)
        return slots.reshape(-1, storage.num_envs) if storage.ndim == 2 else slots

    def to_store(self, columns: Mapping[FieldKey, str] | None = None, **options: Any) -> DatasetStore:
        """All rows as a ``DatasetStore`` in memory, in the order of time; with ``ndim=2`` environment by environment.

        Args:
            columns: The column of a field where it has another name, as in ``{"obs": "observation", ("next", "done"):
                "done"}``; by default names of nested fields are joined by "_", and rows of a store have its columns.
            **options: As for ``DatasetStore``, whose alignment is that of the rows.

        Returns:
            A store. Its column "episode_step", if rows have none, counts the steps of each episode that are there.

        Raises:
            ConfigError: The writer keeps no order of rows.
            MissingFieldError, SchemaError, DataError: What ``DatasetStore.extend`` raises.
        """
        refuse_traced("to_store")
        from mouse_core.store.dataset_store import DatasetStore

        with self._lock, self._shared():
            storage, slots = self._parts.storage, self._slots_in_order()
            order = slots.T.reshape(-1)
            rows = getattr(storage, "batch", storage.get)(order) if len(order) else None
            steps = _steps_of_episodes(storage, slots.T) if len(order) else None
        config = storage.snapshot.config.fields if hasattr(storage, "snapshot") else {}
        names: dict[FieldKey, str] = {name: field.column for name, field in config.items()} | dict(columns or {})
        made: dict[str, Any] = {}
        for key, values in flatten(rows).items() if len(order) else ():
            name = names.get(key, key if isinstance(key, str) else "_".join(map(str, key)))
            if name in made:
                raise SchemaError(f"to_store: expected columns of different names, found {name!r} twice")
            made[name] = values.tolist() if is_varying(values) else host_array(values)
        if steps is not None and "episode_step" not in made:
            made["episode_step"] = steps
        store = DatasetStore(**{"alignment": storage.alignment, **options})
        if len(order):
            store.extend(made)
        return store

    # ------------------------------------------------------------------ writing

    def append(self, row: Any) -> Any:
        """Write one row; with ``ndim=2`` one time step of all environments.

        Args:
            row: A tree of values, or for a ``ListStorage`` any object.

        Returns:
            Its index, an int, -1 if the writer did not keep it; with ``ndim=2`` int64 ``[num_envs]``.

        Raises:
            SchemaError: Another structure, dtype or shape than the first write's.
            DataError: Numbers that the field's dtype does not hold.
            ConfigError: The buffer is not to be written to.

        After an error the buffer is as it was.
        """
        if self._grid:
            self._check_unnamed([row])
        slots = self._write(row, one=True)
        if isinstance(slots, int):
            return slots
        return slots if self._parts.storage.ndim == 2 else int(slots[0])

    def extend(self, rows: Any, *, names: Sequence[str] | None = None) -> Slots:
        """Write many rows.

        Args:
            rows: A tree (nested dicts, tuples) of arrays ``[n, ...]``, ``[time, env, ...]`` for ``ndim=2``; or a list
                of rows; or another buffer, whose rows are copied in the order of time. Where it names its batch axes,
                as TensorDicts do, the one called "time" is time for ``ndim=2``, wherever it stands, and all the others
                are environments.
            names: What the batch axes of rows are called that do not say it themselves, for ``ndim=2``: ``("env",
                "time")``, or ``("time", "env", "agent")``, where every agent of every environment is a stream.

        Returns:
            Their indices, int64 ``[n]``, -1 for those that the writer did not keep; ``[time, env]`` for ``ndim=2``, or
            the named batch axes in the order in which they came.

        Raises:
            SchemaError, DataError, ConfigError: As ``append``; also ``names`` of which not exactly one is "time".
            ConfigError: A buffer of another alignment or ``ndim``.
            DataError: A buffer in which only a store knows where an episode begins, and rows have another "episode".

        After an error the buffer is as it was.
        """
        if isinstance(rows, RowBuffer):
            storage = self._parts.storage
            rows = rows.rows_for("extend", storage.alignment, storage.ndim)
        named = named_time(rows) if names is None else self._named(names)
        if not self._grid:
            slots: Slots = self._write(rows, one=False)
            return slots
        if named is None:
            self._check_unnamed(rows if isinstance(rows, list) else ())
            return self._write(rows, one=False).reshape(-1, self._parts.storage.num_envs)  # type: ignore[no-any-return]
        turned, lengths = time_first(self._accept(rows), *named)
        return np.moveaxis(self._write(turned, one=False).reshape(lengths), 0, named[0])

    def rows_for(self, label: str, alignment: Alignment | None, ndim: int) -> Any:
        """All rows in order, as the storage has them, for a copy of this alignment and ``ndim``; see ``extend``."""
        with self._lock, self._shared():
            storage, slots = self._parts.storage, self._slots_in_order()
            if alignment not in (None, storage.alignment) or ndim != storage.ndim:
                own = alignment or storage.alignment
                raise ConfigError(
                    f"{label}: expected a buffer of {own!r} rows with ndim={ndim}, found one of {storage.alignment!r} "
                    f"rows with ndim={storage.ndim}"
                )
            rows = self._rows_at(slots) if len(slots) else []
            if self._hides_begins() and EPISODE_FIELD in self.storage.snapshot.readers:
                raise DataError(
                    f"{label}: expected rows that show where their episodes begin, found episodes that only the store "
                    f"knows, and another field {EPISODE_FIELD!r}: as copies they would be one episode. Rename that "
                    "field, or draw from the store itself, in an ensemble"
                )
            return rows

    def _named(self, names: Sequence[str]) -> tuple[int, int]:
        """Which of so many axes is time."""
        if not self._grid or isinstance(names, str) or list(names).count("time") != 1:
            raise ConfigError(
                f"names: expected those of batch axes, one of them 'time', and a storage with ndim=2, found {names!r} "
                f"and ndim={self.storage.ndim}"
            )
        return list(names).index("time"), len(names)

    @staticmethod
    def _check_unnamed(steps: Iterable[Any]) -> None:
        """Raise SchemaError where what is to be a single time step names an axis of time."""
        if any(named_time(step) is not None for step in steps):
            raise SchemaError("append: expected one time step, [env, ...], found a time axis; extend takes [env, time]")

    def _write(self, rows: Any, *, one: bool) -> Any:
        refuse_traced("append" if one else "extend")
        rows = self._accept(rows)
        if type(rows) is list and not rows and not one:
            self._parts.check_writable()
            return np.empty(0, np.int64)
        if not one or type(rows) is not dict or self._inverse is not None:
            rows = self._opened(rows, one=one)
        if self._inverse is not None:
            rows = self._inverse(rows)
        priority = self._priorities_in(rows, one=one)
        if self._lock.waiting:
            self._lock.give_way()
        if one and priority is None and self._parts.plain_ring:
            with self._lock:
                return self._parts.append(rows)
        with self._lock, self._shared():
            return self._parts.write(rows, priority, one=one)

    def _opened(self, rows: Any, *, one: bool) -> Any:
        """Rows whose lists are nodes or values, see ``mouse_core.nested.opened``; objects as they are."""
        storage = self._parts.storage
        if hasattr(storage, "batch"):  # which keeps any objects
            if self._inverse is not None and hasattr(storage, "check"):
                storage.check([rows] if one else rows)  # a transform would not see what a mask hides
            return rows
        ragged = getattr(storage, "ragged", ())
        if isinstance(rows, list) and not one:
            return [opened(row, storage.ndim - 1, ragged) for row in rows]
        return opened(rows, storage.ndim - 1 if one else storage.ndim, ragged)

    def _priorities_in(self, rows: Any, *, one: bool) -> npt.NDArray[np.float64] | None:
        """The priorities that rows bring along, for a sampler that knows any."""
        if not self._parts.prioritized:
            return None
        ndim, reduction = self._parts.storage.ndim, self._priority_reduction
        return priorities_in(rows, self._priority_key, one=one, ndim=ndim, reduction=reduction)

    def check_extend(self, rows: Any) -> None:
        """Raise what ``extend(rows)`` would, and write nothing; a storage without ``check`` may refuse rows later."""
        rows = self._opened(self._accept(rows), one=False)
        rows = rows if self._inverse is None else self._inverse(rows)
        priority = self._priorities_in(rows, one=False)
        with self._lock, self._shared():
            self._parts.check_write(rows, priority)

    def __setitem__(self, index: Any, rows: Any) -> None:
        """Overwrite rows in place, as they are stored, without inverse transforms; neither cursor nor length move.

        Args:
            index: As for ``buffer[index]``.
            rows: One row for an integer; else a tree with the axes of ``index`` in front, or a list of rows. For all
                rows of an ``ArrayStorage`` or a ``TensorStorage`` (``buffer[:]``) it may have fields that they did not
                have, which all that is written later has, too.

        Raises:
            IndexError: Out of range.
            SchemaError, DataError, ConfigError: As ``append``.
        """
        refuse_traced("buffer[index] = rows")
        rows = self._accept(rows)
        with self._lock, self._shared():
            self._parts.check_writable()
            slots = slots_of(index, len(self))
            if slots.ndim > 1 and not isinstance(rows, list):
                rows = map_tree(lambda leaf: _flat(leaf, slots.ndim), rows)
            self._parts.put(slots.reshape(-1), rows if slots.ndim else [rows])

    def generation_of(self, index: Any) -> npt.NDArray[np.int64]:
        """How many rows were in the places of these rows before them, of a buffer made with ``generations=True``.

        An index and its generation name a row for good: it is there as long as ``generation_of(index)`` is what it was.

        Args:
            index: Integers of any shape, as ``append``, ``extend`` and batches give them.

        Returns:
            int64 of the same shape; -1 where there is no row.

        Raises:
            ConfigError: The buffer counts none, or an index that is not of integers.
        """
        with self._lock, self._shared():
            return self._parts.generation_of(index)

    def update_if_present(self, index: Any, generation: Any, fields: Any) -> npt.NDArray[np.bool_]:
        """Overwrite some fields of those rows of a batch that are still there, when what was computed of it comes back.

        Rows keep their priorities and generations. Of an index that comes twice the last one counts.

        Args:
            index: Those of the batch, integers of any shape.
            generation: Those of the batch, of the same shape.
            fields: A tree of the fields to change, with the axes of ``index`` in front.

        Returns:
            Which rows were there and were changed, bool of the shape of ``index``.

        Raises:
            MissingFieldError: A field that rows do not have.
            SchemaError, DataError, ConfigError: As ``append`` and ``generation_of``.

        After an error nothing has changed.
        """
        refuse_traced("update_if_present")
        named = to_numpy(index)
        values = {key: _flat(leaf, named.ndim) for key, leaf in flatten(self._accept(fields)).items()}
        with self._lock, self._shared():
            self._parts.check_writable()
            present = alike(self._parts.generation_of(named), generation)
            places = np.flatnonzero(present)
            if not len(places):
                return present
            slots = named.astype(np.int64).reshape(-1)[places]
            rows = patched(self.storage.get(slots), values, places, present.size)
            sampler: Any = self._parts.sampler
            weights = sampler.weights_at(self.storage, slots) if hasattr(sampler, "set_weights") else None
            self._parts.put(slots, rows)
            if weights is not None:
                sampler.set_weights(self.storage, slots, weights)
        return present

    def empty(self) -> None:
        """Forget all rows and priorities. The number of the next sample goes on.

        Raises:
            ConfigError: The buffer is not to be written to.
        """
        refuse_traced("empty")
        with self._lock, self._shared():
            self._parts.empty()

    def observer(self) -> Callable[[Any], None]:
        """A function that writes a trajectory to the buffer.

        A trajectory is a tree of arrays ``[time, ...]``, a named tuple of such, whose names become those of the fields,
        or a list of rows. One that holds single values is one step of it, as RLDS and TF-Agents hand them over.
        """

        def observe(trajectory: Any) -> None:
            rows = trajectory._asdict() if hasattr(trajectory, "_asdict") else trajectory
            single = not isinstance(rows, list) and any(not np.ndim(leaf) for leaf in flatten(rows).values())
            (self.append if single else self.extend)(rows)

        return observe


def _flat(leaf: Any, axes: int) -> Any:
    """A leaf, an array of any framework, with a single axis in place of its first ``axes``."""
    if axes == 1:
        return leaf
    values = leaf if hasattr(leaf, "reshape") else np.asarray(leaf)
    return values.reshape((prod(values.shape[:axes]), *values.shape[axes:]))


def _steps_of_episodes(storage: Storage, slots: Slots) -> Slots | None:
    """How many rows of its episode lie before each row, stream after stream; None where no field says where they end.

    Args:
        storage: The rows.
        slots: All slots of each stream in order, ``[env, time]``, or ``[time]`` of one.
    """
    try:
        table = StorageEpisodes().settled(storage)
    except MissingFieldError:
        return None
    steps = np.tile(np.arange(table.begin, table.end), table.num_envs)
    begin, _, _ = table.episode_of(steps, np.repeat(np.arange(table.num_envs), slots.shape[-1]))
    found: Slots = steps - np.maximum(begin, table.begin)
    return found


def _hides_begins(storage: Any) -> bool:
    """Whether the fields of the rows of a store do not show where each of its episodes begins."""
    starts = storage.snapshot.episode_starts[1:]
    around = np.stack([starts - 1, starts], axis=1).reshape(-1)

    def read(key: FieldKey) -> npt.NDArray[Any]:
        if key == EPISODE:
            raise MissingFieldError("rows: expected fields of rows, found what a store knows")
        values: npt.NDArray[Any] = storage.read(key, around)
        return values

    if not len(starts):
        return False
    try:
        marks = marks_of(find_fields(read, None, ()), read, 1)
    except MissingFieldError:
        return True
    return not marks.begins(None)[1::2].all()
