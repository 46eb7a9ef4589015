"""The contract of a replay in device memory, as tests that its author runs with pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mouse_core import replay
from mouse_core.errors import ConfigError, MouseError
from mouse_core.nested import map_tree
from mouse_core.testing._comparing import InArrays, leaves, refused


class Nodes(NamedTuple):
    """A row with nodes of every kind."""

    above: Any
    beside: Any
    done: Any


_STEPS, _COUNT, _BATCH, _SEED = 20, 7, 8, 2**63 + 5
_EXPONENTS: dict[str, Any] = {"alpha": 0.7, "beta": 0.6, "eps": 1e-3}
_TAKEN: dict[str, Any] = {"drop_last": True}


class DeviceReplayConformance(InArrays):
    """Tests that a replay on a device draws, keeps and moves what ``mouse_core.replay.ReplayBuffer`` does.

    It is compared with a buffer on the host of the same seed, writes and priorities, in every order, with slices and
    transforms, as rows go round the ring, and by way of files in both directions. Subclass it in a test file, under a
    name that begins with ``Test``, and say how one is made and used. States may be changed in place or made anew; what
    is given back is used from then on.

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
        orders: Which of "random", "epochs" and "queue" it knows.
    """

    orders: tuple[str, ...] = ("random", "epochs", "queue")

    def init(self, example: Any, capacity: int, **options: Any) -> Any:
        """An empty replay.

        Args:
            example: One row of NumPy scalars and arrays.
            capacity: Rows of all environments.
            **options: ``batch_size``, ``seed`` and ``num_envs``, which is None for one stream; ``slices``, a dict of
                ``sequence_length``, ``pad`` and ``period`` as of ``SliceSampler``, or None; ``transform``, a list;
                ``priorities``, a ``mouse_core.replay.Priorities`` or None; ``order``.
        """
        raise NotImplementedError

    def add(self, state: Any, rows: Any) -> Any:
        """The replay with rows, NumPy arrays ``[n, ...]`` or ``[time, env, ...]``, or one time step of them."""
        raise NotImplementedError

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        """The replay after batch number ``index``, and the batch, in arrays of the framework."""
        raise NotImplementedError

    def set_priorities(self, state: Any, indices: Any, priorities: Any) -> Any:
        """The replay with priorities, float32, of some slots."""
        raise NotImplementedError

    def can_sample(self, state: Any) -> Any:
        """Whether there is a batch to draw, in anything that ``bool`` takes."""
        raise NotImplementedError

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        """Save it to a file, with the number of the next sample."""
        raise NotImplementedError

    def loads(self, state: Any, path: Path) -> tuple[Any, int]:
        """An empty replay with what a file has, and the number of the next sample."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what it draws

    def test_nodes_of_rows_come_back(self, tmp_path: Path) -> None:
        """Named tuples, tuples, lists of arrays and None, also of as many children as there are time steps or rows."""
        for envs in (None, 2):
            lead = (2,) if envs is None else (2, envs)
            number = np.arange(np.prod(lead), dtype=np.float32).reshape(*lead, 1)
            rows = Nodes(
                [number, number + 10], (number + 20, {"memory": None, "x": number + 30}), np.zeros(lead, np.int8)
            )
            first = (0,) * len(lead)
            example = map_tree(itemgetter(first), rows)
            options: dict[str, Any] = {"batch_size": _BATCH, "seed": _SEED, "num_envs": envs, "slices": None}
            options |= {"transform": None, "priorities": None, "order": "random"}
            state = self.add(self.init(example, 8, **options), rows)
            self.dumps(state, tmp_path / "nodes", 3)
            loaded, _ = self.loads(self.init(example, 8, **options), tmp_path / "nodes")
            host = replay.ReplayBuffer(replay.ArrayStorage(8, ndim=len(lead)), batch_size=_BATCH)
            host.loads(tmp_path / "nodes")
            batches = [self.sample(kept, 3)[1] for kept in (state, loaded)]
            found = [(leaves(batch["data"]), batch["index"]) for batch in batches]
            found.append((leaves(host[:]), np.arange(len(host))))
            for fields, index in found:
                for (path, leaf), begin in zip(fields, (0, 10, 20, 30), strict=False):
                    values = self.to_numpy(leaf)[:, 0]
                    np.testing.assert_array_equal(values, self.to_numpy(index) + begin, ".".join(path))

    def test_rows_are_those_of_the_host(self, tmp_path: Path) -> None:
        """With transitions of several steps, of environments side by side."""
        transform = [replay.NextView(), replay.NStep(2, 0.5)]
        self._follows(_pair_of(num_envs=3, transform=transform), replay.RandomSampler, tmp_path)

    def test_rows_of_one_stream_are_those_of_the_host(self, tmp_path: Path) -> None:
        """Also where they come one by one."""
        self._follows(_pair_of(), replay.RandomSampler, tmp_path, count=1, writes=_STEPS + 3)

    def test_slices_are_those_of_the_host(self, tmp_path: Path) -> None:
        """Filled up where an episode is shorter, and every third one of each, however much of it is gone."""
        self._sliced(tmp_path, sequence_length=4, pad=-1, period=3)

    def test_whole_slices_are_those_of_the_host(self, tmp_path: Path) -> None:
        """Device and host draw equal slices from long enough episodes, with a period of two."""
        self._sliced(tmp_path, sequence_length=2, pad=False, period=2)

    def test_rows_by_priority_are_those_of_the_host(self, tmp_path: Path) -> None:
        """After any updates, of rows that came twice among them."""
        self._follows(_pair_of(num_envs=3, weighted=True), lambda: replay.PrioritizedSampler(**_EXPONENTS), tmp_path)

    def test_slices_by_priority_are_those_of_the_host(self, tmp_path: Path) -> None:
        """By the priorities of their first rows, every third one of an episode."""
        options: dict[str, Any] = {"sequence_length": 4, "period": 3}
        self._follows(
            _pair_of(num_envs=3, weighted=True, slices=options),
            lambda: replay.PrioritizedSliceSampler(**_EXPONENTS, **options),
            tmp_path,
        )

    def test_rows_come_once_as_on_the_host(self, tmp_path: Path) -> None:
        """In epochs, which end with a write, or in a queue."""
        if "epochs" in self.orders:
            self._follows(_pair_of(order="epochs"), lambda: replay.SamplerWithoutReplacement(**_TAKEN), tmp_path)
        if "queue" in self.orders:
            queue: Any = {"shuffle": False, **_TAKEN}
            self._follows(_pair_of(num_envs=3, order="queue"), lambda: replay.ConsumingSampler(**queue), tmp_path)

    def test_slices_come_once_as_on_the_host(self, tmp_path: Path) -> None:
        """Side by side, shuffled."""
        options: dict[str, Any] = {"sequence_length": 2}
        if "epochs" in self.orders:
            self._follows(
                _pair_of(num_envs=3, order="epochs", slices=options),
                lambda: replay.SliceSamplerWithoutReplacement(**options, **_TAKEN),
                tmp_path,
            )

    # ------------------------------------------------------------------ what it promises

    def test_a_sample_is_a_function_of_its_number(self) -> None:
        """Drawn again, and in any order, it is the same; another number and another seed draw other rows."""
        state = self.add(self._init(_pair_of()), _rows(0, _STEPS, None))
        drawn: dict[int, list[Any]] = {}
        for index in (5, 2, 5, 2**32 - 1, 2):
            state, batch = self.sample(state, index)
            drawn.setdefault(index, []).append(np.array(self.to_numpy(batch["index"])))
        for index, (first, *others) in drawn.items():
            for other in others:
                np.testing.assert_array_equal(first, other, f"sample {index}")
        assert (drawn[5][0] != drawn[2][0]).any(), "expected samples 5 and 2 to differ"
        other = self.add(self._init(_pair_of(), seed=_SEED - 1), _rows(0, _STEPS, None))
        found = self.to_numpy(self.sample(other, 5)[1]["index"])
        assert (drawn[5][0] != found).any(), "expected another seed to draw other rows"

    def test_a_batch_never_changes(self) -> None:
        """Whatever is written after it was drawn."""
        state = self.add(self._init(_pair_of()), _rows(0, _STEPS, None))
        state, batch = self.sample(state, 0)
        before = [np.array(self.to_numpy(leaf)) for _, leaf in leaves(batch)]
        state = self.add(state, _rows(500, _STEPS, None))
        self.sample(state, 1)
        for (path, leaf), expected in zip(leaves(batch), before, strict=True):
            np.testing.assert_array_equal(self.to_numpy(leaf), expected, ".".join(path))

    def test_what_is_refused_changes_nothing(self) -> None:
        """Rows unlike the example, values that a mask hides, priorities where none are, and a batch of nothing."""
        state = self._init(_pair_of())
        assert not bool(self.can_sample(state)), "expected nothing to draw"
        refused(MouseError, lambda: self.sample(state, 0))
        state = self.add(state, _rows(0, _STEPS, None))
        assert bool(self.can_sample(state)), "expected something to draw"
        good = _rows(500, 3, None)
        for bad in (
            {name: values for name, values in good.items() if name != "reward"},
            {**good, "extra": good["reward"]},
            {**good, "reward": good["reward"][:2]},
            {**good, "obs": {**good["obs"], "vector": good["obs"]["vector"][:, :1]}},
            _rows(500, _STEPS + 1, None),
            {**good, "reward": np.ma.masked_array(good["reward"], np.arange(3) == 1)},
        ):
            refused(MouseError, lambda bad=bad: self.add(state, bad))  # type: ignore[misc]
        refused(ConfigError, lambda: self.set_priorities(state, np.zeros(1, np.int32), np.ones(1, np.float32)))
        expected = _host(_pair_of(), replay.RandomSampler())
        expected.extend(_rows(0, _STEPS, None))
        self._draws_the_same(state, expected, 0, "after what was refused")

    # ------------------------------------------------------------------ helpers

    def _sliced(self, folder: Path, **options: Any) -> None:
        self._follows(_pair_of(num_envs=3, slices=options), lambda: replay.SliceSampler(**options), folder)

    def _init(self, options: Mapping[str, Any], seed: int = _SEED) -> Any:
        envs, weighted = options["num_envs"], options["weighted"]
        example = _first(_rows(0, 1, envs)) if envs is None else _first(_first(_rows(0, 1, envs)))
        return self.init(
            example,
            _STEPS * (envs or 1),
            batch_size=_BATCH,
            num_envs=envs,
            slices=options["slices"],
            transform=options["transform"],
            priorities=replay.Priorities(**_EXPONENTS) if weighted else None,
            order=options["order"],
            seed=seed,
        )

    def _follows(
        self,
        options: dict[str, Any],
        sampler: Callable[[], Any],
        folder: Path,
        *,
        count: int = _COUNT,
        writes: int = 7,
    ) -> None:
        """Write, draw and update side by side while the ring goes round, and then by way of files."""
        envs = options["num_envs"]
        state, host = self._init(options), _host(options, sampler())
        rng, number = np.random.default_rng(0), 0
        for write in range(writes):
            rows = _rows(write * count, count, envs)
            host.extend(rows)
            state = self.add(state, _first(rows) if count == 1 else rows)
            for _ in range(3 if options["order"] != "random" and write % 3 == 2 else 1):
                if not bool(self.can_sample(state)):
                    refused(MouseError, host.sample)
                    break
                state = self._draws_the_same(state, host, number, f"write {write}, sample {number}")
                number += 1
            if options["weighted"]:
                state = self._updates(state, host, rng)
        assert number >= writes // 2, f"expected some batches, found {number}"
        # From the device to the host, and back.
        self.dumps(state, folder / "device", number)
        moved = _host(options, sampler(), seed=0)
        moved.loads(folder / "device")
        moved.dumps(folder / "host")
        back, samples = self.loads(self._init(options, seed=1), folder / "host")
        assert samples == number, f"expected the number {number} of the next sample, found {samples}"
        more = _rows(writes * count, count, envs)
        back = self.add(back, _first(more) if count == 1 else more)
        for buffer in (moved, host):
            buffer.extend(more)
        _, batch = self.sample(back, number)
        for buffer in (moved, host):
            self._equal(batch, buffer.sample(), "after a file", but="traj_id")  # episodes may have other numbers

    def _draws_the_same(self, state: Any, host: Any, number: int, where: str) -> Any:
        state, batch = self.sample(state, number)
        self._equal(batch, host.sample(), where)
        return state

    def _equal(self, batch: Any, expected: Any, where: str, but: str = "") -> None:
        """Rows and their numbers are equal, in the dtypes of the rows; sums of floats nearly so."""
        assert {*batch.keys()} == {*expected}, f"{where}: expected the fields {[*expected]}, found {[*batch.keys()]}"
        for (path, leaf), (name, wanted) in zip(leaves(batch), leaves(expected), strict=True):
            place = f"{where}: {'.'.join(path)}"
            assert path == name, f"{place}: expected the field {name}"
            if path[0] == but:
                continue
            found = self.to_numpy(leaf)
            if path[0] in _rows(0, 1, None):
                assert found.dtype == wanted.dtype, f"{place}: expected {wanted.dtype}, found {found.dtype}"
            assert found.shape == wanted.shape, f"{place}: expected shape {wanted.shape}, found {found.shape}"
            np.testing.assert_allclose(found, wanted, 1e-5 if wanted.dtype.kind == "f" else 0, err_msg=place)

    def _updates(self, state: Any, host: Any, rng: np.random.Generator) -> Any:
        """New priorities of some rows, of which one comes twice and some have none."""
        slots = rng.integers(0, len(host), 12)
        values = (10.0 ** rng.uniform(-6, 4, 12)).astype(np.float32)
        values[rng.random(12) < 0.2] = 0
        slots[8:] = slots[:4]
        host.update_priority(slots, values)
        return self.set_priorities(state, slots.astype(np.int32), values)


