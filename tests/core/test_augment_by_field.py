"""Augmentation of fields by their names: which values come, in plain Python, also at offsets around an anchor."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mouse_core import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    BatchSource,
    ConfigError,
    DataError,
    DatasetStore,
    Field,
    MaskFields,
    PermuteFields,
    PrefetchBatchifier,
    RandomCrop,
    ScaleFields,
    SchemaError,
    StateError,
    TokenAugmenter,
)
from mouse_core.augment import Affine, AffineFields, apply, draw
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import UNIFORM, assert_same, oracle
from tests.raising import assert_raises

ACTIONS, SIZE, LENGTH = 5, 6, 4
KEY = Key(7, Purpose.AUGMENT, 11)


@dataclass(frozen=True)
class FlipAndShake(AffineFields):
    """Signs of two values, drawn once for each window, and noise at every step."""

    def affine(self, stream: Callable[[str], Key], shape: tuple[int, int]) -> Affine:
        signs = stream("signs").integers(2, 2 * shape[0]).reshape(shape[0], 1, 2) * 2.0 - 1
        return Affine(signs, stream("noise").normal(shape[0] * shape[1] * 2).reshape(*shape, 2))


CONFIG = AugmentTokensConfig(
    by_field=[
        PermuteFields(ACTIONS, codes=["action", "previous"], columns=["q_star", "legal"]),
        PermuteFields(3, codes="room"),
        ScaleFields("torque", endpoints=((-2, 0), (2, 1))),
        ScaleFields(["left", "right"], scale=UNIFORM, shift=AugmentScalarSpec(mean=0.5, std=1.0)),
        FlipAndShake("hand"),
        MaskFields(["torque", "room"], 0.4, 2),
        MaskFields("left", 0.3, math.nan),
        MaskFields("legal", 0.3, True),
        MaskFields("time", 0.3),
    ],
    deliver_masks=True,
)


def make_batch(*, offsets: tuple[int, ...] = (), size: int = SIZE) -> dict[str, np.ndarray]:
    random, shape = np.random.default_rng(3), (size, LENGTH, *offsets)
    return {
        "action": random.integers(0, ACTIONS, shape),
        "previous": random.integers(0, ACTIONS, shape).astype(np.uint8),
        "q_star": random.normal(size=(*shape, ACTIONS)).astype(np.float32),
        "legal": random.random((*shape, ACTIONS)) < 0.5,
        "room": random.integers(0, 3, shape).astype(np.int16),
        "torque": random.normal(size=(*shape, 2)).astype(np.float32),
        "left": random.normal(size=(*shape, 3)),
        "right": random.normal(size=shape).astype(np.float32),
        "time": random.integers(0, 99, shape),
        "else": random.normal(size=shape),
        "hand": random.normal(size=(*shape, 2)).astype(np.float32),
    }


@pytest.mark.parametrize("offsets", [(), (1,), (3,), (ACTIONS,)], ids=str)
def test_values_are_those_by_hand(offsets: tuple[int, ...]) -> None:
    batch = make_batch(offsets=offsets)
    kept = {name: values.copy() for name, values in batch.items()}
    draws = draw(CONFIG, KEY, (SIZE, LENGTH), fields=batch)
    augmented = apply(batch, draws)
    assert_same(augmented, oracle(kept, draws))
    fills = {"torque": 2, "room": 2, "left": math.nan, "legal": True, "time": -1}
    for name, fill in fills.items():
        np.testing.assert_array_equal(augmented[name][draws.delivered_masks[name]], fill)
    assert_same(batch, kept)
    assert augmented["else"] is batch["else"]


def test_fields_of_one_permutation_stay_in_step_and_endpoints_become_what_they_are_said_to() -> None:
    batch = make_batch()
    augmented = apply(batch, draw(CONFIG, KEY, (SIZE, LENGTH)))
    for codes in ("action", "previous"):
        before = np.take_along_axis(batch["q_star"], batch[codes][..., None].astype(int), 2)
        after = np.take_along_axis(augmented["q_star"], augmented[codes][..., None].astype(int), 2)
        assert np.array_equal(before, after)
    assert (augmented["action"] != batch["action"]).any()
    numbers = np.array([[-2.0, 0.0, 2.0, 4.0]])
    config = AugmentTokensConfig(by_field=[ScaleFields("x", endpoints=((-2, 0), (2, 1)))])
    assert apply({"x": numbers}, draw(config, KEY, (1, 4)))["x"].tolist() == [[0.0, 0.5, 1.0, 1.5]]
    turned = AugmentTokensConfig(by_field=[ScaleFields("x", endpoints=((0, 10), (2, 0)))])
    assert apply({"x": numbers}, draw(turned, KEY, (1, 4)))["x"].tolist() == [[20.0, 10.0, 0.0, -10.0]]


def test_masks_and_permutations_are_drawn_by_field_and_other_states_refused() -> None:
    one, other = (draw(CONFIG, KEY.with_call(call), (64, 32)) for call in range(2))
    assert np.array_equal(one.delivered_masks["torque"], one.delivered_masks["room"])
    assert not np.array_equal(one.delivered_masks["torque"], one.delivered_masks["left"])
    assert not np.array_equal(one.delivered_masks["torque"], other.delivered_masks["torque"])
    assert np.array_equal(one.permutations["room"], other.permutations["room"])
    assert abs(one.delivered_masks["torque"].mean() - 0.4) < 5 * math.sqrt(0.24 / 2048)
    asked = {"batch_size": 6, "seed": 5, "dtypes": DTYPES, "augment": AUGMENT, **WINDOWS[1]}
    store = make_store()
    with PrefetchBatchifier(store, **asked) as loader:
        state = loader.state_dict()
    other = AugmentTokensConfig(by_field=AUGMENT.by_field[:2], permute_done=True)
    with PrefetchBatchifier(store, **asked | {"augment": other}) as loader, pytest.raises(StateError, match="augment"):
        loader.load_state_dict(state)


def test_what_one_draws_does_not_depend_on_what_else_is_asked_for() -> None:
    whole = draw(CONFIG, KEY, (SIZE, LENGTH))
    for part in CONFIG.by_field:
        alone = draw(AugmentTokensConfig(by_field=[part], deliver_masks=True), KEY, (SIZE, LENGTH))
        for kind in ("permutations", "columns", "affine", "delivered_masks"):
            for name, drawn in getattr(alone, kind).items():
                assert all(map(np.array_equal, drawn, getattr(whole, kind)[name]))
    turned = AugmentTokensConfig(by_field=CONFIG.by_field[::-1], permute_done=True, deliver_masks=True)
    assert np.array_equal(draw(turned, KEY, (SIZE, LENGTH)).columns["legal"], whole.columns["legal"])
    drawn = [
        draw(AugmentTokensConfig(by_field=[PermuteFields(50, codes=name)]), KEY, (4, 1)).permutations[name]
        for name in ("one", "other")
    ]
    assert not np.array_equal(*drawn)


REFUSED: list[tuple[Any, str]] = [
    (lambda: PermuteFields(0, codes="a"), "PermuteFields: size: expected an integer of at least 1, found 0"),
    (lambda: PermuteFields(3), "PermuteFields: expected at least one field, found none"),
    (lambda: PermuteFields(3, codes="a", columns="a"), "each field to be named once, found a 2 times"),
    (lambda: PermuteFields(3, codes=[1]), "PermuteFields: codes: expected names of fields, found 1"),
    (lambda: ScaleFields("a"), "ScaleFields: a: expected scale, shift or both, or endpoints, found neither"),
    (lambda: ScaleFields("a", UNIFORM, endpoints=((0, 1), (1, 2))), "found endpoints beside them"),
    (
        lambda: ScaleFields("a", endpoints=((1, 0), (1, 2))),
        "ScaleFields: a: endpoints: expected two different numbers",
    ),
    (lambda: ScaleFields("a", endpoints=(1, 2)), "ScaleFields: a: expected endpoints as"),
    (lambda: ScaleFields("a", scale=2.0), "ScaleFields: a: scale: expected AugmentScalarSpec"),
    (lambda: MaskFields("a", 1.5), "MaskFields: a: probability: expected a number from 0 to 1, found 1.5"),
    (lambda: MaskFields("a", 0.5, "x"), "MaskFields: a: expected a number of at most 64 bits as value, found 'x'"),
    (lambda: MaskFields("a", 0.5, 1 << 63), "of at most 64 bits"),
    (lambda: AugmentTokensConfig(by_field=MaskFields("a", 0.5)), "by_field: expected a list of PermuteFields"),
    (lambda: AugmentTokensConfig(by_field=["a"]), "by_field: expected a list of PermuteFields"),
    (
        lambda: AugmentTokensConfig(permute_action="both", by_field=[PermuteFields(2, columns="q_star")]),
        "expected each field to be permuted once, found q_star 2 times",
    ),
    (
        lambda: AugmentTokensConfig(scale_obs=UNIFORM, by_field=[ScaleFields("obs_continuous", UNIFORM)]),
        "expected each field to be scaled once, found obs_continuous 2 times",
    ),
    (
        lambda: AugmentTokensConfig(
            mask_prob=AugmentMaskProbConfig(reward=0.1), by_field=[MaskFields(["x", "reward"], 0.1)]
        ),
        "expected each field to be masked once, found reward 2 times",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_configurations_that_are_none(make: Any, message: str) -> None:
    assert_raises(ConfigError, re.escape(message), make)


FIELDS = [
    Field("previous", transition=True),
    Field("legal"),
    Field("room"),
    Field("torque", dtype="float32"),
    Field("camera", image=True),
    Field("hand", dtype="float32"),
]


def make_store(rows: int = 90, **options: Any) -> DatasetStore:
    random = np.random.default_rng(1)
    store = DatasetStore(fields=FIELDS, max_action_dim=ACTIONS, **options)
    steps = np.arange(rows) % 30
    store.extend(
        {
            "action": random.integers(0, ACTIONS, rows),
            "previous": random.integers(0, ACTIONS, rows).astype(np.int8),
            "reward": random.normal(size=rows),
            "done": np.where(steps == 29, 1, 0),
            "episode_step": steps,
            "metadata_q_star": random.normal(size=(rows, ACTIONS)),
            "legal": random.integers(0, 2, (rows, ACTIONS)).astype(np.uint8),
            "room": random.integers(0, 3, rows).astype(np.uint8),
            "torque": random.normal(size=(rows, 2)),
            "observation_image": random.integers(0, 256, (rows, 6, 5, 1), dtype=np.uint8),
            "hand": random.normal(size=(rows, 2)),
        }
    )
    return store


AUGMENT = AugmentTokensConfig(
    by_field=[
        PermuteFields(ACTIONS, codes=["action", "previous"], columns=["q_star", "legal"]),
        ScaleFields("torque", endpoints=((-1, -10), (1, 10))),
        FlipAndShake("hand"),
        MaskFields(["room", "torque"], 0.3, 300),
    ],
    permute_done=True,
    mask_prob=AugmentMaskProbConfig(time=0.2),
)
DTYPES = {"room": "int64", "legal": "int64"}
WINDOWS: list[dict[str, Any]] = [
    {"sequence_length": 4},
    {"sequence_length": None, "windows": {"action": range(5), "q_star": [-1, 0, 2], "time": [0, 1], "torque": [-1, 0]}},
    {"sequence_length": 3, "windows": {"action": range(3), "q_star": [0], "done": [0, 1], "room": [-2, 0]}},
]


@pytest.mark.parametrize("options", WINDOWS, ids=["plain", "anchors", "anchors and steps"])
def test_sources_deliver_what_apply_makes_in_views_shards_and_stored_dtypes(options: dict[str, Any]) -> None:
    asked = {"batch_size": 6, "seed": 5, "dtypes": DTYPES, **options}
    store = make_store()
    plain, augmented = BatchSource(store, **asked), BatchSource(store, augment=AUGMENT, **asked)
    assert augmented.spec.batch_dims == plain.spec.batch_dims
    for index in range(4):
        batch, plan = plain[index], plain.plan(index)
        draws = draw(AUGMENT, plan.key, (6, plan.length), fields=batch)
        expected = apply(batch, draws, batch_dims=plain.spec.batch_dims)
        assert_same(augmented[index], expected)
        assert (augmented[index]["action"] != batch["action"]).any()
        for name, spec in augmented.spec.items():
            found = augmented[index][name]
            assert (found.dtype, found.shape[plain.spec.batch_dims :]) == (spec.dtype, spec.shape)
    asked = {"batch_size": 6, "seed": 5, "dtypes": DTYPES, "augment": AUGMENT, **options}
    store = make_store()
    one, views = BatchSource(store, **asked), BatchSource(store, views=2, **asked)
    first, second = views[3]
    assert_same(first, one[3])
    assert np.array_equal(first["action"], second["action"])
    assert not np.array_equal(first["room"], second["room"])
    assert not any(np.shares_memory(first[name], second[name]) for name in first)
    parts = [BatchSource(store, shard=(rank, 3), **asked)[3] for rank in range(3)]
    assert_same({name: np.concatenate([part[name] for part in parts]) for name in first}, first)
    stored = one.gather(one.plan(3), stored=True)
    assert_same({name: stored[name].astype(spec.dtype) for name, spec in one.spec.items()}, first)
    out = {name: np.empty((6, *first[name].shape[1:]), one.spec[name].dtype) for name in first}
    assert_same(one.gather(one.plan(3), out), first)


def test_offsets_of_an_anchor_share_a_permutation_a_mask_and_a_crop() -> None:
    store = make_store()
    config = AugmentTokensConfig(
        permute_action="both", crop_obs_image=RandomCrop(3, 2), by_field=[MaskFields("room", 0.5, 9)]
    )
    asked = {
        "sequence_length": None,
        "batch_size": 8,
        "windows": {"action": range(3), "q_star": range(3), "room": [0, 1, 2], "obs_image": [0, 0]},
    }
    source = BatchSource(store, augment=config, **asked)
    plain, batch = BatchSource(store, **asked)[0], source[0]
    values = [np.take_along_axis(made["q_star"], made["action"][..., None], 2) for made in (plain, batch)]
    assert np.array_equal(*values)
    assert not np.array_equal(plain["action"], batch["action"])
    assert set((batch["room"] == 9).sum(axis=1)) <= {0, 3}
    assert np.array_equal(batch["obs_image"][:, 0], batch["obs_image"][:, 1])
    assert source.spec["obs_image"].shape == (2, 6)
    assert batch["obs_image"].shape == (8, 2, 6)
    for row in range(8):
        images = plain["obs_image"][row, 0].reshape(6, 5)
        assert any(
            np.array_equal(images[y : y + 3, x : x + 2].ravel(), batch["obs_image"][row, 0])
            for y in range(4)
            for x in range(4)
        )


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (PermuteFields(5, codes="actoin"), {}, "by_field: expected fields among"),
    (MaskFields("episode_step", 0.1), {}, "'episode_step'; column 'episode_step' is read as the field 'time'"),
    (MaskFields("acton", 0.1), {"windows": {"action": [0]}}, "'acton'; did you mean 'action'?"),
    (MaskFields("action_mask", 0.1), {"windows": {"action": [0]}}, "found 'action_mask', a mask of missing"),
    (MaskFields("mask", 0.1), {"lengths": [1, 2], "boundary": "episode"}, "found 'mask', a mask of missing"),
    (PermuteFields(5, codes="torque"), {}, "torque: expected integer codes"),
    (PermuteFields(4, columns="legal"), {}, "legal: expected [B, S, 4] for 4 codes"),
    (ScaleFields("room", UNIFORM), {}, "room: expected a floating dtype to scale or shift, found uint8"),
    (FlipAndShake("reward"), {}, "reward: expected a scale and a shift that fit shape (1, 1), found (1, 1, 2)"),
    (
        MaskFields("room", 0.1, 300),
        {},
        "room: expected a dtype that can represent 300, because masked values become 300, found uint8",
    ),
    (
        MaskFields("room", 0.1, 0.5),
        {},
        "room: expected a dtype that can represent 0.5, because masked values become 0.5",
    ),
    (
        MaskFields("action", 0.1, math.nan),
        {},
        "action: expected a dtype that can represent nan, because masked values become nan",
    ),
    (
        MaskFields("torque", 0.1, 1e300),
        {},
        "torque: expected a dtype that can represent 1e+300, because masked values become 1e+300",
    ),
    (
        MaskFields("action", 0.1),
        {"windows": {"action": [0, 1]}, "pad": -1},
        "pad: with augment or views, expected True or False",
    ),
]


@pytest.mark.parametrize(("part", "options", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_what_does_not_suit_a_source(part: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        BatchSource(make_store(), augment=AugmentTokensConfig(by_field=[part]), **options)


def test_a_code_out_of_range_names_its_place_and_delivered_masks_stay() -> None:
    config = AugmentTokensConfig(by_field=[MaskFields("room", 0.1)], deliver_masks=True)
    assert BatchSource(make_store(), augment=config, windows={"action": [0]})[0]["room_mask"].dtype == bool
    with pytest.raises(ConfigError, match="deliver_masks: room: expected a batch without a field room_mask"):
        BatchSource(make_store(), augment=config, windows={"room": [0]})
    config = AugmentTokensConfig(by_field=[PermuteFields(2, codes="room")])
    batch = {"room": np.zeros((2, 3, 4), np.int64)}
    batch["room"][1, 2, 3] = 2
    with pytest.raises(DataError, match=r"room: expected 0\.\.1, found 2 at row 1, step 2, offset 3 of the batch"):
        apply(batch, draw(config, KEY, (2, 3)))


def test_the_augmenter_takes_fields_by_name_with_and_without_steps() -> None:
    batch = make_batch()
    augmenter = TokenAugmenter(CONFIG, seed=KEY.seed)
    augmenter.update_augmentations(batch)
    draws = draw(CONFIG, Key(KEY.seed, Purpose.AUGMENT, 0), (SIZE, LENGTH))
    assert_same(augmenter(batch), apply(batch, draws))
    single = {name: values[:, 0] for name, values in batch.items()}
    augmenter = TokenAugmenter(CONFIG, seed=KEY.seed, batch_dims=1)
    augmenter.update_augmentations(single)
    draws = draw(CONFIG, Key(KEY.seed, Purpose.AUGMENT, 0), (SIZE, 1))
    found = augmenter(single)
    assert_same(found, apply(single, draws, batch_dims=1))
    assert found["torque_mask"].shape == (SIZE,)
    batch = make_batch()
    del batch["legal"]
    augmenter = TokenAugmenter(CONFIG)
    with pytest.raises(ConfigError, match=r"by_field: expected fields among .*, found 'legal'"):
        augmenter.update_augmentations(batch)
    narrow = {**make_batch(), "room": np.zeros((SIZE, LENGTH), np.uint8)}
    augmenter = TokenAugmenter(AugmentTokensConfig(by_field=[MaskFields("room", 0.5, 256)]))
    augmenter.update_augmentations(narrow)
    with pytest.raises(
        SchemaError,
        match="room: expected a dtype that can represent 256, because masked values become 256, found uint8",
    ):
        augmenter(narrow)
    assert_raises(ConfigError, "batch_dims", TokenAugmenter, CONFIG, batch_dims=3)
