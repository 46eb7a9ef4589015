"""A local file that holds what was read of objects elsewhere: bounded, shared by processes, read through its memory."""

from mouse_core.remote.mirror.mirror import Mirror, MirrorObject, cache_folder

__all__ = ["Mirror", "MirrorObject", "cache_folder"]
