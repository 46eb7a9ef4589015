"""What samplers have in common: checking states and priorities, and which of so many rows, or slices, are left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import state_number
from mouse_core.errors import ConfigError, StateError
from mouse_core.randomness import Key, Order

Int64s = npt.NDArray[np.int64]


class Epochs:
    """Epochs over ``0 .. total - 1``, each in an order of its own.

    Args:
        drop_last: Whether what does not fill a batch at the end of an epoch is left out.
        shuffle: Whether an epoch has an order of its own; otherwise the numbers ascend.
    """

    def __init__(self, drop_last: bool, shuffle: bool) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._forget()

    def _forget(self) -> None:
        """The next draw begins an epoch."""
        self._over = 0  # what the epoch is over: so many rows, or slices of so many steps
        self._began, self._position, self._ran_out = 0, 0, False

    @property
    def ran_out(self) -> bool:
        """Whether the last draw was the last of its epoch, if the next one asks for as much."""
        return self._ran_out

    def _begins(self, key: Key, over: int, total: int, count: int) -> bool:
        """Begin an epoch if the last one was over something else, or has nothing left for a batch of ``count``."""
        if over == self._over and not self._is_over(total, count):
            return False
        self._over, self._began, self._position, self._ran_out = over, key.index, 0, False
        return True

    def _is_over(self, total: int, count: int) -> bool:
        return total - self._position < (count if self.drop_last else 1)

    def _take(self, key: Key, total: int, count: int) -> Int64s:
        """The next ``count`` numbers of the epoch, or those left of it."""
        ranks = np.arange(self._position, min(self._position + count, total))
        self._position += len(ranks)
        self._ran_out = self._is_over(total, count)
        return _order(replace(key, index=self._began), total)(ranks) if self.shuffle else ranks

    def _epoch(self, over: str) -> dict[str, int]:
        """The state of the epoch, in which what it is over has this name."""
        numbers = {"began": self._began, over: self._over, "position": self._position}
        return {**numbers, "ran_out": int(self._ran_out)}

    def _go_on(self, epoch: Mapping[str, Any], over: str) -> None:
        """Be where a state says."""
        self._over, self._began, self._position = epoch[over], epoch["began"], epoch["position"]
        self._ran_out = bool(epoch["ran_out"])


@lru_cache(maxsize=16)
def _order(key: Key, total: int) -> Order:
    return Order(key, total)


def meant(where: npt.NDArray[np.bool_], batch: Any, masks: bool) -> npt.NDArray[np.bool_]:
    """Which of these rows of a batch are meant: those that its ``mask`` does not leave out.

    Args:
        where: The rows, of the shape of the index.
        batch: The batch.
        masks: Whether the buffer makes a ``mask``; otherwise the field is the rows' own.
    """
    if not masks or "mask" not in batch:
        return where
    mask = np.asarray(batch["mask"], np.bool_)
    if mask.shape != where.shape:
        raise ConfigError(
            f"update_priority: expected a mask of the shape of the index {list(where.shape)}, found {list(mask.shape)}"
        )
    return where & mask


def check_state(
    state: Any, fixed: Mapping[str, str], kinds: Mapping[str, type | str], sampler: object
) -> dict[str, Any]:
    """The values of a sampler's state.

    Args:
        state: What was given.
        fixed: Values that must be these: what the sampler was made with.
        kinds: What the others must be: ``int`` (from 0), ``float``, or the kinds of dtype of an array ``[n]`` ("iu").
        sampler: For the message.

    Raises:
        StateError: Other keys, or another value or type.
    """
    name = type(sampler).__name__
    expected = {*fixed, *kinds}
    for key, value in fixed.items():  # other keys follow from another configuration, which says more
        if isinstance(state, Mapping) and key in state and str(state[key]) != value:
            raise StateError(f"sampler: expected the state of a sampler made as {value}, found {state[key]}")
    if not isinstance(state, Mapping) or set(state) != expected:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)[:80]
        raise StateError(f"sampler: expected the state of a {name} with the keys {sorted(expected)}, found {found}")
    return {key: _checked(key, state[key], kind) for key, kind in kinds.items()}


def _checked(key: str, value: Any, kind: type | str) -> Any:
    """A value of the state, if it is of its kind."""
    if isinstance(kind, str):
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in kind:
            raise StateError(f"sampler: expected {key} as an array [n], found {array.dtype} {list(array.shape)}")
        return array
    if kind is int:
        return state_number(key, value, where="sampler")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise StateError(f"sampler: expected {key} as a finite number, found {value!r}")
    return float(value)
