"""Replay on the device in torch, beside TorchRL's on the same device: the same rows, written and drawn by each.

A row is an observation of 8 numbers, an action, reward and done; episodes have 200 steps. On a GPU where there is one;
then a call waits for what it made. On a CPU all have one thread: what Inductor makes divides a few hundred rows among
several, of which each waits for the others, longer than all of the work takes where the cores have other work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from mouse_core.replay import Priorities, Slices
from mouse_torch.device import Replay
from tests.bench.measuring import Contender
from tests.bench.replay import BATCH, LENGTH, SLICES, small_rows
from tests.bench.results import Settings, Table, compare_on, peer

OURS = "mouse_torch.device"
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Given = Iterator[Contender | str]


def tables(settings: Settings) -> list[Table]:
    """Rows and slices drawn, rows by priority with new ones set, and ten times as many rows."""
    count, threads = 1_000_000, torch.get_num_threads()
    works: tuple[tuple[str, str, Given], ...] = (
        ("uniform", f"{BATCH} of {count:,} rows", _uniform(count)),
        ("slices", f"{SLICES} slices of {LENGTH} steps of {count:,} rows", _slices(count)),
        ("priority", f"{BATCH} of {count:,} rows by priority, and new priorities", _by_priority(count)),
        ("sizes", f"{BATCH} rows from replays of different sizes", _sizes(count)),
    )
    torch.set_num_threads(1)
    found = [
        table
        for key, what, given in works
        for table in compare_on(
            device_name(), settings, f"torch-{key}", f"Replay on the device in torch: {what}", given
        )
    ]
    torch.set_num_threads(threads)
    return found


def device_name() -> str:
    """What torch computes on here: "cpu", or the name of its first GPU."""
    return "cpu" if _DEVICE == "cpu" else f"{torch.cuda.get_device_name()}, torch"


def _rows(count: int) -> Any:
    return {name: torch.as_tensor(values).to(_DEVICE) for name, values in small_rows(count).items()}


def _awaited(draw: Callable[[], Any]) -> Callable[[int], Any]:
    if _DEVICE == "cpu":
        return lambda _: draw()

    def call(_: int) -> Any:
        batch = draw()
        torch.cuda.synchronize()
        return batch

    return call


def _replay(count: int, batch_size: int, **options: Any) -> Any:
    """A full replay."""
    rows = _rows(count)
    example = {name: values[0] for name, values in rows.items()}
    replay = Replay(example, count, batch_size=batch_size, num_envs=None, device=_DEVICE, **options)
    replay.extend(rows)
    return replay


def _ours(make: Callable[[], Callable[[], Any]]) -> Iterator[Contender]:
    """A step as it is, compiled, and where there is a GPU in a CUDA graph; each with a replay of its own."""
    yield Contender(OURS, _awaited(make()), "ours")
    yield Contender(f"{OURS}, compiled", _awaited(torch.compile(make(), fullgraph=True)), "ours")
    if _DEVICE == "cuda":
        yield Contender(f"{OURS}, in a CUDA graph", _awaited(_captured(make())), "ours")


def _captured(step: Callable[[], Any]) -> Callable[[], Any]:
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


def _theirs(
    count: int, sampler: str, batch_size: int, *arguments: Any, name: str = "", given: Any = None, **options: Any
) -> Given:
    """TorchRL's buffer on the device, with the sampler of that name; new priorities are set where some are given."""

    def made() -> Callable[[int], Any]:
        from tensordict import TensorDict
        from torchrl import data

        storage = data.LazyTensorStorage(count, device=_DEVICE)
        drawing = getattr(data, sampler)(*arguments, **options)
        buffer = data.TensorDictReplayBuffer(storage=storage, sampler=drawing, batch_size=batch_size)
        buffer.extend(TensorDict(_rows(count), batch_size=[count]))

        def updated() -> Any:
            batch = buffer.sample()
            buffer.update_priority(batch["index"], given)
            return batch

        return _awaited(buffer.sample if given is None else updated)

    yield from peer("torchrl", f"torchrl, LazyTensorStorage{name}", made)


def _sizes(count: int) -> Given:
    # Made here: rows that nobody reads for long are read more slowly for a while in a virtual machine.
    for rows in (count, 10 * count):
        yield Contender(f"{OURS}, {rows:,} rows", _awaited(_replay(rows, BATCH).sample), "ours")


def _uniform(count: int) -> Given:
    yield from _ours(lambda: _replay(count, BATCH).sample)
    yield from _theirs(count, "RandomSampler", BATCH)


def _slices(count: int) -> Given:
    whole, padded = (Slices(sequence_length=LENGTH, pad=pad) for pad in (False, True))
    yield from _ours(lambda: _replay(count, SLICES, slices=whole).sample)
    yield Contender(f"{OURS}, padded, with a mask", _awaited(_replay(count, SLICES, slices=padded).sample), "ours")
    how: dict[str, Any] = {"slice_len": LENGTH, "end_key": "done", "cache_values": True}
    yield from _theirs(count, "SliceSampler", SLICES * LENGTH, name=", trajectories cached", **how)


def _by_priority(count: int) -> Given:
    given = torch.as_tensor(np.random.default_rng(3).exponential(size=BATCH).astype(np.float32)).to(_DEVICE)

    def ours() -> Callable[[], Any]:
        replay = _replay(count, BATCH, priorities=Priorities())

        def step() -> Any:
            batch = replay.sample()
            replay.set_priorities(batch["index"], given)
            return batch

        return step

    yield from _ours(ours)
    yield from _theirs(count, "PrioritizedSampler", BATCH, count, 0.6, 0.4, given=given)
