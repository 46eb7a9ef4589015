"""Random shift and random crop of images."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import SchemaError
from mouse_core.augment import AugmentTokensConfig, RandomCrop, RandomShift, apply, draw
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import chi_square, chi_square_limit

PER = st.sampled_from(["sequence", "step"])


def key(seed: int = 0) -> Key:
    return Key(seed, Purpose.AUGMENT)


def pictures(batch: int, length: int, height: int, width: int, channels: int = 2) -> np.ndarray:
    shape = (batch, length, height, width, channels)
    return np.arange(np.prod(shape)).reshape(shape)


@given(
    seed=st.integers(0, 2**32),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    pad=st.integers(1, 9),
    per=PER,
)
def test_a_shift_is_a_crop_of_the_padded_image(seed: int, size: tuple[int, int, int, int], pad: int, per: Any) -> None:
    images = pictures(*size)
    config = AugmentTokensConfig(crop_obs_image=RandomShift(pad, per))
    draws = draw(config, key(seed), images.shape[:2], image_shape=images.shape[2:])  # type: ignore[arg-type]
    moved = apply({"obs_image": images}, draws)["obs_image"]
    assert moved.shape == images.shape
    height, width = size[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)), mode="edge")
    for b in range(size[0]):
        found = []
        for s in range(size[1]):
            matches = {
                (y, x)
                for y in range(2 * pad + 1)
                for x in range(2 * pad + 1)
                if (padded[b, s, y : y + height, x : x + width] == moved[b, s]).all()
            }
            assert matches
            found.append(matches)
        if per == "sequence":
            assert set.intersection(*found)


@given(
    seed=st.integers(0, 2**32),
    height=st.integers(1, 6),
    width=st.integers(1, 5),
    per=PER,
    flat=st.booleans(),
    dtype=st.sampled_from(["u1", "i8", "f4"]),
)
def test_a_crop_is_a_part_of_the_image(seed: int, height: int, width: int, per: Any, flat: bool, dtype: str) -> None:
    images = pictures(2, 3, 6, 5, 1).astype(dtype)
    config = AugmentTokensConfig(crop_obs_image=RandomCrop(height, width, per))
    draws = draw(config, key(seed), (2, 3), image_shape=(6, 5, 1))
    given_images = images.reshape(2, 3, -1) if flat else images
    cropped = apply({"obs_image": given_images}, draws, image_shape=(6, 5, 1))["obs_image"]
    assert cropped.shape == ((2, 3, height * width) if flat else (2, 3, height, width, 1))
    assert cropped.dtype == images.dtype
    assert cropped.flags.c_contiguous
    cropped = cropped.reshape(2, 3, height, width, 1)
    places = []
    for b in range(2):
        for s in range(3):
            top, left = np.argwhere(images[b, s, :, :, 0] == cropped[b, s, 0, 0, 0])[0]
            np.testing.assert_array_equal(cropped[b, s], images[b, s, top : top + height, left : left + width])
            places.append((b, top, left))
    if per == "sequence":
        assert len(set(places)) <= 2


@pytest.mark.parametrize("per", ["sequence", "step"])
def test_every_place_is_as_likely(per: Any) -> None:
    shift = AugmentTokensConfig(crop_obs_image=RandomShift(4, per))
    crop = draw(shift, key(3), (9000, 2), image_shape=(84, 84, 1)).images["obs_image"].crop
    assert crop is not None
    assert crop.rows.shape == (9000, 2 if per == "step" else 1, 84)
    # Pixel 40 is beyond the reach of the border, so it shows the shift itself.
    y, x = crop.rows[:, 0, 40] - 40, crop.columns[:, 0, 40] - 40
    counts = np.zeros((9, 9), int)
    np.add.at(counts, (y + 4, x + 4), 1)
    assert chi_square(counts, 9000 / 81) < chi_square_limit(80)
    if per == "step":
        assert np.mean(crop.rows[:, 0, 40] == crop.rows[:, 1, 40]) < 0.2


def test_images_whose_channels_come_first_are_refused() -> None:
    for config in (RandomShift(2), RandomCrop(3, 3)):
        cropping = AugmentTokensConfig(crop_obs_image=config)
        images = np.zeros((2, 3, 5, 6, 7), np.uint8)
        draws = draw(cropping, key(0), (2, 3), image_shape=(5, 6, 7))
        with pytest.raises(SchemaError, match=r"expected images \[B, S, H, W, C\] of 1 to 4 channels.*image_shape="):
            apply({"obs_image": images}, draws)
        assert apply({"obs_image": images}, draws, image_shape=(5, 6, 7))["obs_image"].shape[4] == 7
