"""Memory: a dataset on disk stays there, and private memory does not grow with what was read."""

import signal
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from tests.programs import run_code

STATUS = Path("/proc/self/status")
ROWS = 120_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not STATUS.exists() or "RssAnon" not in STATUS.read_text(),
        reason="the system does not say what memory is private",
    ),
]

PREAMBLE = """
import sys
import datasets, numpy as np, pyarrow as pa
from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier
datasets.disable_progress_bars()

def resident(*kinds):
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith(kinds)) / 1024

# Mapped files; those in a file system that lives in memory count as shared.
FILES = ("RssFile", "RssShmem")

def opened(folder):
    return DatasetStore().from_dataset(datasets.load_from_disk(folder))

large, small = sys.argv[1:]
BatchSource(opened(small), 64, 4)[0]  # libraries are loaded, and their memory is taken
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A large dataset, most of whose 95 MB are in a column that no field reads, and a small one."""
    made = []
    for rows in (ROWS, 2000):
        numbers = np.arange(rows)
        table = pa.table(
            {
                "action": numbers % 4,
                "reward": numbers * 0.5,
                "done": np.zeros(rows, np.int64),
                "observation": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers * 1.0, 16)), 16),
                "video": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * 640, np.uint8)), 640),
            }
        )
        folder = str(tmp_path_factory.mktemp("memory") / str(rows))
        datasets.Dataset(table).save_to_disk(folder, num_shards=1)
        made.append(folder)
    return made


def measure(folders: list[str], program: str) -> list[float]:
    """What a program of its own prints: megabytes."""
    ran = run_code(PREAMBLE + program, *folders)
    assert ran.returncode == 0, ran.stderr
    return [float(word) for word in ran.stdout.split()]


def test_the_measure_measures(folders: list[str]) -> None:
    """Reading everything shows in the resident pages of the file, a copy of it in private memory."""
    program = """
files, private = resident(*FILES), resident("RssAnon")
chunks = datasets.load_from_disk(large).data.column("video").chunks
copy = np.concatenate([chunk.values.to_numpy() for chunk in chunks])
print(resident(*FILES) - files, resident("RssAnon") - private)
"""
    files, private = measure(folders, program)
    assert files > 60
    assert private > 60


@pytest.mark.parametrize(
    ("batch_size", "sampling"),
    [
        (8, "random"),
        (128, "sequential"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((8, "sequential"), (128, "random"))),
    ],
)
def test_private_memory_stays_flat(folders: list[str], batch_size: int, sampling: str) -> None:
    program = f"""
source = BatchSource(opened(large), 64, {batch_size}, sampling={sampling!r})
count = 2000 * 8 // {batch_size}
for index in range(count // 4):
    source[index]
before = resident("RssAnon")
for index in range(count // 4, count + count // 4):
    source[index]
print(resident("RssAnon") - before, {batch_size} * 64 * 19 * 8 / 2**20)
"""
    grown, batch = measure(folders, program)
    assert grown < 4 + 4 * batch


@pytest.mark.parametrize("held", [0, 6])
def test_a_loader_takes_what_its_look_ahead_needs(folders: list[str], held: int) -> None:
    program = f"""
loader = PrefetchBatchifier(opened(large), 64, 256, prefetch=3, num_workers=2)
before = resident("RssAnon")
kept = []
for _ in range(120):
    kept = [*kept, loader.next_batch()][-{held}:] if {held} else []
    if not {held}:
        loader.next_batch()
print(resident("RssAnon") - before, sum(array.nbytes for array in loader.next_batch().values()) / 2**20)
loader.close()
"""
    grown, batch = measure(folders, program)
    assert batch > 2
    # Batches are copied in twos, which share memory: three ready ones and the other half of a pair, two pairs being
    # made, the one in hand, those that are kept and the other half of a pair, and four free pairs.
    assert grown < 16 + (3 + 1 + 4 + 1 + held + 1 + 8) * batch


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [3, 1, 2, 4], [4, 1, 2, 3]])
def test_no_batch_waits_for_somebody_who_has_it(folders: list[str], order: list[int]) -> None:
    """Batches are copied in twos, and who is ahead of the others gets one that is copied alone."""
    program = f"""
source = BatchSource(opened(large), 64, 256)
source[0]
before = pa.total_allocated_bytes()
for index in [*{order}, *range(5, 9)]:
    source[index]
print((pa.total_allocated_bytes() - before) / 2**20, sum(array.nbytes for array in source[9].values()) / 2**20)
"""
    kept, batch = measure(folders, program)
    assert kept < 1.5 * batch  # one of the first block, now two of the last copied ones


def test_opening_and_the_first_batch_read_little(folders: list[str]) -> None:
    """Neither the columns that nothing reads, nor the rows that are not in the batch."""
    program = """
files, private = resident(*FILES), resident("RssAnon")
source = BatchSource(opened(large), 64, 4)
after_opening = resident(*FILES)
source[0]
print(after_opening - files, resident(*FILES) - after_opening, resident("RssAnon") - private)
"""
    opening, first, private = measure(folders, program)
    # Of 95 MB.
    assert opening < 20
    assert first < 20
    assert private < 25


