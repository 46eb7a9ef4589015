"""The interface between a buffer and its batch maker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.groups.index import StoredBatch
from mouse_core.groups.records import RLExample, RolloutRecord
from mouse_core.groups.stored import StoredGroup, read_ahead, read_wanted


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
        """Return a batch of ``batch_size`` examples, or None while there are too few."""

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> Mapping[str, Any]:
        """Return numbers and text by name, which are stored with a batch.

        "rollout_uids" are the rollouts it has used, where not every example says which one it was made of.
        """


@runtime_checkable
class ResumableBatchMaker(BatchMaker, Protocol):
    """A batch maker that takes stored groups, and restores its own state after a restart.

    It reads the rollouts that it draws (``read_wanted``), so that others need not be in memory. ``add_rollout`` is not
    called.
    """

    def add_group(self, group: StoredGroup) -> None:
        """Take a sealed group that lacks no late column. Rollouts in ``given_up`` must not be drawn."""

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Restore the state before a restart, whatever the present state is.

        Args:
            groups: All sealed groups that lack no late column, in the order in which they became ready.
            batches: For every stored batch, in order, the uids of the rollouts it used.
        """


# Metadata of a batch: the uids of the rollouts that it used.
_UIDS = "rollout_uids"
# Groups whose rollouts are read in one go.
_TOGETHER = 32


class _Known(NamedTuple):
    uid: str
    environment: str
    policy_version: str
    logprobs: int


