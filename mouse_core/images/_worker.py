"""A process that decodes images; started by ``decoding`` as ``python -c "... main()" DESCRIPTOR``.

It reads tasks from its standard input and answers on its standard output; encoded images and pixels are in memory that
is shared with whoever started it. It ends, in silence, when its input does or nobody reads its answers any more, so it
never outlives the process it works for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mouse_core.images.pixels import decode_into

# Bytes of the shared memory, images, where the pixels begin, the bytes of one, and the shape of an image.
TASK = struct.Struct("=7q")
# The first image that failed, or -1, and the length of the message that follows.
ANSWER = struct.Struct("=2q")
READY = b"R"


def main() -> None:
    """Work until there are no more tasks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    with contextlib.suppress(BrokenPipeError):  # who asked has ended, maybe while an image was decoded
        _answer_tasks(int(sys.argv[1]), answers)


def _answer_tasks(descriptor: int, answers: int) -> None:
    tasks = partial(os.read, 0)
    memory: mmap.mmap | None = None
    os.write(answers, READY)
    while task := read_exactly(tasks, TASK.size):
        size, count, pixels_begin, item, height, width, channels = TASK.unpack(task)
        if memory is None or len(memory) != size:
            memory = mmap.mmap(descriptor, size)
        failed, message = _decode(memory, count, pixels_begin, np.dtype(f"u{item}"), (height, width, channels))
        encoded = message.encode()
        os.write(answers, ANSWER.pack(failed, len(encoded)) + encoded)


def _decode(
    memory: mmap.mmap, count: int, pixels_begin: int, dtype: np.dtype[Any], shape: tuple[int, int, int]
) -> tuple[int, str]:
    ends = np.frombuffer(memory, np.int64, count + 1)
    pixels = np.frombuffer(memory, dtype, count * shape[0] * shape[1] * shape[2], pixels_begin)
    images = pixels.reshape(count, *shape)
    encoded = memoryview(memory)
    for number, (begin, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        try:
            decode_into(encoded[begin:end], images[number])
        except Exception as error:  # it is raised again by the one who asked
            return number, str(error)
    return -1, ""


def read_exactly(read: Callable[[int], bytes | None], size: int) -> bytes:
    """``size`` bytes, or none at the end of the input."""
    parts = b""
    while len(parts) < size:
        part = read(size - len(parts))
        if not part:
            return b""
        parts += part
    return parts
