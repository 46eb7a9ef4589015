"""Sealed groups on their way into files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core._base.threads import THREADS, in_order
from mouse_core.files.writing import (
    beside,
    publish,
    remove,
    remove_leftovers,
    storing,
    sync_files,
    sync_folders,
    write_partial,
)
from mouse_core.groups._files.arrow.rollouts import rollouts_to_table, rollouts_with, split_rows
from mouse_core.groups._files.names import folder_name
from mouse_core.groups._files.parts import DECLARED, NUMBER, Part, digest_of, encode_table, part_of, writing_options
from mouse_core.groups.types.columns import NO_COLUMNS, Columns
from mouse_core.groups.types.records import GroupKey, RolloutRecord

# Groups whose columns are made together, and whose files are synced together: enough to spread what that costs, few
# enough for the disk to be at work while the next ones are encoded.
_TOGETHER = 128
# Groups that a thread writes at a time.
_PIECE = 16
# Fewer groups than these are not worth a thread.
_FEW = 4

_Group = tuple[int, list[RolloutRecord], pa.Table]
_Written = tuple[Part, str]


def write_groups(
    root: Path,
    groups: Sequence[tuple[GroupKey, Sequence[Any]]],
    load: Callable[[Sequence[Sequence[Any]]], list[list[RolloutRecord]]],
    *,
    number: int,
    compression: str,
    sync: bool,
    declared: Columns = NO_COLUMNS,
) -> list[Part]:
    """Write every group to a file of its own, all of them or none.

    Args:
        root: The buffer's folder.
        groups: Which ones, and what ``load`` takes for the rollouts of each.
        load: Gives the rollouts of some groups, which are in memory while they are written.
        number: Of the first group.
        compression: Of the pages.
        sync: Whether to wait until all is on the disk.
        declared: Columns that the rollouts may have beside those of all.

    Raises:
        StorageError: They cannot be written; no file is left. What ``load`` raises.
    """
    environments = dict.fromkeys(key.environment for key, _ in groups)
    folders = {environment: str(root / folder_name(environment)) for environment in environments}
    options = writing_options(rollouts_with(declared), compression, declared)
    write = partial(_write, folders=folders, options=options, declared=len(declared))
    written: list[_Written] = []
    with storing(f"groups in {root}"):
        try:
            made = [folder for folder in folders.values() if not os.path.isdir(folder)]
            for folder in made:
                os.makedirs(folder, exist_ok=True)
            pieces = _pieces([group for _, group in groups], load, number, declared)
            _write_all(write, pieces, len(groups), written, sync=sync)
            # From here on the rollouts are stored: readers see the files, and a restart finds them.
            publish(path for _, path in written)
            if sync:
                sync_folders([*([root] if made else []), *folders.values()])
        except BaseException:
            for _, path in written:
                remove(path)
            for folder in folders.values():
                remove_leftovers(folder, only_writer=True)
            raise
    return [part for part, _ in written]


def _pieces(
    groups: Sequence[Sequence[Any]],
    load: Callable[[Sequence[Sequence[Any]]], list[list[RolloutRecord]]],
    number: int,
    declared: Columns,
) -> Iterator[list[_Group]]:
    """The groups with their numbers and columns, some at a time."""
    times = -(-len(groups) // _TOGETHER)
    for turn in range(times):
        begin, end = (len(groups) * place // times for place in (turn, turn + 1))
        together = load(groups[begin:end])
        rows = rollouts_to_table(list(chain.from_iterable(together)), declared)
        split = split_rows(rows, list(accumulate(map(len, together), initial=0)), declared)
        numbered = list(zip(count(number + begin), together, split, strict=False))
        for first in range(0, len(numbered), _PIECE):
            yield numbered[first : first + _PIECE]


def _write_all(
    write: Callable[[list[_Group]], list[_Written]],
    pieces: Iterator[list[_Group]],
    groups: int,
    written: list[_Written],
    *,
    sync: bool,
) -> None:
    """Write groups beside where they belong; many in threads, and what has been written reaches the disk meanwhile."""
    if groups < _FEW:
        written += chain.from_iterable(map(write, pieces))
        if sync:
            sync_files([beside(path) for _, path in written])
        return
    syncing: list[Future[None]] = []

    def sync_from(place: int) -> int:
        if sync and place < len(written):
            syncing.append(disk.submit(sync_files, [beside(path) for _, path in written[place:]]))
        return len(written)

    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as disk:
        synced = 0
        for some in in_order(pool, write, pieces):
            written += some
            if len(written) - synced >= _TOGETHER:
                synced = sync_from(synced)
        sync_from(synced)
    for future in syncing:
        future.result()


def _write(
    groups: list[_Group], *, folders: Mapping[str, str], options: Mapping[str, Any], declared: int
) -> list[_Written]:
    """Write some groups beside where they belong."""
    written = []
    for number, group, rows in groups:
        noted = {NUMBER: str(number).encode()}
        if declared:
            noted[DECLARED] = str(declared).encode()
        content = encode_table(rows, options, noted)
        part = part_of(group, name=f"part-{digest_of(content)}.parquet", number=number, declared=declared)
        path = os.path.join(folders[part.key.environment], part.name)
        write_partial(path, content)
        written.append((part, path))
    return written
