"""The contract of a batch source, as tests that its author runs with pytest."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import StateError
from mouse_core.prefetch.batchifier import PrefetchBatchifier
from mouse_core.prefetch.source import Source
from mouse_core.spec import Spec
from mouse_core.testing._comparing import refused
from mouse_core.testing.digest import stream_digest

_BATCHES = 5


class SourceConformance:
    """Tests that a source is one that loaders can use: ``mouse_core.prefetch.Source``.

    Subclass it in a test file, under a name that begins with ``Test``, and say how one is made:

        class TestMine(SourceConformance):
            def make(self):
                return MySource()
    """

    def make(self) -> Any:
        """A new source, always the same."""
        raise NotImplementedError

    def test_it_has_what_the_protocol_names(self) -> None:
        """A spec, a fingerprint that is always the same, batches by number, and at least one in an epoch."""
        source = self.make()
        assert isinstance(source, Source), f"expected spec, fingerprint, a length and batches by number: {source}"
        assert isinstance(source.spec, Spec), f"expected a mouse_core.Spec, found {source.spec!r}"
        assert isinstance(source.fingerprint, str), f"expected a text, found {source.fingerprint!r}"
        assert source.fingerprint == self.make().fingerprint, "expected the same fingerprint of the same source"
        assert len(source) >= 1, f"expected batches in an epoch, found {len(source)}"

    def test_the_spec_says_what_comes(self) -> None:
        """Names in their order, dtypes, and the shape of a step behind ``[B, S]``, or ``[B]`` where it says so."""
        source = self.make()
        for view in _views(source[0]):
            assert list(view) == list(source.spec), f"expected the fields {list(source.spec)}, found {list(view)}"
            size = next(iter(view.values())).shape[: source.spec.batch_dims]
            for name, field in source.spec.items():
                values = view[name]
                assert values.dtype == field.dtype, f"{name}: expected {field.dtype}, found {values.dtype}"
                if field.per_sequence:
                    assert values.ndim == 1 + len(field.shape), f"{name}: found the shape {values.shape}"
                    assert values.shape[1:] == field.shape, f"{name}: found the shape {values.shape}"
                else:
                    assert values.shape == (*size, *field.shape), f"{name}: found the shape {values.shape}"

    def test_packed_windows_lie_where_it_says(self) -> None:
        """Packed windows follow each other from row 0; padding lies behind the last one."""
        source = self.make()
        for view in _views(source[0]) if source.spec.is_packed else ():
            bounds, rows = view["cu_seqlens"], len(view["position"])
            assert bounds[0] == 0, f"cu_seqlens: expected the first window at row 0, found {bounds[0]}"
            assert (np.diff(bounds) >= 0).all(), f"cu_seqlens: expected it to ascend, found {bounds.tolist()}"
            assert bounds[-1] <= rows, f"cu_seqlens: expected at most {rows} rows, found {bounds[-1]}"
            missing = [rows - int(bounds[-1])]
            windows = len(bounds) - 1
            expected = np.repeat(np.arange(windows + 1), [*np.diff(bounds), *missing])
            assert np.array_equal(view["sequence_id"], expected), "sequence_id: expected that of the row's window"
            steps = np.arange(rows) - np.repeat([*bounds[:-1], 0], [*np.diff(bounds), *missing])
            steps[bounds[-1] :] = 0
            assert np.array_equal(view["position"], steps), "position: expected the place of a row in its window"

    def test_a_batch_is_a_function_of_its_number(self) -> None:
        """In any order, more than once, of another source made alike, and beyond the end of an epoch."""
        source, other = self.make(), self.make()
        numbers = [*range(_BATCHES), len(source), len(source) + 1]
        expected = {number: _digest(source[number]) for number in numbers}
        for number in reversed(numbers):
            assert _digest(other[number]) == expected[number], f"batch {number} is another one in another order"
            assert _digest(source[number]) == expected[number], f"batch {number} is another one when asked again"

    def test_threads_get_the_same(self) -> None:
        """Threads that ask at the same time get equal batches."""
        one, source = self.make(), self.make()
        expected = [_digest(one[number]) for number in range(4 * _BATCHES)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(source.__getitem__, range(4 * _BATCHES)))
        for number, batch in enumerate(found):
            assert _digest(batch) == expected[number], f"batch {number} is another one among threads"

    def test_batches_are_the_callers(self) -> None:
        """Nothing is written to one that was delivered, and what the caller writes is not seen again."""
        source, other = self.make(), self.make()
        # Digests, as a batch of the other source may lie in memory that the two share.
        expected = [_digest(other[number]) for number in range(_BATCHES)]
        kept = [source[number] for number in range(_BATCHES)]
        for number, batch in enumerate(kept):
            assert _digest(batch) == expected[number], f"batch {number} was written to after it was delivered"
        for batch in kept:
            for view in _views(batch):
                for values in view.values():
                    values[...] = 0
        for number in range(_BATCHES):
            assert _digest(source[number]) == expected[number], f"batch {number} is in memory that the caller has"

    def test_a_loader_delivers_it(self) -> None:
        """A loader delivers the source with any number of workers, and goes on from a state of that source only."""
        source = self.make()
        for workers in (0, 4):
            with PrefetchBatchifier(self.make(), num_workers=workers) as loader:
                assert loader.spec == source.spec
                found = [loader.next_batch() for _ in range(2 * _BATCHES)]
                state = loader.state_dict()
            for number, batch in enumerate(found):
                assert _digest(batch) == _digest(source[number]), f"batch {number} is another one in a loader"
            with PrefetchBatchifier(self.make(), num_workers=workers) as loader:
                loader.load_state_dict(state)
                assert _digest(loader.next_batch()) == _digest(source[len(found)]), (
                    "expected the batch behind the last delivered"
                )
                refused(StateError, partial(loader.load_state_dict, {**state, "fingerprint": "another"}))

    def test_other_numbers_of_processes_go_on_with_it(self) -> None:
        """Stopped with 3 processes, gone on with 1, then with 4: together they have the rows of the whole batches."""
        source = self.make()
        if source.spec.is_packed or getattr(source, "shard", (0, 1)) != (0, 1):
            return  # whose rows are no windows, who makes it says whether it has shards; or it is one
        state: Any = None
        for begin, end, count in ((0, 2, 3), (2, 3, 1), (3, 5, 4)):
            loaders = [PrefetchBatchifier(self.make(), shard=(rank, count), uneven="pad") for rank in range(count)]
            for loader in loaders if state else ():
                loader.load_state_dict(state)
            for number in range(begin, end):
                parts = [_views(loader.next_batch()) for loader in loaders]
                for expected, *views in zip(_views(source[number]), *parts, strict=True):
                    _assert_together(expected, views, f"batch {number} in {count}")
            states = [loader.state_dict() for loader in loaders]
            state = states[0]
            assert states == [state] * count, f"expected the same state of all {count} processes, found {states}"
            for loader in loaders:
                loader.close()


def _assert_together(whole: dict[str, npt.NDArray[Any]], parts: Sequence[Any], what: str) -> None:
    """A batch is what the parts of all processes make, where those that have fewer rows are padded."""
    size, count = len(next(iter(whole.values()))), len(parts)
    own = [size * (rank + 1) // count - size * rank // count for rank in range(count)]
    for name, values in whole.items():
        found = [part[name][:rows] for part, rows in zip(parts, own, strict=True)]
        np.testing.assert_array_equal(np.concatenate(found), values, f"{name} of {what}")


def _views(batch: Any) -> tuple[dict[str, npt.NDArray[Any]], ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _digest(batch: Any) -> str:
    """Return a digest that is equal for bit-identical batches."""
    return stream_digest([batch], 1)
