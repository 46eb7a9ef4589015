"""Records in mapped files: what was added is there at any moment, and nothing else ever is."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import DataError
from mouse_core.files.log import MappedLog, read_mapped_log

FIRST, HEAD = 24, 16


@settings(max_examples=30)
@given(steps=st.lists(st.one_of(st.none(), st.binary(max_size=40_000))))
def test_records_since_the_last_clear_are_there(
    steps: list[bytes | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("frames") / "records"
    written = MappedLog(path)
    expected: list[bytes] = []
    for step in steps:
        if step is None:
            written.clear()
            expected = []
        elif step:
            written.append(step)
            expected.append(step)
        assert written.is_empty == (not expected)
    written.sync()
    written.close()
    assert read_mapped_log(path) == expected


def test_a_record_counts_once_its_length_is_there(tmp_path: Path) -> None:
    path = tmp_path / "records"
    written = MappedLog(path)
    written.append(b"older" * 50)
    written.append(b"older" * 50)
    written.clear()
    written.append(b"first")
    begin = FIRST + HEAD + 5
    before = path.read_bytes()
    written.append(b"second" * 20)
    after = path.read_bytes()
    for moment in range(begin + 8, begin + 200):
        path.write_bytes(before[: begin + 8] + after[begin + 8 : moment] + before[moment:])
        assert read_mapped_log(path) == [b"first"]
    path.write_bytes(after)
    assert read_mapped_log(path) == [b"first", b"second" * 20]


def test_damage_is_an_error_and_what_a_power_cut_leaves_is_none(tmp_path: Path) -> None:
    path = tmp_path / "records"
    written = MappedLog(path)
    for number in range(20):
        written.append(bytes([number]) * 40)
    whole, bits = path.read_bytes(), random.Random(0)
    for _ in range(50):
        at = bits.randrange(FIRST, FIRST + 20 * (HEAD + 40))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bits.randrange(8)
        path.write_bytes(damaged)
        with suppress(DataError):
            found = read_mapped_log(path)  # it was a bit of what fills up, or a length of 0
            assert found == [bytes([number]) * 40 for number in range(len(found))]
        damaged[8:16] = bytes(8)  # of another start of the machine
        path.write_bytes(damaged)
        found = read_mapped_log(path)
        assert found == [bytes([number]) * 40 for number in range(len(found))]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records"
    written = MappedLog(path)
    written.append(b"first")
    content = bytearray(path.read_bytes())
    content[FIRST + HEAD] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path}: expected the record at byte 24 as it was written"):
        read_mapped_log(path)


def test_records_from_before_a_clear_do_not_come_back(tmp_path: Path) -> None:
    """As where the first pages reached the disk before the machine stopped, and the others did not."""
    path = tmp_path / "records"
    written = MappedLog(path)
    for _ in range(20):
        written.append(b"older" * 10)
    older = path.read_bytes()
    written.clear()
    for _ in range(20):
        written.append(b"newer" * 10)
    newer, records = path.read_bytes(), 5
    page = FIRST + records * (HEAD + 50)
    path.write_bytes(newer[:8] + bytes(8) + newer[16:page] + older[page:])
    assert read_mapped_log(path) == [b"newer" * 10] * records


@pytest.mark.parametrize("content", [b"", bytes(100), b"mouserec"])
def test_a_file_that_was_not_finished_has_no_records(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(content)
    assert read_mapped_log(tmp_path / "records") == []


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b"anything" * 10)
    with pytest.raises(DataError, match="expected a mapped log"):
        read_mapped_log(tmp_path / "records")
