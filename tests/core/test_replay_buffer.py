"""ReplayBuffer: what its parts make of rows, batches and errors."""

import copy
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, DatasetStore, Field, MissingFieldError, SchemaError, StateError
from mouse_core.errors import ForkError, MouseError, RowIndexError, StorageError
from mouse_core.files import checkpoint as files
from mouse_core.nested import map_tree
from mouse_core.randomness import Key
from mouse_core.replay import (
    ArrayStorage,
    HindsightRelabel,
    ImmutableWriter,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    NextView,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReturnsToGo,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
)
from tests.core.replay_cases import filled
from tests.raising import assert_raises


def numbered(n: int, size: int | None = None, **options: Any) -> ReplayBuffer:
    buffer = filled({"a": np.arange(n), "deep": {"b": np.arange(n, dtype=np.float32)}}, size or n, **options)
    return buffer


def test_a_batch_is_nested_as_the_rows_are() -> None:
    batch = numbered(20, 8).sample(5)
    assert list(batch) == ["a", "deep", "index"]
    np.testing.assert_array_equal(batch["a"], batch["deep"]["b"])
    np.testing.assert_array_equal(batch["a"] % 8, batch["index"])
    assert batch["index"].dtype == np.int64
    buffer = filled((np.arange(4), {"x": np.arange(4.0)}), 5)
    batch = buffer.sample(3)
    assert set(batch) == {"data", "index"}
    np.testing.assert_array_equal(batch["data"][0], batch["index"])
    np.testing.assert_array_equal(batch["data"][1]["x"], batch["index"])
    lone = ReplayBuffer(ArrayStorage(5))
    assert lone.extend(np.arange(8).reshape(4, 2)).tolist() == [0, 1, 2, 3]
    batch = lone.sample(3)
    np.testing.assert_array_equal(batch["data"][:, 0], batch["index"] * 2)
    buffer = ReplayBuffer(ArrayStorage(10))
    assert buffer.extend([{"a": 1, "b": (np.zeros(2), 3.0)}, {"a": 2, "b": (np.ones(2), 4.0)}]).tolist() == [0, 1]
    assert buffer.extend({"a": [3], "b": (np.ones((1, 2)), [5.0])}).tolist() == [2]
    found = buffer[:]
    assert isinstance(found["b"], tuple)
    assert buffer.extend([]).tolist() == []
    assert buffer.extend({"a": [], "b": (np.zeros((0, 2)), [])}).tolist() == []
    np.testing.assert_array_equal(found["b"][1], [3, 4, 5])
    with pytest.raises(DataError, match=r"expected \[3\] rows as in \('x', 0\), found \[2\]; .* np.stack"):
        ReplayBuffer(ArrayStorage(9)).extend({"x": [np.zeros(3), np.ones(3)], "n": np.arange(2)})
    buffer = ReplayBuffer(ArrayStorage(9, ndim=2))
    buffer.append(State(np.arange(2.0), None, [np.arange(2.0), np.arange(2.0) + 10]))
    buffer.extend(State(np.ones((3, 2)), None, [np.ones((3, 2)), np.ones((3, 2)) + 10]))
    row = buffer[1]
    assert (row["obs"], row["memory"], row["hidden"]) == (1.0, None, [1.0, 11.0])


def test_batches_need_rows_a_size_and_parts_that_are_what_they_are_called() -> None:
    buffer = ReplayBuffer(ArrayStorage(5))
    for size in (0, -1, 2.5, True, "4"):
        assert_raises(ConfigError, "batch_size: expected an integer of at least 1", buffer.sample, size)
        assert_raises(ConfigError, "batch_size", ReplayBuffer, ArrayStorage(5), batch_size=size)
    assert_raises(ConfigError, "batch_size: expected a batch size", buffer.sample)
    assert_raises(ConfigError, "found an empty buffer", buffer.sample, 2)
    buffer.append({"a": 1})
    assert buffer.stats()["samples"] == 0
    with pytest.raises(ConfigError, match="without replacement"):
        ReplayBuffer(buffer.storage, SamplerWithoutReplacement()).sample(2)
    assert buffer.sample(2)["a"].tolist() == [1, 1]
    assert_raises(ConfigError, "batch_size", next, iter(numbered(10)))
    assert len(list(islice(numbered(10, batch_size=3), 7))) == 7
    for arguments in ({"sampler": 3}, {"writer": RandomSampler()}, {"sampler": ImmutableWriter()}, {"transform": 3}):
        assert_raises(ConfigError, "expected", ReplayBuffer, ArrayStorage(3), **arguments)
    assert_raises(ConfigError, "seed", ReplayBuffer, seed=-1)
    text = repr(ReplayBuffer(ArrayStorage(3)))
    assert "ArrayStorage(0 of 3 rows" in text
    assert "RandomSampler()" in text
    assert "RoundRobinWriter()" in text


