"""Normalisation of fields by their statistics, and its inverse, for arrays of NumPy, PyTorch and JAX."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.memory import ArrayMemory
from mouse_core.dtypes import RowError, array_like, convert, is_ml_float, kind_of, namespace
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.sampling.plan import Plan
from mouse_core.spec import FieldSpec, check_choice
from mouse_core.statistics.by_field import FieldStatistics, Statistics, statistics
from mouse_core.store.fields import meant_by
from mouse_core.store.snapshot import Snapshot

Batch = dict[str, npt.NDArray[Any]]
DTypes = Mapping[str, np.dtype[np.generic]]

Normalization = Literal["mean_std", "min_max", "quantiles"]
"""How a field is normalised."""

_SHARES = (0.01, 0.99)
# Constants are repeated until a row is about so long: NumPy begins anew for every row.
_ROW = 1 << 14
# A part of a deviation below which nothing is seen: less than float32 resolves.
_SEEN = 2.0**-25


@dataclass(frozen=True, eq=False)
class Scaling:
    """``(x - centre) * (1 / spread)`` by dimension, in float32; in float64 where ``x`` has 32 bits of integer, or 64.

    Where float32 does not hold a centre well enough, what it lacks is subtracted, too: of a mean of 1,000,000.03 and a
    deviation of 1 the float32 is 1,000,000, and 0.03 is left.

    Args:
        kind: "mean_std", "min_max" or "quantiles".
        centre, spread: float64, of a step's shape, or ``[C]`` for the channels of images; ``spread`` is above 0.
        is_image: Whether these are channels.
    """

    kind: Normalization
    centre: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]
    is_image: bool = False
    _tiled: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def identity(self) -> list[Any]:
        """The kind, and a digest of the numbers, for fingerprints."""
        numbers = b"".join(np.ascontiguousarray(one, "<f8").tobytes() for one in (self.centre, self.spread))
        return [self.kind, hashlib.sha256(numbers).hexdigest()[:16]]

    def apply(self, values: Any) -> Any:
        """Return normalised values, in an array of the same framework, on the same device.

        Args:
            values: ``[..., *shape]`` of numbers; of images ``[..., H, W, C]`` or flattened, ``[..., H * W * C]``.

        Returns:
            The same shape, float32: in all frameworks the bits that a source delivers of values of this dtype. Inside
            ``jax.jit`` the compiler may contract operations, so that the last bit differs.

        Raises:
            SchemaError: The values have another shape, or are no array.
        """
        _check_array("apply", values)
        if isinstance(values, np.ndarray):
            return self.normalized(values).astype(np.float32, copy=False)
        xp, rows = self._rows(values)
        dtype = np.dtype(np.float32 if _is_narrow(values.dtype) else np.float64)
        centre, rest, factor = (one if one is None else array_like(one, values) for one in self._applied(dtype))
        made = xp.astype(rows, getattr(xp, dtype.name)) - centre
        made = (made if rest is None else made - rest) * factor
        return xp.reshape(xp.astype(made, xp.float32), tuple(values.shape))

    def undo(self, values: Any) -> Any:
        """Return the original values of normalised ones, in the same framework and device, also in ``jax.jit``.

        The result differs from the original by ``4e-7`` of ``abs(centre) + abs(x - centre)`` at most, that is by a few
        units in the last place of float32.

        Args:
            values: ``[..., *shape]`` of floats, as for ``apply``.

        Returns:
            The same shape; float64 for float64, else float32.

        Raises:
            SchemaError: The values have another shape, are integers, or are no array.
        """
        _check_array("undo", values)
        if kind_of(values.dtype) != "f":
            raise SchemaError(f"undo: expected normalised values, which are floats, found {values.dtype}")
        xp, rows = self._rows(values)
        dtype = np.dtype(np.float32 if _is_narrow(values.dtype) else np.float64)
        centre, rest, spread = (one if one is None else array_like(one, values) for one in self._constants(dtype))
        made = xp.astype(rows, getattr(xp, dtype.name)) * spread
        made = (made if rest is None else made + rest) + centre
        return xp.reshape(made, tuple(values.shape))

    def normalized(self, values: npt.NDArray[Any], empty: Any = np.empty, *, own: bool = False) -> npt.NDArray[Any]:
        """Values of NumPy normalised, in the dtype that it is done in.

        Args:
            values: ``[..., *shape]``.
            empty: Gives memory for the new array.
            own: Whether ``values`` may be written to.
        """
        self._check(tuple(values.shape))
        dtype = np.dtype(np.float32 if _is_narrow(values.dtype) else np.float64)
        width = max(1, self.centre.size)
        rows = values.size // width
        # Of 96 rows of 17 numbers 32 are as one row of 544: a number that is a power of two, and divides 96.
        beside = math.gcd(rows, 1 << max(0, (_ROW // width).bit_length() - 1)) if rows else 1
        known = (beside, dtype)
        if known not in self._tiled:
            self._tiled[known] = [one if one is None else np.tile(one, beside) for one in self._applied(dtype)]
        centre, rest, factor = self._tiled[known]
        in_place = own and values.dtype == dtype and values.flags.c_contiguous and values.flags.writeable
        made = values if in_place else empty(values.shape, dtype)
        laid = (-1, beside * width) if rows else (0, beside * width)
        if is_ml_float(values.dtype):
            values = values.astype(np.float32)
        rows_of = made.reshape(laid)
        np.subtract(np.ascontiguousarray(values).reshape(laid), centre, out=rows_of, dtype=dtype)
        if rest is not None:
            np.subtract(rows_of, rest, out=rows_of)
        np.multiply(rows_of, factor, out=rows_of)
        return np.asarray(made)

    def _applied(self, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Return what is subtracted first and second, and the factor: XLA's division has other bits."""
        centre, rest, _ = self._constants(dtype)
        return centre, rest, (1 / self._varying(dtype)).astype(dtype)

    def _constants(self, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Centre, what the dtype lacks of it (None: nothing that could be seen), and spread, ``[width]`` each."""
        spread, centre = self._varying(dtype).astype(dtype), self.centre.astype(dtype).reshape(-1)
        rest = (self.centre.reshape(-1) - centre).astype(dtype)
        return centre, rest if (np.abs(rest) > _SEEN * spread).any() else None, spread

    def _varying(self, dtype: np.dtype[Any]) -> npt.NDArray[np.float64]:
        """Spreads, and 1 for those that a dtype takes for 0, or nearly so."""
        spread = self.spread.reshape(-1)
        return np.where(spread >= np.finfo(dtype).tiny, spread, 1.0)

    def _rows(self, values: Any) -> tuple[Any, Any]:
        """The functions for an array, and the array as rows ``[n, width]``."""
        self._check(tuple(values.shape))
        xp = namespace(values)
        return xp, xp.reshape(values, (-1, max(1, self.centre.size)))

    def check_field(self, spec: FieldSpec, *, axes_before: int) -> None:
        """Raise SchemaError unless steps of a field, behind some axes, have a number for each of these."""
        expected = spec.shape[axes_before:] if spec.image_shape is None else spec.image_shape[2:]
        alone = self.centre.shape == () and math.prod(expected) == 1  # which files say as shape [1]
        if self.centre.shape != expected and not alone:
            raise SchemaError(
                f"normalize: {spec.name}: expected numbers of shape {list(expected)}, as the field has, "
                f"found a normaliser of {list(self.centre.shape)}"
            )

    def _check(self, shape: tuple[int, ...]) -> None:
        own = self.centre.shape
        ends = shape[len(shape) - len(own) :] == own
        if not ends and not (self.is_image and shape and shape[-1] % own[0] == 0):
            wanted = f"[..., H * W * {own[0]}]" if self.is_image else f"[..., {', '.join(map(str, own))}]"
            raise SchemaError(f"normalize: expected values {wanted}, found shape {list(shape)}")


class Normalizer(Mapping[str, Scaling]):
    """The scalings of fields by name, from ``Normalizer.of`` or from a source.

    Args:
        scalings: By field.
        counted: The statistics that the normaliser follows: with more rows, the scalings are updated. None: fixed
            scalings.
    """

    def __init__(self, scalings: Mapping[str, Scaling], counted: Statistics | None = None) -> None:
        self._scalings, self._counted = dict(scalings), counted

    def __getitem__(self, name: str) -> Scaling:
        if name not in self._scalings:
            raise MissingFieldError(f"normalize: expected one of {list(self._scalings)}, found {name!r}")
        return self._scalings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scalings)

    def __len__(self) -> int:
        return len(self._scalings)

    def __repr__(self) -> str:
        return f"Normalizer({ {name: scaling.kind for name, scaling in self._scalings.items()} })"

    @staticmethod
    def of(counted: Statistics, kinds: Mapping[str, Normalization]) -> Normalizer:
        """Return a normaliser with the scalings of fixed statistics.

        Args:
            counted: The statistics.
            kinds: By field: "mean_std", to mean 0 and deviation 1; "min_max", the lowest to -1 and the highest to 1;
                "quantiles", of which 0.01 goes to -1 and 0.99 to 1. A constant dimension is only shifted.

        Raises:
            ConfigError: A kind is unknown, or the statistics lack the quantiles.
            MissingFieldError: A field has no statistics.
        """
        return _normalizer(counted, kinds, follows=False)

    @property
    def follows(self) -> bool:
        """Whether the scalings follow the rows of a snapshot and later rows."""
        return self._counted is not None

    @property
    def fixed(self) -> Normalizer:
        """A normaliser with the same scalings that follows no rows."""
        return Normalizer(self._scalings)

    def over(self, snapshot: Snapshot, *, grown: bool = False) -> Normalizer:
        """The normaliser for a snapshot: itself, or that of these rows.

        Args:
            snapshot: The rows.
            grown: Whether they are those that it follows, with others behind them: then only those are read.
        """
        before = self._counted
        if before is None or before.fingerprint == snapshot.fingerprint:
            return self
        kinds = {name: scaling.kind for name, scaling in self._scalings.items()}
        return _normalizer(before.update(snapshot), kinds, follows=True) if grown else follow(snapshot, kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        return Normalizer, (self._scalings, self._counted)


def follow(snapshot: Snapshot, kinds: Mapping[str, Normalization]) -> Normalizer:
    """Return a normaliser by the statistics of a snapshot, which follows later rows.

    Raises:
        ConfigError: An unknown kind.
        MissingFieldError: A field that is not there.
    """
    _check_kinds(kinds)
    for name in kinds:
        if name not in snapshot.readers:
            hint = meant_by(name, snapshot.readers, snapshot.config.types)
            raise MissingFieldError(f"normalize: expected fields among {list(snapshot.readers)}, found {name!r}{hint}")
    shares = _SHARES if "quantiles" in kinds.values() else ()
    return _normalizer(statistics(snapshot, list(kinds), quantiles=shares), kinds, follows=True)


def _normalizer(counted: Statistics, kinds: Mapping[str, Normalization], *, follows: bool) -> Normalizer:
    _check_kinds(kinds)
    scalings = {name: _scaling(name, counted[name], kind) for name, kind in kinds.items()}
    return Normalizer(scalings, counted if follows else None)


def _check_kinds(kinds: Any) -> None:
    if isinstance(kinds, Statistics):
        raise ConfigError(
            "normalize: expected kinds by field or a Normalizer, found Statistics; Normalizer.of(statistics, "
            "{'action': 'mean_std'}) makes a Normalizer of them"
        )
    if not isinstance(kinds, Mapping):
        raise ConfigError(f"normalize: expected kinds by field or a Normalizer, found {kinds!r:.80}")
    for name, kind in kinds.items():
        check_choice(f"normalize: {name}", kind, get_args(Normalization))


def _scaling(name: str, found: FieldStatistics, kind: Normalization) -> Scaling:
    if kind == "mean_std":
        centre, spread = found.mean, found.std
    else:
        low, high = found.min, found.max
        if kind == "quantiles":
            if not set(_SHARES) <= found.quantiles.keys():
                raise ConfigError(
                    f"normalize: {name}: expected statistics with the quantiles {_SHARES}, found {[*found.quantiles]}"
                )
            low, high = (found.quantiles[share] for share in _SHARES)
        # Halves first: the sum of two floats may overflow.
        centre, spread = low / 2 + high / 2, high / 2 - low / 2
    varies = np.isfinite(spread) & (spread > 0) & (found.max > found.min)
    return Scaling(
        kind, np.where(np.isfinite(centre), centre, 0.0), np.where(varies, spread, 1.0), is_image=found.is_image
    )


def _is_narrow(dtype: Any) -> bool:
    """Whether float32 holds every number of a dtype."""
    name = str(dtype).removeprefix("torch.")
    return name not in ("float64", "int32", "int64", "uint32", "uint64")


def _check_array(what: str, values: Any) -> None:
    if not hasattr(values, "dtype") or not hasattr(values, "shape"):
        kind = type(values).__name__
        raise SchemaError(f"{what}: expected an array of NumPy, PyTorch or JAX, found a {kind}; np.asarray makes one")


# Smaller arrays are as fast in memory of their own.
_POOL_FROM = 1 << 20


@dataclass(frozen=True)
class StreamNormalize:
    """Normalises fields of the batches of one source, from the numbers that are stored.

    Args:
        scalings: How, by field.
        arriving: The fields of a batch before.
        read: The dtypes that these fields arrive in: as they are stored, so that every framework gets the same bits.
        made: The dtypes that they become.
        fills: By field a mask, and what values are where it says that nothing is there.
        memory: For large new arrays.
    """

    scalings: Mapping[str, Scaling]
    arriving: Mapping[str, FieldSpec]
    read: DTypes
    made: DTypes
    fills: Mapping[str, tuple[str, float]]
    memory: ArrayMemory = field(default_factory=lambda: ArrayMemory(_POOL_FROM), compare=False, repr=False)

    @property
    def spec(self) -> dict[str, FieldSpec]:
        """The fields of a batch, these in the dtypes that they become."""
        return {
            name: one.replace(dtype=self.made[name], column="") if name in self.scalings else one
            for name, one in self.arriving.items()
        }

    @property
    def identity(self) -> list[Any]:
        """Fields, kinds, and a digest of the numbers."""
        return ["normalize", {name: scaling.identity for name, scaling in self.scalings.items()}]

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """Return the dtypes with those of ``read`` for the normalised fields."""
        return {name: self.read[name] if name in self.scalings else dtype for name, dtype in dtypes.items()}

    def __call__(
        self, arrived: tuple[Batch, ...], plan: Plan, *, stored: bool = False, apart: bool = True
    ) -> tuple[Batch, ...]:
        """The views of a batch with these fields normalised; see ``batches.Stage``.

        Raises:
            DataError: A number that its dtype cannot hold.
        """
        own = len(arrived) == 1
        return tuple({**view, **self._normalized(view, own=own)} for view in arrived)

    def _normalized(self, view: Batch, *, own: bool) -> Batch:
        made = {}
        for name, scaling in self.scalings.items():
            values = scaling.normalized(view[name], self.memory.empty, own=own)
            try:
                made[name] = convert(values, self.made[name])
            except RowError as error:
                raise DataError(f"normalize: {name}: {error}") from error
            if name in self.fills:
                mask, fill = self.fills[name]
                made[name][view[mask] == 0] = fill
        return made
