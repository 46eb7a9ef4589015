"""Padded batches of chats and of pairs, held to loops in plain Python and, where it is installed, to TRL."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError
from mouse_core.text.chat import collate_chats, collate_preferences, collate_rewards, encode_chat
from tests.core.chat_cases import CHATML, TALK, template, tokenizer

IDS = st.lists(st.integers(1, 99), max_size=5)
PAIRS = st.lists(
    st.fixed_dictionaries({"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS}), min_size=1, max_size=3
)
EXAMPLES = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]},
]


def rows(texts: list[list[int]], fill: int, multiple: int, side: str) -> list[list[int]]:
    """An oracle: each text with padding at one side."""
    width = max(map(len, texts))
    while width % multiple:
        width += 1
    pads = [[fill] * (width - len(text)) for text in texts]
    return [pad + text if side == "left" else text + pad for pad, text in zip(pads, texts, strict=True)]


@given(
    pairs=PAIRS,
    length=st.none() | st.integers(1, 7),
    mode=st.sampled_from(["keep_start", "keep_end"]),
    side=st.sampled_from(["left", "right"]),
    multiple=st.integers(1, 4),
)
def test_pairs_for_dpo_are_chosen_ones_then_rejected_ones(
    pairs: list[dict[str, list[int]]], length: int | None, mode: str, side: str, multiple: int
) -> None:
    def cut(values: list[int]) -> list[int]:
        while length is not None and len(values) > length:
            values = values[:-1] if mode == "keep_start" else values[1:]
        return values

    each = [(pair["prompt_ids"], pair[f"{kind}_ids"]) for kind in ("chosen", "rejected") for pair in pairs]
    ids = [cut(prompt + answer) for prompt, answer in each]
    masks = [cut([0] * len(prompt) + [1] * len(answer)) for prompt, answer in each]
    found = collate_preferences(
        pairs, pad_token_id=0, max_length=length, truncation_mode=mode, padding_side=side, pad_to_multiple_of=multiple
    )
    assert all(values.dtype == np.int64 for values in found.values())
    assert {name: values.tolist() for name, values in found.items()} == {
        "input_ids": rows(ids, 0, multiple, side),
        "attention_mask": rows([[1] * len(one) for one in ids], 0, multiple, side),
        "completion_mask": rows(masks, 0, multiple, side),
    }


def test_two_blocks_are_the_halves_and_share_their_memory() -> None:
    examples = [{**one, "ref_chosen_logps": 0.5, "ref_rejected_logps": -place} for place, one in enumerate(EXAMPLES)]
    whole = collate_preferences(examples, pad_token_id=0)
    halves = collate_preferences(examples, pad_token_id=0, two_blocks=True)
    for name in ("input_ids", "attention_mask", "completion_mask"):
        for place, side in enumerate(("chosen", "rejected")):
            half = halves.pop(f"{side}_{name}")
            assert half.base is not None
            np.testing.assert_array_equal(half, whole[name][2 * place : 2 * place + 2])
    assert halves.keys() == {"ref_chosen_logps", "ref_rejected_logps"}
    assert halves["ref_rejected_logps"].dtype == np.float32
    assert halves["ref_rejected_logps"].tolist() == [0, -1]


def test_pairs_for_a_reward_model() -> None:
    texts_alone = [{side: one[side] for side in ("chosen_ids", "rejected_ids")} for one in EXAMPLES]
    examples = [{**one, "margin": place / 2} for place, one in enumerate(texts_alone)]
    found = collate_rewards(examples, pad_token_id=50, pad_to_multiple_of=4)
    assert found.pop("margin").tolist() == [0, 0.5]
    texts = [[4, 5], [9], [6], [10, 11]]
    assert found["input_ids"].tolist() == rows(texts, 50, 4, "right")
    assert found["attention_mask"].tolist() == rows([[1] * len(text) for text in texts], 0, 4, "right")
    assert collate_rewards(texts_alone, pad_token_id=0, max_length=1)["input_ids"].tolist() == [[4], [9], [6], [10]]


def test_a_reward_model_reads_the_prompt_before_both_answers() -> None:
    """What encode_preference gives: an answer without its question would be rewarded otherwise, in silence."""
    found = collate_rewards(EXAMPLES, pad_token_id=0, max_length=4)
    assert found["input_ids"].tolist() == [[1, 2, 3, 4], [7, 8, 9, 0], [1, 2, 3, 6], [7, 8, 10, 11]]
    with pytest.raises(DataError, match="example 1: expected prompt_ids as token ids, found None"):
        collate_rewards([EXAMPLES[0], {"chosen_ids": [1], "rejected_ids": [2]}], pad_token_id=0)


def test_labels_are_what_the_assistant_generated() -> None:
    chats = [encode_chat(template(CHATML), TALK[:length], tokenizer()) for length in (2, 4)]
    found = collate_chats(chats, pad_token_id=0, pad_to_multiple_of=8, padding_side="left")
    assert {name: values.dtype for name, values in found.items()} == dict.fromkeys(
        ["input_ids", "attention_mask", "assistant_masks", "labels"], np.dtype(np.int64)
    )
    assert found["input_ids"].shape[1] % 8 == 0
    for row, chat in enumerate(chats):
        ids, mask = chat.input_ids.tolist(), chat.assistant_masks.tolist()
        kept = found["attention_mask"][row] == 1
        assert kept.tolist() == [False] * (len(kept) - len(ids)) + [True] * len(ids)
        assert found["input_ids"][row, kept].tolist() == ids
        assert found["assistant_masks"][row, kept].tolist() == mask
        wanted = [token if own else -100 for token, own in zip(ids, mask, strict=True)]
        assert found["labels"][row, kept].tolist() == wanted
        assert (found["labels"][row, ~kept] == -100).all()


@pytest.mark.parametrize(
    ("examples", "options", "error", "message"),
    [
        ([], {}, DataError, "expected one or more"),
        ([3], {}, DataError, "example 0: expected a dict"),
        ([*EXAMPLES, {"prompt_ids": [1]}], {}, DataError, "example 2: expected chosen_ids as token ids, found None"),
        ([{**EXAMPLES[0], "prompt_ids": [0.5]}], {}, DataError, "example 0: expected prompt_ids as token ids"),
        (
            [{**EXAMPLES[0], "chosen_ids": [1, -100]}],
            {},
            DataError,
            "example 0: expected chosen_ids as token ids, found",
        ),
        ([{**EXAMPLES[0], "ref_chosen_logps": 1.0}, EXAMPLES[1]], {}, DataError, "example 1: expected a number ref_ch"),
        (EXAMPLES, {"padding_side": "top"}, ConfigError, "padding_side"),
        (EXAMPLES, {"truncation_mode": "keep"}, ConfigError, "truncation_mode"),
        (EXAMPLES, {"max_length": 0}, ConfigError, "max_length"),
        (EXAMPLES, {"pad_to_multiple_of": 0}, ConfigError, "pad_to_multiple_of"),
    ],
)
def test_what_cannot_be_collated(examples: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate_preferences(examples, **{"pad_token_id": 0, **options})
