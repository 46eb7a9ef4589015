"""What was pushed to the Hub is what is read from it; with the real clients, on the loopback interface."""

import io
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core.errors import DataError, SchemaError
from mouse_core.metadata import read_metadata
from mouse_core.store.derived import DerivedStore, Return
from mouse_core.testing import example_store
from tests.core.hub_client import (
    REPO,
    assert_whole,
    card_of,
    from_columns,
    head,
    load,
    make_store,
    plain,
    png,
    push,
    table_of,
)
from tests.core.hub_server import HubServer


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


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.long)])
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
        # Reading decodes the images and storing encodes them anew, with the same bytes and without a name.
        for row in expected:
            row["observation_image"]["path"] = None
    assert plain(loaded["train"]) == expected


def test_columns_missing_in_one_split_are_absent_there(hub: HubServer) -> None:
    n = 12
    q_star = np.arange(n * 2, dtype=np.float32).reshape(n, 2)
    train = make_store(n, metadata_q_star=q_star)
    more = make_store(n, 100)
    frames = np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3)
    held_out = make_store(n, 200, observation_image=frames, log_prob=np.linspace(-1, 0, n))

    result = push(hub, {"train": [train, more], "held.out_2": held_out})

    assert result.splits == {"train": 2 * n, "held.out_2": n}
    loaded = {split: table_of(head(hub), split) for split in ("train", "held.out_2")}
    features = [datasets.Features.from_arrow_schema(table.schema) for table in loaded.values()]
    assert features[0] == features[1]
    back_train, back_held_out = (DatasetStore().from_dataset(table) for table in loaded.values())
    assert "q_star" in back_train.snapshot().spec
    assert "obs_image" not in back_train.snapshot().spec
    assert "obs_image" in back_held_out.snapshot().spec
    assert "q_star" not in back_held_out.snapshot().spec
    assert back_train[n - 1]["metadata_q_star"] == q_star[-1].tolist()
    assert back_train[n]["metadata_q_star"] is None
    assert [back_held_out[i] for i in range(n)] == [{"metadata_q_star": None, **held_out[i]} for i in range(n)]


def test_one_type_stored_in_several_ways_becomes_one(hub: HubServer) -> None:
    value = datasets.Value
    ways: dict[str, tuple[list[Any], Any, Any]] = {
        "action": ([0, 1], value("int64"), value("int64")),
        "reward": ([0.0, 1.0], value("float64"), value("float64")),
        "done": ([0, 1], value("int64"), value("int64")),
        "observation": (
            [[1, 2], [3, 4]],
            datasets.List(value("float32"), length=2),
            datasets.LargeList(value("float32")),
        ),
        "frame": (
            [[[1, 2]], [[3, 4]]],
            datasets.Array2D((1, 2), "uint8"),
            datasets.List(datasets.List(value("uint8"))),
        ),
        "label": ([1, 0], datasets.ClassLabel(names=["no", "yes"]), value("int64")),
        "observation_image": ([png(1), png(2)], datasets.Image(), value("binary")),
    }
    one, other = (
        from_columns(
            {name: way[0] for name, way in ways.items()}, datasets.Features({n: w[k] for n, w in ways.items()})
        )
        for k in (1, 2)
    )
    push(hub, {"train": one, "eval": other})
    train, held_out = table_of(head(hub), "train"), table_of(head(hub), "eval")
    wanted = {name: way[2] for name, way in ways.items()}
    wanted |= {"observation": datasets.List(value("float32")), "observation_image": datasets.Image()}
    assert datasets.Features.from_arrow_schema(train.schema) == wanted
    assert train.equals(held_out)
    assert held_out["observation"][1].as_py() == [3, 4]
    assert held_out["observation_image"][1]["bytes"].as_py() == png(2)


