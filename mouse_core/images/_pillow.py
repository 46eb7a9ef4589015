"""Pillow, held to what an image of a dataset may be.

What it is handed may have been written by anybody. So it tries the formats of pictures only (others run interpreters),
what a header says is compared before a pixel is decoded, values arrive as they are or not at all, and whatever it
stumbles over is an error of ours.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, convert
from mouse_core.errors import DataError, MouseError

MAX_PIXELS = 1 << 26
"""Pixels that an image may have where nothing says how large it must be."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Modes that are pixels of 8 bits a channel as they stand, and those of one wider channel.
PLAIN_MODES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# Under which keys a file may say how it is to be turned.
_TURNS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
_ORIENTATION = 0x0112
# TIFF's tags of the size of tiles, and how large they may be in small images.
_TILE_SIDES, _USUAL_TILE = (322, 323), 1024
# How to have Pillow unpack a PNG of 16 bits a channel so that the halves it leaves out come out: mode and raw mode.
_OTHER_HALVES = {"RGB;16B": ("RGB", "RGB;16L"), "RGBA;16B": ("RGBA", "RGBA;16L"), "LA;16B": ("RGBA", "RGBA")}


@cache
def pillow() -> Any:
    """Pillow's ``Image``, which knows the formats above."""
    try:
        from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 (they are found once imported)
    except ImportError as error:
        raise ImportError("encoded images need Pillow: pip install 'mouse-data[images]'") from error
    return Image


@contextmanager
def understood(found: str) -> Iterator[None]:
    """Turn whatever Pillow raises into a DataError.

    Args:
        found: What is being read, in words.
    """
    try:
        yield
    except (MouseError, ImportError, MemoryError):
        raise
    except Exception as error:  # whatever it is that a decoder stumbles over
        # The first line of Pillow's own message may hold a memory address.
        known = not isinstance(error, pillow().UnidentifiedImageError) and str(error)
        reason = f": {str(error).splitlines()[0]}" if known else ""
        raise DataError(f"expected a readable image, found {found}{reason}") from error


def open_encoded(source: Any) -> Any:
    """Open an image of one picture; nothing of it is decoded.

    Args:
        source: Its bytes, or a file.
    """
    stream = source if hasattr(source, "read") else io.BytesIO(source)
    image = pillow().open(stream, formats=FORMATS)
    # Further pictures of a JPEG (an MPO) are other renderings of the first.
    if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
        raise DataError(f"expected a single image, found {image.format} of several frames")
    if image.format == "TIFF":
        sides = [image.tag_v2.get(tag, 0) for tag in _TILE_SIDES]
        if max(sides) > max(_USUAL_TILE, *image.size):
            raise DataError(f"expected tiles as large as the image, {list(image.size)}, found {sides}")
    return image


def shape_of(image: Any, turn: int) -> tuple[int, int, int]:
    """``(H, W, C)`` in which an image is delivered."""
    width, height = image.size
    if turn >= 5:
        height, width = width, height
    return height, width, _channels(image)


def check_header(image: Any, turn: int, shape: tuple[int, ...] | None, max_pixels: int) -> None:
    """Raise DataError unless a header promises an image of a shape; None: of any with so many pixels at most."""
    found = shape_of(image, turn)
    if shape is None:
        if found[0] * found[1] > max_pixels:
            raise DataError(
                f"expected an image of at most {max_pixels:,} pixels, found {found[0]} x {found[1]}; "
                "a field whose images are that large says so by its shape"
            )
    # A palette may hold greys, or colours that are all opaque.
    elif found[:2] != tuple(shape[:2]) or (found[2] != shape[2] and image.mode not in ("P", "PA")):
        raise DataError(f"expected shape {list(shape)}, found {list(found)}")


def pixels_of(
    image: Any, turn: int, dtype: np.dtype[Any], *, source: Any = None, channels: int | None = None
) -> npt.NDArray[Any]:
    """The pixels of an image, ``[H, W, C]`` of ``dtype``, if it holds them all.

    Args:
        image: It.
        turn: See ``turn_of``.
        dtype: An integer dtype.
        source: What ``open_encoded`` opened it from; None for an image that the caller made.
        channels: How many a palette's colours are to have.

    Raises:
        DataError: A value that ``dtype`` does not hold, or an image whose values Pillow would change.
    """
    half = left_out(image)
    array: npt.NDArray[Any]
    if half is not None:
        array = _wide_colours(image, half, source)
    elif image.mode in PLAIN_MODES or image.mode in _WIDE_MODES:
        array = np.asarray(image)
    elif image.mode == "1":
        array = np.asarray(image.convert("L"))
    else:
        array = _palette_colours(image, channels)
    array = array.reshape(*array.shape[:2], -1)
    if array.dtype != dtype:
        array = in_range(array.astype(array.dtype.newbyteorder("="), copy=False), dtype)
    return _turned(array, turn)


