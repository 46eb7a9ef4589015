"""Reading is asked for ahead: batches are those of memory that is there, whatever lies elsewhere, or on a disk."""

import itertools
import mmap
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from numpy.testing import assert_array_equal

from mouse_core import BatchSource, DatasetStore, Field, PrefetchBatchifier, readahead
from mouse_core.errors import DataError, StoreWarning
from mouse_core.images import encode_png
from mouse_core.readahead import ReadAhead, by_batch, merged, room_for_files
from mouse_core.sampling import Blocks
from mouse_core.store.snapshot import Snapshot
from tests.core.disk_cases import rows_of, table_of
from tests.core.oracle import assert_same

Int64s = npt.NDArray[np.int64]
takes_advice = pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="no advice is taken here")


class Asked:
    """What is asked for of rows elsewhere, and waited for; copying is begun again now and then."""

    def __init__(self, backing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches, self.ranges = list[int](), list[tuple[int, int]]()
        self.until, self.waits, self.begin = 1 << 40, 0, int(backing.begin)
        ask, wait, still = backing.ask, backing.wait, backing.still

        def asking(begins: Int64s, ends: Int64s, batches: Int64s) -> None:
            for batch in dict.fromkeys(batches.tolist()):
                firsts, behind = begins[batches == batch], ends[batches == batch]
                self.check(backing, firsts, behind)
                self.batches.append(batch)
                self.ranges += zip(firsts.tolist(), behind.tolist(), strict=True) if batch < self.until else ()
            ask(begins, ends, batches)

        def waiting(begins: Int64s, ends: Int64s) -> object:
            self.check(backing, begins, ends)
            self.waits += 1
            return wait(begins, ends)

        monkeypatch.setattr(backing, "ask", asking)
        monkeypatch.setattr(backing, "wait", waiting)
        monkeypatch.setattr(backing, "still", lambda token: still(token) and self.waits % 3 > 0)

    def check(self, backing: Any, begins: Int64s, ends: Int64s) -> None:
        assert begins.dtype == ends.dtype == np.int64
        assert (ends > begins).all()
        assert (begins[1:] > ends[:-1] + backing.gap).all(), "they ascend, and are merged"
        assert begins[0] >= backing.begin
        assert ends[-1] <= backing.begin + backing.size


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Snapshot]:
    rows = 3_000
    number, rng = np.arange(rows), np.random.default_rng(5)
    columns = {
        "action": rng.integers(0, 5, rows),
        "reward": np.where(number % 100 == 0, 0, rng.normal(size=rows)).astype(np.float32),
        "done": (number % 100 == 99).astype(np.int8),
        "goal": number % 7 == 0,
        "observation": rng.normal(size=(rows, 6)),
        "words": [[int(one)] * (one % 4) for one in number],
    }
    fields = [Field("goal"), Field("words", shape=(3,), pad=-1)]
    folder, memory = tmp_path_factory.mktemp("ahead") / "store", DatasetStore(fields=fields, max_action_dim=5)
    with DatasetStore.open(folder, "a", fields=fields, max_action_dim=5, layout="windows") as store:
        for one in (store, memory):
            one.extend(columns)
    return folder, memory.snapshot()


