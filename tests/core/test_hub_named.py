"""Named stores on the Hub, a configuration each; and what MOUSE writes there."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, SchemaError
from mouse_core.hub import from_hub, push_named_stores_to_hub
from mouse_core.metadata import read_metadata
from mouse_core.mixtures import Mixture
from tests.core.hub_client import REPO, card_of, head, make_store, push, run_client, shards, table_of
from tests.core.hub_server import READ_TOKEN, WRITE_TOKEN, HubServer

# Together they take many seconds.
pytestmark = pytest.mark.slow

READ = """
import json, sys
from mouse_core.hub import from_hub
stores = from_hub(sys.argv[1], token=sys.argv[2])
rows = {name: [len(store), store.alignment, store[0]["action"], store[-1]["action"]] for name, store in stores.items()}
print(json.dumps(rows))
"""


def push_named(hub: HubServer, stores: dict[str, Any], **options: Any) -> Any:
    return push_named_stores_to_hub(
        stores, repo_id=REPO, token=WRITE_TOKEN, endpoint=hub.endpoint, progress=False, **options
    )


def test_a_configuration_a_name_is_what_others_read(hub: HubServer, tmp_path: Path) -> None:
    stores = {"cartpole": make_store(30), "lunar.v2": [make_store(20, 100), make_store(15, 200)]}
    results = push_named(hub, stores)
    assert [result.splits for result in results.values()] == [{"train": 30}, {"train": 35}]
    commit = head(hub)
    assert shards(commit) == [f"data/{name}/train-00000-of-00001.parquet" for name in stores]
    metadata, _ = card_of(commit)
    assert {config["config_name"]: config["data_files"] for config in metadata["configs"]} == {
        name: [{"split": "train", "path": f"data/{name}/train-*.parquet"}] for name in stores
    }
    assert {info["config_name"] for info in metadata["dataset_info"]} == set(stores)
    rows = json.loads(run_client(hub, tmp_path, READ, REPO, READ_TOKEN))
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
