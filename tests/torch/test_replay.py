"""Replay buffers of torch: TensorDicts in and out, rows as tensors, text and ragged rows, states, and CUDA."""

import copy
import io
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

import mouse_core.replay as core
from mouse_core import DatasetStore
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import map_tree
from mouse_core.replay.source import BufferSource
from mouse_core.rollouts import RolloutField
from mouse_core.spec import Alignment
from mouse_core.testing import StorageConformance
from mouse_torch import (
    PrefetchBatchifier,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RolloutStorage,
    TensorStorage,
)
from mouse_torch.prefetch import whole_maker
from mouse_torch.transfer import hand_over, to_numpy
from tests.comparing import same

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
assert_batch = partial(same, strict=True)


def rows(n: int, seed: int = 0) -> dict[str, Any]:
    """Rows with nested fields and an end in every tenth."""
    random = np.random.default_rng(seed)
    done = np.zeros(n, np.int8)
    done[9::10] = 1
    return {
        "obs": {"vector": random.normal(size=(n, 3)).astype(np.float32), "step": np.arange(n)},
        "action": random.integers(0, 4, n),
        "reward": random.normal(size=n),
        "done": done,
    }


def tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: tensors(child) for name, child in tree.items()}
    return torch.from_numpy(np.array(tree))


def as_td(tree: Any, size: list[int]) -> TensorDict:
    return TensorDict(tensors(tree), batch_size=size)


def storage_of(kind: str, size: int = 64, *, folder: Path = Path(), **options: Any) -> Any:
    if kind == "memmap":
        return core.MemmapStorage(size, folder / "m", **options)
    if kind in ("array", "list"):
        return (core.ArrayStorage if kind == "array" else core.ListStorage)(size, **options)
    return TensorStorage(size, device="cuda" if kind == "cuda" else "cpu", **options)


KINDS = ["array", "tensor", CUDA]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_their_size_and_their_device(kind: str) -> None:
    device = "cuda" if kind == "cuda" else None
    for sampler, size in ((None, [4]), (core.SliceSampler(sequence_length=3, end_key="done"), [4, 3])):
        buffer = ReplayBuffer(storage_of(kind), sampler, batch_size=4, device=device)
        buffer.extend(as_td(rows(25), [25]))
        batch = buffer.sample()
        assert batch.batch_size == torch.Size(size)
        assert batch.device == (torch.device("cuda", 0) if device else None)


def test_rows_as_tensors_are_not_half_shared_with_another_process() -> None:
    buffer = ReplayBuffer(TensorStorage(8), core.PrioritizedSampler(), batch_size=4)
    buffer.extend(as_td(rows(11), [11]))
    for other in (copy.deepcopy(buffer), ForkingPickler.loads(ForkingPickler.dumps(buffer))):
        assert_batch(other[:], buffer[:])
        other.extend(as_td(rows(3, 5), [3]))
        assert (len(other), other.storage.written, buffer.storage.written) == (8, 14, 11)
        assert not torch.equal(other[:]["reward"], buffer[:]["reward"])
    with pytest.raises(ConfigError, match=r"use a MemmapStorage\(capacity, path\)"):
        get_context("spawn").Process(target=print, args=(buffer,)).start()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_can_be_written(kind: str) -> None:
    buffer = ReplayBuffer(storage_of(kind), device="cuda" if kind == "cuda" else None)
    whole = rows(4)
    one: dict[str, Any] = map_tree(itemgetter(3), whole)
    assert buffer.extend(as_td(whole, [4])).tolist() == [0, 1, 2, 3]
    given = (as_td(one, []), tensors(one), one, one | {"reward": float(one["reward"]), "action": int(one["action"])})
    assert [int(buffer.append(row)) for row in given] == [4, 5, 6, 7]
    assert buffer.extend([as_td(one, []), as_td(one, [])]).tolist() == [8, 9]
    if kind != "cuda":
        assert buffer.extend([one, one]).tolist() == [10, 11]
    for number in range(3, len(buffer)):
        found = buffer[number]
        assert found.batch_size == torch.Size([])
        assert_batch(found, map_tree(np.asarray, one))
    assert buffer[2:5].batch_size == torch.Size([3])
    assert buffer[torch.tensor([[0, 1], [2, 3]])].batch_size == torch.Size([2, 2])
    buffer[1] = as_td(one, [])
    buffer[torch.tensor([0, 2])] = as_td(whole, [4])[:2]
    buffer[torch.tensor([[3, 4], [5, 6]])] = as_td(whole, [4]).reshape(2, 2)
    assert_batch(buffer[3:7], whole)
    assert buffer[1]["reward"] == one["reward"]
    assert buffer[2]["reward"] == whole["reward"][1]


