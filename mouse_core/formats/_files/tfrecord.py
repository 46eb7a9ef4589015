"""Files of records: TFRecord, read and verified here, and ArrayRecord, through its package."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

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
"""Records, and where each lies in its file."""


def tfrecords(path: str | os.PathLike[str]) -> Records:
    """The records of a TFRecord file: a length and its CRC, that many bytes, and their CRC.

    Raises:
        DataError: A CRC that does not match, or a file that ends within a record.
    """
    with reading(path):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
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
                data = file.read(length)
                tail = file.read(4)
                if len(data) < length or len(tail) < 4 or masked_crc32c(data) != struct.unpack("<I", tail)[0]:
                    raise damaged(path, f"the CRC of the record's {length} bytes does not match", at=at)
                yield data, at
                place += 16 + length
                number += 1


def array_records(path: str | os.PathLike[str]) -> Records:
    """The records of an ArrayRecord file.

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
"""What reads a file, by TFDS's name for its format."""
