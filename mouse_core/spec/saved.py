"""Read specs from JSON and from Arrow schemas."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mouse_core._base.checks import UNREADABLE, without_version
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec.categories import Categorical, MultiCategorical, MultiOneHot, OneHot
from mouse_core.spec.choice import Choice
from mouse_core.spec.composite import Composite, Stacked
from mouse_core.spec.domain import ARROW_KEY, VERSION, Domain
from mouse_core.spec.numbers import Binary, Bounded, Unbounded
from mouse_core.spec.objects import NonTensor

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["from_arrow", "from_json"]

_LEAVES: dict[str, type[Any]] = {
    one.__name__: one
    for one in (Binary, Bounded, Unbounded, Categorical, MultiCategorical, OneHot, MultiOneHot, NonTensor)
}
# Limits for untrusted files: an array for a huge stated shape would exhaust the memory.
_MOST_VALUES, _MOST_TEXT, _DEEPEST = 1 << 28, 64 << 20, 64


def from_json(content: Any) -> Any:
    """Return the spec that ``to_json`` wrote.

    Args:
        content: The JSON object, or its text.

    Raises:
        DataError: Content that ``to_json`` did not write, or a newer version of it.
    """
    return _spec(without_version(content, VERSION, "spec"), 0)


def from_arrow(schema: pa.Schema | pa.Field) -> Any:
    """Return the spec that ``to_arrow`` wrote: a ``Composite`` for a schema, the spec of the field for a field.

    Columns without a spec are left out.

    Raises:
        DataError: A schema or field without a spec, metadata that ``to_arrow`` did not write, or a newer version.
    """
    import pyarrow as pa

    if isinstance(schema, pa.Schema):
        return _composite(schema, schema.metadata, schema.names)
    spec = _from_field(schema)
    if spec is None:
        raise DataError(f"spec: expected a field with {ARROW_KEY!r} in its metadata, found {schema}")
    return spec


def _from_field(field: pa.Field) -> Any:
    text = (field.metadata or {}).get(ARROW_KEY.encode())
    if text is None:
        return None
    content = _object(text)
    if content.get("type") == "Composite" and "entries" not in content:
        children = [field.type.field(number) for number in range(field.type.num_fields)]
        return _composite(children, field.metadata, [child.name for child in children])
    return from_json(content)


def _composite(fields: Any, metadata: Any, names: list[str]) -> Composite:
    text = (metadata or {}).get(ARROW_KEY.encode())
    if text is None:
        raise DataError(f"spec: expected a schema with {ARROW_KEY!r} in its metadata, found the columns {names}")
    entries = {field.name: _from_field(field) for field in fields}
    whole: Composite = from_json({"entries": {}, **_object(text)})
    try:
        return dataclasses.replace(whole, entries={name: one for name, one in entries.items() if one is not None})
    except ConfigError as error:
        raise DataError(f"spec: {error}") from error


def _object(text: bytes) -> dict[str, Any]:
    content = _parsed(text)
    if not isinstance(content, dict):
        raise DataError(f"spec: expected a JSON object, found {text!r:.80}")
    return content


def _parsed(text: str | bytes) -> Any:
    """Return the content of a JSON text, None for one that is too long; raises DataError for another text."""
    try:
        return json.loads(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"spec: expected JSON, found {text!r:.80} ({error})") from error


def _spec(content: Any, depth: int) -> Domain:
    """Return the spec of a JSON object; ``depth`` is the number of specs around it."""
    if depth > _DEEPEST:
        raise DataError(f"spec: expected at most {_DEEPEST} specs one within another")
    if not isinstance(content, Mapping):
        raise DataError(f"spec: expected a JSON object, found {content!r:.80}")
    arguments = dict(content)
    name = arguments.pop("type", None)
    try:
        return _spec_of_type(name, arguments, depth)
    except DataError:
        raise
    except (ConfigError, *UNREADABLE) as error:
        raise DataError(f"spec: expected the arguments of {name}, found {content!r:.200} ({error})") from error


def _spec_of_type(name: Any, arguments: dict[str, Any], depth: int) -> Domain:
    shape = arguments.get("shape")
    if isinstance(shape, list):
        _check_size(shape)
        arguments["shape"] = tuple(shape)
    if name == "Composite":
        entries = arguments.pop("entries")
        return Composite({one: _spec(value, depth + 1) for one, value in entries.items()}, **arguments)
    if name == "Choice":
        return Choice([_spec(one, depth + 1) for one in arguments.pop("choices")], **arguments)
    if name == "Stacked":
        return Stacked(tuple(_spec(one, depth + 1) for one in arguments.pop("specs")), **arguments)
    kind = _LEAVES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DataError(f"spec: expected one of {[*_LEAVES, 'Choice', 'Composite', 'Stacked']}, found {name!r:.80}")
    for bound in ("low", "high"):
        if bound in arguments:
            arguments[bound] = _numbers(arguments[bound])
    if "mask" in arguments:  # the constructor spreads it over all codes of all places
        codes = np.max(np.asarray(arguments.get("n", arguments.get("nvec"))), initial=1)
        _check_size([*(shape or ()), int(codes)])
    spec: Domain = kind(**arguments)
    return spec


def _check_size(shape: list[Any]) -> None:
    values = 1
    for size in shape:
        values *= max(1, size)
    if values > _MOST_VALUES or len(shape) > 32:
        raise DataError(f"spec: expected a step of at most {_MOST_VALUES} values, found the shape {shape!r:.80}")


def _numbers(value: Any) -> Any:
    """Return bounds with infinities, which are texts in JSON, as floats."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, str) else value
