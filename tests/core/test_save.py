"""`Store.save`: a folder that is whole or not there, that others may map, and that is never written over."""

from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, formats
from mouse_core.cli import main
from mouse_core.formats.verifying import verify
from mouse_core.testing import example_columns, example_store, stream_digest


def test_what_was_saved_is_what_there_was(tmp_path: Path) -> None:
    store = example_store(90)
    store.save(tmp_path / "deep" / "saved")
    for reopened in (
        DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "deep" / "saved"))),
        DatasetStore.open(tmp_path / "deep" / "saved"),
        DatasetStore.open(tmp_path / "deep" / "saved" / "data-00000-of-00001.arrow"),
    ):
        assert reopened.snapshot().fingerprint == store.snapshot().fingerprint
        assert reopened.metadata == store.metadata
        assert stream_digest(BatchSource(reopened, 5, 4), 9) == stream_digest(BatchSource(store, 5, 4), 9)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["saved"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """The rows that a store has mapped stay under it: it is refused to save onto its own folder, as any other is."""
    example_store(50).save(tmp_path / "saved")
    mapped = DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "saved")))
    source = BatchSource(mapped, 5, 4)
    expected = stream_digest(source, 9)
    mapped.extend(example_store(10)[:])
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    for store in (mapped, example_store(20)):
        with pytest.raises(ConfigError, match=r"save: expected a path that does not exist, found .*saved"):
            store.save(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
    assert stream_digest(source, 9) == expected
    mapped.save(tmp_path / "longer")
    assert formats.open(tmp_path / "longer").rows == 60
    view = mapped.best(0.5)
    view.save(tmp_path / "best")
    assert formats.open(tmp_path / "best").rows == len(view) < 60
    with pytest.raises(ConfigError, match="expected a store with rows"):
        DatasetStore().save(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "longer", "saved"]


def test_what_was_saved_is_opened_as_a_store(tmp_path: Path) -> None:
    """With the options of the class; what it is not opened with is refused with what helps."""

    class Mine(DatasetStore):
        pass

    saved, table = tmp_path / "saved", tmp_path / "rows.parquet"
    example_store(50).save(saved)
    pq.write_table(datasets.load_from_disk(str(saved)).data.table, table)
    for path in (saved, table):
        options = {"max_action_dim": 9, "alignment": "outgoing"}
        store = Mine.open(path, **options)
        assert type(store) is Mine
        assert (len(store), store.metadata.max_action_dim, store.alignment) == (50, 9, "outgoing")
    assert not verify(table).compared
    found, digest = verify(saved), formats.open(saved).digest()
    assert (found.rows, found.digest) == (50, digest)
    assert verify(saved, digest=digest).digest == digest
    for options in ({"max_rows": 10}, {"layout": "windows"}, {"skip_broken": True}, {"cache": tmp_path}):
        with pytest.raises(ConfigError, match="expected"):
            DatasetStore.open(saved, **options)
    with pytest.raises(ConfigError, match=r"expected a folder with a store, or an empty folder, found"):
        DatasetStore.open(saved, "a")
    assert main(["convert", str(saved), str(tmp_path / "store"), "--to", "store"]) == 0
    with DatasetStore.open(tmp_path / "store", "a") as store:
        store.extend(example_columns(5))
        assert len(store) == 55
    file = saved / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes().replace((7).to_bytes(8, "little"), (8).to_bytes(8, "little"), 1))
    with pytest.raises(DataError, match=rf"{file}: expected the checksum"):
        verify(saved)
