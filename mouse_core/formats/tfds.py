"""Reads RLDS datasets of TensorFlow Datasets (TFDS), without TensorFlow.

A folder holds ``dataset_info.json``, ``features.json``, and files of records (TFRecord or ArrayRecord). A record is an
episode: a tf.train.Example that contains the concatenated values of all steps. The parts of this module are, in order:
Examples, metadata and features, and the reader.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.formats import columns
from mouse_core.formats.base import BATCH_ROWS, RowStream, in_stored_layout
from mouse_core.formats.pictures import IMAGE, image_column
from mouse_core.formats.rlds import Stack, check_last_step, first_batch, last_step_notes, stack_rows
from mouse_core.images.pixels import decode_image, encode_png
from mouse_core.metadata import DatasetMetadata
from mouse_core.nested import nest
from mouse_core.spec import check_choice


def masked_crc32c(data: Any) -> int:
    """Return the CRC-32C of ``data`` in the form that TFRecord stores: the CRC is rotated by 15 bits, and a constant is
    added.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    try:
        from google_crc32c import value
    except ImportError as error:
        raise ImportError("TFRecord files need google-crc32c: pip install 'mouse-data[formats]'") from error
    crc = int(value(bytes(data)))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


NamedRecords = Iterator[tuple[bytes, str]]
"""An iterator over pairs: the bytes of a record, and the name of the record for error messages."""


def tfrecords(path: str | os.PathLike[str]) -> NamedRecords:
    """Yield the records of a TFRecord file.

    A record in the file consists of the length of the data (8 bytes), the CRC of the length (4 bytes), the data, and
    the CRC of the data (4 bytes).

    Raises:
        DataError: A CRC does not match, or the file ends within a record.
    """
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        place = number = 0
        while place < size:
            at = f"record {number} at byte {place}"
            head = file.read(12)
            if len(head) < 12:
                raise damaged(path, f"expected 12 bytes of a record's head, found {len(head)}", at=at)
            length, expected = struct.unpack("<QI", head)
            if masked_crc32c(head[:8]) != expected:
                raise damaged(path, "the CRC of the record's length does not match", at=at)
            if length > size - place - 16:
                raise damaged(path, f"expected a record of {length} bytes, found the file's end", at=at)
            data, tail = file.read(length), file.read(4)
            if masked_crc32c(data) != int.from_bytes(tail, "little"):
                raise damaged(path, f"the CRC of the record's {length} bytes does not match", at=at)
            yield data, at
            place, number = place + 16 + length, number + 1


def array_records(path: str | os.PathLike[str]) -> NamedRecords:
    """Yield the records of an ArrayRecord file.

    Raises:
        DataError: The file is damaged.
        ImportError: The package array_record is not installed.
    """
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise ImportError("ArrayRecord files need their package: pip install array_record") from error
    with reading(path):
        # The reader gets a file only if it ends with the mark of its format.
        _check_array_record(Path(path))
        with closing(ArrayRecordReader(os.fspath(path), options="readahead_buffer_size:0,max_parallelism:0")) as reader:
            for number in range(reader.num_records()):
                at = f"record {number}"
                with reading(path, at=at):
                    yield reader.read([number])[0], at


def _check_array_record(path: Path) -> None:
    size = path.stat().st_size
    if size == 0:
        raise damaged(path, "expected an ArrayRecord file, found an empty one")
    if size % 65536:
        raise damaged(path, f"expected an ArrayRecord file of complete blocks of 65536 bytes, found {size} bytes")


READERS: dict[str, Callable[[Any], NamedRecords]] = {"tfrecord": tfrecords, "array_record": array_records}
"""A dict from TFDS's name of a file format to the function that reads the records of such a file."""


__all__ = ["read_tfds"]

Feature = npt.NDArray[Any] | list[bytes]
"""The type of a feature's values: int64 or float32 ``[n]``, or byte strings."""


