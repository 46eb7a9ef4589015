"""GRPO on a toy: how often does a letter stand in a word? A small policy learns it from its own samples, on Ray.

Two workers sample answers of the current policy and send them to a rollout buffer, which is an actor. The trainer asks
it for batches of answers whose worth has been worked out against the others to the same question, and improves the
policy with the clipped objective of GRPO.

    python examples/grpo_letters.py --steps 60
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import ray
    import torch
    from tensordict import TensorDict
    from torch.nn.functional import log_softmax, one_hot
except ImportError as error:
    raise SystemExit(f"grpo_letters.py needs {error.name}: pip install 'mouse-data[ray,torch]'") from error

import mouse_ray
from mouse_core.groups import Grpo, GrpoBatchMaker, RolloutRecord, Turn
from mouse_torch.groups import pad

LETTERS = "abc"
WORD_LENGTH = 6
#: Tokens: the letters, the answers 0 to 6, and "?", which stands between the letter asked for and the word.
VOCABULARY = [*LETTERS, *map(str, range(WORD_LENGTH + 1)), "?"]
FIRST_ANSWER = len(LETTERS)
QUESTION = len(VOCABULARY) - 1
GROUP_SIZE = 8

Weights = dict[str, NDArray[np.float32]]


class Policy(torch.nn.Module):
    """Reads the prompt's tokens one-hot and gives the logits of the next token: about 6,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        inputs = (WORD_LENGTH + 2) * len(VOCABULARY)
        self.hidden = torch.nn.Linear(inputs, 64)
        self.output = torch.nn.Linear(64, len(VOCABULARY))

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        """Log-probabilities ``[n, tokens]`` of the token that follows each of the prompts, int64 ``[n, 8]``."""
        inputs = one_hot(prompts, len(VOCABULARY)).flatten(1).float()
        return log_softmax(self.output(torch.relu(self.hidden(inputs))), dim=-1)


@dataclass(frozen=True)
class Question:
    """A letter, and a word to count it in."""

    letter: str
    word: str

    @property
    def tokens(self) -> list[int]:
        """The prompt: the letter, "?", and the word."""
        return [LETTERS.index(self.letter), QUESTION, *map(LETTERS.index, self.word)]

    def reward(self, token: int) -> float:
        """1 for the right answer, half of that for one beside it, 0 for anything else."""
        distance = abs(token - FIRST_ANSWER - self.word.count(self.letter))
        return {0: 1.0, 1: 0.5}.get(distance, 0.0)


def ask(random: np.random.Generator) -> Question:
    """A random question."""
    return Question(LETTERS[random.integers(3)], "".join(LETTERS[i] for i in random.integers(3, size=WORD_LENGTH)))


@ray.remote(num_cpus=0.5)
class Worker:
    """Samples answers of the policy that it was given last.

    Args:
        buffer: The actor that rollouts are sent to.
        seed: Of the questions and the answers; another one for every worker.
    """

    def __init__(self, buffer: Any, seed: int) -> None:
        torch.set_num_threads(1)
        self.buffer, self.seed = buffer, seed
        self.random = np.random.default_rng(seed)
        self.policy = Policy()

    def sample(self, weights: Weights, version: int, questions: int) -> float:
        """Answer each of some questions eight times; the mean reward, once the buffer has the rollouts."""
        load(self.policy, weights)
        asked = [ask(self.random) for _ in range(questions)]
        prompts = torch.tensor([question.tokens for question in asked]).repeat_interleave(GROUP_SIZE, dim=0)
        with torch.no_grad():
            logprobs = self.policy(prompts).numpy()
        noise = self.random.gumbel(size=logprobs.shape)
        answers = (logprobs + noise).argmax(axis=1)
        rollouts = [
            rollout(asked[i // GROUP_SIZE], int(answers[i]), float(logprobs[i, answers[i]]), version, self.seed, i)
            for i in range(len(answers))
        ]
        ray.get(self.buffer.add_rollouts.remote(rollouts))
        return float(np.mean([item.reward for item in rollouts]))


def rollout(question: Question, answer: int, logprob: float, version: int, worker: int, number: int) -> RolloutRecord:
    """One answer as a rollout of two turns."""
    return RolloutRecord(
        environment="letters",
        example_id=f"{question.letter} in {question.word}",
        policy_version=str(version),
        rollout_uid=f"{version}-{worker}-{number}",
        turns=(
            Turn(f"How many {question.letter} are in {question.word}?", "user", question.tokens),
            Turn(VOCABULARY[answer], "assistant", [answer], [logprob]),
        ),
        reward=question.reward(answer),
        replica_id=f"worker-{worker}",
    )


def load(policy: Policy, weights: Weights) -> None:
    """Give a policy its weights."""
    policy.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in weights.items()})


