"""Which episodes a view of a store has: rules from a table of episodes to those that are taken."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.store._episodes.table import Episodes

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
class SplitRule:
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


def parts_of(shares: Mapping[str, float], seed: int, by: str) -> dict[str, SplitRule]:
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
    return {name: SplitRule(name, ends[at], ends[at + 1], seed, by) for at, name in enumerate(shares)}


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
