"""Stores and their snapshots: recorded steps in order, and the metadata of their columns."""

from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store, View

__all__ = ["DatasetStore", "Snapshot", "Store", "View"]
