"""Rollouts of thousands of environments: their returns, and an epoch of mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mouse_core.rollouts import RolloutStorage, Transition
from tests.bench.measuring import Contender
from tests.bench.results import Settings, Table, compare, contenders

STEPS, ENVS = 24, 4096
_OBSERVATION, _ACTION = 48, 12
_PARTS = 4
_GAMMA, _LAM = 0.99, 0.95


def tables(settings: Settings) -> list[Table]:
    """``compute_returns`` of 24 steps of 4,096 environments, and one epoch of four mini-batches of all rows."""
    last = np.random.default_rng(0).normal(size=(ENVS, 1)).astype(np.float32)
    storage = _filled(RolloutStorage, np.asarray)
    time_outs, finals = storage.dones != 0, storage.values + 1.0
    copied = {name: np.empty_like(storage[name]) for name in ("rewards", "values", "dones")}

    def copy(number: int) -> None:
        for name, target in copied.items():
            np.copyto(target, storage[name])

    calls: dict[str, Callable[[int], Any]] = {
        "NumPy copying rewards, values and dones": copy,
        "mouse, NumPy": lambda number: storage.compute_returns(last, _GAMMA, _LAM),
        "mouse, NumPy, with truncation": lambda number: storage.compute_returns(
            last, _GAMMA, _LAM, time_outs=time_outs, final_values=finals
        ),
    }
    of = [*contenders(calls, first="floor"), *_in_torch(last), *_in_jax(last)]
    what = f"T={STEPS}, N={ENVS:,}"
    returns = compare(settings, "rollout-returns", f"Returns of a rollout, {what}", of)
    random, flat = np.random.default_rng(0), [storage[name].reshape(STEPS * ENVS, -1) for name in storage.spec]

    def gather(number: int) -> None:
        order = random.permutation(STEPS * ENVS)
        for rows in np.array_split(order, _PARTS):
            for values in flat:
                np.take(values, rows, axis=0)

    def epoch(number: int) -> None:
        for _ in storage.mini_batch_generator(_PARTS, 1):
            pass

    calls = {"NumPy: a permutation, and the same rows taken": gather, "mouse mini_batch_generator": epoch}
    of, title = contenders(calls, first="floor"), f"Rollout, {what}: an epoch of {_PARTS} mini-batches"
    return [returns, compare(settings, "rollout-batches", title, of, units=STEPS * ENVS, unit="rows")]


def _filled(kind: Callable[..., Any], convert: Callable[[Any], Any]) -> Any:
    shapes: Any = ((_OBSERVATION,), None, None, None, (_ACTION,))
    storage = kind.motion_mimic("rl", ENVS, STEPS, *shapes)  # type: ignore[attr-defined]
    random = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return convert(random.standard_normal((ENVS, *shape), np.float32))

    for _ in range(STEPS):
        storage.add_transitions(
            Transition(
                observations=normal(_OBSERVATION),
                actions=normal(_ACTION),
                rewards=normal(1),
                dones=convert(random.random((ENVS, 1)) < 0.05),
                values=normal(1),
                actions_log_prob=normal(1),
                mu=normal(_ACTION),
                sigma=normal(_ACTION),
            )
        )
    return storage


def _in_torch(last: np.ndarray[Any, Any]) -> list[Contender]:
    try:
        import torch

        import mouse_torch
    except ImportError:
        return []
    storage = _filled(mouse_torch.RolloutStorage, torch.as_tensor)
    last_values = torch.as_tensor(last)
    ours = Contender("mouse, torch", lambda number: storage.compute_returns(last_values, _GAMMA, _LAM), "ours")
    try:
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate
    except ImportError:
        return [ours]
    # [N, T, 1], as it wants them.
    values, rewards, dones = (storage[name].transpose(0, 1).contiguous() for name in ("values", "rewards", "dones"))
    following = torch.cat([values[:, 1:], last_values[:, None]], dim=1)

    def theirs(number: int) -> None:
        advantages, _ = vec_generalized_advantage_estimate(_GAMMA, _LAM, values, following, rewards, dones.bool())
        (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    return [ours, Contender("TorchRL vec_generalized_advantage_estimate", theirs)]


def _in_jax(last: np.ndarray[Any, Any]) -> list[Contender]:
    try:
        import jax

        from mouse_jax import rollout_storage
    except ImportError:
        return []
    rollout = rollout_storage.init(ENVS, STEPS, {"values": ()})
    storage = _filled(RolloutStorage, np.asarray)
    for row in range(STEPS):
        rollout = rollout_storage.append(rollout, {name: storage[name][row] for name in ("values", "rewards", "dones")})
    compute = jax.jit(lambda rollout, last: rollout_storage.compute_returns(rollout, last, _GAMMA, _LAM).arrays)
    return [Contender("mouse, JAX under jit", lambda number: jax.block_until_ready(compute(rollout, last)), "ours")]
