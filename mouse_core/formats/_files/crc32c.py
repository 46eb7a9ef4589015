"""CRC-32C (Castagnoli) of long buffers, in NumPy: many stretches at once, joined afterwards.

A CRC is linear over GF(2) in the bytes, apart from its initial value: the CRC of two stretches one after the other is
that of the first, moved past as many zero bytes as the second is long, xor that of the second. So a buffer is cut into
stretches of equal length that are computed side by side, and joined two by two. google-crc32c does it where installed.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_SHORT = 1500
_BLOCK = 1 << 20
Words = npt.NDArray[np.uint32]


@lru_cache(maxsize=1)
def _byte_tables() -> Words:
    """``[8, 256]``: what a byte contributes that is followed by 0 to 7 others."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ _POLYNOMIAL, values >> 1).astype(np.uint32)
    tables: list[Words] = [values]
    for _ in range(7):
        tables.append(values[tables[-1] & 0xFF] ^ tables[-1] >> 8)
    return np.stack(tables)


@lru_cache(maxsize=1)
def _first_table() -> tuple[int, ...]:
    return tuple(_byte_tables()[0].tolist())


@lru_cache(maxsize=1)
def _pair_tables() -> Words:
    """``[4, 65536]``: what two bytes contribute that are followed by 0, 2, 4 or 6 others."""
    tables = _byte_tables()
    pairs = np.arange(65536)
    low, high = pairs & 0xFF, pairs >> 8
    return np.stack([tables[2 * after + 1][low] ^ tables[2 * after][high] for after in range(4)])


@lru_cache(maxsize=64)
def _shift_tables(power: int) -> Words:
    """``[4, 256]``: where 2**power zero bytes move the bytes of a CRC."""
    if power == 0:
        columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
        columns = _byte_tables()[0][columns & 0xFF] ^ columns >> 8
    else:
        half = _shift_tables(power - 1)
        single = np.uint32(1) << np.arange(32, dtype=np.uint32)
        columns = _shifted(half, _shifted(half, single))
    # Of every byte in each of the four places, what its bits move to, all together.
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return np.asarray(np.bitwise_xor.reduce(np.where(bits, columns.reshape(4, 1, 8), 0), axis=2), np.uint32)


def _shifted(tables: Words, crc: Words) -> Words:
    moved: Words = tables[0][crc & 0xFF]
    for part in (1, 2, 3):
        moved = moved ^ tables[part][crc >> np.uint32(8 * part) & 0xFF]
    return moved


def _side_by_side(data: npt.NDArray[np.uint8], power: int) -> int:
    """The CRC of ``data``, whole stretches of 2**power bytes, from 0 and without the final inversion."""
    size = 1 << power
    lanes = len(data) // size
    words = np.ascontiguousarray(data.view("<u2").reshape(lanes, size // 8, 4).transpose(1, 2, 0))
    tables = _pair_tables()
    crc, part = np.zeros(lanes, np.uint32), np.empty(lanes, np.uint32)
    index = np.empty(lanes, np.intp)
    for first, second, third, fourth in words:
        np.bitwise_xor(crc & 0xFFFF, first, out=index, casting="unsafe")
        following = np.take(tables[3], index, mode="clip")
        np.bitwise_xor(crc >> 16, second, out=index, casting="unsafe")
        following ^= np.take(tables[2], index, mode="clip", out=part)
        index[...] = third
        following ^= np.take(tables[1], index, mode="clip", out=part)
        index[...] = fourth
        following ^= np.take(tables[0], index, mode="clip", out=part)
        crc = following
    # Zero bytes in front change nothing, so the lanes are filled up to a power of two there.
    count = 1 << (lanes - 1).bit_length()
    crc = np.concatenate([np.zeros(count - lanes, np.uint32), crc])
    while len(crc) > 1:
        crc = _shifted(_shift_tables(power), crc[0::2]) ^ crc[1::2]
        power += 1
    return int(crc[0])


def _update(crc: int, data: npt.NDArray[np.uint8]) -> int:
    while len(data) >= _SHORT:
        # Short stretches are fewer NumPy calls, long ones fewer joins; blocks stay in the processor's cache.
        size = min(len(data), _BLOCK)
        power = 6 if size < 1 << 16 else 8
        size = size >> power << power
        head = data[:size].copy()
        head[:4] ^= np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
        crc = _side_by_side(head, power)
        data = data[size:]
    table = _first_table()
    for byte in data.tobytes():
        crc = table[crc & 0xFF ^ byte] ^ crc >> 8
    return crc


@lru_cache(maxsize=1)
def _compiled() -> Any:
    try:
        return importlib.import_module("google_crc32c").value
    except (ImportError, AttributeError):
        return None


def crc32c(data: Any) -> int:
    """The CRC-32C of some bytes.

    Args:
        data: Anything with a buffer.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    compiled = _compiled()
    if compiled is not None:
        return int(compiled(bytes(data)))
    return _update(0xFFFFFFFF, np.frombuffer(data, np.uint8)) ^ 0xFFFFFFFF


def masked_crc32c(data: Any) -> int:
    """The CRC-32C as record files hold it: rotated and moved, so that a CRC of data with CRCs in them is no trap."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
