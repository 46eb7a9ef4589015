"""Samplers of slices (consecutive rows of one episode). Slices are drawn uniformly, or by the priority of their first
row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import EpisodeIndex, WindowRule, Windows
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.replay.protocols import Draw, FieldKey, Slots, Storage, Write
from mouse_core.replay.samplers.episodes import STATE, StorageEpisodes, recurrence_hint
from mouse_core.replay.samplers.priorities import (
    Beta,
    PrioritizedSampler,
    SumTree,
    beta_at,
    draw_slots,
    importance_weights,
)
from mouse_core.replay.samplers.rows import BaseSampler, Epochs
from mouse_core.sampling.windows import Weighting
from mouse_core.spec import check_choice, check_count

Int64s = npt.NDArray[np.int64]

Span = bool | int | tuple[bool | int, bool | int]


class SliceSampling(BaseSampler):
    """Base class of samplers of slices: the options of slices, the episode index, and the draw of windows.

    Args:
        keys: ``traj_key``, ``end_key`` and ``truncated_key`` of ``SliceSampler``.
        sequence_length, strict_length, pad, span, period, dilation, burn_in: See
            ``SliceSampler``.
        tiled: Whether slices follow one another without overlap.

    Raises:
        ConfigError: See ``SliceSampler``.
    """

    needs_order = True
    _kinds: Mapping[str, type | str] = dict.fromkeys(STATE, "iu")

    def __init__(
        self,
        sequence_length: int,
        keys: tuple[FieldKey | None, FieldKey | None, FieldKey | None],
        *,
        strict_length: bool,
        pad: bool | float,
        span: Span = False,
        tiled: bool = False,
        period: int = 1,
        dilation: int = 1,
        burn_in: int = 0,
    ) -> None:
        self.dilation, self._burn_in = check_count("dilation", dilation), check_count("burn_in", burn_in, 0)
        # Number of rows that a slice spans, without burn-in: 4 steps with a dilation of 2 span 7 rows.
        length = (check_count("sequence_length", sequence_length) - burn_in - 1) * dilation + 1
        if length < 1:
            raise ConfigError(f"burn_in: expected less than the {sequence_length} steps of a slice, found {burn_in}")
        self._strict = check_flag("strict_length", strict_length)
        if not isinstance(pad, bool | int | float | np.number):
            raise ConfigError(f"pad: expected True, False or a number, found {pad!r}")
        self._pad = pad
        self._span = _check_span(span)
        left, right = (length - 1 if side is True else int(side) for side in self._span)
        if max(left, right) >= length:
            raise ConfigError(f"span: expected less than the {length} steps of a slice, found {self._span}")
        if left and (dilation > 1 or burn_in):
            raise ConfigError(
                f"span: with a dilation or burn_in, expected False for the start of an episode, as in (False, "
                f"True), found "
                f"{span!r}"
            )
        strict = self._strict and pad is False
        # Which slices an episode has.
        self._rule = WindowRule(length, left, right, strict, tiled, every=check_count("period", period))
        self.episodes = StorageEpisodes(*keys)

    @property
    def sequence_length(self) -> int:
        """Number of steps in a slice."""
        return self._burn_in + (self._rule.length - 1) // self.dilation + 1

    @property
    def adds(self) -> tuple[str, ...]:
        """The names of the fields that a draw adds, which rows cannot have."""
        if self._pad is not False:
            return ("mask",)
        return () if self._strict and not any(self._span) and not self._burn_in else ("slice_id",)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Add written rows to the episode index, in time proportional to the number of written rows."""
        self.episodes.wrote(storage, write)

    def reset(self, storage: Storage) -> None:
        """Mark the episode index as stale; the next draw rebuilds it."""
        self.episodes.reset(storage)

    def _state(self) -> dict[str, Any]:
        return {**self.episodes.state()}

    def _restore(self, values: Mapping[str, Any]) -> None:
        self.episodes.load(values)

    def _shown(self) -> str:
        """Return the arguments by name, for the ``repr`` and for states."""
        span = "" if self._rule.tiled else f", span={self._span}"
        # Only values that are not the default.
        for name, value, default in (
            ("period", self._rule.every, 1),
            ("dilation", self.dilation, 1),
            ("burn_in", self._burn_in, 0),
        ):
            span += f", {name}={value}" if value != default else ""
        size = f"sequence_length={self.sequence_length}, strict_length={self._strict}, pad={self._pad}{span}"
        return f"{size}, {self.episodes.shown()}"

    def draw_of(self, windows: Windows, episodes: EpisodeIndex, storage: Storage) -> Draw:
        """Return the rows of windows; warn if all windows lack steps because rows of several environments alternate.

        Example: in a ring of 100 time steps, an episode with the steps 295 to 304 lies in the slots 95 to 99 and 0 to
        4. A window of 4 steps that begins at 298 has the steps 298 to 301. Relative to step 200, which lies in slot 0,
        the steps are 98, 99, 100 and 101. From each of these numbers that is at least 100, 100 is subtracted, so the
        slots are 98, 99, 0, 1.
        """
        rule, (env, start, begin, end, traj_id) = self._rule, windows
        before = self._burn_in * self.dilation
        if self._pad is not False and (end - begin < rule.length).all():
            self.episodes.warn_of_alternating_rows(storage)
        origin = begin - begin % episodes.steps
        slots, mask = (start - origin)[:, None] + np.arange(-before, rule.length), None
        if not rule.strict or rule.left or rule.right or before:
            mask = self._keep_within(slots, windows, origin, before)
        if self.dilation > 1:
            slots = slots[:, :: self.dilation].copy()
            mask = None if mask is None else mask[:, :: self.dilation].copy()
        if slots[:, -1].max() >= episodes.steps:
            slots -= episodes.steps * (slots >= episodes.steps)
        if episodes.num_envs > 1:
            slots *= episodes.num_envs
            slots += env[:, None]
        traj_ids = np.repeat(traj_id, slots.shape[1]).reshape(slots.shape)
        if mask is None:
            return Draw(slots, extra={"traj_id": traj_ids})
        if self._pad is not False:
            fill = None if isinstance(self._pad, bool) else self._pad
            return Draw(slots, mask, pad=fill, extra={"traj_id": traj_ids})
        slice_id = np.repeat(np.arange(len(start)), slots.shape[1]).reshape(slots.shape)
        return Draw(slots[mask], extra={"traj_id": traj_ids[mask], "slice_id": slice_id[mask]})

    def _keep_within(
        self, slots: npt.NDArray[np.int64], windows: Windows, origin: npt.NDArray[np.int64], before: int
    ) -> npt.NDArray[np.bool_]:
        """Replace each slot outside the episode by the slot of the episode's first or last row. Return a mask that is
        True for the slots inside the episode.
        """
        length, (_, start, begin, end, _) = self._rule.length, windows
        mask = np.ones(slots.shape, np.bool_)
        (lacking,) = np.nonzero((start - before < begin) | (start + length > end))
        if lacking.size:
            end = np.minimum(end, start + np.minimum(end - begin, length))
            first, behind = ((step - origin)[lacking, None] for step in (begin, end))
            named = slots[lacking]
            slots[lacking] = there = np.minimum(np.maximum(named, first), behind - 1)
            mask[lacking] = there == named
        return mask


