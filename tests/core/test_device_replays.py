"""The suite for replays on a device can be passed, by a buffer of the core, and finds what differs from it."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, MouseError
from mouse_core.nested import copied, find
from mouse_core.replay import ArrayStorage, PrioritizedSampler, ReplayBuffer
from mouse_core.replay.device import Arrays, DeviceSampler, DrawKey, HostSampler, Slices, SliceUnits
from mouse_core.replay.device.arrays import Ring
from mouse_core.replay.samplers.episodes import EpisodeFields
from mouse_core.testing import DeviceReplayConformance
from mouse_core.testing.replay.devices import Setup
from tests.raising import assert_raises


class TestOnTheHost(DeviceReplayConformance):
    def init(self, example: Any, capacity: int, *, seed: int, **options: Any) -> Any:
        return Setup(steps=capacity // (options["num_envs"] or 1), **options).host(seed)

    def add(self, state: Any, rows: Any) -> Any:
        one = np.ndim(find(rows, "done")) < state.storage.ndim
        if not one and len(find(rows, "done")) > state.storage.capacity // state.storage.num_envs:
            raise ConfigError("too many rows")
        state.append(copied(rows)) if one else state.extend(copied(rows))
        return state

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        state.load_state_dict(state.state_dict() | {"samples": index})
        return state, state.sample()

    def set_priorities(self, state: Any, indices: Any, priorities: Any) -> Any:
        if not isinstance(state.sampler, PrioritizedSampler):
            raise ConfigError("expected priorities")
        state.update_priority(indices[indices >= 0], priorities[indices >= 0])
        return state

    def can_sample(self, state: Any) -> Any:
        tried = pickle.loads(pickle.dumps(state))
        try:
            tried.sample()
        except MouseError:
            return False
        return True

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        state.load_state_dict(state.state_dict() | {"samples": samples})
        state.dumps(path)

    def loads(self, state: Any, path: Path) -> tuple[Any, int]:
        state.loads(path)
        return state, state.stats()["samples"]


@pytest.mark.long
class TestOnTheHostLonger(TestOnTheHost):
    variants, programs = 24, 30  # 5,040 programs


class Unpadded(TestOnTheHost):
    """A field says that all slices are whole."""

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        state, batch = super().sample(state, index)
        return state, batch | {"mask": np.ones_like(batch["mask"])} if "mask" in batch else batch


class Forgetful(TestOnTheHost):
    """The first priority of a row that comes twice counts."""

    def set_priorities(self, state: Any, indices: Any, priorities: Any) -> Any:
        return super().set_priorities(state, indices[::-1], priorities[::-1])


class Elsewhere(TestOnTheHost):
    """A file does not contain the number of the next sample."""

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        super().dumps(state, path, 0)


class Growing(TestOnTheHost):
    """Rows are written before they are refused."""

    def add(self, state: Any, rows: Any) -> Any:
        before = pickle.loads(pickle.dumps(state))
        try:
            return super().add(state, rows)
        except MouseError:
            state.extend(before[:3])
            raise


@pytest.mark.parametrize(
    ("wrong", "test"), [(Unpadded, "test_slices"), (Forgetful, "test_rows_by_priority"), (Elsewhere, "test_rows")]
)
def test_what_is_wrong_is_found(wrong: type[DeviceReplayConformance], test: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        getattr(wrong(), test)(tmp_path)


def test_half_a_write_is_found_and_random_numbers_of_a_row_come_from_one_call() -> None:
    assert_raises(AssertionError, "after a rejected call", Growing().test_what_is_refused_changes_nothing)
    xp, key = Arrays(), DrawKey(7, 3)
    words = xp.words(key, 8)
    np.testing.assert_array_equal(xp.words(key, 8), words)
    assert (xp.integers(words, 1000)[:4] != xp.integers(words, 1000)[4:]).all()


class RowsAlone(DeviceSampler):
    def draw(self, xp: Any, state: Any, ring: Any, key: Any, size: int) -> Any:
        return state, self.units.plan(xp, state, ring, xp.range(size))


def test_a_sampler_of_rows_refuses_slices_and_one_of_another_kind_is_refused() -> None:
    units = SliceUnits(Slices(sequence_length=2), EpisodeFields(("done",), None, True), None)
    buffer = ReplayBuffer(ArrayStorage(9), HostSampler(RowsAlone(units=units)), batch_size=4)
    buffer.extend({"done": np.zeros(6, bool)})
    with pytest.raises(
        ConfigError, match=r"expected slices, as units\.at_slots and units\.find return them, found slots of rows"
    ):
        buffer.sample()
    shorter = SliceUnits(Slices(sequence_length=2, pad=False), EpisodeFields(("done",), None, True), None)
    with pytest.raises(ConfigError, match=r"at_slots: .*found pad=False, with which a slice can cross"):
        shorter.at_slots(Ring(6, 6, 9, None), np.arange(3))
    with pytest.raises(TypeError, match="Drawless: expected a subclass of DeviceSampler with a method draw"):
        type("Drawless", (DeviceSampler,), {})
    given: Any
    for given in (RowsAlone, object()):
        assert_raises(ConfigError, "expected an instance of a subclass of DeviceSampler, found", HostSampler, given)
    given = RowsAlone()
    with pytest.raises(ConfigError, match=r"HostSampler\(sampler\) for a DeviceSampler, found RowsAlone"):
        ReplayBuffer(ArrayStorage(9), given)
