"""LeRobotDatasets whose videos stay where they are: batches beside the pixels that decoding them in turn gives."""

import os
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, DatasetStore, formats
from mouse_core.cli import main
from mouse_core.errors import ConfigError, DataError
from mouse_core.formats.lerobot.reading import read_lerobot
from mouse_core.inspect import inspect
from mouse_core.video import index_video
from mouse_core.view.opening import opened_store
from tests.core.test_lerobot import SIDE, Robot, encode

TOP = "videos/observation.images.top/chunk-000"


def everything(store: Any) -> dict[str, np.ndarray]:
    return {name: values[0] for name, values in BatchSource(store, len(store), 1, sampling="last")[0].items()}


def in_turn(root: Path, camera: str) -> np.ndarray:
    """All frames of a camera, decoded from the beginning of each file."""
    av, frames = pytest.importorskip("av"), []
    for file in sorted((root / "videos").rglob("*.mp4")):
        if camera in file.parts:
            with av.open(str(file)) as container:
                frames += [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames)


def check(root: Path, store: Any, final: str, rows: int | None = None) -> None:
    """Hold the rows of a store against all frames of the videos, or against the first ones."""
    table = read_lerobot(root, final=final).to_table().slice(0, rows)
    found = everything(store)
    there = np.array(table["observation_missing"]) == 0 if final == "mark" else np.ones(len(table), bool)
    for column in table.column_names:
        if column.startswith("observation.images"):
            np.testing.assert_array_equal(found[column][there], in_turn(root, column)[: there.sum()])
            assert not found[column][~there].any()
    np.testing.assert_array_equal(found["action"], table["action"].to_pylist())
    assert found["done"].tolist() == table["done"].to_pylist()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Robot((5, 3, 7, 4), cameras=["top", "wrist"]).write(tmp_path_factory.mktemp("robot") / "set")


@pytest.mark.parametrize("final", [pytest.param("drop", marks=pytest.mark.slow), "mark"])
def test_frames_in_place_are_those_of_decoding_in_turn(final: str, tmp_path: Path) -> None:
    root = Robot((5, 1, 7, 4), cameras=["top", "wrist"]).write(tmp_path / "set")
    store = DatasetStore.open(root, final=final)
    check(root, store, final)
    kinds = {str(kind) for name, kind in store.columns.items() if ".images." in name}
    assert kinds == {"struct<video: int32, frame: int32>"}
    assert store.metadata.tasks == read_lerobot(root, final=final).metadata.tasks
    with opened_store(str(root), final=final) as found:  # by mouse view, too
        assert found.columns == store.columns


def test_where_the_folder_is_only_read_a_cache_is_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Path(shutil.copytree(root, tmp_path / "copy", ignore=shutil.ignore_patterns("*.index.arrow")))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("MOUSE_CACHE", str(tmp_path / "cache"))
    check(copied, DatasetStore.open(copied, final="drop"), "drop")
    assert not list(copied.rglob("*.index.arrow"))
    assert len(list((tmp_path / "cache" / "videos").iterdir())) == 4


def test_links_of_the_hub_are_followed_and_others_are_not(root: Path, tmp_path: Path) -> None:
    for name, message in (("snapshots", None), ("others", "expected a video file inside the dataset's folder")):
        place = tmp_path / name / "abc"
        (tmp_path / "blobs").mkdir(exist_ok=True)
        shutil.copytree(root, place, ignore=shutil.ignore_patterns("*.index.arrow"))
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
    said = r"top.*file-001\.mp4: expected a frame at (0\.9|1\.0).* nearest at 0\.8.* \(9 frames\).*episode 3 "
    with pytest.raises(DataError, match=said):
        DatasetStore.open(root, final="drop")
    stream = formats.open(root, final="drop", skip_broken=True)
    assert next(note for note in stream.notes if "left out" in note).startswith("episode 3 is left out: ")
    assert stream.rows == 15
    assert len(stream.to_table()) == 15
    store = stream.to_store()
    whole = Robot((5, 3, 7, 4), cameras=["top", "wrist"]).write(tmp_path / "whole")
    wanted = everything(DatasetStore.open(whole, final="drop"))
    np.testing.assert_equal(everything(store), {name: values[:15] for name, values in wanted.items()})
    (root / TOP / "file-000.mp4").unlink()
    with pytest.raises(DataError, match=r"expected a readable video, found path 'videos/.*file-000\.mp4'.*episode 0 "):
        DatasetStore.open(root, final="drop")
    left = read_lerobot(root, final="mark", skip_broken=True)
    assert left.to_table()["metadata_episode_index"].unique().to_pylist() == [2]
    assert [path.split("/")[-1] for path, _ in left.metadata.videos] == ["file-001.mp4"] * 2  # none that is not there
    (root / TOP / "file-001.mp4").unlink()
    with pytest.raises(DataError, match=r"expected an episode that can be read, found none: .*-000\.mp4.*-001"):
        formats.open(root, final="drop", skip_broken=True)


