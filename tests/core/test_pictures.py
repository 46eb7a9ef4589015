"""Pictures of rows as pixels, image files or frames of videos, and changed from each to each."""

import io
import json
import os
import shutil
import signal
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
from mouse_core.formats.converting import Conversion, convert
from mouse_core.formats.pictures import by_column, changed_stream, pictures_of
from mouse_core.images import decode_image
from mouse_core.metadata import DatasetMetadata
from mouse_core.video import VideoCodec, VideoWriter, index_video
from tests.core.test_convert import Interrupted, cut
from tests.core.video_cases import SIDE, decoded, pictures
from tests.programs import run_code

av = pytest.importorskip("av")

TOP, DEPTH = "observation_images_top", "observation_images_depth"
COUNT = 40


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
    rows = pa.table(
        {
            "action": step % 3,
            "reward": np.where(step > 0, 1, 0).astype(np.float32),
            "done": np.where(step == half - 1, 1, 0),
            "episode_step": step,
            **columns,
        }
    )
    batches = rows.to_batches(max_chunksize=size)
    return RowStream(
        "made", "ted", rows.schema, lambda: iter(batches), rows=count, metadata=metadata or DatasetMetadata("arrived")
    )


def kept(source: Any, folder: Path, images: Any, **options: Any) -> RowStream:
    convert(source, folder, images=images, **options)
    return formats.open(folder)


def values(stream: RowStream, column: str) -> list[Any]:
    return [one for batch in stream for one in batch.column(column).to_pylist()]


