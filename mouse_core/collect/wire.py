"""Messages over a socket: what is asked for or answered, in JSON, and bytes behind it.

    b"MSC1" | length of the JSON, 4 bytes | length of the bytes behind it, 8 bytes | JSON | bytes

Numbers are little-endian. Lengths are looked at before there is memory for them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mouse_core.errors import ConfigError, DataError

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"MSC1"
_MOST_SAID = 1 << 24
MOST_BYTES = 1 << 31
"""Bytes of the rows of one write, at most."""
_MOST_PARTS = 512  # which the system takes at once
_LONGEST_PATH = 100


def send(to: socket.socket, said: Mapping[str, Any], parts: Sequence[memoryview] = ()) -> None:
    """Send a message.

    Raises:
        DataError: Too many bytes.
        OSError: Nobody takes it.
    """
    text = json.dumps(said).encode()
    nbytes = sum(part.nbytes for part in parts)
    if nbytes > MOST_BYTES or len(text) > _MOST_SAID:
        raise DataError(
            f"write: expected rows of up to {MOST_BYTES} bytes, found {nbytes}; write fewer of them at once"
        )
    rest = [memoryview(_HEAD.pack(_MAGIC, len(text), nbytes) + text), *[part for part in parts if part.nbytes]]
    while rest:
        sent = to.sendmsg(rest[:_MOST_PARTS])
        while rest and sent >= rest[0].nbytes:
            sent -= rest.pop(0).nbytes
        if sent:
            rest[0] = rest[0][sent:]


def receive(source: socket.socket) -> tuple[dict[str, Any], memoryview]:
    """The next message.

    Raises:
        ConnectionError: There is none any more.
        DataError: It is no message.
        OSError: It cannot be had.
    """
    magic, said, nbytes = _HEAD.unpack(_exactly(source, _HEAD.size))
    if magic != _MAGIC or said > _MOST_SAID or nbytes > MOST_BYTES:
        raise DataError(
            f"message: expected one of up to {MOST_BYTES} bytes, found {bytes(magic)!r} of {said} and {nbytes}"
        )
    try:
        text = json.loads(bytes(_exactly(source, said)))
    except ValueError as error:
        raise DataError(f"message: expected JSON, found {error}") from error
    if not isinstance(text, dict):
        raise DataError(f"message: expected a dict, found {text!r:.80}")
    return text, _exactly(source, nbytes)


def _exactly(source: socket.socket, nbytes: int) -> memoryview:
    memory = memoryview(bytearray(nbytes))
    done = 0
    while done < nbytes:
        count = source.recv_into(memory[done:])
        if not count:
            raise ConnectionResetError("the other side has closed the connection")
        done += count
    return memory


@contextmanager
def reachable(path: str) -> Iterator[str]:
    """A path to a socket that is short enough for the system."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        short = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        if not os.path.isdir(os.path.dirname(short)):
            raise ConfigError(f"address: expected a path of up to {_LONGEST_PATH} bytes on this system, found {path!r}")
        yield short
    finally:
        os.close(folder)
