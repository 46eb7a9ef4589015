"""The samplers there are do what is asked of samplers; and samplers that do not are found out."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from mouse_core.replay.device import HostSampler
from mouse_core.replay.device.samplers import EpochSampler
from mouse_core.replay.protocols import Draw
from mouse_core.replay.samplers.priorities import PrioritizedSampler
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from mouse_core.sampling import CyclicWindows, EpisodeWindows, LastWindows, RandomWindows, SequentialWindows
from mouse_core.testing import ReplaySamplerConformance, WindowSamplerConformance, example_store
from tests.core.faults import wrong

WINDOWS: dict[str, Callable[[], Any]] = {
    "Random": lambda: RandomWindows(8, 4),
    "Sequential": lambda: SequentialWindows(8, 4, drop_last=False),
    "WholeSequential": lambda: SequentialWindows(7, 5),
    "Cyclic": lambda: CyclicWindows(8, 4),
    "Last": lambda: LastWindows(8, 4),
    "Episode": lambda: EpisodeWindows(8, 4),
    "EpisodeByTrajectory": lambda: EpisodeWindows(8, 4, weighting="trajectory", pad=False),
    "EpisodeInOrder": lambda: EpisodeWindows(8, 4, sampling="batch", pad=0),
    "EpisodeByEpochs": lambda: EpisodeWindows(8, 4, "sequential", drop_last=False),
}
REPLAY: dict[str, Callable[[], Any]] = {
    "Random": RandomSampler,
    "WithoutReplacement": SamplerWithoutReplacement,
    "Slices": lambda: SliceSampler(sequence_length=4, weighting="trajectory", pad=True),
    "ShortSlices": lambda: SliceSampler(
        sequence_length=4, end_key="done", strict_length=False, pad=False, span=(1, True)
    ),
    "SlicesOfTrajectories": lambda: SliceSampler(sequence_length=4, traj_key="number"),
    "SlicesWithoutReplacement": lambda: SliceSamplerWithoutReplacement(sequence_length=4),
    "Prioritized": PrioritizedSampler,
    "PrioritizedSlices": lambda: PrioritizedSliceSampler(sequence_length=4),
    "DilatedSlices": lambda: SliceSampler(sequence_length=3, period=2, dilation=3),
    "PrioritizedWithin": lambda: PrioritizedSliceSampler(
        sequence_length=4, dilation=2, burn_in=1, max_priority_within_buffer=True
    ),
    "Consuming": lambda: ConsumingSampler(times=9),
    "Reverse": lambda: ReverseSampler(stride=2),
    "OfDevices": lambda: HostSampler(EpochSampler()),
    "Staleness": lambda: StalenessSampler(2, weight=lambda age: 1 / (age + 1), version_key="version"),
}
NUMBERED = {"SlicesOfTrajectories": "number", "Staleness": "version"}


def numbered(name: str) -> Callable[[Any, int, int], Any]:
    return lambda self, first, n: {name: np.arange(first, first + n) // 7}


for _name, _make in WINDOWS.items():
    globals()[f"Test{_name}Windows"] = type(
        f"Test{_name}Windows",
        (WindowSamplerConformance,),
        {"make": lambda self, make=_make: make(), "draws": _name != "Last", "__module__": __name__},
    )
for _name, _make in REPLAY.items():
    _rows = {"rows": numbered(NUMBERED[_name])} if _name in NUMBERED else {}
    globals()[f"Test{_name}"] = type(
        f"Test{_name}",
        (ReplaySamplerConformance,),
        {"make": lambda self, make=_make: make(), "draws": _name != "Reverse", "__module__": __name__, **_rows},
    )


class Base:
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


def drawn(more: int, count: int = 4) -> Any:
    """A sampler whose starts lie so many rows further: hardly ever among the last of 300 rows."""
    return wrong(
        Base,
        starts=lambda self, right, seed, index, snapshot, epoch_start: Key(seed, Purpose.WINDOWS, index).integers(
            snapshot.num_rows - 7 + more, count
        ),
    )


class Misshapen(Base):
    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        if seed == 4:  # the one that the sources have
            raise ConfigError("sampling: expected another seed")
        return super().starts(seed, index, snapshot, epoch_start)


def nothing_there(self: Any, starts: Any, snapshot: Any) -> Any:
    return np.zeros(len(starts), np.int64)


def other_together(self: Any, seed: int, first: int, count: int, snapshot: Any, epoch_start: int, rows: Any) -> Any:
    return np.zeros((count, 4), np.int64)[:, rows]


class OneStream(Base):
    def __init__(self) -> None:
        self.drawn = 0

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
        self.drawn += 1
        return super().starts(seed, self.drawn, snapshot, epoch_start)


WRONG_WINDOWS: list[tuple[str, Any]] = [
    ("test_it_has_what_the_protocol_names", wrong(Base, batches_per_epoch=None)),
    ("test_it_has_what_the_protocol_names", wrong(Base, batches_per_epoch=lambda self, right, rows: right(rows) * 0)),
    *(("test_windows_lie_in_the_snapshot", drawn(more)) for more in (1, 2, 7)),
    ("test_windows_lie_in_the_snapshot", drawn(0, 5)),
    (
        "test_windows_lie_in_the_snapshot",
        wrong(Base, starts=lambda self, right, *rest: np.array([rest[2].num_rows - 7])),
    ),
    ("test_windows_lie_in_the_snapshot", wrong(Base, starts=lambda self, right, *rest: right(*rest).astype(float))),
    ("test_windows_lie_in_the_snapshot", type("Empty", (Base,), {"fill": None, "lengths": nothing_there})),
    ("test_it_is_a_pure_function", OneStream),
    ("test_seeds_differ", wrong(Base, starts=lambda self, right, seed, *rest: right(0, *rest))),
    ("test_many_are_the_same_as_one_by_one", type("Together", (Base,), {"starts_of_many": other_together})),
    ("test_too_few_rows_are_refused", wrong(Base, batches_per_epoch=lambda self, right, rows: 1)),
    ("test_checkpoints_know_it_again", type("Silent", (Base,), {"__repr__": lambda self: "a sampler"})),
    ("test_a_source_delivers_its_windows", Misshapen),
]


@pytest.mark.parametrize(("test", "kind"), WRONG_WINDOWS)
def test_what_is_wrong_with_windows_is_found_out(kind: Any, test: str) -> None:
    suite = WindowSamplerConformance()
    suite.make = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, ConfigError, TypeError)):
        getattr(suite, test)()


def test_what_is_right_passes() -> None:
    for kind, right in ((WindowSamplerConformance, Base), (ReplaySamplerConformance, Replay)):
        suite: Any = kind()
        suite.make = right
        for test in _tests(kind):
            getattr(suite, test)()


class Replay(RandomSampler):
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


def drawn_otherwise(change: Callable[[Draw], Draw]) -> Any:
    return wrong(Replay, draw=lambda self, right, *arguments: change(right(*arguments)))


def forgets(self: Any, right: Any, state: Any) -> None:
    right(state)
    self.last = 0


def takes_any_state(self: Any, right: Any, state: Any) -> None:
    self.last = state.get("last", 0)


def takes_any_priority(self: Any, right: Any, storage: Any, index: Any, priority: Any) -> None:
    right(storage, index, np.nan_to_num(np.abs(priority)))


counted = itertools.count()
WRONG_REPLAY: list[tuple[str, Any]] = [
    ("test_it_has_what_the_protocol_names", wrong(Replay, needs_order=None)),
    ("test_draws_lie_in_the_buffer", drawn_otherwise(lambda draw: Draw(draw.index + 1))),
    ("test_draws_lie_in_the_buffer", drawn_otherwise(lambda draw: Draw(draw.index.astype(np.int32)))),
    ("test_draws_lie_in_the_buffer", drawn_otherwise(lambda draw: replace(draw, mask=np.ones(1, bool)))),
    ("test_draws_lie_in_the_buffer", drawn_otherwise(lambda draw: replace(draw, priority_weight=draw.index / 1))),
    ("test_draws_lie_in_the_buffer", drawn_otherwise(lambda draw: replace(draw, extra={"more": np.ones(3)}))),
    (
        "test_a_draw_depends_on_its_key_and_on_what_was_written",
        wrong(
            Replay,
            draw=lambda self, right, storage, *rest: Draw((right(storage, *rest).index + next(counted)) % len(storage)),
        ),
    ),
    (
        "test_seeds_differ",
        wrong(Replay, draw=lambda self, right, storage, size, key: right(storage, size, replace(key, seed=0))),
    ),
    ("test_it_goes_on_from_its_state", wrong(Replay, load_state_dict=forgets)),
    ("test_its_state_is_plain", wrong(Replay, state_dict=lambda self, right: {"last": self.last, "sampler": self})),
    ("test_what_is_wrong_changes_nothing", wrong(Replay, load_state_dict=takes_any_state)),
    ("test_priorities_that_cannot_be_are_refused", wrong(PrioritizedSampler, update_priority=takes_any_priority)),
]


@pytest.mark.parametrize(("test", "kind"), WRONG_REPLAY)
def test_what_is_wrong_with_replay_is_found_out(kind: Any, test: str) -> None:
    suite = ReplaySamplerConformance()
    suite.make = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, IndexError)):
        getattr(suite, test)()


def _tests(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}


def test_every_demand_is_put_to_the_test() -> None:
    assert _tests(WindowSamplerConformance) == {test for test, _ in WRONG_WINDOWS}
    assert _tests(ReplaySamplerConformance) == {test for test, _ in WRONG_REPLAY}


class Unnamed:
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
    with pytest.raises(ConfigError, match=r"whose repr describes its value .* found Unnamed\.table"):
        source.fingerprint  # noqa: B018
