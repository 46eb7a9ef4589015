"""Files of checkpoints and small JSON files: damage is found byte by byte, and limits are held to the byte."""

from pathlib import Path

import numpy as np
import pytest

from mouse_core import DataError, DatasetStore, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.files.reading import read_bytes
from mouse_core.replay import RandomSampler, ReplayBuffer


def test_every_damaged_byte_of_a_checkpoint_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "state"
    state = {"seed": 3, "nested": {"weights": np.arange(5, dtype=np.int16), "flags": np.ones((2, 3), np.bool_)}}
    write_checkpoint(file, state)
    whole = file.read_bytes()
    refused = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        try:
            found = read_checkpoint(file)
        except StateError:
            refused += 1
            continue
        assert found["seed"] == 3
        for name, expected in state["nested"].items():
            np.testing.assert_array_equal(found["nested"][name], expected, err_msg=f"byte {position}")
    assert refused >= len(whole) - 2 * 64  # the padding in front of two arrays alone has no checksum


def test_a_file_may_be_as_large_as_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_bytes(b"12345678")
    assert read_bytes(file, most_bytes=8) == b"12345678"
    with pytest.raises(DataError, match="expected at most 7 bytes, found 8"):
        read_bytes(file, most_bytes=7)


def test_the_state_of_one_row_is_loaded() -> None:
    store = DatasetStore()
    store.extend({"action": [1], "reward": [0.5], "done": [0]})
    state = ReplayBuffer(store, RandomSampler(), batch_size=1).state_dict()
    store.extend({"action": [2], "reward": [1.5], "done": [1]})
    again = ReplayBuffer(store, RandomSampler(), batch_size=1)
    again.load_state_dict(state)
    assert len(again) == 1
    assert again.sample()["action"].tolist() == [1]
    for rows in (0, 3, True, None):
        with pytest.raises(StateError, match="expected a state of"):
            again.load_state_dict({**state, "storage": {**state["storage"], "size": rows}})
