"""RLDS: episodes of steps as rows and as trajectories."""

from mouse_core.formats.rlds._trajectories import (
    Trajectory,
    convert_rlds_to_trajectories,
    create_trajectory_data_spec,
    push_rlds_to_reverb,
    to_tensor_specs,
)
from mouse_core.formats.rlds.reading import read_rlds, write_rlds

__all__ = [
    "Trajectory",
    "convert_rlds_to_trajectories",
    "create_trajectory_data_spec",
    "push_rlds_to_reverb",
    "read_rlds",
    "to_tensor_specs",
    "write_rlds",
]
