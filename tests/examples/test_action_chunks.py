"""The examples of action chunks, run as a user runs them; their losses, and that both learn from the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from tensordict import TensorDict

from mouse_core import BatchSource
from tests.programs import run_example

SCRIPTS = ("action_chunks_torch.py", "action_chunks_flax.py")


@pytest.fixture
def examples(import_example: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    return {name: import_example(name) for name in ("reaching", "action_chunks_torch", "action_chunks_flax")}


@pytest.mark.slow
def test_both_scripts_train_on_the_same_batches() -> None:
    printed = [run_example(script, "--episodes", "5", "--steps", "8", "--seed", "3") for script in SCRIPTS]
    for one in printed:
        assert list(one) == ["reached untrained", "batches", "final loss", "reached"]
        assert float(one["final loss"]) > 0
    assert printed[0]["batches"] == printed[1]["batches"]


@pytest.mark.slow
@pytest.mark.long
def test_both_scripts_train_on_the_same_frames_of_a_video(
    examples: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    monkeypatch.setattr(examples["reaching"], "reached", lambda act, see: 0.0 * act(see_twice(see)).sum())

    def see_twice(see: Any) -> Any:
        return np.stack([see(examples["reaching"].Arms(2, 0))] * 2, axis=1)

    options = ["--video", str(tmp_path / "robot"), "--episodes", "3", "--steps", "4"]
    batches = []
    for script in SCRIPTS:
        monkeypatch.setattr("sys.argv", [script, *options])
        examples[script.removesuffix(".py")].main()
        printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
        assert float(printed["final loss"]) > 0
        batches.append(printed["batches"])
    assert batches[0] == batches[1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_policy_learns_to_reach(script: str) -> None:
    """In a quarter of the steps of the script's own, and from half the episodes."""
    printed = run_example(script, "--episodes", "100", "--steps", "250")
    assert float(printed["final loss"]) < 0.35
    assert float(printed["reached"]) > float(printed["reached untrained"])


def test_the_loss_is_that_of_the_actions_that_were_taken(examples: dict[str, Any]) -> None:
    """Against the rows themselves: the actions after each anchor, up to its episode's end, and no others."""
    store = examples["reaching"].record(3, 5)
    windows = {"obs_continuous": examples["reaching"].SEEN, "action": range(examples["reaching"].CHUNK)}
    source = BatchSource(store, batch_size=16, windows=windows, dtypes={"obs_continuous": "float32"}, seed=2)
    batch, rows = source[0], list(store)
    errors = []
    for start in source.plan(0).starts.tolist():
        for ahead in range(1, examples["reaching"].CHUNK + 1):
            if start + ahead == len(rows) or rows[start + ahead]["episode_step"] == 0:
                break
            errors.append(np.abs(np.array(rows[start + ahead]["action"]) - 0.25))
    expected = np.mean(errors)

    def torch_policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.full((len(observation), examples["reaching"].CHUNK, 2), 0.25)

    def flax_policy(observation: Any) -> Any:
        return jnp.full((len(observation), examples["reaching"].CHUNK, 2), 0.25)

    tensors = TensorDict({name: torch.from_numpy(values) for name, values in batch.items()}, batch_size=[16])
    assert float(examples["action_chunks_torch"].chunk_loss(torch_policy, tensors)) == pytest.approx(expected, rel=1e-5)
    arrays = {name: jnp.asarray(values) for name, values in batch.items()}
    assert float(examples["action_chunks_flax"].chunk_loss(flax_policy, arrays)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_both_networks_say_chunks(examples: dict[str, Any]) -> None:
    seen = np.zeros((3, 2, 10), np.float32)
    assert examples["action_chunks_torch"].ChunkPolicy()(torch.from_numpy(seen)).shape == (3, 16, 2)
    assert examples["action_chunks_flax"].ChunkPolicy(nnx.Rngs(0))(jnp.asarray(seen)).shape == (3, 16, 2)
