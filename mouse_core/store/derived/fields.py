"""Computed fields (returns, times, the previous action, ends of episodes), and the rows that they are computed from.

But for ``Terminated`` and ``Truncated``, they belong to the observation of a row: the value is the same in
either alignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.errors import MissingFieldError
from mouse_core.files.checksum import RunningDigest, digest
from mouse_core.spec import Alignment, FieldSpec, Spec, check_count, check_unit, codes_called
from mouse_core.store.snapshot import Snapshot

Floats = npt.NDArray[np.float64]

# Episodes are cut into pieces of so many rows, which are summed beside each other.
_PIECE = 32


def discounted_sums(values: Floats, lengths: npt.NDArray[np.int64], discount: float) -> Floats:
    """x_t = values_t + discount x_{t+1} within each episode, with nothing behind its last row.

    Rows of an episode depend on each other, rows of two do not. So each episode is cut into pieces of 32 rows, and all
    pieces are summed backward beside each other, in 31 steps. What is missing then is what comes behind a piece: it is
    the same kind of sum, of the pieces' first rows and with a discount of 32 steps, and found in the same way.

    With pieces of 2 rows, values 1, 2, 4, 8, 16 of one episode and a discount of 0.5: the pieces 1 2 | 4 8 | 16 give
    2 2 | 8 8 | 16. Their first rows 2, 8, 16 with a discount of 0.25 give 5, 12, 16. Behind the first piece come 12, a
    quarter and a half of which are added to it, behind the second 16: 5 8 | 12 16 | 16.

    What an episode's rows become does not depend on the other episodes, not even in the last bit, and takes about as
    long as ``numpy.cumsum``.

    Args:
        values: float64 ``[n]``, episode after episode.
        lengths: The rows of each episode, from 1, int64 ``[e]``, ``n`` in all.
        discount: Of one step.

    Returns:
        float64 ``[n]``.

    Example:
        >>> import numpy as np
        >>> discounted_sums(np.array([1.0, 2.0, 4.0, 8.0]), np.array([3, 1]), 0.5)
        array([3., 4., 4., 8.])
    """
    if len(values) == len(lengths) or discount == 0.0:
        return values  # without a product: nothing times infinity is no number
    rows = min(_PIECE, int(lengths.max()))
    pieces = -(-lengths // rows)
    last_piece = np.cumsum(pieces) - 1
    filled = np.full(int(pieces.sum()), rows)
    filled[last_piece] = lengths - (pieces - 1) * rows
    is_there = np.arange(rows) < filled[:, None]
    # Pieces lie one behind the other, shorter ones filled up with nothing; sums run over columns of all pieces.
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
    """The sum of ``discount**k * values[t + k]`` over the next ``n`` rows, ``k`` from 0, within each episode.

    Sums of 2 rows are made of those of 1, sums of 4 of those of 2, and so on; the next 5 rows are the next one and the
    4 behind it. So 1,000 rows take 10 steps, and nothing is subtracted: what comes behind the next ``n`` rows does not
    show, not even an infinite one.

    With values 1, 2, 4, 8, 16 of one episode, 3 rows and a discount of 1: sums of 2 rows are 3, 6, 12, 24, 16, and of 3
    they are 1 + 6, 2 + 12, 4 + 24, 8 + 16, 16.

    Args:
        values: float64 ``[n]``, episode after episode.
        behind: How many rows of its episode come behind each row, int64 ``[n]``.
        n: How many rows, at least 1.
        discount: Of one step.

    Returns:
        float64 ``[n]``.

    Example:
        >>> import numpy as np
        >>> sums_of_next(np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 1, 0, 0]), 2, 0.5)
        array([2., 4., 4., 8.])
    """
    if discount == 0.0:
        return values  # without a product: nothing times infinity is no number
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

# Where codes have no labels.
_CODES = {"terminal": (1,), "truncated": (2,)}
# What is read of a snapshot at a time.
_LENGTH = 4096


class Derivation(Protocol):
    """The computation of a field from others: a pure function of whole episodes.

    Its ``repr`` stands for it in fingerprints, as that of a frozen dataclass does; where it has none of its own, or one
    that leaves values of arrays out, class and attributes do. What an episode's rows become must
    not depend on other episodes: rows are given some episodes at a time, and when a store grows only those anew that
    may have changed. Where the field belongs to transitions, as ``done`` does, and not to observations, an attribute
    ``transition`` says so; ``windows=`` of sources goes by it.
    """

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """The field: the dtype it is delivered in, the one it is kept in (``stored_dtype``) and the shape of a step.

        Args:
            name: What it is to be called.
            rows: The fields that there are.

        Raises:
            MissingFieldError: One is missing that it is computed from.
        """
        ...

    def compute(self, rows: EpisodeRows) -> Array:
        """Compute the field's values, ``[n, *shape]``, for the rows of some whole episodes."""
        ...


