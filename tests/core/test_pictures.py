"""Pictures of rows as pixels, image files or frames of videos, and changed from each to each."""

import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, Field, SchemaError, StorageError, formats
from mouse_core.cli import main
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns import to_arrow
from mouse_core.formats.converting import convert
from mouse_core.formats.lerobot import write_lerobot
from mouse_core.images import decode_image
from mouse_core.metadata import DatasetMetadata
from mouse_core.video import VideoCodec, VideoWriter, index_video
from tests.core.video_cases import SIDE, decoded, frames_of, pictures

av = pytest.importorskip("av")

TOP, DEPTH = "observation_images_top", "observation_images_depth"
COUNT = 24
LOSSLESS = "hevc:pix_fmt=gbrp:lossless"


def colours() -> npt.NDArray[np.uint8]:
    return np.concatenate([pictures(COUNT // 2, seed) for seed in range(2)])


def depth() -> npt.NDArray[np.uint16]:
    return (np.arange(COUNT * SIDE[0] * SIDE[1]).reshape(COUNT, *SIDE, 1) * 7 % 4096).astype(np.uint16)


def with_nulls(pixels: npt.NDArray[Any], nulls: npt.NDArray[np.bool_]) -> pa.Array:
    flat = to_arrow(pixels, where="pixels")
    return pa.FixedSizeListArray.from_arrays(flat.values, flat.type.list_size, mask=pa.array(nulls))


def rows_of(pixels: Mapping[str, Any], metadata: DatasetMetadata | None = None, *, size: int = 7) -> RowStream:
    """Episodes of half of the rows, with columns of pictures."""
    columns = {name: one if isinstance(one, pa.Array) else to_arrow(one, where=name) for name, one in pixels.items()}
    count = len(next(iter(columns.values())))
    half = max(1, count // 2)
    step = np.arange(count) % half
    plain = {"action": step % 3, "reward": (step > 0).astype(np.float32), "done": (step == half - 1).astype(np.int64)}
    rows = pa.table({**plain, "episode_step": step, **columns})
    batches, metadata = rows.to_batches(max_chunksize=size), metadata or DatasetMetadata("arrived")
    return RowStream("made", "ted", rows.schema, lambda: iter(batches), rows=count, metadata=metadata)


def kept(source: Any, folder: Path, images: Any, **options: Any) -> RowStream:
    convert(source, folder, images=images, **options)
    return formats.open(folder)


def values(stream: RowStream, column: str) -> list[Any]:
    return [one for batch in stream for one in batch.column(column).to_pylist()]


def video_of(folder: Path, pixels: Mapping[str, Any], codec: str = LOSSLESS, **others: Any) -> RowStream:
    """The rows of `rows_of`, whose pictures are frames of a video for each column."""
    columns, listed, fields = {}, [], []
    for number, (name, one) in enumerate(pixels.items()):
        file = folder / f"{number}.mp4"
        write(file, one, codec)
        listed.append((file.name, index_video(file).digest))
        columns[name] = frames_of(np.full(len(one), number), np.arange(len(one)))
        shape, dtype = (one.shape[1:] if one.shape[3] == 1 else None), ("uint16" if one.dtype == np.uint16 else None)
        fields.append(Field(name, image=True, shape=shape, dtype=dtype))
    metadata = DatasetMetadata("arrived", fields=fields, videos=listed)
    return rows_of({**columns, **others}, metadata).replace(image_roots=(str(folder.resolve()),))


def write(file: Path | str, frames: npt.NDArray[Any], codec: str = "h264") -> None:
    writer = VideoWriter(file, VideoCodec.parse(codec), frames.shape[1:], dtype=frames.dtype)
    try:
        writer.write(frames)
        writer.close()
    finally:
        writer.discard()


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> RowStream:
    return video_of(tmp_path_factory.mktemp("video"), {TOP: colours()})


@given(st.data())
@settings(max_examples=6)
def test_pixels_and_png_are_the_same_pictures(data: Any) -> None:
    wide = data.draw(st.booleans())
    sides = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    shape = (*sides, 1 if wide else data.draw(st.sampled_from([1, 3, 4])))
    count = data.draw(st.integers(1, 9))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    pixels = random.integers(0, 65536 if wide else 256, (count, *shape)).astype(np.uint16 if wide else np.uint8)
    nulls = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    nulls[0] = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        raw = kept(rows_of({TOP: with_nulls(pixels, nulls)}, size=4), folder / "raw", "raw")
        png = kept(raw, folder / "png", "png", to=data.draw(st.sampled_from(["arrow", "parquet", "store"])))
        for place, one in enumerate(values(png, TOP)):
            assert (one is None) == nulls[place]
            if one is not None:
                np.testing.assert_array_equal(decode_image(one, dtype=pixels.dtype), pixels[place])
        again = kept(png, folder / "again", {TOP: "raw"})
        assert values(again, TOP) == [None if gone else one.tolist() for gone, one in zip(nulls, pixels, strict=True)]
        assert again.digest() == raw.digest()


@pytest.mark.parametrize(
    ("pixels", "codec"),
    [(colours(), LOSSLESS), (colours()[..., :1], "h264:gop=6:lossless"), (depth(), "hevc:gop=4:lossless")],
)
def test_lossless_videos_are_the_same_pictures(pixels: npt.NDArray[Any], codec: str, tmp_path: Path) -> None:
    video = video_of(tmp_path, {TOP: pixels}, codec)
    assert values(kept(video, tmp_path / "raw", "raw"), TOP) == pixels.tolist()
    batch = BatchSource(video.to_store(), 5, 3, seed=1)
    at = batch.plan(0).starts[:, None] + np.arange(5)
    np.testing.assert_array_equal(batch[0][TOP].reshape(3, 5, *pixels.shape[1:]), pixels[at])
    assert batch[0][TOP].dtype == pixels.dtype


def test_jpeg_is_what_pillow_makes_of_it_and_rows_that_have_pictures_as_asked_stay(tmp_path: Path) -> None:
    raw = rows_of({TOP: colours()})
    assert kept(raw, tmp_path / "raw", "raw").digest() == raw.digest()
    png = kept(raw, tmp_path / "png", "png")
    assert values(kept(png, tmp_path / "again", "png"), TOP) == values(png, TOP)
    found = values(kept(raw, tmp_path / "jpeg", "jpeg:80"), TOP)
    for one, pixels in zip(found, colours(), strict=True):
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=80)
        assert one["bytes"] == stream.getvalue()


@pytest.mark.parametrize(
    "codec",
    ["h264:gop=250:crf=30:pix_fmt=yuv444p", "hevc:gop=8", pytest.param("av1:preset=12", marks=pytest.mark.slow)],
)
def test_frames_are_near_what_was_written(codec: str, tmp_path: Path) -> None:
    write(tmp_path / "video.mp4", colours(), codec)
    found = decoded(tmp_path / "video.mp4")[0].astype(int)
    errors = [np.abs(found - np.roll(colours(), k, 0)).mean() for k in (-1, 0, 1)]
    assert errors[1] < min(errors[0], errors[2]) / 2


def test_columns_are_kept_each_in_its_own_way(tmp_path: Path) -> None:
    wrist = colours()[::-1]
    source = video_of(tmp_path, {TOP: colours(), "observation_image": wrist}, **{DEPTH: depth()})
    done = convert(source, tmp_path / "mixed", images=[f"{TOP}=png", f"{DEPTH}=png"])
    assert done.pictures[:2] == (f"{TOP}: png", f"{DEPTH}: png")
    mixed = formats.open(tmp_path / "mixed")
    # The other column keeps its frames, and so its videos stay.
    assert mixed.metadata.videos == source.metadata.videos
    batches = [BatchSource(one.to_store(), 4, 3, seed=3)[1] for one in (source, mixed)]
    np.testing.assert_array_equal(batches[0][TOP], batches[1][TOP])
    assert values(kept(mixed, tmp_path / "raw", "raw"), "observation_image") == wrist.tolist()
    assert not formats.open(tmp_path / "raw").metadata.videos


def test_ways_that_are_none_are_refused(tmp_path: Path) -> None:
    for codec in (VideoCodec(), VideoCodec("av1", gop=7, crf=20.5), VideoCodec("hevc", lossless=True, pix_fmt="gbrp")):
        assert VideoCodec.parse(str(codec)) == codec
    rows = rows_of({TOP: colours(), DEPTH: depth()})
    wrong: list[tuple[Any, str]] = [
        ("gif", r"expected one of \['raw', 'png', 'jpeg:QUALITY', 'video', 'video:CODEC:gop=N'\], found 'gif'"),
        ("jpeg:0", "expected one of"),
        ("png:9", "expected one of"),
        ("video:h263", r"expected a codec, one of \['h264', 'hevc', 'av1'\], found 'h263'"),
        ("video:h264:gop=0", "gop: expected a number of frames, 1 or more, found 0"),
        ("video:h264:crf=52", "crf: expected a number from 0 to 51 for h264, found 52"),
        ("video:h264:speed=1", r"expected options like \['gop=2', .* found 'speed=1'"),
        ("video:h264:gop=2:gop=3", "each once, found 'gop=3'"),
        ("video:h264:crf=3:lossless", "expected crf or lossless, found both"),
        ("video:h264:pix_fmt=rgb8", r"pix_fmt: expected one of \[.*'yuv420p'.*\] of h264, found 'rgb8'"),
        ("video:h264:pix_fmt=gray", "expected a format of colour pixels, found 'gray'"),
        ([f"{TOP}=video:h264:preset=quickest"], "expected options that the encoder accepts for frames of 48x64"),
        ({"observation": "png"}, r"the image columns \['observation_image.*\], found 'observation'"),
        (["png", "raw"], "expected one encoding for each column"),
        ([f"{TOP}=video:h264:pix_fmt=gray12le"], "pix_fmt: expected one of"),
        ([f"{DEPTH}=video:h264"], r"found 'gray12le' for pixels of uint16; hevc supports gray12le, and png stores any"),
        ([f"{DEPTH}=jpeg:95"], "expected pixels of uint8 in 1 or 3 channels for jpeg, found uint16"),
    ]
    for way, message in wrong:
        with pytest.raises(ConfigError, match=message):
            write_lerobot(rows, tmp_path / "out", images=way)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("columns", "way", "error", "message"),
    [
        (
            {DEPTH: np.full((4, *SIDE, 1), 4096, np.uint16)},
            "video:hevc",
            DataError,
            "up to 4095, the .* found 4096; png",
        ),
        ({TOP: pictures(4)[:, :47, :63]}, "video:h264", ConfigError, "even height and width, found 47x63; yuv444p"),
        (
            {TOP: pa.array([[[[1, 2, 3]] * 2] * 2, [[[1, 2, 3]] * 3] * 2], pa.list_(pa.list_(pa.list_(pa.uint8()))))},
            "png",
            DataError,
            "expected pixels of shape .* as in its first row, found",
        ),
        ({"metadata_place": np.zeros((4, 2))}, "png", ConfigError, "expected columns of images"),
        ({TOP: np.zeros((4, 8, 8, 4), np.uint8)}, "video:h264", ConfigError, "expected frames with 1 or 3 channels"),
        ({TOP: pictures(4)[:, :14]}, "video:hevc", ConfigError, "at least 16x16 .* found 14x64; h264 accepts any"),
        ({TOP: pictures(4)[:, :, :30]}, "video:av1", ConfigError, "at least 4x32 .* found 48x30; h264 accepts"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(
    columns: Any, way: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    metadata = DatasetMetadata("arrived", fields=[Field(name, image=True) for name in columns if name == TOP])
    with pytest.raises(error, match=message):
        (convert if way == "png" else write_lerobot)(rows_of(columns, metadata), tmp_path / "out", images=way)
    assert not list(tmp_path.iterdir())


def test_videos_need_a_folder_and_fields_that_do_not_crop_or_resize(video: RowStream, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a folder for rows with videos, found the name of a single file"):
        convert(video, tmp_path / "rows.parquet")
    for field in (Field(TOP, image=True, crop=(0, 0, 8, 8)), Field(TOP, image=True, shape=(24, 32, 3))):
        cropped = video.replace(metadata=video.metadata.replace(fields=[field]))
        with pytest.raises(SchemaError, match="images are stored as png, expected a field that does not crop or resi"):
            convert(cropped, tmp_path / "png", images="png")


def test_videos_go_along_with_rows(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    first = video_of(tmp_path / "first", {TOP: colours()})
    wanted = BatchSource(first.to_store(), 4, 3, seed=3)[2]
    first.to_store().save(tmp_path / "saved")
    first.save(tmp_path / "written")
    for to in ("arrow", "parquet", "store"):
        convert(first, tmp_path / to, to=to)
    convert(first, tmp_path / "windows", layout="windows")
    shutil.rmtree(tmp_path / "first")
    for name in ("saved", "written", "arrow", "parquet", "store", "windows"):
        for _ in range(2):  # the second time with the index of the video beside it, which is no dataset
            found = BatchSource(DatasetStore.open(tmp_path / name), 4, 3, seed=3)
            np.testing.assert_equal(found[2], wanted)


def test_only_videos_that_are_listed_go_along(tmp_path: Path) -> None:
    (tmp_path / "video").mkdir()
    video = video_of(tmp_path / "video", {TOP: colours()})
    ((path, digest),) = video.metadata.videos
    (tmp_path / "video" / "notes.txt").write_bytes((tmp_path / "video" / path).read_bytes())
    for listed, message in (
        ([("notes.txt", digest)], "expected videos that end in one of"),
        ([("gone.mp4", digest)], "expected a readable video"),
        ([(path, "0" * 32)], "expected a video with the digest"),
    ):
        other = video.replace(metadata=video.metadata.replace(videos=listed))
        with pytest.raises(DataError, match=message):
            convert(other, tmp_path / "out")
        with pytest.raises(DataError, match=message):
            other.save(tmp_path / "written")
        shutil.rmtree(tmp_path / ".out.converting", ignore_errors=True)
        assert {one.name for one in tmp_path.iterdir()} == {"video"}


def test_frames_are_neither_appended_nor_sent_elsewhere(video: RowStream, tmp_path: Path) -> None:
    from mouse_core.hub import push_to_hub
    from mouse_core.store.remote import upload

    convert(video, tmp_path / "video", to="store")
    store = DatasetStore.open(tmp_path / "video")
    rows = store[:4]
    copied = DatasetStore(image_roots=[tmp_path / "video"]).from_dataset(store.to_dataset())
    for writer in (DatasetStore.open(tmp_path / "video", "a"), copied):
        with pytest.raises((DataError, ConfigError), match="video frames cannot be appended"):
            writer.extend(rows)
        assert len(writer) == COUNT
        assert BatchSource(writer, 4, 3)[0][TOP].shape == (3, 4, SIDE[0] * SIDE[1] * 3)
        writer.close()
    with pytest.raises(ConfigError, match="expected rows with stored images, found frames of videos"):
        push_to_hub({"train": store}, repo_id="a/b", dry_run=True)
    with pytest.raises(ConfigError, match="expected rows that contain their images, found rows that refer to videos"):
        upload(tmp_path / "video", (tmp_path / "there").as_uri())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_video_that_cannot_be_written_is_an_error_of_ours() -> None:
    for path, count in (("/dev/full", 1), ("/dev/full", 90), ("/nowhere/at/all.mp4", 1)):
        with pytest.raises(StorageError, match=f"video {path}"):
            write(path, pictures(count))


def test_frames_of_another_shape_are_refused(tmp_path: Path) -> None:
    writer = VideoWriter(tmp_path / "video.mp4", VideoCodec(), (*SIDE, 3), frames_per_second=29.97)
    with pytest.raises(DataError, match=r"expected frames of uint8 \[48, 64, 3\], found uint8 \[24, 64, 3\]"):
        writer.write(pictures(2)[:, :24])
    writer.write(pictures(30))
    writer.close()
    index = index_video(tmp_path / "video.mp4")
    assert len(index) == writer.frames == 30
    np.testing.assert_allclose(index.times, np.arange(30) / 29.97, atol=1e-4)


@pytest.mark.parametrize("width", [16, 48, 64])
def test_narrow_frames_are_encoded_without_a_tree(width: int, tmp_path: Path) -> None:
    writer = VideoWriter(tmp_path / "video.mp4", VideoCodec("hevc"), (32, width, 3))
    writer.write(pictures(12)[:, :32, :width])
    writer.close()
    assert (b" no-cutree " in (tmp_path / "video.mp4").read_bytes()) == (width < 64)
    assert len(index_video(tmp_path / "video.mp4")) == 12


def test_the_command_says_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    rows_of({TOP: colours(), DEPTH: depth()}).save(source)
    way = ["--images", "jpeg:90", "--images", f"{DEPTH}=png"]
    assert main(["convert", str(source), str(tmp_path / "out"), *way]) == 0
    said = capsys.readouterr().out
    assert f"images: {TOP}: jpeg of quality 90, which changes pixels" in said
    assert f"images: {DEPTH}: png\n" in said
    assert main(["convert", str(source), str(tmp_path / "bad"), "--images", "video:h264"]) == 2
    assert "expected raw, png or jpeg, found ['video:h264']; only LeRobotDatasets" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
