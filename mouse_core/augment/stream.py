"""Augmentation inside a batch source: a batch in, its views out, with draws that depend on seed and index alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.augment.config import AugmentTokensConfig
from mouse_core.augment.draws import Draws, crop_size, cut, draw_shared, with_masks
from mouse_core.augment.transform import mask, transform
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.randomness import Key, Purpose
from mouse_core.spec import FieldSpec

Batch = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StreamAugment:
    """Augments the batches of one source; made by ``stream_augment``, which checks that it can.

    Args:
        config: What is augmented, with the numbers of actions and states that it needs.
        views: How many views of a batch are made.
        fields: The fields of a batch that arrives.
        image_shape: ``(H, W, C)`` of its images, if it has any.
    """

    config: AugmentTokensConfig
    views: int
    fields: frozenset[str]
    image_shape: tuple[int, int, int] | None

    def widens(self, field: str) -> bool:
        """Whether a field must come in its delivered dtype, since a narrower one may not hold its new values."""
        config = self.config
        scalars = config.scalars()
        scaled = {"reward": "reward", "obs_continuous": "obs"}
        if config.scale_xformed_reward:
            scaled["xformed_reward"] = "reward"
        if field in scaled:
            return any(f"{part}_{scaled[field]}" in scalars for part in ("scale", "shift"))
        return (
            (field == "action" and config.permute_action in ("input", "both"))
            or (field == "obs_discrete" and config.permute_obs_discrete)
            or (field == "time" and config.mask_prob.time > 0)
        )

    def spec(self, fields: Mapping[str, FieldSpec]) -> dict[str, FieldSpec]:
        """The fields of a view: those of a batch, its images' size changed, and the masks that are delivered."""
        found = dict(fields)
        image = found.get("obs_image")
        if image is not None and image.image_shape is not None and self.config.crop_obs_image is not None:
            height, width = crop_size(self.config.crop_obs_image, image.image_shape)
            size = (height, width, image.image_shape[2])
            found["obs_image"] = image.replace(shape=(height * width * size[2],), image_shape=size)
        if self.config.deliver_masks:
            for name in self.config.mask_prob.active():
                if name in fields:
                    found[f"{name}_mask"] = FieldSpec(f"{name}_mask", np.dtype(bool), (), "", np.dtype(bool))
        return found

    def __call__(self, batch: Batch, key: Key, *, shape: tuple[int, int], first: int) -> tuple[Batch, ...]:
        """The views of a batch.

        Args:
            batch: ``[b, S, ...]`` by field, which nobody else holds; it may be written to.
            key: Names the random numbers; see ``Plan.key``.
            shape: ``(B, S)`` of the whole batch, of which these may be the rows of a shard.
            first: Which row of the whole batch the first of these is.

        Returns:
            ``views`` batches; fields that no mask changes are the same arrays in all of them.
        """
        rows = next(iter(batch.values())).shape[0]

        def here(draws: Draws) -> Draws:
            return draws if (first, rows) == (0, shape[0]) else cut(draws, first, rows)

        shared = draw_shared(self.config, key, shape, fields=self.fields, image_shape=self.image_shape)
        batch = {**batch, **transform(batch, here(shared), image_shape=self.image_shape, validate=True)}
        views = []
        for view in range(self.views):
            draws = here(with_masks(shared, self.config, key.with_call(view), shape, fields=self.fields))
            last = view == self.views - 1
            views.append({**batch, **mask(batch, draws, own=batch if last else ())})
        return tuple(views)


def stream_augment(
    config: AugmentTokensConfig | None, views: int, spec: Mapping[str, FieldSpec], *, max_num_actions: int = 0
) -> StreamAugment | None:
    """How a source whose batches are ``spec`` augments them; None if it leaves them as they are.

    Args:
        config: What is augmented.
        views: How many views of a batch are made, at least 1.
        spec: The fields of a batch.
        max_num_actions: Number of actions that the data say, or 0.

    Raises:
        ConfigError: Something that cannot be done to these fields: a number of actions or states that is needed and not
            known, a dtype that does not suit, a crop larger than the images.
    """
    if isinstance(views, bool) or not isinstance(views, int | np.integer) or views < 1:
        raise ConfigError(f"views: expected a positive integer, found {views!r}")
    if config is None:
        config = AugmentTokensConfig(enabled=False)
    if not isinstance(config, AugmentTokensConfig):
        raise ConfigError(f"augment: expected an AugmentTokensConfig or None, found {config!r}")
    if views == 1 and not config.active:
        return None
    if not config.max_num_actions:
        known = max_num_actions or (spec["q_star"].shape[-1] if "q_star" in spec else 0)
        config = config.with_sizes(max_num_actions=known)
    image = spec.get("obs_image")
    augment = StreamAugment(config, int(views), frozenset(spec), image.image_shape if image else None)
    # What cannot work is found now, by augmenting an empty batch, not in a worker at the first batch.
    key = Key(0, Purpose.AUGMENT)
    nothing = {
        name: np.zeros((1, 1, *field.shape), field.dtype if augment.widens(name) else field.stored_dtype or field.dtype)
        for name, field in spec.items()
    }
    try:
        augment(nothing, key, shape=(1, 1), first=0)
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    return augment
