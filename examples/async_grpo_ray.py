"""GRPO where nobody waits for anybody: producers, a judge and trainers, each in its own time, on Ray.

Four producers sample answers of the newest weights, and add them to a first rollout buffer. A judge adds them with
rewards to a second one. Two trainers take their shares of its batches, add up their gradients, and publish new weights.
Kill it all whenever you like: the same command goes on where it was.

    python examples/async_grpo_ray.py --output runs/async --steps 100
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

try:
    import ray
    import torch
    import torch.distributed
except ImportError as error:
    raise SystemExit(f"async_grpo_ray.py needs {error.name}: pip install 'mouse-data[ray,torch]'") from error

import mouse_ray
from mouse_core.groups import Grpo, GrpoBatchMaker, RolloutRecord, Turn, open_rollouts
from mouse_torch import global_mean
from mouse_torch.groups import RolloutStream

PRODUCERS, TRAINERS = 4, 2
#: A prompt is one of these tokens, and an answer repeats it.
TOKENS, ANSWER_LENGTH = 8, 2
GROUP_SIZE, BATCH_SIZE, MOST_TOKENS = 8, 32, 48
CLIP, LEARNING_RATE = 0.2, 0.1

Weights = dict[str, NDArray[np.float32]]


class Policy(torch.nn.Module):
    """Two tables: the scores of a token are those beside the prompt and those beside the token before, added."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = torch.nn.Parameter(torch.zeros(TOKENS, TOKENS))
        self.before = torch.nn.Parameter(torch.zeros(TOKENS, TOKENS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of tokens ``[B, L]`` given those before them, ``[B, L]``; 0 of the first, the prompt."""
        scores = (self.prompt[tokens[:, :1]] + self.before[tokens[:, :-1]]).log_softmax(-1)
        return torch.nn.functional.pad(scores.gather(2, tokens[:, 1:, None])[..., 0], (1, 0))


def answer(weights: Weights, prompt: int, random: np.random.Generator) -> tuple[list[int], list[float]]:
    """An answer to a prompt, and the log-probabilities of its tokens."""
    tokens, logprobs, before = [], [], prompt
    for _ in range(ANSWER_LENGTH):
        scores = weights["prompt"][prompt] + weights["before"][before]
        scores = scores - np.log(np.exp(scores).sum())
        before = int((scores + random.gumbel(size=TOKENS)).argmax())
        tokens.append(before)
        logprobs.append(float(scores[before]))
    return tokens, logprobs


def judgement(rollout: RolloutRecord) -> float:
    """The share of an answer that repeats its prompt."""
    return float(np.mean(rollout.turns[1].tokens == rollout.turns[0].tokens[0]))


@ray.remote(num_cpus=0.1)
class Latest:
    """The newest weights, and which version they are."""

    def __init__(self, version: int, weights: Weights) -> None:
        self.newest = version, weights

    def put(self, version: int, weights: Weights) -> None:
        """Publish new weights."""
        self.newest = version, weights

    def get(self) -> tuple[int, Weights]:
        """The newest version and its weights."""
        return self.newest


@ray.remote(num_cpus=0.2)
class Producer:
    """Answers prompts, a group of answers to each, for ever; it waits only where judge and trainers are far behind."""

    def run(self, unscored: Any, buffer: Any, latest: Any, seed: int) -> None:
        """Answer prompts."""
        random = np.random.default_rng([seed, int.from_bytes(os.urandom(8), "little")])
        while True:
            if ray.get(unscored.size.remote()) >= ray.get(buffer.size.remote()) + 4 * BATCH_SIZE:
                time.sleep(0.01)
                continue
            version, weights = ray.get(latest.get.remote())
            prompt, name = int(random.integers(TOKENS)), uuid4().hex
            rollouts = []
            for number in range(GROUP_SIZE):
                tokens, logprobs = answer(weights, prompt, random)
                turns = [Turn(str(prompt), "user", [prompt]), Turn(str(tokens), "assistant", tokens, logprobs)]
                rollouts.append(RolloutRecord("repeat", name, version, f"{name}-{number}", turns))
            ray.get(unscored.add_rollouts.remote(rollouts))


@ray.remote(num_cpus=0.2)
class Judge:
    """Adds rollouts with their rewards to the buffer of the trainers, for ever."""

    def run(self, unscored: Any, buffer: Any) -> None:
        """Judge rollouts, from the first that the trainers' buffer does not have."""
        done = 0
        while True:
            found = ray.get(unscored.rollouts.remote())[done : done + 64]
            there = ray.get(buffer.contains.remote([one.rollout_uid for one in found]))
            new = [replace(one, reward=judgement(one)) for one, known in zip(found, there, strict=True) if not known]
            ray.get(buffer.add_rollouts.remote(new))
            done += len(found)
            if not found:
                time.sleep(0.01)


@ray.remote(num_cpus=0.2)
class Trainer:
    """One rank: trains on its shares of the batches, from where the checkpoint is."""

    def __init__(self, rank: int, folder: Path, meeting: Path) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=TRAINERS)
        self.rank, self.folder = rank, folder
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)

    def run(self, buffer: Any, latest: Any, steps: int) -> None:
        """Train until there are so many steps altogether."""
        batches = mouse_ray.ActorBatches(buffer, BATCH_SIZE)
        stream = RolloutStream(batches, MOST_TOKENS, shard=(self.rank, TRAINERS), collate="pad", length=3)
        kept = checkpoint(self.folder)
        if kept is not None:
            self.policy.load_state_dict(kept["policy"])
            self.optimizer.load_state_dict(kept["optimizer"])
            stream.load_state_dict(kept["stream"])
        for step in range(0 if kept is None else kept["step"], steps):
            share = next(stream)
            self.optimizer.zero_grad()
            for batch in share:
                self.loss_of(batch, share.report["loss_tokens"]).backward()
            for parameter in self.policy.parameters():
                torch.distributed.all_reduce(parameter.grad)
            self.optimizer.step()
            self.note(step, [example.rollout_uid for example in share.examples], share.report["staleness_mean"])
            if self.rank == 0:
                self.keep(step + 1, stream)
                ray.get(latest.put.remote(step + 1, weights_of(self.policy.state_dict())))

    def loss_of(self, batch: Any, count: int) -> torch.Tensor:
        """This part of the clipped objective of GRPO (Shao et al., 2024), over all tokens of the batch in the loss."""
        ratio = torch.exp(self.policy(batch["tokens"].long()) - batch["generator_log_probs"])
        objective = torch.minimum(ratio * batch["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantage"])
        return global_mean(-objective, batch["loss_mask"], count=count, averaged=False)

    def note(self, step: int, uids: list[str], staleness: float | None) -> None:
        """Write down what this rank trained on; after a kill a step may be done again, with the same rollouts."""
        with (self.folder / f"trained-{self.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "uids": uids, "staleness": staleness}) + "\n")

    def keep(self, step: int, stream: RolloutStream) -> None:
        """Replace the checkpoint by one of now."""
        state = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"step": step, "stream": stream.state_dict()}, self.folder / "checkpoint.new")
        os.replace(self.folder / "checkpoint.new", self.folder / "checkpoint.pt")


