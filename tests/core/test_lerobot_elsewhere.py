"""LeRobotDatasets elsewhere hold what their folders do: rows, batches, fingerprints, and what these say."""

import gc
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, DatasetStore, formats
from mouse_core.errors import ConfigError, DataError
from mouse_core.store.remote import rows
from tests.core.hub_server import READ_TOKEN, USER, File, running_hub
from tests.core.mirror_cases import is_left
from tests.core.test_lerobot import Robot
from tests.waiting import wait_until

pytest.importorskip("obstore")
LENGTHS = (5, 3, 7, 4, 1, 9)
FILES = ((0, 1, 2), (3, 4, 5))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("tests.core.test_lerobot.SIDE", (8, 10))


@pytest.mark.parametrize(
    ("version", "most", "final"), [("v3.0", 4, "drop"), ("v3.0", 8192, "mark"), ("v2.1", 2, "mark")]
)
def test_rows_and_batches_are_those_of_the_folder(small, server, options, tmp_path, monkeypatch, version, most, final):
    monkeypatch.setattr("mouse_core.formats.lerobot._remote.MOST_FRAMES", most)
    folder = Robot(LENGTHS, cameras=["top"]).write(tmp_path / "set", kind="image", files=FILES, version=version)
    for file in (folder / "data").rglob("*.parquet"):
        pq.write_table(pq.read_table(file), file, row_group_size=6)  # episodes and chunks begin within row groups
    server.put_folder("data/robot", folder)
    here, url = formats.open(folder, final=final), "s3://data/robot"
    there = formats.open(url, final=final, **options)
    for name in ("format", "schema", "rows", "episodes", "notes", "format_metadata", "metadata", "alignment"):
        assert getattr(there, name) == getattr(here, name), name
    assert there.digest() == here.digest()
    stores = here.to_store(), DatasetStore.open(url, final=final, **options)
    assert stores[0].snapshot().fingerprint == stores[1].snapshot().fingerprint
    assert stores[1].metadata == stores[0].metadata
    assert there.to_store().path == url  # it stays there
    last = len(stores[0]) - 1
    assert stores[0].snapshot().rows([0, 7, last]) == stores[1].snapshot().rows([0, 7, last])
    sources = [BatchSource(store, 4, 8, seed=1) for store in stores]
    assert sources[0].fingerprint == sources[1].fingerprint
    for index in (0, 1, 5):
        batches = [source[index] for source in sources]
        assert batches[0].keys() == batches[1].keys()
        assert all(np.array_equal(values, batches[1][name]) for name, values in batches[0].items())
    kept, again = pickle.dumps(stores[1]), pickle.loads(pickle.dumps(stores[1].snapshot()))
    assert again.rows([last]) == stores[0].snapshot().rows([last])
    server.put_folder("data/robot", Robot(LENGTHS, seed=1).write(tmp_path / "new", files=FILES, version=version))
    assert pickle.loads(kept).snapshot().rows([0, 7, last]) == stores[0].snapshot().rows([0, 7, last])


def test_opening_reads_what_it_says_of_itself_and_no_frames(server, options, tmp_path):
    server.put_folder("data/robot", Robot((300, 300)).write(tmp_path / "set", files=((0,), (1,))))
    server.asked.clear()
    there = DatasetStore.open("s3://data/robot", final="drop", **options)
    size = sum(one.size for path, one in server.objects.items() if "/data/" in path)
    assert 0 < server.sent("/data/") < size  # the footer of the first
    assert not server.sent("file-001.parquet")
    assert there.snapshot().rows([599])["episode_step"] == [299]
    # A web server, which lists nothing.
    assert len(DatasetStore.open(f"{server.url}/data/robot", final="mark", cache=options["cache"])) == 602


def test_videos_are_not_read_and_that_is_said(server, options, tmp_path):
    pytest.importorskip("av")
    folder = Robot(LENGTHS[:2], cameras=["top"]).write(tmp_path / "set", files=((0, 1),))
    server.put_folder("data/robot", folder)
    there = formats.open("s3://data/robot", final="drop", **options)
    assert any("videos are not read from an address" in note for note in there.notes)
    assert "observation.images.top" not in there.columns
    assert there.digest() == formats.open(folder, final="drop", cameras=False).digest()


def test_it_ends_with_its_last_reference(server, options, tmp_path):
    server.put_folder("data/robot", Robot(LENGTHS).write(tmp_path / "set", files=FILES))
    gc.collect()
    gc.disable()
    try:
        there = DatasetStore.open("s3://data/robot", final="drop", **options)
        assert BatchSource(there, 4, 8)[0]
        assert is_left(options["cache"])
        del there
        assert wait_until(lambda: not is_left(options["cache"])), is_left(options["cache"])
    finally:
        gc.enable()


def test_a_dataset_of_the_hub_is_read_where_it_lies(options, tmp_path):
    folder = Robot(LENGTHS).write(tmp_path / "set", files=FILES)
    with running_hub() as hub:
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        repo = hub.create(f"{USER}/robot")
        repo.add("main", "a dataset", {name: File(file.read_bytes(), lfs=True) for name, file in files.items()})
        told = {**options, "storage_options": {"endpoint": hub.endpoint, "token": READ_TOKEN}}
        there = DatasetStore.open(f"hf://datasets/{USER}/robot", final="drop", **told)
        wanted = DatasetStore.open(folder, final="drop")
        assert there.snapshot().fingerprint == wanted.snapshot().fingerprint


