"""Stores with derived fields, such as returns, times, the previous action, and ends of episodes.

A derived field is computed once per snapshot, when the field is first read; the computation processes a few episodes at
a time. All derived fields except ``Terminated`` and ``Truncated`` belong to the row's observation, so their values do
not depend on the alignment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.dense import UNKNOWN
from mouse_core._base.checks import UNREADABLE
from mouse_core._base.identity import derivation_identity
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.dtypes import RowError, convert, to_numpy
from mouse_core.errors import ConfigError, DataError, MissingFieldError, StorageError
from mouse_core.files.checksum import RunningDigest, digest
from mouse_core.files.writing import make_folder, replacing, storing
from mouse_core.spec import Alignment, Field, FieldSpec, Spec, check_count, check_unit, codes_called
from mouse_core.store._chosen import ChosenSegment
from mouse_core.store._segments import Segment, SegmentView
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.metadata import DatasetMetadata
    from mouse_core.store._chosen import Episodes

Floats = npt.NDArray[np.float64]

# Episodes are cut into pieces of this many rows, which are summed in parallel.
_PIECE = 32


def discounted_sums(values: Floats, lengths: npt.NDArray[np.int64], discount: float) -> Floats:
    """Return x_t = values_t + discount x_{t+1} within each episode, where x is 0 after the episode's last row.

    Episodes are independent of each other. Each episode is cut into pieces of 32 rows. All pieces are summed backward
    at the same time, in 31 steps. The result of each piece then lacks the discounted sum of the later pieces. The
    missing sums satisfy the same recursion from piece to piece, with ``discount**32`` as the discount, and are computed
    in the same way.

    Example: pieces of 2 rows, values 1, 2, 4, 8, 16 of one episode, a discount of 0.5. The pieces 1 2 | 4 8 | 16 give 2
    2 | 8 8 | 16. The first rows of the pieces, 2, 8, 16, with a discount of 0.25 give 5, 12, 16. The sum after the
    first piece is 12: a quarter of 12 is added to the first row of the first piece, and half of 12 to the second row.
    The sum after the second piece is 16. The result is 5 8 | 12 16 | 16.

    The result of an episode does not depend on the other episodes, bit for bit. The computation takes about as long as
    ``numpy.cumsum``.

    Args:
        values: float64 ``[n]``, episode after episode.
        lengths: Number of rows of each episode, at least 1, int64 ``[e]``; the sum of all lengths is ``n``.
        discount: The discount per step.

    Returns:
        float64 ``[n]``.

    Example:
        >>> import numpy as np
        >>> discounted_sums(np.array([1.0, 2.0, 4.0, 8.0]), np.array([3, 1]), 0.5)
        array([3., 4., 4., 8.])
    """
    if len(values) == len(lengths) or discount == 0.0:
        return values  # without a product: 0 times infinity is NaN
    rows = min(_PIECE, int(lengths.max()))
    pieces = -(-lengths // rows)
    last_piece = np.cumsum(pieces) - 1
    filled = np.full(int(pieces.sum()), rows)
    filled[last_piece] = lengths - (pieces - 1) * rows
    is_there = np.arange(rows) < filled[:, None]
    # Each piece is a column, padded with 0; sums run over all columns at once.
    summed = np.zeros((rows, len(filled)))
    if len(values) == summed.size:
        summed[:] = values.reshape(-1, rows).T
    else:
        summed.T[is_there] = values
    for row in range(rows - 2, -1, -1):
        summed[row] += discount * summed[row + 1]
    if len(filled) > len(lengths):
        from_first_rows = discounted_sums(summed[0].copy(), pieces, discount**rows)
        behind = np.append(from_first_rows[1:], 0.0)
        behind[last_piece] = 0.0
        steps_to_behind = np.arange(rows, 0, -1.0)
        summed += discount ** steps_to_behind[:, None] * behind
    found: Floats = summed.T.reshape(-1) if len(values) == summed.size else summed.T[is_there]
    return found


def sums_of_next(values: Floats, behind: npt.NDArray[np.int64], n: int, discount: float) -> Floats:
    """Return the sum of ``discount**k * values[t + k]`` over the next ``n`` rows, ``k`` from 0, within each episode.

    Sums of 2 rows are computed from sums of 1 row, sums of 4 rows from sums of 2 rows, and so on. The sum of 5 rows is
    the sum of 1 row plus the sum of the next 4 rows. With this doubling, sums of 1,000 rows take 10 steps. No value is
    subtracted, so values after the next ``n`` rows have no effect, even if they are infinite.

    Example: values 1, 2, 4, 8, 16 of one episode, ``n`` of 3, a discount of 1. Sums of 2 rows are 3, 6, 12, 24, 16.
    Sums of 3 rows are 1 + 6, 2 + 12, 4 + 24, 8 + 16, 16.

    Args:
        values: float64 ``[n]``, episode after episode.
        behind: For each row, how many later rows its episode has, int64 ``[n]``.
        n: How many rows each sum covers, at least 1.
        discount: The discount per step.

    Returns:
        float64 ``[n]``.

    Example:
        >>> import numpy as np
        >>> sums_of_next(np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 1, 0, 0]), 2, 0.5)
        array([2., 4., 4., 8.])
    """
    if discount == 0.0:
        return values  # without a product: 0 times infinity is NaN
    left = min(n, int(behind.max(initial=0)) + 1)
    total, summed, rows, done = np.zeros(len(values)), values, 1, 0
    while left:
        if left & 1:
            (there,) = np.nonzero(behind >= done)
            total[there] += discount**done * summed[there + done]
            done += rows
        left >>= 1
        if left:
            (there,) = np.nonzero(behind >= rows)
            longer = summed.copy()
            longer[there] += discount**rows * summed[there + rows]
            summed, rows = longer, 2 * rows
    return total


Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]

# The codes of ``done`` if they have no labels.
_CODES = {"terminal": (1,), "truncated": (2,)}
# The code in ``agent_done`` of transitions behind the end of the agent.
_GONE = 3
# Number of rows that are read of a snapshot at a time.
_LENGTH = 4096


class Derivation(Protocol):
    """The computation of a derived field from other fields. The computation must be a pure function of complete
    episodes.

    The fingerprint of a store contains the derivation's ``repr``, such as the ``repr`` of a frozen dataclass. If the
    class defines no ``repr``, or if the ``repr`` abbreviates arrays, the fingerprint contains the class and the values
    of the derivation's attributes instead. The values of an episode must not depend on other episodes: ``compute`` gets
    a few episodes at a time. When a store grows, only the new episodes and the last of the earlier episodes are
    computed. If the field belongs to transitions, like ``done``, the attribute ``transition`` is True; sources use this
    attribute for their argument ``windows``.
    """

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return the spec of the field: the dtype in batches, the dtype in memory (``stored_dtype``) and the shape of a
        step.

        Args:
            name: The name of the field.
            rows: The spec of the existing fields.

        Raises:
            MissingFieldError: A field that the derivation reads is missing.
        """
        ...

    def compute(self, rows: EpisodeRows) -> Array:
        """Compute the field's values, ``[n, *shape]``, for the rows of one or more complete episodes."""
        ...


