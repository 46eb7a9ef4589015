"""Collection of rows from several processes; only one process writes the rows to the store.

A ``StoreServer`` in the store's process receives the rows of ``StoreClient`` objects on the same machine. A
``SharedStore`` carries out the calls of clients, whatever the transport: the actor of ``mouse_ray`` also has a
``SharedStore``, which clients reach through a ``Channel``.
"""

from mouse_core.collect.client import Channel, StoreClient
from mouse_core.collect.server import StoreServer
from mouse_core.collect.shared import SharedStore

__all__ = ["Channel", "SharedStore", "StoreClient", "StoreServer"]
