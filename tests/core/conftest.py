"""What tests of the core share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.readers import Starting


@pytest.fixture(scope="session", autouse=True)
def readers() -> Iterator[None]:
    """Processes that read HDF5 and zarr are forked, but for the first."""
    if sys.platform != "linux":
        yield
        return
    starting = Starting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mouse_core.formats._files.h5.subprocess", starting)
        yield
    starting.close()
