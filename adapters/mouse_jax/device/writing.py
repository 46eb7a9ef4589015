"""Making a replay, and writing rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import FieldKey
from mouse_core.replay import Compose
from mouse_core.replay.ground.protocols import END_KEYS, TRAJ_KEYS
from mouse_core.replay.transforms.compose import delivered_alignment
from mouse_core.spec import Alignment, check_alignment, check_count
from mouse_jax._rollout import seed_halves
from mouse_jax.device import _episodes
from mouse_jax.device._ring import put
from mouse_jax.device._state import Layout, Marks, Replay, Slices, as_dicts, is_key, named
from mouse_jax.trees import narrowed

_MOST = 1 << 31


def init(
    example: Any,
    capacity: int,
    *,
    batch_size: int,
    num_envs: int | None = None,
    slices: Slices | None = None,
    transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    alignment: Alignment = "outgoing",
    seed: int | jax.Array = 0,
) -> Replay:
    """An empty replay.

    Args:
        example: One row: a pytree of arrays or numbers of any shape and dtype, random keys of JAX among them, or of
            ``jax.ShapeDtypeStruct``. Its values do not matter. Dataclasses become dicts.
        capacity: Rows that it holds, all time steps of all environments; the oldest are overwritten.
        batch_size: Rows or slices in a batch, B, where ``sample`` is not told.
        num_envs: Environments whose rows are written side by side, ``[time, env]``, and of which each is a stream of
            its own; None: rows are one stream.
        slices: What a batch consists of: slices; None: single rows, each as likely.
        transform: Functions of a batch that can be traced, applied in order: those of ``mouse_core.replay`` that draw
            no random numbers and look at the batch alone, such as ``NStep`` and ``NextView``, or your own.
        alignment: Which transition the action, reward and done of a row belong to.
        seed: In ``[0, 2**64)``; may be traced, so that ``jax.vmap`` makes a replay for each of many seeds.

    Returns:
        A pytree with memory for all rows.

    Raises:
        ConfigError: An argument out of range, a transform that is not for a device, or a pad that a field cannot hold.
        SchemaError: A field that is no array of numbers, or that has a name that batches need.
        MissingFieldError: Slices of rows that do not say where episodes end.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from mouse_jax import device
        >>> replay = device.init({"obs": jnp.zeros(4), "reward": 0.0}, 100, batch_size=8)
        >>> replay = device.add(replay, {"obs": jnp.ones((3, 4)), "reward": jnp.ones(3)})
        >>> jax.jit(device.sample)(replay, 0)["obs"].shape
        (8, 4)
    """
    check_count("capacity", capacity)
    check_count("batch_size", batch_size)
    check_alignment(alignment)
    if num_envs is not None and capacity % check_count("num_envs", num_envs):
        raise ConfigError(f"capacity: expected a multiple of the {num_envs} environments, found {capacity}")
    if capacity >= _MOST:
        raise ConfigError(f"capacity: expected less than 2**31 rows, found {capacity}")
    row = jax.tree.map(_shape_dtype, as_dicts(example))
    layout = Layout(int(capacity), num_envs, int(batch_size), _composed(transform, alignment))
    _check_names(row, layout, slices)
    lead = (layout.steps,) if num_envs is None else (layout.steps, num_envs)
    episodes = None
    if slices is not None:
        marks = _find_marks(named(row), slices)
        ids = None if marks.ids is None else named(row)[marks.ids].dtype
        episodes = _episodes.none(layout.steps, num_envs or 1, slices, marks, ids)
    rows = jax.tree.map(lambda leaf: _memory(lead, leaf), row)
    return Replay(rows, jnp.int32(0), jnp.int32(0), seed_halves(seed), episodes, layout)


def add(replay: Replay, rows: Any) -> Replay:
    """The replay with more rows behind the newest, over the oldest where there is no room.

    Compiled with the replay donated, ``jax.jit(device.add, donate_argnums=0)``, rows are written in place. In a loop
    that is compiled as a whole, as in ``jax.lax.scan``, they are anyway.

    Args:
        replay: A replay.
        rows: One row as ``example`` was, or some, ``[n, ...]`` in every field; with environments one time step,
            ``[env, ...]``, or some, ``[time, env, ...]``.

    Raises:
        SchemaError: Other fields, shapes or dtypes than the example had.
        DataError: A 64-bit number of NumPy's that the field cannot hold.
        ConfigError: More rows at once than there is room for.
    """
    layout = replay.layout
    rows = _accepted(replay, rows)
    count = jax.tree.leaves(rows)[0].shape[0]
    if count > layout.steps:
        raise ConfigError(f"add: expected at most {layout.steps} time steps at once, found {count}")
    if not count:
        return replay
    episodes = replay.episodes
    if episodes is not None:
        episodes = _episodes.extended(episodes, named(rows), count, replay.cursor)
    return replace(
        replay,
        rows=jax.tree.map(lambda memory, more: put(memory, more, replay.cursor), replay.rows, rows),
        cursor=(replay.cursor + count) % layout.steps,
        size=jnp.minimum(replay.size + count, layout.steps),
        episodes=episodes,
    )


def _shape_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
        if leaf.dtype.kind not in "biufc":
            raise SchemaError(f"init: expected arrays of numbers, found {leaf.dtype}")
        leaf = jnp.asarray(leaf)
    dtype = leaf.dtype if is_key(leaf.dtype) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    made: Any = jax.ShapeDtypeStruct
    return cast("jax.ShapeDtypeStruct", made(leaf.shape, dtype))


def _memory(lead: tuple[int, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    shape = (*lead, *leaf.shape)
    if is_key(leaf.dtype):
        implementation = jax.random.key_impl(jnp.empty((0,), leaf.dtype))
        return jnp.broadcast_to(jax.random.key(0, impl=implementation), shape)
    return jnp.zeros(shape, leaf.dtype)


def _composed(transform: Any, alignment: Alignment) -> Compose | None:
    given = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
    if not given:
        return None
    made = Compose(*given)
    delivered_alignment(made, alignment)
    for part in made.transforms:
        for name, means in (
            ("random", "draws random numbers"),
            ("gather", "reads other rows"),
            ("settled", "keeps numbers of all rows"),
            ("inverse", "changes rows that are written"),
        ):
            if getattr(part, name, None):
                raise ConfigError(
                    f"transform: expected one that looks at the batch alone, found {part!r}, which {means}"
                )
    return made


def _find_marks(fields: Mapping[FieldKey, Any], slices: Slices) -> Marks:
    ends = tuple(key for key in (slices.end_key, slices.truncated_key) if key is not None)
    ids = slices.traj_key
    if ends or ids is not None:
        marks = Marks(ends, ids, True)
    else:
        ends = next(filter(None, (tuple(key for key in group if key in fields) for group in END_KEYS)), ())
        ids = next((key for key in TRAJ_KEYS if key in fields), None)
        marks = Marks(ends, ids, not ends)
    if not ends and ids is None:
        raise MissingFieldError(
            f"slices: expected end_key=, truncated_key= or traj_key=, or a field 'done', found {list(fields)}"
        )
    for key in (*ends, *(() if ids is None else (ids,))):
        if key not in fields:
            raise MissingFieldError(f"slices: expected one of {list(fields)}, found {key!r}")
        if prod(fields[key].shape) != 1:
            raise SchemaError(f"slices: {key!r}: expected one value a row, found {list(fields[key].shape)}")
    if ids is not None and not jnp.issubdtype(fields[ids].dtype, jnp.integer):
        raise SchemaError(
            f"slices: {ids!r}: expected integers as numbers of trajectories, found {fields[ids].dtype}; end_key= or "
            "traj_key= names the fields that count"
        )
    return marks


def _check_names(row: Any, layout: Layout, slices: Slices | None) -> None:
    """Refuse fields that batches need, and a pad that a field cannot hold."""
    transform = layout.transform
    taken = {"index"}
    if transform is not None and transform.reach and slices is None:
        taken |= {"mask"}
    if slices is not None and slices.pad is not False:
        taken |= {"mask"}
    if isinstance(row, Mapping) and not taken.isdisjoint(row):
        raise SchemaError(f"init: expected rows without the fields {sorted(taken & row.keys())}, which batches have")
    if slices is None or isinstance(slices.pad, bool):
        return
    for key, leaf in named(row).items():
        if is_key(leaf.dtype):
            raise ConfigError(f"pad: expected True or False, as field {key!r} is of random keys, found {slices.pad}")
        with np.errstate(invalid="ignore"):
            held = np.asarray(slices.pad).astype(leaf.dtype)
        if not (held == slices.pad or jnp.issubdtype(leaf.dtype, jnp.inexact)):
            raise ConfigError(
                f"pad: expected a number that {leaf.dtype} holds, as in field {key!r}, found {slices.pad}"
            )


def _accepted(replay: Replay, rows: Any) -> Any:
    """Rows as arrays with an axis of time in front."""
    rows = narrowed(as_dicts(rows))
    held, given = named(replay.rows), named(rows)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (rows, replay.rows)]
    if structures[0] != structures[1]:
        raise SchemaError(f"add: expected rows with the fields {list(held)}, found {list(given)}")
    lead = 1 if replay.layout.num_envs is None else 2
    arrays, counts = {}, {}
    for key, memory in held.items():
        leaf = given[key] if isinstance(given[key], jax.Array) else np.asarray(given[key])
        weak = not hasattr(given[key], "dtype")
        one, several = memory.shape[1:], (None, *memory.shape[1:])
        if leaf.shape == one:
            leaf = leaf[None]
            counts[key] = (True, 1)
        elif leaf.ndim == memory.ndim and leaf.shape[1:] == one:
            counts[key] = (False, leaf.shape[0])
        else:
            what = "row" if lead == 1 else "time step"
            raise SchemaError(
                f"add: field {key!r}: expected {list(one)} for one {what} or {[*several]} for some, found "
                f"{list(leaf.shape)}"
            )
        if leaf.dtype != memory.dtype and not (weak and np.can_cast(leaf.dtype, memory.dtype, "same_kind")):
            raise SchemaError(f"add: field {key!r}: expected {memory.dtype}, found {leaf.dtype}")
        arrays[key] = jnp.asarray(leaf, memory.dtype)
    if len(set(counts.values())) > 1:
        found = {key: count for key, (_, count) in counts.items()}
        raise SchemaError(f"add: expected as many rows in every field, found {found}")
    leaves = iter(arrays.values())
    return jax.tree.map(lambda _: next(leaves), replay.rows)
