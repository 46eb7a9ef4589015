"""RLDS: episodes of steps as rows and as trajectories."""

from mouse_core.formats.rlds.reading import (
    Trajectory,
    convert_rlds_to_trajectories,
    create_trajectory_data_spec,
    push_rlds_to_reverb,
    read_rlds,
    to_tensor_specs,
    write_rlds,
)

__all__ = [
    "Trajectory",
    "convert_rlds_to_trajectories",
    "create_trajectory_data_spec",
    "push_rlds_to_reverb",
    "read_rlds",
    "to_tensor_specs",
    "write_rlds",
]
