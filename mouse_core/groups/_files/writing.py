"""Sealed groups on their way into files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

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
from mouse_core.groups._files.arrow import rollouts_to_table, rollouts_with, split_rows
from mouse_core.groups._files.names import folder_name
from mouse_core.groups._files.part import GroupFile, parts_of
from mouse_core.groups._files.parts import DECLARED, PLACES, ROWS, digest_of, encode_table, writing_options
from mouse_core.groups._files.waiting import Unsealed
from mouse_core.groups.types.columns import NO_COLUMNS, Columns
from mouse_core.groups.types.records import GroupKey, RolloutRecord

# The most groups that share a file, and the most tokens of those that do: of a small file most of the time goes into
# what every file takes, and of a large one all is read where one group is wanted.
_SHARING = 16
_TOKENS = 2**17
# Files whose columns are made together, and that are synced together: enough to spread what that costs, few enough for
# the disk to be at work while the next ones are encoded.
_TOGETHER = 8

_Numbered = tuple[int, Sequence[Unsealed]]


class _File(NamedTuple):
    """Groups of one environment on their way into a file."""

    numbers: list[int]
    groups: list[list[RolloutRecord]]
    rows: pa.Table


class _Written(NamedTuple):
    """Groups that are in a file, and where this belongs."""

    parts: list[GroupFile]
    path: str


def write_groups(
    root: Path,
    groups: Sequence[tuple[GroupKey, Sequence[Unsealed]]],
    load: Callable[[Sequence[Sequence[Unsealed]]], list[list[RolloutRecord]]],
    *,
    number: int,
    compression: str,
    sync: bool,
    declared: Columns = NO_COLUMNS,
) -> list[GroupFile]:
    """Write groups to files, those of an environment together, all of them or none; in the order they were given.

    Args:
        root: The buffer's folder.
        groups: Which ones, and their rollouts.
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
            shared = _shared(groups, number)
            _write_all(write, _files(shared, load, declared), len(shared), written, sync=sync)
            # From here on the rollouts are stored: readers see the files, and a restart finds them.
            publish(file.path for file in written)
            if sync:
                sync_folders([*([root] if made else []), *folders.values()])
        except BaseException:
            for file in written:
                remove(file.path)
            for folder in folders.values():
                remove_leftovers(folder, only_writer=True)
            raise
    return sorted(chain.from_iterable(file.parts for file in written), key=attrgetter("number"))


def _shared(groups: Sequence[tuple[GroupKey, Sequence[Unsealed]]], number: int) -> list[list[_Numbered]]:
    """Which groups share a file, with their numbers, of which the first one is given."""
    files: list[list[_Numbered]] = []
    last: dict[str, tuple[list[_Numbered], int]] = {}
    for place, (key, group) in enumerate(groups, number):
        file, held = last.get(key.environment, ([], 0))
        tokens = sum([one.tokens for one in group])
        if not file or len(file) == _SHARING or held + tokens > _TOKENS:
            file, held = [], 0
            files.append(file)
        file.append((place, group))
        last[key.environment] = file, held + tokens
    return files


def _files(
    shared: Sequence[list[_Numbered]],
    load: Callable[[Sequence[Sequence[Unsealed]]], list[list[RolloutRecord]]],
    declared: Columns,
) -> Iterator[_File]:
    """The files with the rollouts and columns of their groups, one after the other."""
    for together in (shared[at : at + _TOGETHER] for at in range(0, len(shared), _TOGETHER)):
        loaded = load([group for file in together for _, group in file])
        cuts = list(accumulate(map(len, together), initial=0))
        ends = list(accumulate(map(len, loaded), initial=0))
        rows = rollouts_to_table(list(chain.from_iterable(loaded)), declared)
        tables = split_rows(rows, [ends[cut] for cut in cuts], declared)
        for file, table, (begin, end) in zip(together, tables, pairwise(cuts), strict=True):
            yield _File([place for place, _ in file], loaded[begin:end], table)


def _write_all(
    write: Callable[[_File], _Written], files: Iterator[_File], count: int, written: list[_Written], *, sync: bool
) -> None:
    """Write files beside where they belong, in threads; what has been written reaches the disk meanwhile."""
    if count == 1:
        written += map(write, files)
        if sync:
            sync_files([beside(file.path) for file in written])
        return
    syncing: list[Future[None]] = []

    def sync_from(place: int) -> int:
        if sync and place < len(written):
            syncing.append(disk.submit(sync_files, [beside(file.path) for file in written[place:]]))
        return len(written)

    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as disk:
        synced = 0
        for file in in_order(pool, write, files):
            written.append(file)
            if len(written) - synced >= _TOGETHER:
                synced = sync_from(synced)
        sync_from(synced)
    for future in syncing:
        future.result()


def _write(file: _File, *, folders: Mapping[str, str], options: Mapping[str, Any], declared: int) -> _Written:
    """Write a file beside where it belongs."""
    sizes = map(len, file.groups)
    noted = {PLACES: " ".join(map(str, file.numbers)).encode(), ROWS: " ".join(map(str, sizes)).encode()}
    if declared:
        noted[DECLARED] = str(declared).encode()
    content = encode_table(file.rows, options, noted)
    parts = parts_of(file.groups, name=f"part-{digest_of(content)}.parquet", numbers=file.numbers, declared=declared)
    path = os.path.join(folders[parts[0].key.environment], parts[0].name)
    write_partial(path, content)
    return _Written(parts, path)
