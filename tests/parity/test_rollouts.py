"""Rollouts of motion imitation, with hidden states, in torch and JAX: the rows, mini-batches and digests of NumPy."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

from mouse_core import rollouts as core
from mouse_core.nested import map_tree
from mouse_jax import rollout_storage
from mouse_torch import RolloutStorage
from tests.comparing import leaves, same
from tests.core.rollout_cases import MOTION, motion_transition
from tests.jax.test_conformance import Kept

STEPS, ENVS = 6, 5
LAYOUT: dict[str, Any] = {**MOTION, "apply_dagger_actions": True, "rnd_state_shape": (6,)}
AMP = {
    "amp_obs_extractor": lambda obs: obs[..., :2] * 2.0,
    "amp_ref_obs_extractor": lambda reference: (reference[0][..., 1:], reference[1]),
}
LAST = np.arange(ENVS, dtype=np.float32)


def hidden_states(random: np.random.Generator) -> Any:
    actor, *critic = (random.normal(size=shape).astype(np.float32) for shape in ((2, ENVS, 3), (ENVS, 2), (ENVS, 2)))
    return actor, tuple(critic)


def transitions(seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    made = (motion_transition(random, ENVS, apply_dagger_actions=True, rnd_state_shape=(6,)) for _ in range(STEPS))
    return [{**dict(transition), "hidden_states": hidden_states(random)} for transition in made]


def ends(storage: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    dones = np.asarray(core_of(storage["dones"])).astype(bool)
    time_outs = dones & (random.random((STEPS, ENVS, 1)) < 0.5)
    return {
        "time_outs": time_outs,
        "final_values": np.where(time_outs, random.normal(size=time_outs.shape), np.nan).astype(np.float32),
    }


def core_of(values: Any) -> Any:
    return values.cpu() if isinstance(values, torch.Tensor) else values


class Compiled(Kept):
    """With rows that are appended by a function that JAX compiled."""

    append = staticmethod(jax.jit(rollout_storage.append, donate_argnums=0))

    def add_transitions(self, transition: Any) -> None:
        self.rollout = self.append(self.rollout, transition)


def filled(kind: str) -> Any:
    convert: Any = np.asarray
    if kind == "jax":
        states = hidden_states(np.random.default_rng(0))
        fields = core.motion_mimic_fields("rl", **LAYOUT)
        storage: Any = Compiled(ENVS, STEPS, fields, 3, amp_cfg=AMP, hidden_states=states)
    elif kind == "numpy":
        storage = core.RolloutStorage.motion_mimic("rl", ENVS, STEPS, **LAYOUT, amp_cfg=AMP, seed=3)
    else:
        storage = RolloutStorage.motion_mimic("rl", ENVS, STEPS, **LAYOUT, amp_cfg=AMP, seed=3, device=kind)

        def convert(values: Any) -> Any:
            return torch.as_tensor(values, device=kind)

    for row in transitions():
        storage.add_transitions(map_tree(convert, row))
    storage.compute_returns(convert(LAST), 0.99, 0.95, **map_tree(convert, ends(storage)))
    return storage


@pytest.mark.parametrize(
    "kind",
    ["cpu", pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("jax", marks=pytest.mark.slow)],
)
def test_rollouts_and_mini_batches_are_those_of_numpy(kind: str) -> None:
    ours, theirs = filled("numpy"), filled(kind)
    same({name: theirs[name] for name in ours.spec}, {name: ours[name] for name in ours.spec}, close=1e-5)
    same(theirs.hidden_states, ours.hidden_states)
    np.testing.assert_allclose([*map(float, theirs.get_statistics())], ours.get_statistics(), rtol=1e-5, atol=1e-6)
    for method, arguments, options in (
        ("mini_batch_generator", (4, 2), {"histories": {"observations": 3}}),
        ("recurrent_mini_batch_generator", (2, 2), {"shuffle": False}),
        ("recurrent_mini_batch_generator", (2, 2), {"shuffle": True}),
    ):
        batches = (getattr(storage, method)(*arguments, **options) for storage in (theirs, ours))
        for found, expected in zip(*batches, strict=True):
            same(found, expected, close=1e-5)
            same(tuple(found), tuple(expected), close=1e-5)
            if kind != "jax":
                assert {(type(leaf), leaf.device.type) for leaf in leaves(found).values()} == {(torch.Tensor, kind)}
    if kind == "jax":
        assert theirs.rollout.layout.spec.alignment == "outgoing"
    else:
        assert theirs.state_dict() == ours.state_dict()


@pytest.mark.parametrize("method", ["mini_batch_generator", "recurrent_mini_batch_generator"])
def test_mini_batches_of_all_frameworks_have_the_same_digests(method: str) -> None:
    digests = []
    for kind in (core.RolloutStorage, RolloutStorage, Kept):
        states: Any = (np.zeros((2, 4, 5), np.float32), None)
        storage = kind(4, 6, {"observations": (3,)}, seed=1, **({"hidden_states": states} if kind is Kept else {}))
        for step in range(6):
            row: dict[str, Any] = {"observations": np.full((4, 3), step, np.float32), "rewards": np.ones(4, np.float32)}
            row |= {"dones": np.arange(4) == step, "hidden_states": (np.full((2, 4, 5), step, np.float32), None)}
            storage.add_transitions(row)
        batches = getattr(storage, method)(2, 2)
        digests.append([batch.digest(index) for index, batch in enumerate(batches)])
    assert digests[0] == digests[1] == digests[2]
