"""Values of a message: numbers at the end of a path, texts, and the pixels of images."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.formats.topics.layout import Place, Stretch, is_names
from mouse_core.images.pixels import decode_image

# Of images: dtype, channels, and whether blue comes before red.
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
    """Whether a message has all the names that a path asks for."""
    if not names:
        return True
    found: Any = message
    for part in place.parts:
        if is_names(part):
            return False
        above, found = found, _step(found, part, place)
        there = names_beside(above)
        if there is not None and isinstance(part, str) and part not in _NAMES:
            return set(names) <= set(there)
    return False


def names_beside(message: Any) -> list[str] | None:
    """The names that a message has for the numbers beside them; None where it has none."""
    for name in _NAMES:
        found = message.get(name) if isinstance(message, Mapping) else None
        if isinstance(found, list) and all(isinstance(one, str) for one in found) and found:
            return found
    return None


def value_at(message: Mapping[str, Any], place: Place) -> tuple[Any, tuple[str, ...]]:
    """The value that a path leads to, and the names of its numbers, where the message has some and the path does not.

    Raises:
        DataError: It leads nowhere, or to what cannot be a column.
    """
    found: Any = message
    names: list[str] | None = None
    for part in place.parts:
        if is_names(part):
            if names is None:
                raise DataError(f"{place.text}: expected names beside the value, found none")
            found = _picked(found, names, part, place)
            names = None
            continue
        above, found = found, _step(found, part, place)
        names = names_beside(above) if isinstance(part, str) else None
    if isinstance(found, str):
        return found, ()
    if isinstance(found, Mapping) and set(found) >= _IMAGE:
        return _image(found, place), ()
    if isinstance(found, Mapping) and set(found) >= _COMPRESSED and isinstance(found["format"], str):
        return _compressed(found, place), ()
    values = _numbers(found, place)
    beside = tuple(names) if names is not None and len(names) == values.size and values.ndim else ()
    return values, beside


def _step(found: Any, part: Any, place: Place) -> Any:
    if isinstance(part, str):
        if not isinstance(found, Mapping) or part not in found:
            there = list(found)[:20] if isinstance(found, Mapping) else "a value"
            raise DataError(f"{place.text}: expected a field {part!r}, found {there}")
        return found[part]
    if isinstance(found, str | Mapping) or not hasattr(found, "__getitem__"):
        raise DataError(f"{place.text}: expected several values, found one")
    last = part if isinstance(part, int) else (part.stop or 0) - 1
    part = slice(part.first, part.stop) if isinstance(part, Stretch) else part
    if last >= len(found):
        raise DataError(f"{place.text}: expected at least {last + 1} values, found {len(found)}")
    return found[part]


def _picked(found: Any, names: list[str], wanted: tuple[str, ...], place: Place) -> Any:
    if isinstance(found, str | Mapping) or not hasattr(found, "__len__") or len(found) != len(names):
        raise DataError(f"{place.text}: expected a value for each of {names[:20]}")
    if missing := [name for name in wanted if names.count(name) != 1]:
        raise DataError(f"{place.text}: expected each once among {names[:20]}, found {missing} missing or twice")
    return [found[names.index(name)] for name in wanted]


def _numbers(found: Any, place: Place) -> npt.NDArray[Any]:
    if isinstance(found, Mapping) or (isinstance(found, list) and any(isinstance(one, Mapping) for one in found)):
        leaves = list(_leaves(found, place))
        if not leaves:
            raise DataError(f"{place.text}: expected numbers, found none")
        return np.concatenate([np.atleast_1d(leaf) for leaf in leaves])
    values = _array(found)
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"{place.text}: expected numbers, found {type(found).__name__} of {values.dtype}")
    return values


def _array(found: Any) -> npt.NDArray[Any]:
    """Numbers as they were recorded, in this machine's order of bytes; those of JSON as 64-bit floats."""
    try:
        values = np.asarray(found)
    except ValueError:  # lists of different lengths
        return np.empty((), object)
    one = found[0] if isinstance(found, list) and found else found
    if isinstance(one, list | int | float) and values.dtype.kind in "iuf":
        return values.astype(np.float64)
    return values.astype(values.dtype.newbyteorder("="))


def _leaves(found: Any, place: Place) -> Iterator[npt.NDArray[Any]]:
    """The numbers of a message one after another, but for its header."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            if name != "header":
                yield from _leaves(value, place)
    elif isinstance(found, list):
        for value in found:
            yield from _leaves(value, place)
    else:
        values = _array(found)
        if values.dtype.kind not in "biuf":
            raise DataError(f"{place.text}: expected numbers alone, found {found!r:.80} among them; name the fields")
        yield values


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
    """Bytes of a message; JSON has them as text, in base64."""
    try:
        data = np.frombuffer(base64.b64decode(data, validate=True), np.uint8) if isinstance(data, str) else data
        return np.asarray(data, np.uint8)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{place.text}: expected bytes, in JSON as base64, found {data!r:.80}") from error


def _compressed(message: Mapping[str, Any], place: Place) -> npt.NDArray[Any]:
    said = message["format"]
    if "compressedDepth" in said:
        raise DataError(f"{place.text}: expected JPEG or PNG, found {said!r}, which has a header of its own")
    if said.lower() in _VIDEOS:
        raise DataError(f"{place.text}: expected JPEG or PNG, found {said!r}, a frame of a video that needs others")
    wide = "16UC1" in said or "mono16" in said
    data = _octets(message["data"], place).tobytes()
    try:
        return decode_image(data, dtype=np.uint16 if wide else np.uint8)
    except ValueError as error:
        raise DataError(f"{place.text}: {error}") from error


def stamp_of(message: Mapping[str, Any]) -> int | None:
    """When a message's header says that it is of, in nanoseconds; None where it has no header."""
    stamp = message.get("header", {}).get("stamp") if isinstance(message.get("header"), Mapping) else None
    if not isinstance(stamp, Mapping):
        return None
    seconds, rest = stamp.get("sec", stamp.get("secs")), stamp.get("nanosec", stamp.get("nsec", stamp.get("nsecs")))
    if not isinstance(seconds, int | np.integer) or not isinstance(rest, int | np.integer) or seconds < 0:
        raise DataError(f"header.stamp: expected seconds and nanoseconds, found {stamp!r:.80}")
    if not seconds and not rest:
        raise DataError("header.stamp: expected a time, found 0: nobody set it; take stamps='log'")
    return int(seconds) * 10**9 + int(rest)
