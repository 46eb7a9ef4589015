"""Stores that are views of others: which episodes they have, and that a loader takes them as it takes any store."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, DatasetStore, PrefetchBatchifier, Snapshot, formats
from mouse_core.inspect import inspect
from mouse_core.metadata import DatasetMetadata, with_metadata
from mouse_core.mixtures import Mixture
from mouse_core.replay import ReplayBuffer
from mouse_core.store import Store
from mouse_core.store.derived import DerivedStore, Return, TimeToEnd
from mouse_core.testing import SourceConformance, example_columns, example_store
from tests.core.oracle import assert_same

Row = dict[str, Any]
TASKS = ("push", "pull", None)


class Later(Store):
    """The rows of a store that come after its first dataset."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def snapshot(self, rows: int | None = None) -> Snapshot:
        whole = self.store.snapshot(rows)
        count = whole.num_rows - whole.segments[0].num_rows
        return Snapshot(whole.segments[1:], whole.config, count, whole.budget, store_rows=whole.store_rows)


def two_parts() -> DatasetStore:
    store = DatasetStore().from_dataset(example_store(40).to_dataset())
    store.extend(example_columns(60))
    return store


def columns_of(lengths: list[int], seed: int = 0, *, tasks: bool = True, times: bool = True) -> dict[str, Any]:
    """Steps of episodes of some lengths, as columns; none is like another."""
    draw = np.random.default_rng(seed)
    rows = sum(lengths)
    ends = np.cumsum(lengths) - 1
    done = np.zeros(rows, np.int64)
    done[ends] = draw.integers(1, 3, len(lengths))
    columns: dict[str, Any] = {
        "action": draw.integers(0, 4, rows),
        "reward": draw.integers(-3, 4, rows).astype(np.float32) / 4,
        "done": done,
        "observation": draw.normal(size=(rows, 3)),
        "step_id": np.arange(rows) + 1000 * seed,
    }
    if times:
        columns["episode_step"] = np.concatenate([np.arange(length) for length in lengths])
    if tasks:
        names = [TASKS[number] for number in draw.integers(0, 3, len(lengths))]
        columns["task"] = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
        columns["level"] = np.repeat(draw.random(len(lengths)), lengths)
    return columns


def store_of(*parts: list[int], **options: Any) -> DatasetStore:
    """A store whose first part is a dataset of short batches; the others are appended."""
    store = DatasetStore()
    for number, lengths in enumerate(parts):
        columns = columns_of(lengths, number, **options)
        if number:
            store.extend(columns)
        else:
            table = pa.table({name: pa.array(list(values)) for name, values in columns.items()})
            store.from_dataset(pa.Table.from_batches(table.to_batches(max_chunksize=7)))
    return store


def episodes_in(store: Store) -> list[list[Row]]:
    """The store's rows by episode, found in plain Python."""
    found: list[list[Row]] = []
    before: Row | None = None
    for row in store[:]:
        time, last = row.get("episode_step"), None if before is None else before.get("episode_step")
        begins = before is None or before["done"] != 0 or time == 0
        if begins or (time is not None and last is not None and time <= last):
            found.append([])
        found[-1].append(row)
        before = row
    return found


def oracle(store: Store) -> list[Row]:
    """What the table of episodes has to say, in plain Python."""
    rows, start = [], 0
    for number, steps in enumerate(episodes_in(store)):
        counted = steps[1:] if store.alignment == "arrived" else steps
        row = {"episode": number, "start": start, "length": len(steps), "done": steps[-1]["done"]}
        row["return"] = sum(step["reward"] for step in counted)
        rows.append({**row, "task": steps[0].get("task"), "level": steps[0].get("level")})
        start += len(steps)
    return rows


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


class TestStoreOfOnesOwn(SourceConformance):
    def make(self) -> BatchSource:
        return BatchSource(Later(two_parts()), 8, 4)


def test_a_store_of_ones_own_is_taken_where_a_store_is() -> None:
    store = two_parts()
    later = Later(store)
    assert len(later) == 60
    assert later.alignment == "arrived"
    assert later[:3] == example_store(60)[:3]
    assert list(later.columns) == list(store.columns)
    wanted = BatchSource(example_store(60), 8, 4)
    assert_same(BatchSource(later, 8, 4)[3], wanted[3])
    assert len(ReplayBuffer(later, batch_size=4)) == 60
    assert later.to_dataset()[59] == example_store(60).to_dataset()[59]
    with pytest.raises(ConfigError, match="rows in"):
        later.snapshot(1000)


