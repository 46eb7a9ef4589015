"""A store on disk keeps what it promised: killed, without power, with damaged files, while others read it."""

import errno
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mouse_core import DatasetStore, StorageError
from tests.core.damaged_files import damaged_copies
from tests.core.disk_cases import leftovers, numbers_in, row_of, rows_of, table_of
from tests.core.power_cut import Disk
from tests.programs import run_code, run_module

# Numbers, and for long the columns that have all kinds of values.
FIRST_KINDS = ("numbers", pytest.param("mixed", marks=pytest.mark.long))

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs fork, and files told by descriptors")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk: what is on it is followed where that counts."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.mark.slow
def test_kills() -> None:
    found = json.loads(run_module("tests.core.store_crash", "--kills", 15, "--seed", 1).splitlines()[-1])
    assert found["kills"] == 15


def life(folder: Path, kind: str, sync: str, disk: Disk) -> None:
    """A program, and what it was promised by when: numbers of rows that must be there, from and to."""
    number = 0

    def add(count: int) -> None:
        nonlocal number
        if count == 1:
            store.append(row_of(kind, number))
        else:
            store.extend(rows_of(kind, number, count))
        number += count
        disk.promise((first, number) if sync == "append" else "nothing")

    def synced(done: Callable[[], None]) -> None:
        done()
        disk.promise((first, number) if sync != "none" else "nothing")

    first = 0
    store = DatasetStore.open(folder, "a", sync=sync)
    add(20)
    add(1)
    synced(store.flush)
    add(7)
    store.from_dataset(table_of(kind, number, 12))
    number += 12
    add(1)
    synced(store.flush)
    synced(store.flush)
    synced(store.close)
    store = DatasetStore.open(folder, "a", sync=sync)
    add(9)
    synced(store.flush)
    disk.promise("clearing")
    first = number
    store.clear()
    add(5)
    synced(store.flush)
    add(30)
    synced(store.close)
    store = DatasetStore.open(folder, "a", sync=sync)
    add(3)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["none", pytest.param("flush", marks=pytest.mark.long), "append"])
@pytest.mark.parametrize("kind", FIRST_KINDS)
def test_power_cuts(kind: str, sync: str, tmp_path: Path) -> None:
    """Cut after every call that syncs or changes names: what was promised is there, and nothing is torn."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root, by_page=True)
    with disk.watched():
        life(root / "runs" / "store", kind, sync, disk)
    seen = 0
    for moment, machine in disk.machines(tmp_path / "machines"):
        folder = machine / "runs" / "store"
        # Once rows were asked to be forgotten they may be gone, and need not.
        begins = moment.promised.index("clearing") if "clearing" in moment.promised else 0
        promised = [one for one in moment.promised[begins:] if isinstance(one, tuple)]
        first, stop = promised[-1] if promised else (0, 0)
        with DatasetStore.open(folder, "a", sync=sync) as store:
            found = numbers_in(store)
            assert found.stop >= stop, f"{moment.change}: {found}, promised {first, stop}"
            if found:
                assert found.start == 0 if not begins else found.start in (0, 50), f"{moment.change}: {found}"
                assert found.start <= first or not promised, f"{moment.change}: {found}, promised {first, stop}"
            number = found.stop
            store.extend(rows_of(kind, number, 4))
        with DatasetStore.open(folder) as store:
            assert numbers_in(store) == (range(found.start, number + 4) if len(found) else range(number, number + 4))
        assert not leftovers(folder), moment.change
        shutil.rmtree(machine)
        seen += 1
    assert seen > 30


# Calls that need room.
NEED_ROOM = ("write", "pwrite", "replace", "fsync", "fdatasync", "posix_fallocate", "mkdir", "open", "link")


PROGRAM = "open extend append flush dataset append flush close open extend flush extend close"


class Full:
    """A disk that is full for one call, whichever is the next of a number."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for name in NEED_ROOM:
            patch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            if name != "open" or arguments[1] & os.O_CREAT:
                self.left -= 1
                if self.left == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **options)

        return made


