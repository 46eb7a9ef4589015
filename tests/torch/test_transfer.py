"""The way to a device, taken with the CPU for a device: one slab, stored dtypes, widened at the end."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.prefetch import Delivery, Loader
from mouse_core.testing import as_arrays
from mouse_torch.prefetch import whole_maker
from mouse_torch.transfer import by_one_copy, device_maker, hand_over, host_maker, slab_tensors, torch_dtype
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


@pytest.mark.parametrize("sampling", ["random", "last", "sequential", "batch"])
@pytest.mark.parametrize("dtypes", [None, {"obs_image": "uint8", "reward": "float64", "odd": "int64", "time": "int32"}])
def test_every_way_gives_the_batch_of_the_source(sampling: str, dtypes: Any) -> None:
    source = BatchSource(store_of(), 5, 4, sampling=sampling, dtypes=dtypes, drop_last=False)
    host = host_maker(source, pin=False)
    device = device_maker(source, device=CPU, pin=False)
    for index in range(6):
        wanted = source[index]
        on_host, on_device = host(index), hand_over(device(index))
        for batch in (on_host, on_device):
            assert isinstance(batch, TensorDict)
            assert list(batch.batch_size) == [*wanted["reward"].shape]
            assert_same(as_arrays(batch), wanted, index)
        assert on_device.device == CPU


@pytest.mark.parametrize("steps", [None, 5])
def test_every_way_gives_fields_at_offsets(steps: int | None) -> None:
    """``[B]`` without steps, ``[B, S]`` with some: on the host, by a slab, to a device, and through a source's."""
    windows = {"action": range(4), "obs_continuous": [-1, 0], "obs_image": [0, 1, 5], "flag": [0]}
    source = BatchSource(store_of(), steps, 4, windows=windows, dtypes={"reward": "float64"})
    made: Any = [
        host_maker(source, pin=False),
        lambda index: hand_over(device_maker(source, device=CPU, pin=False)(index)),
        lambda index: hand_over(whole_maker(source, device=CPU, pin=False)(index)),
    ]
    for index in range(4):
        for make in made:
            batch = make(index)
            assert batch.batch_size == ((4,) if steps is None else (4, steps))
            assert_same(as_arrays(batch), source[index])


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


def test_gathering_into_a_slab_and_back() -> None:
    source = BatchSource(store_of(), 5, 4)
    for stored in (False, True):
        layout = source.layout(4, stored=stored)
        slab = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
        source.gather(source.plan(3), layout.arrays(slab.numpy()), stored=stored)
        wide = {
            name: tensor.to(torch_dtype(np.dtype(source.spec[name].dtype))).numpy()
            for name, tensor in slab_tensors(layout, slab).items()
        }
        assert_same(wide, source[3])


def test_bytes_travel_in_the_stored_dtypes() -> None:
    """An image of uint8 is widened where it arrives, not before it travels."""
    source = BatchSource(store_of(), 5, 4)
    narrow, wide = source.layout(4, stored=True), source.layout(4)
    assert narrow.fields["obs_image"][2] == np.uint8
    assert narrow.fields["obs_continuous"][2] == np.float32
    assert narrow.fields["action"][2] == np.int8
    assert narrow.nbytes < wide.nbytes


def test_the_shards_of_a_short_batch() -> None:
    """12 windows in batches of 8: the second has 4, of which each of 4 shards gets one."""
    source = BatchSource(store_of(), 5, 8, sampling="sequential", drop_last=False)
    shards = [
        BatchSource(store_of(), 5, 8, sampling="sequential", drop_last=False, shard=(rank, 4)) for rank in range(4)
    ]
    for make in (
        lambda source: host_maker(source, pin=False),
        lambda source: lambda index: hand_over(device_maker(source, device=CPU, pin=False)(index)),
    ):
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uint8", torch.uint8),
        ("float16", torch.float16),
        ("bool", torch.bool),
        ("int64", torch.int64),
        ("uint16", torch.uint16),
    ],
)
def test_dtypes_by_name(name: str, expected: torch.dtype) -> None:
    assert torch_dtype(np.dtype(name)) == expected


class TwoViews:
    """A source of somebody's own."""

    def __init__(self, source: BatchSource) -> None:
        self.source, self.spec, self.fingerprint = source, source.spec, source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index], self.source[index + 1]


def test_batches_of_ones_own_source_pass_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view in one stretch of it."""
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
    """Whatever their dtypes and sizes, none of which is told by where the one before ends."""
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
