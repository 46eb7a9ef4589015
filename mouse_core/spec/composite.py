"""Specs of nested fields by name, stacks of specs, and the specs of batches.

A stack of equal specs is a spec of the same kind with one more dimension. A stack of different specs is a ``Stacked``,
which keeps each spec. For indexing, ``reshape`` and other operations on axes, ``Stacked`` applies the operation to an
array of the specs' indices; the resulting array contains the new position of each spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self, TypeGuard

import numpy as np

from mouse_core._base.checks import UNREADABLE, as_record, is_text, without_version
from mouse_core.dtypes import is_number
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.nested import FieldKey, flatten, path_of
from mouse_core.randomness import Key
from mouse_core.spec.arrays import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
    as_array,
    check_most,
)
from mouse_core.spec.domain import MOST_VALUES, VERSION, Array, Change, Domain, Shape, check_axis, check_shape, operate

__all__ = ["Composite", "Stacked", "consolidate", "from_batch", "from_json", "of_fields", "stack_specs"]
__all__ += ["check_no_exclusive_keys", "contains_lazy"]


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Domain, Mapping[str, Any]):
    """A mapping of names to specs, nested like the fields of rows.

    An index that is a tuple of names, as in ``composite["next", "reward"]``, returns a nested entry. Any other index,
    as in ``composite[0]``, indexes the axes of ``shape`` in every entry.

    Args:
        entries: Specs by name. A dict becomes a ``Composite`` of the same shape; a tuple of names is a nested entry.
        shape: Common first dimensions of all entries, such as the number of environments.
        device: A label for adapters; by default entries keep their own labels.

    Raises:
        ConfigError: A name is invalid, an entry is not a spec, or an entry has another shape.
    """

    entries: Any = field(default_factory=dict)
    shape: Any = ()
    device: str | None = None

    def __post_init__(self) -> None:
        shape = check_shape(self.shape, where="Composite")
        if not isinstance(self.entries, Mapping):
            raise ConfigError(f"Composite: expected specs by name, found {self.entries!r:.80}")
        device = None if self.device is None else str(self.device)
        entries: dict[str, Domain] = {}
        for key, one in self.entries.items():
            _put(entries, _checked_names(key), one, shape)
        for name, one in entries.items():
            if one.shape[: len(shape)] != shape:
                raise ConfigError(
                    f"Composite: field {name!r}: expected a shape that begins with {shape}, found {one.shape}"
                )
        if device is not None:
            entries = {name: one.to(device) for name, one in entries.items()}
        for attribute, value in {"entries": MappingProxyType(entries), "shape": shape, "device": device}.items():
            object.__setattr__(self, attribute, value)

    # --- entries ------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """If ``index`` is a name, return the entry with this name. Otherwise, return the spec of values that are
        indexed with ``index`` along the axes of ``shape``.
        """
        if not is_name(index):
            return super().__getitem__(index)
        found: Any = self
        for name in path_of(index):
            entries = found.entries if isinstance(found, Composite) else {}
            if name not in entries:
                raise MissingFieldError(f"spec: expected a field {index!r}, found {list(self.leaves())}")
            found = entries[name]
        return found

    def __contains__(self, key: object) -> bool:
        """Whether an entry has the name ``key``; if ``key`` is not a name, whether the domain contains these values."""
        if not is_name(key):
            return self.contains(key)
        found: Any = self
        for name in path_of(key):
            if not isinstance(found, Composite) or name not in found.entries:
                return False
            found = found.entries[name]
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def leaves(self) -> dict[FieldKey, Any]:
        """Return the specs that are not a ``Composite``, by name: ``"reward"``, or ``("next", "reward")`` if nested."""
        found: dict[FieldKey, Any] = {}
        for name, one in self.entries.items():
            if isinstance(one, Composite):
                found |= {(name, *path_of(key)): leaf for key, leaf in one.leaves().items()}
            else:
                found[name] = one
        return found

    def with_fields(self, fields: Mapping[FieldKey, Any]) -> Self:
        """Return the spec with entries added or replaced; a ``Composite`` is merged into an entry of the same name.

        Raises:
            ConfigError: A name is invalid, an entry is not a spec, or an entry has another shape.
        """
        entries = dict(self.entries)
        for key, one in fields.items():
            _put(entries, _checked_names(key), one, self.shape)
        return replace(self, entries=entries)

    def without(self, *keys: FieldKey) -> Self:
        """Return the spec without some entries.

        Raises:
            MissingFieldError: A name has no entry.
        """
        entries = dict(self.entries)
        for key in keys:
            first, *rest = path_of(key)
            if key not in self:
                raise MissingFieldError(f"spec: expected a field {key!r}, found {list(self.leaves())}")
            if not rest:
                entries.pop(str(first), None)
            elif str(first) in entries:
                entries[str(first)] = entries[str(first)].without(tuple(rest))
        return replace(self, entries=entries)

    # --- values -------------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        """The dtypes of entries by name."""
        return {name: one.dtype for name, one in self.entries.items()}

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step: the product over the entries."""
        numbers = [one.cardinality for one in self.entries.values()]
        return 0 if 0 in numbers else math.inf if math.inf in numbers else math.prod(numbers)

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all combinations of the fields' values, ``[cardinality, *shape]`` each; the last field varies fastest.

        Args:
            most: Highest allowed number of combinations.

        Raises:
            ConfigError: There are more than ``most`` combinations, or infinitely many.
        """
        number = check_most(self, most)
        counts = [one.cardinality for one in self.entries.values()]
        # Example: with fields of 2 and 3 values, combination 4 has value 1 of the first field and value 1 of the
        # second.
        places = np.unravel_index(np.arange(number), counts) if counts else ()
        entries = zip(self.entries.items(), places, strict=True)
        return {name: _rows(one.enumerate(most=most), rows) for (name, one), rows in entries}

    def to(self, device: object) -> Self:
        """Return a copy in which the spec and all entries have another device. The device is only a label for adapters;
        None removes the label.
        """
        label = None if device is None else str(device)
        return replace(self, entries={name: one.to(label) for name, one in self.entries.items()}, device=label)

    def astype(self, dtype: Any) -> Self:
        """Return the same domains with another dtype of values.

        Raises:
            ConfigError: The dtype cannot represent all values of one of the domains.
        """
        return replace(self, entries={name: one.astype(dtype) for name, one in self.entries.items()})

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _check_static(self, what: str) -> None:
        super()._check_static(what)
        for one in self.entries.values():
            one._check_static(what)

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        first: tuple[FieldKey, Shape] | None = None
        for key, leaf in self.leaves().items():
            try:
                reason, batch = leaf._problem(_value(values, key))
            except MissingFieldError as error:
                return str(error), None
            if reason is not None:
                return f"field {key!r}: {reason}", None
            if batch is not None and first is not None and batch != first[1]:
                return f"field {key!r}: expected the batch shape {first[1]} of field {first[0]!r}, found {batch}", None
            first = (key, batch) if first is None and batch is not None else first
        return None, first[1] if first else None

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        return {name: one._draw(key, (*path, name), batch) for name, one in self.entries.items()}

    def _filled(self, number: int, batch: Shape) -> Any:
        return {name: one._filled(number, batch) for name, one in self.entries.items()}

    def _each(self, method: str, values: Any, path: tuple[str, ...] = ()) -> Any:
        results = {}
        for name, one in self.entries.items():
            if isinstance(one, Composite):
                results[name] = one._each(method, values, (*path, name))
                continue
            key: FieldKey = (*path, name) if path else name
            try:
                results[name] = getattr(one, method)(_value(values, key))
            except MissingFieldError as error:
                raise DataError(str(error)) from error
            except DataError as error:
                raise DataError(f"field {key!r}: {error}") from error
        return results

    def _changed(self, change: Change, *, where: str) -> Self:
        ndim = len(self.shape)
        shape, _ = operate(self.shape, {}, change, where=where)
        entries = {name: one._changed(lambda array, _: change(array, ndim), where=where) for name, one in self.items()}
        return replace(self, entries=entries, shape=shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composite):
            return NotImplemented
        same = self.shape == other.shape and self.device == other.device
        return same and dict(self.entries) == dict(other.entries)

    def __hash__(self) -> int:
        return hash((self.shape, self.device, frozenset(self.entries.items())))

    def __repr__(self) -> str:
        entries = ", ".join(f"{name!r}: {one!r}" for name, one in self.entries.items())
        device = "" if self.device is None else f", device={self.device!r}"
        return f"Composite({{{entries}}}, shape={self.shape}{device})"

    def __reduce__(self) -> Any:
        return type(self), (dict(self.entries), self.shape, self.device)


def _checked_names(key: Any) -> tuple[str, ...]:
    if is_name(key) and all(map(is_text, (key,) if isinstance(key, str) else key)):
        return (key,) if isinstance(key, str) else key
    raise ConfigError(f"Composite: expected names of fields as Unicode texts, or tuples of them, found {key!r:.80}")


def is_name(key: object) -> TypeGuard[str | tuple[str, ...]]:
    """Whether ``key`` is a name, or a tuple of names, which is the path of a nested field."""
    names = (key,) if isinstance(key, str) else key
    return isinstance(names, tuple) and bool(names) and all(isinstance(name, str) for name in names)


def _put(entries: dict[str, Domain], names: tuple[str, ...], spec: Any, shape: Shape) -> None:
    """Add a spec to ``entries`` under a path of names; merge a ``Composite`` with an existing entry of that name."""
    first, *rest = names
    present = entries.get(first)
    if rest:
        inner = present if isinstance(present, Composite) else Composite({}, shape)
        entries[first] = inner.with_fields({tuple(rest): spec})
        return
    if isinstance(spec, Mapping) and not isinstance(spec, Domain):
        spec = Composite(spec, shape)
    if not isinstance(spec, Domain):
        raise ConfigError(f"Composite: field {first!r}: expected a spec, found {spec!r:.80}")
    both = isinstance(present, Composite) and isinstance(spec, Composite)
    entries[first] = present.with_fields(spec.entries) if both else spec  # type: ignore[union-attr, attr-defined]


def _value(values: Any, key: FieldKey) -> Any:
    """Return a field of nested dicts, TensorDicts, dataclasses or named tuples; raise MissingFieldError if the field
    does not exist.
    """
    value = values
    for name in path_of(key):
        record = as_record(value)
        if record is None or name not in record:
            present = f"{values!r:.80}" if record is None else f"{list(record)}"
            raise MissingFieldError(f"field {key!r}: expected this field, found {present}")
        value = record[str(name)]
    return value


def _rows(values: Any, rows: Array) -> Any:
    """Return some rows of arrays that are nested in dicts and tuples."""
    if isinstance(values, dict):
        return {name: _rows(one, rows) for name, one in values.items()}
    return tuple(_rows(one, rows) for one in values) if isinstance(values, tuple) else values[rows]


def from_batch(batch: Any, *, batch_dims: int = 2) -> Composite:
    """Return the spec of one step of a batch: ``Unbounded`` for numbers, ``NonTensor`` for other objects.

    Args:
        batch: Nested dicts of arrays.
        batch_dims: Number of axes before the axes of a step: 2 for ``[B, S, ...]``.

    Raises:
        ConfigError: A field has fewer axes than ``batch_dims``.
        SchemaError: The batch has no fields.
    """
    entries: dict[FieldKey, Domain] = {}
    for key, values in flatten(batch).items():
        array = np.asarray(values)
        if array.ndim < batch_dims:
            raise ConfigError(f"from_batch: field {key!r}: expected {batch_dims} axes, found {array.shape}")
        shape = array.shape[batch_dims:]
        if is_number(array.dtype) and array.dtype.kind != "c":
            entries[key] = Unbounded(shape, array.dtype)
        else:
            entries[key] = NonTensor(shape, array.flat[0] if array.size else None)
    return Composite(entries)


def of_fields(fields: Iterable[Any], columns: Mapping[str, Any]) -> Composite:
    """Return the spec of a step of a batch with these fields; fields with ``per_sequence`` are left out.

    A field has the spec of its column, if this spec has the same number of elements, and the field's dtype can
    represent the spec's values. Any other field is ``Unbounded``.

    Args:
        fields: A ``FieldSpec`` for each field.
        columns: Specs of columns by name.
    """
    entries: dict[FieldKey, Domain] = {}
    for one in fields:
        if one.per_sequence:
            continue
        spec: Any = columns.get(one.column) if one.column else None
        entries[one.name] = Unbounded(one.shape, one.dtype)
        is_array = spec is not None and spec.dtype != object and -1 not in spec.shape
        if is_array and math.prod(spec.shape) == math.prod(one.shape):
            with suppress(ConfigError):  # the column's values do not fit the field's shape or dtype
                entries[one.name] = spec.reshape(one.shape).astype(one.dtype)
    return Composite(entries)


@dataclass(frozen=True, eq=False, repr=False)
class Stacked(Domain):
    """Different specs along a dimension, one for each index; the result of ``stack_specs``.

    A stack is *dense* if its specs have the same names, shapes and dtypes: values are then arrays with one more
    dimension. If a stack is not dense, its values are a tuple with the values of each spec.

    Args:
        specs: One or more specs. Either all are specs of one array, with the same dtype and number of dimensions; or
            all are ``Composite``, with the same ``shape``.
        axis: The position of the new dimension in ``shape``.

    Raises:
        ConfigError: There is no spec, or the specs cannot be stacked.
    """

    specs: Any
    axis: int = 0

    def __post_init__(self) -> None:
        specs = tuple(self.specs)
        _check_stackable(specs)
        axes = min((one._axes() for one in specs), key=len)
        object.__setattr__(self, "specs", specs)
        object.__setattr__(self, "axis", check_axis(self.axis, len(axes) + 1, where="stack"))

    # --- shape and size -----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The shape of a step; -1 for sizes that differ between the specs."""
        shapes = [one.shape for one in self.specs]
        common = [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)]
        return (*common[: self.axis], len(self.specs), *common[self.axis :])

    @property
    def dtype(self) -> Any:
        """The dtype of the first spec; specs of one array all have this dtype."""
        return self.specs[0].dtype

    @property
    def device(self) -> str | None:  # type: ignore[override]
        """The device that all specs have."""
        device: str | None = self.specs[0].device
        return device

    @property
    def is_dense(self) -> bool:
        """Whether values are arrays with one more dimension, not tuples with the values of each spec."""
        first = _layout(self.specs[0])
        return first is not None and all(_layout(one) == first for one in self.specs[1:])

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step: the product over the specs."""
        return self._by_number().cardinality

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of indexed values; for the name of a field, return the stack of the field's specs."""
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

    # --- values -------------------------------------------------------------------------------------------------------

    def encode(self, values: Any) -> Any:
        """Convert external values to values of the domain, spec by spec.

        Args:
            values: A list or tuple with the values for each spec, or values in the form that ``project`` accepts.

        Raises:
            DataError: A value has no counterpart in the domain.
        """
        if isinstance(values, tuple | list) and len(values) == len(self.specs):
            return self._joined([one.encode(part) for one, part in zip(self.specs, values, strict=True)])
        return self._each("encode", values)

    def decode(self, values: Any) -> Any:
        """Convert values to a tuple with the external values of each spec: the inverse of ``encode``.

        Raises:
            DataError: A value is not in the domain.
        """
        return tuple(one.decode(part) for one, part in zip(self.specs, self._parts(values), strict=True))

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all combinations of the specs' values; the values of the last spec vary fastest.

        Args:
            most: Highest allowed number of combinations.

        Raises:
            ConfigError: There are more than ``most`` combinations, or infinitely many.
        """
        return self._joined(list(self._by_number().enumerate(most=most).values()))

    def expand(self, shape: int | Shape) -> Self:
        """Return the stack, repeated to fill a shape that ends with ``self.shape``; pass -1 for sizes that differ
        between the specs.

        Raises:
            ConfigError: The shape ends with other sizes.
        """
        sizes = zip(reversed(self.shape), reversed(check_shape(shape, where="expand")), strict=False)
        if any(size == -1 and wanted != -1 for size, wanted in sizes):
            raise ConfigError(f"expand: expected -1 where the specs of the stack differ, {self.shape}, found {shape}")
        return super().expand(shape)

    def to(self, device: object) -> Self:
        """Return the stack with another device: a label for adapters."""
        return replace(self, specs=tuple(one.to(device) for one in self.specs))

    def astype(self, dtype: Any) -> Self:
        """Return the same domains with another dtype of values.

        Raises:
            ConfigError: The dtype cannot represent all values of one of the domains.
        """
        return replace(self, specs=tuple(one.astype(dtype) for one in self.specs))

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _by_number(self) -> Composite:
        """Return the stacked specs by name; the names are "0", "1", and so on."""
        return Composite({str(number): one for number, one in enumerate(self.specs)})

    def _axes(self) -> Shape:
        fixed = max(len(one.shape) - len(one._axes()) for one in self.specs)
        return self.shape[: len(self.shape) - fixed]

    def _check_static(self, what: str) -> None:
        for one in self.specs:
            one._check_static(what)

    def _changed(self, change: Change, *, where: str) -> Any:
        # Example: three specs of shape (2,), stacked along axis 1, have the shape (2, 3). The numbers of the specs,
        # [[0, 1, 2]], lie along axis 1 and are repeated along axis 0. The index [:, [2, 0]] selects the numbers [[2,
        # 0]]: specs 2 and 0 lie at positions 0 and 1 of the result. Each spec is expanded to (2, 3) and indexed in the
        # same way, and `_placed` selects from the results.
        n = len(self.specs)
        numbers = np.arange(n).reshape((1,) * self.axis + (n,) + (1,) * (len(self._axes()) - self.axis - 1))
        _, arrays = operate(self._axes(), {"numbers": numbers}, change, where=where)
        whole = [one.unsqueeze(self.axis).expand(_with_size(one.shape, self.axis, n)) for one in self.specs]
        return _placed(np.asarray(arrays["numbers"]), [one._changed(change, where=where) for one in whole])

    def _parts(self, values: Any) -> list[Any]:
        """Return the values for each spec; raise DataError if the values do not fit the stack."""
        n = len(self.specs)
        if not self.is_dense:
            if not isinstance(values, tuple | list) or len(values) != n:
                raise DataError(f"expected a tuple of {n} values, one for each spec, found {values!r:.80}")
            return list(values)
        layout = _layout(self.specs[0])
        return [_part(layout, values, self.axis, number, n) for number in range(n)]

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Return the values of the stack from the values of each spec."""
        return _join(_layout(self.specs[0]), parts, self.axis) if self.is_dense else tuple(parts)

    def _each(self, method: str, values: Any) -> Any:
        parts = self._parts(values)
        return self._joined([getattr(one, method)(part) for one, part in zip(self.specs, parts, strict=True)])

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            parts = self._parts(values)
        except DataError as error:
            return str(error), None
        first: Shape | None = None
        for number, (one, part) in enumerate(zip(self.specs, parts, strict=True)):
            reason, batch = one._problem(part)
            if reason is None and batch is not None and first is not None and batch != first:
                reason = f"expected the batch shape of the earlier specs, {first}, found {batch}"
            if reason is not None:
                return f"spec {number} of the stack: {reason}", None
            first = batch if first is None else first
        return None, first

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        return self._joined([one._draw(key, (*path, number), batch) for number, one in enumerate(self.specs)])

    def _filled(self, number: int, batch: Shape) -> Any:
        return self._joined([one._filled(number, batch) for one in self.specs])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stacked):
            return NotImplemented
        return self.axis == other.axis and bool(self.specs == other.specs)

    def __hash__(self) -> int:
        return hash((self.axis, self.specs))

    def __repr__(self) -> str:
        return f"Stacked({list(self.specs)!r}, axis={self.axis})"


