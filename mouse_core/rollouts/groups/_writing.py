"""Sealed groups on their way into files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, pairwise
from pathlib import Path

import pyarrow as pa

from mouse_core.rollouts.groups._columns import rollouts_to_table
from mouse_core.rollouts.groups._files import (
    beside,
    folder_name,
    publish,
    remove,
    remove_partial,
    storing,
    sync_files,
    sync_folders,
    write_partial,
)
from mouse_core.rollouts.groups._parts import Part, digest_of, encode_group
from mouse_core.rollouts.groups.types import RolloutRecord

# Groups whose columns are made together: enough to spread the cost, few enough for int32 offsets and little memory.
_TOGETHER = 512
# More than there are cores: making a file in a folder is mostly waiting.
_THREADS = min(16, 2 * (os.cpu_count() or 1))


def write_groups(
    root: Path, groups: Sequence[Sequence[RolloutRecord]], *, number: int, compression: str, sync: bool
) -> list[Part]:
    """Write every group to a file of its own, all of them or none.

    Args:
        root: The buffer's folder.
        groups: The rollouts of each.
        number: Of the first group.
        compression: Of the pages.
        sync: Whether to wait until all is on the disk.

    Raises:
        StorageError: They cannot be written; no file is left.
    """
    folders = sorted({root / folder_name(group[0].environment) for group in groups})
    parts: list[Part] = []
    with storing(f"groups in {root}"):
        try:
            made = [folder for folder in folders if not folder.is_dir()]
            for folder in made:
                folder.mkdir(exist_ok=True)
            for begin in range(0, len(groups), _TOGETHER):
                parts += _write(root, groups[begin : begin + _TOGETHER], number + begin, compression)
            paths = [part.path(root) for part in parts]
            if sync:
                sync_files([beside(path) for path in paths])
            # From here on the rollouts are stored: readers see the files, and a restart finds them.
            publish(paths)
            if sync:
                sync_folders([*([root] if made else []), *folders])
        except BaseException:
            for part in parts:
                remove(part.path(root))
            for folder in folders:
                remove_partial(folder)
            raise
    return parts


def _write(root: Path, groups: Sequence[Sequence[RolloutRecord]], number: int, compression: str) -> list[Part]:
    """Write some groups beside where they belong."""
    rows = rollouts_to_table([rollout for group in groups for rollout in group])
    ends = list(accumulate(map(len, groups), initial=0))

    def write(first: int, last: int) -> list[Part]:
        return [
            _write_one(root, groups[place], rows.slice(begin, end - begin), number + place, compression)
            for place, (begin, end) in enumerate(pairwise(ends[first : last + 1]), start=first)
        ]

    if len(groups) < 4 or _THREADS == 1:
        return write(0, len(groups))
    cuts = [len(groups) * piece // (4 * _THREADS) for piece in range(4 * _THREADS + 1)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(chain.from_iterable(pool.map(write, cuts, cuts[1:])))


def _write_one(root: Path, group: Sequence[RolloutRecord], rows: pa.RecordBatch, number: int, compression: str) -> Part:
    content = encode_group(rows, compression, number)
    part = Part(
        key=group[0].key,
        name=f"part-{digest_of(content)}.parquet",
        number=number,
        uids=tuple(rollout.rollout_uid for rollout in group),
        created=tuple(rollout.created for rollout in group),
        rewards=tuple(rollout.reward for rollout in group),
    )
    write_partial(part.path(root), content)
    return part


def write_file(path: Path, content: memoryview, *, sync: bool) -> None:
    """Write one file, whole or not at all.

    Raises:
        StorageError: It cannot be written; nothing is left.
    """
    with storing(f"file {path}"):
        try:
            write_partial(path, content)
            if sync:
                sync_files([beside(path)])
            publish([path])
            if sync:
                sync_folders([path.parent])
        except BaseException:
            remove(beside(path))
            remove(path)
            raise
