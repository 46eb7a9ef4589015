"""Samplers of slices: consecutive rows of one episode, drawn uniformly or by the priority of their first row."""

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
from mouse_core.replay.samplers.episodes import STATE, StorageEpisodes, of_turns
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
    """Base class of samplers of slices: the rule of a slice, the episodes, and the draw of windows.

    Args:
        keys: ``traj_key``, ``end_key`` and ``truncated_key`` of ``SliceSampler``.
        sequence_length, strict_length, pad, span, period, dilation, burn_in: See
            ``SliceSampler``.
        tiled: Whether slices lie side by side.

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
        self._dilation, self._burn_in = check_count("dilation", dilation), check_count("burn_in", burn_in, 0)
        # Rows of an episode that a slice spans, without the steps to burn in: 4 steps with a dilation of 2 span 7 rows.
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
                f"span: expected False over the begin with a dilation or steps to burn in, as in (False, True), found "
                f"{span!r}"
            )
        strict = self._strict and pad is False
        # Which slices an episode has.
        self._rule = WindowRule(length, left, right, strict, tiled, every=check_count("period", period))
        self.episodes = StorageEpisodes(*keys)

    @property
    def sequence_length(self) -> int:
        """Steps in a slice."""
        return self._burn_in + (self._rule.length - 1) // self._dilation + 1

    @property
    def dilation(self) -> int:
        """The distance of a step from the next one, in rows."""
        return self._dilation

    @property
    def adds(self) -> tuple[str, ...]:
        """The fields of a draw that rows cannot have."""
        if self._pad is not False:
            return ("mask",)
        return () if self._strict and not any(self._span) and not self._burn_in else ("slice_id",)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Take note of the ends of episodes among the rows, in time proportional to their number."""
        self.episodes.wrote(storage, write)

    def reset(self, storage: Storage) -> None:
        """The rows may all be others: the next draw looks at them once."""
        self.episodes.reset(storage)

    def grew(self, storage: Storage) -> None:
        """Extend the state to a larger capacity; see ``Sampler``."""
        self.episodes.grew(storage)

    def _state(self) -> dict[str, Any]:
        return {**self.episodes.state()}

    def _restore(self, values: Mapping[str, Any]) -> None:
        self.episodes.load(values)

    def _shown(self) -> str:
        """Return the arguments, for the ``repr`` and for states."""
        span = "" if self._rule.tiled else f", span={self._span}"
        # Only values that are not the default.
        for name, value, default in (
            ("period", self._rule.every, 1),
            ("dilation", self._dilation, 1),
            ("burn_in", self._burn_in, 0),
        ):
            span += f", {name}={value}" if value != default else ""
        size = f"sequence_length={self.sequence_length}, strict_length={self._strict}, pad={self._pad}{span}"
        return f"{size}, {self.episodes.shown()}"

    def draw_of(self, windows: Windows, episodes: EpisodeIndex, storage: Storage) -> Draw:
        """Return the rows of some windows; warn if all windows lack steps because environments take turns.

        In a ring of 100 time steps an episode of the steps 295 to 304 lies in the slots 95 to 99 and 0 to 4. A window
        of 4 that begins at 298 has the steps 298 to 301. The round of the ring in which its episode begins began with
        step 200, so these are 98, 99, 100 and 101 in it; the last two are 100 too many: the slots 98, 99, 0, 1.
        """
        rule, (env, start, begin, end, traj_id) = self._rule, windows
        before = self._burn_in * self._dilation
        if self._pad is not False and (end - begin < rule.length).all():
            self.episodes.warn_of_turns(storage)
        origin = begin - begin % episodes.steps
        slots, mask = (start - origin)[:, None] + np.arange(-before, rule.length), None
        if not rule.strict or rule.left or rule.right or before:
            mask = self._keep_within(slots, windows, origin, before)
        if self._dilation > 1:
            slots = slots[:, :: self._dilation].copy()
            mask = None if mask is None else mask[:, :: self._dilation].copy()
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
        """Have slots beyond an end of their episode be those of its first or last row; which are no others."""
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


def no_window(episodes: EpisodeIndex, rule: WindowRule, again: FieldKey | None) -> ConfigError:
    """Return the error where no episode has a window; ``again`` is a field whose trajectories come back."""
    longest, hint = episodes.longest(), "pad=True takes shorter ones" if again is None else of_turns(again)
    if longest >= rule.length or not rule.strict:
        needed, hint = (rule.length, "; pad=True takes what is left of it") if rule.strict else (1, "")
        return ConfigError(
            f"slices: expected {needed} steps behind a place that the period of {rule.every} counts, found none, as "
            f"the longest episode has {longest} behind those that are overwritten{hint}"
        )
    return ConfigError(
        f"slices: expected an episode of at least {rule.length} steps, found the longest to have {longest}; {hint}"
    )


