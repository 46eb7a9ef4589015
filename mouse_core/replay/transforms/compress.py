"""Compress: fields that are stored as compressed bytes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.nested import find, key_of, object_array, path_of
from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.transforms._fields import check_keys, on_host, replaced
from mouse_core.spec import check_dtype

Pack = Callable[[bytes], bytes]


@dataclass(frozen=True, init=False)
class Compress:
    """Stores fields row by row as compressed bytes, in any storage, and delivers them as they were.

    On the way in a row's bytes are packed; a batch's are unpacked where transforms run, in the threads of a
    ``PrefetchBatchifier`` too, which zlib does not keep from each other. Rows that are bytes already stay as they are,
    such as those that ``buffer[index]`` gave.

    Args:
        keys: Fields of numbers, all of one shape and dtype.
        shape: That of a row, ``(84, 84, 3)``.
        dtype: Theirs.
        level: Of zlib, 0 to 9; 1 is the fastest that packs.
        pack, unpack: What else packs bytes and unpacks them, in place of zlib: ``lz4.frame.compress``.

    Raises:
        ConfigError: No fields, a shape or dtype that is none, a level out of range, or one of the two functions alone.
        MissingFieldError: Called with a batch that lacks a field.
        SchemaError: On the way in, rows of another shape or dtype.
        DataError: Bytes that are not those of such a row.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import ArrayStorage, Compress, ReplayBuffer
        >>> buffer = ReplayBuffer(ArrayStorage(100), transform=Compress("pixels", shape=(64, 64)), batch_size=4)
        >>> index = buffer.extend({"pixels": np.zeros((10, 64, 64), np.uint8)})
        >>> stored, batch = buffer[0], buffer.sample()
        >>> len(stored["pixels"]), batch["pixels"].shape
        (33, (4, 64, 64))
    """

    keys: tuple[FieldKey, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pack: Pack
    unpack: Pack

    def __init__(
        self,
        *keys: FieldKey,
        shape: Sequence[int],
        dtype: npt.DTypeLike = "uint8",
        level: int = 1,
        pack: Pack | None = None,
        unpack: Pack | None = None,
    ) -> None:
        if not keys:
            raise ConfigError("Compress: expected at least one field, found none")
        if not isinstance(shape, tuple | list) or not all(is_whole(size) and size > 0 for size in shape):
            raise ConfigError(f"Compress: shape: expected positive integers, found {shape!r:.80}")
        if not is_whole(level) or not 0 <= level <= 9:
            raise ConfigError(f"Compress: level: expected 0 to 9, found {level!r}")
        if (pack is None) != (unpack is None) or not all(callable(one) for one in (pack, unpack) if one is not None):
            raise ConfigError(f"Compress: expected functions to pack and to unpack, found {pack!r} and {unpack!r}")
        vars(self).update(keys=check_keys(keys, where="Compress"), shape=tuple(map(int, shape)))
        vars(self).update(dtype=check_dtype(dtype, where="Compress: dtype"))
        vars(self).update(pack=pack or partial(zlib.compress, level=int(level)), unpack=unpack or zlib.decompress)

    def __call__(self, batch: Any) -> Any:
        """The batch with arrays in place of bytes."""
        return replaced(batch, {key: self._unpacked(find(batch, key, where="Compress"), key) for key in self.keys})

    def inverse(self, rows: Any) -> Any:
        """Rows with bytes in place of arrays."""
        return replaced(rows, {key: self._packed(find(rows, key, where="Compress"), key) for key in self.keys})

    def _packed(self, values: Any, key: FieldKey) -> Any:
        if isinstance(values, bytes) or _holds_bytes(values):
            return values
        array = on_host(values)
        lead = array.ndim - len(self.shape)
        if lead < 0 or tuple(array.shape[lead:]) != self.shape or array.dtype != self.dtype:
            raise SchemaError(
                f"Compress: {_shown(key)}: expected rows of {self.dtype} {list(self.shape)}, found {array.dtype} "
                f"{list(array.shape)}"
            )
        rows = np.ascontiguousarray(array).reshape(-1, *self.shape)
        packed = [self.pack(row.tobytes()) for row in rows]
        return packed[0] if not lead else object_array(packed, tuple(array.shape[:lead]))

    def _unpacked(self, values: Any, key: FieldKey) -> npt.NDArray[Any]:
        if not _holds_bytes(values):
            raise SchemaError(f"Compress: {_shown(key)}: expected rows of bytes, found {values!r:.60}")
        given = np.asarray(values, object) if not isinstance(values, list) else object_array(values, (len(values),))
        made = np.empty((given.size, *self.shape), self.dtype)
        size = math.prod(self.shape) * self.dtype.itemsize
        for place, packed in enumerate(given.reshape(-1)):
            try:
                row = self.unpack(bytes(packed))
            except Exception as error:
                raise DataError(f"Compress: {_shown(key)}: row {place}: expected packed bytes: {error}") from error
            if len(row) != size:
                raise DataError(f"Compress: {_shown(key)}: row {place}: expected {size} bytes, found {len(row)}")
            made[place] = np.frombuffer(row, self.dtype).reshape(self.shape)
        return made.reshape(*given.shape, *self.shape)


def _holds_bytes(values: Any) -> bool:
    """Whether these are rows of bytes: a list of them, or an array of objects."""
    if isinstance(values, list):
        return bool(values) and isinstance(values[0], bytes)
    dtype = getattr(values, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.hasobject and values.size > 0 and isinstance(values.flat[0], bytes)


def _shown(key: FieldKey) -> str:
    return repr(key_of(path_of(key)))
