"""Batch i of a snapshot as a pure function: plan, locate, copy, deliver."""

from mouse_core.batches.source import Batch, BatchLayout, BatchSource

__all__ = ["Batch", "BatchLayout", "BatchSource"]
