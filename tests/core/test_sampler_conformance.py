"""The samplers there are do what is asked of samplers; and samplers that do not are found out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, DatasetStore, PrefetchBatchifier
from mouse_core.randomness import Key, Purpose
from mouse_core.replay import (
    ConsumingSampler,
    RandomSampler,
    ReverseSampler,
    SamplerWithoutReplacement,
    StalenessSampler,
)
from mouse_core.replay.protocols import Draw
from mouse_core.replay.samplers.priorities import PrioritizedSampler
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from mouse_core.sampling import CyclicWindows, EpisodeWindows, LastWindows, RandomWindows, SequentialWindows
from mouse_core.testing import ReplaySamplerConformance, WindowSamplerConformance, example_store


class TestRandomWindows(WindowSamplerConformance):
    def make(self) -> Any:
        return RandomWindows(8, 4)


class TestSequentialWindows(WindowSamplerConformance):
    def make(self) -> Any:
        return SequentialWindows(8, 4, drop_last=False)


class TestCyclicWindows(WindowSamplerConformance):
    def make(self) -> Any:
        return CyclicWindows(8, 4)


class TestLastWindows(WindowSamplerConformance):
    draws = False

    def make(self) -> Any:
        return LastWindows(8, 4)


class TestEpisodeWindows(WindowSamplerConformance):
    def make(self) -> Any:
        return EpisodeWindows(8, 4)


class TestEpisodeWindowsByTrajectory(WindowSamplerConformance):
    def make(self) -> Any:
        return EpisodeWindows(8, 4, weighting="trajectory", pad=False)


class TestEpisodeWindowsInOrder(WindowSamplerConformance):
    def make(self) -> Any:
        return EpisodeWindows(8, 4, sampling="batch", pad=0)


class TestRandom(ReplaySamplerConformance):
    def make(self) -> Any:
        return RandomSampler()


class TestWithoutReplacement(ReplaySamplerConformance):
    def make(self) -> Any:
        return SamplerWithoutReplacement()


class TestSlices(ReplaySamplerConformance):
    def make(self) -> Any:
        return SliceSampler(sequence_length=4, weighting="trajectory", pad=True)


class TestShortSlices(ReplaySamplerConformance):
    def make(self) -> Any:
        return SliceSampler(sequence_length=4, end_key="done", strict_length=False, pad=False, span=(1, True))


class TestSlicesOfTrajectories(ReplaySamplerConformance):
    def make(self) -> Any:
        return SliceSampler(sequence_length=4, traj_key="number")

    def rows(self, first: int, n: int) -> Any:
        return {"number": np.arange(first, first + n) // 7}


class TestSlicesWithoutReplacement(ReplaySamplerConformance):
    def make(self) -> Any:
        return SliceSamplerWithoutReplacement(sequence_length=4)


class TestPrioritized(ReplaySamplerConformance):
    def make(self) -> Any:
        return PrioritizedSampler()


class TestPrioritizedSlices(ReplaySamplerConformance):
    def make(self) -> Any:
        return PrioritizedSliceSampler(sequence_length=4)


class TestDilatedSlices(ReplaySamplerConformance):
    def make(self) -> Any:
        return SliceSampler(sequence_length=3, period=2, dilation=3)


class TestPrioritizedWithin(ReplaySamplerConformance):
    def make(self) -> Any:
        return PrioritizedSliceSampler(sequence_length=4, dilation=2, burn_in=1, max_priority_within_buffer=True)


class TestConsuming(ReplaySamplerConformance):
    def make(self) -> Any:
        return ConsumingSampler(times=9)


class TestReverse(ReplaySamplerConformance):
    draws = False

    def make(self) -> Any:
        return ReverseSampler(stride=2)


class TestStaleness(ReplaySamplerConformance):
    def make(self) -> Any:
        return StalenessSampler(2, weight=lambda age: 1 / (age + 1), version_key="version")

    def rows(self, first: int, n: int) -> Any:
        return {"version": np.arange(first, first + n) // 7}


# ---------------------------------------------------------------------- samplers of windows that do not


class Base:
    """Right, and for what follows to go wrong in one way."""

    sequence_length = 8
    batch_size = 4

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def batches_per_epoch(self, snapshot: Any) -> int:
        if snapshot.num_rows < 8:
            raise ConfigError("sampling: expected more rows")
        return 3

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return Key(seed, Purpose.WINDOWS, index).integers(snapshot.num_rows - 7, 4)


class NoEpochs(Base):
    batches_per_epoch = None  # type: ignore[assignment]


class EmptyEpochs(Base):
    def batches_per_epoch(self, snapshot: Any) -> int:
        return super().batches_per_epoch(snapshot) * 0


class Beyond(Base):
    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return np.array([snapshot.num_rows - 7])


class RowsTooFar(Base):
    """Starts that hardly ever are among the last of 300 rows."""

    def __init__(self, more: int) -> None:
        self.more = more

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return Key(seed, Purpose.WINDOWS, index).integers(snapshot.num_rows - 7 + self.more, 4)


class TooFarByBatches(Base):
    """The same of one that wants more rows than a window has."""

    def batches_per_epoch(self, snapshot: Any) -> int:
        if snapshot.num_rows < 32:
            raise ConfigError("sampling: expected more rows")
        return 3

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return snapshot.num_rows - 31 + 8 * np.arange(4) if snapshot.num_rows < 64 else np.arange(4)


class Floating(Base):
    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return super().starts(seed, index, snapshot, epoch_start).astype(float)


class TooMany(Base):
    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return Key(seed, Purpose.WINDOWS, index).integers(snapshot.num_rows - 7, 5)


class NothingThere(Base):
    fill = None

    def lengths(self, starts: Any, snapshot: Any) -> Any:
        return np.zeros(len(starts), np.int64)


class OneStream(Base):
    def __init__(self) -> None:
        self.drawn = 0

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        self.drawn += 1
        return super().starts(seed, self.drawn, snapshot, epoch_start)


class OneSeed(Base):
    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return super().starts(0, index, snapshot, epoch_start)


class OtherTogether(Base):
    def starts_of_many(self, seed: int, first: int, count: int, snapshot: Any, epoch_start: int, rows: Any) -> Any:
        return np.zeros((count, 4), np.int64)[:, rows]


class TakesTooFew(Base):
    def batches_per_epoch(self, snapshot: Any) -> int:
        return 1


class SaysNothing(Base):
    def __repr__(self) -> str:
        return "a sampler"


class NewEveryTime(Base):
    made = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.made)

    def __repr__(self) -> str:
        return f"NewEveryTime({self.number})"


class NeverTwice(Base):
    def __reduce__(self) -> Any:
        return OneSeed, ()


class Misshapen(Base):
    """Batches of another size than it says, in a source."""

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        if seed == 4:  # the one that the sources have
            raise ConfigError("sampling: expected another seed")
        return super().starts(seed, index, snapshot, epoch_start)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (NoEpochs, "test_it_has_what_the_protocol_names"),
        (EmptyEpochs, "test_it_has_what_the_protocol_names"),
        (Beyond, "test_windows_lie_in_the_snapshot"),
        *((partial(RowsTooFar, more), "test_windows_lie_in_the_snapshot") for more in (1, 2, 7)),
        (TooFarByBatches, "test_windows_lie_in_the_snapshot"),
        (Floating, "test_windows_lie_in_the_snapshot"),
        (TooMany, "test_windows_lie_in_the_snapshot"),
        (NothingThere, "test_windows_lie_in_the_snapshot"),
        (OneStream, "test_it_is_a_pure_function"),
        (NeverTwice, "test_it_is_a_pure_function"),
        (OneSeed, "test_seeds_differ"),
        (OtherTogether, "test_many_are_the_same_as_one_by_one"),
        (TakesTooFew, "test_too_few_rows_are_refused"),
        (SaysNothing, "test_checkpoints_know_it_again"),
        (NewEveryTime, "test_checkpoints_know_it_again"),
        (Misshapen, "test_a_source_delivers_its_windows"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", str(value)),
)
def test_what_is_wrong_with_windows_is_found_out(kind: Any, test: str) -> None:
    suite = WindowSamplerConformance()
    suite.make = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, ConfigError, TypeError)):
        getattr(suite, test)()


def test_what_is_right_with_windows_passes() -> None:
    suite = WindowSamplerConformance()
    suite.make = Base  # type: ignore[method-assign]
    for test in _tests(WindowSamplerConformance):
        getattr(suite, test)()


# ---------------------------------------------------------------------- samplers of buffers that do not


class Replay(RandomSampler):
    """Right: draws around the last slot written to, which it keeps."""

    def __init__(self) -> None:
        self.last = 0

    def wrote(self, storage: Any, write: Any) -> None:
        self.last = int(write.slots[-1])

    def reset(self, storage: Any) -> None:
        self.last = max(0, (storage.written - 1) % storage.capacity if len(storage) else 0)

    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        drawn = super().draw(storage, batch_size, key).index
        return Draw((drawn + self.last) % len(storage))

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: Any) -> None:
        if set(state) != {"last"}:
            super().load_state_dict({"refused": 0})
        self.last = state["last"]


class NoOrder(Replay):
    needs_order = None  # type: ignore[assignment]


class OutOfRange(Replay):
    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        return Draw(super().draw(storage, batch_size, key).index + 1)


class Narrow(Replay):
    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        return Draw(super().draw(storage, batch_size, key).index.astype(np.int32))  # type: ignore[arg-type]


class OtherMask(Replay):
    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        return replace(super().draw(storage, batch_size, key), mask=np.ones(1, bool))


class WideWeights(Replay):
    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        return replace(super().draw(storage, batch_size, key), priority_weight=np.ones(batch_size))  # type: ignore[arg-type]


class OtherExtra(Replay):
    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        return replace(super().draw(storage, batch_size, key), extra={"more": np.ones(3)})


class SharedCounter(Replay):
    drawn = itertools.count()

    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        return Draw((super().draw(storage, batch_size, key).index + next(self.drawn)) % len(storage))


class NoSeed(Replay):
    def draw(self, storage: Any, batch_size: int, key: Key) -> Draw:
        return super().draw(storage, batch_size, replace(key, seed=0))


class Forgets(Replay):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.last = 0


class Objects(Replay):
    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "sampler": self}


class Shared(Replay):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(40, np.int64)

    def wrote(self, storage: Any, write: Any) -> None:
        super().wrote(storage, write)
        self.seen[write.slots] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "seen": self.seen}


class TakesAnyState(Replay):
    def load_state_dict(self, state: Any) -> None:
        self.last = state.get("last", 0)


class TakesAnyPriority(PrioritizedSampler):
    def update_priority(self, storage: Any, index: Any, priority: Any) -> None:
        super().update_priority(storage, index, np.nan_to_num(np.abs(priority)))


class HalfUpdates(PrioritizedSampler):
    def update_priority(self, storage: Any, index: Any, priority: Any) -> None:
        if len(index) == 2:
            super().update_priority(storage, index[:1], priority[:1])
        super().update_priority(storage, index, priority)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (NoOrder, "test_it_has_what_the_protocol_names"),
        (OutOfRange, "test_draws_lie_in_the_buffer"),
        (Narrow, "test_draws_lie_in_the_buffer"),
        (OtherMask, "test_draws_lie_in_the_buffer"),
        (WideWeights, "test_draws_lie_in_the_buffer"),
        (OtherExtra, "test_draws_lie_in_the_buffer"),
        (SharedCounter, "test_a_draw_depends_on_its_key_and_on_what_was_written"),
        (NoSeed, "test_seeds_differ"),
        (Forgets, "test_it_goes_on_from_its_state"),
        (Objects, "test_its_state_is_plain"),
        (Shared, "test_its_state_is_plain"),
        (TakesAnyState, "test_what_is_wrong_changes_nothing"),
        (TakesAnyPriority, "test_priorities_that_cannot_be_are_refused"),
        (HalfUpdates, "test_priorities_that_cannot_be_are_refused"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_is_wrong_with_replay_is_found_out(kind: Any, test: str) -> None:
    suite = ReplaySamplerConformance()
    suite.make = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, IndexError)):
        getattr(suite, test)()


def test_what_is_right_with_replay_passes() -> None:
    suite = ReplaySamplerConformance()
    suite.make = Replay  # type: ignore[method-assign]
    for test in _tests(ReplaySamplerConformance):
        getattr(suite, test)()


def _tests(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}


def test_every_demand_is_put_to_the_test() -> None:
    """Each test of the suites has a sampler above that fails it."""
    for check, suite in (
        (test_what_is_wrong_with_windows_is_found_out, WindowSamplerConformance),
        (test_what_is_wrong_with_replay_is_found_out, ReplaySamplerConformance),
    ):
        (mark,) = check.pytestmark  # type: ignore[attr-defined]
        assert _tests(suite) == {test for _, test in mark.args[1]}


# ---------------------------------------------------------------------- fingerprints


class Unnamed:
    """A sampler without a repr of its own."""

    def __init__(self, rows: list[int], table: Any = None) -> None:
        self.sequence_length, self.batch_size = 5, 2
        self.rows, self.table = rows, np.arange(5000) if table is None else table

    def batches_per_epoch(self, snapshot: Any) -> int:
        return 1

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return np.array(self.rows)


@dataclass
class OneInside:
    sequence_length: int
    batch_size: int
    inner: Any

    def batches_per_epoch(self, snapshot: Any) -> int:
        return 1

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        return np.array([0])


def test_a_fingerprint_has_no_address_in_it() -> None:
    store = example_store()

    def fingerprint(sampler: Any, of: DatasetStore = store) -> str:
        return BatchSource(of, sampling=sampler).fingerprint

    table = np.arange(5000)
    table[2500] = 7  # what repr leaves out
    samplers = [Unnamed([1, 2]), Unnamed([1, 3]), Unnamed([1, 2], table), OneInside(5, 1, Unnamed([1]))]
    again = [Unnamed([1, 2]), Unnamed([1, 3]), Unnamed([1, 2], table.copy()), OneInside(5, 1, Unnamed([1]))]
    prints = [fingerprint(sampler) for sampler in samplers]
    assert len(set(prints)) == 4
    assert prints == [fingerprint(sampler) for sampler in again]
    with (
        PrefetchBatchifier(store, sampling=Unnamed([1, 2])) as one,
        PrefetchBatchifier(store, sampling=Unnamed([1, 2])) as other,
    ):
        one.next_batch()
        other.load_state_dict(one.state_dict())
        assert other.state_dict() == one.state_dict()
    source = BatchSource(store, sampling=Unnamed([1, 2], table=lambda: 3))
    with pytest.raises(ConfigError, match=r"whose repr says what it is .* found Unnamed\.table"):
        source.fingerprint  # noqa: B018
