"""The readers pass the tests that ship for those who write one."""

import contextlib
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
from mouse_core.formats.minari import read_minari
from mouse_core.formats.rows import read_rows
from mouse_core.formats.ted import read_ted
from mouse_core.testing import FormatConformance
from tests.core.formats import test_dreamerv3, test_tfds
from tests.core.formats.recording import ends_of, suite, write_minari
from tests.core.formats.test_flat_files import LENGTHS, atari, flat, logged, write_d4rl, write_dopamine, write_ogbench
from tests.core.formats.test_layouts import write_robomimic, write_zarr
from tests.core.formats.test_torchrls_datasets import write_gen_dgrl, write_roboset
from tests.core.test_lerobot import Robot
from tests.core.test_ted import write_layout


def d4rl(folder: Path) -> Path:
    return write_d4rl(folder / "x.hdf5", flat(logged()))


def ogbench(folder: Path) -> Path:
    return write_ogbench(folder / "x.npz", "raw", logged())


def written(write: Callable[..., Any], **options: Any) -> Callable[[Path], Path]:
    """What writes rows in a format that can be written here."""

    def make(folder: Path) -> Path:
        write(formats.open(ogbench(folder)), folder / "data", **options)
        return folder / "data"

    return make


RECORDED = ends_of(LENGTHS)
ONE_FLAG = ends_of(LENGTHS, terminal=2)  # for the ends of trajectories of a length that was chosen
TestD4RL = suite(RECORDED, d4rl, partial(read_layouts, layout="d4rl", final="mark"))
TestOGBench = suite(ONE_FLAG, ogbench, partial(read_layouts, layout="ogbench"))
TestDopamine = suite(
    ends_of(LENGTHS, truncated=1), lambda folder: write_dopamine(folder, atari()), partial(read_dopamine, final="mark")
)
TestLayouts = suite(
    RECORDED, lambda folder: write_robomimic(folder / "x.npz", logged()), partial(read_layouts, layout="robomimic")
)
TestLayoutsWithoutEnds = suite(
    RECORDED,
    lambda folder: write_robomimic(folder / "x.npz", logged(), ends=False),
    partial(read_layouts, layout="robomimic", final="mark"),
)
TestLeRobot = suite(
    ((6, 1), (4, 1), (8, 1), (5, 1)), lambda folder: Robot().write(folder / "set"), partial(read_lerobot, final="mark")
)
TestMinari = suite(ONE_FLAG, written(write_minari), read_minari)
TestTED = suite(ONE_FLAG, written(write_layout, layout="ted"), read_ted)
TestNestedTED = suite(ONE_FLAG, written(write_layout, layout="nested"), read_ted)
TestRows = suite(ONE_FLAG, written(RowStream.save), read_rows)


def roboset(folder: Path) -> Path:
    (folder / "x").mkdir()
    return write_roboset(folder / "x" / "a.h5", logged()[:2], closed=True).parent


FOLDERS = {
    "gen_dgrl": lambda folder: write_gen_dgrl(folder / "x", "npz"),
    "dreamerv3": lambda folder: test_dreamerv3.replay(folder / "x", (4, 3)),
    "tfds": lambda folder: test_tfds.made(folder, "vector"),
    "zarr": lambda folder: write_zarr(folder / "x.zarr", logged()[:2]),
}


@pytest.mark.parametrize("name", ["roboset", *list(FOLDERS)[:-1], pytest.param("zarr", marks=pytest.mark.slow)])
def test_folders_of_others_lead_to_nothing_outside(name: str, tmp_path: Path) -> None:
    if name == "tfds":
        pytest.importorskip("tensorflow_datasets")
    read = partial(formats.open, final="mark")
    suite((), FOLDERS.get(name, roboset), read)().test_no_file_outside_of_a_folder_is_read(tmp_path)


def other_rows(change: Callable[[pa.Table], pa.Table]) -> Any:
    """A suite of a reader that does something wrong with the rows of an episode's end."""

    def read(path: Path, **options: Any) -> Any:
        stream = read_layouts(path, layout="d4rl", final="mark", **options)
        return stream.replace(batches=lambda: iter(change(stream.to_table()).to_batches()), rows=None)

    return suite(RECORDED, d4rl, read)()


def ends(codes: Sequence[int]) -> Callable[[pa.Table], pa.Table]:
    """What gives alive, terminal and truncated these codes."""

    def change(table: pa.Table) -> pa.Table:
        done = np.array(codes)[table.column("done").to_numpy()]
        return table.set_column(table.schema.get_field_index("done"), "done", pa.array(done))

    return change


def test_the_suite_finds_other_endings(tmp_path: Path) -> None:
    swapped, none, all_terminal = (ends(codes) for codes in ([0, 2, 1], [0, 0, 0], [0, 1, 1]))
    for change in (swapped, none, all_terminal, lambda table: table.slice(0, table.num_rows - 1)):
        with pytest.raises(AssertionError, match="last done"):
            other_rows(change).test_episodes_are_whole(tmp_path)
    with pytest.raises(AssertionError, match="episodes: expected"):
        suite((), d4rl, TestD4RL.read)().test_episodes_are_whole(tmp_path)


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
        if self.wrong is Ignored:
            lines = [line for line in lines if line.strip().isdecimal()]
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
    with contextlib.nullcontext() if wrong is None else pytest.raises((AssertionError, ValueError)):
        suite.test_what_is_not_there_or_damaged_is_refused(tmp_path)


def test_the_suite_finds_rows_that_are_lost(tmp_path: Path) -> None:
    def lossy(path: Path, **options: Any) -> Any:
        stream = TestOGBench.read(path, **options)
        return stream.replace(batches=lambda: (batch.slice(0, 2) for batch in stream)) if options else stream

    with pytest.raises(AssertionError, match="batches of 3"):
        suite(ONE_FLAG, ogbench, lossy)().test_reading_again_reads_the_same(tmp_path)
