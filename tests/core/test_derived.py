"""Derived fields: each held to an oracle in plain Python, in both alignments, and through growth, views and loaders."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import (
    BatchSource,
    ConfigError,
    DataError,
    DatasetStore,
    MissingFieldError,
    StorageError,
)
from mouse_core.mixtures import Mixture
from mouse_core.replay import ReturnsToGo
from mouse_core.rollouts import discounted_returns
from mouse_core.spec import Alignment, FieldSpec, Spec
from mouse_core.store import Store
from mouse_core.store.derived import (
    DerivedStore,
    EpisodeRows,
    IsFirst,
    IsLast,
    NStepDiscount,
    NStepReturn,
    Previous,
    Return,
    Terminated,
    TimeFromStart,
    TimeToEnd,
    Truncated,
    discounted_sums,
)
from mouse_core.testing import SourceConformance, example_columns, example_store
from tests.core.oracle import assert_same

ALIGNMENTS: tuple[Alignment, ...] = ("arrived", "outgoing")


@dataclass
class Episode:
    """What an environment did: a reward and an action for each transition, and how it ended (0: it was broken off)."""

    rewards: list[float]
    actions: list[int]
    end: int

    def rows(self, alignment: Alignment) -> list[dict[str, Any]]:
        """As a store has it. Of an "outgoing" episode the observation at the end is not there."""
        n = len(self.rewards)
        ends = [0] * (n - 1) + [self.end]
        if alignment == "outgoing":
            found = zip(self.actions, self.rewards, ends, range(n), strict=True)
        else:
            found = zip([0, *self.actions], [0.0, *self.rewards], [0, *ends], range(n + 1), strict=True)
        return [dict(zip(("action", "reward", "done", "episode_step"), row, strict=True)) for row in found]


def store_of(episodes: list[Episode], alignment: Alignment) -> DatasetStore:
    store = DatasetStore(alignment=alignment)
    for episode in episodes:
        store.extend(episode.rows(alignment))
    return store


def oracle(episode: Episode, alignment: Alignment, n: int, discount: float) -> list[dict[str, float]]:
    """What each row's observation has, from the definitions: by its number in the episode, whatever the alignment."""
    total = len(episode.rewards)
    found = []
    for t in range(total + (alignment == "arrived")):
        # As far as there is an observation to go on from, or nothing comes after.
        known = total if alignment == "arrived" or episode.end == 1 else total - 1
        m = min(n, known - t)
        over = episode.end == 1 and t + m == total
        row = {
            "to_go": sum(episode.rewards[t:]),
            "discounted": sum(discount**k * reward for k, reward in enumerate(episode.rewards[t:])),
            "n_step": sum(discount**k * episode.rewards[t + k] for k in range(m)),
            "n_discount": 0.0 if over else discount**m,
            "from_start": t,
            "to_end": total - t,
            "previous": episode.actions[t - 1] if t else 0,
            "reward_before": episode.rewards[t - 1] if t else 0.0,
            "first": t == 0,
            "last": t == total - (alignment == "outgoing"),
        }
        ended = episode.end if t == (total if alignment == "arrived" else total - 1) else 0
        found.append(row | {"terminated": ended == 1, "truncated": ended == 2})
    return found


def derivations(n: int = 3, discount: float = 0.9) -> dict[str, Any]:
    return {
        "to_go": Return(),
        "discounted": Return(discount),
        "n_step": NStepReturn(n, discount),
        "n_discount": NStepDiscount(n, discount),
        "from_start": TimeFromStart(),
        "to_end": TimeToEnd(),
        "previous": Previous(),
        "reward_before": Previous("reward"),
        "first": IsFirst(),
        "last": IsLast(),
        "terminated": Terminated(),
        "truncated": Truncated(),
    }


def all_values(store: Store, rows: int | None = None) -> dict[str, np.ndarray]:
    """Every field of a snapshot, row by row."""
    snapshot = store.snapshot(rows)
    return {name: snapshot.stored(name, np.arange(len(snapshot))) for name in snapshot.readers}


EPISODES = st.lists(
    st.builds(
        lambda rewards, end, first: Episode(rewards, [(first + 3 * k) % 7 for k in range(len(rewards))], end),
        st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=90),
        st.sampled_from([0, 1, 1, 2]),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=8,
)


