"""Datasets of TFDS whose rows stay in their TFRecord shards, beside the same rows in memory."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, formats
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.mixtures import Mixture
from tests.core.formats.recording import Counting, record, rlds_episode
from tests.core.formats.test_tfds import LENGTHS, as_tfrecord, features_of, library, masked, write

WINDOWS: dict[str, Any] = {"sequence_length": 3, "batch_size": 4, "seed": 1}


def made(folder: Path, kind: str = "image", **more: Any) -> Path:
    """Six episodes in three shards and two splits."""
    logs = list(record(Counting(LENGTHS, kind), 6))
    episodes = [rlds_episode(log) for log in logs]
    write(folder / "arrays", features_of(kind, **more), {"train": episodes[:5], "val": episodes[5:]})
    return as_tfrecord(folder / "arrays")


def in_memory(path: Path, **options: Any) -> DatasetStore:
    return DatasetStore().from_dataset(formats.open(path, **options).to_table())


def same_batches(one: DatasetStore, other: DatasetStore) -> None:
    first, second = BatchSource(one, **WINDOWS), BatchSource(other, **WINDOWS)
    assert len(first) == len(second)
    for index in range(2 * len(first)):
        batch, wanted = first[index], second[index]
        assert sorted(batch) == sorted(wanted)
        for name, values in batch.items():
            assert values.dtype == wanted[name].dtype
            assert np.array_equal(values, wanted[name]), name


@pytest.mark.parametrize("kind", ["vector", "discrete", "image"])
def test_batches_are_those_of_rows_in_memory(kind: str, tmp_path: Path) -> None:
    path = made(tmp_path, kind)
    store = formats.open(path).to_store()
    same_batches(store, in_memory(path))
    same_batches(formats.open(path).to_store(), in_memory(path))
    same_batches(formats.open(path, splits=["val"]).to_store(), in_memory(path, splits=["val"]))
    same_batches(formats.open(path, splits=["val", "train"]).to_store(), in_memory(path, splits=["val", "train"]))
    same_batches(pickle.loads(pickle.dumps(store)), store)
    for final in ("drop", "mark"):
        how = {"last_step": "transition", "final": final}
        transitions = formats.open(path, **how).to_store()
        assert len(transitions) == len(store) + 6 * (final == "mark")
        same_batches(pickle.loads(pickle.dumps(transitions)), in_memory(path, **how))
    # A store of rows as they are: what is in it, and what converting it gives.
    assert formats.open(path).to_store().to_dataset().features["reward"] is not None
    if kind == "image":
        assert pa.types.is_struct(store.columns["observation_image"])
    with pytest.raises(ConfigError, match="expected a store in a folder that was opened to be written"):
        store.append({"action": 1})
    same_batches(DatasetStore.open(path), store)
    with pytest.raises(ConfigError, match=r"expected a folder with a store, .*'dataset_info.json'"):
        DatasetStore.open(path, "a")


def with_cameras(tmp_path: Path) -> Path:
    """Three episodes of six steps with pictures of noise, one of which is of depth."""
    picture = library.features.Image(shape=(36, 40, 3), encoding_format="png")
    depth = library.features.Image(shape=(36, 40, 1), dtype=np.uint16, encoding_format="png")
    features = library.features.FeaturesDict(
        {
            "steps": library.features.Dataset(
                {
                    "observation": {"cameras": {"wrist": picture, "front": picture}, "depth": depth, "q": np.float32},
                    "action": library.features.Tensor(shape=(2,), dtype=np.float32),
                    "reward": np.float32,
                    "discount": np.float32,
                    "goal": picture,
                    "language_instruction": library.features.Text(),
                    **dict.fromkeys(("is_first", "is_last", "is_terminal"), np.bool_),
                }
            ),
            "robot": library.features.Text(),
        }
    )
    rng = np.random.default_rng(0)

    def image(n: int, channels: int = 3) -> np.ndarray:
        if channels == 1:
            return rng.integers(0, 60_000, (36, 40, 1)).astype(np.uint16)
        return rng.integers(0, 255, (36, 40, 3)).astype(np.uint8)

    episodes = [
        {
            "steps": [
                {
                    "observation": {
                        "cameras": {"wrist": image(n), "front": image(n)}, "depth": Depth.of(image(n, 1)), "q": 0.5 * n
                    },
                    "action": np.float32([n, k]), "reward": float(n), "discount": 1.0, "goal": image(n),
                    "language_instruction": f"task {k}", "is_first": n == 0, "is_last": n == 5, "is_terminal": False,
                }
                for n in range(6)
            ],
            "robot": f"arm {k}",
        }
        for k in range(3)
    ]  # fmt: skip
    write(tmp_path / "arrays", features, {"train": episodes})
    return as_tfrecord(tmp_path / "arrays")


def test_nested_observations_of_several_cameras(tmp_path: Path) -> None:
    path = with_cameras(tmp_path)
    store = formats.open(path).to_store()
    wanted = formats.open(path).to_table()
    found = pa.concat_tables(table for segment in store.snapshot().segments for table in segment.tables())
    pictures = ["observation_cameras_wrist", "observation_cameras_front", "metadata_goal"]
    assert found.column_names == wanted.column_names
    for name in wanted.column_names:
        if name not in pictures:
            assert found.column(name).to_pylist() == wanted.column(name).to_pylist(), name
            continue
        from mouse_core.images.pixels import decode_image

        for one, pixels in zip(found.column(name).to_pylist(), wanted.column(name).to_pylist(), strict=True):
            assert np.array_equal(decode_image(one), np.array(pixels, np.uint8))
    assert store.snapshot().segments[0].take(7, 1).column("metadata_episode_robot").to_pylist() == ["arm 1"]


class Depth:
    """A picture of 16 bits as TFDS takes it."""

    @staticmethod
    def of(pixels: np.ndarray) -> Any:
        import io

        from PIL import Image

        stream = io.BytesIO()
        Image.fromarray(pixels[:, :, 0]).save(stream, "PNG")
        stream.seek(0)
        return stream


class Reads:
    """How many bytes are read of shards, and how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.times = 0
        self._real = os.pread
        monkeypatch.setattr(os, "pread", self._pread)

    def _pread(self, file: int, size: int, place: int) -> bytes:
        self.bytes, self.times = self.bytes + size, self.times + 1
        return self._real(file, size, place)


