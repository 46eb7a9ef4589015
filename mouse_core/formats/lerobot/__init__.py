"""LeRobotDataset, version 3."""

from mouse_core.formats.lerobot.reading import read_lerobot

__all__ = ["read_lerobot"]
