"""Global batches over two processes of two devices each, started here; and checkpoints between one and two."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import mouse_core
from mouse_core.testing import example_store, stream_digest
from mouse_jax import REPLACED_DTYPES, PrefetchBatchifier
from tests.ports import free_port

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 8, "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two processes left their results; a checkpoint of one process lay there before."""
    folder = tmp_path_factory.mktemp("processes")
    with PrefetchBatchifier(example_store(), **OPTIONS) as loader, ocp.CheckpointManager(folder / "one") as manager:
        for _ in range(4):
            loader.next_batch()
        manager.save(0, args=ocp.args.Composite(batches=ocp.args.JsonSave(loader.state_dict())))
        manager.wait_until_finished()
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("one_of_two.py")), str(rank), str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert not any("Exception ignored" in output for output in outputs), "\n".join(outputs)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


def source() -> mouse_core.BatchSource:
    return mouse_core.BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **OPTIONS)


def test_global_batches_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    """Each process has checked that it gathered its own rows only, and that its devices hold what they should."""
    expected = stream_digest(source(), 6)
    for result in results:
        assert set(result["digests"].values()) == {expected}


def test_an_uneven_mesh_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "expected a sharding that divides action of shape [6, 8] evenly" in result["uneven"]
        assert "expected a sharding that divides action of shape [14, 10] evenly" in result["rest uneven"]


def test_one_process_goes_on_where_two_stopped(folder: Path, results: list[dict[str, Any]]) -> None:
    with ocp.CheckpointManager(folder / "two") as manager:
        state = manager.restore(0, args=ocp.args.Composite(batches=ocp.args.JsonRestore())).batches
    assert state == results[0]["state"] == results[1]["state"]
    with PrefetchBatchifier(example_store(), **{**OPTIONS, "seed": 0}) as loader:
        loader.load_state_dict(state)
        assert stream_digest(loader, 2) == stream_digest([source()[3], source()[4]], 2)


def test_two_processes_go_on_where_one_stopped(results: list[dict[str, Any]]) -> None:
    expected = stream_digest([source()[4]], 1)
    assert [result["went on"] for result in results] == [expected, expected]
