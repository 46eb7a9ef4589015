"""Replay inside of what JAX compiles, beside flashbax: the same rows, written and drawn by each.

A row is an observation of 8 numbers, an action, reward and done; episodes have 200 steps. All is jitted, and a call
waits for what it made. It runs on JAX's default device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core.replay import Priorities
from mouse_jax import device
from tests.bench.measuring import Contender
from tests.bench.replay import BATCH, LENGTH, SLICES, small_rows
from tests.bench.results import Settings, Table, compare_on, peer

OURS = "mouse_jax.device"
_SCANNED, _TURNS = 100, 300
Given = Iterator[Contender | str]


def tables(settings: Settings) -> list[Table]:
    """Rows and slices drawn, rows by priority with new ones set, rows added; and ten times as many rows."""
    count = 1_000_000
    by_priority, sizes = "by priority, and new priorities", f"{BATCH} rows from replays of different sizes"
    works: tuple[tuple[str, str, Given], ...] = (
        ("uniform", f"{BATCH} of {count:,} rows", _uniform(count)),
        ("scan", f"{_SCANNED} times {BATCH} of {count:,} rows, in one scan", _scanned(count)),
        ("slices", f"{SLICES} slices of {LENGTH} steps of {count:,} rows", _slices(count)),
        ("priority", f"{BATCH} of {count:,} rows {by_priority}", _by_priority(count)),
        ("add", f"1,024 rows into {count:,}, donated", _adding(count)),
        ("sizes", sizes, _sizes(count, _sampler)),
        ("priority-sizes", f"{sizes} {by_priority}", _sizes(count, _updater)),
        ("loop", f"complete DQN loop, {_TURNS} turns of 10 environments, over 8 seeds", _whole_loop()),
    )
    return [
        table
        for key, what, given in works
        for table in compare_on(device_name(), settings, key, f"Replay on the device: {what}", given)
    ]


def device_name() -> str:
    """What JAX computes on: "cpu", or the kind of its first device."""
    found = jax.devices()[0]
    return "cpu" if found.platform == "cpu" else f"{found.device_kind}, JAX"


def _rows(count: int) -> Any:
    return jax.tree.map(jnp.asarray, small_rows(count))


def _replay(count: int, batch_size: int, **options: Any) -> Any:
    """A full replay."""
    example = jax.tree.map(lambda leaf: leaf[0], _rows(1))
    replay = device.init(example, count, batch_size=batch_size, num_envs=None, **options)
    return jax.jit(device.add, donate_argnums=0)(replay, _rows(count))


def _numbers(draw: Callable[[Any], Any]) -> Callable[[int], Any]:
    """A function of the number of a sample, which is on the device before."""
    numbers = [jnp.uint32(number) for number in range(256)]
    return lambda number: jax.block_until_ready(draw(numbers[number % 256]))


def _sampler(count: int, batch_size: int = BATCH, **options: Any) -> Callable[[int], Any]:
    return _numbers(partial(jax.jit(device.sample), _replay(count, batch_size, **options)))


def _updater(count: int) -> Callable[[int], Any]:
    """Draw by priority, and set priorities of what was drawn."""
    given = _priorities()

    def step(replay: Any, number: Any) -> Any:
        batch = device.sample(replay, number)
        return device.set_priorities(replay, batch["index"], given), batch

    return _numbers(_changing(step, _replay(count, BATCH, priorities=Priorities())))


def _changing(step: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """What changes a state, which is given up for the next, and gives what else it makes."""
    jitted = jax.jit(step, donate_argnums=0)

    def call(*arguments: Any) -> Any:
        nonlocal state
        state, found = jitted(state, *arguments)
        return found

    return call


def _priorities() -> Any:
    return jnp.asarray(np.random.default_rng(3).exponential(size=BATCH).astype(np.float32))


def _sizes(count: int, make: Callable[[int], Callable[[int], Any]]) -> Given:
    for rows in (count, 10 * count):
        yield Contender(f"{OURS}, {rows:,} rows", make(rows), "ours")


def _flashbax(
    make: Callable[[Any, Any], Callable[[Any], Any]],
    count: int,
    batch_size: int = BATCH,
    length: int = 1,
    *,
    name: str = "flashbax",
    by_priority: bool = False,
) -> Given:
    """flashbax: what ``make`` gives for a full buffer and its state is a function of the key of a sample."""

    def made() -> Callable[[int], Any]:
        from tests.bench.peers import of_flashbax

        return of_flashbax.keyed(make(*of_flashbax.filled(_rows(count), batch_size, length, by_priority=by_priority)))

    yield from peer("flashbax", name, made)


def _sampled(buffer: Any, state: Any) -> Callable[[Any], Any]:
    return partial(jax.jit(buffer.sample), state)


def _uniform(count: int) -> Given:
    yield Contender(OURS, _sampler(count), "ours")
    yield from _flashbax(_sampled, count)


def _scanned(count: int) -> Given:
    """Samples of a loop that is compiled as a whole, of which each adds to a sum."""
    replay = _replay(count, BATCH)

    def loop(draw: Callable[[Any], Any], numbers: Any) -> Any:
        return jax.lax.scan(lambda sum_, one: (sum_ + draw(one)["obs"].sum(), None), 0.0, numbers)[0]

    def ours(first: Any) -> Any:
        return loop(lambda number: device.sample(replay, number), first + jnp.arange(_SCANNED, dtype=jnp.uint32))

    def theirs(buffer: Any, state: Any) -> Callable[[Any], Any]:
        def draw(key: Any) -> Any:
            return buffer.sample(state, key).experience

        return jax.jit(lambda key: loop(draw, jax.random.split(key, _SCANNED)))

    yield Contender(OURS, _numbers(jax.jit(ours)), "ours")
    yield from _flashbax(theirs, count)


def _slices(count: int) -> Given:
    for name, pad in (("", False), (", padded, with a mask", True)):
        slices = device.Slices(sequence_length=LENGTH, pad=pad)
        yield Contender(f"{OURS}, within episodes{name}", _sampler(count, SLICES, slices=slices), "ours")
    yield from _flashbax(_sampled, count, SLICES, LENGTH, name="flashbax, across episodes")


def _by_priority(count: int) -> Given:
    yield Contender(OURS, _updater(count), "ours")
    given = _priorities()

    def theirs(buffer: Any, state: Any) -> Callable[[Any], Any]:
        def step(state: Any, key: Any) -> Any:
            batch = buffer.sample(state, key)
            return buffer.set_priorities(state, batch.indices, given), batch

        return _changing(step, state)

    yield from _flashbax(theirs, count, by_priority=True)


def _adding(count: int) -> Given:
    rows = _rows(1024)

    def added(add: Any, state: Any, rows: Any) -> Callable[[Any], Any]:
        jitted = jax.jit(add, donate_argnums=0)

        def call(_: Any) -> None:
            nonlocal state
            state = jax.block_until_ready(jitted(state, rows))

        return call

    for name, options in (("", {}), (", slices", {"slices": device.Slices(sequence_length=LENGTH)})):
        yield Contender(OURS + name, added(device.add, _replay(count, 32, **options), rows), "ours")
    stream = jax.tree.map(lambda leaf: leaf[None], rows)
    yield from _flashbax(lambda buffer, state: added(buffer.add, state, stream), count, 32)


def _whole_loop() -> Given:
    """A whole training, mapped over seeds; all but the replay is the same."""
    try:
        from tests.bench import dqn_in_jit
    except ModuleNotFoundError as error:
        yield f"the whole loop: not measured, as {error.name} is not installed here"
        return

    def loop(memory: Any) -> Callable[[int], Any]:
        training = jax.jit(jax.vmap(partial(dqn_in_jit.train, steps=_TURNS, memory=memory)))
        return lambda number: jax.block_until_ready(training(jnp.arange(8, dtype=jnp.uint32) + number)[1])

    yield Contender(OURS, loop(dqn_in_jit.on_device()), "ours")
    yield from peer("flashbax", "flashbax", lambda: loop(dqn_in_jit.of_flashbax()))
