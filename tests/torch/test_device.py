"""Replay on the device in torch: the draws of the host, compiled too, and nothing that waits for the device."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mouse_core import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import flatten
from mouse_core.randomness import Key, Order, Purpose
from mouse_core.replay import (
    ArrayStorage,
    LinearSchedule,
    NextView,
    NStep,
    Priorities,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Slices,
    SliceSampler,
    VecNorm,
)
from mouse_torch import _philox, device
from mouse_torch.device.ground import turns

SEED = 2**63 + 12345
BATCH = 8
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def stream(first: int, count: int, envs: int | None = None) -> dict[str, Any]:
    """Rows of episodes of 1 to some 20 steps, which depend on their numbers alone."""
    number = first + np.arange(count)[:, None] + 100_000 * np.arange(envs or 1)
    done = np.random.default_rng(7).random(4096)[(number + 5 * (number // 100_000)) % 4096] < 0.25
    lead = (count,) if envs is None else (count, envs)
    return {
        "obs": {
            "x": number.reshape(lead).astype(np.int32),
            "y": np.stack([number, -number], -1).reshape(*lead, 2) * 1.0,
        },
        "reward": (number % 7).reshape(lead).astype(np.float32),
        "done": done.reshape(lead).astype(np.int8),
    }


EXAMPLE = {
    "obs": {"x": np.int32(0), "y": np.zeros(2)},
    "reward": 0.0,
    "done": np.int8(0),
}


def host(capacity: int, envs: int | None, sampler: Any, transform: Any = None, seed: int = SEED) -> ReplayBuffer:
    storage = ArrayStorage(capacity, ndim=1 if envs is None else 2)
    return ReplayBuffer(storage, sampler, transform=transform, batch_size=BATCH, seed=seed)


def same(found: Any, expected: Any) -> None:
    """Floats that were summed may differ in their last bits."""
    leaves, others = flatten(expected), flatten(found.to_dict())
    assert leaves.keys() == others.keys()
    for key, leaf in leaves.items():
        np.testing.assert_allclose(others[key].cpu(), leaf, rtol=1e-6, err_msg=str(key))


def agrees_with_the_host(
    envs: int | None, transform: Any, count: int, writes: int, on: str = "cpu", slices: Any = None
) -> None:
    """Rows are written into a ring of 20 time steps until they have gone round twice; all samples are compared."""
    capacity = 20 * (envs or 1)
    expected = host(capacity, envs, SliceSampler(**slices) if slices else RandomSampler(), transform)
    options: dict[str, Any] = {"transform": transform, "seed": SEED, "device": on}
    if slices:
        options["slices"] = Slices(**slices)
    replay = device.Replay(EXAMPLE, capacity, batch_size=BATCH, num_envs=envs, **options)
    for number in range(writes):
        rows = stream(number * count, count, envs)
        expected.extend(rows)
        replay.extend(rows)
        same(replay.sample(), expected.sample())
        same(replay.sample(2 * number + 1), expected.sample())
        replay.samples.add_(1)


@pytest.mark.slow
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("transform", [None, [NextView(), NStep(2, 0.5)]])
@pytest.mark.parametrize(("envs", "count", "writes"), [(None, 1, 23), (3, 7, 7), (3, 20, 3)])
def test_rows_are_those_of_the_host(envs: int | None, transform: Any, count: int, writes: int, on: str) -> None:
    agrees_with_the_host(envs, transform, count, writes, on)


@pytest.mark.slow
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(
    ("envs", "count", "options", "transform"),
    [
        (3, 7, {"sequence_length": 4, "pad": -1}, None),
        (3, 20, {"sequence_length": 3, "pad": False}, None),
        (None, 7, {"sequence_length": 2, "pad": False, "period": 2}, None),
        (3, 7, {"sequence_length": 3, "period": 2}, None),
        (None, 1, {"sequence_length": 1, "pad": False}, None),
        (3, 7, {"sequence_length": 6}, [NextView(), NStep(2, 0.5)]),
        (None, 7, {"sequence_length": 1, "end_key": "done"}, None),
    ],
)
def test_slices_are_those_of_the_host(envs: int | None, count: int, options: Any, transform: Any, on: str) -> None:
    agrees_with_the_host(envs, transform, count, 25 if count == 1 else 7, on, options)


@pytest.mark.parametrize("trial", range(10))
def test_what_a_ring_has_left_of_an_episode_begins_where_it_counts(trial: int) -> None:
    """With priorities and without, one stream or two, whatever writes leave of the oldest episode."""
    draws = np.random.default_rng(trial)
    envs, steps = 1 + trial // 2 % 2, int(draws.integers(4, 12))
    options: Any = {"sequence_length": int(draws.integers(1, 5)), "period": int(draws.integers(2, 7))}
    exponents: Any = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}
    sampler = PrioritizedSliceSampler(**exponents, **options) if trial % 2 else SliceSampler(**options)
    held = ReplayBuffer(ArrayStorage(steps * envs, ndim=envs), sampler, batch_size=64, seed=5)
    replay = device.Replay(
        {"row": np.int64(0), "done": np.bool_(False)},
        steps * envs,
        batch_size=64,
        num_envs=envs if envs > 1 else None,
        slices=Slices(**options),
        priorities=Priorities(**exponents) if trial % 2 else None,
        seed=5,
    )
    written = 0
    for _ in range(8):
        n = int(draws.integers(1, steps + 1))
        row = np.arange(written, written + n)[:, None] + 1000 * np.arange(envs)
        rows = {"row": row, "done": draws.random((n, envs)) < 0.15}
        written += n
        for one in (held, replay):
            one.extend(rows if envs > 1 else {name: values[:, 0] for name, values in rows.items()})
        if not replay.can_sample():
            with pytest.raises(ConfigError):
                held.sample()
            continue
        expected = held.sample()
        np.testing.assert_array_equal(replay.sample()["index"], expected["index"])


@pytest.mark.parametrize(("key", "ends"), [("traj_id", False), ("episode", True), ("mine", True)])
def test_numbers_of_trajectories_end_episodes_as_on_the_host(key: str, ends: bool) -> None:
    ids = np.array([4, 4, 4, 9, 9, 2, 2, 2, 2, 4, 4], np.int32)
    rows = {"obs": np.arange(11, dtype=np.float32), key: ids, **({"done": ids * 0} if ends else {})}
    named = {"traj_key": "mine"} if key == "mine" else {}
    expected = host(20, None, SliceSampler(sequence_length=3, **named))
    expected.extend(rows)
    one = {name: leaf[0] for name, leaf in rows.items()}
    replay = device.Replay(
        one, 20, batch_size=BATCH, num_envs=None, slices=Slices(sequence_length=3, **named), seed=SEED
    )
    replay.extend(rows)
    same(replay.sample(), expected.sample())


def test_there_is_something_to_sample_once_an_episode_is_long_enough() -> None:
    replay = made(slices=Slices(sequence_length=3, pad=False))
    replay.extend({"reward": torch.arange(4.0), "done": torch.tensor([False, True, False, False])})
    assert not replay.can_sample()
    with pytest.raises(ConfigError, match="slices of 3 steps in one episode, found none among 4 time steps"):
        replay.sample()
    replay.extend({"reward": 4.0, "done": False})
    assert replay.can_sample()
    assert replay.sample()["reward"].tolist() == [[2, 3, 4]] * 4


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("n", [1, 4, 37])
def test_words_are_those_of_the_host(n: int, on: str) -> None:
    """By operations of torch alone, as elsewhere than in the host's memory."""
    for seed, index, high in ((0, 0, 1), (SEED, 2**40 + 3, 3), (2**64 - 1, 7, 2**31 - 1)):
        word = torch.tensor(_philox.signed(seed), device=on)
        found = _philox.philox(word, torch.tensor(index, device=on), n)
        key = Key(seed, Purpose.REPLAY, index)
        assert (found.cpu().numpy().view(np.uint64) == key.bits(n)).all()
        assert _philox.scaled_integers(found, torch.tensor(high, device=on)).tolist() == key.integers(high, n).tolist()


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(("n", "most"), [(1, 3), (300, 300), (300, 40_000), (16_384, 16_384), (16_385, 40_000)])
def test_orders_are_those_of_the_host(n: int, most: int, on: str) -> None:
    """By operations of torch alone; of few elements, which are shuffled, and of more, where some walk twice."""
    seed, index, count = (torch.tensor(number, device=on) for number in (_philox.signed(SEED), 5, n))
    places = np.arange(n)
    found = turns.shuffled(seed, index, count, torch.tensor(places, device=on), most)
    assert (found.cpu().numpy() == Order(Key(SEED, Purpose.REPLAY, 5), n)(places)).all()


