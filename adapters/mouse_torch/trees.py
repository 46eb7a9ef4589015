"""Functions that convert nested rows and batches between TensorDicts, trees of tensors and trees of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_non_tensor,
    is_tensor_collection,
)

from mouse_core.dtypes import is_number
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.nested import children_of, is_node, is_varying, object_array, rebuilt
from mouse_core.replay import Draw, FieldKey
from mouse_core.replay.ensemble import check_alike
from mouse_torch.transfer import from_numpy, sent, to_numpy


def as_tree(rows: Any, *, host: FieldKey = ()) -> Any:
    """Convert TensorDicts in rows to dicts of tensors. The field that ``host`` names is converted to a NumPy array,
    because samplers read it.
    """
    path = (host,) if isinstance(host, str) else host
    return _opened_tree(rows, lambda place, leaf: to_numpy(leaf) if path and place[: len(path)] == path else leaf)


def on_host(rows: Any) -> Any:
    """Convert all tensors and TensorDicts in rows, or a single tensor, to NumPy arrays on the host.

    Raises:
        SchemaError: NumPy lacks the dtype of a tensor.
    """
    return _opened_tree(rows, lambda _, leaf: to_numpy(leaf))


def _opened_tree(rows: Any, convert: Callable[[FieldKey, torch.Tensor], Any], place: tuple[str, ...] = ()) -> Any:
    """Return rows with TensorDicts converted to dicts, and with ``convert`` applied to every tensor; ``place`` is the
    path in a row.
    """
    if isinstance(rows, torch.Tensor):
        return convert(place, rows)
    if is_tensor_collection(rows):
        return _opened_tree(_opened(rows), convert, place)
    if isinstance(rows, Mapping):
        return {name: _opened_tree(child, convert, (*place, name)) for name, child in rows.items()}
    if isinstance(rows, tuple):
        return rebuilt(rows, [_opened_tree(child, convert, (*place, "")) for child in rows])
    if isinstance(rows, list) and not _are_plain(rows):
        return [_opened_tree(row, convert, place) for row in rows]
    if is_varying(rows):
        values = [_opened_tree(value, convert, place) for value in rows.reshape(-1)]
        return object_array(values, rows.shape)
    return rows


def _are_plain(items: list[Any]) -> bool:
    """Whether a list contains only Python numbers and strings."""
    return all(type(item) in _PLAIN for item in items)


_PLAIN = frozenset({bool, int, float, str, bytes})


def _opened(rows: Any) -> Any:
    """Return the fields of a TensorDict or a tensorclass by name; for non-tensor data, return a list with one item for
    each row.
    """
    if is_non_tensor(rows):
        if not rows.batch_size:
            return rows.data
        listed = rows.tolist()
        return object_array(listed, (len(listed),)) if len(rows.batch_size) == 1 and is_node(listed) else listed
    return {name: _field(rows, name) for name in rows.keys()}  # noqa: SIM118 (it iterates over rows)


def _field(rows: Any, name: str) -> Any:
    if isinstance(rows, LazyStackedTensorDict) and rows.stack_dim == 0:
        values = [row.get(name) for row in rows.tensordicts]
        if len({value.shape if isinstance(value, torch.Tensor) else () for value in values}) > 1:
            return object_array(values, (len(values),))  # of differing length
    try:
        value = rows.get(name)
    except RuntimeError as error:
        if not isinstance(rows, LazyStackedTensorDict):
            raise
        raise SchemaError(
            f"rows: field {name!r}: when shapes differ, expected a lazy stack along axis 0, the axis of rows, found a "
            f"lazy stack along axis {rows.stack_dim}"
        ) from error
    # For all of its rows, a tensorclass returns one plain string.
    return NonTensorData(value, batch_size=rows.batch_size) if isinstance(value, str | bytes) else value


def as_state(tree: Any) -> Any:
    """Convert arrays in a state to tensors, and NumPy numbers to Python numbers, so that ``torch.load`` can read the
    state with its default options.
    """
    if isinstance(tree, np.ndarray):
        if is_number(tree.dtype) and tree.dtype.isnative:
            return from_numpy(tree if tree.flags.writeable else tree.copy())
        raw = np.ascontiguousarray(tree).reshape(-1).view(np.uint8)
        return {"dtype": tree.dtype.str, "shape": list(tree.shape), "bytes": torch.from_numpy(raw.copy())}
    if isinstance(tree, Mapping):
        return {name: as_state(child) for name, child in tree.items()}
    if isinstance(tree, list | tuple):  # named tuples become plain tuples
        return (list if isinstance(tree, list) else tuple)(as_state(child) for child in tree)
    return tree.item() if isinstance(tree, np.generic) else tree


def from_state(tree: Any) -> Any:
    """Convert the tensors in a state that ``as_state`` returned to NumPy arrays on the host."""
    if isinstance(tree, Mapping):
        if tree.keys() == {"dtype", "shape", "bytes"} and isinstance(tree["bytes"], torch.Tensor):
            return tree["bytes"].numpy().copy().view(tree["dtype"]).reshape(tree["shape"])
        return {name: from_state(child) for name, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(from_state(child) for child in tree)
    return on_host(tree) if isinstance(tree, torch.Tensor) else tree


def on_device(draw: Draw, device: torch.device) -> Draw:
    """Copy the output of a sampler to a device as tensors, in one transfer."""
    own = ("index", "mask", "priority_weight")
    given = {name: getattr(draw, name) for name in own} | {f"extra {name}": draw.extra[name] for name in draw.extra}
    moved: dict[str, Any] = sent({name: values for name, values in given.items() if values is not None}, device)
    extra = {name: moved.get(f"extra {name}") for name in draw.extra}
    changes: dict[str, Any] = {name: moved.get(name) for name in own} | {"extra": extra}
    return replace(draw, **changes)


def tensor_dict(batch: Any, device: torch.device, *, size: Sequence[int] | None = None) -> Any:
    """Convert a batch, or rows, to a TensorDict on a device; return a batch that is not a tree of arrays unchanged.

    The batch size of the TensorDict is ``size``. By default, the batch size consists of the leading axes that all
    fields have in common, but of no more axes than ``index`` has: ``[batch_size]``, or ``[B, S]``. Tuples and lists of
    arrays become dicts with the keys "0", "1", ...; named tuples become dicts of their fields; values other than
    numbers become non-tensor data.
    """
    if batch is None or not is_node(batch):
        return as_tensor(batch, device) if isinstance(batch, np.ndarray) and is_number(batch.dtype) else batch
    fields = _tensors(batch, device)
    shared = _shared(fields) if size is None else size
    return TensorDict(fields, batch_size=shared, device=None if device.type == "cpu" else device)


def _shared(fields: Mapping[str, Any]) -> list[int]:
    shapes = list(_shapes(fields))
    index = fields.get("index")
    most = 1 if index is None else index.ndim
    size: list[int] = []
    for lengths in zip(*[shape[:most] for shape in shapes], strict=False):
        if len(set(lengths)) > 1:
            break
        size.append(lengths[0])
    return size if all(len(shape) >= 1 for shape in shapes) else []


def _tensors(node: Any, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, child in children_of(node):
        name = str(place)
        if child is None:
            continue
        if is_node(child):
            found[name] = _tensors(child, device)
        elif isinstance(child, list) or (isinstance(child, np.ndarray) and not is_number(child.dtype)):
            found[name] = _listed(child if isinstance(child, list) else child.tolist(), device)
        elif isinstance(child, str | bytes):  # of a single row
            found[name] = child
        elif isinstance(child, torch.Tensor | np.ndarray | np.generic | bool | int | float | complex):
            found[name] = as_tensor(child, device)
        else:
            found[name] = NonTensorData(child)
    return found


def _listed(values: list[Any], device: torch.device) -> Any:
    """Convert arrays in a list of values to tensors, as a TensorDict stores them; the list has an item for each row, or
    a list of items for each slice.
    """
    rows = [_listed(value, device) if isinstance(value, list) else _item(value, device) for value in values]
    return NonTensorStack(*rows) if rows else NonTensorData([], batch_size=[0])


def _item(value: Any, device: torch.device) -> NonTensorData:
    numbers = isinstance(value, np.ndarray) and is_number(value.dtype)
    return NonTensorData(as_tensor(value, device) if numbers else value)


def as_tensor(values: Any, device: torch.device) -> torch.Tensor:
    """Convert an array or a tensor to a tensor on a device; on the host, the tensor shares the array's memory."""
    if isinstance(values, torch.Tensor):
        return values.to(device)
    array = np.asarray(values)
    if not array.flags.writeable:
        array = array.copy()
    return from_numpy(array).to(device)