class EpisodeRows:
    """Rows of some whole episodes, one behind the other, as a ``Derivation`` is given them.

    An episode that is not finished yet ends with the last row that there is.

    Args:
        snapshot: What they are read from.
        begin: The first row in it.
        lengths: How many rows each episode has, int64 ``[e]``.
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

        The last row of an "arrived" episode holds the observation it ended with, which no transition leaves. That of an
        "outgoing" one holds the observation that the last transition leaves.
        """
        left: Int64s = np.repeat(self.last_rows, self.lengths) - np.arange(self.num_rows)
        if self.alignment == "outgoing":
            left += 1
        return left

    @memo
    def is_terminal(self) -> npt.NDArray[np.bool_]:
        """Whether each episode ended in a terminal state, bool ``[e]``: not where it was cut short or broken off."""
        return self.done_is("terminal")[self.last_rows]

    def done_is(self, word: str) -> npt.NDArray[np.bool_]:
        """Whether each row's ``done`` is a code whose label has a word in it, bool ``[n]``: "terminal", "truncated"."""
        codes = codes_called(self._snapshot.config.fields["done"], word) or _CODES[word]
        done = self.values("done")
        return done == codes[0] if len(codes) == 1 else np.isin(done, codes)

    def values(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """A field's values, ``[n, *shape]``, row by row.

        Args:
            field: Its name.
            dtype: What to give; by default what batches have.

        Raises:
            MissingFieldError: There is no such field.
            DataError: A value that it does not allow.
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

    def leaving(self, field: str, dtype: npt.DTypeLike | None = None) -> Array:
        """Return each row's value of the transition that leaves its observation: its action, reward or done.

        The value is 0 if no transition leaves it, as in the last row of an "arrived" episode. A field of observations
        returns the row's own value.

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
        """Return each row's value of the transition that led to its observation: its action, reward or done.

        The value is 0 if no transition led to it, as in the first row of an episode. A field of observations returns
        the value of the row before.

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
        """Whether a row's value belongs to the transition that led to the row's observation."""
        return self.alignment == "arrived" and self._snapshot.config.fields[field].is_of_transition


def digest_of(snapshot: Snapshot, field: str, begins: Int64s) -> str:
    """A digest of a field's values in all rows, as they are stored; "" of where episodes begin.

    Args:
        snapshot: The rows.
        field: Its name.
        begins: Rows at which what is read at a time begins, and the end, int64 ``[n]``.
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
    """The field of that name.

    Raises:
        MissingFieldError: There is none.
    """
    if name not in rows:
        raise MissingFieldError(f"{what}: expected a field {name!r} to compute from, found {list(rows)}")
    return rows[name]


def _number(name: str, dtype: str, stored: str = "") -> FieldSpec:
    return FieldSpec(name, np.dtype(dtype), (), stored_dtype=np.dtype(stored or dtype))


# ---------------------------------------------------------------------- returns


@dataclass(frozen=True)
class Return:
    """The discounted sum of the rewards that still come, float32: the return-to-go.

    ``G[t] = r + discount * G[t + 1]``, where ``r`` is the reward of the transition that leaves observation t, up to the
    end of its episode; 0 where no transition leaves it (Sutton and Barto, "Reinforcement learning", 2nd edition,
    section 3.3). With a discount of 1 that is the sum that D4RL's evaluations and decision transformers call
    return-to-go. Sums are made in float64. An episode that is not finished counts as far as it goes.

    Args:
        discount: The discount per step, in ``[0, 1]``.
        reward: The field of rewards.

    Raises:
        ConfigError: A discount out of range.
    """

    discount: float = 1.0
    reward: str = "reward"

    def __post_init__(self) -> None:
        check_unit("Return: discount", self.discount)

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """float32, one number a step."""
        known_field(rows, self.reward, "Return")
        return _number(name, "float32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The sums, float64 ``[n]``."""
        rewards = rows.leaving(self.reward, np.float64).reshape(len(rows))
        return discounted_sums(rewards, rows.lengths, float(self.discount))


def _steps_taken(rows: EpisodeRows, n: int) -> Array:
    """Return the number of steps from each row's observation to the bootstrap observation, int64 ``[n]``.

    The number is ``n``, or the number of steps left in the episode if that is less. In an "outgoing" episode that did
    not terminate, the last transition leads to an observation that is not stored: one less.
    """
    left = rows.steps_left
    if rows.alignment == "outgoing":
        left = left - np.repeat(~rows.is_terminal, rows.lengths)
    return np.minimum(left, n)


@dataclass(frozen=True)
class NStepReturn:
    """The discounted sum of the next ``n`` rewards, float32, to which a value is added: a target of n steps.

    ``G[t] = sum(discount**k * r[t + k] for k in range(m))``, with ``r`` as in ``Return``, and ``m`` steps: ``n``, or
    fewer where the episode ends before. The target is ``G[t] + d[t] * V(observation t + m)``, where ``d`` is
    ``NStepDiscount(n, discount)``; that observation is ``n`` rows further, or the last row of the episode (Sutton and
    Barto, section 7.1; Pardo et al., "Time limits in reinforcement learning", ICML 2018).

    Args:
        n: Steps, at least 1.
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
        """float32, one number a step."""
        known_field(rows, self.reward, "NStepReturn")
        return _number(name, "float32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The sums, float64 ``[n]``."""
        rewards = rows.leaving(self.reward, np.float64).reshape(len(rows))
        # The last transition of an episode may not be taken.
        rewards[_steps_taken(rows, 1) == 0] = 0.0
        behind = np.repeat(rows.last_rows, rows.lengths) - np.arange(len(rows))
        return sums_of_next(rewards, behind, self.n, float(self.discount))


@dataclass(frozen=True)
class NStepDiscount:
    """The factor of the value of the observation ``n`` steps later, float32: ``discount**m``, or 0 after termination.

    ``m`` is as in ``NStepReturn``. The factor is 0 if the episode terminates within these steps, since nothing follows.
    A truncated or interrupted episode continues with the value of its last observation. For ``n`` of 1 the factor is
    also known as the mask of dones.

    Args:
        n: Steps, at least 1.
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
        """float32, one number a step."""
        known_field(rows, "done", "NStepDiscount")
        return _number(name, "float32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The factors, float64 ``[n]``."""
        taken = _steps_taken(rows, self.n)
        is_over = (taken == rows.steps_left) & np.repeat(rows.is_terminal, rows.lengths)
        powers = float(self.discount) ** np.arange(int(taken.max()) + 1.0)
        return np.where(is_over, 0.0, powers[taken])


# ---------------------------------------------------------------------- times


@dataclass(frozen=True)
class TimeFromStart:
    """The number of steps before a row in its episode, int64: 0 in the first row."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """int64, kept as int32."""
        return _number(name, "int64", "int32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The times, int64 ``[n]``."""
        return rows.time


@dataclass(frozen=True)
class TimeToEnd:
    """The number of transitions after a row's observation in its episode, int64.

    In the last row of an episode it is 0 if rows are "arrived", and 1 if they are "outgoing". In an unfinished episode,
    the existing rows count.
    """

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """int64, kept as int32."""
        return _number(name, "int64", "int32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The times, int64 ``[n]``."""
        return rows.steps_left


# ---------------------------------------------------------------------- what came before


@dataclass(frozen=True)
class Previous:
    """A value of the transition that led to a row's observation: the previous action, or its reward.

    All values are 0 in the first row of an episode. If rows are "arrived", the value comes from the row itself, except
    the placeholder in the first one; if they are "outgoing", it comes from the row before.

    Args:
        field: "action", "reward", or another field; a field of observations takes the row before.
    """

    field: str = "action"

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """Return the spec of the underlying field."""
        return known_field(rows, self.field, "Previous").replace(name=name, column="")

    def compute(self, rows: EpisodeRows) -> Array:
        """The values, ``[n, *shape]``."""
        return rows.arriving(self.field)


# ---------------------------------------------------------------------- beginnings and ends


@dataclass(frozen=True)
class IsFirst:
    """Whether a row is the first of its episode, bool."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, uint8 ``[n]``."""
        return _marked(rows, rows.first_rows)


@dataclass(frozen=True)
class IsLast:
    """Whether a row is the last of its episode, bool; of one that is not finished, the last that there is."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, uint8 ``[n]``."""
        return _marked(rows, rows.last_rows)


def _marked(rows: EpisodeRows, which: npt.NDArray[np.int64]) -> Array:
    flags = np.zeros(len(rows), np.uint8)
    flags[which] = 1
    return flags


@dataclass(frozen=True)
class Terminated:
    """Whether a transition ended its episode in a terminal state, bool, in the row in which its ``done`` stands."""

    transition: ClassVar[bool] = True

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        known_field(rows, "done", "Terminated")
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, bool ``[n]``."""
        return rows.done_is("terminal")


@dataclass(frozen=True)
class Truncated:
    """Whether an episode was cut short behind a transition, bool, in the row in which its ``done`` stands."""

    transition: ClassVar[bool] = True

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        known_field(rows, "done", "Truncated")
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, bool ``[n]``."""
        return rows.done_is("truncated")
