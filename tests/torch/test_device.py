"""Replay on the device in torch: the draws of the host, compiled and captured, too; nothing waits for the device."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mouse_core import ConfigError, SchemaError
from mouse_core.replay import (
    LinearSchedule,
    NextView,
    NStep,
    Priorities,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Schedule,
    Slices,
)
from mouse_core.replay.samplers.weighing import Powers, bits_of, plus_bits, powers, sums_of, weights_of
from mouse_core.testing.replay.devices import Setup
from mouse_torch import device
from mouse_torch.device import Replay
from tests.comparing import same

SEED = 2**63 + 12345
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


class Seen(TorchDispatchMode):
    """What torch does, by name, and between which devices it copies."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given, made, places = (
            {leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in (args, found, args[1:2] if name.startswith("index") else ())
        )
        shaped = name.startswith(("nonzero", "masked_select", "unique", "_local_scalar_dense", "item"))
        masks = any(leaf.dtype == torch.bool for leaf in places)
        where = {leaf.device for leaf in given | made}
        if shaped or masks or len(where) > 1:
            self.waits.append(f"{name} {where}")
        return found


WAITING: dict[str, dict[str, Any]] = {
    "rows": {"transform": [NextView(), NStep(3, 0.9)]},
    "slices": {"slices": Slices(sequence_length=3), "transform": [NextView(), NStep(3, 0.9)]},
    "whole slices": {"slices": Slices(sequence_length=2, pad=False, period=2)},
    "epochs": {"order": "epochs"},
    "epochs of slices": {"order": "epochs", "slices": Slices(sequence_length=3, pad=0)},
    "a queue": {"order": "queue"},
    "priorities": {"priorities": Priorities(beta=LinearSchedule(0.4, 1.0, 100))},
    "priorities of slices": {"priorities": Priorities(), "slices": Slices(sequence_length=3, period=2)},
}


