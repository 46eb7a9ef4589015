"""The plan of a source: all decisions about its batches, made once from the arguments of ``BatchSource``.

A plan has three parts. ``planner`` chooses the windows of a batch. ``readers`` contains a reader for each field.
``form`` describes the gathered batch; ``stages`` then change the batch in order, and ``packing`` finally removes
missing steps. ``spec`` describes the result. Example: with ``normalize={"reward": "mean_std"}``, a stored float64
reward is gathered as float64 (``form.dtypes``), a stage converts it to float32, and ``spec`` has float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import recipe
from mouse_core._base.memo import memo
from mouse_core.batches._planner import Planner
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError, MissingFieldError
from mouse_core.sampling.plan import MASK, PaddedSampler
from mouse_core.spec import FieldSpec, Layout, Spec, check_dtype, replaced_by
from mouse_core.store.fields import FieldReader, meant_by
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core._arrow.byte_views import CopiedField
    from mouse_core.augment.config import AugmentTokensConfig
    from mouse_core.augment.stream import StreamAugment
    from mouse_core.batches._mask import Packing
    from mouse_core.batches._stages import Map, Stage
    from mouse_core.ranks import Ranks
    from mouse_core.sampling.offsets import FieldWindows
    from mouse_core.statistics.normalizer import Normalizer

# Memory in bytes of windows that are located together, 2.9 MB.
_PLANNED_BYTES = 11 << 18


class MaskReader:
    """The reader of the field ``mask``. The field has no column: its values are computed from the lengths of the
    located windows.

    Args:
        spec: The spec of the field; by default the spec of ``mask``.
    """

    def __init__(self, spec: FieldSpec | None = None) -> None:
        self.spec = FieldSpec(MASK, np.dtype(np.bool_), ()) if spec is None else spec

    @property
    def identity(self) -> list[Any]:
        """Return only the name of the field, because the identity of the sampler already determines the values."""
        return [self.spec.name]

    def check_fills(self, dtype: np.dtype[Any]) -> None:
        """Do nothing, because every dtype can represent 0 and 1."""

    def stored_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """Return bool."""
        return self.spec.dtype


Readers = Mapping[str, FieldReader | MaskReader]
DTypes = Mapping[str, np.dtype[np.generic]]


@dataclass(frozen=True, eq=False)
class BatchForm:
    """The form of gathered batches: the dtypes and shapes of fields, and the fields that are converted or checked after
    a copy.

    An attribute that is a pair is indexed by ``stored``: the item at index False is for the delivered dtypes, and the
    item at index True is for the stored dtypes.

    Args:
        dtypes: The dtypes of the gathered fields.
        shapes: A dict from field to the shape of a step.
        fill: The value of missing steps; None: copies of the last present step.
        is_padded: Whether steps may be missing.
        converted: Fields that are first copied in the column's dtype and then converted.
        checked: Fields that are first copied, and whose values are then compared with the field's bounds.
        is_copied: Whether a batch is complete with only the copied fields and the masks.
    """

    dtypes: tuple[DTypes, DTypes]
    shapes: dict[str, tuple[int, ...]]
    fill: float | None
    is_padded: bool
    converted: tuple[frozenset[str], frozenset[str]]
    checked: frozenset[str]
    is_copied: tuple[bool, bool]

    @classmethod
    def of(
        cls,
        readers: Readers,
        dtypes: tuple[DTypes, DTypes],
        shapes: Mapping[str, tuple[int, ...]],
        fill: float | None,
        *,
        is_padded: bool,
    ) -> BatchForm:
        """Return the form of the fields in ``readers``; ``dtypes`` and ``shapes`` may contain additional fields."""
        delivered, stored = ({name: some[name] for name in readers} for some in dtypes)
        plain = {name: reader for name, reader in readers.items() if _is_plain(reader)}
        converted = tuple(
            frozenset(name for name, reader in plain.items() if reader.column.reading.dtype != some[name])
            for some in (delivered, stored)
        )
        bounded = [name for name, one in plain.items() if one.bounds is not None and one.highest is None]
        masks = [name for name, reader in readers.items() if isinstance(reader, MaskReader)]
        # Batches that are copied together share one mask of one dtype.
        complete = len(plain) + len(masks) == len(readers) and not bounded
        complete = complete and all(delivered[name] == stored[name] for name in masks)
        return cls(
            (delivered, stored),
            {name: shapes[name] for name in readers},
            fill,
            is_padded,
            (converted[0], converted[1]),
            frozenset(bounded),
            (complete and not converted[0], complete and not converted[1]),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchPlan:
    """The plan of the batches of a ``BatchSource``: the planner, the readers and all options; see the docstring of the
    module.

    Args:
        planner: The planner that draws and locates windows of a snapshot.
        readers: Readers by field, in the order of a batch.
        ranks: The processes that share the batches, if ``shard="auto"`` found these processes; else None.
        windows: Offsets by field; None if the source has no ``windows``.
        fields, required_fields, dtypes, replace_dtypes, augment, views, normalize, map, packed, layout, transitions:
            Arguments of ``BatchSource``, checked.
    """

    planner: Planner
    readers: Readers
    ranks: Ranks | None
    windows: FieldWindows | None
    fields: tuple[str, ...] | None
    required_fields: tuple[str, ...]
    dtypes: dict[str, npt.DTypeLike]
    replace_dtypes: dict[Any, npt.DTypeLike]
    augment: AugmentTokensConfig | None
    views: int
    normalize: Normalizer | None
    map: Map | None
    packed: bool | int
    layout: Layout | None = None
    transitions: bool = False

    def arguments(self) -> dict[str, Any]:
        """The arguments with which ``BatchSource`` creates the same plan, without the snapshot and the sampler."""
        planner = self.planner
        names = ("windows", "fields", "required_fields", "dtypes", "replace_dtypes", "augment", "views", "normalize")
        return {
            "seed": planner.seed,
            "shard": self.ranks or planner.shard,
            "epoch_start": planner.epoch_start,
            "uneven": planner.uneven,
            **{name: getattr(self, name) for name in (*names, "map", "packed", "layout", "transitions")},
        }

    def forward(self, planner: Planner, readers: Readers) -> BatchPlan:
        """Return the same plan over a later snapshot with appended rows; statistics of rows are computed again from the
        later snapshot.
        """
        normalize = None if self.normalize is None else self.normalize.over(planner.snapshot, grown=True)
        if normalize is not self.normalize:
            return replace(self, planner=planner, readers=readers, normalize=normalize)
        plan = object.__new__(BatchPlan)  # keeps all cached values, because online loops take snapshots often
        plan.__dict__.update(self.__dict__, planner=planner, readers=readers)
        return plan

    @property
    def batch_dims(self) -> int:
        """The number of batch axes of a field before packing: 2 for ``[B, S]``, 1 for single rows ``[B]``."""
        return 2 if self.windows is None else self.windows.batch_dims

    @memo
    def spec(self) -> Spec:
        """The spec of a delivered batch."""
        fields = self.stages[-1].spec if self.stages else self._gathered
        alignment = self.planner.snapshot.alignment
        if self.packing is None:
            return Spec(dict(fields), alignment, self.batch_dims)
        return Spec(self.packing.spec(fields), alignment, 1)

    @property
    def identity(self) -> list[Any]:
        """Return the values that determine batches, except the seed, the delivered dtypes and the shard."""
        from mouse_core._base.identity import sampler_identity

        sampler = self.planner.sampler
        masked = isinstance(sampler, PaddedSampler) and self.packing is None  # a packed batch has no mask of steps
        fields = [
            reader.identity
            for name, reader in self.readers.items()
            if not isinstance(reader, MaskReader) or (masked and name == MASK)
        ]
        if self.windows is not None and not self.windows.offsets and self.batch_dims == 1:
            fields.append(["[B]"])  # without offsets, nothing else shows that batches have no axis of steps
        if self.transitions:
            fields.append(["transitions"])
        stages: tuple[Any, ...] = self.stages if self.packing is None else (*self.stages, self.packing)
        return [self.planner.snapshot.fingerprint, sampler_identity(sampler), fields, *(one.identity for one in stages)]

    # ------------------------------------------------------------------ what becomes of it

    @memo
    def form(self) -> BatchForm:
        """The form of a gathered batch, before the first stage.

        Raises:
            ConfigError: An option does not apply to these fields.
            MissingFieldError: ``dtypes`` names a field that is not delivered.
        """
        delivered, stored = self._delivered, {name: one.stored_dtype for name, one in self._gathered.items()}
        for stage in reversed(self.stages):
            delivered, stored = stage.arriving_dtypes(delivered), stage.arriving_dtypes(stored)
        fill = None if self._padded is None else self._padded.fill
        if fill is not None:
            from mouse_core.batches._mask import check_fill

            filled = {name: stored[name] for name, reader in self.readers.items() if not isinstance(reader, MaskReader)}
            check_fill(fill, filled)
            if self._is_augmented:
                raise ConfigError(f"pad: with augment or views, expected True or False, found {fill}")
        shapes = {name: field.shape for name, field in self._gathered.items()}
        return BatchForm.of(self.readers, (delivered, stored), shapes, fill, is_padded=self._padded is not None)

    @memo
    def stages(self) -> tuple[Stage, ...]:
        """The stages in their order: normalise numbers, augment, normalise images, apply ``map``."""
        fields = self._gathered
        read = {name: self.readers[name].stored_dtype(np.dtype(np.float64)) for name in self._normalized}
        augment = self._augment(read)
        stages: tuple[Stage, ...] = () if augment is None else (augment,)
        if self.normalize is not None:
            from mouse_core.statistics.normalizer import StreamNormalize  # loaded on demand

            fills = self._fills_by_mask(read)
            made = {name: one.dtype for name, one in fields.items()}
            known = {name: one for name, one in self.normalize.items() if name in fields}
            images = {name: one for name, one in known.items() if fields[name].image_shape is not None}
            numbers = {name: one for name, one in known.items() if name not in images}
            arriving = made if augment is None else augment.arriving_dtypes(made)
            before = StreamNormalize(numbers, fields, read, arriving, fills)
            behind = StreamNormalize(images, before.spec if augment is None else augment.spec, read, made, fills)
            stages = (*((before,) if numbers else ()), *stages, *((behind,) if images else ()))
        if self.map is not None:
            from mouse_core.batches._stages import StreamMap  # loaded on demand

            behind_all = stages[-1].spec if stages else fields
            replaced = replaced_by(self.replace_dtypes)
            stages = (*stages, StreamMap(self.map, behind_all, replaced, self.batch_dims))
        return stages

    @memo
    def packing(self) -> Packing | None:
        """The packing of windows; None if windows are not packed."""
        if self.packed is False:
            return None
        from mouse_core.batches._mask import Packing, check_packed  # loaded on demand

        return Packing(check_packed(self.packed), self.planner.packed, replaced_by(self.replace_dtypes))

    @property
    def _padded(self) -> PaddedSampler | None:
        """The sampler if its windows can have missing steps and these steps are also gathered; None if no step is
        missing or only present steps are read.
        """
        return None if self.planner.packed else self.planner.padded

    @property
    def _is_augmented(self) -> bool:
        """Whether ``augment`` or ``views`` requests an augmentation; the augmentation may be invalid."""
        return self.augment is not None or type(self.views) is not int or self.views != 1

    @memo
    def _gathered(self) -> dict[str, FieldSpec]:
        """The specs of the fields before the first stage; normalised fields already have their delivered dtypes."""
        delivered = self._delivered
        stored = {
            name: delivered[name] if name in self._normalized else reader.stored_dtype(delivered[name])
            for name, reader in self.readers.items()
        }
        return {
            name: reader.spec.replace(dtype=delivered[name], stored_dtype=stored[name])
            for name, reader in self.readers.items()
        }

    @memo
    def _delivered(self) -> dict[str, np.dtype[np.generic]]:
        """The dtypes before the first stage, by field."""
        # ``map`` gets the same dtypes in every framework: unsupported dtypes are replaced after ``map``.
        replaced = self.replace_dtypes if self.map is None else {}
        return self._dtypes_with({**self.dtypes, **self._normalized}, replaced)

    def _dtypes_with(
        self, dtypes: Mapping[str, npt.DTypeLike], replace_dtypes: Mapping[Any, npt.DTypeLike]
    ) -> dict[str, np.dtype[np.generic]]:
        """Return the dtypes by field, in which ``dtypes`` and ``replace_dtypes`` are applied; see ``BatchSource``."""
        for name in dtypes:
            if name not in self.readers:
                raise MissingFieldError(f"dtypes: expected fields among {list(self.readers)}, found {name!r}")
        table = replaced_by(replace_dtypes)
        chosen = {
            name: check_dtype(dtypes[name], where=f"dtypes[{name!r}]") if name in dtypes else reader.spec.dtype
            for name, reader in self.readers.items()
        }
        delivered = {name: table.get(dtype, dtype) for name, dtype in chosen.items()}
        for name, dtype in delivered.items():
            self.readers[name].check_fills(dtype)
        return delivered

    @memo
    def _normalized(self) -> dict[str, npt.DTypeLike]:
        """The dtypes of normalised fields: float32, unless ``dtypes`` names another dtype.

        A ``Normalizer`` may also have fields that are not delivered. A field whose normalisation is given by a name,
        such as "mean_std", must be delivered.
        """
        found: dict[str, npt.DTypeLike] = {}
        normalize: Mapping[str, Any] = {} if self.normalize is None else self.normalize
        for name, scaling in normalize.items():
            if name not in self.readers and not self.normalize.follows:  # type: ignore[union-attr]
                continue
            if name not in self.readers:
                raise MissingFieldError(f"normalize: expected fields among {list(self.readers)}, found {name!r}")
            spec = self.readers[name].spec
            scaling.check_field(spec, axes_before=0 if self.windows is None else len(self.windows.axes(name)))
            found[name] = self.dtypes.get(name, np.float32)
            if number_kind(check_dtype(found[name], where=f"dtypes[{name!r}]")) != "f":
                raise ConfigError(f"normalize: {name}: expected a floating dtype, found {found[name]!r}")
            if name not in self.dtypes and spec.dtype.kind in "iub" and spec.image_shape is None:
                raise ConfigError(
                    f"normalize: {name}: expected measurements or images, found {spec.dtype}, which may be codes; "
                    f"dtypes={{{name!r}: 'float32'}} declares them as numbers"
                )
        return found

    def _augment(self, read: DTypes) -> StreamAugment | None:
        """Return the stage that augments batches. Images are augmented in their stored form, given by ``read``, before
        normalisation.
        """
        if not self._is_augmented:
            return None
        offsets = frozenset[str]()
        if self.windows is not None:
            offsets = frozenset(name for name in self.windows.offsets if self.windows.axes(name))
            if self.windows.fill is not None:
                # The padding value would also be augmented, and a code outside the range cannot be permuted.
                raise ConfigError(f"pad: with augment or views, expected True or False, found {self.windows.fill}")
        from mouse_core.augment.stream import stream_augment  # loaded on demand

        fields = self._gathered
        images = {name: dtype for name, dtype in read.items() if fields[name].image_shape is not None}
        numbers = {name: np.float32 for name in read if name not in self.dtypes}
        computed = {**self._dtypes_with({**numbers, **self.dtypes}, {}), **images}
        arriving = {name: one.replace(dtype=images[name]) if name in images else one for name, one in fields.items()}
        return stream_augment(
            self.augment,
            self.views,
            arriving,
            computed,
            max_num_actions=self.planner.snapshot.config.dims["max_action_dim"] or 0,
            batch_dims=self.batch_dims,
            offsets=offsets,
            masks=[name for name, reader in self.readers.items() if isinstance(reader, MaskReader)],
        )

    def _fills_by_mask(self, read: DTypes) -> dict[str, tuple[str, float]]:
        """Return, for each normalised field that may have missing steps, the name of its mask and the value of missing
        steps.
        """
        fill = None if self._padded is None else self._padded.fill
        fills = {} if fill is None else dict.fromkeys(read, (MASK, fill))
        if self.windows is not None:
            from mouse_core.sampling.offsets import mask_of  # loaded on demand

            for name in read.keys() & self.windows.offsets.keys():
                fills.pop(name, None)
                if self.windows.fill is not None:
                    fills[name] = (mask_of(name), self.windows.fill)
        return fills


def copied_fields(readers: Readers, shapes: Mapping[str, tuple[int, ...]]) -> list[CopiedField]:
    """Return the fields whose values can be copied directly from the stored bytes."""
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


# ---------------------------------------------------------------------- arguments


def planned_windows(readers: Readers, length: int, around: int = 0) -> int:
    """Return the number of windows that are located together. For fewer windows, the call would take nearly as long,
    because about a hundred array operations are needed for any number of windows.

    A window needs 32 bytes, plus 24 bytes for each field (8 bytes if the field is a single number). If fields have
    offsets, ``around`` runs of rows are read around the steps of each window, and each run needs 56 additional bytes.
    Example: with 6 fields, the result is 2,883,584 // (32 + 24 * 6) = 16,384 windows.
    """
    numbers = sum(length == 1 and not reader.spec.shape for reader in readers.values())
    most = _PLANNED_BYTES // (32 + 24 * len(readers) - 16 * numbers + 56 * around)
    return max(1 if around else 1024, most)


def choose_readers(
    snapshot: Snapshot, fields: tuple[str, ...] | None, required: tuple[str, ...], *, masked: bool
) -> dict[str, FieldReader | MaskReader]:
    """Return the readers of the chosen fields; if ``masked`` (steps or windows may be missing), also the reader of
    ``mask``.

    Raises:
        MissingFieldError: A named field does not exist, or a dataset of the store lacks the field and no fill value
            replaces its nulls.
        ConfigError: A stored field is named ``mask``.
    """
    readers: dict[str, FieldReader | MaskReader] = {**snapshot.readers}
    if masked:
        if MASK in readers:
            raise ConfigError(
                f"boundary, uneven: expected a store without a field {MASK!r}, since batches get a field of "
                f"this name, found this field"
            )
        readers[MASK] = MaskReader()
    for option, names in (("required_fields", required), ("fields", fields or ())):
        for name in names:
            if name not in readers:
                raise _missing(snapshot, option, name, readers)
    chosen = {name: reader for name, reader in readers.items() if fields is None or name in (*fields, MASK)}
    for name in dict.fromkeys([*required, *chosen]):
        reader = readers[name]
        if isinstance(reader, FieldReader):
            _check_parts(snapshot, reader, "required_fields" if name in required else "fields")
    return chosen


def _missing(snapshot: Snapshot, option: str, name: str, readers: Readers) -> MissingFieldError:
    """Return the error for a field that does not exist."""
    fields = snapshot.config.fields
    if name in fields:
        column = fields[name].column
        said = recipe(snapshot.config.types, [column])
        hint = f"; {said}: rename it, or read it with Field({name!r}, column=...)" if said else ""
        return MissingFieldError(
            f"{option}: expected {name!r} (from a column {column!r} that is not null in every row), found "
            f"{list(readers)}{hint}"
        )
    hint = meant_by(name, readers, snapshot.config.types)
    return MissingFieldError(f"{option}: expected {name!r}, found {list(readers)}{hint}")


def _check_parts(snapshot: Snapshot, reader: FieldReader, option: str) -> None:
    """Raise MissingFieldError if a dataset of the store lacks the field and no fill value replaces its nulls."""
    name = reader.spec.name
    where = snapshot.lacking(reader) if reader.field.fill is None else None
    if where is not None:
        raise MissingFieldError(
            f"{option}: expected {name!r} in all datasets of the store, found {where}; leave the field out with "
            f"fields=[...], or replace nulls by a value with Field({name!r}, fill=...)"
        )
