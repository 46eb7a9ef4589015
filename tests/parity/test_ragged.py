"""Windows of lengths of their own are the same in NumPy, PyTorch and JAX, to the bit, padded and packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core.testing import as_arrays, example_store

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
DTYPES = {"obs_continuous": "float32", "action": "int32"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packed", [False, True, 40])
@pytest.mark.parametrize("options", [{}, {"boundary": "episode"}, {"windows": {"action": range(3)}}, {"views": 2}])
def test_one_stream_of_bits(options: dict[str, Any], packed: Any, workers: int) -> None:
    fields = ["action", "reward", "obs_continuous", "obs_image"]
    chosen = {"lengths": range(1, 9), "packed": packed, "dtypes": DTYPES, "fields": fields, "digest": True, **options}
    streams, digests = {}, set()
    for name, package in PACKAGES.items():
        with package.PrefetchBatchifier(example_store(), 8, 4, seed=3, num_workers=workers, **chosen) as loader:
            batches = [loader.next_batch() for _ in range(5)]
            streams[name] = [as_arrays(view) for one in batches for view in (one if isinstance(one, tuple) else (one,))]
            digests.add(str(loader.digest))
    assert len(digests) == 1
    for one, *others in zip(*streams.values(), strict=True):
        assert ("cu_seqlens" in one) == bool(packed)
        for view in others:
            assert set(view) == set(one)
            for field, values in one.items():
                assert view[field].shape == values.shape
                assert np.asarray(view[field]).tobytes() == values.astype(view[field].dtype).tobytes()
