"""Packed batches in JAX: filled up to one size, so that a step is compiled once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mouse_core import BatchSource, ConfigError
from mouse_core.testing import example_store
from mouse_jax import PrefetchBatchifier

OPTIONS: Any = {"lengths": range(1, 9), "fields": ["obs_discrete", "reward"], "seed": 3}


def test_a_step_is_compiled_once_and_leaves_out_what_fills_up() -> None:
    compiled = []

    @jax.jit
    def sums(batch: Any) -> Any:
        compiled.append(batch["reward"].shape)
        by_number = jax.ops.segment_sum(batch["reward"], batch["sequence_id"], num_segments=4)
        return by_number, jnp.where(batch["mask"], batch["reward"], 0).sum()

    source = BatchSource(example_store(), 8, 4, **OPTIONS)
    with PrefetchBatchifier(example_store(), 8, 4, packed=32, **OPTIONS) as loader:
        for index in range(8):
            by_number, total = sums(loader.next_batch())
            padded = source[index]
            expected = np.where(padded["mask"], padded["reward"], 0).sum(axis=1)
            np.testing.assert_allclose(by_number, expected, 1e-5, 1e-6)
            np.testing.assert_allclose(total, expected.sum(), 1e-5, 1e-5)
    assert compiled == [(32,)]


def test_a_sharding_is_refused() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    with pytest.raises(ConfigError, match="sharding: when packed= is given, expected None"):
        PrefetchBatchifier(example_store(), 8, 4, packed=32, sharding=sharding, **OPTIONS)
