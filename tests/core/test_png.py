"""PNG files taken apart here and decoded by Pillow: the same pixels and errors as if Pillow reads the file."""

import io
import struct
import warnings
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mouse_core import DataError
from mouse_core.images import decode_into

SHAPES = [(5, 4, 1), (5, 4, 2), (4, 5, 3), (3, 7, 4)]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(
    shape: tuple[int, int, int],
    data: bytes,
    *,
    pieces: int = 1,
    before: bytes = b"",
    after: bytes = b"",
    depth: int = 8,
    colour: int | None = None,
    interlaced: int = 0,
) -> bytes:
    """A PNG of compressed ``data``, in so many pieces, with chunks before and after them."""
    height, width, channels = shape
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels] if colour is None else colour
    size = max(1, -(-len(data) // pieces))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">2I5B", width, height, depth, colour, 0, 0, interlaced)),
            before,
            *(chunk(b"IDAT", data[begin : begin + size]) for begin in range(0, len(data), size)),
            after,
            chunk(b"IEND", b""),
        ]
    )


def rows(shape: tuple[int, int, int], filters: list[int] | None = None) -> bytes:
    """Rows as they are before compression: the number of a filter, then its values."""
    height, width, channels = shape
    values = np.random.default_rng(3).integers(0, 256, (height, width * channels)).astype(np.uint8)
    chosen = filters or [4, 1, 2, 3, 0]
    return b"".join(bytes([chosen[number % len(chosen)]]) + row.tobytes() for number, row in enumerate(values))


def by_pillow(encoded: bytes, shape: tuple[int, int, int]) -> bytes | None:
    """The pixels, or None if there are none of this shape."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            shown = image
            if image.mode == "P":
                shown = image.convert("RGBA" if "transparency" in image.info else "RGB")
            elif image.mode == "1":
                shown = image.convert("L")
            channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}.get(shown.mode)
            pixels = np.asarray(shown)
    except (OSError, SyntaxError, EOFError, ValueError, struct.error):
        return None
    return pixels.tobytes() if (*pixels.shape[:2], channels) == shape else None


def check(encoded: bytes, shape: tuple[int, int, int]) -> bytes | None:
    """Decode it; it must be as Pillow reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = by_pillow(encoded, shape)
        out = np.full(shape, 77, np.uint8)
        try:
            decode_into(memoryview(encoded), out)
        except (ValueError, struct.error):
            assert expected is None
        else:
            assert out.tobytes() == expected
    return expected


PHYS = chunk(b"pHYs", bytes(9))
BEFORE = {
    "nothing": b"",
    "passed": PHYS + chunk(b"gAMA", bytes(4)) + chunk(b"sRGB", b"\0"),
    "text": chunk(b"tEXt", b"Comment\0a cat"),
    "transparency": chunk(b"tRNS", bytes(6)),
}


def test_frames_are_not_dropped() -> None:
    frames = chunk(b"acTL", struct.pack(">2I", 2, 0))
    with pytest.raises(DataError, match="expected a single image, found PNG with several frames"):
        decode_into(png(SHAPES[0], zlib.compress(rows(SHAPES[0])), before=frames), np.empty(SHAPES[0], np.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_files(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    """Where no chunk changes the pixels, Pillow does not read the file."""
    for before, pieces, filters in product(BEFORE, (1, 3), ([0], [1], [2], [3], [4], None)):
        encoded = png(shape, zlib.compress(rows(shape, filters)), pieces=pieces, before=BEFORE[before])
        assert (expected := check(encoded, shape)), (before, pieces, filters)
        if before in ("nothing", "passed"):
            with monkeypatch.context() as patched:
                patched.setattr(Image, "open", None)
                decode_into(encoded, out := np.zeros(shape, np.uint8))
            assert out.tobytes() == expected


def damaged(shape: tuple[int, int, int]) -> dict[str, bytes]:
    """Files that are not what they should be, some of which Pillow reads nevertheless."""
    raw = rows(shape)
    width = shape[1] * shape[2] + 1
    good = zlib.compress(raw)
    return {
        "rows missing": png(shape, zlib.compress(raw[: 2 * width])),
        "half a row": png(shape, zlib.compress(raw[: 2 * width + 3])),
        "too many rows": png(shape, zlib.compress(raw + raw)),
        "no such filter": png(shape, zlib.compress(b"\x09" + raw[1:])),
        "wrong checksum of the data": png(shape, good[:-1] + bytes([good[-1] ^ 1])),
        "no checksum of the data": png(shape, good[:-4]),
        "data cut": png(shape, good[:-8]),
        "data that goes on": png(shape, good + b"more"),
        "no data": png(shape, b""),
        "no zlib": png(shape, good[2:-4]),
        "wrong checksum of a chunk": png(shape, good, before=PHYS[:-1] + b"x"),
        "a chunk too short": png(shape, good, before=chunk(b"pHYs", bytes(8))),
        "a chunk too late": png(shape, good, after=PHYS),
        "a chunk between": png(shape, good[:9])[:-12] + PHYS + chunk(b"IDAT", good[9:]) + chunk(b"IEND", b""),
        "a chunk too long": png(shape, good).replace(struct.pack(">I", len(good)) + b"IDAT", b"\xff\xff\xff\xffIDAT"),
        "no end": png(shape, good)[:-12],
        "more after the end": png(shape, good) + b"x",
        "interlaced": png(shape, good, interlaced=1),
        "16 bits": png(shape, zlib.compress(raw + raw), depth=16),
        "palette": png(shape, good, colour=3, before=chunk(b"PLTE", bytes(range(256)) * 3)),
        "turned": png((shape[1], shape[0], shape[2]), good),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_files_that_are_not_as_they_should_be(shape: tuple[int, int, int]) -> None:
    for encoded in damaged(shape).values():
        check(encoded, shape)


@settings(max_examples=50)
@given(data=st.data())
def test_any_damage(data: Any) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    before = data.draw(st.sampled_from([b"", PHYS]))
    encoded = png(shape, zlib.compress(rows(shape)), pieces=data.draw(st.sampled_from([1, 3])), before=before)
    place = data.draw(st.integers(0, len(encoded) - 1))
    end = data.draw(st.integers(place, min(place + 4, len(encoded))))
    check(encoded[:place] + data.draw(st.binary(max_size=4)) + encoded[end:], shape)
