"""A replay as a pytree, and functions that create a replay, write rows, draw batches, and copy rows between a replay
and a buffer on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from os import PathLike
from types import EllipsisType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from mouse_core import ConfigError, SchemaError
from mouse_core.nested import (
    FieldKey,
    as_array,
    children_of,
    flatten,
    is_node,
    lists_of,
    rebuilt,
    structure_of,
    unflatten,
)
from mouse_core.randomness import Purpose
from mouse_core.replay import Priorities, ReplayBuffer, Schedule
from mouse_core.replay.device import DeviceSampler, DrawKey, Layout, Order, Ring, Slices, moving
from mouse_core.replay.device.ensemble import draw_members
from mouse_core.replay.device.samplers import ByPriority, check_left, priorities_of
from mouse_core.replay.ensemble import shares_of
from mouse_core.spec import Alignment, check_count
from mouse_jax import _philox
from mouse_jax.device.arrays import JAX
from mouse_jax.dtypes import are_known, as_key, is_key, seed_halves
from mouse_jax.trees import narrowed

_MEMBERS = 1 << 63  # call number of the keys for the seeds of members, as on the host


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replay:
    """A replay, the pytree that the functions of this package take and return.

    Args:
        rows: A tree of arrays ``[T, ...]``, or ``[T, E, ...]`` with environments.
        cursor: The position of the time step that is written next, int32 ``[]``.
        size: The number of stored time steps, int32 ``[]``.
        seed: The halves of the seed, uint32 ``[2]``, high first.
        state: The state of the sampler: arrays by name.
        beta: The exponent of importance weights, float32 ``[]``; a schedule overrides this value. None if the replay
            has no priorities.
        layout: The constants, which are static in ``jax.jit``.
    """

    rows: Any
    cursor: jax.Array
    size: jax.Array
    seed: jax.Array
    state: dict[str, Any]
    beta: jax.Array | None
    layout: Layout = field(metadata={"static": True})

    @property
    def ring(self) -> Ring:
        """The ring of the rows."""
        return Ring(self.cursor, self.size, self.layout.steps, self.layout.num_envs)


def as_dicts(tree: Any, lists: Collection[Any] = (), path: tuple[str | int, ...] = ()) -> Any:
    """Convert a tree to the types that buffers on the host accept: dataclasses become dicts, and lists of numbers
    become arrays.

    Args:
        tree: The rows.
        lists: The paths of lists that are not converted to arrays, even if they contain numbers.
        path: The path of ``tree`` in the row.
    """
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {one.name: getattr(tree, one.name) for one in fields(tree)}
    if is_node(tree) or path in lists:
        return rebuilt(tree, [as_dicts(child, lists, (*path, name)) for name, child in children_of(tree)])
    if isinstance(tree, list):
        traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
        return jnp.asarray(tree) if traced else as_array(tree, where="rows")
    return tree


def _check_one(replay: Replay, caller: str, *, traced: bool = True) -> None:
    """Raise ConfigError if ``replay`` consists of several replays and the call is not inside of ``jax.vmap``. If
    ``traced`` is False, also raise ConfigError if the replay is traced, as in ``jax.jit``.
    """
    if not traced and not are_known(replay.size, anywhere=True):
        raise ConfigError(f"{caller}: expected a replay outside of jax.jit, found a traced replay")
    if replay.cursor.ndim:
        raise ConfigError(
            f"{caller}: expected one replay, found {replay.cursor.shape[0]} replays; call the function inside of "
            "jax.vmap, or with one replay: jax.tree.map(lambda leaf: leaf[0], replay)"
        )


# ------------------------------------------------------------------ writing


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
    seed: int | jax.Array = 0,
) -> Replay:
    """Create an empty replay.

    Args:
        example: One row: a pytree of arrays or numbers of any shape and dtype (including JAX's random keys), or of
            ``jax.ShapeDtypeStruct``. Only the shapes and dtypes are used. Dataclasses become dicts.
        capacity: The largest number of rows in memory, over all time steps and environments; in a full replay, new rows
            overwrite the oldest rows.
        batch_size: The default number of rows or slices in a batch, B.
        num_envs: Number of environments, whose rows are written side by side, ``[time, env]``; each environment is a
            stream. If ``num_envs`` is None, all rows are one stream, ``[n, ...]`` in the order of time. Slices, and
            transforms that read the next rows, need this argument.
        slices: The options of slices, if batches consist of slices; None: batches consist of single rows.
        transform: Traceable functions that take and return a batch, applied in order: transforms of
            ``mouse_core.replay`` that draw no random numbers and read only the batch, such as ``NStep`` and
            ``NextView``, or your own functions.
        alignment: "outgoing" if the action, reward and done of a row follow the row's observation, "arrived" if they
            led to the row's observation.
        priorities: The options of priorities: each row is drawn in proportion to a power of its priority, or each slice
            in proportion to a power of its first row's priority, as with a ``PrioritizedSampler`` or
            ``PrioritizedSliceSampler``. If ``priorities`` is None, all rows or slices are equally likely. New rows have
            the largest priority so far, at least 1; ``set_priorities`` changes priorities. ``beta`` is a number, which
            can be traced, or a function that takes the index of the sample; see ``sample``. Priorities can be used only
            with the order "random".
        order: The order in which rows are drawn. "random": rows are drawn with replacement. "epochs": every row is
            drawn once per epoch, shuffled; slices do not overlap. "queue": every row is drawn once, the oldest first.
            With "epochs" and "queue", ``take`` returns the next batch.
        sampler: A custom sampler in place of ``priorities`` and ``order``: an instance of a subclass of
            ``mouse_core.replay.device.DeviceSampler``, whose ``units`` are set to the rows or slices of the replay.
        seed: An integer in ``[0, 2**64)``, or a random key of JAX, from which 64 bits are drawn. The seed may be
            traced, so ``jax.vmap`` can create a replay for each of many seeds.

    Returns:
        A pytree with memory for ``capacity`` rows.

    Raises:
        ConfigError: An argument is out of range, a transform cannot run on a device, or the dtype of a field cannot
            represent the pad.
        SchemaError: A field is not an array of numbers, or has the name of a field that the replay adds to batches.
        MissingFieldError: Batches consist of slices, and no field of the rows marks the ends of episodes.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from mouse_jax import device
        >>> replay = device.init({"obs": jnp.zeros(4), "reward": 0.0}, 100, batch_size=8, num_envs=None)
        >>> replay = device.add(replay, {"obs": jnp.ones((3, 4)), "reward": jnp.ones(3)})
        >>> jax.jit(device.sample)(replay, 0)["obs"].shape
        (8, 4)
    """
    beta, row = None if priorities is None else priorities.beta, _row(as_dicts(example))
    layout = Layout.of(row, capacity, batch_size, num_envs, slices, transform, alignment, priorities, order, sampler)
    lead = (layout.steps,) if layout.num_envs is None else (layout.steps, layout.num_envs)
    rows, cursor, size = jax.tree.map(lambda leaf: _new(lead, leaf), row), jnp.int32(0), jnp.int32(0)
    state = layout.sampler.init(JAX, Ring(cursor, size, layout.steps, layout.num_envs))
    exponent = None if beta is None else jnp.asarray(beta(0) if callable(beta) else beta, jnp.float32)
    return Replay(rows, cursor, size, seed_halves(seed), state, exponent, layout)


def add(replay: Replay, rows: Any) -> Replay:
    """Return the replay with rows added after the newest row; in a full replay, the new rows overwrite the oldest rows.

    Rows are written in place in two cases: if the function is compiled with the replay donated, ``jax.jit(device.add,
    donate_argnums=0)``, or in a compiled loop, such as ``jax.lax.scan``.

    Args:
        replay: A replay.
        rows: One row like ``example``, or several rows, ``[n, ...]`` in every field. With ``num_envs``, ``rows`` are
            one time step, ``[env, ...]``, or several time steps, ``[time, env, ...]``.

    Raises:
        SchemaError: Fields, shapes or dtypes differ from the example.
        DataError: The dtype of a field cannot represent a 64-bit number of NumPy.
        ConfigError: ``rows`` has more rows than the capacity.
    """
    _check_one(replay, "add")
    rows, count = _accepted(replay, rows)
    if not count:
        return replay
    return cast("Replay", _written(replay, jax.tree.map(jnp.asarray, rows)))


@jax.jit
def _written(replay: Replay, rows: Any) -> Replay:
    """Return the replay after a write of checked rows; the rows have a leading axis of time."""
    sampler, count = replay.layout.sampler, len(jax.tree.leaves(rows)[0])
    read = flatten(lax.stop_gradient(rows)).__getitem__
    state = sampler.units.extend(JAX, replay.state, read, count, replay.ring)
    places = JAX.places(replay.cursor, count, replay.layout.steps)
    memory = jax.tree.map(lambda memory, more: JAX.write(memory, places, more), replay.rows, rows)
    ring = replay.ring.after(JAX, count)
    state = sampler.settle(JAX, state, read, count, ring)
    return replace(replay, rows=memory, cursor=ring.cursor, size=ring.size, state=state)


def can_add(replay: Replay, time_steps: Any = 1) -> jax.Array:
    """Return whether ``time_steps`` more steps fit without overwriting queued rows that ``take`` has not returned.

    The result is bool ``[]``. Without a queue, time steps always fit.
    """
    layout = replay.layout
    waiting = layout.sampler.waiting(JAX, replay.state, replay.ring)
    return jnp.asarray(waiting + jnp.asarray(time_steps) * (layout.num_envs or 1) <= layout.capacity)


def _row(example: Any) -> Any:
    """Return the shapes and dtypes of one row; raise SchemaError if a value is not an array of numbers."""
    fields: dict[FieldKey, Any] = {}
    for key, leaf in flatten(example).items():
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.prng_key)):
            raise SchemaError(f"init: field {key!r}: expected an array of numbers, found {dtype}")
        fields[key] = jax.eval_shape(jnp.asarray, leaf)
    return unflatten(structure_of(example), fields)


def _new(lead: tuple[int, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    shape = (*lead, *leaf.shape)
    if is_key(leaf.dtype):
        implementation = jax.random.key_impl(jnp.empty((0,), leaf.dtype))
        return jnp.broadcast_to(jax.random.key(0, impl=implementation), shape)
    return jnp.zeros(shape, leaf.dtype)


def _accepted(replay: Replay, rows: Any) -> tuple[Any, int]:
    """Return rows as arrays with a leading axis of time, and the number of time steps. NumPy arrays are not
    converted.
    """
    layout, held, structure = replay.layout, flatten(replay.rows), structure_of(replay.rows)
    given = flatten(narrowed(as_dicts(rows, lists_of(structure))))
    weak = {key for key, leaf in given.items() if not hasattr(leaf, "dtype")}
    arrays: dict[FieldKey, Any] = {
        # NumPy's int4 is accepted as well
        key: leaf
        if isinstance(leaf, jax.Array) or type(leaf) is np.ndarray
        else as_array(leaf, where=f"add: field {key!r}")
        for key, leaf in given.items()
    }
    kinds = {key: (memory.shape[1:], memory.dtype) for key, memory in held.items()}
    is_one, count = layout.check_rows("add", arrays, kinds, weak, partial(np.can_cast, casting="same_kind"))
    for key, memory in held.items():
        leaf = arrays[key] if isinstance(arrays[key], jax.Array) else np.asarray(arrays[key], memory.dtype)
        arrays[key] = leaf[None] if is_one else leaf
    return unflatten(structure, arrays), count


# ------------------------------------------------------------------ drawing


def can_sample(replay: Replay, min_length: Any = 1) -> jax.Array:
    """Return whether a batch can be drawn and the replay has ``min_length`` rows: bool ``[]``.

    A batch needs one row or slice; in the orders "epochs" and "queue", a batch needs ``batch_size`` rows or slices.
    """
    enough = _left(replay) >= replay.layout.sampler.fewest(replay.layout.batch_size)
    return cast("jax.Array", (replay.ring.rows >= min_length) & enough)


@jax.jit
def _left(replay: Replay) -> jax.Array:
    return cast("jax.Array", replay.layout.sampler.left(JAX, replay.state, replay.ring))


def sample(replay: Replay, index: Any, batch_size: int | None = None, *, beta: Any = None) -> dict[str, Any]:
    """Return the batch with index ``index``. The batch depends only on the seed, the index and the writes.

    The sample with this index of a ``mouse_core.replay.ReplayBuffer`` on the host has the same rows if the seed and the
    writes are the same. The buffer's sampler must be a ``RandomSampler`` or ``SliceSampler``, or, for a replay with
    priorities, a ``PrioritizedSampler`` or ``PrioritizedSliceSampler``.

    Args:
        replay: A replay with rows. Under ``jax.jit`` an empty replay raises no error; use ``can_sample``.
        index: The index of the sample, ``0 <= index < 2**32``, which can be traced; or a random key of JAX. A draw with
            a random key cannot be repeated by a buffer on the host.
        batch_size: Number of rows or slices in the batch, B; by default the batch size of the replay.
        beta: The exponent of ``priority_weight``: a number of at least 0, which can be traced, or a traceable function
            that takes the index of the sample, such as a ``LinearSchedule``; by default the exponent of the replay.

    Returns:
        ``{field: [B, ...]}``, or ``[B, S, ...]`` for slices, nested like the rows, after the transforms; also
        ``index``, int32, the slots of the rows. With priorities, ``priority_weight``, float32 of the same shape, is
        ``(p_i / p_min) ** -beta`` with a relative error of up to ``1e-5``. Slices also have ``traj_id`` (unless the
        rows have a field of this name), and ``mask`` if slices are padded. If rows are not dicts, the field ``data``
        contains the rows.

    Raises:
        ConfigError: A number is out of range, or no batch can be drawn (checked only if the replay is on the CPU and
            not traced).
        SchemaError, MissingFieldError: Raised by a transform.
    """
    layout = replay.layout
    size = layout.batch_size if batch_size is None else check_count("batch_size", batch_size)
    if layout.sampler.order != "random":
        raise ConfigError(
            f"sample: expected order='random', found {layout.sampler.order!r}; to draw the next batch, call take"
        )
    _check(replay, "sample")
    if beta is not None and replay.beta is None:
        raise ConfigError(f"beta: expected None, because this replay has no priorities, found {beta!r}")
    beta = layout.schedule if beta is None else beta
    number = _checked_index(index, "the schedule depends on it" if callable(beta) else "")
    if callable(beta):
        beta = beta(number)
    return cast("dict[str, Any]", _drawn(replay, number, beta, size=size)[1])


def take(replay: Replay, index: Any = 0) -> tuple[Replay, dict[str, Any]]:
    """Draw the next batch of a replay with the order "epochs" or "queue"; return the replay after the draw, and the
    batch.

    The batch equals the batch of a ``mouse_core.replay.ReplayBuffer`` with the corresponding sampler. For
    ``order="epochs"``, this sampler is ``SamplerWithoutReplacement(drop_last=True)``: an epoch ends when too few rows
    are left for a batch, or when the number of rows changes. For slices, the sampler is
    ``SliceSamplerWithoutReplacement(drop_last=True)``, and an epoch also ends with every write. For ``order="queue"``,
    the sampler is ``ConsumingSampler(shuffle=False, drop_last=True)``: the batch contains the oldest rows that were not
    returned yet. If the replay has ``num_envs``, the rows of a queue are ordered by time step, so ``reshape(-1,
    num_envs, ...)`` gives the shape ``[time, env, ...]``; see ``can_add``. With ``order="random"``, the batch equals
    the result of ``sample``, and the replay is unchanged.

    Args:
        replay: A replay with enough rows for a batch. Under ``jax.jit`` too few rows raise no error; use
            ``can_sample``. A queue with too few rows is unchanged.
        index: The index of the sample, as in ``sample``. With the order "queue" the index is ignored; with "epochs" the
            index cannot be a random key.

    Returns:
        The replay, and a batch as in ``sample``.

    Raises:
        ConfigError: A number is out of range, or the replay has too few rows (checked only if the replay is on the CPU
            and not traced).
        SchemaError, MissingFieldError: Raised by a transform.
    """
    if replay.layout.sampler.order == "random":
        return replay, sample(replay, index)
    _check(replay, "take")
    number = _checked_index(index, "each row is drawn once")
    state, batch = _drawn(replay, number, None, size=replay.layout.batch_size)
    return replace(replay, state={**replay.state, **state}), batch


@partial(jax.jit, static_argnames="size")
def _drawn(replay: Replay, number: jax.Array, beta: Any, size: int) -> tuple[Any, dict[str, Any]]:
    layout = replay.layout
    number = number if is_key(number.dtype) else number.astype(jnp.uint32)
    state, plan = layout.sampler.draw(JAX, replay.state, replay.ring, DrawKey(replay.seed, number), size)
    # XLA would repeat a division for each value of each field, so the places are computed once.
    places = (plan.read,) if layout.num_envs is None else JAX.once(replay.ring.split(plan.read))
    rows = jax.tree.map(lambda memory: memory.at[places].get(mode="promise_in_bounds"), replay.rows)
    exponent = replay.beta if beta is None else jnp.asarray(beta, jnp.float32)
    batch = plan.batch(JAX, rows, exponent)
    # Unchanged arrays are not returned, because XLA would copy them.
    changed = {name: array for name, array in state.items() if array is not replay.state[name]}
    return changed, batch if layout.transform is None else layout.transform(batch)


def _check(replay: Replay, caller: str) -> None:
    """Raise ConfigError if no batch can be drawn. Do nothing if values are traced."""
    _check_one(replay, caller)
    layout, nothing = replay.layout, cast("Any", None)
    asked = replace(replay, rows=nothing, seed=nothing)  # not needed for the check, and possibly traced
    if are_known(*jax.tree.leaves(asked)):
        with jax.ensure_compile_time_eval():
            check_left(layout.sampler, int(_left(asked)), layout.batch_size, int(replay.size), caller)


def _checked_index(index: Any, reason: str = "") -> jax.Array:
    """Check the index of a sample, and return it; a random key is returned unchanged. With a ``reason``, a random key
    raises ConfigError.
    """
    if not hasattr(index, "dtype") or isinstance(index, np.generic):
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < 1 << 32:
            raise ConfigError(f"index: expected an integer in [0, 2**32) or a random key, found {index!r:.60}")
        return jnp.asarray(index, jnp.uint32)
    number = as_key(jnp.asarray(index))
    if number.ndim or not (is_key(number.dtype) or jnp.issubdtype(number.dtype, jnp.integer)):
        raise ConfigError(f"index: expected an integer or a random key, found {number.dtype} {list(number.shape)}")
    if reason and is_key(number.dtype):
        raise ConfigError(f"index: expected an integer, since {reason}, found a random key")
    if not is_key(number.dtype) and are_known(number) and (known := int(np.asarray(number))) < 0:
        raise ConfigError(f"index: expected an integer in [0, 2**32), found {known}")
    return number


def set_priorities(replay: Replay, indices: Any, priorities: Any) -> Replay:
    """Return the replay with new priorities of some rows; if a row occurs twice, its last priority counts.

    The replay then draws the same rows as a ``mouse_core.replay.ReplayBuffer`` after ``update_priority`` with the same
    arguments. If the function is compiled with the replay donated, the call copies no part of the replay.

    Args:
        replay: A replay that ``init`` created with ``priorities``.
        indices: The slots of the rows, integers of any shape, as in the field ``index`` of a batch. Under ``jax.jit``,
            unused slots are ignored. Negative slots are always ignored, so ``jnp.where(batch["mask"], batch["index"],
            -1)`` leaves out padded steps.
        priorities: Numbers of at least 0, converted to float32, in the shape of ``indices`` (further axes of length 1
            are allowed); or one number for each slice, ``[B]`` or ``[B, 1]``. Under ``jax.jit`` no error is raised:
            negative priorities and NaN are ignored, and too large priorities get the largest possible weight.

    Raises:
        ConfigError: The replay has no priorities, shapes do not match, or indices are not integers.
        DataError, IndexError: See ``ReplayBuffer.update_priority``; raised only if all values are on the CPU and not
            traced. Negative indices are ignored.
    """
    _check_one(replay, "set_priorities")
    given = (
        jnp.asarray(values if isinstance(values, jax.Array) else as_array(values, where="set_priorities"))
        for values in (indices, priorities)
    )
    sampler, slots, values = priorities_of(JAX, replay.layout.sampler, *given)
    if are_known(slots, values, replay.size):
        sampler.check_update(np.asarray(slots), np.asarray(values), int(replay.ring.rows))
    if not slots.size:
        return replay
    return cast("Replay", _set(replay, slots, values))


@jax.jit
def _set(replay: Replay, slots: jax.Array, values: jax.Array) -> Replay:
    sampler = cast("ByPriority", replay.layout.sampler)
    return replace(replay, state=sampler.tree.update(JAX, replay.state, replay.ring.rows, slots, values))


def sample_ensemble(
    replays: Sequence[Replay],
    index: Any,
    batch_size: int,
    *,
    p: Sequence[float] | npt.NDArray[Any] | Schedule | None = None,
    seed: int | jax.Array = 0,
) -> dict[str, Any]:
    """Return the batch with index ``index`` from several replays (the members); each member provides a share of the
    batch.

    The batch equals the batch of a ``mouse_core.replay.ReplayBufferEnsemble`` with the same seed over buffers with the
    same rows. The batches are equal only if no other caller samples the buffers, and if each member with a weight above
    0 has at least one row in every batch. A member's share is its weight times the batch size, rounded up or down at
    random, so that the share is exact on average. The seeds of the members are derived from ``seed``, and the
    transforms of the members are applied.

    Args:
        replays: Replays with ``order="random"``; each replay must have rows, see ``can_sample``.
        index: The index of the sample, ``0 <= index < 2**32``, which can be traced; or a random key of JAX.
        batch_size: Number of rows or slices in the batch, B.
        p: A weight of at least 0 for each replay; by default all weights are equal. The weights of a ``Schedule``
            change with the index of the sample; ``index`` then must not be a random key.
        seed: An integer in ``[0, 2**64)``; can be traced.

    Returns:
        A batch as in ``sample``, with the rows of the members one after another. The field ``buffer_ids``, int32, is
        the index of each row's member. For rows of members without ``mask`` (or ``priority_weight``), the value of this
        field is True (or 1). If any member has ``mask`` or ``priority_weight``, every batch has this field, even if the
        member contributes no row.

    Raises:
        ConfigError: No replay is passed, weights are invalid, a number is out of range, or a replay cannot draw a batch
            (checked only if the replay is on the CPU and not traced).
        SchemaError: The fields of a member's batches differ from the fields of the first member's batches.
    """
    members, size = len(replays), check_count("batch_size", batch_size)
    if not members:
        raise ConfigError("replays: expected at least one, found none")
    is_scheduled = isinstance(p, Schedule) and len(p.weights) > 1
    number = _checked_index(index, "the schedule depends on it" if is_scheduled else "")
    keyed = is_key(number.dtype)
    shares = shares_of(p, members, size)
    halves = seed_halves(seed)
    own, *numbers = jax.random.split(number, members + 1) if keyed else [number] * (members + 1)

    def draw(member: int) -> dict[str, Any]:
        word = _philox.words(halves, Purpose.REPLAY, jnp.uint32(member), 1, call=_MEMBERS)
        replay = replace(replays[member], seed=_philox.halves_of(word))
        return sample(replay, numbers[member], shares.most[member])

    return draw_members(JAX, shares, DrawKey(halves, own), jnp.uint32(0) if keyed else number, size, draw)


# ------------------------------------------------------------------ to and from the host


def dumps(replay: Replay, path: str | PathLike[str], *, samples: int = 0) -> None:
    """Save a replay to a file, like ``to_host(replay, samples=samples).dumps(path)``."""
    to_host(replay, samples=samples).dumps(path)


def loads(replay: Replay, path: str | PathLike[str]) -> tuple[Replay, int]:
    """Return a replay with the rows of a file, and the index of the next sample; ``replay`` is an empty replay with the
    same options as the saved replay or buffer.
    """
    buffer = to_host(replay)
    buffer.loads(path)
    return from_host(replay, buffer), buffer.stats()["samples"]


def to_host(replay: Replay, *, samples: int = 0) -> ReplayBuffer:
    """Return a buffer on the host with all rows, the same options and the same draws.

    Each row keeps its slot, and the buffer gets the replay's seed. The trajectory numbers of episodes (``traj_id``) can
    change. The buffer's ``dumps`` saves a file, which the buffer of an empty replay loads; see ``from_host``.

    Args:
        replay: A replay that is not traced. If ``replay`` consists of several replays (of many seeds), select one of
            them, for example the fourth: ``jax.tree.map(lambda leaf: leaf[3], replay)``.
        samples: The index of the buffer's next sample.

    Raises:
        ConfigError: ``replay`` consists of several replays, or is traced.
        TypeError, SchemaError: NumPy lacks the dtype of a field, for example of random keys.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> from mouse_jax import device
        >>> path = os.path.join(tempfile.mkdtemp(), "replay.mouse")
        >>> empty = device.init({"x": 0.0}, 10, batch_size=4, num_envs=None)
        >>> device.to_host(device.add(empty, {"x": jnp.ones(3)}), samples=17).dumps(path)
        >>> buffer = device.to_host(empty)
        >>> buffer.loads(path)
        >>> restored = device.from_host(empty, buffer)
        >>> int(restored.size), buffer.stats()["samples"]
        (3, 17)
    """
    _check_one(replay, "to_host", traced=False)
    check_count("samples", samples, 0)
    high, low = replay.seed.tolist()
    rows = jax.tree.map(np.asarray, replay.rows)
    beta = None if replay.beta is None else replay.layout.schedule or float(replay.beta)
    return moving.to_host(replay.layout, JAX, replay.state, replay.ring, rows, beta, high << 32 | low, samples)


def from_host(replay: Replay, buffer: ReplayBuffer) -> Replay:
    """Return the replay with all rows of a buffer; the replay then draws the same samples as the buffer.

    Each row keeps its slot, and the replay gets the buffer's seed; ``buffer.stats()["samples"]`` is the index of the
    buffer's next sample. The trajectory numbers of episodes (``traj_id``) can change.

    Args:
        replay: An empty replay that is not traced; its sampler and transforms are not changed.
        buffer: A buffer of any package, with the same capacity. If the replay has ``num_envs``, the storage of the
            buffer has ``ndim=2``. ``to_host`` of an empty replay returns such a buffer.

    Raises:
        ConfigError: The replay is not empty, has another capacity, consists of several replays, or is traced; or the
            buffer's rows are not in the order of writing.
        SchemaError, DataError: The rows cannot be written to the replay; see ``add``.
    """
    _check_one(replay, "from_host", traced=False)
    seed = seed_halves(buffer.seed)
    ring, rows = moving.rows_from_host(replay.ring, buffer)
    made = replace(replay, cursor=jnp.int32(ring.cursor), size=jnp.int32(ring.size), seed=seed)
    if not ring.size:
        return made
    rows, _ = _accepted(replay, rows)
    read = {key: np.asarray(leaf) for key, leaf in flatten(rows).items()}.__getitem__
    places = JAX.places(jnp.int32(ring.cursor - ring.size), ring.size, ring.steps)
    memory = jax.tree.map(lambda memory, more: JAX.write(memory, places, jnp.asarray(more)), replay.rows, rows)
    state = moving.state_from_host(replay.layout.sampler, JAX, replay.state, ring, read, buffer, seed)
    return replace(made, rows=memory, state=state)