@given(EPISODES, st.sampled_from(ALIGNMENTS), st.integers(1, 7), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_every_field_is_what_its_definition_says(
    episodes: list[Episode], alignment: Alignment, n: int, discount: float
) -> None:
    store = DerivedStore(store_of(episodes, alignment), derivations(n, discount))
    wanted = [row for episode in episodes for row in oracle(episode, alignment, n, discount)]
    found = all_values(store)
    for name in derivations():
        np.testing.assert_allclose(found[name], [row[name] for row in wanted], rtol=1e-6, atol=1e-7, err_msg=name)


@settings(max_examples=6)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=12) | st.just([5000, 1, 33]),
    st.sampled_from([0.0, 0.3, 0.99, 1.0]),
    st.integers(0, 100),
)
def test_sums_are_those_of_rollouts_and_of_replay(lengths: list[int], discount: float, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=sum(lengths))
    ends = np.zeros(len(values), np.int64)
    ends[np.cumsum(lengths) - 1] = 1
    found = discounted_sums(values, np.array(lengths), discount)
    np.testing.assert_allclose(found, discounted_returns(values, ends, discount=discount), rtol=1e-11, atol=1e-11)
    batch = ReturnsToGo(discount)({"reward": values[None], "done": ends[None]})
    np.testing.assert_allclose(found, batch["return_to_go"][0], rtol=1e-11, atol=1e-11)
    # Each episode's are its own, to the last bit, and nothing infinite reaches another's.
    alone = [
        discounted_sums(part, np.array([len(part)]), discount) for part in np.split(values, np.cumsum(lengths)[:-1])
    ]
    assert found.tolist() == np.concatenate(alone).tolist()


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_sums_of_vector_rewards_are_those_of_each_component(alignment: Alignment) -> None:
    random, store = np.random.default_rng(0), DatasetStore(alignment=alignment)
    singles = [DatasetStore(alignment=alignment) for _ in range(2)]
    for length in (1, 40, 7, 90):
        rewards = random.normal(size=(length, 2))
        given = {"observations": np.zeros(length + 1), "actions": np.zeros(length, int), "terminated": True}
        store.add_episode(given, rewards=rewards)
        for number, single in enumerate(singles):
            single.add_episode(given, rewards=rewards[:, number])
    values = all_values(DerivedStore(store, derivations()))
    for number, single in enumerate(singles):
        expected = all_values(DerivedStore(single, derivations()))
        for name in expected:
            found = values[name][..., number] if values[name].ndim > expected[name].ndim else values[name]
            np.testing.assert_array_equal(found, expected[name], err_msg=name)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_returns_of_agents_end_with_the_agent(alignment: Alignment) -> None:
    rewards = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ends = np.array([[False, False], [True, False], [True, True]])
    given = {"observations": np.zeros(4), "actions": np.zeros(3, int), "terminated": ends}
    store = DatasetStore(alignment=alignment).add_episode(given, rewards=rewards)
    found = all_values(DerivedStore(store, {"togo": Return(0.5)}))["togo"]
    assert found[:3].tolist() == [[2.5, 5.5], [3.0, 7.0], [0.0, 6.0]]
    with pytest.raises(ConfigError, match="NStepReturn: expected rewards that end with the episode"):
        all_values(DerivedStore(store, {"steps": NStepReturn(2, 0.5)}))
    team = DatasetStore(alignment=alignment).add_episode(given, rewards=rewards[:, 0])
    assert all_values(DerivedStore(team, {"togo": Return(0.5)}))["togo"][:3].tolist() == [3.75, 5.5, 5.0]


@settings(max_examples=3)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=5), st.sampled_from(ALIGNMENTS), st.booleans())
def test_a_store_that_grows_derives_what_one_of_all_rows_does(
    steps: list[int], alignment: Alignment, recorded: bool
) -> None:
    """To the last bit, as a resumed run must find what the first one had; and earlier snapshots keep theirs."""
    rows = example_columns(sum(steps) + 50)
    del rows["observation_image"]
    first = {name: values[:50] for name, values in rows.items()}
    growing = DatasetStore(alignment=alignment)
    growing.extend(first)
    if recorded:
        growing = DatasetStore(alignment=alignment).from_dataset(growing.to_dataset())
    derived = DerivedStore(growing, derivations())
    seen = [(50, derived.snapshot(), all_values(derived))]
    at = 50
    for step in steps:
        growing.extend({name: values[at : at + step] for name, values in rows.items()})
        at += step
        seen.append((at, derived.snapshot(), all_values(derived)))
    for count, snapshot, values in seen:
        fresh = DatasetStore(alignment=alignment)
        fresh.extend({name: column[:count] for name, column in rows.items()})
        wanted = all_values(DerivedStore(fresh, derivations()))
        assert_same(values, wanted)
        assert_same({name: snapshot.stored(name, np.arange(count)) for name in wanted}, wanted)
        assert_same(all_values(derived, count), wanted)
        assert snapshot.fingerprint == derived.snapshot(count).fingerprint


