"""Which windows a batch consists of: laws for every mode, windows drawn from blocks, and streams that never change."""

import collections
import io
import tracemalloc
from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from mouse_core import BatchSource, ConfigError, DatasetStore
from mouse_core.mixtures import Mixture
from mouse_core.randomness import Key, Order, Orders, Purpose
from mouse_core.sampling import SAMPLERS, Blocks, BlockWindows, EpisodeWindows, Pool, window_sampler
from mouse_core.testing import SourceConformance, WindowSamplerConformance, example_store
from tests.core.oracle import last_starts
from tests.raising import assert_raises


def store_of(rows: int) -> DatasetStore:
    zeros = np.zeros(rows, np.int8)
    return DatasetStore().from_dataset(pa.table({"action": zeros, "reward": zeros, "done": zeros}))


def source_of(rows: int, length: int, batch_size: int, sampling: str, **options: object) -> BatchSource:
    return BatchSource(store_of(rows), length, batch_size, sampling=sampling, **options)  # type: ignore[arg-type]


def starts_of(source: BatchSource, index: int) -> list[int]:
    starts: list[int] = source.plan(index).starts.tolist()
    return starts


def epoch_of(source: BatchSource, epoch: int) -> list[int]:
    first = epoch * len(source)
    return [start for index in range(first, first + len(source)) for start in starts_of(source, index)]


