"""Resize, CenterCrop, GrayScale and ToFloatImage: transforms of images for networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import is_tensor, may_look, namespace
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.nested import find
from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.transforms.fields import check_keys, device_of, replaced
from mouse_core.spec import check_dtype

Array = Any

# Size in bytes (as float32) of the images that are resized together, which then fit into the cache.
_BLOCK_BYTES = 1 << 21
# Images with more channels need ``layout``.
_MOST_CHANNELS = 4


@dataclass(frozen=True, init=False)
class _OfImages:
    """Base class of transforms that change fields of images."""

    keys: tuple[FieldKey, ...]
    layout: Literal["HWC", "CHW"] | None

    def _set(self, keys: tuple[FieldKey, ...], layout: Any, **own: Any) -> None:
        where = type(self).__name__
        if not keys:
            raise ConfigError(f"{where}: expected at least one field of images, found none")
        if layout not in (None, "HWC", "CHW"):
            raise ConfigError(f"{where}: layout: expected 'HWC' or 'CHW', found {layout!r}")
        vars(self).update(own, keys=check_keys(keys, where=where), layout=layout)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the images changed."""
        where = type(self).__name__
        return replaced(batch, {key: self._changed(find(batch, key, where=where), key) for key in self.keys})

    def _changed(self, values: Array, key: FieldKey) -> Array:
        raise NotImplementedError

    def _images(self, values: Array, key: FieldKey) -> Array:
        """Return the images of a field as ``[..., H, W, C]``."""
        expected = f"{type(self).__name__}: {key!r}: expected"
        if values.ndim < 3:
            raise SchemaError(f"{expected} images [..., H, W, C], found shape {list(values.shape)}")
        if self.layout is None and values.shape[-1] > _MOST_CHANNELS:
            raise SchemaError(
                f"{expected} images [..., H, W, C] of 1 to {_MOST_CHANNELS} channels, found shape "
                f"{list(values.shape)}; layout='CHW' means that channels come first, 'HWC' allows more channels"
            )
        return _moved(values, to="last") if self.layout == "CHW" else values

    def _laid_out(self, images: Array) -> Array:
        """Convert images ``[..., H, W, C]`` to the layout of the field, as a copy."""
        if self.layout == "CHW":
            images = _moved(images, to="first")
        # A crop, or an image with moved channels, is not contiguous, but frameworks need contiguous arrays.
        return np.ascontiguousarray(images) if isinstance(images, np.ndarray) else images


@dataclass(frozen=True, init=False)
class Resize(_OfImages):
    """Resizes images ``[..., H, W, C]`` or ``[..., C, H, W]`` to ``size``, keeping their dtype and layout.

    "bilinear" weights the old pixels around each new pixel with a triangle filter. If images shrink, the filter is
    widened so that no pixel is skipped, like Pillow's BILINEAR and torch's ``interpolate(antialias=True)``. Integers
    are rounded to the nearest. "nearest" copies the old pixel that lies at the centre of the new pixel.

    Args:
        keys: Fields of images.
        size: ``(height, width)`` of the delivered images.
        method: "bilinear" or "nearest".
        layout: "HWC" or, as in torch, "CHW". None: "HWC", where the last axis must have 1 to 4 channels.

    Raises:
        ConfigError: No field is given, the size is invalid, or the method or layout is unknown.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: A field does not contain images, or its layout is ambiguous without ``layout``.
    """

    size: tuple[int, int]
    method: Literal["bilinear", "nearest"]

    def __init__(
        self,
        *keys: FieldKey,
        size: tuple[int, int],
        method: Literal["bilinear", "nearest"] = "bilinear",
        layout: Literal["HWC", "CHW"] | None = None,
    ) -> None:
        if method not in ("bilinear", "nearest"):
            raise ConfigError(f"Resize: method: expected 'bilinear' or 'nearest', found {method!r}")
        self._set(keys, layout, size=_size(size, "Resize"), method=method)

    def _changed(self, values: Array, key: FieldKey) -> Array:
        images = self._images(values, key)
        height, width = self.size
        if tuple(images.shape[-3:-1]) == self.size:
            return values
        if self.method == "nearest":
            rows = _beside(images, _nearest, images.shape[-3], height)
            columns = _beside(images, _nearest, images.shape[-2], width)
            resized = images[..., rows[:, None], columns[None, :], :]
        else:
            resized = _bilinear(images, height, width)
        return self._laid_out(resized)


