"""Lines of RLlib, written as its JsonWriter does (ray 2.60, json_writer.py), against what environments returned."""

import base64
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, DataError, formats
from mouse_core.formats.rllib import read_rllib
from tests.core.formats.recording import Episode, Trap, check_rows, ends_of, suite
from tests.core.formats.test_flat_files import LENGTHS, logged

lz4 = pytest.importorskip("lz4.frame")


def pack(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(lz4.compress(pickle.dumps(value, protocol))).decode("ascii")


def samples(log: Episode, number: int) -> dict[str, Any]:
    """What a line has of an episode."""
    count, seen = len(log), np.array(log.observations)
    return {
        "obs": seen[:-1],
        "new_obs": seen[1:],
        "actions": np.array(log.actions),
        "rewards": np.array(log.rewards),
        "terminateds": np.array(log.terminated),
        "truncateds": np.array(log.truncated),
        "eps_id": np.full(count, 1000 + number),
        "unroll_id": np.zeros(count, int),
        "agent_index": np.zeros(count, int),
        "t": np.arange(count),
    }


def line(columns: dict[str, Any], *, packed: Sequence[str] = ("obs", "new_obs"), protocol: int = 4) -> str:
    """``_to_json`` of a SampleBatch."""
    said = {"type": "SampleBatch"}
    for key, values in columns.items():
        said[key] = pack(values, protocol) if key in packed else np.asarray(values).tolist()
    return json.dumps(said) + "\n"


def write(folder: Path, batches: Sequence[dict[str, Any]], **options: Any) -> Path:
    """Two workers' files."""
    folder.mkdir(exist_ok=True)
    for worker, some in enumerate((batches[:3], batches[3:])):
        lines = [line(batch, **options) for batch in some]
        (folder / f"output-2026-01-02_03-04-05_worker-{worker}_0.json").write_text("".join(lines))
    return folder


def whole() -> list[dict[str, Any]]:
    return [samples(log, number) for number, log in enumerate(logged())]


@pytest.mark.parametrize("protocol", [4, 5])
def test_rows_are_what_the_environments_returned(protocol: int, tmp_path: Path) -> None:
    logs = logged()
    root = write(tmp_path / "out", whole(), protocol=protocol, packed=("obs", "new_obs", "actions", "rewards"))
    stream = formats.open(root)
    assert (stream.format, stream.alignment, stream.notes) == ("rllib", "arrived", ())
    check_rows(stream.to_table(), logs)
    assert stream.to_store().columns.keys() == {"action", "reward", "done", "episode_step", "observation"}
    assert all(batch.num_rows <= 2 for batch in read_rllib(root, batch_rows=2))


def test_numbers_that_are_not_packed_and_columns_beside(tmp_path: Path) -> None:
    batches = whole()
    for batch in batches:
        batch |= {"action_prob": batch["rewards"] / 2, "vf_preds": batch["rewards"] + 1}
        batch["infos"] = [{}] * len(batch["t"])
    plain = formats.open(write(tmp_path / "a", batches, packed=())).to_table()
    packed = formats.open(write(tmp_path / "b", whole())).to_table()
    assert plain["observation"].to_pylist() == packed["observation"].to_pylist()
    after = np.array(plain["episode_step"]) > 0
    np.testing.assert_array_equal(np.array(plain["metadata_action_prob"])[after] * 2, np.array(plain["reward"])[after])
    ends = np.array(plain["done"]) > 0
    np.testing.assert_array_equal(np.isnan(np.array(plain["metadata_vf_preds"])), ends)
    rewards = np.concatenate([log.rewards for log in logged()])
    np.testing.assert_array_equal(np.array(plain["metadata_vf_preds"])[~ends], rewards + 1)


def test_an_episode_goes_on_in_the_next_line_and_no_further_than_its_samples(tmp_path: Path) -> None:
    (batch,) = [samples(log, 0) for log in logged(lengths=(9,))]
    halves = [{key: values[part] for key, values in batch.items()} for part in (slice(0, 4), slice(4, 9))]
    assert formats.open(write(tmp_path / "a", halves)).to_table()["episode_step"].to_pylist() == [*range(10)]
    lacking = [{key: values for key, values in half.items() if key != "new_obs"} for half in halves]
    with pytest.raises(ConfigError, match="final='drop'"):
        formats.open(write(tmp_path / "b", lacking))
    assert formats.open(tmp_path / "b", final="mark").to_table()["episode_step"].to_pylist() == [*range(10)]
    lacking[1]["t"] = lacking[1]["t"] + 1  # a sample between them is not there
    rows = formats.open(write(tmp_path / "b", lacking), final="mark").to_table()
    assert rows["episode_step"].to_pylist() == [*range(5), *range(6)]
    older = {key: values for key, values in batch.items() if key not in ("terminateds", "truncateds", "t", "eps_id")}
    stream = formats.open(write(tmp_path / "c", [{**older, "dones": np.arange(9) == 8}]))
    assert stream.to_table()["done"].to_pylist() == [0] * 9 + [1]
    assert "all are terminal" in stream.notes[0]


def test_samples_of_one_of_several_policies(tmp_path: Path) -> None:
    batches = {f"p{number}": json.loads(line(batch)) for number, batch in enumerate(whole()[:2])}
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"type": "MultiAgentBatch", "count": 1, "policy_batches": batches}))
    with pytest.raises(ConfigError, match=r"x\.json, line 1: policy: expected one of \['p0', 'p1'\], found None"):
        formats.open(file)
    for number, log in enumerate(logged()[:2]):
        check_rows(formats.open(file, policy=f"p{number}").to_table(), [log])
    with pytest.raises(ConfigError, match="policy: expected None for samples of a single policy"):
        formats.open(write(tmp_path / "out", whole()), policy="p0")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"obs": pack(Trap())}, "line 2, obs: expected arrays, found (posix|nt).system, which is not opened"),
        ({"obs": pack([1])}, "obs: expected arrays of numbers, or dicts and tuples of such, found list"),
        ({"obs": pack(np.array([Trap()] * 3, object))}, "found (posix|nt).system, which is not opened"),
        ({"obs": "????"}, "line 2: cannot be read"),
        ({"obs": pack(np.zeros((2, 3)))}, r"obs: expected numbers for each of 3 steps, found \[2, 3\]"),
        ({"actions": [1, [2], 3]}, "line 2: cannot be read"),
        ({"rewards": None}, "line 2: "),
        ({"type": "Episode"}, "expected a SampleBatch or MultiAgentBatch of RLlib, found type 'Episode'"),
    ],
)
def test_nothing_is_called_and_what_cannot_be_is_refused(
    change: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line(samples(log, number)) for number, log in enumerate(logged(lengths=(4, 3)))]
    Path("x.json").write_text(lines[0] + json.dumps(json.loads(lines[1]) | change))
    with pytest.raises(DataError, match=rf"x\.json.*{wanted}"):
        formats.open("x.json").to_table()
    assert not Path("trapped").exists()


TestRllib = suite(ends_of(LENGTHS), lambda folder: write(folder / "out", whole()), read_rllib)
