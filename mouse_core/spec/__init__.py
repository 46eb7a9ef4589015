"""Specs of batches (the alignment, and the dtype and shape of each field), and specs of values (``Bounded``,
``Composite`` and others).

This module defines the specs of batches. Other modules define the specs of values; these modules are imported when they
are first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_choice as check_choice
from mouse_core._base.checks import check_count as check_count
from mouse_core._base.checks import check_list as check_list
from mouse_core._base.checks import check_number as check_number
from mouse_core._base.checks import check_unit as check_unit
from mouse_core._base.checks import is_text as is_text
from mouse_core.dtypes import check_dtype as check_dtype
from mouse_core.dtypes import replaced_by as replaced_by
from mouse_core.errors import ConfigError, MissingFieldError

if TYPE_CHECKING:
    from mouse_core.spec.arrays import Binary as Binary
    from mouse_core.spec.arrays import Bounded as Bounded
    from mouse_core.spec.arrays import Categorical as Categorical
    from mouse_core.spec.arrays import Choice as Choice
    from mouse_core.spec.arrays import MultiCategorical as MultiCategorical
    from mouse_core.spec.arrays import MultiOneHot as MultiOneHot
    from mouse_core.spec.arrays import NonTensor as NonTensor
    from mouse_core.spec.arrays import OneHot as OneHot
    from mouse_core.spec.arrays import Unbounded as Unbounded
    from mouse_core.spec.composite import Composite as Composite
    from mouse_core.spec.composite import Stacked as Stacked
    from mouse_core.spec.composite import check_no_exclusive_keys as check_no_exclusive_keys
    from mouse_core.spec.composite import consolidate as consolidate
    from mouse_core.spec.composite import contains_lazy as contains_lazy
    from mouse_core.spec.composite import from_batch as from_batch
    from mouse_core.spec.composite import from_json as from_json
    from mouse_core.spec.composite import stack_specs as stack_specs
    from mouse_core.spec.domain import Domain as Domain

Alignment = Literal["arrived", "outgoing"]
"""The transition that a row's action, reward and done belong to: the transition that led to the row's observation
("arrived"), or the transition that begins at this observation ("outgoing").
"""


Layout = Literal["stored", "mouse"]
"""How columns become fields: "stored" delivers each column by its own name, in its dtype and shape; "mouse" delivers
the columns of MOUSE's documents as the fields of ``STANDARD_FIELDS``.
"""


def check_alignment(alignment: str | None, default: Alignment | None = None) -> Alignment:
    """Return ``alignment`` if it is "arrived" or "outgoing", and ``default`` if ``alignment`` is None; otherwise raise
    ConfigError."""
    alignment = default if alignment is None else alignment
    check_choice("alignment", alignment, get_args(Alignment))
    return alignment  # type: ignore[return-value]


@dataclass(frozen=True)
class Field:
    """The conversion of one stored column to one field of a batch.

    Args:
        name: The field's name in a batch.
        column: The column's name in the stored data; by default the field's name.
        dtype: The delivered dtype; by default the stored dtype (uint8 for images).
        vector_dtype: The delivered dtype if the column has vectors; by default ``dtype``.
        shape: The per-step shape; by default the shape of the column's type, or of its first value. With shape ``()``,
            a vector of one value is read as a number; if also ``max_ndim`` is above 0, longer vectors keep their shape.
        fill: Value that replaces a null; by default, reading a null raises an error.
        pad: Value that fills rows shorter than ``shape``; by default, reading a row of another width raises an error.
        bounds: Lowest and highest allowed value, both included; by default, any value is allowed. Images have values
            0..255; depth images have values 0..65535, if ``bounds`` exceed 255 or, without ``bounds``, if ``dtype`` is
            uint16.
        required: Whether an error is raised if a store lacks the column; otherwise the field is absent.
        max_ndim: Largest number of dimensions of a row's values; by default the number of dimensions of ``shape``, or
            without ``shape`` no limit.
        min_ndim: Smallest number of dimensions of a step; if ``min_ndim`` is 1, a number is read as a vector of one
            value.
        dim: If ``shape`` is not set: the number of values of a vector, or the number of codes. Codes ``0..dim - 1`` are
            allowed, unless ``bounds`` or ``min_ndim`` are set. ``DatasetStore`` sets ``dim`` from its own options.
        labels: Names of the codes from 0, for messages.
        image: Whether values are images: encoded (``{bytes, path}``), or arrays ``[H, W]`` or ``[H, W, C]`` of pixels.
            Images are delivered flattened, see ``flat``. ``shape`` is ``(H, W, C)``; by default, it is the shape of the
            first image. Video frames are resized to ``shape``.
        flat: Whether an image is delivered flattened, ``[H * W * C]``; otherwise it is delivered as ``[H, W, C]``.
        transition: Whether values belong to a transition, like an action and its reward, and not to an observation. By
            default, the value is the same as in the standard field of this name. The option ``windows=`` of sources
            uses this attribute.
        crop: The part of a video frame that is delivered: ``(top, left, height, width)`` in pixels of the frame before
            it is resized.
        decoder: The ``mouse_core.video.Decoder`` for video frames. Metadata of datasets do not contain it.
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
    min_ndim: int = 0
    dim: int | None = None
    labels: tuple[str, ...] = ()
    transition: bool | None = None
    crop: tuple[int, int, int, int] | None = None
    decoder: Any = None
    flat: bool = True

    def __post_init__(self) -> None:
        if not self.name or not is_text(self.name):
            raise ConfigError(f"Field: expected a Unicode text as name, found {self.name!r}")
        object.__setattr__(self, "column", self.column or self.name)
        if not is_text(self.column):
            raise ConfigError(f"field {self.name!r}: expected the name of a column, found {self.column!r}")
        for option in ("dtype", "vector_dtype"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, check_dtype(value, where=f"field {self.name!r}"))
        if self.shape is not None:
            self._check_shape(self.shape)
        for option in ("min_ndim", "max_ndim"):
            value = getattr(self, option)
            if type(value) is not int and not (option == "max_ndim" and value is None):
                raise ConfigError(f"field {self.name!r}: expected {option} as an integer, found {value!r}")
        for option in ("fill", "pad"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, _NUMBERS):
                raise ConfigError(f"field {self.name!r}: expected {option} as a number, found {value!r}")
        object.__setattr__(self, "labels", tuple(self.labels))
        self._check_bounds()

    @property
    def pixel_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the pixels of encoded images: uint8, or uint16 if ``bounds`` or ``dtype`` require it."""
        wide = self.bounds[1] > 255 if self.bounds is not None else self.dtype == np.uint16
        return np.dtype(np.uint16 if wide else np.uint8)

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """The shape of a row, if the field alone determines it; None if the column determines it."""
        return None if self.shape == () and self.max_ndim else self.shape

    @property
    def is_of_transition(self) -> bool:
        """Whether values belong to a transition: the attribute ``transition``, or if it is None, the value for the
        standard field of this name.
        """
        standard = (field.transition for field in STANDARD_FIELDS if field.name == self.name)
        return bool(next(standard, False) if self.transition is None else self.transition)

    def _check_shape(self, given: tuple[int, ...]) -> None:
        shape = tuple(int(size) for size in given)
        if any(size < 1 for size in shape):
            raise ConfigError(f"field {self.name!r}: expected a shape of positive sizes, found {given!r}")
        object.__setattr__(self, "shape", shape)
        if self.image and len(shape) != 3:
            raise ConfigError(f"field {self.name!r}: expected (H, W, C) as the shape of images, found {shape}")
        if self.max_ndim is None:
            object.__setattr__(self, "max_ndim", len(shape))

    def _check_bounds(self) -> None:
        if self.dim is not None and (type(self.dim) is not int or self.dim < 1):
            raise ConfigError(f"field {self.name!r}: expected dim as a positive integer, found {self.dim!r}")
        if self.bounds is None:
            return
        low, high = self.bounds if isinstance(self.bounds, tuple | list) and len(self.bounds) == 2 else (None, None)
        if not isinstance(low, _NUMBERS) or not isinstance(high, _NUMBERS) or not low <= high:
            raise ConfigError(f"field {self.name!r}: expected bounds as (lowest, highest), found {self.bounds!r}")
        if self.fill is not None and not low <= self.fill <= high:
            raise ConfigError(
                f"field {self.name!r}: expected a fill within its bounds {low}..{high}, found {self.fill}"
            )
        object.__setattr__(self, "bounds", (low, high))

    def bounds_of(self, ndim: int) -> tuple[int, int] | None:
        """Return the lowest and highest allowed value for a step with ``ndim`` dimensions; None allows any."""
        if self.bounds is None and self.dim is not None and not ndim and not self.min_ndim:
            return (0, self.dim - 1)
        return self.bounds

    def shown(self, bounds: tuple[int, int]) -> str:
        """Describe the values that ``bounds`` allow, for messages."""
        low, high = bounds
        if low == 0 and len(self.labels) == high + 1:
            return "one of " + ", ".join(f"{code} ({label})" for code, label in enumerate(self.labels))
        return f"{low}..{high}"


_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
STANDARD_FIELDS: tuple[Field, ...] = (
    Field("action", dtype="int64", vector_dtype="float32", pad=0, required=True, max_ndim=1, transition=True),
    Field("reward", dtype="float32", shape=(), required=True, max_ndim=2, transition=True),
    Field("xformed_reward", dtype="float32", shape=(), transition=True),
    Field(
        "done",
        dtype="int64",
        shape=(),
        bounds=(0, 2),
        required=True,
        labels=("alive", "terminal", "truncated"),
        transition=True,
    ),
    Field(
        "agent_done",
        dtype="int64",
        bounds=(0, 3),
        max_ndim=1,
        labels=("alive", "terminal", "truncated", "gone"),
        transition=True,
    ),
    Field("time", column="episode_step", dtype="int64", shape=(), fill=-1),
    Field("q_star", column="metadata_q_star", dtype="float32", fill=-np.inf, pad=-np.inf, max_ndim=1, min_ndim=1),
    Field("obs_continuous", column="observation", dtype="float64", pad=0, max_ndim=1, min_ndim=1),
    Field("obs_discrete", column="observation_discrete", dtype="int64", shape=()),
    Field("obs_image", column="observation_image", dtype="int64", bounds=(0, 255), image=True),
)
"""Default fields of every store; ``DatasetStore(fields=...)`` replaces or extends them."""

_COMMON = [field for field in STANDARD_FIELDS if field.name in ("action", "reward", "done", "agent_done", "time")]
LAYOUTS: Mapping[Layout, tuple[Field, ...]] = {
    "mouse": STANDARD_FIELDS,
    "stored": tuple(
        replace(field, dtype=None, vector_dtype=None, max_ndim=None)
        if field.name == "action"
        else replace(field, dtype=None)
        if field.name == "reward"
        else field
        for field in _COMMON
    ),
}
"""Default fields by layout. For "stored", these are only the fields of the columns that every store needs."""


# The option of a store that sets ``dim`` of a field without a ``dim``.
_DIM_OF = {"action": "max_action_dim", "q_star": "max_action_dim", "obs_continuous": "max_obs_continuous_dim"}
DIMS = tuple(dict.fromkeys(_DIM_OF.values()))
"""Names of the options of stores and datasets that set dimensions."""


def merge_fields(fields: Iterable[Field], dims: Mapping[str, int | None], layout: Layout = "mouse") -> dict[str, Field]:
    """Merge ``fields`` into the fields of a layout: a field replaces the field of the same name, or is added at the
    end.

    If a field replaces a standard field, its ``min_ndim`` becomes at least the standard ``min_ndim``. If the field has
    the standard bounds and no labels, it also gets the standard labels. If a standard field has no ``dim``, its
    dimension is looked up in ``dims``, under the name of the option that sets this dimension (see ``DIMS``).
    """
    merged = {standard.name: standard for standard in LAYOUTS[layout]}
    for given in fields:
        if not isinstance(given, Field):
            raise ConfigError(f"fields: expected mouse_core.Field objects, found {given!r}")
        before = merged.get(given.name, given)
        labels = given.labels or (before.labels if before.bounds == given.bounds else ())
        merged[given.name] = replace(given, min_ndim=max(given.min_ndim, before.min_ndim), labels=labels)
    for name, dim in _DIM_OF.items():
        if name in merged and merged[name].dim is None:
            merged[name] = replace(merged[name], dim=dims[dim])
    return merged


def codes_called(field: Field, word: str) -> tuple[int, ...]:
    """Return the codes whose label contains a word: for "task" in ``("alive", "task terminal")``, code 1."""
    return tuple(code for code, label in enumerate(field.labels) if word in label.replace(",", " ").split())


@dataclass(frozen=True)
class FieldSpec:
    """Dtype and shape of a field of a batch.

    Args:
        name: The field's name.
        dtype: The delivered dtype.
        shape: The shape of one step. In a batch, the field is ``[B, S, *shape]``, or has the leading axes that
            ``Spec.batch_dims`` defines. If a field is delivered at K offsets, the first size of ``shape`` is K.
        column: The column that the field is read from; empty for a computed field.
        stored_dtype: The dtype in which values are stored and copied, before they are converted to ``dtype``; by
            default ``dtype``.
        image_shape: ``(H, W, C)`` of an image field, whose ``shape`` is the same or ``(H * W * C,)``; else None.
        per_sequence: Whether the field has no value per step, but is an array ``[B + 1]``: the first row of each of the
            B sequences, and the end of the last sequence.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    column: str = ""
    stored_dtype: np.dtype[np.generic] = None  # type: ignore[assignment]  # __post_init__ makes it dtype
    image_shape: tuple[int, int, int] | None = None
    per_sequence: bool = False

    def __post_init__(self) -> None:
        stored: Any = self.stored_dtype
        if stored is None:
            object.__setattr__(self, "stored_dtype", self.dtype)

    def replace(self, **changes: Any) -> FieldSpec:
        """Return the field with other attributes; if ``dtype`` is given and ``stored_dtype`` is not, ``stored_dtype``
        becomes the same dtype."""
        return replace(self, **({"stored_dtype": None, **changes} if "dtype" in changes else changes))