def no_window_error(episodes: EpisodeIndex, rule: WindowRule, again: FieldKey | None) -> ConfigError:
    """Return the error for the case that no episode has a window; ``again`` is a field whose trajectory numbers
    recur.
    """
    longest, hint = episodes.longest(), "pad=True accepts shorter episodes" if again is None else recurrence_hint(again)
    if longest >= rule.length or not rule.strict:
        needed, hint = (rule.length, "; pad=True accepts shorter slices") if rule.strict else (1, "")
        return ConfigError(
            f"slices: expected a row at which a slice can begin (period {rule.every}) "
            f"with {needed} steps after it, found "
            f"none, as the longest episode has {longest} steps that are not overwritten{hint}"
        )
    return ConfigError(
        f"slices: expected an episode of at least {rule.length} steps, found episodes of at most {longest} "
        f"steps; {hint}"
    )


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is True or False; else raise ConfigError."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}: expected True or False, found {value!r}")
    return bool(value)


def _check_span(span: Any) -> tuple[bool | int, bool | int]:
    pair = tuple(span) if isinstance(span, tuple | list) else (span, span)
    if len(pair) != 2 or not all(isinstance(side, bool | int | np.integer) and side >= 0 for side in pair):
        raise ConfigError(f"span: expected True, False or an integer of at least 0, or a pair of these, found {span!r}")
    return pair