def test_rows_come_in_turn() -> None:
    expected = host(300, None, SamplerWithoutReplacement(drop_last=True))
    queue = device.Replay(EXAMPLE, 300, batch_size=BATCH, order="queue")
    epochs = device.Replay(EXAMPLE, 300, batch_size=BATCH, order="epochs", seed=SEED)
    for made in (expected, epochs, queue):
        made.extend(stream(0, 20))
    assert not queue.can_extend(281)
    assert queue.can_extend(280)
    with pytest.raises(ConfigError, match="expected 8, as each row comes once, found 4"):
        queue.sample(batch_size=4)
    for _ in range(3):
        same(epochs.sample(), expected.sample())
    assert [queue.sample()["index"].tolist() for _ in range(2)] == [[*range(8)], [*range(8, 16)]]
    with pytest.raises(ConfigError, match="expected 8 rows for a batch in which each comes once, found 4"):
        queue.sample()


class Seen(TorchDispatchMode):
    """What torch does, by name, and between which devices it copies."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given, made, places = (
            {leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in (args, found, args[1:2] if name.startswith("index") else ())
        )
        shaped = name.startswith(("nonzero", "masked_select", "unique", "_local_scalar_dense", "item"))
        masks = any(leaf.dtype == torch.bool for leaf in places)
        where = {leaf.device for leaf in given | made}
        if shaped or masks or len(where) > 1:
            self.waits.append(f"{name} {where}")
        return found


WAITING: dict[str, dict[str, Any]] = {
    "rows": {"transform": [NextView(), NStep(3, 0.9)]},
    "slices": {"slices": Slices(sequence_length=3), "transform": [NextView(), NStep(3, 0.9)]},
    "whole slices": {"slices": Slices(sequence_length=2, pad=False, period=2)},
    "epochs": {"order": "epochs"},
    "epochs of slices": {"order": "epochs", "slices": Slices(sequence_length=3, pad=0)},
    "a queue": {"order": "queue"},
    "priorities": {"priorities": Priorities(beta=LinearSchedule(0.4, 1.0, 100))},
    "priorities of slices": {"priorities": Priorities(), "slices": Slices(sequence_length=3, period=2)},
}


@pytest.mark.parametrize("kind", WAITING)
@pytest.mark.parametrize("on", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_nothing_waits_for_the_device(on: str, kind: str) -> None:
    """On the host and on "meta", which has no values, what torch does is counted; on CUDA it would be refused."""
    envs, options = 256 if on == "cpu" else 4096, WAITING[kind]
    row = {"obs": torch.zeros(3), "reward": 0.0, "done": False}
    replay = device.Replay(row, 8 * envs, num_envs=envs, batch_size=64, device=on, **options)
    lead = torch.zeros(envs, device=on)
    step = {"obs": lead[:, None].expand(envs, 3), "reward": lead, "done": lead > 0}

    def turn(index: Any = None) -> None:
        replay.extend(step)
        replay.extend({name: values[None] for name, values in step.items()})
        batch = replay.sample(index)
        replay.can_sample(5)
        replay.can_extend()
        if "priorities" in options:
            replay.set_priorities(batch["index"], batch["reward"])

    if on == "cuda":
        turn()  # what is compiled is compiled before
        torch.cuda.set_sync_debug_mode("error")
    try:
        with Seen() as seen:
            turn()
            if on != "meta":  # where each operation is seen alike
                turn(7)
                turn(torch.zeros((), dtype=torch.int64, device=on))
    finally:
        if on == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert seen.waits == []


def test_it_is_a_module() -> None:
    """Its state is that of a module; rows that are tuples, and of any dtype."""
    row = (torch.zeros(2, dtype=torch.bfloat16), {"image": torch.zeros(2, 2, dtype=torch.uint8)})
    made = [torch.nn.ModuleDict({"replay": device.Replay(row, 6, batch_size=4, seed=seed)}) for seed in (1, 2)]
    one, other = (module["replay"] for module in made)
    one.extend((torch.arange(10.0).reshape(5, 2).bfloat16(), {"image": torch.full((5, 2, 2), 200, dtype=torch.uint8)}))
    one.sample()
    made[1].load_state_dict(made[0].state_dict())
    first, second = one.sample(), other.sample()
    assert (first["index"] == second["index"]).all()
    assert first["data", "0"].dtype == torch.bfloat16
    assert (first["data", "0"][:, 0] == 2 * first["index"]).all()
    assert (first["data", "1", "image"] == 200).all()
    sliced = device.Replay({"done": False}, 6, batch_size=2, num_envs=None, slices=Slices(sequence_length=2))
    before = {name: values for name, values in sliced.state_dict().items() if name != "episodes.made"}
    with pytest.raises(RuntimeError, match="dumps makes a file of it that loads reads"):
        sliced.load_state_dict(before, strict=False)


def test_rows_are_seen_where_they_are_moved() -> None:
    """What NumPy was told of memory holds no longer for a copy, or in memory that is shared."""
    replay = made(priorities=Priorities())
    replay.extend({"reward": torch.arange(4.0), "done": torch.zeros(4, dtype=torch.bool)})
    replay.sample()
    copied = copy.deepcopy(replay)
    copied.register_buffer("more", None)  # as a class of somebody's may
    for memory in replay.buffers():
        memory.share_memory_()
    for one, reward in ((replay, 5.0), (copied, 6.0)):
        one.extend({"reward": torch.full((9,), reward), "done": torch.zeros(9, dtype=torch.bool)})
        one.set_priorities(torch.arange(4), torch.zeros(4))
    first, second = replay.sample(), copied.sample()
    assert replay.samples == copied.samples == 2
    assert (first["index"] == second["index"]).all()
    assert set(first["reward"].tolist()) == {5.0}
    assert set(second["reward"].tolist()) == {6.0}


@pytest.mark.parametrize("name", ["uint16", "uint64", "float8_e4m3fn"])
def test_rows_of_any_dtype(name: str) -> None:
    """Of which torch writes some row by row only as other integers; and no cast of a module changes them."""
    dtype = getattr(torch, name)
    row = {"x": torch.zeros(2, dtype=dtype), "y": 0.5, "done": False}
    slices = Slices(sequence_length=2, pad=0)
    replay = device.Replay(row, 12, batch_size=4, num_envs=None, slices=slices, priorities=Priorities())
    torch.nn.ModuleDict({"replay": replay, "net": torch.nn.Linear(1, 1)}).to(torch.bfloat16).double()
    x = torch.arange(20, dtype=torch.float32).reshape(10, 2).to(dtype)
    replay.extend({"x": x, "y": torch.ones(10), "done": torch.arange(10) % 3 == 2})
    batch = replay.sample()
    assert batch["x"].dtype == dtype
    assert batch["y"].dtype == torch.float32
    found, kept = batch["x"].float(), x[batch["index"]].float()
    assert (found == kept * batch["mask"][..., None]).all()


def test_only_so_many_rows_are_enough() -> None:
    replay = device.Replay({"x": 0.0}, 12, batch_size=4)
    assert not replay.can_sample()
    with pytest.raises(ConfigError, match="expected rows, found none"):
        replay.sample()
    replay.extend({"x": 1.0})
    assert replay.can_sample()
    assert not replay.can_sample(min_length=2)
    for index, words in (
        (-1, "found -1"),
        (torch.tensor(-1), "found -1"),
        (True, "found True"),
        (0.5, "found 0.5"),
        (torch.ones(2), r"found torch.float32 \[2\]"),
    ):
        with pytest.raises(ConfigError, match=words):
            replay.sample(index)


def made(row: Any = None, **options: Any) -> device.Replay:
    given = {"capacity": 12, "batch_size": 4, **options}
    return device.Replay({"reward": 0.0, "done": False} if row is None else row, **{"num_envs": None, **given})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"capacity": 0}, ConfigError, "capacity: expected"),
        ({"num_envs": 5}, ConfigError, "a multiple of the 5 environments, found 12"),
        (
            {"num_envs": ..., "slices": Slices(sequence_length=3)},
            ConfigError,
            "num_envs: expected .* for slices",
        ),
        ({"num_envs": ..., "transform": NextView()}, ConfigError, "num_envs: expected .* for NextView"),
        ({"transform": VecNorm("reward")}, ConfigError, "VecNorm.*, which keeps numbers of all rows"),
        ({"row": {"index": 0.0}}, SchemaError, r"without the fields \['index'\]"),
        ({"capacity": 2**30}, ConfigError, "less than 2\\*\\*30 rows"),
        ({"row": {"reward": "much"}}, SchemaError, "'reward': expected a tensor of numbers"),
        ({"row": {"when": np.datetime64("2000-01-01")}}, SchemaError, "'when': expected a tensor of numbers"),
        ({"row": {}}, SchemaError, "at least one field, found {}"),
        ({"slices": Slices(sequence_length=3, end_key="over")}, MissingFieldError, "found 'over'"),
        (
            {"slices": Slices(sequence_length=3, traj_key="reward")},
            SchemaError,
            "expected integers as numbers of",
        ),
        (
            {"slices": Slices(sequence_length=3, pad=0.5)},
            ConfigError,
            "bool holds, as in field 'done', found 0.5",
        ),
        ({"slices": Slices(sequence_length=13, pad=False)}, ConfigError, "at most the 12 time steps .* found 13"),
        ({"slices": Slices(sequence_length=3, period=2**30)}, ConfigError, "period: expected less than 2\\*\\*30"),
        ({"row": {"done": False}, "transform": NStep(2, 0.9)}, MissingFieldError, "NStep: expected a field 'reward'"),
        ({"row": {"reward": 0.0}, "transform": NextView()}, MissingFieldError, "NextView: expected a field 'done'"),
        ({"seed": -1}, ConfigError, "seed: expected an integer"),
        ({"device": "nowhere"}, ConfigError, "device: expected"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made(**options)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ({"reward": 1.0}, SchemaError, r"fields \['reward', 'done'\], found \['reward'\]"),
        ({"reward": torch.ones(2, 2), "done": torch.zeros(2) > 0}, SchemaError, r"'reward': expected \[\] for"),
        ({"reward": np.ones(2, np.int32), "done": np.zeros(2, bool)}, SchemaError, "expected float32, found int32"),
        ({"reward": torch.ones(2), "done": torch.zeros(3) > 0}, SchemaError, "as many rows in every field"),
        ({"reward": torch.ones(13), "done": torch.zeros(13) > 0}, ConfigError, "at most 12 time steps at once"),
    ],
)
def test_rows_of_another_kind_are_refused(rows: Any, error: type[Exception], words: str) -> None:
    replay = made()
    with pytest.raises(error, match=words):
        replay.extend(rows)
    assert not replay.size