@cache
def _example_class() -> Any:
    """Return the protobuf class of tf.train.Example; it is built here, so TensorFlow is not needed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError("datasets of TFDS need protobuf: pip install 'mouse-data[formats]'") from error
    described = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="mouse_example.proto", package="mouse", syntax="proto3")
    many, one = described.LABEL_REPEATED, described.LABEL_OPTIONAL
    for name, fields in {
        "BytesList": [("value", many, described.TYPE_BYTES)],
        "FloatList": [("value", many, described.TYPE_FLOAT)],
        "Int64List": [("value", many, described.TYPE_INT64)],
        "Feature": [("bytes", one, "BytesList"), ("floats", one, "FloatList"), ("integers", one, "Int64List")],
        "Entry": [("key", one, described.TYPE_STRING), ("value", one, "Feature")],  # of a map
        "Features": [("feature", many, "Entry")],
        # Only a SequenceExample, which TFDS does not write, has the second field.
        "Example": [("features", one, "Features"), ("feature_lists", one, described.TYPE_BYTES)],
    }.items():
        message = file.message_type.add(name=name)
        for number, (field, label, kind) in enumerate(fields, 1):
            typed_as = {"type_name": f".mouse.{kind}"} if isinstance(kind, str) else {"type": kind}
            message.field.add(name=field, number=number, label=label, **typed_as)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("mouse.Example"))


def parse_example(data: bytes) -> dict[str, Feature]:
    """Return all features of a tf.train.Example, by name.

    Raises:
        DataError: The bytes are not a tf.train.Example.
    """
    example = _example_class()()
    try:
        example.ParseFromString(data)
    except Exception as error:  # DecodeError, whose module is imported only if protobuf is installed
        raise DataError(f"expected an Example: {error}") from error
    if example.feature_lists:
        raise DataError("expected an Example with features only, found a SequenceExample")
    found: dict[str, Feature] = {}
    for entry in example.features.feature:
        value = entry.value
        if value.HasField("floats"):
            found[entry.key] = np.array(value.floats.value, np.float32)
        elif value.HasField("integers"):
            found[entry.key] = np.array(value.integers.value, np.int64)
        else:
            found[entry.key] = list(value.bytes.value)
    return found


_MAX_VALUE_BYTES = 1 << 28
_MOST_JSON = 64 << 20
# Kind, dtype and shape by class of feature, for classes in which these are fixed.
_PLAIN: dict[str, tuple[str, str, tuple[int | None, ...]]] = {
    "text": ("text", "", ()),
    "classLabel": ("tensor", "int64", ()),
    "boundingBox": ("tensor", "float32", (4,)),
}


@dataclass(frozen=True)
class Leaf:
    """A feature that is not a mapping.

    Args:
        name: Path of the feature, joined by "/".
        kind: "tensor", "image", "text", or "other" for videos and sounds, which cannot be columns.
        dtype: Type of the values; empty for text.
        shape: Shape of one value; a size is None if it varies.
        encoding: "none", "bytes" or "zlib" for tensors.
        ragged: How many nested sequences of variable length contain the values.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int | None, ...]
    encoding: str = "none"
    ragged: int = 0


def parse_features(path: Path) -> dict[str, Leaf]:
    """Return the leaves of the features in ``features.json``, by path.

    Raises:
        DataError: The file does not have the form that TFDS writes.
    """
    with reading(path):
        described = read_json_object(path, most_bytes=_MOST_JSON)
        leaves = {leaf.name: leaf for leaf in _leaves(described, "", 0)}
        if not leaves:
            raise damaged(path, "expected features of known types, found none")
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
    """The files of a split in order, and the number of records in each file, if the metadata state this number."""

    name: str
    files: tuple[Path, ...]
    lengths: tuple[int, ...] | None


