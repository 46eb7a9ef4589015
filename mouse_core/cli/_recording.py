"""The subcommand ``record``: episodes of an environment into the folder of a store."""

from __future__ import annotations

import argparse
from typing import Any

from mouse_core.cli import _data as data
from mouse_core.errors import ConfigError

_AUTORESET = {"next-step": "NextStep", "same-step": "SameStep", "disabled": "Disabled"}


def declare_record(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse record``."""
    parser.add_argument("environment", metavar="ENV", help="the id of an environment of gymnasium, or MODULE:ID")
    parser.add_argument("folder", metavar="FOLDER", help="the folder of a store, made if it is not there")
    many = parser.add_mutually_exclusive_group(required=True)
    many.add_argument("--episodes", metavar="N", type=data.positive, help="how many to add")
    many.add_argument(
        "--until", metavar="N", type=data.positive, help="add as many as are missing to N, with the seeds that follow"
    )
    parser.add_argument(
        "--policy", metavar="MODULE:NAME", help="a function from an observation to an action; without, random actions"
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, help="episode i is reset with N + i; of a vector, environment i's first one"
    )
    parser.add_argument("--vector", metavar="N", type=data.positive, help="so many environments side by side")
    parser.add_argument(
        "--autoreset", choices=tuple(_AUTORESET), help="when those of a vector begin another episode (next-step)"
    )
    parser.add_argument(
        "--vectorization", choices=("sync", "async"), help="async: each of a vector in a process of its own (sync)"
    )
    parser.add_argument(
        "--infos", metavar="A,B=DTYPE", type=_infos, default={}, help="what to keep of infos, with or without a dtype"
    )
    parser.add_argument("--images", choices=("raw", "png"), default="raw", help="how pictures are stored (raw)")
    parser.add_argument(
        "--on-interrupted",
        choices=("mark", "cut"),
        default="mark",
        help="an episode that is broken off: mark its last row as truncated, or leave it out (mark)",
    )
    parser.add_argument("--alignment", choices=("arrived", "outgoing"), help="how rows of a new folder stand (arrived)")
    parser.add_argument(
        "--sync", choices=("none", "flush", "append"), default="flush", help="what the folder waits for (flush)"
    )


def run_record(chosen: argparse.Namespace) -> int:
    """Record episodes of an environment into the folder of a store, behind those that are there.

    examples:
      mouse record CartPole-v1 runs/cartpole --episodes 100 --seed 0
      mouse record CartPole-v1 runs/cartpole --until 1000 --seed 0             the same again goes on where it was
      mouse record CartPole-v1 runs/upright --episodes 20 --policy mine:upright    upright(observation) of mine.py
      mouse record LunarLander-v3 runs/lander --episodes 500 --vector 8 --vectorization async
      mouse record FrozenLake-v1 runs/lake --episodes 100 --infos prob=float64

    A policy of a vector is given the observations of all of its environments, and returns all of their actions.

    status: 0 done, 2 an environment, a policy or a folder that cannot be used, 130 interrupted: what was recorded stays
    """
    from mouse_core.record.playing import made, record
    from mouse_core.store.dataset_store import DatasetStore

    if chosen.vector is None and (chosen.autoreset or chosen.vectorization):
        raise ConfigError("--autoreset and --vectorization: expected --vector N with them, found none")
    data.find_modules_here()  # environments and policies of this folder
    policy = None if chosen.policy is None else data.function_of(chosen.policy, "policy")
    vector = {"vectorization_mode": chosen.vectorization or "sync", "autoreset": _AUTORESET.get(chosen.autoreset or "")}
    options: dict[str, Any] = {} if chosen.alignment is None else {"alignment": chosen.alignment}
    env = made(chosen.environment, **({} if chosen.vector is None else {"num_envs": chosen.vector, **vector}))
    try:
        with DatasetStore.open(chosen.folder, "a", sync=chosen.sync, **options) as store:
            rows, there = len(store), store.episodes.num_rows if len(store) else 0
            record(
                env,
                policy,
                episodes=chosen.episodes,
                until=chosen.until,
                store=store,
                seed=chosen.seed,
                infos=chosen.infos,
                images=chosen.images,
                on_interrupted=chosen.on_interrupted,
                name=chosen.policy,
                progress=data.wants_bar(),
            )
            now = store.episodes.num_rows
            added = f"{now - there:,} episodes, {len(store) - rows:,} rows added" if now > there else "nothing added"
            print(f"{chosen.folder}: {added}; {now:,} episodes, {len(store):,} rows")  # noqa: T201
    finally:
        env.close()
    return 0


def _infos(text: str) -> dict[str, str | None]:
    """Names of infos with commas between them, for argparse; "prob=float64" says the dtype, too."""
    found = [name.partition("=") for name in data.names(text)]
    return {name: dtype or None for name, _, dtype in found}
