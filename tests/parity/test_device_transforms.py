"""Every transform of the core runs on a device, inside of what JAX and torch compile, or is refused at once."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch

from mouse_core import ConfigError
from mouse_core import replay as core
from mouse_core.nested import flatten
from mouse_jax import device as in_jax
from mouse_torch import device as in_torch
from tests.torch.test_device import Seen

LENGTH: Any = {"sequence_length": 4}
# In an order in which they go together, too.
OF_ROWS: dict[str, Any] = {
    "CenterCrop": core.CenterCrop("image", size=(3, 4)),
    "GrayScale": core.GrayScale("image"),
    "Resize": core.Resize("image", size=(3, 9)),
    "Resize to the nearest": core.Resize("image", size=(5, 7), method="nearest"),
    "ToFloatImage": core.ToFloatImage("image", channels="first"),
    "Apply": core.Apply({"obs": lambda values: values * 2 + 1}),
    "Concatenate": core.Concatenate("obs", "reward", to="both", keep=True),
    "Cast": core.Cast({"obs": "float16"}, every={"bool": "int8"}),
    "Transitions": core.Transitions(),
    "NStep": core.NStep(3, 0.9),
    "Exclude": core.Exclude("image"),
}
OF_SLICES: dict[str, Any] = {
    "MarkSlices": core.MarkSlices(first="is_init", last=["done", "over"]),
    "ReturnsToGo": core.ReturnsToGo(0.9),
    "BurnIn": core.BurnIn(lambda first: {"hidden": first["obs"].sum(1)}, steps=2),
    "NextView": core.NextView(),
    "Compose": core.Compose(core.Exclude("image"), core.Apply({"obs": lambda values: values * 2 + 1})),
    "Select": core.Select("obs"),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "CatFrames": (core.CatFrames("obs", frames=2), "reads other rows"),
    "Compress": (core.Compress("image", shape=(4, 6, 3)), "changes rows that are written"),
    "HindsightRelabel": (core.HindsightRelabel(compute_reward=lambda *_: 0), "draws random numbers"),
    "OnWrite": (core.OnWrite(core.ReturnsToGo()), "changes rows that are written"),
    "Pad": (core.Pad("obs"), "rows of different lengths"),
    "RandomTimeCrop": (core.RandomTimeCrop(2), "draws random numbers"),
    "Rename": (core.Rename({"obs": "observation"}), "changes rows that are written"),
    "VecNorm": (core.VecNorm("obs"), "keeps statistics of all rows"),
    "a Cast of rows": (core.Cast(stored={"obs": "float16"}), "changes rows that are written"),
}
EXAMPLE = {"image": np.zeros((4, 6, 3), np.uint8), "obs": np.zeros(2, np.float32), "reward": 0.0, "done": False}
SIZES: dict[str, Any] = {"batch_size": 5, "seed": 7}


def rows(count: int) -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {
        "image": random.integers(0, 256, (count, 4, 6, 3), np.uint8),
        "obs": random.random((count, 2), np.float32),
        "reward": random.random(count, np.float32),
        "done": np.arange(count) % 5 == 4,
    }


def given(name: str) -> dict[str, Any]:
    """What makes a replay with one of them, or with all of rows, or of slices, one after another."""
    sliced = name == "all of slices" or name in OF_SLICES
    own = OF_SLICES if sliced else OF_ROWS
    transform = [*own.values()] if name.startswith("all") else own[name]
    return {"transform": transform, "slices": core.Slices(**LENGTH) if sliced else None, **SIZES}


def expected(name: str) -> dict[Any, Any]:
    options = given(name)
    sampler = core.SliceSampler(**LENGTH) if options.pop("slices") else core.RandomSampler()
    buffer = core.ReplayBuffer(core.ArrayStorage(20), sampler, **options)
    buffer.extend(rows(18))
    return flatten(buffer.sample())


def agree(found: dict[Any, Any], batch: dict[Any, Any]) -> None:
    assert found.keys() == batch.keys()
    for key, leaf in batch.items():
        assert found[key].shape == leaf.shape, key
        # Half a number may be rounded to the one or the other, of images.
        close: Any = {"rtol": 1e-6, "atol": leaf.dtype == np.uint8}
        np.testing.assert_allclose(np.asarray(found[key]), leaf, err_msg=str(key), **close)


def test_none_is_left_out() -> None:
    room = f"{core.__name__}.transforms"
    there = {name for name in core.__all__ if _module(name).startswith(room)}
    assert there == {name for name in (*OF_ROWS, *OF_SLICES, *REFUSED) if name.isidentifier()}


def _module(name: str) -> str:
    return str(getattr(getattr(core, name), "__module__", ""))


@pytest.mark.parametrize("name", [*OF_ROWS, *OF_SLICES])
def test_each_runs_where_nothing_has_values(name: str) -> None:
    options = given(name)
    jax.eval_shape(partial(in_jax.sample, index=0), in_jax.init(EXAMPLE, 20, **{"num_envs": None, **options}))
    made = [in_torch.Replay(EXAMPLE, 20, device=on, **{"num_envs": None, **options}) for on in ("meta", "cpu")]
    step = {key: torch.from_numpy(values) for key, values in rows(18).items()}
    made[0].extend({key: values.to("meta") for key, values in step.items()})
    with Seen() as seen:
        made[0].sample()
    assert seen.waits == []
    made[1].extend(step)
    agree(flatten(made[1].sample().to_dict()), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all of rows", pytest.param("all of slices", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("error:Dynamo detected")
def test_all_are_compiled_at_once(name: str) -> None:
    replay = in_jax.add(in_jax.init(EXAMPLE, 20, **{"num_envs": None, **given(name)}), rows(18))
    batch = expected(name)
    agree(flatten(jax.jit(in_jax.sample)(replay, 0)), batch)
    other = in_torch.Replay(EXAMPLE, 20, **{"num_envs": None, **given(name)})
    other.extend(rows(18))
    torch.compiler.reset()
    found = torch.compile(other.sample, fullgraph=True, backend="eager")()
    agree(flatten(found.to_dict()), batch)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("make", [in_jax.init, in_torch.Replay])
def test_others_are_refused(make: Any, name: str) -> None:
    transform, words = REFUSED[name]
    with pytest.raises(ConfigError, match=f"transform: expected a transform that needs only the batch, .*{words}"):
        make(EXAMPLE, 20, batch_size=5, num_envs=None, transform=transform)


def team(count: int) -> dict[str, Any]:
    """Rows of three agents in episodes of ten steps; each agent terminates or is truncated at a step of its own."""
    random = np.random.default_rng(3)
    codes = np.zeros((count, 3), np.int8)
    for begin in range(0, count, 10):
        for agent, end in enumerate((9, *random.integers(0, 10, 2))):
            codes[begin + end, agent] = random.integers(1, 3)
            codes[begin + end + 1 : begin + 10, agent] = 3
    return {
        "obs": random.random((count, 3, 2), np.float32),
        "reward": random.random((count, 3), np.float32),
        "done": np.arange(count) % 10 == 9,
        "agent_done": codes,
    }


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "transform", [[core.Transitions(), core.NStep(4, 0.9)], core.ReturnsToGo(0.9)], ids=["rows", "slices"]
)
def test_agents_that_end_one_by_one(transform: Any, compiled: bool) -> None:
    slices = core.Slices(sequence_length=7) if isinstance(transform, core.ReturnsToGo) else None
    sampler = core.RandomSampler() if slices is None else core.SliceSampler(sequence_length=7)
    options: dict[str, Any] = {"transform": transform, "batch_size": 9, "seed": 7}
    buffer = core.ReplayBuffer(core.ArrayStorage(40), sampler, **options)
    buffer.extend(team(40))
    batch = flatten(buffer.sample())
    example = {name: values[0] for name, values in team(10).items()}
    replay = in_jax.add(in_jax.init(example, 40, num_envs=None, slices=slices, **options), team(40))
    sample = jax.jit(in_jax.sample) if compiled else in_jax.sample
    agree(flatten(sample(replay, 0)), batch)
    other = in_torch.Replay(example, 40, num_envs=None, slices=slices, **options)
    other.extend({name: torch.from_numpy(values) for name, values in team(40).items()})
    torch.compiler.reset()
    found = torch.compile(other.sample, fullgraph=True, backend="eager")() if compiled else other.sample()
    agree(flatten(found.to_dict()), batch)
