"""How many episodes ``record`` adds to a store."""

import shutil
from pathlib import Path

import gymnasium as gym
import pytest

from mouse_core import ConfigError, DatasetStore
from mouse_core.record import Recorder, record


def test_until_goes_on_with_the_seeds_that_follow(tmp_path: Path) -> None:
    for number in (2, 5, 5, 3):
        with DatasetStore.open(tmp_path / "new", "a") as store:
            record("CartPole-v1", until=number, seed=10, store=store)
    seeds = DatasetStore.open(tmp_path / "new").episodes["metadata_episode_seed"]
    assert seeds.to_pylist() == [10, 11, 12, 13, 14]


def test_until_counts_what_a_killed_recording_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with DatasetStore.open("old", "a", sync="append") as store:
        running = Recorder(gym.make("CartPole-v1"), store)
        running.reset(seed=0)
        running.step(0)
        shutil.copytree("old", "new")  # as if it were killed here
    with DatasetStore.open("new", "a") as store:
        record("CartPole-v1", until=3, seed=0, store=store)
        assert store.episodes["metadata_episode_seed"].to_pylist() == [0, 1, 2]


def test_an_environment_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="expected the id of an environment, found 'Frozn-v1'"):
        record("Frozn-v1", episodes=1)


def test_record_is_told_one_number_of_episodes() -> None:
    for options in ({}, {"episodes": 1, "until": 1}):
        with pytest.raises(ConfigError, match="expected either episodes or until"):
            record("CartPole-v1", **options)
    with pytest.raises(ConfigError, match="record: until: expected an integer of at least 1, found 0"):
        record("CartPole-v1", until=0)
