"""Frames per second of processor time from a LeRobotDataset's videos, beside those who read it otherwise.

    python -m tests.bench.video FOLDER [--peers .venv-lerobot]

Batches are `[8, 2 frames of 2 cameras, 50 actions]`, anchors drawn from all episodes. "LeRobot" is its own reader and
"torchcodec" its exact mode, grouped by file, in the environment that `make bench-video` makes. "seeking" opens a
container once, seeks with PyAV to the key frame before, and decodes up to the frame; "in turn" decodes whole files, of
which every frame counts. "2 threads", and two processes of one thread each, which share nothing, do the same work as
one thread by the clock. All take turns, and the median of the rounds counts. A second table says what pictures take and
give that are kept in other ways.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns import to_arrow
from mouse_core.formats.converting import convert
from mouse_core.formats.lerobot import write_lerobot
from mouse_core.metadata import DatasetMetadata
from mouse_core.video import FrameDecoder, VideoIndex, index_video

CAMERAS, EPISODES, FRAMES, FPS, BATCH, ROUNDS, BATCHES = ("top", "wrist"), 10, 300, 30, 8, 5, 6
# By the clock others are seen, too: that takes longer.
MORE = 8 * BATCHES
KINDS = {
    "H.264 GOP 2, 240 lines": ("video:h264:gop=2:crf=30:preset=fast", (240, 320)),
    "H.264 GOP 2, 480 lines": ("video:h264:gop=2:crf=30:preset=fast", (480, 640)),
    "H.264 GOP 250, 240 lines": ("video:h264:gop=250:crf=30:preset=fast", (240, 320)),
    "AV1 GOP 2, 240 lines": ("video:av1:gop=2:crf=30:preset=10", (240, 320)),
}
Rate = Callable[[], tuple[float, float]]
WAYS = ("raw", "png", "jpeg:95")


def pictures(seed: int, size: tuple[int, int], count: int) -> np.ndarray:
    """Smooth pictures that move, with some noise, ``[count, H, W, 3]``."""
    import av

    random = np.random.default_rng(seed)
    height, width = size
    coarse = random.integers(0, 255, (height // 16 + 8, width // 16 + 8, 3), np.uint8)
    large = np.asarray(av.VideoFrame.from_ndarray(coarse, format="rgb24").reformat(2 * width, 2 * height).to_ndarray())
    large = np.minimum(large, 247) + random.integers(0, 8, (2 * height, 2 * width, 3), np.uint8)
    places = ((k % height, 2 * k % width) for k in range(count))
    return np.stack([large[top : top + height, left : left + width] for top, left in places])


def rows(size: tuple[int, int], episodes: int, cameras: tuple[str, ...], frames: int = FRAMES) -> RowStream:
    """What was recorded, an episode at a time."""

    def batch(episode: int, count: int = frames + 1) -> pa.RecordBatch:
        step = np.arange(count)
        columns: dict[str, Any] = {
            "action": np.zeros((count, 6), np.float32),
            "reward": np.zeros(count, np.float32),
            "done": np.where(step == frames, 2, 0),
            "episode_step": step,
            "observation": np.zeros((count, 6), np.float32),
        }
        for number, camera in enumerate(cameras):
            seed = episode * len(cameras) + number
            columns[f"observation_images_{camera}"] = pictures(seed, size, count)
        return pa.record_batch({name: to_arrow(values, where=name) for name, values in columns.items()})

    fields = [Field(f"observation_images_{camera}", image=True) for camera in cameras]
    return RowStream(
        "made",
        "ted",
        batch(0, 1).schema,
        lambda: map(batch, range(episodes)),
        metadata=DatasetMetadata("arrived", fields=fields),
    )


class Seeking:
    """Frames by seeking in containers that stay open."""

    def __init__(self) -> None:
        self.opened = dict[Path, Any]()

    def read(self, file: Path, frame: int) -> np.ndarray:
        """One frame."""
        import av

        if file not in self.opened:
            self.opened[file] = av.open(str(file))
            self.opened[file].streams.video[0].thread_type = "SLICE"
            self.opened[file].streams.video[0].codec_context.thread_count = 1
        container = self.opened[file]
        stream = container.streams.video[0]
        wanted = round(frame / FPS / stream.time_base)
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


@contextmanager
def asked(environment: Path | None, folder: Path, *names: str) -> Iterator[dict[str, Rate]]:
    """Those who need an environment of their own, by name; none where there is none."""
    if environment is None:
        yield {}
        return
    script = Path(__file__).resolve().parent.parent / "lerobot" / "peer.py"
    command = [str(environment / "bin" / "python"), str(script), str(folder)]
    where = {**os.environ, "LD_LIBRARY_PATH": str(environment / "ffmpeg"), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=where, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers, questions = process.stdout, process.stdin

        def ask(name: str) -> tuple[float, float]:
            questions.write(f"{name}\n")
            questions.flush()
            return float(answers.readline()), 0.0

        yield {name: partial(ask, name) for name in names}
        questions.close()


def grouped(
    decoder: FrameDecoder,
    indexes: Sequence[VideoIndex],
    random: np.random.Generator,
    out: np.ndarray,
    batches: int = BATCHES,
) -> int:
    """Decode 32 frames at a time, from any of the files; how many."""
    for _ in range(batches):
        which = random.integers(0, len(indexes), 32)
        decoder.decode(indexes, which, [random.integers(len(indexes[one])) for one in which], out)
    return 32 * batches


def process_of(files: Sequence[Path], seed: int, channel: Any) -> None:
    """Decode some frames each time that it is asked to, and say how many by the clock."""
    indexes, decoder, random = [index_video(file) for file in files], FrameDecoder(), np.random.default_rng(seed)
    out = np.zeros((32, indexes[0].height, indexes[0].width, 3), np.uint8)
    while channel.recv():
        channel.send(rate(lambda: grouped(decoder, indexes, random, out, MORE))[1])


@contextmanager
def two_processes(files: Sequence[Path]) -> Iterator[Callable[[], tuple[float, float]]]:
    """What two of them decode by the clock, at the same time."""
    spawning = multiprocessing.get_context("spawn")
    pipes = [spawning.Pipe() for _ in range(2)]
    workers = [
        spawning.Process(target=process_of, args=(files, seed, theirs), daemon=True)
        for seed, (_, theirs) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()

    def ask() -> tuple[float, float]:
        for ours, _ in pipes:
            ours.send(True)
        return 0.0, sum(ours.recv() for ours, _ in pipes)

    try:
        yield ask
    finally:
        for ours, _ in pipes:
            ours.send(False)
        for worker in workers:
            worker.join()


def measure(folder: Path, name: str, environment: Path | None) -> str:
    """A line of the table."""
    images, size = KINDS[name]
    if not folder.exists():
        # About a file of videos for each episode.
        write_lerobot(rows(size, EPISODES, CAMERAS), folder, images=images, frames_per_second=FPS, shard_bytes=200_000)
    store, seeking = DatasetStore.open(folder, final="drop"), Seeking()
    names = [f"observation_images_{camera}" for camera in CAMERAS]
    windows: dict[str, Any] = {camera: [-3, 0] for camera in names}
    chosen = [*names, "action"]
    source = BatchSource(store, batch_size=BATCH, windows={**windows, "action": range(50)}, fields=chosen, seed=0)
    numbers, random = iter(range(10**9)), np.random.default_rng(0)
    files = sorted(folder.rglob("*.mp4"))
    indexes = [index_video(file) for file in files]
    out = np.zeros((32, *size, 3), np.uint8)
    decoders = {threads: FrameDecoder(threads=threads) for threads in (1, 2)}

    def ours() -> int:
        for _ in range(BATCHES):
            source[next(numbers)]
        return BATCHES * BATCH * 2 * len(CAMERAS)

    def sought() -> int:
        for _ in range(32 * BATCHES):
            number = int(random.integers(len(files)))
            seeking.read(files[number], int(random.integers(len(indexes[number]))))
        return 32 * BATCHES

    ways: dict[str, Callable[[], int]] = {
        "ours": ours,
        "seeking": sought,
        "turn": lambda: in_turn(files[0]),
        "grouped": lambda: grouped(decoders[1], indexes, random, out),
        "one": lambda: grouped(decoders[1], indexes, random, out, MORE),
        "two": lambda: grouped(decoders[2], indexes, random, out, MORE),
    }
    found: dict[str, list[tuple[float, float]]] = {}
    with asked(environment, folder, "lerobot", "torchcodec") as others, two_processes(files) as processes:
        for _ in range(ROUNDS + 1):
            for way, work in ways.items():
                found.setdefault(way, []).append(rate(work))
            for way, ask in {**others, "processes": processes}.items():
                found.setdefault(way, []).append(ask())
    cpu = {way: statistics.median(one for one, _ in rates[1:]) for way, rates in found.items()}
    wall = {way: statistics.median(one for _, one in rates[1:]) for way, rates in found.items()}
    shown = [f"{cpu['ours']:,.0f}"]
    for ours_, theirs in (("ours", "lerobot"), ("grouped", "torchcodec"), ("grouped", "seeking")):
        shown.append(f"{cpu[theirs]:,.0f} ({cpu[ours_] / cpu[theirs]:.2f})" if theirs in cpu else "-")
    shown += [f"{cpu['turn']:,.0f}", *(f"{wall[way] / wall['one']:.2f}" for way in ("two", "processes"))]
    return f"| {name} | {' | '.join(shown)} |"


def measure_kept(folder: Path, size: tuple[int, int], way: str) -> str:
    """A line of the table of ways in which pictures are kept."""
    shutil.rmtree(folder, ignore_errors=True)
    convert(rows(size, 1, ("top",)), folder, images=way)
    store = DatasetStore.open(folder)
    source = BatchSource(store, 2, 16, fields=["observation_images_top"], seed=0)
    numbers = iter(range(10**9))

    def ours() -> int:
        for _ in range(4):
            source[next(numbers)]
        return 4 * 32

    rates = [rate(ours)[0] for _ in range(ROUNDS + 1)]
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.suffix == ".arrow")
    shutil.rmtree(folder, ignore_errors=True)
    return f"| {way}, {size[0]} lines | {taken / (FRAMES + 1) / 1000:,.1f} | {statistics.median(rates[1:]):,.0f} |"


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where datasets lie; they are made if they are not there")
    parser.add_argument("--only", default="", help="a part of the name of those that are measured")
    parser.add_argument("--peers", type=Path, help="the environment in which LeRobot and torchcodec are")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    print(
        "| videos | batches | LeRobot (times) | torchcodec (times) | seeking (times) | in turn "
        "| 2 threads, times one | 2 processes, times one |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, name in enumerate(KINDS):
        if chosen.only in name:
            print(measure(chosen.folder / str(number), name, chosen.peers), flush=True)
    print(f"\npeak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB\n")
    print("| pictures | kB a frame | frames a second |")
    print("| --- | --- | --- |")
    for size in ((240, 320), (480, 640)):
        for way in WAYS:
            if chosen.only in f"{way}, {size[0]} lines":
                print(measure_kept(chosen.folder / "kept", size, way), flush=True)


if __name__ == "__main__":
    main()
