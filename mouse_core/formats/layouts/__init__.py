"""Read trees of arrays in HDF5, zarr and npz files by a layout, which names the arrays of observations and so on."""

from mouse_core.formats.layouts.layout import LAYOUTS, TreeLayout, load_layout
from mouse_core.formats.layouts.reading import read_layouts

__all__ = ["LAYOUTS", "TreeLayout", "load_layout", "read_layouts"]
