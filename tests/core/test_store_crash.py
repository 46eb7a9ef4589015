"""A store on disk keeps what it promised: killed, with damaged files, while others read it.

``tests.simulate`` holds it to the same after power cuts, on a full disk, and while another process reads.
"""

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mouse_core import DatasetStore
from tests.core.damaged_files import damaged_copies
from tests.core.disk_cases import rows_of, table_of
from tests.core.killing import in_child
from tests.programs import run_code, run_module

# Numbers, and for long the columns that have all kinds of values.
FIRST_KINDS = ("numbers", pytest.param("mixed", marks=pytest.mark.long))

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs fork, and files told by descriptors")


@pytest.mark.slow
def test_kills() -> None:
    found = json.loads(run_module("tests.core.store_crash", "--kills", 15, "--seed", 1).splitlines()[-1])
    assert found["kills"] == 15


READER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from mouse_core import DatasetStore
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

    in_child(written)
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
