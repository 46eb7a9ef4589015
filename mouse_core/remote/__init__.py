"""Objects elsewhere: what reads them, and the local file in which their bytes lie once they were asked for."""

from mouse_core.remote.client import ObjectClient, ObjectInfo
from mouse_core.remote.clients.options import Reaching

__all__ = ["ObjectClient", "ObjectInfo", "Reaching"]
