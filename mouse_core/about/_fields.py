"""Fields as JSON, and the object that says them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Set
from typing import Any

import numpy as np

from mouse_core._base.checks import is_text, is_whole
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import DIMS, Field, check_alignment

# What a dataset may say that a step of a field, or an image, holds: so much is made room for in every batch.
_MOST_VALUES, _MOST_IMAGE_VALUES = 1 << 24, 1 << 28
_MOST_TEXT = 64 << 20
# What decodes is for whoever reads to say.
_DECODER = "decoder"


def field_to_json(item: Field) -> dict[str, Any]:
    """The attributes that are not the default."""
    said: dict[str, Any] = {}
    for attribute in dataclasses.fields(item):
        if attribute.name == _DECODER:
            continue
        value = getattr(item, attribute.name)
        if value == attribute.default and type(value) is type(attribute.default):
            continue
        said[attribute.name] = [_plain(one) for one in value] if isinstance(value, tuple) else _plain(value)
    return said


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, np.dtype):
        return value.name
    value = value.item() if isinstance(value, np.generic) else value
    # JSON has no sign for these.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def field_from_json(said: Any) -> Field:
    """What ``field_to_json`` gave.

    Raises:
        DataError: Attributes that no field has, or a step of more values than anybody means.
        ConfigError, ValueError, TypeError: Values that a field cannot have.
    """
    known = {attribute.name for attribute in dataclasses.fields(Field)} - {_DECODER}
    if not isinstance(said, dict) or not said.keys() <= known:
        raise DataError(f"fields: expected attributes of a field, {sorted(known)}, found {said!r:.200}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    for name in ("fill", "pad"):
        values |= {name: _number(values[name])} if name in values else {}
    if isinstance(values.get("bounds"), tuple):
        values["bounds"] = tuple(map(_number, values["bounds"]))
    item = Field(**values)
    check_width(
        item.name, math.prod(item.shape or (item.dim or 1,)), _MOST_IMAGE_VALUES if item.image else _MOST_VALUES
    )
    return item


def check_width(name: str, found: Any, most: int = _MOST_VALUES) -> None:
    """Raise DataError where a dataset says that steps of a field are wider than ``most``."""
    if is_whole(found) and found > most:
        raise DataError(f"{name}: expected at most {most} values a step, found {found}")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def said_in(text: str, names: Set[str], newest: int, *, where: str) -> dict[str, Any]:
    """What a JSON object says, by name, if it says its version.

    Args:
        text: The object.
        names: What the newest version that is known can say.
        newest: That version.
        where: What to call its place in messages.

    Raises:
        DataError: Something else.
    """
    try:
        said: Any = json.loads(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON, found {text!r:.80} ({error})") from error
    said = said if isinstance(said, dict) else {}
    version = said.pop("version", None)
    if not is_whole(version):
        raise DataError(f"{where}: expected a JSON object with a version, found {text!r:.80}")
    if version > newest:
        raise DataError(
            f"{where}: expected version {newest} at most, found version {version}, which a newer mouse-data wrote"
        )
    unknown = sorted(said.keys() - names)
    if unknown:
        raise DataError(f"{where}: expected what version {version} can say, found also {unknown}")
    return dict(said)


def check_words(about: Any) -> None:
    """Raise ConfigError unless what an ``About`` is given of alignment, names, tasks, fields and widths are such."""
    if about.alignment is not None:
        check_alignment(about.alignment)
    for name in ("environments", "robots"):
        names = getattr(about, name)
        if isinstance(names, str) or not all(is_text(one) for one in names):
            raise ConfigError(f"{name}: expected names of {name}, found {names!r:.200}")
    rates = about.frames_per_second
    listed = isinstance(rates, Iterable) and not isinstance(rates, str)
    if not listed or not all(isinstance(one, int | float) and 0 < one < math.inf for one in rates):
        raise ConfigError(f"frames_per_second: expected a list of positive numbers, found {rates!r:.200}")
    if not all(is_text(one) for pair in dict(about.keys).items() for one in pair):
        raise ConfigError(f"keys: expected names by column, found {about.keys!r:.200}")
    if not all(is_whole(number) and is_text(text) for number, text in dict(about.tasks).items()):
        raise ConfigError(f"tasks: expected texts by whole numbers, found {about.tasks!r:.200}")
    for item in about.fields:
        if not isinstance(item, Field):
            raise ConfigError(f"fields: expected mouse_core.Field objects, found {item!r:.200}")
    for name in DIMS:
        dim = getattr(about, name)
        if dim is not None and (not is_whole(dim) or dim < 1):
            raise ConfigError(f"{name}: expected a positive integer, found {dim!r:.200}")
