"""Finds how much memory is available for pages of files, on the machine and within the limits of control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_KILOBYTE = 1 << 10


def room_for_files(proc: Path = Path("/proc"), groups: Path = _GROUPS) -> int | None:
    """Return approximately how many bytes of files fit in memory; None if the system does not report this number.

    The result is the minimum of several numbers: the machine's available memory, which includes pages of files, and one
    number for each control group of this process. The number of a group is the group's limit minus the group's memory
    for other purposes than pages of files, because pages of files count towards the limit.

    Args:
        proc: Folder of the kernel's process information.
        groups: Folder where control groups (version 1 or 2) are mounted.
    """
    found = [*_available(proc / "meminfo"), *_allowed(proc / "self" / "cgroup", groups)]
    return max(0, min(found)) if found else None


def _available(meminfo: Path) -> Iterator[int]:
    known = _numbers(meminfo)
    if "MemAvailable:" in known:
        yield known["MemAvailable:"] * _KILOBYTE


def _allowed(membership: Path, groups: Path) -> Iterator[int]:
    """Yield, for each control group of a process and each parent group, the memory that the group allows for files."""
    for line in _lines(membership):
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        version_1 = bool(controllers)
        for root in (groups / "memory",) if version_1 else (groups, groups / "unified"):
            inside = root / name.lstrip("/")
            # A container sees its own group at the root.
            group = inside if inside.is_dir() else root
            while True:
                yield from _allowed_by(group, version_1=version_1)
                if group == root:
                    break
                group = group.parent


def _allowed_by(group: Path, *, version_1: bool) -> Iterator[int]:
    """Yield the memory that one group allows for files, if the group limits memory."""
    limit = _number(group / ("memory.limit_in_bytes" if version_1 else "memory.max"))
    used = _number(group / ("memory.usage_in_bytes" if version_1 else "memory.current"))
    if limit is not None and used is not None:
        known = _numbers(group / "memory.stat")
        files = known.get("total_cache", 0) if version_1 else known.get("file", 0)
        yield limit - max(0, used - files)


def _number(file: Path) -> int | None:
    """Return the number in a file; None if the file is missing or contains "max"."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers in lines such as "MemAvailable: 18087 kB", by the name at the beginning of the line."""
    words = [line.split() for line in _lines(file)]
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
