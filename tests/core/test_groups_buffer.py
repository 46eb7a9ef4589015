"""RolloutBuffer: groups are sealed into files, nothing is lost, nothing comes twice."""

import ctypes
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from mouse_core import ClosedError, ConfigError, DataError, ForkError, MissingFieldError, StorageError
from mouse_core.errors import MissingRowError
from mouse_core.groups import GrpoBatchMaker, RolloutBuffer, RolloutColumn, RolloutRecord, Turn, open_rollouts
from tests.core.groups_cases import METADATA, group, lose_index, rollout
from tests.raising import assert_raises
from tests.waiting import wait_until

Make = Callable[..., RolloutBuffer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[weakref.ref[RolloutBuffer]] = []

    def make(folder: str = "buffer", **options: Any) -> RolloutBuffer:
        buffer = RolloutBuffer(tmp_path / folder, **{"group_size": 4, "seal_timeout": 1e6, **options})
        made.append(weakref.ref(buffer))
        return buffer

    yield make
    for buffer in made:
        if (still := buffer()) is not None:
            still.close()


def parts(buffer: RolloutBuffer) -> list[str]:
    return sorted(path.relative_to(buffer.root_path).as_posix() for path in buffer.root_path.glob("*/part-*.parquet"))


def uids(buffer: RolloutBuffer) -> list[str]:
    return buffer.rollouts().uids


def test_a_full_group_is_one_file(make: Make) -> None:
    buffer = make()
    given = [rollout(number, metadata=METADATA) for number in range(4)]
    for item in given[:3]:
        assert buffer.add_rollout(item)
    assert (buffer.num_groups, buffer.num_waiting, len(buffer)) == (0, 3, 3)
    assert not parts(buffer)
    assert buffer.add_rollout(given[3])
    assert (buffer.num_groups, buffer.num_waiting, len(buffer)) == (1, 0, 4)
    (name,) = parts(buffer)
    assert name.startswith("math/part-")
    assert list(buffer.rollouts()) == given
    file = pq.ParquetFile(buffer.root_path / name)
    assert file.metadata.num_rows == 4
    columns = [file.metadata.row_group(0).column(number) for number in range(file.metadata.num_columns)]
    codecs = {column.path_in_schema.removeprefix("turns.list.element."): column.compression for column in columns}
    assert {codecs[name] for name in ("message", "tokens.list.element", "logprobs.list.element")} == {"ZSTD"}
    assert file.schema_arrow.field("turns").type.value_type.field("tokens").type.value_type == "int32"


def test_groups_are_told_apart(make: Make) -> None:
    buffer = make()
    given = [
        rollout(number, environment=environment, example=example, version=version)
        for number, (environment, example, version) in enumerate(
            [(e, x, v) for e in ("math", "code") for x in ("1", "2") for v in ("1", "2")] * 4
        )
    ]
    assert buffer.add_rollouts(given) == 32
    assert (buffer.num_groups, buffer.num_waiting) == (8, 0)
    for stored in buffer.rollouts().groups:
        whole = stored.read()
        assert {item.key for item in whole} == {stored.key}
        assert len(whole) == 4
    assert len(buffer.rollouts(environment="code")) == 16
    assert {name.split("/")[0] for name in parts(buffer)} == {"math", "code"}


def test_adding_again_changes_nothing_and_more_than_a_group_is_several(make: Make) -> None:
    buffer = make()
    assert buffer.add_rollouts(group(0, 3)) == 3
    assert not buffer.add_rollout(rollout(1))
    assert buffer.add_rollouts([*group(0, 4), *group(0, 4)]) == 1
    assert buffer.add_rollouts(group(0, 4)) == 0
    assert buffer.add_rollouts([]) == 0
    assert uids(buffer) == ["r0", "r1", "r2", "r3"]
    assert "r2" in buffer
    assert "r9" not in buffer
    buffer = make("several")
    assert buffer.add_rollouts(group(0, 11)) == 11
    assert (buffer.num_groups, buffer.num_waiting) == (2, 3)
    assert buffer.flush() == 1
    assert [len(stored.uids) for stored in buffer.rollouts().groups] == [4, 4, 3]
    assert list(buffer.rollouts()) == group(0, 11)
    assert buffer.flush() == 0


def test_a_uid_names_one_rollout(make: Make, tmp_path: Path) -> None:
    columns = [RolloutColumn("b", "example"), RolloutColumn("a", "example")]
    own = {"a": np.float32(1), "b": np.float32(2)}
    known = [replace(item, columns=own, metadata=METADATA) for item in group(0, 5)]
    make(columns=columns).add_rollouts(known)  # four are sealed
    buffer = make()
    again = [replace(item, columns=own, metadata=METADATA, created=9.0, replica_id="x") for item in group(0, 5)]
    assert buffer.add_rollouts([*again, *group(5, 1), *group(5, 1)]) == 1
    turns = (known[0].turns[0], replace(known[0].turns[1], logprobs=[-0.5] * 5))
    for changed, found in (
        ({"turns": turns}, "turns"),
        ({"reward": 9.0, "metadata": {}}, "reward, metadata"),
        ({"columns": {"a": 1.0}}, "columns"),
        ({"example_id": "b", "policy_version": 7}, "example_id, policy_version"),
    ):
        for place in (0, 4):
            other = replace(known[place], **changed)  # type: ignore[arg-type]
            if place == 4 and found == "turns":
                other = replace(other, turns=known[3].turns)
            with pytest.raises(
                DataError, match=f"rollout 'r{place}': expected the content that was added .* found different {found}$"
            ):
                buffer.add_rollouts([rollout(9), other])
    with pytest.raises(DataError, match=r"rollout 'r8': expected the content that was added .* found different reward"):
        buffer.add_rollouts([rollout(8), rollout(8, reward=1.0)])
    assert len(buffer) == 6, "nothing of these calls was added"
    for path in buffer.root_path.glob("math/part-*"):
        path.unlink()
    assert buffer.add_rollout(replace(known[0], columns=own, reward=9.0)) == 0, "what is gone cannot be compared"


def test_the_time_out_seals_though_nothing_more_arrives(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(seal_timeout=0.1, min_group_size=2)
    buffer.add_rollouts([rollout(0), rollout(1), rollout(2, example="alone")])
    assert wait_until(lambda: buffer.num_groups == 1)
    assert uids(buffer) == ["r0", "r1"]
    assert buffer.num_waiting == 1, "one rollout alone waits for another"
    time.sleep(0.15)
    buffer.add_rollout(rollout(3, example="alone"))
    assert buffer.num_groups == 2, "enough, and older than the time-out"
    buffer.add_rollout(rollout(4))
    buffer.add_rollout(rollout(5))
    assert wait_until(lambda: buffer.num_groups == 3)
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() - 999.9)
        first = make("restart", seal_timeout=1000)
        first.add_rollouts(group(0, 2))
        first.close()
    again = make("restart", seal_timeout=1000)
    assert wait_until(lambda: again.num_groups == 1)
    assert uids(again) == ["r0", "r1"]


def test_no_thread_outlives_the_buffer(make: Make) -> None:
    before = set(threading.enumerate())

    def started() -> int:
        return len(set(threading.enumerate()) - before)

    buffer = make(seal_timeout=1000)
    assert started() == 0
    buffer.add_rollouts(group(0, 2))
    assert started() == 1
    buffer.close()
    assert wait_until(lambda: started() == 0)

    abandoned = make("abandoned", seal_timeout=1000)
    abandoned.add_rollouts(group(0, 2))
    gc.collect()  # of what tests before it left, whose files would be counted
    folder = Path("/proc/self/fd")
    files = len(list(folder.iterdir())) if folder.exists() else 0
    gone = weakref.ref(abandoned)
    del abandoned
    gc.collect()
    assert gone() is None
    assert wait_until(lambda: started() == 0)
    assert not files or len(list(folder.iterdir())) == files - 5


def test_environments_have_safe_folders_of_their_own(make: Make) -> None:
    names = ["a/b", "a%2Fb", "a%2fb", "../up", "..", ".", ".hidden", "%2Ehidden", "batches", "%62atches", "é ü"]
    names += ["a\x00b", "C:\\x", "%41", "A", "x" * 200, "x" * 300, "x" * 301, "x" * 400, "gsm8k-v1.2_x"]
    buffer = make(group_size=1, sync=False)
    buffer.add_rollouts([rollout(number, environment=name) for number, name in enumerate(names)])
    paths = list(buffer.root_path.rglob("part-*.parquet"))
    assert {path.parent.parent for path in paths} == {buffer.root_path}
    folders = {path.parent.name for path in paths}
    assert len(folders) == len(names)
    assert not any(folder.startswith(".") or folder == "batches" for folder in folders)
    assert "gsm8k-v1.2_x" in folders
    buffer.close()
    again = make(group_size=1)
    assert [[item.environment for item in again.rollouts(environment=name)] for name in names] == [[x] for x in names]


def test_reading_by_environment_version_and_time(make: Make) -> None:
    buffer = make()
    empty = buffer.rollouts()
    for first, options in [
        (0, {}),
        (10, {"version": 9}),
        (20, {"version": 10}),
        (30, {"environment": "code", "version": 10}),
    ]:
        buffer.add_rollouts(group(first, 4, **options))
    stored = buffer.rollouts()
    assert (len(stored), len(empty)) == (16, 0)
    assert stored.environments == ["code", "math"]
    assert stored[5] == rollout(11, version=9)
    assert stored[-1] == rollout(33, environment="code", version=10)
    assert stored[2:5] == [rollout(2), rollout(3), rollout(10, version=9)]
    assert [item.rollout_uid for item in buffer.rollouts(policy_version=10)] == [
        *(f"r{n}" for n in range(20, 24)),
        *(f"r{n}" for n in range(30, 34)),
    ]
    assert len(buffer.rollouts(environment="math", policy_version=["9", "10"])) == 8
    assert list(open_rollouts(buffer.root_path, environment="code")) == group(30, 4, environment="code", version=10)
    with pytest.raises(IndexError, match=r"expected an index in -16\.\.15, found 16"):
        stored[16]
    with pytest.raises(MissingFieldError, match=r"environment: expected one of \['code', 'math'\], found 'chess'"):
        buffer.rollouts(environment="chess")
    assert_raises(ConfigError, "expected the folder of a RolloutBuffer", open_rollouts, buffer.root_path / "nowhere")


@pytest.mark.parametrize(("tokens", "files_of_each"), [(2**17, 2), (100, 7), (1, 20)])
def test_groups_of_a_call_share_files(
    make: Make, monkeypatch: pytest.MonkeyPatch, tokens: int, files_of_each: int
) -> None:
    monkeypatch.setattr("mouse_core.groups.waiting._TOKENS", tokens)
    buffer = make()
    given = [item for n in range(40) for item in group(4 * n, environment=("math", "code")[n % 2], example=str(n // 4))]
    buffer.add_rollouts(given)
    files = [stored.path for stored in buffer.rollouts().groups]
    assert [len(set(files[first::2])) for first in (0, 1)] == [files_of_each] * 2, "of 20 groups, 16 a file at most"
    assert list(buffer.rollouts()) == given
    assert [stored.read() for stored in buffer.rollouts().groups] == [given[4 * n : 4 * n + 4] for n in range(40)]
    assert buffer.rollout("r37") == given[37]


@pytest.mark.parametrize("by", ["files", "another tool's files"])
def test_a_folder_is_read_without_its_log(make: Make, by: str) -> None:
    buffer = make()
    given = [*group(0, 4), *group(20, 4, environment="code"), *group(4, 8)]
    for some in [given] if by == "files" else [given[n : n + 4] for n in range(0, 16, 4)]:
        buffer.add_rollouts(some)
    buffer.close()
    lose_index(buffer.root_path)
    if by == "another tool's files":
        paths = [stored.path for stored in buffer.rollouts(environment="math").groups]
        table = pa.concat_tables(map(pq.read_table, paths)).replace_schema_metadata(None)
        for one in paths:
            one.unlink()
        pq.write_table(table, paths[0].with_name("part-1.parquet"))
    again = make()
    assert again.num_groups == (2 if by == "another tool's files" else 4)
    assert sorted(uids(again)) == sorted(one.rollout_uid for one in given)
    assert by == "another tool's files" or list(again.rollouts()) == given
    assert again.add_rollouts(given) == 0
    again.close()
    assert len(open_rollouts(buffer.root_path)) == 16


def test_files_have_columns_for_what_no_rollout_has_and_are_read_together(make: Make) -> None:
    buffer = make()
    full = [replace(item, metadata={"a": 1}) for item in group(0, 4)]
    buffer.add_rollouts(full)
    buffer.close()
    (path,) = [stored.path for stored in buffer.rollouts().groups]
    table = pq.read_table(path)
    path.unlink()
    lose_index(buffer.root_path)
    rows = [{**row, "metadata": None} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path.with_name("part-1.parquet"))
    assert list(make().rollouts()) == [replace(item, metadata={}) for item in full]
    buffer = make("together", group_size=1)
    full = rollout(1, metadata={"a": 1})
    turns = [replace(turn, reward=None, metadata={}) for turn in full.turns]
    bare = replace(full, rollout_uid="bare", turns=turns, replica_id="", metadata={})  # type: ignore[arg-type]
    for item in (full, bare):
        buffer.add_rollout(item)
    paths = [str(path) for path in buffer.root_path.glob("*/part-*.parquet")]
    rows = pyarrow.dataset.dataset(paths).to_table().to_pylist()
    assert {row["rollout_uid"]: row["replica_id"] for row in rows} == {"r1": "replica-1", "bare": None}
    rewards = {row["rollout_uid"]: [turn["reward"] for turn in row["turns"]] for row in rows}
    assert rewards == {"r1": [None, 0.5], "bare": [None, None]}


def test_files_of_other_tools_are_believed_and_those_taken_away_gone(make: Make) -> None:
    buffer = make(group_size=2)
    for first in (0, 2):
        buffer.add_rollouts(group(first, 2))
    buffer.close()
    path, other = (stored.path for stored in buffer.rollouts().groups)
    table = pq.read_table(path)
    path.unlink()
    lose_index(buffer.root_path)
    pq.write_table(table, path.with_name("part-1.parquet"))
    assert sorted(make(group_size=2).rollouts().uids) == ["r0", "r1", "r2", "r3"]
    changed = table.set_column(table.schema.get_field_index("reward"), "reward", pa.array([7.0, 8.0]))
    pq.write_table(changed, path.with_name("part-1.parquet"))
    again = make(group_size=2)
    assert {item.rollout_uid: item.reward for item in again.rollouts()} == {"r0": 7.0, "r1": 8.0, "r2": 2.0, "r3": 3.0}
    assert other.exists()
    buffer = make("gone")
    for first in (0, 4):
        buffer.add_rollouts(group(first, 4))
    buffer.close()
    buffer.rollouts().groups[0].path.unlink()
    again = make("gone")
    assert uids(again) == ["r4", "r5", "r6", "r7"]
    assert again.add_rollouts(group(0, 4)) == 4


def test_whoever_opens_a_folder_takes_it_and_a_forked_child_is_refused(make: Make) -> None:
    first = make()
    first.add_rollouts(group(0, 6))
    second = make()
    with pytest.raises(ClosedError, match=f"found that another buffer opened the folder, by process {os.getpid()} on "):
        first.add_rollouts(group(6, 2))
    assert_raises(ClosedError, "expected", first.flush)
    assert second.num_waiting == 2
    second.add_rollouts(group(6, 2))
    assert list(second.rollouts()) == group(0, 8)
    second.close()
    second.close()
    assert_raises(ClosedError, r"found '.*' closed", second.add_rollout, rollout(20))
    assert list(second.rollouts()) == group(0, 8), "what is stored can still be read"
    buffer = make("forked")
    child = os.fork()
    if not child:
        try:
            buffer.add_rollout(rollout(0))
        except ForkError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_many_threads_add(make: Make) -> None:
    buffer = make(group_size=8)

    def work(thread: int) -> None:
        for number in range(0, 40, 2):
            first = 1000 * thread + number
            buffer.add_rollouts([rollout(first, example=str(number)), rollout(first + 1, example=str(number))])
            buffer.add_rollout(rollout(5000 + number, environment="shared"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(buffer) == 160 + 20
    buffer.flush()
    assert sorted(uids(buffer)) == sorted(set(uids(buffer)))
    assert len(buffer.rollouts()) == 180
    buffer.close()
    assert len(make(group_size=8)) == 180


def four_at_once(
    buffer: RolloutBuffer, made: Callable[[int], RolloutRecord], entered: threading.Event, go: threading.Event
) -> dict[int, Any]:
    """Have number 0 asked for, which says when it is ``entered``, then 1 to 3 beside it, and let it go; the answers."""
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        try:
            answers[number] = buffer.add_rollout(made(number))
        except (DataError, KeyboardInterrupt) as error:
            answers[number] = str(error) or "interrupted"

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    threads[0].start()
    assert entered.wait(60)
    for thread in threads[1:]:
        thread.start()
    assert wait_until(lambda: len(buffer._requests._queue) == 3)
    go.set()
    for thread in threads:
        thread.join()
    return answers


def test_one_caller_s_error_is_not_another_s(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(group_size=100)
    sync, entered, go = os.fsync, threading.Event(), threading.Event()

    def slowly(file: int) -> None:
        if not entered.is_set():
            entered.set()
            assert go.wait(60)
        sync(file)

    monkeypatch.setattr(os, "fsync", slowly)
    odd = lambda number: rollout(number, metadata={"a": "\ud800" if number == 2 else "a"})  # noqa: E731
    answers = four_at_once(buffer, odd, entered, go)
    assert "Unicode" in answers.pop(2)
    assert answers == {0: True, 1: True, 3: True}
    assert [f"r{number}" in buffer for number in range(4)] == [True, True, False, True]


def test_ctrl_c_in_the_thread_that_serves_is_not_another_s(make: Make) -> None:
    buffer = make(group_size=100)
    entered, go = threading.Event(), threading.Event()
    served: list[int] = []
    real = buffer._add

    def add(given: Any) -> list[int]:
        served.append(len(given))
        if len(served) == 1:
            entered.set()
            go.wait()
        elif len(served) == 2:
            raise KeyboardInterrupt
        return real(given)

    buffer._add = add  # type: ignore[assignment,method-assign]
    answers = four_at_once(buffer, rollout, entered, go)
    assert served[1] == 3
    assert sorted(map(str, answers.values())) == ["True", "True", "True", "interrupted"]
    assert all((f"r{number}" in buffer) == (answer is True) for number, answer in answers.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size: expected an integer of at least 1, found 0"),
        ({"min_group_size": 2.5}, "min_group_size: expected an integer of at least 1, found 2.5"),
        ({"seal_timeout": -1}, "seal_timeout: expected a number of seconds, 0 or more, found -1"),
        ({"seal_timeout": float("nan")}, "seal_timeout: expected a number of seconds"),
        ({"compression": "zip"}, "compression: expected one of"),
    ],
)
def test_options_are_checked(make: Make, options: dict[str, Any], message: str) -> None:
    assert_raises(ConfigError, message, make, **options)


def test_nothing_of_a_refused_call_is_added(make: Make) -> None:
    buffer = make()
    with pytest.raises(DataError, match="expected a RolloutRecord at index 1, found 'rollout'"):
        buffer.add_rollouts([rollout(0), "rollout"])  # type: ignore[list-item]
    lone = RolloutRecord("e", "1", "1", "u", rollout(0).turns, 0.0, metadata={"a": "\ud800"})
    assert_raises(DataError, "Unicode", buffer.add_rollouts, [rollout(0), lone])
    assert len(buffer) == 0
    assert buffer.add_rollouts(group(0)) == 4


@pytest.mark.parametrize("whole_filesystem", [True, False])
def test_many_files_are_on_the_disk_before_they_count(
    make: Make, monkeypatch: pytest.MonkeyPatch, whole_filesystem: bool
) -> None:
    """So many that Linux is asked for the whole file system. ``test_power_cut`` has all that happens to a few."""
    buffer = make(group_size=2)
    dirty: set[str] = set()

    def noting(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def noted(first: Any, *rest: Any) -> Any:
            path = str(first) if name == "replace" else os.readlink(f"/proc/self/fd/{first}")
            if name == "fsync":
                dirty.discard(path)
            elif name == "replace":
                assert path not in dirty, "a file got its name before its content was on the disk"
                dirty.add(str(Path(rest[0]).parent))
            else:
                dirty.add(path)
            return call(first, *rest)

        return noted

    class Library:
        def __init__(self, *ignored: Any, **options: Any) -> None:
            if not whole_filesystem:
                raise OSError("no such library")

        def syncfs(self, file: int) -> int:
            dirty.clear()
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    for name in ("write", "pwrite", "replace", "fsync"):
        monkeypatch.setattr(os, name, noting(name))
    buffer.add_rollouts([item for n in range(70) for item in group(2 * n, 2, environment=str(n))])
    assert len(parts(buffer)) == 70
    # The index can be made again from the files.
    assert {Path(one).name for one in dirty} <= {"index.log", "index.log.size"}


@pytest.mark.parametrize("fails_at", ["write", "replace", "fsync", "mkdir"])
def test_a_full_disk_loses_nothing(make: Make, monkeypatch: pytest.MonkeyPatch, fails_at: str) -> None:
    buffer = make()
    buffer.add_rollouts(group(0, 3))

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        for name in ("write", "pwrite") if fails_at == "write" else (fails_at,):
            patch.setattr(os, name, full)
        with pytest.raises(StorageError, match="No space left on device"):
            buffer.add_rollouts([*group(3, 5), rollout(100, example="new")])
        assert_raises(StorageError, "cannot write or read", buffer.flush)
    assert (buffer.num_groups, buffer.num_waiting, len(buffer)) == (0, 3, 3)
    assert not list(buffer.root_path.glob("*/*part-*"))
    buffer.add_rollouts([*group(3, 5), rollout(100, example="new")])
    assert list(buffer.rollouts()) == group(0, 8)
    buffer.close()
    again = make()
    assert (len(again), again.num_waiting) == (9, 1)


def test_the_time_out_tries_again_after_a_full_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mouse_core.groups.buffer._RETRY_SECONDS", 0.1)
    buffer = make(seal_timeout=0.2)
    buffer.add_rollouts(group(0, 2))
    tried = threading.Event()

    def full(*arguments: Any) -> Any:
        tried.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for _ in range(3):
            assert tried.wait(60)
            tried.clear()
        assert wait_until(lambda: buffer.num_waiting == 2)
        assert buffer.num_groups == 0
    assert wait_until(lambda: buffer.num_groups == 1)


def test_a_damaged_file_is_named(make: Make) -> None:
    buffer = make(batch_maker=GrpoBatchMaker())
    for first in (0, 4):
        buffer.add_rollouts(group(first, 4))
    damaged, other = (stored.path for stored in buffer.rollouts().groups)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=f"part file {damaged}: expected the content that was written, found damage"):
        buffer.rollouts()[0]
    assert buffer.rollouts()[4] == rollout(4)
    buffer.close()
    found = make(batch_maker=GrpoBatchMaker())
    for _ in range(2):
        assert_raises(DataError, str(damaged), found.create_and_store_batch, 8)
    assert found.batches == []
    found.close()
    damaged.rename(damaged.with_suffix(".damaged"))
    again = make(batch_maker=GrpoBatchMaker())
    assert list(again.rollouts()) == group(4, 4)
    assert again.create_and_store_batch(4) is not None
    assert other.exists()


def test_logs_do_not_grow_for_ever_and_one_that_cannot_be_cut_stops_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mouse_core.groups.waiting._REWRITE_BYTES", 20_000)
    buffer = make()
    log = buffer.root_path / ".state" / "waiting.log"
    buffer.add_rollout(rollout(9999, example="left behind"))
    sizes = []
    for first in range(0, 160, 4):
        buffer.add_rollouts(group(first, 3, example=str(first)))
        buffer.add_rollouts(group(first + 3, 1, example=str(first)))
        sizes.append(log.stat().st_size)
    assert max(sizes) < 40_000
    buffer.close()
    again = make()
    assert (again.num_waiting, len(again)) == (1, 161)
    again.flush()
    assert log.stat().st_size == 0
    buffer = make("cut", batch_maker=GrpoBatchMaker(rng_seed=0))
    buffer.add_rollouts(group(0, 3))

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        assert buffer.add_rollout(rollout(3))
    assert buffer.num_groups == 1
    assert buffer.create_and_store_batch(4) is not None
    buffer.close()
    assert len(make("cut")) == 4


def test_rollouts_are_found_by_uid_and_by_problem_without_opening_other_files(tmp_path: Path) -> None:
    def some(number: int) -> RolloutRecord:
        return rollout(number, example=str(number // 2))

    with RolloutBuffer(tmp_path, group_size=2, seal_timeout=1e6, sync=False) as buffer:
        for number in range(7):
            buffer.add_rollout(some(number))
        for part in open_rollouts(tmp_path, example_id=2).groups:
            part.path.write_bytes(b"damaged")
        assert buffer.rollout("r1") == some(1)
        assert buffer.rollout("r6") == some(6)
        assert [r.rollout_uid for r in buffer.rollouts(example_id=[0, "1"])] == ["r0", "r1", "r2", "r3"]
        stored = open_rollouts(tmp_path, environment="math", example_id="1")
        assert stored.uids == ["r2", "r3"]
        assert stored.rollout("r3") == some(3)
        assert len(open_rollouts(tmp_path, example_id="9")) == 0
        assert_raises(MissingRowError, "expected the uid of one of 2, found 'r0'", stored.rollout, "r0")
        assert_raises(MissingRowError, "expected the uid of one of 7, found 'r9'", buffer.rollout, "r9")


def test_rewards_may_be_unknown_until_a_batch_maker_needs_them(tmp_path: Path) -> None:
    given = [replace(one, reward=None, turns=(Turn("4", "assistant", [1], [-0.5]),)) for one in group(0, 5)]
    with RolloutBuffer(tmp_path / "unscored", 4, seal_timeout=1e6, sync=False) as unscored:
        assert unscored.add_rollouts(given) == 5
        found = [*unscored.rollouts(), unscored.rollout("r4")]
        assert found == given
        assert not any(one.reward for one in found)
    with RolloutBuffer(tmp_path / "scored", 4, batch_maker=GrpoBatchMaker(), sync=False) as scored:
        assert_raises(DataError, "rollout 'r0': expected a reward of the rollout or of", scored.add_rollouts, found)
        assert not len(scored)
        scored.add_rollouts(replace(one, reward=float(one.created)) for one in found)
        assert scored.create_and_store_batch(4) is not None
    with pytest.raises(DataError, match="rollout 'r0': expected a reward"):
        RolloutBuffer(tmp_path / "unscored", 4, batch_maker=GrpoBatchMaker(), sync=False)
