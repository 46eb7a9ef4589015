"""Samplers of single rows: uniform, without replacement, consuming, backwards in time, and by policy version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import state_number
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError, DataError, SchemaError, StateError
from mouse_core.randomness import Key, Order
from mouse_core.replay.protocols import Draw, FieldKey, Slots, Storage, Write
from mouse_core.spec import check_count

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class BaseSampler:
    """Base class of samplers. The base class ignores written rows, and saves and restores the values of ``_state``."""

    needs_order = False
    _kinds: Mapping[str, type | str] = {}
    """The types of the state's values, not including the configuration; see ``check_state``."""

    def wrote(self, storage: Storage, write: Write) -> None:
        """Do nothing when rows are written."""

    def reset(self, storage: Storage) -> None:
        """Do nothing at a reset."""

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration, and all values except the rows on which draws depend, as plain values and
        arrays.
        """
        return {**self._config(), **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; the next draws continue from this state.

        Raises:
            StateError: The state is damaged, or comes from another sampler or configuration; the sampler is unchanged.
        """
        self._restore(check_state(state, self._config(), self._kinds, self))

    def _config(self) -> dict[str, str]:
        return {"config": repr(self)}

    def _state(self) -> dict[str, Any]:
        return {}

    def _restore(self, values: Mapping[str, Any]) -> None:
        """Set the attributes from the checked values of a state."""


class Epochs(BaseSampler):
    """Epochs over the indices ``0 .. total - 1``; with ``shuffle``, each epoch has a different order.

    Args:
        drop_last: Whether an incomplete batch at the end of an epoch is left out.
        shuffle: Whether each epoch has a random order; otherwise the order is ascending.
    """

    _kinds: Mapping[str, type | str] = dict.fromkeys(("over", "began", "position", "ran_out"), int)

    def __init__(self, drop_last: bool, shuffle: bool) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._begin_anew()

    def reset(self, storage: Storage) -> None:
        """Discard the current epoch; the next draw begins an epoch. Called when any row may have changed."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._over = 0  # the rows of the epoch, or the steps of its slices
        self._began, self._position, self.ran_out = 0, 0, False

    def _begins(self, key: Key, over: int, total: int, count: int) -> bool:
        """Begin an epoch if the number of rows has changed, or if the current epoch cannot fill a batch of
        ``count``.
        """
        if over == self._over and not self._is_over(total, count):
            return False
        self._over, self._began, self._position, self.ran_out = over, key.index, 0, False
        return True

    def _is_over(self, total: int, count: int) -> bool:
        return total - self._position < (count if self.drop_last else 1)

    def _take(self, key: Key, total: int, count: int) -> Int64s:
        """Return the next ``count`` indices of the epoch, or all remaining indices if fewer are left."""
        ranks = np.arange(self._position, min(self._position + count, total))
        self._position += len(ranks)
        self.ran_out = self._is_over(total, count)
        return order_of(replace(key, index=self._began), total)(ranks) if self.shuffle else ranks

    def _state(self) -> dict[str, Any]:
        place = {"over": self._over, "began": self._began, "position": self._position}
        return {**place, "ran_out": int(self.ran_out)}

    def _restore(self, values: Mapping[str, Any]) -> None:
        self._over, self._began, self._position = values["over"], values["began"], values["position"]
        self.ran_out = bool(values["ran_out"])


@lru_cache(maxsize=16)
def order_of(key: Key, total: int) -> Order:
    """Return the random order that a key determines. Orders are cached, because creating an order takes longer than a
    lookup.
    """
    return Order(key, total)


def unmasked(where: npt.NDArray[np.bool_], batch: Any, masks: bool) -> npt.NDArray[np.bool_]:
    """Return a mask that combines ``where`` with the batch's ``mask``: True for a row if both masks are True.

    Args:
        where: A mask of rows, in the shape of the batch's ``index``.
        batch: The batch.
        masks: Whether the buffer added the field ``mask``; if not, a field ``mask`` is a stored field of the rows and
            is ignored.
    """
    if not masks or "mask" not in batch:
        return where
    mask = np.asarray(batch["mask"], np.bool_)
    if mask.shape != where.shape:
        raise ConfigError(
            f"update_priority: expected a mask of the shape of the index {list(where.shape)}, found {list(mask.shape)}"
        )
    return where & mask


def check_state(
    state: Any, fixed: Mapping[str, str], kinds: Mapping[str, type | str], sampler: object
) -> dict[str, Any]:
    """Check a sampler's state, and return its values.

    Args:
        state: The state to check.
        fixed: The configuration of the sampler; the state must have the same values.
        kinds: The types of the other values: ``int`` (at least 0), ``float``, ``object`` (not checked), or, for an
            array ``[n]``, the kinds of dtype that are allowed, such as "iu".
        sampler: The name of the sampler in the error message.

    Raises:
        StateError: The state has other keys, or a value differs in type or configuration.
    """
    name = type(sampler).__name__
    expected = {*fixed, *kinds}
    for key, value in fixed.items():  # report the different configuration, from which the different keys follow
        if isinstance(state, Mapping) and key in state and str(state[key]) != value:
            raise StateError(f"sampler: expected the state of a sampler with the arguments {value}, found {state[key]}")
    if not isinstance(state, Mapping) or set(state) != expected:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)[:80]
        raise StateError(f"sampler: expected the state of a {name} with the keys {sorted(expected)}, found {found}")
    return {key: _checked(key, state[key], kind) for key, kind in kinds.items()}


def _checked(key: str, value: Any, kind: type | str) -> Any:
    """Return a value of the state; raise StateError if it has another type."""
    if isinstance(kind, str):
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in kind:
            raise StateError(f"sampler: expected {key} as an array [n], found {array.dtype} {list(array.shape)}")
        return array
    if kind is object:
        return value
    if kind is int:
        return state_number(key, value, where="sampler")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise StateError(f"sampler: expected {key} as a finite number, found {value!r}")
    return float(value)


class RandomSampler(BaseSampler):
    """Draws rows uniformly and independently of each other."""

    def __repr__(self) -> str:
        return "RandomSampler()"

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw ``batch_size`` slots, each uniformly from all rows.

        Raises:
            ConfigError: The storage is empty.
        """
        return Draw(key.integers(rows_in(storage), batch_size))

    def _config(self) -> dict[str, str]:
        return {}


