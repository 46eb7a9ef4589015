"""HindsightRelabel: learn from a failure as if what came of it had been the goal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.randomness import Key
from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.transforms._ends import ALIVE, TERMINAL, beside, end_codes, valid_steps
from mouse_core.replay.transforms._fields import (
    NEXT,
    check_keys,
    device_of,
    find,
    get,
    namespace,
    on_host,
    path_of,
    place_of,
    replaced,
)
from mouse_core.replay.transforms.next_view import NextView
from mouse_core.spec import Alignment, check_alignment

Array = Any
Strategy = Literal["future", "final", "episode", "random"]


@dataclass(frozen=True, kw_only=True)
class HindsightRelabel:
    """Replaces goals by what was achieved later, and computes the rewards anew (hindsight experience replay).

    Andrychowicz et al., "Hindsight experience replay" (NeurIPS 2017). Of the transitions of slices ``[N, T]`` a share
    ``ratio``, drawn one by one, gets as its goal what some transition achieved:

    - "future": one of its episode from itself on, uniformly,
    - "final": the last of its episode,
    - "episode": any of its episode, uniformly,
    - "random": any of the batch, uniformly.

    An episode is known as far as the slice reaches: draw slices as long as episodes, padded where they are shorter.
    Where a buffer draws single transitions, it reads ``horizon`` steps behind each, and "episode" counts from the drawn
    one on.

    The goal is set at the root and under ``next``. The reward is ``compute_reward(achieved, goal, batch)``, with what
    the transition achieved (under ``next``). A field ``relabelled``, bool, says which transitions have a new goal.

    What the last transition of an episode achieved is not stored in "outgoing" rows without ``next``: it keeps its goal
    and is none. Store ``next``, or "arrived" rows, to use it as well.

    Args:
        compute_reward: Called as ``compute_reward(achieved_goal, desired_goal, batch)`` with arrays ``[N, T, ...]``;
            gives rewards ``[N, T]``. gymnasium's ``GoalEnv.compute_reward`` fits.
        compute_done: Called likewise; says which relabelled transitions are terminal. None: ``done`` stays.
        strategy: "future", "final", "episode" or "random".
        ratio: How many transitions get a new goal, in ``[0, 1]``: 0.8 are four new goals for each old one.
        takes: The alignment of the rows. "arrived" rows, and "outgoing" ones without ``next``, pass through
            ``NextView`` first.
        horizon: Steps to read behind single transitions: an episode's length.
        goal, achieved, reward, done, mask: The names of these fields; goals may be nested, as in ``("observation",
            "desired_goal")``.

    Raises:
        ConfigError: An argument out of range.
        MissingFieldError: Called with a batch that lacks one of the fields.
        SchemaError: Called with a batch that is no slices; rewards of another shape.
    """

    compute_reward: Callable[[Array, Array, Any], Array]
    compute_done: Callable[[Array, Array, Any], Array] | None = None
    strategy: Strategy = "future"
    ratio: float = 0.8
    takes: Alignment = "outgoing"
    horizon: int = 0
    goal: FieldKey = "desired_goal"
    achieved: FieldKey = "achieved_goal"
    reward: FieldKey = "reward"
    done: FieldKey = "done"
    mask: FieldKey = "mask"

    random: ClassVar[bool] = True
    alignment: ClassVar[Alignment] = "outgoing"

    def __post_init__(self) -> None:
        for name in ("compute_reward", "compute_done"):
            if not callable(getattr(self, name)) and not (name == "compute_done" and self.compute_done is None):
                raise ConfigError(f"HindsightRelabel: {name}: expected a function, found {getattr(self, name)!r}")
        if self.strategy not in get_args(Strategy):
            raise ConfigError(
                f"HindsightRelabel: strategy: expected one of {list(get_args(Strategy))}, found {self.strategy!r}"
            )
        number = isinstance(self.ratio, int | float | np.floating) and not isinstance(self.ratio, bool)
        if not number or not 0 <= self.ratio <= 1:
            raise ConfigError(f"HindsightRelabel: ratio: expected a number in [0, 1], found {self.ratio!r}")
        if isinstance(self.horizon, bool) or not isinstance(self.horizon, int | np.integer) or self.horizon < 0:
            raise ConfigError(f"HindsightRelabel: horizon: expected an integer from 0, found {self.horizon!r}")
        check_alignment(self.takes)
        check_keys((self.goal, self.achieved, self.reward, self.done, self.mask), where="HindsightRelabel")

    @property
    def reach(self) -> int:
        """How many rows behind a drawn one it needs; at least 1, so that there is an axis of time."""
        return max(1, int(self.horizon) + (self.takes == "arrived"))

    def __call__(self, batch: Any, key: Key) -> Any:
        """The batch ``{field: [N, T, ...]}`` with new goals and rewards."""
        where = "HindsightRelabel"
        complete = find(batch, NEXT) is not None
        if not complete or self.takes == "arrived":
            batch = NextView(takes=self.takes, done=self.done, mask=self.mask)(batch)
        codes = end_codes(batch, self.done, where=where)
        valid = valid_steps(batch, codes, self.mask, where=where)
        if not complete and self.takes == "outgoing":
            valid = valid & (codes == ALIVE)
        achieved = get(batch, (NEXT, *path_of(self.achieved)), where=where)
        goal = get(batch, self.goal, where=where)
        chosen, source = self._draw(on_host(codes), on_host(valid), key)
        xp, place = namespace(achieved), device_of(achieved)
        flat = achieved.reshape((-1, *achieved.shape[2:]))
        taken = flat[xp.asarray(source.reshape(-1), device=place)].reshape(achieved.shape)
        new = xp.asarray(chosen, device=place)
        goals = xp.where(beside(new, goal), xp.astype(taken, goal.dtype), goal)
        changes: dict[FieldKey, Array] = {self.goal: goals, "relabelled": new}
        after = (NEXT, *path_of(self.goal))
        if find(batch, after) is not None:
            changes[after] = xp.where(beside(new, goal), goals, get(batch, after, where=where))
        made = replaced(batch, changes)
        reward_place = place_of(batch, self.reward)
        reward = get(batch, reward_place, where=where)
        computed = self._shaped(self.compute_reward(achieved, goals, made), reward, "compute_reward")
        changes = {reward_place: xp.where(beside(new, reward), xp.astype(computed, reward.dtype), reward)}
        if self.compute_done is not None:
            done_place = place_of(batch, self.done)
            done = get(batch, done_place, where=where)
            terminal = self._shaped(self.compute_done(achieved, goals, made), done, "compute_done") != 0
            # A step that was terminal for its old goal only goes on; one that was cut short stays so.
            kept = xp.where(beside(codes == TERMINAL, done), xp.zeros_like(done), done)
            changes[done_place] = xp.where(
                beside(new, done), xp.where(terminal, xp.astype(xp.full_like(done, TERMINAL), done.dtype), kept), done
            )
        return replaced(made, changes)

    def _draw(
        self, codes: npt.NDArray[Any], valid: npt.NDArray[Any], key: Key
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Which transitions get a new goal, and the transition it is taken from, as an index into all of them."""
        count, length = codes.shape
        uniform = key.uniform(2 * count * length).reshape(2, count, length)
        chosen = (uniform[0] < self.ratio) & valid
        step = np.arange(length)
        if self.strategy == "random":
            everywhere = np.flatnonzero(valid)
            pick = (uniform[1] * len(everywhere)).astype(np.int64)
            return chosen, everywhere[pick] if len(everywhere) else np.zeros_like(pick)
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
        pick = last
        if self.strategy != "final":
            pick = np.minimum(first + (uniform[1] * (last - first + 1)).astype(np.int64), last)
        return chosen, np.arange(count)[:, None] * length + pick

    @staticmethod
    def _shaped(values: Array, like: Array, name: str) -> Array:
        xp = namespace(like)
        made = xp.asarray(values, device=device_of(like))
        if math.prod(made.shape) != math.prod(like.shape) or tuple(made.shape[:2]) != tuple(like.shape[:2]):
            raise SchemaError(
                f"HindsightRelabel: {name}: expected values of shape {list(like.shape[:2])}, found {list(made.shape)}"
            )
        return made.reshape(like.shape)
