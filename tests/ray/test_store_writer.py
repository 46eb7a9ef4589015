"""A store that an actor writes: each row once, whatever dies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import mouse_ray
from mouse_core import DatasetStore, SchemaError
from tests.ray.actors import kill

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def rows(first: int, count: int) -> dict[str, Any]:
    return {
        "action": np.zeros(count, np.int64),
        "reward": np.arange(first, first + count, dtype=np.float32),
        "done": np.zeros(count, np.int64),
    }


@pytest.mark.long
def test_rows_of_tasks_are_in_the_store_once_though_the_writer_dies(tmp_path: Path) -> None:
    writer = mouse_ray.StoreWriter.remote(tmp_path / "s", sync="none")

    @ray.remote(num_cpus=0)
    def collect(writer: Any, number: int) -> int:
        client = mouse_ray.store_client(writer, f"actor-{number}", timeout_s=120)
        for turn in range(40):
            client.extend(rows(1000 * number + 10 * turn, 10))
        return client.written

    tasks = [collect.remote(writer, number) for number in range(2)]
    for _ in range(3):
        kill(writer)
    assert ray.get(tasks) == [40, 40]
    assert ray.get(writer.clients.remote()) == {"actor-0": 40, "actor-1": 40}
    ray.get(writer.flush.remote())
    found = [row["reward"] for row in DatasetStore.open(tmp_path / "s")[:]]
    assert sorted(found) == [*range(400), *range(1000, 1400)]
    assert ray.get(writer.size.remote()) == 800
    ray.get(writer.close.remote())
    ray.kill(writer)


def test_refused_rows_come_back_and_a_client_goes_on(tmp_path: Path) -> None:
    writer = mouse_ray.StoreWriter.remote(tmp_path / "s")
    client = mouse_ray.store_client(writer, "a")
    client.extend(rows(0, 3))
    with pytest.raises(SchemaError, match="odd"):
        client.extend({**rows(3, 3), "odd": [1, 2, 3]})
    client.append({name: values[0] for name, values in rows(3, 1).items()})
    again = mouse_ray.store_client(writer, "a")
    assert again.written == 2
    again.flush()
    assert [row["reward"] for row in DatasetStore.open(tmp_path / "s")[:]] == [0, 1, 2, 3]
    ray.get(writer.close.remote())
    ray.kill(writer)
