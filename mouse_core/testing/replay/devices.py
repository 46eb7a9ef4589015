"""Conformance tests for pytest: replay buffers in device memory.

A program is a random sequence of writes, draws, new priorities and files. The replay under test and a
``mouse_core.replay.ReplayBuffer`` on the host execute each program. Their batches must be equal bit by bit, and
importance weights up to ``1e-5``.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mouse_core import replay
from mouse_core.errors import ConfigError, MouseError
from mouse_core.nested import map_tree
from mouse_core.testing._comparing import InArrays, leaves, refused

_UPDATES = 8


class Nodes(NamedTuple):
    """A row that nests every kind of container."""

    above: Any
    beside: Any
    done: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """The options of a replay, as arguments of ``DeviceReplayConformance.init``, and the sizes of the writes in the
    tests.

    Attributes:
        steps: The capacity in time steps.
        several: Number of time steps of a large write; other writes have one time step.
        ids: The name of the field with the trajectory id of a row. If the options of slices name no field, a field
            named "episode" defines where episodes end, and a field named "run" does not.
    """

    steps: int = 20
    num_envs: int | None = None
    batch_size: int = 8
    slices: dict[str, Any] | None = None
    transform: Any = None
    priorities: replay.Priorities | None = None
    order: Literal["random", "epochs", "queue"] = "random"
    several: int = 3
    ids: str = "run"

    @property
    def envs(self) -> int:
        """The number of environments."""
        return self.num_envs or 1

    def options(self, seed: int) -> dict[str, Any]:
        """Return the options of ``init``, except the example and the capacity."""
        names = ("num_envs", "batch_size", "slices", "transform", "priorities", "order")
        return {name: getattr(self, name) for name in names} | {"seed": seed}

    def host(self, seed: int) -> replay.ReplayBuffer:
        """Return an empty ``ReplayBuffer`` on the host, with the options of this setup."""
        storage = replay.ArrayStorage(self.steps * self.envs, ndim=1 if self.num_envs is None else 2)
        slices, exponents = self.slices or {}, {} if self.priorities is None else vars(self.priorities)
        samplers: dict[tuple[str, bool, bool], Callable[[], replay.Sampler]] = {
            ("random", False, False): replay.RandomSampler,
            ("random", True, False): lambda: replay.SliceSampler(**slices),
            ("random", False, True): lambda: replay.PrioritizedSampler(**exponents),
            ("random", True, True): lambda: replay.PrioritizedSliceSampler(**exponents, **slices),
            ("epochs", False, False): lambda: replay.SamplerWithoutReplacement(drop_last=True),
            ("epochs", True, False): lambda: replay.SliceSamplerWithoutReplacement(**slices, drop_last=True),
            ("queue", False, False): lambda: replay.ConsumingSampler(shuffle=False, drop_last=True),
        }
        sampler = samplers[self.order, self.slices is not None, self.priorities is not None]()
        return replay.ReplayBuffer(storage, sampler, transform=self.transform, batch_size=self.batch_size, seed=seed)


@cache
def setup_of(kind: str, variant: int) -> Setup:
    """Return the option set with index ``variant`` for a kind of draws, such as "slices by priority"."""
    choose = random.Random(f"{kind} {variant}")
    steps = choose.choice([7, 8, 13, 20])
    given: dict[str, Any] = {"several": choose.randint(2, steps), "batch_size": choose.choice([3, 5, 7])}
    if "slices" in kind:
        length = choose.choice([1, 2, 3, 4, 5, steps - 1])
        slices: dict[str, Any] = {"sequence_length": length, "pad": choose.choice([True, False, -1, 0])}
        if "epochs" not in kind:
            slices["period"] = choose.choice([1, 2, 3, 7])
        given["ids"] = choose.choice(["run", "episode"])
        keys: list[dict[str, Any]] = [{}, {}, {"end_key": "done"}, {"traj_key": given["ids"]}]
        slices |= choose.choice([*keys, {"end_key": "done", "traj_key": given["ids"]}])
        given["slices"] = slices
    if "priority" in kind:
        exponents = {"alpha": [0.0, 0.7, 1.0], "beta": [0.0, 0.4, 0.6], "eps": [0.0, 1e-3]}
        given["priorities"] = replay.Priorities(**{name: choose.choice(values) for name, values in exponents.items()})
    if kind == "queue" or "epochs" in kind:
        given["order"] = "queue" if kind == "queue" else "epochs"
    if choose.random() < 0.3 and given.get("slices", {}).get("pad") != -1:  # a transform needs 0, 1 and 2 in "done"
        given["transform"] = [replay.NextView(), replay.NStep(2, 0.5)]
    return Setup(steps=steps, num_envs=choose.choice([None, 1, 2, 3]), **given)


PADDED_BY_PRIORITY = Setup(
    steps=8,
    num_envs=2,
    batch_size=7,
    several=5,
    slices={"sequence_length": 3, "pad": True, "period": 2},
    priorities=replay.Priorities(alpha=1, beta=0.6, eps=1e-3),
)
"""Options that cover most features of a replay, for frameworks with long compilation."""


class DeviceReplayConformance(InArrays):
    """Tests that a replay on a device draws, stores and saves the same rows as ``mouse_core.replay.ReplayBuffer``.

    Random programs cover every order, slices, priorities and transforms, writes beyond the ring's capacity, and files
    that the replay and the host buffer exchange. Subclass it in a test file, under a name that begins with ``Test``,
    and define the functions of a replay. The functions may change a state in place or create a new one; later calls get
    the returned state.

        class TestMine(DeviceReplayConformance):
            def init(self, example, capacity, **options):
                return my.Replay(example, capacity, **options)

            def add(self, state, rows):
                state.extend(rows)
                return state

            def sample(self, state, index):
                return state, state.sample(index=index)

            def set_priorities(self, state, indices, priorities):
                state.set_priorities(indices, priorities)
                return state

            def can_sample(self, state):
                return state.can_sample()

            def dumps(self, state, path, samples):
                state.dumps(path, samples=samples)

            def loads(self, state, path):
                return state, state.loads(path)

    Attributes:
        orders: The supported orders, of "random", "epochs" and "queue".
        variants: The number of random option sets for each kind of draws.
        programs: The number of random programs with each option set.
    """

    orders: tuple[str, ...] = ("random", "epochs", "queue")
    variants: int = 4
    programs: int = 1

    def init(self, example: Any, capacity: int, **options: Any) -> Any:
        """Return an empty replay.

        Args:
            example: One row of NumPy scalars and arrays.
            capacity: Capacity in rows of all environments.
            **options: ``batch_size``, ``seed`` and ``num_envs``, which is None for one stream; ``slices``, a dict of
                ``sequence_length``, ``pad`` and ``period`` as for ``SliceSampler``, or None; ``transform``, a list;
                ``priorities``, a ``mouse_core.replay.Priorities`` or None; ``order``.
        """
        raise NotImplementedError

    def add(self, state: Any, rows: Any) -> Any:
        """Add rows and return the replay. Rows are NumPy arrays ``[n, ...]`` or ``[time, env, ...]``, or a single row
        or time step."""
        raise NotImplementedError

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        """Draw the batch with index ``index``; return the replay, and the batch in arrays of the framework."""
        raise NotImplementedError

    def set_priorities(self, state: Any, indices: Any, priorities: Any) -> Any:
        """Set float32 priorities of some slots; return the replay."""
        raise NotImplementedError

    def can_sample(self, state: Any) -> Any:
        """Return whether a batch can be drawn; any object that ``bool`` accepts."""
        raise NotImplementedError

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        """Save the replay to a file, with the index of the next sample."""
        raise NotImplementedError

    def loads(self, state: Any, path: Path) -> tuple[Any, int]:
        """Load a file into an empty replay; return the replay and the index of the next sample."""
        raise NotImplementedError

    # ------------------------------------------------------------------ draws

    def test_rows(self, tmp_path: Path) -> None:
        """Rows are drawn with equal probability."""
        self._programs("rows", tmp_path)

    def test_slices(self, tmp_path: Path) -> None:
        """Random slices are drawn, with and without padding and period."""
        self._programs("slices", tmp_path)

    def test_rows_by_priority(self, tmp_path: Path) -> None:
        """Rows are drawn by priority, after any priority updates, including updates with repeated rows."""
        self._programs("rows by priority", tmp_path)

    def test_slices_by_priority(self, tmp_path: Path) -> None:
        """Slices are drawn by the priorities of their first rows."""
        self._programs("slices by priority", tmp_path)

    def test_epochs(self, tmp_path: Path) -> None:
        """Rows are drawn in epochs; a write that changes the number of rows ends an epoch."""
        if "epochs" in self.orders:
            self._programs("epochs", tmp_path)

    def test_epochs_of_slices(self, tmp_path: Path) -> None:
        """Adjacent slices are drawn in epochs; a write ends an epoch."""
        if "epochs" in self.orders:
            self._programs("epochs of slices", tmp_path)

    def test_queue(self, tmp_path: Path) -> None:
        """A queue delivers the oldest rows that were not delivered yet."""
        if "queue" in self.orders:
            self._programs("queue", tmp_path)

    def test_nodes_of_rows_come_back(self, tmp_path: Path) -> None:
        """Named tuples, tuples, lists of arrays and None are restored, even if the number of children equals the number
        of rows or steps.
        """
        for envs in (None, 2):
            lead = (2,) if envs is None else (2, envs)
            number = np.arange(np.prod(lead), dtype=np.float32).reshape(*lead, 1)
            rows = Nodes(
                [number, number + 10], (number + 20, {"memory": None, "x": number + 30}), np.zeros(lead, np.int8)
            )
            first = (0,) * len(lead)
            example = map_tree(itemgetter(first), rows)
            options = Setup(num_envs=envs).options(5)
            state = self.add(self.init(example, 8, **options), rows)
            self.dumps(state, tmp_path / "nodes", 3)
            loaded, _ = self.loads(self.init(example, 8, **options), tmp_path / "nodes")
            host = replay.ReplayBuffer(replay.ArrayStorage(8, ndim=len(lead)), batch_size=8)
            host.loads(tmp_path / "nodes")
            batches = [self.sample(kept, 3)[1] for kept in (state, loaded)]
            found = [(leaves(batch["data"]), batch["index"]) for batch in batches]
            found.append((leaves(host[:]), np.arange(len(host))))
            for fields, index in found:
                for (path, leaf), begin in zip(fields, (0, 10, 20, 30), strict=False):
                    values = self.to_numpy(leaf)[:, 0]
                    np.testing.assert_array_equal(values, self.to_numpy(index) + begin, ".".join(path))

    # ------------------------------------------------------------------ guarantees

    def test_a_sample_is_a_function_of_its_number(self) -> None:
        """A sample depends only on its index and the seed, even if samples are drawn in another order or repeatedly."""
        state, other = (self.add(self._init(_PLAIN, seed), _arrays(Rows().next(20), None)) for seed in (2**64 - 1, 5))
        drawn: dict[int, list[Any]] = {}
        for index in (5, 2, 5, 2**32 - 1, 2):
            state, batch = self.sample(state, index)
            drawn.setdefault(index, []).append(np.array(self.to_numpy(batch["index"])))
        for index, (first, *again) in drawn.items():
            for one in again:
                np.testing.assert_array_equal(first, one, f"sample {index}")
        assert (drawn[5][0] != drawn[2][0]).any(), "expected samples 5 and 2 to differ"
        found = self.to_numpy(self.sample(other, 5)[1]["index"])
        assert (drawn[5][0] != found).any(), "expected another seed to draw other rows"

    def test_a_batch_never_changes(self) -> None:
        """A drawn batch does not change, whatever is written afterwards."""
        rows = Rows()
        state, batch = self.sample(self.add(self._init(_PLAIN, 5), _arrays(rows.next(20), None)), 0)
        before = [np.array(self.to_numpy(leaf)) for _, leaf in leaves(batch)]
        self.sample(self.add(state, _arrays(rows.next(20), None)), 1)
        for (path, leaf), expected in zip(leaves(batch), before, strict=True):
            np.testing.assert_array_equal(self.to_numpy(leaf), expected, ".".join(path))

    def test_what_is_refused_changes_nothing(self) -> None:
        """Incompatible rows (other fields, shapes or dtypes), masked values, unexpected priorities and empty batches
        raise errors and change nothing.
        """
        state, host, rows = self._init(_PLAIN, 5), _PLAIN.host(5), _arrays(Rows().next(20), None)
        assert not bool(self.can_sample(state)), "expected can_sample to be False"
        refused(MouseError, lambda: self.sample(state, 0))
        state = self.add(state, rows)
        host.extend(rows)
        assert bool(self.can_sample(state)), "expected can_sample to be True"
        good = _arrays(Rows().next(3), None)
        for bad in (
            {name: values for name, values in good.items() if name != "reward"},
            {**good, "extra": good["reward"]},
            {**good, "reward": good["reward"][:2]},
            {**good, "obs": {**good["obs"], "vector": good["obs"]["vector"][:, :1]}},
            _arrays(Rows().next(21), None),
            {**good, "reward": np.ma.masked_array(good["reward"], np.arange(3) == 1)},
        ):
            refused(MouseError, lambda bad=bad: self.add(state, bad))  # type: ignore[misc]
        refused(ConfigError, lambda: self.set_priorities(state, np.zeros(1, np.int32), np.ones(1, np.float32)))
        self._equal(self.sample(state, 0)[1], host.sample(), "after a rejected call")

    # ------------------------------------------------------------------ programs

    def _init(self, setup: Setup, seed: int) -> Any:
        example = map_tree(itemgetter(0), _arrays(Rows(ids=setup.ids).next(1), None))
        return self.init(example, setup.steps * setup.envs, **setup.options(seed))

    def _programs(self, kind: str, folder: Path) -> None:
        for variant in range(self.variants):
            for program in range(self.programs):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)  # fields that contradict each other
                        self.follow(setup_of(kind, variant), program, folder)
                except Exception as error:
                    error.add_note(
                        f"follow(setup_of({kind!r}, {variant}), {program}, folder): {setup_of(kind, variant)}"
                    )
                    raise

    def follow(self, setup: Setup, program: int, folder: Path) -> None:
        """Execute one program: write beyond the ring's capacity, draw, set priorities, save and load files.

        Args:
            setup: The options of the replay.
            program: The index of the program.
            folder: A folder for files.
        """
        choose = random.Random(program)
        seed, number, moved = choose.getrandbits(64), 0, False
        source = Rows(setup.envs, choose, choose.choice([0.02, 0.1, 0.3]), setup.ids)
        state, host = self._init(setup, seed), setup.host(seed)
        for turn in range(10):
            count = choose.choice([1, setup.several])
            rows = source.next(count)
            given = _arrays(rows, setup.num_envs)
            host.extend(given)
            state = self.add(state, map_tree(itemgetter(0), given) if count == 1 else given)
            drawn: list[int] = []
            for _ in range(choose.randint(1, 3)):
                place, expected = f"turn {turn}, sample {number}", _sample_of(host)
                ready = expected is not None
                assert bool(self.can_sample(state)) == ready, f"{place}: expected can_sample to be {ready}"
                if expected is None:
                    break
                state, batch = self.sample(state, number)
                drawn = np.where(expected.get("mask", True), expected["index"], -1).reshape(-1).tolist()
                # A file does not store the numbers of episodes.
                self._equal(batch, expected, place, {"traj_id"} if moved else set())
                number += 1
            if setup.priorities is not None:
                slots = [*drawn[:3], *(choose.randrange(len(host)) for _ in range(4)), -1, -1, -1, -1][:_UPDATES]
                values = [choose.choice([0, 2**-30, 0.25, 1, 3, 1000.5]) for _ in slots]
                state = self.set_priorities(state, np.array(slots, np.int32), np.array(values, np.float32))
                there = [place for place, slot in enumerate(slots) if slot >= 0]
                host.update_priority(np.array(slots)[there], np.array(values, np.float32)[there])
            match choose.randrange(6):
                case 0:
                    self.dumps(state, folder / "device", number)
                    host, moved = setup.host(0), True
                    host.loads(folder / "device")
                case 1:
                    host.dumps(folder / "host")
                    (state, samples), moved = self.loads(self._init(setup, 1), folder / "host"), True
                    assert samples == number, f"expected the number {number} of the next sample, found {samples}"

    def _equal(self, batch: Any, expected: Any, place: str, but: Set[str] = frozenset()) -> None:
        """Assert that two batches have equal fields, after conversion to the dtypes of the rows."""
        found, wanted = ({path[-1]: leaf for path, leaf in leaves(tree)} for tree in (batch, expected))
        assert found.keys() == wanted.keys(), f"{place}: expected the fields {[*wanted]}, found {[*found]}"
        for name in wanted.keys() - but:
            array, values = self.to_numpy(found[name]), np.asarray(wanted[name])
            if name in _DTYPES:
                assert array.dtype == _DTYPES[name], f"{place}: {name}: expected {_DTYPES[name]}, found {array.dtype}"
            assert array.shape == values.shape, f"{place}: {name}: expected {values.shape}, found {array.shape}"
            if name == "priority_weight":
                np.testing.assert_allclose(array, values, 1e-5, err_msg=f"{place}: {name}")
            elif (array != values).any():
                np.testing.assert_array_equal(array, values, f"{place}: {name}")


def _sample_of(buffer: replay.ReplayBuffer) -> Any:
    """Return the next batch of a buffer; None if the buffer cannot fill a batch."""
    try:
        return buffer.sample()
    except MouseError:
        return None


_PLAIN = Setup()
_DTYPES = {"number": np.int32, "vector": np.float32, "reward": np.float32, "done": np.int8}
_DTYPES |= {"run": np.int32, "episode": np.int32}


class Rows:
    """Random rows of environments: episodes end, and trajectories change, at random.

    Args:
        envs: The number of environments.
        choose: The source of random choices.
        ends: The probability that a row ends an episode.
        ids: The name of the field with the trajectory number of a row.
    """

    def __init__(self, envs: int = 1, choose: random.Random | None = None, ends: float = 0.2, ids: str = "run") -> None:
        self._choose, self._ends, self._ids = choose or random.Random(0), ends, ids
        self._first, self._runs = 0, [0] * envs

    def next(self, count: int) -> list[list[dict[str, Any]]]:
        """Return ``count`` time steps; each has a row for every environment."""
        return [[self._row(env) for env in range(len(self._runs))] for _ in range(count)]

    def _row(self, env: int) -> dict[str, Any]:
        choose, self._first = self._choose, self._first + 1
        if choose.random() < self._ends:
            self._runs[env] = choose.randrange(4)
        row = {"number": self._first, "vector": [self._first, -self._first], "reward": choose.randrange(9) / 4}
        return row | {"done": int(choose.random() < self._ends), self._ids: self._runs[env]}


def _arrays(rows: Sequence[Sequence[dict[str, Any]]], num_envs: int | None) -> Any:
    """Return time steps as a tree of arrays ``[time, env, ...]``; without environments ``[time, ...]``."""
    made = {
        name: np.array([[row[name] for row in step] for step in rows], _DTYPES[name])[:, slice(None) if num_envs else 0]
        for name in rows[0][0]
    }
    return {"obs": {name: made.pop(name) for name in ("number", "vector")}, **made}
