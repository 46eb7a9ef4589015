"""Recording into stores: ``Recorder`` and ``VectorRecorder`` wrap environments, ``record`` plays whole episodes."""

from mouse_core.record.playing import record
from mouse_core.record.recorder import Recorder, VectorRecorder

__all__ = ["Recorder", "VectorRecorder", "record"]
