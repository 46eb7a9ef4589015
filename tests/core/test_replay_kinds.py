"""Rows that differ in length: text, bytes and ragged arrays, in every storage, beside fields of one shape."""

import json
import pickle
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, DataError, SchemaError, StateError
from mouse_core.replay import (
    ArrayStorage,
    Compress,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    NextView,
    NStep,
    Pad,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
)
from tests.raising import assert_raises

KINDS = ["list", "array", "memmap"]
RAGGED: list[Any] = ["tokens", ("frames", "points")]


def made(kind: str, capacity: int, folder: Path, **options: Any) -> Any:
    if kind == "memmap":
        return MemmapStorage(capacity, tempfile.mkdtemp(dir=folder), **options)
    return (ListStorage if kind == "list" else ArrayStorage)(capacity, **options)


def row_of(number: int, lengths: random.Random) -> dict[str, Any]:
    return {
        "prompt": f"é{number}" * lengths.choice([0, 1, 3, 400]),
        "raw": b"\0" * lengths.randrange(3) + bytes([number % 256]),
        "tokens": np.arange(number, number + lengths.choice([0, 2, 90]), dtype=np.int32),
        "frames": {"points": np.full((lengths.randrange(4), 2), number, np.float32)},
        "reward": float(number),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@given(seed=st.integers(0, 1 << 20), kind=st.sampled_from(KINDS), capacity=st.sampled_from([1, 3, 7]))
def test_every_storage_gives_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str, capacity: int
) -> None:
    random_of = random.Random(seed)
    storage = made(kind, capacity, tmp_path_factory.mktemp("kinds"), ragged=RAGGED)
    buffer = ReplayBuffer(storage, batch_size=4)
    rows: list[Any] = [None] * capacity
    written = 0
    for step in range(25):
        chosen = random_of.random()
        if chosen < 0.4:
            rows[written % capacity] = row_of(step, random_of)
            buffer.append(rows[written % capacity])
            written += 1
        elif chosen < 0.75:
            many = [row_of(step * 10 + n, random_of) for n in range(random_of.randint(1, 2 * capacity))]
            buffer.extend(many)
            for row in many:
                rows[written % capacity] = row
                written += 1
        elif chosen < 0.9 and written:
            for slot in random_of.sample(range(min(written, capacity)), random_of.randint(1, min(written, capacity))):
                rows[slot] = row_of(1000 + slot, random_of)
                buffer[slot] = rows[slot]
        elif kind == "memmap":
            buffer = pickle.loads(pickle.dumps(buffer))  # opens the files again
        else:
            state = pickle.loads(pickle.dumps(buffer.state_dict()))
            buffer = ReplayBuffer(type(storage)(capacity, ragged=RAGGED), batch_size=4)
            buffer.load_state_dict(state)
        for slot in range(min(written, capacity)):
            assert same(rows[slot], buffer[slot])
        if written:
            batch = buffer.sample()
            assert isinstance(batch["tokens"], list)
            assert isinstance(batch["prompt"], list)
            assert batch["reward"].shape == (4,)
            for place, slot in enumerate(batch["index"].tolist()):
                assert batch["prompt"][place] == rows[slot]["prompt"]
                assert batch["raw"][place] == rows[slot]["raw"]
                assert same(batch["tokens"][place], rows[slot]["tokens"])
                assert same(batch["frames"]["points"][place], rows[slot]["frames"]["points"])


def test_rings_are_made_smaller_and_overwritten_objects_do_not_count(tmp_path: Path) -> None:
    for kind in ("array", "memmap"):
        buffer = ReplayBuffer(made(kind, 4, tmp_path), writer=MaxValueWriter("rank"), batch_size=2)
        buffer.append({"text": "x" * 10, "rank": 1e9})  # the row that stays
        for number in range(150):
            buffer.append({"text": f"{number:03}" * 400, "rank": float(number)})
        assert sorted(len(text) for text in buffer[:]["text"]) == [10, 1200, 1200, 1200]
        assert buffer[0]["text"] == "x" * 10
        assert buffer.storage.nbytes < 40_000
    buffer = ReplayBuffer(ListStorage(2), batch_size=2)
    buffer.extend([{"x": "text"}, {"x": 1.0}])
    assert isinstance(buffer.sample()["x"], list)
    buffer.append({"x": 2.0})
    assert buffer.sample()["x"].dtype == np.float64
    buffer[1] = {"x": np.zeros(3)}
    assert isinstance(buffer.sample()["x"], list)


