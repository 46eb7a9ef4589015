"""Actors: what was acknowledged outlives them."""

import os
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import mouse_ray
from mouse_core import ConfigError, DatasetStore, SchemaError, replay
from mouse_core.groups import GrpoBatchMaker, RolloutRecord, RolloutStream, Turn, open_rollouts
from mouse_core.replay import ArrayStorage, MemmapStorage
from tests.core.groups_cases import METADATA, rollout
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def test_an_actor_that_dies_has_everything_when_it_is_back_and_copies_no_arrays(tmp_path: Path) -> None:
    class Maker(GrpoBatchMaker):
        def check_rollout(self, rollout: RolloutRecord) -> None:
            large = [turn.tokens.flags for turn in rollout.turns if len(turn.tokens) > 1000]
            assert not any(flags.owndata or flags.writeable for flags in large), "a copy arrived"
            super().check_rollout(rollout)

    buffer = mouse_ray.RolloutBuffer.remote(tmp_path, 4, batch_maker=Maker(rng_seed=1), sync=False, seal_timeout=1e6)
    given = [rollout(number, metadata=METADATA) for number in range(6)]
    assert ray.get(buffer.add_rollouts.remote(given)) == 6
    batch_id = ray.get(buffer.create_and_store_batch.remote(2))
    used = {example.rollout_uid for example in ray.get(buffer.read_batch.remote(batch_id))}
    kill(buffer)
    assert ray.get(buffer.add_rollouts.remote([*given, rollout(6), rollout(7)])) == 2
    assert ray.get([buffer.size.remote(), buffer.num_groups.remote(), buffer.num_waiting.remote()]) == [8, 2, 0]
    assert ray.get(buffer.batches.remote()) == [batch_id]
    second = ray.get(buffer.create_and_store_batch.remote(6))
    examples = ray.get(buffer.read_batch.remote(second))
    assert {example.rollout_uid for example in examples} | used == {f"r{number}" for number in range(8)}
    assert ray.get(buffer.batch_metadata.remote(second))["batch_size"] == 6
    stored = ray.get(buffer.rollouts.remote(environment="math"))
    assert list(stored) == [*given, rollout(6), rollout(7)]
    assert list(open_rollouts(tmp_path)) == list(stored)
    with pytest.raises(ConfigError, match="batch_size: expected an integer of at least 1, found 0"):
        ray.get(buffer.create_and_store_batch.remote(0))
    tokens = np.arange(100_000)
    turns = (Turn("q", "user", tokens), Turn("a", "assistant", tokens, np.zeros(len(tokens))))
    large = [RolloutRecord("e", "1", "1", f"large-{number}", turns, float(number)) for number in range(4)]
    assert ray.get(buffer.add_rollouts.remote(large)) == 4
    for example in ray.get(buffer.read_batch.remote(ray.get(buffer.create_and_store_batch.remote(4)))):
        assert not example.tokens.flags.writeable
        assert not example.tokens.flags.owndata
    ray.kill(buffer)


@ray.remote(num_cpus=0)
def trainer(batches: Any, rank: int) -> list[str]:
    """A rank's share of two batches."""
    stream = RolloutStream(batches, 40, shard=(rank, 2), timeout=60)
    return [example.rollout_uid for share in islice(stream, 2) for example in share.examples]


