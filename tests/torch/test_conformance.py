"""The PyTorch adapter does what an adapter must do."""

import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import mouse_torch
from mouse_core.nested import map_tree
from mouse_core.replay import Slices
from mouse_core.testing import (
    AdapterConformance,
    DeviceReplayConformance,
    ReplayAdapterConformance,
    RolloutAdapterConformance,
    example_store,
)
from mouse_core.testing.replay.devices import PADDED_BY_PRIORITY
from mouse_torch.device import Replay


class TestTorch(AdapterConformance):
    loader_class = mouse_torch.PrefetchBatchifier


@pytest.mark.cuda
@pytest.mark.parametrize("pin_memory", [None, False])
class TestCuda(TestTorch):
    @pytest.fixture(autouse=True)
    def on_device(self, pin_memory: bool | None) -> None:
        self.options = {"device": "cuda", "pin_memory": pin_memory}

    def test_it_comes_on_the_device(self) -> None:
        with self._loader(example_store(), dtypes={"obs_image": "uint8", "obs_continuous": "float16"}) as loader:
            batch = loader.next_batch()
        assert batch.device.type == "cuda"
        assert all(tensor.is_cuda for tensor in batch.values())


class InTorch:
    def from_numpy(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values))


class TestTorchReplay(InTorch, ReplayAdapterConformance):
    buffer_class = mouse_torch.ReplayBuffer
    ensemble_class = mouse_torch.ReplayBufferEnsemble


class TestTensorReplay(TestTorchReplay):
    def storage(self, capacity: int, ndim: int) -> Any:
        return mouse_torch.TensorStorage(capacity, ndim, device=self.options.get("device", "cpu"))


class TestTorchRollouts(InTorch, RolloutAdapterConformance):
    storage_class = mouse_torch.RolloutStorage


@pytest.mark.cuda
class TestCudaReplay(TestTorchReplay):
    options: ClassVar[dict[str, Any]] = {"device": "cuda"}


@pytest.mark.cuda
class TestCudaTensorReplay(TestTensorReplay):
    options: ClassVar[dict[str, Any]] = {"device": "cuda"}


class TestTorchDevice(InTorch, DeviceReplayConformance):
    options: ClassVar[dict[str, Any]] = {}

    def init(self, example: Any, capacity: int, *, slices: Any, **options: Any) -> Replay:
        return Replay(example, capacity, slices=slices and Slices(**slices), **options, **self.options)

    def add(self, state: Replay, rows: Any) -> Replay:
        state.extend(rows)
        return state

    def sample(self, state: Replay, index: int) -> tuple[Replay, Any]:
        return state, state.sample(index)

    def set_priorities(self, state: Replay, indices: Any, priorities: Any) -> Replay:
        state.set_priorities(indices, priorities)
        return state

    def can_sample(self, state: Replay) -> Any:
        return state.can_sample()

    def dumps(self, state: Replay, path: Path, samples: int) -> None:
        state.samples.fill_(samples)
        state.to_host().dumps(path)

    def loads(self, state: Replay, path: Path) -> tuple[Replay, int]:
        buffer = state.to_host()
        buffer.loads(path)
        state.from_host(buffer)
        return state, int(state.samples)


@pytest.mark.cuda
class TestCudaDevice(TestTorchDevice):
    options: ClassVar[dict[str, Any]] = {"device": "cuda"}


@pytest.mark.long
class TestTorchDeviceLonger(TestTorchDevice):
    variants, programs = 24, 30  # 5,040 programs


@pytest.mark.slow
class TestTorchCompiled(TestTorchDevice):
    """Each function is one graph, compiled once for a replay, which is used again for programs of the same options."""

    backend = "eager"
    variants = 1
    test_a_sample_is_a_function_of_its_number: Any = None  # of two replays, which are one here
    test_what_is_refused_changes_nothing: Any = None  # on the host, as nothing waits for what is compiled
    _compiled: ClassVar[dict[Any, Any]] = {}

    def init(self, example: Any, capacity: int, *, seed: int, **options: Any) -> Replay:
        key = type(self), capacity, repr(options), repr(example)
        if key not in self._compiled:
            torch.compiler.reset()
            self._compiled.clear()
            replay = super().init(example, capacity, seed=seed, **options)
            compiled = [
                torch.compile(function, fullgraph=True, backend=self.backend)
                for function in (replay.extend, replay.sample, replay.set_priorities)
            ]
            self._compiled[key] = replay, copy.deepcopy(replay.state_dict()), compiled
        replay, empty, _ = self._compiled[key]
        replay.load_state_dict(empty | {"seed": torch.as_tensor(np.uint64(seed).view(np.int64))})
        return replay

    def add(self, state: Replay, rows: Any) -> Replay:
        self._functions[0](map_tree(torch.as_tensor, rows))
        return state

    def sample(self, state: Replay, index: int) -> tuple[Replay, Any]:
        return state, self._functions[1](torch.as_tensor(index))

    def set_priorities(self, state: Replay, indices: Any, priorities: Any) -> Replay:
        self._functions[2](torch.as_tensor(indices), torch.as_tensor(priorities))
        return state

    @property
    def _functions(self) -> Any:
        return next(iter(self._compiled.values()))[2]


def test_priorities_of_slices_are_compiled(tmp_path: Path) -> None:
    for program in range(2):
        TestTorchCompiled().follow(PADDED_BY_PRIORITY, program, tmp_path)


@pytest.mark.long
class TestTorchCompiledLonger(TestTorchCompiled):
    backend = "inductor"
    variants, programs = 6, 120


@pytest.mark.cuda
class TestCudaCompiled(TestTorchCompiledLonger):
    options: ClassVar[dict[str, Any]] = {"device": "cuda"}
    variants, programs = 1, 8  # as long as a device is lent
