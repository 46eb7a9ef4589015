"""``global_mean`` over devices: loss and gradient are those of one device that has the whole batch."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mouse_jax import global_mean

WEIGHTS = np.array([0.3, -1.2, 0.7])


def ragged(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs ``[8, 6, 3]``, and which steps are there ``[8, 6]``: none of windows 2 and 3."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 7, 8)
    lengths[2:4] = 0
    return generator.normal(size=(8, 6, 3)), np.arange(6) < lengths[:, None]


def loss(weights: Any, inputs: Any, there: Any, axis_name: Any = None) -> jax.Array:
    return global_mean(jnp.tanh(inputs @ weights) ** 2, there, axis_name=axis_name)


def by_hand(inputs: np.ndarray, there: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss, and its gradient: d tanh(u)^2 = 2 tanh(u) (1 - tanh(u)^2) du, of the steps that are there."""
    value = np.tanh(inputs @ WEIGHTS)
    slope = (2 * value * (1 - value**2))[..., None] * inputs
    return (value[there] ** 2).sum() / there.sum(), slope[there].sum(axis=0) / there.sum()


def pmean_of(weights: Any, inputs: Any, there: Any) -> Any:
    value, slope = jax.value_and_grad(partial(loss, axis_name="data"))(weights, inputs, there)
    return value, jax.lax.pmean(slope, "data")


def in_jit(mesh: Mesh) -> Callable[..., Any]:
    def run(inputs: Any, there: Any) -> Any:
        placed = jax.device_put((inputs, there), NamedSharding(mesh, P("data")))
        return jax.jit(jax.value_and_grad(loss))(WEIGHTS, *placed)

    return run


def in_pmap(mesh: Mesh) -> Callable[..., Any]:
    def run(inputs: Any, there: Any) -> Any:
        parts = inputs.reshape(4, 2, 6, 3), there.reshape(4, 2, 6)
        return jax.tree.map(lambda each: each[3], jax.pmap(pmean_of, "data", in_axes=(None, 0, 0))(WEIGHTS, *parts))

    return run


def in_shard_map(mesh: Mesh, *, check_vma: bool) -> Callable[..., Any]:
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P(), P())}
    mapped = jax.jit(jax.shard_map(pmean_of, mesh=mesh, check_vma=check_vma, **specs))
    return lambda inputs, there: mapped(WEIGHTS, inputs, there)


WAYS = {
    "jit": in_jit,
    "pmap": in_pmap,
    "shard_map": partial(in_shard_map, check_vma=True),
    "shard_map, unchecked": partial(in_shard_map, check_vma=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_several_devices_have_the_loss_and_the_gradient_of_one(way: str) -> None:
    with jax.enable_x64(True):
        run = WAYS[way](Mesh(np.array(jax.devices()[:4]), ("data",)))
        for seed in range(3):
            inputs, there = ragged(seed)
            value, slope = run(inputs, there)
            expected, wanted = by_hand(inputs, there)
            assert math.isclose(value, expected, rel_tol=1e-12)
            np.testing.assert_allclose(slope, wanted, rtol=1e-10, atol=1e-13)
            nothing = run(inputs, np.zeros_like(there))
            assert [nothing[0].item(), *nothing[1].tolist()] == [0, 0, 0, 0]


@pytest.mark.slow
def test_gradients_of_parts_add_up_to_that_of_the_whole() -> None:
    with jax.enable_x64(True):
        inputs, there = ragged(0)
        expected, slope = by_hand(inputs, there)

        def part(weights: Any, cut: slice) -> jax.Array:
            return global_mean(jnp.tanh(inputs[cut] @ weights) ** 2, there[cut], count=there.sum())

        parts = [jax.value_and_grad(part)(WEIGHTS, cut) for cut in (slice(0, 3), slice(3, 8))]
        assert math.isclose(sum(value for value, _ in parts), expected, rel_tol=1e-12)
        np.testing.assert_allclose(sum(found for _, found in parts), slope, rtol=1e-12)
