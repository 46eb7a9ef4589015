"""Sealed files of many small record batches: the same rows, read and held against checksums one by one."""

import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core.cli import main
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.ipc import SummedFile, read_footer
from mouse_core.formats.verifying import verify
from mouse_core.store.disk.checking import repair
from tests.core.disk_cases import numbers_in, rows_of, table_of


def batches_of(store: Any, **options: Any) -> list[dict[str, bytes]]:
    """The bytes of some batches."""
    source = BatchSource(store, sequence_length=40, batch_size=12, seed=3, **options)
    return [{name: values.tobytes() for name, values in source[number].items()} for number in range(4)]


def filled(folder: Path, kind: str, rows: int = 1_000, layout: Any = "windows") -> Path:
    """A store of one file."""
    with DatasetStore.open(folder, "a", layout=layout) as store:
        store.from_dataset(table_of(kind, 0, rows))
    return folder


def files(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def batch_rows(folder: Path) -> list[list[int]]:
    """How many rows each record batch of each file has, as Arrow's own reader finds them."""
    readers = [pa.ipc.open_file(pa.py_buffer(file.read_bytes())) for file in files(folder)]
    return [[one.get_batch(number).num_rows for number in range(one.num_record_batches)] for one in readers]


@pytest.mark.parametrize("kind", ["numbers", "mixed"])
def test_a_layout_changes_how_rows_lie_and_nothing_else(tmp_path: Path, kind: str) -> None:
    memory = DatasetStore().from_dataset(table_of(kind, 0, 1_000))
    filled(tmp_path, kind)
    assert batch_rows(tmp_path) == [[256, 256, 256, 232] if kind == "numbers" else [128] * 7 + [104]]
    opened = pa.ipc.open_file(str(files(tmp_path)[0])).read_all()
    assert opened.equals(memory.to_dataset().data.table.cast(opened.schema))
    for verify_files in (True, False):
        store = DatasetStore.open(tmp_path, verify=verify_files)
        assert numbers_in(store) == range(1_000)
        assert store.snapshot().fingerprint == memory.snapshot().fingerprint
        assert store.snapshot().episode_starts.tolist() == memory.snapshot().episode_starts.tolist()
        assert batches_of(store) == batches_of(memory)
        assert store.to_dataset().to_list() == memory.to_dataset().to_list()
        assert batches_of(pickle.loads(pickle.dumps(store.snapshot()))) == batches_of(memory)


@pytest.mark.parametrize("layout", ["columns", "windows"])
def test_every_byte_is_held_against_a_checksum_when_rows_around_it_are_read(tmp_path: Path, layout: str) -> None:
    filled(tmp_path, "mixed", 600, layout)
    (file,) = files(tmp_path)
    whole, draw = file.read_bytes(), np.random.default_rng(0)
    # One in the schema, some anywhere, and each of the end mark, the checksums and the footer.
    places = [100, *draw.integers(0, len(whole), 20).tolist(), *range(len(whole) - 60, len(whole), 3)]
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match=file.name):
            DatasetStore.open(tmp_path)[:]
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=file.name):
            DatasetStore.open(tmp_path)[:]
    if layout == "columns":
        return
    # Who reads rows elsewhere in the file does not read what is damaged, and gets them.
    footer = read_footer(lambda begin, end: whole[begin:end], len(whole))
    place = sum(footer.span(2)[::2]) // 2
    file.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    store = DatasetStore.open(tmp_path)
    assert [row["number"] for row in store[0:256]] == list(range(256))
    assert [row["number"] for row in store[384:600]] == list(range(384, 600))
    with pytest.raises(DataError, match=r"record batch 2 is damaged"):
        store[300]
    with pytest.raises(DataError, match=r"record batch 2 is damaged"):
        batches_of(DatasetStore.open(tmp_path))
    batches_of(DatasetStore.open(tmp_path, verify=False))
    with pytest.raises(DataError, match="record batch 2"):
        verify(tmp_path)


