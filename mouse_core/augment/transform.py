"""Pure functions that augment a batch with random numbers that were drawn before, for NumPy, torch and JAX (also under
``jax.jit``).

Values are bit-identical in all frameworks, except subnormal numbers, which XLA flushes to zero on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import numpy as np
from array_api_compat import is_jax_array, is_numpy_array, is_torch_array

from mouse_core.augment.config import MASKED_AS, Affine
from mouse_core.augment.draws import Draws
from mouse_core.augment.images import (
    Array,
    Empty,
    ImageShapes,
    arange,
    change_images,
    check_choice,
    check_rows,
    shape_of_images,
)
from mouse_core.dtypes import array_like, namespace
from mouse_core.errors import DataError, SchemaError

M = TypeVar("M", bound=Mapping[str, Any])


def apply(
    batch: M,
    draws: Draws,
    *,
    image_shape: ImageShapes = None,
    validate: bool | None = None,
    batch_dims: int = 2,
) -> M | dict[str, Array]:
    """Return the augmented batch. The input batch is not modified; fields that are not augmented share the arrays of
    the input.

    In fields with an axis K of offsets, ``[B, S, K, ...]``, all K values of a step get the same permutation, the same
    crop and the same mask.

    Args:
        batch: Arrays ``[B, S, ...]`` by field, of NumPy, torch (on any device) or JAX (also traced by ``jax.jit``).
        draws: The result of ``draw`` for the shape ``(B, S)`` of this batch; the arrays in ``draws`` are copied to the
            batch's device.
        image_shape: The shape ``(H, W, C)`` of a flattened ``obs_image``, or a dict from field to shape for several
            fields; required for crops of flattened images, but not of images ``[B, S, H, W, C]``.
        validate: Whether codes out of range (actions, done, states) raise DataError. If ``validate`` is None, codes are
            checked in NumPy arrays and in torch tensors on the CPU, but not on a device, where the check would wait for
            all queued work. Unchecked codes that are out of range stay unchanged. Under ``jax.jit`` codes cannot be
            checked.
        batch_dims: Number of batch axes: 2, or 1 for arrays ``[B, ...]`` without steps; the draws are then for ``(B,
            1)``.

    Returns:
        A dict with all fields of ``batch``, augmented or unchanged, and with the delivered masks, named
        ``<field>_mask``; the object ``batch`` itself if nothing changes.

    Raises:
        DataError: A code is out of range; the message names field, value and position.
        SchemaError: The shape or dtype of a field is invalid for its augmentation.
    """
    check_choice("augment: batch_dims", batch_dims, (1, 2))
    given = with_steps(batch) if batch_dims == 1 else batch
    changed = transform(given, draws, image_shape=image_shape, validate=validate)
    changed.update(mask({**given, **changed}, draws, own=changed))
    if batch_dims == 1:
        changed = without_steps(changed)
    return {**batch, **changed} if changed else batch


def with_steps(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays ``[B, ...]`` as ``[B, 1, ...]``: a batch without steps becomes a batch of windows of one step."""
    return {name: values[:, None] for name, values in batch.items()}


