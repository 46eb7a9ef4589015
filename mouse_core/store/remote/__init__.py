"""Rows in remote objects: their positions come from metadata, and values are read on demand.

``DatasetStore.open`` opens rows by their address; ``upload`` sends a store's folder to an address.
"""

from mouse_core.store.remote.uploading import Uploaded, upload

__all__ = ["Uploaded", "upload"]
