"""Runs that stop with some processes and go on with others: one stream of whole batches, whatever their number."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import AugmentTokensConfig, BatchSource, ConfigError, DatasetStore, PrefetchBatchifier, WorkerError
from mouse_core.digest import StreamDigest, whole_state
from mouse_core.mixtures import Mixture, MixtureSource
from mouse_core.randomness import Key, Purpose
from mouse_core.testing import example_store

STORE = example_store(300)
TABLE = pa.table(
    {"action": np.arange(9000) % 5, "reward": np.zeros(9000), "done": (np.arange(9000) % 37 == 36).astype(np.int64)}
)
LONG = DatasetStore().from_dataset(TABLE)
MIXED = Mixture({"a": LONG, "b": LONG}, weights={"a": 1, "b": 5}).snapshot()
MIXTURE = Mixture({"a": STORE, "b": example_store(120)}, weights=[1, 2])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampling": "sequential", "drop_last": False},
    {"sampling": "batch", "views": 2, "augment": AugmentTokensConfig()},
    {"sampling": "last", "normalize": {"obs_continuous": "mean_std"}},
    {"boundary": "episode", "weighting": "trajectory", "pad": 0.0},
    {"boundary": "episode", "sampling": "sequential", "packed": True},
    {"lengths": range(1, 9), "packed": 100},
    {"lengths": range(1, 9)},
    {"sequence_length": None, "windows": {"action": range(3), "obs_continuous": [-1, 0]}},
]


class Own:
    """A source of one's own: what loaders need to know, and nothing else."""

    def __init__(self, source: BatchSource) -> None:
        self._source, self.spec, self.fingerprint = source, source.spec, source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index]


def mixed() -> MixtureSource:
    return MixtureSource([BatchSource(STORE, 8, 6, seed=1), BatchSource(STORE, 8, 5, sampling="batch")], [1, 2])


def run(make: Any, count: int, steps: int, state: Any) -> Any:
    """The state of a run of so many processes together after some steps on from a state."""
    loaders = [make((rank, count)) for rank in range(count)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(steps):
            loader.next_batch()
    state = whole_state([loader.state_dict() for loader in loaders])
    for loader in loaders:
        loader.close()
    return state


@settings(max_examples=6)
@given(
    kind=st.sampled_from([*range(len(OPTIONS)), "mixture", "own", "mixed"]),
    runs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=4),
    workers=st.sampled_from([0, 2]),
)
def test_any_numbers_of_processes_deliver_the_one_stream(kind: Any, runs: list[tuple[int, int]], workers: int) -> None:
    """By digest: every value of every window at its place in its batch, each once, over any changes of the number."""

    def make(shard: tuple[int, int]) -> PrefetchBatchifier:
        delivering: dict[str, Any] = {"shard": shard, "uneven": "pad", "num_workers": workers, "digest": True}
        if kind == "own":
            return PrefetchBatchifier(Own(BatchSource(STORE, 8, 7, seed=3)), **delivering)
        if kind == "mixed":
            return PrefetchBatchifier(mixed(), **delivering)
        options = {"sequence_length": 8, "batch_size": 7, "seed": 3, **({} if kind == "mixture" else OPTIONS[kind])}
        return PrefetchBatchifier(MIXTURE if kind == "mixture" else STORE, **options, **delivering)

    state = None
    for count, steps in runs:
        state = run(make, count, steps, state)
    expected = run(make, 1, sum(steps for _, steps in runs), None)
    assert state == expected
    assert StreamDigest.from_state(state["digest"]).windows > 0 or not state["next_index"]


class Counting:
    """Stands behind all memory, and counts the bytes that batches read of it."""

    begin, size, gap, room = 0, (1 << 63) - 1, 0, None

    def __init__(self) -> None:
        self.nbytes = 0

    def ask(self, begins: Any, ends: Any, batches: Any) -> None:
        pass

    def there(self, begins: Any, ends: Any) -> bool:
        return False

    def looks_further(self) -> bool:
        return False

    def wait(self, begins: Any, ends: Any) -> None:
        self.nbytes += int((ends - begins).sum())

    def still(self, token: object) -> bool:
        return True


