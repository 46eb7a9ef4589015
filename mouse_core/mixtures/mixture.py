"""Mixture, which combines several stores into a single store; the shares of its members; and the sampler of its
windows.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column import Column, ColumnPart, ReadOptions
from mouse_core._arrow.column_types import ColumnType
from mouse_core._arrow.dense import DENSE_BYTES, DenseBudget
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling import (
    SAMPLERS,
    CyclicWindows,
    EpisodeWindows,
    ManyStarts,
    PaddedSampler,
    SequentialWindows,
    WindowSampler,
)
from mouse_core.sampling.shares import Schedule, Shares, StagedShares, exact
from mouse_core.spec import DIMS, Field, FieldSpec, Layout, check_choice
from mouse_core.store import Store
from mouse_core.store.fields import FieldReader, SnapshotConfig
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

Per = Literal["member", "trajectory", "step"]

_OURS: Any = (*SAMPLERS.values(), EpisodeWindows)


@dataclass(frozen=True, repr=False)
class Mix:
    """The options of a mixture: names and weights of its members; see ``Mixture``.

    Args:
        names: Names of the members.
        stages: For each stage, the index of the first batch and the members' weights. The weights are the smallest
            integers in the given ratio.
        per: The unit of a weight: "member", "step" or "trajectory".
        temperature: The temperature, which makes shares more equal; see ``Mixture``.
        field: The name of the field that contains each window's member; None: no field.
    """

    names: tuple[str, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    per: Per = "member"
    temperature: float = 1.0
    field: str | None = "member"

    def __repr__(self) -> str:
        """Return a short text that identifies the options in states."""
        by_name = {first: dict(zip(self.names, weights, strict=True)) for first, weights in self.stages}
        even = "" if self.temperature == 1 else f" at temperature {self.temperature}"
        return f"{by_name if len(by_name) > 1 else by_name[0]} per {self.per}{even}"

    def shares(self, stage: int, members: Sequence[Snapshot]) -> Shares:
        """The members' shares of the windows in a stage.

        Raises:
            ConfigError: A member with a weight has no rows, or no member has both a weight and rows.
        """
        weights = self.stages[stage][1]
        sizes = self._sizes(weights, members)
        shares = [exact(weight) * size for weight, size in zip(weights, sizes, strict=True)]
        if not any(shares):
            raise ConfigError(
                f"mixture: expected a member with rows and a weight above 0, found {self!r} and the sizes {sizes}"
            )
        if self.temperature != 1:
            largest = max(shares)
            shares = [_evened(share / largest, self.temperature) for share in shares]
        return Shares.of(shares)

    def _sizes(self, weights: Sequence[int], members: Sequence[Snapshot]) -> list[int]:
        """Return the size by which each member's weight is multiplied: the number of steps, the number of episodes, or
        1."""
        if self.per == "step":
            return [member.num_rows for member in members]
        if self.per == "trajectory":
            return [len(member.episode_starts) if member.num_rows else 0 for member in members]
        for name, weight, member in zip(self.names, weights, members, strict=True):
            if weight and not member.num_rows:
                raise ConfigError(
                    f"mixture: expected rows in every member whose weight is above 0, found "
                    f"member {name!r} without rows"
                )
        return [1] * len(members)


def checked_stages(weights: Any, names: Sequence[str]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the weights of the members by stage; with None, each weight is 1. Raise ConfigError for invalid
    weights.
    """
    if isinstance(weights, Schedule):
        return tuple((int(first), _checked(some, names)) for first, some in weights.weights.items())
    return ((0, _checked(weights, names)),)


