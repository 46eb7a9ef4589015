"""Files of ``numpy.savez`` as trees of arrays; slashes in the names of arrays make groups."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.files.reading import damaged, reading


def npy_header(file: BinaryIO | Any, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape of an array, whether it is in Fortran order, and its dtype, from its header in ``numpy.save``.

    Raises:
        DataError: The array has another version than 1.0 or 2.0; begins with ``where``.
    """
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise DataError(f"{where}: expected an array of version 1.0 or 2.0, found {version}")
    return readers[version](file)


class NpyRows:
    """Reads the rows of an array in the format of ``numpy.save`` in order.

    Args:
        file: A stream of bytes at the beginning of the array.
        where: Name of the array for messages.

    Raises:
        DataError: It is no array of numbers.
    """

    def __init__(self, file: BinaryIO | Any, *, where: str) -> None:
        self._file = file
        self._where = where
        shape, fortran, dtype = npy_header(file, where)
        if dtype.kind not in "biuf" or dtype.itemsize > 8 or any(size < 0 for size in shape):
            raise DataError(f"{where}: expected an array of numbers, found {dtype} {list(shape)}")
        if fortran and len(shape) > 1:
            raise DataError(f"{where}: expected an array in C order, found one in Fortran order")
        self.shape: tuple[int, ...] = tuple(int(size) for size in shape)
        self.dtype: np.dtype[Any] = dtype
        self.row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        self.place = 0

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def read(self, count: int) -> npt.NDArray[Any]:
        """Return the next ``count`` rows, ``[count, ...]``.

        Raises:
            DataError: There are fewer bytes than the array's shape says.
        """
        count = min(count, len(self) - self.place)
        values = np.frombuffer(self._bytes(count * self.row_bytes), self.dtype)
        self.place += count
        return values.reshape(count, *self.shape[1:])

    def skip(self, count: int) -> None:
        """Skip ``count`` rows."""
        while count:
            some = min(count, max(1, (1 << 22) // max(self.row_bytes, 1)))
            self.read(some)
            count -= some

    def end(self) -> None:
        """Read to the end of the stream, where compressed files store the CRC of their bytes.

        Raises:
            DataError: There are more bytes than the array's shape says.
        """
        if self._file.read(1):
            raise DataError(f"{self._where}: expected the end after {len(self)} rows, found more bytes")

    def _bytes(self, size: int) -> bytes:
        parts = []
        left = size
        while left:
            part = self._file.read(min(left, 1 << 24))
            if not part:
                raise DataError(
                    f"{self._where}: expected {len(self)} rows of {self.row_bytes} bytes, found the end in row "
                    f"{self.place + (size - left) // max(self.row_bytes, 1)}"
                )
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


_MOST_ARRAYS = 1 << 16
_SUFFIX = ".npy"


class NpzTree:
    """An npz file, open for reading.

    Args:
        path: The file.
        content: The bytes of the file, if it lies in another file.

    Raises:
        ConfigError: The file does not exist.
        DataError: The file is damaged, or no npz file.
    """

    def __init__(self, path: str | os.PathLike[str], content: BinaryIO | None = None) -> None:
        self.path = os.fspath(path)
        self._files: dict[str, Any] = {}
        self._begun: dict[str, tuple[NpyRows, npt.NDArray[Any] | None]] = {}
        with reading(self.path):
            self._archive = zipfile.ZipFile(content or self.path)
            members = [member.filename for member in self._archive.infolist()]
            if len(members) > _MOST_ARRAYS:
                raise damaged(self.path, f"expected at most {_MOST_ARRAYS} arrays, found {len(members)}")
            wrong = [name for name in members if not name.endswith(_SUFFIX)]
            if wrong or len(set(members)) < len(members):
                # Every writer of npz files writes arrays alone, each once.
                raise damaged(self.path, f"expected arrays of different names, found {wrong[:4] or 'one twice'}")
        self._names = [name.removesuffix(_SUFFIX) for name in members]

    def finish(self, *, others: bool) -> None:
        """Read begun arrays, or with ``others`` all arrays, to their end, where their CRC is compared."""
        for path, (rows, _) in self._begun.items():
            with reading(self.path, at=path):
                rows.skip(len(rows) - rows.place)
                rows.end()
        for name in self._names if others else ():
            if name not in self._begun:
                with reading(self.path, at=name), self._archive.open(name + _SUFFIX) as file:
                    while file.read(1 << 20):
                        pass

    def close(self) -> None:
        """Close the file."""
        for file in self._files.values():
            file.close()
        self._archive.close()

    def names(self, path: str = "/") -> list[str]:
        """Names of the groups and arrays in a group."""
        above = f"{path.strip('/')}/".lstrip("/")
        below = (name.removeprefix(above).split("/")[0] for name in self._names if name.startswith(above))
        return list(dict.fromkeys(below))

    def find(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """Description of the group or array at each path, as ``H5File.find`` returns it."""
        return [self._tree(path.strip("/")) for path in paths]

    def attributes(self, items: Sequence[tuple[str, str]]) -> list[Any]:
        """Return None for each item: npz files have no attributes."""
        return [None] * len(items)

    def _tree(self, path: str) -> dict[str, Any] | None:
        if path in self._names:
            with reading(self.path, at=path), self._archive.open(path + _SUFFIX) as file:
                shape, _, dtype = npy_header(file, self.path)
                kind = "number" if dtype.kind in "biuf" and dtype.itemsize <= 8 else "other"
                stored = self._archive.getinfo(path + _SUFFIX).file_size
                claimed = int(np.prod(shape, dtype=object)) * dtype.itemsize
                if kind == "number" and not 0 <= stored - claimed <= 1 << 16:
                    raise damaged(
                        self.path, f"expected {claimed} bytes for shape {list(shape)}, found {stored}", at=path
                    )
                return {"kind": kind, "shape": list(shape), "dtype": dtype.str, "attributes": {}}
        names = self.names(path)
        if not names:
            return None
        items = {name: self._tree(f"{path}/{name}".strip("/")) for name in names}
        return {"kind": "group", "items": items, "attributes": {}}

    def read(self, items: Sequence[tuple[str, int, int]]) -> list[npt.NDArray[Any]]:
        """Read rows of several arrays. To go back in an array reads it again from its beginning."""
        return [self._rows(path.strip("/"), first, stop) for path, first, stop in items]

    def _rows(self, path: str, first: int, stop: int) -> npt.NDArray[Any]:
        with reading(self.path, at=path):
            rows, last = self._begun.get(path, (None, None))
            if rows is None or first < rows.place - (last is not None):
                if path in self._files:
                    self._files[path].close()
                self._files[path] = self._archive.open(path + _SUFFIX)
                rows, last = NpyRows(self._files[path], where=f"{self.path}, {path}"), None
            if not rows.shape:
                return rows.read(1).reshape(())
            # Stretches of observations overlap by one row, which is not read again.
            begun = last if first < rows.place else None
            rows.skip(max(min(first, len(rows)) - rows.place, 0))
            values = rows.read(max(stop - max(first, rows.place), 0))
            if rows.place == len(rows):
                rows.end()
            if begun is not None:
                values = np.concatenate([begun, values])
            self._begun[path] = (rows, values[-1:].copy() if len(values) else last)
            return values[: stop - first]
