"""Several processes that train with Flax on parts of the same batches end where one process does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mouse_core
from mouse_core.digest import whole_state
from mouse_core.testing import example_store
from tests.ports import free_port

# As in one_of_several.py.
OPTIONS: dict[str, Any] = {
    "sequence_length": 5,
    "batch_size": 10,
    "sampling": "sequential",
    "drop_last": False,
    "boundary": "episode",
    "fields": ["obs_continuous", "reward"],
    "dtypes": {"obs_continuous": "float64", "reward": "float64"},
    "uneven": "pad",
    "seed": 4,
}


def run(count: int, folder: Path) -> list[dict[str, Any]]:
    """What each of several processes ends with."""
    folder.mkdir()
    program, port = str(Path(__file__).with_name("one_of_several.py")), str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(count), port, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.slow
def test_several_processes_train_as_one_and_are_told_where_they_disagree(tmp_path: Path) -> None:
    count = 4  # which does not divide the last batch
    (alone,) = run(1, tmp_path / "alone")
    np.testing.assert_array_equal(alone["by hand"][1], alone["by sharding"][1])
    with mouse_core.PrefetchBatchifier(example_store(200), digest=True, **OPTIONS) as loader:
        states = [loader.state_dict() for _ in range(11) if loader.next_batch()]
    assert alone["gone on"] == [states[3]] * 2
    (tmp_path / "state.json").write_text(json.dumps(states[6]))  # of one process, in the second of its epochs
    found = run(count, tmp_path / "several")
    for way in range(2):
        assert whole_state([theirs["gone on"][way] for theirs in found]) == states[10]
    for rank in range(count):
        for way in ("by hand", "by sharding"):
            for theirs, expected in zip(found[rank][way], alone[way], strict=True):
                np.testing.assert_allclose(theirs, expected, rtol=1e-9, atol=1e-12)
        for where in ("", ", sharding"):
            assert found[rank][f"nothing{where}"] == "nothing"
            assert "agree at the first batch, found rank 1 with seed 1 (" in found[rank][f"seed{where}"]
            assert "agree at refresh(), found rank 1 with rows 121 (" in found[rank][f"rows{where}"]
            missed = "missed" if rank == 1 else f"ranks: expected all {count} ranks to call refresh() before batch 1"
            assert found[rank][f"missed{where}"].startswith(missed)
