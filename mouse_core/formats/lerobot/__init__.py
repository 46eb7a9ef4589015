"""Reads LeRobotDatasets of versions 3 and 2, and writes version 3."""

from mouse_core.formats.lerobot.reading import read_lerobot
from mouse_core.formats.lerobot.writing import write_lerobot

__all__ = ["read_lerobot", "write_lerobot"]
