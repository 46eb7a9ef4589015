"""Datasets as people have them: saved, sharded, mapped, filtered, split, copied; and back to datasets again."""

import dataclasses
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, DatasetStore, Field, MissingFieldError, SchemaError
from tests.core.oracle import assert_same, field_arrays, last_starts, windows

ROWS = 60


def recorded(count: int = ROWS, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "action": int(rng.integers(4)),
            "reward": float(rng.normal()),
            "xformed_reward": float(rng.normal()),
            "done": int(rng.choice([0, 0, 0, 1, 2])),
            "episode_step": row,
            "metadata_q_star": [float(value) for value in rng.normal(size=4)],
            "observation": [float(value) for value in rng.normal(size=3)],
            "observation_discrete": int(rng.integers(9)),
            "note": f"row {row}",
        }
        for row in range(count)
    ]


def assert_holds(store: DatasetStore, rows: list[dict[str, Any]], **options: Any) -> None:
    """The store's windows, at several lengths, are those of the rows."""
    assert len(store) == len(rows)
    arrays = field_arrays(rows, **options)
    for length in {min(7, len(rows)), len(rows)}:
        count = len(rows) // length
        source = BatchSource(store, length, count, sampling="last")
        assert_same(source[0], windows(arrays, last_starts(len(rows), length, count), length), length)
        source = BatchSource(store, length, 5, seed=length)
        for index in range(3):
            assert_same(source[index], windows(arrays, source.plan(index).starts, length), (length, index))


def appended(rows: list[dict[str, Any]]) -> DatasetStore:
    store = DatasetStore()
    for row in rows:
        store.append(row)
    return store


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return recorded()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "data"
    datasets.Dataset.from_list(rows).save_to_disk(str(folder), num_shards=3)
    assert datasets.load_from_disk(str(folder)).data.column("action").num_chunks == 3
    return folder


