"""Pairs of chats as stored rows, beside those that TRL's collator makes of the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mouse_core import BatchSource, text
from mouse_core.text import chat
from tests.core.chat_cases import CHATML, template, tokenizer

pytestmark = pytest.mark.trainers
pytest.importorskip("trl")

PAIR = {
    "prompt": [{"role": "user", "content": "one and one"}],
    "chosen": [{"role": "assistant", "content": "two"}],
    "rejected": [{"role": "assistant", "content": "three, or more"}],
}


@pytest.mark.parametrize(("side", "mode"), [("right", "keep_start"), ("left", "keep_end")])
def test_pairs_are_those_of_trl(side: str, mode: str, tmp_path: Path) -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    made = template(CHATML)
    ids = chat.encode_preference(made, **PAIR, tokenizer=tokenizer())
    options = {"pad_token_id": 0, "max_length": 24, "truncation_mode": mode, "pad_to_multiple_of": 24}
    wanted = DataCollatorForPreference(**options)([{name: one.tolist() for name, one in ids.items()}])
    recipe = chat.Preferences(template=made, max_length=24, pad_id=0, truncation_side=side)
    store = text.tokenize([PAIR], tokenizer(), tmp_path, recipe).to_store()
    batch = BatchSource(store, batch_size=1, windows={})[0]
    for name, values in wanted.items():
        found = [batch[f"{answer}_data.{name}"][0] for answer in ("chosen", "rejected")]
        np.testing.assert_array_equal(values.numpy(), found)
