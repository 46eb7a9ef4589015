"""Which of several processes this is: ``shard="auto"``."""

import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node

from mouse_core import BatchSource, ConfigError, PrefetchBatchifier
from mouse_core.mixtures import MixtureSource
from mouse_core.ranks import Ranks, find_ranks
from mouse_core.testing import example_store
from tests.core.oracle import assert_same


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No framework is asked but those of a test, and no variable is set."""
    for name in ("torch.distributed", "accelerate.state", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def say(monkeypatch: pytest.MonkeyPatch, **said: tuple[int, int]) -> None:
    """Have frameworks and the environment say who this is."""
    made: dict[str, Any] = {}
    for name, (rank, count) in said.items():
        if name == "environment":
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(count))
        elif name == "torch":
            made["torch.distributed"] = SimpleNamespace(
                is_available=lambda: True,
                is_initialized=lambda: True,
                get_rank=lambda rank=rank: rank,
                get_world_size=lambda count=count: count,
            )
        elif name == "accelerate":
            state = SimpleNamespace(_shared_state={"process_index": rank, "num_processes": count})
            made["accelerate.state"] = SimpleNamespace(PartialState=state)
        else:
            made["jax"] = SimpleNamespace(
                distributed=SimpleNamespace(is_initialized=lambda: True),
                process_index=lambda rank=rank: rank,
                process_count=lambda count=count: count,
            )
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_one_process_where_nobody_says_anything() -> None:
    assert find_ranks().shard == (0, 1)
    assert BatchSource(example_store(), 8, 4, shard="auto").shard == (0, 1)


def test_frameworks_that_know_of_no_others_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    off = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch.distributed", off)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(distributed=off))
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={}))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert find_ranks().shard == (0, 1)
    say(monkeypatch, environment=(1, 4))
    assert find_ranks().shard == (1, 4)


def test_who_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, environment=(1, 2))
    assert find_ranks("jax") == Ranks(1, 2, "the environment")
    say(monkeypatch, jax=(2, 3))
    assert find_ranks().shard == (2, 3)
    say(monkeypatch, accelerate=(3, 4))
    assert find_ranks().shard == (3, 4)
    say(monkeypatch, torch=(4, 5))
    assert find_ranks().shard == (4, 5)
    assert find_ranks("jax").shard == (2, 3)
    assert find_ranks("environment").shard == (1, 2)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"RANK": "1"}, "expected RANK and WORLD_SIZE as numbers in the environment, found {'RANK': '1'}"),
        ({"WORLD_SIZE": "2"}, "expected RANK and WORLD_SIZE as numbers"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "expected RANK and WORLD_SIZE as numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"expected 0 <= rank < count, found \(2, 2\) in the environment"),
    ],
)
def test_an_environment_that_says_nonsense(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], message: str) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        BatchSource(example_store(), 8, 4, shard="auto")


@pytest.mark.parametrize("shard", ["auto", Ranks(1, 2)])
def test_a_shard_that_is_found_is_that_shard(monkeypatch: pytest.MonkeyPatch, shard: Any) -> None:
    """In a source, a loader, after a refresh and after pickling; state and fingerprint know nothing of it."""
    say(monkeypatch, environment=(1, 2))
    store = example_store()
    whole, half = BatchSource(store, 8, 4), BatchSource(store, 8, 4, shard=shard)
    again: BatchSource = pickle.loads(pickle.dumps(half))
    grown = half.with_snapshot(store.snapshot(), epoch_start=3)
    for source in (half, again, grown):
        assert source.shard == (1, 2)
        np.testing.assert_array_equal(source[3]["reward"], whole[3]["reward"][2:])
    assert half.with_options(shard=(0, 4)).shard == (0, 4)
    assert half.fingerprint == whole.fingerprint
    with (
        PrefetchBatchifier(store, 8, 4, shard=shard) as loader,
        PrefetchBatchifier(store, 8, 4, shard=(0, 1)) as all_of_it,
    ):
        assert loader.source.shard == (1, 2)
        np.testing.assert_array_equal(loader.next_batch()["reward"], all_of_it.next_batch()["reward"][2:])
        assert loader.state_dict() == all_of_it.state_dict()


def test_other_words_are_no_shard() -> None:
    for shard in ("Auto", "", None, 3):
        with pytest.raises(ConfigError, match=r"expected \(rank, count\), found .*; shard=.auto. determines both"):
            BatchSource(example_store(), 8, 4, shard=shard)  # type: ignore[arg-type]


def test_whole_batches_in_each_of_several_processes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody says that it is meant. Warnings are errors in the tests."""
    store = example_store()
    PrefetchBatchifier(store, 8, 4).close()
    monkeypatch.setenv("RANK", "1")
    PrefetchBatchifier(store, 8, 4).close()  # half of what torchrun sets
    say(monkeypatch, environment=(1, 3))
    with pytest.warns(
        UserWarning, match=r"each of 3 processes \(the environment\) gets complete batches of 4"
    ) as warned:
        loader = PrefetchBatchifier(store.snapshot(), 8, 4)
    assert warned[0].filename == __file__
    assert loader.source.shard == (0, 1)
    loader.close()
    mixture = MixtureSource([BatchSource(store, 8, 4)])
    with pytest.warns(UserWarning, match=r"each of 3 processes .* gets complete batches of 4") as warned:
        PrefetchBatchifier(mixture).close()
    assert warned[0].filename == __file__
    PrefetchBatchifier(mixture, shard=(0, 1)).close()
    for given, options in ((store, {"shard": (0, 1)}), (store, {"shard": (0, 2)}), (BatchSource(store, 8, 4), {})):
        PrefetchBatchifier(given, **({"sequence_length": 8, "batch_size": 4} if options else {}), **options).close()
    PrefetchBatchifier(BatchSource(store, 8, 4), shard=(0, 1)).close()


