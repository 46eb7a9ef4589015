"""LeRobotDataset v3: files made to the published layout, and what a reader makes of them, frame by frame."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, Field, SchemaError, Seconds, formats
from mouse_core.formats import converting
from mouse_core.formats.converting import convert
from mouse_core.formats.lerobot import read_lerobot, write_lerobot
from mouse_core.images import encode_png
from mouse_core.inspect import inspect
from mouse_core.metadata import DatasetMetadata

FPS = 10
SIDE = (48, 64)


class Robot:
    """What was recorded, frame by frame.

    Args:
        lengths: Frames of each episode.
        cameras: Names of cameras, videos or pictures.
    """

    def __init__(self, lengths: Sequence[int] = (5, 3, 7, 4), *, cameras: Sequence[str] = (), seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        n = sum(lengths)
        self.lengths = list(lengths)
        self.cameras = list(cameras)
        self.state = rng.normal(size=(n, 6)).astype(np.float32)
        self.action = rng.normal(size=(n, 6)).astype(np.float32)
        self.reward = rng.normal(size=n).astype(np.float32)
        self.episode = np.repeat(np.arange(len(lengths)), lengths)
        self.frame = np.concatenate([np.arange(length) for length in lengths])
        self.done = self.frame == np.array(lengths)[self.episode] - 1

    def picture(self, camera: int, place: int) -> npt.NDArray[np.uint8]:
        """A frame whose left half has the brightness of its place, and whose right half that of its camera."""
        pixels = np.zeros((*SIDE, 3), np.uint8)
        pixels[:, : SIDE[1] // 2] = 20 + 10 * place % 220
        pixels[:, SIDE[1] // 2 :] = 60 * (camera + 1)
        return pixels

    def write(
        self,
        root: Path,
        *,
        kind: str = "video",
        files: Sequence[Sequence[int]] = ((0, 1), (2, 3)),
        drop: Sequence[str] = (),
        change: Callable[[dict[str, Any]], None] | None = None,
    ) -> Path:
        """Write the dataset, its episodes spread over files as `files` says."""
        joints = {"dtype": "float32", "shape": [6], "names": [f"joint_{k}" for k in range(6)]}
        image = {"dtype": kind, "shape": [*SIDE, 3], "names": ["height", "width", "channels"]}
        numbers = {"next.reward": "float32", "next.done": "bool", "timestamp": "float32"}
        numbers |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
        feature = {
            "observation.state": joints,
            "action": dict(joints),
            **{name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in numbers.items()},
            **{f"observation.images.{camera}": dict(image) for camera in self.cameras},
        }
        info: dict[str, Any] = {
            "codebase_version": "v3.0",
            "robot_type": "arm",
            "total_episodes": len(self.lengths),
            "total_frames": len(self.frame),
            "total_tasks": 2,
            "chunks_size": 1000,
            "fps": FPS,
            "splits": {"train": f"0:{len(self.lengths)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
            "features": {name: entry for name, entry in feature.items() if name not in drop},
        }
        if change:
            change(info)
        (root / "meta").mkdir(parents=True)
        (root / "meta" / "info.json").write_text(json.dumps(info))
        (root / "meta" / "stats.json").write_text(json.dumps({"action": {"mean": [0.0] * 6}}))
        tasks = pa.table({"task_index": [0, 1], "__index_level_0__": ["pick", "place"]})
        pq.write_table(tasks, root / "meta" / "tasks.parquet")
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        rows: list[dict[str, Any]] = []
        for number, chosen in enumerate(files):
            frames = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in chosen])
            self.write_data(root, number, frames, kind, drop)
            offset = 0
            for k in chosen:
                row = {
                    "episode_index": k,
                    "tasks": ["pick" if k % 2 == 0 else "place"],
                    "length": self.lengths[k],
                    "dataset_from_index": int(starts[k]),
                    "dataset_to_index": int(starts[k + 1]),
                    "data/chunk_index": 0,
                    "data/file_index": number,
                }
                for camera in self.cameras if kind == "video" else ():
                    key = f"videos/observation.images.{camera}"
                    row |= {f"{key}/chunk_index": 0, f"{key}/file_index": number}
                    row[f"{key}/from_timestamp"] = offset / FPS
                    row[f"{key}/to_timestamp"] = (offset + self.lengths[k]) / FPS
                offset += self.lengths[k]
                rows.append(row)
            for place, camera in enumerate(self.cameras if kind == "video" else ()):
                folder = root / "videos" / f"observation.images.{camera}" / "chunk-000"
                folder.mkdir(parents=True, exist_ok=True)
                encode(folder / f"file-{number:03d}.mp4", [self.picture(place, int(t)) for t in frames])
        (root / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
        return root

    def write_data(self, root: Path, number: int, frames: Any, kind: str, drop: Sequence[str]) -> None:
        columns: dict[str, Any] = {
            "observation.state": pa.array(self.state[frames].tolist(), pa.list_(pa.float32(), 6)),
            "action": pa.array(self.action[frames].tolist(), pa.list_(pa.float32(), 6)),
            "next.reward": self.reward[frames],
            "next.done": self.done[frames],
            "timestamp": (self.frame[frames] / FPS).astype(np.float32),
            "frame_index": self.frame[frames],
            "episode_index": self.episode[frames],
            "index": frames,
            "task_index": self.episode[frames] % 2,
        }
        if kind == "image":
            for place, camera in enumerate(self.cameras):
                columns[f"observation.images.{camera}"] = pa.array(
                    [{"bytes": encode_png(self.picture(place, int(t))), "path": None} for t in frames],
                    pa.struct({"bytes": pa.binary(), "path": pa.string()}),
                )
        folder = root / "data" / "chunk-000"
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.table({name: values for name, values in columns.items() if name not in drop})
        pq.write_table(table, folder / f"file-{number:03d}.parquet", write_page_checksum=True)

    def expected(self, final: str) -> dict[str, list[Any]]:
        """The rows, by a plain loop over what was recorded."""
        names = ("observation.state", "action", "reward", "done", "episode_step", "episode")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        place = 0
        for number, length in enumerate(self.lengths):
            for step in range(length + (final == "mark")):
                t = place + step
                known = step < length
                rows["observation.state"].append(self.state[t].tolist() if known else [0.0] * 6)
                rows["action"].append(self.action[t - 1].tolist() if step else [0.0] * 6)
                rows["reward"].append(float(self.reward[t - 1]) if step else 0.0)
                ends = step == length if final == "mark" else step == length - 1
                rows["done"].append((1 if final == "mark" else 2) if ends and step else 0)
                rows["episode_step"].append(step)
                rows["episode"].append(number)
            place += length
        return rows


def encode(file: Path, frames: Sequence[npt.NDArray[np.uint8]]) -> None:
    av = pytest.importorskip("av")
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "10", "g": "4"})
        stream.height, stream.width, stream.pix_fmt = *SIDE, "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize(("final", "size"), [("drop", 1), ("drop", 8192), ("mark", 1), ("mark", 2)])
def test_rows_are_what_was_recorded(final: str, size: int, tmp_path: Path) -> None:
    robot = Robot()
    stream = formats.open(robot.write(tmp_path / "set"), final=final, batch_rows=size)
    table = stream.to_table()
    wanted = robot.expected(final)
    for name in ("observation.state", "action", "reward", "done", "episode_step"):
        assert table.column(name).to_pylist() == wanted[name], name
    assert table.column("metadata_episode_index").to_pylist() == wanted["episode"]
    assert (stream.format, stream.rows) == ("lerobot", table.num_rows)
    assert stream.format_metadata["tasks"] == {0: "pick", 1: "place"}
    known = DatasetMetadata("arrived", tasks={0: "pick", 1: "place"}, frames_per_second=[FPS], robots=["arm"])
    assert stream.metadata.replace(dimensions={}, fields=(), layout=None) == known
    assert stream.format_metadata["stats"] == {"action": {"mean": [0.0] * 6}}
    joints = tuple(f"joint_{k}" for k in range(6))
    assert stream.metadata.dimensions == {"observation.state": joints, "action": joints}
    assert any("does not distinguish terminal" in note for note in stream.notes)
    if final == "mark":
        ends = [step == length for length in robot.lengths for step in range(length + 1)]
        assert table.column("observation_missing").to_pylist() == [int(end) for end in ends]
    # The marked row lacks its observation alone: it is of the same task, a frame later.
    times = [step / FPS for step in wanted["episode_step"]]
    assert table.column("metadata_timestamp").to_pylist() == pytest.approx(times, abs=1e-6)
    assert table.column("metadata_task_index").to_pylist() == [episode % 2 for episode in wanted["episode"]]
    assert rows_again(stream) == table.num_rows


def delivered(stream: Any, column: str) -> np.ndarray:
    """All images of a column, ``[n, H, W, C]``."""
    store = stream.to_store()
    found: np.ndarray = BatchSource(store, len(store), 1, sampling="last")[0][column][0]
    return found


def rows_again(stream: Any) -> int:
    return sum(batch.num_rows for batch in stream)


@pytest.mark.parametrize("way", ["store", "folder"])
def test_marked_rows_are_found_by_their_task_and_time(way: str, tmp_path: Path) -> None:
    robot = Robot()
    store = DatasetStore.open(robot.write(tmp_path / "set"), final="mark")
    if way == "folder":
        convert(formats.open(tmp_path / "set", final="mark"), tmp_path / "rows")
        store = DatasetStore.open(tmp_path / "rows")
    places = list(store.where(task="place"))
    assert len(places) == sum(robot.lengths[1::2]) + 2
    train, held = store.split(train=0.5, held=0.5, by="task").values()
    assert len(train) + len(held) == len(store)
    source = BatchSource(
        DatasetStore(fields=[Field("timestamp", "metadata_timestamp")]).from_dataset(store.to_dataset()),
        batch_size=len(store),
        sampling="last",
        windows={"timestamp": Seconds([-1 / FPS, 0.0])},
    )
    stamps = source[0]["timestamp"][source[0]["timestamp_mask"].all(axis=1)]
    np.testing.assert_allclose(np.diff(stamps, axis=1), 1 / FPS, atol=1e-5)


def test_pictures_belong_to_their_frames(tmp_path: Path) -> None:
    robot = Robot((5, 3, 7, 12), cameras=["top"])
    root = robot.write(tmp_path / "set", kind="image")
    found = delivered(read_lerobot(root, final="drop", batch_rows=2), IMAGE)
    assert np.array_equal(found, [robot.picture(0, t) for t in range(len(robot.frame))])
    assert IMAGE not in read_lerobot(root, final="drop", cameras=False).columns


def test_without_reward_and_done(tmp_path: Path) -> None:
    robot = Robot()
    stream = read_lerobot(robot.write(tmp_path / "set", drop=["next.reward", "next.done"]), final="mark")
    table = stream.to_table()
    assert set(table.column("reward").to_pylist()) == {0.0}
    assert table.column("done").to_pylist() == [2 if code else 0 for code in robot.expected("mark")["done"]]
    assert len(stream.notes) == 2


def test_episodes_may_stand_in_any_order_in_the_videos(tmp_path: Path) -> None:
    robot = Robot((4, 4, 4, 4), cameras=["top"])
    robot.write(tmp_path / "set")
    file = tmp_path / "set" / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    rows = pq.read_table(file).to_pylist()
    key = "videos/observation.images.top"
    for name in (f"{key}/from_timestamp", f"{key}/to_timestamp"):
        rows[0][name], rows[1][name] = rows[1][name], rows[0][name]
    pq.write_table(pa.Table.from_pylist(rows), file)
    found = delivered(read_lerobot(tmp_path / "set", final="drop"), IMAGE)[:8, 0, 4, 0].astype(np.int64)
    wanted = [robot.picture(0, t)[0, 4, 0] for t in (4, 5, 6, 7, 0, 1, 2, 3)]
    assert np.abs(found - np.array(wanted)).max() <= 4


IMAGE = "observation.images.top"


@pytest.mark.parametrize(
    ("keys", "value", "error", "message"),
    [
        ("codebase_version", "v2.1", ConfigError, r"version v3\.0, found 'v2\.1'; LeRobot's script convert_dataset"),
        ("total_frames", 20, DataError, r"info\.json: expected total_frames of 19"),
        ("fps", 0, DataError, r"info\.json: expected fps as a positive number"),
        (("features", "../../etc"), {"dtype": "video"}, DataError, r"info\.json: expected the name of a feature"),
        (("features", IMAGE, "shape"), [10**6, 10**6, 3], DataError, r"expected a shape \[height, width, channels\]"),
        (("features", IMAGE, "shape"), [40, 40, 3], DataError, r"-000\.mp4: expected frames of 40x40, found 48x64"),
        (("features", "action"), None, SchemaError, r"expected a feature 'action'"),
        (
            ("features", "action", "shape"),
            [7],
            DataError,
            r"-000\.parquet: action: expected float32 \[7\], found",
        ),
    ],
)
def test_descriptions_that_cannot_be(
    keys: str | tuple[str, ...], value: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    def change(info: dict[str, Any]) -> None:
        *way, last = (keys,) if isinstance(keys, str) else keys
        for key in way:
            info = info[key]
        info[last] = value
        if value is None:
            del info[last]

    Robot(cameras=["top"]).write(tmp_path / "set", change=change)
    with pytest.raises(error, match=message):
        rows_again(read_lerobot(tmp_path / "set", final="drop"))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    robot = Robot(cameras=["top"])
    for part, message in (
        ("videos/observation.images.top/chunk-000/file-001.mp4", "expected a readable video, found .* in episode 2"),
        ("data/chunk-000/file-001.parquet", "file-001.parquet: expected a file of frames"),
        ("meta/episodes/chunk-000/file-000.parquet", "expected Parquet files with episodes, found none"),
    ):
        root = robot.write(tmp_path / part.replace("/", "-"))
        (root / part).unlink()
        with pytest.raises(DataError, match=message):
            rows_again(read_lerobot(root, final="drop"))


def test_frames_out_of_order_are_found(tmp_path: Path) -> None:
    robot = Robot()
    robot.frame[2], robot.frame[3] = 3, 2
    with pytest.raises(DataError, match=r"-000\.parquet: expected frame 2 of episode 0, found frame 3 of episode 0"):
        rows_again(read_lerobot(robot.write(tmp_path / "set"), final="drop"))


class DepthRobot(Robot):
    bits = 12

    def depth(self, place: int) -> npt.NDArray[np.uint16]:
        return np.random.default_rng(place).integers(0, 2**self.bits, SIDE).astype(np.uint16)

    def picture(self, camera: int, place: int) -> npt.NDArray[np.uint8]:
        return self.depth(place)  # type: ignore[return-value]


def encode_depth(file: Path, frames: Sequence[npt.NDArray[np.uint16]]) -> None:
    """A video of greys of 12 bits, without loss."""
    av = pytest.importorskip("av")
    options = {"x265-params": "lossless=1:log-level=none:pools=none:keyint=3"}
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx265", rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt = *SIDE, "gray12le"
        for pixels in frames:
            frame = av.VideoFrame(SIDE[1], SIDE[0], "gray12le")
            np.frombuffer(frame.planes[0], np.uint16).reshape(SIDE[0], -1)[:, : SIDE[1]] = pixels
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def depth_camera(said: dict[str, Any], shape: tuple[int, ...] = (*SIDE, 1)) -> Callable[[dict[str, Any]], None]:
    def change(info: dict[str, Any]) -> None:
        entry = info["features"]["observation.images.depth"]
        entry["shape"], entry["info"] = list(shape), said
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

    return change


@pytest.mark.parametrize("said", [{"video.pix_fmt": "gray12le", "is_depth_map": True}, {"is_depth_map": True}])
def test_depth_videos_keep_all_of_their_bits(said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    robot = DepthRobot((3, 2), cameras=["depth"])
    monkeypatch.setattr(f"{__name__}.encode", encode_depth)
    root = robot.write(tmp_path / "d", files=[[0, 1]], change=depth_camera(said))
    stream = read_lerobot(root, final="drop")
    assert any("numbers of 16 bits" in note for note in stream.notes)
    found = delivered(stream, "observation.images.depth")
    assert found.dtype == np.uint16
    assert found.tolist() == [robot.depth(place)[:, :, None].tolist() for place in range(5)]
    unsaid = robot.write(tmp_path / "unsaid", files=[[0, 1]], change=depth_camera({}))
    with pytest.raises(DataError, match=r"expected 8 bits per channel.*found gray12le"):
        BatchSource(DatasetStore.open(unsaid, final="drop"), 5, 1)[0]


def test_depth_pictures_keep_all_of_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_module = pytest.importorskip("PIL.Image")

    def encoded(pixels: npt.NDArray[np.uint16]) -> bytes:
        stream = io.BytesIO()
        image_module.fromarray(pixels).save(stream, "TIFF")
        return stream.getvalue()

    monkeypatch.setattr(f"{__name__}.encode_png", encoded)
    robot = DepthRobot((3, 2), cameras=["depth"])
    robot.bits = 16
    said = depth_camera({"is_depth_map": True})
    stream = read_lerobot(robot.write(tmp_path / "d", kind="image", files=[[0, 1]], change=said), final="mark")
    batch = BatchSource(stream.to_store(), 7, 1, sampling="last")[0]
    found = batch["observation.images.depth"][0, ..., 0]
    assert found.dtype == np.uint16
    zeros = np.zeros(SIDE, np.uint16)
    np.testing.assert_array_equal(found, [*map(robot.depth, range(3)), zeros, *map(robot.depth, range(3, 5)), zeros])
    plain = robot.write(tmp_path / "p", kind="image", files=[[0, 1]], change=depth_camera({}))
    with pytest.raises(DataError, match=r"0 of episode 0: observation.images.depth: expected pixels 0\.\.255, found"):
        read_lerobot(plain, final="drop").to_table()


def test_pictures_in_files_of_rows_stay_as_they_are(tmp_path: Path) -> None:
    robot = Robot((5, 3, 7, 4), cameras=["top", "wrist"])
    root = robot.write(tmp_path / "set", kind="image")
    for size, final in ((1, "mark"), (3, "drop"), (8192, "mark")):
        table = read_lerobot(root, final=final, batch_rows=size).to_table()
        assert str(table.schema.field("observation.images.top").type) == "struct<bytes: binary, path: string>"
        marked = table["observation_missing"].to_pylist() if final == "mark" else [0] * 19
        seen = list(zip(places(marked), marked, strict=True))
        found = table["observation.images.wrist"].to_pylist()
        wanted = [None if gone else encode_png(robot.picture(1, k)) for k, gone in seen]
        assert [one and one["bytes"] for one in found] == wanted
    store = DatasetStore.open(root, final="mark")
    batch = BatchSource(store, 23, 1, sampling="last")[0]
    for number, camera in enumerate(("top", "wrist")):
        frames = [robot.picture(number, k) * (not gone) for k, gone in seen]
        np.testing.assert_array_equal(batch[f"observation.images.{camera}"][0], frames)
    again = tmp_path / "again"
    write_lerobot(store, again, images="png", frames_per_second=FPS)
    found = read_lerobot(again, final="drop").to_table()["observation.images.top"].to_pylist()
    assert [one["bytes"] for one in found] == [encode_png(robot.picture(0, k)) for k in range(19)]


def places(marked: Sequence[int]) -> list[int]:
    """Which frame each row shows, rows that are marked that of the one behind."""
    return (np.cumsum(1 - np.array(marked)) - 1).tolist()


def changed(file: Path, name: str, column: Any) -> None:
    """Have another column in a file of frames."""
    table = pq.read_table(file)
    place = table.schema.get_field_index(name)
    pq.write_table(table.append_column(name, column) if place < 0 else table.set_column(place, name, column), file)


@pytest.mark.parametrize(("shape", "dtype"), [((3,), "bool"), ((2, 3), "float32"), ((2, 3, 2), "int64")])
def test_features_of_any_shape_are_read(shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    def change(info: dict[str, Any]) -> None:
        info["features"]["observation.contact"] = {"dtype": dtype, "shape": [*shape], "names": None}

    robot = Robot((4, 3))
    root = robot.write(tmp_path / "set", files=[[0, 1]], change=change)
    values = (np.arange(7 * np.prod(shape)).reshape(7, *shape) % 2).astype(dtype)
    kinds = {1: datasets.Sequence(datasets.Value(dtype), shape[0]), 2: datasets.Array2D, 3: datasets.Array3D}
    feature = kinds[1] if len(shape) == 1 else kinds[len(shape)](shape, dtype)
    features = datasets.Features({"x": feature})
    made = datasets.Dataset.from_dict({"x": values.tolist()}, features=features).data.table.combine_chunks()
    changed(next((root / "data").rglob("*.parquet")), "observation.contact", made.column("x"))
    found = read_lerobot(root, final="drop").to_table()
    assert np.array(found.column("observation.contact").to_pylist()).tolist() == values.tolist()
    assert len(DatasetStore.open(root, final="mark")) == 9


WRONG: dict[str, tuple[str, Any, str]] = {
    "null": ("observation.state", lambda state: [*state[:6], None, *state[7:]], "found null"),
    "width": ("observation.state", lambda state: [*state[:6], state[6][:4], *state[7:]], r"found shape \[4\]"),
    "null inside": ("observation.state", lambda state: [*state[:6], [None, *state[6][1:]], *state[7:]], "1 nulls"),
    "number": ("task_index", lambda numbers: [*numbers[:6], None, *numbers[7:]], "found null"),
    "no image": (IMAGE, lambda images: [*images[:6], {"bytes": None, "path": "a\0b.png"}, *images[7:]], "0 bytes that"),
    "cut": (IMAGE, lambda images: [*images[:6], {"bytes": b"\x89PNG", "path": ""}, *images[7:]], "4 bytes that are no"),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_that_are_none_are_named_by_frame_and_left_out(case: str, tmp_path: Path) -> None:
    robot = Robot((5, 3, 7), cameras=["top"])
    root = robot.write(tmp_path / "set", kind="image", files=[[0, 1], [2]])
    file = min((root / "data").rglob("*.parquet"))
    name, change, message = WRONG[case]
    stored = pq.read_table(file).column(name)
    kind = pa.list_(pa.float32()) if name == "observation.state" else stored.type
    changed(file, name, pa.array(change(stored.to_pylist()), kind))
    wanted = rf"file-000\.parquet, frame 1 of episode 1: {name}: .*{message}"
    for size in (2, 8192):
        with pytest.raises(DataError, match=wanted):
            read_lerobot(root, final="drop", batch_rows=size).to_table()
    stream = read_lerobot(root, final="drop", skip_broken=True)
    assert any(note.startswith("episode 1 is left out: ") for note in stream.notes)
    assert set(stream.to_table().column("metadata_episode_index").to_pylist()) == {0, 2}
    assert len(DatasetStore.open(root, final="drop", skip_broken=True)) == 12


@pytest.mark.parametrize("way", ["no footer", "not listed"])
def test_whole_episodes_are_read_of_a_recording_that_was_killed(way: str, tmp_path: Path) -> None:
    robot = Robot((5, 3, 7, 4))
    root = robot.write(tmp_path / "set")
    listed = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(listed)
    if way == "no footer":  # of the files that were open
        pq.write_table(table.slice(0, 2), listed)
        pq.write_table(table.slice(2), listed.with_name("file-001.parquet"))
        for file in (listed.with_name("file-001.parquet"), max((root / "data").rglob("*.parquet"))):
            file.write_bytes(file.read_bytes()[:-40])
    else:  # frames of an episode that nothing says
        pq.write_table(table.slice(0, 3), listed)
    with pytest.raises(DataError, match=r"the recording was interrupted, skip_broken=True .* reads its complete"):
        read_lerobot(root, final="drop")
    stream = formats.open(root, final="drop", skip_broken=True)
    whole = [5, 3] if way == "no footer" else [5, 3, 7]
    assert stream.to_table().column("observation.state").to_pylist() == robot.state[: sum(whole)].tolist()
    assert any("total_episodes" in note for note in stream.notes)
    assert len(stream.to_store()) == len(DatasetStore.open(root, final="drop", skip_broken=True)) == sum(whole)


def test_unknown_options_are_refused_before_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Robot().write(tmp_path / "set")
    monkeypatch.setattr("mouse_core.formats.lerobot.reading.read_description", None)
    with pytest.raises(ConfigError, match="colour"):
        formats.open(root, final="drop", colour=1)


def test_zeros_for_what_is_missing_are_no_statistics(tmp_path: Path) -> None:
    robot = Robot()
    robot.state += 100
    root = robot.write(tmp_path / "set")
    said = {"observation.state": {"mean": robot.state.mean(0).tolist(), "std": robot.state.std(0).tolist()}}
    (root / "meta" / "stats.json").write_text(json.dumps(said))
    reports = [inspect(formats.open(root, final=final)) for final in ("mark", "drop")]
    for report in reports:
        assert not [one for one in report.findings if one.code == "statistics-contradict"]
    (seen,) = (column for column in reports[0].columns if column.name == "observation.state")
    assert seen.low > 90
    assert seen.mean == pytest.approx(robot.state.mean(), rel=1e-4)
    said["observation.state"]["mean"][1] += 50
    (root / "meta" / "stats.json").write_text(json.dumps(said))
    codes = {one.code: one.column for one in inspect(formats.open(root, final="drop")).findings}
    assert codes["statistics-contradict"] == "observation.state"


def test_language_is_text(tmp_path: Path) -> None:
    said = [
        {"role": "assistant", "content": "greife", "style": "subtask", "timestamp": 0.5, "tool_calls": None},
        {"role": "user", "content": "nein", "style": None, "timestamp": 0.7, "tool_calls": [{"name": "say"}]},
    ]
    robot = Robot((3, 2))

    def change(info: dict[str, Any]) -> None:
        for key in ("language_persistent", "language_events"):
            info["features"][key] = {"dtype": "language", "shape": [1], "names": None}

    root = robot.write(tmp_path / "d", files=[[0, 1]], change=change)
    file = next((root / "data").rglob("*.parquet"))
    changed(file, "language_persistent", pa.array([said] * 5))
    changed(file, "language_events", pa.array([[], said[1:], [], None, []], pa.list_(pa.array(said).type)))
    for final, n in (("drop", 5), ("mark", 7)):
        stream = read_lerobot(root, final=final)
        assert "language_events is JSON text" in stream.notes
        rows = stream.to_table()
        assert rows.num_rows == n
        assert json.loads(rows["metadata_language_persistent"][1].as_py()) == said
        assert json.loads(rows["metadata_language_events"][1].as_py()) == said[1:]
        assert json.loads(rows["metadata_language_events"][0].as_py()) == []
        stream.to_store()
    assert dict(stream.format_metadata["tasks"]) == {0: "pick", 1: "place"}
    converting.convert(stream, tmp_path / "converted")
    assert formats.open(tmp_path / "converted").digest() == stream.digest()
