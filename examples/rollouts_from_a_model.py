"""From a model to batches: what `rollouts_from_a_model_torch.py` and `rollouts_from_a_model_flax.py` share.

A small language model continues prompts of letters. An answer earns the share of its letters that are the prompt's
first, less a penalty for leaving the model as it was in the beginning. Answers go to a rollout buffer, are compared
with the others to the same prompt, and train the model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mouse_core.groups import Grpo, GrpoBatchMaker, RLExample, RolloutBuffer, RolloutRecord, Turn
from mouse_core.text import AdaptiveKLController, kl_estimates, kl_penalized_rewards

LETTERS = "abcd"
#: Tokens: the letters, and what ends an answer.
VOCABULARY = [*LETTERS, "."]
END = len(LETTERS)
PROMPT_LENGTH, ANSWER_LENGTH = 3, 5
LENGTH = PROMPT_LENGTH + ANSWER_LENGTH
GROUP_SIZE = 8

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


class Model(Protocol):
    """A language model that is trained, and the reference that it was in the beginning."""

    def generate(self, prompts: Tokens, noise: Floats) -> Tokens:
        """Continue prompts ``[B, PROMPT_LENGTH]`` to ``[B, LENGTH]`` by tokens of the largest log-probability + noise.

        With Gumbel noise, ``[B, ANSWER_LENGTH, tokens]``, that is a sample.
        """

    def logprobs(self, tokens: Tokens) -> tuple[Floats, Floats]:
        """Log-probabilities of tokens given those before them, now and in the beginning, ``[B, LENGTH]``; first 0."""

    def step(self, examples: Sequence[RLExample]) -> float:
        """One step on a batch; its loss."""


@dataclass(frozen=True)
class Outcome:
    """What a turn of sampling and training came to: means over answers, and the loss of the step, NaN without one."""

    score: float
    kl: float
    coef: float
    loss: float


def answer_mask(tokens: Tokens) -> NDArray[np.bool_]:
    """Which tokens are the answer, ``[B, LENGTH]``: those behind the prompt up to the first end, with it."""
    ended = np.cumsum(tokens == END, axis=1) - (tokens == END) > 0
    return (np.arange(LENGTH) >= PROMPT_LENGTH) & ~ended


def scores_of(tokens: Tokens, mask: NDArray[np.bool_]) -> Floats:
    """The share of an answer's letters that are the prompt's first, ``[B]``."""
    return ((tokens == tokens[:, :1]) & mask).sum(axis=1).astype(np.float32) / ANSWER_LENGTH


def sample(
    model: Model, prompts: Tokens, coef: float, version: int, random: np.random.Generator
) -> tuple[list[RolloutRecord], NDArray[np.float64], Floats]:
    """Answers to prompts, ``GROUP_SIZE`` to each, as rollouts; and their scores and divergences, ``[B]``."""
    asked = np.repeat(prompts, GROUP_SIZE, axis=0)
    noise = random.gumbel(size=(len(asked), ANSWER_LENGTH, len(VOCABULARY))).astype(np.float32)
    tokens = model.generate(asked, noise)
    logprobs, reference = model.logprobs(tokens)
    mask = answer_mask(tokens)
    scores = scores_of(tokens, mask)
    rewards = kl_penalized_rewards(scores, logprobs, reference, mask, coef=coef)
    divergences = kl_estimates(logprobs, reference, mask).sum(axis=1)
    rollouts = [
        RolloutRecord(
            environment="letters",
            example_id=words(tokens[row, :PROMPT_LENGTH]),
            policy_version=version,
            rollout_uid=f"{version}-{row}",
            turns=[
                Turn(words(tokens[row, :PROMPT_LENGTH]), "user", tokens[row, :PROMPT_LENGTH]),
                Turn(words(tokens[row, mask[row]]), "assistant", tokens[row, mask[row]], logprobs[row, mask[row]]),
            ],
            reward=float(rewards[row].sum()),
            metadata={"score": float(scores[row]), "kl": float(divergences[row])},
        )
        for row in range(len(tokens))
    ]
    return rollouts, divergences.astype(np.float64), scores


def words(tokens: Tokens) -> str:
    """The text of some tokens."""
    return "".join(VOCABULARY[token] for token in tokens)


def train(
    model: Model, folder: Path, *, steps: int, prompts: int = 8, batch_size: int = 32, seed: int = 0
) -> list[Outcome]:
    """Sample, store, and train on what was stored, in turns; what each came to."""
    random = np.random.default_rng(seed)
    controller = AdaptiveKLController(0.02, target=2.0, horizon=2000)
    maker = GrpoBatchMaker("letters", rng_seed=seed, advantage=Grpo(), max_staleness=0)
    found: list[Outcome] = []
    with RolloutBuffer(folder, GROUP_SIZE, batch_maker=maker) as buffer:
        for version in range(steps):
            # Each prompt once a version, as equal ones are one group.
            numbers = random.choice(len(LETTERS) ** PROMPT_LENGTH, prompts, replace=False)
            asked = np.stack(np.unravel_index(numbers, (len(LETTERS),) * PROMPT_LENGTH), axis=1).astype(np.int32)
            rollouts, kl, scores = sample(model, asked, controller.coef, version, random)
            buffer.add_rollouts(rollouts)
            batch_id = buffer.create_and_store_batch(batch_size)
            loss = float("nan") if batch_id is None else model.step(buffer.read_batch(batch_id))
            found.append(Outcome(float(scores.mean()), float(kl.mean()), controller.coef, loss))
            controller = controller.update(kl)
    return found


def main(make_model: Any, arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Run the example with a model of ``make_model(seed)``."""
    parser = argparse.ArgumentParser(description="A small language model learns from its own answers.")
    parser.add_argument("--steps", type=int, default=100, help="turns of sampling and training (100)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (0)")
    parser.add_argument("--output", type=Path, help="where rollouts and batches are kept; by default nowhere")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        found = train(make_model(chosen.seed), chosen.output or Path(scratch), steps=chosen.steps, seed=chosen.seed)
    for step, one in enumerate(found):
        if step % 10 == 9:
            print(f"step {step + 1}: score {one.score:.3f}, kl {one.kl:.3f} at {one.coef:.4f}, loss {one.loss:.3f}")
    return found
