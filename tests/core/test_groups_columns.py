"""Columns that rollouts have beside those that all have; padding and packing of examples against plain loops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError
from mouse_core.digest import StreamDigest
from mouse_core.groups import (
    GrpoBatchMaker,
    RLExample,
    RolloutBuffer,
    RolloutColumn,
    RolloutRecord,
    Turn,
    concatenate,
    examples_digest,
    make_examples,
    open_rollouts,
    pack,
    pad,
    plan_micro_batches,
)
from tests.raising import assert_raises


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"name": "top-k"}, "expected a name of letters"),
        ({"name": "tokens"}, "expected a name that no attribute of a rollout"),
        ({"per": "group"}, r"per: expected one of \['token', 'example'\], found 'group'"),
        ({"dtype": "str"}, "expected the dtype of numbers"),
        ({"dtype": "float33"}, "expected the dtype of numbers"),
        ({"shape": (0,)}, "expected a shape of positive sizes"),
        ({"dtype": "uint8", "fill": 256}, "expected fill as a value of uint8, found 256"),
        ({"dtype": "uint8", "fill": "a"}, "expected fill as a value of uint8"),
        ({"dtype": "bool", "fill": 1.5}, "expected fill as a value of bool"),
        ({"name": "reward"}, "expected a name that no attribute of a rollout"),
    ],
)
def test_columns_that_cannot_be(options: dict[str, Any], wanted: str) -> None:
    assert_raises(ConfigError, wanted, RolloutColumn, **{"name": "x", **options})


@pytest.mark.parametrize(
    ("column", "given", "count", "wanted"),
    [
        (RolloutColumn("x"), [1.0, 2.0], 3, r"a value for each of 3 tokens, \[3\], found shape \[2\]"),
        (RolloutColumn("x", per="example", shape=(2,)), [1.0], None, r"as one value, \[2\], found shape \[1\]"),
        (RolloutColumn("x", dtype="int32"), [0.5], 1, r"as int32, found float64 \[0.5\]"),
        (RolloutColumn("x", dtype="uint8"), [-1, 3], 2, r"as uint8, found int64 \[-1, 3\]"),
        (RolloutColumn("x", dtype="float16"), [1e9], 1, "as float16"),
        (RolloutColumn("x", dtype="float16"), [70_000], 1, r"as float16, found int64 \[70000\]"),
        (RolloutColumn("x", dtype="float64"), [2**60 + 1], 1, r"as float64, found int64 \[1152921504606846977\]"),
        (RolloutColumn("x", dtype="bool"), [2], 1, "as bool"),
    ],
)
def test_values_that_a_column_does_not_have(column: RolloutColumn, given: Any, count: int | None, wanted: str) -> None:
    assert_raises(DataError, wanted, column.values, given, count, "turn 1")


def test_values_are_finite_unless_a_column_says_otherwise_and_records_hold_copies() -> None:
    given = np.array([[0.0, np.nan], [np.inf, 1.0]])
    with pytest.raises(DataError, match=r"turn 1: expected column 'x' as finite numbers, found nan at \[0, 1\]"):
        RolloutColumn("x", shape=(2,)).taken(given, 2, "turn 1")
    np.testing.assert_array_equal(RolloutColumn("x", shape=(2,), finite=False).taken(given, 2, ""), given)
    # Where none was given there may be NaN, and such a column is the same one when it is declared again.
    one, other = (RolloutColumn("x", fill=float("nan")) for _ in range(2))
    assert {one: 1} == {other: 1}
    assert np.isnan(one.filled(2)).all()
    assert RolloutColumn("x") == RolloutColumn("x", fill=0) != RolloutColumn("x", fill=1)
    given = np.arange(3, dtype=np.int32)
    values = RolloutColumn("x", dtype="int32").values(given, 3, "")
    given[:] = 9
    assert values.tolist() == [0, 1, 2]
    assert not values.flags.writeable
    assert RolloutColumn("x", dtype="float16").values([1, 2], 2, "").dtype == np.float16
    given = np.ones((2, 3), np.uint8)
    turns = [Turn("", "user", [1, 2], columns={"seen": given}) for _ in range(2)]
    assert turns[0] == turns[1]
    given[:] = 7
    assert turns[0].columns["seen"].max() == 1
    assert turns[0] != Turn("", "user", [1, 2], columns={"seen": given})
    example = RLExample([1], [True], [0.0], [0.0], columns={"x": 3}, declared=[RolloutColumn("x", "example")])
    assert example.columns["x"] == 3
    with pytest.raises(DataError, match="expected columns of numbers by name, found 'x'"):
        Turn("", "user", [1], columns={"x": ["a"]})
    assert_raises(DataError, "expected columns as a dict", Turn, "", "user", [1], columns=[1])


COLUMNS = [
    RolloutColumn("reference", fill=-1.0),
    RolloutColumn("version", dtype="int32"),
    RolloutColumn("route", dtype="uint8", shape=(2,), fill=9),
    RolloutColumn("image", "example", "uint8", (2, 3)),
    RolloutColumn("tool", "token", "bool"),
    RolloutColumn("temperature", "example", "float16", fill=1),
    RolloutColumn("place", "example", "float64", (3,)),
]


def some_value(column: RolloutColumn, rng: np.random.Generator, count: int | None) -> npt.NDArray[Any]:
    shape = column.shape if count is None else (count, *column.shape)
    return rng.integers(0, 2 if column.dtype == "bool" else 100, shape).astype(column.dtype)


def some_rollout(seed: int, uid: str) -> RolloutRecord:
    rng = np.random.default_rng(seed)

    def columns(count: int | None) -> dict[str, Any]:
        per = "example" if count is None else "token"
        some = [column for column in COLUMNS if column.per == per and rng.random() < 0.7]
        return {column.name: some_value(column, rng, count) for column in some}

    turns = []
    for number in range(int(rng.integers(1, 4))):
        count = int(rng.integers(not number, 5))  # one that no loss has is not drawn
        logprobs = -rng.random(count) if number % 2 == 0 else None
        tokens = rng.integers(0, 50, count)
        turns.append(Turn("", "assistant", tokens, logprobs, columns=columns(count)))
    return RolloutRecord("e", "1", 1, uid, turns, float(rng.integers(0, 3)), columns=columns(None))


def told(rollout: RolloutRecord, name: str) -> Any:
    """What an example made of a rollout has of a column, one value after the other."""
    column = next(column for column in COLUMNS if column.name == name)
    fill = np.full(column.shape, column.fill, column.dtype)
    if column.per == "example":
        return rollout.columns.get(name, fill)
    values = []
    for turn in rollout.turns:
        values += list(turn.columns.get(name, [fill] * len(turn.tokens)))
    return np.array(values, column.dtype).reshape(-1, *column.shape)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_declared_comes_back(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("rollouts")
    added = [some_rollout(seed + number, f"{number}") for number in range(5)]
    maker = GrpoBatchMaker(filter_zero_variance=False)
    with RolloutBuffer(root, 9, batch_maker=maker, columns=COLUMNS[:4], sync=False) as buffer:
        assert not buffer.add_rollouts([])
    with RolloutBuffer(root, 9, batch_maker=maker, columns=COLUMNS, sync=False) as buffer:
        buffer.add_rollouts(added)
    with RolloutBuffer(root, 9, batch_maker=GrpoBatchMaker(filter_zero_variance=False), sync=False) as buffer:
        assert buffer.num_waiting == 5
        buffer.flush()
        assert list(buffer.rollouts()) == added == list(open_rollouts(root))
        batch_id = buffer.create_and_store_batch(5)
        assert batch_id is not None
        examples = buffer.read_batch(batch_id)
    rollouts = [added[int(example.rollout_uid)] for example in examples]
    for example, rollout in zip(examples, rollouts, strict=True):
        assert example.columns.keys() == {column.name for column in COLUMNS}
        for name, values in example.columns.items():
            np.testing.assert_array_equal(values, told(rollout, name), strict=True)
    whole = [seen({"tokens": one.tokens, **one.columns}, slice(None), one.columns) for one in examples if len(one)]
    padded = pad(examples, pad_to_multiple_of=8)
    assert padded["tokens"].shape[1] % 8 == 0
    rows = [{name: values[row] for name, values in padded.items()} for row in range(len(examples))]
    assert sorted(seen(row, row["mask"], row) for row in rows if row["mask"].any()) == sorted(whole)
    packed = pack(examples, 32)
    found = []
    for row in range(len(packed["tokens"])):
        values = {name: array[row] for name, array in packed.items()}
        for segment in range(1, int(values["segment_ids"].max()) + 1):
            own = {column.name: values[column.name][segment - 1] for column in COLUMNS if column.per == "example"}
            where = values["segment_ids"] == segment
            found += [seen(values, where, own)] if where.any() else []
    assert sorted(found) == sorted(whole)
    joined = concatenate(examples, 99)
    of_examples = [column.name for column in COLUMNS if column.per == "example"]
    pieces = [
        seen(joined, joined["sequence_id"] == number, {name: joined[name][number] for name in of_examples})
        for number, example in enumerate(examples)
        if len(example)
    ]
    assert pieces == whole
    assert (joined["reference"][~joined["mask"]] == -1).all()


def test_places_of_examples_are_as_many_as_were_said_and_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    declared = [RolloutColumn("own", "example", fill=-2)]
    examples = [
        RLExample([0] * n, [False] * n, [0.0] * n, [0.0] * n, columns={"own": n}, declared=declared) for n in (3, 1)
    ]
    assert pack(examples, 4, num_rows=2, max_examples=3)["own"].tolist() == [[3, 1, -2], [-2] * 3]
    with pytest.raises(DataError, match="max_examples: expected at least 2 for these examples, found 1"):
        pack(examples, 4, max_examples=1)
    assert_raises(ConfigError, "max_examples", pack, examples, 4, max_examples=0)
    with RolloutBuffer(tmp_path) as buffer:
        for turn, columns in ((Turn("", "user", [1], columns={"x": [1]}), {}), (Turn("", "user", [1]), {"x": 1})):
            with pytest.raises(
                DataError, match=r"'u': expected only columns that were declared with per=.*, \[\], found 'x'"
            ):
                buffer.add_rollout(RolloutRecord("e", "1", 1, "u", [turn], 1.0, columns=columns))
        assert not len(buffer)
    plain = RLExample([1], [True], [0.0], [0.0])
    own = RLExample([1], [True], [0.0], [0.0], columns={"x": [1.0]}, declared=[RolloutColumn("x")])
    for call in (pad, concatenate, lambda some: pack(some, 4)):
        assert_raises(
            DataError, r"expected the columns of the first example, \[\], found \['x'\] at index 1", call, [plain, own]
        )


def seen(arrays: Any, where: Any, own: Any) -> tuple[bytes, ...]:
    found = [arrays["tokens"][where].tobytes()]
    for column in COLUMNS:
        values = arrays[column.name]
        assert values.dtype == column.dtype
        found.append(own[column.name].tobytes() if column.per == "example" else values[where].tobytes())
    return tuple(found)


def test_declarations_of_a_folder(tmp_path: Path) -> None:
    first = [RolloutColumn("x"), RolloutColumn("y", "example", "int64"), RolloutColumn("z", "example")]
    with RolloutBuffer(tmp_path, columns=first) as buffer:
        for columns, wanted in (
            ({"y": 0.5}, r"'u': expected column 'y' as int64, found float64 \[0.5\]"),
            ({"y": [1]}, r"'u': expected column 'y' as one value, \[\], found shape \[1\]"),
            ({"z": np.nan}, "'u': expected column 'z' as finite numbers, found nan"),
        ):
            with pytest.raises(DataError, match=wanted):
                buffer.add_rollout(RolloutRecord("e", "1", 1, "u", [Turn("", "user", [1])], 1.0, columns=columns))
        turn = Turn("", "user", [1, 2], columns={"x": [np.inf, 1.0]})
        with pytest.raises(DataError, match=r"'u', turn 0: expected column 'x' as finite numbers, found inf at \[0\]"):
            buffer.add_rollout(RolloutRecord("e", "1", 1, "u", [turn], 1.0))
        turn = Turn("", "user", [1, 2], columns={"x": [1.0]})
        with pytest.raises(DataError, match="'u', turn 0: expected column 'x' as a value for each of 2 tokens"):
            buffer.add_rollout(RolloutRecord("e", "1", 1, "u", [turn], 1.0))
        assert not len(buffer)
    for columns, wanted in (
        ([RolloutColumn("x", dtype="int8")], "expected 'x' as it is declared in the folder, .*float32.*, found .*int8"),
        ([RolloutColumn("a"), RolloutColumn("a")], "expected each name once"),
        (["z"], "expected RolloutColumn"),
        ("z", "expected a list of RolloutColumn, found 'z'"),
    ):
        assert_raises(ConfigError, wanted, RolloutBuffer, tmp_path, columns=columns)
    with RolloutBuffer(tmp_path) as buffer:
        known = RolloutRecord("e", "1", 1, "u", [Turn("", "user", [1])], 1.0, columns={"y": 3})
        buffer.add_rollout(known)
        buffer.flush()
    note = tmp_path / ".state" / "columns.json"
    note.write_text(note.read_text().replace('"version": 1', '"version": 3'))
    assert_raises(DataError, "expected columns of version 1, found 3: a newer release wrote", RolloutBuffer, tmp_path)
    note.write_text("{}")
    with pytest.raises(DataError, match="expected the columns of rollouts, found"):
        open_rollouts(tmp_path)[0]


def example(number: int, length: int) -> RLExample:
    places = np.arange(length)
    return RLExample(1000 * number + places + 1, places % 2 == 1, places + 0.5, -places - 0.25, f"r{number}")


FIELDS = ("tokens", "loss_mask", "advantage", "generator_log_probs")
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@given(sizes, st.integers(0, 3))
def test_padding_is_that_of_a_loop(lengths: list[int], more: int) -> None:
    examples = [example(number, length) for number, length in enumerate(lengths)]
    length = max(lengths) + more
    arrays = pad(examples, length, pad_token=7)
    for row, one in enumerate(examples):
        for name in FIELDS:
            values: npt.NDArray[Any] = getattr(one, name)
            assert arrays[name].dtype == values.dtype
            assert arrays[name].shape == (len(examples), length)
            np.testing.assert_array_equal(arrays[name][row, : len(one)], values)
            assert (arrays[name][row, len(one) :] == (7 if name == "tokens" else 0)).all()
        assert arrays["mask"][row].tolist() == [True] * len(one) + [False] * (length - len(one))
    assert pad(examples)["tokens"].shape == (len(examples), max(lengths))


@given(sizes, st.integers(0, 8), st.integers(0, 2))
def test_packing_keeps_every_example_whole(lengths: list[int], more: int, spare: int) -> None:
    examples = [example(number, length) for number, length in enumerate(lengths)]
    length = max(lengths) + more
    arrays = pack(examples, length, pad_token=7)
    rows = len(arrays["tokens"])
    found = []
    for row in range(rows):
        segments = arrays["segment_ids"][row]
        there = segments > 0
        np.testing.assert_array_equal(arrays["mask"][row], there)
        assert (arrays["tokens"][row][~there] == 7).all()
        for name in (*FIELDS[1:], "positions"):
            assert not arrays[name][row][~there].any()
        for segment in sorted(set(segments[there].tolist())):
            (places,) = np.nonzero(segments == segment)
            assert places.tolist() == list(range(places[0], places[0] + len(places))), "in one piece"
            number = (int(arrays["tokens"][row, places[0]]) - 1) // 1000
            found.append(number)
            for name in FIELDS:
                np.testing.assert_array_equal(arrays[name][row, places], getattr(examples[number], name))
            np.testing.assert_array_equal(arrays["positions"][row, places], np.arange(len(places)))
    assert sorted(found) == [number for number, size in enumerate(lengths) if size]
    assert rows <= 2 * -(-sum(lengths) // length) + 1
    wider = pack(examples, length, pad_token=7, num_rows=rows + spare)
    for name, values in arrays.items():
        np.testing.assert_array_equal(wider[name][:rows], values)
    assert not wider["mask"][rows:].any()


def test_packing_fills_rows_and_bad_calls_are_refused() -> None:
    arrays = pack([example(0, 3), example(1, 5), example(2, 2), example(3, 4)], 7)
    assert arrays["segment_ids"].tolist() == [[1] * 5 + [2] * 2, [1] * 4 + [2] * 3]
    assert arrays["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    for collate in (pad, pack):
        assert_raises(
            DataError, "expected at most 4 tokens, found 6 at index 0", collate, [example(0, 6), example(1, 2)], 4
        )
    with pytest.raises(DataError, match="expected at most 5 rows in a batch, found 6 in 2 sequences"):
        concatenate([example(0, 3), example(1, 3)], 5)
    assert_raises(ConfigError, "capacity: expected an integer of at least 1, found 0", concatenate, [example(0, 3)], 0)
    assert_raises(DataError, "examples: expected at least one, found none", concatenate, [])
    assert_raises(DataError, "examples: expected at least one, found none", pad, [])
    assert_raises(DataError, "rollouts: expected a RolloutRecord at index 0, found 3", make_examples, [3], [1.0])
    for lengths in ([3, "x"], [1.5], [-1], [[3]]):
        with pytest.raises(DataError, match="lengths: expected the number of tokens of each example, found"):
            plan_micro_batches(lengths, 2, max_tokens=8)  # type: ignore[arg-type]
    assert_raises(DataError, "expected an RLExample at index 0, found 3", pack, [3], 4)
    assert_raises(ConfigError, "length: expected an integer of at least 1, found 0", pad, [example(0, 1)], 0)
    with pytest.raises(DataError, match="num_rows: expected at least 2 rows of 4 for these examples, found 1"):
        pack([example(0, 3), example(1, 3)], 4, num_rows=1)
    assert_raises(ConfigError, "num_rows: expected an integer of at least 1", pack, [example(0, 3)], 4, num_rows=True)


@given(sizes, st.none() | st.integers(0, 9))
def test_one_behind_the_other_is_that_of_a_loop(lengths: list[int], more: int | None) -> None:
    examples = [example(number, length) for number, length in enumerate(lengths)]
    total = sum(lengths)
    arrays = concatenate(examples, None if more is None else total + more, pad_token=7)
    missing = more or 0
    expected: dict[str, list[Any]] = {name: [] for name in (*FIELDS, "position", "sequence_id")}
    for number, one in enumerate(examples):
        for name in FIELDS:
            expected[name] += getattr(one, name).tolist()
        expected["position"] += range(len(one))
        expected["sequence_id"] += [number] * len(one)
    filled = {"tokens": 7, "sequence_id": len(examples)}
    for name, values in expected.items():
        assert arrays[name].tolist() == values + [filled.get(name, 0)] * missing
        assert arrays[name].dtype == (getattr(examples[0], name).dtype if name in FIELDS else np.int32)
    assert arrays["cu_seqlens"].tolist() == [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    assert arrays["cu_seqlens"].dtype == np.int32
    assert ("mask" in arrays) == (more is not None)
    if more is not None:
        assert arrays["mask"].tolist() == [True] * total + [False] * missing


def test_examples_are_digested_one_by_one_and_taken_from_strided_arrays() -> None:
    examples = [example(number, length) for number, length in enumerate((5, 3, 7, 3, 0))]
    whole = examples_digest(4, examples)
    assert whole.windows == 5
    assert examples_digest(4, examples[:2]) + examples_digest(4, examples[2:], first_row=2) == whole
    assert examples_digest(4, examples[::-1]) != whole != examples_digest(5, examples)
    alike = [example(number, 6) for number in range(3)]
    arrays = {name: values for name, values in pad(alike).items() if name != "mask"}
    assert examples_digest(4, alike) == StreamDigest.of(4, arrays)
    for name in FIELDS:
        values = getattr(alike[1], name).copy()
        values[2] = not values[2] if name == "loss_mask" else values[2] + 1
        assert examples_digest(4, [alike[0], replace(alike[1], **{name: values}), alike[2]]) != StreamDigest.of(
            4, arrays
        )
    strided = np.arange(12, dtype=np.int32)[::2]
    strided.flags.writeable = False
    one = replace(example(0, 6), tokens=strided)
    assert not one.tokens.flags.contiguous
    for arrays in (pad([one, one]), pack([one, one], 12), concatenate([one, one])):
        assert arrays["tokens"].reshape(-1).tolist() == [0, 2, 4, 6, 8, 10] * 2
        arrays["tokens"][:] = 0  # they are the caller's