def listed(option: str, given: Any) -> list[Any]:
    """Return the values of ``given`` as a list in the same order; raise ConfigError if ``given`` is not a sequence."""
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
        raise ConfigError(f"{option}: expected several members, in a dict or a list, found {given!r:.80}")
    return list(given)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number."""
    known = isinstance(value, int | float | Fraction | np.integer | np.floating) and not isinstance(value, bool)
    try:
        return known and math.isfinite(value)
    except OverflowError:
        return False


def _checked(weights: Any, names: Sequence[str]) -> tuple[int, ...]:
    if weights is None:
        return (1,) * len(names)
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ConfigError(f"weights: expected a weight for each of {list(names)}, found {list(weights)}")
        weights = [weights[name] for name in names]
    given = listed("weights", weights)
    if len(given) != len(names) or not all(is_number(weight) and weight >= 0 for weight in given) or not any(given):
        raise ConfigError(f"weights: expected {len(names)} numbers of 0 or more, not all 0, found {given}")
    # 2 and 1, 1.0 and 0.5, 0.7 and 0.35 are the same weights, also in a fingerprint: they become 2 and 1.
    shares = [exact(weight if isinstance(weight, int | Fraction) else float(weight)) for weight in given]
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    return tuple(share // math.gcd(*whole) for share in whole)


def _evened(share: Fraction, temperature: float) -> Fraction:
    """Apply a temperature to a share of at most 1; a share above 0 stays above 0."""
    return Fraction(max(float(share) ** (1 / temperature), sys.float_info.min)) if share else share


# At least this number of windows is drawn together, because drawing a few windows takes 500 us, as long as drawing
# 2,000 windows.
_MANY_WINDOWS = 2048


@dataclass(frozen=True)
class MixedWindows(ManyStarts):
    """The sampler of a source over a mixture: samples windows of the members in proportion to the members' shares.

    Windows are counted over all batches; ``Shares`` returns the member of the window with index n. The windows of a
    member are counted from the first batch of the epoch. The member's sampler draws these windows. The seed of this
    sampler is derived from the source's seed, the index of the first batch, and the member's index. Members alternate
    as evenly as their shares allow, so every shard of a batch has the same mix as the complete batch.

    Args:
        each: The sampler that draws from a member; its batches must be full.
        mix: The options of the mixture.
    """

    each: WindowSampler
    mix: Mix

    @property
    def sequence_length(self) -> int:
        """Number of steps in a window."""
        return self.each.sequence_length

    @property
    def batch_size(self) -> int:
        """Number of windows in a batch."""
        return self.each.batch_size

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the number of batches in an epoch, which has as many windows as the epochs of all members with a share
        together; 1 for the sampling "last".
        """
        mixture, windows = _members(snapshot), 0
        shares = mixture.shares_of(0)
        counts = shares.counts(self.batch_size)
        for number, member in enumerate(mixture.members):
            try:
                if member.num_rows and any(weights[number] for _, weights in self.mix.stages):
                    # A custom sampler returns only the number of its own batches in an epoch.
                    sized = _sized(self.each, max(1, counts[number]) if _is_last(self.each) else 1)
                    own = member.sampled_by(sized)
                    windows += own.batches_per_epoch(member) * own.batch_size
            except ConfigError as error:
                if shares.windows[number]:  # a member without rows may get rows before its stage begins
                    raise ConfigError(f"mixture: member {self.mix.names[number]!r}: {error}") from error
        return 1 if _is_last(self.each) else -(-windows // self.batch_size)

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        mixture, size, shard_size = _members(snapshot), self.batch_size, rows.stop - rows.start
        if _is_last(self.each):
            begins = [begin for begin, _ in self.mix.stages]
            stages = np.searchsorted(begins, np.arange(first, first + count), side="right") - 1
            there, which = np.unique(stages, return_inverse=True)
            latest = [self._drawn(mixture, mixture.shares_of(stage), seed, 0, size, 0) for stage in there.tolist()]
            return np.stack(latest)[which, rows]
        shares = StagedShares([stage * size for stage, _ in self.mix.stages], mixture.shares_of)
        begin, end = first * size, (first + count) * size
        if shard_size == size or size < _MANY_WINDOWS:
            return self._drawn(mixture, shares, seed, begin, end, epoch_start).reshape(count, size)[:, rows]
        firsts = range(begin + rows.start, end, size)
        return np.stack([self._drawn(mixture, shares, seed, at, at + shard_size, epoch_start) for at in firsts])

    def _drawn(
        self, mixture: MixtureSnapshot, shares: Shares | StagedShares, seed: int, begin: int, end: int, epoch_start: int
    ) -> Int64s:
        """Return the first row of each of the windows ``begin .. end - 1``.

        Example: the windows belong to the members 0, 0, 1, 0. The windows of member 0 begin at rows 5, 9, 7 of member
        0, and the window of member 1 begins at row 2 of member 1. Member 1 begins at row 100 of the mixture. The result
        is 5, 9, 102, 7.
        """
        members = shares.members(begin, end)
        before, at_start = shares.counts(begin), shares.counts(epoch_start * self.batch_size)
        ends = np.cumsum(np.bincount(members, minlength=len(before))).tolist()
        places = np.argsort(members, kind="stable")
        starts = np.empty(len(members), np.int64)
        last = 0
        for number, member in enumerate(mixture.members):
            mine, last = places[last : ends[number]], ends[number]
            if len(mine):
                own_seed = int(Key(seed, Purpose.MIXTURES, epoch_start, number).bits(1)[0])
                own = before[number] - at_start[number]
                drawn = self._of_member(member, own_seed, own, own + len(mine))
                starts[mine] = drawn + mixture.first_rows[number]
        return starts

    def _of_member(self, member: Snapshot, seed: int, begin: int, end: int) -> Int64s:
        """Return the first row of each of a member's windows ``begin .. end - 1``, counted from the member's first
        row."""
        if _is_last(self.each):
            return member.sampled_by(_sized(self.each, end - begin)).starts(seed, 0, member, 0)
        own = member.sampled_by(self.each)
        size = own.batch_size
        first, count = begin // size, -(-end // size) - begin // size
        draw = getattr(own, "starts_of_many", None)
        if draw is not None and 2 * (end - begin) < size:  # few windows of one batch, or of two consecutive batches
            bounds = [begin, *([(first + 1) * size] if count == 2 else []), end]
            parts = [
                draw(seed, low // size, 1, member, 0, slice(low % size, low % size + high - low))
                for low, high in pairwise(bounds)
            ]
            if all(part is not None for part in parts):
                joined: Int64s = np.concatenate(parts, axis=1)[0]
                return joined
        drawn = None if draw is None else draw(seed, first, count, member, 0, slice(0, size))
        if drawn is None:
            parts = [own.starts(seed, index, member, 0) for index in range(first, first + count)]
            for part in parts:
                if len(part) != size:
                    raise ConfigError(
                        f"mixture: expected batches of {size} windows from the sampler, found {len(part)} "
                        f"windows from {own!r}"
                    )
            drawn = np.concatenate(parts)
        starts: Int64s = drawn.reshape(-1)[begin - first * size : end - first * size]
        return starts


class PaddedMixedWindows(MixedWindows):
    """Samples windows of a mixture in which steps can be missing; see ``PaddedSampler``."""

    each: PaddedSampler

    @property
    def fill(self) -> float | None:
        """The value of fields in missing steps."""
        return self.each.fill

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """Return the number of present steps of each window; see ``PaddedSampler.lengths``."""
        mixture = _members(snapshot)
        owner = np.searchsorted(mixture.first_rows, starts, side="right") - 1
        lengths = np.empty(len(starts), np.int64)
        for number in np.unique(owner).tolist():
            mine, member = owner == number, mixture.members[number]
            own: Any = member.sampled_by(self.each)
            lengths[mine] = own.lengths(starts[mine] - mixture.first_rows[number], member)
        return lengths


def mixed(sampler: WindowSampler, mix: Mix) -> WindowSampler:
    """Return a sampler of a mixture; from each member it draws in the way in which ``sampler`` draws from a store.

    In a mixture, the sampling "sequential" equals "batch", because no epoch ends with a smaller batch.
    """
    if isinstance(sampler, MixedWindows):
        return sampler
    if isinstance(sampler, SequentialWindows):
        sampler = CyclicWindows(sampler.sequence_length, sampler.batch_size)
    elif isinstance(sampler, EpisodeWindows) and sampler.sampling == "sequential":
        sampler = replace(sampler, sampling="batch")
    return PaddedMixedWindows(sampler, mix) if isinstance(sampler, PaddedSampler) else MixedWindows(sampler, mix)


def _is_last(sampler: Any) -> bool:
    """Return whether every batch consists of the newest windows, to which each member contributes its share."""
    return isinstance(sampler, _OURS) and bool(sampler.name == "last")


def _sized(sampler: Any, batch_size: int) -> WindowSampler:
    """Return the sampler with another batch size, if the sampler supports any batch size."""
    sized: WindowSampler = replace(sampler, batch_size=batch_size) if isinstance(sampler, _OURS) else sampler
    return sized


def _members(snapshot: Snapshot) -> MixtureSnapshot:
    """Return ``snapshot``; raise ConfigError if it is not the snapshot of a mixture."""
    if not isinstance(snapshot, MixtureSnapshot):
        raise ConfigError(f"sampler: expected the snapshot of a mixture, found {snapshot!r}")
    return snapshot


_CODES = ColumnType("scalar", "int64")


class MixtureSnapshot(Snapshot):
    """A snapshot of all members of a mixture; created by ``Mixture.snapshot()``.

    The rows of the members are concatenated in order. No window and no episode spans two members.

    Args:
        mix: The options of the mixture.
        members: The snapshots of the members.
        codes: Arrays that earlier snapshots of the mixture filled with each member's code; they are reused.

    Raises:
        SchemaError: Members are incompatible; the message names the field or the column.
    """

    has_shares = True

    def __init__(self, mix: Mix, members: Sequence[Snapshot], codes: dict[int, npt.NDArray[np.int64]] | None = None):
        self.mix, self.members = mix, tuple(members)
        self._codes = {} if codes is None else codes
        self.num_rows = sum(member.num_rows for member in members)
        self.segments = tuple(segment for member in members for segment in member.segments)
        self.budget = DenseBudget(DENSE_BYTES)
        self.config = _joined(dict(zip(mix.names, members, strict=True)), mix.field)

    @property
    def store_rows(self) -> Any:  # type: ignore[override]
        """The value of ``store_rows`` of each member's snapshot, by the member's name."""
        return {name: member.store_rows for name, member in zip(self.mix.names, self.members, strict=True)}

    @memo
    def first_rows(self) -> npt.NDArray[np.int64]:
        """The first row of each of the M members, and at the end the number of all rows, int64 ``[M + 1]``."""
        return np.array([0, *accumulate(member.num_rows for member in self.members)], np.int64)

    @memo
    def _shares(self) -> dict[int, Shares]:
        return {}

    def shares_of(self, stage: int) -> Shares:
        """Return the members' shares of the windows in a stage; raise ConfigError if no member has a share."""
        if stage not in self._shares:
            self._shares[stage] = self.mix.shares(stage, self.members)
        return self._shares[stage]

    def sampled_by(self, sampler: Any) -> Any:
        """Return a sampler that draws from each member in the way in which ``sampler`` draws from a store; see
        ``Snapshot``.
        """
        return mixed(sampler, self.mix)

    def rows_by_share(self) -> list[tuple[int, int, float]]:
        """Return the range of rows ``begin .. end - 1`` of each member with a share, and the share of the windows that
        belongs to one row in the range.

        Example: two members of 100 and 300 rows have half of the windows each. A row of the first member has a share of
        1/200, and a row of the second member has a share of 1/600.

        Raises:
            ConfigError: The shares change with the index of the batch.
        """
        if len({weights for _, weights in self.mix.stages}) > 1:
            raise ConfigError(
                f"mixture: expected one share for each member, found a Schedule, {self.mix!r}; statistics need fixed "
                f"shares; Normalizer.of(statistics(member), ...) normalises all members by the statistics of one member"
            )
        windows, found = self.shares_of(0).windows, []
        for member, share, first in zip(self.members, windows, self.first_rows.tolist(), strict=False):
            if not share:
                continue
            own = member.rows_by_share() if isinstance(member, MixtureSnapshot) else [(0, member.num_rows, 1.0)]
            total = sum((end - begin) * weight for begin, end, weight in own)
            found += [(first + begin, first + end, share * weight / total) for begin, end, weight in own]
        return found

    def of_rows(self, rows: Any) -> MixtureSnapshot:
        """Return the snapshot of the first rows of each member; ``rows`` has the number of these rows by the member's
        name. See ``Snapshot``.
        """
        check_rows(rows, self.mix.names)
        members = [member.of_rows(rows[name]) for name, member in zip(self.mix.names, self.members, strict=True)]
        return MixtureSnapshot(self.mix, members, self._codes)

    def delivering(self, layout: Layout | None = None, *, transitions: bool = False) -> Snapshot:
        """Return a snapshot of the same rows with the fields of a layout; see ``Snapshot``."""
        members = [one.delivering(layout, transitions=transitions) for one in self.members]
        same = all(one is other for one, other in zip(members, self.members, strict=True))
        return self if same else MixtureSnapshot(self.mix, members, self._codes)

    def with_columns(self, segments: Any, config: Any) -> Snapshot:
        """Raise ConfigError, because derived columns must be added to the members, not to the mixture."""
        raise ConfigError(
            f"mixture: expected a DerivedStore for each of the members {list(self.mix.names)}, found a "
            "DerivedStore for the mixture"
        )

    @memo
    def readers(self) -> dict[str, FieldReader]:
        """The readers of the fields by name: the fields of the members, and the field that contains the code of each
        row's member.
        """
        name, fields = self.mix.field, dict(self.config.fields)
        added = {} if name is None else {name: self._member_reader(fields.pop(name))}
        return {**self._bound(fields), **added}

    def _member_reader(self, field: Field) -> FieldReader:
        """Return the reader of the members' codes; each segment of a member is read from an array that is filled with
        the member's code."""
        parts = []
        for code, member in enumerate(self.members):
            longest = max((int(np.diff(segment.chunk_starts).max(initial=0)) for segment in member.segments), default=0)
            codes = self._codes.get(code)
            if codes is None or len(codes) < longest:
                # Twice the needed length, because members may grow.
                codes = self._codes[code] = np.full(2 * longest, code, np.int64)
            for segment in member.segments:
                part = ColumnPart(partial(_chunks, codes, segment.chunk_starts), segment.chunk_starts, same_chunks=True)
                part.begin[:], part.width[:] = codes.ctypes.data, 1
                parts.append(part)
        column = Column(ReadOptions(field.name, _CODES, ()), parts)
        return FieldReader(field, FieldSpec(field.name, _CODES.dtype, (), ""), column)

    def lacking(self, reader: FieldReader) -> str | None:
        """Return a text that names a member without values for one of the mixture's fields; see ``Snapshot``."""
        for name, member in zip(self.mix.names, self.members, strict=True):
            own = member.readers.get(reader.spec.name) if member.num_rows else reader
            where = "none" if own is None else None if own is reader else member.lacking(own)
            if where is not None:
                return f"{where} in member {name!r}"
        return None

    def grown_from(self, before: Snapshot) -> None:
        """Return None, because new rows of a member lie between earlier rows of the mixture, so only the caches of
        segments can be reused.
        """
        return None

    @memo
    def episode_starts(self) -> npt.NDArray[np.int64]:
        """The first rows of the episodes of all members, int64 ``[n]``, ascending; see ``Snapshot``."""
        return self._of_members(lambda member: member.episode_starts)

    def stretch_starts(self, column: str) -> npt.NDArray[np.int64]:
        """Return the rows at which a column's value changes, within each member; see ``Snapshot``."""
        return self._of_members(lambda member: member.stretch_starts(column))

    def _of_members(self, starts: Callable[[Snapshot], npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Convert indices of rows in each member to indices of rows in the mixture, int64 ``[n]``."""
        there = zip(self.members, self.first_rows.tolist(), strict=False)
        return np.concatenate(
            [np.zeros(0, np.int64), *(starts(member) + first for member, first in there if len(member))]
        )

    @memo
    def fingerprint(self) -> str:
        """A digest of the members' names and fingerprints."""
        parts = [[name, member.fingerprint] for name, member in zip(self.mix.names, self.members, strict=True)]
        return hashlib.sha256(json.dumps(["mixture", parts]).encode()).hexdigest()[:32]

    @memo
    def rows_of_segments(self) -> list[int]:
        """The number of rows of each segment that belong to the snapshot."""
        rows: list[int] = []
        for member in self.members:
            left = member.num_rows
            for some in member.rows_of_segments:
                rows.append(min(some, left))
                left -= rows[-1]
        return rows

    def __reduce__(self) -> tuple[Any, ...]:
        return MixtureSnapshot, (self.mix, self.members)


def check_rows(rows: Any, names: Sequence[str]) -> None:
    """Raise ConfigError unless ``rows`` has the number of rows of each member by name."""
    if not isinstance(rows, Mapping) or list(rows) != list(names):
        raise ConfigError(
            f"mixture: expected a dict with the number of rows of each member {list(names)}, found {rows!r:.200}"
        )


def _chunks(codes: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(codes[:rows]) for rows in np.diff(starts).tolist()], pa.int64())


def _joined(members: Mapping[str, Snapshot], field: str | None) -> SnapshotConfig:
    """Return the common configuration of all members that have rows.

    Raises:
        SchemaError: The members are incompatible.
    """
    for name, member in members.items():
        own = member.mix.field if isinstance(member, MixtureSnapshot) else None
        if own not in (None, field):
            raise SchemaError(
                f"mixture: expected members that are mixtures to have field={field!r} or field=None, found "
                f"field={own!r} in member {name!r}; rows of the other members have no such field"
            )
    there = {name: member for name, member in members.items() if member.num_rows} or dict(members)
    first, alignment = next((name, member.alignment) for name, member in there.items())
    for name, member in there.items():
        if member.alignment != alignment:
            raise SchemaError(
                f"mixture: expected rows of alignment {alignment!r} as in member {first!r}, found "
                f"{member.alignment!r} in member {name!r}"
            )
    types = _types(there)
    dims = {name: _largest([member.config.dims[name] for member in there.values()]) for name in DIMS}
    names = dict.fromkeys(name for member in there.values() for name in member.config.fields)
    fields = {name: _field(name, there) for name in names if name != field}
    if field is not None:
        if any(field in member.readers and not isinstance(member, MixtureSnapshot) for member in there.values()):
            raise SchemaError(
                f"mixture: expected members without a field {field!r}, since batches get a field "
                f"of this name, found this field"
            )
        fields[field] = Field(field, dtype="int64", shape=(), fill=0, labels=tuple(members))
    return SnapshotConfig(fields, types, dims, alignment)


def _types(members: Mapping[str, Snapshot]) -> dict[str, ColumnType]:
    """Return the types of columns. If a member has only nulls in a column, the type of the column comes from the other
    members.
    """
    types: dict[str, ColumnType] = {}
    for name, member in members.items():
        for column, kind in member.config.types.items():
            known = types.setdefault(column, kind)
            if "null" in (known.kind, kind.kind):
                types[column] = kind if known.kind == "null" else known
            elif known != kind:
                raise SchemaError(
                    f"column {column!r}: expected {known} as in earlier members, found {kind} in member {name!r}; "
                    "cast one of the two columns first, e.g. with Dataset.cast_column"
                )
    return types


def _field(name: str, members: Mapping[str, Snapshot]) -> Field:
    """Combine the definitions of a field in all members that have the field. The kind of the field must be equal in
    these members; if rows are padded, the largest width is used.
    """
    known = {
        member: snapshot.config.fields[name] for member, snapshot in members.items() if name in snapshot.config.fields
    }
    (first, field), *others = known.items()
    for member, other in others:
        if _kind(other) != _kind(field):
            raise SchemaError(
                f"field {name!r}: expected {_kind(field)} as in member {first!r}, found {_kind(other)} in {member!r}"
            )
    specs = {member: members[member].readers[name].spec for member in known if name in members[member].readers}
    shapes = {member: spec.image_shape or spec.shape for member, spec in specs.items()}
    field = replace(field, dim=_largest([one.dim for one in known.values()]))
    if not shapes:
        return field
    widest = max(shapes.values())
    for shape in shapes.values():
        if shape != widest and not (field.pad is not None and len(shape) == len(widest) == 1):
            raise SchemaError(f"field {name!r}: expected the same shape of a step in all members, found {shapes}")
    return replace(field, shape=widest)


def _kind(field: Field) -> Field:
    """Return those properties of a field that must be equal in all members."""
    return replace(field, shape=None, dim=None, max_ndim=None)


def _largest(dims: Sequence[Any]) -> Any:
    """Return the largest dimension; None if a dimension is unknown."""
    return None if None in dims else max(dims)


class Mixture(Store):
    """Combines several stores into a single store; each member has a share of the windows. Loaders and sources accept a
    mixture in place of a store.

    No window spans two members. Shares are exact, not only on average: among the first n windows, for any n and in any
    process, the number of a member's windows differs from n times the member's share by at most a few windows.

    A field must be of the same kind in all members. If shorter rows of a field are padded (``action``,
    ``obs_continuous``), the field has the largest of the members' widths. A field that a member lacks must be left out
    with ``fields=``. Members can grow: ``refresh()`` of a loader takes a new snapshot of all members. A member can also
    be a mixture.

    Args:
        stores: The members by name, or a sequence of members, which are named "0", "1" and so on.
        weights: A number of at least 0 for each member, by name or in order; None: 1 for each member. Only the ratio of
            weights matters. A ``mouse_core.sampling.Schedule`` changes the weights with the index of the batch.
        per: The unit of a weight. "member": a member's share is proportional to its weight. "step": the share is
            proportional to the weight times the number of steps, so of two stores with equal weights, the store with
            twice as many steps has twice the share. "trajectory": the share is proportional to the weight times the
            number of episodes.
        temperature: Shares are proportional to ``(weight * size) ** (1 / temperature)``, where the size is 1, or the
            number of steps or episodes of the member. A temperature of 1 leaves the shares unchanged; larger
            temperatures make the shares more equal.
        field: The name of a batch field, int64 ``[B, S]``, that contains the position of each window's member in
            ``names``. None: batches have no such field. If a member is a mixture, its ``field`` must be the same or
            None.

    Attributes:
        members: The members by name.
        names: The members' names, in the order of the codes in batches.

    Raises:
        ConfigError: No member is given, names or weights are invalid, or an option is out of range.
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
            raise ConfigError(f"stores: expected a dict or a list of stores, found {stores!r:.80}")
        if not isinstance(stores, Mapping):
            stores = {str(number): store for number, store in enumerate(listed("stores", stores))}
        if not stores:
            raise ConfigError("mixture: expected at least one store, found none")
        for name, store in stores.items():
            if not isinstance(name, str) or not isinstance(store, Store | Snapshot):
                raise ConfigError(f"mixture: expected stores by name, found {store!r:.80} as {name!r}")
        check_choice("per", per, get_args(Per))
        if not is_number(temperature) or not temperature > 0:
            raise ConfigError(f"temperature: expected a number above 0, found {temperature!r}")
        if field is not None and (not isinstance(field, str) or not field):
            raise ConfigError(f"field: expected a name or None, found {field!r}")
        self.names = names = tuple(stores)
        self.members: Mapping[str, Store | Snapshot] = dict(stores)
        self._mix = Mix(names, checked_stages(weights, names), per, float(temperature), field)
        self._codes: dict[int, npt.NDArray[np.int64]] = {}
        self._kept: MixtureSnapshot | None = None
        self._lock = ProcessLock()

    def __repr__(self) -> str:
        return f"Mixture({self._mix!r}, num_rows={len(self)})"

    def __len__(self) -> int:
        """Return the total number of rows of all members."""
        return sum(len(member) for member in self.members.values())

    def shares_at(self, batch: int = 0) -> dict[str, float]:
        """Return each member's share of the windows of a batch, by name; the sum is 1.

        Raises:
            ConfigError: A member with a weight has no rows.
        """
        first = [first for first, _ in self._mix.stages]
        windows = self.snapshot().shares_of(bisect_right(first, batch) - 1).windows
        return {name: some / sum(windows) for name, some in zip(self.names, windows, strict=True)}

    def snapshot(self, rows: Any = None) -> MixtureSnapshot:
        """Return a snapshot of the current rows of all members, or of the rows of an earlier snapshot, without copying
        steps.

        Args:
            rows: The ``rows`` of each member's ``Store.snapshot``, by name, as saved in a loader's state. None: all
                present rows.

        Raises:
            ConfigError: A member has fewer rows.
            SchemaError: Members are incompatible; the message names the field or the column.
        """
        if rows is not None:
            check_rows(rows, self.names)
        taken = [_taken(member, None if rows is None else rows[name]) for name, member in self.members.items()]
        with self._lock:
            kept = self._kept
            if kept is not None and all(map(lambda one, other: one is other, kept.members, taken)):
                return kept
            made = MixtureSnapshot(self._mix, taken, self._codes)
            if rows is None:
                self._kept = made
            return made

    def to_dataset(self) -> Any:
        """Raise ConfigError, because a dataset would lose the member and the share of each row; convert the members
        instead."""
        raise ConfigError(
            "mixture: expected the rows of a member, as in "
            f"mixture.members[{self.names[0]!r}].to_dataset(), found the rows of the mixture"
        )

    def _look(self, rows: Any = None) -> Any:
        """Raise ConfigError: only the members have episode tables, and each member numbers its own episodes."""
        raise ConfigError(
            f"mixture: expected the episodes of a member, as in mixture.members[{self.names[0]!r}], found the mixture"
        )


def _taken(member: Store | Snapshot, rows: Any) -> Snapshot:
    if isinstance(member, Store):
        return member.snapshot(rows)
    return member if rows is None else member.of_rows(rows)
