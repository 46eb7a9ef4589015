"""What is written says how many rows it holds and what its bytes are; opening and `mouse verify` compare."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import DataError, DatasetStore, MouseError, formats
from mouse_core.cli import main
from mouse_core.formats.base import RowStream
from mouse_core.formats.converting import convert
from mouse_core.formats.verifying import verify
from tests.core.formats.test_on_disk import columns, end_early

ROWS = 603


def flipped(whole: bytes, place: int, bit: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]


def stream(rows: int = ROWS) -> RowStream:
    table = pa.table(columns(rows))
    return RowStream("made", "ted", table.schema, lambda: iter(table.to_batches(max_chunksize=40)), rows=rows)


@pytest.fixture(params=[partial(convert, shard_bytes=9000), RowStream.save], ids=["convert", "save"])
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 40)
    request.param(stream(), tmp_path / "out")
    return tmp_path / "out"


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_what_is_written_is_verified_by_its_bytes(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(written)
    assert (found.rows, found.digest) == (ROWS, stream().digest())
    assert run("verify", written, "--strict", "--digest", found.digest) == 0
    said = capsys.readouterr().out
    assert f"{ROWS} rows, digest {found.digest}" in said
    assert "verified: every file has the checksum" in said
    assert len(datasets.load_from_disk(str(written))) == ROWS
    assert run("verify", written, "--digest", "0" * 64) == 2
    assert "expected rows with the digest" in capsys.readouterr().err


def test_any_flipped_bit_is_found_and_its_file_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    files = sorted(file for file in written.iterdir() if file.name != "state.json")
    for _ in range(40):
        file = rng.choice(files)
        whole = file.read_bytes()
        place = rng.randrange(len(whole))
        file.write_bytes(flipped(whole, place, rng.randrange(8)))
        with pytest.raises(DataError, match=rf"{file.name}: expected the checksum") as refused:
            verify(written)
        assert sum(other.name in str(refused.value) for other in files) == 1
        file.write_bytes(whole)
    for file in files[:2]:
        file.write_bytes(file.read_bytes() + b"x")
    assert run("verify", written) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(file.name in said for file in files[:2])


@pytest.mark.parametrize("write", [convert, RowStream.save])
def test_no_flipped_bit_of_a_schema_is_silent(write: Any, tmp_path: Path) -> None:
    write(stream(), tmp_path / "rows")
    (file,) = (tmp_path / "rows").glob("*.arrow")
    whole = file.read_bytes()
    mapped = datasets.load_from_disk(str(tmp_path / "rows"))
    end = 8 + int.from_bytes(whole[4:8], "little")
    for place in range(0, end, 7):
        file.write_bytes(flipped(whole, place, place % 8))
        for read in (lambda: formats.open(tmp_path / "rows"), lambda: DatasetStore().from_dataset(mapped)):
            with pytest.raises(DataError, match=rf"{file.name}.*: expected a schema with the checksum"):
                read()
    file.write_bytes(whole)
    assert formats.open(tmp_path / "rows").digest() == stream().digest()
    assert len(DatasetStore().from_dataset(mapped)) == ROWS


@pytest.mark.parametrize("write", [convert, RowStream.save])
def test_damaged_values_are_not_written_on(write: Any, tmp_path: Path) -> None:
    stream().save(tmp_path / "rows")
    (file,) = (tmp_path / "rows").glob("*.arrow")
    whole = file.read_bytes()
    place = whole.index(np.array(stream().to_table().column("reward")[:3]).tobytes()) + 3
    file.write_bytes(flipped(whole, place, 2))
    damaged = formats.open(tmp_path / "rows")
    for _ in range(2):
        with pytest.raises(DataError, match=r"expected rows with the digest .*, as written, found"):
            write(damaged, tmp_path / "new")
        assert [one.name for one in tmp_path.iterdir()] == ["rows"]


def test_rows_are_compared_when_files_are_opened(tmp_path: Path) -> None:
    stream(ROWS).save(tmp_path / "out")
    stream(500).save(tmp_path / "other")
    name = "data-00000-of-00001.arrow"
    shutil.copyfile(tmp_path / "other" / name, tmp_path / "out" / name)  # whole, and of the same columns
    assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 500
    with pytest.raises(DataError, match=rf"{name}: expected {ROWS} rows, as written, found 500"):
        formats.open(tmp_path / "out")
    assert run("inspect", tmp_path / "out") == run("verify", tmp_path / "out") == 2


def changed(file: Path, state: Any, change: Any) -> None:
    state = json.loads(json.dumps(state))
    change(state)
    file.write_text(json.dumps(state))


def test_a_note_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 40)
    convert(stream(), tmp_path / "out", shard_bytes=25_000)
    file, second = tmp_path / "out" / "state.json", "data-00000-of-00002.arrow"
    state = json.loads(file.read_text())
    assert len(state["_data_files"]) == 2
    for change in (
        lambda state: state["_data_files"].pop(),
        lambda state: state["_mouse"]["files"].pop(second),
        lambda state: state["_mouse"]["files"][second].update(bytes=3),
        lambda state: state["_mouse"]["files"][second].update(rows=3),
        lambda state: state["_mouse"]["files"][second].update(bytes="3"),
        lambda state: state["_mouse"]["files"]["dataset_info.json"].update(bytes=None),
        lambda state: state["_mouse"]["files"][second].pop("rows"),
        lambda state: state["_mouse"].pop("files"),
        lambda state: state["_mouse"].pop("own_digest"),
        lambda state: state.update(_mouse=3),
        lambda state: state["_mouse"].update(files={"../x": {"bytes": 1, "digest": "", "rows": 1}}),
    ):
        changed(file, state, change)
        for call in (formats.open, verify):
            with pytest.raises(MouseError, match="out"):
                call(tmp_path / "out")
    file.write_text(json.dumps(state))  # laid out in another way
    assert verify(tmp_path / "out").compared
    for change in (
        lambda state: state.update(_split="eval"),
        lambda state: state["_mouse"].update(digest="0" * 64),
        lambda state: state["_mouse"]["files"].pop("dataset_info.json"),
    ):
        changed(file, state, change)
        with pytest.raises(DataError, match=r"state\.json: expected the content that was written"):
            verify(tmp_path / "out")


def test_datasets_of_others_are_read_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    datasets.Dataset.from_dict(columns(ROWS)).save_to_disk(str(root))
    digest = formats.open(root).digest()
    found = verify(root)
    assert (found.rows, found.digest, found.compared) == (ROWS, digest, "")
    assert (run("verify", root), run("verify", root, "--strict")) == (0, 1)
    assert run("verify", root, "--strict", "--digest", digest) == 0
    said = capsys.readouterr().out
    assert said.count("not verified: all rows could be read") == 2
    assert "verified: the rows have the digest that was given" in said
    assert verify(root, digest=digest.upper()).compared
    end_early(root / "data-00000-of-00001.arrow", 0)
    assert run("verify", root) == 2
    assert "data-00000-of-00001.arrow" in capsys.readouterr().err


def test_splits_of_a_dict_of_datasets(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        stream(50).save(tmp_path / "root" / name)
    (tmp_path / "root" / "dataset_dict.json").write_text('{"splits": ["train", "eval"]}')
    found = verify(tmp_path / "root")
    assert (found.rows, found.digest) == (100, None)
    assert found.compared
    both = formats.open(tmp_path / "root").digest()
    assert verify(tmp_path / "root", digest=both).digest == both
    assert verify(tmp_path / "root", splits=["eval"]).rows == 50
    file = tmp_path / "root" / "eval" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match=r"eval/data-00000-of-00001\.arrow"):
        verify(tmp_path / "root")


def test_any_flipped_bit_of_a_parquet_file_is_found(tmp_path: Path) -> None:
    rng, file = random.Random(0), tmp_path / "ours.parquet"
    convert(stream(60), file)
    assert "checksum" in verify(file).compared
    assert not verify(file).left
    whole = file.read_bytes()
    # Where pages have their CRC, all behind them has nothing but the checksums that are written with them.
    behind = whole.index(b"mouse_data file ")
    places = [rng.randrange(behind, len(whole)) for _ in range(160)] + [rng.randrange(behind) for _ in range(20)]
    for place in places:
        file.write_bytes(flipped(whole, place, rng.randrange(8)))
        with pytest.raises(DataError, match=r"ours\.parquet"):
            verify(file)
    # Renamed columns and another alignment are found when the file is opened, too.
    for name in (b"action", b"arrived", b"version"):
        if (place := whole.rfind(name)) >= 0:
            file.write_bytes(flipped(whole, place, 1))
            with pytest.raises(DataError, match=r"ours\.parquet: expected the checksum .* the footer is damaged"):
                formats.open(file)


def test_every_damaged_parquet_file_of_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 40)
    convert(stream(), tmp_path / "out", to="parquet", shard_bytes=4000)
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) > 2
    assert "checksum" in verify(tmp_path / "out").compared
    for file in files[:2]:
        whole = file.read_bytes()
        file.write_bytes(flipped(whole, len(whole) - 30, 0))
    with pytest.raises(DataError) as refused:
        verify(tmp_path / "out")
    assert [file.name in str(refused.value) for file in files[:3]] == [True, True, False]


def test_what_stands_in_a_parquet_file_bothers_nobody(tmp_path: Path) -> None:
    convert(stream(), tmp_path / "ours.parquet")
    table = pq.read_table(tmp_path / "ours.parquet")
    assert table.num_rows == ROWS
    loaded = datasets.load_dataset("parquet", data_files=str(tmp_path / "ours.parquet"), cache_dir=str(tmp_path / "c"))
    assert loaded["train"].to_list() == table.to_pylist()
    # Who writes the rows again does not take it along.
    pq.write_table(table, tmp_path / "again.parquet")
    assert not verify(tmp_path / "again.parquet").compared


def test_pages_of_parquet_of_others_are_compared_where_they_have_checksums(tmp_path: Path) -> None:
    path = tmp_path / "theirs.parquet"
    pq.write_table(stream().to_table(), path, write_page_checksum=True, use_dictionary=False)
    found = verify(path)
    assert not found.compared
    assert (run("verify", path), run("verify", path, "--strict")) == (0, 1)
    assert run("verify", path, "--strict", "--digest", found.digest) == 0
    # A flag in the header of a page may change no value; the middle of a column chunk is within the values.
    chunk = pq.read_metadata(path).row_group(0).column(0)
    path.write_bytes(flipped(path.read_bytes(), chunk.data_page_offset + chunk.total_compressed_size // 2, 0))
    with pytest.raises(DataError, match=r"theirs\.parquet"):
        verify(path)


def test_other_formats_are_read_through(tmp_path: Path) -> None:
    from tests.core.formats.test_flat_files import logged, write_ogbench

    file = write_ogbench(tmp_path / "x.npz", "raw", logged())
    found = verify(file)
    assert (found.digest, found.compared) == (formats.open(file).digest(), "a CRC-32 for every array")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.npz"):
        verify(file)


def test_a_command_alone_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"\n    {name} " in said for name in ("inspect", "convert", "verify", "push", "upload"))
