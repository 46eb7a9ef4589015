"""Modules that hold data in buffers, and the memory of rows with one buffer for each field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from mouse_core.dtypes import RowError, refuse_hidden
from mouse_core.errors import DataError, SchemaError
from mouse_core.nested import FieldKey, Leaf, flatten, lists_of, opened, structure_of, unflatten
from mouse_core.replay.device import Layout
from mouse_torch.transfer import from_numpy
from mouse_torch.trees import as_tree

Arrays = dict[str, npt.NDArray[Any]]
_LINE = 64


class BufferModule(torch.nn.Module):
    """A module with data in torch buffers. The data are moved between devices together with the parent module, but
    ``half()`` and similar methods do not change the dtypes of the data.

    Args:
        arrays: The torch buffers by name.
        persistent: Whether the module's ``state_dict`` includes the buffers.
    """

    def __init__(self, arrays: Mapping[str, torch.Tensor] | None = None, *, persistent: bool = True) -> None:
        super().__init__()
        # Buffers as NumPy arrays, by the addresses of their memory; they are kept, because creating an array takes
        # longer than looking it up.
        self._views: tuple[list[int], Arrays] = ([], {})
        for name, memory in (arrays or {}).items():
            self.register_buffer(name, memory, persistent=persistent)

    def arrays(self) -> Arrays:
        """Return the module's buffers on the host as NumPy arrays by name; bfloat16 buffers are returned as int16."""
        where = [0 if memory is None else memory.data_ptr() for memory in self._buffers.values()]
        if self._views[0] != where:
            buffers = self._buffers.items()
            arrays = {name: _array(memory) for name, memory in buffers if memory is not None and memory.is_cpu}
            self._views = where, arrays
        return self._views[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is copied or pickled; the NumPy views of the memory are left out."""
        return {**vars(self), "_views": ([], {})}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        self._views = [], {}  # the views would keep the memory alive
        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call, no-any-return]


def _array(memory: torch.Tensor) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = (memory.view(torch.int16) if memory.dtype == torch.bfloat16 else memory).numpy()
    return found


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros; on the host, the tensor's memory is allocated by NumPy.

    Linux uses large pages for memory that NumPy allocates, so reading random rows among 10 million rows causes few
    look-ups in page tables.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).reshape(shape)


# Dtypes that torch can scatter and gather. Values of other dtypes are stored as integers of the same size.
_HELD = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RowField:
    """The shape and dtype of a field in one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def held(self) -> torch.dtype:
        """The dtype of the field in memory."""
        return self.dtype if self.dtype in _HELD else _INTEGERS[self.dtype.itemsize]


def rows_of(example: Any) -> tuple[Any, dict[FieldKey, RowField]]:
    """Return the structure of an example, and the shape and dtype of each field.

    Raises:
        SchemaError: A field is not a tensor of numbers.
    """
    tree = opened(as_tree(example), 0)
    fields = {}
    for key, leaf in flatten(tree).items():
        values = _tensor(key, leaf)
        fields[key] = RowField(tuple(values.shape), values.dtype)
        try:
            values.detach().reshape(-1)[:1].view(fields[key].held)
        except (KeyError, RuntimeError, TypeError) as error:
            name = str(values.dtype).removeprefix("torch.")
            raise SchemaError(f"field {key!r}: expected a dtype of numbers, found {name}") from error
    return structure_of(tree), fields


class Fields(BufferModule):
    """The memory of all rows: a torch buffer ``[capacity, ...]`` for each field, whose name is the position of the
    field.

    Fields that torch cannot write row by row, such as uint16 and float8, are stored as integers of the same size.

    Args:
        structure: The nesting of rows.
        rows: The shape and dtype of each field.
        capacity: The number of rows.
        num_envs: The number of environments, or None for one stream.
        device: The device of the memory.
    """

    def __init__(
        self, structure: Any, rows: dict[FieldKey, RowField], capacity: int, num_envs: int | None, device: torch.device
    ) -> None:
        super().__init__()
        self.structure, self.rows, self._lists = structure, rows, lists_of(structure)
        self._envs = num_envs
        # Fields whose memory has another dtype than their rows; NumPy reads the memory of bfloat16 fields as int16.
        self._hidden = [key for key, row in rows.items() if row.held != row.dtype or row.dtype == torch.bfloat16]
        self.is_flat = isinstance(structure, dict) and all(isinstance(child, Leaf) for child in structure.values())
        for place, row in enumerate(rows.values()):
            self.register_buffer(str(place), zeros((capacity, *row.shape), row.held, device))

    def each(self) -> Iterator[tuple[FieldKey, Any]]:
        """Return the memory of each field by name, ``[capacity, ...]``."""
        # No generator: torch 2.14 cannot compile ``yield from`` on Python 3.12.
        return zip(self.rows, self._buffers.values(), strict=True)

    def taken(self, slots: Any) -> Any:
        """Return the rows in ``slots``, nested like rows, ``[*slots.shape, ...]``.

        If ``slots`` is a NumPy array, NumPy gathers the rows, which takes half the time of torch.
        """
        if isinstance(slots, np.ndarray):
            seen = zip(self.rows, self.arrays().values(), strict=True)
            found = {key: torch.from_numpy(array.take(slots, 0)) for key, array in seen}
        else:
            found = {key: memory[slots] for key, memory in self.each()}
        for key in self._hidden:
            found[key] = found[key].view(self.rows[key].dtype)
        return found if self.is_flat else unflatten(self.structure, found)

    def put(self, rows: Mapping[FieldKey, torch.Tensor], steps: torch.Tensor) -> None:
        """Write time steps, ``[n, (E), ...]`` in the dtypes of the memory, to the distinct positions ``steps``, int64
        ``[n]``.
        """
        for key, memory in self.each():
            if self._envs is not None:
                memory = memory.view(-1, self._envs, *memory.shape[1:])
            memory.index_copy_(0, steps, rows[key])

    def accepted(self, rows: Any, layout: Layout) -> tuple[dict[FieldKey, torch.Tensor], int]:
        """Return rows by field in the dtypes of the memory, ``[n, (E), ...]``, and the number of time steps.

        Raises:
            SchemaError: Fields, shapes or dtypes differ from the example.
            ConfigError: ``rows`` has more time steps than the capacity.
        """
        leaves = flatten(opened(as_tree(rows), 0, lists=self._lists))
        given = {key: _tensor(key, leaf) for key, leaf in leaves.items()}
        weak = {key for key, leaf in leaves.items() if not hasattr(leaf, "dtype")}
        lead = () if self._envs is None else (self._envs,)
        kinds = {key: ((*lead, *row.shape), row.dtype) for key, row in self.rows.items()}
        is_one, count = layout.check_rows("extend", given, kinds, weak, torch.can_cast)
        device, made = getattr(self, "0").device, {}
        for key, row in self.rows.items():
            values = _moved((given[key][None] if is_one else given[key]).detach().to(row.dtype), device)
            made[key] = values if row.held == row.dtype else values.contiguous().view(row.held)
        return made, count


def _moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values on a device, without waiting for a copy from the host.

    Host values are first copied to newly allocated pinned memory, which torch's allocator reuses after the copy to the
    device. A direct copy from pageable memory would wait for all queued work of the device. If the values are already
    in pinned memory, the program could overwrite the values before the copy runs.
    """
    if device.type == "cuda" and values.device.type == "cpu" and not torch.compiler.is_compiling():
        values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    return values.to(device, non_blocking=True)


def _tensor(key: FieldKey, leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    try:
        refuse_hidden(leaf)
    except RowError as error:
        raise DataError(f"field {key!r}: {error}") from error
    try:
        if isinstance(leaf, np.ndarray | np.generic):
            array = np.asarray(leaf)
            return from_numpy(array if array.flags.writeable else array.copy())
        return torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"field {key!r}: expected a tensor of numbers, found {leaf!r:.60}") from error