def test_a_loader_over_a_store_of_ones_own_resumes_and_refreshes() -> None:
    store = two_parts()
    with PrefetchBatchifier(Later(store), 8, 4) as loader:
        loader.next_batch()
        state = loader.state_dict()
        wanted = loader.next_batch()
        assert state["rows"] == 100  # of which the store's snapshot is made again
    store.extend(example_columns(50))
    with PrefetchBatchifier(Later(store), 8, 4) as loader:
        loader.load_state_dict(state)
        assert_same(loader.next_batch(), wanted)
        loader.refresh()
        assert loader.source.snapshot.num_rows == 110


@given(first=LENGTHS, second=LENGTHS, times=st.booleans(), alignment=st.sampled_from(["arrived", "outgoing"]))
def test_episodes_are_those_of_the_rows(first: list[int], second: list[int], times: bool, alignment: str) -> None:
    store = DatasetStore(alignment=alignment)  # type: ignore[arg-type]
    store.extend(columns_of(first, 1, times=times))
    store.from_dataset(pa.table({name: list(values) for name, values in columns_of(second, 2, times=times).items()}))
    found = store.episodes.select(["episode", "start", "length", "done", "return", "task", "level"]).to_pylist()
    assert found == oracle(store)


@given(rows=st.lists(st.integers(1, 12), min_size=1, max_size=6), lengths=LENGTHS)
def test_episodes_are_counted_on_as_rows_come(rows: list[int], lengths: list[int]) -> None:
    """What is counted bit by bit is what is counted at once, wherever an episode is cut."""
    columns = columns_of(lengths * 3, 3)
    columns["reward"] = np.random.default_rng(4).random(len(columns["reward"])).astype(np.float32)
    store, at = DatasetStore(), 0
    for count in rows:
        store.extend({name: values[at : at + count] for name, values in columns.items()})
        at = min(at + count, len(columns["reward"]))
        whole = DatasetStore()
        whole.extend({name: values[:at] for name, values in columns.items()})
        assert store.episodes.equals(whole.episodes)


def test_an_episode_across_datasets_is_one() -> None:
    columns = columns_of([6, 5], 1)
    store = DatasetStore()
    for begin, end in ((0, 3), (3, 8), (8, 11)):
        store.from_dataset(pa.table({name: list(values[begin:end]) for name, values in columns.items()}))
    assert store.episodes.column("length").to_pylist() == [6, 5]
    assert store.episodes.column("task").to_pylist() == [columns["task"][0], columns["task"][6]]


def test_a_column_that_changes_within_an_episode_is_not_in_the_table() -> None:
    store = store_of([4, 3])
    assert "step_id" not in store.episodes.column_names
    columns = columns_of([4, 4], 5)
    columns["task"] = ["push", "pull"] * 4
    store.extend(columns)
    assert "task" not in store.episodes.column_names
    assert "level" in store.episodes.column_names
    store.extend(columns_of([3], 6))
    assert "task" not in store.episodes.column_names


def test_columns_of_all_encodings_are_told_apart() -> None:
    task = pa.array(["a", "a", None, None, "b"]).dictionary_encode()
    table = pa.table(
        {
            "action": [0] * 5,
            "reward": [0.0] * 5,
            "done": [0, 1, 0, 1, 0],
            "task": task,
            "score": [math.nan, math.nan, 1.0, 1.0, None],
            "flag": [True, True, False, True, True],
            "names": pa.array(["x", "x", "y", "y", "z"], pa.large_string()),
        }
    )
    found = DatasetStore().from_dataset(table).episodes
    assert found.column("task").to_pylist() == ["a", None, "b"]
    assert found.column("names").to_pylist() == ["x", "y", "z"]
    assert "flag" not in found.column_names
    first, *others = found.column("score").to_pylist()
    assert math.isnan(first)
    assert others == [1.0, None]


def test_numbers_of_tasks_are_texts_where_the_dataset_says_them() -> None:
    columns = columns_of([2, 3, 2, 4], 1, tasks=False)
    columns["metadata_task_index"] = [0] * 2 + [7] * 3 + [0] * 2 + [5] * 4
    table = pa.table({name: list(values) for name, values in columns.items()})
    store = DatasetStore().from_dataset(with_metadata(table, DatasetMetadata(tasks={0: "push", 7: "pull"})))
    assert store.episodes.column("task").to_pylist() == ["push", "pull", "push", None]
    assert store.where(task="push").episodes.column("episode").to_pylist() == [0, 2]
    assert store.snapshot().stretch_starts("").tolist() == [0, 2, 5, 7]
    store.extend({name: values[-4:] for name, values in columns.items()})
    assert store.episodes.column("task").to_pylist() == ["push", "pull", "push", None, None]


