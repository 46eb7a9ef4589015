"""Rows in remote objects: metadata give the positions of rows, and values are read on demand.

``DatasetStore.open`` opens rows by their address; ``upload`` sends a store's folder to an address.
"""

from mouse_core.store.remote.uploading import Uploaded, upload

__all__ = ["Uploaded", "upload"]
