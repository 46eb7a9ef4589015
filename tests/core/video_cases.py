"""Videos of many kinds, and what decoding each from its beginning gives."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import Field
from mouse_core.metadata import DatasetMetadata, with_metadata
from mouse_core.video import index_video

SIDE = (48, 64)
_UNEVEN = np.cumsum(np.random.default_rng(0).integers(5, 90, 64))
_QUIET = "log-level=none:pools=none:frame-threads=1"


def _x265(options: str) -> dict[str, Any]:
    return {"codec": "libx265", "options": {"x265-params": f"{options}:{_QUIET}"}}


# The arguments of `write_video` by kind. `cut` says how the file is cut from the one so written, see `cut_video`.
KINDS: dict[str, dict[str, Any]] = {
    "every second frame a key": {"options": {"g": "2", "bf": "0"}},
    "pyramid of B frames": {"options": {"g": "250", "x264-params": "bframes=5:b-pyramid=normal:ref=4:b-adapt=0"}},
    "short groups with B frames": {"options": {"g": "12", "x264-params": "bframes=3:b-pyramid=strict:scenecut=0"}},
    "open groups": {"options": {"g": "10", "x264-params": "open-gop=1:bframes=3:scenecut=0:b-adapt=0"}},
    "refreshed in columns": {"options": {"g": "10", "x264-params": "intra-refresh=1:scenecut=0"}},
    "at uneven times": {"options": {"g": "12"}, "times": _UNEVEN},
    "beginning late": {"options": {"g": "12"}, "times": 5000 + 33 * np.arange(64)},
    "in fragments": {"options": {"g": "12"}, "muxing": {"movflags": "frag_keyframe+empty_moov"}},
    "in a fragment a frame": {
        "options": {"g": "12"},
        "muxing": {"movflags": "frag_every_frame+empty_moov+default_base_moof"},
    },
    "without an edit list": {"options": {"g": "12"}, "muxing": {"use_editlist": "0"}},
    "tables first": {"options": {"g": "12"}, "muxing": {"movflags": "faststart+negative_cts_offsets"}},
    "cut at a key": {"options": {"g": "8", "x264-params": "scenecut=0"}, "cut": "key"},
    "cut by an edit list": {"options": {"g": "12"}, "cut": "edit"},
    "full colours": {"options": {"g": "6"}, "pixels": "yuv444p"},
    "10 bits": {"options": {"g": "6"}, "pixels": "yuv420p10le"},
    "in slices": {"options": {"g": "8", "x264-params": "slices=3"}},
    "interlaced": {"options": {"g": "8", "x264-params": "interlaced=1"}},
    "HEVC": _x265("keyint=8:open-gop=0:bframes=3"),
    "HEVC with open groups": _x265("keyint=8:min-keyint=8:open-gop=1:bframes=4:b-adapt=0:scenecut=0"),
    "HEVC cut in an open group": _x265("keyint=8:min-keyint=8:open-gop=1:bframes=4:b-adapt=0:scenecut=0")
    | {"cut": "key"},
    "HEVC in temporal layers": _x265("keyint=12:temporal-layers=1:bframes=4:b-adapt=0:b-pyramid=1"),
    "HEVC with repeated headers": _x265("keyint=8:repeat-headers=1:open-gop=1:bframes=3"),
    "AV1": {"codec": "libsvtav1", "options": {"g": "2", "preset": "12", "crf": "40"}},
    "AV1 with grain": {"codec": "libsvtav1", "options": {"g": "16", "preset": "10", "svtav1-params": "film-grain=20"}},
}


def pictures(count: int, seed: int = 0, side: tuple[int, int] = SIDE) -> np.ndarray:
    """Patterns that move: ``[count, H, W, 3]`` uint8."""
    height, width = side
    blocks = np.random.default_rng(seed).integers(0, 255, (height // 8, width // 8, 3))
    base = blocks.repeat(8, 0).repeat(8, 1)
    found = np.stack([np.roll(base, (k, 2 * k), (0, 1)) for k in range(count)])
    found[..., 0] += 2 * np.arange(height)[:, None] + 3 * np.arange(count)[:, None, None]
    return (found % 256).astype(np.uint8)


def write_video(
    file: Path,
    *,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    pixels: str = "yuv420p",
    times: Sequence[int] | np.ndarray | None = None,
    muxing: dict[str, str] | None = None,
    count: int = 30,
    seed: int = 0,
    side: tuple[int, int] = SIDE,
    cut: str | None = None,
) -> Path:
    """Write a video; skip the test where PyAV has no encoder for it. ``times`` are ms; ``cut``: see ``cut_video``."""
    av = pytest.importorskip("av")
    try:
        av.Codec(codec, "w")
    except av.codec.codec.UnknownCodecError:
        pytest.skip(f"PyAV has no encoder {codec}")
    whole = file.with_name(f"whole_{file.name}") if cut else file
    with av.open(str(whole), "w", options=muxing or {}) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = side
        stream.pix_fmt, stream.options = pixels, options or {}
        stream.codec_context.time_base = Fraction(1, 1000)
        stream.codec_context.thread_count = 1
        for number, picture in enumerate(pictures(count, seed, side)):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pixels)
            frame.time_base, frame.pts = Fraction(1, 1000), 40 * number if times is None else int(times[number])
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return cut_video(whole, file, cut) if cut else file


def cut_video(whole: Path, file: Path, cut: str) -> Path:
    """The same packets from the second key frame on ("key"), or all of them, shown from the fifth frame on ("edit")."""

    def keep(packets: list[Any]) -> list[Any]:
        keys = [place for place, packet in enumerate(packets) if packet.is_keyframe]
        kept = packets[keys[1] :] if cut == "key" else packets
        shift = kept[0].dts if cut == "key" else sorted(packet.pts for packet in packets)[5]
        for packet in kept:
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        return kept

    return copy_packets(whole, file, keep)


def copy_packets(whole: Path, file: Path, keep: Callable[[list[Any]], list[Any]]) -> Path:
    """A video of packets that a function makes of those of another."""
    av = pytest.importorskip("av")
    with av.open(str(whole)) as source, av.open(str(file), "w", options={"avoid_negative_ts": "disabled"}) as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in keep([packet for packet in source.demux(video=0) if packet.size]):
            packet.stream = stream
            container.mux(packet)
    return file


def with_content(packet: Any, content: bytes) -> Any:
    made = pytest.importorskip("av").Packet(content)
    made.pts, made.dts, made.time_base = packet.pts, packet.dts, packet.time_base
    made.is_keyframe = packet.is_keyframe
    return made


def packets_and_sets(file: Path) -> tuple[list[Any], bytes]:
    """The packets of an H.264 video, and the parameter sets of its header, each behind four bytes of length.

    In the header (avcC) it stands how many there are, and each behind two bytes of length, twice.
    """
    av = pytest.importorskip("av")
    with av.open(str(file)) as container:
        header = bytes(container.streams.video[0].codec_context.extradata)
        packets = [packet for packet in container.demux(video=0) if packet.size]
    sets, place = b"", 6
    for _ in range(2):
        size = int.from_bytes(header[place : place + 2])
        sets += size.to_bytes(4) + header[place + 2 : place + 2 + size]
        place += 2 + size + 1
    return packets, sets


def joined(packets: list[Any], later: list[Any], sets: bytes = b"") -> list[Any]:
    """Packets, and behind them those of another video, whose keys bring parameter sets along."""
    end = max(one.pts for one in packets) + 640 - min(later[0].pts, later[0].dts)
    behind = [with_content(one, (sets if one.is_keyframe else b"") + bytes(one)) for one in later]
    for made in behind:
        made.pts, made.dts, made.time_base = made.pts + end, made.dts + end, packets[0].time_base
    return [*packets, *behind]


def decoded(file: Path) -> tuple[np.ndarray, list[float]]:
    """All frames of a video in turn, ``[frames, H, W, 3]``, and when each is shown, in seconds."""
    av = pytest.importorskip("av")
    with av.open(str(file)) as container:
        frames = list(container.decode(video=0))
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames]), [frame.time for frame in frames]


def frames_of(video: Any, frame: Sequence[int | None] | np.ndarray) -> pa.StructArray:
    """A column of frames: which video each is of, and which frame of it, None for no frame."""
    columns = pa.array(video, pa.int32()), pa.array(frame, pa.int32())
    return pa.StructArray.from_arrays(columns, ["video", "frame"])


def video_rows(
    folder: Path, cameras: Mapping[str, Any], *, videos: int, fields: Sequence[Field] | None = None
) -> pa.Table:
    """Rows that show frames of the videos 0.mp4, 1.mp4, ... of a folder, an episode a video; by column which frames."""
    count = len(next(iter(cameras.values())))
    step = np.tile(np.arange(count), videos)
    columns = {
        "action": np.arange(videos * count) % 4,
        "reward": step.astype(np.float32),
        "done": np.where(step == count - 1, 1, 0),
        "episode_step": step,
    }
    which = np.repeat(np.arange(videos), count)
    for name, frames in cameras.items():
        columns[name] = frames_of(which, list(frames) * videos)
    made = [Field(name, image=True) for name in cameras] if fields is None else fields
    listed = [(f"{k}.mp4", index_video(folder / f"{k}.mp4").digest) for k in range(videos)]
    return with_metadata(pa.table(columns), DatasetMetadata("arrived", fields=made, videos=listed))
