"""Crafted files raise errors of ours, in bounded time and memory, and run nothing; see ``tests.core.crafted``."""

import re
from pathlib import Path

import pytest

from tests.core.crafted import CASES, MEGABYTES, SECONDS, read_crafted

# Kinds whose files take long to make or read: a process for each file of HDF5 and Zarr, TFDS, videos, models.
_SLOW = ("array_record", "h5", "JSON", "links: zarr", "tfrecord", "video", "zarr")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith(_SLOW) else name for name in CASES]
)
def test_crafted_files_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_crafted(name, tmp_path)
    assert found["ours"], found["error"]
    assert re.search(CASES[name].message, found["message"]), found["message"]
    assert len(found["message"]) < 2000
    assert "\n" not in found["message"]
    assert (found["seconds"] < SECONDS, found["megabytes"] < MEGABYTES) == (True, True), found
    assert not [*tmp_path.rglob("trapped"), *Path("/tmp").glob("trapped")]
