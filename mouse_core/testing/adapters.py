"""Conformance tests for pytest: adapters of loaders, and frameworks' rollout storages and replay buffers."""

from __future__ import annotations

import copy
import gc
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import replay, rollouts
from mouse_core.batches.source import BatchSource
from mouse_core.errors import (
    ClosedError,
    ConfigError,
    DataError,
    MissingFieldError,
    MouseError,
    RolloutError,
    RolloutFullError,
    SchemaError,
    StateError,
    WorkerError,
)
from mouse_core.prefetch.batchifier import PrefetchBatchifier
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.rollouts.fields import RolloutField
from mouse_core.sampling.windows import SAMPLERS
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.testing._comparing import InArrays, refused, same_arguments, stream_digest
from mouse_core.testing.examples import example_columns, example_store

_ENVS, _STEPS = 4, 6
_GAMMA, _LAM = 0.95, 0.9
_FIELDS: Mapping[str, Any] = {
    "observations": (3,),
    "values": (),
    "goal": RolloutField((2,), mask=True, optional=True),
    "choice": RolloutField((), np.int64),
}


class RolloutAdapterConformance(InArrays):
    """Tests that an adapter's ``RolloutStorage`` stores, computes and delivers the same values as the
    ``RolloutStorage`` of ``mouse_core``.

    Subclass it in a test file, under a name that begins with ``Test``, and set the class to test. For an adapter that
    consists of pure functions, write a small class that stores the state and has the methods of ``RolloutStorage``.

        class TestMyRollouts(RolloutAdapterConformance):
            storage_class = my_adapter.RolloutStorage

            def from_numpy(self, values):
                return my_framework.asarray(values)

    Attributes:
        storage_class: The class to test, which is called with ``num_envs``, ``num_transitions_per_env``, ``fields`` and
            ``seed``.
        replaced_dtypes: Dtypes that the framework lacks, and the dtypes that the adapter delivers instead.
    """

    storage_class: Any = rollouts.RolloutStorage

    def test_rows_and_returns_are_those_of_the_core(self) -> None:
        """Rows and returns equal the rows and returns of ``mouse_core``, with and without truncated episodes, and with
        and without normalized advantages.
        """
        for truncated in (False, True):
            for normalize in (False, True):
                mine, core = self._filled(truncated=truncated, normalize_advantage=normalize)
                for name in ("observations", "values", "goal", "goal_mask", "choice", "rewards", "dones"):
                    self.same(mine[name], core[name], name)
                for name in ("returns", "advantages"):
                    self.same(mine[name], core[name], name, exact=False)
                found, expected = ([float(value) for value in storage.get_statistics()] for storage in (mine, core))
                assert np.allclose(found, expected), f"statistics: expected {expected}, found {found}"

    def test_mini_batches_are_those_of_the_core(self) -> None:
        """Every epoch has the same rows in the same order as in ``mouse_core``, for two rollouts in sequence, including
        histories.
        """
        mine, core = self._filled()
        for options in ({}, {"drop_last": True}, {"histories": {"observations": 3}}):
            self._alike(mine, core, "mini_batch_generator", 5, 2, **options)
        for storage in (mine, core):
            storage.clear()
        self._fill(mine, core, seed=1)
        self._alike(mine, core, "mini_batch_generator", 3, 2)

    def test_recurrent_mini_batches_are_those_of_the_core(self) -> None:
        """Trajectories are cut at the ends of episodes and padded, with the same masks as in ``mouse_core``."""
        mine, core = self._filled()
        for shuffle in (False, True):
            self._alike(mine, core, "recurrent_mini_batch_generator", 2, 2, shuffle=shuffle)

    def test_what_comes_out_of_turn_is_refused(self) -> None:
        """Calls out of order raise RolloutError and change nothing."""
        mine, core = self._empty()
        refused(RolloutError, lambda: next(iter(mine.mini_batch_generator(1))))
        steps = _steps(0)
        for step in steps:
            mine.add_transitions(self.given(step))
            core.add_transitions(step)
        refused(RolloutError, lambda: next(iter(mine.mini_batch_generator(1))))
        refused(RolloutFullError, lambda: mine.add_transitions(self.given(steps[0])))
        last = np.zeros(_ENVS, np.float32)
        mine.compute_returns(self.from_numpy(last), _GAMMA, _LAM)
        core.compute_returns(last, _GAMMA, _LAM)
        self._alike(mine, core, "mini_batch_generator", 2, 1)

    def test_rows_that_do_not_fit_are_refused(self) -> None:
        """Wrong names and shapes, NaN and infinity, invalid codes and masked values raise errors; no row is written."""
        mine, core = self._empty()
        good = _steps(0)[0]
        nan = good["rewards"] * np.float32("nan")
        for kind, bad in (
            (SchemaError, {**good, "surprise": good["rewards"]}),
            (SchemaError, {name: values for name, values in good.items() if name != "values"}),
            (SchemaError, {**good, "observations": good["observations"][:, :2]}),
            (DataError, {**good, "rewards": nan}),
            (DataError, {**good, "dones": good["dones"] + 7}),
        ):
            refused(kind, partial(mine.add_transitions, self.given(bad)))
        # A value that a NumPy mask hides is missing.
        for name in ("rewards", "observations"):
            hidden = np.ma.masked_array(good[name], np.arange(good[name].size).reshape(good[name].shape) == 0)
            refused(DataError, partial(mine.add_transitions, {**self.given(good), name: hidden}))
        self._fill(mine, core, seed=0)
        self._alike(mine, core, "mini_batch_generator", 2, 1)

    def test_truncated_episodes_need_the_values_of_their_ends(self) -> None:
        """Code 2 in ``dones`` never counts as termination: without a time-out flag and a final value, code 2 raises an
        error.
        """
        mine, _ = self._empty()
        for step in _steps(0):
            mine.add_transitions(self.given({**step, "dones": np.full_like(step["dones"], 2)}))
        last, rows = np.zeros(_ENVS, np.float32), np.zeros((_STEPS, _ENVS), np.float32)
        refused(ConfigError, lambda: mine.compute_returns(self.from_numpy(last), _GAMMA, _LAM))
        ends = self.given({"time_outs": rows > 0, "final_values": rows})
        refused(ConfigError, lambda: mine.compute_returns(self.from_numpy(last), _GAMMA, _LAM, **ends))

    def _empty(self) -> tuple[Any, rollouts.RolloutStorage]:
        made = [kind(_ENVS, _STEPS, dict(_FIELDS), 3) for kind in (self.storage_class, rollouts.RolloutStorage)]
        return made[0], made[1]

    def _filled(self, **options: Any) -> tuple[Any, rollouts.RolloutStorage]:
        mine, core = self._empty()
        self._fill(mine, core, seed=0, **options)
        return mine, core

    def _fill(self, mine: Any, core: Any, *, seed: int, truncated: bool = False, **options: Any) -> None:
        steps = _steps(seed)
        for step in steps:
            mine.add_transitions(self.given(step))
            core.add_transitions(step)
        random = np.random.default_rng(seed)
        arrays: dict[str, Any] = {"last_values": random.normal(size=_ENVS).astype(np.float32)}
        if truncated:
            dones = np.stack([step["dones"] for step in steps]) > 0
            arrays["time_outs"] = dones & (random.random(dones.shape) < 0.5)
            arrays["final_values"] = np.where(arrays["time_outs"], 0.5, 0).astype(np.float32)
        core.compute_returns(**arrays, gamma=_GAMMA, lam=_LAM, **options)
        mine.compute_returns(**self.given(arrays), gamma=_GAMMA, lam=_LAM, **options)

    def _alike(self, mine: Any, core: Any, method: str, *arguments: Any, **options: Any) -> None:
        batches = (getattr(storage, method)(*arguments, **options) for storage in (mine, core))
        for number, (found, expected) in enumerate(zip(*batches, strict=True)):
            where = f"{method}, batch {number}"
            self.same(found.rows, expected.rows, where)
            self.same(found, expected, where, exact=False)


