"""A sequence model that is told what return is wanted, learned from the best recorded episodes: a script to copy.

    python examples/return_conditioned.py --framework torch
    python examples/return_conditioned.py --framework flax

A clumsy pilot lands a space ship, in some episodes more clumsily than in others. The model sees, for each of the last
steps, the observation, the action before it and how much return is still to come, and predicts the action (Chen et al.,
"Decision Transformer", NeurIPS 2021; here one token is a whole step). When it flies itself it is told the return of the
best recorded episode, and after each step what is left of it.

This part knows no framework: what is learned from, and how a model flies. `return_conditioned_torch.py` and
`return_conditioned_flax.py` have the same model and the same training.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import lunar_lander
import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium as gym
except ImportError as error:
    raise SystemExit(f"return_conditioned.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core.store import Store
from mouse_core.store.derived import DerivedStore, Previous, Return

SEQUENCE_LENGTH = 20  # S: steps that the model sees
RETURN_SCALE = 100.0
PLAYED_EPISODES = 20
PLAYING_SEED = 1_000_000  # far from the seeds of the recording

#: What the loaders of both frameworks are told.
BATCHES: dict[str, Any] = {
    "sequence_length": SEQUENCE_LENGTH,
    "batch_size": 64,
    # A window lies in one episode; `mask` says which of its steps are there.
    "boundary": "episode",
    # The action that leaves the observation of each step, in either alignment, as [B, S, 1]; `action_mask` says where
    # there is one: none leaves the last observation of an episode.
    "windows": {"action": [0]},
    "fields": ("obs_continuous", "returns_to_go", "previous_action", "action"),
}

#: Returns still to come [N, S], observations [N, S, 8] and previous actions [N, S] to scores of actions [N, S, 4].
Scores = Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]], NDArray[Any]]


def learned_from(recorded: Store, share: float) -> Store:
    """The best episodes, with what is not recorded: the return still to come, and the action before.

    Returns are computed once for all rows. The best episodes are a view of them; no step is copied.
    """
    derived = DerivedStore(recorded, {"returns_to_go": Return(), "previous_action": Previous("action")})
    return derived.best(share)


def play(scores: Scores, *, wanted: float, episodes: int, seed: int) -> NDArray[np.float64]:
    """Fly episodes side by side, asking for a return, and return what each earned."""
    environments = gym.make_vec(lunar_lander.ENVIRONMENT, num_envs=episodes, vectorization_mode="sync")
    observation, _ = environments.reset(seed=seed)
    earned, playing = np.zeros(episodes), np.ones(episodes, bool)
    returns = np.zeros((episodes, SEQUENCE_LENGTH), np.float32)
    observations = np.zeros((episodes, SEQUENCE_LENGTH, lunar_lander.OBSERVATION_SIZE), np.float32)
    actions = np.zeros((episodes, SEQUENCE_LENGTH), np.int64)
    action, step = np.zeros(episodes, np.int64), 0
    while playing.any():
        at = min(step, SEQUENCE_LENGTH - 1)
        if step >= SEQUENCE_LENGTH:  # the oldest step is forgotten
            for seen in (returns, observations, actions):
                seen[:, :-1] = seen[:, 1:]
        returns[:, at], observations[:, at], actions[:, at] = wanted - earned, observation, action
        # Attention is causal: what stands behind the current step is not looked at.
        action = scores(returns, observations, actions)[:, at].argmax(axis=-1)
        observation, rewards, terminated, truncated, _ = environments.step(action)
        earned += np.where(playing, rewards, 0.0)
        playing &= ~(terminated | truncated)
        step += 1
    environments.close()
    return earned


def main() -> None:
    """Record, learn from the best episodes, fly, and print the figures."""
    parser = argparse.ArgumentParser(description="Learn a return-conditioned sequence model from the best episodes.")
    parser.add_argument("--framework", choices=("torch", "flax"), default="torch")
    parser.add_argument("--episodes", type=int, default=150, help="episodes to record")
    parser.add_argument("--share", type=float, default=0.5, help="of the episodes, the best so many are learned from")
    parser.add_argument("--steps", type=int, default=3000, help="training steps, one batch each")
    parser.add_argument("--seed", type=int, default=0, help="of the recording, the model and the batches")
    options = parser.parse_args()

    recorded = lunar_lander.record(episodes=options.episodes, seed=options.seed)
    best = learned_from(recorded, options.share)
    returns = best.episodes["return"].to_numpy()
    print(f"steps recorded: {len(recorded)}")
    print(f"steps learned from: {len(best)}")
    print(f"return recorded: {recorded.episodes['return'].to_numpy().mean():.1f}")
    print(f"return learned from: {returns.mean():.1f}")

    training = importlib.import_module(f"return_conditioned_{options.framework}")
    scores, losses = training.train(best, steps=options.steps, seed=options.seed)
    print(f"first loss: {losses[0]:.3f}")
    print(f"final loss: {np.mean(losses[-100:]):.3f}")
    earned = play(scores, wanted=returns.max(), episodes=PLAYED_EPISODES, seed=PLAYING_SEED)
    print(f"return wanted: {returns.max():.1f}")
    print(f"return flown: {earned.mean():.1f}")


if __name__ == "__main__":
    main()
