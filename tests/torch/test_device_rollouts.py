"""Rollouts on the device: the rows, returns and orders of the host, compiled too, and nothing that waits."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mouse_core import ConfigError, RolloutError, SchemaError
from mouse_core import rollouts as core
from mouse_core.rollouts import RolloutField, permutation
from mouse_torch import RolloutStorage, device
from tests.torch.test_device import Seen

ENVS, STEPS, SEED = 6, 4, 2**63 + 7
FIELDS: dict[str, Any] = {"obs": (3,), "values": (), "goal": RolloutField((2,), mask=True, optional=True)}


def steps_of(number: int) -> list[dict[str, Any]]:
    """Those of one rollout, of whose goals some are not there."""
    random = np.random.default_rng(number)

    def normal(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    return [
        {
            "obs": normal(ENVS, 3),
            "values": normal(ENVS),
            "rewards": normal(ENVS),
            "dones": random.random(ENVS) < 0.3,
            "hidden_states": (normal(1, ENVS, 2), (normal(ENVS, 4), normal(2, ENVS, 1))),
            **({} if step == 2 else {"goal": normal(ENVS, 2)}),
        }
        for step in range(STEPS)
    ]


def tensors(tree: Any, on: str) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: torch.as_tensor(leaf, device=on), tree)


def made(on: str = "cpu") -> device.RolloutStorage:
    states = tensors(steps_of(0)[0]["hidden_states"], on)
    return device.RolloutStorage(ENVS, STEPS, FIELDS, SEED, hidden_states=states, device=on)


def update(storage: Any, last: Any, **more: Any) -> list[tuple[Any, ...]]:
    """What is learnt from in two epochs, and in one of trajectories, of which there may be more that are empty."""
    storage.compute_returns(last, 0.9, 0.8)
    rows = [
        (batch["obs"], batch["goal_mask"], batch.returns, batch.advantages, batch.rows, batch.hidden_states[1][0])
        for batch in storage.mini_batch_generator(3, 2, histories={"obs": 2})
    ]
    trajectories = [
        (batch["obs"], batch["advantages"], batch.masks, batch.rows)
        for batch in storage.recurrent_mini_batch_generator(2, 1, shuffle=True, **more)
    ]
    return rows + trajectories


def follows_the_host(
    storage: device.RolloutStorage, add: Callable[[Any], Any], learn: Callable[[Any], Any], on: str
) -> None:
    """Three rollouts, step by step."""
    host = core.RolloutStorage(ENVS, STEPS, FIELDS, SEED)
    for number in range(3):
        for step in steps_of(number):
            add(tensors(step, on))
            host.add_transitions(step)
        last = np.full(ENVS, number, np.float32)
        found, expected = learn(torch.as_tensor(last, device=on)), update(host, last)
        assert len(found) == len(expected) == 8
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            for part, leaf in zip(one, other, strict=True):
                values = part.cpu().numpy()
                if place >= 6 and values.shape != leaf.shape:
                    assert not values[:, leaf.shape[1] :].any()
                    values = values[:, : leaf.shape[1]]
                np.testing.assert_allclose(values, leaf, rtol=1e-5, atol=1e-5)
        host.clear()


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_mini_batches_are_those_of_the_host(on: str) -> None:
    storage = made(on)
    # A module is cast around it.
    torch.nn.ModuleDict({"rollout": storage, "net": torch.nn.Linear(1, 1)}).double()

    def learn(last: torch.Tensor) -> Any:
        found = update(storage, last)
        length, reward = storage.get_statistics()
        assert 1 <= float(length) <= STEPS
        torch.testing.assert_close(reward, storage["rewards"].mean())
        storage.clear()
        return found

    follows_the_host(storage, storage.add_transitions, learn, on)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.cuda)]
)
def test_compiled_steps_give_what_the_host_gives(on: str, backend: str) -> None:
    storage = made(on)

    def learn(last: torch.Tensor) -> Any:
        found = update(storage, last)
        storage.clear()
        return found

    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected")
        compiled = [torch.compile(part, fullgraph=True, backend=backend) for part in (storage.add_transitions, learn)]
        follows_the_host(storage, *compiled, on)


@pytest.mark.cuda
def test_graphs_write_the_next_row_and_have_another_order_each_time() -> None:
    """One graph for a step, and one for all that is learnt from a rollout."""
    storage = made("cuda")
    given, last = tensors(steps_of(0)[0], "cuda"), torch.zeros(ENVS, device="cuda")
    del given["goal"]  # so that there is none in any step

    def learn() -> Any:
        found = update(storage, last, num_trajectories=STEPS * ENVS)
        storage.clear()
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        storage.add_transitions(given)
        learn()
    torch.cuda.current_stream().wait_stream(side)
    storage.epoch.zero_()
    one, all_of_it = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(one):
        storage.add_transitions(given)
    with torch.cuda.graph(all_of_it):
        found = learn()
    host = core.RolloutStorage(ENVS, STEPS, FIELDS, SEED)
    for number in range(3):
        for step in steps_of(number):
            del step["hidden_states"]
            step.pop("goal", None)
            for name, values in step.items():
                given[name].copy_(torch.as_tensor(values))
            one.replay()
            host.add_transitions(step)
        all_of_it.replay()
        host.compute_returns(np.zeros(ENVS, np.float32), 0.9, 0.8)
        for batch, (obs, there, returns, advantages, rows, _) in zip(
            host.mini_batch_generator(3, 2), found[:6], strict=True
        ):
            assert (rows.cpu().numpy() == batch.rows).all()
            assert not there.any()
            for part, leaf in ((obs, batch["obs"]), (returns, batch.returns), (advantages, batch.advantages)):
                np.testing.assert_allclose(part.cpu().numpy(), leaf, rtol=1e-5, atol=1e-5)
        orders = [*host.recurrent_mini_batch_generator(2, 1, shuffle=True)]
        for batch, part in zip(orders, found[6:], strict=True):
            assert (part[3].cpu().numpy() == batch.rows).all()
        host.clear()


@pytest.mark.parametrize("kind", [device.RolloutStorage, RolloutStorage])
@pytest.mark.parametrize("on", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_nothing_waits_for_the_device(kind: Any, on: str) -> None:
    """On "meta", which has no values, what torch does is counted; on CUDA it would be refused."""
    envs = 4096
    storage = kind(envs, 2, {"obs": (3,), "values": ()}, device=on)
    lead = torch.zeros(envs, device=on)
    row = {"obs": lead[:, None].expand(envs, 3), "values": lead, "rewards": lead, "dones": lead > 0}

    def whole() -> None:
        for _ in range(2):
            storage.add_transitions(row)
        storage.compute_returns(lead, 0.9, 0.8)
        for _ in storage.mini_batch_generator(2, 2, histories={"obs": 2}):
            pass
        if kind is device.RolloutStorage:
            for _ in storage.recurrent_mini_batch_generator(2, 1, shuffle=True, num_trajectories=envs):
                pass
        storage.clear()

    if on == "cuda":
        whole()  # what is compiled is compiled before
        torch.cuda.set_sync_debug_mode("error")
    try:
        with Seen() as seen:
            whole()
    finally:
        if on == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert seen.waits == []


@pytest.mark.parametrize("n", [1, 2, 37, 20_000])
def test_orders_are_those_of_the_host(n: int) -> None:
    """Also where nobody looks at the number of the epoch."""
    storage = device.RolloutStorage(n, 1, {"values": ()}, SEED)
    storage.add_transitions({name: torch.zeros(n) for name in ("values", "rewards", "dones")})
    storage.compute_returns(torch.zeros(n), 0.9, 0.8)
    for epochs in (range(2), range(2, 4)):
        for epoch, batch in zip(epochs, storage.mini_batch_generator(1, 2), strict=True):
            assert (batch.rows.numpy() == permutation(SEED, epoch, n)).all()
        storage.epoch = torch.nn.Parameter(storage.epoch, requires_grad=False)


def test_what_comes_out_of_turn_or_cannot_be_is_refused() -> None:
    storage = made()
    good = tensors(steps_of(0)[0], "cpu")
    for bad, words in (
        ({name: values for name, values in good.items() if name != "hidden_states"}, "in every row"),
        ({**good, "hidden_states": (torch.zeros(1, ENVS, 3), good["hidden_states"][1])}, r"expected shape \[1, 6, 2\]"),
    ):
        with pytest.raises(SchemaError, match=words):
            storage.add_transitions(bad)
    storage.add_transitions({**good, "hidden_states": (None, None)})
    assert not storage.hidden_states[1][0].any()
    with pytest.raises(SchemaError, match="found none in row 1"):
        storage.add_transitions({**good, "hidden_states": (None, None)})
    with pytest.raises(RolloutError, match="expected 4 rows, found 1"):
        storage.compute_returns(torch.zeros(ENVS), 0.9, 0.8)
    for options, words in (
        (
            {"fields": {"goal": RolloutField((2,), optional=True)}},
            r"fields\['goal'\]: when optional=True, expected mask=True",
        ),
        ({"num_envs": 0}, "num_envs: expected"),
        ({"device": "nowhere"}, "device: expected"),
    ):
        given: dict[str, Any] = {"num_envs": 2, "num_transitions_per_env": 2, "fields": {}, **options}
        with pytest.raises(ConfigError, match=words):
            device.RolloutStorage(**given)
    # Where nobody looks, a row more than there is room for changes nothing.
    full = device.RolloutStorage(2, 1, {}, device="cpu")
    full.rows.put({"rewards": torch.ones(1, 2, 1)}, torch.tensor([1]))
    assert not full["rewards"].any()
