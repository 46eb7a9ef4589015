"""What is augmented of any fields, by their names: codes that change places, numbers that are scaled, values hidden."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from mouse_core.augment._checks import check_choice, check_kind, check_number
from mouse_core.augment.scalar import AugmentScalarSpec
from mouse_core.errors import ConfigError
from mouse_core.spec import check_count, check_list, check_unit

Names = tuple[str, ...]

PerImage = Literal["sequence", "step"]
"""Whether one random number holds for all images of a sequence row, or each step has its own."""

MASKED_AS = {"time": -1}
"""What masked values become where that is not 0, which is a time."""


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
        """What pixels are scaled and shifted by."""
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
        """What masked values of a field become."""
        return MASKED_AS.get(field, 0) if self.value is None else self.value


ByField = PermuteFields | ScaleFields | ImageFields | MaskFields
"""What can be done to fields by their names."""


def check_by_field(where: str, given: object) -> tuple[ByField, ...]:
    """What is asked for by field, as a tuple; ConfigError for anything else."""
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