class Making:
    """A batch maker, the groups that it is still to receive, and the batch that is not stored yet.

    Args:
        maker: The batch maker; None: groups are dropped.

    Attributes:
        takes_groups: Whether the maker takes stored groups; otherwise it receives their rollouts.
    """

    def __init__(self, maker: BatchMaker | None) -> None:
        self.maker = maker
        self.takes_groups = isinstance(maker, ResumableBatchMaker)
        self._coming: deque[RolloutRecord] = deque()
        self._ready: deque[StoredGroup] = deque()
        self._batch: list[RLExample] | None = None
        # Rollouts by their tokens, to recognise the rollout of an example without a uid; and the uids of used rollouts.
        self._by_tokens: dict[int, list[_Known]] = {}
        self._used: set[str] = set()

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[StoredBatch]) -> None:
        """Give the maker the ready groups of a folder, and the stored batches.

        Raises:
            DataError: A damaged file.
        """
        if isinstance(self.maker, ResumableBatchMaker):
            self._batch = None
            self.maker.resume(groups, [batch.uids for batch in batches])
            return
        if self.maker is None:
            return
        used = {uid for batch in batches for uid in batch.uids}
        left = [group for group in groups if not used.union(group.given_up).issuperset(group.uids)]
        for group, rollouts in zip(left, read_ahead(left), strict=True):
            self._feed(group, [rollout for rollout in rollouts if rollout.rollout_uid not in used])

    def feed(self, groups: Sequence[StoredGroup], *, later: bool = False) -> None:
        """Give the maker ready groups, each rollout once, also if the maker raises for one of them.

        Args:
            groups: The groups.
            later: Whether a maker of rollouts, which have to be read, gets them before the next batch.
        """
        if isinstance(self.maker, ResumableBatchMaker):
            for group in groups:
                self.maker.add_group(group)
        elif self.maker is not None:
            self._ready.extend(groups)
            if not later:
                self._feed_ready()

    @property
    def num_later(self) -> int:
        """The number of rollouts that the maker has not received yet."""
        return sum(len(group.uids) - len(group.given_up) for group in self._ready)

    def lose(self, group_uids: Container[str]) -> None:
        """Drop groups that the maker has not received, by their uids, as their version is lost."""
        self._ready = deque(group for group in self._ready if group.group_uid not in group_uids)

    def _feed_ready(self) -> None:
        """Read the ready groups, and give their rollouts to the maker."""
        self._feed_coming()
        while self._ready:
            together = list(islice(self._ready, _TOGETHER))
            for rollouts in read_wanted([(group, range(len(group.uids)), ()) for group in together]):
                self._feed(self._ready.popleft(), rollouts)

    def _feed(self, group: StoredGroup, rollouts: Iterable[RolloutRecord]) -> None:
        """Give the maker the rollouts of a group, which leave the cache."""
        self._coming.extend(rollout for rollout in rollouts if rollout.rollout_uid not in group.given_up)
        if group.cache is not None:
            group.cache.drop(group.uids)
        self._feed_coming()

    def _feed_coming(self) -> None:
        while self._coming:
            rollout = self._coming.popleft()
            tokens = np.concatenate([turn.tokens for turn in rollout.turns])
            known = _Known(rollout.rollout_uid, rollout.environment, rollout.policy_version, _logprobs(rollout))
            self._by_tokens.setdefault(_mark(tokens), []).append(known)
            self.maker.add_rollout(rollout)  # type: ignore[union-attr]

    def ask(self, name: str, *given: Any) -> Any:
        """Call an optional method of the maker: ``check_rollout``, ``set_policy_version`` or ``summary``."""
        call = getattr(self.maker, name, None)
        return None if call is None else call(*given)

    def batch(
        self, size: int, known: Container[str]
    ) -> tuple[Sequence[RLExample], Mapping[str, Any], tuple[str, ...]] | None:
        """Return a batch, the same one until ``stored`` is called; None if there are too few rollouts.

        Args:
            size: How many examples.
            known: The uids of the buffer's rollouts.

        Returns:
            The examples, the maker's metadata, and the uids of the rollouts that the batch used.

        Raises:
            ConfigError: There is no maker.
            DataError: It is not made of examples, or does not say of which rollouts. It is still what comes next. Or a
                damaged file of a group.
            StorageError: A group cannot be read.
        """
        if self.maker is None:
            raise ConfigError("create_and_store_batch: expected a buffer with a batch_maker, found none")
        self._feed_ready()
        if self._batch is None:
            self._batch = self.maker.create_batch(size)
        if self._batch is None:
            return None
        for place, example in enumerate(self._batch):
            if not isinstance(example, RLExample):
                raise DataError(f"create_batch: expected an RLExample at {place}, found {example!r:.100}")
        metadata = self.maker.get_batch_metadata(self._batch)
        if not isinstance(metadata, Mapping):
            raise DataError(f"get_batch_metadata: expected a dict, found {metadata!r:.100}")
        return self._batch, metadata, self._uids(self._batch, metadata.get(_UIDS), known)

    def _uids(self, batch: Sequence[RLExample], said: Any, known: Container[str]) -> tuple[str, ...]:
        """Return the uids of the rollouts that a batch used; a restart gives the others again."""
        uids = [example.rollout_uid for example in batch if example.rollout_uid]
        if isinstance(said, list | tuple) and said and all(isinstance(uid, str) and uid for uid in said):
            named = set(uids)
            uids += [uid for uid in said if uid not in named]
        elif len(uids) < len(batch):
            uids += self._recognised([example for example in batch if not example.rollout_uid], set(uids))
        for uid in uids:
            if uid not in known:
                raise DataError(f"create_batch: expected a batch of rollouts of this buffer, found rollout_uid {uid!r}")
        return tuple(uids)

    def _recognised(self, examples: Sequence[RLExample], taken: set[str]) -> list[str]:
        """Return the uids of the rollouts with the tokens of examples, each once; the most alike of several.

        An example of a rollout that was used before adds no uid.
        """
        found = []
        for example in examples:
            there = self._by_tokens.get(_mark(example.tokens), [])
            # A used rollout stays, for makers that use rollouts more than once.
            there[:] = [known for known in there if known.uid not in self._used] or there[:1]
            if not there:
                raise DataError(
                    "create_batch: expected to learn which rollouts a batch has used, or a restart would give them "
                    "again; found an example without rollout_uid, whose tokens no rollout has, and no "
                    f"{_UIDS!r} in the batch's metadata"
                )
            free = [known for known in there if known.uid not in taken and known.uid not in self._used]
            if free:
                best = max(free, key=_likeness(example))
                taken.add(best.uid)
                found.append(best.uid)
        return found

    def stored(self, uids: Iterable[str]) -> None:
        """Go on to the next batch; ``uids`` are the rollouts that this one used."""
        self._batch = None
        if self._by_tokens:
            self._used.update(uids)


def _mark(values: npt.NDArray[Any]) -> int:
    return hash(values.tobytes())


def _logprobs(rollout: RolloutRecord) -> int:
    """Return a hash of the log-probabilities of a rollout's tokens, 0 for tokens outside of the loss."""
    trained = [turn.logprobs if turn.is_trained else np.zeros(len(turn.tokens), np.float32) for turn in rollout.turns]
    return _mark(np.concatenate(trained))  # type: ignore[arg-type]


def _likeness(example: RLExample) -> Callable[[_Known], tuple[bool, bool]]:
    """Return the key that ranks rollouts by likeness to an example: environment and version, then log-probabilities."""
    logprobs = _mark(np.where(example.loss_mask, example.generator_log_probs, np.float32(0)))

    def like(known: _Known) -> tuple[bool, bool]:
        said = (example.environment or known.environment, example.policy_version or known.policy_version)
        return said == (known.environment, known.policy_version), known.logprobs == logprobs

    return like
