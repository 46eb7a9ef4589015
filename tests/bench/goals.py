"""The goals, each a ratio in one run, and whether a run meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    at_most: bool = True  # whether the bound is an upper one
    unit: str = ""  # what follows the number

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
        work = f"views of a store, B=256, S=64: {name}"
        yield _times(work, "at most 1.2 times the whole store", _ratio("views", f"{OURS}, {name}"), 1.2)
    work = "raw images 84x84, B=32, S=64"
    yield Goal(work, "at least 0.9 of memcpy bandwidth, in the stored dtype", _share("images", OURS), 0.9, False)
    for size in ("84x84", "210x160"):
        wanted = f"at least 0.9 x {cores} cores x Pillow's rate on one core"
        yield Goal(f"PNG images {size}", wanted, _decoding_share(size, cores), 0.9, False)
    for size in (32, 256):
        value = _ratio(f"mixtures-{size}", "a mixture of 8")
        work = f"a mixture of 8 stores, B={size}, S=64"
        yield _times(work, "at most 1.15 times one store of the same rows", value, 1.15)
    for name, limit in (("NumPy", 40), ("torch", 80), ("JAX", 300)):
        for workers in (0, 1):
            work, wanted = f"{name} loader, num_workers={workers}", f"adds at most {limit} us a batch to source[i]"
            yield Goal(work, wanted, _figure(f"{name.lower()}-loader-{workers}"), limit, unit=" us")
    work, wanted = "statistics of 10 million rows, without quantiles", "at least 0.5 of the speed of NumPy's sum"
    value = _share("statistics", "mouse statistics, no quantiles")
    yield Goal(work, f"{wanted} by dimension", value, 0.5, False)
    work = "map= of a function that does nothing, B=32, S=64"
    yield Goal(work, "adds at most 30 us a batch", _of_rows("map", _added, "", f"{OURS}, map="), 30, unit=" us")
    yield from _replay_goals()
    yield from _device_goals()
    for key, work, limit in (("maps-insert", "inserted", 5), ("maps-lookup", "looked up", 10)):
        yield _faster(key, f"maps: a million observations {work}", "TorchRL", limit, "mouse")
    for name in ("NumPy", "NumPy, with truncation"):
        work = f"returns of a rollout, T=24, N=4,096, {name}"
        yield Goal(work, "at most 2 ms", _seconds("rollout-returns", f"mouse, {name}", 1e3), 2, unit=" ms")
    yield from _group_goals()
    for key, work in SCALES.items():
        yield _over_floor(key, work)
    work = "first batch after from_dataset, 100 million steps"
    yield Goal(work, "under 0.3 s", _figure("scale-first"), 0.3, unit=" s")
    for name in ("NumPy", "torch", "JAX"):
        work, wanted = f"private memory, {name} loader", "flat, and at most prefetch x batch x 1.5 + 50 MB"
        yield Goal(work, wanted, _memory_share(name.lower()), 1.0, unit=" of what is allowed")
    for key, work, wanted, limit, unit in (
        ("append", "append", "at least 300,000 rows/s of six columns", 3e5, " rows/s"),
        ("extend-share", "extend", "at least half of memcpy bandwidth", 0.5, ""),
        ("disk-append-share", "append to a folder", "at least 0.8 of the rate in memory", 0.8, ""),
        ("disk-flush-share", "1,000 rows flushed", "at least 0.7 of a bare write and fsync", 0.7, ""),
        ("disk-recover", "a log of 100 MB recovered", "at most 1.5 times reading it once", 1.5, " times"),
        *_LARGER,
        *_ELSEWHERE,
    ):
        yield Goal(work, wanted, _figure(key), limit, not wanted.startswith("at least"), unit)
    for name, work in (
        ("between 32 appends, not seen", "alternating with append on one thread"),
        ("between 32 appends, seen every 1000", "alternating with append, and seeing new rows every 1,000"),
        ("while a process appends", "while another process appends"),
    ):
        yield _times(f"sampling, {work}", "slows at most 2 times", _slowed(name), 2.0)


# What data larger than memory are to reach, which a limit of memory is needed for; by the keys of figures.
_LARGER = [
    (f"larger-{key}", f"data three times memory: {work}", wanted, limit, unit)
    for key, work, wanted, limit, unit in (
        ("speedup", "exact random windows", "at least 200 times as fast as mapped files", 200, " times"),
        ("over-lance", "exact random windows", "at least 2 times as fast as Lance", 2, " times"),
        ("of-disk", "exact random windows", "at least 0.8 of the disk's random reads of 4 KB", 0.8, " times"),
        ("blocks-over-exact", "windows from blocks", "at least 3.5 times as fast as exact random ones", 3.5, " times"),
        ("images-of-disk", "frames of 84x84, exact", "at least 0.8 of the disk's long reads", 0.8, " times"),
        ("plan-read", "exact random windows", "at most 2.5 bytes read for each delivered byte", 2.5, ""),
        ("blocks-read", "windows from blocks", "at most 1.1 bytes read for each delivered byte", 1.1, ""),
        (
            "late",
            "the slowest of 1,000 exact batches",
            "at most 2 times the slowest of 1,000 of the disk's reads",
            2,
            "",
        ),
    )
]
# What data on an object storage that is 20 ms away are to reach.
_ELSEWHERE = [
    (f"elsewhere-{key}", f"object storage 20 ms away: {work}", wanted, limit, unit)
    for key, work, wanted, limit, unit in (
        ("windows-exact-over-lance", "windows, exact", "at least 5 times as fast as Lance", 5, ""),
        ("windows-blocks-link", "windows, blocks", "at least 0.9 of the link", 0.9, ""),
        ("gigabit-windows-blocks-link", "windows, blocks, 1 Gbit/s", "at least 0.9 of the link", 0.9, ""),
        ("columns-50-hits", "a cache of half the data, exact", "at least 0.78 of the pages are there", 0.78, ""),
        ("windows-50-hits", "a cache of half the data, windows", "at least 0.78 of the pages are there", 0.78, ""),
        *(
            (
                f"large-{layout}-warm",
                f"1 TB in 4,000 objects, {layout}",
                "the first batch after at most 2 s, warm index",
                2,
                " s",
            )
            for layout in ("columns", "windows")
        ),
    )
]


def _replay_goals() -> Iterator[Goal]:
    """What replay buffers are to reach, beside those of others."""
    as_fast = "at least as fast as cpprb"
    for key, work, wanted, slower, faster, limit in (
        ("prioritized", "256 of 1M by priority", as_fast, "cpprb", "mouse", 1),
        ("updates", "256 priorities set", "at most 1.5 times cpprb's time", "mouse", "cpprb", 1.5),
        ("uniform", "256 of 1M", as_fast, "cpprb", "mouse", 1),
        ("slices", "slices [32, 64] of 1M", "at least 6 times as fast as TorchRL", "TorchRL", "mouse", 6),
    ):
        value = _compared(f"replay-{key}", slower, faster)
        yield Goal(f"replay, {work}", wanted, value, limit, slower == "mouse", " times")
    value = _ratio("replay-large", "50,000,000 rows")
    yield _times("replay, slices [32, 64] of 50M", "at most 1.3 times the time at 1M", value, 1.3)
    for key, work, limit in (("add", "one row added", 8), ("extend", "256 rows added at once", 60)):
        value = _seconds(f"replay-{key}", "mouse", 1e6)
        yield Goal(f"replay, {work}", f"under {limit} us for five fields", value, limit, unit=" us")


def _device_goals() -> Iterator[Goal]:
    """What replay on a device is to reach, beside flashbax and TorchRL, and with ten times the rows."""
    ours, in_torch, larger = "mouse_jax.device", "mouse_torch.device", "at most 1.2 times the time at 1M"
    by_priority = "256 by priority, and new priorities"

    def ten_times(key: str, name: str) -> Value:
        return _compared(key, f"{name}, 10,000,000 rows", f"{name}, 1,000,000 rows")

    for place, where in (("on-device", "on the device"), ("on-device-gpu", "on a GPU")):
        for name, work, mine, theirs, limit in (
            ("uniform", "256 of 1M, jitted", ours, "flashbax", 1.0),
            ("slices", "slices [32, 64], jitted", f"{ours}, within episodes", "flashbax, across episodes", 1.2),
            ("priority", f"{by_priority}, jitted", ours, "flashbax", 0.5),
            ("add", "1,024 rows added, donated", ours, "flashbax", 1.0),
            ("loop", "a complete DQN loop over 8 seeds", ours, "flashbax", 1.05),
        ):
            value = _compared(f"{place}-{name}", mine, theirs)
            yield _times(f"{where}, {work}", f"at most {limit} times flashbax's time", value, limit)
        for name, work in (("sizes", "256 rows"), ("priority-sizes", by_priority)):
            yield _times(f"{where}, {work} of 10M", larger, ten_times(f"{place}-{name}", ours), 1.2)
        for name, work in (("uniform", "256 of 1M"), ("slices", "slices [32, 64]"), ("priority", by_priority)):
            yield _faster(f"{place}-torch-{name}", f"{where} in torch, {work}", "torchrl", 3, in_torch)
        yield _times(f"{where} in torch, 256 rows of 10M", larger, ten_times(f"{place}-torch-sizes", in_torch), 1.2)


def _group_goals() -> Iterator[Goal]:
    """What groups of rollouts are to reach."""

    def written(disk: Row, ours: Row) -> float:
        return max(4096 / 20_000, disk.seconds[1]) / ours.seconds[1]  # or the disk's rate, by a file for each group

    work, wanted = "rollouts of 512 tokens added, sealed and written", "20,000 a second or the disk's rate"
    value = _of_rows("groups-write", written, "", "mouse add_rollouts")
    yield Goal(work, wanted, value, 1.0, False, " of that")
    copy = "np.concatenate of the same four fields"
    value = _of_rows("groups-pack", _longer, copy, "mouse pack, rows of 2,048")
    yield _times("512 examples packed", "at most 2 times NumPy's copy of their tokens", value, 2.0)
    work, value = "1,024 of 100,000 rollouts as examples", _seconds("groups-draw", "mouse create_batch", 1e3)
    yield Goal(work, "under 20 ms, the copy included", value, 20, unit=" ms")


# ---------------------------------------------------------------------- kinds of goals


def _times(work: str, wanted: str, value: Value, limit: float) -> Goal:
    return Goal(work, wanted, value, limit, unit=" times")


def _over_floor(key: str, work: str) -> Goal:
    return _times(work, "at most 1.3 times the floor", _ratio(key, OURS), 1.3)


def _faster(key: str, work: str, peer: str, limit: float, ours: str = OURS) -> Goal:
    wanted = f"at least {limit} times as fast as {peer}"
    return Goal(work, wanted, _compared(key, peer, ours), limit, False, " times")


# ---------------------------------------------------------------------- what a run found


def _figure(key: str) -> Value:
    return lambda results: results.figure(key)


def _of_rows(key: str, value: Callable[[Row, Row], float], first: str, second: str) -> Value:
    """A function of two rows of a table, by how their names begin; of an empty name that is the table's first row."""

    def found(results: Results) -> float | None:
        table = results.table(key)
        rows = [table and (table.row(name) if name else table.rows[0]) for name in (first, second)]
        return value(rows[0], rows[1]) if rows[0] and rows[1] else None

    return found


