"""Replays on the device within one graph: a step that writes, draws and sets priorities, compiled or captured."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mouse_core.replay import NextView, NStep, Priorities, ReplayBuffer, Slices
from mouse_core.testing.replay.devices import Setup
from mouse_torch.device import Replay
from tests.comparing import same
from tests.torch.test_device import SEED

ENVS, STEPS = 3, 20
WEIGHING = Priorities(alpha=0.7, beta=0.6, eps=1e-3)
KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "transitions of some steps": {"transform": [NextView(), NStep(2, 0.5)]},
    "slices": {"slices": {"sequence_length": 4}},
    "rows by priority": {"priorities": WEIGHING},
    "slices by priority": {"priorities": WEIGHING, "slices": {"sequence_length": 4, "period": 3}},
    "epochs": {"order": "epochs"},
    "epochs of slices": {"order": "epochs", "slices": {"sequence_length": 2}},
    "queue": {"order": "queue"},
}


def rows_of(first: int) -> dict[str, Any]:
    """Two time steps of all environments, whose episodes end at other times."""
    number = first + np.arange(2)[:, None] + 1000 * np.arange(ENVS)
    done = np.random.default_rng(3).random(4096)[number % 4096] < 0.2
    return {"x": number.astype(np.int32), "reward": (number % 7).astype(np.float32), "done": done}


def pair_of(kind: str, on: str, steps: int = STEPS) -> tuple[Replay, ReplayBuffer, Any]:
    """A replay with four time steps, a buffer on the host with the same, and a step with more of them."""
    setup = Setup(steps=steps, num_envs=ENVS, batch_size=6, **KINDS[kind])
    expected, options = setup.host(SEED), setup.options(SEED)
    slices = options.pop("slices") and Slices(**setup.slices)
    replay = Replay({"x": np.int32(0), "reward": 0.0, "done": False}, ENVS * steps, slices=slices, device=on, **options)

    def step(rows: dict[str, torch.Tensor]) -> Any:
        replay.extend(rows)
        batch = replay.sample()
        if setup.priorities is not None:
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
        same(found, batch, close=1e-6)
        if "priority_weight" in batch:
            expected.update_priority(batch["index"], batch["reward"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "kind"),
    [
        ("cpu", "slices by priority"),
        pytest.param("cpu", "transitions of some steps", marks=pytest.mark.long),
        *(pytest.param("cuda", kind, marks=pytest.mark.cuda) for kind in KINDS),
    ],
)
def test_a_compiled_step_draws_what_the_host_draws(on: str, kind: str, tmp_path: Path) -> None:
    replay, expected, step = pair_of(kind, on, 20 * STEPS)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected")
        follow(expected, lambda number: compiled(tensors(number, on)), 20 * STEPS)
    if on == "cpu":
        given, trace = tensors(4, on), tmp_path / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            compiled(given)
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        # Nothing that is created has as much as a byte for each row.
        sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
        assert 0 < max(sizes) < replay.layout.capacity


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_draws_what_the_host_draws(kind: str) -> None:
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
