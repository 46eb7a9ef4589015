"""What a row looks like, and how its fields lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError, SchemaError
from mouse_core.replay._trees import (
    Structure,
    as_array,
    fit,
    flatten,
    structure_from_json,
    structure_of,
    structure_to_json,
)
from mouse_core.replay.protocols import FieldKey

# Fields up to this many bytes lie side by side in one row, so that reading a row touches one place. Larger ones lie
# by themselves, where they are copied once, not twice.
_SIDE_BY_SIDE = 1024


@dataclass(frozen=True)
class FieldType:
    """Dtype and shape of one field of a row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one row's values."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class RowSchema:
    """The fields of a row, and how they are nested.

    Args:
        structure: How they are nested.
        fields: Their dtypes and shapes by name.
        num_envs: Rows of one time step.
    """

    def __init__(self, structure: Structure, fields: Mapping[FieldKey, FieldType], num_envs: int = 1) -> None:
        self.structure = structure
        self.fields = dict(fields)
        self.num_envs = num_envs
        self.plain = isinstance(structure, dict) and all(isinstance(child, list) for child in structure.values())

    @classmethod
    def of(cls, rows: Any, lead: int, ndim: int) -> RowSchema:
        """The schema of the first rows written; the first ``lead`` axes of every leaf count rows.

        Raises:
            SchemaError: Leaves that are no arrays, or have fewer axes.
        """
        fields: dict[FieldKey, FieldType] = {}
        num_envs = 1
        for key, leaf in flatten(rows).items():
            array = as_array(leaf, where=_where(key))
            if array.ndim < lead:
                raise SchemaError(f"{_where(key)}: expected {_axes(lead, ndim)}, found the shape {array.shape}")
            if ndim == 2 and not fields:
                num_envs = array.shape[lead - 1]
            fields[key] = FieldType(array.dtype.newbyteorder("="), array.shape[lead:])
        if num_envs < 1:
            raise SchemaError("rows: expected at least one environment, found none")
        return cls(structure_of(rows), fields, num_envs)

    def check(self, rows: Any, lead: int, ndim: int) -> tuple[list[npt.NDArray[Any]], int]:
        """The leaves of ``rows`` as arrays ``[n, *shape]`` in the order of ``fields``, and ``n``.

        Raises:
            SchemaError: Another structure, dtype, shape, or number of environments than the first write's.
            DataError: Python numbers that the dtype does not hold; leaves of differing length.
        """
        leaves: Any = rows if self.plain and type(rows) is dict else flatten(rows)
        if leaves.keys() != self.fields.keys():
            raise SchemaError(f"rows: expected the fields {list(self.fields)} of the first write, found {list(leaves)}")
        arrays = []
        expected: tuple[int, ...] | None = None
        for key, kind in self.fields.items():
            array = leaves[key]
            if type(array) is not np.ndarray or array.dtype != kind.dtype:
                if isinstance(array, Mapping | tuple):
                    raise SchemaError(f"{_where(key)}: expected an array as in the first write, found {array!r:.60}")
                array = fit(array, kind.dtype, where=_where(key))
            shape = array.shape
            if shape[lead:] != kind.shape or len(shape) < lead:
                raise SchemaError(
                    f"{_where(key)}: expected the shape [{_axes(lead, ndim)}{', ' if lead else ''}"
                    f"{', '.join(map(str, kind.shape))}] of the first write, found {list(shape)}"
                )
            if expected is None:
                expected = shape[:lead]
                if ndim == 2 and lead and expected[-1] != self.num_envs:
                    raise SchemaError(f"{_where(key)}: expected {self.num_envs} environments, found {expected[-1]}")
            elif shape[:lead] != expected:
                raise DataError(
                    f"{_where(key)}: expected {list(expected)} rows as in {next(iter(self.fields))!r}, "
                    f"found {list(shape[:lead])}"
                )
            arrays.append(array if lead == 1 else array.reshape(-1, *kind.shape))
        return arrays, len(arrays[0])

    def to_json(self) -> dict[str, Any]:
        """The schema in plain values."""
        return {
            "structure": structure_to_json(self.structure),
            "num_envs": self.num_envs,
            "fields": [
                [key if isinstance(key, str) else list(key), kind.dtype.str, list(kind.shape)]
                for key, kind in self.fields.items()
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowSchema:
        """What ``to_json`` was called on; raises KeyError, TypeError or ValueError for anything else."""
        fields = {
            (name if isinstance(name, str) else tuple(name)): FieldType(np.dtype(dtype), tuple(shape))
            for name, dtype, shape in value["fields"]
        }
        return cls(structure_from_json(value["structure"]), fields, int(value["num_envs"]))

    def same_as(self, other: RowSchema) -> bool:
        """Whether rows of one are rows of the other."""
        return self.fields == other.fields and self.num_envs == other.num_envs


def _where(key: FieldKey) -> str:
    return f"rows: field {key!r}" if key != () else "rows"


def _axes(lead: int, ndim: int) -> str:
    return "" if not lead else "n" if ndim == 1 else "env" if lead == 1 else "time, env"