def test_what_is_wrong_is_said(server, options, tmp_path):
    robot = Robot(LENGTHS, cameras=["top"])
    server.put_folder("data/robot", robot.write(tmp_path / "set", kind="image", files=FILES))
    url = "s3://data/robot"
    with pytest.raises(ConfigError, match=r"s3://data/robot: expected .*, found a LeRobotDataset; .*final='drop'"):
        DatasetStore.open(url, **options)
    with pytest.raises(ConfigError, match=r"format: expected one of \['lerobot', 'rows', 'store'\] for remote data"):
        formats.open(url, format="minari", **options)
    with pytest.raises(ConfigError, match="storage_options, cache, cache_bytes: expected an address"):
        formats.open(tmp_path / "set", final="drop", **options)
    with pytest.raises(ConfigError, match=r"s3://data/other: expected options of a store, found \['cameras'\]"):
        DatasetStore.open("s3://data/other", cameras=False, **options)
    damaged = Robot((5, 3, 7, 4, 1, 9), cameras=["top"])
    damaged.frame[16:18] = damaged.frame[17:15:-1]
    server.put_folder("data/robot", damaged.write(tmp_path / "damaged", kind="image", files=FILES))
    with pytest.raises(DataError, match=r"robot/data/chunk-000/file-001.parquet: expected frame 1 of episode 3, found"):
        DatasetStore.open(url, final="drop", **options).snapshot().rows([20])
    server.put("data/robot/meta/info.json", b"{")
    with pytest.raises(DataError, match=r"s3://data/robot/meta/info.json: "):
        DatasetStore.open(url, final="drop", **options)
    del server.objects["data/robot/data/chunk-000/file-001.parquet"]
    server.put("data/robot/meta/info.json", (tmp_path / "set" / "meta" / "info.json").read_bytes())
    with pytest.raises(DataError, match=r"file-001.parquet: expected an object, found none"):
        DatasetStore.open(url, final="drop", **options)


def test_of_many_files_few_stay_open_and_what_is_kept_is_bounded(server, options, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_MOST_OPEN", 3)
    monkeypatch.setattr(rows, "_KEPT_BYTES", 1 << 12)
    lengths = [5] * 24
    folder = Robot(lengths).write(tmp_path / "set", version="v2.1")
    server.put_folder("data/robot", folder)
    there = formats.open("s3://data/robot", final="mark", **options)
    assert there.digest() == formats.open(folder, final="mark").digest()


def test_no_more_frames_are_believed_in_than_a_file_could_have(server, options, tmp_path):
    def claim(info):
        info["total_frames"] = 5 + 2**45

    folder = Robot((5, 6)).write(tmp_path / "set", files=((0,), (1,)), change=claim)
    episodes = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(episodes)
    place = table.schema.get_field_index("length")
    pq.write_table(table.set_column(place, "length", pa.array([5, 2**45])), episodes)
    server.put_folder("data/robot", folder)
    with pytest.raises(DataError, match=rf"file-001.parquet: expected {2**45} frames, as meta/episodes has it, found"):
        DatasetStore.open("s3://data/robot", final="drop", **options)


def test_a_web_server_has_the_files_of_episodes_chunk_by_chunk(server, options, tmp_path):
    folder = Robot(LENGTHS).write(tmp_path / "set", files=FILES)
    episodes = folder / "meta" / "episodes"
    table = pq.read_table(episodes / "chunk-000" / "file-000.parquet")
    for place in range(len(LENGTHS)):  # two files in each chunk, as chunks_size may have it
        (episodes / f"chunk-{place // 2:03d}").mkdir(exist_ok=True)
        pq.write_table(table.slice(place, 1), episodes / f"chunk-{place // 2:03d}" / f"file-{place % 2:03d}.parquet")
    server.put_folder("data/robot", folder)
    there = DatasetStore.open(f"{server.url}/data/robot", final="drop", cache=options["cache"])
    assert there.snapshot().fingerprint == DatasetStore.open(folder, final="drop").snapshot().fingerprint


def test_a_bit_that_flips_is_found_or_changes_no_more_than_a_value(server, options, tmp_path):
    folder = Robot((4, 3)).write(tmp_path / "set", files=((0, 1),))
    server.put_folder("data/robot", folder)
    wanted = formats.open(folder, final="mark").digest()
    (name,) = (path for path in server.objects if "/data/" in path)
    content, draw = server.objects[name].read(0, 1 << 20), np.random.default_rng(3)
    found = set()
    # The footer, of which nothing but its length has a checksum, is the last part.
    for place in draw.integers(len(content) // 3, len(content), 10).tolist():
        changed = bytes([content[place] ^ 1 << draw.integers(8)])
        server.put(name, content[:place] + changed + content[place + 1 :])
        try:
            found.add(formats.open("s3://data/robot", final="mark", **options).digest())
        except DataError as error:
            found.add("s3://data/robot" in str(error))
    assert {wanted, True} <= found
    assert False not in found


def test_names_and_rows_of_a_footer_that_cannot_be_are_damage(server, options, tmp_path):
    folder = Robot((4, 3)).write(tmp_path / "set", files=((0, 1),))
    server.put_folder("data/robot", folder)
    (file,) = (folder / "data").rglob("*.parquet")
    content = file.read_bytes()
    name = f"data/robot/{file.relative_to(folder).as_posix()}"
    server.put(name, content.replace(b"timestamp", b"times\xf9amp"))
    with pytest.raises(DataError, match=r"file-000.parquet: expected a Parquet file, found: 'utf-8' codec"):
        DatasetStore.open("s3://data/robot", final="drop", **options)