@pytest.fixture(scope="module")
def small_batches(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> datasets.Dataset:
    """The rows in one mapped file of record batches of 7."""
    path = tmp_path_factory.mktemp("small") / "small.arrow"
    made = datasets.Dataset.from_list(rows).map(lambda row: row, writer_batch_size=7, cache_file_name=str(path))
    assert made.cache_files
    assert made.data.column("action").num_chunks == 9
    return made


WAYS: dict[str, Callable[[datasets.Dataset], datasets.Dataset]] = {
    "as it is": lambda ds: ds,
    "filtered": lambda ds: ds.filter(lambda row: row["action"] != 2),
    "scattered shard": lambda ds: ds.shard(num_shards=3, index=1, contiguous=False),
    "chained": lambda ds: (
        ds.shuffle(seed=1).select(range(5, 50)).filter(lambda row: row["done"] == 0).select(range(3, 20))
    ),
    "flattened": lambda ds: ds.shuffle(seed=3).flatten_indices(),
    "twice": lambda ds: datasets.concatenate_datasets([ds, ds.shuffle(seed=2), ds.select(range(3))]),
    "mapped": lambda ds: ds.map(lambda row: {"reward": -row["reward"]}),
    "columns joined": lambda ds: datasets.concatenate_datasets(
        [ds.remove_columns(["observation", "note"]), ds.select_columns(["observation"])], axis=1
    ),
    "formatted columns": lambda ds: ds.with_format("numpy", columns=["action"]),
}


@pytest.mark.parametrize(
    ("where", "way"), [("memory", "chained"), ("three files", "twice"), *(("small batches", way) for way in WAYS)]
)
def test_what_datasets_makes_of_a_dataset(
    rows: list[dict[str, Any]], saved: Path, small_batches: datasets.Dataset, where: str, way: str
) -> None:
    if where == "small batches":
        whole = small_batches
    else:
        whole = datasets.Dataset.from_list(rows) if where == "memory" else datasets.load_from_disk(str(saved))
    dataset = WAYS[way](whole)
    # What `datasets` itself says the rows are, in its plain format.
    wanted = [dataset.with_format(None)[number] for number in range(len(dataset))]
    assert wanted
    assert_holds(DatasetStore().from_dataset(dataset), wanted)


@pytest.mark.parametrize(
    ("feature", "fits"),
    [
        (datasets.Sequence(datasets.Value("float32")), True),
        (datasets.Sequence(datasets.Value("float32"), length=3), True),
        (datasets.LargeList(datasets.Value("float32")), True),
        (datasets.Sequence(datasets.Value("float64")), False),
        (datasets.Sequence(datasets.Value("int32")), False),
        (datasets.Value("float32"), False),
    ],
    ids=str,
)
def test_encodings_of_one_value_type_fit_together(feature: Any, fits: bool) -> None:
    rows = [{"action": n, "reward": 0.5, "done": 0, "observation": [1.0 * n, 2.0, 3.0]} for n in range(8)]
    first = datasets.Dataset.from_list(rows).cast_column("observation", datasets.Sequence(datasets.Value("float32")))
    other_rows = rows if not isinstance(feature, datasets.Value) else [row | {"observation": 1.5} for row in rows]
    second = datasets.Dataset.from_list(other_rows).cast_column("observation", feature)
    store = DatasetStore().from_dataset(first)
    if fits:
        assert_holds(store.from_dataset(second).from_dataset(first), rows * 3)
        return
    with pytest.raises(SchemaError, match=r"'observation'.*expected list of float.*found"):
        store.from_dataset(second)
    assert_holds(store, rows)


def test_other_fixed_width_is_padded() -> None:
    store, rows = DatasetStore(max_obs_continuous_dim=4), []
    for width in (2, 3):
        made = [{"action": n, "reward": 0.5, "done": 0, "observation": [1.0 * n, 2.0, 3.0][:width]} for n in range(4)]
        kind = datasets.Sequence(datasets.Value("float64"), length=width)
        store.from_dataset(datasets.Dataset.from_list(made).cast_column("observation", kind))
        rows += made
    assert_holds(store, rows, widths={"obs_continuous": 4})


@pytest.fixture
def splits() -> datasets.DatasetDict:
    names = ["train_b", "test", "eval_1", "train_a", "eval_2"]
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_list(recorded(6, seed)) for seed, name in enumerate(names)}
    )


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, ["train_b", "test", "eval_1", "train_a", "eval_2"]),
        ({"splits": ["train_a", "eval_1"]}, ["train_a", "eval_1"]),
        ({"splits": "eval_2"}, ["eval_2"]),
        ({"splits": ["test", "test"]}, ["test", "test"]),
        ({"split_pattern": "train_*"}, ["train_b", "train_a"]),
        ({"split_pattern": ["eval_*", "train_*"]}, ["eval_1", "eval_2", "train_b", "train_a"]),
        ({"split_pattern": ["*_1", "e*"]}, ["eval_1", "eval_2"]),
    ],
    ids=str,
)
def test_splits(splits: datasets.DatasetDict, options: dict[str, Any], taken: list[str]) -> None:
    wanted = [row for name in taken for row in splits[name]]
    for given in (splits, dict(splits)):
        assert DatasetStore().from_dataset(given, **options)[:] == wanted


def test_a_refused_dict_adds_no_split(splits: datasets.DatasetDict) -> None:
    bad = dict(splits) | {"eval_2": splits["eval_2"].remove_columns(["reward"])}
    store = DatasetStore().from_dataset(splits["test"])
    with pytest.raises(MissingFieldError, match="'reward'"):
        store.from_dataset(bad)
    assert_holds(store, list(splits["test"]))
    store.from_dataset(splits["eval_1"])
    assert_holds(store, [*splits["test"], *splits["eval_1"]])