class SamplerWithoutReplacement(Epochs):
    """Draws every row once in each epoch; the next draw after the end of an epoch begins another epoch.

    The current epoch ends when the number of rows changes. In a full ring the number of rows does not change: a written
    row replaces the overwritten row in the epoch.

    Args:
        drop_last: Whether the rows of an incomplete last batch of an epoch are left out; otherwise the last batch is
            shorter.
        shuffle: Whether each epoch has a new random order; otherwise rows are drawn in order, the oldest first.
    """

    _kinds: Mapping[str, type | str] = {**Epochs._kinds, "oldest": int}

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        super().__init__(bool(drop_last), bool(shuffle))
        self._oldest = 0  # the slot of the epoch's oldest row

    def __repr__(self) -> str:
        return f"SamplerWithoutReplacement(drop_last={self.drop_last}, shuffle={self.shuffle})"

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Return the next ``batch_size`` slots of the epoch, or all remaining slots if fewer are left.

        Raises:
            ConfigError: The storage has fewer rows than ``batch_size``.
        """
        rows = rows_in(storage)
        if batch_size > rows:
            raise ConfigError(
                f"sample: expected at most {rows} rows, the size of the buffer, in a batch without replacement, "
                f"found batch_size {batch_size}"
            )
        if self._begins(key, rows, rows, batch_size):
            self._oldest = storage.written % storage.capacity if rows == storage.capacity else 0
        positions = self._take(key, rows, batch_size)
        return Draw(positions if self.shuffle else (positions + self._oldest) % rows)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "oldest": self._oldest}

    def _restore(self, values: Mapping[str, Any]) -> None:
        if values["position"] > values["over"]:
            raise StateError(f"sampler: expected a position up to {values['over']}, found {values['position']}")
        super()._restore(values)
        self._oldest = values["oldest"]


def rows_in(storage: Storage) -> int:
    """Return the number of rows of a storage, which must not be empty.

    Raises:
        ConfigError: The storage is empty.
    """
    rows = len(storage)
    if not rows:
        raise ConfigError("sample: expected rows, found an empty buffer")
    return rows


class ConsumingSampler(BaseSampler):
    """Draws every written row exactly ``times`` times.

    A batch contains a row at most once, and is short if fewer rows than ``batch_size`` are left. Rows that were drawn
    less often are drawn first, so rows that were written together are drawn in passes: every row once, then every row a
    second time. For example, 256 rows with ``times=4`` give 16 batches of 64 rows, 4 batches for each pass. If a pass
    ends within a batch, rows of the next pass fill the batch. With ``times=1`` and ``shuffle=False`` a buffer is a
    queue: each row is drawn once, in the order of writing. A row can contain a complete trajectory. Consumed rows can
    be read by their index until a ring overwrites the rows. If a ring overwrites a row before it was drawn, the row is
    never drawn. Each draw reads the counts of all rows.

    Args:
        times: The number of times that each row is drawn.
        shuffle: Whether each batch is drawn uniformly from the rows that were drawn least often; otherwise the oldest
            remaining rows are drawn first.
        drop_last: Whether a draw raises ConfigError if too few rows for a full batch are left, so that the caller can
            wait for more rows.

    Raises:
        ConfigError: ``times`` is below 1.
    """

    _kinds: Mapping[str, type | str] = {"left": "iu", "ran_out": int}

    def __init__(self, times: int = 1, *, shuffle: bool = True, drop_last: bool = False) -> None:
        self.times = check_count("times", times)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self._left = np.zeros(0, np.int64)  # number of remaining draws of the row in each slot
        self._rows = 0  # number of slots with a row; the array may be longer
        self.ran_out = False

    def __repr__(self) -> str:
        return f"ConsumingSampler(times={self.times}, shuffle={self.shuffle}, drop_last={self.drop_last})"

    @property
    def left(self) -> int:
        """The number of rows that will be drawn again, not counting rows written since the last draw."""
        return int(np.count_nonzero(self._left))

    def wrote(self, storage: Storage, write: Write) -> None:
        """Set the remaining draws of written rows to ``times``; rows that are changed in place keep their counts."""
        if write.first is None:
            return
        self._rows = max(self._rows, int(write.slots.max(initial=-1)) + 1)
        if self._rows > len(self._left):  # at least doubled, so that single rows seldom copy the array
            more = max(self._rows, 2 * len(self._left)) - len(self._left)
            self._left = np.concatenate([self._left, np.zeros(more, np.int64)])
        self._left[write.slots] = self.times

    def reset(self, storage: Storage) -> None:
        """Treat all rows as new."""
        self._rows, self.ran_out = len(storage), False
        self._left = np.full(self._rows, self.times, np.int64)

    def dropped(self, storage: Storage, rows: int) -> None:
        """Remove the oldest rows, and add the new rows after the remaining rows; see ``Sampler``."""
        kept = self._left[rows : self._rows]
        self._rows = len(storage)
        self._left = np.concatenate([kept, np.full(self._rows - len(kept), self.times, np.int64)])

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw ``batch_size`` distinct slots whose rows have remaining draws, or all such slots if there are fewer than
        ``batch_size``.

        Raises:
            ConfigError: No row is left, or with ``drop_last`` fewer rows than ``batch_size``.
        """
        (there,) = np.nonzero(self._left)
        fewest = batch_size if self.drop_last else 1
        if len(there) < fewest:
            raise ConfigError(
                f"sample: expected at least {fewest} rows that were drawn fewer than {self.times} times, found "
                f"{len(there)} among {len(storage)} rows; write more rows"
            )
        count = min(batch_size, len(there))
        if self.shuffle:
            there = self._least_drawn(there, count, key)
        elif len(storage) == storage.capacity:
            oldest = int(there.searchsorted(storage.written % storage.capacity))
            there = np.roll(there, -oldest)
        slots = there[:count]
        left = self._left.copy()  # ``_rewind`` restores the earlier array
        left[slots] -= 1
        self._left, self.ran_out = left, bool(np.count_nonzero(left) < fewest)
        return Draw(slots)

    def _least_drawn(self, there: Slots, count: int, key: Key) -> Slots:
        """Return ``count`` random slots out of ``there``; slots that were drawn less often are chosen first."""
        found: list[Slots] = []
        left = self._left[there]
        for times in np.unique(left)[::-1]:
            (places,) = np.nonzero(left == times)
            taken = min(count, len(places))
            found.append(there[places[Order(key, len(places))(np.arange(taken))]])
            count -= taken
            if not count:
                break
        return np.concatenate(found)

    def _state(self) -> dict[str, Any]:
        return {"left": self._left[: self._rows].copy(), "ran_out": int(self.ran_out)}

    def _restore(self, values: Mapping[str, Any]) -> None:
        left = values["left"].astype(np.int64)
        if left.size and not 0 <= left.min() <= left.max() <= self.times:
            raise StateError(
                f"sampler: expected 0..{self.times} remaining draws for each row, found {left.min()}..{left.max()}"
            )
        self._left, self._rows, self.ran_out = left, len(left), bool(values["ran_out"])


