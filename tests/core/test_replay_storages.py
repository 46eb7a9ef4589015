"""Storages of replay buffers: the suite, what only some of ours do, and what mapped rows promise after a crash."""

import errno
import mmap
import os
import random
import shutil
import signal
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mouse_core import ConfigError, DataError, DatasetStore, MouseError, SchemaError, StateError, StorageError
from mouse_core.nested import flatten, map_tree
from mouse_core.replay import ArrayStorage, ListStorage, MemmapStorage, ReplayBuffer, Storage
from mouse_core.replay.storages import memmap
from mouse_core.spec import Alignment
from mouse_core.testing import StorageConformance, example_columns, example_store
from tests.core.power_cut import Disk
from tests.raising import assert_raises


class TestArrayStorage(StorageConformance):
    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> Any:
        return ArrayStorage(capacity, ndim, alignment=alignment)


class TestMemmapStorage(StorageConformance):
    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> Any:
        return MemmapStorage(capacity, folder / "mapped", ndim, alignment=alignment)


class TestReopenedMemmapStorage(StorageConformance):
    """Every call goes to a storage that was opened for it."""

    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> Any:
        def opened() -> MemmapStorage:
            return MemmapStorage(capacity, folder / "mapped", ndim, alignment=alignment)

        def reopened(name: str) -> property:
            return property(lambda _: getattr(opened(), name))

        members = {name: reopened(name) for name in dir(opened()) if not name.startswith("_")}
        return type(
            "Reopened", (), {**members, "__len__": lambda _: len(opened()), "lock": lambda _: None}
        )()  # every call has a lock


class TestListStorage(StorageConformance):
    typed = False
    ndims = (1,)

    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> Any:
        return ListStorage(capacity, alignment=alignment)


def test_many_rows_at_once_are_the_rows_at_their_slots() -> None:
    """Neighbouring fields are copied together, some thousand rows at a time; the last part is smaller."""
    storage, numbers = ArrayStorage(1_000), np.arange(1_000)
    storage.append({"a": numbers, "b": numbers.astype(np.float32), "c": np.repeat(numbers[:, None], 40, 1)})
    for count in (1, 700, 9_001):
        slots = np.random.default_rng(count).integers(1_000, size=count)
        found = storage.get(slots)
        for name, values in found.items():
            wanted = np.repeat(slots[:, None], 40, 1) if name == "c" else slots
            np.testing.assert_array_equal(values, wanted.astype(values.dtype), err_msg=str((name, count)))


class Forgetful(ArrayStorage):
    """Wrong on purpose: rows beyond the end are taken from the wrong place, and refused ones change the cursor."""

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        self.written += 1
        first, n = super().append(rows, one=one)
        return first - 1, n


class FirstOneCounts(ArrayStorage):
    """The first rows say what all must be, also if they are refused."""

    kinds: Any = None

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        if isinstance(rows, dict):
            kinds = {key: leaf.dtype for key, leaf in flatten(rows).items()}
            self.kinds = self.kinds or kinds
            if kinds != self.kinds:
                raise SchemaError(f"rows: expected {self.kinds}, found {kinds}")
        return super().append(rows, one=one)


class PutsHalf(ArrayStorage):
    """Refuses a slot that is not in use, and has overwritten the others by then."""

    def put(self, slots: Any, rows: Any) -> None:
        used = (slots >= 0) & (slots < len(self))
        if used.all():
            return super().put(slots, rows)
        super().put(slots[used], map_tree(lambda leaf: leaf[used], rows))
        raise IndexError(slots)


class LoadsUnseen(ArrayStorage):
    def load(self, state: Any) -> None:
        changes = self.changes
        super().load(state)
        self.changes = changes


class IgnoresAlignment(ArrayStorage):
    def __init__(self, capacity: int, ndim: int, *, alignment: Alignment) -> None:
        super().__init__(capacity, ndim)


