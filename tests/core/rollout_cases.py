"""Random rollouts, and what must come of them: plain loops in double precision over one environment at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mouse_core.rollouts import Transition


@dataclass(frozen=True)
class Case:
    """A rollout `[T, N, 1]`; final values are NaN where no episode was truncated."""

    rewards: np.ndarray
    values: np.ndarray
    dones: np.ndarray
    last_values: np.ndarray
    time_outs: np.ndarray
    final_values: np.ndarray
    ratios: np.ndarray

    def arrays(self, *, truncation: bool = True, convert: Any = np.asarray) -> dict[str, Any]:
        names = ["rewards", "values", "dones", "last_values", *(["time_outs", "final_values"] * truncation)]
        return {name: convert(getattr(self, name)) for name in names}


def joined(cases: Sequence[Case], *, shared: bool) -> Case:
    """Return the cases as the components of one, `[T, N, K]`; `shared`: all components end as the first case does."""
    if shared:
        ends = cases[0].time_outs
        cases = [
            replace(
                one,
                dones=cases[0].dones,
                time_outs=ends,
                final_values=np.where(ends, one.values, np.nan).astype(one.values.dtype),
            )
            for one in cases
        ]
    names = [field.name for field in fields(Case)]
    found = {name: np.concatenate([getattr(one, name) for one in cases], axis=-1) for name in names}
    first = {name: found[name][..., :1] for name in ("dones", "time_outs", "ratios")} if shared else {}
    return Case(**{**found, **first})


def component(case: Case, number: int) -> Case:
    """Return one component of a case, `[T, N, 1]`."""
    arrays = {field.name: getattr(case, field.name) for field in fields(Case)}
    return Case(**{name: one if one.shape[-1] == 1 else one[..., [number]] for name, one in arrays.items()})


def random_case(seed: int, steps: int, envs: int, *, ends: float = 0.3, dtype: str = "float64") -> Case:
    """Episodes end everywhere: also in the first and in the last row, one way and the other."""
    random = np.random.default_rng(seed)
    shape = (steps, envs, 1)
    dones = random.random(shape) < ends
    if envs >= 4:
        dones[0, 0] = dones[-1, 1] = dones[0, 2] = dones[-1, 2] = True
        dones[:, 3] = random.random() < 0.5
    time_outs = dones & (random.random(shape) < 0.5)
    if envs >= 4:
        time_outs[-1, 1], time_outs[0, 0] = True, True
    final_values = np.where(time_outs, random.normal(size=shape), np.nan)
    return Case(
        random.normal(size=shape).astype(dtype),
        random.normal(size=shape).astype(dtype),
        dones,
        random.normal(size=shape[1:]).astype(dtype),
        time_outs,
        final_values.astype(dtype),
        np.exp(random.normal(size=shape)).astype(dtype),
    )


def columns(case: Case, env: int) -> dict[str, list[float]]:
    return {
        name: [float(number) for number in getattr(case, name)[:, env, 0]]
        for name in ("rewards", "values", "dones", "time_outs", "final_values", "ratios")
    } | {"last": [float(case.last_values[env, 0])]}


def following(one: dict[str, list[float]], row: int, *, truncation: bool) -> float:
    if one["dones"][row]:
        return one["final_values"][row] if truncation and one["time_outs"][row] else 0.0
    return one["values"][row + 1] if row + 1 < len(one["values"]) else one["last"][0]


def each_env(case: Case, compute: Any) -> np.ndarray:
    return np.stack([np.array(compute(columns(case, env))) for env in range(case.rewards.shape[1])], axis=1)[..., None]


def gae(case: Case, discount: float, lam: float, *, truncation: bool = True) -> np.ndarray:
    def compute(one: dict[str, list[float]]) -> list[float]:
        steps = len(one["rewards"])
        advantages = [0.0] * (steps + 1)
        for row in range(steps - 1, -1, -1):
            delta = one["rewards"][row] + discount * following(one, row, truncation=truncation) - one["values"][row]
            alive = 0.0 if one["dones"][row] else 1.0
            advantages[row] = delta + discount * lam * alive * advantages[row + 1]
        return advantages[:steps]

    return each_env(case, compute)


def lambda_returns(case: Case, discount: float, lam: float, *, truncation: bool = True) -> np.ndarray:
    """The definition: returns of every number of steps, weighted."""

    def compute(one: dict[str, list[float]]) -> list[float]:
        found = []
        for row in range(len(one["rewards"])):
            end = next((t for t in range(row, len(one["rewards"])) if one["dones"][t]), len(one["rewards"]) - 1)
            total, weight = 0.0, 1.0
            for n in range(1, end - row + 2):
                share = weight * (1.0 - lam) if row + n - 1 < end else weight
                total += share * n_step(one, row, n, discount, truncation=truncation)
                weight *= lam
            found.append(total)
        return found

    return each_env(case, compute)


def n_step(one: dict[str, list[float]], row: int, n: int, discount: float, *, truncation: bool) -> float:
    total, factor = 0.0, 1.0
    for t in range(row, row + n):
        total += factor * one["rewards"][t]
        factor *= discount
        if one["dones"][t] or t == row + n - 1 or t == len(one["rewards"]) - 1:
            return total + factor * following(one, t, truncation=truncation)
    raise AssertionError


def n_step_returns(case: Case, discount: float, n: int, *, truncation: bool = True) -> np.ndarray:
    return each_env(
        case, lambda one: [n_step(one, row, n, discount, truncation=truncation) for row in range(len(one["rewards"]))]
    )


def discounted_returns(case: Case, discount: float, *, last: bool = True, truncation: bool = True) -> np.ndarray:
    def compute(one: dict[str, list[float]]) -> list[float]:
        found, value = [], one["last"][0] if last else 0.0
        for row in range(len(one["rewards"]) - 1, -1, -1):
            if one["dones"][row]:
                value = one["final_values"][row] if truncation and one["time_outs"][row] else 0.0
            value = one["rewards"][row] + discount * value
            found.append(value)
        return found[::-1]

    return each_env(case, compute)


def vtrace(case: Case, discount: float, lam: float, rho: float, c: float, pg: float) -> tuple[np.ndarray, np.ndarray]:
    """The definition, as a sum over the rows that follow."""

    def targets(one: dict[str, list[float]]) -> list[float]:
        found = []
        for row in range(len(one["rewards"])):
            total, factor = one["values"][row], 1.0
            for t in range(row, len(one["rewards"])):
                error = one["rewards"][t] + discount * following(one, t, truncation=True) - one["values"][t]
                total += factor * min(rho, one["ratios"][t]) * error
                factor *= discount * lam * min(c, one["ratios"][t])
                if one["dones"][t]:
                    break
            found.append(total)
        return found

    def advantages(one: dict[str, list[float]]) -> list[float]:
        found, wanted = [], targets(one)
        for row in range(len(one["rewards"])):
            onward = following(one, row, truncation=True)
            if not one["dones"][row] and row + 1 < len(wanted):
                onward = wanted[row + 1]
            found.append(min(pg, one["ratios"][row]) * (one["rewards"][row] + discount * onward - one["values"][row]))
        return found

    return each_env(case, targets), each_env(case, advantages)


def trajectories(dones: np.ndarray) -> list[tuple[int, int, int]]:
    found = []
    for env in range(dones.shape[1]):
        first = 0
        for row in range(len(dones)):
            if dones[row, env].any() or row == len(dones) - 1:
                found.append((env, first, row + 1))
                first = row + 1
    return found


MOTION: dict[str, Any] = {
    "obs_shape": (5,),
    "ref_obs_shape": (3,),
    "privileged_obs_shape": (7,),
    "privileged_ref_obs_shape": (2, 2),
    "actions_shape": (4,),
}
"""Shapes of a `motion_mimic` that has everything."""


def motion_transition(random: np.random.Generator, envs: int, **options: Any) -> Transition:
    """A transition for `MOTION`; of "rl" unless `training_type` says otherwise."""

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=(envs, *shape)).astype(np.float32)

    made = Transition(
        observations=normal(5),
        reference_observations=normal(3),
        reference_observations_mask=random.random(envs) < 0.6,
        critic_observations=normal(7),
        critic_reference_observations=normal(2, 2),
        critic_reference_observations_mask=random.random(envs) < 0.6,
        actions=normal(4),
        rewards=normal(),
        dones=random.random(envs) < 0.3,
    )
    if options.get("training_type", "rl") == "rl":
        made.values, made.actions_log_prob = normal(1), normal()
        made.action_mean, made.action_sigma = normal(4), normal(4)
    else:
        made.privileged_actions = normal(4)
    if options.get("apply_dagger_actions"):
        made.dagger_actions = normal(4)
    if options.get("rnd_state_shape"):
        made.rnd_state = normal(*options["rnd_state_shape"])
    return made
