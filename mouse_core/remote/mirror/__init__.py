"""A local cache file of remote objects, which has a size limit, is shared by processes, and is read as mapped
memory.
"""

from mouse_core.remote.mirror.mirror import Mirror, MirrorObject, cache_folder

__all__ = ["Mirror", "MirrorObject", "cache_folder"]
