"""Appending to a store, what its snapshots see, and that nothing half-happens."""

import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, Field, MouseError, SchemaError, Snapshot
from tests.core.oracle import Rule, assert_same, field_arrays, last_starts, windows
from tests.core.worlds import CUSTOM_RULES, Part, World, build, parts, worlds
from tests.waiting import together

FULL = {
    "action": 1,
    "reward": 0.25,
    "done": 0,
    "episode_step": 3,
    "metadata_q_star": [0.5, 1.5],
    "observation": [1.0, 2.0, 3.0],
    "note": "a",
}
COLUMNS = {
    "action": pa.int64(),
    "reward": pa.float64(),
    "done": pa.int64(),
    "episode_step": pa.int64(),
    "metadata_q_star": pa.list_(pa.float64()),
    "observation": pa.list_(pa.float64()),
    "note": pa.string(),
}


def row(**changes: Any) -> dict[str, Any]:
    return {"action": 0, "reward": 0.5, "done": 0} | changes


def everything(store: DatasetStore | Snapshot) -> dict[str, np.ndarray]:
    """All rows, ``[N, ...]``."""
    rows = len(store)
    return {name: array[0] for name, array in BatchSource(store, rows, 1, sampling="last")[0].items()}


def test_a_column_of_maps_is_beside_the_fields_and_no_dataset_has_it() -> None:
    maps = pa.array([[("a", 1)]] * 20, pa.map_("string", "int64"))
    columns = {"action": [0] * 20, "reward": [0.0] * 20, "done": [0] * 20, "info": maps}
    store = DatasetStore().from_dataset(pa.table(columns))
    assert list(BatchSource(store, 4, 2)[0]) == ["action", "reward", "done"]
    assert store[3]["info"] == [("a", 1)]
    with pytest.raises(
        SchemaError, match=r"column 'info': expected a type that the library datasets supports, found map<"
    ):
        store.to_dataset()


def test_append_keeps_what_was_appended() -> None:
    store = DatasetStore()
    rows = []
    for step in range(1100):  # more than a block of memory
        one = FULL | {"reward": step * 0.5, "episode_step": None if step % 5 == 0 else step, "note": f"row {step}"}
        store.append(one)
        rows.append(one)
        assert len(store) == step + 1
    assert_same(everything(store), field_arrays(rows))
    store.append(dict(reversed(FULL.items())))  # the order of keys does not matter
    assert store[1034] == rows[1034]
    assert store[1100] == FULL
    assert store.columns == COLUMNS


