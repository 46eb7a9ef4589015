"""Transforms along time: NextView, Transitions, NStep, ReturnsToGo; and HindsightRelabel, which replaces goals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import GONE
from mouse_core.dtypes import is_tensor, namespace, widest
from mouse_core.episodes import EpisodeIndex
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import find, flatten, key_of, path_of
from mouse_core.randomness import Key
from mouse_core.replay.protocols import FieldKey, Slots, Storage
from mouse_core.replay.transforms.fields import (
    ALIVE,
    BEFORE,
    BOOKKEEPING,
    GATHERED,
    NEXT,
    TERMINAL,
    TRUNCATED,
    Path,
    beside,
    check_keys,
    device_of,
    end_codes,
    end_fields,
    find_any,
    on_host,
    only,
    place_of,
    removed,
    replaced,
    runs,
    valid_steps,
)
from mouse_core.spec import Alignment, check_alignment, check_choice, check_count, check_unit

Array = Any
Strategy = Literal["future", "final", "episode", "random"]


@dataclass(frozen=True, kw_only=True)
class HindsightRelabel:
    """Replaces goals by goals that were achieved later, and recomputes the rewards (hindsight experience replay).

    Andrychowicz et al., "Hindsight experience replay" (NeurIPS 2017). Each transition of a batch, with probability
    ``ratio``, gets the achieved goal of another transition as its goal. The strategy selects that transition:

    - "future": the transition itself or a later transition of its episode, drawn uniformly,
    - "final": the last transition of its episode,
    - "episode": any transition of its episode, drawn uniformly,
    - "random": any transition of the batch, drawn uniformly.

    A buffer draws goals from all existing rows of an episode, for single transitions and for slices. Only the goal
    field is read, so episodes may have any length. Ends of episodes are found as in ``SliceSampler``, from done,
    terminated, truncated and trajectory numbers. ``HindsightRelabel`` must precede other transforms that change goals.
    Of the transforms in this package, only ``NextView`` may precede ``HindsightRelabel``. Steps that are read after a
    single transition get the same goal as the transition, so that a later ``NStep`` sums rewards for a single goal. In
    slices each step gets its own goal, so a buffer of slices with ``HindsightRelabel`` and ``NStep`` or ``ReturnsToGo``
    raises ConfigError.

    The goal is set at the root and under ``next``. The reward is ``compute_reward(achieved, goal, batch)``, with the
    achieved goal of the transition (under ``next``). A field ``relabelled``, bool, marks the transitions with a new
    goal.

    "Outgoing" rows without ``next`` do not store the achieved goal of the last transition of an episode. The last
    transition keeps its goal, and its outcome is never drawn as a goal. An ``NStep`` sum with a new goal ends before
    the last transition. To use the last transition as well, store rows with ``next``, or "arrived" rows.

    Args:
        compute_reward: A function that is called as ``compute_reward(achieved_goal, desired_goal, batch)`` with arrays
            ``[N, T, ...]``, and that returns rewards ``[N, T]``. gymnasium's ``GoalEnv.compute_reward`` can be passed.
        compute_done: A function that is called with the same arguments as ``compute_reward``, and that returns a mask
            of the relabelled transitions that are terminal. None: ``done`` is unchanged.
        strategy: "future", "final", "episode" or "random".
        ratio: The probability with which a transition gets a new goal, in ``[0, 1]``: with 0.8, on average four of five
            transitions get a new goal.
        takes: The alignment of the rows. For "arrived" rows, and for "outgoing" rows without ``next``, ``NextView`` is
            applied first.
        horizon: The largest number of steps between a transition and its goal, if a buffer draws the goals; None: goals
            are drawn up to the end of the episode.
        goal, achieved, reward, done, mask: The names of the fields of the goal, the achieved goal, the reward, done and
            the mask; goals may be nested, as in ``("observation", "desired_goal")``.

    Raises:
        ConfigError: An argument is out of range, or a function does not accept the three arguments.
        MissingFieldError: The batch lacks one of the fields.
        SchemaError: The batch does not consist of slices, or the rewards do not have the shape ``[N, T]``; or no buffer
            drew goals for the batch, and the strategy is not "random".
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
        """Return goals for drawn rows, and the mask of the rows that get a new goal; see ``Transform``.

        Returns:
            ``hindsight_goal`` ``[N, T, ...]``; ``hindsight_drawn`` bool ``[N, T]``; and ``hindsight_left`` int64 ``[N,
            T]``, for each step, how many consecutive steps, beginning with this step, have a stored achieved goal. For
            single rows, the arrays are ``[batch, 1, ...]``. With the strategy "random", the result has only
            ``hindsight_left``.
        """
        source = (NEXT, *path_of(self.achieved))
        behind = 0
        if storage.alignment == "arrived" or not _has(storage, source):
            # The achieved goal of a transition is stored in the next row.
            source, behind = path_of(self.achieved), 1
        slots = index[:, None] if index.ndim == 1 else index
        # Slices of "arrived" rows have one transition less than rows.
        cut = index.ndim == 2 and storage.alignment == "arrived" and index.shape[1] > 1
        slots = slots[:, :-1] if cut else slots
        step, env = episodes.steps_of(slots)
        begin, end, _ = episodes.episode_of(step, env)
        # Example: in an episode with the steps 10 to 14, step 12 may get the goal of a step in 12..14. If achieved
        # goals are stored in the next row, only 12..13, since the goal of step 13 is in row 14. Steps are converted to
        # slots modulo the ring.
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
        chosen = np.minimum(first + (uniform[1] * (last - first + 1)).astype(np.int64), last)
        pick = np.where(there, (last if self.strategy == "final" else chosen) + behind, step)
        goals = storage.read(key_of(source), episodes.slots_of(pick, env))
        drawn = (uniform[0] < self.ratio) & there
        if cut:
            goals, drawn, left = (np.concatenate([part, part[:, -1:]], axis=1) for part in (goals, drawn, left))
        return dict(zip(GATHERED, (goals, drawn, left), strict=True))

    def __call__(self, batch: Any, key: Key) -> Any:
        """Return the batch ``{field: [N, T, ...]}`` with new goals and rewards."""
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
            # The achieved goal of a terminal transition may not be stored: ``next`` then repeats the transition's own
            # observation.
            ahead = xp.arange(codes.shape[1] if left.shape[1] == 1 else 1, device=place)
            valid = valid & (ahead[None, :] < xp.asarray(left, device=place))
        if taken is None or drawn is None:
            taken, drawn = self._drawn_here(batch, achieved, valid, key)
        taken, drawn = xp.asarray(taken, device=place), xp.asarray(drawn, device=place)
        new = drawn & valid
        if drawn.shape[1] < codes.shape[1]:
            # All steps that were read after a single transition get its goal; a step that cannot get it is masked.
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
            # A step that was terminal only for its old goal is no longer terminal; a truncated step stays truncated.
            kept = xp.where(beside(codes == TERMINAL, done), xp.zeros_like(done), done)
            changes[done_place] = xp.where(
                beside(new, done), xp.where(terminal, xp.astype(xp.full_like(done, TERMINAL), done.dtype), kept), done
            )
        return replaced(made, changes)

    def _drawn_here(self, batch: Any, achieved: Array, valid: Array, key: Key) -> tuple[Array, Array]:
        """Draw goals from all transitions of the batch; return the goals, and the mask of the transitions that get a
        new goal.
        """
        if self.strategy != "random":
            raise SchemaError(
                "HindsightRelabel: expected goals from the episodes of the transitions, found none; pass this "
                f"transform to the buffer that draws the transitions, and keep the fields {list(GATHERED)}"
            )
        index, there = find_any(batch, "index"), on_host(valid)
        length = there.shape[1]
        if index is not None and index.ndim == 1:  # the steps that follow single transitions are not part of the batch
            there = there[:, :1]
        uniform = key.uniform(2 * there.size).reshape(2, *there.shape)
        (everywhere,) = np.nonzero(there.reshape(-1))
        source = (uniform[1] * len(everywhere)).astype(np.int64)
        source = everywhere[source] if len(everywhere) else source
        # Example: with one of 3 steps per row, place 2 of the mask is place 6 of the batch.
        source = source // there.shape[1] * length + source % there.shape[1]
        xp, place = namespace(achieved), device_of(achieved)
        flat = achieved.reshape((-1, *achieved.shape[2:]))
        taken = flat[xp.asarray(source.reshape(-1), device=place)]
        return taken.reshape((*source.shape, *achieved.shape[2:])), (uniform[0] < self.ratio) & there

    @staticmethod
    def _shaped(values: Array, like: Array, name: str) -> Array:
        xp = namespace(like)
        made = xp.asarray(values, device=device_of(like))
        if math.prod(made.shape) != math.prod(like.shape) or tuple(made.shape[:2]) != tuple(like.shape[:2]):
            raise SchemaError(
                f"HindsightRelabel: {name}: expected values of shape {list(like.shape)}, found {list(made.shape)}"
            )
        return made.reshape(like.shape)


