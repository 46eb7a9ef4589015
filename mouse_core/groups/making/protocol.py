"""What makes batches of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mouse_core.groups.stored.reading import StoredGroup
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import RolloutRecord


class BatchMaker(Protocol):
    """Makes batches of the rollouts that it is given, in memory.

    A ``RolloutBuffer`` gives it the rollouts of one sealed group after the other, and stores the batches. After a
    restart it gives all rollouts again that no stored batch has used, in the same order. Which ones a batch has used is
    what its examples' ``rollout_uid`` say, and "rollout_uids" in its metadata, a list. Where neither does, an example
    that has the tokens of a rollout (those of all turns) has used it; a batch of other examples is refused. A maker may
    have a method ``check_rollout(rollout)``: what it raises, ``add_rollouts`` raises before anything is stored; and one
    ``set_policy_version(version)``, for the buffer's.
    """

    def add_rollout(self, rollout: RolloutRecord) -> None:
        """Take a rollout of a group that has been sealed."""

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """A batch of ``batch_size`` examples, or None while there are too few."""

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> Mapping[str, Any]:
        """What is to be known of a batch: numbers and text by name, which are stored with it.

        "rollout_uids" are the rollouts it has used, where not every example says which one it was made of.
        """


@runtime_checkable
class ResumableBatchMaker(BatchMaker, Protocol):
    """A batch maker that takes care itself of what a restart finds."""

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Become what it was before a restart.

        Args:
            groups: All sealed groups in the order they were sealed; their rollouts are read when asked for.
            batches: For every stored batch, in order, the uids of the rollouts it used.
        """