def test_inspect_names_all_episodes_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robot = Robot((5, 3, 7, 4, 6), cameras=["top", "wrist"])
    root = robot.write(tmp_path / "set", files=[[0, 1], [2, 3], [4]])
    whole = inspect(formats.open(root, final="drop", skip_broken=True))
    assert [one.code for one in whole.findings if one.level == "error"] == []
    # Episode 1 says no time; episode 3 lacks frames of the wrist, and a picture of episode 2 is broken.
    set_times(root, lambda times: pa.array([None if k == 6 else t for k, t in enumerate(times)], pa.float32()))
    wrist = root / str(TOP).replace("top", "wrist")
    encode(wrist / "file-001.mp4", [robot.picture(1, place) for place in range(8, 17)])
    index = index_video(root / TOP / "file-001.mp4")
    content = bytearray((root / TOP / "file-001.mp4").read_bytes())
    place = int(index.position[0])
    units = place + 4 + int.from_bytes(content[place : place + 4])  # behind what x264 says of itself
    content[units + 8 : units + 40] = bytes(32)
    (root / TOP / "file-001.mp4").write_bytes(content)
    # The last one was recorded at another rate.
    last = max((root / "data").rglob("*.parquet"))
    table = pq.read_table(last)
    late = pa.array(np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.4], np.float32))
    pq.write_table(table.set_column(table.schema.get_field_index("timestamp"), "timestamp", late), last)
    report = inspect(formats.open(root, final="drop", skip_broken=True))
    said = [one.message for one in report.findings if one.code == "broken-episode"]
    assert [message.split(":")[0] for message in said] == ["episode 1", "episode 2", "episode 3"]
    for message, why in zip(said, ("expected a timestamp", "cannot be decoded", "expected a frame at"), strict=True):
        assert why in message
    (rate,) = [one.message for one in report.findings if one.code == "off-rate"]
    assert rate.endswith("fps (10) give; the first is frame 5 of episode 4, at 0.4000 s")
    assert (report.episodes.count, report.rows) == (2, 11)
    assert main(["inspect", str(root), "--final", "drop", "--strict"]) == 1
    assert "episode 3: " in capsys.readouterr().out.replace("\n", " ")
    assert main(["convert", str(root), str(tmp_path / "rows"), "--final", "drop"]) == 2
    capsys.readouterr()
    assert main(["convert", str(root), str(tmp_path / "rows"), "--final", "drop", "--skip-broken"]) == 0
    assert "note: episode 2 is left out: " in capsys.readouterr().out
    assert formats.open(tmp_path / "rows").rows == 11
    assert main(["convert", str(tmp_path / "rows"), str(tmp_path / "again"), "--skip-broken"]) == 2
    assert "--skip-broken): expected a LeRobotDataset, found rows data" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))  # neither of those that failed left something behind


