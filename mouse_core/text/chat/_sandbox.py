"""Jinja's sandbox for chat templates, with limits on steps, sizes and time; needs Jinja.

A template may come from an untrusted tokenizer. Jinja's sandbox blocks access to files, modules and Python objects, but
not endless loops or values that fill the memory. So each operation checks the time, and the size of its result before
the result exists::

    {{ "x" * 10**9 }}        the product is checked before the text is created
    {% for i in range(9) %}  each iteration, and each call of a macro, is a step
    {{ a ~ b }}              the sizes of both values are added first
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
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

# The largest number, which may be the length of a text; and the largest number of characters or items of a value,
# including nested values.
LARGEST_NUMBER, LARGEST_VALUE = 1_000_000, 8_000_000
# The replacement fields of ``str.format`` and of ``%``.
BRACES, PERCENTS = re.compile(r"\{([^{}]*\{?)"), re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
_DIGITS = re.compile(r"[0-9]+")
# The counted size of a number, a name or a comma.
_ITEM = 32


_end: ContextVar[float] = ContextVar("end", default=float("inf"))


class TooMuch(Exception):
    """A limit was exceeded."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Set a deadline for the code of this thread inside the context; after it, ``check_time`` raises an error."""
    before = _end.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _end.reset(before)


def check_time() -> None:
    """Raise TooMuch after the deadline. Code between two calls is short and has values of bounded size."""
    if time.monotonic() > _end.get():
        raise TooMuch("expected to be done within max_seconds")


def size_of(value: Any, indent: int = 0) -> int:
    """Return the approximate number of characters of a value as text; repeated parts count each time.

    Args:
        value: A value of any type; iterators are not consumed.
        indent: The number of characters by which each level is indented.

    Raises:
        TooMuch: The size exceeds the limit of a value.
    """
    check_time()
    waiting, total = [(value, 0)], 0
    while waiting:
        one, depth = waiting.pop()
        total += (len(one) if isinstance(one, str | bytes) else _ITEM) + depth * indent
        check_size(total + _ITEM * len(waiting))
        if isinstance(one, Mapping):
            waiting += [(item, depth + 1) for pair in one.items() for item in pair]
        elif isinstance(one, list | tuple | set | frozenset):
            check_size(_ITEM * len(one))
            waiting += [(item, depth + 1) for item in one]
    return total


def listed(value: Any) -> Any:
    """Convert an iterator to a list, and return other values unchanged.

    Raises:
        TooMuch: The list exceeds the limit of a value.
    """
    if not isinstance(value, Iterator):
        return value
    made, total = [], 0
    for one in value:
        made.append(one)
        total += size_of(one)
        check_size(total)
    return made


def check_replace(text: str, old: Any, new: Any) -> None:
    """Check the size of a text after a replacement."""
    if isinstance(old, str) and isinstance(new, str):
        check_size(len(text) + text.count(old) * len(new))


def check_join(between: str, values: Any) -> None:
    """Check the size of values joined by a text."""
    if hasattr(values, "__len__"):
        check_size(size_of(values) + len(between) * len(values))


def check_format(form: str, values: Any, places: re.Pattern[str]) -> None:
    """Check the size of a format string, in which each field is as wide as the largest number."""
    found = list(places.findall(form.replace("{{", "").replace("%%", "")))
    if any("{" in place for place in found):
        raise TooMuch("expected no widths within widths")
    said = [int(number[:9]) for place in found for number in _DIGITS.findall(place)]
    widest = max([0, *said, *(abs(one) for one in values if isinstance(one, int))])
    check_numbers((*values, widest))
    check_size(len(form) + len(found) * (widest + max([0, *map(size_of, values)])))


def check_numbers(values: Any) -> None:
    """Check integers, which may become the length of a text."""
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise TooMuch(f"expected numbers of at most {LARGEST_NUMBER}, found a larger one")


def check_size(size: int) -> None:
    """Check the size of a value against the limit."""
    if size > LARGEST_VALUE:
        raise TooMuch(f"expected values of at most {LARGEST_VALUE} characters or items, found {size}")


def check_made(value: Any) -> None:
    """Check the time, and the size of an operation's result."""
    check_time()
    if isinstance(value, str | bytes):
        check_size(len(value))
    elif isinstance(value, list | tuple | dict):
        size_of(value)


def timed(function: Any) -> Callable[..., Any]:
    """Return a Jinja test that raises TooMuch after the deadline."""

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        check_time()
        return function(*args, **kwargs)

    return timed


# The variable with the state of a rendering; a template cannot read or set a variable of this name.
_STATE = "\0rendering"
# Filters that are removed, because their results or times have no simple bound, or are random; no chat needs them.
_WITHOUT = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Largest number of characters of a template, and largest number of seconds of its compilation.
_LONGEST = 200_000
_TO_COMPILE = 10.0
# Filters that receive and return iterators.
_ONE_BY_ONE = ("map", "select", "reject", "selectattr", "rejectattr", "first", "batch")


@dataclass(slots=True)
class _Rendering:
    """The state of a rendering: the marks around generated text, the remaining steps, and the time."""

    marks: tuple[str, str]
    steps: int
    now: datetime


class _Generation(Extension):
    """The statement ``{% generation %}``, which marks generated text, and the functions that ``_Counted`` inserts."""

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
        check_time()
        state: _Rendering = context.parent[_STATE]
        state.steps -= 1
        if state.steps < 0:
            raise TooMuch("expected fewer steps of its loops than max_steps")
        return ""

    def _joined(self, *values: Any) -> str:
        texts = [str(_shown(value)) for value in values]
        check_size(sum(map(len, texts)))
        return "".join(texts)

    def _sized(self, value: Any) -> Any:
        size_of(value)
        return value


