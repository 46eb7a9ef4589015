"""Rows of every kind, one after the other: what is refused leaves nothing behind, whatever comes before and after."""

import weakref
from collections import OrderedDict, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.errors import DataError, MissingFieldError, MouseError, SchemaError
from mouse_core.formats.columns import schema_of
from mouse_core.metadata import DatasetMetadata
from mouse_core.replay import ArrayStorage, ListStorage, MemmapStorage, ReplayBuffer
from mouse_core.rollouts import RolloutStorage
from mouse_core.spec import Unbounded
from tests.core.oracle import Rule, assert_same, field_arrays
from tests.core.test_store import everything

FIELDS = [Field("grid", dtype="float32", shape=(2, 2), fill=7.0), Field("flag", dtype="bool"), Field("note_length")]
RULES = [
    Rule("grid", "grid", "float32", fill=7),
    Rule("flag", "flag", "bool"),
    Rule("note_length", "note_length", "float32"),
]
# For each column values that are taken, and what they are; and values that are refused.
TAKEN: dict[str, list[tuple[Any, Any]]] = {
    "action": [(1, 1), (np.int64(2), 2), (np.int8(0), 0), (True, 1), (np.bool_(False), 0), (np.array(2), 2)],
    "reward": [
        (0.5, 0.5),
        (3, 3.0),
        (np.float32(0.25), 0.25),
        (float("nan"), float("nan")),
        (np.uint64(2), 2.0),
        (np.array([0.5]), 0.5),
    ],
    "done": [(0, 0), (2, 2), (np.uint8(1), 1), ([2], 2)],
    "episode_step": [(5, 5), (None, None), (np.int32(7), 7), (np.array([1]), 1)],
    "observation": [
        (np.array([1.0, 2.0, 3.0], np.float32), [1.0, 2.0, 3.0]),
        (np.array([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]),
        (np.arange(6, dtype=np.float32)[::2], [0.0, 2.0, 4.0]),
        (np.arange(3, dtype=">f4"), [0.0, 1.0, 2.0]),
        ([4, 5, 6], [4.0, 5.0, 6.0]),
        (np.array([1.0, 2.0], np.float32), [1.0, 2.0]),
        ([9.0], [9.0]),
        (np.zeros(0, np.float32), []),
        ([], []),
    ],
    "metadata_q_star": [(np.array([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]), (None, None), ([1.5], [1.5])],
    "grid": [
        (np.eye(2, dtype=np.float32), [[1.0, 0.0], [0.0, 1.0]]),
        (None, None),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    ],
    "flag": [(True, True), (np.bool_(False), False), (np.array(True), True)],
    "note_length": [(np.float32(1.5), 1.5), (2, 2.0), (0.5, 0.5), (float("-inf"), float("-inf"))],
    "note": [("a", "a"), (None, None), ("bb", "bb")],
}
REFUSED: dict[str, list[Any]] = {
    "action": [3, -1, 0.5, None, "1", np.array([1]), np.uint64(2**63)],
    "reward": ["0.5", None, np.array([0.5, 1]), np.array([[0.5]]), 1j],
    "done": [3, np.int8(-1), True + 2, np.array([0, 0]), [3], []],
    "episode_step": [0.5, "now", np.array([0.5])],
    "observation": [
        None,
        np.zeros(4, np.float32),
        np.zeros((1, 3), np.float32),
        np.float32(1),
        np.zeros(3, np.complex64),
        b"\0" * 12,
        [1.0, "2"],
    ],
    "metadata_q_star": [np.zeros(4), [[1.0]]],
    "grid": [np.zeros(4, np.float32), np.zeros((2, 3), np.float32), [[1.0, 2.0]]],
    "flag": [2, 0.5, None, "True"],
    "note_length": [1e300, None, np.float64(-1e39)],
    "note": [5, ["a"]],
}


WIDTHS = {"q_star": 3, "obs_continuous": 3}


def make_store() -> DatasetStore:
    return DatasetStore(max_action_dim=3, max_obs_continuous_dim=3, fields=FIELDS)


def first_row() -> dict[str, Any]:
    return {name: values[0][0] for name, values in TAKEN.items()} | {"note_length": np.float32(0)}


def plain_first_row() -> dict[str, Any]:
    return {name: values[0][1] for name, values in TAKEN.items()} | {"note_length": 0.0}


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """A row, what it is, and the column whose value is refused, if any. Most values are as most values are."""
    row, plain = first_row(), plain_first_row()
    for name in draw(st.sets(st.sampled_from(list(TAKEN)), max_size=3)):
        row[name], plain[name] = draw(st.sampled_from(TAKEN[name]))
    wrong = draw(st.none() | st.sampled_from(list(TAKEN)))
    if wrong is not None:
        row[wrong] = draw(st.sampled_from(REFUSED[wrong]))
    names = draw(st.permutations(list(row))) if draw(st.booleans()) else list(row)
    return {name: row[name] for name in names}, plain, wrong


@given(given_rows=st.lists(rows(), max_size=12))
def test_a_refused_row_leaves_nothing(given_rows: list[tuple[dict[str, Any], dict[str, Any], str | None]]) -> None:
    store = make_store()
    store.append(first_row())
    wanted = [plain_first_row()]
    for row, plain, wrong in given_rows:
        if wrong is None:
            store.append(row)
            wanted.append(plain)
        else:
            with pytest.raises(DataError, match=rf"column '{wrong}': .* at row {len(wanted)}"):
                store.append(row)
        assert len(store) == len(wanted)
    assert_same(everything(store), field_arrays(wanted, custom=RULES, widths=WIDTHS))
    assert [row["note"] for row in store.to_dataset()] == [row["note"] for row in wanted]


@pytest.mark.parametrize("name", TAKEN)
def test_every_value_is_taken_or_refused_in_the_first_rows(name: str) -> None:
    """Also where it is the row that the block before has no room for."""
    store = make_store()
    for _ in range(1024):
        store.append(first_row())
    for value in REFUSED[name]:
        with pytest.raises(DataError, match=rf"column '{name}': .* at row 1024"):
            store.append(first_row() | {name: value})
        assert len(store) == 1024
    for value, _ in TAKEN[name]:
        store.append(first_row() | {name: value})
    wanted = [plain_first_row()] * 1024 + [plain_first_row() | {name: plain} for _, plain in TAKEN[name]]
    assert_same(everything(store), field_arrays(wanted, custom=RULES, widths=WIDTHS))


def test_a_dict_that_makes_up_values_is_not_asked_for_any() -> None:
    store = make_store()
    store.append(first_row())
    less = {name: value for name, value in first_row().items() if name != "reward"}
    with pytest.raises(MissingFieldError, match="'reward'"):
        store.append(defaultdict(float, less))
    with pytest.raises(MissingFieldError, match="'reward'"):
        store.append(defaultdict(float, less | {"other": 1}))
    with pytest.raises(SchemaError, match="'other'"):
        store.append(first_row() | {"other": 1})
    store.append(defaultdict(float, first_row()))
    store.append(OrderedDict(first_row()))
    assert len(store) == 3


def _rows(**changed: Any) -> dict[str, Any]:
    count = np.arange(4)
    return {"observation": np.zeros((4, 2)), "action": count, "done": count * 0, "reward": count + 0.5} | changed


def _taken(many: bool, **changed: Any) -> list[dict[str, Any]]:
    store, rows = DatasetStore(), _rows(**changed)
    if many:
        store.extend(rows)
    else:
        for number in range(4):
            store.append({name: values[number] for name, values in rows.items()})
    return [{name: row[name] for name in changed} for row in store]


@pytest.mark.parametrize("many", [False, True])
def test_what_a_mask_hides_is_null_or_refused(many: bool) -> None:
    masked, count = np.ma.masked_array, np.arange(4)
    assert _taken(many, episode_step=masked(count, count == 2))[1:3] == [{"episode_step": 1}, {"episode_step": None}]
    assert _taken(many, metadata_x=masked(count * 1.0, count < 2))[1:3] == [{"metadata_x": None}, {"metadata_x": 2.0}]
    rows = masked(np.ones((4, 2)), np.array([[1, 1], [0, 0], [0, 0], [1, 1]]))
    assert _taken(many, metadata_x=rows)[2:] == [{"metadata_x": [1.0, 1.0]}, {"metadata_x": None}]
    assert _taken(many, metadata_x=masked(np.array(list("abcd")), count == 0))[0] == {"metadata_x": None}
    assert _taken(many, reward=masked(count + 0.5))[3] == {"reward": 3.5}  # hides nothing
    with pytest.raises(DataError, match=r"column 'reward': expected a value.* at row 2"):
        _taken(many, reward=masked(count + 0.5, count == 2))
    part = masked(np.ones((4, 2)), np.array([[0, 0], [0, 1], [0, 0], [0, 0]]))
    for name in ("observation", "metadata_x"):
        with pytest.raises(DataError, match=f"column '{name}': expected a value, found a masked value .* at row 1"):
            _taken(many, **{name: part})


def test_masked_arrays_in_a_list_are_masked() -> None:
    ones, hidden = np.ones(2), np.ma.masked_array(np.ones(2), [1, 1])
    taken = [row["metadata_x"] for row in _taken(True, metadata_x=[hidden, ones, ones, None])]
    assert taken == [None, [1, 1], [1, 1], None]
    with pytest.raises(DataError, match=r"'observation': expected a value, found a masked value .* at row 3"):
        _taken(True, observation=[ones, ones, ones, hidden])


STAMP = 1764345600123456789


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32", "uint8", "float32"])
def test_arrays_of_numbers_keep_their_dtype(many: bool, dtype: str) -> None:
    largest = np.iinfo(dtype).max if dtype[0] != "f" else 2**24
    values = np.array([[largest - number, number] for number in range(4)], dtype)
    for rows in (values, values[:, 0], list(values)):
        taken = _taken(many, observation=rows)
        assert [row["observation"] for row in taken] == [row.tolist() for row in rows]
    store = DatasetStore()
    store.extend(_rows(observation=values))
    assert store.columns["observation"].value_type == dtype.replace("float32", "float")
    small = DatasetStore(max_obs_continuous_dim=1)
    small.extend(_rows(observation=values[:, 1]))
    assert small.snapshot().spec["obs_continuous"].dtype == np.float64
    assert BatchSource(small, 4, 1, sampling="sequential")[0]["obs_continuous"].ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("many", [False, True])
def test_integers_that_a_float_does_not_hold_are_refused(many: bool) -> None:
    exact = "expected whole numbers that float64 represents exactly .*found 1764345600123456789 at row 2"
    numbers = [0.5, 1, STAMP, 2]
    with pytest.raises(DataError, match=f"'reward': {exact}"):
        _taken(many, reward=numbers)
    with pytest.raises(DataError, match=f"'observation': {exact}"):
        _taken(many, observation=[[0.5], [1], [STAMP], [2]])
    exact_ones = [0.5, 2**60, -(2**53), 1e300]
    assert [row["reward"] for row in _taken(many, reward=exact_ones)] == exact_ones
    assert _taken(many, observation=[[STAMP]] * 4)[3] == {"observation": [STAMP]}  # of whole numbers alone


def test_integers_that_a_batch_does_not_hold_are_refused() -> None:
    """A batch has observations as float64; a field of integers delivers them as they are."""
    stamps = np.array([[STAMP + number] for number in range(4)])
    rows = _rows(observation=stamps)
    table = pa.table({name: values if values.ndim == 1 else values.tolist() for name, values in rows.items()})
    whole = [Field("obs_continuous", column="observation", dtype="int64")]
    for fill in (lambda store: store.extend(rows), lambda store: store.from_dataset(table)):
        store, other = DatasetStore(), DatasetStore(fields=whole)
        fill(store)
        fill(other)
        for dtypes in ({}, {"obs_continuous": "float32"}):
            with pytest.raises(DataError, match="obs_continuous: expected whole numbers that float64 represents"):
                BatchSource(store, 4, 1, dtypes=dtypes)[0]
        found = BatchSource(other, 4, 1, sampling="sequential")[0]["obs_continuous"]
        assert found.ravel().tolist() == stamps.ravel().tolist()


EMPTY_FIRST: list[list[Any]] = [
    [[], [1.0, 2.0], []],
    [[], ["a"], None],
    [None, [], [1]],
    [[[]], [[1]], []],
    [[None], [1], []],
    [[], [{"a": 1}], []],
    [[], [], None],
]


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_first_value_of_nothing_bars_no_others(where: str, tmp_path: Path) -> None:
    columns = {f"metadata_{number}": values for number, values in enumerate(EMPTY_FIRST)}
    rows = [plain_first_row() | {name: values[row] for name, values in columns.items()} for row in range(3)]
    for way, cuts in {"one by one": (0, 1, 2, 3), "together": (0, 3), "after another": (0, 1, 3)}.items():
        store = DatasetStore() if where == "memory" else DatasetStore.open(tmp_path / way, "a")
        for begin, end in pairwise(cuts):
            store.append(rows[begin]) if way == "one by one" else store.extend(rows[begin:end])
        made = store.to_dataset()
        for name, values in columns.items():
            assert [row[name] for row in store] == made[name][:] == values
        if where == "folder":
            store.close()
            with DatasetStore.open(tmp_path / way, "a") as again:
                again.extend(rows)
                for name, values in columns.items():
                    assert [row[name] for row in again] == values * 2


def test_bytes_that_no_field_reads_are_any(tmp_path: Path) -> None:
    values = [b"abc", b"", None, b"\x00\xff"]
    rows = [{**plain_first_row(), "metadata_blob": value} for value in values]
    for store in (DatasetStore(), DatasetStore.open(tmp_path / "folder", "a")):
        store.extend(rows)
        store.append(rows[3])
        assert [row["metadata_blob"] for row in store] == [*values, values[3]]
        store.close()
    with DatasetStore.open(tmp_path / "folder", "a") as store:
        store.extend(rows[2:])
        assert store[-1]["metadata_blob"] == values[3]
    with pytest.raises(DataError, match="expected a readable image"):
        DatasetStore(fields=[Field("metadata_blob", image=True)]).extend(rows)


def test_nested_dicts_are_told_what_to_do() -> None:
    parts, store = {"a": np.zeros((3, 2)), "b": np.zeros(3), "c": np.zeros(3)}, DatasetStore()
    three = {name: values[:3] for name, values in _rows().items()}
    one = {name: values[0] for name, values in _rows().items()} | {"observation": {"a": 1.0, "b": [2.0]}}
    nested = r"column 'observation': .* found a dict of \['a', 'b', 'c'\]; pass each part .*"
    own = r"give each part of the dict as a column of its own, such as 'observation\.a'"
    named = "reads this column: give other values another name, such as '{}_values'"
    for add, rows, message in (
        (store.extend, three | {"observation": parts}, nested),
        (store.extend, _rows() | {"observation": parts}, nested),
        (store.append, one, own),
        (store.extend, [one], own),
        (store.extend, _rows() | {"observation_image": np.zeros((4, 3))}, named.format("observation_image")),
        (store.extend, _rows() | {"observation_discrete": np.zeros((4, 3))}, named.format("observation_discrete")),
    ):
        with pytest.raises(DataError, match=message):
            add(rows)
    store.append(plain_first_row() | {"metadata_parts": {"a": 1, "b": [2.0]}})
    assert store[0]["metadata_parts"] == {"a": 1, "b": [2.0]}


NO_TEXT = "obs_\ud800"


@pytest.mark.parametrize(
    "call",
    [
        lambda _: DatasetStore().extend({"action": [0], "reward": [0.0], "done": [0], NO_TEXT: [1.0]}),
        lambda _: DatasetStore().append({"action": 0, "reward": 0.0, "done": 0, NO_TEXT: 1.0}),
        lambda path: DatasetStore.open(path, "a").append({"action": 0, "reward": 0.0, "done": 0, NO_TEXT: 1.0}),
        lambda _: DatasetStore().from_dataset(pa.ipc.open_stream(_stream_with_a_bad_name()).read_all()),
        lambda _: Field(NO_TEXT),
        lambda _: Field("x", column=NO_TEXT),
        lambda _: DatasetStore(spec={NO_TEXT: Unbounded((2,))}),
        lambda _: DatasetMetadata(environments=[NO_TEXT]),
        lambda _: DatasetMetadata(dimensions={"action": [NO_TEXT]}),
        lambda _: ReplayBuffer(ArrayStorage(4)).append({"x": {NO_TEXT: 1.0}}),
        lambda _: ReplayBuffer(ListStorage(4)).append({"x": {NO_TEXT: 1.0}}),
        lambda path: ReplayBuffer(MemmapStorage(4, path)).extend({NO_TEXT: [1.0]}),
        lambda _: RolloutStorage(2, 3, {NO_TEXT: (2,)}),
        lambda _: schema_of({NO_TEXT: np.zeros(2)}),
    ],
)
def test_a_name_that_is_no_text_is_refused(call: Any, tmp_path: Path) -> None:
    with pytest.raises(MouseError, match="expected"):
        call(tmp_path / "there")


def _stream_with_a_bad_name() -> bytes:
    table, sink = pa.table({"action": [0], "reward": [0.0], "done": [0], "obs_xyz": [1.0]}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue().to_pybytes().replace(b"obs_xyz", b"obs_\xed\xa0\x80"))


def test_a_store_that_is_dropped_is_gone() -> None:
    """At once: its memory is large, and must not wait for the garbage collector."""
    store = make_store()
    store.append(first_row())
    store.snapshot()
    gone = weakref.ref(store)
    del store
    assert gone() is None


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("values", [[[1.5, 2.0], [], [3.0]], [[1, 2], [], [3]]])
def test_an_empty_list_in_a_padded_field_is_all_padding_however_it_comes(values: list[Any], many: bool) -> None:
    columns: dict[str, Any] = {"action": [0] * 3, "reward": [0.0] * 3, "done": [0] * 3}
    columns |= {"observation": values, "metadata_q_star": values}
    recorded, appended = DatasetStore().from_dataset(pa.table(columns)), DatasetStore()
    if many:
        appended.extend(columns)
    else:
        for row in range(3):
            appended.append({name: column[row] for name, column in columns.items()})
    assert appended[1] == recorded[1]
    for name in ("obs_continuous", "q_star"):
        one, other = (
            store.snapshot().readers[name].read(store.snapshot().locate(np.arange(3), 1).part(0), np.dtype("float64"))
            for store in (recorded, appended)
        )
        np.testing.assert_array_equal(one, other)


class Wrapped:
    """An array of another library, as far as NumPy knows it."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values if dtype is None else self.values.astype(dtype)


@pytest.mark.parametrize(
    "kind", [Wrapped, np.array, lambda value: memoryview(np.array([value]).reshape(np.shape(value)))]
)
@pytest.mark.parametrize("first", [True, False])
def test_whatever_is_an_array_to_numpy_is_taken(kind: Any, first: bool) -> None:
    store = make_store()
    if not first:
        store.append(first_row())
    plain = {"action": 1, "reward": 0.5, "done": 0, "observation": [1.0, 2.0, 3.0], "flag": True}
    store.append(first_row() | {name: kind(value) for name, value in plain.items()})
    store.append(first_row())
    assert_same(
        {name: values[-2:-1] for name, values in everything(store).items()},
        field_arrays([plain_first_row() | plain], custom=RULES, widths=WIDTHS),
    )


@pytest.mark.parametrize("bad", [1, 2])
def test_a_pixel_out_of_range_is_refused_with_its_row(bad: int) -> None:
    store = DatasetStore()
    steps = {"action": [0] * 4, "reward": [0.0] * 4, "done": [0] * 4}
    store.extend(steps | {"observation_image": np.zeros((4, 2, 2, 3), np.uint8)})
    pixels = np.zeros((4, 2, 2, 3), np.int64)
    pixels[0, 0, 0] = [0, 255, 1]
    store.extend(steps | {"observation_image": pixels})
    pixels[bad, 1, 0, 2] = 256
    with pytest.raises(DataError, match=rf"expected 0\.\.255, found 256 at row {8 + bad}$"):
        store.extend(steps | {"observation_image": pixels})
    assert len(store) == 8


def test_a_vector_of_one_value_follows_a_number() -> None:
    store = DatasetStore()
    for value in (1.5, [2.5], np.array([3.5])):
        store.append({"action": 0, "reward": 0.0, "done": 0, "observation": value})
    assert store.to_dataset()["observation"][:] == [1.5, 2.5, 3.5]
    with pytest.raises(DataError, match="'observation': expected a single number, found shape"):
        store.append({"action": 0, "reward": 0.0, "done": 0, "observation": [1.0, 2.0]})
    with pytest.raises(DataError, match="'reward': expected a single number, found shape"):
        store.append({"action": 0, "reward": [0.0, 0.0], "done": 0, "observation": 1.0})
