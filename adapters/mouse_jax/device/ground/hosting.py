"""Replays whose rows lie in the host's memory: what goes there, and what comes from there."""

from __future__ import annotations

from typing import Any, get_args

import jax
import numpy as np

from mouse_core import ConfigError
from mouse_jax._rollout import are_known
from mouse_jax.device.ground.state import Memory, Replay


def check(memory: Any, seed: Any) -> None:
    """ConfigError unless a replay can be made there."""
    if memory not in get_args(Memory):
        raise ConfigError(f"memory: expected one of {[*get_args(Memory)]}, found {memory!r}")
    if memory == "host" and isinstance(seed, jax.core.Tracer):
        raise ConfigError("memory: expected 'device' inside of jax.jit and jax.vmap, found 'host'")


def on_host(replay: Replay) -> bool:
    """Whether a replay lies in the host's memory, and what is called on it runs there at once."""
    return replay.layout.memory == "host" and are_known(replay.size)


def host() -> jax.Device:
    """Return the CPU device, which computes in host memory.

    Raises:
        ConfigError: JAX was told to leave the CPU out.
    """
    try:
        device: jax.Device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(f"memory: expected the CPU among JAX's platforms, found {error}") from error
    return device


def to_host(tree: Any) -> Any:
    """Arrays in the host's memory; those of NumPy copied, for JAX reads them when their owner may go on writing."""
    copied = jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf, tree)
    return jax.device_put(copied, host())


def to_device(tree: Any) -> Any:
    """Arrays on the device that is JAX's default; nothing waits for them."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return jax.device_put(tree, jax.local_devices()[0] if chosen is None else chosen)
