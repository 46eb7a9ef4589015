"""Statistics on the Hub: beside the rows that they are of, in the commit of these, and found by who reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, DataError
from mouse_core.hub import from_hub, push_named_stores_to_hub, push_stores_to_hub
from mouse_core.statistics import Normalizer, Statistics, statistics
from tests.core.hub_client import REPO, checked_hub, head, make_store, push
from tests.core.hub_server import READ_TOKEN, WRITE_TOKEN, Commit, HubServer

BESIDE = ["meta/stats.json", "meta/stats.npz"]
READ = """
import json, sys
from mouse_core.hub import from_hub
found = from_hub(sys.argv[1], token=sys.argv[2])
print(json.dumps({name: [one.rows, one.is_of(found[name]), one["reward"].mean.item(), len(one["reward"].quantiles)]
                  for name, one in found.statistics.items()}))
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    yield from checked_hub()


def beside(commit: Commit) -> list[str]:
    return sorted(path for path in commit.files if "meta/" in path)


def read_elsewhere(hub: HubServer, folder: Path, **more: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", **more}
    command = [sys.executable, "-c", READ, REPO, READ_TOKEN]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    read: dict[str, Any] = json.loads(found.stdout)
    return read


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
    assert said["observation.state"]["max"] == [199.0, 0.0, 99.5]
    assert said["next.reward"]["count"] == [180]  # the first row of an episode has none of its own
    # Of rewards t / 8, but for the steps that begin an episode of ten.
    rewards = [t / 8 for t in range(200) if t % 10]
    found = read_elsewhere(hub, tmp_path / "home")
    assert found == {"default": [200, True, pytest.approx(np.mean(rewards)), 5]}
    again = read_elsewhere(hub, tmp_path / "home", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    assert again == found


def test_what_is_found_normalises_and_counts_on(hub: HubServer, tmp_path: Path) -> None:
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

    train = from_hub(folder)
    grown = train["default"]
    grown.extend(
        {name: np.asarray([grown[t][name] for t in range(40)]) for name in grown[0] if grown[0][name] is not None}
    )
    counted = train.statistics["default"].update(grown)
    assert counted.rows == 240
    np.testing.assert_allclose(counted["reward"].mean, statistics(grown)["reward"].mean, rtol=1e-12)


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
    push(hub, {"eval": make_store(10)}, keep_other_splits=True)
    assert beside(head(hub)) == BESIDE  # the rows that they are of are still there
    result = push(hub, {"train": make_store(60), "eval": make_store(10)})
    assert set(BESIDE) <= set(result.deleted)
    assert not beside(head(hub))

    push(hub, {"train": store}, statistics=statistics(store))
    push(hub, {"train": make_store(70)}, keep_other_splits=True)
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
    options: dict[str, Any] = {"repo_id": REPO, "token": WRITE_TOKEN, "endpoint": hub.endpoint, "progress": False}
    push_named_stores_to_hub(stores, statistics=known, **options)
    assert beside(head(hub)) == [f"data/{name}/{file}" for name in ("push", "reach") for file in BESIDE]
    found = from_hub(folder_of(head(hub), tmp_path))
    assert {name: one.rows for name, one in found.statistics.items()} == {"reach": 40, "push": 50}
    push_named_stores_to_hub({"reach": make_store(45)}, **options)
    assert beside(head(hub)) == [f"data/push/{file}" for file in BESIDE]

    with pytest.raises(ConfigError, match=r"statistics: expected Statistics by name, of \['a'\], found"):
        push_named_stores_to_hub({"a": make_store(5)}, statistics={"b": known["reach"]}, **options)
    with pytest.raises(ConfigError, match="statistics of 'a': expected statistics of the 5 rows of 'train', found"):
        push_named_stores_to_hub({"a": make_store(5)}, statistics={"a": known["reach"]}, **options)


def test_those_of_other_rows_are_refused_before_anything_is_sent(hub: HubServer) -> None:
    store, other = make_store(50), make_store(50, 1000)
    for wrong, match in (
        (
            statistics(make_store(49)),
            r"statistics: expected statistics of the 50 rows of 'train', found those of 49 rows",
        ),
        (statistics(other), "found those of 50 rows, of which some differ"),
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
