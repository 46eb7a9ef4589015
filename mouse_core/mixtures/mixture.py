"""Mixture: several stores as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError
from mouse_core.mixtures.mix import Mix, Per, checked_stages, is_number, listed
from mouse_core.mixtures.snapshot import MixtureSnapshot, check_rows
from mouse_core.sampling.shares import Schedule
from mouse_core.store import Snapshot, Store


class Mixture(Store):
    """Several stores as one, each with its share of the windows; loaders and sources take it as they take a store.

    No window lies in two members. Counts follow the shares exactly by number, not on average: of the first n windows of
    all batches every member has its share of n, up to a few windows at most, for any n, in any process.

    A field must be of the same kind in all members; where shorter rows are padded (``action``, ``obs_continuous``), it
    has the largest member's width. A field that some member lacks must be left out with ``fields=``. Members may grow:
    ``refresh()`` of a loader takes over the rows of all of them. Mixtures may be members, too.

    Args:
        stores: The members by name, or a sequence of them, which are called "0", "1" and so on.
        weights: A number from 0 for each, by name or in their order; None: 1 for each. Only their ratio counts. With a
            ``mouse_core.sampling.Schedule`` it changes with the number of the batch.
        per: What a weight is for. "member": each member comes as often as its weight says. "step": every step does, so
            that a store twice as large comes twice as often. "trajectory": every episode.
        temperature: Shares are proportional to ``(weight * size) ** (1 / temperature)``, where the size is 1, or the
            steps or episodes of the member: 1 leaves them as they are, and larger numbers even them out.
        field: The field of batches that says which member a window is of, int64 ``[B, S]``: its place among ``names``.
            None: there is none. Mixtures that are members have the same, or none.

    Raises:
        ConfigError: No members, names or weights that are none, or an option out of range.
    """

    has_shares = True

    def __init__(
        self,
        stores: Mapping[str, Store | Snapshot] | Sequence[Store | Snapshot],
        weights: Mapping[str, float] | Sequence[float] | Schedule | None = None,
        *,
        per: Per = "member",
        temperature: float = 1.0,
        field: str | None = "member",
    ) -> None:
        if isinstance(stores, Store | Snapshot):
            raise ConfigError(f"stores: expected several, by name or in a list, found {stores!r:.80}")
        if not isinstance(stores, Mapping):
            stores = {str(number): store for number, store in enumerate(listed("stores", stores))}
        if not stores:
            raise ConfigError("mixture: expected at least one store, found none")
        for name, store in stores.items():
            if not isinstance(name, str) or not isinstance(store, Store | Snapshot):
                raise ConfigError(f"mixture: expected stores by name, found {store!r:.80} as {name!r}")
        if per not in get_args(Per):
            raise ConfigError(f"per: expected one of {list(get_args(Per))}, found {per!r}")
        if not is_number(temperature) or not temperature > 0:
            raise ConfigError(f"temperature: expected a number above 0, found {temperature!r}")
        if field is not None and (not isinstance(field, str) or not field):
            raise ConfigError(f"field: expected a name or None, found {field!r}")
        names = tuple(stores)
        self._mix = Mix(names, checked_stages(weights, names), per, float(temperature), field)
        self._members = dict(stores)
        self._codes: dict[int, npt.NDArray[np.int64]] = {}
        self._kept: MixtureSnapshot | None = None
        self._lock = ProcessLock()

    def __repr__(self) -> str:
        return f"Mixture({self._mix!r}, num_rows={len(self)})"

    def __len__(self) -> int:
        """Rows of all members together."""
        return sum(len(member) for member in self._members.values())

    @property
    def members(self) -> Mapping[str, Store | Snapshot]:
        """The members by name."""
        return MappingProxyType(self._members)

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names, in the order of the codes in batches."""
        return self._mix.names

    def shares_at(self, batch: int = 0) -> dict[str, float]:
        """What part of a batch's windows each member gives, with the rows that there are now, by name; the sum is 1.

        Raises:
            ConfigError: A member with a weight has no rows.
        """
        first = [first for first, _ in self._mix.stages]
        windows = self.snapshot().shares_of(bisect_right(first, batch) - 1).windows
        return {name: some / sum(windows) for name, some in zip(self.names, windows, strict=True)}

    def snapshot(self, rows: Any = None) -> MixtureSnapshot:
        """The rows that all members have now, or had; copies no steps.

        Args:
            rows: What a loader's state says of each member, by name; see ``Store.snapshot``. None: those of now.

        Raises:
            ConfigError: A member has fewer rows.
            SchemaError: Members that do not fit together; the message names the field or the column.
        """
        if rows is not None:
            check_rows(rows, self.names)
        taken = [_taken(member, None if rows is None else rows[name]) for name, member in self._members.items()]
        with self._lock:
            kept = self._kept
            if kept is not None and all(map(lambda one, other: one is other, kept.members, taken)):
                return kept
            made = MixtureSnapshot(self._mix, taken, self._codes)
            if rows is None:
                self._kept = made
            return made

    def where(self, *conditions: Any, **columns: Any) -> Mixture:  # type: ignore[override]
        """The mixture of the episodes of each member that meet all of some conditions; see ``Store.where``."""
        return self._of_each(lambda member: member.where(*conditions, **columns))

    def best(self, share: float, by: str = "return") -> Mixture:  # type: ignore[override]
        """The mixture of each member's episodes with the largest return; see ``Store.best``."""
        return self._of_each(lambda member: member.best(share, by))

    def split(self, *, seed: int = 0, by: str = "episode", **shares: float) -> dict[str, Mixture]:  # type: ignore[override]
        """Mixtures of parts of each member, which share no episode, by name; see ``Store.split``."""
        parts = {name: _store(name, member).split(seed=seed, by=by, **shares) for name, member in self._members.items()}
        names = next(iter(parts.values()))
        # A member of few episodes may have none in a part.
        return {part: self._of({name: some[part] for name, some in parts.items()}, skips_empty=True) for part in names}

    def to_dataset(self) -> Any:
        """ConfigError: rows say neither whose they are nor with which share; each member has a dataset of its own."""
        raise ConfigError(
            "mixture: expected the rows of a member, as of "
            f"mixture.members[{self.names[0]!r}].to_dataset(), found the mixture's"
        )

    def _of_each(self, choose: Callable[[Store], Store]) -> Mixture:
        members = {name: choose(_store(name, member)) for name, member in self._members.items()}
        return self._of(members, skips_empty=self._mix.skips_empty)

    def _of(self, members: Mapping[str, Store], *, skips_empty: bool) -> Mixture:
        """The same mixture of other members of the same names."""
        weights = Schedule(dict(self._mix.stages))
        mix = self._mix
        made = Mixture(members, weights, per=mix.per, temperature=mix.temperature, field=mix.field)
        made._mix = replace(made._mix, skips_empty=skips_empty)
        return made

    def _look(self, rows: Any = None) -> Any:
        """ConfigError: the episodes of a mixture are those of its members, each with its own numbers."""
        raise ConfigError(
            f"mixture: expected the episodes of a member, as of mixture.members[{self.names[0]!r}], found the mixture's"
        )


def _store(name: str, member: Store | Snapshot) -> Store:
    if not isinstance(member, Store):
        raise ConfigError(f"mixture: expected stores as members, to choose episodes of, found a snapshot {name!r}")
    return member


def _taken(member: Store | Snapshot, rows: Any) -> Snapshot:
    if isinstance(member, Store):
        return member.snapshot(rows)
    return member if rows is None else member.of_rows(rows)
