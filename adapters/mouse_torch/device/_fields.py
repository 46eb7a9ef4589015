"""Rows of a replay on a device: the memory of each field, and what may be written there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.nested import FieldKey, flatten, map_tree, structure_of, unflatten
from mouse_core.replay import Slices
from mouse_torch.transfer import from_numpy
from mouse_torch.trees import as_tree


class Row(NamedTuple):
    """One field of a row: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def rows_of(example: Any) -> tuple[Any, dict[FieldKey, Row]]:
    """The structure of an example, and each of its fields.

    Raises:
        SchemaError: A field that is no tensor of numbers.
    """
    tree = as_tree(example)
    fields = {}
    for key, leaf in flatten(tree).items():
        values = _tensor(key, leaf)
        fields[key] = Row(tuple(values.shape), values.dtype)
    return structure_of(tree), fields


def check_pad(fields: Mapping[FieldKey, Row], slices: Slices | None) -> None:
    """Refuse a pad that a field cannot hold."""
    if slices is None or isinstance(slices.pad, bool):
        return
    for key, row in fields.items():
        if row.dtype.is_floating_point or row.dtype.is_complex:
            continue
        held = torch.tensor(slices.pad).to(row.dtype)
        if held != slices.pad:
            raise ConfigError(
                f"pad: expected a number that {_name(row.dtype)} holds, as in field {key!r}, found {slices.pad}"
            )


def is_integer(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of integers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def filled(rows: Any, mask: torch.Tensor, pad: float) -> Any:
    """Rows of slices, with a number where the mask is False."""

    def changed(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.masked_fill(~mask.reshape(*mask.shape, *[1] * (leaf.ndim - 2)), pad)

    return map_tree(changed, rows)


class Fields(torch.nn.Module):
    """The memory of all rows, a buffer ``[capacity, ...]`` for each field, by its place among them.

    Args:
        structure: How rows are nested.
        rows: Each field of one.
        capacity: How many rows there are.
        num_envs: Environments side by side, or None.
        device: Where they lie.
    """

    def __init__(
        self, structure: Any, rows: dict[FieldKey, Row], capacity: int, num_envs: int | None, device: torch.device
    ) -> None:
        super().__init__()
        self._structure, self._rows = structure, rows
        self._capacity, self._envs = capacity, num_envs
        self.is_flat = isinstance(structure, dict) and all(isinstance(key, str) for key in rows)
        for place, row in enumerate(rows.values()):
            self.register_buffer(str(place), torch.zeros((capacity, *row.shape), dtype=row.dtype, device=device))

    def each(self) -> Iterator[tuple[FieldKey, Any]]:
        """Every field by its name, ``[capacity, ...]``."""
        yield from zip(self._rows, self._buffers.values(), strict=True)

    def field(self, key: FieldKey) -> torch.Tensor:
        """One of them."""
        found: torch.Tensor = dict(self.each())[key]
        return found

    def taken(self, slots: torch.Tensor) -> Any:
        """The rows in some slots, nested, ``[*slots, ...]``."""
        flat = slots.reshape(-1)
        found = {key: memory.index_select(0, flat) for key, memory in self.each()}
        if slots.ndim > 1:
            found = {key: values.reshape(*slots.shape, *values.shape[1:]) for key, values in found.items()}
        return self.nested(found)

    def nested(self, fields: Mapping[FieldKey, Any]) -> Any:
        """Fields by name as rows are nested."""
        return dict(fields) if self.is_flat else unflatten(self._structure, fields)

    def put(self, rows: Mapping[FieldKey, torch.Tensor], steps: torch.Tensor) -> None:
        """Write time steps, ``[n, (E), ...]``, each to a place of its own, int64 ``[n]``."""
        for key, memory in self.each():
            if self._envs is not None:
                memory = memory.view(-1, self._envs, *memory.shape[1:])
            memory.index_copy_(0, steps, rows[key])

    def accepted(self, rows: Any) -> tuple[dict[FieldKey, torch.Tensor], int]:
        """Rows by field, with an axis of time in front, and how many time steps they are.

        Raises:
            SchemaError: Other fields, shapes or dtypes than the example had.
            ConfigError: More time steps than there is room for.
        """
        tree = as_tree(rows)
        given = flatten(tree)
        if given.keys() != self._rows.keys():
            raise SchemaError(f"extend: expected rows with the fields {list(self._rows)}, found {list(given)}")
        made: dict[FieldKey, torch.Tensor] = {}
        counts: dict[FieldKey, tuple[bool, int]] = {}
        for key, row in self._rows.items():
            made[key], counts[key] = self._fitting(key, given[key], row)
        if len(set(counts.values())) > 1:
            found = {key: count for key, (_, count) in counts.items()}
            raise SchemaError(f"extend: expected as many rows in every field, found {found}")
        count, most = next(iter(counts.values()))[1], self._capacity // (self._envs or 1)
        if count > most:
            raise ConfigError(f"extend: expected at most {most} time steps at once, found {count}")
        return made, count

    def _fitting(self, key: FieldKey, leaf: Any, row: Row) -> tuple[torch.Tensor, tuple[bool, int]]:
        values = _tensor(key, leaf)
        one = row.shape if self._envs is None else (self._envs, *row.shape)
        if tuple(values.shape) == one:
            values, count = values[None], (True, 1)
        elif values.ndim == len(one) + 1 and tuple(values.shape[1:]) == one:
            count = (False, values.shape[0])
        else:
            what = "row" if self._envs is None else "time step"
            raise SchemaError(
                f"extend: field {key!r}: expected {[*one]} for one {what} or {[None, *one]} for some, found "
                f"{[*values.shape]}"
            )
        weak = not isinstance(leaf, torch.Tensor | np.ndarray | np.generic)
        if values.dtype != row.dtype and not (weak and torch.can_cast(values.dtype, row.dtype)):
            raise SchemaError(f"extend: field {key!r}: expected {_name(row.dtype)}, found {_name(values.dtype)}")
        # What comes from the host has no business waiting for the device.
        return values.detach().to(getattr(self, "0").device, row.dtype, non_blocking=True), count


def _tensor(key: FieldKey, leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    try:
        if isinstance(leaf, np.ndarray | np.generic):
            array = np.asarray(leaf)
            return from_numpy(array if array.flags.writeable else array.copy())
        return torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"field {key!r}: expected a tensor of numbers, found {leaf!r:.60}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
