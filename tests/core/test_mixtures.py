"""Mixtures of stores and of sources: whose window comes when, that every window is one of its member's, and growth."""

import json
import pickle
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import (
    BatchSource,
    ConfigError,
    DatasetStore,
    Field,
    FieldSpec,
    MissingFieldError,
    PrefetchBatchifier,
    SchemaError,
    Spec,
    StateError,
    WorkerError,
)
from mouse_core.augment import AugmentTokensConfig
from mouse_core.formats.converting import preprocess
from mouse_core.mixtures import Mixture, MixtureSource, Schedule, Shares
from mouse_core.replay import ArrayStorage, ReplayBuffer
from mouse_core.store.derived import DerivedStore, TimeToEnd
from mouse_core.testing import SourceConformance, example_columns, example_store
from tests.core.oracle import assert_same
from tests.raising import assert_raises

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=7).filter(any)
# Rows of member m are numbered from m * FAR on, in the field "reward"; a float32 holds them.
FAR = 10_000


def oracle(weights: list[Any], n: int) -> list[int]:
    """Of which member each of n windows is, one after another: that whose next one is due first."""
    counts = [0] * len(weights)
    found = []
    for _ in range(n):
        due = {m: Fraction(2 * counts[m] + 1) / weight for m, weight in enumerate(weights) if weight}
        found.append(min(due, key=lambda m: (due[m], m)))
        counts[found[-1]] += 1
    return found


def numbered(member: int, rows: int, *, width: int = 3, episode: int = 10) -> DatasetStore:
    store = DatasetStore(max_action_dim=4)
    grow(store, member, rows, width=width, episode=episode)
    return store


def grow(store: DatasetStore, member: int, rows: int, *, width: int = 3, episode: int = 10) -> None:
    number = np.arange(len(store), len(store) + rows)
    store.extend(
        {
            "action": (number % 4).astype(np.int64),
            "reward": (member * FAR + number).astype(np.float32),
            "done": (number % episode == episode - 1).astype(np.int64),
            "episode_step": number % episode,
            "observation": np.repeat((member * FAR + number)[:, None], width, 1).astype(np.float64),
        }
    )


def three() -> Mixture:
    return Mixture({"a": numbered(0, 200), "b": numbered(1, 90), "c": numbered(2, 400)}, {"a": 1, "b": 1, "c": 2})


def numbers_of(source: BatchSource, batches: int) -> np.ndarray:
    return np.concatenate([source[index]["reward"] for index in range(batches)]).astype(np.int64)


@given(WEIGHTS, st.integers(0, 300), st.integers(0, 300))
def test_windows_come_in_the_order_of_the_oracle(weights: list[int], begin: int, n: int) -> None:
    shares = Shares.of([Fraction(weight) for weight in weights])
    wanted = oracle(weights, begin + n)
    assert shares.members(begin, begin + n).tolist() == wanted[begin:]
    assert shares.counts(begin) == [wanted[:begin].count(member) for member in range(len(weights))]


@given(WEIGHTS, st.integers(0, 1 << 50))
def test_counts_keep_to_the_shares_at_any_number(weights: list[int], n: int) -> None:
    """Also where nobody could count: no member is further from its share than the bound that is stated."""
    counts, total = Shares.of([Fraction(weight) for weight in weights]).counts(n), sum(weights)
    assert sum(counts) == n
    several = sum(weight > 0 for weight in weights)
    for weight, count in zip(weights, counts, strict=True):
        bound = Fraction(1, 2) + Fraction(weight, total) * max(0, several - 2) / 2
        assert abs(count - Fraction(weight, total) * n) <= bound
        assert weight or not count


@given(WEIGHTS, st.integers(0, 1 << 40), st.integers(1, 5000))
def test_counts_and_members_agree_wherever_rounds_end(weights: list[int], begin: int, n: int) -> None:
    shares = Shares.of([Fraction(weight) for weight in weights])
    members = shares.members(begin, begin + n)
    before, after = shares.counts(begin), shares.counts(begin + n)
    found = np.bincount(members, minlength=len(weights))
    assert found.tolist() == [late - early for late, early in zip(after, before, strict=True)]
    cut = n // 3
    parts = [shares.members(begin, begin + cut), shares.members(begin + cut, begin + n)]
    np.testing.assert_array_equal(np.concatenate(parts), members)


