"""Returns and advantages against plain loops in double precision."""

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, SchemaError
from mouse_core.rollouts import discounted_returns, gae, lambda_returns, n_step_returns, normalized, outgoing, vtrace
from tests.core import rollout_cases as oracle
from tests.core.rollout_cases import random_case
from tests.raising import assert_raises

SHAPES = [(1, 1), (1, 5), (2, 4), (3, 1), (7, 6), (24, 5)]
CASES = [
    random_case(seed, *shape, ends=ends)
    for seed, (shape, ends) in enumerate((shape, ends) for shape in SHAPES for ends in (0.0, 0.3, 1.0))
]


def test_returns_and_advantages_are_those_of_the_loops() -> None:
    for case in CASES:
        settings = ((0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5))
        for truncation, (discount, lam) in product((True, False), settings):
            advantages, returns = gae(**case.arrays(truncation=truncation), discount=discount, lam=lam)
            expected = oracle.gae(case, discount, lam, truncation=truncation)
            np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(returns, expected + case.values, rtol=1e-12, atol=1e-12)
        for truncation, (discount, lam) in product((True, False), ((0.99, 0.95), (1.0, 1.0), (0.9, 0.0))):
            found = lambda_returns(**case.arrays(truncation=truncation), discount=discount, lam=lam)
            expected = oracle.lambda_returns(case, discount, lam, truncation=truncation)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        for truncation, n in product((True, False), (1, 2, 5, 100)):
            found = n_step_returns(**case.arrays(truncation=truncation), discount=0.97, n=n)
            expected = oracle.n_step_returns(case, 0.97, n, truncation=truncation)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        arrays = case.arrays()
        del arrays["values"]
        expected = oracle.discounted_returns(case, 0.9)
        np.testing.assert_allclose(discounted_returns(**arrays, discount=0.9), expected, rtol=1e-12, atol=1e-12)
        expected = oracle.discounted_returns(case, 0.9, last=False, truncation=False)
        np.testing.assert_allclose(
            discounted_returns(case.rewards, case.dones, discount=0.9), expected, rtol=1e-12, atol=1e-12
        )
        for lam, rho, c, pg in ((1.0, 1.0, 1.0, 1.0), (0.9, 2.0, 0.5, 1.5)):
            targets, advantages = vtrace(
                **case.arrays(), ratios=case.ratios, discount=0.99, lam=lam, clip_rho=rho, clip_c=c, clip_pg_rho=pg
            )
            expected = oracle.vtrace(case, 0.99, lam, rho, c, pg)
            np.testing.assert_allclose(targets, expected[0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(advantages, expected[1], rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 12), envs=st.integers(1, 4), ends=st.floats(0, 1))
def test_single_precision_stays_close_and_single(seed: int, steps: int, envs: int, ends: float) -> None:
    case = random_case(seed, steps, envs, ends=ends, dtype="float32")
    advantages, returns = gae(**case.arrays(), discount=0.99, lam=0.95)
    assert advantages.dtype == returns.dtype == np.float32
    np.testing.assert_allclose(advantages, oracle.gae(case, 0.99, 0.95), rtol=1e-4, atol=1e-4)


def test_shapes_behind_time_and_discounts_for_each_row() -> None:
    case = random_case(4, 6, 3)
    discounts = np.random.default_rng(0).random(case.rewards.shape)
    advantages, _ = gae(**case.arrays(truncation=False), discount=discounts, lam=0.9)
    expected, onward = np.zeros_like(case.rewards), np.zeros_like(case.last_values)
    following = [*case.values[1:], case.last_values]
    for row in range(5, -1, -1):
        on = ~case.dones[row]
        delta = case.rewards[row] + discounts[row] * on * following[row] - case.values[row]
        expected[row] = onward = delta + discounts[row] * 0.9 * on * onward
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)
    case = random_case(5, 6, 4)
    flat = {name: values[..., 0] for name, values in case.arrays().items()}
    whole = gae(**case.arrays(), discount=0.9, lam=0.9)
    for found, expected in zip(gae(**flat, discount=0.9, lam=0.9), whole, strict=True):
        np.testing.assert_array_equal(found, expected[..., 0])
    one = {name: values[..., 1] if values.ndim == 2 else values[1] for name, values in flat.items()}
    np.testing.assert_array_equal(gae(**one, discount=0.9, lam=0.9)[0], whole[0][:, 1, 0])


