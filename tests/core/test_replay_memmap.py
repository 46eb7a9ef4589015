"""Mapped buffers that several processes write and read, and processes that are killed while they do."""

import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, StateError
from mouse_core.errors import StorageError
from mouse_core.files.checkpoint import write_checkpoint
from mouse_core.files.checksum import checksum
from mouse_core.replay import (
    ArrayStorage,
    MaxValueWriter,
    MemmapStorage,
    NextView,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SliceSampler,
)
from tests.core.replay_cases import SAMPLERS, filled
from tests.core.replay_writer import checksums, rows_of
from tests.programs import run_module
from tests.raising import assert_raises

ROOT = Path(__file__).resolve().parents[2]


def start_writer(folder: Path, writer: int, size: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.core.replay_writer", str(folder), str(writer), str(size)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def check(batch: dict[str, Any]) -> int:
    np.testing.assert_array_equal(batch["checksum"], checksums(batch), "a row that is not whole")
    return len(batch["checksum"])


@pytest.mark.parametrize(
    "times", [pytest.param(200, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.long)]
)
def test_two_processes_write_and_one_samples(times: int, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    buffer = ReplayBuffer(MemmapStorage(500, folder), batch_size=64)
    prioritized = PrioritizedReplayBuffer(storage=MemmapStorage(500, folder), batch_size=64)
    writers = [start_writer(folder, number, 500) for number in (1, 2)]
    seen: set[int] = set()
    samples = 0
    try:
        while samples < times or seen != {1, 2}:
            assert all(writer.poll() is None for writer in writers)
            if len(buffer) < 64:
                continue
            batch = buffer.sample()
            check(batch)
            seen |= set(batch["writer"].tolist())
            samples += 1
            if samples % 10 == 0:
                check(buffer[:])
                weighed = prioritized.sample()
                check(weighed)
                prioritized.update_priority(weighed["index"], weighed["number"] % 7 + 0.5)
    finally:
        written = [int(writer.communicate(timeout=600)[0]) for writer in writers]
    # Nothing is lost: every row that was written was numbered.
    assert buffer.storage.written == sum(written)
    check(buffer[:])


def kill_writers(folder: Path, times: int) -> None:
    rng = random.Random(5)
    before = number = 0
    # A busy machine may not let them write much before they are killed; there are more then.
    while number < times or before <= 300:
        number += 1
        writer = start_writer(folder, number, 300)
        time.sleep(0.02 + rng.random() * 0.15)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        buffer = ReplayBuffer(MemmapStorage(300, folder), batch_size=32)
        if len(buffer):
            check(buffer[:])
            check(buffer.sample())
            assert buffer.storage.written >= before
            buffer.extend(rows_of(99, 0, 5))
            check(buffer[:])
            before = buffer.storage.written


@pytest.mark.slow
@pytest.mark.parametrize("times", [4, pytest.param(25, marks=pytest.mark.long)])
def test_writers_that_are_killed_leave_whole_rows(times: int, tmp_path: Path) -> None:
    kill_writers(tmp_path / "m", times)


class Died(BaseException):
    """Stands for the death of the process at some line."""


@pytest.mark.parametrize(("size", "stride"), [(1, 2), (3, 3), (40, 5), (100, 11)])
def test_a_death_at_any_line_of_a_write_leaves_the_rows_of_before_or_after(
    size: int, stride: int, tmp_path: Path
) -> None:
    MemmapStorage(40, tmp_path / "m").append(rows_of(1, 0, 60))
    step, done = 0, False
    while not done:
        before = ReplayBuffer(MemmapStorage(None, tmp_path / "m"))[:]
        rows = rows_of(2, 1000 * step, size)
        done = lives_through(step, MemmapStorage(None, tmp_path / "m"), "append", rows)
        after = ReplayBuffer(MemmapStorage(None, tmp_path / "m"))[:]
        check(after)
        if not done and size <= 40:  # more are written as whole rows, but not all at once
            wrote = (after["writer"] == 2) & (after["number"] >= 1000 * step)
            assert wrote.sum() in (0, size)
            if not wrote.any():
                np.testing.assert_array_equal(after["number"], before["number"])
        step += stride
    assert step > 30


def test_a_death_while_rows_are_changed_in_place(tmp_path: Path) -> None:
    MemmapStorage(40, tmp_path / "m").append(rows_of(1, 0, 60))
    outcomes = set()
    step, done = 0, False
    while not done:
        slots, rows = np.array([step % 30, 30, 39]), rows_of(2, 1000 * step, 3)
        done = lives_through(step, MemmapStorage(None, tmp_path / "m"), "put", slots, rows)
        after = ReplayBuffer(MemmapStorage(None, tmp_path / "m"))[:]
        check(after)
        changed = (after["number"][slots] == rows["number"]) & (after["writer"][slots] == 2)
        assert changed.all() or not changed.any()
        outcomes.add((done, bool(changed.all())))
        step += 2
    assert outcomes == {(False, False), (False, True), (True, True)}


def lives_through(lines: int, storage: MemmapStorage, method: str, *arguments: Any) -> bool:
    """Call a method up to some line of the storages' code; whether it came to its end. The storage dies with it."""
    left = lines

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if f"replay{os.sep}storages" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Died
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        getattr(storage, method)(*arguments)
    except Died:
        return False
    finally:
        sys.settrace(before)
    return True


def test_each_sees_what_the_other_writes(tmp_path: Path) -> None:
    one = PrioritizedReplayBuffer(storage=MemmapStorage(10, tmp_path / "m"), batch_size=50)
    other = PrioritizedReplayBuffer(storage=MemmapStorage(10, tmp_path / "m"), batch_size=50)
    one.extend({"a": np.arange(6)})
    assert set(other.sample()["a"].tolist()) == set(range(6))
    other.update_priority(np.arange(6), [0, 0, 0, 0, 0, 1000.0])
    assert set(other.sample()["a"].tolist()) == {5}
    one.extend({"a": np.arange(6, 12)})
    other.update_priority(np.arange(10), np.arange(10.0))
    batch = other.sample()
    assert 0 not in batch["index"]
    assert set(batch["a"].tolist()) <= {11, 2, 3, 4, 5, 6, 7, 8, 9}
    one[3] = {"a": 77}
    np.testing.assert_array_equal(other[:]["a"], [10, 11, 2, 77, 4, 5, 6, 7, 8, 9])
    other.empty()
    assert_raises(ConfigError, "empty", one.sample)
    one.append({"a": 5})
    assert set(other.sample()["a"].tolist()) == {5}


DRAWN = ["rows", "every row once", "priorities", "slices", "by trajectory", "every slice once", "slices by priorities"]


@pytest.mark.parametrize("sampler", DRAWN)
def test_rows_that_another_process_wrote_are_drawn_as_ones_own(sampler: str, tmp_path: Path) -> None:
    done = np.random.default_rng(0).random(500) < 0.1
    columns = {"time": np.arange(500), "done": done, "episode": np.cumsum(done) - done}
    mine = ReplayBuffer(MemmapStorage(60, tmp_path / "m"), SAMPLERS[sampler](), batch_size=4)
    theirs = ReplayBuffer(MemmapStorage(60, tmp_path / "m"))
    written, seen = 0, set[int]()
    for turn, n in enumerate((40, 1, 5, 30, 59, 60, 61, 200, 7)):
        for buffer, count in ((theirs if turn else mine, n), (mine, 2 * (turn % 2))):
            buffer.extend({name: values[written : written + count] for name, values in columns.items()})
            written += count
        for _ in range(6):
            batch = mine.sample()
            there = batch.get("mask", np.ones(batch["index"].shape, bool))
            if there.ndim == 2:
                assert (np.diff(batch["time"])[there[:, 1:]] == 1).all(), "steps that do not follow each other"
                assert ((batch["episode"] == batch["episode"][:, :1]) | ~there).all(), "a slice of two episodes"
            np.testing.assert_array_equal(batch["time"] % 60, batch["index"])
            assert written - 60 <= batch["time"].min() <= batch["time"].max() < written
            seen |= set((written - 1 - batch["time"]).reshape(-1).tolist())
    assert len(seen) > 40


def test_threads_with_storages_of_their_own_take_turns(tmp_path: Path) -> None:
    def write(number: int) -> None:
        buffer = ReplayBuffer(MemmapStorage(100, tmp_path / "m"))
        for turn in range(30):
            buffer.extend(rows_of(number, turn * 10, 10))
            check(buffer.sample(20))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, range(3)))
    storage = MemmapStorage(None, tmp_path / "m")
    assert storage.written == 900
    check(storage.get(np.arange(100)))


