"""Numbers of frames in H.264 (ITU-T H.264, 7.3), by which it is seen that some are missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mouse_core.errors import DataError

# Profiles whose sets say which colours there are.
_WITH_COLOURS = {44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 144, 244}
# No number that is read lies so far behind the begin of a unit.
_MOST_BYTES = 1024


class _Bits:
    """Reads the bits of a unit, without the bytes that only keep start codes out of it."""

    def __init__(self, unit: bytes) -> None:
        content = unit[:_MOST_BYTES].replace(b"\0\0\3", b"\0\0")
        # Of the value as many bits are left.
        self._left, self._value = 8 * len(content), int.from_bytes(content)

    def read(self, count: int) -> int:
        """A number of so many bits."""
        self._left -= count
        if self._left < 0:
            raise DataError("expected the numbers of a unit of H.264, found its end")
        found = self._value >> self._left
        self._value ^= found << self._left
        return found

    def count(self) -> int:
        """A number from 0 on: of 00101, two zeros and 101, that is 4."""
        return self.read(2 * (self._left - self._value.bit_length()) + 1) - 1

    def whole(self) -> int:
        """A number with a sign: counts 0 1 2 3 4 are 0 1 -1 2 -2."""
        found = self.count()
        return (found + 1) // 2 if found % 2 else -(found // 2)


class _Sequence(NamedTuple):
    """What a sequence parameter set says of frame numbers: their bits, and whether colours are coded apart."""

    bits: int
    planes: bool


def sets_of(header: bytes) -> Iterator[bytes]:
    """The parameter sets in the header of an MP4 file."""
    place = 5
    for _ in range(2):  # of sequences, of pictures
        count = header[place] & 31 if place < len(header) else 0
        place += 1
        for _ in range(count):
            begin = place + 2
            place = begin + int.from_bytes(header[place:begin])
            yield header[begin:place]


class FrameNumbers:
    """Follows the numbers of frames through a file."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._pictures: dict[int, int] = {}
        self._before = 0

    def learn(self, unit: bytes) -> None:
        """Take a parameter set."""
        if unit and unit[0] & 31 == 7:
            number, found = _sequence(unit)
            self._sequences[number] = found
        elif unit and unit[0] & 31 == 8:
            bits = _Bits(unit[1:])
            self._pictures[bits.count()] = bits.count()

    def is_gap(self, unit: memoryview) -> bool:
        """Whether frames are missing before the one that a slice is of, the first one of its packet."""
        bits = _Bits(bytes(unit[1:32]))
        bits.count()  # where in the picture it begins
        bits.count()  # its kind
        sequence = self._sequences.get(self._pictures.get(bits.count(), -1))
        if sequence is None:
            raise DataError("expected a slice with parameter sets, found one without")
        if sequence.planes:
            bits.read(2)
        number, before = bits.read(sequence.bits), self._before
        if unit[0] >> 5 & 3:
            self._before = number
        # That of any frame follows the number of the last one that others need: 0 1 2b 2b 2 3, b not needed.
        return unit[0] & 31 != 5 and number != (before + 1) % (1 << sequence.bits)


def _sequence(unit: bytes) -> tuple[int, _Sequence]:
    """The number of a sequence parameter set, and what it says."""
    bits = _Bits(unit[1:])
    profile = bits.read(8)
    bits.read(16)
    number, planes = bits.count(), False
    if profile in _WITH_COLOURS:
        colours = bits.count()
        planes = colours == 3 and bool(bits.read(1))
        bits.count()
        bits.count()
        bits.read(1)
        if bits.read(1):
            for place in range(12 if colours == 3 else 8):
                if bits.read(1):
                    _skip_scales(bits, 16 if place < 6 else 64)
    return number, _Sequence(bits.count() + 4, planes)


def _skip_scales(bits: _Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.whole()) % 256
        last = following or last
