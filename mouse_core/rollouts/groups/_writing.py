"""Sealed groups on their way into files."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from mouse_core.rollouts.groups._columns import rollouts_to_table
from mouse_core.rollouts.groups._files import (
    beside,
    folder_name,
    publish,
    remove,
    storing,
    sync_files,
    sync_folders,
    write_partial,
)
from mouse_core.rollouts.groups._parts import Part, encode_group
from mouse_core.rollouts.groups.types import RolloutRecord

# Groups whose columns are made together: enough to spread the cost, few enough for int32 offsets and little memory.
_TOGETHER = 512
_THREADS = max(1, min(8, os.cpu_count() or 1))


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
    names = [f"part-{uuid.uuid4()}.parquet" for _ in groups]
    paths = [root / folder_name(group[0].environment) / name for group, name in zip(groups, names, strict=True)]
    folders = sorted({path.parent for path in paths})
    parts: list[Part] = []
    with storing(f"groups in {root}"):
        try:
            made = [folder for folder in folders if not folder.is_dir()]
            for folder in made:
                folder.mkdir(exist_ok=True)
            for begin in range(0, len(groups), _TOGETHER):
                piece = slice(begin, begin + _TOGETHER)
                parts += _write(groups[piece], paths[piece], number + begin, compression)
            if sync:
                sync_files([beside(path) for path in paths])
            # From here on the rollouts are stored: readers see the files, and a restart finds them.
            publish(paths)
            if sync:
                sync_folders([*([root] if made else []), *folders])
        except BaseException:
            for path in paths:
                remove(beside(path))
                remove(path)
            raise
    return parts


def _write(
    groups: Sequence[Sequence[RolloutRecord]], paths: Sequence[Path], number: int, compression: str
) -> list[Part]:
    rows = rollouts_to_table([rollout for group in groups for rollout in group])
    jobs, begin = [], 0
    for offset, (group, path) in enumerate(zip(groups, paths, strict=True)):
        jobs.append((group, rows.slice(begin, len(group)), path, number + offset, compression))
        begin += len(group)
    if len(jobs) < 4 or _THREADS == 1:
        return [_write_one(*job) for job in jobs]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_write_one, *zip(*jobs, strict=True)))


def _write_one(group: Sequence[RolloutRecord], rows: pa.RecordBatch, path: Path, number: int, compression: str) -> Part:
    content = encode_group(rows, compression, number)
    write_partial(path, content)
    return Part(
        key=group[0].key,
        name=path.name,
        number=number,
        uids=tuple(rollout.rollout_uid for rollout in group),
        created=tuple(rollout.created for rollout in group),
        rewards=tuple(rollout.reward for rollout in group),
        nbytes=len(content),
        checksum=zlib.crc32(content),
    )


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
