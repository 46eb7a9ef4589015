"""Specs from the spaces of gymnasium and the specs of dm_env, and back: both have the same values."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError
from mouse_core.spec import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    NonTensor,
    OneHot,
    Unbounded,
    from_dm_env,
    from_gymnasium,
    to_gymnasium,
)

SPACES: list[tuple[Any, Any]] = [
    (spaces.Box(-1, 1, (3,), np.float32), Bounded(-1, 1, (3,), np.float32)),
    (spaces.Box(-np.inf, np.inf, (2, 2), np.float64), Unbounded((2, 2), np.float64)),
    (spaces.Box(np.array([0.0, -np.inf]), np.array([1.0, 2.0])), Bounded([0.0, -np.inf], [1.0, 2.0], dtype=np.float32)),
    (spaces.Box(0, 255, (4, 4, 3), np.uint8), Bounded(0, 255, (4, 4, 3), np.uint8)),
    (spaces.Discrete(5), Categorical(5)),
    (spaces.Discrete(3, start=-1), Bounded(-1, 1, (), np.int64)),
    (spaces.MultiDiscrete([[2, 3], [4, 1]]), MultiCategorical([[2, 3], [4, 1]])),
    (spaces.MultiDiscrete([2, 3], start=[1, -4]), Bounded([1, -4], [2, -2], dtype=np.int64)),
    (spaces.MultiBinary(4), Binary((4,), np.int8)),
    (spaces.MultiBinary([2, 3]), Binary((2, 3), np.int8)),
    (spaces.Text(8), NonTensor(example="")),
    (
        spaces.Dict({"a": spaces.Discrete(2), "in": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (1,))])}),
        Composite({"a": Categorical(2), "in": {"0": Categorical(3), "1": Bounded(0, 1, (1,))}}),
    ),
]


@pytest.mark.parametrize(("space", "spec"), SPACES, ids=[str(space)[:40] for space, _ in SPACES])
def test_spaces_of_gymnasium(space: Any, spec: Any) -> None:
    assert from_gymnasium(space) == spec
    if "Text" not in str(space) and "Tuple" not in str(space):
        back = to_gymnasium(spec)
        assert from_gymnasium(back) == spec
        space.seed(3)
        assert back.contains(space.sample())
        assert spec.contains(space.sample())
        assert space.contains(as_given(spec.sample(1), space))


def as_given(values: Any, space: Any) -> Any:
    """A sample as gymnasium has it: tuples for tuples, integers of NumPy for Discrete."""
    if isinstance(values, dict):
        return {name: as_given(value, space[name]) for name, value in values.items()}
    return values[()] if isinstance(space, spaces.Discrete) else values


def test_spaces_as_they_are_written_down() -> None:
    """As Minari writes them."""
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1.0, 0.0], "high": [1.0, 1.0]}
    codes = {"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3], "start": [0, 0]}
    written = {"type": "Dict", "subspaces": {"a": box, "b": {"type": "Tuple", "subspaces": [codes]}}}
    assert from_gymnasium(written) == Composite(
        {"a": Bounded([-1, 0], [1, 1], dtype=np.float32), "b": {"0": MultiCategorical([2, 3])}}
    )
    assert from_gymnasium({"type": "MultiBinary", "n": [2, 2]}) == Binary((2, 2), np.int8)
    assert from_gymnasium({"type": "Discrete", "start": 2, "n": 3}) == Bounded(2, 4, (), np.int64)


def boxes() -> st.SearchStrategy[spaces.Box]:
    shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "float64", "uint8", "int32"])
    bound = st.integers(0, 100)
    return st.builds(
        lambda shape, dtype, a, b: spaces.Box(min(a, b), max(a, b), shape, dtype), shapes, dtypes, bound, bound
    )


@given(space=boxes(), seed=st.integers(0, 1000))
def test_what_one_has_the_other_has(space: spaces.Box, seed: int) -> None:
    spec = from_gymnasium(space)
    space.seed(seed)
    assert spec.contains(space.sample())
    assert not spec.contains(np.asarray(space.high + 1, np.float64))
    whole = space.shape == () and space.dtype.kind in "iu"
    assert to_gymnasium(spec).contains(np.asarray(space.sample(), np.int64 if whole else space.dtype)[()])


def test_what_gymnasium_cannot_say_is_refused() -> None:
    for space in (spaces.Sequence(spaces.Discrete(2)), spaces.OneOf([spaces.Discrete(2)]), 3):
        with pytest.raises(ConfigError, match=r"space/x: expected one of \['Box', 'Dict', .* found"):
            from_gymnasium(
                spaces.Dict({"x": space})
                if isinstance(space, spaces.Space)
                else {"type": "Dict", "subspaces": {"x": space}}
            )
    with pytest.raises(ConfigError, match="space: expected a space of type Box"):
        from_gymnasium({"type": "Box", "shape": [2]})
    for spec, message in [
        (OneHot(3), r"spec/x: expected numbers or codes, which gymnasium supports, .*; its categorical\(\) has one"),
        (NonTensor(), "spec/x: expected numbers or codes"),
        (Categorical(2, mask=[True, False]), r"spec/x: expected a spec without a mask.*with_mask\(None\)"),
        (Unbounded((-1,)), r"spec/x: expected sizes for all dimensions, found \(-1,\)"),
    ]:
        with pytest.raises(ConfigError, match=message):
            to_gymnasium(Composite({"x": spec}))
    assert to_gymnasium(OneHot(3).categorical()) == spaces.Discrete(3)


def test_specs_of_dm_env() -> None:
    specs = pytest.importorskip("dm_env.specs")
    theirs = {
        "array": specs.Array((2,), np.float32, name="array"),
        "bounded": specs.BoundedArray((2,), np.float64, [-1, -2], [1, np.inf], name="bounded"),
        "codes": specs.DiscreteArray(4, dtype=np.int32, name="codes"),
        "text": specs.StringArray((), name="text"),
        "flag": specs.BoundedArray((), bool, False, True, name="flag"),
    }
    ours = Composite(
        {
            "array": Unbounded((2,), np.float32),
            "bounded": Bounded([-1, -2], [1, np.inf], dtype=np.float64),
            "codes": Categorical(4, dtype=np.int32),
            "text": NonTensor(example=""),
            "flag": Bounded(False, True, (), np.bool_),
        }
    )
    assert from_dm_env(theirs) == ours
    assert from_dm_env([theirs["codes"]]) == Composite({"0": Categorical(4, dtype=np.int32)})
    with pytest.raises(ConfigError, match="spec/0: expected a spec of dm_env with numbers or texts, found 3"):
        from_dm_env([3])
