"""Nested rows and batches between TensorDicts, trees of tensors and trees of NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from mouse_core.errors import SchemaError
from mouse_core.replay.protocols import Draw, FieldKey

_NUMBERS = "biufc"


def as_tree(rows: Any, *, host: FieldKey = ()) -> Any:
    """Rows with their TensorDicts as dicts of tensors; the field ``host`` as a NumPy array, as samplers need it."""
    path = (host,) if isinstance(host, str) else host
    if isinstance(rows, TensorDictBase):
        return as_tree(rows.to_dict(), host=host)
    if isinstance(rows, Mapping):
        return {
            name: on_host(child) if path == (name,) else as_tree(child, host=path[1:] if path[:1] == (name,) else ())
            for name, child in rows.items()
        }
    if isinstance(rows, tuple):
        children = [as_tree(child) for child in rows]
        return type(rows)(*children) if hasattr(rows, "_fields") else tuple(children)
    if isinstance(rows, list) and rows and isinstance(rows[0], TensorDictBase | Mapping | tuple):
        return [as_tree(row, host=host) for row in rows]
    return rows


def on_host(rows: Any) -> Any:
    """Rows, or a single tensor, with everything of torch as NumPy arrays on the host.

    Raises:
        SchemaError: A dtype that NumPy has not.
    """
    if isinstance(rows, torch.Tensor):
        try:
            return rows.detach().cpu().numpy()
        except TypeError as error:
            raise SchemaError(f"rows: expected a dtype that NumPy has, found {rows.dtype}") from error
    if isinstance(rows, TensorDictBase):
        return on_host(rows.to_dict())
    if isinstance(rows, Mapping):
        return {name: on_host(child) for name, child in rows.items()}
    if isinstance(rows, tuple):
        children = [on_host(child) for child in rows]
        return type(rows)(*children) if hasattr(rows, "_fields") else tuple(children)
    if isinstance(rows, list) and rows and isinstance(rows[0], torch.Tensor | TensorDictBase | Mapping | tuple):
        return [on_host(row) for row in rows]
    return rows


def on_device(draw: Draw, device: torch.device) -> Draw:
    """What a sampler says, in tensors on a device."""

    def moved(values: Any) -> Any:
        return None if values is None else torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return replace(
        draw,
        index=moved(draw.index),
        mask=moved(draw.mask),
        priority_weight=moved(draw.priority_weight),
        extra={name: moved(values) for name, values in draw.extra.items()},
    )


def tensor_dict(batch: Any, device: torch.device) -> Any:
    """A batch, or rows, as a TensorDict on a device; what is no tree of arrays stays as it is.

    Its batch size are the axes that all fields share, at most those of ``index``: ``[batch_size]``, or ``[num_slices,
    slice_len]``. Tuples become dicts with the keys "0", "1", ...; values that are no numbers become non-tensor data.
    """
    if not isinstance(batch, Mapping | tuple):
        return as_tensor(batch, device) if isinstance(batch, np.ndarray) and batch.dtype.kind in _NUMBERS else batch
    fields = _tensors(batch, device)
    shapes = list(_shapes(fields))
    index = fields.get("index")
    most = 1 if index is None else index.ndim
    size: list[int] = []
    for lengths in zip(*[shape[:most] for shape in shapes], strict=False):
        if len(set(lengths)) > 1:
            break
        size.append(lengths[0])
    if not all(len(shape) >= 1 for shape in shapes):
        size = []
    return TensorDict(fields, batch_size=size, device=None if device.type == "cpu" else device)


def _tensors(node: Any, device: torch.device) -> dict[str, Any]:
    items = node.items() if isinstance(node, Mapping) else ((str(place), child) for place, child in enumerate(node))
    found: dict[str, Any] = {}
    for name, child in items:
        if isinstance(child, Mapping | tuple):
            found[name] = _tensors(child, device)
        elif isinstance(child, list) or (isinstance(child, np.ndarray) and child.dtype.kind not in _NUMBERS):
            found[name] = NonTensorStack(*(child if isinstance(child, list) else child.tolist()))
        else:
            found[name] = as_tensor(child, device)
    return found


def as_tensor(values: Any, device: torch.device) -> torch.Tensor:
    """An array or a tensor as a tensor on a device; on the host it shares the array's memory."""
    if isinstance(values, torch.Tensor):
        return values.to(device)
    array = np.asarray(values)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).to(device)


def _shapes(fields: Mapping[str, Any]) -> Any:
    for child in fields.values():
        if isinstance(child, Mapping):
            yield from _shapes(child)
        else:
            yield tuple(child.shape)


def joined(key: FieldKey, parts: Sequence[Any], numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """One field of a batch from those of several members, on a device.

    Raises:
        SchemaError: They differ in dtype or shape.
    """
    tensors = [as_tensor(part, device) for part in parts]
    for number, tensor in zip(numbers, tensors, strict=True):
        if tensor.shape[1:] != tensors[0].shape[1:] or tensor.dtype != tensors[0].dtype:
            raise SchemaError(
                f"buffer {number}: field {key!r}: expected {tensors[0].dtype} {list(tensors[0].shape[1:])} as in "
                f"buffer {numbers[0]}, found {tensor.dtype} {list(tensor.shape[1:])}"
            )
    return torch.cat(tensors)
