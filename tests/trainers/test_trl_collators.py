"""Batches of chats and of pairs beside those that TRL's collators make of the same."""

from typing import Any

import pytest
import torch

from mouse_core.text.chat import ChatTemplate, encode_chat, to_openai
from mouse_torch.chat import collate_chats, collate_preferences, collate_rewards
from tests.core.chat_cases import TALK, TOOL_TALK, TOOLS, WEATHER, fresh_tokenizer

pytestmark = pytest.mark.trainers
pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6], "ref_chosen_logps": -1.5, "margin": 1.0},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11], "ref_chosen_logps": -0.5, "margin": 0.5},
]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("multiple", [None, 8])
def test_pairs_are_those_of_trl(multiple: int | None) -> None:
    from trl.trainer import dpo_trainer, reward_trainer

    for mode in ("keep_start", "keep_end"):
        options: dict[str, Any] = {"max_length": 4, "truncation_mode": mode, "pad_to_multiple_of": multiple}
        theirs = dpo_trainer.DataCollatorForPreference(pad_token_id=0, **options)
        same(collate_preferences(PAIRS, pad_token_id=0, **options), theirs(PAIRS))
    rewards = reward_trainer.DataCollatorForPreference(pad_token_id=0, pad_to_multiple_of=multiple)
    # TRL puts the prompt before both answers while it tokenises.
    whole = [
        {**pair, **{f"{side}_ids": pair["prompt_ids"] + pair[f"{side}_ids"] for side in ("chosen", "rejected")}}
        for pair in PAIRS
    ]
    same(collate_rewards(PAIRS, pad_token_id=0, pad_to_multiple_of=multiple), rewards(whole))


def test_labels_are_those_of_assistant_only_loss() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=fresh_tokenizer(), pad_token="<pad>")
    fast.chat_template = TOOLS
    chats, examples = [], []
    for talk in (TALK, TOOL_TALK):
        said = fast.apply_chat_template(
            to_openai(talk), tools=[WEATHER], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        labels = [token if own else -100 for token, own in zip(said["input_ids"], said["assistant_masks"], strict=True)]
        examples.append({"input_ids": said["input_ids"], "labels": labels})
        chats.append(encode_chat(ChatTemplate.of(fast), talk, fast, tools=[WEATHER]))
    found = collate_chats(chats, pad_token_id=0)
    found.pop("assistant_masks")
    same(found, DataCollatorForLanguageModeling(pad_token_id=0)(examples))
