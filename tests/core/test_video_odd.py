"""Videos that are odd on purpose, beside the same files decoded in turn: what boxes, packets and sets may say."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core.errors import DataError
from mouse_core.video import FrameDecoder, index_video
from tests.core.test_video import compare
from tests.core.video_cases import KINDS, copy_packets, decoded, joined, packets_and_sets, with_content, write_video


def boxes(data: bytes) -> list[tuple[bytes, bytes]]:
    """The boxes that lie side by side in some bytes, each with its name and what is in it."""
    found, place = [], 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 4])
        found.append((data[place + 4 : place + 8], data[place + 8 : place + size]))
        place += size
    return found


def box(name: bytes, content: bytes) -> bytes:
    return (len(content) + 8).to_bytes(4) + name + content


def changed(data: bytes, path: list[bytes], change: Callable[[bytes], bytes]) -> bytes:
    """Bytes of boxes of which the one that a path of names leads to has something else in it."""
    name, *rest = path
    into = (lambda content: changed(content, rest, change)) if rest else change
    if name == b"stsd":  # whose boxes lie behind 8 bytes
        into = lambda content: content[:8] + changed(content[8:], rest, change)  # noqa: E731
    return b"".join(box(one, into(content) if one == name else content) for one, content in boxes(data))


def rewrite(file: Path, path: list[bytes], change: Callable[[bytes], bytes]) -> Path:
    """Change a box of a file whose tables lie behind its pixels, so that these stay where they are."""
    data = file.read_bytes()
    assert [name for name, _ in boxes(data)][-1] == b"moov"
    file.write_bytes(changed(data, path, change))
    return file


TRACK = [b"moov", b"trak"]
SAMPLES = [*TRACK, b"mdia", b"minf", b"stbl", b"stsd"]


def edits(*entries: tuple[int, int]) -> Callable[[bytes], bytes]:
    """A track whose edit list has entries: how long in ms, and from which time of the media on, -1 for a pause."""
    made = b"".join(
        length.to_bytes(4) + start.to_bytes(4, signed=True) + (1 << 16).to_bytes(4) for length, start in entries
    )
    table = box(b"edts", box(b"elst", bytes(4) + len(entries).to_bytes(4) + made))

    def change(track: bytes) -> bytes:
        kept = [(name, content) for name, content in boxes(track) if name != b"edts"]
        return b"".join(box(*one) for one in kept[:1]) + table + b"".join(box(*one) for one in kept[1:])

    return change


@pytest.mark.parametrize(
    "entries",
    [
        [(400, 16 * 400)],  # the middle, from 400 ms on of a second of 16,000
        [(300, -1), (800, 0)],  # a pause, then the beginning
        [(400, 0), (400, 16 * 800)],  # two parts
        [(400, 16 * 600), (400, 0)],  # in another order
        [(480, 16 * 40), (480, 16 * 40)],  # one twice
        [(200, 16 * 200), (200, -1), (300, 16 * 500)],
    ],
    ids=["middle", "late", "two", "back", "twice", "pause"],
)
def test_edit_lists_of_several_parts(tmp_path: Path, entries: list[tuple[int, int]]) -> None:
    file = write_video(tmp_path / "a.mp4", **KINDS["short groups with B frames"])
    try:
        compare(rewrite(file, TRACK, edits(*entries)), 20)
    except DataError as error:
        assert "expected a different time for each frame" in str(error)  # noqa: PT017


@pytest.mark.parametrize(("matrix", "full"), [(1, 0), (9, 0), (6, 128), (1, 128)])
def test_colours_that_only_the_container_tells(tmp_path: Path, matrix: int, full: int) -> None:
    """Files of one header, of which each is converted as its own container says, by one decoder in turns."""
    files = [write_video(tmp_path / "0.mp4", options={"g": "6"}, count=12), tmp_path / "1.mp4"]
    shutil.copy(*files)
    colour = box(b"colr", b"nclx" + bytes([0, 1, 0, 1, 0, matrix, full]))
    digest = index_video(files[1], sidecar=tmp_path / "none" / "x").digest
    rewrite(files[1], [*SAMPLES, b"avc1"], lambda content: content + colour)
    wanted = [decoded(file)[0] for file in files]
    assert (wanted[0] != wanted[1]).any()
    compare(files[1], 4)
    indexes = [index_video(file) for file in files]
    assert indexes[0].header == indexes[1].header
    assert indexes[0].digest == digest != indexes[1].digest
    out, decoder = np.zeros_like(wanted[0][:1]), FrameDecoder()
    for k in (0, 1, 0, 1):
        decoder.decode(indexes[k : k + 1], [0], [7], out)
        np.testing.assert_array_equal(out[0], wanted[k][7])


def test_colours_that_packets_tell_and_a_rotation_change_nothing(tmp_path: Path) -> None:
    options = {"x264-params": "colormatrix=bt709:range=tv"}
    file = write_video(tmp_path / "a.mp4", options=options, count=6)
    colour = box(b"colr", b"nclx" + bytes([0, 1, 0, 1, 0, 9, 128]))
    rewrite(file, [*SAMPLES, b"avc1"], lambda content: content + colour)
    compare(file, 4)
    assert index_video(file).colours == ()
    file = write_video(tmp_path / "rotated.mp4", count=8)
    quarter = b"".join(number.to_bytes(4, signed=True) for number in (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30))
    rewrite(file, [*TRACK, b"tkhd"], lambda content: content[:40] + quarter + content[76:])
    compare(file, 4)


def test_sound_and_other_videos_beside(tmp_path: Path) -> None:
    """The first of two videos counts, and packets of others lie between its packets."""
    av = pytest.importorskip("av")
    file = tmp_path / "a.mp4"
    sources = [write_video(tmp_path / f"{k}.mp4", options={"g": "6"}, count=20, seed=k) for k in range(2)]
    with av.open(str(file), "w") as container:
        opened = [av.open(str(source)) for source in sources]
        streams = [container.add_stream_from_template(one.streams.video[0]) for one in opened]
        sound = container.add_stream("aac", rate=8000, layout="mono")
        for number, packets in enumerate(zip(*(one.demux(video=0) for one in opened), strict=True)):
            for packet, stream in zip(packets, streams, strict=True):
                if packet.size:
                    packet.stream = stream
                    container.mux(packet)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 8000, 1024 * number
            container.mux(sound.encode(frame))
        container.mux(sound.encode())
        for one in opened:
            one.close()
    compare(file, 20)
    np.testing.assert_array_equal(decoded(file)[0], decoded(sources[0])[0])


def test_other_containers_are_refused(tmp_path: Path) -> None:
    for suffix, name in (("mkv", "Matroska or WebM"), ("avi", "AVI"), ("ts", "MPEG-TS")):
        file = write_video(tmp_path / f"a.{suffix}", count=4, options={"g": "6"})
        with pytest.raises(DataError, match=rf"a\.{suffix}: expected MP4 or MOV, found {name}; .* -c copy"):
            index_video(file)


def test_a_size_that_changes_is_refused(tmp_path: Path) -> None:
    small = write_video(tmp_path / "small.mp4", options={"g": "5"}, count=10, side=(32, 64))
    file = write_video(tmp_path / "a.mp4", options={"g": "5"}, count=10)
    later, sets = packets_and_sets(small)
    both = copy_packets(file, tmp_path / "both.mp4", lambda packets: joined(packets, later, sets))
    index = index_video(both)
    out = np.zeros((1, 48, 64, 3), np.uint8)
    FrameDecoder().decode([index], [0], [3], out)
    np.testing.assert_array_equal(out[0], decoded(file)[0][3])
    with pytest.raises(DataError, match=r"both\.mp4, frame 1\d: expected frames of 48x64, found 32x64"):
        FrameDecoder().decode([index], [0], [14], out)


@pytest.mark.parametrize("brought", [0, 1, 3])
def test_sets_that_come_on_the_way_and_are_not_repeated(tmp_path: Path, brought: int) -> None:
    """From a group on, pictures are of the set that a packet before it brought, under the number of the header's."""
    first, other = (
        write_video(tmp_path / f"{qp}.mp4", options={"g": "5", "x264-params": f"qp={qp}:scenecut=0:bframes=2"}, count=n)
        for qp, n in ((20, 10), (34, 20))
    )
    later, sets = packets_and_sets(other)
    assert packets_and_sets(first)[1] != sets

    def both(packets: list[Any]) -> list[Any]:
        # Behind the last picture of a packet, so that they count from the next one on.
        place = len(packets) - 1 - brought
        packets = [with_content(one, bytes(one) + (sets if k == place else b"")) for k, one in enumerate(packets)]
        return joined(packets, later)

    assert_same_or_refused(copy_packets(first, tmp_path / "joined.mp4", both))


