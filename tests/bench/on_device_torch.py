"""Replay on the device in torch, beside TorchRL's on the same device: the same rows, written and drawn by each.

A row is an observation of 8 numbers, an action, reward and done; episodes have 200 steps. On a GPU where there is one;
then a call waits for what it made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mouse_core.bench import Contender, interleave
from tests.bench.results import Table, table_of
from tests.bench.workloads import Settings

OURS = "mouse_torch.device"
_BATCH, _SLICES, _LENGTH, _EPISODE = 256, 32, 64, 200


def tables(settings: Settings) -> list[Table]:
    """Rows and slices drawn, rows by priority with new ones set, and ten times as many rows."""
    count = 100_000 if settings.quick else 1_000_000
    sizes = [Contender(f"{OURS}, {n:,} rows", _sampler(n), "ours") for n in (count, 10 * count)]
    return [
        _table(settings, "uniform", f"{_BATCH} of {count:,} rows", _uniform(count)),
        _table(settings, "slices", f"{_SLICES} slices of {_LENGTH} steps of {count:,} rows", _slices(count)),
        _table(settings, "priority", f"{_BATCH} of {count:,} rows by priority, and new ones", _by_priority(count)),
        _table(settings, "sizes", f"{_BATCH} of so many rows", sizes),
    ]


def _table(settings: Settings, key: str, what: str, contenders: Any) -> Table:
    measured = interleave(list(contenders), rounds=settings.rounds, budget_seconds=settings.budget * 2)
    return table_of(f"on-device-torch-{key}", f"Replay on the device in torch, {_device()}: {what}", measured)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _rows(count: int) -> Any:
    import torch

    random = np.random.default_rng(7)
    rows = {
        "obs": torch.as_tensor(random.random((count, 8), np.float32)),
        "action": torch.zeros(count, dtype=torch.int32),
        "reward": torch.zeros(count),
        "done": torch.as_tensor(np.arange(1, count + 1) % _EPISODE == 0),
    }
    return {name: values.to(_device()) for name, values in rows.items()}


def _awaited(draw: Callable[[], Any]) -> Callable[[int], Any]:
    import torch

    if _device() == "cpu":
        return lambda _: draw()

    def call(_: int) -> Any:
        batch = draw()
        torch.cuda.synchronize()
        return batch

    return call


def _replay(count: int, batch_size: int, **options: Any) -> Any:
    """A full replay."""
    from mouse_torch.device import Replay

    rows = _rows(count)
    example = {name: values[0] for name, values in rows.items()}
    replay = Replay(example, count, batch_size=batch_size, device=_device(), **options)
    replay.extend(rows)
    return replay


def _sampler(count: int, batch_size: int = _BATCH, *, compiled: bool = False, **options: Any) -> Callable[[int], Any]:
    import torch

    draw = _replay(count, batch_size, **options).sample
    return _awaited(torch.compile(draw, fullgraph=True) if compiled else draw)


def _theirs(count: int, sampler: Any, batch_size: int) -> Any:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    storage = LazyTensorStorage(count, device=_device())
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    buffer.extend(TensorDict(_rows(count), batch_size=[count]))
    return buffer


def _peers(make: Callable[[], Any], name: str) -> Iterator[Contender]:
    if importlib.util.find_spec("torchrl") is None:
        return
    try:
        yield Contender(name, _awaited(make()))
    except RuntimeError as error:  # its trees are an extension that not every torch loads
        print(f"{name}: {error}")


def _uniform(count: int) -> Iterator[Contender]:
    yield Contender(OURS, _sampler(count), "ours")
    yield Contender(f"{OURS}, compiled", _sampler(count, compiled=True), "ours")

    def theirs() -> Any:
        from torchrl.data import RandomSampler

        return _theirs(count, RandomSampler(), _BATCH).sample

    yield from _peers(theirs, "torchrl, LazyTensorStorage")


def _slices(count: int) -> Iterator[Contender]:
    from mouse_core.replay import Slices

    whole, padded = (Slices(sequence_length=_LENGTH, pad=pad) for pad in (False, True))
    yield Contender(OURS, _sampler(count, _SLICES, slices=whole), "ours")
    yield Contender(f"{OURS}, compiled", _sampler(count, _SLICES, slices=whole, compiled=True), "ours")
    yield Contender(f"{OURS}, padded, with a mask", _sampler(count, _SLICES, slices=padded), "ours")

    def theirs() -> Any:
        from torchrl.data import SliceSampler

        sampler = SliceSampler(slice_len=_LENGTH, end_key="done", cache_values=True)
        return _theirs(count, sampler, _SLICES * _LENGTH).sample

    yield from _peers(theirs, "torchrl, LazyTensorStorage, trajectories cached")


def _by_priority(count: int) -> Iterator[Contender]:
    import torch

    from mouse_core.replay import Priorities

    given = torch.as_tensor(np.random.default_rng(3).exponential(size=_BATCH).astype(np.float32)).to(_device())

    def ours(*, compiled: bool) -> Callable[[int], Any]:
        replay = _replay(count, _BATCH, priorities=Priorities())

        def step() -> Any:
            batch = replay.sample()
            replay.set_priorities(batch["index"], given)
            return batch

        return _awaited(torch.compile(step, fullgraph=True) if compiled else step)

    yield Contender(OURS, ours(compiled=False), "ours")
    yield Contender(f"{OURS}, compiled", ours(compiled=True), "ours")

    def theirs() -> Any:
        from torchrl.data import PrioritizedSampler

        buffer = _theirs(count, PrioritizedSampler(count, 0.6, 0.4), _BATCH)

        def step() -> Any:
            batch = buffer.sample()
            buffer.update_priority(batch["index"], given)
            return batch

        return step

    yield from _peers(theirs, "torchrl, LazyTensorStorage")
