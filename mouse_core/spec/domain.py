"""What all specs of values have in common: a domain is the set of values that one step may have."""

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
"""The newest version of what ``Domain.to_json`` and ``Domain.to_arrow`` write."""

ARROW_KEY = "mouse_spec"
"""Under which name a field of an Arrow schema says its spec, in its metadata."""

MOST_VALUES = 1 << 20
"""How many values ``Domain.enumerate`` gives at most, unless it is told."""


class Domain:
    """Which values one step may have: the base of ``Bounded``, ``Categorical``, ``Composite`` and all other specs.

    A spec is a value: it is never changed, equals another that says the same, and can be a key of a dict. Its ``shape``
    is that of one step, of which -1 is a dimension of any size. Where values are taken or given they have the batch's
    axes in front, as many as there are: ``[*batch, *shape]``. Arrays of torch and JAX that lie in the host's memory are
    taken as well; what is given are NumPy arrays, nested dicts of them for a ``Composite``.
    """

    shape: Shape
    dtype: Any
    device: str | None

    # --- what every spec says by itself -----------------------------------------------------------------------------

    @property
    def cardinality(self) -> int | float:
        """How many different values a step can have; ``math.inf`` of floats, and where sizes are dynamic."""
        raise NotImplementedError

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        raise NotImplementedError

    def _filled(self, number: int, batch: Shape) -> Any:
        raise NotImplementedError

    def _changed(self, change: Change, *, where: str) -> Self:
        """The spec after a change of the axes of ``shape``."""
        raise NotImplementedError

    def _said(self) -> dict[str, Any]:
        """What JSON says, without the version."""
        raise NotImplementedError

    def _examined(self, values: Any) -> tuple[str | None, Shape | None]:
        """Why values are not in the domain, and the axes of their batch; None where that is not known."""
        raise NotImplementedError

    def project(self, values: Any) -> Any:
        """The values of the domain that are nearest to some values; those that are in it stay as they are.

        Raises:
            DataError: Values of another kind or shape.
        """
        raise NotImplementedError

    def encode(self, values: Any) -> Any:
        """Values of the domain from what they are called elsewhere: numbers of Python, or codes for ``OneHot``.

        Raises:
            DataError: Values that name nothing in the domain.
        """
        raise NotImplementedError

    def decode(self, values: Any) -> Any:
        """What ``encode`` makes these values of.

        Raises:
            DataError: Values that are not in the domain.
        """
        raise NotImplementedError

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """All values of the domain, ``[cardinality, *shape]``, those that differ in the last place side by side.

        Args:
            most: How many there may be.

        Raises:
            ConfigError: More than ``most``, or without number.
        """
        raise NotImplementedError

    # --- what follows for all of them -------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """How many dimensions ``shape`` has."""
        return len(self.shape)

    def sample(self, seed: int | Key, batch: int | Shape = ()) -> Any:
        """Random values, ``[*batch, *shape]``: the same for the same seed, on every machine and in every framework.

        Integers and categories are uniform, whatever their range: one is more likely than another by less than 2**-64.
        Floats are uniform between finite bounds, exponential from a bound where the other is infinite, and normal where
        both are. In a ``Composite`` every field draws by its own name, so that another field changes none; the first
        rows of a longer batch are those of a shorter one.

        Args:
            seed: In ``[0, 2**64)``, or a key of ``mouse_core.randomness``.
            batch: The shape of the batch.

        Raises:
            ConfigError: Another seed or shape, or dynamic dimensions, to which ``expand`` gives a size.
        """
        self._check_static("sample")
        return self._draw(key_of(seed), (), check_shape(batch, where="batch", dynamic=False))

    def zeros(self, batch: int | Shape = ()) -> Any:
        """Zeros in the shape of ``[*batch, *shape]``, whether they are in the domain or not.

        Raises:
            ConfigError: Another shape, or dynamic dimensions, to which ``expand`` gives a size.
        """
        self._check_static("zeros")
        return self._filled(0, check_shape(batch, where="batch", dynamic=False))

    def ones(self, batch: int | Shape = ()) -> Any:
        """Ones in the shape of ``[*batch, *shape]``, whether they are in the domain or not.

        Raises:
            ConfigError: Another shape, or dynamic dimensions, to which ``expand`` gives a size.
        """
        self._check_static("ones")
        return self._filled(1, check_shape(batch, where="batch", dynamic=False))

    def why_not(self, values: Any) -> str | None:
        """Why values are not all in the domain, or None if they are: what was expected, what was found, and where.

        Every array has the spec's dtype, and numbers of Python what it holds. Of a ``Composite`` the message names the
        field; other fields than its own may be there, and all of them have one batch.
        """
        return self._examined(values)[0]

    def contains(self, values: Any) -> bool:
        """Whether all values are in the domain, with their dtype and shape; ``why_not`` says why they are not.

        ``values in spec`` gives the same answer, unless ``values`` is the name of an entry of a ``Composite``.
        """
        return self.why_not(values) is None

    def __contains__(self, values: object) -> bool:
        return self.contains(values)

    def check(self, values: Any, *, where: str = "") -> None:
        """Raise DataError unless all values are in the domain.

        Args:
            values: ``[*batch, *shape]``.
            where: What the message begins with.

        Raises:
            DataError: Values that are not: field, row and value, as ``why_not`` says them.
        """
        reason = self.why_not(values)
        if reason is not None:
            raise DataError(f"{where}: {reason}" if where else reason)

    def reshape(self, shape: int | Shape) -> Self:
        """The same values in another shape, of which one size may be -1 and is what is left.

        Where the spec has dynamic dimensions, a -1 is one of them. The axis that ``OneHot`` and ``MultiOneHot`` end in
        stays the last one.

        Raises:
            ConfigError: Another number of values.
        """
        return self._changed(reshaped(self._axes(), self._free(shape, "reshape")), where="reshape")

    def squeeze(self, axis: int | None = None) -> Self:
        """Without the dimension ``axis`` if its size is 1, or without all of size 1.

        Raises:
            ConfigError: An axis that there is not.
        """
        return self._changed(squeezed(self._axes(), axis), where="squeeze")

    def unsqueeze(self, axis: int) -> Self:
        """With one dimension more, of size 1, that becomes dimension ``axis``.

        Raises:
            ConfigError: An axis that there would not be.
        """
        return self._changed(unsqueezed(self._axes(), axis), where="unsqueeze")

    def expand(self, shape: int | Shape) -> Self:
        """Repeated to a shape that ends in this one, of which sizes of 1 and dynamic ones may become others.

        A size of -1 leaves it as it is. The axis that ``OneHot`` and ``MultiOneHot`` end in is part of the shape.

        Raises:
            ConfigError: Another shape.
        """
        return self._changed(self._expansion(shape), where="expand")

    def unbind(self, axis: int = 0) -> tuple[Any, ...]:
        """The specs along a dimension, each without it: what ``stack_specs`` made one of.

        Raises:
            ConfigError: An axis that there is not, or a dynamic one.
        """
        axes = self._axes()
        number = check_axis(axis, len(axes), where="unbind")
        if axes[number] == -1:
            raise ConfigError(f"unbind: expected a dimension with a size, found dimension {number} of {axes}")
        return tuple(self[(*(slice(None),) * number, place)] for place in range(axes[number]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __getitem__(self, index: Any) -> Any:
        """The spec of the values that an index takes; SpecIndexError, a ConfigError, where it takes none."""
        try:
            return self._changed(self._selection(index), where="index")
        except ConfigError as error:
            raise SpecIndexError(*error.args) from error

    def to(self, device: object) -> Self:
        """The same spec for another device: a label that adapters read, such as "cuda:0", or None.

        Values are drawn, checked and projected on the host all the same.
        """
        return dataclasses.replace(self, device=None if device is None else str(device))  # type: ignore[type-var]

    def astype(self, dtype: Any) -> Self:
        """The same domain with values of another dtype.

        Raises:
            ConfigError: A dtype that does not hold it.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """All that the spec says, as an object of JSON with a version, of which ``from_json`` makes it again.

        Raises:
            ConfigError: An example of ``NonTensor`` that JSON does not have.
        """
        return {"version": VERSION, **self._said()}

    def to_arrow(self, name: str = "value") -> Any:
        """An Arrow field of the type that holds a step, with all that the spec says in its metadata.

        Of a ``Composite`` it is a schema, whose fields say their specs each. ``from_arrow`` makes the spec again, also
        from what Arrow and Parquet files have kept.

        Args:
            name: What to call the field.

        Raises:
            ConfigError: As ``to_json``.
        """
        import pyarrow as pa

        return pa.field(name, self._arrow_type(), metadata={ARROW_KEY: json.dumps(self.to_json())})

    def _arrow_type(self) -> Any:
        """The type of a step's values."""
        raise NotImplementedError

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _axes(self) -> Shape:
        """The dimensions that operations may change."""
        return self.shape

    def _check_static(self, what: str) -> None:
        if is_dynamic(self.shape):
            raise ConfigError(f"{what}: expected sizes for all dimensions, found {self.shape}; expand() gives them")

    def _expansion(self, shape: Any) -> Change:
        return expanded(self._axes(), self._free(shape, "expand"))

    def _free(self, shape: Any, where: str) -> Shape:
        """What a shape has before the axes that belong to one value; ConfigError where it has other ones."""
        target = check_shape(shape, where=where)
        own = self.shape[len(self._axes()) :]
        ending = target[len(target) - len(own) :] if len(target) >= len(own) else None
        if own and ending != own and not (where == "expand" and ending == (-1,) * len(own)):
            raise ConfigError(f"{where}: expected a shape that ends in {own}, found {target}")
        return target[: len(target) - len(own)]

    def _selection(self, index: Any) -> Change:
        parts = check_index(index, self._axes())
        return lambda array, ndim: array[parts]
