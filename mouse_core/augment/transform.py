"""Applying draws to a batch: pure functions over the array API, for NumPy, torch and JAX (also under ``jax.jit``).

Values are the same to the bit in all of them, subnormal numbers aside, which XLA flushes to zero on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import numpy as np
from array_api_compat import is_jax_array, is_numpy_array, is_torch_array

from mouse_core.augment.config import MASKED_AS
from mouse_core.augment.draws import Affine, Crop, Draws
from mouse_core.augment.images import Empty, crop_images
from mouse_core.dtypes import namespace
from mouse_core.errors import ConfigError, DataError, SchemaError

Array = Any

# Images with more of them say how many there are: what comes last may be a width.
_MOST_CHANNELS = 4
M = TypeVar("M", bound=Mapping[str, Any])


def apply(
    batch: M,
    draws: Draws,
    *,
    image_shape: tuple[int, int, int] | None = None,
    validate: bool | None = None,
) -> M | dict[str, Array]:
    """The augmented batch. The batch that is given is not modified; fields that stay are shared with it.

    Args:
        batch: Arrays ``[B, S, ...]`` by field, of NumPy, torch (on any device) or JAX (also traced by ``jax.jit``).
        draws: What ``draw`` gave for this batch's ``(B, S)``; its arrays are moved to where the batch is.
        image_shape: ``(H, W, C)`` of a flattened ``obs_image`` that is cropped; not needed for ``[B, S, H, W, C]``.
        validate: Whether codes out of range (actions, done, states) are an error. None: yes for NumPy arrays and for
            torch tensors on the CPU, no elsewhere, since on a device the check waits for everything queued there.
            Where it is not checked, such a code stays as it is. Under ``jax.jit`` it cannot be checked.

    Returns:
        A dict, with the masks that are delivered as ``<field>_mask``; the same object ``batch`` if nothing changes.

    Raises:
        DataError: A code out of range; the message names field, value and place.
        SchemaError: A field whose shape or dtype does not suit what is done to it.
    """
    changed = transform(batch, draws, image_shape=image_shape, validate=validate)
    changed.update(mask({**batch, **changed}, draws, own=changed))
    return {**batch, **changed} if changed else batch


def transform(
    batch: Mapping[str, Array],
    draws: Draws,
    *,
    image_shape: tuple[int, int, int] | None = None,
    validate: bool | None = None,
    own: Collection[str] = (),
    empty: Empty = np.empty,
) -> dict[str, Array]:
    """The fields that all but the masks change; see ``apply``.

    Args:
        batch, draws, image_shape, validate: See ``apply``.
        own: Fields whose arrays nobody else holds: they may be written to.
        empty: Gives memory for new NumPy arrays.
    """
    changed = {}
    for field, permutation in draws.permutations.items():
        if field in batch:
            _check_rows(field, batch[field], len(permutation))
            if field == "q_star":
                changed[field] = _permute_columns(batch[field], permutation, empty)
            else:
                changed[field] = _rename(field, batch[field], permutation, validate)
    for field, affine in draws.affine.items():
        if field in batch:
            changed[field] = _scale_and_shift(field, batch[field], affine, own=field in own)
    if "obs_image" in batch and (draws.crop is not None or draws.pixels is not None):
        changed["obs_image"] = _change_images(batch["obs_image"], draws.crop, draws.pixels, image_shape, empty)
    return changed


def mask(
    batch: Mapping[str, Array], draws: Draws, *, own: Collection[str] = (), empty: Empty = np.empty
) -> dict[str, Array]:
    """The fields that masks change, and the masks that are delivered.

    Args:
        batch: Arrays by field.
        draws: The draws.
        own, empty: See ``transform``.
    """
    changed = {}
    for field, hidden in {**draws.masks, **draws.delivered_masks}.items():
        if field in batch:
            values = batch[field]
            _check_rows(field, values, *hidden.shape)
            hidden = _beside(hidden, values)
            fill = MASKED_AS.get(field, 0)
            if fill < 0 and not namespace(values).isdtype(values.dtype, ("signed integer", "real floating")):
                wanted = f"expected a signed dtype, for {fill} where masked"
                raise SchemaError(f"augment: {field}: {wanted}, found {values.dtype}")
            changed[field] = _fill(values, hidden, fill, None if field in own else empty)
            if field in draws.delivered_masks:
                changed[f"{field}_mask"] = hidden
    return changed


def _check_rows(field: str, values: Array, *expected: int) -> None:
    if values.ndim < 2 or tuple(values.shape[: len(expected)]) != expected:
        wanted = ", ".join(str(size) for size in expected)
        raise SchemaError(
            f"augment: {field}: expected [{wanted}, ...] as it was drawn for, found shape {tuple(values.shape)}"
        )


def _beside(array: Array, values: Array) -> Array:
    """``array``, where ``values`` are and of their kind."""
    if is_numpy_array(values):
        return np.asarray(array)
    if is_torch_array(values):
        return namespace(values).asarray(array, device=values.device)
    return namespace(values).asarray(array)


def _fill(values: Array, hidden: Array, fill: int, empty: Empty | None) -> Array:
    """``values`` with ``fill`` where ``hidden``; without ``empty`` they may be written to themselves."""
    if is_numpy_array(values):
        filled = values
        if empty is not None or not values.flags.writeable:
            filled = (empty or np.empty)(values.shape, values.dtype)
            filled[...] = values
        if filled.flags.c_contiguous and filled.size:
            # By number of the step: twice as fast as by the mask itself where a step holds many values.
            filled.reshape(hidden.size, -1)[np.flatnonzero(hidden)] = fill
        else:
            filled[hidden] = fill
        return filled
    xp = namespace(values)
    hidden = xp.reshape(hidden, (*hidden.shape, *(1,) * (values.ndim - 2)))
    # Through an array of the same dtype, so that nothing is promoted.
    return xp.where(hidden, xp.full_like(values[:1, :1], fill), values)


# ---------------------------------------------------------------------- codes and columns


def _rename(field: str, codes: Array, permutation: Array, validate: bool | None) -> Array:
    """``permutation[b, codes[b, s]]``."""
    xp = namespace(codes)
    size = permutation.shape[1]
    if codes.ndim != 2 or not xp.isdtype(codes.dtype, "integral"):
        raise SchemaError(
            f"augment: {field}: expected integer codes [B, S] to permute, found {codes.dtype} {tuple(codes.shape)}"
        )
    if xp.iinfo(codes.dtype).max < size - 1:
        raise SchemaError(f"augment: {field}: expected a dtype that holds 0..{size - 1}, found {codes.dtype}")
    permutation = _beside(permutation, codes)
    rows = xp.reshape(_arange(xp, codes, codes.shape[0]), (-1, 1))
    # The default integers: int64, or int32 in JAX without x64. Codes that they cannot hold become negative.
    places = xp.astype(codes, rows.dtype)
    table = xp.reshape(xp.astype(permutation, codes.dtype, copy=False), (-1,))
    if _is_on_host(codes) if validate is None else validate:
        _check_codes(field, codes, places, size)
        return xp.reshape(xp.take(table, xp.reshape(places + rows * size, (-1,))), codes.shape)
    within = xp.clip(places, 0, size - 1)
    renamed = xp.reshape(xp.take(table, xp.reshape(within + rows * size, (-1,))), codes.shape)
    return xp.where(places == within, renamed, codes)


def _arange(xp: Any, values: Array, count: int) -> Array:
    return xp.arange(count, device=values.device) if is_torch_array(values) else xp.arange(count)


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
    row, step = (int(place) for place in np.argwhere(outside)[0])
    found = f"found {int(codes[row, step])} at row {row}, step {step} of the batch"
    raise DataError(f"augment: {field}: expected 0..{size - 1}, {found}")


def _permute_columns(values: Array, permutation: Array, empty: Empty) -> Array:
    """``out[b, s, permutation[b, a]] = values[b, s, a]``."""
    rows, size = permutation.shape
    if values.ndim != 3 or values.shape[2] != size:
        raise SchemaError(
            f"augment: q_star: expected [B, S, {size}] for {size} actions, found shape {tuple(values.shape)}"
        )
    if is_numpy_array(values):
        # One index a column of a row, each naming S values: 5 times faster than one index a value.
        moved = empty(values.shape, values.dtype)
        places = np.arange(rows)[:, None], np.asarray(permutation)
        moved.transpose(0, 2, 1)[places] = values.transpose(0, 2, 1)
        return moved
    xp = namespace(values)
    origins = xp.argsort(_beside(permutation, values), axis=1)
    return xp.take_along_axis(values, xp.broadcast_to(origins[:, None, :], values.shape), axis=2)


# ---------------------------------------------------------------------- numbers and pixels


def _scale_and_shift(field: str, values: Array, affine: Affine, *, own: bool) -> Array:
    xp = namespace(values)
    if not xp.isdtype(values.dtype, "real floating"):
        raise SchemaError(f"augment: {field}: expected floating numbers to scale or shift, found {values.dtype}")
    scale, shift = (None if part is None else _scalar(xp, values, part) for part in affine)
    fresh = own and is_numpy_array(values)
    if scale is not None:
        # Memory that is written to already costs no page faults.
        scaled = np.multiply(values, scale, out=values) if fresh else values * scale
        if shift is not None and is_jax_array(values):
            # XLA would compile the two operations into one, which rounds once instead of twice: under jit a third of
            # the results would differ from NumPy's. It cannot see that this changes nothing, and leaves them apart.
            scaled = xp.where(xp.isnan(values), values, scaled)
        values, fresh = scaled, True
    if shift is None:
        return values
    if not fresh:
        return values + shift
    values += shift
    return values


def _scalar(xp: Any, values: Array, scalar: Array) -> Array:
    """A float64 ``[]`` in the dtype of ``values``."""
    scalar = _beside(scalar, values)
    if xp.finfo(values.dtype).bits < 32:
        # JAX without x64 rounds to float32 on the way, so all do.
        scalar = xp.astype(scalar, xp.float32)
    return xp.astype(scalar, values.dtype)


def _change_images(
    images: Array,
    crop: Crop | None,
    pixels: Array | None,
    image_shape: tuple[int, int, int] | None,
    empty: Empty,
) -> Array:
    if crop is not None:
        _check_rows("obs_image", images, len(crop.rows))
        flat = images.ndim == 3
        if flat:
            images = images.reshape((*images.shape[:2], *_image_shape(images, image_shape)))
        if images.ndim != 5 or crop.rows.shape[1] not in (1, images.shape[1]):
            raise SchemaError(
                f"augment: obs_image: expected [B, S, H, W, C] as it was drawn for, found shape {tuple(images.shape)}"
            )
        if not flat and images.shape[4] > _MOST_CHANNELS and tuple(image_shape or ()) != tuple(images.shape[2:]):
            raise SchemaError(
                f"augment: obs_image: expected images [B, S, H, W, C] of 1 to {_MOST_CHANNELS} channels, found shape "
                f"{tuple(images.shape)}; image_shape=(H, W, C) says that there are so many"
            )
        images = crop_images(images, Crop(_beside(crop.rows, images), _beside(crop.columns, images)), empty)
        if flat:
            images = images.reshape((*images.shape[:2], -1))
    return images if pixels is None else _map_pixels(images, _beside(pixels, images), empty)


def _image_shape(images: Array, image_shape: tuple[int, int, int] | None) -> tuple[int, int, int]:
    if image_shape is None:
        raise ConfigError("crop_obs_image: expected the image_shape (H, W, C) of a flattened obs_image, found None")
    if images.shape[2] != int(np.prod(image_shape)):
        raise SchemaError(
            f"augment: obs_image: expected {int(np.prod(image_shape))} pixels for images {tuple(image_shape)}, "
            f"found shape {tuple(images.shape)}"
        )
    return image_shape


def _map_pixels(images: Array, table: Array, empty: Empty) -> Array:
    """``table[pixel]`` for every pixel; those outside 0..255 count as the nearest inside, NaN stays.

    A table, rather than arithmetic, is exact everywhere; also under ``jax.jit``, which may round otherwise.
    """
    xp = namespace(images)
    floating = xp.isdtype(images.dtype, "real floating")
    table = xp.astype(table, images.dtype)
    if is_numpy_array(images) and not floating:
        mapped = empty(images.shape, images.dtype)
        # NumPy widens indices to 64 bits: row by row, that takes little memory.
        for source, target in zip(images, mapped, strict=True):
            np.take(table, source, out=target, mode="clip")
        return mapped
    places = xp.clip(xp.round(images), 0, 255) if floating else xp.clip(images, 0, 255)
    if floating:
        places = xp.where(xp.isnan(images), xp.zeros_like(images), places)
    places = xp.astype(places, _arange(xp, images, 1).dtype)
    mapped = xp.reshape(xp.take(table, xp.reshape(places, (-1,))), images.shape)
    return xp.where(xp.isnan(images), images, mapped) if floating else mapped
