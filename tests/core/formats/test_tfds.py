"""RLDS datasets as TFDS writes them (without TensorFlow), compared with what the environment returned."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core.errors import ConfigError, DataError
from mouse_core.formats._files.tfrecord import array_records
from mouse_core.formats.rlds import read_rlds
from mouse_core.formats.tfds import read_tfds, write_tfds
from mouse_core.formats.tfds._features import parse_example
from tests.core.formats.recording import Counting, Episode, check_rows, record, rlds_episode

library = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")
LENGTHS = (4, -3, 1, -1, 9, 2)


def features_of(kind: str, **more: Any) -> Any:
    f = library.features
    vector = f.Tensor(shape=(3,), dtype=np.float32)
    observation: Any = vector
    action: Any = f.Tensor(shape=(2,), dtype=np.float64, encoding="zlib")
    if kind == "discrete":
        observation, action = f.Scalar(dtype=np.int64), f.ClassLabel(num_classes=7)
    elif kind == "image":
        observation, action = f.Image(shape=(36, 40, 3), encoding_format="png"), f.ClassLabel(num_classes=7)
    elif kind == "nested":
        observation = {
            "arm": {"angle": vector, "grip": np.int64},
            "parts": {"0": vector, "1": f.Tensor(shape=(4,), dtype=np.int8)},
            "word": f.Text(),
        }
        action = {"move": f.Tensor(shape=(2,), dtype=np.float64, encoding="bytes"), "press": np.int64}
    steps = {"observation": observation, "action": action, "discount": np.float32}
    steps |= {"reward": f.Tensor(shape=(), dtype=np.float64, encoding="zlib"), **more.pop("steps", {})}
    return f.FeaturesDict(
        {"steps": f.Dataset(steps | dict.fromkeys(("is_first", "is_last", "is_terminal"), np.bool_)), **more}
    )


def prepared(value: Any) -> Any:
    """What TFDS takes without TensorFlow: pictures as PNG, tuples as mappings."""
    if isinstance(value, dict):
        return {key: prepared(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {str(index): prepared(item) for index, item in enumerate(value)}
    if isinstance(value, np.ndarray) and value.ndim == 3:
        from PIL import Image

        stream = io.BytesIO()
        Image.fromarray(value).save(stream, "PNG")
        stream.seek(0)
        return stream
    return value


def write(path: Path, features: Any, splits: dict[str, Sequence[Any]], *, per_file: int = 2) -> None:
    """Write episodes with TFDS's own writer."""
    path.mkdir(parents=True)
    identity = library.core.dataset_info.DatasetIdentity(
        name="counting", version=library.core.Version("1.2.3"), data_dir=str(path), module_name=""
    )
    info = library.core.DatasetInfo(builder=identity, features=features)
    writer = library.core.SequentialWriter(info, max_examples_per_shard=per_file, file_format="array_record")
    writer.initialize_splits(list(splits))
    for name, episodes in splits.items():
        writer.add_examples({name: [prepared_episode(episode) for episode in episodes]})
    writer.close_all()


def prepared_episode(episode: dict[str, Any]) -> dict[str, Any]:
    return {**episode, "steps": [{key: prepared(value) for key, value in step.items()} for step in episode["steps"]]}


def slow_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for octet in data:
        crc ^= octet
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = slow_crc(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def as_tfrecord(path: Path) -> Path:
    """The same dataset in TFRecord files, framed by an oracle of its own."""
    target = path.with_name("tfrecord")
    target.mkdir()
    for file in path.iterdir():
        if "array_record" not in file.name:
            text = file.read_text().replace("array_record", "tfrecord")
            (target / file.name).write_text(text)
            continue
        framed = b""
        for data, _ in array_records(file):
            head = struct.pack("<Q", len(data))
            framed += head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))
        (target / file.name.replace("array_record", "tfrecord")).write_bytes(framed)
    return target


@pytest.mark.parametrize("kind", ["vector", "discrete", "image", "nested"])
def test_rows_are_what_the_environment_returned(kind: str, tmp_path: Path) -> None:
    logs = list(record(Counting(LENGTHS, kind), 6))
    path = tmp_path / "counting" / "1.2.3"
    write(path, features_of(kind), {"train": [rlds_episode(log) for log in logs[:5]], "val": [rlds_episode(logs[5])]})
    stream = read_tfds(tmp_path, batch_rows=4)
    check_rows(stream.to_table(), logs, reward_dtype="float64")
    assert (stream.episodes, stream.format, stream.metadata["name"]) == (6, "tfds", "counting")
    assert max(batch.num_rows for batch in stream) <= 4
    records = as_tfrecord(path)
    assert read_tfds(records).digest() == stream.digest()
    check_rows(read_tfds(path, splits="val").to_table(), logs[5:])
    assert read_tfds(path, splits=["val", "train"]).to_table().num_rows == stream.to_table().num_rows