def parse_info(folder: Path) -> tuple[dict[str, Any], str, list[Split]]:
    """Parse ``dataset_info.json``; return its content, the format of the data files, and the splits.

    Raises:
        ConfigError: The files have a format that cannot be read.
        DataError: The file does not have the form that TFDS writes, or data files are missing.
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
        count: Number of steps in the record if the leaf has a value for each step; None for a leaf of the episode.
        part: The range of steps to decode; by default all steps.

    Returns:
        Values ``[n, ...]``. Texts, and values of different lengths, are in an array of objects.

    Raises:
        DataError: The record does not match the features.
    """
    n = 1 if count is None else count
    levels = leaf.ragged - (count is not None)
    if levels:
        values = _ragged(leaf, features, n, levels)[part or slice(None)]
    else:
        if leaf.name not in features:
            raise DataError(
                f"feature {leaf.name!r}: expected this feature in the record, found {sorted(features)[:20]}"
            )
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
        raise DataError(f"{where}: expected values of equal shape, found {sorted(shapes)[:4]}")
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
    """Return the shape of each of ``n`` values of equal shape, which have ``numbers`` elements in total; None if no
    shape fits.

    One size of the shape can be unknown: if two values of shape ``(None, 3)`` have 12 elements, each has the shape
    ``(2, 3)``.
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
            raise DataError(f"{where}: expected a value of shape {list(leaf.shape)}, found more bytes than it needs")
    try:
        return np.frombuffer(data, leaf.dtype).reshape(shape)
    except ValueError as error:
        raise DataError(f"{where}: expected a value of shape {list(leaf.shape)}, found {len(data)} bytes") from error


def _image(leaf: Leaf, data: bytes, where: str) -> npt.NDArray[Any]:
    try:
        # TFDS stores images of float32 as the four bytes of every number.
        four, sizes = leaf.dtype == "float32", leaf.shape if len(leaf.shape) == 3 and None not in leaf.shape else None
        wanted = None if sizes is None else (*sizes[:2], 4 if four else sizes[2])
        pixels = decode_image(data, shape=wanted, dtype="uint16" if leaf.dtype == "uint16" else "uint8")  # type: ignore[arg-type]
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if four:
        pixels = np.ascontiguousarray(pixels).view(np.float32)
    expected = leaf.shape if leaf.shape else pixels.shape
    if len(expected) != 3 or any(size not in (None, found) for size, found in zip(expected, pixels.shape, strict=True)):
        raise DataError(f"{where}: expected an image of shape {list(expected)}, found {list(pixels.shape)}")
    return pixels


def _ragged(leaf: Leaf, features: Mapping[str, Feature], n: int, levels: int) -> npt.NDArray[Any]:
    """Return sequences of values as an array ``[n, length, ...]`` if all sequences have equal length, else as an array
    of objects.
    """
    where = f"feature {leaf.name!r}"
    if leaf.name in features:
        # The record has no separate lengths for an outermost sequence.
        flat, lengths = features[leaf.name], None
    else:
        flat = features.get(f"{leaf.name}/ragged_flat_values", [])
        lengths = features.get(f"{leaf.name}/ragged_row_lengths_0")
    if levels > 1 or (lengths is None and n != 1):
        raise DataError(
            f"{where}: expected sequences of values, found sequences of sequences, which rows cannot contain"
        )
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


STEPS = "steps/"
_ABOUT_NUMBERS = 64


def episode_pieces(
    features: Mapping[str, Feature], number: int, leaves: Mapping[str, Leaf], batch_rows: int
) -> Iterator[Stack]:
    """Yield the steps of an episode, in pieces of at most ``batch_rows``.

    Args:
        features: The features of the record.
        number: Index of the episode.
        leaves: The leaves to read.
        batch_rows: See ``read_tfds``.
    """
    count = len(features.get(f"{STEPS}is_first", ()))
    of_episode = [leaf for leaf in leaves.values() if not is_of_step(leaf) and repeatable(leaf)]
    episode_features = _nest({leaf.name: decode_leaf(leaf, features, None) for leaf in of_episode})
    steps = {leaf.name.removeprefix(STEPS): leaf for leaf in leaves.values() if is_of_step(leaf)}
    # Encoded values are decoded piece by piece.
    encoded = {name: leaf for name, leaf in steps.items() if is_encoded(leaf)}
    whole = {name: decode_leaf(leaf, features, count) for name, leaf in steps.items() if name not in encoded}
    # An approximation, as some sizes are not known.
    each = [math.prod(size or 256 for size in leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in encoded.values()]
    size = columns.rows_at_once(sum(each), most=batch_rows)
    for first in range(0, count, size):
        part = slice(first, min(first + size, count))
        values = {name: array[part] for name, array in whole.items()}
        values |= {name: decode_leaf(leaf, features, count, part) for name, leaf in encoded.items()}
        ordered = {name: values[name] for name in steps}
        yield Stack(_nest(ordered), part.stop - first, number, first, part.stop == count, episode_features)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    return nest({tuple(path.split("/")): value for path, value in flat.items()})


def is_encoded(leaf: Leaf) -> bool:
    """Whether each value of a leaf must be decoded separately."""
    return leaf.kind == "image" or leaf.encoding != "none"


def is_of_step(leaf: Leaf) -> bool:
    """Whether a feature has one value for each step."""
    return leaf.name.startswith(STEPS)


def is_column(leaf: Leaf) -> bool:
    """Whether a feature can be a column, which is the case if each step has one value or one sequence of values."""
    return leaf.kind != "other" and leaf.ragged - is_of_step(leaf) <= 1


def repeatable(leaf: Leaf) -> bool:
    """Whether a feature of an episode is small enough to be repeated in all its rows."""
    numbers = math.prod(size or 1 << 20 for size in leaf.shape)
    return not leaf.ragged and leaf.kind != "image" and numbers <= _ABOUT_NUMBERS


def _picture_columns(leaves: Mapping[str, Leaf]) -> list[tuple[str, Leaf]]:
    """Return the features with an image for each step, by column name."""
    found = []
    for leaf in leaves.values():
        first, *rest = leaf.name.removeprefix(STEPS).split("/")
        single = leaf.kind == "image" and leaf.dtype == "uint8" and is_of_step(leaf) and leaf.ragged == 1
        if single and first != "action" and not columns.travels_with_action(first):
            observed = first == "observation"
            found.append((".".join([first, *rest]) if observed else "_".join(["metadata", first, *rest]), leaf))
    return found


# The features that show whether a last step holds a transition.
_BROUGHT = re.compile(r"steps/(is_first|is_last|reward|action(/.*)?)$")


def read_tfds(
    path: str | os.PathLike[str],
    *,
    splits: str | Sequence[str] | None = None,
    final: str | None = None,
    last_step: str = "observation",
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read an RLDS dataset of TFDS as rows, with the columns of ``mouse_core.formats.rlds.read_rlds``.

    Images of steps are kept as image files, ``{bytes, path}``. Depth images, images of floats and images in actions are
    decoded to pixels. The CRCs of TFRecord files are verified.

    Args:
        path: The folder with ``features.json``, or a folder above it that contains no other dataset.
        splits: Names of the splits to read, in this order; by default all splits.
        final: See ``read_rlds``; required if the steps of an episode end without ``is_last``, or if ``last_step`` is
            "transition".
        last_step: See ``read_rlds``: "transition" if the action and the reward of an episode's last step are valid.
        batch_rows: Largest number of rows of a batch.

    Returns:
        The rows; ``format_metadata`` is the content of ``dataset_info.json``.

    Raises:
        ConfigError: The folder holds no RLDS dataset of TFDS, a split is unknown, or the data files have an
            unsupported format.
        DataError: A file is damaged; the message names file and record.
        ImportError: A package for the files is not installed: protobuf, and google-crc32c or array_record.
    """
    check_last_step(last_step, final, where=os.fspath(path))
    columns.check_batch_rows(batch_rows)
    folder = _folder(Path(path))
    described = parse_features(folder / "features.json")
    leaves = {name: leaf for name, leaf in described.items() if is_column(leaf)}
    if f"{STEPS}is_first" not in leaves or f"{STEPS}reward" not in leaves:
        raise ConfigError(f"{folder}: expected an RLDS dataset with a feature 'steps', found {sorted(leaves)[:12]}")
    info, kind, found = parse_info(folder)
    chosen = _chosen(found, splits, folder)
    pictures: dict[str, bytes] = {}  # by column: the picture of a missing observation
    for column, leaf in _picture_columns(leaves):
        pictures[column] = encode_png(np.zeros([size or 1 for size in leaf.shape] or [1, 1, 3], np.uint8))
        leaves[leaf.name] = replace(leaf, kind="text", dtype="", shape=())

    def pieces(leaves: Mapping[str, Leaf] = leaves) -> Iterator[Stack]:
        return _pieces(chosen, kind, leaves, batch_rows)

    first = first_batch(pieces(), final=final, path=str(folder), last_step=last_step).schema
    plain, schema = (columns.typed(first, pictures, image) for image in (pa.binary(), IMAGE))
    notes = _notes(described, str(info.get("name", "")))
    if last_step == "observation":
        notes += last_step_notes(pieces({name: leaf for name, leaf in leaves.items() if _BROUGHT.match(name)}))

    def batches() -> Iterator[pa.RecordBatch]:
        for rows, where in stack_rows(pieces(), final=final, path=str(folder), last_step=last_step):
            made = dict(zip(plain.names, columns.to_batch(rows, plain, where=where).columns, strict=True))
            for name, missing in pictures.items():
                made[name] = image_column(pc.if_else(pc.equal(made[name], b""), missing, made[name]))
            yield pa.RecordBatch.from_arrays(list(made.values()), schema=schema)

    return RowStream(
        os.fspath(path),
        "tfds",
        schema,
        batches,
        notes=notes,
        format_metadata=info,
        metadata=in_stored_layout(DatasetMetadata("arrived"), schema),
    )


