"""Batches that arrive on a CUDA device. Skipped where there is none."""

import numpy as np
import pytest
import torch

from mouse_core import BatchSource
from mouse_core.testing import as_arrays
from mouse_torch import PrefetchBatchifier
from tests.core.oracle import assert_same
from tests.torch.test_transfer import store_of

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("pin_memory", [None, True])
def test_host_batches_are_pinned(pin_memory: bool | None) -> None:
    source = BatchSource(store_of(), 5, 4)
    with PrefetchBatchifier(store_of(), 5, 4, pin_memory=pin_memory) as loader:
        kept = [loader.next_batch() for _ in range(12)]
    for index, batch in enumerate(kept):
        assert all(tensor.is_pinned() for tensor in batch.values())
        assert_same(as_arrays(batch), source[index], index)


def test_host_batches_are_not_pinned_if_so_asked() -> None:
    with PrefetchBatchifier(store_of(), 5, 4, pin_memory=False) as loader:
        assert not any(tensor.is_pinned() for tensor in loader.next_batch().values())


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


def test_a_stream_of_the_callers_own() -> None:
    source = BatchSource(store_of(), 5, 64)
    stream = torch.cuda.Stream()
    with PrefetchBatchifier(store_of(), 5, 64, device="cuda") as loader, torch.cuda.stream(stream):
        results = [(index, loader.next_batch()["reward"] * 2) for index in range(30)]
        stream.synchronize()
        for index, doubled in results:
            assert np.array_equal(doubled.cpu().numpy(), source[index]["reward"] * 2), index


def test_abandoning_a_loader_in_full_flight() -> None:
    for _ in range(5):
        loader = PrefetchBatchifier(store_of(), 40, 512, device="cuda", num_workers=4, prefetch=8)
        loader.next_batch()
        del loader
    torch.cuda.synchronize()
