"""A local cache file of remote objects: bounded, shared by processes, and read as mapped memory."""

from mouse_core.remote.mirror.mirror import Mirror, MirrorObject, cache_folder

__all__ = ["Mirror", "MirrorObject", "cache_folder"]
