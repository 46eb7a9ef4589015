"""TensorDict batches are the NumPy batches, and nothing else."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from mouse_core import BatchSource, ConfigError, DatasetStore, Field
from mouse_core.mixtures import MixtureSource
from mouse_core.testing import as_arrays
from mouse_torch import PrefetchBatchifier
from tests.core.oracle import assert_same


def table(rows: int = 100) -> pa.Table:
    numbers = np.arange(rows)
    return pa.table(
        {
            "action": numbers % 3,
            "reward": numbers * 0.5,
            "done": np.zeros(rows, np.int8),
            "episode_step": pa.array([None if n % 7 == 0 else n for n in range(rows)], pa.int32()),
            "metadata_q_star": pa.array([[n, 0.5, 1.0] for n in range(rows)], pa.list_(pa.float32())),
            "observation": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers * 1.0, 4)), 4),
            "observation_image": pa.FixedSizeListArray.from_arrays(
                pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 6).astype(np.uint8)), 3), 2
            ),
        }
    )


def store_of(rows: int = 100, **options: Any) -> DatasetStore:
    return DatasetStore(**options).from_dataset(table(rows))


TORCH_DTYPES = {
    "action": torch.int64,
    "reward": torch.float32,
    "done": torch.int64,
    "time": torch.int64,
    "q_star": torch.float32,
    "obs_continuous": torch.float64,
    "obs_image": torch.int64,
}
SHAPES = {"q_star": (3,), "obs_continuous": (4,), "obs_image": (6,)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_a_tensordict_of_the_documented_fields(workers: int) -> None:
    with PrefetchBatchifier(store_of(), 5, 4, num_workers=workers) as loader:
        batch = loader.next_batch()
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == torch.Size([4, 5])
    assert {name: tensor.dtype for name, tensor in batch.items()} == TORCH_DTYPES
    assert list(batch.keys()) == list(TORCH_DTYPES)
    for name, tensor in batch.items():
        assert tensor.shape == (4, 5, *SHAPES.get(name, ()))
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    # Ready for what people do with batches.
    assert batch[1:, :3].batch_size == torch.Size([3, 3])
    assert batch.reshape(-1).batch_size == torch.Size([20])
    batch["reward"] += 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinned_memory_without_an_accelerator() -> None:
    with (
        pytest.warns(UserWarning, match="pin_memory: expected an accelerator for pinned memory, found none"),
        PrefetchBatchifier(store_of(), 5, 4, pin_memory=True) as loader,
    ):
        assert not loader.next_batch()["reward"].is_pinned()
    for pin_memory in (None, False):
        with PrefetchBatchifier(store_of(), 5, 4, pin_memory=pin_memory) as loader:
            assert not loader.next_batch()["reward"].is_pinned()


@pytest.mark.parametrize("device", ["cuda:99", "mps", "xpu", "hpu"])
def test_devices_that_are_not_there(device: str) -> None:
    there = torch.accelerator.current_accelerator()
    if there is not None and there.type == device:
        pytest.skip(f"there is {device}")
    with pytest.raises(ConfigError, match=f"device: expected a device of this machine, found '{device}'"):
        PrefetchBatchifier(store_of(), 5, 4, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_cuda_where_there_is_none(device: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"device: expected a device of this machine, found .*, but CUDA is not available"
    ):
        PrefetchBatchifier(store_of(), 5, 4, device=device)


@pytest.mark.parametrize("device", ["gpu", "no device", 1.5, ["cpu"]])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(ConfigError, match="device: expected a torch device, found"):
        PrefetchBatchifier(store_of(), 5, 4, device=device)


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

    datasets.Dataset(table(90)).save_to_disk(str(tmp_path / "data"))
    store = DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "data")))
    store.append(
        {
            "action": 1,
            "reward": 2.0,
            "done": 0,
            "episode_step": None,
            "metadata_q_star": [1.0, 2.0, 3.0],
            "observation": [1.0] * 4,
            "observation_image": np.zeros((2, 3), np.uint8),
        }
    )
    source = BatchSource(store, 7, 3, sampling="sequential", seed=2, drop_last=False)
    source[0]  # used already, which must not matter
    loader = torch.utils.data.DataLoader(
        source, batch_size=None, num_workers=workers, multiprocessing_context=context, collate_fn=AsTensors()
    )
    assert len(loader) == len(source) == 5
    batches = list(loader)
    assert len(batches) == 5
    for index, batch in enumerate(batches):
        assert isinstance(batch, TensorDict)
        assert_same(as_arrays(batch), source[index], index)


def test_the_default_conversion_of_torchs_data_loader() -> None:
    source = BatchSource(store_of(), 7, 3)
    for index, batch in enumerate(torch.utils.data.DataLoader(source, batch_size=None)):
        assert_same({name: tensor.numpy() for name, tensor in batch.items()}, source[index], index)
    sampler = [5, 3, 100]
    chosen = list(torch.utils.data.DataLoader(source, batch_size=None, sampler=sampler))
    for index, batch in zip(sampler, chosen, strict=True):
        assert_same({name: tensor.numpy() for name, tensor in batch.items()}, source[index], index)


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_second_pass_of_torchs_data_loader_is_warned(options: dict[str, Any]) -> None:
    mixture = MixtureSource({"one": BatchSource(store_of(), 7, 3), "two": BatchSource(store_of(), 7, 3)})
    for source in (BatchSource(store_of(), 7, 3), mixture):
        for _ in range(2):  # another loader begins with its first pass
            loader = torch.utils.data.DataLoader(source, batch_size=None, **options)
            assert len(list(loader)) == len(loader) == len(loader)
        with pytest.warns(UserWarning, match="delivers the batches of the first epoch again") as warned:
            list(loader)
        assert {warning.filename for warning in warned} == {__file__}
        list(loader)  # said once
        once = torch.utils.data.DataLoader(source, batch_size=None, sampler=range(len(source)))
        assert len(list(once)) == len(list(once)) == len(source)  # by an evaluation, whose indices are its own


def test_a_source_pickles_without_torch() -> None:
    source = BatchSource(store_of(), 7, 3)
    assert b"torch" not in pickle.dumps(source)


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool"])
def test_columns_of_any_dtype(name: str) -> None:
    values = np.arange(40).astype(name)
    store = DatasetStore(fields=[Field("extra")]).from_dataset(table(40).append_column("extra", pa.array(values)))
    with PrefetchBatchifier(store, 5, 4) as loader:
        found = loader.next_batch()["extra"]
    assert found.dtype == getattr(torch, name)
    starts = loader.source.plan(0).starts
    assert np.array_equal(found.numpy(), values[starts[:, None] + np.arange(5)])
