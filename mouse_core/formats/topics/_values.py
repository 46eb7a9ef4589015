"""Read the value of a message at a path: numbers, a text, or the pixels of an image."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.formats.topics.layout import Place, Stretch, is_names
from mouse_core.images.pixels import decode_image

# Encodings of images: dtype, channels, and whether blue comes before red.
_PIXELS = {
    "rgb8": ("u1", 3, False), "bgr8": ("u1", 3, True), "rgba8": ("u1", 4, False), "bgra8": ("u1", 4, True),
    "mono8": ("u1", 1, False), "8UC1": ("u1", 1, False), "8UC3": ("u1", 3, False), "8UC4": ("u1", 4, False),
    "mono16": ("u2", 1, False), "16UC1": ("u2", 1, False), "32FC1": ("f4", 1, False),
}  # fmt: skip
_IMAGE = {"height", "width", "encoding", "step", "data"}
_COMPRESSED = {"format", "data"}
_VIDEOS = ("h264", "h265", "hevc", "vp8", "vp9", "av1")
_NAMES = ("name", "joint_names", "names")


def is_of(message: Mapping[str, Any], names: tuple[str, ...], place: Place) -> bool:
    """Whether a message has all names of a path."""
    if not names:
        return True
    value: Any = message
    for part in place.parts:
        if is_names(part):
            return False
        parent, value = value, _step(value, part, place)
        present = names_beside(parent)
        if present is not None and isinstance(part, str) and part not in _NAMES:
            return set(names) <= set(present)
    return False


def names_beside(message: Any) -> list[str] | None:
    """Return the names that a message has for its lists of numbers, or None."""
    for field in _NAMES:
        names = message.get(field) if isinstance(message, Mapping) else None
        if isinstance(names, list) and all(isinstance(one, str) for one in names) and names:
            return names
    return None


def value_at(message: Mapping[str, Any], place: Place) -> tuple[Any, tuple[str, ...]]:
    """Return the value at a path, and the message's names for its numbers if the path has no names.

    Raises:
        DataError: A path without a value, or with a value that cannot be a column.
    """
    value: Any = message
    names: list[str] | None = None
    for part in place.parts:
        if is_names(part):
            if names is None:
                raise DataError(f"{place.text}: expected names beside the value, found none")
            value = _by_name(value, names, part, place)
            names = None
            continue
        parent, value = value, _step(value, part, place)
        names = names_beside(parent) if isinstance(part, str) else None
    if isinstance(value, str):
        return value, ()
    if isinstance(value, Mapping) and set(value) >= _IMAGE:
        return _image(value, place), ()
    if isinstance(value, Mapping) and set(value) >= _COMPRESSED and isinstance(value["format"], str):
        return _compressed(value, place), ()
    numbers = _numbers(value, place)
    return numbers, tuple(names) if names is not None and len(names) == numbers.size and numbers.ndim else ()


def _step(value: Any, part: Any, place: Place) -> Any:
    """Return a field of a message, or an element or a slice of a list."""
    if isinstance(part, str):
        if not isinstance(value, Mapping) or part not in value:
            present = list(value)[:20] if isinstance(value, Mapping) else "a value"
            raise DataError(f"{place.text}: expected a field {part!r}, found {present}")
        return value[part]
    if isinstance(value, str | Mapping) or not hasattr(value, "__getitem__"):
        raise DataError(f"{place.text}: expected several values, found one")
    last = part if isinstance(part, int) else (part.stop or 0) - 1
    part = slice(part.first, part.stop) if isinstance(part, Stretch) else part
    if last >= len(value):
        raise DataError(f"{place.text}: expected at least {last + 1} values, found {len(value)}")
    return value[part]


def _by_name(values: Any, names: list[str], wanted: tuple[str, ...], place: Place) -> Any:
    """Return the values with the names ``wanted``."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or len(values) != len(names):
        raise DataError(f"{place.text}: expected a value for each of {names[:20]}")
    if missing := [name for name in wanted if names.count(name) != 1]:
        raise DataError(f"{place.text}: expected each once among {names[:20]}, found {missing} missing or twice")
    return [values[names.index(name)] for name in wanted]