@dataclass(frozen=True, init=False)
class CenterCrop(_OfImages):
    """Crops the centre of images ``[..., H, W, C]``, keeping their dtype and layout.

    If an odd number of pixel rows or columns is removed, one more is removed on one side than on the other; Python's
    ``round`` determines this side, as in torchvision.

    Args:
        keys: Fields of images.
        size: ``(height, width)`` of the delivered images.
        layout: See ``Resize``.

    Raises:
        ConfigError: No field is given, the size is invalid, or the layout is unknown.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: A field does not contain images, or the images are smaller than ``size``.
    """

    size: tuple[int, int]

    def __init__(
        self,
        *keys: FieldKey,
        size: tuple[int, int],
        layout: Literal["HWC", "CHW"] | None = None,
    ) -> None:
        self._set(keys, layout, size=_size(size, "CenterCrop"))

    def _changed(self, values: Array, key: FieldKey) -> Array:
        images = self._images(values, key)
        left = [old - new for old, new in zip(images.shape[-3:-1], self.size, strict=True)]
        if min(left) < 0:
            found = list(images.shape[-3:-1])
            raise SchemaError(f"CenterCrop: {key!r}: expected images of {list(self.size)} or larger, found {found}")
        top, side = (round(count / 2) for count in left)
        return self._laid_out(images[..., top : top + self.size[0], side : side + self.size[1], :])


# Luminance weights of red, green and blue: ITU-R BT.601.
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, init=False)
class GrayScale(_OfImages):
    """Converts RGB images to greyscale images with one channel, keeping their dtype and layout.

    The result is ``0.299 R + 0.587 G + 0.114 B`` (ITU-R BT.601), computed in float32; integers are rounded to the
    nearest.

    Args:
        keys: Fields of images, ``[..., H, W, 3]`` or ``[..., 3, H, W]``.
        layout: See ``Resize``.

    Raises:
        ConfigError: No field is given, or the layout is unknown.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: A field does not contain images of three channels.
    """

    def __init__(
        self,
        *keys: FieldKey,
        layout: Literal["HWC", "CHW"] | None = None,
    ) -> None:
        self._set(keys, layout)

    def _changed(self, values: Array, key: FieldKey) -> Array:
        images = self._images(values, key)
        if images.shape[-1] != len(_LUMA):
            raise SchemaError(f"GrayScale: {key!r}: expected images of 3 channels, found shape {list(values.shape)}")
        xp = namespace(images)
        red, green, blue = (xp.astype(images[..., channel : channel + 1], xp.float32) for channel in range(3))
        gray = red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]
        if xp.isdtype(images.dtype, "integral"):
            gray = xp.floor(gray + 0.5)
        return self._laid_out(xp.astype(gray, images.dtype))


@dataclass(frozen=True, init=False)
class ToFloatImage(_OfImages):
    """Converts images of integers in 0..255 to floats in 0..1.

    Pixels outside 0..255 raise DataError. In compiled code and on devices, where values are not checked, such pixels
    become NaN.

    Args:
        keys: Fields of images, ``[..., H, W, C]`` or ``[..., C, H, W]``.
        channels: The position of the channels in the result: "last", ``[..., H, W, C]`` as Flax expects, or "first",
            ``[..., C, H, W]`` as torch expects.
        dtype: A floating dtype.
        layout: "HWC" or "CHW", the layout of the stored images. None: "HWC", where the last axis must have 1 to 4
            channels.

    Raises:
        ConfigError: No field is given, ``channels`` or ``layout`` is unknown, or the dtype is not a floating dtype.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: A field does not contain images of integers, or its layout is ambiguous without ``layout``.
        DataError: A pixel is outside 0..255.
    """

    channels: Literal["first", "last"]
    dtype: np.dtype[Any]

    def __init__(
        self,
        *keys: FieldKey,
        channels: Literal["first", "last"] = "last",
        dtype: npt.DTypeLike = "float32",
        layout: Literal["HWC", "CHW"] | None = None,
    ) -> None:
        if channels not in ("first", "last"):
            raise ConfigError(f"ToFloatImage: channels: expected 'first' or 'last', found {channels!r}")
        checked = check_dtype(dtype, where="ToFloatImage: dtype")
        if checked.kind != "f":
            raise ConfigError(f"ToFloatImage: dtype: expected a floating dtype, found {checked}")
        self._set(keys, layout, channels=channels, dtype=checked)

    def _changed(self, values: Array, key: FieldKey) -> Array:
        images = self._images(values, key)
        xp = namespace(images)
        if not xp.isdtype(images.dtype, "integral"):
            raise SchemaError(f"ToFloatImage: {key!r}: expected whole numbers 0..255, found {images.dtype}")
        if self.channels == "first":
            images = _moved(images, to="first")
        floating = getattr(xp, self.dtype.name)
        scaled = xp.astype(images, floating) / 255
        if str(images.dtype).split(".")[-1] not in ("uint8", "bool"):  # others hold more than 0..255
            scaled = self._within(images, scaled, key)
        # Moving channels only changes strides, but frameworks need contiguous arrays.
        return np.ascontiguousarray(scaled) if isinstance(scaled, np.ndarray) else xp.asarray(scaled, copy=True)

    @staticmethod
    def _within(images: Array, scaled: Array, key: FieldKey) -> Array:
        """Scale pixels to 0..1. A pixel outside 0..255 raises DataError, or becomes NaN in compiled code and on
        devices.
        """
        xp = namespace(images)
        outside = images < 0
        if str(images.dtype).split(".")[-1] != "int8":  # with which torch does not compare 255
            outside = outside | (images > 255)
        if not may_look(images):
            return xp.where(outside, xp.full_like(scaled, float("nan")), scaled)
        if bool(outside.any()):
            found = images[outside].reshape(-1)[0].item()
            raise DataError(f"ToFloatImage: {key!r}: expected pixels 0..255, found {found}")
        return scaled