def test_fields_that_a_batch_adds_must_be_free() -> None:
    def refused(name: str, storage: Any, **options: Any) -> None:
        buffer = ReplayBuffer(storage(), **options)
        row = {name: 1, "done": 0}
        writes = (
            lambda: buffer.append(row),
            lambda: buffer.extend([{"done": 0}, row]),
            lambda: buffer.extend({name: np.arange(4), "done": np.zeros(4)}),
        )
        for write in writes:
            assert_raises(SchemaError, rf"without the fields \['{name}'\]", write)
        assert len(buffer) == 0
        buffer.append({"done": 0})
        with pytest.raises(SchemaError):
            buffer[0] = row

    def slices(**options: Any) -> Any:
        return SliceSampler(sequence_length=2, end_key="done", **options)

    def arrays() -> Any:
        return ArrayStorage(8)

    for storage in (arrays, ListStorage):
        refused("index", storage)
        refused("mask", storage, sampler=slices())
        refused("slice_id", storage, sampler=slices(strict_length=False, pad=False))
        refused("slice_id", storage, sampler=slices(span=1, pad=False))
        refused("mask", storage, sampler=PrioritizedSliceSampler(sequence_length=2, end_key="done", pad=0))
        refused("priority_weight", storage, sampler=PrioritizedSliceSampler(sequence_length=2, end_key="done"))
        refused("priority_weight", storage, sampler=PrioritizedSampler())
        refused("mask", storage, transform=NextView())
    refused("hindsight_goal", arrays, transform=HindsightRelabel(compute_reward=lambda achieved, goal, batch: 0))
    # Where a batch does not get it, a name is free.
    free = filled({"mask": np.arange(8), "priority_weight": np.arange(8), "done": np.ones(8)}, 8, slices(pad=False))
    free = filled({"mask": np.arange(8), "slice_id": np.arange(8), "traj_id": np.arange(8)}, 8)
    batch = free.sample(4)
    assert (batch["mask"] == batch["index"]).all()
    assert (batch["traj_id"] == batch["index"]).all()
    buffer = filled({"buffer_ids": np.arange(4)}, 4)
    with pytest.raises(SchemaError, match=r"buffer 0: expected rows without the fields \['buffer_ids'"):
        ReplayBufferEnsemble(buffer).sample(2)
    inner = filled({"a": np.arange(4)}, 4)
    assert ReplayBufferEnsemble(ReplayBufferEnsemble(inner)).sample(2)["buffer_ids"].tolist() == [0, 0]


def test_rows_are_read_and_overwritten_by_index() -> None:
    buffer = numbered(13, 10)
    assert buffer[2]["a"] == 12
    np.testing.assert_array_equal(buffer[:]["a"], [10, 11, 12, *range(3, 10)])
    np.testing.assert_array_equal(buffer[8:2:-3]["a"], [8, 5])
    np.testing.assert_array_equal(buffer[[0, 9]]["deep"]["b"], [10, 9])
    np.testing.assert_array_equal(buffer[-2:]["a"], [8, 9])
    np.testing.assert_array_equal(buffer[np.array([[0, 1], [2, 3]])]["a"], [[10, 11], [12, 3]])
    np.testing.assert_array_equal(buffer[np.arange(10) % 4 == 0]["a"], [10, 4, 8])
    assert buffer[[]]["a"].shape == (0,)
    buffer[0] = {"a": -1, "deep": {"b": -1.0}}
    buffer[[4, 6]] = {"a": np.array([-4, -6]), "deep": {"b": np.zeros(2, np.float32)}}
    buffer[8:] = [{"a": -8, "deep": {"b": 0.0}}, {"a": -9, "deep": {"b": 0.0}}]
    buffer[np.array([[1], [2]])] = {"a": np.array([[-11], [-12]]), "deep": {"b": np.zeros((2, 1), np.float32)}}
    np.testing.assert_array_equal(buffer[:]["a"], [-1, -11, -12, 3, -4, 5, -6, 7, -8, -9])
    assert len(buffer) == 10
    assert buffer.append({"a": 13, "deep": {"b": 0.0}}) == 3
    for index, rows in ((10, {"a": 1, "deep": {"b": 1.0}}), (0, {"a": 1}), ([0, 1], {"a": [1], "deep": {"b": [1.0]}})):
        before = buffer[:]["a"].copy()
        with pytest.raises((IndexError, SchemaError, DataError)):
            buffer[index] = rows
        np.testing.assert_array_equal(buffer[:]["a"], before)


@dataclass
class State:
    obs: Any
    memory: Any
    hidden: Any


@pytest.mark.parametrize("kind", ["array", "memmap", "list"])
def test_lists_of_numbers_and_of_ragged_rows_are_values(kind: str, tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(9))
    kinds: dict[str, Any] = {"array": ArrayStorage, "list": partial(ListStorage, ragged=["x"])}
    made = kinds.get(kind, lambda capacity: MemmapStorage(capacity, next(folders)))
    buffer = ReplayBuffer(ArrayStorage(9) if kind == "list" else made(9))
    buffer.extend({"x": [[1, 2], [3, 4]], "reward": [np.float64(1), np.float64(2)]})
    assert buffer.sample(3)["x"].shape == (3, 2)
    buffer = ReplayBuffer(made(9))
    buffer.extend({"x": [np.arange(2), np.arange(3)], "n": np.arange(2)})
    buffer.extend({"x": [np.arange(1), np.arange(1)], "n": np.arange(2)})  # known to be ragged by now
    assert [len(buffer[row]["x"]) for row in range(4)] == [2, 3, 1, 1]
    assert isinstance(buffer.sample(2)["x"], list)


