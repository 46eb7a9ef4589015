"""Which windows a batch consists of: laws for every mode, and streams that must never change."""

import collections
import tracemalloc
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, DatasetStore
from mouse_core.randomness import Key, Order, Purpose
from mouse_core.sampling import window_sampler
from tests.core.oracle import last_starts


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


@pytest.mark.parametrize("sampling", ["random", "last", "sequential", "batch"])
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


def test_a_sampler_that_leaves_the_snapshot_is_an_error() -> None:
    for at in (47, -1):
        beyond = SimpleNamespace(sequence_length=4, batch_size=1, batches_per_epoch=len, starts=lambda *_, at=at: [at])
        source = BatchSource(store_of(50), sampling=beyond)
        with pytest.raises(ConfigError, match=rf"starts in 0\.\.46, found {at}"):
            source[0]


def test_an_epoch_of_a_billion_windows_starts_at_once() -> None:
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


def first_starts(sampling: str, rows: int, length: int, batch_size: int, seed: int) -> list[list[int]]:
    source = source_of(rows, length, batch_size, sampling, seed=seed)
    return [starts_of(source, index) for index in (0, 1, 1_000_003)]


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_streams_are_what_they_have_always_been(case: tuple[str, int, int, int, int]) -> None:
    """If this fails, the batches of every recorded seed have changed: say so in the changelog, or mend the change."""
    assert first_starts(*case) == GOLDEN[case]
