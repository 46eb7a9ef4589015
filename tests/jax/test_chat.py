"""Batches of pairs in JAX: laid out over devices, and refused where a number does not fit."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mouse_core import ConfigError, DataError
from mouse_jax.chat import collate_rewards

PAIRS = [{"chosen_ids": [4, 5], "rejected_ids": [6], "margin": number} for number in (0.0, 0.5)]


def test_a_sharding_lays_out_and_numbers_are_never_wrapped() -> None:
    mesh = jax.make_mesh((4,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    found = collate_rewards(PAIRS * 2, pad_token_id=0, sharding=sharding)
    assert {values.sharding for values in found.values()} == {sharding}
    with pytest.raises(ConfigError, match=r"sharding: expected one that divides .*'margin': \[3\]"):
        collate_rewards([*PAIRS, PAIRS[0]], pad_token_id=0, sharding=sharding)
    too_large = [{"chosen_ids": [2**40 + 5], "rejected_ids": [1]}]
    with pytest.raises(DataError, match="input_ids"):
        collate_rewards(too_large, pad_token_id=0)
