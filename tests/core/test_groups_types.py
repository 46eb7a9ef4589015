"""Rollouts, and that they come back exactly from their columns."""

import math
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import DataError
from mouse_core.groups import RLExample, RolloutBuffer, RolloutRecord, Turn, make_examples, open_rollouts
from mouse_core.groups.records import same_values, version_order
from tests.core.groups_cases import METADATA, group, rollout
from tests.raising import assert_raises


def test_turns_keep_what_they_are_given_and_rewards_are_those_of_turns() -> None:
    turn = Turn("hi", "assistant", [1, 2, 3], [-0.5, -1.0, 0.0], 1, METADATA)
    assert turn.tokens.dtype == np.int32
    assert turn.tokens.tolist() == [1, 2, 3]
    assert turn.logprobs is not None
    assert turn.logprobs.dtype == np.float32
    assert turn.reward == 1.0
    assert same_values(turn.metadata, METADATA)
    assert turn.is_trained
    assert not Turn("hi", "user", [1], [-0.5]).is_trained
    assert not Turn("hi", "assistant", [1]).is_trained
    assert Turn("a message of an interface without tokens", "tool").tokens.shape == (0,)
    turns = [Turn("a", "assistant", reward=0.1), Turn("b", "user"), Turn("c", "assistant", reward=0.2)]
    assert RolloutRecord("e", 1, 2, "u", turns).reward == math.fsum([0.1, 0.2])  # type: ignore[arg-type]
    assert RolloutRecord("e", 1, 2, "u", turns).key == ("e", "1", "2")  # type: ignore[arg-type]
    for one, other in [(1, True), (1, 1.0), ([1], (1,)), ({"a": 1}, {"a": 2}), (np.int32(1), np.int64(1)), ("1", 1)]:
        assert not same_values(one, other)
        assert rollout(0, metadata={"x": one}) != rollout(0, metadata={"x": other})
    assert rollout(0) != rollout(0, created=1.5)
    assert rollout(0) != rollout(0, tokens=6)


def test_no_probability_is_above_one(tmp_path: Path) -> None:
    """Rounding in float32 leaves a little above 0, which is not kept; more is refused, also in an example or a file."""
    given = np.array([1e-7, -1.0], np.float32)
    assert Turn("", "assistant", [1, 2], given).logprobs.tolist() == [0.0, -1.0]  # type: ignore[union-attr]
    example = RLExample([1], [True], [1.0], [1e-7])  # type: ignore[arg-type]
    assert example.generator_log_probs.tolist() == [0.0]
    with pytest.raises(DataError, match=r"generator_log_probs as logarithms of probabilities, at most 0, found 0\.1"):
        RLExample([1], [True], [1.0], [0.1])  # type: ignore[arg-type]
    with RolloutBuffer(tmp_path, 1, sync=False) as buffer:
        buffer.add_rollout(rollout(0))
        (path,) = [one.path for one in buffer.rollouts().groups]
    rows = pq.read_table(path).to_pylist()
    rows[0]["turns"][1]["logprobs"][2] = 0.5
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path.with_name("part-1.parquet"))
    path.unlink()
    with pytest.raises(DataError, match=r"part-1.parquet: expected rollouts, found: .*at most 0, found 0.5 at index 2"):
        list(open_rollouts(tmp_path))


def test_no_memory_of_the_caller_is_kept_unless_nobody_writes_to_it(tmp_path: Path) -> None:
    tokens, metadata = np.array([1, 2], np.int32), {"a": [1]}
    turn = Turn("hi", "user", tokens, metadata=metadata)
    tokens[0] = 7
    metadata["a"].append(2)
    assert turn.tokens.tolist() == [1, 2]
    assert turn.metadata == {"a": [1]}
    with pytest.raises(ValueError, match="read-only"):
        turn.tokens[0] = 3
    mapped = np.memmap(tmp_path / "tokens", np.int32, "w+", shape=(2,))
    subclass = np.zeros(2, np.int32).view(Subclass)
    for tokens in (mapped, subclass, array("i", [0, 0]), np.zeros(2, np.int32)[:]):
        turn = Turn("hi", "user", tokens)
        tokens[0] = 7
        assert turn.tokens.tolist() == [0, 0], type(tokens)
        assert type(turn.tokens) is np.ndarray
    mask = np.array([True, False])
    example = RLExample([1, 2], mask, [0.5, 0], [-1.0, 0])  # type: ignore[arg-type]
    mask[:] = False
    assert example.loss_mask.tolist() == [True, False]
    tokens = np.arange(4, dtype=np.int32)
    tokens.flags.writeable = False
    assert np.shares_memory(Turn("hi", "user", tokens).tokens, tokens)


