"""Rows of several collector processes, written by the single writer of a store.

A ``StoreServer`` in the process of the store receives the rows of ``StoreClient``s on one machine. A ``SharedStore``
carries out the calls of clients, with any transport: the actor of ``mouse_ray`` has a ``SharedStore``, too, and the
same clients reach it through a ``Channel``.
"""

from mouse_core.collect.client import Channel, StoreClient
from mouse_core.collect.server import StoreServer
from mouse_core.collect.shared import SharedStore

__all__ = ["Channel", "SharedStore", "StoreClient", "StoreServer"]
