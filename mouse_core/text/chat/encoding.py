"""Chats as tokens, with the mask of those that an assistant generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import check_count
from mouse_core.text.chat.spans import RenderedChat, render_chat
from mouse_core.text.chat.template import ChatTemplate, messages_of
from mouse_core.text.encoding import with_offsets

Ids = npt.NDArray[np.int64]
STRADDLING = ("include", "exclude", "refuse")


@dataclass(frozen=True, eq=False, slots=True)
class EncodedChat:
    """A chat as tokens.

    Args:
        input_ids: int64 ``[L]``.
        assistant_masks: int64 ``[L]``, 1 where an assistant generated the token.
        offsets: Which characters of the text a token stands for, from and to, int64 ``[L, 2]``.
        rendered: The text, and which characters were generated.
    """

    input_ids: Ids
    assistant_masks: Ids
    offsets: Ids
    rendered: RenderedChat


def encode_chat(
    template: ChatTemplate,
    messages: Iterable[Any],
    tokenizer: Any,
    *,
    tools: Iterable[Mapping[str, Any]] | None = None,
    documents: Iterable[Mapping[str, Any]] | None = None,
    end_of_turn: str | None = None,
    max_length: int | None = None,
    truncation_side: str = "right",
    straddling: str = "include",
    add_special_tokens: bool = False,
) -> EncodedChat:
    """A chat as tokens, with the mask of those that an assistant generated.

    The text is tokenised as a whole, as ``apply_chat_template`` of ``transformers`` does. A token is an assistant's
    where the characters are for which the tokenizer says it stands: all tokens of a character of several bytes, and
    none that stands for no character, as those which ``add_special_tokens`` brings. Truncation cuts ids and mask alike.

    Args:
        template: The template.
        messages, tools, documents, end_of_turn: As ``render_chat`` takes them.
        tokenizer: A ``tokenizers.Tokenizer``, whose own truncation and padding do not count, or a fast tokenizer of
            ``transformers``.
        max_length: How many tokens are kept; None: all.
        truncation_side: Where tokens are cut off: "right" keeps the beginning, "left" the end.
        straddling: What becomes of tokens that stand for characters of both kinds: "include" has them count as an
            assistant's, as ``transformers`` does, "exclude" as none, and "refuse" is an error.
        add_special_tokens: Whether the tokenizer adds its own; templates write them themselves.

    Raises:
        ConfigError: Another word, or a tokenizer that tells no offsets.
        DataError: As ``render_chat``; a token that straddles, where that is refused.
    """
    check_cut(max_length, truncation_side)
    check_word("straddling", straddling, STRADDLING)
    rendered = render_chat(template, messages, tools=tools, documents=documents, end_of_turn=end_of_turn)
    ids, offsets = tokens_of(tokenizer, [rendered.text], add_special_tokens)[0]
    mask, kept = mask_of(rendered, offsets, straddling), kept_of(max_length, truncation_side)
    return EncodedChat(ids[kept], mask[kept], offsets[kept], rendered)


def encode_preference(
    template: ChatTemplate,
    prompt: Iterable[Any] | str,
    chosen: Iterable[Any] | str,
    rejected: Iterable[Any] | str,
    tokenizer: Any,
    *,
    tools: Iterable[Mapping[str, Any]] | None = None,
    straddling: str = "include",
) -> dict[str, Ids]:
    """A prompt with two answers as tokens, as ``collate_preferences`` takes them.

    Args:
        template: The template.
        prompt: The chat up to the answers.
        chosen, rejected: The messages that follow. All three may be plain texts: then no template is used, an answer
            ends in the template's variable ``eos_token``, where that is one, and the tokenizer adds the special tokens
            that it puts around texts, as TRL does with its standard format.
        tokenizer, tools: As in ``encode_chat``.
        straddling: What becomes of tokens that stand for characters of the prompt and of an answer, as where a prompt
            ends in a space: "include" has both answers begin with the first of them, "refuse" is an error.

    Returns:
        ``prompt_ids`` with the generation prompt at the end, ``chosen_ids`` and ``rejected_ids``, each int64 ``[L]``.

    Raises:
        ConfigError: As ``encode_chat``.
        DataError: As ``ChatTemplate.render``; the text of the prompt is not that with which a whole chat begins; a
            token that straddles, where that is refused.
    """
    check_word("straddling", straddling, ("include", "refuse"))
    texts = preference_texts(template, prompt, chosen, rejected, tools)
    return preference_of(tokens_of_pairs(tokenizer, [texts])[0], straddling)


class PairTexts(NamedTuple):
    """The texts of a prompt, and of both chats that begin with it.

    Args:
        prompt, chosen, rejected: They.
        are_plain: Whether no template made them, which writes special tokens itself.
    """

    prompt: str
    chosen: str
    rejected: str
    are_plain: bool


def preference_texts(
    template: ChatTemplate,
    prompt: Iterable[Any] | str,
    chosen: Iterable[Any] | str,
    rejected: Iterable[Any] | str,
    tools: Any,
) -> PairTexts:
    """The texts of a prompt, and of both chats that begin with it.

    Raises:
        DataError: As ``encode_preference``.
    """
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        end = str(template.variables.get("eos_token") or "")
        return PairTexts(
            prompt, prompt + chosen.removesuffix(end) + end, prompt + rejected.removesuffix(end) + end, True
        )
    asked, listed = messages_of(prompt), None if tools is None else list(tools)
    text = template.render(asked, tools=listed, add_generation_prompt=True)
    made = [text]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        whole = template.render((*asked, *messages_of(answer)), tools=listed)
        if not whole.startswith(text):
            raise DataError(f"{name}: expected a text that begins with that of the prompt, found {whole!r:.200}")
        made.append(whole)
    return PairTexts(made[0], made[1], made[2], False)


def preference_of(ids: Sequence[Ids], straddling: str) -> dict[str, Ids]:
    """Of the ids of a prompt and of both chats, those of the prompt and of the two answers.

    Raises:
        DataError: As ``encode_preference``.
    """
    prompt, *wholes = ids
    alike = [_alike(prompt, whole) for whole in wholes]
    end = min(alike)
    if straddling == "refuse" and end < len(prompt):
        name = ("chosen", "rejected")[alike.index(end)]
        raise DataError(f"{name}: expected tokens that begin with those of the prompt, found one across its end")
    return {"prompt_ids": prompt[:end], "chosen_ids": wholes[0][end:], "rejected_ids": wholes[1][end:]}


def _alike(one: Ids, other: Ids) -> int:
    """With how many ids both begin."""
    size = min(len(one), len(other))
    return int(np.argmin([*(one[:size] == other[:size]), False]))


def tokens_of_pairs(tokenizer: Any, pairs: Sequence[PairTexts]) -> list[tuple[Ids, Ids, Ids]]:
    """Ids of the three texts of each, of plain ones with the special tokens that the tokenizer puts around texts.

    Raises:
        ConfigError, DataError: As ``tokens_of``.
    """
    made: dict[int, tuple[Ids, Ids, Ids]] = {}
    for are_plain in (False, True):
        places = [place for place, one in enumerate(pairs) if one.are_plain == are_plain]
        texts = [text for place in places for text in pairs[place][:3]]
        found = iter([ids for ids, _ in tokens_of(tokenizer, texts, are_plain)] if texts else [])
        made.update(zip(places, zip(found, found, found, strict=True), strict=True))
    return [made[place] for place in range(len(pairs))]


def tokens_of(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[Ids, Ids]]:
    """Ids ``[L]`` and offsets ``[L, 2]`` of each text.

    Raises:
        ConfigError: It tells no offsets.
        DataError: A text that is none of Unicode's.
    """
    found = with_offsets(tokenizer, texts, add_special_tokens)
    return [
        (np.asarray(ids, np.int64).reshape(-1), _whole(np.asarray(offsets, np.int64).reshape(-1, 2)))
        for ids, offsets in found
    ]


def _whole(offsets: Ids) -> Ids:
    """Offsets where tokens that are white space alone have it: some tokenizers trim it off, and nothing is left.

    Offsets (0, 1), (3, 3), (3, 4) become (0, 1), (1, 3), (3, 4). What is at or before the end of another token, as
    tokens are that stand for nothing, stays empty.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    return np.stack([np.where((starts == ends) & (before < ends), before, starts), ends], axis=1)


