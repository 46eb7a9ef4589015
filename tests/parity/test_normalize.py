"""Normalised batches have the same bits however they are moved, and a policy's output is undone in each framework."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mouse_core import BatchSource, DatasetStore
from mouse_core.testing import example_store

KINDS: Any = {"obs_continuous": "mean_std", "q_star": "min_max", "reward": "quantiles", "obs_image": "mean_std"}


def test_what_is_moved_in_stored_dtypes_has_the_same_bits() -> None:
    source = BatchSource(example_store(300), 8, 4, normalize=KINDS)
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
