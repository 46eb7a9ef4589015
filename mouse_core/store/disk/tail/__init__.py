"""Appended rows in a file that is mapped: what is written is the system's at once, and the disk's when it is asked."""

# A tail file takes and returns the rows of an extent in memory.
from mouse_core.store._tail.rows import Extent, prepare
from mouse_core.store._tail.schema import tail_column

__all__ = ["Extent", "prepare", "tail_column"]