class AnyCapacity(ArrayStorage):
    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        try:
            return super().append(rows, one=one)
        except ConfigError:
            return self._appended(3), 3


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Forgetful, "test_rows_lie_where_a_ring_puts_them"),
        (FirstOneCounts, "test_a_refused_first_write_says_nothing"),
        (PutsHalf, "test_what_is_refused_changes_nothing"),
        (LoadsUnseen, "test_a_state_goes_on_elsewhere"),
        (IgnoresAlignment, "test_it_has_the_alignment_that_it_was_given"),
        (AnyCapacity, "test_whole_time_steps_fit"),
    ],
)
def test_the_suite_can_fail(kind: Any, test: str, tmp_path: Path) -> None:
    class Suite(StorageConformance):
        def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> Any:
            return kind(capacity, ndim, alignment=alignment)

    with pytest.raises((AssertionError, SchemaError)):
        getattr(Suite(), test)(tmp_path)


class Step(NamedTuple):
    obs: Any
    reward: Any


@pytest.mark.parametrize(
    "rows",
    [
        {"a": np.arange(5), "b": {"c": np.arange(10.0).reshape(5, 2), "d": {"e": np.array(list("vwxyz"))}}},
        (np.arange(5), {"x": np.arange(5) > 2}),
        Step(np.ones((5, 3), np.float32), np.arange(5.0)),
        np.arange(15).reshape(5, 3),
        {"big": np.arange(5 * 600).reshape(5, 600), "small": np.arange(5, dtype=np.int8), "none": np.empty((5, 0))},
        {"time": np.arange(5).astype("datetime64[s]"), "complex": np.arange(5) * 1j, "half": np.arange(5, dtype="f2")},
        {"other_endian": np.arange(5, dtype=">f4"), "empty": (), "not_contiguous": np.arange(20).reshape(5, 4)[:, ::2]},
    ],
)
@pytest.mark.parametrize("kind", ["array", "memmap"])
def test_any_nesting_of_any_arrays(kind: str, rows: Any, tmp_path: Path) -> None:
    storage = ArrayStorage(4) if kind == "array" else MemmapStorage(4, tmp_path / "m")
    storage.append(rows)
    found = storage.get(np.array([0, 3, 1]))  # rows 4, 3, 1

    def compare(given: Any, got: Any) -> None:
        assert type(got) is type(given)
        if isinstance(given, dict):
            assert list(got) == list(given)
            for name in given:
                compare(given[name], got[name])
        elif isinstance(given, tuple):
            assert len(got) == len(given)
            for one, other in zip(given, got, strict=True):
                compare(one, other)
        elif given.dtype.kind == "U":  # text of any length
            assert got.tolist() == given[[4, 3, 1]].tolist()
        else:
            assert got.dtype == given.dtype.newbyteorder("=")
            np.testing.assert_array_equal(got, given[[4, 3, 1]])
            assert got.flags.c_contiguous
            assert got.flags.writeable
            assert not got.nbytes or got.ctypes.data % 64 == 0

    compare(rows, found)


def test_memory_is_taken_from_the_first_write_on_and_messages_name_field_and_item() -> None:
    tracemalloc.start()
    storage = ArrayStorage(1_000_000)
    assert tracemalloc.get_traced_memory()[0] < 1 << 20
    storage.append({"obs": np.zeros((2, 10), np.float32)})
    assert tracemalloc.get_traced_memory()[0] > 40_000_000
    tracemalloc.stop()
    assert storage.nbytes == 40_000_000
    for thing in (5, "store", object(), {}, DatasetStore()):
        assert_raises(ConfigError, "storage: expected", ReplayBuffer, thing)
    listed = ReplayBuffer(ListStorage(10))
    for rows in (3, object(), {"obs": 1.5}):
        assert_raises(DataError, r"rows: expected a list of rows, or arrays \[n, \.\.\.\], found ", listed.extend, rows)
    assert len(listed) == 0
    storage = ArrayStorage(5)
    storage.append({"obs": {"x": np.zeros((2, 3), np.float32)}, "r": np.zeros(2)})
    with pytest.raises(SchemaError, match=r"field \('obs', 'x'\): expected the dtype float32 .* found float64"):
        storage.append({"obs": {"x": np.zeros((2, 3))}, "r": np.zeros(2)})
    with pytest.raises(SchemaError, match=r"expected the shape \[n, 3\] of the first write, found \[2, 4\]"):
        storage.append({"obs": {"x": np.zeros((2, 4), np.float32)}, "r": np.zeros(2)})
    other = ArrayStorage(5)
    other.append({"a": np.zeros((1, 2))})
    assert_raises(SchemaError, r"'a'.* in item 1; for rows of", other.append, [{"a": np.zeros(2)}, {"a": np.zeros(3)}])


