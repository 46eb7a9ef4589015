"""Read pickles of NumPy arrays as data: the result holds arrays and containers only, and no pickled name is called."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError

# Opcodes of NumPy's pickles of arrays. Only GLOBAL, STACK_GLOBAL and REDUCE look up and call names, which stand for
# functions of this module.
_OPCODES = re.compile(
    r"PROTO|FRAME|STOP|MARK|GLOBAL|STACK_GLOBAL|REDUCE|BUILD|MEMOIZE|PUT|BINPUT|LONG_BINPUT|GET|"
    r"BINGET|LONG_BINGET|NONE|NEWTRUE|NEWFALSE|INT|BININT|BININT1|BININT2|LONG|LONG1|FLOAT|"
    r"BINFLOAT|STRING|BINSTRING|SHORT_BINSTRING|BINBYTES|SHORT_BINBYTES|BINBYTES8|BYTEARRAY8|UNICODE|"
    r"SHORT_BINUNICODE|BINUNICODE|BINUNICODE8|EMPTY_TUPLE|TUPLE|TUPLE1|TUPLE2|TUPLE3|EMPTY_LIST|LIST|"
    r"APPEND|APPENDS|EMPTY_DICT|DICT|SETITEM|SETITEMS|POP|POP_MARK|DUP"
)
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT")
_MOST_ITEMS = 1 << 16
_DEEPEST = 8
_CODES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")


def pickled_arrays(data: bytes, *, where: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a dict that ``numpy.save`` pickled.

    Args:
        data: The pickle: an array of objects without dimensions, which holds the dict.
        where: Prefix of messages.

    Raises:
        DataError: The pickle holds anything but arrays of numbers by name.
    """
    found = _loaded(data, where)
    items = found.items if isinstance(found, _Array) and found.shape == () else None
    if not isinstance(items, list) or len(items) != 1 or not isinstance(items[0], dict):
        raise DataError(f"{where}: expected a dict of arrays, found {type(found).__name__}")
    arrays = items[0]
    for name, value in arrays.items():
        if not isinstance(name, str) or not isinstance(value, _Array) or value.items is not None:
            raise DataError(f"{where}: {name!r:.80}: expected an array of numbers, found {type(value).__name__}")
    return {name: value.values(f"{where}, {name}") for name, value in arrays.items()}


def pickled_values(data: bytes, *, where: str) -> Any:
    """Return the value of a pickle: an array of numbers, or nested dicts and tuples of arrays.

    Args:
        data: The pickle.
        where: Prefix of messages.

    Raises:
        DataError: The pickle holds anything else.
    """
    return _values(_loaded(data, where), where, 0)


def _values(found: Any, where: str, depth: int) -> Any:
    if isinstance(found, _Array) and found.items is None:
        return found.values(where)
    if isinstance(found, dict) and depth < _DEEPEST and all(isinstance(name, str) for name in found):
        return {name: _values(value, f"{where}, {name}", depth + 1) for name, value in found.items()}
    if isinstance(found, tuple) and depth < _DEEPEST:
        return tuple(_values(value, f"{where}, {place}", depth + 1) for place, value in enumerate(found))
    raise DataError(f"{where}: expected arrays of numbers, or dicts and tuples of such, found {type(found).__name__}")


def _loaded(data: bytes, where: str) -> Any:
    _check(data, where)
    try:
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # whatever a pickle that was tampered with leads to
        raise DataError(f"{where}: expected a dict of arrays, found a pickle that cannot be read: {error}") from error


def _check(data: bytes, where: str) -> None:
    """Raise DataError for each opcode that arrays do not need, before the pickle is loaded."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if not _OPCODES.fullmatch(opcode.name):
                raise DataError(f"{where}: expected a pickle of arrays, found {opcode.name}, which is not opened")
            if opcode.name in _MEMO and isinstance(argument, int) and argument > _MOST_ITEMS:
                raise DataError(f"{where}: expected a pickle of some arrays, found its item {argument}")
    except (ValueError, UnicodeError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: expected a pickle, found a damaged one: {error}") from error


class _DType:
    """A dtype of a pickle; the state holds the byte order."""

    def __init__(self, name: Any) -> None:
        self.name = str(name)
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]


class _Array:
    """An array of a pickle; the state holds version, shape, dtype, order, and bytes or a list."""

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
        assert self.dtype is not None  # it had a name
        dtype = np.dtype(f"{self.dtype.order}{name}")
        count = 1
        for size in self.shape:  # whole numbers of any size
            count *= size
        if count * dtype.itemsize != len(self.data):
            raise DataError(f"{where}: expected {list(self.shape)} of {dtype}, found {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype).reshape(self.shape, order="F" if self.fortran else "C")


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """Make an array as NumPy does in newer pickles."""
    found = _Array()
    found.__setstate__((1, shape, dtype, order == "F", data))
    return found


class _Unpickler(pickle.Unpickler):
    """Loads a pickle with functions of this module in place of the four names that arrays need."""

    def find_class(self, module: str, name: str) -> Any:
        # New functions each time, so that attributes that a pickle sets do not stay.
        if module in _CODES and name == "_reconstruct":
            return lambda *_: _Array()
        if module in _NUMERIC and name == "_frombuffer":
            return lambda *given: _from_buffer(*given)
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"
        if (module, name) == ("numpy", "dtype"):
            return lambda name, *_: _DType(name)
        raise DataError(f"expected arrays, found {module}.{name}, which is not opened")