@pytest.mark.parametrize(
    "index", ["a", None, 1.5, ("a", 1), [[0], [1, 2]], 2**70, [2**70], 5, -1, -6, [0, -1], [0, 5], np.ones(3, bool)]
)
def test_an_index_that_is_none_is_an_error_of_ours(index: Any) -> None:
    buffer = numbered(5)
    for call in (lambda: buffer[index], partial(buffer.__setitem__, index, {"a": 1, "deep": {"b": 1.0}})):
        with pytest.raises(RowIndexError, match="index: expected") as raised:
            call()
        assert isinstance(raised.value, IndexError)


class Transition(NamedTuple):
    obs: Any
    action: Any
    reward: Any
    done: Any


def transitions(n: int) -> Transition:
    return Transition(np.arange(n)[:, None], np.zeros(n, int), np.arange(n) * 1.0, np.arange(n) % 4 == 3)


def test_named_tuples_come_back_from_files_and_states(tmp_path: Path) -> None:
    first = ReplayBuffer(MemmapStorage(9, tmp_path / "m"), batch_size=4)
    first.extend(transitions(6))
    first.dumps(tmp_path / "saved")
    state = pickle.loads(pickle.dumps(first.state_dict()))
    loaded, restored = ReplayBuffer(ArrayStorage(9), batch_size=4), ReplayBuffer(ArrayStorage(9), batch_size=4)
    loaded.loads(tmp_path / "saved")
    restored.load_state_dict(state)
    reopened = ReplayBuffer(MemmapStorage(9, tmp_path / "m"), batch_size=4)
    wanted = first.sample()["data"]
    for buffer in (loaded, restored, reopened, copy.deepcopy(loaded)):
        assert type(buffer[0]).__name__ == "Transition"
        found = buffer.sample()["data"]
        np.testing.assert_array_equal(found.obs, wanted.obs)
        assert pickle.loads(pickle.dumps(found)).obs.tolist() == wanted.obs.tolist()
        buffer.append(map_tree(itemgetter(0), transitions(1)))  # from which it knows the class
        assert type(buffer[0]) is Transition
    assert type(pickle.loads(pickle.dumps(first.storage))) is MemmapStorage
    kept = filled(transitions(2), 9)
    assert type(copy.deepcopy(kept)[0]) is Transition


@pytest.mark.parametrize("name", ["Transition; import os", "_x", "class", "a.b", ""])
def test_a_file_names_no_class_that_is_no_name(name: str) -> None:
    storage = ArrayStorage(9)
    storage.append(transitions(2))
    state = copy.deepcopy(storage.state())
    state["schema"]["structure"]["named"][1][0][0] = name
    assert_raises(StateError, "expected", ArrayStorage(9).load, state)


