"""Going on where a state was taken: anywhere, later, elsewhere, in other processes and with other shards."""

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier, StateError
from mouse_core.sampling import SAMPLERS, Column
from mouse_core.store.derived import DerivedStore, Return
from tests.core.oracle import assert_same


def table(rows: int, first: int = 0) -> pa.Table:
    numbers = np.arange(first, first + rows)
    return pa.table({"action": numbers % 3, "reward": numbers * 0.5, "done": numbers % 2, "episode_step": numbers})


def store_of(rows: int = 120) -> DatasetStore:
    return DatasetStore().from_dataset(table(rows))


def take(loader: PrefetchBatchifier, count: int) -> list[dict[str, np.ndarray]]:
    return [loader.next_batch() for _ in range(count)]


@given(
    sampling=st.sampled_from(list(SAMPLERS)),
    drop_last=st.booleans(),
    at=st.integers(0, 40),
    first=st.sampled_from([0, 1, 3]),
    second=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**64 - 1),
    grown=st.integers(0, 30),
    sent=st.sampled_from(["as it is", "pickled", "NumPy integers"]),
)
def test_resuming_at_any_index(
    sampling: str, drop_last: bool, at: int, first: int, second: int, seed: int, grown: int, sent: str
) -> None:
    """Under another number of workers, another look-ahead, another seed, and after the store has grown."""
    options: dict[str, Any] = {"sequence_length": 5, "batch_size": 4, "sampling": sampling, "drop_last": drop_last}
    store = store_of(97)
    source = BatchSource(store, seed=seed, **options)
    with PrefetchBatchifier(store, num_workers=first, seed=seed, **options) as loader:
        take(loader, at)
        state = loader.state_dict()
        assert set(state) == {"seed", "next_index", "rows", "epoch_start", "fingerprint", "configuration"}
        assert (state["seed"], state["next_index"], state["rows"], state["epoch_start"]) == (seed, at, 97, 0)
        assert json.loads(json.dumps(state)) == state
        assert len(json.dumps(state)) < 1200
        following = take(loader, 9)
    for number in range(grown):
        store.append({"action": 0, "reward": 0.0, "done": 0, "episode_step": number})
    forms: dict[str, Any] = {"as it is": state, "pickled": pickle.loads(pickle.dumps(state))}
    forms["NumPy integers"] = {k: np.int64(v) if type(v) is int and v < 2**63 else v for k, v in state.items()}
    rows = store.snapshot() if grown % 2 else store
    with PrefetchBatchifier(rows, num_workers=second, prefetch=2, seed=1, **options) as other:
        take(other, 2)
        other.load_state_dict(forms[sent])
        assert other.state_dict() == state
        assert {type(value) for value in other.state_dict().values()} == {int, str}
        for number, batch in enumerate(following):
            found = other.next_batch()
            assert_same(found, batch, number)
            assert_same(found, source[at + number], number)
        assert other.state_dict() == state | {"next_index": at + 9}


@pytest.mark.parametrize(("sampling", "workers"), [*((sampling, 2) for sampling in SAMPLERS), ("random", 0)])
def test_refresh_begins_an_epoch_over_what_there_is_now(sampling: str, workers: int) -> None:
    store = store_of(100)
    options: dict[str, Any] = {"sequence_length": 5, "batch_size": 4, "sampling": sampling, "seed": 2}
    old = BatchSource(store, **options)
    with PrefetchBatchifier(store, num_workers=workers, **options) as loader:
        for index in range(7):
            assert_same(loader.next_batch(), old[index], index)
        store.from_dataset(table(50, first=100))
        # The loader does not see it by itself.
        assert_same(loader.next_batch(), old[7])
        assert loader.state_dict()["rows"] == 100
        loader.refresh()
        state = loader.state_dict()
        assert (state["rows"], state["next_index"], state["epoch_start"]) == (150, 8, 8)
        assert len(loader) == len(BatchSource(store, **options))
        batches = [batch for epoch in range(2) for batch in loader]
        assert len(batches) == 2 * len(loader)
        new = BatchSource(store, epoch_start=8, **options)
        for index, batch in enumerate(batches, start=8):
            assert_same(batch, new[index], index)
        if sampling in ("sequential", "batch"):
            count = len(loader) * 4 if sampling == "sequential" else 30
            seen = np.concatenate([batch["time"][:, 0] for batch in batches[: len(loader)]])[:count]
            assert len(set(seen.tolist())) == count
            assert max(seen) >= 100
        if sampling == "last":
            assert batches[0]["time"][-1, -1] == 149
        # The state of the old epoch still leads back to it.
        loader.load_state_dict(state | {"rows": 100, "epoch_start": 0, "next_index": 3, "fingerprint": old.fingerprint})
        assert_same(loader.next_batch(), old[3])


