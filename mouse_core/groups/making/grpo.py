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
from mouse_core.groups.making.functions.retention import HeldRollouts, Retention, functions
from mouse_core.groups.making.functions.scoring import Advantage, BatchAdvantage, Rloo, compared
from mouse_core.groups.making.holding import CandidatePool
from mouse_core.groups.making.members import GroupSlice
from mouse_core.groups.stored.reading import StoredGroup, Wanted, read_wanted
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import RolloutRecord, refuse_undeclared
from mouse_core.groups.types.versions import version_name, version_order
from mouse_core.randomness import Key, Purpose, as_exponential, check_seed
from mouse_core.spec import check_count


def draw(
    seed: int,
    index: int,
    size: int,
    count: int,
    weights: npt.NDArray[np.float64] | None,
    environments: npt.NDArray[np.int64],
    names: Sequence[str],
    shares: Mapping[str, float] | None,
) -> npt.NDArray[np.int64]:
    """Places of a sample without replacement, in random order.

    Args:
        seed, index: What is drawn is a function of these two, and of what there is to draw from.
        size: How many are drawn.
        count: How many there are to draw from.
        weights: How likely each is drawn, ``[count]``; None: all are equally likely.
        environments: The environment of each, as a place in ``names``, ``[count]``.
        names: The environments' names.
        shares: How much of the sample is of which; empty: as much of each; None: as it comes.
    """
    words: npt.NDArray[Any] = Key(seed, Purpose.GROUPS, index=index).bits(count)
    if weights is not None:
        # The smallest of exponential times with these rates: Efraimidis and Spirakis, "Weighted random sampling with a
        # reservoir" (2006).
        words = as_exponential((~words >> np.uint64(11)).astype(np.float64) * 2.0**-53) / weights
    if shares is None:
        return _smallest(words, size)
    there = sorted(set(environments.tolist()), key=names.__getitem__)
    members = {number: np.flatnonzero(environments == number) for number in there}
    wanted = shares or dict.fromkeys(names, 1.0)
    quotas = share_out(size, [wanted[names[number]] for number in there], [len(members[number]) for number in there])
    drawn = [
        members[number][_smallest(words[members[number]], quota)] for number, quota in zip(there, quotas, strict=True)
    ]
    every = np.concatenate(drawn)
    return every[np.argsort(words[every], kind="stable")]


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


