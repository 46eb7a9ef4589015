"""Padding and packing in torch: the same values, types and errors as in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from mouse_core import ConfigError, DataError, groups
from mouse_core.text import chat
from mouse_torch import as_nested
from mouse_torch.groups import RolloutStream, concatenate, pack, pad
from tests.core.groups_cases import group, rollout

EXAMPLES = groups.make_examples([rollout(number, tokens=number) for number in range(6)], np.arange(6.0))
DECLARED = [groups.RolloutColumn(f"per_{per}", per, "float32", (2,)) for per in ("token", "turn", "example")]


def test_values_are_those_of_numpy() -> None:
    for ours, theirs in [
        (pad(EXAMPLES, 12, pad_token=3), groups.pad(EXAMPLES, 12, pad_token=3)),
        (pack(EXAMPLES, 16, num_rows=4), groups.pack(EXAMPLES, 16, num_rows=4)),
        (concatenate(EXAMPLES), groups.concatenate(EXAMPLES)),
        (concatenate(EXAMPLES, 99, pad_token=3), groups.concatenate(EXAMPLES, 99, pad_token=3)),
    ]:
        assert set(ours.keys()) == set(theirs)
        assert ours.batch_size == torch.Size(() if "cu_seqlens" in theirs else theirs["tokens"].shape)
        for name, values in theirs.items():
            assert ours[name].numpy().dtype == values.dtype
            np.testing.assert_array_equal(ours[name].numpy(), values)
    assert pad(EXAMPLES)["tokens"].dtype == torch.int32


def test_examples_as_nested_tensors() -> None:
    for capacity in (None, 99):
        nested = as_nested(concatenate(EXAMPLES, capacity))
        assert nested.batch_size == torch.Size([len(EXAMPLES)])
        for row, example in zip(nested["tokens"].unbind(), EXAMPLES, strict=True):
            np.testing.assert_array_equal(row.numpy(), example.tokens)


def test_what_a_model_gives_is_taken_and_no_memory_of_it_kept() -> None:
    """Tensors of 16 bits and those that take gradients; columns do not change with the tensor."""
    values = torch.tensor([-0.5, -1.25], dtype=torch.bfloat16, requires_grad=True)
    ids, column = torch.tensor([3, 4]), torch.zeros(2)
    turn = groups.Turn("a", "assistant", ids, values, columns={"own": column, "narrow": values})
    ids += 1
    column += 1
    assert (turn.tokens.tolist(), turn.logprobs.tolist()) == ([3, 4], [-0.5, -1.25])
    assert {name: array.tolist() for name, array in turn.columns.items()} == {"own": [0, 0], "narrow": [-0.5, -1.25]}
    told = [chat.Message("assistant", "a")]
    encoded = chat.EncodedChat(
        np.arange(2), np.ones(2, int), np.array([[0, 1], [1, 1]]), chat.RenderedChat("a", ((0, 1),), tuple(told))
    )
    assert chat.to_turns(encoded, logprobs=values)[0].logprobs.tolist() == [-0.5, -1.25]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="device: expected"):
        pad(EXAMPLES, device="nowhere")
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
    # A value of an example may be as long as a row, and is none of its tokens.
    assert pad(examples, 3).batch_size == pad([example(2)] * 2).batch_size == torch.Size([2])
    assert pack([example(2)] * 2, 2).batch_size == torch.Size([2])


def test_streams_are_those_of_numpy(tmp_path: Path) -> None:
    options: dict[str, Any] = {"collate": "pad", "length": 12, "shard": (0, 2), "batch_size": 8}
    maker = groups.GrpoBatchMaker()
    with groups.RolloutBuffer(tmp_path, batch_maker=maker, sync=False) as buffer:
        buffer.add_rollouts(group(0, 8))
        share = next(RolloutStream(buffer, 24, device="cpu", **options))
        expected = next(groups.RolloutStream(buffer, 24, **options))
        assert share.digest == expected.digest
        assert len(share) == 2
        for ours, theirs in zip(share, expected, strict=True):
            assert isinstance(ours, TensorDict)
            for name, values in theirs.items():
                np.testing.assert_array_equal(ours[name].numpy(), values)
    with pytest.raises(ConfigError, match="device: expected"):
        RolloutStream(tmp_path, 24, device="nowhere")
