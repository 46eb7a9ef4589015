"""Loaders: batches in index order, computed ahead of time."""

from mouse_core.prefetch.batchifier import Loader, PrefetchBatchifier, make_source, numpy_maker

__all__ = ["Loader", "PrefetchBatchifier", "make_source", "numpy_maker"]