class Subclass(np.ndarray):
    """As some libraries have."""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": [1.5]}, r"tokens: expected integers \[n\], found float64"),
        ({"tokens": [[1]]}, r"tokens: expected integers \[n\], found int64 \[1, 1\]"),
        ({"tokens": [3, -1]}, "tokens: expected 0..2147483647, found -1 at index 1"),
        ({"tokens": [2**31]}, "found 2147483648 at index 0"),
        ({"logprobs": [-1.0]}, r"expected logprobs for each of 2 tokens, found shape \[1\]"),
        ({"logprobs": [-1.0, math.nan]}, "expected logprobs as finite float32 numbers, found nan at index 1"),
        ({"logprobs": [-1.0, -math.inf]}, "found -inf at index 1"),
        ({"logprobs": ["a", "b"]}, "expected logprobs as numbers"),
        (
            {"logprobs": [-0.2, 0.9]},
            "expected logprobs as logarithms of probabilities, at most 0, found 0.89.* at index 1",
        ),
        ({"logprobs": [-0.2, 0.01]}, "at most 0, found 0.00.* at index 1; compute them in float32, not in 16 bits"),
        ({"logprobs": [[-1.0], [-1.0, -2.0]]}, r"expected logprobs as an array, found \[\[-1.0\], .*inhomogeneous"),
        ({"logprobs": np.ma.masked_array([-1.0, -2.0], [0, 1])}, "found a masked value"),
        ({"tokens": np.ma.masked_array([1, 2], [0, 1])}, "found a masked value"),
        ({"columns": {"a": np.ma.masked_array([1, 2], [0, 1])}}, "found a masked value"),
        ({"metadata": {"a": np.ma.masked_array([1, 2], [0, 1])}}, r"metadata\['a'\]: expected a value, found a masked"),
        ({"reward": np.ma.masked_array(0.5, True)}, "expected reward as a number"),
        ({"columns": {"a": [[1], [1, 2]]}}, "expected column 'a' as an array"),
        ({"reward": math.nan}, "expected reward as a finite number, found nan"),
        ({"reward": "high"}, "expected reward as a number, found 'high'"),
        ({"message": 3}, "expected message as a str, found 3"),
        ({"role": None}, "expected role as a str, found None"),
        ({"metadata": {"a": {1: 2}}}, "expected keys of metadata as str, found 1"),
        ({"metadata": {"a": [object()]}}, r"metadata\['a'\]\[0\]: expected None, bool"),
        ({"metadata": [1]}, "expected metadata as a dict"),
    ],
)
def test_turns_refuse(changed: dict[str, Any], message: str) -> None:
    assert_raises(DataError, message, Turn, **{"message": "hi", "role": "user", "tokens": [1, 2], **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": math.nan}, "rollout 'u': expected reward as a finite number, found nan"),
        ({"reward": math.inf}, "found inf"),
        ({"created": math.nan}, "expected created as a finite number"),
        ({"environment": ""}, "expected environment as a non-empty str, found ''"),
        ({"rollout_uid": ""}, "expected rollout_uid as a non-empty str"),
        ({"policy_version": None}, "expected policy_version as a non-empty str"),
        ({"turns": []}, "expected one or more turns"),
        ({"turns": None}, "expected one or more turns"),
        ({"turns": ["hi"]}, "expected one or more turns"),
    ],
)
def test_rollouts_refuse(changed: dict[str, Any], message: str) -> None:
    fields = {
        "environment": "math",
        "example_id": "1",
        "policy_version": "1",
        "rollout_uid": "u",
        "turns": [Turn("hi", "user")],
        "reward": 0.0,
    }
    assert_raises(DataError, message, RolloutRecord, **fields | changed)


