"""Augmentation inside sources and loaders: what they deliver, declare and remember."""

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, PrefetchBatchifier, StateError
from mouse_core.augment import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    RandomCrop,
    RandomShift,
    apply,
    draw,
)
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import FIELDS, IMAGE, STATES, UNIFORM, assert_same, configs, full_config, make_store
from tests.raising import assert_raises

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