@pytest.mark.parametrize("kind", ["vector", "discrete", "image", "nested"])
def test_what_we_write_tfds_reads(kind: str, tmp_path: Path) -> None:
    logs = list(record(Counting(LENGTHS, kind), 6))
    rows = read_rlds([rlds_episode(log) for log in logs])
    write_tfds(rows, tmp_path / "ours", episodes_per_file=4)
    again = read_tfds(tmp_path / "ours")
    check_rows(again.to_table(), logs, reward_dtype="float64")
    assert again.schema.names == rows.schema.names
    with pytest.raises(ConfigError, match="path where nothing is"):
        write_tfds(rows, tmp_path / "ours")
    with pytest.raises(DataError, match="found none"):
        write_tfds(rows.to_table().slice(0, 0), tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    if kind == "image":
        return  # TFDS decodes pictures with TensorFlow or OpenCV only
    source = library.builder_from_directory(str(tmp_path / "ours")).as_data_source(split="train")
    for log, episode in zip(logs, source, strict=True):
        steps = list(episode["steps"])
        assert [float(step["reward"]) for step in steps[:-1]] == log.rewards
        assert [bool(step["is_last"]) for step in steps] == [False] * len(log) + [True]
        if kind == "vector":
            for step, observation in zip(steps, log.observations, strict=True):
                assert np.array_equal(step["observation"], observation)


def test_features_of_episodes_and_more_of_steps(tmp_path: Path) -> None:
    (log,) = record(Counting((3,)), 1)
    episode = rlds_episode(log)
    for number, step in enumerate(episode["steps"]):
        step |= {"language": f"do {number}", "u64": np.uint64(2**64 - 1 - number), "half": np.float16(number)}
        step |= {"flags": np.array([True, number == 1]), "small": np.int8(-number)}
    features = features_of(
        "vector",
        steps={
            "language": library.features.Text(),
            "u64": np.uint64,
            "half": library.features.Tensor(shape=(), dtype=np.float16),
            "flags": library.features.Tensor(shape=(2,), dtype=np.bool_),
            "small": np.int8,
        },
        episode_metadata={"file": library.features.Text(), "score": np.float32},
    )
    write(tmp_path / "x", features, {"train": [episode | {"episode_metadata": {"file": "a.h5", "score": 0.5}}]})
    # A kind that cannot be made without TensorFlow.
    described = json.loads((tmp_path / "x" / "features.json").read_text())
    inner = described["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    inner["sound"] = {"pythonClassName": "tensorflow_datasets.core.features.audio_feature.Audio", "audio": {}}
    (tmp_path / "x" / "features.json").write_text(json.dumps(described))
    stream = read_tfds(tmp_path / "x")
    note, _ = stream.notes
    assert note.startswith("['steps/sound'] cannot be columns")
    table = stream.to_table()
    assert not [name for name in table.column_names if "sound" in name]
    assert table.column("metadata_language").to_pylist() == ["do 0", "do 1", "do 2", "do 3"]
    assert table.column("metadata_u64").to_pylist() == [2**64 - 1 - number for number in range(4)]
    assert table.column("metadata_half").to_pylist() == [0, 1, 2, 3]
    assert table.column("metadata_flags").to_pylist() == [[True, number == 1] for number in range(4)]
    assert table.column("metadata_small").to_pylist() == [0, -1, -2, -3]
    assert table.column("metadata_episode_episode_metadata_file").to_pylist() == ["a.h5"] * 4


def test_what_an_episode_has_of_its_own_is_written_beside_its_steps(tmp_path: Path) -> None:
    episodes = [rlds_episode(log) for log in record(Counting((3, -2)), 2)]
    for number, episode in enumerate(episodes):
        episode |= {"file": f"{number}.h5", "goal": np.float32([number, 1]), "score": np.float64(number) / 3}
    rows = read_rlds(episodes)
    write_tfds(rows, tmp_path / "x")
    features = json.loads((tmp_path / "x" / "features.json").read_text())["featuresDict"]["features"]
    assert set(features) == {"steps", "file", "score", "goal"}
    assert read_tfds(tmp_path / "x").digest() == rows.digest()
    table = rows.to_table().drop_columns(["metadata_episode_file", "metadata_episode_score", "metadata_episode_goal"])
    mixed = table.append_column("metadata_episode_x", pa.array([1, 1, 1, 1, 2, 2, 3]))
    with pytest.raises(DataError, match="episode 1: metadata_episode_x: expected it to be the same in all rows"):
        write_tfds(mixed, tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_floats_that_tfds_rounds_are_noted(tmp_path: Path) -> None:
    logs: list[Episode] = list(record(Counting((3,)), 1))
    features = features_of("vector", steps={"wide": np.float64})
    episode = rlds_episode(logs[0])
    for step in episode["steps"]:
        step["wide"] = 0.1
    write(tmp_path / "x", features, {"train": [episode]})
    stream = read_tfds(tmp_path / "x")
    assert "32-bit floats" in stream.notes[0]
    assert stream.to_table().column("metadata_wide")[0].as_py() == float(np.float32(0.1))


def test_examples_of_every_wire_form() -> None:
    def field(number: int, body: bytes) -> bytes:
        assert len(body) < 128
        return bytes([number << 3 | 2, len(body)]) + body

    def entry(name: str, feature: bytes) -> bytes:
        return field(1, field(1, name.encode()) + field(2, feature))

    packed = field(3, field(1, bytes([5, 0x80, 0x01]) + b"\xff" * 9 + b"\x01"))
    single = field(3, b"\x08\x05\x08\x80\x01")
    floats = field(2, b"\x0d" + struct.pack("<f", 1.5) + b"\x0d" + struct.pack("<f", -2.0))
    texts = field(1, field(1, b"ab") + field(1, b""))
    data = field(1, entry("packed", packed) + entry("single", single) + entry("floats", floats) + entry("texts", texts))
    none = parse_example(field(1, entry("floats", field(2, b"")) + entry("packed", field(3, b""))))  # without steps
    assert [np.asarray(none[name]).tolist() for name in ("floats", "packed")] == [[], []]
    found = parse_example(data)
    assert np.asarray(found["packed"]).tolist() == [5, 128, -1]
    assert np.asarray(found["single"]).tolist() == [5, 128]
    assert np.asarray(found["floats"]).tolist() == [1.5, -2.0]
    assert found["texts"] == [b"ab", b""]
    lists = field(2, field(1, field(1, b"steps") + field(2, field(1, single) + field(1, packed))))
    with pytest.raises(DataError, match="found field 2 besides"):  # a SequenceExample, which TFDS does not write
        parse_example(data + lists)
    for wrong in (data[:-1], b"\x0a\xff", b"\x0b", b"\x08" + b"\xff" * 11, field(1, b"\x08\x01")[:-1]):
        with pytest.raises(DataError):
            parse_example(wrong)


def dataset(path: Path) -> Path:
    logs = list(record(Counting(LENGTHS), 6))
    write(path / "array", features_of("vector"), {"train": [rlds_episode(log) for log in logs]})
    return as_tfrecord(path / "array")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1], r"00000: |00000, record 1 at byte \d+: expected a record of"),
        (lambda data: data[:5], "record 0 at byte 0: expected 12 bytes of a record's head, found 5"),
        (lambda data: b"\x01" + data[1:], "record 0 at byte 0: the CRC of the record's length"),
        (
            lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:],
            "record 0 .*the CRC of the record's \\d+ bytes",
        ),
        (
            lambda data: struct.pack("<QI", 2**62, masked(struct.pack("<Q", 2**62))) + data[12:],
            "expected a record of 4611686018427387904 bytes, found the file's end",
        ),
        (lambda data: b"", "expected 2 records, found 0"),
        (lambda data: data + data, "expected 2 records, found 4"),
    ],
)
def test_damaged_records_are_named(spoil: Any, message: str, tmp_path: Path) -> None:
    path = dataset(tmp_path)
    file = path / "counting-train.tfrecord-00000"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        list(read_tfds(path))
    assert str(file) in str(caught.value)