def test_arrays_that_exist_become_the_storage_contiguous_and_writable_or_not() -> None:
    arrays = {"obs": np.arange(12.0).reshape(6, 2), "nested": {"reward": np.arange(6, dtype=np.float32)}}
    storage = ArrayStorage(arrays=arrays)
    assert (len(storage), storage.capacity, storage.written) == (6, 6, 6)
    buffer = ReplayBuffer(storage, batch_size=4)
    np.testing.assert_array_equal(buffer[:]["obs"], arrays["obs"])
    assert buffer.append({"obs": [7.0, 8.0], "nested": {"reward": 9.0}}) == 0
    assert arrays["nested"]["reward"][0] == 9
    batch = buffer.sample()
    assert not np.shares_memory(batch["obs"], arrays["obs"])
    np.testing.assert_array_equal(arrays["obs"][batch["index"]], batch["obs"])
    base = np.arange(40).reshape(10, 4)
    frozen = np.arange(10.0)
    frozen.flags.writeable = False
    storage = ArrayStorage(arrays={"a": base[:, ::2], "b": frozen, "c": base[::-1, 1]})
    found = storage.get(np.array([7, 2]))
    np.testing.assert_array_equal(found["a"], base[[7, 2]][:, ::2])
    np.testing.assert_array_equal(found["b"], [7, 2])
    np.testing.assert_array_equal(found["c"], base[::-1, 1][[7, 2]])
    assert not storage.writable
    for change in (lambda: storage.append({}), lambda: storage.empty(), lambda: storage.put(np.array([0]), {})):
        assert_raises(ConfigError, "read-only", change)
    assert_raises(ConfigError, "ImmutableWriter", ReplayBuffer(storage).append, {})
    storage = ArrayStorage(arrays={"a": np.arange(12).reshape(4, 3)}, ndim=2)
    assert (storage.num_envs, storage.capacity, len(storage)) == (3, 12, 12)
    np.testing.assert_array_equal(storage.get(np.array([5, 7]))["a"], [5, 7])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity: expected an integer of at least 1, found 0"),
        ({"capacity": 2.5}, "found 2.5"),
        ({"capacity": True}, "found True"),
        ({"capacity": None}, "found None"),
        ({"capacity": 3, "ndim": 3}, "ndim: expected 1 or 2, found 3"),
        ({"capacity": 3, "alignment": "left"}, "alignment"),
        ({"capacity": 3, "arrays": {"a": np.arange(3)}}, "found both"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert_raises(ConfigError, message, ArrayStorage, **arguments)
    if "arrays" not in arguments and arguments["capacity"] is not None:
        assert_raises(ConfigError, message, MemmapStorage, path=tmp_path / "m", **arguments)


@pytest.mark.parametrize("kind", ["array", "memmap"])
def test_python_numbers_take_the_dtype_of_their_field(kind: str, tmp_path: Path) -> None:
    storage = ArrayStorage(9) if kind == "array" else MemmapStorage(9, tmp_path / "m")
    storage.append({"x": np.float32(1), "n": np.uint8(1), "done": np.False_, "v": np.zeros(2, np.float32)}, one=True)
    storage.append({"x": 0.1, "n": 200, "done": True, "v": [1, 2.5]}, one=True)
    storage.append({"x": 3, "n": 0, "done": False, "v": np.ones(2, np.float32)}, one=True)
    found = storage.get(np.arange(3))
    np.testing.assert_array_equal(found["x"], np.array([1, 0.1, 3], np.float32))
    assert found["n"].tolist() == [1, 200, 0]
    assert found["done"].tolist() == [False, True, False]
    for bad, error in (
        ({"x": 1e39}, DataError),
        ({"x": np.float64(1)}, SchemaError),
        ({"x": "text"}, SchemaError),
        ({"x": True}, SchemaError),
        ({"x": None}, SchemaError),
        ({"x": 1j}, SchemaError),
        ({"n": 256}, DataError),
        ({"n": -1}, DataError),
        ({"n": 1.0}, SchemaError),
        ({"n": np.int64(1)}, SchemaError),
        ({"done": 1}, SchemaError),
        ({"v": [1.0]}, SchemaError),
        ({"v": [1.0, [2.0]]}, SchemaError),
        ({"v": {"a": 1.0}}, SchemaError),
        ({"v": (1.0, 2.0)}, SchemaError),
    ):
        row = {"x": 1.0, "n": 1, "done": True, "v": [0, 0], **bad}
        assert_raises(error, f"{next(iter(bad))!r}|fields", storage.append, row, one=True)
        assert_raises(error, "expected", storage.append, [{"x": 1.0, "n": 1, "done": True, "v": [0, 0]}, row])
    assert (len(storage), storage.written) == (3, 3)
    infinite = {"x": float("inf"), "n": 1, "done": True, "v": [float("nan"), 0]}
    storage.append(infinite, one=True)
    assert storage.get(np.array([3]))["x"][0] == np.inf


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ({}, SchemaError),
        ({"a": {}}, SchemaError),
        ({"a": object()}, SchemaError),
        ({"a": [object()]}, SchemaError),
        ({1: np.zeros(3)}, SchemaError),
        ({"a": 1.0}, SchemaError),
        ({"a": np.zeros(3), "b": np.zeros(4)}, DataError),
        ([], DataError),
        ([{"a": 1}, {"b": 1}], SchemaError),
        ([{"a": np.zeros(2)}, {"a": np.zeros((3, 1))}], SchemaError),
        ([{"a": np.float32(1)}, {"a": np.float64(1)}], SchemaError),
    ],
)
def test_first_rows_that_cannot_be_stored(rows: Any, error: type[Exception]) -> None:
    storage = ArrayStorage(5)
    assert_raises(error, "expected", storage.append, rows)
    assert (len(storage), storage.keys) == (0, [])
    storage.append({"anything": np.zeros(2)})


