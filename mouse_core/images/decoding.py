"""Decodes the images of a batch, in the calling thread or in several processes.

Decoding holds Python's global interpreter lock most of the time, so several threads are hardly faster than a single
thread. Therefore each worker thread of a loader passes images to a separate process: ``decoding_by`` wraps the function
of a worker. The pixels are the same. If a process cannot be started, is still starting, or has died, the thread decodes
the images.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.dtypes import RowError, convert
from mouse_core.images.pixels import decode_image, decode_into

T = TypeVar("T")

Images = Sequence[tuple[int, memoryview]]
"""Pairs of an encoded image and the row of ``out`` for its pixels."""

# Images for one process at a time: many enough for a low overhead, few enough to share a batch evenly.
_TASK_IMAGES, _TASK_BYTES = 32, 8 << 20
_FEWEST_IMAGES = 8
_END_SECONDS = 2.0

_here = threading.local()


def fill_images(
    runs: Sequence[tuple[pa.Array, int, Sequence[str]]],
    shape: tuple[int, int, int],
    out: npt.NDArray[Any],
    *,
    fill: float | None,
    pixel: np.dtype[Any],
) -> None:
    """Decode rows of images into rows of ``out``.

    Args:
        runs: Runs of rows. Each run has rows of an image column (binary, or ``{bytes, path}``), the row of ``out`` for
            the first of these rows, and the allowed folders of paths.
        shape: ``(H, W, C)`` of an image.
        out: ``[rows, H * W * C]`` of any dtype.
        fill: Pixel value for rows that are null; if ``fill`` is None, a null raises an error.
        pixel: The dtype of pixels.

    Raises:
        RowError: A row is null and ``fill`` is None, or an image cannot be read or has another shape.
        ValueError: The Arrow array is damaged.
    """
    encoded: list[tuple[int, memoryview]] = []
    for values, first, roots in runs:
        is_struct = pa.types.is_struct(values.type)
        inner = values.field("bytes") if is_struct and not values.null_count else values
        if not inner.null_count and not pa.types.is_struct(inner.type) and not pa.types.is_null(inner.type):
            encoded += enumerate(_bytes_of(inner), first)
            continue
        for row, value in enumerate(values.to_pylist(), first):  # some images are null, or are separate files
            if value is None:
                if fill is None:
                    raise RowError(row, "expected a value, found null")
                out[row] = fill
                continue
            try:
                found = decode_image(value, shape=shape, dtype=pixel, image_roots=roots)
                out[row] = convert(found.reshape(-1), out.dtype)
            except ValueError as error:
                raise RowError(row, str(error)) from error
    decode_rows(encoded, shape, out, pixel)


def _bytes_of(values: pa.Array) -> list[memoryview]:
    """Return views of the bytes of each binary value."""
    _, ends, data = values.buffers()
    wide = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    every: npt.NDArray[Any] = np.frombuffer(ends, wide)[values.offset : values.offset + len(values) + 1]
    size = 0 if data is None else data.size
    if every[0] < 0 or every[-1] > size or (every[1:] < every[:-1]).any():
        raise ValueError(f"expected encoded images in {size} bytes, found {every[0]}..{every[-1]}; it is damaged")
    octets = memoryview(b"" if data is None else data)
    return [octets[begin:end] for begin, end in pairwise(every.tolist())]


def decode_rows(images: Images, shape: tuple[int, int, int], out: npt.NDArray[Any], pixel: np.dtype[Any]) -> None:
    """Decode images to pixels of dtype ``pixel``, in rows of ``out``, ``[rows, H * W * C]`` of any dtype.

    Raises:
        RowError: The image of a row cannot be decoded, has another shape, or does not fit the dtype.
    """
    pool: DecodePool | None = getattr(_here, "pool", None)
    began = perf_counter()
    if pool is not None and pool.count and len(images) >= _FEWEST_IMAGES:
        pool.decode(images, shape, out, pixel)
    else:
        _decode_here(images, shape, out, pixel)
    if pool is not None:
        pool.took(perf_counter() - began)


def _decode_here(images: Images, shape: tuple[int, int, int], out: npt.NDArray[Any], pixel: np.dtype[Any]) -> None:
    pixels, is_direct = np.empty(shape, pixel), out.dtype == pixel
    for row, image in images:
        try:
            decode_into(image, out[row].reshape(shape) if is_direct else pixels)
            if not is_direct:
                out[row] = convert(pixels.reshape(-1), out.dtype)
        except ValueError as error:
            raise RowError(row, str(error)) from error


def decoding_by(pool: DecodePool, make: Callable[[int], T]) -> Callable[[int], T]:
    """Return a function that calls ``make``, and has the images of this call decoded by the processes of ``pool``."""
    return partial(_make, pool, make)


def _make(pool: DecodePool, make: Callable[[int], T], index: int) -> T:
    before, _here.pool = getattr(_here, "pool", None), pool
    try:
        return make(index)
    finally:
        _here.pool = before


class DecodePool:
    """Processes that decode images; they are started when the first images arrive.

    The processes end when ``close()`` is called, when this object is garbage-collected, or when the process that
    started them ends. After a fork, the child process decodes in its threads.

    Args:
        count: Number of processes; with 0, the calling threads decode.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.seconds = 0.0
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: deque[DecodeProcess] = deque()
        self._all: list[DecodeProcess] = []
        self._started = False
        self._end = weakref.finalize(self, _end, self._all, self._owner)

    def decode(self, images: Images, shape: tuple[int, int, int], out: npt.NDArray[Any], pixel: np.dtype[Any]) -> None:
        """See ``decode_rows``."""
        if os.getpid() != self._owner:
            _decode_here(images, shape, out, pixel)
            return
        self._start()
        given: deque[tuple[DecodeProcess, Images]] = deque()
        errors: list[RowError] = []

        def decode_here(task: Images) -> None:
            try:
                _decode_here(task, shape, out, pixel)
            except RowError as error:
                errors.append(error)

        def collect() -> None:
            """Receive the result of the oldest task."""
            process, task = given.popleft()
            try:
                if not process.take(task, out):  # the process died
                    decode_here(task)
            except RowError as error:
                errors.append(error)
            finally:
                if not process.is_dead:
                    with self._lock:
                        self._idle.append(process)

        most = max(1, min(_TASK_IMAGES, _TASK_BYTES // (int(np.prod(shape)) * pixel.itemsize)))
        try:
            for first in range(0, len(images), most):
                task, process = images[first : first + most], self._take()
                while process is None and given:
                    collect()
                    process = self._take()
                if process is not None and process.give(task, shape, pixel):
                    given.append((process, task))
                else:  # all processes are dead, or busy with other batches
                    decode_here(task)
                if errors:
                    break
        finally:
            while given:
                collect()
        if errors:
            raise min(errors, key=lambda error: error.row)

    def took(self, seconds: float) -> None:
        """Add ``seconds`` to the time that threads spent on images."""
        with self._lock:
            self.seconds += seconds

    def close(self) -> None:
        """End the processes; after this call, the calling threads decode."""
        self._end()

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
            for _ in range(self.count if self._end.alive else 0):
                try:
                    process = DecodeProcess()
                except (OSError, ValueError, subprocess.SubprocessError):
                    return
                self._all.append(process)
                self._idle.append(process)

    def _take(self) -> DecodeProcess | None:
        """Return a started process without a task; None if there is no such process."""
        with self._lock:
            for _ in range(len(self._idle)):
                process = self._idle.popleft()
                if process.is_ready():
                    return process
                if not process.is_dead:
                    self._idle.append(process)
        return None


class DecodeProcess:
    """A decoding process. One thread at a time writes a task to the process, and reads the result later.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: The process cannot be started.
    """

    def __init__(self) -> None:
        # The process finds modules as this one does, but not in the script's folder, so that it runs no code of the
        # caller.
        command = [sys.executable, "-P", "-c", "from mouse_core.images.decoding import answer_tasks; answer_tasks()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._is_ready = False
        self.is_dead = False

    def is_ready(self) -> bool:
        """Whether the process has started. The call does not wait."""
        if not self._is_ready and not self.is_dead:
            with suppress(OSError, ValueError):
                if not select.select([self._process.stdout], [], [], 0)[0]:
                    return False
            self._is_ready = self._answer() is not None
        return self._is_ready and not self.is_dead

    def give(self, task: Images, shape: tuple[int, int, int], pixel: np.dtype[Any]) -> bool:
        """Write images to the process; return whether it accepted them."""
        try:
            pickle.dump(([bytes(image) for _, image in task], shape, pixel), self._process.stdin, 5)
            self._process.stdin.flush()
        except (OSError, ValueError):
            self.is_dead = True
        return not self.is_dead

    def take(self, task: Images, out: npt.NDArray[Any]) -> bool:
        """Wait for the pixels and write them to ``out``; return False if the process died."""
        answer = self._answer()
        if answer is None:
            return False
        if isinstance(answer, tuple):
            failed, message = answer
            raise RowError(task[failed][0], message)
        try:
            out[[row for row, _ in task]] = convert(answer, out.dtype)
        except RowError as error:
            raise RowError(task[error.row][0], str(error)) from error
        return True

    def _answer(self) -> Any:
        try:
            return pickle.load(self._process.stdout)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):
            self.is_dead = True
            return None

    def end(self) -> None:
        """Kill the process, which holds no data that could be lost."""
        self.is_dead = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # for data that were not flushed
                stream.close()


def _end(processes: list[DecodeProcess], owner: int) -> None:
    if os.getpid() == owner:  # in a forked child, the pipes belong to the parent
        while processes:
            processes.pop().end()


def answer_tasks() -> None:
    """Decode the images of tasks from standard input, until the input ends.

    A process of ``DecodePool`` runs this function.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    answer: Any = ()
    with suppress(EOFError, BrokenPipeError):  # the parent process has ended, possibly during a decode
        while True:
            pickle.dump(answer, answers, 5)
            answers.flush()
            images, shape, pixel = pickle.load(sys.stdin.buffer)
            pixels = np.empty((len(images), int(np.prod(shape))), pixel)
            try:
                _decode_here(list(enumerate(images)), shape, pixels, pixel)
                answer = pixels
            except Exception as error:  # the parent process raises it again
                answer = getattr(error, "row", 0), str(error)
