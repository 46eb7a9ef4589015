"""Laws that every spec of values keeps."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import DataError, spec
from tests.core.spec_cases import domains, leaves, rows, same


@given(domains(), st.integers(0, 2**64 - 1))
def test_what_is_drawn_is_in_the_domain_and_the_same_again(one: Any, seed: int) -> None:
    values = one.sample(seed, (3,))
    assert one.contains(values), one.why_not(values)
    assert same(values, one.sample(seed, 3))
    assert same(one.sample(seed, (2,)), rows(values, slice(0, 2)))
    assert one.contains(one.sample(seed))


NUMBERS = [2, -1, 1j, 2**70, [1], (1, 2), [[1], [1, 2]], np.zeros(3)]
OTHERS = ["no name", b"x", None, object(), {}, {"a": 1}, {1: 2}]


@given(domains(), st.integers(0, 99))
def test_in_asks_what_contains_asks(one: Any, seed: int) -> None:
    for values in (one.sample(seed), one.sample(seed, 3), one.zeros(), *NUMBERS, *OTHERS):
        assert (values in one) is one.contains(values)


@given(domains(), st.integers(0, 99))
def test_what_is_in_the_domain_is_projected_to_itself_and_all_else_into_it(one: Any, seed: int) -> None:
    values = one.sample(seed, (2,))
    assert same(one.project(values), values)
    assert one.contains(one.project(one.zeros((2,))))
    assert one.contains(one.project(one.ones()))


@given(leaves(), st.integers(0, 99))
def test_what_a_mask_hides_is_no_value(one: Any, seed: int) -> None:
    values = np.asarray(one.sample(seed, (2,)))
    if not values.size or values.dtype == object:
        return
    hidden = np.ma.masked_array(values, np.arange(values.size).reshape(values.shape) == 0)
    for stack, found in ((one, hidden), (spec.Stacked((one, one)), hidden)):
        assert not stack.contains(found)
        assert "masked" in str(stack.why_not(found))
        with pytest.raises(DataError, match="masked"):
            stack.project(found)


@given(leaves(), st.lists(st.floats(), min_size=1, max_size=4))
def test_any_numbers_are_projected_into_the_domain(one: Any, numbers: list[float]) -> None:
    with np.errstate(over="ignore"):
        values = np.resize(np.array(numbers), (2, *one.shape))
        assert one.contains(one.project(values))
        assert one.contains(one.project(values.astype(np.float32)))
    whole = np.nan_to_num(values).clip(-(2**62), 2**62).astype(np.int64)
    assert one.contains(one.project(whole))


@given(leaves(), st.lists(st.floats(-3, 9) | st.integers(-3, 9), min_size=1, max_size=4), st.sampled_from("dfe"))
def test_numbers_of_another_dtype_are_judged_alike_however_one_asks(one: Any, numbers: list[float], dtype: str) -> None:
    values = np.resize(np.array(numbers, dtype), (300, *one.shape))
    inside = one.contains_rows(values)
    assert inside.shape == (300,)
    assert one.contains_numbers(values) == inside.all() == (one.why_not_numbers(values) is None)
    assert (np.array([one.contains_numbers(row) for row in values[:4]]) == inside[:4]).all()
    if isinstance(one, spec.Bounded) and not one.shape:
        of_dtype = np.float32 if one.dtype == np.float32 and dtype == "d" else values.dtype
        with np.errstate(over="ignore"):
            low, high = (np.float64(end).astype(of_dtype) for end in (one.low, one.high))
        whole = values == np.rint(values) if one.is_discrete else np.ones(300, bool)
        assert (inside == (whole & (values.astype(of_dtype) >= low) & (values.astype(of_dtype) <= high))).all()
    drawn = one.sample(0, 4)
    if drawn.dtype.itemsize < 8:
        assert one.contains_numbers(drawn.astype(np.float64))


@given(domains(), st.integers(0, 99))
def test_what_is_decoded_is_encoded_to_the_same(one: Any, seed: int) -> None:
    values = one.sample(seed, (2,))
    assert same(one.encode(one.decode(values)), values)


@given(domains())
def test_a_spec_comes_back_from_json_and_from_a_pickle(one: Any) -> None:
    for other in (
        spec.from_json(json.loads(json.dumps(one.to_json()))),
        spec.from_json(json.dumps(one.to_json())),
        pickle.loads(pickle.dumps(one)),
    ):
        assert other == one
        assert hash(other) == hash(one)
        assert repr(other) == repr(one)
        assert same(other.sample(3), one.sample(3))


@given(domains(), st.integers(1, 3), st.data())
def test_a_stack_is_taken_apart_into_what_it_was_made_of(one: Any, number: int, data: Any) -> None:
    others = [one] * number
    # the axis that vectors of zeros and ones end in stays the last one
    own = isinstance(one, spec.OneHot | spec.MultiOneHot)
    axis = 0 if isinstance(one, spec.Stacked) else data.draw(st.integers(0, one.ndim - own))
    stacked = spec.stack_specs(others, axis)
    assert type(stacked) is type(one)
    assert stacked.shape[axis] == number
    assert len(stacked.shape) == len(one.shape) + 1
    assert stacked.unbind(axis) == tuple(others)
    assert stacked[(*(slice(None),) * axis, number - 1)] == one
    assert spec.stack_specs(list(stacked.unbind(axis)), axis) == stacked
    assert stacked.contains(stacked.sample(5, (2,)))


@given(domains(countable=True))
def test_as_many_values_are_enumerated_as_there_are(one: Any) -> None:
    if one.cardinality > 500:
        return
    values = one.enumerate()
    assert one.contains(values)
    found = {repr(rows(values, number)) for number in range(int(one.cardinality))}
    assert len(found) == one.cardinality


@given(domains(), st.integers(1, 3))
def test_axes_are_added_and_taken_away(one: Any, number: int) -> None:
    wide = one.unsqueeze(0)
    assert wide.shape == (1, *one.shape)
    assert wide.squeeze(0) == one
    assert wide[0] == one
    many = wide.expand((number, *(-1,) * one.ndim))
    assert many.shape == (number, *one.shape)
    assert many[-1] == one
    assert len(many.unbind()) == number
    assert many.contains(many.sample(1, (2,)))
    assert one.expand((number, *(-1,) * one.ndim)) == many
    assert one[None] == wide
    assert one[...] == one
