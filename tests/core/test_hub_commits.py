"""A push is one commit: nobody ever sees an empty or mixed dataset, and nothing of others is lost."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HfHubHTTPError

from mouse_core import DatasetStore
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.metadata import read_metadata
from mouse_core.mixtures import Mixture
from tests.core.hub_client import (
    REPO,
    card_of,
    head,
    load,
    make_store,
    push,
    shards,
    steps,
    table_of,
)
from tests.core.hub_server import READ_TOKEN, USER, HubServer

# Together they take many seconds.
pytestmark = pytest.mark.slow


def test_stale_files_go_in_the_commit_that_replaces_them(hub: HubServer, tmp_path: Path) -> None:
    hub.page_size = 2
    first = push(hub, {"train": make_store(30), "eval": make_store(10)}, max_rows_per_shard=10)
    assert len(first.shards) == 4
    others = {"notes/figure.png": b"png", "data/annotations.json": b"{}"}
    hub.commit(REPO, others)

    second = push(hub, {"train": make_store(12, 500, alignment="outgoing")}, max_rows_per_shard=10)

    assert second.deleted == first.shards[-1:] + first.shards[:-1]
    messages = [commit.message for commit in hub.repos[REPO].history()]
    assert messages[1:] == ["Push train (30 steps), eval (10 steps)", "somebody else", "Push train (12 steps)"]
    assert shards(head(hub)) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert {path: head(hub).files[path].data for path in others} == others
    loaded = load(hub, tmp_path)["train"]
    assert loaded["episode_step"][:] == steps(12, 500)["episode_step"].tolist()
    assert read_metadata(loaded.features).alignment == "outgoing"
    before = hub.repos[REPO].commits[str(first.oid)]
    assert [table_of(before, split).num_rows for split in ("train", "eval")] == [30, 10]


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
    metadata, _ = card_of(head(hub))
    assert (metadata["license"], metadata["language"], metadata["tags"]) == ("mit", ["no"], ["\u2713"])
    raw_config = {"config_name": "raw", "data_files": [{"split": "train", "path": "data/raw-*.parquet"}]}
    assert metadata["configs"][1] == raw_config
    assert [info["config_name"] for info in metadata["dataset_info"]] == ["default", "raw"]
    assert load(hub, tmp_path)["train"]["action"][:] == [0, 1, 2, 3]


def test_a_commit_in_between_is_seen_and_respected(hub: HubServer) -> None:
    push(hub, {"train": make_store(30)}, max_rows_per_shard=10)

    def interrupt() -> None:
        """Somebody replaces the data with fewer shards, and writes something into the card."""
        card = head(hub).files["README.md"].data + b"\nWritten meanwhile.\n"
        shard = head(hub).files["data/train-00000-of-00003.parquet"].data
        new = {"README.md": card, "data/train-00000-of-00001.parquet": shard, "data/test-00000-of-00001.parquet": shard}
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
    assert caught.value.__notes__ == [f"{REPO}: other clients committed during each of 5 attempts; nothing was pushed"]
    assert head(hub) is old


@pytest.mark.parametrize(("method", "path"), [("PUT", "^/upload/"), ("POST", "/objects/batch$"), ("POST", "/commit/")])
def test_a_push_that_fails_leaves_the_old_dataset(hub: HubServer, method: str, path: str) -> None:
    push(hub, {"train": make_store(30)}, max_rows_per_shard=10)
    old = head(hub)
    hub.fail(method, path, 400)
    with pytest.raises((HfHubHTTPError, RuntimeError)):
        push(hub, {"train": make_store(20, 300)}, max_rows_per_shard=10)
    assert head(hub) is old
    result = push(hub, {"train": make_store(20, 300)}, max_rows_per_shard=10)
    assert head(hub).oid == result.oid


def test_pushing_the_same_again_changes_nothing(hub: HubServer) -> None:
    store = make_store(30)
    first = push(hub, {"train": store}, max_rows_per_shard=10)
    second = push(hub, {"train": store}, max_rows_per_shard=10)
    assert (second.oid, second.commit_url) == (first.oid, first.commit_url)
    assert len(hub.repos[REPO].history()) == 2
    hub.commit(REPO, {"README.md": b"# Cart pole"})
    third = push(hub, {"train": store}, max_rows_per_shard=10)
    assert third.oid == head(hub).oid != first.oid
    assert card_of(head(hub))[1] == "# Cart pole"
    fourth = push(hub, {"train": make_store(30, 1)}, max_rows_per_shard=10)
    assert fourth.oid == head(hub).oid != third.oid


def test_branches(hub: HubServer) -> None:
    push(hub, {"train": make_store(5)})
    main = head(hub)
    result = push(hub, {"train": make_store(6)}, revision="runs/2")
    assert result.revision == "runs/2"
    assert head(hub) is main
    assert head(hub, branch="runs/2").oid == result.oid
    assert table_of(head(hub, branch="runs/2"), "train").num_rows == 6
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
    result = push(hub, {"train": [DatasetStore(), make_store(5), DatasetStore()]}, repo_id="pendulum")
    assert result.splits == {"train": 5}
    assert result.repo_id == f"{USER}/pendulum"
    assert result.oid == head(hub, f"{USER}/pendulum").oid


def test_without_the_right_token_nothing_happens(hub: HubServer) -> None:
    for exists in (False, True):
        if exists:
            push(hub, {"train": make_store(5)})
        repos, uploads = repr(hub.repos), dict(hub.uploads)
        for token, status in (("hf_wrong", 401), (READ_TOKEN, 403)):
            with pytest.raises(HfHubHTTPError) as caught:
                push(hub, {"train": make_store(6)}, token=token)
            assert caught.value.response.status_code == status
            assert (repr(hub.repos), hub.uploads) == (repos, uploads)


def test_without_any_token_nothing_is_even_written(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for token in (None, False):
        with pytest.raises(ConfigError, match=r"token: expected a token with write access to tester/cartpole"):
            push(hub, {"train": make_store(5)}, token=token)
    assert not hub.writes()


def test_a_repository_that_hides_shards_is_an_error(hub: HubServer) -> None:
    hub.create(REPO)
    hub.ignored.add("data/train-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match=r"\.gitignore of tester/cartpole: .*data/train-00000-of-00001\.parquet"):
        push(hub, {"train": make_store(5)})
    assert len(hub.repos[REPO].history()) == 1


def test_a_card_that_cannot_be_extended_is_an_error(hub: HubServer) -> None:
    hub.create(REPO)
    for card, message in (
        ("---\na: [\n---\n", "cannot be read: while parsing"),
        ("---\n- a\n---\n", "expected a mapping, found list"),
        ("---\na: &a [b]\nc: *a\n---\n", r"expected YAML without aliases, found '\*a'"),
        ("---\nconfigs: {a: b}\n---\n", "'configs' that is a list of mappings"),
        ("---\nconfigs:\n- config_name: raw\n  default: true\n---\n", "found 'raw' marked as default"),
    ):
        hub.commit(REPO, {"README.md": card.encode()})
        with pytest.raises(ConfigError, match=f"README\\.md of tester/cartpole.*: .*{message}"):
            push(hub, {"train": make_store(5)})
    assert not hub.writes()


ONE = {"train": make_store(1)}
WIDE, NARROW = make_store(2, x=np.zeros((2, 3))), make_store(2, x=np.zeros((2, 3), dtype=np.float32))


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ({}, {}, r"splits: expected stores by split"),
        ([make_store(1)], {}, r"splits: expected stores by split"),
        ({"train": []}, {}, r"split 'train': expected at least one row, found none"),
        ({"a": make_store(3), "b": [DatasetStore()]}, {}, r"split 'b': expected at least one row"),
        ({"train": [{"action": 1}]}, {}, r"split 'train': expected DatasetStore objects, found"),
        ({"train": 3}, {}, r"split 'train': expected DatasetStore objects, found 3"),
        ({"my-split": make_store(1)}, {}, r"split: expected a name of letters.*'my-split'"),
        ({"all": make_store(1)}, {}, r"not 'all', found 'all'"),
        ({"../x": make_store(1)}, {}, r"split: expected a name of letters"),
        ({"train": Mixture([make_store(5), make_store(6)])}, {}, r"push_named_stores_to_hub\(mixture.members\)"),
        (ONE, {"repo_id": "a/b/c"}, r"repo_id: expected 'namespace/name', found"),
        (ONE, {"repo_id": "a b"}, r"repo_id: .*'a b'"),
        (ONE, {"revision": ""}, r"revision: expected the name of a branch"),
        (ONE, {"revision": "0" * 40}, r"revision: expected the name of a branch"),
        (ONE, {"commit_message": " "}, r"commit_message: expected a text"),
        (ONE, {"max_shard_size": "5 parsecs"}, r"max_shard_size: .*'5 parsecs'"),
        (ONE, {"max_shard_size": 0}, r"max_shard_size: .*found 0"),
        (ONE, {"max_rows_per_shard": 0}, r"max_rows_per_shard: .*found 0"),
        (
            {**ONE, "eval": [make_store(1), make_store(1, alignment="outgoing")]},
            {},
            r"alignment: expected one value, found 'arrived' in split 'train' and 'outgoing' in split 'eval', store 1",
        ),
        (
            {**ONE, "eval": make_store(2, note=["a", "b"]), "test": make_store(2, note=[1, 2])},
            {},
            r"column 'note': .*Value\('string'\) in split 'eval' and Value\('int64'\) in split 'test'",
        ),
        (
            {"train": [WIDE, NARROW]},
            {},
            r"column 'x': .*float64.* in split 'train', store 0 and .*float32.* in split 'train', store 1",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    hub: HubServer, splits: Any, options: dict[str, Any], message: str
) -> None:
    error = SchemaError if message.startswith(("alignment", "column")) else ConfigError
    with pytest.raises(error, match=message):
        push(hub, splits, **options)
    assert not hub.writes()
    assert not hub.repos


def test_types_that_datasets_does_not_have_are_refused(hub: HubServer) -> None:
    columns = {"action": [0], "reward": [0.0], "done": [0], "info": pa.array([[("a", 1)]], pa.map_("string", "int64"))}
    store = DatasetStore().from_dataset(pa.table(columns))
    with pytest.raises(
        SchemaError, match=r"split 'train': expected columns of types that the library datasets supports: .*map<"
    ):
        push(hub, {"train": store})
    assert not hub.requests
