"""Datasets by the ids of other libraries: found in their caches, fetched by them, or refused in a line."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from mouse_core import ConfigError, DatasetStore, formats
from mouse_core.cli import main
from mouse_core.formats.base import stream_of
from mouse_core.formats.verifying import verify
from mouse_core.view.opening import opened_store
from tests.core.formats.recording import write_minari
from tests.core.hub_client import REPO, make_store, push
from tests.core.hub_server import HubServer, running_hub
from tests.core.test_lerobot import Robot


def rows() -> formats.RowStream:
    count, store = 6, DatasetStore()
    store.extend(
        {
            "action": np.arange(count, dtype=np.float32)[:, None],
            "reward": np.append(0.0, np.ones(count - 1)),
            "done": np.append(np.zeros(count - 1, int), 1),
            "episode_step": np.arange(count),
            "observation": np.arange(2 * count, dtype=np.float32).reshape(count, 2),
        }
    )
    return stream_of(store)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library's cache is a folder of this test's own, and so is the folder that paths are looked up in."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "lerobot"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        yield server


def put_minari(folder: Path) -> None:
    write_minari(rows(), folder / "minari" / "toy" / "walk-v1")


def test_what_lies_in_a_cache_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_minari(tmp_path)
    monkeypatch.setitem(sys.modules, "minari", None)  # not asked, and not needed
    found = formats.open("minari:toy/walk-v1")
    assert found.format == "minari"
    assert found.to_table().column("observation").to_pylist() == rows().to_table().column("observation").to_pylist()
    with opened_store("minari:toy/walk-v1") as same:  # what mouse view shows
        assert len(same) == 6
    assert verify("minari:toy/walk-v1").digest == found.digest()


def test_lerobot_datasets_go_where_lerobot_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["revision"], options["cache_dir"]))
        if not (tmp_path / "snapshot").exists():
            Robot().write(tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    formats.open("lerobot:some/arm@v3.0", final="drop")
    (tmp_path / "hub" / "datasets--some--arm").mkdir(parents=True)  # as after hf:some/arm
    formats.open("lerobot:some/arm", final="drop")
    assert asked == [("some/arm", "v3.0", str(tmp_path / "lerobot" / "hub")), ("some/arm", None, None)]
    Robot().write(tmp_path / "lerobot" / "some" / "arm")  # LeRobot's own cache comes first
    assert formats.open("lerobot:some/arm", final="drop").format == "lerobot"
    assert len(asked) == 2


def test_datasets_of_the_hub_are_fetched_once(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(hub, {"train": make_store(7)})
    found = formats.open(f"hf:{REPO}")
    assert found.to_table().num_rows == 7
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.repos.clear()
    assert formats.open(f"hf:{REPO}@main").digest() == found.digest()  # of the cache
    assert main(["convert", f"hf:{REPO}", str(tmp_path / "rows")]) == 0
    assert formats.open(tmp_path / "rows").digest() == found.digest()


def test_a_library_is_asked_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in is asked as the library is: by the name, and once."""
    asked: list[str] = []
    put_minari(tmp_path / "server")

    def download(name: str) -> None:
        asked.append(name)
        print("Downloading")
        (tmp_path / "server" / "minari").rename(tmp_path / "minari")

    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(download_dataset=download))
    for _ in range(2):
        assert formats.open("minari:toy/walk-v1").to_table().num_rows == 6
    assert asked == ["toy/walk-v1"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("minari:toy/walk-v1", r"minari:toy/walk-v1: not in .*walk-v1, and Minari did not .*`minari download toy/walk"),
        ("hf:some/thing", r"hf:some/thing: not complete in the Hub's cache, and the Hub did not .*`hf download "),
        ("lerobot:some/arm", "lerobot:some/arm: not complete in the Hub's cache"),
    ],
)
def test_without_a_connection_a_line_says_what_to_do(
    name: str, wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # else its client tries again for 20 seconds
    with pytest.raises(ConfigError, match=wanted) as caught:
        formats.open(name, final="drop")
    assert "\n" not in str(caught.value)
    assert main(["inspect", name, "--final", "drop"]) == 2
    assert capsys.readouterr().err.startswith(f"mouse inspect: {name}: not ")


def test_a_library_that_is_missing_or_misses_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, library, wanted in (
        ("minari:toy/walk-v1", "minari", r"pip install 'minari\[hf,hdf5\]'"),
        ("hf:a/b", "huggingface_hub", r"pip install 'mouse-data\[remote\]'"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ImportError, match=f"{name}: not .*{wanted}"):
            formats.open(name)
    download = Mock(side_effect=ModuleNotFoundError("No module named 'gcsfs'"))
    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(download_dataset=download))
    with pytest.raises(ImportError, match=r"Minari needs .*: pip install 'minari.*No module named 'gcsfs'"):
        formats.open("minari:toy/walk-v1")


def test_a_path_of_the_same_name_is_neither_taken_nor_left_silently(tmp_path: Path) -> None:
    put_minari(tmp_path)
    rows().save("minari:rows")
    with pytest.raises(ConfigError, match=r"minari:rows: expected a dataset's id or a path, found an id that is also"):
        formats.open("minari:rows")
    for path in ("./minari:rows", Path("minari:rows")):
        assert formats.open(path).format == "datasets"


def test_names_that_are_none() -> None:
    for name, wanted in (
        ("minari:../../etc", "expected an id as minari:D4RL"),
        ("minari:/etc", "expected an id as minari:D4RL"),
        ("minari:toy/walk", r"minari:toy/walk: not in .*expected a version after the name, as in toy/walk-v0"),
        ("hf:a/b@../c", "expected an id as hf:namespace"),
        ("hf:a/b/c", "expected namespace/name"),
        ("minary:toy/walk-v1", r"ids of datasets begin with one of \['minari', 'lerobot', 'hf'\]"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            formats.open(name)


def test_an_id_says_the_format(tmp_path: Path) -> None:
    put_minari(tmp_path)
    with pytest.raises(ConfigError, match="format: expected 'minari', the format of the id, found 'd4rl'"):
        formats.open("minari:toy/walk-v1", format="d4rl")
    assert list(formats.ID_SCHEMES) == ["minari", "lerobot", "hf"]