def test_a_store_is_a_storage_as_it_stands() -> None:
    store = example_store()
    for given in (store, store.snapshot(), store.to_dataset(), store.to_dataset().data.table):
        buffer = ReplayBuffer(given, batch_size=5)
        assert isinstance(buffer.storage, Storage)
        assert len(buffer) == len(store)
        assert buffer.alignment == "arrived"
        batch = buffer.sample()
        assert batch["obs_continuous"].dtype == store.snapshot().spec["obs_continuous"].dtype
        for number, row in enumerate(batch["index"].tolist()):
            assert batch["reward"][number] == np.float32(store[row]["reward"])
        for change in (
            lambda buffer=buffer: buffer.append({}),
            lambda buffer=buffer: buffer.extend({}),
            lambda buffer=buffer: buffer.empty(),
            lambda buffer=buffer: buffer.__setitem__(0, {}),
        ):
            assert_raises(ConfigError, "expected a writable buffer", change)


def test_a_buffer_over_a_store_sees_the_rows_of_its_beginning() -> None:
    columns = example_columns(80)
    store = DatasetStore()
    store.extend({name: values[:50] for name, values in columns.items()})
    buffer = ReplayBuffer(store, batch_size=5)
    store.extend({name: values[50:60] for name, values in columns.items()})
    assert len(buffer) == 50
    state = buffer.state_dict()
    expected = buffer.sample()["index"]
    again = ReplayBuffer(store.snapshot(50))
    again.load_state_dict(state)
    np.testing.assert_array_equal(again.sample(5)["index"], expected)
    more = ReplayBuffer(store)
    more.load_state_dict(state)  # which has the rows of that time then
    assert len(more) == 50
    with pytest.raises(StateError, match="expected a state of 1 to 40 rows, found 50"):
        ReplayBuffer(store.snapshot(40)).load_state_dict(state)
    slots = np.array([[3, 4, 5], [40, 41, 42]])
    np.testing.assert_array_equal(buffer[slots]["reward"], buffer[:]["reward"][slots])
    np.testing.assert_array_equal(buffer.storage.read("reward", slice(2, 9, 3)), buffer[:]["reward"][2:9:3])


BOOT, FORMAT = 7 * 8, 7  # where the head says when the machine was started, and which format it has


def small(first: int, n: int) -> dict[str, Any]:
    numbers = np.arange(first, first + n)
    return {"number": numbers, "deep": {"values": numbers[:, None] / 3 + np.arange(5)}, "flag": numbers % 3 == 0}


def large(first: int, n: int) -> dict[str, Any]:
    pixels = (np.arange(first, first + n)[:, None] * 7 + np.arange(1500)) % 251
    return {"number": np.arange(first, first + n), "pixels": pixels.astype(np.uint8)}


