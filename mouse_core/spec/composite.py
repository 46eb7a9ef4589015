"""Specs of nested fields by name, and the specs of batches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self, TypeGuard

import numpy as np

from mouse_core._base.checks import as_record, is_text
from mouse_core.dtypes import is_number
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.nested import FieldKey, flatten, path_of
from mouse_core.randomness import Key
from mouse_core.spec.domain import ARROW_KEY, MOST_VALUES, Domain
from mouse_core.spec.numbers import Unbounded
from mouse_core.spec.objects import NonTensor
from mouse_core.spec.shapes import Array, Change, Shape, check_shape, operate

__all__ = ["Composite", "from_batch", "of_fields"]


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Domain, Mapping[str, Any]):
    """A mapping of names to specs, nested like the fields of rows.

    A tuple of names, as in ``composite["next", "reward"]``, returns a nested entry. Any other index, as in
    ``composite[0]``, indexes the axes of ``shape`` in every entry.

    Args:
        entries: Specs by name. A dict becomes a ``Composite`` of the same shape; a tuple of names is a nested entry.
        shape: Common first dimensions of all entries, such as the number of environments.
        device: A label for adapters; by default entries keep their own labels.

    Raises:
        ConfigError: An invalid name, an entry that is not a spec, or an entry of another shape.
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
            _put(entries, _names(key), one, shape)
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
        """Return an entry by its name, or the spec of values that are indexed along the axes of ``shape``."""
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
        """Whether an entry has this name; for values, whether the domain contains them."""
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
            ConfigError: An invalid name, an entry that is not a spec, or an entry of another shape.
        """
        entries = dict(self.entries)
        for key, one in fields.items():
            _put(entries, _names(key), one, self.shape)
        return replace(self, entries=entries)

    def without(self, *keys: FieldKey) -> Self:
        """Return the spec without some entries.

        Raises:
            MissingFieldError: A name without an entry.
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
            ConfigError: More than ``most`` combinations, or infinitely many.
        """
        number = self.cardinality
        if isinstance(number, float) or number > most:
            raise ConfigError(f"enumerate: expected at most {most} values, found {number}")
        # Fields with 2, 3 and 2 values have 12 combinations: the first repeats each value 6 times, the second 2 times
        # (and all of that 2 times), the third once (and all of that 6 times).
        columns, before = {}, 1
        for name, one in self.entries.items():
            before *= one.cardinality
            repeated = np.repeat(np.arange(one.cardinality), number // before)
            rows = np.tile(repeated, number // len(repeated) if len(repeated) else 0)
            columns[name] = _rows(one.enumerate(most=most), rows)
        return columns

    def to(self, device: object) -> Self:
        """Return the spec and all entries with another device, a label for adapters; None removes it."""
        label = None if device is None else str(device)
        return replace(self, entries={name: one.to(label) for name, one in self.entries.items()}, device=label)

    def astype(self, dtype: Any) -> Self:
        """Return the same domains with another dtype of values.

        Raises:
            ConfigError: A dtype that does not hold one of the domains.
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
                return f"field {key!r}: expected the batch {first[1]} of field {first[0]!r}, found {batch}", None
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

    def _json(self) -> dict[str, Any]:
        entries = {name: one._json() for name, one in self.entries.items()}
        device = {} if self.device is None else {"device": self.device}
        return {"type": "Composite", "shape": list(self.shape), "entries": entries, **device}

    def to_arrow(self, name: str | None = None) -> Any:
        """Return an Arrow schema with a field for each entry, for ``from_arrow``.

        Args:
            name: Return a struct field of this name instead of a schema.

        Raises:
            ConfigError: An example of a ``NonTensor`` that JSON cannot represent.
        """
        import pyarrow as pa

        content = self.to_json()
        del content["entries"]  # each field has the spec of its entry
        metadata = {ARROW_KEY: json.dumps(content)}
        if name is not None:
            return pa.field(name, self._arrow_type(), metadata=metadata)
        return pa.schema([one.to_arrow(key) for key, one in self.entries.items()], metadata=metadata)

    def _arrow_type(self) -> Any:
        import pyarrow as pa

        return pa.struct([one.to_arrow(key) for key, one in self.entries.items()])

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


def _names(key: Any) -> tuple[str, ...]:
    if is_name(key) and all(map(is_text, (key,) if isinstance(key, str) else key)):
        return (key,) if isinstance(key, str) else key
    raise ConfigError(f"Composite: expected names of fields as Unicode texts, or tuples of them, found {key!r:.80}")


def is_name(key: object) -> TypeGuard[str | tuple[str, ...]]:
    """Whether ``key`` is a name, or a tuple of names that leads to a nested field."""
    names = (key,) if isinstance(key, str) else key
    return isinstance(names, tuple) and bool(names) and all(isinstance(name, str) for name in names)


def _put(entries: dict[str, Domain], names: tuple[str, ...], spec: Any, shape: Shape) -> None:
    """Add a spec to ``entries`` under a path of names; a ``Composite`` is merged with an entry of that name."""
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
    """Return a field of nested dicts, TensorDicts, dataclasses or named tuples; raises MissingFieldError if absent."""
    value = values
    for name in path_of(key):
        record = as_record(value)
        if record is None or name not in record:
            present = f"{values!r:.80}" if record is None else f"{list(record)}"
            raise MissingFieldError(f"field {key!r}: expected it, found {present}")
        value = record[str(name)]
    return value


def _rows(values: Any, rows: Array) -> Any:
    """Return some rows of arrays, nested in dicts and tuples."""
    if isinstance(values, dict):
        return {name: _rows(one, rows) for name, one in values.items()}
    return tuple(_rows(one, rows) for one in values) if isinstance(values, tuple) else values[rows]


def from_batch(batch: Any, *, batch_dims: int = 2) -> Composite:
    """Return the spec of one step of a batch: ``Unbounded`` for numbers, ``NonTensor`` for other objects.

    Args:
        batch: Nested dicts of arrays.
        batch_dims: Number of axes before those of a step: 2 for ``[B, S, ...]``.

    Raises:
        ConfigError: A field with fewer axes.
        SchemaError: A batch without fields.
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
    """Return the spec of one step of a batch with these fields, without fields that have a value per sequence.

    A field has the spec of its column where that has as many values and the field's dtype holds them. Any other field
    is ``Unbounded``.

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
            with suppress(ConfigError):  # the field's shape or dtype does not hold the column's values
                entries[one.name] = spec.reshape(one.shape).astype(one.dtype)
    return Composite(entries)
