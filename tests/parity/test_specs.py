"""Specs of values take arrays of torch and JAX as they take NumPy's, and say the same of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import mouse_jax.specs
import mouse_torch.specs
from mouse_core import ConfigError
from mouse_core.spec import (
    Bounded,
    Categorical,
    Choice,
    Composite,
    Domain,
    NonTensor,
    OneHot,
    Unbounded,
    from_batch,
    stack_specs,
)
from mouse_jax import shape_dtypes
from mouse_jax.specs import sample
from tests.comparing import host, same

SPEC = Composite(
    {
        "x": Bounded(-1, 1, (3,)),
        "next": {"hot": OneHot(4), "codes": Categorical(3, dtype="int32", mask=np.array([True, False, True]))},
        "either": Choice([Bounded(0, 1), Bounded(5, 6)]),
        "legs": stack_specs([Bounded(0, 1), Bounded(0, 5)]),
        "any": Unbounded((2,), "int8"),
    }
)


def converted(change: Any, values: Any) -> Any:
    return {name: converted(change, one) if isinstance(one, dict) else change(one) for name, one in values.items()}


def test_arrays_of_every_framework_are_checked_and_projected_alike() -> None:
    good = SPEC.sample(3, (4,))
    bad = {**good, "x": good["x"] + np.float32(1.5)}
    reason, nearest, decoded = SPEC.why_not(bad), SPEC.project(bad), SPEC.decode(good)
    for change in (torch.from_numpy, jnp.asarray):
        assert SPEC.contains(converted(change, good))
        assert SPEC.why_not(converted(change, bad)) == reason
        assert from_batch(converted(change, good), batch_dims=1) == from_batch(good, batch_dims=1)
        for found, expected in (
            (SPEC.project(converted(change, bad)), nearest),
            (SPEC.decode(converted(change, good)), decoded),
        ):
            assert (found["x"] == expected["x"]).all()
            assert (found["next"]["hot"] == expected["next"]["hot"]).all()
            assert type(found["x"]) is np.ndarray


def test_what_is_not_in_the_hosts_memory_is_told() -> None:
    values = torch.zeros(3, requires_grad=True)
    assert "expected numbers in the host's memory, found tensor(" in str(SPEC["x"].why_not(values))
    assert SPEC["x"].contains(values.detach())


@pytest.mark.parametrize("sample", [mouse_torch.specs.sample, mouse_jax.specs.sample], ids=["torch", "jax"])
def test_samples_are_those_of_numpy(sample: Any) -> None:
    spec = Composite({"observation": {"state": Bounded(-1, 1, (2,))}, "action": Categorical(3)})
    drawn = sample(spec, 5, (4, 2))
    same(drawn, spec.sample(5, (4, 2)))
    assert spec.with_fields({"action": Categorical(3, dtype=host(drawn["action"]).dtype)}).contains(drawn)
    for one in (Bounded(-1, [1.0, 2.0], (2,), "float32"), stack_specs([Bounded(-1, 1), Bounded(-5, 5)])):
        values = sample(one, 0, 3)
        assert values in one
        assert values * 9 not in one
    with jax.enable_x64(True):
        assert spec.contains(sample(spec, 1, 3))


OF_JAX = Composite({"observation": {"state": Bounded(-1, 1, (2,))}, "action": Categorical(3)})
STACKS = [
    [Bounded(0, 1), Bounded(0, 2)],
    [Unbounded((2,)), Unbounded((3,))],
    [Composite({"a": Bounded(0, 1)}), Composite({"a": Bounded(0, 2)})],
    [Composite({"a": Bounded(0, 1)}), Composite({"b": Bounded(0, 2)})],
]


@pytest.mark.parametrize("x64", [False, True])
def test_shapes_and_dtypes_are_those_of_values(x64: bool) -> None:
    with jax.enable_x64(x64):
        found = shape_dtypes(OF_JAX, (4,))
        assert found["action"] == jax.ShapeDtypeStruct((4,), np.int64 if x64 else np.int32)
        drawn = sample(OF_JAX, 0, 4)
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
