"""Creates replays, and writes rows to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import EllipsisType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mouse_core import ConfigError, SchemaError
from mouse_core.nested import FieldKey, as_array, flatten, lists_of, structure_of, unflatten
from mouse_core.replay import Priorities
from mouse_core.replay.device import DeviceSampler, Layout, Order, Ring, Slices
from mouse_core.replay.device.layout import Memory
from mouse_core.spec import Alignment
from mouse_jax.device.arrays import JAX
from mouse_jax.device.sampling import check_transform
from mouse_jax.device.state import (
    Replay,
    as_dicts,
    check_one,
    host,
    on_host,
    put_on_host,
)
from mouse_jax.dtypes import is_key, seed_halves
from mouse_jax.trees import narrowed

# Largest number of rows that a sampler processes one by one.
_FEW = 1 << 12


def init(
    example: Any,
    capacity: int,
    *,
    batch_size: int,
    num_envs: int | EllipsisType | None = ...,
    slices: Slices | None = None,
    transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    alignment: Alignment = "outgoing",
    priorities: Priorities | None = None,
    order: Order = "random",
    sampler: DeviceSampler | None = None,
    memory: Memory = "device",
    seed: int | jax.Array = 0,
) -> Replay:
    """Create an empty replay.

    Args:
        example: One row: a pytree of arrays or numbers of any shape and dtype (including JAX's random keys), or of
            ``jax.ShapeDtypeStruct``. Only shapes and dtypes matter. Dataclasses become dicts.
        capacity: Number of rows in memory, over all time steps and environments; new rows overwrite the oldest.
        batch_size: The default number of rows or slices in a batch, B.
        num_envs: Number of environments, whose rows are written side by side, ``[time, env]``; each environment is a
            stream. If None, all rows are one stream, ``[n, ...]`` in the order of time. Slices, and transforms that
            read the next rows, require this argument.
        slices: The options of slices, if batches consist of slices; None: batches consist of single rows.
        transform: Traceable functions of a batch, applied in order: those of ``mouse_core.replay`` that draw no random
            numbers and read only the batch, such as ``NStep`` and ``NextView``, or your own.
        alignment: The transition that the action, reward and done of a row belong to.
        priorities: The options of priorities: rows (or slices, by their first rows) are drawn in proportion to powers
            of their priorities, as with a ``PrioritizedSampler`` or ``PrioritizedSliceSampler``. If None, all are
            equally likely. New rows have the largest priority so far, at least 1, and ``set_priorities`` changes them.
            ``beta`` is a number, which may be traced, or a function of the number of the sample; see ``sample``. Only
            for the order "random".
        order: The order of rows. "random": rows are drawn with replacement. "epochs": every row is drawn once per
            epoch, shuffled; slices are adjacent. "queue": every row is drawn once, the oldest first. ``take`` returns
            the next batch.
        sampler: A custom sampler in place of ``priorities`` and ``order``: an instance of a subclass of
            ``mouse_core.replay.device.DeviceSampler``, whose ``units`` are set to the rows or slices of the replay.
        memory: The memory of the rows: "device", or "host" for more rows than fit on a device. With "host", call
            ``add`` and ``sample`` outside of ``jax.jit``: ``add`` writes in place, so the old replay must not be used
            again; ``sample`` gathers on the host and starts an asynchronous copy to JAX's default device. See
            ``prefetch``.
        seed: An integer in ``[0, 2**64)``, or a random key of JAX, from which 64 bits are drawn. The seed may be
            traced, so ``jax.vmap`` can create a replay for each of many seeds.

    Returns:
        A pytree with memory for all rows.

    Raises:
        ConfigError: An argument is out of range, a transform does not run on devices, or the pad does not fit a field.
        SchemaError: A field is not an array of numbers, or has a name that batches need.
        MissingFieldError: ``slices`` is given, and no field of the rows marks the ends of episodes.
        MouseError: An error of a transform; transforms are traced once for a batch of such rows.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from mouse_jax import device
        >>> replay = device.init({"obs": jnp.zeros(4), "reward": 0.0}, 100, batch_size=8)
        >>> replay = device.add(replay, {"obs": jnp.ones((3, 4)), "reward": jnp.ones(3)})
        >>> jax.jit(device.sample)(replay, 0)["obs"].shape
        (8, 4)
    """
    beta, row = None if priorities is None else priorities.beta, _row(as_dicts(example))
    layout = Layout.of(
        row, capacity, batch_size, num_envs, slices, transform, alignment, priorities, order, sampler, memory
    )
    if memory == "host" and isinstance(seed, jax.core.Tracer):
        raise ConfigError("memory: expected 'device' inside of jax.jit and jax.vmap, found 'host'")
    lead = (layout.steps,) if layout.num_envs is None else (layout.steps, layout.num_envs)

    with jax.default_device(host()) if memory == "host" else nullcontext():
        rows, cursor, size = jax.tree.map(lambda leaf: _new(lead, leaf), row), jnp.int32(0), jnp.int32(0)
        state = layout.sampler.init(JAX, Ring(cursor, size, layout.steps, layout.num_envs))
        exponent = None if beta is None else jnp.asarray(beta(0) if callable(beta) else beta, jnp.float32)
        made = Replay(rows, cursor, size, seed_halves(seed), state, exponent, layout)
    check_transform(made)
    return cast("Replay", put_on_host(made)) if memory == "host" else made


def add(replay: Replay, rows: Any) -> Replay:
    """Return the replay with rows added behind the newest; if the replay is full, they overwrite the oldest.

    Rows are written in place if the function is compiled with the replay donated,
    ``jax.jit(device.add, donate_argnums=0)``, and in a compiled loop, such as ``jax.lax.scan``.

    Args:
        replay: A replay.
        rows: One row like ``example``, or several, ``[n, ...]`` in every field; with environments one time step,
            ``[env, ...]``, or several, ``[time, env, ...]``.

    Raises:
        SchemaError: Fields, shapes or dtypes differ from the example.
        DataError: A 64-bit number of NumPy does not fit the field.
        ConfigError: ``rows`` has more rows than fit.
    """
    check_one(replay, "add")
    rows, count = accepted(replay, rows)
    if not count:
        return replay
    if on_host(replay):
        return cast("Replay", _written_in_place(replay, put_on_host(rows)))
    return cast("Replay", _written_anew(replay, jax.tree.map(jnp.asarray, rows)))


def _written(replay: Replay, rows: Any) -> Replay:
    """Return the replay with checked rows, which have a leading axis of time."""
    layout, count = replay.layout, len(jax.tree.leaves(rows)[0])
    # Unchanged parts of the state are left out of the loop's carry, because the loop would copy them.
    changed = _noted_parts(replay, rows)
    note = _note_few if (layout.num_envs or 1) == 1 and count <= _FEW else _note
    parts = {part: replay.state[part] for part in changed}
    state = replay.state | note(parts, lax.stop_gradient(rows), replay.cursor, layout)
    places = JAX.places(replay.cursor, count, layout.steps)
    memory = jax.tree.map(lambda memory, more: JAX.write(memory, places, more), replay.rows, rows)
    ring = replay.ring.after(JAX, count)
    state = layout.sampler.settle(JAX, state, count, ring)
    return replace(replay, rows=memory, cursor=ring.cursor, size=ring.size, state=state)


def _noted_parts(replay: Replay, rows: Any) -> list[str]:
    """Return the parts of the sampler's state that change before rows are written."""
    changed: list[str] = []

    def look(state: Any, rows: Any) -> None:
        after = _note(state, rows, jnp.int32(0), replay.layout)
        changed.extend(part for part in after if after[part] is not state[part])

    jax.eval_shape(look, replay.state, rows)
    return changed


def _note(state: Any, rows: Any, cursor: jax.Array, layout: Layout) -> Any:
    """Return the state of the sampler before rows are written from the cursor on."""
    ring, count = Ring(cursor, None, layout.steps, layout.num_envs), len(jax.tree.leaves(rows)[0])
    return layout.sampler.extend(JAX, state, flatten(rows), count, ring)


def _note_few(state: Any, rows: Any, cursor: jax.Array, layout: Layout) -> Any:
    """Run ``_note`` row by row on a CPU, in a loop that is compiled to one kernel; several kernels take far longer."""

    def one(*given: Any) -> Any:
        one_by_one, at_once = (partial(note, layout=layout) for note in (_note_one_by_one, _note))
        return lax.platform_dependent(*given, cpu=one_by_one, default=at_once)

    def each(size: int, batched: Sequence[Any], *given: Any) -> tuple[Any, Any]:
        """Map ``_note`` over many replays: with a cursor for each replay, a loop would scatter every single row."""
        axes = jax.tree.map(lambda has: 0 if has else None, tuple(batched))
        made = jax.vmap(partial(_note, layout=layout), in_axes=axes, axis_size=size)(*given)
        return made, jax.tree.map(lambda _: True, made)

    note = jax.custom_batching.custom_vmap(one)
    note.def_vmap(each)
    return note(state, rows, cursor) if state else state


def _note_one_by_one(state: Any, rows: Any, cursor: jax.Array, layout: Layout) -> Any:
    steps, count = layout.steps, len(jax.tree.leaves(rows)[0])

    def write(number: Any, state: Any) -> Any:
        row = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, number, 1), rows)
        place = cursor + number
        return _note(state, row, jnp.where(place >= steps, place - steps, place), layout)

    # Within shard_map, the initial carry of a loop must vary over shards like its result; processing a first row
    # ensures this.
    looked = jax.make_jaxpr(write)(0, state)
    first = looked.in_avals[1:] != looked.out_avals
    # XLA would unroll a loop of one row.
    behind = jnp.where(cursor < steps, count, 0) if count == 1 else count
    return lax.fori_loop(int(first), behind, write, write(0, state) if first else state)


