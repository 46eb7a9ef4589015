"""The distribution of one random number a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mouse_core.augment._checks import check_number
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key


@dataclass(frozen=True)
class AugmentScalarSpec:
    """The distribution of one random scalar a batch: uniform on ``[low, high)`` if both are given, else Gaussian.

    Args:
        mean: Mean of the Gaussian; may be left out where ``low`` and ``high`` are given, and does nothing there.
        std: Standard deviation of the Gaussian, at least 0; with 0 the scalar is ``mean``.
        low: Lowest value of the uniform distribution.
        high: End of the uniform distribution, itself excluded; with ``low == high`` the scalar is that value.

    Raises:
        ConfigError: Only one bound, ``low > high``, a negative ``std``, a number that is not finite, or neither
            bounds nor ``mean``.
    """

    mean: float | None = None
    std: float = 0.0
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std", "low", "high"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_number(f"AugmentScalarSpec: {name}", value))
        if (self.low is None) != (self.high is None):
            raise ConfigError(
                f"AugmentScalarSpec: expected both low and high or neither, found low={self.low}, high={self.high}"
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(f"AugmentScalarSpec: expected low <= high, found low={self.low}, high={self.high}")
        if self.std < 0:
            raise ConfigError(f"AugmentScalarSpec: expected std of at least 0, found {self.std}")
        if self.low is None and self.mean is None:
            raise ConfigError("AugmentScalarSpec: expected mean, or low and high, found neither")

    def is_always(self, value: float) -> bool:
        """Whether every draw is ``value``."""
        if self.low is not None:
            return self.low == self.high == value
        return self.std == 0 and self.mean == value

    def draw(self, key: Key) -> float:
        """The scalar of a key."""
        if self.low is not None and self.high is not None:
            if self.low == self.high:
                return self.low
            drawn = self.low + (self.high - self.low) * float(key.uniform(1)[0])
            return min(drawn, math.nextafter(self.high, self.low))
        mean = self.mean or 0.0
        return mean if self.std == 0 else mean + self.std * float(key.normal(1)[0])
