"""Conformance tests for pytest: storages of replay buffers."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import MissingFieldError, MouseError, StateError
from mouse_core.nested import map_tree, stack
from mouse_core.replay import NextView, ReplayBuffer, Storage
from mouse_core.spec import Alignment
from mouse_core.testing._comparing import leaves, refused

Rows = dict[str, Any]


class Nodes(NamedTuple):
    """A row that nests every kind of container."""

    layers: Any
    rest: Any


class StorageConformance:
    """Tests that a class implements the protocol ``mouse_core.replay.Storage``.

    Subclass it in a test file, under a name that begins with ``Test``, and implement ``make``:

        class TestMine(StorageConformance):
            def make(self, capacity, ndim, folder, alignment):
                return MyStorage(capacity, ndim=ndim, alignment=alignment)

    Attributes:
        typed: Whether all rows must have the fields, shapes and dtypes of the first row; False for a storage of
            arbitrary objects.
        ndims: The supported values of ``ndim``.
        alignments: The supported alignments.
        buffer: The class of buffers for transformed rows.
    """

    typed = True
    ndims: tuple[int, ...] = (1, 2)
    alignments: tuple[Alignment, ...] = ("outgoing", "arrived")
    buffer: Any = ReplayBuffer

    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> Any:
        """Return a new storage; ``folder`` is an empty folder for its files."""
        raise NotImplementedError

    def to_numpy(self, values: Any) -> npt.NDArray[Any]:
        """Convert a leaf to a NumPy array; override it for a storage with other arrays."""
        return np.asarray(values)

    # ------------------------------------------------------------------ content

    def test_it_has_what_the_protocol_names(self, tmp_path: Path) -> None:
        """An empty storage has the members and sizes of the protocol."""
        storage = self._new(12, 1, tmp_path)
        assert isinstance(storage, Storage), f"expected the members of mouse_core.replay.Storage, found {storage!r}"
        assert (len(storage), storage.capacity, storage.written, storage.num_envs) == (0, 12, 0, 1)
        assert storage.writable is True

    def test_it_has_the_alignment_that_it_was_given(self, tmp_path: Path) -> None:
        """The storage keeps its alignment, and raises StateError for the state of another alignment."""
        states: dict[str, Any] = {}
        for alignment in self.alignments:
            storage = self.make(5, 1, _folder(tmp_path, alignment), alignment)
            assert storage.alignment == alignment, f"expected {alignment!r}, found {storage.alignment!r}"
            storage.append(rows_from(0, 3))
            for other, state in states.items():
                refused(StateError, partial(storage.load, state), other)
            states[alignment] = copy.deepcopy(storage.state())

    def test_rows_lie_where_a_ring_puts_them(self, tmp_path: Path) -> None:
        """Single rows and several rows are written in different orders, until more rows than the capacity were
        written."""
        storage = self._new(7, 1, tmp_path)
        kept: dict[int, int] = {}
        written = 0
        for n in (1, 3, 0, 2, 5, 1, 7, 19, 1, 6):
            first, count = (
                storage.append(rows_from(written, n)) if n != 1 else storage.append(row_of(written), one=True)
            )
            assert (first, count) == (written, n)
            for number in range(written, written + n):
                kept[number % 7] = number
            written += n
            assert storage.written == written
            assert len(storage) == min(written, 7)
            self._holds(storage, kept)

    def test_lists_of_rows_are_rows(self, tmp_path: Path) -> None:
        """A list of rows is written one row after another."""
        storage = self._new(7, 1, tmp_path)
        storage.append([row_of(number) for number in range(9)])
        self._holds(storage, {number % 7: number for number in range(2, 9)})

    def test_time_steps_of_environments_stay_together(self, tmp_path: Path) -> None:
        """Rows ``[time, env]`` have the slots time * num_envs + env."""
        if 2 not in self.ndims:
            return
        storage = self._new(12, 2, tmp_path)
        steps = [rows_from(number, 3) for number in (0, 3, 6, 9, 12)]
        assert storage.append(steps[0], one=True) == (0, 3)
        assert storage.append(stack(steps[1:])) == (3, 12)
        assert (storage.num_envs, storage.capacity, len(storage), storage.written) == (3, 12, 12, 15)
        self._holds(storage, {number % 12: number for number in range(3, 15)})

    def test_whole_time_steps_fit(self, tmp_path: Path) -> None:
        """The first write determines the number of environments, and rounds the capacity down to full time steps."""
        if 2 not in self.ndims:
            return
        storage = self._new(10, 2, tmp_path)
        refused(MouseError, lambda: storage.append(rows_from(0, 11), one=True), "expected")
        assert (storage.num_envs, storage.capacity, len(storage), storage.written) == (1, 10, 0, 0)
        for first in range(0, 12, 3):
            assert storage.append(rows_from(first, 3), one=True) == (first, 3)
        assert (storage.num_envs, storage.capacity, len(storage)) == (3, 9, 9)
        self._holds(storage, {number % 9: number for number in range(3, 12)})
        again = self.make(10, 2, tmp_path / "again", storage.alignment)
        again.load(copy.deepcopy(storage.state()))
        assert (again.capacity, again.num_envs, again.written) == (9, 3, 12)
        self._holds(again, {number % 9: number for number in range(3, 12)})

    def test_rows_are_given_in_any_shape_and_order(self, tmp_path: Path) -> None:
        """Rows are read by indices ``[n]`` and ``[a, b]``, by no indices, and by repeated indices."""
        storage = self._new(7, 1, tmp_path)
        storage.append(rows_from(0, 5))
        for slots in ([3, 0, 3], [[1, 2], [4, 4], [0, 3]], []):
            index = np.array(slots, np.int64)
            self._same(storage.get(index), index)

    def test_what_was_given_is_never_written_to(self, tmp_path: Path) -> None:
        """The storage copies rows, so that changes to arrays that it received or returned do not affect its rows."""
        storage = self._new(4, 1, tmp_path)
        mine = rows_from(0, 4)
        storage.append(mine)
        one = row_of(4)
        storage.append(one, one=True)
        _overwrite(mine)
        _overwrite(one)
        slots = np.arange(4)
        self._holds(storage, {0: 4, 1: 1, 2: 2, 3: 3})
        read = storage.get(slots)
        for item in read if isinstance(read, list) else [read]:
            _overwrite(item)
        self._holds(storage, {0: 4, 1: 1, 2: 2, 3: 3})
        before = storage.get(slots)
        kept = copy.deepcopy(before)
        storage.append(rows_from(50, 4))
        storage.put(slots, rows_from(90, 4))
        storage.empty()
        pairs = zip(before, kept, strict=True) if isinstance(before, list) else [(before, kept)]
        for one, other in pairs:
            for (path, given), (_, expected) in zip(leaves(one), leaves(other), strict=True):
                np.testing.assert_array_equal(self.to_numpy(given), self.to_numpy(expected), ".".join(path))

    def test_nodes_of_rows_come_back(self, tmp_path: Path) -> None:
        """Dicts, named tuples, tuples, lists of arrays and None are restored, even if the number of children equals the
        number of rows.
        """
        storage = self._new(6, 1, _folder(tmp_path, "from"))
        numbers = np.arange(2.0)[:, None]
        storage.append(Nodes([numbers, numbers + 10], (numbers + 20, {"memory": None, "x": numbers + 30})))
        storage.append(
            Nodes([np.full(1, 2.0), np.full(1, 12.0)], (np.full(1, 22.0), {"memory": None, "x": np.full(1, 32.0)})),
            one=True,
        )
        other = self._new(6, 1, _folder(tmp_path, "to"))
        other.load(copy.deepcopy(storage.state()))
        for kept in (storage, other):
            found = kept.get(np.arange(3))
            for row in range(3):
                item = found[row] if isinstance(found, list) else map_tree(itemgetter(row), found)
                assert type(item).__name__ == "Nodes", f"expected a named tuple {Nodes.__name__}, found {item!r:.80}"
                assert isinstance(item.layers, list), f"expected a list, found {item.layers!r:.80}"
                assert isinstance(item.rest, tuple)
                assert item.rest[1]["memory"] is None
                values = [*item.layers, item.rest[0], item.rest[1]["x"]]
                assert [float(self.to_numpy(value)[0]) for value in values] == [row, row + 10, row + 20, row + 30]
            np.testing.assert_array_equal(np.ravel(kept.read(("layers", 1), np.arange(3))), [10, 11, 12])
        if 2 in self.ndims:
            steps = self._new(6, 2, _folder(tmp_path, "steps"))
            steps.append({"layers": [np.arange(2.0), np.arange(2.0) + 10]}, one=True)
            found = steps.get(np.arange(2))["layers"]
            assert [self.to_numpy(layer).tolist() for layer in found] == [[0, 1], [10, 11]]

    def test_single_fields_are_read(self, tmp_path: Path) -> None:
        """A field is read by its name or, if nested, by a tuple of names, at slots and slices."""
        storage = self._new(6, 1, tmp_path)
        storage.append(rows_from(0, 4))
        slots = np.array([[2, 0], [3, 3]])
        np.testing.assert_array_equal(storage.read("reward", slots), slots.astype(np.float32))
        np.testing.assert_array_equal(storage.read("reward", slice(1, 4)), np.arange(1, 4, dtype=np.float32))
        np.testing.assert_array_equal(storage.read(("next", "done"), np.array([1, 3])), [True, True])
        refused(MissingFieldError, lambda: storage.read("nothing", np.array([0])), "nothing")

    # ------------------------------------------------------------------ changes

    def test_rows_are_overwritten_in_place(self, tmp_path: Path) -> None:
        """Overwriting rows leaves the cursor and the length unchanged, and increases ``changes``."""
        storage = self._new(5, 1, tmp_path)
        storage.append(rows_from(0, 8))
        changes = storage.changes
        storage.put(np.array([4, 1]), rows_from(70, 2))
        assert (len(storage), storage.written) == (5, 8)
        assert storage.changes > changes
        self._holds(storage, {0: 5, 1: 71, 2: 7, 3: 3, 4: 70})
        storage.append(row_of(8), one=True)
        self._holds(storage, {0: 5, 1: 71, 2: 7, 3: 8, 4: 70})

    def test_it_can_be_emptied(self, tmp_path: Path) -> None:
        """After the storage is emptied, the next row has the index 0."""
        storage = self._new(5, 1, tmp_path)
        storage.append(rows_from(0, 8))
        changes = storage.changes
        storage.empty()
        assert (len(storage), storage.written) == (0, 0)
        assert storage.changes > changes
        refused(IndexError, lambda: storage.get(np.array([0])))
        assert storage.append(rows_from(20, 2)) == (0, 2)
        self._holds(storage, {0: 20, 1: 21})

    def test_a_state_goes_on_elsewhere(self, tmp_path: Path) -> None:
        """Loading a state restores rows and cursor, for empty, partly filled and overwritten storages."""
        for n in (0, 1, 4, 5, 13):
            storage = self._new(5, 1, _folder(tmp_path, f"from{n}"))
            storage.append(rows_from(0, n))
            state = copy.deepcopy(storage.state())
            other = self._new(5, 1, _folder(tmp_path, f"to{n}"))
            other.append(rows_from(40, 3))
            changes = other.changes
            other.load(state)
            assert other.changes > changes, f"changes: expected more than {changes} after load, found {other.changes}"
            assert (len(other), other.written) == (len(storage), n)
            other.append(rows_from(n, 2))
            kept = {number % 5: number for number in range(n + 2)}
            self._holds(other, kept)

    def test_a_damaged_state_is_refused(self, tmp_path: Path) -> None:
        """A damaged state raises StateError and changes nothing."""
        storage = self._new(5, 1, _folder(tmp_path, "a"))
        storage.append(rows_from(0, 7))
        larger = self._new(6, 1, _folder(tmp_path, "b"))
        larger.append(rows_from(0, 7))
        good = copy.deepcopy(storage.state())
        bad = [larger.state(), {}, {**good, "kind": "something"}]
        bad += [{name: value for name, value in good.items() if name != missing} for missing in good]
        for state in bad:
            refused(StateError, partial(storage.load, state), "expected")
            self._holds(storage, {number % 5: number for number in range(2, 7)})
            assert storage.written == 7

    def test_a_refused_first_write_says_nothing(self, tmp_path: Path) -> None:
        """After a rejected first write, or a rejected write into unused slots, rows may still have any fields."""
        storage = self._new(5, 1, tmp_path)
        refused(IndexError, lambda: storage.put(np.array([0, 1]), rows_from(0, 2)))
        other = {**rows_from(0, 2), "obs": np.zeros((2, 7)), "reward": np.zeros(2, np.int64)}
        refused(MouseError, lambda: storage.append({**other, "action": np.zeros(1, np.int8)}), "expected")
        assert (len(storage), storage.written) == (0, 0)
        storage.append(rows_from(0, 2))
        self._holds(storage, {0: 0, 1: 1})

    def test_what_is_refused_changes_nothing(self, tmp_path: Path) -> None:
        """Incompatible rows (other fields, shapes or dtypes), masked values, nulls, damage and unused slots raise
        errors and change nothing.
        """
        storage = self._new(5, 1, tmp_path)
        storage.append(rows_from(0, 3))
        changes = storage.changes
        for slots in ([3], [-1], [0, 5]):
            refused(IndexError, partial(storage.get, np.array(slots)))
            refused(IndexError, partial(storage.put, np.array(slots), rows_from(50, len(slots))))
        refused(MouseError, lambda: storage.put(np.array([0, 1]), rows_from(50, 3)), "expected")
        good = rows_from(50, 2)
        hidden = {**good, "reward": np.ma.masked_array(good["reward"], [False, True])}
        refused(MouseError, lambda: storage.append(hidden), "expected")
        null = {**good, "reward": pa.array([1.0, None], pa.float32())}
        beyond = pa.py_buffer(np.array([0, 1 << 30, 3], np.int32))
        damaged = pa.Array.from_buffers(pa.string(), 2, [None, beyond, pa.py_buffer(b"abc")])
        for bad in (hidden, null, {**good, "reward": damaged}):
            refused(MouseError, partial(storage.append, bad), "expected")
            refused(MouseError, partial(storage.put, np.array([0, 1]), bad), "expected")
        refused(MouseError, lambda: storage.append({**row_of(50), "reward": hidden["reward"][1]}, one=True), "expected")
        if self.typed:
            for bad in (
                {**good, "extra": np.zeros(2)},
                {name: value for name, value in good.items() if name != "reward"},
                {**good, "reward": good["reward"].astype(np.float64)},
                {**good, "obs": good["obs"][:, :2]},
                {**good, "reward": good["reward"][:1]},
                {**good, "next": good["reward"]},
            ):
                refused(MouseError, partial(storage.append, bad), "expected")
                refused(MouseError, partial(storage.put, np.array([0, 1]), bad), "expected")
        assert (storage.written, storage.changes) == (3, changes)
        self._holds(storage, {0: 0, 1: 1, 2: 2})

    def test_fields_without_values_count_as_others(self, tmp_path: Path) -> None:
        """Rows whose leaves have size zero can be appended one by one and together."""
        for ndim in self.ndims:
            storage = self._new(8, ndim, _folder(tmp_path, f"ndim{ndim}"))
            envs = (2,) * (ndim - 1)
            row = {"empty": np.zeros((*envs, 0), np.float32), "number": np.ones(envs)}
            for _ in range(2):
                storage.append(row, one=True)
            storage.append(map_tree(lambda leaf: np.stack([leaf, leaf]), row))
            assert len(storage) == 4 * 2 ** (ndim - 1)
            storage.get(np.arange(len(storage)))

    def test_a_buffer_is_built_on_it(self, tmp_path: Path) -> None:
        """Added rows are delivered in batches, also after a checkpoint."""
        buffer = ReplayBuffer(self._new(8, 1, _folder(tmp_path, "a")), batch_size=6, seed=3)
        buffer.extend(rows_from(0, 11))
        buffer.append(row_of(11))
        buffer.dumps(tmp_path / "saved")
        self._same(buffer.in_order(), np.arange(4, 12))
        copied = ReplayBuffer(self._new(8, 1, _folder(tmp_path, "c")))
        assert copied.extend(buffer).tolist() == list(range(8))
        self._holds(copied.storage, {slot: slot + 4 for slot in range(8)})
        batch = buffer.sample()
        rewards = self.to_numpy(batch["reward"])
        assert set(rewards.tolist()) <= set(range(4, 12))
        np.testing.assert_array_equal(rewards % 8, self.to_numpy(batch["index"]))
        other = ReplayBuffer(self._new(8, 1, _folder(tmp_path, "b")), batch_size=6)
        other.loads(tmp_path / "saved")
        np.testing.assert_array_equal(self.to_numpy(other.sample()["reward"]), rewards)

    def test_what_follows_a_row_is_of_its_episode(self, tmp_path: Path) -> None:
        """The row behind the last row of an episode never counts as the next row of this episode, also after the ring
        wraps."""
        for ndim in self.ndims:
            storage = self._new(10 * ndim, ndim, _folder(tmp_path, str(ndim)))
            takes: Any = {"takes": storage.alignment}
            buffer = self.buffer(storage, transform=NextView(**takes), batch_size=200, seed=1)
            step = np.arange(23)
            rows = {"obs": step * 1.0, "action": step % 2, "reward": step * 1.0, "episode": step // 4, "done": step * 0}
            if ndim == 2:
                shifts = {"done": 0, "action": 0}
                rows = {name: np.stack([leaf, leaf + shifts.get(name, 100)], 1) for name, leaf in rows.items()}
            buffer.extend({name: values[:8] for name, values in rows.items()})
            buffer.extend({name: values[8:] for name, values in rows.items()})
            batch = buffer.sample()
            obs, behind, mask = (self.to_numpy(leaf) for leaf in (batch["obs"], batch["next"]["obs"], batch["mask"]))
            # Rows 13 to 22 exist; rows 15 and 19 end episodes, and no row follows row 22.
            follows = ~np.isin(obs % 100, [15, 19, 22])
            np.testing.assert_array_equal(mask, follows)
            np.testing.assert_array_equal(behind[follows], obs[follows] + 1)

    # ------------------------------------------------------------------ helpers

    def _new(self, capacity: int, ndim: int, folder: Path) -> Any:
        return self.make(capacity, ndim, folder, self.alignments[0])

    def _holds(self, storage: Any, kept: dict[int, int]) -> None:
        """Assert that the storage has exactly the rows with the given indices, slot by slot."""
        assert len(storage) == len(kept)
        slots = np.array(sorted(kept), np.int64)
        assert slots.tolist() == list(range(len(kept)))
        if len(kept):
            self._same(storage.get(slots), np.array([kept[slot] for slot in slots.tolist()]))

    def _same(self, found: Any, numbers: npt.NDArray[np.int64]) -> None:
        if isinstance(found, list):  # arbitrary objects
            flat = [item for part in found for item in (part if isinstance(part, list) else [part])]
            assert len(flat) == numbers.size
            for item, number in zip(flat, numbers.reshape(-1).tolist(), strict=True):
                for (_, leaf), (_, expected) in zip(leaves(item), leaves(row_of(number)), strict=True):
                    np.testing.assert_array_equal(leaf, expected)
            return
        expected = rows_at(numbers)
        for (_, leaf), (_, wanted) in zip(leaves(found), leaves(expected), strict=True):
            array = self.to_numpy(leaf)
            assert array.dtype == wanted.dtype
            np.testing.assert_array_equal(array, wanted)


def rows_at(numbers: npt.NDArray[np.int64]) -> Rows:
    """Return rows with the indices ``numbers``; their values depend on their index, and each leaf has the axes of
    ``numbers`` in front."""
    reward = numbers.astype(np.float32)
    pixels = np.empty((*numbers.shape, 40, 30), np.uint8)
    pixels[...] = (numbers % 251)[..., None, None]
    return {
        "obs": reward[..., None] * 10 + np.arange(3, dtype=np.float32),
        "reward": reward,
        "action": numbers % 100,
        "next": {"done": numbers % 2 == 1, "pixels": pixels},
    }


def rows_from(first: int, n: int) -> Rows:
    """Return the ``n`` rows with the indices ``first .. first + n - 1``."""
    return rows_at(np.arange(first, first + n))


def row_of(number: int) -> Rows:
    """Return the row with a given index."""
    return rows_at(np.array(number))


def _overwrite(rows: Any) -> None:
    """Write zeros to the writable arrays of rows."""
    for _, leaf in leaves(rows):
        with suppress(TypeError, ValueError):
            leaf[...] = 0


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder
