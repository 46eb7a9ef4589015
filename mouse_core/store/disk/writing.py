"""The rows of a folder as its one writer has them: appended to files that are mapped, and sealed when they are full."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mouse_core._arrow.dense_copies import DenseBudget
from mouse_core._base.locks import uninterrupted
from mouse_core.errors import ClosedError, ConfigError, ForkError, StorageError
from mouse_core.store._intake import Appender, Rows
from mouse_core.store._schema import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.disk.manifest import Manifest, Sealed, Tail
from mouse_core.store.disk.reading import ReadRows, Refusing
from mouse_core.store.disk.sealed import LAYOUTS, MOST_BYTES
from mouse_core.store.disk.sealing import SealingRows
from mouse_core.store.disk.tail import FolderAppender, SyncedAppender, TailFile
from mouse_core.store.disk.upkeep import ALL, Limits, wait_for_sealing
from mouse_core.store.snapshot import shows_no_join

if TYPE_CHECKING:
    from mouse_core.about.dataset import About

_SYNC = ("none", "flush", "append")


class WrittenRows(SealingRows):
    """Those of the writer.

    Args:
        folder, told, budget, verify: See ``FolderRows``.
        sync: See ``DatasetStore.open``.
        limits: Which rows stay.
        layout: See ``SealingRows``.
    """

    def __init__(
        self,
        folder: Path,
        told: StoreSchema,
        budget: DenseBudget,
        verify: bool,
        sync: str,
        limits: Limits,
        layout: str | None,
    ) -> None:
        super().__init__(folder, told, budget, verify, sync, limits, layout)
        self._process = os.getpid()
        # What is interrupted before the rows are sealed, in the order in which it came.
        self._recordings: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._folder.note_opened(self.end)
        self.appender = self._new_appender()
        _writers.add(self)
        self._keep_newest()
        self._seal_in_background()

    def _keep_newest(self) -> None:
        """Drop rows that an older limit let stay, or none; files are cut, as they may be larger than is to stay."""
        if self.limits == ALL:
            return
        try:
            self.seal_waiting()
            with self.lock:
                self.drop()
        except StorageError:
            pass  # they go when there is room

    # ------------------------------------------------------------------ what the store asks for

    def flush(self) -> None:
        """See ``DatasetStore.flush``."""
        with self.lock:
            self._check()
            self.commit()
            self._seal_in_background()
            self._folder.clean()

    def close(self) -> None:
        """See ``DatasetStore.close``."""
        if isinstance(self.appender, Refusing):
            return
        with ExitStack() as ends:
            ends.callback(self._seal_and_let_go)  # also where a recording cannot be ended
            for recording in reversed(list(self._recordings)):
                ends.callback(recording.interrupt)

    def break_off(self, recording: Any) -> None:
        """See ``DatasetStore.break_off``."""
        self._recordings[recording] = None

    def _seal_and_let_go(self) -> None:
        while True:
            with self.lock:
                if isinstance(self.appender, Refusing):
                    return
                # A thread that merges must be done before another process may write.
                if self._is_sealed() and not self.is_sealing():
                    uninterrupted(self._finish)
                    return
                self.commit()
                uninterrupted(self.appender.close)
            self.seal_waiting()

    def _finish(self) -> None:
        self._folder.have_manifest()
        about = self.schema.about()
        if about != self._folder.manifest.about:
            self._replace(replace(self._folder.manifest, about=about))
        self._refuse(partial(_closed, self.folder_path))

    def _is_sealed(self) -> bool:
        """Whether all rows are in sealed segments; another thread may have appended some meanwhile."""
        return not self._waiting and (not isinstance(self.appender, FolderAppender) or self.appender.tail is None)

    def take(self, segments: Sequence[Segment], said: Sequence[tuple[str, About]]) -> None:
        """Write the rows of segments into the folder; see ``Rows``."""
        while True:
            with self.lock:
                self._check()
                schema = self.schema.merged(segments, said)
                if self._is_sealed():
                    loads = self._loads_of(segments, schema)
                    pieces = self._pieces_of(segments, loads)
                    sealed, manifest = self._written(pieces, appended=False, only_newest=True)
                    uninterrupted(partial(self._take_sealed, sealed, manifest, schema))
                    return
                uninterrupted(self.appender.close)
            self.seal_waiting()

    def _loads_of(self, segments: Sequence[Segment], schema: StoreSchema) -> list[int]:
        """The ``load`` of each of some datasets: that of the rows before where the rows show the end of an episode."""
        known = self._folder.manifest.segments
        newest = max((one.load for one in known), default=0)
        before: Segment | None = self.segments[-1] if known else None
        current = known[-1].load if known else 0
        loads = []
        for segment in segments:
            if segment.num_rows:
                if not current or before is None or shows_no_join(before, segment, schema.config()):
                    newest = current = newest + 1
                before = segment
            loads.append(current)
        return loads

    def _take_sealed(self, sealed: Sequence[Sealed], manifest: Manifest, schema: StoreSchema) -> None:
        before, self.schema = self.schema, schema
        try:
            self.name_behind(sealed, manifest)
        except BaseException:
            self.schema = before
            raise
        self.appender = self._new_appender()

    def name_behind(self, sealed: Sequence[Sealed], manifest: Manifest) -> None:
        """Have segments that no manifest names yet behind all others.

        Args:
            sealed: Them.
            manifest: Which knows their schemas, and how many rows before them are dropped.
        """
        now, first = self._folder.manifest, self.end
        dropped = manifest.dropped - now.dropped
        if dropped:
            # All that were before these are older.
            _, places = now.with_schemas(sealed, manifest.schemas)
            known = replace(manifest, about=self.schema.about(), segments=tuple(places), tails=())
            self._replace(replace(known, dropped=first + dropped))
            self.segments, self.count, first = [], 0, first + dropped
        else:
            self._name_sealed(sealed, manifest.schemas)
        self.segments += self._segments_of(sealed, first)
        self.count += sum(one.rows for one in sealed)
        self._kept = None
        self.drop()

    def clear(self) -> None:
        """Forget all rows; the files go once the manifest no longer names them."""
        with self.lock:
            self._check()
        self._wait_for_sealing()
        with self.lock:
            uninterrupted(self._forget)

    def _forget(self) -> None:
        self._replace(replace(self._folder.manifest, segments=(), tails=(), dropped=self.end))
        self._waiting.clear()
        self.segments, self.count, self._kept = [], 0, None
        self.appender = self._new_appender()
        self._folder.clean()

    def room_of_open(self) -> tuple[int, int]:
        """See ``SealingRows``."""
        tail = self.appender.tail if isinstance(self.appender, FolderAppender) else None
        return (0, 0) if tail is None else (tail.extent.rows, tail.nbytes)

    # ------------------------------------------------------------------ what the appender asks for

    @property
    def keeps_all(self) -> bool:
        """Whether no row is ever dropped."""
        return self.limits == ALL

    def most_of_a_file(self) -> tuple[int, int | None]:
        """How many bytes and rows a file may have."""
        return self.limits.of_a_file(MOST_BYTES)

    def commit(self, *, sync: bool | None = None) -> None:
        """Let readers see the rows so far, by default once they are on the disk if ``sync`` of the store says so."""
        sync = self.sync != "none" if sync is None else sync
        super().commit(sync=sync)
        if isinstance(self.appender, FolderAppender) and self.appender.tail is not None:
            self.appender.tail.commit(sync=sync)
        self._folder.check_there()
        self._folder.have_manifest()

    def new_tail(self) -> tuple[int, Path]:
        """The number and the path of another file of rows."""
        number = self._folder.take_number()
        return number, self.folder_path / Tail(number, 0).name

    def may_name(self, number: int) -> bool:
        """Whether a manifest on the disk may name a file."""
        return self._folder.may_name(number)

    def name_tail(self, number: int, tail: TailFile, rows_before: int | None) -> None:
        """Have a manifest that names a new file of rows.

        Args:
            number: Its number.
            tail: It.
            rows_before: How many rows are in the one before, which takes no more; None: there are none.
        """
        manifest, schema = self._folder.manifest.with_schema(tail.extent.to_table(0).schema)
        tails = list(manifest.tails)
        if tails and tails[-1].rows is None:
            last = tails.pop()
            # One that was left by another writer waits.
            waiting = [one.extent.count for one, _ in self._waiting if one.path.name == last.name]
            rows = waiting[0] if waiting else rows_before
            tails += [] if rows is None else [last._replace(rows=rows)]
        tails.append(Tail(number, schema, identity=tail.layout.identity))
        self._replace(replace(manifest, about=self.schema.about(), tails=tuple(tails)))

    def forget_tail(self, tail: TailFile) -> None:
        """Have a manifest that does not name a file of rows."""
        manifest = self._folder.manifest
        tails = tuple(one for one in manifest.tails if one.name != tail.path.name)
        if tails != manifest.tails:
            self._replace(replace(manifest, tails=tails))

    def retire(self, tail: TailFile, first: int) -> None:
        """Seal a file, soon."""
        self._wait(tail, first)
        self._seal_in_background()

    def _new_appender(self) -> Appender:
        return SyncedAppender(self) if self.sync == "append" else FolderAppender(self)

    # ------------------------------------------------------------------ who may write

    def recount(self) -> None:
        """See ``Rows``; those that count after an interrupt are there for whoever opens the folder, too."""
        super().recount()
        if isinstance(self.appender, FolderAppender) and self.appender.tail is not None:
            try:
                self.appender.tail.extent.settle()
            except StorageError:
                super().recount()  # their objects cannot be written, and they are taken back

    def _check(self) -> None:
        """Raise unless rows may be written from here."""
        if isinstance(self.appender, Refusing):
            raise self.appender.error()

    def _refuse(self, error: object) -> None:
        """Take no more rows."""
        self.appender = Refusing(error)  # type: ignore[assignment]
        self._folder.close()

    def let_go(self) -> None:
        """In a forked child: the parent is the one writer."""
        if isinstance(self.appender, Refusing):
            return
        # What the parent appends from now on is behind these rows.
        segment = self.appender.segment()
        self.segments += [] if segment is None else [segment]
        self._refuse(partial(_forked, self.folder_path, self._process))
        self.recount()


def open_rows(
    path: str | os.PathLike[str],
    mode: str,
    sync: str,
    verify: bool,
    told: Rows,
    limits: Limits = ALL,
    layout: str | None = None,
) -> Rows:
    """The rows of a folder, in a store that was told ``told`` of them, which is empty."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"open: expected the path of a folder, found {path!r:.80}")
    if mode not in ("r", "a"):
        raise ConfigError(f"open: expected the mode 'r' or 'a', found {mode!r}")
    if sync not in _SYNC:
        raise ConfigError(f"open: expected sync among {list(_SYNC)}, found {sync!r}")
    if layout not in (None, *LAYOUTS):
        raise ConfigError(f"open: expected layout among {list(LAYOUTS)}, found {layout!r:.80}")
    # As it is now: whoever changes the folder that the process is in does not move the store.
    folder = Path(os.path.abspath(os.fspath(path)))
    if mode == "r":
        limits.refuse_for_readers()
        if layout is not None:
            raise ConfigError("layout: expected mode 'a', found 'r'; a reader takes files as they are")
        return ReadRows(folder, told.schema, told.budget, verify)
    wait_for_sealing(folder)
    return WrittenRows(folder, told.schema, told.budget, verify, sync, limits, layout)


# Of the path alone: a store that its own errors refer to would keep files until Python looks for such circles.
def _closed(path: Path) -> ClosedError:
    return ClosedError(f"store {path}: expected an open one, found it closed")


def _forked(path: Path, process: int) -> ForkError:
    return ForkError(
        f"store {path}: expected to be written in process {process}, found the forked child {os.getpid()}; "
        f"DatasetStore.open({str(path)!r}) reads it there"
    )


_writers: weakref.WeakSet[WrittenRows] = weakref.WeakSet()


def _let_go() -> None:
    for writer in list(_writers):
        writer.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