def test_rows_in_another_order_have_the_episodes_of_that_order() -> None:
    dataset = store_of([3, 4, 2]).to_dataset().select([3, 4, 5, 6, 0, 1, 2])
    store = DatasetStore().from_dataset(dataset)
    assert store.episodes.column("length").to_pylist() == [4, 3]
    assert store.where(episode=1)[0] == dataset[4]


def test_an_empty_store_has_no_episodes() -> None:
    assert DatasetStore().episodes.num_rows == 0
    assert len(DatasetStore().best(0.5)) == 0


# Choices, each with what it means of an episode.
CONDITIONS: list[tuple[Callable[[Store], Store], Callable[[Row], bool]]] = [
    (lambda store: store.where(task="push"), lambda row: row["task"] == "push"),
    (lambda store: store.where(task=None), lambda row: row["task"] is None),
    (lambda store: store.where(task=["push", "pull"]), lambda row: row["task"] is not None),
    (lambda store: store.where(length=(3, 6)), lambda row: 3 <= row["length"] <= 6),
    (lambda store: store.where({"return": (0.25, None)}), lambda row: row["return"] >= 0.25),
    (lambda store: store.where(lambda row: row["level"] > 0.4), lambda row: row["level"] > 0.4),
    (
        lambda store: store.where(lambda row: row["episode"] % 2 == 0, {"length": (3, None)}, done=[1]),
        lambda row: row["episode"] % 2 == 0 and row["length"] > 2 and row["done"] == 1,
    ),
    (
        lambda store: store.where(length=(2, None)).where(done=1),
        lambda row: row["length"] >= 2 and row["done"] == 1,
    ),
]


@settings(max_examples=6)
@given(first=LENGTHS, second=LENGTHS)
def test_where_takes_what_the_condition_says(first: list[int], second: list[int]) -> None:
    store = store_of(first, second)
    table, episodes = oracle(store), episodes_in(store)
    for choose, holds in CONDITIONS:
        view = choose(store)
        wanted = [row["episode"] for row in table if holds(row)]
        assert view.episodes.column("episode").to_pylist() == wanted
        rows = [row for number in wanted for row in episodes[number]]
        assert len(view) == len(rows)
        if rows:
            assert view[:] == rows
            assert view.to_dataset().to_list() == rows
            starts = np.cumsum([0, *(table[number]["length"] for number in wanted)])
            assert view.snapshot().episode_starts.tolist() == starts[:-1].tolist()
            assert view.episodes.column("start").to_pylist() == starts[:-1].tolist()


@given(lengths=LENGTHS, share=st.floats(0.01, 1), by=st.sampled_from(["return", "length", "level"]))
def test_best_takes_the_most(lengths: list[int], share: float, by: str) -> None:
    store = store_of(lengths, [2])
    ranked = sorted(oracle(store), key=lambda row: -row[by])  # stable: of equal ones the earlier
    count = max(1, math.floor(share * len(ranked) + 0.5))
    wanted = sorted(row["episode"] for row in ranked[:count])
    assert store.best(share, by).episodes.column("episode").to_pylist() == wanted


def test_best_leaves_out_what_has_no_number() -> None:
    rewards = [0, 1, 0, math.nan, 0, 2]
    table = pa.table({"action": [0] * 6, "reward": rewards, "done": [0, 1] * 3})
    store = DatasetStore().from_dataset(table)
    assert store.best(1.0).episodes.column("episode").to_pylist() == [0, 2]


def test_a_split_has_every_episode_once_and_keeps_it_as_others_come() -> None:
    store = store_of([3, 2] * 60)
    parts = store.split(train=0.7, valid=0.2, seed=3)
    assert list(parts) == ["train", "valid", "test"]
    before = {name: set(part.episodes.column("episode").to_pylist()) for name, part in parts.items()}
    assert sorted(number for numbers in before.values() for number in numbers) == list(range(120))
    assert 65 <= len(before["train"]) <= 100
    store.extend(columns_of([4] * 30, 7))
    for name, part in parts.items():
        after = set(part.episodes.column("episode").to_pylist())
        assert before[name] == {number for number in after if number < 120}
    again = store.split(train=0.7, valid=0.2, seed=3)
    assert again["train"].snapshot().fingerprint == parts["train"].snapshot().fingerprint
    other = store.split(train=0.7, valid=0.2, seed=4)
    assert other["train"].episodes.column("episode") != parts["train"].episodes.column("episode")


