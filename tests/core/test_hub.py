"""Pushing to the Hub, with the real clients against a server on the loopback interface."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from mouse_core import DatasetStore
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.hub import PushResult, push_stores_to_hub, push_to_hub, read_alignment
from tests.core.hub_server import READ_TOKEN, USER, WRITE_TOKEN, Commit, HubServer, running_hub

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


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running_hub() as server:
        yield server
        assert not server.unknown, "the clients asked for something that the server does not speak"
        for repo in server.repos.values():
            for commit in repo.commits.values():
                if commit.message.startswith("Push"):
                    assert_whole(commit)


def push(hub: HubServer, splits: dict[str, Any], **options: Any) -> PushResult:
    defaults: dict[str, Any] = {
        "repo_id": REPO,
        "token": WRITE_TOKEN,
        "endpoint": hub.endpoint,
        "progress": False,
    }
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
    text = commit.files["README.md"].data.decode()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def assert_whole(commit: Commit) -> None:
    """What anybody sees at this commit is one whole dataset: all shards of one push, and its card."""
    metadata, _ = card_of(commit)
    info = metadata["dataset_info"]
    info = info if isinstance(info, dict) else next(i for i in info if i["config_name"] == "default")
    config = next(config for config in metadata["configs"] if config["config_name"] == "default")
    patterns = {entry["split"]: entry["path"] for entry in config["data_files"]}
    assert [split["name"] for split in info["splits"]] == list(patterns)
    features = datasets.Features._from_yaml_list(info["features"])
    for split in info["splits"]:
        assert patterns[split["name"]] == f"data/{split['name']}-*.parquet"
        found = [path for path in shards(commit) if path.startswith(f"data/{split['name']}-")]
        count = len(found)
        assert found == [f"data/{split['name']}-{i:05d}-of-{count:05d}.parquet" for i in range(count)]
        files = [pq.ParquetFile(io.BytesIO(commit.files[path].data)) for path in found]
        assert sum(file.metadata.num_rows for file in files) == split["num_examples"]
        for file in files:
            assert set(file.schema_arrow.names) <= set(features)
            assert file.schema_arrow.metadata[b"mouse_alignment"].decode() == metadata["mouse_alignment"]
    prefixes = tuple(f"data/{split}-" for split in patterns)
    assert all(path.startswith(prefixes) for path in shards(commit) if path.startswith("data/"))


def load(
    hub: HubServer, folder: Path, *, repo_id: str = REPO, revision: str = "main", streaming: bool = False
) -> datasets.DatasetDict:
    """What ``load_dataset`` gives somebody else: another process, with an empty cache of its own."""
    home = Path(tempfile.mkdtemp(dir=folder))
    before = len(hub.requests)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": READ_TOKEN,
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD, repo_id, revision, str(home / "out"), str(streaming)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    fetched = [
        path for method, path in hub.requests[before:] if method == "GET" and path.endswith(".parquet")
    ]
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


# ---------------------------------------------------------------------- what was pushed is what is read


def everything(n: int) -> tuple[dict[str, Any], datasets.Features]:
    """Every kind of column: scalars, vectors, ragged lists, arrays, images, texts, structs, nulls, NaN."""
    value = datasets.Value
    t = range(n)
    columns = {
        "action": [[i, -i] for i in t],
        "reward": [float("nan") if i == 3 else i / 4 for i in t],
        "done": [int(i % 5 == 4) for i in t],
        "episode_step": [None if i == 2 else i % 5 for i in t],
        "metadata_q_star": [None if i % 3 == 0 else [i * 1.0] * (i % 3) for i in t],
        "observation": [[i, float("nan")] for i in t],
        "observation_image": [{"bytes": png(i), "path": f"{i}.png"} for i in t],
        "frame": [np.full((2, 3), i, dtype=np.uint8).tolist() for i in t],
        "note": [None if i % 2 else f"step {i} \u2713" for i in t],
        "extra": [{"seed": i, "tags": ["a"] * (i % 3)} for i in t],
        "unknown": [None] * n,
    }
    features = datasets.Features(
        {
            "action": datasets.List(value("float32"), length=2),
            "reward": value("float64"),
            "done": value("int8"),
            "episode_step": value("int64"),
            "metadata_q_star": datasets.List(value("float32")),
            "observation": datasets.List(value("float64")),
            "observation_image": datasets.Image(),
            "frame": datasets.Array2D((2, 3), "uint8"),
            "note": value("string"),
            "extra": {"seed": value("int32"), "tags": datasets.List(value("string"))},
            "unknown": value("null"),
        }
    )
    return columns, features


@pytest.mark.parametrize("streaming", [False, True])
def test_every_value_survives(hub: HubServer, tmp_path: Path, streaming: bool) -> None:
    columns, features = everything(23)
    stored = datasets.Dataset.from_dict(columns, features=features)
    stored.save_to_disk(tmp_path / "stored")
    on_disk = datasets.load_from_disk(tmp_path / "stored")
    order = np.random.default_rng(0).permutation(23)
    parts = [on_disk, on_disk.select(order), on_disk.shuffle(seed=1).select(range(3, 9))]
    stores = [DatasetStore().from_dataset(part) for part in parts]

    result = push(hub, {"train": stores}, max_rows_per_shard=20)

    assert result.splits == {"train": 52}
    assert result.shards == tuple(f"data/train-{i:05d}-of-00003.parquet" for i in range(3))
    assert (result.oid, result.repo_id, result.revision) == (head(hub).oid, REPO, "main")
    assert result.commit_url == f"{hub.endpoint}/datasets/{REPO}/commit/{result.oid}"
    loaded = load(hub, tmp_path, streaming=streaming)
    assert loaded["train"].features == features
    expected = plain(datasets.concatenate_datasets(parts))
    if streaming:
        # The helper's copy encodes the decoded images anew, which gives the same bytes and no name.
        for row in expected:
            row["observation_image"]["path"] = None
    assert plain(loaded["train"]) == expected


def test_batches_of_what_was_pushed_are_the_same(hub: HubServer, tmp_path: Path) -> None:
    store = make_store(50)
    recorded = datasets.Dataset.from_dict({name: values.tolist() for name, values in steps(30, 50).items()})
    store.from_dataset(recorded.cast_column("reward", datasets.Value("float32")).shuffle(seed=3))
    push(hub, {"train": store}, max_rows_per_shard=32)
    again = DatasetStore().from_dataset(load(hub, tmp_path))
    assert list(again.columns) == list(store.columns)
    rows = [store[i] for i in range(len(store))]
    assert [again[i] for i in range(len(again))] == rows


def test_columns_missing_in_one_split_are_absent_there(hub: HubServer, tmp_path: Path) -> None:
    n = 12
    q_star = np.arange(n * 2, dtype=np.float32).reshape(n, 2)
    train = make_store(n, metadata_q_star=q_star)
    more = make_store(n, 100)
    frames = np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3)
    held_out = make_store(n, 200, observation_image=frames, log_prob=np.linspace(-1, 0, n))

    result = push(hub, {"train": [train, more], "held.out_2": held_out})

    assert result.splits == {"train": 2 * n, "held.out_2": n}
    loaded = load(hub, tmp_path)
    assert loaded["train"].features == loaded["held.out_2"].features
    back_train = DatasetStore().from_dataset(loaded["train"])
    back_held_out = DatasetStore().from_dataset(loaded["held.out_2"])
    assert "q_star" in back_train.snapshot().spec
    assert "obs_image" not in back_train.snapshot().spec
    assert "obs_image" in back_held_out.snapshot().spec
    assert "q_star" not in back_held_out.snapshot().spec
    assert back_train[n - 1]["metadata_q_star"] == q_star[-1].tolist()
    assert back_train[n]["metadata_q_star"] is None
    assert back_held_out[3]["log_prob"] == held_out[3]["log_prob"]


def test_one_type_stored_in_several_ways_becomes_one(hub: HubServer, tmp_path: Path) -> None:
    value = datasets.Value

    def stored(observation: Any, frame: Any, label: Any, image: Any) -> DatasetStore:
        columns = {
            "action": [0, 1],
            "reward": [0.0, 1.0],
            "done": [0, 1],
            "observation": [[1, 2], [3, 4]],
            "frame": [[[1, 2]], [[3, 4]]],
            "label": [1, 0],
            "observation_image": [png(1), png(2)],
        }
        fixed = {"action": value("int64"), "reward": value("float64"), "done": value("int64")}
        varying = {"observation": observation, "frame": frame, "label": label, "observation_image": image}
        return from_columns(columns, datasets.Features({**fixed, **varying}))

    one = stored(
        datasets.List(value("float32"), length=2),
        datasets.Array2D((1, 2), "uint8"),
        datasets.ClassLabel(names=["no", "yes"]),
        datasets.Image(),
    )
    other = stored(
        datasets.LargeList(value("float32")),
        datasets.List(datasets.List(value("uint8"))),
        value("int64"),
        value("binary"),
    )
    push(hub, {"train": one, "eval": other})
    loaded = load(hub, tmp_path)
    assert loaded["train"].features == {
        "action": value("int64"),
        "reward": value("float64"),
        "done": value("int64"),
        "observation": datasets.List(value("float32")),
        "frame": datasets.List(datasets.List(value("uint8"))),
        "label": value("int64"),
        "observation_image": datasets.Image(),
    }
    assert plain(loaded["train"]) == plain(loaded["eval"])
    assert loaded["eval"][1]["observation"] == [3, 4]
    assert np.asarray(loaded["eval"][1]["observation_image"]).tolist() == np.full((3, 2), 2).tolist()


def test_the_server_is_what_answers(hub: HubServer, tmp_path: Path) -> None:
    """The other tests would notice if their rows came from anywhere else."""
    push(hub, {"train": make_store(5)})
    hub.repos.clear()
    with pytest.raises(RuntimeError, match=r"DatasetNotFoundError|RepositoryNotFound"):
        load(hub, tmp_path)


# ---------------------------------------------------------------------- one commit, never a mixture


def test_stale_files_go_in_the_commit_that_replaces_them(hub: HubServer, tmp_path: Path) -> None:
    hub.page_size = 2
    first = push(hub, {"train": make_store(30), "eval": make_store(10)}, max_rows_per_shard=10)
    assert len(first.shards) == 4
    others = {"notes/figure.png": b"png", "data/annotations.json": b"{}"}
    hub.commit(REPO, others)

    second = push(hub, {"train": make_store(12, 500)}, max_rows_per_shard=10)

    assert second.deleted == (
        "data/eval-00000-of-00001.parquet",
        "data/train-00000-of-00003.parquet",
        "data/train-00001-of-00003.parquet",
        "data/train-00002-of-00003.parquet",
    )
    history = hub.repos[REPO].history()
    assert [commit.message for commit in history] == [
        "initial commit",
        "Push train (30 steps), eval (10 steps)",
        "somebody else",
        "Push train (12 steps)",
    ]
    assert shards(head(hub)) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert {path: head(hub).files[path].data for path in others} == others
    assert load(hub, tmp_path)["train"]["episode_step"][:] == steps(12, 500)["episode_step"].tolist()
    before = load(hub, tmp_path, revision=str(first.oid))
    assert {split: len(rows) for split, rows in before.items()} == {"train": 30, "eval": 10}


def test_what_others_named_and_wrote_is_left_alone(hub: HubServer, tmp_path: Path) -> None:
    hub.create(REPO)
    old_card = (
        "---\r\nlicense: mit\r\nlanguage:\r\n- 'no'\r\ntags: [\u2713]\r\n"
        "configs:\r\n- config_name: default\r\n  data_files: data/old-*\r\n"
        "- config_name: raw\r\n  data_files:\r\n  - split: train\r\n    path: data/raw-*.parquet\r\n"
        "dataset_info:\r\n- config_name: raw\r\n  features:\r\n  - name: x\r\n    dtype: int64\r\n"
        "---\r\n# Cart pole\r\n\r\nText  with *spaces*. \r\n---\r\nThe end"
    )
    raw = io.BytesIO()
    pq.write_table(pa.table({"x": [1, 2, 3]}), raw)
    old = {
        "README.md": old_card.encode(),
        "data/raw-1.parquet": raw.getvalue(),
        "data/old-1.parquet": raw.getvalue(),
        "elsewhere/kept.parquet": raw.getvalue(),
    }
    hub.commit(REPO, old)

    result = push(hub, {"train": make_store(4)})

    assert result.deleted == ("data/old-1.parquet",)
    text = head(hub).files["README.md"].data.decode()
    assert text == result.readme
    assert text.endswith("---\r\n# Cart pole\r\n\r\nText  with *spaces*. \r\n---\r\nThe end")
    assert "\n" not in text.replace("\r\n", "")
    metadata, _ = card_of(Commit("", None, "", {"README.md": _file(text.replace("\r\n", "\n"))}))
    assert (metadata["license"], metadata["language"], metadata["tags"]) == ("mit", ["no"], ["\u2713"])
    raw_config = {"config_name": "raw", "data_files": [{"split": "train", "path": "data/raw-*.parquet"}]}
    assert metadata["configs"][1] == raw_config
    assert [info["config_name"] for info in metadata["dataset_info"]] == ["default", "raw"]
    # The fixture's check reads cards with plain line ends.
    hub.repos[REPO].commits.clear()


def _file(text: str) -> Any:
    from tests.core.hub_server import File

    return File(text.encode(), lfs=False)


def test_other_splits_can_be_kept(hub: HubServer, tmp_path: Path) -> None:
    push(hub, {"train": make_store(30), "eval": make_store(10)}, max_rows_per_shard=10)
    result = push_stores_to_hub(
        [make_store(8, 700, metadata_q_star=np.ones((8, 2), dtype=np.float32))],
        repo_id=REPO,
        split="train",
        keep_other_splits=True,
        token=WRITE_TOKEN,
        endpoint=hub.endpoint,
        progress=False,
    )
    assert result.splits == {"train": 8}
    assert result.deleted == tuple(f"data/train-{i:05d}-of-00003.parquet" for i in range(3))
    loaded = load(hub, tmp_path)
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 8, "eval": 10}
    assert "q_star" not in DatasetStore().from_dataset(loaded["eval"]).snapshot().spec
    assert loaded["train"].features == loaded["eval"].features

    requests = len(hub.writes())
    with pytest.raises(SchemaError, match=r"column 'reward'.*split 'train'.*kept splits \['eval'\]"):
        push(
            hub, {"train": from_columns({"action": [0], "reward": [1], "done": [0]})}, keep_other_splits=True
        )
    with pytest.raises(SchemaError, match=r"alignment: expected 'arrived'.*kept splits"):
        push(hub, {"train": make_store(3, alignment="outgoing")}, keep_other_splits=True)
    hub.commit(REPO, {"README.md": b"no front matter"})
    with pytest.raises(ConfigError, match=r"expected 'dataset_info' .*keep_other_splits=False"):
        push(hub, {"train": make_store(3)}, keep_other_splits=True)
    assert len(hub.writes()) == requests


def test_a_commit_in_between_is_seen_and_respected(hub: HubServer) -> None:
    push(hub, {"train": make_store(30)}, max_rows_per_shard=10)

    def interrupt() -> None:
        """Somebody replaces the data with fewer shards, and writes something into the card."""
        card = head(hub).files["README.md"].data + b"\nWritten meanwhile.\n"
        shard = head(hub).files["data/train-00000-of-00003.parquet"].data
        new = {
            "README.md": card,
            "data/train-00000-of-00001.parquet": shard,
            "data/test-00000-of-00001.parquet": shard,
        }
        hub.commit(REPO, new, delete=tuple(shards(head(hub))))

    hub.before_commit.append(interrupt)
    result = push(hub, {"train": make_store(20, 300)}, max_rows_per_shard=10)

    commits = [path for method, path in hub.requests if method == "POST" and "/commit/" in path]
    assert len(commits) == 3
    assert result.deleted == ("data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet")
    assert shards(head(hub)) == list(result.shards)
    assert card_of(head(hub))[1].endswith("\nWritten meanwhile.\n")
    assert table_of(head(hub), "train")["observation"][0].as_py() == [300.0, -300.0, 150.0]


def test_a_commit_in_between_that_brings_the_same_card_is_no_reason_to_leave_it_out(hub: HubServer) -> None:
    """The client leaves out what the server has already, as it was at the upload; the commit must not."""
    store = make_store(30)
    push(hub, {"train": store}, max_rows_per_shard=10)
    hub.commit(REPO, {}, delete=("data/train-00002-of-00003.parquet",))
    hub.before_commit.append(
        lambda: hub.commit(REPO, {"x.txt": b""}, delete=("data/train-00000-of-00003.parquet", "README.md"))
    )
    push(hub, {"train": store}, max_rows_per_shard=10)
    assert len(shards(head(hub))) == 3
    assert table_of(head(hub), "train").num_rows == 30


@pytest.mark.parametrize("status", [409, 412])
def test_conflicts_are_retried_so_often_and_no_more(
    hub: HubServer, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mouse_core.hub._push._FIRST_PAUSE", 0.0)
    push(hub, {"train": make_store(5)})
    old = head(hub)
    hub.fail("POST", "/commit/", status, times=4)
    push(hub, {"train": make_store(6)})
    assert head(hub).parent == old.oid

    old = head(hub)
    hub.fail("POST", "/commit/", status, times=5)
    with pytest.raises(HfHubHTTPError) as caught:
        push(hub, {"train": make_store(7)})
    assert caught.value.response.status_code == status
    assert caught.value.__notes__ == [
        f"{REPO}: others committed during each of 5 attempts; nothing was changed"
    ]
    assert head(hub) is old


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "^/upload/"), ("POST", "/objects/batch$"), ("POST", "/commit/")]
)
def test_a_push_that_fails_leaves_the_old_dataset(hub: HubServer, method: str, path: str) -> None:
    push(hub, {"train": make_store(30)}, max_rows_per_shard=10)
    old = head(hub)
    hub.fail(method, path, 400)
    with pytest.raises((HfHubHTTPError, RuntimeError)):
        push(hub, {"train": make_store(20, 300)}, max_rows_per_shard=10)
    assert head(hub) is old
    result = push(hub, {"train": make_store(20, 300)}, max_rows_per_shard=10)
    assert head(hub).oid == result.oid


def test_the_old_dataset_loads_after_a_push_that_failed(hub: HubServer, tmp_path: Path) -> None:
    push(hub, {"train": make_store(30)}, max_rows_per_shard=10)
    hub.fail("PUT", "^/upload/", 400)
    with pytest.raises(RuntimeError, match="Error while uploading"):
        push(hub, {"train": make_store(20, 300)}, max_rows_per_shard=10)
    assert load(hub, tmp_path)["train"]["action"][:] == steps(30)["action"].tolist()


def test_pushing_the_same_again_changes_nothing(hub: HubServer) -> None:
    store = make_store(30)
    first = push(hub, {"train": store}, max_rows_per_shard=10)
    second = push(hub, {"train": store}, max_rows_per_shard=10)
    assert (second.oid, second.commit_url) == (first.oid, first.commit_url)
    assert len(hub.repos[REPO].history()) == 2
    third = push(hub, {"train": make_store(30, 1)}, max_rows_per_shard=10)
    assert third.oid != first.oid


# ---------------------------------------------------------------------- repositories


def test_branches(hub: HubServer, tmp_path: Path) -> None:
    push(hub, {"train": make_store(5)})
    main = head(hub)
    result = push(hub, {"train": make_store(6)}, revision="runs/2")
    assert result.revision == "runs/2"
    assert head(hub) is main
    assert head(hub, branch="runs/2").oid == result.oid
    assert len(load(hub, tmp_path, revision=str(result.oid))["train"]) == 6
    push(hub, {"train": make_store(7)}, revision="runs/2")
    assert table_of(head(hub, branch="runs/2"), "train").num_rows == 7


def test_visibility_is_what_was_asked_for(hub: HubServer) -> None:
    push(hub, {"train": make_store(5)}, private=True)
    assert hub.repos[REPO].private
    push(hub, {"train": make_store(6)})
    writes = len(hub.writes())
    with pytest.raises(ConfigError, match=r"private: expected .* a public dataset, found a private one"):
        push(hub, {"train": make_store(5)}, private=False)
    hub.create("tester/open")
    with pytest.raises(ConfigError, match=r"private: expected .* a private dataset, found a public one"):
        push(hub, {"train": make_store(5)}, repo_id="tester/open", private=True)
    assert len(hub.writes()) == writes


def test_a_name_alone_is_in_the_namespace_of_the_token(hub: HubServer) -> None:
    result = push(hub, {"train": make_store(5)}, repo_id="pendulum")
    assert result.repo_id == f"{USER}/pendulum"
    assert result.oid == head(hub, f"{USER}/pendulum").oid


@pytest.mark.parametrize(("token", "status"), [("hf_wrong", 401), (READ_TOKEN, 403)])
@pytest.mark.parametrize("exists", [False, True])
def test_without_the_right_token_nothing_happens(
    hub: HubServer, token: str, status: int, exists: bool
) -> None:
    if exists:
        push(hub, {"train": make_store(5)})
    state = {repo_id: repo.branches.copy() for repo_id, repo in hub.repos.items()}
    uploads = dict(hub.uploads)
    with pytest.raises(HfHubHTTPError) as caught:
        push(hub, {"train": make_store(6)}, token=token)
    assert caught.value.response.status_code == status
    assert {repo_id: repo.branches for repo_id, repo in hub.repos.items()} == state
    assert hub.uploads == uploads


def test_a_repository_that_hides_shards_is_an_error(hub: HubServer) -> None:
    hub.create(REPO)
    hub.ignored.add("data/train-00000-of-00001.parquet")
    with pytest.raises(
        ConfigError, match=r"\.gitignore of tester/cartpole: .*data/train-00000-of-00001\.parquet"
    ):
        push(hub, {"train": make_store(5)})
    assert len(hub.repos[REPO].history()) == 1


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("---\na: [\n---\n", r"README\.md of tester/cartpole: expected front matter in YAML"),
        ("---\n- a\n---\n", r"README\.md of tester/cartpole: expected front matter as a mapping"),
        ("---\nconfigs: {a: b}\n---\n", r"'configs' a list of mappings"),
        ("---\nconfigs:\n- config_name: raw\n  default: true\n---\n", r"found 'raw' marked as default"),
    ],
)
def test_a_card_that_cannot_be_extended_is_an_error(hub: HubServer, card: str, message: str) -> None:
    hub.create(REPO)
    hub.commit(REPO, {"README.md": card.encode()})
    with pytest.raises(ConfigError, match=message):
        push(hub, {"train": make_store(5)})
    assert not hub.writes()


# ------------------------------------------------------------ what is refused before anything is sent


@pytest.mark.parametrize(
    ("splits", "options", "error", "message"),
    [
        ({}, {}, ConfigError, r"splits: expected stores by split"),
        ([make_store(1)], {}, ConfigError, r"splits: expected stores by split"),
        ({"train": []}, {}, ConfigError, r"split 'train': expected at least one row, found none"),
        ({"train": DatasetStore()}, {}, ConfigError, r"split 'train': expected at least one row"),
        (
            {"a": make_store(3), "b": [DatasetStore()]},
            {},
            ConfigError,
            r"split 'b': expected at least one row",
        ),
        ({"train": [{"action": 1}]}, {}, ConfigError, r"split 'train': expected DatasetStore objects, found"),
        ({"train": 3}, {}, ConfigError, r"split 'train': expected DatasetStore objects, found 3"),
        ({"my-split": make_store(1)}, {}, ConfigError, r"split: expected a name of letters.*'my-split'"),
        ({"all": make_store(1)}, {}, ConfigError, r"not 'all', found 'all'"),
        ({"../x": make_store(1)}, {}, ConfigError, r"split: expected a name of letters"),
        (
            {"train": make_store(1)},
            {"repo_id": "a/b/c"},
            ConfigError,
            r"repo_id: expected 'namespace/name', found",
        ),
        ({"train": make_store(1)}, {"repo_id": "a b"}, ConfigError, r"repo_id: .*'a b'"),
        ({"train": make_store(1)}, {"revision": ""}, ConfigError, r"revision: expected the name of a branch"),
        (
            {"train": make_store(1)},
            {"revision": "0" * 40},
            ConfigError,
            r"revision: expected the name of a branch",
        ),
        ({"train": make_store(1)}, {"commit_message": " "}, ConfigError, r"commit_message: expected a text"),
        (
            {"train": make_store(1)},
            {"max_shard_size": "5 parsecs"},
            ConfigError,
            r"max_shard_size: .*'5 parsecs'",
        ),
        ({"train": make_store(1)}, {"max_shard_size": 0}, ConfigError, r"max_shard_size: .*found 0"),
        ({"train": make_store(1)}, {"max_rows_per_shard": 0}, ConfigError, r"max_rows_per_shard: .*found 0"),
        ({"train": make_store(1)}, {"compression": "lzma"}, ConfigError, r"compression: .*'lzma'"),
        ({"train": make_store(1)}, {"temp_dir": "/no/such"}, ConfigError, r"temp_dir: .*'/no/such'"),
        (
            {"train": make_store(1), "eval": [make_store(1), make_store(1, alignment="outgoing")]},
            {},
            SchemaError,
            r"alignment: expected one .*'arrived' in split 'train' and 'outgoing' in split 'eval', store 1",
        ),
        (
            {
                "train": make_store(2),
                "eval": make_store(2, note=["a", "b"]),
                "test": make_store(2, note=[1, 2]),
            },
            {},
            SchemaError,
            r"column 'note': .*Value\('string'\) in split 'eval' and Value\('int64'\) in split 'test'",
        ),
        (
            {
                "train": [
                    make_store(2, x=np.zeros((2, 3))),
                    make_store(2, x=np.zeros((2, 3), dtype=np.float32)),
                ]
            },
            {},
            SchemaError,
            r"column 'x': .*float64.* in split 'train', store 0 and .*float32.* in split 'train', store 1",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    hub: HubServer, splits: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        push(hub, splits, **options)
    assert not hub.requests or not hub.writes()
    assert not hub.repos


def test_an_empty_store_beside_others_is_no_error(hub: HubServer) -> None:
    result = push(hub, {"train": [DatasetStore(), make_store(4), DatasetStore()]})
    assert result.splits == {"train": 4}


# ---------------------------------------------------------------------- images


def test_image_files_are_embedded_and_their_folders_are_not_told(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    paths = [tmp_path / "secret" / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(png(i))
    columns = {"action": [0] * 4, "reward": [0.0] * 4, "done": [0] * 4, "picture": [*map(str, paths), None]}
    store = DatasetStore().from_dataset(
        datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Image())
    )
    push(hub, {"train": store})
    for path in paths:
        path.unlink()
    assert table_of(head(hub), "train")["picture"].to_pylist() == [
        *({"bytes": png(i), "path": f"{i}.png"} for i in range(3)),
        None,
    ]
    assert b"secret" not in b"".join(file.data for file in head(hub).files.values())


def test_a_file_that_is_no_image_is_not_published(hub: HubServer, tmp_path: Path) -> None:
    private = tmp_path / "id_rsa"
    private.write_text("PRIVATE KEY")
    columns = {"action": [0] * 2, "reward": [0.0] * 2, "done": [0] * 2, "picture": [None, str(private)]}
    store = DatasetStore().from_dataset(
        datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Image())
    )
    where = r"column 'picture' of split 'train', row 1: expected an image file, found '.*id_rsa'"
    with pytest.raises(DataError, match=where):
        push(hub, {"train": store})
    private.unlink()
    with pytest.raises(DataError, match=where):
        push(hub, {"train": store})
    assert not hub.writes()


# ---------------------------------------------------------------------- shards and card


def test_a_shard_is_no_larger_than_asked_for(hub: HubServer) -> None:
    noise = np.random.default_rng(0).normal(size=(4000, 8))
    store = make_store(4000, observation=noise)
    result = push(hub, {"train": store}, max_shard_size="64KiB", compression="snappy")
    sizes = [len(head(hub).files[path].data) for path in result.shards]
    assert len(sizes) > 4
    assert max(sizes) <= 64 * 1024
    assert min(sizes[:-1]) > 32 * 1024
    assert result.num_bytes == sum(sizes) == card_of(head(hub))[0]["dataset_info"]["download_size"]
    assert np.array(table_of(head(hub), "train")["observation"].to_pylist()).tolist() == noise.tolist()
    one = push(hub, {"train": make_store(3)}, max_shard_size=1)
    assert len(one.shards) == 3


def test_damage_is_noticed_by_a_reader_that_looks(hub: HubServer) -> None:
    push(hub, {"train": make_store(200, observation=np.random.default_rng(0).normal(size=(200, 8)))})
    data = head(hub).files["data/train-00000-of-00001.parquet"].data
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    for index in range(group.num_columns):
        column = group.column(index)
        first = column.dictionary_page_offset or column.data_page_offset
        damaged = bytearray(data)
        damaged[first + column.total_compressed_size - 1] ^= 1
        with pytest.raises(OSError, match="CRC checksum verification failed"):
            pq.read_table(io.BytesIO(bytes(damaged)), page_checksum_verification=True)


def test_memory_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mouse_core.hub import _shards

    monkeypatch.setattr(_shards, "_ROW_GROUP_BYTES", 2**18)
    frames = pa.array([bytes(2**14)] * 64)
    written = [0]

    def peak(repeats: int) -> int:
        table = pa.table({"action": range(64), "reward": [0.0] * 64, "done": [0] * 64, "frame": frames})
        path = tmp_path / f"{repeats}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            for _ in range(repeats):
                stream.write_table(table)
        store = DatasetStore().from_dataset(datasets.Dataset.from_file(str(path)).shuffle(seed=0))
        before, most = pa.total_allocated_bytes(), [0]

        def advance(count: int) -> None:
            written[0] += count
            most[0] = max(most[0], pa.total_allocated_bytes() - before)

        dataset = store.to_dataset()
        _shards.write_shards(
            [_shards.Part("split 'train'", dataset)],
            split=f"train{repeats}",
            features=dataset.features,
            alignment="arrived",
            folder=str(tmp_path),
            options=_shards.ShardOptions(2**20, None, "snappy"),
            advance=advance,
        )
        return most[0]

    assert peak(64) <= max(peak(4) * 2, 8 * 2**18)
    assert written == [64 * 68]


def test_the_alignment_is_told(hub: HubServer) -> None:
    push(hub, {"train": make_store(5, alignment="outgoing")})
    assert card_of(head(hub))[0]["mouse_alignment"] == "outgoing"
    assert table_of(head(hub), "train").schema.metadata[b"mouse_alignment"] == b"outgoing"
    assert read_alignment(REPO, endpoint=hub.endpoint, token=READ_TOKEN) == "outgoing"
    hub.create("tester/other")
    assert read_alignment("tester/other", endpoint=hub.endpoint, token=READ_TOKEN) is None
    with pytest.raises(HfHubHTTPError):
        read_alignment("tester/missing", endpoint=hub.endpoint, token=READ_TOKEN)


def test_the_first_card_says_what_this_is(hub: HubServer) -> None:
    result = push(hub, {"train": make_store(1500), "eval": make_store(5)}, commit_message="First")
    metadata, body = card_of(head(hub))
    assert metadata["task_categories"] == ["reinforcement-learning"]
    assert metadata["configs"] == [
        {
            "config_name": "default",
            "data_files": [
                {"split": "train", "path": "data/train-*.parquet"},
                {"split": "eval", "path": "data/eval-*.parquet"},
            ],
        }
    ]
    assert "# cartpole" in body
    assert "| train | 1,500 |" in body
    assert 'DatasetStore(alignment="arrived")' in body
    assert head(hub).message == "First"
    assert_whole(head(hub))
    assert result.readme == head(hub).files["README.md"].data.decode()


# ---------------------------------------------------------------------- dry runs and bars


def test_a_dry_run_does_everything_but_send(hub: HubServer) -> None:
    splits = {"train": [make_store(25), make_store(5, 50)], "eval": make_store(3)}
    planned = push(hub, splits, dry_run=True, max_rows_per_shard=10)
    assert not hub.requests
    assert (planned.oid, planned.commit_url, planned.deleted) == (None, None, ())
    real = push(hub, splits, max_rows_per_shard=10)
    for name in ("repo_id", "revision", "splits", "shards", "num_bytes", "alignment", "readme"):
        assert getattr(planned, name) == getattr(real, name)
    bad = from_columns({"action": [0], "reward": [1], "done": [0]})
    with pytest.raises(SchemaError, match="column 'reward'"):
        push(hub, {"train": make_store(3), "eval": bad}, dry_run=True)


def test_temporary_files_are_put_where_told_and_removed(hub: HubServer, tmp_path: Path) -> None:
    hub.fail("PUT", "^/upload/", 400)
    with pytest.raises(RuntimeError):
        push(hub, {"train": make_store(3)}, temp_dir=tmp_path)
    push(hub, {"train": make_store(3)}, temp_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bars_can_be_switched_off(hub: HubServer, capfd: pytest.CaptureFixture[str]) -> None:
    push(hub, {"train": make_store(3)})
    assert capfd.readouterr() == ("", "")
    push(hub, {"train": make_store(4)}, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert re.search(r"writing shards.*4/4", shown.err)


def test_bars_do_without_rich(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    push(hub, {"train": make_store(4)}, progress=True)
    assert re.search(r"writing shards: 100%.*4/4", capfd.readouterr().err)


def test_importing_the_module_imports_no_client() -> None:
    code = (
        "import sys, mouse_core.hub\n"
        "heavy = {'datasets', 'huggingface_hub', 'pandas', 'PIL', 'yaml', 'rich', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
