"""Functions that crop images and change their pixels, written with the array API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from array_api_compat import is_numpy_array, is_torch_array

from mouse_core.dtypes import array_like, namespace
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.randomness import Key
from mouse_core.spec import check_count

Array = Any

PerImage = Literal["sequence", "step"]
""""sequence": all images of a sequence share a random number; "step": a random number is drawn for each step."""


def check_choice(where: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError if ``value`` is not one of ``choices``."""
    # The types must be equal too: 0 == False in Python, but 0 is not accepted for False.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(f"{where}: expected one of {list(choices)}, found {value!r}")


@dataclass(frozen=True)
class RandomShift:
    """A random shift of images by up to ``pad`` pixels in each direction; the pixels at the border are repeated.

    ``RandomShift`` is the augmentation of DrQ (Kostrikov, Yarats and Fergus, "Image Augmentation Is All You Need:
    Regularizing Deep Reinforcement Learning from Pixels", ICLR 2021), with 4 pixels for images of 84x84.

    Args:
        pad: The largest shift in pixels, at least 1.
        per: "sequence": all images of a sequence are shifted equally; "step": each image is shifted separately.

    Raises:
        ConfigError: ``pad`` is below 1, or ``per`` is unknown.
    """

    pad: int = 4
    per: PerImage = "sequence"

    def __post_init__(self) -> None:
        check_count("RandomShift: pad", self.pad, lowest=1)
        check_choice("RandomShift: per", self.per, get_args(PerImage))


@dataclass(frozen=True)
class RandomCrop:
    """A crop of ``height`` by ``width`` pixels at a random position of the image.

    ``RandomCrop`` is the augmentation of RAD (Laskin, Lee, Stooke, Pinto, Abbeel and Srinivas, "Reinforcement Learning
    with Augmented Data", NeurIPS 2020), which crops images of 100x100 to 84x84.

    Args:
        height: Number of rows of the crop.
        width: Number of columns of the crop.
        per: "sequence": all images of a sequence have the same crop; "step": a crop is drawn for each image.

    Raises:
        ConfigError: A size is below 1, or ``per`` is unknown.
    """

    height: int
    width: int
    per: PerImage = "sequence"

    def __post_init__(self) -> None:
        check_count("RandomCrop: height", self.height, lowest=1)
        check_count("RandomCrop: width", self.width, lowest=1)
        check_choice("RandomCrop: per", self.per, get_args(PerImage))


def check_rows(field: str, values: Array, *expected: int) -> None:
    """Raise SchemaError unless the first axes of an array have the expected lengths."""
    if values.ndim < 2 or tuple(values.shape[: len(expected)]) != expected:
        wanted = ", ".join(str(size) for size in expected)
        raise SchemaError(
            f"augment: {field}: expected shape [{wanted}, ...], as in the draws, found shape {tuple(values.shape)}"
        )


def arange(xp: Any, values: Array, count: int) -> Array:
    """Return ``0..count - 1`` in default integers, on the device of ``values``."""
    return xp.arange(count, device=values.device) if is_torch_array(values) else xp.arange(count)


# If the last axis is longer than this, images need ``image_shape``, because the last axis may be the width.
_MOST_CHANNELS = 4

Empty = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""A function that returns memory for a new array of a shape and dtype, like ``np.empty``."""


ImageShapes = tuple[int, int, int] | Mapping[str, tuple[int, int, int]] | None
"""The shape ``(H, W, C)`` of the images of ``obs_image``, or a dict from field to shape for several fields."""


def shape_of_images(image_shape: ImageShapes, field: str) -> tuple[int, int, int] | None:
    """Return the shape ``(H, W, C)`` of a field's images; None if the shape is unknown."""
    if isinstance(image_shape, Mapping):
        return image_shape.get(field)
    return image_shape if field == "obs_image" else None


class Crop(NamedTuple):
    """The rows and columns of a crop: ``out[y, x] = image[rows[y], columns[x]]``.

    Args:
        rows: The indices of the rows, int64 ``[B, T, H']``, where T is 1 (one crop per sequence) or S (one crop per
            step).
        columns: The indices of the columns, int64 ``[B, T, W']``.
    """

    rows: Any
    columns: Any


class ImageDraws(NamedTuple):
    """The drawn augmentation of a field's images.

    Args:
        crop: The rows and columns of the crop; None: images are not cropped.
        pixels: The new value for each pixel value, uint8 ``[256]``; None: pixels stay unchanged.
    """

    crop: Crop | None
    pixels: Any