MIXTURES: list[tuple[list[Any], Any]] = [
    ([1, 2.5], np.float64),
    ([np.float32(1), 2], np.float32),
    ([np.float32(1), np.float64(2)], np.float64),
    ([np.int8(1), np.int64(2)], np.int64),
    ([True, False], np.bool_),
    ([True, 2], list),
    ([np.int64(1), np.uint64(2)], list),
    ([1, "text"], list),
    ([1, None], list),
    ([np.zeros(2), np.zeros(3)], list),
    ([np.zeros(2), [1, 2]], np.float64),
    ([[1, 2], [1, 2, 3]], list),
    ([2**70, 1], list),
    (["a", "a"], list),
    ([{1}, {2}], list),
]


@pytest.mark.parametrize(("values", "wanted"), MIXTURES)
def test_what_a_field_of_objects_is_does_not_depend_on_the_rows_drawn(values: list[Any], wanted: Any) -> None:
    buffer = ReplayBuffer(ListStorage(4), batch_size=1)
    for value in values:
        buffer.append({"x": value})
    batches = [buffer.sample() for _ in range(12)]
    assert {int(batch["index"][0]) for batch in batches} == {0, 1}
    for batch in batches:
        found, value = batch["x"], values[int(batch["index"][0])]
        if wanted is list:
            assert isinstance(found, list)
            np.testing.assert_equal(found[0], value)
        else:
            assert found.dtype == wanted
            np.testing.assert_array_equal(found[0], value)
    # Rows that are no more do not count.
    buffer.empty()
    buffer.extend([{"x": 1}, {"x": 2}])
    assert buffer.sample()["x"].dtype == np.int64


