"""Rows in objects elsewhere: what is where is known from metadata, and values are read when they are wanted.

``DatasetStore.open`` opens them by their address; ``upload`` sends a store's folder there.
"""

from mouse_core.store.remote.uploading import Uploaded, follow, upload

__all__ = ["Uploaded", "follow", "upload"]
