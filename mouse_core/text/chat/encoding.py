"""Chats as text and as tokens, with the mask of what an assistant generated, and as turns of rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.digest import host_array
from mouse_core.dtypes import widened
from mouse_core.errors import DataError
from mouse_core.groups import Turn
from mouse_core.spec import check_choice, check_count
from mouse_core.text.chat.messages import Message, from_openai, to_openai
from mouse_core.text.chat.template import ChatTemplate, Renderings, messages_of
from mouse_core.text.encoding import with_offsets

# A text that nobody writes.
_PROBE = "\ufdd0"
_WITHOUT = "expected a template with {% generation %}, or one whose text only grows with the messages"


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a chat, and which of it an assistant generated.

    Args:
        text: The text.
        spans: From where to where, in characters, in order and apart from each other.
        messages: The chat.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    messages: tuple[Message, ...]


def render_chat(
    template: ChatTemplate,
    messages: Iterable[Message] | Iterable[Mapping[str, Any]],
    *,
    tools: Iterable[Mapping[str, Any]] | None = None,
    documents: Iterable[Mapping[str, Any]] | None = None,
    end_of_turn: str | None = None,
) -> RenderedChat:
    """The text of a chat with the characters that an assistant generated.

    Where the template has ``{% generation %}``, it is what stands in it. Otherwise an answer is what the text of a chat
    that ends in it has behind the text of the same chat without it, generation prompt included; and of that what goes
    to the end of turn, where the template writes one. That holds for templates whose text only grows with the messages,
    which is checked for every answer.

    An answer of ``weight`` 0, as OpenAI's data for fine-tuning have it, does not count as generated.

    Args:
        template: The template.
        messages, tools, documents: As ``ChatTemplate.render`` takes them.
        end_of_turn: What an assistant generates last, as ``<|im_end|>``: what the template writes behind it is not
            its own. None: the template's variable ``eos_token``. Not used with ``{% generation %}``.

    Raises:
        DataError: As ``render``; it cannot be told what was generated, and the message says why and of which message.
    """
    renderings = Renderings(template, messages, tools, documents)
    text = renderings(renderings.messages)
    answers = [place for place, message in enumerate(renderings.messages) if is_learned(message)]
    if template.has_generation:
        spans = _of_generation(renderings, text)
        own = [place for place, message in enumerate(renderings.messages) if message.role == "assistant"]
        if len(answers) < len(own):
            if len(spans) != len(own):
                raise DataError(
                    f"chat template: expected {{% generation %}} once for each of {len(own)} messages of an assistant, "
                    f"as some have weight 0, found it {len(spans)} times"
                )
            spans = tuple(span for span, place in zip(spans, own, strict=True) if place in answers)
        return RenderedChat(text, spans, renderings.messages)
    end = template.variables.get("eos_token") if end_of_turn is None else end_of_turn
    spans = tuple(_of_answer(renderings, text, place, end or "") for place in answers)
    return RenderedChat(text, spans, renderings.messages)


def is_learned(message: Message) -> bool:
    """Whether a message is an assistant's and counts: OpenAI's key ``weight`` says 0 where it does not."""
    return message.role == "assistant" and message.extra.get("weight") != 0


def _of_generation(renderings: Renderings, text: str) -> tuple[tuple[int, int], ...]:
    """Return the spans between the marks of generated text, as positions without the marks."""
    marked, begin, end = renderings.marked(text)
    if marked.replace(begin, "").replace(end, "") != text:
        raise DataError("chat template: expected what is in {% generation %} to become text as it is, found it changed")
    spans, start, depth, position = [], 0, 0, 0
    for piece in re.split(f"([{begin}{end}])", marked):
        if piece == begin:
            start, depth = position if not depth else start, depth + 1
        elif piece == end:
            depth -= 1
            if not depth and position > start:
                spans.append((start, position))
        else:
            position += len(piece)
    return tuple(spans)


def _of_answer(renderings: Renderings, text: str, place: int, end: str) -> tuple[int, int]:
    messages = renderings.messages
    where = f"chat template: {_WITHOUT}, found at message {place}"
    try:
        before = renderings(messages[:place], True)
        after = renderings(messages[: place + 1])
    except DataError as error:
        raise DataError(f"{where} that the chat up to there has no text: {error}") from error
    _check_header(renderings, before, place, where)
    for shorter, longer, what in ((before, after, "it"), (after, text, "what follows")):
        if not longer.startswith(shorter):
            at = next(i for i, (a, b) in enumerate(zip(shorter + "\0", longer + "\1", strict=False)) if a != b)
            raise DataError(
                f"{where} that {what} changes the text before, from character {at} on: {shorter[at : at + 40]!r} "
                f"becomes {longer[at : at + 40]!r}"
            )
    last = after.rfind(end, len(before)) if end and _writes_end(renderings, before, place, end) else -1
    return len(before), len(after) if last < 0 else last + len(end)


def _writes_end(renderings: Renderings, before: str, place: int, end: str) -> bool:
    """Whether an end of turn is the template's, also where the answer itself has that text."""
    (said,) = to_openai(renderings.messages[place : place + 1])
    without = _without(said, end)
    if without == said:
        return True
    return end in renderings((*renderings.messages[:place], *from_openai([without])))[len(before) :]


def _without(value: Any, text: str) -> Any:
    """JSON values with something else for a text in their texts."""
    if isinstance(value, str):
        return value.replace(text, _PROBE)
    if isinstance(value, list):
        return [_without(one, text) for one in value]
    return {key: _without(one, text) for key, one in value.items()} if isinstance(value, dict) else value


