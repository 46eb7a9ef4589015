"""Everything together: streams side by side in a ring, every sampler, several processes' rows, transforms, loaders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import PrefetchBatchifier
from mouse_core.replay import (
    ArrayStorage,
    MemmapStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(0.7, 0.5),
    "slices": lambda: SliceSampler(sequence_length=3, end_key="done", pad=False),
    "trajectories": lambda: SliceSampler(sequence_length=3, traj_key="episode", weighting="trajectory", pad=False),
    "slices without": lambda: SliceSamplerWithoutReplacement(sequence_length=3, end_key="done", pad=False),
    "prioritized slices": lambda: PrioritizedSliceSampler(0.7, 0.5, sequence_length=3, end_key="done", pad=False),
}
SLICED = [name for name in SAMPLERS if name not in ("random", "without", "prioritized")]


class World:
    """Environments side by side, whose every row says which step of which stream and episode it is."""

    def __init__(self, envs: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.envs = envs
        self.time = 0
        self.episode = np.zeros(envs, np.int64)

    def steps(self, n: int) -> dict[str, Any]:
        rows = [self.step() for _ in range(n)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def step(self) -> dict[str, Any]:
        done = self.random.random(self.envs) < 0.1
        row = {
            "time": np.full(self.envs, self.time),
            "env": np.arange(self.envs),
            "episode": self.episode * 100 + np.arange(self.envs),
            "done": done,
            "reward": np.full(self.envs, float(self.time)),
        }
        self.time += 1
        self.episode = self.episode + done
        return row


def check_slices(batch: dict[str, Any], oldest: int, newest: int) -> None:
    time, env, episode = batch["time"], batch["env"], batch["episode"]
    assert time.shape[1] == 3
    assert (np.diff(time, axis=1) == 1).all(), "steps that do not follow each other"
    assert (env == env[:, :1]).all(), "a slice of two streams"
    assert (episode == episode[:, :1]).all(), "a slice of two episodes"
    assert time.min() >= oldest
    assert time.max() <= newest


@pytest.mark.parametrize("name", SAMPLERS)
def test_rows_that_another_process_wrote_are_drawn_as_ones_own(name: str, tmp_path: Path) -> None:
    """Few of them, and more than there is room for."""
    world = World(1)

    def flat(rows: dict[str, Any]) -> dict[str, Any]:
        return {key: values[:, 0] for key, values in rows.items()}

    mine = ReplayBuffer(MemmapStorage(60, tmp_path / "m"), SAMPLERS[name](), batch_size=4)
    theirs = ReplayBuffer(MemmapStorage(60, tmp_path / "m"))
    mine.extend(flat(world.steps(40)))
    seen: set[int] = set()
    for turn, n in enumerate((1, 5, 30, 59, 60, 61, 200, 7)):
        theirs.extend(flat(world.steps(n)))
        if turn % 2:
            mine.extend(flat(world.steps(2)))
        for _ in range(6):
            batch = mine.sample()
            if name in SLICED:
                check_slices(batch, world.time - 60, world.time - 1)
            np.testing.assert_array_equal(batch["time"] % 60, batch["index"])
            assert batch["time"].min() >= world.time - 60
            seen |= set((world.time - 1 - batch["time"]).reshape(-1).tolist())
    assert len(seen) > 40


def test_loaders_over_an_ensemble_of_everything(tmp_path: Path) -> None:
    def run(workers: int) -> list[Any]:
        worlds = [World(1, seed) for seed in range(2)]
        members = [
            ReplayBuffer(ArrayStorage(60), SliceSampler(sequence_length=3, end_key="done")),
            ReplayBuffer(
                MemmapStorage(60, tmp_path / f"m{workers}"), PrioritizedSliceSampler(sequence_length=3, end_key="done")
            ),
        ]
        for world, member in zip(worlds, members, strict=True):
            member.extend({key: values[:, 0] for key, values in world.steps(50).items()})
        ensemble = ReplayBufferEnsemble(*members, p=[1, 2], batch_size=6, seed=4)
        drawn: list[Any] = []
        with PrefetchBatchifier(ensemble, num_workers=workers, prefetch=2) as loader:
            for turn in range(8):
                batch = loader.next_batch()
                drawn += [batch["index"].tolist(), batch["time"].tolist(), loader.staleness]
                ensemble.update_priority(batch["index"], np.full(batch["index"].shape, turn + 1.0), batch["buffer_ids"])
                members[0].extend({key: values[:, 0] for key, values in worlds[0].steps(4).items()})
                if turn == 4:
                    ensemble_state, loader_state = ensemble.state_dict(), loader.state_dict()
                    ensemble.load_state_dict(ensemble_state)
                    loader.load_state_dict(loader_state)
        return drawn

    first = run(0)
    assert run(1) == first
    assert run(4) == first
    assert first[-1] == (2, 8, 2)


def test_a_loop_over_a_loader_ends_with_the_epoch() -> None:
    buffer = ReplayBuffer(ArrayStorage(10), SamplerWithoutReplacement(), batch_size=4)
    buffer.extend({"a": np.arange(10)})
    for workers in (0, 2):
        with PrefetchBatchifier(buffer, num_workers=workers, prefetch=3) as loader:
            for _ in range(2):
                found = np.concatenate([batch["a"] for batch in list(loader)])
                assert sorted(found.tolist()) == list(range(10))
            with pytest.raises(TypeError, match="expected a store"):
                len(loader)