shapes = st.tuples(st.integers(1, 300), st.integers(1, 12), st.integers(1, 9)).filter(lambda s: s[0] // s[1] >= 1)


@given(shape=shapes, seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 5))
def test_sequential_sees_every_window_once_an_epoch(shape: tuple[int, int, int], seed: int, epoch: int) -> None:
    rows, length, batch_size = shape
    count = rows // length
    every = [number * length for number in range(count)]
    kept = source_of(rows, length, batch_size, "sequential", seed=seed, drop_last=False)
    assert len(kept) == -(-count // batch_size)
    assert sorted(epoch_of(kept, epoch)) == every
    sizes = [len(starts_of(kept, epoch * len(kept) + index)) for index in range(len(kept))]
    assert sizes[:-1] == [batch_size] * (len(kept) - 1)
    assert sizes[-1] == count - batch_size * (len(kept) - 1)

    if count < batch_size:
        with pytest.raises(ConfigError, match=f"at least {batch_size} windows of {length} steps"):
            source_of(rows, length, batch_size, "sequential", seed=seed)
        return
    dropped = source_of(rows, length, batch_size, "sequential", seed=seed)
    assert len(dropped) == count // batch_size
    seen = epoch_of(dropped, epoch)
    assert len(seen) == len(set(seen)) == len(dropped) * batch_size
    assert set(seen) <= set(every)
    # Dropping the rest changes nothing about the others.
    assert seen == epoch_of(kept, epoch)[: len(seen)]


@given(shape=shapes | st.just((20_011 * 2 + 1, 2, 997)), seed=st.integers(0, 2**64 - 1))
@example(shape=(20_011 * 2 + 1, 2, 997), seed=0)  # more than 16,384 windows, whose order is a network and no table
def test_batch_is_one_endless_sequence_of_the_epochs_of_sequential(shape: tuple[int, int, int], seed: int) -> None:
    rows, length, batch_size = shape
    count = rows // length
    sequential = source_of(rows, length, batch_size, "sequential", seed=seed, drop_last=False)
    cyclic = source_of(rows, length, batch_size, "batch", seed=seed)
    assert len(cyclic) == -(-count // batch_size)
    starts = [starts_of(cyclic, index) for index in range(-(-3 * count // batch_size))]
    assert {len(batch) for batch in starts} == {batch_size}
    epochs = [epoch_of(sequential, epoch) for epoch in range(3)]
    assert [*chain.from_iterable(starts)][: 3 * count] == [*chain.from_iterable(epochs)]
    assert all(sorted(epoch) == list(range(0, count * length, length)) for epoch in epochs)


@pytest.mark.parametrize("sampling", ["sequential", "batch"])
@pytest.mark.parametrize("rows", [64, 33_000])
def test_orders_differ_between_epochs_and_seeds(sampling: str, rows: int) -> None:
    length = 1 if rows < 100 else 2
    orders = []
    for seed in (0, 2**63):
        source = source_of(rows, length, rows // length, sampling, seed=seed)
        orders += [tuple(starts_of(source, epoch)) for epoch in range(2 if rows > 64 else 4)]
    assert len(set(orders)) == len(orders)
    for order in orders:
        assert sorted(order) == list(range(0, rows, length))
        assert list(order) != sorted(order)


def test_small_orders_are_uniform_and_what_is_dropped_differs_between_epochs() -> None:
    source = source_of(4, 1, 4, "sequential", seed=5)
    epochs = 2400
    counts = collections.Counter(tuple(starts_of(source, epoch)) for epoch in range(epochs))
    assert len(counts) == 24
    expected = epochs / 24
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 49.7
    source = source_of(17, 1, 8, "sequential")
    dropped = {next(iter(set(range(17)) - set(epoch_of(source, epoch)))) for epoch in range(60)}
    assert len(dropped) > 10


def test_random_draws_are_uniform_and_independent() -> None:
    rows, length, batch_size = 50, 4, 32
    source = source_of(rows, length, batch_size, "random", seed=11)
    drawn = np.concatenate([source.plan(index).starts for index in range(600)])
    counts = np.bincount(drawn, minlength=rows - length + 1)
    assert len(counts) == rows - length + 1
    expected = len(drawn) / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() < 81.4
    assert counts.min() > 0
    source = source_of(8, 1, 16, "random", seed=3)
    drawn = np.stack([source.plan(index).starts for index in range(800)])
    for first, second in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        pairs = np.bincount((first * 8 + second).reshape(-1), minlength=64)
        expected = pairs.sum() / 64
        assert ((pairs - expected) ** 2 / expected).sum() < 103.4  # 63 degrees of freedom, 0.999
    batches = {tuple(row) for row in drawn.tolist()}
    assert len(batches) == len(drawn)
    assert len(source_of(100, 10, 3, "random")) == 4
    assert len(source_of(109, 10, 3, "random")) == 4
    assert len(source_of(10, 10, 3, "random")) == 1
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    plans = [tuple(starts_of(source_of(1000, 3, 8, "random", seed=seed), 0)) for seed in seeds]
    assert len(set(plans)) == len(seeds)


@given(data=st.data(), shape=shapes)
def test_last_is_the_end_in_order(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    rows, length, batch_size = shape
    if rows // length < batch_size:
        with pytest.raises(ConfigError, match=rf"at least {batch_size} windows .*\({batch_size * length} rows\)"):
            source_of(rows, length, batch_size, "last")
        return
    source = source_of(rows, length, batch_size, "last")
    assert len(source) == 1
    for index in (0, 1, data.draw(st.integers(0, 2**40))):
        assert starts_of(source, index) == last_starts(rows, length, batch_size)
    assert starts_of(source, 0)[-1] == rows - length


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_any_index_at_once(sampling: str) -> None:
    fresh = source_of(1000, 7, 6, sampling, seed=9)
    far = starts_of(fresh, 10**15)
    assert starts_of(fresh, np.int64(10**15)) == far
    assert all(0 <= start <= 993 for start in far)
    source = source_of(100, 5, 4, sampling)
    plan = source.plan(0)
    before = plan.starts.tolist()
    try:
        plan.starts[...] = 0
    except ValueError:
        pass  # read-only is fine as well
    again = source_of(100, 5, 4, sampling).plan(0)
    assert again.starts.tolist() == before
    with pytest.raises(AttributeError):
        plan.length = 3  # type: ignore[misc]


def test_a_sampler_that_leaves_the_snapshot_is_an_error_and_a_billion_windows_start_at_once() -> None:
    for at in (47, -1):
        beyond = SimpleNamespace(sequence_length=4, batch_size=1, batches_per_epoch=len, starts=lambda *_, at=at: [at])
        source = BatchSource(store_of(50), sampling=beyond)
        with pytest.raises(ConfigError, match=rf"starts in 0\.\.46, found {at}"):
            source[0]

    class Rows:
        num_rows = 64 * 10**9

    sampler = window_sampler("sequential", sequence_length=64, batch_size=32)
    tracemalloc.start()
    try:
        starts = sampler.starts(0, 12_345_678, Rows(), 0)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(starts.tolist())) == 32
    assert (starts % 64 == 0).all()
    assert (starts < 64 * 10**9).all()
    assert peak < 4_000_000


@given(n=st.one_of(st.integers(1, 300), st.sampled_from([16_383, 16_384, 16_385, 16_641, 30_000, 65_537])))
def test_an_order_is_a_permutation(n: int) -> None:
    order = Order(Key(1, Purpose.EPOCH, n), n)
    whole = order(np.arange(n))
    assert np.array_equal(np.sort(whole), np.arange(n))
    places = np.array([n - 1, 0, n // 3, n // 3])  # it is evaluated anywhere
    assert order(places).tolist() == whole[places].tolist()


@pytest.mark.parametrize("n", [1000, 50_000])
def test_an_order_mixes(n: int) -> None:
    order = Order(Key(8, Purpose.EPOCH, 1), n)(np.arange(n))
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(n)
    steps = np.abs(np.diff(order))
    assert len(np.unique(steps)) > n / 3
    # The mean distance of two random places is n / 3.
    assert abs(steps.mean() / n - 1 / 3) < 0.02


# (sampling, rows, length, batch size, seed): starts of batches 0, 1 and 1,000,003
GOLDEN = {
    ("random", 1000, 10, 4, 0): [[806, 744, 665, 478], [698, 270, 807, 557], [694, 930, 762, 126]],
    ("random", 1000, 10, 4, 9223372036854775809): [[9, 509, 891, 114], [953, 304, 737, 788], [515, 561, 627, 175]],
    ("random", 70000, 64, 8, 123): [
        [59714, 6689, 32525, 61156, 19354, 23798, 1236, 38479],
        [32400, 503, 68664, 66312, 10237, 8284, 31687, 41273],
        [62264, 3682, 36520, 7099, 23780, 47557, 2023, 18460],
    ],
    ("sequential", 1000, 10, 4, 0): [[400, 60, 960, 860], [520, 590, 330, 770], [200, 380, 340, 510]],
    ("sequential", 1000, 10, 4, 7): [[980, 410, 260, 580], [740, 470, 830, 990], [160, 670, 610, 400]],
    ("sequential", 40000, 2, 6, 0): [
        [18202, 20660, 8176, 12662, 33430, 4794],
        [2392, 27232, 20138, 36106, 15778, 21582],
        [16060, 14640, 20718, 14186, 2968, 3560],
    ],
    ("batch", 1003, 10, 4, 0): [[400, 60, 960, 860], [520, 590, 330, 770], [200, 380, 340, 510]],
    ("batch", 95, 10, 4, 7): [[60, 70, 80, 40], [0, 10, 50, 30], [30, 10, 50, 80]],
    ("batch", 40000, 2, 6, 18446744073709551615): [
        [30892, 19568, 30786, 17858, 21362, 17724],
        [32834, 32094, 5326, 34180, 12060, 23152],
        [16650, 20474, 12112, 23398, 9912, 5486],
    ],
    ("last", 1000, 10, 4, 0): [[960, 970, 980, 990], [960, 970, 980, 990], [960, 970, 980, 990]],
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_streams_are_what_they_have_always_been(case: tuple[str, int, int, int, int]) -> None:
    """If this fails, the batches of every recorded seed have changed: say so in the changelog, or mend the change."""
    rows, *rest = case[1:]
    source = source_of(rows, *rest[:2], case[0], seed=rest[2])
    assert [starts_of(source, index) for index in (0, 1, 1_000_003)] == GOLDEN[case]


WORD = (1 << 64) - 1


class Rows:
    """What a sampler asks of a snapshot: how many rows there are, and what they take, here nothing."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.readers = num_rows, dict[str, Any]()
        self.config = SimpleNamespace(types={})


def rows(count: int) -> Any:
    return Rows(count)


def mix(word: int, key: int) -> int:
    word ^= key
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def shuffled(key: Key, number: int, size: int) -> list[int]:
    """Permutation ``number`` of ``range(size)``: a network on a grid, walked on where it leads beyond the end."""
    keys = [int(word) for word in key.bits(8)]
    side = next(side for side in range(size + 1) if side * side >= size)
    columns = -(-size // max(side, 1))

    def step(position: int) -> int:
        left, right = divmod(position, columns)
        for turn, word in enumerate(keys):
            if turn % 2:
                right = (right + ((mix((number << 24) | left, word) >> 32) * columns >> 32)) % columns
            else:
                left = (left + ((mix((number << 24) | right, word) >> 32) * side >> 32)) % side
        return left * columns + right

    found = []
    for position in range(size):
        moved = step(position)
        while moved >= size:
            moved = step(moved)
        found.append(moved)
    return found


def told(pool: Pool, seed: int, epoch_start: int, epoch: int) -> tuple[list[int], list[list[int]]]:
    """The windows of an epoch in their order, and which are read with each: those of the stretch it opens, or none."""
    windows, size, lanes, block = pool.windows, pool.batch_size, pool.lanes, pool.block
    drawn, of_blocks, of_lanes, of_windows = (
        Key(seed, Purpose.BLOCKS, epoch_start, 4 * epoch + what) for what in range(4)
    )
    # The line: whole blocks in the order drawn, then the rest, begun at a place that is drawn.
    order = np.argsort(of_blocks.bits(windows // block), kind="stable").tolist()
    line = [(number, place) for number in [*order, windows // block] for place in range(block)]
    line = [(number, place) for number, place in line if number * block + place < windows]
    begin = int(drawn.uniform(2)[1] * windows)
    # Lanes: equal parts of it, those of one window of a batch side by side.
    rounds, rest = divmod(windows, size * lanes)
    more = [rest // size + (row < rest % size) for row in range(size)]
    streams: dict[tuple[int, int], list[list[int]]] = {}  # by lane the windows, each with what is read with it
    at = 0
    for row in range(size):
        for lane in range(lanes):
            length = rounds + (lane < more[row])
            places = [(begin + at + step) % windows for step in range(length)]
            at += length
            # Turned, so that a block ends in a round of its own.
            first_end = -places[0] % block if length else 0
            turn = (first_end - (lane * size + row) * block // (size * lanes)) % block % max(length, 1)
            streams[row, lane] = []
            for part in (places[turn:], places[:turn]):
                stretches: list[list[int]] = []
                for place in part:
                    same = stretches and line[stretches[-1][-1]][0] == line[place][0] and stretches[-1][-1] + 1 == place
                    if same:
                        stretches[-1].append(place)
                    else:
                        stretches.append([place])
                for stretch in stretches:
                    number, offset = line[stretch[0]]
                    those = [number * block + offset + step for step in range(len(stretch))]
                    mixed = shuffled(of_windows, stretch[0], len(stretch))
                    streams[row, lane] += [[those[mixed[0]], *those], *([those[one]] for one in mixed[1:])]
    # Rounds: one window of each lane, the lanes of a window of a batch in an order of the round.
    found, read = [], []
    for round_ in range(rounds + 1):
        there = [lanes if round_ < rounds else more[row] for row in range(size)]
        turns = [shuffled(of_lanes, round_ * size + row, there[row]) for row in range(size)]
        for turn in range(lanes):
            for row in range(size):
                if turn < there[row]:
                    window, *with_it = streams[row, turns[row][turn]][round_]
                    found.append(window)
                    read.append(with_it)
    return found, read


block_shapes = st.tuples(st.integers(1, 260), st.integers(1, 9), st.integers(1, 7), st.integers(1, 40))


@given(shape=block_shapes, pool=st.integers(1, 24), seed=st.integers(0, 2**64 - 1), epoch_start=st.integers(0, 3))
@example(shape=(256, 2, 1, 16), pool=8, seed=0, epoch_start=0)
@example(shape=(131, 4, 1, 9), pool=12, seed=3, epoch_start=1)
@example(shape=(40, 7, 3, 12), pool=2, seed=1, epoch_start=0)
def test_windows_come_as_told(shape: tuple[int, int, int, int], pool: int, seed: int, epoch_start: int) -> None:
    count, size, length, block_rows = shape
    sampler, snapshot = BlockWindows(length, size, Blocks(rows=block_rows, pool=pool)), rows(count)
    if count < length:
        assert_raises(ConfigError, f"at least 1 window of {length} steps", sampler.batches_per_epoch, snapshot)
        return
    made = sampler.pool(snapshot)
    windows = max(1, (count - length + 1) // length)
    assert made.windows == windows
    assert made.blocks % size == 0
    assert made.block <= max(1, block_rows // length)
    expected, reads = [], []
    for epoch in range(3):
        uniform = Key(seed, Purpose.BLOCKS, epoch_start, 4 * epoch).uniform(2)
        first = int(uniform[0] * min(length, count - windows * length + 1))
        order, read = told(made, seed, epoch_start, epoch)
        assert sorted(order) == list(range(windows))
        assert sorted(window for some in read for window in some) == list(range(windows))
        expected += [first + length * window for window in order]
        reads += [[first + length * window for window in some] for some in read]
    batches = 3 * windows // size
    asked = (
        sampler.starts_of_many(seed, epoch_start, batches, snapshot, epoch_start, slice(0, size))
        if batches
        else np.zeros((0, size))
    )
    assert asked.reshape(-1).tolist() == expected[: batches * size]
    for number in {0, batches // 2, batches - 1} & set(range(batches)):
        one = sampler.starts(seed, epoch_start + number, snapshot, epoch_start)
        assert one.tolist() == expected[number * size : (number + 1) * size]
    # What is read, in parts as shards have them.
    some = slice(size // 3, size - size // 4)
    if batches:
        asked_for = range(epoch_start, epoch_start + batches)
        begun = epoch_start - 10 * made.blocks
        wanted = [[read for read in reads[size * number :][:size][some] if read] for number in range(batches)]
        for step in (1, 3):
            found = sampler.starts_to_read(seed, asked_for[::step], snapshot, epoch_start, rows=some, begun=begun)
            parts = np.split(found.starts, found.bounds[1:-1]) if len(found.until) else []
            assert len(parts) == len(found.until)
            opened = np.split(np.arange(len(parts)), found.firsts[1:-1])
            assert [[parts[one].tolist() for one in those] for those in opened] == wanted[::step]
            for number, those in zip(range(0, batches, step), opened, strict=True):
                for one in those.tolist():
                    last = max(expected.index(start, number * size) for start in parts[one].tolist()) // size
                    assert 0 < found.until[one] - epoch_start - last <= 2 * made.lanes + 1


@settings(max_examples=10)
@given(
    windows=st.integers(1, 200),
    size=st.integers(1, 8),
    pool=st.integers(1, 30),
    block=st.integers(1, 30),
    begun=st.integers(0, 200),
    count=st.integers(1, 30),
)
def test_whoever_goes_on_reads_what_is_open(
    windows: int, size: int, pool: int, block: int, begun: int, count: int
) -> None:
    sampler, snapshot = BlockWindows(1, size, Blocks(rows=block, pool=pool)), rows(windows)
    for part in (slice(0, size // 2), slice(size // 2, size)):
        read: set[int] = set()
        for first in range(begun, begun + 3 * count, count):
            batches = range(first, first + count)
            found = sampler.starts_to_read(5, batches, snapshot, 0, rows=part, begun=begun)
            bounds = found.bounds[found.firsts]
            for index, begin, end in zip(batches, bounds, bounds[1:], strict=False):
                read |= set(found.starts[begin:end].tolist())
                assert set(sampler.starts(5, index, snapshot, 0)[part].tolist()) <= read
            assert (bounds[0], bounds[-1]) == (0, len(found.starts))


def test_permutations_by_number_are_uniform() -> None:
    """Of 4 elements all 24 orders come, each place has every element of 7 as often, and each is a permutation."""
    drawn = Orders(Key(0, Purpose.BLOCKS))
    number = np.arange(6_000)

    def of(size: int) -> np.ndarray:
        return np.stack([drawn(number, np.full(6_000, size), np.full(6_000, place)) for place in range(size)])

    counts = Counter(map(tuple, of(4).T.tolist()))
    assert len(counts) == 24
    assert sum((count - 250) ** 2 / 250 for count in counts.values()) < 60  # 23 degrees of freedom: 0.99996
    sevens = of(7)
    assert (np.sort(sevens, axis=0) == np.arange(7)[:, None]).all()
    for place in sevens:
        found = np.bincount(place)
        assert ((found - 6_000 / 7) ** 2 / (6_000 / 7)).sum() < 25  # 6 degrees: 0.9997


def test_variance_is_what_draws_show() -> None:
    """Of values that are one number a block, drawn anew 100 times, against as many windows drawn uniformly."""
    sampler, snapshot = BlockWindows(1, 4, Blocks(rows=10, pool=8)), rows(2000)
    pool = sampler.pool(snapshot)
    assert (pool.blocks, pool.block, pool.windows) == (8, 10, 2000)
    random = np.random.default_rng(0)
    for batches in (1, 20):
        means = []
        for seed in range(100):
            values = random.permutation(np.repeat([-1.0, 1.0], 100))  # mean 0 and variance 1 over all blocks
            starts = sampler.starts_of_many(seed, 240, batches, snapshot, 0, slice(0, sampler.batch_size))
            means.append(values[starts // 10].mean())
        found = np.var(means) * 4 * batches
        assert found == pytest.approx(pool.variance(batches), rel=0.4)
    assert pool.variance(500) == pytest.approx(0, abs=1e-9)


def test_the_default_pool_is_large_enough() -> None:
    """2.8 GB of rows of 200 bytes: a small pool of long blocks has a tenth of the default's windows that count."""
    store, zeros = DatasetStore(), np.zeros(2000, np.int32)
    store.extend({"action": zeros, "reward": zeros, "done": zeros, "observation": np.zeros((2000, 46), np.float32)})
    source = BatchSource(store, 64, 32, sampling="blocks")
    assert source.sampler.pool(source.snapshot).window_bytes == 64 * 200  # type: ignore[attr-defined]
    large = Pool(windows=218_750, batch_size=32, lanes=32, block=20, window_rows=64, window_bytes=12_800)
    assert (large.blocks, large.block_rows, large.nbytes) == (1024, 1280, 262_144_000)
    assert large.variance(64) < 2.5
    small = Pool(windows=218_750, batch_size=32, lanes=2, block=312, window_rows=64, window_bytes=12_800)
    assert small.variance(64) > 25


class TestBlockWindows(WindowSamplerConformance):
    rows = (300,)

    def make(self) -> Any:
        return BlockWindows(8, 4, Blocks(rows=32, pool=8))


class TestBlocksWithinEpisodes(WindowSamplerConformance):
    rows = (300,)

    def make(self) -> Any:
        return EpisodeWindows(3, 4, sampling=Blocks(rows=9, pool=8), pad=0)


class TestSourceOfBlocks(SourceConformance):
    def make(self) -> Any:
        return BatchSource(
            example_store(300), 4, 6, sampling=Blocks(rows=16, pool=6), seed=2, windows={"action": [0, 1]}
        )


@pytest.mark.parametrize("boundary", ["episode", "task"])
def test_windows_within_episodes_come_once_an_epoch(boundary: Any) -> None:
    steps = [5, 1, 12, 7, 3, 9] * 6
    done = np.concatenate([[0] * (count - 1) + [1] for count in steps])
    task = np.repeat(np.arange(len(steps)), steps)
    store = DatasetStore()
    store.extend({"action": task, "reward": np.arange(len(done)), "done": done, "task": task})
    begins = np.cumsum([0, *steps[:-1]])
    tiles = [begin + first for begin, count in zip(begins.tolist(), steps, strict=True) for first in range(0, count, 4)]
    source = BatchSource(store, 4, 6, sampling=Blocks(rows=12, pool=6), boundary=boundary)
    sampler: Any = source.sampler
    assert sampler.starts_to_read(0, range(3), source.snapshot, 0, rows=slice(0, 6), begun=0) is not None
    assert len(source) == len(tiles) // 6 == 12
    found: list[Any] = []
    for epoch in range(3):
        found = [source.plan(12 * epoch + index).starts for index in range(12)]
        assert sorted(np.concatenate(found).tolist()) == tiles
    read = sampler.starts_to_read(0, range(12), source.snapshot, 0, rows=slice(0, 6), begun=-100)
    assert sorted(read.starts.tolist()) == tiles
    assert np.concatenate(found).tolist() != tiles


def test_blocks_with_other_options() -> None:
    store = example_store(300)
    for options in (
        {"lengths": [2, 8]},
        {"windows": {"action": range(3)}},
        {"boundary": "episode", "windows": {"action": range(3)}, "pad": False},
        {"shard": (1, 2)},
    ):
        given = {"sampling": Blocks(rows=32, pool=8), **options}
        source = BatchSource(store, 8, 4, **given)  # type: ignore[arg-type]
        assert source[3]["reward"].tolist() == BatchSource(store, 8, 4, **given)[3]["reward"].tolist()  # type: ignore[arg-type]
        sampler: Any = source.sampler
        reads = sampler.starts_to_read(0, range(5), source.snapshot, 0, rows=slice(0, 4), begun=0)
        assert set(source.plan(0).starts.tolist()) <= set(reads.starts.tolist()) or "lengths" in options
    with pytest.raises(ConfigError, match="weighting: with sampling 'blocks', expected 'step'"):
        BatchSource(store, 8, 4, "blocks", boundary="episode", weighting="trajectory")
    with pytest.raises(ConfigError, match="or a WindowSampler, found 'block'"):
        BatchSource(store, 8, 4, "block")
    for wrong in ({"rows": 0}, {"pool": 2.5}, {"rows": True}):
        assert_raises(ConfigError, f"Blocks: expected {next(iter(wrong))} as an integer of at least 1", Blocks, **wrong)
    mixed = BatchSource(Mixture({"a": store, "b": example_store(120)}, [2, 1]), 8, 6, Blocks(rows=32, pool=6))
    assert len(mixed) == -(-((300 - 7) // 8 + (120 - 7) // 8) // 6)
    first = [start for index in range(len(mixed) * 2) for start in mixed.plan(index).starts.tolist() if start < 300]
    assert len(set(first[:36])) == 36


def test_blocks_do_not_depend_on_how_rows_are_laid_out() -> None:
    buffer = io.BytesIO()
    Image.new("L", (4, 4)).save(buffer, "png")
    zeros = np.zeros(400, np.int64)
    columns: dict[str, Any] = {"action": zeros, "reward": zeros, "done": zeros, "observation": [[0.0] * 5] * 400}
    table = pa.table({**columns, "observation_image": [{"bytes": buffer.getvalue(), "path": None}] * 400})
    sources = [
        BatchSource(store, 4, 4, "blocks", fields=["reward"])
        for store in (
            DatasetStore().from_dataset(table),
            DatasetStore().from_dataset(table.slice(0, 150)).from_dataset(table.slice(150)),
        )
    ]
    assert sources[0].plan(7).starts.tolist() == sources[1].plan(7).starts.tolist()
    pools = [one.sampler.pool(one.snapshot) for one in sources]  # type: ignore[attr-defined]
    assert pools[0] == pools[1]
    assert pools[0].window_bytes == 4 * (3 * 8 + 5 * 8 + len(buffer.getvalue()))
