"""Chunks of texts through a recipe, beside what reads and writes, in order."""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process

import pyarrow as pa

from mouse_core.errors import ConfigError, DataError, WorkerError
from mouse_core.text._rows import InRow
from mouse_core.text.encoding import Encoder
from mouse_core.text.recipes import Recipe

# Chunks that wait for each worker.
_AHEAD = 4


def encoded(
    batches: Iterator[pa.RecordBatch], recipe: Recipe, encode: Encoder, num_workers: int
) -> Iterator[pa.RecordBatch]:
    """What a recipe makes of each batch, in order; the first error ends it.

    Args:
        batches: Taken one after the other, a few ahead.
        recipe: It.
        encode: The tokenizer.
        num_workers: Processes; 0: one thread, so that no tokenizer is called twice at a time.

    Raises:
        ConfigError: Recipe or tokenizer cannot be given to processes.
        WorkerError: A process was ended.
    """
    if not num_workers:
        with ThreadPoolExecutor(1, "mouse-tokenize") as pool:
            yield from _in_order(pool, lambda batch: recipe.rows(batch, encode), batches, _AHEAD)
        return
    try:
        work = pickle.dumps((recipe, encode))
    except Exception as error:  # whatever the pickling of somebody's object raises
        raise ConfigError(
            f"num_workers: expected a tokenizer and recipe that can be pickled, found: {error}"
        ) from error
    # Forking a process with threads of Arrow's and of frameworks may hang.
    context = get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(work,)) as processes:
        try:
            yield from _in_order(processes, _run, batches, _AHEAD * num_workers)
        except BrokenProcessPool as error:
            raise WorkerError(
                f"tokenize: expected {num_workers} processes to work on, one was ended: {error}"
            ) from error
        finally:
            processes.shutdown(wait=False, cancel_futures=True)


def _in_order(
    pool: Executor,
    call: Callable[[pa.RecordBatch], pa.RecordBatch],
    batches: Iterator[pa.RecordBatch],
    ahead: int,
) -> Iterator[pa.RecordBatch]:
    coming: deque[tuple[int, Future[pa.RecordBatch]]] = deque()
    row = 0
    try:
        for batch in batches:
            coming.append((row, pool.submit(call, batch)))
            row += batch.num_rows
            if len(coming) > ahead:
                yield _made(*coming.popleft())
        while coming:
            yield _made(*coming.popleft())
    finally:
        for _, future in coming:
            future.cancel()


def _made(row: int, future: Future[pa.RecordBatch]) -> pa.RecordBatch:
    """What became of a batch that begins with a row."""
    try:
        return future.result()
    except InRow as error:
        raise DataError(f"row {row + error.row}: {error.message}") from error


# ---------------------------------------------------------------------- in a process of its own

_work: tuple[Recipe, Encoder] | None = None


def _begin(work: bytes) -> None:
    """In a new process: keep what is done, and end with the process that began it, however that ends."""
    global _work
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _work = pickle.loads(work)


def _end_with(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)


def _run(batch: pa.RecordBatch) -> pa.RecordBatch:
    if _work is None:
        raise WorkerError("tokenize: expected a process that was begun, found none")
    recipe, encode = _work
    return recipe.rows(batch, encode)
