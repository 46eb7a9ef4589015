"""Slices with a period, drawn, weighed and moved about: on devices as on the host, however a ring is written."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mouse_torch.device
from mouse_core import ConfigError
from mouse_core.replay import ArrayStorage, Priorities, PrioritizedSliceSampler, ReplayBuffer, Slices, SliceSampler
from mouse_jax import device

BATCH = 16
WEIGHING = {"alpha": 0.7, "beta": 0.6, "eps": 1e-3}
EXAMPLE = {"x": np.int32(0), "done": np.int8(0)}


class InJax:
    """A replay of JAX, and the number of its next sample."""

    add, draw, weigh = jax.jit(device.add), jax.jit(device.sample), jax.jit(device.set_priorities)

    def __init__(self, capacity: int, **options: Any) -> None:
        self._replay, self._number = (
            device.init(EXAMPLE, capacity, batch_size=BATCH, **{"num_envs": None, **options}),
            0,
        )

    def extend(self, rows: Any) -> None:
        self._replay = InJax.add(self._replay, rows)

    def can_sample(self) -> Any:
        return device.can_sample(self._replay)

    def sample(self) -> Any:
        self._number += 1
        return InJax.draw(self._replay, self._number - 1)

    def set_priorities(self, index: Any, values: Any) -> None:
        self._replay = InJax.weigh(self._replay, index.astype(np.int32), values)

    def dumps(self, path: Path) -> None:
        device.dumps(self._replay, path, samples=self._number)

    def loads(self, path: Path) -> None:
        self._replay, self._number = device.loads(self._replay, path)


class InTorch(mouse_torch.device.Replay):
    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(EXAMPLE, capacity, batch_size=BATCH, **options)

    def set_priorities(self, index: Any, values: Any) -> None:
        super().set_priorities(torch.as_tensor(index), torch.as_tensor(values))


def follows(kind: Any, data: st.DataObject) -> None:
    slices = {
        "sequence_length": data.draw(st.integers(1, 5)),
        "period": data.draw(st.integers(1, 6)),
        "pad": data.draw(st.sampled_from([True, False, -1])),
        "end_key": "done",
    }
    steps, envs = data.draw(st.sampled_from([5, 8, 20])), data.draw(st.sampled_from([None, 1, 3]))
    weighted, capacity = data.draw(st.booleans()), steps * (envs or 1)
    more: Any = {"priorities": Priorities(**WEIGHING)} if weighted else {}
    often = data.draw(st.sampled_from([0.02, 0.1, 0.3]))
    counts = data.draw(st.sampled_from([(1,), (1, 3), (2, steps)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def host(seed: int) -> ReplayBuffer:
        sampler: Any = PrioritizedSliceSampler(**WEIGHING, **slices) if weighted else SliceSampler(**slices)
        return ReplayBuffer(ArrayStorage(capacity, 1 if envs is None else 2), sampler, batch_size=BATCH, seed=seed)

    def there(seed: int) -> Any:
        return kind(capacity, num_envs=envs, slices=Slices(**slices), seed=seed, **more)

    expected, found = host(5), there(5)
    for _ in range(10):
        shape = (int(rng.choice(counts)),) if envs is None else (int(rng.choice(counts)), envs)
        rows = {"x": rng.integers(0, 1000, shape, np.int32), "done": (rng.random(shape) < often).astype(np.int8)}
        for one in (expected, found):
            one.extend(rows)
        if found.can_sample():
            wanted, batch = expected.sample(), found.sample()
            for name in {*wanted} - {"traj_id"}:
                np.testing.assert_allclose(batch[name], wanted[name], 1e-5 if name == "priority_weight" else 0)
        else:
            with pytest.raises(ConfigError):
                expected.sample()
        if weighted:
            index, values = rng.integers(0, len(expected), 5), (3 * rng.random(5)).astype(np.float32)
            expected.update_priority(index, values)
            found.set_priorities(index, values)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "replay"
            match rng.integers(6):
                case 0:
                    found.dumps(path)
                    expected = host(1)
                    expected.loads(path)
                case 1:
                    expected.dumps(path)
                    found = there(1)
                    found.loads(path)


@pytest.mark.slow
@given(data=st.data())
def test_in_torch(data: st.DataObject) -> None:
    follows(InTorch, data)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_in_jax(data: st.DataObject) -> None:
    follows(InJax, data)