def test_a_split_of_a_view_is_the_view_of_a_split() -> None:
    store = store_of([3, 2, 5] * 20)
    one = store.where(length=(3, None)).split(train=0.5)["train"]
    other = store.split(train=0.5)["train"].where(length=(3, None))
    assert one.episodes.equals(other.episodes)


def test_derived_fields_leave_episodes_in_their_parts_whatever_is_chosen_beneath_as_rows_come() -> None:
    store = store_of([3] * 40)
    wanted = store.split(train=0.5, seed=1)

    def numbers(of: Store) -> set[int]:
        return set(of.episodes.column("episode").to_pylist())

    derived: Store = DerivedStore(store.best(0.5), {"to_go": Return()})
    derived = DerivedStore(derived.where(length=(1, None)), {"left": TimeToEnd()})
    parts = derived.split(train=0.5, seed=1)
    for rows in ([], [6] * 15):
        if rows:
            store.extend(columns_of(rows, 9))
        for name, part in parts.items():
            assert numbers(part) == numbers(wanted[name]) & numbers(store.best(0.5))
        assert derived.episodes.equals(store.best(0.5).episodes)


def test_a_split_by_a_column_keeps_equal_values_together_wherever_they_stand() -> None:
    names = [f"scene {number % 13}" for number in range(40) for _ in range(2)]
    columns = columns_of([2] * 40, 1)

    def parts(order: list[int]) -> dict[str, set[str]]:
        rows = [2 * number + step for number in order for step in (0, 1)]
        store = DatasetStore()
        store.extend({name: [values[row] for row in rows] for name, values in {**columns, "scene": names}.items()})
        split = store.split(train=0.5, by="scene")
        return {name: set(part.episodes.column("scene").to_pylist()) for name, part in split.items()}

    found = parts(list(range(40)))
    assert not found["train"] & found["test"]
    assert parts(list(range(40))[::-1]) == found


def test_a_function_is_asked_once_for_each_episode() -> None:
    store = store_of([3, 4, 5])
    asked: list[int] = []

    def is_long(episode: Row) -> bool:
        asked.append(episode["episode"])
        return bool(episode["length"] > 3)

    view = store.where(is_long)
    assert len(view) == len(view) == 9
    assert len(view.best(0.5)) == 4 or len(view.best(0.5)) == 5
    assert asked == [0, 1, 2]
    store.extend({name: values[:2] for name, values in columns_of([4, 3], 8).items()})
    assert len(view) == 9
    store.extend({name: values[2:] for name, values in columns_of([4, 3], 8).items()})
    assert len(view) == 13
    assert asked == [0, 1, 2, 3, 3, 4]  # the one that went on, again
    nested = store.where(length=(4, None)).where(is_long)
    assert len(nested) == 13
    assert asked[6:] == [1, 2, 3]
    store.extend(columns_of([9], 9))
    assert len(nested) == 22
    assert asked[9:] == [5]


class TestView(SourceConformance):
    def make(self) -> BatchSource:
        return BatchSource(two_parts().where(length=(4, None)), 8, 4, views=2)


@given(
    first=LENGTHS,
    second=LENGTHS,
    taken=st.sets(st.integers(0, 23), min_size=1),
    sampling=st.sampled_from(["random", "sequential", "batch"]),
    boundary=st.sampled_from(["stream", "episode"]),
    length=st.integers(1, 4),
)
def test_batches_are_those_of_a_store_of_the_same_rows(
    first: list[int], second: list[int], taken: set[int], sampling: str, boundary: Any, length: int
) -> None:
    store = store_of([*first, 4], second)
    numbers = sorted({number % store.episodes.num_rows for number in taken} | {len(first)})
    view = store.where(episode=numbers)
    copied = DatasetStore()
    copied.from_dataset(pa.Table.from_pylist(view[:]))
    options: Any = {"sampling": sampling, "boundary": boundary, "drop_last": False}
    one, other = (
        BatchSource(from_, length, 3, fields=["action", "obs_continuous"], **options) for from_ in (view, copied)
    )
    assert len(one) == len(other)
    for index in range(min(len(one), 4)):
        assert_same(one[index], other[index])


