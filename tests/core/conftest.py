"""What tests of the core share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.readers import Starting

if TYPE_CHECKING:
    from pathlib import Path

    from tests.core.hub_server import HubServer
    from tests.core.object_server import ObjectServer


@pytest.fixture(scope="session", autouse=True)
def readers() -> Iterator[None]:
    """Processes that read HDF5 and zarr, and that render templates, are forked, but for the first."""
    if sys.platform != "linux":
        yield
        return
    starting = Starting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mouse_core._base.child.subprocess", starting)
        yield
    starting.close()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A Hub on the loopback interface, whose commits are checked at the end."""
    from tests.core.hub_client import checked_hub  # needs datasets

    yield from checked_hub()


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    """An object storage on the loopback interface."""
    from tests.core.object_server import ObjectServer

    with ObjectServer() as running:
        yield running


@pytest.fixture
def options(server: ObjectServer, tmp_path: Path) -> dict[str, Any]:
    """Options that open data in an empty object storage, with a cache of their own."""
    for contents in (server.objects, server.faults, server.asked):
        contents.clear()
    return {"storage_options": server.options, "cache": tmp_path / "cache", "cache_bytes": 64 << 20}
