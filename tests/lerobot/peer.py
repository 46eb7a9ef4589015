"""LeRobot's reader and torchcodec on a LeRobotDataset, in an environment and a process of their own.

    python tests/lerobot/peer.py FOLDER

measures once for each line that it reads, "lerobot" or "torchcodec", and answers with frames for each second of
processor time. Of LeRobot these are batches of `[8, 2 frames of 2 cameras, 50 actions]`, of torchcodec's exact mode 32
frames from all files, those of one file asked for together. "memory" is answered with how many MB that no file holds
LeRobot's reader takes while it reads 3,200 windows of 2 frames of each camera, beyond those after the first.
"""

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from environment import lerobot_dataset  # type: ignore[import-not-found]  # beside this file, which is run as it is

BATCH, BATCHES, ACTIONS, WINDOWS = 8, 6, 50, 3_200


def main() -> None:
    """Answer, line by line."""
    import torch

    torch.set_num_threads(1)
    folder, random = Path(sys.argv[1]), np.random.default_rng(0)
    reader_of = lerobot_dataset()
    meta = reader_of("x/y", root=folder).meta
    deltas: dict[str, Any] = {key: [-3 / meta.fps, 0] for key in meta.camera_keys}
    deltas["action"] = [step / meta.fps for step in range(ACTIONS)]
    reader = reader_of("x/y", root=folder, delta_timestamps=deltas, video_backend="torchcodec")
    from torchcodec.decoders import VideoDecoder

    files: list[Any] = []

    def lerobot() -> int:
        for _ in range(BATCHES):
            chosen = random.integers(0, len(reader), BATCH).tolist()
            torch.utils.data.default_collate([reader[number] for number in chosen])
        return BATCHES * BATCH * 2 * len(meta.camera_keys)

    def torchcodec() -> int:
        if not files:
            paths = sorted(map(str, folder.rglob("*.mp4")))
            files.extend(
                VideoDecoder(p, seek_mode="exact", num_ffmpeg_threads=1, dimension_order="NHWC") for p in paths
            )
        for _ in range(BATCHES):
            which = random.integers(0, len(files), 32)
            for number in np.unique(which).tolist():
                frames = random.integers(0, len(files[number]), int((which == number).sum()))
                files[number].get_frames_at(sorted(frames.tolist()))
        return BATCHES * 32

    def anonymous() -> float:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Anonymous"))

    def memory() -> float:
        deltas = {key: [-1 / meta.fps, 0] for key in meta.camera_keys}
        reader = reader_of("x/y", root=folder, delta_timestamps={**deltas, "action": [0]}, video_backend="torchcodec")
        reader[0]
        gc.collect()
        before = anonymous()
        for number in random.integers(0, len(reader), WINDOWS).tolist():
            reader[number]
        gc.collect()
        return anonymous() - before

    for line in sys.stdin:
        if line.strip() == "memory":
            print(memory(), flush=True)
            continue
        began = time.process_time()
        frames = {"lerobot": lerobot, "torchcodec": torchcodec}[line.strip()]()
        print(frames / (time.process_time() - began), flush=True)


if __name__ == "__main__":
    main()