def _numbers(value: Any, place: Place) -> npt.NDArray[Any]:
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(one, Mapping) for one in value)):
        leaves = list(_leaves(value, place))
        if not leaves:
            raise DataError(f"{place.text}: expected numbers, found none")
        return np.concatenate([np.atleast_1d(leaf) for leaf in leaves])
    numbers = _array(value)
    if numbers.dtype.kind not in "biuf" or numbers.dtype.itemsize > 8:
        raise DataError(f"{place.text}: expected numbers, found {type(value).__name__} of {numbers.dtype}")
    return numbers


def _array(value: Any) -> npt.NDArray[Any]:
    """Return numbers in their dtype and native byte order; numbers of JSON as 64-bit floats."""
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.empty((), object)
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list | int | float) and numbers.dtype.kind in "iuf":
        return numbers.astype(np.float64)
    return numbers.astype(numbers.dtype.newbyteorder("="))


def _leaves(value: Any, place: Place) -> Iterator[npt.NDArray[Any]]:
    """Yield the numbers of a message without its header."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name != "header":
                yield from _leaves(one, place)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one, place)
    else:
        numbers = _array(value)
        if numbers.dtype.kind not in "biuf":
            raise DataError(f"{place.text}: expected numbers alone, found {value!r:.80} among them; name the fields")
        yield numbers


def _image(message: Mapping[str, Any], place: Place) -> npt.NDArray[Any]:
    encoding = message["encoding"]
    if encoding not in _PIXELS:
        raise DataError(f"{place.text}: expected an image in one of {list(_PIXELS)}, found {encoding!r}")
    letters, channels, swapped = _PIXELS[encoding]
    dtype = np.dtype(letters).newbyteorder(">" if message.get("is_bigendian") else "<")
    height, width, step = (int(message[name]) for name in ("height", "width", "step"))
    row = width * channels * dtype.itemsize
    data = _octets(message["data"], place)
    if height < 1 or width < 1 or step < row or len(data) != height * step:
        raise DataError(
            f"{place.text}: expected {height} rows of {step} bytes, of which {row} are pixels, found {len(data)} bytes"
        )
    pixels = np.ascontiguousarray(data.reshape(height, step)[:, :row]).view(dtype).reshape(height, width, channels)
    if swapped:
        pixels = pixels[:, :, [2, 1, 0, *range(3, channels)]]
    return pixels.astype(dtype.newbyteorder("="))


def _octets(data: Any, place: Place) -> npt.NDArray[np.uint8]:
    """Return bytes of a message; JSON messages have them in base64."""
    try:
        data = np.frombuffer(base64.b64decode(data, validate=True), np.uint8) if isinstance(data, str) else data
        return np.asarray(data, np.uint8)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{place.text}: expected bytes, in JSON as base64, found {data!r:.80}") from error


def _compressed(message: Mapping[str, Any], place: Place) -> npt.NDArray[Any]:
    kind = message["format"]
    if "compressedDepth" in kind:
        raise DataError(f"{place.text}: expected JPEG or PNG, found {kind!r}, which has a header of its own")
    if kind.lower() in _VIDEOS:
        raise DataError(f"{place.text}: expected JPEG or PNG, found {kind!r}, a frame of a video that needs others")
    wide = "16UC1" in kind or "mono16" in kind
    data = _octets(message["data"], place).tobytes()
    try:
        return decode_image(data, dtype=np.uint16 if wide else np.uint8)
    except ValueError as error:
        raise DataError(f"{place.text}: {error}") from error


def stamp_of(message: Mapping[str, Any]) -> int | None:
    """Return the time in a message's header, in nanoseconds; None without a header."""
    stamp = message.get("header", {}).get("stamp") if isinstance(message.get("header"), Mapping) else None
    if not isinstance(stamp, Mapping):
        return None
    seconds, rest = stamp.get("sec", stamp.get("secs")), stamp.get("nanosec", stamp.get("nsec", stamp.get("nsecs")))
    if not isinstance(seconds, int | np.integer) or not isinstance(rest, int | np.integer) or seconds < 0:
        raise DataError(f"header.stamp: expected seconds and nanoseconds, found {stamp!r:.80}")
    if not seconds and not rest:
        raise DataError("header.stamp: expected a time, found 0, which no writer set; take stamps='log'")
    return int(seconds) * 10**9 + int(rest)