def assert_same_or_refused(file: Path) -> None:
    """Compare every frame, decoded by itself, with the one of its time, or see that the frame is refused."""
    av = pytest.importorskip("av")
    index = index_video(file)
    with av.open(str(file)) as container:
        try:
            wanted = {frame.pts: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}
        except av.error.FFmpegError:
            pytest.skip("FFmpeg does not decode it in turn")
    decoder, out = FrameDecoder(), np.zeros((1, index.height, index.width, 3), np.uint8)
    for frame, time in enumerate(index.pts[index.packet].tolist()):
        try:
            decoder.decode([index], [0], [frame], out)
        except DataError as error:
            assert str(file) in str(error)  # noqa: PT017
            continue
        np.testing.assert_array_equal(out[0], wanted[time], err_msg=f"frame {frame}")


@pytest.mark.parametrize(
    "kind",
    ["short groups with B frames", "every second frame a key", "pyramid of B frames", "HEVC with open groups"],
)
def test_packets_that_were_lost_on_the_way(tmp_path: Path, kind: str) -> None:
    """What a decoder shows instead depends on all that it saw; a frame is that one, or refused."""
    file = write_video(tmp_path / "a.mp4", **KINDS[kind])
    for lost in (1, 3, 7):
        rest = copy_packets(file, tmp_path / f"{lost}.mp4", lambda packets, n=lost: packets[:n] + packets[n + 1 :])
        assert_same_or_refused(rest)


