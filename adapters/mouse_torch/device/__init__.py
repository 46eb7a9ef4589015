"""Replay on the device: rows are kept, drawn and gathered there, in eager code, ``torch.compile`` and CUDA graphs.

What is drawn is what ``mouse_core.replay`` draws for the same seed, writes and number of the sample. No sample waits
for the device: its number is counted there, and all shapes are known.
"""

from mouse_core.replay import Slices
from mouse_torch.device.replay import Replay

__all__ = ["Replay", "Slices"]
