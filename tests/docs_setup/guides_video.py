"""A LeRobotDataset with two cameras."""

from pathlib import Path

from tests.core.test_lerobot import Robot

Robot((30, 25), cameras=["top", "wrist"]).write(Path("robot"), files=[[0], [1]])
