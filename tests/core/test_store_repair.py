"""`mouse verify` and `mouse repair` of a store's folder: which file is damaged, and what is whole without it."""

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from mouse_core import ConfigError, DataError, DatasetStore, formats
from mouse_core.cli import main
from mouse_core.formats.verifying import verify
from mouse_core.store.disk.checking import repair
from tests.core.disk_cases import check_batches, numbers_in, rows_of
from tests.core.killing import in_child

PARTS = (40, 30, 30)


def store_of(folder: Path, parts: tuple[int, ...]) -> Path:
    for end, count in zip(accumulate(parts), parts, strict=True):
        with DatasetStore.open(folder, "a") as store:
            store.extend(rows_of("mixed", end - count, count))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three sealed files, of 40, 30 and 30 rows."""
    return store_of(tmp_path / "store", PARTS)


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 8
    path.write_bytes(data)


def sealed(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def test_what_is_whole_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(folder)
    assert (found.rows, found.left) == (100, "")
    assert main(["verify", str(folder), "--strict"]) == 0
    out = capsys.readouterr().out
    assert (
        out
        == f"{folder}: 100 rows\nverified: each of 3 files has the checksums that were recorded when it was written\n"
    )
    assert main(["repair", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: 100 rows, all undamaged; nothing was changed\n"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize("damage", [flip, Path.unlink, cut])
def test_which_file_is_damaged_is_said(damage: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hurt = sealed(folder)[1]
    damage(hurt)
    assert main(["verify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert str(hurt) in said
    assert f"mouse repair {folder} keeps the undamaged rows" in said
    assert not any(str(path) in said for path in sealed(folder) if path != hurt)


def test_what_is_whole_is_kept_without_the_rest_of_a_broken_episode(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows 40..69 are damaged; row 70 begins an episode, as 70 is 10 times 7."""
    hurt, content = sealed(folder)[1], sealed(folder)[1].read_bytes()
    flip(hurt)
    damaged = hurt.read_bytes()
    before = (folder / "manifest.json").read_bytes()
    assert repair(folder, dry_run=True).rows == 70
    assert (folder / "manifest.json").read_bytes() == before
    assert hurt.exists()
    assert main(["repair", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{hurt}: expected the checksum .*: its 30 rows are dropped\n.*70 rows are undamaged", out)
    with DatasetStore.open(folder) as store:
        assert [row["number"] for row in store[:]] == [*range(40), *range(70, 100)]
        assert store.episodes.column("length").to_pylist() == [7] * 5 + [5] + [7] * 4 + [2]
    assert not hurt.exists()
    assert (folder / "damaged" / hurt.name).read_bytes() == damaged != content
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows_of("mixed", 100, 5))
    assert verify(folder).rows == 75
    assert repair(folder).said == ()


def test_episodes_over_whole_files_behind_a_gap_are_kept(tmp_path: Path) -> None:
    """Rows 10..19 are damaged; the episode of 28..34 begins in the file behind the gap and goes on in the next one."""
    folder = store_of(tmp_path / "store", (10, 10, 10, 10))
    flip(sealed(folder)[1])
    done = repair(folder)
    assert (done.rows, done.dropped_rows) == (29, 11)
    with DatasetStore.open(folder) as store:
        assert [row["number"] for row in store[:]] == [*range(10), *range(21, 40)]


def test_an_episode_that_lost_its_beginning_is_dropped(folder: Path) -> None:
    """Rows 0..39 are damaged, and 40 and 41 belong to the episode of 35..41."""
    flip(sealed(folder)[0])
    done = repair(folder)
    assert (done.rows, done.dropped_rows) == (58, 42)
    assert any("its first 2 rows, the rest of an incomplete episode" in line for line in done.said)
    with DatasetStore.open(folder) as store:
        assert numbers_in(store) == range(42, 100)
        check_batches(store)
    folder_files = [path.name for path in folder.iterdir()]
    assert "damaged" in folder_files


def test_rows_before_damage_in_a_file_of_appended_rows_are_kept(tmp_path: Path) -> None:
    """A process was killed before it closed the store, and its file was damaged later."""
    folder = tmp_path / "store"
    store_of(folder, (100,))

    def write() -> None:
        store = DatasetStore.open(folder, "a")
        store.extend(rows_of("mixed", 100, 900))
        store.flush()

    in_child(write)
    assert verify(folder).rows == 1000
    (tail,) = folder.glob("tail-*.rows")
    data = bytearray(tail.read_bytes())
    # The last rows of the first column of numbers that is not zero at the file's end.
    at = max(place for place in range(len(data) // 2, len(data)) if data[place])
    data[at] ^= 1
    tail.write_bytes(data)
    with pytest.raises(DataError, match=rf"{tail}.*mouse repair"):
        verify(folder)
    with pytest.raises(DataError, match=str(tail)):
        numbers_in(DatasetStore.open(folder, "a"))
    done = repair(folder)
    assert done.said
    with DatasetStore.open(folder, "a") as store:
        found = numbers_in(store)
        assert found.start == 0
        assert 100 <= found.stop == done.rows < 1000
    assert [path.name for path in (folder / "damaged").iterdir() if path.suffix == ".rows"] == [tail.name]


@pytest.mark.parametrize("damaged", [True, False])
def test_who_may_repair(damaged: bool, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if damaged:
        flip(sealed(folder)[0])
    with (
        DatasetStore.open(folder, "a"),
        pytest.raises(ConfigError, match=r"expected to be the only writer of .*, found process \d+ on"),
    ):
        repair(folder)
    assert main(["repair", str(folder / "nothing")]) == 2
    assert "expected a folder with a store" in capsys.readouterr().err
    assert not (folder / "nothing").exists()


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_manifest_that_is_lost_is_put_back(damage: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "manifest.json").read_bytes()
    damage(folder / "manifest.json")
    remedy = rf"manifest.json: expected .*; mouse repair {folder} restores the manifest from the copy manifest.json.bak"
    for call in (verify, DatasetStore.open, lambda path: DatasetStore.open(path, "a"), formats.open):
        with pytest.raises(DataError, match=remedy) as error:
            call(folder)
        assert "JSONDecodeError" not in str(error.value)
    assert repair(folder, dry_run=True).rows == 100
    with pytest.raises(DataError):
        verify(folder)
    assert main(["repair", str(folder)]) == 0
    assert "the copy manifest.json.bak, which lists 3 sealed files, replaces the manifest" in capsys.readouterr().out
    assert (folder / "manifest.json").read_bytes() == before
    assert numbers_in(DatasetStore.open(folder)) == range(100)
    assert repair(folder).said == ()


def test_files_that_the_copy_does_not_know_are_put_aside(folder: Path) -> None:
    copy = (folder / "manifest.json.bak").read_bytes()
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows_of("mixed", 100, 10))
    newest = sealed(folder)[-1]
    (folder / "manifest.json.bak").write_bytes(copy)
    (folder / "manifest.json").unlink()
    done = repair(folder)
    assert any(f"{newest}: the copy of the manifest does not list this file" in line for line in done.said)
    assert (folder / "damaged" / newest.name).exists()
    assert numbers_in(DatasetStore.open(folder, "a")) == range(100)


def test_without_a_copy_the_files_stay_where_they_are(folder: Path) -> None:
    for name in ("manifest.json", "manifest.json.bak"):
        (folder / name).unlink()
    before = sealed(folder)
    for call in (repair, verify, DatasetStore.open, lambda path: DatasetStore.open(path, "a")):
        with pytest.raises(DataError, match=r"manifest.json.*found none"):
            call(folder)
    assert sealed(folder) == before


def test_what_a_flipped_bit_costs(tmp_path: Path) -> None:
    """Rows that share a checksum with it, and the rest of the episode that is broken off: no row behind them."""
    folder = tmp_path / "store"
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows_of("mixed", 0, 70))

    def written() -> None:
        store = DatasetStore.open(folder, "a")
        for begin, count in ((70, 2900), (2970, 100)):
            store.extend(rows_of("mixed", begin, count))
            store.flush()

    in_child(written)
    (tail,) = folder.glob("tail-*.rows")
    data = bytearray(tail.read_bytes())
    for number in (1570, 3065):
        data[data.index(number.to_bytes(8, "little"), 1 << 14)] ^= 1
    tail.write_bytes(data)
    for mode in ("r", "a"):
        with pytest.raises(DataError, match=rf"{tail}, rows .*; mouse repair {folder} keeps the undamaged rows"):
            DatasetStore.open(folder, mode)
    done = repair(folder)
    gaps = [re.search(r"([\d,]+) rows, from row ([\d,]+) of the store on, are dropped", line) for line in done.said]
    (size, begin), (rest, last) = [(int(gap[1].replace(",", "")), int(gap[2].replace(",", ""))) for gap in gaps if gap]
    assert begin <= 1570 < begin + size <= begin + 1024
    # The last commit's block in progress; the commit before had rows of it, or none.
    assert 2970 <= last <= 3065 < last + rest == 3070
    episode = -(-(begin + size) // 7) * 7
    kept = [*range(begin), *range(episode, last)]
    assert (done.rows, done.dropped_rows) == (len(kept), 3070 - len(kept))
    with DatasetStore.open(folder, "a") as store:
        assert store.snapshot().rows(range(len(store)))["number"] == kept
        assert [row["reward"] for row in store[:]] == [number / 4 for number in kept]
        texts = rows_of("mixed", 0, 3070)["text"]
        assert [row["text"] for row in store[:]] == [texts[number] for number in kept]
