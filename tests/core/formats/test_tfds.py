"""RLDS datasets as TFDS writes them (without TensorFlow), compared with what the environment returned."""

import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, formats
from mouse_core.formats.rlds import read_rlds
from mouse_core.formats.tfds import parse_example, read_tfds
from mouse_core.images import decode_image
from tests.core.formats.recording import Counting, Episode, check_rows, record, rlds_episode

library = pytest.importorskip("tensorflow_datasets")
array_record = pytest.importorskip("array_record.python.array_record_module")
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
    """What TFDS takes without TensorFlow: pictures as PNG, of 16 bits those of one channel; tuples as mappings."""
    if isinstance(value, dict):
        return {key: prepared(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {str(index): prepared(item) for index, item in enumerate(value)}
    if isinstance(value, np.ndarray) and value.ndim == 3:
        stream = io.BytesIO()
        Image.fromarray(value[:, :, 0] if value.dtype == np.uint16 else value).save(stream, "PNG")
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


def framed(*examples: bytes) -> bytes:
    whole = b""
    for data in examples:
        head = struct.pack("<Q", len(data))
        whole += head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))
    return whole


def as_tfrecord(path: Path) -> Path:
    """The same dataset in TFRecord files, framed by an oracle of its own."""
    target = path.with_name("tfrecord")
    target.mkdir()
    for file in path.iterdir():
        if "array_record" not in file.name:
            text = file.read_text().replace("array_record", "tfrecord")
            (target / file.name).write_text(text)
            continue
        records = framed(*array_record.ArrayRecordReader(str(file)).read_all())
        (target / file.name.replace("array_record", "tfrecord")).write_bytes(records)
    return target


@pytest.mark.parametrize("kind", ["vector", "discrete", "image", "nested"])
def test_rows_are_what_the_environment_returned(kind: str, tmp_path: Path) -> None:
    logs = list(record(Counting(LENGTHS, kind), 6))
    path = tmp_path / "counting" / "1.2.3"
    write(path, features_of(kind), {"train": [rlds_episode(log) for log in logs[:5]], "val": [rlds_episode(logs[5])]})
    stream = read_tfds(tmp_path, batch_rows=4)
    check_rows(stream.to_table(), logs, reward_dtype="float64")
    assert (stream.format, stream.format_metadata["name"]) == ("tfds", "counting")
    assert max(batch.num_rows for batch in stream) <= 4
    records = as_tfrecord(path)
    assert read_tfds(records).digest() == stream.digest()
    check_rows(read_tfds(path, splits="val").to_table(), logs[5:])
    assert read_tfds(path, splits=["val", "train"]).to_table().num_rows == stream.to_table().num_rows


def test_features_of_episodes_and_more_of_steps(tmp_path: Path) -> None:
    (log,) = record(Counting((3,)), 1)
    episode = rlds_episode(log)
    for number, step in enumerate(episode["steps"]):
        step |= {"language": f"do {number}", "u64": np.uint64(2**64 - 1 - number), "half": np.float16(number)}
        step |= {"flags": np.array([True, number == 1]), "small": np.int8(-number)}
    tensor, words = library.features.Tensor, library.features.Text()
    more = {"language": words, "u64": np.uint64, "small": np.int8, "half": tensor(shape=(), dtype=np.float16)}
    more["flags"] = tensor(shape=(2,), dtype=np.bool_)
    features = features_of("vector", steps=more, episode_metadata={"file": words, "score": np.float32})
    write(tmp_path / "x", features, {"train": [episode | {"episode_metadata": {"file": "a.h5", "score": 0.5}}]})
    # A kind that cannot be made without TensorFlow.
    described = json.loads((tmp_path / "x" / "features.json").read_text())
    inner = described["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    inner["sound"] = {"pythonClassName": "tensorflow_datasets.core.features.audio_feature.Audio", "audio": {}}
    (tmp_path / "x" / "features.json").write_text(json.dumps(described))
    stream = read_tfds(tmp_path / "x")
    note, _ = stream.notes
    assert note.startswith("['steps/sound'] cannot be columns")
    found = stream.to_table().to_pydict()
    assert not [name for name in found if "sound" in name]
    assert found["metadata_language"] == ["do 0", "do 1", "do 2", "do 3"]
    assert found["metadata_u64"] == [2**64 - 1 - number for number in range(4)]
    assert found["metadata_half"] == [0, 1, 2, 3]
    assert found["metadata_flags"] == [[True, number == 1] for number in range(4)]
    assert found["metadata_small"] == [0, -1, -2, -3]
    assert found["metadata_episode_episode_metadata_file"] == ["a.h5"] * 4


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
    for wrong, message in ((data + lists, "found a SequenceExample"), (data[:-1], "expected an Example: ")):
        with pytest.raises(DataError, match=message):
            parse_example(wrong)


def dataset(path: Path) -> Path:
    logs = list(record(Counting(LENGTHS), 6))
    write(path / "array", features_of("vector"), {"train": [rlds_episode(log) for log in logs]})
    return as_tfrecord(path / "array")


SPOILED: list[tuple[Any, str]] = [
    (lambda data: data[:-1], r"00000: |00000, record 1 at byte \d+: expected a record of"),
    (lambda data: data[:5], "record 0 at byte 0: expected 12 bytes of a record's head, found 5"),
    (lambda data: b"\x01" + data[1:], "record 0 at byte 0: the CRC of the record's length"),
    (lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:], r"record 0 .*the CRC of the record's \d+ bytes"),
    (
        lambda data: struct.pack("<QI", 2**62, masked(struct.pack("<Q", 2**62))) + data[12:],
        "expected a record of 4611686018427387904 bytes, found the file's end",
    ),
    (lambda data: b"", "expected 2 records, found 0"),
    (lambda data: data + data, "expected 2 records, found 4"),
]


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = dataset(tmp_path)
    file = path / "counting-train.tfrecord-00000"
    whole = file.read_bytes()
    for spoil, message in SPOILED:
        file.write_bytes(spoil(whole))
        with pytest.raises(DataError, match=message) as caught:
            list(read_tfds(path))
        assert str(file) in str(caught.value)


