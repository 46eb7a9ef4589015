"""How much memory rollouts take, about, and what their turns earned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mouse_core.groups.types.records import RolloutRecord

# What Python's objects take beside what is in them: of a rollout, of a turn with two arrays, of another value.
_ROLLOUT, _TURN, _VALUE = 300, 450, 64


def nbytes_of(rollout: RolloutRecord) -> int:
    """About how many bytes a rollout takes in memory, with its columns and metadata, which may well be most of it."""
    total = _ROLLOUT
    if rollout.columns or rollout.metadata:
        total += _held(rollout.columns) + _held(rollout.metadata)
    for turn in rollout.turns:
        total += _TURN + 8 * len(turn.tokens) + len(turn.message)
        if turn.columns or turn.metadata:
            total += _held(turn.columns) + _held(turn.metadata)
    return total


def _held(values: Mapping[str, Any]) -> int:
    return sum(map(_size, values.values())) if values else 0


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray | np.generic):
        return _VALUE + value.nbytes
    if isinstance(value, str | bytes):
        return _VALUE + len(value)
    if isinstance(value, Mapping):
        return _VALUE + _held(value)
    return _VALUE + (sum(map(_size, value)) if isinstance(value, Iterable) else 0)


def earned_of(rollout: RolloutRecord) -> int:
    """A number that is the same for rollouts whose turns earned the same one by one, rounding apart; 0 where none has a
    reward.
    """
    if not any(turn.reward for turn in rollout.turns):
        return 0
    rewards = [round(turn.reward or 0.0, 14) for turn in rollout.turns]
    if not any(rewards):
        return 0
    earned = " ".join([f"{reward or 0.0:.6g}" for reward in rewards]).encode()
    return int.from_bytes(hashlib.blake2b(earned, digest_size=8).digest(), "little", signed=True)