def without_steps(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays ``[B, 1, ...]`` as ``[B, ...]``."""
    return {name: values[:, 0] for name, values in batch.items()}


def transform(
    batch: Mapping[str, Array],
    draws: Draws,
    *,
    image_shape: ImageShapes = None,
    validate: bool | None = None,
    own: Collection[str] = (),
    empty: Empty = np.empty,
) -> dict[str, Array]:
    """Return the fields that are changed by augmentations other than masks; see ``apply``.

    Args:
        batch, draws, image_shape, validate: See ``apply``.
        own: Fields whose arrays may be modified, because no other object uses these arrays.
        empty: A function that returns memory for new NumPy arrays.
    """
    changed = {}
    for field, permutation in draws.permutations.items():
        if field in batch:
            check_rows(field, batch[field], len(permutation))
            changed[field] = _rename(field, batch[field], permutation, validate)
    for field, permutation in draws.columns.items():
        if field in batch:
            check_rows(field, batch[field], len(permutation))
            changed[field] = _permute_columns(field, batch[field], permutation, empty)
    for field, affine in draws.affine.items():
        if field in batch:
            changed[field] = _scale_and_shift(field, batch[field], affine, own=field in own)
    for field, (crop, pixels) in draws.images.items():
        if field in batch:
            size = shape_of_images(image_shape, field)
            changed[field] = change_images(batch[field], crop, pixels, size, empty, field)
    return changed


def mask(
    batch: Mapping[str, Array], draws: Draws, *, own: Collection[str] = (), empty: Empty = np.empty
) -> dict[str, Array]:
    """Return the fields that masks change, and the delivered masks.

    Args:
        batch: Arrays by field.
        draws: The draws.
        own, empty: See ``transform``.
    """
    changed = {}
    for field, hidden in {**draws.masks, **draws.delivered_masks}.items():
        if field in batch:
            values = batch[field]
            check_rows(field, values, *hidden.shape)
            hidden = array_like(hidden, values)
            fill = draws.fills.get(field, MASKED_AS.get(field, 0))
            if isinstance(fill, int | np.ndarray):
                check_masked_as(field, fill, values)
            changed[field] = _fill(values, hidden, fill, None if field in own else empty)
            if field in draws.delivered_masks:
                changed[f"{field}_mask"] = hidden
    return changed


def check_masked_as(field: str, fill: Any, values: Array) -> None:
    """Raise SchemaError unless the dtype of a field can represent ``fill``."""
    xp, number = namespace(values), np.asarray(fill).item()
    if xp.isdtype(values.dtype, "real floating"):
        bounds = xp.finfo(values.dtype)
        holds = not math.isfinite(number) or float(bounds.min) <= number <= float(bounds.max)
    elif xp.isdtype(values.dtype, "integral"):
        bounds = xp.iinfo(values.dtype)
        holds = math.isfinite(number) and number == int(number) and bounds.min <= number <= bounds.max
    else:
        holds = number in (0, 1)
    if not holds:
        wanted = "a signed dtype" if number == -1 else f"a dtype that can represent {number}"
        raise SchemaError(
            f"augment: {field}: expected {wanted}, because masked values become {number}, found {values.dtype}"
        )


def _fill(values: Array, hidden: Array, fill: Any, empty: Empty | None) -> Array:
    """Return ``values``, with ``fill`` at the steps where ``hidden`` is True; if ``empty`` is None, ``values`` may be
    modified in place."""
    if is_numpy_array(values):
        fill = _scalar(np, values, np.asarray(fill))
        filled = values
        if empty is not None or not values.flags.writeable:
            filled = (empty or np.empty)(values.shape, values.dtype)
            filled[...] = values
        if filled.flags.c_contiguous and filled.size:
            # Indexing by step is twice as fast as indexing by the mask if a step has many values.
            filled.reshape(hidden.size, -1)[np.flatnonzero(hidden)] = fill
        else:
            filled[hidden] = fill
        return filled
    xp = namespace(values)
    hidden = xp.reshape(hidden, (*hidden.shape, *(1,) * (values.ndim - 2)))
    # An array of the same dtype prevents type promotion.
    if isinstance(fill, int):
        return xp.where(hidden, xp.full_like(values[:1, :1], fill), values)
    return xp.where(hidden, _scalar(xp, values, fill), values)


# ---------------------------------------------------------------------- codes and columns


def _rename(field: str, codes: Array, permutation: Array, validate: bool | None) -> Array:
    """Return ``permutation[b, codes[b, s]]``, or ``permutation[b, codes[b, s, k]]`` if a step has several codes."""
    xp = namespace(codes)
    size = permutation.shape[1]
    if not xp.isdtype(codes.dtype, "integral"):
        raise SchemaError(
            f"augment: {field}: expected integer codes [B, S] to permute, found {codes.dtype} {tuple(codes.shape)}"
        )
    if xp.iinfo(codes.dtype).max < size - 1:
        raise SchemaError(f"augment: {field}: expected a dtype that can represent 0..{size - 1}, found {codes.dtype}")
    permutation = array_like(permutation, codes)
    rows = xp.reshape(arange(xp, codes, codes.shape[0]), (-1, *(1,) * (codes.ndim - 1)))
    # The default integer dtype: int64, or int32 in JAX without x64. Codes that do not fit become negative.
    places = xp.astype(codes, rows.dtype)
    table = xp.reshape(xp.astype(permutation, codes.dtype, copy=False), (-1,))
    if _is_on_host(codes) if validate is None else validate:
        _check_codes(field, codes, places, size)
        return xp.reshape(xp.take(table, xp.reshape(places + rows * size, (-1,))), codes.shape)
    within = xp.clip(places, 0, size - 1)
    renamed = xp.reshape(xp.take(table, xp.reshape(within + rows * size, (-1,))), codes.shape)
    return xp.where(places == within, renamed, codes)


def _is_on_host(values: Array) -> bool:
    return is_numpy_array(values) or (is_torch_array(values) and values.device.type == "cpu")


def _check_codes(field: str, codes: Array, places: Array, size: int) -> None:
    if 0 in codes.shape:
        return
    xp = namespace(codes)
    if int(xp.min(places)) >= 0 and int(xp.max(places)) < size:
        return
    outside = (places < 0) | (places >= size)
    outside = np.asarray(outside.cpu() if is_torch_array(outside) else outside)
    place = tuple(int(number) for number in np.argwhere(outside)[0])
    at = ", ".join(f"{what} {number}" for what, number in zip(("row", "step", "offset"), place, strict=False))
    found = f"found {int(codes[place])} at {at} of the batch"
    raise DataError(f"augment: {field}: expected 0..{size - 1}, {found}")


def _permute_columns(field: str, values: Array, permutation: Array, empty: Empty) -> Array:
    """Return a new array with ``out[b, s, permutation[b, a]] = values[b, s, a]``; if a step has several rows, ``out[b,
    s, k, permutation[b, a]] = values[b, s, k, a]``.
    """
    rows, size = permutation.shape
    if values.ndim < 3 or values.shape[-1] != size:
        raise SchemaError(
            f"augment: {field}: expected [B, S, {size}] for {size} codes, found shape {tuple(values.shape)}"
        )
    if is_numpy_array(values):
        # One index for each column of a row, for S values each, is 5 times faster than one index for each value.
        moved = empty(values.shape, values.dtype)
        places = np.arange(rows)[:, None], np.asarray(permutation)
        by_column = moved.reshape(rows, -1, size).transpose(0, 2, 1)
        by_column[places] = values.reshape(rows, -1, size).transpose(0, 2, 1)
        return moved
    xp = namespace(values)
    origins = xp.argsort(array_like(permutation, values), axis=1)
    origins = xp.reshape(origins, (rows, *(1,) * (values.ndim - 2), size))
    return xp.take_along_axis(values, xp.broadcast_to(origins, values.shape), axis=values.ndim - 1)


# ---------------------------------------------------------------------- numbers


def _scale_and_shift(field: str, values: Array, affine: Affine, *, own: bool) -> Array:
    xp = namespace(values)
    if not xp.isdtype(values.dtype, "real floating"):
        raise SchemaError(f"augment: {field}: expected a floating dtype to scale or shift, found {values.dtype}")
    scale, shift = (None if part is None else _scalar(xp, values, _by_axes(field, values, part)) for part in affine)
    fresh = own and is_numpy_array(values)
    if scale is not None:
        # Memory that was written to before causes no page faults.
        scaled = np.multiply(values, scale, out=values) if fresh else values * scale
        if shift is not None and is_jax_array(values):
            # XLA would fuse the two operations into one, which rounds once instead of twice, so that under jit a third
            # of the results would differ from NumPy's. This line changes no value, but XLA cannot know that, and does
            # not fuse.
            scaled = xp.where(xp.isnan(values), values, scaled)
        values, fresh = scaled, True
    if shift is None:
        return values
    if not fresh:
        return values + shift
    values += shift
    return values


def _by_axes(field: str, values: Array, part: Array) -> Array:
    """Return a scale or shift with axes that match the axes of ``values``.

    Example: for values ``[B, S, K, 7]``, a scale ``[B, 1, 7]`` becomes ``[B, 1, 1, 7]``.
    """
    if not part.ndim:
        return part
    shape = (*part.shape[:2], *(1,) * (values.ndim - part.ndim), *part.shape[2:])
    sizes = zip(shape, values.shape, strict=False)
    if len(shape) != values.ndim or shape[0] != len(values) or any(size not in (1, of) for size, of in sizes):
        raise SchemaError(
            f"augment: {field}: expected a scale and a shift that fit shape {tuple(values.shape)}, "
            f"found {tuple(part.shape)}"
        )
    return part.reshape(shape)


def _scalar(xp: Any, values: Array, scalar: Array) -> Array:
    """Convert a number, or an array of numbers, to an array in the dtype of ``values``."""
    scalar = array_like(scalar, values)
    if xp.isdtype(values.dtype, "real floating") and xp.finfo(values.dtype).bits < 32:
        # JAX without x64 rounds to float32 first, so all frameworks do.
        scalar = xp.astype(scalar, xp.float32)
    return xp.astype(scalar, values.dtype)
