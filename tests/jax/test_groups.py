"""Padding and packing in JAX: the same values, types and errors as in NumPy."""

from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mouse_core import ConfigError, DataError, groups
from mouse_jax.groups import RolloutStream, concatenate, pack, pad
from tests.core.groups_cases import rollout, with_columns

EXAMPLES = groups.make_examples([rollout(number, tokens=number) for number in range(6)], np.arange(6.0))


def test_a_sharding_lays_rows_out() -> None:
    mesh = jax.make_mesh((4,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    packed = pack(EXAMPLES, 16, num_rows=4, sharding=sharding)
    assert packed["tokens"].sharding == sharding
    np.testing.assert_array_equal(packed["tokens"], groups.pack(EXAMPLES, 16, num_rows=4)["tokens"])
    with pytest.raises(ConfigError, match=r"sharding: expected a sharding that divides arrays of shape \[6, 12\]"):
        pad(EXAMPLES, 12, sharding=sharding)
    with pytest.raises(ConfigError, match="device: when sharding is given, expected None"):
        pad(EXAMPLES, device="cpu", sharding=sharding)


class Stored:
    """The one batch of a buffer."""

    def __init__(self, examples: list[groups.RLExample]) -> None:
        self.examples = examples

    def batch_at(self, index: int) -> str:
        return str(index)

    def read_batch(self, batch_id: str) -> list[groups.RLExample]:
        return self.examples

    def batch_staleness(self, batch_id: str) -> Any:
        return np.zeros(len(self.examples))


def test_what_has_no_tokens_axis_is_laid_out_along_rows() -> None:
    mesh = jax.make_mesh((2, 2), ("rows", "tokens"))
    examples = [with_columns(length) for length in (3, 2)]
    for spec in (("rows", None), ("rows", "tokens")):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        padded = pad(examples, 4, sharding=sharding)
        assert padded["tokens"].sharding == sharding
        assert padded["per_token"].sharding.spec == sharding.spec
        assert padded["per_example"].sharding.spec == PartitionSpec("rows")
        # A value of an example is as long as the row.
        short = pad([with_columns(2)] * 2, sharding=sharding)
        assert short["per_example"].shape == short["tokens"].shape
        assert short["per_example"].sharding.spec == PartitionSpec("rows")
        stream = RolloutStream(Stored(examples), 8, collate="concatenate", sharding=sharding)
        (joined,) = next(stream)
        assert joined["position"].sharding.spec == PartitionSpec("rows")
        assert joined["cu_seqlens"].sharding.spec == PartitionSpec()


def test_values_that_jax_does_not_hold_are_refused_by_name() -> None:
    assert not jax.config.jax_enable_x64
    column = [groups.RolloutColumn("judged", "example", "int64"), groups.RolloutColumn("score", "example", "float64")]

    def example(judged: int, score: float) -> groups.RLExample:
        columns = {"judged": judged, "score": score}
        return groups.RLExample([1], [True], [0.0], [0.0], columns=columns, declared=column)  # type: ignore[arg-type]

    found = pad([example(2**31 - 1, 0.1)])
    assert (found["judged"].dtype, found["score"].dtype) == (np.int32, np.float32)
    assert (int(found["judged"][0]), float(found["score"][0])) == (2**31 - 1, np.float32(0.1))
    for judged, score, name in ((2**40 + 5, 0.0, "judged"), (0, 1e300, "score")):
        for call in (pad, concatenate, lambda given: pack(given, 4)):
            with pytest.raises(DataError, match=f"field '{name}'"):
                call([example(judged, score)])


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
