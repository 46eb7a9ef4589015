"""Batches as tensors: the way to a device, pinned memory, and sources in torch's DataLoader."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.mixtures import MixtureSource
from mouse_core.prefetch import Delivery, Loader
from mouse_core.sampling import SAMPLERS
from mouse_core.testing import as_arrays, example_columns, example_store
from mouse_torch import PrefetchBatchifier
from mouse_torch.prefetch import whole_maker
from mouse_torch.transfer import by_one_copy, device_maker, hand_over, host_maker, slab_tensors, torch_dtype
from tests.core.augment_cases import full_config, make_store
from tests.core.oracle import assert_same

CPU = torch.device("cpu")


def store_of(rows: int = 60) -> DatasetStore:
    numbers = np.arange(rows)
    columns: dict[str, Any] = {
        "action": (numbers % 3).astype(np.int8),
        "reward": numbers * 0.5,
        "done": np.zeros(rows, np.uint8),
        "episode_step": pa.array([None if n % 5 == 0 else n for n in range(rows)], pa.uint16()),
        "metadata_q_star": pa.array([[n * 1.0] * (1 + n % 3) for n in range(rows)], pa.list_(pa.float16())),
        "observation": pa.array([[n * 0.25] * 3 for n in range(rows)], pa.list_(pa.float32())),
        "observation_discrete": pa.array(numbers, pa.uint32()),
        "observation_image": pa.array([[[n % 256, 1], [2, 3]] for n in range(rows)], pa.list_(pa.list_(pa.uint8()))),
        "flag": pa.array(numbers % 2 == 0),
        "odd": pa.array([[n % 128] * 7 for n in range(rows)], pa.list_(pa.int8())),
        "large": pa.array(numbers + 2**60, pa.uint64()),
    }
    fields = [
        Field("flag"),
        Field("odd"),
        Field("large", dtype="int64"),
        Field("flag_as_float", column="flag", dtype="float32"),
    ]
    return DatasetStore(3, fields=fields).from_dataset(pa.table(columns))


MADE: dict[str, Callable[[Any], Callable[[int], Any]]] = {
    "on the host": lambda source: host_maker(source, pin=False),
    "by a slab": lambda source: lambda index: hand_over(device_maker(source, device=CPU, pin=False)(index)),
    "whole": lambda source: lambda index: hand_over(whole_maker(source, device=CPU, pin=False)(index)),
}
DTYPES = {"obs_image": "uint8", "reward": "float64", "odd": "int64", "time": "int32"}
WINDOWS = {"action": range(4), "obs_continuous": [-1, 0], "obs_image": [0, 1, 5], "flag": [0]}
OPTIONS: list[dict[str, Any]] = [
    *({"sampling": sampling, "drop_last": False} for sampling in SAMPLERS),
    *({"sampling": sampling, "dtypes": DTYPES} for sampling in ("sequential", "batch")),
    *({"sequence_length": steps, "windows": WINDOWS, "dtypes": {"reward": "float64"}} for steps in (None, 5)),
    *({"augment": full_config(), "views": views} for views in (1, 2)),
]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_every_way_gives_the_batch_of_the_source(made: str, options: dict[str, Any]) -> None:
    store = make_store() if "augment" in options else store_of()
    source: Any = BatchSource(store, **{"sequence_length": 5, "batch_size": 4, **options})
    make = MADE[made](source)
    for index in range(6):
        found, expected = make(index), source[index]
        for batch, wanted in zip(found, expected, strict=True) if options.get("views") == 2 else [(found, expected)]:
            assert isinstance(batch, TensorDict)
            assert tuple(batch.batch_size) == wanted["reward"].shape[: source.spec.batch_dims]
            assert batch.device == (CPU if made == "by a slab" else None)
            assert_same(as_arrays(batch), wanted, index)


@pytest.mark.parametrize("stored", [False, True])
def test_slabs_are_laid_out_without_overlap(stored: bool) -> None:
    source = BatchSource(store_of(), 5, 4)
    layout = source.layout(4, stored=stored)
    slab = torch.zeros(layout.nbytes, dtype=torch.uint8)
    arrays, tensors = layout.arrays(slab.numpy()), slab_tensors(layout, slab)
    assert list(arrays) == list(tensors) == list(source.spec)
    for name, spec in source.spec.items():
        dtype = spec.stored_dtype if stored else spec.dtype
        assert arrays[name].dtype == dtype
        assert tensors[name].dtype == torch_dtype(np.dtype(dtype))
        assert arrays[name].shape == tuple(tensors[name].shape) == (4, 5, *spec.shape)
        assert arrays[name].flags.aligned
        assert tensors[name].data_ptr() == arrays[name].ctypes.data
    # Whoever writes one field fully leaves the others alone.
    for mark, name in enumerate(arrays, start=1):
        arrays[name].view(np.uint8).reshape(-1)[:] = mark
    for mark, name in enumerate(arrays, start=1):
        assert (arrays[name].view(np.uint8) == mark).all(), name
        assert (tensors[name].view(torch.uint8) == mark).all(), name
    assert layout.nbytes < 2 * sum(array.nbytes for array in arrays.values()) + 300 * len(arrays)
    # An image of uint8 is widened where it arrives, not before it travels.
    assert (arrays["obs_image"].dtype == np.uint8) == stored
    assert layout.nbytes <= source.layout(4).nbytes


def test_dtypes_have_their_names() -> None:
    integers = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
    for name in (*integers, "bool", "float16", "float32", "float64"):
        assert torch_dtype(np.dtype(name)) == getattr(torch, name)


def test_the_shards_of_a_short_batch() -> None:
    """12 windows in batches of 8: the second has 4, of which each of 4 shards gets one."""
    source = BatchSource(store_of(), 5, 8, sampling="sequential", drop_last=False)
    shards = [
        BatchSource(store_of(), 5, 8, sampling="sequential", drop_last=False, shard=(rank, 4)) for rank in range(4)
    ]
    for make in (MADE["on the host"], MADE["by a slab"]):
        pieces = [make(shard)(1) for shard in shards]
        assert sorted(piece.batch_size[0] for piece in pieces) == [1] * 4
        assert_same(as_arrays(torch.cat(pieces)), source[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_over_the_device_path(workers: int) -> None:
    source = BatchSource(store_of(), 5, 4, sampling="batch")
    maker = partial(device_maker, device=CPU, pin=False)
    with Loader(source, delivery=Delivery(maker, hand_over), num_workers=workers) as loader:
        kept = [loader.next_batch() for _ in range(20)]
    for index, batch in enumerate(kept):
        assert_same(as_arrays(batch), source[index], index)
        with pytest.raises(KeyError):
            batch["unknown"]


class TwoViews:
    """A source of somebody's own."""

    def __init__(self, source: BatchSource) -> None:
        self.source, self.spec, self.fingerprint = source, source.spec, source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index], self.source[index + 1]