@pytest.mark.parametrize("count", [2, 3])
def test_each_process_reads_its_own_rows_alone(count: int) -> None:
    """The bytes that they read add up to those of the whole batches, each of which lies in one window of an epoch."""
    found = []
    for rank in range(count):
        snapshot = DatasetStore().from_dataset(TABLE).snapshot()
        counting = Counting()
        for segment in snapshot.segments:
            segment.backing = counting
        source = BatchSource(snapshot, 16, 12, "sequential", shard=(rank, count))
        for index in range(len(source)):
            _ = source[index]
        found.append(counting.nbytes)
    whole = BatchSource(LONG, 16, 12, "sequential")
    assert found == [len(whole) * 12 * 16 * 24 // count] * count  # three columns of 8 bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": "sequential"},
        {"sampling": "sequential", "drop_last": False},
        {"sampling": "batch"},
        {"sampling": "blocks"},
        {"boundary": "episode"},
        {"boundary": "episode", "sampling": "sequential"},
        {"boundary": "episode", "weighting": "trajectory"},
        {"lengths": [1, 2]},
    ],
    ids=str,
)
def test_a_thousand_ranks_have_every_window_once(options: dict[str, Any]) -> None:
    """Plans alone, for 1,024 ranks and for numbers that divide no batch, across epochs; filled up by one window."""
    whole = BatchSource(LONG, 2, 2048, seed=5, **options)
    for count, uneven in ((1024, "refuse"), (1000, "pad"), (3, "pad")):
        if count == 1024 and "drop_last" in options:
            continue  # the short batch is refused
        first = BatchSource(LONG, 2, 2048, seed=5, shard=(0, count), uneven=uneven, **options)
        ranks = {0, 1, count // 2, count - 1, *range(7, count, 97)}
        for source in [first.with_options(shard=(rank, count)) for rank in sorted(ranks)]:
            for index in range(6):  # of blocks of 1 and of 8 batches
                plan, expected = source.plan(index), whole.plan(index)
                size, rank = expected.global_size, source.shard[0]
                begin, end = size * rank // count, size * (rank + 1) // count
                assert (plan.first, plan.global_size) == (begin, size)
                assert np.array_equal(plan.starts[: end - begin], expected.starts[begin:end])
                assert len(plan.starts) == (-(-size // count) if uneven == "pad" else end - begin)


@settings(max_examples=10)
@given(
    begin=st.integers(0, 2399),
    count=st.integers(1, 3),
    kind=st.sampled_from(["random", "sequential", "batch", "blocks"]),
)
def test_windows_of_a_shard_of_a_mixture_are_drawn_without_the_others(begin: int, count: int, kind: str) -> None:
    sampler: Any = BatchSource(MIXED, 2, 2400, kind).sampler
    some = slice(begin, min(begin + 40, 2400))
    whole = sampler.starts_of_many(3, 4, count, MIXED, 2, slice(0, 2400))
    np.testing.assert_array_equal(sampler.starts_of_many(3, 4, count, MIXED, 2, some), whole[:, some])


@given(st.integers(0, 40), st.integers(0, 5000))
def test_random_words_are_drawn_from_anywhere(count: int, first: int) -> None:
    key = Key(9, Purpose.WINDOWS, 7, 3)
    np.testing.assert_array_equal(key.bits(count, first), key.bits(first + count)[first:])
    np.testing.assert_array_equal(key.uniform(count, first), key.uniform(first + count)[first:])


def test_what_cannot_be_shared_out_says_so() -> None:
    source = Own(BatchSource(STORE, 8, 8))
    uneven = pytest.raises(WorkerError, match="expected batches that 3 shards divide evenly, found batch 0 with 8")
    with PrefetchBatchifier(source, shard=(1, 3), num_workers=0) as loader, uneven:
        loader.next_batch()
    shard = BatchSource(STORE, 8, 8, shard=(0, 2))
    with pytest.raises(ConfigError, match=r"without a shard, found a source with shard \(0, 2\)"):
        PrefetchBatchifier(shard, shard=(0, 2))
    with pytest.raises(ConfigError, match=r"not sharded, found member 'a' with shard \(0, 2\)"):
        MixtureSource({"a": shard})
    with pytest.raises(ConfigError, match="source of packed windows"):
        PrefetchBatchifier(Own(BatchSource(STORE, 8, 8, lengths=range(1, 9), packed=True)), shard=(0, 2))