def test_frames_that_refer_to_a_broken_one_are_refused(tmp_path: Path) -> None:
    """A slice was lost before the file was indexed: FFmpeg fills it up, and shows what is made of it without a word."""
    options = {"g": "8", "x264-params": "slices=3:bframes=2:b-adapt=0:scenecut=0"}
    file = write_video(tmp_path / "a.mp4", options=options, count=24)
    index, wanted, content = index_video(file), decoded(file)[0], bytearray(file.read_bytes())
    (group, *_), broken = np.unique(index.start)[1:], 4  # the second group, and its fifth packet, which others refer to
    assert index.referenced[group + broken]
    place = int(index.position[group + broken])
    place += 4 + int.from_bytes(content[place : place + 4])  # its second slice
    content[place + 4] |= 31  # is of a kind that nobody knows
    (tmp_path / "b.mp4").write_bytes(content)
    index, out, refused = index_video(tmp_path / "b.mp4"), np.zeros((1, *wanted.shape[1:]), np.uint8), []
    for frame in range(24):
        try:
            FrameDecoder().decode([index], [0], [frame], out)
        except DataError as error:
            refused.append(int(index.packet[frame]))
            assert "b.mp4, frame" in str(error)  # noqa: PT017
            continue
        np.testing.assert_array_equal(out[0], wanted[frame])
    # Some of these are shown before it.
    assert sorted(refused) == [group + k for k in range(broken, 8)]
    order = index.packet.tolist()
    assert order.index(group + broken) > order.index(min(set(refused) - {group + broken}))


def test_packets_without_a_picture_are_no_frames(tmp_path: Path) -> None:
    """A delimiter by itself, with a time of its own, of which FFmpeg says that a frame is missing."""
    file = write_video(tmp_path / "a.mp4", options={"g": "6", "bf": "0"}, count=12)

    def add(packets: list[Any]) -> list[Any]:
        packet = with_content(packets[7], b"\0\0\0\2\x09\xf0")
        packet.pts, packet.dts, packet.is_keyframe = packet.pts + 100, packet.dts + 100, False
        return [*packets[:8], packet, *packets[8:]]

    copied = copy_packets(file, tmp_path / "b.mp4", add)
    index, wanted, out = index_video(copied), decoded(file)[0], np.zeros((1, 48, 64, 3), np.uint8)
    assert len(index) == len(wanted)
    for frame in range(12):
        FrameDecoder().decode([index], [0], [frame], out)
        np.testing.assert_array_equal(out[0], wanted[frame])


def test_the_end_of_a_sequence_of_hevc(tmp_path: Path) -> None:
    """Behind one, pictures that lead in an entry are not shown, as at the beginning of a file.

    FFmpeg throws away what it has not shown by then, too, which is here.
    """
    file = write_video(tmp_path / "a.mp4", **KINDS["HEVC with open groups"])

    def end(packets: list[Any]) -> list[Any]:
        keys = [place for place, packet in enumerate(packets) if packet.is_keyframe]
        there = [b"\0\0\0\2\x48\x01" if place == keys[2] - 1 else b"" for place in range(len(packets))]
        return [with_content(one, bytes(one) + more) for one, more in zip(packets, there, strict=True)]

    copied = copy_packets(file, tmp_path / "b.mp4", end)
    index = index_video(copied)
    assert len(index) == 28
    before, out = dict(zip(decoded(file)[1], decoded(file)[0], strict=True)), np.zeros((1, 48, 64, 3), np.uint8)
    assert set(decoded(copied)[1]) < set(index.times.tolist()) < set(before)
    for frame, time in enumerate(index.times.tolist()):
        FrameDecoder().decode([index], [0], [frame], out)
        np.testing.assert_array_equal(out[0], before[time])
