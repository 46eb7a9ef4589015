"""Specs of categories: integer codes and one-hot vectors, of one category or several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.spec.domain import MOST_VALUES, Array, Shape, key_of, uniform_value, whole_numbers
from mouse_core.spec.leaf import (
    Leaf,
    check_most,
    count_product,
    leaf_dtype,
    leaf_shape,
    set_all,
    shown,
    spread,
    value_at,
)

__all__ = ["Categorical", "MultiCategorical", "MultiOneHot", "OneHot"]


class _Categories(Leaf):
    """Values from numbers of categories, of which a mask may allow only some."""

    mask: Any
    nvec: Any

    def with_mask(self, mask: Any) -> Self:
        """Return the spec with another mask.

        Args:
            mask: Booleans as in the constructor; None allows all codes.

        Raises:
            ConfigError: A mask of another shape, or a place without an allowed code.
        """
        return replace(self, mask=mask)  # type: ignore[type-var]


class _Codes(_Categories):
    """Codes from 0 at each place."""

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step: the product over its places."""
        counts = self.nvec if self.mask is None else self.mask.sum(-1)
        return count_product(np.asarray(counts), self.shape)

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """Lowest and highest code, if all codes between are allowed at every place; else None."""
        same = uniform_value(self.nvec) if self.mask is None else None
        return None if same is None else (0, same - 1)

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Array:
        shape = (*batch, *self.shape)
        counts = np.asarray(self.nvec if self.mask is None else self.mask.sum(-1), np.int64)
        drawn = whole_numbers(key_of(key, path), np.zeros_like(counts), counts - 1, shape)
        return (drawn if self.mask is None else _code_of_rank(self.mask, drawn)).astype(self.dtype)

    def _outside(self, array: Array) -> Array:
        outside = (array < 0) | (array >= self.nvec)
        if number_kind(array.dtype) == "f":
            outside |= array != np.rint(array)
        return np.asarray(outside if self.mask is None else outside | ~_allowed(self.mask, array))

    def _nearest(self, array: Array) -> Array:
        codes = np.rint(array) if array.dtype.kind == "f" else array
        codes = np.nan_to_num(codes) if codes.dtype.kind == "f" else codes
        codes = np.minimum(np.maximum(codes, 0), self.nvec - 1).astype(np.int64)
        return (codes if self.mask is None else _nearest_code(self.mask, codes)).astype(self.dtype)

    def _expected(self, place: tuple[int, ...]) -> str:
        if self.mask is None:
            return f"a code from 0 to {value_at(self.nvec, place) - 1}"
        return f"one of the codes {shown(np.flatnonzero(value_at(self.mask, place)))}"

    def _alternatives(self) -> list[Array]:
        if self.mask is None:
            return [np.arange(number) for number in np.broadcast_to(self.nvec, self.shape).flat]
        masks = np.broadcast_to(self.mask, (*self.shape, self.mask.shape[-1]))
        return [np.flatnonzero(one) for one in masks.reshape(-1, masks.shape[-1])]


@dataclass(frozen=True, eq=False, repr=False)
class Categorical(_Codes):
    """Codes from 0 to ``n - 1``, as in gymnasium's ``Discrete``.

    Args:
        n: Number of codes.
        shape: Shape of a step, with a code at each place; a size of -1 is dynamic.
        dtype: Dtype of codes: an integer dtype, or booleans for two codes.
        mask: Allowed codes, booleans ``[*shape, n]``, or ``[n]`` for all places; by default all codes.
        device: A label for adapters.

    Raises:
        ConfigError: An invalid number, shape or dtype, or a place without an allowed code.
    """

    n: int
    shape: Any = ()
    dtype: Any = np.int64
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        n = _check_n(self.n, "Categorical")
        shape = leaf_shape(self.shape, where="Categorical")
        dtype = _code_dtype(self.dtype, n, "Categorical")
        set_all(self, n=n, shape=shape, dtype=dtype, mask=_check_mask(self.mask, (*shape, n), "Categorical"))

    @property
    def nvec(self) -> Any:
        """Number of codes, as an array."""
        return np.array(self.n, np.int64)

    def one_hot(self, dtype: Any = np.bool_) -> OneHot:
        """Return the spec of the same categories as one-hot vectors, of shape ``[*shape, n]``."""
        return OneHot(self.n, (*self.shape, self.n), dtype, self.mask, self.device)


