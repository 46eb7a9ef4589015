"""Stored rollouts, which are read when they are needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypedDict, Unpack, overload

import numpy as np

from mouse_core._base.memo import memo
from mouse_core._base.threads import THREADS, in_order
from mouse_core.errors import ConfigError, MissingFieldError, MissingRowError
from mouse_core.groups.files import GroupFile, read_groups
from mouse_core.groups.index import read_index
from mouse_core.groups.late import LateColumns
from mouse_core.groups.records import RolloutGroup, RolloutRecord, of_group, version_order
from mouse_core.groups.waiting import RolloutCache

# Files that are read in one go.
_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A sealed group in its file, and its properties that are known without reading the file.

    Args:
        environment: The environment's name.
        example_id: Which of its problems.
        policy_version: The version of the policy that sampled the rollouts.
        uids: Of its rollouts.
        rewards: Of its rollouts; None where it has not come yet.
        root: The buffer's folder.
        part: What else is known of the file.
        late: The columns that came later.
        given_up: Uids of those of its rollouts that were given up.
        cache: Rollouts that are in memory, too.
    """

    environment: str
    example_id: str
    policy_version: str
    uids: tuple[str, ...]
    rewards: tuple[float | None, ...]
    root: Path = field(repr=False)
    part: GroupFile = field(repr=False)
    late: LateColumns = field(repr=False, compare=False)
    given_up: frozenset[str] = frozenset()
    cache: RolloutCache | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        root: Path,
        part: GroupFile,
        late: LateColumns,
        given_up: Set[str] = frozenset(),
        cache: RolloutCache | None = None,
    ) -> StoredGroup:
        """Return the group of a file in a buffer's folder."""
        own = frozenset(given_up & set(part.uids)) if given_up else frozenset()
        return cls(*part.key, part.uids, late.rewards(part), root, part, late, own, cache)

    @property
    def group_uid(self) -> str:
        """The group's uid, which tells groups of one problem and version apart; rollouts that are read have it."""
        return self.part.place

    @property
    def path(self) -> Path:
        """The Parquet file, which groups that were sealed by the same call may share."""
        return self.part.path(self.root)

    def read(self) -> RolloutGroup:
        """Read the group from its file.

        Raises:
            DataError: The file is damaged; the message names it.
            StorageError: It cannot be read.
        """
        return RolloutGroup(*self.part.key, rollouts=tuple(self.late.fill(read_groups([self.part], self.root)[0])))


def read_ahead(groups: Sequence[StoredGroup]) -> Iterator[list[RolloutRecord]]:
    """Yield the rollouts of each group, in order, while several threads read on.

    Raises:
        DataError: A file is damaged; the message names it.
        StorageError: It cannot be read.
    """

    def read(some: Sequence[StoredGroup]) -> list[list[RolloutRecord]]:
        return read_groups([group.part for group in some], some[0].root)

    pieces = [groups[first : first + _TOGETHER] for first in range(0, len(groups), _TOGETHER)]
    with ThreadPoolExecutor(THREADS) as pool:
        for group, rollouts in zip(groups, chain.from_iterable(in_order(pool, read, pieces)), strict=True):
            yield group.late.fill(rollouts)


def read_wanted(
    wanted: Sequence[tuple[StoredGroup, Sequence[int], Sequence[int]]],
) -> list[list[RolloutRecord]]:
    """Return some rollouts of some groups: those in memory, and others from the groups' files.

    Args:
        wanted: Groups, each with the places of the rollouts to return, and the places of others that stay in memory
            where the group's file is read.

    Raises:
        DataError, StorageError: As ``read_ahead``.
    """
    found: list[list[RolloutRecord]] = []
    missing = []
    for number, (group, places, _) in enumerate(wanted):
        there = [None if group.cache is None else group.cache.get(group.uids[place]) for place in places]
        known = [of_group(rollout, group.group_uid) for rollout in there if rollout is not None]
        found.append(group.late.fill(known) if len(known) == len(places) else [])
        if len(known) < len(places):
            missing.append(number)
    missing.sort(key=lambda number: wanted[number][0].group_uid)  # those of a file are read together
    for number, rollouts in zip(missing, read_ahead([wanted[number][0] for number in missing]), strict=True):
        group, places, others = wanted[number]
        found[number] = [rollouts[place] for place in places]
        if group.cache is not None:
            group.cache.put(rollouts[place] for place in others)
    return found


