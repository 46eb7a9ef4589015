"""Reports of a loader's waiting times, which are measured while batches are computed and delivered.

Measuring takes very little time: the clock is read twice when a batch is computed, and twice when the batch is
delivered. A thread's idle time is read only after a slow batch, and occasionally before a batch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mouse_core.images.decoding import DecodeClock

# Seconds above which a batch counts as slow, and seconds after which the last measurement counts as old.
_SLOW, _OLD = 0.0003, 0.001
# The size in bytes of one in this number of batches is measured.
_WEIGHED = 512
# The share of waiting in a loop's time above which waiting is reported.
_NOTICEABLE = 0.05
_UNITS = ("B", "kB", "MB", "GB", "TB")
_CAUSES = ("disk", "network", "decode", "processor")


@dataclass(frozen=True)
class LoaderReport:
    """The time of a loop over batches, by cause, and numbers of bytes, summed since the loader began.

    ``later - earlier`` is the difference of two reports. The seconds of several threads that compute batches are added.

    Args:
        seconds: Seconds from the first request for a batch to the last delivery.
        waited: The part of ``seconds`` in which the caller waited for batches or computed them.
        batches: Number of delivered batches.
        disk: Seconds in which computing batches waited for pages from a local disk.
        network: Seconds in which computing batches waited for bytes from other machines.
        decode: Seconds of decoding images.
        processor: Seconds of all other work: planning, copying, converting, augmenting, user functions.
        delivered_bytes: Bytes of the delivered batches, estimated from some of them.
        stored_bytes: Bytes of the delivered batches in their stored dtypes; None if the source does not report this
            number.
        disk_bytes: Bytes that this process read from local disks for any purpose; None if the system does not report
            them.
        network_bytes: Bytes that were received from other machines for the loader's source.
        ready: Number of finished batches that currently wait for the caller.
        ready_at_most: The largest possible value of ``ready``.
    """

    seconds: float = 0.0
    waited: float = 0.0
    batches: int = 0
    disk: float = 0.0
    network: float = 0.0
    decode: float = 0.0
    processor: float = 0.0
    delivered_bytes: float = 0.0
    stored_bytes: float | None = None
    disk_bytes: int | None = None
    network_bytes: int = 0
    ready: int = 0
    ready_at_most: int = 0

    def __sub__(self, earlier: LoaderReport) -> LoaderReport:
        """Return the difference to an earlier report of the same loader."""
        now: dict[str, Any] = {name: getattr(self, name) for name in ("ready", "ready_at_most")}
        for one in fields(self):
            if one.name not in now:
                value, before = getattr(self, one.name), getattr(earlier, one.name)
                now[one.name] = None if value is None else value - (before or 0)
        return LoaderReport(**now)

    @property
    def waits(self) -> dict[str, float]:
        """The share of the loop's time in which the caller waited, for each cause; each share is in ``[0, 1]``.

        The caller's waiting time is split in proportion to the work of the threads that compute batches.
        """
        making = sum(getattr(self, cause) for cause in _CAUSES)
        share = self.waited / self.seconds if self.seconds else 0.0
        return {cause: share * getattr(self, cause) / making if making else 0.0 for cause in _CAUSES}

    @property
    def waits_for(self) -> str:
        """The main cause of waiting: "disk", "network", "decode" or "processor"; "consumer" if batches wait for the
        caller.
        """
        waits = self.waits
        return "consumer" if sum(waits.values()) < _NOTICEABLE else max(waits, key=lambda cause: waits[cause])

    @property
    def amplification(self) -> float | None:
        """Bytes read from disks and other machines per delivered byte (in the stored dtype); None: unknown."""
        if not self.stored_bytes or self.disk_bytes is None:
            return None
        return (self.disk_bytes + self.network_bytes) / self.stored_bytes

    def line(self) -> str:
        """Return the report in one line, for a progress bar or a log.

        Example:
            >>> LoaderReport(seconds=10, waited=4, batches=500, disk=3, processor=1, delivered_bytes=2e9).line()
            '500 batches, 50.0/s, 200 MB/s; waits 40% (disk 30%, processor 10%); 0 of 0 ready'
        """
        rate = self.batches / self.seconds if self.seconds else 0.0
        parts = [f"{self.batches:,} batches, {rate:,.1f}/s, {_said(self.delivered_bytes / (self.seconds or 1))}/s"]
        waits = self.waits
        causes = ", ".join(f"{cause} {share:.0%}" for cause, share in waits.items() if share >= 0.005)
        parts.append(f"waits {sum(waits.values()):.0%}" + (f" ({causes})" if causes else ""))
        if self.amplification is not None and self.amplification >= 0.005:
            parts.append(f"reads {self.amplification:.2f} bytes for each")
        return "; ".join([*parts, f"{self.ready} of {self.ready_at_most} ready"])


class Took(NamedTuple):
    """The time that the computation of a batch took.

    Args:
        seconds: The total time.
        still: Seconds in which the thread was idle.
        disk: Whether the thread read pages from a disk in this time.
    """

    seconds: float
    still: float
    disk: bool


def timed(make: Callable[[int], Any]) -> Callable[[int], tuple[Any, float | Took]]:
    """Wrap ``make`` to also return the time of each batch: seconds, or ``Took`` for a slow batch."""
    here = threading.local()

    def timed_make(index: int) -> tuple[Any, float | Took]:
        began = perf_counter()
        if began - getattr(here, "looked", -1.0) > _OLD:
            here.looked, here.usage = began, _usage()
        made = make(index)
        seconds = perf_counter() - began
        if seconds < _SLOW:
            return made, seconds
        before, here.usage = here.usage, _usage()
        here.looked = began + seconds
        return made, _took(seconds, before, here.usage)

    return timed_make


class Counts:
    """The counters of a loader in its caller's thread.

    Args:
        source: The source of the batches.
        began: The time of the first request for a batch.
    """

    slow, weighed_every = _SLOW, _WEIGHED

    def __init__(self, source: Any, began: float) -> None:
        self.began = self.ended = self.looked = began
        self.waited = self.making = self.still = self.still_for_disk = self.weighed_bytes = 0.0
        self.batches = self.weighed = 0
        self.decoding, self._usage = DecodeClock(), _usage()
        self._disk_bytes, self._elsewhere = _disk_bytes(), counters_of(source)

    def look(self, now: float) -> None:
        """Read this thread's resource usage before the thread computes a batch."""
        self.looked, self._usage = now, _usage()

    def add(self, seconds: float, took: float | Took | None, batch: Any) -> None:
        """Count a batch for which the caller needed ``seconds``, and whose computation took ``took``.

        If ``took`` is None, the caller computed the batch. In this case, only slow batches, and batches whose size is
        measured, are counted here.
        """
        if took is None:
            if seconds > self.slow:
                before = self._usage
                self.look(self.ended)
                self._add(_took(seconds, before, self._usage))
        elif isinstance(took, Took):
            self._add(took)
            self.making += took.seconds
        else:
            self.making += took
        if self.batches % self.weighed_every == 1:
            self.weighed += 1
            self.weighed_bytes += _bytes_of(batch)

    def _add(self, took: Took) -> None:
        self.still += took.still
        self.still_for_disk += took.still if took.disk else 0.0

    def report(self, source: Any, ready: int, ready_at_most: int) -> LoaderReport:
        """Return the report of all batches so far.

        Args:
            source: The source of the batches.
            ready: Number of batches that wait for the caller.
            ready_at_most: Largest possible value of ``ready``.
        """
        before, said = self._elsewhere, counters_of(source)
        elsewhere = {name: max(0.0, value - before.get(name, 0.0)) for name, value in said.items()}
        making = self.making if ready_at_most else self.waited  # in the caller's own time
        network = min(elsewhere.get("seconds", 0.0), making)
        decode = min(self.decoding.seconds, making - network)
        # Waiting for the network also counts as idle time.
        disk = min(self.still_for_disk, max(0.0, self.still - network), making - network - decode)
        delivered = self.weighed_bytes / self.weighed * self.batches if self.weighed else 0.0
        stored = _stored_share(source)
        disk_bytes = _disk_bytes()
        return LoaderReport(
            self.ended - self.began,
            self.waited,
            self.batches,
            disk,
            network,
            decode,
            making - network - decode - disk,
            delivered,
            None if stored is None else stored * delivered,
            None if disk_bytes is None or self._disk_bytes is None else disk_bytes - self._disk_bytes,
            int(elsewhere.get("fetched", 0)),
            ready,
            ready_at_most,
        )


