"""The JAX adapter does what an adapter must do."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mouse_jax
from mouse_core.testing import (
    AdapterConformance,
    DeviceReplayConformance,
    ReplayAdapterConformance,
    RolloutAdapterConformance,
)
from mouse_core.testing.replay.devices import PADDED_BY_PRIORITY
from mouse_jax import device, rollout_storage


class InJax:
    replaced_dtypes = mouse_jax.REPLACED_DTYPES

    def from_numpy(self, values: Any) -> jax.Array:
        return jnp.asarray(values)


class TestJax(AdapterConformance):
    loader_class = mouse_jax.PrefetchBatchifier
    replaced_dtypes = mouse_jax.REPLACED_DTYPES


class TestJaxReplay(InJax, ReplayAdapterConformance):
    buffer_class = mouse_jax.ReplayBuffer
    ensemble_class = mouse_jax.ReplayBufferEnsemble


class Kept:
    """The pure functions of rollouts, with the state kept between calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.rollout = rollout_storage.init(*arguments, **options)

    def __getitem__(self, name: str) -> jax.Array:
        return self.rollout[name]

    @property
    def hidden_states(self) -> Any:
        return self.rollout.hidden_states

    def add_transitions(self, transition: Any) -> None:
        self.rollout = rollout_storage.append(self.rollout, transition)

    def compute_returns(self, last_values: Any, gamma: float, lam: float, *arguments: Any, **options: Any) -> None:
        self.rollout = rollout_storage.compute_returns(self.rollout, last_values, gamma, lam, *arguments, **options)

    def get_statistics(self) -> Any:
        return rollout_storage.get_statistics(self.rollout)

    def clear(self) -> None:
        self.rollout = rollout_storage.clear(self.rollout)

    def mini_batch_generator(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        self.rollout, batches = rollout_storage.mini_batches(self.rollout, *arguments, **options)
        return iter(batches)

    def recurrent_mini_batch_generator(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        self.rollout, batches = rollout_storage.recurrent_mini_batches(self.rollout, *arguments, **options)
        return iter(batches)


class TestJaxRollouts(InJax, RolloutAdapterConformance):
    storage_class = Kept


@pytest.mark.slow
class TestJaxDevice(DeviceReplayConformance):
    variants = 1
    grow, draw, weigh, ready = map(staticmethod, (device.add, device.take, device.set_priorities, device.can_sample))

    def init(self, example: Any, capacity: int, *, slices: Any, **options: Any) -> Any:
        return device.init(example, capacity, slices=slices and device.Slices(**slices), **options)

    def add(self, state: Any, rows: Any) -> Any:
        return self.grow(state, rows)

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        return self.draw(state, np.uint32(index))

    def set_priorities(self, state: Any, indices: Any, priorities: Any) -> Any:
        return self.weigh(state, indices, priorities)

    def can_sample(self, state: Any) -> Any:
        return self.ready(state)

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        device.dumps(state, path, samples=samples)

    def loads(self, state: Any, path: Path) -> tuple[Any, int]:
        return device.loads(state, path)


class TestJaxCompiled(TestJaxDevice):
    """Each function within another that is compiled, where states are traced, so that nothing is refused."""

    grow, draw, weigh, ready = (
        staticmethod(jax.jit(function))
        for function in (device.add, device.take, device.set_priorities, device.can_sample)
    )
    test_what_is_refused_changes_nothing: Any = None


class TestJaxSeeds(TestJaxCompiled):
    """One of two replays that are mapped over: of another seed and, from behind, other rows."""

    grow, draw, weigh, ready = (
        staticmethod(jax.jit(jax.vmap(function, axes)))
        for function, axes in (
            (device.add, 0),
            (device.take, (0, None)),
            (device.set_priorities, (0, None, None)),
            (device.can_sample, 0),
        )
    )

    def init(self, example: Any, capacity: int, *, seed: int, **options: Any) -> Any:
        return self.beside(
            *(super(TestJaxSeeds, self).init(example, capacity, seed=one, **options) for one in (7, seed))
        )

    def add(self, state: Any, rows: Any) -> Any:
        return super().add(state, self.beside(jax.tree.map(lambda leaf: leaf[::-1] if leaf.ndim else leaf, rows), rows))

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        state, batches = super().sample(state, index)
        return state, self.second(batches)

    def can_sample(self, state: Any) -> Any:
        return super().can_sample(state)[1]

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        super().dumps(self.second(state), path, samples)

    def loads(self, state: Any, path: Path) -> tuple[Any, int]:
        replay, samples = super().loads(jax.tree.map(jnp.asarray, self.second(state)), path)
        return self.beside(jax.tree.map(lambda leaf: np.asarray(leaf)[0], state), replay), samples

    # In NumPy, because JAX compiles a function for each shape.
    def beside(self, *trees: Any) -> Any:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def second(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[1], tree)


def test_priorities_of_slices_are_mapped_over(tmp_path: Path) -> None:
    """In writes of one time step, as each size of a write is compiled for seconds; the slow suites have others."""
    TestJaxSeeds().follow(replace(PADDED_BY_PRIORITY, several=1), 0, tmp_path)


class Longer:
    variants, programs = 24, 30  # 5,040 programs

    @pytest.fixture(autouse=True)
    def forgets_compiled_programs(self) -> Iterator[None]:
        yield
        jax.clear_caches()  # a process has 65,530 maps at most, and XLA dies of one more


@pytest.mark.long
class TestJaxCompiledLonger(Longer, TestJaxCompiled):
    pass


@pytest.mark.long
class TestJaxSeedsLonger(Longer, TestJaxSeeds):
    pass


class Wide:
    """With numbers of 64 bits."""

    replaced_dtypes: ClassVar[dict[Any, Any]] = {}

    @pytest.fixture(autouse=True)
    def x64(self) -> Iterator[None]:
        with jax.enable_x64(True):
            yield


@pytest.mark.slow
class TestJaxReplayWide(Wide, TestJaxReplay): ...


@pytest.mark.long
class TestJaxDeviceWide(Wide, TestJaxCompiled): ...
