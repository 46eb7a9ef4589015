"""What a batch holds: fields, their dtypes and shapes, and the alignment of a row's action, reward and done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, MissingFieldError

Alignment = Literal["arrived", "outgoing"]
"""Which transition a row's action, reward and done belong to: the one that led to the row's observation
("arrived"), or the one that leaves it ("outgoing")."""


def check_alignment(alignment: str) -> Alignment:
    """Return ``alignment`` if it is "arrived" or "outgoing", else raise ConfigError."""
    if alignment not in get_args(Alignment):
        raise ConfigError(f"alignment: expected one of {list(get_args(Alignment))}, found {alignment!r}")
    return alignment  # type: ignore[return-value]


def check_dtype(dtype: npt.DTypeLike, *, where: str) -> np.dtype[np.generic]:
    """``dtype`` as a NumPy dtype, or ConfigError if it is not numeric."""
    try:
        checked = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"{where}: expected a NumPy dtype, found {dtype!r}") from error
    if checked.kind not in "biuf":
        raise ConfigError(f"{where}: expected a boolean, integer or floating dtype, found {checked}")
    return checked


@dataclass(frozen=True)
class Field:
    """How one stored column becomes one field of a batch.

    Args:
        name: The field's name in a batch.
        column: The column's name in the stored data; by default the field's name.
        dtype: The delivered dtype; by default the stored one (uint8 for images).
        vector_dtype: The delivered dtype where the column holds vectors; by default ``dtype``.
        shape: The per-step shape; by default that of the column's type, or of its first value.
        fill: What a null becomes; by default a null is an error.
        pad: What rows shorter than ``shape`` are filled up with; by default a differing width is an error.
        bounds: Lowest and highest value allowed, both included; by default any.
        required: Whether a store without the column is an error; otherwise the field is absent.
        max_ndim: The most dimensions a row's values may have; by default as many as ``shape`` has, or any.
        image: Whether values are images: encoded (``{bytes, path}``) or raw arrays ``[H, W]`` or ``[H, W, C]`` of
            pixels 0..255. They are delivered flattened, ``[H * W * C]``.
    """

    name: str
    column: str = ""
    dtype: npt.DTypeLike | None = None
    vector_dtype: npt.DTypeLike | None = None
    shape: tuple[int, ...] | None = None
    fill: float | None = None
    pad: float | None = None
    bounds: tuple[int, int] | None = None
    required: bool = False
    max_ndim: int | None = None
    image: bool = False

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ConfigError(f"Field: expected a name, found {self.name!r}")
        object.__setattr__(self, "column", self.column or self.name)
        for option in ("dtype", "vector_dtype"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, check_dtype(value, where=f"field {self.name!r}"))
        if self.shape is not None:
            shape = tuple(int(size) for size in self.shape)
            if any(size < 1 for size in shape):
                raise ConfigError(f"field {self.name!r}: expected a shape of positive sizes, found {self.shape!r}")
            object.__setattr__(self, "shape", shape)
            if self.max_ndim is None:
                object.__setattr__(self, "max_ndim", len(shape))


STANDARD_FIELDS: tuple[Field, ...] = (
    Field("action", dtype="int64", vector_dtype="float32", pad=0, required=True, max_ndim=1),
    Field("reward", dtype="float32", shape=(), required=True),
    Field("xformed_reward", dtype="float32", shape=()),
    Field("done", dtype="int64", shape=(), bounds=(0, 2), required=True),
    Field("time", column="episode_step", dtype="int64", shape=(), fill=-1),
    Field("q_star", column="metadata_q_star", dtype="float32", fill=-np.inf, pad=-np.inf, max_ndim=1),
    Field("obs_continuous", column="observation", dtype="float64", pad=0, max_ndim=1),
    Field("obs_discrete", column="observation_discrete", dtype="int64", shape=()),
    Field("obs_image", column="observation_image", dtype="int64", bounds=(0, 255), image=True),
)
"""The fields every store knows; ``DatasetStore(fields=...)`` replaces or extends them."""


def merge_fields(fields: Iterable[Field]) -> dict[str, Field]:
    """The standard fields, with ``fields`` replacing those of the same name and following the others."""
    merged = {standard.name: standard for standard in STANDARD_FIELDS}
    for given in fields:
        if not isinstance(given, Field):
            raise ConfigError(f"fields: expected mouse_core.Field objects, found {given!r}")
        merged[given.name] = given
    return merged


@dataclass(frozen=True)
class FieldSpec:
    """What a field of a batch is.

    Args:
        name: The field's name.
        dtype: The dtype it is delivered in.
        shape: The shape of one step; a batch has ``[B, S, *shape]``.
        column: The column it is read from, empty if it is made.
        stored_dtype: The dtype it is gathered and moved in, before it is widened to ``dtype``.
        image_shape: ``(H, W, C)`` of an image field, whose ``shape`` is ``(H * W * C,)``; else None.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    column: str = ""
    stored_dtype: np.dtype[np.generic] | None = None
    image_shape: tuple[int, int, int] | None = None

    @property
    def moved_dtype(self) -> np.dtype[np.generic]:
        """The dtype it is moved in: ``stored_dtype``, where there is one."""
        return self.dtype if self.stored_dtype is None else self.stored_dtype

    def replace(self, **changes: Any) -> FieldSpec:
        """The same field with other dtypes or another shape."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Spec(Mapping[str, FieldSpec]):
    """The fields of a batch by name, and their alignment. Known before the first batch is made.

    Args:
        fields: Field specs by name, in the order of a batch.
        alignment: "arrived" or "outgoing".
    """

    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    alignment: Alignment = "arrived"

    def __post_init__(self) -> None:
        check_alignment(self.alignment)
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))

    def __getitem__(self, name: str) -> FieldSpec:
        try:
            return self.fields[name]
        except KeyError:
            raise MissingFieldError(f"spec: expected one of {list(self.fields)}, found {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __hash__(self) -> int:
        return hash((tuple(self.fields.values()), self.alignment))

    def __str__(self) -> str:
        """A line for the alignment, and one for every field."""
        lines = [f"alignment: {self.alignment}"]
        for name, spec in self.fields.items():
            shape = ", ".join(["B", "S", *map(str, spec.shape)])
            image = f", images {list(spec.image_shape)}" if spec.image_shape else ""
            column = f" from column {spec.column!r}" if spec.column and spec.column != name else ""
            lines.append(f"{name}: {spec.dtype} [{shape}]{image}{column}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[Spec], tuple[dict[str, FieldSpec], str]]:
        return Spec, (dict(self.fields), self.alignment)
