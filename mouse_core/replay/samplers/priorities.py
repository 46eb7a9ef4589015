"""Prioritised sampling of single rows (Schaul et al., "Prioritized Experience Replay", ICLR 2016)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, RowIndexError, StateError
from mouse_core.randomness import Key
from mouse_core.replay.ground.protocols import Draw, Slots, Storage, Write, ring_pieces
from mouse_core.replay.samplers import weighing
from mouse_core.replay.samplers._common import check_state
from mouse_core.replay.samplers._sum_tree import SumTree, draw_slots, importance_weights

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Beta = float | Callable[[int], float]
"""A number, or a function from the number of the sample (0, 1, 2, ...) to one."""

_VERSION = 1  # of states


@dataclass(frozen=True)
class LinearSchedule:
    """A number that goes from one value to another in equal steps and stays there.

    Args:
        start: At sample 0.
        end: From sample ``samples`` on.
        samples: How many samples it takes, at least 1.

    Raises:
        ConfigError: A value that is not finite, or no samples.
    """

    start: float
    end: float
    samples: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ConfigError(f"LinearSchedule: expected finite numbers, found {self.start}, {self.end}")
        if isinstance(self.samples, bool) or not isinstance(self.samples, int | np.integer) or self.samples < 1:
            raise ConfigError(f"LinearSchedule: expected at least 1 sample, found {self.samples!r}")

    def __call__(self, sample: int) -> float:
        """The value for sample number ``sample``."""
        return self.start + (self.end - self.start) * min(sample / self.samples, 1.0)


class PrioritizedSampler:
    """Rows drawn in proportion to ``p_i = (priority_i + eps) ** alpha``, each draw independent of the others.

    New rows, and rows that are changed in place, have the largest priority that was ever set, at least 1. A batch has
    importance weights ``(p_i / p_min) ** -beta`` beside it, with the smallest ``p`` of all rows: they are at most 1.
    A row whose ``p`` is 0 (priority and ``eps`` both 0) is never drawn and does not count for ``p_min``.

    Priorities are float32, and what a row weighs is an integer: ``p_i`` in units of ``2**-24``, at least one, that
    differs from the power by at most ``2**-27`` of it and half a unit (for ``alpha`` up to 2). It is computed and
    summed without floats, so that draws are the same to the last bit wherever they are made. The weights of all rows
    together are less than ``2**63`` units: in a buffer of 1 million rows each ``p`` is at most 549,755, and in one of
    10 million at most 54,975, which for ``alpha=0.6`` is a priority of 79 million. Rows that weigh more when a buffer
    gets room for more weigh as much as they may from then on.

    Args:
        alpha: How much priorities count, from 0 to 8; with 0 all rows are drawn alike.
        beta: How much of the bias the weights take back, at least 0: a number, or a function from the number of the
            sample (0, 1, 2, ...; the buffer counts) to one, such as ``LinearSchedule(0.4, 1.0, samples=100_000)``. It
            may be set anew at any time.
        eps: What is added to every priority: 0, or from ``2**-100`` to ``2**100``.
        max_priority_within_buffer: Whether new rows have the largest priority that a row has now instead, so that an
            outlier that was corrected is forgotten. Every update then looks at all priorities.

    Raises:
        ConfigError: A number out of range.
    """

    needs_order = False

    def __init__(
        self, alpha: float = 0.6, beta: Beta = 0.4, eps: float = 1e-8, *, max_priority_within_buffer: bool = False
    ) -> None:
        self._within = bool(max_priority_within_buffer)
        self._alpha, self._eps = weighing.check_alpha(alpha), weighing.check_eps(eps)
        self.beta = beta
        self._set_largest(1.0)
        self._tree: SumTree | None = None
        self._loaded: Int64s | None = None  # the weights of a state, until the storage's capacity is known
        # New rows whose weights are not yet in the tree: those with these numbers.
        self._begin = self._end = 0
        self._size = 0  # rows there were when the tree was last complete

    def __repr__(self) -> str:
        return f"PrioritizedSampler(alpha={self.alpha}, beta={self.beta!r}, eps={self.eps}{self._shown_within()})"

    def _shown_within(self) -> str:
        return ", max_priority_within_buffer=True" if self._within else ""

    @property
    def alpha(self) -> float:
        """The exponent of priorities."""
        return self._alpha

    @property
    def eps(self) -> float:
        """What is added to every priority."""
        return self._eps

    @property
    def adds(self) -> tuple[str, ...]:
        """The fields of a draw that rows cannot have."""
        return ("priority_weight",)

    @property
    def beta(self) -> Beta:
        """The exponent of the weights, or its schedule."""
        return self._beta

    @beta.setter
    def beta(self, beta: Beta) -> None:
        self._beta = beta if callable(beta) else weighing.check_number("beta", beta)

    @property
    def max_priority(self) -> float:
        """The priority of new rows: the largest so far, at least 1; or the largest that there is."""
        return self._max_priority

    def _set_largest(self, largest: float) -> None:
        bits = weighing.sums_of(weighing.narrowed(np.array([largest])), self._eps)
        self._weight_of_new = int(weighing.weights_of(bits, self._powers)[0])
        self._max_priority = largest

    def _set_largest_weight(self, weight: int) -> None:
        """New rows weigh as much as the heaviest there is; rows that replace others leave it as it is."""
        if not weight:  # or no row would ever be drawn
            self._set_largest(1.0)
            return
        self._weight_of_new = weight
        self._max_priority = max((weight / weighing.UNIT) ** (1 / self._alpha) - self._eps, 0.0) if self._alpha else 1.0

    @property
    def _powers(self) -> weighing.Powers:
        return weighing.powers(self._alpha)

    def _most(self, capacity: int) -> int:
        """What a row may weigh where there is room for so many."""
        return weighing.largest_weight(capacity, self._powers)

    def wrote(self, storage: Storage, write: Write) -> None:
        """The rows have the largest priority from now on."""
        slots, first, capacity = write.slots, write.first, storage.capacity
        if not len(slots):
            return
        if first is None or slots[0] != first % capacity or slots[-1] != (first + len(slots) - 1) % capacity:
            self._settle(storage).set(slots, min(self._weight_of_new, self._most(capacity)))
        elif first == self._end:
            self._end += len(slots)
        else:
            self._settle(storage)
            self._begin, self._end = first, first + len(slots)

    def reset(self, storage: Storage) -> None:
        """All rows are new, and no priority was ever set."""
        self._set_largest(1.0)
        self._tree = self._loaded = None
        self._end = storage.written
        self._size = len(storage)
        self._begin = self._end - self._size

    def grew(self, storage: Storage) -> None:
        """There is room for more rows; see ``Sampler``."""
        if self._tree is not None:
            self._tree = self._tree.grown(storage.capacity, self._most(storage.capacity))

    def dropped(self, storage: Storage, rows: int) -> None:
        """The first rows are gone, and those behind the others are new; see ``Sampler``.

        Of the priorities 5, 1, 3 of three rows, with the first of them gone and two more there, 1 and 3 are left, and
        the new ones have 5.
        """
        known = self._loaded if self._tree is None else self._tree.weights
        self._loaded = np.zeros(0, np.int64) if known is None else known[rows : self._begin].copy()
        self._tree, self._begin = None, len(self._loaded)
        self._end, self._size = storage.written, len(storage)
        if self._within:
            self._set_largest_weight(int(self._loaded.max(initial=0)))

    def _settle(self, storage: Storage) -> SumTree:
        """The tree, with the weights of all rows in it."""
        tree = self._tree
        if tree is None or tree.size != storage.capacity:
            tree = SumTree(storage.capacity)
            if self._loaded is not None:
                if len(self._loaded) > tree.size:
                    raise StateError(f"sampler: expected {tree.size} weights or fewer, found {len(self._loaded)}")
                tree.assign(np.minimum(self._loaded, self._most(tree.size)))
                self._loaded = None
            self._tree = tree
        self._add_new(tree)
        self._size = len(storage)
        return tree

    def _add_new(self, tree: SumTree) -> None:
        """Give the rows written since the last time their weights."""
        if self._begin == self._end:
            return
        weight = min(self._weight_of_new, self._most(tree.size))
        begin = max(self._begin, self._end - tree.size)
        for slot, _, count in ring_pieces(begin, self._end - begin, tree.size):
            if count == 1:
                tree.set(np.array([slot]), weight)
            else:
                tree.fill(slot, slot + count, weight)
        self._begin = self._end

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """``batch_size`` slots in proportion to their weights, and importance weights float32 ``[batch_size]``.

        Raises:
            ConfigError: The storage is empty, all weights are 0, or the schedule gives no usable beta.
        """
        if not len(storage):
            raise ConfigError("sample: expected rows, found an empty buffer")
        tree = self._settle(storage)
        index = draw_slots(tree, batch_size, key)
        return Draw(index, priority_weight=importance_weights(tree, index, beta_at(self._beta, key.index)))

    def update_priority(self, storage: Storage, index: Slots, priority: npt.NDArray[Any]) -> None:
        """Set the priorities of rows; of a slot that comes twice the last one counts.

        Args:
            storage: Where the rows are.
            index: Their slots, integers of any shape, as ``sample`` gives them in ``index``.
            priority: Numbers from 0, of the same shape, also with axes of length 1 behind it, or one for each slice:
                ``[B]`` or ``[B, 1]``.

        Raises:
            DataError: A priority that is negative, NaN or not finite in float32, or larger than so many rows may have.
            IndexError: A slot that is not in use.
            ConfigError: Shapes that do not go together, or an index that is not of integers.

        Nothing has changed after an error.
        """
        slots, weights, largest = self._checked(storage, index, priority)
        tree = self._settle(storage)
        tree.set(slots, weights)
        if self._within:
            self._set_largest_weight(int(tree.weights.max()))
        elif largest > self._max_priority:
            self._set_largest(largest)

    def check_update(self, storage: Storage, index: Slots | None, priority: npt.NDArray[Any]) -> None:
        """Raise what ``update_priority`` would; ``index`` None: of rows that are not written yet."""
        if index is None:
            weighing.weighed(np.asarray(priority), storage.capacity, self._alpha, self._eps)
        else:
            self._checked(storage, index, priority)

    def _checked(self, storage: Storage, index: Slots, priority: npt.NDArray[Any]) -> tuple[Slots, Int64s, float]:
        """Slots ``[n]``, their weights ``[n]`` and the largest priority of an update; raises as ``update_priority``."""
        slots = np.asarray(index)
        if slots.dtype.kind not in "iu":
            raise ConfigError(f"update_priority: expected integers as index, found {slots.dtype}")
        values = weighing.priorities_like(slots, priority)
        slots, rows = slots.reshape(-1).astype(np.int64, copy=False), len(storage)
        if slots.size and not (slots.min() >= 0 and slots.max() < rows):
            outside = slots[(slots < 0) | (slots >= rows)][0]
            raise RowIndexError(f"update_priority: expected slots in 0..{rows - 1}, found {outside}")
        weights = weighing.weighed(values, storage.capacity, self._alpha, self._eps).reshape(-1)
        return slots, weights, float(values.max(initial=0))

    def set_weights(self, storage: Storage, slots: Slots, weights: Floats) -> None:
        """Give rows weights that ``weights_at`` said, as where they were changed and stay as important."""
        self._settle(storage).set(slots, weighing.in_units(weights, self._most(storage.capacity)))

    def weights_at(self, storage: Storage, slots: Slots | slice) -> Floats:
        """``(priority + eps) ** alpha`` of the rows in ``slots``, float64 of the same shape, multiples of 2**-24."""
        return self._settle(storage).weights[slots] / weighing.UNIT

    def state_dict(self) -> dict[str, Any]:
        """The weights of all rows in units, the largest priority, and beta where it is a number."""
        if self._tree is not None:
            self._add_new(self._tree)
            weights = self._tree.weights[: max(self._size, self._end)].copy()
        else:
            weights = np.zeros(0, np.int64) if self._loaded is None else self._loaded
        numbers = {"max_priority": self.max_priority, "begin": self._begin, "end": self._end}
        beta = {} if callable(self._beta) else {"beta": self._beta}
        return {"config": self._config(), "version": _VERSION, "weights": weights, **numbers, **beta}

    def _config(self) -> str:
        schedule = "a schedule" if callable(self._beta) else "a number"
        return f"PrioritizedSampler(alpha={self.alpha}, beta={schedule}, eps={self.eps}{self._shown_within()})"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the priorities, and the beta, that ``state`` was taken with.

        Raises:
            StateError: The state is of another sampler or configuration, of a later version, or damaged; nothing has
                changed then.
        """
        kinds: dict[str, type | str] = {"weights": "i", "max_priority": float, "begin": int, "end": int, "version": int}
        if not callable(self._beta):
            kinds["beta"] = float
        values = check_state(state, {"config": self._config()}, kinds, self)
        if values["version"] != _VERSION:
            raise StateError(f"sampler: expected a state of version {_VERSION}, found {values['version']}")
        weights = values["weights"].astype(np.int64)
        if weights.size and weights.min() < 0:
            raise StateError("sampler: expected weights that are finite and not negative")
        lowest = 0 if self._within else 1
        if not (values["begin"] <= values["end"] and values["max_priority"] >= lowest):
            raise StateError(f"sampler: expected begin <= end, and max_priority from {lowest}")
        self._set_largest(values["max_priority"])
        if self._within and weights.size:
            self._set_largest_weight(int(weights.max()))
        self._tree, self._loaded = None, weights
        self._begin, self._end = values["begin"], values["end"]
        self._size = len(weights)
        self._beta = values.get("beta", self._beta)


def beta_at(beta: Beta, sample: int) -> float:
    """The exponent for sample number ``sample``.

    Raises:
        ConfigError: A schedule gives something else than a finite number from 0.
    """
    return weighing.check_number("beta", beta(sample)) if callable(beta) else beta