def test_damaged_descriptions_are_named(tmp_path: Path) -> None:
    path = dataset(tmp_path)
    kept = {name: (path / name).read_text() for name in ("features.json", "dataset_info.json")}

    def spoiled(name: str, change: Any) -> Any:
        for other, text in kept.items():
            (path / other).write_text(text)
        described = json.loads(kept[name])
        change(described)
        (path / name).write_text(json.dumps(described))
        return pytest.raises((DataError, ConfigError), match=name if name == "dataset_info.json" else str(path))

    with spoiled("dataset_info.json", lambda info: info["splits"][0]["shardLengths"].append("3")):
        read_tfds(path)
    with spoiled("dataset_info.json", lambda info: info.update(fileFormat="riegeli")):
        read_tfds(path)
    with spoiled("dataset_info.json", lambda info: info.update(splits=[{}])):
        read_tfds(path)
    inner = lambda found: found["featuresDict"]["features"]  # noqa: E731
    steps = lambda found: inner(inner(found)["steps"]["sequence"]["feature"])  # noqa: E731
    with spoiled("features.json", lambda found: inner(found).pop("steps")):
        read_tfds(path)
    with spoiled("features.json", lambda found: steps(found).pop("is_first")):
        read_tfds(path)
    with spoiled("features.json", lambda found: steps(found)["observation"]["tensor"].update(dtype="int32")):
        read_tfds(path)
    with spoiled("features.json", lambda f: steps(f)["observation"]["tensor"].update(shape={"dimensions": ["9"]})):
        read_tfds(path)
    with spoiled("features.json", lambda found: steps(found)["observation"]["tensor"].update(dtype="nonsense")):
        read_tfds(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a folder with features.json .* found none"):
        read_tfds(tmp_path)
    path = dataset(tmp_path)
    with pytest.raises(ConfigError, match="found 2"):
        read_tfds(tmp_path)
    with pytest.raises(ConfigError, match=r"splits: expected some of \['train'\], found 'test'"):
        read_tfds(path, splits="test")