def part(first: int, rows: int) -> Any:
    store = DatasetStore()
    store.extend(example_columns(rows, first=first))
    return store.to_dataset()


def two_files_and_appended_rows(folder: Path) -> DatasetStore:
    store = DatasetStore()
    for number, (first, rows) in enumerate([(0, 60), (60, 31)]):
        part(first, rows).save_to_disk(folder / str(number))
        store.from_dataset(datasets.load_from_disk(folder / str(number)))
    store.extend(example_columns(40, first=91))
    return store


def recorded(make: Callable[[], Any]) -> Callable[[Path], DatasetStore]:
    return lambda _: DatasetStore().from_dataset(make())


KINDS: list[Callable[[Path], DatasetStore]] = [
    recorded(lambda: part(0, 90).shuffle(seed=3)),
    recorded(lambda: part(0, 90).select([row for row in range(90) if not 20 <= row < 33])),
    recorded(lambda: datasets.concatenate_datasets([part(k * 7, 7) for k in range(12)])),
    two_files_and_appended_rows,
]


@pytest.mark.parametrize("make", KINDS)
def test_rows_may_lie_anywhere(make: Callable[[Path], DatasetStore], tmp_path: Path) -> None:
    store = make(tmp_path)
    copied = DatasetStore()
    copied.extend(store[:])
    derived = DerivedStore(store, derivations())
    assert_same(all_values(derived), all_values(DerivedStore(copied, derivations())))
    half = len(store) // 2
    assert_same(all_values(derived, half), all_values(DerivedStore(copied, derivations()), half))
    source, unread = BatchSource(derived, 5, 4), len(pickle.dumps(DerivedStore(store, derivations()).snapshot()))
    if make is not two_files_and_appended_rows:  # what was computed is computed again
        assert len(pickle.dumps(derived.snapshot())) < unread + 100
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint == source.fingerprint
    assert_same(again[3], source[3])


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_derived_fields_may_be_derived_from_derived_ones(alignment: Alignment) -> None:
    """These are of observations, so what was before stands in the row before, in either alignment."""
    rows = DatasetStore(alignment=alignment)
    rows.extend(example_columns(60))
    store = DerivedStore(DerivedStore(rows, {"to_go": Return()}), {"before": Previous("to_go")})
    found = all_values(store)
    firsts = np.nonzero(example_columns(60)["episode_step"] == 0)[0]
    assert not found["before"][firsts].any()
    others = np.setdiff1d(np.arange(60), firsts)
    assert found["before"][others].tolist() == found["to_go"][others - 1].tolist()


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_windows_by_field_go_by_what_a_derived_field_belongs_to(alignment: Alignment) -> None:
    store = store_of([Episode([1.0, 2.0, 4.0, 8.0], [1, 2, 3, 4], 1)] * 5, alignment)
    derived = DerivedStore(store, {"to_go": Return(), "over": Terminated()})
    offsets = {name: [0, 1] for name in ("reward", "to_go", "done", "over")}
    batch = BatchSource(derived, batch_size=16, windows=offsets)[0]
    there = batch["reward_mask"].all(axis=1)
    assert there.any()
    reward, to_go = batch["reward"][there], batch["to_go"][there]
    assert (to_go[:, 0] == reward[:, 0] + to_go[:, 1]).all()
    assert (batch["over"][there] == (batch["done"][there] == 1)).all()


def test_mixtures_take_stores_with_derived_fields() -> None:
    store = example_store(200)
    derived = DerivedStore(store, derivations())
    mixture = Mixture({"all": derived, "best": derived.best(0.3)})
    source = BatchSource(mixture, 5, 16, boundary="episode")
    assert source.spec.keys() == {*BatchSource(derived, 5, 16).spec, "member", "mask"}
    batch = source[2]
    there = batch["mask"][:, 1:]
    steps_taken = batch["from_start"][:, 1:] - batch["from_start"][:, :-1]
    assert (steps_taken[there] == 1).all()
    assert (batch["to_end"] + batch["from_start"] >= batch["time"]).all()
    with pytest.raises(ConfigError, match="expected a member of a mixture"):
        DerivedStore(mixture, {"another": Return()}).snapshot()


