"""Examples to train on, made of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.groups.types import RLExample, RolloutRecord, unchecked


def make_examples(rollouts: Sequence[RolloutRecord], advantages: npt.ArrayLike) -> list[RLExample]:
    """An example of every rollout: all tokens of its turns, of which those that the policy wrote are in the loss.

    A turn is in the loss if its role is "assistant" and its log-probabilities are known.

    Args:
        rollouts: ``n`` of them.
        advantages: What each is worth, ``[n]``.

    Returns:
        The examples in the same order. Their arrays are parts of four long ones.

    Raises:
        DataError: Another number of advantages, or one that is not finite.
    """
    worth = np.asarray(advantages, np.float64)
    if worth.shape != (len(rollouts),) or not np.isfinite(worth).all():
        raise DataError(f"advantages: expected a finite number for each of {len(rollouts)} rollouts, found {worth!r}")
    turns = list(chain.from_iterable(rollout.turns for rollout in rollouts))
    if not turns:
        return []
    sizes = np.fromiter((len(turn.tokens) for turn in turns), np.int64, len(turns))
    turn_ends = np.concatenate([[0], np.cumsum(sizes)])
    last_turns = np.cumsum([len(rollout.turns) for rollout in rollouts])
    ends = turn_ends[np.concatenate([[0], last_turns])]
    trained = np.fromiter((turn.is_trained for turn in turns), np.bool_, len(turns))
    nothing = np.zeros(int(sizes.max()), np.float32)

    tokens = np.concatenate([turn.tokens for turn in turns])
    mask = np.repeat(trained, sizes)
    pairs = zip(turns, trained.tolist(), strict=True)
    logprobs = np.concatenate([turn.logprobs if own else nothing[: len(turn.tokens)] for turn, own in pairs])
    advantage = np.repeat(worth.astype(np.float32), np.diff(ends))
    advantage[~mask] = 0.0
    for values in (tokens, mask, advantage, logprobs):
        values.flags.writeable = False
    bounds = zip(rollouts, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    return [
        _example(
            tokens[a:b],
            mask[a:b],
            advantage[a:b],
            logprobs[a:b],
            rollout.rollout_uid,
            rollout.environment,
            rollout.policy_version,
        )
        for rollout, a, b in bounds
    ]


_example = unchecked(RLExample)