TIMES = [([20, 3], ["time", None]), ([2, 20, 3], [None, "time", None]), ([20], ["time"])]


@pytest.mark.parametrize(
    ("kind", "size", "names"),
    # The first is what TorchRL's collectors give.
    [
        *(("array", *size) for size in TIMES),
        *((kind, [3, 20], [None, "time"]) for kind in ("array", "tensor", "core", "memmap")),
        pytest.param("cuda", *TIMES[1], marks=pytest.mark.cuda),
    ],
)
def test_an_axis_that_is_called_time_is_time(
    kind: str, size: list[int], names: list[str | None], tmp_path: Path
) -> None:
    axis = names.index("time")
    step = torch.arange(20).reshape([-1 if place == axis else 1 for place in range(len(size))]).expand(size)
    env = torch.arange(int(np.prod(size)) // 20).reshape([n for place, n in enumerate(size) if place != axis])
    env = env.unsqueeze(axis).expand(size)
    done = torch.zeros(*size, 1, dtype=torch.bool)
    fields = {"step": step, "env": env, "next": {"done": done, "obs": torch.randn(*size, 4)}, "td_error": step + 1.0}
    written = TensorDict(fields, batch_size=size, names=names)
    storage = storage_of("array" if kind == "core" else kind, 120, folder=tmp_path, ndim=2)
    made = core.ReplayBuffer if kind == "core" else partial(ReplayBuffer, device="cuda" if kind == "cuda" else None)
    buffer = made(storage, core.PrioritizedSliceSampler(sequence_length=4), batch_size=30)
    index = buffer.extend(written)
    assert index.shape == tuple(size)
    found, batch = (
        {name: torch.as_tensor(rows[name]).cpu().numpy() for name in ("step", "env")}
        for rows in (buffer[index.reshape(-1)], buffer.sample())
    )
    np.testing.assert_array_equal(found["step"], step.reshape(-1).numpy())
    np.testing.assert_array_equal(found["env"], env.reshape(-1).numpy())
    assert (np.diff(batch["step"], axis=1) == 1).all()
    assert (np.diff(batch["env"], axis=1) == 0).all()
    for many in (buffer.append, lambda rows: buffer.extend([rows, rows])):
        with pytest.raises(SchemaError, match="found a time axis"):
            many(written)
    assert len(buffer) == step.numel()


def test_objects_tuples_and_text() -> None:
    buffer = ReplayBuffer(core.ListStorage(10), batch_size=5)
    buffer.extend(["a", "b", "c"])
    found = buffer.sample()
    assert [found["data"][place] for place in range(5)] == ["abc"[i] for i in found["index"].tolist()]
    pair = namedtuple("pair", "obs reward")
    given = (pair(torch.ones(3, 2), torch.zeros(3)), (torch.ones(3, 2), [torch.zeros(3), torch.ones(3)]))
    for rows, names in zip(given, ({"obs", "reward"}, {"0", "1"}), strict=True):
        buffer = ReplayBuffer(core.ArrayStorage(10), batch_size=2)
        buffer.extend(rows)
        assert {*buffer.sample()["data"].keys()} == names
    assert buffer[0]["0"].tolist() == [1, 1]
    named = ReplayBuffer(core.ArrayStorage(10), batch_size=3)
    named.extend({"name": np.array(["x", "yy"]), "value": torch.zeros(2)})
    assert named.sample()["name"][0] in ("x", "yy")


@pytest.mark.cuda
def test_other_storages_move_to_the_device() -> None:
    buffer = ReplayBuffer(core.ArrayStorage(arrays=rows(20)), batch_size=4, device="cuda")
    assert isinstance(buffer.storage, TensorStorage)
    assert buffer.storage.device.type == "cuda"
    assert len(buffer) == 20
    assert buffer.sample()["obs", "vector"].is_cuda
    assert buffer[3]["reward"].is_cuda
    with pytest.raises(ConfigError, match="expected a writer that overwrites the oldest rows"):
        ReplayBuffer(core.ArrayStorage(3), writer=core.MaxValueWriter("reward"), device="cuda")
    with pytest.raises(ConfigError, match="the device of the storage"):
        ReplayBuffer(TensorStorage(3, device="cuda"))
    listed = ReplayBuffer(core.ListStorage(10), batch_size=4, device="cuda")
    listed.extend([as_td({"x": np.ones(2, np.float32)}, []) for _ in range(3)])
    assert listed.sample()["x"].is_cuda


class TestTensorStorage(StorageConformance):
    """The suite for storages of one's own."""

    buffer = ReplayBuffer

    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> TensorStorage:
        return TensorStorage(capacity, ndim, alignment=alignment)


@pytest.mark.cuda
class TestTensorStorageOnTheDevice(TestTensorStorage):
    """The same on CUDA."""

    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> TensorStorage:
        return TensorStorage(capacity, ndim, device="cuda", alignment=alignment)

    def to_numpy(self, values: Any) -> np.ndarray:
        return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)