GUARDED = """
import ctypes, mmap, os
import pyarrow as pa
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE

def forbid(buffer, keep_first=0, keep_last=0):
    # The pages that lie wholly in the buffer, but for some bytes at its ends.
    begin = -(-(buffer.address + keep_first) // page) * page
    end = (buffer.address + buffer.size - keep_last) // page * page
    if end > begin and libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return max(0, end - begin)

path = sys.argv[1] + "/guarded.arrow"
numbers = np.arange(120_000)
table = pa.table({
    "action": numbers % 4,
    "reward": numbers * 0.5,
    "done": numbers * 0,
    "observation": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers * 1.0, 4)), 4),
    "log_prob": numbers * -1.0,
})
with pa.ipc.new_stream(path, table.schema) as writer:
    for batch in table.to_batches(max_chunksize=30_000):
        writer.write_batch(batch)
dataset = datasets.Dataset.from_file(path)
def first_of(column):
    return page + 8 * 4096 * (column in ("reward", "done"))
def buffers(column):
    return [chunk.buffers()[-1] for chunk in dataset.data.table.column(column).chunks]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="written for Linux")
@pytest.mark.parametrize(
    ("program", "survives"),
    [
        # A whole epoch, while the pages of columns that no chosen field reads must not be touched.
        (
            """
guarded = sum(forbid(buffer) for name in ("observation", "log_prob") for buffer in buffers(name))
source = BatchSource(DatasetStore().from_dataset(dataset), 64, 32, "sequential", fields=["action", "reward", "done"])
for index in range(len(source)):
    source[index]
""",
            True,
        ),
        # Making a source, while only the first page of every column may be touched, and the first rewards and ends,
        # which are looked at once.
        (
            """
names = dataset.column_names
guarded = sum(forbid(buffer, first_of(name) * (not n)) for name in names for n, buffer in enumerate(buffers(name)))
source = BatchSource(DatasetStore().from_dataset(dataset), 64, 32)
source.spec, source.plan(0)
""",
            True,
        ),
        # A batch of the last rows, while only they and those first ones may be touched.
        (
            """
last = len(buffers("action")) - 1
guarded = sum(
    forbid(buffer, first_of(name) * (not n), (4 * 64 * 4 * 8 + page) * (n == last))
    for name in dataset.column_names for n, buffer in enumerate(buffers(name))
)
source = BatchSource(DatasetStore().from_dataset(dataset), 64, 4, "last")
assert source[0]["reward"][-1, -1] == 119_999 * 0.5
""",
            True,
        ),
        # The guard guards: touching what was forbidden ends the process.
        (
            """
guarded = sum(forbid(buffer) for buffer in buffers("reward"))
source = BatchSource(DatasetStore().from_dataset(dataset), 64, 32, "sequential", fields=["reward"])
for index in range(len(source)):
    source[index]
""",
            False,
        ),
    ],
    ids=["columns", "opening", "last rows", "guard"],
)
def test_only_what_is_needed_is_read(program: str, survives: bool, tmp_path: Path) -> None:
    ran = run_code(PREAMBLE.split("large, small")[0] + GUARDED + program + "print(guarded)", tmp_path)
    if survives:
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout) > 900_000
    else:
        assert ran.returncode == -signal.SIGSEGV


BEYOND = """
import ctypes, mmap
import numpy as np, pyarrow as pa
from mouse_core import BatchSource, DatasetStore, Field
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
kept = []

def at_the_edge(values):
    # The same values in memory that ends where a page begins that must not be touched.
    pages = -(-values.nbytes // page) + 2
    memory = mmap.mmap(-1, pages * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = first + (pages - 1) * page
    begin = end - values.nbytes
    ctypes.memmove(begin, values.ctypes.data, values.nbytes)
    for forbidden in (end, first):
        if forbidden != first or begin >= first + page:
            assert not libc.mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(page), 0)
    kept.append(memory)
    buffer = pa.foreign_buffer(begin, values.nbytes)
    flat = values.reshape(-1)
    array = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, buffer])
    return array if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(array, values.shape[1])

def chunk(first, rows):
    numbers = np.arange(first, first + rows)
    return pa.table({
        "action": at_the_edge((numbers % 3).astype(np.int8)),
        "reward": at_the_edge(numbers * 0.5),
        "done": at_the_edge(numbers * 0),
        "observation": at_the_edge(np.repeat(numbers * 1.0, 5).reshape(rows, 5)),
        "pixels": at_the_edge(np.repeat(numbers % 251, 700).astype(np.uint8).reshape(rows, 700)),
    })

sizes = [50, 3, 128, 1, 1, 64, 700, 53]
table = pa.concat_tables([chunk(sum(sizes[:n]), size) for n, size in enumerate(sizes)])
for dtypes in ({}, {"reward": "float64", "action": "int8", "pixels": "int32"}):
    store = DatasetStore(fields=[Field("pixels")]).from_dataset(table)
    for length in (1, 2, 40, 64, 300):
        for batch_size in (1, 30):
            source = BatchSource(store, length, batch_size, dtypes=dtypes)
            for index in range(40):
                at = source.plan(index).starts[:, None] + np.arange(length)
                batch = source[index]
                assert (batch["reward"] == (at * 0.5).astype(batch["reward"].dtype)).all()
                assert (batch["action"] == at % 3).all()
                assert (batch["obs_continuous"] == at[..., None]).all()
                assert (batch["pixels"][..., ::699] == at[..., None] % 251).all()
print("read")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="written for Linux")
def test_nothing_is_read_beyond_the_ends_of_a_chunk() -> None:
    ran = run_code(BEYOND)
    assert (ran.returncode, ran.stdout) == (0, "read\n"), ran.stderr
