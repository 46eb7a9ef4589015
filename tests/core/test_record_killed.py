"""Recordings that are killed at any moment: what was recorded is there once, whole or marked, and goes on."""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core.record import Recorder, VectorRecorder
from tests.core.killing import forked
from tests.core.record_killed import Walk, main


def record_and_kill(folder: Path, kind: str, on_interrupted: str, seed: int, seconds: float) -> set[tuple[int, int]]:
    """Record until a moment; the steps of episodes that the program had said until then."""
    reads, writes = os.pipe()

    def work() -> None:
        sys.stdout = os.fdopen(writes, "w")
        main(str(folder), kind, on_interrupted, str(seed))

    child = forked(work)
    os.close(writes)
    with os.fdopen(reads) as program:
        said = [program.readline()]  # it has begun
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        said += program.readlines()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return {(int(line.split()[0]), int(line.split()[1])) for line in said if line.endswith("\n")}


def episodes_in(store: DatasetStore) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for start, length in zip(*(store.episodes[name].to_pylist() for name in ("start", "length")), strict=True):
        rows = store[start : start + length]
        number = int(rows[0]["observation"][1])
        assert number not in found, "an episode is there twice"
        found[number] = rows
    return found


def check(folder: Path, said: set[tuple[int, int]], on_interrupted: str) -> None:
    """Open the folder again as the next recording does, and look at every row."""
    with DatasetStore.open(folder, "a") as store:
        recorder = Recorder(Walk([2], 10**6), store, on_interrupted=on_interrupted)
        found = episodes_in(store)
        for number, rows in found.items():
            assert [row["episode_step"] for row in rows] == list(range(len(rows)))
            assert [row["observation"] for row in rows] == [[number * 1000 + t, number, t] for t in range(len(rows))]
            assert [row["done"] for row in rows[:-1]] == [0] * (len(rows) - 1)
            assert rows[-1]["done"] in ((1, 2) if on_interrupted == "mark" else (1,))
        if on_interrupted == "mark":
            # What was said was recorded; an episode without a transition is none.
            assert {(number, step) for number, step in said if step > 0} <= {
                (number, row["episode_step"]) for number, rows in found.items() for row in rows
            }
        recorder.reset()
        recorder.step(np.zeros(2))
        recorder.step(np.zeros(2))
        recorder.close()
        assert store[-1]["done"] == 1
        assert not list((folder / "recording").glob("*")), "files are left over"
        BatchSource(store, sequence_length=2, batch_size=4)[0]


