"""Which characters of a chat's text an assistant generated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mouse_core.errors import DataError
from mouse_core.text.chat.dicts import from_openai, to_openai
from mouse_core.text.chat.messages import Message
from mouse_core.text.chat.template import ChatTemplate, Renderings

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
    """Where marks stand, once they are taken out."""
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
    """Where nothing introduces an answer, what a template writes before it would count as generated."""
    earlier = renderings.messages[:place]
    if before != renderings(earlier):
        return
    after = renderings((*earlier, Message("assistant", _PROBE)))
    header = after[len(before) : after.find(_PROBE)] if after.startswith(before) and _PROBE in after else ""
    if header.strip():
        raise DataError(f"{where} that {header!r:.80} stands before the answer, and there is no generation prompt")
