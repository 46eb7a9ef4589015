"""Jinja's sandbox as templates of chats want it, with limits on steps and on sizes; needs Jinja."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from mouse_core.errors import ConfigError, DataError

# Among the variables, under a name that no template can say or set.
_STATE = "\0rendering"
# A number that says how long a text is to be; and of one value, how many characters or items it may have.
_LARGEST_NUMBER, _LARGEST_VALUE = 1_000_000, 8_000_000
_WIDE = re.compile(r"[0-9]{6}")


class _TooMuch(Exception):
    """A limit was met."""


@dataclass(slots=True)
class _Rendering:
    """One rendering: what stands around generated text, and how many steps are left."""

    marks: tuple[str, str]
    steps: int
    now: datetime


class _Generation(Extension):
    """``{% generation %}``, which says what an assistant generated, and the counter of steps."""

    tags = {"generation"}  # noqa: RUF012, as Jinja has it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _marked(self, context: Context, caller: Callable[[], str]) -> str:
        begin, end = context.parent[_STATE].marks
        return f"{begin}{caller()}{end}"

    @jinja2.pass_context
    def _step(self, context: Context) -> str:
        state: _Rendering = context.parent[_STATE]
        state.steps -= 1
        if state.steps < 0:
            raise _TooMuch("expected fewer steps of its loops than max_steps")
        return ""

    def _joined(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


class _Counted(NodeTransformer):
    """Has loops and macros count, and texts that are joined measured."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._extension.call_method("_joined", node.nodes, lineno=node.lineno)

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.ExprStmt(self._extension.call_method("_step", lineno=node.lineno)).set_lineno(node.lineno)
        node.body.insert(0, step)
        made: nodes.Node = node
        return made


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        given = dict(*rest, **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded(function) for name, function in self.filters.items()}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now, "namespace": _Namespace}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in ("translate", "expandtabs", "format_map"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, int) and hasattr(other, "__len__"):
                _check_size(one * len(other))
        if operator in ("*", "**"):
            _check_number(left)
            _check_number(right)
        if operator == "**" and isinstance(right, int) and right > 64:
            raise _TooMuch("expected a power of at most 64")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_numbers(right if isinstance(right, tuple) else (right,))
        made = super().call_binop(context, operator, left, right)
        _check_made(made)
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        _check_numbers((*args, *kwargs.values()))
        if isinstance(owner, str):
            _check_method(owner, name, args)
        made = super().call(__context, __obj, *args, **kwargs)
        _check_made(made)
        return made


class Program:
    """A template that was compiled.

    Args:
        source: The template.

    Raises:
        ConfigError: It is none.
    """

    def __init__(self, source: str) -> None:
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self.has_generation = any(node.name == "_marked" for node in tree.find_all(nodes.ExtensionAttribute))
            extension = environment.extensions[_Generation.identifier]
            code = environment.compile(_Counted(extension).visit(tree), "chat template", "chat template")
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"chat template: expected a Jinja template, found in line {error.lineno}: {error}"
            ) from error
        except (_TooMuch, RecursionError) as error:
            raise ConfigError(f"chat template: expected one that can be compiled, found: {error}") from error

    def render(
        self, variables: dict[str, Any], marks: tuple[str, str], now: datetime, max_chars: int, max_steps: int
    ) -> str:
        """The text; around what stands in ``{% generation %}`` are the marks.

        Raises:
            DataError: The template refuses, fails, or meets a limit.
        """
        state = _Rendering(marks, max_steps, now)
        made, size = [], 0
        try:
            for piece in self._template.generate({**variables, _STATE: state}):
                made.append(piece)
                size += len(piece)
                if size > max_chars:
                    raise _TooMuch(f"expected at most {max_chars} characters (max_chars)")
        except _TooMuch as error:
            raise DataError(f"chat template: {error}") from error
        except _RefusedError as error:
            raise DataError(f"chat template: it refuses this chat: {error}") from error
        except Exception as error:  # whatever a program that somebody else wrote raises
            raise DataError(f"chat template: expected a text, found {type(error).__name__}: {error}") from error
        return "".join(made)


class _RefusedError(jinja2.TemplateError):
    """What a template raises by itself."""


def _refuse(message: Any) -> None:
    raise _RefusedError(str(message))


@jinja2.pass_context
def _strftime_now(context: Context, form: str) -> str:
    now: datetime = context.parent[_STATE].now
    return now.strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes what HTML does not allow.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose numbers and whose results are bounded."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        texts = [one for one in args if isinstance(one, str)]
        if function.__name__ == "do_replace" and len(texts) > 2:
            _check_method(texts[0], "replace", texts[1:])
        if function.__name__ == "do_format" and texts:
            _check_format(texts[0])
        made = function(*args, **kwargs)
        _check_made(made)
        return made

    return guarded


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no names that begin with an underscore: {name!r:.80}")


def _check_method(owner: str, name: str, args: Any) -> None:
    """Methods whose result may be as long as the product of what they are given."""
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    if name == "join" and args and hasattr(args[0], "__len__"):
        _check_size(len(owner) * len(args[0]))


def _check_format(form: str) -> None:
    if _WIDE.search(form):
        raise _TooMuch("expected widths of fewer than six digits")


def _check_numbers(values: Any) -> None:
    for value in values:
        _check_number(value)


def _check_number(value: Any) -> None:
    if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
        raise _TooMuch(f"expected numbers of at most {_LARGEST_NUMBER}, found a larger one")


def _check_made(value: Any) -> None:
    if isinstance(value, str | bytes | list | tuple | dict):
        _check_size(len(value))


def _check_size(size: int) -> None:
    if size > _LARGEST_VALUE:
        raise _TooMuch(f"expected values of at most {_LARGEST_VALUE} characters or items, found {size}")
