"""LeRobotDatasets whose videos stay where they are: batches beside the pixels that decoding them in turn gives."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, DatasetStore, formats
from mouse_core.errors import ConfigError, DataError
from mouse_core.formats.lerobot import read_lerobot
from tests.core.test_lerobot import SIDE, DepthRobot, Robot, depth_camera, encode

TOP = "videos/observation.images.top/chunk-000"


def everything(store: Any) -> dict[str, np.ndarray]:
    return {name: values[0] for name, values in BatchSource(store, len(store), 1, sampling="last")[0].items()}


def check(root: Path, store: Any, final: str, **options: Any) -> None:
    """Hold all rows of a store against the stream of pixels."""
    table = read_lerobot(root, final=final, videos="pixels", **options).to_table()
    found = everything(store)
    for column in table.column_names:
        if column.startswith("observation_image"):
            name = "obs_image" if column == "observation_image" else column
            np.testing.assert_array_equal(found[name], np.array(table[column].to_pylist()).reshape(len(table), -1))
    np.testing.assert_array_equal(found["action"], table["action"].to_pylist())
    np.testing.assert_array_equal(found["obs_continuous"], table["observation"].to_pylist())
    assert found["done"].tolist() == table["done"].to_pylist()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Robot((5, 3, 7, 4), cameras=["top", "wrist"]).write(tmp_path_factory.mktemp("robot") / "set")


@pytest.mark.parametrize(
    ("version", "final", "cameras"),
    [("v3.0", "drop", ["top", "wrist"]), ("v2.1", "mark", ["top", "wrist"]), ("v3.0", "mark", ["top"])],
)
def test_frames_in_place_are_those_of_decoding_in_turn(
    version: str, final: str, cameras: list[str], tmp_path: Path
) -> None:
    root = Robot((5, 1, 7, 4), cameras=cameras).write(tmp_path / "set", version=version)
    store = formats.open(root, final=final).to_store()
    check(root, store, final)
    assert all(
        str(kind) == "struct<video: int32, frame: int32>" for name, kind in store.columns.items() if "_image" in name
    )
    assert store.about.tasks == read_lerobot(root, final=final).about.tasks


def test_opening_again_reads_what_was_kept(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Path(shutil.copytree(root, tmp_path / "copy"))
    shutil.rmtree(copied / ".mouse", ignore_errors=True)
    first = DatasetStore.open(copied, final="drop")
    kept = list((copied / ".mouse").iterdir())
    assert len(kept) == 1
    monkeypatch.setattr("mouse_core.formats.lerobot.reading.read_description", None)  # nothing of it is read
    again = DatasetStore.open(copied, final="drop", alignment="arrived")
    assert again.snapshot().fingerprint == first.snapshot().fingerprint
    np.testing.assert_equal(everything(again), everything(first))
    assert formats.open(copied / ".mouse" / kept[0].name).rows == len(first)
    monkeypatch.undo()
    later = next((copied / "data").rglob("*.parquet"))
    os.utime(later, (1, 1))
    assert DatasetStore.open(copied, final="drop").snapshot().fingerprint == first.snapshot().fingerprint
    assert [place.name for place in (copied / ".mouse").iterdir()] != [kept[0].name]
    assert len(list((copied / ".mouse").iterdir())) == 1
    (next((copied / ".mouse").iterdir()) / "state.json").unlink()  # as a machine may leave it that stopped
    (next((copied / ".mouse").iterdir()) / "data-00000-of-00001.arrow").write_bytes(b"ARROW")
    assert DatasetStore.open(copied, final="drop").snapshot().fingerprint == first.snapshot().fingerprint


def test_where_the_folder_is_only_read_a_cache_is_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Path(shutil.copytree(root, tmp_path / "copy", ignore=shutil.ignore_patterns("*.index.arrow", ".mouse")))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("MOUSE_CACHE", str(tmp_path / "cache"))
    check(copied, DatasetStore.open(copied, final="drop"), "drop")
    assert not list(copied.rglob("*.index.arrow"))
    assert not (copied / ".mouse").exists()
    assert len(list((tmp_path / "cache" / "videos").iterdir())) == 4
    assert len(list((tmp_path / "cache" / "lerobot").glob("*/rows-*"))) == 1


def test_links_of_the_hub_are_followed_and_others_are_not(root: Path, tmp_path: Path) -> None:
    for name, message in (("snapshots", None), ("others", "expected a video file inside the dataset's folder")):
        place = tmp_path / name / "abc"
        (tmp_path / "blobs").mkdir(exist_ok=True)
        shutil.copytree(root, place, ignore=shutil.ignore_patterns("*.index.arrow", ".mouse"))
        for number, file in enumerate(sorted(place.rglob("*.mp4"))):
            file.replace(tmp_path / "blobs" / f"{number}")
            file.symlink_to(tmp_path / "blobs" / f"{number}")
        if message is None:
            check(place, DatasetStore.open(place, final="drop"), "drop")
        else:
            with pytest.raises(DataError, match=message):
                DatasetStore.open(place, final="drop")


def test_episodes_without_their_frames_are_refused_or_left_out(tmp_path: Path) -> None:
    robot = Robot((5, 3, 7, 4), cameras=["top", "wrist"])
    root = robot.write(tmp_path / "set")
    # The second file has the episodes 2 and 3, of 7 and 4 frames: of the last one two are missing.
    encode(root / TOP / "file-001.mp4", [robot.picture(0, place) for place in range(8, 17)])
    with pytest.raises(
        DataError, match=r"top.*file-001\.mp4: expected a frame at .* found none \(9 frames\).*episode 3 "
    ):
        DatasetStore.open(root, final="drop")
    stream = formats.open(root, final="drop", skip_broken=True)
    assert next(note for note in stream.notes if "left out" in note).startswith("episode 3 is left out: ")
    assert (stream.episodes, stream.rows) == (3, 15)
    assert len(stream.to_table()) == 15
    store = stream.to_store()
    check(root, store, "drop", skip_broken=True)
    whole = Robot((5, 3, 7, 4), cameras=["top", "wrist"]).write(tmp_path / "whole")
    np.testing.assert_equal(
        everything(store), {k: v[:15] for k, v in everything(DatasetStore.open(whole, final="drop")).items()}
    )
    (root / TOP / "file-000.mp4").unlink()
    with pytest.raises(DataError, match=r"expected a readable video, found path 'videos/.*file-000\.mp4'.*episode 0 "):
        DatasetStore.open(root, final="drop")
    left = read_lerobot(root, final="mark", skip_broken=True, videos="frames")
    assert left.to_table()["metadata_episode_index"].unique().to_pylist() == [2]


def test_depth_in_place_has_all_of_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")

    def encode_depth(file: Path, frames: Any) -> None:
        with av.open(str(file), "w") as container:
            try:
                stream = container.add_stream("libx265", rate=10)
            except av.codec.codec.UnknownCodecError:
                pytest.skip("PyAV has no encoder libx265")
            stream.height, stream.width, stream.pix_fmt = *SIDE, "gray12le"
            stream.options = {"x265-params": "lossless=1:log-level=none:pools=none:keyint=3"}
            for pixels in frames:
                frame = av.VideoFrame(SIDE[1], SIDE[0], "gray12le")
                np.frombuffer(frame.planes[0], np.uint16).reshape(SIDE[0], -1)[:, : SIDE[1]] = pixels
                container.mux(stream.encode(frame))
            container.mux(stream.encode())

    monkeypatch.setattr("tests.core.test_lerobot.encode", encode_depth)
    robot = DepthRobot((3, 2), cameras=["depth"])
    root = robot.write(tmp_path / "d", files=[[0, 1]], change=depth_camera({"video.pix_fmt": "gray12le"}))
    store = DatasetStore.open(root, final="drop")
    found = everything(store)["observation_images_depth"]
    assert found.dtype == np.uint16
    assert found.tolist() == [robot.depth(place).reshape(-1).tolist() for place in range(5)]


def test_what_cannot_be_opened_says_why(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected the mode 'r', as a LeRobotDataset is only read"):
        DatasetStore.open(root, "a")
    with pytest.raises(ConfigError, match="videos: expected 'pixels' or 'frames', found 'all'"):
        read_lerobot(root, final="drop", videos="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="final='drop' leaves out"):
        DatasetStore.open(root)
    bare = shutil.copytree(root, tmp_path / "bare", ignore=shutil.ignore_patterns("*.index.arrow", ".mouse"))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"^camera videos need PyAV: pip install 'mouse-data\[video\]'$"):
        DatasetStore.open(bare, final="drop")
    assert "observation_images_top" not in DatasetStore.open(bare, final="drop", cameras=False).columns
