"""What the recipes open: a LeRobotDataset, a file as D4RL has them, and an object storage on the loopback network."""

import os
import tempfile
from pathlib import Path

import h5py
import numpy as np

from tests.core.object_server import ObjectServer
from tests.core.test_lerobot import Robot

Robot((30, 25), cameras=["top", "wrist"]).write(Path("robot"), files=[[0], [1]])

with h5py.File("hopper.hdf5", "w") as file:
    step = np.arange(500)
    file["observations"] = np.random.default_rng(0).normal(size=(500, 11)).astype(np.float32)
    file["actions"] = np.zeros((500, 3), np.float32)
    file["rewards"] = np.ones(500, np.float32)
    file["terminals"] = step % 50 == 49
    file["timeouts"] = np.zeros(500, bool)

server = ObjectServer().__enter__()
os.environ.update({name.upper(): value for name, value in server.options.items()})
os.environ["MOUSE_CACHE"] = tempfile.mkdtemp(prefix="mouse-docs-")
