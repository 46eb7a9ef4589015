"""The readers pass the tests that ship for those who write one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import DataError, formats
from mouse_core.files.reading import reading
from mouse_core.formats.base import RowStream
from mouse_core.formats.dopamine import read_dopamine
from mouse_core.formats.layouts import read_layouts
from mouse_core.formats.lerobot import read_lerobot
from mouse_core.formats.minari import read_minari, write_minari
from mouse_core.formats.rows import read_rows
from mouse_core.formats.ted import read_ted, write_ted
from mouse_core.testing import FormatConformance
from tests.core.formats import test_dreamerv3, test_rllib, test_tfds
from tests.core.formats.test_dreamerv3 import write_replay
from tests.core.formats.test_flat_files import LENGTHS, atari, flat, logged, write_d4rl, write_dopamine, write_ogbench
from tests.core.formats.test_layouts import write_robomimic, write_zarr
from tests.core.formats.test_torchrls_datasets import write_gen_dgrl, write_roboset
from tests.core.test_lerobot import Robot


def recorded(*, terminal: int = 1, truncated: int = 2) -> tuple[tuple[int, int], ...]:
    """The episodes of ``logged``, and the codes that their two endings have in a format."""
    return tuple((abs(length) + 1, terminal if length > 0 else truncated) for length in LENGTHS)


class TestD4RL(FormatConformance):
    episodes = recorded()

    def write(self, folder: Path) -> Path:
        return write_d4rl(folder / "x.hdf5", flat(logged()))

    def read(self, path: Path, **options: Any) -> Any:
        return read_layouts(path, layout="d4rl", final="mark", **options)


class TestD4RLWithoutEnds(TestD4RL):
    def read(self, path: Path, **options: Any) -> Any:
        return read_layouts(path, layout="d4rl", final="drop", **options)


class TestOGBench(FormatConformance):
    episodes = recorded(terminal=2)  # it has one flag, for the ends of trajectories of a length that was chosen

    def write(self, folder: Path) -> Path:
        return write_ogbench(folder / "x.npz", "raw", logged())

    def read(self, path: Path, **options: Any) -> Any:
        return read_layouts(path, layout="ogbench", **options)


class TestDopamine(FormatConformance):
    episodes = recorded(truncated=1)

    def write(self, folder: Path) -> Path:
        write_dopamine(folder, atari())
        return folder

    def read(self, path: Path, **options: Any) -> Any:
        return read_dopamine(path, final="mark", **options)


class TestLayouts(FormatConformance):
    episodes = recorded()

    def write(self, folder: Path) -> Path:
        return write_robomimic(folder / "x.npz", logged())

    def read(self, path: Path, **options: Any) -> Any:
        return read_layouts(path, layout="robomimic", **options)


class TestLayoutsWithoutEnds(TestLayouts):
    def write(self, folder: Path) -> Path:
        return write_robomimic(folder / "x.npz", logged(), ends=False)

    def read(self, path: Path, **options: Any) -> Any:
        return read_layouts(path, layout="robomimic", final="mark", **options)


class TestLeRobot(FormatConformance):
    episodes = ((6, 1), (4, 1), (8, 1), (5, 1))

    def write(self, folder: Path) -> Path:
        return Robot().write(folder / "set")

    def read(self, path: Path, **options: Any) -> Any:
        return read_lerobot(path, final="mark", **options)


def gen_dgrl(folder: Path) -> Path:
    return write_gen_dgrl(folder / "x", "npz")


def dreamerv3(folder: Path) -> Path:
    write_replay(folder / "x", [test_dreamerv3.stream(test_dreamerv3.logs_of((4, 3), "vector"))])
    return folder / "x"


def rllib(folder: Path) -> Path:
    return test_rllib.write(folder / "x", test_rllib.whole())


def roboset(folder: Path) -> Path:
    (folder / "x").mkdir()
    return write_roboset(folder / "x" / "a.h5", logged()[:2], closed=True).parent


def zarr(folder: Path) -> Path:
    return write_zarr(folder / "x.zarr", logged()[:2])


def tfds(folder: Path) -> Path:
    pytest.importorskip("tensorflow_datasets")
    return test_tfds.made(folder, "vector")


FOLDERS = [gen_dgrl, dreamerv3, rllib, roboset, tfds, pytest.param(zarr, marks=pytest.mark.slow)]


@pytest.mark.parametrize("write", FOLDERS)
def test_folders_of_others_lead_to_nothing_outside(write: Callable[[Path], Path], tmp_path: Path) -> None:
    suite = FormatConformance()
    suite.write, suite.read = write, partial(formats.open, final="mark")  # type: ignore[method-assign,assignment]
    suite.test_no_file_outside_of_a_folder_is_read(tmp_path)


class FromRows(FormatConformance):
    """Formats that can be written here."""

    episodes = TestOGBench.episodes

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


def other_rows(change: Callable[[pa.Table], pa.Table]) -> Any:
    """A suite of a reader that does something wrong with the rows of an episode's end."""

    class Wrong(TestD4RL):
        def read(self, path: Path, **options: Any) -> Any:
            stream = super().read(path, **options)
            return stream.replace(batches=lambda: iter(change(stream.to_table()).to_batches()), rows=None)

    return Wrong()


