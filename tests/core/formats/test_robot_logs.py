"""Recordings of robots, by the writers of MCAP and rosbags, against plain Python over the same logs."""

import contextlib
import io
import math
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, formats
from mouse_core.cli import main
from mouse_core.formats.robot_logs import TopicLayout, decoder, matched, read_robot_logs, topics_in
from tests.core.damaged_files import damaged_copies
from tests.core.formats.recording import suite
from tests.core.formats.robots import T0, Log, image, joints, message, numbers, typestore, write_bag, write_mcap

pytest.importorskip("mcap")
pytest.importorskip("rosbags")

MS = 10**6
STATE = {"observation": "/joints.position", "action": "/command.data", "tolerance": 0.02}


def log_of(*, steps: int = 40, seed: int = 0) -> Log:
    """Joints at about 100 Hz and commands at about 30, at times of no rhythm; stamps 3 ms before the recording."""
    rng = np.random.default_rng(seed)
    times = T0 + np.cumsum(rng.integers(5 * MS, 15 * MS, steps))
    log: Log = [("/joints", int(time), joints(int(time) - 3 * MS, [n, -n])) for n, time in enumerate(times)]
    times = T0 + np.cumsum(rng.integers(20 * MS, 40 * MS, steps // 3))
    log += [("/command", int(time), numbers([n, 0.5])) for n, time in enumerate(times)]
    return sorted(log, key=lambda one: one[1])


def times_of(log: Log, topic: str) -> list[int]:
    return [time for name, time, _ in log if name == topic]


def nearest(times: list[int], tick: int, match: str, tolerance: float) -> int | None:
    """Which message, by looking at all."""
    best = None
    for place, time in enumerate(times):
        if match == "hold" and time > tick:
            continue
        later_is_newer = match == "hold" or time == times[best or 0]
        if best is None or abs(time - tick) < abs(times[best] - tick) or (later_is_newer and time >= times[best]):
            best = place
    return best if best is not None and abs(times[best] - tick) <= tolerance * 1e9 else None


def column(rows: Any, name: str) -> list[Any]:
    return rows.to_table().column(name).to_pylist()


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.lists(st.integers(-5, 70), min_size=1, max_size=12),
    st.sampled_from(["nearest", "hold"]),
    st.sampled_from([0, 3e-9, 1e-8, math.inf]),
)
def test_a_tick_has_the_message_that_plain_python_finds(
    times: list[int], ticks: list[int], match: str, tolerance: float
) -> None:
    found, away = matched(np.sort(times), np.array(ticks), match, tolerance)
    for tick, place, far in zip(ticks, found.tolist(), away.tolist(), strict=True):
        wanted = nearest(sorted(times), tick, match, tolerance)
        if wanted is None:
            assert place == -1
        else:
            assert sorted(times)[place] == sorted(times)[wanted]
            assert far == abs(sorted(times)[place] - tick)


@pytest.mark.parametrize("match", ["nearest", "hold"])
@pytest.mark.parametrize("stamps", ["log", "header"])
def test_rows_are_those_of_a_plain_loop(match: str, stamps: str, tmp_path: Path) -> None:
    log = log_of()
    path = write_mcap(tmp_path / "x.mcap", log)
    layout = STATE | {"rate": 20, "match": match, "stamps": stamps, "tolerance": 0.04, "trim": 1}
    rows = formats.open(path, format=layout)
    late = 3 * MS if stamps == "header" else 0
    seen = [time - late for time in times_of(log, "/joints")]
    told = times_of(log, "/command")  # which has no header
    anchor = max(seen[0], told[0])
    ticks = [anchor + n * 50 * MS for n in range(-20, 60)]
    ticks = [tick for tick in ticks if min(seen[0], told[0]) <= tick <= max(seen[-1], told[-1])]
    pairs = [(nearest(seen, tick, match, 0.04), nearest(told, tick, match, 0.04)) for tick in ticks]
    pairs = [pair for pair in pairs if None not in pair]
    assert column(rows, "observation") == [[n, -n] for n, _ in pairs]
    assert column(rows, "action") == [[0, 0], *[[n, 0.5] for _, n in pairs[:-1]]]
    assert column(rows, "done") == [*[0] * (len(pairs) - 1), 2]
    assert column(rows, "episode_step") == [*range(len(pairs))]
    assert np.allclose(column(rows, "metadata_timestamp"), 0.05 * np.arange(len(pairs)))
    assert rows.rows == len(pairs)


def test_a_topic_is_the_clock(tmp_path: Path) -> None:
    log = log_of()
    rows = formats.open(write_mcap(tmp_path / "x.mcap", log), format=STATE | {"clock": "/command", "match": "hold"})
    told, seen = times_of(log, "/command"), times_of(log, "/joints")
    ticks = [tick for tick in told if nearest(seen, tick, "hold", 0.02) is not None]
    assert column(rows, "observation") == [[n, -n] for n in (nearest(seen, tick, "hold", 0.02) for tick in ticks)]
    assert np.allclose(column(rows, "metadata_timestamp"), (np.array(ticks) - ticks[0]) / 1e9)
    assert any("message of /command" in note for note in rows.notes)


def test_pieces_make_no_difference(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "x.mcap", log_of())
    layout = STATE | {"rate": 20, "alignment": {"reward": "arrived"}, "reward": "/command.data[0]"}
    whole = formats.open(path, format=layout).to_table()
    assert formats.open(path, format=layout, batch_rows=3).digest() == formats.base.rows_digest(whole)
    reward, action = whole.column("reward").to_pylist(), whole.column("action").to_pylist()
    assert reward[0] == 0
    assert reward[1:-1] == [one[0] for one in action[2:]]  # what arrived at a tick, and what left it


def with_a_hole(topic: str = "/joints", first: int = 150, last: int = 300) -> Log:
    return [one for one in log_of() if one[0] != topic or not T0 + first * MS < one[1] < T0 + last * MS]


def test_what_is_out_of_tolerance_is_refused_by_name(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "x.mcap", with_a_hole())
    with pytest.raises(DataError, match=r"x.mcap: /joints.position: expected a message within 0.02 s of the step at"):
        formats.open(path, format=STATE | {"rate": 20})
    with pytest.raises(DataError, match="last one before"):
        formats.open(path, format=STATE | {"rate": 20, "match": "hold", "tolerance": 0.04})


def test_a_gap_cuts_the_episode(tmp_path: Path) -> None:
    log = with_a_hole()
    rows = formats.open(write_mcap(tmp_path / "x.mcap", log), format=STATE | {"clock": "/command", "gaps": "cut"})
    seen, told = times_of(log, "/joints"), times_of(log, "/command")
    value = [int(one.position[0]) for topic, _, one in log if topic == "/joints"]
    places = [nearest(seen, tick, "nearest", 0.02) for tick in told]
    whole = [None if place is None else value[place] for place in places]
    runs: list[list[int]] = [[]]
    for place in whole:
        runs = [*runs, []] if place is None else [*runs[:-1], [*runs[-1], place]]
    runs = [run for run in runs if len(run) > 1]
    assert len(runs) == 2
    assert column(rows, "observation") == [[n, -n] for run in runs for n in run]
    assert column(rows, "done") == [code for run in runs for code in [*[0] * (len(run) - 1), 2]]
    assert column(rows, "episode_step") == [n for run in runs for n in range(len(run))]
    assert column(rows, "action")[len(runs[0])] == [0, 0]
    assert any("ticks are left out" in note for note in rows.notes)


def test_only_so_much_of_a_recordings_ends_may_lack_a_topic(tmp_path: Path) -> None:
    log = [one for one in log_of() if one[0] == "/joints" or one[1] > T0 + 200 * MS]
    path, layout = write_mcap(tmp_path / "x.mcap", log), STATE | {"rate": 50, "tolerance": 0.03}
    assert column(formats.open(path, format=layout | {"trim": 0.3}), "observation")[0][0] > 10
    with pytest.raises(DataError, match=r"/command.data: expected a message within .* trim=0.1\d* leaves out this"):
        formats.open(path, format=layout | {"trim": 0.1})
    dropped = [one for one in log_of() if one[0] == "/joints" or one[1] < T0 + 200 * MS]
    path = write_mcap(tmp_path / "y.mcap", dropped)
    with pytest.raises(DataError, match="of a recording's end"):
        formats.open(path, format=layout | {"trim": 0.1})


def test_a_message_that_came_once_is_held_where_that_is_said(tmp_path: Path) -> None:
    log = [("/task", T0 - 10**9, message("std_msgs/String", data="pick")), *log_of()]
    path = write_mcap(tmp_path / "x.mcap", log)
    layout = STATE | {"rate": 20, "metadata": {"task": "/task.data"}, "tolerance": 0.04}
    with pytest.raises(DataError, match=r"/task.data: expected a message within 0.04 s"):
        formats.open(path, format=layout)
    held = layout | {"match": {"/task": "hold"}, "tolerance": {"observation": 0.04, "action": 0.04, "/task": math.inf}}
    assert set(column(formats.open(path, format=held | {"trim": 2}), "metadata_task")) == {"pick"}


def test_a_topic_says_when_episodes_run_and_how_they_end(tmp_path: Path) -> None:
    log: Log = []
    for n in range(30):
        log.append(("/joints", T0 + n * 10 * MS, joints(T0, [n, 0])))
        run = 1 if 3 <= n < 10 else 2 if 10 <= n < 14 else 3 if n > 20 else 0
        log.append(("/run", T0 + n * 10 * MS, message("std_msgs/Int32", data=run)))
        log.append(("/won", T0 + n * 10 * MS, message("std_msgs/Bool", data=n == 13)))
    layout = {
        "observation": "/joints.position", "episode": "/run.data", "terminated": "/won.data",
        "clock": "/joints", "tolerance": 0,
    }  # fmt: skip
    rows = formats.open(write_mcap(tmp_path / "x.mcap", log), format=layout)
    assert [value[0] for value in column(rows, "observation")] == [*range(3, 14), *range(21, 30)]
    assert column(rows, "done") == [*[0] * 6, 2, *[0] * 3, 1, *[0] * 8, 2]
    assert column(rows, "episode_step") == [*range(7), *range(4), *range(9)]


def test_every_recording_of_a_folder_is_an_episode(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_mcap(tmp_path / f"episode_{number}.mcap", log_of(seed=number))
    write_bag(tmp_path / "episode_3", log_of(seed=3), storage="mcap")
    layout = STATE | {"rate": 20}
    rows = formats.open(tmp_path, format=layout)
    names = ["episode_1.mcap", "episode_2.mcap", "episode_3", "episode_10.mcap"]
    assert [Path(name).name for name in rows.format_metadata["files"]] == names
    alone = [formats.open(tmp_path / name, format=layout).to_table() for name in names]
    assert column(rows, "observation") == [value for one in alone for value in one.column("observation").to_pylist()]
    few = formats.open(tmp_path, format=layout | {"files": "episode_1*.mcap"})
    assert len(few.format_metadata["files"]) == 2


def test_bags_are_what_the_mcap_file_is(tmp_path: Path) -> None:
    log, layout = log_of(), STATE | {"rate": 20}
    wanted = formats.open(write_bag(tmp_path / "bag", log, storage="mcap"), format=layout).digest()
    shuffled = [log[n] for n in np.random.default_rng(1).permutation(len(log))]
    kinds: list[dict[str, Any]] = [{"compression": "NONE"}, {"compression": "LZ4"}, {}, {"use_chunking": False}]
    for number, options in enumerate(kinds):
        messages = log if options else shuffled
        path = write_mcap(tmp_path / f"{number}.mcap", messages, **options)
        assert formats.open(path, format=layout).digest() == wanted, options
        assert topics_in(tmp_path / "bag") == topics_in(path)
    for name, options in {"db3": {}, "packed": {"storage": "mcap", "compressed": True}}.items():
        bag = write_bag(tmp_path / name, log, **options)
        for source in (bag, *bag.glob("*.db3")):
            with pytest.raises(ConfigError, match=rf"{source}: expected MCAP .*rosbags-convert --src"):
                formats.open(source, format=layout)
    described = tmp_path / "bag" / "metadata.yaml"
    described.write_text(described.read_text().replace("bag.mcap", "../../secret.mcap"))
    with pytest.raises(DataError, match=r"secret.mcap: expected a file that metadata.yaml lists, found none"):
        topics_in(tmp_path / "bag")


def of_values(kind: str, rng: np.random.Generator) -> Any:
    """A message full of values."""
    made: Any = message(kind)

    def fill(one: Any) -> Any:
        for name, (sort, what) in typestore().fielddefs[one.__msgtype__][1]:
            setattr(one, name, value(sort, what, getattr(one, name)))
        return one

    def value(sort: int, what: Any, now: Any) -> Any:
        if sort == 1:
            return "Größe"[: rng.integers(6)] if what[0] == "string" else np.array(rng.integers(0, 2), what[0]).item()
        if sort == 2:
            return fill(now)
        inner, count = what
        count = count if sort == 3 else int(rng.integers(0, 4))
        if inner[0] == 1 and inner[1][0] != "string":
            return rng.integers(0, 2, count).astype({"byte": "uint8", "char": "uint8"}.get(inner[1][0], inner[1][0]))
        if inner[0] == 1:
            return [value(*inner, "") for _ in range(count)]
        return [fill(message(inner[1].replace("/msg/", "/"))) for _ in range(count)]

    return fill(made)


def plain(one: Any) -> Any:
    """Messages of rosbags and of our reader as dicts, lists and numbers."""
    if hasattr(one, "__msgtype__"):
        one = {name: getattr(one, name) for name, _ in typestore().fielddefs[one.__msgtype__][1]}
    if isinstance(one, dict):
        return {name: plain(value) for name, value in one.items() if name != "structure_needs_at_least_one_member"}
    if isinstance(one, list | np.ndarray):
        return [plain(value) for value in one]
    return one.item() if isinstance(one, np.generic) else one


@pytest.mark.parametrize("little", [True, False])
def test_messages_are_decoded_as_rosbags_encodes_them(little: bool) -> None:
    rng = np.random.default_rng(0)
    for name in (
        "std_msgs/Float32MultiArray", "std_msgs/Int8", "geometry_msgs/PoseStamped", "nav_msgs/Odometry",
        "sensor_msgs/JointState", "sensor_msgs/Imu", "sensor_msgs/Joy", "sensor_msgs/CompressedImage",
        "trajectory_msgs/JointTrajectory", "tf2_msgs/TFMessage",
    ):  # fmt: skip
        kind = name.replace("/", "/msg/")
        text = typestore().generate_msgdef(kind, ros_version=2)[0]
        for _ in range(5):
            one = of_values(name, rng)
            data = bytes(typestore().serialize_cdr(one, kind, little_endian=little))
            assert plain(decoder(kind, "cdr", "ros2msg", text)(data)) == plain(one), name


def open_one(tmp_path: Path, made: list[Any], path: str, **more: Any) -> list[Any]:
    """The column of some messages, each a step."""
    log = [("/x", T0 + n * MS, one) for n, one in enumerate(made)]
    layout = {"observation": {"x": path}, "clock": "/x", "tolerance": 0, **more}
    return column(formats.open(write_mcap(tmp_path / "x.mcap", log), format=layout), "observation.x")


def test_joints_are_taken_by_name(tmp_path: Path) -> None:
    arm = [joints(T0, [n, 10 + n], ["a", "b"]) for n in range(4)]
    swapped = [*arm[:2], joints(T0, [12, 2], ["b", "a"]), arm[3]]
    assert open_one(tmp_path, arm, "/x.position") == [[n, 10 + n] for n in range(4)]
    with pytest.raises(DataError, match=r"expected the same names of values as before, \['a', 'b'\]"):
        open_one(tmp_path, swapped, "/x.position")
    assert open_one(tmp_path, swapped, "/x.position[b, a]") == [[10 + n, n] for n in range(4)]
    # Another node says what the gripper does, on the same topic.
    both = [one for n in range(4) for one in (arm[n], joints(T0, [0.1 * n], ["grip"]))]
    wanted = [[0.0], *[[0.1 * n] for n in range(4) for _ in (0, 1)]][:8]
    assert open_one(tmp_path, both, "/x.position[grip]", tolerance=0.002) == wanted
    with pytest.raises(DataError, match=r"/x: expected messages with the names \['elbow'\]"):
        open_one(tmp_path, arm, "/x.position[elbow]")
    with pytest.raises(DataError, match="expected a value for each of"):
        open_one(tmp_path, [joints(T0, [1], ["a", "b"])] * 2, "/x.position[a]")


def test_images_of_all_encodings(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 255, (3, 4, 3)).astype(np.uint8)
    wide = rng.integers(0, 60_000, (3, 4, 1)).astype(np.uint16)
    depth = rng.random((3, 4, 1)).astype(np.float32)
    cases = [
        (colour, "rgb8", colour, {}),
        (colour, "bgr8", colour[:, :, ::-1], {}),
        (np.dstack([colour, colour[:, :, :1]]), "bgra8", np.dstack([colour[:, :, ::-1], colour[:, :, :1]]), {}),
        (colour[:, :, :1], "mono8", colour[:, :, :1], {}),
        (wide, "16UC1", wide, {}),
        (wide.astype(">u2"), "mono16", wide, {"is_bigendian": 1}),
        (depth, "32FC1", depth, {}),
    ]
    for pixels, encoding, wanted, more in cases:
        found = open_one(tmp_path, [image(T0, pixels, encoding, **more)] * 2, "/x")
        assert np.array_equal(np.array(found[0], wanted.dtype), wanted), encoding
    # Rows may be longer than their pixels.
    padded = np.concatenate([colour.reshape(3, 12), np.full((3, 4), 9, np.uint8)], axis=1)
    one = message("sensor_msgs/Image", height=3, width=4, encoding="rgb8", step=16, data=padded.reshape(-1))
    assert np.array_equal(open_one(tmp_path, [one] * 2, "/x")[1], colour)
    for wrong in ({"encoding": "bayer_rggb8"}, {"step": 11}, {"height": 4}, {"width": 2**31}, {"height": 0}):
        with pytest.raises(DataError, match="/x"):
            open_one(tmp_path, [image(T0, colour, **({"encoding": "rgb8"} | wrong))] * 2, "/x")


def test_compressed_images(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    colour = np.random.default_rng(0).integers(0, 255, (6, 5, 3)).astype(np.uint8)

    def encoded(pixels: np.ndarray, kind: str, said: str) -> Any:
        stream = io.BytesIO()
        pillow.fromarray(pixels).save(stream, format=kind)
        return message("sensor_msgs/CompressedImage", format=said, data=np.frombuffer(stream.getvalue(), np.uint8))

    found = open_one(tmp_path, [encoded(colour, "PNG", "bgr8; png compressed bgr8")] * 2, "/x")
    assert np.array_equal(found[0], colour)
    found = open_one(tmp_path, [encoded(colour, "JPEG", "jpeg")] * 2, "/x")
    assert np.shape(found) == (2, 6, 5, 3)
    wide = np.array([[70, 60_000]], np.uint16)
    assert open_one(tmp_path, [encoded(wide, "PNG", "16UC1; png compressed")] * 2, "/x")[0] == [[[70], [60_000]]]
    for broken, wanted in (
        (encoded(colour, "PNG", "16UC1; compressedDepth"), "has an additional header"),
        (encoded(colour, "PNG", "h264"), "expected JPEG or PNG, found 'h264', a video frame that"),
        (message("sensor_msgs/CompressedImage", format="jpeg", data=np.zeros(9, np.uint8)), "/x"),
    ):
        with pytest.raises(DataError, match=wanted):
            open_one(tmp_path, [broken] * 2, "/x")


def test_paths_lead_into_messages(tmp_path: Path) -> None:
    point = {"x": 1.0, "y": 2.0, "z": 3.0}
    pose = message("geometry_msgs/PoseStamped", stamp=T0, pose={"position": point})
    assert open_one(tmp_path, [pose] * 2, "/x")[0] == [1, 2, 3, 0, 0, 0, 0]  # without its header
    assert open_one(tmp_path, [pose] * 2, "/x.pose.position")[0] == [1, 2, 3]
    assert open_one(tmp_path, [pose] * 2, "/x.pose.position.y")[0] == 2
    some = message("std_msgs/UInt8MultiArray", data=np.arange(5, dtype=np.uint8))
    assert open_one(tmp_path, [some] * 2, "/x.data[1:3]") == [[1, 2]] * 2
    assert open_one(tmp_path, [some] * 2, "/x.data[4]") == [4, 4]
    for path, found in (
        ("/x.data[5]", "expected at least 6 values, found 5"),
        ("/x.data[2:9]", "expected at least 9 values, found 5"),
        ("/x.datas", "expected a field 'datas'"),
        ("/x.data.more", "expected a field 'more'"),
        ("/x.data[a]", "expected messages with the names"),
        ("/y.data", r"/y: expected messages, found topics \['/x'\]"),
    ):
        with pytest.raises(DataError, match=found):
            open_one(tmp_path, [some] * 2, path)
    with pytest.raises(DataError, match="expected only numbers"):
        open_one(tmp_path, [joints(T0, [1, 2])] * 2, "/x")
    with pytest.raises(DataError, match="expected values of equal shape"):
        open_one(tmp_path, [numbers([1]), numbers([1, 2])], "/x.data")
    with pytest.raises(DataError, match=r"header.stamp: expected a time, found 0.*stamps='log'"):
        open_one(tmp_path, [joints(0, [1, 2])] * 2, "/x.position", stamps="header")


def test_layouts_of_no_use(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "x.mcap", log_of(steps=6))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"observation": None}, "observation: expected a path"),
        ({"rate": None}, "expected either rate"),
        ({"clock": "/joints"}, "expected either rate"),
        ({"rate": 0}, "rate: expected a number above 0"),
        ({"rate": math.nan}, "rate: expected a number"),
        ({"rate": "10"}, "rate: expected a number"),
        ({"rate": None, "clock": "/joints.position"}, "clock: expected a topic"),
        ({"tolerance": -1}, "tolerance: expected a number of seconds"),
        ({"tolerance": {"observation": 0.1}}, "tolerance: expected a value for action or /command"),
        ({"tolerance": {"/other": 0.1}}, "tolerance: expected roles or topics of the layout"),
        ({"match": "next"}, "match: expected one of"),
        ({"stamps": "both"}, "stamps: expected one of"),
        ({"gaps": "hold"}, "gaps: expected one of"),
        ({"trim": -1}, "trim: expected a number of seconds"),
        ({"alignment": {"metadata": "arrived"}}, "alignment: expected 'outgoing' or 'arrived'"),
        ({"reward": ["/a", "/b"]}, "reward: expected one path"),
        ({"observation": "joints position"}, "observation: expected a path as"),
        ({"observation": "/x.position[a][b]"}, "expected names in one pair of brackets"),
        ({"observation": ["/a.x", "/a.x"]}, "expected a path, different paths"),
        ({"files": "a/*.mcap"}, "files: expected names of recordings"),
        ({"rates": 10}, "expected only entries of"),
    ]
    for changes, found in wrong:
        with pytest.raises(ConfigError, match=found):
            formats.open(path, format={**STATE, "rate": 20, **changes})