@pytest.mark.parametrize("kind", ["array", "memmap", "list"])
def test_the_ends_of_episodes_are_found_in_named_tuples(kind: str, tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"array": ArrayStorage, "list": ListStorage}
    storage = kinds.get(kind, lambda capacity: MemmapStorage(capacity, tmp_path / "m"))(12)
    ReplayBuffer(storage).extend(transitions(12))
    single = ReplayBuffer(storage, transform=[NextView(), NStep(2, 0.5)], batch_size=50).sample()
    begin, end, there = single["obs"][:, 0], single["next"]["obs"][:, 0], single["mask"]
    assert (begin[there] // 4 == end[there] // 4).all()
    assert set((end - begin)[there].tolist()) == {0, 1, 2}
    slices = ReplayBuffer(storage, SliceSampler(sequence_length=3, end_key="done"), batch_size=50).sample()
    rows = slices["data"].obs[..., 0]
    assert (rows[:, 0] // 4 == rows[:, -1] // 4).all()


@dataclass
class Held:
    obs: Any
    tag: Any


def test_list_storage_copies_arrays_and_keeps_other_objects() -> None:
    tag, many = {1, 2}, np.zeros((2, 3))
    array, inner = np.zeros(3), {"x": np.zeros(3)}
    buffer = ReplayBuffer(ListStorage(20), batch_size=20)
    rows = [{"o": array, "deep": (inner, [array]), "tag": tag}, Held(array, tag), array, (array, tag)]
    for row in rows:
        buffer.append(row)
    buffer.extend({"o": many})
    buffer.extend([{"o": array}])
    buffer[3] = {"o": array, "tag": tag}
    for mine in (array, inner["x"], many):
        mine[:] = 9  # as an environment does that gives the same memory at every step
    inner["y"] = 1

    def arrays(tree: Any) -> list[Any]:
        if isinstance(tree, Held):
            tree = (tree.obs, tree.tag)
        if isinstance(tree, dict):
            return arrays(tuple(tree.values()))
        if isinstance(tree, tuple | list):
            return [leaf for child in tree for leaf in arrays(child)]
        return [tree] if isinstance(tree, np.ndarray) else []

    for _ in range(2):
        kept = [buffer[number] for number in range(len(buffer))]
        assert [float(leaf.max()) for leaf in arrays(kept)] == [0.0] * 9
        for leaf in arrays(kept):
            leaf[...] = 7  # what is read is not written through
    assert list(buffer[0]["deep"][0]) == ["x"]
    assert buffer[0]["tag"] is tag
    assert buffer[1].tag is tag
    shape = ReplayBuffer(ListStorage(4), batch_size=1)
    shape.extend([{"o": np.zeros(2)}, {"o": np.zeros(3)}])
    for leaf in shape.sample()["o"]:
        leaf[...] = 7
    assert all(not shape[number]["o"].any() for number in range(2))


def test_a_thread_that_writes_without_pause_gives_way_to_one_that_draws() -> None:
    buffer = ReplayBuffer(ListStorage(100), batch_size=2)
    buffer.append({"a": 0})
    order: list[str] = []

    def draw() -> None:
        buffer.sample()
        order.append("drawn")

    with buffer._lock:
        thread = threading.Thread(target=draw)
        thread.start()
        while not buffer._lock.waiting or time.monotonic() - max(buffer._lock.waiting.values()) < 0.01:
            time.sleep(0.001)
    buffer.append({"a": 1})
    thread.join()
    assert order == ["drawn"]
    assert not buffer._lock.waiting
    assert buffer.stats()["written"] == 2


def test_objects_of_any_kind_are_rows_unless_their_fields_differ() -> None:
    buffer = ReplayBuffer(ListStorage(5))
    thing = object()
    assert buffer.append(thing) == 0
    assert buffer.extend(["a", {"b": 1}]).tolist() == [1, 2]
    assert buffer[0] is thing
    assert buffer[:] == [thing, "a", {"b": 1}]
    batch = buffer.sample(6)
    assert isinstance(batch["data"], list)
    assert all(item in (thing, "a", {"b": 1}) for item in batch["data"])
    ragged = ReplayBuffer(ListStorage(5))
    ragged.extend([{"a": np.zeros(1)}, {"b": np.zeros(2)}])
    for _ in range(9):  # also where only one of them is drawn
        assert_raises(SchemaError, "same fields", ragged.sample, 1)


def test_a_function_of_ones_own_makes_the_batch_and_trajectories_are_observed() -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        assert isinstance(rows, list)
        return {"total": sum(int(row["a"]) for row in rows), "n": len(rows)}

    for storage in (ArrayStorage(5), ListStorage(5)):
        buffer = ReplayBuffer(storage, collate_fn=collate)
        buffer.extend([{"a": number} for number in range(5)])
        batch = buffer.sample(7)
        assert (batch["n"], batch["total"]) == (7, batch["index"].sum())
    joined = ReplayBuffer(ListStorage(5), collate_fn="".join)
    joined.extend(["x", "y"])
    assert len(joined.sample(4)["data"]) == 4
    assert_raises(ConfigError, "collate_fn", ReplayBuffer, collate_fn=3)

    class Trajectory(NamedTuple):
        observation: Any
        reward: Any

    buffer = ReplayBuffer(ArrayStorage(10))
    observe = buffer.observer()
    assert observe(Trajectory(np.zeros((4, 2)), np.arange(4.0))) is None  # type: ignore[func-returns-value]
    observe({"observation": np.ones((3, 2)), "reward": np.arange(3.0)})
    assert set(buffer.sample(2)) == {"observation", "reward", "index"}
    assert len(buffer) == 7


def test_the_best_rows_are_kept() -> None:
    buffer = ReplayBuffer(ArrayStorage(3), writer=MaxValueWriter("reward"))
    index = buffer.extend({"reward": np.array([5.0, 1.0, 4.0, 3.0, 2.0])})
    assert index.tolist() == [0, -1, 2, 1, -1]
    for read in (index, -1, buffer.append({"reward": 0.0})):
        with pytest.raises(IndexError, match=r"found -1; append and extend return -1 for a row that was not kept"):
            buffer[read]
        with pytest.raises(IndexError, match="not kept"):
            buffer[read] = {"reward": np.zeros(5)}
    assert buffer[index[index >= 0]]["reward"].tolist() == [5.0, 4.0, 3.0]
    buffer = filled({"r": np.array([3.0, 1])}, 2, writer=MaxValueWriter("r"))
    for rows, error in (
        ({"r": np.array([np.nan])}, DataError),
        ({"x": np.array([5.0])}, MissingFieldError),
        ({"r": np.array(["z"])}, DataError),
        ({"r": np.array([0.0]), "more": np.array([0.0])}, SchemaError),
        ({"r": np.array([0.0]), "more": np.zeros(2)}, DataError),
    ):
        assert_raises(error, "expected", buffer.extend, rows)
    assert buffer[:]["r"].tolist() == [3, 1]
    assert_raises(ConfigError, "reduction", MaxValueWriter, "r", "most")
    assert_raises(ConfigError, "ndim=2", ReplayBuffer, ArrayStorage(4, ndim=2), writer=MaxValueWriter("r"))
    with pytest.raises(ConfigError, match="keeps the order of rows"):
        ReplayBuffer(ArrayStorage(4), SliceSampler(sequence_length=2, end_key="r"), MaxValueWriter("r"))
    with pytest.raises(ConfigError, match="keeps the order of rows"):
        ReplayBuffer(ArrayStorage(4), None, MaxValueWriter("r"), NextView())


@given(
    writes=st.lists(
        st.tuples(
            st.sampled_from(["append", "extend", "list", "put", "restore"]),
            st.lists(st.integers(0, 4), min_size=1, max_size=12),
        ),
        min_size=1,
        max_size=8,
    ),
    capacity=st.integers(1, 9),
    kind=st.sampled_from(["array", "list", "memmap"]),
)
def test_the_best_rows_are_those_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, list[int]]], capacity: int, kind: str
) -> None:
    def made() -> ReplayBuffer:
        kinds: dict[str, Any] = {"array": ArrayStorage, "list": ListStorage}
        storage = kinds.get(kind, lambda capacity: MemmapStorage(capacity, tmp_path_factory.mktemp("best")))
        return ReplayBuffer(storage(capacity), writer=MaxValueWriter("rank"))

    buffer, rows, written = made(), list[tuple[int, int]](), 0
    for what, ranks in writes:
        given = [
            (rank, written + place) for place, rank in enumerate(ranks[: 1 if what in ("append", "put") else None])
        ]
        written += len(given)
        many = [{"rank": np.float32(rank), "row": np.int64(number)} for rank, number in given]
        if what == "restore":
            before, buffer = buffer, made()
            buffer.load_state_dict(before.state_dict())
        if what == "put":
            if rows:
                slot = written % len(rows)
                rows[slot], buffer[slot] = given[0], many[0]
            continue
        slots = []
        for one in given:
            slot = len(rows) if len(rows) < capacity else min(range(capacity), key=lambda slot: (rows[slot][0], -slot))
            kept = slot == len(rows) or one[0] > rows[slot][0]
            rows[slot : slot + 1] = [one] if kept else rows[slot : slot + 1]
            slots.append(slot if kept else -1)
        expected = [slot if slot >= 0 and rows[slot] == one else -1 for slot, one in zip(slots, given, strict=True)]
        arrays = {name: np.stack([row[name] for row in many]) for name in many[0]}
        found = [buffer.append(many[0])] if what == "append" else buffer.extend(many if what == "list" else arrays)
        assert list(found) == expected
        assert [(int(row["rank"]), int(row["row"])) for row in map(buffer.__getitem__, range(len(buffer)))] == rows