class TestDerivedSource(SourceConformance):
    def make(self) -> BatchSource:
        return BatchSource(DerivedStore(example_store(), derivations()), 8, 4)


def test_the_fingerprint_says_what_is_derived_and_how() -> None:
    store = DatasetStore()
    store.extend({"action": [0] * 9, "reward": [0.0] * 9, "done": [0] * 9})

    def fingerprint(**fields: Any) -> str:
        return BatchSource(DerivedStore(store, fields) if fields else store, 4, 2).fingerprint

    found = [fingerprint(), fingerprint(a=Return()), fingerprint(a=Return(0.9)), fingerprint(b=Return())]
    assert len(set(found)) == 4
    assert fingerprint(a=Return()) == found[1]


@dataclass(frozen=True, eq=False)
class Given:
    """Values that are given, for the first 20 rows."""

    values: Any
    dtype: str

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        return FieldSpec(name, np.dtype(self.dtype), ())

    def compute(self, rows: EpisodeRows) -> Any:
        return self.values


def test_bad_input_is_refused_with_what_was_found() -> None:
    store = example_store(20)
    with pytest.raises(ConfigError, match="expected a Store, found dict"):
        DerivedStore({}, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'a': expected a derivation such as Return\(\), found <class"):
        DerivedStore(store, {"a": Return})  # type: ignore[dict-item]
    for taken in ("reward", "observation"):
        with pytest.raises(ConfigError, match=f"a name that no other field has, found '{taken}'"):
            DerivedStore(store, {taken: Return()}).snapshot()
    with pytest.raises(MissingFieldError, match="expected a field 'rewards' to compute from, found"):
        DerivedStore(store, {"a": Return(reward="rewards")}).snapshot()
    with pytest.raises(DataError, match=r"(?s)a: Given.*expected values of shape \[20\], found \(20, 2\)"):
        all_values(DerivedStore(store, {"a": Given(np.zeros((20, 2), np.int32), "int32")}))
    with pytest.raises(DataError, match="expected int32, found float32"):
        all_values(DerivedStore(store, {"a": Given(np.zeros(20, np.float32), "int32")}))
    twice = DatasetStore().from_dataset(part(0, 30).select([0, 1, 2, 1, 2]))
    with pytest.raises(DataError, match=r"at most once in the store, found a row among rows 0\.\.4 twice"):
        all_values(DerivedStore(twice, {"to_go": Return()}))
    snapshot = DerivedStore(store, {"to_go": Return()}).snapshot()
    assert snapshot.of_rows(20) is snapshot
    with pytest.raises(ConfigError, match=r"expected 20 rows, for which \['to_go'\] were computed, found 10"):
        snapshot.of_rows(10)
    for make in (lambda: Return(1.5), lambda: NStepReturn(0, 0.9), lambda: NStepDiscount(2, -1.0)):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize(
    ("dtype", "values", "why"),
    [
        ("int32", np.arange(20) + 2**31 - 12, r"values .* that fit int32, found 2147483648 at row 12"),
        ("float32", np.float64([0.0] * 5 + [1e300] * 15), r"values that fit float32, found 1e\+300 at row 5"),
        ("float32", np.arange(20) + 2**53, r"whole numbers that float64 represents exactly .* at row 1"),
        ("float32", np.ma.masked_equal(np.arange(20.0), 7), r"a value, found a masked value .* at row 7"),
    ],
)
def test_values_that_a_field_does_not_hold_are_refused(dtype: str, values: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"expected {why}"):
        all_values(DerivedStore(example_store(20), {"a": Given(values, dtype)}))


@dataclass(frozen=True)
class Counted:
    """Counts in a file how often it computes."""

    calls: str
    factor: int = 2

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        return FieldSpec(name, np.dtype("float32"), (3,))

    def compute(self, rows: EpisodeRows) -> Any:
        with Path(self.calls).open("a") as file:
            file.write(".")
        return self.factor * rows.leaving("reward")[:, None] + np.arange(3.0)


def test_what_is_kept_on_disk_is_computed_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()

    def store(rows: int = 90, **options: Any) -> DerivedStore:
        dataset = part(0, rows).select([row for row in range(rows) if not 20 <= row < 33])
        counted = Counted(str(calls), **options)
        return DerivedStore(DatasetStore().from_dataset(dataset), {"counted": counted}, path=tmp_path / "kept")

    wanted = all_values(store())["counted"]
    assert calls.read_text() == "."
    for _ in range(2):
        np.testing.assert_array_equal(all_values(store())["counted"], wanted)
    carried = pickle.dumps(BatchSource(store(), 5, 4))
    np.testing.assert_array_equal(pickle.loads(carried)[2]["counted"], BatchSource(store(), 5, 4)[2]["counted"])
    assert calls.read_text() == "."
    file = tmp_path / "kept" / "counted.arrow"
    assert list(file.parent.iterdir()) == [file]
    # What the file was not computed from, or by, and what is not whole.
    assert not np.array_equal(all_values(store(factor=3))["counted"], wanted)
    np.testing.assert_array_equal(all_values(store())["counted"], wanted)
    assert len(all_values(store(rows=80))["counted"]) < len(wanted)
    np.testing.assert_array_equal(all_values(store())["counted"], wanted)
    assert calls.read_text() == "....."
    whole = file.read_bytes()
    with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
        values = reader.get_batch(0).column(0).buffers()[-1].to_pybytes()
    flipped = bytes([*values[:40], values[40] ^ 8, *values[41:]])
    for damage in (b"", whole[:-9], b"ARROW1\0\0" + whole[20:], whole.replace(values, flipped)):
        file.write_bytes(damage)
        np.testing.assert_array_equal(all_values(store())["counted"], wanted)
    assert calls.read_text() == "........."


def test_rows_that_are_appended_are_not_kept(tmp_path: Path) -> None:
    base, kept = DatasetStore().from_dataset(part(0, 50)), tmp_path / "kept"
    all_values(DerivedStore(example_store(80).where(length=(1, None)), {"to_go": Return()}, path=kept))
    assert not kept.exists()
    derived = DerivedStore(base, {"to_go": Return()}, path=kept)
    all_values(derived)
    before = (kept / "to_go.arrow").read_bytes()
    base.extend(example_columns(30, first=50))
    plain = DerivedStore(example_store(80), {"to_go": Return()})
    np.testing.assert_array_equal(all_values(derived)["to_go"], all_values(plain)["to_go"])
    assert (kept / "to_go.arrow").read_bytes() == before


def test_what_cannot_be_kept_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    derived = DerivedStore(DatasetStore().from_dataset(part(0, 50)), {"to_go": Return()}, path=tmp_path / "kept")
    with pytest.raises(StorageError, match=r"derived fields: .*to_go\.arrow"):
        all_values(derived)


def test_a_file_is_of_exactly_these_rows(tmp_path: Path) -> None:
    columns = example_columns(90)
    names = ("action", "reward", "done", "episode_step", "observation")

    def store(change: tuple[int, float] | None = None, column: str = "reward") -> DerivedStore:
        rows = {name: np.array(columns[name]) for name in names}
        if change is not None:
            rows[column][change[0]] += change[1]
        dataset = datasets.Dataset.from_dict({name: list(values) for name, values in rows.items()})
        return DerivedStore(DatasetStore().from_dataset(dataset), {"to_go": Return()}, path=tmp_path / "kept")

    all_values(store())
    before = (tmp_path / "kept" / "to_go.arrow").stat().st_mtime_ns
    all_values(store((40, 3.0), "observation"))  # which returns are not computed from
    assert (tmp_path / "kept" / "to_go.arrow").stat().st_mtime_ns == before
    changed = store((40, 3.0))
    assert changed.snapshot().fingerprint == store().snapshot().fingerprint  # a few rows are in it, and not this one
    fresh = DerivedStore(changed._store, {"to_go": Return()})
    np.testing.assert_array_equal(all_values(changed)["to_go"], all_values(fresh)["to_go"])


class Computed:
    """Zeros, which counts of how many rows."""

    def __init__(self) -> None:
        self.rows = 0

    def __repr__(self) -> str:
        return "Computed()"

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        return FieldSpec(name, np.dtype("float32"), ())

    def compute(self, rows: EpisodeRows) -> Any:
        self.rows += len(rows)
        return np.zeros(len(rows), np.float32)


@dataclass(frozen=True)
class Weighted:
    weights: Any

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        return FieldSpec(name, np.dtype("float32"), ())

    def compute(self, rows: EpisodeRows) -> Any:
        return np.full(len(rows), self.weights.sum(), np.float32)


class Plain(Weighted):
    __repr__ = object.__repr__


@pytest.mark.parametrize("kind", [Weighted, Plain])
def test_a_derivation_is_told_by_all_of_its_values(kind: type[Weighted]) -> None:
    store, weights = example_store(40), np.zeros(5000)
    other = weights.copy()
    other[2500] = 1
    found = [DerivedStore(store, {"w": kind(one)}).snapshot().fingerprint for one in (weights, weights.copy(), other)]
    assert found[0] == found[1] != found[2]
    with pytest.raises(ConfigError, match="derived fields: expected a derivation whose repr describes its value"):
        DerivedStore(store, {"w": Plain(lambda: 0)})


def test_a_first_part_without_a_column_says_nothing_of_its_type() -> None:
    """Null throughout in the first part, vectors in the second: the whole has vectors, as any store has."""
    rows = {"action": [0, 1, 2], "reward": [0.0, 1.0, 2.0], "done": [0, 0, 1]}
    store = DatasetStore()
    store.from_dataset(pa.table({**rows, "metadata_q_star": pa.nulls(3), "note": pa.nulls(3)}))
    store.from_dataset(pa.table({**rows, "metadata_q_star": [[1.0, 2.0]] * 3, "note": pa.nulls(3)}))
    derived = DerivedStore(store, {"to_go": Return()})
    assert derived.columns == {**store.columns, "to_go": pa.float32()}
    assert derived.columns["metadata_q_star"] == pa.list_(pa.float64())
    assert derived.columns["note"] == pa.null()
    found = derived.to_dataset()
    assert found["metadata_q_star"][:] == [None] * 3 + [[1.0, 2.0]] * 3
    assert DatasetStore().from_dataset(found).columns["metadata_q_star"] == pa.list_(pa.float64())


@pytest.mark.parametrize("is_view", [False, True])
def test_only_what_is_read_is_computed_and_of_new_episodes_only(is_view: bool) -> None:
    base, counting = example_store(60), Computed()
    rows = base.where(lambda episode: episode["episode"] % 3 != 1) if is_view else base
    derived = DerivedStore(rows, {"counted": counting, "to_go": Return()})
    assert BatchSource(derived, 8, 4, fields=["reward", "to_go"])[0].keys() == {"reward", "to_go"}
    assert counting.rows == 0
    assert all_values(derived)["counted"].shape == (len(rows),)
    before = counting.rows
    assert before == len(rows)
    for first in range(60, 120, 20):
        base.extend(example_columns(20, first=first))
        derived.snapshot()
    assert counting.rows == before
    assert_same(all_values(derived), all_values(DerivedStore(rows, {"counted": Computed(), "to_go": Return()})))
    starts = derived.snapshot().episode_starts
    assert counting.rows - before <= len(rows) - starts[starts < before].max()


def test_an_infinite_reward_shows_within_n_steps_of_its_episode_alone() -> None:
    values = np.array([1.0, 2.0, np.inf, np.nan, 1.0, 1.0])
    assert discounted_sums(values, np.array([2, 2, 2]), 0.5)[[0, 1, 4, 5]].tolist() == [2.0, 2.0, 1.5, 1.0]
    rewards = np.random.default_rng(0).normal(size=700)
    rewards[650] = np.inf
    store = DatasetStore(alignment="outgoing")
    done = [int(step == 699) for step in range(700)]
    store.extend({"action": [0] * 700, "reward": rewards, "done": done, "episode_step": range(700)})
    rows = store.snapshot().stored("reward", np.arange(700)).astype(np.float64).tolist()
    for n in (1, 7, 100, 511, 10_000):
        found = all_values(DerivedStore(store, {"n_step": NStepReturn(n, 0.99)}))["n_step"]
        wanted = [sum(0.99**k * reward for k, reward in enumerate(rows[t : t + n])) for t in range(700)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for derivation in (Return(0.0), NStepReturn(2, 0.0)):
        assert all_values(DerivedStore(store, {"now": derivation}))["now"].tolist() == rows
