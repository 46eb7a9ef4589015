"""Checksums of stored bytes, with one algorithm, XXH3, for stores, logs, checkpoints and saved datasets.

A checksum detects accidental damage: a flipped bit, a partly written page, a missing end. A checksum does not detect
manipulation.

| content | function | where the checksum is stored |
| --- | --- | --- |
| block of rows, array of a checkpoint | `checksum`, 64 bits | table or head in the file |
| page of 4096 bytes of a sealed file | `page_checksums`, 32 bits | trailer of the file |
| file, trailer of a sealed file | `digest`, `file_digest`, 128 bits | manifest of its folder, or name of the file |
| JSON text | `json_with_digest`, 128 bits | first member of the text |

To change the algorithm, replace the four names that this module imports from ``xxhash``. ``data`` is any C-contiguous
buffer of bytes, and ``seed`` an integer in ``[0, 2**64)``; equal data with another seed have another checksum:

| name | result |
| --- | --- |
| ``checksum(data, seed=0)`` | an integer of 64 bits |
| ``digest(data)`` | 32 hexadecimal digits |
| ``RunningChecksum(data=b"", seed=0)`` | an object with ``update(data)``, ``copy()``, ``intdigest()`` |
| ``RunningDigest(data=b"")`` | an object with ``update(data)``, ``digest_size``, ``digest()``, ``hexdigest()`` |
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64 as RunningChecksum
from xxhash import xxh3_64_intdigest as checksum
from xxhash import xxh3_128 as RunningDigest
from xxhash import xxh3_128_hexdigest as digest

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import damaged, json_object, read_bytes

__all__ = ["RunningChecksum", "RunningDigest", "checksum", "digest"]

DIGEST_BYTES = RunningDigest().digest_size
"""Size of a digest in bytes."""

DIGEST_DIGITS = 2 * DIGEST_BYTES
"""Number of hexadecimal digits of a digest as text."""

PageChecksums = npt.NDArray[np.uint32]
"""Checksums of the pages of a file, uint32 ``[pages]``."""

PAGE = 4096
"""Size in bytes of a page, for page checksums."""

_PIECE = 1 << 20
_HEAD, _HEAD_END = b'{"digest": "', b'",'


def check(path: str | os.PathLike[str], unit: str, expected: Any, found: Any) -> None:
    """Raise DataError unless the found checksum equals the written checksum; the message names the file and the
    part.
    """
    if expected != found:
        shown = [one if isinstance(one, str) else f"{int(one):016x}" for one in (expected, found)]
        raise damaged(path, f"expected the checksum {shown[0]}, found {shown[1]}; {unit} is damaged")


def file_digest(
    stream: IO[bytes], end: int | None = None, more: bytes = b"", advance: Callable[[int], None] = lambda count: None
) -> str:
    """Return the digest of an open file.

    Args:
        stream: The file.
        end: Offset of the end of the digested bytes; None: the end of the file.
        more: Further bytes, which are digested after the file's bytes.
        advance: Function that is called after each read with the number of bytes that were read.
    """
    running, rest = RunningDigest(), os.fstat(stream.fileno()).st_size if end is None else end
    stream.seek(0)
    while piece := stream.read(min(_PIECE, rest)):
        running.update(piece)
        rest -= len(piece)
        advance(len(piece))
    running.update(more)
    return running.hexdigest()


def page_checksums(contents: Sequence[Any], firsts: Sequence[int] = (0,)) -> PageChecksums:
    """Return the checksum of each page in runs of pages, uint32 ``[n]``: the lower half of a 64-bit checksum, with the
    page number as seed.

    Args:
        contents: The bytes of each run; the last page of a run can be shorter.
        firsts: The index in the file of the first page of each run.
    """
    found: list[int] = []
    for content, first in zip(contents, firsts, strict=True):
        with memoryview(content) as view:
            begins = range(0, len(view), PAGE)
            found += [checksum(view[begin : begin + PAGE], page) for page, begin in enumerate(begins, first)]
    return np.fromiter(found, np.uint64, len(found)).astype(np.uint32)  # the lower halves


def json_with_digest(value: Mapping[str, Any]) -> bytes:
    """Return a JSON text whose first member is the digest of the rest of the text: ``{"digest": "5f0c..", "rows": 3}``.

    Args:
        value: The members of the object, at least one; the name "digest" is reserved.
    """
    rest = json.dumps(value, allow_nan=False).encode()[1:] + b"\n"
    return _HEAD + digest(rest).encode() + _HEAD_END + rest


def has_json_digest(text: bytes) -> bool:
    """Whether a text begins like a result of ``json_with_digest``."""
    return text.startswith(_HEAD)


def check_json(path: str | os.PathLike[str], text: bytes, remedy: str = "") -> None:
    """Raise DataError unless the digest in a text of ``json_with_digest`` is right.

    Args:
        path: The file, for the message.
        text: The content of the file.
        remedy: A text for the message that says how to repair the damage; can be empty.
    """
    begin, end = len(_HEAD), len(_HEAD) + DIGEST_DIGITS
    rest, found = text[end + len(_HEAD_END) :], text[begin:end].decode(errors="replace")
    if text[:begin] != _HEAD or text[end : end + len(_HEAD_END)] != _HEAD_END or found != digest(rest):
        more = f"; {remedy}" if remedy else ""
        raise damaged(
            path, f"expected the digest {digest(rest)} of its text, found {found!r:.80}; the file is damaged{more}"
        )


def checked_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of ``json_with_digest``.

    Raises:
        DataError: The file is missing or damaged.
    """
    text = read_bytes(path)
    check_json(path, text)
    value = dict(json_object(path, text))
    value.pop("digest")
    return value


def cached_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of ``json_with_digest``; an empty object if the file is missing or damaged."""
    try:
        return checked_json(path)
    except (DataError, ConfigError):
        return {}
