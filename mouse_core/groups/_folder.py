"""What a rollout buffer has on disk and in memory, and how that changes; one thread at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from mouse_core.errors import StorageError
from mouse_core.groups._files.batches import BatchFiles
from mouse_core.groups._files.index import encode_parts, open_index
from mouse_core.groups._files.waiting import Plan, Rules, Waiting
from mouse_core.groups._files.writing import write_groups
from mouse_core.groups.examples.batches import examples_digest
from mouse_core.groups.making.feeding import Making
from mouse_core.groups.types.columns import Columns
from mouse_core.groups.types.records import RolloutRecord


class Folder:
    """Sealed groups, rollouts that wait for theirs, and batches.

    Args:
        root: The folder, which is this process's.
        rules: When a group is sealed.
        making: What makes batches, if anything does.
        declared: Columns that the rollouts may have beside those of all.
        compression: Of the pages.
        sync: Whether to wait for the disk.
        digest: Whether a digest of the batches runs along.

    Attributes:
        parts: The files of the sealed groups, in order.
        uids: Of all rollouts.
        versions: Of the policies that all rollouts are of.
        waiting: The rollouts whose groups are not sealed.
        batches: Those that were stored.

    Raises:
        DataError: A damaged file.
        StorageError: The folder cannot be read or written.
    """

    def __init__(
        self,
        root: Path,
        rules: Rules,
        making: Making | None,
        declared: Columns,
        *,
        compression: str,
        sync: bool,
        digest: bool,
    ) -> None:
        self._root, self._making, self._declared = root, making, declared
        self._compression, self._sync = compression, sync
        index, self._index_log = open_index(root)
        self.parts = index.parts
        self.batches = BatchFiles(
            root,
            index.batches,
            self._index_log,
            compression=compression,
            sync=sync,
            digest=examples_digest if digest else None,
        )
        self.uids = {uid for part in self.parts for uid in part.uids}
        self._number = max((part.number for part in self.parts), default=-1) + 1
        self.waiting = Waiting(root, rules, self.uids, declared)
        self.uids.update(r.rollout_uid for group in self.waiting.groups.values() for r in group.rollouts)
        self.versions = {part.key.policy_version for part in self.parts}
        self.versions.update(key.policy_version for key in self.waiting.groups)
        self.waiting.tidy()
        if making is not None:
            making.resume(root, self.parts, self.batches.stored)

    def add(self, requests: Sequence[Sequence[RolloutRecord]]) -> tuple[list[int], Plan | None]:
        """Add what several callers gave, with one wait for the disk.

        Returns:
            How many of each were new, and what was done for them, if anything was.

        Raises:
            StorageError: They cannot be written; nothing was added.
        """
        new: dict[str, RolloutRecord] = {}
        counts = []
        for given in requests:
            before = len(new)
            for rollout in given:
                if rollout.rollout_uid not in self.uids:
                    new.setdefault(rollout.rollout_uid, rollout)
            counts.append(len(new) - before)
        if not new:
            return counts, None
        plan = self.waiting.plan(list(new.values()), time.time())
        self.carry_out(plan)
        return counts, plan

    def carry_out(self, plan: Plan) -> None:
        """Write what a plan says, then let it be so; after an error everything is as it was."""
        if not plan.sealed and not plan.logged:
            return
        size = self.waiting.log(plan, sync=self._sync)
        parts = []
        if plan.sealed:
            try:
                parts = write_groups(
                    self._root,
                    plan.sealed,
                    number=self._number,
                    compression=self._compression,
                    sync=self._sync,
                    declared=self._declared,
                )
            except BaseException:
                self.waiting.undo(size)
                raise
        self.waiting.apply(plan)
        self.uids.update(rollout.rollout_uid for rollout in plan.logged)
        self.uids.update(uid for part in parts for uid in part.uids)
        self.versions.update(rollout.policy_version for rollout in plan.logged)
        self.versions.update(part.key.policy_version for part in parts)
        self.parts.extend(parts)
        self._number += len(parts)
        if parts:
            # The files say the same, and a log can be made smaller another time.
            with contextlib.suppress(StorageError):
                self._index_log.append(encode_parts(parts), sync=False)
            if self._making is not None:
                self._making.feed(rollout for group in plan.sealed for rollout in group)
            with contextlib.suppress(StorageError):
                self.waiting.tidy()

    def close(self) -> None:
        """Close the logs; what waits is in them."""
        self.waiting.close()
        self._index_log.close()
