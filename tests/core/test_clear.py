"""Stores that are cleared: what stays of them, and loops that learn from the latest rows alone."""

import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, DatasetStore, PrefetchBatchifier, SchemaError, StateError
from mouse_core.mixtures import Mixture
from mouse_core.testing import example_columns, example_store


def test_a_cleared_store_is_as_a_new_one_of_the_same_columns() -> None:
    store = example_store(70)
    before = store.snapshot()
    wanted = BatchSource(before, 8, 4)[2]
    columns = dict(store.columns)
    store.clear()
    assert len(store) == store.snapshot().num_rows == 0
    assert store.columns == columns
    with pytest.raises(ConfigError, match="found an empty store"):
        BatchSource(store)
    with pytest.raises(SchemaError, match="found also"):
        store.extend({**example_columns(3), "more": [1, 2, 3]})
    store.extend(example_columns(40, first=500))
    fresh = DatasetStore()
    fresh.extend(example_columns(40, first=500))
    assert store.snapshot().fingerprint == fresh.snapshot().fingerprint
    assert store[:] == fresh[:]
    for name, values in BatchSource(fresh, 8, 4)[3].items():
        np.testing.assert_array_equal(BatchSource(store, 8, 4)[3][name], values)
    for name, values in BatchSource(before, 8, 4)[2].items():  # what was there before is still there
        np.testing.assert_array_equal(values, wanted[name])


def test_rows_of_datasets_go_too_and_as_many_rows_as_before_are_others() -> None:
    store = DatasetStore().from_dataset(example_store(30).to_dataset())
    store.append({name: values[0] for name, values in example_columns(1, first=99).items()})
    before = store.snapshot()
    store.clear()
    store.extend(example_columns(31, first=200))
    assert store.snapshot() is not before
    assert store.snapshot().fingerprint != before.fingerprint
    store.clear()
    store.clear()
    assert store.from_dataset(example_store(5).to_dataset()).snapshot().num_rows == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_learns_from_its_latest_rollout_alone(workers: int) -> None:
    store, loader = example_store(24), None
    for rollout in range(4):
        if rollout:
            store.clear()
            store.extend(example_columns(24, first=1000 * rollout))
        if loader is None:
            loader = PrefetchBatchifier(store, 4, 6, "batch", num_workers=workers)
        else:
            loader.refresh()
        found = [loader.next_batch()["obs_continuous"] for _ in range(len(loader))]
        rows = np.concatenate(found).reshape(-1, 5)
        wanted = example_columns(24, first=1000 * rollout)["observation"]
        np.testing.assert_array_equal(rows[np.lexsort(rows.T)], wanted[np.lexsort(wanted.T)])
    assert loader is not None
    state = loader.state_dict()
    wanted_next = loader.next_batch()
    store.clear()
    with pytest.raises(StateError):
        PrefetchBatchifier(store.snapshot() if len(store) else example_store(60), 4, 6, "batch").load_state_dict(state)
    with pytest.raises(ConfigError, match="empty store"):
        loader.refresh()  # and nothing has changed
    store.extend(example_columns(24, first=3000))
    with PrefetchBatchifier(store, 4, 6, "batch") as other:
        other.load_state_dict(state)
        np.testing.assert_array_equal(other.next_batch()["reward"], wanted_next["reward"])
    loader.close()


def test_a_member_of_a_mixture_is_cleared() -> None:
    stores = {"recorded": example_store(50), "latest": example_store(50)}
    with PrefetchBatchifier(Mixture(stores), 4, 6, num_workers=0) as loader:
        loader.next_batch()
        stores["latest"].clear()
        stores["latest"].extend(example_columns(20, first=700))
        loader.refresh()
        batch = loader.next_batch()
    latest = example_columns(20, first=700)["observation"]
    mine = batch["obs_continuous"][batch["member"] == 1]
    assert set(map(tuple, mine.tolist())) <= set(map(tuple, latest.tolist()))