def test_a_view_of_shuffled_rows_has_their_values() -> None:
    dataset = store_of([3, 4, 2, 5]).to_dataset()
    order = np.random.default_rng(0).permutation(len(dataset))
    store = DatasetStore().from_dataset(dataset.select(order))
    view = store.where(episode=list(range(0, store.episodes.num_rows, 2)))
    rows = [dataset[int(order[at])] for at in np.nonzero(np.isin(_episode_of(store), range(0, 99, 2)))[0]]
    assert view[:] == rows
    batch = BatchSource(view, 1, len(rows), "batch", fields=["obs_continuous"])[0]["obs_continuous"][:, 0]
    assert sorted(map(tuple, batch.tolist())) == sorted(tuple(row["observation"]) for row in rows)


def _episode_of(store: Store) -> Any:
    table = store.episodes
    return np.repeat(table.column("episode").to_numpy(), table.column("length").to_numpy())


@pytest.mark.slow
def test_many_short_episodes_are_read_by_row_numbers() -> None:
    store = store_of([1, 2] * 60_000, tasks=False)
    view = store.where(episode=range(0, 120_000, 4))
    rows = np.nonzero(_episode_of(store) % 4 == 0)[0]
    assert view.snapshot().has_row_numbers
    picked = DatasetStore().from_dataset(store.to_dataset().select(rows))
    assert_same(BatchSource(view, 3, 64)[5], BatchSource(picked, 3, 64)[5])


def test_fingerprints_tell_choices_apart() -> None:
    store = store_of([3, 3, 3, 3, 3])
    views = [store.where(episode=[0, 1, 4]), store.where(episode=[0, 2, 4]), store.where(episode=[0, 3, 4]), store]
    assert len({BatchSource(view, 2, 2).fingerprint for view in views}) == 4
    # Whatever rule took them, and whoever holds the data.
    assert store.where(length=(1, None)).snapshot().fingerprint == store.best(1.0).snapshot().fingerprint
    one = store.where(episode=(0, 3)).where(episode=(2, 4))
    assert one.snapshot().fingerprint == store.where(episode=range(2, 4)).snapshot().fingerprint
    assert one.where(episode=3).snapshot().fingerprint == store.where(episode=3).snapshot().fingerprint
    derived = [DerivedStore(chosen, {"to_go": Return()}).where(episode=3) for chosen in (one, store.best(1.0), store)]
    assert len({view.snapshot().fingerprint for view in derived[:2]}) == 1
    assert derived[0].snapshot().fingerprint != store.where(episode=3).snapshot().fingerprint
    assert pickle.loads(pickle.dumps(one.snapshot())).fingerprint == one.snapshot().fingerprint
    other = store_of([3, 3, 3, 3, 3])
    assert other.best(0.5).snapshot().fingerprint == store.best(0.5).snapshot().fingerprint


def test_a_loader_takes_in_what_came_and_goes_on_where_it_stopped() -> None:
    store = store_of([4, 5, 6], [3, 7])
    view = store.best(0.5)
    with PrefetchBatchifier(view, 2, 4) as loader:
        loader.next_batch()
        store.extend(columns_of([8, 8, 8], 5))
        state = loader.state_dict()
        wanted = [loader.next_batch() for _ in range(3)]
        loader.refresh()
        assert loader.source.snapshot.num_rows == len(view)
        later = loader.state_dict()
        wanted_later = loader.next_batch()
    store.extend(columns_of([20], 6))
    with PrefetchBatchifier(store.best(0.5), 2, 4) as loader:
        loader.load_state_dict(state)
        for batch in wanted:
            assert_same(loader.next_batch(), batch)
        loader.load_state_dict(later)
        assert_same(loader.next_batch(), wanted_later)


def test_a_view_of_a_dataset_on_disk_is_sent_as_its_path(tmp_path: Any) -> None:
    store_of([30] * 200).to_dataset().save_to_disk(tmp_path / "data")
    store = DatasetStore().from_dataset(datasets.load_from_disk(tmp_path / "data"))
    source = BatchSource(store.best(0.1), 8, 4)
    sent = pickle.dumps(source)
    assert len(sent) < 20_000  # 20 episodes of 30 rows of 80 bytes would be twice that
    assert_same(pickle.loads(sent)[3], source[3])
    assert pickle.loads(sent).fingerprint == source.fingerprint


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
def test_a_view_is_inspected_as_any_data(alignment: Any, tmp_path: Any) -> None:
    store = DatasetStore(alignment=alignment)
    store.extend(columns_of([4, 5, 6, 7], tasks=False))
    view = store.where(length=(5, 6))
    view.to_dataset().save_to_disk(tmp_path / "data")
    found, wanted = inspect(view), inspect(formats.open(tmp_path / "data"))
    assert (found.rows, found.episodes, found.columns) == (11, wanted.episodes, wanted.columns)
    assert found.alignment == alignment


