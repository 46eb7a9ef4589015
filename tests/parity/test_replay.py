"""NumPy, PyTorch and JAX draw the same batches from replay buffers, at once or ahead of time, with any threads."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import torch

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import replay as core
from mouse_core.errors import ClosedError, ConfigError, WorkerError
from mouse_core.nested import nest
from tests.comparing import host, leaves, same

PACKAGES: dict[str, tuple[ModuleType, Any]] = {
    "numpy": (mouse_core, core),
    "torch": (mouse_torch, mouse_torch),
    "jax": (mouse_jax, mouse_jax),
}


def rows(n: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    done = np.zeros(n, np.int8)
    done[6::7] = 1
    done[13::21] = 2
    return {
        "observation": {
            "achieved_goal": random.integers(0, 3, (n, 1)).astype(np.float32),
            "desired_goal": random.integers(0, 3, (n, 1)).astype(np.float32),
        },
        "action": random.integers(0, 4, n).astype(np.int32),
        "reward": random.normal(size=n).astype(np.float32),
        "done": done,
    }


def reached(achieved: Any, goal: Any, batch: Any) -> Any:
    return -((achieved - goal) ** 2).sum(-1)


def relabel(**options: Any) -> core.HindsightRelabel:
    names = {"goal": ("observation", "desired_goal"), "achieved": ("observation", "achieved_goal")}
    return core.HindsightRelabel(compute_reward=reached, **names, **options)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "transitions": lambda: {"transform": core.Compose(core.NextView(), core.NStep(3, 0.9))},
    "flat": lambda: {
        "transitions": True,
        "transform": core.NStep(2, 0.9),
        "storage": core.ArrayStorage(60, alignment="arrived"),
    },
    "priorities": lambda: {
        "sampler": core.PrioritizedSampler(0.7, core.LinearSchedule(0.4, 1.0, 10)),
        "transform": core.NStep(2, 0.5, takes="arrived"),
        "storage": core.ArrayStorage(60, alignment="arrived"),
    },
    "crops": lambda: {
        "sampler": core.SliceSampler(sequence_length=5, end_key="done", strict_length=False, pad=True),
        "transform": [core.RandomTimeCrop(3), core.ReturnsToGo(0.9)],
    },
    "marks": lambda: {
        "sampler": core.SliceSampler(sequence_length=3, dilation=2, end_key="done"),
        "transform": core.MarkSlices(first="is_init", last=("next", "cut")),
    },
    "consuming": lambda: {"sampler": core.ConsumingSampler(4)},
    "versions": lambda: {"sampler": core.StalenessSampler(2, weight=lambda age: 1 / (age + 1), version_key="action")},
    "epochs": lambda: {"sampler": core.SamplerWithoutReplacement()},
    "hindsight": lambda: {"transform": relabel(horizon=7)},
    "normalised": lambda: {
        "transform": [
            core.VecNorm(("observation", "achieved_goal"), "reward", decay=0.98),
            core.Compress(("observation", "desired_goal"), shape=(1,), dtype="float32"),
            core.Apply({"action": lambda action: (action * 2).clip(0, 4)}),
        ]
    },
    "frames": lambda: {
        "sampler": core.SliceSampler(sequence_length=4, end_key="done"),
        "transform": [
            core.CatFrames(("observation", "achieved_goal"), frames=3),
            core.Concatenate(("observation", "achieved_goal"), "reward", to="state"),
            core.BurnIn(lambda first: {"hidden": first["state"].sum(axis=1)}, steps=2),
        ],
    },
    "environments": lambda: {
        "storage": core.ArrayStorage(60, ndim=2),
        "transform": core.Compose(core.NextView(), core.NStep(3, 0.9)),
    },
}


def make(name: str, case: str) -> Any:
    options = {"storage": core.ArrayStorage(60), "batch_size": 10, "seed": 9, **CASES[case]()}
    return PACKAGES[name][1].ReplayBuffer(**options)


def write(buffer: Any, case: str, number: int) -> None:
    part = rows(24, number)
    if case == "environments":
        part = {
            name: {n: v.reshape(6, 4, 1) for n, v in values.items()}
            if isinstance(values, dict)
            else values.reshape(6, 4)
            for name, values in part.items()
        }
    buffer.extend(part)


def as_numpy(batch: Any) -> dict[str, Any]:
    return nest({name: host(values) for name, values in leaves(batch).items()})


def update(buffer: Any, batch: Any) -> None:
    """Priorities as a training makes them, in the framework's own arrays."""
    if buffer.prioritized:
        errors = batch["next"]["reward"] if isinstance(batch, dict) else batch["next", "reward"]
        buffer.update_priority(batch["index"], abs(errors))


