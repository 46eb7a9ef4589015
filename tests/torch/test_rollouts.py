"""Rollouts as torch tensors: the numbers and orders of NumPy, on the tensors' device."""

from typing import Any

import numpy as np
import pytest
import torch

from mouse_core import ConfigError
from mouse_core import rollouts as core
from mouse_core.rollouts import RolloutField, Transition
from mouse_torch import RolloutStorage
from tests.core.rollout_cases import MOTION, motion_transition, random_case

STEPS, ENVS = 6, 5


def obs_state(obs: Any) -> Any:
    return obs[..., :2] * 2.0


def ref_state(reference: Any) -> Any:
    return reference[0][..., 1:], reference[1]


AMP = {"amp_obs_extractor": obs_state, "amp_ref_obs_extractor": ref_state}
OPTIONS: dict[str, Any] = {"apply_dagger_actions": True, "rnd_state_shape": (6,), "amp_cfg": AMP, "seed": 3}


def both(device: str = "cpu", **options: Any) -> tuple[core.RolloutStorage, RolloutStorage]:
    """The same rollout in NumPy and in torch."""
    storages = (
        core.RolloutStorage.motion_mimic("rl", ENVS, STEPS, **{**MOTION, **OPTIONS, **options}),
        RolloutStorage.motion_mimic("rl", ENVS, STEPS, **{**MOTION, **OPTIONS, **options}, device=device),
    )
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        transition = dict(motion_transition(random, ENVS, apply_dagger_actions=True, rnd_state_shape=(6,)))
        hidden = random.normal(size=(2, ENVS, 3)), (random.normal(size=(1, ENVS, 2)), random.normal(size=(1, ENVS, 2)))
        storages[0].add_transitions({**transition, "hidden_states": hidden})
        tensors = {name: torch.as_tensor(value, device=device) for name, value in transition.items()}
        states = torch.tensor(hidden[0]), tuple(torch.tensor(part) for part in hidden[1])
        storages[1].add_transitions({**tensors, "hidden_states": states})
    time_outs = storages[0].dones.astype(bool) & (random.random((STEPS, ENVS, 1)) < 0.5)
    final_values = np.where(time_outs, random.normal(size=time_outs.shape), np.nan).astype(np.float32)
    last = random.normal(size=(ENVS, 1)).astype(np.float32)
    storages[0].compute_returns(last, 0.99, 0.95, time_outs=time_outs, final_values=final_values)
    storages[1].compute_returns(
        torch.as_tensor(last, device=device),
        0.99,
        0.95,
        time_outs=torch.as_tensor(time_outs, device=device),
        final_values=torch.as_tensor(final_values, device=device),
    )
    return storages


def test_a_rollout_that_is_begun_in_inference_mode_goes_on_outside_of_it() -> None:
    """Collecting runs there, training does not: the memory is that of both, and what comes out is the same."""
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


def test_hidden_states_may_be_of_a_dtype_that_numpy_lacks() -> None:
    storage = RolloutStorage(2, 2, {})
    states = torch.ones(1, 2, 4, dtype=torch.bfloat16)
    for hidden in ((None, None), (states, None)):
        storage.add_transitions({"rewards": torch.zeros(2), "dones": torch.zeros(2), "hidden_states": hidden})
    assert storage.hidden_states is not None
    assert storage.hidden_states[0].dtype == torch.bfloat16
    assert storage.hidden_states[0][:, 0, 0, 0].tolist() == [0.0, 1.0]
    assert storage.hidden_states[1] is None


def same(found: Any, expected: Any, device: str = "cpu", where: str = "") -> None:
    """Parts of mini-batches: tensors on the device, with the values of NumPy."""
    if isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, device, f"{where}[{place}]")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, other in expected.items():
            same(found[name], other, device, f"{where}.{name}")
    elif expected is None:
        assert found is None, where
    else:
        assert isinstance(found, torch.Tensor), where
        assert found.device.type == device
        assert found.dtype == torch.from_numpy(np.empty(0, expected.dtype)).dtype, where
        np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-5, atol=1e-5, err_msg=where)


def check_batches(device: str) -> None:
    ours, theirs = both(device)
    for name in ours.spec:
        same(theirs[name], ours[name], device, name)
    length, reward = theirs.get_statistics()
    assert (float(length), float(reward)) == pytest.approx(ours.get_statistics(), abs=1e-6)
    for expected, found in zip(
        ours.mini_batch_generator(4, 2, histories={"observations": 3}),
        theirs.mini_batch_generator(4, 2, histories={"observations": 3}),
        strict=True,
    ):
        same(tuple(found), tuple(expected), device)
        same(found.fields, expected.fields, device)
        same(found.histories, expected.histories, device)
        same(found.obs_prev_mask, expected.obs_prev_mask, device)
    for shuffle in (False, True):
        for expected, found in zip(
            ours.recurrent_mini_batch_generator(2, 2, shuffle=shuffle),
            theirs.recurrent_mini_batch_generator(2, 2, shuffle=shuffle),
            strict=True,
        ):
            same(tuple(found), tuple(expected), device)
    assert ours.state_dict() == theirs.state_dict()


def test_mini_batches_are_those_of_numpy() -> None:
    check_batches("cpu")


@pytest.mark.cuda
def test_mini_batches_on_a_device_are_those_of_numpy() -> None:
    check_batches("cuda")


@pytest.mark.cuda
def test_nothing_waits_for_the_device() -> None:
    """What the training loop calls between two steps leaves the device at work."""
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
    storage = RolloutStorage.motion_mimic("distillation", ENVS, STEPS, **MOTION)
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        storage.add_transitions(motion_transition(random, ENVS, training_type="distillation"))
    rows = list(storage.generator())
    assert [len(row) for row in rows] == [7] * STEPS
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


def test_dtypes_and_devices() -> None:
    storage = RolloutStorage(2, 1, {"actions": RolloutField((), "int64"), "half": RolloutField((1,), "float16")})
    assert storage.actions.dtype == torch.int64
    assert storage.half.dtype == torch.float16
    assert storage.device == torch.device("cpu")
    with pytest.raises(ConfigError, match="device: expected an available torch device, found 'nowhere'"):
        RolloutStorage(2, 1, {}, device="nowhere")


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
