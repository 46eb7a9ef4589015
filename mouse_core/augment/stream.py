"""The augmentation inside a batch source. One batch becomes several views, and the draws depend only on the seed and
the index.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memory import ArrayMemory
from mouse_core.augment.config import AffineFields, AugmentTokensConfig, ImageFields, MaskFields, PermuteFields
from mouse_core.augment.draws import Draws, cut, draw_shared, with_masks
from mouse_core.augment.images import Empty, crop_size
from mouse_core.augment.transform import mask, transform, with_steps, without_steps
from mouse_core.dtypes import convert
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import Plan
from mouse_core.spec import FieldSpec, check_count

Batch = dict[str, npt.NDArray[Any]]
DTypes = Mapping[str, np.dtype[np.generic]]


# Smaller arrays are as fast in newly allocated memory.
_POOL_FROM = 1 << 20


@dataclass(frozen=True)
class StreamAugment:
    """Augments the batches of one source; ``stream_augment`` creates and checks this object.

    Args:
        config: The augmentations, including the needed numbers of actions and states.
        views: Number of views of a batch.
        arriving: The fields of a batch before augmentation.
        computed: A dict from field to the dtype in which numbers are scaled and shifted. These dtypes are the dtypes of
            ``arriving`` before any replacement for a framework, so that every framework gets the same numbers, rounded
            to the framework's dtypes.
        batch_dims: Number of batch axes: 2, or 1 for batches ``[B, ...]`` without steps.
        offsets: The fields whose shape begins with an axis of offsets.
        memory: The object that allocates large new arrays.
    """

    config: AugmentTokensConfig
    views: int
    arriving: Mapping[str, FieldSpec]
    computed: DTypes
    batch_dims: int = 2
    offsets: frozenset[str] = frozenset()
    memory: ArrayMemory = field(default_factory=lambda: ArrayMemory(_POOL_FROM), compare=False, repr=False)

    def arriving_dtypes(self, dtypes: DTypes) -> dict[str, np.dtype[np.generic]]:
        """Return the dtypes in which fields must be gathered; ``dtypes`` are the dtypes that these fields would have
        without augmentation.
        """
        found = dict(dtypes)
        for name in found:
            if name in self._scaled:
                found[name] = self.computed[name]
            elif name in self._recoded:
                found[name] = self.arriving[name].dtype
            elif name in self.config.redrawn:
                found[name] = self.arriving[name].stored_dtype
        return found

    @property
    def _scaled(self) -> set[str]:
        return {name for one in self.config.of(AffineFields) for name in one.fields}

    @property
    def _image_shapes(self) -> dict[str, tuple[int, int, int]]:
        shapes = {name: one.image_shape for name, one in self.arriving.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    @property
    def _recoded(self) -> set[str]:
        """The fields whose stored dtype may be too narrow for the permuted codes or for the value of masked steps."""
        config = self.config
        coded = {name for one in config.of(PermuteFields) for name in one.codes}
        if config.permute_done:  # the codes of done fit in every dtype
            coded -= {"done"}
        return coded | {name for one in config.of(MaskFields) for name in one.fields if one.fill_of(name) != 0}

    @property
    def spec(self) -> dict[str, FieldSpec]:
        """The fields of a view: the arriving fields, in which images have the sizes after the crop, and the delivered
        masks.
        """
        found = dict(self.arriving)
        if not self.config.enabled:
            return found
        for name in (self._scaled | self._recoded) & found.keys():
            found[name] = found[name].replace(stored_dtype=found[name].dtype)
        crops = [(name, one.crop) for one in self.config.of(ImageFields) for name in one.fields]
        for name, crop in crops:
            image = found.get(name)
            if crop is not None and image is not None and image.image_shape is not None:
                height, width = crop_size(crop, image.image_shape, name)
                size = (height, width, image.image_shape[2])
                flat = image.shape[-3:] != image.image_shape
                shape = (*image.shape[:-1], math.prod(size)) if flat else (*image.shape[:-3], *size)
                found[name] = image.replace(shape=shape, image_shape=size)
        if self.config.deliver_masks:
            for name in self.config.masked():
                if name in self.arriving:
                    found[f"{name}_mask"] = FieldSpec(f"{name}_mask", np.dtype(bool), (), "", np.dtype(bool))
        return found

    @property
    def identity(self) -> list[Any]:
        """Return the values that determine the draws: the number of views, and all non-default options."""
        config = self.config
        chosen = {
            option.name: repr(getattr(config, option.name))
            for option in fields(config)
            if getattr(config, option.name) != option.default
        }
        return [self.views, chosen]

    def __call__(
        self, arrived: tuple[Batch, ...], plan: Plan, *, stored: bool = False, apart: bool = True
    ) -> tuple[Batch, ...]:
        """Return the views of a batch.

        Args:
            arrived: A tuple of one batch, ``[b, S, ...]`` by field, in the dtypes of ``arriving_dtypes``; the arrays
                may be modified.
            plan: The plan of the batch.
            stored: Whether fields are delivered in the stored dtypes of ``spec``.
            apart: Whether each view gets its own arrays; False if all views are copied later.

        Returns:
            A tuple of ``views`` batches.

        Raises:
            DataError: A code is out of range, or a dtype cannot represent a number.
        """
        (batch,) = arrived
        if self.batch_dims == 1:
            batch = with_steps(batch)
        rows, there, empty = next(iter(batch.values())).shape[0], set(batch), self.memory.empty
        key, shape, first = plan.key, (plan.global_size, plan.length), plan.first
        shared = draw_shared(self.config, key, shape, fields=there, image_shape=self._image_shapes)

        def here(draws: Draws) -> Draws:
            return draws if (first, rows) == (0, shape[0]) else cut(draws, first, rows)

        batch = self._transformed(batch, here(shared), stored=stored)
        views = []
        for number in range(self.views):
            draws = here(with_masks(shared, self.config, key.with_call(number), shape, fields=there))
            last = number == self.views - 1
            # The last view may modify arrays that the other views have copied by then.
            changed = mask(batch, draws, own=batch if last else (), empty=empty)
            if not last and apart:
                # Separate arrays: a caller that modifies one view, or donates it in JAX, must not change the others.
                kept = batch.keys() - changed.keys()
                changed |= {name: _copied(batch[name], batch[name].dtype, empty) for name in kept}
            views.append({**batch, **changed})
        return tuple(map(without_steps, views)) if self.batch_dims == 1 else tuple(views)

    def _transformed(self, batch: Batch, draws: Draws, *, stored: bool) -> Batch:
        """Return the batch that all views share, in the delivered dtypes."""
        empty = self.memory.empty
        changed = transform(batch, draws, image_shape=self._image_shapes, validate=True, own=batch, empty=empty)
        batch = {**batch, **changed}
        for name in self._scaled & batch.keys():
            try:
                batch[name] = convert(batch[name], self.arriving[name].dtype)
            except ValueError as error:
                raise DataError(f"augment: {name}: {error}") from error
        for name in self.config.redrawn & batch.keys() if not stored else ():
            dtype = self.arriving[name].dtype
            if batch[name].dtype != dtype:
                batch[name] = _copied(batch[name], dtype, empty)
        return batch


def stream_augment(
    config: AugmentTokensConfig | None,
    views: int,
    arriving: Mapping[str, FieldSpec],
    computed: DTypes,
    *,
    max_num_actions: int = 0,
    batch_dims: int = 2,
    offsets: Collection[str] = (),
    masks: Collection[str] = (),
) -> StreamAugment | None:
    """Return the augmentation of a source; None if the augmentation does not change batches.

    Args:
        config: The augmentations.
        views: The number of views of a batch, at least 1.
        arriving, computed: See ``StreamAugment``.
        max_num_actions: The number of actions in the data; 0 if the number is unknown.
        batch_dims, offsets: See ``StreamAugment``.
        masks: The fields that mark present rows.

    Raises:
        ConfigError: An augmentation cannot be applied to these fields: a needed number of actions or states is unknown,
            a dtype is unsuitable, a crop is larger than the images, a field that ``by_field`` names is missing, or a
            field already has the name of a delivered mask.
    """
    check_count("views", views)
    config = AugmentTokensConfig(enabled=False) if config is None else config
    if not isinstance(config, AugmentTokensConfig):
        raise ConfigError(f"augment: expected an AugmentTokensConfig or None, found {config!r}")
    if not config.active:
        if views == 1:
            return None
        config = AugmentTokensConfig(enabled=False)
    elif config.permute_action and not config.max_num_actions:
        known = max_num_actions or (arriving["q_star"].shape[-1] if "q_star" in arriving else 0)
        config = config.with_sizes(max_num_actions=known)
    _check_named(config, arriving, masks)
    augment = StreamAugment(config, int(views), arriving, computed, batch_dims, frozenset(offsets))
    _check_fields(augment)
    # Augment a batch of one step now, so that errors are raised here instead of in a worker at the first batch.
    stored = augment.arriving_dtypes({name: field.stored_dtype for name, field in arriving.items()})
    axes = (1, 1)[:batch_dims]
    step = {name: np.zeros((*axes, *field.shape), stored[name]) for name, field in arriving.items()}
    try:
        augment((step,), Plan(np.zeros(1, np.int64), 1, Key(0, Purpose.AUGMENT), 1))
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    return augment


def _check_named(config: AugmentTokensConfig, arriving: Mapping[str, FieldSpec], masks: Collection[str]) -> None:
    """Raise ConfigError if a field that ``by_field`` names does not exist or is a mask."""
    for name in config.named if config.enabled else ():
        if name in masks:
            raise ConfigError(
                f"augment: by_field: expected fields of the data, found {name!r}, a mask of missing or padded rows"
            )
    config.check_named({name: field.column for name, field in arriving.items() if name not in masks})


def _check_fields(augment: StreamAugment) -> None:
    """Raise ConfigError in three cases that the arrays of a batch would not reveal: a field of an ``ImageFields`` does
    not contain images of bytes, a field to be permuted contains vectors instead of codes, or a delivered mask has the
    name of a field.
    """
    config, arriving = augment.config, augment.arriving
    by_name = (one for one in config.by_field if isinstance(one, ImageFields))
    for name in (name for one in by_name for name in one.fields):
        if arriving[name].image_shape is None or arriving[name].stored_dtype != np.uint8:
            found = f"{arriving[name].stored_dtype} {list(arriving[name].shape)} per step"
            raise ConfigError(f"augment: ImageFields: {name}: expected images of uint8, found {found}")
    for name in config.renamed:
        shape = arriving[name].shape[name in augment.offsets :] if name in arriving else ()
        if shape and name != "q_star":
            raise ConfigError(
                f"augment: {name}: expected integer codes to permute, one per step, found shape {list(shape)} per step"
            )
    for name in config.masked() if config.deliver_masks else ():
        if name in arriving and f"{name}_mask" in arriving:
            raise ConfigError(
                f"augment: deliver_masks: {name}: expected a batch without a field {name}_mask, found this field; "
                "turn deliver_masks off, or leave out the field"
            )


def _copied(values: npt.NDArray[Any], dtype: np.dtype[Any], empty: Empty) -> npt.NDArray[Any]:
    copied = empty(values.shape, dtype)
    np.copyto(copied, values)
    return copied