def _check_call(name: str, function: Any) -> None:
    """Raise ConfigError unless a function accepts the arguments with which it will be called."""
    if not callable(function):
        raise ConfigError(f"HindsightRelabel: {name}: expected a function, found {function!r}")
    try:
        found = signature(function)
    except (TypeError, ValueError):  # functions in C may have no signature
        return
    try:
        found.bind("achieved", "goal", "batch")
    except TypeError as error:
        raise ConfigError(
            f"HindsightRelabel: {name}: expected a function of (achieved_goal, desired_goal, batch), found a "
            "function of "
            f"{found}"
        ) from error


def _has(storage: Storage, path: Path) -> bool:
    try:
        storage.read(path, np.zeros(1, np.int64))
    except MissingFieldError:
        return False
    return True


OUTCOME: tuple[FieldKey, ...] = ("reward", "done", "agent_done", "terminated", "truncated")


@dataclass(frozen=True, kw_only=True)
class NextView:
    """Converts rows to transitions whose field ``next`` holds the result of the action.

    ``next`` contains the next observation and the fields reward, done, agent_done, terminated and truncated. These
    fields are removed from the root (the layout TED of TorchRL). The action and the fields of the sampler stay at the
    root.

    - From "outgoing" rows (row t: observation t, and the action, reward and done of the transition that leaves
      observation t), slices of T rows become T transitions, whose ``next`` holds the observation of row t+1. The last
      row of an episode has no next observation, because the final observation is not stored. A terminal transition does
      not need the next observation: the transition is kept, with its own observation under ``next``. A truncated
      transition needs the next observation, so the transition is masked. The last step of a slice inside an episode is
      also masked.
    - From "arrived" rows (row t: observation t, and the action, reward and done that led to observation t), T rows
      become T-1 transitions: each transition has the observation of row t, and the action, reward, done and observation
      of row t+1. No stored observation is lost.

    The result has a field ``mask``, bool, which is True for complete transitions: exclude incomplete transitions from
    the loss. If a buffer draws single transitions, the result also consists of single transitions, because the buffer
    also reads the row after each transition.

    Args:
        takes: The alignment of the rows.
        action: Fields of the action.
        outcome: Fields of the action's result; missing fields are skipped.
        keep: Further fields that get no next value, such as a task number.
        done: The field that marks ends of episodes: 0, 1 (terminal) or 2 (truncated); or a bool, with ``terminated``
            and ``truncated`` on the same level.
        mask: The field that marks the existing steps; added if it is missing.

    Raises:
        ConfigError: The alignment is unknown, or a name is invalid.
        MissingFieldError: No field of the batch marks where episodes end.
        SchemaError: The batch does not consist of slices, or already has a field ``next``.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import NextView
        >>> rows = {"obs": [[5, 6, 7]], "action": [[0, 1, 0]], "reward": [[1, 2, 3]], "done": [[0, 0, 1]]}
        >>> batch = NextView()({name: np.array(values) for name, values in rows.items()})
        >>> following = batch["next"]
        >>> following["obs"], batch["mask"]
        (array([[6, 7, 7]]), array([[ True,  True,  True]]))
    """

    takes: Alignment = "outgoing"
    action: tuple[FieldKey, ...] = ("action",)
    outcome: tuple[FieldKey, ...] = OUTCOME
    keep: tuple[FieldKey, ...] = ()
    done: FieldKey = "done"
    mask: FieldKey = "mask"

    alignment: ClassVar[Alignment] = "outgoing"
    reach: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_alignment(self.takes)
        for name in ("action", "outcome", "keep"):
            check_keys(getattr(self, name), where=f"NextView: {name}")

    def __call__(self, batch: Any) -> Any:
        """Return transitions ``[N, T]`` or ``[N, T - 1]`` from slices ``[N, T]``."""
        if find_any(batch, NEXT) is not None:
            made = find_any(batch, "relabelled") is not None
            hint = (
                ("; HindsightRelabel adds this field: put NextView before HindsightRelabel, or leave out NextView")
                if made
                else ""
            )
            raise SchemaError(f"NextView: expected rows without {NEXT!r}, found {list(flatten(batch))}{hint}")
        codes = end_codes(batch, self.done, where="NextView")
        valid = valid_steps(batch, codes, self.mask, where="NextView")
        return (self._arrived if self.takes == "arrived" else self._outgoing)(batch, codes, valid)

    def _arrived(self, batch: Any, codes: Array, valid: Array) -> Any:
        rows: dict[FieldKey, Array] = {}
        after: dict[FieldKey, Array] = {}
        for key, values in flatten(batch).items():
            if not runs(values, codes.shape):
                rows[key] = values
            elif key in self.action:
                rows[key] = values[:, 1:]
            elif key in self.outcome:
                after[key] = values[:, 1:]
            else:
                rows[key] = values[:, :-1]
                if not self._stays(key):
                    after[key] = values[:, 1:]
        whole = valid[:, :-1] & valid[:, 1:] & (codes[:, :-1] == ALIVE)
        return self._batch(batch, rows, after, whole)

    def _outgoing(self, batch: Any, codes: Array, valid: Array) -> Any:
        xp = namespace(codes)
        there = xp.concat([valid[:, 1:], xp.zeros_like(valid[:, :1])], axis=1)
        followed = (codes == ALIVE) & there
        rows: dict[FieldKey, Array] = {}
        after: dict[FieldKey, Array] = {}
        for key, values in flatten(batch).items():
            has_steps = runs(values, codes.shape)
            if has_steps and key in self.outcome:
                after[key] = values
                continue
            rows[key] = values
            if has_steps and not self._stays(key):
                # Text and ragged rows stay on the host even if other fields are tensors.
                own = namespace(values)
                flags = followed if own is xp else own.asarray(on_host(followed))
                shifted = own.concat([values[:, 1:], values[:, -1:]], axis=1)
                after[key] = own.where(beside(flags, values), shifted, values)
        return self._batch(batch, rows, after, valid & (followed | (codes == TERMINAL)))

    def _stays(self, key: FieldKey) -> bool:
        root = path_of(key)[0]
        return root in BOOKKEEPING or str(root).startswith(BEFORE) or key in (*self.action, *self.keep, self.mask)

    def _batch(self, batch: Any, rows: dict[FieldKey, Array], after: dict[FieldKey, Array], whole: Array) -> Any:
        return replaced(only(batch, rows) or {}, {NEXT: only(batch, after) or {}, self.mask: whole})


