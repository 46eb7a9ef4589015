"""Specs of objects that are not numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mouse_core.errors import DataError
from mouse_core.randomness import Key
from mouse_core.spec.domain import MOST_VALUES, Shape, fits
from mouse_core.spec.leaf import Leaf, check_most, leaf_shape, set_all

__all__ = ["NonTensor"]


@dataclass(frozen=True, eq=False, repr=False)
class NonTensor(Leaf):
    """Any objects, such as texts.

    With shape ``()``, a value is any object, and a batch a list or an array of objects. With another shape, values are
    arrays of objects.

    Args:
        shape: Shape of a step; a size of -1 is dynamic.
        example: The value that ``sample``, ``zeros`` and ``ones`` return; by default None.
        device: A label for adapters.

    Raises:
        ConfigError: An invalid shape.
    """

    shape: Any = ()
    example: Any = None
    device: str | None = None

    def __post_init__(self) -> None:
        set_all(self, shape=leaf_shape(self.shape, where="NonTensor"))

    @property
    def dtype(self) -> Any:
        """NumPy's dtype of objects."""
        return np.dtype(object)

    @property
    def cardinality(self) -> int | float:
        """``math.inf``: there are infinitely many objects."""
        return math.inf

    def astype(self, dtype: Any) -> Self:
        """Return the spec unchanged: objects have no other dtype."""
        return self

    def project(self, values: Any) -> Any:
        """Check the shape of values and return them unchanged; ``encode`` and ``decode`` do the same.

        Raises:
            DataError: Values of another shape.
        """
        self.check(values)
        return values

    encode = project
    decode = project

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Raise ConfigError: there are infinitely many objects.

        Args:
            most: Highest allowed number of values; has no effect.

        Raises:
            ConfigError: Always.
        """
        return check_most(self, most)

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            self._as_array(values)
        except DataError as error:
            return str(error), None
        has_batch = self.shape and hasattr(values, "shape")
        return None, tuple(values.shape[: len(values.shape) - len(self.shape)]) if has_batch else None

    def _as_array(self, values: Any, *, any_numbers: bool = False) -> Any:
        if not self.shape:
            return values
        shape = tuple(values.shape) if hasattr(values, "shape") else _nested_sizes(values, len(self.shape))
        if not fits(shape, self.shape):
            raise DataError(f"expected a shape that ends in {self.shape}, found {shape}")
        return values

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        return self._filled(0, batch)

    def _filled(self, number: int, batch: Shape) -> Any:
        shape = (*batch, *self.shape)
        if not shape:
            return self.example
        values = np.empty(shape, object)
        for place in np.ndindex(shape):
            values[place] = self.example
        return values

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.shape, self.device))


def _nested_sizes(values: Any, most: int) -> tuple[int, ...]:
    """Return the sizes of nested lists, at most ``most`` levels deep."""
    sizes: tuple[int, ...] = ()
    while isinstance(values, list | tuple) and len(sizes) < most:
        sizes += (len(values),)
        values = values[0] if values else None
    return sizes