def test_layouts_in_yaml_and_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_mcap(tmp_path / "x.mcap", log_of())
    layout = tmp_path / "layout.yaml"
    layout.write_text("version: 1\nobservation: /joints.position\naction: /command.data\nrate: 20\ntolerance: 0.02\n")
    wanted = formats.open(path, format=TopicLayout(**STATE, rate=20))
    assert formats.open(path, format=layout).digest() == wanted.digest()
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "/joints" in shown
    assert "sensor_msgs/msg/JointState" in shown
    assert "--format layout.yaml" in shown
    assert main(["inspect", str(path), "--format", str(layout)]) == 0
    assert "(robot_logs): 8 rows" in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "rows"), "--format", str(layout)]) == 0
    assert formats.open(tmp_path / "rows").digest() == wanted.digest()
    with pytest.raises(ConfigError, match="a layout that assigns topics to columns, found none for /command"):
        formats.open(path)
    layout.write_text("version: 1\nobservation: /joints.position\nrate: 20\n")
    with pytest.raises(ConfigError, match=r"layout.yaml: missing 1 required keyword-only argument: 'tolerance'"):
        formats.open(path, format=layout)
    with pytest.raises(ConfigError, match="expected MCAP files or bags of ROS 2, found none"):
        read_robot_logs(tmp_path / "rows", layout=STATE | {"rate": 1})


