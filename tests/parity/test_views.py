"""Views and boundaries deliver the same in NumPy, PyTorch and JAX, and each goes on where another stopped."""

from __future__ import annotations

import json
from typing import Any

import datasets
import pytest

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import DatasetStore
from mouse_core.augment import AugmentTokensConfig
from mouse_core.sampling import Column
from mouse_core.testing import example_columns, example_store, stream_digest

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
OPTIONS: dict[str, Any] = {"sequence_length": 6, "batch_size": 12, "seed": 5, "dtypes": {"obs_continuous": "float32"}}
CHOSEN: list[dict[str, Any]] = [
    {},
    {"sampling": "sequential"},
    {"boundary": "episode", "weighting": "trajectory"},
    {"boundary": Column("action"), "pad": 0},
    {"windows": {"obs_continuous": [-1, 0], "action": range(3)}, "sequence_length": None},
    {"augment": AugmentTokensConfig(permute_action="both"), "views": 2},
    {"shard": (1, 3)},
]


@pytest.mark.parametrize("options", CHOSEN, ids=str)
def test_one_digest_for_all_packages_and_numbers_of_workers(options: dict[str, Any], tmp_path: Any) -> None:
    example_store(300).to_dataset().save_to_disk(tmp_path / "rows")
    store = DatasetStore().from_dataset(datasets.load_from_disk(tmp_path / "rows"))
    store.extend(example_columns(150, first=300))
    found = set()
    for package in PACKAGES.values():
        for workers in (0, 2):
            view = store.where(length=(3, None)).split(train=0.8, seed=1)["train"]
            with package.PrefetchBatchifier(view, num_workers=workers, **{**OPTIONS, **options}) as loader:
                found.add(stream_digest(loader, 12))
    assert len(found) == 1


@pytest.mark.parametrize("finish", PACKAGES)
@pytest.mark.parametrize("begin", PACKAGES)
def test_the_store_grows_and_another_package_goes_on(begin: str, finish: str) -> None:
    store = example_store(200)
    with PACKAGES[begin].PrefetchBatchifier(store.best(0.5), sampling="batch", **OPTIONS) as loader:
        stream_digest(loader, 3)
        store.extend(example_columns(100, first=200))
        loader.refresh()
        stream_digest(loader, 4)
        state = json.loads(json.dumps(loader.state_dict()))
        wanted = stream_digest(loader, 5)
    store.extend(example_columns(90, first=300))
    with PACKAGES[finish].PrefetchBatchifier(store.best(0.5), sampling="batch", **OPTIONS) as loader:
        loader.load_state_dict(state)
        assert stream_digest(loader, 5) == wanted