def test_a_storage_that_is_begun_in_inference_mode_goes_on_outside_of_it() -> None:
    buffer = ReplayBuffer(TensorStorage(4))
    with torch.inference_mode():
        buffer.extend({"x": torch.arange(2.0)})
    buffer.extend({"x": torch.arange(2.0, 4.0)})
    assert buffer[:]["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_pinned_batch_is_one_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return made(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    buffer, other = (ReplayBuffer(core.ArrayStorage(64), batch_size=8, seed=4) for _ in range(2))
    for member in (buffer, other):
        member.extend({**rows(30), "name": np.array(["a", "b", "c"] * 10)})
    source = BufferSource(buffer, None, 1)
    make = whole_maker(source, device=torch.device("cpu"), pin=True)
    for index in range(3):
        source.prepare(index)
        found, wanted = hand_over(make(index)), other.sample()
        source.delivered(index)
        assert found["name"][2] == wanted["name"][2]
        assert_batch(found.exclude("name"), wanted.exclude("name"))
        assert len({tensor.untyped_storage().data_ptr() for tensor in found.exclude("name").values(True, True)}) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["array", "list", "cuda"])
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_to_the_device(kind: str, workers: int) -> None:
    storage = core.ListStorage(64) if kind == "list" else storage_of(kind)
    buffer = ReplayBuffer(storage, batch_size=8, seed=4, device="cuda" if kind == "cuda" else None)
    other = core.ReplayBuffer(core.ArrayStorage(64), batch_size=8, seed=4)
    for member in (buffer, other):
        member.extend(rows(30))
    busy = torch.randn(1024, 1024, device="cuda")
    kept = []
    with PrefetchBatchifier(buffer, device="cuda", num_workers=workers) as loader:
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
            kept.append((loader.next_batch(), other.sample()))
    for found, wanted in kept:
        assert found["reward"].is_cuda
        assert_batch(found, wanted)


def test_rows_of_a_list_storage_are_tensordicts_one_by_one() -> None:
    buffer = ReplayBuffer(core.ListStorage(10))
    rows = {"obs": torch.arange(10).reshape(5, 2), "next": {"reward": torch.ones(5)}}
    buffer.extend(TensorDict(rows, batch_size=[5]))
    assert [row["obs"].tolist() for row in buffer[1:3]] == [[2, 3], [4, 5]]
    assert all(isinstance(row, TensorDict) and row.batch_size == () for row in [buffer[0], *buffer[:]])
    assert buffer[torch.tensor([[0, 1], [2, 3]])][1][0]["next", "reward"] == 1
    buffer.empty()
    buffer.extend([{"obs": torch.zeros(2), "words": ["p", "q"]}, {"obs": torch.zeros(2), "words": ["p"]}])
    assert [(row.batch_size, list(row["words"])) for row in buffer[:]] == [((), ["p", "q"]), ((), ["p"])]
    assert list(buffer[1]["words"]) == ["p"]
    objects = ReplayBuffer(core.ListStorage(10))
    objects.extend([torch.zeros(2), "text", [1, 2]])
    assert isinstance(objects[:][0], torch.Tensor)
    assert objects[:][1:] == ["text", [1, 2]]


@tensorclass
class Answer:
    score: torch.Tensor
    text: str


@tensorclass
class Row:
    x: torch.Tensor
    answer: Answer


