"""Shared checks of arguments and the texts of their errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, TypeGuard, TypeVar

import numpy as np

from mouse_core.errors import ConfigError, DataError, SchemaError, StateError

_T = TypeVar("_T")

UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RecursionError, SyntaxError, MemoryError),
)
"""Errors that can occur when reading a file that a user has possibly edited; for example, NumPy raises a SyntaxError
for the dtype ",".
"""


def values_of(count: int) -> str:
    """Return "1 value", "2 values" and so on."""
    return f"{count} value{'s' * (count != 1)}"


def is_whole(value: Any) -> bool:
    """Return whether ``value`` is an integer and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_text(name: Any) -> TypeGuard[str]:
    """Return whether ``name`` is a text that UTF-8 can encode; UTF-8 cannot encode a lone surrogate, ``"\\ud800"``."""
    if not isinstance(name, str):
        return False
    try:
        return name.isascii() or bool(name.encode())
    except UnicodeEncodeError:
        return False


def as_json(value: Any, own: Callable[[Any], Any] = lambda value: None) -> Any:
    """Return a value as JSON: NumPy's values as numbers and lists; NaN, infinities and dtypes as texts.

    Args:
        value: Plain values and values of NumPy, nested in mappings, lists and tuples.
        own: Function that returns the JSON of objects of other types, at any depth. For objects that ``as_json``
            converts, the function returns None.
    """
    converted = own(value)
    if converted is not None:
        return converted
    if isinstance(value, Mapping):
        return {str(key): as_json(item, own) for key, item in value.items()}
    if isinstance(value, np.dtype):
        return value.name
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, list | tuple):
        return [as_json(item, own) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_MOST_TEXT = 64 << 20


def without_version(content: Any, newest: int, label: str) -> dict[str, Any]:
    """Return a JSON object, or the object in a JSON text, without its entry "version".

    Raises:
        DataError: The content is not a JSON object, or has a version above ``newest``.
    """
    try:
        is_text = isinstance(content, str | bytes) and len(content) <= _MOST_TEXT
        found = json.loads(content) if is_text else content
    except (ValueError, RecursionError) as error:
        raise DataError(f"{label}: expected JSON, found {content!r:.80} ({error})") from error
    version: Any = found.get("version") if isinstance(found, Mapping) else None
    if not is_whole(version):
        raise DataError(f"{label}: expected a JSON object with a version, found {content!r:.80}")
    if not 1 <= version <= newest:
        wrote = ", which a newer mouse-data wrote" if version > newest else ""
        raise DataError(f"{label}: expected version {newest} at most, found version {version}{wrote}")
    return {name: value for name, value in found.items() if name != "version"}


def state_number(name: str, value: Any, *, where: str = "state") -> int:
    """Return a number of a saved state; raise StateError unless it is an integer of at least 0 and fits in 64 bits."""
    if not is_whole(value) or not 0 <= value < 1 << 64:
        raise StateError(f"{where}: expected {name} as an integer of at least 0, found {value!r:.80}")
    return int(value)


def part_of(state: Any, name: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of a state. The part must be a dict that contains all items of ``own``, with equal values.

    Raises:
        StateError: The part is missing, or belongs to another object.
    """
    part = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(part, Mapping):
        raise StateError(f"state: expected a dict {name!r}, found {part!r:.80}")
    for key, value in own.items():
        if part.get(key) != value:
            raise StateError(
                f"state: expected the {name} {key} {value!r}, as in this buffer, found {part.get(key)!r:.80}"
            )
    return part


def check_numbers(state: Any, own: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """Return the integers of a state under the keys ``names``. The state must contain all items of ``own``, with equal
    values.

    Raises:
        StateError: A value is not an integer, or the state belongs to another object.
    """
    part_of({"state": state}, "state", own)
    return {name: state_number(name, state.get(name)) for name in names}


def as_record(value: Any) -> dict[str, Any] | None:
    """Return the fields of a mapping (such as a TensorDict), a named tuple or a dataclass by name; otherwise None."""
    if type(value) is dict:
        return value
    if isinstance(value, Mapping):  # iteration over a TensorDict yields rows, not names
        return dict(value.items())
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, Any] = value._asdict()
        return named
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def row_of(value: Any) -> dict[str, Any]:
    """Return the columns of a row to append; raise DataError if ``value`` is not a row."""
    fields = as_record(value)
    if fields is not None:
        return fields
    if type(value).__name__ == "DatasetStore":
        raise DataError("append: expected a dict, found a DatasetStore; extend(other[:]) appends the rows of a store")
    raise DataError(f"append: expected a dict, found {value!r:.200}")


# Names of the standard fields' columns in other libraries; gymnasium's names first.
_ELSEWHERE = {
    "action": ("actions", "act", "acts"),
    "reward": ("rewards", "rew", "rews"),
    "done": ("dones", "terminal", "terminals"),
    "observation": ("obs", "observations", "state", "states"),
    "episode_step": ("step", "steps", "timestep", "timesteps"),
}
_NEXT = ("next_obs", "next_observation", "next_observations", "next_state")


def recipe(found: Iterable[object], columns: Iterable[str] = _ELSEWHERE) -> str:
    """Return a text that explains how to convert rows with these column names to rows of a store; "" if none of the
    names is known.

    Args:
        found: Names of the existing columns.
        columns: Names of the requested columns.
    """
    names = {name for name in found if isinstance(name, str)}
    asked = set(columns) - names
    ended = sorted(names & {"terminated", "truncated", "terminations", "truncations"})
    made = f"'done' is 1 if terminated else 2 if truncated else 0 (from {', '.join(ended)})"
    if "done" not in asked or not ended:
        made = ""
    said = []
    for column, others in _ELSEWHERE.items():
        other = next((name for name in others if name in names), None)
        if column in asked and other is not None and not (made and column == "done"):
            said.append(f"rename {other!r} to {column!r}")
    if made:
        said.append(made)
    if said and names & {*_NEXT}:
        said.append(
            f"{min(names & {*_NEXT})!r} is the observation of the next row, so leave it out, with "
            "alignment='outgoing', and append one more row with the final observation of each episode"
        )
    return "; ".join(said)


def columns_of(given: Any) -> tuple[Mapping[str, Any], int]:
    """Return the columns in the argument of ``extend`` by name, and the number of rows; raise DataError or SchemaError
    for an invalid argument.
    """
    columns = _by_column(given) if isinstance(given, list) else as_record(given)
    for name, values in (columns or {}).items():
        if isinstance(values, str | bytes | bytearray | Set):  # texts are one value, and sets have no order
            raise DataError(
                f"extend: column {name!r}: expected an array or sequence with one value per row, found {values!r:.80}"
            )
        if isinstance(values, Mapping):
            parts = ", ".join(repr(f"{name}_{key}") for key in [*values][:3])
            raise DataError(
                f"extend: column {name!r}: expected an array or sequence with one value per row, found a dict of "
                f"{[*values][:8]}; pass each part as a column, such as {parts}, or pass a list of dicts, one per row"
            )
    try:
        if columns is None:
            raise TypeError
        lengths = {name: len(values) for name, values in columns.items()}
    except TypeError as error:
        raise DataError(f"extend: expected a dict of arrays or sequences, found {given!r:.200}") from error
    if len(set(lengths.values())) > 1:
        raise DataError(f"extend: expected columns of equal length, found {lengths}")
    return columns, next(iter(lengths.values()), 0)


def _by_column(rows: list[Any]) -> dict[str, list[Any]]:
    """Convert a list of rows to columns."""
    records: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        record = as_record(row)
        if record is None:
            raise DataError(f"extend: expected a list of dicts, found {row!r:.200} at row {number}")
        records.append(dict(record))
        if record.keys() != records[0].keys():
            raise SchemaError(
                f"extend: expected rows with the columns {list(records[0])}, found {list(record)} at row {number}"
            )
    return {name: [record[name] for record in records] for name in (records[0] if records else ())}


def check_count(where: str, value: Any, lowest: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``lowest``; raise ConfigError otherwise."""
    if not is_whole(value) or value < lowest:
        raise ConfigError(f"{where}: expected an integer of at least {lowest}, found {value!r}")
    return int(value)


def check_choice(where: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    listed = list(choices)
    if value not in listed:
        raise ConfigError(f"{where}: expected one of {listed}, found {value!r:.80}")


def check_number(where: str, value: Any, *, above: bool = False) -> float:
    """Return ``value`` as a float if it is a finite number of at least 0 (if ``above`` is set: larger than 0); raise
    ConfigError otherwise."""
    is_one = not isinstance(value, bool) and isinstance(value, int | float | np.number)
    if not is_one or not 0 <= value < math.inf or (above and not value):
        raise ConfigError(f"{where}: expected a number {'above 0' if above else 'of 0 or more'}, found {value!r:.80}")
    return float(value)


def check_unit(where: str, value: Any) -> float:
    """Return ``value`` as a float if it is a number from 0 to 1; raise ConfigError otherwise."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise ConfigError(f"{where}: expected a number from 0 to 1, found {value!r}")
    return number


def check_seconds(where: str, value: Any) -> float:
    """Return ``value`` as a float if it is a number of at least 0; raise ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{where}: expected a number of seconds, 0 or more, found {value!r:.80}")
    return float(value)


def check_list(option: str, names: Iterable[_T]) -> tuple[_T, ...]:
    """Return an option's list as a tuple; raise ConfigError for a single text, because a text would be split into
    letters."""
    if isinstance(names, str | bytes):
        raise ConfigError(f"{option}: expected a list of names, found {names!r}; write [{names!r}]")
    try:
        return tuple(names)
    except TypeError as error:
        raise ConfigError(f"{option}: expected a list of names, found {names!r}") from error
