"""Frames of videos, wherever in the file they are, beside the same files decoded from their beginning."""

import ctypes
import hashlib
import pickle
import platform
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.video import FrameDecoder, VideoIndex, decoder_version, index_video
from tests.core.video_cases import KINDS, SIDE, copy_packets, decoded, joined, packets_and_sets, pictures, write_video

_COMMON = ("pyramid of B frames", "cut by an edit list", "HEVC with open groups")


def read(indexes: list[VideoIndex], video: Any, frame: Any, *, threads: int = 1, side: Any = SIDE) -> np.ndarray:
    """Frames as a decoder of their own gives them."""
    out = np.zeros((len(frame), *side, 3), np.uint8)
    FrameDecoder(threads=threads).decode(indexes, np.asarray(video), np.asarray(frame), out)
    return out


def compare(file: Path, tries: int, seed: int = 0) -> None:
    """Hold all frames, and random ones few at a time, against those of decoding the file in turn."""
    wanted, times = decoded(file)
    index = index_video(file)
    np.testing.assert_allclose(index.times, times, rtol=0, atol=1e-9)
    decoder, random = FrameDecoder(), np.random.default_rng(seed)
    everything = np.zeros_like(wanted)
    decoder.decode([index], np.zeros(len(index), int), np.arange(len(index)), everything)
    np.testing.assert_array_equal(everything, wanted)
    for _ in range(tries):
        frames = random.integers(0, len(index), random.integers(1, 6))
        out = np.zeros((len(frames), *wanted.shape[1:]), np.uint8)
        decoder.decode([index], np.zeros(len(frames), int), frames, out)
        np.testing.assert_array_equal(out, wanted[frames])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two videos of a kind."""
    folder = tmp_path_factory.mktemp("two")
    return [write_video(folder / f"{k}.mp4", options={"g": "6"}, count=20, seed=k) for k in range(2)]


@pytest.mark.parametrize("kind", _COMMON)
def test_any_frame_is_that_of_decoding_in_turn(tmp_path: Path, kind: str) -> None:
    compare(write_video(tmp_path / "a.mp4", **KINDS[kind]), 10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_frame_of_any_kind_of_file_is_that_of_decoding_in_turn(tmp_path: Path, kind: str) -> None:
    compare(write_video(tmp_path / "a.mp4", **KINDS[kind]), 160, seed=1)


def test_frames_of_several_files_are_decoded_together(two: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    indexes, wanted = [index_video(file) for file in two], np.stack([decoded(file)[0] for file in two])
    monkeypatch.setattr(av, "open", None)  # no container is opened on the way
    video, frame = np.random.default_rng(0).integers(0, [[2], [20]], (2, 40))
    for threads in (1, 2):
        np.testing.assert_array_equal(read(indexes, video, frame, threads=threads), wanted[video, frame])


def test_rows_without_a_frame_stay_as_they_are(two: list[Path]) -> None:
    out = np.full((3, *SIDE, 3), 7, np.uint8)
    index = index_video(two[0])
    FrameDecoder().decode([index], [0, 0, 0], [-1, 3, -1], out)
    assert (out[[0, 2]] == 7).all()
    np.testing.assert_array_equal(out[1], decoded(two[0])[0][3])


def test_parameters_in_packets_do_not_reach_other_frames(tmp_path: Path) -> None:
    first = write_video(tmp_path / "first.mp4", options={"g": "5", "x264-params": "cabac=1"}, count=10)
    other = write_video(tmp_path / "other.mp4", options={"g": "5", "x264-params": "cabac=0:ref=1"}, count=10, seed=1)
    later, sets = packets_and_sets(other)
    both = copy_packets(first, tmp_path / "joined.mp4", lambda packets: joined(packets, later, sets))
    compare(both, 40)
    indexes = [index_video(file) for file in (both, first)]
    assert indexes[0].own_sets
    assert indexes[0].header == indexes[1].header
    wanted = [decoded(both)[0], decoded(first)[0]]
    video, frame = [0, 1, 0, 1], [17, 8, 3, 2]
    found, decoder = np.zeros((4, *SIDE, 3), np.uint8), FrameDecoder()
    for k in range(4):
        decoder.decode(indexes, video[k : k + 1], frame[k : k + 1], found[k : k + 1])
        np.testing.assert_array_equal(found[k], wanted[video[k]][frame[k]])


def test_a_decoder_goes_to_other_processes_as_its_options(two: list[Path]) -> None:
    decoder = FrameDecoder(threads=2)
    out = np.zeros((8, *SIDE, 3), np.uint8)
    decoder.decode([index_video(two[0])], [0] * 8, range(0, 16, 2), out)
    again = pickle.loads(pickle.dumps(decoder))
    decoder.close()
    found = np.zeros_like(out)
    again.decode([index_video(two[0])], [0] * 8, range(0, 16, 2), found)
    assert again.threads == 2
    assert (found == out).all()
    assert out.any()


def test_numbers_of_depth_arrive_as_they_are(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    written = (pictures(6)[..., :1].astype(np.uint16) * 16 + 5) % 4096
    file = tmp_path / "depth.mp4"
    with av.open(str(file), "w") as container:
        try:
            stream = container.add_stream("libx265", rate=25)
        except av.codec.codec.UnknownCodecError:
            pytest.skip("PyAV has no encoder libx265")
        stream.height, stream.width, stream.pix_fmt = *SIDE, "gray12le"
        stream.options = {"x265-params": "lossless=1:log-level=none:pools=none:keyint=3"}
        for picture in written[..., 0]:
            frame = av.VideoFrame(SIDE[1], SIDE[0], "gray12le")
            lines = np.frombuffer(frame.planes[0], np.uint16).reshape(SIDE[0], -1)
            lines[:, : SIDE[1]] = picture
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    out = np.zeros((3, *SIDE, 1), np.uint16)
    FrameDecoder().decode([index_video(file)], [0, 0, 0], [5, 0, 4], out)
    np.testing.assert_array_equal(out, written[[5, 0, 4]])
    with pytest.raises(DataError, match=r"depth\.mp4: expected 8 bits per channel .*uint16\), found gray12le"):
        read([index_video(file)], [0], [0])


def test_an_index_is_kept_beside_the_video(two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    file = Path(shutil.copy(two[0], tmp_path / "a.mp4"))
    made = index_video(file)
    assert (tmp_path / "a.mp4.index.arrow").stat().st_size < 37 * 20 + 6000
    shutil.copytree(tmp_path, tmp_path / "copy")
    monkeypatch.setattr(av, "open", None)
    for again in (index_video(file), index_video(tmp_path / "copy" / "a.mp4")):
        assert again.digest == made.digest
        assert len(again) == 20
        np.testing.assert_array_equal(again.position, made.position)


def test_an_index_that_does_not_fit_is_made_anew(two: list[Path], tmp_path: Path) -> None:
    file, place = Path(shutil.copy(two[0], tmp_path / "a.mp4")), tmp_path / "elsewhere"
    index = index_video(file, sidecar=place)
    digest, whole = index.digest, place.read_bytes()
    begin = whole.index(index.position.tobytes())
    for damage in (whole[:-40], whole[:begin] + bytes(8) + whole[begin + 8 :], b"", b"ARROW1"):
        place.unlink()  # which the index maps
        place.write_bytes(damage)
        assert index_video(file, sidecar=place).digest == digest
        assert place.read_bytes() == whole
    shutil.copy(two[1], file)
    found = index_video(file, sidecar=place)
    assert found.digest == index_video(two[1]).digest != digest
    assert not list(tmp_path.glob(".*"))


IMPOSSIBLE = [("codec", "rawvideo"), ("height", 1 << 20), ("width", -64), ("height", None), ("time_base", [0, 1])]


@pytest.mark.parametrize(("name", "value"), [*IMPOSSIBLE, ("time_base", [None, 1]), ("colours", [99999, 0])])
def test_an_index_that_cannot_be_is_made_anew(two: list[Path], tmp_path: Path, name: str, value: Any) -> None:
    """Data may bring one along, whose digest is that of what it says."""
    file, place = Path(shutil.copy(two[0], tmp_path / "a.mp4")), tmp_path / "a.mp4.index.arrow"
    digest = index_video(file).digest
    table = pa.ipc.open_file(place.read_bytes()).read_all()
    field = table.schema.field(name)
    table = table.set_column(table.schema.get_field_index(name), field, pa.array([value], field.type))
    whole = hashlib.sha256()
    for field in table.schema:
        one = table[field.name][0].as_py() if field.name != "digest" else "1"
        if field.name == "colours" and not one:
            continue
        array = isinstance(one, list) and field.name not in ("colours", "time_base")
        content = np.array(one, field.type.value_type.to_pandas_dtype()).tobytes() if array else repr(one).encode()
        whole.update(f"{field.name} {len(content)} ".encode() + content)
    crafted = pa.array([whole.hexdigest()[:32]])
    place.unlink()
    with pa.ipc.new_file(str(place), table.schema) as writer:
        writer.write_table(table.set_column(table.schema.get_field_index("digest"), "digest", crafted))
    found = index_video(file)
    assert (found.digest, found.codec, found.height) == (digest, "h264", SIDE[0])
    assert read([found], [0], [3]).any()


def test_an_index_of_a_newer_version_is_refused_and_where_none_can_be_written_none_is(
    two: list[Path], tmp_path: Path
) -> None:
    assert len(index_video(two[0], sidecar=tmp_path / "no" / "such" / "folder")) == 20
    assert not list(tmp_path.iterdir())
    place = tmp_path / "new"
    index_video(two[0], sidecar=place)
    table = pa.ipc.open_file(place.read_bytes()).read_all().replace_schema_metadata({"mouse_video": "3"})
    with pa.ipc.new_file(str(place), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(SchemaError, match=r"new: expected an index of version 1 at most, found version 3"):
        index_video(two[0], sidecar=place)


def test_what_the_last_bits_of_pixels_depend_on_is_told() -> None:
    av = pytest.importorskip("av")
    here = decoder_version()
    assert [part.split(".")[0].isdigit() for part in here.split()][:4] == [False, True, False, True]
    assert here == decoder_version() == FrameDecoder().version
    libraries = list((Path(av.__file__).parent.parent / "av.libs").glob("libavutil*"))
    if platform.machine() != "x86_64" or not libraries:
        return  # elsewhere no processor lacks what is left out here
    library = ctypes.CDLL(str(libraries[0]))
    try:
        library.av_force_cpu_flags(0)  # as a processor without vector instructions
        assert decoder_version().split()[:-1] == here.split()[:-1]
        assert decoder_version() != here
    finally:
        library.av_force_cpu_flags(-1)
    assert decoder_version() == here


def test_bytes_that_changed_are_found(two: list[Path], tmp_path: Path) -> None:
    file = Path(shutil.copy(two[0], tmp_path / "a.mp4"))
    index, wanted = index_video(file), decoded(file)[0]
    middle = int(index.position[index.packet[8]] + index.size[index.packet[8]] // 2)
    content = bytearray(file.read_bytes())
    content[middle] ^= 1
    file.write_bytes(content)
    out = np.zeros((20, *SIDE, 3), np.uint8)
    held = weakref.ref(out)
    for threads in (1, 2):
        # The first of them, and nothing holds the arrays once it was said.
        with pytest.raises(DataError, match=r"a\.mp4, frame 8: expected the bytes that were indexed"):
            FrameDecoder(threads=threads).decode([index], np.zeros(20, int), np.arange(20), out)
    del out
    assert held() is None
    np.testing.assert_array_equal(read([index], [0], [2])[0], wanted[2])
    file.write_bytes(content[: index.position.max()])
    with pytest.raises(DataError, match=r"a\.mp4, frame 19: expected the bytes that were indexed"):
        read([index], [0], [19])
    file.unlink()
    with pytest.raises(ConfigError, match=r"a\.mp4: expected a file"):
        read([index], [0], [1], threads=2)


def test_frames_that_are_not_there_or_do_not_fit_are_refused(two: list[Path]) -> None:
    index = index_video(two[0])
    wrong: list[tuple[Any, Any, str]] = [
        ([0], [20], r"0\.mp4: expected frames 0 to 19, found frame 20"),
        ([0], [-2], r"0\.mp4: expected frames 0 to 19, found frame -2"),
        ([1], [0], r"video: expected an index from 0 to 0, found 1"),
        ([0.0], [0], r"video, frame: expected two arrays of integers \[n\], found float64 \[1\]"),
        ([0, 0], [0], r"video, frame: expected two arrays of integers \[n\]"),
    ]
    for video, frame, message in wrong:
        with pytest.raises((ConfigError, DataError), match=message):
            read([index], video, frame)
    with pytest.raises(DataError, match=r"0\.mp4: expected frames of 48x60, found 48x64"):
        read([index], [0], [0], side=(48, 60))
    with pytest.raises(ConfigError, match=r"out: expected \[1, H, W, 3\] of uint8 or .*, found \[1, 48, 64, 3\] of fl"):
        FrameDecoder().decode([index], [0], [0], np.zeros((1, *SIDE, 3), np.float32))
    with pytest.raises(DataError, match=r"0\.mp4: expected grey pixels of more than 8 bits, found yuv420p"):
        FrameDecoder().decode([index], [0], [0], np.zeros((1, *SIDE, 1), np.uint16))
    with pytest.raises(ConfigError, match="threads: expected"):
        FrameDecoder(threads=0)


def test_files_that_cannot_be_exact_are_refused(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with pytest.raises(ConfigError, match=r"none\.mp4: expected a file"):
        index_video(tmp_path / "none.mp4")
    (tmp_path / "text.mp4").write_text("#EXTM3U\nfile:///etc/passwd\n")
    with pytest.raises(DataError, match=r"text\.mp4: cannot be read"):
        index_video(tmp_path / "text.mp4")
    with pytest.raises(DataError, match=r"b\.mp4: expected h264, hevc or av1, found mpeg4; ffmpeg -i INPUT"):
        index_video(write_video(tmp_path / "b.mp4", codec="mpeg4", count=3))
    with av.open(str(tmp_path / "c.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(DataError, match=r"c\.mp4: expected a video stream, found none"):
        index_video(tmp_path / "c.mp4")
    # Its first pictures refer to others that were cut off.
    with pytest.raises(DataError, match=r"d\.mp4, packet 0: expected a key frame, found a frame that needs other fra"):
        index_video(write_video(tmp_path / "d.mp4", **KINDS["open groups"], cut="key"))