def _steps(seed: int) -> list[dict[str, Any]]:
    """Return the steps of an example rollout."""
    random = np.random.default_rng(seed)

    def step() -> dict[str, Any]:
        return {
            "observations": random.normal(size=(_ENVS, 3)).astype(np.float32),
            "values": random.normal(size=_ENVS).astype(np.float32),
            "goal": random.normal(size=(_ENVS, 2)).astype(np.float32),
            "goal_mask": random.random(_ENVS) < 0.5,
            "choice": random.integers(0, 9, _ENVS),
            "rewards": random.normal(size=_ENVS).astype(np.float32),
            "dones": (random.random(_ENVS) < 0.3).astype(np.int64),
        }

    return [step() for _ in range(_STEPS)]


_SIZE = 40


class ReplayAdapterConformance(InArrays):
    """Tests that a framework's ``ReplayBuffer`` draws, stores and rejects the same rows as the ``ReplayBuffer`` of
    ``mouse_core``.

    Subclass it in a test file, under a name that begins with ``Test``, and set the classes to test:

        class TestMyReplay(ReplayAdapterConformance):
            buffer_class = my_adapter.ReplayBuffer
            ensemble_class = my_adapter.ReplayBufferEnsemble

            def from_numpy(self, values):
                return my_framework.asarray(values)

    Attributes:
        buffer_class: The adapter's buffer class.
        ensemble_class: The adapter's ensemble class; None if the adapter has no ensembles.
        replaced_dtypes: Dtypes that the framework lacks, and the dtypes that the adapter delivers instead.
        options: Further arguments for every buffer.
    """

    buffer_class: Any = replay.ReplayBuffer
    ensemble_class: Any = replay.ReplayBufferEnsemble
    options: Mapping[str, Any] = {}

    def storage(self, capacity: int, ndim: int) -> Any:
        """Return an empty storage for the framework's buffers; override it for a storage of the framework."""
        return ArrayStorage(capacity, ndim)

    def test_it_takes_the_arguments_of_the_core(self) -> None:
        """The framework's buffer has the arguments of the buffer of ``mouse_core``; additional arguments are
        keyword-only.
        """
        same_arguments(self.buffer_class, replay.ReplayBuffer)
        if self.ensemble_class is not None:
            same_arguments(self.ensemble_class, replay.ReplayBufferEnsemble)

    def test_batches_are_those_of_the_core(self) -> None:
        """Equal seeds and writes give equal draws with every sampler, also after the ring wraps."""
        for name, make in _SAMPLERS.items():
            mine, core = self._pair(**make())
            for number in range(4):
                rows = _rows(17, 17 * number)
                slots = mine.extend(self.given(rows))
                slots = slots if isinstance(slots, np.ndarray) else self.to_numpy(slots)
                assert np.array_equal(slots, core.extend(rows)), name
                row = _rows_at(np.array(17 * number + 3))
                assert int(mine.append(self.given(row))) == core.append(row), name
                for _ in range(3):
                    self.same(mine.sample(), core.sample(), f"{name}, after write {number}")
            self.same(mine.sample(16), core.sample(16), f"{name}, 16 rows")
            assert len(mine) == len(core) == _SIZE
            assert _counts(mine) == _counts(core)

    def test_environments_lie_side_by_side(self) -> None:
        """Rows are ``[time, env, ...]`` for any number of time steps; the number of environments never changes."""
        mine, core = self._pair(
            ndim=2, sampler=lambda: replay.SliceSampler(sequence_length=3, end_key=("next", "done"))
        )
        for number in range(4):
            rows = _rows_at(24 * number + np.arange(24).reshape(6, 4))
            for given in (rows, _rows_at(24 * number + np.arange(4))):
                write = "extend" if given is rows else "append"
                slots = getattr(mine, write)(self.given(given))
                slots = slots if isinstance(slots, np.ndarray) else self.to_numpy(slots)
                assert np.array_equal(slots, getattr(core, write)(given)), f"{write} {number}"
            self.same(mine.sample(), core.sample(), f"after write {number}")
        refused(MouseError, lambda: mine.append(self.given(_rows(3))))
        self.same(mine.sample(), core.sample(), "after a rejected call")

    def test_a_loop_is_an_epoch(self) -> None:
        """A loop without replacement draws each row once."""
        mine, core = self._pair(sampler=replay.SamplerWithoutReplacement)
        for buffer, rows in ((mine, self.given(_rows(30))), (core, _rows(30))):
            buffer.extend(rows)
        for _ in range(2):
            for found, expected in zip(mine, core, strict=True):
                self.same(found, expected, "an epoch")

    def test_priorities_come_in_its_arrays(self) -> None:
        """Priorities can be set in three ways: by index and value, by a batch, and together with new rows."""
        mine, core = self._pair(sampler=lambda: replay.PrioritizedSampler(0.7, 0.5))
        rows = _rows(30) | {"td_error": np.arange(30, dtype=np.float32)}
        mine.extend(self.given(rows))
        core.extend(rows)
        for number in range(4):
            found, expected = mine.sample(), core.sample()
            self.same(found, expected, f"sample {number}")
            priority = (np.arange(8) + number).astype(np.float32)
            mine.update_priority(found["index"], self.from_numpy(priority))
            core.update_priority(expected["index"], priority)
            mine.update_priority(found)
            core.update_priority(expected)
        refused(DataError, lambda: mine.update_priority(found["index"], self.from_numpy(np.full(8, -1.0, "f"))))
        negative = _rows(1) | {"td_error": np.full(1, -1, np.float32)}
        refused(DataError, lambda: mine.extend(self.given(negative)))
        self.same(mine.sample(), core.sample(), "after a rejected call")
        plain, _ = self._pair()
        refused(ConfigError, lambda: plain.update_priority(np.zeros(1, np.int64), np.zeros(1)), "uses priorities")

    def test_rows_are_read_and_written_over(self) -> None:
        """Rows can be read and overwritten with index arrays of any shape, with slices, and with masks."""
        mine, core = self._pair()
        for buffer, given in ((mine, self.given), (core, lambda rows: rows)):
            buffer.extend(given(_rows(20)))
            buffer[3] = given(_rows_at(np.array(90)))
            buffer[np.array([5, 7])] = given(_rows(2, 95))
        for index in (3, slice(2, 9), np.array([5, 1]), np.array([[5, 1], [0, 7]]), np.arange(20) % 3 == 0):
            self.same(mine[index], core[index], f"rows {index}")

    def test_a_batch_never_changes(self) -> None:
        """A delivered batch does not change, whatever is written afterwards."""
        mine, core = self._pair()
        held, expected = [], []
        for number in range(20):
            mine.extend(self.given(_rows(9, 9 * number)))
            core.extend(_rows(9, 9 * number))
            held.append(mine.sample())
            expected.append(core.sample())
        for number, (found, wanted) in enumerate(zip(held, expected, strict=True)):
            self.same(found, wanted, f"batch {number}")

    def test_a_state_is_that_of_the_core(self, tmp_path: Path) -> None:
        """A buffer of ``mouse_core`` loads the states of the framework's buffer, and the framework's buffer loads the
        states of a buffer of ``mouse_core``, as a dict and as a file.
        """
        parts: dict[str, Any] = {"sampler": lambda: replay.PrioritizedSampler(0.7, 0.5), "transform": _frames}
        mine, core = self._pair(**parts)
        mine.extend(self.given(_rows(50)))
        core.extend(_rows(50))
        for _ in range(3):
            mine.sample()
            core.sample()
        other, back = self._pair(**parts)
        other.load_state_dict(core.state_dict())
        back.load_state_dict(mine.state_dict())
        self.same(other.sample(), back.sample(), "from state_dict()")
        mine.dumps(tmp_path / "mine")
        core.dumps(tmp_path / "core")
        other.loads(tmp_path / "core")
        back.loads(tmp_path / "mine")
        self.same(other.sample(), back.sample(), "from dumps()")
        refused(StateError, lambda: other.load_state_dict({"kind": "something"}))
        self.same(other.sample(), back.sample(), "after a rejected call")

    def test_what_is_refused_changes_nothing(self) -> None:
        """Incompatible rows, and sampling from an empty buffer, raise errors and change nothing."""
        mine, core = self._pair()
        refused(MouseError, mine.sample)
        refused(MouseError, core.sample)
        mine.extend(self.given(_rows(12)))
        core.extend(_rows(12))
        good = _rows(4)
        for bad in (
            {name: values for name, values in good.items() if name != "reward"},
            {**good, "extra": good["reward"]},
            {**good, "obs": {**good["obs"], "vector": good["obs"]["vector"][:, :2]}},
            {**good, "reward": good["reward"][:3]},
        ):
            refused(MouseError, partial(mine.extend, self.given(bad)))
        assert _counts(mine) == _counts(core)
        self.same(mine.sample(), core.sample(), "after a rejected call")

    def test_ensembles_are_those_of_the_core(self) -> None:
        """Ensembles draw from their buffers with the same shares and priorities as the ensembles of ``mouse_core``."""
        if self.ensemble_class is None:
            return
        pairs = [self._pair(sampler=lambda: replay.PrioritizedSampler(0.7, 0.5)) for _ in range(2)]
        for number, (mine, core) in enumerate(pairs):
            mine.extend(self.given(_rows(20, 20 * number)))
            core.extend(_rows(20, 20 * number))
        options: dict[str, Any] = {"p": [0.3, 0.7], "batch_size": 8, "seed": 9}
        both = self.ensemble_class(*(mine for mine, _ in pairs), **options)
        other = replay.ReplayBufferEnsemble(*(core for _, core in pairs), **options)
        for number in range(4):
            found, expected = both.sample(), other.sample()
            self.same(found, expected, f"sample {number}")
            both.update_priority(found["index"], self.from_numpy(np.ones(8, "f")), found["buffer_ids"])
            other.update_priority(expected["index"], np.ones(8, "f"), expected["buffer_ids"])

    def _pair(
        self,
        *,
        sampler: Callable[[], Any] | None = None,
        transform: Callable[[], Any] | None = None,
        ndim: int = 1,
        **options: Any,
    ) -> tuple[Any, replay.ReplayBuffer]:
        """Return a buffer of the adapter and a buffer of ``mouse_core`` with equal options; each buffer has a separate
        sampler and transform.
        """
        given: dict[str, Any] = {"batch_size": 8, "seed": 5, **options}
        make, change = sampler or replay.RandomSampler, transform or list
        mine = self.storage(_SIZE, ndim)
        return (
            self.buffer_class(mine, make(), transform=change(), **{**given, **self.options}),
            replay.ReplayBuffer(ArrayStorage(_SIZE, ndim), make(), transform=change(), **given),
        )