@dataclass(frozen=True, kw_only=True)
class Transitions(NextView):
    """Converts rows to transitions without nesting, with the same fields as the batches of a ``BatchSource`` with
    ``transitions=True``; see ``NextView``.

    A batch has the observation, the action, its ``reward``, ``terminated`` and ``truncated``, and the next observation:
    each field whose name begins with "obs" has a second field ``next_<name>``. ``mask`` marks the complete transitions.
    Other fields have the values of the observation's row. ``ReplayBuffer(transitions=True)`` adds this transform for
    the alignment of its rows.

    Args:
        takes, action, outcome, keep, done, mask: See ``NextView``; ``done`` is a field at the root.

    Raises:
        ConfigError, MissingFieldError, SchemaError: See ``NextView``.

    Example:
        >>> import numpy as np
        >>> rows = {"obs": [[5, 6, 7]], "action": [[0, 1, 0]], "reward": [[1, 2, 3]], "done": [[0, 0, 1]]}
        >>> batch = Transitions()({name: np.array(values) for name, values in rows.items()})
        >>> batch["next_obs"], batch["terminated"]
        (array([[6, 7, 7]]), array([[False, False,  True]]))
    """

    def __call__(self, batch: Any) -> Any:
        """Return transitions ``[N, T]`` or ``[N, T - 1]`` from slices ``[N, T]``."""
        made = super().__call__(batch)
        codes = end_codes(made, self.done, where="Transitions")
        flat = {name: child for name, child in made.items() if name != NEXT}
        for name, child in made[NEXT].items():
            if str(name).startswith("obs"):
                flat[f"next_{name}"] = child
            elif name in self.outcome and name != self.done:
                flat[name] = child
        mask = made[self.mask]
        return flat | {"terminated": (codes == TERMINAL) & mask, "truncated": (codes == TRUNCATED) & mask}


