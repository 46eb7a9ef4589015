"""What a chat is made of: messages, the calls of tools in them, and images between texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mouse_core.errors import DataError

_PLAIN = (str, int, float, bool, type(None))

IMAGE_KEYS = ("url", "path", "image", "image_url")
"""What an image may stand under."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A piece of a message that has more than a text.

    Args:
        type: "text" or "image".
        text: What it says, of a text.
        image: Where an image is, as a path, an address or a ``data:`` address; "" where only its place is known.
        extra: What else a template or a processor may read of it, as ``min_pixels``: JSON values by name.
        key: Of an image, what it stands under in dicts: "url", "path", "image", or "image_url", which is OpenAI's form.

    Raises:
        DataError: Another type or key, a text of an image, or an extra that has a name of the others.
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
    """A call of a tool that an assistant asks for.

    Args:
        name: Of the tool, not empty.
        arguments: By name; or the text of them as it was written.
        id: What the tool's answer refers to, where there is something.
        extra: What else is said of the call, as a ``type`` that is not "function": JSON values by name.

    Raises:
        DataError: Another type, values that are no JSON, or an extra that has a name of the others.
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
    """One message of a chat.

    Args:
        role: Who wrote it: "system", "user", "assistant", "tool", or another one that a template knows.
        content: Its text, or its parts in order; None: there is none, as templates may want it beside calls.
        tool_calls: Calls that it asks for.
        tool_call_id: Which call it answers, of a tool's.
        name: Of the tool or of who wrote it, where there is one.
        extra: What else a template may read of it, as ``reasoning_content``: JSON values by name.

    Raises:
        DataError: Another type, an empty role, or an extra that has a name of the others.
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
        """All texts of it, one behind the other."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


def checked_messages(messages: Any) -> tuple[Message, ...]:
    """Messages as a tuple.

    Raises:
        DataError: None, or something else among them.
    """
    found = tuple(messages) if isinstance(messages, Iterable) and not isinstance(messages, str | Mapping) else ()
    for place, message in enumerate(found):
        if not isinstance(message, Message):
            raise DataError(f"chat: expected a Message at place {place}, found {message!r:.80}")
    if not found:
        raise DataError(f"chat: expected one or more messages, found {messages!r:.80}")
    return found


def plain(value: Any, where: str) -> Any:
    """A copy of JSON values that is made of the plain types, and of no class with methods of its own.

    Raises:
        DataError: Something else.
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
        raise DataError(f"{where}: expected extras of other names, found {names}")
    return extra


def _all_of(kind: type[Any], given: Any, where: str) -> tuple[Any, ...]:
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else None
    if found is None or not all(isinstance(one, kind) for one in found):
        raise DataError(f"{where} as {kind.__name__}s, found {given!r:.80}")
    return found
