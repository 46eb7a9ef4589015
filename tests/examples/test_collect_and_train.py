"""The example of a collector and a trainer, as a user runs it."""

from pathlib import Path

import pytest

from mouse_core import DatasetStore
from tests.programs import EXAMPLES, run_program


@pytest.mark.slow
def test_what_was_collected_is_trained_on_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    folder = tmp_path / "store"
    options = ("--episodes", "30", "--epochs", "3")
    done = run_program(EXAMPLES / "collect_and_train.py", str(folder), *options, frameworks=True, seconds=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"rows: {len(DatasetStore.open(folder))}"
    assert DatasetStore.open(folder).episodes.num_rows == 30
