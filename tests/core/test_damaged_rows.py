"""Damaged files of Arrow and Parquet, and damaged offsets on every way to rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import DataError, DatasetStore, SchemaError, formats
from mouse_core.formats.base import RowStream
from mouse_core.formats.converting import convert
from tests.core.damaged_files import damaged_copies, read_all
from tests.programs import run_code


def recording(*, texts: bool = True) -> RowStream:
    rng = np.random.default_rng(0)
    rows = 400
    step = np.arange(rows) % 20
    columns = {
        "action": rng.integers(0, 4, rows),
        "reward": rng.normal(size=rows),
        "done": (step == 19).astype(np.int64),
        "episode_step": step,
        "observation": pa.array(rng.normal(size=(rows, 3)).tolist(), pa.list_(pa.float64(), 3)),
    }
    if texts:
        columns["metadata_text"] = pa.array([f"level {k % 5}" for k in range(rows)])
        columns["metadata_ragged"] = pa.array([[1.0] * (k % 4) for k in range(rows)])
        columns["observation_png"] = pa.array([{"bytes": bytes(range(k % 9)), "path": None} for k in range(rows)])
    table = pa.table(columns)
    return RowStream("made", "made", table.schema, lambda: iter(table.to_batches(max_chunksize=100)))


def test_arrow_and_parquet(tmp_path: Path) -> None:
    convert(recording(), tmp_path / "source")
    convert(recording(), tmp_path / "source.parquet")
    (tmp_path / "parquet").mkdir()
    copies = damaged_copies(tmp_path / "source.parquet", tmp_path / "parquet", count=50)
    copies += damaged_copies(tmp_path / "source", tmp_path / "arrow", only="*.arrow", count=50)
    copies += damaged_copies(tmp_path / "source", tmp_path / "described", only="state.json", count=30)
    # Of Arrow there are no checksums, many a value is only another value: 30 of 100 are refused, and 70 of Parquet,
    # whose pages have checksums; what is left are statistics and the like, which nobody reads.
    assert read_all(copies)["refused"] > 55


def test_names_that_are_no_text_or_stand_twice(tmp_path: Path) -> None:
    convert(recording(), tmp_path / "source")
    file = next((tmp_path / "source").glob("*.arrow"))
    file.write_bytes(file.read_bytes().replace(b"metadata_text", b"metadata_tex\xee"))
    with pytest.raises(DataError, match=file.name):
        formats.open(tmp_path / "source")
    twice = pa.table({"reward": [1.0], "done": [0]}).rename_columns(["reward", "reward"])
    with pa.OSFile(str(tmp_path / "twice.arrow"), "wb") as sink, pa.ipc.new_stream(sink, twice.schema) as writer:
        writer.write_table(twice)
    with pytest.raises(SchemaError, match=r"twice\.arrow: expected columns of different names"):
        formats.open(tmp_path / "twice.arrow")


# Every way from rows in memory or in a mapped file to other rows; each ends the process where an offset is believed.
WAYS = """
import sys, datasets, pickle, warnings
import pyarrow as pa
from mouse_core import DatasetStore, formats
from mouse_core.errors import DataError
from mouse_core.formats.base import pieces_of, stream_of
from mouse_core.formats.ted import write_ted
from mouse_core.hub import push_stores_to_hub
from mouse_core.store.derived import DerivedStore, Return

warnings.simplefilter("ignore")

def store(*rows):
    made = DatasetStore()
    for some in rows or [one]:
        made.from_dataset(some)
    return made
ways = {
    "a slice": lambda: store()[:],
    "a slice of a table": lambda: store(one.data.table)[:],
    "a slice in another order": lambda: store(one.shuffle(seed=0))[:],
    "a slice after pickle": lambda: pickle.loads(pickle.dumps(store()))[:],
    "a slice of a view": lambda: store().best(0.9)[:],
    "a slice with a derived field": lambda: DerivedStore(store(), {"to_go": Return()})[:],
    "episodes in another order": lambda: store(one.shuffle(seed=0)).episodes,
    "to_dataset": lambda: store().to_dataset()[:],
    "to_dataset of a table": lambda: store(one.data.table).to_dataset()[:],
    "to_dataset of two": lambda: store(one, one.remove_columns("metadata_more")).to_dataset()[:],
    "to_dataset of a view": lambda: store().best(0.9).to_dataset()[:],
    "save": lambda: store().save(out + "/saved"),
    "save of a view": lambda: store().best(0.9).save(out + "/view"),
    "extend": lambda: DatasetStore().extend({name: one.data[name] for name in one.column_names}),
    "from_dataset on disk": lambda: DatasetStore.open(out + "/disk", "a").from_dataset(one),
    "from_dataset on disk in another order": lambda: DatasetStore.open(out + "/other", "a").from_dataset(one.shuffle()),
    "write_ted": lambda: write_ted(stream_of(store()), out + "/ted"),
    "pieces_of": lambda: list(pieces_of(one)),
    "pieces_of a stream": lambda: list(pieces_of(stream_of(store()))),
    "push": lambda: push_stores_to_hub(store(), repo_id="some/name", dry_run=True, progress=False),
}
for path in sys.argv[1:]:
    one, out = datasets.Dataset.from_file(path), path + ".out"
    for name, way in ways.items():
        try:
            way()
            print("read:", path, name)
        except DataError as error:
            assert "damaged" in str(error), (path, name, error)
"""


def with_offset(values: pa.Array, row: int, offset: int) -> pa.Array:
    """The same lists or texts, of which one begins at another value."""
    offsets = np.frombuffer(values.buffers()[1], np.int32).copy()
    offsets[row] = offset
    buffers = [values.buffers()[0], pa.py_buffer(offsets), *values.buffers()[2:3]]
    children = [values.values] if pa.types.is_list(values.type) else []
    return pa.Array.from_buffers(values.type, len(values), buffers[: 2 if children else 3], children=children)


def test_no_way_to_rows_believes_an_offset(tmp_path: Path) -> None:
    texts, lists = pa.array([f"task {k // 10}" for k in range(40)]), pa.array([[1.0] * (k % 4) for k in range(40)])
    inner = pa.ListArray.from_arrays(pa.array(range(41), pa.int32()), with_offset(texts, 20, 1 << 28))
    damaged = {"lists": with_offset(lists, 20, 1 << 28), "texts": with_offset(texts, 20, 1 << 28), "inner": inner}
    step = np.arange(40) % 10
    columns = {"action": step, "reward": np.float64(step), "done": (step == 9) * 1, "episode_step": step}
    columns |= {"observation": pa.array([[0.0]] * 40), "metadata_more": step}
    for kind, values in damaged.items():
        table = pa.table({**columns, "metadata_x": values})
        with pa.OSFile(str(tmp_path / kind), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    done = run_code(WAYS, *(tmp_path / kind for kind in damaged))
    # Episodes have no column of lists, and so read none.
    read = [line for line in done.stdout.splitlines() if "texts" in line or "episodes" not in line]
    assert (done.returncode, read) == (0, []), done.stderr[-2000:]


def test_codes_lead_to_values() -> None:
    codes = pa.DictionaryArray.from_arrays(pa.array([0] * 19 + [1 << 20]), ["a"], safe=False)
    table = pa.table({"reward": [0.0] * 20, "action": [0] * 20, "done": [0] * 20, "metadata_x": codes})
    store = DatasetStore().from_dataset(table)
    assert store[18]["metadata_x"] == "a"
    for read in (lambda: store[19], lambda: store[:], store.to_dataset):
        with pytest.raises(DataError, match="damaged"):
            read()
