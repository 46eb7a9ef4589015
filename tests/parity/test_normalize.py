"""Normalised batches have the same bits in NumPy, PyTorch and JAX, and a policy's output is undone in each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import BatchSource, DatasetStore
from mouse_core.augment import AugmentScalarSpec, AugmentTokensConfig
from mouse_core.testing import as_arrays, example_store

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
KINDS: Any = {"obs_continuous": "mean_std", "q_star": "min_max", "reward": "quantiles", "obs_image": "mean_std"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"boundary": "episode", "pad": 0.0, "fields": [*KINDS, "done"]},
    {"augment": AugmentTokensConfig(scale_obs=AugmentScalarSpec(mean=1.0, std=0.3)), "views": 2},
    {"sequence_length": None, "windows": {"obs_continuous": [-1, 0], "obs_image": [-1, 0]}},
]


@pytest.fixture(scope="module")
def store() -> DatasetStore:
    return example_store(300)


def kinds_of(store: DatasetStore, options: dict[str, Any]) -> Any:
    fields = options.get("fields") or store.snapshot().spec
    return {name: kind for name, kind in KINDS.items() if name in fields and name in store.snapshot().spec}


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "padded", "augmented", "windows"))
def test_one_stream_of_bits(options: dict[str, Any], store: DatasetStore, x64: bool) -> None:
    kinds = kinds_of(store, options)
    if "pad" in options:
        kinds = {name: kind for name, kind in kinds.items() if name != "obs_image"}
        options = {**options, "fields": [*kinds, "done"]}
    streams = {}
    for name, package in PACKAGES.items():
        asked = {"sequence_length": 8, "batch_size": 4, "seed": 3, "normalize": kinds, **options}
        with package.PrefetchBatchifier(store, **asked) as loader:
            batches = [loader.next_batch() for _ in range(5)]
            views = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
            streams[name] = [tuple(map(as_arrays, batch)) for batch in views]
            assert loader.spec["obs_continuous"].dtype == np.float32
    for batches in zip(*streams.values(), strict=True):
        for one, *others in zip(*batches, strict=True):
            for name in kinds:
                assert {np.asarray(view[name]).dtype.name for view in (one, *others)} == {"float32"}
                assert {np.asarray(view[name]).tobytes() for view in others} == {np.asarray(one[name]).tobytes()}


def test_what_is_moved_in_stored_dtypes_has_the_same_bits(store: DatasetStore) -> None:
    """As a loader for a device moves it, and widens it there."""
    source = BatchSource(store, 8, 4, normalize=kinds_of(store, {}))
    stored, delivered = source.gather(source.plan(1), stored=True), source[1]
    for name, spec in source.spec.items():
        assert stored[name].dtype == spec.stored_dtype
        assert torch.from_numpy(stored[name]).to(torch.from_numpy(delivered[name]).dtype).numpy().tobytes() == (
            delivered[name].tobytes()
        )


def test_applying_and_undoing_in_each_framework(x64: bool) -> None:
    values = np.random.default_rng(0).normal([0, 1e5, -3], [1, 2, 1e-3], (64, 3)).astype(np.float32)
    plain = DatasetStore()
    n = len(values)
    plain.extend({"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "observation": values})
    scaling = BatchSource(plain, 8, 4, normalize={"obs_continuous": "mean_std"}).normalizer["obs_continuous"]
    expected = scaling.apply(values)
    tolerance = 4e-7 * (np.abs(scaling.centre) + np.abs(values - scaling.centre))
    jitted = jax.jit(scaling.undo)
    for given, to_numpy, undo in (
        (torch.from_numpy(values), lambda found: found.numpy(), scaling.undo),
        (jnp.asarray(values), np.asarray, scaling.undo),
        (jnp.asarray(values), np.asarray, jitted),
    ):
        applied: Any = scaling.apply(given)
        assert type(applied) is type(given)
        assert to_numpy(applied).tobytes() == expected.tobytes()
        back = undo(applied)
        assert type(back) is type(given)
        assert (np.abs(to_numpy(back).astype(np.float64) - values) <= tolerance).all()
    half = torch.from_numpy(expected).to(torch.bfloat16)
    assert scaling.undo(half).dtype == torch.float32
    gradient = torch.zeros(3, requires_grad=True)
    scaling.undo(gradient).sum().backward()  # type: ignore[no-untyped-call]
    assert gradient.grad is not None
    np.testing.assert_allclose(gradient.grad.numpy(), scaling.spread, rtol=1e-6)