@pytest.mark.parametrize(("reduction", "kept"), [("sum", 1), ("mean", 1), ("max", 0), ("min", 1), ("median", 2)])
def test_ranks_of_whole_trajectories(reduction: str, kept: int) -> None:
    rewards = np.array([[0.0, 0, 9], [4, 4, 4], [0, 5, 5.5]])
    buffer = filled({"deep": {"r": rewards}, "which": np.arange(3)}, 1, writer=MaxValueWriter(("deep", "r"), reduction))
    assert buffer[0]["which"] == kept


def test_nothing_is_written_to_an_immutable_buffer() -> None:
    storage = ArrayStorage(arrays={"a": np.arange(4)})
    buffer = ReplayBuffer(storage, writer=ImmutableWriter())
    for write in (
        lambda: buffer.append({"a": 1}),
        lambda: buffer.extend({"a": [1]}),
        lambda: buffer.empty(),
        lambda: buffer.__setitem__(0, {"a": 1}),
    ):
        assert_raises(ConfigError, "ImmutableWriter", write)
    np.testing.assert_array_equal(buffer[:]["a"], np.arange(4))
    fixed = np.arange(4)
    fixed.flags.writeable = False
    for writer in (RoundRobinWriter(), MaxValueWriter("a")):
        with pytest.raises(ConfigError, match="writer: expected an ImmutableWriter"):
            ReplayBuffer(ArrayStorage(arrays={"a": fixed}), writer=writer)


def test_priorities_come_with_batches_and_with_rows() -> None:
    buffer = PrioritizedReplayBuffer(storage=ArrayStorage(10), batch_size=4, priority_key=("loss", "td"))
    buffer.extend({"a": np.arange(4)})
    batch = {**buffer.sample(), "loss": {"td": np.array([0.0, 0, 0, 0])}, "index": np.arange(4)}
    batch["loss"]["td"][2] = 1e6
    buffer.update_priority(batch)
    assert set(buffer.sample(64)["index"].tolist()) == {2}
    with pytest.raises(MissingFieldError, match=r"update_priority: expected a field .*td"):
        buffer.update_priority({"index": np.arange(4)})
    assert_raises(ConfigError, "uses priorities", numbered(3).update_priority, [0], [1.0])
    buffer = PrioritizedReplayBuffer(storage=ArrayStorage(10))
    buffer.extend({"a": np.arange(4), "td_error": np.array([0.0, 0, 1e6, 0])})
    assert set(buffer.sample(64)["index"].tolist()) == {2}
    buffer.append({"a": 4, "td_error": 1e12})
    assert set(buffer.sample(64)["index"].tolist()) == {4}
    for bad in (-1.0, float("nan"), float("inf")):
        assert_raises(DataError, "finite priorities of 0 or more", buffer.append, {"a": 5, "td_error": bad})
    assert len(buffer) == 5
    buffer = ReplayBuffer(ListStorage(5), PrioritizedSampler())
    with pytest.raises(DataError, match="either in all rows or in no row, found no priority in row 1"):
        buffer.extend([{"a": 1, "td_error": 2.0}, {"a": 1}])
    assert len(buffer) == 0