def test_other_processes_have_locks_of_their_own(tmp_path: Path) -> None:
    buffer = ReplayBuffer(MemmapStorage(50, tmp_path / "m"))
    buffer.extend(rows_of(0, 0, 10))
    child = os.fork()
    if not child:
        try:
            for turn in range(40):
                buffer.extend(rows_of(1, turn * 5, 5))
        finally:
            os._exit(0)
    for _ in range(40):
        check(buffer.sample(16))
        buffer.extend(rows_of(2, 0, 3))
    os.waitpid(child, 0)
    assert buffer.storage.written == 10 + 200 + 120
    check(buffer[:])
    buffer = ReplayBuffer(MemmapStorage(50, tmp_path / "sent"))
    buffer.extend(rows_of(0, 0, 10))
    process = get_context("spawn").Process(target=write_to, args=(buffer,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert buffer.storage.written == 15
    check(buffer[:])


def write_to(buffer: ReplayBuffer) -> None:
    buffer.extend(rows_of(1, 0, 5))


def test_the_best_rows_are_kept_in_mapped_files_and_another_size_is_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(MemmapStorage(4, tmp_path / "m"), writer=MaxValueWriter("r"))
    buffer.extend({"r": np.array([3.0, 1, 5, 2, 9, 1, 4])})
    again = ReplayBuffer(MemmapStorage(4, tmp_path / "m"), writer=MaxValueWriter("r"))
    assert sorted(again[:]["r"].tolist()) == [3, 4, 5, 9]
    assert again.append({"r": 3.5}) == 0
    assert again.append({"r": 3.5}) == -1
    MemmapStorage(12, tmp_path / "size").append({"a": np.arange(3)})
    for arguments in ((13, 1, "outgoing"), (12, 2, "outgoing"), (12, 1, "arrived")):
        with pytest.raises(ConfigError, match=r"expected a buffer of \(capacity, ndim, alignment\)"):
            MemmapStorage(arguments[0], tmp_path / "size", arguments[1], alignment=arguments[2])  # type: ignore[arg-type]
    assert_raises(ConfigError, "capacity: expected a capacity, since no", MemmapStorage, None, tmp_path / "new")
    assert_raises(StorageError, "cannot write or read", MemmapStorage, 12, tmp_path / "m" / "head" / "inside")


def row_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rows-*"))


def test_files_are_as_long_as_the_data_and_another_goes_on_where_one_was_closed(tmp_path: Path) -> None:
    storage = MemmapStorage(10_000_000, tmp_path / "m")
    storage.append({"a": np.zeros((100, 10)), "big": np.zeros((100, 2000), np.uint8)})
    assert sum(file.stat().st_size for file in row_files(tmp_path / "m")) < 100 * 2080 + 2 * (1 << 16)
    storage.close()
    assert [file.stat().st_size for file in row_files(tmp_path / "m")] == [100 * 80, 100 * 2000]
    storage.append({"a": np.ones((3, 10)), "big": np.zeros((3, 2000), np.uint8)})
    assert MemmapStorage(None, tmp_path / "m").get(np.array([102]))["a"].tolist() == [[1.0] * 10]
    one, other = MemmapStorage(1000, tmp_path / "other"), MemmapStorage(1000, tmp_path / "other")
    one.append({"a": np.arange(20)})
    other.append({"a": np.arange(20, 40)})
    one.close()
    other.append({"a": np.arange(40, 60)})
    np.testing.assert_array_equal(other.get(np.arange(60))["a"], np.arange(60))
    np.testing.assert_array_equal(one.get(np.arange(60))["a"], np.arange(60))


@pytest.mark.parametrize("rounds", [40, pytest.param(1500, marks=pytest.mark.long)])
def test_whatever_is_damaged_raises_an_error_of_the_family(rounds: int, tmp_path: Path) -> None:
    """In a process of its own: what reads foreign memory might die of it."""
    assert run_module("tests.core.damaged_buffers", tmp_path, 7, rounds).split() == ["done"]


def test_checkpoints_and_sizes_that_nobody_vouches_for_are_refused(tmp_path: Path) -> None:
    storage = MemmapStorage(12, tmp_path / "m")
    storage.append({"a": np.arange(3)})
    schema = tmp_path / "m" / "schema"
    for kind, shape in (
        ("<i8", [10**11]),
        ("<i8", [10**5, 10**5]),
        ("|O", []),
        (",", []),
        ("<i8", [-1]),
        ("<i8", [10**9]),
    ):
        schema.write_text(
            json.dumps({"structure": {"dict": [["a", ["a"]]]}, "num_envs": 1, "fields": [["a", kind, shape]]})
        )
        assert_raises(StateError, "m/", MemmapStorage, 12, tmp_path / "m")
    buffer = filled({"a": np.arange(3)}, 12)
    buffer.dumps(tmp_path / "saved")
    content = (tmp_path / "saved").read_bytes()
    for edit in (
        (b'"<i8", [3]', b'"<i8", [100000000000]'),
        (b'"<i8", [3]', b'"|O", [3]'),
        (b'"<i8", [3]', b'",", [3]'),
    ):
        length = struct.unpack_from("<Q", content, 8)[0]
        text = content[-length:].replace(*edit)
        head = struct.pack("<8sQQ", content[:8], len(text), checksum(text))
        (tmp_path / "edited").write_bytes(head + content[len(head) : len(content) - length] + text)
        assert_raises(StateError, r"edited: (expected|cannot decode)", buffer.loads, tmp_path / "edited")
    assert buffer[:]["a"].tolist() == [0, 1, 2]
    buffer = filled({"a": np.arange(12)}, 8)
    state = buffer.state_dict()
    state["storage"]["written"] = 1 << 62  # sums of it would begin anew below zero
    with pytest.raises(StateError, match=r"at most 8 rows, .* found 8 rows, and 4611686018427387904 written"):
        buffer.load_state_dict(state)
    assert len(buffer) == 8


def test_a_journal_of_other_rows_is_refused(tmp_path: Path) -> None:
    storage = MemmapStorage(12, tmp_path / "m")
    storage.append({"a": np.arange(3)})
    columns = {"0": np.arange(2)}
    for journal in (
        {"places": np.array([0, 99]), "columns": columns},
        {"places": np.array([0, 1]), "columns": {"0": np.arange(2.0)}},
        {"places": np.array([0]), "columns": columns},
        {"columns": columns},
        None,
    ):
        (tmp_path / "m" / "journal").unlink(missing_ok=True)
        if journal is not None:
            write_checkpoint(tmp_path / "m" / "journal", journal)
        say_journal(tmp_path / "m", there=True)
        assert_raises(StateError, "journal: expected the rows that were being", MemmapStorage, 12, tmp_path / "m")
    say_journal(tmp_path / "m", there=False)
    assert storage.get(np.arange(3))["a"].tolist() == [0, 1, 2]


def say_journal(folder: Path, *, there: bool) -> None:
    with open(folder / "head", "r+b") as file:
        file.seek(4 * 8)
        file.write(struct.pack("<q", there))


def test_what_dead_writers_left_is_removed_and_what_living_ones_write_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    MemmapStorage(12, folder).append({"a": np.arange(3)})
    begun = (".head.partial", ".schema.1-a.partial", ".journal.5-6a.partial")
    left = [folder / name for name in (*begun, "rows-3-0", "rows-11-1")]
    mine = [folder / name for name in ("notes.partial", ".other.partial", "rows.txt")]
    for path in (*left, *mine):
        path.write_bytes(b"x")
    buffer = ReplayBuffer(MemmapStorage(12, folder))
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in mine)
    assert buffer[:]["a"].tolist() == [0, 1, 2]

    saved = [tmp_path / name for name in (".saved.1-2.partial", ".saved.3-abc.partial", ".saved2.1-2.partial")]
    for path in saved:
        path.write_bytes(b"x")
    sync, syncing, go = os.fsync, threading.Event(), threading.Event()

    def slowly(file: int) -> None:
        if not syncing.is_set():
            syncing.set()
            assert go.wait(60)
        sync(file)

    monkeypatch.setattr(os, "fsync", slowly)
    slow = threading.Thread(target=ReplayBuffer(ArrayStorage(5)).dumps, args=(tmp_path / "saved",))
    slow.start()
    assert syncing.wait(60)
    buffer.dumps(tmp_path / "saved")
    assert [path.exists() for path in saved] == [False, False, True]
    (living,) = tmp_path.glob(f".saved.{os.getpid()}-*.partial")
    go.set()
    slow.join()
    assert not living.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".saved2.1-2.partial", "m", "saved"]