def in_range(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The same values in ``dtype``, or DataError where it does not hold one."""
    highest = int(np.iinfo(dtype).max)
    if array.dtype.kind in "iu" and array.size and (array.min() < 0 or array.max() > highest):
        raise DataError(f"expected pixels 0..{highest}, found {int(array.min())}..{int(array.max())}")
    try:
        return convert(array, dtype)
    except RowError as error:
        raise DataError(f"expected pixels 0..{highest}: {error}") from error


# ---------------------------------------------------------------------- modes


def _channels(image: Any) -> int:
    if image.mode in ("P", "PA"):
        return 4 if image.mode == "PA" or "transparency" in image.info else 3
    if image.mode == "1" or image.mode in _WIDE_MODES:
        return 1
    if image.mode not in PLAIN_MODES:
        raise DataError(
            f"expected an image of mode {[*PLAIN_MODES, '1', 'P', 'PA', *_WIDE_MODES[:3]]}, found mode {image.mode!r}"
        )
    return PLAIN_MODES[image.mode]


def _palette_colours(image: Any, channels: int | None) -> npt.NDArray[np.uint8]:
    """The colours that a palette's indices stand for, in as many channels as they need at least."""
    own = _channels(image)
    colours: npt.NDArray[np.uint8] = np.asarray(image.convert("RGBA" if own == 4 or channels in (2, 4) else "RGB"))
    opaque = colours.shape[2] == 3 or bool((colours[:, :, 3] == 255).all())
    grey = bool((colours[:, :, :1] == colours[:, :, 1:3]).all())
    if channels == 3 and opaque:
        return colours[:, :, :3]
    if channels == 1 and opaque and grey:
        return colours[:, :, :1]
    if channels == 2 and grey:
        return colours[:, :, 2:]
    return colours


def left_out(image: Any) -> str | None:
    """How Pillow would unpack channels of 16 bits of which it keeps 8; None where it keeps all."""
    tiles = getattr(image, "tile", None)
    if not tiles or image.mode not in PLAIN_MODES:
        return None
    arguments = tiles[0][3]
    raw = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return raw if isinstance(raw, str) and ";16" in raw else None


def _wide_colours(image: Any, raw: str, source: Any) -> npt.NDArray[np.uint16]:
    """The 16 bits a channel of a PNG, of which Pillow gives one half at a time."""
    if image.format != "PNG" or raw not in _OTHER_HALVES or source is None:
        raise DataError(f"expected 8 bits a channel, or a PNG, or grey, found {image.format} of 16 bits a channel")
    other = open_encoded(source)
    other._mode, rest = _OTHER_HALVES[raw]
    other.tile = [tile._replace(args=rest) for tile in other.tile]
    high, low = np.asarray(image).astype(np.uint16), np.asarray(other)
    if raw == "LA;16B":  # all four bytes of both channels
        high, low = low[:, :, ::2].astype(np.uint16), low[:, :, 1::2]
    return np.asarray((high << 8) | low)


# ---------------------------------------------------------------------- how a file is to be turned


def turn_of(image: Any) -> int:
    """How an opened file is to be turned: EXIF's orientation, 1 to 8. Pillow turns TIFF itself."""
    if image.format == "TIFF" or not any(key in image.info for key in _TURNS):
        return 1
    try:
        turn = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # what is damaged there says nothing about the pixels
        return 1
    return turn if turn in range(1, 9) else 1


def _turned(array: npt.NDArray[Any], turn: int) -> npt.NDArray[Any]:
    """Pixels ``[H, W, C]`` as they are to be seen; the same array where they are so already."""
    if turn in (3, 4, 6, 7):
        array = array[::-1]
    if turn in (2, 3, 7, 8):
        array = array[:, ::-1]
    return array.swapaxes(0, 1) if turn >= 5 else array
