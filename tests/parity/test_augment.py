"""Augmentation by field name has the same bits in NumPy, PyTorch and JAX, with windows by field, too."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core.augment import apply, draw
from mouse_core.randomness import Key, Purpose
from mouse_core.testing import as_arrays
from tests.core.augment_cases import assert_same
from tests.core.test_augment_by_field import AUGMENT, CONFIG, DTYPES, LENGTH, SIZE, WINDOWS, make_batch, make_store
from tests.core.test_augment_cameras import CONFIG as CAMERAS
from tests.core.test_augment_cameras import SHAPES, cameras
from tests.core.test_augment_cameras import make_store as camera_store

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("options", WINDOWS, ids=["plain", "anchors", "anchors and steps"])
def test_loaders_deliver_one_stream(options: dict[str, Any], x64: bool) -> None:
    asked = {"batch_size": 6, "seed": 5, "dtypes": DTYPES, "augment": AUGMENT, "views": 2, **options}
    streams = {}
    with jax.enable_x64(True) if x64 else nullcontext():
        for name, package in PACKAGES.items():
            with package.PrefetchBatchifier(make_store(), **asked) as loader:
                streams[name] = [tuple(map(as_arrays, loader.next_batch())) for _ in range(4)]
    for batches in zip(*streams.values(), strict=True):
        for one, *others in zip(*batches, strict=True):
            for other in others:
                assert set(one) == set(other)
                for name, values in one.items():
                    assert np.array_equal(values.astype(other[name].dtype), other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("batch_dims", [2, 1], ids=["steps", "no steps"])
def test_apply_and_augmenters_agree(batch_dims: int) -> None:
    batch = make_batch(offsets=(3,))
    if batch_dims == 1:
        batch = {name: values[:, 0] for name, values in batch.items()}
    with jax.enable_x64(True):
        given = {
            "numpy": batch,
            "torch": TensorDict({name: torch.from_numpy(values) for name, values in batch.items()}, [SIZE]),
            "jax": {name: jnp.asarray(values) for name, values in batch.items()},
        }
        found = {}
        for name, package in PACKAGES.items():
            augmenter = package.TokenAugmenter(CONFIG, seed=4, batch_dims=batch_dims)
            augmenter.update_augmentations(given[name])
            found[name] = as_arrays(augmenter(given[name]))
        draws = draw(CONFIG, Key(4, Purpose.AUGMENT, 0), (SIZE, LENGTH if batch_dims == 2 else 1))
        assert_same(found["torch"], found["numpy"])
        assert_same(found["jax"], found["numpy"])
        jitted = jax.jit(lambda arrays, drawn: apply(arrays, drawn, batch_dims=batch_dims))(given["jax"], draws)
        assert_same({name: np.asarray(values) for name, values in jitted.items()}, found["numpy"])


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_cameras_by_name_are_cut_alike(x64: bool) -> None:
    batch = cameras()
    with jax.enable_x64(True) if x64 else nullcontext():
        given = {
            "numpy": batch,
            "torch": TensorDict({name: torch.from_numpy(values) for name, values in batch.items()}, [5, 3]),
            "jax": {name: jnp.asarray(values) for name, values in batch.items()},
        }
        found, streams = {}, {}
        for name, package in PACKAGES.items():
            augmenter = package.TokenAugmenter(CAMERAS, seed=4)
            augmenter.update_augmentations(given[name])
            found[name] = as_arrays(augmenter(given[name]))
            asked = {"sequence_length": 3, "batch_size": 4, "dtypes": dict.fromkeys(batch, "uint8"), "augment": CAMERAS}
            with package.PrefetchBatchifier(camera_store(), **asked) as loader:
                streams[name] = as_arrays(loader.next_batch())
        for other in ("torch", "jax"):
            assert_same(found[other], found["numpy"])
            for name in batch:
                assert np.array_equal(streams[other][name], streams["numpy"][name])
        draws = draw(CAMERAS, Key(4, Purpose.AUGMENT, 0), (5, 3), image_shape=SHAPES)
        jitted = jax.jit(apply)(given["jax"], draws)
        assert_same({name: np.asarray(values) for name, values in jitted.items()}, found["numpy"])