def test_optional_columns_that_only_some_parts_have() -> None:
    """`episode_step` and `metadata_q_star` are filled in the others; where a field has no fill a null is an error."""
    full = recorded(5)
    bare = [{"action": 1, "reward": 0.0, "done": 0} for _ in range(4)]
    for first, second in ((full, bare), (bare, full)):
        kept = ("action", "reward", "done", "episode_step", "metadata_q_star")
        partial = [{name: row[name] for name in row if name in kept} for row in first + second]
        cut = len(first)
        store = DatasetStore().from_dataset(datasets.Dataset.from_list(partial[:cut]))
        store.from_dataset(datasets.Dataset.from_list(partial[cut:]))
        assert_holds(store, partial)
        held = store.to_dataset()
        assert held["episode_step"][:] == [row.get("episode_step") for row in partial]
        assert held["metadata_q_star"][:] == [row.get("metadata_q_star") for row in partial]


@pytest.mark.parametrize(
    ("value", "absent"),
    [(pa.nulls(4), True), (pa.nulls(4, pa.float64()), True), (pa.array([None, 0.5, None, 1.0]), False)],
    ids=["null type", "typed nulls", "some nulls"],
)
def test_a_column_that_is_null_throughout_is_absent(value: pa.Array, absent: bool) -> None:
    table = pa.table({"action": [0] * 4, "reward": [0.0] * 4, "done": [0] * 4, "episode_step": value})
    store = DatasetStore().from_dataset(table)
    source = BatchSource(store, 2, 1)
    assert ("time" in source.spec) is ("time" in source[0]) is not absent
    with pytest.raises(MissingFieldError, match="time") if absent else nullcontext():
        BatchSource(store, 2, 1, required_fields=["time"])


def test_presence_is_decided_by_the_rows_behind_a_mapping() -> None:
    """Not by those of the table: the first value may be later, earlier, or not among them at all."""
    steps = [None] * 4 + [4, None, 6, 7]
    q_star = [[1.0]] * 2 + [None] * 5 + [[1.0, 2.0, 3.0]]
    rows = [
        {"action": 0, "reward": 0.0, "done": 0, "episode_step": s, "metadata_q_star": q}
        for s, q in zip(steps, q_star, strict=True)
    ]
    dataset = datasets.Dataset.from_list(rows)

    def source(chosen: list[int], rows: int | None = None, **options: Any) -> BatchSource:
        store = DatasetStore().from_dataset(dataset.select(chosen, keep_in_memory=True))
        return BatchSource(store.snapshot(rows), 2, 1, sampling="last", **options)

    def times(chosen: list[int], rows: int | None = None) -> list[int]:
        found: list[int] = source(chosen, rows, fields=["time"])[0]["time"][0].tolist()
        return found

    store = DatasetStore().from_dataset(dataset)
    assert ["time" in store.snapshot(rows).spec for rows in (4, 5)] == [False, True]
    assert times([*range(8)], rows=5) == [-1, 4]
    assert times([7, 6, 4]) == [6, 4]
    assert times([0, 7]) == [-1, 7]
    assert times([6, 1, 2, 3, 5, 4]) == [-1, 4]
    assert times([6, 1, 2, 3, 5, 4], rows=4) == [-1, -1]
    assert "time" not in source([0, 3, 2, 5]).spec
    assert "time" not in source([1, 2, 3, 6], rows=3).spec
    assert "q_star" not in source([4, 3, 6, 0], rows=3).spec
    assert source([7, 0, 3]).spec["q_star"].shape == (3,)
    assert source([3, 2, 7, 5]).spec["q_star"].shape == (3,)