def _counts(buffer: Any) -> dict[str, Any]:
    """Return the counters of a buffer without its size in bytes, because a framework may lack NumPy's widest dtypes."""
    return {name: value for name, value in buffer.stats().items() if name != "nbytes"}


def _rows(n: int, first: int = 0) -> dict[str, Any]:
    """Return nested rows whose values identify them."""
    return _rows_at(np.arange(first, first + n))


def _rows_at(number: npt.NDArray[np.int64]) -> dict[str, Any]:
    return {
        "obs": {"vector": (number[..., None] * 10 + np.arange(3)).astype(np.float32), "pair": (number, number / 7)},
        "action": number % 5,
        "reward": number.astype(np.float32),
        "next": {"done": number % 10 == 9},
    }


def _frames() -> list[Any]:
    vector = ("obs", "vector")
    return [replay.CatFrames(vector, frames=3), replay.VecNorm(vector, "reward", decay=0.99)]


_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "random": dict,
    "without replacement": lambda: {"sampler": replay.SamplerWithoutReplacement},
    "prioritized": lambda: {"sampler": lambda: replay.PrioritizedSampler(0.7, 0.5)},
    "slices": lambda: {"sampler": lambda: replay.SliceSampler(sequence_length=4, end_key=("next", "done"))},
    "crops": lambda: {
        "sampler": lambda: replay.SliceSampler(sequence_length=12, end_key=("next", "done")),
        "transform": lambda: [replay.RandomTimeCrop(2)],
    },
    "transformed": lambda: {"transform": lambda: [replay.Rename({"reward": "r"}), replay.Exclude("action")]},
    "normalised": lambda: {"transform": _frames},
}


