"""Specs whose values come from any of several specs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, DataError
from mouse_core.randomness import Key
from mouse_core.spec.domain import MOST_VALUES, Array, Change, Shape, key_of, whole_numbers
from mouse_core.spec.leaf import Leaf, alike, check_most, set_all, shown
from mouse_core.spec.objects import NonTensor

__all__ = ["Choice"]


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Leaf):
    """The union of several specs: each row has a value of one of them.

    A ``NonTensor`` in ``choices`` has its example as its only value.

    Args:
        choices: At least one spec of one array, all of one shape and dtype.
        device: A label for adapters.

    Raises:
        ConfigError: No spec, an object that is not a spec of one array, or specs of different shapes or dtypes.
    """

    choices: Any
    device: str | None = None

    def __post_init__(self) -> None:
        choices = self.choices
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
            raise ConfigError(f"Choice: expected a list of specs, found {choices!r:.80}")
        for one in choices:
            if not isinstance(one, Leaf):
                raise ConfigError(f"Choice: expected specs of one array, found {one!r:.80}")
            if one.shape != choices[0].shape or one.dtype != choices[0].dtype:
                raise ConfigError(
                    f"Choice: expected specs of {choices[0].dtype} and the shape {choices[0].shape}, found {one!r:.80}"
                )
        set_all(self, choices=tuple(choices))

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The shape of a step."""
        shape: Shape = self.choices[0].shape
        return shape

    @property
    def dtype(self) -> Any:
        """The dtype of values."""
        return self.choices[0].dtype

    @property
    def cardinality(self) -> int | float:
        """Number of values of all choices; a value of several choices counts for each."""
        return sum(1 if isinstance(one, NonTensor) else one.cardinality for one in self.choices)

    def astype(self, dtype: Any) -> Self:
        """Return the same choices with another dtype of values.

        Raises:
            ConfigError: A dtype that does not hold one of the choices.
        """
        return replace(self, choices=tuple(one.astype(dtype) for one in self.choices))

    def to(self, device: object) -> Self:
        """Return the spec with another device: a label for adapters."""
        return replace(super().to(device), choices=tuple(one.to(device) for one in self.choices))

    def project(self, values: Any) -> Any:
        """Return the nearest value of any choice, row by row; values of a choice are returned unchanged.

        Raises:
            DataError: Values of another kind or shape, or an object that is not a choice.
        """
        if self._is_of_objects:
            self.check(values)
            return values
        array = self.choices[0]._as_array(values, any_numbers=True)
        axes = tuple(range(array.ndim - len(self.shape), array.ndim))
        nearest = [one._nearest(array) for one in self.choices]
        distances = np.stack([np.abs(one.astype(np.float64) - array.astype(np.float64)).sum(axes) for one in nearest])
        return self._picked(np.nan_to_num(distances).argmin(0), nearest)

    def encode(self, values: Any) -> Any:
        """Convert numbers of choices, from 0, to values. Each choice must have one value.

        Args:
            values: Numbers of choices, ``[*batch]``.

        Raises:
            ConfigError: A choice with several values.
            DataError: A number out of range.
        """
        numbers = to_numpy(values)
        if numbers.dtype.kind not in "iu" or bool(((numbers < 0) | (numbers >= len(self.choices))).any()):
            raise DataError(f"expected numbers from 0 to {len(self.choices) - 1}, found {shown(numbers)}")
        several = next((one for one in self.choices if one.cardinality != 1 and not isinstance(one, NonTensor)), None)
        if several is not None:
            raise ConfigError(f"encode: expected choices of one value, found {several!r:.80}")
        if self._is_of_objects and not numbers.ndim:
            return self.choices[int(numbers)].example
        return self._picked(numbers, [self._only_value(one, numbers.shape) for one in self.choices])

    def decode(self, values: Any) -> Any:
        """Convert values to the number of the first choice that contains each row, int64 ``[*batch]``.

        Raises:
            DataError: A value that is in no choice.
        """
        return self._numbers(values if self._is_of_objects else self.choices[0]._as_array(values))

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the first choice, then those of the second, and so on.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: More than ``most`` values, or infinitely many.
        """
        check_most(self, most)
        parts = [one._filled(0, (1,)) if isinstance(one, NonTensor) else one.enumerate() for one in self.choices]
        return np.concatenate(parts)

    @property
    def _is_of_objects(self) -> bool:
        return bool(self.dtype == object)

    def _only_value(self, choice: Any, batch: Shape) -> Array:
        if isinstance(choice, NonTensor):
            objects: Array = choice._filled(0, batch)
            return objects
        return np.broadcast_to(choice.enumerate()[0], (*batch, *self.shape))

    def _numbers(self, values: Any) -> Array:
        """Return the number of each row's choice; raises DataError for a row in no choice."""
        if self._is_of_objects:
            numbers = self._numbers_of_objects(values)
        else:
            array = self.choices[0]._as_array(values, any_numbers=True)
            inside = np.stack([one._fits_by_row(array) for one in self.choices])
            numbers = np.where(inside.any(0), inside.argmax(0), -1)
        if (numbers < 0).any():
            row = np.argwhere(numbers < 0)[0].tolist() if numbers.ndim else []
            where = f"row {row[0] if len(row) == 1 else tuple(row)}: " if row else ""
            value = np.asarray(values, self.dtype)[tuple(row)]
            raise DataError(f"{where}expected one of {list(self.choices)!r:.200}, found {shown(value)}")
        return numbers

    def _numbers_of_objects(self, values: Any) -> Array:
        examples = [one.example for one in self.choices]
        is_batch = isinstance(values, list) or (isinstance(values, np.ndarray) and values.ndim > 0)
        items = list(np.asarray(values, object).flat) if is_batch else [values]
        numbers = [next((k for k, one in enumerate(examples) if alike(one, item)), -1) for item in items]
        return np.array(numbers, np.int64).reshape(np.shape(values) if is_batch else ())

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            numbers = self._numbers(values if self._is_of_objects else self.choices[0]._as_array(values))
        except DataError as error:
            return str(error), None
        return None, None if self._is_of_objects else numbers.shape

    def _why_not(self, array: Array) -> str | None:
        try:
            self._numbers(array)
        except DataError as error:
            return str(error)
        return None

    def _as_array(self, values: Any, *, any_numbers: bool = False) -> Any:
        return self.choices[0]._as_array(values, any_numbers=any_numbers)

    def _fits_by_row(self, array: Array) -> Array:
        return np.asarray(np.stack([one._fits_by_row(array) for one in self.choices]).any(0))

    def _outside(self, array: Array) -> Array:
        return ~self._fits_by_row(array)

    def _nearest(self, array: Array) -> Array:
        projected: Array = self.project(array)
        return projected

    def _picked(self, numbers: Array, alternatives: list[Array]) -> Array:
        """Return the row of ``alternatives[number]`` for each row's number."""
        picked = np.zeros_like(alternatives[0])
        for number, values in enumerate(alternatives):
            chosen = (numbers == number).reshape(numbers.shape + (1,) * (picked.ndim - numbers.ndim))
            picked = np.where(chosen, values, picked)
        return picked.astype(self.dtype)

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        most = np.array(len(self.choices) - 1)
        numbers = whole_numbers(key_of(key, (*path, "choice")), np.zeros_like(most), most, batch)
        drawn = [one._draw(key, (*path, number), batch) for number, one in enumerate(self.choices)]
        return drawn[int(numbers)] if not batch else self._picked(numbers, drawn)

    def _filled(self, number: int, batch: Shape) -> Any:
        return self.choices[0]._filled(number, batch)

    def _changed(self, change: Change, *, where: str) -> Self:
        if len({one._axes() for one in self.choices}) > 1:
            raise ConfigError(f"{where}: expected choices of which each has the same axes, found {self!r:.200}")
        return replace(self, choices=tuple(one._changed(change, where=where) for one in self.choices))

    def _axes(self) -> Shape:
        axes: Shape = self.choices[0]._axes()
        return axes

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.choices, self.device))