class _Counted(NodeTransformer):
    """Counts steps in loops and macros, and checks operations that join, compare, slice or store values."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.ExprStmt(self._extension.call_method("_step", lineno=node.lineno)).set_lineno(node.lineno)
        node.body.insert(0, step)
        made: nodes.Node = node
        return made

    def _with_size(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._extension.call_method("_sized", [node], lineno=node.lineno)

    visit_For = visit_Macro = visit_CallBlock = _with_step
    visit_Compare = visit_List = visit_Dict = _with_size

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._extension.call_method("_joined", node.nodes, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._with_size(node)
        self.generic_visit(node)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._with_size(node) if node.ctx == "load" else node


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
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_shown)
        self.filters |= {"tojson": _tojson, "replace": _replace, "indent": _indent}
        for name in _WITHOUT:
            del self.filters[name]
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.tests = {name: timed(function) for name, function in self.tests.items()}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now, "namespace": _Namespace}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in ("encode", "translate", "expandtabs", "format_map"):
            return False
        if isinstance(obj, bytes | int):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def formatted(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, (*args, *kwargs.values()), BRACES)
            return wrapped(*args, **kwargs)

        return formatted

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, int) and hasattr(other, "__len__"):
                check_size(one * len(other))
        if operator in ("*", "**"):
            check_numbers((left, right))
        if operator == "**" and isinstance(right, int) and right > 64:
            raise TooMuch("expected a power of at most 64")
        if operator == "%" and isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,), PERCENTS)
        made = super().call_binop(context, operator, left, right)
        check_made(made)
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        args = tuple(map(listed, args))
        check_numbers((*args, *kwargs.values()))
        if isinstance(owner, str) and name == "replace" and len(args) > 1:
            check_replace(owner, *args[:2])
        if isinstance(owner, str) and name == "join" and args:
            check_join(owner, args[0])
        made = super().call(__context, __obj, *args, **kwargs)
        check_made(made)
        return made


class Program:
    """A compiled template.

    Args:
        source: The template.

    Raises:
        ConfigError: The source is not a template, is too long, or exceeds a limit when it is compiled.
    """

    def __init__(self, source: str) -> None:
        if len(source) > _LONGEST:
            raise ConfigError(f"chat template: expected at most {_LONGEST} characters, found {len(source)}")
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self.has_generation = any(node.name == "_marked" for node in tree.find_all(nodes.ExtensionAttribute))
            extension = environment.extensions[_Generation.identifier]
            with within(_TO_COMPILE):  # Jinja computes constant expressions
                code = environment.compile(_Counted(extension).visit(tree), "chat template", "chat template")
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"chat template: expected a Jinja template, found in line {error.lineno}: {error}"
            ) from error
        except (TooMuch, RecursionError) as error:
            raise ConfigError(f"chat template: expected one that can be compiled, found: {error}") from error

    def render(
        self,
        variables: dict[str, Any],
        marks: tuple[str, str],
        now: datetime,
        *,
        max_chars: int,
        max_steps: int,
        max_seconds: float,
    ) -> str:
        """Return the text, with marks around the text in ``{% generation %}``; see ``ChatTemplate`` for the limits.

        Raises:
            DataError: The template raises an error, fails, or exceeds a limit.
        """
        state = _Rendering(marks, max_steps, now)
        made, size = [], 0
        try:
            with within(max_seconds):
                for piece in self._template.generate({**variables, _STATE: state}):
                    made.append(piece)
                    size += len(piece)
                    if size > max_chars:
                        raise TooMuch(f"expected at most {max_chars} characters (max_chars)")
        except TooMuch as error:
            raise DataError(f"chat template: {error}") from error
        except _RefusedError as error:
            raise DataError(f"chat template: it refuses this chat: {error}") from error
        except Exception as error:  # a template may raise any error
            raise DataError(f"chat template: expected a text, found {type(error).__name__}: {error}") from error
        return "".join(made)


class _RefusedError(jinja2.TemplateError):
    """An error that the template itself raises."""


def _refuse(message: Any) -> None:
    raise _RefusedError(str(message))


@jinja2.pass_context
def _strftime_now(context: Context, form: str) -> str:
    now: datetime = context.parent[_STATE].now
    return now.strftime(form)


def _shown(value: Any) -> Any:
    """Return a value that is converted to text, after a check of its size."""
    check_time()
    if not isinstance(value, str):
        size_of(value)
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    by = len(indent) if isinstance(indent, str) else indent or 0
    for text in separators or ():
        check_size(len(text) * 100_000)
    size_of(value, by)
    # Jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(_shown(value)), str(_shown(old)), str(_shown(new))
    check_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(_shown(value))
    check_size(len(text) + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else width))
    return jinja2.filters.do_indent(text, width, first, blank)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its arguments and its result."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if name not in _ONE_BY_ONE:
            args = tuple(map(listed, args))
        check_numbers((*args, *kwargs.values()))
        if name == "sum" and any(isinstance(one, list | tuple) for one in (*args[1:], *kwargs.values())):
            raise TooMuch("expected sums of numbers")
        if name == "join":
            _, *given = args  # the first argument is Jinja's evaluation context
            check_join(str(_shown(given[1] if len(given) > 1 else kwargs.get("d", ""))), given[0])
        if name == "format":
            check_format(str(args[0]), (*args[1:], *kwargs.values()), PERCENTS)
        if name in ("string", "upper", "lower", "title", "capitalize", "center", "trim", "escape", "e", "forceescape"):
            size_of(args[0])
        made = function(*args, **kwargs)
        check_made(made)
        return made

    return guarded


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no names that begin with an underscore: {name!r:.80}")