def test_the_appended_row_is_copied() -> None:
    observation = np.array([1.0, 2.0, 3.0])
    one = row(observation=observation)
    store = DatasetStore()
    store.append(one)
    observation[:] = 9
    one["reward"] = 9.0
    zeros = np.zeros(2, np.int64)
    many = {"action": zeros, "reward": np.ones(2), "done": zeros, "observation": np.ones((2, 3))}
    store.extend(many)
    many["observation"][:] = 9
    many["reward"][:] = 9
    assert everything(store)["obs_continuous"].tolist() == [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert everything(store)["reward"].tolist() == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("first", [0, False, np.int32(0)])
def test_the_first_reward_may_be_a_whole_number(first: Any) -> None:
    """Environments write 0 at first and 0.5 later."""
    store = DatasetStore()
    store.append(row(reward=first, observation=[0, 0]))
    store.append(row(reward=0.5, observation=[0.5, 1]))
    assert everything(store)["reward"].tolist() == [0.0, 0.5]
    assert everything(store)["obs_continuous"].tolist() == [[0.0, 0.0], [0.5, 1.0]]


def test_a_store_can_be_recorded_before_anything_is_known_of_a_column() -> None:
    """Columns that were null at first take their type from the first value."""
    store = DatasetStore(fields=[Field("grid", fill=0.0)])
    rows = []
    for step in range(8):
        one = row(
            episode_step=step if step > 2 else None,
            metadata_q_star=[1.0 * step, 2.0] if step > 4 else None,
            grid=[[1.0, 2.0], [3.0, step]] if step == 6 else None,
            note="text" if step == 7 else None,
        )
        store.append(one)
        rows.append(one)
    assert_same(everything(store), field_arrays(rows, custom=[Rule("grid", "grid", "float64", fill=0)]))
    assert [store[number] for number in range(8)] == rows
    assert store.columns["note"] == pa.string()
    assert store.to_dataset()["note"][:] == [None] * 7 + ["text"]


def test_extend_takes_arrays_lists_and_arrow() -> None:
    wanted = [row(reward=0.5 * n, observation=[1.0 * n, 2.0]) for n in range(5)]
    columns: dict[str, Any] = {name: [one[name] for one in wanted] for name in wanted[0]}
    ways: list[dict[str, Any]] = [
        columns,
        {name: np.array(values) for name, values in columns.items()},
        {name: pa.array(values) for name, values in columns.items()},
        {name: pa.chunked_array([values[:2], values[2:]]) for name, values in columns.items()},
        {name: tuple(values) for name, values in columns.items()},
        {**columns, "observation": [np.array(value) for value in columns["observation"]]},
        datasets.Dataset.from_list(wanted)[:],
        datasets.Dataset.from_list(wanted).with_format("numpy")[:],
    ]
    for way in ways:
        store = DatasetStore()
        store.extend(way)
        assert_same(everything(store), field_arrays(wanted))
        store.extend(way)
        assert_same(everything(store), field_arrays(wanted * 2))


def test_nan_infinities_and_signed_zero_are_data() -> None:
    odd = [float("nan"), np.inf, -np.inf, -0.0]
    store = DatasetStore()
    for value in odd:
        store.append(row(reward=value, observation=[value, 1.0], metadata_q_star=[value, 2.0]))
    store.extend({name: [one[name] for one in store[:]] for name in store.columns})
    store.from_dataset(store.to_dataset())
    found = everything(store)
    wanted = np.array(odd * 4)
    assert len(store) == 16
    for values in (found["reward"], found["q_star"][:, 0], found["obs_continuous"][:, 0]):
        np.testing.assert_array_equal(values, wanted)
        np.testing.assert_array_equal(np.signbit(values[wanted == 0]), True)
    assert found["obs_continuous"][:, 1].tolist() == [1.0] * 16


@given(world=worlds(), wanted=parts(3, st.integers(1, 12)), data=st.data())
def test_several_rows_are_each_of_them(world: World, wanted: list[Part], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = build(world, wanted, Path(folder)).store
        count = len(store)
        number = st.integers(-count, count - 1)
        end = st.none() | st.integers(-2 * count, 2 * count)
        rows: Any = data.draw(
            st.lists(number, max_size=8)
            | st.lists(number, max_size=8).map(lambda numbers: np.array(numbers, np.int64))
            | st.builds(slice, end, end, st.sampled_from([None, 1, 2, -1, -3]))
        )
        one_by_one = [store[row] for row in range(count)]
        wanted_rows = one_by_one[rows] if isinstance(rows, slice) else [one_by_one[row] for row in rows]
        # As text, for NaN is not equal to itself.
        found = store[rows]
        assert repr(found) == repr(wanted_rows)


def test_rows_that_are_read_can_be_appended() -> None:
    store = DatasetStore()
    columns = {"action": [1, 2, 3], "reward": [0.0, 0.5, 1.0], "done": [0, 0, 1]}
    store.extend(columns | {"observation": [[1.0], [2.0], [3.0]]})
    store.extend(store[1:])
    assert [row["action"] for row in store[:]] == [1, 2, 3, 2, 3]
    assert [row["observation"] for row in store[[0, -1]]] == [[1.0], [3.0]]
    with pytest.raises(SchemaError, match=r"expected rows with the columns \['action', .* found \['action'\] at row 1"):
        store.extend([store[0], {"action": 1}])
    with pytest.raises(DataError, match="expected a list of dicts, found 5 at row 1"):
        store.extend([store[0], 5])
    for nothing in ([], {}, {"action": [], "reward": [], "done": [], "observation": []}):
        store.extend(nothing)
        DatasetStore().extend(nothing)
    assert len(store) == 5
    second = {"action": 2, "reward": 0.5, "done": 0, "observation": [2.0]}
    assert store[np.int64(1)] == store[np.array(1)] == store[1] == second
    assert store[[]] == []


@pytest.mark.parametrize(
    "rows", ["action", 1.5, True, None, [0.5], [True, False], [[0]], [[0], [0, 1]], ("a",), slice(0.5)]
)
def test_what_names_no_rows(rows: Any) -> None:
    store = DatasetStore()
    store.append({"action": 1, "reward": 0.0, "done": 0})
    with pytest.raises(ConfigError, match=r"store: expected a (row index, a slice or a list|slice of integers)"):
        store[rows]
    with pytest.raises(IndexError, match=r"expected a row in -1\.\.0, found 1"):
        store[[0, 1]]
    with pytest.raises(IndexError):
        DatasetStore()[0]
    assert DatasetStore()[:] == []


def test_a_snapshot_has_not_more_rows_than_the_store() -> None:
    store = DatasetStore()
    store.append(row())
    assert store.snapshot(0).num_rows == 0
    for rows in (2, -1):
        with pytest.raises(ConfigError, match=rf"rows in 0\.\.1, found {rows}"):
            store.snapshot(rows)


def test_one_thread_appends_while_others_read() -> None:
    """Every row says its own number three times; no batch may ever show a row half written."""
    store = DatasetStore()
    store.append(row(reward=0.0, observation=[0.0] * 5, episode_step=0))

    done = threading.Event()

    def append() -> None:
        try:
            for number in range(1, 1500):
                store.append(row(reward=float(number), observation=[float(number)] * 5, episode_step=number))
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            found = everything(store.snapshot())
            numbers = np.arange(len(found["time"]))
            assert np.array_equal(found["time"], numbers)
            assert np.array_equal(found["reward"], numbers)
            assert (found["obs_continuous"] == numbers[:, None]).all()

    together([append, read, read])
    assert len(store) == 1500


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of good and bad input: the store is always what the model says, and refusals leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.store = DatasetStore(max_action_dim=3, max_obs_continuous_dim=4)
        self.rows: list[dict[str, Any]] = []
        self.snapshots: list[tuple[Snapshot, int]] = []
        self.number = 0

    def make(self, count: int) -> list[dict[str, Any]]:
        made = []
        for _ in range(count):
            self.number += 1
            n = self.number
            one = {"action": n % 3, "reward": n * 0.5, "done": n % 3, "episode_step": None if n % 4 == 0 else n}
            one["metadata_q_star"] = None if n % 5 == 0 else [n * 0.25, 1.0, 2.0][: 1 + n % 3]
            made.append({**one, "observation": [float(n)] * (1 + n % 4), "note": str(n)})
        return made

    @initialize(begin=st.sampled_from(["nothing", "dataset", "row"]))
    def begin(self, begin: str) -> None:
        if begin == "dataset":
            self.add_dataset(5, False)
        elif begin == "row":
            self.append()

    @rule()
    def append(self) -> None:
        (one,) = self.make(1)
        self.store.append(one)
        self.rows.append(one)

    @rule(count=st.integers(1, 40))
    def extend(self, count: int) -> None:
        made = self.make(count)
        self.store.extend({name: [one[name] for one in made] for name in made[0]})
        self.rows += made

    @rule(count=st.integers(1, 9), shuffled=st.booleans())
    def add_dataset(self, count: int, shuffled: bool) -> None:
        made = self.make(count)
        dataset = datasets.Dataset(pa.Table.from_pylist(made, schema=pa.schema(COLUMNS)))
        if shuffled:
            dataset = dataset.shuffle(seed=count, keep_in_memory=True)
        self.store.from_dataset(dataset)
        self.rows += [dict(one) for one in dataset]

    WRONG: ClassVar[dict[str, list[Any]]] = {
        "done": [7, None, 0.5],
        "action": [3, -1, None],
        "reward": [None, "much", [1.0, 2.0]],
        "observation": [None, [1.0] * 5, [[1.0]], "text", [1.0, None]],
        "metadata_q_star": [[1.0] * 4, 1j],
        "episode_step": [2**63, 1.5],
        "note": [5],
    }

    @rule(
        change=st.sampled_from([(name, value) for name, values in WRONG.items() for value in values]),
        many=st.booleans(),
    )
    @precondition(lambda self: self.rows)
    def refuse_a_value(self, change: tuple[str, Any], many: bool) -> None:
        name, value = change
        made = self.make(3 if many else 1)
        made[-1][name] = value
        columns = {name: [one[name] for one in made] for name in made[0]}
        with pytest.raises(DataError, match=name):
            self.store.extend(columns) if many else self.store.append(made[0])

    @rule(name=st.sampled_from(["action", "note", "episode_step"]))
    @precondition(lambda self: self.rows)
    def refuse_keys(self, name: str) -> None:
        (one,) = self.make(1)
        with pytest.raises(MouseError, match="novel"):
            self.store.append(one | {"novel": 1})
        del one[name]
        with pytest.raises(KeyError, match=name):
            self.store.append(one)
        with pytest.raises(KeyError, match=name):
            self.store.extend({key: [value] for key, value in one.items()})

    @rule()
    def refuse_a_dataset(self) -> None:
        with pytest.raises(MouseError, match="reward"):
            self.store.from_dataset(pa.table({"action": [0], "done": [0]}))
        if self.rows:
            with pytest.raises(MouseError, match="reward"):
                self.store.from_dataset(pa.table({"action": [0], "done": [0], "reward": [1]}))

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshots = [*self.snapshots[-3:], (self.store.snapshot(), len(self.rows))]

    @invariant()
    def holds_its_rows(self) -> None:
        assert len(self.store) == len(self.rows)
        if not self.rows:
            return
        assert self.store[len(self.rows) - 1] == self.rows[-1]
        length = min(len(self.rows), 7)
        arrays = field_arrays(self.rows[-length:], widths={"q_star": 3, "obs_continuous": 4})
        found = BatchSource(self.store, length, 1, sampling="last")[0]
        wanted = windows(arrays, [0], length)
        for name, array in found.items():
            if name in wanted:
                assert_same({name: array}, {name: wanted[name]})

    def teardown(self) -> None:
        for snapshot, count in [*self.snapshots, (self.store.snapshot(), len(self.rows))]:
            assert snapshot.num_rows == count
            if count:
                arrays = field_arrays(self.rows[:count], widths={"q_star": 3, "obs_continuous": 4})
                source = BatchSource(snapshot, count, 1, sampling="last")
                assert_same(source[0], windows(arrays, last_starts(count, count, 1), count))
        if self.rows:
            assert [dict(one) for one in self.store.to_dataset()] == self.rows


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=7, stateful_step_count=20)


@given(world=worlds(), wanted=parts(max_parts=1), begin=st.integers(0, 5))
def test_encoded_rows_are_rows_of_batches(world: World, wanted: list[Part], begin: int) -> None:
    """What a dataset yields, encoded, is what the fields of a batch hold for these rows."""
    with tempfile.TemporaryDirectory() as folder:
        kind = "memory" if wanted[0].kind in ("append", "extend", "table", "dict") else wanted[0].kind
        built = build(world, [Part(kind, wanted[0].count, wanted[0].seed)], Path(folder))
        rows = built.rows[begin:]
        if not rows:
            return
        encoded = built.store.encode_hf_rows({name: [one[name] for one in rows] for name in rows[0]})
        wanted_arrays = field_arrays(rows, widths=world.widths, custom=CUSTOM_RULES)
        assert_same(encoded, wanted_arrays)
        assert len(built.store) == len(built.rows)


def test_encode_hf_rows_knows_the_widths_of_a_store_with_or_without_rows() -> None:
    store = DatasetStore(max_action_dim=3, max_obs_continuous_dim=2)
    columns: dict[str, Any] = {"action": [1, 2], "reward": [0.5, 1.0], "done": [0, 2]}
    columns["observation"] = [[1.0], [2.0, 3.0]]
    inf = np.inf
    assert_same(
        store.encode_hf_rows({**columns, "metadata_q_star": [[1.0], None]}),
        {
            "action": np.array([1, 2]),
            "reward": np.array([0.5, 1.0], np.float32),
            "done": np.array([0, 2]),
            "q_star": np.array([[1.0, -inf, -inf], [-inf] * 3], np.float32),
            "obs_continuous": np.array([[1.0, 0.0], [2.0, 3.0]]),
        },
    )
    assert len(store) == 0
    known = DatasetStore().from_dataset(pa.table(columns | {"observation": [[1.0, 2.0, 3.0], [4.0]]}))
    encoded = known.encode_hf_rows(columns | {"observation": [[4.0], [1.0, 2.0, 3.0]]})
    assert encoded["obs_continuous"].tolist() == [[4.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
    with pytest.raises(DataError, match="done"):
        store.encode_hf_rows({"action": [1], "reward": [0.5], "done": [7]})
    with pytest.raises(KeyError, match="reward"):
        store.encode_hf_rows({"action": [1], "done": [0]})
    store.append({"action": np.array([1, 2, 3]), "reward": 0.5, "done": 0})
    with pytest.raises(DataError, match="action: expected int64, found float64"):
        store.encode_hf_rows({"action": [[1.5, 2, 3]], "reward": [0], "done": [0]})


def test_properties_and_repr() -> None:
    store = DatasetStore(alignment="outgoing", fields=[Field("log_prob")])
    assert (store.alignment, store.columns, len(store)) == ("outgoing", {}, 0)
    store.append(row(log_prob=-1.0))
    assert all(word in repr(store) for word in ("1", "outgoing", "log_prob"))
    assert "log_prob" in repr(store.snapshot())
    assert store.snapshot().alignment == BatchSource(store, 1, 1).spec.alignment == "outgoing"
    store.columns["x"] = pa.int8()
    store.fields.clear()
    assert list(store.columns) == ["action", "reward", "done", "log_prob"]
    assert {"action", "log_prob"} <= store.fields.keys()
