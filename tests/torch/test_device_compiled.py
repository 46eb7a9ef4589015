"""Replays on the device within what torch compiles: the draws of the host, by every compiler."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
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
    SliceSamplerWithoutReplacement,
)
from mouse_torch.device import Replay
from tests.torch.test_device import SEED, same

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
        {"priorities": Priorities(**WEIGHING), "slices": Slices(**LENGTH, period=3)},
        PrioritizedSliceSampler(**WEIGHING, **LENGTH, period=3),
        None,
    ),
    "epochs": ({"order": "epochs"}, SamplerWithoutReplacement(drop_last=True), None),
    "epochs of slices": (
        {"order": "epochs", "slices": Slices(sequence_length=2)},
        SliceSamplerWithoutReplacement(sequence_length=2, drop_last=True),
        None,
    ),
    "a queue": ({"order": "queue"}, ConsumingSampler(shuffle=False, drop_last=True), None),
}
THROUGH_INDUCTOR = ("transitions of some steps", "slices", "slices by priority")


def rows_of(first: int) -> dict[str, Any]:
    """Two time steps of all environments, whose episodes end at other times."""
    number = first + np.arange(2)[:, None] + 1000 * np.arange(ENVS)
    done = np.random.default_rng(3).random(4096)[number % 4096] < 0.2
    return {"x": number.astype(np.int32), "reward": (number % 7).astype(np.float32), "done": done}


def pair_of(kind: str, on: str, steps: int = STEPS) -> tuple[Replay, ReplayBuffer, Any]:
    """A replay with four time steps, a buffer on the host with the same, and what is done with more in a step."""
    options, sampler, transform = KINDS[kind]
    shared: dict[str, Any] = {"batch_size": BATCH, "transform": transform, "seed": SEED}
    # Samplers have a memory of their own.
    expected = ReplayBuffer(ArrayStorage(ENVS * steps, ndim=2), copy.deepcopy(sampler), **shared)
    row = {"x": np.int32(0), "reward": 0.0, "done": False}
    replay = Replay(row, ENVS * steps, num_envs=ENVS, device=on, **options, **shared)

    def step(rows: dict[str, torch.Tensor]) -> Any:
        replay.extend(rows)
        batch = replay.sample()
        if "priorities" in options:
            replay.set_priorities(batch["index"], batch["reward"])
        return batch

    for first in (0, 2):
        replay.extend(tensors(first, on))
        expected.extend(rows_of(first))
    return replay, expected, step


def tensors(first: int, on: str) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(values, device=on) for name, values in rows_of(first).items()}


def follow(expected: ReplayBuffer, step: Callable[[int], Any], steps: int = STEPS) -> None:
    """Step by step, until the ring has gone round twice."""
    for number in range(4, 2 * steps, 2):
        expected.extend(rows_of(number))
        found, batch = step(number), expected.sample()
        same(found, batch)
        if "priority_weight" in batch:
            expected.update_priority(batch["index"], batch["reward"])


ON_CUDA = pytest.mark.cuda
LATER = {"slices": pytest.mark.long}
# Through Inductor, which has all of what stands before it, or in a case that has more.
WITHOUT = dict.fromkeys(("transitions of some steps", "slices by priority", "rows"), pytest.mark.long)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "backend", "kind"),
    [
        *(pytest.param("cpu", "aot_eager", kind, marks=WITHOUT.get(kind, ())) for kind in KINDS),
        *(pytest.param("cpu", "inductor", kind, marks=LATER.get(kind, ())) for kind in THROUGH_INDUCTOR),
        *(pytest.param("cuda", "inductor", kind, marks=ON_CUDA) for kind in KINDS),
    ],
)
def test_a_compiled_step_draws_what_the_host_draws(on: str, backend: str, kind: str, tmp_path: Path) -> None:
    """Writing, drawing and setting priorities in one graph, until the ring has gone round."""
    steps = STEPS if backend == "aot_eager" else 20 * STEPS  # where weights add up to more than 31 bits
    replay, expected, step = pair_of(kind, on, steps)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected")
        follow(expected, lambda number: compiled(tensors(number, on)), steps)
    if backend == "inductor" and on == "cpu":
        # What is of all rows is written in place: nothing that is made anew has as much as a byte for each.
        given, trace = tensors(4, on), tmp_path / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            compiled(given)
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        assert 0 < max(event["args"]["Bytes"] for event in events if event["name"] == "[memory]") < replay.capacity


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_draws_what_the_host_draws(kind: str) -> None:
    """A graph that writes, draws and sets priorities does each anew whenever it is replayed."""
    replay, expected, step = pair_of(kind, "cuda")
    kept = {name: values.clone() for name, values in replay.state_dict().items()}
    given = tensors(4, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # what is compiled is compiled before
            step(given)
    torch.cuda.current_stream().wait_stream(side)
    replay.load_state_dict(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = step(given)

    def replayed(number: int) -> Any:
        for name, values in rows_of(number).items():
            given[name].copy_(torch.as_tensor(values))
        graph.replay()
        return batch

    follow(expected, replayed)
