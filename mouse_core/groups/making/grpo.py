"""GrpoBatchMaker: batches of rollouts that are scored against the others of their group."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.groups.examples.batches import make_examples
from mouse_core.groups.making.advantages import check_options
from mouse_core.groups.making.pool import Pool
from mouse_core.groups.making.wanted import WantedGroups
from mouse_core.groups.stored.reading import StoredGroup, read_ahead
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import RolloutRecord, check_rewarded
from mouse_core.groups.types.versions import version_number, version_order
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.spec import check_count

# Groups that are no longer wanted are forgotten so many at a time.
_FORGET = 1024


class GrpoBatchMaker:
    """Makes batches for RLOO and GRPO.

    An example's advantage is the rollout's reward compared with those of its group (environment, problem and policy
    version), in double precision: by default minus the mean of the others, as in RLOO. Of a problem only the group of
    the latest version is kept, unless ``older_groups`` says otherwise; versions compare as numbers where they are
    numbers. A batch is a sample without replacement of the rollouts whose advantage is not zero, and a function of the
    seed, the number of batches before it, and what is there.

    Args:
        environment_name: Take the rollouts of this environment and leave out all others; None: take all.
        rng_seed: In ``[0, 2**64)``; None: 0.
        normalize_std: Whether advantages are those of GRPO, ``(reward - mean) / (std + eps)``.
        baseline: "mean" or "leave_one_out", with ``normalize_std`` or without; None: "mean" with it. ``advantages``
            says what RLOO, GRPO, DeepSeekMath and Dr. GRPO take for this and the following.
        ddof: 1 divides squares by n - 1, 0 by n.
        eps, std_floor: What is added to the standard deviation, and the least it is taken for.
        filter_zero_variance: Whether rollouts without an advantage are left out. A batch is filled up with others, so
            it is never smaller for it. Without, groups of equal rewards are drawn too.
        older_groups: What becomes of a problem's group of an older version when rollouts of a newer one come. "drop":
            the first of them ends the older group, whatever its size. "until_as_large": the older group may be drawn
            until the newer one has as many rollouts; each is scored on its own. "keep": both may be drawn, and rollouts
            of older versions are taken also after newer ones; ``max_staleness`` then says what is too old.
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
        normalize_std: bool = False,
        baseline: str | None = None,
        ddof: int = 1,
        eps: float = 1e-4,
        std_floor: float = 0.0,
        filter_zero_variance: bool = True,
        older_groups: str = "drop",
        max_staleness: int | None = None,
        max_uses: int = 1,
        balance: bool | Mapping[str, float] = False,
        capacity_bytes: int | None = None,
    ) -> None:
        if environment_name is not None and (not isinstance(environment_name, str) or not environment_name):
            raise ConfigError(f"environment_name: expected a name or None, found {environment_name!r}")
        self._environment = environment_name
        self._seed = check_seed(0 if rng_seed is None else rng_seed)
        baseline, ddof, eps, std_floor = check_options(normalize_std, baseline, ddof, eps, std_floor)
        self._filter = filter_zero_variance
        self._max_staleness = None if max_staleness is None else check_count("max_staleness", max_staleness, 0)
        self._max_uses = check_count("max_uses", max_uses, 1)
        self._capacity = None if capacity_bytes is None else check_count("capacity_bytes", capacity_bytes, 1)
        self._shares = _shares(balance)
        self._pool = Pool(normalize_std=bool(normalize_std), baseline=baseline, ddof=ddof, eps=eps, std_floor=std_floor)
        self._wanted = WantedGroups(older_groups)
        self._names: list[str] = []
        self._seen: set[str] = set()
        self._uses: Counter[str] = Counter()
        self._versions: list[tuple[tuple[Any, ...], str]] = []
        self._unwanted: set[int] = set()
        self._draws = 0

    def __repr__(self) -> str:
        return f"GrpoBatchMaker(environment_name={self._environment!r}, rollouts={len(self._pool)}, at={self._draws})"

    # ------------------------------------------------------------------ rollouts

    def add_rollout(self, rollout: RolloutRecord) -> None:
        """Take a rollout, unless it is of another environment, has been taken, is stale, or of an older version.

        ``older_groups`` says whether a rollout of an older version than others of its problem is taken.

        Raises:
            DataError: Not a rollout, or one without a reward.
        """
        if not isinstance(rollout, RolloutRecord):
            raise DataError(f"add_rollout: expected a RolloutRecord, found {rollout!r:.100}")
        check_rewarded(rollout)
        if rollout.rollout_uid in self._seen:
            return
        group = self._group(rollout.environment, rollout.example_id, rollout.policy_version)
        if group is not None:
            self._take(rollout, group)

    def _take(self, rollout: RolloutRecord, group: int) -> None:
        """Take a rollout of a group that is wanted."""
        useful = any(turn.is_trained for turn in rollout.turns) and self._uses[rollout.rollout_uid] < self._max_uses
        self._add(rollout.rollout_uid, rollout if useful else None, check_rewarded(rollout), group, rollout.environment)

    def set_policy_version(self, version: str | int) -> None:
        """Say which version is the latest, before rollouts of it come; it counts for ``max_staleness``."""
        self._note_version(str(version))

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Become what it was before a restart; see ``ResumableBatchMaker``."""
        self._draws = len(batches)
        self._uses = Counter(uid for uids in batches for uid in uids)
        wanted = [
            (number, group, any(self._uses[uid] < self._max_uses for uid in group.uids))
            for number, group in self._count_stored(groups)
        ]
        records = read_ahead([group for _, group, has_uses in wanted if has_uses])
        for number, group, has_uses in wanted:
            if has_uses:
                for rollout in next(records):
                    self._take(rollout, number)
            else:  # its rewards count all the same, as far as others are compared with them
                for uid, reward in zip(group.uids, group.rewards, strict=True):
                    if reward is not None:
                        self._add(uid, None, reward, number, group.environment)

    def _count_stored(self, groups: Sequence[StoredGroup]) -> list[tuple[int, StoredGroup]]:
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
            (number, group)
            for number, group in zip(numbers, groups, strict=True)
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

    def _add(self, uid: str, record: RolloutRecord | None, reward: float, group: int, environment: str) -> None:
        if uid in self._seen:
            return
        if environment not in self._names:
            self._names.append(environment)
        number = self._names.index(environment)
        self._pool.add(uid, record, reward=reward, group=group, environment=number)
        self._seen.add(uid)
        if len(self._unwanted) >= _FORGET:
            self._forget()
        if self._capacity is not None and self._pool.nbytes > self._capacity:
            self._pool.shrink(self._capacity)

    def _forget(self) -> None:
        """Drop the groups that are not wanted any more."""
        for uid in self._pool.drop(self._unwanted):
            self._seen.discard(uid)
            self._uses.pop(uid, None)
        self._unwanted.clear()

    # ------------------------------------------------------------------ versions

    def _note_version(self, version: str) -> None:
        if self._max_staleness is None:
            return
        entry = (version_order(version), version)
        place = bisect_right(self._versions, entry)
        if place and self._versions[place - 1][0] == entry[0]:
            return
        insort(self._versions, entry)
        if place == len(self._versions) - 1:
            self._unwanted.update(self._wanted.drop(self._stale))

    def _stale(self, version: str) -> bool:
        if self._max_staleness is None:
            return False
        newest = version_number(self._versions[-1][1])
        number = version_number(version)
        if newest is not None and number is not None:
            return newest - number > self._max_staleness
        newer = len(self._versions) - bisect_right(self._versions, (version_order(version), "\U0010ffff"))
        return newer > self._max_staleness

    # ------------------------------------------------------------------ batches

    @property
    def available(self) -> int:
        """How many examples a batch could be made of now."""
        return len(self._eligible())

    def _eligible(self) -> npt.NDArray[np.int64]:
        """The rows that may be drawn, in the order they came."""
        self._forget()
        chosen = self._pool.column("present").copy()
        advantage = self._pool.scored()
        if self._filter:
            chosen &= advantage != 0.0
        if self._shares:
            allowed = np.array([self._shares.get(name, 0.0) > 0 for name in self._names], np.bool_)
            chosen &= allowed[self._pool.column("environment")]
        return np.flatnonzero(chosen)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """A batch, or None while there are fewer than ``batch_size`` rollouts to draw from.

        Raises:
            ConfigError: ``batch_size`` is below 1.
        """
        size = check_count("batch_size", batch_size, 1)
        rows = self._eligible()
        if len(rows) < size:
            return None
        words = Key(self._seed, Purpose.GROUPS, index=self._draws).bits(len(rows))
        if self._shares is None:
            drawn = _smallest(words, size)
        else:
            drawn = self._balanced(self._pool.column("environment")[rows], words, size)
        chosen = rows[drawn].tolist()
        records = [record for record in map(self._pool.records.__getitem__, chosen) if record is not None]
        batch = make_examples(records, self._pool.scored()[chosen])
        for row, record in zip(chosen, records, strict=True):
            self._uses[record.rollout_uid] += 1
            if self._uses[record.rollout_uid] >= self._max_uses:
                self._pool.release(row)
        self._draws += 1
        return batch

    def _balanced(
        self, environments: npt.NDArray[np.int64], words: npt.NDArray[np.uint64], size: int
    ) -> npt.NDArray[np.int64]:
        """Positions to draw, so many of each environment as is its share."""
        there = sorted(set(environments.tolist()), key=self._names.__getitem__)
        members = {number: np.flatnonzero(environments == number) for number in there}
        shares = self._shares or dict.fromkeys(self._names, 1.0)
        quotas = share_out(
            size, [shares[self._names[number]] for number in there], [len(members[number]) for number in there]
        )
        drawn = [
            members[number][_smallest(words[members[number]], quota)]
            for number, quota in zip(there, quotas, strict=True)
        ]
        every = np.concatenate(drawn)
        return every[np.argsort(words[every], kind="stable")]

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """What a batch is made of: its size, tokens, uids, and how many rollouts of which environment and version."""
        versions = Counter(example.policy_version for example in batch)
        return {
            "batch_size": len(batch),
            "num_tokens": sum(len(example) for example in batch),
            "num_loss_tokens": sum(int(np.count_nonzero(example.loss_mask)) for example in batch),
            "environments": dict(sorted(Counter(example.environment for example in batch).items())),
            "policy_versions": {version: versions[version] for version in sorted(versions, key=version_order)},
            "rollout_uids": [example.rollout_uid for example in batch],
        }


def share_out(size: int, shares: Sequence[float], limits: Sequence[int]) -> list[int]:
    """``size`` cut in proportion to ``shares``, at most ``limits`` each; what one cannot take the others get.

    The limits' sum is at least ``size``. Remainders go to the largest fractions, the first of equal ones.
    """
    quotas = [0] * len(shares)
    rest = size
    while rest:
        open_ = [place for place, limit in enumerate(limits) if quotas[place] < limit]
        total = math.fsum(shares[place] for place in open_)
        exact = {place: rest * shares[place] / total for place in open_}
        whole = {place: int(exact[place]) for place in open_}
        spare = rest - sum(whole.values())
        for place in sorted(open_, key=lambda place: (whole[place] - exact[place], place))[:spare]:
            whole[place] += 1
        for place in open_:
            taken = min(whole[place], limits[place] - quotas[place])
            quotas[place] += taken
            rest -= taken
    return quotas


def _smallest(words: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.int64]:
    """The places of the ``count`` smallest words, in their order: a random sample in random order."""
    if count < len(words):
        places = np.argpartition(words, count)[:count] if count else np.zeros(0, np.int64)
        return places[np.argsort(words[places], kind="stable")]
    return np.argsort(words, kind="stable")


def _shares(balance: bool | Mapping[str, float]) -> dict[str, float] | None:
    """The environments' shares; empty: equal ones; None: no balance."""
    if isinstance(balance, Mapping):
        wrong = {name: share for name, share in balance.items() if not 0 <= share < math.inf}
        if wrong or not any(balance.values()):
            raise ConfigError(f"balance: expected shares of at least 0 and one above, found {dict(balance)}")
        return dict(balance)
    if not isinstance(balance, bool):
        raise ConfigError(f"balance: expected True, False or shares by environment, found {balance!r}")
    return {} if balance else None
