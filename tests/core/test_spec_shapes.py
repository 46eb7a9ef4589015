"""Axes of specs: added, taken, repeated, dynamic, stacked of what differs; arrays of the same shape say what comes."""

import re
from typing import Any

import numpy as np
import pytest

from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.spec import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    Unbounded,
    check_no_exclusive_keys,
    consolidate,
    contains_lazy,
    from_json,
    stack_specs,
)

SHAPE = (5, 3, 4)
LOW = np.arange(60).reshape(SHAPE)


def of_shape(shape: tuple[int, ...]) -> list[Any]:
    """Specs of every kind whose free axes are these."""
    return [
        Bounded(0, 1, shape),
        Unbounded(shape, "int8"),
        Binary(shape),
        Categorical(3, shape, mask=np.array([True, False, True])),
        MultiCategorical(np.full([abs(size) for size in shape], 3) if -1 not in shape else 3, shape),
        OneHot(3, (*shape, 3), mask=np.array([True, False, True])),
        MultiOneHot([2, 3], (*shape, 5)),
        NonTensor(shape, "a"),
        Choice([Bounded(0, 1, shape), Bounded(2, 3, shape)]),
        Composite({"a": Unbounded((*shape, 7)), "b": OneHot(2, (*shape, 2)), "c": {"d": Binary(shape)}}, shape),
        stack_specs([Composite({"a": Binary((*shape, n))}, shape) for n in (1, 2)], len(shape))[..., 0],
    ]


INDICES: list[Any] = [
    0,
    -1,
    (1, 2),
    (1, 2, 3),
    slice(1, 4, 2),
    (slice(None), 0),
    (..., 0),
    (1, ..., 2),
    (None, ..., None),
    (0, None, slice(1)),
    [0, 2, 2],
    ([0, 1], [2, 0]),
    (slice(None), np.array([[0, 2], [1, 1]])),
    (..., [0, 1], [0]),
    np.array([True, False, True, False, False]),
    range(2),
    [],
]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_an_index_takes_what_it_takes_of_an_array(index: Any) -> None:
    expected = LOW[index]
    assert (Bounded(LOW, LOW + 5)[index].low == expected).all()
    mask = np.arange(60 * 2).reshape(*SHAPE, 2) % 3 > 0
    mask[..., 0] |= ~mask[..., 1]
    taken = np.stack([mask[..., 0][index], mask[..., 1][index]], -1)
    assert (Categorical(2, SHAPE, mask=mask)[index].mask == taken).all()
    assert (OneHot(2, (*SHAPE, 2), mask=mask)[index].mask == taken).all()
    for one in of_shape(SHAPE):
        own = one.shape[len(SHAPE) :]
        taken = one[index]
        assert taken.shape == (*expected.shape, *own)
        assert taken.contains(taken.sample(0, 2))
        if isinstance(one, Composite):
            assert all(leaf.shape[: expected.ndim] == expected.shape for leaf in taken.leaves().values())


@pytest.mark.parametrize("index", [5, (0, 3), (0, 0, 0, 0), range(10), [[2, 10]], (0, ..., 1, ..., 2), 0.5, "a", {}])
def test_an_index_that_no_array_has_is_refused(index: Any) -> None:
    for one in (Binary((5, 3)), Categorical(2, (5, 3)), OneHot(4, (5, 3, 4)), Composite({}, (5, 3))):
        if not (isinstance(one, Composite) and isinstance(index, str)):
            with pytest.raises(ConfigError, match="index: ") as raised:
                one[index]
            assert isinstance(raised.value, IndexError)