@pytest.mark.parametrize("case", CASES)
def test_threads_are_not_seen(case: str) -> None:
    streams: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for name, (package, _) in PACKAGES.items():
        for workers in (0, 3):
            buffer = make(name, case)
            write(buffer, case, 0)
            stream = streams[name, workers] = []
            with package.PrefetchBatchifier(buffer, num_workers=workers, prefetch=3) as loader:
                for number in range(12):
                    batch = loader.next_batch()
                    stream.append(as_numpy(batch))
                    update(buffer, batch)
                    if number % 3 == 0:
                        write(buffer, case, number)
    wanted = streams["numpy", 0]
    for stream in streams.values():
        for found, other in zip(stream, wanted, strict=True):
            same(found, other)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_loader_goes_on_where_it_was(name: str) -> None:
    package = PACKAGES[name][0]
    buffer, other = make(name, "priorities"), make(name, "priorities")
    for member in (buffer, other):
        write(member, "priorities", 0)
    with package.PrefetchBatchifier(buffer, prefetch=2) as loader:
        for _ in range(3):
            loader.next_batch()
        states = loader.state_dict(), buffer.state_dict()
        wanted = [as_numpy(loader.next_batch()) for _ in range(4)]
    other.load_state_dict(states[1])
    with package.PrefetchBatchifier(other, prefetch=2, num_workers=0) as loader:
        loader.load_state_dict(states[0])
        for batch in wanted:
            same(loader.next_batch(), batch)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_ensemble_is_prefetched(name: str) -> None:
    package, buffers = PACKAGES[name]
    members = [make(name, "transitions"), make(name, "transitions")]
    for number, member in enumerate(members):
        write(member, "transitions", number)
    plain = [make("numpy", "transitions"), make("numpy", "transitions")]
    for number, member in enumerate(plain):
        write(member, "transitions", number)
    with package.PrefetchBatchifier(buffers.ReplayBufferEnsemble(*members, p=[0.3, 0.7], batch_size=10)) as loader:
        other = core.ReplayBufferEnsemble(*plain, p=[0.3, 0.7], batch_size=10)
        for _ in range(5):
            same(loader.next_batch(), other.sample())


@pytest.mark.parametrize("name", PACKAGES)
def test_failures_of_prefetching(name: str) -> None:
    package, buffers = PACKAGES[name]

    def broken(batch: Any) -> Any:
        raise ValueError("broken on purpose")

    buffer = buffers.ReplayBuffer(core.ArrayStorage(8), transform=broken, batch_size=2)
    loader = package.PrefetchBatchifier(buffer)
    with pytest.raises(ConfigError, match="empty buffer"):
        loader.next_batch()
    buffer.extend({"x": np.zeros(3)})
    for _ in range(2):
        with pytest.raises(WorkerError, match="batch 0: ValueError: broken on purpose"):
            loader.next_batch()
    loader.close()
    with pytest.raises(ClosedError):
        loader.next_batch()
    with pytest.raises(ConfigError, match=r"seed: expected the default, .* cannot be used with a replay buffer"):
        package.PrefetchBatchifier(buffer, seed=3)
    with pytest.raises(ConfigError, match="batch_size"):
        package.PrefetchBatchifier(buffers.ReplayBuffer(core.ArrayStorage(8)))


def test_parts_generations_and_routes_in_all_packages() -> None:
    arrays: dict[str, Any] = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jax.numpy.asarray}
    found: dict[str, list[Any]] = {}
    for name, (_, package) in PACKAGES.items():
        wrap = arrays[name]
        buffer = package.PrioritizedReplayBuffer(
            storage=core.ArrayStorage(6), batch_size=5, seed=3, generations=True, priority_reduction="max"
        )
        buffer.extend({"row": wrap(np.arange(6)), "value": wrap(np.zeros(6, np.float32))})
        batch = buffer.sample()
        buffer.extend({"row": wrap(np.arange(6, 8)), "value": wrap(np.zeros(2, np.float32))})
        buffer.update_priority(
            batch["index"], wrap(np.arange(10.0, dtype=np.float32).reshape(5, 2)), batch["generation"]
        )
        updated = buffer.update_if_present(batch["index"], batch["generation"], {"value": wrap(np.ones(5, np.float32))})
        plain = buffer.with_parts(sampler=core.SamplerWithoutReplacement(shuffle=False))
        later = plain.sample(6)
        mixed = package.ReplayBufferEnsemble(buffer, package.ReplayBuffer(core.ArrayStorage(4)), batch_size=4)
        routed = mixed.extend(
            {"row": wrap(np.arange(3)), "value": wrap(np.ones(3, np.float32))}, wrap(np.array([1, 0, 1]))
        )
        weights = buffer.sampler.weights_at(buffer.storage, np.arange(6))
        found[name] = [
            np.asarray(values).tolist() for values in (updated, later["row"], later["value"], routed, weights)
        ]
        assert isinstance(plain, package.ReplayBuffer)
        assert isinstance(later["generation"], type(wrap(np.arange(2))))
    assert found["numpy"] == found["torch"] == found["jax"]
    assert not all(found["numpy"][0])
