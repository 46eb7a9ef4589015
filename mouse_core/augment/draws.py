"""The random numbers of an augmentation, drawn in NumPy as a pure function of ``(seed, index, call)``."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.augment.config import (
    DONE_CODES,
    IMAGE_SCALARS,
    PERMUTED,
    AugmentMaskProbConfig,
    AugmentTokensConfig,
    ImageFields,
    ScaleFields,
)
from mouse_core.augment.images import Crop, ImageDraws, ImageShapes, draw_crop, pixel_table, shape_of_images
from mouse_core.errors import ConfigError
from mouse_core.nested import map_tree
from mouse_core.randomness import Key


class Affine(NamedTuple):
    """``x * scale + shift``; None where there is none.

    Args:
        scale: float64 ``[]``, or None.
        shift: float64 ``[]``, or None.
    """

    scale: Any
    shift: Any


class Draws(NamedTuple):
    """Everything random about one augmentation of one batch; a pytree of arrays.

    Args:
        affine: By field, the scale and shift of its values.
        permutations: By field, int64 ``[B, n]``: code ``c`` of row ``b`` becomes ``permutation[b, c]``. For ``q_star``
            it is the columns that move, as for those of ``columns``.
        pixels: uint8 ``[256]``: what each value of a pixel becomes; None where they stay.
        crop: Which pixels are taken; None: all.
        masks: By field, bool ``[B, S]``, True where values are masked; they are not delivered.
        delivered_masks: The same for masks that are delivered with the batch. (Two places rather than a flag, since
            under ``jax.jit`` a flag would be a value, and the structure of a pytree is not.)
        columns: By field, int64 ``[B, n]``: what stands in column ``c`` of row ``b`` moves to ``columns[b, c]``.
        fills: By masked field, what its values become, ``[]``; where there is none, 0, and -1 for ``time``.
        images: By field, what is done to its images; ``pixels`` and ``crop`` are for ``obs_image`` by its options.
    """

    affine: dict[str, Affine]
    permutations: dict[str, Any]
    pixels: Any
    crop: Crop | None
    masks: dict[str, Any]
    delivered_masks: dict[str, Any]
    columns: dict[str, Any]
    fills: dict[str, Any]
    images: dict[str, ImageDraws]

    def map(self, function: Callable[[Any], Any]) -> Draws:
        """Return a copy with ``function`` applied to every array."""
        mapped: Draws = map_tree(lambda part: None if part is None else function(part), self)
        return mapped


NO_DRAWS = Draws({}, {}, None, None, {}, {}, {}, {}, {})


class _Stream(IntEnum):
    """Every choice has a stream of its own, so that switching one on leaves the others as they are.

    Values are part of the stream: new ones are added, old ones never change. Masks follow from ``MASKS`` on.
    """

    SCALE_REWARD = 0
    SHIFT_REWARD = 1
    SCALE_OBS = 2
    SHIFT_OBS = 3
    SCALE_OBS_IMAGE = 4
    SHIFT_OBS_IMAGE = 5
    ACTION = 6
    DONE = 7
    OBS_DISCRETE = 8
    CROP_ROWS = 9
    CROP_COLUMNS = 10
    MASKS = 16


_STREAMS = 256
# Where the streams of fields by name begin, far behind those of all calls; so many calls each.
_NAMED_STREAMS = 1 << 63
_CALLS_OF_NAMED = 1 << 32
_MASK_STREAMS = {
    option.name: _Stream.MASKS + number for number, option in enumerate(dataclasses.fields(AugmentMaskProbConfig))
}


def draw(
    config: AugmentTokensConfig,
    key: Key,
    shape: tuple[int, int],
    *,
    fields: Collection[str] | None = None,
    image_shape: ImageShapes = None,
) -> Draws:
    """The draws for one batch.

    Scalars, permutations and crops depend on ``key.seed`` and ``key.index``, masks on ``key.call`` too: keys that
    differ in ``call`` (``key.with_call(1)``) give views of one batch that share all but the masks.

    Args:
        config: What is augmented.
        key: Names the random numbers.
        shape: ``(B, S)`` of the whole batch, over all shards; ``cut`` takes a shard's rows from what is drawn.
        fields: The fields of the batch; nothing is drawn for others. By default all.
        image_shape: ``(H, W, C)`` of the images of ``obs_image``, or of several fields by name; needed to crop.

    Raises:
        ConfigError: A number of actions or states that is needed and not given, or a crop larger than the image.
    """
    if not config.enabled:
        return NO_DRAWS
    shared = draw_shared(config, key, shape, fields=fields, image_shape=image_shape)
    return with_masks(shared, config, key, shape, fields=fields)


def draw_shared(
    config: AugmentTokensConfig,
    key: Key,
    shape: tuple[int, int],
    *,
    fields: Collection[str] | None = None,
    image_shape: ImageShapes = None,
) -> Draws:
    """The draws that all views of a batch share: all but the masks. See ``draw``."""
    if not config.enabled:
        return NO_DRAWS

    def there(field: str) -> bool:
        return fields is None or field in fields

    scalars = {
        option: spec.draw(_stream(key, _Stream[option.upper()]))
        for option, spec in config.scalars().items()
        if option not in IMAGE_SCALARS
    }
    affine = {
        field: Affine(*(np.float64(scalars[option]) if option in scalars else None for option in options))
        for field, options in config.scaled(scalars).items()
        if there(field)
    }
    for scaling in config.scales:
        affine.update(dict.fromkeys(filter(there, scaling.fields), _draw_affine(scaling, key)))
    renamed, columns = _draw_permutations(config, key, shape[0], there), {}
    for permuting in config.permutes:
        if any(map(there, permuting.fields)):
            drawn = permutations(_named_stream(key, "permute", permuting.fields), shape[0], permuting.size)
            renamed.update(dict.fromkeys(filter(there, permuting.codes), drawn))
            columns.update(dict.fromkeys(filter(there, permuting.columns), drawn))
    images = _draw_all_images(config, key, shape, there, image_shape)
    by_option = images.pop("", ImageDraws(None, None))
    shared = NO_DRAWS._replace(affine=affine, permutations=renamed, pixels=by_option.pixels, crop=by_option.crop)
    return shared._replace(columns=columns, images=images)


def with_masks(
    shared: Draws,
    config: AugmentTokensConfig,
    key: Key,
    shape: tuple[int, int],
    *,
    fields: Collection[str] | None = None,
) -> Draws:
    """``shared`` with the masks of ``key.call``. See ``draw``."""
    if not config.enabled:
        return shared
    masks = {}
    for field, probability in config.mask_prob.active().items():
        if fields is None or field in fields:
            drawn = _bernoulli(_stream(key, _MASK_STREAMS[field], call=key.call), probability, shape[0] * shape[1])
            masks[field] = drawn.reshape(shape)
    fills = {}
    for hiding in config.hides:
        there = [field for field in hiding.fields if fields is None or field in fields]
        if there:
            stream = _named_stream(key, "mask", hiding.fields, call=key.call)
            drawn = _bernoulli(stream, hiding.probability, shape[0] * shape[1]).reshape(shape)
            masks.update(dict.fromkeys(there, drawn))
        for field in there:
            value = hiding.fill_of(field)
            fills[field] = np.asarray(value, np.int64 if isinstance(value, int) else np.float64)
    shared = shared._replace(fills=fills)
    return shared._replace(delivered_masks=masks) if config.deliver_masks else shared._replace(masks=masks)


def cut(draws: Draws, first: int, count: int) -> Draws:
    """The draws for rows ``[first, first + count)`` of the batch."""
    crops = {field: one._replace(pixels=None) for field, one in draws.images.items()}
    rows = draws._replace(affine={}, pixels=None, fills={}, images=crops)
    taken = rows.map(lambda values: values[first : first + count])
    images = {field: one._replace(pixels=draws.images[field].pixels) for field, one in taken.images.items()}
    return taken._replace(affine=draws.affine, pixels=draws.pixels, fills=draws.fills, images=images)


def _stream(key: Key, stream: int, *, call: int = 0) -> Key:
    return key.with_call(call * _STREAMS + stream)


def _named_stream(key: Key, what: str, fields: tuple[str, ...], *, call: int = 0) -> Key:
    """The stream of what is done to fields by their names; another for other names."""
    named = hashlib.blake2b(repr((what, *fields)).encode(), digest_size=8).digest()
    number = int.from_bytes(named, "little") % (_NAMED_STREAMS // _CALLS_OF_NAMED)
    return key.with_call(_NAMED_STREAMS + number * _CALLS_OF_NAMED + call % _CALLS_OF_NAMED)


def _draw_affine(scaling: ScaleFields, key: Key) -> Affine:
    if scaling.line is not None:
        return Affine(*map(np.float64, scaling.line))
    options = {"scale": scaling.scale, "shift": scaling.shift}
    return Affine(
        *(
            None if spec is None else np.float64(spec.draw(_named_stream(key, option, scaling.fields)))
            for option, spec in options.items()
        )
    )


def _draw_all_images(
    config: AugmentTokensConfig,
    key: Key,
    shape: tuple[int, int],
    there: Callable[[str], bool],
    image_shape: ImageShapes,
) -> dict[str, ImageDraws]:
    """Draw the image augmentations of every field; those of the ``obs_image`` options are under ""."""
    found: dict[str, ImageDraws] = {}
    if there("obs_image"):
        drawn = {
            option: spec.draw(_stream(key, _Stream[option.upper()]))
            for option, spec in config.scalars().items()
            if option in IMAGE_SCALARS
        }
        scaled = drawn.get("scale_obs_image", 1.0), drawn.get("shift_obs_image", 0.0)
        crop = None
        if config.crop_obs_image is not None:
            streams = _stream(key, _Stream.CROP_ROWS), _stream(key, _Stream.CROP_COLUMNS)
            size = shape_of_images(image_shape, "obs_image")
            crop = draw_crop(config.crop_obs_image, streams, shape, size, "obs_image")
        found[""] = ImageDraws(crop, pixel_table(*scaled) if drawn else None)
    for change in config.images:
        found.update(_draw_images(change, key, shape, [name for name in change.fields if there(name)], image_shape))
    return found


def _draw_images(
    change: ImageFields, key: Key, shape: tuple[int, int], there: list[str], image_shape: ImageShapes
) -> dict[str, ImageDraws]:
    """Draw one image augmentation, the same for each of its fields that the batch has."""
    pixels, crop = None, None
    if change.scalars:
        drawn = {
            option: spec.draw(_named_stream(key, f"pixels {option}", change.fields))
            for option, spec in change.scalars.items()
        }
        pixels = pixel_table(drawn.get("scale", 1.0), drawn.get("shift", 0.0))
    if there and change.crop is not None:
        sizes = {field: shape_of_images(image_shape, field) for field in there}
        if len({size and size[:2] for size in sizes.values()}) > 1:
            raise ConfigError(f"ImageFields: expected images of one size in an entry with a crop, found {sizes}")
        streams = tuple(_named_stream(key, f"crop {what}", change.fields) for what in ("rows", "columns"))
        crop = draw_crop(change.crop, streams, shape, sizes[there[0]], there[0])  # type: ignore[arg-type]
    return dict.fromkeys(there, ImageDraws(crop, pixels))


def _draw_permutations(
    config: AugmentTokensConfig, key: Key, rows: int, there: Callable[[str], bool]
) -> dict[str, npt.NDArray[np.int64]]:
    drawn = {}
    actions = [field for field in PERMUTED[config.permute_action] if there(field)]
    if actions:
        size = _needed("max_num_actions", config.max_num_actions, "permute_action")
        drawn.update(dict.fromkeys(actions, permutations(_stream(key, _Stream.ACTION), rows, size)))
    if config.permute_done and there("done"):
        drawn["done"] = permutations(_stream(key, _Stream.DONE), rows, DONE_CODES)
    if config.permute_obs_discrete and there("obs_discrete"):
        size = _needed("max_num_obs_discrete", config.max_num_obs_discrete, "permute_obs_discrete")
        drawn["obs_discrete"] = permutations(_stream(key, _Stream.OBS_DISCRETE), rows, size)
    return drawn


def _needed(option: str, size: int, wanted_by: str) -> int:
    if not size:
        raise ConfigError(f"{wanted_by}: expected {option} of at least 1, found 0")
    return size


def permutations(key: Key, rows: int, size: int) -> npt.NDArray[np.int64]:
    """Independent uniform permutations of ``range(size)``, int64 ``[rows, size]``."""
    # Random numbers that carry their place in the low bits, sorted: several times faster than an argsort.
    low = np.uint64((1 << max(size - 1, 1).bit_length()) - 1)
    numbered = (key.bits(rows * size).reshape(rows, size) & ~low) | np.arange(size, dtype=np.uint64)
    numbered.sort(axis=1)
    return (numbered & low).astype(np.int64)


def _bernoulli(key: Key, probability: float, count: int) -> npt.NDArray[np.bool_]:
    """bool ``[count]``, True with ``probability`` to within ``2**-33``."""
    # Two 32-bit numbers a word, in the same order on every machine.
    words = key.bits(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
    threshold = round(probability * 2**32)
    return np.ones(count, np.bool_) if threshold == 2**32 else words < np.uint32(threshold)
