"""The tables of docs/reference/coming-from.md, line by line: each number has its test here."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import (
    AugmentMaskProbConfig,
    AugmentTokensConfig,
    BatchSource,
    DatasetStore,
    Field,
    PrefetchBatchifier,
    formats,
)
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError, StateError
from mouse_core.formats.preprocessing import preprocess
from mouse_core.maps import RowMap, binary_to_decimal, hash_to_int, random_projection, row_hash
from mouse_core.randomness import Key, Purpose
from mouse_core.replay import (
    Apply,
    ArrayStorage,
    BurnIn,
    Cast,
    CatFrames,
    CenterCrop,
    Compose,
    Compress,
    Concatenate,
    ConsumingSampler,
    Exclude,
    GrayScale,
    HindsightRelabel,
    ImmutableWriter,
    LinearSchedule,
    ListStorage,
    MarkSlices,
    MaxValueWriter,
    MemmapStorage,
    NextView,
    NStep,
    OnWrite,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RandomTimeCrop,
    Rename,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Resize,
    ReturnsToGo,
    ReverseSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Schedule,
    Select,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessSampler,
    ToFloatImage,
    VecNorm,
    query,
)
from mouse_core.statistics import Scaling
from mouse_core.testing import example_store
from mouse_core.text import kl_estimates

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coming-from.md"
KEY = Key(1, Purpose.REPLAY)


def rows(n: int, episode: int = 10) -> dict[str, Any]:
    done = np.zeros(n, np.int8)
    done[episode - 1 :: episode] = 1
    return {
        "x": np.arange(n),
        "reward": np.ones(n, np.float32),
        "done": done,
        "episode": np.arange(n) // episode,
    }


def filled(n: int = 40, size: int = 100, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(ArrayStorage(size), **{"batch_size": 8, **options})
    buffer.extend(rows(n))
    return buffer


def sliced(n: int = 40, size: int = 100, batch_size: int = 4, **options: Any) -> ReplayBuffer:
    return filled(n, size, sampler=SliceSampler(**options), batch_size=batch_size)


def test_every_line_has_a_test() -> None:
    numbers = re.findall(r"^\| ([TFCM]\d\d) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(numbers) == len(set(numbers))
    tested = {part for name in globals() for part in re.findall(r"[TFCM]\d\d", name) if name.startswith("test_")}
    tested |= {row for row, _, _ in ABSENT}
    assert tested == set(numbers)


# What is not offered: the names of the arguments, which are taken by none of these.
ABSENT: list[tuple[str, Callable[..., Any], tuple[str, ...]]] = [
    ("T45", SliceSampler, ("cache_values", "ends", "trajectories", "compile", "use_gpu")),
    ("T74", ReplayBuffer, ("service_backend",)),
    ("T78", MemmapStorage, ("backend", "host", "port")),
]


@pytest.mark.parametrize(("row", "kind", "names"), ABSENT)
def test_what_is_not_offered(row: str, kind: Callable[..., Any], names: tuple[str, ...]) -> None:
    assert not set(names) & set(inspect.signature(kind).parameters)


# ---------------------------------------------------------------------- TorchRL: buffers


def test_T01_defaults() -> None:
    buffer = ReplayBuffer()
    assert isinstance(buffer.storage, ListStorage)
    assert buffer.storage.capacity == 1000
    assert isinstance(buffer.sampler, RandomSampler)
    assert isinstance(buffer.writer, RoundRobinWriter)


def test_T02_indices() -> None:
    buffer = ReplayBuffer(ArrayStorage(6))
    assert buffer.extend(rows(5)).tolist() == [0, 1, 2, 3, 4]
    single = {name: values[0] for name, values in rows(1).items()}
    assert [buffer.append(single) for _ in range(3)] == [5, 0, 1]
    vector = ReplayBuffer(ArrayStorage(12, ndim=2))
    assert vector.append({"x": np.arange(3)}).tolist() == [0, 1, 2]
    assert vector.extend({"x": np.zeros((2, 3), int)}).tolist() == [[3, 4, 5], [6, 7, 8]]


def test_T03_batch_sizes() -> None:
    assert filled().sample()["x"].shape == (8,)
    assert filled().sample(3)["x"].shape == (3,)
    with pytest.raises(ConfigError, match="batch_size"):
        filled(batch_size=None).sample()


def test_T04_iterating() -> None:
    batches = list(filled(20, sampler=SamplerWithoutReplacement()))
    assert sorted(np.concatenate([batch["x"] for batch in batches]).tolist()) == list(range(20))
    endless = iter(filled(20))
    assert len([next(endless) for _ in range(30)]) == 30


def test_T05_any_data_and_collate() -> None:
    buffer = ReplayBuffer(ListStorage(100), collate_fn=lambda items: items)
    buffer.extend(["a", 1, None])
    batch = buffer.sample(5)
    assert [("a", 1, None)[index] for index in batch["index"]] == batch["data"]


def test_T02_T05_rows_of_torch() -> None:
    import torch
    from tensordict import TensorDict

    from mouse_torch import ReplayBuffer as TorchBuffer

    buffer = TorchBuffer(ListStorage(10), collate_fn=torch.utils.data.default_collate, batch_size=2)
    row = {"x": torch.ones(3, requires_grad=True)}
    assert buffer.append(TensorDict(row, batch_size=[3])) == 0
    batch = buffer.sample()
    assert batch["x"].shape == (2, 3)
    assert not batch["x"].requires_grad


def test_T06_pytrees() -> None:
    buffer = ReplayBuffer(ArrayStorage(10), batch_size=4)
    tree = {"a": np.ones(3), "b": {"c": (np.zeros(2), np.ones(1))}}
    buffer.extend([tree, tree])
    assert len(buffer) == 2
    found = buffer.sample()
    assert found["b"]["c"][0].shape == (4, 2)
    with pytest.raises(SchemaError, match="Unicode text"):
        ReplayBuffer(ArrayStorage(10)).append({30: np.ones(3)})


def test_T07_transforms_and_inverses() -> None:
    class Double:
        def __call__(self, batch: Any) -> Any:
            return {**batch, "x": batch["x"] * 2}

        def inverse(self, rows: Any) -> Any:
            return {**rows, "x": rows["x"] + 100}

    buffer = ReplayBuffer(
        ArrayStorage(10), transform=[Double(), lambda batch: {**batch, "y": batch["x"]}], batch_size=4
    )
    buffer.extend({"x": np.zeros(3, int)})
    buffer.append({"x": np.int64(0)})
    assert (buffer[:]["x"] == 100).all()
    assert (buffer.sample()["y"] == 200).all()


def test_T08_reading_and_writing_in_place() -> None:
    buffer = filled(40, transform=lambda batch: 1 / 0)
    buffer[3] = {**buffer[4], "x": 77}
    assert buffer[3]["x"] == 77
    assert len(buffer) == 40
    assert buffer.append(buffer[0]) == 40
    assert buffer[-2:]["x"].tolist() == [39, 0]
    assert len(buffer[...]["x"]) == 41
    with pytest.raises(IndexError, match="not kept"):
        buffer[-1]
    listed = ReplayBuffer(ListStorage(10), collate_fn=lambda items: 1 / 0)
    listed.extend({"x": np.arange(5)})
    listed[1:3] = {"x": np.array([7, 8])}
    assert listed[:3] == [{"x": 0}, {"x": 7}, {"x": 8}]


def test_T09_T15_empty() -> None:
    buffer = filled()
    buffer.empty()
    assert len(buffer) == buffer.stats()["written"] == 0
    assert buffer.extend(rows(2)).tolist() == [0, 1]


def test_T11_rows_and_objects_are_two_kinds_of_state(tmp_path: Path) -> None:
    storages = [ArrayStorage(4), MemmapStorage(4, tmp_path / "from"), ListStorage(4)]
    for number, storage in enumerate(storages):
        buffer = ReplayBuffer(storage)
        buffer.extend({"x": np.arange(3)})
        others = [ArrayStorage(4), MemmapStorage(4, tmp_path / f"to {number}"), ListStorage(4)]
        for other in map(ReplayBuffer, others):
            if isinstance(storage, ListStorage) == isinstance(other.storage, ListStorage):
                other.load_state_dict(buffer.state_dict())
                assert [int(other[i]["x"]) for i in range(3)] == [0, 1, 2]
            else:
                with pytest.raises(StateError, match="expected a state of"):
                    other.load_state_dict(buffer.state_dict())


def test_T10_T11_checkpoints_are_exact_and_short(tmp_path: Path) -> None:
    buffer = sliced(95, 60, sequence_length=4, end_key="done", batch_size=5)  # the ring has wrapped
    buffer.dumps(tmp_path / "one")
    state = buffer.state_dict()
    wanted = [buffer.sample()["x"].tolist() for _ in range(5)]
    for restore in (lambda other: other.loads(tmp_path / "one"), lambda other: other.load_state_dict(state)):
        other = ReplayBuffer(ArrayStorage(60), SliceSampler(sequence_length=4, end_key="done"), batch_size=5)
        restore(other)
        found = [other.sample()["x"].tolist() for _ in range(5)]
        assert found == wanted
        assert all((np.diff(part) == 1).all() for part in found)
    weighted = filled(10, sampler=PrioritizedSampler(0.8))
    with pytest.raises(StateError, match="alpha"):
        filled(10, sampler=PrioritizedSampler(0.5)).load_state_dict(weighted.state_dict())
    big = ReplayBuffer(ArrayStorage(1_000_000))
    big.extend(rows(10))
    big.dumps(tmp_path / "two")
    assert (tmp_path / "two").stat().st_size < 5_000


def test_T12_index_and_weights_are_in_the_batch() -> None:
    batch = filled(sampler=PrioritizedSampler()).sample()
    assert batch["index"].shape == batch["priority_weight"].shape == (8,)


def test_T13_F02_the_seed_decides_the_draws_and_those_of_transforms() -> None:
    class Noise:
        random = True

        def __call__(self, batch: Any, key: Key) -> Any:
            return {**batch, "noise": key.uniform(8)}

    streams = []
    for seed in (1, 1, 2):
        np.random.seed(len(streams))  # noqa: NPY002 - which must not matter
        buffer = filled(transform=Noise(), seed=seed)
        streams.append([np.concatenate([(b := buffer.sample())["x"], b["noise"]]).tolist() for _ in range(3)])
    assert streams[0] == streams[1] != streams[2]


def test_T14_prefetching_is_the_same_with_any_number_of_threads() -> None:
    streams = []
    for workers in (0, 1, 4):
        buffer = filled(sampler=PrioritizedSampler())
        with PrefetchBatchifier(buffer, prefetch=3, num_workers=workers) as loader:
            stream = []
            for _ in range(8):
                batch = loader.next_batch()
                stream.append(batch["index"].tolist())
                buffer.update_priority(batch["index"], np.arange(8.0))
            assert loader.staleness == (3, 0, 3)
        streams.append(stream)
    assert streams[0] == streams[1] == streams[2]


def test_T15_C15_numbers() -> None:
    buffer = filled(40, 25)
    buffer.sample()
    found = buffer.stats()
    assert (found["size"], found["capacity"], found["written"], found["samples"]) == (25, 25, 40, 1)
    assert buffer[:]["x"].shape == (25,)
    assert len(buffer) == 25


def test_T16_T24_C13_mapped_rows_are_shared_and_reopened(tmp_path: Path) -> None:
    one = ReplayBuffer(MemmapStorage(100, tmp_path / "rows"), batch_size=4)
    one.extend(rows(10))
    other = ReplayBuffer(MemmapStorage(100, tmp_path / "rows"), batch_size=4)
    assert len(other) == 10
    other.extend(rows(5))
    assert len(one) == 15
    assert one.sample()["x"].shape == (4,)


def test_T18_T20_other_parts() -> None:
    buffer = filled(40, sampler=PrioritizedSampler(1.0, eps=0.0), transform=Exclude("done"))
    buffer.update_priority([3], [9.0])
    other = buffer.with_parts(transform=[*buffer.transform.transforms, Rename({"x": "y"})])
    assert other.sample()["y"].shape == (8,)
    assert other.sampler.weights_at(other.storage, np.array([3])).tolist() == [9.0]
    sliced = other.with_parts(sampler=SliceSampler(sequence_length=2, end_key="done"), transform=None)
    assert sliced.sample()["x"].shape == (8, 2)
    assert len(buffer.with_parts(storage=ArrayStorage(10))) == 0
    with pytest.raises(ConfigError, match="keeps the order"):
        sliced.with_parts(writer=MaxValueWriter("reward"))
    with pytest.raises(ConfigError):
        ReplayBuffer(lambda: ArrayStorage(10))
    assert len(pickle.dumps(ReplayBuffer(ArrayStorage(10**9)))) < 10_000


def test_T17_T25_axes_by_names_and_whole_steps() -> None:
    grid = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    buffer = ReplayBuffer(ArrayStorage(100, ndim=2))
    index = buffer.extend({"x": grid}, names=("env", "time", "agent"))
    np.testing.assert_array_equal(buffer[index]["x"], grid)
    assert (buffer.storage.capacity, buffer.storage.num_envs) == (96, 6)
    three = ReplayBuffer(ArrayStorage(100, ndim=2))
    three.extend({"x": np.zeros((50, 3))})
    assert len(three) == 99


def test_T52_C10_rows_that_are_gone() -> None:
    buffer = filled(10, 10, sampler=PrioritizedSampler(1.0, eps=0.0), generations=True)
    batch = buffer.sample(20)
    buffer.extend(rows(5))
    buffer.update_priority({**batch, "td_error": np.full(20, 7.0)})
    drawn = {slot for slot in batch["index"].tolist() if slot >= 5}
    weights = buffer.sampler.weights_at(buffer.storage, np.arange(10))
    assert set(np.flatnonzero(weights == 7.0).tolist()) == drawn
    updated = buffer.update_if_present(batch["index"], batch["generation"], {"x": np.full(20, 100)})
    assert (updated == (batch["index"] >= 5)).all()
    assert (buffer[:]["x"] == 100).sum() == len(drawn)
    assert set(np.flatnonzero(buffer.sampler.weights_at(buffer.storage, np.arange(10)) == 7.0).tolist()) == drawn


def test_T52_a_write_longer_than_the_buffer_counts_once() -> None:
    buffer = filled(4, 4, generations=True)
    buffer.extend(rows(9))
    assert buffer.generation_of(np.array([0, 1, 2, 3, -1, 4])).tolist() == [1, 1, 1, 1, -1, -1]


def test_T54_few_members_of_many() -> None:
    mixed = ReplayBufferEnsemble(*[filled(10) for _ in range(6)], num_buffer_sampled=2, batch_size=8)
    for _ in range(20):
        assert len(set(mixed.sample()["buffer_ids"].tolist())) <= 2


def test_T57_rows_are_routed() -> None:
    mixed = ReplayBufferEnsemble(filled(4), filled(0), batch_size=2)
    assert mixed.extend(rows(3), [1, 0, 1]).tolist() == [0, 4, 1]
    assert mixed.buffers[1][:]["x"].tolist() == [0, 2]
    named = ReplayBufferEnsemble(ReplayBuffer(ArrayStorage(4)), ReplayBuffer(ArrayStorage(4)))
    assert named.extend({"x": np.arange(3), "source": np.array([0, 1, 1])}, "source").tolist() == [0, 0, 1]


def test_T21_changing_many_rows() -> None:
    buffer = filled(10)
    part = buffer[2:4]
    buffer[np.array([2, 3])] = {**part, "x": part["x"] + 50}
    assert buffer[:]["x"].tolist() == [0, 1, 52, 53, 4, 5, 6, 7, 8, 9]
    with pytest.raises(SchemaError, match="new"):
        buffer[2:4] = {**part, "new": part["x"]}
    buffer[:] = {**buffer[:], "new": buffer[:]["x"] + 1}
    batch = buffer.sample()
    assert (batch["new"] == batch["x"] + 1).all()


# ---------------------------------------------------------------------- TorchRL: storages


def test_T22_C01_C02_the_first_write_allocates() -> None:
    storage = ArrayStorage(1000)
    assert storage.nbytes == 0
    buffer = ReplayBuffer(storage, batch_size=3)
    buffer.extend({"reward": np.ones(2, np.float32), "obs": np.ones((2, 4))})
    assert storage.nbytes == 1000 * (4 + 32)
    assert buffer.sample()["reward"].shape == (3,)
    with pytest.raises(SchemaError, match="expected the dtype float32 of the first write"):
        buffer.extend({"reward": np.ones(2, np.float64), "obs": np.ones((2, 4))})


def test_T23_arrays_that_exist() -> None:
    arrays = rows(10)
    buffer = ReplayBuffer(ArrayStorage(arrays=arrays), batch_size=4)
    assert len(buffer) == 10
    arrays["x"][3] = 99
    assert buffer[3]["x"] == 99


def test_T25_T46_F05_environments_are_streams() -> None:
    buffer = ReplayBuffer(ArrayStorage(40, ndim=2), SliceSampler(sequence_length=3, end_key="done"), batch_size=10)
    for step in range(14):  # more than fit
        buffer.append({"x": np.arange(4) * 1000 + step, "done": np.zeros(4, bool)})
    found = buffer.sample()["x"]
    assert (np.diff(found, axis=1) == 1).all()
    assert found.min() % 1000 >= 4
    assert len(np.unique(found // 1000)) > 1


def test_T25_indices_are_flat() -> None:
    import torch
    from tensordict import TensorDict

    from mouse_torch import ReplayBuffer as TorchBuffer

    buffer = TorchBuffer(ArrayStorage(20, ndim=2))
    indices = buffer.extend(TensorDict({"x": torch.arange(10).reshape(2, 5)}, [2, 5], names=[None, "time"]))
    assert buffer[indices[1, 3:5]]["x"].tolist() == [8, 9]
    with pytest.raises(IndexError):
        buffer[0, 3:5]


def test_T26_devices() -> None:
    from mouse_torch import ReplayBuffer as TorchBuffer
    from mouse_torch import TensorStorage

    buffer = TorchBuffer(TensorStorage(10, device="cpu"), batch_size=2, device="cpu")
    buffer.extend({"x": np.arange(3)})
    assert buffer.sample()["x"].device.type == "cpu"


def test_T27_datasets_by_their_ids_and_layouts(tmp_path: Path) -> None:
    assert set(formats.ID_SCHEMES) == {"minari", "lerobot", "hf", "tfds"}
    with pytest.raises(ConfigError, match="format: expected one of") as caught:
        formats.open(tmp_path, format="torchrl")
    for name in ("d4rl", "dopamine", "gen_dgrl", "lerobot", "minari", "openml", "roboset", "tfds"):
        assert repr(name) in str(caught.value)


def test_T27_T51_recorded_data_is_a_storage() -> None:
    store = DatasetStore()
    store.extend({"action": np.arange(6), "reward": np.ones(6), "done": np.zeros(6, np.int64)})
    buffer = ReplayBuffer(store, batch_size=3)
    assert isinstance(buffer.writer, ImmutableWriter)
    assert buffer.sample()["action"].shape == (3,)
    assert buffer.alignment == "arrived"
    with pytest.raises(ConfigError, match="may be written to"):
        buffer.append({"action": 1})


# ---------------------------------------------------------------------- TorchRL: samplers


def test_T28_F07_uniform_draws() -> None:
    buffer = filled(10)
    counts = np.bincount(np.concatenate([buffer.sample(100)["x"] for _ in range(50)]), minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 27.9  # chi-square, 9 degrees of freedom, 0.1 %


def test_T29_without_replacement() -> None:
    for shuffle in (False, True):
        buffer = filled(10, sampler=SamplerWithoutReplacement(shuffle=shuffle), batch_size=4)
        epoch = [buffer.sample()["x"].tolist() for _ in range(3)]
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        order = [row for batch in epoch for row in batch]
        assert sorted(order) == list(range(10))
        assert (order == list(range(10))) is not shuffle
    dropped = filled(10, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4)
    assert [len(dropped.sample()["x"]) for _ in range(4)] == [4, 4, 4, 4]
    begun = filled(10, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4)
    begun.sample()
    begun.extend(rows(1))
    assert begun.sample()["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="at most 10 rows"):
        filled(10, sampler=SamplerWithoutReplacement()).sample(11)
    assert len(filled(10, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=None).sample(3)["x"]) == 3


def test_T30_T31_C07_proportional_draws_and_weights() -> None:
    buffer = filled(4, sampler=PrioritizedSampler(0.5, 0.4, eps=0.0))
    priority = np.array([1.0, 4.0, 16.0, 9.0])
    buffer.update_priority(np.arange(4), priority)
    p = priority**0.5
    batches = [buffer.sample(100) for _ in range(100)]
    index = np.concatenate([batch["index"] for batch in batches])
    expected = p / p.sum() * 10_000
    assert ((np.bincount(index) - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, 0.1 %
    weights = np.concatenate([batch["priority_weight"] for batch in batches])
    np.testing.assert_allclose(weights, (p[index] / p.min()) ** -0.4, rtol=1e-6)
    assert weights.max() == 1.0


def test_T32_new_rows_have_the_largest_priority() -> None:
    sampler = PrioritizedSampler(1.0, 0.4, eps=0.0)
    buffer = filled(4, sampler=sampler)
    assert sampler.max_priority == 1.0
    buffer.update_priority(np.arange(4), np.array([0.0, 0.0, 50.0, 0.0]))
    buffer.append(buffer[0])
    assert sampler.max_priority == 50.0
    counts = np.bincount(buffer.sample(1000)["index"], minlength=5)
    assert counts[[0, 1, 3]].sum() == 0
    assert abs(counts[4] - 500) < 80


def test_T34_C08_beta_follows_a_schedule() -> None:
    buffer = filled(4, sampler=PrioritizedSampler(1.0, LinearSchedule(0.0, 1.0, samples=2), eps=0.0))
    buffer.update_priority(np.arange(4), np.array([1.0, 2.0, 2.0, 2.0]))
    lowest = [buffer.sample(64)["priority_weight"].min() for _ in range(4)]
    np.testing.assert_allclose(lowest, [1.0, 2**-0.5, 0.5, 0.5], rtol=1e-6)
    buffer.sampler.beta = 0.0  # type: ignore[attr-defined]
    assert (buffer.sample()["priority_weight"] == 1.0).all()
    with pytest.raises(AttributeError):
        buffer.sampler.alpha = 0.5  # type: ignore[attr-defined]


def test_T35_priorities_of_slices() -> None:
    buffer = filled(40, sampler=PrioritizedSliceSampler(sequence_length=4, end_key="done"), batch_size=2)
    batch = buffer.sample()
    buffer.update_priority(batch["index"], np.ones(2))
    buffer.update_priority(batch["index"], np.ones((2, 4)))
    buffer.update_priority(batch["index"], np.ones((2, 4, 1)))
    with pytest.raises(ConfigError, match="shape of the index"):
        buffer.update_priority(batch["index"], np.ones(3))
    with pytest.raises(DataError):
        buffer.update_priority(batch["index"], -np.ones(2))
    whole = PrioritizedReplayBuffer(storage=ArrayStorage(5))
    with pytest.raises(SchemaError, match="one priority for each row"):
        whole.extend({"x": np.zeros((3, 4)), "td_error": np.ones((3, 4))})
    assert len(whole) == 0
    reduced = PrioritizedReplayBuffer(1.0, eps=0.0, storage=ArrayStorage(5), priority_reduction="max")
    reduced.extend({"x": np.zeros((2, 4)), "td_error": np.arange(8.0).reshape(2, 4)})
    assert reduced.sampler.weights_at(reduced.storage, np.arange(2)).tolist() == [3.0, 7.0]
    reduced.update_priority([0], np.array([[1.0, 9.0, 2.0, 3.0]]))
    assert reduced.sampler.weights_at(reduced.storage, np.arange(2)).tolist() == [9.0, 7.0]


def test_T36_T38_shapes_of_slices() -> None:
    assert sliced(sequence_length=5, end_key="done").sample()["x"].shape == (4, 5)
    assert sliced(sequence_length=4, end_key="done", batch_size=5).sample()["x"].shape == (5, 4)


@pytest.mark.parametrize("key", [{"end_key": "done"}, {"traj_key": "episode"}, {}])
def test_T37_F04_slices_stay_within_episodes(key: dict[str, str]) -> None:
    for _ in range(3):
        batch = sliced(95, 60, sequence_length=4, batch_size=100, **key).sample()
        assert (np.diff(batch["x"], axis=1) == 1).all()
        assert (batch["episode"] == batch["episode"][:, :1]).all()
        assert (batch["traj_id"] == batch["traj_id"][:, :1]).all()
    without_done = ReplayBuffer(ArrayStorage(40), SliceSampler(sequence_length=4), batch_size=100)
    without_done.extend({**rows(40), "done": np.zeros(40, bool)})
    batch = without_done.sample()
    assert (batch["episode"] == batch["episode"][:, :1]).all()


def short_episodes(**options: Any) -> ReplayBuffer:
    """Episodes of 2 and of 10 steps."""
    buffer = ReplayBuffer(
        ArrayStorage(100), SliceSampler(sequence_length=4, end_key="done", **options), batch_size=100, seed=2
    )
    done = np.zeros(12, np.int8)
    done[[1, 11]] = 1
    buffer.extend({"x": np.arange(12), "done": done})
    return buffer


def test_T39_shorter_episodes() -> None:
    assert short_episodes(pad=False).sample()["x"].min() >= 2
    batch = short_episodes(strict_length=False, pad=False).sample()
    assert batch["x"].ndim == 1
    assert {0, 1} <= set(batch["x"].tolist())
    assert batch["slice_id"].shape == batch["x"].shape


def test_T40_padding() -> None:
    batch = short_episodes().sample()
    short = batch["x"][:, 0] == 0
    assert short.any()
    assert (batch["x"][short] == [0, 1, 1, 1]).all()
    assert (batch["mask"][short] == [True, True, False, False]).all()
    assert batch["mask"][~short].all()
    filled_up = short_episodes(pad=-1).sample()
    assert (filled_up["x"][filled_up["x"][:, 0] == 0] == [0, 1, -1, -1]).all()


def test_T41_span() -> None:
    batch = short_episodes(span=(False, True)).sample()
    lengths = batch["mask"].sum(axis=1)
    assert set(lengths[batch["x"][:, 0] >= 2].tolist()) == {1, 2, 3, 4}
    for kind in (SliceSampler, PrioritizedSliceSampler):
        strict = filled(12, sampler=kind(sequence_length=4, traj_key="x", pad=False, span=(False, True)), batch_size=1)
        with pytest.raises(ConfigError, match="at least 4 steps"):
            strict.sample()
    with pytest.raises(ConfigError, match="span"):
        PrioritizedSliceSampler(sequence_length=4, span=3)


def test_T37_a_key_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MissingFieldError, match="trajectory"):
        sliced(sequence_length=4, traj_key="trajectory").sample()


def test_T40_the_mask_is_always_there() -> None:
    assert sliced(sequence_length=5, end_key="done").sample()["mask"].all()


def test_T42_both_weightings() -> None:
    steps, trajectories = (
        (short_episodes(pad=True, weighting=weighting).sample()["x"][:, 0] < 2).mean()
        for weighting in ("step", "trajectory")
    )
    assert abs(steps - 1 / 8) < 0.12  # 7 slices of the long episode, 1 of the short one
    assert abs(trajectories - 1 / 2) < 0.2


def test_T43_ends_of_slices_are_not_written_over() -> None:
    batch = sliced(40, sequence_length=4, end_key="done", batch_size=5).sample()
    np.testing.assert_array_equal(batch["done"], rows(40)["done"][batch["x"]])
    summed = NStep(3, 1.0)({name: batch[name] for name in ("reward", "done")})
    assert summed["steps"][:, -1].tolist() == [1] * 5


def test_T43_T44_begins_and_ends_of_slices_are_marked() -> None:
    marks = MarkSlices(first="is_init", last=[("next", "truncated"), ("next", "done")])
    sampler = SliceSampler(sequence_length=4, end_key="done", pad=False)
    buffer = filled(sampler=sampler, transform=marks, batch_size=4)
    batch = buffer.sample()
    assert batch["is_init"].tolist() == [[True, False, False, False]] * 4
    for key in ("truncated", "done"):
        assert batch["next"][key].tolist() == [[False, False, False, True]] * 4
    np.testing.assert_array_equal(batch["done"], rows(40)["done"][batch["x"]])
    assert "next" not in buffer[0]


def test_T47_slices_without_replacement() -> None:
    buffer = filled(40, sampler=SliceSamplerWithoutReplacement(sequence_length=5, end_key="done"), batch_size=2)
    epoch = np.concatenate([buffer.sample()["x"].ravel() for _ in range(4)])
    assert sorted(epoch.tolist()) == list(range(40))


def test_T48_prioritised_slices() -> None:
    buffer = filled(
        40, sampler=PrioritizedSliceSampler(1.0, 0.4, 0.0, sequence_length=4, end_key="done"), batch_size=100
    )
    priority = np.zeros(40)
    priority[[3, 8, 25]] = 1.0, 100.0, 3.0  # row 8 is too near the end of its episode
    buffer.update_priority(np.arange(40), priority)
    begins = buffer.sample()["x"][:, 0]
    assert set(begins.tolist()) == {3, 25}
    assert abs((begins == 25).mean() - 0.75) < 0.15


# ---------------------------------------------------------------------- TorchRL: writers and ensembles


def test_T49_ring() -> None:
    buffer = ReplayBuffer(ArrayStorage(4))
    assert buffer.extend({"x": np.arange(6)}).tolist() == [0, 1, 2, 3, 0, 1]
    assert buffer[:]["x"].tolist() == [4, 5, 2, 3]


def test_T50_the_best_rows() -> None:
    buffer = ReplayBuffer(ArrayStorage(2), writer=MaxValueWriter("reward", "sum"))
    assert [buffer.append({"reward": np.float64(value)}) for value in (1, 5, 0, 3)] == [0, 1, -1, 0]
    assert sorted(buffer[:]["reward"].tolist()) == [3, 5]
    middle = ReplayBuffer(ArrayStorage(1), writer=MaxValueWriter("reward", "median"))
    middle.extend({"reward": np.array([[0.0, 4.0], [1.0, 2.0]])})
    assert middle[0]["reward"].tolist() == [0.0, 4.0]


@pytest.mark.parametrize("parts", [{"transform": NextView()}, {"sampler": SliceSampler(sequence_length=2)}])
def test_F03_F04_rows_say_where_they_end(parts: dict[str, Any]) -> None:
    buffer = ReplayBuffer(ArrayStorage(10), batch_size=4, **parts)
    buffer.extend({"x": np.arange(5)})
    with pytest.raises(MissingFieldError, match="done"):
        buffer.sample()
    endless = ReplayBuffer(ArrayStorage(10), batch_size=4, **parts)
    endless.extend({"x": np.arange(5), "done": np.zeros(5, np.bool_)})
    assert endless.sample()["mask"].any()


def test_T53_T55_T56_F11_ensembles_are_exact() -> None:
    members = [filled(10, transform=lambda batch: {**batch, "x": batch["x"] + 1}), filled(40)]
    mixed = ReplayBufferEnsemble(
        *members, p=[0.25, 0.75], transform=lambda batch: {**batch, "x": batch["x"] * 100}, batch_size=16
    )
    for _ in range(5):
        batch = mixed.sample()
        assert np.bincount(batch["buffer_ids"]).tolist() == [4, 12]
        wanted = 100 * (batch["index"] + (batch["buffer_ids"] == 0))
        assert batch["x"].tolist() == wanted.tolist()
        assert batch["buffer_ids"].tolist() == sorted(batch["buffer_ids"].tolist())
    assert mixed.buffers[1] is members[1]
    listed = ReplayBufferEnsemble(*members, batch_size=4, collate_fn=lambda parts: {"parts": len(parts)})
    assert listed.sample()["parts"] == 2


# ---------------------------------------------------------------------- TorchRL: transforms


def test_T58_T59_F03_C04_C05_steps_are_summed_when_read() -> None:
    buffer = ReplayBuffer(ArrayStorage(100), transform=[NextView(), NStep(3, 0.5)], batch_size=200)
    buffer.extend(rows(10))  # all of them can be drawn at once
    batch = buffer.sample()
    assert set(batch["x"].tolist()) == set(range(10))
    last = np.minimum(batch["x"] + 2, 9)
    np.testing.assert_array_equal(batch["next"]["done"], last == 9)
    np.testing.assert_allclose(batch["next"]["reward"], 2 - 0.5 ** (last - batch["x"]))
    np.testing.assert_allclose(batch["discount"], 0.5 ** (last - batch["x"] + 1))
    np.testing.assert_array_equal(batch["next"]["x"], np.minimum(batch["x"] + 3, 9))
    assert batch["mask"].all()
    other = ReplayBuffer(buffer.storage, transform=[NextView(), NStep(5, 0.5)], batch_size=200)
    assert other.sample()["steps"].max() == 5


def test_T60_returns_when_written() -> None:
    buffer = ReplayBuffer(ArrayStorage(100), transform=OnWrite(ReturnsToGo(1.0)), batch_size=5)
    buffer.extend(rows(10))
    assert buffer[:]["return_to_go"].tolist() == list(range(10, 0, -1))


def test_T61_crops() -> None:
    batch = {"x": np.tile(np.arange(4), (200, 1)), "index": np.zeros((200, 4), int)}
    assert set(RandomTimeCrop(2)(batch, KEY)["x"][:, 0].tolist()) == {0, 1, 2}
    assert (RandomTimeCrop(4)(batch, KEY)["x"] == np.arange(4)).all()


def test_T62_where_there_is_no_next() -> None:
    buffer = ReplayBuffer(ArrayStorage(100), transform=NextView(), batch_size=200)
    buffer.extend({"x": np.arange(5), "done": np.array([0, 2, 0, 0, 0])})
    batch = buffer.sample()
    np.testing.assert_array_equal(batch["mask"], ~np.isin(batch["x"], [1, 4]))
    np.testing.assert_array_equal(batch["next"]["x"][batch["mask"]], batch["x"][batch["mask"]] + 1)
    assert batch["next"]["x"].dtype == np.int64
    flags = ("done", "terminated", "truncated")
    up = [Exclude(*flags), Rename({("next", name): name for name in ("reward", *flags)})]
    compact = ReplayBuffer(ArrayStorage(100), transform=[*up, NextView()], batch_size=50)
    ends = rows(9, 3)["done"].astype(bool)
    root = dict.fromkeys(flags, np.zeros(9, bool))
    after = {"done": ends, "terminated": ends, "truncated": root["done"], "reward": np.ones(9)}
    compact.extend({"x": np.arange(9), **root, "next": after})
    batch = compact.sample()
    inside = batch["next"]["done"] == 0
    np.testing.assert_array_equal(batch["next"]["x"][inside], batch["x"][inside] + 1)


def test_T63_names_dtypes_and_images() -> None:
    transform = Compose(
        Rename({"pixels": "image"}),
        Exclude("secret"),
        Resize("image", size=(2, 2)),
        ToFloatImage("image", channels="first"),
        Cast(every={"float64": "float32"}),
        Select("image", "value"),
    )
    batch = {
        "pixels": np.full((3, 4, 4, 1), 255, np.uint8),
        "secret": np.ones(3),
        "value": np.ones(3),
        "other": np.ones(3),
    }
    found = transform(batch)
    assert found.keys() == {"image", "value"}
    assert found["image"].shape == (3, 1, 2, 2)
    assert (found["image"] == 1).all()
    assert found["value"].dtype == np.float32


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_T64_C11_hindsight(strategy: Any) -> None:
    relabel = HindsightRelabel(
        compute_reward=lambda achieved, goal, batch: (achieved == goal).astype(np.float32)[..., 0],
        strategy=strategy,
        ratio=0.5,
    )
    buffer = ReplayBuffer(ArrayStorage(100), transform=relabel, batch_size=300)
    place = np.arange(40.0)[:, None]
    buffer.extend(
        {
            "achieved_goal": place,
            "desired_goal": np.full((40, 1), -1.0),
            "reward": np.zeros(40, np.float32),
            "done": rows(40)["done"],
            "next": {"achieved_goal": place + 1},
        }
    )
    batch = buffer.sample()
    changed = batch["relabelled"]
    assert abs(changed.mean() - 0.5) < 0.12
    assert (batch["desired_goal"][~changed] == -1).all()
    if strategy != "random":
        reached, drawn = batch["desired_goal"][changed, 0] - 1, batch["achieved_goal"][changed, 0]
        assert (reached // 10 == drawn // 10).all()
        assert (reached >= drawn).all() == (strategy != "episode")
        assert (reached - drawn).max() == 9 or strategy == "episode"
        assert ((reached % 10 == 9).all()) == (strategy == "final")
    wanted = batch["desired_goal"][..., 0] == batch["next"]["achieved_goal"][..., 0]
    np.testing.assert_array_equal(batch["reward"], wanted & changed)


def test_T65_C09_priorities_in_the_batch() -> None:
    buffer = PrioritizedReplayBuffer(1.0, 0.4, eps=0.0, storage=ArrayStorage(10), batch_size=4)
    buffer.extend({"x": np.arange(3), "td_error": np.array([0.0, 1.0, 0.0])})
    batch = buffer.sample()
    assert (batch["x"] == 1).all()
    batch["td_error"] = np.full(4, 2.0)
    buffer.update_priority(batch)
    assert buffer.sampler.max_priority == 2.0  # type: ignore[attr-defined]


def test_T81_T82_functions_of_fields() -> None:
    scaling = Scaling("mean_std", np.array(20.0), np.array(10.0))
    buffer = filled(
        transform=Apply({"x": scaling.apply, "reward": lambda reward: (3 * reward + 1).clip(-1, 2)}), batch_size=50
    )
    batch = buffer.sample()
    np.testing.assert_allclose(batch["x"], (batch["index"] - 20) / 10, rtol=1e-6)
    assert set(batch["reward"].tolist()) == {2}


def test_T88_running_normalisation() -> None:
    norm = VecNorm("x")
    buffer = filled(40, 20, transform=norm)
    assert abs(buffer.sample()["x"]).max() < 1.8
    assert norm.normalizer["x"].centre == np.arange(20, 40).mean()  # one write of more rows than there is room for
    buffer.extend(rows(20))
    buffer.sample()
    assert norm.normalizer["x"].centre == np.arange(40).mean()


def test_T83_T85_images_and_vectors() -> None:
    batch = {"image": np.full((2, 5, 5, 3), 200, np.uint8), "a": np.ones((2, 3)), "b": np.zeros((2, 1))}
    found = Compose(GrayScale("image"), CenterCrop("image", size=(3, 3)), Concatenate("a", "b", to="obs"))(batch)
    assert found["image"].tolist() == np.full((2, 3, 3, 1), 200).tolist()
    assert found["obs"].shape == (2, 4)


def test_T84_T86_T87_frames_states_and_rewards() -> None:
    slices = {"obs": np.arange(8.0).reshape(2, 4, 1), "reward": np.tile([0.0, 0, 3, 0], (2, 1)),
              "done": np.array([[0, 0, 1, 0]] * 2)}  # fmt: skip
    assert CatFrames("obs", frames=2)(slices)["obs"][0].tolist() == [[0, 0], [0, 1], [1, 2], [3, 3]]
    ahead = sliced(sequence_length=4, end_key="done", pad=True, span=(False, True), batch_size=400).sample()
    assert set(ahead["x"][:, 0].tolist()) == set(range(40))
    assert ReturnsToGo(to="reward")(slices)["reward"][0].tolist() == [3, 3, 3, 0]
    burnt = BurnIn(lambda first: {"hidden": first["obs"].sum(axis=1)}, steps=2)(slices)
    assert burnt["hidden"].tolist() == [[1], [9]]
    assert burnt["obs"].shape == (2, 2, 1)


def test_T66_steps_to_burn_in_are_the_first_of_a_slice() -> None:
    batch = sliced(sequence_length=5, end_key="done", pad=True, span=(False, True), batch_size=200).sample()
    assert set(batch["x"][:, 0].tolist()) == set(range(40))
    assert (batch["episode"] == batch["episode"][:, :1]).all()
    assert (batch["mask"].sum(axis=1) == np.minimum(5, 10 - batch["x"][:, 0] % 10)).all()


def test_T66_sequences_begin_at_every_row() -> None:
    burn_in, length, bootstrap = 2, 3, 1
    steps = burn_in + length + bootstrap
    for kind in (SliceSampler, PrioritizedSliceSampler):
        options = {"sequence_length": steps, "end_key": "done", "burn_in": burn_in}
        batch = filled(sampler=kind(**options, span=(False, True)), batch_size=600).sample()
        anchors = batch["x"][:, burn_in]
        assert set(anchors.tolist()) == set(range(40))
        offsets = anchors[:, None] % 10 + np.arange(-burn_in, length + bootstrap)
        assert (batch["mask"] == ((offsets >= 0) & (offsets < 10))).all()
        stopped = filled(sampler=kind(**options), batch_size=200).sample()
        assert stopped["mask"][:, burn_in:].all()
        thin = filled(sampler=kind(**options, dilation=2), batch_size=20).sample()
        assert (np.diff(thin["x"])[thin["mask"][:, :-1]] == 2).all()


def test_T19_F13_rows_are_consumed() -> None:
    buffer = filled(20, sampler=ConsumingSampler(3))
    seen = np.concatenate([batch["x"] for batch in buffer])
    assert np.bincount(seen).tolist() == [3] * 20
    assert len(buffer) == 20
    queue = ReplayBuffer(ArrayStorage(5), ConsumingSampler(shuffle=False, drop_last=True), batch_size=2)
    queue.extend({"obs": np.arange(3 * 4 * 2).reshape(3, 4, 2)})
    assert queue.sample()["obs"].tolist() == np.arange(16).reshape(2, 4, 2).tolist()
    with pytest.raises(ConfigError, match="found 1 of 3"):
        queue.sample()
    assert 5 - queue.sampler.left == 4


def test_T33_the_largest_priority_within_the_buffer() -> None:
    for sampler in (PrioritizedSampler, PrioritizedSliceSampler):
        made = inspect.signature(sampler).parameters["max_priority_within_buffer"]
        assert made.default is False
    buffer = filled(4, sampler=PrioritizedSampler(1.0, eps=0.0, max_priority_within_buffer=True))
    buffer.update_priority(np.arange(4), np.array([5.0, 1.0, 1.0, 2.0]))
    buffer.update_priority([0], [1.0])
    assert buffer.sampler.max_priority == 2.0


def test_F06_slices_begin_at_multiples() -> None:
    batch = sliced(sequence_length=4, end_key="done", pad=False, period=3, batch_size=200).sample()
    assert set(batch["x"][:, 0].tolist()) == {
        start for begin in range(0, 40, 10) for start in (begin, begin + 3, begin + 6)
    }


def test_C12_rows_backwards() -> None:
    buffer = filled(10, sampler=ReverseSampler(3), batch_size=3)
    assert [buffer.sample()["x"].tolist() for _ in range(2)] == [[9, 6, 3], [8, 5, 2]]


def test_T67_versions_of_the_policy() -> None:
    buffer = filled(20, sampler=StalenessSampler(1, weight=lambda age: 1 / (age + 1), version_key="episode"))
    assert set(buffer.sample(100)["x"].tolist()) == set(range(20))
    buffer.sampler.version = 2
    batch = buffer.sample(100)
    assert batch["x"].min() >= 10
    assert set(batch["staleness"].tolist()) == {1}
    buffer.sampler.version = 9
    with pytest.raises(ConfigError, match="versions before 9"):
        buffer.sample(4)
    assert len(buffer) == 20


def test_T67_T68_rollouts_in_groups_and_by_version() -> None:
    from mouse_core.groups import GrpoBatchMaker, TopK

    assert {"max_staleness", "retention"} <= inspect.signature(GrpoBatchMaker).parameters.keys()
    assert callable(TopK(2))


def test_T90_divergence_of_tokens() -> None:
    student, teacher = np.log([[0.5, 0.2, 0.9]]), np.log([[0.6, 0.1, 0.9]])
    ahead = teacher - student
    found = kl_estimates(student, teacher, np.ones((1, 3), np.bool_), estimator="k3")
    np.testing.assert_allclose(found, np.expm1(ahead) - ahead)


def test_T69_episodes_by_what_is_in_them() -> None:
    buffer = filled(40, 25)
    found = query(buffer, lambda episode: episode["reward"].sum() >= 10 and not (episode["x"] > 35).any())
    assert [buffer[index]["x"].tolist() for index in found] == [[*range(20, 30)]]


def test_T80_first_and_last_slots_of_episodes() -> None:
    buffer = ReplayBuffer(ArrayStorage(10))
    done = np.isin(np.arange(15), [7, 12])
    for part in (slice(10), slice(10, 15)):  # the newest row is in slot 4
        buffer.extend({"done": done[part]})
    found = [(slots[0], slots[-1], len(slots)) for slots in query(buffer)]
    assert sorted(found) == [(3, 4, 2), (5, 7, 3), (8, 2, 5)]
    arrays = {"done": np.array([0, 0, 1, 0, 0, 0], np.bool_)}
    assert [slots.tolist() for slots in query(ReplayBuffer(ArrayStorage(arrays=arrays)))] == [[0, 1, 2], [3, 4, 5]]


def test_T70_packed_rows() -> None:
    buffer = ReplayBuffer(ListStorage(10), transform=Compress("x", shape=(), dtype="int64"), batch_size=20)
    buffer.extend(rows(10))
    assert isinstance(buffer[3]["x"], bytes)
    assert set(buffer.sample()["x"].tolist()) <= set(range(10))


def test_T71_T91_T92_T93_maps_of_rows() -> None:
    table = RowMap(keys=["obs"])
    source = {"obs": np.array([[1.0], [2.0], [1.0]]), "else": np.zeros(3)}
    table[source] = {"value": np.array([1, 2, 3])}
    assert table[source]["value"].tolist() == [3, 2, 3]
    assert table.contains({"obs": np.array([[2.0], [4.0]])}).tolist() == [True, False]
    assert table.index({"obs": np.array([[2.0], [4.0]])}).tolist() == [1, -1]
    with pytest.raises(KeyError, match="are not"):
        table[{"obs": np.array([[4.0]])}]
    assert table.get({"obs": np.array([[4.0]])}, 0)["value"].tolist() == [0]
    table.accumulate(source, {"value": 1})
    assert table[source]["value"].tolist() == [5, 3, 5]
    assert len(table) == 2
    numbers = RowMap()
    assert [numbers.extend(np.array(values)).tolist() for values in ([7, 3], [3, 9])] == [[0, 1], [1, 2]]
    assert hash_to_int([7, 3, 7]).tolist() == [0, 1, 0]


def test_T94_T95_T96_hashes_and_codes() -> None:
    rows = np.eye(2000, dtype=np.float32)[:3]
    assert row_hash(rows).shape == (3, 2)
    assert (row_hash(rows) == row_hash(rows.copy())).all()
    assert not (row_hash(rows) == row_hash(rows, seed=1)).any()
    code = random_projection(rows, 16)
    assert code.shape == (3, 16)
    assert binary_to_decimal(code > 0).shape == (3,)
    assert binary_to_decimal(np.array([[0.0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 10, 0]]), width=4).tolist() == [
        3,
        2,
    ]


def test_T72_T97_what_has_another_name() -> None:
    from mouse_core import trees

    assert not hasattr(ReplayBuffer, "register_save_hook")
    assert {"Forest", "Tree"} <= set(trees.__all__)


def test_T72_checkpoints_with_each_observation_once(tmp_path: Path) -> None:
    from mouse_core.formats.ted import H5Combine, H5Split, TED2Nested, read_checkpoint, write_checkpoint

    t = np.arange(6)
    done = np.isin(t, (2, 5))[:, None]
    ted = {"x": t, "action": t, "next": {"x": t + 1, "reward": t[:, None], "done": done}}
    for layout in ("flat", "nested", "h5"):
        buffer = ReplayBuffer(ArrayStorage(10))
        buffer.extend(ted)
        write_checkpoint(buffer, tmp_path / layout, layout=layout)
        found = read_checkpoint(tmp_path / layout)
        assert found["x"].tolist() == t.tolist()
        assert found["next"]["x"].tolist() == (t + 1).tolist()
    nested = TED2Nested(ted)
    assert H5Combine(H5Split(nested))["x"][1].tolist() == nested["x"][1].tolist() == [3, 4, 5, 6]


def without_reward(rows: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 0.0 * rows["reward"]}


def test_T75_a_function_over_all_rows(tmp_path: Path) -> None:
    store = example_store(40)
    made = [preprocess(store, without_reward, tmp_path / "new", columns=["reward"]) for _ in range(2)]
    assert [row["reward"] for row in made[0].to_store()[:]] == [0.0] * 40
    assert [one.reopened for one in made] == [False, True]


def test_T76_recorded_rows_and_then_fresh_ones() -> None:
    recorded, online = filled(40), ReplayBuffer(ArrayStorage(100))
    both = ReplayBufferEnsemble(recorded, online, p=Schedule({0: [1, 0], 2: [0.5, 0.5]}), batch_size=8)
    assert [both.sample()["buffer_ids"].sum() for _ in range(2)] == [0, 0]
    with pytest.raises(ConfigError, match="found buffer 1 empty"):
        both.sample()
    online.extend(rows(5))
    assert both.sample()["buffer_ids"].sum() == 4
    online.extend(recorded[:])
    assert len(online) == 45


def test_T77_windows_of_tokens_are_a_queue() -> None:
    queue = ReplayBuffer(ArrayStorage(10, ragged=["tokens"]), ConsumingSampler(shuffle=False), batch_size=2)
    queue.extend([{"tokens": np.arange(n)} for n in (3, 1, 2)])
    found = []
    while queue.sampler.left:
        found += [len(tokens) for tokens in queue.sample()["tokens"]]
    assert found == [3, 1, 2]


def test_T79_T89_texts_once_each_epoch_and_on_from_anywhere(tmp_path: Path) -> None:
    from mouse_core import text

    def letters(texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[*one.encode()] for one in texts]}

    data = [{"prompt": chr(97 + n), "label": "!"} for n in range(7)]
    made = text.tokenize(data, letters, tmp_path, text.Prompts(max_length=4, pad_id=0, eos_id=1))
    assert made.rows == 7  # which TorchRL leaves out, as they end in 0 and not in 1
    loader = PrefetchBatchifier(made.to_store(), batch_size=2, windows={}, sampling="sequential")
    epochs = [[int(one) for _ in range(3) for one in loader.next_batch()["input_ids"][:, 0]] for _ in range(2)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert epochs[0] != epochs[1]
    state = loader.state_dict()
    on = PrefetchBatchifier(made.to_store(), batch_size=2, windows={}, sampling="sequential")
    on.load_state_dict(state)
    assert on.next_batch()["input_ids"].tolist() == loader.next_batch()["input_ids"].tolist()


def test_T98_T99_parts_lengths_and_histories(tmp_path: Path) -> None:
    from mouse_core import text
    from mouse_core.text import chat
    from tests.core.chat_cases import CHATML, TALK, template, tokenizer

    def letters(texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[*one.encode()] for one in texts]}

    data = [{"other": "abc" * n, "prompt": "a", "label": "b"} for n in range(1, 21)]
    store = text.tokenize(data, letters, tmp_path, text.Tokens(text="other")).to_store()
    assert len(store) == sum(len(one["other"]) for one in data)
    parts = store.split(train=0.75, valid=0.25)
    assert len(parts["train"]) + len(parts["valid"]) == len(store)
    pairs = text.Pairs(max_length=70, pad_id=0, prompt="prompt", chosen="other", rejected="label", min_words=0)
    source = BatchSource(
        text.tokenize(data, letters, tmp_path, pairs).to_store(), batch_size=5, windows={}, sampling="sequential"
    )
    assert len(source) == 4
    assert text.as_pairs(source[4])["chosen_data"]["input_ids"].shape == (5, 70)

    history = (*TALK[:2], chat.Message("user", "who?"))
    encoded = chat.encode_chat(template(CHATML), [*history, TALK[3]], tokenizer())
    assert not template(CHATML).has_generation
    assert encoded.assistant_masks.sum() > 0
    assert chat.from_turns(chat.to_turns(encoded)) == (*history, TALK[3])


def test_T73_every_storage_has_a_size() -> None:
    assert ListStorage().capacity == 1000
    with pytest.raises(ConfigError):
        ArrayStorage()


# ---------------------------------------------------------------------- flashbax and cpprb


def test_F01_pytrees_of_jax() -> None:
    import jax

    import mouse_jax

    buffer = mouse_jax.ReplayBuffer(ArrayStorage(10), batch_size=4)
    buffer.extend({"x": np.arange(3.0, dtype=np.float32)})
    assert jax.jit(lambda batch: batch["x"].sum())(buffer.sample()) >= 0
    with mouse_jax.PrefetchBatchifier(buffer) as loader:
        assert isinstance(loader.next_batch()["x"], jax.Array)


def test_F08_F09_priorities() -> None:
    buffer = PrioritizedReplayBuffer(alpha=0.6, storage=ArrayStorage(10), batch_size=4)
    buffer.extend(rows(5))
    batch = buffer.sample()
    buffer.update_priority(batch["index"], np.ones(4))
    assert batch["priority_weight"].dtype == np.float32


def test_F10_too_little() -> None:
    with pytest.raises(ConfigError, match="empty buffer"):
        ReplayBuffer(ArrayStorage(10), batch_size=4).sample()
    with pytest.raises(ConfigError, match="at most 3 rows"):
        filled(3, sampler=SamplerWithoutReplacement()).sample()
    with pytest.raises(ConfigError):
        sliced(3, sequence_length=4, end_key="done", pad=False).sample()


def test_F12_C14_nothing_is_lost_and_damage_is_found(tmp_path: Path) -> None:
    buffer = filled(37)
    buffer.dumps(tmp_path / "file")
    other = ReplayBuffer(ArrayStorage(100))
    other.loads(tmp_path / "file")
    assert other[:]["x"].tolist() == list(range(37))
    content = bytearray((tmp_path / "file").read_bytes())
    content[100] ^= 1
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StateError):
        other.loads(tmp_path / "file")


def test_C16_rows_are_stored_as_the_environment_gives_them() -> None:
    buffer = ReplayBuffer(ArrayStorage(10))
    given = {"obs": {"image": np.zeros((2, 2), np.uint8), "pair": (np.float32(1), 3)}, "reward": 0.5}
    buffer.append(given)
    found = buffer[0]
    assert found["obs"]["image"].dtype == np.uint8
    assert found["obs"]["pair"] == given["obs"]["pair"]


def test_C03_rows_of_one_and_of_many() -> None:
    buffer = ReplayBuffer(ArrayStorage(10))
    buffer.append({"obs": np.array([1, 2, 3])})
    buffer.extend({"obs": np.array([[1, 2, 3], [4, 5, 6]])})
    assert buffer[:]["obs"].tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 6]]


def test_C06_stacked_frames_are_stored_once() -> None:
    buffer = ReplayBuffer(ArrayStorage(100), transform=CatFrames("obs", frames=3), batch_size=50)
    buffer.extend({**rows(40), "obs": np.arange(40)[:, None]})
    found = buffer.sample()
    begin = found["x"] // 10 * 10
    wanted = [np.maximum(found["x"] - back, begin) for back in (2, 1, 0)]
    np.testing.assert_array_equal(found["obs"], np.stack(wanted, axis=1))


# ---------------------------------------------------------------------- MOUSE


def steps(n: int = 8, first: int = 1, **fields: Any) -> DatasetStore:
    store = DatasetStore(**fields)
    for step in range(n):
        store.append({"action": step + first, "reward": float(step), "done": 0})
    return store


def test_M01_M02_M03_rows_of_a_store() -> None:
    store = steps(3)
    assert len(store) == 3
    with pytest.raises(DataError, match=r"append: expected a dict, found a DatasetStore; extend\(other\[:\]\)"):
        store.append(steps(2, 8))  # type: ignore[arg-type]
    store.extend(steps(2, 8)[:])
    store.from_dataset(steps(1, 20).to_dataset())
    assert [row["action"] for row in store[[5, 0, 4]]] == [20, 1, 9]
    assert store[0] == {"action": 1, "reward": 0.0, "done": 0}


def test_M04_datasets_and_appended_rows() -> None:
    store = DatasetStore()
    for step in range(3):
        store.append({"action": step % 2, "reward": float(step), "done": 0, "step_index": step, "group_id": "a#0"})
    dataset = store.to_dataset()
    again = DatasetStore().from_dataset(dataset)
    again.append({"action": 7, "reward": 0.0, "done": 0, "step_index": 3, "group_id": "b#0"})
    assert len(dataset) == 3
    assert [row["action"] for row in again[:]] == [0, 1, 0, 7]
    assert again[3]["group_id"] == "b#0"


def test_M05_vectors_of_one_and_M06_rows_of_dicts() -> None:
    row = {"action": 0, "reward": 0.0, "done": 0}
    store = DatasetStore()
    store.extend({name: [value] * 2 for name, value in row.items()} | {"observation_discrete": [[3], [4]]})
    assert BatchSource(store, 2, 1)[0]["obs_discrete"].tolist() == [[3, 4]]
    with pytest.raises(DataError, match="column 'observation': expected numbers or lists of numbers, found struct"):
        DatasetStore().append(row | {"observation": {"discrete": 0}})
    flat = DatasetStore()
    flat.append(row | {"observation": [0.5], "observation_discrete": 3})
    batch = BatchSource(flat, 1, 1)[0]
    assert batch["obs_discrete"].tolist() == [[3]]
    assert batch["obs_continuous"].tolist() == [[[0.5]]]


def test_M07_codes_of_tasks() -> None:
    with pytest.raises(DataError, match="expected one of 0"):
        steps(1).append({"action": 0, "reward": 0.0, "done": 4})
    field = Field("done", dtype="int64", shape=(), bounds=(0, 4), required=True)
    store = steps(1, fields=[field])
    store.append({"action": 0, "reward": 0.0, "done": 4})
    assert BatchSource(store, 2, 1)[0]["done"].tolist() == [[0, 4]]


def test_M08_M09_short_windows_and_stores() -> None:
    with pytest.raises(ConfigError, match="expected at least 1 window of 4 steps"):
        BatchSource(steps(1), 4, 1)
    batch = BatchSource(steps(3), 8, 1, boundary="episode", pad=0)[0]
    assert batch["mask"].tolist() == [[True] * 3 + [False] * 5]
    assert batch["action"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]
    with pytest.raises(ConfigError, match="expected rows, found an empty store"):
        PrefetchBatchifier(DatasetStore(), 2, 1)


def test_M10_M11_seeds_and_workers() -> None:
    wanted = [BatchSource(steps(), 3, 2, seed=42)[index]["action"] for index in range(5)]
    for workers in (0, 1, 2):
        with PrefetchBatchifier(steps(), 3, 2, seed=42, num_workers=workers) as loader:
            assert all(np.array_equal(loader.next_batch()["action"], action) for action in wanted)


def test_M12_refresh() -> None:
    store = steps(3)
    with PrefetchBatchifier(store, 3, 1) as loader:
        loader.next_batch()
        store.append({"action": 4, "reward": 0.0, "done": 0})
        assert 4 not in loader.next_batch()["action"]
        loader.refresh()
        assert len(loader.source.snapshot) == 4
        assert any(4 in loader.next_batch()["action"] for _ in range(40))


def test_M13_several_stores() -> None:
    store = steps(4).from_dataset(steps(4, 10).to_dataset())
    assert {"stores", "weights", "preparer"}.isdisjoint(inspect.signature(PrefetchBatchifier).parameters)
    assert BatchSource(store, 8, 1, "last")[0]["action"].tolist() == [[1, 2, 3, 4, 10, 11, 12, 13]]


def test_M14_an_augmenter_is_an_option() -> None:
    config = AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(reward=1.0))
    with PrefetchBatchifier(steps(), 3, 2, augment=config) as loader:
        assert not loader.next_batch()["reward"].any()