def _pair_of(
    *,
    num_envs: int | None = None,
    slices: Any = None,
    transform: Any = None,
    weighted: bool = False,
    order: str = "random",
) -> dict[str, Any]:
    """Return the options for a device replay and its host buffer."""
    return {"num_envs": num_envs, "slices": slices, "transform": transform, "weighted": weighted, "order": order}


def _host(options: Mapping[str, Any], sampler: Any, seed: int = _SEED) -> replay.ReplayBuffer:
    envs = options["num_envs"]
    storage = replay.ArrayStorage(_STEPS * (envs or 1), ndim=1 if envs is None else 2)
    return replay.ReplayBuffer(storage, sampler, transform=options["transform"], batch_size=_BATCH, seed=seed)


def _rows(first: int, count: int, envs: int | None) -> dict[str, Any]:
    """Rows that can be told by their numbers, of episodes of one step to some twenty."""
    number = first + np.arange(count)[:, None] + 100_000 * np.arange(envs or 1)
    done = np.random.default_rng(7).random(4096)[(number + 5 * (number // 100_000)) % 4096] < 0.25
    lead = (count,) if envs is None else (count, envs)
    return {
        "obs": {
            "number": number.reshape(lead).astype(np.int32),
            "vector": np.stack([number, -number], -1).reshape(*lead, 2).astype(np.float32),
        },
        "reward": (number % 7).reshape(lead).astype(np.float32),
        "done": done.reshape(lead).astype(np.int8),
    }


def _first(rows: Any) -> Any:
    """Return the first time step of each array."""
    return map_tree(itemgetter(0), rows)
