"""NextView: the entries of the next step, made when read, so that observations are stored once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mouse_core.dtypes import namespace
from mouse_core.errors import SchemaError
from mouse_core.nested import key_of
from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.transforms._ends import ALIVE, TERMINAL, beside, end_codes, valid_steps
from mouse_core.replay.transforms._fields import (
    BEFORE,
    BOOKKEEPING,
    NEXT,
    Path,
    check_keys,
    find_any,
    leaves,
    on_host,
    only,
    replaced,
    runs,
)
from mouse_core.spec import Alignment, check_alignment

Array = Any

OUTCOME: tuple[FieldKey, ...] = ("reward", "done", "terminated", "truncated")


@dataclass(frozen=True, kw_only=True)
class NextView:
    """Turns rows into transitions with a ``next`` entry: what an action led to.

    What a transition led to stands under ``next``: the observation, and reward, done, terminated and truncated, which
    leave the root (the layout that TorchRL calls TED). The action and what a sampler added stay at the root.

    - Taken from "outgoing" rows (row t: observation t, and the action, reward and done that leave it), slices of T rows
      become T transitions, whose ``next`` holds the observation of row t+1. After the last row of an episode
      there is none, for the final observation is not stored. A terminal transition does not need it: it stays, with its
      own observation under ``next``. A truncated one would, and is masked, as is a step at which the slice ends before
      the episode does.
    - Taken from "arrived" rows (row t: observation t, and what led to it), T rows become T-1 transitions: observation
      t, and action, reward, done and observation of row t+1. Nothing is lost.

    The batch has a field ``mask`` afterwards, bool, which says what transitions are whole: leave the others out of the
    loss. Single transitions that a buffer draws become single transitions, as it reads the row behind each as well.

    Args:
        takes: The alignment of the rows.
        action: Fields that say what was done.
        outcome: Fields that say what came of it, those of them that are there.
        keep: Further fields that have no next one, such as the number of a task.
        done: Where episodes end: 0, 1 terminal or 2 truncated, or boolean with ``terminated`` and ``truncated`` beside.
        mask: The field that says which steps are there; made if it is missing.

    Raises:
        ConfigError: An unknown alignment, or a name that is none.
        MissingFieldError: Called with a batch in which nothing says where episodes end.
        SchemaError: Called with a batch that is no slices, or that has a ``next`` already.

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
        """Transitions ``[N, T]`` or ``[N, T - 1]`` out of slices ``[N, T]``."""
        if find_any(batch, NEXT) is not None:
            made = find_any(batch, "relabelled") is not None
            hint = "; HindsightRelabel makes it: put NextView before it, or leave it out" if made else ""
            raise SchemaError(
                f"NextView: expected rows without {NEXT!r}, found {[key_of(p) for p, _ in leaves(batch)]}{hint}"
            )
        codes = end_codes(batch, self.done, where="NextView")
        valid = valid_steps(batch, codes, self.mask, where="NextView")
        return (self._arrived if self.takes == "arrived" else self._outgoing)(batch, codes, valid)

    def _arrived(self, batch: Any, codes: Array, valid: Array) -> Any:
        rows: dict[Path, Array] = {}
        after: dict[Path, Array] = {}
        for path, values in leaves(batch):
            if not runs(values, codes.shape):
                rows[path] = values
            elif key_of(path) in self.action:
                rows[path] = values[:, 1:]
            elif key_of(path) in self.outcome:
                after[path] = values[:, 1:]
            else:
                rows[path] = values[:, :-1]
                if not self._stays(path):
                    after[path] = values[:, 1:]
        whole = valid[:, :-1] & valid[:, 1:] & (codes[:, :-1] == ALIVE)
        return self._batch(batch, rows, after, whole)

    def _outgoing(self, batch: Any, codes: Array, valid: Array) -> Any:
        xp = namespace(codes)
        there = xp.concat([valid[:, 1:], xp.zeros_like(valid[:, :1])], axis=1)
        followed = (codes == ALIVE) & there
        rows: dict[Path, Array] = {}
        after: dict[Path, Array] = {}
        for path, values in leaves(batch):
            if runs(values, codes.shape) and key_of(path) in self.outcome:
                after[path] = values
                continue
            rows[path] = values
            if runs(values, codes.shape) and not self._stays(path):
                # Text and ragged rows lie on the host, and what is made of them, where others are tensors.
                own = namespace(values)
                flags = followed if own is xp else own.asarray(on_host(followed))
                shifted = own.concat([values[:, 1:], values[:, -1:]], axis=1)
                after[path] = own.where(beside(flags, values), shifted, values)
        return self._batch(batch, rows, after, valid & (followed | (codes == TERMINAL)))

    def _stays(self, path: tuple[str | int, ...]) -> bool:
        added = path[0] in BOOKKEEPING or str(path[0]).startswith(BEFORE)
        return added or key_of(path) in (*self.action, *self.keep, self.mask)

    def _batch(self, batch: Any, rows: dict[Path, Array], after: dict[Path, Array], whole: Array) -> Any:
        return replaced(only(batch, rows) or {}, {NEXT: only(batch, after) or {}, self.mask: whole})
