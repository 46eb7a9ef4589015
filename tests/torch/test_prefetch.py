"""Pinned memory, and sources in torch's DataLoader."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from mouse_core import BatchSource, DatasetStore
from mouse_core.mixtures import MixtureSource
from mouse_core.testing import as_arrays, example_columns, example_store
from mouse_torch import PrefetchBatchifier
from tests.core.oracle import assert_same


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
