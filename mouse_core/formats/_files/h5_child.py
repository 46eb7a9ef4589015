"""Read an HDF5 file in a separate process, so that a damaged file can crash or hang only the separate process.

The script takes a file's path. Each request is a line of JSON; the answer is a line of JSON and the bytes that this
line announces. The script imports nothing of this package, so that it starts quickly.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

MEMORY = 3 << 30
"""Limit of the address space of the reading process in bytes. The limit includes the libraries of the process. A chunk
that needs more memory cannot be read.
"""

DEPTH = 16


def _bound_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # this system has no such limits


def _plain(value: Any) -> Any:
    """Return an attribute's value as a JSON value."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _check_stored(dataset: Any) -> None:
    """Raise ValueError if fewer bytes are stored than the shape needs; missing bytes would be read as zeros."""
    shape = dataset.shape
    if dataset.chunks:
        expected = math.prod(-(-size // chunk) for size, chunk in zip(shape, dataset.chunks, strict=True))
        if dataset.id.get_num_chunks() != expected:
            raise ValueError(f"expected {expected} chunks for shape {shape}, found {dataset.id.get_num_chunks()}")
    else:
        expected = math.prod(shape) * dataset.id.get_type().get_size()
        found = dataset.id.get_storage_size()
        if found < expected:
            raise ValueError(f"expected {expected} bytes for shape {shape}, found {found}")


class Opened:
    """An HDF5 file, open for reading."""

    def __init__(self, path: str) -> None:
        import h5py

        self._h5py = h5py
        self._file = h5py.File(path, "r", locking=False, rdcc_nbytes=32 << 20)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def find(self, path: str) -> Any:
        """Return the item at a path within the file, or None. Raise ValueError if a link points to another file."""
        node = self._file
        for name in path.strip("/").split("/") if path.strip("/") else ():
            link = node.get(name, getlink=True) if isinstance(node, self._h5py.Group) else None
            if link is None:
                return None
            if not isinstance(link, self._h5py.HardLink):
                raise ValueError(f"{path}: expected data inside the file, found a link at {name!r}")
            node = node[name]
        return node

    def names(self, node: Any) -> list[str]:
        """Return the names of the items in a group."""
        return list(node) if isinstance(node, self._h5py.Group) else []

    def tree(self, node: Any, depth: int = 0) -> dict[str, Any]:
        """Return the description of a group and of all items below it, without the values of datasets."""
        h5py = self._h5py
        if depth > DEPTH:
            raise ValueError(f"expected groups at most {DEPTH} levels deep, found a deeper group at {node.name}")
        if not isinstance(node, h5py.Group | h5py.Dataset):  # a named type, or a damaged dataset
            return {"kind": "other", "shape": [], "dtype": "", "attributes": {}}
        found: dict[str, Any] = {"attributes": {str(name): _plain(value) for name, value in node.attrs.items()}}
        if isinstance(node, h5py.Dataset):
            try:
                return found | self._dataset(node)
            except ValueError as error:
                raise ValueError(f"{node.name}: {error}") from error
        found["kind"] = "group"
        found["items"] = {}
        for name in node:
            link = node.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise ValueError(f"{node.name}/{name}: expected data inside the file, found a link")
            found["items"][name] = self.tree(node[name], depth + 1)
        return found

    def _dataset(self, dataset: Any) -> dict[str, Any]:
        """Return the description of a dataset, after checking that enough bytes are stored for its shape."""
        dtype, shape = dataset.dtype, dataset.shape
        if shape is None:
            return {"kind": "empty", "shape": [0], "dtype": ""}
        if dataset.is_virtual or dataset.external:
            raise ValueError("expected a dataset inside the file, found a dataset that points to other files")
        text = self._h5py.check_string_dtype(dtype)
        ragged = None if text is not None else self._h5py.check_vlen_dtype(dtype)
        kind = "text" if text is not None else "ragged" if ragged is not None else "number"
        if kind == "number" and (dtype.kind not in "biuf" or dtype.itemsize > 8):
            kind = "other"
        _check_stored(dataset)
        described = str(ragged) if ragged is not None else dtype.str
        if dtype.names is not None or dtype.subdtype is not None:
            described = str(dtype)  # except untyped bytes, whose dtype is also |V
        return {"kind": kind, "shape": list(shape), "dtype": described}

    def read(self, dataset: Any, path: str, start: int, stop: int) -> tuple[dict[str, Any], list[Any]]:
        """Read rows of a dataset; return the description of the rows, and their bytes in pieces."""
        import numpy as np

        if not isinstance(dataset, self._h5py.Dataset):
            raise ValueError(f"{path}: expected values, found a group")
        lacking = self._lacking_filters(dataset)
        try:
            values = dataset[()] if not dataset.shape else dataset[start:stop]
        except (OSError, RuntimeError, ValueError) as error:
            why = f"compressed by {lacking}, which h5py does not have: pip install hdf5plugin" if lacking else error
            raise ValueError(f"{path}, rows {start}..{stop - 1}: {why}") from error
        if dataset.dtype.kind not in "OSU":
            values = np.ascontiguousarray(values)
            return {"kind": "number", "dtype": values.dtype.str, "shape": list(np.shape(values))}, [values]
        values = np.asarray(values, dtype=object).reshape(-1)
        ragged = self._h5py.check_vlen_dtype(dataset.dtype)
        is_text = ragged in (None, str, bytes)
        items = [
            value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, bytes) else value.tobytes()
            for value in values
        ]
        kind, described = ("text", "") if is_text else ("ragged", np.dtype(ragged).str)
        lengths = np.array([len(item) for item in items], np.int64)
        return {"kind": kind, "dtype": described, "shape": [len(items)]}, [lengths, b"".join(items)]

    def _lacking_filters(self, dataset: Any) -> list[str]:
        """Return the compression filters that the dataset needs and that neither h5py nor an installed hdf5plugin
        provides.
        """
        described, available = dataset.id.get_create_plist(), self._h5py.h5z.filter_avail
        filters = [described.get_filter(number) for number in range(described.get_nfilters())]
        if not all(available(one[0]) for one in filters):
            with suppress(ImportError):
                import hdf5plugin  # type: ignore[import-not-found]  # noqa: F401
        return [
            f"filter {code} {name.decode('utf-8', 'replace').partition(';')[0]}".strip()
            for code, _, _, name in filters
            if not available(code)
        ]


def _answer(request: dict[str, Any], opened: Any) -> tuple[dict[str, Any], list[Any]]:
    """Answer a request: return a line of JSON, and the bytes that the line announces."""

    def there(path: str) -> Any:
        node = opened.find(path)
        if node is None:
            raise ValueError(f"{path}: expected a group or a dataset, found none")
        return node

    if request["do"] == "names":
        return {"names": opened.names(there(request["path"]))}, []
    if request["do"] == "trees":
        nodes = map(opened.find, request["paths"])
        return {"trees": [None if node is None else opened.tree(node) for node in nodes]}, []
    if request["do"] == "attributes":
        found = [(opened.find(path), name) for path, name in request["items"]]
        return {"values_of": [None if node is None else _plain(node.attrs.get(name)) for node, name in found]}, []
    parts: list[Any] = []
    headers = []
    for path, start, stop in request["items"]:
        header, pieces = opened.read(there(path), path, start, stop)
        headers.append(header | {"sizes": [memoryview(piece).nbytes for piece in pieces]})
        parts += pieces
    return {"values": headers}, parts


def _send(out: BinaryIO, header: dict[str, Any], parts: list[Any]) -> None:
    out.write(json.dumps(header).encode() + b"\n")
    for part in parts:
        view = memoryview(part)
        if view.nbytes:
            out.write(view.cast("B"))
    out.flush()


def serve(library: str, path: str, opened: Callable[[str], Any]) -> None:
    """Answer requests until the input ends.

    Args:
        library: The library that reads the files; it is imported before the first answer.
        path: The first file; requests can name further files.
        opened: A function that opens a file; the result has the methods of ``Opened``.
    """
    _bound_memory()
    out = sys.stdout.buffer
    with suppress(ImportError):  # ``opened`` raises the error again
        importlib.import_module(library)
    _send(out, {}, [])
    try:
        file = opened(path)
        _send(out, {}, [])
    except Exception as error:
        _send(out, {"error": f"{error}" or type(error).__name__}, [])
        return
    for line in sys.stdin.buffer:
        parts: list[Any] = []
        try:
            request = json.loads(line)
            if request["do"] == "open":
                file.close()
                file = opened(request["path"])
                header: dict[str, Any] = {}
            else:
                header, parts = _answer(request, file)
        except Exception as error:
            header, parts = {"error": f"{error}" or type(error).__name__}, []
        _send(out, header, parts)


if __name__ == "__main__":
    serve("h5py", sys.argv[1], Opened)
