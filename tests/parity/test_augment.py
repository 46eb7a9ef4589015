"""Augmentation has the same bits in NumPy, PyTorch and JAX, eager and compiled, on the host and on devices."""

from collections.abc import Iterator
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import BatchSource, ConfigError, DataError
from mouse_core.augment import AugmentTokensConfig, Draws, RandomCrop, RandomShift, apply, draw
from mouse_core.nested import map_tree
from mouse_core.randomness import Key, Purpose
from mouse_core.testing import as_arrays
from tests.core import test_augment_by_field as by_field
from tests.core import test_augment_cameras as cameras
from tests.core.augment_cases import (
    ACTIONS,
    IMAGE,
    STATES,
    UNIFORM,
    Batch,
    assert_same,
    configs,
    full_config,
    make_batch,
    make_store,
)

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}


class Framework(NamedTuple):
    """A package with its arrays, which are narrower than NumPy's in JAX without 64 bits."""

    package: Any
    x64: bool = True

    def narrowed(self, batch: Batch) -> Batch:
        replaced = {} if self.x64 else mouse_jax.REPLACED_DTYPES
        return {name: values.astype(replaced.get(values.dtype, values.dtype)) for name, values in batch.items()}

    def given(self, batch: Batch, dims: int = 2) -> Any:
        if self.package is mouse_core:
            return batch
        # Copies: JAX may keep the memory of arrays that it is given.
        if self.package is mouse_jax:
            return {name: jnp.asarray(values.copy()) for name, values in batch.items()}
        tensors = {name: torch.from_numpy(values.copy()) for name, values in batch.items()}
        return TensorDict(tensors, batch_size=next(iter(batch.values())).shape[:dims])

    def apply(self, steps: Any, draws: Draws, **options: Any) -> Batch:
        """Compiled in JAX."""
        if self.package is mouse_jax:
            return as_arrays(jax.jit(lambda arrays, drawn: apply(arrays, drawn, **options))(steps, draws))
        return as_arrays(apply(dict(steps.items()), draws, **options))


TORCH = Framework(mouse_torch)


@pytest.fixture(params=["torch", "jax", "jax with 64 bits"])
def framework(request: pytest.FixtureRequest) -> Iterator[Framework]:
    with jax.enable_x64(request.param.endswith("bits")):
        yield Framework(PACKAGES[request.param.split()[0]], request.param != "jax")


def draws_of(config: AugmentTokensConfig, seed: int = 0, size: tuple[int, int] = (3, 4)) -> Draws:
    return draw(config, Key(seed, Purpose.AUGMENT), size, image_shape=IMAGE)


# A configuration, a batch, and how many of its axes are windows and steps.
BY_NAME: dict[str, Any] = {
    "steps": (by_field.CONFIG, lambda: by_field.make_batch(offsets=(3,)), 2, {}),
    "no steps": (
        by_field.CONFIG,
        lambda: map_tree(itemgetter(np.s_[:, 0]), by_field.make_batch(offsets=(3,))),
        1,
        {},
    ),
    "cameras": (cameras.CONFIG, cameras.cameras, 2, {"image_shape": cameras.SHAPES}),
}


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("name", BY_NAME)
def test_apply_and_augmenters_agree_on_fields_by_name(name: str, x64: bool) -> None:
    config, make, dims, shapes = BY_NAME[name]
    batch = make() if x64 else Framework(mouse_jax, x64=False).narrowed(make())
    with jax.enable_x64(x64):
        found, frameworks = {}, {name: Framework(package) for name, package in PACKAGES.items()}
        for package, one in frameworks.items():
            augmenter = one.package.TokenAugmenter(config, seed=4, batch_dims=dims)
            steps = one.given(batch, dims)
            augmenter.update_augmentations(steps)
            found[package] = as_arrays(augmenter(steps))
        for package in ("torch", "jax"):
            assert_same(found[package], found["numpy"])
        size = next(iter(batch.values())).shape[:dims]
        draws = draw(config, Key(4, Purpose.AUGMENT, 0), (size[0], size[-1] if dims == 2 else 1), **shapes)
        jitted = frameworks["jax"].apply(frameworks["jax"].given(batch), draws, batch_dims=dims)
        assert_same(jitted, found["numpy"])


