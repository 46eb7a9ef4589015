"""Replay on a device: its options, checked before compilation, and moving rows to and from a buffer on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import FieldKey
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.protocols import END_KEYS, TRAJ_KEYS, Sampler
from mouse_core.replay.samplers.episodes import StorageEpisodes
from mouse_core.replay.samplers.priorities import PrioritizedSampler
from mouse_core.replay.samplers.rows import ConsumingSampler, Epochs, RandomSampler, SamplerWithoutReplacement
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from mouse_core.replay.samplers.weighing import Priorities
from mouse_core.replay.transforms.compose import Compose, delivered_alignment
from mouse_core.replay.transforms.fields import Apply, Cast, Pad
from mouse_core.spec import Alignment, check_alignment, check_count

Order = Literal["random", "epochs", "queue"]
"""In which order rows come: drawn from all, each once an epoch, or each once, the oldest first."""

# What 32 bits hold the sum of two of.
_MOST = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of consecutive rows of one episode, as those of ``mouse_core.replay.SliceSampler``.

    Args:
        sequence_length: Steps in a slice, S.
        pad: Whether episodes that are shorter than a slice come, filled up to S steps, with a field ``mask`` that says
            which are there. True repeats the nearest step that is; a number is what all fields become in the others.
            With False shorter episodes are left out.
        end_key, truncated_key, traj_key: The fields that say where episodes end; by default all that the rows have, as
            in ``SliceSampler``. Numbers of trajectories are integers.
        period: Only slices that begin at an episode's first step, still there or not, or so many steps behind another.

    Raises:
        ConfigError: An argument out of range.
    """

    sequence_length: int
    pad: bool | float = True
    end_key: FieldKey | None = None
    truncated_key: FieldKey | None = None
    traj_key: FieldKey | None = None
    period: int = 1
    _fills: bool = field(init=False, repr=False)
    """Whether pad is a number, by which 0 and False are two: who compiles for the one must not run it for the other."""

    def __post_init__(self) -> None:
        check_count("sequence_length", self.sequence_length)
        check_count("period", self.period)
        if not isinstance(self.pad, bool | int | float):
            raise ConfigError(f"pad: expected True, False or a number, found {self.pad!r}")
        vars(self)["_fills"] = not isinstance(self.pad, bool)


@dataclass(frozen=True)
class EpisodeFields:
    """The fields that mark the ends of episodes.

    Args:
        ends: The fields that are not 0 in an episode's last row.
        ids: The field that numbers trajectories: an episode ends where it changes.
        numbers: Whether ``ids`` also numbers episodes.
    """

    ends: tuple[FieldKey, ...]
    ids: FieldKey | None
    numbers: bool


def check_rooms(capacity: int, batch_size: int, num_envs: int | None, slices: Slices | None) -> None:
    """ConfigError unless a replay can have these numbers of rows, which integers of 32 bits count, and slices."""
    check_count("capacity", capacity)
    check_count("batch_size", batch_size)
    if num_envs is not None and capacity % check_count("num_envs", num_envs):
        raise ConfigError(f"capacity: expected a multiple of the {num_envs} environments, found {capacity}")
    if capacity >= _MOST:
        raise ConfigError(f"capacity: expected less than 2**30 rows, found {capacity}")
    for name in () if slices is None else ("sequence_length", "period"):
        if getattr(slices, name) >= _MOST:
            raise ConfigError(f"{name}: expected less than 2**30, found {getattr(slices, name)}")
    steps = capacity // (num_envs or 1)
    if slices is not None and slices.pad is False and slices.sequence_length > steps:
        raise ConfigError(
            f"sequence_length: expected at most the {steps} time steps that the capacity has, as shorter slices are "
            f"left out with pad=False, found {slices.sequence_length}"
        )


def streams_of(num_envs: Any, slices: Slices | None, transform: Compose | None) -> int | None:
    """The number of environments; None: rows are one stream.

    Args:
        num_envs: As it was given; ``...``: it was not.
        slices: What a slice is, if batches are slices.
        transform: What is done to batches.

    Raises:
        ConfigError: It was not given, and batches pair rows of one environment. Eight rows ``[8, ...]`` of eight
            environments would be eight steps of one.
    """
    if num_envs is not ...:
        return num_envs  # type: ignore[no-any-return]
    if slices is None and not (transform is not None and transform.reach):
        return None
    looking = [] if transform is None else [part for part in transform.transforms if getattr(part, "reach", 0)]
    readers = [*(["slices"] if slices is not None else []), *(type(part).__name__ for part in looking)]
    raise ConfigError(
        "num_envs: expected the number of environments whose rows are written side by side, for "
        f"{' and '.join(readers)} of rows that follow each other, found none; num_envs=None is for one stream, whose "
        "rows [n, ...] are in the order of time"
    )