def test_damaged_descriptions_are_named(tmp_path: Path) -> None:
    path = dataset(tmp_path)
    kept = {name: (path / name).read_text() for name in ("features.json", "dataset_info.json")}

    def inner(found: Any) -> Any:
        return found["featuresDict"]["features"]

    def steps(found: Any) -> Any:
        return inner(inner(found)["steps"]["sequence"]["feature"])

    changes: list[Any] = [
        lambda info: info["splits"][0]["shardLengths"].append("3"),
        lambda info: info.update(fileFormat="riegeli"),
        lambda info: info.update(splits=[{}]),
        lambda found: inner(found).pop("steps"),
        lambda found: steps(found).pop("is_first"),
        lambda found: steps(found)["observation"]["tensor"].update(dtype="int32"),
        lambda found: steps(found)["observation"]["tensor"].update(shape={"dimensions": ["9"]}),
        lambda found: steps(found)["observation"]["tensor"].update(dtype="nonsense"),
    ]
    for number, change in enumerate(changes):
        name = "dataset_info.json" if number < 3 else "features.json"
        for other, text in kept.items():
            (path / other).write_text(text)
        described = json.loads(kept[name])
        change(described)
        (path / name).write_text(json.dumps(described))
        with pytest.raises((DataError, ConfigError), match=name if number < 3 else str(path)):
            read_tfds(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a folder with features.json .* found none"):
        read_tfds(tmp_path)
    path = dataset(tmp_path)
    with pytest.raises(ConfigError, match="found 2"):
        read_tfds(tmp_path)
    with pytest.raises(ConfigError, match=r"splits: expected names among \['train'\], found 'test'"):
        read_tfds(path, splits="test")


def made(folder: Path, kind: str = "image", **more: Any) -> Path:
    """Six episodes in three shards and two splits."""
    logs = list(record(Counting(LENGTHS, kind), 6))
    episodes = [rlds_episode(log) for log in logs]
    write(folder / "arrays", features_of(kind, **more), {"train": episodes[:5], "val": episodes[5:]})
    return as_tfrecord(folder / "arrays")


@pytest.mark.parametrize("kind", ["vector", "image"])
def test_rows_are_saved_as_a_store_of_the_same_batches(kind: str, tmp_path: Path) -> None:
    path = made(tmp_path, kind)
    options = {"splits": ["val", "train"], "last_step": "transition", "final": "mark"}
    store = DatasetStore.open(path, **options)
    assert len(store) == len(DatasetStore.open(path)) + 6
    formats.open(path, **options).save(tmp_path / "saved")
    again = DatasetStore.open(tmp_path / "saved")
    sources = [BatchSource(one, sequence_length=3, batch_size=4, seed=1) for one in (store, again)]
    for index in range(2 * len(sources[0])):
        batch, wanted = (source[index] for source in sources)
        assert sorted(batch) == sorted(wanted)
        for name, values in batch.items():
            assert values.dtype == wanted[name].dtype
            assert np.array_equal(values, wanted[name]), name
    if kind == "image":
        assert batch["observation"].shape == (4, 3, 36, 40, 3)
        assert pa.types.is_struct(store.columns["observation"])
        for row in formats.open(path, **options).to_table().to_pylist():
            assert decode_image(row["observation"]).any() == (not row["observation_missing"])


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
                        "cameras": {"wrist": image(n), "front": image(n)}, "depth": image(n, 1), "q": 0.5 * n
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
    path, pictures = with_cameras(tmp_path), ["cameras.front", "cameras.wrist"]
    table = formats.open(path).to_table()
    files = [f"observation.{name}" for name in pictures] + ["metadata_goal"]
    assert [field.name for field in table.schema if pa.types.is_struct(field.type)] == files
    assert table.column("observation.depth").type.value_type.value_type.value_type == pa.uint16()
    assert table.column("metadata_episode_robot").to_pylist()[7] == "arm 1"
    batch = BatchSource(DatasetStore.open(path), sequence_length=1, batch_size=18, sampling="last")[0]
    for number, row in enumerate(table.to_pylist()):
        for name in files[:2]:
            assert np.array_equal(batch[name][number, 0], decode_image(row[name]))
        assert np.array_equal(batch["observation.depth"][number, 0], row["observation.depth"])


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
    with pytest.raises(DataError):
        DatasetStore.open(path, splits="val")


def test_episodes_whose_last_observation_is_missing(tmp_path: Path) -> None:
    logs = list(record(Counting(LENGTHS, "vector"), 6))
    episodes = [rlds_episode(log) for log in logs]
    episodes[1]["steps"] = episodes[1]["steps"][:-1]
    write(tmp_path / "arrays", features_of("vector"), {"train": episodes})
    with pytest.raises(ConfigError, match="episode 1: the final observations of episodes are not stored"):
        DatasetStore.open(tmp_path / "arrays")
    whole = len(read_rlds(episodes, final="mark").to_table())
    assert len(DatasetStore.open(tmp_path / "arrays", final="mark")) == whole
    assert len(DatasetStore.open(tmp_path / "arrays", final="drop")) == whole - 1
