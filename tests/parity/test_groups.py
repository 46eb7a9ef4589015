"""Padding, packing and streams of rollouts in torch and JAX: the values, types and errors of NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mouse_jax.groups
import mouse_torch.groups
from mouse_core import DataError, groups
from tests.comparing import same
from tests.core.groups_cases import group, rollout, with_columns

EXAMPLES = groups.make_examples([rollout(number, tokens=number) for number in range(6)], np.arange(6.0))


@pytest.fixture(params=[mouse_torch.groups, mouse_jax.groups], ids=["torch", "jax"])
def package(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_values_are_those_of_numpy(package: Any) -> None:
    for name, examples, arguments, options in (
        ("pad", EXAMPLES, (12,), {"pad_token": 3}),
        ("pack", EXAMPLES, (16,), {"num_rows": 4}),
        ("concatenate", EXAMPLES, (), {}),
        ("concatenate", EXAMPLES, (99,), {"pad_token": 3}),
        ("pad", [with_columns(3), with_columns(2)], (), {}),
        ("pack", [with_columns(3), with_columns(2)], (8,), {"max_examples": 3}),
        ("concatenate", [with_columns(3), with_columns(2)], (9,), {}),
    ):
        found, expected = (getattr(of, name)(examples, *arguments, **options) for of in (package, groups))
        same(found, expected, strict=True)


def test_what_cannot_be_is_refused(package: Any) -> None:
    with pytest.raises(DataError, match="expected at most 4 tokens"):
        package.pack(EXAMPLES, 4)


def test_streams_are_those_of_numpy(package: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"collate": "pad", "length": 12, "shard": (0, 2), "batch_size": 8}
    with groups.RolloutBuffer(tmp_path, batch_maker=groups.GrpoBatchMaker(), sync=False) as buffer:
        buffer.add_rollouts(group(0, 8))
        share, expected = (next(of.RolloutStream(buffer, 24, **options)) for of in (package, groups))
        assert share.digest == expected.digest
        assert len(share) == len(expected) == 2
        for ours, theirs in zip(share, expected, strict=True):
            same(ours, theirs, strict=True)
