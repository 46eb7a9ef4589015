"""Samplers of single rows, with and without replacement, consumed, backwards or by version; slices thinned out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, MissingFieldError, PrefetchBatchifier, SchemaError, StateError
from mouse_core.replay import (
    ArrayStorage,
    ConsumingSampler,
    MarkSlices,
    MaxValueWriter,
    NextView,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReturnsToGo,
    ReverseSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessSampler,
)
from tests.core.statistics import check_frequencies
from tests.raising import assert_raises

STEPS = st.lists(st.tuples(st.sampled_from(["write", "draw"]), st.integers(1, 7)), max_size=20)


def buffer_of(sampler: Any, capacity: int = 10, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(ArrayStorage(capacity), sampler, **{"batch_size": 4, **options})


@given(STEPS, st.integers(1, 3), st.booleans())
def test_rows_come_so_many_times_and_no_more(steps: list[tuple[str, int]], times: int, shuffle: bool) -> None:
    buffer = buffer_of(ConsumingSampler(times, shuffle=shuffle), 9)
    left: dict[int, int] = {}  # of the rows that are there, by their number
    written = 0
    for what, n in steps:
        if what == "write":
            buffer.extend({"row": np.arange(written, written + n)})
            left |= dict.fromkeys(range(written, written + n), times)
            written += n
            left = {row: count for row, count in left.items() if row >= written - 9}
            continue
        live = [row for row, count in sorted(left.items()) if count]
        if not live:
            assert_raises(ConfigError, r"expected (at least|rows)", buffer.sample, n)
            continue
        drawn = buffer.sample(n)["row"].tolist()
        assert len(drawn) == len(set(drawn)) == min(n, len(live))
        assert set(drawn) <= set(live) if shuffle else drawn == live[:n]
        most = sorted((left[row] for row in live), reverse=True)[: len(drawn)]  # who came least often comes first
        assert not shuffle or [left[row] for row in drawn] == most
        for row in drawn:
            left[row] -= 1
        assert buffer.ran_out == (not any(left.values()))


@pytest.mark.parametrize(("rows", "sizes"), [(256, [64] * 16), (100, [64] * 6 + [16])])
def test_rows_that_were_written_together_come_in_passes(rows: int, sizes: list[int]) -> None:
    buffer = buffer_of(ConsumingSampler(4), rows, batch_size=64)
    buffer.extend({"row": np.arange(rows)})
    batches = [batch["row"] for batch in buffer]
    assert [len(batch) for batch in batches] == sizes
    drawn = np.concatenate(batches)
    for first in range(0, 4 * rows, rows):
        assert sorted(drawn[first : first + rows].tolist()) == [*range(rows)]


def test_a_queue_of_trajectories_and_what_was_consumed_is_iterated_prefetched_and_saved() -> None:
    queue = buffer_of(ConsumingSampler(shuffle=False, drop_last=True), 8, batch_size=2)
    for number in range(3):
        queue.append({"obs": np.full((5, 2), number)})  # a trajectory of 5 steps
    assert queue.sample()["obs"][:, 0, 0].tolist() == [0, 1]
    assert_raises(ConfigError, r"at least 2 rows .* found 1 among 3 rows; write more", queue.sample)
    queue.append({"obs": np.full((5, 2), 3)})
    assert queue.sample()["obs"][:, 0, 0].tolist() == [2, 3]
    buffer = buffer_of(ConsumingSampler(2), seed=3)
    buffer.extend({"row": np.arange(10)})
    again = buffer_of(ConsumingSampler(2))
    again.load_state_dict(buffer.state_dict())
    drawn = [row for batch in buffer for row in batch["row"].tolist()]
    assert sorted(drawn) == sorted([*range(10)] * 2)
    with PrefetchBatchifier(again, prefetch=2, num_workers=2) as loader:
        assert [row for _ in range(3) for row in loader.next_batch()["row"].tolist()] == drawn[:12]
    buffer[3] = {"row": 30}  # a row that is changed is no new one
    assert buffer.sampler.left == 0
    buffer.append({"row": 10})
    assert buffer.sample()["row"].tolist() == [10]
    assert_raises(StateError, "times=3", buffer_of(ConsumingSampler(3)).load_state_dict, buffer.state_dict())
    with pytest.raises(StateError, match=r"0\.\.2 remaining draws"):
        ConsumingSampler(2).load_state_dict({"config": repr(buffer.sampler), "left": np.array([3]), "ran_out": 0})


@given(STEPS, st.integers(1, 4))
def test_rows_come_backwards(steps: list[tuple[str, int]], stride: int) -> None:
    buffer = buffer_of(ReverseSampler(stride), 9)
    written, head = 0, None
    for what, n in steps:
        if what == "write":
            buffer.extend({"row": np.arange(written, written + n)})
            written += n
            continue
        alive = list(range(written))[-9:][::-1]  # the newest first
        if not alive:
            continue
        if head is None or alive[0] - head >= 2 * stride or head not in alive:
            head = alive[0]
        first = alive.index(head)
        expected = [alive[(first + number * stride) % len(alive)] for number in range(n)]
        assert buffer.sample(n)["row"].tolist() == expected
        head -= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_delivers_all_that_is_left_and_goes_on_when_there_is_more(workers: int) -> None:
    buffer = buffer_of(ConsumingSampler(shuffle=False), 40)
    buffer.extend({"row": np.arange(10)})
    with PrefetchBatchifier(buffer, prefetch=3, num_workers=workers) as loader:
        assert [batch["row"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        for first in (10, 20):  # an epoch for each that comes
            assert_raises(ConfigError, "write more", loader.next_batch)
            buffer.extend({"row": np.arange(first, first + 5)})
            assert [batch["row"].tolist() for batch in loader] == [[*range(first, first + 4)], [first + 4]]
        buffer.extend({"row": np.arange(5)})
        assert len(loader.next_batch()["row"]) == 4
        buffer.extend({"row": np.arange(5, 9)})  # where one was drawn ahead, and the next one could not be
        assert [loader.next_batch()["row"].tolist() for _ in range(2)] == [[4], [5, 6, 7, 8]]


def test_rows_that_are_too_old_do_not_come_and_newer_ones_come_more_often() -> None:
    sampler = StalenessSampler(2, weight=lambda age: 1 / (age + 1), version_key=("policy", "version"))
    buffer = buffer_of(sampler, 40)
    buffer.extend({"policy": {"version": np.repeat(np.arange(4), 10)}})
    batch = buffer.sample(4000)
    counts = np.bincount(batch["policy"]["version"], minlength=4)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / 4000, np.array([1 / 3, 1 / 2, 1]) / (11 / 6), atol=0.03)
    assert (batch["staleness"] == 3 - batch["policy"]["version"]).all()
    sampler.version = 5
    assert set(buffer.sample(50)["staleness"].tolist()) == {2}
    again = buffer_of(StalenessSampler(2, weight=lambda age: 1 / (age + 1), version_key=("policy", "version")), 40)
    again.load_state_dict(buffer.state_dict())
    assert again.sampler.version == 5
    assert again.sample()["index"].tolist() == buffer.sample()["index"].tolist()
    sampler.version = 6
    assert_raises(ConfigError, "at most 2 versions older than version 6, found version 3 as the newest", buffer.sample)
    buffer.append({"policy": {"version": 6}})
    assert buffer.sample()["index"].tolist() == [0] * 4
    sampler.version = 1  # rows that are newer than what is trained are fresh
    assert buffer.sample()["staleness"].min() == 0


def test_versions_count_from_the_next_batch_on_and_those_that_are_none_are_refused() -> None:
    def weight(age: Any) -> Any:
        sampler.version = 5  # as by another thread, which holds no lock
        return age + 1

    sampler = StalenessSampler(weight=weight)
    buffer = buffer_of(sampler)
    buffer.extend({"policy_version": np.full(3, 3)})
    assert [buffer.sample()["staleness"].max() for _ in range(2)] == [0, 2]
    for version, error in ((np.zeros(3), SchemaError), (np.zeros((3, 2), int), SchemaError)):
        buffer = buffer_of(StalenessSampler())
        buffer.extend({"policy_version": version})
        assert_raises(error, "an integer for each row", buffer.sample)
    buffer = buffer_of(StalenessSampler())
    buffer.extend({"row": np.arange(3)})
    assert_raises(MissingFieldError, "expected", buffer.sample)
    for weight, error in ((lambda age: -1.0 - age, DataError), (lambda age: 0.0 * age, ConfigError)):
        buffer = buffer_of(StalenessSampler(weight=weight))
        buffer.extend({"policy_version": np.arange(3)})
        assert_raises(error, "weight", buffer.sample)
    for wrong in ({"max_staleness": -1}, {"weight": 3}):
        assert_raises(ConfigError, "expected", StalenessSampler, **wrong)
    assert_raises(SchemaError, "staleness", buffer.extend, {"policy_version": np.arange(3), "staleness": np.arange(3)})


def expected_slices(lengths: list[int], alive: int, length: int, period: int, dilation: int) -> set[tuple[int, ...]]:
    """The rows of every slice, of episodes of these lengths of which the newest ``alive`` rows exist."""
    found, begin, total = set(), 0, sum(lengths)
    for steps in lengths:
        end = begin + steps
        for start in range(begin, end, period):
            rows = tuple(start + number * dilation for number in range(length))
            if rows[0] >= total - alive and rows[-1] < end:
                found.add(rows)
        begin = end
    return found


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_slices_with_a_period_and_a_dilation(lengths: list[int], length: int, period: int, dilation: int) -> None:
    expected = expected_slices(lengths, 17, length, period, dilation)
    options = {"sequence_length": length, "period": period, "dilation": dilation, "end_key": "done"}
    done = np.concatenate([np.arange(steps) == steps - 1 for steps in lengths])
    rows = {"row": np.arange(len(done)), "done": done}
    for weighting in ("step", "trajectory"):
        buffer = buffer_of(SliceSampler(**options, pad=False, weighting=weighting), 17, batch_size=400)
        buffer.extend(rows)
        if not expected:
            assert_raises(ConfigError, r"longest|at most", buffer.sample)
            return
        assert set(map(tuple, buffer.sample()["row"].tolist())) == expected
    padded = buffer_of(SliceSampler(**options), 17, batch_size=400)
    padded.extend(rows)
    batch = padded.sample()
    assert batch["row"].shape == (400, length)
    assert (np.diff(batch["row"])[batch["mask"][:, 1:]] == dilation).all()
    whole = set(map(tuple, batch["row"][batch["mask"].all(axis=1)].tolist()))
    assert whole == expected


@pytest.mark.parametrize(
    ("transform", "kind"),
    [
        *((NextView(), SliceSampler), (NStep(2, 1.0), PrioritizedSliceSampler)),
        ([lambda batch: batch, ReturnsToGo()], SliceSampler),
    ],
)
def test_steps_that_lie_apart_are_no_neighbours(kind: Any, transform: Any) -> None:
    with pytest.raises(ConfigError, match=r"dilation=1 for (NextView|NStep|ReturnsToGo), which pairs"):
        ReplayBuffer(ArrayStorage(30), kind(sequence_length=3, dilation=2), transform=transform)
    buffer = ReplayBuffer(ArrayStorage(30), SliceSampler(sequence_length=3), transform=transform)
    with pytest.raises(ConfigError, match="found dilation=2"):
        buffer.with_parts(sampler=kind(sequence_length=3, dilation=2, pad=False))


def test_a_dilation_of_prioritised_slices_and_flat_ones() -> None:
    done = np.arange(20) % 10 == 9
    buffer = buffer_of(PrioritizedSliceSampler(sequence_length=3, dilation=4, end_key="done", pad=False), 20)
    buffer.extend({"row": np.arange(20), "done": done})
    batch = buffer.sample(40)
    assert batch["priority_weight"].shape == (40, 3)
    assert (np.diff(batch["row"]) == 4).all()
    assert set(batch["row"][:, 0].tolist()) == {0, 1, 10, 11}
    flat = SliceSampler(sequence_length=3, dilation=4, end_key="done", pad=False, strict_length=False, span=(0, True))
    short = buffer_of(flat, 20)
    short.extend({"row": np.arange(20), "done": done})
    batch = short.sample(60)
    for number in range(60):
        part = batch["row"][batch["slice_id"] == number].tolist()
        assert part == list(range(part[0], part[0] // 10 * 10 + 10, 4))[:3]
    assert_raises(ConfigError, "dilation", SliceSampler, sequence_length=3, dilation=2, span=1)
    for name in ("period", "dilation"):
        assert_raises(ConfigError, name, SliceSampler, sequence_length=3, **{name: 0})
    sampler = SliceSampler(sequence_length=3, dilation=2, pad=False, strict_length=False)
    buffer = ReplayBuffer(ArrayStorage(30), sampler, transform=NextView(), batch_size=20)
    buffer.extend({"row": np.arange(28), "done": np.arange(28) % 14 == 13})
    batch = buffer.sample()
    assert (batch["next"]["row"] - batch["row"])[batch["mask"] & ~batch["next"]["done"]].all()
    assert set((batch["next"]["row"] - batch["row"])[batch["mask"]].tolist()) <= {0, 1}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([SliceSampler, PrioritizedSliceSampler]),
)
def test_steps_to_burn_in_lie_before_every_row(lengths: list[int], sizes: tuple[int, int, int], kind: Any) -> None:
    burn_in, learned, dilation = sizes
    options = {"sequence_length": burn_in + learned, "burn_in": burn_in, "dilation": dilation, "span": (False, True)}
    done = np.concatenate([np.arange(steps) == steps - 1 for steps in lengths])
    buffer = buffer_of(kind(**options), 17, batch_size=300)
    buffer.extend({"row": np.arange(len(done)), "done": done})
    batch = buffer.sample()
    begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    ends = np.repeat(np.cumsum(lengths), lengths)
    oldest = max(0, len(done) - 17)
    anchors = batch["row"][:, burn_in]
    for slice_, mask, anchor in zip(batch["row"], batch["mask"], anchors, strict=True):
        wanted = anchor + dilation * np.arange(-burn_in, learned)
        there = (wanted >= max(begins[anchor], oldest)) & (wanted < ends[anchor])
        assert mask.tolist() == there.tolist()
        assert slice_[there].tolist() == wanted[there].tolist()
    if dilation == 1 and min(lengths) >= learned:
        assert set(anchors.tolist()) == set(range(oldest, len(done)))
    flat = buffer_of(kind(**options, pad=False, strict_length=False), 17, batch_size=20)
    flat.extend({"row": np.arange(len(done)), "done": done})
    assert flat.sample()["index"].ndim == 1


def test_steps_to_burn_in_and_marks_that_cannot_be() -> None:
    for wrong in ({"burn_in": 3}, {"burn_in": -1}, {"burn_in": 1, "span": True}):
        assert_raises(ConfigError, r"burn.in", SliceSampler, sequence_length=3, **wrong)
    stop = buffer_of(SliceSampler(sequence_length=4, burn_in=2, end_key="done", pad=False), 20, batch_size=50)
    stop.extend({"row": np.arange(20), "done": np.arange(20) % 5 == 4})
    batch = stop.sample()
    lengths = np.bincount(batch["slice_id"])
    assert set(lengths.tolist()) == {2, 3, 4}  # whole but for what is burnt in
    assert_raises(ConfigError, "first or for last", MarkSlices)
    single = buffer_of(None, transform=MarkSlices(first="begin"))
    single.extend({"row": np.arange(3)})
    assert_raises(SchemaError, "single rows", single.sample)
    slices = buffer_of(SliceSampler(sequence_length=2), transform=MarkSlices(last="done"))
    slices.extend({"done": np.arange(6) % 3 == 2, "row": np.arange(6)})
    assert slices.sample()["done"][:, -1].all()
    codes = buffer_of(SliceSampler(sequence_length=2), transform=MarkSlices(last="done"))
    codes.extend({"done": np.array([0, 0, 2, 0, 0, 1])})
    assert_raises(SchemaError, "'done': expected one bool for each step", codes.sample)
    with pytest.raises(ConfigError, match="keeps the order"):
        ReplayBuffer(ArrayStorage(9), ReverseSampler(), MaxValueWriter("row"))


@pytest.mark.parametrize("options", [{"span": (1, True)}, {"pad": False, "strict_length": False}])
def test_marks_of_slices(options: Any) -> None:
    marks = MarkSlices(first="is_init", last=["end", ("next", "cut")])
    buffer = buffer_of(SliceSampler(sequence_length=4, end_key="done", **options), 20, transform=marks, batch_size=30)
    cut = np.arange(20) % 5 == 1
    done = np.isin(np.arange(20), [1, 4, 10, 19])  # episodes of 2, 3, 6 and 9 rows
    buffer.extend({"row": np.arange(20), "done": done, "next": {"cut": cut[:, None]}})
    batch = buffer.sample()
    there = batch.get("mask", np.ones(batch["index"].shape, bool))
    numbers = batch.get("slice_id", np.arange(30)[:, None])
    for number in range(30):
        mine = (numbers == number) & there
        size = int(mine.sum())
        assert batch["is_init"][mine].tolist() == [True] + [False] * (size - 1)
        assert batch["end"][mine].tolist() == [False] * (size - 1) + [True]
    assert not (batch["is_init"] | batch["end"])[~there].any()
    stored = cut[batch["row"]]
    assert (batch["next"]["cut"][..., 0] == (stored | batch["end"])).all()
    assert (buffer[:]["next"]["cut"][:, 0] == cut).all()


def test_an_outlier_that_was_corrected_is_forgotten() -> None:
    for within, expected in ((False, 50.0), (True, 3.0)):
        sampler = PrioritizedSampler(1.0, eps=0.0, max_priority_within_buffer=within)
        buffer = buffer_of(sampler, 6)
        buffer.extend({"row": np.arange(5)})
        buffer.update_priority(np.arange(5), np.array([1.0, 2.0, 50.0, 0.5, 3.0]))
        assert sampler.max_priority == 50.0
        buffer.update_priority([2], [0.25])
        assert sampler.max_priority == expected
        buffer.extend({"row": np.arange(5, 8)})  # over the rows 0 and 1
        weights = buffer.sampler.weights_at(buffer.storage, np.arange(6))
        assert weights.tolist() == [expected, expected, 0.25, 0.5, 3.0, expected]
        again = buffer_of(PrioritizedSampler(1.0, eps=0.0, max_priority_within_buffer=within), 6)
        again.load_state_dict(buffer.state_dict())
        assert again.sampler.max_priority == expected
        buffer.update_priority(np.arange(6), np.zeros(6))
        assert sampler.max_priority == (1.0 if within else expected)
    with pytest.raises(StateError, match="max_priority_within_buffer"):
        buffer_of(PrioritizedSampler(1.0, eps=0.0), 6).load_state_dict(buffer.state_dict())


def rows_buffer(sampler: Any, batch_size: int, rows: int, capacity: int | None = None, seed: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(ArrayStorage(capacity or rows), sampler, batch_size=batch_size, seed=seed)
    if rows:
        buffer.extend({"row": np.arange(rows)})
    return buffer


def test_rows_come_equally_often_in_orders_that_never_change() -> None:
    buffer = rows_buffer(RandomSampler(), 1000, rows=130, capacity=100)
    drawn = np.concatenate([buffer.sample()["row"] for _ in range(40)])
    assert set(drawn.tolist()) == set(range(30, 130))
    check_frequencies(np.bincount(drawn - 30), np.full(100, 0.01))
    assert_raises(ConfigError, "found an empty buffer", rows_buffer(RandomSampler(), 4, rows=0, capacity=4).sample)
    assert_raises(StateError, "sampler: expected the state of a", RandomSampler().load_state_dict, {"rows": 3})
    buffer = ReplayBuffer(ArrayStorage(60, ndim=2), RandomSampler(), batch_size=3000)
    buffer.extend({"env": np.tile(np.arange(6), (10, 1))})
    check_frequencies(np.bincount(buffer.sample()["env"]), np.full(6, 1 / 6))
    buffer = rows_buffer(SamplerWithoutReplacement(), 50, rows=50)
    orders = {tuple(buffer.sample()["row"].tolist()) for _ in range(5)}
    assert len(orders) == 5
    first = np.array([buffer.sample()["row"][0] for _ in range(3000)])
    check_frequencies(np.bincount(first, minlength=50), np.full(50, 0.02))
    found = [
        [rows_buffer(sampler, 5, rows=20_000, seed=4).sample()["row"].tolist()]
        for sampler in (RandomSampler(), SamplerWithoutReplacement())
    ]
    assert found == GOLDEN


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
        return rows_buffer(sampler, batch, rows + overwritten, rows, seed)

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


def test_more_rows_begin_an_epoch_and_states_that_cannot_be_are_refused() -> None:
    buffer = rows_buffer(SamplerWithoutReplacement(shuffle=False), 2, rows=4, capacity=6)
    assert buffer.sample()["row"].tolist() == [0, 1]
    buffer.extend({"row": np.array([4, 5])})
    assert [buffer.sample()["row"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    buffer.extend({"row": np.array([6])})  # over row 0, in a ring that was full
    assert [buffer.sample()["row"].tolist() for _ in range(2)] == [[4, 5], [1, 2]]
    buffer = rows_buffer(SamplerWithoutReplacement(), 4, rows=10)
    buffer.sample()
    sampler: Any = buffer.sampler
    state = sampler.state_dict()
    for change in ({"position": -1}, {"rows": True}, {"config": "other"}, {"more": 1}, {"position": 11}):
        assert_raises(StateError, "sampler: expected", sampler.load_state_dict, {**state, **change})
    assert sampler.state_dict() == state


GOLDEN = [[[4003, 4004, 10501, 7090, 3402]], [[12916, 189, 14045, 17831, 17790]]]