class Stubborn:
    """A program that tries again where there was no room.

    Args:
        folder: Of the store.
        kind: Of the rows.
        sync: See ``DatasetStore.open``.
    """

    def __init__(self, folder: Path, kind: str, sync: str) -> None:
        self.kind, self.number, self.failed = kind, 0, 0
        self.opening = partial(DatasetStore.open, folder, "a", sync=sync)
        self.store: DatasetStore | None = None

    def run(self) -> None:
        for what in PROGRAM.split():
            if what == "open":
                self.store = None
                self.store = self.tried(self.opening)
                continue
            assert self.store is not None
            count = {"append": 1, "extend": 25, "dataset": 25}.get(what, 0)
            if what == "append":
                self.tried(partial(self.store.append, row_of(self.kind, self.number)))
            elif what == "extend":
                self.tried(partial(self.store.extend, rows_of(self.kind, self.number, count)))
            elif what == "dataset":
                self.tried(partial(self.store.from_dataset, table_of(self.kind, self.number, count)))
            else:
                self.tried(getattr(self.store, what))
            self.number += count

    def tried(self, call: Callable[[], Any]) -> Any:
        for _ in range(3):
            try:
                return call()
            except StorageError as error:
                said = str(error)
            assert "No space left" in said
            self.failed += 1
            if self.store is not None and len(self.store) > self.number:
                return None  # the rows are there, and only the disk does not have them yet
        raise AssertionError(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sync"), [pytest.param("numbers", "flush", marks=pytest.mark.long), ("mixed", "append")]
)
def test_a_disk_that_is_full_for_a_while(kind: str, sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any call that needs room: an error of ours, no row is lost, and what failed works when there is room again."""
    full, step, failed = Full(monkeypatch), 0, 1
    while failed:
        step += 2
        folder = tmp_path / str(step) / "store"
        program = Stubborn(folder, kind, sync)
        full.left = step
        program.run()
        # What is done in the background fails there, and is tried again.
        failed = full.left <= 0
        full.left = -1
        assert numbers_in(DatasetStore.open(folder)) == range(program.number), f"step {step}"
        with DatasetStore.open(folder, "a"):
            pass
        assert not leftovers(folder), f"step {step}"
    assert step > 15


READER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from mouse_core import DatasetStore, StorageError
from mouse_core.errors import MouseError
from mouse_core.store.disk.checking import repair
from tests.core.disk_cases import check_batches, numbers_in, rows_kept
for path in sys.argv[2:]:
    print(json.dumps([path, "begins", ""]), flush=True)
    try:
        if sys.argv[1] == "repair":
            done = repair(path)
            with DatasetStore.open(path, "a") as store:
                found = rows_kept(store)
            assert len(found) == done.rows, f"{len(found)} rows, and {done.rows} were said to be whole"
            assert not repair(path).said, "repaired twice"
            said = ["read", len(found)]
        else:
            store = DatasetStore.open(path, sys.argv[1])
            found = numbers_in(store)
            check_batches(store)
            said = ["read", [found.start, found.stop]]
    except MouseError as error:
        said = ["refused", str(error)]
    except AssertionError as error:
        said = ["wrong", str(error)]
    except Exception as error:
        said = ["foreign", repr(error)]
    print(json.dumps([path, *said]), flush=True)
"""


def read_copies(copies: list[Path], mode: str, rows: int) -> Counter[str]:
    """What becomes of damaged copies; a child reads them, as it may be ended by a signal."""
    done = run_code(READER, mode, *copies, seconds=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}: {done.returncode}: {done.stderr[-2000:]}"
    counts: Counter[str] = Counter()
    for path, what, said in lines:
        if what == "begins":
            continue
        counts[what] += 1
        assert what in ("read", "refused"), f"{path}: {what}: {said}"
        if what == "refused":
            assert path in said, f"{path}: {said}"
        elif mode == "repair":
            # A file is damaged, or two are swapped, and the rest of an episode goes with each.
            assert said >= rows - 940 - 2 * 6, f"{path}: {said}"
        else:
            # What is left out without a word would be a wrong dataset.
            assert said == [0, rows], f"{path}: {said}"
    assert counts.total() == len(copies)
    return counts


def make(folder: Path, kind: str, *, closed: bool, **options: Any) -> int:
    """A store with several files, by a process that may have been killed before it closed it; its rows."""

    def written() -> None:
        store = DatasetStore.open(folder, "a", **options)
        store.extend(rows_of(kind, 0, 40))
        store.from_dataset(table_of(kind, 40, 30))
        store.extend(rows_of(kind, 70, 30))
        store.close()
        store = DatasetStore.open(folder, "a")
        store.extend(rows_of(kind, 100, 900))
        store.flush()
        if closed:
            store.close()

    pid = os.fork()
    if not pid:
        try:
            written()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIRST_KINDS)
@pytest.mark.parametrize("closed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_damaged_copies(kind: str, closed: bool, tmp_path: Path) -> None:
    rows = make(tmp_path / "store", kind, closed=closed, layout="windows" if closed else "columns")
    (tmp_path / "copies").mkdir()
    copies = damaged_copies(tmp_path / "store", tmp_path / "copies", count=50, seed=len(kind) + closed)
    rng = random.Random(closed)
    for number in range(10):
        copy = tmp_path / "copies" / f"swapped-{number}"
        shutil.copytree(tmp_path / "store", copy)
        one, other = rng.sample(sorted(copy.glob("segments/*.arrow")), 2)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        copies.append(copy)
    for number in range(10):
        copy = tmp_path / "copies" / f"edited-{number}"
        shutil.copytree(tmp_path / "store", copy)
        said = json.loads((copy / "manifest.json").read_text())
        segments = said["mouse_store"]["segments"]
        rng.choice(segments).reverse() if number % 2 else segments[0].__setitem__(1, 39)
        (copy / "manifest.json").write_text(json.dumps(said))
        copies.append(copy)
    counts = read_copies(copies, "r", rows)
    assert counts["refused"] > 40
    read_copies(copies, "a", rows)
    assert read_copies(copies[::2], "repair", rows)["read"] > 30


@pytest.mark.long
def test_a_writer_and_readers() -> None:
    found = json.loads(run_module("tests.core.store_together", "--seconds", 10))
    assert found["kills"] >= 2
    assert found["reader-0"]["batches"] > 50
