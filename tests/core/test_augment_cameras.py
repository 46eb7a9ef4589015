"""Images of fields of any name: shifted, cropped and with other pixels, each camera or several together."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import (
    AugmentScalarSpec,
    AugmentTokensConfig,
    BatchSource,
    ConfigError,
    DatasetStore,
    Field,
    ImageFields,
    RandomCrop,
    RandomShift,
    ScaleFields,
    SchemaError,
    TokenAugmenter,
)
from mouse_core.augment import apply, cut, draw
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import UNIFORM, assert_same, chi_square, chi_square_limit
from tests.raising import assert_raises

SHAPES = {"obs_image": (6, 5, 1), "wrist": (7, 8, 3), "depth": (7, 8, 1)}
KEY = Key(7, Purpose.AUGMENT, 3)
BRIGHTER = AugmentScalarSpec(low=1.2, high=1.6)


def make_store(rows: int = 60) -> DatasetStore:
    random = np.random.default_rng(2)
    store = DatasetStore(fields=[Field("wrist", image=True), Field("depth", image=True)])
    columns = {"obs_image": "observation_image"}
    pictures = {
        columns.get(name, name): random.integers(0, 256, (rows, *shape), dtype=np.uint8)
        for name, shape in SHAPES.items()
    }
    ends = (np.arange(rows) % 20 == 19).astype(np.int64)
    store.extend({"action": np.zeros(rows, np.int64), "reward": np.zeros(rows), "done": ends, **pictures})
    return store


def cameras(size: int = 5, length: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    return {name: random.integers(0, 256, (size, length, *shape), dtype=np.uint8) for name, shape in SHAPES.items()}


def places(whole: np.ndarray, part: np.ndarray) -> set[tuple[int, int]]:
    (height, width), (tall, wide) = part.shape[:2], whole.shape[:2]
    return {
        (y, x)
        for y in range(tall - height + 1)
        for x in range(wide - width + 1)
        if np.array_equal(whole[y : y + height, x : x + width], part)
    }


@pytest.mark.parametrize("per", ["sequence", "step"])
def test_cameras_of_an_entry_move_together(per: Any) -> None:
    config = AugmentTokensConfig(by_field=[ImageFields(["wrist", "depth"], crop=RandomCrop(4, 5, per))])
    store, asked = make_store(), {"sequence_length": 4, "batch_size": 6, "seed": 3}
    plain, source = BatchSource(store, **asked), BatchSource(store, augment=config, **asked)
    assert source.spec["wrist"].image_shape == (4, 5, 3)
    assert source.spec["depth"].shape == (20,)
    seen = set()
    for index in range(3):
        before, after = plain[index], source[index]
        assert np.array_equal(after["obs_image"], before["obs_image"])
        for row in range(6):
            found = []
            for step in range(4):
                both = []
                for name in ("wrist", "depth"):
                    height, width, channels = SHAPES[name]
                    whole = before[name][row, step].reshape(height, width, channels)
                    both.append(places(whole, after[name][row, step].reshape(4, 5, channels)))
                (place,) = set.intersection(*both)
                found.append(place)
            assert per == "step" or len(set(found)) == 1
            seen |= set(found)
    assert len(seen) > 8  # of 4 times 4


def test_pixels_are_scaled_by_name_as_by_the_option() -> None:
    """``pixel * scale + shift`` with two numbers for the batch, rounded half to even, within a byte."""
    config = AugmentTokensConfig(by_field=[ImageFields("wrist", scale=BRIGHTER, shift=UNIFORM)])
    store, asked = make_store(), {"sequence_length": 2, "batch_size": 8, "seed": 1}
    before, after = BatchSource(store, **asked)[0], BatchSource(store, augment=config, **asked)[0]
    table: dict[int, int] = {}
    for pixel, found in zip(before["wrist"].ravel().tolist(), after["wrist"].ravel().tolist(), strict=True):
        assert table.setdefault(pixel, found) == found
    slope = (table[100] - table[0]) / 100
    assert 1.19 <= slope <= 1.61
    assert max(table.values()) == 255
    for name in ("obs_image", "depth", "reward"):
        assert np.array_equal(before[name], after[name])


def test_what_an_entry_draws_depends_on_its_own_fields_alone() -> None:
    one = ImageFields("wrist", crop=RandomShift(2), scale=BRIGHTER)
    alone = draw(AugmentTokensConfig(by_field=[one]), KEY, (5, 3), image_shape=SHAPES)
    more = AugmentTokensConfig(
        by_field=[ImageFields("depth", crop=RandomShift(2)), one],
        crop_obs_image=RandomShift(2),
        scale_obs_image=BRIGHTER,
    )
    found = draw(more, KEY, (5, 3), image_shape=SHAPES)
    assert np.array_equal(found.images["wrist"].crop.rows, alone.images["wrist"].crop.rows)
    assert np.array_equal(found.images["wrist"].pixels, alone.images["wrist"].pixels)
    assert not np.array_equal(found.images["depth"].crop.rows, found.images["wrist"].crop.rows)
    options = draw(
        AugmentTokensConfig(crop_obs_image=RandomShift(2), scale_obs_image=BRIGHTER), KEY, (5, 3), image_shape=(6, 5, 1)
    )
    image, same = found.images["obs_image"], options.images["obs_image"]
    assert np.array_equal(image.crop.columns, same.crop.columns)
    assert np.array_equal(image.pixels, same.pixels)


CONFIG = AugmentTokensConfig(
    by_field=[
        ImageFields(["wrist", "depth"], crop=RandomCrop(4, 5, "step"), scale=BRIGHTER),
        ImageFields("obs_image", crop=RandomShift(2)),
    ]
)


def test_shards_and_augmenters_give_what_the_whole_batch_does() -> None:
    batch = cameras()
    augmenter = TokenAugmenter(CONFIG, seed=7)
    augmenter.update_augmentations(batch)
    whole = apply(batch, draw(CONFIG, Key(7, Purpose.AUGMENT, 0), (5, 3), image_shape=SHAPES))
    assert_same(augmenter(batch), dict(whole))
    flat = {name: values.reshape(5, 3, -1) for name, values in batch.items()}
    by_name = TokenAugmenter(CONFIG, seed=7, image_shape=SHAPES)
    by_name.update_augmentations(flat)
    assert_same(by_name(flat), {name: values.reshape(5, 3, -1) for name, values in whole.items()})
    part = cut(draw(CONFIG, Key(7, Purpose.AUGMENT, 0), (5, 3), image_shape=SHAPES), 1, 3)
    assert_same(
        dict(apply({name: values[1:4] for name, values in batch.items()}, part)), {k: v[1:4] for k, v in whole.items()}
    )
    store, asked = make_store(), {"sequence_length": 3, "batch_size": 6, "augment": CONFIG, "views": 2}
    for one, *shards in zip(
        BatchSource(store, **asked)[2],
        *(BatchSource(store, shard=(rank, 2), **asked)[2] for rank in (0, 1)),
        strict=True,
    ):
        assert_same({name: np.concatenate([shard[name] for shard in shards]) for name in one}, dict(one))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ImageFields("wrist"), "expected crop, scale or shift, found none"),
        (lambda: ImageFields("wrist", crop=4), "ImageFields: wrist: crop: expected"),  # type: ignore[arg-type]
        (lambda: ImageFields(["wrist", "wrist"], scale=BRIGHTER), "wrist 2 times"),
        (
            lambda: AugmentTokensConfig(by_field=[ImageFields("wrist", crop=RandomShift(1))] * 2),
            "changed as an image once, found wrist 2 times",
        ),
        (
            lambda: AugmentTokensConfig(
                crop_obs_image=RandomShift(1), by_field=[ImageFields("obs_image", scale=BRIGHTER)]
            ),
            "changed as an image once, found obs_image 2 times",
        ),
        (
            lambda: AugmentTokensConfig(
                by_field=[ImageFields("wrist", scale=BRIGHTER), ScaleFields("wrist", scale=BRIGHTER)]
            ),
            "scaled once, found wrist 2 times",
        ),
    ],
)
def test_what_entries_cannot_be(make: Any, says: str) -> None:
    assert_raises(ConfigError, says, make)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (ImageFields("reward", scale=BRIGHTER), "reward: expected images of uint8, found float32"),
        (ImageFields("camera", scale=BRIGHTER), "by_field: expected fields among .* found 'camera'"),
        (ImageFields("wrist", crop=RandomCrop(8, 8)), "crop_wrist: expected a crop of at most 7x8, found 8x8"),
        (
            ImageFields(["wrist", "obs_image"], crop=RandomShift(1)),
            "with a crop, expected fields with images of equal size",
        ),
    ],
)
def test_what_a_source_cannot_do(entry: ImageFields, says: str) -> None:
    assert_raises(ConfigError, says, BatchSource, make_store(), 3, 2, augment=AugmentTokensConfig(by_field=[entry]))


def test_flat_images_of_unknown_size_and_channels_that_come_first_are_refused() -> None:
    flat = {"wrist": np.zeros((5, 3, 7 * 8 * 3), np.uint8)}
    config = AugmentTokensConfig(by_field=[ImageFields("wrist", crop=RandomShift(1))])
    with pytest.raises(ConfigError, match=r"crop_wrist: expected the image_shape \(H, W, C\) of wrist, found None"):
        TokenAugmenter(config, image_shape=(7, 8, 3)).update_augmentations(flat)  # that is obs_image's
    draws = draw(config, KEY, (5, 3), image_shape=SHAPES)
    with pytest.raises(SchemaError, match=r"wrist: expected 168 pixels"):
        apply({"wrist": flat["wrist"][..., 1:]}, draws, image_shape=SHAPES)
    for config in (RandomShift(2), RandomCrop(3, 3)):
        cropping = AugmentTokensConfig(crop_obs_image=config)
        images = np.zeros((2, 3, 5, 6, 7), np.uint8)
        draws = draw(cropping, key(0), (2, 3), image_shape=(5, 6, 7))
        with pytest.raises(SchemaError, match=r"expected images \[B, S, H, W, C\] of 1 to 4 channels.*image_shape="):
            apply({"obs_image": images}, draws)
        assert apply({"obs_image": images}, draws, image_shape=(5, 6, 7))["obs_image"].shape[4] == 7


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
