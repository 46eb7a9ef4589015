"""TokenAugmenter and augmented loaders in torch: the same values as in NumPy, to the bit."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import mouse_torch
from mouse_core import BatchSource, DataError
from mouse_core.augment import AugmentTokensConfig, apply, draw
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import IMAGE, UNIFORM, Batch, assert_same, configs, full_config, make_batch, make_store

DTYPES = {
    "action": ["int64", "int32", "int16", "uint8"],
    "reward": ["float32", "float64", "float16"],
    "time": ["int64", "int32"],
    "q_star": ["float32", "float16"],
    "obs_continuous": ["float64", "float32", "float16"],
    "obs_discrete": ["int64", "uint8"],
    "obs_image": ["int64", "uint8", "float32"],
}


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values.copy()) for name, values in batch.items()}


def tensordict(batch: Batch) -> TensorDict:
    return TensorDict(tensors(batch), batch_size=batch["reward"].shape)


def arrays(batch: Any) -> Batch:
    return {name: values.cpu().numpy() for name, values in batch.items()}


@given(data=st.data(), config=configs(), seed=st.integers(0, 2**64 - 1))
def test_torch_gives_the_bits_of_numpy(data: st.DataObject, config: AugmentTokensConfig, seed: int) -> None:
    batch = make_batch(seed % 1000, 3, 4)
    for name, choices in DTYPES.items():
        batch[name] = batch[name].astype(data.draw(st.sampled_from(choices)))
    draws = draw(config, Key(seed, Purpose.AUGMENT), (3, 4), image_shape=IMAGE)
    expected = apply(batch, draws)
    for validate in (None, False):
        given_batch = tensors(batch)
        found = apply(given_batch, draws, validate=validate)
        assert_same(arrays(found), dict(expected))
        assert_same(arrays(given_batch), batch)
        assert (found is given_batch) == (expected is batch)


def test_bfloat16_and_flat_images() -> None:
    batch = tensors(make_batch(flat_images=True))
    batch["reward"] = batch["reward"].to(torch.bfloat16)
    config = full_config()
    draws = draw(config, Key(0, Purpose.AUGMENT), (3, 4), image_shape=IMAGE)
    augmented = apply(batch, draws, image_shape=IMAGE)
    assert augmented["reward"].dtype == torch.bfloat16
    expected = apply(make_batch(flat_images=True), draws, image_shape=IMAGE)
    np.testing.assert_array_equal(augmented["obs_image"].numpy(), expected["obs_image"])


def test_what_is_no_field_passes_through() -> None:
    steps = tensordict(make_batch())
    steps["next"] = TensorDict({"reward": steps["reward"].clone()}, batch_size=steps.batch_size)
    steps["note"] = "anything"
    steps.lock_()
    augmenter = mouse_torch.TokenAugmenter(AugmentTokensConfig(scale_reward=UNIFORM))
    augmenter.update_augmentations(steps)
    augmented = augmenter(steps)
    assert augmented["note"] == "anything"
    torch.testing.assert_close(augmented["next", "reward"], steps["next", "reward"], equal_nan=True)
    assert augmented["obs_image"] is steps["obs_image"]
    assert not torch.equal(augmented["reward"], steps["reward"])
    augmented["reward"].zero_()
    assert_same(arrays(steps.select("reward", "action")), {name: make_batch()[name] for name in ("reward", "action")})


@pytest.mark.parametrize("views", [1, 2])
def test_batches_in_slabs_hold_the_same(views: int) -> None:
    """What pinned memory and devices take, in plain memory: there is no accelerator here."""
    from mouse_torch.transfer import device_maker, hand_over

    source: Any = BatchSource(make_store(), 5, 4, augment=full_config(), views=views)
    made: Any = hand_over(device_maker(source, device=torch.device("cpu"), pin=False)(2))
    for found, expected in zip(made, source[2], strict=True) if views > 1 else [(made, source[2])]:
        assert_same(arrays(found), expected)


@pytest.mark.cuda
def test_on_a_device() -> None:
    store, config = make_store(), full_config()
    source: Any = BatchSource(store, 5, 4, augment=config, views=2)
    with mouse_torch.PrefetchBatchifier(store, 5, 4, augment=config, views=2, device="cuda") as loader:
        for index in range(4):
            views: Any = loader.next_batch()
            for view, other in zip(views, source[index], strict=True):
                assert view["reward"].is_cuda
                assert_same(arrays(view), other)
    batch = make_batch()
    draws = draw(config, Key(0, Purpose.AUGMENT), (3, 4), image_shape=IMAGE)
    expected = dict(apply(batch, draws))
    for device_draws in (draws, draws.map(lambda values: torch.as_tensor(values, device="cuda"))):
        on_device = {name: values.cuda() for name, values in tensors(batch).items()}
        assert_same(arrays(apply(on_device, device_draws)), expected)
    steps = tensordict(batch).cuda()
    augmenter = mouse_torch.TokenAugmenter(config, device="cuda")
    augmenter.update_augmentations(steps)
    assert_same(arrays(augmenter(steps)), expected)
    steps["action"][1, 2] = 99
    assert int(augmenter(steps)["action"][1, 2]) in (0, 99)
    with pytest.raises(DataError, match=r"action: expected 0..4, found 99"):
        apply(dict(steps.items()), draws, validate=True)
