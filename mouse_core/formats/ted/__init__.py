"""TED, the layout of TorchRL: memory-mapped folders and HDF5, read and written without torch."""

from mouse_core.formats.ted._layouts import Flat2TED, Nested2TED, TED2Flat, TED2Nested
from mouse_core.formats.ted._writing import write_ted
from mouse_core.formats.ted.rows import read_ted

__all__ = ["Flat2TED", "Nested2TED", "TED2Flat", "TED2Nested", "read_ted", "write_ted"]
