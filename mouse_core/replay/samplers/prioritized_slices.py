"""Slices that begin at rows drawn by their priorities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import EpisodeIndex, Windows
from mouse_core.errors import ConfigError, StateError
from mouse_core.randomness import Key
from mouse_core.replay.protocols import Draw, FieldKey, Slots, Storage, Write
from mouse_core.replay.samplers._common import check_state
from mouse_core.replay.samplers.episodes import STATE, StorageEpisodes
from mouse_core.replay.samplers.priorities import (
    Beta,
    PrioritizedSampler,
    SumTree,
    beta_at,
    draw_slots,
    importance_weights,
)
from mouse_core.replay.samplers.slices import SliceSampling, Span, no_window

Int64s = npt.NDArray[np.int64]

# A look at all rows takes so many at a time.
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
        """Where slices begin is to be found anew, with a look at all rows."""
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
        """There is room for more rows; see ``Sampler``."""
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
        """Give rows weights that ``weights_at`` said; see ``PrioritizedSampler.set_weights``."""
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

    def state_dict(self) -> dict[str, Any]:
        """Priorities and episodes: plain values and arrays."""
        rows = {f"rows.{name}": value for name, value in PrioritizedSampler.state_dict(self).items()}
        return {"config": self._shown(), **rows, **self.episodes.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the priorities, episodes and beta that ``state`` was taken with.

        Raises:
            StateError: The state is of another sampler or configuration, or damaged; nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"sampler: expected a dict, found {state!r:.80}")
        own = {name: value for name, value in state.items() if not str(name).startswith("rows.")}
        values = check_state(own, {"config": self._shown()}, dict.fromkeys(STATE, "iu"), self)
        index = StorageEpisodes(*self.episodes.keys)
        index.load(values)
        PrioritizedSampler.load_state_dict(self, {name[5:]: value for name, value in state.items() if name not in own})
        self.episodes = index
        self._forget()