_written_anew = jax.jit(_written)
_written_in_place = jax.jit(_written, donate_argnums=0)


def can_add(replay: Replay, time_steps: Any = 1) -> jax.Array:
    """Return whether ``time_steps`` more steps fit without overwriting queued rows that ``take`` has not returned.

    The result is bool ``[]``. Without a queue, time steps always fit.
    """
    layout = replay.layout
    waiting = layout.sampler.waiting(JAX, replay.state, replay.ring)
    return jnp.asarray(waiting + jnp.asarray(time_steps) * (layout.num_envs or 1) <= layout.capacity)


def _row(example: Any) -> Any:
    """Return the shapes and dtypes of one row; raise SchemaError if a value is not an array of numbers."""
    fields = {key: _shape_dtype(key, leaf) for key, leaf in flatten(example).items()}
    return unflatten(structure_of(example), fields)


def _shape_dtype(key: FieldKey, leaf: Any) -> jax.ShapeDtypeStruct:
    weak = not hasattr(leaf, "dtype")
    leaf = np.asarray(leaf) if weak else leaf
    if not (is_key(leaf.dtype) or any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_))):
        raise SchemaError(f"init: field {key!r}: expected an array of numbers, found {leaf.dtype}")
    leaf = jnp.asarray(leaf) if weak else leaf
    dtype = leaf.dtype if is_key(leaf.dtype) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    made: Any = jax.ShapeDtypeStruct
    return cast("jax.ShapeDtypeStruct", made(leaf.shape, dtype))


