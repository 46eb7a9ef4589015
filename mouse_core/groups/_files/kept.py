"""Rollouts that are in files and stay in memory, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from mouse_core.groups.types.records import RolloutRecord
from mouse_core.groups.types.sizes import nbytes_of


class RolloutCache:
    """Rollouts by uid, those that came last, as many as there is room for; a file has each of them.

    Args:
        room: About how many bytes they may take.

    Attributes:
        nbytes: How many they take.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._rollouts: OrderedDict[str, tuple[RolloutRecord, int]] = OrderedDict()
        self.nbytes = 0

    def __reduce__(self) -> Any:
        return RolloutCache, (self._room,)

    def __len__(self) -> int:
        return len(self._rollouts)

    def put(self, rollouts: Iterable[RolloutRecord]) -> None:
        """Keep some; those that came first leave for them."""
        for rollout in rollouts:
            nbytes = nbytes_of(rollout)
            self.drop([rollout.rollout_uid])
            self._rollouts[rollout.rollout_uid] = rollout, nbytes
            self.nbytes += nbytes
            while self.nbytes > self._room:
                self.nbytes -= self._rollouts.popitem(last=False)[1][1]

    def get(self, uid: str) -> RolloutRecord | None:
        """A rollout, if it is here."""
        found = self._rollouts.get(uid)
        return None if found is None else found[0]

    def drop(self, uids: Iterable[str]) -> None:
        """Let go of some."""
        for uid in uids:
            found = self._rollouts.pop(uid, None)
            if found is not None:
                self.nbytes -= found[1]