def stack_specs(specs: Sequence[Any], axis: int = 0) -> Any:
    """Stack specs along a new dimension: equal specs become a spec of the same kind, and different specs become a
    ``Stacked``.

    ``unbind`` returns the specs.

    Args:
        specs: One or more specs. Either all are specs of one array, with the same dtype and number of dimensions; or
            all are ``Composite``, with the same ``shape``.
        axis: The position of the new dimension in the shape.

    Raises:
        ConfigError: There is no spec, or the specs cannot be stacked.
    """
    stacked = Stacked(tuple(specs), axis)
    first = stacked.specs[0]
    if any(one != first for one in stacked.specs[1:]):
        return stacked
    return first.unsqueeze(stacked.axis).expand(_with_size(first.shape, stacked.axis, len(stacked.specs)))


def contains_lazy(spec: Domain) -> bool:
    """Whether a spec is a ``Stacked``, or has a ``Stacked`` as an entry."""
    if isinstance(spec, Composite):
        return any(contains_lazy(one) for one in spec.entries.values())
    return isinstance(spec, Stacked)


def check_no_exclusive_keys(spec: Domain) -> bool:
    """Whether the specs of each ``Stacked`` inside a spec all have the same fields."""
    if isinstance(spec, Composite):
        return all(check_no_exclusive_keys(one) for one in spec.entries.values())
    if not isinstance(spec, Stacked):
        return True
    names = {frozenset(_names(one)) for one in spec.specs}
    return len(names) == 1 and all(check_no_exclusive_keys(one) for one in spec.specs)


