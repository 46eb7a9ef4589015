"""LeRobotDatasets as LeRobot's own reader has them, value by value: states, actions, frames, and their masks.

`make test-lerobot` makes the environment in which it runs; elsewhere the tests are skipped.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.errors import DataError
from mouse_core.formats.lerobot import write_lerobot

pytest.importorskip("torchcodec.decoders", exc_type=ImportError)
from tests.lerobot.environment import lerobot_dataset

try:
    LeRobotDataset = lerobot_dataset()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.lerobot

FPS, LENGTHS, SIDE, BEFORE, AHEAD = 15, (20, 7, 33), (64, 96), 3, 10


def picture(seed: int, step: int) -> np.ndarray:
    """A pattern that moves."""
    blocks = np.random.default_rng(seed).integers(0, 255, (SIDE[0] // 8, SIDE[1] // 8, 3))
    return np.roll(blocks.repeat(8, 0).repeat(8, 1), (step, 2 * step), (0, 1)).astype(np.uint8)


def recorded_by_lerobot(root: Path) -> Path:
    """A dataset that LeRobot recorded, with two cameras in videos and one in Parquet."""
    camera = {"shape": (*SIDE, 3), "names": ["height", "width", "channels"]}
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "observation.images.front": {"dtype": "video", **camera},
        "observation.images.side": {"dtype": "video", **camera},
        "observation.images.still": {"dtype": "image", **camera},
    }
    made = LeRobotDataset.create("x/y", fps=FPS, features=features, root=root, use_videos=True, vcodec="h264")
    random = np.random.default_rng(0)
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            seen = picture(episode, step)
            made.add_frame(
                {
                    "observation.state": random.normal(size=3).astype(np.float32),
                    "action": random.normal(size=2).astype(np.float32),
                    "observation.images.front": seen,
                    "observation.images.side": 255 - seen,
                    "observation.images.still": seen[::-1].copy(),
                    "task": f"task {episode % 2}",
                }
            )
        made.save_episode()
    made.finalize()
    return root


def written_by_us(root: Path, images: str) -> Path:
    """A dataset that ``write_lerobot`` wrote."""
    random = np.random.default_rng(1)
    store = DatasetStore(fields=[Field(f"observation.images.{one}", image=True) for one in ("front", "side")])
    for episode, length in enumerate(LENGTHS):
        steps = np.arange(length + 1)
        seen = np.stack([picture(episode, step) for step in steps])
        store.extend(
            {
                "action": np.where(steps[:, None] == 0, 0, random.normal(size=(length + 1, 2))).astype(np.float32),
                "reward": np.where(steps == 0, 0, steps / 10).astype(np.float32),
                "done": np.where(steps == length, 1, 0),
                "episode_step": steps,
                "observation.state": random.normal(size=(length + 1, 3)).astype(np.float32),
                "observation.images.front": seen,
                "observation.images.side": 255 - seen,
            }
        )
    write_lerobot(store, root, images=images, frames_per_second=FPS)
    return root


def set_times(root: Path, change: Any) -> None:
    """Change when rows were recorded."""
    (file,) = (root / "data").rglob("*.parquet")
    table = pq.read_table(file)
    times = np.array(table["timestamp"])
    change(times, np.array(table["episode_index"]), np.array(table["frame_index"]))
    place = table.schema.get_field_index("timestamp")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(times)), file)


def theirs(root: Path) -> Any:
    """LeRobot's reader of windows."""
    cameras = LeRobotDataset("x/y", root=root).meta.camera_keys
    deltas: dict[str, list[float]] = {key: [-BEFORE / FPS, 0] for key in [*cameras, "observation.state"]}
    deltas["action"] = [step / FPS for step in range(AHEAD)]
    return LeRobotDataset("x/y", root=root, delta_timestamps=deltas, video_backend="torchcodec")


def ours(root: Path, cameras: list[str]) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """Windows by episode and step."""
    store = DatasetStore.open(root, final="mark")
    windows: dict[str, Any] = {key: [-BEFORE, 0] for key in [*cameras, "observation.state"]}
    source = BatchSource(store, batch_size=8, windows={**windows, "action": range(AHEAD)}, seed=0)
    rows = store.snapshot().rows(list(range(len(store))))
    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for number in range(1000):
        batch = source[number]
        for row, start in enumerate(source.plan(number).starts.tolist()):
            place = rows["metadata_episode_index"][start], rows["episode_step"][start]
            found[place] = {name: values[row] for name, values in batch.items()}
        if len(found) == len(store):
            break
    return {place: batch for place, batch in found.items() if place[1] < LENGTHS[place[0]]}


def compare(root: Path) -> None:
    reader = theirs(root)
    cameras = reader.meta.camera_keys
    found = ours(root, cameras)
    assert len(reader) == sum(LENGTHS) == len(found)
    for number in range(len(reader)):
        item = reader[number]
        batch = found[int(item["episode_index"]), int(item["frame_index"])]
        there = ~item["action_is_pad"].numpy()
        np.testing.assert_array_equal(batch["action_mask"], there)
        np.testing.assert_array_equal(batch["action"][there], item["action"].numpy()[there])
        np.testing.assert_array_equal(batch["observation.state_mask"], ~item["observation.state_is_pad"].numpy())
        np.testing.assert_array_equal(batch["observation.state"], item["observation.state"].numpy())
        for key in cameras:
            pixels = np.rint(item[key].numpy() * 255).astype(np.uint8).transpose(0, 2, 3, 1)
            np.testing.assert_array_equal(batch[f"{key}_mask"], ~item[f"{key}_is_pad"].numpy())
            np.testing.assert_array_equal(batch[key], pixels, err_msg=f"{key} of {number}")


def test_what_lerobot_recorded(tmp_path: Path) -> None:
    compare(recorded_by_lerobot(tmp_path / "set"))


@pytest.mark.parametrize("images", ["video:h264:gop=2", "video:h264:gop=30", "video:av1", "png"])
def test_what_we_wrote(images: str, tmp_path: Path) -> None:
    compare(written_by_us(tmp_path / "set", images))


def test_rows_at_other_times(tmp_path: Path) -> None:
    """Rows of an episode show the frames one later, but for its last two, which show one."""

    def change(times: np.ndarray, episode: np.ndarray, frame: np.ndarray) -> None:
        late = (episode == 2) & (frame < 31)
        times[late] += np.float32(1 / FPS)
        times[(episode == 2) & (frame == 31)] = np.float32(32 / FPS)

    root = written_by_us(tmp_path / "set", "video:h264:gop=2")
    first = shutil.copytree(root, tmp_path / "first")
    set_times(root, change)
    compare(root)
    camera = "observation.images.front"
    assert (theirs(root)[30][camera] != theirs(first)[30][camera]).any()


def test_rows_at_times_of_no_frame_are_refused_by_both(tmp_path: Path) -> None:
    def change(times: np.ndarray, episode: np.ndarray, frame: np.ndarray) -> None:
        times[(episode == 1) & (frame == 4)] += np.float32(0.01)

    root = written_by_us(tmp_path / "set", "video:h264:gop=2")
    set_times(root, change)
    with pytest.raises(Exception, match="violate the tolerance"):
        theirs(root)[LENGTHS[0] + 4]
    with pytest.raises(DataError, match=r"expected a frame at .* in episode 1 cannot be read"):
        DatasetStore.open(root, final="mark")
    store = DatasetStore.open(root, final="mark", skip_broken=True)
    assert len(store) == LENGTHS[0] + LENGTHS[2] + 2
