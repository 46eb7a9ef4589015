"""The immutable, validated configuration of augmentations; each augmentation of fields draws its own random numbers."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.augment.images import (
    ImageDraws,
    ImageShapes,
    RandomCrop,
    RandomShift,
    check_choice,
    draw_crop,
    pixel_table,
    shape_of_images,
)
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.spec import STANDARD_FIELDS, check_count, check_list, check_unit

C = TypeVar("C")


def check_number(where: str, value: Any) -> float:
    """Return ``value`` as a float; raise ConfigError if ``value`` is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"{where}: expected a number, found {value!r}")
    if not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, found {value}")
    return float(value)


def check_kind(where: str, value: Any, kind: Any, *, optional: bool = False) -> None:
    """Raise ConfigError unless ``value`` is of type ``kind``; if ``optional``, None is also valid."""
    if not (isinstance(value, kind) or (optional and value is None)):
        name = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{where}: expected {name}{' or None' if optional else ''}, found {value!r}")


@dataclass(frozen=True)
class AugmentScalarSpec:
    """The distribution of a random scalar that is drawn once per batch: uniform on ``[low, high)`` if ``low`` and
    ``high`` are given, else Gaussian.

    Args:
        mean: Mean of the Gaussian; ignored if ``low`` and ``high`` are given.
        std: Standard deviation of the Gaussian, at least 0; with 0 the scalar is ``mean``.
        low: Lowest value of the uniform distribution.
        high: End of the uniform distribution, exclusive; if ``low == high``, the scalar is always ``low``.

    Raises:
        ConfigError: Only one of ``low`` and ``high`` is given, ``low > high``, ``std`` is negative, a number is not
            finite, or neither ``mean`` nor ``low`` and ``high`` are given.
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
        """Return the random scalar that the key determines."""
        if self.low is not None and self.high is not None:
            if self.low == self.high:
                return self.low
            drawn = self.low + (self.high - self.low) * float(key.uniform(1)[0])
            return min(drawn, math.nextafter(self.high, self.low))
        mean = self.mean or 0.0
        return mean if self.std == 0 else mean + self.std * float(key.normal(1)[0])


class Affine(NamedTuple):
    """The linear map ``x * scale + shift``; if ``scale`` or ``shift`` is None, that operation is left out.

    An array applies to the last axes of a field: ``[B, 1, 7]`` has one number for each window and each of 7 values.

    Args:
        scale: The factor, float64 ``[]`` or ``[B, 1 or S, ...]``, or None.
        shift: The number that is added, float64 ``[]`` or ``[B, 1 or S, ...]``, or None.
    """

    scale: Any
    shift: Any


Names = tuple[str, ...]
Stream = Callable[[str], Key]
There = Callable[[Names], list[str]]
Drawn = dict[str, dict[str, Any]]

MASKED_AS = {"time": -1}
"""A dict from field to the value of masked steps, for the fields whose masked steps are not 0."""


@dataclass(frozen=True)
class PermuteFields:
    """A random permutation of codes, drawn once for each sequence and applied to all fields that contain these codes.

    Example: with 3 actions and the permutation ``[2, 0, 1]``, action 0 becomes 2 in every field of ``codes``, and in
    the fields of ``columns`` the values of column 0 move to column 2.

    Args:
        size: Number of codes, at least 1; the codes are ``0..size - 1``.
        codes: Integer fields whose codes are replaced, such as ``action`` and ``previous_action``.
        columns: Fields whose last axis has a value for every code, such as ``q_star``, logits, or the mask of legal
            actions; these values are permuted.

    Raises:
        ConfigError: No field is given, or a field is given twice.
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
        """All fields to which the permutation is applied."""
        return (*self.codes, *self.columns)

    def draw(self, stream: Stream, shape: tuple[int, int], there: There, image_shape: ImageShapes) -> Drawn:
        """Draw one permutation for each sequence."""
        codes, columns = there(self.codes), there(self.columns)
        if not codes and not columns:
            return {}
        drawn = permutations(stream("permute"), shape[0], self.size)
        return {"permutations": dict.fromkeys(codes, drawn), "columns": dict.fromkeys(columns, drawn)}