def mask_of(rendered: RenderedChat, offsets: Ids, straddling: str) -> Ids:
    """Which tokens an assistant generated."""
    generated = np.zeros(len(rendered.text) + 1, np.int64)
    for start, end in rendered.spans:
        generated[start + 1 : end + 1] = 1
    # Before each character, how many are generated: of a token, the difference at its ends.
    before = np.cumsum(generated)
    starts, ends = offsets[:, 0], offsets[:, 1]
    covered = before[ends] - before[starts]
    across = (covered > 0) & (covered < ends - starts)
    if straddling == "refuse" and across.any():
        place = int(np.flatnonzero(across)[0])
        found = rendered.text[starts[place] : ends[place]]
        raise DataError(
            f"chat, token {place}: expected characters of one kind, found an answer's and others in {found!r:.80}"
        )
    mask = covered > 0
    return (mask & ~across if straddling == "exclude" else mask).astype(np.int64)


def kept_of(max_length: int | None, truncation_side: str) -> slice:
    """Which tokens are left of a text."""
    if max_length is None:
        return slice(None)
    return slice(max_length) if truncation_side == "right" else slice(-max_length, None)


def check_cut(max_length: Any, truncation_side: Any) -> None:
    """Of how much is kept, and of which side."""
    check_word("truncation_side", truncation_side, ("right", "left"))
    if max_length is not None:
        check_count("max_length", max_length, 1)


def check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    """That it is one of some words."""
    if value not in words:
        raise ConfigError(f"{name}: expected one of {', '.join(map(repr, words))}, found {value!r:.80}")
