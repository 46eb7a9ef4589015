"""TensorStorage: rows of a replay buffer as tensors on a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mouse_core.errors import MissingFieldError, SchemaError
from mouse_core.nested import (
    Leaf,
    flatten,
    is_node,
    is_varying,
    map_tree,
    object_array,
    opened,
    stack,
    stack_leaves,
    unflatten,
)
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.replay.storages import (
    ArrayStorage,
    RingStorage,
    RowSchema,
    check_put,
    is_all,
    rows_state,
    slot_error,
    state_rows,
)
from mouse_core.spec import Alignment
from mouse_torch.placement import check_device
from mouse_torch.transfer import from_numpy, to_numpy, torch_dtype
from mouse_torch.trees import on_host


class TensorStorage(RingStorage):
    """Stores rows that are nested dicts or tuples of tensors on a device; the first write allocates the memory.

    Rows are written, gathered and transformed on the device; only indices are copied. In all other respects, a
    ``TensorStorage`` behaves like an ``ArrayStorage``: the first write determines the fields, and each of the two
    storages loads checkpoints of the other.

    Args:
        capacity: The largest number of rows. With ``ndim=2``, ``capacity`` counts the rows of all environments, and is
            rounded down to complete time steps.
        ndim: Number of leading axes: 1, or 2 for ``[time, env]``, where every environment is a separate stream.
        device: The device of the rows.
        alignment: "outgoing" (or None) if the action, reward and done of a row follow the row's observation, "arrived"
            if they led to the row's observation.
        ragged: Fields whose rows are arrays of different lengths; see ``ArrayStorage``. Ragged fields and texts are
            kept on the host.

    Raises:
        ConfigError: An argument is out of range, or the device does not exist.
    """

    def __init__(
        self,
        capacity: int,
        ndim: int = 1,
        *,
        device: str | torch.device = "cpu",
        alignment: Alignment | None = None,
        ragged: Iterable[FieldKey] = (),
    ) -> None:
        super().__init__(capacity, ndim, alignment, ragged)
        self._varying: ArrayStorage | None = None  # fields of differing length, by their position among these fields
        self._device = check_device(device)
        self._columns: dict[FieldKey, torch.Tensor] = {}

    def __repr__(self) -> str:
        size = f"{self._size} of {self.capacity} rows, ndim={self.ndim}"
        return f"TensorStorage({size}, device={str(self._device)!r}, fields={self.keys})"

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._device

    @property
    def nbytes(self) -> int:
        """The size in bytes of the memory for all slots, including unused slots."""
        varying = 0 if self._varying is None else self._varying.nbytes
        return varying + sum(column.nbytes for column in self._columns.values())

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Append rows; if the storage is full, the new rows overwrite the oldest rows. See ``Storage.append``."""
        tensors, varying, n = self._checked(rows, self.ndim - 1 if one else self.ndim)
        if self._varying is not None:
            self._varying.append(varying, one=one)
        for slot, begin, count in self._pieces(n):
            for key, column in self._columns.items():
                column[slot : slot + count] = tensors[key][begin : begin + count]
        return self._appended(n), n

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` with ``rows``; see ``Storage.put``."""
        if self._schema is None:
            raise slot_error(slots, 0)
        self._check_slots(slots)
        every = is_all(slots, self._size)
        more = self._schema.with_more(map_tree(_outline, self._whole(rows, 1)), 1) if every else None
        if more is not None and more.varying.keys() != self._schema.varying.keys():
            more = None  # fields of differing length are in a separate storage, which accepts no new fields
        tensors, varying, n = self._checked(rows, 1, 1, schema=more)
        check_put(slots, n)
        if more is not None:  # all stored rows get the new fields, and later rows must have them
            self._columns |= self._empty({key: more.fields[key] for key in more.fields.keys() - self._columns.keys()})
            self._schema = more
        if self._varying is not None:
            self._varying.put(slots, varying)
        places = self._places(slots)
        for key, column in self._columns.items():
            column[places] = tensors[key]
        self.changes += 1

    def check(self, rows: Any) -> None:
        """Raise the errors of ``append(rows)``, and write nothing."""
        self._checked(rows, self.ndim, allocate=False)

    def empty(self) -> None:
        """Remove all rows."""
        super().empty()
        if self._varying is not None:
            self._varying.empty()

    def _checked(
        self, rows: Any, lead: int, ndim: int | None = None, *, allocate: bool = True, schema: RowSchema | None = None
    ) -> tuple[dict[FieldKey, torch.Tensor], dict[str, Any], int]:
        """Return three values: the leaves of fixed shape as tensors ``[n, *shape]`` on the device, the unchanged ragged
        leaves, and ``n``.

        All checks run before any memory changes.
        """
        rows = self._whole(rows, lead, one=ndim is None and lead < self.ndim)
        # Dtypes and shapes are checked without reading values, which may be on a device.
        shown = map_tree(_outline, rows)
        schema = schema or self._schema or RowSchema.of(shown, lead, self.ndim, self._ragged)
        if schema.from_data:
            schema.take_nodes(shown)
        arrays, n = schema.check(shown, lead, self.ndim if ndim is None else ndim)
        if self._schema is None:
            schema.whole_steps(self.capacity)  # raises an error if no complete time step fits
        leaves = flatten(rows)
        tensors = {}
        for (key, kind), array in zip(schema.fields.items(), arrays, strict=True):
            if kind.varies:
                continue
            leaf = leaves[key] if isinstance(leaves[key], torch.Tensor) else from_numpy(array.copy())
            tensors[key] = leaf.detach().to(self._device).reshape(n, *kind.shape)
        if self._schema is None and allocate:
            self._begin(schema)
        return tensors, {str(place): leaves[key] for place, key in enumerate(schema.varying)}, n

    def _allocate(self, schema: RowSchema) -> None:
        self._schema, self._columns = schema, self._empty(schema.fields)
        if schema.varying:
            ragged = [str(place) for place, kind in enumerate(schema.varying.values()) if kind.varies == "ragged"]
            self._varying = ArrayStorage(self.capacity, self.ndim, alignment=self.alignment, ragged=ragged)

    def _empty(self, fields: Mapping[FieldKey, Any]) -> dict[FieldKey, torch.Tensor]:
        """Allocate memory for ``capacity`` rows of the fields with a fixed shape."""
        # A tensor that is created in inference mode can be written only in inference mode.
        with torch.inference_mode(False):
            return {
                key: torch.empty((self.capacity, *kind.shape), dtype=torch_dtype(kind.dtype), device=self._device)
                for key, kind in fields.items()
                if not kind.varies
            }

    def _whole(self, rows: Any, lead: int, *, one: bool = False) -> Any:
        """Return rows as one tree of dicts, lists and tuples, with ragged fields on the host; the first ``lead`` axes
        of each leaf are axes of rows.
        """
        lists = () if self._schema is None else self._schema.lists
        if isinstance(rows, list) and not one:
            rows = stack([opened(row, lead - 1, self.ragged, lists) for row in rows], _joined)
        else:
            rows = tuple(rows) if isinstance(rows, list) and is_node(rows) else rows
            rows = opened(rows, lead, self.ragged, lists)
        return _lists_on_host(rows, self.ragged)

    # ------------------------------------------------------------------ reading

    def get(self, slots: Slots) -> Any:
        """Return the rows in ``slots`` as tensors in new memory on the device; see ``Storage.get``."""
        if self._schema is None:
            raise slot_error(slots, 0)
        self._check_slots(slots)
        places = self._places(slots)
        fields: dict[FieldKey, Any] = {key: column[places] for key, column in self._columns.items()}
        if self._varying is not None:
            fields |= zip(self._schema.varying, self._varying.get(slots).values(), strict=True)
        return unflatten(self._schema.structure, fields)

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """Return one field of the rows in ``slots`` as a NumPy array on the host; see ``Storage.read``."""
        name = key if key in self.keys else (key,) if isinstance(key, str) else key
        column = self._columns.get(name)
        if column is None and self._schema is not None and self._varying is not None and name in self._schema.varying:
            return self._varying.read(str(list(self._schema.varying).index(name)), slots)
        if column is None:
            raise MissingFieldError(f"rows: expected a field {key!r}, found {self.keys}")
        found: npt.NDArray[Any] = to_numpy(column[slots if isinstance(slots, slice) else self._places(slots)])
        return found

    def _places(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(slots)).to(self._device)

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the stored rows on the host, and their description."""
        if self._schema is None:
            return rows_state(self, None, [])
        varying = {} if self._varying is None else self._varying.state()["columns"]
        left = iter(varying.values())
        columns = [
            next(left) if kind.varies else to_numpy(self._columns[key][: self._size])
            for key, kind in self._schema.fields.items()
        ]
        return rows_state(self, self._schema, columns)

    def __getstate__(self) -> dict[str, Any]:
        # Rows are copied through the host, because torch would pass tensors to other processes as shared memory, but
        # the cursor as a copy.
        super().__getstate__()
        kept = {"state": self.state(), "ragged": self._ragged, "structure": self.structure}
        return kept | {"device": str(self._device), "changes": self.changes}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = kept["state"]
        self.__init__(  # type: ignore[misc]
            state["capacity"],
            state["ndim"],
            device=kept["device"],
            alignment=state["alignment"],
            ragged=kept["ragged"],
        )
        self.load(state)
        if self._schema is not None:
            self._schema.structure = kept["structure"]
        self.changes = kept["changes"]

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; see ``Storage.load``."""
        schema, arrays, written = state_rows(self, state, self._schema)
        if schema is not None:
            if self._schema is None:
                self._begin(schema)
            for (key, kind), array in zip(schema.fields.items(), arrays, strict=True):
                if not kind.varies:
                    self._columns[key][: len(array)] = from_numpy(np.array(array)).to(self._device)
            if self._varying is not None:
                kinds: dict[FieldKey, Any] = {str(place): kind for place, kind in enumerate(schema.varying.values())}
                own = RowSchema({name: Leaf(name) for name in kinds}, kinds, schema.num_envs)
                columns = [array for array in arrays if isinstance(array, list)]
                self._varying.load(
                    {**state, **rows_state(self._varying, own, columns), "size": len(arrays[0]), "written": written}
                )
        self._size = len(arrays[0]) if arrays else 0
        self.written = written
        self.changes += 1


def _lists_on_host(rows: Any, ragged: Collection[FieldKey]) -> Any:
    """Return rows with lists of tensors, and the fields in ``ragged``, copied to arrays on the host."""
    fields = flatten(rows)
    listed = {key for key, leaf in fields.items() if isinstance(leaf, list) or is_varying(leaf)}
    if not ragged and not listed:
        return rows
    moved = iter([on_host(leaf) if key in ragged or key in listed else leaf for key, leaf in fields.items()])
    return map_tree(lambda _: next(moved), rows)


def _outline(leaf: Any) -> Any:
    """Return an array with a tensor's dtype and shape, but no memory for values; return other leaves unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    dtype = to_numpy(torch.empty(0, dtype=leaf.dtype)).dtype
    return np.broadcast_to(np.empty((), dtype), tuple(leaf.shape))


def _joined(key: FieldKey, parts: list[Any]) -> Any:
    """Stack the values of one field from several rows along a new first axis; the values may be tensors or other
    objects.
    """
    if not any(isinstance(part, torch.Tensor) for part in parts):
        return stack_leaves(key, parts)
    if len({np.shape(part)[:1] for part in parts}) > 1 and len({np.shape(part)[1:] for part in parts}) == 1:
        return object_array(on_host(parts), (len(parts),))
    kinds = {str(part.dtype) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts}
    if len(kinds) > 1:  # torch would promote the dtypes
        raise SchemaError(f"rows: field {key!r}: expected items of the same dtype, found {sorted(kinds)}")
    try:
        return torch.stack(parts)
    except (RuntimeError, ValueError, TypeError) as error:
        raise SchemaError(f"rows: field {key!r}: expected items of the same shape, found {error}") from error


__all__ = ["TensorStorage"]
