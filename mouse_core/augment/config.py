"""Configuration of augmentation, frozen and validated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.spec import STANDARD_FIELDS, check_count, check_list, check_unit


def check_number(where: str, value: Any) -> float:
    """``value`` as a float, or ConfigError if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"{where}: expected a number, found {value!r}")
    if not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, found {value}")
    return float(value)


def check_choice(where: str, value: Any, choices: tuple[Any, ...]) -> None:
    """ConfigError if ``value`` is not one of ``choices``."""
    # By identity of type too: 0 == False must not pass for it.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(f"{where}: expected one of {list(choices)}, found {value!r}")


def check_kind(where: str, value: Any, kind: Any, *, optional: bool = False) -> None:
    """ConfigError if ``value`` is not of ``kind``, nor None where that is allowed."""
    if not (isinstance(value, kind) or (optional and value is None)):
        name = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{where}: expected {name}{' or None' if optional else ''}, found {value!r}")


@dataclass(frozen=True)
class AugmentScalarSpec:
    """The distribution of one random scalar a batch: uniform on ``[low, high)`` if both are given, else Gaussian.

    Args:
        mean: Mean of the Gaussian; may be left out where ``low`` and ``high`` are given, and does nothing there.
        std: Standard deviation of the Gaussian, at least 0; with 0 the scalar is ``mean``.
        low: Lowest value of the uniform distribution.
        high: End of the uniform distribution, itself excluded; with ``low == high`` the scalar is that value.

    Raises:
        ConfigError: Only one bound, ``low > high``, a negative ``std``, a number that is not finite, or neither
            bounds nor ``mean``.
    """

    mean: float | None = None
    std: float = 0.0
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std", "low", "high"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_number(f"AugmentScalarSpec: {name}", value))
        if (self.low is None) != (self.high is None):
            raise ConfigError(
                f"AugmentScalarSpec: expected both low and high or neither, found low={self.low}, high={self.high}"
            )
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(f"AugmentScalarSpec: expected low <= high, found low={self.low}, high={self.high}")
        if self.std < 0:
            raise ConfigError(f"AugmentScalarSpec: expected std of at least 0, found {self.std}")
        if self.low is None and self.mean is None:
            raise ConfigError("AugmentScalarSpec: expected mean, or low and high, found neither")

    def is_always(self, value: float) -> bool:
        """Whether every draw is ``value``."""
        if self.low is not None:
            return self.low == self.high == value
        return self.std == 0 and self.mean == value

    def draw(self, key: Key) -> float:
        """The scalar of a key."""
        if self.low is not None and self.high is not None:
            if self.low == self.high:
                return self.low
            drawn = self.low + (self.high - self.low) * float(key.uniform(1)[0])
            return min(drawn, math.nextafter(self.high, self.low))
        mean = self.mean or 0.0
        return mean if self.std == 0 else mean + self.std * float(key.normal(1)[0])


Names = tuple[str, ...]

PerImage = Literal["sequence", "step"]
"""Whether one random number holds for all images of a sequence row, or each step has its own."""

MASKED_AS = {"time": -1}
"""Masked values by field, for fields whose masked value is not 0."""


@dataclass(frozen=True)
class PermuteFields:
    """One permutation of codes for all fields that speak of them: drawn once a sequence row, for all its steps.

    Of 3 actions and the permutation ``[2, 0, 1]``, action 0 is called 2 afterwards, in every field of ``codes``, and
    what a field of ``columns`` says of it stands in column 2.

    Args:
        size: How many codes there are, at least 1: they are ``0..size - 1``.
        codes: Fields of integers that get other codes, as ``action`` and ``previous_action``.
        columns: Fields whose last axis has a value for every code, and whose columns move: ``q_star``, logits, which
            actions are legal.

    Raises:
        ConfigError: No field, or one that is named twice.
    """

    size: int
    codes: Names = ()
    columns: Names = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_count("PermuteFields: size", self.size))
        for option in ("codes", "columns"):
            object.__setattr__(self, option, _names(f"PermuteFields: {option}", getattr(self, option)))
        _check_some("PermuteFields", self.fields)

    @property
    def fields(self) -> Names:
        """All fields of the permutation."""
        return (*self.codes, *self.columns)


