"""Normalises fields with their statistics, and converts normalised values back, for arrays of NumPy, PyTorch and
JAX.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
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
"""Kind of normalisation of a field."""

_SHARES = (0.01, 0.99)
# Constants are repeated until a row has about this length, because NumPy has a fixed cost for every row.
_ROW = 1 << 14
# Fraction of a deviation below which differences do not matter: float32 does not resolve them.
_SEEN = 2.0**-25


@dataclass(frozen=True, eq=False)
class Scaling:
    """The normalisation ``(x - centre) * (1 / spread)`` of each dimension, computed in float32, or in float64 for
    32-bit integers and 64-bit numbers.

    If float32 cannot represent a centre accurately enough, its rounding error is subtracted in a second step. Example:
    a mean of 1,000,000.03 with a deviation of 1 is 1,000,000 in float32; 1,000,000 is subtracted first, and then 0.03.

    Args:
        kind: "mean_std", "min_max" or "quantiles".
        centre, spread: float64, in the shape of a step, or ``[C]`` for the channels of images; ``spread`` is above 0.
        is_image: Whether ``centre`` and ``spread`` belong to channels of images.
    """

    kind: Normalization
    centre: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]
    is_image: bool = False
    _tiled: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def identity(self) -> list[Any]:
        """The kind of the scaling, and a digest of its centre and spread, for fingerprints."""
        numbers = b"".join(np.ascontiguousarray(one, "<f8").tobytes() for one in (self.centre, self.spread))
        return [self.kind, hashlib.sha256(numbers).hexdigest()[:16]]

    def apply(self, values: Any) -> Any:
        """Return normalised values, in an array of the same framework, on the same device.

        Args:
            values: Numbers ``[..., *shape]``; images ``[..., H, W, C]``, or flattened, ``[..., H * W * C]``.

        Returns:
            float32 of the same shape. In all frameworks, the values are bit-identical to the values that a source
            delivers for this stored dtype. The only exception is ``jax.jit``: the last bit can differ there, because
            the compiler can fuse operations.

        Raises:
            SchemaError: The values have another shape, or are not an array.
        """
        _check_array("apply", values)
        if isinstance(values, np.ndarray):
            return self.normalized(values).astype(np.float32, copy=False)
        xp, rows, (centre, rest, factor) = self._widened(values, self._applied)
        made = rows - centre
        made = (made if rest is None else made - rest) * factor
        return xp.reshape(xp.astype(made, xp.float32), tuple(values.shape))

    def undo(self, values: Any) -> Any:
        """Convert normalised values back to the original values, in the same framework and on the same device. The
        method can be called in ``jax.jit``.

        The result differs from the original value x by at most ``4e-7 * (abs(centre) + abs(x - centre))``, which is a
        few units in the last place of float32.

        Args:
            values: Floats ``[..., *shape]``, as for ``apply``.

        Returns:
            Values of the same shape: float64 if ``values`` are float64, else float32.

        Raises:
            SchemaError: The values have another shape, are integers, or are not an array.
        """
        _check_array("undo", values)
        if kind_of(values.dtype) != "f":
            raise SchemaError(f"undo: expected normalised values, which are floats, found {values.dtype}")
        xp, rows, (centre, rest, spread) = self._widened(values, self._constants)
        made = rows * spread
        made = (made if rest is None else made + rest) + centre
        return xp.reshape(made, tuple(values.shape))

    def normalized(self, values: npt.NDArray[Any], empty: Any = np.empty, *, own: bool = False) -> npt.NDArray[Any]:
        """Return normalised NumPy values, in the dtype of the computation.

        Args:
            values: The values, ``[..., *shape]``.
            empty: Function that allocates the new array; it has the arguments of ``np.empty``.
            own: Whether ``values`` may be overwritten.
        """
        self._check(tuple(values.shape))
        dtype = np.dtype(np.float32 if _is_narrow(values.dtype) else np.float64)
        width = max(1, self.centre.size)
        rows = values.size // width
        # Example: 96 rows of 17 numbers are treated as rows of 544, 32 rows each. The factor 32 is a power of two that
        # divides 96.
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
        """Return the two numbers to subtract, and the factor. Values are multiplied by the factor and not divided,
        because a division in XLA gives results with other bits.
        """
        centre, rest, _ = self._constants(dtype)
        return centre, rest, (1 / self._varying(dtype)).astype(dtype)

    def _constants(self, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Return the centre, its rounding error in the dtype (None if negligible), and the spread, ``[width]`` each."""
        spread, centre = self._varying(dtype).astype(dtype), self.centre.astype(dtype).reshape(-1)
        rest = (self.centre.reshape(-1) - centre).astype(dtype)
        return centre, rest if (np.abs(rest) > _SEEN * spread).any() else None, spread

    def _varying(self, dtype: np.dtype[Any]) -> npt.NDArray[np.float64]:
        """Return the spreads; a spread that is 0, or nearly 0 in the dtype, is replaced by 1."""
        spread = self.spread.reshape(-1)
        return np.where(spread >= np.finfo(dtype).tiny, spread, 1.0)

    def _widened(self, values: Any, constants: Callable[[np.dtype[Any]], tuple[Any, ...]]) -> tuple[Any, Any, Any]:
        """Return the array API namespace of an array; the array as rows ``[n, width]``, in the dtype of the
        computation; and the result of ``constants`` for this dtype as arrays of the same framework.
        """
        self._check(tuple(values.shape))
        xp, dtype = namespace(values), np.dtype(np.float32 if _is_narrow(values.dtype) else np.float64)
        rows = xp.reshape(values, (-1, max(1, self.centre.size)))
        arrays = [one if one is None else array_like(one, values) for one in constants(dtype)]
        return xp, xp.astype(rows, getattr(xp, dtype.name)), arrays

    def check_field(self, spec: FieldSpec, *, axes_before: int) -> None:
        """Raise SchemaError unless the shape of a field fits ``centre``; the first ``axes_before`` axes of the field
        are not compared."""
        expected = spec.shape[axes_before:] if spec.image_shape is None else spec.image_shape[2:]
        alone = self.centre.shape == () and math.prod(expected) == 1  # shape [1] in files
        if self.centre.shape != expected and not alone:
            raise SchemaError(
                f"normalize: {spec.name}: expected a normaliser for the field's shape {list(expected)}, "
                f"found shape {list(self.centre.shape)}"
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
        scalings: The scaling of each field.
        counted: Statistics of the rows. For a later snapshot with more rows, ``over`` returns a normaliser with updated
            statistics and scalings. If None, the scalings are fixed.
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
        """Return a normaliser with fixed scalings from statistics.

        Args:
            counted: The statistics.
            kinds: The kind by field. "mean_std" scales to mean 0 and deviation 1; "min_max" scales the minimum to -1
                and the maximum to 1; "quantiles" scales the quantile 0.01 to -1 and the quantile 0.99 to 1. In
                dimensions whose values are all equal, the values are only shifted.

        Raises:
            ConfigError: A kind is unknown, or the statistics do not have the quantiles 0.01 and 0.99 for "quantiles".
            MissingFieldError: A field has no statistics.
        """
        return _normalizer(counted, kinds, follows=False)

    @property
    def follows(self) -> bool:
        """Whether the scalings are updated when rows are added."""
        return self._counted is not None

    @property
    def fixed(self) -> Normalizer:
        """Return a normaliser with the same scalings, which are not updated."""
        return Normalizer(self._scalings)

    def over(self, snapshot: Snapshot, *, grown: bool = False) -> Normalizer:
        """Return the normaliser for a snapshot: this normaliser, if it is fixed or counted the same rows; otherwise a
        new one with scalings from the snapshot's rows.

        Args:
            snapshot: The rows.
            grown: Whether the snapshot contains the rows that this normaliser counted, followed by more rows. In this
                case, only the additional rows are read.
        """
        before = self._counted
        if before is None or before.fingerprint == snapshot.fingerprint:
            return self
        kinds = {name: scaling.kind for name, scaling in self._scalings.items()}
        return _normalizer(before.update(snapshot), kinds, follows=True) if grown else follow(snapshot, kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        return Normalizer, (self._scalings, self._counted)


def follow(snapshot: Snapshot, kinds: Mapping[str, Normalization]) -> Normalizer:
    """Return a normaliser with the statistics of a snapshot; the statistics are updated when rows are added.

    Raises:
        ConfigError: A kind is unknown.
        MissingFieldError: A field does not exist.
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
            "{'action': 'mean_std'}) makes a Normalizer"
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
        # Halved first, because the sum of two floats may overflow.
        centre, spread = low / 2 + high / 2, high / 2 - low / 2
    varies = np.isfinite(spread) & (spread > 0) & (found.max > found.min)
    return Scaling(
        kind, np.where(np.isfinite(centre), centre, 0.0), np.where(varies, spread, 1.0), is_image=found.is_image
    )


def _is_narrow(dtype: Any) -> bool:
    """Whether float32 represents every number of a dtype."""
    name = str(dtype).removeprefix("torch.")
    return name not in ("float64", "int32", "int64", "uint32", "uint64")


def _check_array(what: str, values: Any) -> None:
    if not hasattr(values, "dtype") or not hasattr(values, "shape"):
        kind = type(values).__name__
        raise SchemaError(f"{what}: expected an array of NumPy, PyTorch or JAX, found a {kind}; np.asarray converts it")


# Smaller arrays are as fast in new memory.
_POOL_FROM = 1 << 20


@dataclass(frozen=True)
class StreamNormalize:
    """Normalises fields in the batches of one source; the fields arrive in their stored dtypes.

    Args:
        scalings: The scaling of each field.
        arriving: The fields of a batch before normalisation.
        read: The dtypes in which the fields arrive: the stored dtypes, so that every framework gets the same bits.
        made: The dtypes of the normalised fields.
        fills: A dict from each field to the name of its mask and the fill value of steps without data.
        memory: Memory for large new arrays.
    """

    scalings: Mapping[str, Scaling]
    arriving: Mapping[str, FieldSpec]
    read: DTypes
    made: DTypes
    fills: Mapping[str, tuple[str, float]]
    memory: ArrayMemory = field(default_factory=lambda: ArrayMemory(_POOL_FROM), compare=False, repr=False)

    @property
    def spec(self) -> dict[str, FieldSpec]:
        """The fields of a batch, with the dtypes of the normalised fields."""
        return {
            name: one.replace(dtype=self.made[name], column="") if name in self.scalings else one
            for name, one in self.arriving.items()
        }

    @property
    def identity(self) -> list[Any]:
        """The names of the normalised fields, the kind of each field, and a digest of centres and spreads."""
        return ["normalize", {name: scaling.identity for name, scaling in self.scalings.items()}]

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """Return a copy of ``dtypes``, in which the normalised fields have the dtypes of ``read``."""
        return {name: self.read[name] if name in self.scalings else dtype for name, dtype in dtypes.items()}

    def __call__(
        self, arrived: tuple[Batch, ...], plan: Plan, *, stored: bool = False, apart: bool = True
    ) -> tuple[Batch, ...]:
        """Normalise the fields in all views of a batch, and return the views; see ``batches.Stage``.

        Raises:
            DataError: A number does not fit in its dtype.
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