@dataclass(frozen=True, eq=False, repr=False)
class MultiCategorical(_Codes):
    """Several codes, each with its own number of codes, as in gymnasium's ``MultiDiscrete``.

    Args:
        nvec: Number of codes at each place; repeated along further dimensions at the front of ``shape``.
        shape: Shape of a step; by default the shape of ``nvec``. A size of -1 is dynamic.
        dtype: Dtype of codes: an integer dtype.
        mask: Allowed codes, booleans ``[*shape[:-1], sum(nvec)]``, concatenated over the last axis of ``shape``. Or
            ``[*shape, max(nvec)]``, as the attribute ``mask`` has them. By default all codes.
        device: A label for adapters.

    Raises:
        ConfigError: An invalid number, shape or dtype, or a place without an allowed code.
    """

    nvec: Any
    shape: Any = None
    dtype: Any = np.int64
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("nvec", "mask")

    def __post_init__(self) -> None:
        where = "MultiCategorical"
        numbers = _check_nvec(self.nvec, where)
        shape = leaf_shape(self.shape, where=where, most_common=numbers.shape)
        nvec = spread(numbers, shape, where=where)
        most = int(nvec.max()) if nvec.size else 1
        dtype = _code_dtype(self.dtype, most, where)
        mask = self.mask
        if mask is not None:
            mask = _padded_mask(_as_booleans(mask, where), nvec, most, where=where)
            mask = _check_mask(mask, (*shape, most), where)
        set_all(self, nvec=nvec, shape=shape, dtype=dtype, mask=mask)

    def one_hot(self, dtype: Any = np.bool_) -> MultiOneHot:
        """Return the spec of the same categories as concatenated one-hot vectors, ``[*shape[:-1], sum(nvec)]``.

        Raises:
            ConfigError: Numbers of codes that differ between rows of ``nvec``.
        """
        rows = self.nvec.reshape(-1, self.nvec.shape[-1]) if self.nvec.ndim else self.nvec.reshape(1, 0)
        if not rows.size or not bool((rows == rows[0]).all()):
            raise ConfigError(f"one_hot: expected the same numbers of codes in every row, found {shown(self.nvec)}")
        numbers = tuple(rows[0].tolist())
        mask = self.mask
        if mask is not None:
            mask = np.concatenate([mask[..., place, :n] for place, n in enumerate(numbers)], -1)
        return MultiOneHot(numbers, (*self.shape[:-1], sum(numbers)), dtype, mask, self.device)


class _Hot(_Categories):
    """One-hot vectors of ``nvec`` values, concatenated."""

    def categorical(self) -> Any:
        """Return the spec of the same categories as codes."""
        raise NotImplementedError

    def _hot(self, codes: Array) -> Array:
        """Convert codes of ``categorical`` to vectors."""
        return _one_hot(codes, self.nvec, self.dtype)

    def _codes(self, hot: Array) -> Array:
        """Convert vectors to codes of ``categorical``."""
        return np.stack([part.argmax(-1) for part in np.split(hot, np.cumsum(self.nvec)[:-1], -1)], -1)

    def _axes(self) -> Shape:
        return self.shape[:-1]

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step."""
        number: int | float = self.categorical().cardinality
        return number

    def encode(self, values: Any) -> Any:
        """Convert codes to one-hot vectors.

        Args:
            values: Codes of ``categorical()``, of any integer dtype.

        Raises:
            DataError: Codes outside the domain.
        """
        return self._hot(self.categorical().encode(values))

    def decode(self, values: Any) -> Any:
        """Convert one-hot vectors to codes, in int64.

        Raises:
            DataError: Vectors outside the domain.
        """
        self.check(values)
        return self._codes(self._as_array(values))

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the domain, ``[cardinality, *shape]``, in the order of their codes.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: More than ``most`` values, or infinitely many.
        """
        check_most(self, most)
        return self._hot(self.categorical().enumerate(most=most))

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Array:
        return self._hot(self.categorical()._draw(key, path, batch))

    def _outside(self, array: Array) -> Array:
        hot = array != 0
        outside = ((array != 0) & (array != 1)).any(-1)
        begin = 0
        for number in self.nvec:
            outside |= hot[..., begin : begin + number].sum(-1) != 1
            begin += number
        return np.asarray(outside if self.mask is None else outside | (hot & ~self.mask).any(-1))

    def _nearest(self, array: Array) -> Array:
        inside = ~self._outside(array)
        values = np.nan_to_num(array.astype(np.float64), posinf=np.finfo(np.float64).max)
        if self.mask is not None:
            values = np.where(self.mask, values, -np.inf)
        return np.where(inside[..., None], array, self._hot(self._codes(values))).astype(self.dtype)

    def _expected(self, place: tuple[int, ...]) -> str:
        numbers = list(self.nvec)
        one = f"one 1 among {numbers[0]} zeros" if len(numbers) == 1 else f"one 1 in each part, {numbers}"
        if self.mask is not None:
            one += f", where the mask {shown(np.asarray(value_at(self.mask, place)))} is true"
        return one


