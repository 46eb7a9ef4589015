"""Files of records: TFRecord, read and verified here, and ArrayRecord, by its package."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from mouse_core.files.reading import damaged, reading


def masked_crc32c(data: Any) -> int:
    """Return the CRC-32C of bytes as TFRecord stores it: rotated by 15 bits, plus a constant.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    try:
        from google_crc32c import value
    except ImportError as error:
        raise ImportError("TFRecord files need google-crc32c: pip install 'mouse-data[formats]'") from error
    crc = int(value(bytes(data)))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


Records = Iterator[tuple[bytes, str]]
"""Records, each with its name for messages."""


def record_places(path: str | os.PathLike[str], file: BinaryIO) -> Iterator[tuple[int, int, str]]:
    """Yield first byte and length of the data of each record of a TFRecord file, and the record's name for messages.

    Before the data stand their length (8 bytes) and its CRC (4 bytes), behind them their CRC (4 bytes). The file is at
    the first byte of the data then.

    Raises:
        DataError: The CRC of a length does not match, or the file ends within a record.
    """
    size = os.fstat(file.fileno()).st_size
    place = number = 0
    while place < size:
        at = f"record {number} at byte {place}"
        file.seek(place)
        head = file.read(12)
        if len(head) < 12:
            raise damaged(path, f"expected 12 bytes of a record's head, found {len(head)}", at=at)
        length, expected = struct.unpack("<QI", head)
        if masked_crc32c(head[:8]) != expected:
            raise damaged(path, "the CRC of the record's length does not match", at=at)
        if length > size - place - 16:
            raise damaged(path, f"expected a record of {length} bytes, found the file's end", at=at)
        yield place + 12, length, at
        place, number = place + 16 + length, number + 1


def tfrecords(path: str | os.PathLike[str]) -> Records:
    """Yield the records of a TFRecord file.

    Raises:
        DataError: A CRC does not match, or the file ends within a record.
    """
    with reading(path), open(path, "rb") as file:
        for _, length, at in record_places(path, file):
            data, tail = file.read(length), file.read(4)
            if masked_crc32c(data) != int.from_bytes(tail, "little"):
                raise damaged(path, f"the CRC of the record's {length} bytes does not match", at=at)
            yield data, at


def array_records(path: str | os.PathLike[str]) -> Records:
    """Yield the records of an ArrayRecord file.

    Raises:
        DataError: A damaged file.
        ImportError: The package is not installed.
    """
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise ImportError("ArrayRecord files need their package: pip install array_record") from error
    with reading(path):
        # Anything but a file with the reader's own mark at its end is not handed to it.
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
        raise damaged(path, f"expected an ArrayRecord file of whole blocks of 65536 bytes, found {size} bytes")


READERS: dict[str, Callable[[Any], Records]] = {"tfrecord": tfrecords, "array_record": array_records}
"""The reader of a file, by TFDS's name for its format."""