SMALL: Mapping[str, Any] = {"sequence_length": 8, "batch_size": 4, "seed": 11}


class AdapterConformance(InArrays):
    """Tests that a framework's ``PrefetchBatchifier`` delivers exactly the batches of ``mouse_core``.

    Subclass it in a test file, under a name that begins with ``Test``, and set the class to test:

        class TestMine(AdapterConformance):
            loader_class = my_adapter.PrefetchBatchifier

    Attributes:
        loader_class: The adapter's loader.
        replaced_dtypes: Dtypes that the framework lacks, and the dtypes that the adapter delivers instead.
        options: Further arguments for every loader.
        patience: The number of seconds within which threads must end after ``close()``.
    """

    loader_class: Any = PrefetchBatchifier
    options: Mapping[str, Any] = {}
    patience: float = 60.0

    # ------------------------------------------------------------------ batches

    def test_it_takes_the_arguments_of_the_core(self) -> None:
        """The adapter's loader takes the same arguments as the loader of ``mouse_core``, so that only the import
        differs between frameworks.
        """
        same_arguments(self.loader_class, PrefetchBatchifier)

    def test_batches_are_those_of_the_core(self) -> None:
        """Batches equal the batches of ``mouse_core`` in every sampling mode, whether the caller or threads compute the
        batches.
        """
        store = example_store()
        for sampling in SAMPLERS:
            for workers in (0, 1, 2, 8):
                with self._loader(store, sampling=sampling, num_workers=workers) as loader:
                    self._same(loader, self._source(store, sampling=sampling), 12)
        for options in ({"weighting": "trajectory"}, {"sampling": "sequential", "pad": 0}):
            within = {"boundary": "episode", "sequence_length": 40, **options}
            with self._loader(store, **within) as loader:
                assert "mask" in loader.spec
                self._same(loader, self._source(store, **within), 3)

    def test_windows_of_all_kinds_and_sources_of_ones_own(self) -> None:
        """Views, fields at offsets, and windows of variable length, padded or packed, equal those of ``mouse_core``,
        from a store and from a custom source with only the four required members, also after a state was restored.
        """
        store = example_store()
        offsets = {"action": range(5), "obs_continuous": [-1, 0], "obs_image": [-2, 0]}
        transitions: dict[str, Any] = {"sequence_length": None, "windows": offsets}
        several: list[dict[str, Any]] = [
            {},
            {"views": 2},
            {"windows": offsets, "pad": 0},
            transitions,
            {**transitions, "shard": (1, 3), "uneven": "pad"},
            *({"lengths": range(1, 9), "packed": packed} for packed in (False, True, 32)),
        ]
        for options in several:
            expected, own = self._source(store, **options), _Own(BatchSource(store, **{**SMALL, **options}))
            for workers in (0, 2):
                self._goes_on(partial(self._loader, store, num_workers=workers, **options), expected)
                self._goes_on(partial(self.loader_class, own, num_workers=workers, **self.options), expected)
        refused(ConfigError, lambda: self._loader(_Own(self._source(store))), "sequence_length")

    def test_the_spec_says_what_comes(self) -> None:
        """Before the first batch, the spec already has the names of the fields in order, their dtypes and their
        shapes."""
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
        """Batches lack the field of a missing optional column; if the caller requests the field, an error is raised."""
        store = _store_of("action", "reward", "done")
        with self._loader(store) as loader:
            assert set(loader.next_batch().keys()) == {"action", "reward", "done"}
        refused(MissingFieldError, lambda: self._loader(store, required_fields=("q_star",)), "q_star")
        with self._loader(example_store(), fields=["reward", "done"]) as loader:
            assert set(loader.next_batch().keys()) == {"reward", "done"}

    def test_bad_arguments_are_refused(self) -> None:
        """The constructor raises the same errors as the loader of ``mouse_core``."""
        store = example_store()
        for options in ({"sampling": "all"}, {"sequence_length": 301}, {"shard": (0, 3)}, {"prefetch": 0}):
            refused(ConfigError, partial(self._loader, store, **options), "expected")

    def test_shards_put_together_are_the_whole(self) -> None:
        """For every number of shards that divides the batch, the shards together are the batch."""
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

    def test_a_batch_never_changes(self) -> None:
        """A hundred batches, most of them small and a few above one megabyte, stay unchanged while other batches are
        computed."""
        for options, count in (({}, 100), ({"batch_size": 128, "sequence_length": 64}, 3)):
            source = self._source(example_store(), **options)
            with self._loader(example_store(), **options) as loader:
                held = [loader.next_batch() for _ in range(count)]
            for index, batch in enumerate(held):
                expected = source[index]
                for name, values in self._arrays(batch).items():
                    np.testing.assert_array_equal(values, expected[name], f"{name} of batch {index}")

    # ------------------------------------------------------------------ epochs and rows

    def test_a_loop_is_an_epoch(self) -> None:
        """Each loop delivers the rest of an epoch, also after single calls of ``next_batch``."""
        with self._loader(example_store(), sampling="sequential") as loader:
            loader.next_batch()
            batches = [*loader, *loader]
            assert len(batches) == 2 * len(loader) - 1
            assert loader.state_dict()["next_index"] == 2 * len(loader)

    def test_new_rows_wait_for_refresh(self) -> None:
        """Rows appended to the store are drawn only after ``refresh()``; the next batch then begins an epoch."""
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
        """The state has plain numbers and strings that depend only on the delivered batches, not on prefetched
        batches."""
        store = example_store()
        with self._loader(store) as loader, PrefetchBatchifier(store, **SMALL) as core:
            for _ in range(3):
                loader.next_batch()
                core.next_batch()
            state = loader.state_dict()
            assert state == core.state_dict()
            assert json.loads(json.dumps(state)) == state

    def test_it_resumes_where_it_stopped(self) -> None:
        """A restored loader continues the stream with the seed in the state. Loaders of ``mouse_core`` and of the
        adapter restore each other's states.
        """
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
        """After a restart with 3 processes (which pads some batches) or 1 process instead of 4, the stream continues,
        also past the end of an epoch."""
        store, state = example_store(), dict[str, Any]()
        options: Any = {"sampling": "sequential", "drop_last": False, "batch_size": 8}
        for count, begin, end in ((4, 0, 2), (3, 2, 6), (1, 6, 8)):
            loaders = [self._loader(store, shard=(rank, count), uneven="pad", **options) for rank in range(count)]
            for loader in loaders if state else ():
                loader.load_state_dict(state)
            for index in range(begin, end):
                parts = list(map(self._arrays, (loader.next_batch() for loader in loaders)))
                there = np.stack([part["mask"].any(axis=1) for part in parts])  # equal in each process
                for name, values in self._source(store, **options)[index].items():
                    own = [part[name][rows] for part, rows in zip(parts, there, strict=True)]
                    np.testing.assert_array_equal(np.concatenate(own), values, f"{name} of batch {index}")
            state = loaders[0].state_dict()
            for loader in loaders:
                assert loader.state_dict() == state, f"expected the same state of all {count} processes"
                loader.close()

    def test_a_state_of_something_else_is_refused(self) -> None:
        """A loader rejects the state of another object, and is then unchanged."""
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
        """Batches before the failing index are delivered, no batch is skipped, and the state stays at the failing
        index."""
        columns = {name: example_columns(120)[name] for name in ("action", "reward", "done")}
        columns["reward"][101] = 0  # the value at the begin of an episode
        columns["done"][100] = 7  # an invalid code; Arrow tables are read unchanged
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
        """Closing may be repeated, also with a full queue, and only the state can be read afterwards."""
        for workers in (0, 2):
            with self._loader(example_store(), num_workers=workers) as loader:
                loader.next_batch()
                state = loader.state_dict()
            loader.close()
            for use in (loader.next_batch, loader.refresh, partial(loader.load_state_dict, state)):
                refused(ClosedError, use, "closed")
            assert loader.state_dict() == state, "expected the state after the last batch"

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
        """Assert that a loader delivers the first batches, and that another loader, restored from the state of this
        loader, delivers the next batches.
        """
        said = [(name, field.dtype, field.shape) for name, field in expected.spec.items()]
        with make() as loader:
            assert [(name, field.dtype, field.shape) for name, field in loader.spec.items()] == said
            assert loader.spec.is_packed == expected.spec.is_packed
            assert loader.spec.batch_dims == expected.spec.batch_dims
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
    """A custom source with only the required members."""

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
