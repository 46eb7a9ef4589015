"""Pairs and prompts of tokens have the arrays of their framework."""

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
from tests.core.text_cases import PAD, examples, tokenizer

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
ROWS: dict[str, Any] = {"windows": {}, "sampling": "sequential", "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


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