def checkpoint(folder: Path) -> dict[str, Any] | None:
    """What was kept, if anything was."""
    path = folder / "checkpoint.pt"
    found: dict[str, Any] | None = torch.load(path, weights_only=True) if path.exists() else None
    return found


def weights_of(state: dict[str, torch.Tensor]) -> Weights:
    """A policy's weights, to send."""
    return {name: values.detach().numpy().copy() for name, values in state.items()}


def train(folder: Path, steps: int) -> None:
    """Run all of it until there are so many steps, from where it was."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = checkpoint(folder)
    begin, state = (0, Policy().state_dict()) if kept is None else (kept["step"], kept["policy"])
    buffer = mouse_ray.RolloutBuffer.options(num_cpus=0.2).remote(
        folder / "rollouts",
        GROUP_SIZE,
        # A prompt has answers of one version only; those of the last eight are used.
        batch_maker=GrpoBatchMaker("repeat", advantage=Grpo(), max_staleness=8),
        max_ahead=4 * BATCH_SIZE,
    )
    unscored = mouse_ray.RolloutBuffer.options(num_cpus=0.2).remote(folder / "unscored", GROUP_SIZE)
    latest = Latest.remote(begin, weights_of(state))
    meeting = folder / f"meeting-{uuid4().hex}"
    producers, judge = [Producer.remote() for _ in range(PRODUCERS)], Judge.remote()
    trainers = [Trainer.remote(rank, folder, meeting) for rank in range(TRAINERS)]
    ever = [producer.run.remote(unscored, buffer, latest, seed) for seed, producer in enumerate(producers)]
    ever.append(judge.run.remote(unscored, buffer))
    left = [trainer.run.remote(buffer, latest, steps) for trainer in trainers]
    while left:
        # Whoever ends is a trainer that is done, or somebody who failed, which is raised here.
        ended, _ = ray.wait([*left, *ever])
        ray.get(ended)
        left = [one for one in left if one not in ended]
    for actor in (*producers, judge, *trainers, latest, unscored, buffer):
        ray.kill(actor)
    meeting.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Asynchronous GRPO on Ray, which goes on after a kill.")
    parser.add_argument(
        "--steps", type=int, default=100, help="steps of training, those of earlier runs included (100)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="where rollouts, batches and the checkpoint are kept"
    )
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports how it is used
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    train(chosen.output.absolute(), chosen.steps)
    rewards = [one.reward for one in open_rollouts(chosen.output / "rollouts")]
    tenth = max(len(rewards) // 10, 1)
    print(f"mean reward of the first tenth {np.mean(rewards[:tenth]):.3f}, of the last {np.mean(rewards[-tenth:]):.3f}")


if __name__ == "__main__":
    main()