def frames_of(stream: RowStream, folder: Path, column: str) -> npt.NDArray[np.uint8]:
    """The frames that rows name, from decoding every file in turn."""
    files = [decoded(folder / path)[0] for path, _ in stream.metadata.videos if column in path]
    places = {path: place for place, (path, _) in enumerate(stream.metadata.videos)}
    of = {places[path]: k for k, path in enumerate(path for path in places if column in path)}
    return np.stack([files[of[one["video"]]][one["frame"]] for one in values(stream, column)])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few pictures, so that small data have several videos."""
    monkeypatch.setattr("mouse_core.formats.pictures._PIECE_BYTES", 6 * SIDE[0] * SIDE[1] * 3)


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


def test_rows_that_have_pictures_as_asked_are_not_touched(tmp_path: Path) -> None:
    raw = rows_of({TOP: colours()})
    assert kept(raw, tmp_path / "raw", "raw").digest() == raw.digest()
    png = kept(raw, tmp_path / "png", "png")
    assert values(kept(png, tmp_path / "again", "png"), TOP) == values(png, TOP)


@pytest.mark.parametrize(
    ("pixels", "way"),
    [
        (colours(), "video:hevc:pix_fmt=gbrp:lossless"),
        (colours()[..., :1], "video:h264:gop=6:lossless"),
        (depth(), "video:hevc:gop=4:lossless"),
    ],
)
def test_lossless_videos_are_the_same_pictures(pixels: npt.NDArray[Any], way: str, tmp_path: Path) -> None:
    raw = rows_of({TOP: pixels})
    video = kept(raw, tmp_path / "video", way)
    assert kept(video, tmp_path / "raw", "raw").digest() == raw.digest()
    batch = BatchSource(video.to_store(), 5, 3, seed=1)
    at = batch.plan(0).starts[:, None] + np.arange(5)
    np.testing.assert_array_equal(batch[0][TOP].reshape(3, 5, *pixels.shape[1:]), pixels[at])
    assert batch[0][TOP].dtype == pixels.dtype


def test_jpeg_is_what_pillow_makes_of_it(tmp_path: Path) -> None:

    found = values(kept(rows_of({TOP: colours()}), tmp_path / "jpeg", "jpeg:80"), TOP)
    for one, pixels in zip(found, colours(), strict=True):
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=80)
        assert one["bytes"] == stream.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["arrow", "parquet", "store"])
@pytest.mark.parametrize("way", ["h264:gop=2", "h264:gop=250:crf=30:pix_fmt=yuv444p", "hevc:gop=8", "av1:preset=12"])
@pytest.mark.usefixtures("small")
def test_frames_are_those_of_decoding_files_in_turn(way: str, to: str, tmp_path: Path) -> None:
    if (way != "h264:gop=2") == (to != "arrow") and to != "arrow":
        pytest.skip("one codec is tried in all kinds of files, and all codecs in one")
    nulls = np.arange(COUNT) % 11 == 5
    source = rows_of({TOP: with_nulls(colours(), nulls), "observation_image": colours()[::-1]})
    folder = tmp_path / "video"
    video = kept(source, folder, {TOP: f"video:{way}"}, to=to, shard_bytes=1000)
    assert len(video.metadata.videos) > 1 or "gop=250" in way  # whose encoder looks at all frames before it gives one
    for number, (path, digest) in enumerate(video.metadata.videos):
        assert path == f"videos/{TOP}/chunk-000/file-{number:03d}.mp4"
        assert index_video(folder / path).digest == digest
    named = values(video, TOP)
    assert [one is None for one in named] == nulls.tolist()
    frames = [decoded(folder / path)[0] for path, _ in video.metadata.videos]
    wanted = np.stack(
        [np.zeros((*SIDE, 3), np.uint8) if one is None else frames[one["video"]][one["frame"]] for one in named]
    )
    # Far from nothing, and the right ones: each is nearest to what it was made of.
    errors = [np.abs(wanted[~nulls].astype(int) - np.roll(colours(), k, 0)[~nulls]).mean() for k in (-1, 0, 1)]
    assert errors[1] < min(errors[0], errors[2]) / 2
    fields = [Field(TOP, image=True, fill=0)]
    store = DatasetStore.open(folder, fields=fields) if to == "store" else video.to_store(fields=fields)
    source = BatchSource(store, 5, 4, seed=2)
    for index in range(3):
        at = source.plan(index).starts[:, None] + np.arange(5)
        np.testing.assert_array_equal(source[index][TOP].reshape(4, 5, *SIDE, 3), wanted[at])
    again = kept(video, tmp_path / "raw", "raw")
    found = values(again, TOP)
    assert [one is None for one in found] == nulls.tolist()
    np.testing.assert_array_equal(np.array([one for one in found if one is not None]), wanted[~nulls])
    assert values(again, "observation_image") == colours()[::-1].tolist()


@pytest.mark.parametrize("to", ["arrow", pytest.param("store", marks=pytest.mark.slow)])
def test_videos_are_encoded_anew(to: str, tmp_path: Path) -> None:
    """From results of ours, whose videos lie under the names that new ones would have."""
    first = kept(rows_of({TOP: colours()}), tmp_path / "first", "video:hevc:pix_fmt=gbrp:lossless", to=to)
    for number, codec in enumerate(["h264:crf=8", "h264:crf=9", "hevc:pix_fmt=gbrp:lossless"]):
        way = f"video:{codec}"
        again = kept(first, tmp_path / f"again{number}", way, to=to)
        assert [path.split("/")[0] for path, _ in again.metadata.videos] == ["videos-1" if number != 1 else "videos"]
        found = BatchSource(again.to_store(), len(colours()), 1, sampling="last")[0][TOP].reshape(-1, *SIDE, 3)
        assert np.abs(found.astype(int) - colours()).mean() < 20 < np.abs(found[1:].astype(int) - colours()[:-1]).mean()
        first = again


def test_cameras_are_kept_each_in_its_own_way(tmp_path: Path) -> None:
    source = rows_of({TOP: colours(), DEPTH: depth(), "observation_image": colours()})
    folder = tmp_path / "mixed"
    done = convert(source, folder, images=["jpeg:90", f"{TOP}=video:h264:gop=4", f"{DEPTH}=video:hevc:lossless"])
    assert [sentence.split(":")[0] for sentence in done.pictures[:3]] == [TOP, DEPTH, "observation_image"]
    assert ["pixels" in sentence for sentence in done.pictures] == [True, False, True, False]
    mixed = formats.open(folder)
    assert [one.type.field(0).name for one in list(mixed.schema)[-3:]] == ["video", "video", "bytes"]
    # Of two that are in videos one becomes pixels: the other keeps its frames, and new ones get a folder of their own.
    other = kept(mixed, tmp_path / "other", {TOP: "png", "observation_image": "video:hevc"})
    assert [path.split("/")[0] for path, _ in other.metadata.videos] == ["videos", "videos", "videos-1"]
    batches = [BatchSource(one.to_store(), 4, 3, seed=3)[1] for one in (mixed, other)]
    for name in (TOP, DEPTH):
        np.testing.assert_array_equal(batches[0][name], batches[1][name])
    assert batches[1]["obs_image"].dtype == np.int64


@pytest.mark.parametrize(
    ("way", "message"),
    [
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
    ],
)
def test_ways_that_are_none_are_refused(way: Any, message: str, tmp_path: Path) -> None:
    columns = {TOP: colours(), DEPTH: depth()}
    with pytest.raises(ConfigError, match=message):
        convert(rows_of(columns), tmp_path / "out", images=way)
    assert not list(tmp_path.iterdir())


def test_pictures_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    deep = depth()
    deep[30, 5, 5] = 4096
    odd = pictures(4)[:, :47, :63]
    ragged = pa.array([[[[1, 2, 3]] * 2] * 2, [[[1, 2, 3]] * 3] * 2], pa.list_(pa.list_(pa.list_(pa.uint8()))))
    for columns, way, error, message in (
        (
            {DEPTH: deep},
            "video:hevc",
            DataError,
            "expected pixel values up to 4095, the largest value in gray12le, found 4096; png",
        ),
        ({TOP: odd}, "video:h264", ConfigError, "expected even height and width, found 47x63; yuv444p accepts any"),
        ({TOP: ragged}, "png", DataError, "expected pixels of shape .* as in its first row, found"),
        ({"metadata_place": np.zeros((4, 2))}, "png", ConfigError, "expected columns of images"),
        ({TOP: np.zeros((4, 8, 8, 4), np.uint8)}, "video:h264", ConfigError, "expected frames with 1 or 3 channels"),
        (
            {TOP: pictures(4)[:, :14]},
            "video:hevc",
            ConfigError,
            "at least 16x16 .* found 14x64; h264 accepts any",
        ),
        ({TOP: pictures(4)[:, :, :30]}, "video:av1", ConfigError, "at least 4x32 .* found 48x30; h264 accepts"),
    ):
        metadata = DatasetMetadata("arrived", fields=[Field(name, image=True) for name in columns if name == TOP])
        with pytest.raises(error, match=message):
            convert(rows_of(columns, metadata), target, images=way)
        assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="expected a folder for rows with videos, found the name of a single file"):
        convert(rows_of({TOP: colours()}), tmp_path / "rows.parquet", images="video")


def test_fields_that_crop_or_resize_frames_are_not_fields_of_pixels(tmp_path: Path) -> None:
    video = kept(rows_of({TOP: colours()}), tmp_path / "video", "video")
    for field in (Field(TOP, image=True, crop=(0, 0, 8, 8)), Field(TOP, image=True, shape=(24, 32, 3))):
        cropped = video.replace(metadata=video.metadata.replace(fields=[field]))
        with pytest.raises(SchemaError, match="expected a field that does not crop or resize, to store png"):
            convert(cropped, tmp_path / "png", images="png")
        assert kept(cropped, tmp_path / f"{field.crop}", "video").metadata.fields == (field,)


def test_videos_go_along_with_rows(tmp_path: Path) -> None:
    pixels = colours()
    first = kept(rows_of({TOP: pixels}), tmp_path / "first", "video")
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
    for name in ("store", "windows"):
        np.testing.assert_equal(BatchSource(DatasetStore.open(tmp_path / name), 4, 3, seed=3)[2], wanted)


def test_only_videos_that_are_listed_go_along(tmp_path: Path) -> None:
    video = kept(rows_of({TOP: colours()}), tmp_path / "video", "video")
    (path, digest), *_ = video.metadata.videos
    (tmp_path / "video" / "notes.txt").write_bytes((tmp_path / "video" / path).read_bytes())
    for listed, message in (
        ([("notes.txt", digest)], "expected videos that end in one of"),
        ([("gone.mp4", digest)], "expected a readable video"),
        ([(path, "0" * 32)], "expected a video with the digest"),
    ):
        other = video.replace(metadata=video.metadata.replace(videos=listed), image_roots=(str(tmp_path / "video"),))
        with pytest.raises(DataError, match=message):
            convert(other, tmp_path / "out")
        with pytest.raises(DataError, match=message):
            other.save(tmp_path / "written")
        shutil.rmtree(tmp_path / ".out.converting", ignore_errors=True)
        assert {one.name for one in tmp_path.iterdir()} == {"video"}


def test_frames_are_not_appended(tmp_path: Path) -> None:
    convert(rows_of({TOP: colours()}), tmp_path / "video", images="video", to="store")
    store = DatasetStore.open(tmp_path / "video")
    rows = store[:4]
    copied = DatasetStore(image_roots=[tmp_path / "video"]).from_dataset(store.to_dataset())
    for writer in (DatasetStore.open(tmp_path / "video", "a"), copied):
        with pytest.raises((DataError, ConfigError), match="video frames cannot be appended"):
            writer.extend(rows)
        assert len(writer) == COUNT
        assert BatchSource(writer, 4, 3)[0][TOP].shape == (3, 4, SIDE[0] * SIDE[1] * 3)
        writer.close()


def test_frames_are_not_sent_elsewhere(tmp_path: Path) -> None:
    from mouse_core.hub import push_to_hub
    from mouse_core.store.remote import upload

    convert(rows_of({TOP: colours()}), tmp_path / "video", images="video", to="store")
    with pytest.raises(ConfigError, match="expected rows with stored images, found frames of videos"):
        push_to_hub({"train": DatasetStore.open(tmp_path / "video")}, repo_id="a/b", dry_run=True)
    with pytest.raises(ConfigError, match="expected rows that contain their images, found rows that refer to videos"):
        upload(tmp_path / "video", (tmp_path / "there").as_uri())


def encode(source: RowStream, target: Path) -> Conversion:
    return convert(source, target, images="video:h264:gop=4", shard_bytes=2500)


def assert_near(video: RowStream) -> None:
    """Every row has a frame, which is nearest to what it was made of."""
    frames = np.array(values(convert_to_raw(video), TOP)).astype(int)
    errors = [np.abs(frames - np.roll(colours(), k, 0)).mean() for k in (-1, 0, 1)]
    assert errors[1] < min(errors[0], errors[2]) / 2


def convert_to_raw(video: RowStream) -> RowStream:
    return changed_stream(video, pictures_of(video, by_column("raw")))


@pytest.mark.usefixtures("small")
def test_interrupted_encoding_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 5)
    source, target = rows_of({TOP: colours()}, size=5), tmp_path / "out"
    made: list[int] = []
    for rows in (5, 25, 35):
        with pytest.raises(Interrupted):
            encode(cut(source, rows), target)
        assert not target.exists()
        files = sorted((tmp_path / ".out.converting" / "encoded").rglob("*.mp4"))
        made.append(len(files))
    assert made[-1] > 1
    with pytest.raises(ConfigError, match=r"unfinished work with other inputs, which differ in videos"):
        convert(source, target, images="video:h264:gop=5", shard_bytes=2500)
    other = rows_of({TOP: colours()[::-1]}, size=5)
    with pytest.raises(ConfigError, match=r"unfinished work with other inputs, which differ in some of the rows"):
        encode(other, target)
    before = {file: file.stat().st_ino for file in (tmp_path / ".out.converting").rglob("file-000.mp4")}
    encode(source, target)
    assert [file.stat().st_ino for file in target.rglob("file-000.mp4")] == list(before.values())
    assert os.listdir(tmp_path) == ["out"]
    assert_near(formats.open(target))


@pytest.mark.usefixtures("small")
def test_an_encoded_part_that_is_damaged_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of it gets other checksums, which must not be those of damage."""
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 5)
    source, target = rows_of({TOP: colours()}, size=5), tmp_path / "out"
    with pytest.raises(Interrupted):
        encode(cut(source, 35), target)
    folder = tmp_path / ".out.converting" / "encoded"
    first = folder / next(iter(json.loads((folder / "job.json").read_text())["parts"]["0"]["files"]))
    with pa.OSFile(str(first)) as opened:
        rewards = pa.ipc.open_stream(opened).read_all().column("reward").chunk(0).buffers()[1].to_pybytes()
    first.write_bytes(first.read_bytes().replace(rewards, bytes([*rewards[:-2], rewards[-2] ^ 1, rewards[-1]])))
    encode(source, target)
    assert values(formats.open(target), "reward") == values(source, "reward")
    assert_near(formats.open(target))