@dataclass(frozen=True, eq=False, repr=False)
class OneHot(_Hot):
    """One-hot vectors: one of ``n`` values is 1, the others are 0.

    Args:
        n: Number of values of a vector.
        shape: Shape of a step, ``[..., n]``; by default ``[n]``. A size of -1 before the last is dynamic.
        dtype: Dtype of values.
        mask: Values that may be 1, booleans of ``shape``, or ``[n]`` for all vectors; by default all.
        device: A label for adapters.

    Raises:
        ConfigError: An invalid number, shape or dtype, or a vector without an allowed 1.
    """

    n: int
    shape: Any = None
    dtype: Any = np.bool_
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        n = _check_n(self.n, "OneHot")
        shape = _hot_shape(self.shape, n, "OneHot")
        dtype = leaf_dtype(self.dtype, "biuf", where="OneHot")
        set_all(self, n=n, shape=shape, dtype=dtype, mask=_check_mask(self.mask, shape, "OneHot"))

    @property
    def nvec(self) -> Any:
        """Number of values of the vector, as in ``MultiOneHot``."""
        return (self.n,)

    def categorical(self, dtype: Any = np.int64) -> Categorical:
        """Return the spec of the same categories as codes, of shape ``shape[:-1]``."""
        return Categorical(self.n, self.shape[:-1], dtype, self.mask, self.device)

    def _hot(self, codes: Array) -> Array:
        return super()._hot(codes[..., None])

    def _codes(self, hot: Array) -> Array:
        return np.asarray(hot.argmax(-1))


@dataclass(frozen=True, eq=False, repr=False)
class MultiOneHot(_Hot):
    """Concatenated one-hot vectors.

    Args:
        nvec: Number of values of each one-hot vector.
        shape: Shape of a step, ``[..., sum(nvec)]``; by default ``[sum(nvec)]``. A size of -1 before the last is
            dynamic.
        dtype: Dtype of values.
        mask: Values that may be 1, booleans of ``shape``, or ``[sum(nvec)]`` for all; by default all.
        device: A label for adapters.

    Raises:
        ConfigError: An invalid number, shape or dtype, or a one-hot vector without an allowed 1.
    """

    nvec: Any
    shape: Any = None
    dtype: Any = np.bool_
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        where = "MultiOneHot"
        numbers = _check_nvec(self.nvec, where)
        if numbers.ndim != 1 or not numbers.size:
            raise ConfigError(f"{where}: expected nvec as a list of numbers, found {self.nvec!r:.80}")
        nvec = tuple(numbers.tolist())
        shape = _hot_shape(self.shape, sum(nvec), where)
        dtype = leaf_dtype(self.dtype, "biuf", where=where)
        set_all(self, nvec=nvec, shape=shape, dtype=dtype, mask=_check_mask(self.mask, shape, where))
        if self.mask is not None:
            self.categorical()  # raises ConfigError for a part without an allowed 1

    def categorical(self, dtype: Any = np.int64) -> MultiCategorical:
        """Return the spec of the same categories as codes, of shape ``[*shape[:-1], len(nvec)]``."""
        shape = (*self.shape[:-1], len(self.nvec))
        return MultiCategorical(np.array(self.nvec), shape, dtype, self.mask, self.device)


# --- codes and masks as arrays ----------------------------------------------------------------------------------------


def _allowed(mask: Array, codes: Array) -> Array:
    """Return which codes a mask ``[..., n]`` allows; codes outside ``0..n - 1`` are not allowed."""
    n = mask.shape[-1]
    inside = (codes >= 0) & (codes < n)
    numbers = np.where(inside, codes, 0).astype(np.int64)
    whole = np.broadcast_to(mask, (*numbers.shape, n))
    return np.asarray(np.take_along_axis(whole, numbers[..., None], -1)[..., 0] & inside)


def _code_of_rank(mask: Array, ranks: Array) -> Array:
    """Return the allowed code of a rank from 0: with the mask ``[False, True, True]``, rank 1 is code 2."""
    return np.asarray((mask.cumsum(-1) > ranks[..., None]).argmax(-1))