def test_refresh_without_news_is_a_new_epoch_all_the_same() -> None:
    store = store_of(100)
    with PrefetchBatchifier(store, 5, 4, sampling="sequential", num_workers=0) as loader:
        first = [batch["time"][:, 0].tolist() for batch in loader]
        loader.next_batch()
        loader.refresh()
        assert loader.state_dict()["epoch_start"] == len(loader) + 1
        again = [batch["time"][:, 0].tolist() for batch in loader]
        assert len(again) == len(first)
        assert again != first
        assert sorted(itertools.chain(*again)) == sorted(itertools.chain(*first))


def test_refresh_brings_fields_that_were_not_there() -> None:
    store = DatasetStore()
    store.append({"action": 0, "reward": 0.0, "done": 0, "episode_step": None})
    with PrefetchBatchifier(store, 1, 1, num_workers=1) as loader:
        assert "time" not in loader.next_batch()
        store.append({"action": 0, "reward": 0.0, "done": 0, "episode_step": 5})
        loader.refresh()
        assert "time" in loader.spec
        assert loader.next_batch()["time"].shape == (1, 1)


def test_a_state_of_before_the_rows_were_saved(tmp_path: Path) -> None:
    """Rows that were appended and later written to disk are the same dataset."""
    store = DatasetStore()
    for number in range(60):
        store.append({"action": 1, "reward": number * 0.5, "done": 0, "observation": [1.0 * number, 2.0]})
    loader = PrefetchBatchifier(store, 5, 4, num_workers=0)
    take(loader, 3)
    store.to_dataset().save_to_disk(str(tmp_path / "data"))
    reopened = DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "data")))
    other = PrefetchBatchifier(reopened, 5, 4, num_workers=0)
    other.load_state_dict(loader.state_dict())
    assert_same(other.next_batch(), loader.next_batch())


def test_delivered_dtypes_are_no_part_of_the_state() -> None:
    """One dataset, two precisions: the windows are the same, so a state serves both."""
    store = store_of()
    one = PrefetchBatchifier(store, 5, 4, num_workers=0)
    take(one, 3)
    other = PrefetchBatchifier(store, 5, 4, num_workers=0, dtypes={"reward": "float64"})
    other.load_state_dict(one.state_dict())
    assert np.array_equal(other.next_batch()["time"], one.next_batch()["time"])


def test_a_loop_that_refreshes_ends_with_the_new_epoch() -> None:
    store = store_of()
    with PrefetchBatchifier(store, 2, 2, "sequential", num_workers=0) as loader:
        whole = len(loader)
        seen = 0
        for _ in loader:
            seen += 1
            if seen == 1:
                loader.refresh()
        assert seen == 1 + whole
        assert len(list(loader)) == whole


def around(count: int, **options: Any) -> dict[str, Any]:
    return {"windows": {"action": range(count)}, "sequence_length": None, **options}


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ({"boundary": "episode"}, {}, "boundary: expected 'episode', found 'stream'"),
        (
            {"boundary": Column("action")},
            {"boundary": Column("reward")},
            "boundary: expected Column('action'), found Column('reward')",
        ),
        (
            around(8),
            around(16),
            "windows: action: expected offsets 0..7, pad=True, of [B], found offsets 0..15, pad=True, of [B]",
        ),
        (
            around(1),
            around(1, pad=False, boundary="episode"),
            "windows: action: expected offsets 0, pad=True, of [B], found offsets 0, pad=False, of [B]",
        ),
        (
            {"sampling": "sequential"},
            {"sampling": "sequential", "drop_last": False},
            "drop_last: expected True, found False",
        ),
        (
            {},
            {"batch_size": 4, "sampling": "last"},
            "sampling: expected 'random', found 'last'; batch_size: expected 2, found 4",
        ),
        (around(1), {}, "windows: expected 'action', found none; sequence_length: expected 1, found 4"),
    ],
)
def test_what_differs_is_said_as_it_is_asked_for(wanted: dict[str, Any], found: dict[str, Any], said: str) -> None:
    loaders = [
        PrefetchBatchifier(store_of(), **({"sequence_length": 4, "batch_size": 2} | options), num_workers=0)
        for options in (wanted, found)
    ]
    with pytest.raises(StateError) as caught:
        loaders[0].load_state_dict(loaders[1].state_dict())
    assert str(caught.value).startswith(f"state: expected a state of this dataset and configuration; {said}")
    assert "mask" not in str(caught.value)


def test_a_state_of_other_derived_fields_or_another_view_says_so() -> None:
    def loader(store: Any) -> PrefetchBatchifier:
        return PrefetchBatchifier(store, 2, 2, num_workers=0)

    def derived(discount: float) -> DerivedStore:
        return DerivedStore(store_of(), {"return": Return(discount)})

    with pytest.raises(StateError, match=r"; derived: return: expected Return\(discount=0.5.*=0.9, [^;]*$"):
        loader(derived(0.5)).load_state_dict(loader(derived(0.9)).state_dict())
    with pytest.raises(StateError, match=r"data: expected a state of these rows, .* or other selected episodes$"):
        loader(store_of().best(0.5)).load_state_dict(loader(store_of().best(0.25)).state_dict())
