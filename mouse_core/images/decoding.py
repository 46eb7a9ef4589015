"""Decoding the images of a batch: in the calling thread, or spread over processes.

Decoding keeps Python's lock for a good part of its time, so threads alone hardly gain from a second core. The workers
of a loader therefore hand images to processes, as many as there are workers: ``decoding_by`` wraps what they call. The
pixels are the same, and where processes cannot be started, are still starting, or die, the threads decode themselves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, convert
from mouse_core.images.pixels import decode_into

# Images for one process at a time: enough for a cheap answer, few enough to share a batch evenly.
_TASK_IMAGES, _TASK_BYTES = 32, 8 << 20


class Encoded(NamedTuple):
    """Encoded images side by side, and the rows they go to.

    Args:
        data: Their bytes, uint8.
        ends: Where each begins, and the end of the last, int64 ``[n + 1]``.
        row: The first of the ``n`` rows they go to.
    """

    data: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    row: int


class Wanted(NamedTuple):
    """The required shape and dtype of every image.

    Args:
        shape: ``(H, W, C)``.
        pixel: The dtype of its pixels.
    """

    shape: tuple[int, int, int]
    pixel: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of an image's pixels."""
        return self.shape[0] * self.shape[1] * self.shape[2] * self.pixel.itemsize


def tasks(images: Sequence[Encoded], wanted: Wanted) -> Iterator[list[Encoded]]:
    """The images as what is given to a process at a time: several short runs, or a part of a long one."""
    most = max(1, min(_TASK_IMAGES, _TASK_BYTES // wanted.nbytes))
    task, room = [], most
    for run in images:
        first, count = 0, len(run.ends) - 1
        while first < count:
            end = min(first + room, count)
            task.append(Encoded(run.data, run.ends[first : end + 1], run.row + first))
            room -= end - first
            first = end
            if not room:
                yield task
                task, room = [], most
    if task:
        yield task


def row_of(task: Sequence[Encoded], number: int) -> int:
    """The row that image ``number`` of a task goes to."""
    return [row for run in task for row in range(run.row, run.row + len(run.ends) - 1)][number]


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


T = TypeVar("T")

_FEWEST_IMAGES = 8
_END_SECONDS = 2.0

_here = threading.local()


def decode_rows(
    images: Sequence[Encoded], shape: tuple[int, int, int], out: npt.NDArray[Any], pixel: npt.DTypeLike = np.uint8
) -> None:
    """Decode images into rows of ``out``, ``[rows, H * W * C]`` of any dtype, whose pixels are of dtype ``pixel``.

    Raises:
        RowError: The image of a row cannot be decoded, has another shape, or does not fit the dtype.
    """
    pool: DecodePool | None = getattr(_here, "pool", None)
    wanted = Wanted(shape, np.dtype(pixel))
    began = perf_counter()
    if pool is not None and pool.count and sum(len(run.ends) - 1 for run in images) >= _FEWEST_IMAGES:
        pool.decode(images, wanted, out)
    else:
        for run in images:
            _decode_here(run, wanted, out)
    if pool is not None:
        pool.took(perf_counter() - began)


def decoding_by(pool: DecodePool, make: Callable[[int], T]) -> Callable[[int], T]:
    """Return ``make`` with its images decoded by the processes of ``pool``."""
    return partial(_make, pool, make)


def _make(pool: DecodePool, make: Callable[[int], T], index: int) -> T:
    before, _here.pool = getattr(_here, "pool", None), pool
    try:
        return make(index)
    finally:
        _here.pool = before


def _decode_here(run: Encoded, wanted: Wanted, out: npt.NDArray[Any]) -> None:
    pixels = np.empty(wanted.shape, wanted.pixel)
    ends, encoded = run.ends.tolist(), run.data.data
    for number in range(len(ends) - 1):
        row = out[run.row + number]
        direct = row.dtype == wanted.pixel
        target = row.reshape(wanted.shape) if direct else pixels
        try:
            decode_into(encoded[ends[number] : ends[number + 1]], target)
            if not direct:
                row[...] = convert(pixels.reshape(-1), row.dtype)
        except ValueError as error:
            raise RowError(run.row + number, str(error)) from error


class DecodePool:
    """Processes that decode images; started when there are some to decode.

    They end with ``close()``, with the garbage collection of this object, and with the process that started them. A
    forked child decodes for itself.

    Args:
        count: How many; of 0 the calling threads decode.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.seconds = 0.0
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: deque[_Process] = deque()
        self._all: list[_Process] = []
        self._started = False
        self._end = weakref.finalize(self, _end, self._all, self._owner)

    def decode(self, images: Sequence[Encoded], wanted: Wanted, out: npt.NDArray[Any]) -> None:
        """See ``decode_rows``."""
        if os.getpid() != self._owner:
            for run in images:
                _decode_here(run, wanted, out)
            return
        self._start()
        given: deque[tuple[_Process, Sequence[Encoded]]] = deque()
        errors: list[RowError] = []
        try:
            for task in tasks(images, wanted):
                process = self._take()
                while process is None and given:
                    self._collect(given, wanted, out, errors)
                    process = self._take()
                if process is not None and process.give(task, wanted):
                    given.append((process, task))
                else:  # all are busy with other batches, or dead
                    errors += _caught(task, wanted, out)
                if errors:
                    break
        finally:
            while given:
                self._collect(given, wanted, out, errors)
        if errors:
            raise min(errors, key=lambda error: error.row)

    def took(self, seconds: float) -> None:
        """Count the time that images took, in ``seconds``: that of all threads."""
        with self._lock:
            self.seconds += seconds

    def close(self) -> None:
        """End the processes; whatever is decoded afterwards is decoded by its thread."""
        self._end()

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
            if not self._end.alive:
                return
            for _ in range(self.count):
                process = _Process.start()
                if process is None:
                    return
                self._all.append(process)
                self._idle.append(process)

    def _take(self) -> _Process | None:
        """A process that has nothing to do and is there."""
        with self._lock:
            for _ in range(len(self._idle)):
                process = self._idle.popleft()
                if process.is_ready():
                    return process
                if not process.is_dead:
                    self._idle.append(process)
        return None

    def _collect(
        self,
        given: deque[tuple[_Process, Sequence[Encoded]]],
        wanted: Wanted,
        out: npt.NDArray[Any],
        errors: list[RowError],
    ) -> None:
        """Take the answer to what was given first."""
        process, task = given.popleft()
        try:
            if not process.take(task, wanted, out):
                errors += _caught(task, wanted, out)  # it died
        except RowError as error:
            errors.append(error)
        finally:
            if not process.is_dead:
                with self._lock:
                    self._idle.append(process)


class _Process:
    """A process, and the memory shared with it.

    It is used by one thread at a time, which writes a task, and reads the answer later.
    """

    def __init__(self, process: subprocess.Popen[bytes], file: IO[bytes]) -> None:
        # Files, not their descriptors: what is closed by another thread must not be mistaken for what is opened next.
        self._process: Any = process
        self._tasks: Any = process.stdin
        self._answers: Any = process.stdout
        self._file = file
        self._memory: mmap.mmap | None = None
        self._pixels_begin = 0
        self._is_ready = False
        self.is_dead = False

    @classmethod
    def start(cls) -> _Process | None:
        """A new one; None where that is not possible."""
        # Modules are found as here, and never in the folder of whatever is run: nothing of the caller's is run again.
        command = [sys.executable, "-P", "-c", "from mouse_core.images.decoding import main; main()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            file = _shared_file()
        except OSError:
            return None
        try:
            process = subprocess.Popen(
                [*command, str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                pass_fds=(file.fileno(),),
                bufsize=0,
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            file.close()
            return None
        return cls(process, file)

    def is_ready(self) -> bool:
        """Whether it has started; looks, and does not wait."""
        if not self._is_ready and not self.is_dead:
            try:
                if select.select([self._answers], [], [], 0)[0]:
                    self._is_ready = self._answers.read(1) == READY
                    self.is_dead = not self._is_ready
            except (OSError, ValueError):
                self.is_dead = True
        return self._is_ready and not self.is_dead

    def give(self, task: Sequence[Encoded], wanted: Wanted) -> bool:
        """Hand it images; whether it takes them."""
        sizes = np.concatenate([run.ends[1:] - run.ends[:-1] for run in task])
        octets = np.concatenate([run.data[run.ends[0] : run.ends[-1]] for run in task])
        count = len(sizes)
        begin = 8 * (count + 1)
        self._pixels_begin = -(-(begin + len(octets)) // 64) * 64
        try:
            memory = self._memory_of(self._pixels_begin + count * wanted.nbytes)
            np.cumsum([begin, *sizes], out=np.frombuffer(memory, np.int64, count + 1))
            np.frombuffer(memory, np.uint8, len(octets), begin)[:] = octets
            self._tasks.write(TASK.pack(len(memory), count, self._pixels_begin, wanted.pixel.itemsize, *wanted.shape))
        except (OSError, ValueError):
            self.is_dead = True
        return not self.is_dead

    def take(self, task: Sequence[Encoded], wanted: Wanted, out: npt.NDArray[Any]) -> bool:
        """Wait for the pixels and write them to ``out``; False if it died."""
        count, width = sum(len(run.ends) - 1 for run in task), wanted.nbytes // wanted.pixel.itemsize
        failed, message = -1, ""
        try:
            answer = read_exactly(self._answers.read, ANSWER.size)
            if answer:
                failed, length = ANSWER.unpack(answer)
                message = read_exactly(self._answers.read, length).decode() if length else ""
        except (OSError, ValueError):
            answer = b""
        if not answer or self._memory is None:
            self.is_dead = True
            return False
        if failed >= 0:
            raise RowError(row_of(task, failed), message)
        pixels = np.frombuffer(self._memory, wanted.pixel, count * width, self._pixels_begin).reshape(count, width)
        try:
            values = convert(pixels, out.dtype)
        except RowError as error:
            raise RowError(row_of(task, error.row), str(error)) from error
        first = 0
        for run in task:
            end = first + len(run.ends) - 1
            out[run.row : run.row + end - first] = values[first:end]
            first = end
        return True

    def _memory_of(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            size = -(-size * 5 // 4 // mmap.PAGESIZE) * mmap.PAGESIZE
            self._file.truncate(size)
            self._memory = mmap.mmap(self._file.fileno(), size)
        return self._memory

    def end(self) -> None:
        """End it at once: it holds nothing that could be lost."""
        self.is_dead = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for file in (self._tasks, self._answers, self._file):
            file.close()


def _end(processes: list[_Process], owner: int) -> None:
    if os.getpid() == owner:  # a forked child's copies of the pipes are not its own
        while processes:
            processes.pop().end()


def _caught(task: Sequence[Encoded], wanted: Wanted, out: npt.NDArray[Any]) -> list[RowError]:
    try:
        for run in task:
            _decode_here(run, wanted, out)
    except RowError as error:
        return [error]
    return []


def _shared_file() -> IO[bytes]:
    """A file that can be mapped by several processes, without a name."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("mouse-images"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
