"""Replays on the device within what torch compiles: the draws of the host, by every compiler."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from mouse_core.replay import (
    ArrayStorage,
    ConsumingSampler,
    NextView,
    NStep,
    Priorities,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Slices,
    SliceSampler,
)
from mouse_torch.device import Replay
from tests.torch.test_device import SEED, same

pytestmark = pytest.mark.slow

ENVS, STEPS, BATCH = 3, 20, 6
LENGTH: dict[str, Any] = {"sequence_length": 4}
WEIGHING = {"alpha": 0.7, "beta": 0.6, "eps": 1e-3}
TRANSFORM = [NextView(), NStep(2, 0.5)]
KINDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "rows": ({}, RandomSampler(), None),
    "transitions of some steps": ({}, RandomSampler(), TRANSFORM),
    "slices": ({"slices": Slices(**LENGTH)}, SliceSampler(**LENGTH), None),
    "whole slices": ({"slices": Slices(**LENGTH, pad=False)}, SliceSampler(**LENGTH, pad=False), TRANSFORM),
    "rows by priority": ({"priorities": Priorities(**WEIGHING)}, PrioritizedSampler(**WEIGHING), None),
    "slices by priority": (
        {"priorities": Priorities(**WEIGHING), "slices": Slices(**LENGTH)},
        PrioritizedSliceSampler(**WEIGHING, **LENGTH),
        None,
    ),
    "epochs": ({"order": "epochs"}, SamplerWithoutReplacement(drop_last=True), None),
    "a queue": ({"order": "queue"}, ConsumingSampler(shuffle=False, drop_last=True), None),
}
THROUGH_INDUCTOR = ("transitions of some steps", "slices", "slices by priority")


def rows_of(first: int) -> dict[str, Any]:
    """Two time steps of all environments, whose episodes end at other times."""
    number = first + np.arange(2)[:, None] + 1000 * np.arange(ENVS)
    done = np.random.default_rng(3).random(4096)[number % 4096] < 0.2
    return {"x": number.astype(np.int32), "reward": (number % 7).astype(np.float32), "done": done}


@pytest.mark.parametrize(
    ("backend", "kind"),
    [*(("aot_eager", kind) for kind in KINDS), *(("inductor", kind) for kind in THROUGH_INDUCTOR)],
)
def test_a_compiled_step_draws_what_the_host_draws(backend: str, kind: str) -> None:
    """Writing, drawing and setting priorities in one graph, until the ring has gone round."""
    options, sampler, transform = KINDS[kind]
    shared: dict[str, Any] = {"batch_size": BATCH, "transform": transform, "seed": SEED}
    expected = ReplayBuffer(ArrayStorage(ENVS * STEPS, ndim=2), sampler, **shared)
    row = {"x": np.int32(0), "reward": 0.0, "done": False}
    replay = Replay(row, ENVS * STEPS, num_envs=ENVS, **options, **shared)

    def step(rows: dict[str, torch.Tensor]) -> Any:
        replay.extend(rows)
        batch = replay.sample()
        if "priorities" in options:
            replay.set_priorities(batch["index"], batch["reward"])
        return batch

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    replay.extend({name: torch.as_tensor(values) for name, values in rows_of(0).items()})
    replay.extend({name: torch.as_tensor(values) for name, values in rows_of(2).items()})
    expected.extend(rows_of(0))
    expected.extend(rows_of(2))
    for number in range(4, 2 * STEPS, 2):
        rows = rows_of(number)
        expected.extend(rows)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Dynamo detected")
            found = compiled({name: torch.as_tensor(values) for name, values in rows.items()})
        batch = expected.sample()
        same(found, batch)
        if "priorities" in options:
            expected.update_priority(batch["index"], batch["reward"])