def row_of(*lead: int, text: str = "one") -> Any:
    answer = Answer(score=torch.zeros(lead), text=text, batch_size=lead)
    return Row(x=torch.ones(*lead, 2), answer=answer, batch_size=lead)


@pytest.mark.parametrize("make", [core.ArrayStorage, core.ListStorage, TensorStorage])
def test_tensorclasses_and_lazy_stacks_are_rows(make: Any) -> None:
    buffer = ReplayBuffer(make(10), batch_size=2)
    assert buffer.append(row_of()) == 0
    assert buffer.extend(row_of(2)).tolist() == [1, 2]
    assert buffer.extend([row_of(), row_of(text="two")]).tolist() == [3, 4]
    assert [buffer[i]["answer", "text"] for i in range(5)] == ["one"] * 4 + ["two"]
    buffer[1] = row_of().replace(x=torch.full((2,), 7.0))
    assert buffer[1]["x"].tolist() == [7, 7]
    assert float(buffer[1]["answer", "score"]) == 0
    assert buffer.sample()["x"].shape == (2, 2)
    rows = [TensorDict({"obs": torch.rand(n, 2), "next": {"reward": torch.ones(1)}}) for n in (4, 3)]
    buffer = ReplayBuffer(make(10))
    buffer.extend(LazyStackedTensorDict(*rows, stack_dim=0))
    assert all(torch.equal(buffer[i]["obs"], rows[i]["obs"]) for i in range(2))
    assert buffer[1]["next", "reward"] == 1
    within = LazyStackedTensorDict(*[TensorDict({"obs": torch.rand(2, n)}, [2]) for n in (4, 3)], stack_dim=1)
    with pytest.raises(SchemaError, match="field 'obs': when shapes differ, expected a lazy stack"):
        buffer.extend(within)
    assert len(buffer) == 2


def test_rows_of_tensors_get_a_new_field_and_are_named_where_they_do_not_fit() -> None:
    storage = TensorStorage(6)
    buffer = ReplayBuffer(storage, batch_size=4)
    buffer.extend(TensorDict({"row": torch.arange(8), "note": [str(row) for row in range(8)]}, [8]))
    found = buffer[:]
    with pytest.raises(SchemaError, match="value"):
        buffer[:2] = TensorDict({"row": torch.arange(2), "note": ["a", "b"], "value": torch.ones(2)}, [2])
    buffer[:] = found.set("value", found["row"] * 0.5)
    assert (buffer[:]["value"] == buffer[:]["row"] * 0.5).all()
    with pytest.raises(SchemaError, match="value"):
        buffer.append({"row": torch.tensor(8), "note": "8"})
    buffer.append({"row": torch.tensor(8), "note": "8", "value": torch.tensor(4.0)})
    batch = buffer.sample(30)
    assert (batch["value"] == batch["row"] * 0.5).all()
    assert list(batch["note"]) == [str(row) for row in batch["row"].tolist()]
    again = ReplayBuffer(TensorStorage(6))
    again.load_state_dict(buffer.state_dict())
    assert again[:]["row"].equal(buffer[:]["row"])
    with pytest.raises(MissingFieldError, match="expected a field 'nothing'"):
        storage.read("nothing", slice(0, 1))
    assert "6 of 6 rows" in repr(storage)
    full = TensorStorage(8)
    ReplayBuffer(full).extend(as_td(rows(5), [5]))
    assert full.nbytes == 8 * (12 + 8 + 8 + 8 + 1)
    with pytest.raises(ConfigError, match="at least 9, one row for each environment, found 8"):
        ReplayBuffer(TensorStorage(8, ndim=2)).append(as_td(rows(9), [9]))


