"""Learning from a store in object storage: nothing is downloaded first, and a second run reads its cache.

    python examples/from_object_storage.py
    python examples/from_object_storage.py --url s3://bucket/runs/carts

1. record   carts are pushed to the middle of a track by a clumsy controller; the steps go into a folder
2. upload   its sealed files are sent to the address, then its manifest
3. train    a policy learns the controller's pushes, from windows [B, S] that are read from the address, by plan
4. resume   another run goes on from the state of the first one, and finds what that one read in the cache

Without ``--url`` the address is that of a folder, ``file:///...``, read by the same means. For S3 keys are found
in the environment; ``AWS_ENDPOINT`` names a server that speaks like S3.
Figures are printed one ``name: value`` a line.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mouse_core import DatasetStore, PrefetchBatchifier
from mouse_core.store.remote import upload

CARTS, STEPS = 200, 100  # episodes, and steps of each
SEQUENCE_LENGTH, BATCH_SIZE = 16, 64
BATCHES = 300  # of each of the two runs
LEARNING_RATE = 0.5


def record(folder: Path) -> None:
    """Write what carts do: an observation is a place and a speed, an action a push to the left (0) or right (1)."""
    draw = np.random.default_rng(0)
    state = draw.uniform(-1, 1, (CARTS, 2))
    observations, pushes = [state], [np.zeros(CARTS, np.int64)]
    for _ in range(STEPS - 1):
        push = (state @ [1.0, 1.5] < 0).astype(np.int64)
        push = np.where(draw.random(CARTS) < 0.2, 1 - push, push)  # it is clumsy
        speed = state[:, 1] + 0.1 * (2 * push - 1)
        state = np.stack([state[:, 0] + 0.1 * speed, speed], axis=1)
        observations.append(state)
        pushes.append(push)
    # Row t holds the observation at t and the push that led to it, episode after episode.
    last = np.arange(STEPS) == STEPS - 1
    with DatasetStore.open(folder, "a", layout="windows") as store:
        store.extend(
            {
                "observation": np.stack(observations, axis=1).reshape(-1, 2).astype(np.float32),
                "action": np.stack(pushes, axis=1).reshape(-1),
                "reward": -np.abs(np.stack(observations, axis=1)[..., 0]).reshape(-1),
                "done": np.tile(np.where(last, 2, 0), CARTS),
                "episode_step": np.tile(np.arange(STEPS), CARTS),
            }
        )


def learn(weights: NDArray[Any], batch: dict[str, NDArray[Any]]) -> float:
    """Move weights [2] towards the pushes of a batch, in place; the share of pushes that they choose, too."""
    seen = batch["obs_continuous"][:, :-1, :2].reshape(-1, 2)  # the push chosen at t stands in row t + 1
    pushed = batch["action"][:, 1:].reshape(-1)
    same = batch["time"][:, 1:].reshape(-1) > 0  # where an episode begins, no push led there
    right = 1 / (1 + np.exp(-seen @ weights))
    weights -= LEARNING_RATE * ((right - pushed)[same] @ seen[same]) / max(int(same.sum()), 1)
    return float(((right > 0.5) == pushed)[same].mean())


def run(url: str, cache: Path, weights: NDArray[Any], state: dict[str, Any] | None) -> dict[str, Any]:
    """Learn from so many batches, from where a state says, or from the beginning; the state then."""
    store = DatasetStore.open(url, cache=cache)
    with PrefetchBatchifier(store, SEQUENCE_LENGTH, BATCH_SIZE, seed=1) as loader:
        if state is not None:
            loader.load_state_dict(state)
        agreed = [learn(weights, loader.next_batch()) for _ in range(BATCHES)]
        print(f"pushes that the policy chooses, too: {np.mean(agreed[-50:]):.2f}")
        return loader.state_dict()


def main() -> None:
    """Record, upload, train and resume."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", help="where the store goes; by default a folder of this machine")
    parser.add_argument("--output", type=Path, help="where recording and cache go; by default a temporary folder")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        output = told.output or Path(temporary)
        folder, cache = output / "recorded", output / "cache"
        url = told.url or f"file://{(output / 'elsewhere').absolute()}"
        if not folder.exists():
            record(folder)
        done = upload(folder, url)
        print(f"rows at {url}: {done.rows}")
        weights = np.zeros(2)
        state = run(url, cache, weights, None)
        run(url, cache, weights, state)
        print(f"a push to the right where {weights[0]:.1f} x + {weights[1]:.1f} v > 0")


if __name__ == "__main__":
    main()
