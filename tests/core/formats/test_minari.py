"""Minari datasets as Minari writes them, compared with what the environment returned."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pytest

from mouse_core.errors import ConfigError, DataError
from mouse_core.formats.minari import read_minari
from mouse_core.spec import from_gymnasium
from tests.core.formats.recording import Counting, Episode, check_rows, write_minari

minari = pytest.importorskip("minari")
h5py = pytest.importorskip("h5py")
LENGTHS = (4, -3, 1, -1, 9, 2)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


class Logged(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.logs: list[Episode] = []

    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        self.logs.append(Episode(observations=[observation], infos=[info]))
        return observation, info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.logs[-1].add(observation, action, float(reward), terminated, truncated, info)
        return observation, reward, terminated, truncated, info


def collect(
    name: str, env: Any, *, episodes: int, storage: str = "hdf5", infos: bool = True, jpeg: bool = False
) -> list[Episode]:
    """Record a dataset with Minari's own collector."""
    logged = Logged(env)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = minari.DataCollector(
            logged, record_infos=infos, data_format=storage, **({} if jpeg else {"jpeg_encoding": False})
        )
        collector.action_space.seed(1)
        for number in range(episodes):
            collector.reset(seed=number)
            over = False
            while not over:
                _, _, terminated, truncated, _ = collector.step(collector.action_space.sample())
                over = terminated or truncated
        collector.create_dataset(dataset_id=name, algorithm_name="random", description="counts")
        collector.close()
    return [log for log in logged.logs if log.actions]


@pytest.mark.parametrize(
    ("kind", "storage"),
    [
        ("nested", "hdf5"),
        ("nested", "arrow"),
        ("image", "arrow"),
        ("vector", "parquet"),
        pytest.param("discrete", "hdf5", marks=pytest.mark.slow),
        pytest.param("image", "parquet", marks=pytest.mark.slow),
    ],
)
def test_rows_are_what_the_environment_returned(kind: str, storage: str, root: Path) -> None:
    logs = collect("counting-v0", Counting(LENGTHS, kind), episodes=6, storage=storage)
    stream = read_minari(root / "counting-v0", batch_rows=5)
    check_rows(stream.to_table(), logs, infos="info", reward_dtype="float64")
    assert (stream.rows, stream.format) == (26, "minari")
    assert stream.format_metadata["algorithm_name"] == "random"
    assert stream.format_metadata["observation_space"]["type"]
    assert stream.to_table().column("metadata_episode_seed").to_pylist()[:6] == [0] * 5 + [1]
    assert read_minari(root / "counting-v0" / "data", batch_rows=1000).digest() == stream.digest()
    assert max(batch.num_rows for batch in stream) <= 5


def test_pictures_recorded_as_jpeg_are_what_the_file_holds(root: Path) -> None:
    for storage in ("hdf5", "arrow"):
        collect(f"{storage}-v0", Counting(LENGTHS, "image"), episodes=6, storage=storage, jpeg=True)
        stream = read_minari(root / f"{storage}-v0", batch_rows=4)
        assert "JPEG" in stream.notes[0]
        pixels = np.array(stream.to_table().column("observation").to_pylist(), np.uint8)
        own = np.concatenate([episode.observations for episode in minari.load_dataset(f"{storage}-v0")])
        assert np.array_equal(pixels, own)


@pytest.mark.slow
def test_arrow_episodes_that_minari_reads_wrong(root: Path) -> None:
    logs = collect("long-v0", Counting((40_000, 3)), episodes=2, storage="arrow", infos=False)
    table = read_minari(root / "long-v0").to_table()
    assert table.num_rows == 40_005
    observations = np.concatenate([np.stack(log.observations) for log in logs])
    assert np.array_equal(np.array(table.column("observation").combine_chunks().flatten()).reshape(-1, 3), observations)
    actions = np.array(table.column("action").combine_chunks().flatten()).reshape(-1, 2)
    assert np.array_equal(actions[1:40_001], np.stack(logs[0].actions))
    assert np.flatnonzero(table.column("done").to_numpy()).tolist() == [40_000, 40_004]


def test_an_episode_that_was_only_begun(root: Path) -> None:
    """One row, an observation, which no transition follows."""
    step = np.array([0, 1, 2, 0, 0, 1])
    columns = {"observation": [[k, 1.0] for k in step], "action": np.minimum(step, 1), "reward": step / 1}
    rows = pa.table({**columns, "done": 0 * step, "episode_step": step})
    write_minari(rows, root / "begun-v0")
    table = read_minari(root / "begun-v0").to_table()
    for name in ("observation", "reward", "episode_step"):
        assert table.column(name).to_pylist() == rows.column(name).to_pylist()