@pytest.fixture
def both(
    written: tuple[Path, Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Asked, Snapshot, Snapshot]:
    """What is asked for, the rows in memory, and the same elsewhere, of which nothing is here yet."""
    pytest.importorskip("obstore")
    folder, known = written
    fields = [Field("goal"), Field("words", shape=(3,), pad=-1)]
    options: dict[str, Any] = {"cache": tmp_path / "cache", "cache_bytes": 64 << 20, "dense_bytes": 0}
    backed = DatasetStore.open(folder.as_uri(), fields=fields, max_action_dim=5, **options).snapshot()
    (backing,) = backed.backings
    monkeypatch.setattr(backing, "gap", 0)  # bytes are looked at here, and not pages
    return Asked(backing, monkeypatch), known, backed


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_length": 1, "batch_size": 33, "sampling": "sequential"},
        {"sequence_length": 8, "batch_size": 6, "boundary": "episode", "pad": True, "shard": (1, 2)},
        {
            "sequence_length": 5,
            "batch_size": 4,
            "sampling": Blocks(rows=40, pool=8),
            "windows": {"obs_continuous": [-2, 0, 3], "reward": range(4)},
        },
        {"sequence_length": 1200, "batch_size": 2, "fields": ["reward", "goal"]},
    ],
)
def test_batches_are_those_of_memory_that_is_there(both: Any, options: dict[str, Any]) -> None:
    asked, known, backed = both
    ours, theirs = BatchSource(backed, seed=3, **options), BatchSource(known, seed=3, **options)
    for index in [*range(3), 90, 7]:
        assert_same(ours[index], theirs[index], index)
    assert asked.waits
    if "boundary" in options:
        assert_array_equal(backed.episode_starts, known.episode_starts)


def test_batches_to_come_are_asked_for_in_their_order(both: Any) -> None:
    asked, known, backed = both
    source = BatchSource(backed, 40, 4, seed=1, fields=["reward", "obs_continuous"])
    for index in range(40):
        _ = source[index]
        if index > 1:
            assert set(range(index + 1, index + 9)) <= set(asked.batches), f"batch {index} has come"
    assert asked.batches == sorted(set(asked.batches)), "each once"
    with PrefetchBatchifier(known, 40, 4, seed=1) as theirs, PrefetchBatchifier(backed, 40, 4, seed=1) as ours:
        for _ in range(20):
            assert_same(ours.next_batch(), theirs.next_batch())


