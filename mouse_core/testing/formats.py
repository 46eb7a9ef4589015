"""Conformance tests for pytest: readers of formats, and sources of batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import formats
from mouse_core.errors import MouseError, StateError
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns import MISSING
from mouse_core.prefetch.batchifier import PrefetchBatchifier
from mouse_core.prefetch.source import Source
from mouse_core.spec import Spec, check_alignment
from mouse_core.testing._comparing import refused, stream_digest

_BATCHES = 5


class SourceConformance:
    """Tests that loaders can use a source, which implements ``mouse_core.prefetch.Source``.

    Subclass it in a test file, under a name that begins with ``Test``, and implement ``make``:

        class TestMine(SourceConformance):
            def make(self):
                return MySource()
    """

    def make(self) -> Any:
        """Return a new source; all calls use the same options."""
        raise NotImplementedError

    def test_it_has_what_the_protocol_names(self) -> None:
        """A source has a spec, a constant fingerprint, batches by index, and at least one batch per epoch."""
        source = self.make()
        assert isinstance(source, Source), f"expected spec, fingerprint, a length and batches by number: {source}"
        assert isinstance(source.spec, Spec), f"expected a mouse_core.Spec, found {source.spec!r}"
        assert isinstance(source.fingerprint, str), f"expected a text, found {source.fingerprint!r}"
        assert source.fingerprint == self.make().fingerprint, "expected the same fingerprint of the same source"
        assert len(source) >= 1, f"expected batches in an epoch, found {len(source)}"

    def test_the_spec_says_what_comes(self) -> None:
        """The spec has the names of fields in order, their dtypes, and the shape of each field behind the axes ``[B,
        S]`` or ``[B]``."""
        source = self.make()
        for view in _views(source[0]):
            assert list(view) == list(source.spec), f"expected the fields {list(source.spec)}, found {list(view)}"
            size = next(iter(view.values())).shape[: source.spec.batch_dims]
            for name, field in source.spec.items():
                values = view[name]
                assert values.dtype == field.dtype, f"{name}: expected {field.dtype}, found {values.dtype}"
                if field.per_sequence:
                    assert values.ndim == 1 + len(field.shape), f"{name}: found the shape {values.shape}"
                    assert values.shape[1:] == field.shape, f"{name}: found the shape {values.shape}"
                else:
                    assert values.shape == (*size, *field.shape), f"{name}: found the shape {values.shape}"

    def test_packed_windows_lie_where_it_says(self) -> None:
        """Packed windows follow each other from row 0 on; padding lies behind the last window."""
        source = self.make()
        for view in _views(source[0]) if source.spec.is_packed else ():
            bounds, rows = view["cu_seqlens"], len(view["position"])
            assert bounds[0] == 0, f"cu_seqlens: expected the first window at row 0, found {bounds[0]}"
            assert (np.diff(bounds) >= 0).all(), f"cu_seqlens: expected ascending values, found {bounds.tolist()}"
            assert bounds[-1] <= rows, f"cu_seqlens: expected at most {rows} rows, found {bounds[-1]}"
            missing = [rows - int(bounds[-1])]
            windows = len(bounds) - 1
            expected = np.repeat(np.arange(windows + 1), [*np.diff(bounds), *missing])
            assert np.array_equal(view["sequence_id"], expected), "sequence_id: expected the index of each row's window"
            steps = np.arange(rows) - np.repeat([*bounds[:-1], 0], [*np.diff(bounds), *missing])
            steps[bounds[-1] :] = 0
            assert np.array_equal(view["position"], steps), "position: expected the index of each row in its window"

    def test_a_batch_is_a_function_of_its_number(self) -> None:
        """Batches do not depend on order, repetition, the instance of the source, or the end of an epoch."""
        source, other = self.make(), self.make()
        numbers = [*range(_BATCHES), len(source), len(source) + 1]
        expected = {number: _digest(source[number]) for number in numbers}
        for number in reversed(numbers):
            assert _digest(other[number]) == expected[number], f"batch {number} is another one in another order"
            assert _digest(source[number]) == expected[number], f"batch {number} is another one when asked again"

    def test_threads_get_the_same(self) -> None:
        """Threads that request batches at the same time get equal batches."""
        one, source = self.make(), self.make()
        expected = [_digest(one[number]) for number in range(4 * _BATCHES)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(source.__getitem__, range(4 * _BATCHES)))
        for number, batch in enumerate(found):
            assert _digest(batch) == expected[number], f"batch {number} is another one among threads"

    def test_batches_are_the_callers(self) -> None:
        """The source never writes to a delivered batch, and changes by the caller do not affect later batches."""
        source, other = self.make(), self.make()
        # Digests are compared, since a batch of the other source may share its memory.
        expected = [_digest(other[number]) for number in range(_BATCHES)]
        kept = [source[number] for number in range(_BATCHES)]
        for number, batch in enumerate(kept):
            assert _digest(batch) == expected[number], f"batch {number} was written to after it was delivered"
        for batch in kept:
            for view in _views(batch):
                for values in view.values():
                    values[...] = 0
        for number in range(_BATCHES):
            assert _digest(source[number]) == expected[number], f"batch {number} is in memory that the caller has"

    def test_a_loader_delivers_it(self) -> None:
        """A loader delivers the source's batches with any number of workers, and accepts only states of this source."""
        source = self.make()
        for workers in (0, 4):
            with PrefetchBatchifier(source, num_workers=workers) as loader:
                assert loader.spec == source.spec
                found = [loader.next_batch() for _ in range(2 * _BATCHES)]
                state = loader.state_dict()
            for number, batch in enumerate(found):
                assert _digest(batch) == _digest(source[number]), f"batch {number} is another one in a loader"
            with PrefetchBatchifier(self.make(), num_workers=workers) as loader:
                loader.load_state_dict(state)
                assert _digest(loader.next_batch()) == _digest(source[len(found)]), (
                    "expected the batch after the last delivered batch"
                )
                refused(StateError, partial(loader.load_state_dict, {**state, "fingerprint": "another"}))

    def test_other_numbers_of_processes_go_on_with_it(self) -> None:
        """After a restart with 1 or 4 processes instead of 3, the stream continues; the parts of all processes together
        are the complete batches."""
        source = self.make()
        if source.spec.is_packed or getattr(source, "shard", (0, 1)) != (0, 1):
            return  # if rows are not windows, the author decides whether the source has shards
        state: Any = None
        for begin, end, count in ((0, 2, 3), (2, 3, 1), (3, 5, 4)):
            loaders = [PrefetchBatchifier(source, shard=(rank, count), uneven="pad") for rank in range(count)]
            for loader in loaders if state else ():
                loader.load_state_dict(state)
            for number in range(begin, end):
                parts = [_views(loader.next_batch()) for loader in loaders]
                for expected, *views in zip(_views(source[number]), *parts, strict=True):
                    _assert_together(expected, views, f"batch {number} in {count}")
            states = [loader.state_dict() for loader in loaders]
            state = states[0]
            assert states == [state] * count, f"expected the same state of all {count} processes, found {states}"
            for loader in loaders:
                loader.close()