def consolidate(spec: Any) -> Any:
    """Add empty fields to the specs of every ``Stacked`` in a spec, so that all specs of a stack have the same fields.

    An added field is a ``NonTensor``, or an ``Unbounded`` with the field's dtype in another spec. Added fields are
    empty: their size is 0 in each dimension after the dimensions of their ``Composite``. (If a field has no dimension
    after these, the field is not empty.)
    """
    if isinstance(spec, Composite):
        return replace(spec, entries={name: consolidate(one) for name, one in spec.entries.items()})
    if not isinstance(spec, Stacked):
        return spec
    return stack_specs(_with_all_fields([consolidate(one) for one in spec.specs]), spec.axis)


def _names(spec: Any) -> set[str]:
    """Return the fields of a spec; for a stack, the fields of all its specs."""
    if isinstance(spec, Stacked):
        return set.intersection(*map(_names, spec.specs))
    return set(spec.entries) if isinstance(spec, Composite) else set()


def _with_all_fields(specs: list[Any]) -> list[Any]:
    """Add the fields of another spec; return specs of one array unchanged."""
    if not all(isinstance(one, Composite) for one in specs):
        return specs
    examples: dict[str, Any] = {}
    for one in specs:
        examples |= {name: entry for name, entry in one.entries.items() if name not in examples}
    columns = {
        name: _with_all_fields([one.entries.get(name, _empty_like(example, one.shape)) for one in specs])
        for name, example in examples.items()
    }
    return [
        replace(one, entries={name: column[number] for name, column in columns.items()})
        for number, one in enumerate(specs)
    ]


