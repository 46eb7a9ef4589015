"""SAC whose environments and replay lie on one device: its draws are the host's, and it learns."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch


@pytest.fixture
def example(import_example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, made small."""
    found = import_example("sac_on_device")
    for name, value in (("ENVIRONMENTS", 4), ("CAPACITY", 40), ("BATCH_SIZE", 8), ("HIDDEN", 8)):
        monkeypatch.setattr(found, name, value)
    return found


def test_pendulums_swing_as_those_of_gymnasium(example: ModuleType) -> None:
    import gymnasium as gym

    theirs = gym.make("Pendulum-v1").unwrapped
    ours = example.Pendulums(1)
    ours.steps.zero_()
    theirs.reset(seed=0)
    theirs.state = np.array([ours.angle.item(), ours.speed.item()])
    for number in range(20):
        action = np.sin(number)
        observation, reward, *_ = theirs.step(np.array([2 * action], np.float32))
        found, done = ours.step(torch.tensor([action], dtype=torch.float32))
        np.testing.assert_allclose(found.item(), reward, rtol=1e-3)
        np.testing.assert_allclose(ours.observations()[0], observation, rtol=1e-3, atol=1e-3)
        assert not done


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_training_drew_is_what_the_host_draws(
    compiled: bool, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of what it compiles graphs are taken as a whole; to make kernels of them takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    replay, rewards = example.train(25, compiled=compiled)
    assert torch.isfinite(rewards).all()
    assert (rewards < 0).all()
    assert int(replay.samples) == 5
    buffer = replay.to_host()
    batch, expected = replay.sample(), buffer.sample()
    for name in ("index", "mask", "observation"):
        np.testing.assert_array_equal(batch[name], expected[name])
