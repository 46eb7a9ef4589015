"""Appended rows in a file that is mapped: what is written is the system's at once, and the disk's when it is asked."""

from mouse_core.store._tail.rows import Extent, prepare
from mouse_core.store._tail.schema import tail_column
from mouse_core.store._tail.values import TailColumn
from mouse_core.store.disk.tail.appender import FolderAppender, SyncedAppender
from mouse_core.store.disk.tail.file import TailFile
from mouse_core.store.disk.tail.reader import TailReader

# What such a file takes and gives is that of rows in memory.
__all__ = [
    "Extent",
    "FolderAppender",
    "SyncedAppender",
    "TailColumn",
    "TailFile",
    "TailReader",
    "prepare",
    "tail_column",
]
