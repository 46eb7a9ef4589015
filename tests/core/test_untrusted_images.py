"""Images that somebody else wrote: what they name, claim and hide; and values of every mode, as they are or refused."""

import io
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from mouse_core import (
    BatchSource,
    ConfigError,
    DataError,
    DatasetStore,
    Field,
    PrefetchBatchifier,
    WorkerError,
    formats,
)
from mouse_core.images import decode_image, decode_into, encode_png, image_shape

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20


def saved(image: Any, format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, format, **options)
    return stream.getvalue()


def dataset(images: list[Any]) -> datasets.Dataset:
    n = len(images)
    numbers = {"action": "int64", "reward": "float32", "done": "int64"}
    features = {name: datasets.Value(dtype) for name, dtype in numbers.items()}
    features["observation_image"] = datasets.Image(decode=False)
    values = [image if isinstance(image, dict) else {"bytes": image, "path": None} for image in images]
    rows = {"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "observation_image": values}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def pixels(store: DatasetStore) -> list[Any]:
    return BatchSource(store, len(store), 1, sampling="last")[0]["obs_image"][0].tolist()


ALLOWED = {"PNG": {}, "JPEG": {}, "WEBP": {"lossless": True}, "GIF": {}, "BMP": {}, "TIFF": {}}


@pytest.mark.parametrize("format", ALLOWED)
def test_formats_of_pictures_are_read(format: str) -> None:
    encoded = saved(np.repeat(GREY[:, :, None], 3, axis=2) if format == "WEBP" else GREY, format, **ALLOWED[format])
    assert np.abs(decode_image(encoded)[:, :, :1].astype(int) - GREY[:, :, None]).max() <= (
        9 if format == "JPEG" else 0
    )


@pytest.mark.parametrize("format", ["EPS", "PDF", "PPM", "ICO", "TGA", "PCX", "SGI", "IM"])
def test_other_formats_are_not_tried(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPS above all, for which Pillow runs an interpreter of programs."""
    run = tmp_path / "gs"
    run.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    run.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    encoded = saved(Image.fromarray(np.repeat(GREY[:, :, None], 3, axis=2)), format)
    for attempt in (
        lambda: decode_image(encoded),
        lambda: image_shape({"bytes": encoded, "path": None}),
        lambda: decode_into(encoded, np.empty((3, 4, 3), np.uint8)),
        lambda: pixels(DatasetStore().from_dataset(dataset([encoded] * 3))),
        lambda: pixels(DatasetStore().from_dataset(dataset([saved(GREY), encoded]))),
        lambda: DatasetStore().append({"action": 0, "reward": 0.0, "done": 0, "observation_image": encoded}),
    ):
        with pytest.raises(DataError, match="expected a readable image"):
            attempt()
    assert not (tmp_path / "ran").exists()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(height: int, width: int, lines: bytes, *, depth: int = 8, colour: int = 0, before: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">2I5B", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def claiming(height: int, width: int) -> bytes:
    """A PNG whose header claims a size, and which has next to nothing."""
    return png(height, width, bytes(99))


@pytest.mark.parametrize("place", [0, 2])
def test_sizes_are_compared_before_pixels_are_decoded(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the first image, which says how large the others are."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as many a training script does
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    images = [saved(GREY)] * 4
    images[place] = claiming(13_000, 13_000)
    message = "at most 67,108,864 pixels, found 13000 x 13000" if not place else r"shape \[3, 4, 1\], found \[13000, 13"
    with pytest.raises(DataError, match=rf"obs_image: expected .*{message}.* at row {place} "):
        pixels(DatasetStore().from_dataset(dataset(images)))
    fields = [
        Field("obs_image", column="observation_image", dtype="int64", bounds=(0, 255), image=True, shape=(3, 4, 1))
    ]
    with pytest.raises(DataError, match=rf"obs_image: expected shape \[3, 4, 1\], found \[13000, 13.* at row {place} "):
        pixels(DatasetStore(fields=fields).from_dataset(dataset(images)))


def test_a_bound_that_is_asked_for() -> None:
    assert decode_image(saved(GREY), max_pixels=12).shape == (3, 4, 1)
    with pytest.raises(DataError, match="at most 11 pixels, found 3 x 4"):
        decode_image(saved(GREY), max_pixels=11)
    assert decode_image(saved(GREY), max_pixels=11, shape=(3, 4, 1)).shape == (3, 4, 1)


def test_the_limit_of_pillow_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(DataError, match=r"expected a readable image.*decompression bomb"):
        decode_image(saved(GREY))


@pytest.mark.parametrize("kind", ["zTXt", "iTXt", "iCCP"])
def test_what_stands_beside_the_pixels_does_not_unfold(kind: str) -> None:
    """A hundred kilobytes that become a hundred megabytes."""
    begin = {"zTXt": b"k\0\0", "iTXt": b"k\0\1\0\0\0", "iCCP": b"p\0\0"}[kind]
    before = chunk(kind.encode(), begin + zlib.compress(bytes(70_000_000)))
    with pytest.raises(DataError, match="expected a readable image"):
        decode_image(png(3, 4, bytes(15), before=before))


def test_tiles_of_a_small_tiff_are_small() -> None:
    tags = {322: 65_536, 323: 65_536, 324: 8, 325: 100}
    encoded = saved(GREY, "TIFF")
    # The directory of a TIFF names its tiles: give a plain one such entries.
    begin = struct.unpack("<I", encoded[4:8])[0]
    count = struct.unpack("<H", encoded[begin : begin + 2])[0]
    entries = [encoded[begin + 2 + 12 * number : begin + 14 + 12 * number] for number in range(count)]
    kept = [entry for entry in entries if struct.unpack("<H", entry[:2])[0] not in (273, 278, 279)]
    kept += [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    kept.sort(key=lambda entry: struct.unpack("<H", entry[:2])[0])
    tiled = encoded[:begin] + struct.pack("<H", len(kept)) + b"".join(kept) + bytes(4) + encoded[begin + 2 :]
    with pytest.raises(DataError, match="expected tiles with sides of at most"):
        decode_image(tiled)


@pytest.mark.parametrize("format", ALLOWED)
def test_what_is_cut_off_is_no_image(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    encoded = saved(noise, format, **ALLOWED[format])
    whole = decode_image(encoded)
    for size in (3, 10, 30, 60, 200, len(encoded) // 2, len(encoded) * 9 // 10):
        try:
            found = decode_image(encoded[:size])
        except DataError:
            continue
        assert np.array_equal(found, whole), size


@given(format=st.sampled_from(sorted(ALLOWED)), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255))))
def test_damage_is_an_error_of_ours_or_none(format: str, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(saved(np.repeat(GREY[:, :, None], 3, axis=2), format, **ALLOWED[format]))
    for place, change in flips:
        damaged[place % len(damaged)] ^= change
    try:
        found = decode_image(bytes(damaged))
    except DataError:
        return
    assert found.dtype == np.uint8
    assert found.ndim == 3


@pytest.mark.parametrize("format", ["GIF", "TIFF", "WEBP", "PNG"])
def test_frames_are_not_dropped(format: str) -> None:
    frames = [Image.fromarray(np.full((3, 4, 3), shade, np.uint8)) for shade in (10, 200)]
    encoded = saved(frames[0], format, save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match=f"expected a single image, found {format} with several frames"):
        decode_image(encoded)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A dataset's folder with a picture, one elsewhere, and ways out of the folder."""
    folder, elsewhere = tmp_path / "data", tmp_path / "private"
    for place in (folder, elsewhere):
        place.mkdir()
        (place / "a.png").write_bytes(saved(GREY))
    (folder / "out.png").symlink_to(elsewhere / "a.png")
    (folder / "down").symlink_to(elsewhere)
    (folder / "in.png").symlink_to(folder / "a.png")
    os.mkfifo(folder / "pipe.png")
    return {"folder": folder, "elsewhere": elsewhere}


REACHED = {"absolute": "{folder}/a.png", "relative": "a.png", "a link inside": "{folder}/in.png"}
BARRED = {
    "elsewhere": ("{elsewhere}/a.png", "inside the dataset's folder or a folder that .*image_roots= names .*private"),
    "up": ("{folder}/../private/a.png", "image_roots= names"),
    "up, relative": ("../private/a.png", "image_roots= names"),
    "a link out": ("{folder}/out.png", "image_roots= names"),
    "a linked folder": ("down/a.png", "image_roots= names"),
    "a pipe": ("{folder}/pipe.png", "image_roots= names, found path .*pipe.png', which is not a regular file"),
    "a device": ("/dev/zero", "image_roots= names"),
    "a folder": ("{folder}/.", "not a regular file"),
    "an address": ("http://localhost/a.png", "expected a readable image.*no such file"),
    "nothing": ("{folder}/none.png", "expected a readable image.*no such file"),
    "no name": ("a\0.png", "expected"),
}


def stored(images: list[Any], folder: Path) -> datasets.Dataset:
    """A dataset whose file lies in a folder, as somebody made it who writes Arrow."""
    table = dataset(images).data.table
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return datasets.Dataset.from_file(str(folder / "data.arrow"))


@pytest.mark.parametrize("way", REACHED)
def test_images_inside_the_folder_of_a_dataset(way: str, places: dict[str, Path]) -> None:
    path = REACHED[way].format(**places)
    made = stored([{"bytes": None, "path": path}] * 3, places["folder"])
    snapshot = DatasetStore().from_dataset(made).snapshot()
    for one in (snapshot, pickle.loads(pickle.dumps(snapshot))):
        windows = one.locate(np.arange(3), 1).part(0)
        assert one.readers["obs_image"].read(windows, np.dtype(np.uint8))[:, 0].tolist() == [GREY.ravel().tolist()] * 3


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("way", BARRED)
def test_images_that_lie_elsewhere_are_not_opened(way: str, place: int, places: dict[str, Path]) -> None:
    path, message = BARRED[way]
    images: list[Any] = [saved(GREY)] * 3
    images[place] = {"bytes": None, "path": path.format(**places)}
    store = DatasetStore().from_dataset(stored(images, places["folder"]))
    with pytest.raises(DataError, match=rf"obs_image: .*{message}.* at row {place} \(column 'observation_image'\)"):
        pixels(store)


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_images_beside_a_file_that_was_opened(suffix: str, places: dict[str, Path]) -> None:
    images = [{"bytes": None, "path": path} for path in ("a.png", str(places["folder"] / "a.png"))]
    made = stored(images, places["folder"])
    file = places["folder"] / "data.arrow"
    if suffix == "parquet":
        file = file.with_suffix(".parquet")
        pq.write_table(made.data.table, file)
    for path in (file, str(file)):
        assert pixels(DatasetStore.open(path)) == [GREY.ravel().tolist()] * 2
    images[1] = {"bytes": None, "path": str(places["elsewhere"] / "a.png")}
    pq.write_table(dataset(images).data.table, places["folder"] / "other.parquet")
    stream = formats.open(places["folder"] / "other.parquet")
    with pytest.raises(DataError, match="image_roots="):
        pixels(stream.to_store())
    assert pixels(stream.to_store(image_roots=[places["elsewhere"]])) == [GREY.ravel().tolist()] * 2


def test_folders_that_the_caller_names(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    images = [{"bytes": None, "path": str(places[name] / "a.png")} for name in ("elsewhere", "elsewhere")]
    in_memory = dataset(images)
    with pytest.raises(DataError, match=r"image_roots= names \(now \[\]\), found path "):
        pixels(DatasetStore().from_dataset(in_memory))
    wanted = [GREY.ravel().tolist()] * 2
    named = DatasetStore(image_roots=[places["elsewhere"]])
    assert pixels(named.from_dataset(in_memory)) == wanted
    monkeypatch.chdir(places["elsewhere"].parent)
    assert pixels(DatasetStore(image_roots=["private"]).from_dataset(in_memory.data.table)) == wanted
    rows = {"action": [0], "reward": [0.0], "done": [0], "observation_image": [images[0]]}
    named.extend(rows)
    named.append({name: values[0] for name, values in rows.items()})
    assert pixels(named) == wanted * 2
    assert named.encode_hf_rows(rows)["obs_image"].tolist() == wanted[:1]
    store = DatasetStore()
    for attempt in (
        lambda: store.extend(rows),
        lambda: store.append({name: values[0] for name, values in rows.items()}),
    ):
        with pytest.raises(DataError, match="image_roots="):
            attempt()
    assert not len(store)
    for roots in ("private", ["nowhere"], [5]):
        with pytest.raises(ConfigError, match="image_roots: expected "):
            DatasetStore(image_roots=roots)  # type: ignore[arg-type]


def test_the_image_folder_of_datasets(tmp_path: Path) -> None:
    """Whose rows name absolute paths, far from the folder that its tables are kept in."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    lines = ["file_name,action,reward,done"]
    for number in range(3):
        (folder / f"{number}.png").write_bytes(saved(GREY + np.uint8(number)))
        lines.append(f"{number}.png,0,0.0,0")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    made = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    made = made.rename_column("image", "observation_image")
    with pytest.raises(DataError, match="image_roots="):
        pixels(DatasetStore().from_dataset(made))
    found = pixels(DatasetStore(image_roots=[folder]).from_dataset(made))
    assert sorted(found) == [(GREY + np.uint8(number)).ravel().tolist() for number in range(3)]


def exact(values: Any, dtype: Any) -> bytes:
    return saved(Image.fromarray(np.asarray(values, dtype)))


def palette(colours: list[int], **options: Any) -> bytes:
    image = Image.frombytes("P", (2, 1), bytes([0, 1]))
    image.putpalette(colours)
    return saved(image, **options)


def wide_png(values: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, ``[H, W, C]``."""
    height, width, channels = values.shape
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    # Each value less that of the pixel before it, as filter 1 has them.
    octets = values.astype(">u2").view(np.uint8).reshape(height, width, 2 * channels)
    less = octets - np.concatenate([np.zeros_like(octets[:, :1]), octets[:, :-1]], axis=1)
    lines = b"".join(b"\1" + line.tobytes() for line in less)
    return png(height, width, lines, depth=16, colour=colour)


LOSSLESS: dict[str, tuple[bytes, list[Any]]] = {
    "integers as datasets writes them": (
        wide_png(np.array([[[0], [200]], [[255], [3]]])),
        [[[0], [200]], [[255], [3]]],
    ),
    "16 bits": (exact([[0, 200], [255, 3]], np.uint16), [[[0], [200]], [[255], [3]]]),
    "16 bits of TIFF": (saved(np.array([[7, 200]], np.uint16), "TIFF"), [[[7], [200]]]),
    "32 bits of TIFF": (saved(np.array([[7, 200]], np.int32), "TIFF"), [[[7], [200]]]),
    "floats of TIFF": (saved(np.array([[7, 200]], np.float32), "TIFF"), [[[7], [200]]]),
    "flags": (exact([[True, False]], bool), [[[255], [0]]]),
    "a palette": (palette([1, 2, 3, 4, 5, 6]), [[[1, 2, 3], [4, 5, 6]]]),
}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_what_fits_is_read(kind: str) -> None:
    encoded, wanted = LOSSLESS[kind]
    assert decode_image(encoded).tolist() == wanted
    assert image_shape({"bytes": encoded, "path": None}) == np.shape(wanted)
    store = DatasetStore().from_dataset(dataset([encoded] * 2))
    assert pixels(store) == [np.ravel(wanted).tolist()] * 2
    store.append({"action": 0, "reward": 0.0, "done": 0, "observation_image": encoded})
    assert pixels(store) == [np.ravel(wanted).tolist()] * 3
    # Where the first images are plain ones, too.
    values = np.array(wanted, np.uint8)
    first = saved(values[:, :, 0] if values.shape[2] == 1 else values)
    assert pixels(DatasetStore().from_dataset(dataset([first, encoded]))) == [np.ravel(wanted).tolist()] * 2


LOSSY = {
    "integers": (wide_png(np.array([[[0], [256]]])), r"expected pixels 0\.\.255, found 0\.\.256"),
    "16 bits": (exact([[4, 65_535]], np.uint16), r"expected pixels 0\.\.255, found 4\.\.65535"),
    "negative": (saved(np.array([[-1, 3]], np.int32), "TIFF"), r"expected pixels 0\.\.255, found -1\.\.3"),
    "fractions": (saved(np.array([[0.5, 3]], np.float32), "TIFF"), r"expected pixels 0\.\.255: .*found 0\.5"),
    "16 bits a colour": (wide_png(np.array([[[1, 2, 3], [255, 0, 9]]])), "found PNG with 16 bits per channel"),
    "CMYK": (saved(Image.new("CMYK", (2, 1)), "JPEG"), "found mode 'CMYK'"),
}


@pytest.mark.parametrize("kind", LOSSY)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    encoded, message = LOSSY[kind]
    with pytest.raises(DataError, match=message):
        decode_image(encoded)
    channels = 3 if "colour" in kind else 1
    first = saved(np.zeros((1, 2, 3) if channels == 3 else (1, 2), np.uint8))
    expected = "found .1, 2, 4.|" + message
    with pytest.raises(DataError, match=rf"obs_image: .*({expected}).* at row 1 "):
        pixels(DatasetStore().from_dataset(dataset([first, encoded])))
    store = DatasetStore()
    with pytest.raises(DataError, match=message):
        store.append({"action": 0, "reward": 0.0, "done": 0, "observation_image": encoded})


@pytest.mark.parametrize(
    ("colours", "options", "channels", "wanted"),
    [
        ([9, 9, 9, 70, 70, 70], {}, 1, [9, 70]),
        ([9, 9, 9, 70, 70, 70], {}, 4, [9, 9, 9, 255, 70, 70, 70, 255]),
        ([9, 9, 9, 70, 70, 70], {}, 2, [9, 255, 70, 255]),
        ([1, 2, 3, 4, 5, 6], {"transparency": b"\xff\xff"}, 3, [1, 2, 3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 6], {}, 1, None),
        ([1, 2, 3, 4, 5, 6], {"transparency": 0}, 3, None),
    ],
)
def test_palettes_in_the_channels_of_others(colours: Any, options: Any, channels: int, wanted: Any) -> None:
    first = np.zeros((1, 2) if channels == 1 else (1, 2, channels), np.uint8)
    store = DatasetStore().from_dataset(dataset([saved(first), palette(colours, **options)]))
    if wanted is None:
        with pytest.raises(DataError, match=r"expected shape \[1, 2, .\], found .* at row 1 "):
            pixels(store)
    else:
        assert pixels(store)[1] == wanted


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_as_they_say(format: str, turn: int) -> None:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 16, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = turn
    encoded = saved(picture, format, exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))))
    assert wanted.shape == ((16, 8, 3) if turn >= 5 else (8, 16, 3))
    assert np.array_equal(decode_image(encoded), wanted)
    assert image_shape({"bytes": encoded, "path": None}) == wanted.shape