TOPICS = ((20, 2), (12, 2), (9, 2))


def write_topics(folder: Path) -> Path:
    for number, (steps, _) in enumerate(TOPICS):
        log = [("/joints", T0 + n * 10 * MS, joints(T0, [n, number])) for n in range(steps)]
        log += [("/command", T0 + n * 10 * MS + 1, numbers([n])) for n in range(steps)]
        write_mcap(folder / f"{number}.mcap", sorted(log, key=lambda one: one[1]))
    return folder


TestTopics = suite(TOPICS, write_topics, partial(read_robot_logs, layout=STATE | {"clock": "/joints"}))


def test_a_damaged_mcap_file_is_refused_or_gives_the_same_rows(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "x.mcap", log_of())
    (tmp_path / "copies").mkdir()
    wanted = formats.open(path, format=STATE | {"rate": 20}).digest()
    found = {wanted}
    for copy in damaged_copies(path, tmp_path / "copies", count=40):
        with contextlib.suppress(DataError):
            found.add(formats.open(copy, format=STATE | {"rate": 20}).digest())
    assert found == {wanted}


def test_the_crc_of_the_whole_is_compared(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "x.mcap", log_of(), use_chunking=False)
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack("<d", 7.0))
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="crc validation failed in DataEnd"):
        formats.open(path, format=STATE | {"rate": 20})


def test_other_encodings_are_refused_with_what_to_do(tmp_path: Path) -> None:
    from mcap.writer import Writer

    path = tmp_path / "x.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        channel = writer.register_channel("/x", "protobuf", writer.register_schema("a.B", "protobuf", b""))
        for n in range(3):
            writer.add_message(channel, log_time=T0 + n, publish_time=T0, data=b"\0")
        writer.finish()
    layout = {"observation": "/x", "clock": "/x", "tolerance": 0}
    with pytest.raises(DataError, match=r"a.B: expected messages in CDR .*, found 'protobuf' .*; read them with"):
        formats.open(path, format=layout)
    assert topics_in(path)[0].encoding == "protobuf"