class ReverseSampler(BaseSampler):
    """Draws rows backwards in time: a batch consists of the newest row and the rows ``stride``, ``2 * stride``, ...
    before the newest row; the next batch begins one row earlier (Rotinov, "Reverse Experience Replay", 2019).

    With this order, the value of a terminal step is learned before earlier steps are drawn. When a batch would begin
    ``2 * stride`` rows before the newest row, the sampler begins again with the newest row. Rows are numbered in the
    order of writing; with ``ndim=2``, the environments of a time step follow one another. A batch that reaches beyond
    the oldest row continues with the newest row.

    Args:
        stride: The distance between consecutive rows of a batch, in rows.

    Raises:
        ConfigError: ``stride`` is below 1.
    """

    needs_order = True
    _kinds: Mapping[str, type | str] = {"rows_below": int}

    def __init__(self, stride: int = 300) -> None:
        self.stride = check_count("stride", stride)
        self._next = -1  # the number of the row that the next batch begins with; -1: the newest

    def __repr__(self) -> str:
        return f"ReverseSampler(stride={self.stride})"

    def reset(self, storage: Storage) -> None:
        """Begin again with the newest row."""
        self._next = -1

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Return ``batch_size`` slots, the newest first.

        Raises:
            ConfigError: The storage is empty.
        """
        rows, newest = rows_in(storage), storage.written - 1
        first = self._next
        if not max(newest - 2 * self.stride, newest - rows) < first <= newest:
            first = newest
        self._next = first - 1
        back = (newest - first + self.stride * np.arange(batch_size)) % rows
        return Draw((newest - back) % storage.capacity)

    def _state(self) -> dict[str, Any]:
        return {"rows_below": self._next + 1}

    def _restore(self, values: Mapping[str, Any]) -> None:
        self._next = values["rows_below"] - 1


class StalenessSampler(BaseSampler):
    """Draws rows by the age of the policy version that collected the rows: excludes rows that are too old, and can give
    newer rows a larger weight.

    The staleness of a row is ``version - row[version_key]``, at least 0; a batch contains the staleness in the field
    ``staleness``. Rows are drawn independently of each other. After a write or a change of the version, the next draw
    recomputes the weights of all rows.

    Args:
        max_staleness: The largest staleness of a row that may be drawn; None: no limit.
        weight: A function that takes the staleness of rows, int64 ``[n]``, and returns weights of at least 0, ``[n]``,
            such as ``lambda age: 1 / (age + 1)``; None: all rows that are not too old have equal weights.
        version_key: The field with the version of the policy that collected the row, an integer.

    Attributes:
        version: The version of the trained policy; set ``version`` when the policy's version changes. None: the newest
            version among the rows.

    Raises:
        ConfigError: An argument is out of range.
    """

    _kinds: Mapping[str, type | str] = {"versions": int}
    adds = ("staleness",)

    def __init__(
        self,
        max_staleness: int | None = None,
        *,
        weight: Callable[[Int64s], Any] | None = None,
        version_key: FieldKey = "policy_version",
    ) -> None:
        self.max_staleness = None if max_staleness is None else check_count("max_staleness", max_staleness, 0)
        if weight is not None and not callable(weight):
            raise ConfigError(f"weight: expected a function of staleness, found {weight!r}")
        self._weight, self._version_key = weight, version_key
        self._version: int | None = None
        # The version, and for this version the staleness of all rows, the slots that may be drawn, and the running sum
        # of the slots' weights. A draw computes these values again if another thread has set another version.
        self._known: tuple[int | None, Int64s, Slots, Floats] | None = None

    def __repr__(self) -> str:
        weight = "None" if self._weight is None else "a function"
        return f"StalenessSampler({self.max_staleness}, weight={weight}, version_key={self._version_key!r})"

    @property
    def version(self) -> int | None:
        """The version of the trained policy; None: the newest version among the rows."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = None if version is None else check_count("version", version, 0)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Mark the rows' versions as stale; the next draw reads the versions again."""
        self._known = None

    def reset(self, storage: Storage) -> None:
        """Mark the rows' versions as stale; the next draw reads the versions again."""
        self._known = None

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw ``batch_size`` slots in proportion to their weights; the result contains the ``staleness`` of the rows,
        int64 ``[n]``.

        Raises:
            ConfigError: The storage is empty, all rows are too old, or all weights are 0.
            MissingFieldError, SchemaError: The rows lack the field ``version_key``, or this field does not have one
                integer for each row.
            DataError: A weight is negative, NaN or infinite.
        """
        rows_in(storage)
        set_to = self._version
        if self._known is None or self._known[0] != set_to:
            self._known = set_to, *self._look(storage, set_to)
        _, staleness, slots, sums = self._known
        if self._weight is None:
            index = slots[key.integers(len(slots), batch_size)]
        else:
            places = sums.searchsorted(key.uniform(batch_size) * sums[-1], side="right")
            # Rounding must not select a slot after the last slot with a weight above 0.
            index = slots[np.minimum(places, sums.searchsorted(sums[-1]))]
        return Draw(index, extra={"staleness": staleness[index]})

    def _look(self, storage: Storage, set_to: int | None) -> tuple[Int64s, Slots, Floats]:
        versions = storage.read(self._version_key, slice(0, len(storage)))
        if versions.size != len(storage) or number_kind(versions.dtype) not in "iu":
            raise SchemaError(
                f"sample: field {self._version_key!r}: expected an integer for each row, found {versions.dtype} "
                f"{list(versions.shape[1:])}"
            )
        versions = versions.reshape(-1).astype(np.int64)
        version = int(versions.max()) if set_to is None else set_to
        staleness = np.maximum(version - versions, 0)
        slots = np.arange(len(storage))
        if self.max_staleness is not None:
            (slots,) = np.nonzero(staleness <= self.max_staleness)
        if not len(slots):
            raise ConfigError(
                f"sample: expected a row at most {self.max_staleness} versions older than version {version}, found "
                f"version {versions.max()} as the newest version of a row"
            )
        return staleness, slots, self._sums(staleness[slots])

    def _sums(self, staleness: Int64s) -> Floats:
        """Return the cumulative weights of rows with the given staleness; an empty array if all weights are equal."""
        if self._weight is None:
            return np.zeros(0)
        weights = np.asarray(self._weight(staleness), np.float64)
        if weights.shape != staleness.shape or not (np.isfinite(weights) & (weights >= 0)).all():
            raise DataError(
                f"sample: weight: expected {list(staleness.shape)} finite weights of 0 or more, found {weights!r:.80}"
            )
        sums: Floats = np.cumsum(weights)
        if not sums[-1] > 0:
            raise ConfigError("sample: expected a weight above 0, found weight 0 for every row")
        return sums

    def _state(self) -> dict[str, Any]:
        return {"versions": 0 if self._version is None else self._version + 1}

    def _restore(self, values: Mapping[str, Any]) -> None:
        versions = values["versions"]
        self._version, self._known = versions - 1 if versions else None, None