def test_examples_refuse_and_come_back(tmp_path: Path) -> None:
    tokens, mask, floats = np.arange(3), np.ones(3, bool), np.zeros(3)
    example = RLExample(tokens, mask, floats, floats)
    assert len(example) == 3
    assert (example.tokens.dtype, example.advantage.dtype) == (np.int32, np.float32)
    with pytest.raises(DataError, match=r"expected loss_mask as bool \[3\], found bool \[2\]"):
        RLExample(tokens, mask[:2], floats, floats)
    with pytest.raises(DataError, match=r"expected loss_mask as bool \[3\], found int64"):
        RLExample(tokens, tokens, floats, floats)  # type: ignore[arg-type]
    assert_raises(DataError, "expected advantage for each of 3 tokens", RLExample, tokens, mask, floats[:1], floats)
    assert_raises(DataError, "expected generator_log_probs as finite", RLExample, tokens, mask, floats, floats + np.nan)
    given_ = [rollout(0), rollout(1, tokens=0), rollout(2)]
    with RolloutBuffer(tmp_path, group_size=3, batch_maker=Everything()) as buffer:
        buffer.add_rollouts(given_)
        batch = buffer.create_and_store_batch(3)
        assert batch is not None
        assert buffer.read_batch(batch) == make_examples(given_, [-0.5, 0.5, 1.5])


def test_prompts_are_outside_of_the_loss() -> None:
    turns = (
        Turn("system", "system", [1, 2]),
        Turn("question", "user", [3], [-9.0]),
        Turn("answer", "assistant", [4, 5], [-0.25, -0.5]),
        Turn("result", "tool", [6]),
        Turn("given", "assistant", [7]),
        Turn("again", "assistant", [8], [-1.0]),
    )
    rollouts = [RolloutRecord("e", "1", "1", "a", turns, 0.0), rollout(1)]
    first, second = make_examples(rollouts, [2.0, -1.0])
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert first.loss_mask.tolist() == [False, False, False, True, True, False, False, True]
    assert first.advantage.tolist() == [0, 0, 0, 2, 2, 0, 0, 2]
    assert first.generator_log_probs.tolist() == [0, 0, 0, -0.25, -0.5, 0, 0, -1]
    assert first == RLExample(*(getattr(first, name) for name in RLExample.__dataclass_fields__))
    assert (second.rollout_uid, second.environment, second.policy_version) == ("r1", "math", "1")
    assert second.advantage[second.loss_mask].tolist() == [-1.0] * 5
    assert make_examples([], []) == []


texts = st.text(st.characters(codec="utf-8"), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)
metadata = st.dictionaries(texts, values, max_size=3)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    logprobs = draw(st.none() | st.just([-(0.25 * token % 7) for token in tokens]))
    reward = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    return Turn(draw(texts), draw(texts), tokens, logprobs, reward, draw(metadata))


