"""Batches of chats, of pairs for DPO and for reward models: in torch and in JAX those of NumPy."""

import inspect
from typing import Any

import jax
import numpy as np
import pytest
import torch

import mouse_jax.chat
import mouse_torch.chat
from mouse_core import ConfigError, DataError
from mouse_core.testing import as_arrays
from mouse_core.text import chat
from tests.core.chat_cases import CHATML, TALK, template, tokenizer

ADAPTERS: dict[str, Any] = {"torch": (mouse_torch.chat, torch.Tensor), "jax": (mouse_jax.chat, jax.Array)}
PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6], "ref_chosen_logps": -1.5, "margin": 1},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11], "ref_chosen_logps": -0.5, "margin": 0.5},
]
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("collate_chats", [chat.encode_chat(template(CHATML), TALK[:end], tokenizer()) for end in (2, 4)], {}),
    ("collate_preferences", PAIRS, {"max_length": 4, "truncation_mode": "keep_end", "pad_to_multiple_of": 8}),
    ("collate_preferences", PAIRS, {"two_blocks": True}),
    ("collate_rewards", PAIRS, {"padding_side": "left", "max_length": 4}),
    ("collate_rewards", PAIRS, {"two_blocks": True}),
]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_batches_are_those_of_numpy(adapter: str) -> None:
    module, kind = ADAPTERS[adapter]
    for name, examples, options in CASES:
        expected = getattr(chat, name)(examples, pad_token_id=3, **options)
        found = getattr(module, name)(examples, pad_token_id=3, device="cpu", **options)
        assert list(found) == list(expected)
        assert all(isinstance(values, kind) for values in found.values())
        narrow = mouse_jax.replaced_dtypes() if adapter == "jax" else {}
        for field, values in as_arrays(found).items():
            wanted = expected[field]
            assert values.dtype == narrow.get(wanted.dtype, wanted.dtype)
            np.testing.assert_array_equal(values, wanted)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_arguments_and_errors_are_those_of_numpy(adapter: str) -> None:
    module, _ = ADAPTERS[adapter]
    for name in module.__all__:
        theirs = inspect.signature(getattr(chat, name)).parameters
        ours = inspect.signature(getattr(module, name)).parameters
        assert {one: ours[one].default for one in theirs} == {one: theirs[one].default for one in theirs}
        assert ours.keys() - theirs.keys() == ({"device"} if adapter == "torch" else {"device", "sharding"})
        with pytest.raises(DataError, match="expected one or more, found none"):
            getattr(module, name)([], pad_token_id=0)
        with pytest.raises(ConfigError, match="device: expected"):
            getattr(module, name)([], pad_token_id=0, device="nowhere")