def check_order(
    order: Any, capacity: int, batch_size: int, slices: Slices | None, priorities: Priorities | None
) -> None:
    """ConfigError unless rows can come in this order."""
    if order not in get_args(Order):
        raise ConfigError(f"order: expected one of {[*get_args(Order)]}, found {order!r}")
    if priorities is not None and order != "random":
        raise ConfigError(f"priorities: expected order='random', found {order!r}")
    if order == "random":
        return
    if slices is not None and order == "queue":
        raise ConfigError("order: expected 'random' or 'epochs' for slices, found 'queue', which is of single rows")
    if slices is not None and slices.period > 1:
        raise ConfigError(f"period: expected 1 for slices that lie side by side, found {slices.period}")
    if batch_size > capacity:
        raise ConfigError(
            f"batch_size: expected at most the {capacity} rows of the capacity, as each comes once, found {batch_size}"
        )


def composed(transform: Any, alignment: Alignment) -> Compose | None:
    """One transform of those that are given, which look at the batch alone; None where there are none.

    Raises:
        ConfigError: One that draws random numbers, reads other rows, keeps numbers of all rows or changes rows that are
            written; or rows of the other alignment.
    """
    check_alignment(alignment)
    given = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
    if not given:
        return None
    made = Compose(*given)
    delivered_alignment(made, alignment)
    for part in made.transforms:
        inverse = getattr(part, "inverse", None)
        refused = {
            "draws random numbers": getattr(part, "random", False),
            "reads other rows": getattr(part, "gather", None),
            "keeps numbers of all rows": getattr(part, "settled", None),
            # Those of which nothing is stored leave rows alone.
            "changes rows that are written": part.stored if isinstance(part, Cast | Apply) else inverse,
            "makes one shape of rows that differ in length, which are not on a device": isinstance(part, Pad),
        }
        means = next((what for what, is_so in refused.items() if is_so), None)
        if means is not None:
            raise ConfigError(f"transform: expected one that looks at the batch alone, found {part!r}, which {means}")
    return made


def find_marks(fields: Mapping[FieldKey, Any], slices: Slices, is_integer: Callable[[Any], bool]) -> EpisodeFields:
    """Return the fields of a row that mark the ends of episodes.

    Args:
        fields: Arrays, or anything with a ``shape`` and a ``dtype``, of one row.
        slices: The slice options.
        is_integer: Whether a dtype is one of integers.

    Raises:
        MissingFieldError: No such field exists, or a named one is missing.
        SchemaError: A field has several values per row, or trajectory numbers are no integers.
    """
    ends = tuple(key for key in (slices.end_key, slices.truncated_key) if key is not None)
    ids = slices.traj_key
    if ends or ids is not None:
        marks = EpisodeFields(ends, ids, True)
    else:
        ends = next(filter(None, (tuple(key for key in group if key in fields) for group in END_KEYS)), ())
        ids = next((key for key in TRAJ_KEYS if key in fields), None)
        marks = EpisodeFields(ends, ids, not ends)
    if not ends and ids is None:
        raise MissingFieldError(
            f"slices: expected end_key=, truncated_key= or traj_key=, or a field 'done', found {list(fields)}"
        )
    for key in (*ends, *(() if ids is None else (ids,))):
        if key not in fields:
            raise MissingFieldError(f"slices: expected one of {list(fields)}, found {key!r}")
        if prod(fields[key].shape) != 1:
            raise SchemaError(f"slices: {key!r}: expected one value a row, found {list(fields[key].shape)}")
    if ids is not None and not is_integer(fields[ids].dtype):
        raise SchemaError(
            f"slices: {ids!r}: expected integers as numbers of trajectories, found {fields[ids].dtype}; end_key= or "
            "traj_key= names the fields that count"
        )
    return marks


def check_names(row: Any, transform: Compose | None, slices: Slices | None, priorities: Priorities | None) -> None:
    """SchemaError where a row, a tree, has fields that batches need."""
    taken = {"index"} if priorities is None else {"index", "priority_weight"}
    if (transform is not None and transform.reach and slices is None) or (
        slices is not None and slices.pad is not False
    ):
        taken |= {"mask"}
    if isinstance(row, Mapping) and not taken.isdisjoint(row):
        raise SchemaError(f"init: expected rows without the fields {sorted(taken & row.keys())}, which batches have")


Int64s = npt.NDArray[np.int64]

_OF_SLICES = ("sequence_length", "pad", "end_key", "truncated_key", "traj_key")


