"""What lies in a folder is read whole or refused; files that end too soon are told from whole ones."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, MouseError, formats
from mouse_core.cli import main

ROWS = 603


def columns(rows: int) -> dict[str, list[Any]]:
    return {
        "action": list(range(rows)),
        "reward": [0.5] * rows,
        "done": [0] * rows,
        "observation": [[float(k), 1.0] for k in range(rows)],
        "metadata_name": ["x" * (k % 5) if k % 3 else None for k in range(rows)],
    }


def write_arrow(file: Path, rows: int = ROWS, *, batch: int = 100, kind: str = "stream") -> None:
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    table = pa.table(columns(rows))
    with new(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def saved(folder: Path, rows: int = ROWS, *, batch: int = 100) -> Path:
    """What `save_to_disk` writes, with record batches of few rows."""
    datasets.Dataset.from_dict(columns(rows)).save_to_disk(str(folder))
    write_arrow(folder / "data-00000-of-00001.arrow", rows, batch=batch)
    return folder


def parquet(file: Path, rows: int = 20) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns(rows)), file)
    return file


def end_early(file: Path, batch: int) -> None:
    """Put zeros where the head of a record batch begins; for the reader of Arrow that is the end."""
    data = bytearray(file.read_bytes())
    place = -1
    for _ in range(batch + 2):  # the first one found is the schema's
        place = data.index(b"\xff\xff\xff\xff", place + 1)
    data[place : place + 8] = bytes(8)
    file.write_bytes(data)


def splits(root: Path, **rows: int) -> None:
    parts = {name: datasets.Dataset.from_dict(columns(count)) for name, count in rows.items()}
    datasets.DatasetDict(parts).save_to_disk(str(root))


def splits_and_another(root: Path) -> None:
    splits(root, train=9)
    saved(root / "later", 10)


def parquets(root: Path, *names: str) -> None:
    for name in names:
        parquet(root / name)


MIXED: dict[str, Callable[[Path], Any]] = {
    "with parquet": lambda root: parquet(saved(root) / "more.parquet"),
    "with unlisted shard": lambda root: write_arrow(saved(root) / "data-00001-of-00002.arrow", 10),
    "with dataset inside": lambda root: saved(saved(root) / "later", 10),
    "with unfinished file": lambda root: (saved(root) / "part-00001.arrow.partial").write_bytes(b""),
    "with other formats": lambda root: (saved(root) / "x.hdf5").write_bytes(b""),
    "with other spellings": lambda root: parquets(root, "a.parquet", "b.PARQUET"),
    "with files of other names": lambda root: write_arrow(saved(root) / "more.feather", 10, kind="file"),
    "with a link to data": lambda root: (
        parquet(root / "a.parquet"),
        (root / "more").symlink_to(saved(root.parent / "elsewhere", 10)),
    ),
    "splits and another": splits_and_another,
    "dataset and splits": lambda root: (
        splits_and_another(root),
        shutil.copyfile(root / "train" / "state.json", root / "state.json"),
    ),
    "parquet at two depths": lambda root: parquets(root, "a.parquet", "data/b.parquet"),
    "parquet and datasets": lambda root: (parquet(root / "a.parquet"), saved(root / "later", 10)),
    "shard missing": lambda root: parquets(root, "train-00000-of-00003.parquet", "train-00002-of-00003.parquet"),
    "shards of two writers": lambda root: parquets(
        root, *(f"train-0000{part}.parquet" for part in ("0-of-00001", "0-of-00002", "1-of-00002"))
    ),
    "datasets beside each other": lambda root: (saved(root / "a", 10), saved(root / "b", 10)),
    "two formats": lambda root: (
        parquet(root / "a.parquet"),
        (root / "metadata.json").write_text('{"minari_version": "0.5", "data_format": "arrow"}'),
    ),
}


@pytest.mark.parametrize("kind", MIXED)
def test_a_folder_of_more_than_one_thing_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    MIXED[kind](root)
    with pytest.raises((ConfigError, DataError)) as refused:
        formats.open(root)
    assert str(root) in str(refused.value)
    if kind == "with parquet":
        assert "found ['data-00000-of-00001.arrow'] and also ['more.parquet']" in str(refused.value)
    for command in (["inspect", root], ["convert", root, tmp_path / "out"], ["push", root, "someone/x", "--dry-run"]):
        assert main([str(word) for word in command]) == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert not (tmp_path / "out").exists()


def test_what_is_no_data_does_not_matter(tmp_path: Path) -> None:
    root = saved(tmp_path / "root")
    for name in ("README.md", ".hidden.parquet", "data.arrow.sha256", "._data-00000-of-00001.arrow"):
        (root / name).write_text("x")
    (root / ".cache").mkdir()
    parquet(root / ".cache" / "old.parquet")
    datasets.load_from_disk(str(root)).map(lambda row: {"more": row["action"] + 1})
    (cached,) = root.glob("cache-*.arrow")
    rows = formats.open(root)
    assert (rows.rows, rows.to_table().num_rows) == (ROWS, ROWS)
    assert cached.name in rows.notes[0]
    parquet(tmp_path / "loose" / "a.parquet", 5)
    parquet(tmp_path / "loose" / "b.parquet", 6)
    (tmp_path / "loose" / "notes.csv").write_text("1,2")
    assert formats.open(tmp_path / "loose").to_table().num_rows == 11


@pytest.mark.parametrize("batch", [0, 1, 5, 6])
def test_zeros_at_the_head_of_a_record_batch_are_not_the_end(batch: int, tmp_path: Path) -> None:
    root = saved(tmp_path / "root")
    file = root / "data-00000-of-00001.arrow"
    whole = datasets.load_from_disk(str(root))
    assert len(DatasetStore().from_dataset(whole)) == len(DatasetStore.open(root)) == ROWS
    end_early(file, batch)
    short = datasets.load_from_disk(str(root))
    assert len(short) == batch * 100  # nothing is noticed there
    for path in (root, file):
        with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow.* rows are missing"):
            formats.open(path)
    if batch:
        parts = [short, short.select([1, 0]), short.remove_columns("action"), short.select(range(3))]
        parts.append(datasets.concatenate_datasets([short, short]))
        for part in parts:
            store = DatasetStore()
            with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow.* rows are missing"):
                store.from_dataset(part)
            assert len(store) == 0


def test_nothing_may_follow_the_end_nor_lack(tmp_path: Path) -> None:
    root = saved(tmp_path / "root")
    file = root / "data-00000-of-00001.arrow"
    data = file.read_bytes()
    for more in (bytes(8), b"\xff\xff\xff\xff" + bytes(4), data):
        file.write_bytes(data + more)
        with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow"):
            formats.open(root)
        with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow"):
            DatasetStore().from_dataset(datasets.load_from_disk(str(root)))
        file.write_bytes(data)
    assert formats.open(root).rows == ROWS
    file.write_bytes(data[:-8])  # cut between batches
    with pytest.raises(DataError, match="truncated or not finished"):
        DatasetStore().from_dataset(datasets.load_from_disk(str(root)))
    with pytest.raises(DataError, match="truncated or not finished"):
        formats.open(root)


@pytest.mark.parametrize(("rows", "batch"), [(0, 1), (1, 100), (100, 1), (100, 100), (ROWS, 100)])
def test_whole_files_are_never_refused(rows: int, batch: int, tmp_path: Path) -> None:
    write_arrow(tmp_path / "x.arrow", rows, batch=batch)
    whole = datasets.Dataset.from_file(str(tmp_path / "x.arrow"))
    assert len(DatasetStore().from_dataset(whole)) == rows
    if rows > 1:
        changed = [
            whole.select(range(1, rows)),
            whole.rename_column("metadata_name", "name"),
            whole.remove_columns(["metadata_name", "observation"]),
            whole.add_column("more", list(range(rows))),
            whole.cast_column("reward", datasets.Value("float32")),
            whole.shuffle(seed=0),
        ]
        for part in changed:
            assert len(DatasetStore().from_dataset(part)) == part.num_rows
    for kind in ("stream", "file"):
        write_arrow(tmp_path / f"{kind}.arrow", rows, batch=batch, kind=kind)
        assert formats.open(tmp_path / f"{kind}.arrow").to_table().num_rows == rows


def test_batches_that_the_footer_leaves_out_are_missed(tmp_path: Path) -> None:
    file = tmp_path / "x.arrow"
    parts = []
    for batches in (6, 2):
        table = pa.table({"action": range(batches * 100)})
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
        data = file.read_bytes()
        footer = int.from_bytes(data[-10:-6], "little") + 10
        parts.append((data[:-footer], data[-footer:]))
    file.write_bytes(parts[0][0] + parts[1][1])
    with pytest.raises(DataError, match="expected the footer directly after its 2 record batches"):
        formats.open(file)
    file.write_bytes(b"".join(parts[0]))
    assert formats.open(file).rows == 600
    file.write_bytes(b"".join(parts[0] + parts[0]))
    with pytest.raises(DataError, match="files were joined"):
        formats.open(file)


def state_of(root: Path, **changed: Any) -> None:
    state = json.loads((root / "state.json").read_text())
    (root / "state.json").write_text(json.dumps(state | changed))


def test_no_file_or_split_outside_of_the_folder(tmp_path: Path) -> None:
    other, root = saved(tmp_path / "other"), saved(tmp_path / "root")
    file = "data-00000-of-00001.arrow"
    for name in (f"../other/{file}", str(other / file), "..", "", 3, None, "a\\b"):
        state_of(root, _data_files=[{"filename": name}])
        with pytest.raises(DataError, match=r"state\.json: expected the name of a file in the same folder"):
            formats.open(root)
    saved(tmp_path / "both" / "train")
    for listed in (["../other"], ["/"], [], "train", ["train", "train"], [1]):
        (tmp_path / "both" / "dataset_dict.json").write_text(json.dumps({"splits": listed}))
        with pytest.raises(DataError, match=r"dataset_dict\.json"):
            formats.open(tmp_path / "both")


def test_no_link_out_of_the_folder(tmp_path: Path) -> None:
    other = saved(tmp_path / "other") / "data-00000-of-00001.arrow"
    root = saved(tmp_path / "root")
    (root / other.name).unlink()
    (root / other.name).symlink_to(other)
    with pytest.raises(DataError, match="expected a file inside of"):
        formats.open(root)
    (tmp_path / "by-link").symlink_to(other.parent)  # this one its user named
    assert formats.open(tmp_path / "by-link").rows == ROWS
    # As the Hub's client keeps files: links into a folder beside.
    blob = parquet(tmp_path / "datasets--a--b" / "blobs" / "0123", 7)
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "1" / "data"
    snapshot.mkdir(parents=True)
    (snapshot / "train-00000-of-00001.parquet").symlink_to(blob)
    assert formats.open(snapshot).rows == formats.open(snapshot.parent).rows == 7


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files there")
@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "x.parquet"])
def test_only_regular_files_are_opened(name: str, tmp_path: Path) -> None:
    root = saved(tmp_path / "root")
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    for path in (root, root / name):
        with pytest.raises(MouseError):
            formats.open(path)


def test_descriptions_that_are_none(tmp_path: Path) -> None:
    root = saved(tmp_path / "root")
    for text in ("[" * 100_000, "[]", "{", '{"_data_files": {}}', '{"_data_files": []}', "\0"):
        (root / "state.json").write_text(text)
        with pytest.raises(MouseError, match="root"):
            formats.open(root)
    with (root / "state.json").open("wb") as file:
        file.truncate(1 << 30)  # which is not read
    with pytest.raises(DataError, match=r"state\.json: expected at most"):
        formats.open(root)


def test_several_splits_and_one_without_rows(tmp_path: Path) -> None:
    splits(tmp_path / "both", train=30, eval=20)
    store = DatasetStore.open(tmp_path / "both", splits=["eval", "train"])
    assert [store[row]["action"] for row in (0, 19, 20, 49)] == [0, 19, 0, 29]
    splits(tmp_path / "root", train=30, eval=0)
    assert formats.open(tmp_path / "root").rows == 30
    for path, chosen in ((tmp_path / "root", ["eval"]), (tmp_path / "root" / "eval", None)):
        with pytest.raises(DataError, match="expected files of rows"):
            formats.open(path, splits=chosen)


def test_stores_of_datasets_on_disk_stay_there(tmp_path: Path) -> None:
    root = saved(tmp_path / "root")
    store = DatasetStore.open(root, max_action_dim=ROWS)
    again = DatasetStore(max_action_dim=ROWS).from_dataset(datasets.load_from_disk(str(root)))
    assert store.snapshot().fingerprint == again.snapshot().fingerprint
    (file,) = store.to_dataset().cache_files
    assert Path(file["filename"]) == root / "data-00000-of-00001.arrow"
    ours, theirs = (BatchSource(one, sequence_length=7, batch_size=5, seed=3)[2] for one in (store, again))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    in_memory = DatasetStore.open(parquet(tmp_path / "x.parquet", ROWS))
    assert not in_memory.to_dataset().cache_files
    changed = formats.open(root)
    first = next(iter(changed)).slice(0, 5)
    changed = changed.replace(batches=lambda: iter([first]))
    assert len(changed.to_store()) == 5


def test_from_dataset_says_how_a_path_is_opened() -> None:
    for path in ("recordings", Path("recordings")):
        with pytest.raises(ConfigError, match=r"found the path 'recordings'; DatasetStore.open.*load_from_disk"):
            DatasetStore().from_dataset(path)