@pytest.mark.parametrize("shared", [True, False])
def test_vectors_are_their_components(shared: bool) -> None:
    """Objectives with common ends, and agents that end one by one."""
    case = oracle.joined([random_case(seed, 9, 4) for seed in range(3)], shared=shared)
    arrays = case.arrays()
    for found, expected in (
        (gae(**arrays, discount=0.9, lam=0.8)[0], lambda one: oracle.gae(one, 0.9, 0.8)),
        (lambda_returns(**arrays, discount=0.9, lam=0.8), lambda one: oracle.lambda_returns(one, 0.9, 0.8)),
        (n_step_returns(**arrays, discount=0.9, n=3), lambda one: oracle.n_step_returns(one, 0.9, 3)),
        (vtrace(**arrays, ratios=case.ratios, discount=0.9)[1], lambda one: oracle.vtrace(one, 0.9, 1, 1, 1, 1)[1]),
    ):
        assert found.shape == (9, 4, 3)
        for number in range(3):
            wanted = expected(oracle.component(case, number))[..., 0]
            np.testing.assert_allclose(found[..., number], wanted, rtol=1e-12, atol=1e-12)
    del arrays["values"]
    for number in range(3):
        wanted = oracle.discounted_returns(oracle.component(case, number), 0.9)[..., 0]
        np.testing.assert_allclose(discounted_returns(**arrays, discount=0.9)[..., number], wanted, rtol=1e-12)
    if shared:
        for name, changed in (("dones", case.dones[..., 0]), ("time_outs", case.time_outs[:, :1])):
            with pytest.raises(SchemaError, match=rf"{name}: expected shape \(9, 4, 3\) or \(9, 4, 1\) as for"):
                gae(**{**case.arrays(), name: changed}, discount=0.9, lam=0.8)


def test_given_arrays_are_not_written_to_and_only_half_of_truncation_is_refused() -> None:
    case = random_case(6, 6, 4)
    before = {name: values.copy() for name, values in case.arrays().items()}
    for function in (gae, lambda_returns):
        function(**case.arrays(), discount=0.9, lam=0.9)
    n_step_returns(**case.arrays(), discount=0.9, n=3)
    vtrace(**case.arrays(), ratios=case.ratios, discount=0.9)
    normalized(case.rewards)
    for name, values in case.arrays().items():
        np.testing.assert_array_equal(values, before[name])
    case = random_case(0, 4, 3)
    for missing in ("time_outs", "final_values"):
        arrays = case.arrays()
        del arrays[missing]
        assert_raises(ConfigError, f"{missing}: expected values together", gae, **arrays, discount=0.9, lam=0.9)
    for n in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="n: expected an integer of at least 1"):
            n_step_returns(**case.arrays(), discount=0.9, n=n)  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32), size=st.integers(2, 200), dtype=st.sampled_from(["float32", "float64"]))
def test_normalized(seed: int, size: int, dtype: str) -> None:
    advantages = (5.0 + 3.0 * np.random.default_rng(seed).normal(size=(size, 1))).astype(dtype)
    numbers = [float(number) for number in advantages[:, 0]]
    mean = sum(numbers) / size
    deviation = (sum((number - mean) ** 2 for number in numbers) / (size - 1)) ** 0.5
    expected = [[(number - mean) / (deviation + 1e-8)] for number in numbers]
    np.testing.assert_allclose(normalized(advantages), expected, rtol=1e-5, atol=1e-6)
    assert normalized(advantages).dtype == dtype


