"""Metadata of TFDS (``features.json`` and ``dataset_info.json``), and the features of records, decoded from bytes."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.formats._files.tfrecord import READERS
from mouse_core.images.pixels import decode_image
from mouse_core.spec import check_choice

Feature = npt.NDArray[Any] | list[bytes]
"""A feature's values: int64 or float32 ``[n]``, or byte strings."""

Read = Callable[[int, int], bytes]
"""Gives the bytes between two places of a record."""

# As long as the head of a field can be: two numbers of 10 bytes.
_HEAD = 20


def parse_example(data: bytes) -> dict[str, Feature]:
    """Return all features of an Example, by name.

    Raises:
        DataError: The bytes are no Example.
    """
    places = feature_places(lambda begin, end: data[begin:end], len(data))
    return {name: parse_feature(data, begin, end) for name, (begin, end) in places.items()}


def feature_places(read: Read, length: int) -> dict[str, tuple[int, int]]:
    """Return the first byte and the end of each feature of an Example, without reading its values.

    Args:
        read: Returns the bytes between two positions of the Example.
        length: Number of bytes of the Example.

    Raises:
        DataError: The bytes are no Example.
    """
    found: dict[str, tuple[int, int]] = {}
    for number, start, stop in _messages(read, 0, length):
        if number != 1:
            raise DataError(f"expected an Example of features, found field {number} besides")
        for _, begin, end in _messages(read, start, stop):
            name, span = "", None
            for inner, first, last in _messages(read, begin, end):
                if inner == 1:
                    name = _name(read(first, last))
                elif inner == 2:
                    span = first, last
            if span is not None:
                found[name] = span
    return found


