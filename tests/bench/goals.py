"""The goals, each a ratio in one run, and whether a run meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from tests.bench.results import Results, Row

OURS = "mouse source[i]"
SCALES = {
    "scale-one-file": "10 million steps, 10,000 record batches in one file",
    "scale-files": "100 million steps, 64 files, 1,000-row record batches",
}

Value = Callable[[Results], float | None]


@dataclass(frozen=True)
class Goal:
    """One line of the table of goals."""

    work: str  # what is measured
    goal: str  # what is wanted, in words
    value: Value  # what a run found; None where it did not measure it
    limit: float  # the bound
    unit: str = " times"  # what follows the number

    @property
    def at_most(self) -> bool:
        """Whether the bound is an upper one."""
        return not self.goal.startswith(("at least", "20,000 a second"))

    def met(self, value: float) -> bool:
        """Whether a value is on the right side of the limit."""
        return value <= self.limit if self.at_most else value >= self.limit


def goals(cores: int) -> Iterator[Goal]:
    """All goals, in the order in which they are shown."""
    for size in (32, 256, 1024):
        key, work = f"state-{size}-64", f"state windows, B={size}, S=64"
        yield _over_floor(key, work)
        yield _faster(key, work, "TorchRL SliceSampler, LazyMemmap", 6)
        yield _faster(key, work, "datasets, python lists", 50)
        yield _faster(key, work, "flashbax", 2)
        yield _faster(key, f"{work}, loader, 2 workers", "flashbax", 2, "mouse PrefetchBatchifier")
    yield _faster("state-256-1", "single transitions, B=256, S=1", "TorchRL RandomSampler, LazyMemmap", 5)
    for name in ("the best tenth", "a tenth by split"):
        work, value = f"views of a store, B=256, S=64: {name}", _times("views", f"{OURS}, {name}")
        yield Goal(work, "at most 1.2 times the whole store", value, 1.2)
    work, wanted = "raw images 84x84, B=32, S=64", "at least 0.9 of memcpy bandwidth, in the stored dtype"
    yield Goal(work, wanted, _times("images", "", OURS), 0.9, "")
    for shape in ("84x84", "210x160"):
        wanted = f"at least 0.9 x {cores} cores x Pillow's rate on one core"
        yield Goal(f"PNG images {shape}", wanted, _decoding_share(shape, cores), 0.9, "")
    for size in (32, 256):
        work, value = f"a mixture of 8 stores, B={size}, S=64", _times(f"mixtures-{size}", "a mixture of 8")
        yield Goal(work, "at most 1.15 times one store of the same rows", value, 1.15)
    for name, limit in (("NumPy", 40), ("torch", 80), ("JAX", 300)):
        for workers in (0, 1):
            work, wanted = f"{name} loader, num_workers={workers}", f"adds at most {limit} us a batch to source[i]"
            yield Goal(work, wanted, _figure(f"{name.lower()}-loader-{workers}"), limit, " us")
    work, wanted = "statistics of 10 million rows, without quantiles", "at least 0.5 of the speed of NumPy's sum"
    value = _times("statistics", "", "mouse statistics, no quantiles")
    yield Goal(work, f"{wanted} by dimension", value, 0.5, "")
    work, value = "map= of a function that does nothing, B=32, S=64", _of_rows("map", _added, f"{OURS}, map=", "")
    yield Goal(work, "adds at most 30 us a batch", value, 30, " us")
    yield from _replay_goals()
    for place, where in (("on-device", "on the device"), ("on-device-gpu", "on a GPU")):
        yield from _device_goals(place, where)
    for key, work in (("state", "state, B=256, S=64"), ("images", "raw images 84x84, B=32, S=64")):
        wanted = "at least 0.9 of a plain pinned copy, host to device"
        yield Goal(f"on a GPU, {work}", wanted, _figure(f"gpu-{key}-copy"), 0.9, "")
        yield Goal(f"on a GPU, {work}", "waits at most 1% of steps of 5 ms", _figure(f"gpu-{key}-waiting"), 1, "%")
    for key, work, limit in (("maps-insert", "inserted", 5), ("maps-lookup", "looked up", 10)):
        yield _faster(key, f"maps: a million observations {work}", "TorchRL", limit, "mouse")
    for name in ("NumPy", "NumPy, with truncation"):
        work, value = f"returns of a rollout, T=24, N=4,096, {name}", _seconds("rollout-returns", f"mouse, {name}", 1e3)
        yield Goal(work, "at most 2 ms", value, 2, " ms")
    work, wanted = "rollouts of 512 tokens added, sealed and written", "20,000 a second or the disk's rate"
    yield Goal(work, wanted, _of_rows("groups-write", _written, "mouse add_rollouts", ""), 1.0, " of that")
    work, value = "512 examples packed", _times("groups-pack", "mouse pack, rows of 2,048")
    yield Goal(work, "at most 2 times NumPy's copy of their tokens", value, 2.0)
    work, value = "1,024 of 100,000 rollouts as examples", _seconds("groups-draw", "mouse create_batch", 1e3)
    yield Goal(work, "under 20 ms, the copy included", value, 20, " ms")
    yield from starmap(_over_floor, SCALES.items())
    work, wanted = "first batch after from_dataset, 100 million steps", "under 0.3 s"
    yield Goal(work, wanted, _figure("scale-first"), 0.3, " s")
    for name in ("NumPy", "torch", "JAX"):
        work, wanted = f"private memory, {name} loader", "flat, and at most prefetch x batch x 1.5 + 50 MB"
        yield Goal(work, wanted, _memory_share(name.lower()), 1.0, " of what is allowed")
    for prefix, about, lines in (("", "", _APPENDS), ("larger-", _THREE, _LARGER), ("elsewhere-", _AWAY, _ELSEWHERE)):
        for key, work, *bound in lines:
            wanted, limit, *unit = bound
            yield Goal(about + work, wanted, _figure(prefix + key), limit, *unit)
    for name, work in (
        ("between 32 appends, not seen", "alternating with append on one thread"),
        ("between 32 appends, seen every 1000", "alternating with append, and seeing new rows every 1,000"),
        ("while a process appends", "while another process appends"),
    ):
        yield Goal(f"sampling, {work}", "slows at most 2 times", _slowed(name), 2.0)


# Goals of single figures: what is measured, what is wanted, the limit, and the unit where it is not "times"; before
# these stands the key of the figure.
_APPENDS: Any = (
    ("append", "append", "at least 300,000 rows/s of six columns", 3e5, " rows/s"),
    ("extend-share", "extend", "at least half of memcpy bandwidth", 0.5, ""),
    ("disk-append-share", "append to a folder", "at least 0.8 of the rate in memory", 0.8, ""),
    ("disk-flush-share", "1,000 rows flushed", "at least 0.7 of a bare write and fsync", 0.7, ""),
    ("disk-recover", "a log of 100 MB recovered", "at most 1.5 times reading it once", 1.5),
)
# What data larger than memory are to reach, which a limit of memory is needed for.
_THREE, _EXACT, _BLOCKS = "data three times memory: ", "exact random windows", "windows from blocks"
_LARGER: Any = (
    ("speedup", _EXACT, "at least 200 times as fast as mapped files", 200),
    ("over-lance", _EXACT, "at least 2 times as fast as Lance", 2),
    ("of-disk", _EXACT, "at least 0.8 of the disk's random reads of 4 KB", 0.8),
    ("blocks-over-exact", _BLOCKS, "at least 3.5 times as fast as exact random ones", 3.5),
    ("images-of-disk", "frames of 84x84, exact", "at least 0.8 of the disk's long reads", 0.8),
    ("plan-read", _EXACT, "at most 2.5 bytes read for each delivered byte", 2.5, ""),
    ("blocks-read", _BLOCKS, "at most 1.1 bytes read for each delivered byte", 1.1, ""),
    ("late", "the slowest of 1,000 exact batches", "at most 2 times the slowest of 1,000 of the disk's reads", 2, ""),
)
# What data on an object storage that is 20 ms away are to reach.
_AWAY, _LINK, _PAGES = "object storage 20 ms away: ", "at least 0.9 of the link", "at least 0.78 of the pages are there"
_WARM = ("the first batch after at most 2 s, warm index", 2, " s")
_ELSEWHERE: Any = (
    ("windows-exact-over-lance", "windows, exact", "at least 5 times as fast as Lance", 5, ""),
    ("windows-blocks-link", "windows, blocks", _LINK, 0.9, ""),
    ("gigabit-windows-blocks-link", "windows, blocks, 1 Gbit/s", _LINK, 0.9, ""),
    ("columns-50-hits", "a cache of half the data, exact", _PAGES, 0.78, ""),
    ("windows-50-hits", "a cache of half the data, windows", _PAGES, 0.78, ""),
    ("large-columns-warm", "1 TB in 4,000 objects, columns", *_WARM),
    ("large-windows-warm", "1 TB in 4,000 objects, windows", *_WARM),
)


def _replay_goals() -> Iterator[Goal]:
    """What replay buffers are to reach, beside those of others."""
    as_fast = "at least as fast as cpprb"
    for key, work, wanted, slower, faster, limit in (
        ("prioritized", "256 of 1M by priority", as_fast, "cpprb", "mouse", 1),
        ("updates", "256 priorities set", "at most 1.5 times cpprb's time", "mouse", "cpprb", 1.5),
        ("uniform", "256 of 1M", as_fast, "cpprb", "mouse", 1),
        ("slices", "slices [32, 64] of 1M", "at least 6 times as fast as TorchRL", "TorchRL", "mouse", 6),
        ("large", "slices [32, 64] of 50M", "at most 1.3 times the time at 1M", "50,000,000 rows", "", 1.3),
    ):
        yield Goal(f"replay, {work}", wanted, _times(f"replay-{key}", slower, faster), limit)
    for key, work, limit in (("add", "one row added", 8), ("extend", "256 rows added at once", 60)):
        value = _seconds(f"replay-{key}", "mouse", 1e6)
        yield Goal(f"replay, {work}", f"under {limit} us for five fields", value, limit, " us")


def _device_goals(place: str, where: str) -> Iterator[Goal]:
    """What replay on a device is to reach, beside flashbax and TorchRL, and with ten times the rows."""
    ours, in_torch = "mouse_jax.device", "mouse_torch.device"
    by_priority = "256 by priority, and new priorities"
    for name, work, mine, theirs, limit in (
        ("uniform", "256 of 1M, jitted", ours, "flashbax", 1.0),
        ("slices", "slices [32, 64], jitted", f"{ours}, within episodes", "flashbax, across episodes", 1.2),
        ("priority", f"{by_priority}, jitted", ours, "flashbax", 0.5),
        ("add", "1,024 rows added, donated", ours, "flashbax", 1.0),
        ("loop", "a complete DQN loop over 8 seeds", ours, "flashbax", 1.05),
    ):
        value = _times(f"{place}-{name}", mine, theirs)
        yield Goal(f"{where}, {work}", f"at most {limit} times flashbax's time", value, limit)

    def ten_times(key: str, work: str, name: str = ours) -> Goal:
        value = _times(f"{place}-{key}", f"{name}, 10,000,000 rows", f"{name}, 1,000,000 rows")
        return Goal(f"{where}{work} of 10M", "at most 1.2 times the time at 1M", value, 1.2)

    yield ten_times("sizes", ", 256 rows")
    yield ten_times("priority-sizes", f", {by_priority}")
    for name, work in (("uniform", "256 of 1M"), ("slices", "slices [32, 64]"), ("priority", by_priority)):
        yield _faster(f"{place}-torch-{name}", f"{where} in torch, {work}", "torchrl", 3, in_torch)
    yield ten_times("torch-sizes", " in torch, 256 rows", in_torch)


def _over_floor(key: str, work: str) -> Goal:
    return Goal(work, "at most 1.3 times the floor", _times(key, OURS), 1.3)


def _faster(key: str, work: str, peer: str, limit: float, ours: str = OURS) -> Goal:
    return Goal(work, f"at least {limit} times as fast as {peer}", _times(key, peer, ours), limit)


# ---------------------------------------------------------------------- what a run found


def _figure(key: str) -> Value:
    return lambda results: results.figure(key)


def _of_rows(key: str, value: Callable[[Row, Row], float], name: str, other: str) -> Value:
    """A function of two rows of a table, by how their names begin: the empty name is that of the table's first row."""

    def found(results: Results) -> float | None:
        table = results.table(key)
        rows = [table and table.row(one) for one in (name, other)]
        return value(rows[0], rows[1]) if rows[0] and rows[1] else None

    return found