def _empty_like(spec: Any, shape: Shape) -> Domain:
    if isinstance(spec, Composite):
        return Composite({}, shape)
    empty = (*shape, *(0,) * (len(spec.shape) - len(shape)))
    return NonTensor(empty) if spec.dtype == object else Unbounded(empty, spec.dtype)


def _check_stackable(specs: tuple[Any, ...]) -> None:
    if not specs:
        raise ConfigError("stack: expected at least one spec, found none")
    first = specs[0]
    for number, one in enumerate(specs):
        if not isinstance(one, Domain):
            raise ConfigError(f"stack: expected specs, found {one!r:.80}")
        if _is_nested(one) != _is_nested(first) or one.device != first.device:
            raise ConfigError(f"stack: expected specs of equal kind and device, found {one!r:.80} at index {number}")
        if _is_nested(one):
            if one.shape != first.shape:
                raise ConfigError(f"stack: expected the shape {first.shape}, found {one.shape} at index {number}")
        elif one.dtype != first.dtype or len(one.shape) != len(first.shape):
            raise ConfigError(
                f"stack: expected {len(first.shape)} dimensions of {first.dtype}, found {one.shape} of {one.dtype} at "
                f"index {number}"
            )


def _is_nested(spec: Any) -> bool:
    """Whether values of a spec have fields, as for a ``Composite`` or a stack of ``Composite``."""
    return isinstance(spec, Composite) or (isinstance(spec, Stacked) and _is_nested(spec.specs[0]))


