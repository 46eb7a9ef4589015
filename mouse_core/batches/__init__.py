"""Computes batch i of a snapshot by a pure function in four steps: windows are planned, located, copied and
delivered.
"""

from typing import TYPE_CHECKING

from mouse_core._base.memory import BatchLayout
from mouse_core.batches._pipeline import Batch
from mouse_core.batches.source import BatchSource

if TYPE_CHECKING:
    from mouse_core.batches._stages import Map

__all__ = ["Batch", "BatchLayout", "BatchSource", "Map"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import ``name`` when it is first used, because only user functions over batches need it."""
        if name == "Map":
            from mouse_core.batches._stages import Map

            return Map
        raise AttributeError(f"module 'mouse_core.batches' has no attribute {name!r}")
