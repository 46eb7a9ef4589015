"""ReplayBuffer and RowMap for PyTorch, which accept and return TensorDicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from mouse_core import maps
from mouse_core.errors import ConfigError
from mouse_core.replay import buffer, ensemble
from mouse_core.replay.buffer import BaseBuffer
from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.storages.array import ArrayStorage
from mouse_torch.placement import check_device, untraced
from mouse_torch.storage import TensorStorage
from mouse_torch.trees import as_state, as_tree, from_state, joined, on_device, on_host, tensor_dict

_ON_HOST = ("sample", "draw", "finish", "__iter__", "update_priority", "state_dict", "load_state_dict")
_ROWS = ("__getitem__", "__setitem__", "in_order", "to_store", "generation_of", "update_if_present")
_WRITING = ("append", "extend", "empty", *_ROWS)


class _InTorch:
    """Base class of buffers and maps that deliver results to a device."""

    _target: torch.device

    def _place(self, device: str | torch.device | None) -> None:
        self._target = check_device(device)

    @property
    def device(self) -> torch.device:
        """The device of results."""
        return self._target

    def _deliver(self, batch: Any) -> Any:
        return tensor_dict(batch, self._target)


class _Buffer(_InTorch, BaseBuffer):
    """Base class of buffers. The state consists of tensors and plain values, which ``torch.load`` can read with its
    default options.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values; it is as large as the data. See ``mouse_core.replay``."""
        state: dict[str, Any] = as_state(super().state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, which this package or ``mouse_core.replay`` saved."""
        super().load_state_dict(from_state(state))