@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_with_priorities_that_are_refused_are_not_written(ndim: int) -> None:
    def made() -> PrioritizedReplayBuffer:
        return PrioritizedReplayBuffer(alpha=2.0, storage=ArrayStorage(12, ndim=ndim), batch_size=3)

    lead = (3, 2)[:ndim]
    for priority in (
        np.ones((*lead, 4)),  # one for every step of a row
        np.ones(()),
        np.full(lead, 1e300),  # its square is beyond float64
        np.append(np.ones(lead).reshape(-1)[1:], np.nan).reshape(lead),
        np.full(lead, "much"),
    ):
        buffer = made()
        with pytest.raises((DataError, SchemaError), match="priorit"):
            buffer.extend({"obs": np.zeros((*lead, 4)), "td_error": priority})
        assert (len(buffer), buffer.stats()["written"]) == (0, 0)
    for shape in (lead, (*lead, 1)):
        buffer = made()
        buffer.extend({"obs": np.zeros((*lead, 4)), "td_error": np.eye(1, 3 * ndim, 1).reshape(shape)})
        assert set(buffer.sample(20)["index"].tolist()) == {1}


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x": batch["x"] / self.factor}

    def inverse(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "x": rows["x"] * self.factor}


def test_transforms_out_and_inverses_in() -> None:
    buffer = ReplayBuffer(ArrayStorage(5), transform=[Scale(2.0), Scale(5.0), lambda batch: {**batch, "y": batch["x"]}])
    buffer.append({"x": 3.0})
    buffer.extend({"x": np.array([4.0, 5.0])})
    assert buffer[:]["x"].tolist() == [30, 40, 50]
    batch = buffer.sample(6)
    np.testing.assert_allclose(batch["x"], batch["index"] + 3)
    assert batch["y"] is batch["x"]

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        batch.pop("a")
        batch["deep"].pop("b")
        return batch

    buffer = numbered(5, transform=change)
    drawn = buffer.draw(3)
    assert list(buffer.finish(drawn)) == list(buffer.finish(drawn)) == ["deep", "index"]

    def forgetful(batch: Any) -> None:
        batch["a"] = batch["a"] + 1

    with pytest.raises(ConfigError, match=r"expected <function .*forgetful.* to return a batch, found None"):
        numbered(4, transform=forgetful).sample(2)
    buffer = filled({"reward": np.ones(4), "done": np.array([0, 0, 0, 1])}, 4, transform=ReturnsToGo(0.5))
    with pytest.raises(SchemaError, match=r"compute returns when episodes are written, with OnWrite\(ReturnsToGo"):
        buffer.sample(2)


def test_transforms_may_draw_random_numbers_of_the_sample() -> None:
    class Noise:
        random = True

        def __call__(self, batch: dict[str, Any], key: Key) -> dict[str, Any]:
            return {**batch, "noise": key.uniform(len(batch["index"]))}

    one, same = (numbered(9, transform=[Noise(), Noise()], seed=2) for _ in range(2))
    first, second = one.sample(5)["noise"], one.sample(5)["noise"]
    assert (first != second).all()
    np.testing.assert_array_equal(same.sample(5)["noise"], first)
    drawn = one.draw(5)
    np.testing.assert_array_equal(one.finish(drawn)["noise"], one.finish(drawn)["noise"])


def test_states_of_other_buffers_change_nothing() -> None:
    buffer = numbered(6, batch_size=3)
    state = buffer.state_dict()
    expected = buffer.sample()["a"]
    buffer.extend({"a": np.full(6, -1), "deep": {"b": np.zeros(6, np.float32)}})
    buffer.load_state_dict(state)
    np.testing.assert_array_equal(buffer.sample()["a"], expected)
    np.testing.assert_array_equal(buffer[:]["a"], np.arange(6))
    buffer = numbered(8, 5)
    before = buffer.state_dict()
    other_fields = filled({"z": np.arange(3)}, 5)
    others = [
        numbered(8, 6),
        numbered(8, 5, sampler=SamplerWithoutReplacement()),
        numbered(8, 5, sampler=PrioritizedSampler()),
        ReplayBuffer(ArrayStorage(5), writer=MaxValueWriter("a")),
        ReplayBuffer(ListStorage(5)),
        ReplayBuffer(ArrayStorage(5, alignment="arrived")),
        other_fields,
    ]
    states: list[Any] = [other.state_dict() for other in others]
    states += [None, {}, 5, {**before, "seed": -1}, {**before, "samples": "x"}, {**before, "storage": None}]
    states += [{name: value for name, value in before.items() if name != missing} for missing in before]
    for state in states:
        assert_raises(StateError, "expected", buffer.load_state_dict, state)
        np.testing.assert_equal(buffer.state_dict(), before)
    buffers = [PrioritizedReplayBuffer(storage=ArrayStorage(9), batch_size=20, seed=2) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        buffer.extend({"a": np.arange(12)})
        buffer.update_priority(np.arange(9), np.arange(9.0) if number else np.arange(9.0)[::-1])
    state = buffers[0].state_dict()
    state["storage"]["columns"]["0"] = np.zeros((9, 2))
    assert_raises(StateError, "field 'a'", buffers[1].load_state_dict, state)
    np.testing.assert_array_equal(buffers[1].sample()["a"], buffers[2].sample()["a"])


def test_files_are_as_long_as_the_data(tmp_path: Path) -> None:
    buffer = filled({"a": np.zeros((10, 100))}, 1_000_000, PrioritizedSampler())
    buffer.dumps(tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_size < 10 * 800 + 4000
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "folder").mkdir()
    buffer.dumps(tmp_path / "folder")
    other = ReplayBuffer(ArrayStorage(1_000_000), PrioritizedSampler())
    other.loads(tmp_path / "folder")
    assert len(other) == 10


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = numbered(6)
    path = tmp_path / "saved"
    buffer.dumps(path)
    good = path.read_bytes()
    buffer.append({"a": 7, "deep": {"b": 7.0}})
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, step, _no_space)
            with pytest.raises(StorageError, match="No space left") as caught:
                buffer.dumps(path)
        assert isinstance(caught.value, OSError)
        assert path.read_bytes() == good
        assert list(tmp_path.iterdir()) == [path]
    assert_raises(StorageError, "cannot write or read", buffer.dumps, tmp_path / "nowhere" / "saved")
    assert_raises(StorageError, "cannot be read", buffer.loads, tmp_path / "nothing")


