"""Several specs as one with a dimension more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from mouse_core._base.checks import as_record
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.randomness import Key
from mouse_core.spec.composite import Composite, is_name
from mouse_core.spec.domain import MOST_VALUES, Domain
from mouse_core.spec.numbers import Unbounded
from mouse_core.spec.objects import NonTensor
from mouse_core.spec.shapes import Array, Change, Shape, check_axis, check_shape, operate, taken_rows

__all__ = ["Stacked", "check_no_exclusive_keys", "consolidate", "contains_lazy", "stack_specs"]


@dataclass(frozen=True, eq=False, repr=False)
class Stacked(Domain):
    """Specs that differ, one for each place of a dimension; ``stack_specs`` makes it where it has to.

    Where all have the same names, shapes and dtypes, and differ in what they allow only, it is *dense*: values are as
    those of one of them with the dimension more. Otherwise they are a tuple with the values of each.

    Args:
        specs: At least one, all of leaves of one dtype and number of dimensions, or all ``Composite`` of one shape.
        axis: Which dimension of ``shape`` it is.

    Raises:
        ConfigError: None, or specs that do not go together.
    """

    specs: Any
    axis: int = 0

    def __post_init__(self) -> None:
        specs = tuple(self.specs)
        _check_together(specs)
        axes = min((one._axes() for one in specs), key=len)
        object.__setattr__(self, "specs", specs)
        object.__setattr__(self, "axis", check_axis(self.axis, len(axes) + 1, where="stack"))

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The shape of a step: -1 where those of the specs differ."""
        shapes = [one.shape for one in self.specs]
        common = [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)]
        return (*common[: self.axis], len(self.specs), *common[self.axis :])

    @property
    def dtype(self) -> Any:
        """The dtype of the first spec, which all leaves share."""
        return self.specs[0].dtype

    @property
    def device(self) -> str | None:  # type: ignore[override]
        """The device of the first spec."""
        device: str | None = self.specs[0].device
        return device

    @property
    def is_dense(self) -> bool:
        """Whether values are arrays with one dimension more, and not a tuple with the values of each spec."""
        first = _layout(self.specs[0])
        return first is not None and all(_layout(one) == first for one in self.specs[1:])

    @property
    def cardinality(self) -> int | float:
        """How many different values a step can have: the product of those of the specs."""
        numbers = [one.cardinality for one in self.specs]
        return 0 if 0 in numbers else math.inf if math.inf in numbers else math.prod(numbers)

    def __getitem__(self, index: Any) -> Any:
        """The spec of what an index takes; by the name of a field that all of them have, the stack of its specs."""
        if is_name(index):
            for one in self.specs:
                if not _is_nested(one) or index not in one:
                    raise MissingFieldError(f"spec: expected a field {index!r} in all specs, found {one!r:.200}")
            return stack_specs([one[index] for one in self.specs], self.axis)
        return super().__getitem__(index)

    def __contains__(self, key: object) -> bool:
        if not is_name(key) or not _is_nested(self):
            return self.contains(key)
        return all(key in one for one in self.specs)

    # --- what a domain is asked -------------------------------------------------------------------------------------

    def project(self, values: Any) -> Any:
        """The values of the domain that are nearest to some values, spec by spec.

        Raises:
            DataError: Values of another kind or shape.
        """
        return self._each("project", values)

    def encode(self, values: Any) -> Any:
        """Values as each spec encodes them.

        Raises:
            DataError: Values that name nothing in the domain.
        """
        if isinstance(values, tuple | list) and len(values) == len(self.specs):
            return self._joined([one.encode(part) for one, part in zip(self.specs, values, strict=True)])
        return self._each("encode", values)

    def decode(self, values: Any) -> Any:
        """What each spec makes of its values, as a tuple: what ``encode`` takes.

        Raises:
            DataError: Values that are not in the domain.
        """
        return tuple(one.decode(part) for one, part in zip(self.specs, self._parts(values), strict=True))

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """All combinations of the values of the specs, those of the last side by side.

        Args:
            most: How many there may be.

        Raises:
            ConfigError: More than ``most``, or without number.
        """
        number = self.cardinality
        if isinstance(number, float) or number > most:
            raise ConfigError(f"enumerate: expected at most {most} values, found {number}")
        parts, before = [], 1
        for one in self.specs:
            before *= one.cardinality
            rows = np.tile(np.repeat(np.arange(one.cardinality), number // before), before // one.cardinality)
            parts.append(taken_rows(one.enumerate(most=most), rows))
        return self._joined(parts)

    def to(self, device: object) -> Self:
        """The same specs for another device: a label that adapters read."""
        return replace(self, specs=tuple(one.to(device) for one in self.specs))

    def astype(self, dtype: Any) -> Self:
        """The same domains with values of another dtype.

        Raises:
            ConfigError: A dtype that one of them does not have.
        """
        return replace(self, specs=tuple(one.astype(dtype) for one in self.specs))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _axes(self) -> Shape:
        own = max(len(one.shape) - len(one._axes()) for one in self.specs)
        return self.shape[: len(self.shape) - own]

    def _check_static(self, what: str) -> None:
        for one in self.specs:
            one._check_static(what)

    def _expansion(self, shape: Any) -> Change:
        target = check_shape(shape, where="expand")
        ending = target[len(target) - len(self.shape) :] if len(target) >= len(self.shape) else ()
        if any(size == -1 and wanted != -1 for size, wanted in zip(self.shape, ending, strict=False)):
            raise ConfigError(f"expand: expected -1 where the specs of the stack differ, {self.shape}, found {target}")
        return super()._expansion(shape)

    def _changed(self, change: Change, *, where: str) -> Any:
        # Each spec is given the whole shape and changed alike; numbers that are changed with them say whose values
        # are at which place.
        n = len(self.specs)
        numbers = np.arange(n).reshape(n, *(1,) * (len(self._axes()) - self.axis - 1))
        _, arrays = operate(self._axes(), {"numbers": numbers[(None,) * self.axis]}, change, where=where)
        whole = [one.unsqueeze(self.axis).expand(_with_size(one.shape, self.axis, n)) for one in self.specs]
        changed = [one._changed(change, where=where) for one in whole]
        return _picked(np.asarray(arrays["numbers"]), changed)

    def _parts(self, values: Any) -> list[Any]:
        """The values of each spec, or DataError."""
        n = len(self.specs)
        if not self.is_dense:
            if not isinstance(values, tuple | list) or len(values) != n:
                raise DataError(f"expected a tuple of the values of {n} specs, found {values!r:.80}")
            return list(values)
        layout = _layout(self.specs[0])
        return [_part(layout, values, self.axis, number, n) for number in range(n)]

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Values of each spec as values of all."""
        return _join(_layout(self.specs[0]), parts, self.axis) if self.is_dense else tuple(parts)

    def _each(self, what: str, values: Any) -> Any:
        parts = self._parts(values)
        return self._joined([getattr(one, what)(part) for one, part in zip(self.specs, parts, strict=True)])

    def _examined(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            parts = self._parts(values)
        except DataError as error:
            return str(error), None
        first: Shape | None = None
        for number, (one, part) in enumerate(zip(self.specs, parts, strict=True)):
            reason, batch = one._examined(part)
            if reason is None and batch is not None and first is not None and batch != first:
                reason = f"expected the batch {first} of those before it, found {batch}"
            if reason is not None:
                return f"spec {number} of the stack: {reason}", None
            first = batch if first is None else first
        return None, first

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        return self._joined([one._draw(key, (*path, number), batch) for number, one in enumerate(self.specs)])

    def _filled(self, number: int, batch: Shape) -> Any:
        return self._joined([one._filled(number, batch) for one in self.specs])

    def _said(self) -> dict[str, Any]:
        return {"type": "Stacked", "axis": self.axis, "specs": [one._said() for one in self.specs]}

    def _arrow_type(self) -> Any:
        import pyarrow as pa

        return pa.struct([one.to_arrow(str(number)) for number, one in enumerate(self.specs)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stacked):
            return NotImplemented
        return self.axis == other.axis and bool(self.specs == other.specs)

    def __hash__(self) -> int:
        return hash((self.axis, self.specs))

    def __repr__(self) -> str:
        return f"Stacked({list(self.specs)!r}, axis={self.axis})"


def stack_specs(specs: Sequence[Any], axis: int = 0) -> Any:
    """Several specs as one with a dimension more: of equal ones their own kind, otherwise ``Stacked``.

    ``unbind`` gives them back.

    Args:
        specs: At least one, all of leaves of one dtype and number of dimensions, or all ``Composite`` of one shape.
        axis: Where in the shape the new dimension is.

    Raises:
        ConfigError: None, or specs that do not go together.
    """
    stacked = Stacked(tuple(specs), axis)
    first = stacked.specs[0]
    if any(one != first for one in stacked.specs[1:]):
        return stacked
    return first.unsqueeze(stacked.axis).expand(_with_size(first.shape, stacked.axis, len(stacked.specs)))


def _check_together(specs: tuple[Any, ...]) -> None:
    if not specs:
        raise ConfigError("stack: expected at least one spec, found none")
    first = specs[0]
    for number, one in enumerate(specs):
        if not isinstance(one, Domain):
            raise ConfigError(f"stack: expected specs, found {one!r:.80}")
        if _is_nested(one) != _is_nested(first) or one.device != first.device:
            raise ConfigError(f"stack: expected specs of one kind and device, found {one!r:.80} as number {number}")
        if _is_nested(one):
            if one.shape != first.shape:
                raise ConfigError(f"stack: expected the shape {first.shape}, found {one.shape} as number {number}")
        elif one.dtype != first.dtype or len(one.shape) != len(first.shape):
            raise ConfigError(
                f"stack: expected {len(first.shape)} dimensions of {first.dtype}, found {one.shape} of {one.dtype} as "
                f"number {number}"
            )


def _is_nested(spec: Any) -> bool:
    """Whether values have fields: of a ``Composite``, and of a stack of them."""
    return isinstance(spec, Composite) or (isinstance(spec, Stacked) and _is_nested(spec.specs[0]))


def _layout(spec: Any) -> Any:
    """Shapes and dtypes of a spec's values, by name where they are nested; None where they are no arrays."""
    if isinstance(spec, Composite):
        layouts = {name: _layout(one) for name, one in spec.entries.items()}
        return None if None in layouts.values() else layouts
    if isinstance(spec, Stacked):
        return _widened(_layout(spec.specs[0]), spec.axis, len(spec.specs)) if spec.is_dense else None
    return None if spec.dtype == object or -1 in spec.shape else (spec.shape, spec.dtype)


def _widened(layout: Any, axis: int, n: int) -> Any:
    """What the values of a stack are, of specs with this layout."""
    if isinstance(layout, dict):
        return {name: _widened(one, axis, n) for name, one in layout.items()}
    shape, dtype = layout
    return ((*shape[:axis], n, *shape[axis:]), dtype)


def _with_size(shape: Shape, axis: int, n: int) -> Shape:
    return (*(-1,) * axis, n, *(-1,) * (len(shape) - axis))


def _picked(numbers: Array, specs: list[Any]) -> Any:
    """The spec that is at every place the one of a number."""
    if not numbers.size or bool((numbers == numbers.flat[0]).all()):
        return specs[int(numbers.flat[0]) if numbers.size else 0]
    axis = next(axis for axis in range(numbers.ndim) if bool((numbers != numbers.take([0], axis)).any()))
    places = range(numbers.shape[axis])
    at: Callable[[int], Any] = lambda place: (*(slice(None),) * axis, place)  # noqa: E731
    return stack_specs([_picked(numbers[at(place)], [one[at(place)] for one in specs]) for place in places], axis)


def _part(layout: Any, values: Any, axis: int, number: int, n: int) -> Any:
    """What the values of a dense stack have for one of its specs."""
    if isinstance(layout, dict):
        record = as_record(values)
        if record is None:
            raise DataError(f"expected fields by name, found {values!r:.80}")
        missing = next((name for name in layout if name not in record), None)
        if missing is not None:
            raise DataError(f"field {missing!r}: expected it, found {list(record)}")
        return {name: _part(one, record[name], axis, number, n) for name, one in layout.items()}
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"expected numbers in the host's memory, found {values!r:.80} ({error})") from error
    place = axis - len(layout[0]) - 1
    if array.ndim < -place or array.shape[place] != n:
        raise DataError(f"expected {n} places along axis {place}, found {array.shape}")
    return array.take(number, place)


def _join(layout: Any, parts: Sequence[Any], axis: int) -> Any:
    if isinstance(layout, dict):
        return {name: _join(one, [part[name] for part in parts], axis) for name, one in layout.items()}
    return np.stack([np.asarray(part) for part in parts], axis - len(layout[0]) - 1)


# --- fields that only some specs of a stack have ---


def contains_lazy(spec: Domain) -> bool:
    """Whether there is a ``Stacked`` in a spec."""
    if isinstance(spec, Composite):
        return any(contains_lazy(one) for one in spec.entries.values())
    return isinstance(spec, Stacked)


def check_no_exclusive_keys(spec: Domain) -> bool:
    """Whether in every ``Stacked`` of a spec all have the same fields."""
    if isinstance(spec, Composite):
        return all(check_no_exclusive_keys(one) for one in spec.entries.values())
    if not isinstance(spec, Stacked):
        return True
    names = {frozenset(_names(one)) for one in spec.specs}
    return len(names) == 1 and all(check_no_exclusive_keys(one) for one in spec.specs)


def consolidate(spec: Any) -> Any:
    """A spec in whose stacks all have the same fields: where one was missing, there is an empty one.

    An empty field has size 0 in every dimension behind those of its ``Composite``, and is ``Unbounded`` of the dtype
    that it has elsewhere, or ``NonTensor``; one without further dimensions has nothing to be 0, and is ``Unbounded``.
    """
    if isinstance(spec, Composite):
        return replace(spec, entries={name: consolidate(one) for name, one in spec.entries.items()})
    if not isinstance(spec, Stacked):
        return spec
    specs = [consolidate(one) for one in spec.specs]
    if all(isinstance(one, Composite) for one in specs):
        specs = _with_all_fields(specs)
    return stack_specs(specs, spec.axis)


def _names(spec: Any) -> set[str]:
    """The fields that a spec has, and all members of a stack."""
    if isinstance(spec, Stacked):
        return set.intersection(*map(_names, spec.specs))
    return set(spec.entries) if isinstance(spec, Composite) else set()


def _with_all_fields(specs: list[Any]) -> list[Any]:
    examples: dict[str, Any] = {}
    for one in specs:
        for name, entry in one.entries.items():
            examples.setdefault(name, entry)
    filled = []
    for one in specs:
        missing = {name: _empty_like(entry, one.shape) for name, entry in examples.items() if name not in one.entries}
        filled.append(one.with_fields(missing))
    nested = [name for name, entry in examples.items() if isinstance(entry, Composite)]
    for name in nested:
        parts = _with_all_fields([one.entries[name] for one in filled])
        filled = [replace(one, entries={**one.entries, name: part}) for one, part in zip(filled, parts, strict=True)]
    order = list(examples)
    return [replace(one, entries={name: one.entries[name] for name in order}) for one in filled]


def _empty_like(spec: Any, shape: Shape) -> Domain:
    if isinstance(spec, Composite):
        return Composite({}, shape)
    empty = (*shape, *(0,) * (len(spec.shape) - len(shape)))
    return NonTensor(empty) if spec.dtype == object else Unbounded(empty, spec.dtype)
