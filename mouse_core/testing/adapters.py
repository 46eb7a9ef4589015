"""The contract of an adapter, as tests that its author runs with pytest."""

from __future__ import annotations

import copy
import gc
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.batches.source import BatchSource
from mouse_core.errors import ClosedError, ConfigError, DataError, MissingFieldError, StateError, WorkerError
from mouse_core.prefetch.batchifier import PrefetchBatchifier
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.testing._comparing import InArrays, refused, same_arguments
from mouse_core.testing.digest import stream_digest
from mouse_core.testing.examples import example_columns, example_store

SMALL: Mapping[str, Any] = {"sequence_length": 8, "batch_size": 4, "seed": 11}


class AdapterConformance(InArrays):
    """Tests that a ``PrefetchBatchifier`` for some framework delivers the batches of ``mouse_core``, and nothing else.

    Subclass it in a test file, under a name that begins with ``Test``, and name the class to test:

        class TestMine(AdapterConformance):
            loader_class = my_adapter.PrefetchBatchifier

    Attributes:
        loader_class: The adapter's loader.
        replaced_dtypes: Dtypes that the framework cannot hold, and what the adapter delivers instead.
        options: Further arguments for every loader.
        patience: Seconds that threads may take to end.
    """

    loader_class: Any = PrefetchBatchifier
    options: Mapping[str, Any] = {}
    patience: float = 60.0

    # ------------------------------------------------------------------ batches

    def test_it_takes_the_arguments_of_the_core(self) -> None:
        """A study that changes the import must not need to change the call."""
        same_arguments(self.loader_class, PrefetchBatchifier)

    def test_batches_are_those_of_the_core(self) -> None:
        """Every sampling mode, computed by the caller and by threads."""
        store = example_store()
        for sampling in ("random", "last", "sequential", "batch"):
            for workers in (0, 1, 2, 8):
                with self._loader(store, sampling=sampling, num_workers=workers) as loader:
                    self._same(loader, self._source(store, sampling=sampling), 12)
        for options in ({"weighting": "trajectory"}, {"sampling": "sequential", "pad": 0}):
            within = {"boundary": "episode", "sequence_length": 40, **options}
            with self._loader(store, **within) as loader:
                assert "mask" in loader.spec
                self._same(loader, self._source(store, **within), 3)

    def test_fields_at_offsets_of_an_anchor(self) -> None:
        """Windows by field come from a store, from a custom source, and after a restored state."""
        store = example_store()
        windows = {"action": range(5), "obs_continuous": [-1, 0], "obs_image": [-2, 0]}
        for options in (
            {"sequence_length": None, "windows": windows},
            {"sequence_length": None, "windows": windows, "shard": (1, 3), "uneven": "pad"},
            {"windows": windows, "pad": 0},
        ):
            expected = self._source(store, **options)
            for workers in (0, 2):
                self._goes_on(partial(self._loader, store, num_workers=workers, **options), expected)
            with self.loader_class(_Own(expected), **self.options) as loader:
                assert loader.spec.batch_dims == expected.spec.batch_dims
                self._same(loader, expected, 3)

    def test_windows_of_lengths_of_their_own(self) -> None:
        """Padded, packed and filled up, from a store and from a source of one's own, on from a state."""
        store = example_store()
        for packed in (False, True, 32):
            options = {"lengths": range(1, 9), "packed": packed}
            expected = self._source(store, **options)
            assert expected.spec.is_packed == bool(packed)
            for workers in (0, 2):
                self._goes_on(partial(self._loader, store, num_workers=workers, **options), expected)
            with self.loader_class(_Own(expected), **self.options) as loader:
                self._same(loader, expected, 3)

    def test_a_source_of_ones_own(self) -> None:
        """Batches of anything that is a source, which a loader knows by four things alone, and on from a state."""
        source = _Own(BatchSource(example_store(), **SMALL))
        expected = self._source(example_store())
        for workers in (0, 1, 4):
            self._goes_on(partial(self.loader_class, source, num_workers=workers, **self.options), expected)
        refused(ConfigError, lambda: self._loader(source), "sequence_length")

    def test_the_spec_says_what_comes(self) -> None:
        """Names in their order, dtypes and shapes, before the first batch."""
        for dtypes in ({}, {"obs_image": "uint8", "obs_continuous": "float32", "reward": "float16"}):
            with self._loader(example_store(), dtypes=dtypes) as loader:
                spec = loader.spec
                assert spec == self._source(example_store(), dtypes=dtypes).spec
                batch = loader.next_batch()
                assert list(batch.keys()) == list(spec)
                for name, field in spec.items():
                    values = self.to_numpy(batch[name])
                    assert values.dtype == field.dtype, f"{name}: expected {field.dtype}, found {values.dtype}"
                    assert values.shape == (4, 8, *field.shape), f"{name}: found shape {values.shape}"

    def test_absent_fields_are_absent(self) -> None:
        """An optional column that is not there is not in the batch, unless the caller needs it."""
        store = _store_of("action", "reward", "done")
        with self._loader(store) as loader:
            assert set(loader.next_batch().keys()) == {"action", "reward", "done"}
        refused(MissingFieldError, lambda: self._loader(store, required_fields=("q_star",)), "q_star")
        with self._loader(example_store(), fields=["reward", "done"]) as loader:
            assert set(loader.next_batch().keys()) == {"reward", "done"}

    def test_bad_arguments_are_refused(self) -> None:
        """The constructor raises the errors of the core."""
        store = example_store()
        for options in ({"sampling": "all"}, {"sequence_length": 301}, {"shard": (0, 3)}, {"prefetch": 0}):
            refused(ConfigError, partial(self._loader, store, **options), "expected")

    def test_shards_put_together_are_the_whole(self) -> None:
        """The shards of every count that divides the batch add up to the batch."""
        store = example_store()
        whole = [self._source(store)[index] for index in range(5)]
        for count in (1, 2, 4):
            loaders = [self._loader(store, shard=(rank, count)) for rank in range(count)]
            for expected in whole:
                parts = [self._arrays(loader.next_batch()) for loader in loaders]
                for name, values in expected.items():
                    np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values, name)
            for loader in loaders:
                loader.close()

    def test_views_come_as_a_tuple(self) -> None:
        """Views of one batch are batches of their own."""
        with self._loader(example_store(), views=2, num_workers=1) as loader:
            self._same(loader, self._source(example_store(), views=2), 3)
            assert isinstance(loader.next_batch(), tuple)

    def test_a_batch_never_changes(self) -> None:
        """A hundred batches are held while others are made; small ones, and a few of more than a megabyte."""
        for options, count in (({}, 100), ({"batch_size": 128, "sequence_length": 64}, 8)):
            source = self._source(example_store(), **options)
            with self._loader(example_store(), **options) as loader:
                held = [loader.next_batch() for _ in range(count)]
            for index, batch in enumerate(held):
                expected = source[index]
                for name, values in self._arrays(batch).items():
                    np.testing.assert_array_equal(values, expected[name], f"{name} of batch {index}")

    # ------------------------------------------------------------------ epochs and rows

    def test_a_loop_is_an_epoch(self) -> None:
        """Each loop delivers the rest of an epoch, also after batches that were taken singly."""
        with self._loader(example_store(), sampling="sequential") as loader:
            loader.next_batch()
            batches = [*loader, *loader]
            assert len(batches) == 2 * len(loader) - 1
            assert loader.state_dict()["next_index"] == loader.report().batches == 2 * len(loader)

    def test_new_rows_wait_for_refresh(self) -> None:
        """Rows appended to the store are seen from the first batch after ``refresh()``, which begins an epoch."""
        store = example_store(40)
        before = self._source(store, sampling="batch")
        with self._loader(store, sampling="batch") as loader:
            loader.next_batch()
            store.extend(example_columns(60, first=40))
            self._same([loader.next_batch()], [before[1]], 1)
            loader.refresh()
            after = before.with_snapshot(store.snapshot(), epoch_start=2)
            self._same(loader, after, 6)

    # ------------------------------------------------------------------ state

    def test_the_state_is_that_of_the_core(self) -> None:
        """Plain numbers and strings that say what was delivered, whatever was made ahead."""
        store = example_store()
        with self._loader(store) as loader, PrefetchBatchifier(store, **SMALL) as core:
            for _ in range(3):
                loader.next_batch()
                core.next_batch()
            state = loader.state_dict()
            assert state == core.state_dict()
            assert json.loads(json.dumps(state)) == state

    def test_it_resumes_where_it_stopped(self) -> None:
        """A restored loader continues the stream, seed included; core and adapter restore each other's states."""
        store = example_store()
        for sampling in ("random", "batch"):
            with self._loader(store, sampling=sampling) as first:
                for _ in range(7):
                    first.next_batch()
                state = copy.deepcopy(first.state_dict())
                options = {**SMALL, "sampling": sampling, "seed": 0}
                with (
                    self._loader(store, sampling=sampling, seed=0) as loader,
                    PrefetchBatchifier(store, **options) as core,
                ):
                    core.next_batch()
                    core.load_state_dict(state)
                    assert core.state_dict() == state
                    loader.next_batch()
                    loader.load_state_dict(core.state_dict())
                    self._same(loader, (self._arrays(first.next_batch()) for _ in range(5)), 5)

    def test_other_numbers_of_processes_go_on_with_the_stream(self) -> None:
        """Stopped with 4, on with 3, of which some are filled up, and with 1; within an epoch and over its end."""
        store, state = example_store(), dict[str, Any]()
        options: Any = {"sampling": "sequential", "drop_last": False, "batch_size": 8}
        for count, begin, end in ((4, 0, 2), (3, 2, 6), (1, 6, 8)):
            loaders = [self._loader(store, shard=(rank, count), uneven="pad", **options) for rank in range(count)]
            for loader in loaders if state else ():
                loader.load_state_dict(state)
            for index in range(begin, end):
                parts = list(map(self._arrays, (loader.next_batch() for loader in loaders)))
                there = np.stack([part["mask"].any(axis=1) for part in parts])  # of as many windows each
                for name, values in self._source(store, **options)[index].items():
                    own = [part[name][rows] for part, rows in zip(parts, there, strict=True)]
                    np.testing.assert_array_equal(np.concatenate(own), values, f"{name} of batch {index}")
            state = loaders[0].state_dict()
            for loader in loaders:
                assert loader.state_dict() == state, f"expected the same state of all {count} processes"
                loader.close()

    def test_a_state_of_something_else_is_refused(self) -> None:
        """A rejected state leaves the loader as it was."""
        store, others = example_store(), example_store(0)
        others.extend(example_columns(300, first=1))
        with self._loader(store) as loader:
            loader.next_batch()
            for other in (
                PrefetchBatchifier(others, **SMALL),
                PrefetchBatchifier(store, **{**SMALL, "sequence_length": 9}),
            ):
                refused(StateError, partial(loader.load_state_dict, other.state_dict()), "expected")
            source = self._source(store)
            self._same(loader, (source[index] for index in range(1, 5)), 4)

    # ------------------------------------------------------------------ failure and end

    def test_a_failure_comes_at_its_index_and_stays(self) -> None:
        """Earlier batches are delivered, nothing is skipped, and the state stays at the failing index."""
        columns = {name: example_columns(120)[name] for name in ("action", "reward", "done")}
        columns["reward"][101] = 0  # as where an episode begins
        columns["done"][100] = 7  # is no code; Arrow tables are read as they are, when they are
        store = DatasetStore().from_dataset(pa.table(columns))
        source = self._source(store, sampling="sequential")
        failing = next(index for index in range(len(source)) if _covers(source, index, 100))
        for workers in (0, 1, 2, 8):
            with self._loader(store, sampling="sequential", num_workers=workers) as loader:
                self._same(loader, source, failing)
                for _ in range(3):
                    error = refused(WorkerError, loader.next_batch, "done")
                    assert isinstance(error.__cause__, DataError), (
                        f"expected a DataError as cause, found {error.__cause__!r}"
                    )
                    assert loader.state_dict()["next_index"] == failing

    def test_closed_is_closed(self) -> None:
        """Closing may be repeated, also with a full queue, and nothing is delivered after."""
        for workers in (0, 2):
            with self._loader(example_store(), num_workers=workers) as loader:
                loader.next_batch()
            loader.close()
            refused(ClosedError, loader.next_batch, "closed")

    def test_threads_end(self) -> None:
        """Threads end after ``close()``, after a restored state, and when a loader is dropped in the middle."""
        before = set(threading.enumerate())
        loader = self._loader(example_store(), num_workers=4)
        loader.next_batch()
        loader.load_state_dict(loader.state_dict())
        loader.next_batch()
        loader.close()
        dropped = self._loader(example_store(), num_workers=4)
        dropped.next_batch()
        del dropped, loader
        gc.collect()
        deadline = time.monotonic() + self.patience
        while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left, f"threads still running: {left}"

    # ------------------------------------------------------------------ helpers

    def _loader(self, store: Any, **options: Any) -> Any:
        return self.loader_class(store, **{**SMALL, **self.options, **options})

    def _goes_on(self, make: Callable[[], Any], expected: BatchSource) -> None:
        """Assert that a loader delivers the first batches, and another one the next from its state."""
        said = [(name, field.dtype, field.shape) for name, field in expected.spec.items()]
        with make() as loader:
            assert [(name, field.dtype, field.shape) for name, field in loader.spec.items()] == said
            assert loader.spec.is_packed == expected.spec.is_packed
            self._same(loader, expected, 5)
            state = copy.deepcopy(loader.state_dict())
        with make() as loader:
            loader.load_state_dict(state)
            self._same(loader, [expected[index] for index in range(5, 8)], 3)

    def _source(self, store: Any, **options: Any) -> BatchSource:
        return BatchSource(store, replace_dtypes=self.replaced_dtypes, **{**SMALL, **options})

    def _arrays(self, batch: Any) -> dict[str, npt.NDArray[Any]]:
        return {name: self.to_numpy(batch[name]) for name in batch.keys()}  # noqa: SIM118  as in as_arrays

    def _same(self, loader: Any, expected: Any, n: int) -> None:
        batches = [loader.next_batch() for _ in range(n)] if hasattr(loader, "next_batch") else list(loader)
        views = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
        found = [tuple(self._arrays(view) for view in batch) for batch in views]
        assert stream_digest(found, n) == stream_digest(expected, n), "these are not the batches of the core"


class _Own:
    """A source with the required members and no others."""

    def __init__(self, source: BatchSource) -> None:
        self._source, self.spec, self.fingerprint = source, source.spec, source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index]


def _store_of(*names: str) -> Any:
    store = example_store(0)
    columns = example_columns(100)
    store.extend({name: columns[name] for name in names})
    return store


def _covers(source: BatchSource, index: int, row: int) -> bool:
    starts = source.plan(index).starts
    return bool(((starts <= row) & (row < starts + source.sequence_length)).any())
