"""Several processes load global batches, and train on parts of them, as one process does; checkpoints go both ways."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import mouse_core
from mouse_core.digest import whole_state
from mouse_core.testing import example_store, stream_digest
from mouse_jax import REPLACED_DTYPES, PrefetchBatchifier
from tests.jax.processes import OPTIONS, TRAINED, run

pytestmark = pytest.mark.slow


def test_two_processes_load_what_one_does_and_checkpoints_go_both_ways(tmp_path: Path) -> None:
    one: Any = ocp.args.Composite(batches=ocp.args.JsonRestore())
    with PrefetchBatchifier(example_store(), **OPTIONS) as loader, ocp.CheckpointManager(tmp_path / "one") as manager:
        for _ in range(4):
            loader.next_batch()
        manager.save(0, args=ocp.args.Composite(batches=ocp.args.JsonSave(loader.state_dict())))
        manager.wait_until_finished()
    results = run("loading", 2, tmp_path, devices=2)
    source = mouse_core.BatchSource(example_store(), replace_dtypes=REPLACED_DTYPES, **OPTIONS)
    with ocp.CheckpointManager(tmp_path / "two") as manager:
        state = manager.restore(0, args=one).batches
    for result in results:
        assert set(result["digests"].values()) == {stream_digest(source, 6)}
        for shape, error in zip(("[6, 8]", "[14, 10]"), result["uneven"], strict=True):
            assert f"expected a sharding that divides action of shape {shape} evenly" in error
        assert result["went on"] == stream_digest([source[4]], 1)
        assert result["state"] == state
    with PrefetchBatchifier(example_store(), **{**OPTIONS, "seed": 0}) as loader:
        loader.load_state_dict(state)
        assert stream_digest(loader, 2) == stream_digest([source[3], source[4]], 2)


def test_several_processes_train_as_one_and_are_told_where_they_disagree(tmp_path: Path) -> None:
    count = 4  # which does not divide the last batch
    (alone,) = run("training", 1, tmp_path / "alone", devices=1)
    np.testing.assert_array_equal(alone["by hand"][1], alone["by sharding"][1])
    with mouse_core.PrefetchBatchifier(example_store(200), digest=True, **TRAINED) as loader:
        states = [loader.state_dict() for _ in range(11) if loader.next_batch()]
    assert alone["gone on"] == [states[3]] * 2
    (tmp_path / "state.json").write_text(json.dumps(states[6]))  # of one process, in the second of its epochs
    found = run("training", count, tmp_path / "several", devices=1)
    for way in range(2):
        assert whole_state([theirs["gone on"][way] for theirs in found]) == states[10]
    for rank in range(count):
        for name in ("by hand", "by sharding"):
            for theirs, expected in zip(found[rank][name], alone[name], strict=True):
                np.testing.assert_allclose(theirs, expected, rtol=1e-9, atol=1e-12)
        missed = "missed" if rank == 1 else f"ranks: expected all {count} ranks to call refresh() before batch 1"
        for way in range(2):
            assert found[rank]["nothing"][way] == "nothing"
            assert "agree at the first batch, found rank 1 with seed 1 (" in found[rank]["seed"][way]
            assert "agree at refresh(), found rank 1 with rows 121 (" in found[rank]["rows"][way]
            assert found[rank]["missed"][way].startswith(missed)
