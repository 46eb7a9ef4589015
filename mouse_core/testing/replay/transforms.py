"""Conformance tests for pytest: transforms of replay buffers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from mouse_core.errors import StateError
from mouse_core.nested import flatten, map_tree
from mouse_core.prefetch.batchifier import PrefetchBatchifier
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.protocols import EPISODE
from mouse_core.replay.samplers.slices import SliceSampler
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.spec import Alignment
from mouse_core.testing._comparing import refused


class TransformConformance:
    """Tests that ``ReplayBuffer`` can use a transform, which implements ``mouse_core.replay.Transform``, in any thread.

    Subclass it in a test file, under a name that begins with ``Test``, and implement ``make``:

        class TestMine(TransformConformance):
            def make(self):
                return MyTransform()

    Attributes:
        sequence_length: Number of steps in a slice of the tests; None: the tests use single rows.
        batch_size: Number of rows, or slices, of a batch.
        alignment: The alignment of the rows.
    """

    sequence_length: int | None = None
    batch_size: int = 6
    alignment: Alignment = "outgoing"

    def make(self) -> Any:
        """Return a new transform, always with the same options, or a list of transforms."""
        raise NotImplementedError

    def rows(self, first: int, n: int) -> dict[str, Any]:
        """Return rows to write, ``[n, ...]``; override it for a transform that needs other fields."""
        numbers = np.arange(first, first + n)
        return {
            "obs": (numbers[:, None] * [1, -2]).astype(np.float32),
            "action": numbers % 3,
            "reward": np.sin(numbers).astype(np.float32),
            "done": (numbers % 9 == 8).astype(np.int8),
        }

    def test_a_batch_is_a_function_of_what_was_drawn(self) -> None:
        """Two computations of the same batch give equal results, and do not write to the input arrays."""
        for buffer in self._history():
            drawn = buffer.draw()
            for leaf in flatten(drawn.rows).values():
                leaf.setflags(write=False)
            _same(buffer.batch_of(drawn), buffer.batch_of(drawn), "expected the same batch of the same rows")

    def test_a_batch_that_was_drawn_stays(self) -> None:
        """Writes between a draw and its transform do not change the batch. (With a prefetching thread, such writes can
        occur.)"""
        for buffer in self._history():
            drawn = buffer.draw()
            before = buffer.batch_of(drawn)
            buffer.extend(self.rows(700, 13))
            buffer.draw()
            _same(before, buffer.batch_of(drawn), "expected drawn batches to stay the same after writes")

    def test_threads_change_nothing(self) -> None:
        """Batches and their order are the same with and without threads."""
        streams = []
        for workers in (0, 2):
            buffer = next(self._history())
            with PrefetchBatchifier(buffer, prefetch=2, num_workers=workers) as loader:
                stream = []
                for number in range(4):
                    stream.append(loader.next_batch())
                    buffer.extend(self.rows(100 * number, 3))
                streams.append(stream)
        for one, other in zip(*streams, strict=True):
            _same(one, other, "expected the same batches with and without threads")

    def test_a_loader_goes_on_from_its_state(self) -> None:
        """A restored loader delivers the batches that were drawn before the state was saved, and then the following
        batches.
        """
        buffer = next(self._history())
        with PrefetchBatchifier(buffer, prefetch=2) as loader:
            loader.next_batch()
            buffer.extend(self.rows(300, 7))
            saved = copy.deepcopy((buffer.state_dict(), loader.state_dict()))
            wanted = [loader.next_batch() for _ in range(4)]
        again = self._buffer(seed=99)
        again.load_state_dict(saved[0])
        with PrefetchBatchifier(again, prefetch=2) as loader:
            loader.load_state_dict(saved[1])
            for batch in wanted:
                _same(batch, loader.next_batch(), "expected the batches after the saved state")

    def test_it_goes_on_from_its_state(self) -> None:
        """A new buffer that loads a saved state draws the same batches as the original buffer, also after more
        writes."""
        for buffer in self._history():
            again = self._buffer(seed=99)
            again.load_state_dict(copy.deepcopy(buffer.state_dict()))
            for _ in range(2):
                _same(buffer.sample(), again.sample(), "expected the samples after the saved state")
                for one in (buffer, again):
                    one.extend(self.rows(900, 5))

    def test_it_is_pickled_with_its_buffer(self) -> None:
        """A pickled buffer draws the same batches as the original."""
        for buffer in self._history():
            try:
                again = pickle.loads(pickle.dumps(buffer))
            except (AttributeError, pickle.PicklingError):  # a function outside of a module belongs to the user
                return
            _same(buffer.sample(), again.sample(), "expected a pickled buffer to draw the original's batches")

    def test_rows_are_stored_alike_one_by_one_and_together(self) -> None:
        """A transform with an inverse stores equal rows, whether they are written singly or together."""
        buffer, other = self._buffer(), self._buffer()
        rows = self.rows(0, 9)
        buffer.extend(rows)
        one: Any = other.transform
        if not any(hasattr(step, "inverse") and not hasattr(step, "transform") for step in one.transforms):
            return
        for number in range(9):
            other.append(map_tree(itemgetter(number), rows))
        _same(buffer[:], other[:], "expected the same rows by append and by extend")

    def test_other_episodes_change_nothing(self) -> None:
        """Rows of an episode do not depend on other episodes, even if only the storage knows where an episode ends.

        Batches of the same draws are compared: the rows of some episodes have the same values in both buffers.
        """
        if self._buffer().transform.watchers:  # type: ignore[union-attr]
            return  # the numbers of all rows
        batches = []
        for shift in (0, 5000):
            sampler = None if self.sequence_length is None else SliceSampler(sequence_length=self.sequence_length)
            storage = _Recorded(40, alignment=self.alignment)
            buffer = ReplayBuffer(storage, sampler, transform=self.make(), batch_size=60, seed=3)
            # Episodes of 6 rows; every other one has other values in the second buffer.
            for number in range(5):
                rows = self.rows(6 * number + (shift if number % 2 else 0), 6)
                buffer.extend({name: np.zeros_like(leaf) if name == "done" else leaf for name, leaf in rows.items()})
            batches.append(flatten(buffer.sample()))
        index = np.asarray(batches[0]["index"])
        same = (index.reshape(len(index), -1)[:, 0] // 6) % 2 == 0
        if np.ndim(batches[0].get("mask", index)) == 1 and "mask" in batches[0]:
            same &= np.asarray(batches[0]["mask"])  # an incomplete transition is ignored
        kept = [{str(key): leaf[same] for key, leaf in batch.items() if len(leaf) == len(same)} for batch in batches]
        _same(kept[0], kept[1], "expected rows that do not depend on other episodes")

    def test_states_of_something_else_are_refused(self) -> None:
        """The state consists of plain values; the state of another object is rejected and changes nothing."""
        buffer = next(self._history())
        watchers = buffer.transform.watchers  # type: ignore[union-attr]
        for part in watchers.values():
            state = part.state_dict()
            for name, value in flatten(state).items():
                plain = isinstance(value, str | bool | int | float | np.ndarray)
                assert plain, f"state: {name}: expected a value or an array, found {type(value).__name__}"
            refused(StateError, partial(part.load_state_dict, {"something": "else"}))
            _same(state, part.state_dict(), "expected a rejected state to change nothing")

    # ------------------------------------------------------------------ helpers

    def _buffer(self, seed: int = 3) -> ReplayBuffer:
        length = self.sequence_length
        sampler = None if length is None else SliceSampler(sequence_length=length, end_key="done")
        storage = ArrayStorage(40, alignment=self.alignment)
        return ReplayBuffer(storage, sampler, transform=self.make(), batch_size=self.batch_size, seed=seed)

    def _history(self) -> Iterator[ReplayBuffer]:
        """Yield a buffer after each of several writes, until rows are overwritten."""
        buffer, written = self._buffer(), 0
        for n in (27, 9, 45):
            buffer.extend(self.rows(written, n))
            written += n
            yield buffer


class _Recorded(ArrayStorage):
    """A storage with episodes of 6 rows; no field of the rows marks their ends."""

    def read(self, key: Any, slots: Any) -> Any:
        if key == EPISODE:
            return (np.arange(len(self))[slots] if isinstance(slots, slice) else slots) // 6
        return super().read(key, slots)


def _same(one: Any, other: Any, says: str) -> None:
    mine, yours = flatten(one), flatten(other)
    assert mine.keys() == yours.keys(), f"{says}: {[*mine]}, {[*yours]}"
    for key, values in mine.items():
        left, right = (np.asarray(leaf) for leaf in (values, yours[key]))
        assert left.dtype == right.dtype, f"{says}: {key}: {left.dtype}, {right.dtype}"
        floats = left.dtype.kind == "f"
        assert np.array_equal(left, right, equal_nan=floats), f"{says}: {key}: {left!r:.200}, {right!r:.200}"