DEPTH = Field("depth", column="observation_depth", bounds=(0, 4095), image=True)


def depth_rows(values: list[Any]) -> pa.Table:
    n = len(values)
    images = pa.array(
        [{"bytes": value, "path": None} for value in values], pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    return pa.table({"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "observation_depth": images})


@given(st.lists(st.lists(st.integers(0, 4095), min_size=6, max_size=6), min_size=3, max_size=12), st.booleans())
def test_depth_of_16_bits(frames: list[list[int]], tiff: bool) -> None:
    encoded = [saved(np.array(frame, np.uint16).reshape(2, 3), "TIFF" if tiff else "PNG") for frame in frames]
    store = DatasetStore(fields=[DEPTH]).from_dataset(depth_rows(encoded))
    source = BatchSource(store, len(frames), 1, sampling="last")
    assert source.spec["depth"].dtype == source.spec["depth"].stored_dtype == np.uint16
    assert source.spec["depth"].image_shape == (2, 3, 1)
    assert source[0]["depth"].dtype == np.uint16
    assert source[0]["depth"][0].tolist() == frames
    wide = BatchSource(store, len(frames), 1, sampling="last", dtypes={"depth": "float32"})
    assert wide[0]["depth"][0].tolist() == frames


def test_depth_beyond_its_bounds_or_of_8_bits() -> None:
    encoded = [saved(np.full((2, 3), value, np.uint16)) for value in (7, 4096)] + [saved(np.full((2, 3), 9, np.uint8))]
    store = DatasetStore(fields=[DEPTH]).from_dataset(depth_rows(encoded))
    with pytest.raises(
        DataError, match=r"depth: expected 0\.\.4095, found 4096 at row 1 \(column 'observation_depth'\)"
    ):
        BatchSource(store, 3, 1, sampling="last")[0]
    store = DatasetStore(fields=[DEPTH]).from_dataset(depth_rows(encoded[::2]))
    assert BatchSource(store, 2, 1, sampling="last")[0]["depth"][0].tolist() == [[7] * 6, [9] * 6]


def test_appended_depth() -> None:
    field = Field("depth", dtype="uint16", image=True)
    frame = np.array([[0, 65_535], [256, 1]], np.uint16)
    row = {"action": 0, "reward": 0.0, "done": 0}
    for image in (frame, Image.fromarray(frame), {"bytes": saved(frame), "path": None}, frame.astype(np.int64)):
        store = DatasetStore(fields=[field])
        store.append({**row, "depth": image})
        store.extend({name: [value] * 2 for name, value in {**row, "depth": image}.items()})
        assert BatchSource(store, 3, 1, sampling="last")[0]["depth"][0].tolist() == [frame.ravel().tolist()] * 3
        with pytest.raises(DataError, match="depth"):
            store.append({**row, "depth": np.full((2, 2), 65_536)})
        assert len(store) == 3
    assert decode_image(encode_png(frame, dtype="uint16"), dtype="uint16")[:, :, 0].tolist() == frame.tolist()


def test_a_loader_names_what_its_processes_refuse() -> None:
    images = [saved(GREY)] * 40
    images[33] = claiming(13_000, 13_000)
    store = DatasetStore().from_dataset(dataset(images))
    with PrefetchBatchifier(store, batch_size=1, sequence_length=40, sampling="last", num_workers=1) as loader:
        with pytest.raises((WorkerError, DataError)) as caught:
            next(iter(loader))
        error: BaseException | None = caught.value
        messages = []
        while error is not None:
            messages.append(str(error))
            error = error.__cause__
        assert "expected shape [3, 4, 1], found [13000, 13000, 1] at row 33" in " ".join(messages)
