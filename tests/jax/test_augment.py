"""Augmentation in JAX, eager and compiled: the bits of NumPy."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mouse_jax
from mouse_core import ConfigError
from mouse_core.augment import AugmentTokensConfig, Draws, RandomCrop, RandomShift, apply, draw
from mouse_core.randomness import Key, Purpose
from tests.core.augment_cases import IMAGE, UNIFORM, Batch, assert_same, configs, full_config, make_batch

WIDE = {"int64": "int32", "float64": "float32"}


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    with jax.enable_x64(request.param):
        yield request.param


def narrowed(batch: Batch, *, x64: bool = False) -> Batch:
    """The batch in dtypes that JAX can hold."""
    return {
        name: values if x64 else values.astype(WIDE.get(values.dtype.name, values.dtype))
        for name, values in batch.items()
    }


def on_jax(batch: Batch) -> dict[str, jax.Array]:
    # Copies: JAX may keep the memory of arrays that it is given.
    return {name: jnp.asarray(values.copy()) for name, values in batch.items()}


def draw_for(config: AugmentTokensConfig, seed: int = 0) -> Draws:
    return draw(config, Key(seed, Purpose.AUGMENT), (3, 4), image_shape=IMAGE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str, x64: bool) -> None:
    values = jnp.asarray(make_batch(batch=20, length=20)["reward"]).astype(dtype)
    config = AugmentTokensConfig(scale_reward=UNIFORM, shift_reward=UNIFORM)
    draws = draw(config, Key(0, Purpose.AUGMENT), (20, 20))
    found = apply({"reward": values}, draws)["reward"]
    assert found.dtype == dtype
    if dtype == "float16":
        assert_same({"reward": found}, dict(apply({"reward": np.asarray(values)}, draws)))


def test_compiled_once_it_gives_the_bits_of_numpy(x64: bool) -> None:
    config = full_config(crop_obs_image=RandomCrop(4, 3) if x64 else RandomShift(2, "step"))
    traced = []

    @jax.jit
    def augment(batch: Any, draws: Draws) -> Any:
        traced.append(batch["reward"].shape)
        return apply(batch, draws)

    for seed in range(8):
        batch = narrowed(make_batch(seed), x64=x64)
        draws = draw_for(config, seed)
        assert_same(augment(on_jax(batch), draws), dict(apply(batch, draws)))
    assert len(traced) == 1
    assert augment._cache_size() == 1
    # Another shape compiles anew, so counting can tell.
    augment(on_jax(make_batch(batch=2)), draw(config, Key(0, Purpose.AUGMENT), (2, 4), image_shape=IMAGE))
    assert len(traced) == 2


@pytest.mark.slow
@given(config=configs(), seed=st.integers(0, 2**64 - 1))
def test_compiled_for_any_configuration(config: AugmentTokensConfig, seed: int) -> None:
    batch = narrowed(make_batch(seed % 1000))
    draws = draw_for(config, seed)
    assert_same(jax.jit(apply)(on_jax(batch), draws), dict(apply(batch, draws)))


def test_compiled_it_rounds_twice(x64: bool) -> None:
    """Many numbers: compiled as one operation, a third of them would differ."""
    rng = np.random.default_rng(0)
    batch = narrowed({"obs_continuous": rng.normal(size=(64, 64, 17))}, x64=x64)
    draws = draw(AugmentTokensConfig(scale_obs=UNIFORM, shift_obs=UNIFORM), Key(0, Purpose.AUGMENT), (64, 64))
    assert_same(jax.jit(apply)(on_jax(batch), draws), dict(apply(batch, draws)))


def test_draws_are_a_pytree() -> None:
    draws = draw_for(full_config())
    leaves, structure = jax.tree.flatten(draws)
    assert len(leaves) > 15
    assert isinstance(jax.tree.unflatten(structure, leaves), Draws)
    hidden = draw_for(full_config(deliver_masks=False))
    assert jax.tree.structure(hidden) != structure  # what is delivered is known when it is compiled


def test_flat_images_under_jit() -> None:
    config = full_config(crop_obs_image=RandomCrop(4, 3))
    batch = narrowed(make_batch(flat_images=True))
    draws = draw_for(config)
    compiled = jax.jit(lambda batch, draws: apply(batch, draws, image_shape=IMAGE))
    expected = apply(batch, draws, image_shape=IMAGE)["obs_image"]
    assert expected.shape == (3, 4, 24)
    np.testing.assert_array_equal(compiled(on_jax(batch), draws)["obs_image"], expected)


def test_an_augmenter_refuses_to_be_traced() -> None:
    batch = on_jax(narrowed(make_batch()))
    augmenter = mouse_jax.TokenAugmenter(AugmentTokensConfig(permute_action="both"))
    augmenter.update_augmentations(batch)
    with pytest.raises(ConfigError, match=r"found traced arrays.*next_draws"):
        jax.jit(augmenter)(batch)