@pytest.mark.parametrize(
    ("values", "dim", "wanted"),
    [
        (pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float64(), 2)), None, [[1.0, 2.0]] * 2),
        ([[1.0, 2.0, 3.0], [4.0]], None, [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]),
        ([[1.0, 2.0, 3.0], [4.0]], 5, [[1.0, 2.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0, 0.0]]),
        ([1.0, 2.0], 2, [[1.0, 0.0], [2.0, 0.0]]),
    ],
)
def test_width_of_observations_from_the_type_or_the_first_row(values: Any, dim: int | None, wanted: Any) -> None:
    table = pa.table({"action": [0, 0], "reward": [0.0, 0.0], "done": [0, 0], "observation": values})
    source = BatchSource(DatasetStore(max_obs_continuous_dim=dim).from_dataset(table), 2, 1, sampling="last")
    assert source[0]["obs_continuous"].tolist() == [wanted]
    assert source.spec["obs_continuous"].shape == (len(wanted[0]),)


def test_number_of_actions_from_q_star() -> None:
    columns = {"action": [0, 0, 2], "reward": [0.0] * 3, "done": [0] * 3}
    table = pa.table(columns | {"metadata_q_star": [None, [1.0, 2.0, 3.0], [4.0]]})
    for dim in (None, 4):
        batch = BatchSource(DatasetStore(max_action_dim=dim).from_dataset(table), 3, 1, sampling="last")[0]
        wanted = [[], [1.0, 2.0, 3.0], [4.0]]
        assert batch["q_star"].tolist() == [[row + [-np.inf] * ((dim or 3) - len(row)) for row in wanted]]


@pytest.mark.parametrize("value_type", [pa.float32(), pa.float64(), pa.int64()], ids=str)
def test_vector_actions(value_type: pa.DataType) -> None:
    table = pa.table({"action": pa.array([[1, 2], [3, 4]], pa.list_(value_type)), "reward": [0.0, 0.0], "done": [0, 0]})
    batch = BatchSource(DatasetStore().from_dataset(table), 2, 1, sampling="last")[0]
    assert batch["action"].dtype == np.float32
    assert batch["action"].tolist() == [[[1.0, 2.0], [3.0, 4.0]]]


def test_fields_replace_and_extend_the_table() -> None:
    rows: list[dict[str, Any]] = [{"action": n, "reward": 0.25 * n, "done": 0, "log_prob": -0.5 * n} for n in range(5)]
    for n, row in enumerate(rows):
        more = {"return_to_go": None if n == 2 else n, "grid": [[n, 1], [2, 3]]}
        row |= {"observation.state": [1.0 * n, 2.0], **more}
    fields = [
        Field("log_prob"),
        Field("state", column="observation.state", dtype="float32", shape=(3,), pad=-1),
        Field("return_to_go", dtype="int32", fill=99),
        Field("reward", dtype="float64", required=True),
        Field("grid", dtype="uint8"),
        Field("unknown"),
    ]
    store = DatasetStore(fields=fields).from_dataset(datasets.Dataset.from_list(rows))
    source = BatchSource(store, 5, 1, sampling="last")
    batch = source[0]
    dtypes = {"log_prob": "float64", "state": "float32", "return_to_go": "int32", "grid": "uint8"}
    dtypes = {"action": "int64", "reward": "float64", "done": "int64", **dtypes}
    assert [(name, array.dtype.name) for name, array in batch.items()] == list(dtypes.items())
    assert batch["reward"].tolist() == [[0.0, 0.25, 0.5, 0.75, 1.0]]
    assert batch["log_prob"].tolist() == [[0.0, -0.5, -1.0, -1.5, -2.0]]
    assert batch["state"].tolist() == [[[1.0 * n, 2.0, -1.0] for n in range(5)]]
    assert batch["return_to_go"].tolist() == [[0, 1, 99, 3, 4]]
    assert batch["grid"].tolist() == [[row["grid"] for row in rows]]
    assert batch["grid"].shape == (1, 5, 2, 2)


