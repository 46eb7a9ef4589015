"""Store: what batches are drawn from, whatever its rows come from; and views, which have some of a store's episodes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.windows import Stretches, cut_at_stretches
from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError
from mouse_core.spec import Alignment, Field
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.metadata import DatasetMetadata
    from mouse_core.store._chosen import Condition, Episodes, Rule


class Store(ABC):
    """Steps in an order, of which there may be more later: what sources, loaders, buffers and writers take.

    A ``DatasetStore`` is one. One of your own derives from this class and says what its ``snapshot`` is: a ``Snapshot``
    of other stores' segments copies no step.
    """

    #: Whether rows are drawn by shares, as those of a mixture: whoever takes the rows alone would lose these.
    has_shares = False

    @abstractmethod
    def snapshot(self, rows: int | None = None) -> Snapshot:
        """An immutable view of the rows there are now, or of those that there were; it copies no steps.

        Args:
            rows: The ``store_rows`` of the snapshot to give again; None: there are now.

        Raises:
            ConfigError: There are fewer rows.
        """

    # ------------------------------------------------------------------ what is there

    def __len__(self) -> int:
        return self.snapshot().num_rows

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self.snapshot().alignment

    @property
    def metadata(self) -> DatasetMetadata:
        """The metadata of the rows; the alignment is None if "arrived" is only an assumption."""
        return self.snapshot().metadata

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The stored columns' Arrow types by name; where parts of the store differ in encoding, that of the first.

        A part in which a column is null throughout says nothing of its type.
        """
        return stored_types(self.snapshot().segments)

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that the store knows, whether it has their columns or not."""
        return dict(self.snapshot().config.fields)

    @overload
    def __getitem__(self, rows: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, rows: slice | Sequence[int] | npt.NDArray[Any]) -> list[dict[str, Any]]: ...

    def __getitem__(self, rows: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        """Stored rows as Python values by column, null where their part of the store lacks the column.

        Args:
            rows: A row's number, which gives a dict, or a slice or several numbers, which give a list of such dicts,
                as ``DatasetStore.extend`` takes it. Negative ones count from the end. Batches come from a loader.

        Raises:
            IndexError: A number that is not in ``-len(store)..len(store) - 1``.
            ConfigError: Something else, such as the name of a column.
        """
        snapshot, names = self.snapshot(), list(self.columns)
        one, numbers = row_numbers(rows, snapshot.num_rows)
        found = snapshot.rows(numbers)
        nulls = [None] * len(numbers)
        columns = [found.get(name, nulls) for name in names]
        listed = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        return listed[0] if one else listed

    def to_dataset(self) -> Any:
        """The whole store as a ``datasets.Dataset``, sharing files and memory with it.

        A store of one dataset gives that dataset. It has the ``metadata`` of the store, which files, Parquet and the
        Hub keep, and ``from_dataset`` checks. Columns that only some parts have are null in the others.

        Raises:
            ConfigError: The store is empty.
        """
        from mouse_core.store.export import to_dataset

        return to_dataset(self.snapshot(), self.columns, self.metadata)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a folder that ``datasets.load_from_disk`` and ``formats.open`` open.

        The folder appears when all of it is on the disk, so that neither a kill nor a power cut leaves a part of it.
        The digest of every file is noted, for ``mouse verify``. Nothing that is there is written over, as others may
        have it mapped: rows that come later go to another folder, or to a ``DatasetStore.open``. Videos that rows name
        frames of lie in it, too: linked, or copied where they cannot be.

        Args:
            path: The folder. There must be nothing yet.

        Raises:
            ConfigError: Something is at ``path``, another process is writing it, or the store is empty.
            StorageError: It cannot be written; nothing is left.
        """
        from mouse_core.store.export import save

        save(self.snapshot(), self.to_dataset(), path)

    # ------------------------------------------------------------------ episodes

    @property
    def episodes(self) -> pa.Table:
        """A row for each episode, in the order of the store; it is made when it is first asked for.

        The columns are ``episode``, its number in the store, which views keep; ``start``, its first row; ``length``,
        its rows; ``return``, the sum of its rewards in float64, without that of the first row where rows have
        "arrived"; ``done``, the code of its last row, 0 where it was broken off or still goes on; and every column of
        single numbers or texts whose value stays the same all through each episode, as the name of a task does. Where
        rows have the number of a task, and the store is told its text (``metadata.tasks``), there is ``task``, too.

        Rows with neither ``done`` nor ``time``, as prompts are, are an episode each; without rewards the return is 0.

        What was counted is not counted again when rows come, but for the episode that was the last.

        Raises:
            DataError: A value that its field does not allow.
        """
        return self._look()[1].table

    def where(self, *conditions: Condition, **columns: Any) -> View:
        """The episodes that meet all of some conditions, as a store; no step is copied.

        Args:
            *conditions: An expression of ``pyarrow.compute`` over the columns of ``episodes``; a function of an
                episode, a dict of these columns, that gives True or False and is asked once for each; or a dict as
                the next.
            **columns: For a column the value to have, a list of values (or a ``range``, a set, an array), or the ends
                ``(lowest, highest)``, both included, of which None is open.

        Raises:
            ConfigError: No condition, or something that is none. When the view is read: a column that there is not,
                or values of another type.
        """
        from mouse_core.store._chosen import Where

        return View(self, Where([*conditions, columns]))

    def best(self, share: float, by: str = "return") -> View:
        """The episodes with the largest return, or the most of another column; see ``where``.

        Args:
            share: How many of all, above 0 and at most 1, rounded, and at least one. Of equal ones the earlier.
            by: A column of numbers of ``episodes``. Episodes without a number are not taken.

        Raises:
            ConfigError: Another share; when the view is read, another column.
        """
        from mouse_core.store._chosen import Best

        return View(self, Best(share, by))

    def split(self, *, seed: int = 0, by: str = "episode", **shares: float) -> dict[str, View]:
        """Parts of the store that share no episode, each a store; see ``where``.

        Which part an episode is in depends on the seed, the shares and the episode's number alone, so that it stays
        there when others come. A part has about its share of the episodes, not exactly.

        Args:
            seed: In ``[0, 2**64)``.
            by: "episode", or a column of ``episodes``: all episodes that have the same value of it are in the same
                part, wherever they stand.
            **shares: Of each part, by name, as ``train=0.9``. What they leave over is called "test".

        Returns:
            The parts by name, in this order.

        Raises:
            ConfigError: Shares that are none; when a part is read, a column that there is not.
        """
        from mouse_core.store._chosen import parts_of

        return {name: View(self, part) for name, part in parts_of(shares, seed, by).items()}

    def _look(self, rows: int | None = None) -> tuple[Snapshot, Episodes]:
        """A snapshot with its episodes; see ``snapshot``."""
        from mouse_core.store._chosen import episodes_of

        snapshot = self.snapshot(rows)
        with _lock:
            known = _counted.get(self)
        if known is not None and known.rows is snapshot:
            return snapshot, known
        episodes = episodes_of(snapshot, known, self.metadata.tasks)
        if rows is None:
            with _lock:
                _counted[self] = episodes
        return snapshot, episodes


