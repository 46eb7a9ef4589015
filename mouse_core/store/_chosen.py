"""The table of a store's episodes, the rules by which a view selects episodes, and the snapshot of selected episodes.

The segments of a snapshot of selected episodes share memory and cached properties with the store's segments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.windows import Stretches, cut_at_stretches
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.store import _segments
from mouse_core.store.fields import SnapshotConfig
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


OWN = ("episode", "start", "length", "return", "done")
"""Names of the first columns of every table of episodes."""

_TYPES = (pa.int64(), pa.int64(), pa.int64(), pa.float64(), pa.int64())
_SCHEMA = pa.schema(list(zip(OWN, _TYPES, strict=True)))
# Fields that the table summarises in columns of its own (return, done, length).
_COUNTED = ("reward", "done", "time")


@dataclass(frozen=True, eq=False)
class Episodes:
    """The episodes of a snapshot.

    Args:
        table: One row for each episode; see ``Store.episodes``.
        rows: The snapshot.
        looked_at: Names of all columns that were inspected, including columns that are not in the table.
        origin: A token that two tables share if one table extends the other. If two tables share the token, an episode
            of one table and an episode of the other table are equal if they have the same index and length.
    """

    table: pa.Table
    rows: Snapshot
    looked_at: frozenset[str]
    origin: object


def episodes_of(rows: Snapshot, before: Episodes | None = None, tasks: Mapping[int, str] | None = None) -> Episodes:
    """Return the episodes of a snapshot.

    Args:
        rows: The snapshot.
        before: The episodes of an earlier snapshot. If ``rows`` extends that snapshot, only the last episode of the
            earlier snapshot and the new episodes are computed.
        tasks: The text of each task, by the index of the task.

    Raises:
        DataError: A value is outside the bounds of its field.
    """
    if not rows.num_rows:
        return Episodes(_SCHEMA.empty_table(), rows, frozenset(), object())
    if before is None or not _are_first(before.rows, rows):
        kept, origin, known = 0, object(), {}
        varying: frozenset[str] = frozenset()
    else:
        kept, origin = before.table.num_rows - 1, before.origin
        known = {name: before.table.column(name).slice(0, kept) for name in before.table.column_names}
        varying = before.looked_at - known.keys()  # columns that vary within an episode still do
    starts, names = rows.episode_starts, _names(rows)
    columns: dict[str, Any] = dict(_counted(rows, starts[kept:], kept))
    columns |= {name: _values_by_episode(rows, name, starts[kept:]) for name in names if name not in varying}
    there = {name: _chunked(values) for name, values in columns.items() if values is not None}
    if known:
        there = {name: _behind(known.get(name, _chunked(pa.nulls(kept))), values) for name, values in there.items()}
    numbers = next((there[name] for name in _segments.TASK_NUMBERS if name in there), None)
    if tasks and numbers is not None and "task" not in there:
        there["task"] = _chunked(pa.array([tasks.get(number) for number in numbers.to_pylist()], pa.string()))
    return Episodes(pa.table(there).combine_chunks(), rows, frozenset(names), origin)


def _are_first(before: Snapshot, rows: Snapshot) -> bool:
    """Return whether ``rows`` begins with the rows of ``before``, and whether both read rewards, done codes and times
    with equal fields.
    """
    if not 0 < before.num_rows <= rows.num_rows or len(before.segments) > len(rows.segments):
        return False
    if any(before.config.fields.get(name) != rows.config.fields.get(name) for name in _COUNTED):
        return False
    # The table has no derived columns, so compare the recorded segments.
    recorded = ([segment.recorded for segment in one.segments] for one in (before, rows))
    *firsts, last = zip(*recorded, strict=False)
    return last[0].begins_as(last[1]) and all(one is other for one, other in firsts)


def _names(rows: Snapshot) -> list[str]:
    """Return the columns that can be constant within an episode: columns with one number or text for each row."""
    # Derived columns vary from row to row, and reading them would compute them.
    ours = {rows.config.fields[name].column for name in _COUNTED if name in rows.config.fields} | {*rows.config.made}
    found: dict[str, bool] = {}
    for segment in rows.segments:
        for name, data_type in segment.types.items():
            found[name] = found.get(name, True) and _segments.is_single(data_type)
    return [name for name, single in found.items() if single and name not in ours and name not in OWN]


def _counted(rows: Snapshot, starts: Int64s, first: int) -> dict[str, npt.NDArray[Any]]:
    """Return the index, start, length, return and done code of the episodes that begin at the rows ``starts``. The
    first of these episodes has the index ``first``.
    """
    ends = np.append(starts[1:], rows.num_rows)
    done = [np.zeros(len(ends), np.int64)]  # for rows without done codes
    if "done" in rows.readers:
        done = [rows.stored("done", ends[at : at + _segments.BLOCK] - 1) for at in range(0, len(ends), _segments.BLOCK)]
    return {
        "episode": np.arange(first, first + len(starts)),
        "start": starts,
        "length": ends - starts,
        "return": _returns(rows, starts),
        "done": np.concatenate(done).astype(np.int64),
    }


def _returns(rows: Snapshot, starts: Int64s) -> npt.NDArray[np.float64]:
    """Return the sum of rewards of each episode, float64 ``[n, ...]``. Rewards are added row by row, so block
    boundaries do not change the sum.

    With alignment "arrived", the reward of an episode's first row does not belong to the episode. Example: the rewards
    are 9, 1, 1, 9, 2, and episodes begin at the rows 0 and 3. The sums are 2 and 2 with "arrived", and 11 and 11 with
    "outgoing".
    """
    shape = rows.spec["reward"].shape if "reward" in rows.readers else ()
    sums = np.zeros((len(starts), *shape))
    for begin, end in _segments.blocks(int(starts[0]), rows.num_rows) if "reward" in rows.readers else ():
        reward = rows.stored("reward", np.array([begin]), end - begin, np.dtype(np.float64))
        inside = starts[starts.searchsorted(begin) : starts.searchsorted(end)]
        if rows.alignment == "arrived":
            reward[inside - begin] = 0
        # The episode of each row: the episode of the row before the block, plus 1 at each first row of an episode.
        number = starts.searchsorted(begin) - 1 + _steps_at(inside - begin, end - begin)
        np.add.at(sums, number, reward)
    return sums


def _steps_at(places: Int64s, count: int) -> Int64s:
    """Return, for each position in ``0 .. count - 1``, how many of ``places`` are at or before this position. Example:
    places 1 and 3 with count 4 give 0, 1, 1, 2.
    """
    there = np.zeros(count, np.int64)
    there[places] = 1
    return np.cumsum(there)


def _values_by_episode(rows: Snapshot, name: str, starts: Int64s) -> pa.ChunkedArray | None:
    """Return a column's value in each episode that begins at ``starts``; None if the column varies within an
    episode.
    """
    values: list[pa.Array] = []
    try:
        for found, differs, at in _segments.changes(rows.segments, rows.num_rows, name, int(starts[0])):
            inside = starts[starts.searchsorted(at) : starts.searchsorted(at + len(found))] - at
            differs[inside] = False
            if differs.any():
                return None
            values.append(found.take(pa.array(inside)))
    except pa.ArrowException:
        return None  # numbers in one part of the store and texts in another, or a type without comparison
    return pa.chunked_array(values)


def _chunked(values: Any) -> pa.ChunkedArray:
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = values.tolist()  # returns of vector rewards
    return values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([pa.array(values)])


def _behind(known: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Concatenate a column of earlier episodes and the same column of later episodes; both are converted to a common
    type.
    """
    wanted = known.type if pa.types.is_null(values.type) else values.type
    return pa.chunked_array([*known.cast(wanted).chunks, *values.cast(wanted).chunks], wanted)


