"""What shards once more what is a shard already is refused; and a DataLoader that would stack batches is warned."""

from __future__ import annotations

import os
import queue
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from mouse_core import BatchSource, ConfigError, DatasetStore, PrefetchBatchifier
from mouse_core.testing import as_arrays, example_store
from tests.ports import free_port

ROWS = 256
AGAIN = r"shard: expected a source that is sharded once, found shard \(0, 2\) below a {}"


def numbered() -> DatasetStore:
    """Rows whose reward is their number."""
    store = DatasetStore()
    codes = {"action": np.zeros(ROWS, np.int64), "done": np.zeros(ROWS, np.int64)}
    store.extend({**codes, "reward": np.arange(ROWS, dtype=np.float32)})
    return store


def source(count: int = 2) -> BatchSource:
    return BatchSource(numbered(), 4, 8, "sequential", shard=(0, count))


# What Accelerate calls its classes, and where they stand; what they do with a loader is the same.
ACCELERATE = """
class DataLoaderDispatcher:
    def __init__(self, inner): self.inner = inner
    def __iter__(self): yield from self.inner
class IterableDatasetShard(DataLoaderDispatcher):
    def __iter__(self):
        for number, element in enumerate(self.inner):
            if number % 2 == 0: yield element
class BatchSamplerShard(DataLoaderDispatcher):
    def __iter__(self): return self._iter_with_no_split()
    def _iter_with_no_split(self): yield from self.inner
"""


def accelerate() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "accelerate.data_loader"}
    exec(ACCELERATE, names)
    return names


class OfALoader(IterableDataset[Any]):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def test_a_distributed_sampler_of_a_shard_is_refused() -> None:
    for kind in (DistributedSampler, type("Own", (DistributedSampler,), {})):
        with pytest.raises(ConfigError, match=AGAIN.format("DistributedSampler")):
            kind(source(), 2, 0)
    whole = DataLoader(source(1), batch_size=None, sampler=DistributedSampler(source(1), 2, 1, shuffle=False))
    assert len([*whole]) == 4  # whole batches in turn


def test_parts_of_a_shard_are_refused() -> None:
    kinds = accelerate()
    loader = DataLoader(source(), batch_size=None)
    assert len([*loader]) == 8
    for name in ("DataLoaderDispatcher", "IterableDatasetShard"):
        with pytest.raises(ConfigError, match=AGAIN.format(name)):
            next(iter(kinds[name](loader)))
    sampler = DataLoader(source(), batch_size=1).batch_sampler
    with pytest.raises(ConfigError, match=AGAIN.format("BatchSamplerShard")):
        next(iter(kinds["BatchSamplerShard"](sampler)))
    with pytest.raises(ConfigError, match=AGAIN.format("BatchSamplerShard")):
        next(iter(kinds["BatchSamplerShard"](RandomSampler(source()))))
    assert len([*kinds["DataLoaderDispatcher"](DataLoader(source(1), batch_size=None))]) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_are_wrapped_are_refused(workers: int) -> None:
    kinds = accelerate()
    options: dict[str, Any] = {"sampling": "sequential", "num_workers": workers}
    with PrefetchBatchifier(numbered(), 4, 8, shard=(0, 2), **options) as loader:
        with pytest.raises(ConfigError, match=AGAIN.format("IterableDatasetShard")):
            next(iter(kinds["IterableDatasetShard"](OfALoader(loader))))
        assert len([*OfALoader(loader)]) == 8  # it goes on where nobody shards it
    with PrefetchBatchifier(numbered(), 4, 8, **options) as loader:
        assert len([*kinds["IterableDatasetShard"](OfALoader(loader))]) == 4


def test_a_data_loader_that_stacks_batches_is_warned() -> None:
    store = example_store()
    for loader in (DataLoader(BatchSource(store, 8, 4)), DataLoader(BatchSource(store, 8, 4), batch_size=3)):
        with pytest.warns(UserWarning, match=re.escape("write DataLoader(source, batch_size=None)")) as warned:
            batch = next(iter(loader))
        assert batch["reward"].shape == (loader.batch_size, 4, 8)
        assert f"[{loader.batch_size}, B, S, ...]" in str(warned[0].message)
    (batch,) = [next(iter(DataLoader(BatchSource(store, 8, 4), batch_size=None)))]  # warnings are errors in the tests
    assert as_arrays(batch)["reward"].shape == (4, 8)


# ---------------------------------------------------------------------- the libraries themselves


def _work(rank: int, port: int, way: str, found: Any) -> None:
    """One of two processes: how many batches and which steps it sees, or what it is told."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(variables, WORLD_SIZE="2", NODE_RANK="0", ACCELERATE_USE_CPU="1")
    library, what, sharded = way.split()
    shard = (rank, 2) if sharded == "sharded" else (0, 1)
    loader: Any = DataLoader(BatchSource(numbered(), 4, 8, "sequential", shard=shard), batch_size=None)
    if what in ("loader", "wrapped"):
        loader = PrefetchBatchifier(numbered(), 4, 8, "sequential", shard=shard)
    if what == "wrapped":
        loader = DataLoader(OfALoader(loader), batch_size=None)
    try:
        if library == "fabric":
            from lightning_fabric import Fabric

            fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
            fabric.launch()
            loader = fabric.setup_dataloaders(loader, use_distributed_sampler=what != "unsampled")
        else:
            from accelerate import Accelerator, DataLoaderConfiguration

            dispatch = {"dispatched": True, "undispatched": False}.get(what)
            accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
            loader = accelerator.prepare(loader)
        batches = [np.asarray(batch["reward"]).reshape(-1) for batch in loader]
        found.put((rank, len(batches), np.concatenate(batches).tolist()))
    except Exception as error:
        found.put((rank, f"{type(error).__name__}: {error}", []))
    finally:
        if torch.distributed.is_initialized():
            found.close()
            found.join_thread()
            os._exit(0)  # the other may wait for this one in a collective call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "sees"),
    [
        ("fabric source sharded", "refused"),
        ("fabric source whole", 4),
        ("fabric unsampled sharded", 8),
        ("accelerate dispatched sharded", "refused"),
        ("accelerate dispatched whole", 4),
        ("accelerate loader sharded", 8),
        ("accelerate wrapped sharded", "refused"),
    ],
)
def test_two_processes_see_all_or_are_told(way: str, sees: Any) -> None:
    pytest.importorskip("lightning_fabric" if way.startswith("fabric") else "accelerate")
    port = free_port()
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_work, args=(rank, port, way, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    found = []
    for _ in processes:
        try:
            found.append(results.get(timeout=600))
        except queue.Empty:
            break
    for process in processes:
        process.terminate()
        process.join()
    if sees == "refused":
        assert any("sharded once" in str(told) for _, told, _ in found), found
        return
    assert [batches for _, batches, _ in found] == [sees, sees], found
    assert len({step for _, _, steps in found for step in steps}) == ROWS
