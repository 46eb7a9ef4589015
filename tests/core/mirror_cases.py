"""Objects in memory behind the protocol of clients, and readers that ask for what they read some batches ahead."""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.errors import ChangedError, DataError
from mouse_core.remote import ObjectInfo
from mouse_core.remote.mirror import Mirror, MirrorObject

AHEAD = 8
_PATTERN = 99_991


@dataclass
class Objects:
    """A client of objects that are made up, each a little longer than the one before; calls raise `failures` first."""

    count: int = 4
    size: int = 500_001
    seed: int = 0
    latency: float = 0.0
    failures: list[Exception] = field(default_factory=list)
    fetched: int = 0
    version: str = "first"
    url: str = "memory://made-up"
    patterns: dict[tuple[int, int], bytes] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def piece(self, number: int, begin: int, end: int) -> bytes:
        """Some bytes of an object, whose pattern has a prime length, so that no two blocks are alike."""
        if (number, self.seed) not in self.patterns:
            pattern = np.random.default_rng([self.seed, number]).bytes(_PATTERN)
            self.patterns[number, self.seed] = pattern + pattern
        first = begin % _PATTERN
        repeats = (end - begin) // _PATTERN + 1
        if repeats == 1:
            return self.patterns[number, self.seed][first : first + end - begin]
        return (self.patterns[number, self.seed][first : first + _PATTERN] * repeats)[: end - begin]

    def head(self, path: str) -> ObjectInfo:
        number = int(path)
        if number >= self.count:
            raise DataError(f"{path}: expected an object, found none")
        return ObjectInfo(path, self.size + 777 * number, self.version)

    def get_all(self, wanted: Sequence[tuple[str, int, int]], versions: dict[str, str]) -> Sequence[memoryview]:
        with self.lock:
            if self.failures:
                raise self.failures.pop(0)
        for path, version in versions.items():
            if version != self.version:
                raise ChangedError(f"{path}: expected version {version}, found {self.version}")
            self.head(path)
        time.sleep(self.latency)
        with self.lock:
            self.fetched += sum(end - begin for _, begin, end in wanted)
            return [memoryview(self.piece(int(path), begin, end)) for path, begin, end in wanted]

    def infos(self) -> list[ObjectInfo]:
        return [self.head(str(number)) for number in range(self.count)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Objects, (self.count, self.size, self.seed, self.latency)


def places(objects: Objects, seed: int, batch: int, count: int = 16) -> list[tuple[int, int, int]]:
    """What a batch reads: object, first byte, the byte behind the last; in the order in which they lie."""
    rng = np.random.default_rng([seed, batch])
    chosen = []
    for number in rng.integers(objects.count, size=count).tolist():
        begin = int(rng.integers(objects.size - 3000))
        chosen.append((number, begin, begin + int(rng.integers(1, 3000))))
    return sorted(chosen)


def ranges(there: Sequence[MirrorObject], batch: list[tuple[int, int, int]]) -> tuple[Any, Any]:
    """The addresses of what a batch reads, merged where they overlap."""
    spans: list[list[int]] = []
    for begin, end in sorted((there[n].address + first, there[n].address + last) for n, first, last in batch):
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([begin, end])
    begins, ends = zip(*spans, strict=True)
    return np.array(begins), np.array(ends)


def read(there: MirrorObject, begin: int, end: int) -> bytes:
    (content,) = there.backing.read(np.array([there.address + begin]), np.array([there.address + end]))
    return content


def ask(there: Sequence[MirrorObject], batch: list[tuple[int, int, int]], number: int) -> None:
    begins, ends = ranges(there, batch)
    there[0].backing.ask(begins, ends, np.full(len(begins), number))


def read_batches(mirror: Mirror, objects: Objects, seed: int, first: int, last: int, ahead: int = AHEAD) -> int:
    """Read batches as a loader does, and compare every byte; how many were."""
    there = mirror.add(objects, objects.infos())
    backing = there[0].backing
    seen = 0
    for batch in range(first, last + ahead):
        if batch < last:
            ask(there, places(objects, seed, batch), batch)
        if batch - ahead >= first:
            wanted = places(objects, seed, batch - ahead)
            while True:
                token = backing.wait(*ranges(there, wanted))
                found = [ctypes.string_at(there[n].address + begin, end - begin) for n, begin, end in wanted]
                if backing.still(token):
                    break
            for (number, begin, end), content in zip(wanted, found, strict=True):
                assert content == objects.piece(number, begin, end)
                seen += len(content)
    return seen


def is_left(folder: Path) -> list[str]:
    """What this process has of mirrors in a folder (descriptors, and maps where the system says so), and threads."""
    found = [thread.name for thread in threading.enumerate() if thread.name in ("mouse-fetch", "mouse-remote")]
    if Path("/proc/self/maps").exists():
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was closed meanwhile
                lines.append(os.readlink(f"/proc/self/fd/{number}"))
        found += [line for line in lines if str(folder) in line]
    return found