def _with_size(shape: Shape, axis: int, n: int) -> Shape:
    """Return the argument of ``expand`` that sets dimension ``axis`` to ``n`` and keeps the other sizes."""
    return (*(-1,) * axis, n, *(-1,) * (len(shape) - axis))


def _placed(numbers: Array, specs: list[Any]) -> Any:
    """Return a spec whose entry at each ``index`` is ``specs[numbers[index]]``."""
    if not numbers.size or bool((numbers == numbers.flat[0]).all()):
        return specs[int(numbers.flat[0]) if numbers.size else 0]
    # Split along the first axis on which the numbers differ, and stack the results along this axis.
    axis = next(axis for axis in range(numbers.ndim) if bool((numbers != numbers.take([0], axis)).any()))
    index: Callable[[int], Any] = lambda place: (*(slice(None),) * axis, place)  # noqa: E731
    places = map(index, range(numbers.shape[axis]))
    return stack_specs([_placed(numbers[place], [one[place] for one in specs]) for place in places], axis)


# --- values of dense stacks -------------------------------------------------------------------------------------------


def _layout(spec: Any) -> Any:
    """Return the shape and dtype of a spec's values; for nested values, return a dict by name. Return None for values
    that are not arrays.
    """
    if isinstance(spec, Composite):
        layouts = {name: _layout(one) for name, one in spec.entries.items()}
        return None if None in layouts.values() else layouts
    if isinstance(spec, Stacked):
        return _stacked_layout(_layout(spec.specs[0]), spec.axis, len(spec.specs)) if spec.is_dense else None
    return None if spec.dtype == object or -1 in spec.shape else (spec.shape, spec.dtype)


