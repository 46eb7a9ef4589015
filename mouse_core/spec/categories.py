"""Specs of categories: codes from 0, and vectors that mark a code by a 1; one category, or several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.spec.domain import MOST_VALUES
from mouse_core.spec.draws import key_of, whole_numbers
from mouse_core.spec.leaf import Leaf, at, check_most, count_product, leaf_dtype, leaf_shape, set_all, shown, spread
from mouse_core.spec.shapes import Array, Shape, uniform_value

__all__ = ["Categorical", "MultiCategorical", "MultiOneHot", "OneHot"]


class Codes(Leaf):
    """Codes from 0, place by place."""

    mask: Any
    nvec: Any

    @property
    def cardinality(self) -> int | float:
        """How many different values a step can have: the product over its places."""
        counts = self.nvec if self.mask is None else self.mask.sum(-1)
        return count_product(np.asarray(counts), self.shape)

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """Between which numbers, whole ones, all are in the domain at every place; None: not so."""
        same = uniform_value(self.nvec) if self.mask is None else None
        return None if same is None else (0, same - 1)

    def with_mask(self, mask: Any) -> Self:
        """The same spec with other choices allowed, or all of them.

        Args:
            mask: Booleans as the class has them, or None.

        Raises:
            ConfigError: Booleans of another shape, or a place without any choice.
        """
        return replace(self, mask=mask)  # type: ignore[type-var]

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Array:
        shape = (*batch, *self.shape)
        counts = np.asarray(self.nvec if self.mask is None else self.mask.sum(-1), np.int64)
        drawn = whole_numbers(key_of(key, path), np.zeros_like(counts), counts - 1, shape)
        return (drawn if self.mask is None else one_code(self.mask, drawn)).astype(self.dtype)

    def _outside(self, array: Array) -> Array:
        outside = (array < 0) | (array >= self.nvec)
        if number_kind(array.dtype) == "f":
            outside |= array != np.rint(array)
        return np.asarray(outside if self.mask is None else outside | ~among(self.mask, array))

    def _nearest(self, array: Array) -> Array:
        codes = np.rint(array) if array.dtype.kind == "f" else array
        codes = np.nan_to_num(codes) if codes.dtype.kind == "f" else codes
        codes = np.minimum(np.maximum(codes, 0), self.nvec - 1).astype(np.int64)
        return (codes if self.mask is None else nearest_code(self.mask, codes)).astype(self.dtype)

    def _expected(self, place: tuple[int, ...]) -> str:
        if self.mask is None:
            return f"a code from 0 to {at(self.nvec, place) - 1}"
        return f"one of the codes {shown(np.flatnonzero(at(self.mask, place)))}"

    def _alternatives(self) -> list[Array]:
        if self.mask is None:
            return [np.arange(number) for number in np.broadcast_to(self.nvec, self.shape).flat]
        masks = np.broadcast_to(self.mask, (*self.shape, self.mask.shape[-1]))
        return [np.flatnonzero(one) for one in masks.reshape(-1, masks.shape[-1])]


@dataclass(frozen=True, eq=False, repr=False)
class Categorical(Codes):
    """Codes from 0 to ``n - 1``: gymnasium's ``Discrete``.

    Args:
        n: How many there are.
        shape: Of a step, which has a code at each place; a size of -1 is dynamic.
        dtype: Of codes: an integer dtype, or booleans of two.
        mask: Which codes are allowed, booleans ``[*shape, n]``, or ``[n]`` for all places; by default all are.
        device: A label that adapters read.

    Raises:
        ConfigError: Another number, shape or dtype, or a place without any code.
    """

    n: int
    shape: Any = ()
    dtype: Any = np.int64
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        n = check_n(self.n, "Categorical")
        shape = leaf_shape(self.shape, where="Categorical")
        dtype = code_dtype(self.dtype, n, "Categorical")
        set_all(self, n=n, shape=shape, dtype=dtype, mask=check_mask(self.mask, (*shape, n), "Categorical"))

    @property
    def nvec(self) -> Any:
        """How many codes there are, as an array."""
        return np.array(self.n, np.int64)

    def one_hot(self, dtype: Any = np.bool_) -> OneHot:
        """The same choices as vectors of which one value is 1, of shape ``[*shape, n]``."""
        return OneHot(self.n, (*self.shape, self.n), dtype, self.mask, self.device)


@dataclass(frozen=True, eq=False, repr=False)
class MultiCategorical(Codes):
    """Several codes, each from 0 to a number of its own: gymnasium's ``MultiDiscrete``.

    Args:
        nvec: How many codes there are at each place; with more dimensions in ``shape``, at its last places.
        shape: Of a step; by default that of ``nvec``. A size of -1 is dynamic.
        dtype: Of codes: an integer dtype.
        mask: Which codes are allowed: booleans ``[*shape[:-1], sum(nvec)]``, those of the first code first, or, as the
            spec keeps them, ``[*shape, max(nvec)]``; by default all are.
        device: A label that adapters read.

    Raises:
        ConfigError: Another number, shape or dtype, or a place without any code.
    """

    nvec: Any
    shape: Any = None
    dtype: Any = np.int64
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("nvec", "mask")

    def __post_init__(self) -> None:
        where = "MultiCategorical"
        numbers = check_nvec(self.nvec, where)
        shape = leaf_shape(self.shape, where=where, most_common=numbers.shape)
        nvec = spread(numbers, shape, where=where)
        most = int(nvec.max()) if nvec.size else 1
        dtype = code_dtype(self.dtype, most, where)
        mask = self.mask
        if mask is not None:
            mask = padded_mask(as_booleans(mask, where), nvec, most, where=where)
            mask = check_mask(mask, (*shape, most), where)
        set_all(self, nvec=nvec, shape=shape, dtype=dtype, mask=mask)

    def one_hot(self, dtype: Any = np.bool_) -> MultiOneHot:
        """The same choices as vectors of which one value is 1 for each code, of shape ``[*shape[:-1], sum(nvec)]``.

        Raises:
            ConfigError: Codes that are not as many in every row.
        """
        rows = self.nvec.reshape(-1, self.nvec.shape[-1]) if self.nvec.ndim else self.nvec.reshape(1, 0)
        if not rows.size or not bool((rows == rows[0]).all()):
            raise ConfigError(f"one_hot: expected the same numbers of codes in every row, found {shown(self.nvec)}")
        numbers = tuple(rows[0].tolist())
        mask = self.mask
        if mask is not None:
            mask = np.concatenate([mask[..., place, :n] for place, n in enumerate(numbers)], -1)
        return MultiOneHot(numbers, (*self.shape[:-1], sum(numbers)), dtype, mask, self.device)


class _Hot(Leaf):
    """Vectors of which one value is 1 for each category."""

    mask: Any

    def _numbers(self) -> tuple[int, ...]:
        raise NotImplementedError

    def categorical(self) -> Any:
        """The same choices as codes."""
        raise NotImplementedError

    def _hot(self, codes: Array) -> Array:
        """Codes of ``categorical`` as vectors."""
        raise NotImplementedError

    def _codes(self, hot: Array) -> Array:
        """Vectors as codes of ``categorical``."""
        raise NotImplementedError

    def _axes(self) -> Shape:
        return self.shape[:-1]

    @property
    def cardinality(self) -> int | float:
        """How many different values a step can have."""
        number: int | float = self.categorical().cardinality
        return number

    def with_mask(self, mask: Any) -> Self:
        """The same spec with other choices allowed, or all of them.

        Args:
            mask: Booleans of the shape of a step, or None.

        Raises:
            ConfigError: Booleans of another shape, or a category without any choice.
        """
        return replace(self, mask=mask)  # type: ignore[type-var]

    def encode(self, values: Any) -> Any:
        """Codes as vectors of which one value is 1.

        Args:
            values: Codes as ``categorical()`` has them, of any integer dtype.

        Raises:
            DataError: Codes that are not in the domain.
        """
        return self._hot(self.categorical().encode(values))

    def decode(self, values: Any) -> Any:
        """Vectors as codes, in int64.

        Raises:
            DataError: Vectors that are not in the domain.
        """
        self.check(values)
        return self._codes(self._taken(values))

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """All values of the domain, ``[cardinality, *shape]``, in the order of their codes.

        Args:
            most: How many there may be.

        Raises:
            ConfigError: More than ``most``, or without number.
        """
        check_most(self, most)
        return self._hot(self.categorical().enumerate(most=most))

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Array:
        return self._hot(self.categorical()._draw(key, path, batch))

    def _outside(self, array: Array) -> Array:
        hot = array != 0
        outside = ((array != 0) & (array != 1)).any(-1)
        begin = 0
        for number in self._numbers():
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
        numbers = self._numbers()
        one = f"one 1 among {numbers[0]} zeros" if len(numbers) == 1 else f"one 1 in each part, {list(numbers)}"
        return one if self.mask is None else f"{one}, where the mask {shown(np.asarray(at(self.mask, place)))} is true"


@dataclass(frozen=True, eq=False, repr=False)
class OneHot(_Hot):
    """Vectors of ``n`` values of which one is 1 and the others are 0.

    Args:
        n: How many values, and so choices, there are.
        shape: Of a step, ``[..., n]``; by default ``[n]``. A size of -1 before the last is dynamic.
        dtype: Of values.
        mask: Which choices are allowed, booleans of ``shape``, or ``[n]`` for all; by default all are.
        device: A label that adapters read.

    Raises:
        ConfigError: Another number, shape or dtype, or a vector without any choice.
    """

    n: int
    shape: Any = None
    dtype: Any = np.bool_
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        n = check_n(self.n, "OneHot")
        shape = hot_shape(self.shape, n, "OneHot")
        dtype = leaf_dtype(self.dtype, "biuf", where="OneHot")
        set_all(self, n=n, shape=shape, dtype=dtype, mask=check_mask(self.mask, shape, "OneHot"))

    def _numbers(self) -> tuple[int, ...]:
        return (self.n,)

    def categorical(self, dtype: Any = np.int64) -> Categorical:
        """The same choices as codes, of shape ``shape[:-1]``."""
        return Categorical(self.n, self.shape[:-1], dtype, self.mask, self.device)

    def _hot(self, codes: Array) -> Array:
        return one_hot(codes[..., None], (self.n,), self.dtype)

    def _codes(self, hot: Array) -> Array:
        return np.asarray(hot.argmax(-1))


@dataclass(frozen=True, eq=False, repr=False)
class MultiOneHot(_Hot):
    """Vectors in parts, of each of which one value is 1.

    Args:
        nvec: How many values each part has.
        shape: Of a step, ``[..., sum(nvec)]``; by default ``[sum(nvec)]``. A size of -1 before the last is dynamic.
        dtype: Of values.
        mask: Which choices are allowed, booleans of ``shape``, or ``[sum(nvec)]`` for all; by default all are.
        device: A label that adapters read.

    Raises:
        ConfigError: Another number, shape or dtype, or a part without any choice.
    """

    nvec: Any
    shape: Any = None
    dtype: Any = np.bool_
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        where = "MultiOneHot"
        numbers = check_nvec(self.nvec, where)
        if numbers.ndim != 1 or not numbers.size:
            raise ConfigError(f"{where}: expected nvec as a list of numbers, found {self.nvec!r:.80}")
        nvec = tuple(numbers.tolist())
        shape = hot_shape(self.shape, sum(nvec), where)
        dtype = leaf_dtype(self.dtype, "biuf", where=where)
        set_all(self, nvec=nvec, shape=shape, dtype=dtype, mask=check_mask(self.mask, shape, where))
        if self.mask is not None:
            self.categorical()  # which refuses a part without any choice

    def _numbers(self) -> tuple[int, ...]:
        numbers: tuple[int, ...] = self.nvec
        return numbers

    def categorical(self, dtype: Any = np.int64) -> MultiCategorical:
        """The same choices as codes, of shape ``[*shape[:-1], len(nvec)]``."""
        shape = (*self.shape[:-1], len(self.nvec))
        return MultiCategorical(np.array(self.nvec), shape, dtype, self.mask, self.device)

    def _hot(self, codes: Array) -> Array:
        return one_hot(codes, self._numbers(), self.dtype)

    def _codes(self, hot: Array) -> Array:
        ends = np.cumsum(self.nvec)[:-1]
        return np.stack([part.argmax(-1) for part in np.split(hot, ends, -1)], -1)


def among(mask: Array, codes: Array) -> Array:
    """Which codes a mask ``[..., n]`` allows; codes beyond it are not allowed."""
    n = mask.shape[-1]
    inside = (codes >= 0) & (codes < n)
    numbers = np.where(inside, codes, 0).astype(np.int64)
    whole = np.broadcast_to(mask, (*numbers.shape, n))
    return np.asarray(np.take_along_axis(whole, numbers[..., None], -1)[..., 0] & inside)


def one_code(mask: Array, ranks: Array) -> Array:
    """The allowed code of a rank, counted from 0: of ``mask`` ``[False, True, True]``, rank 1 is code 2."""
    return np.asarray((mask.cumsum(-1) > ranks[..., None]).argmax(-1))


def nearest_code(mask: Array, codes: Array) -> Array:
    """The allowed code that is nearest to each, the lower one of two."""
    n = mask.shape[-1]
    numbers = np.arange(n)
    before = np.maximum.accumulate(np.where(mask, numbers, -2 * n), -1)
    after = np.minimum.accumulate(np.where(mask, numbers, 3 * n)[..., ::-1], -1)[..., ::-1]
    nearest = np.where(numbers - before <= after - numbers, before, after)
    whole = np.broadcast_to(nearest, (*codes.shape, n))
    return np.asarray(np.take_along_axis(whole, codes[..., None], -1)[..., 0])


def one_hot(codes: Array, numbers: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Codes ``[..., k]`` as vectors ``[..., sum(numbers)]`` with a 1 for each of them."""
    begins = np.concatenate([[0], np.cumsum(numbers)[:-1]]).astype(np.int64)
    hot = np.zeros((*codes.shape[:-1], sum(numbers)), dtype)
    np.put_along_axis(hot, codes.astype(np.int64) + begins, 1, -1)
    return hot


