"""The random numbers of an augmentation, drawn in NumPy as a pure function of ``(seed, index, call)``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mouse_core.augment.config import Affine, AugmentTokensConfig, MaskFields
from mouse_core.augment.images import ImageDraws, ImageShapes
from mouse_core.nested import map_tree
from mouse_core.randomness import Key


class Draws(NamedTuple):
    """All random numbers with which one batch is augmented once; a pytree of arrays.

    Args:
        affine: A dict from field to the scale and shift of its values.
        permutations: A dict from field to an int64 array ``[B, n]``: code ``c`` of row ``b`` becomes ``permutation[b,
            c]``.
        masks: A dict from field to a bool array ``[B, S]``, True at masked steps; these masks are not delivered.
        delivered_masks: Like ``masks``, for masks that are delivered with the batch. (Two attributes are used instead
            of a flag, because under ``jax.jit`` a flag would be a traced value, while the structure of a pytree is
            static.)
        columns: A dict from field to an int64 array ``[B, n]``: the values in column ``c`` of row ``b`` move to column
            ``columns[b, c]``.
        fills: A dict from masked field to the scalar value of masked steps; by default 0, and -1 for ``time``.
        images: A dict from field to the changes of its images.
    """

    affine: dict[str, Affine]
    permutations: dict[str, Any]
    masks: dict[str, Any]
    delivered_masks: dict[str, Any]
    columns: dict[str, Any]
    fills: dict[str, Any]
    images: dict[str, ImageDraws]

    def map(self, function: Callable[[Any], Any]) -> Draws:
        """Return a copy with ``function`` applied to every array."""
        mapped: Draws = map_tree(lambda part: None if part is None else function(part), self)
        return mapped


NO_DRAWS = Draws({}, {}, {}, {}, {}, {}, {})


def draw(
    config: AugmentTokensConfig,
    key: Key,
    shape: tuple[int, int],
    *,
    fields: Collection[str] | None = None,
    image_shape: ImageShapes = None,
) -> Draws:
    """Return the draws for one batch.

    Scalars, permutations and crops depend on ``key.seed`` and ``key.index``; masks also depend on ``key.call``. Keys
    that differ only in ``call`` (``key.with_call(1)``) result in views of one batch that differ only in their masks.

    Args:
        config: The augmentations.
        key: The key of the random numbers.
        shape: The lengths ``(B, S)`` of the complete batch, over all shards; ``cut`` selects a shard's rows.
        fields: The fields of the batch; other fields get no draws. By default all fields.
        image_shape: The shape ``(H, W, C)`` of the images of ``obs_image``, or a dict from field to shape for several
            fields; required for crops.

    Raises:
        ConfigError: A needed number of actions or states is not given, or a crop is larger than the image.
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
    """Return the draws that all views of a batch share: all draws except the masks. See ``draw``."""
    return NO_DRAWS._replace(**_drawn(config, key, 0, shape, fields, image_shape, masks=False))


def with_masks(
    shared: Draws,
    config: AugmentTokensConfig,
    key: Key,
    shape: tuple[int, int],
    *,
    fields: Collection[str] | None = None,
) -> Draws:
    """Return ``shared`` with the masks of ``key.call``. See ``draw``."""
    drawn = _drawn(config, key, key.call, shape, fields, None, masks=True)
    if config.deliver_masks:
        drawn["delivered_masks"] = drawn.pop("masks", {})
    return shared._replace(**drawn)


def _drawn(
    config: AugmentTokensConfig,
    key: Key,
    call: int,
    shape: tuple[int, int],
    fields: Collection[str] | None,
    image_shape: ImageShapes,
    *,
    masks: bool,
) -> dict[str, Any]:
    """Return the draws of all masks, or of all other augmentations: a dict from each attribute of ``Draws`` to the
    draws by field.
    """

    def there(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if fields is None or name in fields]

    parts: dict[str, Any] = {}
    for change in config.changes if config.enabled else ():
        if isinstance(change.what, MaskFields) == masks:
            for part, by_field in change.draw(key, call, shape, there, image_shape).items():
                parts.setdefault(part, {}).update(by_field)
    return parts


def cut(draws: Draws, first: int, count: int) -> Draws:
    """Return the draws for rows ``[first, first + count)`` of the batch."""
    taken = draws.map(lambda values: values[first : first + count] if values.ndim else values)
    images = {field: one._replace(pixels=draws.images[field].pixels) for field, one in taken.images.items()}
    return taken._replace(images=images)  # tables of pixels have no axis of rows
