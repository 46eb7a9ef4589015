"""Buffers over stores, recorded or growing: they draw and read what a buffer in memory with the same rows does."""

import copy
import pickle
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from mouse_core import ConfigError, DataError, DatasetStore, Field, PrefetchBatchifier, SchemaError, StateError
from mouse_core.replay import (
    ArrayStorage,
    CatFrames,
    ConsumingSampler,
    NextView,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from mouse_core.testing import example_columns
from tests.core.oracle import assert_same
from tests.core.replay_cases import SAMPLERS
from tests.raising import assert_raises

ROWS = 700


def rows() -> dict[str, Any]:
    random = np.random.default_rng(3)
    done = random.random(ROWS) < 0.1
    return {
        "obs_continuous": random.normal(size=(ROWS, 3)).astype(np.float32),
        "action": random.integers(0, 4, ROWS),
        "reward": np.arange(ROWS, dtype=np.float32),
        "done": done.astype(np.int64),
    }


def store(kind: str) -> DatasetStore:
    given = rows()
    if kind == "appended":
        made = DatasetStore()
        made.extend(given)
        return made
    dataset = Dataset.from_dict({"observation": given.pop("obs_continuous").tolist(), **given})
    if kind == "shuffled":  # rows that are found one by one, back in their order
        order = np.random.default_rng(1).permutation(ROWS)
        dataset = dataset.select(order.tolist()).select(np.argsort(order).tolist())
    return DatasetStore().from_dataset(dataset)


def buffers(kind: str, sampler: str, **options: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    recorded = ReplayBuffer(store(kind), SAMPLERS[sampler](), batch_size=24, seed=5, **options)
    taken = recorded[:]
    return recorded, ReplayBuffer(
        ArrayStorage(arrays=taken, alignment="arrived"), SAMPLERS[sampler](), batch_size=24, seed=5, **options
    )


def check_same(one: Any, two: Any) -> None:
    assert one.keys() == two.keys()
    for name, values in one.items():
        if isinstance(values, dict):
            check_same(values, two[name])
        elif name != "traj_id":  # running numbers
            np.testing.assert_array_equal(values, two[name], err_msg=name)
            assert np.asarray(values).dtype == np.asarray(two[name]).dtype


@pytest.mark.parametrize(("sampler", "kind"), [*zip(SAMPLERS, cycle(["appended", "dataset", "shuffled"]))])
def test_a_buffer_over_a_store_draws_what_one_in_memory_does(kind: str, sampler: str) -> None:
    recorded, memory = buffers(kind, sampler)
    for number in range(40):
        size = 24 if number % 7 else 48
        check_same(recorded.sample(size), memory.sample(size))


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_a_row_that_is_not_drawn_may_be_damaged(kind: Any) -> None:
    done, code = np.zeros(20, np.int64), np.zeros(20, np.int64)
    done[[2, 19]] = 1
    code[3] = 99  # right behind an episode of three rows
    given = {"action": done, "reward": done.astype(np.float32), "done": done, "code": code}
    made = DatasetStore(fields=[Field("code", bounds=(0, 9))]).from_dataset(Dataset.from_dict(given))
    buffer = ReplayBuffer(made, kind(sequence_length=8), batch_size=1)
    found, refused = 0, []
    for _ in range(60):
        try:
            batch = buffer.sample()
        except DataError as error:
            refused.append(str(error))
            continue
        assert 3 not in batch["index"]
        found += 2 in batch["index"]
    assert found
    assert refused
    assert all("found 99 at row 3" in message for message in refused)


@pytest.mark.parametrize("length", [1, 6])
def test_rows_may_have_a_mask_of_their_own_where_slices_have_none(length: int) -> None:
    made = DatasetStore(fields=[Field("mask")])
    made.extend({**rows(), "mask": np.arange(ROWS) % 3})
    batch = ReplayBuffer(made, SliceSampler(sequence_length=length, pad=False), batch_size=8).sample()
    np.testing.assert_array_equal(batch["mask"], batch["index"] % 3)
    with pytest.raises(SchemaError, match=r"expected rows without the fields .*mask"):
        ReplayBuffer(made, SliceSampler(sequence_length=length), batch_size=8).sample()


@pytest.mark.parametrize("transform", [NextView(takes="arrived"), NStep(3, 0.9, takes="arrived")])
@pytest.mark.parametrize("sampler", ["slices", "rows"])
def test_transforms_find_the_same_steps(transform: Any, sampler: str) -> None:
    recorded, memory = buffers("dataset", sampler, transform=transform)
    for _ in range(10):
        check_same(recorded.sample(), memory.sample())


@pytest.mark.parametrize("weighting", ["step", "trajectory"])
def test_a_state_goes_on_in_the_middle_of_what_was_planned(weighting: Any) -> None:
    def fresh() -> ReplayBuffer:
        sampler = SliceSampler(sequence_length=6, weighting=weighting, pad=False)
        return ReplayBuffer(store("dataset"), sampler, batch_size=24, seed=5)

    one = fresh()
    for _ in range(13):
        one.sample()
    state = one.state_dict()
    two, three = fresh(), pickle.loads(pickle.dumps(one))
    two.sample()
    two.load_state_dict(state)
    for _ in range(30):
        batch = one.sample()
        for other in (two, three):
            found = other.sample()
            check_same(batch, found)
            np.testing.assert_array_equal(batch["traj_id"], found["traj_id"])


def broken_off(rows: int, first: int = 0) -> dict[str, Any]:
    """Rows ``first ..`` of episodes of 5, of which every other one was broken off: only ``episode_step`` says so."""
    number = np.arange(first, first + rows)
    return {
        "observation": number[:, None].astype(np.float32),
        "action": number % 2,
        "reward": number * 1.0,
        "done": (number % 10 == 9).astype(np.int64),
        "episode_step": number % 5,
    }


def broken_off_buffers(folder: Any) -> dict[str, ReplayBuffer]:
    one: dict[str, Any] = {"transform": NextView(takes="arrived"), "batch_size": 300}
    several = {**one, "transform": NStep(3, 1.0, takes="arrived")}
    there = DatasetStore()
    there.extend(broken_off(40))
    growing = DatasetStore()
    growing.extend(broken_off(13))
    grown = ReplayBuffer(growing, PrioritizedSampler(), **one)
    grown.sample()
    growing.extend(broken_off(27, 13))
    grown.refresh()
    few = DatasetStore.open(folder / "few", "a", sync="none", max_rows=24)
    few.extend(broken_off(20))
    kept = ReplayBuffer(few, **several)
    kept.sample()
    few.extend(broken_off(20, 20))
    kept.refresh()
    untold = {name: values.tolist() for name, values in broken_off(40).items() if name != "done"}
    only_steps = DatasetStore(fields=[Field("done", required=False)]).from_dataset(Dataset.from_dict(untold))
    return {
        "rows": ReplayBuffer(there, **one),
        "priorities": ReplayBuffer(there, PrioritizedSampler(), **several),
        "short slices, flat": ReplayBuffer(
            there, SliceSampler(sequence_length=7, strict_length=False, pad=False), **one
        ),
        "a view": ReplayBuffer(there.where(episode=[0, 2, 3, 6]), **several),
        "a view of a view": ReplayBuffer(there.where(episode=[0, 2, 3, 6]).where(episode=[0, 6]), **one),
        "grown": grown,
        "the oldest dropped": kept,
        "steps alone": ReplayBuffer(only_steps, transform=CatFrames("obs_continuous", frames=2), batch_size=300),
    }


def test_transitions_end_where_the_episodes_of_a_store_do(tmp_path: Any) -> None:
    for name, buffer in broken_off_buffers(tmp_path).items():
        batch = buffer.sample()
        obs = batch["obs_continuous"]
        if name == "steps alone":
            assert (obs[:, 0] // 5 == obs[:, 1] // 5).all(), name
            continue
        obs, behind, mask = obs[:, 0], batch["next"]["obs_continuous"][:, 0], batch["mask"]
        np.testing.assert_array_equal(mask, obs % 5 != 4, name)
        assert (obs[mask] // 5 == behind[mask] // 5).all(), name
        assert (behind[mask] > obs[mask]).all(), name


GROWN = 600
CUTS = (40, 41, 90, 300, 301, GROWN)


def columns(first: int, end: int) -> dict[str, Any]:
    random = np.random.default_rng(3)
    done = random.random(GROWN) < 0.1
    rows = {
        "observation": random.normal(size=(GROWN, 3)).astype(np.float32),
        "action": random.integers(0, 4, GROWN),
        "reward": np.arange(GROWN, dtype=np.float32),
        "done": done.astype(np.int64),
    }
    return {name: values[first:end] for name, values in rows.items()}


def written(sampler: Any, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(ArrayStorage(GROWN, alignment="arrived"), sampler, batch_size=8, seed=5, **options)


def same(one: ReplayBuffer, other: ReplayBuffer) -> None:
    assert_same(one.sample(), other.sample())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_buffer_over_a_store_draws_what_one_does_that_the_rows_are_written_to(sampler: str) -> None:
    store = DatasetStore()
    store.extend(columns(0, CUTS[0]))
    buffer, oracle = ReplayBuffer(store, SAMPLERS[sampler](), batch_size=8, seed=5), written(SAMPLERS[sampler]())
    oracle.extend(buffer[:])
    for before, end in pairwise(CUTS):
        for _ in range(3):
            same(buffer, oracle)
            if buffer.prioritized:
                index = buffer.sample()["index"]
                oracle.sample()
                buffer.update_priority(index, index % 7 / 3)
                oracle.update_priority(index, index % 7 / 3)
        store.extend(columns(before, end))
        assert len(buffer) == before
        buffer.refresh()
        assert (len(buffer), buffer.stats()["written"]) == (end, end)
        oracle.extend(buffer[before:])
    for _ in range(3):
        same(buffer, oracle)


@pytest.mark.parametrize("sampler", list(SAMPLERS)[::2])
def test_a_state_brings_back_the_rows_of_its_time(sampler: str) -> None:
    store = DatasetStore()
    store.extend(columns(0, 100))
    buffer = ReplayBuffer(store, SAMPLERS[sampler](), batch_size=8, seed=5)
    states, expected = [], []
    for end in (200, 350, GROWN):
        buffer.sample()
        if buffer.prioritized:
            buffer.update_priority(np.arange(50), np.arange(50) / 9)
        states.append(buffer.state_dict())
        ahead = copy.deepcopy(buffer)
        expected.append([ahead.sample() for _ in range(3)])
        store.extend(columns(len(store), end))
        buffer.refresh()
    # One that saw fewer rows, one that sees more, and one that only has a snapshot.
    fewer = ReplayBuffer(store.snapshot(100), SAMPLERS[sampler](), batch_size=8, seed=1)
    assert len(fewer) == 100
    for number, state in enumerate(states):
        for other in (ReplayBuffer(store, SAMPLERS[sampler](), batch_size=8, seed=1), buffer):
            other.load_state_dict(state)
            assert len(other) == (100, 200, 350)[number]
            for batch in expected[number]:
                assert_same(other.sample(), batch)
            other.refresh()
            assert len(other) == GROWN
    assert_raises(StateError, "expected a state of 1 to 100 rows, found 350", fewer.load_state_dict, states[2])
    assert len(fewer) == 100


def test_rows_that_the_store_forgot_are_gone_and_no_priority_is_known() -> None:
    store = DatasetStore()
    store.extend(columns(0, 100))
    buffer = PrioritizedReplayBuffer(storage=store, batch_size=50, seed=5)
    buffer.update_priority(np.arange(100), np.zeros(100))
    buffer.update_priority([3], [1000.0])
    assert set(buffer.sample()["index"].tolist()) == {3}
    store.clear()
    store.extend(columns(200, 300))  # as many, and others
    buffer.refresh()
    batch = buffer.sample()
    assert len(set(batch["index"].tolist())) > 20
    np.testing.assert_array_equal(batch["reward"], 200 + batch["index"])
    store.clear()
    buffer.refresh()
    assert_raises(ConfigError, "found an empty buffer", buffer.sample)
    store.extend(columns(0, 10))
    buffer.refresh()
    assert set(buffer.sample()["index"].tolist()) == set(range(10))


@pytest.mark.parametrize("sampler", ["rows", "slices by priorities"])
def test_rows_that_stay_keep_their_priorities_when_the_oldest_are_dropped(sampler: str, tmp_path: Path) -> None:
    """The oracle is a buffer over the rows that there are, with priorities kept in a dict by their numbers."""
    with DatasetStore.open(tmp_path, "a", sync="none", max_rows=160) as store:
        store.extend(columns(0, 120))
        buffer = ReplayBuffer(store, SAMPLERS[sampler](), batch_size=8, seed=5)
        priorities, largest, dropped = dict.fromkeys(range(120), 1.0), 1.0, []
        for end in (150, 190, 300):
            numbers = range(store.written - len(buffer), store.written)
            if buffer.prioritized:
                index = buffer.sample()["index"].reshape(-1)
                buffer.update_priority(index, index % 7 / 3)
                priorities |= {numbers[at]: at % 7 / 3 for at in index.tolist()}
                largest = max(largest, *(index % 7 / 3).tolist())
            store.extend(columns(store.written, end))
            dropped.append(numbers[0])
            buffer.refresh()
            assert buffer[:]["reward"].tolist() == list(range(end - len(store), end))
            oracle = ReplayBuffer(store.snapshot(), SAMPLERS[sampler](), batch_size=8, seed=5)
            for _ in range(buffer.stats()["samples"]):
                oracle.sample()
            there = range(end - len(store), end)
            priorities = {number: priorities.get(number, largest) for number in there}
            if buffer.prioritized:
                oracle.update_priority(np.arange(len(store)), list(priorities.values()))
            for other in (buffer, pickle.loads(pickle.dumps(buffer))):
                same(copy.deepcopy(other), copy.deepcopy(oracle))
        assert len(set(dropped)) > 1


def test_rows_that_were_consumed_do_not_come_again_when_the_oldest_are_dropped(tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path, "a", sync="none", max_rows=160) as store:
        store.extend(columns(0, 120))
        buffer = ReplayBuffer(store, ConsumingSampler(), batch_size=40)
        seen: set[int] = set()
        for end in (150, 190, 300):
            seen |= (drawn := {int(row) for row in buffer.sample()["reward"]})
            store.extend(columns(store.written, end))
            buffer.refresh()
            restored = ReplayBuffer(store, ConsumingSampler())
            restored.load_state_dict(buffer.state_dict())
            for other in (copy.deepcopy(buffer), restored):
                left = [int(row) for row in other.sample(600)["reward"]]
                assert sorted(left) == sorted(set(range(end - len(store), end)) - seen)
            assert len(drawn) == 40


@pytest.mark.parametrize("sampler", ["slices", "priorities", "every row twice and no more"])
def test_a_buffer_follows_when_one_of_other_parts_takes_later_rows(sampler: str) -> None:
    store = DatasetStore()
    store.extend(columns(0, 40))
    made, alone = (ReplayBuffer(store, SAMPLERS[sampler](), batch_size=8, seed=5) for _ in range(2))
    other = made.with_parts(transform=lambda batch: batch)
    for end in (41, 90, 300):
        for buffer in (made, alone):
            index = buffer.sample()["index"].reshape(-1)
            if buffer.prioritized:
                buffer.update_priority(index, index % 7 / 3)
        store.extend(columns(store.written, end))
        other.refresh()
        alone.refresh()
        same(made, alone)
        assert other.sample()["index"].max() < end


def test_datasets_that_come_later_leave_priorities_and_bring_fields() -> None:
    first, later = DatasetStore(), DatasetStore()
    first.extend(columns(0, 100))
    later.extend(columns(100, 200))
    store = DatasetStore().from_dataset(first.to_dataset())
    buffer = PrioritizedReplayBuffer(storage=store, batch_size=300, seed=5)
    buffer.update_priority(np.arange(100), np.zeros(100))
    store.from_dataset(later.to_dataset())
    buffer.refresh()
    assert buffer.sample()["index"].min() >= 100
    store = DatasetStore(fields=[Field("level", dtype="float32", fill=-1.0)])
    store.extend({**columns(0, 50), "level": [None] * 50})
    buffer = ReplayBuffer(store, batch_size=4)
    assert "level" not in buffer.sample()
    store.extend({**columns(50, 90), "level": np.ones(40, np.float32)})
    buffer.refresh()
    np.testing.assert_array_equal(buffer[:]["level"], np.where(np.arange(90) < 50, -1, 1))


def test_an_ensemble_refreshes_the_members_that_have_a_store() -> None:
    store = DatasetStore()
    store.extend(columns(0, 50))
    fresh = ReplayBuffer(ArrayStorage(100, alignment="arrived"))
    inner = ReplayBufferEnsemble(store, batch_size=8)
    fresh.extend(ReplayBuffer(store)[:10])
    mixed = ReplayBufferEnsemble(fresh, inner, ReplayBuffer(store.snapshot()), batch_size=90)
    store.extend(columns(50, 70))
    assert len(mixed) == 10 + 50 + 50
    mixed.refresh()
    assert len(mixed) == 10 + 70 + 50
    mixed.sample()
    assert_raises(ConfigError, "refresh: expected a buffer over a DatasetStore", ReplayBufferEnsemble(fresh).refresh)


@pytest.mark.parametrize("kind", ["rows", "snapshot", "copy", "dataset"])
def test_without_a_store_there_is_nothing_to_refresh_from(kind: str) -> None:
    store = DatasetStore()
    store.extend(example_columns(50))
    given: Any = {"rows": None, "snapshot": store.snapshot(), "copy": store, "dataset": store.to_dataset()}[kind]
    buffer = ReplayBuffer(given)
    if kind == "copy":
        buffer = pickle.loads(pickle.dumps(buffer))
        assert len(buffer) == 50
    assert_raises(ConfigError, "refresh: expected a buffer over a DatasetStore, found a buffer over", buffer.refresh)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_over_a_buffer_refreshes_the_buffer(workers: int) -> None:
    store = DatasetStore()
    store.extend(columns(0, 50))
    buffer = ReplayBuffer(store, batch_size=200)
    with PrefetchBatchifier(buffer, num_workers=workers, prefetch=2) as loader:
        assert loader.next_batch()["index"].max() < 50
        store.extend(columns(50, 600))
        loader.refresh()
        assert len(buffer) == 600
        batches = [loader.next_batch() for _ in range(4)]  # those that were drawn ahead come first
        assert batches[-1]["index"].max() >= 50
