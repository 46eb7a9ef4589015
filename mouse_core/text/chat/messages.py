"""Messages of chats, and templates that render a chat to text."""

from __future__ import annotations

import atexit
import importlib.util
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mouse_core._base.child import Child
from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import check_count

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
