"""Store, the interface of stores from which batches are drawn; and views, which select episodes of a store."""

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
    """An ordered, growing sequence of steps: the input of sources, loaders, buffers and writers.

    ``DatasetStore`` is a ``Store``. A user-defined store derives from this class and implements ``snapshot``. If this
    method returns a ``Snapshot`` of other stores' segments, no step is copied.
    """

    #: Whether rows are drawn by shares, as in a mixture; a caller that copies the rows would lose the shares.
    has_shares = False

    @abstractmethod
    def snapshot(self, rows: int | None = None) -> Snapshot:
        """Return an immutable view of the present rows, or of the rows of an earlier snapshot, without copying steps.

        Args:
            rows: ``store_rows`` of the earlier snapshot to return; None: the present rows.

        Raises:
            ConfigError: The store has fewer rows.
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
        """The metadata of the rows; the alignment is None if "arrived" is only assumed."""
        return self.snapshot().metadata

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The Arrow types of the stored columns by name. If segments encode a column differently, the first segment
        determines the type.

        A segment with only nulls in a column does not determine its type.
        """
        return stored_types(self.snapshot().segments)

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the store, including fields whose column does not exist."""
        return dict(self.snapshot().config.fields)

    @overload
    def __getitem__(self, rows: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, rows: slice | Sequence[int] | npt.NDArray[Any]) -> list[dict[str, Any]]: ...

    def __getitem__(self, rows: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        """Return stored rows as Python values by column; a value is None if the row's segment lacks the column.

        Args:
            rows: A row index, for which a dict is returned; or a slice or several row indices, for which a list of
                dicts is returned. The list is a valid argument of ``DatasetStore.extend``. Negative indices count from
                the end. To read batches, use a loader instead.

        Raises:
            IndexError: A row index is not in ``-len(store)..len(store) - 1``.
            ConfigError: ``rows`` has another type, such as the name of a column.
        """
        snapshot, names = self.snapshot(), list(self.columns)
        one, numbers = row_numbers(rows, snapshot.num_rows)
        found = snapshot.rows(numbers)
        nulls = [None] * len(numbers)
        columns = [found.get(name, nulls) for name in names]
        listed = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        return listed[0] if one else listed

    def to_dataset(self) -> Any:
        """Return the store as one ``datasets.Dataset`` that shares the store's files and memory.

        If the store consists of one dataset, that dataset is returned. The result contains the store's ``metadata``.
        Saved datasets, Parquet files and the Hub preserve the metadata, and ``from_dataset`` checks the metadata. If a
        segment lacks a column, the column is null in the segment's rows.

        Raises:
            ConfigError: The store is empty.
        """
        from mouse_core.store.export import to_dataset

        return to_dataset(self.snapshot(), self.columns, self.metadata)

    def save(self, path: str | os.PathLike[str], format: str | None = None, **options: Any) -> None:
        """Write the rows to a folder that ``DatasetStore.open`` and ``datasets.load_from_disk`` open.

        The folder becomes visible only when it is complete on disk, so a kill or a power cut leaves no partial folder.
        The folder contains the digest of every file, for ``mouse verify``. Existing files are never overwritten,
        because other processes could have mapped these files. To save later rows, write to another folder, or use
        ``DatasetStore.open(path, "a")``. The folder also contains the videos to which rows refer: as links, or as
        copies if links are not possible.

        Args:
            path: The folder, or a file whose name ends in ``.parquet``. The path must not exist yet.
            format: Another format that ``DatasetStore.open`` opens: "parquet", "store", "lerobot" or "ted".
            **options: Options of the format's writer; see ``mouse_core.formats.save``.

        Raises:
            ConfigError: ``path`` exists, another process is writing it, or the store is empty.
            StorageError: The folder cannot be written; no partial folder remains.
        """
        from mouse_core import formats

        formats.save(self, path, format, **options)

    # ------------------------------------------------------------------ episodes

    @property
    def episodes(self) -> pa.Table:
        """An Arrow table with a row for each episode, in the order of the store, computed on first access.

        The table has these columns:

        - ``episode``, the episode's index in the store; a view of the store has the same indices;
        - ``start``, the episode's first row, and ``length``, its number of rows;
        - ``return``, the sum of the episode's rewards in float64 (a list of sums if rewards are vectors); with
          alignment "arrived", the reward of the first row is not included;
        - ``done``, the code of the episode's last row, 0 if the episode was interrupted or is unfinished;
        - every column of single numbers or texts whose value is constant within each episode, such as a task's name;
        - ``task``, the text of the episode's task, if rows have the index of a task and the store's ``metadata.tasks``
          has the text.

        If rows have neither ``done`` nor ``time``, such as prompts, each row is an episode. If rows have no rewards,
        the return is 0. When rows are added, only the last episode and new episodes are computed.

        Raises:
            DataError: A value is outside the bounds of its field.
        """
        return self._look()[1].table

    def where(self, *conditions: Condition, **columns: Any) -> View:
        """Return the episodes that meet all conditions, as a store; copies no steps.

        Args:
            *conditions: Functions, or dicts with conditions in the form of ``**columns``. A function gets an episode, a
                dict of the columns of ``episodes``, and returns True or False; the function is called once for each
                episode.
            **columns: For each column, a condition: the requested value; a list (or ``range``, set, array) of allowed
                values; or a tuple ``(lowest, highest)``, both inclusive, where None means no limit.

        Raises:
            ConfigError: No condition is given, or a condition is invalid. Reading the view raises ConfigError if a
                column does not exist, or if a value has another type than the column.
        """
        from mouse_core.store._chosen import Where

        return View(self, Where([*conditions, columns]))

    def best(self, share: float, by: str = "return") -> View:
        """Return the episodes with the largest return, or the largest value of another column; see ``where``.

        Args:
            share: The share of all episodes, above 0 and at most 1; the resulting number of episodes is rounded, and is
                at least 1. If values are equal, earlier episodes are selected first.
            by: A column of numbers of ``episodes``. Episodes with a null in this column are not selected.

        Raises:
            ConfigError: ``share`` is out of range. Reading the view raises ConfigError if the column does not hold
                numbers.
        """
        from mouse_core.store._chosen import Best

        return View(self, Best(share, by))

    def split(self, *, seed: int = 0, by: str = "episode", **shares: float) -> dict[str, View]:
        """Split the store into parts, which are stores without common episodes; see ``where``.

        The part to which an episode belongs depends only on the seed, the shares and the episode's index in the store
        (or the episode's value of ``by``), so adding episodes does not move an episode to another part. Each part has
        approximately its share of the episodes.

        Args:
            seed: Seed of the split, in ``[0, 2**64)``.
            by: "episode", or a column of ``episodes``: all episodes with the same value of that column are in the same
                part.
            **shares: The share of each part by name, such as ``train=0.9``. The remaining share becomes "test".

        Returns:
            The parts by name, in the order of ``shares``.

        Raises:
            ConfigError: A share is invalid. Reading a part raises ConfigError if the column does not exist.
        """
        from mouse_core.store._chosen import parts_of

        return {name: View(self, part) for name, part in parts_of(shares, seed, by).items()}

    def _look(self, rows: int | None = None) -> tuple[Snapshot, Episodes]:
        """Return a snapshot and its table of episodes; see ``snapshot``."""
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
    """A store of selected episodes of another store; created by ``Store.where``, ``best`` and ``split``.

    A snapshot of a view selects from the present rows of the other store, so ``refresh()`` of a loader includes new
    episodes. The fingerprint depends on the selected episodes, not on the rule that selected them.

    Args:
        store: The store from which episodes are selected.
        rule: The rule that selects episodes.
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
        """The columns of the underlying store."""
        return self._store.columns

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the underlying store."""
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


# The last computed episode table of each store.
_counted: WeakKeyDictionary[Store, Episodes] = WeakKeyDictionary()
_lock = ProcessLock()


def _taken(whole: Snapshot, episodes: Episodes, rule: Rule) -> tuple[Snapshot, Episodes]:
    """Select rows and episodes of a snapshot with a rule."""
    from mouse_core.store._chosen import ChosenSegment, ChosenSnapshot

    found = episodes.table.num_rows
    # A table without episodes may lack the columns that the rule names.
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
    """Join adjacent ranges of rows, given as first row and size: (0, 3), (3, 2) and (9, 1) become (0, 5) and (9, 1)."""
    (places,) = np.nonzero(np.concatenate([[True], firsts[1:] != firsts[:-1] + sizes[:-1]]))
    return firsts[places], np.add.reduceat(sizes, places)


def row_numbers(rows: Any, count: int) -> tuple[bool, list[int]]:
    """Return whether ``rows`` is a single row index, and all row indices, converted to ``0..count - 1``; see
    ``__getitem__``.
    """
    if isinstance(rows, slice):
        try:
            return False, list(range(*rows.indices(count)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"store: expected a slice of integers, found {rows}") from error
    one = isinstance(rows, int | np.integer)
    try:
        asked = np.asarray(rows)
    except ValueError:
        asked = np.asarray(None)
    if not asked.size and asked.ndim == 1:
        return False, []
    if asked.dtype.kind not in "iu" or isinstance(rows, bool) or asked.ndim > 1:
        raise ConfigError(
            f"store: expected a row index, a slice or a list of row indices, found {rows!r:.80}; "
            "store.to_dataset() has the columns, and the batches of a BatchSource have the fields"
        )
    numbers = asked.reshape(-1).tolist()
    for number in numbers:
        if not -count <= number < count:
            raise IndexError(f"store: expected a row in {-count}..{count - 1}, found {number}")
    return one or not asked.ndim, [number % count for number in numbers]
