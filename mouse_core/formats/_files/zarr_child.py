"""Read a zarr group in a separate process, with the same protocol as ``h5_child.py`` for HDF5.

The script takes the path of a folder or zip file. The script imports nothing of this package.
"""

from __future__ import annotations

import math
import os
import runpy
import stat
import sys
import zipfile
from typing import Any

DEPTH = 16
# Arrays above this size are rejected if fewer than one chunk in a thousand exists.
MOST_ABSENT_BYTES, MOST_ABSENT = 1 << 30, 1000
MOST_CACHED_BYTES = 32 << 20
# Codecs that only convert bytes to numbers; "pickle" and "json2" would create objects.
CODECS = {
    "blosc", "bytes", "zstd", "zlib", "gzip", "lz4", "bz2", "lzma", "shuffle", "delta", "fixedscaleoffset", "quantize",
    "packbits", "astype", "bitround", "crc32", "crc32c", "adler32", "fletcher32", "transpose", "sharding_indexed",
    "default", "endian",
}  # fmt: skip


class Opened:
    """A zarr group, open for reading, with a cache of the last decoded rows of each array."""

    def __init__(self, path: str) -> None:
        import zarr

        zarr.config.set({"async.concurrency": 4, "threading.max_workers": 2})
        _check_blosc()
        if os.path.isdir(path):
            names = _names(path)
            self.store: Any = zarr.storage.LocalStore(path, read_only=True)
        else:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            self.store = zarr.storage.ZipStore(path, mode="r")
        self.chunks = _chunks(names)
        self.root = zarr.open_group(self.store, mode="r", use_consolidated=False)
        self.decoded: dict[str, tuple[int, Any]] = {}

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def find(self, path: str) -> Any:
        """Return the group or array at a path, or None."""
        if not path.strip("/"):
            return self.root
        try:
            return self.root[path.strip("/")]
        except (KeyError, FileNotFoundError):
            return None

    def names(self, node: Any) -> list[str]:
        """Return the names of the groups and arrays in a group."""
        return [name for name, _ in self._members(node)] if hasattr(node, "members") else []

    def _members(self, group: Any) -> list[tuple[str, Any]]:
        return sorted(group.members(use_consolidated_for_children=False))

    def tree(self, node: Any, depth: int = 0) -> dict[str, Any]:
        """Return the description of a group and of all items below it, without the values of arrays."""
        if depth > DEPTH:
            raise ValueError(f"expected groups at most {DEPTH} levels deep, found a deeper group at {node.path}")
        if not hasattr(node, "members"):
            try:
                return _array(node, self.chunks)
            except ValueError as error:
                raise ValueError(f"{node.path}: {error}") from error
        items = {name: self.tree(item, depth + 1) for name, item in self._members(node)}
        return {"kind": "group", "items": items, "attributes": {}}

    def read(self, array: Any, path: str, first: int, stop: int) -> tuple[dict[str, Any], list[Any]]:
        """Read rows, and cache the other decoded rows of the same chunks for the next request."""
        import numpy as np

        held, values = self.decoded.get(path, (0, None))
        if values is None or first < held or stop > held + len(values):
            _array(array, self.chunks)
            rows, each = (array.chunks or (1,))[0], array.nbytes // max((array.shape or (1,))[0], 1)
            held = first // rows * rows
            end = min(-(-stop // rows) * rows, (array.shape or (1,))[0])
            if not array.shape:
                held, values = first, np.asarray(array[()])
            elif (end - held) * each > MOST_CACHED_BYTES:
                held, values = first, np.asarray(array[first:stop])
            else:
                values = np.asarray(array[held:end])
                self.decoded[path] = (held, values)
        values = np.ascontiguousarray(values[first - held : stop - held] if values.ndim else values)
        return {"kind": "number", "dtype": values.dtype.str, "shape": values.shape}, [values]


def _check_blosc() -> None:
    """Make numcodecs check the length of chunks, because Blosc would read beyond the end of a truncated chunk."""
    import numcodecs.blosc  # type: ignore[import-untyped]
    import numpy as np

    decode = numcodecs.blosc.Blosc.decode

    def checked(self: Any, buf: Any, out: Any = None) -> Any:
        found = np.frombuffer(buf, np.uint8)
        said = int.from_bytes(found[12:16].tobytes(), "little")  # total size, at the end of Blosc's header
        if len(found) < 16 or said != len(found):
            raise ValueError(f"expected a chunk of {said} bytes, found {len(found)}")
        return decode(self, buf, out)

    numcodecs.blosc.Blosc.decode = checked


def _chunks(names: list[str]) -> dict[str, int]:
    """Count the files in each folder and in the folders below it, except metadata files; the files of an array are its
    chunks.
    """
    found: dict[str, int] = {}
    for name in names:
        *folders, last = name.split("/")
        if last and not last.startswith(".z") and last != "zarr.json":
            for depth in range(1, len(folders) + 1):
                above = "/".join(folders[:depth])
                found[above] = found.get(above, 0) + 1
    return found


def _names(root: str) -> list[str]:
    """Return all files in a folder.

    Raise ValueError for a link to a file outside of the folder, and for a pipe, because reading a pipe would block.
    """
    base, found = os.path.realpath(root), []
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            there = os.path.join(folder, name)
            mode = os.lstat(there).st_mode
            if stat.S_ISLNK(mode) and os.path.commonpath([base, os.path.realpath(there)]) != base:
                raise ValueError(f"{os.path.relpath(there, root)}: expected data inside the folder, found a link")
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                raise ValueError(f"{os.path.relpath(there, root)}: expected a regular file, found a pipe or a device")
        found += [os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/") for name in files]
    return found


def _codecs(described: Any) -> list[str]:
    """Return the names of all codecs in the description of an array, including inner codecs of shards."""
    if isinstance(described, list | tuple):
        return [name for item in described for name in _codecs(item)]
    if not isinstance(described, dict):
        return []
    name = described.get("id") or described.get("name")
    inner = described.get("configuration")
    nested = [inner.get(key) for key in ("codecs", "index_codecs")] if isinstance(inner, dict) else []
    return [str(name).removeprefix("numcodecs."), *(one for item in nested for one in _codecs(item))]


def _array(array: Any, stored: dict[str, int]) -> dict[str, Any]:
    """Return the description of an array, after checking that enough bytes are stored for its shape."""
    described = array.metadata.to_dict()
    used = [name for key in ("filters", "compressor", "codecs") for name in _codecs(described.get(key))]
    pictures = [name for name in used if name.startswith("imagecodecs_")]
    if pictures:
        _register_pictures(pictures[0])
    if wrong := sorted(set(used) - CODECS - set(pictures)):
        raise ValueError(f"expected codecs of numbers, found {wrong[:4]}")
    dtype, shape = array.dtype, [int(size) for size in array.shape]
    kind = getattr(dtype, "kind", "O")
    whole = kind in "biuf" and dtype.itemsize <= 8
    found: dict[str, Any] = {"kind": "number" if whole else "other", "shape": shape, "dtype": str(dtype)}
    if whole and array.size:
        found["dtype"] = dtype.str
        # Chunks in shards share files.
        sizes = getattr(array, "shards", None) or array.chunks
        wanted = math.prod(-(-size // chunk) for size, chunk in zip(shape, sizes, strict=True))
        present = min(stored.get(array.path, 0), wanted)
        found["absent"], found["chunks"] = wanted - present, wanted
        if array.nbytes > MOST_ABSENT_BYTES and present * MOST_ABSENT < wanted:
            raise ValueError(f"expected {wanted} chunks for shape {shape}, found {present}")
    return found | {"attributes": {}}


def _register_pictures(name: str) -> None:
    try:
        from imagecodecs.numcodecs import register_codecs  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(f"images of the codec {name} need imagecodecs: pip install imagecodecs") from error
    register_codecs(verbose=False)


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    runpy.run_path(os.path.join(here, "h5_child.py"))["serve"]("zarr", sys.argv[1], Opened)
