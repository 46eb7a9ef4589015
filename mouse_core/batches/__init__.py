"""Batch i of a snapshot as a pure function: plan, locate, copy, deliver."""

from mouse_core._base.memory import BatchLayout
from mouse_core.batches._pipeline import Batch
from mouse_core.batches.source import BatchSource

__all__ = ["Batch", "BatchLayout", "BatchSource"]
