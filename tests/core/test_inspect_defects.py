"""`mouse inspect` finds what is wrong with dimensions and with the order of rows, and is silent where nothing is."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import DatasetStore, formats
from mouse_core.inspect import Finding, Report, inspect, show
from mouse_core.metadata import DatasetMetadata
from mouse_core.statistics import statistics
from tests.core import planted_defects
from tests.core.planted_defects import Columns, stream


def arm(*, episodes: int = 24, length: int = 100, seed: int = 0) -> Columns:
    """An arm of three joints that actions push, seen through noise; a random policy."""
    random = np.random.default_rng(seed)
    rows = episodes * (length + 1)
    step = np.tile(np.arange(length + 1), episodes)
    action = np.where(step[:, None] == 0, 0, random.uniform(-1, 1, (rows, 2)))
    state = np.zeros((rows, 3))
    for row in range(rows):
        if step[row] == 0:
            state[row] = random.normal(size=3)
        else:
            pushed = np.array([0.6, -0.2, 0.3]) * action[row, 0] + np.array([0.1, 0.5, -0.4]) * action[row, 1]
            state[row] = 0.9 * state[row - 1] + pushed + 0.05 * random.normal(size=3)
    return {
        "action": action.astype(np.float32),
        "reward": np.where(step == 0, 0.0, -(state**2).sum(axis=1)),
        "done": np.where(step == length, 1 + np.arange(rows) % 2, 0),
        "episode_step": step,
        "observation": state.astype(np.float32),
    }


@pytest.fixture(scope="module")
def clean() -> Columns:
    return arm()


def loud(report: Report) -> set[str]:
    return {finding.code for finding in report.warnings}


def found(report: Report, code: str) -> Finding:
    (finding, *_) = [finding for finding in report.findings if finding.code == code]
    return finding


def spoiled(columns: Columns) -> Columns:
    return {name: values.copy() for name, values in columns.items()}


def test_a_recording_that_is_right_is_warned_of_nothing(clean: Columns) -> None:
    assert loud(inspect(stream(clean))) == set()
    outgoing = {**clean, "action": np.roll(clean["action"], -1, axis=0)}
    assert loud(inspect(stream(outgoing, metadata=DatasetMetadata("outgoing")))) == set()


# The first magnitude of each in the default suite, the others in the slow one; what is a note has a test of its own.
NOTES = {("a dimension always 0", 0), ("a dimension out of scale", 1e-5)}
DEFECTS = [
    pytest.param(name, size, marks=[pytest.mark.slow] if place else [])
    for name, (_, sizes, _) in planted_defects.DEFECTS.items()
    for place, size in enumerate(sizes)
    if (name, size) not in NOTES
]


@pytest.mark.parametrize(("name", "size"), DEFECTS)
def test_each_planted_defect_is_warned_of(clean: Columns, name: str, size: float) -> None:
    plant, _, codes = planted_defects.DEFECTS[name]
    rows = spoiled(clean)
    plant(rows, size)
    report = inspect(stream(rows))
    assert loud(report) & codes
    assert not loud(inspect(stream(rows), ignore=loud(report)))
    for finding in report.warnings:
        assert finding.episode in finding.episodes, finding
        assert list(finding.episodes) == sorted(set(finding.episodes))


@pytest.mark.parametrize("name", ["a dimension always 0", "a dimension out of scale"])
def test_what_only_looks_odd_is_a_note(clean: Columns, name: str) -> None:
    plant, _, codes = planted_defects.DEFECTS[name]
    rows = spoiled(clean)
    plant(rows, 1e-5)
    report = inspect(stream(rows))
    assert loud(report) == set()
    assert {finding.code for finding in report.findings} & codes


def test_a_finding_says_where(clean: Columns, capsys: pytest.CaptureFixture[str]) -> None:
    rows = spoiled(clean)
    rows["observation"][5 * 101 + 17, 1] = 1e9
    metadata = DatasetMetadata(dimensions={"observation": ["base", "elbow", "wrist"]})
    report = inspect(stream(rows, metadata=metadata))
    finding = found(report, "outlier")
    assert (finding.column, finding.dimension, finding.name) == ("observation", 1, "elbow")
    assert (finding.episode, finding.step, finding.level) == (5, 17, "warning")
    assert finding.message.startswith("observation[1] (elbow): 1e+09 in episode 5, step 17")
    assert re.search(r"is [1-9](\.\d)?e\+0[89] times as far", finding.message)
    # Beside that one, all others are nearly the lowest, and yet not "saturated".
    assert [finding.code for finding in report.findings if finding.dimension == 1] == ["outlier"]
    show(report)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("[e=5&s=17]") for line in lines)
    assert any(line.startswith("To see it: mouse view ") and line.endswith(" --at 'e=5&s=17'") for line in lines)


def test_a_finding_names_all_episodes_that_it_is_in(clean: Columns) -> None:
    rows = spoiled(clean)
    begins = 101 * np.arange(24)
    rows["observation"][begins[[7, 3, 20]] + 40, 2] = [1e6, -2e6, 1e6]
    rows["observation"][begins[11] + 8 : begins[12] + 60, 1] = 0.25
    rows["reward"][begins[[2, 6]]] = 1.0
    rows["reward"][begins[[4, 9]] + 50] = np.nan
    rows["done"][begins[[5, 8]] + 30] = 1
    report = inspect(stream(rows))
    places = {one.code: (one.column, one.dimension, one.episode, one.step, one.episodes) for one in report.warnings}
    assert places == {
        "not-finite": ("reward", None, 4, 50, (4, 9)),
        "reward-at-start": (None, None, 2, 0, (2, 6)),
        "continues-after-terminal": (None, None, 5, 31, (5, 8)),
        "outlier": ("observation", 2, 3, 40, (3, 7, 20)),
        "stuck": ("observation", 1, 11, 8, (11, 12)),
    }


def test_few_episodes_that_differ_are_no_drift() -> None:
    """Every episode has a goal of its own, and in one of them a thing is moved that lies still in the others."""
    for seed in range(4):
        rows = arm(episodes=6, length=300, seed=seed)
        number = np.cumsum(rows["episode_step"] == 0) - 1
        goal = np.random.default_rng(seed).uniform(-1, 1, (6, 4))[number]
        moved = np.where(number == 4, 1.0, 1e-12)[:, None] * rows["observation"][:, :1]
        seen = np.concatenate([rows["observation"], goal + 0.01 * rows["observation"][:, :1], moved], axis=1)
        assert loud(inspect(stream(rows | {"observation": seen.astype(np.float32)}))) == set()


def test_rows_of_the_other_alignment_are_told(clean: Columns) -> None:
    outgoing = {**clean, "action": np.roll(clean["action"], -1, axis=0)}
    finding = found(inspect(stream(outgoing)), "misaligned-actions")
    assert "one row too early, as in rows with the alignment 'outgoing'" in finding.message
    finding = found(inspect(stream(clean, metadata=DatasetMetadata("outgoing"))), "misaligned-actions")
    assert "one row too late, as in rows with the alignment 'arrived'" in finding.message


def test_a_policy_that_looks_at_what_it_led_to_is_no_shift() -> None:
    """The action of the next row is chosen by looking at the observation before it, so it says much about it."""
    random = np.random.default_rng(1)
    columns = arm(seed=1)
    state, action, step = columns["observation"], columns["action"], columns["episode_step"]
    for row in range(len(step)):
        if step[row]:
            seen = state[row - 1]
            action[row] = np.tanh([seen[0] - seen[1], seen[2]]) + 0.1 * random.normal(size=2)
            push = 0.6 * action[row, 0] * np.array([1, -0.3, 0.5]) + 0.5 * action[row, 1] * np.array([0.2, 1, -0.8])
            state[row] = 0.7 * seen + push + 0.05 * random.normal(size=3)
    assert "misaligned-actions" not in loud(inspect(stream(columns)))
    planted_defects.rolled(columns, -1)
    assert "misaligned-actions" in loud(inspect(stream(columns)))


def test_blocks_and_thinning_change_nothing_that_is_found(clean: Columns, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = spoiled(clean)
    planted_defects.rolled(rows, -1)
    planted_defects.outlier(rows, 1e9)
    whole = inspect(stream(rows))
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 333)
    assert inspect(stream(rows)).findings == whole.findings
    monkeypatch.setattr("mouse_core.inspect.sampling._MOST_ROWS", 1100)
    assert loud(inspect(stream(rows))) == loud(whole)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    odd=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([-0.5, 3.0])), max_size=3),
    size=st.integers(1, 12),
)
def test_times_that_jump_or_go_back_are_those_of_plain_python(
    lengths: list[int], odd: list[tuple[int, float]], size: int
) -> None:
    step = np.concatenate([np.arange(length + 1) for length in lengths])
    times = np.where(step == 0, 100.0, 0.1).cumsum()
    for row, moved in odd:
        times[row % len(times) :] += moved
    rows = {
        "action": step % 2,
        "reward": step * 0.0,
        "done": (np.append(step[1:], 0) == 0) * 1,
        "episode_step": step,
        "observation": np.arange(2.0 * len(step)).reshape(-1, 2),
        "metadata_timestamp": times,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mouse_core.formats.columns._BLOCK_ROWS", size)
        report = inspect(stream(rows))
    passed = {row: times[row] - times[row - 1] for row in range(1, len(step)) if step[row]}
    back = [row for row, one in passed.items() if one < 0]
    forward = sorted(one for one in passed.values() if one > 0)
    middle = forward[(len(forward) - 1) // 2] if forward else 1.0
    jumps = [row for row, one in passed.items() if one > 3.5 * middle]
    codes = {finding.code: finding for finding in report.findings}
    assert ("time-backwards" in codes) == bool(back)
    assert ("time-jumps" in codes) == bool(jumps)
    episode = np.cumsum(step == 0) - 1
    if back:
        finding = codes["time-backwards"]
        assert (finding.episode, finding.step) == (episode[back[0]], step[back[0]])
    if jumps:
        longest = max(jumps, key=lambda row: (round(passed[row], 6), -row))
        assert f"{len(jumps):,} of {len(forward):,} steps" in codes["time-jumps"].message
        assert round(passed[longest], 6) == round(
            times[_row_of(step, codes["time-jumps"])] - times[_row_of(step, codes["time-jumps"]) - 1], 6
        )


def _row_of(step: Any, finding: Finding) -> int:
    assert finding.episode is not None
    assert finding.step is not None
    return int(np.flatnonzero(step == 0)[finding.episode]) + finding.step


@pytest.mark.parametrize("size", [50, 1000])
def test_a_camera_that_freezes_while_the_arm_moves(clean: Columns, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", size)
    rows = {name: values[:606] for name, values in clean.items()}
    pictures = np.random.default_rng(0).integers(0, 256, (606, 2, 3), dtype=np.uint8)
    wide = {"observation_image": pictures}
    assert loud(inspect(stream(rows | wide))) == set()
    pictures[230:260] = pictures[229]
    finding = found(inspect(stream(rows | wide)), "frozen-camera")
    assert (finding.column, finding.episode, finding.step) == ("observation_image", 2, 230 - 202)
    assert "for 30 steps" in finding.message
    pictures[::2] = pictures[1::2]  # a slow camera, every picture twice
    still = rows | {"observation": np.where(np.arange(606)[:, None] // 101 == 2, 0, rows["observation"])}
    assert "frozen-camera" not in loud(inspect(stream(still | wide)))


def test_statistics_of_other_rows_are_told(clean: Columns) -> None:
    seen = clean["observation"].astype(float)
    said = {"mean": seen.mean(axis=0), "std": seen.std(axis=0), "min": seen.min(axis=0), "max": seen.max(axis=0)}

    def codes(**changed: Any) -> set[str]:
        stats = {key: values.tolist() for key, values in (said | changed).items()}
        return loud(inspect(stream(clean, format_metadata={"stats": {"observation": stats}})))

    assert codes() == set()
    for changed in (
        {"mean": said["mean"] + said["std"] * [0, 1, 0]},
        {"std": said["std"] * [1, 1, 3]},
        {"min": said["min"] * [1, 1, 0.5]},
        {"max": said["max"] * [0.5, 1, 1]},
    ):
        assert codes(**changed) == {"statistics-contradict"}
    assert codes(mean=said["mean"][:2], std=np.array([]), min=np.array([]), max=np.array([])) == set()


def test_statistics_that_were_saved_in_the_dataset_are_looked_at(clean: Columns, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    datasets.Dataset(pa.Table.from_batches(list(stream(clean)))).save_to_disk(str(folder))
    counted = statistics(DatasetStore.open(folder))
    counted.save(folder)
    assert loud(inspect(formats.open(folder))) == set()
    file = folder / "meta" / "stats.json"
    said = json.loads(file.read_text())
    for key in ("obs_continuous", "action"):
        moved = said | {key: said[key] | {"mean": [one + 3 for one in said[key]["mean"]]}}
        file.write_text(json.dumps(moved))
        assert loud(inspect(formats.open(folder))) == {"statistics-contradict"}
    file.write_text("{")
    assert loud(inspect(formats.open(folder))) == set()


def test_splits_that_share_episodes(clean: Columns, tmp_path: Path) -> None:
    table = pa.Table.from_batches(list(stream(clean)))
    (tmp_path / "apart").mkdir()
    (tmp_path / "shared").mkdir()
    for folder, held_out in (("apart", 2020), ("shared", 1919)):
        pq.write_table(table.slice(0, 2020), tmp_path / folder / "train-00000-of-00001.parquet")
        pq.write_table(table.slice(held_out), tmp_path / folder / "validation-00000-of-00001.parquet")
    assert loud(inspect(formats.open(tmp_path / "apart"))) == set()
    report = inspect(formats.open(tmp_path / "shared"))
    assert loud(report) == {"splits-share-episodes", "duplicate-episodes"}
    assert (
        "1 of the episodes of the split 'validation' are in 'train'" in found(report, "splits-share-episodes").message
    )
    assert found(report, "splits-share-episodes").episode == 20


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", planted_defects.TUNED_ON + planted_defects.HELD_OUT)
def test_no_environment_that_is_recorded_rightly_is_warned_of(name: str) -> None:
    for seed, policy in enumerate(("random", "mixed")):
        try:
            columns = planted_defects.record(name, policy, rows=3000, seed=seed)
        except gymnasium.error.DependencyNotInstalled as error:
            pytest.skip(str(error))
        assert loud(inspect(stream(columns))) == set()


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("CartPole-v1", "random"),
        pytest.param("Pendulum-v1", "noisy", marks=pytest.mark.slow),
        pytest.param("FrozenLake-v1", "random", marks=pytest.mark.slow),
    ],
)
def test_environments_that_are_recorded_rightly_are_warned_of_nothing_and_rolled_ones_are(
    name: str, policy: str
) -> None:
    columns = planted_defects.record(name, policy, rows=2500)
    assert loud(inspect(stream(columns))) == set()
    for by in (1, -1):
        rows = spoiled(columns)
        planted_defects.rolled(rows, by)
        assert loud(inspect(stream(rows))) == {"misaligned-actions"}, by