def ends(codes: Sequence[int]) -> Callable[[pa.Table], pa.Table]:
    """What gives alive, terminal and truncated these codes."""

    def change(table: pa.Table) -> pa.Table:
        done = np.array(codes)[table.column("done").to_numpy()]
        return table.set_column(table.schema.get_field_index("done"), "done", pa.array(done))

    return change


@pytest.mark.parametrize(
    "change",
    [ends([0, 2, 1]), ends([0, 0, 0]), ends([0, 1, 1]), lambda table: table.slice(0, table.num_rows - 1)],
    ids=["swapped", "none", "all terminal", "no finish"],
)
def test_the_suite_finds_other_endings(change: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="last done"):
        other_rows(change).test_episodes_are_whole(tmp_path)


def test_the_suite_asks_for_what_was_recorded(tmp_path: Path) -> None:
    class Silent(TestD4RL):
        episodes = ()

    with pytest.raises(AssertionError, match="episodes: expected"):
        Silent().test_episodes_are_whole(tmp_path)


class Lines(FormatConformance):
    """Lines of text, of which nobody can tell that the last ones are missing."""

    cut = False
    wrong: type[Exception] | None = None

    def write(self, folder: Path) -> Path:
        (folder / "x.log").write_text("".join(f"{number:3}\n" for number in range(20)))
        return folder / "x.log"

    def read(self, path: Path, **options: Any) -> Any:
        with reading(path):
            lines = path.read_text("ascii", errors="strict" if self.wrong is None else "replace").splitlines()
        if self.wrong is not None and lines:
            lines = [line for line in lines if line.strip().isdecimal()] if self.wrong is Ignored else lines
        try:
            steps = np.array([int(line) for line in lines])
        except ValueError as error:
            raise (self.wrong or DataError)(f"{path}: {error}") from error
        columns = {"action": steps, "reward": steps * 1.0, "done": steps * 0, "observation": steps[:, None] * 1.0}
        table = pa.table({name: values.tolist() for name, values in columns.items()} | {"episode_step": steps})
        return RowStream(str(path), "lines", table.schema, lambda: iter(table.to_batches()))


class Ignored(Exception):
    """What is damaged is left out."""


@pytest.mark.parametrize("wrong", [None, ValueError, Ignored])
def test_damage_is_tried_also_where_a_cut_cannot_be_told(wrong: Any, tmp_path: Path) -> None:
    suite = Lines()
    suite.wrong = wrong
    if wrong is None:
        suite.test_what_is_not_there_or_damaged_is_refused(tmp_path)
    else:
        with pytest.raises((AssertionError, ValueError)):
            suite.test_what_is_not_there_or_damaged_is_refused(tmp_path)


def test_the_suite_finds_rows_that_are_lost(tmp_path: Path) -> None:
    class Lossy(TestOGBench):
        def read(self, path: Path, **options: Any) -> Any:
            stream = super().read(path, **options)
            return stream.replace(batches=lambda: (batch.slice(0, 2) for batch in stream)) if options else stream

    with pytest.raises(AssertionError, match="batches of 3"):
        Lossy().test_reading_again_reads_the_same(tmp_path)
