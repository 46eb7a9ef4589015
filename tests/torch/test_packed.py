"""Packed batches and groups of rollouts in torch: as variable-length attention takes them, and as nested tensors."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, groups
from mouse_core.sampling.lengths import sequence_fields
from mouse_core.testing import example_store
from mouse_torch import DataLoader, PrefetchBatchifier, as_nested
from mouse_torch.groups import concatenate, pack, pad
from tests.core.groups_cases import rollout, with_columns

OPTIONS: Any = {"lengths": range(1, 9), "fields": ["obs_continuous", "reward"], "seed": 3}


def windows_of(batch: Any, name: str) -> list[torch.Tensor]:
    """Each window's rows."""
    bounds = batch["cu_seqlens"].tolist()
    return [batch[name][begin:end] for begin, end in pairwise(bounds)]


def attention(values: torch.Tensor) -> torch.Tensor:
    """Causal attention in one window ``[L, heads, width]``."""
    heads = values.transpose(0, 1)
    return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(0, 1)


def packed_attention(batch: Any, values: torch.Tensor) -> torch.Tensor:
    """The same over packed windows, as variable-length attention is defined: within a sequence, and causal."""
    sequence, position = batch["sequence_id"], batch["position"]
    allowed = (sequence[:, None] == sequence) & (position[:, None] >= position)
    heads = values.transpose(0, 1)
    return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed).transpose(0, 1)


@pytest.mark.parametrize("packed", [True, 40])
def test_attention_over_packed_windows_is_that_of_each(packed: Any) -> None:
    with PrefetchBatchifier(example_store(), 8, 4, packed=packed, **OPTIONS) as loader:
        batch = loader.next_batch()
    assert batch.batch_size == torch.Size([])
    assert batch["cu_seqlens"].dtype == torch.int32
    rows = int(batch["cu_seqlens"][-1])
    values = batch["obs_continuous"].to(torch.float64)[..., :4].reshape(-1, 2, 2)
    ones = {"cu_seqlens": batch["cu_seqlens"], "values": values}
    expected = torch.cat([attention(window) for window in windows_of(ones, "values")])
    torch.testing.assert_close(packed_attention(batch, values)[:rows], expected)


@pytest.mark.parametrize(("packed", "loader_class"), [(True, PrefetchBatchifier), (40, DataLoader)])
def test_nested_tensors_are_the_windows(loader_class: Any, packed: Any) -> None:
    source = BatchSource(example_store(), 8, 4, **OPTIONS)
    with loader_class(example_store(), 8, 4, packed=packed, **OPTIONS) as loader:
        for index in range(4):
            batch, padded = loader.next_batch(), source[index]
            nested = as_nested(batch)
            assert nested.batch_size == torch.Size([4])
            assert set(nested.keys()) == {"obs_continuous", "reward", "position"}
            for name in ("obs_continuous", "reward"):
                assert nested[name].layout == torch.jagged
                assert nested[name].values().data_ptr() == batch[name].data_ptr()
                for window, values in enumerate(nested[name].unbind()):
                    assert np.array_equal(values.numpy(), padded[name][window][padded["mask"][window]])
            # What is computed of one goes with another.
            total = nested["obs_continuous"].sum(-1) + nested["reward"]
            assert total.values().shape == nested["reward"].values().shape
    with loader_class(example_store(), 8, 4, packed=packed, views=2, **OPTIONS) as loader:
        one, other = as_nested(loader.next_batch())
    assert one.batch_size == other.batch_size == torch.Size([4])
    for wrong in ({name: torch.from_numpy(values) for name, values in source[0].items()}, {"x": torch.zeros(3)}, 5):
        with pytest.raises(ConfigError, match="as_nested: expected a batch with cu_seqlens"):
            as_nested(wrong)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.none() | st.integers(0, 9))
def test_sequences_of_no_rows_are_there_too(lengths: list[int], more: int | None) -> None:
    fields = sequence_fields(np.array(lengths), None if more is None else sum(lengths) + more)
    tensors = {name: torch.from_numpy(values) for name, values in fields.items()}
    nested = as_nested({**tensors, "x": torch.arange(len(fields["position"]))})
    assert [len(window) for window in nested["x"].unbind()] == lengths
    assert torch.cat(list(nested["x"].unbind())).tolist() == list(range(sum(lengths)))


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