@pytest.mark.parametrize("shard", [(0, 2), Ranks(0, 2)])
def test_a_shard_is_not_split_again_by_nodes(shard: Any) -> None:
    def batches() -> Iterator[Any]:
        yield from BatchSource(example_store(), 8, 4, fields=["reward"], shard=shard)

    split = split_dataset_by_node(datasets.IterableDataset.from_generator(batches), 0, 2)
    with pytest.raises(ConfigError, match="shard: expected a source that is sharded once, found shard"):
        next(iter(split))


def test_a_padded_stream_is_the_same_stream() -> None:
    """Fingerprint, state and plans know nothing of it, so a run of two goes on in three."""
    store = example_store()
    even = PrefetchBatchifier(store, 8, 4, shard=(0, 2), seed=3)
    padded = PrefetchBatchifier(store, 8, 4, shard=(1, 3), uneven="pad")
    assert list(padded.spec) == [*even.spec, "mask"]
    assert padded.source.fingerprint == even.source.fingerprint
    even.next_batch()
    padded.load_state_dict(even.state_dict())
    assert padded.state_dict() == even.state_dict()
    whole = BatchSource(store, 8, 4, seed=3)
    np.testing.assert_array_equal(padded.next_batch()["reward"], whole[1]["reward"][1:3])
    source = padded.source.with_options(seed=5)
    assert (source.uneven, source.shard) == ("pad", (1, 3))
    assert_same(source.gather(pickle.loads(pickle.dumps(source.plan(2)))), source[2])
    plain = BatchSource(store, 8, 4, shard=(1, 3), uneven="pad", fields=["reward"])  # copied together
    assert [plain[index]["mask"][:, 0].tolist() for index in range(40)] == [[True, False]] * 40
    even.close()
    padded.close()


def test_uneven_shards_are_refused_unless_somebody_says_how() -> None:
    store = example_store()
    with pytest.raises(ConfigError, match="divides batch_size 32, found 3; uneven='pad' accepts any count"):
        BatchSource(store, 8, 32, shard=(0, 3))
    with pytest.raises(ConfigError, match="uneven: expected 'refuse' or 'pad', found 'split'"):
        BatchSource(store, 8, 32, uneven="split")  # type: ignore[arg-type]