SAMPLED = (
    {},
    {"sampling": "batch"},
    {"sampling": "sequential"},
    {"sampling": "last"},
    {"boundary": "episode"},
    {"boundary": "episode", "weighting": "trajectory"},
    {"boundary": "episode", "sampling": "batch", "pad": 0},
    {"boundary": "episode", "sampling": "last", "pad": False},
)


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_every_window_is_one_of_the_member_that_it_names(options: dict[str, Any]) -> None:
    source = BatchSource(three(), 8, 16, **options)
    for index in (0, 1, 2, 7, 30, 31):
        batch = source[index]
        there = batch.get("mask", np.ones((16, 8), np.bool_))
        number = batch["reward"].astype(np.int64)
        np.testing.assert_array_equal(batch["member"], number // FAR)
        assert batch["member"].dtype == np.int64
        np.testing.assert_array_equal(batch["obs_continuous"][..., 2], number)
        steps = number[:, :1] + np.arange(8)
        np.testing.assert_array_equal(number[there], steps[there])
        members = batch["member"][:, 0].tolist()
        turn = 0 if options.get("sampling") == "last" else 16 * index
        assert members == oracle([1, 1, 2], turn + 16)[turn:]


@pytest.mark.parametrize("options", [{}, {"boundary": "episode"}])
def test_last_windows_follow_a_schedule(options: dict[str, Any]) -> None:
    members = {"a": numbered(0, 60), "b": numbered(1, 60)}
    shares = {0: [1, 0], 3: [1, 1], 5: [0, 1]}
    source = BatchSource(Mixture(members, Schedule(shares)), 4, 4, "last", **options)
    for index in (6, 0, 3, 2, 5, 4, 1):
        weights = shares[max(first for first in shares if first <= index)]
        alone = BatchSource(Mixture(members, weights), 4, 4, "last", **options)[0]
        assert_same(source[index], alone, index)
    # Also where many batches are planned together, as by a loader.
    codes = [batch["member"][:, 0].tolist() for batch in (source[index] for index in range(7))]
    assert codes == [[0] * 4] * 3 + [[0, 1] * 2] * 2 + [[1] * 4] * 2


def test_every_window_of_a_member_comes_once_in_its_epochs() -> None:
    """Of 25, 11 and 50 windows; each member is at its own epoch, and all begin where the rows were taken."""
    first: dict[int, list[list[int]]] = {}
    for begin in (0, 3, 8):
        source = BatchSource(three(), 8, 16, "batch", epoch_start=begin)
        assert len(source) == -(-(25 + 11 + 50) // 16)
        starts = np.concatenate([source[index]["reward"][:, 0] for index in range(begin, begin + 40)]).astype(int)
        for member, windows in ((0, 25), (1, 11), (2, 50)):
            mine = (starts[starts // FAR == member] - member * FAR).tolist()
            epochs = [mine[at : at + windows] for at in range(0, len(mine) - windows + 1, windows)]
            assert all(sorted(epoch) == list(range(0, 8 * windows, 8)) for epoch in epochs), (begin, member)
            assert epochs[0] != epochs[1]
            assert epochs[0] not in first.setdefault(member, [])
            first[member].append(epochs[0])


def test_windows_of_members_come_from_anywhere_and_by_themselves() -> None:
    starts = numbers_of(BatchSource(three(), 8, 32), 400)[:, 0]
    for member, rows in ((0, 200), (1, 90), (2, 400)):
        mine = starts[starts // FAR == member] - member * FAR
        counts = np.bincount(mine, minlength=rows - 7)
        assert len(counts) == rows - 7
        expected = len(mine) / len(counts)
        squares = float(((counts - expected) ** 2 / expected).sum())
        assert abs(squares - len(counts)) < 6 * (2 * len(counts)) ** 0.5
    mixture = Mixture([numbered(0, 500), numbered(0, 500)])
    batch = BatchSource(mixture, 8, 64)[0]
    first, second = (batch["reward"][batch["member"][:, 0] == code][:, 0] for code in (0, 1))
    assert (first != second).mean() > 0.9
    later = BatchSource(mixture, 8, 64, epoch_start=5)[5]
    assert (later["reward"] != BatchSource(mixture, 8, 64)[5]["reward"]).mean() > 0.9
    number = BatchSource(three(), 8, 16, "last")[5]["reward"].astype(np.int64)
    found = sorted(number[:, 0].tolist())
    wanted = [m * FAR + rows - 8 * k for m, rows, n in ((0, 200, 4), (1, 90, 4), (2, 400, 8)) for k in range(n, 0, -1)]
    assert found == sorted(wanted)


@pytest.mark.parametrize(("options", "count"), [*zip(SAMPLED, [2, 4] * 4, strict=True)], ids=str)
def test_shards_are_the_rows_of_a_batch_and_mixed_as_it_is(options: dict[str, Any], count: int) -> None:
    whole = BatchSource(three(), 8, 16, seed=3, **options)
    shards = [BatchSource(three(), 8, 16, seed=3, shard=(rank, count), **options) for rank in range(count)]
    for index in range(9):
        parts = [shard[index] for shard in shards]
        for name, values in whole[index].items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
        for part in parts:
            found = np.bincount(part["member"][:, 0], minlength=3) / len(part["member"])
            assert np.abs(found - [0.25, 0.25, 0.5]).max() <= 1 / len(part["member"])


class TestMixtureOfEpisodesAugmented(SourceConformance):
    def make(self) -> BatchSource:
        members = {"x": example_store(60), "y": example_store(40)}
        config = AugmentTokensConfig(permute_action="both")
        return BatchSource(Mixture(members, [2, 1]), 4, 12, boundary="episode", augment=config, views=2)


def test_mixtures_may_be_members() -> None:
    inner = Mixture({"a": numbered(0, 100), "b": numbered(1, 100)}, [3, 1])
    mixture = Mixture({"both": inner, "c": numbered(2, 100)})
    for options in SAMPLED:
        source = BatchSource(mixture, 8, 16, **options)
        number = numbers_of(source, 16)[:, 0] // FAR
        assert np.bincount(number).tolist() == [96, 32, 128]
        np.testing.assert_array_equal(source[3]["member"][:, 0], source[3]["reward"][:, 0] // FAR == 2)
        assert source.snapshot.store_rows == {"both": {"a": 100, "b": 100}, "c": 100}


def shares_of(mixture: Mixture) -> list[Fraction]:
    windows = mixture.snapshot().shares_of(0).windows
    return [Fraction(some, sum(windows)) for some in windows]


@pytest.mark.parametrize(("inner", "outer"), [("sub", "member"), ("member", None), ("member", "source")])
def test_no_member_loses_a_field_of_its_own(inner: str, outer: str | None) -> None:
    below = Mixture({"x": numbered(0, 60), "y": numbered(1, 60)}, field=inner)
    with pytest.raises(
        SchemaError, match=f"to have field={outer!r} or field=None, found field={inner!r} in member 'in'"
    ):
        BatchSource(Mixture({"in": below, "z": numbered(2, 60)}, field=outer), 4, 4)


def test_weights_are_for_members_steps_or_trajectories_and_temperature_evens_them_out() -> None:
    members = {"a": numbered(0, 100, episode=10), "b": numbered(1, 300, episode=100)}
    assert shares_of(Mixture(members)) == [Fraction(1, 2), Fraction(1, 2)]
    assert shares_of(Mixture(members, [0.7, 0.3])) == [Fraction(7, 10), Fraction(3, 10)]
    assert shares_of(Mixture(members, per="step")) == [Fraction(1, 4), Fraction(3, 4)]
    assert shares_of(Mixture(members, {"b": 1, "a": 2}, per="step")) == [Fraction(2, 5), Fraction(3, 5)]
    assert shares_of(Mixture(members, per="trajectory")) == [Fraction(10, 13), Fraction(3, 13)]
    assert Mixture(members, [3, 1]).shares_at() == {"a": 0.75, "b": 0.25}
    members = {"a": numbered(0, 100), "b": numbered(1, 400)}
    for temperature in (0.5, 2.0, 3.0):
        found = list(Mixture(members, per="step", temperature=temperature).shares_at().values())
        wanted = np.array([100.0, 400.0]) ** (1 / temperature)
        np.testing.assert_allclose(found, wanted / wanted.sum(), atol=1e-7)
    stores = {"a": numbered(0, 200), "b": numbered(1, 90)}
    best = Mixture({name: store.best(0.5) for name, store in stores.items()}, {"a": 3, "b": 1})
    assert {name: len(member) for name, member in best.members.items()} == {"a": 100, "b": 50}
    assert best.shares_at() == {"a": 0.75, "b": 0.25}
    batch = BatchSource(best, 5, 16)[0]
    np.testing.assert_array_equal(batch["member"], batch["reward"] // FAR)
    assert batch["reward"][batch["member"] == 0].min() >= 100  # later episodes have larger rewards


@pytest.mark.parametrize(("per", "temperature"), [("member", 1e-300), ("step", 1e-3), ("member", 1.0), ("step", 1e300)])
def test_weights_and_temperatures_of_any_size_make_shares(per: Any, temperature: float) -> None:
    for weights in ([1e308, 1e308], [1e-320, 3e-320], [1e308, 1e-300], [10**300, 1]):
        mixture = Mixture([numbered(0, 60), numbered(1, 60)], weights, per=per, temperature=temperature)
        shares = mixture.shares_at()
        assert min(shares.values()) > 0
        assert sum(shares.values()) == pytest.approx(1)
        if temperature == 1e-3 and weights[0] != weights[1]:
            assert max(shares.values()) > 0.999999


def test_shares_are_those_of_weights_of_one_ratio_and_none_is_lost() -> None:
    members = [numbered(0, 60), numbered(1, 60)]
    alike: list[Any] = [[2, 1], [4, 2], [0.5, 0.25], [1.4, 0.7], [Fraction(2, 3), Fraction(1, 3)], {"0": 2.0, "1": 1}]
    assert len({BatchSource(Mixture(members, weights), 4, 4).fingerprint for weights in alike}) == 1
    staged = [Schedule({0: [first, 0], 4: [3 * first, first]}) for first in (1, 0.5)]
    assert len({BatchSource(Mixture(members, weights), 4, 4).fingerprint for weights in staged}) == 1
    other = BatchSource(Mixture(members, [2, 1.1]), 4, 4)
    assert other.fingerprint != BatchSource(Mixture(members, [2, 1]), 4, 4).fingerprint
    tiny = Shares.of([Fraction(1), Fraction(1, 10**12), Fraction(0)])
    assert tiny.windows[1] == 1
    assert tiny.windows[2] == 0
    shares = Shares.of([Fraction(1, 3), Fraction(2**0.5), Fraction(np.pi)])
    wanted = np.array([1 / 3, 2**0.5, np.pi])
    np.testing.assert_allclose(np.array(shares.windows) / sum(shares.windows), wanted / wanted.sum(), atol=1e-7)


def test_a_schedule_changes_shares_from_batch_to_batch() -> None:
    stores = {"offline": numbered(0, 200), "online": numbered(1, 100)}
    weights = Schedule({0: {"offline": 1, "online": 0}, 5: {"offline": 3, "online": 1}, 9: [0, 1]})
    mixture = Mixture(stores, weights)
    source = BatchSource(mixture, 8, 16, "batch")
    online = [int((source[index]["member"][:, 0] == 1).sum()) for index in range(12)]
    assert online == [0] * 5 + [4] * 4 + [16] * 3
    one_by_one = BatchSource(mixture, 8, 16, "batch")
    for index in (11, 3, 8, 4, 5, 9):
        np.testing.assert_array_equal(one_by_one[index]["reward"], source[index]["reward"])
    starts = np.concatenate([source[index]["reward"][:, 0] for index in range(30)])
    mine = (starts[starts >= FAR] - FAR).astype(int).tolist()
    assert sorted(mine[:12]) == list(range(0, 96, 8))
    assert mixture.shares_at(4) == {"offline": 1.0, "online": 0.0}
    assert mixture.shares_at(8) == {"offline": 0.75, "online": 0.25}


@given(st.lists(st.tuples(st.integers(1, 9), WEIGHTS), min_size=1, max_size=4), st.integers(0, 30))
def test_each_stage_is_handed_out_as_if_it_were_the_first(stages: list[tuple[int, list[int]]], begin: int) -> None:
    schedule = {sum(length for length, _ in stages[:k]): [*some, 1, 1, 1][:3] for k, (_, some) in enumerate(stages)}
    if not all(map(any, schedule.values())):
        return
    mixture = Mixture([numbered(member, 60) for member in range(3)], Schedule(schedule))
    source = BatchSource(mixture, 8, 4, fields=["reward", "member"])
    first = [*schedule, 10**6]
    for index in range(begin, begin + 5):
        stage = max(number for number in range(len(schedule)) if first[number] <= index)
        end = 4 * (index - first[stage] + 1)
        assert source[index]["member"][:, 0].tolist() == oracle(schedule[first[stage]], end)[-4:]


def test_a_member_whose_stage_has_not_come_or_has_no_weight_may_be_empty() -> None:
    stores = {"offline": numbered(0, 100), "online": DatasetStore(max_action_dim=4)}
    mixture = Mixture(stores, Schedule({0: [1, 0], 6: [1, 1]}))
    with PrefetchBatchifier(mixture, 8, 16, num_workers=0) as loader:
        for _ in range(4):
            loader.next_batch()
        state = loader.state_dict()
        grow(stores["online"], 1, 40)
        loader.refresh()
        found = [int(loader.next_batch()["member"][:, 0].sum()) for _ in range(4)]
    assert found == [0, 0, 8, 8]
    with PrefetchBatchifier(mixture, 8, 16) as loader:  # without a refresh
        loader.load_state_dict(state)
        loader.next_batch()
        loader.next_batch()
        assert_raises(WorkerError, "found member 'online' without rows", loader.next_batch)
    mixture = Mixture({"a": numbered(0, 50), "b": DatasetStore(), "c": numbered(2, 50)}, [1, 0, 1])
    batch = BatchSource(mixture, 8, 16)[0]
    assert set(batch["member"].reshape(-1).tolist()) == {0, 2}
    assert Mixture({"a": numbered(0, 50), "b": DatasetStore()}, per="step").shares_at() == {"a": 1.0, "b": 0.0}


def test_a_view_that_is_empty_for_now_may_be_a_member() -> None:
    whole = numbered(0, 60)
    nothing = whole.where(length=(1000, None))
    schedule = Schedule({0: [1, 0], 3: [0, 1]})
    for weights, per in [([1, 0], "member"), (schedule, "member"), (None, "step"), (None, "trajectory")]:
        for late in (nothing, DerivedStore(nothing, {"left": TimeToEnd()})):
            mixture = Mixture({"a": whole, "b": late}, weights, per=per)
            assert BatchSource(mixture, 4, 4, boundary="episode")[0]["member"].tolist() == [[0] * 4] * 4
    assert_raises(ConfigError, "found member 'b' without rows", BatchSource, Mixture({"a": whole, "b": nothing}), 4, 4)
    fresh = DatasetStore()
    mixture = Mixture({"a": whole, "b": fresh.where(length=(5, None))}, schedule)
    with PrefetchBatchifier(mixture, 4, 4) as loader:
        assert loader.next_batch()["member"].tolist() == [[0] * 4] * 4
        grow(fresh, 1, 60)
        loader.refresh()
        assert [loader.next_batch()["member"][0, 0] for _ in range(4)] == [0, 0, 1, 1]


def test_rows_that_come_are_taken_over_at_a_refresh_and_not_before() -> None:
    stores = {"a": numbered(0, 40), "b": numbered(1, 40)}
    with PrefetchBatchifier(Mixture(stores, per="step"), 8, 16, num_workers=0) as loader:
        before = [loader.next_batch() for _ in range(3)]
        grow(stores["a"], 0, 120)
        late = [loader.next_batch() for _ in range(3)]
        assert max(batch["reward"][batch["member"] == 0].max() for batch in before + late) < 40
        loader.refresh()
        after = [loader.next_batch() for _ in range(20)]
    starts = np.concatenate([batch["reward"] for batch in after])[:, 0]
    members = np.concatenate([batch["member"] for batch in after])[:, 0]
    np.testing.assert_array_equal(members, starts // FAR)
    assert starts[members == 0].max() > 100
    assert abs((members == 0).mean() - 0.8) < 0.01


def test_a_state_says_how_many_rows_each_member_had_and_is_gone_on_from() -> None:
    stores = {"a": numbered(0, 100), "b": numbered(1, 60)}
    with PrefetchBatchifier(Mixture(stores, [2, 1]), 8, 16, "batch") as loader:
        for _ in range(5):
            loader.next_batch()
        grow(stores["b"], 1, 40)
        loader.refresh()
        for _ in range(3):
            loader.next_batch()
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["rows"] == {"a": 100, "b": 100}
        wanted = [loader.next_batch() for _ in range(5)]
    grow(stores["a"], 0, 70)
    grow(stores["b"], 1, 30)
    for store in (Mixture(stores, [2, 1]), Mixture(stores, [2, 1]).snapshot()):
        with PrefetchBatchifier(store, 8, 16, "batch", num_workers=0) as loader:
            loader.load_state_dict(state)
            for batch in wanted:
                assert_same(loader.next_batch(), batch)


def test_states_of_others_are_refused() -> None:
    stores = {"a": numbered(0, 100), "b": numbered(1, 60)}
    state = PrefetchBatchifier(Mixture(stores, [2, 1]), 8, 16).state_dict()
    others: list[Any] = [
        Mixture(stores, [1, 1]),
        Mixture(stores, [2, 1], per="step"),
        Mixture({"a": stores["a"], "c": stores["b"]}, [2, 1]),
        Mixture({"b": stores["b"], "a": stores["a"]}, [2, 1]),
        Mixture({"a": stores["a"], "b": numbered(2, 60)}, [2, 1]),
        stores["a"],
    ]
    for other in others:
        assert_raises(StateError, "expected", PrefetchBatchifier(other, 8, 16).load_state_dict, state)
    with pytest.raises(StateError, match="expected rows as an integer"):
        PrefetchBatchifier(Mixture(stores, [2, 1]), 8, 16).load_state_dict({**state, "rows": {"a": -1, "b": 60}})
    deep: Any = 1
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(StateError, match="at most 16 levels"):
        PrefetchBatchifier(Mixture(stores, [2, 1]), 8, 16).load_state_dict({**state, "rows": deep})
    with pytest.raises(StateError, match="'a': 2, 'b': 1"):
        PrefetchBatchifier(Mixture(stores, [2, 2]), 8, 16).load_state_dict(state)


def on_disk(store: DatasetStore, folder: Path) -> datasets.Dataset:
    store.to_dataset().save_to_disk(folder)
    return datasets.load_from_disk(folder)


def test_members_on_disk_shuffled_filtered_and_cut_give_their_rows(tmp_path: Path) -> None:
    made = {name: on_disk(numbered(code, 2500), tmp_path / name) for code, name in enumerate("abcd")}
    shuffled = DatasetStore(max_action_dim=4).from_dataset(made["b"].shuffle(seed=1))
    chosen = [*range(100, 700), *range(1500, 2300)]
    filtered = DatasetStore(max_action_dim=4).from_dataset(made["c"].select(chosen))
    plain = DatasetStore(max_action_dim=4).from_dataset(made["a"])
    cut = numbered(3, 2500).snapshot(333)
    for members in ({"a": plain, "c": filtered, "d": cut}, {"a": plain, "b": shuffled, "c": filtered, "d": cut}):
        mixture = Mixture(members)
        alone = {name: BatchSource(member, 8, 1) for name, member in members.items()}
        firsts = mixture.snapshot().first_rows
        source = BatchSource(mixture, 8, 16)
        for index in (0, 5):
            plan, batch = source.plan(index), source[index]
            for row, start in enumerate(plan.starts.tolist()):
                code = int(np.searchsorted(firsts, start, side="right")) - 1
                name = mixture.names[code]
                assert (batch["member"][row] == code).all()
                whole = members[name] if not isinstance(members[name], DatasetStore) else members[name].snapshot()
                numbers = whole.rows([start - int(firsts[code]) + step for step in range(8)])["reward"]
                assert batch["reward"][row].tolist() == numbers
        assert {name: one.spec for name, one in alone.items()}
    assert cut.num_rows == 333


@given(
    st.lists(st.tuples(st.integers(12, 60), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 9),
)
def test_whatever_rows_members_had_earlier_batches_come_again(
    sizes: list[tuple[int, int]], length: int, batch_size: int
) -> None:
    stores = {f"m{number}": numbered(number, rows) for number, (rows, _) in enumerate(sizes)}
    mixture = Mixture(stores)
    options: Mapping[str, Any] = {"boundary": "episode"}
    source = BatchSource(mixture, length, batch_size, **options)
    before = source.snapshot.store_rows
    wanted = [source[index] for index in range(4)]
    for number, (_, more) in enumerate(sizes):
        grow(stores[f"m{number}"], number, more)
    again = BatchSource(mixture.snapshot(before), length, batch_size, **options)
    assert again.fingerprint == source.fingerprint
    for index, batch in enumerate(wanted):
        assert_same(again[index], batch, index)


def test_fields_are_padded_derived_and_normalised() -> None:
    mixture = Mixture({"a": numbered(0, 50, width=2), "b": numbered(1, 50, width=5)})
    batch = BatchSource(mixture, 8, 16)[0]
    assert batch["obs_continuous"].shape == (16, 8, 5)
    narrow = batch["obs_continuous"][batch["member"][:, 0] == 0]
    assert (narrow[..., 2:] == 0).all()
    assert (narrow[..., 1] == narrow[..., 0]).all()
    stores = {"a": numbered(0, 200), "b": numbered(1, 90)}
    derived = {"left": TimeToEnd()}
    mixture = Mixture({name: DerivedStore(store, derived) for name, store in stores.items()})
    batch = BatchSource(mixture, 5, 16)[2]
    np.testing.assert_array_equal(batch["left"], 9 - batch["reward"].astype(int) % FAR % 10)
    assert_raises(ConfigError, "whose shares would be lost", DerivedStore, mixture, derived)
    mixture = Mixture({"a": numbered(0, 95), "b": numbered(1, 33)})
    batch = BatchSource(mixture, 4, 8, normalize={"obs_continuous": "mean_std"})[0]
    assert np.abs(batch["obs_continuous"]).max() < 4
    assert batch["member"].max() == 1


def test_members_must_fit_together() -> None:
    plain = numbered(0, 50)
    outgoing = DatasetStore(alignment="outgoing")
    outgoing.extend(example_columns(20))
    with pytest.raises(SchemaError, match="alignment 'arrived' as in member 'a', found 'outgoing' in member 'b'"):
        Mixture({"a": plain, "b": outgoing}).snapshot()
    columns = example_columns(20)
    other = DatasetStore()
    other.extend({**columns, "reward": columns["reward"].astype(np.float64)})
    with pytest.raises(SchemaError, match=r"column 'reward': expected float .* found double in member 'b'"):
        Mixture({"a": plain, "b": other}).snapshot()
    unlike = DatasetStore(fields=[Field("reward", dtype="float64", shape=())])
    unlike.extend(columns)
    assert_raises(SchemaError, "field 'reward'", Mixture({"a": plain, "b": unlike}).snapshot)
    named = DatasetStore(fields=[Field("member")])
    named.extend({**columns, "member": np.zeros(20, np.int64)})
    assert_raises(SchemaError, "without a field 'member'", Mixture({"a": example_store(20), "b": named}).snapshot)
    batch = BatchSource(Mixture({"a": plain, "b": numbered(1, 50)}, field="whose"), 8, 4, fields=["reward", "whose"])[0]
    assert list(batch) == ["reward", "whose"]
    with pytest.raises(MissingFieldError, match=r"'xformed_reward' in all datasets .* found none in member 'a'"):
        BatchSource(Mixture({"a": plain, "b": example_store(50)}, field=None), 8, 4)


def test_bad_arguments_say_what_was_expected() -> None:
    plain = numbered(0, 50)
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("at least one store", {}, {}),
        ("stores by name", {"a": 3}, {}),
        ("a dict or a list of stores", plain, {}),
        ("2 numbers of 0 or more", [plain, plain], {"weights": [1]}),
        ("2 numbers of 0 or more", [plain, plain], {"weights": [1, -1]}),
        ("2 numbers of 0 or more", [plain, plain], {"weights": [0, 0]}),
        ("2 numbers of 0 or more", [plain, plain], {"weights": [1, float("nan")]}),
        ("a weight for each of", {"a": plain}, {"weights": {"b": 1}}),
        ("per: expected", [plain], {"per": "row"}),
        ("temperature: expected", [plain], {"temperature": 0}),
        ("field: expected", [plain], {"field": ""}),
        ("a weight for each of", {"a": plain}, {"weights": Schedule({0: {"b": 1}})}),
    ]
    for message, stores, options in wrong:
        assert_raises(ConfigError, message, Mixture, stores, **options)
    for schedule in ({}, {1: [1]}, {0: [1], -1: [1]}, {0: [1], "b": [1]}, [1]):
        assert_raises(ConfigError, "schedule: expected", Schedule, schedule)
    with pytest.raises(ConfigError, match="found member 'b' without rows"):
        BatchSource(Mixture({"a": plain, "b": DatasetStore()}), 8, 4)
    with pytest.raises(ConfigError, match="member 'b': sampling: expected at least 1 window of 8 steps"):
        BatchSource(Mixture({"a": plain, "b": numbered(1, 5)}), 8, 4)
    assert_raises(ConfigError, "a dict with the number of rows of each member", Mixture({"a": plain}).snapshot, 40)


def test_a_mixture_is_taken_where_a_store_is_and_its_rows_are_those_of_members() -> None:
    mixture = three()
    assert len(mixture) == 690
    assert mixture.alignment == "arrived"
    assert mixture.snapshot() is mixture.snapshot()
    buffer = ReplayBuffer(mixture, batch_size=64)
    rows = buffer.sample()
    np.testing.assert_array_equal(np.asarray(rows["reward"]) // FAR, rows["member"])
    mixture = Mixture({"a": numbered(0, 60), "b": numbered(1, 60)}, [1, 3])
    assert_raises(ConfigError, r"as in mixture.members\['a'\].to_dataset\(\)", mixture.to_dataset)
    assert_raises(ConfigError, "the rows of a member of a mixture, found a", preprocess, mixture, dict, "never made")


SPEC = Spec({"window": FieldSpec("window", np.dtype(np.int64), ()), "b": FieldSpec("b", np.dtype(np.float32), (2,))})


class Numbered:
    """A source whose windows are numbered: window j of member m is 1000 * m + j, in batches of a size of its own."""

    spec = SPEC

    def __init__(self, member: int, size: int) -> None:
        self.member, self.size = member, size

    @property
    def fingerprint(self) -> str:
        return f"{self.member} {self.size}"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        number = 1000 * self.member + np.arange(index * self.size, (index + 1) * self.size)
        window = np.repeat(number[:, None], 4, 1)
        return {"window": window, "b": np.stack([window, -window], -1).astype(np.float32)}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), min_size=1, max_size=4).filter(lambda all: any(all[0])),
    st.integers(1, 12),
)
def test_every_window_of_a_member_comes_once_in_its_order(members: list[tuple[int, int]], size: int) -> None:
    weights = [weight for weight, _ in members]
    if not any(weights):
        return
    source = MixtureSource([Numbered(m, some) for m, (_, some) in enumerate(members)], weights, batch_size=size)
    found = np.concatenate([source[index]["window"] for index in range(9)])[:, 0]
    codes = np.concatenate([source[index]["member"] for index in range(9)])[:, 0]
    np.testing.assert_array_equal(codes, found // 1000)
    whose = Shares(tuple(weights)).members(0, 9 * size)
    np.testing.assert_array_equal(codes, whose)
    for member in range(len(members)):
        mine = found[codes == member] - 1000 * member
        assert mine.tolist() == list(range(len(mine)))
    for index in (8, 0, 5):
        np.testing.assert_array_equal(source[index]["window"][:, 0], found[index * size : (index + 1) * size])


class TestMixtureSource(SourceConformance):
    def make(self) -> Any:
        return MixtureSource({"a": Numbered(0, 5), "b": Numbered(1, 3)}, {"a": 2, "b": 1}, batch_size=7)


class TestOfBatchSourcesInViews(SourceConformance):
    def make(self) -> Any:
        config = AugmentTokensConfig(permute_action="both")
        options: dict[str, Any] = {"augment": config, "views": 2, "seed": 3}
        first = BatchSource(example_store(), 8, 4, "batch", **options)
        return MixtureSource({"whole": first, "random": BatchSource(example_store(90), 8, 6, **options)}, [1, 2])


def test_stores_are_drawn_from_in_different_ways() -> None:
    episodes = BatchSource(example_store(200), 8, 8, boundary="episode")
    last = BatchSource(example_store(100), 8, 4, "last", uneven="pad")
    source = MixtureSource({"episodes": episodes, "last": last}, [3, 1])
    assert list(source.spec)[-2:] == ["mask", "member"]
    batch = source[3]
    assert batch["member"].shape == (8, 8)
    np.testing.assert_array_equal(batch["reward"][batch["member"][:, 0] == 1][:2], last[1]["reward"][2:4])
    assert len(source) == -(-(len(episodes) * 8 + len(last) * 4) // 8)
    one = BatchSource(example_store(100), batch_size=4, windows={"action": range(2)})
    assert MixtureSource([one, one])[0]["member"].tolist() == [0, 1, 0, 1]
    assert BatchSource(Mixture([example_store(40)] * 2), batch_size=4, windows={"action": [0]})[0]["member"].shape == (
        4,
    )


def test_a_loader_resumes_and_a_schedule_holds() -> None:
    def make() -> MixtureSource:
        schedule = Schedule({0: [1, 0], 2: [1, 1], 4: [0, 1]})
        return MixtureSource({"a": Numbered(0, 4), "b": Numbered(1, 4)}, schedule, batch_size=6)

    source = make()
    assert [int((source[index]["member"][:, 0] == 1).sum()) for index in range(6)] == [0, 0, 3, 3, 6, 6]
    with PrefetchBatchifier(make()) as loader:
        loader.next_batch()
        state = json.loads(json.dumps(loader.state_dict()))
        wanted = [loader.next_batch() for _ in range(4)]
    with PrefetchBatchifier(pickle.loads(pickle.dumps(make())), num_workers=0) as loader:
        loader.load_state_dict(state)
        for batch in wanted:
            np.testing.assert_array_equal(loader.next_batch()["window"], batch["window"])


def test_what_does_not_fit_together_is_refused() -> None:
    class Other(Numbered):
        spec = Spec({"window": FieldSpec("window", np.dtype(np.int32), ()), "b": SPEC["b"]})

    class Fewer(Numbered):
        spec = Spec({"window": SPEC["window"]})

    class Outgoing(Numbered):
        spec = Spec(dict(SPEC), "outgoing")

    class Short(Numbered):
        def __getitem__(self, index: int) -> Any:
            return {name: values[: 2 + index % 2] for name, values in super().__getitem__(index).items()}

    one = Numbered(0, 4)
    for other, message in (
        (Other(1, 4), r"field 'window': expected int64 .* found int32"),
        (Fewer(1, 4), "expected fields"),
        (Outgoing(1, 4), "member 'b' to have the spec of 'a'"),
    ):
        assert_raises(SchemaError, message, MixtureSource, {"a": one, "b": other})
    assert_raises(SchemaError, "without a field 'b'", MixtureSource, [one], field="b")
    for wrong, message in (
        ([], "at least one source"),
        ([example_store()], "member '0'"),
        ([ReplayBuffer(ArrayStorage(10), batch_size=2)], "ReplayBufferEnsemble"),
        (one, "several"),
    ):
        assert_raises(ConfigError, message, MixtureSource, wrong)
    with pytest.raises(ConfigError, match="batches of 2 windows of member '0', found batches of 3"):
        MixtureSource([Short(0, 4)])[1]
    with pytest.raises(IndexError):
        MixtureSource([one])[-1]
