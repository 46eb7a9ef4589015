"""Rollouts in torch and JAX: those of motion imitation are those of NumPy; and what is torch's alone."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

from mouse_core import ConfigError
from mouse_core import rollouts as core
from mouse_core.nested import map_tree
from mouse_core.rollouts import RolloutField, Transition
from mouse_jax import rollout_storage
from mouse_torch import RolloutStorage
from tests.comparing import leaves, same
from tests.core.rollout_cases import MOTION, motion_transition, random_case
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
    """With functions that JAX compiled."""

    append = staticmethod(jax.jit(rollout_storage.append, donate_argnums=0))
    compute = staticmethod(jax.jit(rollout_storage.compute_returns))

    def add_transitions(self, transition: Any) -> None:
        self.rollout = self.append(self.rollout, transition)

    def compute_returns(self, *arguments: Any, **options: Any) -> None:
        self.rollout = self.compute(self.rollout, *arguments, **options)


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


def test_a_rollout_that_is_begun_in_inference_mode_goes_on_outside_of_it() -> None:
    fields = {"obs": (3,), "values": (), "extra": RolloutField((2,), optional=True, mask=True)}
    found = []
    for inside in (False, True):
        random = torch.Generator().manual_seed(0)
        storage = RolloutStorage(2, 3, fields)

        def row(storage: RolloutStorage = storage, random: torch.Generator = random) -> None:
            normal = [torch.randn(shape, generator=random) for shape in ((2, 3), (2,), (2,), (1, 2, 4), (1, 2, 4))]
            names = ("obs", "values", "rewards")
            states = {"hidden_states": (normal[3], (normal[4], normal[4]))}
            storage.add_transitions({**dict(zip(names, normal, strict=False)), "dones": torch.zeros(2), **states})

        for _ in range(2):  # the second rollout has the memory of the first
            storage.clear()
            with torch.inference_mode(inside):
                row()
                row()
            row()
            storage.compute_returns(torch.zeros(2), 0.9, 0.95)
        batch = next(storage.mini_batch_generator(1, 1))
        weight = torch.ones(3, requires_grad=True)
        (batch["obs"] * weight * batch["returns"]).sum().backward()
        assert weight.grad is not None
        actor, (first, _) = storage.hidden_states
        found.append([storage.obs, storage.returns, actor, first, weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_fields_and_hidden_states_have_dtypes_of_torch() -> None:
    storage = RolloutStorage(2, 2, {})
    states = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    for hidden in ((None, None), (states, None)):
        storage.add_transitions({"rewards": torch.zeros(2), "dones": torch.zeros(2), "hidden_states": hidden})
    assert storage.hidden_states is not None
    assert storage.hidden_states[0].dtype == torch.bfloat16
    assert storage.hidden_states[0][:, 0, 0, 0].tolist() == [0.0, 1.0]
    assert storage.hidden_states[1] is None
    storage = RolloutStorage(2, 1, {"actions": RolloutField((), "int64"), "half": RolloutField((1,), "float16")})
    assert (storage.actions.dtype, storage.half.dtype) == (torch.int64, torch.float16)
    assert storage.device == torch.device("cpu")


@pytest.mark.cuda
def test_nothing_waits_for_the_device() -> None:
    storage = RolloutStorage(4, 3, {"observations": (2,), "values": ()}, device="cuda")
    row = {
        "observations": torch.zeros(4, 2, device="cuda"),
        "values": torch.zeros(4, device="cuda"),
        "rewards": torch.zeros(4, device="cuda"),
        "dones": torch.zeros(4, device="cuda", dtype=torch.bool),
    }
    last = torch.zeros(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            storage.add_transitions(row)
        storage.compute_returns(last, 0.9, 0.9)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_distillation_generator() -> None:
    storage = RolloutStorage.motion_mimic("distillation", 5, 6, **MOTION)
    random = np.random.default_rng(0)
    for _ in range(6):
        storage.add_transitions(motion_transition(random, 5, training_type="distillation"))
    rows = list(storage.generator())
    assert [len(row) for row in rows] == [7] * 6
    assert torch.equal(rows[2][2][1], storage.reference_observations_mask[2])
    assert all(isinstance(row[0], torch.Tensor) for row in rows)


def test_what_is_added_is_a_copy_without_a_graph() -> None:
    storage = RolloutStorage(2, 1, {"values": ()})
    values = torch.ones(2, requires_grad=True)
    storage.add_transitions(Transition(values=values, rewards=torch.ones(2), dones=torch.zeros(2, dtype=torch.long)))
    assert not storage.values.requires_grad
    with torch.no_grad():
        values += 1.0
    assert storage.values.flatten().tolist() == [1.0, 1.0]
    storage.compute_returns(values, 0.9, 0.9)
    assert not storage.returns.requires_grad
    seen = []

    def extract(obs: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return obs

    amp = {"amp_obs_extractor": extract, "amp_ref_obs_extractor": extract}
    storage = RolloutStorage(2, 1, {"observations": (1,)}, amp_cfg=amp)
    storage.add_transitions({"observations": torch.ones(2, 1), "rewards": torch.ones(2), "dones": torch.zeros(2)})
    next(storage.mini_batch_generator(1))
    assert seen == [False]


def test_code_2_is_no_termination() -> None:
    case = random_case(1, 4, 3)
    arrays = case.arrays(convert=torch.as_tensor, truncation=False)
    codes = torch.zeros(arrays["dones"].shape, dtype=torch.uint8)
    codes[1, 2] = 2
    with pytest.raises(ConfigError, match=r"2 \(truncated\) at environment 2, row 1"):
        core.gae(**{**arrays, "dones": codes}, discount=0.99, lam=0.9)

    def advantages(dones: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = core.gae(**{**arrays, "dones": dones}, discount=0.99, lam=0.9)[0]
        return found

    # vmap cannot look at values: rows that need the unknown value become NaN.
    unseen = torch.func.vmap(advantages)(torch.stack([codes, codes * 0]))
    assert unseen[0, :2, 2].isnan().all()
    assert unseen[0, 2:].isfinite().all()
    assert unseen[0, :, :2].isfinite().all()
    assert unseen[1].equal(advantages(codes * 0))


def test_gradients_flow() -> None:
    case = random_case(1, 5, 4)
    arrays = case.arrays(convert=torch.as_tensor)
    arrays["values"].requires_grad_()
    advantages, _ = core.gae(**arrays, discount=0.99, lam=0.9)
    (gradient,) = torch.autograd.grad(advantages[0].sum(), arrays["values"])
    np.testing.assert_allclose(gradient[0].numpy(), -1.0)