@dataclass(frozen=True)
class Spec(Mapping[str, FieldSpec]):
    """The fields of a batch by name, and their alignment. The spec of a source is known before the first batch.

    Args:
        fields: Field specs by name, in the order of a batch.
        alignment: "arrived" or "outgoing".
        batch_dims: Number of axes before ``shape``: 2 for windows, ``[B, S]``; 1 for single rows, ``[B]``, and packed
            windows, ``[T]``.

    Raises:
        ConfigError: The alignment or number of axes is invalid, or a field's name differs from its key.
    """

    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    alignment: Alignment = "arrived"
    batch_dims: int = 2

    def __post_init__(self) -> None:
        check_alignment(self.alignment)
        if self.batch_dims not in (1, 2):
            raise ConfigError(f"spec: expected batch_dims of 1 or 2, found {self.batch_dims!r}")
        for name, one in self.fields.items():
            if not isinstance(one, FieldSpec) or one.name != name:
                raise ConfigError(
                    f"spec: field {name!r}: expected a FieldSpec with the name {name!r}, found {one!r:.80}"
                )
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))

    @property
    def is_packed(self) -> bool:
        """Whether windows are concatenated to T rows, and a field contains the position of each window."""
        return any(one.per_sequence for one in self.fields.values())

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
        return hash((tuple(self.fields.values()), self.alignment, self.batch_dims))

    def __str__(self) -> str:
        """Return a line for the alignment and a line for each field."""
        lines = [f"alignment: {self.alignment}"]
        for name, spec in self.fields.items():
            axes = "T" if self.is_packed else ("B", "S")[: self.batch_dims]
            shape = "B + 1" if spec.per_sequence else ", ".join([*axes, *map(str, spec.shape)])
            image = f", images {list(spec.image_shape)}" if spec.image_shape else ""
            column = f" from column {spec.column!r}" if spec.column and spec.column != name else ""
            lines.append(f"{name}: {spec.dtype} [{shape}]{image}{column}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[Spec], tuple[dict[str, FieldSpec], str, int]]:
        return Spec, (dict(self.fields), self.alignment, self.batch_dims)

    def composite(self, columns: Mapping[str, Any] | None = None) -> Any:
        """Return the spec of one step's values; ``columns`` has specs of columns, such as ``store.metadata.spec``."""
        return _lazy("of_fields")(self.fields.values(), columns or {})


_MODULES = {
    "arrays": (
        *("Binary", "Bounded", "Categorical", "Choice", "MultiCategorical", "MultiOneHot", "NonTensor", "OneHot"),
        "Unbounded",
    ),
    "composite": (
        *("Composite", "Stacked", "check_no_exclusive_keys", "consolidate", "contains_lazy", "from_batch"),
        *("from_json", "of_fields", "stack_specs"),
    ),
    "domain": ("Domain",),
    "spaces": ("from_dm_env", "from_gymnasium", "to_gymnasium"),
}


def _lazy(name: str) -> Any:
    """Import a spec of values on first use, because most programs need no spec of values."""
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is not None:
        return getattr(import_module(f"mouse_core.spec.{module}"), name)
    raise AttributeError(f"module 'mouse_core.spec' has no attribute {name!r}")


__getattr__ = _lazy
