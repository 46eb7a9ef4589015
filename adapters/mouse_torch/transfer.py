"""Transfers batches of NumPy arrays to torch. On the host, nothing is copied. For CUDA, a batch is gathered in one
block of pinned memory (a slab), which is sent by one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from mouse_core import BatchSource, SchemaError, Spec
from mouse_core.batches import BatchLayout
from mouse_core.dtypes import is_ml_float, named_dtype
from mouse_core.prefetch import Staged
from mouse_core.sampling import Plan


def host_maker(source: BatchSource, *, pin: bool) -> Callable[[int], TensorDict]:
    """Return a function that takes the index of a batch and creates the batch: a TensorDict on the host, in pinned
    memory if ``pin`` is True.
    """
    if pin:
        return partial(_make_pinned, source)
    return Staged(source.__getitem__, partial(_tensors, batch_dims(source.spec)))


def batch_dims(spec: Spec) -> int:
    """Return the number of axes in a TensorDict's batch size: 2 for ``[B, S]``, 1 for ``[B]``, 0 for packed windows.

    In a packed batch, ``cu_seqlens`` has B + 1 values, and other fields have T rows. A TensorDict of batch size ``[T]``
    could contain ``cu_seqlens`` only in a wrapper, which neither attention functions nor ``torch.nested`` accept.
    """
    return 0 if spec.is_packed else spec.batch_dims


def _tensors(dims: int, gathered: Any) -> TensorDict:
    views = []
    for view in gathered if isinstance(gathered, tuple) else (gathered,):
        tensors = {name: from_numpy(values) for name, values in view.items()}
        views.append(TensorDict(tensors, batch_size=next(iter(tensors.values())).shape[:dims]))
    return _delivered(views)


def _make_pinned(source: BatchSource, index: int) -> TensorDict:
    plan = source.plan(index)
    layout = source.layout(plan)
    slabs = _gather_slabs(source, plan, layout, pin=True, stored=False)
    size = _size(source, plan)
    return _delivered([TensorDict(slab_tensors(layout, slab), batch_size=size) for slab in slabs])


def _size(source: BatchSource, plan: Plan) -> list[int]:
    """Return the lengths of the leading axes of a batch, which all fields have in common."""
    return [len(plan.starts), plan.length][: batch_dims(source.spec)]


def _gather_slabs(
    source: BatchSource, plan: Plan, layout: BatchLayout, *, pin: bool, stored: bool
) -> list[torch.Tensor]:
    """Gather a batch into one slab; if the batch has several views, gather each view into a separate slab."""
    # Pinned memory comes from torch's caching host allocator, which reuses a slab only after copies from it are
    # finished.
    slabs = [torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(source.views)]
    out = [layout.arrays(slab.numpy()) for slab in slabs]
    source.gather(plan, out[0] if source.views == 1 else out, stored=stored)
    return slabs


def _delivered(views: list[TensorDict]) -> TensorDict:
    """Return the batch if there is one view, else a tuple of the views; in both cases, the annotated return type is the
    type of a batch.
    """
    return views[0] if len(views) == 1 else cast(TensorDict, tuple(views))


def from_numpy(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of an array, also for bfloat16 and 8-bit floats, which
    ``torch.from_numpy`` cannot convert.

    Raises:
        SchemaError: torch lacks the dtype.
    """
    narrow = is_ml_float(array.dtype)
    if not narrow and array.dtype.kind in "biufc" and array.dtype.itemsize <= 8 << (array.dtype.kind == "c"):
        # NumPy may name a dtype "unsigned long long"; torch knows only its other name.
        return torch.from_numpy(array.view(array.dtype.str))
    dtype = getattr(torch, array.dtype.name, None) if narrow else None
    if dtype is None:
        raise SchemaError(f"rows: expected a dtype that torch supports, found {array.dtype}")
    return torch.from_numpy(array.view(np.int16 if array.itemsize == 2 else np.uint8)).view(dtype)


