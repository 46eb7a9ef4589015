"""The report of a comparison of two implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mouse_study.divergence.models import Array

Stage = Literal[
    "initial weights", "forward", "layer alone", "loss", "gradients", "statistics", "update", "later updates"
]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Difference:
    """The difference between the two implementations in one tensor.

    Args:
        stage: The stage that was compared: "layer alone" runs Flax's layer on the input of PyTorch's layer, "update" is
            the optimizers' first step from the same gradients, "later updates" are the steps after it.
        tensor: The tensor, by the layer's path in PyTorch; for later updates with the number of the update.
        absolute: The largest difference of two values.
        scale: The largest value; for gradients at least a thousandth of the largest gradient of all tensors.
        tolerance: The largest difference that rounding explains, relative to ``scale``.
    """

    stage: Stage
    tensor: str
    absolute: float
    scale: float
    tolerance: float

    @property
    def relative(self) -> float:
        """The largest difference in parts of ``scale``."""
        return self.absolute / self.scale if self.scale else float(self.absolute > 0)

    @property
    def beyond(self) -> bool:
        """Whether it is more than rounding."""
        return not self.relative <= self.tolerance

    def __str__(self) -> str:
        return f"{self.stage}: {self.tensor}: {self.relative:.1e} apart, where rounding makes {self.tolerance:.0e}"


def difference(
    stage: Stage, tensor: str, ours: Array, theirs: Array, tolerance: float, *, least: float = 0.0
) -> Difference:
    """Compare two arrays; the difference is infinite if shapes differ or only one has NaNs."""
    if ours.shape != theirs.shape:
        return Difference(stage, tensor, float("inf"), 1.0, tolerance)
    with np.errstate(invalid="ignore"):
        if ours.dtype.kind == "f" and np.isfinite(most := largest(ours - theirs)):  # so all values are
            return Difference(stage, tensor, most, max(largest(ours), least), tolerance)
        if not np.array_equal(np.isnan(ours), np.isnan(theirs)):
            return Difference(stage, tensor, float("inf"), 1.0, tolerance)
        both = ~np.isnan(ours)
        apart = np.where(ours == theirs, 0.0, np.abs(ours - theirs))[both]
    finite = np.abs(ours[both])
    scale = max(float(finite[np.isfinite(finite)].max(initial=0)), least)
    return Difference(stage, tensor, float(apart.max(initial=0)), scale, tolerance)


def largest(values: Array) -> float:
    """The largest value, sign aside; NaN if one is."""
    return float(max(values.max(initial=0), -values.min(initial=0)))


@dataclass(frozen=True)
class Cause:
    """Something known that makes implementations differ, and that a check of these two found.

    Args:
        name: What it is.
        where: In which layer, tensor or part.
        torch: What PyTorch's does there.
        flax: What Flax's does.
        size: How far apart it was seen to make a tensor, in parts of its largest value; None where that is not known.
    """

    name: str
    where: str
    torch: str
    flax: str
    size: float | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.where}: {self.torch} in PyTorch, {self.flax} in Flax"


@dataclass(frozen=True)
class Comparison:
    """The compared tensors, in the order of a training step, and the known causes of their differences.

    Args:
        compared: The tensors.
        causes: The known causes of differences.
        unaligned: Outputs that were not compared, because their shapes do not correspond.
    """

    compared: tuple[Difference, ...]
    causes: tuple[Cause, ...]
    unaligned: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences beyond rounding."""
        return tuple(one for one in self.compared if one.beyond)

    @property
    def first(self) -> Difference | None:
        """The first one beyond rounding."""
        return next(iter(self.differences), None)

    def of(self, stage: Stage) -> tuple[Difference, ...]:
        """The tensors of one stage, within rounding or not."""
        return tuple(one for one in self.compared if one.stage == stage)

    def __str__(self) -> str:
        lines = [f"first: {self.first}" if self.first else self._agreed()]
        lines += [line for stage in STAGES if (line := self._line(stage))]
        lines += [f"not compared, for its shape: {one}" for one in self.unaligned[:6]]
        small = tuple(cause for cause in self.causes if self._too_small(cause))
        large = tuple(cause for cause in self.causes if cause not in small)
        lines += [f"cause: {line}" for line in _grouped(large)]
        if self.first and not large:
            lines.append("cause: none of those that are known")
        lines += [
            f"also, but far too small to be the cause of the first in forward: {line}" for line in _grouped(small)
        ]
        return "\n".join(lines)

    def _agreed(self) -> str:
        agreed = "no tensor differs by more than rounding"
        return agreed if self.of("forward") else "no layer was seen; of what was compared " + agreed

    def _line(self, stage: Stage) -> str:
        """Report how many tensors of a stage differ, and the worst one; empty if the stage has no tensors."""
        found = self.of(stage)
        if not found:
            unseen = "forward: no layer could be looked at; does the loss call a compiled function?"
            return unseen if stage == "forward" else ""
        parted = [one for one in found if one.beyond]
        worst = max(found, key=lambda one: one.relative if one.relative == one.relative else float("inf"))
        since = f", from {parted[0].tensor} on" if parted else ""
        most = f"the most is {worst.relative:.1e} in {worst.tensor}"
        return f"{stage}: {len(parted)} of {len(found)} tensors part{since}; {most}"

    def _too_small(self, cause: Cause) -> bool:
        """Whether what it makes is less than a tenth of the first difference of the forward pass."""
        first = next((one for one in self.of("forward") if one.beyond), None)
        return first is not None and cause.size is not None and cause.size < 0.1 * first.relative


def _grouped(causes: tuple[Cause, ...]) -> list[str]:
    """A line for each, and one for those that are the same in several places."""
    places: dict[tuple[str, str, str], list[Cause]] = {}
    for cause in causes:
        places.setdefault((cause.name, cause.torch, cause.flax), []).append(cause)
    return [f"{alike[0]}" + f"; and in {len(alike) - 1} more places" * (len(alike) > 1) for alike in places.values()]
