"""The picture of augmentation: what it shows is a real window, changed as its titles say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

from examples import augmentation
from mouse_core import AugmentTokensConfig, DatasetStore


@pytest.fixture(scope="module")
def lake() -> DatasetStore:
    return augmentation.record_lake()


def test_the_recorded_values_are_optimal(lake: DatasetStore) -> None:
    import gymnasium as gym

    with gym.make("FrozenLake-v1", map_name="8x8") as environment:
        values = augmentation.frozen_lake_values(environment)
        model: Any = environment.unwrapped
        residual = [
            abs(
                values[state, action]
                - sum(p * (r + augmentation.DISCOUNT * values[s].max() * (not over)) for p, s, r, over in moves)
            )
            for state in range(augmentation.STATES)
            for action, moves in model.P[state].items()
        ]
    assert max(residual) < 1e-9
    assert 0 < values[0].max() < values[62].max() < 1


def test_a_window_before_and_after(lake: DatasetStore) -> None:
    before = augmentation.window(lake, None)
    after = augmentation.window(lake, AugmentTokensConfig(permute_action="both"))
    steps = np.arange(augmentation.STEPS)
    assert not np.array_equal(before["action"], after["action"])
    np.testing.assert_array_equal(before["q_star"][steps, before["action"]], after["q_star"][steps, after["action"]])


@pytest.mark.slow
def test_it_draws(lake: DatasetStore, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "picture.png"
    augmentation.draw(augmentation.record_lander(), lake, output)
    assert output.read_bytes().startswith(b"\x89PNG")