@dataclass(frozen=True)
class NStep:
    """Converts single-step transitions to transitions of up to ``n`` steps, for n-step bootstrapping.

    For step t, let ``m`` be the number of summed steps: ``n``, or fewer if the episode or the slice ends earlier. The
    delivered batch has at step t:

    - ``reward``: ``sum(discount**k * reward[t + k] for k in range(m))``, computed per component if the reward is a
      vector,
    - ``done``, and ``agent_done``, ``terminated`` and ``truncated`` if they exist: the values of step ``t + m - 1``,
    - every field under ``next``, and every field whose name begins with ``next_``: the value of step ``t + m - 1``,
    - ``discount``, float32 with as many axes as the reward: ``discount**m``; and ``steps``, int64 ``[N, T]``: ``m``.

    With these fields, the target is ``reward + discount * (done != 1) * value(next)``. The end of an episode stops the
    sum. If the sum of a step ends at a terminal observation, ``done`` is 1 in this step. If the sum ends where the
    episode is truncated, ``done`` is 2, and the target bootstraps. The end of a slice also stops the sum, and the
    bootstrap uses fewer steps.

    The episodes of agents may end separately if rows have ``agent_done`` ``[A]`` and rewards ``[A]`` or ``[A, ...]``;
    for the codes in ``agent_done`` see ``DatasetStore.add_episode``. An agent's sum stops at its own end, and its
    ``agent_done`` is the code of that end. The rewards of an agent after its end (code 3) count as 0. Where an agent is
    truncated, the sums of all agents stop, because all agents share one ``next``. The target of an agent is ``reward +
    discount * (agent_done != 1) * value(next)``, and steps where ``agent_done`` is 3 have no target.

    The formula comes from Sutton and Barto, "Reinforcement learning", 2nd edition, section 7.1, with truncated episodes
    handled as in Pardo et al., "Time limits in reinforcement learning" (ICML 2018).

    A buffer that draws single transitions also reads the steps after each transition.

    Args:
        n: The largest number of steps in a sum, at least 1.
        discount: The discount of one step, in ``[0, 1]``.
        takes: The alignment of the rows. For "arrived" rows, ``NextView(takes="arrived")`` is applied first.
        reward, done: The names of the reward and done fields. Each field is read under ``next`` if the field exists
            under ``next``, else at the root. See ``NextView`` for ``done``.
        mask: The field that marks the existing steps.

    Raises:
        ConfigError: ``n`` or ``discount`` is out of range.
        MissingFieldError: The batch has no reward, or no field that marks where episodes end.
        SchemaError: The batch does not consist of slices, or already has a field ``discount`` or ``steps``.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import NStep
        >>> batch = NStep(2, 0.5)({"reward": np.array([[4.0, 2.0, 8.0]]), "done": np.array([[0, 0, 1]])})
        >>> batch["reward"], batch["done"], batch["discount"]
        (array([[5., 6., 8.]]), array([[0, 1, 1]]), array([[0.25, 0.25, 0.5 ]], dtype=float32))
    """

    n: int
    discount: float
    takes: Alignment = "outgoing"
    reward: FieldKey = "reward"
    done: FieldKey = "done"
    mask: FieldKey = "mask"

    alignment: ClassVar[Alignment] = "outgoing"

    def __post_init__(self) -> None:
        check_count("NStep: n", self.n)
        check_unit("NStep: discount", self.discount)
        check_alignment(self.takes)
        check_keys((self.reward, self.done, self.mask), where="NStep")

    @property
    def reach(self) -> int:
        """The number of rows that are read after a drawn row; at least 1, so that the batch has a time axis."""
        return max(1, int(self.n) - 1 + (self.takes == "arrived"))

    def __call__(self, batch: Any) -> Any:
        """Return the batch ``{field: [N, T, ...]}`` with the n-step rewards and the other changed fields."""
        if self.takes == "arrived":
            batch = NextView(takes="arrived", done=self.done, mask=self.mask)(batch)
        for name in ("discount", "steps"):
            if find_any(batch, name) is not None:
                raise SchemaError(f"NStep: expected rows without a field {name!r}, which NStep adds, found this field")
        codes = end_codes(batch, self.done, where="NStep")
        valid = valid_steps(batch, codes, self.mask, where="NStep")
        xp = namespace(codes)
        place, agents_place = place_of(batch, self.reward), place_of(batch, AGENTS)
        reward = find(batch, place, where="NStep")
        agents, reward = by_agent(batch, codes, reward)
        ended = codes != ALIVE
        if agents is not None:
            ended = ended | xp.any(agents == TRUNCATED, axis=2)
        options: dict[str, Any] = {"n": int(self.n), "discount": float(self.discount), "agents": agents}
        total, steps, agents = n_step_sums(reward, ended, valid, **options)
        rows = xp.arange(codes.shape[0], device=device_of(codes))[:, None]
        last = xp.arange(codes.shape[1], device=device_of(codes))[None, :] + xp.clip(steps - 1, 0)
        moved = {*end_fields(batch, self.done).values(), *self._shifted(batch)}
        moved |= {agents_place} if find_any(batch, agents_place) is not None else set()
        moved -= {place} if agents is None else {place, agents_place}
        changes: dict[FieldKey, Array] = {key: find(batch, key, where="NStep")[rows, last] for key in moved}
        powers = _table(float(self.discount) ** np.arange(self.n + 1.0), codes)
        changes |= {
            place: total,
            # With as many axes as the reward: [N, T] beside [N, T, 1] would be broadcast to [N, T, T].
            "discount": beside(xp.astype(powers[steps], xp.float32), total),
            "steps": steps,
        }
        return replaced(batch, changes if agents is None else {**changes, agents_place: agents})

    def _shifted(self, batch: Any) -> list[FieldKey]:
        paths = {key: path_of(key) for key in flatten(batch)}
        return [key for key, path in paths.items() if path[0] == NEXT or str(path[-1]).startswith("next_")]


