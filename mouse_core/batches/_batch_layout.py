"""What becomes of the fields of a source: the dtypes of its batches, and what is left to do when they are copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError, MissingFieldError
from mouse_core.sampling.plan import MASK, PaddedSampler
from mouse_core.spec import FieldSpec, check_dtype, replaced_by
from mouse_core.store.fields import FieldReader

if TYPE_CHECKING:
    from mouse_core._arrow.byte_views import CopiedField
    from mouse_core.augment.config import AugmentTokensConfig
    from mouse_core.augment.stream import StreamAugment
    from mouse_core.batches._stages import Map, Stage
    from mouse_core.sampling.offsets import FieldWindows
    from mouse_core.statistics.normalizer import Normalizer


class MaskReader:
    """Gives the field ``mask`` of windows that were located with their lengths; it has no column, unlike others.

    Args:
        spec: That of the field, by default of ``mask``; of masks of other fields a pipeline says which rows are there.
    """

    def __init__(self, spec: FieldSpec | None = None) -> None:
        self.spec = FieldSpec(MASK, np.dtype(np.bool_), ()) if spec is None else spec

    @property
    def identity(self) -> list[Any]:
        """Its name; the rest the sampler says."""
        return [self.spec.name]

    def check_fills(self, dtype: np.dtype[Any]) -> None:
        """Every dtype holds 0 and 1."""

    def stored_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """Booleans."""
        return self.spec.dtype


Readers = Mapping[str, FieldReader | MaskReader]
DTypes = Mapping[str, np.dtype[np.generic]]


class Chosen(NamedTuple):
    """What a source is asked for besides windows; see ``BatchSource``."""

    fields: tuple[str, ...] | None
    required_fields: tuple[str, ...]
    dtypes: dict[str, npt.DTypeLike]
    replace_dtypes: dict[Any, npt.DTypeLike]
    augment: AugmentTokensConfig | None
    views: int
    windows: FieldWindows | None
    normalize: Normalizer | None
    map: Map | None
    packed: bool | int = False

    @property
    def says_augmentation(self) -> bool:
        """Whether something else than no augmentation is asked for, allowed or not."""
        return self.augment is not None or type(self.views) is not int or self.views != 1

    @property
    def sees_values(self) -> bool:
        """Whether all that is done to a batch is done to single values, wherever they stand."""
        return self.windows is None and self.map is None and not self.says_augmentation


@dataclass(frozen=True, eq=False)
class BatchForm:
    """What batches of some fields are like. What there is for both is ``[stored]``: False for the delivered dtypes.

    Args:
        fields: Those of a batch.
        stages: What is done to it last, in this order.
        dtypes: What it is gathered in before that.
        shapes: Of a step of each field, before that.
        fill: What steps become that are not there; None: the last one that is.
        is_padded: Whether there may be such.
        converted: The fields that are copied in another dtype.
        checked: Those that are copied whose values have to be looked at.
        is_copied: Whether nothing but masks is left to do to a batch all fields of which were copied.
    """

    fields: dict[str, FieldSpec]
    stages: tuple[Stage, ...]
    dtypes: tuple[DTypes, DTypes]
    shapes: dict[str, tuple[int, ...]]
    fill: float | None
    is_padded: bool
    converted: tuple[frozenset[str], frozenset[str]]
    checked: frozenset[str]
    is_copied: tuple[bool, bool]


def form_of(readers: Readers, chosen: Chosen, padded: PaddedSampler | None, *, max_num_actions: int) -> BatchForm:
    """What batches of some fields are like.

    Raises:
        ConfigError: Something that cannot be done to these fields.
        MissingFieldError: A dtype for a field that is not there.
    """
    normalized = _normalized_dtypes(readers, chosen)
    # A function of the user's gets the same in every framework; what it cannot hold is replaced behind it.
    replaced = chosen.replace_dtypes if chosen.map is None else {}
    delivered = _delivered_dtypes(readers, {**chosen.dtypes, **normalized}, replaced)
    stored = {
        name: delivered[name] if name in normalized else reader.stored_dtype(delivered[name])
        for name, reader in readers.items()
    }
    fields = {
        name: reader.spec.replace(dtype=delivered[name], stored_dtype=stored[name]) for name, reader in readers.items()
    }
    shapes = {name: field.shape for name, field in fields.items()}
    read = {name: readers[name].stored_dtype(np.dtype(np.float64)) for name in normalized}
    augment = _augment_of(readers, chosen, fields, read, max_num_actions)
    stages = _stages_of(chosen, fields, read, augment, None if padded is None else padded.fill)
    if chosen.map is not None:
        from mouse_core.batches._stages import StreamMap  # loaded where there is something to do to batches

        batch_dims = 2 if chosen.windows is None else chosen.windows.batch_dims
        arriving = stages[-1].spec if stages else fields
        stages = (*stages, StreamMap.of(chosen.map, arriving, replaced_by(chosen.replace_dtypes), batch_dims))
    for stage in reversed(stages):
        delivered, stored = stage.arriving_dtypes(delivered), stage.arriving_dtypes(stored)
    if stages:
        fields = dict(stages[-1].spec)
    filled = {name: stored[name] for name, reader in readers.items() if not isinstance(reader, MaskReader)}
    fill = _fill_of(padded, filled, is_augmented=augment is not None)
    return BatchForm(
        fields, stages, (delivered, stored), shapes, fill, padded is not None, *_copied(readers, (delivered, stored))
    )


def part_of(form: BatchForm, readers: Readers) -> BatchForm:
    """What batches of some of the fields are like that are gathered for themselves, before anything is done to them."""
    delivered, stored = ({name: dtypes[name] for name in readers} for dtypes in form.dtypes)
    shapes = {name: reader.spec.shape for name, reader in readers.items()}
    copied = _copied(readers, (delivered, stored))
    return BatchForm({}, (), (delivered, stored), shapes, form.fill, form.is_padded, *copied)


def _copied(
    readers: Readers, dtypes: tuple[DTypes, DTypes]
) -> tuple[tuple[frozenset[str], frozenset[str]], frozenset[str], tuple[bool, bool]]:
    """The last three attributes of ``BatchForm``, of fields that are gathered in some dtypes."""
    plain = {name: reader for name, reader in readers.items() if _is_plain(reader)}
    converted = _converted(plain, dtypes[0]), _converted(plain, dtypes[1])
    checked = frozenset(name for name, reader in plain.items() if reader.bounds is not None and reader.highest is None)
    masks = {name for name, reader in readers.items() if isinstance(reader, MaskReader)}
    copied = len(plain) + len(masks) == len(readers) and not checked
    # Batches are copied whoever asks for them, and have one mask.
    copied = copied and all(dtypes[0][name] == dtypes[1][name] for name in masks)
    return converted, checked, (copied and not converted[0], copied and not converted[1])


def _normalized_dtypes(readers: Readers, chosen: Chosen) -> dict[str, npt.DTypeLike]:
    """The dtypes of fields that are normalised: float32, if nothing else is asked for.

    A normaliser that is given may know more fields than a source delivers; all that are given by kinds must be there.
    """
    found: dict[str, npt.DTypeLike] = {}
    if chosen.normalize is None:
        return found
    for name, scaling in chosen.normalize.items():
        if name not in readers and not chosen.normalize.follows:
            continue
        if name not in readers:
            raise MissingFieldError(f"normalize: expected fields among {list(readers)}, found {name!r}")
        offsets = chosen.windows is not None and name in chosen.windows.offsets
        scaling.check_field(readers[name].spec, axes_before=1 if offsets else 0)
        asked, spec = name in chosen.dtypes, readers[name].spec
        found[name] = chosen.dtypes.get(name, np.float32)
        if number_kind(check_dtype(found[name], where=f"dtypes[{name!r}]")) != "f":
            raise ConfigError(f"normalize: {name}: expected a floating dtype, found {found[name]!r}")
        if not asked and spec.dtype.kind in "iub" and spec.image_shape is None:
            raise ConfigError(
                f"normalize: {name}: expected measurements or images, found {spec.dtype}, which may be codes; "
                f"dtypes={{{name!r}: 'float32'}} says that they are numbers"
            )
    return found


def _augment_of(
    readers: Readers, chosen: Chosen, fields: Mapping[str, FieldSpec], read: DTypes, max_num_actions: int
) -> StreamAugment | None:
    """How batches are augmented; images that are normalised are augmented before, as they are stored."""
    if not chosen.says_augmentation:
        return None
    batch_dims, offsets = 2, frozenset[str]()
    if chosen.windows is not None:
        batch_dims, offsets = chosen.windows.batch_dims, frozenset(chosen.windows.offsets)
        if chosen.windows.fill is not None:
            # It would be augmented, too: a code of its own is none that can be permuted.
            raise ConfigError(f"pad: expected True or False with augment or views, found {chosen.windows.fill}")
    from mouse_core.augment.stream import stream_augment  # a room that is loaded where batches are augmented

    images = {name: dtype for name, dtype in read.items() if fields[name].image_shape is not None}
    numbers = {name: np.float32 for name in read if name not in chosen.dtypes}
    computed = {**_delivered_dtypes(readers, {**numbers, **chosen.dtypes}, {}), **images}
    arriving = {name: one.replace(dtype=images[name]) if name in images else one for name, one in fields.items()}
    return stream_augment(
        chosen.augment,
        chosen.views,
        arriving,
        computed,
        max_num_actions=max_num_actions,
        batch_dims=batch_dims,
        offsets=offsets,
        masks=[name for name, reader in readers.items() if isinstance(reader, MaskReader)],
    )


def _stages_of(
    chosen: Chosen, fields: Mapping[str, FieldSpec], read: DTypes, augment: StreamAugment | None, fill: float | None
) -> tuple[Stage, ...]:
    """What is done to a batch: numbers are normalised, then all is augmented, then images are normalised.

    Args:
        chosen: What the source is asked for.
        fields: Those of a batch.
        read: The dtypes that normalised fields are gathered in.
        augment: How the batch is augmented.
        fill: What steps are that are not there; None: as others are.
    """
    augmenting: tuple[Stage, ...] = () if augment is None else (augment,)
    if chosen.normalize is None:
        return augmenting
    from mouse_core.statistics.normalizer import StreamNormalize  # a room that is loaded where batches are normalised

    fills = _fills_by_mask(chosen, read, fill)
    made = {name: one.dtype for name, one in fields.items()}
    known = {name: one for name, one in chosen.normalize.items() if name in fields}
    images = {name: one for name, one in known.items() if fields[name].image_shape is not None}
    numbers = {name: one for name, one in known.items() if name not in images}
    before = StreamNormalize(numbers, fields, read, made if augment is None else augment.arriving_dtypes(made), fills)
    behind = StreamNormalize(images, before.spec if augment is None else augment.spec, read, made, fills)
    return (*((before,) if numbers else ()), *augmenting, *((behind,) if images else ()))


def _fills_by_mask(chosen: Chosen, read: DTypes, fill: float | None) -> dict[str, tuple[str, float]]:
    """Of fields with steps that are not there, the mask that says which, and what these are."""
    fills = {} if fill is None else dict.fromkeys(read, (MASK, fill))
    if chosen.windows is not None:
        from mouse_core.sampling.offsets import mask_of  # loaded where there are some

        for name in read.keys() & chosen.windows.offsets.keys():
            fills.pop(name, None)
            if chosen.windows.fill is not None:
                fills[name] = (mask_of(name), chosen.windows.fill)
    return fills


def _fill_of(padded: PaddedSampler | None, dtypes: DTypes, *, is_augmented: bool) -> float | None:
    """What steps become that are not there."""
    fill = None if padded is None else padded.fill
    if fill is not None:
        from mouse_core.batches._mask import check_fill

        check_fill(fill, dtypes)
        if is_augmented:
            raise ConfigError(f"pad: expected True or False with augment or views, found {fill}")
    return fill


def _converted(plain: Mapping[str, FieldReader], dtypes: DTypes) -> frozenset[str]:
    """The fields that come in another dtype than their column's."""
    return frozenset(name for name, reader in plain.items() if reader.column.reading.dtype != dtypes[name])