def _new(lead: tuple[int, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    shape = (*lead, *leaf.shape)
    if is_key(leaf.dtype):
        implementation = jax.random.key_impl(jnp.empty((0,), leaf.dtype))
        return jnp.broadcast_to(jax.random.key(0, impl=implementation), shape)
    return jnp.zeros(shape, leaf.dtype)


def accepted(replay: Replay, rows: Any) -> tuple[Any, int]:
    """Return rows as arrays with a leading axis of time (without converting NumPy arrays), and the number of steps."""
    layout, held, given = replay.layout, flatten(replay.rows), flatten(narrowed(as_dicts(rows)))
    if given.keys() != held.keys():
        given = flatten(narrowed(as_dicts(rows, lists_of(structure_of(replay.rows)))))
    weak = {key for key, leaf in given.items() if not hasattr(leaf, "dtype")}
    arrays: dict[FieldKey, Any] = {
        # NumPy's int4 is accepted as well
        key: leaf
        if isinstance(leaf, jax.Array) or type(leaf) is np.ndarray
        else as_array(leaf, where=f"add: field {key!r}")
        for key, leaf in given.items()
    }

    def fits(key: FieldKey, dtype: Any) -> bool:
        found = arrays[key].dtype
        return bool(found == dtype or (key in weak and np.can_cast(found, dtype, "same_kind")))

    kinds = {key: (memory.shape[1:], memory.dtype) for key, memory in held.items()}
    is_one, count = layout.check_rows("add", arrays, kinds, fits)
    for key, memory in held.items():
        leaf = arrays[key] if isinstance(arrays[key], jax.Array) else np.asarray(arrays[key], memory.dtype)
        arrays[key] = leaf[None] if is_one else leaf
    return unflatten(structure_of(replay.rows), arrays), count
