"""What all samplers of slices have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.replay._episodes.index import EpisodeIndex, of_turns
from mouse_core.replay.ground.protocols import Draw, FieldKey, Storage, Write
from mouse_core.sampling.episode_table import EpisodeTable, Windows
from mouse_core.sampling.plan import WindowRule
from mouse_core.spec import check_count

Span = bool | int | tuple[bool | int, bool | int]


class SliceSampling:
    """What samplers of slices have in common: what a slice is, the episodes, and making a draw of windows.

    Args:
        keys: ``traj_key``, ``end_key`` and ``truncated_key`` of ``SliceSampler``.
        sequence_length, strict_length, pad, span, period, dilation, burn_in: See
            ``SliceSampler``.
        tiled: Whether slices lie side by side.

    Raises:
        ConfigError: See ``SliceSampler``.
    """

    needs_order = True

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
        # What an episode must have for a slice, beside those to burn in: of every other step 4, that is 7 of them.
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
        self.episodes = EpisodeIndex(*keys)

    @property
    def sequence_length(self) -> int:
        """Steps in a slice."""
        return self._burn_in + (self._rule.length - 1) // self._dilation + 1

    @property
    def dilation(self) -> int:
        """How many rows lie between a step and the next one, itself included."""
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
        """There is room for more rows; see ``Sampler``."""
        self.episodes.grew(storage)

    def _shown(self) -> str:
        """What it is made as, in the ``repr`` and in states."""
        span = "" if self._rule.tiled else f", span={self._span}"
        # Only what is asked for, so that states from before there were these are known again.
        for name, value, default in (
            ("period", self._rule.every, 1),
            ("dilation", self._dilation, 1),
            ("burn_in", self._burn_in, 0),
        ):
            span += f", {name}={value}" if value != default else ""
        size = f"sequence_length={self.sequence_length}, strict_length={self._strict}, pad={self._pad}{span}"
        return f"{size}, {self.episodes.shown()}"

    def draw_of(self, windows: Windows, episodes: EpisodeTable, storage: Storage) -> Draw:
        """The rows of some windows, with a warning where there is none that has all its steps for a bad reason.

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


def no_window(episodes: EpisodeTable, rule: WindowRule, again: FieldKey | None) -> ConfigError:
    """What to raise where no episode has a window; ``again`` is the field whose numbers of trajectories come back."""
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
