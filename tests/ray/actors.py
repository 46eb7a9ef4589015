"""Killing actors in tests."""

import os
import time
from typing import Any

import ray


def process_of(actor: Any) -> int | None:
    """The id of the process that an actor runs in; None while it is being started again."""
    try:
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))  # type: ignore[no-any-return]
    except ray.exceptions.RayActorError:
        return None


def kill(actor: Any) -> None:
    """Kill an actor's process, and wait until it runs in another one: a dying actor may still answer."""
    before = process_of(actor)
    ray.kill(actor, no_restart=False)
    limit = time.monotonic() + 180
    while process_of(actor) in (before, None):
        assert time.monotonic() < limit
        time.sleep(0.1)
