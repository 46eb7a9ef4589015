"""Chats from and to the dicts of others: those of OpenAI's interface, and ShareGPT's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mouse_core.errors import DataError
from mouse_core.text.chat.messages import Message, MessagePart, ToolCall, checked_messages

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
"""In which form arguments of calls may be."""


def from_openai(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """A chat from dicts with ``role`` and ``content``, as OpenAI's interface and chat templates have them.

    Content may be a text, None, or a list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image_url",
    "image_url": {"url": ...}}``, or ``{"type": "image"}`` with ``url``, ``path`` or ``image``. ``tool_calls`` are
    dicts with ``function``, or that alone; their arguments, a dict or a text, stay as they are. Other keys of messages,
    parts and calls become ``extra``, but those that are None.

    Raises:
        DataError: No dicts, none at all, another kind of content, or a function of a call with something else than a
            name and arguments; the message says which.
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
    """A chat as dicts.

    Args:
        messages: The chat.
        arguments: Of calls: "given", as they are, "dict", where texts of JSON objects are read, or "json", as texts,
            which is how OpenAI's interface has them.

    Returns:
        A dict for each with ``role`` and ``content``, and the others where they are. Images are parts in the form in
        which they were given; with "json" all are of type "image_url".

    Raises:
        DataError: No message, or something else among them; another word for ``arguments``.
    """
    if arguments not in ARGUMENTS:
        raise DataError(f"arguments: expected one of {list(ARGUMENTS)}, found {arguments!r:.80}")
    image = _image_url if arguments == "json" else _as_given
    return [_as_dict(message, arguments, image) for message in checked_messages(messages)]


def for_template(messages: Iterable[Message], arguments: str) -> list[dict[str, Any]]:
    """A chat as templates are given it: ``to_openai``, with images of type "image" whatever the arguments are."""
    return [_as_dict(message, arguments, _image) for message in messages]


def from_sharegpt(conversation: Any) -> tuple[Message, ...]:
    """A chat from dicts with ``from`` and ``value``, as data sets in the manner of ShareGPT have them.

    "human" and "gpt" become "user" and "assistant"; the value of a "function_call" is read as a call, and an
    "observation" is a tool's message.

    Args:
        conversation: The list, or a dict that has it as ``conversations``, with or without a text ``system``.

    Raises:
        DataError: Another form, or who is not known; the message says which.
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


def to_sharegpt(messages: Iterable[Message]) -> list[dict[str, str]]:
    """A chat as dicts with ``from`` and ``value``.

    Raises:
        DataError: What that form has no place for: parts, other roles, a text beside a call, ids and extras.
    """
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    made = []
    for place, message in enumerate(checked_messages(messages)):
        lost = [key for key in ("tool_call_id", "name", "extra") if getattr(message, key)]
        lost += ["content"] if message.tool_calls and message.content else []
        lost += ["id of a call"] if any(call.id for call in message.tool_calls) else []
        lost += ["extra of a call"] if any(call.extra for call in message.tool_calls) else []
        content = "" if message.content is None and message.tool_calls else message.content
        if message.role not in names or not isinstance(content, str) or lost:
            raise DataError(f"chat, message {place}: expected a role and a text, found {lost or message.role}")
        if message.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            said = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
            made.append({"from": "function_call", "value": said})
        else:
            made.append({"from": names[message.role], "value": content})
    return made


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
        del rest["type"]  # as all have it
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
