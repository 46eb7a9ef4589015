"""Pictures are the same in NumPy, PyTorch and JAX, however they were converted."""

from pathlib import Path

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import Field
from mouse_core.testing import stream_digest
from tests.core.test_pictures import DEPTH, TOP, colours, depth, kept, rows_of, video_of


def test_converted_pictures_have_one_digest(tmp_path: Path) -> None:
    source = rows_of({TOP: colours(), DEPTH: depth()})
    streams = {way: kept(source, tmp_path / way, way) for way in ("raw", "png")}
    streams["video"] = video_of(tmp_path, {TOP: colours()}, **{DEPTH: depth()})
    fields = [Field(TOP, image=True), Field(DEPTH, image=True, dtype="int32", bounds=(0, 4095))]
    found = set()
    for stream in streams.values():
        store = stream.to_store(fields=fields)
        for package in (mouse_core, mouse_torch, mouse_jax):
            with package.PrefetchBatchifier(store, 3, 4, seed=2, num_workers=1) as loader:
                found.add(stream_digest(loader, 3))
    assert len(found) == 1
