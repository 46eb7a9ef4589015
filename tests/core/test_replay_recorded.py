"""Buffers over recorded data: they draw and read what a buffer in memory with the same rows does."""

import pickle
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from mouse_core import DataError, DatasetStore, Field, SchemaError
from mouse_core.replay import (
    ArrayStorage,
    CatFrames,
    NextView,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.core.replay_cases import SAMPLERS

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