@pytest.mark.slow
def test_augmenters_give_what_that_of_numpy_gives(framework: Framework) -> None:
    batch = framework.narrowed(make_batch())
    config = full_config(max_num_actions=0, max_num_obs_discrete=0)
    options: dict[str, Any] = {"max_num_actions": ACTIONS, "max_num_obs_discrete": STATES, "device": "cpu", "seed": 4}
    ours, core = (package.TokenAugmenter(config, **options) for package in (framework.package, mouse_core))
    steps = framework.given(batch)
    for _ in range(2):
        ours.update_augmentations(steps)
        core.update_augmentations(batch)
        for _ in range(2):
            augmented = ours(steps)
            assert type(augmented) is type(steps)
            assert_same(as_arrays(augmented), core(batch))
        if framework.package is mouse_jax:
            assert_same(jax.jit(apply)(steps, ours.next_draws(steps)), dict(apply(batch, core.next_draws(batch))))
    assert_same(as_arrays(steps), batch)
    assert ours.state_dict() == core.state_dict()
    other = framework.package.TokenAugmenter(config, **options)
    other.load_state_dict(core.state_dict())
    assert_same(as_arrays(other(steps)), core(batch))


DTYPES = {
    "action": ["int64", "int32", "int16", "uint8"],
    "reward": ["float32", "float64", "float16"],
    "time": ["int64", "int32"],
    "q_star": ["float32", "float16"],
    "obs_continuous": ["float64", "float32", "float16"],
    "obs_discrete": ["int64", "uint8"],
    "obs_image": ["int64", "uint8", "float32"],
}


@given(data=st.data(), config=configs(), seed=st.integers(0, 2**64 - 1))
def test_torch_gives_the_bits_of_numpy(data: st.DataObject, config: AugmentTokensConfig, seed: int) -> None:
    batch = make_batch(seed % 1000, 3, 4)
    for name, choices in DTYPES.items():
        batch[name] = batch[name].astype(data.draw(st.sampled_from(choices)))
    draws = draws_of(config, seed)
    expected = apply(batch, draws)
    for validate in (None, False):
        tensors = dict(TORCH.given(batch).items())
        found = apply(tensors, draws, validate=validate)
        assert_same(as_arrays(found), dict(expected))
        assert_same(as_arrays(tensors), batch)
        assert (found is tensors) == (expected is batch)


@pytest.mark.slow
@given(config=configs(), seed=st.integers(0, 2**64 - 1))
def test_jax_gives_the_bits_of_numpy(config: AugmentTokensConfig, seed: int) -> None:
    framework = Framework(mouse_jax, x64=False)
    batch, draws = framework.narrowed(make_batch(seed % 1000)), draws_of(config, seed)
    assert_same(framework.apply(framework.given(batch), draws), dict(apply(batch, draws)))


