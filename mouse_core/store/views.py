"""Store: what batches are drawn from, whatever its rows come from; and views, which have some of a store's episodes."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.windows import Stretches, cut_at_stretches
from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.spec import Alignment, Field
from mouse_core.store._episodes.table import Episodes
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.about.dataset import About

Bools = npt.NDArray[np.bool_]
Condition: TypeAlias = "Callable[[dict[str, Any]], bool] | Mapping[str, Any] | pc.Expression"

REST = "test"
"""What a split calls the episodes that its shares leave over."""

_NUMBER = "number of the episode"
_ENOUGH = 1e-9


class Rule(Protocol):
    """Takes some of the episodes."""

    def taken(self, episodes: Episodes) -> Bools:
        """Whether each episode is taken, bool ``[episodes]``."""
        ...


class Where:
    """The episodes that meet all of some conditions; see ``Store.where``.

    Args:
        conditions: Expressions, functions, and what is asked of columns by name.

    Raises:
        ConfigError: None of these, or no condition.
    """

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._conditions: list[Any] = [one for one in conditions if not isinstance(one, Mapping) or one]
        for condition in self._conditions:
            if not (isinstance(condition, pc.Expression | Mapping) or callable(condition)):
                raise ConfigError(
                    "where: expected an expression of pyarrow.compute, a function of an episode, or columns with what "
                    f"is asked of them, found {condition!r:.80}"
                )
        if not self._conditions:
            raise ConfigError("where: expected at least one condition, found none")
        self._answers = [_Answers(condition) for condition in self._conditions if callable(condition)]

    def __repr__(self) -> str:
        said = []
        for condition in self._conditions:
            if isinstance(condition, Mapping):
                said += [f"{name}={value!r}" for name, value in condition.items()]
            else:
                said.append(getattr(condition, "__name__", str(condition)))
        return f"where({', '.join(said)})"

    def taken(self, episodes: Episodes) -> Bools:
        """See ``Rule.taken``."""
        table = episodes.table
        taken = np.ones(table.num_rows, np.bool_)
        for condition in self._conditions:
            if isinstance(condition, pc.Expression):
                taken &= _meets(table, condition)
            elif isinstance(condition, Mapping):
                for name, value in condition.items():
                    taken &= _holds(table, name, value)
        # Functions are asked last, and of what is left.
        for answers in self._answers:
            taken = answers.of(episodes, taken)
        return taken


class _Answers:
    """What a function said of episodes, each of which it is shown once.

    Args:
        ask: The function.
    """

    def __init__(self, ask: Callable[[dict[str, Any]], Any]) -> None:
        self._ask = ask
        self._origin: object = None
        self._known: dict[tuple[int, int], bool] = {}

    def of(self, episodes: Episodes, asked: Bools) -> Bools:
        """Its answers, bool ``[episodes]``; False of those that are not asked about."""
        if episodes.origin is not self._origin:
            self._origin, self._known = episodes.origin, {}
        table = episodes.table
        names = list(zip(table.column("episode").to_pylist(), table.column("length").to_pylist(), strict=True))
        (places,) = np.nonzero(asked)
        new = [place for place in places.tolist() if names[place] not in self._known]
        for place, episode in zip(new, table.take(pa.array(new, pa.int64())).to_pylist(), strict=True):
            answer = self._ask(episode)
            if not isinstance(answer, bool | np.bool_):
                raise ConfigError(
                    f"where: expected True or False of episode {episode['episode']}, found {answer!r:.80}"
                )
            self._known[names[place]] = bool(answer)
        found = np.zeros(table.num_rows, np.bool_)
        found[places] = [self._known[names[place]] for place in places.tolist()]
        return found


def _meets(table: pa.Table, condition: pc.Expression) -> Bools:
    numbered = table.append_column(_NUMBER, pa.array(np.arange(table.num_rows)))
    try:
        kept = numbered.filter(condition).column(_NUMBER).to_numpy()
    except (pa.ArrowException, KeyError) as error:
        raise ConfigError(f"where: {condition}: expected columns among {table.column_names}: {error}") from error
    taken = np.zeros(table.num_rows, np.bool_)
    taken[kept] = True
    return taken


def _column_of(table: pa.Table, name: Any, where: str) -> pa.ChunkedArray:
    """A column of the table of episodes, or ConfigError."""
    if name not in table.column_names:
        raise ConfigError(
            f"{where}: expected a column among {table.column_names}, found {name!r}; a column of the steps is there if "
            "it holds single numbers or texts that stay the same all through each episode"
        )
    return table.column(name)


def _holds(table: pa.Table, name: str, value: Any) -> Bools:
    """Whether a column has a value, one of several, or one in a range."""
    column = _column_of(table, name, "where")
    several = isinstance(value, list | set | frozenset | range | np.ndarray)
    if pa.types.is_null(column.type):
        return np.full(len(column), value is None or (several and None in value))
    try:
        if isinstance(value, tuple):
            held = _lies_in(column, value)
        elif several:
            held = pc.is_in(column, pa.array(list(value), column.type))
        else:
            held = pc.is_null(column) if value is None else pc.equal(column, pa.scalar(value))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(
            f"where: {name}: expected a value of type {column.type}, a list of such, or a range (lowest, highest), "
            f"found {value!r:.80}: {error}"
        ) from error
    taken: Bools = pc.fill_null(held, False).to_numpy()
    return taken


def _lies_in(column: pa.ChunkedArray, ends: tuple[Any, ...]) -> pa.ChunkedArray:
    low, high = ends
    held = pc.is_valid(column)
    if low is not None:
        held = pc.and_(held, pc.greater_equal(column, pa.scalar(low)))
    return held if high is None else pc.and_(held, pc.less_equal(column, pa.scalar(high)))


@dataclass(frozen=True)
class Best:
    """The share of the episodes that has the most of something; see ``Store.best``."""

    share: float
    by: str = "return"

    def __post_init__(self) -> None:
        _check_share("best", self.share)

    def __repr__(self) -> str:
        return f"best({self.share}, by={self.by!r})"

    def taken(self, episodes: Episodes) -> Bools:
        """See ``Rule.taken``."""
        column = _column_of(episodes.table, self.by, "best")
        try:
            values = column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()
        except pa.ArrowException as error:
            raise ConfigError(f"best: expected a column of numbers, found {self.by!r} of {column.type}") from error
        taken = np.zeros(len(values), np.bool_)
        (known,) = np.nonzero(~np.isnan(values))
        count = max(1, int(np.floor(self.share * len(values) + 0.5)))
        taken[known[np.argsort(-values[known], kind="stable")[:count]]] = True
        return taken


@dataclass(frozen=True)
class Part:
    """One part of a split; see ``Store.split``.

    Args:
        name: What it is called.
        low, high: It has the episodes whose number in ``[0, 1)`` lies from the one up to the other.
        seed: Of these numbers.
        by: "episode", or the column whose values they are drawn for.
    """

    name: str
    low: float
    high: float
    seed: int
    by: str

    def __repr__(self) -> str:
        return f"split({self.name}={self.high - self.low:g}, by={self.by!r}, seed={self.seed})"

    def taken(self, episodes: Episodes) -> Bools:
        """See ``Rule.taken``."""
        drawn = _drawn(episodes.table, self.by, self.seed)
        taken: Bools = (self.low <= drawn) & (drawn < self.high)
        return taken


def parts_of(shares: Mapping[str, float], seed: int, by: str) -> dict[str, Part]:
    """The parts of a split, by name; what the shares leave over is the last.

    Raises:
        ConfigError: Shares that are none, or are more than all.
    """
    seed = check_seed(seed)
    if not isinstance(by, str):
        raise ConfigError(f"split: expected by as 'episode' or the name of a column, found {by!r:.80}")
    for name, share in shares.items():
        _check_share(f"split: {name}", share)
    ends = np.cumsum([0.0, *shares.values()]).tolist()
    left = 1.0 - ends[-1]
    if not shares or left < -_ENOUGH:
        raise ConfigError(f"split: expected shares of at most 1 in all, as train=0.9, found {dict(shares)}")
    if left > _ENOUGH:
        if REST in shares:
            raise ConfigError(f"split: expected shares of 1 in all, as {REST!r} is among them, found {dict(shares)}")
        shares, ends = {**shares, REST: left}, [*ends, 1.0]
    ends[-1] = 1.0
    return {name: Part(name, ends[at], ends[at + 1], seed, by) for at, name in enumerate(shares)}


def _check_share(where: str, share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, float | int | np.floating) or not 0 < share <= 1:
        raise ConfigError(f"{where}: expected a share of the episodes, above 0 and at most 1, found {share!r:.80}")


def _drawn(table: pa.Table, by: str, seed: int) -> npt.NDArray[np.float64]:
    """A number in ``[0, 1)`` for each episode, which depends on the seed and on what is split by alone."""
    column = _column_of(table, by, "split")
    if by == "episode":
        numbers = column.to_numpy()
        drawn = Key(seed, Purpose.SPLIT).uniform(int(numbers.max(initial=-1)) + 1)
        return np.asarray(drawn[numbers])
    encoded = column.combine_chunks().dictionary_encode("encode")
    secret = seed.to_bytes(8, "little")
    words = [
        hashlib.blake2b(repr(value).encode(), digest_size=8, key=secret).digest()
        for value in encoded.dictionary.to_pylist()
    ]
    drawn = np.array([int.from_bytes(word, "little") >> 11 for word in words], np.float64) * 2.0**-53
    return np.asarray(drawn[encoded.indices.to_numpy()])


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
        """Which transition a row's action, reward and done belong to."""
        return self.snapshot().alignment

    @property
    def about(self) -> About:
        """What is known of the rows; the alignment is None where "arrived" is only taken for granted."""
        from mouse_core.about.dataset import About

        return About("outgoing" if self.alignment == "outgoing" else None)

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

        A store of one dataset gives that dataset. It says of itself what is ``about`` the store, which files, Parquet
        and the Hub keep, and ``from_dataset`` checks. Columns that only some parts have are null in the others.

        Raises:
            ConfigError: The store is empty.
        """
        from mouse_core.store.export import to_dataset

        return to_dataset(self.snapshot(), self.columns, self.about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a folder that ``datasets.load_from_disk`` and ``formats.open`` open.

        The folder appears when all of it is on the disk, so that neither a kill nor a power cut leaves a part of it.
        The SHA-256 of every file is noted, for ``mouse verify``. Nothing that is there is written over, as others may
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
        rows have the number of a task, and the store is told its text (``about.tasks``), there is ``task``, too.

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

        return View(self, Where([*conditions, columns]))

    def best(self, share: float, by: str = "return") -> View:
        """The episodes with the largest return, or the most of another column; see ``where``.

        Args:
            share: How many of all, above 0 and at most 1, rounded, and at least one. Of equal ones the earlier.
            by: A column of numbers of ``episodes``. Episodes without a number are not taken.

        Raises:
            ConfigError: Another share; when the view is read, another column.
        """

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

        return {name: View(self, part) for name, part in parts_of(shares, seed, by).items()}

    def _look(self, rows: int | None = None) -> tuple[Snapshot, Episodes]:
        """A snapshot with its episodes; see ``snapshot``."""
        from mouse_core.store._episodes.table import episodes_of

        snapshot = self.snapshot(rows)
        with _lock:
            known = _counted.get(self)
        if known is not None and known.rows is snapshot:
            return snapshot, known
        episodes = episodes_of(snapshot, known, self.about.tasks)
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
        """Which transition a row's action, reward and done belong to."""
        return self._store.alignment

    @property
    def about(self) -> About:
        """What is known of the rows of the other store."""
        return self._store.about

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The columns of the other store."""
        return self._store.columns

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the other store."""
        return self._store.fields

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """What is taken of the other store's snapshot, which may be nothing; see ``Store.snapshot``.

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
    """What a rule takes of a snapshot and of its episodes."""
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
