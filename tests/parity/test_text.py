"""Rows of tokens are the same in NumPy, PyTorch and JAX: padded, as pairs, as windows and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import text
from mouse_core.testing import as_arrays
from mouse_core.text import chat
from tests.core.chat_cases import TALK, TOOL_TALK, TOOLS, template
from tests.core.chat_cases import tokenizer as chat_tokenizer
from tests.core.text_cases import EOS, PAD, examples, tokenizer

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
CHATS = [
    {"messages": talk, "prompt": talk[:1], "chosen": talk[1:], "rejected": talk[1:2]}
    for talk in (chat.to_openai(talk[:end]) for talk in (TALK, TOOL_TALK[1:]) for end in (2, 3, 4, 5))
]
ROWS: dict[str, Any] = {"windows": {}, "sampling": "sequential", "batch_size": 4}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompts": (text.Prompts(max_length=16, pad_id=PAD), ROWS),
    "pairs": (text.Pairs(max_length=16, pad_id=PAD), ROWS),
    "a share of texts": (text.Texts(max_length=8, pad_id=PAD), {**ROWS, "shard": (1, 2)}),
    "windows": (text.Tokens(eos_id=EOS), {"sequence_length": 8, "batch_size": 4}),
    "chats": (chat.Chats(template=template(TOOLS), max_length=64, pad_id=PAD), ROWS),
    "pairs of chats": (chat.Preferences(template=template(TOOLS), max_length=256, pad_id=PAD), ROWS),
    "packed chats": (
        chat.ChatTokens(template=template(TOOLS)),
        {"sequence_length": 24, "batch_size": 4, "boundary": "episode", "packed": 96},
    ),
    "packed": (text.Tokens(eos_id=EOS), {"sequence_length": 8, "batch_size": 4, "boundary": "episode", "packed": 32}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.mark.parametrize("name", CASES)
def test_one_stream_of_bits_that_goes_on_from_any_state(name: str, folder: Path) -> None:
    recipe, options = CASES[name]
    source, made_by = (CHATS, chat_tokenizer()) if "template" in vars(recipe) else (examples(), tokenizer())
    store = text.tokenize(source, made_by, folder, recipe).to_store()
    dtypes = {name: "int32" for name in mouse_core.BatchSource(store, **options).spec if name in store.fields}
    streams, digests, states = [], set(), []
    for package in PACKAGES.values():
        with package.PrefetchBatchifier(store, seed=3, dtypes=dtypes, digest=True, **options) as loader:
            batches = [as_arrays(loader.next_batch()) for _ in range(3)]
            states.append(loader.state_dict())
            batches += [as_arrays(loader.next_batch()) for _ in range(40)]
            streams.append(batches)
            digests.add(str(loader.digest))
    assert len(digests) == 1
    for one, *others in zip(*streams, strict=True):
        for other in others:
            assert all(np.array_equal(other[field], values) for field, values in one.items())
    for package, state in zip(PACKAGES.values(), reversed(states), strict=True):
        with package.PrefetchBatchifier(store, seed=8, dtypes=dtypes, digest=True, **options) as loader:
            loader.load_state_dict(state)
            batch = as_arrays(loader.next_batch())
            assert all(np.array_equal(batch[field], values) for field, values in streams[0][3].items())


@pytest.mark.parametrize("package", PACKAGES)
def test_pairs_and_prompts_of_any_framework(package: str, folder: Path) -> None:
    def batch_of(recipe: Any) -> Any:
        store = text.tokenize(examples(), tokenizer(), folder, recipe).to_store()
        with PACKAGES[package].PrefetchBatchifier(store, **ROWS) as loader:
            return loader.next_batch()

    batch = batch_of(text.Pairs(max_length=16, pad_id=PAD))
    pairs = text.as_pairs(batch)
    assert pairs["rejected_data"]["input_ids"].shape == (4, 16)
    prompts = batch_of(text.Prompts(max_length=16, pad_id=PAD))
    alone = text.mask_label(prompts, pad_id=PAD)
    wanted = text.mask_label(as_arrays(prompts), pad_id=PAD)
    for field, values in wanted.items():
        assert type(alone[field]) is type(prompts["input_ids"])
        np.testing.assert_array_equal(np.asarray(alone[field]), values)
    if package == "torch":
        assert tuple(batch.batch_size) == (4,)
        assert alone["attention_mask"].dtype == torch.int64