def _stacked_layout(layout: Any, axis: int, n: int) -> Any:
    """Return the layout of a stack of ``n`` values along ``axis``; each value has the given layout."""
    if isinstance(layout, dict):
        return {name: _stacked_layout(one, axis, n) for name, one in layout.items()}
    shape, dtype = layout
    return ((*shape[:axis], n, *shape[axis:]), dtype)


def _part(layout: Any, values: Any, axis: int, number: int, n: int) -> Any:
    """From the values of a dense stack of ``n`` specs, return the values of the spec with index ``number``."""
    if isinstance(layout, dict):
        record = as_record(values)
        if record is None:
            raise DataError(f"expected fields by name, found {values!r:.80}")
        missing = next((name for name in layout if name not in record), None)
        if missing is not None:
            raise DataError(f"field {missing!r}: expected this field, found {list(record)}")
        return {name: _part(one, record[name], axis, number, n) for name, one in layout.items()}
    try:
        array = as_array(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"expected numbers in the host's memory, found {values!r:.80} ({error})") from error
    place = axis - len(layout[0]) - 1  # counted from the end, because batch axes are in front
    if array.ndim < -place or array.shape[place] != n:
        raise DataError(f"expected size {n} of axis {place}, found the shape {array.shape}")
    return array.take(number, place)