def check_flag(name: str, value: Any) -> bool:
    """``value`` if it is True or False, else ConfigError."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}: expected True or False, found {value!r}")
    return bool(value)


def _check_span(span: Any) -> tuple[bool | int, bool | int]:
    pair = tuple(span) if isinstance(span, tuple | list) else (span, span)
    if len(pair) != 2 or not all(isinstance(side, bool | int | np.integer) and side >= 0 for side in pair):
        raise ConfigError(f"span: expected True, False or an integer from 0, or two of them, found {span!r}")
    return pair


class SliceSampler(SliceSampling):
    """Slices of consecutive rows, drawn with replacement; none crosses the end of an episode, or the place in a ring
    where the newest row meets the oldest.

    A batch is ``batch_size`` slices of ``sequence_length`` steps, ``[B, S]``. Beside the rows it has ``traj_id``, the
    number of each row's trajectory: that of ``traj_key``, or a running number of the episode that no other one in the
    buffer has. Rows that have a field ``traj_id`` themselves keep its values.

    The episodes are known as rows come in, so a slice costs the same in small and large buffers.

    Args:
        sequence_length: Steps in a slice, S.
        traj_key: The field with the number of each row's trajectory: an episode ends where it changes.
        end_key: The field that is not 0 in the last row of an episode.
        truncated_key: A second one, for episodes that are cut off rather than over. By default, without any of the
            three, all that the rows have count: ``("next", "done")``, ``("next", "terminated")`` and ``("next",
            "truncated")``, or else ``"done"``, ``"terminated"`` and ``"truncated"``; and the first of ``("collector",
            "traj_ids")``, ``"episode"``, ``"traj_id"``, ``"traj_ids"`` and ``"traj"`` that holds a number or a text for
            each row. Over a store, an episode also begins where its times do. A warning says, once, where these fields
            contradict each other, or where those that were named miss an end.
        strict_length: With ``pad=False``: whether shorter episodes are left out. If not, an episode that is too short
            comes whole, and a batch is flat, ``[steps]``: slice after slice, each row with ``slice_id``, the number of
            its slice.
        pad: Whether episodes that are shorter than a slice come, filled up to ``sequence_length``: then ``mask`` says
            which steps are there. True repeats the nearest step that is; a number is what all fields become in the
            others. It is the default of windows within episodes everywhere: nothing is left out in silence.
        span: How far slices may reach over the ends of their episodes, of which only what exists comes, as for short
            episodes. True: at least one step is there; an integer: at least ``sequence_length - span`` are; False: all.
            A pair says it for the begin and the end.
        weighting: "step": every slice that there is comes equally often, so long episodes come more often;
            "trajectory": every episode that has a slice comes equally often.
        period: Only slices that begin at an episode's first step, or so many steps behind another: of slices of 4 steps
            with a period of 3 those that begin at its steps 0, 3, 6, ... With a span they are counted from the first
            that it allows. A step counts as an episode's first also when a ring has written over it, so that slices
            keep their places, also in a mapped storage that is opened again and in ``with_parts``. Only where nothing
            knows that step, as where a ring in memory had no sampler of slices and this one names its fields, the first
            one there is counts. Of an episode that has lost its first steps, and has no whole slice any more, comes
            what is left behind the next such step, unless shorter episodes are left out.
        dilation: A slice is every so-many-th row. Of 4 steps with a dilation of 2 it is the rows 0, 2, 4 and 6 of an
            episode, which must have 7 for all of them to be there. What lies between is left out, rewards included. So
            a buffer refuses ``NextView``, ``NStep``, ``HindsightRelabel`` and ``ReturnsToGo`` of slices ``[B, S]``.
        burn_in: How many of the first steps of a slice lie before the row that it begins with: those that bring the
            state of a recurrent network about. Where the episode has no steps there, ``mask`` is False; slices begin as
            if these steps were none of theirs. So with ``span=(False, True)`` every row has a slice of its own.

    Raises:
        ConfigError: An argument out of range.
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
        """``batch_size`` slices.

        Raises:
            ConfigError: No episode is long enough.
            MissingFieldError, SchemaError: No field says where episodes end, or it has no usable values.
        """
        windows = self.windows(storage, batch_size, [key])
        return self.draw_of(windows, self.episodes.settled(storage), storage)

    def windows(self, storage: Storage, batch_size: int, keys: Sequence[Key]) -> Windows:
        """The slices of one draw or several, one behind the other."""
        rule = self._rule
        episodes = self.episodes.settled(storage)
        view = episodes.view(rule)
        total = view.count if self.weighting == "step" else view.episode_count
        if not total:
            raise no_window(episodes, rule, self.episodes.coming_back(storage))
        ranks = np.concatenate([key.integers(total, batch_size) for key in keys])
        if self.weighting == "step":
            return view.at(ranks)
        return view.in_episodes(ranks, np.concatenate([key.with_call(1).uniform(batch_size) for key in keys]))

    @property
    def gives_windows(self) -> bool:
        """Whether slices are windows of one length that begin in their episode, and may end behind it."""
        rule = self._rule
        moved = self._dilation > 1 or self._burn_in
        return not moved and not (rule.left or rule.right) and (rule.strict or self._pad is not False)

    def is_whole(self, storage: Storage) -> bool:
        """Whether every slice has all its steps; where short ones are padded, looks at all episodes."""
        episodes = self.episodes.settled(storage)
        rule = replace(self._rule, strict=True)
        return self._rule == rule or episodes.view(rule).episode_count == episodes.view(self._rule).episode_count


