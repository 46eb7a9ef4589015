"""Pad, which makes arrays of one shape of rows that differ in length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mouse_core.dtypes import convert
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.nested import find, flatten, is_varying, object_array, path_of
from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.transforms._fields import check_keys, find_any, replaced
from mouse_core.spec import check_count


@dataclass(frozen=True, init=False)
class Pad:
    """Fills ragged fields up to one length, and says in ``<name>_mask`` what was there.

    A field of arrays ``[length, ...]`` becomes one array ``[batch, L, ...]``, and its mask, bool ``[batch, L]``, stands
    beside it. So a batch is arrays alone, as ``jax.jit`` and most models need it. Text has to become numbers first.

    Args:
        keys: Names of fields; none: all that are ragged.
        length: L; None: that of the longest row of the batch, so that batches differ in shape.
        value: What rows are filled up with.
        side: At which end: "right" behind what is there, "left" before it, as for generation.
        truncate: Whether what is beyond ``length`` is left out, at the end that is filled up; else it is an error.

    Raises:
        ConfigError: An argument out of range.
        MissingFieldError: Called with a batch that lacks a field.
        SchemaError: A field of text, or of arrays that differ in more than their length.
        DataError: A row that is longer than ``length``, or a value that the dtype does not hold.
    """

    keys: tuple[FieldKey, ...]
    length: int | None
    value: float
    side: Literal["left", "right"]
    truncate: bool

    def __init__(
        self,
        *keys: FieldKey,
        length: int | None = None,
        value: float = 0,
        side: Literal["left", "right"] = "right",
        truncate: bool = False,
    ) -> None:
        if length is not None:
            check_count("Pad: length", length)
        if side not in ("left", "right"):
            raise ConfigError(f"Pad: expected the side 'left' or 'right', found {side!r}")
        vars(self).update(keys=check_keys(keys, where="Pad"), length=length, value=value, side=side, truncate=truncate)

    def __call__(self, batch: Any) -> Any:
        """The batch with arrays of one shape, and their masks."""
        keys = self.keys or tuple(key for key, values in flatten(batch).items() if _is_ragged(values))
        index = find_any(batch, "index")
        lead = 1 if index is None else index.ndim
        for key in keys:
            path = path_of(key)
            if not isinstance(path[-1], str):
                raise ConfigError(f"Pad: expected a field with a name beside which its mask can stand, found {key!r}")
            values, mask = self._padded(find(batch, key, where="Pad"), key, lead)
            batch = replaced(batch, {path: values, (*path[:-1], f"{path[-1]}_mask"): mask})
        return batch

    def _padded(self, values: Any, key: FieldKey, lead: int) -> tuple[Any, Any]:
        if not is_varying(values):  # rows that are all of one length
            if getattr(values, "ndim", 0) <= lead:
                raise SchemaError(f"Pad: {key!r}: expected rows of arrays, found {values!r:.80}")
            values = object_array(list(values.reshape(-1, *values.shape[lead:])), tuple(values.shape[:lead]))
        rows = [self._cut(_array(row, key), key) for row in values.reshape(-1)]
        length = self.length or max((len(row) for row in rows), default=0)
        first = next((row for row in rows if len(row)), rows[0])
        filled = np.empty((len(rows), length, *first.shape[1:]), first.dtype)
        try:
            filled[...] = convert(np.array([self.value]), first.dtype)
        except ValueError as error:
            raise DataError(f"Pad: {key!r}: expected a value to fill up with: {error}") from error
        mask = np.zeros(filled.shape[:2], np.bool_)
        for place, row in enumerate(rows):
            if row.shape[1:] != first.shape[1:] or row.dtype != first.dtype:
                shapes = [f"{row.dtype} {list(row.shape)}" for row in (first, row)]
                raise SchemaError(f"Pad: {key!r}: expected rows that differ in length alone, found {shapes}")
            there = slice(length - len(row), None) if self.side == "left" else slice(len(row))
            filled[place, there], mask[place, there] = row, True
        return filled.reshape(*values.shape, *filled.shape[1:]), mask.reshape(*values.shape, length)

    def _cut(self, row: Any, key: FieldKey) -> Any:
        if self.length is None or len(row) <= self.length:
            return row
        if not self.truncate:
            raise DataError(f"Pad: {key!r}: expected rows of up to {self.length}, found one of {len(row)}")
        return row[-self.length :] if self.side == "left" else row[: self.length]


def _array(row: Any, key: FieldKey) -> Any:
    array = np.asarray(row)
    if array.dtype.kind in "OSU" or not array.ndim:
        raise SchemaError(f"Pad: {key!r}: expected rows of numbers, found {row!r:.60}; text must become numbers first")
    return array


def _is_ragged(values: Any) -> bool:
    return is_varying(values) and all(isinstance(row, np.ndarray) for row in values.reshape(-1))
