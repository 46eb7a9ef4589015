"""Loaders, which compute batches ahead of time in index order, from stores, replay buffers and user-defined sources."""

from mouse_core.prefetch.batchifier import Batchifier, PrefetchBatchifier
from mouse_core.prefetch.loader import Loader
from mouse_core.prefetch.prefetcher import Delivery, OrderedPrefetcher, Staged
from mouse_core.prefetch.source import Source

__all__ = [
    "Batchifier",
    "Delivery",
    "Loader",
    "OrderedPrefetcher",
    "PrefetchBatchifier",
    "Source",
    "Staged",
]