def test_an_error_of_one_of_several_batches_is_not_raised_for_the_others(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches whose bytes are there are copied several at a time."""
    _, known, backed = both
    copied, several = ReadAhead.copied, [0]

    def copying(self: ReadAhead, block: Any, views: Any, first: int, count: int) -> Any:
        if count > 1:
            several[0] += 1
            raise DataError("one of several")
        return copied(self, block, views, first, count)

    monkeypatch.setattr(ReadAhead, "copied", copying)
    ours, theirs = (BatchSource(rows, 20, 4, seed=1, fields=["reward"]) for rows in (backed, known))
    for _ in range(2):
        for index in range(30):
            assert_array_equal(ours[index]["reward"], theirs[index]["reward"])
    assert several[0]


def test_threads_that_copy_different_batches_ask_ahead_without_harm(both: Any) -> None:
    """Each takes out what it copies, of what another one goes through."""
    _, _, backed = both
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with PrefetchBatchifier(backed, 2, 2, seed=1, num_workers=4, prefetch=16, fields=["reward"]) as loader:
            for _ in range(300):
                loader.next_batch()
    finally:
        sys.setswitchinterval(interval)


def test_whoever_goes_back_is_asked_ahead_for_again_and_a_worker_asks_for_its_own(both: Any) -> None:
    asked, _, backed = both
    source = BatchSource(backed, 20, 4, seed=1, fields=["reward"])
    for index in range(100, 120):
        _ = source[index]
    asked.batches.clear()
    for index in range(24):  # what is there is copied up to 8 batches at a time
        _ = source[index]
    assert set(range(28, 40)) <= set(asked.batches)
    for index in range(24, 40):
        _ = source[index]
    asked.batches.clear()
    for index in range(40, 70):
        _ = source[index], source[500 + index]
    assert len(asked.batches) < 180
    asked.batches.clear()
    source = BatchSource(backed, 40, 4, seed=1, fields=["reward"])
    for index in range(3, 120, 8):
        _ = source[index]
    assert all(index % 8 == 3 for index in asked.batches)


@pytest.mark.parametrize("boundary", ["stream", "episode"])
def test_blocks_are_asked_for_as_a_whole(both: Any, boundary: Any) -> None:
    """Each byte of an epoch about once over all shards, in few long ranges; every one before its batch comes."""
    asked, _, backed = both
    options: dict[str, Any] = {"boundary": boundary, "fields": ["reward", "obs_continuous"]}
    found = []
    for sampling, ranks in (("batch", 1), (Blocks(rows=100, pool=8), 1 if boundary == "episode" else 2)):
        times, ranges = np.zeros(1 << 20, np.int64), 0
        for rank in range(ranks):
            asked.ranges.clear()
            source = BatchSource(backed, 10, 8, sampling, shard=(rank, ranks), **options)
            asked.until = len(source)
            for index in range(len(source)):
                _ = source[index]
            # What is asked for again is there; how many ranges had something new?
            known = np.zeros(len(times), np.bool_)
            for first, end in np.array(asked.ranges) - asked.begin:
                ranges += not known[first:end].all()
                known[first:end] = True
            times += known
        found.append((times, ranges))
    (_, short), *others = found
    for times, ranges in others:
        assert (times > 0).sum() >= 0.98 * (found[0][0] > 0).sum()
        assert times.sum() < 1.1 * (times > 0).sum()
        assert ranges < short / 3


@takes_advice
@pytest.mark.parametrize("boundary", ["stream", "episode"])
def test_blocks_of_files_are_asked_for_once_where_there_is_room(
    written: Any, monkeypatch: pytest.MonkeyPatch, boundary: Any
) -> None:
    folder, known = written
    asked, ask = [0], readahead.LocalFiles.ask

    def asking(self: readahead.LocalFiles, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        asked[0] += int((ends - begins).sum())
        ask(self, begins, ends, batches)

    monkeypatch.setattr(readahead.LocalFiles, "ask", asking)
    monkeypatch.setattr(readahead.LocalFiles, "gap", 0)
    monkeypatch.setattr(readahead.LocalFiles, "look", lambda self, batches: True)
    monkeypatch.setattr(readahead, "room_for_files", lambda: 0)
    options: dict[str, Any] = {"boundary": boundary, "fields": ["reward", "obs_continuous"], "seed": 2}
    fields, found = [Field("goal"), Field("words", shape=(3,), pad=-1)], []
    for room in (1 << 30, 2_000):
        there = DatasetStore.open(folder, fields=fields, max_action_dim=5)
        monkeypatch.setattr("mouse_core._base.room.room_for_files", lambda room=room: room)
        asked[0] = 0
        source, here = (BatchSource(one, 10, 8, Blocks(rows=100, pool=8), **options) for one in (there, known))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for index in range(2 * len(source)):
                assert_same(source[index], here[index], index)
        found.append((asked[0], [str(one.message) for one in said]))
    (once, nothing), (again, warned) = found
    assert not nothing
    assert again > 1.7 * once
    (said_once,) = warned
    assert re.match(
        r"sampling 'blocks': expected [\d,]+ free bytes in memory for the pool of 8 blocks, found 2,000", said_once
    )


def test_what_cannot_be_had_is_an_error_of_its_batch_and_a_small_cache_a_warning(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, backed = both
    source = BatchSource(backed, 40, 4, seed=1)
    first = source[0]
    with monkeypatch.context() as gone:
        gone.setattr(backed.backings[0], "wait", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
        with pytest.raises(ConnectionError, match="gone"):
            _ = source[1]
    assert_array_equal(source[0]["reward"], first["reward"])
    _, _, backed = both
    backed.backings[0].room = 1000
    source = BatchSource(backed, 10, 8, Blocks(rows=100, pool=8), fields=["reward"])
    _ = source[0]
    with pytest.warns(
        StoreWarning, match=r"in the cache for the pool of 8 blocks, found 1,000, .* use cache_bytes= with more"
    ):
        _ = source[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = 1_000
    number, rng = np.arange(rows), np.random.default_rng(2)
    columns = {
        "action": rng.integers(0, 5, rows),
        "reward": np.where(number % 50 == 0, 0, rng.normal(size=rows)),
        "done": (number % 50 == 49).astype(np.int8),
        "observation": pa.FixedSizeListArray.from_arrays(rng.normal(size=4 * rows), 4),
        "words": pa.array([[int(one)] * (one % 4) for one in number], pa.list_(pa.int32())),
        "text": pa.array([None if one % 9 == 0 else one / 4 for one in number]),
    }
    folder = tmp_path_factory.mktemp("saved")
    datasets.Dataset(pa.table(columns)).save_to_disk(folder, num_shards=2)
    return folder


OPTIONS: dict[str, Any] = {
    "fields": [Field("words", shape=(3,), pad=-1), Field("text", fill=0.5)],
    "max_action_dim": 5,
    "dense_bytes": 0,
}


class Advice:
    """Advice about ranges of memory, noted and not given: begins, sizes and the advice itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given = list[tuple[int, int, int]]()
        monkeypatch.setattr(readahead, "_advise", self._note)

    def _note(self, begins: Int64s, sizes: Int64s, advice: int) -> None:
        self.given += [(*place, advice) for place in zip(begins.tolist(), sizes.tolist(), strict=True)]

    def asked(self) -> list[tuple[int, int]]:
        return [(begin, begin + size) for begin, size, advice in self.given if advice == readahead._WILL_NEED]


@pytest.fixture(scope="module")
def layouts(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("layouts") / layout for layout in ("columns", "windows")]
    for folder in folders:
        with DatasetStore.open(folder, "a", layout=folder.name, **OPTIONS) as writer:
            writer.from_dataset(datasets.load_from_disk(str(saved)))
    return folders


@takes_advice
def test_batches_of_files_that_do_not_fit_are_the_same(
    saved: Path, layouts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    give = readahead._madvise()
    stores = [DatasetStore.open(saved, **OPTIONS)]
    stores += [DatasetStore.open(folder, verify=verify, **OPTIONS) for folder in layouts for verify in (True, False)]
    sampling: tuple[Any, ...] = ("random", Blocks(rows=100, pool=8))
    memory = DatasetStore(**OPTIONS).from_dataset(datasets.load_from_disk(str(saved), keep_in_memory=True))
    wanted = [[BatchSource(memory, 30, 8, how, seed=4)[index] for index in range(4)] for how in sampling]
    monkeypatch.setattr(readahead, "room_for_files", lambda: 0)
    monkeypatch.setattr("mouse_core._base.room.room_for_files", lambda: 1 << 30)
    advised = list[tuple[int, int]]()

    def madvise(begin: int, size: int, advice: int) -> int:
        advised.append((advice, size))
        return int(give(begin, size, advice))

    monkeypatch.setattr(readahead, "_madvise", lambda: madvise)
    for store in stores:
        advised.clear()
        for how, expected in zip(sampling, wanted, strict=True):
            source = BatchSource(store, 30, 8, how, seed=4)
            for index, batch in enumerate(expected):
                assert_same(source[index], batch, index)
        assert sum(advice == readahead._WILL_NEED for advice, _ in advised) >= 6
        assert any(advice == readahead._RANDOM for advice, _ in advised)


@takes_advice
def test_no_more_is_asked_for_than_the_kernel_reads_at_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "room_for_files", lambda: 0)
    blocks, advice = itertools.count(), Advice(monkeypatch)
    monkeypatch.setattr(readahead, "usage", lambda: SimpleNamespace(ru_majflt=0, ru_inblock=next(blocks)))
    store, found = DatasetStore.open(saved, **OPTIONS), []
    for most in (1 << 30, 500):
        monkeypatch.setattr(readahead, "_AT_ONCE", most)
        source = BatchSource(store, 30, 8, seed=4)
        for index in range(29):
            _ = source[index]
        advice.given.clear()
        for index in range(29, 60):
            _ = source[index]
        asked = advice.asked()
        assert all(begin < end <= begin + most for begin, end in asked)
        found.append((len(asked), {at for begin, end in asked for at in range(begin, end)}))
    (whole, wanted), (cut, same) = found
    assert same == wanted
    assert whole < cut


@takes_advice
def test_a_store_that_grows_is_measured_against_memory_when_it_has_grown_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every few rows, which takes longer than all else that new rows take; nor never."""
    asked, room = list[int](), [1 << 50]
    monkeypatch.setattr(readahead, "room_for_files", lambda: asked.append(1) or room[0])
    with DatasetStore.open(tmp_path, "a") as writer:
        writer.from_dataset(table_of("numbers", 0, 1_000))
        reader = DatasetStore.open(tmp_path)
        source = BatchSource(reader, 20, 8, seed=4)
        _ = source[0]
        for start in (1_000, 1_200, 1_400):
            writer.extend(rows_of("numbers", start, 200))
            writer.flush()
            source = source.with_snapshot(reader.snapshot(), epoch_start=start)
            _ = source[start]
    assert len(asked) == 1
    large = SimpleNamespace(
        is_mapped=False, origin=None, sealed_files=[SimpleNamespace(mapped=None)], sealed_bytes=100 << 20
    )
    files = readahead.LocalFiles.of([large])
    assert files is not None
    room[0] = 150 << 20
    files.grow([large], [large])
    assert not files.is_on
    files.grow([large], [])
    assert files.is_on


def test_room_for_files_is_what_the_narrowest_group_leaves(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def room() -> int | None:
        return room_for_files(tmp_path / "proc", tmp_path / "groups")

    assert room() is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    7000 kB\n")
    assert room() == 7000 << 10
    write("proc/self/cgroup", "5:cpu:/other\n4:memory:/job/step\n0::/\n")
    write("groups/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write("groups/memory/memory.usage_in_bytes", "5000\n")
    assert room() == 7000 << 10
    # What is used and is no file's is gone: of 900,000 bytes 300,000 - 250,000, and in the inner group 40,000.
    for group, limit in (("job", 900_000), ("job/step", 950_000)):
        write(f"groups/memory/{group}/memory.limit_in_bytes", f"{limit}\n")
        write(f"groups/memory/{group}/memory.usage_in_bytes", "300000\n")
        write(f"groups/memory/{group}/memory.stat", "cache 7\ntotal_cache 250000\ntotal_rss 50000\n")
    assert room() == 850_000
    # Of version 2, without limit in the inner group.
    write("proc/self/cgroup", "0::/user/job\n")
    write("groups/user/job/memory.max", "max\n")
    write("groups/user/job/memory.current", "100\n")
    write("groups/user/memory.max", "70000\n")
    write("groups/user/memory.current", "30000\n")
    write("groups/user/memory.stat", "anon 1\nfile 20000\n")
    assert room() == 60_000
    # A container sees its own group at the root.
    write("proc/self/cgroup", "0::/not/here\n")
    write("groups/memory.max", "5000\n")
    write("groups/memory.current", "9000\n")
    assert room() == 0


def test_ranges_are_merged_over_gaps() -> None:
    rng = np.random.default_rng(1)
    for gap in (0, 3, 50):
        begins = rng.integers(0, 500, 40)
        ends = begins + rng.integers(1, 30, 40)
        wanted: list[list[int]] = []
        for first, end in sorted(zip(begins.tolist(), ends.tolist(), strict=True)):
            if wanted and first <= wanted[-1][1] + gap:
                wanted[-1][1] = max(wanted[-1][1], end)
            else:
                wanted.append([first, end])
        assert np.transpose(merged(begins, ends, gap)).tolist() == wanted
        numbers = rng.integers(0, 3, 40)
        each = [(*merged(begins[numbers == one], ends[numbers == one], gap), one) for one in range(3)]
        expected = [[*pair, one] for first, last, one in each for pair in zip(first, last, strict=True)]
        assert np.transpose(by_batch(begins, ends, numbers, gap)).tolist() == expected


def test_batches_may_be_asked_for_that_were_planned_when_they_were_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DatasetStore.open(tmp_path, "a", layout="windows") as writer:
        writer.from_dataset(table_of("numbers", 0, 2_000))
    store, memory = DatasetStore.open(tmp_path), DatasetStore().from_dataset(table_of("numbers", 0, 2_000))
    ours, theirs = (BatchSource(one, 40, 32, seed=1) for one in (store, memory))
    monkeypatch.setattr("mouse_core.readahead.LocalFiles.look", lambda _, batches: batches > 0)
    for index in range(12):
        assert_same(ours[index], theirs[index], index)


@takes_advice
def test_what_tells_where_values_lie_is_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, given = 3_000, list[list[tuple[int, int]]]()

    def advise(begins: Int64s, sizes: Int64s, advice: int) -> None:
        given.append([*zip(begins, begins + sizes, strict=True)])

    columns: dict[str, Any] = {name: np.zeros(rows, np.int64) for name in ("action", "reward", "done")}
    columns["observation"] = pa.array([[one / 2, one / 3] for one in range(rows)], pa.list_(pa.float32()))
    table = pa.table(columns)
    with pa.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    source = BatchSource(DatasetStore.open(tmp_path / "rows.arrow", dense_bytes=0), 10, 8, seed=2)
    _ = source[0]
    faults = itertools.count()
    monkeypatch.setattr(readahead, "usage", lambda: SimpleNamespace(ru_majflt=next(faults), ru_inblock=0))
    monkeypatch.setattr(readahead, "_advise", advise)
    for index in range(1, 10):
        _ = source[index]
    chunks = source.snapshot.segments[0].table.column("observation").chunks
    offsets, both = [chunk.buffers()[1].address for chunk in chunks], []
    for one in given:
        lists = sum(any(low <= at < high for low, high in one) for at in offsets)
        both.append(min(lists, len(one) - lists))
    assert max(both) > 10


@takes_advice
def test_what_gathering_reads_is_asked_for_and_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2_000
    number = np.arange(rows)
    encoded = encode_png(np.zeros((4, 4, 1), np.uint8))
    columns: dict[str, Any] = {name: np.zeros(rows, np.int64) for name in ("action", "reward", "done")}
    columns["words"] = pa.array([[int(one)] * (50 + one % 4) for one in number], pa.list_(pa.int32()))
    columns["some"] = pa.array([None if one % 9 == 0 else one / 4 for one in number])
    columns["picture"] = pa.array([{"bytes": encoded, "path": None}] * rows)
    with pa.ipc.new_stream(str(tmp_path / "rows.arrow"), pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    fields = [
        Field("words", shape=(60,), pad=-1),
        Field("some", fill=0.5),
        Field("picture", image=True, shape=(4, 4, 1)),
    ]
    store = DatasetStore.open(tmp_path / "rows.arrow", fields=fields, dense_bytes=0)
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(readahead, "room_for_files", lambda: 0)
    monkeypatch.setattr(
        readahead.LocalFiles, "ask", lambda _, begins, ends, batch: asked.extend(zip(begins, ends, strict=True))
    )
    source = BatchSource(store, 4, 3, seed=2, fields=["words", "some", "picture"])
    table = source.snapshot.segments[0].table
    _ = source[0]
    words, some, picture = (table.column(name).chunk(0) for name in ("words", "some", "picture"))
    values = [(words.values, words.offsets), (picture.field("bytes"), None)]
    for start in source.plan(0).starts.tolist():
        wanted = [(some.buffers()[1].address + 8 * start, 32)]
        for array, offsets in values:
            data = array.buffers()[-1].address
            ends = np.frombuffer(array.buffers()[1], np.int32) if offsets is None else offsets.to_numpy() * 4
            first, end = int(ends[start]), int(ends[start + 4])
            wanted.append((data + first, end - first))
        for begin, size in wanted:
            assert any(low <= begin and begin + size <= high for low, high in asked)
    assert sum(high - low for low, high in asked) < 0.1 * sum(one.nbytes for one in (words, some, picture))
