"""Laws of augmentation in NumPy: what may be configured, what is drawn, and what sources and loaders deliver."""

import itertools
import math
import pickle
from itertools import pairwise
from itertools import permutations as all_permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mouse_core
from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, PrefetchBatchifier, SchemaError, StateError
from mouse_core.augment import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    Draws,
    RandomCrop,
    RandomShift,
    apply,
    cut,
    draw,
)
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import (
    ACTIONS,
    FIELDS,
    IMAGE,
    STATES,
    UNIFORM,
    Batch,
    assert_same,
    chi_square,
    chi_square_limit,
    configs,
    full_config,
    make_batch,
    make_store,
    oracle,
)
from tests.raising import assert_raises

SEEDS = st.integers(0, 2**64 - 1)


def key(seed: int = 0, index: int = 0, call: int = 0) -> Key:
    return Key(seed, Purpose.AUGMENT, index, call)


def draw_for(config: AugmentTokensConfig, batch: Batch, where: Key | None = None) -> Draws:
    return draw(config, where or key(), batch["reward"].shape, fields=set(batch), image_shape=IMAGE)  # type: ignore[arg-type]


def leaves(draws: Draws) -> list[Any]:
    found: list[Any] = []
    draws.map(found.append)
    return found


@given(config=configs(), seed=SEEDS, size=st.integers(1, 3), length=st.integers(1, 4))
def test_apply_is_what_the_oracle_says(config: AugmentTokensConfig, seed: int, size: int, length: int) -> None:
    batch = make_batch(seed % 1000, size, length)
    draws = draw_for(config, batch, key(seed))
    assert_same(apply(batch, draws), oracle(batch, draws))


@given(config=configs(), seed=SEEDS)
def test_the_input_is_never_modified(config: AugmentTokensConfig, seed: int) -> None:
    batch = make_batch()
    copies = {name: values.copy() for name, values in batch.items()}
    draws = draw_for(config, batch, key(seed))
    kept = [np.copy(values) for values in leaves(draws)]
    for values in batch.values():
        values.flags.writeable = False
    augmented = apply(batch, draws)
    assert set(batch) == set(copies)
    assert_same(batch, copies)
    for before, after in zip(kept, leaves(draws), strict=True):
        np.testing.assert_array_equal(before, after)
    if augmented is not batch:
        for name, values in augmented.items():
            assert values is batch.get(name) or not any(np.shares_memory(values, v) for v in batch.values())


IDENTITIES = [
    AugmentTokensConfig(),
    full_config(enabled=False),
    AugmentTokensConfig(
        scale_reward=AugmentScalarSpec(mean=1.0),
        shift_reward=AugmentScalarSpec(mean=0.0),
        scale_obs=AugmentScalarSpec(low=1.0, high=1.0),
        shift_obs=AugmentScalarSpec(low=0.0, high=0.0),
        scale_obs_image=AugmentScalarSpec(1.0, 0.0),
        shift_obs_image=AugmentScalarSpec(0.0, 0.0),
        mask_prob=AugmentMaskProbConfig(),
        deliver_masks=True,
    ),
]


@pytest.mark.parametrize("config", IDENTITIES)
def test_the_identity_returns_the_very_same_object(config: AugmentTokensConfig) -> None:
    batch = make_batch()
    assert not config.active
    assert leaves(draw_for(config, batch)) == []
    assert apply(batch, draw_for(config, batch)) is batch


@given(seed=SEEDS, size=st.integers(1, 200), rows=st.integers(1, 5))
def test_permutations_are_bijections(seed: int, size: int, rows: int) -> None:
    config = AugmentTokensConfig(
        permute_action="both",
        permute_done=True,
        permute_obs_discrete=True,
        max_num_actions=size,
        max_num_obs_discrete=size,
    )
    draws = draw(config, key(seed), (rows, 2))
    assert set(draws.permutations) == {"action", "done", "obs_discrete"}
    np.testing.assert_array_equal(draws.columns["q_star"], draws.permutations["action"])
    drawn = draws.permutations
    for name, permutation in drawn.items():
        expected = np.arange(3 if name == "done" else size)
        np.testing.assert_array_equal(np.sort(permutation, axis=1), np.tile(expected, (rows, 1)))