def _smallest(words: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """The places of the ``count`` smallest words, in their order: a random sample in random order."""
    if count < len(words):
        places = np.argpartition(words, count)[:count] if count else np.zeros(0, np.int64)
        return places[np.argsort(words[places], kind="stable")]
    return np.argsort(words, kind="stable")


def shares_of(balance: bool | Mapping[str, float]) -> dict[str, float] | None:
    """The environments' shares; empty: equal ones; None: no balance.

    Raises:
        ConfigError: Something else than a bool, or shares.
    """
    if isinstance(balance, Mapping):
        for name, share in balance.items():
            if isinstance(share, bool) or not isinstance(share, int | float | np.number) or not 0 <= share < math.inf:
                raise ConfigError(f"balance: expected a share of at least 0 for {name!r:.80}, found {share!r:.80}")
        if not any(balance.values()):
            raise ConfigError(f"balance: expected a share above 0, found {dict(balance)}")
        return dict(balance)
    if not isinstance(balance, bool):
        raise ConfigError(f"balance: expected True, False or shares by environment, found {balance!r}")
    return {} if balance else None


def metadata_of(batch: Sequence[RLExample], drawn: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
    """What a batch is made of.

    Args:
        batch: Its examples.
        drawn: Of rollouts by uid the reward, and how many versions behind it was when it was drawn.
    """
    versions = Counter(example.policy_version for example in batch)
    known = [drawn[example.rollout_uid] for example in batch if example.rollout_uid in drawn]
    of_all = {"rewards": [reward for reward, _ in known], "staleness": [behind for _, behind in known]}
    return {
        "batch_size": len(batch),
        "num_tokens": sum(len(example) for example in batch),
        "num_loss_tokens": sum(int(np.count_nonzero(example.loss_mask)) for example in batch),
        "environments": dict(sorted(Counter(example.environment for example in batch).items())),
        "policy_versions": {version: versions[version] for version in sorted(versions, key=version_order)},
        "rollout_uids": [example.rollout_uid for example in batch],
        **(of_all if len(known) == len(batch) else {}),
    }


class GrpoBatchMaker:
    """Makes batches of rollouts that are scored against the others of their group.

    A group that a ``RolloutBuffer`` sealed is scored by itself, whatever else has its problem and policy version. Of
    rollouts that no buffer sealed, a group is those of one environment, problem and policy version. What a rollout is
    worth is an ``advantage`` of its group's rewards, in double precision, by default that of RLOO. Rollouts without a
    token in the loss are not scored, and no other is compared with them. A batch is a sample without replacement of the
    rollouts of groups of which something can be learnt, and a function of the seed, the number of batches before it,
    and what is there.

    Rollouts that a ``RolloutBuffer`` has in files are read when they are drawn, unless they are still in its memory.

    Args:
        environment_name: Take the rollouts of this environment and leave out all others; None: take all.
        rng_seed: In ``[0, 2**64)``; None: 0.
        advantage: ``Rloo()`` (None), ``Grpo()``, ``DrGrpo()``, ``ReinforcePlusPlus()``, ``RewardToGo()``, or a function
            of one's own; see ``Advantage``.
        filter_zero_variance: Whether groups are left out whose rollouts all earned the same, rounding apart. Nothing is
            learnt of them where rollouts are compared with the others of their group, as by all advantages here; a
            function of one's own has none left out, unless it ``compares``. A batch is filled up with others, so it is
            never smaller for it.
        retention: Which rollouts are kept, and how likely each is drawn: ``Lengths(...)``, ``Rewards(...)``,
            ``TopK(...)``, ``Recency(...)``, ``Newest(...)``, ``MaxAge(...)``, a function of one's own, or several,
            whose weights are multiplied; see ``Retention``.
        older_groups: What becomes of a problem's group of an older version when rollouts of a newer one come. "drop":
            the first of them ends the older group, whatever its size. "until_as_large": the older group may be drawn
            until the newer one has as many rollouts; each is scored on its own. "keep": both may be drawn, and rollouts
            of older versions are taken also after newer ones. None: "keep" with a ``retention`` or ``max_staleness``,
            which then say what is too old, else "drop". Versions compare as numbers where they are numbers.
        max_staleness: Leave out rollouts that are more versions than this behind the one that ``set_policy_version``
            told, or, where none was told, the latest one seen: by the difference where versions are numbers, else by
            how many are between.
        max_uses: How many batches a rollout may be in.
        balance: Whether every environment gets the same share of a batch; or their shares by name, others getting
            none. What one lacks the others give.
        capacity_bytes: Rollouts leave behind which more came than so many bytes, about, with them; None: none does.
        pool_groups: Whether sealed groups of one environment, problem and policy version are scored as one. What a
            rollout is worth then depends on which of them came before its batch was drawn.

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
        pool_groups: bool = False,
    ) -> None:
        if environment_name is not None and (not isinstance(environment_name, str) or not environment_name):
            raise ConfigError(f"environment_name: expected a name or None, found {environment_name!r}")
        self._environment = environment_name
        self._seed = check_seed(0 if rng_seed is None else rng_seed)
        self._advantage: Advantage = Rloo() if advantage is None else advantage
        if not callable(self._advantage) or isinstance(self._advantage, type):
            raise ConfigError(f"advantage: expected a function of rewards and groups, found {advantage!r:.80}")
        compares = compared(self._advantage)
        self._retention = functions("retention", retention)
        self._max_uses = check_count("max_uses", max_uses, 1)
        self._shares = shares_of(balance)
        self._holding = CandidatePool(
            self._advantage,
            environment=environment_name,
            older=older_groups or ("keep" if self._retention or max_staleness is not None else "drop"),
            pool=bool(pool_groups),
            leaves_equal=bool(filter_zero_variance) and compares != "nothing",
            by_turn=compares == "turns",
            max_staleness=None if max_staleness is None else check_count("max_staleness", max_staleness, 0),
            capacity=None if capacity_bytes is None else check_count("capacity_bytes", capacity_bytes, 1),
        )
        self._draws = 0
        self._last: dict[str, tuple[float, int]] = {}

    def __repr__(self) -> str:
        rollouts = len(self._holding.pool)
        return f"GrpoBatchMaker(environment_name={self._environment!r}, rollouts={rollouts}, at={self._draws})"

    # ------------------------------------------------------------------ rollouts

    def check_rollout(self, rollout: RolloutRecord) -> None:
        """Raise DataError for a rollout that ``add_rollout`` would refuse: one of a version that is not there yet, or
        of the uid of another one that was added.

        A ``RolloutBuffer`` asks before it stores one.
        """
        if not isinstance(rollout, RolloutRecord):
            raise DataError(f"add_rollout: expected a RolloutRecord, found {rollout!r:.100}")
        self._holding.versions.refuse_ahead(rollout.policy_version, rollout.rollout_uid)
        self._holding.refuse_other(rollout)

    def add_rollout(self, rollout: RolloutRecord) -> None:
        """Take a rollout, unless it is of another environment, has been taken, is stale, or of an older version.

        ``older_groups`` says whether a rollout of an older version than others of its problem is taken.

        Raises:
            DataError: Not a rollout, one without a reward, one with columns that were not declared, one of a version
                beyond the one that ``set_policy_version`` was told, or one that came before with other content (of one
                that was drawn or has left, as far as that is known: group, rewards, lengths).
        """
        try:
            self.check_rollout(rollout)
            refuse_undeclared(rollout)
            piece = GroupSlice.of_rollout(rollout)
        except DataError:
            self._holding.refuse()
            raise
        self._holding.come(piece)

    def add_group(self, group: StoredGroup) -> None:
        """Take a stored group; see ``ResumableBatchMaker``."""
        self._holding.come(GroupSlice.of_group(group))

    def set_policy_version(self, version: str | int) -> None:
        """Say which version is the latest. It counts for staleness, and rollouts of later ones are refused from now on.

        Say it again whenever the policy changes. Rollouts of later versions that are there belong to a policy that is
        not trained on, as where a trainer goes back to a checkpoint: they are never drawn, also not once another policy
        reaches their version.

        Raises:
            DataError: Neither a str nor an int.
        """
        self._holding.set_policy_version(version_name(version))

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Become what it was before a restart; see ``ResumableBatchMaker``."""
        self._holding.begin()
        self._draws = len(batches)
        uses = Counter(uid for uids in batches for uid in uids)

        def settle(piece: GroupSlice) -> None:
            piece.uses = {place: uses[uid] for place, uid in enumerate(piece.part.uids) if uid in uses}
            piece.gone.update(place for place, count in piece.uses.items() if count >= self._max_uses)

        self._holding.restore(list(map(GroupSlice.of_group, groups)), settle)

    # ------------------------------------------------------------------ batches

    @property
    def available(self) -> int:
        """How many examples a batch could be made of now."""
        return len(self._eligible())

    def rows(self) -> HeldRollouts:
        """What is known of the rollouts, as a ``Retention`` is given it."""
        return self._holding.rows()

    def _eligible(self) -> npt.NDArray[np.int64]:
        """The rows that may be drawn, in the order they came."""
        holding = self._holding
        if self._retention:
            holding.weigh(self._retention)
        holding.pool.settle()
        chosen = holding.pool.column("present").copy()
        if self._shares:
            allowed = np.array([self._shares.get(name, 0.0) > 0 for name in holding.environments], np.bool_)
            chosen &= allowed[holding.pool.column("environment")]
        return np.flatnonzero(chosen)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """A batch, or None while there are fewer than ``batch_size`` rollouts to draw from.

        Raises:
            ConfigError: ``batch_size`` is below 1.
            DataError: An ``advantage`` or a ``retention`` that does not give what it should; a damaged file.
            StorageError: A file cannot be read. Nothing was drawn.
        """
        size = check_count("batch_size", batch_size, 1)
        rows = self._eligible()
        if len(rows) < size:
            return None
        pool, names = self._holding.pool, self._holding.environments
        given = pool.column("weight")[rows]
        weights = None if (given == given[0]).all() else given
        environments = pool.column("environment")[rows]
        drawn = draw(self._seed, self._draws, size, len(rows), weights, environments, names, self._shares)
        chosen = rows[drawn]
        worth: Any = pool.scored()[chosen]
        pieces, places = pool.column("piece")[chosen].tolist(), pool.column("place")[chosen].tolist()
        records = _records(pieces, places)
        if isinstance(self._advantage, BatchAdvantage):
            worth = self._advantage.of_batch(records, worth)
        batch = make_examples(records, worth)
        behind = self._holding.versions.all_behind()[pool.column("version")[chosen]].tolist()
        earned = zip(pool.column("reward")[chosen].tolist(), behind, strict=True)
        self._last = dict(zip([record.rollout_uid for record in records], earned, strict=True))
        pool.column("uses")[chosen] += 1
        uses = pool.column("uses")[chosen].tolist()
        for row, piece, place, count in zip(chosen.tolist(), pieces, places, uses, strict=True):
            piece.uses[place] = count
            if count >= self._max_uses:
                pool.release(row)
                self._holding.used += 1
        self._draws += 1
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """What a batch is made of: its size, tokens, uids, how many rollouts of which environment and version, and of
        the last batch the rewards and how many versions behind each was when it was drawn ("staleness").
        """
        return metadata_of(batch, self._last)

    def summary(self) -> dict[str, float]:
        """Numbers for a log.

        Of all that ever came, also before a restart: "rollouts", "groups", "groups_equal" (whose rollouts all earned
        the same), their share "groups_equal_share"; of what is there: "available", and of the rewards of all groups
        that are wanted, and the tokens and the staleness of rollouts that can be drawn, "<name>_mean", "_std", "_min"
        and "_max", NaN where there are none; each for all and after "<environment>/" for each.

        "received" is how many rollouts were given, again or in vain, too. Each of them is counted once: in "held",
        which a batch may still have, in "used", which batches had ``max_uses`` times, or in one "left/<reason>", whose
        reason is an option ("environment_name", "max_staleness", "older_groups", "filter_zero_variance",
        "capacity_bytes"), the name of a retention, "duplicate", "refused", "given_up", "untrained" (no token in the
        loss) or "lost_versions" (see ``set_policy_version``). "left/filter_zero_variance" goes down where others join
        a group that earned the same. A restart forgets what was a duplicate or refused.
        """
        available = self.available
        return {**self._holding.summary(), "available": available}


def _records(pieces: Sequence[GroupSlice], places: Sequence[int]) -> list[RolloutRecord]:
    """The rollouts at some places of pieces; those that are in no memory are read."""
    rows: dict[GroupSlice, list[int]] = {}
    for row, piece in enumerate(pieces):
        if piece.group is not None:
            rows.setdefault(piece, []).append(row)
    found: list[Any] = [piece.record for piece in pieces]
    wanted = []
    for piece, own in rows.items():
        chosen = [places[row] for row in own]
        others = [place for place in piece.present if place not in chosen]
        wanted.append(Wanted(piece.group, chosen, others))  # type: ignore[arg-type]
    for own, records in zip(rows.values(), read_wanted(wanted), strict=True):
        for row, record in zip(own, records, strict=True):
            found[row] = record
    return found
