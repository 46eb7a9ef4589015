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
    ``set_policy_version(version)``, which is told what the buffer is, also after a restart.
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
    """A batch maker that takes groups as they lie in files, and takes care itself of what a restart finds.

    It reads of them what it draws (``read_wanted``), so what waits need not be in memory. ``add_rollout`` is not called
    then.
    """

    def add_group(self, group: StoredGroup) -> None:
        """Take a group that has been sealed, and waits for nothing. ``given_up`` are not to be drawn."""

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Become what it was before a restart, whatever it is now.

        Args:
            groups: All sealed groups that wait for nothing, in the order in which they came.
            batches: For every stored batch, in order, the uids of the rollouts it used.
        """
