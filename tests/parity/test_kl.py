"""Divergences and penalties in NumPy, torch and under jax.jit: the same numbers; controllers beside TorchRL's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mouse_core.text import AdaptiveKLController, ConstantKLController, kl_estimates, kl_penalized_rewards

random = np.random.default_rng(0)
MASK = np.array([[True, True, False, True], [False, True, True, False], [False] * 4])
REFERENCE = random.uniform(-5, 0, MASK.shape).astype(np.float32)
LOGPROBS = np.where(MASK, random.uniform(-5, 0, MASK.shape), -np.inf).astype(np.float32)
REWARDS = np.array([1.0, -2.0, 3.0], np.float32)


def everything(rewards: Any, logprobs: Any, reference: Any, mask: Any, coef: Any) -> list[Any]:
    """All that there is, and what comes of it by the end of the answers."""
    found = [kl_estimates(logprobs, reference, mask, estimator=name) for name in ("k1", "k2", "k3")]
    paid = kl_penalized_rewards(rewards, logprobs, reference, mask, coef=coef, estimator="k3")
    return [*found, paid, kl_penalized_rewards(paid, logprobs, reference, mask, coef=coef)]


def test_all_have_the_numbers_of_numpy() -> None:
    given = (REWARDS, LOGPROBS, REFERENCE, MASK)
    expected = everything(*given, 0.1)
    in_torch = everything(*map(torch.from_numpy, given), 0.1)
    in_jax = jax.jit(everything)(*given, 0.1)
    for ours, theirs, others in zip(expected, in_torch, in_jax, strict=True):
        assert ours.dtype == np.float32
        assert theirs.dtype == torch.float32
        assert others.dtype == jnp.float32
        np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(others, ours, rtol=1e-5, atol=1e-6)


def test_gradients_are_numbers_also_where_nothing_was_sampled() -> None:
    ratio = np.where(MASK, LOGPROBS - REFERENCE, 0)
    expected = np.where(MASK, 1 - np.exp(-ratio), 0)
    logprobs = torch.from_numpy(LOGPROBS).requires_grad_()
    kl_estimates(logprobs, torch.from_numpy(REFERENCE), torch.from_numpy(MASK), estimator="k3").sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-5, atol=1e-6)
    found = jax.grad(lambda own: kl_estimates(own, REFERENCE, jnp.asarray(MASK), estimator="k3").sum())(LOGPROBS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_divergences_of_a_loss_are_taken_as_they_are() -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100)
    wanted = controller.update([8.0, 5.0])
    for dtype in (torch.float32, torch.bfloat16):
        assert controller.update(torch.tensor([8.0, 5.0], dtype=dtype, requires_grad=True)) == wanted
    assert controller.update(jnp.array([8.0, 5.0], jnp.bfloat16)) == wanted


def test_coefficients_are_those_of_torchrl() -> None:
    theirs = pytest.importorskip("torchrl.data.llm.utils")
    ours = AdaptiveKLController(0.2, target=6.0, horizon=100)
    other = theirs.AdaptiveKLController(init_kl_coef=0.2, target=6.0, horizon=100)
    for kls in random.uniform(0, 15, (8, 5)):
        # They take the penalties that were added to rewards, and divide by the coefficient.
        other.update([-other.coef * kl for kl in kls])
        ours = ours.update(kls)
        # Their mean is in single precision.
        assert ours.coef == pytest.approx(float(other.coef), rel=1e-6)
    assert ours.coef != 0.2
    constant = theirs.ConstantKLController(kl_coef=0.3)
    assert ConstantKLController(0.3).update([9.0]).coef == constant.update([-2.7])