def crop_size(
    config: RandomShift | RandomCrop, image_shape: tuple[int, int, int] | None, field: str = "obs_image"
) -> tuple[int, int]:
    """Return the height and the width of cropped images.

    Raises:
        ConfigError: The image size is unknown, or smaller than the crop.
    """
    if image_shape is None:
        raise ConfigError(f"crop_{field}: expected the image_shape (H, W, C) of {field}, found None")
    height, width, _ = image_shape
    if isinstance(config, RandomShift):
        return height, width
    if config.height > height or config.width > width:
        raise ConfigError(
            f"crop_{field}: expected a crop of at most {height}x{width}, found {config.height}x{config.width}"
        )
    return config.height, config.width


def pixel_table(scale: float, shift: float) -> npt.NDArray[np.uint8]:
    """Return the new value for each pixel value, uint8 ``[256]``: with 0.5 and 10, pixel 100 becomes 60."""
    return np.clip(np.round(np.arange(256) * scale + shift), 0, 255).astype(np.uint8)


def draw_crop(
    config: RandomShift | RandomCrop,
    streams: tuple[Key, Key],
    shape: tuple[int, int],
    image_shape: tuple[int, int, int] | None,
    field: str,
) -> Crop:
    """Draw the crop of a field's images. ``streams`` are the random streams of the crop's first row and first
    column.
    """
    batch, length = shape
    times = length if config.per == "step" else 1
    size = crop_size(config, image_shape, field)
    parts = []
    for extent, kept, stream in zip(image_shape or (), size, streams, strict=False):
        pad = config.pad if isinstance(config, RandomShift) else 0
        first = stream.integers(extent + 2 * pad - kept + 1, batch * times) - pad
        places = first.reshape(batch, times, 1) + np.arange(kept)
        parts.append(np.clip(places, 0, extent - 1))
    return Crop(*parts)


def change_images(
    images: Array,
    crop: Crop | None,
    pixels: Array | None,
    image_shape: tuple[int, int, int] | None,
    empty: Empty,
    field: str = "obs_image",
) -> Array:
    """Crop images ``[B, S, H, W, C]`` and replace their pixel values. Images may also be flattened, or have an axis of
    K offsets, ``[B, S, K, ...]``.
    """
    if crop is not None:
        check_rows(field, images, len(crop.rows))
        axes, pixels_each = images.shape[:-1], 0 if image_shape is None else math.prod(image_shape)
        flat = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == pixels_each)
        if flat:
            images = images.reshape((*axes, *_image_shape(field, images, image_shape)))
        if images.ndim not in (5, 6) or crop.rows.shape[1] not in (1, images.shape[1]):
            raise SchemaError(
                f"augment: {field}: expected [B, S, H, W, C] with the B and S of the draws, found shape "
                f"{tuple(images.shape)}"
            )
        shape = tuple(images.shape[-3:])
        if not flat and shape[2] > _MOST_CHANNELS and tuple(image_shape or ()) != shape:
            raise SchemaError(
                f"augment: {field}: expected images [B, S, H, W, C] of 1 to {_MOST_CHANNELS} channels, found shape "
                f"{tuple(images.shape)}; image_shape=(H, W, C) allows more channels"
            )
        images = _cropped(images, Crop(array_like(crop.rows, images), array_like(crop.columns, images)), empty)
        if flat:
            images = images.reshape((*axes, -1))
    return images if pixels is None else _map_pixels(images, array_like(pixels, images), empty)


def _cropped(images: Array, crop: Crop, empty: Empty) -> Array:
    """Return the result of ``crop_images`` for steps with K images, ``[B, S, K, H, W, C]``; the K images of a step
    share one crop.
    """
    if images.ndim == 5:
        return crop_images(images, crop, empty)
    batch, length, offsets, *image = images.shape
    if crop.rows.shape[1] != 1:
        # With 2 steps of 3 images each, the crops 0, 1 become the crops 0, 0, 0, 1, 1, 1 of the images.
        crop = Crop(*(_repeated(places, offsets) for places in crop))
    cropped = crop_images(images.reshape((batch, length * offsets, *image)), crop, empty)
    return cropped.reshape((batch, length, offsets, *cropped.shape[2:]))


def _repeated(places: Array, times: int) -> Array:
    """Repeat each step of an array ``[B, T, n]`` ``times`` times; the result is ``[B, T * times, n]``."""
    batch, crops, count = places.shape
    wide = namespace(places).broadcast_to(places[:, :, None], (batch, crops, times, count))
    return wide.reshape((batch, crops * times, count))


