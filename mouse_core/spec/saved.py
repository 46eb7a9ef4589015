"""Specs from JSON and from the schemas of Arrow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mouse_core._base.checks import UNREADABLE, is_whole
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec.categories import Categorical, MultiCategorical, MultiOneHot, OneHot
from mouse_core.spec.choice import Choice
from mouse_core.spec.composite import Composite
from mouse_core.spec.domain import ARROW_KEY, VERSION, Domain
from mouse_core.spec.numbers import Binary, Bounded, Unbounded
from mouse_core.spec.objects import NonTensor
from mouse_core.spec.stacked import Stacked

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["from_arrow", "from_json"]

_LEAVES: dict[str, type[Any]] = {
    one.__name__: one
    for one in (Binary, Bounded, Unbounded, Categorical, MultiCategorical, OneHot, MultiOneHot, NonTensor)
}
# Where a file says more than anybody means, making room for it would be what fails.
_MOST_VALUES, _MOST_TEXT, _DEEPEST = 1 << 28, 64 << 20, 64


def from_json(said: Any) -> Any:
    """The spec that ``to_json`` wrote, from the object or its text.

    Raises:
        DataError: Something else, or what a newer version wrote.
    """
    if isinstance(said, str | bytes):
        try:
            said = json.loads(said) if len(said) <= _MOST_TEXT else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"spec: expected JSON, found {said!r:.80} ({error})") from error
    version: Any = said.get("version") if isinstance(said, Mapping) else None
    if not is_whole(version):
        raise DataError(f"spec: expected a JSON object with a version, found {said!r:.80}")
    if not 1 <= version <= VERSION:
        raise DataError(
            f"spec: expected version {VERSION} at most, found version {version}, which a newer mouse-data wrote"
        )
    return _made({name: value for name, value in said.items() if name != "version"}, 0)


def from_arrow(schema: pa.Schema | pa.Field) -> Any:
    """The spec that ``to_arrow`` wrote: of a schema a ``Composite``, of a field what it says.

    Columns of which nothing is said are left out.

    Raises:
        DataError: A schema or field that says nothing, something else, or what a newer version wrote.
    """
    import pyarrow as pa

    if isinstance(schema, pa.Schema):
        return _composite(schema, schema.metadata, schema.names)
    found = _from_field(schema)
    if found is None:
        raise DataError(f"spec: expected a field with {ARROW_KEY!r} in its metadata, found {schema}")
    return found


def _from_field(field: pa.Field) -> Any:
    text = (field.metadata or {}).get(ARROW_KEY.encode())
    if text is None:
        return None
    said = _object(text)
    if said.get("type") == "Composite" and "entries" not in said:
        children = [field.type.field(number) for number in range(field.type.num_fields)]
        return _composite(children, field.metadata, [child.name for child in children])
    return from_json(said)


def _composite(fields: Any, metadata: Any, names: list[str]) -> Composite:
    text = (metadata or {}).get(ARROW_KEY.encode())
    if text is None:
        raise DataError(f"spec: expected a schema with {ARROW_KEY!r} in its metadata, found the columns {names}")
    entries = {field.name: _from_field(field) for field in fields}
    whole: Composite = from_json({"entries": {}, **_object(text)})
    try:
        found = {name: one for name, one in entries.items() if one is not None}
        return dataclasses.replace(whole, entries=found)
    except ConfigError as error:
        raise DataError(f"spec: {error}") from error


def _object(text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"spec: expected JSON, found {text!r:.80} ({error})") from error
    if not isinstance(said, dict):
        raise DataError(f"spec: expected a JSON object, found {text!r:.80}")
    return said


def _made(said: Any, depth: int) -> Domain:
    if depth > _DEEPEST:
        raise DataError(f"spec: expected at most {_DEEPEST} specs one within another")
    if not isinstance(said, Mapping):
        raise DataError(f"spec: expected a JSON object, found {said!r:.80}")
    rest = dict(said)
    name = rest.pop("type", None)
    try:
        return _of(name, rest, depth)
    except DataError:
        raise
    except (ConfigError, *UNREADABLE) as error:
        raise DataError(f"spec: expected what {name} can be, found {said!r:.200} ({error})") from error


def _of(name: Any, said: dict[str, Any], depth: int) -> Domain:
    shape = said.get("shape")
    if isinstance(shape, list):
        _check_size(shape)
        said["shape"] = tuple(shape)
    if name == "Composite":
        entries = said.pop("entries")
        return Composite({one: _made(value, depth + 1) for one, value in entries.items()}, **said)
    if name == "Choice":
        return Choice([_made(one, depth + 1) for one in said.pop("choices")], **said)
    if name == "Stacked":
        return Stacked(tuple(_made(one, depth + 1) for one in said.pop("specs")), **said)
    kind = _LEAVES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DataError(f"spec: expected one of {[*_LEAVES, 'Choice', 'Composite', 'Stacked']}, found {name!r:.80}")
    for bound in ("low", "high"):
        if bound in said:
            said[bound] = _numbers(said[bound])
    if "mask" in said:  # which is spread over all choices of all places
        choices = np.max(np.asarray(said.get("n", said.get("nvec"))), initial=1)
        _check_size([*(shape or ()), int(choices)])
    made: Domain = kind(**said)
    return made


def _check_size(shape: list[Any]) -> None:
    values = 1
    for size in shape:
        values *= max(1, size)
    if values > _MOST_VALUES or len(shape) > 32:
        raise DataError(f"spec: expected a step of at most {_MOST_VALUES} values, found the shape {shape!r:.80}")


def _numbers(value: Any) -> Any:
    """Bounds whose infinities are texts."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, str) else value