def _nearest_code(mask: Array, codes: Array) -> Array:
    """Return the nearest allowed code for each code; the lower one of two."""
    n = mask.shape[-1]
    numbers = np.arange(n)
    before = np.maximum.accumulate(np.where(mask, numbers, -2 * n), -1)
    after = np.minimum.accumulate(np.where(mask, numbers, 3 * n)[..., ::-1], -1)[..., ::-1]
    nearest = np.where(numbers - before <= after - numbers, before, after)
    whole = np.broadcast_to(nearest, (*codes.shape, n))
    return np.asarray(np.take_along_axis(whole, codes[..., None], -1)[..., 0])


def _one_hot(codes: Array, numbers: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Convert codes ``[..., k]`` to concatenated one-hot vectors ``[..., sum(numbers)]``."""
    begins = np.concatenate([[0], np.cumsum(numbers)[:-1]]).astype(np.int64)
    hot = np.zeros((*codes.shape[:-1], sum(numbers)), dtype)
    np.put_along_axis(hot, codes.astype(np.int64) + begins, 1, -1)
    return hot


def _padded_mask(mask: Array, nvec: Array, most: int, *, where: str) -> Array:
    """Convert a mask ``[..., sum(nvec)]`` to ``[..., k, most]``; return a mask of that shape unchanged."""
    if mask.ndim > 1 and mask.shape[-2:] == (*nvec.shape[-1:], most):
        return mask & (np.arange(most) < nvec[..., None])
    rows = nvec.reshape(-1, nvec.shape[-1]) if nvec.ndim else nvec.reshape(1, 1)
    if not bool((rows == rows[0]).all()) or mask.shape[-1] != rows[0].sum():
        raise ConfigError(
            f"{where}: expected a mask of {int(rows[0].sum())} booleans, or of {most} for each code, found {mask.shape}"
        )
    padded = np.zeros((*mask.shape[:-1], rows.shape[1], most), bool)
    begin = 0
    for place, number in enumerate(rows[0]):
        padded[..., place, :number] = mask[..., begin : begin + number]
        begin += number
    return padded if nvec.ndim else padded[..., 0, :]


def _check_n(n: Any, where: str) -> int:
    """Return the number of codes; raises ConfigError unless it is an integer from 1."""
    if not is_whole(n) or n < 1:
        raise ConfigError(f"{where}: expected n as an integer from 1, found {n!r:.80}")
    return int(n)


def _check_nvec(nvec: Any, where: str) -> Array:
    """Return numbers of codes as an array; raises ConfigError unless they are integers from 1."""
    try:
        numbers = np.asarray(nvec)
    except ValueError as error:
        raise ConfigError(f"{where}: expected nvec as integers from 1, found {nvec!r:.80}") from error
    if numbers.dtype.kind not in "iu" or bool((numbers < 1).any()):
        raise ConfigError(f"{where}: expected nvec as integers from 1, found {nvec!r:.80}")
    return numbers.astype(np.int64)


def _code_dtype(dtype: Any, most: int, where: str) -> np.dtype[Any]:
    """Return a dtype; raises ConfigError unless it holds ``most`` codes."""
    checked = leaf_dtype(dtype, "biu", where=where)
    highest = 1 if checked.kind == "b" else int(np.iinfo(checked).max)
    if most - 1 > highest:
        raise ConfigError(f"{where}: expected a dtype that holds {most - 1}, found {checked}")
    return checked


def _hot_shape(shape: Any, n: int, where: str) -> Shape:
    """Return a shape; raises ConfigError unless its last size is the number of codes."""
    checked = leaf_shape(shape, where=where, most_common=(n,))
    if not checked or checked[-1] != n:
        raise ConfigError(f"{where}: expected a shape that ends in {n}, found {checked}")
    return checked


def _as_booleans(mask: Any, where: str) -> Array:
    """Return a mask as an array; raises ConfigError unless it has booleans."""
    array = np.asarray(mask)
    if array.dtype.kind != "b" or not array.ndim:
        raise ConfigError(f"{where}: expected a mask of booleans, found {mask!r:.80}")
    return array


def _check_mask(mask: Any, shape: Shape, where: str) -> Array | None:
    """Return a mask for every place, None for a shape without places; raises ConfigError for places without a code."""
    if mask is None:
        return None
    array = spread(_as_booleans(mask, where), shape, where=f"{where}: mask")
    if not bool(array.any(-1).all()):
        raise ConfigError(f"{where}: expected a mask that allows a choice at every place, found {shown(array)}")
    return array if array.size else None
