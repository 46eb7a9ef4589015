"""Replays on devices of torch and JAX: the numbers of the host, and what both refuse."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mouse_core import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core import replay as core
from mouse_core.replay.device import Arrays, DeviceSampler, DrawKey, HostSampler, Ring, RowPlan
from mouse_jax import device as in_jax
from mouse_jax.device.arrays import JAX
from mouse_torch import device as in_torch
from mouse_torch.device.arrays import TorchArrays
from tests.comparing import same

ROW = {"x": np.int32(0), "reward": 0.0, "done": False}
CLOSE = 1e-5  # of importance weights; other numbers are integers


class JaxReplay:
    """The pure functions of a replay in JAX, with the state kept between calls."""

    def __init__(self, example: Any, capacity: int, **options: Any) -> None:
        self.state, self.samples = in_jax.init(example, capacity, **options), 0
        self.comes_once = options.get("order", "random") != "random"

    @property
    def size(self) -> Any:
        return self.state.size

    def extend(self, rows: Any) -> None:
        self.state = in_jax.add(self.state, rows)

    def sample(self, index: Any = None, batch_size: int | None = None, *, beta: Any = None) -> Any:
        self.samples += index is None
        number = self.samples - 1 if index is None else index
        if self.comes_once:
            self.state, batch = in_jax.take(self.state, number)
            return batch
        return in_jax.sample(self.state, number, batch_size, beta=beta)

    def set_priorities(self, indices: Any, priorities: Any) -> None:
        self.state = in_jax.set_priorities(self.state, indices, priorities)

    def can_sample(self, min_length: int = 1) -> Any:
        return in_jax.can_sample(self.state, min_length)

    def can_extend(self, time_steps: int = 1) -> Any:
        return in_jax.can_add(self.state, time_steps)


class TorchReplay(in_torch.Replay):
    def extend(self, rows: Any) -> None:
        super().extend({name: np.asarray(values) for name, values in rows.items()})

    def set_priorities(self, indices: Any, priorities: Any) -> None:
        super().set_priorities(torch.as_tensor(np.asarray(indices)), torch.as_tensor(np.asarray(priorities)))


Make = Callable[..., Any]


@pytest.fixture(params=[TorchReplay, JaxReplay], ids=["torch", "jax"])
def make(request: pytest.FixtureRequest) -> Make:
    """What makes a replay of rows of one stream."""

    def made(row: Any = None, capacity: int = 12, **options: Any) -> Any:
        given = {"batch_size": 4, "num_envs": None, **options}
        return request.param(ROW if row is None else row, capacity, **given)

    return made


def rows(first: int, count: int, envs: int | None = None) -> dict[str, Any]:
    number = (first + np.arange(count)[:, None] + 1000 * np.arange(envs or 1)).astype(np.int32)
    number = number if envs else number[:, 0]
    return {"x": number, "reward": (number % 7).astype(np.float32), "done": (number % 3 == 0) & (number % 4 > 0)}


def host(capacity: int, sampler: Any, batch_size: int = 4, envs: int | None = None, seed: int = 0) -> core.ReplayBuffer:
    storage = core.ArrayStorage(capacity, ndim=1 if envs is None else 2)
    return core.ReplayBuffer(storage, sampler, batch_size=batch_size, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("count", [16_384, 16_385, 30_001])
def test_an_epoch_over_many_rows_is_that_of_the_host(make: Make, count: int) -> None:
    """More than 16,384 are not shuffled outright, and with 30,001 of them the grid has cells beyond."""
    replay = make(None, 40_000, batch_size=14_000, order="epochs", seed=2**64 - 7)
    expected = host(40_000, core.SamplerWithoutReplacement(drop_last=True), 14_000, seed=2**64 - 7)
    for one in (expected, replay):
        one.extend(rows(0, count))
    for _ in range(2):
        same(replay.sample(), expected.sample(), close=CLOSE)


@pytest.mark.parametrize(("count", "alpha"), [(5_000, 0.6), (600, 1)])
def test_of_many_rows_those_of_the_host_come(make: Make, count: int, alpha: float) -> None:
    """Over four levels of a tree; and of a few units, where a random number often falls on the end of a row."""
    exponents: Any = {"alpha": alpha, "beta": 0.5, "eps": 0}
    expected = host(count, core.PrioritizedSampler(**exponents), 2000)
    replay = make(None, count, batch_size=2000, priorities=core.Priorities(**exponents))
    random = np.random.default_rng(1)
    slots = random.permutation(count).astype(np.int32)
    values = random.exponential(size=count) if alpha < 1 else slots % 3 / 2**24
    for one in (expected, replay):
        one.extend(rows(0, count))
    expected.update_priority(slots, values.astype(np.float32))
    replay.set_priorities(slots, values.astype(np.float32))
    same(replay.sample(), expected.sample(), close=CLOSE)


@pytest.mark.slow
def test_beta_may_be_a_number_a_schedule_or_a_function(make: Make) -> None:
    schedule = core.LinearSchedule(0.0, 0.5, 2)
    expected = host(40, core.PrioritizedSampler(1, schedule, 0), 64)
    replay = make(None, 40, batch_size=64, priorities=core.Priorities(alpha=1, beta=schedule, eps=0))
    for one in (expected, replay):
        one.extend(rows(0, 2))
    expected.update_priority(np.arange(2), np.array([1.0, 4.0]))
    replay.set_priorities([0, 1], [1.0, 4.0])
    for number in range(4):
        wanted = expected.sample()
        for batch in (replay.sample(number), replay.sample(number, beta=schedule)):
            same(batch, wanted, close=CLOSE)
    in_array = jnp.float32(0.5) if isinstance(replay, JaxReplay) else torch.tensor(0.5)
    for beta, least in ((lambda number: number / 3, 0.25), (0.5, 0.5), (in_array, 0.5), (0.0, 1)):
        np.testing.assert_allclose(replay.sample(3, beta=beta)["priority_weight"].min(), least, rtol=1e-5)


def test_a_queue_says_when_it_would_write_over_what_has_not_come(make: Make) -> None:
    replay = make(None, 13, batch_size=5, order="queue")
    replay.extend(rows(0, 12))
    assert replay.can_extend()
    assert not replay.can_extend(3)
    assert [number for _ in range(2) for number in replay.sample()["x"].tolist()] == [*range(10)]
    assert not replay.can_sample()
    assert replay.can_extend(11)
    with pytest.raises(ConfigError, match="expected 5 rows for a batch without repetition, found 2"):
        replay.sample()
    replay.extend(rows(12, 3))
    assert replay.sample()["x"].tolist() == [10, 11, 12, 13, 14]
    several = make(None, 26, batch_size=10, num_envs=2, order="queue")
    several.extend(rows(0, 7, 2))
    assert several.can_extend(6)
    assert not several.can_extend(7)
    assert several.sample()["x"].reshape(5, 2).tolist() == [[step, 1000 + step] for step in range(5)]
    assert not several.can_sample()


SCHEDULE = core.Schedule({0: [7, 3], 4: [3, 7], 8: [1, 0]})


@pytest.mark.slow
def test_batches_of_several_replays_are_those_of_the_host(make: Make) -> None:
    """Shares of 3.5 and 1.5 slices are rounded by the same random numbers; from batch 8 on one has no weight."""
    replays, buffers = [], []
    for number in range(2):
        slices: Any = {"sequence_length": 3, "pad": not number}
        replays.append(make(None, 20, batch_size=1, slices=core.Slices(**slices)))
        buffers.append(host(20, core.SliceSampler(**slices)))
        for one in (replays[-1], buffers[-1]):
            one.extend(rows(1000 * number, 11))
    expected = core.ReplayBufferEnsemble(*buffers, p=SCHEDULE, batch_size=5, seed=2**63 + 5)
    if isinstance(replays[0], JaxReplay):
        states = [replay.state for replay in replays]
        draw = jax.jit(lambda number: in_jax.sample_ensemble(states, number, 5, p=SCHEDULE, seed=2**63 + 5))
    else:
        draw = in_torch.ReplayEnsemble(replays, batch_size=5, p=SCHEDULE, seed=2**63 + 5).sample
    of_first = []
    for number in range(9):
        wanted, found = expected.sample(), draw(number)
        same(
            {name: found[name] for name in wanted}, wanted, close=CLOSE
        )  # the host has no field of a member that gives no rows
        of_first.append(int((wanted["buffer_ids"][:, 0] == 0).sum()))
    assert [{*of_first[:4]}, {*of_first[4:8]}, of_first[8]] == [{3, 4}, {1, 2}, 5]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"capacity": 0}, ConfigError, "capacity: expected"),
        ({"capacity": 2**30}, ConfigError, "less than 2\\*\\*30 rows"),
        ({"num_envs": 5}, ConfigError, "a multiple of the 5 environments, found 12"),
        ({"transform": core.NStep(2, 0.9, takes="arrived")}, ConfigError, "for 'outgoing' rows"),
        ({"transform": core.VecNorm("reward")}, ConfigError, "VecNorm.*, which keeps statistics of all rows"),
        ({"transform": core.OnWrite(core.ReturnsToGo())}, ConfigError, "which changes rows that are written"),
        ({"row": {"index": 0.0}}, SchemaError, r"without the fields \['index'\]"),
        ({"row": {"priority_weight": 0.0}, "priorities": core.Priorities()}, SchemaError, "priority_weight"),
        ({"row": {"reward": "much"}}, SchemaError, "'reward': expected an? (array|tensor) of numbers"),
        ({"row": {"when": np.datetime64("2000-01-01")}}, SchemaError, "'when': expected an? (array|tensor) of numbers"),
        ({"row": {}}, SchemaError, "at least one field, found {}"),
        (
            {"row": {"reward": 0.0}, "slices": core.Slices(sequence_length=3)},
            MissingFieldError,
            "or one of the fields .*'done'",
        ),
        ({"slices": core.Slices(sequence_length=3, end_key="over")}, MissingFieldError, "found 'over'"),
        (
            {"slices": core.Slices(sequence_length=3, traj_key="reward")},
            SchemaError,
            "expected integers as trajectory ids",
        ),
        (
            {"slices": core.Slices(sequence_length=3, pad=0.5)},
            ConfigError,
            "the dtype of field '(done|x)', can represent, found 0.5",
        ),
        (
            {"slices": core.Slices(sequence_length=13, pad=False)},
            ConfigError,
            "at most 12, the capacity in time steps.* found 13",
        ),
        ({"slices": core.Slices(sequence_length=3, period=2**30)}, ConfigError, "period: expected less than 2\\*\\*30"),
        (
            {"num_envs": ..., "slices": core.Slices(sequence_length=3)},
            ConfigError,
            "num_envs: .* which slices",
        ),
        ({"num_envs": ..., "transform": core.NextView()}, ConfigError, "num_envs: .* which slices"),
        ({"seed": -1}, ConfigError, "seed: expected an integer"),
        ({"order": "newest"}, ConfigError, "order: expected one of"),
        (
            {"order": "queue", "slices": core.Slices(sequence_length=2)},
            ConfigError,
            "or 'epochs' for slices, found 'queue'",
        ),
        ({"order": "epochs", "slices": core.Slices(sequence_length=2, period=2)}, ConfigError, "period: expected 1"),
        ({"order": "epochs", "batch_size": 13}, ConfigError, "at most 12, the capacity"),
        ({"sampler": object}, ConfigError, "sampler: expected an instance of a subclass of DeviceSampler, found"),
        ({"sampler": object()}, ConfigError, "sampler: expected an instance of a subclass of DeviceSampler, found"),
        ({"order": "epochs", "priorities": core.Priorities()}, ConfigError, "expected order='random', found 'epochs'"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(make: Make, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**options)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"reward": None}, SchemaError, r"fields \[.*\], found \[.*\]"),
        ({"reward": np.ones((2, 2), np.float32)}, SchemaError, r"'reward': expected shape \[\] for"),
        ({"reward": np.ones(2, np.int32)}, SchemaError, "expected float32, found int32"),
        ({"done": np.zeros(3, bool)}, SchemaError, "the same number of rows in every field"),
        ({"reward": np.full(2, 1e300)}, (DataError, SchemaError), "'reward'"),
        (rows(0, 13), ConfigError, "at most 12 time steps at once"),
    ],
)
def test_rows_of_another_kind_are_refused(make: Make, changed: Any, error: Any, words: str) -> None:
    replay = make()
    with pytest.raises(error, match=words):
        replay.extend({name: values for name, values in (rows(0, 2) | changed).items() if values is not None})
    assert not int(replay.size)


def test_a_sample_that_cannot_be_is_refused(make: Make) -> None:
    lacking = make({"done": False}, transform=core.NStep(2, 0.9))
    lacking.extend({"done": np.zeros(4, bool)})
    with pytest.raises(MissingFieldError, match="NStep: expected a field 'reward'"):
        lacking.sample()
    for beta in (-1, float("nan"), "x", torch.ones(2), jnp.ones(2)):
        with pytest.raises(ConfigError, match=r"beta: expected a .*number of 0 or more"):
            core.Priorities(beta=beta)
    replay, slices = make(), make(slices=core.Slices(sequence_length=3, pad=False))
    with pytest.raises(ConfigError, match="expected rows, found none"):
        replay.sample()
    replay.extend({name: values[0] for name, values in rows(0, 1).items()})
    assert replay.can_sample()
    assert not replay.can_sample(min_length=2)
    for index in (-1, 0.5, True, "x"):
        with pytest.raises(ConfigError, match=f"found {index!r}"):
            replay.sample(index)
    slices.extend({**rows(0, 4), "done": np.array([False, True, False, False])})
    assert not slices.can_sample()
    with pytest.raises(ConfigError, match="slices of 3 steps in one episode, found none among 4 time steps"):
        slices.sample()
    slices.extend({**rows(4, 1), "done": np.array([False])})
    assert slices.can_sample()
    assert not slices.can_sample(min_length=6)
    assert slices.sample()["x"].tolist() == [[2, 3, 4]] * 4


def test_priorities_that_cannot_be_are_refused(make: Make) -> None:
    plain, replay = make(), make(priorities=core.Priorities(alpha=1, eps=0))
    for one in (plain, replay):
        one.extend(rows(0, 4))
    with pytest.raises(ConfigError, match="created with priorities=, found a replay without"):
        plain.set_priorities([0], [1.0])
    with pytest.raises(ConfigError, match="beta: expected None, because this replay has no priorities"):
        plain.sample(beta=1)
    for index, values, error, words in (
        ([0], [-1.0], DataError, "finite priorities of 0 or more, found -1"),
        ([0], [np.nan], DataError, "finite priorities of 0 or more, found nan"),
        ([0], [1e15], DataError, "priorities up to .* for a capacity of 12 rows"),
        ([4], [1.0], IndexError, r"slots in 0\.\.3, found 4"),
        ([0.0], [1.0], ConfigError, "expected integers"),
        ([0, 1], [1.0], ConfigError, r"shape of the index \[2\], found \[1\]"),
    ):
        with pytest.raises(error, match=words):
            replay.set_priorities(np.array(index), np.array(values))
    replay.set_priorities(np.arange(4), np.zeros(4, np.float32))
    assert not replay.can_sample()
    with pytest.raises(ConfigError, match="rows with a priority above 0, found none among 4"):
        replay.sample()


@pytest.mark.slow
def test_priorities_that_cannot_be_are_left_out_where_nothing_waits(make: Make) -> None:
    replay = make(None, 40, batch_size=64, priorities=core.Priorities(alpha=1, beta=1, eps=0))
    replay.extend(rows(0, 4))
    slots, values = (
        np.array([0, 0, 1, 1, 2, 3, -1, 4], np.int32),
        np.array([3, np.nan, 1, 0, -1, np.inf, 9, 9], np.float32),
    )
    if isinstance(replay, JaxReplay):
        replay.state = jax.jit(in_jax.set_priorities)(replay.state, slots, values)
        held = in_jax.to_host(replay.state)
    else:
        torch.compile(in_torch.Replay.set_priorities, fullgraph=True, backend="eager")(
            replay, torch.as_tensor(slots), torch.as_tensor(values)
        )
        held = replay.to_host()
    assert {*held.sample()["index"].tolist()} == {*replay.sample()["index"].tolist()} == {3}
    replay.set_priorities([3], [0.0])
    assert {*replay.sample()["index"].tolist()} == {0, 2}
    # One priority may stand for a slice.
    replay = make(slices=core.Slices(sequence_length=3, pad=False), priorities=core.Priorities(alpha=1, eps=0))
    replay.extend({**rows(0, 6), "done": np.zeros(6, bool)})
    replay.set_priorities([[0, 1], [2, 3]], np.array([[0.0], [7.0]], np.float32))
    assert set(replay.sample()["x"][:, 0].tolist()) <= {2, 3}


@pytest.mark.parametrize("package", [in_torch.Replay, JaxReplay], ids=["torch", "jax"])
def test_what_lies_under_a_mask_is_no_row_and_no_priority(package: Any) -> None:
    replay = package({"x": np.float32(0)}, 8, batch_size=4, num_envs=None, priorities=core.Priorities())
    hidden = np.ma.masked_array([1.0, 2.0], [True, False], np.float32)
    with pytest.raises(DataError, match=r"field 'x'.*expected a value, found a masked value"):
        replay.extend({"x": hidden})
    replay.extend({"x": np.zeros(2, np.float32)})
    for given in ((np.arange(2), hidden), (np.ma.masked_array([0, 1], [True, False]), [1.0, 2.0])):
        with pytest.raises(DataError, match="set_priorities: expected a value, found a masked value"):
            replay.set_priorities(*given)


@dataclass(frozen=True, kw_only=True)
class Newest(DeviceSampler):
    """Rows or slices that begin in the newest time steps, and how many units were drawn."""

    order = "newest"

    def init(self, xp: Arrays, ring: Ring) -> Any:
        return super().init(xp, ring) | {"drawn": xp.full((), 0, "index")}

    def draw(self, xp: Arrays, state: Any, ring: Ring, key: DrawKey, size: int) -> tuple[Any, RowPlan]:
        slots = (ring.cursor * ring.envs - 1 - self.back(xp, ring, key, size)) % ring.capacity
        return state | {"drawn": state["drawn"] + size}, self.units.plan(
            xp, state, ring, self.units.at_slots(ring, slots)
        )

    def back(self, xp: Arrays, ring: Ring, key: DrawKey, size: int) -> Any:
        """The distance of each row to the newest."""
        return xp.integers(xp.words(key, size), xp.where(ring.rows < 9, ring.rows, 9))


@dataclass(frozen=True, kw_only=True)
class Varied(Newest):
    """Rows at distances from all forms of arguments that the functions take."""

    among: int = 9

    def back(self, xp: Arrays, ring: Ring, key: DrawKey, size: int) -> Any:
        words, newest = xp.words(key, 2 * size), xp.minimum(ring.rows, self.among)
        highs = xp.concat([xp.range(size), xp.expand(xp.cast(xp.full((), 7, "float"), "index"), (size,))])
        near, few, far, each = (xp.integers(words, high)[size:] for high in (newest, 3, ring.rows, highs))
        part = xp.integers(words, 4)[:size]
        ends = xp.cumsum(xp.range(3)) + xp.running_max(xp.range(3)) + 1  # 1, 3, 6
        chosen = xp.where(part == 0, near, xp.where(part == 1, few, xp.where(part == 2, far, each)))
        there = xp.take(ends, xp.searchsorted(ends, xp.range(size) * 0 + xp.maximum(ring.rows // 40, 2)))
        return xp.maximum(chosen, 1) - 3 + there - xp.integers(words, 0)[size:]


@pytest.mark.parametrize(
    ("sampler", "slices"), [(Newest(), core.Slices(sequence_length=3, end_key="done")), (Varied(among=8), None)]
)
def test_a_sampler_of_ones_own_draws_the_same_everywhere(
    sampler: Newest, slices: core.Slices | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_envs": None, "slices": slices, "sampler": sampler}
    state = in_jax.init(ROW, 30, seed=5, **options)
    host = core.ReplayBuffer(core.ArrayStorage(30), HostSampler(state.layout.sampler), batch_size=4, seed=5)
    eager, compiled = (in_torch.Replay(ROW, 30, seed=5, **options) for _ in range(2))
    draw = torch.compile(compiled.sample, fullgraph=True, backend="eager")
    seeds = jax.vmap(lambda seed: in_jax.init(ROW, 30, seed=seed, **options))(jnp.array([4, 5]))
    add, take = jax.jit(in_jax.add), jax.jit(in_jax.take)
    add_each, take_each = jax.jit(jax.vmap(in_jax.add, (0, None))), jax.jit(jax.vmap(in_jax.take, (0, None)))
    for first in range(0, 40, 10):
        count = np.arange(first, first + 10)
        rows = {"x": count.astype(np.int32), "reward": count.astype(np.float32), "done": count % 7 == 6}
        host.extend(rows)
        eager.extend(rows)
        compiled.extend(rows)
        state, batch = take(add(state, rows), first // 10)
        seeds, batches = take_each(add_each(seeds, rows), first // 10)
        expected = host.sample()
        for found in (eager.sample(), draw(), batch, jax.tree.map(lambda leaf: leaf[1], batches)):
            for name in ("x", "index", *(() if slices is None else ("mask",))):
                np.testing.assert_array_equal(np.asarray(found[name]), expected[name], name)
    eager.to_host().dumps(tmp_path / "own")
    empty = in_jax.init(ROW, 30, **options)
    moved = in_jax.to_host(empty)
    moved.loads(tmp_path / "own")
    again = in_jax.from_host(empty, moved)
    assert int(again.state["drawn"]) == 16
    np.testing.assert_array_equal(in_jax.take(again, moved.stats()["samples"])[1]["x"], host.sample()["x"])


def test_integers_of_one_high_per_word_are_those_of_the_host() -> None:
    words = np.random.default_rng(5).integers(0, 2**64, 4096, np.uint64)
    words[:64] = np.uint64(2**64 - 1) - np.arange(64, dtype=np.uint64) * np.uint64(2**11)
    highs = np.arange(4096) ** 2 * 17 % 2**30
    highs[:64] = 2**30 - 1
    with jax.enable_x64(True):
        in_jax_words = jnp.asarray(words)
    expected = np.array([Arrays().integers(words[at : at + 1], int(high))[0] for at, high in enumerate(highs)])
    tensors = torch.from_numpy(words.view(np.int64)), torch.from_numpy(highs)
    for found in (
        Arrays().integers(words, highs),
        TorchArrays(torch.device("cpu")).integers(*tensors),
        JAX.integers(in_jax_words, jnp.asarray(highs, jnp.int32)),
    ):
        np.testing.assert_array_equal(np.asarray(found), expected)