def test_axes_of_their_own_stay() -> None:
    one = OneHot(3, (5, 3))
    for wrong in (
        lambda: one[:, 0],
        lambda: one.unbind(1),
        lambda: one.squeeze(1),
        lambda: one.expand((2, 5, 4)),
        lambda: one.reshape(15),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert one.unsqueeze(-1).shape == (5, 1, 3)
    assert MultiOneHot([2, 3], (4, 5)).reshape((2, 2, 5)).shape == (2, 2, 5)


def test_shapes_follow_those_of_arrays() -> None:
    for one in of_shape((2, 1, 3)):
        own = one.shape[3:]
        assert one.reshape((3, -1, *own)).shape == (3, 2, *own)
        assert one.reshape((6, *own)).reshape((2, 1, 3, *own)) == one
        assert one.squeeze().shape == (2, 3, *own)
        assert one.squeeze(1).shape == (2, 3, *own)
        assert one.squeeze(0) == one
        for axis in range(-4, 4):
            wide = one.unsqueeze(axis)
            assert wide.shape[axis % 4] == 1
            assert wide.squeeze(axis % 4) == one
        assert one.expand((4, 2, 5, 3, *own)).shape == (4, 2, 5, 3, *own)
        assert one.expand((2, 5, 3, *own))[:, 0] == one[:, 0]
        assert one.unbind(2)[1] == one[:, :, 1]
        assert [len(one.unbind(axis)) for axis in range(3)] == [2, 1, 3]
    for wrong in (
        lambda: Binary((2, 3)).reshape((4, 2)),
        lambda: Binary((2, 3)).reshape((-1, 4)),
        lambda: Binary((2, 3)).expand((2, 4)),
        lambda: Binary((2, 3)).expand(3),
        lambda: Binary((2, 3)).squeeze(2),
        lambda: Binary((2, 3)).unsqueeze(4),
        lambda: Binary((2, 3)).unbind(2),
        lambda: Binary().unbind(),
    ):
        with pytest.raises(ConfigError, match=r"(reshape|expand|squeeze|unsqueeze|unbind): "):
            wrong()


def test_bounds_and_masks_move_with_their_axes() -> None:
    one = Bounded(LOW, LOW + 1)
    assert (one.reshape((15, 4)).low == LOW.reshape(15, 4)).all()
    assert (one.expand((2, *SHAPE)).low == np.stack([LOW, LOW])).all()
    assert one.unbind(1)[2].contains(LOW[:, 2])
    nvec = np.arange(1, 7).reshape(2, 3)
    codes = MultiCategorical(nvec)
    assert (codes[1].nvec == nvec[1]).all()
    assert (codes.reshape(6).nvec == nvec.ravel()).all()
    assert codes.reshape(6).cardinality == codes.cardinality == 720


def test_a_dynamic_dimension_takes_any_size() -> None:
    for one in of_shape((-1, 1, 2))[:-1]:
        sized = one.expand((3, *one.shape[1:]))
        assert sized.shape == (3, *one.shape[1:])
        for batch in ((), (4,)):
            assert one.contains(sized.sample(0, batch)), one
        assert one[:, 0].shape == (-1, 2, *one.shape[3:])
        assert one.squeeze(1).unsqueeze(1) == one
        assert one.expand((3, *one.shape)).shape == (3, *one.shape)
        assert one.expand((-1, 4, *one.shape[2:])).shape == (-1, 4, *one.shape[2:])
        assert from_json(one.to_json()) == one
        own = one.shape[3:]
        assert one.reshape((-1, 2, *own)).reshape((-1, 2, 1, *own)).shape == (-1, 2, 1, *own)
        for wrong in (
            lambda one=one: one.sample(0),
            lambda one=one: one.zeros(),
            lambda one=one: one[0],
            lambda one=one: one[1:2],
            lambda one=one: one.unbind(0),
            lambda one=one: one.reshape((4, *one.shape[3:])),
            lambda one=one: one.expand((-1, 1, 3, *one.shape[3:])),
        ):
            with pytest.raises(ConfigError, match=r"sizes for all|dynamic|of fixed size|ends in"):
                wrong()
    whole = Composite({"a": Unbounded((-1, 1, 2, 3)), "b": Categorical(4, (-1, 1, 2))}, (-1, 1, 2))
    batch = {"a": np.zeros((3, 1, 2, 3), "f4"), "b": np.zeros((3, 1, 2), np.int64)}
    assert whole.contains(batch)
    assert Composite({"x": Binary((1, -1))}, (1,))[0] == Composite({"x": Binary((-1,))})
    with pytest.raises(ConfigError, match="sizes for all dimensions"):
        Composite({"x": Binary((-1,))}).sample(0)


# --- stacks -----------------------------------------------------------------------------------------------------------


def two(axis: int) -> tuple[Composite, Composite, Any]:
    one = Composite({"a": Unbounded((1, 3))}, (1, 3))
    other = Composite({"a": Unbounded((1, 3)), "b": Unbounded((1, 3), "int64")}, (1, 3))
    return one, other, stack_specs([one, other], axis)


@pytest.mark.parametrize("axis", [0, 1, 2, -3, -2, -1])
def test_specs_that_differ_are_a_stack(axis: int) -> None:
    one, other, stacked = two(axis)
    place = axis % 3
    before = (slice(None),) * place
    assert isinstance(stacked, Stacked)
    assert stacked.shape == (*(1, 3)[:place], 2, *(1, 3)[place:])
    assert stacked[(*before, 0)] == stacked[(*before, 0, ...)] == one
    assert stacked[(*before, 1)] == stacked[(*before, -1)] == other
    assert stacked[before or ...] == stacked
    assert stacked[(*before, [1, 0, 1])] == stack_specs([other, one, other], place)
    assert stacked[(*before, slice(1))] == one.unsqueeze(place)
    assert stacked.unbind(place) == (one, other)
    wide = stacked.expand((4, *stacked.shape))
    assert isinstance(wide, Stacked)
    assert wide.axis == place + 1
    assert wide.shape == (4, *stacked.shape)
    assert wide[2] == stacked
    for unsqueezed in range(-4, 4):
        added = stacked.unsqueeze(unsqueezed)
        assert added.squeeze(unsqueezed) == stacked
    assert stacked.reshape(6).shape == (6,)
    assert stacked["a"] == Unbounded(stacked.shape)
    with pytest.raises(MissingFieldError, match="expected a field 'b' in all specs"):
        stacked["b"]
    assert "a" in stacked
    assert "b" not in stacked
    values = stacked.sample(0, (5, 6))
    assert isinstance(values, tuple)
    assert values[0]["a"].shape == (5, 6, 1, 3)
    assert stacked.contains(values)
    assert stacked.contains(stacked.zeros((2,)))
    assert stacked.squeeze().shape == tuple(size for size in stacked.shape if size != 1)


def test_a_dense_stack_has_arrays() -> None:
    one = stack_specs([Bounded(0, 1, (2,)), Bounded(4, 5, (2,)), Bounded(0, 1, (2,))], 1)
    assert one.is_dense
    assert one.shape == (2, 3)
    values = one.sample(0, 7)
    assert values.shape == (7, 2, 3)
    assert (values[..., 1] >= 4).all()
    assert (values[..., [0, 2]] <= 1).all()
    assert one.project(np.full((2, 3), 3.0, "f4")).tolist() == [[1, 4, 1]] * 2
    assert one[0] == stack_specs([Bounded(0, 1), Bounded(4, 5), Bounded(0, 1)])
    assert one[:, 0] == Bounded(0, 1, (2,))
    assert one[:, ::2] == Bounded(0, 1, (2, 2))
    assert one.reshape(6)[4] == Bounded(4, 5)
    assert stack_specs(one.unbind(0)).contains(values)
    nested = stack_specs([Composite({"x": Bounded(0, 1, (2,))}), Composite({"x": Bounded(4, 5, (2,))})])
    assert nested.sample(0, 3)["x"].shape == (3, 2, 2)
    assert nested.why_not({"x": np.zeros((3, 2, 2), "f4")}) == (
        "spec 1 of the stack: field 'x': row 0: expected a number from 4.0 to 5.0, found 0.0 at [0]"
    )
    assert nested.why_not({}) == "field 'x': expected this field, found []"
    assert "expected size 2 of axis -2, found the shape (2, 3, 2)" in str(
        nested.why_not({"x": np.zeros((2, 3, 2), "f4")})
    )
    hot = stack_specs([OneHot(3, mask=np.array([True, True, False])), OneHot(3)])
    assert hot.encode([0, 2]).tolist() == [[True, False, False], [False, False, True]]
    assert hot.decode(hot.encode([0, 2])) == (0, 2)
    with pytest.raises(DataError, match="expected one of the codes"):
        hot.encode([2, 2])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_stack_of_bounds_is_where_an_array_of_bounds_is(axis: int) -> None:
    """One spec holds the bounds of all places, the other a spec for each place of an axis."""
    low = np.moveaxis(np.broadcast_to(2 * np.arange(SHAPE[axis]), (*np.delete(SHAPE, axis), SHAPE[axis])), -1, axis)
    one = Bounded(low, low + 1)
    stacked = stack_specs(
        [Bounded(2 * n, 2 * n + 1, tuple(np.delete(SHAPE, axis)), "int64") for n in range(SHAPE[axis])], axis
    )
    changes = [lambda spec, index=index: spec[index] for index in INDICES]
    changes += [
        lambda spec: spec.reshape((12, 5)),
        lambda spec: spec.reshape((5, 2, 6)),
        lambda spec: spec.unsqueeze(1),
    ]
    changes += [lambda spec: spec.expand((2, *SHAPE)), lambda spec: spec[:1].squeeze(0), lambda spec: spec.unbind(1)[2]]
    for number, change in enumerate(changes):
        expected, found = change(one), change(stacked)
        assert found.shape == expected.shape, number
        assert (found.project(expected.zeros(2)) == expected.project(expected.zeros(2))).all(), number
        assert found.contains(expected.sample(1)), number


def test_stacks_of_composites_are_taken_across_their_axis() -> None:
    one, other = Composite({"x": Bounded(0, 1), "own": Binary()}), Composite({"x": Bounded(4, 5)})
    stacked = stack_specs([one, other])
    taken = stacked[[[0, 1], [1, 1]]]
    assert taken.shape == (2, 2)
    assert taken[0] == stacked
    assert taken[1] == stack_specs([other, other])
    assert taken["x"].project(np.zeros((2, 2), "f4")).tolist() == [[0, 4], [4, 4]]
    assert taken.contains(taken.sample(0, 3))
    dense = stacked.unbind()[0].without("own"), other
    whole = stack_specs(dense)[[[0, 1], [1, 1]]]
    assert whole.is_dense
    assert whole.sample(0, 7)["x"].shape == (7, 2, 2)
    assert whole.project(whole.zeros())["x"].tolist() == [[0, 4], [4, 4]]
    assert from_json(whole.to_json()) == whole


def test_ragged_stacks_have_dynamic_dimensions() -> None:
    one = stack_specs([Unbounded((5, n, 7)) for n in (6, 7, 8)])
    assert one.shape == (3, 5, -1, 7)
    assert [part.shape for part in one.sample(0)] == [(5, 6, 7), (5, 7, 7), (5, 8, 7)]
    assert one[:, 0].shape == (3, -1, 7)
    assert one[1] == Unbounded((5, 7, 7))
    assert one[:2].shape == (2, 5, -1, 7)
    assert one.expand((2, 3, 5, -1, 7)).shape == (2, 3, 5, -1, 7)
    with pytest.raises(ConfigError, match="expected -1 where the specs of the stack differ"):
        one.expand((3, 5, 6, 7))
    with pytest.raises(ConfigError, match="dynamic"):
        one[:, :, 0]
    with pytest.raises(DataError, match="expected a tuple of 3 values, one for each spec"):
        one.project(np.zeros((3, 5, 6, 7)))


def test_a_stack_is_an_entry_as_others_are() -> None:
    agents = stack_specs([Bounded(0, n, (2,)) for n in (1, 2, 3)])
    whole = Composite({"agents": agents, "other": Binary((3,))}, (3,))
    assert whole[0] == Composite({"agents": Bounded(0, 1, (2,)), "other": Binary()})
    assert whole[1:]["agents"] == stack_specs([Bounded(0, 2, (2,)), Bounded(0, 3, (2,))])
    wide = whole.expand((4, 3))
    assert wide[3] == whole
    assert wide.reshape(12)[7] == whole[1]
    assert whole.unbind()[2]["agents"] == Bounded(0, 3, (2,))
    batch = whole.sample(0, 4)
    assert batch["agents"].shape == (4, 3, 2)
    assert whole.contains(batch)
    assert from_json(whole.to_json()) == whole
    assert whole.astype("float64")["agents"].dtype == np.float64
    assert whole.to("cuda")["agents"].device == "cuda"
    ragged = Composite({"x": stack_specs([Binary((1,)), Binary((2,))])})
    assert ragged.contains(ragged.sample(0, 3))
    assert [one.shape for one in ragged.sample(0, 3)["x"]] == [(3, 1), (3, 2)]


def test_fields_that_only_some_have_are_made_empty() -> None:
    shared = Unbounded((5, 4))
    specs = [
        Composite({"shared": shared, "lidar": Bounded(0, 5, (20,)), "own": {"x": Unbounded((3, 1))}}),
        Composite({"shared": shared, "lidar": Bounded(0, 5, (20,)), "own": {"y": Categorical(3)}}),
        Composite({"shared": shared, "text": NonTensor((2,))}),
    ]
    stacked = stack_specs(specs)
    assert contains_lazy(Composite({"a": {"b": stacked}}))
    assert not contains_lazy(Composite({"a": specs[0]}))
    assert not check_no_exclusive_keys(Composite({"a": stacked}))
    assert check_no_exclusive_keys(Composite({"a": specs[0]}))
    whole = consolidate(Composite({"a": stacked}))["a"]
    assert check_no_exclusive_keys(whole)
    assert {key for one in specs for key in one.leaves()} == set(whole[0].leaves())
    assert all(set(one.leaves()) == set(whole[0].leaves()) for one in whole.specs)
    assert whole["shared"] == stack_specs([shared] * 3)
    assert whole["lidar"].shape == (3, -1)
    assert whole[2]["lidar"] == Unbounded((0,))
    assert whole["own", "x"].shape == (3, -1, -1)
    assert whole[0]["own", "y"] == Unbounded((), "int64")
    assert whole[0]["text"] == NonTensor((0,))
    assert whole.contains(whole.sample(0, 2))
    assert consolidate(whole) == whole
    assert consolidate(shared) is shared


def test_what_a_spec_is_reads_as_it_is_made() -> None:
    assert repr(Bounded(-1, 1, (3,))) == "Bounded(low=-1.0, high=1.0, shape=(3,), dtype=float32)"
    assert (
        repr(Composite({"a": Categorical(3)}, ()))
        == "Composite({'a': Categorical(n=3, shape=(), dtype=int64)}, shape=())"
    )
    assert re.match(r"Stacked\(\[Binary.*\], axis=0\)", repr(stack_specs([Binary((1,)), Binary((2,))])))
