"""Padding and packing of examples against plain loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError
from mouse_core.digest import StreamDigest
from mouse_core.groups import RLExample, concatenate, examples_digest, make_examples, pack, pad, plan_micro_batches
from tests.raising import assert_raises


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