def _check_header(renderings: Renderings, before: str, place: int, where: str) -> None:
    """Check that a header precedes the answer; otherwise the template's text before it would count as generated."""
    earlier = renderings.messages[:place]
    if before != renderings(earlier):
        return
    after = renderings((*earlier, Message("assistant", _PROBE)))
    header = after[len(before) : after.find(_PROBE)] if after.startswith(before) and _PROBE in after else ""
    if header.strip():
        raise DataError(f"{where} that {header!r:.80} stands before the answer, and there is no generation prompt")


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
    check_choice("straddling", straddling, STRADDLING)
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
    check_choice("straddling", straddling, ("include", "refuse"))
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
    """Return the ids of the prompt and of the two answers, from the ids of the prompt and of both chats.

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
    """Return the mask of tokens that an assistant generated."""
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
    """Return the slice of tokens that truncation keeps."""
    if max_length is None:
        return slice(None)
    return slice(max_length) if truncation_side == "right" else slice(-max_length, None)


def check_cut(max_length: Any, truncation_side: Any) -> None:
    """Check ``max_length`` and ``truncation_side``."""
    check_choice("truncation_side", truncation_side, ("right", "left"))
    if max_length is not None:
        check_count("max_length", max_length, 1)


# The role of turns that are no message: tokens that the template wrote behind an answer, or before the first message.
_TEMPLATE = "template"


def to_turns(chat: EncodedChat, *, logprobs: npt.ArrayLike | None = None) -> tuple[Turn, ...]:
    """A chat as the turns of a ``RolloutRecord``: all of its tokens, each once and in order.

    A turn of an assistant has the tokens that it generated, and no others. What stands between answers belongs to the
    last message between them, generation prompt included; the other messages there have no tokens. Where no message
    stands there, as behind the last answer, it is a turn of role "template". What a turn has no place for, as calls of
    tools, is kept in its metadata. An answer of ``weight`` 0 has no log-probabilities, and so is not trained.

    Args:
        chat: As ``encode_chat`` makes it. Of one that was truncated all turns are there, with the tokens that are left.
        logprobs: Log-probabilities of all tokens under the policy, float32 ``[L]``, of which those of the generated
            ones are kept: then these turns are trained on. None: there are none.

    Returns:
        At least one turn for each message.

    Raises:
        DataError: Another number of log-probabilities; a chat in which answers and what was generated are not as many.
    """
    messages = chat.rendered.messages
    values = None if logprobs is None else host_array(widened(logprobs))
    if values is not None and values.shape != chat.input_ids.shape:
        raise DataError(f"to_turns: expected logprobs {chat.input_ids.shape}, found {values.shape}")
    answers = [place for place, message in enumerate(messages) if is_learned(message)]
    runs = _runs(chat)
    if len(runs) != len(answers):
        raise DataError(
            f"to_turns: expected what was generated of each of {len(answers)} messages of an assistant, found "
            f"{len(runs)} stretches of text"
        )
    turns: list[Turn] = []
    done, reached = 0, 0
    for place, (start, end) in zip(answers, runs, strict=True):
        turns += _between(messages[done:place], chat.input_ids[reached:start])
        own = None if values is None else values[start:end]
        turns.append(_turn(messages[place], chat.input_ids[start:end], own))
        done, reached = place + 1, end
    return (*turns, *_between(messages[done:], chat.input_ids[reached:]))


def from_turns(turns: Iterable[Turn]) -> tuple[Message, ...]:
    """The messages of turns: those that ``to_turns`` was given, or role and text of others.

    Raises:
        DataError: No turns, or something else among them.
    """
    found: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if not isinstance(turn, Turn):
            raise DataError(f"from_turns: expected a Turn at place {place}, found {turn!r:.80}")
        if turn.role != _TEMPLATE:
            kept = turn.metadata.get("chat")
            found.append(dict(kept) if isinstance(kept, dict) else {"role": turn.role, "content": turn.message})
    return from_openai(found)


def _runs(chat: EncodedChat) -> list[tuple[int, int]]:
    """From where to where the tokens of each span go; where none are left, where they would be."""
    spans = np.array(chat.rendered.spans, np.int64).reshape(-1, 2)
    if not len(spans):
        return []
    generated = np.flatnonzero(chat.assistant_masks)
    starts, ends = chat.offsets[generated].T
    # A token belongs to the last span that begins where it begins, or before; one that straddles, to the one it enters.
    own = np.maximum(np.searchsorted(spans[:, 0], starts, side="right") - 1, 0)
    entered = np.minimum(own + 1, len(spans) - 1)
    own = np.where((starts >= spans[own, 1]) & (ends > spans[entered, 0]), entered, own)
    runs, reached = [], 0
    for number, (begin, _) in enumerate(spans.tolist()):
        group = generated[own == number]
        if len(group):
            run = int(group[0]), int(group[-1]) + 1
        else:
            behind = np.flatnonzero((chat.offsets[:, 0] >= begin) & (chat.offsets[:, 1] > begin))
            run = (max(reached, int(behind[0]) if len(behind) else len(chat.input_ids)),) * 2
        runs.append(run)
        reached = run[1]
    return runs


def _between(messages: tuple[Message, ...], tokens: npt.NDArray[np.int64]) -> list[Turn]:
    if not messages:
        return [Turn("", _TEMPLATE, tokens)] if len(tokens) else []  # type: ignore[arg-type]
    return [*(_turn(message, tokens[:0], None) for message in messages[:-1]), _turn(messages[-1], tokens, None)]


def _turn(message: Message, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[Any] | None) -> Turn:
    said = to_openai([message])[0]
    simple = said == {"role": message.role, "content": message.text} and isinstance(message.content, str)
    metadata = {} if simple and message.role != _TEMPLATE else {"chat": said}
    return Turn(message.text, message.role, tokens, logprobs, metadata=metadata)  # type: ignore[arg-type]