@dataclass(frozen=True)
class AffineFields:
    """Base class of augmentations that compute ``x * scale + shift`` of floating-point fields.

    A subclass is a frozen dataclass that implements ``affine``. The ``repr`` of its instances is part of a checkpoint's
    fingerprint.

    Args:
        fields: Names of the fields.

    Raises:
        ConfigError: No field is given, or a field is given twice.
    """

    fields: Names

    def __post_init__(self) -> None:
        _check_fields(self)

    def affine(self, stream: Stream, shape: tuple[int, int]) -> Affine:
        """Draw a scale and a shift for the batch; the result must depend only on the arguments and on ``self``.

        Args:
            stream: A function that takes the name of a draw, such as "signs", and returns the ``Key`` of its random
                numbers.
            shape: The lengths ``(B, S)`` of the complete batch, over all shards.
        """
        raise NotImplementedError

    def draw(self, stream: Stream, shape: tuple[int, int], there: There, image_shape: ImageShapes) -> Drawn:
        """Draw a scale and a shift, which are the same for all fields of this augmentation."""
        return {"affine": dict.fromkeys(there(self.fields), self.affine(stream, shape))}


@dataclass(frozen=True)
class ScaleFields(AffineFields):
    """The linear map ``x * scale + shift`` of floating-point fields. ``scale`` and ``shift`` are drawn once per batch,
    and are the same for all fields.

    Args:
        fields: Names of the fields.
        scale, shift: The distributions of ``scale`` and ``shift``; None means a scale of 1, or a shift of 0.
        endpoints: Two pairs ``(number, result)`` that define a fixed linear map, instead of ``scale`` and ``shift``.
            With ``((0, -1), (255, 1))``, 0 becomes -1, 255 becomes 1, and 127.5 becomes 0.

    Raises:
        ConfigError: No field is given, or a field is given twice; neither endpoints, a scale nor a shift are given;
            endpoints are given together with a scale or shift; or both pairs have the same number.
    """

    fields: Names
    scale: AugmentScalarSpec | None = None
    shift: AugmentScalarSpec | None = None
    endpoints: tuple[tuple[float, float], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        where = _check_fields(self)
        for option in ("scale", "shift"):
            check_kind(f"{where}: {option}", getattr(self, option), AugmentScalarSpec, optional=True)
        if (self.endpoints is None) == (self.scale is None and self.shift is None):
            found = "neither" if self.endpoints is None else "endpoints beside them"
            raise ConfigError(f"{where}: expected scale, shift or both, or endpoints, found {found}")
        if self.endpoints is not None:
            object.__setattr__(self, "endpoints", _endpoints(where, self.endpoints))

    @property
    def line(self) -> tuple[float, float] | None:
        """The scale and the shift of the linear map that ``endpoints`` define; None if no endpoints are set.

        Example: for ``((0, -1), (255, 1))``, the scale is 2 / 255 and the shift is -1.
        """
        if self.endpoints is None:
            return None
        (low, from_low), (high, from_high) = self.endpoints
        scale = (from_high - from_low) / (high - low)
        return scale, from_low - low * scale

    def affine(self, stream: Stream, shape: tuple[int, int]) -> Affine:
        """Draw one scale and one shift for the batch."""
        if self.line is not None:
            return Affine(*map(np.float64, self.line))
        scalars = (("scale", self.scale), ("shift", self.shift))
        return Affine(*(None if spec is None else np.float64(spec.draw(stream(name))) for name, spec in scalars))


@dataclass(frozen=True)
class ImageFields:
    """Random crops and pixel changes of image fields; all fields of one ``ImageFields`` use the same random numbers.

    The images of all cameras in one ``ImageFields`` are cropped at the same position, and must have equal size; cameras
    in different ``ImageFields`` are cropped independently.

    Args:
        fields: Names of the fields.
        crop: A ``RandomShift`` or ``RandomCrop``; None: no crop.
        scale, shift: Distributions for ``pixel * scale + shift``, drawn once per batch; results are rounded half to
            even and clamped to 0..255.

    Raises:
        ConfigError: No field is given, a field is given twice, or neither a crop, a scale nor a shift is given.
    """

    fields: Names
    crop: RandomShift | RandomCrop | None = None
    scale: AugmentScalarSpec | None = None
    shift: AugmentScalarSpec | None = None

    def __post_init__(self) -> None:
        where = _check_fields(self)
        check_kind(f"{where}: crop", self.crop, RandomShift | RandomCrop, optional=True)
        for option in ("scale", "shift"):
            check_kind(f"{where}: {option}", getattr(self, option), AugmentScalarSpec, optional=True)
        if self.crop is None and not self.scalars:
            raise ConfigError(f"{where}: expected crop, scale or shift, found none of them")

    @property
    def scalars(self) -> dict[str, AugmentScalarSpec]:
        """A dict with the distributions "scale" and "shift" of the pixels; a distribution that is None is left out."""
        both = {"scale": self.scale, "shift": self.shift}
        return {option: spec for option, spec in both.items() if spec is not None}

    def draw(self, stream: Stream, shape: tuple[int, int], there: There, image_shape: ImageShapes) -> Drawn:
        """Draw crops and pixel changes, which are the same for all fields of this ``ImageFields``."""
        names, crop = there(self.fields), None
        drawn = {option: spec.draw(stream(f"pixels {option}")) for option, spec in self.scalars.items()}
        pixels = pixel_table(drawn.get("scale", 1.0), drawn.get("shift", 0.0)) if drawn else None
        if names and self.crop is not None:
            sizes = {field: shape_of_images(image_shape, field) for field in names}
            if len({size and size[:2] for size in sizes.values()}) > 1:
                raise ConfigError(f"ImageFields: with a crop, expected fields with images of equal size, found {sizes}")
            streams = stream("crop rows"), stream("crop columns")
            crop = draw_crop(self.crop, streams, shape, sizes[names[0]], names[0])
        return {"images": dict.fromkeys(names, ImageDraws(crop, pixels))}


@dataclass(frozen=True)
class MaskFields:
    """Fields that are masked together at random steps: at each step, either all of these fields are masked or none of
    them.

    Masks are drawn for every step and view.

    Args:
        fields: Names of the fields.
        probability: Probability that a step is masked.
        value: The value of masked steps, a number that all fields can represent; NaN only for floating-point fields. If
            ``value`` is None, masked steps become 0, and masked steps of ``time`` become -1.

    Raises:
        ConfigError: No field is given, a field is given twice, the probability is outside ``[0, 1]``, or the value is
            invalid.
    """

    fields: Names
    probability: float
    value: float | None = None

    def __post_init__(self) -> None:
        where = _check_fields(self)
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

    def draw(self, stream: Stream, shape: tuple[int, int], there: There, image_shape: ImageShapes) -> Drawn:
        """Draw a mask for every step of the batch."""
        names, drawn = there(self.fields), Drawn()
        if names:
            hidden = _bernoulli(stream("mask"), self.probability, shape[0] * shape[1]).reshape(shape)
            drawn["masks"] = dict.fromkeys(names, hidden)
        if self.value is not None:
            value = np.asarray(self.value, np.int64 if isinstance(self.value, int) else np.float64)
            drawn["fills"] = dict.fromkeys(names, value)
        return drawn


ByField = PermuteFields | AffineFields | ImageFields | MaskFields
"""The types of the augmentations in ``by_field``."""

# Every option has its own random streams, so that enabling an option does not change other draws. These numbers are
# part of the random stream: new options get new numbers, and old numbers never change. The streams of masks begin at
# 16.
_SCALARS = {"reward": {"scale": 0, "shift": 1}, "obs": {"scale": 2, "shift": 3}}
_IMAGES = {"pixels scale": 4, "pixels shift": 5, "crop rows": 9, "crop columns": 10}
_PERMUTED = {"permute_action": 6, "permute_done": 7, "permute_obs_discrete": 8}
_MASKS = 16
_STREAMS = 256
# First number of the streams of augmentations by name, far behind the streams of all options; and the number of calls
# of a stream.
_NAMED_STREAMS = 1 << 63
_CALLS_OF_NAMED = 1 << 32


class Change(NamedTuple):
    """One augmentation, either of an option or of named fields, with the random streams from which this augmentation
    draws.

    Args:
        what: The augmentation.
        streams: A dict from name to the index of a random stream, for the augmentation of an option; None: the streams
            are derived from the names of the fields.
    """

    what: ByField
    streams: Mapping[str, int] | None = None

    def draw(self, key: Key, call: int, shape: tuple[int, int], there: There, image_shape: ImageShapes) -> Drawn:
        """Return the draws for a batch: a dict from each attribute of ``Draws`` to the draws by field.

        Args:
            key: The key of the random numbers.
            call: The index of the call if masks are drawn; otherwise 0.
            shape: ``(B, S)`` of the complete batch, over all shards.
            there: A function that takes fields, and returns the fields among them that the batch has.
            image_shape: See ``draw``.
        """
        return self.what.draw(partial(self._stream, key, call), shape, there, image_shape)

    def _stream(self, key: Key, call: int, name: str) -> Key:
        if self.streams is not None:
            return key.with_call(call * _STREAMS + self.streams[name])
        named = hashlib.blake2b(repr((name, *self.what.fields)).encode(), digest_size=8).digest()
        number = int.from_bytes(named, "little") % (_NAMED_STREAMS // _CALLS_OF_NAMED)
        return key.with_call(_NAMED_STREAMS + number * _CALLS_OF_NAMED + call % _CALLS_OF_NAMED)


def permutations(key: Key, rows: int, size: int) -> npt.NDArray[np.int64]:
    """Return independent uniform permutations of ``range(size)``, int64 ``[rows, size]``."""
    # Sort random numbers whose low bits contain their position: several times faster than an argsort.
    low = np.uint64((1 << max(size - 1, 1).bit_length()) - 1)
    numbered = (key.bits(rows * size).reshape(rows, size) & ~low) | np.arange(size, dtype=np.uint64)
    numbered.sort(axis=1)
    return (numbered & low).astype(np.int64)


def _bernoulli(key: Key, probability: float, count: int) -> npt.NDArray[np.bool_]:
    """Return random bools ``[count]``; each is True with the given probability, up to an error of ``2**-33``."""
    # Two 32-bit numbers from each word, in the same order on every machine.
    words = key.bits(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
    threshold = round(probability * 2**32)
    return np.ones(count, np.bool_) if threshold == 2**32 else words < np.uint32(threshold)


def check_by_field(where: str, given: object) -> tuple[ByField, ...]:
    """Return the augmentations in ``by_field`` as a tuple; raise ConfigError for an element of another type."""
    one = isinstance(given, ByField)
    if one or not isinstance(given, Collection) or not all(isinstance(part, ByField) for part in given):
        wanted = "a list of PermuteFields, ScaleFields, ImageFields and MaskFields"
        raise ConfigError(f"{where}: expected {wanted}, found {given!r:.120}")
    return tuple(given)


def check_once(where: str, what: str, fields: Iterable[str]) -> None:
    """Raise ConfigError if a field has the same augmentation twice."""
    for field, times in Counter(fields).items():
        if times > 1:
            raise ConfigError(f"{where}: expected each field to be {what} once, found {field} {times} times")


def _names(where: str, given: Any) -> Names:
    names: Names = (given,) if isinstance(given, str) else check_list(where, given)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: expected names of fields, found {name!r}")
    return names


def _check_fields(one: Any) -> str:
    """Convert the argument ``fields`` of an augmentation to a tuple of names and check it; return the prefix of errors
    about the augmentation.
    """
    kind = type(one).__name__
    object.__setattr__(one, "fields", _names(f"{kind}: fields", one.fields))
    _check_some(kind, one.fields)
    return f"{kind}: {', '.join(one.fields)}"


def _check_some(where: str, fields: Names) -> None:
    if not fields:
        raise ConfigError(f"{where}: expected at least one field, found none")
    check_once(where, "named", fields)


def _endpoints(where: str, given: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    try:
        (low, from_low), (high, from_high) = given
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: expected endpoints as ((number, result), (other number, its result)), found {given!r}"
        ) from None
    where = f"{where}: endpoints"
    one = check_number(where, low), check_number(where, from_low)
    other = check_number(where, high), check_number(where, from_high)
    if one[0] == other[0] or not math.isfinite((other[1] - one[1]) / (other[0] - one[0])):
        raise ConfigError(f"{where}: expected two different numbers, found {one[0]} and {other[0]}")
    return one, other


PermuteAction = Literal[False, "input", "target", "both"]
"""The values of the option ``permute_action``: no permutation, only `action`, only the columns of `q_star`, or both."""
PERMUTED: Mapping[PermuteAction, tuple[str, ...]] = {
    False: (),
    "input": ("action",),
    "target": ("q_star",),
    "both": ("action", "q_star"),
}
"""The fields that each value of ``permute_action`` permutes."""

_DONE_CODES = next(len(field.labels) for field in STANDARD_FIELDS if field.name == "done")


@dataclass(frozen=True)
class _PermuteOption(PermuteFields):
    """The permutation of the option ``option``. The number of codes is the value of the option ``number``, where 0
    means unknown.
    """

    option: str = ""
    number: str = ""

    def __post_init__(self) -> None:
        pass

    def draw(self, stream: Stream, shape: tuple[int, int], there: There, image_shape: ImageShapes) -> Drawn:
        """Draw one permutation for each sequence; raise ConfigError if the number of codes is needed but unknown."""
        if not self.size and there(self.fields):
            raise ConfigError(f"{self.option}: expected {self.number} of at least 1, found 0")
        return super().draw(stream, shape, there, image_shape)


@dataclass(frozen=True)
class AugmentMaskProbConfig:
    """The probability of masking a field at a step, independently of all other fields and steps.

    Masked values become 0; masked values of ``time`` become -1. Fields that a batch lacks are ignored.

    Args:
        action, reward, xformed_reward, done, time, q_star, obs_continuous, obs_discrete, obs_image: The probability of
            masking the field of this name.

    Raises:
        ConfigError: A probability is outside ``[0, 1]``.
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
            value = check_unit(f"AugmentMaskProbConfig: {option.name}", getattr(self, option.name))
            object.__setattr__(self, option.name, value)


@dataclass(frozen=True)
class AugmentTokensConfig:
    """The augmentations of a batch; by default, a batch is not augmented.

    Scalars are drawn once per batch. Permutations are drawn once per sequence and applied to all steps of the sequence.
    Masks are drawn for every step and every view. The augmentations are applied in this order: permute, scale and
    shift, crop, mask. Most options are for standard fields; standard fields that a batch lacks are ignored.
    ``by_field`` is for fields of any name; these fields must exist in the batch.

    Args:
        scale_reward, shift_reward: Distributions for ``reward * scale + shift``. These options change only ``reward``,
            not ``xformed_reward``, and not ``q_star``, whose values keep the scale of the original rewards.
        scale_xformed_reward: Whether the scale and the shift of ``reward`` are also applied to ``xformed_reward``.
        scale_obs, shift_obs: Distributions for ``obs_continuous * scale + shift``.
        scale_obs_image, shift_obs_image: Distributions for ``obs_image * scale + shift``, rounded half to even and
            clamped to 0..255.
        permute_action: Permutes the codes of actions: "input" (``action``), "target" (the columns of ``q_star``) or
            "both", which keeps ``q_star[action]`` unchanged at every step. False: no permutation.
        permute_done: Whether to permute the codes 0, 1, 2 of ``done``.
        permute_obs_discrete: Whether to permute the states of ``obs_discrete``.
        crop_obs_image: A ``RandomShift`` or ``RandomCrop`` for ``obs_image``.
        mask_prob: The masking probabilities of the standard fields, an ``AugmentMaskProbConfig``.
        by_field: Augmentations of named fields: any number of ``PermuteFields``, ``AffineFields`` (such as
            ``ScaleFields``), ``ImageFields`` and ``MaskFields``. The draws of an augmentation depend only on the seed,
            the index and the augmentation's fields, not on other augmentations.
        deliver_masks: Whether a batch also has ``<field>_mask``, bool ``[B, S]``, True at masked steps, for every field
            with a masking probability above 0.
        max_num_actions: Number of actions; 0: the number that the data or the caller provide.
        max_num_obs_discrete: Number of states of ``obs_discrete``; 0: the number that the caller provides.
        enabled: False turns all augmentations off.

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
        check_once(where, "permuted", self._fields_of(PermuteFields))
        pixels = [name for one in self.of(ImageFields) if one.scalars for name in one.fields]
        check_once(where, "scaled", [*self._fields_of(AffineFields), *pixels])
        check_once(where, "changed as an image", self._fields_of(ImageFields))
        check_once(where, "masked", self.masked())

    @memo
    def changes(self) -> tuple[Change, ...]:
        """All augmentations that change a batch: first the augmentations of options, then the augmentations in
        ``by_field``.
        """
        codes, columns = (tuple({name} & {*PERMUTED[self.permute_action]}) for name in ("action", "q_star"))
        permuted = (
            _PermuteOption(self.max_num_actions, codes, columns, "permute_action", "max_num_actions"),
            _PermuteOption(_DONE_CODES, ("done",), (), "permute_done"),
            _PermuteOption(
                self.max_num_obs_discrete, ("obs_discrete",), (), "permute_obs_discrete", "max_num_obs_discrete"
            ),
        )
        found = [Change(one, {"permute": _PERMUTED[one.option]}) for one in permuted if getattr(self, one.option)]
        rewards = ("reward", "xformed_reward") if self.scale_xformed_reward else ("reward",)
        for option, names in (("reward", rewards), ("obs", ("obs_continuous",))):
            if scalars := self._scalars(option):
                found.append(Change(ScaleFields(names, **scalars), _SCALARS[option]))
        scalars = self._scalars("obs_image")
        if scalars or self.crop_obs_image is not None:
            found.append(Change(ImageFields(("obs_image",), self.crop_obs_image, **scalars), _IMAGES))
        for number, field in enumerate(fields(AugmentMaskProbConfig), _MASKS):
            if probability := getattr(self.mask_prob, field.name):
                found.append(Change(MaskFields((field.name,), probability), {"mask": number}))
        by_name = (one for one in self.by_field if not isinstance(one, MaskFields) or one.probability > 0)
        return (*found, *map(Change, by_name))

    def _scalars(self, option: str) -> dict[str, Any]:
        """Return a dict with the distributions "scale" and "shift" of an option. A distribution that is None is left
        out, and so are a scale that is always 1 and a shift that is always 0.
        """
        given = {"scale": (getattr(self, f"scale_{option}"), 1.0), "shift": (getattr(self, f"shift_{option}"), 0.0)}
        return {part: spec for part, (spec, same) in given.items() if spec is not None and not spec.is_always(same)}

    def of(self, kind: type[C]) -> list[C]:
        """Return all augmentations of the type ``kind``, both from options and from ``by_field``."""
        return [one.what for one in self.changes if isinstance(one.what, kind)]

    def _fields_of(self, kind: type[C]) -> list[str]:
        return [name for one in self.of(kind) for name in one.fields]  # type: ignore[attr-defined]

    @property
    def renamed(self) -> list[str]:
        """The standard fields that options permute."""
        return [name for one in self.of(_PermuteOption) for name in one.fields]

    @property
    def redrawn(self) -> set[str]:
        """The fields whose images are cropped or whose pixels are changed."""
        return set(self._fields_of(ImageFields)) if self.enabled else set()

    @property
    def named(self) -> list[str]:
        """The fields that ``by_field`` augments."""
        return list(dict.fromkeys(name for one in self.by_field for name in one.fields))

    def masked(self) -> list[str]:
        """The fields that may be masked."""
        return self._fields_of(MaskFields)

    def check_named(self, fields: Mapping[str, str]) -> None:
        """Raise ConfigError if a field that ``by_field`` names is not in a batch.

        Args:
            fields: A dict from each field of a batch to its column; "" means that the column is unknown.
        """
        for name in self.named if self.enabled else ():
            if name not in fields:
                from mouse_core.store.fields import meant_among  # imported only for the error

                raise ConfigError(
                    f"augment: by_field: expected fields among {list(fields)}, found {name!r}"
                    f"{meant_among(name, fields)}"
                )

    @property
    def active(self) -> bool:
        """Whether any augmentation changes a batch."""
        return self.enabled and bool(self.changes)

    def with_sizes(self, *, max_num_actions: int = 0, max_num_obs_discrete: int = 0) -> AugmentTokensConfig:
        """Return a copy with the given numbers of actions and states; 0 keeps the current number."""
        return replace(
            self,
            max_num_actions=max_num_actions or self.max_num_actions,
            max_num_obs_discrete=max_num_obs_discrete or self.max_num_obs_discrete,
        )