@pytest.mark.parametrize(("option", "changed"), [("input", {"action"}), ("target", {"q_star"}), (False, set())])
def test_permuting_one_side_leaves_the_other(option: Any, changed: set[str]) -> None:
    batch = make_batch(batch=40)
    config = AugmentTokensConfig(permute_action=option, max_num_actions=ACTIONS)
    augmented = apply(batch, draw_for(config, batch))
    assert {name for name in batch if augmented[name] is not batch[name]} == changed


@pytest.mark.parametrize("field", ["action", "done", "obs_discrete"])
def test_permutations_are_uniform(field: str) -> None:
    """Every permutation of three codes as often as any other, and every code in every place."""
    config = AugmentTokensConfig(
        permute_action="input", permute_done=True, permute_obs_discrete=True, max_num_actions=3, max_num_obs_discrete=3
    )
    drawn = np.concatenate([draw(config, key(11, i), (500, 1)).permutations[field] for i in range(40)])
    counts = [int((drawn == order).all(axis=1).sum()) for order in all_permutations(range(3))]
    assert sum(counts) == len(drawn)
    assert chi_square(counts, len(drawn) / 6) < chi_square_limit(5)
    if field == "action":  # and of many codes
        config = AugmentTokensConfig(permute_action="input", max_num_actions=18)
        drawn = draw(config, key(5), (20_000, 1)).permutations["action"]
        for place in range(18):
            assert chi_square(np.bincount(drawn[:, place], minlength=18), len(drawn) / 18) < chi_square_limit(17)


def test_scalars_are_drawn_once_a_batch_and_for_the_reward_alone_unless_asked() -> None:
    batch = {"reward": np.ones((5, 7), np.float32), "obs_continuous": np.ones((5, 7, 2))}
    config = AugmentTokensConfig(scale_reward=UNIFORM, scale_obs=UNIFORM)
    seen = set()
    for index in range(20):
        augmented = apply(batch, draw(config, key(index=index), (5, 7)))
        for values in augmented.values():
            assert np.unique(values).size == 1
            assert 0.5 <= values.flat[0] < 2
            seen.add(float(values.flat[0]))
    assert len(seen) == 40
    batch = make_batch()
    spec = AugmentScalarSpec(mean=2.0)
    augmented = apply(batch, draw_for(AugmentTokensConfig(scale_reward=spec), batch))
    assert {name for name in batch if augmented[name] is not batch[name]} == {"reward"}
    np.testing.assert_array_equal(augmented["reward"], batch["reward"] * 2)

    config = AugmentTokensConfig(scale_reward=UNIFORM, shift_reward=UNIFORM, scale_xformed_reward=True)
    same = {"reward": batch["reward"], "xformed_reward": batch["reward"]}
    augmented = apply(same, draw(config, key(), (3, 4)))
    np.testing.assert_array_equal(augmented["reward"], augmented["xformed_reward"])


def test_scalars_have_their_distribution_or_are_fixed() -> None:
    config = AugmentTokensConfig(
        scale_reward=AugmentScalarSpec(mean=3.0, std=2.0), shift_reward=AugmentScalarSpec(low=-1.0, high=3.0)
    )
    drawn = [draw(config, key(3, i), (1, 1)).affine["reward"] for i in range(4000)]
    uniform = np.array([shift for _, shift in drawn])
    assert (uniform >= -1).all()
    assert (uniform < 3).all()
    counts = np.histogram(uniform, bins=20, range=(-1, 3))[0]
    assert chi_square(counts, 200) < chi_square_limit(19)
    # The quartiles of the normal distribution, and twice its deviation.
    edges = np.array([-np.inf, -2, -0.6744897501960817, 0, 0.6744897501960817, 2, np.inf]) * 2 + 3
    gaussian = np.array([scale for scale, _ in drawn])
    counts = np.diff([(gaussian < edge).sum() for edge in edges])
    shares = np.array([0.02275013, 0.22724987, 0.25, 0.25, 0.22724987, 0.02275013])
    assert chi_square(counts, 4000 * shares) < chi_square_limit(5)
    spec = AugmentScalarSpec(low=0.7, high=0.7)
    assert spec.draw(KEY) == 0.7
    assert spec.is_always(0.7)
    assert not spec.is_always(1.0)
    assert not AugmentScalarSpec(mean=1.0, low=0.5, high=2.0).is_always(1.0)
    assert not AugmentScalarSpec(mean=1.0, std=0.1).is_always(1.0)
    low, high = 1.0, math.nextafter(1.0, 2.0)
    spec = AugmentScalarSpec(low=low, high=high)
    assert {spec.draw(KEY.with_call(call)) for call in range(100)} == {low}


