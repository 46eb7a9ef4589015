"""Windows that stay within a task, or within one value of any column; and codes of "done" of one's own."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, DatasetStore, Field
from mouse_core.mixtures import Mixture
from mouse_core.sampling import Column, StretchWindows
from mouse_core.store.derived import DerivedStore, IsFirst, Terminated, Truncated
from mouse_core.testing import SourceConformance, WindowSamplerConformance

CODES = ("alive", "terminal", "truncated", "task terminal", "task truncated", "alive, saved")


def done_field(*labels: str) -> Field:
    return Field("done", dtype="int64", shape=(), bounds=(0, len(labels) - 1), required=True, labels=labels)


def store_of(
    values: list[Any], done: list[int], *, parts: int = 2, column: str = "task", **options: Any
) -> DatasetStore:
    """A store of as many rows, the first part of which is a dataset in batches of 3."""
    store = DatasetStore(**options)
    count = len(values)
    cut = count // parts
    columns = {"action": [0] * count, "reward": [0.0] * count, "done": done, "row": list(range(count)), column: values}
    if cut:
        first = pa.table({name: given[:cut] for name, given in columns.items()})
        store.from_dataset(pa.Table.from_batches(first.to_batches(max_chunksize=3)))
    store.extend({name: given[cut:] for name, given in columns.items()})
    return store


def stretches_of(values: list[Any]) -> list[list[int]]:
    """Rows by stretch of one value, in plain Python."""
    found: list[list[int]] = []
    for row, value in enumerate(values):
        if not row or value != values[row - 1]:
            found.append([])
        found[-1].append(row)
    return found


class TestStretchWindows(WindowSamplerConformance):
    def make(self) -> StretchWindows:
        return StretchWindows(4, 3, column="observation_discrete")


class TestTaskSource(SourceConformance):
    def make(self) -> BatchSource:
        values = [name for number, name in enumerate(["a", "b", "a"] * 8) for _ in range(3 + number % 4)]
        return BatchSource(
            store_of(values, [0, 1] * (len(values) // 2) + [0] * (len(values) % 2)), 5, 4, boundary="task"
        )


@given(
    boundary=st.sampled_from(["task", Column("task")]),
    values=st.lists(st.sampled_from(["push", "pull", None]), min_size=2, max_size=40),
    length=st.integers(1, 6),
    pad=st.booleans(),
    sampling=st.sampled_from(["random", "batch"]),
)
def test_windows_lie_in_one_stretch(boundary: Any, values: list[Any], length: int, pad: bool, sampling: str) -> None:
    store = store_of([*values, "push"], [0, 1] * (len(values) // 2) + [0] * (1 + len(values) % 2))
    stretches = stretches_of([*values, "push"])
    fields = [Field("row", dtype="int64", shape=())]
    again = DatasetStore(fields=fields).from_dataset(store.to_dataset())
    possible = [rows for rows in stretches if pad or len(rows) >= length]
    if not possible:
        with pytest.raises(ConfigError, match="found episodes of at most"):
            BatchSource(again, length, 4, sampling, boundary=boundary, pad=pad)
        return
    source = BatchSource(again, length, 4, sampling, boundary=boundary, pad=pad)
    seen: set[int] = set()
    for index in range(12):
        batch = source[index]
        for rows, there in zip(batch["row"].tolist(), batch["mask"].tolist(), strict=True):
            found = [row for row, known in zip(rows, there, strict=True) if known]
            stretch = next(stretch for stretch in stretches if found[0] in stretch)
            assert found == list(range(found[0], min(found[0] + length, stretch[-1] + 1)))
            assert pad or all(there)
            seen |= {*found}
    if sampling == "batch" and pad and len(stretches) * 2 <= 12:
        assert seen == set(range(len(values) + 1))  # every row, in twelve batches of four


def test_tasks_end_by_codes_that_say_so() -> None:
    done = [0, 1, 0, 3, 0, 0, 2, 0, 4, 0]
    store = store_of([0] * 10, done, column="x", fields=[done_field(*CODES)])
    assert store.snapshot().stretch_starts("").tolist() == [0, 4, 9]
    source = BatchSource(store, 4, 64, boundary="task", pad=False)
    assert {int(start) for start in source.plan(0).starts} <= {0, 4, 5}
    assert "StretchWindows" in repr(source.sampler)


def test_codes_of_ones_own_say_what_ends_an_episode() -> None:
    done = [0, 5, 0, 3, 0, 1, 5, 4, 0, 2]
    store = store_of([0] * 10, done, parts=20, column="x", fields=[done_field(*CODES)])
    assert store.episodes.column("start").to_pylist() == [0, 4, 6, 8]
    assert store.episodes.column("done").to_pylist() == [3, 1, 4, 2]
    derived = DerivedStore(store, {"over": Terminated(), "cut": Truncated(), "first": IsFirst()})
    batch = BatchSource(derived, 10, 1, "last", fields=["over", "cut", "first"])[0]
    assert np.nonzero(batch["over"][0])[0].tolist() == [3, 5]
    assert np.nonzero(batch["cut"][0])[0].tolist() == [7, 9]
    assert np.nonzero(batch["first"][0])[0].tolist() == [0, 4, 6, 8]
    # What they mean travels with the rows.
    again = DatasetStore().from_dataset(store.to_dataset())
    assert again.snapshot().stretch_starts("").tolist() == [0, 4, 8]
    assert again.episodes.equals(store.episodes)


def test_codes_without_labels_end_episodes_but_for_0() -> None:
    field = Field("done", dtype="int64", shape=(), bounds=(0, 9))
    store = store_of([0] * 6, [0, 7, 0, 1, 9, 0], parts=20, column="x", fields=[field])
    assert store.episodes.column("start").to_pylist() == [0, 2, 4, 5]


def test_a_boundary_may_be_a_field_and_is_in_the_fingerprint() -> None:
    store = store_of([0, 0, 1, 1, 1, 2, 2, 2], [0, 1] * 4, column="level", fields=[Field("stage", "level", shape=())])
    by_field, by_column = (BatchSource(store, 2, 4, boundary=Column(name)) for name in ("stage", "level"))
    for index in range(4):
        np.testing.assert_array_equal(by_field[index]["stage"], by_column[index]["stage"])
        assert (by_field[index]["stage"][:, :1] == by_field[index]["stage"]).all()
    fingerprints = {
        BatchSource(store, 2, 4, boundary=one).fingerprint for one in ("stream", "episode", Column("level"))
    }
    assert len(fingerprints) == 3


def test_boundaries_hold_in_views_and_mixtures() -> None:
    values = [0] * 6 + [1] * 6 + [0] * 8
    store = store_of(values, [0, 1] * 10, column="level", fields=[Field("level", shape=())])
    view = store.where(level=0)
    assert view.snapshot().stretch_starts("level").tolist() == [0]
    mixture = Mixture([view, store.where(level=1)], field=None)
    batch = BatchSource(mixture, 3, 16, boundary=Column("level"), fields=["level"])[0]["level"]
    assert (batch == batch[:, :1]).all()


@pytest.mark.parametrize(
    ("boundary", "options", "said"),
    [
        ("tasks", {}, "'task'.* or a Column"),
        ("task", {}, "expected a column with tasks"),
        (Column("nothing"), {}, "one of the columns .*'x'.*found 'nothing'"),
        (Column("x"), {"weighting": "often"}, "weighting"),
        (Column("x"), {"windows": {"reward": [0, 1]}, "sequence_length": None, "pad": False}, "pad"),
    ],
)
def test_what_is_refused(boundary: Any, options: dict[str, Any], said: str) -> None:
    store = store_of([0, 0, 1, 1], [0, 1, 0, 1], column="x")
    with pytest.raises(ConfigError, match=said):
        BatchSource(store, **{"sequence_length": 2, "batch_size": 2, "boundary": boundary, **options})