def _longer(reference: Row, row: Row) -> float:
    return row.seconds[1] / reference.seconds[1]


def _added(reference: Row, row: Row) -> float:
    """Microseconds a batch beyond those of another."""
    return 1e6 * (row.seconds[1] - reference.seconds[1])


def _ratio(key: str, name: str) -> Value:
    return _of_rows(key, lambda _, row: row.ratio[1], name, name)


def _share(key: str, name: str) -> Value:
    return _of_rows(key, lambda _, row: 1 / row.ratio[1], name, name)


def _seconds(key: str, name: str, scale: float) -> Value:
    return _of_rows(key, lambda _, row: scale * row.seconds[1], name, name)


def _compared(key: str, slower: str, faster: str) -> Value:
    """How many times as long one takes as another, each as times of the table's first."""
    return _of_rows(key, lambda above, below: above.ratio[1] / below.ratio[1], slower, faster)


def _decoding_share(size: str, cores: int) -> Value:
    """The best of our ways to decode, over all cores decoding with Pillow without any loss."""

    def found(results: Results) -> float | None:
        table = results.table(f"png-{size}")
        return table and max(1 / row.ratio[1] for row in table.rows if row.kind == "ours") / cores

    return found


def _memory_share(key: str) -> Value:
    def found(results: Results) -> float | None:
        added, growth, allowed = (results.figure(f"{name}-{key}") for name in ("memory", "growth", "allowed"))
        if added is None or growth is None or allowed is None:
            return None
        return (added + growth) / allowed

    return found


def _slowed(name: str) -> Value:
    """How many times as long a batch takes; where appends are in the measurement, without them."""

    def found(results: Results) -> float | None:
        for key in ("appends", "appends-beside"):
            table = results.table(key)
            row = table and table.row(name)
            if table and row:
                alone = table.row("32 appends alone")
                return row.ratio[1] - (alone.ratio[1] if alone else 0.0)
        return None

    return found
