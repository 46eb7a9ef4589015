"""Specs as JAX's arrays, and as shapes and dtypes."""

import jax
import numpy as np
import pytest

from mouse_core import ConfigError
from mouse_core.spec import Bounded, Categorical, Composite, Domain, NonTensor, Unbounded, stack_specs
from mouse_jax import shape_dtypes
from mouse_jax.specs import sample

SPEC = Composite({"observation": {"state": Bounded(-1, 1, (2,))}, "action": Categorical(3)})
STACKS = [
    [Bounded(0, 1), Bounded(0, 2)],
    [Unbounded((2,)), Unbounded((3,))],
    [Composite({"a": Bounded(0, 1)}), Composite({"a": Bounded(0, 2)})],
    [Composite({"a": Bounded(0, 1)}), Composite({"b": Bounded(0, 2)})],
]


@pytest.mark.parametrize("x64", [False, True])
def test_shapes_and_dtypes_are_those_of_values(x64: bool) -> None:
    with jax.enable_x64(x64):
        found = shape_dtypes(SPEC, (4,))
        assert found["action"] == jax.ShapeDtypeStruct((4,), np.int64 if x64 else np.int32)
        drawn = sample(SPEC, 0, 4)
        assert jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), drawn) == found


def test_what_jax_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="shape_dtypes: expected a spec of numbers, found"):
        shape_dtypes(Composite({"a": NonTensor()}))
    with pytest.raises(ConfigError, match="expected sizes for all dimensions"):
        shape_dtypes(Composite({"a": Unbounded((-1,))}))
    with pytest.raises(ConfigError, match="batch: expected a shape"):
        shape_dtypes(Unbounded(), -1)


@pytest.mark.parametrize("specs", STACKS, ids=["dense", "shapes", "nested", "fields"])
def test_stacks_are_what_their_values_are(specs: list[Domain]) -> None:
    stack = stack_specs(specs)
    for spec in (stack, Composite({"in": stack})):
        drawn = sample(spec, 0, 4)
        assert shape_dtypes(spec, 4) == jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), drawn)