@untraced(*_ON_HOST, *_WRITING)
class ReplayBuffer(_Buffer, buffer.ReplayBuffer):
    """``mouse_core.replay.ReplayBuffer`` that accepts and returns TensorDicts, including nested TensorDicts.

    Rows may be TensorDicts, or dicts of tensors, arrays or numbers. A batch is a ``TensorDict[batch_size]``, or a
    ``TensorDict[B, S]`` for slices. The draws equal the draws of the NumPy and JAX buffers with the same seed. On the
    host, tensors share the memory into which rows were gathered.

    With ``device="cuda"`` an ``ArrayStorage`` (the default) becomes a ``TensorStorage`` on the device: rows are stored,
    gathered and transformed on the device, and only indices are copied. With other storages, each batch is copied to
    the device; ``PrefetchBatchifier(buffer, device=...)`` copies batches in advance, through pinned memory.

    Args:
        storage: The storage of the rows; by default 1,000 rows in memory.
        transform: The transforms of batches. Transforms receive NumPy arrays, or tensors if rows are stored as tensors;
            the transforms of ``mouse_core.replay`` accept both.
        device: The torch device of batches, and of the rows of an ``ArrayStorage``; None: the host.
        sampler, writer, batch_size, seed, and others: The arguments of ``mouse_core.replay.ReplayBuffer``.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.replay.ReplayBuffer``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from mouse_core.replay import ArrayStorage
        >>> from mouse_torch import ReplayBuffer
        >>> buffer = ReplayBuffer(ArrayStorage(100), batch_size=2)
        >>> buffer.extend(TensorDict({"obs": torch.ones(3, 4)}, batch_size=[3])).tolist()
        [0, 1, 2]
        >>> buffer.sample()["obs"].shape
        torch.Size([2, 4])
    """

    def _as_storage(self, storage: Any) -> Any:
        return super()._as_storage(_placed(ArrayStorage(1000) if storage is None else storage, self._target))

    def _take_parts(self, storage: Any, sampler: Any, writer: Any) -> None:
        # Whether batches are drawn as tensors.
        self._kept = isinstance(storage, TensorStorage)
        super()._take_parts(storage, sampler, writer)
        if self._kept and self._target.type != "cpu" and not self.writer.ordered:
            raise ConfigError(
                f"writer: for rows on {self._target}, expected a writer that overwrites the oldest rows (a ring), "
                f"found {self.writer!r}"
            )

    @property
    def keeps_tensors(self) -> bool:
        """Whether rows are stored as tensors."""
        return self._kept

    def __getitem__(self, index: Any) -> Any:
        """Return stored rows, without transforms: a TensorDict whose batch size is the shape of ``index``, or a list of
        TensorDicts for a ``ListStorage``; see ``mouse_core.replay.ReplayBuffer``.
        """
        return super().__getitem__(on_host(index))

    def _deliver_rows(self, rows: Any, shape: tuple[int, ...]) -> Any:
        if isinstance(rows, list) and shape:
            return [self._deliver_rows(row, shape[1:]) for row in rows]
        return tensor_dict(rows, self._target, size=shape)

    def __setitem__(self, index: Any, rows: Any) -> None:
        """Overwrite rows in place; see ``mouse_core.replay.ReplayBuffer``."""
        super().__setitem__(on_host(index), rows)

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Set the priorities of rows; the arguments may be tensors on any device. See ``mouse_core.replay``."""
        super().update_priority(on_host(index), on_host(priority), on_host(generation))

    def generation_of(self, index: Any) -> Any:
        """Return the generations of rows as a tensor on the device of batches; see ``mouse_core.replay``."""
        return torch.as_tensor(super().generation_of(on_host(index)), device=self._target)

    def update_if_present(self, index: Any, generation: Any, fields: Any) -> Any:
        """Overwrite some fields of those given rows that still exist; the values may be tensors on any device. See
        ``mouse_core.replay``.

        The returned mask is a tensor on the device of batches.
        """
        present = super().update_if_present(on_host(index), on_host(generation), fields)
        return torch.as_tensor(present, device=self._target)

    def batch_of(self, drawn: buffer.Drawn) -> Any:
        """Convert a draw to a batch and transform it; see ``mouse_core.replay.ReplayBuffer``."""
        if self._kept:
            drawn = replace(drawn, draw=on_device(drawn.draw, self._target))
        return super().batch_of(drawn)

    def _accept(self, rows: Any) -> Any:
        return as_tree(rows, host=self.priority_key) if self._kept else on_host(rows)


class PrioritizedReplayBuffer(buffer.PrioritizedReplayBuffer, ReplayBuffer):
    """``mouse_core.replay.PrioritizedReplayBuffer`` that accepts and returns TensorDicts.

    Args:
        alpha, beta, eps: See ``mouse_core.replay.PrioritizedSampler``.
        **options: The other arguments of ``ReplayBuffer``, by name.
    """


@untraced(*_ON_HOST, "extend")
class ReplayBufferEnsemble(_Buffer, ensemble.ReplayBufferEnsemble):
    """``mouse_core.replay.ReplayBufferEnsemble`` that returns TensorDicts.

    Args:
        *buffers: Replay buffers of any package, ensembles, or data that a buffer accepts as its storage.
        device: The torch device of batches; None: the host.
        p, transform, batch_size, seed, and others: See ``mouse_core.replay.ReplayBufferEnsemble``.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.replay.ReplayBufferEnsemble``.
    """

    def update_priority(self, index: Any, priority: Any = None, buffer_ids: Any = None, generation: Any = None) -> None:
        """Set the priorities of rows; the arguments may be tensors on any device. See ``mouse_core.replay``."""
        super().update_priority(on_host(index), on_host(priority), on_host(buffer_ids), on_host(generation))

    def _accept(self, rows: Any) -> Any:
        return on_host(rows)

    def _join(self, key: FieldKey, parts: list[Any], numbers: list[int]) -> Any:
        if any(isinstance(part, torch.Tensor) for part in parts):
            return joined(key, parts, numbers, self._target)
        return super()._join(key, parts, numbers)


def _placed(storage: Any, target: torch.device) -> Any:
    """Return the storage; if it is an ``ArrayStorage``, return a storage with the same rows on the device instead."""
    if isinstance(storage, TensorStorage) and storage.device != target:
        raise ConfigError(f"device: expected {storage.device}, the device of the storage, found {target}")
    if target.type == "cpu" or type(storage) is not ArrayStorage:
        return storage
    moved = TensorStorage(storage.capacity, storage.ndim, device=target, alignment=storage.alignment)
    if len(storage):
        moved.load(storage.state())
    return moved


_Shape = torch.Size | None


@untraced("index", "contains", "get", "rows", "values", "extend", "accumulate", "__getitem__", "__setitem__")
class RowMap(_InTorch, maps.RowMap):
    """``mouse_core.maps.RowMap`` that accepts and returns TensorDicts and tensors.

    A TensorDict may have any batch size, even ``[]``; results have the same batch size. Tensors, and tensors in dicts,
    have the shape ``[n, ...]``. Rows are stored in the host's memory, even if tensors are on another device. The
    ``RowMap`` classes for NumPy, torch and JAX assign the same indices to the same rows.

    Args:
        *args, **options: The arguments of ``mouse_core.maps.RowMap``: keys, values, capacity, seed.
        device: The device of results; None: the host.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.maps.RowMap``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from mouse_torch import RowMap
        >>> table = RowMap(keys=["obs"])
        >>> rows = TensorDict({"obs": torch.arange(6.0).reshape(3, 2)}, batch_size=[3])
        >>> table[rows] = TensorDict({"value": torch.ones(3)}, batch_size=[3])
        >>> found = table[rows[1]]
        >>> found["value"]
        tensor(1.)
        >>> table.index(rows)
        tensor([0, 1, 2])
    """

    def __init__(self, *args: Any, device: str | torch.device | None = None, **options: Any) -> None:
        self._place(device)
        super().__init__(*args, **options)

    def index(self, rows: Any) -> Any:
        """Return the index of each row, int64; see ``mouse_core.maps``."""
        flat, shape = _flat(rows)
        return _shaped(super().index(flat), shape)

    def __getitem__(self, rows: Any) -> Any:
        """Return the values of rows: a TensorDict, or a tensor if the map has single values; see
        ``mouse_core.maps``.
        """
        flat, shape = _flat(rows)
        return _shaped(super().__getitem__(flat), shape)

    def get(self, rows: Any, default: Any = 0) -> Any:
        """Return the values of rows, and ``default`` for an absent row; see ``mouse_core.maps``."""
        flat, shape = _flat(rows)
        return _shaped(super().get(flat, default), shape)

    def extend(self, rows: Any, values: Any = None) -> Any:
        """Write the values of rows, and return the index of each row, int64; see ``mouse_core.maps``."""
        flat, shape = _flat(rows)
        return _shaped(super().extend(flat, _flat(values)[0]), shape)

    def accumulate(self, rows: Any, values: Any, how: np.ufunc = np.add) -> Any:
        """Combine ``values`` with the stored values of rows by the operation ``how``; return the index of each row,
        int64; see ``mouse_core.maps``.
        """
        flat, shape = _flat(rows)
        return _shaped(super().accumulate(flat, _flat(values)[0], how), shape)

    def _accept(self, rows: Any) -> Any:
        return on_host(rows)


def _flat(rows: Any) -> tuple[Any, _Shape]:
    """Return rows with one batch axis, and the original batch size of a TensorDict."""
    if not is_tensor_collection(rows):
        return rows, None
    shape = rows.batch_size
    return (rows.reshape(-1) if len(shape) else rows.unsqueeze(0)), shape


def _shaped(found: Any, shape: _Shape) -> Any:
    """Reshape results for rows with one batch axis to the original batch size ``shape``."""
    if shape is None or len(shape) == 1:
        return found
    if not len(shape):
        return found[0]
    return found.reshape(shape) if isinstance(found, TensorDictBase) else found.reshape((*shape, *found.shape[1:]))