Condition: TypeAlias = "Callable[[dict[str, Any]], bool] | Mapping[str, Any]"

REST = "test"
"""The name of the split part that gets the remaining share of episodes."""

_ENOUGH = 1e-9


class Where:
    """A rule that selects the episodes that meet all conditions; see ``Store.where``.

    Args:
        conditions: Functions of an episode, and dicts with a condition for each column; see ``Store.where``.

    Raises:
        ConfigError: A condition has another type, or no condition is given.
    """

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._conditions: list[Any] = [one for one in conditions if not isinstance(one, Mapping) or one]
        for condition in self._conditions:
            if not (isinstance(condition, Mapping) or callable(condition)):
                raise ConfigError(
                    "where: expected a function of an episode, or columns with the requested values, found "
                    f"{condition!r:.80}"
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
        """Return whether each episode is selected, bool ``[episodes]``."""
        table = episodes.table
        taken = np.ones(table.num_rows, np.bool_)
        for condition in self._conditions:
            if isinstance(condition, Mapping):
                for name, value in condition.items():
                    taken &= _holds(table, name, value)
        # Functions are called last, for the remaining episodes.
        for answers in self._answers:
            taken = answers.of(episodes, taken)
        return taken


class _Answers:
    """Caches the results of a function of an episode, and calls the function once for each episode.

    Args:
        ask: The function of an episode.
    """

    def __init__(self, ask: Callable[[dict[str, Any]], Any]) -> None:
        self._ask = ask
        self._origin: object = None
        self._known: dict[tuple[int, int], bool] = {}

    def of(self, episodes: Episodes, asked: Bools) -> Bools:
        """Return the function's results, bool ``[episodes]``; False for episodes where ``asked`` is False."""
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
                    f"where: expected True or False for episode {episode['episode']}, found {answer!r:.80}"
                )
            self._known[names[place]] = bool(answer)
        found = np.zeros(table.num_rows, np.bool_)
        found[places] = [self._known[names[place]] for place in places.tolist()]
        return found