@given(
    scale=st.floats(-10, 10, width=32), shift=st.floats(-300, 300, width=32), dtype=st.sampled_from(["i8", "u1", "f4"])
)
def test_image_values_stay_in_range_and_are_rounded(scale: float, shift: float, dtype: str) -> None:
    pixels = np.arange(256).astype(dtype).reshape(1, 1, 256)
    config = AugmentTokensConfig(
        scale_obs_image=AugmentScalarSpec(mean=scale), shift_obs_image=AugmentScalarSpec(mean=shift)
    )
    augmented = apply({"obs_image": pixels}, draw(config, key(), (1, 1)))["obs_image"]
    assert augmented.dtype == pixels.dtype
    expected = np.clip(np.round(np.arange(256) * scale + shift), 0, 255)
    np.testing.assert_array_equal(augmented.ravel(), expected)


def test_nan_stays_where_it_was_and_what_is_not_augmented_is_passed_on() -> None:
    batch = make_batch(batch=20)
    batch["obs_image"] = batch["obs_image"].astype(np.float32)
    batch["obs_image"][0, 0, 0] = np.nan
    config = full_config(mask_prob=AugmentMaskProbConfig(), permute_action=False, crop_obs_image=None)
    augmented = apply(batch, draw_for(config, batch))
    for name in ("reward", "obs_continuous", "obs_image"):
        assert np.isnan(batch[name]).any()
        np.testing.assert_array_equal(np.isnan(augmented[name]), np.isnan(batch[name]))
    batch: dict[str, Any] = {**make_batch(), "log_prob": np.zeros((3, 4)), "note": "anything"}
    config = AugmentTokensConfig(scale_reward=UNIFORM)
    augmented = apply(batch, draw(config, key(), (3, 4)))
    assert augmented is not batch
    assert set(augmented) == set(batch)
    assert all(augmented[name] is batch[name] for name in batch if name != "reward")
    batch = {"reward": np.ones((3, 4), np.float32)}
    augmented = apply(batch, draw(full_config(), key(), (3, 4), image_shape=IMAGE))
    assert set(augmented) == {"reward", "reward_mask"}


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.15, 0.5, 0.97])
def test_masks_have_their_frequency(probability: float) -> None:
    config = AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(reward=probability, action=probability))
    draws = [draw(config, key(2, i), (64, 64)) for i in range(20)]
    hidden = np.stack([d.masks["reward"] for d in draws])
    for axes in ((1, 2), (0, 2), (0, 1)):  # no batch, row or step is masked more than another
        total = hidden.size // hidden.shape[({0, 1, 2} - set(axes)).pop()]
        counts = hidden.sum(axis=axes)
        variance = total * probability * (1 - probability)
        assert ((counts - total * probability) ** 2).sum() / variance < chi_square_limit(counts.size)
    # Fields are masked independently of each other.
    other = np.stack([d.masks["action"] for d in draws])
    both, expected = (hidden & other).sum(), hidden.size * probability**2
    assert (both - expected) ** 2 / expected < chi_square_limit(1)


def test_draws_are_a_function_of_seed_index_and_call() -> None:
    batch = make_batch()
    config = full_config()
    first = leaves(draw_for(config, batch, key(1, 2, 3)))
    again = leaves(draw_for(config, batch, key(1, 2, 3)))
    assert len(first) > 15
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    batch = make_batch(batch=64)
    for where in (key(2, 5), key(1, 6)):  # another seed or index changes every draw
        for one, other in zip(
            leaves(draw_for(config, batch, key(1, 5))), leaves(draw_for(config, batch, where)), strict=True
        ):
            assert not np.array_equal(one, other)
    mine, theirs = draw_for(config, batch, key(1, 5)), draw_for(config, batch, key(1, 5, 1))
    for one, another in zip(
        leaves(mine._replace(delivered_masks={})), leaves(theirs._replace(delivered_masks={})), strict=True
    ):
        np.testing.assert_array_equal(one, another)
    for name, hidden in mine.delivered_masks.items():
        assert not np.array_equal(hidden, theirs.delivered_masks[name])