def test_the_fingerprint_is_of_content_not_of_encoding(rows: list[dict[str, Any]], saved: Path, tmp_path: Path) -> None:
    on_disk = datasets.load_from_disk(str(saved))
    in_memory = datasets.Dataset.from_list(rows)
    parquet = tmp_path / "rows.parquet"
    pq.write_table(in_memory.data.table, parquet)
    in_parts = DatasetStore().from_dataset(on_disk.select(range(20)))
    for row in rows[20:31]:
        in_parts.append(row)
    in_parts.extend({name: [row[name] for row in rows[31:40]] for name in rows[0]})
    in_parts.from_dataset(in_memory.select(list(range(40, ROWS))))
    shutil.copytree(saved, tmp_path / "copy")
    stores = [
        DatasetStore().from_dataset(on_disk),
        DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "copy"))),
        DatasetStore().from_dataset(in_memory),
        DatasetStore().from_dataset(pq.read_table(parquet)),
        DatasetStore().from_dataset(on_disk.select(range(31))).from_dataset(on_disk.select(range(31, ROWS))),
        appended(rows),
        in_parts,
    ]
    for store in stores:
        assert_holds(store, rows)
    assert len({store.snapshot().fingerprint for store in stores}) == 1
    assert len({store.snapshot(17).fingerprint for store in stores}) == 1


def test_other_data_has_another_fingerprint(rows: list[dict[str, Any]]) -> None:
    def fingerprint(rows: list[dict[str, Any]], **options: Any) -> str:
        return DatasetStore(**options).from_dataset(datasets.Dataset.from_list(rows)).snapshot().fingerprint

    changed = [dict(row) for row in rows]
    changed[0]["reward"] += 1e-12
    ended = [dict(row) for row in rows]
    ended[-1]["observation"] = [*ended[-1]["observation"][:2], 0.5]
    found = [
        fingerprint(rows),
        fingerprint(rows[:-1]),
        fingerprint(rows[::-1]),
        fingerprint(changed),
        fingerprint(ended),
        fingerprint(rows, alignment="outgoing"),
        fingerprint([{key: row[key] for key in row if key != "episode_step"} for row in rows]),
        fingerprint([row | {"action": float(row["action"])} for row in rows]),
    ]
    assert len(set(found)) == len(found)
    assert all(isinstance(text, str) and text for text in found)


def test_a_pickled_source_gives_the_same_batches(rows: list[dict[str, Any]], saved: Path) -> None:
    disk = datasets.load_from_disk(str(saved))
    memory = datasets.Dataset.from_list(rows)
    store = DatasetStore().from_dataset(disk.shuffle(seed=0)).from_dataset(memory)
    for row in rows[:9]:
        store.append(row)
    source = BatchSource(store, 11, 4, sampling="sequential", seed=5, shard=(1, 2), dtypes={"reward": "float64"})
    source[0]
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint == source.fingerprint
    assert again.spec == source.spec
    for index in range(5):
        assert_same(again[index], source[index], index)


def test_a_pickle_carries_paths_not_data(tmp_path: Path) -> None:
    """The source of a dataset on disk is as small for 200,000 rows as for 200, used or not."""
    sizes = []
    for count in (200, 200_000):
        zeros = np.zeros(count, np.int64)
        columns = {"action": zeros, "reward": zeros * 0.5, "done": zeros}
        columns["observation"] = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(count * 4)), 4)
        datasets.Dataset(pa.table(columns)).save_to_disk(str(tmp_path / str(count)), num_shards=1)
        source = BatchSource(DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / str(count)))), 64, 2)
        sizes.append(len(pickle.dumps(source)))
        source[0]
        used = pickle.dumps(source)
        sizes.append(len(used))
        assert_same(pickle.loads(used)[3], source[3])
    assert max(sizes) < 20_000
    assert max(sizes) - min(sizes) < 500


def plain(dataset: datasets.Dataset) -> list[dict[str, Any]]:
    return [dict(row) for row in dataset]


def test_to_dataset_of_one_dataset_is_that_dataset(rows: list[dict[str, Any]], saved: Path) -> None:
    for dataset in (datasets.Dataset.from_list(rows), datasets.load_from_disk(str(saved)).shuffle(seed=4)):
        back = DatasetStore().from_dataset(dataset).to_dataset()
        assert plain(back) == plain(dataset)
        assert back.features == dataset.features
        assert back.cache_files == dataset.cache_files


