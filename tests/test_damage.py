"""Of everything that is ours, some copies are damaged; see ``tests.damage``."""

from pathlib import Path

import pytest

from tests.damage import OURS, faults


@pytest.mark.slow
@pytest.mark.parametrize("kind", OURS)
def test_no_damage_is_silent(kind: str, tmp_path: Path) -> None:
    assert not faults(kind, 12, 0, tmp_path)
