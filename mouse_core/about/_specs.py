"""Which values columns may have, and what their dimensions are called, as a dataset says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from mouse_core._base.checks import is_text
from mouse_core.errors import ConfigError


def check_spec(given: Any) -> Any:
    """The specs of columns as a ``Composite``, None where there are none, or ConfigError."""
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    from mouse_core.spec import Composite, Stacked

    spec = given if isinstance(given, Composite) else Composite(given)
    nested = [name for name, one in spec.entries.items() if isinstance(one, Composite | Stacked)]
    if nested or spec.shape:
        what = f"{spec[nested[0]]!r:.80} of column {nested[0]!r}" if nested else f"the shape {spec.shape}"
        raise ConfigError(f"spec: expected the spec of an array for each column, found {what}")
    return spec.to(None)


def spec_from_json(said: Any) -> Any:
    """What ``to_json`` of a spec gave; DataError for anything else."""
    from mouse_core.spec import from_json

    return from_json(said)


def joined_specs(specs: Sequence[Any]) -> Any:
    """What several say together: of each column what all that speak of it say, or less where they differ.

    Where they differ, all numbers of the dtype and shape that they have in common are left, or any objects. Saying
    nothing would not last: what one of them says would stand for all as soon as it is said once more.
    """
    said = [spec for spec in specs if spec is not None]
    if not said or all(spec == said[0] for spec in said[1:]):
        return said[0] if said else None
    columns = dict.fromkeys(name for spec in said for name in spec.entries)
    found = {name: [spec[name] for spec in said if name in spec] for name in columns}
    return check_spec({name: _common(ones) for name, ones in found.items()})


def _common(specs: Sequence[Any]) -> Any:
    from mouse_core.spec import NonTensor, Unbounded

    first = specs[0]
    if all(one == first for one in specs):
        return first
    try:
        dtype = np.result_type(*(one.dtype for one in specs))
    except TypeError:  # of floats of 16 or 8 bits that have no dtype in common
        dtype = np.dtype("O")
    if dtype.kind == "O" or len({len(one.shape) for one in specs}) > 1:
        return NonTensor()
    sizes = zip(*(one.shape for one in specs), strict=True)
    return Unbounded(tuple(size[0] if len(set(size)) == 1 else -1 for size in sizes), dtype)


def check_dimensions(given: Any) -> Mapping[str, tuple[str, ...]]:
    """Names of dimensions by column, or ConfigError."""
    found = {}
    for column, names in dict(given if isinstance(given, Mapping) else {0: 0}).items():
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_text(column) or not is_list or not all(map(is_text, names)):
            raise ConfigError(f"dimensions: expected lists of names by column, found {given!r:.200}")
        found[column] = tuple(names)
    return MappingProxyType(found)


def joined_names(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The names that no two parts say differently."""
    found: dict[str, Any] = {}
    for names in said:
        found |= {column: some for column, some in names.items() if column not in found}
    return {column: some for column, some in found.items() if all(one.get(column, some) == some for one in said)}