def _no_space(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("kind", "method"), [(ArrayStorage, "spawn"), (ListStorage, "forkserver")])
def test_rows_of_this_process_are_not_sent_to_another(kind: Any, method: str) -> None:
    buffer = ReplayBuffer(kind(8), batch_size=4)
    buffer.extend([{"a": np.int64(number)} for number in range(11)])
    for sent in (buffer, buffer.storage, kind(8)):
        with pytest.raises(ConfigError, match=r"use a MemmapStorage\(capacity, path\)"):
            get_context(method).Process(target=print, args=(sent,)).start()
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert other.sample()["a"].tolist() == copy.deepcopy(buffer).sample()["a"].tolist()
        other.append({"a": np.int64(0)})
        assert (other.storage.written, buffer.storage.written) == (12, 11)


def test_a_forked_child_does_not_change_its_copy() -> None:
    buffer = PrioritizedReplayBuffer(storage=ArrayStorage(8), batch_size=4)
    buffer.extend({"a": np.arange(8)})
    changes: list[Callable[[], Any]] = [
        lambda: buffer.append({"a": 1}),
        lambda: buffer.extend({"a": np.arange(3)}),
        lambda: buffer.__setitem__(0, {"a": 1}),
        lambda: buffer.update_priority([0], [1.0]),
        buffer.empty,
    ]
    child = os.fork()
    if not child:
        code = 1
        try:
            for change in changes:
                assert_raises(ForkError, "in a forked child", change)
            buffer.sample()  # of what was there
            ReplayBuffer(ArrayStorage(8)).append({"a": 1})
            pickle.loads(pickle.dumps(buffer)).append({"a": 1})  # a copy on purpose
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    buffer.append({"a": 1})


def test_many_threads_may_write_and_sample() -> None:
    buffer = PrioritizedReplayBuffer(storage=ArrayStorage(50), batch_size=8)
    buffer.append({"a": 0, "b": np.zeros(40)})

    def work(number: int) -> None:
        for turn in range(60):
            value = number * 1000 + turn
            buffer.extend({"a": np.full(3, value), "b": np.full((3, 40), float(value))})
            batch = buffer.sample()
            np.testing.assert_array_equal(batch["b"], np.repeat(batch["a"][:, None], 40, 1))
            buffer.update_priority(batch["index"], np.ones(8))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    found = buffer.stats()
    assert (found["written"], found["samples"], found["updates"]) == (1 + 4 * 60 * 3, 240, 240)
    assert buffer.prioritized


@pytest.mark.parametrize("envs", [1, 2])
def test_a_ring_that_came_round_is_copied_in_the_order_of_time(envs: int) -> None:
    step = np.arange(14)
    rows = {
        "observation": step * 1.0,
        "action": step % 2,
        "reward": step * 1.0,
        "done": (step % 5 == 4).astype(np.int8),
    }
    if envs == 2:
        rows = {name: np.stack([values, values + 100 * (name == "observation")], 1) for name, values in rows.items()}
    ring = ReplayBuffer(ArrayStorage(10 * envs, ndim=envs))
    ring.extend(rows)
    expected = rows["observation"][4:]
    np.testing.assert_array_equal(ring.in_order()["observation"], expected)
    slots = ring[:]["observation"].reshape(expected.shape)
    np.testing.assert_array_equal(slots, np.roll(expected, 4, axis=0))
    later = ReplayBuffer(ArrayStorage(40, ndim=envs), transform=NextView(), batch_size=200)
    later.extend(ring)
    np.testing.assert_array_equal(later.in_order()["observation"], expected)
    batch = later.sample()
    steps = (batch["next"]["observation"] - batch["observation"])[batch["mask"]]
    assert set(steps.tolist()) == {0.0, 1.0}  # a terminal observation stands for itself
    store = ring.to_store()
    assert [row["observation"] for row in store] == expected.T.reshape(-1).tolist()
    assert [row["episode_step"] for row in store] == [0, 0, 1, 2, 3, 4, 0, 1, 2, 3] * envs
    assert store.snapshot().episode_starts.tolist() == [0, 1, 6, *([10, 11, 16] if envs == 2 else [])]