def _shapes(fields: Mapping[str, Any]) -> Any:
    for child in fields.values():
        if isinstance(child, Mapping):
            yield from _shapes(child)
        elif isinstance(child, str | bytes):
            yield ()
        else:
            yield tuple(child.shape)


def joined(key: FieldKey, parts: Sequence[Any], numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Join one field of the batches of several members on a device.

    Raises:
        SchemaError: The batches differ in dtype or shape.
    """
    tensors = [as_tensor(part, device) for part in parts]
    check_alike(key, tensors, numbers)
    return torch.cat(tensors)


def as_nested(batch: Any) -> Any:
    """Convert each field of a packed batch to a jagged nested tensor, whose elements are the windows without padding.

    The batch may come from a source with ``packed=``, or from ``groups.concatenate``, with or without a capacity. No
    values are copied: the nested tensors share the memory of the batch. All nested tensors have the same offsets, so
    the tensors can be combined in computations.

    Args:
        batch: A TensorDict, or a dict of tensors, with ``cu_seqlens`` ``[B + 1]`` and fields ``[T, ...]``; or a tuple
            of several views of a batch.

    Returns:
        A TensorDict of batch size ``[B]`` with a nested tensor ``[B, *, ...]`` for each field. The fields
        ``cu_seqlens``, ``sequence_id`` and ``mask`` are left out, because the nested tensors contain their information.
        For several views, the result is a tuple of TensorDicts.

    Raises:
        ConfigError: ``batch`` is not a packed batch.

    Example:
        >>> packed = {"cu_seqlens": torch.tensor([0, 2, 3]), "reward": torch.tensor([1.0, 2.0, 3.0])}
        >>> as_nested(packed)["reward"].offsets().tolist()
        [0, 2, 3]
    """
    if isinstance(batch, tuple):
        return tuple(map(as_nested, batch))
    if not hasattr(batch, "keys") or "cu_seqlens" not in batch.keys():  # noqa: SIM118  a TensorDict iterates over rows
        raise ConfigError(
            f"as_nested: expected a batch with cu_seqlens, as packed=True returns it, found {type(batch).__name__}"
        )
    offsets = batch["cu_seqlens"].long()
    # Padding belongs to no window. Reading the position where it begins waits for the device.
    rows = slice(int(offsets[-1])) if "mask" in batch.keys() else slice(None)  # noqa: SIM118  as above
    fields = {
        name: torch.nested.nested_tensor_from_jagged(batch[name][rows], offsets)
        for name in batch.keys()  # noqa: SIM118  as above
        if name not in ("cu_seqlens", "sequence_id", "mask")
    }
    return TensorDict(fields, batch_size=[len(offsets) - 1])