@pytest.mark.long
def test_trainers_share_batches_and_held_producers_are_in_nobodys_way(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_maker": GrpoBatchMaker(), "max_ahead": 4, "sync": False}
    buffer = mouse_ray.RolloutBuffer.remote(tmp_path, 4, **options)
    calls = [buffer.add_rollouts.remote([rollout(4 * n + k, example=str(n)) for k in range(4)]) for n in range(20)]
    answered, held = ray.wait(calls, num_returns=20, timeout=0.2)
    # More of them than the actor has threads for producers are held, and batches are made all the same.
    assert len(held) >= 10
    assert wait_until(lambda: ray.get(buffer.num_ahead.remote()) >= 4)
    batches = mouse_ray.ActorBatches(buffer, batch_size=40)
    first, second = ray.get([trainer.remote(batches, rank) for rank in (0, 1)], timeout=60)
    assert sorted(first + second) == sorted(f"r{number}" for number in range(80))
    assert ray.get(calls) == [4] * 20
    assert len(answered) < 11
    ray.kill(buffer)


@ray.remote(num_cpus=0)
def produce(buffer: Any, producer: int, chunks: int) -> list[str]:
    """Add rollouts, some a call; the uids that were acknowledged."""
    acknowledged: list[str] = []
    for chunk in range(chunks):
        rollouts = [
            rollout(10_000 * producer + 10 * chunk + number, example=str(chunk), version=chunk // 20)
            for number in range(5)
        ]
        ray.get(buffer.add_rollouts.remote(rollouts))
        acknowledged += [item.rollout_uid for item in rollouts]
    return acknowledged


@pytest.mark.long
def test_actors_are_killed_while_rollouts_arrive(tmp_path: Path) -> None:
    buffer = mouse_ray.RolloutBuffer.remote(tmp_path, 8, 2, 0.3, batch_maker=GrpoBatchMaker(rng_seed=1), sync=False)
    producers = [produce.remote(buffer, number, 120) for number in range(3)]
    batches: list[str] = []
    kills, waiting, last_kill = 0, producers, time.monotonic()
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.05)
        try:
            batch_id = ray.get(buffer.create_and_store_batch.remote(8))
        except ray.exceptions.RayActorError:
            last_kill = time.monotonic()
            continue
        if batch_id is not None:
            batches.append(batch_id)
        if kills < 3 and time.monotonic() - last_kill > 0.7 and waiting:
            ray.kill(buffer, no_restart=False)
            kills, last_kill = kills + 1, time.monotonic()
    acknowledged = [uid for uids in ray.get(producers) for uid in uids]
    assert len(acknowledged) == 3 * 120 * 5
    kill(buffer)
    ray.get(buffer.flush.remote())
    assert kills >= 1

    stored = open_rollouts(tmp_path)
    assert Counter(stored.uids) == Counter(acknowledged), "each is there, once"
    assert {item.rollout_uid for item in stored} == set(acknowledged)
    known = ray.get(buffer.batches.remote())
    assert set(batches) <= set(known)
    drawn = Counter(example.rollout_uid for name in known for example in ray.get(buffer.read_batch.remote(name)))
    assert drawn
    assert set(drawn.values()) == {1}, "none is in two batches"
    ray.kill(buffer)


def rows_of(first: int, count: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {"observation": (numbers[:, None] * np.ones(3)).astype(np.float32), "reward": numbers.astype(np.float32)}


def test_batches_are_those_of_a_buffer_here() -> None:
    actor = mouse_ray.ReplayBuffer.remote(ArrayStorage(100), batch_size=8, seed=3)
    here = replay.ReplayBuffer(ArrayStorage(100), batch_size=8, seed=3)
    for first in (0, 50):
        there = ray.get(actor.extend.remote(rows_of(first, 50)))
        np.testing.assert_array_equal(there, here.extend(rows_of(first, 50)))
    for _ in range(3):
        found, expected = ray.get(actor.sample.remote()), here.sample()
        assert set(found) == set(expected)
        for name in ("observation", "reward"):
            np.testing.assert_array_equal(found[name], expected[name])
    assert ray.get(actor.size.remote()) == 100
    assert ray.get(actor.stats.remote()) == here.stats()
    state = ray.get(actor.state_dict.remote())
    after = here.sample()["reward"]
    np.testing.assert_array_equal(ray.get(actor.sample.remote())["reward"], after)
    ray.get(actor.extend.remote(rows_of(100, 50)))
    ray.get(actor.load_state_dict.remote(state))
    np.testing.assert_array_equal(ray.get(actor.sample.remote())["reward"], after)
    ray.kill(actor)


@pytest.mark.long
def test_mapped_rows_outlive_the_actor(tmp_path: Path) -> None:
    actor = mouse_ray.ReplayBuffer.remote(MemmapStorage(100, tmp_path / "rows"), batch_size=4)
    ray.get(actor.extend.remote(rows_of(0, 30)))
    kill(actor)
    assert ray.get(actor.size.remote()) == 30
    ray.get(actor.append.remote({"observation": np.ones(3, np.float32), "reward": np.float32(7)}))
    assert ray.get(actor.get.remote(30))["reward"] == 7
    assert ray.get(actor.get.remote(slice(0, 30)))["reward"].tolist() == list(range(30))
    ray.kill(actor)


@pytest.mark.long
def test_a_checkpoint_is_loaded_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "buffer.mouse"
    actor = mouse_ray.ReplayBuffer.remote(ArrayStorage(100), batch_size=4, checkpoint=file)
    ray.get(actor.extend.remote(rows_of(0, 30)))
    ray.get(actor.dumps.remote(file))
    ray.kill(actor)
    again = mouse_ray.ReplayBuffer.remote(ArrayStorage(100), batch_size=4, checkpoint=file)
    assert ray.get(again.size.remote()) == 30
    ray.kill(again)


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


def process_of(actor: Any) -> int | None:
    """The id of the process that an actor runs in; None while it is being started again."""
    try:
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))  # type: ignore[no-any-return]
    except ray.exceptions.RayActorError:
        return None


def kill(actor: Any) -> None:
    """Kill an actor's process, and wait until it runs in another one: a dying actor may still answer."""
    before = process_of(actor)
    ray.kill(actor, no_restart=False)
    limit = time.monotonic() + 180
    while process_of(actor) in (before, None):
        assert time.monotonic() < limit
        time.sleep(0.1)
