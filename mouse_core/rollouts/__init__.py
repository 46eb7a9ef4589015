"""A storage of on-policy rollouts, and functions that compute returns and mini-batches."""

from mouse_core.rollouts.fields import RolloutField, Transition, motion_mimic_fields
from mouse_core.rollouts.mini_batches import MiniBatch, permutation
from mouse_core.rollouts.returns import (
    Outgoing,
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    normalized,
    outgoing,
    vtrace,
)
from mouse_core.rollouts.storage import RolloutStorage
from mouse_core.rollouts.trajectories import (
    episode_starts,
    history_rows,
    split_and_pad_trajectories,
    take_rows,
    trajectory_rows,
    unpad_trajectories,
)

__all__ = [
    "MiniBatch",
    "Outgoing",
    "RolloutField",
    "RolloutStorage",
    "Transition",
    "discounted_returns",
    "episode_starts",
    "gae",
    "history_rows",
    "lambda_returns",
    "motion_mimic_fields",
    "n_step_returns",
    "normalized",
    "outgoing",
    "permutation",
    "split_and_pad_trajectories",
    "take_rows",
    "trajectory_rows",
    "unpad_trajectories",
    "vtrace",
]