def test_a_full_disk_is_found_before_a_row_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(100_000, tmp_path / "m")
    buffer = ReplayBuffer(storage)
    buffer.extend({"a": np.arange(1000)})
    state = buffer.state_dict()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="No space left") as caught:
            buffer.extend({"a": np.arange(50_000)})
        assert isinstance(caught.value, OSError)
        larger = filled({"a": np.arange(90_000)}, 100_000)
        assert_raises(StorageError, "cannot write or read", buffer.load_state_dict, larger.state_dict())
    assert (len(buffer), buffer.storage.written) == (1000, 1000)
    assert len(row_files(tmp_path / "m")) == 1
    np.testing.assert_array_equal(buffer[:]["a"], np.arange(1000))
    buffer.extend({"a": np.arange(1000, 50_000)})
    np.testing.assert_array_equal(buffer[:]["a"], np.arange(50_000))
    buffer.load_state_dict(state)
    np.testing.assert_array_equal(buffer[:]["a"], np.arange(1000))
    assert len(row_files(tmp_path / "m")) == 1


def places_of(buffer: ReplayBuffer) -> list[int] | str:
    try:
        return sorted({int(row) for row in buffer.sample(400)["row"][:, 0]})
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(12))
def test_slices_keep_their_places_wherever_their_rows_go(seed: int, tmp_path: Path) -> None:
    """As in a buffer that has seen each row by itself: in other parts of a buffer, where more rows came at once than
    there is room for, and, where the files still have the begins, in folders that are opened again, whoever wrote them,
    and from checkpoints of these.
    """
    draws = np.random.default_rng(seed)
    envs, steps = 1 + seed % 2, int(draws.integers(6, 40))
    options = {"sequence_length": int(draws.integers(1, 5)), "pad": bool(seed % 3), "period": int(draws.integers(2, 6))}
    keys = ({}, {"end_key": "done"}, {"traj_key": "episode"})[int(draws.integers(3))]

    def sampler(**other: Any) -> SliceSampler:
        return SliceSampler(**{**options, **keys, **other})

    ring = {"capacity": steps * envs, "ndim": envs}
    alone = ReplayBuffer(ArrayStorage(**ring), sampler())
    folder = ReplayBuffer(MemmapStorage(path=tmp_path, **ring), None if seed % 2 else sampler())
    other = ReplayBuffer(ArrayStorage(**ring), sampler(sequence_length=1, period=1))
    single = ReplayBuffer(ArrayStorage(**ring), transform=NextView() if seed % 2 else None)
    written, episode, ends = 0, np.zeros(envs, np.int64), []
    for _ in range(int(draws.integers(3, 8))):
        n = int(draws.integers(1, 2 * steps + 5))
        done = draws.random((n, envs)) < 0.07
        ends.extend(done)
        number = episode + np.cumsum(done, axis=0) - done
        episode = episode + done.sum(axis=0)
        rows = {
            "row": np.arange(written, written + n)[:, None] + 10_000 * np.arange(envs),
            "done": done,
            "episode": number,
        }
        rows = rows if envs > 1 else {name: values[:, 0] for name, values in rows.items()}
        for step in range(n):
            alone.append({name: values[step] for name, values in rows.items()})
        for buffer in (folder, other, single):
            buffer.extend(rows)
        written += n
        if draws.random() < 0.3:
            folder.storage.close()
            folder = ReplayBuffer(MemmapStorage(path=tmp_path, **ring), sampler())
    expected = places_of(alone)
    again = ReplayBuffer(MemmapStorage(path=tmp_path, **ring), sampler())
    restored = ReplayBuffer(ArrayStorage(**ring), sampler())
    restored.load_state_dict(again.state_dict())
    loaded = ReplayBuffer(ArrayStorage(**ring), sampler())
    loaded.load_state_dict(again.state_dict())
    moved = ReplayBuffer(MemmapStorage(path=tmp_path / "moved", **ring), sampler())
    moved.load_state_dict(folder.with_parts(sampler=sampler()).state_dict())
    others = [other.with_parts(sampler=sampler())]
    if seed % 2 and not keys:  # the index of NextView goes by all fields that there are
        others.append(single.with_parts(sampler=sampler(), transform=None))
    # The files have as many overwritten steps as steps in use, and an episode goes on from the first of them.
    before = np.array(ends[max(0, written - 2 * steps) : max(0, written - steps)])
    if written <= 2 * steps or before.any(axis=0).all():
        others += [again, moved, restored, loaded.with_parts(sampler=sampler()), pickle.loads(pickle.dumps(restored))]
    for buffer in others:
        assert places_of(buffer) == expected


def test_no_damage_of_the_counters_is_silent(tmp_path: Path) -> None:
    """Zeros from any word of the counters on; counters of 0 would look like a storage without rows."""
    storage = MemmapStorage(8, tmp_path)
    storage.append({"a": np.arange(10)})
    rows = storage.get(np.arange(8))["a"].tolist()
    storage.close()
    head, refused = (tmp_path / "head").read_bytes(), 0
    for at in range(8 * 8, 8 * 28, 8):
        (tmp_path / "head").write_bytes(head[:at] + bytes(8 * 28 - at) + head[8 * 28 :])
        try:
            storage = MemmapStorage(None, tmp_path)
            assert storage.get(np.arange(8))["a"].tolist() == rows
            storage.close()
        except StateError:
            refused += 1
    assert refused > 8
