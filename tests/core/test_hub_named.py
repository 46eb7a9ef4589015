"""Named stores on the Hub, a configuration each; and what MOUSE writes there."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, DataError, SchemaError
from mouse_core.hub import from_hub, push_named_stores_to_hub, push_stores_to_hub
from mouse_core.metadata import read_metadata
from mouse_core.mixtures import Mixture
from mouse_core.statistics import Normalizer, Statistics, statistics
from tests.core.hub_client import REPO, card_of, head, make_store, push, shards, table_of
from tests.core.hub_server import READ_TOKEN, WRITE_TOKEN, Commit, HubServer

# Together they take many seconds.
pytestmark = pytest.mark.slow

READ = """
import json, sys
from mouse_core.hub import from_hub
stores = from_hub(sys.argv[1], token=sys.argv[2])
rows = {name: [len(store), store.alignment, store[0]["action"], store[-1]["action"]] for name, store in stores.items()}
statistics = {name: [one.rows, one.is_of(stores[name]), one["reward"].mean.item(), len(one["reward"].quantiles)]
              for name, one in stores.statistics.items()}
print(json.dumps([rows, statistics]))
"""


def push_named(hub: HubServer, stores: dict[str, Any], **options: Any) -> Any:
    return push_named_stores_to_hub(
        stores, repo_id=REPO, token=WRITE_TOKEN, endpoint=hub.endpoint, progress=False, **options
    )


def read_by_another_process(hub: HubServer, folder: Path, **more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", **more}
    command = [sys.executable, "-c", READ, REPO, READ_TOKEN]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    rows, known = json.loads(found.stdout)
    return rows, known


def test_a_configuration_a_name_is_what_others_read(hub: HubServer, tmp_path: Path) -> None:
    stores = {"cartpole": make_store(30), "lunar.v2": [make_store(20, 100), make_store(15, 200)]}
    results = push_named(hub, stores)
    assert {name: dict(result.splits) for name, result in results.items()} == {
        "cartpole": {"train": 30},
        "lunar.v2": {"train": 35},
    }
    commit = head(hub)
    wanted = ["data/cartpole/train-00000-of-00001.parquet", "data/lunar.v2/train-00000-of-00001.parquet"]
    assert shards(commit) == wanted
    metadata, _ = card_of(commit)
    assert {config["config_name"]: config["data_files"] for config in metadata["configs"]} == {
        name: [{"split": "train", "path": f"data/{name}/train-*.parquet"}] for name in stores
    }
    assert {info["config_name"] for info in metadata["dataset_info"]} == set(stores)
    rows, _ = read_by_another_process(hub, tmp_path)
    assert rows == {"cartpole": [30, "arrived", 0, 1], "lunar.v2": [35, "arrived", 0, 2]}


def test_other_configurations_stay_and_nothing_new_is_no_commit(hub: HubServer) -> None:
    push(hub, {"train": make_store(10)})
    push_named(hub, {"a": make_store(20), "b": make_store(30)})
    before = head(hub)
    push_named(hub, {"a": make_store(20)})
    assert head(hub) is before or shards(head(hub)) == shards(before)
    push_named(hub, {"a": make_store(44)}, max_rows_per_shard=40)
    commit = head(hub)
    assert shards(commit) == [
        "data/a/train-00000-of-00002.parquet",
        "data/a/train-00001-of-00002.parquet",
        "data/b/train-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet",
    ]
    push(hub, {"eval": make_store(7)})
    found = shards(head(hub))
    assert [path for path in found if path.startswith(("data/a/", "data/b/"))] == shards(commit)[:3]
    assert "data/train-00000-of-00001.parquet" not in found
    metadata, _ = card_of(head(hub))
    assert {config["config_name"] for config in metadata["configs"]} == {"default", "a", "b"}


def test_names_that_cannot_be_are_refused_before_anything_is_sent(hub: HubServer) -> None:
    for wrong in ({}, {"a b": make_store(3)}, {"all": make_store(3)}, {"../x": make_store(3)}, [make_store(3)]):
        with pytest.raises(ConfigError, match=r"stores: expected|config: expected"):
            push_named(hub, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one row"):
        push_named(hub, {"a": make_store(3), "b": make_store(0)})
    assert not hub.repos
    push_named(hub, {"a": make_store(5, alignment="outgoing")})
    push_named(hub, {"b": make_store(5)})
    found = [read_metadata(table_of(head(hub), f"{name}/train")).alignment for name in "ab"]
    assert found == ["outgoing", "arrived"]


def mouse_folder(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> str:
    """A dataset as MOUSE lays it out: nested rows, a folder and a configuration for each named store."""
    lines = ["---", "configs:"]
    for name, listed in rows.items():
        (folder / "data" / name).mkdir(parents=True)
        datasets.Dataset.from_list(listed).to_parquet(folder / "data" / name / "train-00000-of-00001.parquet")
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train"]
        lines.append(f"    path: data/{name}/train-*.parquet")
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
    return str(folder)


def nested(rows: int, **observation: Any) -> list[dict[str, Any]]:
    return [
        {
            "observation": {name: make(t) for name, make in observation.items()},
            "action": {"discrete": t % 3},
            "reward": float(t),
            "done": int(t % 10 == 9),
            "step_index": t % 10,
        }
        for t in range(rows)
    ]


def test_what_mouse_writes_is_read(tmp_path: Path) -> None:
    observation: dict[str, Any] = {"continuous": lambda t: [t / 2, -t / 2], "discrete": lambda t: t * 5}
    folder = mouse_folder(tmp_path / "own", {"b": nested(40, **observation), "a": nested(30, **observation)})
    stores = from_hub(folder)
    assert set(stores) == {"a", "b"}
    batch = BatchSource(Mixture(stores), 4, 6)[0]
    steps = batch["reward"].astype(int)
    np.testing.assert_array_equal(batch["action"], steps % 3)
    np.testing.assert_array_equal(batch["obs_discrete"], steps * 5)
    np.testing.assert_array_equal(batch["obs_continuous"], np.stack([steps / 2, -steps / 2], -1))
    np.testing.assert_array_equal(batch["time"], steps % 10)
    assert list(from_hub(folder, ["b"], max_action_dim=3)) == ["b"]
    with pytest.raises(ConfigError, match="expected configurations among"):
        from_hub(folder, ["c"])
    twice = [{**row, "action": {"discrete": 1, "continuous": [0.5]}} for row in nested(5, **observation)]
    with pytest.raises(SchemaError, match="once"):
        from_hub(mouse_folder(tmp_path / "twice", {"a": twice}))


BESIDE = ["meta/stats.json"]


def beside(commit: Commit) -> list[str]:
    return sorted(path for path in commit.files if "meta/" in path)


def folder_of(commit: Commit, folder: Path) -> str:
    """The files of a commit, as a clone has them."""
    for path, file in commit.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(file.data)
    return str(folder)


@pytest.mark.slow
def test_they_come_with_the_rows_in_one_commit_and_are_found(hub: HubServer, tmp_path: Path) -> None:
    store = make_store(200)
    known = statistics(store)
    push(hub, {"train": store, "eval": make_store(30, 500)}, statistics=known)
    assert [commit.message.split()[0] for commit in hub.repos[REPO].history()] == ["initial", "Push"]
    assert beside(head(hub)) == BESIDE
    said = json.loads(head(hub).files["meta/stats.json"].data)
    assert said["obs_continuous"]["max"] == [199.0, 0.0, 99.5]
    assert said["next.reward"]["count"] == [180]  # the first row of an episode has none of its own
    # Of rewards t / 8, but for the steps that begin an episode of ten.
    rewards = [t / 8 for t in range(200) if t % 10]
    found = read_by_another_process(hub, tmp_path)
    assert found[1] == {"default": [200, True, pytest.approx(np.mean(rewards)), 5]}
    assert found == read_by_another_process(hub, tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def test_what_is_found_normalises(hub: HubServer, tmp_path: Path) -> None:
    store = make_store(200)
    push(hub, {"train": store, "eval": make_store(30, 500)}, statistics=statistics(store))
    folder = folder_of(head(hub), tmp_path / "clone")
    validation = from_hub(folder, split="eval")
    normalizer = Normalizer.of(validation.statistics["default"], {"obs_continuous": "mean_std"})
    batch = BatchSource(validation["default"], 4, 2, normalize=normalizer)[0]
    plain = BatchSource(validation["default"], 4, 2)[0]
    observed = np.stack([store[t]["observation"] for t in range(200)]).astype(np.float64)
    wanted = (plain["obs_continuous"] - observed.mean(0)) / observed.std(0)
    np.testing.assert_allclose(batch["obs_continuous"], wanted, rtol=1e-5)


def test_the_same_again_is_no_commit_and_others_replace_them(hub: HubServer) -> None:
    store = make_store(50)
    first = push(hub, {"train": store}, statistics=statistics(store))
    again = push(hub, {"train": make_store(50)}, statistics=statistics(make_store(50)))
    assert again.oid == first.oid
    fewer = push(hub, {"train": store}, statistics=statistics(store, ["reward"]))
    assert fewer.oid != first.oid
    assert list(json.loads(head(hub).files["meta/stats.json"].data)) == ["next.reward"]


def test_stale_ones_go_with_their_rows_and_no_others(hub: HubServer) -> None:
    store = make_store(50)
    push(hub, {"train": store}, statistics=statistics(store))
    result = push(hub, {"train": make_store(60), "eval": make_store(10)})
    assert set(BESIDE) <= set(result.deleted)
    assert not beside(head(hub))

    hub.commit(REPO, {"meta/stats.json": b"{}", "meta/info.json": b"{}"})  # no statistics that were pushed
    push(hub, {"train": make_store(80)})
    assert beside(head(hub)) == ["meta/info.json", "meta/stats.json"]


def test_nothing_of_them_is_seen_where_a_push_fails(hub: HubServer) -> None:
    hub.create(REPO)
    hub.fail("POST", r"/commit/", 500, times=20)
    store = make_store(50)
    with pytest.raises(Exception, match="500"):
        push(hub, {"train": store}, statistics=statistics(store))
    assert not beside(head(hub))


def test_each_name_has_its_own(hub: HubServer, tmp_path: Path) -> None:
    stores = {"reach": make_store(40), "push": [make_store(20, 100), make_store(30, 300)]}
    parts = [statistics(one) for one in stores["push"]]
    known = {"reach": statistics(stores["reach"]), "push": parts[0].merge(parts[1])}
    push_named(hub, stores, statistics=known)
    assert beside(head(hub)) == [f"data/{name}/{file}" for name in ("push", "reach") for file in BESIDE]
    found = from_hub(folder_of(head(hub), tmp_path))
    assert {name: one.rows for name, one in found.statistics.items()} == {"reach": 40, "push": 50}
    push_named(hub, {"reach": make_store(45)})
    assert beside(head(hub)) == [f"data/push/{file}" for file in BESIDE]

    with pytest.raises(ConfigError, match=r"statistics: expected Statistics by name, of \['a'\], found"):
        push_named(hub, {"a": make_store(5)}, statistics={"b": known["reach"]})
    with pytest.raises(ConfigError, match="statistics of 'a': expected statistics of the 5 rows of 'train', found"):
        push_named(hub, {"a": make_store(5)}, statistics={"a": known["reach"]})


def test_those_of_other_rows_are_refused_before_anything_is_sent(hub: HubServer) -> None:
    store, other = make_store(50), make_store(50, 1000)
    for wrong, match in (
        (
            statistics(make_store(49)),
            r"statistics: expected statistics of the 50 rows of 'train', found statistics of 49 rows",
        ),
        (statistics(other), "found statistics of 50 rows, of which some differ"),
        ({"reward": 1.0}, "statistics: expected Statistics or None"),
    ):
        for dry_run in (False, True):
            with pytest.raises(ConfigError, match=match):
                push(hub, {"train": store, "eval": other}, statistics=wrong, dry_run=dry_run)
    with pytest.raises(ConfigError, match="of the 100 rows of 'a' and 'b'"):
        push(hub, {"a": store, "b": other}, statistics=statistics(store))
    assert not hub.writes()
    assert not hub.repos
    both = statistics(store).merge(statistics(other))
    options: dict[str, Any] = {"repo_id": REPO, "token": WRITE_TOKEN, "endpoint": hub.endpoint, "progress": False}
    assert push_stores_to_hub([store, other], statistics=both, dry_run=True, **options).oid is None


def test_damage_is_said(hub: HubServer, tmp_path: Path) -> None:
    store = make_store(50)
    push(hub, {"train": store}, statistics=statistics(store))
    folder = folder_of(head(hub), tmp_path)
    text = (tmp_path / "meta/stats.json").read_bytes()
    assert Statistics.load(folder).rows == 50
    (tmp_path / "meta/stats.json").write_bytes(text[:-20])
    with pytest.raises(DataError, match=r"stats\.json"):
        from_hub(folder)
    with tempfile.TemporaryDirectory() as plain:
        push(hub, {"train": store})
        assert from_hub(folder_of(head(hub), Path(plain))).statistics == {}
