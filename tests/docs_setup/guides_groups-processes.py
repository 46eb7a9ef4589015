"""The rollouts of the guide on groups."""

import numpy as np

from mouse_core.groups import RolloutRecord, Turn


def sampled(problem, version, number):
    question = Turn("What is 2 + 2?", "user", tokens=[5, 7, 5, 9])
    answer = Turn("4", "assistant", tokens=[1, 2, 3], logprobs=-np.ones(3))
    return RolloutRecord(
        environment="arithmetic",
        example_id=f"problem-{problem}",
        policy_version=version,
        rollout_uid=f"{problem}-{version}-{number}",
        turns=[question, answer],
        reward=float(number % 2),
    )
