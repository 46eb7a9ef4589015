"""Clients that read remote objects, and the local cache file of the objects' bytes."""

from mouse_core.remote.clients import ObjectClient, ObjectInfo, Reaching

__all__ = ["ObjectClient", "ObjectInfo", "Reaching"]