class SliceSampler(SliceSampling):
    """Draws slices of consecutive rows with replacement. No slice crosses the end of an episode, or the point in a ring
    where the oldest row follows the newest row.

    A batch is ``batch_size`` slices of ``sequence_length`` steps, ``[B, S]``. A batch also has ``traj_id``, the
    trajectory number of each row: the value of ``traj_key``, or without this field an episode number that is unique in
    the buffer. If stored rows have a field ``traj_id``, the batch has the values of this field instead.

    The episode index is updated with each write, so the time to draw a slice does not depend on the size of the buffer.

    Args:
        sequence_length: Number of steps in a slice, S.
        traj_key: The field with the number of each row's trajectory: an episode ends where this number changes.
        end_key: The field that is not 0 in the last row of an episode.
        truncated_key: A second field that is not 0 in the last row of an episode, for truncated episodes. If none of
            the three arguments is given, all known fields of the rows count: ``("next", "done")``, ``("next",
            "terminated")`` and ``("next", "truncated")``, or, if the rows have none of these, ``"done"``,
            ``"terminated"`` and ``"truncated"``; and also the first of ``("collector", "traj_ids")``, ``"episode"``,
            ``"traj_id"``, ``"traj_ids"`` and ``"traj"`` that holds a number or a text for each row. Over a store, an
            episode also begins where an episode of the store begins. One warning is raised if these fields contradict
            each other, or if the named fields do not mark an end that another field marks.
        strict_length: With ``pad=False``: whether episodes shorter than a slice are left out. If False, an episode that
            is shorter than a slice is drawn as a short slice. A batch is then flat, ``[steps]``: the slices are
            concatenated, and the field ``slice_id`` has the index of each row's slice.
        pad: Whether episodes shorter than a slice are padded to ``sequence_length``; ``mask`` then marks the existing
            steps. With True, the nearest existing step is repeated; a number is the value of all fields in padded
            steps. The default is True, so that no episode is left out silently.
        span: The number of steps by which a slice may extend beyond the ends of its episode; missing steps are padded
            as for short episodes. True: at least one step of each slice must exist; an integer: at least
            ``sequence_length - span`` steps must exist; False: all steps must exist. A pair sets the values for the
            start and the end of the episode.
        weighting: "step": all slices have equal probability, so long episodes are drawn more often; "trajectory": all
            episodes with a slice have equal probability.
        period: The number of steps between the first steps of successive slices, counted from the first step of an
            episode. With a period of 3, slices begin at the steps 0, 3, 6, ... With a span, positions are counted from
            the earliest step at which the span allows a slice to begin. After a ring has overwritten the first step of
            an episode, slices keep their positions if that step was indexed before by this sampler, or by another
            sampler of the same rows with the same fields. In a buffer that ``with_parts`` returned, slices also keep
            their positions. When a mapped storage (``MemmapStorage``) is opened again, the first step is found if this
            step is among the latest 1,024 overwritten rows in the files. If the first step of an episode is unknown,
            positions are counted from the oldest existing step. An episode whose first steps were overwritten may have
            no complete slice left. The remaining steps of this episode, from the next position at which a slice can
            begin, are then a short slice, unless short episodes are left out.
        dilation: The distance between consecutive steps of a slice, in rows. With 4 steps and a dilation of 2, a slice
            has the rows 0, 2, 4 and 6, so an episode needs 7 rows for a complete slice. The rows between these steps,
            with their rewards, are left out. Therefore a dilation above 1 in a buffer with ``NextView``, ``NStep``,
            ``HindsightRelabel`` or ``ReturnsToGo`` of slices ``[B, S]`` raises ConfigError.
        burn_in: The number of extra steps before a slice, from which a recurrent network computes its initial state.
            The extra steps are the rows before the row at which the slice begins. ``mask`` is False for extra steps
            before the start of the episode. The positions of slices do not depend on ``burn_in``, so with
            ``span=(False, True)`` a slice begins at every row.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        traj_key: FieldKey | None = None,
        end_key: FieldKey | None = None,
        truncated_key: FieldKey | None = None,
        strict_length: bool = True,
        pad: bool | float = True,
        span: Span = False,
        weighting: Weighting = "step",
        period: int = 1,
        dilation: int = 1,
        burn_in: int = 0,
    ) -> None:
        keys = (traj_key, end_key, truncated_key)
        options: dict[str, Any] = {"strict_length": strict_length, "pad": pad, "span": span}
        super().__init__(sequence_length, keys, **options, period=period, dilation=dilation, burn_in=burn_in)
        check_choice("weighting", weighting, get_args(Weighting))
        self.weighting = weighting

    def __repr__(self) -> str:
        return f"SliceSampler({self._shown()}, weighting={self.weighting!r})"

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw ``batch_size`` slices.

        Raises:
            ConfigError: No episode is long enough.
            MissingFieldError, SchemaError: No field marks where episodes end, or the values of such a field are
                invalid.
        """
        windows = self.windows(storage, batch_size, [key])
        return self.draw_of(windows, self.episodes.settled(storage), storage)

    def windows(self, storage: Storage, batch_size: int, keys: Sequence[Key]) -> Windows:
        """Return the windows of one or several draws, concatenated."""
        rule = self._rule
        episodes = self.episodes.settled(storage)
        view = episodes.view(rule)
        total = view.count if self.weighting == "step" else view.episode_count
        if not total:
            raise no_window_error(episodes, rule, self.episodes.recurring_ids(storage))
        ranks = np.concatenate([key.integers(total, batch_size) for key in keys])
        if self.weighting == "step":
            return view.at(ranks)
        return view.in_episodes(ranks, np.concatenate([key.with_call(1).uniform(batch_size) for key in keys]))

    @property
    def gives_windows(self) -> bool:
        """Whether all slices have equal length and begin inside their episode, so that a window sampler can draw the
        slices.
        """
        rule = self._rule
        moved = self.dilation > 1 or self._burn_in
        return not moved and not (rule.left or rule.right) and (rule.strict or self._pad is not False)

    def is_whole(self, storage: Storage) -> bool:
        """Whether no slice needs padding. If short episodes are padded, the call reads the lengths of all episodes."""
        episodes = self.episodes.settled(storage)
        rule = replace(self._rule, strict=True)
        return self._rule == rule or episodes.view(rule).episode_count == episodes.view(self._rule).episode_count


