"""Batches of several replays on the device are those of an ensemble on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mouse_core import ConfigError, SchemaError
from mouse_core.replay import (
    ArrayStorage,
    Priorities,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Schedule,
    Slices,
    SliceSampler,
)
from mouse_torch import device
from tests.torch.test_device import ON, Seen, same

SEED = 2**63 + 5
SCHEDULE = Schedule({0: [7, 3], 4: [3, 7], 8: [1, 0]})


def members(weighted: bool, on: str, seed: int = SEED) -> tuple[device.ReplayEnsemble, ReplayBufferEnsemble]:
    """Two of rows, of which one has priorities; or of slices, of which the second has no mask."""
    replays, buffers = [], []
    for number in range(2):
        rows = {
            "obs": {"x": np.arange(1000 * number, 1000 * number + 11, dtype=np.int32)},
            "done": np.arange(11) % 5 == 0,
        }
        options: dict[str, Any] = {"slices": Slices(sequence_length=3, pad=not number)}
        sampler: Any = SliceSampler(sequence_length=3, pad=not number)
        if weighted:
            options = {"priorities": Priorities(alpha=1, eps=0)} if number else {}
            sampler = PrioritizedSampler(alpha=1, eps=0) if number else RandomSampler()
        replays.append(
            device.Replay(
                {"obs": {"x": np.int32(0)}, "done": False}, 20, batch_size=1, device=on, **{"num_envs": None, **options}
            )
        )
        buffers.append(ReplayBuffer(ArrayStorage(20), sampler))
        for one in (replays[-1], buffers[-1]):
            one.extend(rows)
    return (
        device.ReplayEnsemble(replays, batch_size=5, p=SCHEDULE, seed=seed),
        ReplayBufferEnsemble(*buffers, p=SCHEDULE, batch_size=5, seed=seed),
    )


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_are_those_of_the_host(weighted: bool, on: str) -> None:
    """Shares of 3.5 and 1.5 rows are rounded by the same random numbers; from batch 8 on one has no weight."""
    found, expected = members(weighted, on)
    assert found.can_sample()
    of_first = []
    for number in range(9):
        batch, other = found.sample(), expected.sample()
        if number == 8:  # the host has no field of a member that gives no rows
            batch = batch.select(*other)
        same(batch, other)
        of_first.append(int((other["buffer_ids"].reshape(5, -1)[:, 0] == 0).sum()))
        if weighted:
            priorities = other["obs"]["x"] % 7
            expected.update_priority(other["index"], priorities, other["buffer_ids"])
            found.set_priorities(batch["index"], torch.as_tensor(priorities), batch["buffer_ids"])
    assert {*of_first[:4]} == {3, 4}
    assert {*of_first[4:8]} == {1, 2}
    assert of_first[8] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.cuda)]
)
def test_a_compiled_draw_is_that_of_the_host(on: str, backend: str) -> None:
    found, expected = members(True, on)
    draw = torch.compile(found.sample, fullgraph=True, backend=backend)
    for _ in range(8):
        same(draw(), expected.sample())


@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_waits_for_the_device(weighted: bool) -> None:
    found, _ = members(weighted, "meta")
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
        ([one, elsewhere], {}, "one device"),
        ([one, other], {"p": [1]}, "expected 2 weights"),
    ):
        with pytest.raises(ConfigError, match=words):
            device.ReplayEnsemble(replays, batch_size=4, **options)
    with pytest.raises(SchemaError, match="replay 1: expected the fields"):
        device.ReplayEnsemble([one, other], batch_size=4).sample()
    mixed = device.ReplayEnsemble([one, empty], batch_size=4)
    assert not mixed.can_sample()
    with pytest.raises(ConfigError, match="expected rows, found none"):
        mixed.sample()
