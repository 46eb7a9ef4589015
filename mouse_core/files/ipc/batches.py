"""Where the record batches of an Arrow file lie, and where the values of each column do, from metadata alone.

A file of Arrow is a row of messages and at its end a footer, which says where each begins; a stream has no footer, and
an end mark in its place::

    ARROW1.. | schema | head 0 | body 0 | head 1 | body 1 | ... | end mark | footer | length of the footer | ARROW1
               schema | head 0 | body 0 | head 1 | body 1 | ... | end mark

The head of a record batch says how many rows it has, and at which bytes of the body each column has its memory: whether
values are null, where lists end, the values. So a hundred thousand record batches are known from 24 bytes of footer and
some hundred bytes of head each, wherever the file lies, and their values are read when somebody wants them. Footer and
heads are FlatBuffers (https://arrow.apache.org/docs/format/Columnar.html, format/File.fbs and Message.fbs).

Nothing here is believed: what does not lie in the file, or the body, is a ``DataError``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.files.ipc.columns import Head, Read
from mouse_core.files.ipc.metadata import Flat

MAGIC = b"ARROW1"
END_BYTES = 10
"""What stands behind a footer: its length and the magic."""

PREFIX_BYTES = 8
"""What stands before the metadata of a message: a mark and the metadata's length."""

_SCHEMA, _RECORD_BATCH = 1, 3
_MARK = 0xFFFFFFFF
_BLOCKS = np.dtype([("offset", "<i8"), ("head", "<i4"), ("unused", "<i4"), ("body", "<i8")])
# A head has 16 bytes for each piece of memory and each level of a column; no table has so many.
_MOST_METADATA = 64 << 20


@dataclass(frozen=True)
class Footer:
    """Where the record batches of a file lie.

    Args:
        begins: At which byte of the file each begins, int64 ``[n]``; a view of the footer's memory, as the others are.
        heads: The bytes of its head, int32 ``[n]``.
        bodies: The bytes of its body, which follows, int64 ``[n]``.
        begin: At which byte of the file the footer begins.
        has_dictionaries: Whether values of columns are numbers of others, which lie elsewhere in the file.
    """

    begins: npt.NDArray[np.int64]
    heads: npt.NDArray[np.int32]
    bodies: npt.NDArray[np.int64]
    begin: int
    has_dictionaries: bool

    def __len__(self) -> int:
        return len(self.begins)

    def span(self, number: int) -> tuple[int, int, int]:
        """At which bytes of the file a record batch and its body begin, and at which both end."""
        begin = int(self.begins[number])
        body = begin + int(self.heads[number])
        return begin, body, body + int(self.bodies[number])


def read_footer(read: Read, size: int) -> Footer:
    """The footer of a file, read from its end: its last 10 bytes first, and then it alone.

    Args:
        read: Reads the file.
        size: How many bytes it has.

    Raises:
        DataError: It is no file of Arrow, or was cut.
    """
    end = memoryview(read(size - END_BYTES, size)) if size > len(MAGIC) + END_BYTES else memoryview(b"")
    if bytes(end[4:]) != MAGIC:
        raise DataError("expected an Arrow file that ends with its footer, found none; it was cut or never finished")
    begin = size - END_BYTES - int.from_bytes(end[:4], "little")
    if not len(MAGIC) <= begin < size - END_BYTES:
        raise DataError(f"expected a footer in a file of {size} bytes, found one that begins at byte {begin}")
    flat = Flat.root(memoryview(read(begin, size - END_BYTES)))
    _check_little(flat.table(1))
    blocks = flat.rows(3, _BLOCKS)
    begins, heads, bodies = blocks["offset"], blocks["head"], blocks["body"]
    if len(blocks):
        least = min(int(begins.min()), int(heads.min()) - PREFIX_BYTES, int(bodies.min()))
        most = max(int(begins.max()), int(bodies.max()))
        # Both are compared, as their sum may be too large for a number of 8 bytes.
        if least < 0 or most > begin or int((begins + heads + bodies).max()) > begin:
            raise DataError(f"expected record batches before byte {begin}, found some that are not there")
    return Footer(begins, heads, bodies, begin, len(flat.rows(2, _BLOCKS)) > 0)


def _check_little(schema: Flat | None) -> None:
    if schema is None:
        raise DataError("expected a schema in the metadata of Arrow, found none")
    if schema.number(0, "<h"):
        raise DataError("expected values whose lowest byte stands first, found them the other way round")


class Message(NamedTuple):
    """A message of a stream or a file, as its head says.

    Args:
        begin: At which byte it begins.
        body: At which byte its body does.
        end: At which byte the next message begins.
        head: What a record batch consists of; None: it is something else.
    """

    begin: int
    body: int
    end: int
    head: Head | None


def read_message(read: Read, begin: int, size: int, *, guess: int = 4096) -> Message | None:
    """The message that begins at a byte; None where the end mark stands there.

    Args:
        read: Reads the file or the stream.
        begin: That byte.
        size: How many bytes there are.
        guess: How many to read at first; a second read follows if the head is longer.

    Raises:
        DataError: No message begins there, or it does not end in the file.
    """
    memory = memoryview(read(begin, min(begin + max(guess, PREFIX_BYTES), size)))
    if len(memory) < PREFIX_BYTES:
        raise DataError(f"expected a message of Arrow at byte {begin}, found the end of the file; it was cut")
    mark, length = struct.unpack_from("<II", memory)
    if mark != _MARK or length > _MOST_METADATA:
        raise DataError(f"expected a message of Arrow at byte {begin}, found other bytes; it is damaged")
    if not length:
        return None
    body = begin + PREFIX_BYTES + length
    if body > size:
        raise DataError(f"expected the head of a message before byte {size}, found it to end at {body}; it was cut")
    if len(memory) < PREFIX_BYTES + length:
        memory = memoryview(read(begin, body))
    flat = Flat.root(memory[PREFIX_BYTES : PREFIX_BYTES + length])
    end = body + flat.number(3, "<q")
    if not body <= end <= size:
        raise DataError(f"expected the body of a message before byte {size}, found it to end at {end}; it was cut")
    table = flat.table(2)
    if flat.number(1, "<B") == _SCHEMA:
        _check_little(table)
    if table is None or flat.number(1, "<B") != _RECORD_BATCH:
        return Message(begin, body, end, None)
    return Message(begin, body, end, Head.of(table, end - body, flat.number(0, "<h")))


def messages(read: Read, size: int, *, begin: int = 0, guess: int = 4096) -> Iterator[Message]:
    """The messages of a stream one after the other, each found where the one before ends.

    Args:
        read, size, guess: As for ``read_message``.
        begin: At which byte the first begins.

    Raises:
        DataError: It is damaged, was cut, or goes on behind its end mark.
    """
    while (message := read_message(read, begin, size, guess=guess)) is not None:
        yield message
        begin = message.end
    if begin + PREFIX_BYTES != size:
        raise DataError(f"expected the end of the stream at byte {size}, found its end mark at byte {begin}")
