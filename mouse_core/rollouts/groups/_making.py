"""What a buffer gives its batch maker, and what it gets from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mouse_core.rollouts.groups._index import StoredBatch
from mouse_core.rollouts.groups._parts import Part
from mouse_core.rollouts.groups.protocol import BatchMaker, ResumableBatchMaker
from mouse_core.rollouts.groups.reading import StoredGroup
from mouse_core.rollouts.groups.types import RLExample, RolloutRecord


class Making:
    """A batch maker, the rollouts on their way to it, and the batch that is not stored yet.

    Args:
        maker: What makes batches.
    """

    def __init__(self, maker: BatchMaker) -> None:
        self.maker = maker
        self._coming: deque[RolloutRecord] = deque()
        self._batch: list[RLExample] | None = None

    def resume(self, root: Path, parts: Sequence[Part], batches: Sequence[StoredBatch]) -> None:
        """Tell the maker what a folder holds.

        Raises:
            DataError: A damaged file.
        """
        groups = [StoredGroup(root, part) for part in parts]
        if isinstance(self.maker, ResumableBatchMaker):
            self.maker.resume(groups, [batch.uids for batch in batches])
            return
        used = {uid for batch in batches for uid in batch.uids}
        for group in groups:
            if not used.issuperset(group.uids):
                self.feed(rollout for rollout in group.read().rollouts if rollout.rollout_uid not in used)

    def feed(self, rollouts: Iterable[RolloutRecord] = ()) -> None:
        """Give the maker what was sealed, each rollout once, also if it refuses one of them."""
        self._coming.extend(rollouts)
        while self._coming:
            self.maker.add_rollout(self._coming.popleft())

    def batch(self, size: int) -> tuple[list[RLExample], Mapping[str, Any]] | None:
        """A batch and what is to be known of it, the same one until ``stored`` is called; None if there are too few."""
        self.feed()
        if self._batch is None:
            self._batch = self.maker.create_batch(size)
        return None if self._batch is None else (self._batch, self.maker.get_batch_metadata(self._batch))

    def stored(self) -> None:
        """Go on to the next batch."""
        self._batch = None
