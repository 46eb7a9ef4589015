"""Replay and rollouts on the device: rows are kept, drawn and gathered there, in eager code, ``torch.compile`` and
CUDA graphs.

What is drawn is what ``mouse_core.replay`` and ``mouse_core.rollouts`` draw for the same seed, writes and number of the
sample, or of the epoch. Nothing waits for the device: those numbers are counted there, and all shapes are known.
"""

from mouse_core.replay import Slices
from mouse_torch.device.ensemble import ReplayEnsemble
from mouse_torch.device.replay import Replay
from mouse_torch.device.rollouts import RolloutStorage

__all__ = ["Replay", "ReplayEnsemble", "RolloutStorage", "Slices"]
