"""Datasets that are written for LeRobot: every frame beside a plain loop over the rows, and read back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import ConfigError, DataError, DatasetStore, Field, SchemaError, StorageError, formats
from mouse_core.cli import main
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns import to_arrow
from mouse_core.formats.converting import convert, preprocess
from mouse_core.formats.lerobot import read_lerobot, write_lerobot
from mouse_core.images import decode_image, encode_png
from mouse_core.metadata import DatasetMetadata, with_metadata
from tests.core.test_lerobot import delivered
from tests.core.video_cases import SIDE, decoded, pictures

av = pytest.importorskip("av")

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (6, 2, 11, 4)  # rows, of which the last has no action
FPS = 10
LOSSLESS = "video:hevc:gop=3:pix_fmt=gbrp:lossless"


class Rows:
    """What was recorded, row by row."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> None:
        random, count = np.random.default_rng(seed), sum(lengths)
        self.lengths, self.count = lengths, count
        self.episode = np.repeat(np.arange(len(lengths)), lengths)
        self.step = np.concatenate([np.arange(length) for length in lengths])
        begins, ends = self.step == 0, self.step == np.array(lengths)[self.episode] - 1
        self.columns: dict[str, npt.NDArray[Any]] = {
            "action": np.where(begins[:, None], 0, random.normal(size=(count, 4))).astype(np.float32),
            "reward": np.where(begins, 0, random.normal(size=count)).astype(np.float32),
            "done": np.where(ends & ~begins, 1 + self.episode % 2, 0),
            "episode_step": self.step,
            "observation.state": random.normal(size=(count, 6)).astype(np.float32),
            TOP: pictures(count, seed),
            WRIST: pictures(count, seed + 1)[..., :1],
            "metadata_speed": random.normal(size=count),
            "metadata_place": np.array([f"place {k % 3}" for k in range(count)], object),
            "metadata_next.force": np.where(begins, 0, random.normal(size=count)).astype(np.float32),
            "metadata_task_index": self.episode % 2 * 3,
        }
        self.metadata = DatasetMetadata("arrived", tasks={3: "place", 0: "pick"}, dimensions={"action": list("abcd")})

    def table(self) -> pa.Table:
        columns = {name: to_arrow(values, where=name) for name, values in self.columns.items()}
        return with_metadata(pa.table(columns), self.metadata)

    def stream(self, size: int = 5) -> RowStream:
        table = self.table()
        batches = table.to_batches(max_chunksize=size)
        return RowStream("made", "ted", table.schema, lambda: iter(batches), rows=self.count, metadata=self.metadata)

    def frames(self) -> list[tuple[int, int]]:
        """Of every frame its row, and the row that has what its action brought."""
        inside = [row for row in range(self.count) if row + 1 < self.count and self.step[row + 1]]
        return [(row, row + 1) for row in inside]


def tables(root: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in sorted((root / "data").rglob("*.parquet"))])


def info_of(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "meta" / "info.json").read_text())
    return found


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows()


