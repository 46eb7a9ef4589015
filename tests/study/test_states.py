"""What a training must remember comes back through a file, for every kind of part."""

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
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_study._running import states


def through_a_file(state: states.Plain, folder: Path) -> states.Plain:
    write_checkpoint(folder / "state", state)
    return read_checkpoint(folder / "state")


def torch_parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    model[2].train(bool(seed))
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
    assert [module.training for module in after["net"][0].modules()] == [True, True, True, False]
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
    plain |= {"taken": seed, "best": None if seed else 1.5, "rate": jnp.asarray(0.1 * seed + 0.1)}
    if not seed:
        dropout.eval()
        network.layers[1].eval()
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
    assert after[3]["rate"].weak_type
    assert (after[3]["weights"]["w"] * after[3]["rate"]).dtype == jnp.bfloat16
    assert [after[2].deterministic, after[0].layers[1].use_running_average] == [True, True]


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
    for parts, message in (
        ({"f": SimpleNamespace()}, r"state\['f'\]\S*: expected numbers, texts and arrays, found SimpleNamespace"),
        (({}, 3), r"state\[1\]: expected an object that can be restored in place, found int"),
        (3, "state: expected an object with state_dict"),
    ):
        with pytest.raises(ConfigError, match=message):
            states.taken(parts)
    random_saved = states.taken({"a": random.Random(0)})
    message = r"state\['a'\]: expected an object of the same type as the saved object, found NoneType"
    with pytest.raises(StateError, match=message):
        states.give({"b": random.Random(0)}, random_saved)
    with pytest.raises(StateError, match=r"state: expected the entries \[0, 1\], found \[0\] in the saved state"):
        states.give(({}, {}), states.taken(({},)))
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(StateError, match="expected a tree with the saved structure"):
        states.give(nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)), states.taken(linear))
    state: dict[str, Any] = {"adam": None, "log": {}}
    begun = states.InitialState(state)
    state["log"]["of"] = random.Random(0)
    with pytest.raises(ConfigError, match=r"state\['log'\]\['of'\]: .* found Random, which was added or changed later"):
        states.taken(state, begun=begun)
    state["log"] = {}
    states.taken(state, begun=begun)
    state["adam"] = optax.adam(0.1).init(jnp.zeros(2))
    with pytest.raises(
        ConfigError, match=r"state\['adam'\]: expected .* found tuple, which was added or changed later"
    ):
        states.taken(state, begun=begun)


def test_values_of_a_dict_are_replaced_whatever_they_were(tmp_path: Path) -> None:
    before: dict[str, Any] = {"returns": [], "counts": {}, "recent": [], "best": None, "weights": {"w": torch.zeros(2)}}
    after = {**before, "returns": [], "counts": {}, "recent": [], "more": 1}
    begun = states.InitialState(before)
    before["returns"] += [1.0, 2.0]
    before["counts"] |= {3: 1, "a": {"b": (1, "c")}}
    before["recent"].append((np.arange(2), 0.5))
    before["best"] = {"w": torch.ones(2), "at": np.float32(3.0)}
    states.give(after, through_a_file(states.taken(before, begun=begun), tmp_path))
    assert list(after) == list(before)
    assert (after["returns"], after["counts"]) == (before["returns"], before["counts"])
    assert isinstance(after["recent"][0], tuple)
    assert after["recent"][0][0].tolist() == [0, 1]
    assert after["best"]["w"].tolist() == [1.0, 1.0]
    assert isinstance(after["best"]["at"], np.float32)


def aliased() -> tuple[dict[str, Any], Any, Any]:
    """What two names, a view and an optimizer hold is one memory each."""
    w, array = torch.zeros(3, requires_grad=True), np.zeros(3)
    state = {"w": w, "adam": torch.optim.SGD([w], 0.1), "array": array, "same": array, "view": array[:2]}
    return {**state, "best": array}, w, array


def test_arrays_that_others_hold_are_written_to_where_they_lie(tmp_path: Path) -> None:
    before, w, array = aliased()
    begun = states.InitialState(before)
    with torch.no_grad():
        w += 1
    array += 1
    before["best"] = array + 6  # no longer the same as the others
    before["later"] = before["best"]
    after, held, held_array = aliased()
    states.give(after, through_a_file(states.taken(before, begun=begun), tmp_path))
    assert after["w"] is held
    assert after["adam"].param_groups[0]["params"][0] is held
    assert held.requires_grad
    assert held.tolist() == [1.0, 1.0, 1.0]
    assert after["array"] is after["same"] is held_array
    assert np.shares_memory(after["view"], held_array)
    assert held_array.tolist() == [1.0, 1.0, 1.0]
    assert after["best"].tolist() == [7.0, 7.0, 7.0]
    assert after["later"] is after["best"] is not held_array