def episodes(count: int) -> list[dict[str, Any]]:
    return [
        {"text": f"{n}" * (n % 5), "x": np.arange(n % 4), "reward": float(n), "done": n % 6 == 5} for n in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_slices_steps_ahead_priorities_and_pads(kind: str, tmp_path: Path) -> None:
    storage = made(kind, 40, tmp_path)
    slices = ReplayBuffer(storage, SliceSampler(sequence_length=4), batch_size=3)
    slices.extend(episodes(30))
    batch = slices.sample()
    for row in range(3):
        for step in range(4):
            slot = int(batch["index"][row, step])
            assert batch["text"][row][step] == f"{slot}" * (slot % 5)
            assert batch["x"][row][step].tolist() == list(range(slot % 4))
    ahead = ReplayBuffer(storage, PrioritizedSampler(), transform=NStep(3, 0.9), batch_size=5)
    batch = ahead.sample()
    for place, slot in enumerate(batch["index"].tolist()):
        assert batch["text"][place] == f"{slot}" * (slot % 5)
    buffer = ReplayBuffer(made(kind, 9, tmp_path, ragged=["x"]), transform=Pad(length=4, value=-1), batch_size=6)
    buffer.extend([{"x": np.arange(n), "text": "t" * n} for n in range(5)])
    batch = buffer.sample()
    assert (batch["x"].shape, batch["x_mask"].dtype) == ((6, 4), np.bool_)
    for place, slot in enumerate(batch["index"].tolist()):
        assert batch["x"][place].tolist() == list(range(slot)) + [-1] * (4 - slot)
        assert batch["x_mask"][place].tolist() == [True] * slot + [False] * (4 - slot)
    assert isinstance(batch["text"], list)


def test_checkpoints_ensembles_and_environments_of_all_kinds(tmp_path: Path) -> None:
    members = [ReplayBuffer(made(kind, 40, tmp_path)) for kind in KINDS]
    for member in members:
        member.extend(episodes(30))
    batch = ReplayBufferEnsemble(*members, batch_size=9).sample()
    assert batch["text"] == [f"{slot}" * (slot % 5) for slot in batch["index"].tolist()]
    assert [len(x) for x in batch["x"]] == [slot % 4 for slot in batch["index"].tolist()]
    for storage in (ArrayStorage(6, ndim=2), MemmapStorage(6, tmp_path / "time", ndim=2)):
        buffer = ReplayBuffer(storage, batch_size=2)
        buffer.extend({"text": [["a", "bb"], ["ccc", ""]], "r": np.arange(4.0).reshape(2, 2)})
        buffer.append({"text": ["five", "6"], "r": np.array([4.0, 5.0])})
        assert buffer[:]["text"] == ["a", "bb", "ccc", "", "five", "6"]
        with pytest.raises((SchemaError, DataError), match="environments"):
            buffer.append({"text": ["one"], "r": np.array([4.0, 5.0])})
    buffer = ReplayBuffer(ArrayStorage(20), batch_size=4)
    buffer.extend(episodes(30))
    buffer.dumps(tmp_path / "c")
    for storage in (ArrayStorage(20), MemmapStorage(20, tmp_path / "mapped")):
        other = ReplayBuffer(storage, batch_size=4)
        other.loads(tmp_path / "c")
        assert other[:]["text"] == buffer[:]["text"]
        assert other.sample()["index"].tolist() == buffer.sample()["index"].tolist()
        buffer.loads(tmp_path / "c")


def test_pad_left_truncated_in_slices_and_refused() -> None:
    rows = np.empty((1, 2), object)
    rows[0, 0], rows[0, 1] = np.arange(5), np.arange(1)
    batch = {"next": {"x": rows}, "index": np.zeros((1, 2), np.int64)}
    found = Pad(("next", "x"), length=3, side="left", truncate=True)(batch)["next"]
    assert found["x"].tolist() == [[[2, 3, 4], [0, 0, 0]]]
    assert found["x_mask"].tolist() == [[[True] * 3, [False, False, True]]]
    assert_raises(DataError, "up to 3, found length 5", Pad(length=3), batch)
    assert_raises(DataError, "pad with", Pad(value=0.5), batch)
    with pytest.raises(SchemaError, match="text must become numbers"):
        Pad("t")({"t": np.array(["a", "bb"], object), "index": np.zeros(2, np.int64)})
    assert_raises(ConfigError, "length", Pad, length=0)
    assert Pad()(batch)["next"]["x"].shape == (1, 2, 5)
    buffer = ReplayBuffer(ArrayStorage(40), SliceSampler(sequence_length=8, strict_length=False, pad=0), batch_size=4)
    buffer.extend(episodes(30))
    batch = buffer.sample()
    for row, step in np.argwhere(~batch["mask"]).tolist():
        assert batch["text"][row][step] == ""
        assert batch["x"][row][step].size == 0


@pytest.mark.parametrize("kind", ["array", "memmap"])
def test_rows_that_do_not_fit_or_differ_in_length_change_nothing(kind: str, tmp_path: Path) -> None:
    storage = made(kind, 9, tmp_path)
    storage.append([{"t": "a", "x": np.arange(2.0), "n": 1}, {"t": "bb", "x": np.arange(3.0), "n": 2}])
    for bad in (
        {"t": 1},
        {"t": b"a"},
        {"t": None},
        {"x": np.arange(2)},
        {"x": np.zeros((2, 2))},
        {"x": 1.0},
        {"x": "text"},
        {"n": "text"},
        {"n": np.arange(2)},
    ):
        with pytest.raises((SchemaError, DataError), match=f"{next(iter(bad))!r}"):
            storage.append({"t": "", "x": np.zeros(1), "n": 1, **bad}, one=True)
    with pytest.raises(DataError, match="rows as in"):
        storage.append({"t": ["a", "b"], "x": [np.zeros(1)], "n": np.zeros(2, np.int64)})
    assert storage.get(np.arange(2))["t"].tolist() == ["a", "bb"]
    assert (len(storage), storage.written) == (2, 2)
    says = r"pass ragged=\['x'\] or use a ListStorage"
    buffer = ReplayBuffer(made(kind, 9, tmp_path))
    buffer.append({"x": np.zeros((1, 2)), "n": 0})
    for write in (
        lambda: buffer.append({"x": np.zeros((2, 2)), "n": 0}),
        lambda: buffer.extend({"x": np.zeros((4, 2, 2)), "n": np.zeros(4, int)}),
        lambda: buffer.extend([{"x": np.zeros((1, 2)), "n": 0}, {"x": np.zeros((2, 2)), "n": 0}]),
    ):
        assert_raises(SchemaError, says, write)
    with pytest.raises(SchemaError, match=r"ragged=.*ListStorage"):
        buffer.extend({"x": [[[1.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]]], "n": np.zeros(2, int)})
    for other in (np.zeros((1, 3)), np.zeros(1)):  # no such field would take these either
        assert_raises(SchemaError, r"found .*; ListStorage accepts any", buffer.append, {"x": other, "n": 0})
    assert len(buffer) == 1


def test_what_a_ragged_field_or_an_index_cannot_be() -> None:
    storage = ArrayStorage(9)
    storage.append({"x": np.zeros(3)}, one=True)
    assert_raises(SchemaError, r"pass ragged=\['x'\]", storage.append, [{"x": np.zeros(3)}, {"x": np.zeros(4)}])
    with pytest.raises(ConfigError, match="ragged: expected fields among"):
        ArrayStorage(9, ragged=["y"]).append({"x": np.zeros(3)}, one=True)
    storage = ArrayStorage(4)
    storage.append([{"t": "é", "x": np.arange(2)}, {"t": "bb", "x": np.arange(3)}])
    for place, part, value in (
        ("0", "bytes", np.frombuffer(b"\xff\xff\xffbb"[:4], np.uint8)),
        ("0", "lengths", np.array([2, 3])),
        ("0", "lengths", np.array([-1, 5])),
        ("1", "lengths", np.array([15, 25])),
    ):
        state = pickle.loads(pickle.dumps(storage.state()))
        state["columns"][place][part] = value
        assert_raises(StateError, r"'[tx]'", storage.load, state)
        assert storage.get(np.arange(2))["t"].tolist() == ["é", "bb"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_single_row_hears_how_it_is_written(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(made(kind, 9, tmp_path))
    buffer.append({"x": np.zeros(3)})
    assert_raises(SchemaError, r"'x'.*found \[3\]; to write one row, pass \[row\]", buffer.extend, {"x": np.zeros(3)})
    assert buffer.extend([{"x": np.zeros(3)}]).tolist() == [1]


def test_files_of_a_later_format_are_refused_by_name(tmp_path: Path) -> None:
    MemmapStorage(9, tmp_path / "m").append([{"t": "a"}])
    schema = tmp_path / "m" / "schema"
    schema.write_text(json.dumps({**json.loads(schema.read_text()), "format": 3}))
    assert_raises(StateError, "found 3; a newer mouse-data", MemmapStorage, 9, tmp_path / "m")


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_pyarrow_and_pandas_are_rows_and_tables_have_their_remedy(kind: str, tmp_path: Path) -> None:
    large = [1, 2**60 + 1, 3]
    columns = {
        "large": pa.array(large),
        "chunks": pa.chunked_array([[True], [False, True]]),
        "text": pa.array(["a", "", "ü"]),
        "codes": pa.array(["a", "b", "a"]).dictionary_encode(),
        "vector": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        "tokens": pa.array([[1], [2, 3], [4, 5, 6]]),
    }
    buffer = ReplayBuffer(made(kind, 10, tmp_path, ragged=["tokens"]))
    buffer.extend(columns)
    rows = buffer[:] if kind == "list" else [buffer[row] for row in range(3)]
    for row, found in enumerate(rows):
        assert (found["large"], found["chunks"]) == (large[row], row != 1)
        assert (found["text"], found["codes"]) == (["a", "", "ü"][row], "aba"[row])
        assert np.asarray(found["vector"]).tolist() == [1.0, 2.0]
        assert np.asarray(found["tokens"]).tolist() == columns["tokens"][row].as_py()
    frame = pytest.importorskip("pandas").DataFrame({"row": [0, 1, 2], "b": [0.5, 1.5, 2.5]}, index=[2, 1, 0])
    buffer = ReplayBuffer(made(kind, 10, tmp_path))
    for table in (frame, pa.table({"row": [0, 1]})):
        assert_raises(SchemaError, r"rows: expected an array, found (DataFrame|Table); .* is a", buffer.extend, table)
    buffer.extend({name: frame[name] for name in frame})
    assert [buffer[row]["row"] for row in range(3)] == [0, 1, 2]


def test_a_text_of_pyarrow_is_no_array_of_its_bytes_and_an_index_has_no_nulls() -> None:
    buffer = ReplayBuffer(ArrayStorage(10))
    texts = list(pa.array(["a", "bc"]))
    for text in texts:
        buffer.append({"text": text})
    buffer.extend({"text": texts})
    assert buffer[:]["text"] == ["a", "bc"] * 2
    for index in (np.ma.masked_array([0, 1], [False, True]), pa.array([0, None])):
        with pytest.raises(IndexError, match=r"index: expected a value, found a (masked value|null)"):
            buffer[index]


@pytest.mark.parametrize(
    ("values", "row"),
    [
        (pa.array([1.0, None, 3.0]), 1),
        (pa.array([1, 2**60 + 1, None]), 2),
        (pa.chunked_array([[1, 2], [None]]), 2),
        (pa.array([[1.0], [2.0], [None]]), 2),
        (pa.array([[1.0, 1.0], [None, 2.0], [3.0, 3.0]], pa.list_(pa.float32(), 2)), 1),
        (pa.array(["a", None, "a"]).dictionary_encode(), 1),
        (np.ma.masked_array(np.array(["a", "b", "c"], object), [False, True, False]), 1),
    ],
)
def test_values_that_are_not_there_are_refused(values: Any, row: int, tmp_path: Path) -> None:
    for kind in KINDS:
        buffer = ReplayBuffer(made(kind, 10, tmp_path))
        with pytest.raises(DataError, match=rf"field 'x', row {row}: expected a value, found a (null|masked value)"):
            buffer.extend({"x": values})
        assert len(buffer) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_text_bytes_and_times_arrive_in_a_store(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(made(kind, 10, tmp_path))
    steps = {"observation": np.arange(3.0), "action": np.arange(3), "reward": np.zeros(3), "done": [0, 0, 1]}
    times = np.arange(3).astype("datetime64[us]")
    buffer.extend({**steps, "task": ["a", "", "ü"], "raw": [b"1", b"", b"22"], "when": times})
    store = buffer.to_store()
    assert [(row["task"], row["raw"]) for row in store] == [("a", b"1"), ("", b""), ("ü", b"22")]
    assert store.to_dataset().data.column("when").cast(pa.int64()).to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_no_transform_makes_data_of_what_a_mask_hides_and_a_name_is_no_list_of_names(kind: str, tmp_path: Path) -> None:
    images = np.ma.masked_array(np.zeros((2, 4, 4), np.uint8), np.eye(4)[None].repeat(2, 0))
    buffer = ReplayBuffer(made(kind, 10, tmp_path), transform=Compress("x", shape=(4, 4)))
    for write in (
        lambda: buffer.extend({"x": images}),
        lambda: buffer.extend([{"x": images[0]}, {"x": images[1]}]),
        lambda: buffer.append({"x": images[0]}),
        lambda: buffer.check_extend({"x": images}),
    ):
        assert_raises(DataError, "expected a value, found a masked value", write)
    assert len(buffer) == 0
    with pytest.raises(ConfigError, match=r"ragged: expected a list of names, found 'tokens'; write \['tokens'\]"):
        made(kind, 9, tmp_path, ragged="tokens")
    for option in ("action", "outcome", "keep"):
        with pytest.raises(ConfigError, match=rf"NextView: {option}: expected a list of names, found 'task'"):
            NextView(**{option: "task"})
