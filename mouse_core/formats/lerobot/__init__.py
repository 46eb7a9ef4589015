"""Reads and writes LeRobotDatasets of version 3."""

from mouse_core.formats.lerobot.reading import read_lerobot
from mouse_core.formats.lerobot.writing import write_lerobot

__all__ = ["read_lerobot", "write_lerobot"]