class SliceSamplerWithoutReplacement(SliceSampling, Epochs):
    """Epochs over slices that lie side by side: every episode is cut into slices from its first row on, and each comes
    once, so no row comes twice in an epoch. The next draw after an epoch begins another.

    A write begins a new epoch. Slices of one episode may come in one batch.

    Args:
        sequence_length, traj_key, end_key, truncated_key: See ``SliceSampler``.
        strict_length: With ``pad=False``: whether what is left at the end of an episode and does not fill a slice is
            left out; otherwise it comes as a shorter slice, as ``SliceSampler`` says.
        pad: See ``SliceSampler``; what is left at the end of an episode is filled up, too.
        drop_last: Whether slices that do not fill a batch at the end of an epoch are left out; otherwise they come as a
            batch of fewer slices.
        shuffle: Whether an epoch has an order of its own, a new one each time; otherwise slices come in the order of
            their environments and then of time.

    Raises:
        ConfigError: As ``SliceSampler``.
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
        """Take note of the ends of episodes among the rows; the next draw begins an epoch."""
        super().wrote(storage, write)
        self._over = 0

    def reset(self, storage: Storage) -> None:
        """Take note that all rows may be others: the next draw looks at them once and begins an epoch."""
        super().reset(storage)
        self._begin_anew()

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """The epoch's next ``batch_size`` slices, or those left of it.

        Raises:
            ConfigError: There are fewer slices than ``batch_size``.
            MissingFieldError, SchemaError: No field says where episodes end, or it has no usable values.
        """
        rule = self._rule
        episodes = self.episodes.settled(storage)
        view = episodes.view(rule)
        total = view.count
        if not total:
            raise no_window(episodes, rule, self.episodes.coming_back(storage))
        if batch_size > total:
            raise ConfigError(
                f"sample: expected at most {total} slices of {rule.length} steps in a batch without replacement, as "
                f"many as there are, found batch_size {batch_size}"
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
    """Slices whose first rows are drawn in proportion to their priorities, as ``PrioritizedSampler`` draws rows.

    Only rows at which a whole slice begins are drawn, as ``SliceSampler`` says; with ``strict_length=False`` or ``pad``
    also the first row of an episode that is shorter, and with a span those after it. All rows have priorities, so every
    one counts as soon as a slice begins there. ``priority_weight`` is the same for all steps of a slice, and compares
    with the smallest weight of all rows at which slices begin.

    Args:
        alpha, beta, eps, max_priority_within_buffer: See ``PrioritizedSampler``.
        sequence_length, traj_key, end_key, truncated_key, strict_length, pad: See ``SliceSampler``.
        span: See ``SliceSampler``; only over the end of an episode, ``(False, ...)``, as before its begin there is no
            row with a priority.
        period, dilation, burn_in: See ``SliceSampler``; a slice is drawn by the priority of its row number ``burn_in``.

    Raises:
        ConfigError: As ``PrioritizedSampler`` and ``SliceSampler``, and a span over the begin.
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
            raise ConfigError(f"span: expected False over the begin of an episode, as in (False, True), found {span!r}")
        self._forget()

    def _forget(self) -> None:
        """Forget where slices begin; the next draw looks at all rows."""
        self._starting: SumTree | None = None
        self._begins = np.zeros(0, np.bool_)  # whether a slice begins in a slot
        self._seen = 0  # the first time step not looked at
        self._changes = 0  # of the episodes, when they were looked at

    def __repr__(self) -> str:
        numbers = f"alpha={self.alpha}, beta={self.beta!r}, eps={self.eps}{self._shown_within()}"
        return f"PrioritizedSliceSampler({numbers}, {self._shown()})"

    @property
    def adds(self) -> tuple[str, ...]:
        """The fields of a draw that rows cannot have."""
        return ("priority_weight", *super().adds)

    def wrote(self, storage: Storage, write: Write) -> None:
        """The rows have the largest priority from now on; take note of the ends of episodes among them."""
        PrioritizedSampler.wrote(self, storage, write)
        SliceSampling.wrote(self, storage, write)
        if write.first is None:
            self._weigh(storage, write.slots)

    def reset(self, storage: Storage) -> None:
        """All rows are new, and no priority was ever set."""
        PrioritizedSampler.reset(self, storage)
        SliceSampling.reset(self, storage)
        self._forget()

    def grew(self, storage: Storage) -> None:
        """Extend the state to a larger capacity; see ``Sampler``."""
        PrioritizedSampler.grew(self, storage)
        SliceSampling.grew(self, storage)
        if self._starting is not None:
            self._starting = self._starting.grown(storage.capacity, self._most(storage.capacity))
            self._begins = np.append(self._begins, np.zeros(storage.capacity - len(self._begins), np.bool_))

    def dropped(self, storage: Storage, rows: int) -> None:
        """The first rows are gone; see ``Sampler``. Episodes are looked at anew."""
        PrioritizedSampler.dropped(self, storage, rows)
        SliceSampling.reset(self, storage)
        self._forget()

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """``batch_size`` slices, and importance weights, float32 of the shape of ``index``.

        Raises:
            ConfigError: As ``SliceSampler`` and ``PrioritizedSampler``.
            MissingFieldError, SchemaError: No field says where episodes end, or it has no usable values.
        """
        rule = self._rule
        beta = beta_at(self.beta, key.index)
        episodes = self.episodes.settled(storage)
        tree = self._settle_starting(storage, episodes)
        if not tree.total and not episodes.view(rule).count:
            raise no_window(episodes, rule, self.episodes.coming_back(storage))
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

        Of slices ``[B, S]`` each row gets its own, or with priorities ``[B]`` all rows of a slice get one.
        """
        super().update_priority(storage, index, priority)
        self._weigh(storage, np.asarray(index).reshape(-1))

    def set_weights(self, storage: Storage, slots: Slots, weights: npt.NDArray[np.float64]) -> None:
        """Set the weights of rows; see ``PrioritizedSampler.set_weights``."""
        super().set_weights(storage, slots, weights)
        self._weigh(storage, slots)

    def _weigh(self, storage: Storage, slots: Slots) -> None:
        """Put the weights of these rows into the tree, where slices begin at them."""
        if self._starting is not None:
            slots = slots[self._begins[slots]]
            self._starting.set(slots, self._settle(storage).weights[slots])

    # ------------------------------------------------------------------ where slices begin

    def _settle_starting(self, storage: Storage, episodes: EpisodeIndex) -> SumTree:
        """The tree of the weights of all rows at which slices begin."""
        num_envs, rule = episodes.num_envs, self._rule
        first = self._seen
        if self._changes != episodes.changes or not episodes.begin <= first <= episodes.end:
            self._starting = None
        if self._starting is None:
            self._starting, self._changes = SumTree(storage.capacity), episodes.changes
            self._begins = np.zeros(storage.capacity, np.bool_)
            first = episodes.begin
        if first == episodes.end:
            return self._starting
        begins, weights = self._begins, self._settle(storage).weights
        # With so many rows behind them the ones before may be begins now; and so may the oldest one, if it is cut off.
        # Of slices of 3, where steps 0 to 9 were looked at, step 8 may begin one as soon as step 10 is there.
        step = max(first - rule.length + 1, episodes.begin)
        while step < episodes.end:
            self._mark_begins(episodes, step, min(step + max(1, _SCANNED // num_envs), episodes.end))
            step += max(1, _SCANNED // num_envs)
        # Where an episode is cut off, one of the oldest rows begins a slice now; with a span, others do no longer.
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
        """Mark which of the time steps ``begin .. end - 1`` slices begin at."""
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
