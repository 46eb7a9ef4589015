"""What a batch holds: fields, their dtypes and shapes, and the alignment of a row's action, reward and done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_count as check_count
from mouse_core._base.checks import check_list as check_list
from mouse_core._base.checks import check_unit as check_unit
from mouse_core._base.checks import is_text as is_text
from mouse_core.dtypes import check_dtype as check_dtype
from mouse_core.dtypes import replaced_by as replaced_by
from mouse_core.errors import ConfigError, MissingFieldError

if TYPE_CHECKING:
    from mouse_core.spec.categories import Categorical as Categorical
    from mouse_core.spec.categories import MultiCategorical as MultiCategorical
    from mouse_core.spec.categories import MultiOneHot as MultiOneHot
    from mouse_core.spec.categories import OneHot as OneHot
    from mouse_core.spec.choice import Choice as Choice
    from mouse_core.spec.composite import Composite as Composite
    from mouse_core.spec.composite import from_batch as from_batch
    from mouse_core.spec.domain import Domain as Domain
    from mouse_core.spec.numbers import Binary as Binary
    from mouse_core.spec.numbers import Bounded as Bounded
    from mouse_core.spec.numbers import Unbounded as Unbounded
    from mouse_core.spec.objects import NonTensor as NonTensor
    from mouse_core.spec.saved import from_arrow as from_arrow
    from mouse_core.spec.saved import from_json as from_json
    from mouse_core.spec.stacked import Stacked as Stacked
    from mouse_core.spec.stacked import check_no_exclusive_keys as check_no_exclusive_keys
    from mouse_core.spec.stacked import consolidate as consolidate
    from mouse_core.spec.stacked import contains_lazy as contains_lazy
    from mouse_core.spec.stacked import stack_specs as stack_specs

Alignment = Literal["arrived", "outgoing"]
"""Which transition a row's action, reward and done belong to: the one that led to the row's observation
("arrived"), or the one that leaves it ("outgoing")."""


def check_alignment(alignment: str | None, default: Alignment | None = None) -> Alignment:
    """Return ``alignment`` if it is "arrived" or "outgoing", ``default`` for None, else raise ConfigError."""
    alignment = default if alignment is None else alignment
    if alignment not in get_args(Alignment):
        raise ConfigError(f"alignment: expected one of {list(get_args(Alignment))}, found {alignment!r}")
    return alignment  # type: ignore[return-value]


@dataclass(frozen=True)
class Field:
    """How one stored column becomes one field of a batch.

    Args:
        name: The field's name in a batch.
        column: The column's name in the stored data; by default the field's name.
        dtype: The delivered dtype; by default the stored one (uint8 for images).
        vector_dtype: The delivered dtype where the column holds vectors; by default ``dtype``.
        shape: The per-step shape; by default that of the column's type, or of its first value. Of shape ``()``, vectors
            of one value are read as that value.
        fill: What a null becomes; by default a null is an error.
        pad: What rows shorter than ``shape`` are filled up with; by default a differing width is an error.
        bounds: Lowest and highest value allowed, both included; by default any. Images hold 0..255, or 0..65535 where
            ``bounds`` go beyond 255 or, without any, ``dtype`` is uint16: depth, for instance.
        required: Whether a store without the column is an error; otherwise the field is absent.
        max_ndim: The most dimensions a row's values may have; by default as many as ``shape`` has, or any.
        min_ndim: The fewest dimensions of a step; with 1, single numbers are vectors of one value.
        dim: Without ``shape``: how many values vectors have, and of single numbers how many codes: ``0..dim - 1`` are
            allowed, unless ``bounds`` or ``min_ndim`` say otherwise. ``DatasetStore`` sets it by its own options.
        labels: What the codes from 0 are called in messages.
        image: Whether values are images: encoded (``{bytes, path}``) or arrays ``[H, W]`` or ``[H, W, C]`` of pixels;
            delivered flattened. ``shape`` is ``(H, W, C)``, by default the first's. Frames of videos are resized to it.
        transition: Whether values belong to a transition, as an action and its reward do, and not to an observation; by
            default as those of the standard field of this name. ``windows=`` of sources goes by it.
        crop: Of frames of videos, the part that is delivered, before it is resized: ``(top, left, height, width)``.
        decoder: What decodes frames of videos, a ``mouse_core.video.Decoder``. No dataset says it.
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

    def __post_init__(self) -> None:
        if not self.name or not is_text(self.name):
            raise ConfigError(f"Field: expected a name, a Unicode text, found {self.name!r}")
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
        """What holds the pixels of encoded images: uint8, or uint16 where ``bounds`` or ``dtype`` say so."""
        wide = self.bounds[1] > 255 if self.bounds is not None else self.dtype == np.uint16
        return np.dtype(np.uint16 if wide else np.uint8)

    @property
    def is_of_transition(self) -> bool:
        """Whether values belong to a transition: said, or as of the standard field of this name."""
        standard = (known.transition for known in STANDARD_FIELDS if known.name == self.name)
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
        """Lowest and highest value allowed where a step has so many dimensions; None: any."""
        if self.bounds is None and self.dim is not None and not ndim and not self.min_ndim:
            return (0, self.dim - 1)
        return self.bounds

    def shown(self, bounds: tuple[int, int]) -> str:
        """What values within some bounds are, in words."""
        low, high = bounds
        if low == 0 and len(self.labels) == high + 1:
            return "one of " + ", ".join(f"{code} ({label})" for code, label in enumerate(self.labels))
        return f"{low}..{high}"


