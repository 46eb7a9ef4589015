"""TED, the layout of TorchRL: memory-mapped folders, HDF5 and checkpoints, read and written without torch."""

from mouse_core.formats.ted._layouts import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from mouse_core.formats.ted.reading import read_checkpoint, read_ted
from mouse_core.formats.ted.writing import write_checkpoint, write_ted

__all__ = [
    "Flat2TED",
    "H5Combine",
    "H5Split",
    "Nested2TED",
    "TED2Flat",
    "TED2Nested",
    "read_checkpoint",
    "read_ted",
    "write_checkpoint",
    "write_ted",
]