class StoredRollouts(Sequence[RolloutRecord]):
    """Rollouts of sealed groups, in the order these were sealed; a file is read when one of its rollouts is.

    The sequence does not change when more groups are sealed. Late columns are those that were there when the first
    rollout was asked for.

    Args:
        root: The buffer's folder.
        parts: The groups' files.
        rows: The places of the wanted rollouts in each group.
        late: The late columns.
    """

    def __init__(
        self, root: Path, parts: Sequence[GroupFile], rows: Sequence[Sequence[int]], late: LateColumns
    ) -> None:
        self._root, self._late = root, late
        self._parts = [part for part, own in zip(parts, rows, strict=True) if own]
        self._rows = [own for own in rows if own]
        self._ends = np.cumsum([len(chosen) for chosen in self._rows], dtype=np.int64)
        self._last: dict[int, list[RolloutRecord]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __repr__(self) -> str:
        return f"StoredRollouts({len(self)} rollouts in {len(self._parts)} groups of {str(self._root)!r})"

    @overload
    def __getitem__(self, index: int) -> RolloutRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[RolloutRecord]: ...
    def __getitem__(self, index: int | slice) -> RolloutRecord | list[RolloutRecord]:
        """Return one rollout, or a list of several.

        Raises:
            IndexError: There is no such rollout.
            DataError: Its file is damaged; the message names it.
            StorageError: It cannot be read.
        """
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= row < len(self):
            raise IndexError(f"rollouts: expected an index in {-len(self)}..{len(self) - 1}, found {index}")
        number = int(np.searchsorted(self._ends, row, side="right"))
        chosen = self._rows[number]
        last = self._last
        if number not in last:
            numbers = self._by_file[self._parts[number].path(self._root)]
            read = read_groups([self._parts[other] for other in numbers], self._root)
            self._last = last = dict(zip(numbers, map(self._late.fill, read), strict=True))
        return last[number][chosen[row - (int(self._ends[number]) - len(chosen))]]

    def __iter__(self) -> Iterator[RolloutRecord]:
        return (self[row] for row in range(len(self)))

    def rollout(self, rollout_uid: str) -> RolloutRecord:
        """Return a rollout by its uid; only the file of its group is read.

        Raises:
            MissingRowError: It is not among these.
            DataError, StorageError: As for an index.
        """
        if rollout_uid not in self._by_uid:
            raise MissingRowError(f"rollouts: expected the uid of one of {len(self)}, found {rollout_uid!r:.100}")
        return self[self._by_uid[rollout_uid]]

    @memo
    def _by_file(self) -> dict[Path, list[int]]:
        found: dict[Path, list[int]] = {}
        for number, part in enumerate(self._parts):
            found.setdefault(part.path(self._root), []).append(number)
        return found

    @memo
    def _by_uid(self) -> dict[str, int]:
        return {uid: row for row, uid in enumerate(self.uids)}

    @memo
    def groups(self) -> list[StoredGroup]:
        """The whole groups of the rollouts, in order."""
        return [StoredGroup.of(self._root, part, self._late) for part in self._parts]

    @memo
    def environments(self) -> list[str]:
        """The names of the environments, in alphabetical order."""
        return sorted({part.key.environment for part in self._parts})

    @memo
    def policy_versions(self) -> list[str]:
        """The policy versions, oldest first."""
        return sorted({part.key.policy_version for part in self._parts}, key=version_order)

    @memo
    def uids(self) -> list[str]:
        """The rollouts' uids; no file is read."""
        pairs = zip(self._parts, self._rows, strict=True)
        return [part.uids[row] for part, rows in pairs for row in rows]


Range = tuple[float | None, float | None]
"""The least and the most that are wanted; None: any."""


class RolloutFilter(TypedDict, total=False):
    """The keyword arguments of ``open_rollouts``."""

    environment: str | None
    policy_version: str | int | Collection[str | int] | None
    example_id: str | int | Collection[str | int] | None
    since: float | None
    until: float | None
    tokens: Range | None
    rewards: Range | None


def select_rollouts(root: Path, parts: Sequence[GroupFile], **where: Unpack[RolloutFilter]) -> StoredRollouts:
    """Return the rollouts of some groups; see ``open_rollouts``."""
    if unknown := where.keys() - RolloutFilter.__annotations__:
        raise TypeError(f"rollouts: expected arguments among {list(RolloutFilter.__annotations__)}, found {unknown}")
    since, until, tokens, rewards = where.get("since"), where.get("until"), where.get("tokens"), where.get("rewards")
    for name, bound in (("since", since), ("until", until)):
        if not _is_bound(bound):
            raise ConfigError(f"{name}: expected seconds since 1970 or None, found {bound!r:.80}")
    for name, given in (("tokens", tokens), ("rewards", rewards)):
        is_pair = isinstance(given, tuple | list) and len(given) == 2 and all(map(_is_bound, given))
        if given is not None and not is_pair:
            raise ConfigError(f"{name}: expected the least and the most, numbers or None, found {given!r:.80}")
    if (environment := where.get("environment")) is not None:
        known = sorted({part.key.environment for part in parts})
        if environment not in known:
            raise MissingFieldError(f"environment: expected one of {known}, found {environment!r}")
        parts = [part for part in parts if part.key.environment == environment]
    names = {"policy_version": where.get("policy_version"), "example_id": where.get("example_id")}
    for field_name, wanted in names.items():
        if wanted is not None:
            single = isinstance(wanted, str | int | np.integer)
            texts = {str(one) for one in ([wanted] if single else wanted)}  # type: ignore[union-attr]
            parts = [part for part in parts if getattr(part.key, field_name) in texts]
    late = LateColumns(root)

    def rows_of(part: GroupFile) -> Sequence[int]:
        rows: Sequence[int] = range(len(part.uids))
        if since is not None or until is not None:
            low, high = _bounds((since, until))
            rows = [row for row in rows if low <= part.created[row] < high]
        if tokens is not None:
            low, high = _bounds(tokens)
            rows = [row for row in rows if low <= part.tokens[row] <= high]
        if rewards is not None and rows:
            low, high = _bounds(rewards)
            earned = late.rewards(part)
            rows = [row for row in rows if (own := earned[row]) is not None and low <= own <= high]
        return rows

    return StoredRollouts(root, parts, list(map(rows_of, parts)), late)


def _is_bound(value: object) -> bool:
    return value is None or (isinstance(value, int | float | np.number) and not isinstance(value, bool))


def _bounds(given: Range) -> tuple[float, float]:
    return -np.inf if given[0] is None else given[0], np.inf if given[1] is None else given[1]


def open_rollouts(root_path: str | Path, **where: Unpack[RolloutFilter]) -> StoredRollouts:
    """Open the sealed rollouts of a ``RolloutBuffer``'s folder, also while another process adds to it.

    Args:
        root_path: The folder.
        **where: What all of them have: ``environment``, this one; ``policy_version`` and ``example_id``, this one or
            one of several; ``since`` and ``until``, created in ``[since, until)``, in seconds since 1970; ``tokens``,
            the least and the most, as ``(None, 4096)``; ``rewards``, the least and the most that they earned, as
            ``(0.5, None)``, where rollouts whose rewards have not come are left out.

    Returns:
        A sequence of ``RolloutRecord``; files are read when one of their rollouts is asked for.

    Raises:
        ConfigError: There is no such folder; times or ranges that are none.
        MissingFieldError: An environment that is not there.
        DataError: A file that is damaged, or is gone and has what no other file has; the message names it.
        StorageError: The folder cannot be read.

    Warns:
        StoreWarning: Files of groups are gone; their rollouts are left out.
    """
    root = Path(root_path)
    if not root.is_dir():
        raise ConfigError(f"root_path: expected the folder of a RolloutBuffer, found none at {str(root)!r}")
    return select_rollouts(root, read_index(root).parts, **where)
