"""Replay buffers on a device, for eager code, ``torch.compile`` and CUDA graphs.

Batches equal the batches of ``mouse_core.replay`` if the seed, the writes and the index of the sample are the same. No
call waits for the device: samples are counted on the device, and no shape depends on values.
"""

from mouse_core.replay import Slices
from mouse_torch.device.replay import Replay, ReplayEnsemble

__all__ = ["Replay", "ReplayEnsemble", "Slices"]