def test_half_precision_and_flat_images(framework: Framework) -> None:
    values = framework.given(make_batch(batch=20, length=20))["reward"]
    draws = draws_of(AugmentTokensConfig(scale_reward=UNIFORM, shift_reward=UNIFORM), size=(20, 20))
    for dtype in ("float16", "bfloat16"):
        narrow = values.astype(dtype) if framework.package is mouse_jax else values.to(getattr(torch, dtype))
        found = apply({"reward": narrow}, draws)["reward"]
        assert found.dtype == narrow.dtype
        if dtype == "float16":
            assert_same(as_arrays({"reward": found}), dict(apply(as_arrays({"reward": narrow}), draws)))
    batch = framework.narrowed(make_batch(flat_images=True))
    draws = draws_of(full_config(crop_obs_image=RandomCrop(4, 3)))
    expected = apply(batch, draws, image_shape=IMAGE)["obs_image"]
    assert expected.shape == (3, 4, 24)
    found = framework.apply(framework.given(batch), draws, image_shape=IMAGE)["obs_image"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_compiled_once_it_gives_the_bits_of_numpy(x64: bool) -> None:
    framework, config = Framework(mouse_jax, x64), full_config(crop_obs_image=RandomCrop(4, 3))
    config = config if x64 else full_config(crop_obs_image=RandomShift(2, "step"))
    traced = []

    @jax.jit
    def augment(batch: Any, draws: Draws) -> Any:
        traced.append(batch["reward"].shape)
        return apply(batch, draws)

    with jax.enable_x64(x64):
        for seed in range(8):
            batch, draws = framework.narrowed(make_batch(seed)), draws_of(config, seed)
            assert_same(augment(framework.given(batch), draws), dict(apply(batch, draws)))
        assert len(traced) == augment._cache_size() == 1
        # Many numbers are rounded twice: compiled as one operation, a third of them would differ.
        batch = framework.narrowed({"obs_continuous": np.random.default_rng(0).normal(size=(64, 64, 17))})
        draws = draws_of(AugmentTokensConfig(scale_obs=UNIFORM, shift_obs=UNIFORM), size=(64, 64))
        assert_same(framework.apply(framework.given(batch), draws), dict(apply(batch, draws)))


def test_draws_are_a_pytree_and_an_augmenter_is_not_traced() -> None:
    draws = draws_of(full_config())
    leaves, structure = jax.tree.flatten(draws)
    assert len(leaves) > 15
    assert isinstance(jax.tree.unflatten(structure, leaves), Draws)
    hidden = draws_of(full_config(deliver_masks=False))
    assert jax.tree.structure(hidden) != structure  # what is delivered is known when it is compiled
    batch = Framework(mouse_jax).given(make_batch())
    augmenter = mouse_jax.TokenAugmenter(AugmentTokensConfig(permute_action="both"))
    augmenter.update_augmentations(batch)
    with pytest.raises(ConfigError, match=r"found traced arrays.*next_draws"):
        jax.jit(augmenter)(batch)


def test_what_is_no_field_passes_through() -> None:
    steps = TORCH.given(make_batch())
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
    names = ("reward", "action")
    assert_same(as_arrays(steps.select(*names)), {name: make_batch()[name] for name in names})


def test_nothing_enabled_gives_the_very_same_object(framework: Framework) -> None:
    steps = framework.given(framework.narrowed(make_batch()))
    for config in (AugmentTokensConfig(), full_config(enabled=False)):
        augmenter = framework.package.TokenAugmenter(config)
        augmenter.update_augmentations(steps)
        assert augmenter(steps) is steps


@pytest.mark.parametrize("wrong", [-7, 9])
def test_a_value_out_of_range_is_refused_or_trusted(framework: Framework, wrong: int) -> None:
    batch = framework.narrowed(make_batch())
    batch["action"][1, 2] = wrong
    steps, config = framework.given(batch), AugmentTokensConfig(permute_action="both")
    augmenter, trusting = (framework.package.TokenAugmenter(config, **more) for more in ({}, {"validate": False}))
    for one in (augmenter, trusting):
        one.update_augmentations(steps)
    with pytest.raises(DataError, match=rf"action: expected 0..4, found {wrong} at row 1, step 2"):
        augmenter(steps)
    assert int(trusting(steps)["action"][1, 2]) == wrong


def test_one_module_has_all_that_mouse_imports_to_augment(framework: Framework) -> None:
    augment = import_module(f"{framework.package.__name__}.augment")
    assert augment.TokenAugmenter is framework.package.TokenAugmenter
    assert augment.AugmentTokensConfig is mouse_core.AugmentTokensConfig
    assert augment.AugmentScalarSpec is mouse_core.AugmentScalarSpec


@pytest.mark.cuda
def test_on_a_device() -> None:
    store, config = make_store(), full_config()
    source: Any = BatchSource(store, 5, 4, augment=config, views=2)
    with mouse_torch.PrefetchBatchifier(store, 5, 4, augment=config, views=2, device="cuda") as loader:
        for index in range(4):
            views: Any = loader.next_batch()
            for view, other in zip(views, source[index], strict=True):
                assert view["reward"].is_cuda
                assert_same(as_arrays(view), other)
    draws, steps = draws_of(config), TORCH.given(make_batch()).cuda()
    expected = dict(apply(make_batch(), draws))
    for device_draws in (draws, draws.map(lambda values: torch.as_tensor(values, device="cuda"))):
        assert_same(as_arrays(apply(dict(steps.items()), device_draws)), expected)
    augmenter = mouse_torch.TokenAugmenter(config, device="cuda")
    augmenter.update_augmentations(steps)
    assert_same(as_arrays(augmenter(steps)), expected)
    steps["action"][1, 2] = 99
    assert int(augmenter(steps)["action"][1, 2]) in (0, 99)
    with pytest.raises(DataError, match=r"action: expected 0..4, found 99"):
        apply(dict(steps.items()), draws, validate=True)
