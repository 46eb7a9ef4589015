"""Converts chats to text, to tokens with a mask of the assistant's tokens, and to rows.

The parts of this module in order: messages and templates, chats as text, chats as tokens, and recipes.
"""

from __future__ import annotations

import atexit
import importlib.util
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.child import Child
from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import Field, check_choice, check_count
from mouse_core.text import recipes

# A marker of Unicode noncharacters, which texts do not contain.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of a tokenizer: a Jinja program that renders messages to a text.

    The template is rendered as in ``transformers``: with ``trim_blocks`` and ``lstrip_blocks``, ``break`` and
    ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` without escapes for HTML, and ``{% generation
    %}``.

    Templates are programs, often by unknown authors. Templates run in Jinja's ``ImmutableSandboxedEnvironment``: they
    receive only JSON values, and cannot access files, modules or Python objects. A separate process renders templates,
    with limits of time, memory and text length; a template that exceeds a limit raises a DataError.

    Args:
        source: The Jinja program.
        variables: Additional variables of the template, such as ``bos_token``, ``eos_token`` and ``documents``.
        now: The time that ``strftime_now`` returns. With None, ``strftime_now`` returns the time of the rendering, so
            texts are not reproducible.
        max_chars: Largest number of characters of a rendered text.
        max_seconds: Largest duration of a rendering in seconds.

    Raises:
        ConfigError: ``source`` is not a template, or the variables are not JSON values.
        ImportError: Jinja is not installed.
    """

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    now: datetime | None = None
    # Limits are not compared, because they do not change rendered texts.
    max_chars: int = field(default=4_000_000, repr=False)
    max_seconds: float = field(default=60.0, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not isinstance(self.variables, Mapping):
            raise ConfigError(
                f"chat template: expected a str, and variables as a dict, found {self.source!r:.80} and "
                f"{self.variables!r:.80}"
            )
        check_count("max_chars", self.max_chars, 1)
        if not isinstance(self.max_seconds, int | float) or not self.max_seconds > 0:
            raise ConfigError(f"max_seconds: expected a number above 0, found {self.max_seconds!r:.80}")
        try:
            # Sorted, so that the order of variables does not matter.
            object.__setattr__(self, "variables", dict(sorted(plain(self.variables, "variables").items())))
        except DataError as error:
            raise ConfigError(str(error)) from error
        object.__setattr__(self, "_has_generation", _has_generation(self.source))

    def __reduce__(self) -> Any:
        # Each process that renders compiles the template for itself.
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    @classmethod
    def of(cls, tokenizer: Any, *, name: str = "default") -> ChatTemplate:
        """Return the template of a tokenizer.

        Args:
            tokenizer: A tokenizer of ``transformers``.
            name: The name of the template, if the tokenizer has several templates.

        Returns:
            The template, with the special tokens as variables.

        Raises:
            ConfigError: The tokenizer has no template of that name.
        """
        source, special = getattr(tokenizer, "chat_template", None), getattr(tokenizer, "special_tokens_map", {})
        if isinstance(source, list):
            source = {one.get("name"): one.get("template") for one in source if isinstance(one, Mapping)}
        if isinstance(source, Mapping):
            source = source.get(name)
        if not isinstance(source, str):
            raise ConfigError(
                f"tokenizer: expected a chat template {name!r} in the tokenizer, found none in {tokenizer!r:.80}"
            )
        return cls(source, {key: value for key, value in special.items() if isinstance(value, str)})

    @property
    def has_generation(self) -> bool:
        """Whether the template marks generated text by ``{% generation %}``."""
        return bool(self.__dict__["_has_generation"])

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: Dicts with ``role`` and ``content``, as in OpenAI's API. The content is a text, None, or a list of
                parts such as ``{"type": "image", "url": ...}``. The template receives all keys, such as ``tool_calls``
                or ``name``, except keys whose value is None.
            tools: JSON schemas of the tools that may be called.
            add_generation_prompt: Whether the text ends with the header of an assistant's answer.

        Raises:
            DataError: ``messages`` is empty, values are not JSON, or the template raises an error, fails, or exceeds a
                limit.
        """
        listed = None if tools is None else list(tools)
        return self._rendered(messages_of(messages), listed, add_generation_prompt, self._time(), ("", ""))

    def _time(self) -> datetime:
        return self.now or datetime.now()

    def _rendered(
        self,
        messages: tuple[Message, ...],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        now: datetime,
        marks: tuple[str, str],
    ) -> str:
        variables = {"documents": None, **self.variables, "add_generation_prompt": bool(add_generation_prompt)}
        variables["tools"] = plain(tools, "chat, tools")
        variables["messages"] = list(messages)
        request = {"source": self.source, "variables": variables, "marks": marks, "max_chars": self.max_chars}
        return str(renderer.ask(request | {"now": pickle.dumps(_fixed(now)).hex()}, self.max_seconds)["text"])


def _fixed(now: datetime) -> datetime:
    """Return the same time in a timezone that has only a fixed offset and a name, because another process can unpickle
    such a timezone.
    """
    offset = now.utcoffset()
    zone = None if offset is None else timezone(offset, now.tzname() or "")
    return datetime.combine(now.date(), now.time(), zone)


class Renderings:
    """Renders a chat several times, always with the same time.

    Args:
        template: The template.
        messages: The chat.
        tools: As in ``ChatTemplate.render``.
    """

    def __init__(self, template: ChatTemplate, messages: Any, tools: Any) -> None:
        self.messages, self._tools = messages_of(messages), None if tools is None else list(tools)
        self._template, self._now = template, template._time()

    def __call__(self, messages: tuple[Message, ...], add_generation_prompt: bool = False) -> str:
        """Return the text of ``messages``."""
        return self._template._rendered(messages, self._tools, add_generation_prompt, self._now, ("", ""))

    def marked(self, text: str) -> tuple[str, str, str]:
        """Return three texts: the rendered text with marks around generated text, the begin mark, and the end mark."""
        free = [mark for mark in _MARKS if mark not in text][:2]
        if len(free) < 2:
            raise DataError(
                "chat: expected a text without the noncharacters U+FDD0 to U+FDEF, found nearly all of them"
            )
        marks = (free[0], free[1])
        return self._template._rendered(self.messages, self._tools, False, self._now, marks), *marks


Message = dict[str, Any]
"""A message of a chat: a dict with ``role``, ``content`` and further keys, as in OpenAI's API."""


def messages_of(given: Any) -> tuple[Message, ...]:
    """Return a copy of a chat without keys whose value is None; only ``content`` may be None.

    Raises:
        DataError: The chat has no messages, a message is not a dict with a role, or a value has another type; the error
            names the message.
    """
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else []
    if not found:
        raise DataError(f"chat: expected one or more messages, found {given!r:.80}")
    for place, message in enumerate(found):
        where = f"chat, message {place}"
        if not isinstance(message, Mapping) or not message.get("role") or not isinstance(message["role"], str):
            raise DataError(f"{where}: expected a dict with a role, found {message!r:.80}")
        rest = {key: value for key, value in plain(message, where).items() if value is not None}
        content, calls = rest.get("content"), rest.get("tool_calls", [])
        if content is not None and not isinstance(content, str) and not _are_dicts(content):
            raise DataError(f"{where}: expected content as a str or a list of parts, found {content!r:.80}")
        if not _are_dicts(calls):
            raise DataError(f"{where}: expected tool_calls as a list of dicts, found {calls!r:.80}")
        found[place] = {"role": rest["role"], "content": content, **rest}
    return tuple(found)


def _are_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


class _Renderer:
    """The process that renders templates.

    The process starts at the first request, and restarts after a template exceeded a limit or the process was killed.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self.child: Child | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of ``rendering_child.py``.

        Raise DataError if the process reports an error or does not answer in time, or if a request cannot be sent.
        """
        with self._lock:
            if self.child is None or not self.child.is_running:
                self.child = Child(Path(__file__).with_name("rendering_child.py"))
                atexit.register(self.child.close)
            try:
                answer, _ = self.child.ask({**request, "seconds": seconds}, seconds)
            except ValueError as error:  # an integer of too many digits
                answer = {"error": f"expected values of JSON, found {error}"}
            except (TimeoutError, EOFError) as error:
                self.child.close()
                self.child = None
                late = isinstance(error, TimeoutError)
                why = "a text within max_seconds" if late else f"a text, found the end of the process ({error})"
                answer = {"error": f"expected {why}"}
        if "error" in answer:
            raise DataError(f"chat template: {answer['error']}")
        return answer


renderer = _Renderer()
_LONGEST = 200_000
_TO_COMPILE = 10.0


def _has_generation(source: str) -> bool:
    """Whether a template has ``{% generation %}``; raise ConfigError if the template cannot be compiled."""
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError("chat templates need Jinja: pip install 'mouse-data[text]'")
    if len(source) > _LONGEST:
        raise ConfigError(f"chat template: expected at most {_LONGEST} characters, found {len(source)}")
    try:
        return bool(renderer.ask({"source": source}, _TO_COMPILE)["has_generation"])
    except DataError as error:
        raise ConfigError(str(error)) from error


_PLAIN = (str, int, float, bool, type(None))


def plain(value: Any, where: str) -> Any:
    """Return a copy of JSON values that has only Python's built-in types, without subclasses.

    Raises:
        DataError: The values are not JSON values.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str.__str__(key): plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where) for item in value]
    raise DataError(f"{where}: expected values of JSON, found {value!r:.80} of type {type(value).__name__}")


# A text that no chat contains.
_PROBE = "\ufdd0"
_EXPECTED_TEMPLATE = "expected a template with {% generation %}, or a template that only appends text for each message"


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a chat, and the spans of text that an assistant generated.

    Args:
        text: The text.
        spans: Begin and end of each generated span as positions of characters, in order and without overlap.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


def render_chat(
    template: ChatTemplate,
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: Iterable[Mapping[str, Any]] | None = None,
    end_of_turn: str | None = None,
) -> RenderedChat:
    """Render a chat to text, with the spans of characters that an assistant generated.

    If the template has ``{% generation %}``, the text inside of this statement counts as generated. Otherwise two
    renderings are compared for each answer: the first rendering ends with the answer, and the second ends before the
    answer, with the generation prompt. The answer is the text that only the first rendering contains; if the template
    writes an end of turn, the answer ends with this text. The first rendering must begin with the second rendering;
    this is checked for every answer.

    An answer with ``weight`` 0 (a key of OpenAI's fine-tuning data) does not count as generated.

    Args:
        template: The template.
        messages, tools: See ``ChatTemplate.render``.
        end_of_turn: The text with which an assistant ends an answer, such as ``<|im_end|>``; text that the template
            writes after ``end_of_turn`` does not count as generated. The default is the template's variable
            ``eos_token``. ``end_of_turn`` is ignored if the template has ``{% generation %}``.

    Raises:
        DataError: ``ChatTemplate.render`` raised an error, or the generated text cannot be determined; the error names
            the message and the reason.
    """
    renderings = Renderings(template, messages, tools)
    text = renderings(renderings.messages)
    answers = [place for place, message in enumerate(renderings.messages) if _is_learned(message)]
    if template.has_generation:
        spans = _of_generation(renderings, text)
        own = [place for place, message in enumerate(renderings.messages) if message["role"] == "assistant"]
        if len(answers) < len(own):
            if len(spans) != len(own):
                raise DataError(
                    f"chat template: expected {len(own)} blocks {{% generation %}}, one for each message of an "
                    f"assistant, as some messages have weight 0, found {len(spans)} blocks"
                )
            spans = tuple(span for span, place in zip(spans, own, strict=True) if place in answers)
        return RenderedChat(text, spans)
    end = template.variables.get("eos_token") if end_of_turn is None else end_of_turn
    return RenderedChat(text, tuple(_of_answer(renderings, text, place, end or "") for place in answers))


def _is_learned(message: Message) -> bool:
    """Whether a message was written by an assistant and its OpenAI key ``weight`` is not 0."""
    return bool(message["role"] == "assistant" and message.get("weight") != 0)


def _of_generation(renderings: Renderings, text: str) -> tuple[tuple[int, int], ...]:
    """Return the spans of the text between marks, as positions in the text without marks."""
    marked, begin, end = renderings.marked(text)
    if marked.replace(begin, "").replace(end, "") != text:
        raise DataError("chat template: expected unchanged text from {% generation %}, found changed text")
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
    where = f"chat template: message {place}: {_EXPECTED_TEMPLATE}, found"
    try:
        before = renderings(messages[:place], True)
        after = renderings(messages[: place + 1])
    except DataError as error:
        raise DataError(f"{where} a template that cannot render the chat up to this message: {error}") from error
    _check_header(renderings, before, place, where)
    for shorter, longer, what in ((before, after, "this message"), (after, text, "later messages")):
        if not longer.startswith(shorter):
            at = next(i for i, (a, b) in enumerate(zip(shorter + "\0", longer + "\1", strict=False)) if a != b)
            raise DataError(
                f"{where} text that changes with {what}, from character {at} on: {shorter[at : at + 40]!r} "
                f"becomes {longer[at : at + 40]!r}"
            )
    last = after.rfind(end, len(before)) if end and _writes_end(renderings, before, place, end) else -1
    return len(before), len(after) if last < 0 else last + len(end)


def _writes_end(renderings: Renderings, before: str, place: int, end: str) -> bool:
    """Whether the template writes the end of turn, even if the text of the answer does not contain it."""
    message = renderings.messages[place]
    without = _without(message, end)
    return without == message or end in renderings((*renderings.messages[:place], without))[len(before) :]


def _without(value: Any, text: str) -> Any:
    """Return a copy of JSON values in which ``_PROBE`` replaces each occurrence of ``text``."""
    if isinstance(value, str):
        return value.replace(text, _PROBE)
    if isinstance(value, list):
        return [_without(one, text) for one in value]
    return {key: _without(one, text) for key, one in value.items()} if isinstance(value, dict) else value


def _check_header(renderings: Renderings, before: str, place: int, where: str) -> None:
    """Raise DataError unless a header precedes the answer. Without a header, text of the template could count as
    generated.
    """
    earlier = renderings.messages[:place]
    if before != renderings(earlier):
        return
    after = renderings((*earlier, {"role": "assistant", "content": _PROBE}))
    header = after[len(before) : after.find(_PROBE)] if after.startswith(before) and _PROBE in after else ""
    if header.strip():
        raise DataError(f"{where} the header {header!r:.80} before the answer, but no generation prompt")


Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class EncodedChat:
    """The tokens of a chat.

    Args:
        input_ids: int64 ``[L]``.
        assistant_masks: int64 ``[L]``, 1 where an assistant generated the token.
        offsets: Begin and end of each token's characters in the text, int64 ``[L, 2]``.
        rendered: The text, and the spans of generated characters.
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
    end_of_turn: str | None = None,
    max_length: int | None = None,
    truncation_side: str = "right",
) -> EncodedChat:
    """Convert a chat to tokens, with the mask of the tokens that an assistant generated.

    The complete text is tokenised at once. A token counts as generated if one of its characters (by the tokenizer's
    offsets) is generated. ``apply_chat_template`` of ``transformers`` uses the same two rules. If a generated character
    consists of several tokens, all these tokens count as generated. Tokens without characters, such as special tokens
    of the tokenizer, do not count as generated. If the chat is too long, both the ids and the mask are truncated.

    Args:
        template: The template.
        messages, tools, end_of_turn: See ``render_chat``.
        tokenizer: A ``tokenizers.Tokenizer`` (its truncation and padding are ignored), or a fast tokenizer of
            ``transformers``.
        max_length: Largest number of tokens that are kept; None keeps all tokens.
        truncation_side: The side on which tokens are removed: "right" keeps the beginning of the chat, "left" keeps the
            end.

    Raises:
        ConfigError: An option is unknown, or the tokenizer returns no offsets.
        DataError: An error of ``render_chat``.
    """
    check_cut(max_length, truncation_side)
    rendered = render_chat(template, messages, tools=tools, end_of_turn=end_of_turn)
    ids, offsets = tokens_of(tokenizer, [rendered.text])[0]
    mask, kept = mask_of(rendered, offsets), kept_of(max_length, truncation_side)
    return EncodedChat(ids[kept], mask[kept], offsets[kept], rendered)


def encode_preference(
    template: ChatTemplate,
    prompt: Iterable[Mapping[str, Any]],
    chosen: Iterable[Mapping[str, Any]],
    rejected: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    tools: Iterable[Mapping[str, Any]] | None = None,
) -> dict[str, Ids]:
    """Convert a prompt with two answers to tokens, for ``DataCollatorForPreference`` of TRL.

    A token can contain characters of both the prompt and an answer, for example if the prompt ends with a space. Such a
    token belongs to the answer, and the ids of both answers begin at the index of this token.

    Args:
        template: The template.
        prompt: The messages before the answers.
        chosen, rejected: The messages of the preferred and of the other answer.
        tokenizer, tools: As in ``encode_chat``.

    Returns:
        ``prompt_ids`` with the generation prompt at the end, ``chosen_ids`` and ``rejected_ids``, each int64 ``[L]``.

    Raises:
        ConfigError: An error of ``encode_chat``.
        DataError: An error of ``ChatTemplate.render``, or the text of a complete chat does not begin with the text of
            the prompt.
    """
    texts = preference_texts(template, prompt, chosen, rejected, tools)
    return preference_of([ids for ids, _ in tokens_of(tokenizer, texts)])


def preference_texts(template: ChatTemplate, prompt: Any, chosen: Any, rejected: Any, tools: Any) -> list[str]:
    """Return the texts of a prompt, and of both chats that begin with the prompt.

    Raises:
        DataError: An error of ``encode_preference``.
    """
    asked, listed = messages_of(prompt), None if tools is None else list(tools)
    made = [template.render(asked, tools=listed, add_generation_prompt=True)]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        whole = template.render((*asked, *messages_of(answer)), tools=listed)
        if not whole.startswith(made[0]):
            raise DataError(f"{name}: expected a text that begins with the text of the prompt, found {whole!r:.200}")
        made.append(whole)
    return made


def preference_of(ids: Sequence[Ids]) -> dict[str, Ids]:
    """Return the ids of the prompt and of the two answers, given the ids of the prompt and of both complete chats."""
    prompt, *wholes = ids
    end = min(_common_length(prompt, whole) for whole in wholes)
    return {"prompt_ids": prompt[:end], "chosen_ids": wholes[0][end:], "rejected_ids": wholes[1][end:]}


def _common_length(one: Ids, other: Ids) -> int:
    """Return the length of the common beginning of two lists of ids."""
    size = min(len(one), len(other))
    return int(np.argmin([*(one[:size] == other[:size]), False]))


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[tuple[Ids, Ids]]:
    """Return, for each text, ids ``[L]`` and offsets ``[L, 2]``, without the special tokens that the tokenizer adds.

    Raises:
        ConfigError: The tokenizer returns no offsets.
        DataError: A text is not valid Unicode.
    """
    found = recipes.with_offsets(tokenizer, texts)
    return [
        (np.asarray(ids, np.int64).reshape(-1), _whole(np.asarray(offsets, np.int64).reshape(-1, 2)))
        for ids, offsets in found
    ]


def _whole(offsets: Ids) -> Ids:
    """Return offsets that include white space, because some tokenizers leave white space out of the offsets of tokens.

    For example, offsets (0, 1), (3, 3), (3, 4) become (0, 1), (1, 3), (3, 4). Empty ranges at or before the end of
    another token stay empty, because such tokens have no characters.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    return np.stack([np.where((starts == ends) & (before < ends), before, starts), ends], axis=1)


def mask_of(rendered: RenderedChat, offsets: Ids) -> Ids:
    """Return the mask of the tokens that an assistant generated."""
    generated = np.zeros(len(rendered.text) + 1, np.int64)
    for start, end in rendered.spans:
        generated[start + 1 : end + 1] = 1
    # before[i] is the number of generated characters among the first i characters. Example: for the span (2, 5),
    # before is 0, 0, 0, 1, 2, 3, 3; the token of the characters 4..5 contains before[6] - before[4] = 1 of them.
    before = np.cumsum(generated)
    return (before[offsets[:, 1]] > before[offsets[:, 0]]).astype(np.int64)


def kept_of(max_length: int | None, truncation_side: str) -> slice:
    """Return the slice of the tokens that truncation keeps."""
    if max_length is None:
        return slice(None)
    return slice(max_length) if truncation_side == "right" else slice(-max_length, None)


def check_cut(max_length: Any, truncation_side: Any) -> None:
    """Raise ConfigError if ``max_length`` or ``truncation_side`` is invalid."""
    check_choice("truncation_side", truncation_side, ("right", "left"))
    if max_length is not None:
        check_count("max_length", max_length, 1)


_Side = Literal["right", "left"]
_ANSWERS = ("chosen", "rejected")


class _ChatRecipe:
    """Base class of recipes for chats."""

    template: ChatTemplate
    max_length: int | None
    messages: str
    tools: str | None
    end_of_turn: str | None
    truncation_side: _Side

    def __post_init__(self) -> None:
        _check_template(self.template)
        check_cut(self.max_length, self.truncation_side)

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        return {name: recipes.JSON for name in (self.messages, self.tools) if name is not None}

    def _encoded(self, texts: pa.RecordBatch, encode: recipes.Encoder) -> tuple[list[Ids], list[Ids], pa.BooleanArray]:
        """Return the truncated ids and masks of the chats that have a generated token, and whether each chat has one,
        bool ``[chats]``.
        """
        chats = zip(
            recipes.values_of(texts, self.messages), recipes.values_of(texts, self.tools, may_be_none=True), strict=True
        )
        rendered = recipes.each(
            lambda chat: render_chat(
                self.template, _messages(chat[0], self.messages), tools=chat[1], end_of_turn=self.end_of_turn
            ),
            chats,
        )
        tokens = tokens_of(encode, [one.text for one in rendered])
        both = zip(rendered, tokens, strict=True)
        cut = kept_of(self.max_length, self.truncation_side)
        masks = recipes.each(lambda one: mask_of(one[0], one[1][1])[cut], both)
        trained = [bool(mask.any()) for mask in masks]
        ids = [one[cut] for (one, _), is_left in zip(tokens, trained, strict=True) if is_left]
        return ids, [mask for mask in masks if mask.any()], pa.array(trained, pa.bool_())


@dataclass(frozen=True, kw_only=True)
class Chats(_ChatRecipe, recipes.PaddedRecipe):
    """Converts every chat to a row of fixed length, with the mask of the tokens that an assistant generated.

    A batch has ``input_ids``, ``attention_mask`` and ``assistant_masks``, int64 ``[B, L]``. The values equal the
    results of ``encode_chat``. To create labels, use the ids where ``assistant_masks`` is 1, and -100 at other
    positions.

    A chat is a list of messages, or the JSON text of such a list. Chats without a generated token, before or after
    truncation, are left out.

    Args:
        template: The template. If the template writes the time, its argument ``now`` is required, so that a later call
            creates the same texts.
        max_length: Number of tokens in a row, L; both ids and masks of longer chats are truncated.
        messages: The column of the chats.
        tools: The column of the tools that may be called, with a list of JSON schemas (or null) in each row. If
            ``tools`` is None, chats have no tools. If no row has the given column, a DataError is raised.
        end_of_turn, truncation_side: As in ``encode_chat``.
        pad_id: The token id for padding; by default the tokenizer's id for padding, or its end-of-text id if there is
            no id for padding.
        padding_side: The side of a row that is padded, "left" or "right".
        keep: Numeric columns that are copied to the rows, with their dtypes, such as ``{"rewards": "float32"}``.

    Raises:
        ConfigError: The length, an option or a dtype is invalid, or the template writes the time and its ``now`` is
            None.
    """

    template: ChatTemplate
    max_length: int
    messages: str = "messages"
    tools: str | None = None
    end_of_turn: str | None = None
    truncation_side: _Side = "right"
    pad_id: int | None = None
    padding_side: _Side = "right"
    keep: Mapping[str, str] = field(default_factory=dict)

    _lists = ("input_ids", "attention_mask", "assistant_masks")

    def __post_init__(self) -> None:
        _ChatRecipe.__post_init__(self)
        recipes.PaddedRecipe.__post_init__(self)

    def rows(self, texts: pa.RecordBatch, encode: recipes.Encoder) -> pa.RecordBatch:
        """Return a row for each chat with a generated token."""
        ids, masks, trained = self._encoded(texts, encode)
        made = recipes.padded(ids, self.max_length, self._padding(encode), self.padding_side)
        made.append(_masks(masks, self.max_length, self.padding_side))
        return self._batch(made, texts.filter(trained))


@dataclass(frozen=True, kw_only=True)
class ChatTokens(_ChatRecipe):
    """Converts each token of a chat to a row, and each chat to an episode, for batches of windows or of packed chats.

    ``input_ids`` is the token, ``assistant_masks`` is 1 if an assistant generated the token, and ``done`` is 1 at the
    last token of a chat. The recipe leaves out the same chats as ``Chats``.

    Args:
        template, messages, tools, end_of_turn, truncation_side: As in ``Chats``.
        max_length: Largest number of tokens of a chat; longer chats are truncated. None for no limit.

    Raises:
        ConfigError: An error of ``Chats``.
    """

    template: ChatTemplate
    max_length: int | None = None
    messages: str = "messages"
    tools: str | None = None
    end_of_turn: str | None = None
    truncation_side: _Side = "right"

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """Return the column of the chats and, if given, the column of the tools; both have the type JSON."""
        return self._sources

    @property
    def schema(self) -> pa.Schema:
        """The columns of a row: a token, whether it was generated, and whether it is the last token of its chat."""
        return pa.schema([("input_ids", pa.int32()), ("assistant_masks", pa.uint8()), ("done", pa.int8())])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids``, ``assistant_masks`` and ``done``, int64."""
        return [Field("input_ids", dtype="int64"), Field("assistant_masks", dtype="int64")]

    def rows(self, texts: pa.RecordBatch, encode: recipes.Encoder) -> pa.RecordBatch:
        """Return a row for each token of the chats with a generated token."""
        ids, masks, _ = self._encoded(texts, encode)
        flat, lengths = recipes.flat_of(ids)
        mask = np.concatenate([np.empty(0, np.uint8), *masks]).astype(np.uint8)
        return recipes.batch_of(self.schema, [pa.array(flat), pa.array(mask), pa.array(recipes.ended(lengths))])


@dataclass(frozen=True, kw_only=True)
class Preferences(recipes.PaddedRecipe):
    """Converts every prompt with a chosen and a rejected answer to a row, for DPO and reward models.

    A batch has ``chosen_data.input_ids``, ``chosen_data.attention_mask``, ``chosen_data.completion_mask`` and the same
    fields of ``rejected_data``, int64 ``[B, L]``; ``as_pairs`` of ``mouse_core.text`` nests these fields. Tokens equal
    the result of ``encode_preference``; the completion is all tokens after the prompt.

    Pairs are left out if both answers are equal after truncation, or if an answer has no token.

    Args:
        template: The template. If the template writes the time, its argument ``now`` is required.
        max_length: Number of tokens in a row, L; longer texts are truncated.
        prompt: The column of the prompts. If None, ``chosen`` and ``rejected`` contain complete chats, and the prompt
            is the common beginning of both chats. If one chat is the beginning of the other chat, the last common
            message belongs to both answers.
        chosen: The column of the preferred answers.
        rejected: The column of the other answers.
        tools, truncation_side, pad_id, padding_side, keep: As in ``Chats``.

    Raises:
        ConfigError: An error of ``Chats``.
    """

    template: ChatTemplate
    max_length: int
    prompt: str | None = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    tools: str | None = None
    truncation_side: _Side = "right"
    pad_id: int | None = None
    padding_side: _Side = "right"
    keep: Mapping[str, str] = field(default_factory=dict)

    _sides = ("chosen_data.", "rejected_data.")
    _lists = ("input_ids", "attention_mask", "completion_mask")

    def __post_init__(self) -> None:
        _check_template(self.template)
        super().__post_init__()
        check_cut(self.max_length, self.truncation_side)

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        names = (self.prompt, self.chosen, self.rejected, self.tools)
        return {name: recipes.JSON for name in names if name is not None}

    def rows(self, texts: pa.RecordBatch, encode: recipes.Encoder) -> pa.RecordBatch:
        """Return a row for each pair whose answers differ and both have a token."""
        names = (self.prompt, self.chosen, self.rejected, self.tools)
        given = [recipes.values_of(texts, name) for name in names[:3]]
        given.append(recipes.values_of(texts, self.tools, may_be_none=True))
        triples = recipes.each(self._texts, zip(*given, strict=True))
        tokens = iter([ids for ids, _ in tokens_of(encode, [text for three in triples for text in three])])
        pairs = [preference_of(three) for three in zip(tokens, tokens, tokens, strict=True)]
        pad_id, cut = self._padding(encode), kept_of(self.max_length, self.truncation_side)
        ids = [[np.concatenate([one["prompt_ids"], one[f"{side}_ids"]])[cut] for one in pairs] for side in _ANSWERS]
        differ = [not np.array_equal(chosen, rejected) for chosen, rejected in zip(*ids, strict=True)]
        both_answer = [bool(len(one["chosen_ids"]) and len(one["rejected_ids"])) for one in pairs]
        wanted = pa.array(np.logical_and(differ, both_answer), pa.bool_())
        made: list[pa.Array] = []
        for side, of_side in zip(_ANSWERS, ids, strict=True):
            lengths = [[len(one["prompt_ids"]), len(one[f"{side}_ids"])] for one in pairs]
            masks = [np.repeat(np.array([0, 1], np.int64), both)[cut] for both in lengths]
            made += recipes.padded(of_side, self.max_length, pad_id, self.padding_side)
            made.append(_masks(masks, self.max_length, self.padding_side))
        return self._batch(made, texts).filter(wanted)

    def _texts(self, row: tuple[Any, Any, Any, Any]) -> list[str]:
        prompt, chosen, rejected, tools = row
        chosen, rejected = _messages(chosen, self.chosen), _messages(rejected, self.rejected)
        if chosen == rejected:
            return ["", "", ""]  # left out like all equal pairs
        if self.prompt is not None:
            return preference_texts(self.template, _messages(prompt, self.prompt), chosen, rejected, tools)
        shorter = min(len(chosen), len(rejected)) - 1  # each answer keeps at least one message
        both = zip(chosen, rejected, strict=False)
        same = next((at for at, (one, other) in enumerate(both) if one != other or at == shorter), shorter)
        if same < 1:
            names = f"columns {self.chosen!r} and {self.rejected!r}"
            raise DataError(f"{names}: expected both chats to begin with the same prompt, found no common messages")
        return preference_texts(self.template, chosen[:same], chosen[same:], rejected[same:], tools)


def _check_template(template: Any) -> None:
    if not isinstance(template, ChatTemplate):
        raise ConfigError(f"template: expected a ChatTemplate, found {template!r:.80}")
    if template.now is None and "strftime_now" in template.source:
        raise ConfigError(
            "template: expected a chat template with a fixed time, found a template that uses the current time "
            "(strftime_now); pass now= to ChatTemplate"
        )


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    """Check and copy a chat of a column; see ``messages_of``."""
    if not isinstance(value, list):
        raise DataError(f"column {column!r}: expected a list of messages, found {value!r:.80}")
    return messages_of(value)


def _masks(masks: Sequence[npt.NDArray[np.int64]], length: int, side: str) -> pa.Array:
    """Return masks as a column of lists, with 0 for padding."""
    values = recipes.padded(masks, length, 0, side)[0].flatten()
    return pa.FixedSizeListArray.from_arrays(values.cast(pa.uint8()), length)
