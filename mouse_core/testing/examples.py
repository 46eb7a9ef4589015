"""Example rows for tests, which are the same on every machine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.store.dataset_store import DatasetStore

ACTIONS = 4
IMAGE_SHAPE = (3, 4, 3)


def example_columns(rows: int, *, first: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return columns for every field of a store: ``rows`` steps from step ``first`` on.

    Episodes have 1 to 13 rows, and end alternately with done 1 and done 2. Observations are float64 values that float32
    cannot represent. No two steps are equal.

    Args:
        rows: Number of steps.
        first: The index of the first step. Steps with the same index are equal: ``example_columns(30, first=20)``
            returns the last 30 steps of ``example_columns(50)``.

    Returns:
        Arrays ``[rows, ...]`` by column.
    """
    number = np.arange(first, first + rows)
    lengths = np.arange(first + rows) * 5 % 13 + 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    episode = np.searchsorted(starts, number, side="right") - 1
    step = number - starts[episode]
    last = step == lengths[episode] - 1
    pixels = number[:, None] + 3 * np.arange(math.prod(IMAGE_SHAPE))
    return {
        "action": np.where(step == 0, 0, number * 7 % ACTIONS),
        "reward": np.where(step == 0, 0, np.sin(number)).astype(np.float32),
        "xformed_reward": np.cos(number).astype(np.float32),
        "done": np.where(last & (step > 0), 1 + episode % 2, 0),
        "episode_step": step,
        "metadata_q_star": np.sin(number[:, None] + 0.5 * np.arange(ACTIONS)).astype(np.float32),
        "observation": np.sin(number[:, None] * (1.0 + np.arange(5))),
        "observation_discrete": number * 11 % 64,
        "observation_image": (pixels % 256).astype(np.uint8).reshape(rows, *IMAGE_SHAPE),
    }


def example_store(rows: int = 300) -> DatasetStore:
    """Return a store of ``example_columns(rows)``."""
    store = DatasetStore()
    store.extend(example_columns(rows))
    return store
