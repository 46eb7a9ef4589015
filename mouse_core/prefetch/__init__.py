"""Loaders: batches in index order, made ahead of time; for stores, replay buffers and sources of one's own."""

from mouse_core.prefetch.batchifier import Batchifier, PrefetchBatchifier
from mouse_core.prefetch.loader import Delivery, Loader
from mouse_core.prefetch.options import LoaderOptions
from mouse_core.prefetch.prefetcher import OrderedPrefetcher, Prefetcher, Staged
from mouse_core.prefetch.source import Source

__all__ = [
    "Batchifier",
    "Delivery",
    "Loader",
    "LoaderOptions",
    "OrderedPrefetcher",
    "PrefetchBatchifier",
    "Prefetcher",
    "Source",
    "Staged",
]
