"""Tokens of chats, of pairs for DPO and of pairs for reward models as padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import check_count
from mouse_core.text.chat.encoding import EncodedChat

Arrays = dict[str, npt.NDArray[Any]]
_SIDES = ("chosen", "rejected")


def collate_chats(
    chats: Iterable[EncodedChat],
    *,
    pad_token_id: int,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> Arrays:
    """Chats as a padded batch, for training on what the assistant generated.

    Args:
        chats: At least one.
        pad_token_id: What stands behind them, or before them.
        padding_side: "right" or "left".
        pad_to_multiple_of: Of which number the length is to be a multiple; None: as long as the longest.

    Returns:
        ``input_ids``, ``attention_mask``, ``assistant_masks`` and ``labels``, int64 ``[B, S]``; the labels are the ids
        where an assistant generated them, and -100 elsewhere.

    Raises:
        ConfigError: An option that cannot be used.
        DataError: No chats, or something else among them.
    """
    given = list(chats)
    for place, chat in enumerate(given):
        if not isinstance(chat, EncodedChat):
            raise DataError(f"example {place}: expected an EncodedChat, found {chat!r:.80}")
    rows = [chat.input_ids for chat in given]
    made = _padded(rows, pad_token_id, padding_side, pad_to_multiple_of)
    width = made["input_ids"].shape[1]
    masks = _block([chat.assistant_masks for chat in given], 0, width, padding_side)
    return {**made, "assistant_masks": masks, "labels": np.where(masks == 1, made["input_ids"], -100)}


def collate_preferences(
    examples: Iterable[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    two_blocks: bool = False,
) -> Arrays:
    """Prompts with a chosen and a rejected answer as a padded batch for DPO.

    Names, order and numbers are those of TRL's ``DataCollatorForPreference`` of its ``DPOTrainer``.

    Args:
        examples: Dicts with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``; all of them or none with
            ``ref_chosen_logps``, and so ``ref_rejected_logps``, one number each.
        pad_token_id: What stands behind them, or before them.
        max_length: How many tokens of a prompt with its answer are kept; None: all.
        truncation_mode: Which of them: "keep_start" or "keep_end".
        padding_side: "right" or "left".
        pad_to_multiple_of: Of which number the length is to be a multiple; None: as long as the longest.
        two_blocks: Whether the two halves stand apart, as ``chosen_input_ids`` and ``rejected_input_ids`` and so on,
            each ``[B, S]``; nothing is copied.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, int64 ``[2B, S]``: first all chosen ones, then all
        rejected ones; ``ref_chosen_logps`` and ``ref_rejected_logps`` float32 ``[B]``, where they are given.

    Raises:
        ConfigError: An option that cannot be used.
        DataError: No examples; one without what others have, or with other values.
    """
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ConfigError(f"truncation_mode: expected 'keep_start' or 'keep_end', found {truncation_mode!r:.80}")
    kept = slice(None)
    if max_length is not None:
        check_count("max_length", max_length, 1)
        kept = slice(max_length) if truncation_mode == "keep_start" else slice(-max_length, None)
    given = _dicts(examples)
    prompts = _ids(given, "prompt_ids")
    rows, masks = [], []
    for side in _SIDES:
        for prompt, answer in zip(prompts, _ids(given, f"{side}_ids"), strict=True):
            rows.append(np.concatenate([prompt, answer])[kept])
            masks.append(np.repeat(np.array([0, 1], np.int64), [len(prompt), len(answer)])[kept])
    made = _padded(rows, pad_token_id, padding_side, pad_to_multiple_of)
    made["completion_mask"] = _block(masks, 0, made["input_ids"].shape[1], padding_side)
    if two_blocks:
        made = _apart(made)
    return {**made, **_numbers(given, "ref_chosen_logps"), **_numbers(given, "ref_rejected_logps")}


def collate_rewards(
    examples: Iterable[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_length: int | None = None,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    two_blocks: bool = False,
) -> Arrays:
    """Pairs of a chosen and a rejected text as a padded batch for a reward model.

    Names, order and numbers are those of TRL's ``DataCollatorForPreference`` of its ``RewardTrainer``.

    Args:
        examples: Dicts with ``chosen_ids`` and ``rejected_ids``; all of them or none with ``prompt_ids``, which stand
            before both, as ``encode_preference`` gives them; all of them or none with a number ``margin``.
        pad_token_id: What stands behind them, or before them.
        max_length: How many tokens are kept, from the first on; None: all.
        padding_side: "right" or "left".
        pad_to_multiple_of: Of which number the length is to be a multiple; None: as long as the longest.
        two_blocks: As in ``collate_preferences``.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 ``[2B, S]``: first all chosen, then all rejected ones; ``margin``
        float32 ``[B]``, where it is given.

    Raises:
        ConfigError: An option that cannot be used.
        DataError: No examples; one without what others have, or with other values.
    """
    if max_length is not None:
        check_count("max_length", max_length, 1)
    given = _dicts(examples)
    empty = [np.empty(0, np.int64)] * len(given)
    prompts = _ids(given, "prompt_ids") if any("prompt_ids" in example for example in given) else empty
    rows = [
        np.concatenate([prompt, answer])[:max_length]
        for side in _SIDES
        for prompt, answer in zip(prompts, _ids(given, f"{side}_ids"), strict=True)
    ]
    made = _padded(rows, pad_token_id, padding_side, pad_to_multiple_of)
    return {**(_apart(made) if two_blocks else made), **_numbers(given, "margin")}


def _dicts(examples: Iterable[Any]) -> list[Mapping[str, Any]]:
    given = list(examples)
    for place, example in enumerate(given):
        if not isinstance(example, Mapping):
            raise DataError(f"example {place}: expected a dict, found {example!r:.80}")
    return given


def _ids(examples: Sequence[Mapping[str, Any]], name: str) -> list[npt.NDArray[np.int64]]:
    found = []
    for place, example in enumerate(examples):
        values = np.asarray(example.get(name))
        if values.size == 0 and values.ndim == 1:
            values = values.astype(np.int64)
        if values.ndim != 1 or values.dtype.kind not in "iu" or values.min(initial=0) < 0:
            raise DataError(f"example {place}: expected {name} as token ids, found {example.get(name)!r:.80}")
        found.append(values.astype(np.int64))
    return found


def _numbers(examples: Sequence[Mapping[str, Any]], name: str) -> Arrays:
    """A number of each example, where they have some."""
    if not any(name in example for example in examples):
        return {}
    found = np.empty(len(examples), np.float32)
    for place, example in enumerate(examples):
        try:
            found[place] = float(example[name])
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"example {place}: expected a number {name}, as others have one, found {example.get(name)!r:.80}"
            ) from None
    return {name: found}


def _padded(
    rows: Sequence[npt.NDArray[np.int64]], pad_token_id: int, padding_side: str, pad_to_multiple_of: int | None
) -> Arrays:
    if padding_side not in ("right", "left"):
        raise ConfigError(f"padding_side: expected 'right' or 'left', found {padding_side!r:.80}")
    check_count("pad_token_id", pad_token_id, 0)
    multiple = 1
    if pad_to_multiple_of is not None:
        check_count("pad_to_multiple_of", pad_to_multiple_of, 1)
        multiple = pad_to_multiple_of
    if not rows:
        raise DataError("examples: expected one or more, found none")
    width = -(-max(map(len, rows)) // multiple) * multiple
    there = [np.ones(len(row), np.int64) for row in rows]
    return {
        "input_ids": _block(rows, pad_token_id, width, padding_side),
        "attention_mask": _block(there, 0, width, padding_side),
    }


def _block(rows: Sequence[npt.NDArray[np.int64]], fill: int, width: int, side: str) -> npt.NDArray[np.int64]:
    made = np.full((len(rows), width), fill, np.int64)
    for place, row in enumerate(rows):
        made[place, slice(width - len(row), None) if side == "left" else slice(len(row))] = row
    return made


def _apart(made: Arrays) -> Arrays:
    return {f"{side}_{name}": half for name, both in made.items() for side, half in zip(_SIDES, np.split(both, 2))}  # noqa: B905
