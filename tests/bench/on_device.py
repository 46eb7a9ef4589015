"""Replay inside of what JAX compiles, beside flashbax: the same rows, written and drawn by each.

A row is an observation of 8 numbers, an action, reward and done; episodes have 200 steps. All is jitted, and a call
waits for what it made. It runs on JAX's default device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.bench.measuring import Contender
from tests.bench.results import Settings, Table, compare_on, peer

OURS = "mouse_jax.device"
_BATCH, _SLICES, _LENGTH, _EPISODE, _SCANNED, _TURNS = 256, 32, 64, 200, 100, 300


def tables(settings: Settings) -> list[Table]:
    """Rows and slices drawn, rows by priority with new ones set, rows added; and ten times as many rows."""
    count = 1_000_000
    sizes = (count, 10 * count)
    drawn = [Contender(f"{OURS}, {n:,} rows", _sampler(n), "ours") for n in sizes]
    found = [
        *_table(settings, "uniform", f"{_BATCH} of {count:,} rows", _uniform(count)),
        *_table(settings, "scan", f"{_SCANNED} times {_BATCH} of {count:,} rows, in one scan", _scanned(count)),
        *_table(settings, "slices", f"{_SLICES} slices of {_LENGTH} steps of {count:,} rows", _slices(count)),
        *_table(
            settings, "priority", f"{_BATCH} of {count:,} rows by priority, and new priorities", _by_priority(count)
        ),
        *_table(settings, "add", f"1,024 rows into {count:,}, donated", _adding(count)),
        *_table(settings, "sizes", f"{_BATCH} rows from replays of different sizes", drawn),
    ]
    by_weight = [Contender(f"{OURS}, {n:,} rows", _updater(n), "ours") for n in sizes]
    title = f"{_BATCH} rows from replays of different sizes by priority, and new priorities"
    found += _table(settings, "priority-sizes", title, by_weight)
    whole = f"complete DQN loop, {_TURNS} turns of 10 environments, over 8 seeds"
    return found + _table(settings, "loop", whole, _whole_loop())


def _table(settings: Settings, key: str, what: str, contenders: Any) -> list[Table]:
    return compare_on(device_name(), settings, key, f"Replay on the device: {what}", contenders)


def device_name() -> str:
    """What JAX computes on: "cpu", or the kind of its first device."""
    import jax

    found = jax.devices()[0]
    return "cpu" if found.platform == "cpu" else f"{found.device_kind}, JAX"


def _rows(count: int) -> Any:
    import jax.numpy as jnp

    random = np.random.default_rng(7)
    return {
        "obs": jnp.asarray(random.random((count, 8), np.float32)),
        "action": jnp.zeros(count, jnp.int32),
        "reward": jnp.zeros(count),
        "done": jnp.asarray(np.arange(1, count + 1) % _EPISODE == 0),
    }


def _replay(count: int, batch_size: int, **options: Any) -> Any:
    """A full replay."""
    import jax

    from mouse_jax import device

    example = jax.tree.map(lambda leaf: leaf[0], _rows(1))
    replay = device.init(example, count, batch_size=batch_size, num_envs=None, **options)
    return jax.jit(device.add, donate_argnums=0)(replay, _rows(count))


def _numbers(draw: Callable[[Any], Any]) -> Callable[[int], Any]:
    """A function of the number of a sample, which is on the device before."""
    import jax
    import jax.numpy as jnp

    numbers = [jnp.uint32(number) for number in range(256)]
    return lambda number: jax.block_until_ready(draw(numbers[number % 256]))


def _sampler(count: int, batch_size: int = _BATCH, **options: Any) -> Callable[[int], Any]:
    import jax

    from mouse_jax import device

    replay, sample = _replay(count, batch_size, **options), jax.jit(device.sample)
    return _numbers(lambda number: sample(replay, number))


def _updater(count: int) -> Callable[[int], Any]:
    """Draw by priority, and set priorities of what was drawn."""
    import jax

    from mouse_core.replay import Priorities
    from mouse_jax import device

    held = [_replay(count, _BATCH, priorities=Priorities())]
    given = _priorities(_BATCH)

    def step(replay: Any, number: Any) -> Any:
        batch = device.sample(replay, number)
        return device.set_priorities(replay, batch["index"], given), batch

    jitted = jax.jit(step, donate_argnums=0)

    def call(number: Any) -> Any:
        held[0], batch = jitted(held[0], number)
        return held[0].cursor, batch

    return _numbers(call)


def _priorities(count: int) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(np.random.default_rng(3).exponential(size=count).astype(np.float32))


def _flashbax(count: int, batch_size: int, length: int, *, prioritised: bool = False) -> tuple[Any, Any]:
    """A buffer of flashbax, and its state, full to the last row but one: with that the first would be overwritten."""
    import flashbax
    import jax

    make = flashbax.make_prioritised_trajectory_buffer if prioritised else flashbax.make_trajectory_buffer
    buffer = make(
        add_batch_size=1,
        sample_batch_size=batch_size,
        sample_sequence_length=length,
        period=1,
        min_length_time_axis=length,
        max_length_time_axis=count,
        **({"priority_exponent": 0.6} if prioritised else {}),
    )
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], _rows(1)))
    rows = jax.tree.map(lambda leaf: leaf[None], _rows(count - 1))
    return buffer, jax.jit(buffer.add, donate_argnums=0)(state, rows)


def _keyed(draw: Callable[[Any], Any]) -> Callable[[int], Any]:
    import jax

    keys = list(jax.random.split(jax.random.key(0), 256))
    return lambda number: jax.block_until_ready(draw(keys[number % 256]))


def _peers(make: Callable[[], Callable[[int], Any]], name: str = "flashbax") -> Iterator[Contender | str]:
    yield from peer("flashbax", name, make)


def _uniform(count: int) -> Iterator[Contender | str]:
    import jax

    yield Contender(OURS, _sampler(count), "ours")

    def theirs() -> Callable[[int], Any]:
        buffer, state = _flashbax(count, _BATCH, 1)
        sample = jax.jit(buffer.sample)
        return _keyed(lambda key: sample(state, key))

    yield from _peers(theirs)


def _scanned(count: int) -> Iterator[Contender | str]:
    """Samples of a loop that is compiled as a whole, of which each adds to a sum."""
    import jax
    import jax.numpy as jnp

    from mouse_jax import device

    replay = _replay(count, _BATCH)

    @jax.jit
    def ours(first: Any) -> Any:
        numbers = first + jnp.arange(_SCANNED, dtype=jnp.uint32)
        return jax.lax.scan(lambda sum_, n: (sum_ + device.sample(replay, n)["obs"].sum(), None), 0.0, numbers)[0]

    yield Contender(OURS, _numbers(ours), "ours")

    def theirs() -> Callable[[int], Any]:
        buffer, state = _flashbax(count, _BATCH, 1)

        @jax.jit
        def loop(key: Any) -> Any:
            def step(sum_: Any, key: Any) -> Any:
                return sum_ + buffer.sample(state, key).experience["obs"].sum(), None

            return jax.lax.scan(step, 0.0, jax.random.split(key, _SCANNED))[0]

        return _keyed(loop)

    yield from _peers(theirs)


def _slices(count: int) -> Iterator[Contender | str]:
    import jax

    from mouse_jax import device

    for name, pad in (("", False), (", padded, with a mask", True)):
        slices = device.Slices(sequence_length=_LENGTH, pad=pad)
        yield Contender(f"{OURS}, within episodes{name}", _sampler(count, _SLICES, slices=slices), "ours")

    def theirs() -> Callable[[int], Any]:
        buffer, state = _flashbax(count, _SLICES, _LENGTH)
        sample = jax.jit(buffer.sample)
        return _keyed(lambda key: sample(state, key))

    yield from _peers(theirs, "flashbax, across episodes")


def _by_priority(count: int) -> Iterator[Contender | str]:
    import jax

    yield Contender(OURS, _updater(count), "ours")

    def theirs() -> Callable[[int], Any]:
        buffer, state = _flashbax(count, _BATCH, 1, prioritised=True)
        held, given = [state], _priorities(_BATCH)

        def step(state: Any, key: Any) -> Any:
            batch = buffer.sample(state, key)
            return buffer.set_priorities(state, batch.indices, given), batch

        jitted = jax.jit(step, donate_argnums=0)

        def call(key: Any) -> Any:
            held[0], batch = jitted(held[0], key)
            return held[0].current_index, batch

        return _keyed(call)

    yield from _peers(theirs)


def _adding(count: int) -> Iterator[Contender | str]:
    import jax

    from mouse_jax import device

    rows, length = _rows(1024), {"sequence_length": _LENGTH}
    for name, options in (("", {}), (", slices", {"slices": device.Slices(**length)})):
        yield Contender(
            OURS + name, _writer(jax.jit(device.add, donate_argnums=0), _replay(count, 32, **options), rows), "ours"
        )

    def theirs() -> Callable[[int], Any]:
        buffer, state = _flashbax(count, 32, 1)
        return _writer(jax.jit(buffer.add, donate_argnums=0), state, jax.tree.map(lambda leaf: leaf[None], rows))

    yield from _peers(theirs)


def _writer(add: Any, state: Any, rows: Any) -> Callable[[int], Any]:
    import jax

    held = [state]

    def call(_: int) -> Any:
        held[0] = jax.block_until_ready(add(held[0], rows))

    return call


def _whole_loop() -> Iterator[Contender | str]:
    """A whole training, mapped over seeds; all but the replay is the same."""
    import jax
    import jax.numpy as jnp

    try:
        from tests.bench import dqn_in_jit
    except ModuleNotFoundError as error:
        yield f"the whole loop: not measured, as {error.name} is not installed here"
        return

    def loop(memory: Any) -> Callable[[int], Any]:
        training = jax.jit(jax.vmap(partial(dqn_in_jit.train, steps=_TURNS, memory=memory)))
        return lambda number: jax.block_until_ready(training(jnp.arange(8, dtype=jnp.uint32) + number)[1])

    yield Contender(OURS, loop(dqn_in_jit.on_device()), "ours")

    def theirs() -> Callable[[int], Any]:
        import flashbax

        buffer = flashbax.make_flat_buffer(
            max_length=dqn_in_jit.CAPACITY,
            min_length=dqn_in_jit.LEARNING_STARTS,
            sample_batch_size=dqn_in_jit.BATCH_SIZE,
            add_sequences=False,
            add_batch_size=dqn_in_jit.ENVIRONMENTS,
        )

        def sample(state: Any, number: Any, key: Any) -> Any:
            pair = buffer.sample(state, key).experience
            return {
                "observation": pair.first["observation"],
                "action": pair.first["action"],
                "reward": pair.first["reward"],
                "goes_on": pair.first["done"] != 1,
                "next": pair.second["observation"],
                "mask": pair.first["done"] != 2,
            }

        return loop(dqn_in_jit.Memory(lambda seed, row: buffer.init(row), buffer.add, sample))

    yield from _peers(theirs)
