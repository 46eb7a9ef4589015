"""Whether two rollouts of one uid are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mouse_core.errors import DataError
from mouse_core.groups.types.records import RolloutRecord, same_values


def refuse_other(rollout: RolloutRecord, there: RolloutRecord, caller: str) -> None:
    """Raise DataError where two rollouts of one uid are not the same, whoever sampled them and when.

    Args:
        rollout: The one that comes.
        there: The one that came before.
        caller: Begins the message.
    """
    if rollout is there:
        return
    one, other = _content(rollout), _content(there)
    differing = [name for name in one if not same_values(one[name], other[name])]
    if differing:
        raise other_one(rollout.rollout_uid, differing, caller)


def other_one(uid: str, differing: list[str], caller: str) -> DataError:
    """The error of a rollout that has another one's uid, with what differs."""
    return DataError(
        f"{caller}, rollout {uid!r}: expected what was added with this uid before, found other {', '.join(differing)}"
    )


def _content(rollout: RolloutRecord) -> dict[str, Any]:
    return {
        **rollout.key._asdict(),
        "turns": [
            (turn.message, turn.role, turn.tokens, turn.logprobs, turn.reward, turn.metadata, _by_name(turn.columns))
            for turn in rollout.turns
        ],
        "reward": rollout.reward,
        "metadata": rollout.metadata,
        "columns": _by_name(rollout.columns),
    }


def _by_name(columns: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(columns.items()))