@given(seed=SEEDS, cuts=st.lists(st.integers(0, 6), max_size=3))
def test_shards_put_together_are_the_whole(seed: int, cuts: list[int]) -> None:
    batch = make_batch(batch=6)
    draws = draw_for(full_config(), batch, key(seed))
    bounds = [0, *sorted(cuts), 6]
    parts = []
    for first, end in pairwise(bounds):
        if first < end:
            rows = {name: values[first:end] for name, values in batch.items()}
            parts.append(apply(rows, cut(draws, first, end - first)))
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert_same(whole, dict(apply(batch, draws)))


def test_the_numbers_are_pinned() -> None:
    """A stream that changes between versions breaks every run that is resumed."""
    draws = draw(full_config(), key(7, 8, 9), (2, 3), image_shape=IMAGE)
    assert draws.permutations["action"].tolist() == PINNED["action"]
    assert draws.permutations["done"].tolist() == PINNED["done"]
    assert [float(part) for part in draws.affine["reward"]] == pytest.approx(PINNED["reward"], rel=1e-12)
    assert draws.delivered_masks["obs_continuous"].astype(int).tolist() == PINNED["mask"]
    assert draws.images["obs_image"].crop.rows[0, :, 0].tolist() == PINNED["rows"]


PINNED: dict[str, Any] = {
    "action": [[1, 4, 0, 3, 2], [4, 0, 1, 3, 2]],
    "done": [[2, 1, 0], [2, 1, 0]],
    "reward": [1.881029915975929, -0.018934040372872885],
    "mask": [[0, 1, 0], [0, 0, 0]],
    "rows": [1, 0, 0],
}


@pytest.mark.parametrize(
    ("field", "value", "size"), [("action", 5, 5), ("action", -1, 5), ("done", 3, 3), ("obs_discrete", 7, 7)]
)
def test_codes_out_of_range_are_an_error(field: str, value: int, size: int) -> None:
    batch = make_batch()
    draws = draw_for(full_config(), batch)
    batch[field][1, 2] = value
    assert_raises(DataError, rf"{field}: expected 0..{size - 1}, found {value} at row 1, step 2", apply, batch, draws)
    renamed = apply(batch, draws._replace(delivered_masks={}), validate=False)
    assert renamed[field][1, 2] == value
    keep = np.ones((3, 4), bool)
    keep[1, 2] = False
    batch[field][1, 2] = 0
    np.testing.assert_array_equal(renamed[field][keep], apply(batch, draws._replace(delivered_masks={}))[field][keep])