@pytest.mark.slow
def test_sequences_are_those_of_torchrl() -> None:
    data = pytest.importorskip("torchrl.data", reason="torchrl is not installed")
    units = pytest.importorskip("torchrl.data.replay_buffers")
    done = np.isin(np.arange(30), [3, 4, 12, 20, 29])
    theirs = data.ReplayBuffer(storage=data.LazyTensorStorage(24), batch_size=2)
    theirs.extend(TensorDict({"x": torch.arange(30), ("next", "done"): torch.tensor(done)[:, None]}, [30]))
    for burn_in, length, bootstrap, dilation in ((0, 3, 0, 1), (2, 3, 1, 1), (1, 2, 1, 2), (3, 1, 0, 3)):
        steps = {"sequence_length": burn_in + length + bootstrap, "burn_in": burn_in, "dilation": dilation}
        ours = ReplayBuffer(core.ArrayStorage(24), core.SliceSampler(**steps, span=(False, True)), batch_size=300)
        ours.extend({"x": np.arange(30), "done": done})
        batch = ours.sample()
        anchors = batch["index"][:, burn_in]
        assert len(anchors.unique()) == 24
        unit = units.Sequence(length, burn_in=burn_in, bootstrap=bootstrap, dilation=dilation)
        index, info = unit.expand(anchors, {}, theirs._storage)
        assert info["validity_mask"].reshape(batch["mask"].shape).equal(batch["mask"])
        assert index.reshape(batch["index"].shape)[batch["mask"]].equal(batch["index"][batch["mask"]])


STORAGES = ["list", "array", "memmap", "tensor"]


def ragged(n: int) -> TensorDict:
    return TensorDict(
        text=NonTensorStack(*["t" * number for number in range(n)]),
        x=NonTensorStack(*[torch.arange(number, dtype=torch.int32) for number in range(n)]),
        n=torch.arange(n),
        reward=torch.arange(n) * 1.0,
        done=torch.zeros(n, dtype=torch.bool),
        batch_size=[n],
    )


def check(batch: TensorDict) -> None:
    for place, number in enumerate(batch["n"].tolist()):
        assert batch["text"][place] == "t" * number
        assert batch["x"][place].dtype == torch.int32
        assert batch["x"][place].tolist() == list(range(number))


@pytest.mark.parametrize("kind", STORAGES)
def test_rows_of_differing_length_come_back_as_tensors_and_text(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage_of(kind, 20, folder=tmp_path), batch_size=6)
    buffer.extend(ragged(5))
    buffer.append(ragged(9)[7])
    for _ in range(5):
        check(buffer.sample())
    assert (buffer[5]["text"], buffer[5]["x"].tolist()) == ("t" * 7, list(range(7)))
    buffer[0] = ragged(9)[8]
    assert buffer[0]["text"] == "t" * 8
    with PrefetchBatchifier(buffer, num_workers=0) as loader:
        check(loader.next_batch())
        state = loader.state_dict()
        wanted = loader.next_batch()
        loader.load_state_dict(state)
        assert loader.next_batch()["text"] == wanted["text"]
    other = ReplayBuffer(TensorStorage(20) if kind == "array" else storage_of(kind, 20, folder=tmp_path), batch_size=6)
    other.load_state_dict(buffer.state_dict())
    again, wanted = other.sample(), buffer.sample()
    check(again)
    assert again["n"].tolist() == wanted["n"].tolist()
    check(ReplayBufferEnsemble(buffer, other, batch_size=8).sample())


@pytest.mark.parametrize("kind", STORAGES)
def test_slices_steps_ahead_and_padding(kind: str, tmp_path: Path) -> None:
    storage = storage_of(kind, 20, folder=tmp_path)
    pad = core.Pad("x", length=12)
    slices = ReplayBuffer(storage, core.SliceSampler(sequence_length=3), transform=pad, batch_size=2)
    slices.extend(ragged(12))
    batch = slices.sample()
    assert batch.batch_size == torch.Size([2, 3])
    assert batch["x"].shape == (2, 3, 12)
    assert torch.equal(batch["x_mask"].sum(-1), batch["n"])
    assert [len(text) for row in batch["text"] for text in row] == batch["n"].reshape(-1).tolist()
    check(ReplayBuffer(storage, transform=core.NStep(2, 0.9), batch_size=6).sample())
    for transform in (core.NextView(), (pad, core.NextView())):
        batch = slices.with_parts(transform=transform).sample()
        after = [[len(text) for text in row] for row in batch["next"]["text"]]
        assert [row[:2] for row in after] == (batch["n"][:, :2] + 1).tolist()
        assert batch["mask"].tolist() == [[True, True, False]] * 2


NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(("kind", "dtype"), [*zip(STORAGES, [*NARROW, NARROW[0]], strict=True), ("tensor", NARROW[1])])
def test_narrow_floats_come_back_bit_by_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    given = torch.linspace(-2, 2, 24).reshape(8, 3).to(dtype)
    buffer = ReplayBuffer(storage_of(kind, 20, folder=tmp_path), batch_size=6)
    buffer.extend(TensorDict(x=given, n=torch.arange(8), batch_size=[8]))
    batch = buffer.sample()
    assert batch["x"].dtype == dtype
    assert torch.equal(batch["x"].view(torch.uint8), given[batch["n"]].view(torch.uint8))
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    buffer.load_state_dict(torch.load(file))
    assert torch.equal(buffer[3]["x"].float(), given[3].float())
    buffer.dumps(tmp_path / "c")
    other = core.ReplayBuffer(core.ArrayStorage(20) if kind != "list" else core.ListStorage(20), batch_size=6)
    other.loads(tmp_path / "c")
    assert other.sample()["x"].tobytes() == to_numpy(buffer.sample()["x"]).tobytes()
    with PrefetchBatchifier(buffer, num_workers=0) as loader:
        assert loader.next_batch()["x"].dtype == dtype


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_floats_in_the_core_stores_loaders_and_rollouts(dtype: torch.dtype) -> None:
    pytest.importorskip("ml_dtypes")
    name = str(dtype).removeprefix("torch.")
    reward, codes = (torch.arange(8) / 2).to(dtype), torch.zeros(8, dtype=torch.long)
    store = DatasetStore()
    store.extend({"action": codes, "reward": reward, "done": codes})
    assert [store[row]["reward"] for row in range(8)] == reward.float().tolist()
    with PrefetchBatchifier(store, 1, 8, "sequential", num_workers=0, dtypes={"reward": name}) as loader:
        found = loader.next_batch()["reward"]
    assert found.dtype == dtype
    assert found.reshape(-1).float().sort().values.tolist() == reward.float().tolist()
    storage = RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={"observations": RolloutField((2,), name)})
    row = {"observations": torch.ones(2, 2).to(dtype), "rewards": torch.ones(2), "dones": torch.zeros(2)}
    storage.add_transitions(row)
    assert storage.observations.dtype == dtype
    buffer = core.ReplayBuffer(core.ArrayStorage(20))
    buffer.extend({"x": reward, "n": torch.arange(8)})
    buffer.append({"x": reward[1].clone(), "n": 8})
    buffer.extend([{"x": reward[2], "n": 9}, {"x": reward[3], "n": 10}])
    kept = buffer[:]["x"]
    assert str(kept.dtype) == name
    np.testing.assert_array_equal(kept.astype(np.float32), torch.cat([reward, reward[1:4]]).float())


@pytest.mark.parametrize("kind", ["array", "memmap", "tensor"])
def test_rows_of_a_list_are_not_promoted_to_a_common_dtype(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage_of(kind, 20, folder=tmp_path))
    buffer.append({"text": "a", "n": torch.tensor(1)})
    for one, other in (
        ({"text": "a", "n": 1}, {"text": 3, "n": 1}),
        ({"text": "a", "n": 1}, {"text": b"a", "n": 1}),
        ({"text": "a", "n": 1}, {"text": "b", "n": True}),
        ({"text": "a", "n": torch.tensor(1)}, {"text": "b", "n": torch.tensor(1, dtype=torch.int32)}),
    ):
        with pytest.raises(SchemaError, match="expected"):
            buffer.extend([one, other])
    assert len(buffer) == 1
    buffer.extend([{"text": "b", "n": 2}, {"text": "c", "n": 3}])
    assert buffer[2]["text"] == "c"


def test_dtypes_that_numpy_or_torch_has_not_are_refused_by_name() -> None:
    plain = core.ReplayBuffer(core.ArrayStorage(20))
    with pytest.raises(SchemaError, match=r"field 'x': .* found torch.float32: .*requires grad"):
        plain.extend({"x": torch.zeros(3, requires_grad=True)})
    buffer = ReplayBuffer(TensorStorage(20))
    with pytest.raises(SchemaError, match=r"expected a dtype that torch supports, found datetime64"):
        buffer.extend({"n": np.arange(3), "when": np.arange(3).astype("M8[s]")})
    with pytest.raises(SchemaError, match=r"expected a dtype that torch supports, found (float128|float96)"):
        buffer.extend({"n": np.arange(3), "long": np.arange(3).astype(np.longdouble)})
    assert len(buffer) == 0
    large = ReplayBuffer(TensorStorage(20))
    large.extend({"n": [2**63] * 3})
    assert large[1]["n"] == 2**63
    buffer.extend({"n": np.arange(3)})
    assert buffer[2]["n"] == 2


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def _filled(buffer: Any) -> Any:
    buffer.extend({"x": torch.arange(40.0), "n": {"i": torch.arange(40)}, "done": torch.arange(40) % 7 == 6})
    return buffer