KILLED = """
import os, signal, sys
import tests.core.test_pictures as here
from mouse_core.formats import columns
from mouse_core.formats import pictures

columns._BLOCK_ROWS = 5
pictures._PIECE_BYTES = 6 * here.SIDE[0] * here.SIDE[1] * 3
left = [int(sys.argv[2])]
write = pictures._PartWriter.write

def killing(*arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)

pictures._PartWriter.write = killing
from pathlib import Path
here.encode(here.rows_of({here.TOP: here.colours()}, size=5), Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
@pytest.mark.usefixtures("small")
def test_killed_encoding_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 5)
    source, target = rows_of({TOP: colours()}, size=5), tmp_path / "out"
    for after in (0, 4, 3):
        killed = run_code(KILLED, target, after)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not target.exists()
    encode(source, target)
    assert os.listdir(tmp_path) == ["out"]
    assert_near(formats.open(target))


@pytest.mark.usefixtures("small")
def test_a_full_disk_leaves_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = rows_of({TOP: colours()}), tmp_path / "out"
    replace, left = os.replace, [2]

    def full(*paths: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        replace(*paths)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="No space left on device"):
        encode(source, target)
    assert not target.exists()
    assert encode(source, target).rows == COUNT


def write(path: str, count: int) -> None:
    writer = VideoWriter(path, VideoCodec(), (*SIDE, 3))
    try:
        writer.write(pictures(count))
        writer.close()
    finally:
        writer.discard()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/at/all.mp4"])
def test_a_video_that_cannot_be_written_is_an_error_of_ours(path: str) -> None:
    for count in (1, 90):
        with pytest.raises(StorageError, match=f"video {path}"):
            write(path, count)


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
    """What x265 writes beyond its memory is seen by chance, but it says in the file how it worked."""
    writer = VideoWriter(tmp_path / "video.mp4", VideoCodec("hevc"), (32, width, 3))
    writer.write(pictures(12)[:, :32, :width])
    writer.close()
    assert (b" no-cutree " in (tmp_path / "video.mp4").read_bytes()) == (width < 64)
    assert len(index_video(tmp_path / "video.mp4")) == 12


def test_codecs_are_texts() -> None:
    for codec in (VideoCodec(), VideoCodec("av1", gop=7, crf=20.5), VideoCodec("hevc", lossless=True, pix_fmt="gbrp")):
        assert VideoCodec.parse(str(codec)) == codec


def test_the_command_says_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    rows_of({TOP: colours(), DEPTH: depth()}).save(source)
    way = ["--images", "video:h264:gop=2", "--images", f"{DEPTH}=png"]
    assert main(["convert", str(source), str(tmp_path / "out"), *way]) == 0
    said = capsys.readouterr().out
    assert f"images: {TOP}: frames of videos, h264:gop=2, which change pixels" in said
    assert f"images: {DEPTH}: png\n" in said
    assert "images: 1 videos in the result" in said
    assert main(["convert", str(source), str(tmp_path / "bad"), "--images", "video:h265"]) == 2
    assert "expected a codec, one of ['h264', 'hevc', 'av1'], found 'h265'" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
