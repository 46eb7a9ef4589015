"""What the tests of pushing share: stores that tell their rows apart, a push, a reader, and what must hold."""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from mouse_core import DatasetStore
from mouse_core.hub import PushResult, push_to_hub
from mouse_core.metadata import read_metadata
from tests.core.hub_server import READ_TOKEN, WRITE_TOKEN, Commit, HubServer, running_hub

REPO = "tester/cartpole"
LOAD = """
import sys, datasets
repo_id, revision, out, streaming = sys.argv[1:]
if streaming == "True":
    splits = datasets.load_dataset(repo_id, revision=revision, streaming=True)
    read = {k: datasets.Dataset.from_list(list(split), features=split.features) for k, split in splits.items()}
    splits = datasets.DatasetDict(read)
else:
    splits = datasets.load_dataset(repo_id, revision=revision)
splits.save_to_disk(out)
"""


def checked_hub() -> Iterator[HubServer]:
    """A server for one test; afterwards, every commit that a push made must have been a whole dataset."""
    with running_hub() as server:
        yield server
        assert not server.unknown, f"the clients asked for what the server does not speak: {server.unknown}"
        for repo in server.repos.values():
            for commit in repo.commits.values():
                if commit.message.startswith("Push"):
                    assert_whole(commit)


def push(hub: HubServer, splits: dict[str, Any], **options: Any) -> PushResult:
    defaults: dict[str, Any] = {"repo_id": REPO, "token": WRITE_TOKEN, "endpoint": hub.endpoint, "progress": False}
    return push_to_hub(splits, **(defaults | options))


def steps(n: int, start: int = 0, **more: Any) -> dict[str, Any]:
    """Columns of ``n`` steps whose every value says which step it belongs to."""
    t = np.arange(start, start + n)
    return {
        "action": t % 4,
        "reward": (t / 8).astype(np.float32),
        "done": (t % 10 == 9).astype(np.int64),
        "episode_step": t % 10,
        "observation": np.stack([t, -t, t * 0.5], axis=1),
        **more,
    }


def make_store(n: int, start: int = 0, *, alignment: Any = "arrived", **more: Any) -> DatasetStore:
    store = DatasetStore(alignment=alignment)
    store.extend(steps(n, start, **more))
    return store


def from_columns(columns: dict[str, Any], features: datasets.Features | None = None) -> DatasetStore:
    return DatasetStore().from_dataset(datasets.Dataset.from_dict(columns, features=features))


def head(hub: HubServer, repo_id: str = REPO, branch: str = "main") -> Commit:
    repo = hub.repos[repo_id]
    return repo.commits[repo.branches[branch]]


def shards(commit: Commit) -> list[str]:
    return sorted(path for path in commit.files if path.endswith(".parquet"))


def table_of(commit: Commit, split: str) -> pa.Table:
    """A split's rows, read from the files of a commit with their checksums verified."""
    found = [path for path in shards(commit) if path.startswith(f"data/{split}-")]
    return pa.concat_tables(
        pq.read_table(io.BytesIO(commit.files[path].data), page_checksum_verification=True) for path in found
    )


def card_of(commit: Commit) -> tuple[dict[str, Any], str]:
    text = commit.files["README.md"].data.decode().replace("\r\n", "\n")
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def assert_whole(commit: Commit) -> None:
    """What anybody sees at this commit is one whole dataset: all shards of one push, and its card."""
    metadata, _ = card_of(commit)
    infos = metadata["dataset_info"]
    infos = [infos] if isinstance(infos, dict) else infos
    pushed = next(iter(metadata["configs"]))["config_name"]  # what is pushed comes first
    assert infos[0].get("config_name", "default") == pushed
    config = next(config for config in metadata["configs"] if config["config_name"] == pushed)
    patterns = {entry["split"]: entry["path"] for entry in config["data_files"]}
    assert [split["name"] for split in infos[0]["splits"]] == list(patterns)
    features = datasets.Features._from_yaml_list(infos[0]["features"])
    said = read_metadata(features)
    folder = "data" if pushed == "default" else f"data/{pushed}"
    for split in infos[0]["splits"]:
        begin = f"{folder}/{split['name']}-"
        assert patterns[split["name"]] == f"{begin}*.parquet"
        found = [path for path in shards(commit) if path.startswith(begin) and "/" not in path[len(begin) :]]
        count = len(found)
        assert found == [f"{begin}{i:05d}-of-{count:05d}.parquet" for i in range(count)]
        files = [pq.ParquetFile(io.BytesIO(commit.files[path].data)) for path in found]
        assert sum(file.metadata.num_rows for file in files) == split["num_examples"]
        for file in files:
            assert set(file.schema_arrow.names) <= set(features)
            assert read_metadata(file.schema_arrow).alignment == said.alignment
    named = [entry["path"] for config in metadata["configs"] for entry in config["data_files"]]
    in_data = [path for path in shards(commit) if path.startswith("data/")]
    assert all(any(fnmatchcase(path, pattern) for pattern in named) for path in in_data)


def run_client(hub: HubServer, folder: Path, program: str, *arguments: str) -> str:
    """What another process prints that knows this server and has an empty cache in a folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder), "HF_TOKEN": READ_TOKEN}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def load(hub: HubServer, folder: Path, *, streaming: bool = False) -> datasets.DatasetDict:
    """What ``load_dataset`` gives somebody else."""
    home = Path(tempfile.mkdtemp(dir=folder))
    before = len(hub.requests)
    run_client(hub, home, LOAD, REPO, "main", str(home / "out"), str(streaming))
    fetched = [path for method, path in hub.requests[before:] if method == "GET" and path.endswith(".parquet")]
    assert fetched, "the rows did not come from this server"
    loaded = datasets.load_from_disk(str(home / "out"))
    assert isinstance(loaded, datasets.DatasetDict)
    return loaded


def plain(dataset: datasets.Dataset) -> list[dict[str, Any]]:
    """Rows as stored, images undecoded; NaN as a text so that it equals itself."""
    rows = dataset.with_format("arrow")[:].to_pylist()
    return json.loads(json.dumps(rows, default=lambda value: value.hex()).replace("NaN", '"nan"'))


def png(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((3, 2), shade, dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()
