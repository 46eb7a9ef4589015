"""The contract of a format's reader, as tests that its author runs with pytest."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import formats
from mouse_core.errors import MouseError
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns import MISSING
from mouse_core.spec import check_alignment

# Seconds.
_PATIENCE = 30


class FormatConformance:
    """Tests that a reader gives rows as ``mouse_core.formats.base.RowStream`` says: T transitions as T+1 rows.

    Subclass it in a test file, under a name that begins with ``Test``, and say how data are written and read:

        class TestMine(FormatConformance):
            episodes = ((8, 1), (5, 2))

            def write(self, folder):
                return write_example(folder / "some.log")

            def read(self, path, **options):
                return read_log(path, **options)

    Attributes:
        episodes: What ``write`` writes, as ``read`` should give it: for each episode how many rows it has, and its last
            ``done``, 1 for terminal, 2 for truncated, 0 for neither. Take it from what was recorded, not from what is
            read.
        cut: Whether it can be told that a file lacks its end.
    """

    episodes: tuple[tuple[int, int], ...] = ()
    cut: bool = True

    def write(self, folder: Path) -> Path:
        """Write some episodes, of ten transitions or more in all; ``folder`` is an empty one. Returns what to read."""
        raise NotImplementedError

    def read(self, path: Path, **options: Any) -> RowStream:
        """Return the reader's row stream; ``options`` is empty or holds ``batch_rows``."""
        raise NotImplementedError

    def test_columns_are_those_of_stores(self, tmp_path: Path) -> None:
        """The columns are known before reading, and equal in every batch."""
        stream = self.read(self.write(tmp_path))
        names = stream.schema.names
        check_alignment(stream.alignment)
        for name in ("reward", "done", "episode_step"):
            assert name in names, f"expected a column {name!r}, found {names}"
        for name in ("done", "episode_step"):
            assert stream.schema.field(name).type == pa.int64(), f"{name}: expected int64, found {stream.columns[name]}"
        known = ("action", "reward", "done", "episode_step", "observation", "metadata_")
        others = [name for name in names if not name.startswith(known)]
        assert not others, f"expected metadata_<name> for what is no action and no observation, found {others}"
        for batch in stream:
            assert batch.schema.equals(stream.schema), f"expected batches of {stream.schema}, found {batch.schema}"
            batch.validate(full=True)

    def test_episodes_are_whole(self, tmp_path: Path) -> None:
        """Episodes keep their length and end code; steps count from 0, and row 0 has no arriving action or reward."""
        assert self.episodes, "episodes: expected (rows, last done) for each of the episodes that write writes"
        stream = self.read(self.write(tmp_path))
        table = stream.to_table()
        assert table.num_rows > 10, f"expected at least ten transitions, found {table.num_rows} rows"
        step, done, reward = (_numbers(table, name) for name in ("episode_step", "done", "reward"))
        starts = np.flatnonzero(step == 0)
        assert starts[0] == 0, f"expected an episode to begin with the first row, found step {step[0]}"
        lengths = np.diff(np.append(starts, len(step)))
        np.testing.assert_array_equal(step, np.concatenate([np.arange(length) for length in lengths]))
        assert np.isin(done, (0, 1, 2)).all(), f"done: expected 0, 1 or 2, found {np.unique(done)}"
        last = np.append(starts[1:], len(step)) - 1
        assert not np.delete(done, last).any(), "done: expected 0 where an episode goes on"
        if stream.alignment == "arrived":
            assert not reward[starts].any(), "reward: expected 0 in the first row of an episode, to which nothing led"
        found = tuple(zip(lengths.tolist(), done[last].tolist(), strict=True))
        assert found == tuple(self.episodes), f"expected (rows, last done) {self.episodes}, found {found}"
        assert stream.rows in (None, table.num_rows), f"rows: expected {table.num_rows}, found {stream.rows}"
        assert stream.episodes in (None, len(starts)), f"episodes: expected {len(starts)}, found {stream.episodes}"

    def test_a_marked_row_lacks_its_observation_alone(self, tmp_path: Path) -> None:
        """Whole numbers and texts that stay the same all through an episode are in its last row, too."""
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
        """A second pass reads equal rows, also in batches of another size."""
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
        digest = stream.write(tmp_path / "rows")
        again = formats.open(tmp_path / "rows")
        assert again.digest() == digest == stream.digest(), "expected the rows that were written"
        assert (again.alignment, again.metadata) == (stream.alignment, stream.metadata)
        assert len(stream.to_store()) == stream.to_table().num_rows

    def test_what_is_not_there_or_damaged_is_refused(self, tmp_path: Path) -> None:
        """Missing and damaged files raise MouseError; a file that no row depends on may lack its end.

        Where it cannot be told that a file lacks its end, rows may be read of it, and nothing else may be raised.
        """
        assert self._digest(tmp_path / "nothing" / "there") is None, "expected an error where there is nothing"
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
        """A link that leads out of the folder is refused, and a pipe, unless the rows are the same without the file."""
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
                assert not reader.is_alive(), f"{file.name}, a pipe: expected an error, found that it is waited for"
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
