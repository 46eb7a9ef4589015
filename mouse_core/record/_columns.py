"""Columns for the observations and actions of an environment: their names, and the conversion of values.

Names are those that the readers of formats give (``formats.columns.named``), so that what is recorded here and what is
read from Minari or RLDS are the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from mouse_core.dtypes import convert, refuse_hidden
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import Field, check_choice

Row = dict[str, Any]

IMAGES = ("raw", "png")
OTHER = "_values"
"""Behind the name of a part that would be a standard column's, and is of another kind."""


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether it is the shape of a picture: ``[H, W]``, or ``[H, W, C]`` with C up to 4."""
    return len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4)


@dataclass(frozen=True)
class ValuePart:
    """A part of an observation or an action that is one value: a number, an array, a text.

    Args:
        keys: What leads to it, from the outside in; none where the whole is one value.
        kind: "whole" for a whole number, "text", or "array" for numbers of any shape.
        shape: Of an array.
        dtype: Of an array or number.
        choices: How many whole numbers there are from 0, where that is known.
    """

    keys: tuple[Any, ...]
    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    choices: int | None = None

    @property
    def is_image(self) -> bool:
        """Whether it looks like a picture: uint8 ``[H, W]``, or ``[H, W, C]`` with C up to 4."""
        return self.kind == "array" and self.dtype == np.uint8 and is_picture(self.shape)

    def suits(self, column: str) -> bool:
        """Whether it is what the standard field of a column reads, if there is one: a picture, a whole number."""
        shape, is_whole = self.shape, self.dtype is not None and self.dtype.kind in "iu"
        if column == "observation_image":
            return self.kind == "array" and is_whole and is_picture(shape)
        if column == "observation_missing":  # which marks rows that lack an observation
            return False
        return column != "observation_discrete" or self.kind == "whole" or (is_whole and shape in ((), (1,)))

    def pick(self, value: Any) -> Any:
        """This part of a whole observation or action."""
        for key in self.keys:
            value = value[key]
        return value


@dataclass(frozen=True)
class Column:
    """A part as a column.

    Args:
        name: The column's name.
        part: The part.
        convert: Makes of a value what a row holds; always a copy, for environments use their arrays again.
    """

    name: str
    part: ValuePart
    convert: Callable[[Any], Any]


def observation_columns(parts: list[ValuePart], images: str, *, declared: bool = False) -> list[Column]:
    """Columns of observations, as ``formats.columns.named.named_observation`` calls them.

    Args:
        parts: The parts of an observation.
        images: "raw" or "png".
        declared: Whether arrays are kept in the dtype that their space says, rather than the one that they come in.
    """
    check_choice("images", images, IMAGES)
    columns = []
    for part in parts:
        whole = {"whole": "observation_discrete", "text": "observation_text"}.get(part.kind, "observation")
        name = "_".join(map(str, ("observation", *part.keys))) if part.keys else whole
        if part.keys and not part.suits(name):
            name += OTHER
        if part.is_image:
            name = name if part.keys else "observation_image"
            convert: Callable[[Any], Any] = _as_png if images == "png" else _as_pixels
        else:
            convert = _copying(part, part.dtype if declared else None)
        columns.append(Column(name, part, convert))
    return _distinct(columns)


def action_columns(parts: list[ValuePart]) -> list[Column]:
    """Columns of actions, as ``formats.columns.named.named_action`` calls them; in the dtypes that their space says."""
    columns = []
    for part in parts:
        name = "_".join(map(str, ("action", *part.keys)))
        columns.append(Column(name, part, _copying(part, part.dtype)))
    return _distinct(columns)


def _distinct(columns: list[Column]) -> list[Column]:
    names = [column.name for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name}: two parts of a step have this name once their keys are joined by '_'")
    return columns


def placeholder(columns: list[Column]) -> Row:
    """The action of a row that no action led to: zeros, or empty text."""
    row: Row = {}
    for column in columns:
        part = column.part
        empty = "" if part.kind == "text" else 0 if part.kind == "whole" else np.zeros(part.shape, part.dtype)
        row[column.name] = column.convert(empty)
    return row


def fields_of(observations: list[Column], actions: list[Column]) -> list[Field]:
    """Fields for columns that no standard field reads: parts of nested observations and actions.

    Where there is no column ``action``, the standard field is not required.
    """
    fields = [
        Field(column.name, image=column.part.is_image)
        for column in observations
        if column.part.keys and column.part.kind != "text"
    ]
    if not any(column.name == "action" for column in actions):
        fields.append(Field("action", dtype="int64", vector_dtype="float32", pad=0, max_ndim=1, transition=True))
        fields += [Field(column.name, transition=True) for column in actions if column.part.kind != "text"]
    return fields


def number_of_actions(actions: list[Column]) -> int | None:
    """Return the number of actions, if they are integers from 0; else None."""
    return actions[0].part.choices if len(actions) == 1 and actions[0].name == "action" else None


# ---------------------------------------------------------------------- values


def _whole(value: Any) -> int:
    return index(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)


def _as_pixels(value: Any) -> Any:
    refuse_hidden(value)
    return np.array(value)


def _as_png(value: Any) -> dict[str, Any]:
    from mouse_core.images import encode_png

    refuse_hidden(value)
    return {"bytes": encode_png(value), "path": None}


@dataclass(frozen=True)
class _ArrayOf:
    """Copies arrays, in a dtype (None: their own, but floats where their space has such) and a shape."""

    dtype: Any
    shape: tuple[int, ...]
    floats: Any = None

    def __call__(self, value: Any) -> Any:
        refuse_hidden(value)
        made = np.array(value)
        if self.dtype is not None:
            made = convert(made, np.dtype(self.dtype))
        elif self.floats is not None and made.dtype.kind in "biu":
            made = convert(made, self.floats)  # an environment that resets to zeros without a dtype
        return made if made.shape == self.shape else made.reshape(self.shape)


def _copying(part: ValuePart, dtype: Any) -> Callable[[Any], Any]:
    """Copies of a part's values: a whole number as Python's, an array that is all of an observation as a vector."""
    if part.kind != "array":
        return _whole if part.kind == "whole" else str
    shape = part.shape if part.keys else (int(np.prod(part.shape, dtype=np.int64)),)
    return _ArrayOf(dtype, shape, part.dtype if part.dtype is not None and part.dtype.kind == "f" else None)


def values_of(columns: list[Column], value: Any) -> Row:
    """A whole observation or action as columns.

    Raises:
        DataError: It is none.
    """
    row: Row = {}
    for column in columns:
        try:
            row[column.name] = column.convert(column.part.pick(value))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise _refused(column, value, error) from error
    return row


def values_at(columns: list[Column], values: Any, number: int) -> Row:
    """The observation or action of one of several environments as columns; ``values`` are stacked as gymnasium does.

    Raises:
        DataError: They are none.
    """
    row: Row = {}
    for column in columns:
        try:
            row[column.name] = column.convert(column.part.pick(values)[number])
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise _refused(column, values, error) from error
    return row


def _refused(column: Column, value: Any, error: Exception) -> DataError:
    found = f"{value!r:.80} ({error})"
    return DataError(f"column {column.name!r}: expected {_shown(column.part)}, found {found}")


def _shown(part: ValuePart) -> str:
    if part.kind == "array":
        return f"{part.dtype} {list(part.shape)}"
    return "a whole number" if part.kind == "whole" else "a text"


# ---------------------------------------------------------------------- gymnasium's spaces, dm_env's specs


def parts_of_space(space: Any, keys: tuple[Any, ...] = ()) -> Iterator[ValuePart]:
    """The parts of one of gymnasium's spaces.

    Raises:
        ConfigError: A space whose values have no fixed form, such as ``Sequence`` and ``Graph``.
    """
    kind = type(space).__name__
    if kind in ("Dict", "Tuple"):
        inside = space.spaces
        for key, part in inside.items() if kind == "Dict" else enumerate(inside):
            yield from parts_of_space(part, (*keys, key))
    elif kind == "Discrete":
        first = int(space.start)
        yield ValuePart(keys, "whole", (), np.dtype(np.int64), first + int(space.n) if first >= 0 else None)
    elif kind == "Text":
        yield ValuePart(keys, "text")
    elif kind in ("Box", "MultiDiscrete", "MultiBinary"):
        yield ValuePart(keys, "array", tuple(map(int, space.shape)), np.dtype(space.dtype))
    else:
        known = ["Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "Dict", "Tuple"]
        raise ConfigError(f"space{_at(keys)}: expected one of {known}, found {kind}; a wrapper can make it one")


def parts_of_spec(spec: Any, keys: tuple[Any, ...] = ()) -> Iterator[ValuePart]:
    """The parts of a spec of dm_env, nested in mappings, lists or tuples.

    Raises:
        ConfigError: Something else.
    """
    if isinstance(spec, Mapping | list | tuple):
        for key, part in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
            yield from parts_of_spec(part, (*keys, key))
    elif type(spec).__name__ == "StringArray":
        yield ValuePart(keys, "text")
    elif hasattr(spec, "shape") and hasattr(spec, "dtype"):
        shape, dtype = tuple(map(int, spec.shape)), np.dtype(spec.dtype)
        if not shape and dtype.kind in "iu":
            choices = getattr(spec, "num_values", None)
            yield ValuePart(keys, "whole", (), dtype, None if choices is None else int(choices))
        else:
            yield ValuePart(keys, "array", shape, dtype)
    else:
        raise ConfigError(f"spec{_at(keys)}: expected a dm_env.specs.Array, found {type(spec).__name__}")


def _at(keys: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in keys)