BAD_BATCHES: list[tuple[str, dict[str, Any], str]] = [
    ("vector actions", {"action": np.zeros((3, 4, 2), np.float32)}, "action: expected integer codes"),
    ("float actions", {"action": np.zeros((3, 4), np.float32)}, "action: expected integer codes"),
    (
        "narrow codes",
        {"obs_discrete": np.zeros((3, 4), np.int8)},
        "obs_discrete: expected a dtype that can represent 0..999",
    ),
    ("whole rewards", {"reward": np.zeros((3, 4), np.int64)}, "reward: expected a floating dtype"),
    ("other actions", {"q_star": np.zeros((3, 4, 4), np.float32)}, r"q_star: expected \[B, S, 5\]"),
    ("other rows", {"done": np.zeros((2, 4), np.int64)}, r"done: expected shape \[3, ...\]"),
    ("other steps", {"time": np.zeros((3, 5), np.int64)}, r"time: expected shape \[3, 4, ...\]"),
    ("no negative time", {"time": np.zeros((3, 4), np.uint8)}, "time: expected a signed dtype"),
    ("flat images", {"obs_image": np.zeros((3, 4, 7), np.uint8)}, "obs_image: expected 60 pixels"),
    ("grey images", {"obs_image": np.zeros((3, 4, 6, 5), np.uint8)}, r"obs_image: expected \[B, S, H, W, C\]"),
]


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in BAD_BATCHES], ids=[case[0] for case in BAD_BATCHES]
)
def test_fields_that_do_not_suit(change: dict[str, Any], message: str) -> None:
    draws = draw_for(full_config(max_num_obs_discrete=1000), make_batch())
    assert_raises(SchemaError, message, apply, {**make_batch(), **change}, draws, image_shape=IMAGE)


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
    ("kind", "options", "message"),
    [
        (AugmentScalarSpec, {"low": 0.5}, "expected both low and high or neither, found low=0.5, high=None"),
        (AugmentScalarSpec, {"mean": 1.0, "high": 0.5}, "expected both low and high or neither"),
        (AugmentScalarSpec, {"low": 2.0, "high": 1.0}, "expected low <= high, found low=2.0, high=1.0"),
        (AugmentScalarSpec, {"mean": 1.0, "std": -0.1}, "expected std of at least 0, found -0.1"),
        (AugmentScalarSpec, {"low": 0.0, "high": 1.0, "std": -1}, "expected std of at least 0"),
        (AugmentScalarSpec, {"mean": math.nan}, "mean: expected a finite number, found nan"),
        (AugmentScalarSpec, {"low": 0.0, "high": math.inf}, "high: expected a finite number"),
        (AugmentScalarSpec, {"mean": "one"}, "mean: expected a number, found 'one'"),
        (AugmentScalarSpec, {"mean": True}, "mean: expected a number, found True"),
        (AugmentScalarSpec, {"std": 1.0}, "expected mean, or low and high, found neither"),
        (AugmentScalarSpec, {}, "found neither"),
        (AugmentTokensConfig, {"permute_action": "all"}, "permute_action: expected one of"),
        (AugmentTokensConfig, {"permute_action": True}, "permute_action: expected one of"),
        (AugmentTokensConfig, {"permute_action": 0}, "permute_action: expected one of"),
        (AugmentTokensConfig, {"permute_done": 1}, "permute_done: expected bool, found 1"),
        (AugmentTokensConfig, {"enabled": None}, "enabled: expected bool, found None"),
        (AugmentTokensConfig, {"scale_reward": 2.0}, "scale_reward: expected AugmentScalarSpec or None, found 2.0"),
        (AugmentTokensConfig, {"mask_prob": 0.1}, "mask_prob: expected AugmentMaskProbConfig, found 0.1"),
        (AugmentTokensConfig, {"crop_obs_image": 4}, "crop_obs_image: expected .*RandomShift.* or None, found 4"),
        (AugmentTokensConfig, {"max_num_actions": -1}, "max_num_actions: expected an integer of at least 0, found -1"),
        (
            AugmentTokensConfig,
            {"max_num_obs_discrete": 2.5},
            "max_num_obs_discrete: expected an integer of at least",
        ),
        *((AugmentMaskProbConfig, {"reward": one}, "reward") for one in (-0.1, 1.5, math.nan, "often", None)),
        *((RandomShift, {name: value}, f"{name}: expected") for name, value in (("pad", 0), ("per", "batch"))),
        (RandomCrop, {"height": 0, "width": 3}, "height: expected"),
        (RandomCrop, {"height": 3, "width": 3.5}, "width: expected"),
        (RandomCrop, {"height": 3, "width": 3, "per": "image"}, "per: expected"),
    ],
)
def test_options_that_cannot_be(kind: Any, options: dict[str, Any], message: str) -> None:
    assert_raises(ConfigError, rf"{kind.__name__}: .*{message}", kind, **options)


STORE = make_store()


def source(config: AugmentTokensConfig | None, *, length: int = 5, size: int = 4, **options: Any) -> BatchSource:
    return BatchSource(STORE, length, size, augment=config, **options)


@given(config=configs(), seed=st.integers(0, 2**64 - 1), index=st.integers(0, 1000))
def test_a_source_delivers_the_batch_augmented(config: AugmentTokensConfig, seed: int, index: int) -> None:
    plain = source(None, seed=seed)[index]
    draws = draw(config, Key(seed, Purpose.AUGMENT, index), (4, 5), fields=set(plain), image_shape=IMAGE)
    mine = source(config, seed=seed)
    assert_same(mine[index], dict(apply(plain, draws, image_shape=IMAGE)))
    for name, spec in mine.spec.items():
        values = mine[index][name]
        assert values.dtype == spec.dtype
        assert values.shape == (4, 5, *spec.shape)
    assert set(mine.spec) == set(mine[index])


