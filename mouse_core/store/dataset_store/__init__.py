"""The store of recorded and appended steps, in memory or in a folder."""

from mouse_core.store.dataset_store.store import DatasetStore

__all__ = ["DatasetStore"]