def _times(key: str, slower: str, faster: str = "") -> Value:
    """How many times as long one takes as another, or as the table's first."""
    return _of_rows(key, lambda row, other: row.ratio[1] / other.ratio[1], slower, faster)


def _seconds(key: str, name: str, scale: float) -> Value:
    return _of_rows(key, lambda row, _: scale * row.seconds[1], name, name)


def _added(row: Row, reference: Row) -> float:
    """Microseconds a batch beyond those of another."""
    return 1e6 * (row.seconds[1] - reference.seconds[1])


def _written(ours: Row, disk: Row) -> float:
    """The time of 20,000 a second over ours; or the disk's, by a file for each group, where that is longer."""
    return max(4096 / 20_000, disk.seconds[1]) / ours.seconds[1]


def _decoding_share(size: str, cores: int) -> Value:
    """The best of our ways to decode, over all cores decoding with Pillow without any loss."""

    def found(results: Results) -> float | None:
        table = results.table(f"png-{size}")
        return table and max(1 / row.ratio[1] for row in table.rows if row.kind == "ours") / cores

    return found


def _memory_share(key: str) -> Value:
    def found(results: Results) -> float | None:
        added, growth, allowed = (results.figure(f"{name}-{key}") for name in ("memory", "growth", "allowed"))
        return None if added is None or growth is None or allowed is None else (added + growth) / allowed

    return found


def _slowed(name: str) -> Value:
    """How many times as long a batch takes; where appends are in the measurement, without them."""

    def found(results: Results) -> float | None:
        for table in filter(None, map(results.table, ("appends", "appends-beside"))):
            if row := table.row(name):
                alone = table.row("32 appends alone")
                return row.ratio[1] - (alone.ratio[1] if alone else 0.0)
        return None

    return found
