"""Loaders, which compute batches ahead of time in index order, from stores, replay buffers and user-defined sources."""

from typing import TYPE_CHECKING

from mouse_core.prefetch.batchifier import Batchifier, PrefetchBatchifier
from mouse_core.prefetch.loader import Loader
from mouse_core.prefetch.prefetcher import Delivery, OrderedPrefetcher, Staged
from mouse_core.prefetch.source import Source

if TYPE_CHECKING:
    from mouse_core.prefetch.report import LoaderReport

__all__ = [
    "Batchifier",
    "Delivery",
    "Loader",
    "LoaderReport",
    "OrderedPrefetcher",
    "PrefetchBatchifier",
    "Source",
    "Staged",
]

if not TYPE_CHECKING:  # where any name would be one

    def __getattr__(name: str) -> object:
        """Import a name on first use, because only delivered batches need it."""
        if name == "LoaderReport":
            from mouse_core.prefetch.report import LoaderReport

            return LoaderReport
        raise AttributeError(f"module 'mouse_core.prefetch' has no attribute {name!r}")