def test_image_files_are_embedded_and_their_folders_are_not_told(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    paths = [tmp_path / "secret" / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(png(i))
    columns = {"action": [0] * 4, "reward": [0.0] * 4, "done": [0] * 4, "picture": [*map(str, paths), None]}
    store = DatasetStore(image_roots=[tmp_path / "secret"])
    store.from_dataset(datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Image()))
    push(hub, {"train": store})
    for path in paths:
        path.unlink()
    assert table_of(head(hub), "train")["picture"].to_pylist() == [
        *({"bytes": png(i), "path": f"{i}.png"} for i in range(3)),
        None,
    ]
    assert b"secret" not in b"".join(file.data for file in head(hub).files.values())


def test_a_file_that_is_no_image_is_not_published(hub: HubServer, tmp_path: Path) -> None:
    """Data that somebody else wrote may name any file of this machine."""
    private = tmp_path / "id_rsa"
    private.write_text("PRIVATE KEY")
    columns = {"action": [0] * 2, "reward": [0.0] * 2, "done": [0] * 2, "picture": [None, str(private)]}
    store = DatasetStore().from_dataset(datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Image()))
    where = r"column 'picture' of split 'train', row 1: .*expected an image file inside .*image_roots= names .*id_rsa'"
    with pytest.raises(DataError, match=where):
        push(hub, {"train": store})
    later = DatasetStore().from_dataset(store.to_dataset().select([0, 0])).from_dataset(store.to_dataset())
    private.unlink()
    with pytest.raises(DataError, match=where.replace("row 1", "row 3")):
        push(hub, {"train": later})
    columns["picture"] = [None, "/recordings/1.wav"]
    sound = datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Audio())
    with pytest.raises(DataError, match=r"row 1: expected bytes, found only a path, '/recordings/1\.wav'"):
        push(hub, {"train": DatasetStore().from_dataset(sound)})
    assert not hub.writes()


def test_a_shard_is_no_larger_than_asked_for(hub: HubServer) -> None:
    noise = np.random.default_rng(0).normal(size=(4000, 8))
    store = make_store(4000, observation=noise)
    result = push(hub, {"train": store}, max_shard_size="64KiB")
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


def test_the_first_card_says_what_this_is(hub: HubServer) -> None:
    splits = {"train": make_store(1500, alignment="outgoing"), "eval": make_store(5, alignment="outgoing")}
    result = push(hub, splits, commit_message="First")
    assert read_metadata(table_of(head(hub), "train")).alignment == "outgoing"
    metadata, body = card_of(head(hub))
    assert metadata["task_categories"] == ["reinforcement-learning"]
    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in ("train", "eval")]
    assert metadata["configs"] == [{"config_name": "default", "data_files": files}]
    assert "# cartpole" in body
    assert "| train | 1,500 |" in body
    assert 'DatasetStore(alignment="outgoing")' in body
    assert head(hub).message == "First"
    assert_whole(head(hub))
    assert result.readme == head(hub).files["README.md"].data.decode()


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


def test_temporary_files_are_removed(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hub.fail("PUT", "^/upload/", 400)
    with pytest.raises(RuntimeError):
        push(hub, {"train": make_store(3)})
    push(hub, {"train": make_store(3)})
    assert list(tmp_path.iterdir()) == []


def test_bars(hub: HubServer, capfd: pytest.CaptureFixture[str]) -> None:
    push(hub, {"train": make_store(3)})
    assert capfd.readouterr() == ("", "")
    push(hub, {"train": make_store(4)}, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert re.search(r"writing shards: 100%.*4/4", shown.err)


@pytest.mark.parametrize("kind", ["whole", "of a view", "view"])
def test_derived_fields_are_published(kind: str, hub: HubServer, tmp_path: Path) -> None:
    dataset = example_store(60).to_dataset()
    dataset.save_to_disk(tmp_path / "rows")
    base = DatasetStore().from_dataset(datasets.load_from_disk(tmp_path / "rows"))
    derived = DerivedStore(base.best(0.5) if kind == "of a view" else base, {"to_go": Return()})
    store = derived.best(0.5) if kind == "view" else derived
    push(hub, {"train": store})
    snapshot = store.snapshot()
    published = table_of(head(hub), "train")
    assert published.column("to_go").to_pylist() == snapshot.stored("to_go", np.arange(len(snapshot))).tolist()
    # Read back, it is a field like others.
    again = DatasetStore().from_dataset(published)
    assert BatchSource(again, 4, 3)[1]["to_go"].tolist() == BatchSource(store, 4, 3)[1]["to_go"].tolist()