def padded_mask(mask: Array, nvec: Array, most: int, *, where: str) -> Array:
    """A mask of several codes, those of each behind the other, as one of ``[..., k, most]``; such a one as it is."""
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


def check_n(n: Any, where: str) -> int:
    """A number of choices, or ConfigError."""
    if not is_whole(n) or n < 1:
        raise ConfigError(f"{where}: expected n as an integer from 1, found {n!r:.80}")
    return int(n)


def check_nvec(nvec: Any, where: str) -> Array:
    """Numbers of choices as an array, or ConfigError."""
    try:
        numbers = np.asarray(nvec)
    except ValueError as error:
        raise ConfigError(f"{where}: expected nvec as integers from 1, found {nvec!r:.80}") from error
    if numbers.dtype.kind not in "iu" or bool((numbers < 1).any()):
        raise ConfigError(f"{where}: expected nvec as integers from 1, found {nvec!r:.80}")
    return numbers.astype(np.int64)


def code_dtype(dtype: Any, most: int, where: str) -> np.dtype[Any]:
    """A dtype that holds codes up to a highest, or ConfigError."""
    checked = leaf_dtype(dtype, "biu", where=where)
    highest = 1 if checked.kind == "b" else int(np.iinfo(checked).max)
    if most - 1 > highest:
        raise ConfigError(f"{where}: expected a dtype that holds {most - 1}, found {checked}")
    return checked


def hot_shape(shape: Any, n: int, where: str) -> Shape:
    """A shape that ends in the number of choices, or ConfigError."""
    checked = leaf_shape(shape, where=where, most_common=(n,))
    if not checked or checked[-1] != n:
        raise ConfigError(f"{where}: expected a shape that ends in {n}, found {checked}")
    return checked


def as_booleans(mask: Any, where: str) -> Array:
    """A mask as an array, or ConfigError."""
    array = np.asarray(mask)
    if array.dtype.kind != "b" or not array.ndim:
        raise ConfigError(f"{where}: expected a mask of booleans, found {mask!r:.80}")
    return array


def check_mask(mask: Any, shape: Shape, where: str) -> Array | None:
    """A mask for every place, or ConfigError where it is none or leaves a place without any choice.

    Of no places it says nothing, and is None.
    """
    if mask is None:
        return None
    array = spread(as_booleans(mask, where), shape, where=f"{where}: mask")
    if not bool(array.any(-1).all()):
        raise ConfigError(f"{where}: expected a mask that allows a choice at every place, found {shown(array)}")
    return array if array.size else None
