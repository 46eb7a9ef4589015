"""Clients of object storage, web servers and the Hub."""

from mouse_core.remote.clients.opening import is_url, open_client
from mouse_core.remote.clients.options import StorageOptions

__all__ = ["StorageOptions", "is_url", "open_client"]
