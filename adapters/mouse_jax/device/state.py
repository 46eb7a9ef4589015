"""The pytree of a replay, its constants, and placement of its rows in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError
from mouse_core.nested import as_array, children_of, is_node, rebuilt
from mouse_core.replay.device import Layout, Ring
from mouse_jax.dtypes import are_known


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replay:
    """A replay, the pytree that the functions of this package take and return.

    Args:
        rows: A tree of arrays ``[T, ...]``, or ``[T, E, ...]`` with environments.
        cursor: The time step that is written next, int32 ``[]``.
        size: The number of stored time steps, int32 ``[]``.
        seed: The halves of the seed, uint32 ``[2]``, high first.
        state: The state of the sampler, a dict of dicts of arrays.
        beta: The exponent of importance weights, float32 ``[]``, which a schedule overrides; None without priorities.
        layout: The constants, which are static in ``jax.jit``.
    """

    rows: Any
    cursor: jax.Array
    size: jax.Array
    seed: jax.Array
    state: dict[str, dict[str, Any]]
    beta: jax.Array | None
    layout: Layout = field(metadata={"static": True})

    @property
    def ring(self) -> Ring:
        """The ring of the rows."""
        return Ring(self.cursor, self.size, self.layout.steps, self.layout.num_envs)


def as_dicts(tree: Any, lists: Collection[Any] = (), path: tuple[str | int, ...] = ()) -> Any:
    """Convert a tree to the form of buffers on the host: dataclasses become dicts, and lists of numbers become arrays.

    Args:
        tree: The rows.
        lists: Paths of lists that stay nodes even if they contain numbers.
        path: The path of the tree.
    """
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {one.name: getattr(tree, one.name) for one in fields(tree)}
    if is_node(tree) or path in lists:
        return rebuilt(tree, [as_dicts(child, lists, (*path, name)) for name, child in children_of(tree)])
    if isinstance(tree, list):
        traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
        return jnp.asarray(tree) if traced else as_array(tree, where="rows")
    return tree


def check_one(replay: Replay, caller: str) -> None:
    """Raise ConfigError if a function of a single replay is called, outside of ``jax.vmap``, with several replays."""
    if replay.cursor.ndim:
        raise ConfigError(
            f"{caller}: expected one replay, found {replay.cursor.shape[0]}; inside of jax.vmap each is one, and "
            "jax.tree.map(lambda leaf: leaf[0], replay) is the first"
        )


# ------------------------------------------------------------------ rows in the host's memory


def on_host(replay: Replay) -> bool:
    """Whether a replay is in the host's memory, so that its functions run immediately on the host."""
    return replay.layout.memory == "host" and are_known(replay.size)


def host() -> jax.Device:
    """Return the CPU device, which computes in host memory.

    Raises:
        ConfigError: JAX's platforms do not include the CPU.
    """
    try:
        device: jax.Device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(f"memory: expected the CPU among JAX's platforms, found {error}") from error
    return device


def put_on_host(tree: Any) -> Any:
    """Return arrays in the host's memory; NumPy arrays are copied, as their owner may change them while JAX reads."""
    copied = jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf, tree)
    return jax.device_put(copied, host())


def put_on_device(tree: Any) -> Any:
    """Return arrays on JAX's default device, without waiting for the copy."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return jax.device_put(tree, jax.local_devices()[0] if chosen is None else chosen)