def test_an_empty_buffer_is_copied_as_no_rows_and_lists_as_arrays() -> None:
    for kind in (ListStorage, ArrayStorage):
        empty, other = ReplayBuffer(kind(4)), ReplayBuffer(kind(4))
        assert other.extend(empty).tolist() == []
        assert len(other) == len(empty.to_store()) == 0
        for values in ("abc", b"abc", {1, 2, 3}):
            assert_raises(MouseError, "expected", other.extend, {"row": np.arange(3), "task": values})
    with pytest.raises(SchemaError, match="ArrayStorage: expected arrays with rows, found none"):
        ArrayStorage(arrays={"row": np.zeros(0)})
    ring = ReplayBuffer(ListStorage(3))
    ring.extend({"row": np.arange(5), "text": list("abcde")})
    copied = filled(ring, 3)
    assert (copied[:]["row"].tolist(), copied[:]["text"]) == ([2, 3, 4], ["c", "d", "e"])


def test_buffers_that_are_no_copies_of_each_other() -> None:
    ring = filled({"row": np.arange(14)}, 10)
    for storage in (ArrayStorage(10, alignment="arrived"), ArrayStorage(10, ndim=2)):
        assert_raises(ConfigError, "extend: expected a buffer with alignment=", ReplayBuffer(storage).extend, ring)
    best = filled({"row": np.arange(5)}, 3, writer=MaxValueWriter("row"))
    assert_raises(ConfigError, "in_order: expected a writer that keeps rows in order", best.in_order)
    store = DatasetStore()
    rows = {"observation": [[0.0]] * 8, "action": [0] * 8, "reward": [0.0] * 8, "done": [0] * 7 + [1]}
    store.extend({**rows, "episode_step": [0, 1, 2, 3] * 2})
    recorded = ReplayBuffer(store)
    for copied in (recorded, recorded[:8], recorded.in_order()):  # done does not say that row 3 is the last of its own
        copy = ReplayBuffer(ArrayStorage(10, alignment="arrived"), transform=NextView(takes="arrived"), batch_size=200)
        copy.extend(copied)
        batch = copy.sample()
        assert set(batch["time"][~batch["mask"]].tolist()) == {3}
        assert set(batch["next"]["time"][batch["mask"]].tolist()) == {1, 2, 3}
    assert recorded.to_store().snapshot().episode_starts.tolist() == [0, 4]
    other = {**rows, "episode_step": [0, 1, 2, 3] * 2, "metadata_episode": [7] * 8}
    named = DatasetStore(fields=[Field("episode", column="metadata_episode")])
    named.extend(other)
    with pytest.raises(DataError, match="and with another field 'episode'"):
        ReplayBuffer(ArrayStorage(10, alignment="arrived")).extend(ReplayBuffer(named))


ENDS: dict[str, dict[str, Any]] = {
    "codes": {"done": 0},
    "flags": {"terminated": False, "truncated": False},
    "all": {"done": False, "terminated": False, "truncated": False},
}


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("storage", [ArrayStorage, ListStorage])
@pytest.mark.parametrize("envs", [None, 2])
def test_no_transition_crosses_a_restart_after_end_episodes(kind: str, storage: Any, envs: int | None) -> None:
    if envs and storage is ListStorage:
        pytest.skip("a list has one stream")

    def made() -> ReplayBuffer:
        rows = ArrayStorage(10, ndim=2) if envs else storage(5)  # a ring that was overwritten
        return ReplayBuffer(rows, transform=NextView(), batch_size=200, seed=0)

    def play(buffer: ReplayBuffer, first: int) -> None:
        for number in range(first, first + 4):
            row = {"obs": number, **ENDS[kind]}
            buffer.append(map_tree(lambda leaf: np.full(envs, leaf), row) if envs else row)

    before, after = made(), made()
    play(before, 0), play(before, 4)
    after.load_state_dict(before.state_dict())
    after.end_episodes()
    kept = after.in_order()
    after.end_episodes()
    assert str(after.in_order()) == str(kept)
    play(after, 100)
    batch = after.sample()
    crosses = batch["obs"] == 7
    assert crosses.any()
    np.testing.assert_array_equal(batch["mask"], ~crosses & (batch["obs"] < 103))


def test_end_episodes_keeps_ends_priorities_and_refuses_what_it_cannot_mark() -> None:
    buffer = PrioritizedReplayBuffer(storage=ArrayStorage(10), batch_size=4, seed=0)
    buffer.end_episodes()  # of no rows
    buffer.extend({"obs": np.arange(4), "done": np.array([0, 0, 0, 1])})
    buffer.end_episodes()
    assert buffer[3]["done"] == 1
    buffer.append({"obs": 4, "done": 0})
    buffer.update_priority([0, 1, 2, 3, 4], [0.0, 0.0, 0.0, 0.0, 5.0])
    expected = pickle.loads(pickle.dumps(buffer)).sample()["priority_weight"]
    buffer.end_episodes()
    assert buffer[4]["done"] == 2
    np.testing.assert_array_equal(buffer.sample()["priority_weight"], expected)
    nested = ReplayBuffer(ArrayStorage(10))
    nested.append({"next": {"done": 0}})
    nested.end_episodes()
    assert nested[0] == {"next": {"done": 2}}
    for rows in ({"done": False}, {"obs": 1.0}, {"traj_id": 3}):
        other = ReplayBuffer(ArrayStorage(10))
        other.append(rows)
        assert_raises(MissingFieldError, "expected", other.end_episodes)