def _assert_together(whole: dict[str, npt.NDArray[Any]], parts: Sequence[Any], what: str) -> None:
    """Assert that a batch is the concatenation of all processes' parts; parts with fewer rows are padded."""
    size, count = len(next(iter(whole.values()))), len(parts)
    own = [size * (rank + 1) // count - size * rank // count for rank in range(count)]
    for name, values in whole.items():
        found = [part[name][:rows] for part, rows in zip(parts, own, strict=True)]
        np.testing.assert_array_equal(np.concatenate(found), values, f"{name} of {what}")


def _views(batch: Any) -> tuple[dict[str, npt.NDArray[Any]], ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _digest(batch: Any) -> str:
    """Return a digest that is equal for bit-identical batches."""
    return stream_digest([batch], 1)


# Seconds that a thread may take.
_PATIENCE = 30


class FormatConformance:
    """Tests that a reader returns rows as ``mouse_core.formats.base.RowStream`` defines: T transitions as T+1 rows.

    Subclass it in a test file, under a name that begins with ``Test``, and implement ``write`` and ``read``:

        class TestMine(FormatConformance):
            episodes = ((8, 1), (5, 2))

            def write(self, folder):
                return write_example(folder / "some.log")

            def read(self, path, **options):
                return read_log(path, **options)

    Attributes:
        episodes: The episodes that ``write`` writes and ``read`` returns: for each episode its number of rows and its
            last ``done``, 1 for terminal, 2 for truncated, 0 for neither. Determine these numbers from the recording,
            not from the reader's output.
        cut: Whether the reader detects that the end of a file is missing.
    """

    episodes: tuple[tuple[int, int], ...] = ()
    cut: bool = True

    def write(self, folder: Path) -> Path:
        """Write episodes with at least ten transitions in total into the empty ``folder``; return the path."""
        raise NotImplementedError

    def read(self, path: Path, **options: Any) -> RowStream:
        """Return the reader's row stream; ``options`` is empty or has ``batch_rows``."""
        raise NotImplementedError

    def test_columns_are_those_of_stores(self, tmp_path: Path) -> None:
        """The columns are known before reading, and every batch has the same columns."""
        stream = self.read(self.write(tmp_path))
        names = stream.schema.names
        check_alignment(stream.alignment)
        for name in ("reward", "done", "episode_step"):
            assert name in names, f"expected a column {name!r}, found {names}"
        for name in ("done", "episode_step"):
            assert stream.schema.field(name).type == pa.int64(), f"{name}: expected int64, found {stream.columns[name]}"
        known = ("action", "reward", "done", "episode_step", "observation", "metadata_", "info.")
        others = [name for name in names if not name.startswith(known)]
        assert not others, f"expected metadata_<name> for columns without actions or observations, found {others}"
        for batch in stream:
            assert batch.schema.equals(stream.schema), f"expected batches of {stream.schema}, found {batch.schema}"
            batch.validate(full=True)

    def test_episodes_are_whole(self, tmp_path: Path) -> None:
        """Episodes have the recorded length and last done code; ``episode_step`` begins at 0 in each episode, and the
        first row has no action or reward."""
        assert self.episodes, "episodes: expected (rows, last done) for each of the episodes that write writes"
        stream = self.read(self.write(tmp_path))
        table = stream.to_table()
        assert table.num_rows > 10, f"expected at least ten transitions, found {table.num_rows} rows"
        step, done, reward = (_numbers(table, name) for name in ("episode_step", "done", "reward"))
        starts = np.flatnonzero(step == 0)
        assert starts[0] == 0, f"expected step 0 in the first row, found step {step[0]}"
        lengths = np.diff(np.append(starts, len(step)))
        np.testing.assert_array_equal(step, np.concatenate([np.arange(length) for length in lengths]))
        assert np.isin(done, (0, 1, 2)).all(), f"done: expected 0, 1 or 2, found {np.unique(done)}"
        last = np.append(starts[1:], len(step)) - 1
        assert not np.delete(done, last).any(), "done: expected 0 before the last row of an episode"
        if stream.alignment == "arrived":
            assert not reward[starts].any(), "reward: expected 0 in the first row of an episode"
        found = tuple(zip(lengths.tolist(), done[last].tolist(), strict=True))
        assert found == tuple(self.episodes), f"expected (rows, last done) {self.episodes}, found {found}"
        assert stream.rows in (None, table.num_rows), f"rows: expected {table.num_rows}, found {stream.rows}"

    def test_a_marked_row_lacks_its_observation_alone(self, tmp_path: Path) -> None:
        """A row without an observation repeats integers and texts that are constant in its episode."""
        stream = self.read(self.write(tmp_path))
        table = stream.to_table()
        if MISSING not in table.column_names:
            return
        step, missing = _numbers(table, "episode_step"), _numbers(table, MISSING)
        for name in (name for name in table.column_names if name.startswith("metadata_")):
            kind = table.schema.field(name).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
                continue
            values = table.column(name).to_pylist()
            for row in np.flatnonzero(missing).tolist():
                before = set(values[row - int(step[row]) : row])
                if len(before) == 1 and any(before):
                    assert {values[row]} == before, (
                        f"{name}, row {row}: expected {before} as in the episode's other rows, found {values[row]!r}"
                    )

    def test_reading_again_reads_the_same(self, tmp_path: Path) -> None:
        """A second pass over the stream reads equal rows, also in batches of another size."""
        path = self.write(tmp_path)
        stream = self.read(path)
        expected = stream.digest()
        assert stream.digest() == expected, "expected the same rows when they are read again"
        small = self.read(path, batch_rows=3)
        assert small.digest() == expected, "expected the same rows in batches of 3"

    def test_what_is_written_of_it_is_the_same(self, tmp_path: Path) -> None:
        """Rows survive a round trip through a dataset on disk and through a store."""
        (tmp_path / "source").mkdir()
        stream = self.read(self.write(tmp_path / "source"))
        stream.save(tmp_path / "rows")
        again = formats.open(tmp_path / "rows")
        assert again.digest() == again.noted == stream.digest(), "expected the rows that were written"
        assert (again.alignment, again.metadata) == (stream.alignment, stream.metadata)
        assert len(stream.to_store()) == stream.to_table().num_rows

    def test_what_is_not_there_or_damaged_is_refused(self, tmp_path: Path) -> None:
        """Missing and damaged files raise MouseError; only a file that no row needs may lack its end.

        If the reader cannot detect a missing end, it may return rows instead, but must not raise any other error.
        """
        assert self._digest(tmp_path / "nothing" / "there") is None, "expected an error for a file that does not exist"
        path = self.write(tmp_path)
        expected = self._digest(path)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        contents = {file: file.read_bytes() for file in files}
        for file, content in contents.items():
            file.write_bytes(content[: len(content) // 2])
            found = self._digest(path)
            assert not self.cut or found in (None, expected), (
                f"{file.name} cut in half: expected an error, found other rows"
            )
            file.write_bytes(content)
        for file, content in contents.items():
            file.write_bytes(bytes(255 - byte for byte in content))
        assert self._digest(path) is None, "every byte of every file changed: expected an error, found rows"

    def test_no_file_outside_of_a_folder_is_read(self, tmp_path: Path) -> None:
        """A link to a file outside of the folder, or a pipe, raises an error, unless the rows are the same without this
        file."""
        (tmp_path / "source").mkdir()
        path = self.write(tmp_path / "source")
        outside = tmp_path / "outside"
        for file in [file for file in path.rglob("*") if file.is_file()]:
            file.rename(outside)
            without = self._digest(path)
            file.symlink_to(outside)
            found = self._digest(path)
            assert found in (None, without), f"{file.name}, a link to a file outside: expected an error, found its rows"
            file.unlink()
            if hasattr(os, "mkfifo"):
                os.mkfifo(file)
                reader = threading.Thread(target=self._digest, args=(path,), daemon=True)
                reader.start()
                reader.join(_PATIENCE)
                assert not reader.is_alive(), f"{file.name}, a pipe: expected an error, found a reader that waits"
                file.unlink()
            outside.rename(file)

    def _digest(self, path: Path) -> str | None:
        """Return the digest of the rows; None if the reader raises MouseError."""
        try:
            return self.read(path).digest()
        except MouseError:
            return None


def _numbers(table: pa.Table, name: str) -> npt.NDArray[Any]:
    return np.asarray(table.column(name).combine_chunks().to_numpy(zero_copy_only=False))
