"""Buffers whose parts, rows and fields change: generations, other parts, new fields, routed writes, odd capacities."""

import copy
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import (
    ConfigError,
    DataError,
    DatasetStore,
    MissingFieldError,
    PrefetchBatchifier,
    SchemaError,
    StateError,
)
from mouse_core.replay import (
    ArrayStorage,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    NextView,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    VecNorm,
)
from tests.core.replay_cases import filled
from tests.raising import assert_raises


def rows(n: int, first: int = 0) -> dict[str, Any]:
    numbers = np.arange(first, first + n)
    return {"row": numbers, "done": numbers % 7 == 6, "reward": numbers / 4}


def prioritized(capacity: int = 10, n: int = 10, **options: Any) -> ReplayBuffer:
    storage = options.pop("storage", None) or ArrayStorage(capacity)
    buffer = PrioritizedReplayBuffer(1.0, eps=0.0, storage=storage, batch_size=8, **options)
    buffer.extend(rows(n))
    return buffer


def weights(buffer: Any) -> list[float]:
    return buffer.sampler.weights_at(buffer.storage, np.arange(len(buffer))).tolist()


@given(st.lists(st.integers(0, 12), max_size=8), st.data())
def test_an_index_and_its_generation_name_a_row(writes: list[int], data: Any) -> None:
    buffer = ReplayBuffer(ArrayStorage(5), batch_size=4, generations=True)
    handles: list[tuple[int, int, int]] = []
    written = 0
    for n in writes:
        if n == 12:
            buffer.empty()
            handles, gone = [], handles
            for slot, generation, _ in gone:
                assert buffer.generation_of(slot) != generation
            written = 0
            continue
        if n == 11:
            index = np.array([buffer.append({"row": written})])
        else:
            index = buffer.extend({"row": np.arange(written, written + n)})[-5:]
        n = 1 if n == 11 else n
        numbers = range(written + n - len(index), written + n)
        written += n
        handles += zip(index.tolist(), buffer.generation_of(index).tolist(), numbers, strict=True)
        for slot, generation, number in handles:
            present = slot < len(buffer) and buffer[slot]["row"] == number
            assert (buffer.generation_of(slot) == generation) == present
        if len(buffer):
            batch = buffer.sample()
            assert batch["generation"].tolist() == buffer.generation_of(batch["index"]).tolist()


