"""Clients that read remote objects, and the local cache file of the objects' bytes."""

from mouse_core.remote.clients import ObjectInfo, Reaching

__all__ = ["ObjectInfo", "Reaching"]