def test_views_share_all_but_masks() -> None:
    config = full_config()
    views: Any = source(config, views=3)[7]
    assert isinstance(views, tuple)
    assert len(views) == 3
    plain = source(None)[7]
    for call, view in enumerate(views):
        draws = draw(config, Key(0, Purpose.AUGMENT, 7, call), (4, 5), fields=set(plain), image_shape=IMAGE)
        assert_same(view, dict(apply(plain, draws, image_shape=IMAGE)))
    assert_same(source(config)[7], views[0])
    for name in FIELDS:
        assert not np.array_equal(views[0][f"{name}_mask"], views[1][f"{name}_mask"])
    views: Any = source(None, views=2)[3]
    plain = source(None)[3]
    for view in views:
        assert_same(view, plain)


@pytest.mark.parametrize("size", [4, 400])
def test_what_is_done_to_a_view_stays_with_it(size: int) -> None:
    for config in (None, full_config(), full_config(mask_prob=AugmentMaskProbConfig(reward=0.5))):
        other: Any = source(config, views=3, size=size)[3]
        for number in range(3):
            views: Any = source(config, views=3, size=size)[3]
            arrays = [values for view in views for values in view.values()]
            assert not any(np.shares_memory(one, two) for one, two in itertools.combinations(arrays, 2))
            for values in views[number].values():
                values[...] = 77
            for untouched in {0, 1, 2} - {number}:
                assert_same(views[untouched], other[untouched])


def test_short_and_large_batches_are_drawn_for_their_size() -> None:
    config = full_config()
    options: dict[str, Any] = {"sampling": "sequential", "drop_last": False, "size": 5}
    mine, plain = source(config, **options), source(None, **options)
    assert len(plain[2]["reward"]) == 2
    draws = draw(config, Key(0, Purpose.AUGMENT, 2), (2, 5), fields=set(plain[2]), image_shape=IMAGE)
    assert_same(mine[2], dict(apply(plain[2], draws, image_shape=IMAGE)))
    mine, plain = source(full_config(), size=1000), source(None, size=1000)
    draws_of = [draw(full_config(), Key(0, Purpose.AUGMENT, i), (1000, 5), image_shape=IMAGE) for i in range(4)]
    held = [mine[index] for index in range(4)]
    for index, batch in enumerate(held):
        assert_same(batch, dict(apply(plain[index], draws_of[index], image_shape=IMAGE)))


def test_the_spec_says_what_comes_and_nothing_enabled_is_no_augmentation() -> None:
    plain = source(None).spec
    spec = source(full_config(crop_obs_image=RandomCrop(4, 3))).spec
    assert spec["obs_image"].image_shape == (4, 3, 2)
    assert spec["obs_image"].shape == (24,)
    assert spec["obs_image"].stored_dtype == np.uint8
    for name in FIELDS:
        assert spec[name].dtype == plain[name].dtype
        assert spec[f"{name}_mask"].dtype == bool
        assert spec[f"{name}_mask"].shape == ()
    hidden = source(full_config(deliver_masks=False)).spec
    assert set(hidden) == set(plain)
    assert spec.alignment == plain.alignment
    plain = source(None)
    for config in (AugmentTokensConfig(), full_config(enabled=False)):
        mine = source(config)
        assert_same(mine[3], plain[3])
        assert mine.fingerprint == plain.fingerprint
        assert mine.spec == plain.spec


def test_stored_dtypes_carry_the_same_values() -> None:
    for views in (1, 2):
        mine = source(full_config(), views=views, dtypes={"obs_image": "float32"})
        plan = mine.plan(3)
        delivered: Any = mine.gather(plan)
        as_stored: Any = mine.gather(plan, stored=True)
        layouts = [mine.layout(4, stored=True), mine.layout(4)]
        for expected, stored, layout in ((as_stored, True, layouts[0]), (delivered, False, layouts[1])):
            memory = [np.zeros(layout.nbytes, np.uint8) for _ in range(views)]
            out = [layout.arrays(block) for block in memory]
            found: Any = mine.gather(plan, out if views > 1 else out[0], stored=stored)
            for view in range(views):
                mine_view, other = (found[view], expected[view]) if views > 1 else (found, expected)
                assert_same(mine_view, other)
                assert_same(out[view], other)
        for view in range(views):
            one, other = (delivered[view], as_stored[view]) if views > 1 else (delivered, as_stored)
            for name, spec in mine.spec.items():
                assert other[name].dtype == spec.stored_dtype
                np.testing.assert_array_equal(other[name].astype(spec.dtype), one[name])
        assert (delivered[0] if views > 1 else delivered)["obs_image"].dtype == np.float32


