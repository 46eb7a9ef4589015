"""Appended rows in a file that is mapped: what is written is the system's at once, and the disk's when it is asked."""

from mouse_core.store.disk.tail.file import TailFile
from mouse_core.store.disk.tail.reader import TailReader

__all__ = ["TailFile", "TailReader"]