def _folder(path: Path) -> Path:
    """Return the folder of a version of the dataset, which is ``path`` or a folder below it."""
    found: list[Path] = []
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        files = sorted(path.glob(f"{depth}features.json"))
        if found := [file.parent for file in files if (file.parent / "dataset_info.json").is_file()]:
            break
    if len(found) != 1:
        shown = f"{len(found)}: {[str(folder) for folder in found[:4]]}" if found else "none"
        raise ConfigError(f"{path}: expected a folder with features.json and dataset_info.json, found {shown}")
    check_inside([found[0] / "features.json", found[0] / "dataset_info.json"], path)
    return found[0]


def _chosen(found: list[Split], names: str | Sequence[str] | None, folder: Path) -> list[Split]:
    by_name = {split.name: split for split in found}
    chosen = [names] if isinstance(names, str) else list(by_name if names is None else names)
    for name in chosen:
        if name not in by_name:
            raise ConfigError(f"{folder}: splits: expected names among {list(by_name)}, found {name!r}")
    return [by_name[name] for name in chosen]


def _notes(leaves: Mapping[str, Leaf], name: str) -> tuple[str, ...]:
    notes = []
    if name.startswith("d4rl_"):
        notes.append("TFDS ends every episode of its D4RL datasets with the last observation of the whole dataset.")
    rounded = [leaf.name for leaf in leaves.values() if leaf.dtype == "float64" and not is_encoded(leaf)]
    if rounded:
        notes.append(f"TFDS stores {rounded} as 32-bit floats, though declared as float64.")
    unlike = [leaf.name for leaf in leaves.values() if not is_column(leaf)]
    if unlike:
        notes.append(f"{unlike} cannot be columns (videos, sounds, sequences in sequences): left out.")
    large = [leaf.name for leaf in leaves.values() if is_column(leaf) and not (is_of_step(leaf) or repeatable(leaf))]
    if large:
        notes.append(f"{large} belong to whole episodes and are too large to be repeated in every row: left out.")
    return tuple(notes)


def _pieces(splits: list[Split], kind: str, leaves: Mapping[str, Leaf], batch_rows: int) -> Iterator[Stack]:
    """Yield all episodes of the given splits, in pieces."""
    number = 0
    for split in splits:
        for index, file in enumerate(split.files):
            count = 0
            for record, at in READERS[kind](file):
                with reading(file, at=at):
                    yield from episode_pieces(parse_example(record), number, leaves, batch_rows)
                number += 1
                count += 1
            if split.lengths is not None and count != split.lengths[index]:
                raise damaged(file, f"expected {split.lengths[index]} records, found {count}")