@pytest.mark.parametrize(
    ("kind", "on_interrupted"),
    [
        ("single", "mark"),
        ("vector", "cut"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("single", "cut"), ("vector", "mark"))),
    ],
)
def test_a_killed_recording_is_there_and_goes_on(kind: str, on_interrupted: str, tmp_path: Path) -> None:
    said: set[tuple[int, int]] = set()
    for seed in (1, 2):
        said |= record_and_kill(tmp_path / "store", kind, on_interrupted, seed, 0.05 * seed)
    check(tmp_path / "store", said, on_interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_who_dies_while_it_takes_over_what_was_left_takes_it_over_once(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    said = record_and_kill(folder, kind, "mark", 3, 0.1)
    unlink = os.unlink
    for _ in range(3):
        child = os.fork()
        if not child:
            os.unlink = lambda path: os._exit(7) if "recording" in os.fspath(path) else unlink(path)
            Recorder(Walk([2], 10**6), DatasetStore.open(folder, "a"))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check(folder, said, "mark")


class Wide(Walk):
    """So much in a row that episodes roll over files of a store."""

    def __init__(self, lengths: list[int], first: int) -> None:
        super().__init__(lengths, first)
        self.observation_space = gym.spaces.Box(-1e9, 1e9, (3 + 4000,), np.float64)

    def _observe(self) -> Any:
        return np.concatenate([super()._observe(), np.zeros(4000)])


def record_until_call(folder: Path, kind: str, on_interrupted: str, moment: int) -> int:
    """Record in this process, which ends without a word at the call of this number; how many calls there are."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            os._exit(0)

    store = DatasetStore.open(folder, "a", sync="none")
    env: Any
    if kind == "single":
        env = Recorder(Wide([30, 3, 90, 20, 100], 0), store, on_interrupted=on_interrupted)
    else:
        worlds = [Wide([30, 90, 20, 100], 0), Wide([50, 1, 70], 1000)]
        envs = gym.vector.SyncVectorEnv([lambda one=one: one for one in worlds])
        env = VectorRecorder(envs, store, on_interrupted=on_interrupted)
    sys.setprofile(count)
    env.reset()
    for _ in range(150):
        _, _, terminated, _, _ = env.step(np.zeros(env.action_space.shape))
        if kind == "single" and terminated:
            env.reset()
    sys.setprofile(None)
    env.close()
    store.close()
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_a_recording_dies_at_any_call(kind: str, on_interrupted: str, tmp_path: Path) -> None:
    calls = record_until_call(tmp_path / "whole", kind, on_interrupted, 0)
    moments = random.Random(0)
    for number in range(6):
        folder = tmp_path / str(number)
        moment = moments.randrange(1, calls)
        child = os.fork()
        if not child:
            try:
                record_until_call(folder, kind, on_interrupted, moment)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, "it did not come to this call"
        with DatasetStore.open(folder, "a") as store:
            Recorder(Wide([2], 10**6), store, on_interrupted=on_interrupted)
            for rows in episodes_in(store).values():
                assert [row["episode_step"] for row in rows] == list(range(len(rows))), moment
                assert [row["done"] for row in rows[:-1]] == [0] * (len(rows) - 1), moment
                assert rows[-1]["done"] in ((1, 2) if on_interrupted == "mark" else (1,)), moment
        assert not list((folder / "recording").glob("*")), "files are left over"


@pytest.mark.parametrize("kind", ["single", "vector"])
def test_every_step_is_on_the_disk_where_that_is_asked_for(kind: str, tmp_path: Path) -> None:
    """What only the machine that wrote the files may believe does not count in a copy of them."""
    env: Any
    with DatasetStore.open(tmp_path / "store", "a", sync="append") as store:
        if kind == "single":
            env = Recorder(Walk([90], 0), store)
        else:
            env = VectorRecorder(gym.vector.SyncVectorEnv([lambda: Walk([90], 0), lambda: Walk([90], 9)]), store)
        env.reset()
        for _ in range(70):
            env.step(np.zeros(env.action_space.shape))
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        env.close()
    with DatasetStore.open(tmp_path / "copy", "a") as store:
        Recorder(Walk([2], 10**6), store)
        for rows in episodes_in(store).values():
            assert [row["episode_step"] for row in rows] == list(range(71))
            assert [row["done"] for row in rows] == [0] * 70 + [2]
        assert store.episodes.num_rows == (1 if kind == "single" else 2)


def test_rows_that_somebody_else_appended_are_not_taken_for_the_recorders(tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path / "store", "a", sync="append") as store:
        env = Recorder(Walk([90], 0), store)
        env.reset()
        env.step(np.zeros(2))
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        env.close()
        rows = store[:]
    with DatasetStore.open(tmp_path / "copy", "a") as store:
        store.extend([rows[0], {**rows[1], "done": 1}])
        Recorder(Walk([2], 10**6), store)
        assert [row["done"] for row in store] == [0, 1, 0, 2]
    assert not list((tmp_path / "copy" / "recording").glob("*"))


class Everything(gym.Env[Any, Any]):
    """Observations, actions and infos of every type that rows have; each step has others."""

    def __init__(self) -> None:
        box = gym.spaces.Box(-9, 9, (), np.float16)
        image = gym.spaces.Box(0, 255, (40, 36, 3), np.uint8)
        self.observation_space = gym.spaces.Dict({"half": box, "word": gym.spaces.Text(9), "camera": image})
        self.action_space = gym.spaces.Box(-99, 99, (2, 3), np.int8)

    def _told(self) -> tuple[Any, dict[str, Any]]:
        camera = np.random.default_rng(self.time).integers(0, 256, (40, 36, 3), np.uint8)
        seen = {"half": np.float16(self.time / 4), "word": "ä\n\0"[: self.time], "camera": camera}
        infos = {"flag": self.time == 1, "large": 2**40 + self.time, "tags": ["a", "é"][: 2 - self.time]}
        return seen, infos | ({"name": "b"} if self.time else {})

    def reset(self, **_: Any) -> Any:
        self.time = 0
        return self._told()

    def step(self, action: Any) -> Any:
        self.time += 1
        seen, infos = self._told()
        return seen, [0.0, 1 / 3, -1e-300][self.time], False, False, infos


@pytest.mark.parametrize("images", ["png", "raw"])
def test_rows_of_every_type_come_back(images: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"images": images, "infos": ["flag", "large", "tags", "name"]}

    def record(recorder: Recorder) -> None:
        recorder.reset(seed=3)
        for number in range(2):
            recorder.step(np.arange(6, dtype=np.int8).reshape(2, 3) - number)

    process = os.fork()
    if not process:
        code = 1
        try:
            record(Recorder(Everything(), DatasetStore.open(tmp_path / "killed", "a"), **options))
            code = 0
        finally:
            os._exit(code)  # as one who is killed: nothing is closed
    assert os.waitpid(process, 0)[1] == 0
    with DatasetStore.open(tmp_path / "killed", "a") as killed, DatasetStore.open(tmp_path / "whole", "a") as whole:
        assert len(killed) < 3, "the latest row is in the logs alone"
        Recorder(Everything(), killed, **options).close()
        recorder = Recorder(Everything(), whole, **options)
        record(recorder)
        recorder.close()
        assert len(killed) == 3
        assert repr(killed[:]) == repr(whole[:])
        assert killed.columns == whole.columns
