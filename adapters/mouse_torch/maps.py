"""RowMap for PyTorch, which accepts and returns TensorDicts and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from mouse_core import maps
from mouse_torch.placement import check_device
from mouse_torch.tracing import untraced
from mouse_torch.trees import on_host, tensor_dict

_Shape = torch.Size | None


@untraced("index", "contains", "get", "rows", "values", "extend", "accumulate", "__getitem__", "__setitem__")
class RowMap(maps.RowMap):
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
        self._target = check_device(device)
        super().__init__(*args, **options)

    @property
    def device(self) -> torch.device:
        """The device of results."""
        return self._target

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

    def _deliver(self, rows: Any) -> Any:
        return tensor_dict(rows, self._target)


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