def crop_images(images: Any, crop: Crop, empty: Empty = np.empty) -> Any:
    """Return ``out[b, s, y, x] = images[b, s, rows[b, t, y], columns[b, t, x]]``; here t is s, or 0 if each sequence
    has a single crop.

    Args:
        images: The images, an array ``[B, S, H, W, C]`` of NumPy, torch or JAX, of any dtype.
        crop: The rows and columns, arrays of the same framework; see ``Crop``.
        empty: A function that returns memory for a new NumPy array.

    Returns:
        ``[B, S, H', W', C]``, a new array.
    """
    if is_numpy_array(images):
        return _copy_parts(images, crop, empty)
    xp = namespace(images)
    batch, length, _, width, channels = images.shape
    height_out, width_out = crop.rows.shape[2], crop.columns.shape[2]
    rows = xp.broadcast_to(crop.rows[..., None, None], (batch, length, height_out, width, channels))
    taken = xp.take_along_axis(images, rows, axis=2)
    columns = xp.broadcast_to(crop.columns[:, :, None, :, None], (batch, length, height_out, width_out, channels))
    return xp.take_along_axis(taken, columns, axis=3)


def _copy_parts(images: npt.NDArray[Any], crop: Crop, empty: Empty) -> npt.NDArray[Any]:
    """Crop images by copying rectangles. The rows and columns of a crop must be ranges that are clipped at the borders
    of the image.
    """
    batch, length, height, width, channels = images.shape
    times = crop.rows.shape[1]
    height_out, width_out = crop.rows.shape[2], crop.columns.shape[2]
    cropped = empty((batch, length, height_out, width_out, channels), images.dtype)
    # All images of one crop together: [B * T, S / T, H, W, C].
    sources = images.reshape(batch * times, -1, height, width, channels)
    targets = cropped.reshape(batch * times, -1, height_out, width_out, channels)
    pixels = height * width * channels
    tops, lefts = _first(crop.rows), _first(crop.columns)
    for source, target, top, left in zip(sources, targets, tops, lefts, strict=True):
        y, x = max(0, -top), max(0, -left)
        y_end, x_end = min(height_out, height - top), min(width_out, width - left)
        if width == width_out and height == height_out:
            # Copying one run of pixels for each image is several times faster than one run for each image row. The
            # pixels that wrap around from the other side of the image are overwritten below.
            moved = (top * width + left) * channels
            begin, end = max(0, -moved), min(pixels, pixels - moved)
            target.reshape(-1, pixels)[:, begin:end] = source.reshape(-1, pixels)[:, begin + moved : end + moved]
        else:
            target[:, y:y_end, x:x_end] = source[:, top + y : top + y_end, left + x : left + x_end]
        # Beyond the border of the image, the outermost pixels are repeated.
        if x:
            target[:, y:y_end, :x] = target[:, y:y_end, x : x + 1]
        if x_end < width_out:
            target[:, y:y_end, x_end:] = target[:, y:y_end, x_end - 1 : x_end]
        if y:
            target[:, :y] = target[:, y : y + 1]
        if y_end < height_out:
            target[:, y_end:] = target[:, y_end - 1 : y_end]
    return cropped


def _first(places: npt.NDArray[np.int64]) -> list[int]:
    """Return the start that each range had before it was clipped at 0."""
    places = places.reshape(-1, places.shape[-1])
    before = np.maximum((places == 0).sum(axis=1) - 1, 0)
    first: list[int] = (places[np.arange(len(places)), before] - before).tolist()
    return first


def _image_shape(field: str, images: Array, image_shape: tuple[int, int, int] | None) -> tuple[int, int, int]:
    if image_shape is None:
        raise ConfigError(f"crop_{field}: expected the image_shape (H, W, C) of a flattened {field}, found None")
    if images.shape[-1] != int(np.prod(image_shape)):
        raise SchemaError(
            f"augment: {field}: expected {int(np.prod(image_shape))} pixels for images {tuple(image_shape)}, "
            f"found shape {tuple(images.shape)}"
        )
    return image_shape


def _map_pixels(images: Array, table: Array, empty: Empty) -> Array:
    """Return ``table[pixel]`` for every pixel; a pixel outside 0..255 is treated as 0 or 255, and NaN stays NaN.

    A table gives the same values in all frameworks, while arithmetic under ``jax.jit`` may round differently.
    """
    xp = namespace(images)
    floating = xp.isdtype(images.dtype, "real floating")
    table = xp.astype(table, images.dtype)
    if is_numpy_array(images) and not floating:
        mapped = empty(images.shape, images.dtype)
        # NumPy converts indices to 64 bits; row by row, this needs little memory.
        for source, target in zip(images, mapped, strict=True):
            np.take(table, source, out=target, mode="clip")
        return mapped
    places = xp.clip(xp.round(images), 0, 255) if floating else xp.clip(images, 0, 255)
    if floating:
        places = xp.where(xp.isnan(images), xp.zeros_like(images), places)
    places = xp.astype(places, arange(xp, images, 1).dtype)
    mapped = xp.reshape(xp.take(table, xp.reshape(places, (-1,))), images.shape)
    return xp.where(xp.isnan(images), images, mapped) if floating else mapped
