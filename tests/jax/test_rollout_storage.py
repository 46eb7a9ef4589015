"""Rollouts as a pytree: the numbers and orders of NumPy, step by step and under jit."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mouse_core import ConfigError, DataError, MissingFieldError, MouseError, SchemaError
from mouse_core import rollouts as core
from mouse_core.errors import RolloutError, RolloutFullError
from mouse_core.rollouts import RolloutField, motion_mimic_fields
from mouse_jax import returns, rollout_storage
from tests import comparing
from tests.core.rollout_cases import random_case
from tests.parity.test_rollouts import AMP, ENVS, LAST, LAYOUT, STEPS, filled, hidden_states, transitions

# Together they take many seconds.
pytestmark = pytest.mark.slow


def empty(seed: int = 3) -> rollout_storage.Rollout:
    states = hidden_states(np.random.default_rng(0))
    return rollout_storage.init(
        ENVS, STEPS, motion_mimic_fields("rl", **LAYOUT), seed, amp_cfg=AMP, hidden_states=states
    )


@cache  # a value, that no function changes
def full() -> rollout_storage.Rollout:
    return filled("jax").rollout


def same(found: Any, expected: Any) -> None:
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    comparing.same(found, expected, close=1e-5)


def test_orders_are_those_of_numpy() -> None:
    order = jax.jit(rollout_storage.permutation)
    for seed, epoch, n in ((0, 0, 1), (1, 2, 2), (2**63 + 1, 3, 5), (7, 9, 1000), (5, 0, 20_000)):
        rollout = rollout_storage.advance(rollout_storage.init(n, 1, {}, seed), epoch)
        np.testing.assert_array_equal(order(rollout), core.permutation(seed, epoch, n))


def test_mini_batches_under_jit() -> None:
    fields = {"observations": (3,), "actions": (), "values": ()}
    storage = core.RolloutStorage(ENVS, STEPS, fields, 3, amp_cfg=AMP)
    states = hidden_states(np.random.default_rng(0))
    rollout = rollout_storage.init(ENVS, STEPS, fields, 3, amp_cfg=AMP, hidden_states=states)
    for whole in transitions():
        row = {name: whole[name] for name in ("rewards", "dones", "values", "hidden_states")}
        row |= {"observations": whole["reference_observations"], "actions": whole["rewards"]}
        storage.add_transitions(row)
        rollout = rollout_storage.append(rollout, row)
    storage.compute_returns(LAST, 0.9, 0.9)
    rollout = rollout_storage.compute_returns(rollout, LAST, 0.9, 0.9)

    @jax.jit
    def update(rollout: rollout_storage.Rollout) -> Any:
        def epoch(total: jax.Array, number: jax.Array) -> Any:
            order = rollout_storage.permutation(rollout, number).reshape(5, -1)

            def step(total: jax.Array, rows: jax.Array) -> Any:
                batch = rollout_storage.mini_batch(rollout, rows)
                return total + batch.advantages.sum(), (batch.rows, batch.obs_prev_mask)

            return jax.lax.scan(step, total, order)

        total, seen = jax.lax.scan(epoch, jnp.float32(0), jnp.arange(2))
        return rollout_storage.advance(rollout, 2), total, seen

    after, total, (rows, masks) = update(rollout)
    expected = list(storage.mini_batch_generator(5, 2))
    np.testing.assert_array_equal(rows.reshape(10, -1), [batch.rows for batch in expected])
    np.testing.assert_array_equal(masks.reshape(10, -1), [batch.obs_prev_mask for batch in expected])
    assert float(total) == pytest.approx(0.0, abs=1e-4)
    assert int(after.epoch) == 2

    compiled: Any = jax.jit(rollout_storage.mini_batches, static_argnums=(1, 2))
    after, unrolled = compiled(after, 2, 1)
    assert int(after.epoch) == 3
    for one, other in zip(unrolled, storage.mini_batch_generator(2, 1), strict=True):
        same(tuple(one), tuple(other))

    recurrent = jax.jit(lambda rollout: rollout_storage.recurrent_mini_batches(rollout, 1, 1)[1])(rollout)
    for one, other in zip(recurrent, storage.recurrent_mini_batch_generator(1, 1), strict=True):
        count = other.masks.shape[1]
        assert not one.masks[:, count:].any()
        same(one.obs[:, :count], other.obs)
        same(one.masks[:, :count], other.masks)
        same(one.actions, other.actions)
        same(one.hidden_states[0][:, :count], other.hidden_states[0])


def test_a_rollout_in_a_scan() -> None:
    fields = {"observations": (1,), "values": ()}

    @jax.jit
    def collect(rollout: rollout_storage.Rollout, start: jax.Array) -> rollout_storage.Rollout:
        def step(carry: Any, number: jax.Array) -> Any:
            rollout, state = carry
            row = {"observations": state[:, None], "values": state, "rewards": state + number, "dones": state > 5.0}
            return (rollout_storage.append(rollout, row), state + 1.0), None

        (rollout, state), _ = jax.lax.scan(step, (rollout_storage.clear(rollout), start), jnp.arange(4))
        return rollout_storage.compute_returns(rollout, state, 0.5, 1.0, normalize_advantage=False)

    rollout = rollout_storage.init(3, 4, fields)
    for _ in range(2):
        rollout = collect(rollout, jnp.asarray([0.0, 1.0, 5.0]))
    storage = core.RolloutStorage(3, 4, fields)
    state = np.array([0.0, 1.0, 5.0])
    for number in range(4):
        storage.add_transitions(
            {"observations": state[:, None], "values": state, "rewards": state + number, "dones": state > 5.0}
        )
        state = state + 1.0
    storage.compute_returns(state, 0.5, 1.0, normalize_advantage=False)
    same(rollout["returns"], storage.returns)
    same(rollout["advantages"], storage.advantages)


def test_masks_dtypes_and_optional_fields() -> None:
    fields = {
        "actions": RolloutField((), "int64"),
        "goal": RolloutField((1,), mask=True, optional=True),
        "map": RolloutField((), mask=True),
    }
    rollout = rollout_storage.init(2, 2, fields)
    assert rollout["actions"].dtype == jnp.int32
    assert rollout["dones"].dtype == jnp.uint8
    row = {"rewards": [1, 2], "dones": [0.0, 2.0], "actions": np.array([1, 2]), "map": ([1.0, 2.0], [[1], [0]])}
    rollout = rollout_storage.append(rollout, row)
    rollout = rollout_storage.append(rollout, {**row, "goal": [3.0, 4.0]})
    same(rollout["map_mask"], np.array([[1, 0], [1, 0]]))
    same(rollout["goal_mask"], np.array([[0, 0], [1, 1]]))
    same(rollout["goal"][..., 0], np.array([[0, 0], [3, 4]]))
    same(rollout["dones"][..., 0], np.array([[0, 2], [0, 2]]))
    with pytest.raises(DataError, match=r"actions: expected -2147483648..2147483647 \(int32\), found 4294967296"):
        rollout_storage.append(rollout_storage.clear(rollout), {**row, "actions": np.array([2**32, 0])})
    with pytest.raises(MissingFieldError, match=r"expected one of .*found 'nonsense'"):
        rollout["nonsense"]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"reference_observations_mask": [0.5] * 5}, DataError, "_mask: expected True or False, found 0.5"),
        ({"mu": None}, MissingFieldError, r"\['mu'\] missing"),
        ({"hidden_states": None}, SchemaError, "hidden_states: expected states both in init"),
        ({"hidden_states": (np.zeros((2, 5, 4)), None)}, SchemaError, "hidden_states"),
        (
            {"hidden_states": (np.zeros((2, 5, 4)), (np.zeros((5, 2)),) * 2)},
            SchemaError,
            r"hidden_states\[0\]: expected",
        ),
        ({"hidden_states": (np.zeros((2, 4, 3)), (np.zeros((5, 2)),) * 2)}, SchemaError, "expected 5 environments"),
    ],
)
def test_bad_rows(change: dict[str, Any], kind: type[MouseError], message: str) -> None:
    with pytest.raises(kind, match=message):
        rollout_storage.append(empty(), {**transitions()[0], **change})


def test_no_hidden_states_before_the_first_step() -> None:
    rows = transitions()
    first, second = rollout_storage.clear(full()), empty()
    for number, row in enumerate(rows):
        states = (None, None) if number == 0 else row["hidden_states"]
        first = rollout_storage.append(first, {**row, "hidden_states": states})
        second = jax.jit(rollout_storage.append)(second, {**row, "hidden_states": states})
    assert not np.asarray(first.hidden_states[0][0]).any()
    same(first.hidden_states, second.hidden_states)
    same(first.hidden_states[1][1][1:], np.stack([row["hidden_states"][1][1] for row in rows[1:]]))
    actor = rollout_storage.append(empty(), {**rows[0], "hidden_states": (rows[0]["hidden_states"][0], None)})
    same(actor.hidden_states[0][0], rows[0]["hidden_states"][0])
    assert not np.asarray(actor.hidden_states[1][0][0]).any()
    with pytest.raises(SchemaError, match=r"hidden_states\[0\]: expected a value in every row, found none in row 1"):
        rollout_storage.append(actor, {**rows[1], "hidden_states": (None, None)})


FEW = {"obs": (2,), "values": ()}


def trained(seed: Any, rewards: jax.Array) -> Any:
    """A rollout and all its mini-batches, as a function of the seed."""
    rollout = rollout_storage.init(2, 3, FEW, seed)
    for step in range(3):
        row = {"obs": jnp.full((2, 2), step), "values": jnp.zeros(2), "rewards": rewards[step], "dones": jnp.zeros(2)}
        rollout = rollout_storage.append(rollout, row)
    rollout = rollout_storage.compute_returns(rollout, jnp.zeros(2), 0.9, 0.95)
    rollout, batches = rollout_storage.mini_batches(rollout, 2, 2)
    return rollout.seed, [(batch.rows, batch["returns"]) for batch in batches], rollout_storage.permutation(rollout)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint8])
def test_seeds_may_be_traced(dtype: Any) -> None:
    seeds = np.array([0, 1, 7, 200], dtype)
    rewards = jnp.arange(6.0).reshape(3, 2)
    many = jax.vmap(trained, in_axes=(0, None))(jnp.asarray(seeds), rewards)
    compiled = jax.jit(trained)
    for place, seed in enumerate(seeds):
        alone = trained(int(seed), rewards)
        same(jax.tree.map(lambda leaf, place=place: leaf[place], many), alone)
        same(compiled(jnp.asarray(seed), rewards), alone)
        same(trained(jnp.asarray(seed), rewards), alone)
    orders = {tuple(np.asarray(many[2][place]).tolist()) for place in range(4)}
    assert len(orders) == 4


def test_seeds_that_are_traced_have_64_bits_and_mini_batches_are_pytrees() -> None:
    seeds = [2**63 + 5, 2**40 + 1, 3]
    alone = [rollout_storage.permutation(rollout_storage.init(2, 3, FEW, seed)) for seed in seeds]
    with jax.enable_x64(True):
        many = jax.vmap(lambda seed: rollout_storage.permutation(rollout_storage.init(2, 3, FEW, seed)))(
            jnp.asarray(np.array(seeds, np.uint64))
        )
        same(many, np.stack(alone))

    def read(seed: jax.Array) -> Any:
        rollout = rollout_storage.init(2, 1, {}, seed)
        rollout = rollout_storage.append(rollout, {"rewards": jnp.ones(2), "dones": jnp.zeros(2)})
        return rollout_storage.mini_batches(rollout, 2, 1)[1]

    first, _ = jax.vmap(read)(jnp.arange(3))  # of which only the seed is traced
    assert first.rows.shape == (3, 1)
    for seed in (-1, 1.5, True, jnp.float32(1), jnp.arange(2), jnp.int32(-1)):
        with pytest.raises(ConfigError, match="seed: expected an integer"):
            rollout_storage.init(2, 3, FEW, seed)


def test_out_of_turn() -> None:
    rollout = full()
    with pytest.raises(RolloutFullError, match="append: expected at most 6 rows"):
        rollout_storage.append(rollout, transitions()[0])
    dropped = jax.jit(rollout_storage.append)(rollout, transitions(5)[0])
    same(dropped["observations"], np.asarray(rollout["observations"]))
    with pytest.raises(RolloutError, match="mini_batches: expected 6 rows, found 7"):
        rollout_storage.mini_batches(dropped, 2)
    again = rollout_storage.clear(rollout)
    for transition in transitions():
        again = rollout_storage.append(again, transition)
    with pytest.raises(RolloutError, match="expected returns, found none"):
        rollout_storage.mini_batches(again, 2)


@pytest.mark.parametrize("name", ["gae", "lambda_returns", "n_step_returns", "vtrace", "discounted_returns"])
def test_code_2_is_no_termination(name: str) -> None:
    """It is refused where values are known; under jit, which cannot refuse, what would need its value is NaN."""
    case = random_case(1, 4, 3, dtype="float32")
    arrays = case.arrays(convert=jnp.asarray, truncation=False)
    options: dict[str, Any] = {"n_step_returns": {"n": 2}, "gae": {"lam": 0.9}, "lambda_returns": {"lam": 0.9}}
    arrays |= {"ratios": jnp.asarray(case.ratios)} if name == "vtrace" else {}
    arrays.pop("values") if name == "discounted_returns" else None
    function = partial(getattr(returns, name), discount=0.9, **options.get(name, {}))
    codes = jnp.zeros(case.dones.shape, jnp.uint8).at[1, 2].set(2)
    with pytest.raises(ConfigError, match=r"2 \(truncated\) at environment 2, row 1"):
        function(**{**arrays, "dones": codes})
    for found in jax.tree.leaves(jax.jit(function)(**{**arrays, "dones": codes})):
        assert jnp.isnan(found[1, 2]).all()
        assert jnp.isfinite(found[2:]).all()
        assert jnp.isfinite(found[:, :2]).all()
    ends = {"time_outs": codes == 2, "final_values": arrays["rewards"]}
    same(jax.jit(function)(**{**arrays, "dones": codes, **ends}), function(**{**arrays, "dones": codes > 0, **ends}))
    split = jax.jit(core.split_and_pad_trajectories)
    with pytest.raises(ConfigError, match=r"num_trajectories: expected a number under jax\.jit"):
        split(values=jnp.ones((6, 4, 2)), dones=jnp.zeros((6, 4, 1)))
    with pytest.raises(ConfigError, match=r"num_envs: expected a number under jax\.jit"):
        jax.jit(core.unpad_trajectories)(jnp.ones((6, 4, 2)), jnp.ones((6, 4), bool))


def test_formulas_agree_with_rlax() -> None:
    """rlax knows terminations as discounts of 0, one environment at a time; it knows no truncation inside a rollout."""
    rlax = pytest.importorskip("rlax", reason="rlax is not installed")
    case = random_case(0, 11, 5, dtype="float32")
    arrays = case.arrays(truncation=False)
    advantages, _ = core.gae(**arrays, discount=0.97, lam=0.9)
    mixed = core.lambda_returns(**arrays, discount=0.97, lam=0.9)
    steps = core.n_step_returns(**arrays, discount=0.97, n=3)
    summed = core.discounted_returns(case.rewards, case.dones, case.last_values, discount=0.97)
    targets, policy = core.vtrace(**arrays, ratios=case.ratios, discount=0.97, clip_rho=1.5, clip_pg_rho=1.2)
    decayed, _ = core.vtrace(**arrays, ratios=case.ratios, discount=0.97, lam=0.8)
    for env in (1, 2):
        rewards, values, ratios = (jnp.asarray(part[:, env, 0]) for part in (case.rewards, case.values, case.ratios))
        discounts = 0.97 * (1.0 - jnp.asarray(case.dones[:, env, 0], jnp.float32))
        all_values = jnp.append(values, case.last_values[env, 0])
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        close(
            advantages[:, env, 0], rlax.truncated_generalized_advantage_estimation(rewards, discounts, 0.9, all_values)
        )
        close(mixed[:, env, 0], rlax.lambda_returns(rewards, discounts, all_values[1:], 0.9))
        close(steps[:, env, 0], rlax.n_step_bootstrapped_returns(rewards, discounts, all_values[1:], 3))
        close(summed[:, env, 0], rlax.discounted_returns(rewards, discounts, all_values[1:]))
        theirs = rlax.vtrace_td_error_and_advantage(values, all_values[1:], rewards, discounts, ratios, 1.0, 1.5, 1.2)
        close(targets[:, env, 0], theirs.errors + values)
        close(policy[:, env, 0], theirs.pg_advantage)
        close(decayed[:, env, 0], rlax.vtrace(values, all_values[1:], rewards, discounts, ratios, 0.8) + values)