def _join(layout: Any, parts: Sequence[Any], axis: int) -> Any:
    """Stack the values of each spec, and return the values of the dense stack."""
    if isinstance(layout, dict):
        return {name: _join(one, [part[name] for part in parts], axis) for name, one in layout.items()}
    return np.stack([np.asarray(part) for part in parts], axis - len(layout[0]) - 1)


# --- JSON -------------------------------------------------------------------------------------------------------------

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Binary, Bounded, Unbounded, Categorical, MultiCategorical, OneHot, MultiOneHot),
        *(NonTensor, Choice, Composite, Stacked),
    )
}
# Limits for untrusted files, because an array for a huge stated shape would exhaust the memory.
_MOST_VALUES, _DEEPEST = 1 << 28, 64


def from_json(content: Any) -> Any:
    """Return the spec that ``to_json`` wrote.

    Args:
        content: The JSON object, or its text.

    Raises:
        DataError: The content was not written by ``to_json``, or was written by a newer version of ``to_json``.
    """
    return _spec(without_version(content, VERSION, "spec"), 0)


def _spec(content: Any, depth: int) -> Domain:
    """Return the spec of a JSON object; ``depth`` is the number of enclosing specs."""
    if depth > _DEEPEST:
        raise DataError(f"spec: expected specs nested in at most {_DEEPEST} levels, found more")
    if not isinstance(content, Mapping):
        raise DataError(f"spec: expected a JSON object, found {content!r:.80}")
    arguments = dict(content)
    name = arguments.pop("type", None)
    try:
        return _spec_of_type(name, arguments, depth)
    except DataError:
        raise
    except (ConfigError, *UNREADABLE) as error:
        raise DataError(f"spec: expected the arguments of {name}, found {content!r:.200} ({error})") from error


