"""What all samplers of slices have in common: their arguments, and making a draw of windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from mouse_core.errors import ConfigError
from mouse_core.replay._episodes.index import EpisodeIndex, of_turns
from mouse_core.replay.protocols import Draw, FieldKey, Storage, Write
from mouse_core.sampling.episode_table import EpisodeTable, WindowRule, Windows
from mouse_core.spec import check_count

Span = bool | int | tuple[bool | int, bool | int]


class SliceConfig:
    """The arguments of ``SliceSampler`` that say what a slice is, checked.

    Args:
        sequence_length, strict_length, pad, span: See ``SliceSampler``.
        tiled: Whether slices lie side by side.

    Attributes:
        rule: Which slices an episode has.

    Raises:
        ConfigError: See ``SliceSampler``.
    """

    def __init__(
        self,
        sequence_length: int,
        *,
        strict_length: bool,
        pad: bool | float,
        span: Span,
        tiled: bool = False,
    ) -> None:
        self.sequence_length = length = check_count("sequence_length", sequence_length)
        self.strict_length = check_flag("strict_length", strict_length)
        if not isinstance(pad, bool | int | float | np.number):
            raise ConfigError(f"pad: expected True, False or a number, found {pad!r}")
        self.pads = pad is not False
        self.fill = None if isinstance(pad, bool) else pad
        self.span = _check_span(span)
        self._pad = pad
        left, right = (length - 1 if side is True else int(side) for side in self.span)
        if max(left, right) >= length:
            raise ConfigError(f"span: expected less than the {length} steps of a slice, found {self.span}")
        self.rule = WindowRule(length, left, right, strict=self.strict_length and not self.pads, tiled=tiled)

    @property
    def adds(self) -> tuple[str, ...]:
        """The fields of a draw that rows cannot have."""
        if self.pads:
            return ("mask",)
        return () if self.strict_length and not any(self.span) else ("slice_id",)

    def shown(self) -> str:
        """As it stands in the ``repr`` of a sampler."""
        span = "" if self.rule.tiled else f", span={self.span}"
        return f"sequence_length={self.sequence_length}, strict_length={self.strict_length}, pad={self._pad}{span}"


class SliceSampling:
    """What samplers of slices have in common: they know what a slice is, and the episodes.

    Args:
        config: What a slice is.
        traj_key, end_key, truncated_key: See ``SliceSampler``.
    """

    needs_order = True

    def __init__(
        self,
        config: SliceConfig,
        traj_key: FieldKey | None,
        end_key: FieldKey | None,
        truncated_key: FieldKey | None,
    ) -> None:
        self._config = config
        self.episodes = EpisodeIndex(traj_key, end_key, truncated_key)

    @property
    def adds(self) -> tuple[str, ...]:
        """The fields of a draw that rows cannot have."""
        return self._config.adds

    @property
    def sequence_length(self) -> int:
        """Steps in a slice."""
        return self._config.sequence_length

    def wrote(self, storage: Storage, write: Write) -> None:
        """Take note of the ends of episodes among the rows, in time proportional to their number."""
        self.episodes.wrote(storage, write)

    def reset(self, storage: Storage) -> None:
        """The rows may all be others: the next draw looks at them once."""
        self.episodes.reset(storage)

    def _draw_of(self, windows: Windows, episodes: EpisodeTable, storage: Storage) -> Draw:
        """The rows of some windows, with a warning where there is none that has all its steps for a bad reason."""
        if self._config.pads and (windows.end - windows.begin < self._config.rule.length).all():
            self.episodes.warn_of_turns(storage)
        return draw_of(windows, self._config, episodes)

    def _shown(self) -> str:
        """What it is made as, in the ``repr`` and in states."""
        return f"{self._config.shown()}, {self.episodes.shown()}"


def draw_of(windows: Windows, config: SliceConfig, episodes: EpisodeTable) -> Draw:
    """The rows of some windows, as ``SliceSampler`` says."""
    rule = config.rule
    n, length = len(windows.start), rule.length
    begin, end = windows.begin, windows.end
    step = windows.start[:, None] + np.arange(length)
    mask = None
    may_lack_steps = not rule.strict or rule.left or rule.right
    if may_lack_steps and ((windows.start < begin) | (windows.start + length > end)).any():
        end = np.minimum(end, windows.start + np.minimum(end - begin, length))
        mask = (step >= begin[:, None]) & (step < end[:, None])
        step = np.clip(step, begin[:, None], end[:, None] - 1)
    elif may_lack_steps:
        mask = np.ones(step.shape, np.bool_)  # and nothing to clip: these slices have all their steps
    # A division for each window, and none for each step.
    origin = begin - begin % episodes.steps
    place = step - origin[:, None]
    if (end - origin).max() > episodes.steps:
        place -= episodes.steps * (place >= episodes.steps)
    if episodes.num_envs > 1:
        place *= episodes.num_envs
        place += windows.env[:, None]
    traj_id = np.repeat(windows.traj_id, length).reshape(n, length)
    if mask is None:
        return Draw(place, extra={"traj_id": traj_id})
    if config.pads:
        return Draw(place, mask, pad=config.fill, extra={"traj_id": traj_id})
    slice_id = np.repeat(np.arange(n), length).reshape(n, length)
    return Draw(place[mask], extra={"traj_id": traj_id[mask], "slice_id": slice_id[mask]})


def no_window(episodes: EpisodeTable, rule: WindowRule, again: FieldKey | None) -> ConfigError:
    """What to raise where no episode has a window; ``again`` is the field whose numbers of trajectories come back."""
    hint = "pad=True takes shorter ones" if again is None else of_turns(again)
    return ConfigError(
        f"slices: expected an episode of at least {rule.length} steps, found the longest to have {episodes.longest()}; "
        f"{hint}"
    )


def check_flag(name: str, value: Any) -> bool:
    """``value`` if it is True or False, else ConfigError."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}: expected True or False, found {value!r}")
    return bool(value)


def _check_span(span: Any) -> tuple[bool | int, bool | int]:
    pair = tuple(span) if isinstance(span, tuple | list) else (span, span)
    for side in pair:
        if not isinstance(side, bool | int | np.integer) or side < 0:
            raise ConfigError(f"span: expected True, False or an integer from 0, or two of them, found {span!r}")
    if len(pair) != 2:
        raise ConfigError(f"span: expected True, False or an integer from 0, or two of them, found {span!r}")
    return pair
