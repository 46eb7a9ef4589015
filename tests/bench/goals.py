"""The goals, each a ratio in one run, and whether a run meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tests.bench.results import Results

OURS = "mouse source[i]"


@dataclass(frozen=True)
class Goal:
    """One line of the table of goals.

    Args:
        work: What is measured.
        goal: What is wanted, in words.
        value: What a run found; None where it did not measure it.
        limit: The bound.
        at_most: Whether the bound is an upper one.
        unit: What follows the number.
    """

    work: str
    goal: str
    value: Callable[[Results], float | None]
    limit: float
    at_most: bool = True
    unit: str = ""

    def met(self, value: float) -> bool:
        """Whether a value is on the right side of the limit."""
        return value <= self.limit if self.at_most else value >= self.limit


def goals(cores: int) -> Iterator[Goal]:
    """All goals, in the order in which they are shown."""
    for size in (32, 256, 1024):
        key, work = f"state-{size}-64", f"state windows, B={size}, S=64"
        yield _over_floor(key, work, 1.3)
        yield _faster(key, work, "TorchRL SliceSampler, LazyMemmap", 6)
        yield _faster(key, work, "datasets, python lists", 50)
        yield _faster(key, work, "flashbax", 2)
        yield _faster(key, f"{work}, loader, 2 workers", "flashbax", 2, "mouse PrefetchBatchifier")
    yield _faster("state-256-1", "single transitions, B=256, S=1", "TorchRL RandomSampler, LazyMemmap", 5)
    for name in ("the best tenth", "a tenth by split"):
        yield Goal(
            f"views of a store, B=256, S=64: {name}",
            "at most 1.2 times the whole store",
            partial(_ratio, key="views", name=f"{OURS}, {name}"),
            1.2,
            unit=" times",
        )
    yield Goal(
        "raw images 84x84, B=32, S=64",
        "at least 0.9 of memcpy bandwidth, in the stored dtype",
        lambda results: _inverse(_ratio(results, "images")),
        0.9,
        at_most=False,
    )
    for size in ("84x84", "210x160"):
        yield Goal(
            f"PNG images {size}",
            f"at least 0.9 x {cores} cores x Pillow's rate on one core",
            partial(_decoding_share, size=size, cores=cores),
            0.9,
            at_most=False,
        )
    for size in (32, 256):
        yield Goal(
            f"a mixture of 8 stores, B={size}, S=64",
            "at most 1.15 times one store of the same rows",
            partial(_ratio, key=f"mixtures-{size}", name="a mixture of 8"),
            1.15,
            unit=" times",
        )
    for name, limit in (("NumPy", 40), ("torch", 80), ("JAX", 300)):
        for workers in (0, 1):
            yield _figure(
                f"{name.lower()}-loader-{workers}",
                f"{name} loader, num_workers={workers}",
                f"adds at most {limit} us a batch to source[i]",
                limit,
                " us",
            )
    yield Goal(
        "statistics of 10 million rows, without quantiles",
        "at least 0.5 of the speed of NumPy's sum by dimension",
        lambda results: _inverse(_ratio(results, "statistics", "mouse statistics, no quantiles")),
        0.5,
        at_most=False,
    )
    yield Goal(
        "map= of a function that does nothing, B=32, S=64",
        "adds at most 30 us a batch",
        partial(_added, key="map", name=f"{OURS}, map="),
        30,
        unit=" us",
    )
    yield from _replay_goals()
    yield from _device_goals()
    for key, work, limit in (("maps-insert", "inserted", 5), ("maps-lookup", "looked up", 10)):
        yield _faster(key, f"maps: a million observations {work}", "TorchRL", limit, "mouse")
    yield from _rollout_goals()
    yield from _group_goals()
    for key, work in SCALES.items():
        yield _over_floor(key, work, 1.3)
    yield _figure("scale-first", "first batch after from_dataset, 100 million steps", "under 0.3 s", 0.3, " s")
    for name in ("NumPy", "torch", "JAX"):
        yield Goal(
            f"private memory, {name} loader",
            "flat, and at most prefetch x batch x 1.5 + 50 MB",
            partial(_memory_share, key=name.lower()),
            1.0,
            unit=" of what is allowed",
        )
    yield _figure("append", "append", "at least 300,000 rows/s of six columns", 3e5, " rows/s", at_most=False)
    yield _figure("extend-share", "extend", "at least half of memcpy bandwidth", 0.5, at_most=False)
    yield _figure("disk-append-share", "append to a folder", "at least 0.8 of the rate in memory", 0.8, at_most=False)
    yield _figure(
        "disk-flush-share", "1,000 rows flushed", "at least 0.7 of a bare write and fsync", 0.7, at_most=False
    )
    yield _figure("disk-recover", "a log of 100 MB recovered", "at most 1.5 times reading it once", 1.5, " times")
    yield from _larger_goals()
    yield from _elsewhere_goals()
    for key, work in (
        ("between 32 appends, not seen", "alternating with append on one thread"),
        ("between 32 appends, seen every 1000", "the same, appended rows seen every 1,000"),
        ("while a process appends", "while another process appends"),
    ):
        yield Goal(
            f"sampling, {work}",
            "slows at most 2 times",
            partial(_slowed, name=key),
            2.0,
            unit=" times",
        )


def _larger_goals() -> Iterator[Goal]:
    """What data larger than memory are to reach, which a limit of memory is needed for."""
    for key, work, goal, limit in (
        ("speedup", "exact random windows", "at least 200 times as fast as mapped files", 200),
        ("over-lance", "exact random windows", "at least 2 times as fast as Lance", 2),
        ("of-disk", "exact random windows", "at least 0.8 of the disk's random reads of 4 KB", 0.8),
        ("blocks-over-exact", "windows from blocks", "at least 3.5 times as fast as exact random ones", 3.5),
        ("images-of-disk", "frames of 84x84, exact", "at least 0.8 of the disk's long reads", 0.8),
    ):
        yield _figure(f"larger-{key}", f"data three times memory: {work}", goal, limit, " times", at_most=False)
    for key, work, goal, limit in (
        ("plan-read", "exact random windows", "at most 2.5 bytes read for each delivered", 2.5),
        ("blocks-read", "windows from blocks", "at most 1.1 bytes read for each delivered", 1.1),
        ("late", "the slowest of 1,000 exact batches", "at most 2 times the slowest of 1,000 of the disk's reads", 2),
    ):
        yield _figure(f"larger-{key}", f"data three times memory: {work}", goal, limit)


def _elsewhere_goals() -> Iterator[Goal]:
    """What data on an object storage that is 20 ms away are to reach."""
    for key, work, goal, limit in (
        ("windows-exact-over-lance", "windows, exact", "at least 5 times as fast as Lance", 5),
        ("windows-blocks-link", "windows, blocks", "at least 0.9 of the link", 0.9),
        ("gigabit-windows-blocks-link", "windows, blocks, 1 Gbit/s", "at least 0.9 of the link", 0.9),
        ("columns-50-hits", "a cache of half the data, exact", "at least 0.78 of the pages are there", 0.78),
        ("windows-50-hits", "the same, windows", "at least 0.78 of the pages are there", 0.78),
    ):
        yield _figure(f"elsewhere-{key}", f"20 ms away: {work}", goal, limit, at_most=False)
    for layout in ("columns", "windows"):
        key, work = f"elsewhere-large-{layout}-warm", f"20 ms away: 1 TB in 4,000 objects, {layout}"
        yield _figure(key, work, "the first batch after at most 2 s, warm index", 2, " s")


def _replay_goals() -> Iterator[Goal]:
    """What replay buffers are to reach, beside those of others."""

    def compared(key: str, work: str, wanted: str, slower: str, faster: str, limit: float) -> Goal:
        def value(results: Results) -> float | None:
            table = results.table(key)
            return table.times(slower, faster) if table else None

        return Goal(work, wanted, value, limit, at_most=slower == "mouse", unit=" times")

    def microseconds(key: str, work: str, limit: float) -> Goal:
        def value(results: Results) -> float | None:
            table = results.table(key)
            row = table and table.row("mouse")
            return row.seconds[1] * 1e6 if row else None

        return Goal(work, f"under {limit:.0f} us for five fields", value, limit, unit=" us")

    yield compared(
        "replay-prioritized", "replay, 256 of 1M by priority", "at least as fast as cpprb", "cpprb", "mouse", 1
    )
    yield compared(
        "replay-updates", "replay, 256 priorities set", "at most 1.5 times cpprb's time", "mouse", "cpprb", 1.5
    )
    yield compared("replay-uniform", "replay, 256 of 1M", "at least as fast as cpprb", "cpprb", "mouse", 1)
    yield compared(
        "replay-slices", "replay, slices [32, 64] of 1M", "at least 6 times as fast as TorchRL", "TorchRL", "mouse", 6
    )
    yield Goal(
        "replay, slices [32, 64] of 50M",
        "at most 1.3 times the time at 1M",
        lambda results: _ratio(results, "replay-large", "50,000,000 rows"),
        1.3,
        unit=" times",
    )
    yield microseconds("replay-add", "replay, one row added", 8)
    yield microseconds("replay-extend", "replay, 256 rows added at once", 60)


def _device_goals() -> Iterator[Goal]:
    """What replay on a device is to reach, beside flashbax and TorchRL, and with ten times the rows."""

    def compared(key: str, mine: str, theirs: str, results: Results) -> float | None:
        table = results.table(f"on-device-{key}")
        return table.times(mine, theirs) if table else None

    ours = "mouse_jax.device"
    for place, where in (("", "on the device"), ("gpu-", "on a GPU")):
        for name, work, mine, theirs, limit in (
            ("uniform", "256 of 1M, jitted", ours, "flashbax", 1.0),
            ("slices", "slices [32, 64], jitted", f"{ours}, within episodes", "flashbax, across episodes", 1.2),
            ("priority", "256 by priority, and new ones, jitted", ours, "flashbax", 0.5),
            ("add", "1,024 rows added, donated", ours, "flashbax", 1.0),
            ("loop", "a whole DQN loop over 8 seeds", ours, "flashbax", 1.05),
        ):
            value = partial(compared, place + name, mine, theirs)
            yield Goal(f"{where}, {work}", f"at most {limit} times flashbax's time", value, limit, unit=" times")
        for name, work in (("sizes", "256 rows"), ("priority-sizes", "256 by priority, and new ones")):
            value = partial(compared, place + name, f"{ours}, 10,000,000 rows", f"{ours}, 1,000,000 rows")
            yield Goal(f"{where}, {work} of 10M", "at most 1.2 times the time at 1M", value, 1.2, unit=" times")
        for name, work in (
            ("uniform", "256 of 1M"),
            ("slices", "slices [32, 64]"),
            ("priority", "256 by priority, and new ones"),
        ):
            yield _faster(
                f"on-device-{place}torch-{name}", f"{where} in torch, {work}", "torchrl", 3, "mouse_torch.device"
            )
        value = partial(
            compared, f"{place}torch-sizes", "mouse_torch.device, 10,000,000 rows", "mouse_torch.device, 1,000,000 rows"
        )
        yield Goal(f"{where} in torch, 256 rows of 10M", "at most 1.2 times the time at 1M", value, 1.2, unit=" times")


def _rollout_goals() -> Iterator[Goal]:
    """What rollouts are to reach."""

    def milliseconds(name: str, results: Results) -> float | None:
        table = results.table("rollout-returns")
        row = table and table.row(name)
        return row.seconds[1] * 1e3 if row else None

    for name in ("mouse, NumPy", "mouse, NumPy, with truncation"):
        work = f"returns of a rollout, T=24, N=4,096, {name.removeprefix('mouse, ')}"
        yield Goal(work, "at most 2 ms", partial(milliseconds, name), 2.0, unit=" ms")


def _group_goals() -> Iterator[Goal]:
    """What groups of rollouts are to reach."""

    def seconds(key: str, name: str, results: Results) -> float | None:
        table = results.table(key)
        row = table and table.row(name)
        return row.seconds[1] if row else None

    def share(results: Results) -> float | None:
        ours = seconds("groups-write", "mouse add_rollouts", results)
        table = results.table("groups-write")
        disk = table and table.rows[0].seconds[1]  # the same bytes in plain files, a file a group
        return max(4096 / 20_000, disk) / ours if ours and disk else None

    def milliseconds(results: Results) -> float | None:
        found = seconds("groups-draw", "mouse create_batch", results)
        return found * 1e3 if found else None

    yield Goal(
        "rollouts of 512 tokens added, sealed and written",
        "20,000 a second or the disk's rate",
        share,
        1.0,
        at_most=False,
        unit=" of that",
    )

    def times(results: Results) -> float | None:
        ours = seconds("groups-pack", "mouse pack, rows of 2,048", results)
        copy = seconds("groups-pack", "np.concatenate of the same four fields", results)
        return ours / copy if ours and copy else None

    def late(results: Results) -> float | None:
        ours = seconds("groups-late", "mouse add_column", results)
        file = seconds("groups-late", "pyarrow writing the column as one file, synced", results)
        return ours / file if ours and file else None

    yield Goal("a late column written", "at most 3 times one Parquet file of it", late, 3.0, unit=" times")
    yield Goal("512 examples packed", "at most 2 times NumPy's copy of their tokens", times, 2.0, unit=" times")
    yield Goal("1,024 of 100,000 rollouts as examples", "under 20 ms, the copy included", milliseconds, 20, unit=" ms")


SCALES = {
    "scale-one-file": "10 million steps, 10,000 record batches in one file",
    "scale-files": "100 million steps, 64 files, 1,000-row record batches",
}


def _figure(key: str, work: str, goal: str, limit: float, unit: str = "", *, at_most: bool = True) -> Goal:
    return Goal(work, goal, lambda results: results.figure(key), limit, at_most, unit)


def _added(results: Results, key: str, name: str) -> float | None:
    """Microseconds a batch that a contender takes beyond the first."""
    table = results.table(key)
    row = None if table is None else table.row(name)
    return None if table is None or row is None else 1e6 * (row.seconds[1] - table.rows[0].seconds[1])


def _ratio(results: Results, key: str, name: str = OURS) -> float | None:
    table = results.table(key)
    row = table and table.row(name)
    return row.ratio[1] if row else None


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


def _over_floor(key: str, work: str, limit: float) -> Goal:
    return Goal(work, f"at most {limit} times the floor", lambda results: _ratio(results, key), limit, unit=" times")


def _faster(key: str, work: str, peer: str, limit: float, ours: str = OURS) -> Goal:
    def value(results: Results) -> float | None:
        table = results.table(key)
        return table.times(peer, ours) if table else None

    return Goal(work, f"at least {limit} times as fast as {peer}", value, limit, at_most=False, unit=" times")


def _decoding_share(results: Results, size: str, cores: int) -> float | None:
    """The best of our ways to decode, over all cores decoding with Pillow without any loss."""
    table = results.table(f"png-{size}")
    if table is None:
        return None
    return max(1 / row.ratio[1] for row in table.rows if row.kind == "ours") / cores


def _memory_share(results: Results, key: str) -> float | None:
    added, growth, allowed = (results.figure(f"{name}-{key}") for name in ("memory", "growth", "allowed"))
    if added is None or growth is None or allowed is None:
        return None
    return (added + growth) / allowed


def _slowed(results: Results, name: str) -> float | None:
    """How many times as long a batch takes; where appends are in the measurement, without them."""
    for key in ("appends", "appends-beside"):
        table = results.table(key)
        row = table and table.row(name)
        if table and row:
            alone = table.row("32 appends alone")
            return row.ratio[1] - (alone.ratio[1] if alone else 0.0)
    return None
