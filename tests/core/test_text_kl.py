"""Divergences, penalties and controllers against plain Python, and against the distributions they are of."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, SchemaError
from mouse_core.text import AdaptiveKLController, ConstantKLController, kl_estimates, kl_penalized_rewards

TOKENS = st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.booleans()), min_size=1, max_size=6)
BY_NAME = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


def arrays(rows: list[tuple[float, float, bool]]) -> tuple[Any, Any, Any]:
    """Log-probabilities and a mask, where what is outside of the mask is no number."""
    mask = np.array([kept for _, _, kept in rows])
    return (*(np.where(mask, [row[which] for row in rows], bad) for which, bad in ((0, -np.inf), (1, np.nan))), mask)


@given(TOKENS, st.sampled_from(sorted(BY_NAME)))
def test_estimates_are_those_of_the_formulas(rows: Any, name: str) -> None:
    expected = [BY_NAME[name](one - other) if kept else 0.0 for one, other, kept in rows]
    with np.errstate(all="raise", under="ignore"):
        found = kl_estimates(*arrays(rows), estimator=name)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@given(TOKENS, st.floats(-3, 3), st.floats(0, 2), st.booleans())
def test_penalized_rewards_are_those_of_plain_python(rows: Any, reward: float, coef: float, by_token: bool) -> None:
    last = max((place for place, row in enumerate(rows) if row[2]), default=None)
    given_rewards = np.full(len(rows), reward) if by_token else np.asarray(reward)
    expected = []
    for place, (one, other, kept) in enumerate(rows):
        earned = reward if kept and (by_token or place == last) else 0.0
        expected.append(earned - coef * (one - other) * kept)
    found = kl_penalized_rewards(given_rewards, *arrays(rows), coef=coef)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert not found[~arrays(rows)[2]].any()


def test_answers_of_differing_length_are_paid_where_they_end() -> None:
    mask = np.array([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]], bool)
    nothing = np.zeros((3, 4), np.float32)
    paid = kl_penalized_rewards(np.array([5.0, 7.0, 9.0]), nothing, nothing, mask, coef=1.0)
    assert paid.tolist() == [[0, 0, 5, 0], [0, 0, 0, 7], [0, 0, 0, 0]]
    assert paid.dtype == np.float32
    assert kl_penalized_rewards(np.ones(3), nothing, nothing, coef=0.0)[:, -1].tolist() == [1, 1, 1]


@given(st.lists(st.floats(0, 30), min_size=1, max_size=5), st.floats(0.01, 1), st.floats(0.5, 10), st.integers(20, 99))
def test_the_coefficient_follows_the_formula(kls: list[float], coef: float, target: float, horizon: int) -> None:
    error = sum(kls) / len(kls) / target - 1
    expected = coef * (1 + min(0.2, max(-0.2, error)) * len(kls) / horizon)
    controller = AdaptiveKLController(coef, target=target, horizon=horizon)
    after = controller.update(kls)
    assert after.coef == pytest.approx(expected, rel=1e-12)
    assert controller.coef == coef
    assert controller.update(float(np.mean(kls)), count=len(kls)).coef == pytest.approx(expected, rel=1e-12)
    assert AdaptiveKLController(**asdict(after)) == after


def test_a_constant_coefficient_stays() -> None:
    assert ConstantKLController(0.3).update([100.0], count=7) == ConstantKLController(0.3)


def test_refusals() -> None:
    three, two, mask = np.zeros((2, 3)), np.zeros((2, 2)), np.ones((2, 3), bool)
    for call, message in [
        (lambda: kl_estimates(three, three, estimator="k4"), r"estimator: expected one of \['k1', 'k2', 'k3'\]"),
        (lambda: AdaptiveKLController(0.0, target=1.0, horizon=5), "coef: expected a number above 0"),
        (lambda: AdaptiveKLController(0.1, target=math.nan, horizon=5), "target: expected a number above 0"),
        (lambda: AdaptiveKLController(0.1, target=1.0, horizon=0), "horizon: expected an integer of at least 1"),
        (lambda: AdaptiveKLController(0.1, target=1.0, horizon=9).update([math.nan]), "kl: expected one or more fin"),
        (lambda: AdaptiveKLController(0.1, target=1.0, horizon=9).update([]), "kl: expected one or more fin"),
        (
            lambda: AdaptiveKLController(0.1, target=1.0, horizon=9).update(1.0, count=45),
            "expected fewer than",
        ),
        (lambda: ConstantKLController(-1.0), "coef: expected a number of 0 or more, found -1.0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    for call, message in [
        (lambda: kl_estimates([0.1], [0.2]), "logprobs: expected an array of NumPy"),
        (lambda: kl_penalized_rewards([1.0, 2.0], three, three, coef=0.1), "rewards: expected an array of NumPy"),
        (lambda: kl_estimates(three, two), r"expected the shape of logprobs, \[2, 3\], found \[2, 2\]"),
        (lambda: kl_estimates(three.astype(int), three), "logprobs: expected floats"),
        (lambda: kl_estimates(three, three, mask * 1.0), r"mask: expected bool \[2, 3\], found float64"),
        (lambda: kl_penalized_rewards(np.ones(3), three, three, coef=0.1), "rewards: expected a reward for each answ"),
    ]:
        with pytest.raises(SchemaError, match=message):
            call()