class View(Store):
    """Some of a store's episodes, as a store: ``Store.where``, ``best`` and ``split`` make them.

    A snapshot of it is what there is to take of the other store's at that time, so ``refresh()`` of a loader takes in
    what has come there. Its fingerprint says which episodes these are, whatever rule took them.

    Args:
        store: The other store.
        rule: Says which of its episodes are taken.
    """

    def __init__(self, store: Store, rule: Rule) -> None:
        self._store, self._rule = store, rule
        self._lock = ProcessLock()
        self._last: tuple[Snapshot, Snapshot, Episodes] | None = None

    def __repr__(self) -> str:
        return f"{self._store!r}.{self._rule!r}"

    def __len__(self) -> int:
        return self._look()[0].num_rows

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self._store.alignment

    @property
    def metadata(self) -> DatasetMetadata:
        """The metadata of the underlying store's rows."""
        return self._store.metadata

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The columns of the other store."""
        return self._store.columns

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the other store."""
        return self._store.fields

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """Return the selected part of the underlying store's snapshot, possibly empty; see ``Store.snapshot``.

        Raises:
            ConfigError: See ``Store.where``.
        """
        return self._look(rows)[0]

    def _look(self, rows: int | None = None) -> tuple[Snapshot, Episodes]:
        whole, episodes = self._store._look(rows)
        with self._lock:
            if self._last is None or self._last[0] is not whole:
                self._last = whole, *_taken(whole, episodes, self._rule)
            return self._last[1:]