@pytest.fixture(scope="module")
def root(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dataset in several files: those of frames are small, and each has whole episodes."""
    folder = tmp_path_factory.mktemp("written") / "robot"
    done = write_lerobot(rows.stream(), folder, images=LOSSLESS, frames_per_second=FPS, shard_bytes=2000)
    assert done.rows == len(rows.frames())
    assert done.pictures == tuple(f"{name}: frames of videos, {LOSSLESS[6:]}" for name in (TOP, WRIST))
    return folder


def test_frames_are_those_of_a_plain_loop(rows: Rows, root: Path) -> None:
    found, columns = tables(root), rows.columns
    seen, brought = np.array(rows.frames()).T
    for key, column, at in (
        ("observation.state", "observation.state", seen),
        ("action", "action", brought),
        ("next.reward", "reward", brought),
        ("speed", "metadata_speed", seen),
        ("place", "metadata_place", seen),
        ("next.force", "metadata_next.force", brought),
    ):
        assert found.column(key).to_pylist() == columns[column][at].tolist(), key
    assert found.column("next.done").to_pylist() == (columns["done"][brought] > 0).tolist()
    assert found.column("next.truncated").to_pylist() == (columns["done"][brought] == 2).tolist()
    assert found.column("index").to_pylist() == list(range(len(seen)))
    assert found.column("frame_index").to_pylist() == rows.step[seen].tolist()
    assert found.column("episode_index").to_pylist() == rows.episode[seen].tolist()
    assert found.column("task_index").to_pylist() == [k % 2 for k in rows.episode[seen]]
    np.testing.assert_array_equal(found.column("timestamp"), (rows.step[seen] / FPS).astype(np.float32))
    tasks = pq.read_table(root / "meta" / "tasks.parquet").to_pandas()
    assert list(tasks.index) == ["pick", "place"]


def test_what_is_said_of_episodes_and_features_is_so(rows: Rows, root: Path) -> None:
    said = info_of(root)
    count = len(rows.frames())
    assert (said["total_episodes"], said["total_frames"], said["total_tasks"], said["fps"]) == (4, count, 2, FPS)
    assert said["codebase_version"] == "v3.0"
    assert said["features"]["action"] == {"dtype": "float32", "shape": [4], "names": ["a", "b", "c", "d"]}
    assert said["features"]["place"] == {"dtype": "string", "shape": [1], "names": None}
    top = said["features"]["observation.images.top"]
    assert (top["dtype"], top["shape"]) == ("video", [*SIDE, 3])
    assert top["info"]["video.codec"] == "hevc"
    episodes = pq.read_table(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [one["length"] for one in episodes] == [length - 1 for length in rows.lengths]
    assert [one["tasks"] for one in episodes] == [["pick"], ["place"]] * 2
    files = {(one["data/chunk_index"], one["data/file_index"]) for one in episodes}
    assert len(files) > 1
    for number, one in enumerate(episodes):
        file = root / "data" / "chunk-000" / f"file-{one['data/file_index']:03d}.parquet"
        index = pq.read_table(file, filters=[("episode_index", "=", number)]).column("index").to_pylist()
        assert index == list(range(one["dataset_from_index"], one["dataset_to_index"]))


def test_videos_have_the_frames_where_episodes_say(rows: Rows, root: Path) -> None:
    episodes = pq.read_table(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    first = np.cumsum([0, *rows.lengths])
    for key, column in (("observation.images.top", TOP), ("observation.images.wrist", WRIST)):
        numbers = [one[f"videos/{key}/file_index"] for one in episodes]
        assert sorted(set(numbers)) == list(range(max(numbers) + 1))
        for number, one in enumerate(episodes):
            frames, times = decoded(root / "videos" / key / "chunk-000" / f"file-{numbers[number]:03d}.mp4")
            begin = times.index(pytest.approx(one[f"videos/{key}/from_timestamp"]))
            end = one[f"videos/{key}/to_timestamp"]
            assert end == pytest.approx(one[f"videos/{key}/from_timestamp"] + one["length"] / FPS)
            wanted = rows.columns[column][first[number] : first[number] + one["length"]]
            wanted = np.broadcast_to(wanted, (*wanted.shape[:3], 3))
            np.testing.assert_array_equal(frames[begin : begin + one["length"]], wanted)


def test_reading_it_gives_the_rows(rows: Rows, root: Path) -> None:
    stream = read_lerobot(root, final="mark")
    found = stream.to_table()
    last = rows.step == np.array(rows.lengths)[rows.episode] - 1
    for name in ("action", "reward", "done", "episode_step", "metadata_next.force"):
        assert found.column(name).to_pylist() == rows.columns[name].tolist(), name
    np.testing.assert_array_equal(found.column("observation_missing"), last)
    for name in ("observation.state", TOP, WRIST, "metadata_speed"):
        values = delivered(stream, name) if name in (TOP, WRIST) else np.array(found.column(name).to_pylist())
        np.testing.assert_array_equal(values[~last], rows.columns[name][~last], err_msg=name)
        if name == "metadata_speed":  # which is not of the observation
            np.testing.assert_array_equal(values[last], values[np.flatnonzero(last) - 1])
        else:
            assert not values[last].any()
    again = root.parent / "again"
    write_lerobot(read_lerobot(root, final="mark"), again, images=LOSSLESS)
    assert info_of(again)["fps"] == FPS
    left = {"index", "timestamp"}
    names = [name for name in tables(root).column_names if name not in left]
    assert tables(again).select(names).equals(tables(root).select(names))
    store = DatasetStore.open(again, final="drop")
    assert store.metadata.dimensions["action"] == tuple("abcd")


KEYS = {"observation.images.front.left", "observation.arm.left.force", "action", "action.hand.grip"}
KEYS |= {"gps.fix", "next.hand.force"}


def more(columns: dict[str, Any]) -> dict[str, Any]:
    return {"metadata_more": columns["reward"]}


def named(folder: Path) -> Path:
    """A dataset of 12.5 frames a second, whose features have names with several dots."""
    count = 8
    columns: dict[str, Any] = {
        "action": np.ones((count, 2), np.float32),
        "action.hand.grip": np.arange(count, dtype=np.float32),
        "reward": np.zeros(count),
        "done": np.arange(count) % 4 // 3,
        "episode_step": np.arange(count) % 4,
        "observation": np.ones((count, 2), np.float32),
        "observation.images.front.left": pictures(count, 0),
        "observation.arm.left.force": np.arange(count, dtype=np.float32),
        "metadata_gps.fix": np.ones((count, 3), np.float32),
        "metadata_next.hand.force": np.arange(count, dtype=np.float32),
    }
    table = pa.table({name: to_arrow(values, where=name) for name, values in columns.items()})
    metadata = DatasetMetadata("arrived", frames_per_second=[12.5], robots=["two arms"])
    write_lerobot(with_metadata(table, metadata), folder, images="png")
    return folder


@pytest.mark.parametrize("way", ["table", "saved", "parquet", "to store", "view", "preprocessed"])
def test_what_it_says_of_itself_comes_back(way: str, tmp_path: Path) -> None:
    source = named(tmp_path / "source")
    said = info_of(source)
    assert (said["fps"], said["robot_type"]) == (12.5, "two arms")
    assert said["features"].keys() > {*KEYS, "observation.state", "next.reward"}
    rows: Any = formats.open(source, final="mark")
    assert rows.metadata.frames_per_second == (12.5,)
    assert rows.metadata.robots == ("two arms",)
    if way in ("saved", "view"):
        rows = DatasetStore.open(source, final="mark")
    if way == "saved":
        rows.save(tmp_path / "saved")
        rows = formats.open(tmp_path / "saved")
    if way == "view":
        rows = rows.split(whole=1.0)["whole"]
    if way in ("parquet", "to store"):
        convert(rows, tmp_path / "rows", to=way.removeprefix("to "))
        rows = formats.open(tmp_path / "rows")
    if way == "table":
        rows = rows.to_table()
    if way == "preprocessed":
        preprocess(rows, more, tmp_path / "made", columns=["reward"])
        rows = formats.open(tmp_path / "made")
    write_lerobot(rows, tmp_path / "again", images="png")
    again = info_of(tmp_path / "again")
    again["features"].pop("more", None)
    assert again == said


def test_rates_and_robots_of_several_are_said(tmp_path: Path) -> None:
    one, other = Rows((4,)).table(), Rows((3,)).table()
    store = DatasetStore()
    for table, rate, robot in ((one, 10, "arm"), (other, 30, "hand")):
        store.from_dataset(with_metadata(table, DatasetMetadata(frames_per_second=[rate], robots=[robot])))
    with pytest.raises(ConfigError, match=r"rows with the same rate, found the rates \[10.0, 30.0\] per second"):
        write_lerobot(store, tmp_path / "robot", images="png")
    done = write_lerobot(store, tmp_path / "robot", images="png", frames_per_second=10)
    assert any("expected one robot, found arm, hand" in one for one in done.pictures)
    assert info_of(tmp_path / "robot")["robot_type"] is None


def test_statistics_are_those_of_all_frames(rows: Rows, root: Path) -> None:
    seen, brought = np.array(rows.frames()).T
    stats = json.loads((root / "meta" / "stats.json").read_text())
    episodes = pq.read_table(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    for key, values in (
        ("observation.state", rows.columns["observation.state"][seen]),
        ("action", rows.columns["action"][brought]),
        ("next.reward", rows.columns["reward"][brought][:, None]),
    ):
        numbers = values.astype(np.float64)
        assert stats[key]["count"] == [len(numbers)]
        for name in ("min", "max", "mean", "std"):
            np.testing.assert_allclose(stats[key][name], getattr(numbers, name)(0), rtol=1e-6, err_msg=f"{key} {name}")
        of_episode = [numbers[rows.episode[seen] == number] for number in range(4)]
        for name, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
            each = [np.quantile(one, share, axis=0) for one in of_episode]
            np.testing.assert_allclose([one[f"stats/{key}/{name}"] for one in episodes], each, rtol=1e-6)
            wanted = np.average(each, axis=0, weights=[len(one) for one in of_episode])
            np.testing.assert_allclose(stats[key][name], wanted, rtol=1e-6)
    pixels = rows.columns[TOP][seen] / 255
    found = stats["observation.images.top"]
    for name in ("min", "max", "mean", "std"):
        wanted = getattr(pixels, name)(axis=(0, 1, 2))[:, None, None]
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, err_msg=name)
    assert found["count"] == [len(seen)]
    assert "place" not in stats


def test_pictures_may_lie_in_the_files_of_frames(rows: Rows, tmp_path: Path) -> None:
    done = write_lerobot(rows.table(), tmp_path / "robot", images=["jpeg:90", f"{TOP}=png"])
    assert done.pictures[:2] == (f"{TOP}: png", f"{WRIST}: jpeg of quality 90, which changes pixels")
    assert "30 frames a second are assumed" in done.pictures[2]
    found = tables(tmp_path / "robot").column("observation.images.top").to_pylist()
    seen, _ = np.array(rows.frames()).T
    np.testing.assert_array_equal(np.stack([decode_image(one) for one in found]), rows.columns[TOP][seen])
    assert info_of(tmp_path / "robot")["video_path"] is None
    assert read_lerobot(tmp_path / "robot", final="drop").rows == len(seen)


def test_rows_need_no_pictures_nor_tasks(tmp_path: Path) -> None:
    step = np.arange(8) % 4
    columns = {"action": step % 2, "reward": step / 8, "done": np.where(step == 3, 2, 0), "observation_discrete": step}
    metadata = DatasetMetadata("arrived", environments=["Lake-v1"])
    store = DatasetStore().from_dataset(with_metadata(pa.table({**columns, "episode_step": step}), metadata))
    write_lerobot(store, tmp_path / "robot", frames_per_second=2.5, robot_type="arm")
    said = info_of(tmp_path / "robot")
    assert (said["fps"], said["robot_type"]) == (2.5, "arm")
    found = read_lerobot(tmp_path / "robot", final="mark").to_table()
    for name in ("action", "done"):
        assert found.column(name).to_pylist() == columns[name].tolist()
    assert found.column("observation.discrete").to_pylist() == [0, 1, 2, 0] * 2
    assert read_lerobot(tmp_path / "robot", final="drop").format_metadata["tasks"] == {0: "Lake-v1"}


def test_episodes_of_one_row_are_left_out_and_said(tmp_path: Path) -> None:
    rows = Rows((3, 1, 1, 4))
    done = write_lerobot(rows.stream(), tmp_path / "robot", frames_per_second=FPS)
    assert "2 episodes of one row are left out, as they have no transition" in done.pictures
    assert info_of(tmp_path / "robot")["total_episodes"] == 2
    with pytest.raises(DataError, match="expected episodes of at least two rows, found none"):
        write_lerobot(Rows((1, 1)).stream(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_depth_keeps_its_numbers(tmp_path: Path) -> None:
    rows = Rows()
    del rows.columns[WRIST]
    rows.columns["observation.images.depth"] = rows.columns[TOP][..., :1].astype(np.uint16) * 16
    write_lerobot(rows.stream(), tmp_path / "robot", images=[LOSSLESS, "observation.images.depth=video:hevc:lossless"])
    found = delivered(read_lerobot(tmp_path / "robot", final="mark"), "observation.images.depth")
    seen, _ = np.array(rows.frames()).T
    np.testing.assert_array_equal(found[seen], rows.columns["observation.images.depth"][seen])
    stats = json.loads((tmp_path / "robot" / "meta" / "stats.json").read_text())["observation.images.depth"]
    assert stats["max"] == [[[float(rows.columns["observation.images.depth"][seen].max())]]]


def uneven(rows: Rows) -> pa.Table:
    there = pa.array(np.where(rows.episode == 2, None, 1.5).tolist(), pa.float64())
    return rows.table().append_column("metadata_sometimes", there)


def missing(rows: Rows) -> pa.Table:
    return rows.table().append_column("observation_missing", pa.array((rows.step == 1).astype(np.int64)))


def blind(rows: Rows) -> pa.Table:
    images = [None if k == 3 else {"bytes": encode_png(one), "path": None} for k, one in enumerate(rows.columns[TOP])]
    struct = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    return rows.table().set_column(rows.table().schema.get_field_index(TOP), TOP, struct)


def without_action(rows: Rows) -> RowStream:
    table = rows.table().drop_columns(["action"])
    return RowStream("made", "ted", table.schema, lambda: iter(table.to_batches()), metadata=rows.metadata)


def called(name: str) -> Any:
    """Rows whose column of pictures has another name."""
    return lambda rows: rows.table().rename_columns([name if one == TOP else one for one in rows.table().column_names])


def of_metadata(metadata: DatasetMetadata) -> Any:
    return lambda rows: with_metadata(rows.table(), metadata)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (Rows.table, {"images": "raw"}, ConfigError, "expected videos, png or jpeg, the image formats of LeRobot, fou"),
        (Rows.table, {"frames_per_second": 0}, ConfigError, r"frames_per_second \(--fps\): expected a positive number"),
        (Rows.table, {"images": {"reward": "png"}}, ConfigError, "expected one of the image columns"),
        (Rows.table, {"shard_bytes": "many"}, ConfigError, r"shard_bytes \(--max-shard-size\): expected bytes"),
        (uneven, {}, DataError, r"\['sometimes'\]: expected the same features in all episodes"),
        (missing, {}, DataError, "expected at most the last observation of an episode to be marked as missing"),
        (blind, {}, DataError, f"column '{TOP}': expected an image in every row, found 1 rows without an image"),
        (without_action, {}, DataError, "expected a column 'action'"),
        (of_metadata(DatasetMetadata("outgoing")), {}, SchemaError, "expected rows of alignment 'arrived'"),
        (of_metadata(DatasetMetadata("arrived", tasks={5: "x"})), {}, DataError, "expected rows with the tasks .5."),
        (called("metadata_../../out"), {}, DataError, "expected the name of a feature"),
        (called("metadata_metadata/x"), {}, DataError, "expected the name of a feature"),
        (called("metadata_"), {}, DataError, "expected the name of a feature"),
        (called("timestamp"), {}, DataError, "expected a feature name that is not used yet"),
    ],
)
def test_what_cannot_be_written_is_refused(
    make: Any, options: dict[str, Any], error: type[Exception], message: str, rows: Rows, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        write_lerobot(make(rows), tmp_path / "robot", **{"images": "png"} | options)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_what_was_interrupted(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="expected a path that does not exist"):
        write_lerobot(rows.table(), tmp_path / "there")
    left = [30]

    def full(values: Any, *, where: str) -> Any:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        return to_arrow(values, where=where)

    monkeypatch.setattr("mouse_core.formats.lerobot.writing.to_arrow", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_lerobot(rows.table(), tmp_path / "robot")
    assert [one.name for one in tmp_path.iterdir()] == ["there"]


def test_the_command_writes_it(rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = DatasetStore(fields=[Field(TOP, image=True)]).from_dataset(rows.table())
    store.save(tmp_path / "recorded")
    command = ["convert", str(tmp_path / "recorded"), str(tmp_path / "robot"), "--to", "lerobot", "--fps", "10"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "images: observation.images.top: frames of videos, h264:gop=2, which change pixels" in said
    assert f"{len(rows.frames())} frames in 3 files" in said
    assert formats.open(tmp_path / "robot", final="drop").format == "lerobot"
    assert main([*command[:-4], "--fps", "10"]) == 2
    assert "--fps: expected --to lerobot with this option" in capsys.readouterr().err
