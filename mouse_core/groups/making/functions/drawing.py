"""Drawing without replacement, by weights, and so many of each environment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.versions import version_order
from mouse_core.randomness import Key, Purpose, as_exponential


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