def weights_of(policy: Policy) -> Weights:
    """A policy's weights, to send."""
    return {name: values.detach().numpy().copy() for name, values in policy.state_dict().items()}


def loss_of(policy: Policy, batch: TensorDict, clip: float = 0.2) -> torch.Tensor:
    """The clipped objective of GRPO (Shao et al., 2024), without a reference policy, over the tokens in the loss.

    Args:
        policy: What is trained.
        batch: From ``mouse_torch.groups.pad``, ``[B, 9]``: the prompt's eight tokens and the answer.
        clip: How far the probability of an answer may move from that under the policy that gave it.
    """
    prompts, answers = batch["tokens"][:, :-1].long(), batch["tokens"][:, -1].long()
    logprobs = policy(prompts).gather(1, answers[:, None])
    mask = batch["loss_mask"][:, -1:]
    advantage, before = batch["advantage"][:, -1:], batch["generator_log_probs"][:, -1:]
    ratio = torch.exp(logprobs - before)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(objective * mask).sum() / mask.sum()


def train(folder: Path, *, steps: int, questions: int = 32, batch_size: int = 128, seed: int = 0) -> list[float]:
    """Sample, and train on what was sampled, in turns.

    Args:
        folder: Where the buffer keeps its rollouts and batches.
        steps: How many turns.
        questions: How many each of the two workers asks in a turn; each gets eight answers.
        batch_size: Answers in a batch.
        seed: Of everything.

    Returns:
        The mean reward of what was sampled in each turn.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    # Answers of the last two versions are used, each once, with advantages divided by their group's deviation.
    maker = GrpoBatchMaker("letters", rng_seed=seed, advantage=Grpo(eps=0.1), max_staleness=1)
    buffer = mouse_ray.RolloutBuffer.options(num_cpus=0.5).remote(folder, GROUP_SIZE, batch_maker=maker)
    workers = [Worker.remote(buffer, 2 * seed + number) for number in range(2)]
    rewards: list[float] = []
    for version in range(steps):
        weights = ray.put(weights_of(policy))
        found = ray.get([worker.sample.remote(weights, version, questions) for worker in workers])
        rewards.append(float(np.mean(found)))
        while (batch_id := ray.get(buffer.create_and_store_batch.remote(batch_size))) is not None:
            batch = pad(ray.get(buffer.read_batch.remote(batch_id)), WORD_LENGTH + 3)
            optimizer.zero_grad()
            loss_of(policy, batch).backward()
            optimizer.step()
        if version % 10 == 9:
            print(f"step {version + 1}: mean reward {np.mean(rewards[-10:]):.3f}", flush=True)
    for actor in (*workers, buffer):
        ray.kill(actor)
    return rewards


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Run the example; the mean rewards."""
    parser = argparse.ArgumentParser(description="GRPO on counting letters, on Ray.")
    parser.add_argument("--steps", type=int, default=60, help="turns of sampling and training (60)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (0)")
    parser.add_argument("--output", type=Path, help="where rollouts and batches are kept; by default nowhere")
    chosen = parser.parse_args(arguments)
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports how it is used
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as scratch:
        rewards = train(chosen.output or Path(scratch), steps=chosen.steps, seed=chosen.seed)
    print(f"mean reward of the first 5 steps {np.mean(rewards[:5]):.3f}, of the last 5 {np.mean(rewards[-5:]):.3f}")
    return rewards


if __name__ == "__main__":
    main()
