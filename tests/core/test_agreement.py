"""Ranks that would deliver parts of different batches are told: which of them, and in what."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mouse_core import AugmentTokensConfig, BatchSource, ConfigError, PrefetchBatchifier
from mouse_core.ranks import Board, Ranks
from mouse_core.testing import example_columns, example_store
from tests.core.worlds import store_of


class Notes:
    def __init__(self, seconds: float = 60) -> None:
        self.seconds = seconds
        self.notes: dict[str, str] = {}

    def put(self, name: str, note: str) -> None:
        self.notes[name] = note

    def get(self, name: str) -> str | None:
        return self.notes.get(name)

    def remove(self, name: str) -> None:
        del self.notes[name]


def run(work: Callable[[Ranks], Any], count: int, board: Board | None = None) -> list[Any]:
    """What each of ``count`` ranks returns, or the error that it raises."""
    board = board or Notes()

    def one(rank: int) -> Any:
        try:
            return work(Ranks(rank, count, board=board))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def rewards(loader: PrefetchBatchifier, batches: int) -> list[Any]:
    return [loader.next_batch()["reward"] for _ in range(batches)]


def refused(found: list[Any], *said: str) -> None:
    """See that every rank is told the same, and that it is said in these words."""
    assert {type(error) for error in found} == {ConfigError}, found
    assert len({str(error) for error in found}) == 1, found
    for words in said:
        assert words in str(found[0])


@pytest.mark.parametrize("count", [2, 5])
def test_ranks_that_agree_have_the_batch_together(count: int) -> None:
    """At the start, after a refresh, and where they go on from a state; the notes do not pile up."""
    board = Notes()

    def work(**options: Any) -> list[Any]:
        store = example_store(100)
        with PrefetchBatchifier(store, 8, 6, **options) as loader:
            found = rewards(loader, 3)
            state = loader.state_dict()
            for number in range(4):
                store.extend(example_columns(20, first=100 + 20 * number))
                loader.refresh()
                found += rewards(loader, 1)
            loader.load_state_dict(state)
            return found + rewards(loader, 1)

    parts = run(lambda ranks: work(shard=ranks, uneven="pad", num_workers=1), count, board)
    assert not any(isinstance(part, Exception) for part in parts), parts
    for index, expected in enumerate(work()):
        for rank in range(count):
            own = expected[6 * rank // count : 6 * (rank + 1) // count]
            np.testing.assert_array_equal(parts[rank][index][: len(own)], own)
    assert len(board.notes) <= 3 * count + 1, sorted(board.notes)


COLUMNS = example_columns(300)
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 7}, "rank 2 with seed 7 (most have 0)"),
    "batch size": ({"batch_size": 8}, "rank 2 with batch_size 8 (most have 4)"),
    "sequence length": ({"sequence_length": 9}, "rank 2 with sequence_length 9 (most have 8)"),
    "augmentation": ({"augment": AugmentTokensConfig(permute_done=True)}, "rank 2 with augment"),
    "fields": ({"fields": ["reward"]}, "fields done none (most have"),
    "sampling": ({"sampling": "last"}, "rank 2 with sampling"),
    "dtypes": ({"dtypes": {"reward": "float64"}}, "rank 2 with dtype of reward float64 (most have float32)"),
    "rows": ({"store": example_store(290)}, "rank 2 with rows 290 (most have 300)"),
    "values": ({"store": store_of({**COLUMNS, "reward": COLUMNS["reward"] + 1})}, "rank 2 with fingerprint "),
}


@pytest.mark.parametrize(("other", "of_sources"), [*((other, False) for other in OTHERS), ("seed", True)])
def test_a_rank_that_is_asked_for_something_else_is_named_at_the_first_batch(other: str, of_sources: bool) -> None:
    changed, said = OTHERS[other]

    def work(ranks: Ranks) -> Any:
        options: dict[str, Any] = {"sequence_length": 8, "batch_size": 4, "shard": ranks, "uneven": "pad"}
        options |= changed if ranks.rank == 2 else {}
        store = options.pop("store", example_store())
        made = PrefetchBatchifier(BatchSource(store, **options)) if of_sources else PrefetchBatchifier(store, **options)
        with made as loader:
            loader.next_batch()

    refused(run(work, 4), "ranks: expected all 4 ranks to agree at the first batch, found rank 2 with", said)


def test_shards_of_another_count_are_named() -> None:
    """A rank that believes that they are fewer, as after a restart that it missed."""
    board = Notes()

    def work(ranks: Ranks) -> Any:
        mine = Ranks(1, 3, board=board) if ranks.rank == 1 else ranks
        with PrefetchBatchifier(example_store(), 8, 6, shard=mine) as loader:
            loader.next_batch()

    refused(run(work, 2, board), "found rank 1 with shards 3 (rank 0 has 2)")


def test_ranks_that_go_on_from_different_states_are_named() -> None:
    def work(ranks: Ranks) -> Any:
        with PrefetchBatchifier(example_store(), 8, 4, shard=ranks, seed=5) as loader:
            state = loader.state_dict()
            if ranks.rank:  # the other one has no checkpoint
                loader.load_state_dict({**state, "next_index": 40})
            try:
                loader.next_batch()
            finally:
                assert loader.state_dict() == state

    found = run(work, 2)
    refused(found, "found rank 1 with call load_state_dict() (rank 0 has the first batch), next_index 40 (rank 0")

    def at_different_batches(ranks: Ranks) -> Any:
        with PrefetchBatchifier(example_store(), 8, 4, shard=ranks) as loader:
            rewards(loader, 2)
            before = loader.state_dict()
            try:
                loader.load_state_dict({**before, "next_index": 10 + ranks.rank // 2})
            finally:
                assert loader.state_dict() == before

    refused(run(at_different_batches, 4), "at load_state_dict(), found rank 2 with next_index 11 (most have 10)")


def test_rows_that_differ_at_a_refresh_are_named_and_nothing_has_changed() -> None:
    def work(ranks: Ranks) -> Any:
        store = example_store(100)
        with PrefetchBatchifier(store, 8, 4, shard=ranks, uneven="pad") as loader:
            rewards(loader, 3)
            before = loader.state_dict()
            store.extend(example_columns(20 + ranks.rank // 2, first=100))
            try:
                loader.refresh()
            finally:
                assert loader.state_dict() == before
                loader.next_batch()

    refused(run(work, 3), "at refresh(), found rank 2 with rows 121 (most have 120)")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_refresh_that_one_rank_misses_is_found_before_the_next_batch(missing: int) -> None:
    """Though the ranks wait for each other in every step, as they do in training."""
    steps = threading.Barrier(3, timeout=20)

    def work(ranks: Ranks) -> Any:
        store = example_store(100)
        with PrefetchBatchifier(store, 8, 6, shard=ranks) as loader:
            for _ in range(5):
                loader.next_batch()
                steps.wait()
            store.extend(example_columns(20, first=100))
            if ranks.rank != missing:
                loader.refresh()
            loader.next_batch()  # after which it would wait for the others in vain

    found = run(work, 3)
    assert found[missing] is None
    for rank in {0, 1, 2} - {missing}:
        expected = f"ranks: expected all 3 ranks to call refresh() before batch 5, found rank {missing} at batch 5 "
        expected += "without this call"
        assert str(found[rank]) == expected, found


def test_a_refresh_that_only_one_rank_makes_is_found_at_the_next_that_all_make() -> None:
    """Where nobody waits for each other, one is ahead by a refresh."""

    def work(ranks: Ranks) -> Any:
        with PrefetchBatchifier(example_store(), 8, 4, shard=ranks) as loader:
            rewards(loader, 2)
            loader.load_state_dict({**loader.state_dict(), "next_index": 4})
            if ranks.rank:
                loader.refresh()
            loader.load_state_dict({**loader.state_dict(), "next_index": 6})

    refused(run(work, 2), "found rank 1 with call refresh() (rank 0 has load_state_dict())")


def test_a_rank_that_never_comes_is_named_after_the_time_of_the_group() -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.rank != 1:
            with PrefetchBatchifier(example_store(), 8, 6, shard=ranks) as loader:
                loader.next_batch()

    found = run(work, 3, Notes(seconds=0.3))
    assert "rank 1 did not arrive within 0 s" in str(found[0])
    assert isinstance(found[2], ConfigError)


def test_several_loaders_are_told_apart_by_the_order_in_which_they_are_used() -> None:
    def work(ranks: Ranks) -> Any:
        store = example_store()
        made = [PrefetchBatchifier(store, 8, 4, shard=ranks, seed=seed) for seed in (1, 2, 3)]
        found = [made[number].next_batch()["reward"] for number in (2, 0, 2, 2)]  # the second is never used
        for loader in made:
            loader.close()
        return found

    for part in run(work, 2):
        assert len(part) == 4

    def crossed(ranks: Ranks) -> Any:
        for seed in (1, 2) if ranks.rank else (2, 1):
            with PrefetchBatchifier(example_store(), 8, 4, shard=ranks, seed=seed) as loader:
                loader.next_batch()

    refused(run(crossed, 2), "rank 1 with seed 1 (rank 0 has 2)")


def test_shards_in_numbers_agree_on_nothing() -> None:
    with PrefetchBatchifier(example_store(), 8, 4, shard=(1, 2)) as loader:
        loader.next_batch()
        loader.refresh()
    with PrefetchBatchifier(example_store(), 8, 4, shard=Ranks(1, 2)) as loader:
        loader.next_batch()


def test_a_loader_that_was_made_before_the_processes_knew_each_other_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    loader = PrefetchBatchifier(example_store(), 8, 4, shard="auto")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"= \(1, 2\) of the environment, found a loader for \(0, 1\)"):
        loader.next_batch()
    loader.close()
