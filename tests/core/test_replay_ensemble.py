"""Ensembles of replay buffers: exact sizes, shares, and what each member does by itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, PrefetchBatchifier, SchemaError, StateError
from mouse_core.randomness import Key
from mouse_core.replay import (
    ArrayStorage,
    ListStorage,
    MemmapStorage,
    NextView,
    PrioritizedReplayBuffer,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    Schedule,
    SliceSampler,
)
from mouse_core.testing import example_store
from tests.raising import assert_raises


def member(number: int, rows: int = 20, kind: Any = ReplayBuffer, **options: Any) -> Any:
    buffer = kind(storage=ArrayStorage(rows), **options)
    values = np.arange(rows) + 1000 * number
    buffer.extend({"a": values, "deep": {"b": values.astype(np.float32)}, "done": np.arange(rows) % 5 == 4})
    return buffer


@given(
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda weights: sum(weights) > 1e-3),
    size=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_batches_have_as_many_rows_as_asked(weights: list[float], size: int, seed: int) -> None:
    members = [member(number) for number in range(len(weights))]
    ensemble = ReplayBufferEnsemble(*members, p=weights, seed=seed)
    shares = np.array(weights) / sum(weights)
    for _ in range(3):
        batch = ensemble.sample(size)
        assert batch["index"].shape == batch["buffer_ids"].shape == (size,)
        counts = np.bincount(batch["buffer_ids"], minlength=len(weights))
        # Rounded up or down, never further.
        assert (np.abs(counts - shares * size) < 1 + 1e-6).all()
        np.testing.assert_array_equal(batch["a"], batch["buffer_ids"] * 1000 + batch["index"])
        np.testing.assert_array_equal(batch["deep"]["b"], batch["a"])


def scheduled() -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(member(0), member(1), p=Schedule({0: [1, 0], 3: [3, 1], 5: [0, 1]}), batch_size=16)


def test_shares_may_follow_a_schedule_by_the_number_of_the_sample() -> None:
    ensemble = scheduled()
    assert ensemble.p == (1.0, 0.0)
    found = [np.bincount(ensemble.sample()["buffer_ids"], minlength=2).tolist() for _ in range(4)]
    assert found == [[16, 0]] * 3 + [[12, 4]]
    assert ensemble.p == (0.75, 0.25)
    state = ensemble.state_dict()
    wanted = [ensemble.sample() for _ in range(3)]
    other = scheduled()
    other.load_state_dict(state)
    for batch in wanted:
        np.testing.assert_array_equal(other.sample()["a"], batch["a"])
    assert np.bincount(wanted[-1]["buffer_ids"], minlength=2).tolist() == [0, 16]
    assert_raises(StateError, "shares", ReplayBufferEnsemble(member(0), member(1), p=[3, 1]).load_state_dict, state)
    with pytest.raises(ConfigError, match="expected 2 weights"):
        ReplayBufferEnsemble(member(0), member(1), p=Schedule({0: [1, 0], 3: [1]}))
    ramp = Schedule({batch: [16 - batch, batch] for batch in range(9)})
    ensemble = ReplayBufferEnsemble(member(0), member(1), p=ramp, batch_size=16)
    found = [int((ensemble.sample()["buffer_ids"] == 1).sum()) for _ in range(12)]
    assert found == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8]


def test_draws_come_from_the_seed_of_the_ensemble_by_exact_shares() -> None:
    ensemble = ReplayBufferEnsemble(member(0), member(1), p=[1, 3], batch_size=16)
    for _ in range(20):
        assert np.bincount(ensemble.sample()["buffer_ids"]).tolist() == [4, 12]
    thirds = ReplayBufferEnsemble(member(0), member(1), member(2), batch_size=1, seed=3)
    counts = np.bincount(np.concatenate([thirds.sample()["buffer_ids"] for _ in range(1500)]), minlength=3)
    assert ((counts - 500) ** 2 / 500).sum() < 13.8  # chi-square, 2 degrees of freedom, p = 0.001

    def drawn(seeds: int, **options: Any) -> list[int]:
        members = [member(0, **options), member(1, **options)]
        ensemble = ReplayBufferEnsemble(*members, p=[0.3, 0.7], batch_size=9, seed=seeds)
        return [value for _ in range(4) for value in ensemble.sample()["a"].tolist()]

    assert drawn(1) == drawn(1, seed=7)
    assert drawn(1) != drawn(2)
    batch = ReplayBufferEnsemble(member(0), member(1), batch_size=40).sample()
    assert (batch["index"][:20] != batch["index"][20:]).any()


def test_transforms_of_members_then_its_own() -> None:
    def double(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "a": batch["a"] * 2}

    def add(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "a": batch["a"] + batch["buffer_ids"]}

    ensemble = ReplayBufferEnsemble(member(0, transform=double), member(1), transform=add, batch_size=6)
    batch = ensemble.sample()
    expected = np.where(batch["buffer_ids"] == 0, batch["index"] * 2, batch["index"] + 1001)
    np.testing.assert_array_equal(batch["a"], expected)

    class Noise:
        random = True

        def __call__(self, batch: dict[str, Any], key: Key) -> dict[str, Any]:
            return {**batch, "noise": key.uniform(len(batch["index"]))}

    batches = [ReplayBufferEnsemble(member(0), member(1), transform=Noise(), batch_size=6).sample() for _ in range(2)]
    np.testing.assert_array_equal(batches[0]["noise"], batches[1]["noise"])


def test_slices_of_one_length_and_fields_must_be_alike() -> None:
    members = [member(number, sampler=SliceSampler(sequence_length=4, end_key="done")) for number in range(2)]
    ensemble = ReplayBufferEnsemble(*members, p=[1, 2])
    for _ in range(10):
        batch = ensemble.sample(4)
        assert batch["a"].shape == batch["buffer_ids"].shape == (4, 4)
        assert (np.diff(batch["a"], axis=1) == 1).all()
    other = member(2, sampler=SliceSampler(sequence_length=2, end_key="done"))
    assert_raises(SchemaError, r"buffer 1: field 'a'", ReplayBufferEnsemble(members[0], other).sample, 4)

    def other(rows: dict[str, Any]) -> ReplayBuffer:
        buffer = ReplayBuffer(ArrayStorage(4))
        buffer.extend(rows)
        return buffer

    good = {"a": np.arange(4), "deep": {"b": np.zeros(4, np.float32)}, "done": np.zeros(4, bool)}
    for bad, message in (
        ({**good, "more": np.zeros(4)}, "'more'"),
        ({"a": np.arange(4)}, "'b'|done"),
        ({**good, "a": np.arange(4.0)}, "field 'a': expected int64"),
        ({**good, "a": np.zeros((4, 2), np.int64)}, r"field 'a': expected int64 \[\]"),
    ):
        assert_raises(SchemaError, message, ReplayBufferEnsemble(member(0), other(bad)).sample, 8)


def test_priorities_go_to_the_members_that_know_them() -> None:
    plain, first, second = member(0), *[member(number, kind=PrioritizedReplayBuffer, alpha=1.0) for number in (1, 2)]
    ensemble = ReplayBufferEnsemble(plain, first, second, batch_size=60)
    batch = ensemble.sample()
    assert batch["priority_weight"].dtype == np.float32
    np.testing.assert_array_equal(batch["priority_weight"][:20], 1)
    ids = np.repeat([0, 1, 2], 20)
    priority = np.zeros(60)
    priority[[5, 20 + 3, 40 + 7]] = 1e6
    ensemble.update_priority(np.tile(np.arange(20), 3), priority, ids)
    batch = ensemble.sample()
    assert set(batch["index"][20:40].tolist()) == {3}
    assert set(batch["index"][40:].tolist()) == {7}
    assert len(set(batch["index"][:20].tolist())) > 5
    ensemble.update_priority({**batch, "td_error": np.where(batch["buffer_ids"] == 1, 0.0, 1.0)})
    assert_raises(ConfigError, "buffer_ids", ensemble.update_priority, [1], [1.0])
    assert_raises(ConfigError, "buffer_ids", ensemble.update_priority, [1], [1.0], [3])
    assert_raises(DataError, "expected", ensemble.update_priority, [1], [-1.0], [1])
    assert ensemble.stats()["buffers"][1]["updates"] == 2


def test_an_update_that_one_member_refuses_changes_none() -> None:
    members = [member(number, kind=PrioritizedReplayBuffer, alpha=2.0) for number in (0, 1)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=8)
    before = [found.state_dict() for found in members]
    for index, priority in (([0, 0], [3.0, np.nan]), ([0, 0], [3.0, 1e300]), ([0, 99], [3.0, 3.0])):
        with pytest.raises((DataError, IndexError)):
            ensemble.update_priority(np.array(index), np.array(priority), np.array([0, 1]))
    assert [found.stats()["updates"] for found in members] == [0, 0]
    for found, kept in zip(members, before, strict=True):
        np.testing.assert_array_equal(
            found.state_dict()["sampler"]["state"]["weights"], kept["sampler"]["state"]["weights"]
        )


def test_priorities_of_slices_reach_members() -> None:
    members = []
    for number in (0, 1):
        sampler = PrioritizedSliceSampler(sequence_length=2, end_key="done", eps=0.0)
        members.append(ReplayBuffer(ArrayStorage(8), sampler, seed=number))
        members[-1].extend({"done": np.arange(8) % 4 == 3})
    ensemble = ReplayBufferEnsemble(*members, batch_size=4)
    batch = ensemble.sample()
    chosen = np.array([1e9, 0, 1e9, 0])  # one for each slice: the first of each member
    ensemble.update_priority(batch["index"], chosen, batch["buffer_ids"])
    begins = ensemble.sample()["index"][:, 0]
    for number in (0, 1):
        assert set(begins[2 * number : 2 * number + 2].tolist()) <= set(batch["index"][2 * number].tolist())
    with pytest.raises(ConfigError, match="shape of the index"):
        ensemble.update_priority(batch["index"], np.ones(3), batch["buffer_ids"])


def test_a_draw_that_fails_leaves_every_member_as_it_was() -> None:
    def make() -> tuple[ReplayBufferEnsemble, list[ReplayBuffer]]:
        members = [
            member(0, sampler=SamplerWithoutReplacement()),
            member(1, kind=PrioritizedReplayBuffer),
            member(2, rows=5, sampler=SamplerWithoutReplacement()),
        ]
        return ReplayBufferEnsemble(*members, seed=2), members

    (tried, members), (other, _) = make(), make()
    for ensemble in (tried, other):
        ensemble.sample(6)
    assert_raises(ConfigError, "without replacement", tried.sample, 30)
    assert tried.stats() == other.stats()
    for _ in range(5):
        np.testing.assert_array_equal(tried.sample(6)["a"], other.sample(6)["a"])
    nested = ReplayBufferEnsemble(tried, member(3, rows=1, sampler=SamplerWithoutReplacement()))
    assert_raises(ConfigError, "without replacement", nested.sample, 12)
    assert tried.stats() == other.stats()
    assert len(members) == 3


def test_ensembles_of_ensembles_and_lists_of_one_alignment() -> None:
    inner = ReplayBufferEnsemble(member(0), member(1))
    outer = ReplayBufferEnsemble(inner, member(2), p=[2, 1], batch_size=6)
    batch = outer.sample()
    assert batch["buffer_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    assert (batch["a"] // 1000).tolist() == [0, 0, 1, 1, 2, 2]
    lists = [ReplayBuffer(ListStorage(4)) for _ in range(2)]
    for number, buffer in enumerate(lists):
        buffer.extend([f"{number}{letter}" for letter in "abcd"])
    batch = ReplayBufferEnsemble(*lists, batch_size=4).sample()
    assert [item[0] for item in batch["data"]] == ["0", "0", "1", "1"]
    total = ReplayBufferEnsemble(*lists, batch_size=4, collate_fn=lambda parts: {"n": len(parts)}).sample()
    assert total["n"] == 2
    store = example_store()
    fresh = ReplayBuffer(ArrayStorage(50))
    assert_raises(ConfigError, "expected the same alignment in all buffers, found", ReplayBufferEnsemble, fresh, store)
    arrived = ReplayBufferEnsemble(store, ReplayBuffer(ArrayStorage(5, alignment="arrived")), p=[1, 0], batch_size=4)
    assert arrived.alignment == "arrived"
    assert arrived.sample()["reward"].shape == (4,)
    converted = ReplayBuffer(
        store, SliceSampler(sequence_length=2, end_key="done"), transform=NextView(takes="arrived")
    )
    assert converted.alignment == "outgoing"
    assert ReplayBufferEnsemble(fresh, converted).alignment == "outgoing"


def test_epochs_end_with_that_of_a_member_and_of_a_loader() -> None:
    ensemble = ReplayBufferEnsemble(member(0, rows=20, sampler=SamplerWithoutReplacement()), member(1), batch_size=10)
    seen = np.concatenate([batch["index"][batch["buffer_ids"] == 0] for batch in ensemble])
    assert sorted(seen.tolist()) == list(range(20))
    buffer = member(0, rows=10, sampler=SamplerWithoutReplacement(), batch_size=4)
    for workers in (0, 2):
        with PrefetchBatchifier(buffer, num_workers=workers, prefetch=3) as loader:
            for _ in range(2):
                assert sorted(np.concatenate([batch["a"] for batch in list(loader)]).tolist()) == list(range(10))
            assert_raises(TypeError, "expected a loader over a store", len, loader)


def test_loaders_over_an_ensemble_draw_and_learn_alike_with_any_workers(tmp_path: Path) -> None:
    def run(workers: int) -> list[Any]:
        storages = ArrayStorage(60), MemmapStorage(60, tmp_path / f"m{workers}")
        samplers = SliceSampler(sequence_length=3), PrioritizedSliceSampler(sequence_length=3)
        members = [ReplayBuffer(*parts) for parts in zip(storages, samplers, strict=True)]
        done = np.random.default_rng(0).random(90) < 0.1
        for buffer in members:
            buffer.extend({"time": np.arange(50), "done": done[:50]})
        ensemble = ReplayBufferEnsemble(*members, p=[1, 2], batch_size=6, seed=4)
        drawn: list[Any] = []
        with PrefetchBatchifier(ensemble, num_workers=workers, prefetch=2) as loader:
            for turn in range(8):
                batch = loader.next_batch()
                drawn += [batch["index"].tolist(), batch["time"].tolist()]
                ensemble.update_priority(batch["index"], np.full(batch["index"].shape, turn + 1.0), batch["buffer_ids"])
                more = slice(50 + 4 * turn, 54 + 4 * turn)
                members[0].extend({"time": np.arange(90)[more], "done": done[more]})
                if turn == 4:
                    ensemble_state, loader_state = ensemble.state_dict(), loader.state_dict()
                    ensemble.load_state_dict(ensemble_state)
                    loader.load_state_dict(loader_state)
        return drawn

    first = run(0)
    assert run(1) == run(4) == first


def make() -> ReplayBufferEnsemble:
    first, second = member(0), member(1, kind=PrioritizedReplayBuffer)
    return ReplayBufferEnsemble(first, second, p=[0.4, 0.6], batch_size=7, seed=1)


@pytest.mark.parametrize("to_file", [False, True])
def test_everything_goes_on_after_a_checkpoint(to_file: bool, tmp_path: Path) -> None:
    ensemble = make()
    batch = ensemble.sample()
    ensemble.update_priority(batch["index"], np.arange(7.0), batch["buffer_ids"])
    other = make()
    if to_file:
        ensemble.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(ensemble.state_dict())
    for _ in range(5):
        one, two = ensemble.sample(), other.sample()
        for name in ("a", "index", "buffer_ids", "priority_weight"):
            np.testing.assert_array_equal(one[name], two[name])
    assert ensemble.stats() == other.stats()


def test_states_of_other_ensembles_and_arguments_that_cannot_be() -> None:
    ensemble = make()
    good = ensemble.state_dict()
    one_bad = {**good, "buffers": {**good["buffers"], "1": good["buffers"]["0"]}}
    for bad in (None, {}, {**good, "p": (0.5, 0.5)}, one_bad, {**good, "seed": "x"}, {**good, "buffers": {}}):
        first = ensemble.buffers[0]
        first.append({"a": 7, "deep": {"b": 7.0}, "done": False})
        before = first[:]["a"]
        assert_raises(StateError, "expected", ensemble.load_state_dict, bad)
        np.testing.assert_array_equal(first[:]["a"], before)
    buffer = member(0)
    for buffers, options, message in (
        ((), {}, "at least one"),
        ((buffer, buffer), {}, "twice"),
        ((buffer,), {"p": [0]}, "p: expected 1 weights"),
        ((buffer,), {"p": [-1]}, "p: expected"),
        ((buffer,), {"p": [1, 2]}, "p: expected"),
        ((buffer,), {"p": [float("nan")]}, "p: expected"),
        ((buffer,), {"p": "x"}, "p: expected"),
        ((3,), {}, "storage: expected"),
    ):
        assert_raises(ConfigError, message, ReplayBufferEnsemble, *buffers, **options)
    with pytest.raises(ConfigError, match="found buffer 1 without rows"):
        ReplayBufferEnsemble(buffer, ReplayBuffer(ArrayStorage(3))).sample(4)
    assert buffer.stats()["samples"] == 0
    assert len(ReplayBufferEnsemble(buffer, member(1))) == 40
