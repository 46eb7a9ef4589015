"""Padding and packing in JAX: the same values, types and errors as in NumPy."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mouse_core import ConfigError, DataError, groups
from mouse_jax.groups import RolloutStream, concatenate, pack, pad
from tests.core.groups_cases import rollout

EXAMPLES = groups.make_examples([rollout(number, tokens=number) for number in range(6)], np.arange(6.0))
DECLARED = [groups.RolloutColumn(f"per_{per}", per, "float32", (2,)) for per in ("token", "turn", "example")]


def test_values_are_those_of_numpy() -> None:
    for ours, theirs in [
        (pad(EXAMPLES, 12, pad_token=3), groups.pad(EXAMPLES, 12, pad_token=3)),
        (pack(EXAMPLES, 16, num_rows=4), groups.pack(EXAMPLES, 16, num_rows=4)),
        (concatenate(EXAMPLES), groups.concatenate(EXAMPLES)),
        (concatenate(EXAMPLES, 99, pad_token=3), groups.concatenate(EXAMPLES, 99, pad_token=3)),
    ]:
        assert set(ours) == set(theirs)
        for name, values in theirs.items():
            assert isinstance(ours[name], jax.Array)
            assert ours[name].dtype == values.dtype
            np.testing.assert_array_equal(ours[name], values)


def test_a_sharding_lays_rows_out() -> None:
    mesh = jax.make_mesh((4,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    packed = pack(EXAMPLES, 16, num_rows=4, sharding=sharding)
    assert packed["tokens"].sharding == sharding
    np.testing.assert_array_equal(packed["tokens"], groups.pack(EXAMPLES, 16, num_rows=4)["tokens"])
    with pytest.raises(ConfigError, match=r"sharding: expected one that divides arrays of shape \[6, 12\]"):
        pad(EXAMPLES, 12, sharding=sharding)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="device: expected one of this machine"):
        pad(EXAMPLES, device="nowhere")
    with pytest.raises(ConfigError, match="device: expected None beside a sharding"):
        pad(EXAMPLES, device="cpu", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(DataError, match="expected at most 4 tokens"):
        pack(EXAMPLES, 4)


def test_columns_that_were_declared() -> None:
    def example(length: int) -> groups.RLExample:
        columns = {"per_token": np.ones((length, 2)), "per_turn": np.ones((2, 2)), "per_example": [length, 1.0]}
        ids, nothing = np.arange(length) % 2, np.zeros(length)
        return groups.RLExample(
            nothing.astype(int), ids > 0, nothing, nothing, columns=columns, turn_ids=ids, declared=DECLARED
        )

    wide = {"max_turns": 5, "max_examples": 3}
    examples = [example(3), example(2)]
    for found, expected in (
        (pad(examples, max_turns=3), groups.pad(examples, max_turns=3)),
        (pack(examples, 8, **wide), groups.pack(examples, 8, **wide)),
        (concatenate(examples, 9, max_turns=6), groups.concatenate(examples, 9, max_turns=6)),
    ):
        assert set(found.keys()) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(np.asarray(found[name]), values)


def test_streams_are_those_of_numpy_and_compile_once(tmp_path: Path) -> None:
    maker = groups.GrpoBatchMaker()
    compiled = 0

    @jax.jit
    def loss(arrays: dict[str, jax.Array]) -> jax.Array:
        nonlocal compiled
        compiled += 1
        return (arrays["advantage"] * arrays["loss_mask"]).sum()

    with groups.RolloutBuffer(tmp_path, batch_maker=maker, sync=False) as buffer:
        for first in (0, 8):
            buffer.add_rollouts(rollout(n, example=f"p{first}", tokens=2 + n) for n in range(first, first + 8))
        batch_size = 8
        for rank in range(3):
            options: dict[str, Any] = {"shard": (rank, 3), "batch_size": batch_size, "length": 24}
            ours, theirs = RolloutStream(buffer, 48, **options), groups.RolloutStream(buffer, 48, **options)
            for share, expected in islice(zip(ours, theirs, strict=True), 2):
                assert share.digest == expected.digest
                for placed, arrays in zip(share, expected, strict=True):
                    assert isinstance(placed["tokens"], jax.Array)
                    np.testing.assert_array_equal(placed["tokens"], arrays["tokens"])
                    assert loss(placed) == pytest.approx(float(arrays["advantage"].sum()), abs=1e-4)
    assert compiled == 1
    with pytest.raises(ConfigError, match="device: expected one of this machine"):
        RolloutStream(tmp_path, 24, device="nowhere")
