"""RolloutBuffer as an actor: what was acknowledged outlives it."""

import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import mouse_ray
from mouse_core import ConfigError
from mouse_core.groups import GrpoBatchMaker, RolloutRecord, RolloutStream, Turn, open_rollouts
from tests.core.groups_cases import METADATA, rollout
from tests.ray.actors import kill
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
