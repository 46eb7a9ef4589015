"""Late columns on their way to the disk: few values go into a log, many into files, each once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.errors import DataError, StorageError
from mouse_core.files.log import Log
from mouse_core.files.writing import (
    beside,
    make_folder,
    publish,
    remove,
    remove_leftovers,
    storing,
    sync_files,
    sync_folders,
    write_partial,
)
from mouse_core.groups.stored.chunks import (
    Chunk,
    encode_file,
    encode_files,
    encode_record,
    joined,
    late_folder,
    values_of,
)
from mouse_core.groups.stored.late import LatePlaces, late_log
from mouse_core.groups.types.columns import Columns, RolloutColumn
from mouse_core.groups.types.records import same_values

# More than so many bytes of a column at once are a file at once.
_MANY_BYTES = 2**20
# What the log may have, and memory with it, before files are made of it; and about the size of a file, which is read
# whole when one of its values is asked for.
_LOG_BYTES = 32 * 2**20
_FILE_BYTES = 16 * 2**20


class LateStore:
    """The late columns of a folder, for its one writer.

    Args:
        root: The folder.
        declared: Its columns.
        compression: Of the pages.
        sync: Whether to wait for the disk.

    Attributes:
        places: Where the values lie.

    Raises:
        DataError: Damage; the message names the file.
        StorageError: Something cannot be read or written.
    """

    def __init__(self, root: Path, declared: Columns, *, compression: str, sync: bool) -> None:
        self._root, self._compression, self._sync = root, compression, sync
        for column in declared.late:
            with storing(f"folder {late_folder(root, column)}"):
                make_folder(late_folder(root, column), sync=sync)
            remove_leftovers(late_folder(root, column), only_writer=True)
        self._log = Log(late_log(root), noted=True) if declared.late else None
        try:
            self.places = LatePlaces(root, declared, [] if self._log is None else self._log.records)
        except BaseException:
            self.close()
            raise
        if self._log is not None:
            self._log.records = []
            self._note([])

    def add(self, chunks: Sequence[Chunk], arrived: Callable[[Chunk], None]) -> list[int]:
        """Write values of one or several columns; what is there already is left out.

        Args:
            chunks: The values.
            arrived: Is told what was new, once that is on the disk.

        Returns:
            How many of each were new.

        Raises:
            DataError: A rollout has another value of the column; the message names it. Nothing was written.
            StorageError: They cannot be written; nothing was, or, where there are several chunks, some.
        """
        self._refuse_twice(chunks)
        unknown = list(map(self._unknown, chunks))
        many: list[Chunk] = []
        few: list[Chunk] = []
        for chunk in unknown:
            if chunk.uids:
                (many if chunk.nbytes > _MANY_BYTES else few).append(chunk)
        for chunk in many:
            self._note(self._write(chunk))
            arrived(chunk)
        if few and self._log is not None:
            self._log.append(encode_record(few), sync=self._sync)
            for chunk in few:
                self.places.add_chunk(chunk)
                arrived(chunk)
            # The log says the same, and can be made smaller another time.
            with contextlib.suppress(StorageError):
                self._tidy()
        return [len(chunk.uids) for chunk in unknown]

    def _refuse_twice(self, chunks: Sequence[Chunk]) -> None:
        """Raise DataError where several chunks have a value of the same column for the same rollout."""
        seen: dict[str, set[str]] = {}
        for chunk in chunks if len(chunks) > 1 else ():
            others = seen.setdefault(chunk.column.name, set())
            for uid in others.intersection(chunk.uids):
                raise DataError(f"add_column {chunk.column.name!r}: expected rollout {uid!r} once, found it twice")
            others.update(chunk.uids)

    def _unknown(self, chunk: Chunk) -> Chunk:
        """Those values that are not there yet."""
        places = self.places.places[chunk.column.name]
        known = places.keys() & set(chunk.uids) if places else set()
        if not known:
            return chunk
        name, given = chunk.column.name, values_of(chunk.column, chunk.values)
        rows = []
        for row, uid in enumerate(chunk.uids):
            if uid not in known:
                rows.append(row)
                continue
            there = self.places.value(name, uid)
            if not same_values(there, given[row]):
                raise DataError(
                    f"add_column {name!r}, rollout {uid!r}: expected the value that it has, "
                    f"{_shown(there)}, found {_shown(given[row])}"
                )
        return chunk.take(rows)

    def _note(self, paths: Sequence[Path]) -> None:
        """Note that files are there; what cannot be noted is with the next ones."""
        self.places.unnoted += paths
        if self.places.unnoted and self._log is not None:
            with contextlib.suppress(StorageError):
                self._log.append(encode_files(self.places.unnoted), sync=self._sync)
                self.places.unnoted.clear()

    def _write(self, chunk: Chunk) -> list[Path]:
        """Write files of a chunk, all of them or none; which ones."""
        folder = late_folder(self._root, chunk.column)
        written: list[tuple[Chunk, str]] = []
        with storing(f"late columns in {folder}"):
            try:
                for piece in chunk.cut(_FILE_BYTES):
                    name, content = encode_file(piece, self._compression)
                    written.append((piece, os.path.join(folder, name)))
                    write_partial(written[-1][1], content)
                paths = [path for _, path in written]
                if self._sync:
                    sync_files([beside(path) for path in paths])
                publish(paths)
                if self._sync:
                    sync_folders([folder])
            except BaseException:
                for _, path in written:
                    remove(path)
                remove_leftovers(folder, only_writer=True)
                raise
        for piece, path in written:
            self.places.add_file(chunk.column, Path(path), piece.uids)
        files = [Path(path) for _, path in written]
        self.places.files += files
        return files

    def _tidy(self) -> None:
        """Make files of what the log has, where that is much."""
        if self._log is None or self._log.size <= _LOG_BYTES:
            return
        by_column: dict[RolloutColumn, list[tuple[int, Chunk]]] = {}
        for number, chunk in self.places.in_memory():
            by_column.setdefault(chunk.column, []).append((number, chunk))
        for pairs in by_column.values():
            self._write(joined([chunk for _, chunk in pairs]))
            for number, _ in pairs:
                self.places.forget(number)
        # Whoever reads the log now has the old file, and all that it says.
        self._log.rewrite([encode_files(self.places.files)])

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def _shown(value: Any) -> str:
    return f"{np.asarray(value).reshape(-1)[:4].tolist()}"