@pytest.mark.parametrize(("capacity", "envs"), [(100, 60), (29, 10), (8, 4)])
def test_every_step_of_environments_counts_whatever_they_leave_of_the_capacity(capacity: int, envs: int) -> None:
    buffer = ReplayBuffer(ArrayStorage(capacity, ndim=2), generations=True)
    for step in range(7):
        slots = buffer.append({"row": np.arange(envs)})
        steps = capacity // envs
        if step == 6:
            assert buffer.generation_of(slots).tolist() == [step // steps] * envs


def test_priorities_of_rows_that_are_gone_are_left_out() -> None:
    buffer = prioritized(generations=True)
    batch = buffer.sample(10)
    buffer.extend(rows(4, 10))  # over the rows 0 to 3
    fresh = weights(buffer)
    buffer.update_priority({**batch, "td_error": batch["index"] + 20.0})
    for slot in range(10):
        drawn = slot in batch["index"]
        assert weights(buffer)[slot] == (slot + 20.0 if slot > 3 and drawn else fresh[slot])
    buffer.update_priority(batch["index"], 5.0 + batch["index"])  # whoever names no generation is taken at his word
    assert weights(buffer)[batch["index"][0]] == 5.0 + batch["index"][0]
    with pytest.raises(MissingFieldError, match="generation"):
        buffer.update_priority({"index": batch["index"], "td_error": np.ones(10)})
    with pytest.raises(ConfigError, match="integers of the shape of the index"):
        buffer.update_priority(batch["index"], np.ones(10), batch["generation"][:3])
    assert_raises(IndexError, "", buffer.update_priority, [-1], [1.0], [0])
    with pytest.raises(ConfigError, match="generations=True"):
        prioritized().update_priority(batch["index"], np.ones(10), batch["generation"])
    assert_raises(SchemaError, "generation", ReplayBuffer(generations=True).append, {"generation": 3})


def test_slices_and_single_rows_have_generations_and_are_updated_in_their_own_shapes() -> None:
    sampler = PrioritizedSliceSampler(1.0, eps=0.0, sequence_length=3)
    buffer = filled(rows(14), 14, sampler, batch_size=6, generations=True)
    batch = buffer.sample()
    assert batch["generation"].shape == batch["index"].shape == (6, 3)
    buffer.extend(rows(5, 14))
    buffer.update_priority({**batch, "td_error": np.full(6, 0.5)})
    changed = {slot for slot in batch["index"].reshape(-1).tolist() if slot >= 5}
    assert [slot for slot, weight in enumerate(weights(buffer)) if weight == 0.5] == sorted(changed)
    single = filled(rows(14), 14, transform=NextView(), batch_size=6, generations=True)
    single.extend(rows(6, 14))
    batch = single.sample()  # of rows that are read with those behind them
    assert batch["generation"].tolist() == (batch["index"] < 6).tolist()
    buffer = filled(rows(14), 20, SliceSampler(sequence_length=3), batch_size=4, generations=True)
    batch = buffer.sample()
    present = buffer.update_if_present(batch["index"], batch["generation"], {"reward": -batch["row"].astype(float)})
    assert present.shape == (4, 3)
    assert present.all()
    drawn = set(batch["row"].reshape(-1).tolist())
    assert buffer[:]["reward"].tolist() == [-row if row in drawn else row / 4 for row in range(14)]
    assert buffer.update_if_present(3, 0, {"reward": 9.5}).tolist() is True
    assert buffer[3]["reward"] == 9.5
    for generation in (batch["generation"].reshape(-1), 0):
        with pytest.raises(ConfigError, match="integers of the shape of the index"):
            buffer.update_if_present(batch["index"], generation, {"reward": batch["reward"]})


@pytest.mark.parametrize("kind", ["array", "list", "mapped"])
def test_rows_are_updated_where_they_are_there(kind: str, tmp_path: Path) -> None:
    storages = {
        "array": lambda: ArrayStorage(6),
        "list": lambda: ListStorage(6),
        "mapped": lambda: MemmapStorage(6, tmp_path),
    }
    buffer = prioritized(6, 6, storage=storages[kind](), generations=True)
    buffer.update_priority(np.arange(6), np.arange(6) + 1.0)
    index, generation = np.arange(6), buffer.generation_of(np.arange(6))
    buffer.extend(rows(2, 6))  # over the rows 0 and 1
    before = weights(buffer)
    updated = buffer.update_if_present(index, generation, {"reward": index - 50.0})
    assert updated.tolist() == [False, False, True, True, True, True]
    found = [buffer[slot]["reward"] for slot in range(6)]
    assert found == [1.5, 1.75, -48.0, -47.0, -46.0, -45.0]
    assert [int(buffer[slot]["row"]) for slot in range(6)] == [6, 7, 2, 3, 4, 5]
    assert weights(buffer) == before
    assert (buffer.generation_of(index[2:]) == generation[2:]).all()
    assert buffer.update_if_present(index[:2], generation[:2], {"reward": np.zeros(2)}).tolist() == [False, False]
    for fields, error, message in (
        ({"other": np.zeros(6)}, MissingFieldError, "found the field 'other'"),
        ({"reward": np.zeros(5)}, DataError, "expected 6 values"),
    ):
        assert_raises(error, message, buffer.update_if_present, index, generation, fields)
    assert [buffer[slot]["reward"] for slot in range(6)] == found


def test_generations_are_saved_and_follow_a_store(tmp_path: Path) -> None:
    buffer = prioritized(6, 6, generations=True)
    buffer.extend(rows(2, 6))
    buffer.dumps(tmp_path / "saved")
    again = prioritized(6, 1, generations=True)
    again.loads(tmp_path / "saved")
    assert again.generation_of(np.arange(6)).tolist() == buffer.generation_of(np.arange(6)).tolist()
    before = again.generation_of(np.arange(6))
    plain = prioritized(6, 8)
    again.load_state_dict(plain.state_dict())  # of which nobody knows what was where
    assert (again.generation_of(np.arange(6)) != before).all()
    plain.load_state_dict(buffer.state_dict())
    state = buffer.state_dict()
    for wrong in ({"counts": np.array([-1])}, {"counts": np.zeros((2, 2), int)}, 5):
        assert_raises(StateError, "generations", again.load_state_dict, {**state, "generations": wrong})
    copied = pickle.loads(pickle.dumps(buffer))
    assert copied.generation_of(1) == buffer.generation_of(1) == 1
    store = _store()
    recorded = ReplayBuffer(store, batch_size=3, generations=True)
    first = recorded.generation_of(np.arange(4))
    store.extend(store[:2])
    recorded.refresh()
    assert (recorded.generation_of(np.arange(4)) == first).all()
    assert (recorded.generation_of(np.arange(6)) >= 0).all()


def test_generations_are_handed_on_by_loaders_and_ensembles() -> None:
    buffer = prioritized(generations=True)
    with PrefetchBatchifier(buffer, prefetch=2, num_workers=1) as loader:
        batch = loader.next_batch()
        buffer.extend(rows(10, 10))
        old = loader.next_batch()  # drawn before
        known = weights(buffer)
        buffer.update_priority({**old, "td_error": np.full(8, 77.0)})
        assert weights(buffer) == known
    assert batch["generation"].tolist() == [0] * 8
    counted = prioritized(6, 6, generations=True)
    mixed = ReplayBufferEnsemble(counted, prioritized(6, 6), batch_size=20)
    batch = mixed.sample()
    counted.extend(rows(6, 6))
    before = weights(counted)
    mixed.update_priority({**batch, "td_error": np.full(20, 9.0)})
    assert weights(counted) == before
    assert 9.0 in weights(mixed.buffers[1])
    sampler = PrioritizedSliceSampler(1.0, eps=0.0, sequence_length=2, end_key="done", pad=False)
    buffer = filled(rows(7), 7, sampler, batch_size=300, generations=True)
    buffer.update_priority(np.arange(7), np.array([0, 0, 8.0, 0, 0, 0, 0]))
    assert set(buffer.sample()["row"][:, 0].tolist()) == {2}
    buffer.update_if_present([2, 3], buffer.generation_of([2, 3]), {"reward": np.ones(2)})
    assert set(buffer.sample()["row"][:, 0].tolist()) == {2}
    assert isinstance(buffer.sampler, PrioritizedSampler)


def test_other_parts_leave_the_rest_as_it_was_and_another_storage_begins_anew() -> None:
    buffer = prioritized(8, 12, generations=True, seed=5, transform=lambda batch: {**batch, "mine": batch["row"] * 2})
    buffer.update_priority(np.arange(8), np.arange(8) + 1.0)
    buffer.sample()
    twin = copy.deepcopy(buffer)
    same = buffer.with_parts()
    assert type(same) is type(buffer)
    assert weights(same) == weights(buffer)
    expected = twin.sample()["index"].tolist()
    assert same.sample()["index"].tolist() == expected
    assert buffer.sample()["index"].tolist() == expected  # the draws of one are not those of the other
    same.update_priority([0], [99.0])
    assert weights(buffer)[0] == 1.0
    uniform = buffer.with_parts(
        sampler=RandomSampler(), transform=[*buffer.transform.transforms, lambda batch: {**batch, "last": 1}]
    )
    batch = uniform.sample()
    assert (batch["mine"] == batch["row"] * 2).all()
    assert batch["last"] == 1
    assert "priority_weight" not in batch
    assert uniform.generation_of(np.arange(8)).tolist() == buffer.generation_of(np.arange(8)).tolist()
    assert uniform.with_parts(transform=None).transform is None
    uniform.extend(rows(3, 12))
    assert buffer[:]["row"].tolist() == uniform[:]["row"].tolist() == [8, 9, 10, 11, 12, 13, 14, 7]
    assert weights(buffer)[4:7] == [8.0] * 3  # rows that the other one wrote are new here, too
    sliced = buffer.with_parts(sampler=SliceSampler(sequence_length=2, end_key="done"))
    assert sliced.sample()["row"].shape == (8, 2)
    buffer = prioritized(8, 8)
    buffer.update_priority(np.arange(8), np.arange(8) + 1.0)
    other = buffer.with_parts(storage=ArrayStorage(4))
    assert (len(other), len(buffer)) == (0, 8)
    other.extend(rows(3))
    assert weights(other) == [1.0] * 3
    assert weights(buffer) == [float(number) for number in range(1, 9)]
    recorded = buffer.with_parts(storage=_store())
    assert recorded.sample()["reward"].shape == (8,)
    assert_raises(ConfigError, "expected", recorded.append, {"reward": 1.0})


def _store() -> DatasetStore:
    store = DatasetStore(alignment="outgoing")
    columns = {name: np.zeros(4, int) for name in ("done", "action", "observation")}
    store.extend({"reward": np.arange(4.0), **columns})
    return store


def test_other_parts_go_on_with_running_means_and_those_that_do_not_fit_change_nothing() -> None:
    buffer = filled(rows(8), 8, SliceSampler(sequence_length=2, end_key="done"), batch_size=4)
    assert_raises(ConfigError, "keeps the order", buffer.with_parts, writer=MaxValueWriter("reward"))
    assert_raises(ConfigError, "for 'outgoing' rows", buffer.with_parts, transform=NextView(takes="arrived"))
    assert_raises(ConfigError, "sampler", buffer.with_parts, sampler=3)
    best = buffer.with_parts(sampler=SamplerWithoutReplacement(), writer=MaxValueWriter("reward"))
    assert best.extend(rows(4, 100)).tolist() == [0, 1, 2, 3]
    assert best.sample()["row"].shape == (4,)
    assert buffer.sample()["row"].shape == (4, 2)
    buffer = filled(rows(6), 8, transform=VecNorm("reward"), batch_size=4)
    buffer.sample()
    other = buffer.with_parts(sampler=SamplerWithoutReplacement(shuffle=False))
    other.extend(rows(4, 50))  # two of them over the oldest rows
    counted = np.concatenate([rows(6)["reward"], rows(4, 50)["reward"]])
    batch = other.sample()
    expected = (other[batch["index"]]["reward"] - counted.mean()) / counted.std()
    np.testing.assert_allclose(batch["reward"], expected, rtol=1e-5)
    assert_raises(ConfigError, "one storage", buffer.with_parts, storage=ArrayStorage(3))


@pytest.mark.parametrize("n", [5, 9])
def test_all_rows_get_a_new_field(n: int) -> None:
    buffer = prioritized(6, n)
    found = buffer[:]
    with pytest.raises(SchemaError, match="advantage"):
        buffer[:2] = {name: values[:2] for name, values in {**found, "advantage": found["reward"]}.items()}
    buffer[:] = {**found, "advantage": found["reward"] * 2, "note": [str(row) for row in found["row"]]}
    assert buffer[:]["advantage"].tolist() == (found["reward"] * 2).tolist()
    assert buffer[:]["row"].tolist() == found["row"].tolist()
    assert_raises(SchemaError, "advantage", buffer.extend, rows(1, n))
    buffer.extend({**rows(2, n), "advantage": np.array([5.0, 6.0]), "note": ["a", "b"]})
    batch = buffer.sample(20)
    assert batch["note"] == [{n: "a", n + 1: "b"}.get(row, str(row)) for row in batch["row"].tolist()]
    again = PrioritizedReplayBuffer(1.0, eps=0.0, storage=ArrayStorage(6), batch_size=8)
    again.load_state_dict(buffer.state_dict())
    assert again.sample(5)["advantage"].tolist() == buffer.sample(5)["advantage"].tolist()
    vector = ReplayBuffer(ArrayStorage(6, ndim=2), batch_size=2)
    vector.extend({"row": np.arange(8).reshape(4, 2)})
    vector[:] = {"row": vector[:]["row"], "new": vector[:]["row"] + 1}
    vector.append({"row": np.array([8, 9]), "new": np.array([9, 10])})
    assert (vector[:]["new"] == vector[:]["row"] + 1).all()


def test_axes_by_their_names_and_a_capacity_of_100_for_3_environments() -> None:
    grid = np.arange(2 * 4 * 3).reshape(2, 4, 3)  # [env, time, agent]
    buffer = ReplayBuffer(ArrayStorage(24, ndim=2), SliceSampler(sequence_length=4, end_key="done"), batch_size=6)
    index = buffer.extend({"row": grid, "done": np.zeros(grid.shape, bool)}, names=("env", "time", "agent"))
    assert index.shape == grid.shape
    np.testing.assert_array_equal(buffer[index]["row"], grid)
    assert buffer.storage.num_envs == 6
    streams = {tuple(grid[env, :, agent].tolist()) for env in range(2) for agent in range(3)}
    assert set(map(tuple, buffer.sample(100)["row"].tolist())) == streams
    flat = ReplayBuffer(ArrayStorage(24, ndim=2))
    flat.extend({"row": grid[:, :, 0]}, names=["env", "time"])
    assert flat[:]["row"].reshape(4, 2).T.tolist() == grid[:, :, 0].tolist()
    for names in (("env", "step"), "time", ("time", "time")):
        assert_raises(ConfigError, "including 'time'", flat.extend, {"row": grid[:, :, 0]}, names=names)
    assert_raises(ConfigError, "ndim=1", ReplayBuffer(ArrayStorage(4)).extend, {"row": np.arange(3)}, names=["time"])
    buffer = ReplayBuffer(ArrayStorage(100, ndim=2), SliceSampler(sequence_length=3, end_key="done"), batch_size=50)
    numbers = np.arange(-150, 150).reshape(2, 50, 3)
    for part in numbers:  # more than there are places beyond the capacity
        buffer.extend({"row": part, "done": np.zeros((50, 3), bool)})
    drawn = buffer.sample()["row"]
    assert (np.diff(drawn) == 3).all()
    assert drawn.min() >= 150 - 99
    state = buffer.state_dict()
    smaller = ReplayBuffer(ArrayStorage(98, ndim=2), SliceSampler(sequence_length=3, end_key="done"))
    with pytest.raises(StateError, match="expected capacity 98"):
        smaller.load_state_dict({**state, "storage": {**state["storage"], "schema": None}})


@pytest.mark.parametrize(("reduction", "expected"), [("max", [3.0, 5.0]), ("mean", [2.0, 5.0]), ("sum", [6.0, 15.0])])
def test_one_priority_of_several(reduction: str, expected: list[float]) -> None:
    buffer = PrioritizedReplayBuffer(1.0, eps=0.0, storage=ArrayStorage(4), priority_reduction=reduction)
    errors = np.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    buffer.extend({"obs": np.zeros((2, 3)), "td_error": errors})
    assert weights(buffer) == expected
    buffer.append({"obs": np.zeros(3), "td_error": errors[0]})
    assert weights(buffer)[2] == expected[0]
    buffer.update_priority([0, 1, 2], np.ones(3))
    buffer.update_priority([0, 1], errors)
    assert weights(buffer) == [*expected, 1.0]
    mixed = ReplayBufferEnsemble(buffer)
    mixed.update_priority([1, 0], errors, [0, 0])
    assert weights(buffer) == [*expected[::-1], 1.0]
    assert_raises(ConfigError, "priority_reduction", ReplayBuffer, priority_reduction="most")


def test_rows_go_to_the_members_they_name() -> None:
    mixed = ReplayBufferEnsemble(prioritized(6, 1), ReplayBuffer(ListStorage(6)), batch_size=4)
    index = mixed.extend(rows(4, 10), [1, 0, 1, 0])
    assert index.tolist() == [0, 1, 1, 2]
    assert mixed.buffers[0][:]["row"].tolist() == [0, 11, 13]
    assert [int(row["row"]) for row in mixed.buffers[1][:]] == [10, 12]
    named = ReplayBufferEnsemble(ReplayBuffer(ArrayStorage(9)), ReplayBuffer(ArrayStorage(9)))
    assert named.extend({**rows(3), "to": np.array([[1], [1], [0]])}, "to").tolist() == [0, 1, 0]
    assert named.buffers[1][:]["row"].tolist() == [0, 1]
    single = [{"row": 7, "done": False, "reward": 0.5, "to": np.array([0])}]
    assert named.extend(single, ("to",)).tolist() == [1]
    sizes = [len(member) for member in named.buffers]
    for wrong, ids, error, message in (
        (rows(3), [0, 1], ConfigError, "expected 3 buffer_ids"),
        (rows(3), [0.0, 1.0, 0.0], ConfigError, "integers"),
        (rows(3), [0, 2, 0], ConfigError, r"0\.\.1, of a buffer with ndim=1, found 2"),
        (rows(3), [0, -1, 0], ConfigError, "found -1"),
        ({"row": np.zeros(3)}, [0, 1, 0], SchemaError, "expected the fields"),
        (rows(3), "nowhere", MissingFieldError, "nowhere"),
    ):
        assert_raises(error, message, named.extend, wrong, ids)
        assert [len(member) for member in named.buffers] == sizes
    # The first member would take them, and the second does not: neither has.
    half = ReplayBufferEnsemble(ReplayBuffer(ArrayStorage(9)), named.buffers[1])
    assert_raises(SchemaError, "expected", half.extend, {"row": np.arange(2)}, [0, 1])
    assert len(half.buffers[0]) == 0
    for rank, error in (({}, MissingFieldError), ({"rank": [1.0, np.nan]}, DataError)):
        half = ReplayBufferEnsemble(
            ReplayBuffer(ArrayStorage(9)), ReplayBuffer(ArrayStorage(9), writer=MaxValueWriter("rank"))
        )
        assert_raises(error, "rank", half.extend, {"row": np.arange(2), **rank}, [0, 1])
        assert len(half.buffers[0]) == 0
    vector = ReplayBufferEnsemble(ReplayBuffer(ArrayStorage(6, ndim=2)), ReplayBuffer(ArrayStorage(6)))
    assert_raises(ConfigError, "ndim=1", vector.extend, rows(2), [0, 1])


def test_a_batch_of_few_members_out_of_many() -> None:
    members = [ReplayBuffer(ArrayStorage(8)) for _ in range(5)]
    for number, member in enumerate(members):
        member.extend({"member": np.full(8, number)})
    mixed = ReplayBufferEnsemble(*members, p=[4, 1, 1, 1, 0], num_buffer_sampled=2, batch_size=9, seed=1)
    counts = np.zeros(5, int)
    for _ in range(300):
        batch = mixed.sample()
        found = np.bincount(batch["buffer_ids"], minlength=5)
        assert sorted(found[found > 0].tolist()) in ([4, 5], [9])
        counts += found
    assert counts[4] == 0
    np.testing.assert_allclose(counts[:4] / counts.sum(), np.array([4, 1, 1, 1]) / 7, atol=0.06)
    again = ReplayBufferEnsemble(*copy.deepcopy(members), p=[4, 1, 1, 1, 0], num_buffer_sampled=2, batch_size=9)
    again.load_state_dict(mixed.state_dict())
    assert again.sample()["buffer_ids"].tolist() == mixed.sample()["buffer_ids"].tolist()
    with pytest.raises(StateError, match="num_buffer_sampled"):
        ReplayBufferEnsemble(*members, p=[4, 1, 1, 1, 0]).load_state_dict(mixed.state_dict())


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
def test_no_transition_leads_from_the_end_of_an_episode_to_a_reset(alignment: Any) -> None:
    """A vector of gymnasium that resets in the next step, in the two ways in which the guide writes its rows.

    A cart moves by 0.02 of its speed in a step, and nowhere else in a reset.
    """
    envs, random = gym.make_vec("CartPole-v1", num_envs=4), np.random.default_rng(0)
    storage = ArrayStorage(2000, ndim=2, alignment=alignment)
    buffer = ReplayBuffer(storage, transform=NextView(takes=alignment), batch_size=2000)
    before, ended = envs.reset(seed=0)[0], np.zeros(4, np.int8)
    if alignment == "arrived":
        buffer.append({"obs": before, "action": ended, "done": ended})
    for _ in range(400):
        action = random.integers(0, 2, 4).astype(np.int8)
        after, _, terminated, truncated, _ = envs.step(action)
        done = np.where(terminated, 1, np.where(truncated, 2, 0)).astype(np.int8)
        if alignment == "arrived":
            buffer.append({"obs": after, "action": action, "done": done})
        else:  # the action of an environment that has ended is ignored
            cut = np.where(ended != 0, 2, done).astype(np.int8)
            buffer.append({"obs": before, "action": action, "done": cut})
        before, ended = after, done
    batch = buffer.sample()
    # "Outgoing" rows have no terminal observation.
    whole = batch["mask"] & ((batch["next"]["done"] == 0) | (alignment == "arrived"))
    assert whole.sum() > 1500
    moved = batch["next"]["obs"][whole, 0] - batch["obs"][whole, 0]
    np.testing.assert_allclose(moved, 0.02 * batch["obs"][whole, 1], atol=1e-6)