def test_to_dataset_of_everything_together(rows: list[dict[str, Any]], saved: Path, tmp_path: Path) -> None:
    disk = datasets.load_from_disk(str(saved))
    store = DatasetStore().from_dataset(disk).from_dataset(datasets.Dataset.from_list(rows).shuffle(seed=1))
    wanted = plain(disk) + plain(datasets.Dataset.from_list(rows).shuffle(seed=1))
    for row in rows[:5]:
        store.append(row)
    store.extend({name: [row[name] for row in rows[5:9]] for name in rows[0]})
    wanted += rows[:9]
    back = store.to_dataset()
    assert plain(back) == wanted
    assert back.features == disk.features
    assert_holds(store, wanted)
    back.save_to_disk(str(tmp_path / "again"))
    again = DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "again")))
    assert_holds(again, wanted)
    assert again.snapshot().fingerprint == store.snapshot().fingerprint


def test_to_dataset_of_appended_rows_only() -> None:
    rows = recorded(1100)  # more than one block of memory
    store = appended(rows)
    back = store.to_dataset()
    assert plain(back) == rows
    assert_holds(DatasetStore().from_dataset(back), rows)
    store.append(rows[0])
    assert len(back) == len(rows)


@dataclasses.dataclass(frozen=True)
class At:
    places: tuple[int, ...]
    sequence_length: int

    @property
    def batch_size(self) -> int:
        return len(self.places)

    def batches_per_epoch(self, snapshot: Any) -> int:
        return 1

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> np.ndarray:
        return np.array(self.places)


@pytest.mark.parametrize("places", [(0, 200, 100, 210, 220), (0, 100, 200), (200, 0, 210, 0, 220, 0), (100, 0)])
def test_windows_that_follow_each_other_in_the_file_but_not_in_the_batch(places: tuple[int, ...]) -> None:
    """Two windows with a gap inside, of which one begins where the other ends, and others between them."""
    chosen = [*range(50), *range(60, 160), *range(170, 220), *range(300, 500)]
    numbers = np.arange(500)
    table = pa.table({"action": numbers % 3, "reward": numbers * 0.5, "done": numbers * 0, "episode_step": numbers})
    dataset = datasets.Dataset(table).select(chosen, keep_in_memory=True)
    source = BatchSource(DatasetStore().from_dataset(dataset), sampling=At(places, 100))
    wanted = np.array(chosen)[np.array(places)[:, None] + np.arange(100)]
    for batch in (source[0], source.gather(source.plan(3), stored=True)):
        assert np.array_equal(batch["time"], wanted)
        assert np.array_equal(batch["action"], wanted % 3)
        assert np.array_equal(batch["reward"], wanted * 0.5)


def test_rows_wider_than_one_gather_takes() -> None:
    """84x84 frames: a window of a few steps is longer than the longest run that is gathered at once."""
    frames = np.random.default_rng(0).integers(0, 256, (40, 84 * 84), np.uint8)
    table = pa.table(
        {
            "action": np.arange(40),
            "reward": np.zeros(40),
            "done": np.zeros(40, np.int64),
            "frame": pa.FixedSizeListArray.from_arrays(pa.array(frames.reshape(-1)), 84 * 84),
        }
    )
    cuts = [table.slice(0, 13), table.slice(13, 2), table.slice(15)]
    store = DatasetStore(fields=[Field("frame")]).from_dataset(pa.concat_tables(cuts))
    source = BatchSource(store, 6, 5)
    for index in range(4):
        plan = source.plan(index)
        wanted = np.stack([frames[start : start + 6] for start in plan.starts])
        assert np.array_equal(source[index]["frame"], wanted)
        wide = BatchSource(store, 6, 5, dtypes={"frame": "int64"})[index]["frame"]
        assert wide.dtype == np.int64
        assert np.array_equal(wide, wanted)
