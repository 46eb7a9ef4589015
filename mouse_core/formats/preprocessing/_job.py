"""The blocks of one preprocessing: which are made, by whom, and what they become together."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError, WorkerError
from mouse_core.files.reading import read_json_object
from mouse_core.files.writing import put_in_place, write_file
from mouse_core.formats._files.shards import Shard, begin_result, dataset_schema, describe, finish_names, keep_only
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.preprocessing._blocks import (
    Block,
    Work,
    begin_worker,
    contents,
    quick_digest,
    run_block,
    stored_rows,
)
from mouse_core.formats.rows import read_rows

MADE = "preprocessed.json"
"""The file in which a dataset says what it was made of."""
_JOB, _LOCK = "job.json", "lock"
# What is done is noted so often, in seconds: as much is done again after a kill, and a block of each process.
_NOTED = 0.5


def check_same(found: Any, made_of: Mapping[str, str], what: str, remedy: str) -> None:
    """Raise ConfigError, saying in what, if something was made of other rows or by another function."""
    known = found if isinstance(found, dict) else {}
    differing = [key for key, value in made_of.items() if known.get(key) != value]
    if differing:
        raise ConfigError(f"preprocess: {what} of something else: it differs in {', '.join(differing)}; {remedy}")


def check_sources(
    work: Work, blocks: Mapping[int, tuple[int, int]], sources: Mapping[int, str], what: str, remedy: str
) -> None:
    """Raise ConfigError, saying of which rows, if blocks were made of others; see ``check_same``."""
    for number, (begin, end) in blocks.items():
        if contents(stored_rows(work.snapshot, begin, end, work.schema)) != sources[number]:
            raise ConfigError(
                f"preprocess: {what} of something else: it differs in rows, some of {begin}..{end - 1}; {remedy}"
            )


@contextmanager
def _said_by(file: Path) -> Iterator[None]:
    """Errors of what a file should say of unfinished work, with what to do."""
    try:
        yield
    except (DataError, KeyError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise DataError(
            f"{file}: expected what preprocess noted of its work, found something else ({error}); delete the folder "
            f"{str(file.parent)!r}, and call again"
        ) from error


class Job:
    """One run over all rows, and what of it is done.

    Args:
        work: What is done with each block.
        edges: The first row of each, and the end.
        made_of: What decides about the result.
    """

    def __init__(self, work: Work, edges: list[int], made_of: Mapping[str, str]) -> None:
        self.work, self.edges, self.made_of = work, edges, made_of
        self._noted = 0.0
        self.shards: dict[int, Shard] = {}
        # Digests of the rows that blocks were made of.
        self.sources: dict[int, str] = {}
        self.schema: pa.Schema | None = None
        self._load()

    @property
    def rows_done(self) -> int:
        """How many rows are made."""
        return sum(shard.rows for shard in self.shards.values())

    def run(self, target: Path, *, num_workers: int, progress: bool) -> str:
        """Do what is left to do; the digest of all rows."""
        with progress_bar("preprocessing", total=self.edges[-1], unit="rows", enabled=progress) as advance:
            advance(self.rows_done)
            self._run_blocks(num_workers, advance)
        return self._finish(target)

    def _run_blocks(self, num_workers: int, advance: Callable[[int], None]) -> None:
        todo = [number for number in range(len(self.edges) - 1) if number not in self.shards]
        try:
            with _pool(self.work, min(num_workers, len(todo))) as submit:
                # The first block says what columns there are.
                first = 1 if self.schema is None else 0
                for numbers in (todo[:first], todo[first:]):
                    for (shard, schema, source), number in self._done(numbers, submit, 2 * num_workers or 1):
                        self.shards[number], self.sources[number] = shard, source
                        self.schema = self.schema or schema
                        advance(shard.rows)
                        if time.monotonic() > self._noted + _NOTED:
                            self._save()
        finally:
            if self.shards:
                self._save()

    def _done(
        self, numbers: Sequence[int], submit: Callable[..., Future[Any]], ahead: int
    ) -> Iterator[tuple[Block, int]]:
        """Blocks as they are done, in any order; so many are under way."""
        left = iter(numbers)
        under_way: dict[Future[Any], int] = {}
        while True:
            for number in islice(left, ahead - len(under_way)):
                begin, end = self.edges[number : number + 2]
                under_way[submit(number, begin, end, self.schema)] = number
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                number = under_way.pop(future)
                try:
                    block = future.result()
                except BrokenProcessPool as error:
                    raise WorkerError(
                        "preprocess: a process ended in the middle of its work: it was killed, as for memory (fewer "
                        "num_workers, or smaller block_rows, take less), or could not begin, as where a script lacks "
                        "if __name__ == '__main__': or the function stands in no module"
                    ) from error
                yield block, number

    def _finish(self, target: Path) -> str:
        """Read back what was written, and give it its place; the digest of all rows."""
        assert self.schema is not None
        work = self.work.folder
        shards = [self.shards[number] for number in sorted(self.shards)]
        whole = RowDigest(self.schema)
        for shard in shards:
            digest = quick_digest(self.schema)
            for batch in read_rows(work / shard.name):
                digest.update(batch)
                whole.update(batch)
            if digest.hexdigest() != shard.digest:
                (work / shard.name).unlink()
                raise DataError(f"{work / shard.name}: expected the rows that were written, found others; call again")
        result = begin_result(work)
        counts = finish_names(work, result, shards, "arrow")
        schema = dataset_schema(self.schema, self.work.about, "preprocess")
        describe(result, schema, self.work.about, counts, whole.hexdigest())
        sources = [self.sources[number] for number in sorted(self.shards)]
        made = {"made of": dict(self.made_of), "digest": whole.hexdigest(), "edges": self.edges, "sources": sources}
        (result / MADE).write_text(json.dumps(made, indent=2), encoding="utf-8")
        put_in_place(result, target)
        shutil.rmtree(work, ignore_errors=True)
        return whole.hexdigest()

    def _load(self) -> None:
        """Take over what an interrupted call of the same rows and function left behind."""
        folder = self.work.folder
        found: dict[str, Any] = {}
        if (folder / _JOB).exists():
            with _said_by(folder / _JOB):
                found = dict(read_json_object(folder / _JOB))
            remedy = "finish it, or delete the folder"
            what = f"unfinished work is in {str(folder)!r},"
            check_same(found.get("made of"), self.made_of, what, remedy)
            with _said_by(folder / _JOB):
                if found["edges"] == self.edges:
                    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"])))
                    shards = {int(number): Shard(**shard) for number, shard in found["shards"].items()}
                    sources = {number: str(found["sources"][str(number)]) for number in shards}
                    self.shards = {number: shard for number, shard in shards.items() if shard.is_in(folder)}
                    self.sources = {number: sources[number] for number in self.shards}
                    self.schema = schema if self.shards else None
            blocks = {number: (self.edges[number], self.edges[number + 1]) for number in self.shards}
            check_sources(self.work, blocks, self.sources, what, remedy)
        keep_only(folder, {shard.name for shard in self.shards.values()} | {_JOB, _LOCK})

    def _save(self) -> None:
        assert self.schema is not None
        state = {
            "made of": dict(self.made_of),
            "edges": self.edges,
            "schema": base64.b64encode(self.schema.serialize()).decode(),
            "shards": {str(number): vars(shard) for number, shard in self.shards.items()},
            "sources": {str(number): source for number, source in self.sources.items()},
        }
        write_file(self.work.folder / _JOB, json.dumps(state).encode(), only_writer=True)
        self._noted = time.monotonic()


@contextmanager
def _pool(work: Work, num_workers: int) -> Iterator[Callable[..., Future[Any]]]:
    """A function that has blocks made, by so many processes, or by this one."""
    if not num_workers:
        yield lambda *block: _at_once(work.run, *block)
        return
    # Forking a process with threads of Arrow's and of frameworks may hang.
    context = get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=begin_worker, initargs=(pickle.dumps(work),))
    try:
        yield lambda *block: pool.submit(run_block, *block)
    finally:
        pool.shutdown(cancel_futures=True)


def _at_once(run: Callable[..., Any], *block: Any) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(run(*block))
    except Exception as error:  # which result() raises again
        done.set_exception(error)
    return done
