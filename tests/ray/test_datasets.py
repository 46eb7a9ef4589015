"""Stores as Ray Datasets: every step once, in order, episodes whole."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import ray

import mouse_ray
from mouse_core import ConfigError, DatasetStore, MissingFieldError
from mouse_core.metadata import DatasetMetadata, read_metadata

ROWS = 1_000


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 200)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), ROWS))]
    lengths = np.append(lengths, ROWS - lengths.sum())
    ends = np.cumsum(lengths) - 1
    done = np.zeros(ROWS, np.int64)
    done[ends[:-1]] = 1
    return {
        "action": np.arange(ROWS) % 4,
        "reward": np.arange(ROWS, dtype=np.float64),
        "done": done,
        "episode_step": np.concatenate([np.arange(length) for length in lengths]),
        "observation": rng.normal(size=(ROWS, 3)),
    }


def in_memory() -> DatasetStore:
    store = DatasetStore()
    store.extend(columns())
    return store


def on_disk(folder: Path) -> DatasetStore:
    lists = {name: list(values) for name, values in columns().items()}
    datasets.Dataset.from_dict(lists).save_to_disk(folder)
    return DatasetStore().from_dataset(datasets.load_from_disk(folder))


def episodes() -> list[int]:
    """The number of each row's episode."""
    return (np.cumsum(columns()["episode_step"] == 0) - 1).tolist()  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_blocks_hold_whole_episodes(tmp_path: Path, kind: str) -> None:
    store = in_memory() if kind == "memory" else on_disk(tmp_path / "data")
    dataset = mouse_ray.read(store, rows_per_block=100)
    blocks = ray.get(dataset.to_arrow_refs())
    assert len(blocks) > 5
    said = DatasetMetadata("arrived") if kind == "memory" else DatasetMetadata()  # what was saved does not say it
    assert all(read_metadata(block) == said for block in blocks)
    dataset.write_parquet(str(tmp_path / "written"))
    files = sorted((tmp_path / "written").glob("*.parquet"))
    assert files
    assert all(read_metadata(pq.read_schema(file)) == said for file in files)
    # Ray delivers blocks in the order in which they are finished.
    per_block = sorted(block.column("episode").to_pylist() for block in blocks)
    assert sum(per_block, []) == episodes()  # noqa: RUF017
    for one, other in pairwise(per_block):
        assert not set(one) & set(other), "an episode is in two blocks"
    found = dataset.sort("reward").take_batch(ROWS)
    assert found["reward"].tolist() == list(range(ROWS))
    assert found["obs_continuous"].shape == (ROWS, 3)
    np.testing.assert_array_equal(found["obs_continuous"], columns()["observation"])
    assert {name: str(values.dtype) for name, values in found.items()} == {
        "action": "int64",
        "reward": "float32",
        "done": "int64",
        "time": "int64",
        "obs_continuous": "float64",
        "episode": "int64",
    }


@ray.remote(num_cpus=0)
def consume(iterator: Any) -> list[int]:
    """The episodes of every step that a trainer gets."""
    return [number for batch in iterator.iter_batches(batch_size=None) for number in batch["episode"].tolist()]


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_each_episode_goes_to_one_trainer() -> None:
    dataset = mouse_ray.read(in_memory(), fields=["reward"], rows_per_block=50)
    first, second = ray.get([consume.remote(split) for split in dataset.streaming_split(2)])
    assert sorted(first + second) == episodes()
    assert not set(first) & set(second)


def test_ray_reports_nothing_and_is_started_without_its_dashboard() -> None:
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    root = Path(__file__).resolve().parents[2]
    found = [path for folder in ("tests", "examples", "docs") for path in (root / folder).rglob("*.[mp][dy]")]
    starts = [text for path in found for text in path.read_text(encoding="utf-8").split("ray" + ".init(")[1:]]
    assert len(starts) >= 3
    assert all("include_dashboard=False" in text.split(")")[0] for text in starts)


def test_refusals() -> None:
    store = in_memory()
    with pytest.raises(ConfigError, match="expected a DatasetStore or a Snapshot, found list"):
        mouse_ray.read([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rows_per_block: expected an integer of at least 1, found 0"):
        mouse_ray.read(store, rows_per_block=0)
    with pytest.raises(ConfigError, match="store: expected rows, found an empty store"):
        mouse_ray.read(DatasetStore())
    with pytest.raises(MissingFieldError, match=r"fields: expected 'value', found \['action'"):
        mouse_ray.read(store, fields=["value"])