def sampler_like(slices: Slices | None, priorities: Priorities | None, order: Order = "random") -> Sampler:
    """The sampler that draws what a replay on a device does."""
    options: dict[str, Any] = {} if slices is None else {name: getattr(slices, name) for name in _OF_SLICES}
    if order == "queue":
        return ConsumingSampler(shuffle=False, drop_last=True)
    if order == "epochs":
        kind: Any = SamplerWithoutReplacement if slices is None else SliceSamplerWithoutReplacement
        made: Sampler = kind(**options, drop_last=True)
        return made
    if slices is not None:
        options["period"] = slices.period
    if priorities is None:
        return RandomSampler() if slices is None else SliceSampler(**options)
    exponents: dict[str, Any] = {name: getattr(priorities, name) for name in ("alpha", "beta", "eps")}
    return PrioritizedSampler(**exponents) if slices is None else PrioritizedSliceSampler(**exponents, **options)


def queue_state(sampler: Sampler, left: int, rows: int, cursor: int, capacity: int, batch_size: int) -> dict[str, Any]:
    """The state of a sampler of which the newest ``left`` rows have not come; of another kind, what it is.

    Args:
        sampler: Of a buffer with as many rows.
        left: How many have not come.
        rows: How many there are.
        cursor: The slot that is written next.
        capacity: How many slots there are.
        batch_size: Rows in a batch.
    """
    state = sampler.state_dict()
    if not isinstance(sampler, ConsumingSampler):
        return state
    age = (cursor - 1 - np.arange(rows)) % capacity
    return state | {"left": (age < left) * sampler.times, "ran_out": int(left < batch_size and rows > 0)}


def left_in(sampler: Sampler) -> int | None:
    """Return the number of rows not drawn yet; None if a sampler does not count them."""
    return int(np.count_nonzero(sampler.state_dict()["left"])) if isinstance(sampler, ConsumingSampler) else None


def epoch_state(sampler: Any, rows: int, began: int, position: int, batch_size: int) -> dict[str, Any]:
    """The state of a sampler in an epoch; of another kind, what it is.

    Args:
        sampler: Of a buffer with as many rows.
        rows: How many rows or slices the epoch is over; 0: none has begun.
        began: The number of the sample with which it began.
        position: How many of them have come.
        batch_size: Rows or slices in a batch.
    """
    state: dict[str, Any] = sampler.state_dict()
    ran_out = int(0 < rows < position + batch_size)
    if not isinstance(sampler, Epochs):
        return state
    over = sampler.sequence_length if rows and isinstance(sampler, SliceSamplerWithoutReplacement) else rows
    return state | {"over": over, "began": began, "position": position, "ran_out": ran_out}


def epoch_in(sampler: Any, slices: int) -> tuple[int, int, int] | None:
    """Rows or slices of the epoch, when it began, and how many have come; None where none has begun, or is counted.

    Args:
        sampler: Where the epoch is.
        slices: How many slices there are, where it is one of slices.
    """
    if not isinstance(sampler, Epochs):
        return None
    state = sampler.state_dict()
    rows = slices if state["over"] and isinstance(sampler, SliceSamplerWithoutReplacement) else state["over"]
    return (int(rows), int(state["began"]), int(state["position"])) if rows else None


def weights_state(sampler: PrioritizedSampler, units: npt.NDArray[np.int64], largest: float) -> dict[str, Any]:
    """The state of a sampler in which rows weigh so much; its own exponents stay.

    Args:
        sampler: One that has been told of as many rows.
        units: What they weigh, by their slots.
        largest: The priority of new rows.
    """
    state = sampler.state_dict()
    end = max(state["begin"], state["end"])
    return state | {"weights": units, "max_priority": largest, "begin": end, "end": end}


def weights_in(buffer: ReplayBuffer) -> tuple[npt.NDArray[np.int64], float] | None:
    """Return the weights of a buffer's rows, and the priority of new ones; None for rows without weights."""
    sampler = buffer.sampler
    if not isinstance(sampler, PrioritizedSampler):
        return None
    sampler.weights_at(buffer.storage, slice(0))  # new rows have their weights then
    state = sampler.state_dict()
    return state["weights"], state["max_priority"]