def _spec_of_type(name: Any, arguments: dict[str, Any], depth: int) -> Domain:
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DataError(f"spec: expected one of {list(_KINDS)}, found {name!r:.80}")
    shape = arguments.get("shape")
    if isinstance(shape, list):
        _check_size(shape)
        arguments["shape"] = tuple(shape)
    if kind is Composite:
        arguments["entries"] = {key: _spec(value, depth + 1) for key, value in arguments["entries"].items()}
    for several in arguments.keys() & {"choices", "specs"}:
        arguments[several] = tuple(_spec(one, depth + 1) for one in arguments[several])
    for bound in arguments.keys() & {"low", "high"}:
        arguments[bound] = _numbers(arguments[bound])
    if "mask" in arguments:  # the constructor repeats it for all codes of all elements
        codes = np.max(np.asarray(arguments.get("n", arguments.get("nvec"))), initial=1)
        _check_size([*(shape or ()), int(codes)])
    spec: Domain = kind(**arguments)
    return spec


def _check_size(shape: list[Any]) -> None:
    values = 1
    for size in shape:
        values *= max(1, size)
    if values > _MOST_VALUES or len(shape) > 32:
        raise DataError(f"spec: expected a step of at most {_MOST_VALUES} values, found the shape {shape!r:.80}")


def _numbers(value: Any) -> Any:
    """Convert bounds from JSON to floats; infinite bounds are texts in JSON."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, str) else value
