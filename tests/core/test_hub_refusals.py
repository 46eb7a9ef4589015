"""What a push refuses, and that nothing is sent or changed when it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from huggingface_hub.errors import HfHubHTTPError

from mouse_core import DatasetStore
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.mixtures import Mixture
from tests.core.hub_client import (
    REPO,
    checked_hub,
    head,
    load,
    make_store,
    push,
    table_of,
)
from tests.core.hub_server import READ_TOKEN, USER, HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    yield from checked_hub()


@pytest.mark.slow
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


def test_a_mixture_is_published_by_member(hub: HubServer) -> None:
    with pytest.raises(ConfigError, match=r"push_named_stores_to_hub\(mixture.members\)"):
        push(hub, {"train": Mixture([make_store(5), make_store(6)])})
    assert not hub.writes()


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
def test_without_the_right_token_nothing_happens(hub: HubServer, token: str, status: int, exists: bool) -> None:
    if exists:
        push(hub, {"train": make_store(5)})
    state = {repo_id: repo.branches.copy() for repo_id, repo in hub.repos.items()}
    uploads = dict(hub.uploads)
    with pytest.raises(HfHubHTTPError) as caught:
        push(hub, {"train": make_store(6)}, token=token)
    assert caught.value.response.status_code == status
    assert {repo_id: repo.branches for repo_id, repo in hub.repos.items()} == state
    assert hub.uploads == uploads


def test_without_any_token_nothing_is_even_written(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for token in (None, False):
        with pytest.raises(ConfigError, match=r"token: expected one with the right to write to tester/cartpole"):
            push(hub, {"train": make_store(5)}, token=token)
    assert not hub.writes()


def test_a_repository_that_hides_shards_is_an_error(hub: HubServer) -> None:
    hub.create(REPO)
    hub.ignored.add("data/train-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match=r"\.gitignore of tester/cartpole: .*data/train-00000-of-00001\.parquet"):
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


def test_types_that_datasets_does_not_have_are_refused(hub: HubServer) -> None:
    columns = {"action": [0], "reward": [0.0], "done": [0], "info": pa.array([[("a", 1)]], pa.map_("string", "int64"))}
    store = DatasetStore().from_dataset(pa.table(columns))
    with pytest.raises(SchemaError, match=r"split 'train': expected columns that datasets has types for: .*map<"):
        push(hub, {"train": store})
    assert not hub.requests


def test_an_empty_store_beside_others_is_no_error(hub: HubServer) -> None:
    result = push(hub, {"train": [DatasetStore(), make_store(4), DatasetStore()]})
    assert result.splits == {"train": 4}
