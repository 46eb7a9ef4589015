"""Buffers over a store that grows: after ``refresh()`` they are as buffers that rows were written to."""

import copy
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, DatasetStore, Field, PrefetchBatchifier, StateError
from mouse_core.replay import (
    ArrayStorage,
    ConsumingSampler,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from mouse_core.testing import example_columns
from tests.core.replay_cases import SAMPLERS
from tests.raising import assert_raises

ROWS = 600
CUTS = (40, 41, 90, 300, 301, ROWS)


def columns(first: int, end: int) -> dict[str, Any]:
    random = np.random.default_rng(3)
    done = random.random(ROWS) < 0.1
    rows = {
        "observation": random.normal(size=(ROWS, 3)).astype(np.float32),
        "action": random.integers(0, 4, ROWS),
        "reward": np.arange(ROWS, dtype=np.float32),
        "done": done.astype(np.int64),
    }
    return {name: values[first:end] for name, values in rows.items()}


def written(sampler: Any, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(ArrayStorage(ROWS, alignment="arrived"), sampler, batch_size=8, seed=5, **options)


def same(one: ReplayBuffer, other: ReplayBuffer) -> None:
    ours, theirs = one.sample(), other.sample()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, name)


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
    for end in (200, 350, ROWS):
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
                found = other.sample()
                for name, values in batch.items():
                    np.testing.assert_array_equal(found[name], values, name)
            other.refresh()
            assert len(other) == ROWS
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


@pytest.mark.parametrize("sampler", ["rows", "priorities", "slices by priorities"])
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
