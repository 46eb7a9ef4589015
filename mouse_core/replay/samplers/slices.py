"""Samplers of slices: stretches of consecutive rows that lie in one episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.replay._episodes.index import STATE
from mouse_core.replay.ground.protocols import Draw, FieldKey, Storage, Write
from mouse_core.replay.samplers._common import Epochs, check_state
from mouse_core.replay.samplers._slicing import SliceSampling, Span, check_flag, no_window
from mouse_core.sampling.episode_table import Windows
from mouse_core.sampling.episodes import Weighting

Int64s = npt.NDArray[np.int64]


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
            knows that step, as in a ring in memory that had no sampler of slices, the first one there is counts. Of an
            episode that has lost its first steps, and has no whole slice any more, comes what is left behind the next
            such step, unless shorter episodes are left out.
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
        if weighting not in get_args(Weighting):
            raise ConfigError(f"weighting: expected one of {list(get_args(Weighting))}, found {weighting!r}")
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
        ranks = _joined([key.integers(total, batch_size) for key in keys])
        if self.weighting == "step":
            return view.at(ranks)
        return view.in_episodes(ranks, _joined([key.with_call(1).uniform(batch_size) for key in keys]))

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

    def state_dict(self) -> dict[str, Any]:
        """The episodes there are: a string and arrays as long as their number."""
        return {"config": repr(self), **self.episodes.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the episodes that ``state`` was taken with.

        Raises:
            StateError: The state is of another sampler or configuration, or damaged; nothing has changed then.
        """
        self.episodes.load(check_state(state, {"config": repr(self)}, dict.fromkeys(STATE, "iu"), self))


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
        """The rows may all be others: the next draw looks at them once and begins an epoch."""
        super().reset(storage)
        self._forget()

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

    def state_dict(self) -> dict[str, Any]:
        """The episodes there are, and where in which epoch the sampler is: plain values and arrays."""
        return {"config": repr(self), **self.episodes.state(), **self._epoch("length")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the epoch in which ``state`` was taken.

        Raises:
            StateError: The state is of another sampler or configuration, or damaged; nothing has changed then.
        """
        epoch = dict.fromkeys(("began", "length", "position", "ran_out"), int)
        values = check_state(state, {"config": repr(self)}, {**dict.fromkeys(STATE, "iu"), **epoch}, self)
        self.episodes.load(values)
        self._go_on(values, "length")