def _column_of(table: pa.Table, name: Any, label: str) -> pa.ChunkedArray:
    """Return a column of the table of episodes, or raise ConfigError."""
    if name not in table.column_names:
        raise ConfigError(
            f"{label}: expected a column among {table.column_names}, found {name!r}; a column of the steps is included "
            "if it holds single numbers or texts that are constant within each episode"
        )
    return table.column(name)


def _holds(table: pa.Table, name: str, value: Any) -> Bools:
    """Return whether each value of a column meets a condition. A condition is met if the value equals a given value, is
    in a given list, or is in a given range.
    """
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
            f"where: {name}: expected a value of type {column.type}, a list of values, or a range (lowest, highest), "
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
    """The rule that selects the episodes with the largest values of a column; see ``Store.best``."""

    share: float
    by: str = "return"

    def __post_init__(self) -> None:
        _check_share("best", self.share)

    def __repr__(self) -> str:
        return f"best({self.share}, by={self.by!r})"

    def taken(self, episodes: Episodes) -> Bools:
        """See ``Where.taken``."""
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
class SplitRule:
    """One part of a split; see ``Store.split``.

    Args:
        name: Name of the part.
        low, high: For each episode, a random number is drawn from ``[0, 1)``. The part consists of the episodes whose
            number is at least ``low`` and below ``high``.
        seed: Seed of the random numbers.
        by: "episode", or a column: one number is drawn for each value of that column.
    """

    name: str
    low: float
    high: float
    seed: int
    by: str

    def __repr__(self) -> str:
        return f"split({self.name}={self.high - self.low:g}, by={self.by!r}, seed={self.seed})"

    def taken(self, episodes: Episodes) -> Bools:
        """See ``Where.taken``."""
        drawn = _drawn(episodes.table, self.by, self.seed)
        taken: Bools = (self.low <= drawn) & (drawn < self.high)
        return taken


Rule = Where | Best | SplitRule
"""A rule that selects episodes."""


def parts_of(shares: Mapping[str, float], seed: int, by: str) -> dict[str, SplitRule]:
    """Return the parts of a split, by name; the last part gets the remaining share.

    Raises:
        ConfigError: A share is invalid, or the sum of the shares is above 1.
    """
    seed = check_seed(seed)
    if not isinstance(by, str):
        raise ConfigError(f"split: by: expected 'episode' or the name of a column, found {by!r:.80}")
    for name, share in shares.items():
        _check_share(f"split: {name}", share)
    ends = np.cumsum([0.0, *shares.values()]).tolist()
    left = 1.0 - ends[-1]
    if not shares or left < -_ENOUGH:
        raise ConfigError(f"split: expected shares whose sum is at most 1, such as train=0.9, found {dict(shares)}")
    if left > _ENOUGH:
        if REST in shares:
            raise ConfigError(
                f"split: when a share has the name {REST!r}, expected shares whose sum is 1, found {dict(shares)}"
            )
        shares, ends = {**shares, REST: left}, [*ends, 1.0]
    ends[-1] = 1.0
    return {name: SplitRule(name, ends[at], ends[at + 1], seed, by) for at, name in enumerate(shares)}