class SliceSamplerWithoutReplacement(SliceSampling, Epochs):
    """Draws slices without replacement and without overlap: every episode is cut into slices from its first row on.

    Each epoch has every slice once. The next draw after the end of an epoch begins another epoch.

    A write begins a new epoch. A batch may contain several slices of one episode.

    Args:
        sequence_length, traj_key, end_key, truncated_key: See ``SliceSampler``.
        strict_length: With ``pad=False``: whether an incomplete slice at the end of an episode is left out; otherwise
            the incomplete slice becomes a shorter slice, as in ``SliceSampler``.
        pad: See ``SliceSampler``; with padding, an incomplete slice at the end of an episode is also padded.
        drop_last: Whether an incomplete batch at the end of an epoch is left out; otherwise the last batch has fewer
            slices.
        shuffle: Whether each epoch has a new random order; otherwise slices are ordered by environment and then by
            time.

    Raises:
        ConfigError: See ``SliceSampler``.
    """

    _kinds: Mapping[str, type | str] = {**SliceSampling._kinds, **Epochs._kinds}

    def __init__(
        self,
        *,
        sequence_length: int,
        traj_key: FieldKey | None = None,
        end_key: FieldKey | None = None,
        truncated_key: FieldKey | None = None,
        strict_length: bool = True,
        pad: bool | float = True,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        keys = (traj_key, end_key, truncated_key)
        SliceSampling.__init__(self, sequence_length, keys, strict_length=strict_length, pad=pad, tiled=True)
        Epochs.__init__(self, check_flag("drop_last", drop_last), check_flag("shuffle", shuffle))

    def __repr__(self) -> str:
        return f"SliceSamplerWithoutReplacement({self._shown()}, drop_last={self.drop_last}, shuffle={self.shuffle})"

    def wrote(self, storage: Storage, write: Write) -> None:
        """Add written rows to the episode index; the next draw begins an epoch."""
        super().wrote(storage, write)
        self._over = 0

    def reset(self, storage: Storage) -> None:
        """Mark the episode index as stale; the next draw rebuilds the index and begins an epoch."""
        super().reset(storage)
        self._begin_anew()

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Return the next ``batch_size`` slices of the epoch, or all remaining slices if fewer are left.

        Raises:
            ConfigError: The epoch has fewer slices than ``batch_size``.
            MissingFieldError, SchemaError: No field marks where episodes end, or the values of such a field are
                invalid.
        """
        rule = self._rule
        episodes = self.episodes.settled(storage)
        view = episodes.view(rule)
        total = view.count
        if not total:
            raise no_window_error(episodes, rule, self.episodes.recurring_ids(storage))
        if batch_size > total:
            raise ConfigError(
                f"sample: expected a batch without replacement of at most {total} slices, the number of slices of "
                f"{rule.length} steps, found batch_size {batch_size}"
            )
        self._begins(key, rule.length, total, batch_size)
        return self.draw_of(view.at(self._take(key, total, batch_size)), episodes, storage)

    def _state(self) -> dict[str, Any]:
        return {**self.episodes.state(), **Epochs._state(self)}

    def _restore(self, values: Mapping[str, Any]) -> None:
        self.episodes.load(values)
        Epochs._restore(self, values)


# Rows that are read at a time.
_SCANNED = 1 << 18


class PrioritizedSliceSampler(SliceSampling, PrioritizedSampler):
    """Draws slices in proportion to the priorities of their first rows; see ``PrioritizedSampler``.

    A slice is drawn only at a row at which a complete slice can begin, as in ``SliceSampler``. With
    ``strict_length=False`` or ``pad``, a slice can also begin at the first row of an episode that is shorter than a
    slice. With a span, a slice can also begin at later rows of an episode. All rows have priorities, so the priority of
    a row applies as soon as a slice begins at the row. ``priority_weight`` is equal for all steps of a slice, and is
    relative to the smallest weight of all rows at which slices begin.

    Args:
        alpha, beta, eps, max_priority_within_buffer: See ``PrioritizedSampler``.
        sequence_length, traj_key, end_key, truncated_key, strict_length, pad: See ``SliceSampler``.
        span: See ``SliceSampler``. A slice may extend only beyond the end of an episode, ``(False, ...)``, because no
            row with a priority exists before the start of the episode.
        period, dilation, burn_in: See ``SliceSampler``. With ``burn_in``, a slice is drawn by the priority of its first
            row after the burn-in steps.

    Raises:
        ConfigError: See ``PrioritizedSampler`` and ``SliceSampler``. Also raised if ``span`` allows steps before the
            start of an episode.
    """

    _kinds: Mapping[str, type | str] = {**SliceSampling._kinds, **PrioritizedSampler._kinds}

    def __init__(
        self,
        alpha: float = 0.6,
        beta: Beta = 0.4,
        eps: float = 1e-8,
        *,
        sequence_length: int,
        traj_key: FieldKey | None = None,
        end_key: FieldKey | None = None,
        truncated_key: FieldKey | None = None,
        strict_length: bool = True,
        pad: bool | float = True,
        span: Span = False,
        period: int = 1,
        dilation: int = 1,
        burn_in: int = 0,
        max_priority_within_buffer: bool = False,
    ) -> None:
        PrioritizedSampler.__init__(self, alpha, beta, eps, max_priority_within_buffer=max_priority_within_buffer)
        keys = (traj_key, end_key, truncated_key)
        options: dict[str, Any] = {"strict_length": strict_length, "pad": pad, "span": span, "period": period}
        SliceSampling.__init__(self, sequence_length, keys, **options, dilation=dilation, burn_in=burn_in)
        if self._span[0]:
            raise ConfigError(f"span: expected False for the start of an episode, as in (False, True), found {span!r}")
        self._forget()

    def _forget(self) -> None:
        """Discard the marks of rows at which slices begin; the next draw reads all rows."""
        self._starting: SumTree | None = None
        self._begins = np.zeros(0, np.bool_)  # whether a slice begins in a slot
        self._seen = 0  # the first time step not looked at
        self._looked_at: EpisodeIndex | None = None  # the index that the marks come from

    def __repr__(self) -> str:
        numbers = f"alpha={self.alpha}, beta={self.beta!r}, eps={self.eps}{self._shown_within()}"
        return f"PrioritizedSliceSampler({numbers}, {self._shown()})"

    @property
    def adds(self) -> tuple[str, ...]:
        """The names of the fields that a draw adds, which rows cannot have."""
        return ("priority_weight", *super().adds)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Give the written rows the largest priority, and add the rows to the episode index."""
        PrioritizedSampler.wrote(self, storage, write)
        SliceSampling.wrote(self, storage, write)
        if (
            self._starting is not None and self._starting.size < storage.capacity
        ):  # the store of the storage has new rows
            self._starting = self._starting.grown(storage.capacity, self._most(storage.capacity))
            self._begins = np.append(self._begins, np.zeros(storage.capacity - len(self._begins), np.bool_))
        if write.first is None:
            self._weigh(storage, write.slots)

    def reset(self, storage: Storage) -> None:
        """Discard all priorities; all rows then count as new rows."""
        PrioritizedSampler.reset(self, storage)
        SliceSampling.reset(self, storage)
        self._forget()

    def dropped(self, storage: Storage, rows: int) -> None:
        """Remove the oldest rows; see ``Sampler``. The episode index is rebuilt."""
        PrioritizedSampler.dropped(self, storage, rows)
        SliceSampling.reset(self, storage)
        self._forget()

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw ``batch_size`` slices; the result contains importance weights, float32 in the shape of ``index``.

        Raises:
            ConfigError: See ``SliceSampler`` and ``PrioritizedSampler``.
            MissingFieldError, SchemaError: No field marks where episodes end, or the values of such a field are
                invalid.
        """
        rule = self._rule
        beta = beta_at(self.beta, key.index)
        episodes = self.episodes.settled(storage)
        tree = self._settle_starting(storage, episodes)
        if not tree.total and not episodes.view(rule).count:
            raise no_window_error(episodes, rule, self.episodes.recurring_ids(storage))
        slots = draw_slots(tree, batch_size, key)
        step, env = episodes.steps_of(slots)
        begin, end, traj_id = episodes.episode_of(step, env)
        windows = Windows(env, step, np.maximum(begin, episodes.begin), end, traj_id)
        draw = self.draw_of(windows, episodes, storage)
        weights = importance_weights(tree, slots, beta)
        if draw.index.ndim == 2:
            draw.priority_weight = np.repeat(weights, draw.index.shape[1]).reshape(draw.index.shape)
        else:
            draw.priority_weight = weights[draw.extra["slice_id"]]
        return draw

    def update_priority(self, storage: Storage, index: Slots, priority: npt.NDArray[Any]) -> None:
        """Set the priorities of rows; see ``PrioritizedSampler.update_priority``.

        Priorities ``[B, S]`` set each row's priority; with priorities ``[B]``, all rows of a slice get the same
        priority.
        """
        super().update_priority(storage, index, priority)
        self._weigh(storage, np.asarray(index).reshape(-1))

    def _weigh(self, storage: Storage, slots: Slots) -> None:
        """Copy the weights of the rows at which slices begin to the tree of slices."""
        if self._starting is not None:
            slots = slots[self._begins[slots]]
            self._starting.set(slots, self._settle(storage).weights[slots])

    # ------------------------------------------------------------------ where slices begin

    def _settle_starting(self, storage: Storage, episodes: EpisodeIndex) -> SumTree:
        """Update and return the tree with the weights of all rows at which slices begin."""
        num_envs, rule = episodes.num_envs, self._rule
        first = self._seen
        if self._looked_at is not episodes or not episodes.begin <= first <= episodes.end:
            self._starting = None
        if self._starting is None:
            self._starting, self._looked_at = SumTree(storage.capacity), episodes
            self._begins = np.zeros(storage.capacity, np.bool_)
            first = episodes.begin
        if first == episodes.end:
            return self._starting
        begins, weights = self._begins, self._settle(storage).weights
        # Earlier steps are marked again, because new steps can complete a slice that begins there. Example: slices have
        # 3 steps, and steps 0 to 9 were marked. As soon as step 10 exists, a slice can begin at step 8.
        step = max(first - rule.length + 1, episodes.begin)
        while step < episodes.end:
            self._mark_begins(episodes, step, min(step + max(1, _SCANNED // num_envs), episodes.end))
            step += max(1, _SCANNED // num_envs)
        # In an episode that lost its first rows, a slice may now begin at one of the oldest rows. With a span, slices
        # no longer begin at other rows.
        oldest = max(rule.length - 1 if rule.right else 0, 0 if rule.strict else rule.every)
        changed = np.arange(max(first - rule.length + 1, episodes.begin), episodes.end)
        if oldest:
            behind = min(episodes.begin + oldest, episodes.end)
            self._mark_begins(episodes, episodes.begin, behind)
            changed = np.append(changed, np.arange(episodes.begin, behind))
        slots = ((changed % episodes.steps)[:, None] * num_envs + np.arange(num_envs)).reshape(-1)
        self._starting.set(slots, np.where(begins[slots], weights[slots], 0))
        self._seen = episodes.end
        return self._starting

    def _mark_begins(self, episodes: EpisodeIndex, begin: int, end: int) -> None:
        """Mark those of the time steps ``begin .. end - 1`` at which slices begin."""
        num_envs = episodes.num_envs
        steps = np.repeat(np.arange(begin, end), num_envs)
        envs = np.tile(np.arange(num_envs), end - begin)
        first, behind, _ = episodes.episode_of(steps, envs)
        there = np.maximum(first, episodes.begin)
        found = self._rule.begins(steps - there, behind - there, there - first)
        self._begins[episodes.slots_of(steps, envs)] = found

    # ------------------------------------------------------------------ state

    def _config(self) -> dict[str, str]:
        return {"config": f"{PrioritizedSampler._config(self)['config']}, {self._shown()}"}

    def _state(self) -> dict[str, Any]:
        return {**SliceSampling._state(self), **PrioritizedSampler._state(self)}

    def _restore(self, values: Mapping[str, Any]) -> None:
        index = StorageEpisodes(*self.episodes.keys)
        index.load(values)
        PrioritizedSampler._restore(self, values)
        self.episodes = index
        self._forget()
