"""The rollouts of the guide on groups; the messages that the page shows are held to those that are raised."""

import numpy as np

from mouse_core.groups import RolloutRecord, Turn
from tests.docs_output import checked_print

print = checked_print("docs/guides/groups-batches.md")


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
