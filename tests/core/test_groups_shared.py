"""Producers in other processes of this machine, and a buffer that goes away and comes back."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core.collect import StoreServer
from mouse_core.errors import ConfigError, DataError, StorageError, TimedOutError
from mouse_core.groups import (
    GrpoBatchMaker,
    RolloutBuffer,
    RolloutClient,
    RolloutColumn,
    RolloutRecord,
    SharedBuffer,
    Turn,
    open_rollouts,
)
from tests.core import groups_shared_crash as crash
from tests.core.groups_cases import METADATA, group, rollout
from tests.core.killing import forked
from tests.waiting import wait_until

COLUMNS = [
    RolloutColumn("screen", "token", "uint8", (2, 2)),
    RolloutColumn("reference"),
]


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[RolloutBuffer]:
    options: dict[str, Any] = {"columns": COLUMNS, "max_ahead": 8, "batch_maker": GrpoBatchMaker(), "sync": False}
    with RolloutBuffer(tmp_path / "rollouts", 4, **options) as made:
        yield made


def seen(number: int) -> RolloutRecord:
    """A rollout with columns and metadata."""
    turns = (
        Turn("?", "user", [1, 2], columns={"screen": np.full((2, 2, 2), number)}),  # type: ignore[arg-type]
        Turn("4", "assistant", [3], [-0.5], float(number), METADATA, {"reference": [2]}),  # type: ignore[arg-type]
    )
    return RolloutRecord("math", str(number // 4), "1", f"s{number}", turns, created=float(number))


def test_a_client_is_as_the_buffer_itself(buffer: RolloutBuffer) -> None:
    with pytest.raises(ConfigError, match="buffer: expected a RolloutBuffer, found 3"):
        SharedBuffer(3)  # type: ignore[arg-type]
    with StoreServer(SharedBuffer(buffer)), RolloutClient(buffer.root_path, "reader") as client:
        assert client.add_rollouts(map(seen, range(5))) == 5
        assert client.add_rollouts([seen(0), rollout(7)]) == 1
        assert (len(client), client.num_ahead) == (6, buffer.num_ahead)
        for number in range(5):
            found, given = buffer.rollout(f"s{number}"), seen(number)
            assert (found.key, found.reward) == (given.key, number)
            assert replace(found.turns[1], columns={}) == replace(given.turns[1], columns={})
            assert found.turns[1].columns["reference"].tolist() == [2]
            assert found.turns[0].columns["screen"].tolist() == [[[number] * 2] * 2] * 2
        assert buffer.create_and_store_batch(4) is not None
        with pytest.raises(DataError, match="expected a RolloutRecord at index 1, found 3"):
            client.add_rollouts([rollout(1), 3])  # type: ignore[list-item]
        assert client.contains(["s9", "s0", "s4"]) == buffer.contains(["s9", "s0", "s4"]) == [False, True, True]
        assert ("s0" in client, "s9" in client, 3 in client) == (True, False, False)
        client.set_policy_version(1)
        with pytest.raises(DataError, match="expected a version up to '1'"):
            client.add_rollout(rollout(8, version=2))
        assert client.flush() == 2
        assert client.columns.keys() == buffer.columns.keys()
    with pytest.raises(StorageError, match="expected an answer of"):
        RolloutClient(buffer.root_path, timeout_s=0.05)


def test_who_waits_for_room_waits_there_too_and_is_let_go(buffer: RolloutBuffer) -> None:
    server = StoreServer(SharedBuffer(buffer))
    client = RolloutClient(server.address)
    assert client.add_rollouts(group(0, 8)) == 8
    with pytest.raises(TimedOutError, match="found 8 waiting rollouts with max_ahead=8"):
        client.add_rollouts([rollout(90)], timeout=0.05)
    held: list[int] = []
    producer = threading.Thread(target=lambda: held.append(client.add_rollouts(group(8, 2))))
    producer.start()
    while not buffer.num_ahead:
        pass
    server.close()  # it waits for nobody
    assert not held
    with StoreServer(SharedBuffer(buffer)):
        assert buffer.create_and_store_batch(8) is not None
        producer.join(20)
    assert held == [2]
    assert "r9" in buffer
    client.close()


def test_a_producer_that_is_killed_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with RolloutBuffer(tmp_path / "rollouts", 4, sync=False) as buffer, StoreServer(SharedBuffer(buffer)):
        told = tmp_path / "told"
        for _ in range(2):
            child = forked(partial(crash.produce, buffer.root_path, told, 0))
            assert wait_until(lambda: told.exists() and len(crash.numbers(told)) > 40 * (_ + 1))  # noqa: B023
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
    found = Counter(open_rollouts(buffer.root_path).uids)
    with RolloutBuffer(buffer.root_path) as again:
        found.update(uid for uid in again._waiting.by_uid)
    assert set(found.values()) == {1}
    assert {f"p0-{number}" for number in crash.numbers(told)} <= found.keys()


@pytest.mark.slow
def test_producers_and_their_buffer_are_killed(tmp_path: Path) -> None:
    assert crash.main(tmp_path, 5, seed=1) == {"producer": 5, "buffer": 5}
