"""``mouse record``: episodes into the folder of a store, from the command line."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from mouse_core import ConfigError, DatasetStore
from mouse_core.cli import main
from mouse_core.record import Recorder, record

POLICIES = """
def upright(observation):
    return int(observation[2] > 0)

def all_upright(observations):
    return (observations[:, 2] > 0).astype(int)

def stops(observation):
    raise KeyboardInterrupt

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that commands are run in, with a module of policies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "policies_here.py").write_text(POLICIES)
    yield tmp_path
    import sys

    sys.modules.pop("policies_here", None)


def run(words: str) -> int:
    return main(["record", *words.split()])


def upright(observation: Any) -> int:
    return int(observation[2] > 0)


def test_rows_are_those_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("CartPole-v1 new --episodes 4 --seed 3 --policy policies_here:upright") == 0
    store = record("CartPole-v1", upright, episodes=4, seed=3)
    found = DatasetStore.open("new")
    assert found[:] == store[:]
    assert found.metadata.recordings[0].policy == "policies_here:upright"
    assert capsys.readouterr().out == f"new: 4 episodes, {len(store)} rows added; 4 episodes, {len(store)} rows\n"


def test_until_goes_on_with_the_seeds_that_follow(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 5, 5, 3):
        assert run(f"CartPole-v1 new --until {number} --seed 10") == 0
    assert DatasetStore.open("new").episodes["metadata_episode_seed"].to_pylist() == [10, 11, 12, 13, 14]
    assert "new: nothing added; 5 episodes" in capsys.readouterr().out


def test_until_counts_what_a_killed_recording_left(folder: Path) -> None:
    with DatasetStore.open("old", "a", sync="append") as store:
        running = Recorder(gym.make("CartPole-v1"), store)
        running.reset(seed=0)
        running.step(0)
        shutil.copytree("old", "new")  # as if it were killed here
    with DatasetStore.open("new", "a") as store:
        record("CartPole-v1", until=3, seed=0, store=store)
        assert store.episodes["metadata_episode_seed"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("autoreset", ["", "--autoreset next-step", "--autoreset same-step", "--autoreset disabled"])
def test_vectors(autoreset: str) -> None:
    assert run(f"CartPole-v1 new --episodes 5 --vector 2 {autoreset} --seed 0 --policy policies_here:all_upright") == 0
    store = DatasetStore.open("new")
    assert store.episodes["done"].to_pylist() == [1] * 5
    for seed in (0, 1):
        alone = record("CartPole-v1", upright, episodes=1, seed=seed)
        together = store.where(metadata_episode_seed=seed)[:]
        assert np.allclose([row["observation"] for row in together], [row["observation"] for row in alone])


def test_options_reach_the_rows() -> None:
    words = "--infos prob=float64 --alignment outgoing --sync append --on-interrupted cut"
    assert run(f"FrozenLake-v1 new --episodes 3 {words}") == 0
    store = DatasetStore.open("new")
    assert store.alignment == "outgoing"
    assert {type(row["info.prob"]) for row in store} == {float}


def test_an_interruption_keeps_what_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("CartPole-v1 new --episodes 2 --seed 0") == 0
    assert run("CartPole-v1 new --episodes 2 --policy policies_here:stops") == 130
    assert capsys.readouterr().err == "mouse record: interrupted\n"
    assert DatasetStore.open("new").episodes.num_rows == 2
    assert run("CartPole-v1 new --episodes 1") == 0, "the folder is free again"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Frozn-v1 new --episodes 1", "expected the id of an environment, found 'Frozn-v1'"),
        ("CartPole-v1 new --episodes 1 --policy policies_here", "policy: expected MODULE:NAME"),
        ("CartPole-v1 new --episodes 1 --policy policies_here:none", "expected 'none' in policies_here"),
        ("CartPole-v1 new --episodes 1 --policy policies_here:number", "policy: expected a function"),
        ("CartPole-v1 new --episodes 1 --policy nowhere_at_all:f", "No module named 'nowhere_at_all'"),
        ("CartPole-v1 new --episodes 1 --autoreset disabled", "expected also --vector N"),
        ("CartPole-v1 new --episodes 1 --infos prob=number", "infos['prob']: expected a NumPy dtype"),
        ("CartPole-v1 policies_here.py --episodes 1", "policies_here.py"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", ["CartPole-v1 new", "CartPole-v1 new --episodes 0", "x y --episodes 1 --until 2"])
def test_how_many_is_asked_for(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(words)
    assert "--episodes" in capsys.readouterr().err


def test_record_is_told_one_number_of_episodes() -> None:
    for options in ({}, {"episodes": 1, "until": 1}):
        with pytest.raises(ConfigError, match="expected either episodes or until"):
            record("CartPole-v1", **options)
    with pytest.raises(ConfigError, match="record: until: expected an integer from 1, found 0"):
        record("CartPole-v1", until=0)
