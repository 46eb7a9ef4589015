"""Replay on the device in torch, beside TorchRL's on the same device: the same rows, written and drawn by each.

A row is an observation of 8 numbers, an action, reward and done; episodes have 200 steps. On a GPU where there is one;
then a call waits for what it made. On a CPU all have one thread: what Inductor makes divides a few hundred rows among
several, of which each waits for the others, longer than all of the work takes where the cores have other work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.bench.measuring import Contender
from tests.bench.results import Settings, Table, compare_on, peer

OURS = "mouse_torch.device"
_BATCH, _SLICES, _LENGTH, _EPISODE = 256, 32, 64, 200


def tables(settings: Settings) -> list[Table]:
    """Rows and slices drawn, rows by priority with new ones set, and ten times as many rows."""
    import torch

    count, threads = 1_000_000, torch.get_num_threads()
    torch.set_num_threads(1)
    found = [
        *_table(settings, "uniform", f"{_BATCH} of {count:,} rows", _uniform(count)),
        *_table(settings, "slices", f"{_SLICES} slices of {_LENGTH} steps of {count:,} rows", _slices(count)),
        *_table(
            settings, "priority", f"{_BATCH} of {count:,} rows by priority, and new priorities", _by_priority(count)
        ),
    ]
    # Made here: rows that nobody reads for long are read more slowly for a while in a virtual machine.
    sizes = [Contender(f"{OURS}, {n:,} rows", _sampler(n), "ours") for n in (count, 10 * count)]
    found += _table(settings, "sizes", f"{_BATCH} rows from replays of different sizes", sizes)
    torch.set_num_threads(threads)
    return found


def _table(settings: Settings, key: str, what: str, contenders: Any) -> list[Table]:
    title = f"Replay on the device in torch: {what}"
    return compare_on(device_name(), settings, f"torch-{key}", title, contenders)


def device_name() -> str:
    """What torch computes on here: "cpu", or the name of its first GPU."""
    import torch

    return f"{torch.cuda.get_device_name()}, torch" if torch.cuda.is_available() else "cpu"


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
    replay = Replay(example, count, batch_size=batch_size, num_envs=None, device=_device(), **options)
    replay.extend(rows)
    return replay


def _sampler(count: int, batch_size: int = _BATCH, **options: Any) -> Callable[[int], Any]:
    return _awaited(_replay(count, batch_size, **options).sample)


def _ours(make: Callable[[], Callable[[], Any]], name: str = OURS) -> Iterator[Contender]:
    """A step as it is, compiled, and where there is a GPU in a CUDA graph; each with a replay of its own."""
    import torch

    yield Contender(name, _awaited(make()), "ours")
    yield Contender(f"{name}, compiled", _awaited(torch.compile(make(), fullgraph=True)), "ours")
    if _device() == "cuda":
        yield Contender(f"{name}, in a CUDA graph", _awaited(_captured(make())), "ours")


def _captured(step: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = step()

    def call() -> Any:
        graph.replay()
        return batch

    return call


def _theirs(count: int, sampler: Any, batch_size: int) -> Any:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    storage = LazyTensorStorage(count, device=_device())
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    buffer.extend(TensorDict(_rows(count), batch_size=[count]))
    return buffer


def _peers(make: Callable[[], Any], name: str) -> Iterator[Contender | str]:
    yield from peer("torchrl", name, lambda: _awaited(make()))


def _uniform(count: int) -> Iterator[Contender | str]:
    yield from _ours(lambda: _replay(count, _BATCH).sample)

    def theirs() -> Any:
        from torchrl.data import RandomSampler

        return _theirs(count, RandomSampler(), _BATCH).sample

    yield from _peers(theirs, "torchrl, LazyTensorStorage")


def _slices(count: int) -> Iterator[Contender | str]:
    from mouse_core.replay import Slices

    whole, padded = (Slices(sequence_length=_LENGTH, pad=pad) for pad in (False, True))
    yield from _ours(lambda: _replay(count, _SLICES, slices=whole).sample)
    yield Contender(f"{OURS}, padded, with a mask", _sampler(count, _SLICES, slices=padded), "ours")

    def theirs() -> Any:
        from torchrl.data import SliceSampler

        sampler = SliceSampler(slice_len=_LENGTH, end_key="done", cache_values=True)
        return _theirs(count, sampler, _SLICES * _LENGTH).sample

    yield from _peers(theirs, "torchrl, LazyTensorStorage, trajectories cached")


def _by_priority(count: int) -> Iterator[Contender | str]:
    import torch

    from mouse_core.replay import Priorities

    given = torch.as_tensor(np.random.default_rng(3).exponential(size=_BATCH).astype(np.float32)).to(_device())

    def ours() -> Callable[[], Any]:
        replay = _replay(count, _BATCH, priorities=Priorities())

        def step() -> Any:
            batch = replay.sample()
            replay.set_priorities(batch["index"], given)
            return batch

        return step

    yield from _ours(ours)

    def theirs() -> Any:
        from torchrl.data import PrioritizedSampler

        buffer = _theirs(count, PrioritizedSampler(count, 0.6, 0.4), _BATCH)

        def step() -> Any:
            batch = buffer.sample()
            buffer.update_priority(batch["index"], given)
            return batch

        return step

    yield from _peers(theirs, "torchrl, LazyTensorStorage")
