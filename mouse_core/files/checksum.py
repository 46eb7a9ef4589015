"""Checksums of stored bytes: one algorithm, XXH3, for every unit that is written and compared.

A checksum finds accidents: a flipped bit, a torn page, a missing end. A checksum does not find intent.

| unit | function | where the checksum lies |
| --- | --- | --- |
| block of rows, record batch, array of a checkpoint | `checksum`, 64 bits | table or head in the file |
| page of 4096 bytes of a remote file | `page_checksums`, 32 bits | file beside the remote one, or in the cache |
| whole file | `digest`, `file_digest`, 128 bits | manifest of its folder, or name of the file |
| JSON text | `json_with_digest`, 128 bits | first member of the text |
| short content, as in a cache | `with_digest`, 128 bits | behind the content |

Another algorithm takes another four names from another library, here and nowhere else: two functions of bytes with a
``seed``, and two classes with ``update``, ``copy``, ``digest_size``, ``hexdigest`` and (of 64 bits) ``intdigest``.
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

ALGORITHM = "XXH3"
"""Name of the algorithm, for messages."""

DIGEST_BYTES = RunningDigest().digest_size
"""Bytes of a digest."""

DIGEST_DIGITS = 2 * DIGEST_BYTES
"""Hexadecimal digits of a digest, as text."""

PageChecksums = npt.NDArray[np.uint32]
"""Checksums of the pages of a file, uint32 ``[pages]``."""

PAGE = 4096
"""Bytes of a page that has a checksum of its own."""

_PIECE = 8 << 20
_HEAD, _HEAD_END = b'{"digest": "', b'",'


def check(path: str | os.PathLike[str], unit: str, expected: Any, found: Any) -> None:
    """Raise DataError, naming file and unit, unless the checksum found equals the checksum that was written."""
    if expected != found:
        shown = [one if isinstance(one, str) else f"{int(one):016x}" for one in (expected, found)]
        raise damaged(path, f"expected the checksum {shown[0]}, found {shown[1]}; {unit} is damaged")


def file_digest(
    stream: IO[bytes], end: int | None = None, more: bytes = b"", advance: Callable[[int], None] = lambda count: None
) -> str:
    """Return the digest of an open file.

    Args:
        stream: The file.
        end: Offset of the first byte that does not count; None: the whole file.
        more: Bytes that count as if they followed.
        advance: Called with the number of bytes of each piece read.
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
    """Return the checksum of each page of some runs of pages, uint32 ``[n]``: the lower half, seeded by page number.

    Args:
        contents: Bytes of each run; its last page may be shorter.
        firsts: Number of the first page of each run, counted from the beginning of the file.
    """
    found: list[int] = []
    for content, first in zip(contents, firsts, strict=True):
        with memoryview(content) as view:
            begins = range(0, len(view), PAGE)
            found += [checksum(view[begin : begin + PAGE], page) for page, begin in enumerate(begins, first)]
    return np.fromiter(found, np.uint64, len(found)).astype(np.uint32)  # the lower halves


# ---------------------------------------------------------------------- content that carries its own digest


def with_digest(content: bytes) -> bytes:
    """Return the content with its digest behind it."""
    return content + RunningDigest(content).digest()


def without_digest(content: bytes | memoryview) -> bytes | None:
    """Return the content that ``with_digest`` was given; None if it is damaged."""
    bare = bytes(content[:-DIGEST_BYTES])
    return bare if RunningDigest(bare).digest() == content[-DIGEST_BYTES:] else None


def json_with_digest(value: Mapping[str, Any]) -> bytes:
    """Return a JSON text whose first member is the digest of all text behind it: ``{"digest": "5f0c..", "rows": 3}``.

    Args:
        value: Members of the object, at least one, none called "digest".
    """
    rest = json.dumps(value, allow_nan=False).encode()[1:] + b"\n"
    return _HEAD + digest(rest).encode() + _HEAD_END + rest


def has_json_digest(text: bytes) -> bool:
    """Whether a text begins like one of ``json_with_digest``."""
    return text.startswith(_HEAD)


def check_json(path: str | os.PathLike[str], text: bytes, remedy: str = "") -> None:
    """Raise DataError unless ``json_with_digest`` wrote exactly this text.

    Args:
        path: The file, for the message.
        text: Content of the file.
        remedy: What to do about damage; empty: nothing is known.
    """
    begin, end = len(_HEAD), len(_HEAD) + DIGEST_DIGITS
    rest, found = text[end + len(_HEAD_END) :], text[begin:end].decode(errors="replace")
    if text[:begin] != _HEAD or text[end : end + len(_HEAD_END)] != _HEAD_END or found != digest(rest):
        more = f"; {remedy}" if remedy else ""
        raise damaged(path, f"expected the digest {digest(rest)} of its text, found {found!r:.80}; it is damaged{more}")


def cached_json(path: Path) -> dict[str, Any]:
    """Return the object that ``json_with_digest`` was given; empty if the file is missing or damaged."""
    try:
        text = read_bytes(path)
        check_json(path, text)
        value = dict(json_object(path, text))
    except (DataError, ConfigError):
        return {}
    value.pop("digest")
    return value
