"""What shards once more what is a shard already is refused; and a DataLoader that would stack batches is warned.

The libraries themselves are tried in `tests/trainers`.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from mouse_core import BatchSource, ConfigError, DatasetStore, PrefetchBatchifier
from mouse_core.testing import as_arrays, example_store

ROWS = 256
AGAIN = r"shard: expected a source that is sharded once, found shard \(0, 2\) inside a {}"


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
    for kind in (DistributedSampler, type("Own", (DistributedSampler,), {})):
        with pytest.raises(ConfigError, match=AGAIN.format("DistributedSampler")):
            kind(source(), 2, 0)
    whole = DataLoader(source(1), batch_size=None, sampler=DistributedSampler(source(1), 2, 1, shuffle=False))
    assert len([*whole]) == 4  # whole batches in turn
    for workers in (0, 2):
        options: dict[str, Any] = {"sampling": "sequential", "num_workers": workers}
        with PrefetchBatchifier(numbered(), 4, 8, shard=(0, 2), **options) as wrapped:
            with pytest.raises(ConfigError, match=AGAIN.format("IterableDatasetShard")):
                next(iter(kinds["IterableDatasetShard"](OfALoader(wrapped))))
            assert len([*OfALoader(wrapped)]) == 8  # it goes on where nobody shards it
        with PrefetchBatchifier(numbered(), 4, 8, **options) as wrapped:
            assert len([*kinds["IterableDatasetShard"](OfALoader(wrapped))]) == 4


def test_a_data_loader_that_stacks_batches_is_warned() -> None:
    store = example_store()
    for loader in (DataLoader(BatchSource(store, 8, 4)), DataLoader(BatchSource(store, 8, 4), batch_size=3)):
        with pytest.warns(UserWarning, match=re.escape("write DataLoader(source, batch_size=None)")) as warned:
            batch = next(iter(loader))
        assert batch["reward"].shape == (loader.batch_size, 4, 8)
        assert f"[{loader.batch_size}, B, S, ...]" in str(warned[0].message)
    (batch,) = [next(iter(DataLoader(BatchSource(store, 8, 4), batch_size=None)))]  # warnings are errors in the tests
    assert as_arrays(batch)["reward"].shape == (4, 8)
