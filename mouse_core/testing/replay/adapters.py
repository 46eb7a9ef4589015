"""The contract of a framework's replay buffer, as tests that its author runs with pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core import replay
from mouse_core.errors import ConfigError, DataError, MouseError, StateError
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.testing._comparing import InArrays, refused, same_arguments

_SIZE = 40


class ReplayAdapterConformance(InArrays):
    """Tests that a framework's ``ReplayBuffer`` draws, keeps and refuses what the core's does.

    Subclass it in a test file, under a name that begins with ``Test``, and name the classes to test:

        class TestMyReplay(ReplayAdapterConformance):
            buffer_class = my_adapter.ReplayBuffer
            ensemble_class = my_adapter.ReplayBufferEnsemble

            def from_numpy(self, values):
                return my_framework.asarray(values)

    Attributes:
        buffer_class: The adapter's buffer.
        ensemble_class: Its ensemble; None if it has none.
        replaced_dtypes: Dtypes that the framework cannot hold, and what the adapter delivers instead.
        options: Further arguments for every buffer.
    """

    buffer_class: Any = replay.ReplayBuffer
    ensemble_class: Any = replay.ReplayBufferEnsemble
    options: Mapping[str, Any] = {}

    def storage(self, capacity: int, ndim: int) -> Any:
        """An empty storage for the framework's buffers; override it for a storage of the framework."""
        return ArrayStorage(capacity, ndim)

    def test_it_takes_the_arguments_of_the_core(self) -> None:
        """The framework's buffer has the core's arguments; additional ones are keyword-only."""
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
        """Rows ``[time, env]`` of any number of time steps, or one time step; and of as many environments always."""
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
        self.same(mine.sample(), core.sample(), "after what was refused")

    def test_a_loop_is_an_epoch(self) -> None:
        """A loop without replacement draws each row once."""
        mine, core = self._pair(sampler=replay.SamplerWithoutReplacement)
        for buffer, rows in ((mine, self.given(_rows(30))), (core, _rows(30))):
            buffer.extend(rows)
        for _ in range(2):
            for found, expected in zip(mine, core, strict=True):
                self.same(found, expected, "an epoch")

    def test_priorities_come_in_its_arrays(self) -> None:
        """Priorities are set by index and value, by a whole batch, and with the rows."""
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
        self.same(mine.sample(), core.sample(), "after what was refused")
        plain, _ = self._pair()
        refused(ConfigError, lambda: plain.update_priority(np.zeros(1, np.int64), np.zeros(1)), "knows priorities")

    def test_rows_are_read_and_written_over(self) -> None:
        """Rows are read and overwritten by index arrays of any shape, slices and masks."""
        mine, core = self._pair()
        for buffer, given in ((mine, self.given), (core, lambda rows: rows)):
            buffer.extend(given(_rows(20)))
            buffer[3] = given(_rows_at(np.array(90)))
            buffer[np.array([5, 7])] = given(_rows(2, 95))
        for index in (3, slice(2, 9), np.array([5, 1]), np.array([[5, 1], [0, 7]]), np.arange(20) % 3 == 0):
            self.same(mine[index], core[index], f"rows {index}")

    def test_a_batch_never_changes(self) -> None:
        """Whatever is written after it was delivered."""
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
        """A state moves between core and framework in both directions, as a dict and as a file."""
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
        self.same(other.sample(), back.sample(), "after what was refused")

    def test_a_digest_runs_along(self) -> None:
        """Equal to the core's where the framework has all dtypes; a state has it, and it goes on from there."""
        mine, core = self._pair(digest=True)
        mine.extend(self.given(_rows(30)))
        core.extend(_rows(30))
        for _ in range(3):
            mine.sample()
            core.sample()
        assert mine.digest.windows == 24, f"expected a digest of 24 rows, found {mine.digest}"
        if not self.replaced_dtypes:
            assert mine.digest == core.digest, f"expected the core's digest {core.digest}, found {mine.digest}"
        other, _ = self._pair(digest=True)
        other.load_state_dict(mine.state_dict())
        before = mine.digest
        assert other.digest == before, f"expected {before} from a state, found {other.digest}"
        mine.sample()
        other.sample()
        assert other.digest == mine.digest != before, f"expected {mine.digest} after a state, found {other.digest}"

    def test_what_is_refused_changes_nothing(self) -> None:
        """Rows unlike the first ones; a sample of an empty buffer."""
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
        self.same(mine.sample(), core.sample(), "after what was refused")

    def test_ensembles_are_those_of_the_core(self) -> None:
        """Shares, priorities and all."""
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
        """The adapter's buffer and the core's, made alike, with parts of their own."""
        given: dict[str, Any] = {"batch_size": 8, "seed": 5, **options}
        make, change = sampler or replay.RandomSampler, transform or list
        mine = self.storage(_SIZE, ndim)
        return (
            self.buffer_class(mine, make(), transform=change(), **{**given, **self.options}),
            replay.ReplayBuffer(ArrayStorage(_SIZE, ndim), make(), transform=change(), **given),
        )


def _counts(buffer: Any) -> dict[str, Any]:
    """The numbers of a buffer, but for its bytes: a framework may not have NumPy's widest dtypes."""
    return {name: value for name, value in buffer.stats().items() if name != "nbytes"}


def _rows(n: int, first: int = 0) -> dict[str, Any]:
    """Nested rows that can be told by their numbers."""
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
