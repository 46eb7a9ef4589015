"""What folders of many videos and of many episodes take: memory while frames of 300 videos are read, and time to open.

    python -m tests.bench.video_folders FOLDER [--peers .venv-lerobot]

Memory is what a process of its own has that no file holds, after 3,200 windows of 2 frames, less what it had after the
first one. "LeRobot" is its own reader, with torchcodec. The folder of 100,000 episodes is one of 500, of which the rest
are copies. It is opened in a process that has opened nothing, which counts with what it imports, and again.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mouse_core import BatchSource, DatasetStore
from mouse_core.formats.lerobot import write_lerobot
from tests.bench.child import ask
from tests.bench.measuring import private_memory
from tests.bench.video import asked, rows

VIDEOS, WINDOWS = 300, 3_200
WRITTEN, COPIES = 500, 200
_IMAGES = "video:h264:gop=2:crf=30:preset=ultrafast"


def grown(folder: str) -> float:
    """By how much memory grows while windows are read."""
    store = DatasetStore.open(folder, final="drop")
    source = BatchSource(
        store, 8, windows={"obs_image": [-1, 0], "action": [0]}, fields=["obs_image", "action"], seed=0
    )
    source[0]
    gc.collect()
    before = private_memory() or 0
    for index in range(1, 1 + WINDOWS // 8):
        source[index]
    gc.collect()
    return ((private_memory() or 0) - before) / 2**20


def opened(folder: str) -> list[float]:
    """Seconds that opening takes, and opening again."""
    found = []
    for _ in range(2):
        began = time.perf_counter()
        store = DatasetStore.open(folder, final="drop")
        found.append(time.perf_counter() - began)
        assert len(store) == 2 * WRITTEN * COPIES
    return found


def make_videos(folder: Path) -> None:
    """Write 300 episodes of 40 frames, each in a video of its own."""
    stream = rows((240, 320), VIDEOS, ("top",), 40)
    write_lerobot(stream, folder, images=_IMAGES, frames_per_second=30, shard_bytes=1_000)


def make_episodes(folder: Path) -> None:
    """Write 500 episodes of two frames of two cameras, and the rest as copies, with numbers of their own."""
    first = folder.with_name(f"{folder.name}-first")
    shutil.rmtree(first, ignore_errors=True)
    write_lerobot(rows((32, 32), WRITTEN, ("top", "wrist"), 2), first, images=_IMAGES, frames_per_second=30)
    shutil.copytree(first, folder, ignore=shutil.ignore_patterns("*.index.arrow"))
    files = {path.relative_to(first) for path in first.rglob("file-000.*") if path.suffix in (".parquet", ".mp4")}
    episodes = next(file for file in files if "episodes" in file.parts)
    frames = next(file for file in files if file.parts[0] == "data")
    tables = {file: pq.read_table(first / file) for file in (episodes, frames)}
    described = []
    for copy in range(COPIES):
        steps = {"episode_index": WRITTEN * copy, "index": tables[frames].num_rows * copy}
        bounds = dict.fromkeys(("dataset_from_index", "dataset_to_index"), steps["index"])
        numbers = {name: copy for name in tables[episodes].column_names if name.endswith("/file_index")}
        described.append(_added(tables[episodes], {**steps, **bounds, **numbers, "meta/episodes/file_index": 0}))
        for file in files - {episodes}:
            there = folder / file.with_name(f"file-{copy:03}{file.suffix}")
            if file == frames:
                pq.write_table(_added(tables[frames], steps), there)
            else:
                shutil.copy(first / file, there)
    pq.write_table(pa.concat_tables(described), folder / episodes)
    info = json.loads((folder / "meta" / "info.json").read_text())
    info |= {"total_episodes": WRITTEN * COPIES, "total_frames": COPIES * tables[frames].num_rows}
    info["splits"] = {"train": f"0:{WRITTEN * COPIES}"}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    shutil.rmtree(first)


def _added(table: pa.Table, numbers: Mapping[str, int]) -> pa.Table:
    """A table in which numbers are added to columns, of those that it has."""
    for name in numbers.keys() & set(table.column_names):
        place = table.schema.get_field_index(name)
        kind = table.schema.field(place)
        table = table.set_column(place, kind, pc.add(table[name], pa.scalar(numbers[name], kind.type)))
    return table


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where datasets lie; they are made if they are not there")
    parser.add_argument("--peers", type=Path, help="the environment in which LeRobot and torchcodec are")
    chosen = parser.parse_args()
    videos, episodes = (chosen.folder / name for name in ("videos", "episodes"))
    for folder, make in ((videos, make_videos), (episodes, make_episodes)):
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            make(folder)
    ours = ask("video_folders", "grown", videos)
    print(f"memory grows by {ours:.0f} MB while {WINDOWS:,} windows of {VIDEOS} videos are read", flush=True)
    with asked(chosen.peers, videos, "memory") as others:
        if others:
            theirs = others["memory"]()[0]
            print(f"that of LeRobot's reader by {theirs:.0f} MB: {ours / theirs:.2f}", flush=True)
    for kept in episodes.rglob("*.index.arrow"):
        kept.unlink()
    for when in ("the first time", "after that"):
        times = np.array(ask("video_folders", "opened", episodes))
        print(f"{WRITTEN * COPIES:,} episodes, {when}: {times[0]:.2f} s, once more {times[1]:.3f} s", flush=True)


if __name__ == "__main__":
    main()
