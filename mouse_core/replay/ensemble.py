"""ReplayBufferEnsemble: one batch from several buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_numbers, part_of
from mouse_core._base.tracing import refuse_traced
from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, SchemaError, StateError
from mouse_core.nested import find, flatten, structure_of, unflatten
from mouse_core.randomness import Key, Purpose
from mouse_core.replay._assembly import Collate, reduce_priorities, reserved_error
from mouse_core.replay.buffer import BaseBuffer, Drawn, ReplayBuffer, check_slices
from mouse_core.replay.protocols import Draw, FieldKey, Slots, Transform
from mouse_core.replay.samplers.rows import unmasked
from mouse_core.replay.samplers.weighing import priorities_like
from mouse_core.replay.storages._dataset import no_store_error
from mouse_core.replay.writers import take
from mouse_core.sampling.shares import Schedule
from mouse_core.spec import check_count

Floats = npt.NDArray[np.float64]

_WITHOUT: Mapping[FieldKey, Any] = {"priority_weight": np.float32(1), "mask": np.True_, "generation": np.int64(0)}
"""A dict from field to value: the fields that only some members' batches can have, and the values for the other
members.
"""

# ``call`` of the keys from which the members' seeds are drawn.
_MEMBERS = 1 << 63
_BITS = 53  # of a uniform number


class ReplayBufferEnsemble(BaseBuffer):
    """Draws each batch from several buffers (the members), such as recorded and fresh data; each member provides a
    share of the batch.

    A batch has exactly ``batch_size`` windows. A member's share is its weight times this size, after the weights are
    scaled to a sum of 1. A fractional share is rounded up or down at random, so that the share is exact on average
    (systematic sampling). Each member draws with its own sampler, and with a seed derived from the ensemble's seed. The
    transforms of the members are applied before the transform of the ensemble.

    Args:
        *buffers: Replay buffers, ensembles, or data that a buffer accepts as its storage (a ``DatasetStore``, a
            dataset).
        p: A weight of at least 0 for each member; by default all weights are equal. With a ``Schedule`` the weights
            change with the index of the sample, for example from mostly recorded to mostly fresh data.
        transform: The transforms that change the joined batch of all members; see ``ReplayBuffer``.
        batch_size: The number of windows (single rows, or slices) in a batch, B, if ``sample`` is called without
            ``batch_size``.
        seed: An integer in ``[0, 2**64)``.
        num_buffer_sampled: The number of draws for each batch. Each draw chooses a member with a probability in
            proportion to the member's weight, and adds an equal number of windows. None: each member provides its share
            of every batch.
        collate_fn: A function that converts the list of the members' batches to a batch; None: each field is
            concatenated.
        device: "cpu" or None; adapters support more devices.

    Raises:
        ConfigError: No member is given, weights are invalid, or members differ in alignment.
    """

    def __init__(
        self,
        *buffers: Any,
        p: Sequence[float] | npt.NDArray[Any] | Schedule | None = None,
        transform: Transform | Sequence[Transform] | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        num_buffer_sampled: int | None = None,
        collate_fn: Collate | None = None,
        device: Any = None,
    ) -> None:
        self._place(device)
        if not buffers:
            raise ConfigError("buffers: expected at least one, found none")
        members = [buffer if isinstance(buffer, BaseBuffer) else ReplayBuffer(buffer, seed=seed) for buffer in buffers]
        if len({id(member) for member in members}) < len(members):
            raise ConfigError("buffers: expected each buffer once, found a buffer twice")
        self.buffers: tuple[BaseBuffer, ...] = tuple(members)
        alignments = [member.alignment for member in members]
        if len(set(alignments)) > 1:
            raise ConfigError(
                f"buffers: expected the same alignment in all buffers, found {alignments}; convert some buffers "
                f"first, for example by "
                "transform=NextView() on the buffer of arrived rows"
            )
        super().__init__(transform, batch_size, seed, collate_fn, alignments[0])
        if self._transform is not None and self._transform.watchers:
            found = [*self._transform.watchers.values()]
            raise ConfigError(
                f"transform: expected no transform with statistics of all rows, because an ensemble stores no rows, "
                f"found {found}; pass one such transform to each buffer, or normalise with known statistics"
            )
        self._check_slices(() if self._transform is None else self._transform.transforms)
        stages = p.weights if isinstance(p, Schedule) else {0: p}
        checked = {first: check_weights(weights, len(members)) for first, weights in stages.items()}
        self._schedule = Schedule(checked)
        check_count("num_buffer_sampled", 1 if num_buffer_sampled is None else num_buffer_sampled)
        self._num_buffer_sampled = num_buffer_sampled

    def _check_slices(self, behind: Sequence[Any]) -> None:
        """Raise ConfigError if the members' slices are not valid inputs of the members' transforms or of the transforms
        in ``behind``.
        """
        for member in self.buffers:
            own = getattr(member.transform, "transforms", ())
            if isinstance(member, ReplayBufferEnsemble):
                member._check_slices([*own, *behind])
            elif isinstance(member, ReplayBuffer):
                check_slices(member.sampler, [*own, *behind])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.buffers)} buffers, p={list(self.p)}, seed={self.seed})"

    def __len__(self) -> int:
        """Return the number of rows of all members."""
        return sum(len(member) for member in self.buffers)

    @property
    def p(self) -> tuple[float, ...]:
        """The members' shares in the next sample, which add up to 1."""
        return tuple(self._p.tolist())

    @property
    def _p(self) -> npt.NDArray[np.float64]:
        weights: npt.NDArray[np.float64] = self._schedule.at(self._samples)
        return weights

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last batch of any member's epoch."""
        return any(member.ran_out for member in self.buffers)

    def stats(self) -> dict[str, Any]:
        """Return a dict with ``size``, the number of rows; ``samples``, the number of batches ever drawn; and
        ``buffers``, a list of the members' ``stats``.
        """
        return {
            "size": len(self),
            "samples": self._samples,
            "buffers": [member.stats() for member in self.buffers],
        }

    # ------------------------------------------------------------------ batches

    def draw(self, batch_size: int | None = None, *, seed: int | None = None) -> Drawn:
        """Draw each member's share of the next batch: the first half of ``sample``.

        Args:
            batch_size: See ``sample``.
            seed: Overrides the ensemble's seed if the ensemble is a member of another ensemble.

        Raises:
            ConfigError: See ``sample``.
        """
        refuse_traced("sample")
        size = self._size(batch_size)
        with self._lock:
            key = self._next_key(seed)
            if self._num_buffer_sampled is None:
                shares = shares_of_all(self._p, size, key.uniform(1)[0])
            else:
                shares = shares_of_some(self._p, size, key, self._num_buffer_sampled)
            for number, (member, share) in enumerate(zip(self.buffers, shares, strict=True)):
                if share and not len(member):
                    raise ConfigError(
                        f"sample: expected rows in every buffer whose share is above 0, found buffer {number} "
                        f"without rows"
                    )
            before = [member._mark() for member in self.buffers]
            parts = []
            try:
                for number, (member, share) in enumerate(zip(self.buffers, shares, strict=True)):
                    if share:
                        parts.append((number, member.draw(share, seed=member_seed(key.seed, number))))
            except BaseException:
                for member, mark in zip(self.buffers, before, strict=True):
                    member._rewind(mark)
                raise
            self._samples += 1
            return Drawn(parts, Draw(np.array(shares, np.int64)), key)

    @property
    def _grows(self) -> bool:
        return any(member._grows for member in self.buffers)

    def _refresh(self) -> None:
        if not self._grows:
            raise no_store_error("members without a store")
        for member in self.buffers:
            if member._grows:
                member._refresh()

    def _mark(self) -> Any:
        return self._samples, [member._mark() for member in self.buffers]

    def _rewind(self, mark: Any) -> None:
        self._samples, members = mark
        for member, kept in zip(self.buffers, members, strict=True):
            member._rewind(kept)

    def batch_of(self, drawn: Drawn) -> Any:
        """Return the transformed batch of a draw, not yet converted to arrays of a framework."""
        batches = [self.buffers[number].batch_of(part) for number, part in drawn.rows]
        numbers = [number for number, _ in drawn.rows]
        for number, found in zip(numbers, batches, strict=True):
            # The ``buffer_ids`` of a member that is an ensemble are replaced by the ``buffer_ids`` of this ensemble.
            own = isinstance(self.buffers[number], ReplayBufferEnsemble)
            if isinstance(found, Mapping) and "buffer_ids" in found and not own:
                raise reserved_error(f"buffer {number}", ["buffer_ids"])
        if self._collate is not None:
            batch = self._collate(batches)
        else:
            parts = [{name: value for name, value in batch.items() if name != "buffer_ids"} for batch in batches]
            batch = join_batches(parts, numbers, lambda key, shape: np.full(shape, _WITHOUT[key]), self._join)
        if isinstance(batch, Mapping):
            ids = [np.full(np.shape(found["index"]), number) for number, found in zip(numbers, batches, strict=True)]
            batch = {**batch, "buffer_ids": np.concatenate(ids)}
        return self._transformed(batch, drawn)

    def _join(self, key: FieldKey, parts: list[Any], numbers: list[int]) -> Any:
        """Join one field of the members' batches."""
        if all(isinstance(part, list) for part in parts):
            return [item for part in parts for item in part]
        arrays = [np.asarray(part) for part in parts]
        check_alike(key, arrays, numbers)
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def extend(self, rows: Any, buffer_ids: Any) -> Slots:
        """Write rows to the members.

        Args:
            rows: See ``extend`` of a buffer with ``ndim=1``.
            buffer_ids: The index of the member of each row, integers ``[n]``; or the name of the field with these
                indices.

        Returns:
            The index of each row within its member, int64 ``[n]``.

        Raises:
            ConfigError: An index in ``buffer_ids`` is out of range, or names a member that is an ensemble or has
                ``ndim=2``.
            SchemaError, DataError: See ``ReplayBuffer.extend``.

        After an error no member has changed, because all rows are checked before any row is written (a ``ListStorage``
        accepts all rows).
        """
        refuse_traced("extend")
        rows = self._accept(rows)
        count, routes = routes_of(rows, buffer_ids)
        parts: list[tuple[Any, Any, Slots]] = []
        for number, places in routes:
            member = self.buffers[number] if 0 <= number < len(self.buffers) else None
            if not isinstance(member, ReplayBuffer) or member.storage.ndim != 1:
                last = len(self.buffers) - 1
                raise ConfigError(f"extend: expected an index in 0..{last}, of a buffer with ndim=1, found {number}")
            parts.append((member, take(rows, places), places))
        index = np.full(count, -1, np.int64)
        with self._shared():
            for member, part, _ in parts:
                member.check_extend(part)
            for member, part, places in parts:
                index[places] = member.extend(part)
        return index

    def update_priority(self, index: Any, priority: Any = None, buffer_ids: Any = None, generation: Any = None) -> None:
        """Set the priorities of rows.

        Args:
            index: The ``index`` of a batch; or the batch. Each member's priorities are then read from the batch's field
                named by the member's ``priority_key``, and rows that the batch's ``mask`` excludes keep their
                priorities.
            priority: A number of at least 0 for every index.
            buffer_ids: The member of each element of ``index``, as in the batch's field ``buffer_ids``. Members whose
                samplers have no priorities are skipped.
            generation: The ``generation`` of the batch, for members that count generations. If ``index`` is a batch,
                the batch's field is used.

        Raises:
            ConfigError: ``buffer_ids`` is missing or names no member.
            DataError, IndexError: See ``ReplayBuffer.update_priority``.

        After an error no member has changed.
        """
        refuse_traced("update_priority")
        batch = self._accept(index) if priority is None else {"index": index}
        if priority is None:
            buffer_ids = find(batch, "buffer_ids", where="update_priority")
            generation = batch.get("generation") if generation is None else generation
        if buffer_ids is None:
            raise ConfigError(
                "update_priority: expected the buffer_ids of the batch in addition to its index, found none"
            )
        ids, slots = to_numpy(buffer_ids), to_numpy(find(batch, "index", where="update_priority"))
        if ids.shape != slots.shape or (ids.size and not (ids.min() >= 0 and ids.max() < len(self.buffers))):
            last = len(self.buffers) - 1
            raise ConfigError(
                f"update_priority: expected one of the buffer_ids 0..{last} for every index, found other values"
            )
        updates: list[tuple[Any, ...]] = []
        for number in np.unique(ids).tolist():
            member: Any = self.buffers[number]
            if getattr(member, "prioritized", False):
                mine = unmasked(ids == number, batch, member._masks)
                given = find(batch, member.priority_key, where="update_priority") if priority is None else priority
                given = priorities_like(slots, reduce_priorities(given, slots.ndim, member.priority_reduction))
                known = np.asarray(generation)[mine] if generation is not None and member.generations else None
                updates.append((member, slots[mine], given[mine], *([] if known is None else [known])))
        with self._shared():
            for member, *update in updates:  # all updates are checked before the first update
                member.check_update(*update)
            for member, *update in updates:
                member.update_priority(*update)

    # ------------------------------------------------------------------ state

    def _state(self) -> dict[str, Any]:
        members = {str(number): member._state() for number, member in enumerate(self.buffers)}
        numbers = {"seed": self.seed, "samples": self._samples}
        return {"kind": "ensemble", **numbers, **self._shares(), "buffers": members}

    def _shares(self) -> dict[str, Any]:
        """The members' weights for each stage of the schedule, in the form in which a state saves them. A stage is
        identified by the index of its first sample.
        """
        shares = {str(first): tuple(weights.tolist()) for first, weights in self._schedule.weights.items()}
        return {"p": shares, "num_buffer_sampled": self._num_buffer_sampled or 0}

    def _shared(self) -> Any:
        """Return a context that holds the locks of all members."""
        held = ExitStack()
        for member in self.buffers:
            held.enter_context(member._lock)
            held.enter_context(member._shared())
        return held

    def _load(self, state: Mapping[str, Any]) -> None:
        numbers = check_numbers(state, {"kind": "ensemble"}, ("seed", "samples"))
        members = part_of(state, "buffers", {})
        own, stages = self._shares(), part_of(state, "p", {})
        # Tuples of a state may have become lists.
        found = {
            "p": {first: tuple(weights) for first, weights in stages.items()},
            "num_buffer_sampled": state.get("num_buffer_sampled"),
        }
        if len(members) != len(self.buffers) or found != own:
            raise StateError(
                f"state: expected {len(self.buffers)} buffers with the shares {own}, found {len(members)} buffers with "
                f"the shares {found}"
            )
        before: list[tuple[BaseBuffer, dict[str, Any]]] = []
        try:
            for number, member in enumerate(self.buffers):
                kept = member.state_dict()
                member._load(part_of(members, str(number), {}))
                before.append((member, kept))
        except BaseException:
            for member, kept in before:
                member._load(kept)
            raise
        self.seed, self._samples = numbers["seed"], numbers["samples"]


