"""The examples that use JAX, run as a user runs them, on little data; and what could go wrong in them unseen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from mouse_core.digest import StreamDigest
from mouse_core.testing import example_store
from mouse_jax import PrefetchBatchifier
from mouse_study import Context
from mouse_study.divergence import transfer
from tests.programs import run_example


def run(script: str, output: Path, *options: str) -> dict[str, str]:
    return run_example(script, "--output", str(output), *options)


# ---------------------------------------------------------------------- compare_frameworks


@pytest.mark.long
def test_the_study_compares_frameworks_and_nothing_else(tmp_path: Path) -> None:
    printed = run("compare_frameworks.py", tmp_path / "new", "--episodes", "3", "--steps", "100", "--seed", "3")
    assert printed["same data"] == "proven"
    assert printed["digest torch"] == printed["digest jax"]
    assert float(printed["difference of the first loss"]) < 1e-6
    assert float(printed["largest difference of the first 100 losses"]) < 1e-4
    assert printed["losses agree to 1e-04"] == "for 100 steps"
    for framework in ("torch", "jax"):
        assert float(printed[f"steps per second, {framework}"]) > 0
        assert 0 <= float(printed[f"waiting for data, {framework}"].removesuffix(" %")) <= 100
    assert "same data: proven, for 1 pair of runs" in Path(printed["page"]).read_text(encoding="utf-8")


def lander_batch(random: np.random.Generator) -> dict[str, np.ndarray]:
    """A made-up batch [3, 6] with two ends in it."""
    done = np.zeros((3, 6), np.int64)
    done[0, 2], done[1, 3] = 1, 2
    time = np.tile(np.arange(6), (3, 1))
    time[0, 3:], time[1, 4:] = range(3), range(2)
    return {
        "obs_continuous": random.normal(size=(3, 6, 8)).astype(np.float32),
        "action": random.integers(0, 4, (3, 6)),
        "reward": random.normal(size=(3, 6)).astype(np.float32),
        "done": done,
        "time": time,
    }


@pytest.mark.slow
@pytest.mark.parametrize("example", ["compare_frameworks"], indirect=True)
def test_both_networks_and_losses_are_the_same_functions(example: ModuleType) -> None:
    batch = lander_batch(np.random.default_rng(0))
    flax_networks = [example.FlaxQNetwork(nnx.Rngs(seed)) for seed in (0, 1)]
    torch_networks = [example.TorchQNetwork() for _ in range(2)]
    for mine, other in zip(flax_networks, torch_networks, strict=True):
        transfer(mine, other)
    rows = np.random.default_rng(1).normal(size=(2, 9, example.ROW)).astype(np.float32)
    np.testing.assert_allclose(
        flax_networks[0](jnp.asarray(rows)), torch_networks[0](torch.from_numpy(rows)).detach(), rtol=1e-4, atol=1e-6
    )
    mine = example.jax_loss(*flax_networks, {name: jnp.asarray(values) for name, values in batch.items()})
    other = example.torch_loss(*torch_networks, {name: torch.from_numpy(values) for name, values in batch.items()})
    assert float(mine) == pytest.approx(other.item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["compare_frameworks"], indirect=True)
def test_the_loss_is_that_of_transitions_one_by_one(example: ModuleType) -> None:
    """An oracle in plain Python that knows the alignment, and that episodes end."""
    batch = lander_batch(np.random.default_rng(2))
    values = np.random.default_rng(3).normal(size=(3, 6, 4)).astype(np.float32)
    targets = np.random.default_rng(4).normal(size=(3, 6, 4)).astype(np.float32)

    errors = []
    for row in range(3):
        for step in range(5):
            if batch["time"][row, step + 1] == 0:
                continue
            action, done = batch["action"][row, step + 1], batch["done"][row, step + 1]
            goal = 0.1 * batch["reward"][row, step + 1] + (done != 1) * 0.99 * targets[row, step + 1].max()
            q = values[row, step].astype(np.float64)
            errors.append((q[action] - goal) ** 2 + 0.5 * (np.log(np.exp(q).sum()) - q[action]))
    assert len(errors) == 13

    def constant(array: np.ndarray) -> Any:
        return lambda rows: jnp.asarray(array)

    arrays = {name: jnp.asarray(values) for name, values in batch.items()}
    assert float(example.jax_loss(constant(values), constant(targets), arrays)) == pytest.approx(
        np.mean(errors), rel=1e-5
    )


# ---------------------------------------------------------------------- compare_online


@pytest.fixture
def any_precision() -> Iterator[None]:
    """JAX's precision, put back."""
    before = jax.config.read("jax_enable_x64")
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.usefixtures("any_precision")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("example", ["compare_online"], indirect=True)
def test_all_learn_from_the_same_experience_in_float64(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both frameworks, with replay on the host and on the device; each writes what its own network chose."""
    monkeypatch.setattr(example, "LEARNING_STARTS", 80)
    monkeypatch.setattr(example, "BUFFER_SIZE", 8 * 30)  # the oldest rows are overwritten
    monkeypatch.setattr(example, "EXPLORATION", lambda taken: 0.2)  # the networks choose most actions
    losses, digests, rows = ({framework: [] for framework in example.REPLAYS["both"]} for _ in range(3))
    for framework, found in losses.items():
        training = example.train(Context("float64", {"dtype": "float64"}, framework, 5, 40, tmp_path))
        for step in range(40):
            batch = training.batches()
            rows[framework].append(np.asarray(batch["index"]).tolist())
            digests[framework].append(StreamDigest.of(step, batch))
            found.append(training.step(batch).item())
    assert sum(digest.windows for digest in digests["torch"]) == 40 * example.BATCH_SIZE
    assert np.unique(rows["torch"]).size == 8 * 30
    for framework, found in losses.items():
        for step in range(40):
            assert rows[framework][step] == rows["torch"][step], f"{framework}, step {step}"
            assert digests[framework][step] == digests["torch"][step], f"{framework}, step {step}"
        np.testing.assert_allclose(found, losses["torch"], rtol=1e-11)
    assert losses["torch"][0] != losses["torch"][-1]


@pytest.mark.long
@pytest.mark.slow
def test_the_online_study_runs_to_its_page(tmp_path: Path) -> None:
    printed = run("compare_online.py", tmp_path, "--seeds", "1", "--steps", "60", "--replay", "device")
    assert printed["same data, float64, seed 0"] == "proven"
    assert printed["losses agree to 1e-03, float64, seed 0"] == "for 60 steps"
    evaluations = [printed[f"evaluations, float64, seed 0, {kind}-device"] for kind in ("torch", "jax")]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0].split()) == 10
    assert "float32" in Path(printed["page"]).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- flax_offline


@pytest.mark.slow
def test_the_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    little = ("--episodes", "3", "--seed", "5")
    first = run("flax_offline.py", tmp_path, *little, "--steps", "4")
    assert list(first) == [
        "steps recorded",
        "return untrained",
        "training steps",
        "final loss",
        "batches per second",
        "waiting for data",
        "return trained",
        "checkpoint",
    ]
    assert first["training steps"] == "4"
    again = run("flax_offline.py", tmp_path, *little, "--steps", "6")
    assert again["training steps"] == "2"
    assert again["return untrained"] == first["return untrained"]


@pytest.mark.parametrize("example", ["flax_offline"], indirect=True)
def test_a_saved_dataset_opens(example: ModuleType, tmp_path: Path) -> None:
    example_store(100).to_dataset().save_to_disk(tmp_path / "saved")
    store = example.open_dataset(tmp_path / "saved")
    assert len(store) == 100
    with PrefetchBatchifier(store, sequence_length=8, batch_size=2) as loader:
        assert loader.next_batch()["obs_continuous"].shape == (2, 8, 5)
