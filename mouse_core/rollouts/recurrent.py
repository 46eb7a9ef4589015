"""Recurrent mini-batches: whole trajectories of some environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from array_api_compat import array_namespace

from mouse_core.rollouts import policy_states
from mouse_core.rollouts.amp import AmpStates, previous_states
from mouse_core.rollouts.mini_batches import TARGETS, MiniBatch
from mouse_core.rollouts.trajectories import episode_starts, take_rows, trajectory_rows

Array = Any


def take_recurrent_mini_batch(
    arrays: Mapping[str, Array],
    envs: Array,
    *,
    num_trajectories: int | None = None,
    amp: AmpStates | None = None,
    hidden_states: Any = None,
    hidden_axis: int | None = None,
) -> MiniBatch:
    """The mini-batch of the trajectories of some environments.

    Args:
        arrays: Fields ``[T, N, ...]``, ``dones`` among them.
        envs: Numbers of the environments, ``[n]``.
        num_trajectories: As in ``trajectory_rows``; needed under ``jax.jit``.
        amp: For the previous states.
        hidden_states: Of every row.
        hidden_axis: Where they have the environments.

    Returns:
        Trajectories ``[T, K, ...]`` of all fields but ``TARGETS``, which stay ``[T, n, ...]``.
    """
    xp = array_namespace(envs)
    dones = arrays["dones"]
    all_envs = dones.shape[1]
    own = {name: xp.take(values, envs, axis=1) for name, values in arrays.items()}
    trajectories, masks = trajectory_rows(own["dones"], num_trajectories=num_trajectories)
    # Numbers of the environments' rows among those of all environments.
    step = xp.cumulative_sum(xp.ones_like(own["dones"][:, 0, 0], dtype=envs.dtype)) - 1
    rows = step[:, None] * all_envs + envs[None, :]
    starts = xp.take(xp.reshape(rows, (-1,)), trajectories[0])
    return MiniBatch(
        {
            name: values if _is_target(name, arrays) else take_rows(values, trajectories, masks)
            for name, values in own.items()
        },
        (None, None) if hidden_states is None else policy_states.take(hidden_states, starts, hidden_axis),
        masks,
        rows=rows,
        **({} if amp is None else previous_states(amp, rows, episode_starts(dones))),
    )


def _is_target(name: str, arrays: Mapping[str, Array]) -> bool:
    data = name.removesuffix("_mask")
    return name in TARGETS or (data in TARGETS and data in arrays)
