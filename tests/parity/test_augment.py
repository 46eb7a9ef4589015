"""Augmentation by field name has the same bits in NumPy, PyTorch and JAX, with windows by field, too."""

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import ConfigError, DataError
from mouse_core.augment import AugmentTokensConfig, apply, draw
from mouse_core.randomness import Key, Purpose
from mouse_core.testing import as_arrays
from tests.core.augment_cases import ACTIONS, STATES, assert_same, full_config
from tests.core.augment_cases import make_batch as tokens
from tests.core.test_augment_by_field import CONFIG, LENGTH, SIZE, make_batch
from tests.core.test_augment_cameras import CONFIG as CAMERAS
from tests.core.test_augment_cameras import SHAPES, cameras

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}


@pytest.mark.slow
@pytest.mark.parametrize("batch_dims", [2, 1], ids=["steps", "no steps"])
def test_apply_and_augmenters_agree(batch_dims: int) -> None:
    batch = make_batch(offsets=(3,))
    if batch_dims == 1:
        batch = {name: values[:, 0] for name, values in batch.items()}
    with jax.enable_x64(True):
        given = {
            "numpy": batch,
            "torch": TensorDict({name: torch.from_numpy(values) for name, values in batch.items()}, [SIZE]),
            "jax": {name: jnp.asarray(values) for name, values in batch.items()},
        }
        found = {}
        for name, package in PACKAGES.items():
            augmenter = package.TokenAugmenter(CONFIG, seed=4, batch_dims=batch_dims)
            augmenter.update_augmentations(given[name])
            found[name] = as_arrays(augmenter(given[name]))
        draws = draw(CONFIG, Key(4, Purpose.AUGMENT, 0), (SIZE, LENGTH if batch_dims == 2 else 1))
        assert_same(found["torch"], found["numpy"])
        assert_same(found["jax"], found["numpy"])
        jitted = jax.jit(lambda arrays, drawn: apply(arrays, drawn, batch_dims=batch_dims))(given["jax"], draws)
        assert_same({name: np.asarray(values) for name, values in jitted.items()}, found["numpy"])


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_cameras_by_name_are_cut_alike(x64: bool) -> None:
    batch = cameras()
    with jax.enable_x64(True) if x64 else nullcontext():
        given = {
            "numpy": batch,
            "torch": TensorDict({name: torch.from_numpy(values) for name, values in batch.items()}, [5, 3]),
            "jax": {name: jnp.asarray(values) for name, values in batch.items()},
        }
        found = {}
        for name, package in PACKAGES.items():
            augmenter = package.TokenAugmenter(CAMERAS, seed=4)
            augmenter.update_augmentations(given[name])
            found[name] = as_arrays(augmenter(given[name]))
        for other in ("torch", "jax"):
            assert_same(found[other], found["numpy"])
        draws = draw(CAMERAS, Key(4, Purpose.AUGMENT, 0), (5, 3), image_shape=SHAPES)
        jitted = jax.jit(apply)(given["jax"], draws)
        assert_same({name: np.asarray(values) for name, values in jitted.items()}, found["numpy"])


class Framework(NamedTuple):
    """A package with its arrays, which are narrower than NumPy's in JAX without 64 bits."""

    package: Any
    x64: bool = True

    def narrowed(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        replaced = {} if self.x64 else mouse_jax.REPLACED_DTYPES
        return {name: values.astype(replaced.get(values.dtype, values.dtype)) for name, values in batch.items()}

    def given(self, batch: dict[str, np.ndarray]) -> Any:
        if self.package is mouse_jax:
            return {name: jnp.asarray(values.copy()) for name, values in batch.items()}
        tensors = {name: torch.from_numpy(values.copy()) for name, values in batch.items()}
        return TensorDict(tensors, batch_size=batch["reward"].shape)


@pytest.fixture(params=["torch", "jax", "jax with 64 bits"])
def framework(request: pytest.FixtureRequest) -> Iterator[Framework]:
    with jax.enable_x64(request.param.endswith("bits")):
        yield Framework(PACKAGES[request.param.split()[0]], request.param != "jax")


@pytest.mark.slow
def test_augmenters_give_what_that_of_numpy_gives(framework: Framework) -> None:
    batch = framework.narrowed(tokens())
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


def test_nothing_enabled_gives_the_very_same_object(framework: Framework) -> None:
    steps = framework.given(framework.narrowed(tokens()))
    for config in (AugmentTokensConfig(), full_config(enabled=False)):
        augmenter = framework.package.TokenAugmenter(config)
        augmenter.update_augmentations(steps)
        assert augmenter(steps) is steps


@pytest.mark.parametrize("wrong", [-7, 9])
def test_a_value_out_of_range_is_refused_or_trusted(framework: Framework, wrong: int) -> None:
    batch = framework.narrowed(tokens())
    batch["action"][1, 2] = wrong
    steps, config = framework.given(batch), AugmentTokensConfig(permute_action="both")
    augmenter, trusting = (framework.package.TokenAugmenter(config, **more) for more in ({}, {"validate": False}))
    for one in (augmenter, trusting):
        one.update_augmentations(steps)
    with pytest.raises(DataError, match=rf"action: expected 0..4, found {wrong} at row 1, step 2"):
        augmenter(steps)
    assert int(trusting(steps)["action"][1, 2]) == wrong
    if framework.package is mouse_torch:  # that of JAX takes its arrays wherever they lie
        with pytest.raises(ConfigError, match="device: expected a torch device"):
            mouse_torch.TokenAugmenter(config, device="abacus")


def test_one_module_has_all_that_mouse_imports_to_augment(framework: Framework) -> None:
    augment = import_module(f"{framework.package.__name__}.augment")
    assert augment.TokenAugmenter is framework.package.TokenAugmenter
    assert augment.AugmentTokensConfig is mouse_core.AugmentTokensConfig
    assert augment.AugmentScalarSpec is mouse_core.AugmentScalarSpec
