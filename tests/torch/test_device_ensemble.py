"""Batches of several replays on the device are those of an ensemble on the host."""

import numpy as np
import pytest
import torch

from mouse_core import ConfigError, SchemaError
from mouse_core.replay import Priorities, ReplayBufferEnsemble, Schedule
from mouse_core.testing.replay.devices import Setup
from mouse_torch import device
from tests.comparing import same
from tests.torch.test_device import ON, Seen

SEED = 2**63 + 5
SCHEDULE = Schedule({0: [7, 3], 4: [3, 7]})
EXAMPLE = {"obs": {"x": np.int32(0)}, "done": False}


def members(on: str) -> tuple[device.ReplayEnsemble, ReplayBufferEnsemble]:
    """Two of rows, of which one has priorities."""
    setups = [Setup(), Setup(priorities=Priorities(alpha=1, eps=0))]
    replays = [device.Replay(EXAMPLE, 20, device=on, **setup.options(0)) for setup in setups]
    buffers = [setup.host(0) for setup in setups]
    for number, pair in enumerate(zip(replays, buffers, strict=True)):
        x = np.arange(1000 * number, 1000 * number + 11, dtype=np.int32)
        for one in pair:
            one.extend({"obs": {"x": x}, "done": np.arange(11) % 5 == 0})
    mixed = device.ReplayEnsemble(replays, batch_size=5, p=SCHEDULE, seed=SEED)
    return mixed, ReplayBufferEnsemble(*buffers, p=SCHEDULE, batch_size=5, seed=SEED)


@pytest.mark.parametrize("on", ON)
def test_batches_by_priority_are_those_of_the_host(on: str) -> None:
    found, expected = members(on)
    assert found.can_sample()
    for _ in range(8):
        batch, other = found.sample(), expected.sample()
        same(batch, other, close=1e-6)
        priorities = other["obs"]["x"] % 7
        expected.update_priority(other["index"], priorities, other["buffer_ids"])
        found.set_priorities(batch["index"], torch.as_tensor(priorities), batch["buffer_ids"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.cuda)]
)
def test_a_compiled_draw_is_that_of_the_host(on: str, backend: str) -> None:
    found, expected = members(on)
    draw = torch.compile(found.sample, fullgraph=True, backend=backend)
    for _ in range(8):
        same(draw(), expected.sample(), close=1e-6)


def test_nothing_waits_for_the_device() -> None:
    found, _ = members("meta")
    with Seen() as seen:
        batch = found.sample()
        found.can_sample()
        found.set_priorities(batch["index"], batch["obs", "x"], batch["buffer_ids"])
    assert seen.waits == []


def test_what_cannot_be_mixed_is_refused() -> None:
    rows = {"reward": torch.ones(3)}
    one, other, queue, elsewhere, empty = (
        device.Replay({name: 0.0}, 4, batch_size=1, **{"num_envs": None, **options})
        for name, options in (
            ("reward", {}),
            ("cost", {}),
            ("reward", {"order": "queue"}),
            ("reward", {"device": "meta"}),
            ("reward", {}),
        )
    )
    one.extend(rows)
    other.extend({"cost": torch.ones(3)})
    for replays, options, words in (
        ([], {}, "at least one"),
        ([one, queue], {}, "replay 1: expected a Replay with order='random', found 'queue'"),
        ([one, elsewhere], {}, "the same device"),
        ([one, other], {"p": [1]}, "expected 2 weights"),
    ):
        with pytest.raises(ConfigError, match=words):
            device.ReplayEnsemble(replays, batch_size=4, **options)
    with pytest.raises(SchemaError, match="buffer 1: expected the field"):
        device.ReplayEnsemble([one, other], batch_size=4).sample()
    mixed = device.ReplayEnsemble([one, empty], batch_size=4)
    assert not mixed.can_sample()
    with pytest.raises(ConfigError, match="expected rows, found none"):
        mixed.sample()
