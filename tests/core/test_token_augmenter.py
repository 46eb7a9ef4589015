"""TokenAugmenter over NumPy batches: what its updates and calls draw, and its state."""

import copy
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, DataError, SchemaError, StateError
from mouse_core.augment import AugmentTokensConfig, RandomShift, TokenAugmenter, apply, draw
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import ACTIONS, FIELDS, IMAGE, STATES, Batch, assert_same, full_config, make_batch


def augmenter(config: AugmentTokensConfig | None = None, **options: Any) -> TokenAugmenter:
    return TokenAugmenter(
        augment=config or full_config(max_num_actions=0, max_num_obs_discrete=0),
        **{"max_num_actions": ACTIONS, "max_num_obs_discrete": STATES, "device": "cpu", "seed": 4} | options,
    )


def test_it_draws_as_the_functions_do() -> None:
    batch = make_batch()
    shell = augmenter()
    for update in range(3):
        shell.update_augmentations(batch)
        for call in range(3):
            draws = draw(full_config(), Key(4, Purpose.AUGMENT, update, call), (3, 4), image_shape=IMAGE)
            assert_same(shell(batch), dict(apply(batch, draws)))


def test_calls_share_permutations_and_scalars_and_differ_in_masks() -> None:
    batch = make_batch(batch=32)
    shell = augmenter()
    shell.update_augmentations(batch)
    one, other = shell(batch), shell(batch)
    for name in FIELDS:
        hidden = one[f"{name}_mask"] | other[f"{name}_mask"]
        np.testing.assert_array_equal(one[name][~hidden], other[name][~hidden])
        assert not np.array_equal(one[f"{name}_mask"], other[f"{name}_mask"])
    shell.update_augmentations(batch)
    assert not np.array_equal(shell(batch)["reward"], one["reward"])


def test_nothing_enabled_gives_the_very_same_object() -> None:
    batch = make_batch()
    for config in (AugmentTokensConfig(), full_config(enabled=False)):
        shell = augmenter(config)
        assert shell(batch) is batch
        shell.update_augmentations(batch)
        assert shell(batch) is batch
    none: Batch = {"log_prob": np.zeros((3, 4))}
    shell = augmenter()
    shell.update_augmentations(none)
    assert shell(none) is none


def test_the_number_of_actions_may_come_from_q_star() -> None:
    batch = make_batch()
    shell = TokenAugmenter(AugmentTokensConfig(permute_action="both"))
    shell.update_augmentations(batch)
    assert np.array_equal(np.sort(shell(batch)["q_star"], axis=2), np.sort(batch["q_star"], axis=2), equal_nan=True)
    del batch["q_star"]
    with pytest.raises(ConfigError, match="expected max_num_actions"):
        shell.update_augmentations(batch)


def test_flat_images_are_shifted_where_their_shape_is_known() -> None:
    config = AugmentTokensConfig(crop_obs_image=RandomShift(1))
    flat, square = make_batch(flat_images=True), make_batch()
    shell, other = TokenAugmenter(config, image_shape=IMAGE), TokenAugmenter(config)
    shell.update_augmentations(flat)
    other.update_augmentations(square)
    np.testing.assert_array_equal(
        shell(flat)["obs_image"].reshape(square["obs_image"].shape), other(square)["obs_image"]
    )
    with pytest.raises(ConfigError, match="expected the image_shape"):
        other.update_augmentations(flat)


def test_its_state_goes_on_where_it_was() -> None:
    batch = make_batch()
    shell = augmenter()
    for _ in range(3):
        shell.update_augmentations(batch)
        shell(batch)
    state = copy.copy(shell.state_dict())
    assert state == {"seed": 4, "updates": 3, "calls": 1}
    expected = [shell(batch)]
    shell.update_augmentations(batch)
    expected.append(shell(batch))

    other = augmenter(seed=99)
    other.load_state_dict(state)
    assert_same(other(batch), expected[0])
    other.update_augmentations(batch)
    assert_same(other(batch), expected[1])


def test_a_state_that_is_none() -> None:
    shell = augmenter()
    before = shell.state_dict()
    good = {"seed": 1, "updates": 1, "calls": 0}
    states: list[dict[str, Any]] = [{}, {"seed": 1, "updates": 1}, good | {"calls": -1}]
    for state in [*states, *(good | {"seed": seed} for seed in (1.5, 2**64, True))]:
        with pytest.raises(StateError, match="state: "):
            shell.load_state_dict(state)
        assert shell.state_dict() == before


def test_mistakes() -> None:
    batch = make_batch()
    with pytest.raises(ConfigError, match="augment: expected an AugmentTokensConfig"):
        TokenAugmenter({"permute_done": True})  # type: ignore[arg-type]
    wrong: dict[str, Any] = {"device": "cuda", "seed": -1, "max_num_actions": -3}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name}: expected"):
            augmenter(**{name: value})
    shell = augmenter()
    with pytest.raises(StateError, match="expected a call of update_augmentations"):
        shell(batch)
    shell.update_augmentations(batch)
    with pytest.raises(SchemaError, match=r"expected a batch of shape \[3, 4\], .* found shape \[2, 4\]"):
        shell(make_batch(batch=2))
    with pytest.raises(SchemaError, match=r"reward: expected \[B, S, ...\]"):
        shell.update_augmentations({"reward": np.zeros(3, np.float32)})
    with pytest.raises(SchemaError, match="found an empty batch"):
        shell.update_augmentations({})


def test_range_is_checked_unless_told_not_to() -> None:
    batch = make_batch()
    batch["action"][0, 1] = ACTIONS
    checked, trusting = augmenter(), augmenter(validate=False)
    for shell in (checked, trusting):
        shell.update_augmentations(batch)
    with pytest.raises(DataError, match=f"action: expected 0..4, found {ACTIONS} at row 0, step 1"):
        checked(batch)
    trusting(batch)
