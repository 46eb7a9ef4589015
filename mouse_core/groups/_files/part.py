"""What is known of a group that is in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from mouse_core.groups._files.names import folder_name
from mouse_core.groups.types.records import GroupKey, RolloutRecord
from mouse_core.groups.types.sizes import earned_of, nbytes_of


@dataclass(frozen=True, slots=True)
class GroupFile:
    """What is known of a group without opening its file.

    Args:
        key: The group.
        name: The file's name, in the folder of its environment.
        number: How many groups were sealed before it.
        uids: Of its rollouts.
        created: When they were, in seconds since 1970.
        rewards: What they earned; None: that comes later.
        tokens: How many each has, over all turns.
        turns: How many each has.
        declared: How many columns had been declared when it was sealed; the late ones of them are what it waits for.
        nbytes: About how much memory its rollouts take.
        untrained: Which of them have no token that belongs into the loss, by their places.
        earned: What the turns of each earned, as ``earned_of`` says it; empty where no turn has a reward.
        columns: What the rollouts have of columns of one number per example, as JSON: by name one for each, null where
            a rollout has none; empty where none has any.
        first: How many rollouts of other groups stand before its own in the file.
    """

    key: GroupKey
    name: str
    number: int
    uids: tuple[str, ...]
    created: tuple[float, ...]
    rewards: tuple[float | None, ...]
    tokens: tuple[int, ...]
    turns: tuple[int, ...]
    declared: int
    nbytes: int
    untrained: tuple[int, ...]
    earned: tuple[int, ...]
    columns: str
    first: int = 0

    def column(self, name: str) -> list[float | None]:
        """What the rollouts have of a column that came with them, one for each."""
        found: dict[str, list[float | None]] = json.loads(self.columns) if self.columns else {}
        return found.get(name, [None] * len(self.uids))

    @property
    def place(self) -> str:
        """Where the group is, in the buffer's folder: it tells the group from all others, also of the same key."""
        place = f"{folder_name(self.key.environment)}/{self.name}"
        return f"{place}#{self.first}" if self.first else place

    def path(self, root: Path) -> Path:
        """Where the file is."""
        return root / folder_name(self.key.environment) / self.name


def part_of(
    rollouts: Sequence[RolloutRecord], *, name: str = "", number: int = 0, declared: int = 0, first: int = 0
) -> GroupFile:
    """What is to be known of a group, from its rollouts; the rest as in ``GroupFile``."""
    sizes = [[len(turn.tokens) for turn in rollout.turns] for rollout in rollouts]
    trained = [sum([len(turn.tokens) for turn in rollout.turns if turn.is_trained]) for rollout in rollouts]
    earned = tuple(map(earned_of, rollouts))
    return GroupFile(
        key=rollouts[0].key,
        name=name,
        number=number,
        uids=tuple([rollout.rollout_uid for rollout in rollouts]),
        created=tuple([rollout.created for rollout in rollouts]),
        rewards=tuple([rollout.reward for rollout in rollouts]),
        tokens=tuple(map(sum, sizes)),
        turns=tuple(map(len, sizes)),
        declared=declared,
        nbytes=sum(map(nbytes_of, rollouts)),
        untrained=tuple([place for place, some in enumerate(trained) if not some]),
        earned=earned if any(earned) else (),
        columns=_numbers_of(rollouts),
        first=first,
    )


def parts_of(
    groups: Sequence[Sequence[RolloutRecord]], *, name: str, numbers: Sequence[int], declared: int
) -> list[GroupFile]:
    """What is to be known of the groups that a file has, one after the other."""
    firsts = accumulate(map(len, groups), initial=0)
    given = zip(groups, numbers, firsts, strict=False)
    return [part_of(own, name=name, number=n, declared=declared, first=first) for own, n, first in given]


def _numbers_of(rollouts: Sequence[RolloutRecord]) -> str:
    names = {name for rollout in rollouts for name, value in rollout.columns.items() if not value.ndim}
    each = {name: [rollout.columns.get(name) for rollout in rollouts] for name in sorted(names)}
    if not each:
        return ""
    return json.dumps({name: [None if one is None else one.item() for one in own] for name, own in each.items()})