# ---------------------------------------------------------------------- weights


def _bilinear(images: Array, height: int, width: int) -> Array:
    xp = namespace(images)
    rows, columns = (_beside(images, _weights, *of) for of in ((images.shape[-3], height), (images.shape[-2], width)))
    *lead, old_height, old_width, channels = images.shape
    flat = images.reshape((-1, old_height, old_width, channels))
    whole = xp.isdtype(images.dtype, "integral")

    def resized(part: Array) -> Array:
        count = part.shape[0]
        # [n, H, W * C] from the left by [h, H]; then [n * h, W, C] from the left by [w, W].
        tall = xp.matmul(rows, xp.astype(part, xp.float32).reshape((count, old_height, old_width * channels)))
        made = xp.matmul(columns, tall.reshape((count * height, old_width, channels)))
        made = made.reshape((count, height, width, channels))
        if whole:
            made = xp.floor(made + 0.5)  # weights are positive and sum to 1, so the result stays in range
        return xp.astype(made, images.dtype)

    if may_look(flat):  # in the host's memory, and not traced
        found = xp.empty((flat.shape[0], height, width, channels), dtype=images.dtype)
        block = max(1, _BLOCK_BYTES // (4 * max(1, old_height * old_width * channels)))
        for first in range(0, flat.shape[0], block):
            found[first : first + block] = resized(flat[first : first + block])
    else:
        found = resized(flat)
    return found.reshape((*lead, height, width, channels))


def _beside(images: Array, make: Callable[..., Array], old: int, new: int) -> Array:
    """Return the resize table for an old and a new size, on the device of the images. With torch, the table is computed
    on the device, because a copy from the host would block.
    """
    if is_tensor(images) and not may_look(images):
        return make(old, new, namespace(images), device=images.device)
    known = _kept(make, old, new)
    return namespace(images).asarray(known, device=device_of(images))


@lru_cache(maxsize=64)
def _kept(make: Callable[..., Array], old: int, new: int) -> Array:
    return make(old, new, namespace(np.empty(0)))


def _weights(old: int, new: int, xp: Any, **where: Any) -> Array:
    """Return the weight of each old pixel in each new pixel of an image line, float32 ``[new, old]``; the weights of
    each new pixel sum to 1.
    """
    scale = old / new
    support = max(scale, 1.0)
    centre = (xp.arange(new, dtype=xp.float64, **where) + 0.5) * scale
    distance = abs(xp.arange(old, dtype=xp.float64, **where) + 0.5 - centre[:, None]) / support
    weights = xp.clip(1.0 - distance, 0.0)
    return xp.astype(weights / xp.sum(weights, axis=1, keepdims=True), xp.float32)


def _nearest(old: int, new: int, xp: Any, **where: Any) -> Array:
    """Return the old pixel at the centre of each new pixel, int64 ``[new]``."""
    middle = (xp.arange(new, dtype=xp.float64, **where) + 0.5) * (old / new)
    return xp.clip(xp.astype(middle, xp.int64), None, old - 1)


# ---------------------------------------------------------------------- checks


def _size(size: object, where: str) -> tuple[int, ...]:
    given = size if isinstance(size, tuple | list) else ()
    if len(given) != 2 or not all(is_whole(side) and side > 0 for side in given):
        raise ConfigError(f"{where}: size: expected 2 positive integers, found {size!r}")
    return tuple(map(int, given))


def _moved(images: Array, *, to: Literal["first", "last"]) -> Array:
    """Move the channel axis of images from the last position to the first of the three image axes, or back."""
    axes = tuple(range(images.ndim))
    *lead, one, two, three = axes
    order = (three, one, two) if to == "first" else (two, three, one)
    return namespace(images).permute_dims(images, (*lead, *order))
