"""Specs of what is no number."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mouse_core.errors import ConfigError, DataError
from mouse_core.randomness import Key
from mouse_core.spec.domain import MOST_VALUES
from mouse_core.spec.leaf import Leaf, check_most, leaf_shape, set_all
from mouse_core.spec.shapes import Shape, fits

__all__ = ["NonTensor"]


@dataclass(frozen=True, eq=False, repr=False)
class NonTensor(Leaf):
    """Any objects: texts, for instance.

    Values of shape ``()`` are any object, or, of a batch, a list or an array of objects; of another shape they are
    arrays of objects.

    Args:
        shape: Of a step; a size of -1 is dynamic.
        example: What ``sample``, ``zeros`` and ``ones`` give; by default None.
        device: A label that adapters read.

    Raises:
        ConfigError: Another shape.
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
        """``math.inf``: objects are without number."""
        return math.inf

    def astype(self, dtype: Any) -> Self:
        """The same spec: objects have no other dtype."""
        return self

    def project(self, values: Any) -> Any:
        """The values as they are.

        Raises:
            DataError: Values of another shape.
        """
        self.check(values)
        return values

    def encode(self, values: Any) -> Any:
        """The values as they are.

        Raises:
            DataError: Values of another shape.
        """
        self.check(values)
        return values

    def decode(self, values: Any) -> Any:
        """The values as they are.

        Raises:
            DataError: Values of another shape.
        """
        self.check(values)
        return values

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Refused: objects are without number.

        Args:
            most: How many there may be.

        Raises:
            ConfigError: Always.
        """
        return check_most(self, most)

    def _examined(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            self._taken(values)
        except DataError as error:
            return str(error), None
        known = self.shape and hasattr(values, "shape")
        return None, tuple(values.shape[: len(values.shape) - len(self.shape)]) if known else None

    def _taken(self, values: Any, *, any_numbers: bool = False) -> Any:
        if not self.shape:
            return values
        found = values.shape if hasattr(values, "shape") else _nesting(values, len(self.shape))
        if not fits(tuple(found), self.shape):
            raise DataError(f"expected a shape that ends in {self.shape}, found {tuple(found)}")
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

    def _said(self) -> dict[str, Any]:
        said = super()._said()
        try:
            if json.loads(json.dumps(self.example)) == self.example:
                return said
        except (TypeError, ValueError):
            pass
        raise ConfigError(f"to_json: expected an example that JSON has, found {self.example!r:.80} in NonTensor")

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.shape, self.device))


def _nesting(values: Any, most: int) -> tuple[int, ...]:
    """The sizes of lists in lists, so many at most."""
    sizes: tuple[int, ...] = ()
    while isinstance(values, list | tuple) and len(sizes) < most:
        sizes += (len(values),)
        values = values[0] if values else None
    return sizes
