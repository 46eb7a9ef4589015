"""Frames of videos are the same in NumPy, PyTorch and JAX, with any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import DatasetStore, Field
from mouse_core.testing import stream_digest
from tests.core.test_pictures import DEPTH, TOP, colours, depth, kept, rows_of
from tests.core.video_cases import video_rows, write_video

CAMERAS = ("observation_images_top", "observation_images_wrist")


def test_one_digest_for_all_packages_and_numbers_of_workers(tmp_path: Path) -> None:
    for k in range(2):
        write_video(tmp_path / f"{k}.mp4", options={"g": "4"}, count=8, seed=k)
    rows = video_rows(tmp_path, {name: np.roll(np.arange(8), k) for k, name in enumerate(CAMERAS)}, videos=2)
    store = DatasetStore(image_roots=[tmp_path]).from_dataset(rows)
    options: dict[str, Any] = {
        "windows": {CAMERAS[0]: [-1, 0], CAMERAS[1]: [0], "action": range(3)},
        "batch_size": 4,
        "seed": 2,
    }
    found = set()
    for package in (mouse_core, mouse_torch, mouse_jax):
        for workers in (0, 2):
            with package.PrefetchBatchifier(store, num_workers=workers, **options) as loader:
                found.add(stream_digest(loader, 4))
    assert len(found) == 1


def test_converted_pictures_have_one_digest(tmp_path: Path) -> None:
    source = rows_of({TOP: colours(), DEPTH: depth()})
    ways = {"raw": "raw", "png": "png", "video": [f"{DEPTH}=png", "video:hevc:pix_fmt=gbrp:lossless"]}
    fields = [Field(TOP, image=True), Field(DEPTH, image=True, dtype="int32", bounds=(0, 4095))]
    found = set()
    for name, way in ways.items():
        store = kept(source, tmp_path / name, way).to_store(fields=fields)
        for package in (mouse_core, mouse_torch, mouse_jax):
            with package.PrefetchBatchifier(store, 3, 4, seed=2, num_workers=1) as loader:
                found.add(stream_digest(loader, 3))
    assert len(found) == 1
