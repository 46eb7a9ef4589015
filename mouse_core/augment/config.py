"""What is augmented and how much: frozen, validated configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from mouse_core.augment._checks import check_choice, check_kind, check_number
from mouse_core.augment.by_field import (
    ByField,
    ImageFields,
    MaskFields,
    PermuteFields,
    RandomCrop,
    RandomShift,
    ScaleFields,
    check_by_field,
    check_once,
)
from mouse_core.augment.scalar import AugmentScalarSpec
from mouse_core.errors import ConfigError
from mouse_core.spec import STANDARD_FIELDS, check_count

PermuteAction = Literal[False, "input", "target", "both"]
"""What is renamed when actions are permuted: nothing, `action`, the columns of `q_star`, or both jointly."""
PERMUTED: Mapping[PermuteAction, tuple[str, ...]] = {
    False: (),
    "input": ("action",),
    "target": ("q_star",),
    "both": ("action", "q_star"),
}
"""The fields of each."""

# Whose options scale and shift each field of numbers: "reward" stands for scale_reward and shift_reward.
_SCALED_BY = {"reward": "reward", "xformed_reward": "reward", "obs_continuous": "obs"}
DONE_CODES = next(len(field.labels) for field in STANDARD_FIELDS if field.name == "done")
"""How many codes of ``done`` are permuted."""
IMAGE_SCALARS = frozenset({"scale_obs_image", "shift_obs_image"})
"""The options of scalars that change pixels."""


@dataclass(frozen=True)
class AugmentMaskProbConfig:
    """With which probability a field is masked at a step, independently of all other fields and steps.

    Masked values become 0, those of ``time`` become -1. Fields that a batch lacks are passed over.

    Args:
        action, reward, xformed_reward, done, time, q_star, obs_continuous, obs_discrete, obs_image: Probabilities.

    Raises:
        ConfigError: A probability outside ``[0, 1]``.
    """

    action: float = 0.0
    reward: float = 0.0
    xformed_reward: float = 0.0
    done: float = 0.0
    time: float = 0.0
    q_star: float = 0.0
    obs_continuous: float = 0.0
    obs_discrete: float = 0.0
    obs_image: float = 0.0

    def __post_init__(self) -> None:
        for option in fields(self):
            value = check_number(f"AugmentMaskProbConfig: {option.name}", getattr(self, option.name))
            if not 0 <= value <= 1:
                raise ConfigError(f"AugmentMaskProbConfig: expected {option.name} in [0, 1], found {value}")
            object.__setattr__(self, option.name, value)

    def active(self) -> dict[str, float]:
        """The fields that may be masked, with their probabilities."""
        return {option.name: p for option in fields(self) if (p := getattr(self, option.name)) > 0}


@dataclass(frozen=True)
class AugmentTokensConfig:
    """Which augmentations are made. By default none.

    Scalars are drawn once a batch; permutations once a sequence row, and hold for all its steps; masks anew for every
    step and every view. The order is: permute, scale and shift, crop, mask. Most options are for standard fields, and
    pass over those that a batch lacks; ``by_field`` is for fields of any name, which must be there.

    Args:
        scale_reward, shift_reward: ``reward * scale + shift``. Touches ``reward`` alone: not ``xformed_reward``, and
            not ``q_star``, whose values keep the scale of the unscaled rewards.
        scale_xformed_reward: Whether the same scale and shift apply to ``xformed_reward`` too.
        scale_obs, shift_obs: ``obs_continuous * scale + shift``.
        scale_obs_image, shift_obs_image: ``obs_image * scale + shift``, rounded half to even, clamped to 0..255.
        permute_action: Renames actions: "input" (``action``), "target" (the columns of ``q_star``) or "both", which
            leaves ``q_star[action]`` at every step what it was. False: no renaming.
        permute_done: Whether the codes 0, 1, 2 of ``done`` are permuted.
        permute_obs_discrete: Whether the states of ``obs_discrete`` are permuted.
        crop_obs_image: A ``RandomShift`` or ``RandomCrop`` of ``obs_image``.
        mask_prob: Probabilities with which fields are masked.
        by_field: What is done to fields by their names: any number of ``PermuteFields``, ``ScaleFields``,
            ``ImageFields`` and ``MaskFields``. What each draws depends on seed, index and its fields, not on
            what else is asked for.
        deliver_masks: Whether a batch also gets ``<field>_mask``, bool ``[B, S]``, True where masked, for every field
            that is masked with a probability above 0.
        max_num_actions: Number of actions; 0: as the data or the caller say.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0: as the caller says.
        enabled: False switches everything off.

    Raises:
        ConfigError: A value of another kind than described, or a field that one thing is done to twice.
    """

    scale_reward: AugmentScalarSpec | None = None
    shift_reward: AugmentScalarSpec | None = None
    scale_obs: AugmentScalarSpec | None = None
    shift_obs: AugmentScalarSpec | None = None
    scale_obs_image: AugmentScalarSpec | None = None
    shift_obs_image: AugmentScalarSpec | None = None
    scale_xformed_reward: bool = False
    permute_action: PermuteAction = False
    permute_done: bool = False
    permute_obs_discrete: bool = False
    crop_obs_image: RandomShift | RandomCrop | None = None
    mask_prob: AugmentMaskProbConfig = AugmentMaskProbConfig()
    deliver_masks: bool = False
    max_num_actions: int = 0
    max_num_obs_discrete: int = 0
    enabled: bool = True
    by_field: tuple[ByField, ...] = ()

    def __post_init__(self) -> None:
        where = "AugmentTokensConfig"
        for name in ("scale_reward", "shift_reward", "scale_obs", "shift_obs", "scale_obs_image", "shift_obs_image"):
            check_kind(f"{where}: {name}", getattr(self, name), AugmentScalarSpec, optional=True)
        for name in ("scale_xformed_reward", "permute_done", "permute_obs_discrete", "deliver_masks", "enabled"):
            check_kind(f"{where}: {name}", getattr(self, name), bool)
        check_choice(f"{where}: permute_action", self.permute_action, get_args(PermuteAction))
        check_kind(f"{where}: crop_obs_image", self.crop_obs_image, RandomShift | RandomCrop, optional=True)
        check_kind(f"{where}: mask_prob", self.mask_prob, AugmentMaskProbConfig)
        for name in ("max_num_actions", "max_num_obs_discrete"):
            check_count(f"{where}: {name}", getattr(self, name), lowest=0)
        object.__setattr__(self, "by_field", check_by_field(f"{where}: by_field", self.by_field))
        check_once(where, "permuted", (*self.renamed, *(name for one in self.permutes for name in one.fields)))
        scaled = (*self.scaled(self.scalars()), *(name for one in self.scales for name in one.fields))
        check_once(where, "scaled", (*scaled, *(name for one in self.images if one.scalars for name in one.fields)))
        check_once(where, "changed as an image", self._as_images)
        check_once(where, "masked", (*self.mask_prob.active(), *(name for one in self.hides for name in one.fields)))

    @property
    def renamed(self) -> list[str]:
        """The standard fields that are permuted by options of their own."""
        switched = {"done": self.permute_done, "obs_discrete": self.permute_obs_discrete}
        return [*PERMUTED[self.permute_action], *(name for name, is_on in switched.items() if is_on)]

    @property
    def permutes(self) -> list[PermuteFields]:
        """The permutations by field."""
        return [one for one in self.by_field if isinstance(one, PermuteFields)]

    @property
    def scales(self) -> list[ScaleFields]:
        """What is scaled by field."""
        return [one for one in self.by_field if isinstance(one, ScaleFields)]

    @property
    def images(self) -> list[ImageFields]:
        """What is done to images by field."""
        return [one for one in self.by_field if isinstance(one, ImageFields)]

    @property
    def crops(self) -> dict[str, RandomShift | RandomCrop]:
        """How images are cropped, by field."""
        found = {name: one.crop for one in self.images if one.crop is not None for name in one.fields}
        return found if self.crop_obs_image is None else {"obs_image": self.crop_obs_image, **found}

    @property
    def _as_images(self) -> list[str]:
        """The fields that are changed as images, by options and by their names."""
        by_option = self.crop_obs_image is not None or not IMAGE_SCALARS.isdisjoint(self.scalars())
        return ["obs_image"] * by_option + [name for one in self.images for name in one.fields]

    @property
    def redrawn(self) -> set[str]:
        """The fields whose images are changed otherwise than by masks."""
        return set(self._as_images) if self.enabled else set()

    @property
    def hides(self) -> list[MaskFields]:
        """The masks by field that hide anything."""
        return [one for one in self.by_field if isinstance(one, MaskFields) and one.probability > 0]

    @property
    def named(self) -> list[str]:
        """The fields that something is done to by their names."""
        return list(dict.fromkeys(name for one in self.by_field for name in one.fields))

    def masked(self) -> list[str]:
        """The fields that may be masked."""
        return [*self.mask_prob.active(), *(name for one in self.hides for name in one.fields)]

    def check_named(self, fields: Mapping[str, str]) -> None:
        """Raise ConfigError for a field by name that is not among those of a batch.

        Args:
            fields: Those of a batch, with the column that each is read from, empty where nobody knows.
        """
        for name in self.named if self.enabled else ():
            if name not in fields:
                from mouse_core.store.fields import meant_among  # only for what is refused

                raise ConfigError(
                    f"augment: by_field: expected fields among {list(fields)}, found {name!r}"
                    f"{meant_among(name, fields)}"
                )

    def scalars(self) -> dict[str, AugmentScalarSpec]:
        """The scalars that are drawn, by option: those that are given and not fixed where they would do nothing."""
        found = {}
        for name in ("reward", "obs", "obs_image"):
            for option, nothing in ((f"scale_{name}", 1.0), (f"shift_{name}", 0.0)):
                spec: AugmentScalarSpec | None = getattr(self, option)
                if spec is not None and not spec.is_always(nothing):
                    found[option] = spec
        return found

    def scaled(self, scalars: Collection[str]) -> dict[str, tuple[str, str]]:
        """The fields that are scaled or shifted by some of ``scalars``, and the two options that say so; no images."""
        options = {field: (f"scale_{name}", f"shift_{name}") for field, name in _SCALED_BY.items()}
        if not self.scale_xformed_reward:
            del options["xformed_reward"]
        return {field: both for field, both in options.items() if not set(both).isdisjoint(scalars)}

    @property
    def active(self) -> bool:
        """Whether anything is augmented."""
        return self.enabled and bool(
            self.scalars()
            or self.permute_action
            or self.permute_done
            or self.permute_obs_discrete
            or self.crop_obs_image is not None
            or self.mask_prob.active()
            or self.permutes
            or self.scales
            or self.images
            or self.hides
        )

    def with_sizes(self, *, max_num_actions: int = 0, max_num_obs_discrete: int = 0) -> AugmentTokensConfig:
        """The same with numbers of actions and states, where they are not 0."""
        return replace(
            self,
            max_num_actions=max_num_actions or self.max_num_actions,
            max_num_obs_discrete=max_num_obs_discrete or self.max_num_obs_discrete,
        )