def _took(seconds: float, before: tuple[float, int], after: tuple[float, int]) -> Took:
    """Return the time of a batch from the thread's resource usage before and after the computation of the batch."""
    return Took(seconds, max(0.0, seconds - (after[0] - before[0])), after[1] > before[1])


def counters_of(source: Any) -> dict[str, float]:
    """Return the sums of ``counters()``, by name, over all objects that fetch a source's remote bytes.

    ``fetched`` is the number of bytes from the network, and ``seconds`` the waiting time. Objects with the same
    ``counted`` share their counters, so these are added only once.
    """
    total: dict[str, float] = {}
    counted = {id(getattr(one, "counted", one)): one for one in _backings(source) if hasattr(one, "counters")}
    for backing in counted.values():
        said: Mapping[str, float] = backing.counters()
        for name, value in said.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _backings(source: Any) -> Iterator[Any]:
    """Yield the remote memories of the rows of a source, of its members, or of a wrapped source."""
    snapshot = getattr(source, "snapshot", None)
    yield from getattr(snapshot, "backings", ())
    for segment in getattr(snapshot, "segments", ()):  # segments of decoded values, such as Parquet
        if (fetcher := segment.fetched_by) is not None:
            yield fetcher
    for inner in (*getattr(source, "members", {}).values(), getattr(source, "source", None)):
        if inner is not None and inner is not source:
            yield from _backings(inner)


def _stored_share(source: Any) -> float | None:
    """Return the ratio of stored to delivered bytes; None for a source without a spec."""
    spec = getattr(source, "spec", None)
    if spec is None:
        return None
    per_step = [(int(np.prod(one.shape, dtype=np.int64)), one) for one in spec.values() if not one.per_sequence]
    stored = sum(count * one.stored_dtype.itemsize for count, one in per_step)
    delivered = sum(count * one.dtype.itemsize for count, one in per_step)
    return stored / delivered if delivered else None


def _bytes_of(batch: Any) -> int:
    """Return the size in bytes of a batch's arrays, of any framework."""
    if isinstance(batch, tuple | list):
        return sum(map(_bytes_of, batch))
    if (nbytes := getattr(batch, "nbytes", None)) is not None and not hasattr(batch, "keys"):
        return int(nbytes)
    return sum(map(_bytes_of, batch.values())) if hasattr(batch, "keys") else 0


def _usage() -> tuple[float, int]:
    """Return the processor seconds of this thread, and how many blocks and pages this thread has read. On systems that
    do not count per thread, return the numbers of the process.
    """
    if os.name != "posix":
        return perf_counter(), 0
    import resource

    used = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return used.ru_utime + used.ru_stime, used.ru_inblock + used.ru_majflt


def _disk_bytes() -> int | None:
    """Return the number of bytes that this process has read from disks."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    return 512 * resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _said(number: float) -> str:
    """Return a number of bytes as text."""
    unit = 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"