def join_batches(
    batches: Sequence[Any],
    numbers: list[int],
    fill: Callable[[Any, tuple[int, ...]], Any],
    join: Callable[[FieldKey, list[Any], list[int]], Any],
) -> dict[Any, Any]:
    """Join the batches of members field by field. The result is nested like the batch with the most fields.

    Args:
        batches: The batches, trees with the field ``index``.
        numbers: The index of the member of each batch.
        fill: A function for batches that lack a field in ``_WITHOUT``: it takes the name of the field and the shape of
            the batch's index, and returns the values of the field.
        join: A function that joins the values of one field from all batches.

    Raises:
        SchemaError: A batch lacks a field that is not in ``_WITHOUT``.
    """
    leaves = [flatten(batch) for batch in batches]
    fields: dict[FieldKey, Any] = {}
    for key in dict.fromkeys(key for found in leaves for key in found):
        parts = []
        for number, found in zip(numbers, leaves, strict=True):
            if key not in found and key not in _WITHOUT:
                raise SchemaError(
                    f"buffer {number}: expected the field {key!r} of the other buffers, found {list(found)}"
                )
            parts.append(found[key] if key in found else fill(key, tuple(found["index"].shape)))
        fields[key] = join(key, parts, numbers)
    sizes = [len(batch) for batch in batches]
    structure = structure_of(batches[sizes.index(max(sizes))])
    extra = {key: values for key, values in fields.items() if key in _WITHOUT and key not in structure}
    return {**unflatten(structure, fields), **extra}


