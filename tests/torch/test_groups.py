"""Padding and packing in torch: the same values, types and errors as in NumPy."""

import numpy as np
import torch

from mouse_core import groups
from mouse_torch import as_nested
from mouse_torch.groups import concatenate, pack, pad
from tests.core.groups_cases import rollout, with_columns

EXAMPLES = groups.make_examples([rollout(number, tokens=number) for number in range(6)], np.arange(6.0))


def test_examples_as_nested_tensors() -> None:
    for capacity in (None, 99):
        nested = as_nested(concatenate(EXAMPLES, capacity))
        assert nested.batch_size == torch.Size([len(EXAMPLES)])
        for row, example in zip(nested["tokens"].unbind(), EXAMPLES, strict=True):
            np.testing.assert_array_equal(row.numpy(), example.tokens)


def test_what_a_model_gives_is_taken_and_no_memory_of_it_kept() -> None:
    values = torch.tensor([-0.5, -1.25], dtype=torch.bfloat16, requires_grad=True)
    ids, column = torch.tensor([3, 4]), torch.zeros(2)
    turn = groups.Turn("a", "assistant", ids, values, columns={"own": column, "narrow": values})
    ids += 1
    column += 1
    assert (turn.tokens.tolist(), turn.logprobs.tolist()) == ([3, 4], [-0.5, -1.25])
    assert {name: array.tolist() for name, array in turn.columns.items()} == {"own": [0, 0], "narrow": [-0.5, -1.25]}


def test_the_size_of_a_batch_is_that_of_its_tokens() -> None:
    for found, size in (
        (pad(EXAMPLES, 12), (6, 12)),
        (pack(EXAMPLES, 16, num_rows=4), (4, 16)),
        (concatenate(EXAMPLES), ()),
        # A value of an example may be as long as a row, and is none of its tokens.
        (pad([with_columns(3), with_columns(2)], 3), (2,)),
        (pad([with_columns(2)] * 2), (2,)),
        (pack([with_columns(2)] * 2, 2), (2,)),
    ):
        assert found.batch_size == torch.Size(size)