def ragged(first: int, n: int) -> dict[str, Any]:
    numbers = range(first, first + n)
    return {"number": np.arange(first, first + n), "note": [f"{number} " * (number % 9 + 1) for number in numbers]}


KINDS: dict[str, Callable[[int, int], dict[str, Any]]] = {"small": small, "large": large, "ragged": ragged}


def numbers_of(storage: MemmapStorage, rows: Callable[[int, int], dict[str, Any]]) -> list[int]:
    if not len(storage):
        return []
    found = storage.get(np.arange(len(storage)))
    for slot, number in enumerate(found["number"].tolist()):
        for name, values in rows(number, 1).items():
            one, other = (
                (values, found[name]) if not isinstance(values, dict) else (values["values"], found[name]["values"])
            )
            assert np.array_equal(other[slot], one[0]), f"row {number}: {name}"
    return sorted(found["number"].tolist())


def restarted(folder: Path) -> None:
    with open(folder / "head", "r+b") as file:
        file.seek(BOOT)
        boot = int.from_bytes(file.read(8), "little")
        file.seek(BOOT)
        file.write(struct.pack("<q", boot + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_in_the_place_of_another_or_damaged_is_an_error_that_names_the_file(kind: str, tmp_path: Path) -> None:
    rows, good = KINDS[kind], tmp_path / "good"
    storage = MemmapStorage(40, good)
    for first in range(0, 70, 10):  # the ring comes round
        storage.append(rows(first, 10))
    storage.put(np.array([3]), rows(1000, 1))
    storage.close()
    rng, messages = random.Random(3), []
    for path in sorted(good.glob("*-*")):
        for _ in range(12):
            bad = tmp_path / "bad"
            shutil.copytree(good, bad)
            content = bytearray(path.read_bytes())
            place = rng.randrange(len(content))
            content[place] ^= 1 << rng.randrange(8)
            (bad / path.name).write_bytes(content)
            storage = MemmapStorage(None, bad)
            try:
                expected = [*range(30, 70), 1000]
                expected.remove(30 + (3 - 30) % 40)
                assert numbers_of(storage, rows) == sorted(expected)  # it is in a row that is in no use, or a gap
                storage.verify()
            except StateError as error:
                messages.append((str(error), path.name))
                assert_raises(StateError, "to match its checksum|found damage", storage.verify)
            shutil.rmtree(bad)
    assert len(messages) > 10
    for message, name in messages:
        assert message.startswith(f"{bad / name}: expected row" if "sums" not in name else f"{bad}"), message
    storage = MemmapStorage(40, tmp_path / "m")
    storage.append(KINDS[kind](0, 40))
    storage.close()
    for path in (tmp_path / "m").glob("*-*"):
        if path.name.startswith(("rows", "sums")):
            content = path.read_bytes()
            size = len(content) // 40
            path.write_bytes(content[:size] * 2 + content[2 * size :])
    assert_raises(StateError, "expected row 1 to match its checksum", MemmapStorage(None, tmp_path / "m").verify)


def test_a_row_in_the_place_of_another_is_an_error(tmp_path: Path) -> None:
    storage = MemmapStorage(40, tmp_path / "m")
    storage.append(small(0, 40))
    storage.close()
    path = tmp_path / "m" / "rows-0-0"
    content = path.read_bytes()
    size = len(content) // 40
    path.write_bytes(content[:size] * 2 + content[2 * size :])
    storage = MemmapStorage(None, tmp_path / "m")
    assert storage.get(np.array([0]))["number"].tolist() == [0]
    assert_raises(StateError, "rows-0-0: expected row 1 to match", storage.read, "number", np.array([[0, 1], [2, 3]]))
    assert storage.get(np.array([2]))["number"].tolist() == [2]
    storage.put(np.array([1]), small(7, 1))  # which replaces what is damaged
    assert storage.read("number", slice(0, 4)).tolist() == [0, 7, 2, 3]
    storage.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_flushed_rows_outlive_the_machine(kind: str, tmp_path: Path) -> None:
    """Of all that was written since, any pages may have reached the disk, and any may not."""
    rows, folder, rng = KINDS[kind], tmp_path / "m", random.Random(5)
    storage = MemmapStorage(60, folder, sync="flush")
    first = 0
    for turn in range(6):
        for _ in range(rng.randrange(4)):
            n = rng.choice((1, 5, 30))
            storage.append(rows(first, n))
            first += n
        storage.flush()
        flushed, before = first, files_of(folder)
        n = rng.choice((0, 1, 17, 40, 90))
        storage.append(rows(first, n))
        first += n
        after = files_of(folder)
        for machine in range(4):
            found = tmp_path / f"{turn}-{machine}"
            found.mkdir()
            for name in before.keys() | after.keys():
                pages = any_pages(before.get(name), after.get(name), rng)
                if pages is not None:
                    (found / name).write_bytes(pages)
            restarted(found)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                again = MemmapStorage(60, found)
            numbers = numbers_of(again, rows)
            assert numbers == list(range(numbers[0], numbers[-1] + 1) if numbers else [])
            promised = range(max(first - 60, 0), flushed)
            assert set(promised) <= set(numbers), f"{promised}, found {numbers}"
            assert again.synced in (0, again.written)
            again.append(rows(5000, 1))
            assert 5000 in numbers_of(MemmapStorage(None, found), rows)
            shutil.rmtree(found)


def test_flushed_rows_outlive_the_machine_while_they_move_to_other_files(tmp_path: Path) -> None:
    """The files that the head on the disk names are removed once it names others there."""
    root = tmp_path / "disk"
    root.mkdir()
    disk, array = Disk(root), ReplayBuffer(ArrayStorage(60))
    array.extend(ragged(100, 50))
    with disk.watched():
        storage = MemmapStorage(60, root / "m", sync="flush")
        storage.append(ragged(0, 20))
        storage.flush()
        disk.promise(range(20))
        ReplayBuffer(storage).load_state_dict(array.state_dict())
        storage.flush()
        disk.promise(range(100, 150))
    promises = [frozenset(), frozenset(range(20)), frozenset(range(100, 150))]
    for moment, machine in disk.machines(tmp_path / "machines"):
        if moment.promised:
            restarted(machine / "m")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                found = frozenset(numbers_of(MemmapStorage(60, machine / "m"), ragged))
            assert found in promises[len(moment.promised) :], moment.change


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def any_pages(before: bytes | None, after: bytes | None, rng: random.Random) -> bytes | None:
    """What a disk may have of a file that was on it, and was changed since: the old or the new of every page."""
    if before is None or after is None:
        return before or after
    size, made = max(len(before), len(after)), b""
    for begin in range(0, size, 4096):
        made += rng.choice([before.ljust(size, b"\0"), after.ljust(size, b"\0")])[begin : begin + 4096]
    return made


def test_rows_that_nobody_flushed_are_gone_and_a_warning_says_so(tmp_path: Path) -> None:
    storage = MemmapStorage(40, tmp_path / "m")
    storage.append(small(0, 10))
    storage.flush()
    storage.append(small(10, 5))
    restarted(tmp_path / "m")
    with pytest.warns(UserWarning, match="restarted before 5 of 15 rows were on the disk; they are lost"):
        again = MemmapStorage(None, tmp_path / "m")
    assert numbers_of(again, small) == list(range(10))
    assert again.append(small(10, 1)) == (10, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers_of(MemmapStorage(None, tmp_path / "m"), small) == list(range(11))


@pytest.mark.parametrize("sync", ["none", "flush", "append"])
def test_stats_say_what_is_synced(sync: Any, tmp_path: Path) -> None:
    buffer = ReplayBuffer(MemmapStorage(40, tmp_path / "m", sync=sync))
    storage = buffer.storage

    def known() -> tuple[int, int]:
        found = buffer.stats()
        assert found["synced"] == storage.synced
        return found["written"], found["synced"]

    buffer.extend(small(0, 10))
    assert known() == (10, 10 if sync == "append" else 0)
    storage.flush()
    assert known() == (10, 0 if sync == "none" else 10)
    buffer.append(
        {name: values[0] for name, values in small(10, 1).items() if name != "deep"} | {"deep": {"values": np.zeros(5)}}
    )
    assert known() == (11, {"none": 0, "flush": 10, "append": 11}[sync])
    state = buffer.state_dict()
    buffer.empty()
    assert known() == (0, 0)
    buffer.load_state_dict(state)
    assert known() == (11, 11 if sync == "append" else 0)
    storage.close()
    assert known()[1] == (0 if sync == "none" else 11)


@pytest.mark.parametrize("what", ["rows", "values", "sums", "head"])
def test_flush_waits_for_every_file(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(40, tmp_path / "m", sync="flush")
    storage.append(ragged(0, 10))
    synced, sync = [], os.fsync

    def noting(file: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    monkeypatch.setattr(os, "fsync", noting)
    storage.flush()
    assert any(name.startswith(what) for name in synced), synced
    assert synced[-1] == "head"  # which says so when all others are there


def test_after_a_failed_flush_all_pages_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, sync = set[str](), os.fsync

    class Watched(np.ndarray[Any, Any]):
        """The bytes of a file, which notes when a view of all its pages is written."""

        name = ""

        def __setitem__(self, place: Any, values: Any) -> None:
            if isinstance(place, slice) and place == slice(None) and self.strides == (mmap.PAGESIZE,):
                changed.add(self.name)
            super().__setitem__(place, values)

        def __array_finalize__(self, other: Any) -> None:
            self.name = getattr(other, "name", "")

    def watched(path: Path, nbytes: int) -> Any:
        memory = mapping(path, nbytes).view(Watched)
        memory.name = path.name
        return memory

    def failing(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage = MemmapStorage(40, tmp_path / "m", sync="flush")
    storage.append(ragged(0, 10))
    mapping = memmap.map_file
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(StorageError, match="rows in"):
            storage.flush()
    again = MemmapStorage(40, tmp_path / "m", sync="flush")  # as another process does
    assert len(again) == 10
    monkeypatch.setattr(memmap, "map_file", watched)
    monkeypatch.setattr(os, "fsync", sync)
    again.flush()
    assert {name.partition("-")[0] for name in changed} == {"rows", "sums", "values"}
    changed.clear()
    again.append(ragged(10, 10))
    again.flush()
    assert not changed


def die_making_files(folder: Path, files: int) -> None:
    """Be killed when so many files have been made or lengthened."""
    room, calls = os.posix_fallocate, iter(range(files))

    def killed(*arguments: Any) -> None:
        room(*arguments)
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    buffer = ReplayBuffer(MemmapStorage(50, folder))
    state = buffer.state_dict()
    os.posix_fallocate = killed
    while True:
        buffer.load_state_dict(state)
        buffer.extend(ragged(0, 40))


def test_who_goes_on_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    storage = MemmapStorage(50, folder)
    storage.append(ragged(0, 50))
    left = 0
    for turn in range(1, 9):
        child = os.fork()
        if not child:
            try:
                die_making_files(folder, turn)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        left += len(list(folder.iterdir())) > 6
        storage.append(ragged(0, 1))
        names = {path.name.split("-")[0] for path in folder.iterdir()}
        assert names == {"head", "lock", "rows", "schema", "sums", "values"}
        assert len(list(folder.iterdir())) < 7
        numbers_of(storage, ragged)
    assert left > 3


def of_format(folder: Path, number: int) -> None:
    with open(folder / "head", "r+b") as file:
        file.seek(FORMAT)
        file.write(str(number).encode())


def test_checkpoints_go_between_storages_and_other_formats_are_refused(tmp_path: Path) -> None:
    array = ReplayBuffer(ArrayStorage(40))
    array.extend(large(0, 60))
    mapped = ReplayBuffer(MemmapStorage(40, tmp_path / "m", sync="append"))
    mapped.load_state_dict(array.state_dict())
    assert numbers_of(MemmapStorage(None, tmp_path / "m"), large) == list(range(20, 60))
    assert issubclass(StateError, MouseError)
    storage = MemmapStorage(9, tmp_path / "rows", sync="flush")
    storage.append(small(0, 5))
    other = ArrayStorage(9)
    other.append(small(0, 5))
    other.empty()
    storage.load(other.state())
    assert len(MemmapStorage(9, tmp_path / "rows", sync="flush")) == 0
    assert_raises(ConfigError, "sync: expected one of", MemmapStorage, 40, tmp_path / "s", sync="always")
    assert not (tmp_path / "s").exists()
    of_format(tmp_path / "m", 3)
    assert_raises(StateError, "head: expected a MemmapStorage of format 1, found", MemmapStorage, None, tmp_path / "m")
