"""What a training must remember comes back through a file, for every kind of part."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from mouse_core import ConfigError, StateError
from mouse_core.replay.ground.checkpoint import read_checkpoint, write_checkpoint
from mouse_study._running import states


def through_a_file(state: states.Plain, folder: Path) -> states.Plain:
    write_checkpoint(folder / "state", state)
    return read_checkpoint(folder / "state")


def torch_parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    adam = torch.optim.AdamW(model.parameters(), 0.1 + seed, betas=(0.5, 0.6))
    momentum = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for optimizer in (adam, momentum):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1)
    generator = torch.Generator().manual_seed(seed)
    half = torch.full((2,), seed, dtype=torch.bfloat16)
    return {
        "net": (model, adam, momentum, schedule),
        "of": generator,
        "half": half,
        "learned": torch.full((2,), float(seed), requires_grad=True),
        "one": torch.tensor(seed),
        "best": None if seed else 1,
    }


@pytest.mark.parametrize("beside_jax", [False, True])
def test_parts_of_torch_come_back(beside_jax: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not beside_jax:
        monkeypatch.delitem(sys.modules, "jax")
    before, after = torch_parts(0), torch_parts(1)
    states.give(after, through_a_file(states.taken(before), tmp_path))
    for one, other in zip(before["net"], after["net"], strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert torch.equal(before["half"], after["half"])
    assert after["half"].dtype == torch.bfloat16
    assert after["learned"].requires_grad
    assert (after["one"].item(), after["one"].shape, after["best"]) == (0, (), 1)
    assert torch.equal(torch.rand(3, generator=before["of"]), torch.rand(3, generator=after["of"]))


def jax_parts(seed: int) -> tuple[Any, ...]:
    network = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), nnx.BatchNorm(3, rngs=nnx.Rngs(seed)))
    adam = nnx.Optimizer(network, optax.adam(0.1), wrt=nnx.Param)
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
    weights = {"w": jnp.full(2, seed, jnp.bfloat16)}
    plain = {"weights": weights, "adam": optax.adam(0.1).init(weights), "key": jax.random.key(seed)}
    plain |= {"taken": seed, "best": None if seed else 1.5}
    return network, adam, dropout, plain


def leaves_of(parts: tuple[Any, ...]) -> list[Any]:
    leaves = jax.tree.leaves([*map(nnx.state, parts[:3]), parts[3]])
    return [jax.random.key_data(leaf) if "key" in str(getattr(leaf, "dtype", "")) else leaf for leaf in leaves]


def test_parts_of_jax_come_back(tmp_path: Path) -> None:
    before, after = jax_parts(0), jax_parts(1)
    states.give(after, through_a_file(states.taken(before), tmp_path))
    for one, other in zip(leaves_of(before), leaves_of(after), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other, strict=True)
    assert isinstance(after[3]["adam"], tuple)
    assert type(after[3]["adam"][0]) is type(before[3]["adam"][0])


def test_generators_come_back(tmp_path: Path) -> None:
    def made(seed: int) -> list[Any]:
        return [np.random.default_rng(seed), np.random.RandomState(seed), random.Random(seed)]

    def drawn(parts: list[Any]) -> list[float]:
        return [*(part.random() for part in parts), random.random(), np.random.random(), torch.rand(()).item()]  # noqa: NPY002

    before, after = made(0), made(1)
    drawn(before)
    taken, shared = through_a_file(states.taken(before), tmp_path), states.global_generators()
    expected = drawn(before)
    states.give(after, taken)
    states.set_global_generators(through_a_file(shared, tmp_path))
    assert drawn(after) == expected
    states.seed_global_generators(7)
    assert drawn([])[:2] == [random.Random(7).random(), np.random.RandomState(7).random()]


def test_what_cannot_come_back_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"state\['f'\]\S*: expected numbers, texts and arrays, found SimpleNamespace"
    ):
        states.taken({"f": SimpleNamespace()})
    with pytest.raises(
        ConfigError, match=r"state\[1\]: expected something that can be set anew where it lies, found int"
    ):
        states.taken(({}, 3))
    with pytest.raises(ConfigError, match="state: expected something with state_dict"):
        states.taken(3)
    with pytest.raises(StateError, match=r"state: expected \['b'\], found \['a'\] in what was saved"):
        states.give({"b": 1}, states.taken({"a": 1}))
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(StateError, match="expected the same tree as was saved"):
        states.give(nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)), states.taken(linear))
