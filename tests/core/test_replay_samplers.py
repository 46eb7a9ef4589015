"""Samplers of single rows, with and without replacement."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, StateError
from mouse_core.replay import RandomSampler, SamplerWithoutReplacement
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.storages.array import ArrayStorage
from tests.core.statistics import check_frequencies
from tests.raising import assert_raises


def buffer_of(sampler: Any, batch_size: int, rows: int, capacity: int | None = None, seed: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(ArrayStorage(capacity or rows), sampler, batch_size=batch_size, seed=seed)
    if rows:
        buffer.extend({"row": np.arange(rows)})
    return buffer


def test_every_row_of_every_environment_comes_equally_often() -> None:
    buffer = buffer_of(RandomSampler(), 1000, rows=130, capacity=100)
    drawn = np.concatenate([buffer.sample()["row"] for _ in range(40)])
    assert set(drawn.tolist()) == set(range(30, 130))
    check_frequencies(np.bincount(drawn - 30), np.full(100, 0.01))
    assert_raises(ConfigError, "found an empty buffer", buffer_of(RandomSampler(), 4, rows=0, capacity=4).sample)
    assert_raises(StateError, "sampler: expected the state of a", RandomSampler().load_state_dict, {"rows": 3})
    buffer = ReplayBuffer(ArrayStorage(60, ndim=2), RandomSampler(), batch_size=3000)
    buffer.extend({"env": np.tile(np.arange(6), (10, 1))})
    check_frequencies(np.bincount(buffer.sample()["env"]), np.full(6, 1 / 6))


@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 12),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    overwritten=st.integers(0, 50),
    restart=st.integers(0, 8),
)
def test_an_epoch_has_every_row_once(
    rows: int, batch: int, drop_last: bool, shuffle: bool, overwritten: int, restart: int
) -> None:
    def make(seed: int) -> ReplayBuffer:
        sampler = SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle)
        return buffer_of(sampler, batch, rows + overwritten, rows, seed)

    buffer = make(3)
    if batch > rows:
        assert_raises(ConfigError, f"at most {rows} rows, the size of the buffer, in a batch without", buffer.sample)
        return
    per_epoch = rows // batch if drop_last else -(-rows // batch)
    every = list(range(overwritten, overwritten + rows))
    number = 0
    for _ in range(3):
        seen: list[int] = []
        for place in range(per_epoch):
            if number == restart:
                before, buffer = buffer, make(0)
                buffer.load_state_dict(before.state_dict())
            found = buffer.sample()["row"].tolist()
            assert len(found) == batch or (not drop_last and place == per_epoch - 1)
            assert buffer.ran_out == (place == per_epoch - 1)
            seen += found
            number += 1
        assert len(set(seen)) == len(seen) == (per_epoch * batch if drop_last else rows)
        assert set(seen) <= set(every)
        if not shuffle:
            assert seen == every[: len(seen)]


def test_epochs_have_orders_of_their_own_and_the_streams_never_change() -> None:
    buffer = buffer_of(SamplerWithoutReplacement(), 50, rows=50)
    orders = {tuple(buffer.sample()["row"].tolist()) for _ in range(5)}
    assert len(orders) == 5
    first = np.array([buffer.sample()["row"][0] for _ in range(3000)])
    check_frequencies(np.bincount(first, minlength=50), np.full(50, 0.02))
    found = [
        [buffer_of(sampler, 5, rows=20_000, seed=4).sample()["row"].tolist()]
        for sampler in (RandomSampler(), SamplerWithoutReplacement())
    ]
    assert found == GOLDEN


def test_more_rows_begin_an_epoch_and_states_that_cannot_be_are_refused() -> None:
    buffer = buffer_of(SamplerWithoutReplacement(shuffle=False), 2, rows=4, capacity=6)
    assert buffer.sample()["row"].tolist() == [0, 1]
    buffer.extend({"row": np.array([4, 5])})
    assert [buffer.sample()["row"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    buffer.extend({"row": np.array([6])})  # over row 0, in a ring that was full
    assert [buffer.sample()["row"].tolist() for _ in range(2)] == [[4, 5], [1, 2]]
    buffer = buffer_of(SamplerWithoutReplacement(), 4, rows=10)
    buffer.sample()
    sampler: Any = buffer.sampler
    state = sampler.state_dict()
    for change in ({"position": -1}, {"rows": True}, {"config": "other"}, {"more": 1}, {"position": 11}):
        assert_raises(StateError, "sampler: expected", sampler.load_state_dict, {**state, **change})
    assert sampler.state_dict() == state


GOLDEN = [[[4003, 4004, 10501, 7090, 3402]], [[12916, 189, 14045, 17831, 17790]]]