def test_a_framework_without_doubles_gets_the_same_numbers_rounded() -> None:
    config = AugmentTokensConfig(scale_obs=UNIFORM, shift_obs=UNIFORM, permute_action="both")
    wide = source(config)[2]
    narrow = source(config, replace_dtypes={"int64": "int32", "float64": "float32"})
    batch = narrow[2]
    assert narrow.spec["obs_continuous"].dtype == batch["obs_continuous"].dtype == np.float32
    assert batch["action"].dtype == np.int32
    for name, values in wide.items():
        np.testing.assert_array_equal(batch[name], values.astype(batch[name].dtype))

    huge = AugmentTokensConfig(scale_obs=AugmentScalarSpec(mean=1e300))
    with pytest.raises(DataError, match="augment: obs_continuous: expected values that fit float32"):
        source(huge, replace_dtypes={"float64": "float32"})[0]


def test_states_of_other_augmentations_are_refused_and_sources_pickled() -> None:
    config = full_config()
    with PrefetchBatchifier(STORE, 5, 4, seed=3, augment=config) as loader:
        state = loader.state_dict()
    for changed in (
        None,
        full_config(permute_done=False),
        full_config(scale_reward=AugmentScalarSpec(low=0.5, high=2.1)),
    ):
        with PrefetchBatchifier(STORE, 5, 4, augment=changed) as other, pytest.raises(StateError, match="augment"):
            other.load_state_dict(state)
    with PrefetchBatchifier(STORE, 5, 4, augment=config, views=2) as other, pytest.raises(StateError):
        other.load_state_dict(state)
    mine = source(full_config(), views=2)
    for other in (pickle.loads(pickle.dumps(mine)), mine.with_snapshot(STORE.snapshot(), epoch_start=0)):
        assert other.fingerprint == mine.fingerprint
        for one, another in zip(other[2], mine[2], strict=True):
            assert_same(one, another)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (AugmentTokensConfig(permute_obs_discrete=True), {}, "expected max_num_obs_discrete of at least 1"),
        (full_config(crop_obs_image=RandomCrop(7, 5)), {}, "expected a crop of at most 6x5, found 7x5"),
        (full_config(), {"dtypes": {"reward": "int64"}}, "reward: expected a floating dtype to scale or shift"),
        (full_config(), {"dtypes": {"time": "uint16"}}, "time: expected a dtype that can represent fill=-1"),
        (full_config(max_num_actions=4), {}, r"q_star: expected \[B, S, 4\]"),
        ("scale everything", {}, "augment: expected an AugmentTokensConfig or None"),
        (full_config(), {"views": 0}, "views: expected an integer of at least 1, found 0"),
        (None, {"views": True}, "views: expected an integer of at least 1, found True"),
    ],
)
def test_what_cannot_be_done_is_found_at_once(config: Any, options: dict[str, Any], message: str) -> None:
    assert_raises(ConfigError, message, source, config, **options)


def test_codes_that_are_none_are_named_and_fields_left_out_need_nothing() -> None:
    store = DatasetStore()
    store.extend({"action": np.zeros((9, 2), np.float32), "reward": np.zeros(9), "done": np.zeros(9, np.int64)})
    config = AugmentTokensConfig(permute_action="input", max_num_actions=2)
    assert_raises(ConfigError, "action: expected integer codes", BatchSource, store, 2, 2, augment=config)
    BatchSource(store, 2, 2, augment=AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(action=0.5)))[0]
    with pytest.raises(DataError, match=rf"obs_discrete: expected 0..2, found [3-{STATES}] at row"):
        source(full_config(max_num_obs_discrete=3))[0]
    config = AugmentTokensConfig(permute_obs_discrete=True, crop_obs_image=RandomShift(), scale_reward=UNIFORM)
    batch = source(config, fields=["reward"])[0]
    assert set(batch) == {"reward"}