# The episodes of stores when they were last counted.
_counted: WeakKeyDictionary[Store, Episodes] = WeakKeyDictionary()
_lock = ProcessLock()


def _taken(whole: Snapshot, episodes: Episodes, rule: Rule) -> tuple[Snapshot, Episodes]:
    """Select the rows and episodes of a snapshot by a rule."""
    from mouse_core.store._chosen import ChosenSegment, ChosenSnapshot

    found = episodes.table.num_rows
    # Where there is no episode, columns of the steps are not known yet.
    (places,) = np.nonzero(rule.taken(episodes) if found else np.zeros(0, np.bool_))
    table = episodes.table.take(pa.array(places))
    firsts, sizes = (table.column(name).to_numpy() for name in ("start", "length"))
    starts = np.cumsum(sizes) - sizes
    table = table.set_column(table.schema.get_field_index("start"), "start", pa.array(starts))
    root, of_root = whole.fingerprint, firsts
    if isinstance(whole, ChosenSnapshot):
        root, of_root = whole.root, whole.of_root[places]
    segments = []
    if len(places):
        begins = np.cumsum([0, *whole.rows_of_segments])
        number, first, size, _ = cut_at_stretches(Stretches(begins), *_joined(firsts, sizes))
        for at in np.unique(number).tolist():
            of_it = number == at
            segments.append(ChosenSegment(whole.segments[at], first[of_it], size[of_it]))
    snapshot = ChosenSnapshot(segments, whole.config, whole.budget, whole.store_rows, starts, root, of_root)
    if not len(places):
        snapshot.if_empty = f"{rule!r}: expected some of the store's {found} episodes, found none"
    return snapshot, replace(episodes, table=table, rows=snapshot)


def _joined(
    firsts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Stretches of rows, joined where one begins behind the other: of (0, 3), (3, 2) and (9, 1), (0, 5) and (9, 1)."""
    (places,) = np.nonzero(np.concatenate([[True], firsts[1:] != firsts[:-1] + sizes[:-1]]))
    return firsts[places], np.add.reduceat(sizes, places)


def row_numbers(rows: Any, count: int) -> tuple[bool, list[int]]:
    """Whether a single row is asked for, and the numbers in ``0..count - 1`` that are; see ``__getitem__``."""
    if isinstance(rows, slice):
        try:
            return False, list(range(*rows.indices(count)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"store: expected a slice of whole numbers, found {rows}") from error
    one = isinstance(rows, int | np.integer)
    try:
        asked = np.asarray(rows)
    except ValueError:
        asked = np.asarray(None)
    if not asked.size and asked.ndim == 1:
        return False, []
    if asked.dtype.kind not in "iu" or isinstance(rows, bool) or asked.ndim > 1:
        raise ConfigError(
            f"store: expected a row's number, a slice or a list of numbers, found {rows!r:.80}; "
            "columns are those of store.to_dataset(), fields come in the batches of a BatchSource"
        )
    numbers = asked.reshape(-1).tolist()
    for number in numbers:
        if not -count <= number < count:
            raise IndexError(f"store: expected a row in {-count}..{count - 1}, found {number}")
    return one or not asked.ndim, [number % count for number in numbers]