rollouts = st.builds(
    RolloutRecord,
    texts.filter(bool),
    texts.filter(bool),
    texts.filter(bool) | st.integers(),
    texts.filter(bool),
    st.lists(turns(), min_size=1, max_size=3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
    metadata,
)


def stored(given_: list[RolloutRecord], **options: Any) -> list[RolloutRecord]:
    """What comes back from the log of those that wait, and then from files; both are the same."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"group_size": len(given_) + 1, "seal_timeout": 1e6, "sync": False, **options}
        with RolloutBuffer(folder, **options) as buffer:
            buffer.add_rollouts(given_)
        with RolloutBuffer(folder, **options) as buffer:
            buffer.flush()
        by_uid = {item.rollout_uid: item for item in open_rollouts(folder)}
        return [by_uid[item.rollout_uid] for item in given_]


@settings(max_examples=6)
@given(
    st.lists(rollouts, min_size=1, max_size=4, unique_by=lambda item: item.rollout_uid),
    st.sampled_from(["zstd", "snappy", "gzip", "lz4", "none"]),
    st.integers(1, 3),
)
def test_every_field_comes_back_exactly(given_: list[RolloutRecord], compression: str, size: int) -> None:
    assert stored(given_, compression=compression) == given_
    same = [replace(item, environment="e", example_id="1", policy_version="1") for item in given_]
    assert stored(same, group_size=size) == same


def test_columns_without_values_are_there_and_text_must_be_unicode(tmp_path: Path) -> None:
    given_ = [replace(item, turns=item.turns[:1], reward=1.0) for item in group(0, 2)]
    with RolloutBuffer(tmp_path, group_size=2) as buffer:
        buffer.add_rollouts(given_)
        (one,) = buffer.rollouts().groups
        assert list(buffer.rollouts()) == given_
    schema = pq.read_schema(one.path)
    inner = schema.field("turns").type.value_type
    assert {"replica_id", "metadata", "reward"} < {*schema.names}
    assert [field.name for field in inner] == ["message", "role", "tokens", "logprobs", "reward", "metadata"]
    assert str(inner.field("tokens").type) == "list<element: int32 not null>"
    assert str(inner.field("logprobs").type) == "list<element: float not null>"
    assert str(schema.field("reward").type) == "double"
    lone = RolloutRecord("e", "1", "1", "u", (Turn("\ud800", "user"),), 0.0)
    assert_raises(DataError, "expected text in Unicode", stored, [lone])


def read_back(folder: Path, **changed: pa.Array) -> list[RolloutRecord]:
    with RolloutBuffer(folder, group_size=2) as buffer:
        buffer.add_rollouts([replace(item, turns=item.turns[1:]) for item in group(0, 2)])
        (path,) = [one.path for one in buffer.rollouts().groups]
    rows = pq.read_table(path).combine_chunks().to_batches()[0]
    lists = rows.column("turns")
    turns = lists.values
    values = {**{field.name: turns.field(field.name) for field in turns.type}, **changed}
    inner = pa.StructArray.from_arrays([values.pop(name) for name in turns.type.names], turns.type.names)
    columns = {**values, "turns": pa.ListArray.from_arrays(values.pop("offsets", lists.offsets), inner)}
    names = rows.schema.names
    path.unlink()
    table = pa.table({name: columns.get(name, rows.column(name)) for name in names})
    pq.write_table(table, path.with_name("part-1.parquet"))
    return list(open_rollouts(folder))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": pa.array([[1] * 5, [-1] * 5], pa.list_(pa.int32()))}, "tokens: expected 0"),
        ({"logprobs": pa.array([[0.0], [0.0] * 5], pa.list_(pa.float32()))}, "for each of 5 tokens"),
        ({"logprobs": pa.array([[math.nan] * 5, None], pa.list_(pa.float32()))}, "expected logprobs as finite"),
        ({"reward": pa.array([None, math.inf])}, "expected reward as a finite"),
        ({"message": pa.array(["a", None])}, "'message'.*null"),
        ({"role": pa.array([None, "a"])}, "'role'.*null"),
        ({"created": pa.array([0.0, math.nan])}, "expected created as a finite"),
        ({"created": pa.array([0.0, None])}, "'created'.*null"),
        ({"rollout_uid": pa.array(["", "a"])}, "expected rollout_uid as a non-empty str"),
        ({"offsets": pa.array([0, 0, 2], pa.int32())}, "expected one or more turns"),
    ],
)
def test_columns_that_no_rollouts_have_are_refused(changed: dict[str, pa.Array], message: str, tmp_path: Path) -> None:
    assert read_back(tmp_path / "whole")
    assert_raises(DataError, f"part-1.parquet: .*{message}", read_back, tmp_path / "broken", **changed)


class Everything:
    def __init__(self) -> None:
        self.rollouts: list[RolloutRecord] = []

    def add_rollout(self, item: RolloutRecord) -> None:
        self.rollouts.append(item)

    def create_batch(self, batch_size: int) -> list[RLExample]:
        return make_examples(self.rollouts, np.arange(len(self.rollouts)) - 0.5)

    def get_batch_metadata(self, batch: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    "in_order",
    [
        ["9", "10", "100"],
        ["-1", "0", "0.5", "1e3", "1001"],
        ["step-9", "step-10", "step-10b", "step-11"],
        ["v1.9.2", "v1.10.0"],
        ["draft", "1"],
    ],
)
def test_versions_compare_as_numbers(in_order: list[str]) -> None:
    assert sorted(in_order, key=version_order) == in_order
