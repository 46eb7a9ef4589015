"""A store on disk keeps its promises when its writer is killed.

``tests.simulate`` tests power cuts, full disks and other readers, ``tests.damage`` damaged files.
"""

import json
import os

import pytest

from tests.programs import run_module

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs fork, and files told by descriptors")


@pytest.mark.slow
def test_kills() -> None:
    found = json.loads(run_module("tests.core.store_crash", "--kills", 15, "--seed", 1).splitlines()[-1])
    assert found["kills"] == 15
