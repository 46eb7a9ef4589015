"""Devices that are not there are refused by name, whoever is asked for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mouse_jax
import mouse_jax.groups
import mouse_torch
import mouse_torch.device
import mouse_torch.groups
from mouse_core import AugmentTokensConfig, ConfigError
from mouse_core.groups import make_examples
from mouse_core.testing import example_store
from tests.core.groups_cases import rollout

ROW = {"reward": 0.0, "done": False}
MADE: dict[str, Callable[[Any, Path], Any]] = {
    "a loader of torch": lambda device, _: mouse_torch.PrefetchBatchifier(example_store(), 5, 4, device=device),
    "a buffer of torch": lambda device, _: mouse_torch.ReplayBuffer(device=device),
    "an ensemble": lambda device, _: mouse_torch.ReplayBufferEnsemble(mouse_torch.ReplayBuffer(), device=device),
    "a storage of tensors": lambda device, _: mouse_torch.TensorStorage(3, device=device),
    "a rollout": lambda device, _: mouse_torch.RolloutStorage(2, 1, {}, device=device),
    "an augmenter": lambda device, _: mouse_torch.TokenAugmenter(AugmentTokensConfig(), device=device),
    "a replay on the device": lambda device, _: mouse_torch.device.Replay(
        ROW, 4, batch_size=1, num_envs=None, device=device
    ),
    "a loader of jax": lambda device, _: mouse_jax.PrefetchBatchifier(example_store(), 5, 4, device=device),
    "a buffer of jax": lambda device, _: mouse_jax.ReplayBuffer(device=device),
    **{
        f"{name} of {package.__name__}": made
        for package in (mouse_torch.groups, mouse_jax.groups)
        for name, made in (
            ("pad", lambda device, _, package=package: package.pad(make_examples([rollout(1)], [1.0]), device=device)),
            ("a stream", lambda device, folder, package=package: package.RolloutStream(folder, 24, device=device)),
        )
    },
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_no_device_is_refused(name: str, tmp_path: Path) -> None:
    given: list[Any] = ["nowhere", "cpu:x", 1.5] if "jax" in name else ["gpu", "no device", 1.5]
    for device in given:
        with pytest.raises(ConfigError, match="device: expected"):
            MADE[name](device, tmp_path)


@pytest.mark.parametrize("name", [name for name in MADE if "jax" not in name and name != "a replay on the device"])
def test_devices_that_are_not_there_are_refused(name: str, tmp_path: Path) -> None:
    there = torch.accelerator.current_accelerator()
    for device in ("mps", "xpu", "hpu", *(["cuda:99"] if torch.cuda.is_available() else [])):
        if there is None or there.type != device:
            with pytest.raises(ConfigError, match=f"device: expected .*, found .*{device}"):
                MADE[name](device, tmp_path)
    for device in () if torch.cuda.is_available() else ("cuda", "cuda:0", torch.device("cuda")):
        with pytest.raises(ConfigError, match=r"device: expected .*, found .*CUDA is not available"):
            MADE[name](device, tmp_path)


@pytest.mark.parametrize("device", ["cuda", "cpu:9", ""])
def test_devices_that_jax_has_not_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device: expected"):
        mouse_jax.PrefetchBatchifier(example_store(), 5, 4, device=device)
