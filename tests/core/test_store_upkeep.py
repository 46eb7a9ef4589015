"""Old rows are dropped, small files are put together, and readers keep what they look at."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.store.disk.leases import Lease, Leases
from mouse_core.store.disk.manifest import Manifest, Sealed
from mouse_core.store.disk.upkeep import retained, small_run


def manifest_of(sizes: list[int]) -> Manifest:
    segments = tuple(Sealed(number, size, 10 * size, "", 0) for number, size in enumerate(sizes))
    return Manifest(segments=segments, next_number=len(sizes))


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(8, 200), st.integers(0, 30))
def test_the_oldest_are_dropped_and_no_more_than_need_be(sizes: list[int], most: int, coming: int) -> None:
    before = manifest_of(sizes)
    by_rows = retained(before, max_rows=most, max_bytes=None, rows=coming)
    by_bytes = retained(before, max_rows=None, max_bytes=10 * most, size=10 * coming)
    assert by_rows == by_bytes
    kept = len(by_rows.segments)
    assert by_rows.segments == before.segments[len(sizes) - kept :]
    assert by_rows.dropped + by_rows.rows == sum(sizes)
    assert by_rows.rows + coming <= most or kept <= 1
    if kept < len(sizes):
        assert sum(sizes[len(sizes) - kept - 1 :]) + coming > most
        assert by_rows.next_number > before.next_number


def test_writing_small_files_writes_no_row_often() -> None:
    """Ten thousand files of a row each: each row goes into a file twice as large every time."""
    segments: list[Sealed] = []
    written, most = 0, 1000
    for number in range(10_000):
        segments.append(Sealed(number, 1, 1, "", 0))
        while run := small_run(segments, most):
            size = sum(segments[at].bytes for at in run)
            assert size <= most
            written += size
            segments[run.start : run.stop] = [Sealed(number, size, size, "", 0)]
    assert sum(one.rows for one in segments) == 10_000
    assert len(segments) < 60
    assert written <= 10_000 * 10


def test_only_like_files_are_put_together() -> None:
    like = [Sealed(number, 1, 1, "", 0) for number in range(20)]
    assert small_run(like, 1000) == range(20)
    assert small_run(like, 10) == range(10, 20)
    assert small_run(like, 1000, 9) == range(11, 20)
    assert not small_run(like[:7], 1000)
    assert small_run([*like[:5], like[0]._replace(schema=1), *like[5:]], 1000) == range(6, 21)
    assert not small_run([like[0]._replace(bytes=500), *like[:7]], 1000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_reader_that_looks_at_a_state_keeps_its_files(tmp_path: Path) -> None:
    asked = Leases(tmp_path)
    lease, later = Lease(tmp_path, 7), Lease(tmp_path, 9)
    assert asked.is_free(6)
    assert not asked.is_free(7)
    lease.close()
    assert asked.is_free(8)
    assert not asked.is_free(9)
    # A child that closes its copy, or ends, lets go of nothing.
    if not os.fork():
        later.close()
        os._exit(0)
    os.wait()
    assert not asked.is_free(9)
    assert pickle.loads(pickle.dumps(later)) is None
    del later
    assert asked.is_free(9)
