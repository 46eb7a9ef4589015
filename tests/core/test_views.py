"""Stores that are views of others: which episodes they have, and that a loader takes them as it takes any store."""

from __future__ import annotations

import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, DatasetStore, PrefetchBatchifier, Snapshot
from mouse_core.replay import ReplayBuffer
from mouse_core.store import Store
from mouse_core.testing import SourceConformance, example_columns, example_store


class Later(Store):
    """The rows of a store that come after its first dataset."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def snapshot(self, rows: int | None = None) -> Snapshot:
        whole = self.store.snapshot(rows)
        count = whole.num_rows - whole.segments[0].num_rows
        return Snapshot(whole.segments[1:], whole.config, count, whole.budget, store_rows=whole.store_rows)


def two_parts() -> DatasetStore:
    store = DatasetStore().from_dataset(example_store(40).to_dataset())
    store.extend(example_columns(60))
    return store


class TestStoreOfOnesOwn(SourceConformance):
    def make(self) -> BatchSource:
        return BatchSource(Later(two_parts()), 8, 4)


def test_a_store_of_ones_own_is_taken_where_a_store_is() -> None:
    store = two_parts()
    later = Later(store)
    assert len(later) == 60
    assert later.alignment == "arrived"
    wanted = BatchSource(example_store(60), 8, 4)
    np.testing.assert_array_equal(BatchSource(later, 8, 4)[3]["obs_discrete"], wanted[3]["obs_discrete"])
    assert len(ReplayBuffer(later, batch_size=4)) == 60
    with pytest.raises(ConfigError, match="rows in"):
        later.snapshot(1000)


def test_a_loader_over_a_store_of_ones_own_resumes_and_refreshes() -> None:
    store = two_parts()
    with PrefetchBatchifier(Later(store), 8, 4) as loader:
        loader.next_batch()
        state = loader.state_dict()
        wanted = loader.next_batch()
        assert state["rows"] == 100  # of which the store's snapshot is made again
    store.extend(example_columns(50))
    with PrefetchBatchifier(Later(store), 8, 4) as loader:
        loader.load_state_dict(state)
        found = loader.next_batch()
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values)
        loader.refresh()
        assert loader.source.snapshot.num_rows == 110
