"""Remote objects: clients that read them, and the local cache file of their bytes."""

from mouse_core.remote.clients import ObjectClient, ObjectInfo, Reaching

__all__ = ["ObjectClient", "ObjectInfo", "Reaching"]
