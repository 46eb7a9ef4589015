"""preprocess: what a function makes of all rows, as a new dataset: in parallel, resumable, opened again when done."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.about.dataset import About, read_about
from mouse_core.errors import ConfigError, DataError, WorkerError
from mouse_core.files.locking import alone
from mouse_core.files.reading import read_json_object
from mouse_core.files.writing import check_nothing_at, make_folder, put_in_place, storing, write_file
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats._files.shards import Shard, begin_result, dataset_schema, describe, finish_names, keep_only
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.opening import open
from mouse_core.formats.preprocessing._blocks import (
    Block,
    Work,
    begin_worker,
    contents,
    quick_digest,
    run_block,
    stored_rows,
)
from mouse_core.formats.preprocessing.function import identity, pickled
from mouse_core.formats.rows import read_rows
from mouse_core.spec import check_count, check_list
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

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


_BLOCK_BYTES = 64 << 20
# So that 8 processes have 4 blocks each of rows that are small; as many for any number of processes, which may be
# another one when a call goes on.
_LEAST_BLOCKS, _FEW_ROWS = 32, 1_000


@dataclass(frozen=True)
class Preprocessed:
    """What became of a dataset.

    Args:
        path: Where the new one is: a folder for ``datasets.load_from_disk`` and ``formats.open``.
        rows: How many rows it has.
        digest: Of all of them; see ``rows_digest``.
        resumed_rows: Rows that a call before had made already.
        reopened: Whether all was there, and nothing was computed.
    """

    path: str
    rows: int
    digest: str
    resumed_rows: int = 0
    reopened: bool = False

    def to_store(self, **options: Any) -> DatasetStore:
        """The new dataset as a store, by reference; ``options`` as ``DatasetStore`` takes them."""
        return open(self.path).to_store(**options)


def preprocess(
    rows: Any,
    function: Callable[[dict[str, npt.NDArray[Any]]], Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    num_workers: int = 0,
    version: str = "",
    block_rows: int | None = None,
    progress: bool = False,
) -> Preprocessed:
    """Write what a function makes of every row to a new dataset, which says of itself what the old one does.

    The function is called with the columns of some whole episodes, ``{name: array [n, ...]}``, encoded images as
    pixels, and returns a dict of columns ``[n, ...]`` of the same rows: those that are new or other than before; None
    for one that is to be left out. All others are taken over as they are stored. It must be pure: blocks are made in
    any order and, after an interruption, again. What it is given is read-only.

    Blocks are files of a folder ``.NAME.preprocessing`` beside ``path``, which becomes ``path`` when all is there and
    was read back. After an interruption at any moment the same call goes on where it was, with any ``num_workers``.
    When all is there, and rows and function are the same, nothing is done; all rows are read to see that they are. Of
    images that rows name by path the path counts. The same function is one of the same name,
    code and arguments, which reads the same of its module, functions and classes as well. Of installed packages the
    code of functions counts, and the names of classes: change ``version`` when they change.

    Args:
        rows: A store, a view of one or a snapshot; a ``RowStream``, or a path that ``formats.open`` opens; or a
            ``datasets.Dataset`` or ``pyarrow.Table``. Derived fields are columns like the others.
        function: What can be pickled: defined with ``def`` at the top of a module, with ``functools.partial`` of it for
            arguments, or an object of such a class.
        path: The folder of the new dataset.
        columns: Those that the function is given; by default all.
        num_workers: Processes that run it; 0: the calling one does. They are started afresh, so a script needs
            ``if __name__ == "__main__":``.
        version: Of what the function does, a text; needed where it reads what cannot be pickled, as a lock.
        block_rows: About how many rows a block has, in whole episodes; by default as many as take 64 MB, or a 32nd of
            all rows where that is less (but 1,000). With another number unfinished work begins anew.
        progress: Whether a bar shows how far it is.

    Returns:
        Where the new dataset is; ``to_store()`` opens it.

    Raises:
        ConfigError: A function that cannot be pickled, no rows, an option out of range, another dataset or unfinished
            work at ``path`` that is not of these rows and this function, or another process at work on it.
        WorkerError: The function raised an error, which is chained, or a process was ended.
        DataError: Rows that cannot be arrays, or a function that returns something else than columns of these rows.
        StorageError: It cannot be written; what was made so far is there for the next call. Where the disk is full that
            may lack what was made in the last half second, of which it could not be noted that it is there.
    """
    target = Path(path)
    check_folder_name(target, wanted="the name of a folder")
    check_count("num_workers", num_workers, 0)
    if not isinstance(version, str):
        raise ConfigError(f"version: expected a text, found {version!r}")
    names = None if columns is None else check_list("columns", columns)
    snapshot, about = _snapshot_of(rows)
    schema = pa.schema(list(stored_types(snapshot.segments).items()))
    for name in names or ():
        if name not in schema.names:
            raise ConfigError(f"columns: expected some of {schema.names}, found {name!r}")
    work_folder = target.with_name(f".{target.name}.preprocessing")
    work = Work(snapshot, schema, pickled(function), names, about, work_folder)
    made_of = {
        "rows": f"{len(snapshot)} rows {snapshot.fingerprint}",
        "columns of the rows": str(schema.remove_metadata()),
        "what the rows say of themselves": about.to_json(),
        **identity(function, version),
        "columns": json.dumps(names),
    }
    if (target / MADE).is_file():
        return _reopened(target, made_of, work)
    check_nothing_at(target, "preprocess")
    edges = _edges(snapshot, schema, block_rows)
    with storing(f"preprocess: {str(path)!r}"):
        make_folder(work_folder)
        with alone(work_folder / _LOCK, "preprocess"):
            job = Job(work, edges, made_of)
            resumed = job.rows_done
            try:
                digest = job.run(target, num_workers=num_workers, progress=progress)
            finally:
                # Without a block there is nothing to go on from.
                if not job.shards:
                    shutil.rmtree(work_folder, ignore_errors=True)
    return Preprocessed(str(target), len(snapshot), digest, resumed)


def _snapshot_of(rows: Any) -> tuple[Snapshot, About]:
    """The snapshot of whatever rows are given as, and what they say of themselves."""
    if isinstance(rows, str | os.PathLike):
        rows = open(rows)
    if isinstance(rows, RowStream):
        rows = rows.to_store()
    elif not isinstance(rows, Store | Snapshot):
        said = read_about(rows, where="rows").alignment if isinstance(rows, pa.Table) or hasattr(rows, "info") else None
        rows = DatasetStore(alignment=said).from_dataset(rows)
    if isinstance(rows, Snapshot):
        snapshot, about = rows, About("outgoing" if rows.alignment == "outgoing" else None)
    else:
        snapshot, about = rows.snapshot(), rows.about
    if snapshot.has_shares:
        raise ConfigError(
            "rows: expected those of a member of a mixture, found the mixture, whose shares would be lost"
        )
    if not len(snapshot):
        raise ConfigError("rows: expected some, found none")
    return snapshot, about


def _edges(snapshot: Snapshot, schema: pa.Schema, block_rows: int | None) -> list[int]:
    """The first row of each block, and the end: where episodes begin, about so many rows apart."""
    if block_rows is None:
        some = stored_rows(snapshot, 0, min(len(snapshot), 256), schema)
        share = max(_FEW_ROWS, -(-len(snapshot) // _LEAST_BLOCKS))
        block_rows = max(1, min(_BLOCK_BYTES * len(some) // max(some.nbytes, 1), share))
    check_count("block_rows", block_rows)
    starts = snapshot.episode_starts
    wanted = np.arange(0, len(snapshot), block_rows)
    # The last block takes what is left of the rows.
    edges = starts[np.searchsorted(starts, wanted, side="right") - 1]
    return [*dict.fromkeys(edges.tolist()), len(snapshot)]


def _reopened(target: Path, made_of: Mapping[str, str], work: Work) -> Preprocessed:
    """What an earlier call made, if it is of the same rows and function."""
    found = read_json_object(target / MADE)
    what, remedy = f"{str(target)!r} was made", "give another path, or delete it"
    check_same(found.get("made of"), made_of, what, remedy)
    try:
        edges, sources = [int(edge) for edge in found["edges"]], dict(enumerate(found["sources"]))
        blocks = dict(enumerate(pairwise(edges)))
        if len(blocks) != len(sources) or edges[:1] != [0] or edges[-1] != len(work.snapshot):
            raise ValueError(f"{len(sources)} digests of rows up to {edges[-1:]}")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{target / MADE}: expected what preprocess notes, found something else ({error})") from error
    check_sources(work, blocks, sources, what, remedy)
    rows = read_rows(target).rows
    return Preprocessed(str(target), int(rows or 0), str(found.get("digest")), int(rows or 0), reopened=True)
