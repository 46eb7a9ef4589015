"""What may be configured, and how a mistake is answered."""

import math
import pickle
from typing import Any

import numpy as np
import pytest

import mouse_core
from mouse_core import ConfigError
from mouse_core.augment import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    RandomCrop,
    RandomShift,
    draw,
)
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import IMAGE, full_config
from tests.raising import assert_raises

KEY = Key(0, Purpose.AUGMENT)


def test_configurations_are_values_and_may_lack_what_is_not_needed() -> None:
    config = mouse_core.AugmentTokensConfig(
        scale_reward=mouse_core.AugmentScalarSpec(mean=1.0, low=0.5, high=2.0),
        permute_action="both",
        mask_prob=mouse_core.AugmentMaskProbConfig(reward=0.1, obs_continuous=0.15),
    )
    assert config.active
    assert config.masked() == ["reward", "obs_continuous"]
    config = full_config()
    assert config == full_config() == pickle.loads(pickle.dumps(config))
    assert len({config, full_config(), full_config(permute_done=False)}) == 2
    assert AugmentScalarSpec(mean=np.float32(2), std=np.int64(1)) == AugmentScalarSpec(2.0, 1.0)
    with pytest.raises(AttributeError):
        config.enabled = False  # type: ignore[misc]
    with pytest.raises(ConfigError, match="permute_action: expected max_num_actions of at least 1, found 0"):
        draw(AugmentTokensConfig(permute_action="both"), KEY, (2, 3))
    with pytest.raises(ConfigError, match="permute_obs_discrete: expected max_num_obs_discrete"):
        draw(AugmentTokensConfig(permute_obs_discrete=True), KEY, (2, 3))
    with pytest.raises(ConfigError, match="crop_obs_image: expected the image_shape"):
        draw(AugmentTokensConfig(crop_obs_image=RandomShift()), KEY, (2, 3))
    with pytest.raises(ConfigError, match="expected a crop of at most 6x5, found 7x5"):
        draw(AugmentTokensConfig(crop_obs_image=RandomCrop(7, 5)), KEY, (2, 3), image_shape=IMAGE)
    # Nothing is needed for fields that are not there.
    assert draw(full_config(max_num_actions=0), KEY, (2, 3), fields={"reward"}).permutations == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.5}, "expected both low and high or neither, found low=0.5, high=None"),
        ({"mean": 1.0, "high": 0.5}, "expected both low and high or neither"),
        ({"low": 2.0, "high": 1.0}, "expected low <= high, found low=2.0, high=1.0"),
        ({"mean": 1.0, "std": -0.1}, "expected std of at least 0, found -0.1"),
        ({"low": 0.0, "high": 1.0, "std": -1}, "expected std of at least 0"),
        ({"mean": math.nan}, "mean: expected a finite number, found nan"),
        ({"low": 0.0, "high": math.inf}, "high: expected a finite number"),
        ({"mean": "one"}, "mean: expected a number, found 'one'"),
        ({"mean": True}, "mean: expected a number, found True"),
        ({"std": 1.0}, "expected mean, or low and high, found neither"),
        ({}, "found neither"),
    ],
)
def test_scalars_that_cannot_be(options: dict[str, Any], message: str) -> None:
    assert_raises(ConfigError, message, AugmentScalarSpec, **options)


@pytest.mark.parametrize("probability", [-0.1, 1.5, math.nan, "often", None])
def test_probabilities_that_cannot_be(probability: Any) -> None:
    assert_raises(ConfigError, r"AugmentMaskProbConfig: .*reward", AugmentMaskProbConfig, reward=probability)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"permute_action": "all"}, "permute_action: expected one of"),
        ({"permute_action": True}, "permute_action: expected one of"),
        ({"permute_action": 0}, "permute_action: expected one of"),
        ({"permute_done": 1}, "permute_done: expected bool, found 1"),
        ({"enabled": None}, "enabled: expected bool, found None"),
        ({"scale_reward": 2.0}, "scale_reward: expected AugmentScalarSpec or None, found 2.0"),
        ({"mask_prob": 0.1}, "mask_prob: expected AugmentMaskProbConfig, found 0.1"),
        ({"crop_obs_image": 4}, "crop_obs_image: expected .*RandomShift.* or None, found 4"),
        ({"max_num_actions": -1}, "max_num_actions: expected an integer of at least 0, found -1"),
        ({"max_num_obs_discrete": 2.5}, "max_num_obs_discrete: expected an integer of at least 0, found 2.5"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    assert_raises(ConfigError, message, AugmentTokensConfig, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomShift(pad=0),
        lambda: RandomShift(per="batch"),  # type: ignore[arg-type]
        lambda: RandomCrop(height=0, width=3),
        lambda: RandomCrop(3, 3.5),  # type: ignore[arg-type]
        lambda: RandomCrop(3, 3, per="image"),  # type: ignore[arg-type]
    ],
)
def test_crops_that_cannot_be(make: Any) -> None:
    assert_raises(ConfigError, r"Random(Shift|Crop): (pad|per|height|width): expected", make)


def test_scalars_may_be_fixed_and_never_reach_their_upper_bound() -> None:
    spec = AugmentScalarSpec(low=0.7, high=0.7)
    assert spec.draw(KEY) == 0.7
    assert spec.is_always(0.7)
    assert not spec.is_always(1.0)
    assert not AugmentScalarSpec(mean=1.0, low=0.5, high=2.0).is_always(1.0)
    assert not AugmentScalarSpec(mean=1.0, std=0.1).is_always(1.0)
    low, high = 1.0, math.nextafter(1.0, 2.0)
    spec = AugmentScalarSpec(low=low, high=high)
    assert {spec.draw(KEY.with_call(call)) for call in range(100)} == {low}