def copied_fields(readers: Readers, shapes: Mapping[str, tuple[int, ...]]) -> list[CopiedField]:
    """Those fields that may be copied from where they lie."""
    from mouse_core._arrow.byte_views import CopiedField, cast_copies  # with Arrow's functions, which take long to load

    found = []
    for name, reader in readers.items() if cast_copies() else ():
        if _is_plain(reader):
            column, dtype = reader.column, reader.column.reading.dtype
            row_bytes = column.width * dtype.itemsize
            found.append(CopiedField(name, shapes[name], column, dtype, row_bytes, reader.highest))
    return found


def _is_plain(reader: FieldReader | MaskReader) -> TypeGuard[FieldReader]:
    return isinstance(reader, FieldReader) and reader.column.reading.is_plain


def _delivered_dtypes(
    readers: Readers, dtypes: Mapping[str, npt.DTypeLike], replace_dtypes: Mapping[Any, npt.DTypeLike]
) -> dict[str, np.dtype[np.generic]]:
    """The dtypes that fields are delivered in; see ``BatchSource``."""
    for name in dtypes:
        if name not in readers:
            raise MissingFieldError(f"dtypes: expected fields among {list(readers)}, found {name!r}")
    table = replaced_by(replace_dtypes)
    chosen = {
        name: check_dtype(dtypes[name], where=f"dtypes[{name!r}]") if name in dtypes else reader.spec.dtype
        for name, reader in readers.items()
    }
    delivered = {name: table.get(dtype, dtype) for name, dtype in chosen.items()}
    for name, dtype in delivered.items():
        readers[name].check_fills(dtype)
    return delivered