def _table(values: npt.NDArray[np.float64], beside: Array) -> Array:
    """Return a table of numbers on the device of an array. With torch, the table is computed on the device, because a
    copy from the host would block.
    """
    xp, device = namespace(beside), device_of(beside)
    if not is_tensor(beside) or device.type == "cpu":
        return xp.asarray(values, device=device)
    return xp.stack([xp.full((), float(value), dtype=xp.float64, device=device) for value in values])


AGENTS: FieldKey = "agent_done"


def by_agent(batch: Any, codes: Array, reward: Array) -> tuple[Array | None, Array]:
    """Return the end code of each agent, ``[N, T, A]``, and the rewards, which are 0 after an agent's end.

    An agent that has not ended earlier ends with its episode, and gets the episode's code from ``codes`` ``[N, T]``.
    Without a reward for each agent, or without ``agent_done``, the returned codes are None and the rewards unchanged.
    """
    agents = find_any(batch, place_of(batch, AGENTS))
    if agents is None or agents.ndim != 3 or tuple(reward.shape[:3]) != tuple(agents.shape):
        return None, reward
    xp = namespace(agents)
    reward = xp.where(beside(agents == GONE, reward), xp.zeros_like(reward), reward)
    return xp.where(agents == ALIVE, xp.astype(beside(codes, agents), agents.dtype), agents), reward


