"""Recording to stores: ``Recorder`` and ``VectorRecorder`` wrap environments; ``record`` plays and records episodes."""

from mouse_core.record.recorder import Recorder, VectorRecorder, record

__all__ = ["Recorder", "VectorRecorder", "record"]
