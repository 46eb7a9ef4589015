"""TensorStorage: rows of a replay buffer as tensors on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.replay._checks import check_max_size, check_ndim, check_put, slot_error
from mouse_core.replay._rows import RowSchema
from mouse_core.replay._state import rows_state, state_rows
from mouse_core.replay._trees import flatten, map_tree, unflatten
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.spec import Alignment, check_alignment
from mouse_torch.placement import check_device
from mouse_torch.transfer import torch_dtype


class TensorStorage:
    """Rows as nested dicts or tuples of tensors on a device, whose memory is allocated when the first row is written.

    Rows are written, gathered and transformed on the device; only indices travel. It is an ``ArrayStorage`` otherwise:
    the first write says which fields there are, and checkpoints of one are loaded by the other.

    Args:
        max_size: Rows it holds: with ``ndim=2`` all time steps of all environments together, a multiple of their
            number.
        ndim: 1, or 2 for ``[time, env]``, where every environment is a stream of its own.
        device: Where rows lie.
        alignment: Which transition a row's action, reward and done belong to.

    Raises:
        ConfigError: An argument out of range, or a device that is not there.
    """

    def __init__(
        self,
        max_size: int,
        ndim: int = 1,
        *,
        device: str | torch.device = "cpu",
        alignment: Alignment = "outgoing",
    ) -> None:
        self._capacity = check_max_size(max_size)
        self._ndim = check_ndim(ndim)
        self._device = torch.empty(0, device=check_device(device)).device  # with its number
        self._alignment = check_alignment(alignment)
        self._schema: RowSchema | None = None
        self._columns: dict[FieldKey, torch.Tensor] = {}
        self._written = self._size = self._changes = 0

    def __repr__(self) -> str:
        size = f"{self._size} of {self._capacity} rows, ndim={self._ndim}"
        return f"TensorStorage({size}, device={str(self._device)!r}, fields={self.keys})"

    def __len__(self) -> int:
        return self._size

    @property
    def device(self) -> torch.device:
        """Where rows lie."""
        return self._device

    @property
    def capacity(self) -> int:
        """How many rows it can hold."""
        return self._capacity

    @property
    def ndim(self) -> int:
        """1, or 2 for ``[time, env]``."""
        return self._ndim

    @property
    def num_envs(self) -> int:
        """Environments side by side; 1 for ``ndim=1``, and until the first write."""
        return 1 if self._schema is None else self._schema.num_envs

    @property
    def alignment(self) -> Alignment:
        """Which transition a row's action, reward and done belong to."""
        return self._alignment

    @property
    def writable(self) -> bool:
        """Rows may be written."""
        return True

    @property
    def written(self) -> int:
        """How many rows were ever appended."""
        return self._written

    @property
    def changes(self) -> int:
        """How often rows were changed otherwise than by ``append``."""
        return self._changes

    @property
    def keys(self) -> list[FieldKey]:
        """The names of the fields; none before the first write."""
        return list(self._columns)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for all rows, used or not."""
        return sum(column.nbytes for column in self._columns.values())

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Write rows behind the last, over the oldest where there is no room; see ``Storage.append``."""
        tensors, n = self._checked(rows, self._ndim - 1 if one else self._ndim)
        first = self._written
        begin = max(0, n - self._capacity)
        while begin < n:
            slot = (first + begin) % self._capacity
            now = min(n - begin, self._capacity - slot)
            for key, column in self._columns.items():
                column[slot : slot + now] = tensors[key][begin : begin + now]
            begin += now
        self._written = first + n
        self._size = min(self._size + n, self._capacity)
        return first, n

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` by ``rows``; see ``Storage.put``."""
        if self._schema is None:
            raise IndexError("storage: expected slots in use, found an empty storage")
        tensors, n = self._checked(rows, 1)
        check_put(slots, n)
        places = self._places(slots)
        for key, column in self._columns.items():
            column[places] = tensors[key]
        self._changes += 1

    def empty(self) -> None:
        """Forget all rows."""
        self._written = self._size = 0
        self._changes += 1

    def _checked(self, rows: Any, lead: int) -> tuple[dict[FieldKey, torch.Tensor], int]:
        """The leaves as tensors ``[n, *shape]`` on the device, checked before anything is changed."""
        if isinstance(rows, list):
            rows = _stacked(rows)
        # Dtypes and shapes are checked without looking at values, which may be on a device.
        shown = map_tree(_outline, rows)
        schema = self._schema or RowSchema.of(shown, lead, self._ndim)
        arrays, n = schema.check(shown, lead, self._ndim)
        if self._schema is None and self._capacity % schema.num_envs:
            raise ConfigError(
                f"max_size: expected a multiple of the {schema.num_envs} environments, found {self._capacity}"
            )
        leaves = flatten(rows)
        tensors = {}
        for (key, kind), array in zip(schema.fields.items(), arrays, strict=True):
            leaf = leaves[key] if isinstance(leaves[key], torch.Tensor) else torch.from_numpy(array.copy())
            tensors[key] = leaf.detach().to(self._device).reshape(n, *kind.shape)
        if self._schema is None:
            self._allocate(schema)
        return tensors, n

    def _allocate(self, schema: RowSchema) -> None:
        columns = {
            key: torch.empty((self._capacity, *kind.shape), dtype=torch_dtype(kind.dtype), device=self._device)
            for key, kind in schema.fields.items()
        }
        self._schema, self._columns = schema, columns

    # ------------------------------------------------------------------ reading

    def get(self, slots: Slots) -> Any:
        """The rows in ``slots`` as tensors in fresh memory on the device; see ``Storage.get``."""
        if self._schema is None or (slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self._size):
            raise slot_error(slots, self._size)
        places = self._places(slots)
        return unflatten(self._schema.structure, {key: column[places] for key, column in self._columns.items()})

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """One field of the rows in ``slots`` as a NumPy array on the host; see ``Storage.read``."""
        name = key if key in self._columns else (key,) if isinstance(key, str) else key
        column = self._columns.get(name)
        if column is None:
            raise MissingFieldError(f"rows: expected a field {key!r}, found {self.keys}")
        found: npt.NDArray[Any] = column[slots if isinstance(slots, slice) else self._places(slots)].cpu().numpy()
        return found

    def lock(self) -> None:
        """Nobody else writes here."""
        return None

    def _places(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(slots)).to(self._device)

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The rows on the host, as long as the data, and what describes them."""
        return rows_state(self, self._schema, [column[: self._size].cpu().numpy() for column in self._columns.values()])

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what ``state`` was taken from; see ``Storage.load``."""
        schema, arrays, written = state_rows(self, state, self._schema)
        if schema is not None:
            if self._schema is None:
                self._allocate(schema)
            for column, array in zip(self._columns.values(), arrays, strict=True):
                column[: len(array)] = torch.from_numpy(np.array(array)).to(self._device)
        self._size = len(arrays[0]) if arrays else 0
        self._written = written
        self._changes += 1


def _outline(leaf: Any) -> Any:
    """An array of the same dtype and shape, without memory for its values; what is no tensor stays."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    try:
        dtype = torch.empty(0, dtype=leaf.dtype).numpy().dtype
    except TypeError as error:
        raise SchemaError(f"rows: expected a dtype that NumPy has, found {leaf.dtype}") from error
    return np.broadcast_to(np.empty((), dtype), tuple(leaf.shape))


def _stacked(items: list[Any]) -> Any:
    """Rows of a list as one tree, with the items along a new first axis."""
    if not items:
        raise SchemaError("rows: expected at least one item in the list, found none")
    columns = [flatten(item) for item in items]
    for number, leaves in enumerate(columns):
        if leaves.keys() != columns[0].keys():
            raise SchemaError(
                f"rows: expected the fields {list(columns[0])} as in the first item, found {list(leaves)} in item "
                f"{number}"
            )
    stacked: dict[FieldKey, Any] = {}
    for key in columns[0]:
        parts = [column[key] for column in columns]
        try:
            stacked[key] = torch.stack(parts) if isinstance(parts[0], torch.Tensor) else np.stack(parts)
        except (RuntimeError, ValueError, TypeError) as error:
            raise SchemaError(f"rows: field {key!r}: expected items of one shape and dtype, found {error}") from error
    shape = iter(stacked.values())
    return map_tree(lambda _: next(shape), items[0])


__all__ = ["TensorStorage"]