@pytest.mark.parametrize("kind", WAITING)
@pytest.mark.parametrize("on", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_nothing_waits_for_the_device(on: str, kind: str) -> None:
    envs, options = 256 if on == "cpu" else 4096, WAITING[kind]
    row = {"obs": torch.zeros(3), "reward": 0.0, "done": False}
    replay = device.Replay(row, 8 * envs, num_envs=envs, batch_size=64, device=on, **options)
    lead = torch.zeros(envs, device=on)
    step = {"obs": lead[:, None].expand(envs, 3), "reward": lead, "done": lead > 0}

    def turn(index: Any = None) -> None:
        replay.extend(step)
        replay.extend({name: values[None] for name, values in step.items()})
        batch = replay.sample(index)
        replay.can_sample(5)
        replay.can_extend()
        if "priorities" in options:
            replay.set_priorities(batch["index"], batch["reward"])

    if on == "cuda":
        turn()  # what is compiled is compiled before
        torch.cuda.set_sync_debug_mode("error")
    try:
        with Seen() as seen:
            turn()
            if on != "meta":  # where each operation is seen alike
                turn(7)
                turn(torch.zeros((), dtype=torch.int64, device=on))
    finally:
        if on == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert seen.waits == []


def test_it_is_a_module() -> None:
    row = (torch.zeros(2, dtype=torch.bfloat16), {"image": torch.zeros(2, 2, dtype=torch.uint8)})
    made = [
        torch.nn.ModuleDict({"replay": device.Replay(row, 6, batch_size=4, num_envs=None, seed=seed)})
        for seed in (1, 2)
    ]
    one, other = (module["replay"] for module in made)
    one.extend((torch.arange(10.0).reshape(5, 2).bfloat16(), {"image": torch.full((5, 2, 2), 200, dtype=torch.uint8)}))
    one.sample()
    made[1].load_state_dict(made[0].state_dict())
    first, second = one.sample(), other.sample()
    assert (first["index"] == second["index"]).all()
    assert first["data", "0"].dtype == torch.bfloat16
    assert (first["data", "0"][:, 0] == 2 * first["index"]).all()
    assert (first["data", "1", "image"] == 200).all()


def test_rows_are_seen_where_they_are_moved() -> None:
    replay = made(priorities=Priorities())
    replay.extend({"reward": torch.arange(4.0), "done": torch.zeros(4, dtype=torch.bool)})
    replay.sample()
    copied = copy.deepcopy(replay)
    copied.register_buffer("more", None)  # as a class of somebody's may
    for memory in replay.buffers():
        memory.share_memory_()
    for one, reward in ((replay, 5.0), (copied, 6.0)):
        one.extend({"reward": torch.full((9,), reward), "done": torch.zeros(9, dtype=torch.bool)})
        one.set_priorities(torch.arange(4), torch.zeros(4))
    first, second = replay.sample(), copied.sample()
    assert replay.samples == copied.samples == 2
    assert (first["index"] == second["index"]).all()
    assert set(first["reward"].tolist()) == {5.0}
    assert set(second["reward"].tolist()) == {6.0}


@pytest.mark.parametrize("name", ["uint16", "uint64", "float8_e4m3fn"])
def test_rows_of_any_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    row = {"x": torch.zeros(2, dtype=dtype), "y": 0.5, "done": False}
    slices = Slices(sequence_length=2, pad=0)
    replay = device.Replay(row, 12, batch_size=4, num_envs=None, slices=slices, priorities=Priorities())
    torch.nn.ModuleDict({"replay": replay, "net": torch.nn.Linear(1, 1)}).to(torch.bfloat16).double()
    x = torch.arange(20, dtype=torch.float32).reshape(10, 2).to(dtype)
    replay.extend({"x": x, "y": torch.ones(10), "done": torch.arange(10) % 3 == 2})
    batch = replay.sample()
    assert batch["x"].dtype == dtype
    assert batch["y"].dtype == torch.float32
    found, kept = batch["x"].float(), x[batch["index"]].float()
    assert (found == kept * batch["mask"][..., None]).all()


def test_a_number_in_a_tensor_that_cannot_be_is_refused() -> None:
    replay = made()
    replay.extend({"reward": 1.0, "done": False})
    for index, words in ((torch.tensor(-1), "found -1"), (torch.ones(2), r"found torch.float32 \[2\]")):
        with pytest.raises(ConfigError, match=words):
            replay.sample(index)
    queue = made(order="queue")
    with pytest.raises(ConfigError, match="batch_size: expected 4, since each row is drawn once, found 2"):
        queue.sample(batch_size=2)


def made(**options: Any) -> device.Replay:
    return device.Replay({"reward": 0.0, "done": False}, 12, batch_size=4, num_envs=None, **options)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.7])
def test_weights_are_those_of_numpy(alpha: float) -> None:
    rng = np.random.default_rng(0)
    bits = ((np.arange(255)[:, None] << 23) | rng.integers(0, 1 << 23, (255, 20))).reshape(-1).astype(np.int32)
    numbers = bits.view(np.float32)
    tables = powers(alpha)
    factors, shifts, pieces = (torch.tensor(array) for array in (tables.factors, tables.shifts, tables.pieces))
    of_torch = Powers(factors, shifts, pieces, tables.bends_down, tables.most)
    found = plus_bits(torch.tensor(numbers).view(torch.int32).to(torch.int64), bits_of(1e-8), torch)
    with np.errstate(over="ignore"):
        expected = sums_of(numbers, 1e-8)
    assert found.tolist() == expected.tolist()
    assert weights_of(found, of_torch, torch).tolist() == weights_of(expected, tables).tolist()


SEED_OF_ALL = 2**63 + 5
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
    mixed = device.ReplayEnsemble(replays, batch_size=5, p=SCHEDULE, seed=SEED_OF_ALL)
    return mixed, ReplayBufferEnsemble(*buffers, p=SCHEDULE, batch_size=5, seed=SEED_OF_ALL)


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


def test_an_ensemble_waits_for_nothing() -> None:
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
