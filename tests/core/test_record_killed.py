"""Recordings that are killed at any moment: what was recorded is there once, whole or marked, and goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core.record import Recorder
from mouse_core.record._running import decoded, encoded
from tests.core.record_killed import Walk

ROOT = Path(__file__).parents[2]


def record_and_kill(folder: Path, kind: str, on_interrupted: str, seed: int, seconds: float) -> set[tuple[int, int]]:
    """Record until a moment; the steps of episodes that the program had said until then."""
    command = [sys.executable, "-m", "tests.core.record_killed", str(folder), kind, on_interrupted, str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as program:
        assert program.stdout is not None
        said = [program.stdout.readline()]  # it has begun
        time.sleep(seconds)
        os.kill(program.pid, signal.SIGKILL)
        said += program.stdout.readlines()
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


@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_a_killed_recording_is_there_and_goes_on(kind: str, on_interrupted: str, tmp_path: Path) -> None:
    said = record_and_kill(tmp_path / "store", kind, on_interrupted, 1, 0.1)
    check(tmp_path / "store", said, on_interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_recordings_are_killed_again_and_again(kind: str, tmp_path: Path) -> None:
    moments = random.Random(0)
    said: set[tuple[int, int]] = set()
    for seed in range(1, 7):
        said |= record_and_kill(tmp_path / "store", kind, "mark", seed, moments.uniform(0, 0.15))
    check(tmp_path / "store", said, "mark")


def test_rows_come_back_from_bytes() -> None:
    row = {
        "action": np.arange(6, dtype=np.int8).reshape(2, 3),
        "reward": float("-inf"),
        "done": 0,
        "episode_step": 2**40,
        "text": "ä\n",
        "image": {"bytes": b"\n\x00", "path": None},
        "flag": True,
        "null": None,
        "list": ["a", "b"],
        "half": np.float16(0.5),
    }
    again = decoded(encoded(row))
    assert again.keys() == row.keys()
    assert np.array_equal(again.pop("action"), row.pop("action"))
    assert again == row
