"""Returns and means of torch and JAX: the numbers of NumPy, and what both refuse."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import mouse_jax
import mouse_torch
from mouse_core import ConfigError, DataError, MouseError, SchemaError
from mouse_core import rollouts as core
from mouse_core.rollouts import RolloutField
from mouse_jax import returns
from tests.comparing import same
from tests.core import rollout_cases as oracle
from tests.core.rollout_cases import component, joined, random_case
from tests.jax.test_conformance import Kept
from tests.parity.test_rollouts import Compiled


class Framework(NamedTuple):
    """Its arrays, functions of returns, what compiles them, their dtype, how close they come, and its mean."""

    array: Callable[..., Any]
    functions: Any
    compiled: Callable[..., Any]
    dtype: str
    close: float
    mean: Callable[..., Any]


FRAMEWORKS = {
    "torch": Framework(torch.as_tensor, core, lambda function: function, "float64", 1e-12, mouse_torch.global_mean),
    "jax": Framework(jnp.asarray, returns, jax.jit, "float32", 1e-5, mouse_jax.global_mean),
}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (24, 4), "objectives", "agents"])
@pytest.mark.parametrize("of_core", [False, True])
def test_functions_agree_with_numpy(framework: Framework, shape: Any, of_core: bool) -> None:
    functions = core if of_core else framework.functions
    if isinstance(shape, str):
        cases = [random_case(seed, 5, 4, dtype=framework.dtype) for seed in range(3)]
        case = joined(cases, shared=shape == "objectives")
    else:
        case = random_case(1, *shape, dtype=framework.dtype)
    ours, theirs = case.arrays(), case.arrays(convert=framework.array)
    for name, without, more, options in (
        ("gae", "", {}, {"lam": 0.9}),
        ("lambda_returns", "", {}, {"lam": 0.9}),
        ("n_step_returns", "", {}, {"n": 3}),
        ("discounted_returns", "values", {}, {}),
        ("vtrace", "", {"ratios": case.ratios}, {"lam": 0.8}),
    ):
        given, other = ({key: values for key, values in tree.items() if key != without} for tree in (ours, theirs))
        expected = getattr(core, name)(**given, **more, discount=0.99, **options)
        more = {key: framework.array(values) for key, values in more.items()}
        found = framework.compiled(partial(getattr(functions, name), **options))(**other, **more, discount=0.99)
        same(found, expected, close=framework.close)
        assert all(framework.dtype in str(leaf.dtype) for leaf in (found if isinstance(found, tuple) else (found,)))
    found = framework.compiled(functions.normalized)(theirs["rewards"])
    same(found, core.normalized(case.rewards), close=framework.close)


STORAGES: dict[str, Any] = {"numpy": core.RolloutStorage, "torch": mouse_torch.RolloutStorage, "jax": Compiled}


@pytest.mark.parametrize("kind", STORAGES)
def test_storages_of_vector_rewards(kind: str) -> None:
    case = joined([random_case(seed, 6, 4, dtype="float32") for seed in range(3)], shared=True)
    options: Any = {"num_envs": 4, "num_transitions_per_env": 6, "fields": {"values": (3,), "rewards": (3,)}}
    rows = [{name: getattr(case, name)[row] for name in ("rewards", "dones", "values")} for row in range(6)]
    ends = {"time_outs": case.time_outs, "final_values": case.final_values}
    found: Any = STORAGES[kind](**options)
    for row in rows:
        found.add_transitions(row)
    found.compute_returns(case.last_values, 0.9, 0.8, **ends)
    _, mean = found.get_statistics()
    batch = next(iter(found.mini_batch_generator(2, 1)))
    same(mean, case.rewards.mean((0, 1)), close=1e-5)
    assert tuple(batch["advantages"].shape) == tuple(batch["returns"].shape) == (12, 3)
    for number in range(3):
        advantages = oracle.gae(component(case, number), 0.9, 0.8)
        same(found["returns"][..., [number]], advantages + case.values[..., [number]], close=1e-4)
        normal = (advantages - advantages.mean()) / advantages.std(ddof=1)
        same(found["advantages"][..., [number]], normal, close=1e-4)
    if kind != "jax":
        for shape in ((6, 4), (6, 4, 1)):
            outs = {**ends, "time_outs": case.time_outs.reshape(shape)}
            found.compute_returns(case.last_values, 0.9, 0.8, **outs)
        with pytest.raises(SchemaError, match=r"last_values: expected shape \[4, 3\], found \[4, 1\]"):
            found.compute_returns(case.last_values[:, :1], 0.9, 0.8, **ends)


def test_split_and_pad(framework: Framework) -> None:
    random, known = np.random.default_rng(0), framework.functions is core
    values, dones = random.normal(size=(6, 4, 2)).astype(np.float32), random.random((6, 4, 1)) < 0.3
    expected, masks = core.split_and_pad_trajectories(values, dones)
    # Compiled, shapes are known before: as many trajectories as there may be, and as many environments as there are.
    more: Any = {} if known else {"num_trajectories": 24}
    split = framework.compiled(partial(core.split_and_pad_trajectories, **more))
    padded, found = split(framework.array(values), framework.array(dones))
    for one, other in ((padded, expected), (found, masks)):
        np.testing.assert_array_equal(np.asarray(one)[:, : masks.shape[1]], other)
    back = framework.compiled(partial(core.unpad_trajectories, **({} if known else {"num_envs": 4})))
    np.testing.assert_array_equal(np.asarray(back(padded, found)), values)


@pytest.mark.parametrize(("name", "kept"), [("torch", mouse_torch.RolloutStorage), ("jax", Kept)])
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rewards": [1.0, np.nan]}, DataError, "rewards: expected finite numbers, found nan at environment 1, row 0"),
        ({"actions": [1, 256]}, DataError, "actions: expected 0..255"),
        ({"actions": [1.0, 1.0]}, SchemaError, "actions: expected uint8, found .*float32"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    name: str, kept: Any, change: Any, kind: type[MouseError], message: str
) -> None:
    storage = kept(2, 2, {"actions": RolloutField((), "uint8")})
    good = {"rewards": [1.0, 1.0], "dones": [0, 0], "actions": [1, 2]}
    row = {
        field: FRAMEWORKS[name].array(np.array(values, np.float32 if np.array(values).dtype.kind == "f" else np.int32))
        for field, values in (good | change).items()
    }
    with pytest.raises(kind, match=message):
        storage.add_transitions(row)


#: Values, the mask if there is one, and the mean: of what is masked, not even NaN counts, and of nothing it is 0.
MEANS: list[tuple[Any, Any, float]] = [
    ([1.0, 2.0, 6.0], None, 3.0),
    ([1.0, math.nan, 3.0], [True, False, True], 2.0),
    ([[1.0, 2.0], [math.inf, 4.0]], [True, False], 1.5),
    ([[1.0, 2.0], [3.0, 4.0]], [[3, 0], [0, 1]], 1.75),
    ([1.0, 2.0], [0, 0], 0.0),
    ([], None, 0.0),
    (7.0, None, 7.0),
]


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize(("values", "mask", "expected"), MEANS)
def test_means_by_hand(name: str, values: Any, mask: Any, expected: float) -> None:
    if name == "jax":
        given = jnp.array(values, jnp.bfloat16 if mask is None else jnp.float32)
        mean, slope = jax.value_and_grad(mouse_jax.global_mean)(given, None if mask is None else jnp.array(mask))
        assert (mean.dtype, mean.shape, mean.item()) == (jnp.float32, (), expected)
        assert jnp.isfinite(slope).all()
        return
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = torch.tensor(values, dtype=dtype, requires_grad=True)
        mean = mouse_torch.global_mean(given, None if mask is None else torch.tensor(mask))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert (mean.dtype, mean.shape, mean.item()) == (wide, (), expected)
        mean.backward()
        assert given.grad is not None
        assert bool(torch.isfinite(given.grad).all())


def test_parts_of_a_mean_add_up_to_it(framework: Framework) -> None:
    array, mean_of = framework.array, framework.mean
    numbers = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    for given in ([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]], [True, False, True, True]):
        mask = np.array(given)
        parts = [
            float(mean_of(array(numbers[cut]), array(mask[cut]), count=int(mask.sum())))
            for cut in (slice(0, 2), slice(2, 4))
        ]
        assert math.isclose(sum(parts), numbers[mask.astype(bool)].mean(), rel_tol=1e-6)
    assert sum(float(mean_of(array(part), count=24)) for part in (numbers[:2], numbers[2:])) == numbers.mean()
    assert float(mean_of(array(numbers), array(np.zeros(4)), count=0)) == 0
    for shape in ((3,), (2, 4), (2, 3, 1)):
        with pytest.raises(ConfigError, match=r"mask: expected the leading axes of the shape \[2, 3\], found"):
            mean_of(array(np.ones((2, 3))), array(np.ones(shape)))
