"""Read specs from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mouse_core._base.checks import UNREADABLE, without_version
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec.categories import Categorical, MultiCategorical, MultiOneHot, OneHot
from mouse_core.spec.choice import Choice
from mouse_core.spec.composite import Composite, Stacked
from mouse_core.spec.domain import VERSION, Domain
from mouse_core.spec.numbers import Binary, Bounded, Unbounded
from mouse_core.spec.objects import NonTensor

__all__ = ["from_json"]

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Binary, Bounded, Unbounded, Categorical, MultiCategorical, OneHot, MultiOneHot),
        *(NonTensor, Choice, Composite, Stacked),
    )
}
# Limits for untrusted files: an array for a huge stated shape would exhaust the memory.
_MOST_VALUES, _DEEPEST = 1 << 28, 64


def from_json(content: Any) -> Any:
    """Return the spec that ``to_json`` wrote.

    Args:
        content: The JSON object, or its text.

    Raises:
        DataError: Content that ``to_json`` did not write, or a newer version of it.
    """
    return _spec(without_version(content, VERSION, "spec"), 0)


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
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DataError(f"spec: expected one of {list(_KINDS)}, found {name!r:.80}")
    shape = arguments.get("shape")
    if isinstance(shape, list):
        _check_size(shape)
        arguments["shape"] = tuple(shape)
    if kind is Composite:
        arguments["entries"] = {key: _spec(value, depth + 1) for key, value in arguments["entries"].items()}
    for several in arguments.keys() & {"choices", "specs"}:
        arguments[several] = tuple(_spec(one, depth + 1) for one in arguments[several])
    for bound in arguments.keys() & {"low", "high"}:
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
