"""Mixtures deliver the same in NumPy, PyTorch and JAX, and share windows out as grain and TorchRL do, but exactly."""

from __future__ import annotations

import json
from typing import Any

import datasets
import grain
import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import BatchSource, DatasetStore
from mouse_core.augment import AugmentTokensConfig
from mouse_core.mixtures import Mixture
from mouse_core.testing import as_arrays, example_columns, example_store, stream_digest

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
#: What JAX cannot hold without x64 would be narrowed by rule.
OPTIONS: dict[str, Any] = {"sequence_length": 6, "batch_size": 12, "seed": 5, "dtypes": {"obs_continuous": "float32"}}
CHOSEN: list[dict[str, Any]] = [
    {},
    {"sampling": "batch"},
    {"sampling": "last"},
    {"boundary": "episode"},
    {"boundary": "episode", "weighting": "trajectory", "pad": 0},
    {"augment": AugmentTokensConfig(permute_action="both"), "views": 2},
    {"fields": ["reward", "member", "obs_image"], "dtypes": {"obs_image": "uint8"}},
    {"batch_size": 11, "shard": (1, 3), "uneven": "pad"},
]
WEIGHTS = {"disk": 2, "kept": 1, "grown": 3}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DatasetStore]:
    """One on disk, one that is shown in part, and one of appended rows."""
    folder = tmp_path_factory.mktemp("members") / "rows"
    example_store(150).to_dataset().save_to_disk(folder)
    kept = datasets.load_from_disk(folder).select(range(40, 110))
    return {
        "disk": DatasetStore().from_dataset(datasets.load_from_disk(folder)),
        "kept": DatasetStore().from_dataset(kept),
        "grown": example_store(90),
    }


@pytest.mark.parametrize("options", CHOSEN, ids=str)
def test_one_digest_for_all_packages_and_numbers_of_workers(
    options: dict[str, Any], stores: dict[str, DatasetStore]
) -> None:
    found = set()
    for package in PACKAGES.values():
        for workers in (0, 2):
            mixture = Mixture(stores, WEIGHTS)
            with package.PrefetchBatchifier(mixture, num_workers=workers, **{**OPTIONS, **options}) as loader:
                found.add(stream_digest(loader, 12))
    assert len(found) == 1


@pytest.mark.parametrize("finish", PACKAGES)
@pytest.mark.parametrize("begin", PACKAGES)
def test_members_grow_and_another_package_goes_on(begin: str, finish: str, stores: dict[str, DatasetStore]) -> None:
    members = {**stores, "grown": example_store(60)}
    mixture = Mixture(members, WEIGHTS, per="step")
    with PACKAGES[begin].PrefetchBatchifier(mixture, sampling="batch", **OPTIONS) as loader:
        stream_digest(loader, 3)
        members["grown"].extend(example_columns(55, first=60))
        loader.refresh()
        stream_digest(loader, 4)
        state = json.loads(json.dumps(loader.state_dict()))
        wanted = stream_digest(loader, 5)
    members["grown"].extend(example_columns(10, first=115))
    with PACKAGES[finish].PrefetchBatchifier(mixture, sampling="batch", **OPTIONS) as loader:
        loader.load_state_dict(state)
        assert stream_digest(loader, 5) == wanted


def jax_array(values: np.ndarray) -> Any:
    with jax.enable_x64(True):
        return jax.numpy.asarray(values)


@pytest.mark.long
def test_stores_by_way_of_any_framework_are_the_same_members() -> None:
    """Rows written as tensors, as JAX arrays or as NumPy's: the mixture cannot tell."""
    columns = example_columns(80)
    found = set()
    for as_array in (np.asarray, torch.from_numpy, jax_array):
        members = []
        for rows in (slice(0, 50), slice(50, 80)):
            members.append(DatasetStore())
            members[-1].extend({name: as_array(values[rows]) for name, values in columns.items()})
        found.add(stream_digest(BatchSource(Mixture(members), 6, 12), 5))
    assert len(found) == 1


# ------------------------------------------------------------------ others


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


def test_a_mixture_in_grain_and_in_a_torch_dataset(stores: dict[str, DatasetStore]) -> None:
    source = BatchSource(Mixture(stores, WEIGHTS), **OPTIONS)
    wanted = stream_digest([source[index] for index in range(4)], 4)
    dataset = mouse_jax.to_grain(source)
    assert stream_digest([as_arrays(dataset[index]) for index in range(4)], 4) == wanted
    loader = torch.utils.data.DataLoader(source, batch_size=None)
    found = [as_arrays(batch) for _, batch in zip(range(4), loader, strict=False)]
    assert stream_digest(found, 4) == wanted
