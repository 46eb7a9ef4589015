"""GrpoBatchMaker: batches of rollouts that are scored against the others of their group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.groups.examples.batches import make_examples
from mouse_core.groups.making.drawing import draw, metadata_of, shares_of
from mouse_core.groups.making.pool import Pool
from mouse_core.groups.making.retention import Retention, Rows, functions, name_of, summarise, weights_of
from mouse_core.groups.making.scoring import Advantage, BatchAdvantage, Rloo
from mouse_core.groups.making.wanted import WantedGroups
from mouse_core.groups.stored.reading import StoredGroup, read_ahead
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import RolloutRecord, check_rewarded
from mouse_core.groups.types.versions import Versions
from mouse_core.randomness import check_seed
from mouse_core.spec import check_count

# Groups that are no longer wanted are forgotten so many at a time.
_FORGET = 1024


class GrpoBatchMaker:
    """Makes batches of rollouts that are scored against the others of their group.

    A group is the rollouts of one environment, problem and policy version. What a rollout is worth is an ``advantage``
    of its group's rewards, in double precision, by default that of RLOO. A batch is a sample without replacement of the
    rollouts that are worth something, and a function of the seed, the number of batches before it, and what is there.

    Args:
        environment_name: Take the rollouts of this environment and leave out all others; None: take all.
        rng_seed: In ``[0, 2**64)``; None: 0.
        advantage: ``Rloo()`` (None), ``Grpo()``, ``DrGrpo()``, ``ReinforcePlusPlus()``, ``RewardToGo()``, or a function
            of one's own; see ``Advantage``.
        filter_zero_variance: Whether rollouts that are worth 0 are left out, as all are whose group earned the same. A
            batch is filled up with others, so it is never smaller for it.
        retention: Which rollouts are kept, and how likely each is drawn: ``Lengths(...)``, ``Rewards(...)``,
            ``TopK(...)``, ``Recency(...)``, ``Newest(...)``, ``MaxAge(...)``, a function of one's own, or several,
            whose weights are multiplied; see ``Retention``.
        older_groups: What becomes of a problem's group of an older version when rollouts of a newer one come. "drop":
            the first of them ends the older group, whatever its size. "until_as_large": the older group may be drawn
            until the newer one has as many rollouts; each is scored on its own. "keep": both may be drawn, and rollouts
            of older versions are taken also after newer ones. None: "keep" with a ``retention``, which then says what
            is too old, else "drop". Versions compare as numbers where they are numbers.
        max_staleness: Leave out rollouts that are more versions than this behind the latest one seen, or told by
            ``set_policy_version``: by the difference where versions are numbers, else by how many are between.
        max_uses: How many batches a rollout may be in.
        balance: Whether every environment gets the same share of a batch; or their shares by name, others getting
            none. What one lacks the others give.
        capacity_bytes: The most memory for rollouts that wait to be drawn, about; beyond it the oldest leave.

    Raises:
        ConfigError: An argument that cannot be used.
    """

    def __init__(
        self,
        environment_name: str | None = None,
        rng_seed: int | None = None,
        *,
        advantage: Advantage | None = None,
        filter_zero_variance: bool = True,
        retention: Retention | Sequence[Retention] = (),
        older_groups: str | None = None,
        max_staleness: int | None = None,
        max_uses: int = 1,
        balance: bool | Mapping[str, float] = False,
        capacity_bytes: int | None = None,
    ) -> None:
        if environment_name is not None and (not isinstance(environment_name, str) or not environment_name):
            raise ConfigError(f"environment_name: expected a name or None, found {environment_name!r}")
        self._environment = environment_name
        self._seed = check_seed(0 if rng_seed is None else rng_seed)
        self._advantage: Advantage = Rloo() if advantage is None else advantage
        if not callable(self._advantage) or isinstance(self._advantage, type):
            raise ConfigError(f"advantage: expected a function of rewards and groups, found {advantage!r:.80}")
        self._filter = filter_zero_variance
        self._retention = functions("retention", retention)
        self._max_staleness = None if max_staleness is None else check_count("max_staleness", max_staleness, 0)
        self._max_uses = check_count("max_uses", max_uses, 1)
        self._capacity = None if capacity_bytes is None else check_count("capacity_bytes", capacity_bytes, 1)
        self._shares = shares_of(balance)
        self._pool = Pool(self._advantage)
        self._wanted = WantedGroups(older_groups or ("keep" if self._retention else "drop"))
        self._names: list[str] = []
        self._versions = Versions()
        self._arrived: Counter[str] = Counter()
        self._newest = -math.inf
        self._seen: set[str] = set()
        self._uses: Counter[str] = Counter()
        self._unwanted, self._left = set[int](), Counter[str]()
        self._draws = 0
        self._last: dict[str, tuple[float, int]] = {}

    def __repr__(self) -> str:
        return f"GrpoBatchMaker(environment_name={self._environment!r}, rollouts={len(self._pool)}, at={self._draws})"

    # ------------------------------------------------------------------ rollouts

    def check_rollout(self, rollout: RolloutRecord) -> None:
        """Raise DataError for a rollout that ``add_rollout`` would refuse: one of a version that is not there yet.

        A ``RolloutBuffer`` asks before it stores one.
        """
        if not isinstance(rollout, RolloutRecord):
            raise DataError(f"add_rollout: expected a RolloutRecord, found {rollout!r:.100}")
        if self._versions.is_ahead(rollout.policy_version):
            raise DataError(
                f"rollout {rollout.rollout_uid!r}: expected a version up to {self._versions.told!r}, as "
                f"set_policy_version said, found {rollout.policy_version!r}"
            )

    def add_rollout(self, rollout: RolloutRecord) -> None:
        """Take a rollout, unless it is of another environment, has been taken, is stale, or of an older version.

        ``older_groups`` says whether a rollout of an older version than others of its problem is taken.

        Raises:
            DataError: Not a rollout, one without a reward, or one of a version beyond the one that
                ``set_policy_version`` was told.
        """
        self.check_rollout(rollout)
        check_rewarded(rollout)
        if rollout.rollout_uid in self._seen:
            return
        group = self._group(rollout.environment, rollout.example_id, rollout.policy_version)
        arrival = self._arrive(rollout.environment, [rollout.created])
        if group is not None:
            self._take(rollout, group, arrival)

    def _arrive(self, environment: str, created: Sequence[float]) -> int:
        """Count rollouts; the number of the first in its environment."""
        self._newest = max(self._newest, *created)
        self._arrived[environment] += len(created)
        return self._arrived[environment] - len(created)

    def _take(self, rollout: RolloutRecord, group: int, arrival: int) -> None:
        """Take a rollout of a group that is wanted."""
        has_uses = self._uses[rollout.rollout_uid] < self._max_uses
        useful = has_uses and any(turn.is_trained and len(turn.tokens) for turn in rollout.turns)
        about = check_rewarded(rollout), group, rollout.environment, rollout.policy_version, arrival
        self._add(rollout.rollout_uid, rollout if useful else None, *about)

    def set_policy_version(self, version: str | int) -> None:
        """Say which version is the latest. It counts for staleness, and rollouts of later ones are refused from now on.

        Say it again whenever the policy changes.
        """
        self._versions.told = str(version)
        self._note_version(str(version))

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Become what it was before a restart; see ``ResumableBatchMaker``."""
        self._draws = len(batches)
        self._uses = Counter(uid for uids in batches for uid in uids)
        arrivals = [self._arrive(group.environment, group.part.created) for group in groups]
        wanted = [
            (number, group, arrival, any(self._uses[uid] < self._max_uses for uid in group.uids))
            for number, group, arrival in self._count_stored(groups, arrivals)
        ]
        records = read_ahead([group for _, group, _, has_uses in wanted if has_uses])
        for number, group, arrival, has_uses in wanted:
            if has_uses:
                for place, rollout in enumerate(next(records)):
                    self._take(rollout, number, arrival + place)
            else:  # its rewards count all the same, as far as others are compared with them
                for place, (uid, reward) in enumerate(zip(group.uids, group.rewards, strict=True)):
                    if reward is not None:
                        self._add(uid, None, reward, number, group.environment, group.policy_version, arrival + place)

    def _count_stored(
        self, groups: Sequence[StoredGroup], arrivals: Sequence[int]
    ) -> list[tuple[int, StoredGroup, int]]:
        """Count the rollouts of all groups before a file is read; the wanted ones, each with its number.

        Of most groups no rollout can be drawn any more: a newer one of the same problem follows.
        """
        for group in groups:
            if self._environment in (None, group.environment):
                self._note_version(group.policy_version)
        numbers = [
            self._group(group.environment, group.example_id, group.policy_version, len(group.uids)) for group in groups
        ]
        return [
            (number, group, arrival)
            for number, group, arrival in zip(numbers, groups, arrivals, strict=True)
            if number is not None and number not in self._unwanted
        ]

    def _group(self, environment: str, example_id: str, version: str, count: int = 1) -> int | None:
        """The number of the group that so many rollouts join, a new one if need be; None if it is not wanted."""
        if self._environment not in (None, environment):
            return None
        self._note_version(version)
        if self._stale(version):
            return None
        number, gone = self._wanted.count_in((environment, example_id), version, count)
        self._unwanted.update(gone)
        return number

    def _add(
        self,
        uid: str,
        record: RolloutRecord | None,
        reward: float,
        group: int,
        environment: str,
        version: str,
        arrival: int,
    ) -> None:
        if uid in self._seen:
            return
        if environment not in self._names:
            self._names.append(environment)
        number, place = self._names.index(environment), self._versions.place(version)
        self._pool.add(uid, record, reward=reward, group=group, environment=number, version=place, arrival=arrival)
        self._seen.add(uid)
        if len(self._unwanted) >= _FORGET:
            self._forget()
        if self._capacity is not None and self._pool.nbytes > self._capacity:
            self._left["capacity_bytes"] += self._pool.shrink(self._capacity)

    def _forget(self) -> None:
        """Drop the groups that are not wanted any more."""
        for uid in self._pool.drop(self._unwanted):
            self._seen.discard(uid)
            self._uses.pop(uid, None)
        self._unwanted.clear()

    # ------------------------------------------------------------------ versions

    def _note_version(self, version: str) -> None:
        if self._versions.note(version) and self._max_staleness is not None:
            self._unwanted.update(self._wanted.drop(self._stale))

    def _stale(self, version: str) -> bool:
        return self._max_staleness is not None and self._versions.behind(version) > self._max_staleness

    # ------------------------------------------------------------------ batches

    @property
    def available(self) -> int:
        """How many examples a batch could be made of now."""
        return len(self._eligible()[0])

    def rows(self) -> Rows:
        """What is known of the rollouts, as a ``Retention`` is given it."""
        self._forget()
        pool, names = self._pool, self._names
        environment = pool.column("environment")
        arrived = np.array([self._arrived[name] for name in names], np.int64)
        newer = arrived[environment] - 1 - pool.column("arrival") if names else np.zeros(0, np.int64)
        return Rows(
            present=pool.column("present"),
            reward=pool.column("reward"),
            advantage=pool.scored(),
            group=pool.column("group"),
            environment=environment,
            environments=tuple(names),
            staleness=self._versions.all_behind()[pool.column("version")],
            age=self._newest - pool.column("created"),
            newer=newer,
            tokens=pool.column("tokens"),
            uses=np.array([self._uses[uid] for uid in pool.uids], np.int64),
        )

    def _eligible(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64] | None]:
        """The rows that may be drawn, in the order they came, and their weights where they differ."""
        weights = self._weigh() if self._retention else None
        self._forget()
        chosen = self._pool.column("present").copy()
        advantage = self._pool.scored()
        if self._filter:
            chosen &= advantage != 0.0
        if self._shares:
            allowed = np.array([self._shares.get(name, 0.0) > 0 for name in self._names], np.bool_)
            chosen &= allowed[self._pool.column("environment")]
        rows = np.flatnonzero(chosen)
        if weights is None or not len(rows) or (weights[rows] == weights[rows[0]]).all():
            return rows, None
        return rows, weights[rows]

    def _weigh(self) -> npt.NDArray[np.float64]:
        """The weights of all rows; what has none leaves."""
        rows = self.rows()
        weights = np.ones(len(rows))
        for retention in self._retention:
            weights *= weights_of(retention, rows)
            gone = np.flatnonzero(self._pool.column("present") & (weights == 0))
            for row in gone.tolist():
                self._pool.release(row)
            if len(gone):
                self._left[name_of(retention)] += len(gone)
        return weights

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """A batch, or None while there are fewer than ``batch_size`` rollouts to draw from.

        Raises:
            ConfigError: ``batch_size`` is below 1.
            DataError: An ``advantage`` or a ``retention`` that does not give what it should.
        """
        size = check_count("batch_size", batch_size, 1)
        rows, weights = self._eligible()
        if len(rows) < size:
            return None
        environments = self._pool.column("environment")[rows]
        drawn = draw(self._seed, self._draws, size, len(rows), weights, environments, self._names, self._shares)
        chosen = rows[drawn].tolist()
        records = [record for record in map(self._pool.records.__getitem__, chosen) if record is not None]
        worth: Any = self._pool.scored()[chosen]
        if isinstance(self._advantage, BatchAdvantage):
            worth = self._advantage.of_batch(records, worth)
        batch = make_examples(records, worth)
        behind = self._versions.all_behind()[self._pool.column("version")[chosen]].tolist()
        earned = zip(self._pool.column("reward")[chosen].tolist(), behind, strict=True)
        self._last = dict(zip([record.rollout_uid for record in records], earned, strict=True))
        for row, record in zip(chosen, records, strict=True):
            self._uses[record.rollout_uid] += 1
            if self._uses[record.rollout_uid] >= self._max_uses:
                self._pool.release(row)
        self._draws += 1
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """What a batch is made of: its size, tokens, uids, how many rollouts of which environment and version, and of
        the last batch the rewards and how many versions behind each was when it was drawn ("staleness").
        """
        return metadata_of(batch, self._last)

    def summary(self) -> dict[str, float]:
        """Numbers for a log, of the rollouts of all groups that are there, drawn or not; see ``summarise``.

        "groups", "groups_equal" (whose rollouts all earned the same), their share "groups_equal_share"; "rollouts",
        "available"; "left/<name>": how many left for that retention; and of reward, tokens and staleness
        "<name>_mean", "_std", "_min" and "_max", for all and after "<environment>/" for each.
        """
        available = self.available
        return {**summarise(self.rows()), "available": available, **{f"left/{k}": v for k, v in self._left.items()}}