def test_batches_of_ones_own_source_pass_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.empty
    pinned: list[bool] = []

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return made(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    source = TwoViews(BatchSource(store_of(), 5, 4))
    make = whole_maker(source, device=CPU, pin=True)
    for index in range(3):
        views: Any = hand_over(make(index))
        for view, expected in zip(views, source[index], strict=True):
            assert view.batch_size == (4, 5)
            assert_same(as_arrays(view), expected, index)
            assert len({tensor.untyped_storage().data_ptr() for tensor in view.values()}) == 1
    assert pinned == [True] * 6


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_several_arrays_take_one_copy(on: str) -> None:
    arrays = {
        "mask": np.array([[True, False, True]]),
        "index": np.arange(6).reshape(3, 2),
        "none": np.zeros((0, 2), np.float32),
        "weight": np.array(0.5, np.float32),
        "turned": np.arange(6.0).reshape(2, 3).T,
    }
    found = by_one_copy(arrays, torch.device(on))
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
    for name, array in arrays.items():
        assert found[name].dtype == torch_dtype(array.dtype)
        assert found[name].shape == array.shape
        assert (found[name].cpu().numpy() == array).all()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinned_memory_without_an_accelerator() -> None:
    with (
        pytest.warns(UserWarning, match="pin_memory: expected an accelerator for pinned memory, found none"),
        PrefetchBatchifier(example_store(), 5, 4, pin_memory=True) as loader,
    ):
        assert not loader.next_batch()["reward"].is_pinned()
    for pin_memory in (None, False):
        with PrefetchBatchifier(example_store(), 5, 4, pin_memory=pin_memory) as loader:
            assert not loader.next_batch()["reward"].is_pinned()


class AsTensors:
    """What a user writes to get tensors out of workers: a collate function at the top of a module."""

    def __call__(self, batch: dict[str, np.ndarray]) -> TensorDict:
        size = batch["reward"].shape
        return TensorDict({name: torch.from_numpy(array) for name, array in batch.items()}, batch_size=size)


@pytest.mark.parametrize(
    ("workers", "context"), [(0, None), (2, "fork"), pytest.param(1, "spawn", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_source_in_torchs_data_loader(workers: int, context: str | None, tmp_path: Path) -> None:
    import datasets

    example_store(90).to_dataset().save_to_disk(str(tmp_path / "data"))
    store = DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "data")))
    store.extend(example_columns(1, first=90))
    source = BatchSource(store, 7, 3, sampling="sequential", seed=2, drop_last=False)
    assert b"torch" not in pickle.dumps(source).replace(str(tmp_path).encode(), b"")
    source[0]  # used already, which must not matter
    options: Any = {"batch_size": None, "num_workers": workers, "multiprocessing_context": context}
    for more in ({"collate_fn": AsTensors()}, {}):
        loader: Any = torch.utils.data.DataLoader(source, **options, **more)
        assert len(loader) == len(source) == 5
        for index, batch in zip(range(5), loader, strict=True):
            assert isinstance(batch, TensorDict if more else dict)
            assert_same(as_arrays(batch), source[index], index)
    sampler = [5, 3, 100]
    for index, batch in zip(sampler, torch.utils.data.DataLoader(source, **options, sampler=sampler), strict=True):
        assert_same(as_arrays(batch), source[index], index)


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_second_pass_of_torchs_data_loader_is_warned(options: dict[str, Any]) -> None:
    mixture = MixtureSource({"one": BatchSource(example_store(), 7, 3), "two": BatchSource(example_store(), 7, 3)})
    for source in (BatchSource(example_store(), 7, 3), mixture):
        for _ in range(2):  # another loader begins with its first pass
            loader = torch.utils.data.DataLoader(source, batch_size=None, **options)
            assert len(list(loader)) == len(loader) == len(loader)
        with pytest.warns(UserWarning, match="delivers the batches of the first epoch again") as warned:
            list(loader)
        assert {warning.filename for warning in warned} == {__file__}
        list(loader)  # said once
        once = torch.utils.data.DataLoader(source, batch_size=None, sampler=range(len(source)))
        assert len(list(once)) == len(list(once)) == len(source)  # by an evaluation, whose indices are its own


@pytest.mark.parametrize("pin_memory", [None, True])
@pytest.mark.cuda
def test_host_batches_are_pinned(pin_memory: bool | None) -> None:
    source = BatchSource(store_of(), 5, 4)
    with PrefetchBatchifier(store_of(), 5, 4, pin_memory=pin_memory) as loader:
        kept = [loader.next_batch() for _ in range(12)]
    for index, batch in enumerate(kept):
        assert all(tensor.is_pinned() for tensor in batch.values())
        assert_same(as_arrays(batch), source[index], index)


@pytest.mark.cuda
def test_host_batches_are_not_pinned_if_so_asked() -> None:
    with PrefetchBatchifier(store_of(), 5, 4, pin_memory=False) as loader:
        assert not any(tensor.is_pinned() for tensor in loader.next_batch().values())


@pytest.mark.cuda
def test_copies_that_overlap_with_computing_give_right_values() -> None:
    """The consumer's stream is kept busy, so that batches are copied, and their memory is used again, meanwhile."""
    source = BatchSource(store_of(), 40, 512)
    busy = torch.randn(2048, 2048, device="cuda")
    sums: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    with PrefetchBatchifier(store_of(), 40, 512, device="cuda", num_workers=3, prefetch=6) as loader:
        for index in range(60):
            for _ in range(3):
                busy = (busy @ busy).clamp(-1, 1)
            batch = loader.next_batch()
            # Queued behind the work above; the batch is dropped before any of it has run.
            sums.append((index, batch["reward"].double().sum(), batch["obs_image"].sum()))
            del batch
    torch.cuda.synchronize()
    for index, rewards, pixels in sums:
        wanted = source[index]
        assert rewards.item() == wanted["reward"].astype(np.float64).sum(), index
        assert pixels.item() == wanted["obs_image"].sum(), index


@pytest.mark.cuda
def test_a_stream_of_the_callers_own() -> None:
    source = BatchSource(store_of(), 5, 64)
    stream = torch.cuda.Stream()
    with PrefetchBatchifier(store_of(), 5, 64, device="cuda") as loader, torch.cuda.stream(stream):
        results = [(index, loader.next_batch()["reward"] * 2) for index in range(30)]
        stream.synchronize()
        for index, doubled in results:
            assert np.array_equal(doubled.cpu().numpy(), source[index]["reward"] * 2), index


@pytest.mark.cuda
def test_abandoning_a_loader_in_full_flight() -> None:
    for _ in range(5):
        loader = PrefetchBatchifier(store_of(), 40, 512, device="cuda", num_workers=4, prefetch=8)
        loader.next_batch()
        del loader
    torch.cuda.synchronize()
