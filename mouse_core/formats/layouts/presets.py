"""Layouts of libraries and data sets, by the names that ``formats.open(format=...)`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mouse_core.formats.layouts.layout import TreeLayout

_D3RLPY_PARTS = 32
LAYOUTS: Mapping[str, TreeLayout] = MappingProxyType(
    {
        # robomimic 0.3 to 0.5, MimicGen, LIBERO and Isaac Lab. `dones` may be set before the end.
        "robomimic": TreeLayout(
            observation="data/demo_*/obs",
            action="data/demo_*/actions",
            reward="data/demo_*/rewards?",
            terminated="data/demo_*/dones?",
            next_observation="data/demo_*/next_obs?",
            metadata={
                "dones": "data/demo_*/dones?",
                "states": "data/demo_*/states?",
                "robot_states": "data/demo_*/robot_states?",
                "datagen_info": "data/demo_*/datagen_info?",
            },
            # RoboCasa has a task for each episode, LIBERO for each file.
            task=["data/demo_*@ep_meta/lang", "data@problem_info/language_instruction"],
        ),
        "maniskill": TreeLayout(
            observation="traj_*/obs",
            action="traj_*/actions",
            reward="traj_*/rewards?",
            terminated="traj_*/terminated?",
            truncated="traj_*/truncated?",
            metadata={
                "success": "traj_*/success?",
                "fail": "traj_*/fail?",
                "env_states": "traj_*/env_states?",
            },
        ),
        # Cameras as pixels, or as JPEG where the recorder compressed them.
        "aloha": TreeLayout(
            observation="observations",
            action="action",
            metadata=["base_action?"],
            one_a_file=True,
            files="episode_*.hdf5",
            pictures="observations/images",
        ),
        # Each of the infos must have a value for each row; a shorter one is damage.
        "d4rl": TreeLayout(
            observation="observations",
            action="actions",
            reward="rewards",
            terminated="terminals",
            truncated="timeouts?",
            next_observation="next_observations?",
            metadata={"infos": "infos?"},
            other_metadata=True,
            leave_out=["metadata"],
        ),
        # Observations that are tuples have an array for each part, with its number.
        "d3rlpy": TreeLayout(
            observation={"": "observations_*?", **{str(k): f"observations_*_{k}?" for k in range(_D3RLPY_PARTS)}},
            action="actions_*",
            reward="rewards_*",
            terminated="terminated_*",
        ),
        # Diffusion Policy's ReplayBuffer, and UMI's, whose actions are poses that the observations hold.
        "diffusion_policy": TreeLayout(
            observation="data",
            action="data/action?",
            reward="data/reward?",
            episode_ends="meta/episode_ends",
        ),
        # A row for every observation; "compact" files mark its last one with valids 0. "Regular" files are transitions.
        # Tasks of OGBench set masks to 0 where they are solved, which ends no trajectory.
        "ogbench": TreeLayout(
            observation="observations",
            action="actions",
            reward="rewards?",
            terminated="not masks?",
            is_last=["not valids?", "terminals"],
            next_observation="next_observations?",
            other_metadata=True,
        ),
        # Episodes in npz files: action, reward and discount led to the observation of their row; row 0 has none.
        "drqv2": TreeLayout(
            observation="observation",
            action="action",
            reward="reward",
            terminated="not discount",
            alignment="arrived",
            one_a_file=True,
            files="*.npz",
        ),
        # Dreamer and DreamerV2. Those of V3 are pieces of streams, which `formats.dreamerv3` reads.
        "dreamer": TreeLayout(
            observation="image",
            action="action",
            reward="reward",
            terminated=["is_terminal?", "not discount?"],
            alignment="arrived",
            one_a_file=True,
            files="*.npz",
        ),
        # RoboHive logs what came with an observation beside it, and the action taken on it; before, what the action
        # brought, and no last observation. Trials go on after some of the flags.
        "roboset": TreeLayout(
            observation="*/observations",
            action="*/actions",
            reward="*/rewards",
            terminated="*/done",
            metadata={"time": "*/time?", "done": "*/done"},
            other_metadata=True,
            action_metadata=["*/done", "*/env_infos"],
            numbers={"seed": "file", "episode": "*"},
            episodes=r"(?:Trial|Rollout)\d{1,9}",
            nan_action=True,
            alignment={"reward": "arrived", "terminated": "arrived", "metadata": "arrived"},
            files="*.h5",
        ),
        # Procgen's; time limits are terminal there. A file's name says when it was recorded, its number, its length,
        # the seed of its level and its return: 20230313T133237_4_77_12_10.00.npz. Archives have pickled dicts.
        "gen_dgrl": TreeLayout(
            observation="observations",
            action="actions",
            reward="rewards",
            terminated="dones",
            other_metadata=True,
            action_metadata=["*"],
            numbers={"level_seed": r"_(-?\d+)_-?[\d.]+\.np[yz]$"},
            one_a_file=True,
            files="*.np[yz]",
            pictures="observations",
        ),
        "tianshou": TreeLayout(
            observation="_meta/obs",
            action="_meta/act",
            reward="_meta/rew",
            terminated="_meta/terminated",
            truncated="_meta/truncated",
            next_observation="_meta/obs_next?",
            # Buffers of `from_data` have 0 in `last_index`, whatever was written last.
            ring={
                "size": "_size",
                "next": "_insertion_idx",
                "sizes": "_lengths?",
                "last": "last_index",
                "offsets": "_offset?",
            },
        ),
    }
)
"""The layouts that have a name: "aloha" (ACT), "d3rlpy", "d4rl", "diffusion_policy" (UMI), "dreamer" (V2), "drqv2"
(V-D4RL), "gen_dgrl" (Procgen), "maniskill", "ogbench", "robomimic" (MimicGen, LIBERO, Isaac Lab), "roboset" (RoboHive)
and "tianshou"."""
