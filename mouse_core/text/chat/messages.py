"""Messages of chats, conversions to and from dicts (OpenAI, ShareGPT), and templates that render a chat to text."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mouse_core._base.child import Child
from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import read_json_object
from mouse_core.spec import check_choice, check_count

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
        variables: Additional variables of the template, such as ``bos_token`` and ``eos_token``.
        now: The time that ``strftime_now`` returns. With None, it is the time of the rendering, so texts are not
            reproducible.
        arguments: The form in which the template receives the arguments of tool calls. With "given", the form in the
            chat. With "dict", JSON texts are parsed to dicts, for templates that write ``arguments | tojson``. With
            "json", dicts are converted to JSON texts, for templates that write the arguments unchanged.
        max_chars: Largest number of characters of a rendered text.
        max_seconds: Largest duration of a rendering in seconds.

    Raises:
        ConfigError: ``source`` is not a template, or the variables are not JSON values.
        ImportError: Jinja is not installed.
    """

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    now: datetime | None = None
    arguments: str = "given"
    # Limits are not compared, because they do not change rendered texts.
    max_chars: int = field(default=4_000_000, repr=False)
    max_seconds: float = field(default=60.0, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not isinstance(self.variables, Mapping):
            raise ConfigError(
                f"chat template: expected a str, and variables as a dict, found {self.source!r:.80} and "
                f"{self.variables!r:.80}"
            )
        check_choice("arguments", self.arguments, ARGUMENTS)
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
            tokenizer: A tokenizer of ``transformers``, or the path of a folder with ``chat_template.jinja`` or
                ``tokenizer_config.json``.
            name: The name of the template, if there are several.

        Returns:
            The template, with the special tokens as variables.

        Raises:
            ConfigError: The tokenizer has no template of that name.
            DataError: A file is damaged.
        """
        if isinstance(tokenizer, str | os.PathLike):
            source, special = _in_folder(Path(tokenizer))
        else:
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
        messages: Iterable[Message] | Iterable[Mapping[str, Any]],
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        documents: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: Messages, or dicts in the form that ``from_openai`` accepts.
            tools: JSON schemas of the tools that may be called.
            documents: Documents for retrieval: dicts with ``title`` and ``text``.
            add_generation_prompt: Whether the text ends with the header of an assistant's answer.

        Raises:
            DataError: There are no messages, values are not JSON, or the template raises an error, fails, or exceeds a
                limit.
        """
        given = {"tools": tools, "documents": documents}
        return self._rendered(messages_of(messages), given, add_generation_prompt, self._time(), ("", ""))

    def _time(self) -> datetime:
        return self.now or datetime.now()

    def _rendered(
        self,
        messages: tuple[Message, ...],
        given: Mapping[str, Any],
        add_generation_prompt: bool,
        now: datetime,
        marks: tuple[str, str],
    ) -> str:
        variables = {**self.variables, "add_generation_prompt": bool(add_generation_prompt)}
        for name, value in given.items():
            listed = None if value is None else list(value)
            variables[name] = plain(listed, f"chat, {name}")
        variables["messages"] = for_template(messages, self.arguments)
        request = {"source": self.source, "variables": variables, "marks": marks, "max_chars": self.max_chars}
        return str(renderer.ask(request | {"now": pickle.dumps(_fixed(now)).hex()}, self.max_seconds)["text"])


def _fixed(now: datetime) -> datetime:
    """Return a time of the same values whose timezone another process can load: a fixed offset with a name."""
    offset = now.utcoffset()
    zone = None if offset is None else timezone(offset, now.tzname() or "")
    return datetime.combine(now.date(), now.time(), zone)


class Renderings:
    """Renders a chat several times, always with the same time.

    Args:
        template: The template.
        messages: The chat.
        tools, documents: As in ``ChatTemplate.render``.
    """

    def __init__(self, template: ChatTemplate, messages: Any, tools: Any, documents: Any) -> None:
        self.messages = messages_of(messages)
        self._given = {
            name: None if value is None else list(value) for name, value in (("tools", tools), ("documents", documents))
        }
        self._template, self._now = template, template._time()

    def __call__(self, messages: tuple[Message, ...], add_generation_prompt: bool = False) -> str:
        """Return the text of ``messages``."""
        return self._template._rendered(messages, self._given, add_generation_prompt, self._now, ("", ""))

    def marked(self, text: str) -> tuple[str, str, str]:
        """Return the rendered text with marks around generated text, and the begin mark and the end mark."""
        free = [mark for mark in _MARKS if mark not in text][:2]
        if len(free) < 2:
            raise DataError(
                "chat: expected a text without noncharacters U+FDD0 to U+FDEF, found nearly all noncharacters"
            )
        marks = (free[0], free[1])
        return self._template._rendered(self.messages, self._given, False, self._now, marks), *marks


def messages_of(given: Any) -> tuple[Message, ...]:
    """Convert messages, or dicts for ``from_openai``, to messages.

    Raises:
        DataError: ``given`` has other elements.
    """
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else given
    if isinstance(found, tuple) and found and all(isinstance(one, Mapping) for one in found):
        return from_openai(found)
    return checked_messages(found)


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


def _in_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Read a template and special tokens from the files of a tokenizer."""
    config: Mapping[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        config = read_json_object(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{str(file)!r}: expected a text, found: {error}") from error
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    special = {key: value.get("content") if isinstance(value, Mapping) else value for key, value in tokens.items()}
    return source, special


_PLAIN = (str, int, float, bool, type(None))

IMAGE_KEYS = ("url", "path", "image", "image_url")
"""Keys of a dict that can contain an image."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A part of a message that consists of several parts; a part is a text or an image.

    Args:
        type: "text" or "image".
        text: The text of a part of type "text".
        image: The path, URL or ``data:`` URL of an image; "" if only the position of the image in the message is known.
        extra: Additional JSON values by name for templates or processors, such as ``min_pixels``.
        key: The key under which dicts contain the image: "url", "path", "image", or "image_url" (OpenAI's form).

    Raises:
        DataError: A type or key is unknown, an image has a text, or ``extra`` uses the name of another attribute.
    """

    type: str
    text: str = ""
    image: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default="url", compare=False)

    def __post_init__(self) -> None:
        if self.type not in ("text", "image"):
            raise DataError(f"part: expected type 'text' or 'image', found {self.type!r:.80}")
        for name in ("text", "image"):
            given = getattr(self, name)
            if not isinstance(given, str) or (given and name != self.type):
                raise DataError(f"part of type {self.type!r}: expected its {self.type} as a str, found {given!r:.80}")
        if self.key not in IMAGE_KEYS:
            raise DataError(f"part: expected key as one of {list(IMAGE_KEYS)}, found {self.key!r:.80}")
        taken = ("type", "text") if self.type == "text" else ("type", self.key if self.key != "image_url" else "url")
        object.__setattr__(self, "extra", _extra(self.extra, taken, f"part of type {self.type!r}"))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that an assistant requests.

    Args:
        name: The name of the tool, not empty.
        arguments: The arguments by name, or the text of the arguments that the assistant wrote.
        id: The id of the call, to which the tool's answer refers; None without an id.
        extra: Additional JSON values by name, such as a ``type`` other than "function".

    Raises:
        DataError: A type is wrong, values are not JSON, or ``extra`` uses the name of another attribute.
    """

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not isinstance(self.id, str):
            raise DataError(
                f"tool call: expected a name and an id as strs, found {self.name!r:.80} and {self.id!r:.80}"
            )
        if not isinstance(self.arguments, str):
            if not isinstance(self.arguments, Mapping):
                raise DataError(
                    f"tool call {self.name!r}: expected arguments as a dict or a str, found {self.arguments!r:.80}"
                )
            object.__setattr__(self, "arguments", plain(self.arguments, f"tool call {self.name!r}"))
        object.__setattr__(self, "extra", _extra(self.extra, ("id", "function"), f"tool call {self.name!r}"))


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat.

    Args:
        role: The author: "system", "user", "assistant", "tool", or another role that a template knows.
        content: The text, or the parts in order. None for no content, which some templates expect in messages with
            calls.
        tool_calls: The requested calls of tools.
        tool_call_id: The id of the call that a tool's message answers.
        name: The name of the tool or the author, if there is one.
        extra: Additional JSON values by name for templates, such as ``reasoning_content``.

    Raises:
        DataError: A type is wrong, the role is empty, or ``extra`` uses the name of another attribute.
    """

    role: str
    content: str | tuple[MessagePart, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for attribute in ("role", "tool_call_id", "name"):
            value = getattr(self, attribute)
            if not isinstance(value, str) or not (value or attribute != "role"):
                raise DataError(f"message: expected {attribute} as a str, found {value!r:.80}")
        where = f"message of {self.role!r}"
        if self.content is not None and not isinstance(self.content, str):
            object.__setattr__(self, "content", _all_of(MessagePart, self.content, f"{where}: expected content"))
        calls = _all_of(ToolCall, self.tool_calls, f"{where}: expected tool_calls")
        object.__setattr__(self, "tool_calls", calls)
        object.__setattr__(self, "extra", _extra(self.extra, Message.__slots__, where))

    @property
    def text(self) -> str:
        """The concatenated texts of all text parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


def checked_messages(messages: Any) -> tuple[Message, ...]:
    """Check messages, and return them as a tuple.

    Raises:
        DataError: There are no messages, or an element is not a message.
    """
    found = tuple(messages) if isinstance(messages, Iterable) and not isinstance(messages, str | Mapping) else ()
    for place, message in enumerate(found):
        if not isinstance(message, Message):
            raise DataError(f"chat: expected a Message at place {place}, found {message!r:.80}")
    if not found:
        raise DataError(f"chat: expected one or more messages, found {messages!r:.80}")
    return found


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


def _extra(given: Any, taken: Iterable[str], where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: expected extra as a dict, found {given!r:.80}")
    extra: dict[str, Any] = plain(given, where)
    if names := sorted(extra.keys() & set(taken)):
        raise DataError(f"{where}: expected names in extra that no field has, found {names}")
    return extra


def _all_of(kind: type[Any], given: Any, where: str) -> tuple[Any, ...]:
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else None
    if found is None or not all(isinstance(one, kind) for one in found):
        raise DataError(f"{where} as {kind.__name__}s, found {given!r:.80}")
    return found


# ---------------------------------------------------------------------- dicts of others

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "tool": "tool",
    "user": "user",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}

ARGUMENTS = ("given", "dict", "json")
"""Forms of the arguments of tool calls."""


def from_openai(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Convert dicts with ``role`` and ``content``, as in OpenAI's API and in chat templates, to a chat.

    The content may be a text, None, or a list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image_url",
    "image_url": {"url": ...}}``, or ``{"type":
    "image"}`` with ``url``, ``path`` or ``image``. ``tool_calls`` are dicts with ``function``, or the dicts that
    ``function`` would contain. The arguments of calls, a dict or a text, stay unchanged. Other keys of messages, parts
    and calls become ``extra``, unless their values are None.

    Raises:
        DataError: ``messages`` is empty or has an element that is not a dict, content has another type, or the function
            of a call has keys other than name and arguments; the error names the message.
    """
    found = []
    for place, message in enumerate(messages):
        where = f"chat, message {place}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: expected a dict with a role, found {message!r:.80}")
        rest = {key: value for key, value in message.items() if value is not None}
        calls = rest.pop("tool_calls", None) or ()
        if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
            raise DataError(f"{where}: expected tool_calls as a list, found {calls!r:.80}")
        found.append(
            Message(
                role=rest.pop("role"),
                content=_content(rest.pop("content", None), where),
                tool_calls=tuple(_call(call, where) for call in calls),
                tool_call_id=rest.pop("tool_call_id", ""),
                name=rest.pop("name", ""),
                extra=rest,
            )
        )
    return checked_messages(found)


def to_openai(messages: Iterable[Message], *, arguments: str = "given") -> list[dict[str, Any]]:
    """Convert a chat to dicts, as in OpenAI's API and in chat templates.

    Args:
        messages: The chat.
        arguments: The form of the arguments of tool calls: "given" leaves arguments unchanged; "dict" parses JSON
            texts; "json" converts arguments to JSON texts, as in OpenAI's API.

    Returns:
        A dict for each message, with ``role`` and ``content``, and with other keys if they have values. Images keep
            their original form; with ``arguments="json"``, all images have the type "image_url".

    Raises:
        DataError: There are no messages, an element is not a message, or ``arguments`` is unknown.
    """
    if arguments not in ARGUMENTS:
        raise DataError(f"arguments: expected one of {list(ARGUMENTS)}, found {arguments!r:.80}")
    image = _image_url if arguments == "json" else _as_given
    return [_as_dict(message, arguments, image) for message in checked_messages(messages)]


def for_template(messages: Iterable[Message], arguments: str) -> list[dict[str, Any]]:
    """Convert a chat to dicts for templates, like ``to_openai``, but all images have the type "image"."""
    return [_as_dict(message, arguments, _image) for message in messages]


def from_sharegpt(conversation: Any) -> tuple[Message, ...]:
    """Convert dicts with ``from`` and ``value``, as in datasets in the ShareGPT format, to a chat.

    "human" and "gpt" become "user" and "assistant"; the value of a "function_call" becomes a call, and an "observation"
    becomes a tool's message.

    Args:
        conversation: The list of dicts, or a dict with the list as ``conversations`` and optionally a text ``system``.

    Raises:
        DataError: The form is different, or a ``from`` is unknown; the error names the message.
    """
    found = []
    turns = conversation
    if isinstance(conversation, Mapping):
        turns = conversation.get("conversations")
        if conversation.get("system"):
            found.append(Message("system", conversation["system"]))
    if not isinstance(turns, list | tuple):
        raise DataError(f"chat: expected a list, or a dict with 'conversations', found {conversation!r:.80}")
    for place, turn in enumerate(turns):
        where = f"chat, message {place}"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise DataError(f"{where}: expected a dict with 'from' and 'value', found {turn!r:.80}")
        who = turn.get("from")
        if who not in _SHAREGPT_ROLES:
            raise DataError(f"{where}: expected from one of {sorted(_SHAREGPT_ROLES)}, found {who!r:.80}")
        if who == "function_call":
            found.append(Message("assistant", None, _calls_in(turn["value"], where)))
        else:
            found.append(Message(_SHAREGPT_ROLES[who], turn["value"]))
    return checked_messages(found)


def _content(content: Any, where: str) -> str | tuple[MessagePart, ...] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise DataError(f"{where}: expected content as a str or a list of parts, found {content!r:.80}")
    return tuple(_part(part, where) for part in content)


def _part(part: Any, where: str) -> MessagePart:
    rest = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = rest.pop("type", None)
    if kind == "text":
        return MessagePart("text", text=rest.pop("text", None), extra=rest)
    if kind == "image_url":
        given = rest.pop("image_url", None)
        if not isinstance(given, Mapping):
            return MessagePart("image", image=given, extra=rest, key=kind)
        inner = {key: value for key, value in given.items() if value is not None}
        image = inner.pop("url", "")
        return MessagePart("image", image=image, extra=rest | ({kind: inner} if inner else {}), key=kind)
    if kind == "image":
        key = next((name for name in ("url", "path", "image") if name in rest), "url")
        return MessagePart("image", image=rest.pop(key, ""), extra=rest, key=key)
    raise DataError(f"{where}: expected parts of type 'text', 'image' or 'image_url', found {part!r:.80}")


def _call(call: Any, where: str) -> ToolCall:
    rest = {key: value for key, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    if "function" in rest:
        said = rest.pop("function")
    else:
        said = {name: rest.pop(name) for name in ("name", "arguments") if name in rest}
    if not isinstance(said, Mapping) or not said:
        raise DataError(f"{where}: expected a call as a dict with 'function', found {call!r:.80}")
    if others := sorted(key for key in said if key not in ("name", "arguments") and said[key] is not None):
        raise DataError(f"{where}: expected a function with a name and arguments, found also {others}")
    if rest.get("type") == "function":
        del rest["type"]  # all messages have it
    arguments = said.get("arguments")
    return ToolCall(said.get("name", ""), {} if arguments is None else arguments, rest.pop("id", None) or "", rest)


def _calls_in(value: str, where: str) -> tuple[ToolCall, ...]:
    try:
        read = json.loads(value)
    except ValueError:
        raise DataError(f"{where}: expected a call as JSON, found {value!r:.80}") from None
    return tuple(_call(call, where) for call in (read if isinstance(read, list) else [read]))


def _as_dict(message: Message, arguments: str, image: Callable[[MessagePart], dict[str, Any]]) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, tuple):
        content = [
            image(part) if part.type == "image" else {"type": "text", "text": part.text, **part.extra}
            for part in content
        ]
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        made["tool_calls"] = [_call_as_dict(call, arguments) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if getattr(message, name):
            made[name] = getattr(message, name)
    return {**made, **message.extra}


def _image_url(part: MessagePart) -> dict[str, Any]:
    rest = dict(part.extra)
    inner = rest.pop("image_url", {})
    return {"type": "image_url", "image_url": {"url": part.image, **inner}, **rest}


def _image(part: MessagePart) -> dict[str, Any]:
    key = "url" if part.key == "image_url" else part.key
    return {"type": "image", **({key: part.image} if part.image else {}), **part.extra}


def _as_given(part: MessagePart) -> dict[str, Any]:
    return _image_url(part) if part.key == "image_url" else _image(part)


def _call_as_dict(call: ToolCall, wanted: str) -> dict[str, Any]:
    arguments: Any = call.arguments
    if wanted == "json" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if wanted == "dict" and isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = None
        arguments = read if isinstance(read, dict) else arguments
    made: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}, **call.extra}
    return {"id": call.id, **made} if call.id else made