def test_a_batch_reads_only_the_pictures_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_cameras(tmp_path)
    size = sum(file.stat().st_size for file in path.glob("*tfrecord-*"))
    for verify, low, most in ((True, 1.0, 1.2), (False, 0.05, 0.2)):
        segment = formats.open(path).to_store(verify=verify).snapshot().segments[0]
        reads = Reads(monkeypatch)
        for chunk in range(3):
            # Three of six steps, one of four cameras: an eighth, and once all of a record for its CRC.
            segment.part("observation_cameras_wrist").slices([(chunk, row, 1) for row in (0, 2, 5)])
        assert low * size < reads.bytes < most * size


def test_the_index_is_kept_until_shards_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, "vector")
    wanted = in_memory(path)
    formats.open(path).to_store()
    (index,) = (path / ".mouse").iterdir()
    content = index.read_bytes()
    shards = sorted(path.glob("*tfrecord-*"))
    reads = Reads(monkeypatch)
    store = formats.open(path).to_store()
    assert reads.times == 0
    same_batches(store, wanted)
    os.utime(shards[1], ns=(1, 1))
    reads = Reads(monkeypatch)
    formats.open(path).to_store()
    again = reads.times
    shutil.rmtree(path / ".mouse")
    reads = Reads(monkeypatch)
    formats.open(path).to_store()
    assert 0 < again < reads.times / 2  # one shard of four, then all
    os.utime(shards[1], ns=(2, 2))
    same_batches(formats.open(path).to_store(), wanted)
    assert index.read_bytes() != content
    # Whatever it says, damaged indexes are made anew, and never believed.
    rng = np.random.default_rng(0)
    whole = index.read_bytes()
    for _ in range(20):
        hurt = bytearray(whole)
        hurt[rng.integers(len(hurt))] ^= 1 << rng.integers(8)
        index.write_bytes(hurt)
        same_batches(formats.open(path).to_store(), wanted)
    index.write_bytes(whole[: len(whole) // 2])
    same_batches(formats.open(path).to_store(), wanted)
    write_checkpoint(index, {**read_checkpoint(index), "version": 2})  # so is that of another version
    same_batches(formats.open(path).to_store(), wanted)
    assert index.read_bytes() == whole


def test_a_dataset_that_is_only_read_has_its_index_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, "vector")
    monkeypatch.setenv("MOUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *arguments, **options: False)
    same_batches(formats.open(path).to_store(), in_memory(path))
    assert list((tmp_path / "cache").rglob("*.index"))
    assert not (path / ".mouse").exists()


def records(shard: Path) -> list[tuple[int, int]]:
    """Where the data of each record begin, and how many bytes they are."""
    data, place, found = shard.read_bytes(), 0, []
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        found.append((place + 12, length))
        place += length + 16
    return found


def test_damaged_records_are_errors_that_name_shard_and_record(tmp_path: Path) -> None:
    path = made(tmp_path)
    shard = sorted(path.glob("*train*tfrecord-*"))[1]
    (first, _), (second, length) = records(shard)
    data = shard.read_bytes()

    def opened(content: bytes) -> DatasetStore:
        shutil.rmtree(path / ".mouse", ignore_errors=True)
        shard.write_bytes(content)
        return formats.open(path).to_store()

    hurt = bytearray(data)
    hurt[second + length // 2] ^= 4
    store = opened(bytes(hurt))  # the record is looked into when a row of it is wanted
    with pytest.raises(DataError, match=rf"{shard.name}, record 1 at byte {second - 12}: the CRC of the record's"):
        BatchSource(store, sequence_length=1, batch_size=store.snapshot().num_rows)[0]
    # Heads of records are read as ``read_tfds`` reads them.
    with pytest.raises(DataError, match=rf"{shard.name}, record 1 .*: expected a record of {length} bytes, found"):
        opened(data[:-5])
    with pytest.raises(DataError, match=rf"{shard.name}: expected 2 records, found 1"):
        opened(data[: second - 12])
    store = opened(data)
    shard.write_bytes(data[: second + 10])  # while it is open
    with pytest.raises(DataError, match=rf"{shard.name}"):
        BatchSource(store, sequence_length=1, batch_size=store.snapshot().num_rows)[0]
    assert first == 12


def framed(*examples: bytes) -> bytes:
    whole = b""
    for data in examples:
        head = struct.pack("<Q", len(data))
        whole += head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))
    return whole


@pytest.mark.parametrize(
    "example",
    [
        b"",
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x08\x01",
        b"\x12\x00",
        b"\x0a\x02\x0a\x7f",
        b"\xff" * 30,
    ],
)
def test_records_that_are_no_episodes(example: bytes, tmp_path: Path) -> None:
    path = made(tmp_path, "vector")
    shard = sorted(path.glob("*val*tfrecord-*"))[0]
    shard.write_bytes(framed(example))
    with pytest.raises(DataError, match=rf"{shard.name}, record 0 at byte 0"):
        formats.open(path, splits="val").to_store()


@pytest.mark.parametrize("final", [None, "drop", "mark"])
def test_episodes_whose_last_observation_is_missing(final: str | None, tmp_path: Path) -> None:
    episodes = [rlds_episode(log) for log in record(Counting(LENGTHS, "image"), 6)]
    for episode in episodes[1:4]:
        episode["steps"] = episode["steps"][:-1]
    write(tmp_path / "arrays", features_of("image"), {"train": episodes})
    path = as_tfrecord(tmp_path / "arrays")
    if final is None:
        with pytest.raises(ConfigError, match=r"record 1 .*: the observation that an episode ends in is not stored"):
            formats.open(path).to_store()
    else:
        same_batches(formats.open(path, final=final).to_store(), in_memory(path, final=final))


def test_array_records_do_not_stay(tmp_path: Path) -> None:
    path = made(tmp_path, "vector").with_name("arrays")
    assert formats.open(path).to_store().snapshot().num_rows == formats.open(path).to_table().num_rows


def test_datasets_are_mixed_by_weight(tmp_path: Path) -> None:
    stores = [formats.open(made(tmp_path / name, "vector")).to_store() for name in ("a", "b")]
    mixture = Mixture({"a": stores[0], "b": stores[1]}, weights={"a": 3, "b": 1})
    batch = BatchSource(mixture, sequence_length=2, batch_size=8)[0]
    assert batch["obs_continuous"].shape == (8, 2, 3)
    assert np.bincount(batch["member"][:, 0]).tolist() == [6, 2]


def test_described_is_what_is_there(tmp_path: Path) -> None:
    path = made(tmp_path, "vector")
    described = json.loads((path / "dataset_info.json").read_text())
    described["splits"][0]["shardLengths"][0] = "9"
    (path / "dataset_info.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="expected 9 records, found 2"):
        formats.open(path).to_store()