@dataclass(frozen=True)
class ScaleFields:
    """``x * scale + shift`` for fields of floating numbers, with the same two scalars for all: drawn once a batch.

    Args:
        fields: Their names.
        scale, shift: What is drawn; None: 1 and 0.
        endpoints: Instead of both, two pairs of numbers: what becomes of one number, and of another. With
            ``((0, -1), (255, 1))``, 0 becomes -1, 255 becomes 1, and 127.5 becomes 0; nothing is drawn.

    Raises:
        ConfigError: No field, or one that is named twice; nothing that is done to them; endpoints beside a scale or a
            shift, or two of one number.
    """

    fields: Names
    scale: AugmentScalarSpec | None = None
    shift: AugmentScalarSpec | None = None
    endpoints: tuple[tuple[float, float], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", _names("ScaleFields: fields", self.fields))
        _check_some("ScaleFields", self.fields)
        where = f"ScaleFields: {', '.join(self.fields)}"
        for option in ("scale", "shift"):
            check_kind(f"{where}: {option}", getattr(self, option), AugmentScalarSpec, optional=True)
        if (self.endpoints is None) == (self.scale is None and self.shift is None):
            raise ConfigError(f"{where}: expected scale, shift or both, or endpoints, found {self._said}")
        if self.endpoints is not None:
            object.__setattr__(self, "endpoints", _endpoints(where, self.endpoints))

    @property
    def _said(self) -> str:
        return "neither" if self.endpoints is None else "endpoints beside them"

    @property
    def line(self) -> tuple[float, float] | None:
        """Scale and shift of the straight line through the endpoints; None without any.

        From 0 to -1 and from 255 to 1, the scale is 2 / 255, and the shift -1.
        """
        if self.endpoints is None:
            return None
        (low, from_low), (high, from_high) = self.endpoints
        scale = (from_high - from_low) / (high - low)
        return scale, from_low - low * scale


@dataclass(frozen=True)
class RandomShift:
    """Images moved by up to ``pad`` pixels each way: padded by repeating the border, then cropped to their old size.

    The augmentation of DrQ (Kostrikov, Yarats and Fergus, "Image Augmentation Is All You Need: Regularizing Deep
    Reinforcement Learning from Pixels", ICLR 2021), with 4 pixels for images of 84x84.

    Args:
        pad: Pixels, at least 1.
        per: "sequence": all images of a row move alike, as one camera would; "step": each for itself.

    Raises:
        ConfigError: A pad below 1, or another ``per``.
    """

    pad: int = 4
    per: PerImage = "sequence"

    def __post_init__(self) -> None:
        check_count("RandomShift: pad", self.pad, lowest=1)
        check_choice("RandomShift: per", self.per, get_args(PerImage))


@dataclass(frozen=True)
class RandomCrop:
    """A window of ``height`` by ``width`` pixels, cut from a random place of the image.

    The augmentation of RAD (Laskin, Lee, Stooke, Pinto, Abbeel and Srinivas, "Reinforcement Learning with Augmented
    Data", NeurIPS 2020), there from 100x100 to 84x84.

    Args:
        height: Rows of the window.
        width: Columns of the window.
        per: "sequence": all images of a row are cut alike; "step": each for itself.

    Raises:
        ConfigError: A size below 1, or another ``per``.
    """

    height: int
    width: int
    per: PerImage = "sequence"

    def __post_init__(self) -> None:
        check_count("RandomCrop: height", self.height, lowest=1)
        check_count("RandomCrop: width", self.width, lowest=1)
        check_choice("RandomCrop: per", self.per, get_args(PerImage))


@dataclass(frozen=True)
class ImageFields:
    """Images of any fields, cropped and with other pixels: what is drawn is the same for all of them.

    Cameras in one entry move together, and have images of one size; those of several entries move each for itself.

    Args:
        fields: Their names.
        crop: A ``RandomShift`` or ``RandomCrop``; None: none.
        scale, shift: ``pixel * scale + shift``, rounded half to even, clamped to 0..255, drawn once a batch.

    Raises:
        ConfigError: No field, or one that is named twice; nothing that is done to them.
    """

    fields: Names
    crop: RandomShift | RandomCrop | None = None
    scale: AugmentScalarSpec | None = None
    shift: AugmentScalarSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", _names("ImageFields: fields", self.fields))
        _check_some("ImageFields", self.fields)
        where = f"ImageFields: {', '.join(self.fields)}"
        check_kind(f"{where}: crop", self.crop, RandomShift | RandomCrop, optional=True)
        for option in ("scale", "shift"):
            check_kind(f"{where}: {option}", getattr(self, option), AugmentScalarSpec, optional=True)
        if self.crop is None and not self.scalars:
            raise ConfigError(f"{where}: expected crop, scale or shift, found none of them")

    @property
    def scalars(self) -> dict[str, AugmentScalarSpec]:
        """Return the scale and the shift of pixels that are set."""
        both = {"scale": self.scale, "shift": self.shift}
        return {option: spec for option, spec in both.items() if spec is not None}


@dataclass(frozen=True)
class MaskFields:
    """Fields that are hidden together, at some steps: all of them, or none. Drawn anew for every step and every view.

    Args:
        fields: Their names.
        probability: That a step is hidden.
        value: What values become there, a number that all the fields hold; NaN for floating ones. None: 0, and -1 for
            ``time``.

    Raises:
        ConfigError: No field, or one that is named twice; a probability outside ``[0, 1]``; a value that is no number.
    """

    fields: Names
    probability: float
    value: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", _names("MaskFields: fields", self.fields))
        _check_some("MaskFields", self.fields)
        where = f"MaskFields: {', '.join(self.fields)}"
        object.__setattr__(self, "probability", check_unit(f"{where}: probability", self.probability))
        if self.value is not None:
            number = isinstance(self.value, bool | int | float | np.bool_ | np.integer | np.floating)
            if not number or (isinstance(self.value, int) and not -(1 << 63) <= self.value < 1 << 63):
                raise ConfigError(f"{where}: expected a number of at most 64 bits as value, found {self.value!r}")
            whole = isinstance(self.value, bool | int | np.bool_ | np.integer)
            object.__setattr__(self, "value", int(self.value) if whole else float(self.value))

    def fill_of(self, field: str) -> float:
        """Return the value that replaces masked values of a field."""
        return MASKED_AS.get(field, 0) if self.value is None else self.value


ByField = PermuteFields | ScaleFields | ImageFields | MaskFields
"""What can be done to fields by their names."""


def check_by_field(where: str, given: object) -> tuple[ByField, ...]:
    """Return the by-field augmentations as a tuple; ConfigError for other types."""
    one = isinstance(given, ByField)
    if one or not isinstance(given, Collection) or not all(isinstance(part, ByField) for part in given):
        wanted = "a list of PermuteFields, ScaleFields, ImageFields and MaskFields"
        raise ConfigError(f"{where}: expected {wanted}, found {given!r:.120}")
    return tuple(given)


def check_once(where: str, what: str, fields: Iterable[str]) -> None:
    """Raise ConfigError for a field that one thing is done to twice."""
    for field, times in Counter(fields).items():
        if times > 1:
            raise ConfigError(f"{where}: expected each field to be {what} once, found {field} {times} times")


def _names(where: str, given: Any) -> Names:
    names: Names = (given,) if isinstance(given, str) else check_list(where, given)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: expected names of fields, found {name!r}")
    return names


def _check_some(where: str, fields: Names) -> None:
    if not fields:
        raise ConfigError(f"{where}: expected at least one field, found none")
    check_once(where, "named", fields)


def _endpoints(where: str, given: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    try:
        (low, from_low), (high, from_high) = given
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: expected endpoints as ((number, what it becomes), (another, what that becomes)), found {given!r}"
        ) from None
    where = f"{where}: endpoints"
    one = check_number(where, low), check_number(where, from_low)
    other = check_number(where, high), check_number(where, from_high)
    if one[0] == other[0] or not math.isfinite((other[1] - one[1]) / (other[0] - one[0])):
        raise ConfigError(f"{where}: expected two numbers that differ, found {one[0]} and {other[0]}")
    return one, other


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
    """The probability of masking a field at a step, independently of all other fields and steps.

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
    """The augmentations of a batch; by default none.

    Scalars are drawn once per batch. Permutations are drawn once per sequence and hold for all its steps. Masks are
    drawn for every step and every view. The order is: permute, scale and shift, crop, mask. Most options are for
    standard fields and skip those that a batch lacks; ``by_field`` is for fields of any name, which must exist.

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
        crop_obs_image: A ``RandomShift`` or ``RandomCrop`` for ``obs_image``.
        mask_prob: Masking probabilities by field.
        by_field: Augmentations of named fields: any number of ``PermuteFields``, ``ScaleFields``, ``ImageFields`` and
            ``MaskFields``. The draws of each depend on the seed, the index and its fields, not on the other
            augmentations.
        deliver_masks: Whether a batch also gets ``<field>_mask``, bool ``[B, S]``, True where masked, for every field
            that is masked with a probability above 0.
        max_num_actions: Number of actions; 0 takes the number of the data or of the caller.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0 takes the caller's number.
        enabled: Whether any augmentation happens.

    Raises:
        ConfigError: A value has an unexpected type or range, or a field has the same augmentation twice.
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
        """The scalings by field."""
        return [one for one in self.by_field if isinstance(one, ScaleFields)]

    @property
    def images(self) -> list[ImageFields]:
        """The image augmentations by field."""
        return [one for one in self.by_field if isinstance(one, ImageFields)]

    @property
    def crops(self) -> dict[str, RandomShift | RandomCrop]:
        """The crop of each image field."""
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
        """Return a copy with the given numbers of actions and states; 0 keeps the present number."""
        return replace(
            self,
            max_num_actions=max_num_actions or self.max_num_actions,
            max_num_obs_discrete=max_num_obs_discrete or self.max_num_obs_discrete,
        )