@pytest.mark.parametrize("storage", ["hdf5", "arrow"])
def test_a_real_environment_its_spaces_and_metadata(storage: str, root: Path) -> None:
    env = gymnasium.make("CartPole-v1", max_episode_steps=17)
    logs = collect("cartpole/random-v3", env, episodes=12, storage=storage)
    assert {log.done for log in logs} == {1, 2}
    stream = read_minari(root / "cartpole" / "random-v3", infos=False)
    check_rows(stream.to_table(), logs)
    assert not [name for name in stream.columns if "info" in name]
    metadata = stream.metadata
    assert (metadata.alignment, metadata.environments, metadata.layout) == ("arrived", ("CartPole-v1",), "stored")
    assert metadata.spec["action"] == from_gymnasium(env.action_space)
    assert metadata.spec["observation"] == from_gymnasium(env.observation_space)


def test_infos_that_only_some_episodes_have(root: Path) -> None:
    logs = collect("counting-v0", Counting(LENGTHS), episodes=6)
    with h5py.File(root / "counting-v0" / "data" / "main_data.hdf5", "a") as file:
        del file["episode_2/infos/count"]
        file["episode_1/infos/late"] = np.arange(3.0)
        file["episode_1/poses"] = np.arange(4.0)
    with pytest.raises(ConfigError, match="expected a Minari dataset"):
        read_minari(root / "none-v0")
    table = read_minari(root / "counting-v0").to_table()
    counts = table.column("info.count").to_pylist()
    assert counts[9:11] == [None, None]
    assert counts[:5] == [info["count"] for info in logs[0].infos]
    # One value a transition: it came with the observation that the transition led to.
    assert table.column("info.late").to_pylist()[5:9] == [0, 0, 1, 2]
    assert table.column("metadata_poses").to_pylist()[5:9] == [0, 1, 2, 3]


def put(name: str, **array: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Have another array in episode 1."""

    def change(episode: Any, meta: dict[str, Any]) -> None:
        del episode[name]
        episode.create_dataset(name, **array)

    return change


SPOILED: list[tuple[Callable[[Any, dict[str, Any]], Any], str]] = [
    (lambda episode, _: episode["observations"].resize(3, axis=0), "episode 1.*observations: expected .4. rows"),
    (put("rewards", data=["a", "b", "c"]), "episode 1.*rewards: expected one number per step|episode 1: .*rewards"),
    (put("observations", data=np.zeros((4, 5), np.float32)), r"1: observations: .*shape \[3\], found \[5\]"),
    (lambda episode, _: episode.pop("actions"), "episode 1: expected .*found no .'actions'"),
    (lambda episode, _: episode.parent.pop("episode_1"), "expected episodes 0..1, found 1"),
    (lambda episode, _: episode["infos"].update(out=h5py.ExternalLink("/etc/hostname", "/")), "file, found a link"),
    (put("rewards", shape=(3,), dtype=np.float64, chunks=(3,)), "expected 1 chunks for shape"),
    (put("rewards", shape=(10**13,), dtype=np.float64, chunks=(1000,)), "expected 10000000000 chunks"),
    (lambda _, meta: meta.update(total_episodes=9), "expected episodes 0..8, found 2"),
    (lambda _, meta: meta.update(observation_space='{"type": "Sphere"}'), "expected one of .*, found Sphere"),
    (lambda _, meta: meta.clear(), "metadata.json: cannot be read"),
]


def test_damage_is_named(root: Path) -> None:
    collect("counting-v0", Counting(LENGTHS), episodes=2)
    for number, (spoil, message) in enumerate(SPOILED):
        data = Path(shutil.copytree(root / "counting-v0", root / f"copy{number}-v0")) / "data"
        meta = json.loads((data / "metadata.json").read_text())
        with h5py.File(data / "main_data.hdf5", "a") as file:
            spoil(file["episode_1"], meta)
        (data / "metadata.json").write_text(json.dumps(meta) if meta else "{")
        with pytest.raises(DataError, match=message) as caught:
            list(read_minari(data.parent))
        assert str(data.parent) in str(caught.value)


def test_a_file_alone(root: Path) -> None:
    logs = collect("counting-v0", Counting(LENGTHS), episodes=2)
    (root / "counting-v0" / "data" / "main_data.hdf5").rename(root / "alone.hdf5")
    check_rows(read_minari(root / "alone.hdf5").to_table(), logs)