def lost_in(buffer: ReplayBuffer, slices: Slices | None, num_envs: int) -> Int64s:
    """Return the number of evicted steps of the oldest episode of each environment, ``[E]``.

    A number above S is reduced by whole periods; it is 0 if it does not matter or is unknown.
    """
    if slices is None or slices.period == 1 or not len(buffer):
        return np.zeros(num_envs, np.int64)
    index = StorageEpisodes(slices.traj_key, slices.end_key, slices.truncated_key)
    known = getattr(buffer.sampler, "episodes", None)
    if isinstance(known, StorageEpisodes):
        index.go_on(known, buffer.storage)
    episodes = index.settled(buffer.storage)
    begin, _, _ = episodes.episode_of(np.full(num_envs, episodes.begin), np.arange(num_envs))
    lost, most = episodes.begin - begin, slices.sequence_length + 1
    kept: Int64s = np.where(lost < most, lost, most + (lost - most) % slices.period)
    return kept


def lost_of(
    slices: Slices,
    windows: npt.NDArray[Any],
    numbers: npt.NDArray[Any],
    made: npt.NDArray[Any],
    position: npt.NDArray[Any],
    phases: npt.NDArray[Any] | None = None,
) -> Int64s:
    """Return ``lost_in`` for a device's slices, reduced by all whole periods, since only the remainder is known.

    Args:
        slices: The slice options.
        windows: The number of slices before each row, the oldest first, ``[n, E]``.
        numbers: The number of episodes up to and including each row, ``[n, E]``.
        made: The total number of slices, ``[E]``.
        position: The position of the newest row in its episode, up to whole periods, ``[E]``.
        phases: The number of steps from a counted step to the oldest row, ``[E]``, if known.
    """
    size, num_envs = windows.shape
    if not size or slices.period == 1:
        return np.zeros(num_envs, np.int64)
    if phases is not None:
        return phases.astype(np.int64)
    length, row = slices.sequence_length, np.arange(size)[:, None]
    end = np.where((numbers == numbers[-1:]).all(0), size, (numbers != numbers[:1]).argmax(0))
    # The slices that end with these rows begin at places that count, and if there is none, nor are the places there.
    ends = (np.diff(windows, axis=0, append=made[None]) != 0) & (row >= length - 1) & (row < end)
    none = 0 if slices.pad is not False else np.maximum(end - length + 1, 0)
    first = np.where(ends.any(0), ends.argmax(0) - (length - 1), none)
    lost: Int64s = np.where(end == size, position.astype(np.int64) - (size - 1), -first) % slices.period
    return lost


def episodes_state(state: dict[str, Any], lost: Int64s) -> dict[str, Any]:
    """The state of a sampler with what its oldest episodes have lost; of one without episodes, what it is.

    Args:
        state: Of a sampler that was told of as many rows, and of as many before them as were lost, or more.
        lost: See ``lost_in``.
    """
    if not len(state.get("begins", ())):
        return state
    _, steps, base, end = state["steps"].tolist()
    begins = state["begins"].copy()
    begins[np.cumsum(state["counts"]) - state["counts"]] = max(end - steps, base) - lost
    return state | {"begins": begins}


def check_fits(buffer: ReplayBuffer, capacity: int, num_envs: int | None, caller: str) -> None:
    """ConfigError unless a buffer has room for the rows of a replay of this capacity, each in its place."""
    storage = buffer.storage
    wanted = (capacity, 1 if num_envs is None else 2)
    if (storage.capacity, storage.ndim) != wanted or (len(buffer) and storage.num_envs != (num_envs or 1)):
        raise ConfigError(
            f"{caller}: expected a storage with capacity {wanted[0]} and ndim {wanted[1]}, of {num_envs or 1} "
            f"environments, found {storage!r}"
        )


def check_ordered(buffer: ReplayBuffer, caller: str) -> None:
    """ConfigError where rows lie in another order than that in which they were written."""
    if not buffer.writer.ordered:
        raise ConfigError(f"{caller}: expected rows in the order they were written, found those of {buffer.writer!r}")


def fill(buffer: ReplayBuffer, first: Callable[[int], Any], size: int, cursor: int, steps: int, lost: Int64s) -> None:
    """Write the rows of a ring into an empty buffer, each to its place.

    Args:
        buffer: An empty one, of the ring's capacity.
        first: Gives the first ``n`` time steps of the ring, as arrays of NumPy.
        size: How many of the time steps there are.
        cursor: The one that is written next.
        steps: How many fit.
        lost: How many time steps must have been written before the oldest, at least, ``[E]``.

    Raises:
        ConfigError: A buffer that is not empty.
    """
    if len(buffer):
        raise ConfigError(f"to_host: expected an empty buffer, found {len(buffer)} rows")
    # Of a ring that is full the rows up to the cursor are the newest: written a second time they are so there, too.
    counts = [size]
    if size == steps:
        counts = [size] * (1 + max(0, -((cursor - int(lost.max())) // steps))) + [cursor]
    for count in counts:
        if count:
            buffer.extend(first(count))
