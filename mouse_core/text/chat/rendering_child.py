"""Render chat templates in a separate process, because a harmful template may hang or exhaust memory.

The script reads requests and writes answers; each request and answer is a line of JSON. The script imports nothing of
this package, so that it starts quickly.
"""

from __future__ import annotations

import json
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
"""Limit of the address space in bytes."""

_LONGEST = 1 << 24  # seconds

# Variables with the marks around generated text and the time; a template cannot read or set variables of these names.
_MARKS, _NOW = "\0marks", "\0now"


class _Generation(Extension):
    """The statement ``{% generation %}``, which marks generated text."""

    tags = {"generation"}  # noqa: RUF012, as Jinja has it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _marked(self, context: Context, caller: Callable[[], str]) -> str:
        begin, end = context.parent[_MARKS]
        return f"{begin}{caller()}{end}"


class _RefusedError(jinja2.TemplateError):
    """An error that the template itself raises."""


def _refuse(message: Any) -> None:
    raise _RefusedError(str(message))


@jinja2.pass_context
def _strftime_now(context: Context, form: str) -> str:
    text: str = context.parent[_NOW].strftime(form)
    return text


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    del made.filters["random"], made.globals["lipsum"]  # a text does not depend on chance
    made.intercepted_binops = frozenset(["*", "**"])  # so that they are not computed while a template is compiled
    made.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return made


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[jinja2.Template, bool]:
    """Return the compiled template, and whether it has ``{% generation %}``."""
    environment = _environment()
    tree = environment.parse(source)
    marks = any(node.name == "_marked" for node in tree.find_all(nodes.ExtensionAttribute))
    code = environment.compile(tree, "chat template", "chat template")
    return jinja2.Template.from_code(environment, code, environment.make_globals(None)), marks


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    template, has_generation = _compiled(request["source"])
    if "variables" not in request:
        return {"has_generation": has_generation}
    hidden = {_MARKS: request["marks"], _NOW: pickle.loads(bytes.fromhex(request["now"]))}
    pieces, size = [], 0
    for piece in template.generate({**request["variables"], **hidden}):
        pieces.append(piece)
        size += len(piece)
        if size > request["max_chars"]:
            return {"error": f"expected at most {request['max_chars']} characters (max_chars)"}
    return {"text": "".join(pieces)}


def _alarm(seconds: int) -> None:
    """End this process after ``seconds``, even if the parent process has died and cannot end it; 0 means no limit."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _serve() -> None:
    with suppress(ImportError, ValueError, OSError):  # a system without such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(b"{}\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            _alarm(int(min(request["seconds"] + 10, _LONGEST)))
            answer = _answer(request)
        except jinja2.TemplateSyntaxError as error:
            answer = {"error": f"expected a Jinja template, found in line {error.lineno}: {error}"}
        except _RefusedError as error:
            answer = {"error": f"the template raised an error for this chat: {error}"}
        except MemoryError:
            answer = {"error": f"expected values of less than {MEMORY >> 20} MB"}
        except Exception as error:  # a program of another author may raise any error
            answer = {"error": f"expected a text, found {type(error).__name__}: {error}"}
        _alarm(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