@pytest.mark.parametrize("order", ["view of derived", "derived of view"])
def test_derived_fields_and_views_go_together_in_either_order(order: str) -> None:
    store = store_of([4, 3, 6, 1], [5, 2])
    derived = {"to_go": Return(), "left": TimeToEnd()}
    chosen: Store = DerivedStore(store.where(length=(3, None)), derived)
    if order == "view of derived":
        chosen = DerivedStore(store, derived).where(length=(3, None))
    assert len(chosen) == 18
    copied = DerivedStore(DatasetStore().from_dataset(store.where(length=(3, None)).to_dataset()), derived)
    fields = ["to_go", "left", "obs_continuous"]
    one, other = (BatchSource(from_, 3, 4, fields=fields, boundary="episode") for from_ in (chosen, copied))
    for index in range(3):
        assert_same(one[index], other[index])
    assert one.fingerprint != BatchSource(store.where(length=(3, None)), 3, 4, fields=["obs_continuous"]).fingerprint
    store.extend(columns_of([7], 5))
    assert BatchSource(chosen, 3, 4)[0]["to_go"].shape == (4, 3)
    assert len(chosen) == 25
    assert_same(pickle.loads(pickle.dumps(one))[2], one[2])


def test_only_members_of_a_mixture_have_episodes() -> None:
    mixture = Mixture([store_of([3, 4])])
    with pytest.raises(ConfigError, match=r"expected the episodes of a member, as in mixture.members\['0'\]"):
        len(mixture.best(0.5))
    with pytest.raises(ConfigError, match=r"expected the episodes of a member, as in mixture.members\['0'\]"):
        _ = mixture.episodes


def test_a_view_that_is_empty_for_now_waits_for_rows() -> None:
    fresh = DatasetStore()
    pulling, long = fresh.where(task="pull"), fresh.where(length=(5, None))
    fresh_parts = fresh.split(train=0.5, by="task")
    assert [len(view) for view in (fresh, pulling, long, *fresh_parts.values())] == [0] * 5
    with pytest.raises(ConfigError, match=r"where\(task='pull'\): expected some of the store's 0 episodes, found none"):
        BatchSource(pulling, 2, 2)
    fresh.extend(columns_of([3, 6], 1))
    assert len(long) == 6
    with PrefetchBatchifier(long, 2, 2) as loader:
        loader.next_batch()
        fresh.clear()
        with pytest.raises(ConfigError, match="expected some of the store's 0 episodes, found none"):
            loader.refresh()
        loader.next_batch()


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda store: store.where(), "at least one condition"),
        (lambda store: store.where("task"), "found 'task'"),
        (lambda store: store.where(nothing=1), r"expected a column among .*'task'.*found 'nothing'"),
        (lambda store: store.where(step_id=1), "found 'step_id'; a column of the steps"),
        (lambda store: store.where(length="long"), "length: expected a value of type int64"),
        (lambda store: store.where(length=(1, 2, 3)), "range"),
        (lambda store: store.where(lambda episode: None), "expected True or False for episode 0, found None"),
        (lambda store: store.where(length=(100, None)), r"where\(length=\(100, None\)\): .* 3 episodes, found none"),
        (lambda store: store.where(length=3).where(length=4), "store's 1 episodes, found none"),
        (lambda store: store.best(0), "best: expected a share"),
        (lambda store: store.best(10), "best: expected a share"),
        (lambda store: store.best(0.1, "task"), "best: expected a column of numbers"),
        (lambda store: store.split(), "train=0.9"),
        (lambda store: store.split(train=0.9, valid=0.2), "whose sum is at most 1"),
        (
            lambda store: store.split(train=0.5, test=0.1),
            "when a share has the name 'test', expected shares whose sum is 1",
        ),
        (lambda store: store.split(train=True), "split: train: expected a share"),
        (lambda store: store.split(train=0.5, seed=-1), "seed"),
        (lambda store: store.split(train=0.5, by="nothing")["train"], "split: expected a column"),
        (lambda store: store.split(train=0.5, by=3), "by: expected 'episode'"),
    ],
)
def test_what_is_refused(choose: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BatchSource(choose(store_of([3, 4, 5])), 2, 2)