def test_components_are_normalized_by_themselves_and_equal_ones_become_zero() -> None:
    for shape in ((1, 1), (3, 2, 1)):
        np.testing.assert_array_equal(normalized(np.full(shape, 0.1, np.float32)), np.zeros(shape))
    advantages = np.random.default_rng(0).normal(size=(5, 4, 3)) * [1, 10, 100]
    found = normalized(advantages, by_component=True)
    for number in range(3):
        np.testing.assert_allclose(found[..., number], normalized(advantages[..., number]), rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_arrived_rows_give_the_same_advantages(seed: int) -> None:
    """Episodes as a store holds them, T+1 rows each, and as transitions with the values of their ends."""
    random = np.random.default_rng(seed)
    rewards, values, dones = [], [], []
    expected, is_transition = [], []
    for _ in range(6):
        length, code = int(random.integers(1, 5)), int(random.integers(1, 3))
        own = random.normal(size=length + 1)
        reward = np.concatenate([[0.0], random.normal(size=length)])
        rewards.append(reward)
        values.append(own)
        dones.append([0] * length + [code])
        ends = np.zeros(length)
        ends[-1] = 1
        advantages, _ = gae(
            reward[1:],
            own[:-1],
            ends,
            np.float64(np.nan),
            discount=0.9,
            lam=0.8,
            time_outs=ends.astype(bool) & (code == 2),
            final_values=own[1:],
        )
        expected += [*advantages, np.nan]
        is_transition += [True] * length + [False]
    arguments: dict[str, Any] = outgoing(
        np.concatenate(rewards), np.concatenate(values), np.concatenate(dones)
    )._asdict()
    valid = arguments.pop("valid")
    np.testing.assert_array_equal(valid, is_transition[:-1])
    found, _ = gae(**arguments, discount=0.9, lam=0.8)
    np.testing.assert_allclose(found[valid], np.array(expected[:-1])[valid], rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_agents_of_a_store_have_the_advantages_of_their_own_rows(seed: int) -> None:
    """An agent that ends first has the advantages of an episode of its own; `valid` marks its transitions."""
    random, ends = np.random.default_rng(seed), (2, 5, 7)
    flags = [[step == end for end in ends] for step in range(8)]
    cut = random.random(3) < 0.5
    store = DatasetStore().add_episode(
        observations=np.zeros((9, 3)),
        actions=np.zeros((8, 3)),
        rewards=random.normal(size=(8, 3)),
        terminated=np.array(flags) & ~cut,
        truncated=np.array(flags) & cut,
    )
    batch = {name: values[0] for name, values in BatchSource(store, 9, 1)[0].items()}
    values = random.normal(size=(9, 3))
    whole = outgoing(batch["reward"], values, batch["agent_done"])._asdict()
    valid = whole.pop("valid")
    found, _ = gae(**whole, discount=0.9, lam=0.8)
    for agent, end in enumerate(ends):
        assert valid[:, agent].tolist() == [step <= end for step in range(8)]
        own = [one[: end + 2, agent] for one in (batch["reward"], values, batch["agent_done"])]
        alone = outgoing(*own)._asdict()
        del alone["valid"]
        np.testing.assert_allclose(found[: end + 1, agent], gae(**alone, discount=0.9, lam=0.8)[0], rtol=1e-12)


def test_shapes_that_would_broadcast_are_refused() -> None:
    case = random_case(0, 4, 3)
    arrays = case.arrays()
    for name, changed in (
        ("values", case.values[..., 0]),
        ("dones", case.dones[:, :, 0]),
        ("last_values", case.last_values[:, 0]),
        ("time_outs", case.time_outs[:2]),
        ("final_values", case.final_values[:, :1]),
    ):
        with pytest.raises(SchemaError, match=rf"{name}: expected shape \("):
            gae(**{**arrays, name: changed}, discount=0.9, lam=0.9)
    assert_raises(SchemaError, "ratios: expected shape", vtrace, **arrays, ratios=case.ratios[0], discount=0.9)
    with pytest.raises(SchemaError, match="at least one row"):
        discounted_returns(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(3), discount=0.9)
    with pytest.raises(SchemaError, match="floating numbers, found int64"):
        discounted_returns(np.zeros((2, 3), int), np.zeros((2, 3)), discount=0.9)
    with pytest.raises(SchemaError, match="values: expected floating numbers, found int64"):
        gae(**{**arrays, "values": np.zeros(case.rewards.shape, int)}, discount=0.9, lam=0.9)
    assert_raises(SchemaError, "at least two rows", outgoing, np.zeros(1), np.zeros(1), np.zeros(1))


FUNCTIONS: dict[str, Any] = {
    "gae": partial(gae, lam=0.9),
    "lambda_returns": partial(lambda_returns, lam=0.9),
    "n_step_returns": partial(n_step_returns, n=2),
    "vtrace": vtrace,
    "discounted_returns": discounted_returns,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_number_for_each_row_is_refused_and_code_2_no_termination(name: str) -> None:
    case, function = random_case(0, 4, 3), FUNCTIONS[name]
    arrays = {**case.arrays(), "time_outs": np.zeros(case.dones.shape, bool), "discount": 0.9}
    arrays |= {"ratios": case.ratios} if name == "vtrace" else {}
    arrays.pop("values") if name == "discounted_returns" else None
    codes = np.zeros(case.dones.shape, np.int64)
    codes[1, 2] = 2
    without = {key: value for key, value in arrays.items() if key not in ("time_outs", "final_values")}
    with pytest.raises(ConfigError, match=r"expected time_outs and .* 2 \(truncated\) at environment 2, row 1"):
        function(**{**without, "dones": codes})
    with pytest.raises(ConfigError, match=r"expected time_outs to be true, .* 2 \(truncated\) at environment 2, row 1"):
        function(**{**arrays, "dones": codes})
    with pytest.raises(ConfigError, match=r"2 \(truncated\) at row 1"):
        function(**{k: v if np.ndim(v) < 2 else v[..., 2, 0] for k, v in {**without, "dones": codes}.items()})
    found = function(**{**arrays, "dones": codes, "time_outs": codes == 2})
    expected = function(**{**arrays, "dones": codes > 0, "time_outs": codes > 0})
    np.testing.assert_array_equal(found, expected)
    terminal = function(**{**without, "dones": np.minimum(codes, 1)})
    np.testing.assert_array_equal(terminal, function(**{**without, "dones": codes > 0}))
    case = random_case(0, 4, 4)
    arrays = {name: values for name, values in case.arrays().items() if name in arrays} | {"discount": 0.9}
    arrays |= {"ratios": case.ratios} if name == "vtrace" else {}
    for key, values in arrays.items():
        if key != "discount":
            with pytest.raises(DataError, match=rf"{key}, row 0: expected a value, found a masked value"):
                function(**{**arrays, key: np.ma.masked_array(values, np.ones(np.shape(values), bool))})
            with pytest.raises(SchemaError, match=rf"{key}: expected an array, found list"):
                function(**{**arrays, key: values.tolist()})
    with pytest.raises(SchemaError, match="dones: expected flags or codes, found <U5"):
        function(**{**arrays, "dones": case.dones.astype(str)})
    factors = ["discount", "lam"] if name in ("gae", "lambda_returns", "vtrace") else ["discount"]
    for factor in factors:
        for shape in ((4,), (4, 4), (4, 4, 1, 1)):  # which NumPy would repeat along another axis
            with pytest.raises(SchemaError, match=rf"{factor}: expected shape \(4, 4, 1\) as for the rewards"):
                function(**{**arrays, factor: np.full(shape, 0.9)})
