"""Replay buffers beside a model of plain Python: every storage, writer and sampler, with a checkpoint at any step."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mouse_core import MouseError
from mouse_core.replay import (
    ArrayStorage,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

Row = dict[str, Any]


class Model:
    """What a buffer should hold: rows by slot, in a list."""

    def __init__(self, capacity: int, best: bool) -> None:
        self.capacity, self.best = capacity, best
        self.slots: list[Row] = []
        self.written = 0

    def add(self, row: Row) -> int:
        if len(self.slots) < self.capacity:
            slot = len(self.slots)
            self.slots.append(row)
        elif not self.best:
            slot = self.written % self.capacity
            self.slots[slot] = row
        else:
            slot = min(range(self.capacity), key=lambda slot: (self.slots[slot]["rank"], -slot))
            if row["rank"] <= self.slots[slot]["rank"]:
                return -1
            self.slots[slot] = row
        self.written += 1
        return slot

    def extend(self, rows: list[Row]) -> list[int]:
        given = [self.add(row) for row in rows]
        if self.best:  # a row that another of the same write displaced was not kept
            return [
                slot if slot >= 0 and self.slots[slot] is row else -1 for slot, row in zip(given, rows, strict=True)
            ]
        return given


def samplers() -> dict[str, Any]:
    ends: Row = {"end_key": "done", "strict_length": False, "pad": None}
    return {
        "random": RandomSampler,
        "without": SamplerWithoutReplacement,
        "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
        "prioritized": lambda: PrioritizedSampler(0.8, 0.5),
        "slices": lambda: SliceSampler(sequence_length=2, end_key="done", pad=False),
        "trajectories": lambda: SliceSampler(sequence_length=2, traj_key="episode", weighting="trajectory", pad=False),
        "slices without": lambda: SliceSamplerWithoutReplacement(sequence_length=2, end_key="done", pad=False),
        "prioritized slices": lambda: PrioritizedSliceSampler(0.8, 0.5, sequence_length=2, end_key="done", pad=False),
        "padded": lambda: SliceSampler(sequence_length=3, **{**ends, "pad": 0}),
    }


class BufferMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(1, 9),
        storage=st.sampled_from(["array", "list", "memmap"]),
        best=st.booleans(),
        data=st.data(),
    )
    def begin(self, capacity: int, storage: str, best: bool, data: st.DataObject) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="mouse-machine-")
        self.capacity, self.kind, self.best = capacity, storage, best
        names = [
            name for name in samplers() if not best or ("slices" not in name and name not in ("trajectories", "padded"))
        ]
        self.sampler = data.draw(st.sampled_from(names), label="sampler")
        self.made = 0
        self.number = 0
        self.episode = 0
        self.model = Model(capacity, best)
        self.buffer = self._make()

    def _make(self) -> ReplayBuffer:
        self.made += 1
        storage: Any
        if self.kind == "array":
            storage = ArrayStorage(self.capacity)
        elif self.kind == "list":
            storage = ListStorage(self.capacity)
        else:
            storage = MemmapStorage(self.capacity, Path(self.folder.name) / f"mapped{self.made}")
        writer = MaxValueWriter("rank") if self.best else None
        return ReplayBuffer(storage, samplers()[self.sampler](), writer, seed=self.made)

    def _row(self, rank: int, done: bool) -> Row:
        number = self.number
        row = {
            "number": np.int64(number),
            "rank": np.float32(rank),
            "done": np.bool_(done),
            "episode": np.int32(self.episode),
            "nested": {"obs": np.arange(number, number + 3, dtype=np.float64)},
        }
        self.number += 1
        self.episode += done
        return row

    @rule(rank=st.integers(0, 4), done=st.booleans())
    def add(self, rank: int, done: bool) -> None:
        row = self._row(rank, done)
        assert self.buffer.append(row) == self.model.add(row)

    @rule(kinds=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=23), as_list=st.booleans())
    def extend(self, kinds: list[tuple[int, bool]], as_list: bool) -> None:
        rows = [self._row(*kind) for kind in kinds]
        if not rows:
            return
        given = self.buffer.extend(rows if as_list else stacked(rows))
        assert given.tolist() == self.model.extend(rows)

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data(), rank=st.integers(0, 4))
    def overwrite(self, data: st.DataObject, rank: int) -> None:
        slots = data.draw(st.lists(st.integers(0, len(self.model.slots) - 1), min_size=1, max_size=3, unique=True))
        rows = []
        for slot in slots:
            old = self.model.slots[slot]
            episode = self.episode  # what is put in place of a row ends no other episode
            rows.append({**self._row(rank, bool(old["done"])), "episode": old["episode"]})
            self.episode = episode
        if len(slots) == 1:
            self.buffer[slots[0]] = rows[0]
        else:
            self.buffer[np.array(slots)] = stacked(rows)
        for slot, row in zip(slots, rows, strict=True):
            self.model.slots[slot] = row

    @rule()
    def empty(self) -> None:
        self.buffer.empty()
        self.model = Model(self.capacity, self.best)

    @rule()
    def write_nonsense(self) -> None:
        if self.kind == "list" or not self.model.slots:
            return
        good = self._row(9, False)
        for bad in (
            {**good, "rank": np.float64(9)},
            {**good, "more": 1},
            {"rank": np.float32(9)},
            {**good, "nested": 1},
        ):
            with pytest.raises(MouseError):
                self.buffer.append(bad)
            with pytest.raises(MouseError):
                self.buffer.extend([good, bad])
            if "more" in bad and len(self.model.slots) == 1:
                continue  # a new field may be set where all rows are given it
            with pytest.raises(MouseError):
                self.buffer[0] = bad
        with pytest.raises(IndexError):
            self.buffer[len(self.model.slots)]

    def _sample(self, buffer: ReplayBuffer, size: int) -> dict[str, Any] | None:
        try:
            return buffer.sample(size)  # type: ignore[no-any-return]
        except MouseError as error:
            message = str(error)
        # Too few rows; where there are rows to draw from only slices may find nothing.
        assert not self.model.slots or size > len(self.model.slots) or "slice" in message, message
        return None

    @rule(size=st.integers(1, 4))
    def sample(self, size: int) -> None:
        slices = "slices" in self.sampler or self.sampler in ("trajectories", "padded")
        length = 3 if self.sampler == "padded" else 2
        batch = self._sample(self.buffer, size)
        if batch is None:
            return
        index = batch["index"]
        mask = batch.get("mask", np.ones(index.shape, bool))
        expected = [self.model.slots[slot] for slot in index.reshape(-1).tolist()]
        meant = mask.reshape(-1)
        for name in ("number", "rank", "done", "episode"):
            wanted = np.array([row[name] for row in expected])
            np.testing.assert_array_equal(batch[name].reshape(-1)[meant], wanted[meant], name)
        obs = batch["nested"]["obs"].reshape(-1, 3)
        np.testing.assert_array_equal(obs[meant], np.array([row["nested"]["obs"] for row in expected])[meant])
        if not slices:
            return
        # Without replacement the last batch of an epoch is short.
        assert index.shape == (size, length) or (self.sampler == "slices without" and 0 < len(index) < size)
        written, capacity = self.model.written, self.capacity
        for slots, known in zip(index.tolist(), mask.tolist(), strict=True):
            # In the order of writing, side by side, and never over the end of an episode.
            numbers = [written - 1 - (written - 1 - slot) % capacity for slot in slots]
            found = zip(numbers, slots, known, strict=True)
            steps = [(number, self.model.slots[slot]) for number, slot, there in found if there]
            assert steps
            assert [number for number, _ in steps] == list(range(steps[0][0], steps[0][0] + len(steps)))
            assert len({int(row["episode"]) for _, row in steps}) == 1
            assert len(steps) == length or self.sampler == "padded"

    @precondition(lambda self: "prioritized" in self.sampler and self.model.slots)
    @rule(data=st.data())
    def set_priorities(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, len(self.model.slots) - 1), min_size=1, max_size=4))
        self.buffer.update_priority(slots, np.arange(1.0, len(slots) + 1))
        with pytest.raises(MouseError):
            self.buffer.update_priority(slots, np.full(len(slots), -1.0))
        with pytest.raises(MouseError):
            self.buffer.update_priority(slots, np.full(len(slots), np.nan))
        with pytest.raises(IndexError):
            self.buffer.update_priority([len(self.model.slots)], [1.0])

    @rule(to_file=st.booleans(), size=st.integers(1, 3))
    def go_on_elsewhere(self, to_file: bool, size: int) -> None:
        """All that follows is the same in a buffer that was loaded."""
        other = self._make()
        if self.number % 2:  # rows that loading replaces: the episode here goes on
            episode = self.episode
            other.extend([self._row(3, True), self._row(2, False)])
            self.episode = episode
        if to_file:
            self.buffer.dumps(Path(self.folder.name) / "saved")
            other.loads(Path(self.folder.name) / "saved")
        else:
            other.load_state_dict(self.buffer.state_dict())
        first, second = self._row(4, False), self._row(2, True)
        for buffer in (self.buffer, other):
            buffer.append(first)
        self.model.add(first)
        for turn in range(3):
            batches = [self._sample(buffer, size) for buffer in (self.buffer, other)]
            np.testing.assert_equal(*batches)
            if batches[0] is not None and "prioritized" in self.sampler:
                for buffer in (self.buffer, other):
                    buffer.update_priority(batches[0]["index"], np.full(batches[0]["index"].shape, turn + 0.5))
        for buffer in (self.buffer, other):
            buffer.append(second)
        self.model.add(second)
        assert self.buffer.stats() == other.stats()
        self.buffer = other

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "model"):
            return
        assert len(self.buffer) == len(self.model.slots)
        if not self.model.slots:
            return
        rows = self.buffer[:]
        rows = rows if isinstance(rows, list) else [row(rows, number) for number in range(len(self.model.slots))]
        np.testing.assert_equal(stacked(rows), stacked(self.model.slots))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def stacked(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {name: stacked([row[name] for row in rows]) for name in rows[0]}
    return np.stack(rows)


def row(tree: Any, number: int) -> Any:
    return {name: row(child, number) for name, child in tree.items()} if isinstance(tree, dict) else tree[number]


def test_buffers_do_what_the_model_does() -> None:
    run_state_machine_as_test(BufferMachine, settings=settings(max_examples=20, stateful_step_count=20, deadline=None))


@pytest.mark.long
def test_buffers_do_what_the_model_does_at_length() -> None:
    run_state_machine_as_test(BufferMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))