class EpisodeRows:
    """Consecutive rows of complete episodes: the input of a ``Derivation``.

    An unfinished episode ends with the last present row.

    Args:
        snapshot: The snapshot from which values are read.
        begin: The index of the first row in the snapshot.
        lengths: Number of rows of each episode, int64 ``[e]``.
    """

    def __init__(self, snapshot: Snapshot, begin: int, lengths: Int64s) -> None:
        self._snapshot, self._begin = snapshot, begin
        self.lengths = lengths
        self.num_rows = int(lengths.sum())
        self.fields_read: set[str] = set()

    def __len__(self) -> int:
        return self.num_rows

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self._snapshot.alignment

    @memo
    def first_rows(self) -> Int64s:
        """The first row of each episode, int64 ``[e]``."""
        found: Int64s = self.last_rows - self.lengths + 1
        return found

    @memo
    def last_rows(self) -> Int64s:
        """The last row of each episode, int64 ``[e]``."""
        return np.cumsum(self.lengths) - 1

    @memo
    def time(self) -> Int64s:
        """The number of rows before each row in its episode, int64 ``[n]``."""
        return np.arange(self.num_rows) - np.repeat(self.first_rows, self.lengths)

    @memo
    def steps_left(self) -> Int64s:
        """The number of transitions after each row's observation, int64 ``[n]``.

        With alignment "arrived", the last row of an episode holds the final observation, from which no transition
        begins. With "outgoing", the last row holds the observation from which the last transition begins.
        """
        left: Int64s = np.repeat(self.last_rows, self.lengths) - np.arange(self.num_rows)
        if self.alignment == "outgoing":
            left += 1
        return left

    @memo
    def is_terminal(self) -> npt.NDArray[np.bool_]:
        """Whether each episode ended in a terminal state, bool ``[e]``; False if the episode was truncated or
        interrupted.
        """
        return self.done_is("terminal")[self.last_rows]

    def done_is(self, word: str) -> npt.NDArray[np.bool_]:
        """Return, for each row, whether the label of the row's ``done`` code contains a word such as "terminal", bool
        ``[n]``.
        """
        codes = codes_called(self._snapshot.config.fields["done"], word) or _CODES[word]
        done = self.values("done")
        return done == codes[0] if len(codes) == 1 else np.isin(done, codes)

    def values(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """Return a field's values, ``[n, *shape]``, row by row.

        Args:
            field: The name of the field.
            dtype: The dtype of the result; by default the dtype in batches.

        Raises:
            MissingFieldError: The field does not exist.
            DataError: A value is outside the bounds of the field.
        """
        reader = self._snapshot.readers.get(field)
        self.fields_read.add(field)
        if reader is None:
            known = list(self._snapshot.readers)
            raise MissingFieldError(f"derived fields: expected a field {field!r} to compute from, found {known}")
        found = np.empty((self.num_rows, *reader.spec.shape), reader.spec.dtype if dtype is None else dtype)
        whole = self.num_rows // _LENGTH * _LENGTH
        for begin, end, length in ((0, whole, _LENGTH), (whole, self.num_rows, self.num_rows - whole)):
            if begin < end:
                windows = self._snapshot.locate(np.arange(begin, end, length) + self._begin, length).part(0)
                out = found[begin:end].reshape(-1, length, *reader.spec.shape)
                reader.read(windows, found.dtype, out)
        return found

    @property
    def spec(self) -> Spec:
        """The spec of the fields."""
        return self._snapshot.spec

    def leaving(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """Return, for each row, the action, reward or done of the transition that begins at the row's observation.

        The value is 0 if no transition begins at the observation, as in the last row of an episode with alignment
        "arrived". For a field of observations, the value of the row itself is returned.

        Args:
            field, dtype: As in ``values``.
        """
        values = self.values(field, dtype)
        if not self._is_arrived(field):
            return values
        following = np.zeros_like(values)
        following[:-1] = values[1:]
        following[self.last_rows] = 0
        return following

    def arriving(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """Return, for each row, the action, reward or done of the transition that led to the row's observation.

        The value is 0 if no transition led to the observation, as in the first row of an episode. For a field of
        observations, the value of the previous row is returned.

        Args:
            field, dtype: As in ``values``.
        """
        values = self.values(field, dtype)
        if not self._is_arrived(field):
            before = np.zeros_like(values)
            before[1:] = values[:-1]
            values = before
        values[self.first_rows] = 0
        return values

    def _is_arrived(self, field: str) -> bool:
        """Return whether a row's value belongs to the transition that led to the row's observation."""
        return self.alignment == "arrived" and self._snapshot.config.fields[field].is_of_transition


def digest_of(snapshot: Snapshot, field: str, begins: Int64s) -> str:
    """Return a digest of a field's stored values in all rows. If ``field`` is "", return a digest of the episode
    starts.

    Args:
        snapshot: The rows.
        field: The name of the field.
        begins: First row of each block to read, followed by the number of rows, int64 ``[n]``.
    """
    if not field:
        return digest(np.ascontiguousarray(snapshot.episode_starts).view(np.uint8).data)
    if field not in snapshot.readers:
        raise MissingFieldError(f"derived fields: expected a field {field!r}, found {list(snapshot.readers)}")
    reader = snapshot.readers[field]
    dtype = reader.stored_dtype(reader.spec.dtype)
    running = RunningDigest(f"{dtype.str} {reader.spec.shape}".encode())
    for begin, end in pairwise(begins.tolist()):
        values = EpisodeRows(snapshot, begin, np.array([end - begin])).values(field, dtype)
        running.update(values.reshape(-1).view(np.uint8).data)
    return running.hexdigest()


def known_field(rows: Spec, name: str, what: str) -> FieldSpec:
    """Return the spec of the field ``name``.

    Raises:
        MissingFieldError: The field does not exist.
    """
    if name not in rows:
        raise MissingFieldError(f"{what}: expected a field {name!r} to compute from, found {list(rows)}")
    return rows[name]


def _number(name: str, dtype: str, stored: str = "") -> FieldSpec:
    return FieldSpec(name, np.dtype(dtype), (), stored_dtype=np.dtype(stored or dtype))


def _is_by_agent(rows: Spec, reward: FieldSpec) -> bool:
    """Return whether each reward has one number per agent, and the store has the field ``agent_done``."""
    return "agent_done" in rows and reward.shape[:1] == rows["agent_done"].shape


def _sums(rewards: Array, sums: Callable[[Floats], Floats]) -> Array:
    """Apply ``sums`` to each component of rewards ``[n, ...]``."""
    if rewards.size == len(rewards):
        return sums(rewards.reshape(-1)).reshape(rewards.shape)
    columns = np.ascontiguousarray(rewards.reshape(len(rewards), -1).T)
    return np.stack([sums(column) for column in columns], axis=1).reshape(rewards.shape)


# ---------------------------------------------------------------------- returns


@dataclass(frozen=True)
class Return:
    """The discounted sum of the future rewards of the episode, float32: the return-to-go.

    ``G[t] = r + discount * G[t + 1]``, where ``r`` is the reward of the transition that begins at observation t. The
    sum ends with the episode; the sum is 0 if no transition begins at the observation (Sutton and Barto, "Reinforcement
    learning", 2nd edition, section 3.3). With a discount of 1, the sum is the return-to-go of D4RL's evaluations and of
    decision transformers. Sums are computed in float64. In an unfinished episode, the sum includes only the rows that
    exist. If rewards are vectors, the sums are vectors. If the store has the field ``agent_done``, an agent's sum
    contains no rewards after the end of that agent.

    Args:
        discount: The discount per step, in ``[0, 1]``.
        reward: The field of rewards.

    Raises:
        ConfigError: ``discount`` is out of range.
    """

    discount: float = 1.0
    reward: str = "reward"

    def __post_init__(self) -> None:
        check_unit("Return: discount", self.discount)

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of float32, in the shape of the reward."""
        return _number(name, "float32").replace(shape=known_field(rows, self.reward, "Return").shape)

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the sums, float64 ``[n, ...]``."""
        rewards = rows.leaving(self.reward, np.float64)
        if _is_by_agent(rows.spec, rows.spec[self.reward]):
            rewards[rows.leaving("agent_done") == _GONE] = 0.0
        return _sums(rewards, lambda one: discounted_sums(one, rows.lengths, float(self.discount)))


def _steps_taken(rows: EpisodeRows, n: int) -> Array:
    """Return the number of steps from each row's observation to the bootstrap observation, int64 ``[n]``.

    The number is ``n``, or the number of steps left in the episode if fewer than ``n`` steps are left. In an "outgoing"
    episode that did not terminate, the observation after the last transition is not stored, so the returned number is
    one less.
    """
    left = rows.steps_left
    if rows.alignment == "outgoing":
        left = left - np.repeat(~rows.is_terminal, rows.lengths)
    return np.minimum(left, n)


@dataclass(frozen=True)
class NStepReturn:
    """The discounted sum of the next ``n`` rewards, float32. The sum plus a discounted bootstrap value is an n-step
    target.

    ``G[t] = sum(discount**k * r[t + k] for k in range(m))``, where ``r`` is defined as in ``Return``, and ``m`` is
    ``n``, or less if the episode ends earlier. The target is ``G[t] + d[t] * V(observation t + m)``, where ``d`` is
    ``NStepDiscount(n, discount)``. The bootstrap observation is the observation ``n`` rows later, or the observation in
    the last row of the episode (Sutton and Barto, section 7.1; Pardo et al., "Time limits in reinforcement learning",
    ICML 2018).

    Args:
        n: Number of steps, at least 1.
        discount: The discount per step, in ``[0, 1]``.
        reward: The field of rewards.

    Raises:
        ConfigError: ``n`` or ``discount`` is out of range.
    """

    n: int
    discount: float
    reward: str = "reward"

    def __post_init__(self) -> None:
        check_count("NStepReturn: n", self.n)
        check_unit("NStepReturn: discount", self.discount)

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of float32, in the shape of the reward."""
        reward = known_field(rows, self.reward, "NStepReturn")
        if _is_by_agent(rows, reward):
            raise ConfigError(
                "NStepReturn: expected rewards that end with the episode, found a reward for each agent and a field "
                "'agent_done'; the transform NStep of a replay buffer ends each agent separately"
            )
        return _number(name, "float32").replace(shape=reward.shape)

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the sums, float64 ``[n, ...]``."""
        rewards = rows.leaving(self.reward, np.float64)
        # The last transition of an episode does not count if the observation that it leads to is not stored.
        rewards[_steps_taken(rows, 1) == 0] = 0.0
        behind = np.repeat(rows.last_rows, rows.lengths) - np.arange(len(rows))
        return _sums(rewards, lambda one: sums_of_next(one, behind, self.n, float(self.discount)))


@dataclass(frozen=True)
class NStepDiscount:
    """The discount of the bootstrap value ``n`` steps later, float32: ``discount**m``, or 0 after termination.

    See ``NStepReturn`` for ``m``. The factor is 0 if the episode terminates within these ``m`` steps. In a truncated or
    interrupted episode, the bootstrap value is the value of the episode's last observation. With ``n`` 1 and
    ``discount`` 1, the factor is the mask ``1 - terminated``.

    Args:
        n: Number of steps, at least 1.
        discount: The discount per step, in ``[0, 1]``.

    Raises:
        ConfigError: ``n`` or ``discount`` is out of range.
    """

    n: int = 1
    discount: float = 1.0

    def __post_init__(self) -> None:
        check_count("NStepDiscount: n", self.n)
        check_unit("NStepDiscount: discount", self.discount)

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of float32, one number for each step."""
        known_field(rows, "done", "NStepDiscount")
        return _number(name, "float32")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the factors, float64 ``[n]``."""
        taken = _steps_taken(rows, self.n)
        is_over = (taken == rows.steps_left) & np.repeat(rows.is_terminal, rows.lengths)
        powers = float(self.discount) ** np.arange(int(taken.max()) + 1.0)
        return np.where(is_over, 0.0, powers[taken])


# ---------------------------------------------------------------------- times


@dataclass(frozen=True)
class TimeFromStart:
    """The number of steps before a row in its episode, int64: 0 in the first row."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of int64, stored as int32."""
        return _number(name, "int64", "int32")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the times, int64 ``[n]``."""
        return rows.time


@dataclass(frozen=True)
class TimeToEnd:
    """The number of transitions after a row's observation in its episode, int64.

    In the last row of an episode, the number is 0 with alignment "arrived", and 1 with "outgoing". In an unfinished
    episode, only the present rows are counted.
    """

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of int64, stored as int32."""
        return _number(name, "int64", "int32")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the times, int64 ``[n]``."""
        return rows.steps_left


# ---------------------------------------------------------------------- what came before


@dataclass(frozen=True)
class Previous:
    """A value of the transition that led to a row's observation, such as the previous action or the previous reward.

    The value is 0 in the first row of an episode. In other rows, the value comes from the row itself with alignment
    "arrived", and from the previous row with "outgoing".

    Args:
        field: "action", "reward", or another field. For a field of observations, the result is the value of the
            previous row.
    """

    field: str = "action"

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return the spec of the underlying field."""
        return known_field(rows, self.field, "Previous").replace(name=name, column="")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the values, ``[n, *shape]``."""
        return rows.arriving(self.field)


# ---------------------------------------------------------------------- beginnings and ends


@dataclass(frozen=True)
class IsFirst:
    """Whether a row is the first row of its episode, bool."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of bool, stored as uint8."""
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the flags, uint8 ``[n]``."""
        return _marked(rows, rows.first_rows)


@dataclass(frozen=True)
class IsLast:
    """Whether a row is the last row of its episode, bool. In an unfinished episode, the last present row is treated as
    the last row.
    """

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of bool, stored as uint8."""
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the flags, uint8 ``[n]``."""
        return _marked(rows, rows.last_rows)


def _marked(rows: EpisodeRows, which: npt.NDArray[np.int64]) -> Array:
    flags = np.zeros(len(rows), np.uint8)
    flags[which] = 1
    return flags


@dataclass(frozen=True)
class Terminated:
    """Whether a transition ended its episode in a terminal state, bool. The flag is in the same row as the transition's
    ``done``.
    """

    transition: ClassVar[bool] = True

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of bool, stored as uint8."""
        known_field(rows, "done", "Terminated")
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the flags, bool ``[n]``."""
        return rows.done_is("terminal")


@dataclass(frozen=True)
class Truncated:
    """Whether an episode was truncated after a transition, bool. The flag is in the same row as the transition's
    ``done``.
    """

    transition: ClassVar[bool] = True

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return a spec of bool, stored as uint8."""
        known_field(rows, "done", "Truncated")
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Return the flags, bool ``[n]``."""
        return rows.done_is("truncated")


class DerivedSegment(SegmentView):
    """A segment of another snapshot with additional derived columns.

    Args:
        segment: The underlying segment.
        number: The index of the segment in the snapshot.
        derived: The Arrow types of the derived columns, by name.
        values: Function that returns the values of a derived column for the rows of a segment's table, ``[rows,
            *shape]``.
    """

    def __init__(
        self, segment: Segment, number: int, derived: Mapping[str, pa.DataType], values: Callable[[str, int], Array]
    ) -> None:
        super().__init__(segment, segment.num_rows)
        self._number, self._derived, self._values = number, derived, values
        # Appended rows may change derived values of earlier rows, so each snapshot has its own arrays.
        self.extent = None if segment.extent is None else object()

    @property
    def recorded(self) -> Segment:
        """The segment of the recorded rows, without computed columns."""
        return self.whole.recorded

    @memo
    def table(self) -> pa.Table:
        """The table of steps with the derived columns."""
        table = self.whole.table
        for name in self._derived:
            table = table.append_column(name, self._column(name))
        return table

    def _slice(self, row: int, count: int) -> pa.Table:
        # Not from the table, which would load all rows.
        taken = self.whole.take(row, count)
        for name in self._derived:
            taken = taken.append_column(name, self._column(name).slice(row, count))
        return taken

    def column(self, name: str) -> pa.ChunkedArray | None:
        """Return a column. If the column is recorded, no derived column is computed."""
        return self._column(name) if name in self._derived else self.whole.column(name)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return {**self.whole.types, **self._derived}

    def part(self, name: str) -> ColumnPart:
        """Return one column. A recorded column is the column of the underlying segment, which caches properties of its
        chunks.
        """
        if name not in self._derived:
            return self.whole.part(name)
        if name not in self._parts:
            values = partial(self._values, name, self._number)
            self._parts.setdefault(name, _DerivedPart(values, self.chunk_starts))
        return self._parts[name]

    def _column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([to_arrow(self._values(name, self._number))])

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """See ``Segment``. For a derived column, the first row is returned without computing the column."""
        if name not in self._derived:
            return self.whole.first_value(name, rows)
        return (0, 0) if rows > 0 else None

    def has_value(self, name: str, rows: int) -> bool:
        """Return whether a value among the first ``rows`` rows is not null."""
        return name in self._derived or self.whole.has_value(name, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedSegment, (self.whole, self._number, self._derived, self._values)


class _DerivedPart(ColumnPart):
    """A derived column of one segment: one array for all chunks of the segment.

    Args:
        values: Function that returns the array, ``[rows, *shape]``.
        starts: The first row of every chunk, followed by the number of rows.
    """

    def __init__(self, values: Any, starts: npt.NDArray[np.int64]) -> None:
        super().__init__(lambda: pa.chunked_array([to_arrow(values())]), starts, same_chunks=False)
        self._values = values

    def known(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the address of every chunk's values, and the number of values in a row; computes the column."""
        if (self.begin == UNKNOWN).any():
            values: Array = self._values()
            with self.lock:
                self.width[:] = prod(values.shape[1:])
                self.begin[:] = values.ctypes.data + self._starts[:-1] * values.strides[0]
        return super().known()


def to_arrow(values: Array) -> pa.Array:
    """Return values ``[n, *shape]`` as an Arrow array that shares their memory."""
    flat = pa.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


_VERSION = 1
_KEY = b"mouse_derived"


def is_lasting(snapshot: Snapshot) -> bool:
    """Return whether all rows come from datasets, so that a later process can read the rows."""
    segments = snapshot.segments
    return all(_is_lasting(segment) for segment in segments) and snapshot.num_rows == sum(
        segment.num_rows for segment in segments
    )


def _is_lasting(segment: Segment) -> bool:
    segment = segment.recorded
    return _is_lasting(segment.whole) if isinstance(segment, ChosenSegment) else segment.extent is None


def said_of(snapshot: Snapshot, how: object, spec: FieldSpec) -> dict[str, Any]:
    """Return the metadata for a file of derived values: the version of the file format, and all properties that
    determine the values.
    """
    return {
        "version": _VERSION,
        "rows": snapshot.num_rows,
        "fingerprint": snapshot.fingerprint,
        "how": derivation_identity(how),
        "dtype": spec.stored_dtype.name,
        "shape": list(spec.shape),
    }


def load(file: Path, said: Mapping[str, Any], digest: Callable[[str], str]) -> Array | None:
    """Map the derived values of a file, ``[rows, *shape]``; return None if the file does not exist or its metadata
    differ.

    ``digest`` returns the digest of a field's values; the file contains the names and digests of the fields from which
    its values were computed. A damaged or truncated file is treated as missing, because the derived values can be
    computed again.
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
        # Values of another type, or another number of values, also mean damage.
        shaped: Array = values.view(said["dtype"]).reshape(said["rows"], *said["shape"])
        return shaped if _checksum_of(shaped) == checksum else None
    except (OSError, MissingFieldError, pa.ArrowException, *UNREADABLE):
        return None


def _checksum_of(values: Array) -> str:
    return digest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def write(file: Path, values: Array, said: Mapping[str, Any], read: Mapping[str, str]) -> None:
    """Write a file of derived values, and replace an existing file. ``read`` has the digests of the fields from which
    the values were computed.

    Raises:
        StorageError: The file cannot be written; an existing file is unchanged.
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


# Number of rows, in whole episodes, that are computed at a time: few, so that results stay in the processor's cache.
_ROWS = 1 << 17


class DerivedColumns:
    """The derived columns of one snapshot, with an array for each segment.

    Args:
        base: The snapshot.
        derivations: The derivations of the fields, by name.
        computed: Arrays that are computed already, by field and segment.
        path: The folder of the files of derived values; None: values stay in memory.
        digests: Known digests, by name, of the fields that derived fields are computed from.
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
        # By field: an earlier snapshot of the store, and its computed arrays.
        self._begun: dict[str, tuple[Snapshot, list[Array]]] = {}
        self._digests = dict(digests or {})
        self._fields_read: dict[str, set[str]] = {}
        self._lock = ProcessLock()

    @memo
    def specs(self) -> dict[str, FieldSpec]:
        """The specs of the fields, by name.

        Raises:
            ConfigError: The snapshot already has a field with the name of a derived field, or a derivation is invalid.
            MissingFieldError: A field that a derivation reads is missing.
        """
        found = {}
        for name, derivation in self.derivations.items():
            if name in self.base.spec or name in self.base.config.types:
                raise ConfigError(f"derived fields: expected a name that no other field has, found {name!r}")
            found[name] = derivation.spec(name, self.base.spec)
        return found

    @memo
    def types(self) -> dict[str, pa.DataType]:
        """The columns' Arrow types, by name."""
        return {name: to_arrow(np.empty((0, *one.shape), one.stored_dtype)).type for name, one in self.specs.items()}

    def values(self, name: str, segment: int) -> Array:
        """Return a field's values for the rows of a segment's table, ``[rows, *shape]``, in the stored dtype.

        In rows of the table that are not in the snapshot, the values are 0.
        """
        with self._lock:
            if name not in self._computed:
                self._computed[name] = self._by_segment(name)
            return self._computed[name][segment]

    def taken_over(self, base: Snapshot) -> DerivedColumns:
        """Return the derived columns of a later snapshot of the same store. Values of the rows that both snapshots have
        are reused.

        Episodes that are complete in both snapshots are not computed again. The episode at the end of the common rows
        is computed again, because this episode can continue in the later snapshot.
        """
        later = DerivedColumns(base, self.derivations, path=self.path)
        with self._lock:
            # A field that was never read in this snapshot may have been read in an earlier one.
            later._begun = {**self._begun, **{name: (self.base, arrays) for name, arrays in self._computed.items()}}
        return later

    def _known_before(self, name: str) -> tuple[int, list[Array] | None]:
        """Return the first row that must be computed, and the arrays, by segment, with the values of the earlier
        rows.
        """
        if name not in self._begun:
            return 0, None
        earlier, arrays = self._begun.pop(name)
        common = _common_rows(earlier, self.base)
        starts = self.base.episode_starts
        first = int(starts[np.searchsorted(starts, common) - 1]) if common else 0
        return first, arrays if first else None

    def _by_segment(self, name: str) -> list[Array]:
        """Return a derived field's arrays, one array for each segment; missing values are computed."""
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
        """Return a segment's array in the order of the segment's table: ``known`` values, then ``values`` for the last
        rows."""
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
                f"expected each row of a dataset at most once in the store, found a row among rows {begin}.."
                f"{begin + there - 1} twice, so {name!r} would have two values for one row; call flatten_indices() on "
                "the dataset first, which copies repeated rows"
            )
        return placed

    def _kept(self, name: str) -> Array:
        """Return all values of a derived field; if the file of the field is valid, read the values from the file."""
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
            raise StorageError(f"{file}: expected the values that were written, found different values")
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
        """Compute a field for the rows from ``first`` on, ``[num_rows - first, *shape]``; an episode must begin at row
        ``first``.
        """
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
        """Yield blocks of whole episodes from row ``first`` on, with the first row of each block."""
        starts = self.base.episode_starts
        edges = np.append(starts[np.searchsorted(starts, first) :], self.base.num_rows)
        at = 0
        while at < len(edges) - 1:
            end = max(at + 1, int(np.searchsorted(edges, edges[at] + _ROWS, side="right")) - 1)
            yield EpisodeRows(self.base, int(edges[at]), np.diff(edges[at : end + 1])), int(edges[at])
            at = end

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            # A dataset's rows can be read again in the other process.
            computed = {} if is_lasting(self.base) else dict(self._computed)
            return DerivedColumns, (self.base, self.derivations, computed, self.path, self._digests)


def _common_rows(before: Snapshot, after: Snapshot) -> int:
    """Compare the segments of two snapshots, and return how many leading rows both snapshots share."""
    rows = 0
    for one, other in zip(before.segments, after.segments, strict=False):
        if not one.begins_as(other):
            break
        rows += min(one.num_rows, other.num_rows)
        if one.num_rows != other.num_rows:
            break
    return min(rows, before.num_rows, after.num_rows)


class DerivedStore(Store):
    """A store with derived fields: returns-to-go, times, the previous action, and others.

    Every loader delivers derived fields like other fields. A derived field is computed once per snapshot, when the
    field is first read. The values stay in memory; most fields need 4 bytes per row. Later rows appear in the next
    snapshot, where the derived values of an unfinished episode can differ. If all rows come from datasets, a pickled
    store contains no derived values: another process computes the derived values again, or maps them from ``path``.

    Args:
        store: Any store.
        fields: The derivations of the fields by name, such as ``{"returns_to_go": Return()}``. Derivations read the
            fields of ``store``, not other derived fields; to derive from a derived field, wrap this store in another
            ``DerivedStore``.
        path: A folder for derived values, with one file for each field. Later processes map these files to memory. The
            file also contains the derivation and the digests of the fields that the derivation reads. The file is
            replaced if the derivation or a digest differs; computing the digests reads all values of these fields. The
            folder is used only if all rows come from datasets. None: values stay in memory.

    Raises:
        StorageError: Derived values cannot be written. Raised when a field is first read.
        ConfigError: ``store`` is not a store, or a derivation is invalid. The first snapshot with rows raises
            ConfigError if the store has a field of the same name, and MissingFieldError if a field that a derivation
            reads is missing.

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
                raise ConfigError(
                    f"derived fields: {name!r}: expected a derivation such as Return(), found {derivation!r:.80}"
                )
            derivation_identity(derivation)  # raises if there is no identity
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
    def metadata(self) -> DatasetMetadata:
        """The metadata of the store's rows, with the derived fields."""
        said = self._store.metadata
        if not len(self._store):
            return said
        derived = [one for name, one in self.snapshot().config.fields.items() if name in self._derivations]
        return said.replace(fields=(*said.fields, *derived))

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """Return a snapshot of the present rows, or of the rows of an earlier snapshot; see ``Store``."""
        return self._derived(self._store.snapshot(rows), is_latest=rows is None)

    def _look(self, rows: int | None = None) -> tuple[Snapshot, Episodes]:
        # The episodes of the store, with their numbers in the store.
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
    """Return a snapshot with the derived fields of ``columns``."""
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
