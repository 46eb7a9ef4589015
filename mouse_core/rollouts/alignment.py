"""Rows of alignment "arrived" as the transitions that returns are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

from mouse_core.errors import SchemaError
from mouse_core.rollouts.returns import check_rows

Array = Any


class Outgoing(NamedTuple):
    """Rows of alignment "arrived" as arguments for the functions of this module, one row less.

    Attributes:
        rewards, values, dones, last_values, time_outs, final_values: As in ``gae``.
        valid: Whether a row is a transition. The row of a final observation is none: what is computed for it means
            nothing, and reaches no other row.
    """

    rewards: Array
    values: Array
    dones: Array
    last_values: Array
    time_outs: Array
    final_values: Array
    valid: Array


def outgoing(rewards: Array, values: Array, dones: Array) -> Outgoing:
    """Rows of alignment "arrived", as stores hold them, as transitions.

    The reward and done of row t+1 belong to the transition that leaves row t. As final observations are rows there,
    truncated episodes need nothing else: ``transitions = outgoing(...)._asdict(); valid = transitions.pop("valid");
    gae(**transitions, discount=0.99, lam=0.95)``.

    Args:
        rewards: Floating ``[T+1, ...]``: the reward with which row t was reached.
        values: V of the observation in row t, ``[T+1, ...]``.
        dones: 0 alive, 1 terminal, 2 truncated, ``[T+1, ...]``: whether row t is final.

    Returns:
        Transitions ``[T, ...]``.

    Raises:
        SchemaError: Shapes that differ, or fewer than two rows.
    """
    check_rows("values", values, rewards.shape)
    check_rows("dones", dones, rewards.shape)
    if not rewards.shape or rewards.shape[0] < 2:
        raise SchemaError(f"outgoing: rewards: expected at least two rows, found shape {tuple(rewards.shape)}")
    return Outgoing(
        rewards=rewards[1:],
        values=values[:-1],
        dones=dones[1:] != 0,
        last_values=values[-1],
        time_outs=dones[1:] == 2,
        final_values=values[1:],
        valid=dones[:-1] == 0,
    )
