"""The pytree of a replay, and what does not change in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mouse_core import ConfigError, SchemaError
from mouse_core.nested import FieldKey, as_array, children_of, is_node, rebuilt
from mouse_core.replay import Compose
from mouse_core.replay.device import EpisodeFields as EpisodeFields
from mouse_core.replay.device import Order as Order
from mouse_core.replay.device import Slices as Slices
from mouse_core.spec import Alignment
from mouse_jax.device.ground.sum_tree import Weights

Memory = Literal["device", "host"]


@dataclass(frozen=True)
class Layout:
    """Constants of a replay.

    Args:
        capacity: Rows that it holds.
        num_envs: E, or None where rows are one stream.
        batch_size: Rows or slices in a batch, where ``sample`` is not told.
        transform: What is done to batches, or None.
        alignment: Which transition the action, reward and done of a row belong to.
        memory: Where rows lie.
    """

    capacity: int
    num_envs: int | None
    batch_size: int
    transform: Compose | None = None
    alignment: Alignment = "outgoing"
    memory: Memory = "device"

    @property
    def steps(self) -> int:
        """Time steps that it holds, T."""
        return self.capacity // (self.num_envs or 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episodes:
    """Episode numbers of each row, in which a binary search finds a slice.

    Args:
        windows: How many slices there are before a row in its environment, modulo 2**32, uint32 ``[T, E]``.
        numbers: How many episodes there are up to a row, itself included, modulo 2**32, uint32 ``[T, E]``.
        made: How many slices there are in all, modulo 2**32, uint32 ``[E]``.
        begun: How many episodes there are in all, modulo 2**32, uint32 ``[E]``.
        position: Of the newest row in its episode, int32 ``[E]``; behind S, less as many periods as leave at least S.
        ended: Whether the newest row ended its episode, bool ``[E]``.
        last_id: The newest row's number of a trajectory ``[E]``, or None.
        phases: How many steps behind one at which slices may begin a row lies, int32 ``[T, E]``; None: not needed.
        slices: What a slice is; static.
        marks: Which fields say where episodes end; static.
        tiled: Whether slices lie side by side, from an episode's first step that is there on; static.
    """

    windows: jax.Array
    numbers: jax.Array
    made: jax.Array
    begun: jax.Array
    position: jax.Array
    ended: jax.Array
    last_id: jax.Array | None
    phases: jax.Array | None
    slices: Slices = field(metadata={"static": True})
    marks: EpisodeFields = field(metadata={"static": True})
    tiled: bool = field(default=False, metadata={"static": True})

    @property
    def every(self) -> int:
        """Least number of steps between the beginnings of two slices of an episode."""
        return self.slices.sequence_length if self.tiled else self.slices.period


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Epoch:
    """Position of ``take``: the epoch, and the place in it.

    Args:
        rows: How many rows, or slices, the epoch is over, int32 ``[]``; 0: none has begun.
        began: The number of the sample with which it began, uint32 ``[]``.
        position: How many of them have come, int32 ``[]``.
        shuffled: Their order, where they are few; see ``_philox.shuffled``.
    """

    rows: jax.Array
    began: jax.Array
    position: jax.Array
    shuffled: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queue:
    """Rows that ``take`` has not returned yet.

    Args:
        left: So many, the newest, int32 ``[]``.
    """

    left: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replay:
    """Rows and where they are drawn from, as the functions of this package take and return it: a pytree.

    Args:
        rows: A tree of arrays ``[T, ...]``, or ``[T, E, ...]`` with environments.
        cursor: The time step that is written next, int32 ``[]``.
        size: Time steps there are, int32 ``[]``.
        seed: The halves of the seed, uint32 ``[2]``, high first.
        episodes: Where slices begin; None where single rows are drawn.
        turns: Which rows come next, where not all may; None where they are drawn at random.
        weights: What rows weigh; None where all are as likely.
        layout: What does not change; static.
    """

    rows: Any
    cursor: jax.Array
    size: jax.Array
    seed: jax.Array
    episodes: Episodes | None
    turns: Epoch | Queue | None
    weights: Weights | None
    layout: Layout = field(metadata={"static": True})


def as_dicts(tree: Any, lists: Collection[Any] = (), path: tuple[str | int, ...] = ()) -> Any:
    """A tree as the buffers on the host have it: dataclasses are dicts, and lists of numbers arrays.

    Args:
        tree: Rows.
        lists: The paths of lists that are nodes also where they hold numbers.
        path: Of the tree.
    """
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {one.name: getattr(tree, one.name) for one in fields(tree)}
    if is_node(tree) or path in lists:
        return rebuilt(tree, [as_dicts(child, lists, (*path, name)) for name, child in children_of(tree)])
    if isinstance(tree, list):
        traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
        return jnp.asarray(tree) if traced else as_array(tree, where="rows")
    return tree


def named(tree: Any) -> dict[FieldKey, Any]:
    """The leaves of a tree by name, as ``mouse_core.nested`` names those of dicts and tuples."""
    return {_key(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _key(path: tuple[Any, ...]) -> FieldKey:
    names: list[str | int] = []
    for step in path:
        found: Any = next(
            getattr(step, name) for name in ("idx", "key", "name") if getattr(step, name, None) is not None
        )
        names.append(found)
    return names[0] if len(names) == 1 and isinstance(names[0], str) else tuple(names)


def check_one(replay: Replay, caller: str) -> None:
    """ConfigError where ``jax.vmap`` made several replays, and a function of one is called outside of it."""
    if replay.cursor.ndim:
        raise ConfigError(
            f"{caller}: expected one replay, found {replay.cursor.shape[0]}; inside of jax.vmap each is one, and "
            "jax.tree.map(lambda leaf: leaf[0], replay) is the first"
        )


def one_a_row(key: FieldKey, values: Any, shape: tuple[int, ...]) -> jax.Array:
    """A field of one value a row, ``[n, E]``, whatever axes of length 1 it has behind.

    Raises:
        SchemaError: It has more values a row.
    """
    if values.size != shape[0] * shape[1]:
        raise SchemaError(f"slices: {key!r}: expected one value a row, found rows of shape {list(values.shape[1:])}")
    flat: jax.Array = jnp.reshape(values, shape)
    return flat