def value_places(read: Read, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the first byte and the end of each byte string of a feature; see ``feature_places``."""
    found: list[tuple[int, int]] = []
    for number, first, last in _messages(read, start, stop):
        if number != 1:
            raise DataError("expected byte strings, found numbers")
        found += [(begin, end) for inner, begin, end in _messages(read, first, last) if inner == 1]
    return found


def parse_feature(data: bytes, start: int = 0, stop: int | None = None) -> Feature:
    """Return the values of a feature, from its bytes ``start..stop - 1`` in ``data``; by default all of ``data``."""
    read: Read = lambda begin, end: data[begin:end]  # noqa: E731
    for number, first, last in _messages(read, start, len(data) if stop is None else stop):
        if number == 1:
            return [data[begin:end] for inner, begin, end in _messages(read, first, last) if inner == 1]
        if number in (2, 3):
            fields = [field for field in _fields(read, first, last) if field[0] == 1]
            plain = 5 if number == 2 else 0  # the kind of a field with one number; a field of kind 2 has several
            if any(kind not in (2, plain) for _, kind, _, _ in fields):
                raise DataError(f"expected numbers of the kinds 2 and {plain}, found fields {fields[:4]}")
            octets = b"".join(data[begin:end] for _, _, begin, end in fields)
            return _floats(octets) if number == 2 else _varints(np.frombuffer(octets, np.uint8))
    return []


def _fields(read: Read, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, kind, and first byte and end of the value, of each field of a message."""
    place = start
    while place < stop:
        head = read(place, min(place + _HEAD, stop))
        tag, at = _varint(head, 0)
        begin, kind = place + at, tag & 7
        if kind == 0:
            place += _varint(head, at)[1]
        elif kind == 2:
            length, at = _varint(head, at)
            begin = place + at
            place = begin + length
        elif kind in (1, 5):
            place = begin + (8 if kind == 1 else 4)
        else:
            raise DataError(f"expected a message at byte {start}, found a field of kind {kind} at byte {place}")
        if place > stop:
            raise DataError(f"expected a message that ends at byte {stop}, found a field that ends at byte {place}")
        yield tag >> 3, kind, begin, place


def _messages(read: Read, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, first byte and end of each field of a message of messages, texts or bytes."""
    for number, kind, begin, end in _fields(read, start, stop):
        if kind != 2:
            raise DataError(f"expected a message at byte {begin}, found a field of kind {kind}")
        yield number, begin, end


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data):
        octet = data[place]
        place += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
        shift += 7
        if shift > 63:
            break
    raise DataError(f"expected a number, found none that ends before byte {place}")


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError("expected a feature's name as UTF-8") from error


def _floats(octets: bytes) -> npt.NDArray[np.float32]:
    if len(octets) % 4:
        raise DataError(f"expected floats of 4 bytes, found {len(octets)} bytes")
    return np.frombuffer(octets, "<f4")


def _varints(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Decode numbers in base 128 together, with one pass for each digit of the longest number."""
    ends = np.flatnonzero(octets < 0x80)
    if len(ends) == len(octets):
        return octets.astype(np.int64)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise DataError("expected packed integers, found one that does not end")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise DataError("expected integers of at most 10 bytes, found a longer one")
    values = np.zeros(len(ends), np.uint64)
    for digit in range(int(lengths.max())):
        some = lengths > digit
        values[some] |= (octets[starts[some] + digit].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(7 * digit)
    return values.view(np.int64)


_MAX_VALUE_BYTES = 1 << 28
_MOST_JSON = 64 << 20
# Kind, dtype and shape of features that have one of each.
_PLAIN: dict[str, tuple[str, str, tuple[int | None, ...]]] = {
    "text": ("text", "", ()),
    "classLabel": ("tensor", "int64", ()),
    "boundingBox": ("tensor", "float32", (4,)),
}


@dataclass(frozen=True)
class Leaf:
    """A feature that is no mapping.

    Args:
        name: Path of the feature, joined by "/".
        kind: "tensor", "image", "text", or "other" for videos and sounds, which cannot be columns.
        dtype: Type of the values; empty for text.
        shape: Shape of one value; None for a size that is not fixed.
        encoding: "none", "bytes" or "zlib" for tensors.
        ragged: Number of levels of sequences of any length around the values.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int | None, ...]
    encoding: str = "none"
    ragged: int = 0


def parse_features(path: Path) -> dict[str, Leaf]:
    """Return the leaves of ``features.json`` by path.

    Raises:
        DataError: The file is not as TFDS writes it.
    """
    with reading(path):
        described = read_json_object(path, most_bytes=_MOST_JSON)
        leaves = {leaf.name: leaf for leaf in _leaves(described, "", 0)}
        if not leaves:
            raise damaged(path, "expected features, found none that is understood")
        return leaves


def _leaves(node: Any, path: str, ragged: int) -> Iterator[Leaf]:
    if not isinstance(node, dict):
        raise DataError(f"feature {path!r}: expected a mapping, found {type(node).__name__}")
    if "featuresDict" in node:
        for name, part in node["featuresDict"]["features"].items():
            yield from _leaves(part, f"{path}/{name}" if path else name, ragged)
    elif "sequence" in node:
        inner = node["sequence"]["feature"]
        yield from _leaves(inner, path, ragged + 1)
    elif "tensor" in node:
        tensor = node["tensor"]
        dtype, shape = tensor["dtype"], _shape(tensor)
        if dtype in ("string", "object", "str", "bytes"):
            yield Leaf(path, "text", "", shape, ragged=ragged)
        else:
            yield Leaf(path, "tensor", np.dtype(dtype).name, shape, tensor.get("encoding", "none"), ragged)
    elif "image" in node:
        image = node["image"]
        yield Leaf(path, "image", image.get("dtype", "uint8"), _shape(image), ragged=ragged)
    else:
        kinds = {name: kind for name, kind in _PLAIN.items() if name in node}
        yield Leaf(path, *next(iter(kinds.values()), ("other", "", ())), ragged=ragged)


def _shape(node: Mapping[str, Any]) -> tuple[int | None, ...]:
    sizes = [int(size) for size in node.get("shape", {}).get("dimensions", ())]
    return tuple(None if size < 0 else size for size in sizes)


@dataclass(frozen=True)
class Split:
    """The files of a split in order, and the number of records of each, if the metadata state it."""

    name: str
    files: tuple[Path, ...]
    lengths: tuple[int, ...] | None


def parse_info(folder: Path) -> tuple[dict[str, Any], str, list[Split]]:
    """Return the content of ``dataset_info.json``, the format of the files, and the splits.

    Raises:
        ConfigError: The files have a format that cannot be read.
        DataError: The file is not as TFDS writes it, or files are missing.
    """
    path = folder / "dataset_info.json"
    info = dict(read_json_object(path, most_bytes=_MOST_JSON))
    with reading(path):
        kind = info.get("fileFormat", "tfrecord")
        check_choice(f"{path}: fileFormat", kind, READERS)
        splits = [_split(folder, info, split, kind) for split in info.get("splits", ())]
        splits = [split for split in splits if split.files]
        if not splits:
            raise damaged(path, "expected splits with files, found none")
        return info, kind, splits


def _split(folder: Path, info: Mapping[str, Any], split: Mapping[str, Any], kind: str) -> Split:
    name = split["name"]
    lengths = tuple(int(length) for length in split.get("shardLengths", ()))
    template = split.get("filepathTemplate") or "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    known = {"DATASET": re.escape(info["name"]), "SPLIT": re.escape(name), "FILEFORMAT": re.escape(kind)}
    known |= {"SHARD_INDEX": r"(\d+)", "NUM_SHARDS": r"\d+", "SHARD_X_OF_Y": r"(\d+)-of-\d+"}
    parts = re.split(r"\{(\w+)\}", template)
    pattern = "".join(known.get(part, r".+") if index % 2 else re.escape(part) for index, part in enumerate(parts))
    matches = {file: match for file in folder.iterdir() if (match := re.fullmatch(pattern, file.name))}
    check_inside(matches, folder)
    found = {int(match[1]) if match.groups() else 0: file for file, match in matches.items()}
    if lengths and sorted(found) != list(range(len(lengths))):
        raise damaged(
            folder / "dataset_info.json", f"split {name!r}: expected {len(lengths)} files, found {len(found)}"
        )
    return Split(name, tuple(found[index] for index in sorted(found)), lengths or None)


def decode_leaf(leaf: Leaf, features: Mapping[str, Feature], count: int | None, part: slice | None = None) -> Any:
    """Return the values of a leaf in one record.

    Args:
        leaf: The leaf.
        features: The features of the record.
        count: Number of steps of the record, for a leaf of steps; None for a leaf of the episode.
        part: The steps to decode; by default all.

    Returns:
        Values ``[n, ...]``; texts, and values of different lengths, as an array of objects.

    Raises:
        DataError: The record does not match the features.
    """
    n = 1 if count is None else count
    levels = leaf.ragged - (count is not None)
    if levels:
        values = _ragged(leaf, features, n, levels)[part or slice(None)]
    else:
        if leaf.name not in features:
            raise DataError(f"feature {leaf.name!r}: expected it, found {sorted(features)[:20]}")
        values = _decode(leaf, features[leaf.name], n, part or slice(None))
    return values[0] if count is None else values


def _decode(leaf: Leaf, raw: Feature, n: int, part: slice) -> npt.NDArray[Any]:
    where = f"feature {leaf.name!r}"
    if leaf.kind == "tensor" and leaf.encoding == "none":
        return _numbers(leaf, raw, n, where)[part]
    if not isinstance(raw, list):
        raise DataError(f"{where}: expected byte strings, found numbers")
    if leaf.kind == "text":
        return _texts(leaf, raw, n, where)[part]
    if len(raw) != n:
        raise DataError(f"{where}: expected {n} values, found {len(raw)}")
    first = range(n)[part].start
    values = [_value(leaf, item, f"{where}, step {first + index}") for index, item in enumerate(raw[part])]
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise DataError(f"{where}: expected values of one shape, found {sorted(shapes)[:4]}")
    return np.stack(values) if values else np.zeros((0, *(size or 0 for size in leaf.shape)), leaf.dtype)


def _texts(leaf: Leaf, raw: list[bytes], n: int, where: str) -> npt.NDArray[Any]:
    shape = [size or 1 for size in leaf.shape]
    if len(raw) != n * math.prod(shape):
        raise DataError(f"{where}: expected {n * math.prod(shape)} texts, found {len(raw)}")
    texts = np.empty(len(raw), dtype=object)
    texts[:] = raw
    return texts.reshape(n, *shape)


def _numbers(leaf: Leaf, raw: Feature, n: int, where: str) -> npt.NDArray[Any]:
    if isinstance(raw, list):
        if raw:
            raise DataError(f"{where}: expected numbers, found byte strings")
        raw = np.zeros(0, np.int64)
    dtype = np.dtype(leaf.dtype)
    if (raw.dtype.kind == "f") != (dtype.kind == "f") and len(raw):
        raise DataError(f"{where}: expected {dtype}, found {raw.dtype}")
    shape = _whole_shape(leaf.shape, n, len(raw))
    if shape is None:
        raise DataError(f"{where}: expected {n} values of shape {list(leaf.shape)}, found {len(raw)} numbers")
    values = raw.view(np.uint64) if dtype == np.uint64 else raw
    if dtype.kind in "iu" and dtype.itemsize < 8 and len(values):
        limits = np.iinfo(dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise DataError(f"{where}: expected {dtype}, found values {values.min()}..{values.max()}")
    return values.astype(dtype).reshape(n, *shape)


def _whole_shape(shape: tuple[int | None, ...], n: int, numbers: int) -> tuple[int, ...] | None:
    """Return the shape of each of ``n`` values that have ``numbers`` numbers together; None if no shape fits.

    One size may be open: two values of shape ``(None, 3)`` that are 12 numbers have the shape ``(2, 3)``.
    """
    known = n * math.prod(size for size in shape if size is not None)
    if None not in shape:
        return tuple(size for size in shape if size is not None) if numbers == known else None
    if shape.count(None) > 1 or not known or numbers % known:
        return None
    return tuple(numbers // known if size is None else size for size in shape)


def _value(leaf: Leaf, data: bytes, where: str) -> npt.NDArray[Any]:
    """Decode one value."""
    if leaf.kind == "image":
        return _image(leaf, data, where)
    shape = [-1 if size is None else size for size in leaf.shape]
    if leaf.encoding == "zlib":
        limit = math.prod(size for size in shape if size > 0) * np.dtype(leaf.dtype).itemsize
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(data, limit if -1 not in shape else _MAX_VALUE_BYTES)
        except zlib.error as error:
            raise DataError(f"{where}: {error}") from error
        if not unpacker.eof and unpacker.decompress(unpacker.unconsumed_tail, 1):
            raise DataError(f"{where}: expected a value of shape {list(leaf.shape)}, found more bytes")
    try:
        return np.frombuffer(data, leaf.dtype).reshape(shape)
    except ValueError as error:
        raise DataError(f"{where}: expected a value of shape {list(leaf.shape)}, found {len(data)} bytes") from error


def _image(leaf: Leaf, data: bytes, where: str) -> npt.NDArray[Any]:
    try:
        # TFDS keeps pictures of float32 as the four bytes of every number.
        four, sizes = leaf.dtype == "float32", leaf.shape if len(leaf.shape) == 3 and None not in leaf.shape else None
        wanted = None if sizes is None else (*sizes[:2], 4 if four else sizes[2])
        pixels = decode_image(data, shape=wanted, dtype="uint16" if leaf.dtype == "uint16" else "uint8")  # type: ignore[arg-type]
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if four:
        pixels = np.ascontiguousarray(pixels).view(np.float32)
    expected = leaf.shape if leaf.shape else pixels.shape
    if len(expected) != 3 or any(size not in (None, found) for size, found in zip(expected, pixels.shape, strict=True)):
        raise DataError(f"{where}: expected a picture {list(expected)}, found {list(pixels.shape)}")
    return pixels


def _ragged(leaf: Leaf, features: Mapping[str, Feature], n: int, levels: int) -> npt.NDArray[Any]:
    """Return sequences of values as ``[n, length, ...]`` if all have one length, else as an array of objects."""
    where = f"feature {leaf.name!r}"
    if leaf.name in features:
        # A sequence that is not in another one has no lengths beside it.
        flat, lengths = features[leaf.name], None
    else:
        flat = features.get(f"{leaf.name}/ragged_flat_values", [])
        lengths = features.get(f"{leaf.name}/ragged_row_lengths_0")
    if levels > 1 or (lengths is None and n != 1):
        raise DataError(f"{where}: expected sequences of values, found sequences of sequences, which cannot be rows")
    counts = np.array([len(flat)]) if lengths is None else np.asarray(lengths)
    if counts.dtype.kind not in "iu" or len(counts) != n or (counts < 0).any():
        raise DataError(f"{where}: expected {n} lengths, found {len(counts)}")
    total = int(counts.sum())
    if total > len(flat):
        raise DataError(f"{where}: expected {total} values, found {len(flat)}")
    values = _decode(leaf, flat, total, slice(None))
    if len(set(counts.tolist())) == 1:
        return values.reshape(n, int(counts[0]), *values.shape[1:])
    rows = np.empty(n, dtype=object)
    for index, stop in enumerate(np.cumsum(counts).tolist()):
        rows[index] = values[stop - int(counts[index]) : stop]
    return rows
