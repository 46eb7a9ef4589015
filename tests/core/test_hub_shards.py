"""Shards hold the rows of a push in one schema, and are written in bounded memory."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mouse_core import DatasetStore
from mouse_core.hub import push_to_hub
from mouse_core.metadata import DatasetMetadata, read_metadata
from tests.core.hub_client import head, push
from tests.core.hub_server import running_hub

# Together they take many seconds.
pytestmark = pytest.mark.slow

V = datasets.Value
# Columns that fit together, each with ways to store it; the values suit every way.
WAYS: dict[str, Sequence[Any]] = {
    "vector": [datasets.List(V("float32")), datasets.List(V("float32"), length=2), datasets.LargeList(V("float32"))],
    "frame": [datasets.List(datasets.List(V("uint8"))), datasets.Array2D((1, 2), "uint8")],
    "text": [V("string"), V("null")],
    "label": [V("int64"), datasets.ClassLabel(num_classes=100)],
    "struct": [{"a": datasets.List(V("int16"))}, {"a": datasets.List(V("int16"), length=1)}],
    "empty": [datasets.List(V("null")), datasets.List(V("int8"))],
}
STEPS: dict[str, Any] = {"action": V("int64"), "reward": V("float64"), "done": V("int64")}


def value(name: str, feature: Any, row: int) -> Any:
    made = {"vector": [row, -row], "frame": [[row, 1]], "text": str(row), "struct": {"a": [row]}, "empty": []}
    return None if feature == V("null") else made.get(name, row)


@st.composite
def recorded(draw: st.DrawFn) -> datasets.Dataset:
    """Some of the columns, each stored in one of its ways, with nulls; whole, in pieces or in another order."""
    names = draw(st.lists(st.sampled_from(sorted(WAYS)), min_size=1, unique=True))
    features = {**STEPS, **{name: draw(st.sampled_from(WAYS[name])) for name in names}}
    n = draw(st.integers(1, 12))
    null = draw(st.sets(st.tuples(st.sampled_from(names), st.integers(0, n - 1))))
    columns = {
        name: [None if (name, row) in null else value(name, feature, row) for row in range(n)]
        for name, feature in features.items()
    }
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    first = draw(st.integers(0, n - 1))
    how = draw(st.sampled_from(["whole", "slice", "pieces", "shuffled"]))
    if how == "slice":
        return dataset.select(range(first, n))
    if how == "pieces":
        return datasets.concatenate_datasets([dataset.select(range(first, n)), dataset])
    return dataset.shuffle(seed=first) if how == "shuffled" else dataset


@pytest.mark.filterwarnings("ignore")  # of rewards where episodes begin, and of episodes that are joined
@given(parts=st.lists(recorded(), min_size=1, max_size=3), max_bytes=st.sampled_from([1, 2000, 10**6]))
def test_shards_hold_the_rows_in_order_under_one_schema(parts: list[datasets.Dataset], max_bytes: int) -> None:
    stores = [DatasetStore(alignment="arrived").from_dataset(part) for part in parts]
    with running_hub() as hub:
        result = push(hub, {"train": stores}, max_shard_size=max_bytes)
        files = head(hub).files
    tables = [pq.read_table(io.BytesIO(files[path].data)) for path in result.shards]
    assert len({str(datasets.Features.from_arrow_schema(table.schema)) for table in tables}) == 1
    assert all(read_metadata(table) == DatasetMetadata("arrived") for table in tables)
    names = list(dict.fromkeys(name for part in parts for name in part.column_names))
    rows = [row for part in parts for row in part.with_format("arrow")[:].to_pylist()]
    assert pa.concat_tables(tables).to_pylist() == [{name: row.get(name) for name in names} for row in rows]
    assert max_bytes > 1 or len(tables) == len(rows)


def test_memory_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (100, 100), dtype=np.uint8)
    picture = tmp_path / "noise.png"
    Image.fromarray(noise).save(picture)
    size = picture.stat().st_size
    monkeypatch.setattr("mouse_core.hub._push._ROW_GROUP_BYTES", 16 * size)

    def peak(n: int) -> int:
        columns = {"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "picture": [str(picture)] * n}
        dataset = datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Image()).shuffle(seed=0)
        store = DatasetStore(image_roots=[tmp_path]).from_dataset(dataset)
        before, most, rows = pa.total_allocated_bytes(), 0, 0

        def advance(count: int) -> None:
            nonlocal most, rows
            most, rows = max(most, pa.total_allocated_bytes() - before), rows + count

        @contextmanager
        def bar(*_: Any, **__: Any) -> Iterator[Callable[[int], None]]:
            yield advance

        monkeypatch.setattr("mouse_core.hub._push.progress_bar", bar)
        result = push_to_hub({"train": store}, repo_id="a/b", dry_run=True, max_shard_size=64 * size)
        assert rows == n
        assert result.num_bytes > n * size / 100  # equal pictures are stored once a page
        return most

    assert peak(1000) < peak(100) + 50 * size
