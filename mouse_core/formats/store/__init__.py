"""Stores in folders, as ``DatasetStore.open`` makes them."""

from mouse_core.formats.store.reading import read_store

__all__ = ["read_store"]
