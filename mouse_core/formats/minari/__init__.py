"""Minari's datasets, read and written."""

from mouse_core.formats.minari._writing import write_minari
from mouse_core.formats.minari.reading import read_minari

__all__ = ["read_minari", "write_minari"]
