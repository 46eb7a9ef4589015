"""LeRobotDataset: versions 3 and 2 read, version 3 written."""

from mouse_core.formats.lerobot.reading import read_lerobot
from mouse_core.formats.lerobot.writing import write_lerobot

__all__ = ["read_lerobot", "write_lerobot"]
