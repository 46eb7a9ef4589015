"""The readers pass the tests that ship for those who write one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mouse_core import formats
from mouse_core.formats.d4rl import read_d4rl
from mouse_core.formats.dopamine import read_dopamine
from mouse_core.formats.minari import read_minari, write_minari
from mouse_core.formats.ogbench import read_ogbench
from mouse_core.formats.rows import read_rows
from mouse_core.formats.ted import read_ted, write_ted
from mouse_core.testing import FormatConformance
from tests.core.formats.test_flat_files import atari, flat, logged, write_d4rl, write_dopamine, write_ogbench


class TestD4RL(FormatConformance):
    def write(self, folder: Path) -> Path:
        return write_d4rl(folder / "x.hdf5", flat(logged()))

    def read(self, path: Path, **options: Any) -> Any:
        return read_d4rl(path, final="mark", **options)


class TestD4RLWithoutEnds(TestD4RL):
    def read(self, path: Path, **options: Any) -> Any:
        return read_d4rl(path, final="drop", **options)


class TestOGBench(FormatConformance):
    def write(self, folder: Path) -> Path:
        return write_ogbench(folder / "x.npz", "raw", logged())

    def read(self, path: Path, **options: Any) -> Any:
        return read_ogbench(path, **options)


class TestDopamine(FormatConformance):
    def write(self, folder: Path) -> Path:
        write_dopamine(folder, atari())
        return folder

    def read(self, path: Path, **options: Any) -> Any:
        return read_dopamine(path, final="mark", **options)


class FromRows(FormatConformance):
    """Formats that can be written here."""

    def rows(self, folder: Path) -> Any:
        return formats.open(write_ogbench(folder / "x.npz", "raw", logged()))


class TestMinari(FromRows):
    def write(self, folder: Path) -> Path:
        write_minari(self.rows(folder), folder / "data", dataset_id="some/data-v0")
        return folder / "data"

    def read(self, path: Path, **options: Any) -> Any:
        return read_minari(path, **options)


@pytest.mark.parametrize("layout", ["ted", "flat", "nested"])
class TestTED(FromRows):
    @pytest.fixture(autouse=True)
    def _chosen(self, layout: str) -> None:
        self.layout = layout

    def write(self, folder: Path) -> Path:
        write_ted(self.rows(folder), folder / "data", layout=self.layout)
        return folder / "data"

    def read(self, path: Path, **options: Any) -> Any:
        return read_ted(path, **options)


class TestRows(FromRows):
    def write(self, folder: Path) -> Path:
        self.rows(folder).write(folder / "data")
        return folder / "data"

    def read(self, path: Path, **options: Any) -> Any:
        return read_rows(path, **options)


def test_the_suite_finds_rows_that_are_lost(tmp_path: Path) -> None:
    class Lossy(TestOGBench):
        def read(self, path: Path, **options: Any) -> Any:
            stream = super().read(path, **options)
            return stream.replace(batches=lambda: (batch.slice(0, 2) for batch in stream)) if options else stream

    with pytest.raises(AssertionError, match="batches of 3"):
        Lossy().test_reading_again_reads_the_same(tmp_path)
