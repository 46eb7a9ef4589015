"""Specs of nested fields by name."""

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
from mouse_core.spec.domain import ARROW_KEY, MOST_VALUES, VERSION, Domain
from mouse_core.spec.numbers import Unbounded
from mouse_core.spec.objects import NonTensor
from mouse_core.spec.shapes import Change, Shape, check_shape, operate, taken_rows

__all__ = ["Composite", "from_batch", "of_fields"]


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Domain, Mapping[str, Any]):
    """Specs by name, nested as rows are.

    A mapping of names to specs. With a tuple of names, ``composite["next", "reward"]``, it gives one within another. An
    index that is no name, ``composite[0]``, takes from the axes of ``shape``, in every entry.

    Args:
        entries: Specs by name; a dict is a ``Composite`` of the same shape, and a tuple of names leads into others.
        shape: What the shape of every entry begins with: a number of environments, for instance.
        device: A label that adapters read; by default entries keep their own.

    Raises:
        ConfigError: Other names or things, or an entry of another shape.
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
        """An entry by its name, or the specs of what an index takes from the axes of ``shape``."""
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
        """Whether there is an entry of a name, or, of anything but a name, what ``contains`` says of it."""
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
        """The specs that are no ``Composite``, by name: ``"reward"``, or ``("next", "reward")`` where it is nested."""
        found: dict[FieldKey, Any] = {}
        for name, one in self.entries.items():
            if isinstance(one, Composite):
                found |= {(name, *path_of(key)): leaf for key, leaf in one.leaves().items()}
            else:
                found[name] = one
        return found

    def with_fields(self, fields: Mapping[FieldKey, Any]) -> Self:
        """The same spec with entries added, or replaced; those of a ``Composite`` go into that of the same name.

        Raises:
            ConfigError: As for a new one.
        """
        entries = dict(self.entries)
        for key, one in fields.items():
            _put(entries, _names(key), one, self.shape)
        return replace(self, entries=entries)

    def without(self, *keys: FieldKey) -> Self:
        """The same spec without some entries.

        Raises:
            MissingFieldError: One that there is not.
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

    # --- what a domain is asked ---------------------------------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        """The dtypes of entries, by name."""
        return {name: one.dtype for name, one in self.entries.items()}

    @property
    def cardinality(self) -> int | float:
        """How many different values a step can have: the product of those of the entries."""
        numbers = [one.cardinality for one in self.entries.values()]
        return 0 if 0 in numbers else math.inf if math.inf in numbers else math.prod(numbers)

    def project(self, values: Any) -> Any:
        """The values of the domain that are nearest to some values, field by field; other fields are left out.

        Raises:
            DataError: A field that is missing, or values of another kind or shape.
        """
        return self._each("project", values)

    def encode(self, values: Any) -> Any:
        """Every field as its spec encodes it; other fields are left out.

        Raises:
            DataError: A field that is missing, or values that name nothing in its domain.
        """
        return self._each("encode", values)

    def decode(self, values: Any) -> Any:
        """What ``encode`` makes these values of; other fields are left out.

        Raises:
            DataError: A field that is missing, or values that are not in its domain.
        """
        return self._each("decode", values)

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """All combinations of the values of its fields, ``[cardinality, *shape]`` each; those of the last side by side.

        Args:
            most: How many there may be.

        Raises:
            ConfigError: More than ``most``, or without number.
        """
        number = self.cardinality
        if isinstance(number, float) or number > most:
            raise ConfigError(f"enumerate: expected at most {most} values, found {number}")
        found, before = {}, 1
        for name, one in self.entries.items():
            values = one.enumerate(most=most)
            before *= one.cardinality
            repeated = np.repeat(np.arange(one.cardinality), number // before)
            rows = np.tile(repeated, number // len(repeated) if len(repeated) else 0)
            found[name] = taken_rows(values, rows)
        return found

    def to(self, device: object) -> Self:
        """The same spec for another device: a label that adapters read. None takes it from all entries."""
        label = None if device is None else str(device)
        return replace(self, entries={name: one.to(label) for name, one in self.entries.items()}, device=label)

    def astype(self, dtype: Any) -> Self:
        """The same domains with values of another dtype.

        Raises:
            ConfigError: A dtype that one of them does not have.
        """
        return replace(self, entries={name: one.astype(dtype) for name, one in self.entries.items()})

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _check_static(self, what: str) -> None:
        super()._check_static(what)
        for one in self.entries.values():
            one._check_static(what)

    def _examined(self, values: Any) -> tuple[str | None, Shape | None]:
        first: tuple[FieldKey, Shape] | None = None
        for key, leaf in self.leaves().items():
            try:
                reason, batch = leaf._examined(_value(values, key))
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

    def _each(self, what: str, values: Any) -> Any:
        made: dict[FieldKey, Any] = {}
        for key, leaf in self.leaves().items():
            try:
                made[key] = getattr(leaf, what)(_value(values, key))
            except MissingFieldError as error:
                raise DataError(str(error)) from error
            except DataError as error:
                raise DataError(f"field {key!r}: {error}") from error
        return self._nest(made)

    def _nest(self, leaves: Mapping[FieldKey, Any], path: tuple[str | int, ...] = ()) -> Any:
        nested = {}
        for name, one in self.entries.items():
            whole = (*path, name)
            is_branch = isinstance(one, Composite)
            nested[name] = one._nest(leaves, whole) if is_branch else leaves[name if not path else whole]
        return nested

    def _changed(self, change: Change, *, where: str) -> Self:
        ndim = len(self.shape)
        shape, _ = operate(self.shape, {}, change, where=where)
        entries = {name: one._changed(lambda array, _: change(array, ndim), where=where) for name, one in self.items()}
        return replace(self, entries=entries, shape=shape)

    def _said(self) -> dict[str, Any]:
        said: dict[str, Any] = {"type": "Composite", "shape": list(self.shape)}
        said["entries"] = {name: one._said() for name, one in self.entries.items()}
        return said if self.device is None else {**said, "device": self.device}

    def to_arrow(self, name: str | None = None) -> Any:
        """An Arrow schema whose fields say their specs each, in their metadata; ``from_arrow`` makes the spec again.

        Args:
            name: With one, a field of that name that holds all of it, as a struct.

        Raises:
            ConfigError: As ``to_json``.
        """
        import pyarrow as pa

        said = {"version": VERSION, **self._said()}
        del said["entries"]
        metadata = {ARROW_KEY: json.dumps(said)}
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
    """Whether ``key`` is a name, or a tuple of the names that lead to a field."""
    names = (key,) if isinstance(key, str) else key
    return isinstance(names, tuple) and bool(names) and all(isinstance(name, str) for name in names)


def _put(entries: dict[str, Domain], names: tuple[str, ...], spec: Any, shape: Shape) -> None:
    """Put a spec where some names lead, into what is there."""
    first, *rest = names
    there = entries.get(first)
    if rest:
        inner = there if isinstance(there, Composite) else Composite({}, shape)
        entries[first] = inner.with_fields({tuple(rest): spec})
        return
    if isinstance(spec, Mapping) and not isinstance(spec, Domain):
        spec = Composite(spec, shape)
    if not isinstance(spec, Domain):
        raise ConfigError(f"Composite: field {first!r}: expected a spec, found {spec!r:.80}")
    both = isinstance(there, Composite) and isinstance(spec, Composite)
    entries[first] = there.with_fields(spec.entries) if both else spec  # type: ignore[union-attr, attr-defined]


def _value(values: Any, key: FieldKey) -> Any:
    """The values of a field of nested dicts, TensorDicts, dataclasses or named tuples; MissingFieldError if none."""
    found = values
    for name in path_of(key):
        record = as_record(found)
        if record is None or name not in record:
            found = f"{values!r:.80}" if record is None else f"{list(record)}"
            raise MissingFieldError(f"field {key!r}: expected it, found {found}")
        found = record[str(name)]
    return found


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