_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
STANDARD_FIELDS: tuple[Field, ...] = (
    Field("action", dtype="int64", vector_dtype="float32", pad=0, required=True, max_ndim=1, transition=True),
    Field("reward", dtype="float32", shape=(), required=True, transition=True),
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
    Field("time", column="episode_step", dtype="int64", shape=(), fill=-1),
    Field("q_star", column="metadata_q_star", dtype="float32", fill=-np.inf, pad=-np.inf, max_ndim=1, min_ndim=1),
    Field("obs_continuous", column="observation", dtype="float64", pad=0, max_ndim=1, min_ndim=1),
    Field("obs_discrete", column="observation_discrete", dtype="int64", shape=()),
    Field("obs_image", column="observation_image", dtype="int64", bounds=(0, 255), image=True),
)
"""The fields every store knows; ``DatasetStore(fields=...)`` replaces or extends them."""


# The dimension that a store is given for each of these, unless a field has one of its own.
_DIM_OF = {"action": "max_action_dim", "q_star": "max_action_dim", "obs_continuous": "max_obs_continuous_dim"}
DIMS = tuple(dict.fromkeys(_DIM_OF.values()))
"""Names of the dimensions that stores and datasets may be given."""


def merge_fields(fields: Iterable[Field], dims: Mapping[str, int | None]) -> dict[str, Field]:
    """The standard fields, with ``fields`` replacing those of the same name and following the others.

    Everything that follows from a name is in them then: a field that replaces a standard one has its ``min_ndim``, its
    labels where the bounds are the same, and, unless it has one of its own, the dimension of ``dims``, by ``DIMS``.
    """
    merged = {standard.name: standard for standard in STANDARD_FIELDS}
    for given in fields:
        if not isinstance(given, Field):
            raise ConfigError(f"fields: expected mouse_core.Field objects, found {given!r}")
        known = merged.get(given.name, given)
        labels = given.labels or (known.labels if known.bounds == given.bounds else ())
        merged[given.name] = replace(given, min_ndim=max(given.min_ndim, known.min_ndim), labels=labels)
    for name, dim in _DIM_OF.items():
        if merged[name].dim is None:
            merged[name] = replace(merged[name], dim=dims[dim])
    return merged


def codes_called(field: Field, word: str) -> tuple[int, ...]:
    """The codes of a field whose label has a word in it: "task" is in the last of ``("alive", "task terminal")``."""
    return tuple(code for code, label in enumerate(field.labels) if word in label.replace(",", " ").split())


@dataclass(frozen=True)
class FieldSpec:
    """What a field of a batch is.

    Args:
        name: The field's name.
        dtype: The dtype it is delivered in.
        shape: The shape of one step; a batch has ``[B, S, *shape]``, or as ``Spec.batch_dims`` says. Of a field that
            is delivered at several offsets their number K comes first.
        column: The column it is read from, empty if it is made.
        stored_dtype: The dtype it is stored and moved in, before it becomes ``dtype``; by default that.
        image_shape: ``(H, W, C)`` of an image field, whose ``shape`` is ``(H * W * C,)``; else None.
        per_sequence: Whether it has no value for a step, but one for each of the B sequences' first step, and the end:
            ``[B + 1]``.
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
        """The same field with other dtypes or another shape; a new ``dtype`` alone is that it is stored in, too."""
        return replace(self, **({"stored_dtype": None, **changes} if "dtype" in changes else changes))


@dataclass(frozen=True)
class Spec(Mapping[str, FieldSpec]):
    """The fields of a batch by name, and their alignment. Known before the first batch is made.

    Args:
        fields: Field specs by name, in the order of a batch.
        alignment: "arrived" or "outgoing".
        batch_dims: How many axes come before ``shape``: 2 where windows have steps, ``[B, S]``, and 1 where there are
            single rows, ``[B]``, or windows are packed, ``[T]``.

    Raises:
        ConfigError: Another alignment, or a field that has another name than it is under.
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
                raise ConfigError(f"spec: field {name!r}: expected a FieldSpec of that name, found {one!r:.80}")
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))

    @property
    def is_packed(self) -> bool:
        """Whether windows lie one behind the other, T rows in all, and a field says where each begins."""
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
        """A line for the alignment, and one for every field."""
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
        """The spec of one step; of columns that ``columns`` has (``store.about.spec``), with the values said there."""
        return _lazy("of_fields")(self.fields.values(), columns or {})


_MODULES = {
    "categories": ("Categorical", "MultiCategorical", "MultiOneHot", "OneHot"),
    "choice": ("Choice",),
    "composite": ("Composite", "from_batch", "of_fields"),
    "domain": ("Domain",),
    "numbers": ("Binary", "Bounded", "Unbounded"),
    "objects": ("NonTensor",),
    "saved": ("from_arrow", "from_json"),
    "spaces": ("from_dm_env", "from_gymnasium", "from_lerobot", "to_dm_env", "to_gymnasium"),
    "stacked": ("Stacked", "check_no_exclusive_keys", "consolidate", "contains_lazy", "stack_specs"),
}


def _lazy(name: str) -> Any:
    """Import a spec of values on first use: most batches need none."""
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is not None:
        return getattr(import_module(f"mouse_core.spec.{module}"), name)
    raise AttributeError(f"module 'mouse_core.spec' has no attribute {name!r}")


__getattr__ = _lazy
