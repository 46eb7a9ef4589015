"""DreamerV3's replay, written as its Chunk and Driver do (embodied/core, 2025), against what environments returned."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, SchemaError, formats
from mouse_core.formats.dreamerv3 import read_dreamerv3
from tests.core.formats.recording import Counting, Episode, check_rows, ends_of, record, suite

LENGTHS = (4, -3, 1, -1, 9, 2)


def steps_of(log: Episode, *, kind: str = "image") -> list[dict[str, Any]]:
    """What the driver stores of an episode: the action of its last step is zeros."""
    steps = []
    for number, observation in enumerate(log.observations):
        last = number == len(log)
        action = log.actions[number] if not last else np.zeros_like(log.actions[0])
        flags = {"is_first": number == 0, "is_last": last, "is_terminal": last and log.terminated[-1], "reset": last}
        step = {kind: observation, "reward": np.float32(log.rewards[number - 1] if number else 0)}
        step |= {name: np.bool_(flag) for name, flag in flags.items()} | {"action": np.asarray(action)}
        steps.append(step | {"dyn/deter": np.full(3, number, np.float32), "stepid": np.zeros(20, np.uint8)})
    return steps


def identity(number: int) -> str:
    """As ``elements.UUID`` shows a number: 22 digits."""
    return f"{number:022d}"


def write_replay(
    folder: Path, streams: list[list[dict[str, Any]]], *, size: int = 5, skip: int = 0, first: int = 1
) -> list[Path]:
    """The streams of some environments, whose pieces lie side by side; ``skip`` pieces of each were removed."""
    folder.mkdir(exist_ok=True)
    paths, number = [], first
    for worker, steps in enumerate(streams):
        pieces = [steps[at : at + size] for at in range(0, len(steps), size)]
        for place, piece in enumerate(pieces):
            following = number + 1 if place + 1 < len(pieces) else 10_000 + number  # one that was not filled
            name = f"20250102T03{place:02d}00F{worker:06d}-{identity(number)}-{identity(following)}-{len(piece)}.npz"
            if place >= skip:
                arrays = {key: np.stack([step[key] for step in piece]) for key in piece[0]}
                np.savez_compressed(folder / name, **arrays)
                paths.append(folder / name)
            number += 1
    return paths


def logs_of(lengths: tuple[int, ...] = LENGTHS, kind: str = "image") -> list[Episode]:
    return list(record(Counting(lengths, kind), len(lengths)))


def stream(logs: list[Episode], **options: Any) -> list[dict[str, Any]]:
    return [step for log in logs for step in steps_of(log, **options)]


@pytest.mark.parametrize(("kind", "size"), [("image", 5), ("vector", 1), ("vector", 1000)])
def test_rows_are_what_the_environments_returned(kind: str, size: int, tmp_path: Path) -> None:
    logs = logs_of(kind=kind)
    write_replay(tmp_path, [stream(logs[:4], kind=kind), stream(logs[4:], kind=kind)], size=size)
    rows = formats.open(tmp_path)
    assert rows.format == "dreamerv3"
    table = rows.to_table()
    assert rows.rows == table.num_rows
    assert table.column("metadata_dyn_deter").to_pylist()[1] == [1, 1, 1]
    assert "metadata_stepid" not in table.column_names
    check_rows(table.drop_columns(["metadata_dyn_deter"]), logs)
    assert read_dreamerv3(tmp_path, batch_rows=2).digest() == rows.digest()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_whatever_the_pieces_are(lengths: list[int], size: int, dropped: bool, abandoned: int) -> None:
    steps = stream(logs_of(tuple(lengths), "vector"), kind="vector")
    if abandoned:  # the environment was begun anew before an episode was over
        steps = [step for number, step in enumerate(steps) if not step["is_last"] or number % 2 == 0]
    if dropped:
        steps = steps[:-1] or steps
    with tempfile.TemporaryDirectory() as folder:
        write_replay(Path(folder), [steps], size=size)
        table = read_dreamerv3(folder).to_table()
    wanted, number = [], 0
    for place, step in enumerate(steps):
        following = steps[place + 1] if place + 1 < len(steps) else None
        begins = place == 0 or wanted[-1][2] != 0
        number = 0 if begins else number + 1
        ends = step["is_last"] or following is None or following["is_first"]
        code = 0 if not ends else 1 if step["is_last"] and step["is_terminal"] else 2
        before = np.zeros_like(step["action"]) if begins else steps[place - 1]["action"]
        wanted.append((before.tolist(), 0 if begins else float(step["reward"]), code, number, step["vector"].tolist()))
    names = ("action", "reward", "done", "episode_step", "observation")
    assert list(zip(*(table.column(name).to_pylist() for name in names), strict=True)) == wanted


def test_a_stream_whose_beginning_was_removed(tmp_path: Path) -> None:
    logs = logs_of((9,), "vector")
    write_replay(tmp_path, [stream(logs, kind="vector")], size=4, skip=1)
    table = read_dreamerv3(tmp_path).to_table()
    assert table.column("episode_step").to_pylist() == [*range(6)]
    assert table.column("observation").to_pylist() == [value.tolist() for value in logs[0].observations[4:]]
    assert table.column("reward").to_pylist() == [0, *map(float, logs[0].rewards[4:])]


def test_several_observations_and_actions(tmp_path: Path) -> None:
    steps = stream(logs_of(kind="vector"), kind="vector")
    many = [
        {**step, "log_entropy": np.float32(1), "turn": np.int32(n), "camera": np.full((4, 5, 3), n, np.uint8)}
        for n, step in enumerate(steps)
    ]
    write_replay(tmp_path, [many])
    rows = read_dreamerv3(tmp_path, actions=["action", "turn"])
    assert rows.schema.names == [
        "action.action", "action.turn", "reward", "done", "episode_step",
        "observation.vector", "observation.camera", "metadata_dyn_deter", "metadata_log_entropy",
    ]  # fmt: skip
    assert rows.to_table().column("action.turn").to_pylist()[:4] == [0, 0, 1, 2]
    with pytest.raises(ConfigError, match=r"expected arrays .*'push'"):
        read_dreamerv3(tmp_path, actions=["push"])


def test_pieces_that_do_not_go_together(tmp_path: Path) -> None:
    steps = stream(logs_of(kind="vector"), kind="vector")
    paths = write_replay(tmp_path / "a", [steps])
    said = paths[1].name
    paths[1].rename(paths[1].with_name(said.replace("-5.npz", "-6.npz")))
    with pytest.raises(DataError, match=r"expected 6 steps, as in the file's name, found shape \[5\]"):
        read_dreamerv3(tmp_path / "a").to_table()
    paths = write_replay(tmp_path / "b", [steps])
    paths[1].rename(paths[1].with_name(paths[1].name.replace(identity(3), identity(2))))
    with pytest.raises(DataError, match="which follow several"):
        read_dreamerv3(tmp_path / "b")
    paths = write_replay(tmp_path / "c", [steps[:5]])
    paths[0].rename(paths[0].with_name(paths[0].name.replace(identity(10_001), identity(1))))
    with pytest.raises(DataError, match="circle of chunks that follow each other"):
        read_dreamerv3(tmp_path / "c")
    paths = write_replay(tmp_path / "d", [steps[:9]])
    (tmp_path / "d" / paths[0].name.replace("F0", "F9")).write_bytes(paths[0].read_bytes())
    with pytest.raises(DataError, match="expected chunks of different names"):
        read_dreamerv3(tmp_path / "d")
    write_replay(tmp_path / "e", [steps[:5], [{**step, "more": np.float32(1)} for step in steps[:5]]])
    with pytest.raises(SchemaError, match=r"expected the arrays of the first file, found different arrays: \['more'\]"):
        read_dreamerv3(tmp_path / "e").to_table()
    (tmp_path / "f").mkdir()
    with pytest.raises(ConfigError, match=r"expected files TIME-ID-FOLLOWING-LENGTH.npz"):
        read_dreamerv3(tmp_path / "f")
    outside = write_replay(tmp_path / "g", [steps[:5]])[0]
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / outside.name).symlink_to(outside)
    with pytest.raises(DataError, match="found a link to"):
        read_dreamerv3(tmp_path / "h")
    write_replay(tmp_path / "i", [[{key: step[key] for key in ("vector", "action", "reward")} for step in steps]])
    with pytest.raises(ConfigError, match=r"expected arrays .*'is_first'"):
        read_dreamerv3(tmp_path / "i")
    (tmp_path / "j").mkdir()
    arrays = {key: np.stack([step[key] for step in steps[:5]]) for key in steps[0]}
    np.savez(tmp_path / "j" / outside.name, **arrays, x=np.array([{}] * 5, object))
    with pytest.raises(DataError, match="x: expected one or more numbers per step"):
        read_dreamerv3(tmp_path / "j")


def replay(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Path:
    write_replay(folder, [stream(logs_of(lengths, "vector"), kind="vector")])
    return folder


TestDreamerV3 = suite(ends_of(LENGTHS), replay, read_dreamerv3)
