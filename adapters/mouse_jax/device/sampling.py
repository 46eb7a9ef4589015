"""Drawing batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mouse_core import ConfigError
from mouse_core.randomness import Purpose
from mouse_core.spec import check_count
from mouse_jax import _philox
from mouse_jax._rollout import are_known
from mouse_jax.device import _episodes, _turns, priorities
from mouse_jax.device.ground import hosting, sum_tree
from mouse_jax.device.ground.state import Episodes, Queue, Replay, check_one, named
from mouse_jax.device.ground.sum_tree import Weights
from mouse_jax.dtypes import as_key, is_key

_once: Callable[[Any], Any] = lax.optimization_barrier
"""What is done for each slice is not done anew for each of its steps, nor that for each value of each field."""


def taken(rows: Any, *places: jax.Array) -> Any:
    """Rows in some places, which are all there: a tree of ``[*places, ...]``.

    Args:
        rows: A tree of arrays ``[T, ...]``, or ``[T, E, ...]``.
        places: Their time steps, and of ``[T, E, ...]`` their environments, int32 of one shape.
    """
    return jax.tree.map(lambda memory: memory.at[places].get(mode="promise_in_bounds"), rows)


def taken_slices(replay: Replay, known: Episodes, windows: _episodes.Windows) -> tuple[Any, dict[str, jax.Array]]:
    """The rows of some slices, and what batches have beside them."""
    layout, marks, pad, size = replay.layout, known.marks, known.slices.pad, known.slices.sequence_length
    start, env = _once(windows.start), windows.env[:, None]
    row = start[:, None] + jnp.arange(size, dtype=jnp.int32)
    envs, one_stream = layout.num_envs or 1, layout.num_envs is None
    numbers, of_slice = known.numbers[:, 0] if one_stream else known.numbers, () if one_stream else (env,)

    def read(rows: Any) -> Any:
        """Gather rows from the first row of each slice on; values behind the newest row are undefined."""
        places = row if pad is False else jnp.minimum(row, replay.size - 1)
        return taken(rows, _once(_episodes.slots(replay, places)), *of_slice)

    if pad is False:
        rows, number = read(replay.rows), taken(numbers, _episodes.slots(replay, start[:, None]), *of_slice)
        added = {"index": _episodes.slots(replay, row) * envs + env}
    else:
        rows, number = read(replay.rows), read(numbers)
        # Those of an episode have its number, as long as they are there.
        mask = (number == number[:, :1]) & (row < replay.size)
        last = start[:, None] + _once(mask.sum(1, dtype=jnp.int32))[:, None] - 1
        added = {"index": _episodes.slots(replay, jnp.minimum(row, last)) * envs + env, "mask": mask}
        nearest = replay.rows if pad is not True else taken(replay.rows, _episodes.slots(replay, last), *of_slice)
        rows = jax.tree.map(lambda leaf, other: _filled(leaf, mask, other, pad), rows, nearest)
    if marks.numbers and marks.ids is not None:
        ids = named(replay.rows)[marks.ids]
        traj_id = taken(ids, _episodes.slots(replay, start[:, None]), *of_slice).reshape(-1, 1)
    else:
        # As many environments apart as there are, so that no two episodes have one number.
        traj_id = (number[:, :1] - 1).astype(jnp.int32) * envs + env
    return rows, added | {"traj_id": jnp.broadcast_to(traj_id, row.shape)}


def _filled(leaf: jax.Array, mask: jax.Array, nearest: jax.Array, pad: bool | float) -> jax.Array:
    """A field of slices, with the nearest step that is there or a number in those that are not."""
    flags = mask.reshape((*mask.shape, *[1] * (leaf.ndim - 2)))
    return jnp.where(flags, leaf, nearest if pad is True else jnp.asarray(pad, leaf.dtype))


def can_sample(replay: Replay, min_length: Any = 1) -> jax.Array:
    """Whether there is something to draw, bool ``[]``, and at least so many rows in all.

    That is a row or a slice; where each row comes once, a whole batch of them.
    """
    asked = _asked(replay), min_length
    if not are_known(*jax.tree.leaves(asked)):
        return cast("jax.Array", _ready(*asked))
    with jax.ensure_compile_time_eval():  # it may be known inside of jax.jit, too
        return cast("jax.Array", _ready(*asked))


def _asked(replay: Replay) -> Replay:
    """Return the part of a state that decides whether there is something to draw; rows and seed may be traced."""
    nothing: Any = None
    return replace(replay, rows=nothing, seed=nothing)


@jax.jit
def _ready(replay: Replay, min_length: Any) -> jax.Array:
    layout = replay.layout
    fewest = 1 if replay.turns is None else layout.batch_size
    ready: jax.Array = (replay.size * (layout.num_envs or 1) >= min_length) & (_left(replay) >= fewest)
    return ready if replay.weights is None else ready & sum_tree.there_are(replay.weights)


def _left(replay: Replay) -> jax.Array:
    """Number of rows or slices to draw; of a queue, of the rows not yet returned."""
    if isinstance(replay.turns, Queue):
        return replay.turns.left
    if replay.episodes is not None:
        return _episodes.table(replay, replay.episodes).ends[-1]
    return replay.size * (replay.layout.num_envs or 1)


def sample(replay: Replay, index: Any, batch_size: int | None = None, *, beta: Any = None) -> dict[str, Any]:
    """Batch number ``index``: the same rows for the same seed, number and writes, here and on the host.

    A ``mouse_core.replay.ReplayBuffer`` of the same seed and writes gives them as its sample of this number, with a
    ``RandomSampler`` or, for slices, a ``SliceSampler``; with priorities, a ``PrioritizedSampler`` or
    ``PrioritizedSliceSampler``.

    Args:
        replay: A replay with rows; under ``jax.jit``, where nobody can tell, see ``can_sample``.
        index: The number of the sample, from 0, below 2**32; may be traced. Or a random key of JAX, for draws that
            nothing on the host equals.
        batch_size: Rows or slices in the batch, B; by default that of the replay.
        beta: The exponent of ``priority_weight``, a number from 0 or a traced one, or a function from the number of the
            sample to one that can be traced, such as a ``LinearSchedule``; by default that of the replay.

    Returns:
        ``{field: [B, ...]}``, slices as ``[B, S, ...]``, nested as the rows are, and ``index``, int32: where the rows
        lie. With priorities there is ``priority_weight``, float32 of the same shape, ``(p_i / p_min) ** -beta`` to
        ``1e-5`` of it. Slices have ``traj_id``, where the rows have none themselves, and ``mask`` where they are
        padded. Rows that are no dict are the field ``data``. Transforms were applied.

    Raises:
        ConfigError: A number out of range; nothing to draw, where that is known.
        SchemaError, MissingFieldError: What transforms raise.
    """
    layout = replay.layout
    size = layout.batch_size if batch_size is None else check_count("batch_size", batch_size)
    if replay.turns is not None:
        order = "queue" if isinstance(replay.turns, Queue) else "epochs"
        raise ConfigError(f"sample: expected order='random', found {order!r}; take gives the next batch")
    _check(replay, "sample")
    if beta is not None and replay.weights is None:
        raise ConfigError(f"beta: expected a replay made with priorities=, found one without, and {beta!r}")
    number = checked_index(index)
    if beta is None and replay.weights is not None:
        beta = replay.weights.schedule
    if callable(beta):
        if is_key(number.dtype):
            raise ConfigError("index: expected the number of the sample, which the schedule needs, found a random key")
        beta = sum_tree.scheduled(beta, number)
    on_host, drawn_by = hosting.on_host(replay), (number, beta)
    batch: dict[str, Any] = _drawn(replay, *(hosting.to_host(drawn_by) if on_host else drawn_by), size=size)
    return cast("dict[str, Any]", hosting.to_device(batch)) if on_host else batch


def prefetch(
    replay: Replay, numbers: Iterable[Any], batch_size: int | None = None, *, depth: int = 2
) -> Iterator[dict[str, Any]]:
    """The batches of some numbers, in their order, of which the next ones are begun before one is asked for.

    So with ``memory="host"`` the host gathers and copies while the device computes. A replay there is used up by
    ``add``: write before or behind a round of batches.

    Args:
        replay: A replay, outside of ``jax.jit``.
        numbers: Of samples, as ``index`` of ``sample``, such as ``range(100, 150)``.
        batch_size: Rows or slices in a batch; by default that of the replay.
        depth: How many batches are begun ahead, from 1.

    Raises:
        ConfigError: A depth below 1; else see ``sample``.

    Example:
        >>> import jax.numpy as jnp
        >>> from mouse_jax import device
        >>> replay = device.init({"reward": 0.0}, 100, batch_size=4, memory="host")
        >>> replay = device.add(replay, {"reward": jnp.ones(10)})
        >>> sum(float(batch["reward"].sum()) for batch in device.prefetch(replay, range(3)))
        12.0
    """
    check_count("depth", depth)
    return _ahead(replay, numbers, batch_size, depth)


def _ahead(replay: Replay, numbers: Iterable[Any], batch_size: int | None, depth: int) -> Iterator[dict[str, Any]]:
    begun: deque[dict[str, Any]] = deque()
    for number in numbers:
        begun.append(sample(replay, number, batch_size))
        if len(begun) > depth:
            yield begun.popleft()
    yield from begun


def take(replay: Replay, index: Any = 0) -> tuple[Replay, dict[str, Any]]:
    """The next batch, and the replay after it: for rows of which each comes once.

    With ``order="epochs"`` it is that of a ``mouse_core.replay.ReplayBuffer`` with a
    ``SamplerWithoutReplacement(drop_last=True)``: an epoch ends where there are too few rows left for a batch, or where
    the number of rows changes. Of slices it is
    that with a ``SliceSamplerWithoutReplacement(drop_last=True)``, and an epoch ends with every write. With
    ``order="queue"`` it is that of a ``ConsumingSampler(shuffle=False,
    drop_last=True)``: the oldest rows that have not come yet, with environments time step by time step, so that
    ``reshape(-1, num_envs, ...)`` gives ``[time, env]``; see ``can_add``. With ``order="random"`` it is that of
    ``sample``, and the replay stays as it is.

    Args:
        replay: A replay with rows for a batch; under ``jax.jit``, where nobody can tell, see ``can_sample``. A queue
            with too few of them stays as it is.
        index: The number of the sample, as for ``sample``; a queue does not look at it. Epochs take no random key.

    Returns:
        The replay, and a batch as of ``sample``.

    Raises:
        ConfigError: A number out of range; too few rows, where that is known.
        SchemaError, MissingFieldError: What transforms raise.
    """
    if replay.turns is None:
        return replay, sample(replay, index)
    _check(replay, "take")
    number = checked_index(index)
    if is_key(number.dtype):
        raise ConfigError("index: expected an integer where each row comes once, found a random key")
    on_host = hosting.on_host(replay)
    turns, batch = _taken_turn(replay, hosting.to_host(number) if on_host else number)
    return replace(replay, turns=turns), hosting.to_device(batch) if on_host else batch


def _check(replay: Replay, caller: str) -> None:
    """ConfigError where it is known that there is nothing to draw."""
    check_one(replay, caller)
    if not are_known(*jax.tree.leaves(_asked(replay))) or bool(can_sample(replay)):
        return
    if replay.turns is not None:
        left, what = int(_left(_asked(replay))), "rows" if replay.episodes is None else "slices"
        each = f"{replay.layout.batch_size} {what} for a batch in which each comes once"
        raise ConfigError(f"{caller}: expected {each}, found {left}")
    known = replay.episodes
    what = "rows" if known is None else f"slices of {known.slices.sequence_length} steps in one episode"
    what += "" if replay.weights is None else " with a priority above 0"
    raise ConfigError(f"{caller}: expected {what}, found none among {int(replay.size)} time steps")


def checked_index(index: Any) -> jax.Array:
    """The number of a sample, or a key."""
    if not hasattr(index, "dtype") or isinstance(index, np.generic):
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < 1 << 32:
            raise ConfigError(f"index: expected an integer in [0, 2**32) or a random key, found {index!r:.60}")
        return jnp.asarray(index, jnp.uint32)
    number = as_key(jnp.asarray(index))
    if number.ndim or not (is_key(number.dtype) or jnp.issubdtype(number.dtype, jnp.integer)):
        raise ConfigError(f"index: expected an integer or a random key, found {number.dtype} {list(number.shape)}")
    if not is_key(number.dtype) and are_known(number) and (known := int(np.asarray(number))) < 0:
        raise ConfigError(f"index: expected an integer in [0, 2**32), found {known}")
    return number


def check_transform(replay: Replay) -> None:
    """Raise what transforms do when they are given a batch, of which nothing is computed."""
    if replay.layout.transform is not None:
        outline: Any = jax.ShapeDtypeStruct
        shapes = jax.tree.map(lambda leaf: outline(leaf.shape, leaf.dtype), replay)
        number, size = outline((), jnp.uint32), replay.layout.batch_size
        if replay.turns is None:
            jax.eval_shape(lambda replay, number: _drawn(replay, number, None, size=size), shapes, number)
        else:
            jax.eval_shape(_taken_turn, shapes, number)


@partial(jax.jit, static_argnames="size")
def _drawn(replay: Replay, index: jax.Array, beta: Any, size: int) -> dict[str, Any]:
    if replay.weights is not None:
        return _weighted(replay, replay.weights, _words(replay, index, size), beta)
    found = None if replay.episodes is None else _episodes.table(replay, replay.episodes)
    return _made(replay, found, _random(replay, index, size, _count(replay, found)))


@jax.jit
def _taken_turn(replay: Replay, index: jax.Array) -> tuple[Any, dict[str, Any]]:
    found = None if replay.episodes is None else _episodes.table(replay, replay.episodes)
    turns, places = _turns.after(replay, index, _count(replay, found))
    return turns, _made(replay, found, places)


def _count(replay: Replay, found: _episodes.Table | None) -> jax.Array:
    """Number of rows or slices."""
    return replay.size * (replay.layout.num_envs or 1) if found is None else found.ends[-1]


def _made(replay: Replay, found: _episodes.Table | None, places: jax.Array) -> dict[str, Any]:
    """The batch of some slots, or numbers of slices."""
    known, transform = replay.episodes, replay.layout.transform
    if known is None or found is None:
        batch = _rows(replay, places)
    else:
        batch = _batch(*taken_slices(replay, known, _episodes.find(replay, known, found, places)))
    return batch if transform is None else transform(batch)


def _random(replay: Replay, index: jax.Array, size: int, high: jax.Array) -> jax.Array:
    """Integers in ``[0, high)``, int32 ``[size]``."""
    return _philox.integers(_words(replay, index, size), jnp.maximum(high, 1))


def _words(replay: Replay, index: jax.Array, size: int) -> _philox.Pair:
    """Random words for a sample, uint32 ``[size]`` each half."""
    if is_key(index.dtype):
        both = jax.random.bits(index, (2, size), jnp.uint32)
        return both[0], both[1]
    return _philox.words(replay.seed, Purpose.REPLAY, index, size)


def _weighted(replay: Replay, weights: Weights, words: _philox.Pair, beta: Any) -> dict[str, Any]:
    """A batch that is drawn by what rows weigh."""
    slots, importance = sum_tree.drawn(weights, words, weights.beta if beta is None else beta)
    if replay.episodes is None:
        batch = _rows(replay, slots)
    else:
        batch = _batch(*taken_slices(replay, replay.episodes, priorities.windows(replay, slots)))
        importance = jnp.broadcast_to(importance[:, None], batch["index"].shape)
    batch |= {"priority_weight": importance}
    return batch if replay.layout.transform is None else replay.layout.transform(batch)


def _rows(replay: Replay, slot: jax.Array) -> dict[str, Any]:
    """The rows of some slots, int32 ``[B]``, which are all there."""
    layout = replay.layout
    envs, reach = layout.num_envs, 0 if layout.transform is None else layout.transform.reach
    # Divided by 1 they would be so for each value of each field.
    step, env = (slot, slot) if envs is None else (slot // envs, slot % envs)
    added = {"index": slot}
    if reach:
        # Rows behind each in its stream; behind the newest there is none, and it is repeated.
        age = (replay.cursor - 1 - step) % layout.steps
        behind = jnp.arange(reach + 1, dtype=jnp.int32)
        added["mask"] = behind <= age[:, None]
        step = (step[:, None] + jnp.minimum(behind, age[:, None])) % layout.steps
        env = env[:, None]
    return _batch(taken(replay.rows, *((step,) if envs is None else (step, env))), added)


def _batch(rows: Any, added: Mapping[str, jax.Array]) -> dict[str, Any]:
    batch = dict(rows) if isinstance(rows, Mapping) else {"data": rows}
    # The rows' own numbers of trajectories pass through.
    return batch | {name: values for name, values in added.items() if name not in batch}
