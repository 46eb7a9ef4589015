"""Frames per second of processor time from videos in place, beside PyAV that seeks, and that decodes files in turn.

    python -m tests.bench.video FOLDER

Batches are `[8, 2 frames of 2 cameras, 50 actions]`, anchors drawn from all of 20 episodes. "seeking" opens a container
once, as readers of LeRobotDatasets with PyAV do, seeks to the key frame before, and decodes up to the frame. "in turn"
decodes whole files, of which every frame counts. The three take turns, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.about import About, with_about
from mouse_core.video import FrameDecoder, index_video

CAMERAS, EPISODES, FRAMES, BATCH, ROUNDS, BATCHES = 2, 10, 300, 8, 5, 12
KINDS = {
    "h264 GOP 2, 240 lines": ("libx264", (240, 320), {"g": "2", "crf": "30", "preset": "fast"}),
    "h264 GOP 2, 480 lines": ("libx264", (480, 640), {"g": "2", "crf": "30", "preset": "fast"}),
    "h264 GOP 250, 240 lines": ("libx264", (240, 320), {"g": "250", "crf": "30", "preset": "fast"}),
    "AV1 GOP 2, 240 lines": ("libsvtav1", (240, 320), {"g": "2", "crf": "30", "preset": "10"}),
}


def write(file: Path, codec: str, size: tuple[int, int], options: dict[str, str], seed: int) -> None:
    """A video of smooth pictures that move, with some noise."""
    import av

    random = np.random.default_rng(seed)
    height, width = size
    coarse = random.integers(0, 255, (height // 16 + 8, width // 16 + 8, 3), np.uint8)
    large = np.asarray(av.VideoFrame.from_ndarray(coarse, format="rgb24").reformat(2 * width, 2 * height).to_ndarray())
    noise = random.integers(0, 8, (2 * height, 2 * width, 3), np.uint8)
    large = np.minimum(large, 247) + noise
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=30, options=options)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for k in range(FRAMES):
            top, left = k % height, 2 * k % width
            part = np.ascontiguousarray(large[top : top + height, left : left + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(part, format="rgb24")))
        container.mux(stream.encode())


def store_of(folder: Path, files: list[list[Path]]) -> DatasetStore:
    """Episodes of one video a camera."""
    step = np.tile(np.arange(FRAMES), EPISODES)
    columns: dict[str, Any] = {
        "action": np.zeros((len(step), 6), np.float32).tolist(),
        "reward": np.zeros(len(step), np.float32),
        "done": np.where(step == FRAMES - 1, 2, 0),
        "episode_step": step,
    }
    for camera in range(CAMERAS):
        which = np.repeat(np.arange(EPISODES) * CAMERAS + camera, FRAMES)
        parts = [pa.array(part.astype(np.int32)) for part in (which, step)]
        columns[f"observation_{camera}"] = pa.StructArray.from_arrays(parts, ["video", "frame"])
    listed = [(str(one.relative_to(folder)), index_video(one).digest) for some in files for one in some]
    fields = [Field(f"observation_{camera}", image=True) for camera in range(CAMERAS)]
    rows = with_about(pa.table(columns), About("arrived", videos=listed, fields=fields))
    return DatasetStore(image_roots=[folder]).from_dataset(rows)


class Seeking:
    """Frames by seeking in containers that stay open."""

    def __init__(self, files: list[list[Path]]) -> None:
        self.files, self.opened = files, dict[Path, Any]()

    def read(self, episode: int, camera: int, frame: int) -> np.ndarray:
        """One frame."""
        import av

        file = self.files[episode][camera]
        if file not in self.opened:
            self.opened[file] = av.open(str(file))
            self.opened[file].streams.video[0].thread_type = "SLICE"
            self.opened[file].streams.video[0].codec_context.thread_count = 1
        container = self.opened[file]
        stream = container.streams.video[0]
        wanted = round(frame / 30 / stream.time_base)
        container.seek(wanted, stream=stream, backward=True)
        found = next(one for one in container.decode(stream) if one.pts >= wanted)
        return np.asarray(found.to_ndarray(format="rgb24"))


def in_turn(file: Path) -> int:
    """Decode all frames of a file; how many."""
    import av

    with av.open(str(file)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        return sum(frame.to_ndarray(format="rgb24").size > 0 for frame in container.decode(video=0))


def rate(work: Callable[[], int]) -> tuple[float, float]:
    """Frames for each second of processor time, and for each second."""
    began, clock = time.process_time(), time.perf_counter()
    frames = work()
    return frames / (time.process_time() - began), frames / (time.perf_counter() - clock)


def measure(folder: Path, name: str) -> str:
    """A line of the table."""
    codec, size, options = KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    files = [[folder / f"{episode}-{camera}.mp4" for camera in range(CAMERAS)] for episode in range(EPISODES)]
    for number, file in enumerate(one for some in files for one in some):
        if not file.exists():
            write(file, codec, size, options, number)
    store, seeking = store_of(folder, files), Seeking(files)
    windows: dict[str, Any] = {f"observation_{camera}": [-3, 0] for camera in range(CAMERAS)}
    source = BatchSource(store, batch_size=BATCH, windows={**windows, "action": range(50)}, seed=0)
    numbers = iter(range(10**9))
    video = np.random.default_rng(0).integers(0, EPISODES * CAMERAS, 256)
    frame = np.random.default_rng(1).integers(0, FRAMES, 256)
    indexes = [index_video(one) for some in files for one in some]
    out = np.zeros((256, *size, 3), np.uint8)
    decoders = {threads: FrameDecoder(threads=threads) for threads in (1, 2)}

    def ours() -> int:
        for _ in range(BATCHES):
            source[next(numbers)]
        return BATCHES * BATCH * 2 * CAMERAS

    def sought() -> int:
        for _ in range(BATCHES):
            plan = source.plan(next(numbers))
            for start in plan.starts.tolist():
                for step in (-3, 0):
                    for camera in range(CAMERAS):
                        seeking.read(start // FRAMES, camera, max(0, start % FRAMES + step))
        return BATCHES * BATCH * 2 * CAMERAS

    def threaded(threads: int) -> int:
        decoders[threads].decode(indexes, video, frame, out)
        return len(video)

    ways: dict[str, Callable[[], int]] = {
        "ours": ours,
        "seeking": sought,
        "turn": lambda: in_turn(files[0][0]),
        "one": lambda: threaded(1),
        "two": lambda: threaded(2),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, work in ways.items():
            found[way].append(rate(work))
    cpu = {way: statistics.median(one for one, _ in rates) for way, rates in found.items()}
    wall = {way: statistics.median(one for _, one in rates) for way, rates in found.items()}
    return (
        f"| {name} | {cpu['ours']:,.0f} | {cpu['seeking']:,.0f} | {cpu['ours'] / cpu['seeking']:.2f} | "
        f"{cpu['turn']:,.0f} | {wall['two'] / wall['one']:.2f} |"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the videos lie; they are made if they are not there")
    parser.add_argument("--only", default="", help="a part of the name of those that are measured")
    chosen = parser.parse_args()
    print("| videos | batches in place | seeking | times | in turn | 2 threads, times one by the clock |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number, name in enumerate(KINDS):
        if chosen.only in name:
            print(measure(chosen.folder / str(number), name), flush=True)
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB")


if __name__ == "__main__":
    main()
