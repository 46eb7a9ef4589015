"""What docs/reference/coming-from.md alone says: defaults, what is not offered, and that its lines are numbered."""

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core.errors import StateError
from mouse_core.randomness import Key
from mouse_core.replay import (
    ArrayStorage,
    ListStorage,
    MemmapStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coming-from.md"


def rows(n: int, episode: int = 10) -> dict[str, Any]:
    done = np.zeros(n, np.int8)
    done[episode - 1 :: episode] = 1
    return {"x": np.arange(n), "reward": np.ones(n, np.float32), "done": done, "episode": np.arange(n) // episode}


def filled(n: int = 40, size: int = 100, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(ArrayStorage(size), **{"batch_size": 8, **options})
    buffer.extend(rows(n))
    return buffer


def test_every_line_has_a_number_of_its_own() -> None:
    numbers = re.findall(r"^\| ([TFCMSN]\d\d) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 100


# What is not offered: the names of the arguments, which are taken by none of these.
ABSENT: list[tuple[str, Callable[..., Any], tuple[str, ...]]] = [
    ("T45", SliceSampler, ("cache_values", "ends", "trajectories", "compile", "use_gpu")),
    ("T74", ReplayBuffer, ("service_backend",)),
    ("T78", MemmapStorage, ("backend", "host", "port")),
]


@pytest.mark.parametrize(("row", "kind", "names"), ABSENT)
def test_what_is_not_offered(row: str, kind: Callable[..., Any], names: tuple[str, ...]) -> None:
    assert not set(names) & set(inspect.signature(kind).parameters)


def test_T01_defaults() -> None:
    buffer = ReplayBuffer()
    assert isinstance(buffer.storage, ListStorage)
    assert buffer.storage.capacity == 1000
    assert isinstance(buffer.sampler, RandomSampler)
    assert isinstance(buffer.writer, RoundRobinWriter)


def test_T13_F02_the_seed_decides_the_draws_and_those_of_transforms() -> None:
    class Noise:
        random = True

        def __call__(self, batch: Any, key: Key) -> Any:
            return {**batch, "noise": key.uniform(8)}

    streams = []
    for seed in (1, 1, 2):
        np.random.seed(len(streams))  # noqa: NPY002 - which must not matter
        buffer = filled(transform=Noise(), seed=seed)
        streams.append([np.concatenate([(b := buffer.sample())["x"], b["noise"]]).tolist() for _ in range(3)])
    assert streams[0] == streams[1] != streams[2]


def test_T11_rows_and_objects_are_two_kinds_of_state(tmp_path: Path) -> None:
    storages = [ArrayStorage(4), MemmapStorage(4, tmp_path / "from"), ListStorage(4)]
    for number, storage in enumerate(storages):
        buffer = ReplayBuffer(storage)
        buffer.extend({"x": np.arange(3)})
        others = [ArrayStorage(4), MemmapStorage(4, tmp_path / f"to {number}"), ListStorage(4)]
        for other in map(ReplayBuffer, others):
            if isinstance(storage, ListStorage) == isinstance(other.storage, ListStorage):
                other.load_state_dict(buffer.state_dict())
                assert [int(other[i]["x"]) for i in range(3)] == [0, 1, 2]
            else:
                with pytest.raises(StateError, match="expected a state of"):
                    other.load_state_dict(buffer.state_dict())


def test_T18_an_empty_buffer_is_sent_as_few_bytes() -> None:
    assert len(pickle.dumps(ReplayBuffer(ArrayStorage(10**9)))) < 10_000


def test_T25_indices_are_flat() -> None:
    import torch
    from tensordict import TensorDict

    from mouse_torch import ReplayBuffer as TorchBuffer

    buffer = TorchBuffer(ArrayStorage(20, ndim=2))
    indices = buffer.extend(TensorDict({"x": torch.arange(10).reshape(2, 5)}, [2, 5], names=[None, "time"]))
    assert buffer[indices[1, 3:5]]["x"].tolist() == [8, 9]
    with pytest.raises(IndexError):
        buffer[0, 3:5]