def test_no_more_is_asked_for_at_once_than_stays_until_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may be large: of so many record batches a memory that is short would lose the first before they are read."""
    rows, asked, most = rows_of("numbers", 0, 900), [], 1 << 17
    rows["observation"] = [[float(row)] * 50 for row in range(900)]
    rows["done"] = [int(row % 7 == 6) for row in range(900)]
    with DatasetStore.open(tmp_path / "store", "a", layout="windows") as writer:
        writer.extend(rows)
    whole = DatasetStore.open(tmp_path / "store").snapshot().episode_starts
    monkeypatch.setattr("mouse_core.files.ipc._MOST_REQUESTED_BYTES", most)
    monkeypatch.setattr("mouse_core.store.snapshot._BYTES", most)
    monkeypatch.setattr(SummedFile, "_advise", lambda _, *what: asked.append(what))
    store = DatasetStore.open(tmp_path / "store")
    assert np.array_equal(store.snapshot().episode_starts, whole)
    assert len(store.to_dataset()) == 900
    sizes = [end - begin for advice, begin, end in asked if advice == "MADV_WILLNEED"]
    assert sum(sizes) > 4 * most
    assert max(sizes) <= most
    assert "MADV_NORMAL" not in [advice for advice, _, _ in asked]  # the system would read all around each page


def test_a_writer_goes_on_in_the_layout_that_it_finds(tmp_path: Path) -> None:
    """Also where files are put together, cut because only the newest rows stay, or written again without damage."""
    filled(tmp_path / "store", "numbers", 300)
    for first in range(300, 2_700, 300):
        with DatasetStore.open(tmp_path / "store", "a") as store:
            store.extend(rows_of("numbers", first, 300))
    assert numbers_in(DatasetStore.open(tmp_path / "store")) == range(2_700)
    assert max(map(sum, batch_rows(tmp_path / "store"))) > 300, "nothing was put together"
    assert {rows for one in batch_rows(tmp_path / "store") for rows in one[:-1]} == {256}
    with DatasetStore.open(tmp_path / "store", "a", max_rows=1_000) as store:
        kept = numbers_in(store)
    assert 800 < len(kept) <= 1_000
    assert kept.stop == 2_700
    assert numbers_in(DatasetStore.open(tmp_path / "store")) == kept
    first = files(tmp_path / "store")[0]
    first.write_bytes(first.read_bytes()[:-1])
    repair(tmp_path / "store")
    assert numbers_in(DatasetStore.open(tmp_path / "store")).stop == 2_700
    with DatasetStore.open(tmp_path / "store", "a", layout="columns") as store:
        store.extend(rows_of("numbers", 2_700, 300))
    assert len(batch_rows(tmp_path / "store")[-1]) == 1


@pytest.mark.parametrize(
    ("options", "match"), [({"layout": "rows"}, "columns"), ({"mode": "r", "layout": "windows"}, "'a'")]
)
def test_layouts_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    DatasetStore.open(tmp_path, "a").close()
    with pytest.raises(ConfigError, match=match):
        DatasetStore.open(tmp_path, **{"mode": "a", **options})


def test_convert_writes_a_store_in_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a dataset with pictures, as arrays and encoded, whose types only ``datasets`` knows."""
    numbers = np.arange(700)
    features = datasets.Features(
        {
            "observation": datasets.Sequence(datasets.Value("float32")),
            "observation_image": datasets.Array3D((4, 4, 3), "uint8"),
            "metadata_picture": datasets.Image(),
            **{name: datasets.Value("float32") for name in ("action", "reward")},
            "done": datasets.Value("int64"),
        }
    )
    pictures = (numbers[:, None, None, None] % 250 + np.arange(48).reshape(4, 4, 3)).astype(np.uint8)
    rows = {"observation": numbers[:, None] * [1.0, 0.5], "observation_image": pictures, "action": numbers}
    rows |= {"reward": numbers * 0, "done": numbers % 50 == 49, "metadata_picture": list(pictures)}
    made = datasets.Dataset.from_dict({name: list(values) for name, values in rows.items()}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "store"), "--layout", "windows"]) == 0
    store, memory = DatasetStore.open(tmp_path / "store"), DatasetStore().from_dataset(made)
    assert [rows for one in batch_rows(tmp_path / "store") for rows in one] == [128] * 5 + [60]
    assert batches_of(store) == batches_of(memory)
    assert store[3:9] == memory[3:9]
    capsys.readouterr()
    for target, to in (("x", ["--to", "arrow"]), ("x", ["--to", "parquet"]), ("x.parquet", [])):
        refused = main(["convert", str(tmp_path / "saved"), str(tmp_path / target), "--layout", "windows", *to])
        assert (refused, "leave out --to" in capsys.readouterr().err) == (2, True)
