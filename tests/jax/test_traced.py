"""What has a memory of its own is not called while JAX traces, where its result would be a constant."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import mouse_core
import mouse_core.replay as core
import mouse_jax
from mouse_core import AugmentScalarSpec, AugmentTokensConfig, BatchSource, ConfigError
from mouse_core.groups import RolloutBuffer
from mouse_core.replay import ArrayStorage, PrioritizedSampler
from mouse_core.rollouts import RolloutStorage
from mouse_core.testing import example_store

Call = Callable[[], Any]

TRACED: dict[str, Callable[[Call], Any]] = {
    "jit": lambda call: jax.jit(lambda x: (call(), x)[1])(1.0),
    "scan": lambda call: jax.lax.scan(lambda c, x: (call(), (c, x))[1], 0.0, jnp.ones(3)),
    "while": lambda call: jax.lax.while_loop(lambda n: n < 3, lambda n: (call(), n + 1)[1], 0),
    "cond": lambda call: jax.lax.cond(True, lambda: (call(), 1.0)[1], lambda: 0.0),
    "vmap": lambda call: jax.vmap(lambda x: (call(), x)[1])(jnp.ones(3)),
    "grad in jit": lambda call: jax.jit(jax.grad(lambda x: (call(), x)[1]))(1.0),
    "grad in vmap": lambda call: jax.vmap(jax.grad(lambda x: (call(), x)[1]))(jnp.ones(3)),
    "checkpoint": lambda call: jax.checkpoint(lambda x: (call(), x)[1])(1.0),
    "eval_shape": lambda call: jax.eval_shape(lambda x: (call(), x)[1], 1.0),
    "nnx.jit": lambda call: nnx.jit(lambda x: (call(), x)[1])(1.0),
}


def buffer_of(kind: Any) -> Any:
    buffer = kind(ArrayStorage(20), PrioritizedSampler(0.7, 0.5), batch_size=4)
    buffer.extend({"obs": np.arange(10.0, dtype=np.float32), "td_error": np.ones(10, np.float32)})
    return buffer


def is_refused(call: Call) -> bool:
    try:
        call()
    except ConfigError as error:
        return "that JAX traces" in str(error)
    return False


def calls(folder: Path) -> Iterator[tuple[str, Call]]:
    """All that draws, writes or counts, each ready to be called."""
    for package in (core, mouse_jax):
        buffer = buffer_of(package.ReplayBuffer)
        name = package.__name__
        row = {"obs": np.float32(3), "td_error": np.float32(1)}
        yield f"{name} sample", buffer.sample
        yield f"{name} iteration", lambda buffer=buffer: next(iter(buffer))
        yield f"{name} add", lambda buffer=buffer, row=row: buffer.append(row)
        yield (
            f"{name} extend",
            lambda buffer=buffer: buffer.extend({"obs": np.ones(2, "f"), "td_error": np.ones(2, "f")}),
        )
        yield f"{name} reading", lambda buffer=buffer: buffer[3]
        yield f"{name} writing over", lambda buffer=buffer, row=row: buffer.__setitem__(3, row)
        yield f"{name} priorities", lambda buffer=buffer: buffer.update_priority(np.array([1]), np.array([2.0]))
        yield f"{name} empty", buffer_of(package.ReplayBuffer).empty
        both = package.ReplayBufferEnsemble(buffer, buffer_of(package.ReplayBuffer), batch_size=4)
        yield f"{name} ensemble", both.sample
        yield (
            f"{name} priorities of an ensemble",
            lambda both=both: both.update_priority(np.array([1]), np.array([2.0]), np.array([0])),
        )
    for kind in (mouse_core.PrefetchBatchifier, mouse_jax.PrefetchBatchifier):
        for workers in (0, 1):
            loader = kind(example_store(), 8, 4, num_workers=workers)
            yield f"{kind.__module__} next_batch, {workers} workers", loader.next_batch
            yield f"{kind.__module__} iteration, {workers} workers", lambda loader=loader: next(iter(loader))
        yield f"{kind.__module__} of a buffer", kind(buffer_of(core.ReplayBuffer)).next_batch
    batch = {"reward": jnp.ones((2, 3))}
    config = AugmentTokensConfig(scale_reward=AugmentScalarSpec(mean=2.0))
    for augmenter in (mouse_core.TokenAugmenter(config), mouse_jax.TokenAugmenter(config)):
        augmenter.update_augmentations(batch)
        name = type(augmenter).__module__
        yield f"{name} update_augmentations", lambda own=augmenter: own.update_augmentations(batch)
        yield f"{name} next_draws", lambda own=augmenter: own.next_draws(batch)
        yield f"{name} augmenter", lambda own=augmenter: own(batch)
    storage = RolloutStorage(2, 1, {"values": ()})
    step = {"values": np.zeros(2), "rewards": np.ones(2), "dones": np.zeros(2)}
    yield "add_transitions", lambda: RolloutStorage(2, 1, {"values": ()}).add_transitions(step)
    storage.add_transitions(step)
    yield "compute_returns", lambda: storage.compute_returns(np.zeros(2), 0.9, 0.9)
    storage.compute_returns(np.zeros(2), 0.9, 0.9)
    yield "mini_batch_generator", lambda: next(storage.mini_batch_generator(1))
    yield "recurrent_mini_batch_generator", lambda: next(storage.recurrent_mini_batch_generator(1, shuffle=True))
    rollouts = RolloutBuffer(folder / "rollouts")
    yield "rollout buffer", rollouts.flush


@pytest.mark.parametrize("traced", TRACED)
def test_sampling_is_refused_where_it_would_be_done_once(traced: str) -> None:
    buffer = buffer_of(mouse_jax.ReplayBuffer)
    before = buffer.stats()
    with pytest.raises(ConfigError, match=r"sample: expected a call outside of jax\.jit.*io_callback"):
        TRACED[traced](buffer.sample)
    assert buffer.stats() == before
    assert buffer.sample()["obs"].shape == (4,)  # and the trace is over


def test_all_that_has_a_memory_is_refused(tmp_path: Path) -> None:
    for name, call in calls(tmp_path):
        for traced in ("jit", "vmap"):
            assert is_refused(lambda traced=traced, call=call: TRACED[traced](call)), f"{name} in {traced}"
        call()
    storage = RolloutStorage(2, 1, {})
    storage.add_transitions({"rewards": np.ones(2), "dones": np.zeros(2)})
    begun = storage.mini_batch_generator(2)
    next(begun)
    with pytest.raises(ConfigError, match="mini-batches: expected a call outside"):
        TRACED["jit"](begun.__next__)
    buffer = buffer_of(mouse_jax.ReplayBuffer)
    for write in (buffer.extend, buffer.update_priority):
        with pytest.raises(ConfigError, match="that JAX traces"):
            jax.jit(lambda x, write=write: (write({"obs": x, "index": x, "td_error": x}), x)[1])(jnp.ones(2))


def test_in_callbacks_and_in_grad_every_call_is_made() -> None:
    mine, other = buffer_of(mouse_jax.ReplayBuffer), buffer_of(core.ReplayBuffer)
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)

    def draw(*_: Any) -> Any:
        return np.asarray(mine.sample()["obs"])

    @jax.jit
    def from_callback(x: jax.Array) -> jax.Array:
        return x + io_callback(draw, shape, ordered=True)

    for _ in range(3):
        np.testing.assert_array_equal(from_callback(jnp.zeros(4)), other.sample()["obs"])

    _, scanned = jax.lax.scan(lambda c, _: (c, io_callback(draw, shape, ordered=True)), 0, None, length=3)
    np.testing.assert_array_equal(scanned, [other.sample()["obs"] for _ in range(3)])

    pure = jax.jit(lambda x: jax.pure_callback(draw, shape, x))
    np.testing.assert_array_equal(pure(1.0), other.sample()["obs"])

    gradient = jax.grad(lambda w: (w * mine.sample()["obs"]).sum())
    for _ in range(2):
        np.testing.assert_array_equal(gradient(1.0), other.sample()["obs"].sum())


def test_a_batch_by_its_index_is_a_constant_that_was_asked_for() -> None:
    source = BatchSource(example_store(), 8, 4)
    found = jax.jit(lambda x: x + source[3]["reward"])(0.0)
    np.testing.assert_array_equal(found, source[3]["reward"])
    with pytest.raises((TypeError, jax.errors.TracerIntegerConversionError)):
        jax.jit(lambda index: source[index]["reward"])(3)
