"""A function of one's own gets the same in NumPy, PyTorch and JAX, and what it makes has the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import Map
from mouse_core.testing import as_arrays, example_store

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}


def made(fields: Any, generator: np.random.Generator) -> Any:
    """A field from what comes as float64 and int64, which JAX may lack."""
    scaled = fields["obs_continuous"] * np.pi + fields["action"][..., None] / 3
    return {
        "scaled": scaled.astype(np.float32),
        "code": generator.integers(0, 100, fields["reward"].shape),
        "wide": scaled.sum(axis=-1),
    }


SPEC: dict[str, Any] = {"scaled": ("float32", (5,)), "code": ("int64", ()), "wide": ("float64", ())}


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("per", ["batch", "window"])
@pytest.mark.parametrize("workers", [0, 2])
def test_one_stream_of_bits(per: Any, workers: int, x64: bool) -> None:
    store, streams = example_store(300), {}
    with jax.enable_x64(True) if x64 else nullcontext():
        for name, package in PACKAGES.items():
            chosen = Map(made, "made/1", SPEC, per=per, drop=["obs_image"])
            with package.PrefetchBatchifier(store, 8, 4, seed=3, num_workers=workers, map=chosen) as loader:
                streams[name] = [as_arrays(loader.next_batch()) for _ in range(4)]
                assert list(loader.spec) == list(streams[name][0])
                fingerprint = loader.source.fingerprint
            with mouse_core.PrefetchBatchifier(store, 8, 4, map=chosen) as other:
                assert other.source.fingerprint == fingerprint
    for one, *others in zip(*streams.values(), strict=True):
        for view in others:
            assert "obs_image" not in view
            assert np.asarray(view["scaled"]).tobytes() == one["scaled"].tobytes()
            for name in ("code", "wide"):
                values = np.asarray(view[name])
                assert values.tobytes() == one[name].astype(values.dtype).tobytes()
    widths = {name: np.asarray(stream[0]["wide"]).dtype.name for name, stream in streams.items()}
    assert widths == {"numpy": "float64", "torch": "float64", "jax": "float64" if x64 else "float32"}