def encode_at(file: Path, times: Any, frames: Any) -> None:
    """A video whose frames are shown at some times, in milliseconds."""
    av = pytest.importorskip("av")
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=60, options={"crf": "10", "g": "2", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = *SIDE, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for time, pixels in zip(times, frames, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def brightness(root: Path, **options: Any) -> list[int]:
    """Of each row a pixel of its frame, which says when it is shown."""
    found = everything(DatasetStore.open(root, final="drop", **options))["observation.images.top"][:, 0, 0, 0]
    return [round(value / 20) for value in found.tolist()]


def set_times(root: Path, change: Any) -> None:
    """Change the column of times, float32, of the first file of frames."""
    file = min((root / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    place = table.schema.get_field_index("timestamp")
    pq.write_table(table.set_column(place, "timestamp", change(np.array(table["timestamp"]))), file)


def test_a_frame_is_the_one_of_the_time_that_its_row_says(tmp_path: Path) -> None:
    root = Robot((5, 3), cameras=["top"]).write(tmp_path / "set", files=[[0, 1]])
    video, plain = root / TOP / "file-000.mp4", [np.full((*SIDE, 3), 20 * k, np.uint8) for k in range(12)]
    encode_at(video, range(0, 800, 100), plain[:8])
    assert brightness(root) == [0, 1, 2, 3, 4, 5, 6, 7]
    # A row that is late shows a later frame, and two may show one.
    set_times(root, lambda times: pa.array([0.0, 0.2, 0.1, 0.1, 0.4, 0.0, 0.1, 0.2], pa.float32()))
    assert brightness(root) == [0, 2, 1, 1, 4, 5, 6, 7]
    # Of many frames that of the time counts, whatever is shown just before.
    times = sorted([*range(0, 800, 100), 160, 260, 360, 601])
    encode_at(video, times, [plain[time // 100 if time % 100 == 0 else 11] for time in times])
    assert brightness(root) == [0, 2, 1, 1, 4, 5, 6, 7]
    # And where it is not there, no other: 0.6 s is that of the second row of episode 1.
    for time in (599, 605):
        encode_at(video, [*range(0, 600, 100), time, 700], plain[:8])
        assert brightness(root, skip_broken=True) == [0, 2, 1, 1, 4]
        message = rf"expected a frame at 0\.6000 s, found the nearest at 0\.{time}0 s"
        with pytest.raises(DataError, match=rf"{message}.*top in episode 1 "):
            DatasetStore.open(root, final="drop")


def test_a_tolerance_takes_frames_that_are_further_away(tmp_path: Path) -> None:
    root = Robot((5, 3), cameras=["top"]).write(tmp_path / "set", files=[[0, 1]])
    plain = [np.full((*SIDE, 3), 20 * k, np.uint8) for k in range(8)]
    encode_at(root / TOP / "file-000.mp4", range(0, 800, 100), plain)
    set_times(root, lambda times: pa.array(times + np.float32(0.003), pa.float32()))
    with pytest.raises(DataError, match=r"at 0\.\d030 s, .*; tolerance=0\.003\d \(--tolerance\) allows it"):
        read_lerobot(root, final="drop")
    with pytest.raises(DataError, match=r"expected an episode that can be read, found none.*tolerance="):
        read_lerobot(root, final="drop", skip_broken=True)
    assert brightness(root, tolerance=0.0035) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(DatasetStore.open(root, final="drop", tolerance=0.0035)) == 8
    assert main(["inspect", str(root), "--final", "drop", "--tolerance", "0.0035"]) == 0
    for wrong in (-1, float("nan"), "1"):
        with pytest.raises(ConfigError, match=r"tolerance \(--tolerance\): expected a number of seconds, 0 or more"):
            read_lerobot(root, final="drop", tolerance=wrong)
    (tmp_path / "x.npz").touch()
    with pytest.raises(ConfigError, match=r"tolerance \(--tolerance\): expected a LeRobotDataset"):
        formats.open(tmp_path / "x.npz", format="ogbench", tolerance=1.0)


def test_times_are_as_exact_as_numbers_hold_them(tmp_path: Path) -> None:
    root = Robot((4,), cameras=["top"]).write(tmp_path / "set", files=[[0]], change=lambda info: info.update(fps=3))
    plain = [np.full((*SIDE, 3), 20 * k, np.uint8) for k in range(4)]
    encode_at(root / TOP / "file-000.mp4", [3600000, 3600333, 3600667, 3601000], plain)
    set_times(root, lambda times: pa.array((3600 + np.arange(4) / 3).astype(np.float32)))
    assert brightness(root) == [0, 1, 2, 3]


def test_rows_that_say_no_time_are_refused_by_episode(tmp_path: Path) -> None:
    root = Robot((5, 3, 7, 4), cameras=["top"]).write(tmp_path / "set")
    set_times(root, lambda times: pa.array([None if k == 6 else t for k, t in enumerate(times)], pa.float32()))
    with pytest.raises(DataError, match=r"file-000\.parquet: expected a timestamp of frame 1, found nan; episode 1 "):
        DatasetStore.open(root, final="drop")
    stream = read_lerobot(root, final="drop", skip_broken=True)
    assert stream.to_table()["metadata_episode_index"].unique().to_pylist() == [0, 2, 3]
    first, last = sorted((root / "data").rglob("*.parquet"))
    pq.write_table(pq.read_table(first).drop_columns(["timestamp"]), first)
    stream = read_lerobot(root, final="drop", skip_broken=True)
    assert stream.to_table()["metadata_episode_index"].unique().to_pylist() == [2, 3]
    pq.write_table(pq.read_table(last).slice(0, 9), last)  # 2 rows of episode 3 are lost
    with pytest.raises(DataError, match=r"found none: .*-000.*found nan; .*-001\.parquet: expected 11 frames.*found 9"):
        formats.open(root, final="drop", skip_broken=True)


def test_what_cannot_be_opened_says_why(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"options of DatasetStore, found .*final"):
        DatasetStore.open(root, "a", final="drop")
    with pytest.raises(ConfigError, match="final='drop' leaves out"):
        DatasetStore.open(root)
    bare = shutil.copytree(root, tmp_path / "bare", ignore=shutil.ignore_patterns("*.index.arrow"))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"^camera videos need PyAV: pip install 'mouse-data\[video\]'$"):
        DatasetStore.open(bare, final="drop")
    assert "observation.images.top" not in DatasetStore.open(bare, final="drop", cameras=False).columns
