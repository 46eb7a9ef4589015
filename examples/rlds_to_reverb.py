"""RLDS episodes into a Reverb server, sampled by TF-Agents' replay buffer.

Needs an environment with TF-Agents and Reverb, such as `make test-reverb` makes:

    .venv-reverb/bin/python examples/rlds_to_reverb.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mouse_core.formats import rlds


def episodes(number: int = 5, length: int = 20) -> Iterator[dict[str, Any]]:
    """A walk on a line, as RLDS: every other episode is truncated."""
    random = np.random.default_rng(0)
    for count in range(number):
        actions = random.integers(0, 2, length)
        places = np.cumsum(2 * actions - 1).astype(np.float32)
        last = np.arange(length) == length - 1
        yield {
            "steps": {
                "observation": np.stack([places, np.arange(length, dtype=np.float32)], axis=1),
                "action": actions,
                "reward": np.abs(places),
                "discount": np.ones(length, np.float32),
                "is_first": np.arange(length) == 0,
                "is_last": last,
                "is_terminal": last & (count % 2 == 0),
            }
        }


def main() -> list[Any]:
    """Write and sample; what was sampled."""
    try:
        import reverb
        from tf_agents.replay_buffers.reverb_replay_buffer import ReverbReplayBuffer
        from tf_agents.replay_buffers.reverb_utils import ReverbAddTrajectoryObserver
    except ImportError as error:
        raise SystemExit(
            f"rlds_to_reverb.py needs {error.name}: make test-reverb installs it into .venv-reverb"
        ) from error

    spec = rlds.create_trajectory_data_spec(episodes(1))
    table = reverb.Table(
        "steps",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=100_000,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        # Items are sequences: there is an axis more.
        signature=rlds.to_tensor_specs(spec, outer_dims=(None,)),
    )
    server = reverb.Server([table])
    buffer = ReverbReplayBuffer(rlds.to_tensor_specs(spec), table_name="steps", sequence_length=2, local_server=server)
    observer = ReverbAddTrajectoryObserver(buffer.py_client, "steps", sequence_length=2)
    # The table's signature is asked for, and what does not fit it is refused by name before it is pushed.
    count = rlds.push_rlds_to_reverb(episodes(), observer)
    observer.flush()
    print(f"pushed {count} trajectories, {buffer.py_client.server_info()['steps'].current_size} pairs to sample")
    samples = [sample for sample, _ in buffer.as_dataset(sample_batch_size=4, num_steps=2).take(3)]
    for sample in samples:
        print("observations", sample.observation.shape, "rewards", sample.reward[:, 0].numpy())
    observer.close()
    server.stop()
    return samples


if __name__ == "__main__":
    main()