def n_step_sums(
    reward: Array, ended: Array, valid: Array, *, n: int, discount: float, agents: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """Return the sum of up to ``n`` rewards from each step on, the number of summed rewards, and codes of agents.

    Example: the rewards are 4, 2, 8, n is 2, the discount is 0.5, and the second step ends its episode. The first sum
    is 4 plus half of 2. The second sum is only 2, because the third step belongs to another episode. The third sum is
    only 8, because no step follows. The sums are 5, 2, 8 and the numbers of rewards 2, 1, 1.

    Args:
        reward: The rewards, ``[N, T, ...]``; element t is the reward of the action at observation t.
        ended: Whether step t is the last of its episode, bool ``[N, T]``.
        valid: Whether step t exists, bool ``[N, T]``.
        n: The largest number of steps, at least 1.
        discount: The discount of one step.
        agents: The end code of each agent in each step, ``[N, T, A]``, for rewards ``[N, T, A, ...]``; None: agents end
            with the episode.

    Returns:
        Three arrays. The sums, ``[N, T, ...]``, are computed in float64 and returned in the dtype of ``reward``, or in
        float32 if ``reward`` is not floating-point. The numbers of summed steps are int64 ``[N, T]``, 0 for a missing
        step. The codes, ``[N, T, A]``, contain the code of each agent's first end within the summed steps, or 0 if the
        agent does not end.
    """
    xp = namespace(reward)
    length = valid.shape[1]
    wide = xp.astype(reward, widest(xp, "float64"))
    total, steps = xp.zeros_like(wide), xp.zeros_like(valid, dtype=widest(xp, "int64"))
    codes: Any = agents
    going = valid  # [N, T - taken]: whether the step ``taken`` behind each is summed as well
    for taken in range(min(n, length)):
        if taken:
            # Step t + taken counts if the one before did not end the episode, and if it is there.
            going = going[:, :-1] & ~ended[:, taken - 1 : length - 1] & valid[:, taken:]
        there = beside(going, wide)
        if agents is not None and taken:
            # An agent that ended within the steps before gets no further reward, and keeps its code.
            alive = agents[:, : length - taken] == ALIVE
            later = xp.where(going[..., None] & alive, codes[:, taken:], agents[:, : length - taken])
            agents = xp.concat([later, agents[:, length - taken :]], axis=1)
            there = there & beside(alive, wide)
        part = xp.where(there, discount**taken * wide[:, taken:], xp.zeros_like(wide[:, taken:]))
        # Sums are over what is there: an infinite reward elsewhere must not become NaN.
        total = total + _ending_in_zeros(part, taken)
        steps = steps + _ending_in_zeros(xp.astype(going, steps.dtype), taken)
    floating = xp.isdtype(reward.dtype, "real floating")
    return xp.astype(total, reward.dtype if floating else xp.float32), steps, agents


def _ending_in_zeros(values: Array, count: int) -> Array:
    """Append ``count`` steps of zeros to ``[N, T - count, ...]``, because JAX arrays do not support addition in
    place.
    """
    if not count:
        return values
    xp = namespace(values)
    shape = (values.shape[0], count, *values.shape[2:])
    return xp.concat([values, xp.zeros(shape, dtype=values.dtype, device=device_of(values))], axis=1)


@dataclass(frozen=True)
class ReturnsToGo:
    """Adds the sum of the future rewards, ``return_to_go``, to every step.

    ``G[t] = r + discount * G[t + 1]``, where ``r`` is the reward of the transition that leaves observation t, and
    ``G[t + 1]`` counts only if step t + 1 belongs to the same episode. For "outgoing" rows, ``r`` is ``reward[t]``. For
    "arrived" rows, ``r`` is ``reward[t + 1]``, and 0 at the last row of an episode. (Sutton and Barto, section 3.3.)

    For vector rewards the sums are vectors. If rows have ``agent_done`` (see ``NStep``), the rewards of an agent are
    summed up to the agent's end. Rewards outside the slice are not summed. For returns up to the ends of episodes, draw
    whole episodes, or compute the returns when episodes are written: ``OnWrite(ReturnsToGo(0.99))``.

    Args:
        discount: The discount of one step, in ``[0, 1]``.
        takes: The alignment of the rows.
        reward, done, mask: See ``NStep``.
        to: The name of the new field, which has the dtype of the reward.

    Raises:
        ConfigError, MissingFieldError, SchemaError: See ``NStep``.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import ReturnsToGo
        >>> ReturnsToGo(0.5)({"reward": np.array([[4.0, 2.0, 8.0]]), "done": np.array([[0, 0, 1]])})["return_to_go"]
        array([[7., 6., 8.]])
    """

    discount: float = 1.0
    takes: Alignment = "outgoing"
    reward: FieldKey = "reward"
    done: FieldKey = "done"
    mask: FieldKey = "mask"
    to: FieldKey = "return_to_go"

    def __post_init__(self) -> None:
        check_unit("ReturnsToGo: discount", self.discount)
        check_alignment(self.takes)
        check_keys((self.reward, self.done, self.mask, self.to), where="ReturnsToGo")

    def __call__(self, batch: Any) -> Any:
        """Return the batch ``{field: [N, T, ...]}`` with the new field."""
        codes = end_codes(batch, self.done, where="ReturnsToGo")
        valid = valid_steps(batch, codes, self.mask, where="ReturnsToGo")
        reward = find(batch, place_of(batch, self.reward), where="ReturnsToGo")
        xp, (agents, reward) = namespace(reward), by_agent(batch, codes, reward)
        alive = beside(codes == ALIVE if agents is None else agents == ALIVE, reward)
        wide = xp.astype(reward, widest(xp, "float64"))
        returns: list[Array] = []
        following = xp.zeros_like(wide[:, 0])
        last = codes.shape[1] - 1
        for step in range(last, -1, -1):
            there, goes_on = beside(valid, wide)[:, step], alive[:, step]
            if self.takes == "outgoing":
                following = wide[:, step] + xp.where(goes_on, self.discount * following, xp.zeros_like(following))
            elif step < last:
                onward = goes_on & beside(valid, wide)[:, step + 1]
                gained = wide[:, step + 1] + self.discount * following
                following = xp.where(onward, gained, xp.zeros_like(gained))
            following = xp.where(there, following, xp.zeros_like(following))
            returns.insert(0, following)
        floating = xp.isdtype(reward.dtype, "real floating")
        made = xp.stack(returns, axis=1) if returns else wide
        return replaced(batch, {self.to: xp.astype(made, reward.dtype if floating else xp.float32)})
