"""ChatTemplate: the Jinja program that makes a text of a chat, rendered in Jinja's sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import read_json_object
from mouse_core.spec import check_choice, check_count
from mouse_core.text.chat.messages import ARGUMENTS, Message, checked_messages, for_template, from_openai, plain

if TYPE_CHECKING:
    from mouse_core.text.chat._sandbox import Program

# What stands for nobody: of Unicode's noncharacters, which no text has to have.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template: a Jinja program as tokenizers bring it, which makes a text of messages.

    It is rendered as ``transformers`` renders it: with ``trim_blocks`` and ``lstrip_blocks``, ``break`` and
    ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that escapes nothing, and ``{% generation %}``.

    Templates of others are programs of others. They run in Jinja's ``ImmutableSandboxedEnvironment``: they are given
    JSON values, and reach no file, no module and nothing that belongs to Python; loops, the sizes of values and of the
    text, and the time are bounded. That is no limit on memory: who renders what a stranger wrote for harm does it in a
    process that has one.

    Args:
        source: The program.
        variables: What it may read beside the messages, as ``bos_token`` and ``eos_token``.
        now: What ``strftime_now`` tells; None: the time of the rendering. Texts that are to be the same again need one.
        arguments: How it is given the arguments of calls: "given", as they are in the chat; "dict", where texts of JSON
            objects are read, for templates that write ``arguments | tojson``; or "json", as texts, for those that write
            them as they are.
        max_chars: How long a text may be.
        max_steps: How many rounds of loops, and calls of macros, a rendering may take.
        max_seconds: How long a rendering may take. It is told between operations, each of which is short.

    Raises:
        ConfigError: No template, or variables that are no JSON.
        ImportError: Jinja is not installed.
    """

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    now: datetime | None = None
    arguments: str = "given"
    # Limits decide about no text: with others a text that was made stays what it is.
    max_chars: int = field(default=4_000_000, repr=False)
    max_steps: int = field(default=200_000, repr=False)
    max_seconds: float = field(default=60.0, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not isinstance(self.variables, Mapping):
            raise ConfigError(
                f"chat template: expected a str, and variables as a dict, found {self.source!r:.80} and "
                f"{self.variables!r:.80}"
            )
        check_choice("arguments", self.arguments, ARGUMENTS)
        check_count("max_chars", self.max_chars, 1)
        check_count("max_steps", self.max_steps, 1)
        if not isinstance(self.max_seconds, int | float) or not self.max_seconds > 0:
            raise ConfigError(f"max_seconds: expected a number above 0, found {self.max_seconds!r:.80}")
        try:
            # In an order of their own: they are the same, however they were written down.
            object.__setattr__(self, "variables", dict(sorted(plain(self.variables, "variables").items())))
        except DataError as error:
            raise ConfigError(str(error)) from error
        object.__setattr__(self, "_program", _compiled(self.source))

    def __reduce__(self) -> Any:
        # What is compiled stays here: another process compiles its own.
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    @classmethod
    def of(cls, tokenizer: Any, *, name: str = "default") -> ChatTemplate:
        """The template that a tokenizer brings.

        Args:
            tokenizer: One of ``transformers``, or the path of a folder with ``chat_template.jinja`` or
                ``tokenizer_config.json``.
            name: Which, where there are several.

        Returns:
            It with the names of the special tokens as variables.

        Raises:
            ConfigError: There is none of that name.
            DataError: A damaged file.
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
            raise ConfigError(f"tokenizer: expected one with a chat template {name!r}, found none in {tokenizer!r:.80}")
        return cls(source, {key: value for key, value in special.items() if isinstance(value, str)})

    @property
    def has_generation(self) -> bool:
        """Whether it says in ``{% generation %}`` what an assistant generates."""
        return self._compiled.has_generation

    def render(
        self,
        messages: Iterable[Message] | Iterable[Mapping[str, Any]],
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        documents: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a chat.

        Args:
            messages: Messages, or dicts as ``from_openai`` takes them.
            tools: JSON schemas of the tools that may be called.
            documents: Dicts of what may be looked up, with ``title`` and ``text``.
            add_generation_prompt: Whether what introduces an assistant's answer comes at the end.

        Raises:
            DataError: No messages, or values that are no JSON; the template refuses them, fails, or meets a limit.
        """
        given = {"tools": tools, "documents": documents}
        return self._rendered(messages_of(messages), given, add_generation_prompt, self._time(), ("", ""))

    @property
    def _compiled(self) -> Program:
        program: Program = self.__dict__["_program"]
        return program

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
        return self._compiled.render(variables, marks, now, self)


class Renderings:
    """Several renderings of one chat, all at the same time of day.

    Args:
        template: The template.
        messages: The chat.
        tools, documents: As ``ChatTemplate.render`` takes them.
    """

    def __init__(self, template: ChatTemplate, messages: Any, tools: Any, documents: Any) -> None:
        self.messages = messages_of(messages)
        self._given = {
            name: None if value is None else list(value) for name, value in (("tools", tools), ("documents", documents))
        }
        self._template, self._now = template, template._time()

    def __call__(self, messages: tuple[Message, ...], add_generation_prompt: bool = False) -> str:
        """The text of some messages."""
        return self._template._rendered(messages, self._given, add_generation_prompt, self._now, ("", ""))

    def marked(self, text: str) -> tuple[str, str, str]:
        """The text with marks around what was generated, and the two marks."""
        free = [mark for mark in _MARKS if mark not in text][:2]
        if len(free) < 2:
            raise DataError("chat: expected a text without noncharacters U+FDD0 to U+FDEF, found nearly all of them")
        marks = (free[0], free[1])
        return self._template._rendered(self.messages, self._given, False, self._now, marks), *marks


def messages_of(given: Any) -> tuple[Message, ...]:
    """Messages, of messages or of dicts as ``from_openai`` takes them.

    Raises:
        DataError: Neither.
    """
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else given
    if isinstance(found, tuple) and found and all(isinstance(one, Mapping) for one in found):
        return from_openai(found)
    return checked_messages(found)


def _compiled(source: str) -> Program:
    try:
        from mouse_core.text.chat._sandbox import Program
    except ModuleNotFoundError as error:
        raise ImportError("chat templates need Jinja: pip install 'mouse-data[text]'") from error
    return Program(source)


def _in_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """A template and special tokens from the files of a tokenizer."""
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