def sent(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy arrays to tensors on a device by one asynchronous copy; on the host, the tensors share the memory of the
    arrays.
    """
    if device.type == "cpu":
        return {name: from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return by_one_copy(arrays, device)


def by_one_copy(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy arrays to tensors in one block of memory on a device.

    For CUDA the arrays are first copied to one block of pinned memory, which torch's allocator reuses after the copy to
    the device.
    """
    layout, slab = in_slab(arrays, pin=device.type == "cuda")
    return slab_tensors(layout, slab.to(device, non_blocking=True))


def in_slab(arrays: Mapping[str, npt.NDArray[Any]], *, pin: bool) -> tuple[BatchLayout, torch.Tensor]:
    """Copy arrays to one block of host memory; return the layout of the block, and the block as uint8.

    Torch's allocator reuses pinned memory only after all copies from this memory are finished.
    """
    layout = BatchLayout({name: (array.shape, array.dtype) for name, array in arrays.items()})
    slab = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pin)
    for name, target in layout.batches(slab.numpy(), 1).items():
        np.copyto(target, arrays[name])
    return layout, slab


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return an array that shares the memory of a tensor; copy a tensor on another device to the host first.

    Raises:
        SchemaError: NumPy lacks the dtype, or needs the package ml_dtypes, which is not installed.
    """
    values = tensor.detach().cpu()
    name = str(values.dtype).removeprefix("torch.")
    try:
        if name == "bfloat16" or name.startswith("float8_"):
            raw = values.view(torch.int16 if values.element_size() == 2 else torch.uint8).numpy()
            return raw.view(named_dtype(name))
        found: npt.NDArray[Any] = values.numpy()
        return found
    except TypeError as error:
        reason = f": {error}" if "ml_dtypes" in str(error) else ""
        raise SchemaError(f"rows: expected a dtype that NumPy supports, found {tensor.dtype}{reason}") from error


def slab_tensors(layout: BatchLayout, slab: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the fields of a batch as tensors in a slab (uint8 ``[layout.nbytes]``) on any device."""
    tensors = {}
    for name, (offset, shape, dtype) in layout.fields.items():
        nbytes = prod(shape) * dtype.itemsize
        tensors[name] = slab[offset : offset + nbytes].view(torch_dtype(dtype)).reshape(shape)
    return tensors


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch dtype of a NumPy dtype, also in compiled code; raise SchemaError if torch lacks it."""
    found = getattr(torch, dtype.name, None) if is_ml_float(dtype) or dtype.kind in "biufc" else None
    if not isinstance(found, torch.dtype):
        raise SchemaError(f"rows: expected a dtype that torch supports, found {dtype}")
    return found


@dataclass(frozen=True)
class _Slabs:
    """A batch in host memory, with one slab for each view of the batch."""

    layout: BatchLayout
    slabs: list[torch.Tensor]
    size: list[int]


@dataclass(frozen=True)
class InFlight:
    """A batch that is being copied to a device.

    Args:
        views: The batch, or the views of the batch; their tensors are ready after ``event``.
        event: The event after the last copy on the stream of copies; None: the tensors are ready now.
    """

    views: tuple[TensorDict, ...]
    event: torch.cuda.Event | None


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for copies that overlap with the training step; None for devices without streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def under_way(make: Callable[[], Iterable[TensorDict]], stream: torch.cuda.Stream | None) -> InFlight:
    """Return the views from ``make``, which starts their copies on ``stream``."""
    with torch.cuda.stream(stream):  # no effect for None
        views = tuple(make())
        event = None
        if stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
    return InFlight(views, event)


def device_maker(source: BatchSource, *, device: torch.device, pin: bool) -> Staged:
    """Return a function that takes the index of a batch, creates the batch, and starts its copy to ``device``.

    Values are copied in their stored dtypes and converted on the device. On CUDA, copies run on a separate stream;
    ``hand_over`` makes the consumer's stream wait for the copies.
    """
    return Staged(
        partial(_gather_stored, source, pin),
        partial(_move, source, device, pin, stream_of(device)),
        partial(_arrays, source),
    )


def _gather_stored(source: BatchSource, pin: bool, index: int) -> _Slabs:
    plan = source.plan(index)
    layout = source.layout(plan, stored=True)
    return _Slabs(layout, _gather_slabs(source, plan, layout, pin=pin, stored=True), _size(source, plan))


def _arrays(source: BatchSource, gathered: _Slabs) -> Any:
    """Return the arrays of a batch as views of its slabs. Each array's dtype has the kind (such as float or integer) of
    the delivered dtype, but may have the width of the stored dtype.
    """
    views = []
    for slab in gathered.slabs:
        arrays = gathered.layout.arrays(slab.numpy())
        kinds = {name: np.dtype(source.spec[name].dtype) for name in arrays}
        views.append({k: v if v.dtype.kind == kinds[k].kind else v.astype(kinds[k]) for k, v in arrays.items()})
    return tuple(views) if len(views) > 1 else views[0]


def _move(
    source: BatchSource, device: torch.device, pin: bool, stream: torch.cuda.Stream | None, gathered: _Slabs
) -> InFlight:
    layout, slabs, size = gathered.layout, gathered.slabs, gathered.size

    def views() -> Iterator[TensorDict]:
        for slab in slabs:
            moved = slab_tensors(layout, slab.to(device, non_blocking=pin))
            wide = {name: tensor.to(torch_dtype(np.dtype(source.spec[name].dtype))) for name, tensor in moved.items()}
            yield TensorDict(wide, batch_size=size, device=device)

    return under_way(views, stream)


def hand_over(made: InFlight) -> TensorDict:
    """Return a batch to the caller. The caller's current stream waits for the copies; the host does not wait."""
    if made.event is not None:
        stream = torch.cuda.current_stream(made.views[0].device)
        stream.wait_event(made.event)
        for view in made.views:
            for tensor in view.values(include_nested=True, leaves_only=True):
                # The allocator must not reuse the memory before the caller's stream has finished with it.
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)
    return _delivered(list(made.views))
