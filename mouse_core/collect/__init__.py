"""Rows of several collectors, in processes of their own, through the one writer of a store.

A ``StoreServer`` beside the store takes what ``StoreClient``s send, on one machine. ``SharedStore`` is what it answers
with, whatever brings the calls: the actor of ``mouse_ray`` has one, too, and a ``Channel`` to it for the same clients.
"""

from mouse_core.collect.client import Channel, StoreClient
from mouse_core.collect.server import StoreServer
from mouse_core.collect.shared import SharedStore

__all__ = ["Channel", "SharedStore", "StoreClient", "StoreServer"]
