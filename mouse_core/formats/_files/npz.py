"""Reads files of ``numpy.savez`` (slashes in names form groups), and pickled arrays without running pickled code."""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.files.reading import damaged, reading

_CODES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")


def pickled_arrays(data: bytes, *, where: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a dict that ``numpy.save`` pickled.

    Args:
        data: The pickle: a 0-dimensional array of objects, whose value is the dict.
        where: Prefix of error messages.

    Raises:
        DataError: The pickle is not only a dict of numeric arrays.
    """
    try:
        found = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # any error that a manipulated pickle causes
        raise DataError(f"{where}: expected a dict of arrays, found a pickle that cannot be read: {error}") from error
    items = found.items if isinstance(found, _Array) and found.shape == () else None
    if not isinstance(items, list) or len(items) != 1 or not isinstance(items[0], dict):
        raise DataError(f"{where}: expected a dict of arrays, found {type(found).__name__}")
    arrays = items[0]
    for name, value in arrays.items():
        if not isinstance(name, str) or not isinstance(value, _Array) or value.items is not None:
            raise DataError(f"{where}: {name!r:.80}: expected an array of numbers, found {type(value).__name__}")
    return {name: value.values(f"{where}, {name}") for name, value in arrays.items()}


class _DType:
    """Replaces NumPy's dtype when a pickle is loaded; the pickled state contains the byte order."""

    def __init__(self, name: Any) -> None:
        self.name = name if isinstance(name, str) else ""
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]


class _Array:
    """Replaces NumPy's array when a pickle is loaded; the pickled state contains version, shape, dtype, order, and
    bytes or a list.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype: _DType | None = None
        self.fortran = False
        self.data: bytes = b""
        self.items: list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _DType) or not all(type(size) is int and size >= 0 for size in shape):
            raise DataError(f"expected the shape and dtype of an array, found {shape!r:.80}")
        self.shape, self.dtype, self.fortran = tuple(shape), dtype, bool(fortran)
        if isinstance(data, list):
            self.items = data
        elif isinstance(data, bytes | bytearray):
            self.data = bytes(data)
        else:
            raise DataError(f"expected the bytes of an array, found {type(data).__name__}")

    def values(self, where: str) -> npt.NDArray[Any]:
        name = self.dtype.name if self.dtype is not None else ""
        if name[:1] not in "biuf" or not name[1:].isdigit() or int(name[1:]) not in (1, 2, 4, 8):
            raise DataError(f"{where}: expected an array of numbers, found dtype {name!r:.40}")
        assert self.dtype is not None  # the dtype was created by name
        dtype = np.dtype(f"{self.dtype.order}{name}")
        count = 1
        for size in self.shape:  # whole numbers of any size
            count *= size
        if count * dtype.itemsize != len(self.data):
            raise DataError(f"{where}: expected {list(self.shape)} of {dtype}, found {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype).reshape(self.shape, order="F" if self.fortran else "C")


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """Create an array from a buffer, like the NumPy function that newer pickles name."""
    found = _Array()
    found.__setstate__((1, shape, dtype, order == "F", data))
    return found


class _Unpickler(pickle._Unpickler):  # in Python: the implementation in C allocates as much memory as a pickle says
    """Loads a pickle of arrays; objects of this module replace the four NumPy names that arrays need."""

    def find_class(self, module: str, name: str) -> Any:
        # New functions for each pickle, so that attributes that a pickle sets do not stay.
        if module in _CODES and name == "_reconstruct":
            return lambda *_: _Array()
        if module in _NUMERIC and name == "_frombuffer":
            return lambda *given: _from_buffer(*given)
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"
        if (module, name) == ("numpy", "dtype"):
            return lambda name, *_: _DType(name)
        raise DataError(f"expected arrays, found {module}.{name}, which is not loaded")


def npy_header(file: BinaryIO | Any, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of ``numpy.save``: the shape of the array, whether it is in Fortran order, and its dtype.

    Raises:
        DataError: The format version is not 1.0 or 2.0; the message begins with ``where``.
    """
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise DataError(f"{where}: expected an array of version 1.0 or 2.0, found {version}")
    return readers[version](file)


class NpyRows:
    """Reads, from first to last, the rows of an array that ``numpy.save`` wrote.

    Args:
        file: A binary stream, positioned at the beginning of the array.
        where: Name of the array for error messages.

    Raises:
        DataError: The stream holds no array of numbers.
    """

    def __init__(self, file: BinaryIO | Any, *, where: str) -> None:
        self._file = file
        self._where = where
        shape, fortran, dtype = npy_header(file, where)
        if dtype.kind not in "biuf" or dtype.itemsize > 8 or any(size < 0 for size in shape):
            raise DataError(f"{where}: expected an array of numbers, found {dtype} {list(shape)}")
        if fortran and len(shape) > 1:
            raise DataError(f"{where}: expected an array in C order, found an array in Fortran order")
        self.shape: tuple[int, ...] = tuple(int(size) for size in shape)
        self.dtype: np.dtype[Any] = dtype
        self.row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        self.place = 0

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def read(self, count: int) -> npt.NDArray[Any]:
        """Return the next ``count`` rows, ``[count, ...]``.

        Raises:
            DataError: The stream has fewer bytes than the array's shape requires.
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
        """Read to the end of the stream, so that the CRC at the end of a compressed file is verified.

        Raises:
            DataError: The stream has more bytes than the array's shape requires.
        """
        if self._file.read(1):
            raise DataError(f"{self._where}: expected the end of the array after {len(self)} rows, found more bytes")

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
        content: The bytes of the file, if the file is part of an archive.

    Raises:
        ConfigError: The file does not exist.
        DataError: The file is damaged, or is not an npz file.
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
                # Writers of npz files write each array once, one after another.
                raise damaged(self.path, f"expected arrays of different names, found {wrong[:4] or 'a name twice'}")
        self._names = [name.removesuffix(_SUFFIX) for name in members]

    def finish(self, *, others: bool) -> None:
        """Verify the CRCs of all partly read arrays and, if ``others`` is set, of all other arrays."""
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
        """Return the names of the groups and arrays in a group."""
        above = f"{path.strip('/')}/".lstrip("/")
        below = (name.removeprefix(above).split("/")[0] for name in self._names if name.startswith(above))
        return list(dict.fromkeys(below))

    def find(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """Return the description of the group or array at each path, like ``H5File.find``."""
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
        """Read rows of several arrays.

        If the requested rows of an array lie before the current position, the array is read again from its beginning.
        """
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
            # Ranges of observations overlap by one row; the row is kept instead of being read again.
            begun = last if first < rows.place else None
            rows.skip(max(min(first, len(rows)) - rows.place, 0))
            values = rows.read(max(stop - max(first, rows.place), 0))
            if rows.place == len(rows):
                rows.end()
            if begun is not None:
                values = np.concatenate([begun, values])
            self._begun[path] = (rows, values[-1:].copy() if len(values) else last)
            return values[: stop - first]