def _check_share(label: str, share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, float | int | np.floating) or not 0 < share <= 1:
        raise ConfigError(f"{label}: expected a share of the episodes, above 0 and at most 1, found {share!r:.80}")


def _drawn(table: pa.Table, by: str, seed: int) -> npt.NDArray[np.float64]:
    """For each episode, draw a random number in ``[0, 1)``, which depends only on the seed and on the episode's value
    of ``by``.
    """
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


# Number of pieces of a column that are inspected together.
_LOOKED_AT = 64


class ChosenSegment(_segments.SegmentView):
    """A segment that consists of ranges of another segment's rows. The rows keep their order, and are not copied.

    Args:
        whole: The segment from which rows are selected.
        firsts, sizes: The first row of each range, as an index in ``whole``, and the size of each range in rows, at
            least 1: int64 ``[n]``.
    """

    def __init__(self, whole: _segments.Segment, firsts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        super().__init__(whole, int(sizes.sum()))
        self.firsts, self.sizes, self.begins, self.has_indices = firsts, sizes, np.cumsum(sizes) - sizes, True

    @memo
    def indices(self) -> pa.Table | None:
        """The index in the table of each selected row, int64."""
        return pa.table({"indices": self.row_numbers(np.arange(self.num_rows))})

    @memo
    def origin(self) -> Any:
        """The selected rows as a ``datasets.Dataset``; None if the underlying segment has no such origin."""
        if self.whole.origin is None:
            return None
        stretches = [np.arange(first, first + size) for first, size in zip(self.firsts, self.sizes, strict=True)]
        return self.whole.origin.select(np.concatenate(stretches))

    @memo
    def runs(self) -> Stretches | None:
        """The selected ranges, cut at chunk boundaries; None if the ranges are so short that row indices need less
        memory.
        """
        whole = self.whole.runs if self.whole.has_indices else Stretches(self.whole.chunk_starts)
        if whole is None or _segments.are_too_short(len(self.sizes), self.num_rows):
            return None
        stretch, row, size, _ = cut_at_stretches(whole, self.firsts, self.sizes)
        return Stretches(np.concatenate([[0], np.cumsum(size)]), *whole.located(stretch, row), whole.longest)

    def row_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row index in the table for each of ``rows``, which are row indices in this segment (int64
        ``[n]``).
        """
        stretch = self.begins.searchsorted(rows, side="right") - 1
        return self.whole.row_numbers(self.firsts[stretch] + rows - self.begins[stretch])

    def begins_as(self, other: _segments.Segment) -> bool:
        """Return whether one of two selections begins with all rows of the other; the last common range can differ in
        size.

        Example with ranges as pairs (first row, size): let one selection be (0, 5), (9, 3). The result is True if the
        other selection is (0, 5), (9, 1), or (0, 5), (9, 3), (20, 4). The result is False if the other selection is (0,
        4), (9, 3).
        """
        if self is other or not isinstance(other, ChosenSegment):
            return self is other
        both = min(len(self.firsts), len(other.firsts))
        short, long = (self, other) if self.sizes[both - 1] <= other.sizes[both - 1] else (other, self)
        return (
            self.whole.begins_as(other.whole)
            and bool((self.firsts[:both] == other.firsts[:both]).all())
            and bool((self.sizes[: both - 1] == other.sizes[: both - 1]).all())
            and (len(short.firsts) == both or short.sizes[both - 1] == long.sizes[both - 1])
        )

    def has_value(self, name: str, rows: int) -> bool:
        """Return whether the column has a non-null value in the first ``rows`` rows."""
        return not rows or self.first_value(name, rows) is not None

    def take(self, row: int, count: int = 1) -> pa.Table:
        """Return ``count`` consecutive rows from ``row`` on as a table; by default one row."""
        first, last = (self.begins.searchsorted([row, row + count - 1], side="right") - 1).tolist()
        lows = np.maximum(row - self.begins[first : last + 1], 0)
        highs = np.minimum(row + count - self.begins[first : last + 1], self.sizes[first : last + 1])
        parts = zip((self.firsts[first : last + 1] + lows).tolist(), (highs - lows).tolist(), strict=True)
        return pa.concat_tables([self.whole.take(begin, size) for begin, size in parts])

    def _find_first(self, name: str) -> int | None:
        if self.whole.first_value(name, self.whole.num_rows) is None:
            return None
        if self.whole.has_indices:
            return super()._find_first(name)
        # Do not search the table, which may be remote and larger; usually the first row has a value.
        part, begin = self.whole.part(name), 0
        cut = cut_at_stretches(Stretches(self.whole.chunk_starts), self.firsts, self.sizes)[:3]
        pieces = list(zip(*(some.tolist() for some in cut), strict=True))
        edges = [0, 1, *range(1 + _LOOKED_AT, len(pieces), _LOOKED_AT), len(pieces)]
        for first, end in pairwise(edges):
            for values in part.slices(pieces[first:end]):
                if values.null_count < len(values):
                    return begin + int(np.argmin(values.is_null()))
                begin += len(values)
        return None

    def _listed(self, row: int, count: int) -> list[int]:
        listed: list[int] = self.row_numbers(np.arange(row, row + count)).tolist()
        return listed

    def __reduce__(self) -> tuple[Any, ...]:
        return ChosenSegment, (self.whole, self.firsts, self.sizes)


class ChosenSnapshot(Snapshot):
    """A snapshot of selected episodes of another snapshot, in the order of the other snapshot.

    Args:
        segments: The segments, which hold exactly the selected rows.
        config, budget, store_rows: See ``Snapshot``.
        starts: The first rows of the episodes, int64 ``[n]``, ascending, 0 first.
        root: The fingerprint of all rows of the store from which the episodes were selected.
        of_root: The first row of each selected episode, as an index of a row of the store, int64 ``[n]``. After
            repeated selections, ``of_root`` still contains row indices of the store.
    """

    def __init__(
        self,
        segments: Sequence[_segments.Segment],
        config: SnapshotConfig,
        budget: DenseBudget | None,
        store_rows: Any,
        starts: npt.NDArray[np.int64],
        root: str,
        of_root: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(segments, config, None, budget, store_rows=store_rows)
        self.__dict__["episode_starts"] = starts
        self.root, self.of_root = root, of_root

    def of_rows(self, rows: Any) -> Snapshot:
        """Return this snapshot. Raises ConfigError unless ``rows`` is the number of store rows from which the view
        selected episodes.
        """
        if rows != self.store_rows:
            raise ConfigError(
                f"snapshot: expected {self.store_rows}, the number of rows from which the view selected episodes, "
                f"found {rows!r:.200}; create the loader from the view itself"
            )
        return self

    def with_columns(self, segments: Sequence[_segments.Segment], config: SnapshotConfig) -> Snapshot:
        """Return a snapshot of the same rows with other columns; see ``Snapshot``."""
        of_store = (self.budget, self.store_rows)
        return ChosenSnapshot(segments, config, *of_store, self.episode_starts, self.root, self.of_root)

    def grown_from(self, before: Snapshot) -> None:
        """Return None: a later selection can insert or remove episodes, so only the segments' caches are reused."""
        return None

    @memo
    def fingerprint(self) -> str:
        """A digest of the store's rows, of the selection, and of the derived columns."""
        made = sorted(self.config.made.items())
        sizes = np.diff(self.episode_starts, append=self.num_rows)
        chosen = hashlib.sha256(self.root.encode() + self.of_root.tobytes() + sizes.tobytes()).hexdigest()[:32]
        return hashlib.sha256(json.dumps([chosen, made]).encode()).hexdigest()[:32]

    def __reduce__(self) -> tuple[Any, ...]:
        of_store = (self.config, self.budget, self.store_rows)
        return ChosenSnapshot, (self.segments, *of_store, self.episode_starts, self.root, self.of_root)
