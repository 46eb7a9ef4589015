"""The recipe from a model to batches, in torch and in Flax: what is stored is what the model did, and it learns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mouse_core.groups import open_rollouts


@pytest.fixture(params=["torch", pytest.param("flax", marks=pytest.mark.long)])
def framework(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def shared(import_example: Callable[[str], ModuleType]) -> ModuleType:
    return import_example("rollouts_from_a_model")


@pytest.fixture
def model(framework: str, shared: ModuleType) -> Iterator[Any]:
    # Threads cost a network of this size more than they bring.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module(f"rollouts_from_a_model_{framework}").Model(0)
    torch.set_num_threads(threads)


def test_what_is_stored_is_what_the_model_did(model: Any, shared: ModuleType, tmp_path: Path) -> None:
    prompts, places, words = 8, np.arange(shared.LENGTH), len(shared.VOCABULARY)
    batch = prompts * shared.GROUP_SIZE
    # Greedy: no other token at any place is likelier, and the probabilities of all are 1 together.
    asked = np.random.default_rng(0).integers(0, words - 1, (batch, shared.PROMPT_LENGTH)).astype(np.int32)
    tokens = model.generate(asked, np.zeros((batch, shared.ANSWER_LENGTH, words), np.float32))
    assert (tokens[:, : shared.PROMPT_LENGTH] == asked).all()
    others = [model.logprobs(np.where(places == shared.LENGTH - 2, word, tokens))[0][:, -2] for word in range(words)]
    np.testing.assert_array_equal(np.argmax(others, axis=0), tokens[:, -2])
    np.testing.assert_allclose(np.exp(others).sum(axis=0), 1, rtol=1e-5)

    found = shared.train(model, tmp_path, steps=3, prompts=prompts)
    # The first answers are the reference's own, and ratios are 1; then the model leaves it.
    assert found[0].kl == 0 < abs(found[2].kl)
    stored = open_rollouts(tmp_path)
    assert len(stored) == 3 * batch
    now, reference = model.logprobs(np.asarray(tokens))
    assert np.abs(now - reference).max() > 1e-3
    for record in stored:
        prompt, answer = record.turns
        assert "." not in answer.message[:-1]
        assert len(answer.message) == shared.ANSWER_LENGTH or answer.message.endswith(".")
        score = answer.message.count(prompt.message[0]) / shared.ANSWER_LENGTH
        penalty = found[int(record.policy_version)].coef * record.metadata["kl"]
        assert record.reward == pytest.approx(score - penalty, abs=1e-5)
    # Log-probabilities of the reference, which the model was when it had the first version.
    first = next(record for record in stored if record.policy_version == "0")
    row = np.concatenate([turn.tokens for turn in first.turns])
    same = np.tile(np.pad(row, (0, shared.LENGTH - len(row))), (batch, 1)).astype(np.int32)
    expected = model.logprobs(same)[1][0, shared.PROMPT_LENGTH : len(row)]
    np.testing.assert_allclose(first.turns[1].logprobs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_score_rises(model: Any, shared: ModuleType, tmp_path: Path) -> None:
    found = shared.train(model, tmp_path, steps=60)
    assert np.mean([one.score for one in found[-10:]]) > np.mean([one.score for one in found[:10]]) + 0.2
    assert min(one.kl for one in found[-5:]) > 2  # more divergence than is aimed at: it weighs more
    assert found[-1].coef > found[-5].coef