def _ensemble() -> Any:
    members = _filled(PrioritizedReplayBuffer(storage=TensorStorage(50))), _filled(ReplayBuffer(core.ArrayStorage(64)))
    return ReplayBufferEnsemble(*members, batch_size=4)


BUFFERS: dict[str, Callable[[], Any]] = {
    "array": lambda: _filled(ReplayBuffer(core.ArrayStorage(64), core.SamplerWithoutReplacement(), batch_size=4)),
    "list": lambda: _filled(ReplayBuffer(core.ListStorage(64), batch_size=4)),
    "tensor": lambda: _filled(ReplayBuffer(TensorStorage(64), batch_size=4)),
    "prioritized": lambda: _filled(PrioritizedReplayBuffer(storage=core.ArrayStorage(64), batch_size=4)),
    "slices": lambda: _filled(ReplayBuffer(core.ArrayStorage(64), core.SliceSampler(sequence_length=3), batch_size=2)),
    "ensemble": _ensemble,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_loader_goes_on_with_what_was_drawn_ahead(name: str) -> None:
    buffer, other = BUFFERS[name](), BUFFERS[name]()
    with PrefetchBatchifier(buffer, num_workers=0, prefetch=2) as loader:
        loader.next_batch()
        state = _saved({"loader": loader.state_dict(), "buffer": buffer.state_dict()})
        wanted = [loader.next_batch() for _ in range(4)]
    other.load_state_dict(state["buffer"])
    with PrefetchBatchifier(other, num_workers=0, prefetch=2) as loader:
        loader.load_state_dict(state["loader"])
        for batch in wanted:
            same(loader.next_batch(), batch)


def test_states_of_loaders_and_rollouts_are_plain() -> None:
    store = DatasetStore()
    store.extend({"action": np.zeros(50, np.int64), "reward": np.arange(50.0), "done": np.zeros(50, np.int64)})
    with PrefetchBatchifier(store, 4, 4, num_workers=0) as loader:
        loader.next_batch()
        state = _saved(loader.state_dict())
        wanted = loader.next_batch()
        loader.load_state_dict(state)
        same(loader.next_batch(), wanted)
    rollout = RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={})
    rollout.load_state_dict(_saved(rollout.state_dict()))
    # Torch has no dtype for some arrays.
    buffer, other = ReplayBuffer(core.ArrayStorage(4)), ReplayBuffer(core.ArrayStorage(4))
    when = np.array(["2026-01-01", "2027-02-03"], "datetime64[D]")
    buffer.extend({"when": when, "x": np.arange(2, dtype=np.uint16)})
    other.load_state_dict(_saved(buffer.state_dict()))
    np.testing.assert_array_equal(other.storage.get(np.arange(2))["when"], when, strict=True)


@tensorclass
class OfTensors:
    action: torch.Tensor
    reward: torch.Tensor
    done: torch.Tensor


@dataclass
class Plain:
    action: Any
    reward: Any
    done: Any


@tensorclass
class Moved:
    rewards: torch.Tensor
    dones: torch.Tensor


@pytest.mark.parametrize("kind", [OfTensors, Plain, namedtuple("Named", "action reward done"), TensorDict])
def test_a_store_takes_rows_in_records_of_any_kind(kind: Any) -> None:
    store = DatasetStore()
    store.append(kind(action=torch.tensor(1), reward=torch.tensor(0.5), done=torch.tensor(0)))
    store.extend(kind(action=torch.tensor([2, 0]), reward=torch.tensor([1.5, 2]), done=torch.tensor([0, 1])))
    assert [(store[row]["action"], store[row]["reward"]) for row in range(3)] == [(1, 0.5), (2, 1.5), (0, 2.0)]


@pytest.mark.parametrize("kind", [Moved, namedtuple("Pair", "rewards dones"), TensorDict])
def test_a_rollout_takes_steps_in_records_of_any_kind(kind: Any) -> None:
    storage = RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={})
    storage.add_transitions(kind(rewards=torch.tensor([1.0, 2.0]), dones=torch.zeros(2)))
    assert storage.rewards.tolist() == [[[1.0], [2.0]]]
