"""Which values specs allow, draw and make of others; held against plain Python."""

import json
import math
import pickle
from collections import Counter
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import pytest

from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.randomness import Key, Purpose
from mouse_core.spec import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    Domain,
    FieldSpec,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Spec,
    Unbounded,
    from_batch,
    from_json,
    stack_specs,
)

MASK = np.array([True, False, True])
TWO = Bounded(np.array([0, 5]), np.array([1, 9]))


def one_of_each() -> list[Domain]:
    return [
        Bounded(-1, 2, (3,)),
        Bounded(-3, 4, dtype="int8"),
        Unbounded((2,)),
        Unbounded((), "int16"),
        Binary((2,), "int8"),
        Categorical(3),
        MultiCategorical([3, 2]),
        OneHot(3),
        MultiOneHot([3, 2]),
        NonTensor(example="a text"),
        Choice([Bounded(0, 1), Bounded(4, 5)]),
        Composite({"a": Categorical(3), ("b", "c"): OneHot(2)}),
        stack_specs([Categorical(3), Categorical(4)]),
    ]


# --- draws -----------------------------------------------------------------------------------------------------------


def chi_square(counts: Any, expected: float) -> float:
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(-(2**63), 2**63 - 1, "int64"), (0, 2**64 - 1, "uint64"), (-(2**62), 2**63 - 1, "int64"), (-3, 12, "int8")],
)
def test_integers_are_uniform_over_any_range(low: int, high: int, dtype: str) -> None:
    values = Bounded(low, high, dtype=dtype).sample(3, 16_000)
    parts = Counter(16 * (int(value) - low) // (high - low + 1) for value in values)
    assert sorted(parts) == list(range(16))
    assert chi_square(list(parts.values()), 1000) < 45  # 15 degrees: one seed in 10,000 is beyond it


def test_numbers_beyond_half_of_64_bits_are_no_likelier_than_others() -> None:
    """Of a range of 3 * 2**62, the remainder of 64 bits would have a third of the numbers twice as often."""
    values = Bounded(0, 3 * 2**62 - 1, dtype="uint64").sample(1, 9_000)
    thirds = Counter(int(value) // 2**62 for value in values)
    assert chi_square([thirds[number] for number in range(3)], 3000) < 20


def test_integers_are_those_of_exact_arithmetic() -> None:
    for low, high in [(-5, 9), (-(2**63), 2**63 - 1), (-(2**62), 2**63 - 1)]:
        words = Key(7, Purpose.SPECS).bits(200).reshape(100, 2)
        expected = [low + ((high - low + 1) * ((int(a) << 64) + int(b)) >> 128) for a, b in words]
        assert Bounded(low, high, dtype="int64").sample(7, 100).tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_are_uniform_over_the_widest_range_without_overflow(dtype: str) -> None:
    most = float(np.finfo(dtype).max)
    with np.errstate(all="raise"):
        values = Bounded(-most, most, dtype=dtype).sample(2, 16_000)
    assert np.isfinite(values).all()
    parts = np.floor((values.astype(np.float64) / most + 1) * 8).clip(0, 15).astype(int)
    assert chi_square(np.bincount(parts, minlength=16), 1000) < 45


def test_floats_stay_between_bounds_that_lie_close() -> None:
    low, high = np.float64(1), np.nextafter(np.float64(1), 2)
    values = Bounded(low, high).sample(0, 1000)
    assert set(values.tolist()) == {low, high}
    assert set(Bounded(1 / 3, 1 / 3, dtype="float64").sample(0, 99).tolist()) == {1 / 3}
    assert set(Bounded(0.1, 0.1, dtype="float32").sample(0, 9).tolist()) == {float(np.float32(0.1))}


def test_without_a_bound_floats_are_exponential_or_normal() -> None:
    above = Bounded(3, np.inf, dtype="float64").sample(0, 20_000) - 3
    below = -Bounded(-np.inf, 3, dtype="float64").sample(0, 20_000) + 3
    normal = Unbounded((), "float64").sample(0, 20_000)
    for values in (above, below):
        assert values.min() >= 0
        assert abs(values.mean() - 1) < 0.03
        assert abs(np.median(values) - math.log(2)) < 0.03
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.02
    mixed = Bounded(np.array([0.0, -np.inf, 5.0]), np.array([1.0, np.inf, np.inf])).sample(0, 100)
    assert ((mixed[:, 0] <= 1) & (mixed[:, 2] >= 5)).all()


def test_whole_dtypes_are_drawn_where_nothing_bounds_them() -> None:
    values = Unbounded((), "int8").sample(0, 4000)
    assert len(set(values.tolist())) == 256
    assert set(Unbounded((), bool).sample(0, 20).tolist()) == {False, True}


def test_an_entry_more_changes_no_other() -> None:
    few = Composite({"a": Bounded(0, 1), "n": {"b": Categorical(9)}})
    more = Composite({"new": Unbounded(), "n": {"c": Categorical(9), "b": Categorical(9)}, "a": Bounded(0, 1)})
    one, other = few.sample(5, 8), more.sample(5, 8)
    assert (one["a"] == other["a"]).all()
    assert (one["n"]["b"] == other["n"]["b"]).all()
    assert (other["n"]["b"] != other["n"]["c"]).any()
    assert (few["a"].sample(5, 8) != one["a"]).any()  # alone it has no name
    stacked = stack_specs([Bounded(0, 1), Bounded(0, 2)]).sample(5, 8)
    assert (2 * stacked[:, 0] != stacked[:, 1]).any()


def test_seeds_are_numbers_or_keys() -> None:
    spec = Categorical(100)
    key = Key(5, Purpose.SPECS)
    assert (spec.sample(key, 9) == spec.sample(5, 9)).all()
    assert (spec.sample(key.with_call(1), 9) != spec.sample(key, 9)).any()
    with pytest.raises(ConfigError, match=r"seed: expected an integer in \[0, 2\*\*64\), found -1"):
        spec.sample(-1)
    with pytest.raises(ConfigError, match="batch: expected a shape of sizes of at least 0, found -3"):
        spec.sample(1, -3)


def test_choices_and_categories_come_equally_often() -> None:
    assert chi_square(np.bincount(Categorical(8).sample(0, 8000)), 1000) < 30
    masked = Categorical(5, mask=np.array([1, 0, 1, 0, 1], bool)).sample(0, 3000)
    assert chi_square(np.bincount(masked)[[0, 2, 4]], 1000) < 20
    chosen = Choice([Bounded(0, 1), Bounded(4, 5)]).sample(0, 2000)
    assert chi_square([(chosen < 2).sum(), (chosen > 2).sum()], 1000) < 15


def test_one_hot_vectors_are_drawn_as_the_codes_are() -> None:
    for one in (Categorical(5, (2,)), MultiCategorical([3, 4], (2, 2)), Categorical(3, mask=MASK)):
        hot = one.one_hot()
        assert (hot.decode(hot.sample(3, 6)) == one.sample(3, 6)).all()
        assert hot.categorical() == one


# --- what is in a domain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "values", "reason"),
    [
        (Bounded(-1, 1), [0.0, 2.0], "row 1: expected a number from -1.0 to 1.0, found 2.0"),
        (Bounded(-1, 1, (2,)), [[0, 0], [0, math.nan]], "row 1: expected a number from -1.0 to 1.0, found nan at [1]"),
        (Bounded(-1, 1), np.zeros(3), "expected float32, found float64"),
        (Bounded(-1, 1, (3,)), np.zeros((3, 2), "f4"), "expected a shape that ends in (3,), found (3, 2)"),
        (Bounded(-1, 1), "a", "expected numbers of dtype float32, found 'a'"),
        (Bounded(0, 3, dtype="int64"), 1.5, "expected whole numbers for int64, found 1.5"),
        (TWO, [[0, 5], [1, 4]], "row 1: expected a whole number from 5 to 9, found 4 at [1]"),
        (Categorical(3), [[0, 1], [2, 3]], "row (1, 1): expected a code from 0 to 2, found 3"),
        (Categorical(3, mask=MASK), 1, "expected one of the codes [0, 2], found 1"),
        (MultiCategorical([3, 2]), [2, 2], "expected a code from 0 to 1, found 2 at [1]"),
        (OneHot(3), [[1, 0, 0], [1, 1, 0]], "row 1: expected one 1 among 3 zeros, found [True, True, False]"),
        (OneHot(3, dtype="int64"), [0, 2, 0], "expected one 1 among 3 zeros, found [0, 2, 0]"),
        (OneHot(3), [0, 0, 0], "expected one 1 among 3 zeros, found [False, False, False]"),
        (OneHot(3, mask=MASK), [0, 1, 0], "where the mask [True, False, True] is true, found [False, True, False]"),
        (MultiOneHot([2, 3]), [1, 0, 0, 0, 0], "expected one 1 in each part, [2, 3]"),
        (Binary((2,), "int8"), [0, 2], "expected 0 or 1, found 2 at [1]"),
        (Choice([Bounded(0, 1), Bounded(4, 5)]), [0.5, 2.0], "row 1: expected one of [Bounded("),
        (NonTensor((2,)), ["a"], "expected a shape that ends in (2,), found (1,)"),
        (Composite({"a": Categorical(3)}), {}, "field 'a': expected this field, found []"),
        (Composite({"a": {"b": Categorical(3)}}), {"a": {"b": [0, 7]}}, "field ('a', 'b'): row 1: expected a code"),
        (Composite({"a": Binary(), "b": Binary()}), {"a": [0], "b": [0, 1]}, "expected the batch shape (1,) of field"),
        (Composite({"a": Binary()}), 3, "field 'a': expected this field, found 3"),
        (stack_specs([Binary(), Binary()]), [0], "expected a shape that ends in (2,), found (1,)"),
        (stack_specs([Categorical(2), Categorical(3)]), [[1, 2], [2, 2]], "spec 0 of the stack: row 1: expected"),
        (stack_specs([Binary((1,)), Binary((2,))]), ([[0]], [[0, 1]] * 2), "shape of the earlier specs, (1,)"),
        (stack_specs([Binary((2,)), Binary((3,))]), [0], "expected a tuple of 2 values, one for each spec"),
    ],
)  # fmt: skip
def test_what_is_not_in_a_domain_is_told(spec: Domain, values: Any, reason: str) -> None:
    found = spec.why_not(values)
    assert found is not None
    assert reason in found
    assert not spec.contains(values)
    with pytest.raises(DataError) as raised:
        spec.check(values, where="append")
    assert str(raised.value) == f"append: {found}"


def test_what_is_in_a_domain() -> None:
    assert Bounded(-1, 1).contains([-1, 0.5, 1])
    assert Unbounded().contains([math.nan, math.inf])
    assert Unbounded((), "uint8").contains(255)
    assert not Unbounded((), "uint8").contains(256)
    assert NonTensor().contains(["a", object()])
    assert Choice([Bounded(0, 1), Bounded(4, 5)]).contains([0.5, 4.5])
    assert Composite({"a": Binary()}).contains({"a": [0, 1], "other": "anything"})
    spec = FieldSpec("x", np.dtype(np.int8), (2,))
    assert Spec({"x": spec}).composite() == Composite({"x": Unbounded((2,), "int8")})


@pytest.mark.parametrize("spec", one_of_each(), ids=repr)
def test_zeros_and_ones_have_the_shape_and_dtype_of_values(spec: Domain) -> None:
    def check(values: Any, like: Any, number: int) -> None:
        if isinstance(like, dict):
            assert values.keys() == like.keys()
            for name, one in like.items():
                check(values[name], one, number)
        else:
            assert np.shape(values) == np.shape(like)
            assert np.asarray(values).dtype == np.asarray(like).dtype
            assert isinstance(spec, NonTensor) or (np.asarray(values) == number).all()

    for batch in ((), (2, 3)):
        check(spec.zeros(batch), spec.sample(0, batch), 0)
        check(spec.ones(batch), spec.sample(0, batch), 1)


# --- projections, encodings ------------------------------------------------------------------------------------------


def test_projections_are_the_nearest_values() -> None:
    assert Bounded(-1, 1).project([-7, 0.25, math.inf, math.nan]).tolist() == [-1, 0.25, 1, 0]
    assert Bounded(2, 3).project([math.nan]).tolist() == [2]
    assert Bounded(0, 5, dtype="int64").project([-3.0, 2.4, 2.6, 1e300]).tolist() == [0, 2, 3, 5]
    assert Bounded(-(2**63), 2**63 - 1, dtype="int64").project([1e30, -1e30]).tolist() == [2**63 - 1, -(2**63)]
    assert Binary(dtype="int8").project([-4, 0.4, 0.6, 9]).tolist() == [0, 0, 1, 1]
    assert Categorical(4).project([-1, 2, 9]).tolist() == [0, 2, 3]
    for mask in product([False, True], repeat=4):
        if any(mask):
            allowed = [code for code in range(4) if mask[code]]
            nearest = [min(allowed, key=lambda code: (abs(code - asked), code)) for asked in range(4)]
            assert Categorical(4, mask=np.array(mask)).project(range(4)).tolist() == nearest
    assert OneHot(3, dtype="float32").project([0.2, 0.9, 0.1]).tolist() == [0, 1, 0]
    assert OneHot(3, mask=MASK).project([0.2, 0.9, 0.1]).tolist() == [True, False, False]
    assert MultiOneHot([2, 2]).project([0, 3, 5, 4]).tolist() == [False, True, True, False]
    assert Choice([Bounded(0, 1), Bounded(4, 5)]).project([0.5, 2.0, 3.0, 9]).tolist() == [0.5, 1, 4, 5]
    assert Unbounded((), "int8").project([1000, -1000, 5]).tolist() == [127, -128, 5]
    with pytest.raises(DataError, match="expected numbers"):
        Bounded(0, 1).project(["a"])


def test_codes_become_vectors_and_come_back() -> None:
    assert OneHot(3).encode([2, 0]).tolist() == [[False, False, True], [True, False, False]]
    assert OneHot(3, dtype="float32").encode(1).tolist() == [0, 1, 0]
    assert OneHot(3).decode([[0, 0, 1]]).tolist() == [2]
    assert MultiOneHot([2, 3]).encode([1, 0]).tolist() == [False, True, True, False, False]
    assert MultiOneHot([2, 3]).decode([[0, 1, 0, 0, 1]]).tolist() == [[1, 2]]
    assert Categorical(3, dtype="int8").encode([2.0]).dtype == np.int8
    nested = Composite({"a": {"b": OneHot(2)}, "c": Bounded(0, 1)})
    assert nested.encode({"a": {"b": [1]}, "c": [0.5], "more": 1})["a"]["b"].tolist() == [[False, True]]
    numbered = Choice([NonTensor(example="left"), NonTensor(example="right")])
    assert numbered.decode(numbered.encode(["right", "left"])) == ["right", "left"]
    assert Choice([Bounded(0, 1), Bounded(4, 5)]).decode([4.5, 0.5]).tolist() == [4.5, 0.5]
    for wrong, reason in [
        (3, "expected a code from 0 to 2, found 3"),
        (0.5, "expected whole numbers for int64, found 0.5"),
    ]:
        with pytest.raises(DataError, match=reason):
            OneHot(3).encode(wrong)
    with pytest.raises(DataError, match=r"field \('a', 'b'\): row 0: expected a code from 0 to 1, found 2"):
        nested.encode({"a": {"b": [2]}, "c": [0.5]})
    with pytest.raises(DataError, match="field 'c': expected this field"):
        nested.encode({"a": {"b": [1]}})
    with pytest.raises(DataError, match="expected one of"):
        numbered.encode("up")


def test_a_mask_can_be_changed() -> None:
    one = Categorical(3, (2,), mask=np.array([[1, 0, 1], [0, 1, 1]], bool))
    assert not one.contains([1, 1])
    assert one.with_mask(None).contains([1, 1])
    assert one.with_mask(~MASK).contains([1, 1])
    assert one.with_mask(~MASK) != one
    with pytest.raises(ConfigError, match="expected a mask that allows a choice at every position"):
        one.with_mask(np.zeros(3, bool))
    with pytest.raises(
        ConfigError, match=r"Categorical: mask: expected values that broadcast to the shape \(2, 3\), found \(4,\)"
    ):
        one.with_mask(np.ones(4, bool))
    with pytest.raises(ConfigError, match="expected a mask of booleans"):
        one.with_mask([0, 1, 1])
    joined = MultiCategorical([3, 2], mask=np.array([1, 0, 1, 0, 1], bool))
    assert sorted(map(tuple, joined.enumerate().tolist())) == [(0, 1), (2, 1)]
    assert joined.one_hot().mask.tolist() == [True, False, True, False, True]
    assert joined.with_mask(joined.mask) == joined
    with pytest.raises(ConfigError, match="expected a mask of 5 booleans, or of 3 booleans for each code"):
        joined.with_mask(np.ones(4, bool))
    with pytest.raises(ConfigError, match="allows a choice at every position"):
        MultiOneHot([2, 2], mask=np.array([1, 1, 0, 0], bool))


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_what_one_mask_allows_the_opposite_one_does_not(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(len(shape))
    one, two = (generator.permuted(np.broadcast_to(np.arange(n) < 2, (*shape, n)), axis=-1) for n in (5, 7))
    both = np.concatenate([one, two], -1)
    for spec in (
        Categorical(5, shape, mask=one),
        OneHot(5, (*shape, 5), mask=one),
        MultiCategorical([5, 7], (*shape, 2), mask=both),
        MultiOneHot([5, 7], (*shape, 12), mask=both),
    ):
        opposite = spec.with_mask(~spec.mask)
        for batch in ((), (2, 3)):
            values = spec.sample(0, batch)
            assert not opposite.contains(values)
            moved = opposite.project(values)
            assert opposite.contains(moved)
            codes, others = (
                (values, moved)
                if isinstance(spec, Categorical | MultiCategorical)
                else map(spec.categorical().one_hot().with_mask(None).decode, (values, moved))
            )
            assert (codes != others).all()


# --- how many ---------------------------------------------------------------------------------------------------------


def test_all_values_in_order() -> None:
    assert Categorical(3).enumerate().tolist() == [0, 1, 2]
    assert Categorical(2, (2,)).enumerate().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert MultiCategorical([2, 3]).enumerate().tolist() == [list(row) for row in product(range(2), range(3))]
    assert OneHot(3).enumerate().tolist() == np.eye(3, dtype=bool).tolist()
    assert MultiOneHot([2, 2]).enumerate().shape == (4, 4)
    assert Bounded(-1, 1, dtype="int8").enumerate().tolist() == [-1, 0, 1]
    assert Binary((2,)).enumerate().tolist() == [list(row) for row in product([False, True], repeat=2)]
    both = Composite({"a": Categorical(2), "b": {"c": Categorical(3)}})
    found = both.enumerate()
    assert list(zip(found["a"], found["b"]["c"], strict=True)) == list(product(range(2), range(3)))
    assert (
        stack_specs([Categorical(2), Categorical(3)]).enumerate().tolist()
        == MultiCategorical([2, 3]).enumerate().tolist()
    )
    assert Choice([NonTensor(example="a"), NonTensor(example="b")]).enumerate().tolist() == ["a", "b"]


def test_how_many_values_there_are() -> None:
    assert Categorical(5, (2,)).cardinality == 25
    assert MultiCategorical([3, 4, 5], (2, 3)).cardinality == 3600
    assert MultiOneHot([3, 4], (2, 7)).cardinality == 144
    assert Binary((3,)).cardinality == 8
    assert Unbounded((84,), "uint8").cardinality == 256**84
    assert Unbounded((2,)).cardinality == Bounded(0, 1).cardinality == NonTensor().cardinality == math.inf
    assert Bounded(2, 2).cardinality == 1
    assert Categorical(3, (-1,)).cardinality == math.inf
    assert Composite({"a": Categorical(3), "b": Binary()}).cardinality == 6
    assert Composite({"a": Categorical(3), "b": Unbounded()}).cardinality == math.inf
    assert Choice([Categorical(3), Categorical(4)]).cardinality == 7
    for spec in (Unbounded((9,), "uint8"), Bounded(0, 1), Composite({"a": Unbounded()}), NonTensor()):
        with pytest.raises(ConfigError, match="enumerate: expected at most 1048576 values, found"):
            spec.enumerate()
    with pytest.raises(ConfigError, match="expected at most 2 values, found 3"):
        Categorical(3).enumerate(most=2)


# --- equality, and what cannot be made -------------------------------------------------------------------------------


def test_specs_that_say_the_same_are_equal_and_no_others() -> None:
    made = [*one_of_each(), *(one.to("cuda:0") for one in one_of_each())]
    made += [Bounded(-1, 3, (3,)), Bounded(-2, 2, (3,)), Bounded(-1, 2, (4,)), Bounded(-1, 2, (3,), "float64")]
    made += [Categorical(4), Categorical(3, (1,)), Categorical(3, dtype="int8"), Categorical(3, mask=MASK), OneHot(4)]
    made += [MultiCategorical([2, 3]), MultiOneHot([2, 3]), NonTensor(example="b"), Unbounded((3,)), Binary((2,))]
    made += [Composite({"a": Categorical(3)}), Composite({"a": Categorical(3)}, ()).unsqueeze(0), Composite({})]
    again = [from_json(one.to_json()) for one in made]
    for (number, one), (other_number, other) in product(enumerate(made), enumerate(again)):
        assert (one == other) == (number == other_number), (one, other)
    assert len(set(made) | set(again)) == len(made)
    assert Bounded(0.0, 1) == Bounded(-0.0, 1)
    assert hash(Bounded(0.0, 1)) == hash(Bounded(-0.0, 1))
    assert Composite({"a": Binary(), "b": Unbounded()}) == Composite({"b": Unbounded(), "a": Binary()})
    assert Categorical(3) != 3


def test_specs_are_never_changed() -> None:
    low = np.zeros(2)
    spec = Bounded(low, 1.0, (2,))
    low[0] = 5
    assert spec.low.tolist() == [0, 0]
    mask = MASK.copy()
    codes = Categorical(3, mask=mask)
    mask[1] = True
    assert codes.mask.tolist() == MASK.tolist()
    for one in (spec, deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert one == spec
        with pytest.raises(ValueError, match="read-only"):
            one.low[0] = 5
    with pytest.raises(AttributeError):
        spec.shape = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        Composite({"a": spec}).entries["a"] = spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bounded(1, 0), "expected low to be at most high"),
        (lambda: Bounded(math.nan, 0), "expected bounds as numbers, found NaN"),
        (lambda: Bounded("a", 0), "expected bounds as numbers, found 'a'"),
        (lambda: Bounded(0, 300, dtype="uint8"), "expected bounds that uint8 can represent, found 300"),
        (lambda: Bounded(0.5, 3, dtype="uint8"), "expected whole numbers as bounds of uint8, found 0.5"),
        (lambda: Bounded([0, 0], [1, 1], (3,)), r"expected values that broadcast to the shape \(3,\), found \(2,\)"),
        (lambda: Bounded([0, 0], [1, 1, 1]), r"expected bounds of the same shape, found \(2,\) and \(3,\)"),
        (lambda: Bounded(0, 1, dtype="complex64"), "expected a boolean or integer or floating dtype, found complex64"),
        (lambda: Unbounded((-2,)), "expected a shape of sizes of at least 0, or -1 for a dynamic dimension"),
        (lambda: Unbounded("ab"), "expected a shape of sizes of at least 0"),
        (lambda: Unbounded(dtype="nonsense"), "expected a NumPy dtype, found 'nonsense'"),
        (lambda: Categorical(0), "expected n as an integer of at least 1, found 0"),
        (lambda: Categorical(300, dtype="int8"), "expected a dtype that can represent 299, found int8"),
        (lambda: Categorical(3, dtype="float32"), "expected a boolean or integer dtype, found float32"),
        (lambda: OneHot(3, (4,)), r"expected a shape that ends in 3, found \(4,\)"),
        (lambda: MultiOneHot([[2, 3]]), "expected nvec as a list of numbers"),
        (lambda: MultiCategorical([2, 0]), "expected nvec as integers of at least 1"),
        (lambda: Choice("abc"), "expected a list of specs, found 'abc'"),
        (lambda: Choice([]), "expected a list of specs"),
        (lambda: Choice(["a"]), "expected specs of one array, found 'a'"),
        (lambda: Choice([Categorical(3), Categorical(3, (2,))]), "expected specs of int64 and the shape"),
        (lambda: Choice([Categorical(3), Categorical(3, dtype="int8")]), "expected specs of int64 and the shape"),
        (lambda: Composite({"a": 3}), "field 'a': expected a spec, found 3"),
        (lambda: Composite({3: Binary()}), "expected names of fields as Unicode texts, or tuples of them, found 3"),
        (lambda: Composite([Binary()]), "expected specs by name"),
        (lambda: Composite({"a": Binary((3,))}, (2,)), r"'a': expected a shape that begins with \(2,\), found"),
        (lambda: stack_specs([]), "expected at least one spec, found none"),
        (lambda: stack_specs([Binary(), Composite({})]), "expected specs of equal kind and device"),
        (lambda: stack_specs([Binary(), Binary((2,))]), "expected 0 dimensions of bool"),
        (lambda: stack_specs([Categorical(2), Categorical(2, dtype="int8")]), "expected 0 dimensions of int64"),
        (lambda: stack_specs([Composite({}), Composite({}, (2,))]), r"expected the shape \(\), found \(2,\)"),
        (lambda: stack_specs([Binary(), Binary().to("cuda")]), "expected specs of equal kind and device"),
        (lambda: stack_specs([OneHot(3), OneHot(3)], 1), "stack: expected an axis from -1 to 0, found 1"),
        (lambda: NonTensor(example=object()).to_json(), "expected an example that JSON can represent"),
        (lambda: from_batch({"a": np.zeros(3)}), "field 'a': expected 2 axes, found"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_bounds_are_those_of_the_dtype() -> None:
    assert Bounded(0, np.inf, dtype="int16").high == 32767
    assert Bounded(0, 1).dtype == np.float32
    assert Bounded(np.zeros(2, np.int8), np.ones(2, np.int8)).dtype == np.int8
    assert Bounded(np.zeros(2), 1).dtype == np.float64
    assert Bounded(0, 0.1, dtype="float32").contains(np.float32(0.1))
    assert Bounded(0, 5, dtype="int32").astype("int8").dtype == np.int8
    wide = Bounded([0, 1], [2**64 - 1, 5], dtype="uint64")  # of which NumPy makes floats
    assert wide.high.tolist() == [2**64 - 1, 5]
    assert wide.contains([2**64 - 1, 5])
    assert from_json(wide.to_json()) == wide
    for none in (
        Bounded(np.zeros((0, 3)), np.ones((0, 3))),
        MultiCategorical(np.ones((2, 0), int)),
        Categorical(4, (0, 3), mask=np.ones((0, 3, 4), bool)),
    ):
        assert from_json(json.dumps(none.to_json())) == none, "of no places"
    assert wide.project([[2.0**65, -3.0]]).tolist() == [[2**64 - 1, 1]]
    assert Composite({"a": Unbounded()}).astype("float16").dtype == {"a": np.float16}
    with pytest.raises(ConfigError, match="expected bounds that int8 can represent"):
        Bounded(0, 500, dtype="int32").astype("int8")


def test_entries_of_a_composite_are_found_added_and_left_out() -> None:
    spec = Composite({"a": Binary(), ("b", "c"): Categorical(3)})
    assert (
        spec
        == Composite({"a": Binary(), "b": {"c": Categorical(3)}})
        == Composite({"a": Binary()}).with_fields({("b", "c"): Categorical(3)})
    )
    assert spec["b", "c"] is spec["b"]["c"]
    assert ("b", "c") in spec
    assert ("b", "d") not in spec
    assert 0 not in spec
    values = {"a": np.zeros(4, bool), "b": {"c": np.zeros(4, np.int64)}}
    assert spec.contains(values)
    assert values in spec
    assert {"a": values["a"]} not in spec
    assert list(spec) == ["a", "b"]
    assert list(spec.leaves()) == ["a", ("b", "c")]
    more = spec.with_fields({"b": Composite({"d": Binary()}), "a": Unbounded()})
    assert list(more.leaves()) == ["a", ("b", "c"), ("b", "d")]
    assert more["a"] == Unbounded()
    assert more.without(("b", "c"), "a") == Composite({"b": {"d": Binary()}})
    assert spec.to("cuda:1")["b", "c"].device == "cuda:1"
    assert spec.to("cuda:1").to(None) == spec
    for wrong in (lambda: spec["d"], lambda: spec["b", "d"], lambda: spec.without("d"), lambda: spec["a", "x"]):
        with pytest.raises(MissingFieldError, match=r"expected a field .* found \['a', \('b', 'c'\)\]"):
            wrong()


def test_a_batch_says_what_its_fields_are() -> None:
    batch = {
        "obs": np.zeros((4, 5, 3), np.float16),
        "next": {"done": np.zeros((4, 5), bool)},
        "text": np.full((4, 5), "hi", object),
    }
    spec = from_batch(batch)
    assert spec == Composite(
        {"obs": Unbounded((3,), "float16"), "next": {"done": Unbounded((), bool)}, "text": NonTensor(example="hi")}
    )
    assert spec.contains(batch)
    assert from_batch({"obs": np.zeros((4, 5))}, batch_dims=0) == Composite({"obs": Unbounded((4, 5), "float64")})


def test_what_files_say_is_checked() -> None:
    good = Composite({"a": Categorical(3)}).to_json()
    for wrong, message in [
        ("{", "expected JSON"),
        ([], "expected a JSON object with a version"),
        ({**good, "version": 2}, "expected version 1 at most, found version 2, which a newer mouse-data wrote"),
        ({"version": 1, "type": "Path"}, "expected one of .* found 'Path'"),
        ({"version": 1, "type": "Categorical"}, "expected the arguments of Categorical"),
        ({"version": 1, "type": "Categorical", "n": -1}, "expected the arguments of Categorical"),
        ({"version": 1, "type": "Unbounded", "shape": [1 << 40]}, "expected a step of at most"),
        ({"version": 1, "type": "Categorical", "n": 1 << 40, "mask": [True]}, "expected a step of at most"),
        ({"version": 1, "type": "MultiCategorical", "nvec": [1 << 40], "mask": [True]}, "expected a step of at most"),
        ({"version": 1, "type": "Binary", "more": 1}, "expected the arguments of Binary"),
        ({"version": 1, "type": "Composite", "entries": {"a": 3}}, "expected a JSON object, found 3"),
        ({"version": 1, "type": "Choice", "choices": []}, "expected the arguments of Choice"),
    ]:
        with pytest.raises(DataError, match=message):
            from_json(wrong)
    deep: Any = {"type": "Binary"}
    for _ in range(100):
        deep = {"type": "Composite", "entries": {"a": deep}}
    with pytest.raises(DataError, match="specs nested in at most 64 levels"):
        from_json({"version": 1, **deep})
