"""Clients of object storage, web servers and the Hub."""

from mouse_core.remote.clients.opening import is_url, open_client
from mouse_core.remote.clients.options import StorageOptions, public_url
from mouse_core.remote.clients.reaching import Reaching

__all__ = ["Reaching", "StorageOptions", "is_url", "open_client", "public_url"]
