"""Mixtures share windows out as grain and TorchRL do, but exactly, and go into the datasets of both."""

import grain
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import mouse_jax
from mouse_core import BatchSource
from mouse_core.mixtures import Mixture
from mouse_core.testing import as_arrays, example_store, stream_digest


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [5, 3, 1], [0.25, 0.125, 0.5, 0.125]])
def test_shares_are_those_of_grain_within_a_few_windows(weights: list[float]) -> None:
    """``grain.MapDataset.mix`` hands out rows by weight, too."""
    n = 4000
    members = [grain.MapDataset.range(10 * n).map(lambda _, code=code: code) for code in range(len(weights))]
    mix = grain.MapDataset.mix(members, weights=weights)
    theirs = np.array([mix[index] for index in range(n)])
    mixture = Mixture([example_store(60) for _ in weights], weights)
    source = BatchSource(mixture, 6, 20, fields=["reward", "member"])
    ours = np.concatenate([source[index]["member"][:, 0] for index in range(n // 20)])
    share = np.array(weights) / sum(weights)
    for end in (20, 100, 1000, n):
        counts = [np.bincount(found[:end], minlength=len(weights)) for found in (ours, theirs)]
        assert np.abs(counts[0] - counts[1]).max() <= len(weights) + 1
        assert np.abs(counts[0] - share * end).max() <= len(weights) / 2


def test_shares_are_those_of_torchrl_in_the_long_run() -> None:
    """``ReplayBufferEnsemble`` draws of which buffer a batch is; of ours every batch has all."""
    data = pytest.importorskip("torchrl.data", reason="torchrl is not installed")
    shares = [0.7, 0.2, 0.1]
    torch.manual_seed(0)
    buffers = []
    for code in range(3):
        buffers.append(data.ReplayBuffer(storage=data.LazyTensorStorage(50), batch_size=20))
        buffers[-1].extend(TensorDict({"code": torch.full((50,), code)}, batch_size=[50]))
    ensemble = data.ReplayBufferEnsemble(*buffers, p=torch.tensor(shares), num_buffer_sampled=1, batch_size=20)
    theirs = np.bincount(np.concatenate([ensemble.sample()["code"].reshape(-1).numpy() for _ in range(600)]))
    source = BatchSource(Mixture([example_store(60) for _ in shares], shares), 6, 20, fields=["reward", "member"])
    for index in range(5):
        assert np.bincount(source[index]["member"][:, 0]).tolist() == [14, 4, 2]
    np.testing.assert_allclose(theirs / theirs.sum(), shares, atol=0.06)


def test_a_mixture_in_grain_and_in_a_torch_dataset() -> None:
    source = BatchSource(Mixture([example_store(150), example_store(90)], [2, 1]), 6, 12)
    wanted = stream_digest([source[index] for index in range(4)], 4)
    dataset = mouse_jax.to_grain(source)
    assert stream_digest([as_arrays(dataset[index]) for index in range(4)], 4) == wanted
    loader = torch.utils.data.DataLoader(source, batch_size=None)
    found = [as_arrays(batch) for _, batch in zip(range(4), loader, strict=False)]
    assert stream_digest(found, 4) == wanted
