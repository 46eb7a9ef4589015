"""HindsightRelabel: learn from a failure as if what came of it had been the goal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import namespace
from mouse_core.episodes import EpisodeIndex
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import find, key_of, path_of
from mouse_core.randomness import Key
from mouse_core.replay.protocols import FieldKey, Slots, Storage
from mouse_core.replay.transforms._fields import (
    ALIVE,
    GATHERED,
    NEXT,
    TERMINAL,
    Path,
    beside,
    check_keys,
    device_of,
    end_codes,
    find_any,
    on_host,
    place_of,
    removed,
    replaced,
    valid_steps,
)
from mouse_core.replay.transforms.transitions import NextView
from mouse_core.spec import Alignment, check_alignment, check_choice, check_count, check_unit

Array = Any
Strategy = Literal["future", "final", "episode", "random"]


@dataclass(frozen=True, kw_only=True)
class HindsightRelabel:
    """Replaces goals by what was achieved later, and computes the rewards anew (hindsight experience replay).

    Andrychowicz et al., "Hindsight experience replay" (NeurIPS 2017). Of the transitions of a batch a share ``ratio``,
    drawn one by one, gets as its goal what some transition achieved:

    - "future": one of its episode from itself on, uniformly,
    - "final": the last of its episode,
    - "episode": any of its episode, uniformly,
    - "random": any of the batch, uniformly.

    A buffer draws goals from whole episodes, as far as their rows are in it, for single transitions and slices alike,
    and reads the goal alone: an episode may be as long as you like. Where episodes end is known as ``SliceSampler``
    knows it, from done, terminated and truncated and from the numbers of trajectories. So the transform stands before
    others that change goals; only ``NextView`` may come first. The steps that are read behind a single transition get
    its goal, so that an ``NStep`` behind it sums the rewards of one goal. In slices each step has a goal of its own, so
    a buffer refuses slices with ``NStep`` or ``ReturnsToGo`` beside this transform.

    Called by itself, on slices ``[N, T]``, it knows an episode as far as the slice reaches.

    The goal is set at the root and under ``next``. The reward is ``compute_reward(achieved, goal, batch)``, with what
    the transition achieved (under ``next``). A field ``relabelled``, bool, says which transitions have a new goal.

    What the last transition of an episode achieved is not stored in "outgoing" rows without ``next``: it keeps its goal
    and is none, and the sum of an ``NStep`` for a new goal ends before it. Store ``next``, or "arrived" rows, to use it
    as well.

    Args:
        compute_reward: Called as ``compute_reward(achieved_goal, desired_goal, batch)`` with arrays ``[N, T, ...]``;
            gives rewards ``[N, T]``. gymnasium's ``GoalEnv.compute_reward`` fits.
        compute_done: Called likewise; says which relabelled transitions are terminal. None: ``done`` stays.
        strategy: "future", "final", "episode" or "random".
        ratio: How many transitions get a new goal, in ``[0, 1]``: 0.8 are four new goals for each old one.
        takes: The alignment of the rows. "arrived" rows, and "outgoing" ones without ``next``, pass through
            ``NextView`` first.
        horizon: How many steps away a goal may be, in a buffer; None: as far as the episode reaches.
        goal, achieved, reward, done, mask: The names of these fields; goals may be nested, as in ``("observation",
            "desired_goal")``.

    Raises:
        ConfigError: An argument out of range, or a function that does not take the three arguments.
        MissingFieldError: Called with a batch that lacks one of the fields.
        SchemaError: Called with a batch that is no slices; rewards of another shape.
    """

    compute_reward: Callable[[Array, Array, Any], Array]
    compute_done: Callable[[Array, Array, Any], Array] | None = None
    strategy: Strategy = "future"
    ratio: float = 0.8
    takes: Alignment = "outgoing"
    horizon: int | None = None
    goal: FieldKey = "desired_goal"
    achieved: FieldKey = "achieved_goal"
    reward: FieldKey = "reward"
    done: FieldKey = "done"
    mask: FieldKey = "mask"

    random: ClassVar[bool] = True
    alignment: ClassVar[Alignment] = "outgoing"
    reach: ClassVar[int] = 1  # the next observation, and an axis of time

    def __post_init__(self) -> None:
        _check_call("compute_reward", self.compute_reward)
        if self.compute_done is not None:
            _check_call("compute_done", self.compute_done)
        check_choice("HindsightRelabel: strategy", self.strategy, get_args(Strategy))
        check_unit("HindsightRelabel: ratio", self.ratio)
        if self.horizon is not None:
            check_count("HindsightRelabel: horizon", self.horizon, lowest=0)
        check_alignment(self.takes)
        check_keys((self.goal, self.achieved, self.reward, self.done, self.mask), where="HindsightRelabel")

    def gather(self, storage: Storage, index: Slots, episodes: EpisodeIndex, key: Key) -> dict[str, Any]:
        """Goals for drawn rows, and which rows are to get theirs; see ``Transform``.

        Returns:
            ``hindsight_goal`` ``[N, T, ...]``, ``hindsight_drawn`` bool ``[N, T]`` and ``hindsight_left`` int64
            ``[N, T]``, of how many steps from this one on it is stored what they achieved; ``[batch, 1, ...]`` for
            single rows. With the strategy "random" only the last.
        """
        source = (NEXT, *path_of(self.achieved))
        behind = 0
        if storage.alignment == "arrived" or not _has(storage, source):
            # What a transition achieved stands in the row behind it.
            source, behind = path_of(self.achieved), 1
        slots = index[:, None] if index.ndim == 1 else index
        # Slices of arrived rows have a transition less than rows.
        cut = index.ndim == 2 and storage.alignment == "arrived" and index.shape[1] > 1
        slots = slots[:, :-1] if cut else slots
        step, env = episodes.steps_of(slots)
        begin, end, _ = episodes.episode_of(step, env)
        # Of an episode of the steps 10 to 14 step 12 may have its goal from 12 on, up to 14; where what it achieved
        # stands in the row behind it, up to 13, whose row is 14. Slots are those steps again, round by round.
        first, last = step, end - 1 - behind
        left = last + 1 - step
        if self.strategy == "random":
            return {GATHERED[2]: np.concatenate([left, left[:, -1:]], axis=1) if cut else left}
        if self.strategy == "episode":
            first = np.maximum(begin, episodes.begin)
        if self.horizon is not None:
            first, last = np.maximum(first, step - self.horizon), np.minimum(last, step + self.horizon)
        uniform = key.uniform(2 * step.size).reshape(2, *step.shape)
        there = last >= step
        pick = np.where(there, self._pick(first, last, uniform[1]) + behind, step)
        goals = storage.read(key_of(source), episodes.slots_of(pick, env))
        drawn = (uniform[0] < self.ratio) & there
        if cut:
            goals, drawn, left = (np.concatenate([part, part[:, -1:]], axis=1) for part in (goals, drawn, left))
        return dict(zip(GATHERED, (goals, drawn, left), strict=True))

    def __call__(self, batch: Any, key: Key) -> Any:
        """The batch ``{field: [N, T, ...]}`` with new goals and rewards."""
        where = "HindsightRelabel"
        complete = find_any(batch, NEXT) is not None
        if not complete or self.takes == "arrived":
            batch = NextView(takes=self.takes, done=self.done, mask=self.mask)(batch)
        codes = end_codes(batch, self.done, where=where)
        valid = valid_steps(batch, codes, self.mask, where=where)
        if not complete and self.takes == "outgoing":
            valid = valid & (codes == ALIVE)
        achieved = find(batch, (NEXT, *path_of(self.achieved)), where=where)
        goal = find(batch, self.goal, where=where)
        taken, drawn, left = (find_any(batch, name) for name in GATHERED)
        for name in GATHERED:
            batch = batch if find_any(batch, name) is None else removed(batch, name)
        xp, place = namespace(achieved), device_of(achieved)
        if left is not None:
            # What a terminal transition achieved may not be stored: its observation stands under next in its place.
            ahead = xp.arange(codes.shape[1] if left.shape[1] == 1 else 1, device=place)
            valid = valid & (ahead[None, :] < xp.asarray(left, device=place))
        if taken is None or drawn is None:
            taken, drawn = self._drawn_here(batch, achieved, codes, valid, key)
        taken, drawn = xp.asarray(taken, device=place), xp.asarray(drawn, device=place)
        new = drawn & valid
        if drawn.shape[1] < codes.shape[1]:
            # All steps that were read behind a single transition get its goal; one that cannot is not there.
            there = valid_steps(batch, codes, self.mask, where=where)
            batch = replaced(batch, {self.mask: there & (new | ~new[:, :1])})
        goals = xp.where(beside(new, goal), xp.astype(taken, goal.dtype), goal)
        changes: dict[FieldKey, Array] = {self.goal: goals, "relabelled": new}
        after = (NEXT, *path_of(self.goal))
        if find_any(batch, after) is not None:
            changes[after] = xp.where(beside(new, goal), goals, find(batch, after, where=where))
        made = replaced(batch, changes)
        reward_place = place_of(batch, self.reward)
        reward = find(batch, reward_place, where=where)
        computed = self._shaped(self.compute_reward(achieved, goals, made), reward, "compute_reward")
        changes = {reward_place: xp.where(beside(new, reward), xp.astype(computed, reward.dtype), reward)}
        if self.compute_done is not None:
            done_place = place_of(batch, self.done)
            done = find(batch, done_place, where=where)
            terminal = self._shaped(self.compute_done(achieved, goals, made), done, "compute_done") != 0
            # A step that was terminal for its old goal only goes on; one that was cut short stays so.
            kept = xp.where(beside(codes == TERMINAL, done), xp.zeros_like(done), done)
            changes[done_place] = xp.where(
                beside(new, done), xp.where(terminal, xp.astype(xp.full_like(done, TERMINAL), done.dtype), kept), done
            )
        return replaced(made, changes)

    def _drawn_here(self, batch: Any, achieved: Array, codes: Array, valid: Array, key: Key) -> tuple[Array, Array]:
        """Goals out of the batch itself, and which transitions get theirs."""
        index = find_any(batch, "index")
        single = index is not None and index.ndim == 1
        if single and self.strategy != "random":
            raise SchemaError(
                "HindsightRelabel: expected goals from whole episodes beside single transitions, found none; give it "
                f"to the buffer that they are drawn from, and pass on the fields {list(GATHERED)}"
            )
        there = on_host(valid)
        length = there.shape[1]
        if single:  # what was read behind them is no part of the batch
            there = there[:, :1]
        drawn, source = self._draw(on_host(codes)[:, : there.shape[1]], there, key)
        source = source // there.shape[1] * length + source % there.shape[1]
        xp, place = namespace(achieved), device_of(achieved)
        flat = achieved.reshape((-1, *achieved.shape[2:]))
        taken = flat[xp.asarray(source.reshape(-1), device=place)]
        return taken.reshape((*source.shape, *achieved.shape[2:])), drawn

    def _draw(
        self, codes: npt.NDArray[Any], valid: npt.NDArray[Any], key: Key
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return which transitions get a new goal, and the transition it comes from, as an index into all."""
        count, length = codes.shape
        uniform = key.uniform(2 * count * length).reshape(2, count, length)
        chosen = (uniform[0] < self.ratio) & valid
        if self.strategy == "random":
            everywhere = np.flatnonzero(valid)
            pick = (uniform[1] * len(everywhere)).astype(np.int64)
            return chosen, everywhere[pick] if len(everywhere) else np.zeros_like(pick)
        step = np.arange(length)
        # A step is the last known of its episode if it ends it, or if the next one is not there.
        closes = codes != ALIVE
        closes[:, :-1] |= ~valid[:, 1:]
        closes[:, -1] = True
        last = np.minimum.accumulate(np.where(closes, step, length)[:, ::-1], axis=1)[:, ::-1]
        first = np.broadcast_to(step, codes.shape)
        if self.strategy == "episode":
            opens = np.ones_like(closes)
            opens[:, 1:] = closes[:, :-1]
            first = np.maximum.accumulate(np.where(opens, step, 0), axis=1)
        return chosen, np.arange(count)[:, None] * length + self._pick(first, last, uniform[1])

    def _pick(
        self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64], uniform: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.int64]:
        """Choose one of the steps ``first .. last`` by a number in ``[0, 1)``, or the last."""
        if self.strategy == "final":
            return last
        return np.minimum(first + (uniform * (last - first + 1)).astype(np.int64), last)

    @staticmethod
    def _shaped(values: Array, like: Array, name: str) -> Array:
        xp = namespace(like)
        made = xp.asarray(values, device=device_of(like))
        if math.prod(made.shape) != math.prod(like.shape) or tuple(made.shape[:2]) != tuple(like.shape[:2]):
            raise SchemaError(
                f"HindsightRelabel: {name}: expected values of shape {list(like.shape[:2])}, found {list(made.shape)}"
            )
        return made.reshape(like.shape)


def _check_call(name: str, function: Any) -> None:
    """Raise ConfigError where a function does not take what it will be called with."""
    if not callable(function):
        raise ConfigError(f"HindsightRelabel: {name}: expected a function, found {function!r}")
    try:
        found = signature(function)
    except (TypeError, ValueError):  # some that are not written in Python do not say
        return
    try:
        found.bind("achieved", "goal", "batch")
    except TypeError as error:
        raise ConfigError(
            f"HindsightRelabel: {name}: expected a function of (achieved_goal, desired_goal, batch), found one of "
            f"{found}"
        ) from error


def _has(storage: Storage, path: Path) -> bool:
    try:
        storage.read(path, np.zeros(1, np.int64))
    except MissingFieldError:
        return False
    return True