def check_alike(key: FieldKey, parts: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raise SchemaError if the values of a field differ in shape or dtype between members."""
    for number, array in zip(numbers, parts, strict=True):
        if array.shape[1:] != parts[0].shape[1:] or array.dtype != parts[0].dtype:
            raise SchemaError(
                f"buffer {number}: field {key!r}: expected {parts[0].dtype} {list(parts[0].shape[1:])} as in "
                f"buffer {numbers[0]}, found {array.dtype} {list(array.shape[1:])}"
            )


def check_weights(p: Any, n: int) -> Floats:
    """Check the weights of ``n`` members, and scale the weights to a sum of 1."""
    if p is None:
        return np.full(n, 1 / n)
    try:
        weights = np.array(p, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"p: expected {n} weights, found {p!r:.80}") from error
    if weights.shape != (n,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum():
        raise ConfigError(f"p: expected {n} weights of 0 or more, not all 0, found {p!r:.80}")
    normalised: Floats = weights / weights.sum()
    return normalised


def shares_of_all(p: Floats, size: int, offset: float) -> list[int]:
    """Return the number of windows of each member in a batch of ``size``, by systematic sampling."""
    # The ends are rounded, so that a whole share does not become smaller by a rounding error.
    ends = np.round(np.cumsum(p) * size, 9)
    ends[-1] = size
    shares: list[int] = (np.diff(np.floor(ends + offset), prepend=0.0).astype(np.int64)).tolist()
    return shares


def shares_of_some(p: Floats, size: int, key: Key, drawn: int) -> list[int]:
    """Return the number of windows from each member if members are drawn ``drawn`` times in proportion to their
    weights.

    With 10 windows and 3 draws, the first drawn member gets 4 windows.
    """
    ends = np.cumsum(p)
    ends[int(np.flatnonzero(p)[-1]) :] = 1.0  # rounding must not select a member after the last member with a weight
    members = ends.searchsorted(key.uniform(drawn), side="right")
    parts = np.diff(np.arange(drawn + 1) * size // drawn)[::-1]
    shares: list[int] = np.bincount(members, weights=parts, minlength=len(p)).astype(np.int64).tolist()
    return shares


def routes_of(rows: Any, buffer_ids: Any) -> tuple[int, list[tuple[int, Slots]]]:
    """Return the number of rows, and the positions of each member's rows.

    Args:
        rows: A tree of arrays ``[n, ...]``, or a list of rows.
        buffer_ids: The index of the member of each row, or the name of the field with these indices.

    Raises:
        ConfigError: ``buffer_ids`` does not have one integer for each row.
        MissingFieldError: The rows lack the field ``buffer_ids``.
    """
    if isinstance(buffer_ids, str | tuple):
        parts = rows if isinstance(rows, list) else [rows]
        found = [find(part, buffer_ids, where="extend") for part in parts]
        buffer_ids = found if isinstance(rows, list) else found[0]
    ids = np.asarray(buffer_ids)
    count = len(rows) if isinstance(rows, list) else next((len(leaf) for leaf in flatten(rows).values()), 0)
    if ids.size != count or (count and ids.dtype.kind not in "iu"):
        raise ConfigError(f"extend: expected {count} buffer_ids, integers, found {ids.dtype} {list(ids.shape)}")
    ids = ids.reshape(count)
    return count, [(number, np.flatnonzero(ids == number)) for number in np.unique(ids).tolist()]


def member_seed(seed: int, number: int) -> int:
    """Return the seed of a member, derived from the ensemble's seed, so that members draw independently."""
    return int(Key(seed, Purpose.REPLAY, number, _MEMBERS).bits(1)[0])


class Shares(NamedTuple):
    """The cumulative shares (ends) of the members in a batch. A member's rows end at the row ``floor(end + u)``, where
    ``u`` is a random number in [0, 1).

    Attributes:
        first: The first sample of each stage, int64 ``[stages]``.
        whole: Each end, rounded down, int64 ``[stages, 1 + M]``; the first element is 0.
        from_bits: The smallest random integer of 53 bits for which the rounded end is larger by 1 than ``whole``, int64
            ``[stages, M]``.
        offsets: The position of each member's first row in a concatenation of ``most`` rows of each member, int64
            ``[M]``.
        given: The members whose share is above 0 in at least one stage.
        most: The largest number of rows of each member in a batch.
    """

    first: npt.NDArray[np.int64]
    whole: npt.NDArray[np.int64]
    from_bits: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    given: tuple[bool, ...]
    most: tuple[int, ...]


def shares_of(p: Any, members: int, size: int) -> Shares:
    """Return the cumulative shares of members in batches of ``size`` rows.

    Args:
        p: A weight of at least 0 for each member, or a ``Schedule`` of weights; None: equal weights.
        members: The number of members.
        size: The number of rows in a batch.

    Raises:
        ConfigError: Weights are invalid.
    """
    stages = p.weights if isinstance(p, Schedule) else {0: p}
    weights = np.stack([check_weights(given, members) for given in stages.values()])
    ends = np.round(np.cumsum(weights, 1) * size, 9)
    ends[:, -1] = size
    whole = np.floor(ends).astype(np.int64)
    from_bits = np.array([[_least(end) for end in row] for row in ends.tolist()], np.int64)
    from_bits[:, -1] = 1 << _BITS
    whole = np.concatenate([np.zeros((len(ends), 1), np.int64), whole], 1)
    most = np.minimum((whole[:, 1:] + 1 - np.minimum(whole[:, :-1], size)).max(0), size)
    given: npt.NDArray[np.bool_] = np.any(weights > 0, 0)
    counts = np.where(given, most, 0)
    stage = np.array([*stages], np.int64)
    return Shares(stage, whole, from_bits, counts.cumsum() - counts, tuple(given.tolist()), tuple(most.tolist()))


def _least(end: float) -> int:
    """Return the smallest integer m in ``[0, 2**53)`` for which ``end + m * 2**-53``, computed in float64, has a larger
    integer part than ``end``; ``2**53`` if there is no such integer.
    """
    low, high = 0, 1 << _BITS
    while low < high:
        middle = (low + high) // 2
        if np.floor(end + middle * 2.0**-_BITS) > np.floor(end):
            high = middle
        else:
            low = middle + 1
    return low
