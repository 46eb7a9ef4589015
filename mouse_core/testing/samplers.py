"""Conformance tests for pytest: samplers of windows, and samplers of replay buffers."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.identity import sampler_identity
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError, DataError, MouseError, StateError
from mouse_core.nested import find, flatten
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.protocols import Draw
from mouse_core.replay.protocols import Sampler as ReplaySampler
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.sampling.plan import PaddedSampler, WindowSampler
from mouse_core.testing._comparing import refused
from mouse_core.testing.examples import example_store

_INDICES = (0, 1, 2, 17, 1000)


class WindowSamplerConformance:
    """Tests that ``BatchSource`` can use a sampler of windows, which implements ``mouse_core.sampling.WindowSampler``.

    Subclass it in a test file, under a name that begins with ``Test``, and implement ``make``:

        class TestMine(WindowSamplerConformance):
            def make(self):
                return MySampler(sequence_length=8, batch_size=4)

    Attributes:
        rows: Numbers of rows of the stores that the tests use, in episodes of 1 to 13 rows; see ``example_store``. The
            tests also use the smallest store that the sampler accepts.
        draws: Whether batches depend on the seed.
    """

    rows: tuple[int, ...] = (300, 1000)
    draws: bool = True

    def make(self) -> Any:
        """Return a new sampler, always with the same arguments; ``rows[0]`` rows must be enough for its windows."""
        raise NotImplementedError

    def test_it_has_what_the_protocol_names(self) -> None:
        """The sizes and the number of batches in an epoch are integers of at least 1."""
        sampler = self.make()
        assert isinstance(sampler, WindowSampler), (
            f"expected sequence_length, batch_size, batches_per_epoch, starts: {sampler}"
        )
        for rows in self._row_counts(sampler):
            for number in (sampler.sequence_length, sampler.batch_size, sampler.batches_per_epoch(_snapshot(rows))):
                assert isinstance(number, int | np.integer), f"expected an integer, found {number!r}"
                assert number >= 1, f"expected at least 1, found {number}"

    def test_windows_lie_in_the_snapshot(self) -> None:
        """For every index and every snapshot, including the smallest, the starts of a batch are integers ``[b]``, where
        b is at most the batch size.

        In 300 rows, a sampler rarely draws a start that is too late by one step. In the smallest snapshot, only one
        start is valid, so the test detects this error.
        """
        sampler = self.make()
        for rows in self._row_counts(sampler):
            snapshot = _snapshot(rows)
            for index in (*range(20), *_INDICES):
                starts = self._starts(sampler, rows, index=index)
                assert starts.ndim == 1, f"expected [b], found {list(starts.shape)}"
                assert starts.dtype.kind in "iu", f"expected integers, found {starts.dtype}"
                assert 1 <= len(starts) <= sampler.batch_size, f"expected a batch, found {len(starts)} windows"
                reach: Any = sampler.sequence_length
                if isinstance(sampler, PaddedSampler):
                    reach = sampler.lengths(starts, snapshot)
                    assert reach.shape == starts.shape, "expected a length for each window"
                    assert reach.min() >= 1, "expected a step in every window"
                    assert reach.max() <= sampler.sequence_length, "expected no more steps than a window has"
                assert starts.min() >= 0, f"expected rows from 0, found {starts.min()}"
                assert (starts + reach <= rows).all(), f"expected windows up to row {rows}, found them beyond"

    def test_it_is_a_pure_function(self) -> None:
        """Starts depend only on seed, index, snapshot and epoch, in any order of calls and after pickling."""
        first, second = self.make(), pickle.loads(pickle.dumps(self.make()))
        asked = [(seed, index, start) for seed in (0, 5) for index in _INDICES for start in (0, index)]
        for rows in self._row_counts(first):
            forward = [self._starts(first, rows, *arguments) for arguments in asked]
            backward = [self._starts(second, rows, *arguments) for arguments in reversed(asked)][::-1]
            for arguments, starts, again in zip(asked, forward, backward, strict=True):
                assert np.array_equal(starts, again), f"expected the same for (seed, index, epoch_start) = {arguments}"
                repeated = self._starts(first, rows, *arguments)
                assert np.array_equal(starts, repeated), f"expected {arguments} twice the same"

    def test_seeds_differ(self) -> None:
        """Different seeds give different batches, if the sampler draws at random."""
        sampler = self.make()
        streams = {
            tuple(start for index in range(3) for start in self._starts(sampler, self.rows[-1], seed, index).tolist())
            for seed in range(5)
        }
        assert not self.draws or len(streams) > 1, "expected other batches for other seeds"

    def test_many_are_the_same_as_one_by_one(self) -> None:
        """Planning several batches at once gives the same starts as planning them singly."""
        sampler = self.make()
        draw: Any = getattr(sampler, "starts_of_many", None)
        for rows in self._row_counts(sampler) if draw is not None else ():
            for first, count in ((0, 3), (5, 1), (11, 40)):
                many = draw(3, first, count, _snapshot(rows), 0, slice(0, sampler.batch_size))
                if many is not None:
                    single = [self._starts(sampler, rows, 3, index) for index in range(first, first + count)]
                    assert np.array_equal(many, np.stack(single)), (
                        f"expected the results of starts(), first {first}, {count} batches"
                    )
                    self._check_some_windows(sampler, first, _snapshot(rows), many)

    def _check_some_windows(self, sampler: Any, first: int, snapshot: Any, many: npt.NDArray[np.int64]) -> None:
        """Assert that ``starts_of_many`` for some windows of each batch returns the matching part of ``many``."""
        size = many.shape[1]
        for rows in (slice(size // 3, size // 3 + 1), slice(size // 3, size)):
            part = sampler.starts_of_many(3, first, len(many), snapshot, 0, rows)
            assert np.array_equal(part, many[:, rows]), f"expected windows {rows} of each batch: {part}"

    def test_too_few_rows_are_refused(self) -> None:
        """``batches_per_epoch`` raises ConfigError for too few rows, unless the sampler pads windows."""
        sampler = self.make()
        if not isinstance(sampler, PaddedSampler) and sampler.sequence_length > 1:
            snapshot = _snapshot(sampler.sequence_length - 1)
            refused(ConfigError, lambda: sampler.batches_per_epoch(snapshot))

    def test_checkpoints_know_it_again(self) -> None:
        """Two equal samplers have the same fingerprint, which contains the name of the class and its sizes."""
        identity = sampler_identity(self.make())
        assert identity == sampler_identity(self.make()), "expected the same fingerprint for the same sampler"
        assert type(self.make()).__name__ in identity, f"expected a repr with the name of the class, found {identity}"

    def test_a_source_delivers_its_windows(self) -> None:
        """A ``BatchSource`` delivers the windows of the sampler, also after pickling."""
        source = BatchSource(example_store(self.rows[0]), sampling=self.make(), seed=4)
        again = pickle.loads(pickle.dumps(source))
        for index in _INDICES[:3]:
            plan, batch = source.plan(index), source[index]
            rewards = batch["reward"]
            assert rewards.shape == (len(plan.starts), source.sequence_length)
            assert np.array_equal(again[index]["reward"], rewards)

    def _row_counts(self, sampler: Any) -> tuple[int, ...]:
        """Return the row counts to test: the smallest accepted count, the next larger count, and ``rows``."""
        for fewest in range(1 if isinstance(sampler, PaddedSampler) else sampler.sequence_length, self.rows[0]):
            try:
                sampler.batches_per_epoch(_snapshot(fewest))
            except ConfigError:
                continue
            return (fewest, fewest + 1, *self.rows)
        return self.rows

    def _starts(self, sampler: Any, rows: int, seed: int = 0, index: int = 0, epoch_start: int = 0) -> npt.NDArray[Any]:
        return np.asarray(sampler.starts(seed, index, _snapshot(rows), epoch_start)).copy()


class ReplaySamplerConformance:
    """Tests that ``ReplayBuffer`` can use a sampler, which implements ``mouse_core.replay.Sampler``.

    Subclass it in a test file, under a name that begins with ``Test``, and implement ``make``:

        class TestMine(ReplaySamplerConformance):
            def make(self):
                return MySampler()

    Attributes:
        batch_size: Number of rows or slices in each batch of the tests; at most 6.
        draws: Whether batches depend on the seed.
    """

    batch_size: int = 6
    draws: bool = True

    def make(self) -> Any:
        """Return a new sampler, always with the same arguments."""
        raise NotImplementedError

    def rows(self, first: int, n: int) -> dict[str, npt.NDArray[Any]]:
        """Return ``n`` rows to write, ``[n, ...]``; override it for a sampler that needs other fields."""
        numbers = np.arange(first, first + n)
        return {"row": numbers, "done": numbers % 9 == 8}

    def test_it_has_what_the_protocol_names(self) -> None:
        """The sampler has the members of the protocol, and ``needs_order`` is a bool."""
        sampler = self.make()
        assert isinstance(sampler, ReplaySampler), f"expected needs_order, wrote, reset, draw, states: {sampler!r}"
        assert isinstance(sampler.needs_order, bool), f"needs_order: expected a bool, found {sampler.needs_order!r}"

    def test_draws_lie_in_the_buffer(self) -> None:
        """Draws have the shapes and dtypes of ``Draw``, after rows are added, overwritten, changed and removed."""
        for buffer in self._after_each_write(self._buffer()):
            for _ in range(3):
                self._check_draw(self._draw(buffer), len(buffer))

    def test_a_draw_depends_on_its_key_and_on_what_was_written(self) -> None:
        """Two buffers with the same writes draw the same rows."""
        pairs = zip(self._after_each_write(self._buffer()), self._after_each_write(self._buffer()), strict=True)
        for buffer, other in pairs:
            _assert_same_draw(self._draw(buffer), self._draw(other), "expected the same draw after the same writes")

    def test_seeds_differ(self) -> None:
        """Different seeds give different batches, if the sampler draws at random."""
        streams = set()
        for seed in range(5):
            buffer = self._buffer(seed)
            buffer.extend(self.rows(0, 36))
            streams.add(tuple(slot for _ in range(3) for slot in self._draw(buffer).index.reshape(-1).tolist()))
        assert not self.draws or len(streams) > 1, "expected other batches for other seeds"

    def test_it_goes_on_from_its_state(self) -> None:
        """A new sampler that loads a saved state draws the same batches as the original sampler."""
        for number, buffer in enumerate(self._after_each_write(self._buffer())):
            self._draw(buffer)
            again = self._buffer(seed=99)
            again.load_state_dict(copy.deepcopy(buffer.state_dict()))
            for _ in range(3):
                _assert_same_draw(
                    self._draw(buffer), self._draw(again), f"expected the next draws after the state of step {number}"
                )

    def test_its_state_is_plain(self) -> None:
        """The state has plain values and arrays without objects, also in dicts, and later draws do not change it."""
        for buffer in self._after_each_write(self._buffer()):
            self._draw(buffer)
            state = buffer.sampler.state_dict()
            kept = flatten(copy.deepcopy(state)) if state else {}
            for name in kept:
                value = find(state, name)
                plain = isinstance(value, str | bool | int | float | np.number)
                array = isinstance(value, np.ndarray) and not value.dtype.hasobject
                assert plain or array, f"state: {name}: expected a value or an array, found {type(value).__name__}"
            buffer.extend(self.rows(500, 5))
            self._draw(buffer)
            for name, value in kept.items():
                assert np.array_equal(value, find(state, name)), f"state: {name}: expected an unchanged value"

    def test_what_is_wrong_changes_nothing(self) -> None:
        """Too few rows raise MouseError, another object's state raises StateError, and later draws stay the same."""
        buffer, other = self._buffer(), self._buffer()
        refused(MouseError, lambda: buffer.sampler.draw(buffer.storage, self.batch_size, _key(0)))
        refused(StateError, lambda: buffer.sampler.load_state_dict({"something": "else"}))
        for one in (buffer, other):
            one.extend(self.rows(0, 36))
        self._draw(buffer)
        self._draw(other)
        refused(StateError, lambda: buffer.sampler.load_state_dict({"something": "else"}))
        _assert_same_draw(self._draw(buffer), self._draw(other), "expected a rejected call to change nothing")

    def test_priorities_that_cannot_be_are_refused(self) -> None:
        """A sampler with priorities rejects invalid priorities and stays unchanged."""
        buffer, other = self._buffer(), self._buffer()
        if not buffer.prioritized:
            return
        for one in (buffer, other):
            one.extend(self.rows(0, 36))
            one.update_priority(np.arange(36), np.arange(36) % 5 + 0.5)
        for index, priority, error in (
            ([1, 2], [9.0, -1.0], DataError),
            ([1, 2], [9.0, np.nan], DataError),
            ([1, 2], [9.0, np.inf], DataError),
            ([1, 36], [9.0, 9.0], IndexError),
        ):
            update = partial(buffer.update_priority, np.array(index), np.array(priority))
            refused(error, update)
        for _ in range(3):
            _assert_same_draw(self._draw(buffer), self._draw(other), "expected a rejected call to change nothing")

    # ------------------------------------------------------------------ helpers

    def _check_draw(self, draw: Draw, rows: int) -> None:
        index = draw.index
        assert index.dtype == np.int64, f"index: expected int64, found {index.dtype}"
        assert index.ndim in (1, 2), f"index: expected [b] or [B, S], found {list(index.shape)}"
        windows = len(np.unique(draw.extra.get("slice_id", np.arange(len(index)))))
        assert 1 <= windows <= self.batch_size, f"index: expected up to {self.batch_size} windows, found {windows}"
        assert 0 <= index.min() <= index.max() < rows, "index: expected slots in use"
        if draw.mask is not None:
            assert draw.mask.dtype == np.bool_, f"mask: expected bool, found {draw.mask.dtype}"
            assert draw.mask.shape == index.shape, "mask: expected the shape of the index"
        weight = draw.priority_weight
        if weight is not None:
            assert weight.dtype == np.float32, f"priority_weight: expected float32, found {weight.dtype}"
            assert weight.shape in (index.shape, index.shape[:1]), (
                "priority_weight: expected one number per step or slice"
            )
        for name, values in draw.extra.items():
            assert values.shape[: index.ndim] == index.shape, f"{name}: expected the axes of the index in front"

    def _buffer(self, seed: int = 3) -> ReplayBuffer:
        return ReplayBuffer(ArrayStorage(40), self.make(), batch_size=self.batch_size, seed=seed)

    def _after_each_write(self, buffer: ReplayBuffer) -> Any:
        """Yield the buffer after each of several writes: first until the ring overwrites rows; then the buffer is
        emptied, and rows are added again.
        """
        written = 0
        for n in (27, 1, 8, 30, 1, 40, 55):
            buffer.extend(self.rows(written, n))
            written += n
            yield buffer
            if buffer.prioritized:
                slots = np.arange(0, len(buffer), 3)
                buffer.update_priority(slots, slots % 7 + 0.5)
                yield buffer
        for slot in (3, 39):
            buffer[slot] = {name: values[0] for name, values in self.rows(8, 1).items()}
            yield buffer
        buffer.empty()
        buffer.extend(self.rows(0, 36))
        yield buffer

    def _draw(self, buffer: ReplayBuffer) -> Draw:
        """Return the draw of the buffer's next sample."""
        return buffer.draw().draw


def _key(index: int) -> Key:
    return Key(3, Purpose.REPLAY, index)


_snapshots: dict[int, Any] = {}


def _snapshot(rows: int) -> Any:
    if rows not in _snapshots:
        _snapshots[rows] = example_store(rows).snapshot()
    return _snapshots[rows]


def _assert_same_draw(one: Draw, other: Draw, says: str) -> None:
    for name in ("index", "mask", "priority_weight"):
        mine, yours = getattr(one, name), getattr(other, name)
        assert (mine is None) == (yours is None), f"{says}: {name}"
        assert mine is None or np.array_equal(mine, yours), f"{says}: {name}: {mine.tolist()}, {yours.tolist()}"
    assert one.extra.keys() == other.extra.keys(), says
    for name, values in one.extra.items():
        assert np.array_equal(values, other.extra[name]), f"{says}: {name}"
