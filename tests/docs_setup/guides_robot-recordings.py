"""A recording of an arm, and what the page shows is held to what its code prints."""

from pathlib import Path

import numpy as np

from tests.core.formats.robots import T0, image, joints, message, numbers, write_mcap
from tests.docs_output import checked_print

print = checked_print("docs/guides/robot-recordings.md")


def _record(path, *, lost=()):
    """Three seconds: joints at 100 Hz, a camera at 30, commands at 50, and a task that is said once."""
    log = [("/task", T0 - 300_000_000, message("std_msgs/String", data="pick the cube"))]
    for number in range(300):
        time = T0 + number * 10_000_000
        angles = [number / 100, -number / 100, 0.5]
        log.append(("/joint_states", time, joints(time, angles, ["shoulder", "elbow", "grip"])))
    for number in range(90):
        time = T0 + 4_000_000 + number * 33_333_333
        if number not in lost:
            log.append(("/camera/image_raw", time, image(time, np.full((6, 8, 3), number, np.uint8))))
    for number in range(150):
        log.append(("/command", T0 + number * 20_000_000, numbers([number / 50, 0, 1])))
    write_mcap(Path(path), sorted(log, key=lambda one: one[1]))


_record("pick.mcap")
_record("lost.mcap", lost=range(40, 52))
