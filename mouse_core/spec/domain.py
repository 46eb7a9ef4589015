"""The base of all specs of values.

A spec is the set of values that one step may have, its domain. Operations on axes (``reshape``, indices, ...) are one
mechanism: each is a function of an array, which a spec applies to its bounds and masks (``shapes.operate``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Self

from mouse_core.errors import ConfigError, DataError, SpecIndexError
from mouse_core.randomness import Key
from mouse_core.spec.draws import key_of
from mouse_core.spec.shapes import (
    Change,
    Shape,
    check_axis,
    check_index,
    check_shape,
    expanded,
    is_dynamic,
    reshaped,
    squeezed,
    unsqueezed,
)

VERSION = 1
"""Version of the format that ``Domain.to_json`` and ``Domain.to_arrow`` write."""

ARROW_KEY = "mouse_spec"
"""Key of the spec in the metadata of an Arrow field."""

MOST_VALUES = 1 << 20
"""Default limit of ``Domain.enumerate``."""


class Domain:
    """The set of values that one step may have: base of ``Bounded``, ``Categorical``, ``Composite`` and other specs.

    A spec is immutable and hashable, and equals any spec with the same content. ``shape`` is the shape of one step; a
    size of -1 is dynamic, which allows any size. Values have any number of batch axes in front: ``[*batch, *shape]``.
    Methods take arrays of NumPy, torch and JAX in host memory. Methods return NumPy arrays, and a ``Composite`` returns
    nested dicts of NumPy arrays.
    """

    shape: Shape
    dtype: Any
    device: str | None

    # --- defined by every kind of spec ------------------------------------------------------------------------------

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step; ``math.inf`` for floats and for dynamic sizes."""
        raise NotImplementedError

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        raise NotImplementedError

    def _filled(self, number: int, batch: Shape) -> Any:
        raise NotImplementedError

    def _changed(self, change: Change, *, where: str) -> Self:
        """Return the spec after an operation on the axes of ``shape``."""
        raise NotImplementedError

    def _json(self) -> dict[str, Any]:
        """Return the content of ``to_json`` without the version."""
        raise NotImplementedError

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        """Return why values are not in the domain (None: they are), and their batch shape (None: unknown)."""
        raise NotImplementedError

    def _each(self, method: str, values: Any) -> Any:
        """Call a method of each spec in this one, with its part of the values."""
        raise NotImplementedError

    def project(self, values: Any) -> Any:
        """Return the nearest values in the domain; values in the domain are returned unchanged.

        ``Composite`` converts field by field, also in ``encode`` and ``decode``, and leaves out additional fields.

        Raises:
            DataError: Values of another kind or shape.
        """
        return self._each("project", values)

    def encode(self, values: Any) -> Any:
        """Convert external values to values of the domain: Python numbers, or codes for ``OneHot``.

        Raises:
            DataError: Values that stand for nothing in the domain.
        """
        return self._each("encode", values)

    def decode(self, values: Any) -> Any:
        """Convert values of the domain to external values: the inverse of ``encode``.

        Raises:
            DataError: Values that are not in the domain.
        """
        return self._each("decode", values)

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the domain, ``[cardinality, *shape]``; the last element varies fastest.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: More than ``most`` values, or infinitely many.
        """
        raise NotImplementedError

    # --- common to all specs ----------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of dimensions of ``shape``."""
        return len(self.shape)

    def sample(self, seed: int | Key, batch: int | Shape = ()) -> Any:
        """Draw random values, ``[*batch, *shape]``, the same for a seed on every machine and in every framework.

        Integers and categories are uniform for any range: probabilities differ by less than 2**-64. Floats are uniform
        between finite bounds, exponential from the finite bound if the other is infinite, and normal without finite
        bounds. Each field of a ``Composite`` has a random key of its own name: adding a field changes no other field.
        A longer batch begins with the rows of a shorter one.

        Args:
            seed: An integer in ``[0, 2**64)``, or a key of ``mouse_core.randomness``.
            batch: Shape of the batch.

        Raises:
            ConfigError: An invalid seed or shape, or dynamic dimensions. ``expand`` gives dynamic dimensions a size.
        """
        self._check_static("sample")
        return self._draw(key_of(seed), (), check_shape(batch, where="batch", dynamic=False))

    def zeros(self, batch: int | Shape = ()) -> Any:
        """Return zeros, ``[*batch, *shape]``, also if the domain has no zero.

        Raises:
            ConfigError: An invalid shape, or dynamic dimensions. ``expand`` gives dynamic dimensions a size.
        """
        self._check_static("zeros")
        return self._filled(0, check_shape(batch, where="batch", dynamic=False))

    def ones(self, batch: int | Shape = ()) -> Any:
        """Return ones, ``[*batch, *shape]``, also if the domain has no one.

        Raises:
            ConfigError: An invalid shape, or dynamic dimensions. ``expand`` gives dynamic dimensions a size.
        """
        self._check_static("ones")
        return self._filled(1, check_shape(batch, where="batch", dynamic=False))

    def why_not(self, values: Any) -> str | None:
        """Return why some value is not in the domain, or None: expected, found, and the place.

        Arrays have the dtype of the spec; Python numbers fit it. A ``Composite`` names the field, ignores additional
        fields, and expects the same batch shape of all its fields.
        """
        return self._problem(values)[0]

    def contains(self, values: Any) -> bool:
        """Whether all values are in the domain, including dtype and shape; ``why_not`` returns the reason.

        ``values in spec`` is the same, except that a ``Composite`` takes texts and tuples of texts as names of fields.
        """
        return self.why_not(values) is None

    def __contains__(self, values: object) -> bool:
        return self.contains(values)

    def check(self, values: Any, *, where: str = "") -> None:
        """Raise DataError unless all values are in the domain.

        Args:
            values: ``[*batch, *shape]``.
            where: Prefix of the message.

        Raises:
            DataError: A value outside the domain, with the message of ``why_not``.
        """
        reason = self.why_not(values)
        if reason is not None:
            raise DataError(f"{where}: {reason}" if where else reason)

    def reshape(self, shape: int | Shape) -> Self:
        """Return the spec in another shape. One size may be -1, which is inferred.

        For a spec with dynamic dimensions, each -1 is a dynamic dimension. The last axis of ``OneHot`` and
        ``MultiOneHot`` stays the last axis.

        Raises:
            ConfigError: A shape with another number of values.
        """
        return self._changed(reshaped(self._axes(), self._free(shape, "reshape")), where="reshape")

    def squeeze(self, axis: int | None = None) -> Self:
        """Return the spec without dimension ``axis`` if its size is 1; by default without all dimensions of size 1.

        Raises:
            ConfigError: An axis out of range.
        """
        return self._changed(squeezed(self._axes(), axis), where="squeeze")

    def unsqueeze(self, axis: int) -> Self:
        """Return the spec with a new dimension ``axis`` of size 1.

        Raises:
            ConfigError: An axis out of range.
        """
        return self._changed(unsqueezed(self._axes(), axis), where="unsqueeze")

    def expand(self, shape: int | Shape) -> Self:
        """Return the spec repeated to a shape that ends in ``self.shape``.

        Sizes of 1 and dynamic sizes may become other sizes; -1 keeps a size. The shape includes the last axis of
        ``OneHot`` and ``MultiOneHot``.

        Raises:
            ConfigError: A shape that ends in other sizes.
        """
        return self._changed(expanded(self._axes(), self._free(shape, "expand")), where="expand")

    def unbind(self, axis: int = 0) -> tuple[Any, ...]:
        """Return the specs along a dimension, each without that dimension: the inverse of ``stack_specs``.

        Raises:
            ConfigError: An axis out of range, or a dynamic dimension.
        """
        axes = self._axes()
        number = check_axis(axis, len(axes), where="unbind")
        if axes[number] == -1:
            raise ConfigError(f"unbind: expected a dimension with a size, found dimension {number} of {axes}")
        return tuple(self[(*(slice(None),) * number, place)] for place in range(axes[number]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of indexed values; raises SpecIndexError, a ConfigError, for an index out of range."""
        try:
            parts = check_index(index, self._axes())
            return self._changed(lambda array, ndim: array[parts], where="index")
        except ConfigError as error:
            raise SpecIndexError(*error.args) from error

    def to(self, device: object) -> Self:
        """Return the spec with another device: a label for adapters, such as "cuda:0", or None.

        Drawing, checking and projecting run on the host for every label.
        """
        return dataclasses.replace(self, device=None if device is None else str(device))  # type: ignore[type-var]

    def astype(self, dtype: Any) -> Self:
        """Return the same domain with another dtype of values.

        Raises:
            ConfigError: A dtype that does not hold the domain.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the spec as a JSON object with a version, for ``from_json``.

        Raises:
            ConfigError: An example of a ``NonTensor`` that JSON cannot represent.
        """
        return {"version": VERSION, **self._json()}

    def to_arrow(self, name: str = "value") -> Any:
        """Return an Arrow field with the type of a step and the spec in its metadata, for ``from_arrow``.

        A ``Composite`` returns a schema with one field for each entry. Arrow and Parquet files keep the metadata.

        Args:
            name: Name of the Arrow field.

        Raises:
            ConfigError: An example of a ``NonTensor`` that JSON cannot represent.
        """
        import pyarrow as pa

        return pa.field(name, self._arrow_type(), metadata={ARROW_KEY: json.dumps(self.to_json())})

    def _arrow_type(self) -> Any:
        """Return the Arrow type of a step."""
        raise NotImplementedError

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _axes(self) -> Shape:
        """Return the dimensions that operations on axes may change."""
        return self.shape

    def _check_static(self, what: str) -> None:
        if is_dynamic(self.shape):
            raise ConfigError(f"{what}: expected sizes for all dimensions, found {self.shape}; expand() gives them")

    def _free(self, shape: Any, where: str) -> Shape:
        """Return ``shape`` without the axes that belong to one value; raises ConfigError if those differ."""
        target = check_shape(shape, where=where)
        fixed = self.shape[len(self._axes()) :]
        ending = target[len(target) - len(fixed) :] if len(target) >= len(fixed) else None
        if fixed and ending != fixed and not (where == "expand" and ending == (-1,) * len(fixed)):
            raise ConfigError(f"{where}: expected a shape that ends in {fixed}, found {target}")
        return target[: len(target) - len(fixed)]
