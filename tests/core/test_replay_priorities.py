"""Sum trees and prioritised samplers against sums and loops in plain Python."""

import hashlib
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, StateError
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.buffer import PrioritizedReplayBuffer, ReplayBuffer
from mouse_core.replay.ensemble import ReplayBufferEnsemble
from mouse_core.replay.samplers.priorities import LinearSchedule, PrioritizedSampler, SumTree
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler
from mouse_core.replay.samplers.weighing import (
    bits_of,
    largest_priority,
    plus_bits,
    powers,
    weighed,
    weights_of,
)
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.replay.transforms.transitions import NextView
from mouse_core.replay.writers import MaxValueWriter
from tests.core.replay_cases import filled
from tests.core.statistics import check_frequencies
from tests.raising import assert_raises


def key(number: int, seed: int = 5) -> Key:
    return Key(seed, Purpose.REPLAY, number)


@given(
    size=st.sampled_from([1, 2, 15, 16, 17, 4096, 4097, 70_000]),
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 5),
)
def test_a_tree_is_the_sum_of_its_weights(size: int, seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    tree, weights = SumTree(size), np.zeros(size, np.int64)
    most = (2**63 - 1) // size
    assert tree.total == tree.smallest == 0
    for _ in range(steps):
        kind = rng.integers(3)
        if kind == 0:
            n = int(rng.integers(1, 40)) if rng.integers(2) else size
            numbers = rng.integers(0, size, n)
            values = rng.integers(0, most, n, endpoint=True) * (rng.random(n) < 0.8)
            tree.set(numbers, values)
            for number, value in zip(numbers.tolist(), values.tolist(), strict=True):
                weights[number] = value  # of a number that comes twice the last
        elif kind == 1:
            begin, end = sorted(rng.integers(0, size + 1, 2).tolist())
            tree.fill(begin, end, most)
            weights[begin:end] = most
        else:
            weights = rng.integers(0, 1000, size) * (rng.random(size) < 0.5)
            n = int(rng.integers(1, size + 1))
            weights[n:] = 0
            tree.assign(weights[:n].copy())
        np.testing.assert_array_equal(tree.weights, weights)
        assert tree.total == weights.sum()
        positive = weights[weights > 0]
        assert tree.smallest == (positive.min() if len(positive) else 0)
        if not len(positive):
            continue
        words = np.append(rng.integers(0, 2**64, 50, np.uint64), np.array([0, 2**64 - 1], np.uint64))
        drawn = tree.draw(words)
        # Where the running sum passes what was asked for, to the unit.
        wanted = [word * tree.total >> 64 for word in words.tolist()]
        assert drawn.tolist() == np.cumsum(weights).searchsorted(wanted, side="right").tolist()


def test_weights_are_the_powers_of_float32_numbers() -> None:
    """Of all exponents, against Decimal's powers of some and longdouble's of many."""
    rng = np.random.default_rng(0)
    bits = ((np.arange(1, 255)[:, None] << 23) | rng.integers(0, 1 << 23, (254, 20))).reshape(-1)
    numbers = bits.astype(np.int32).view(np.float32)
    for alpha, error in (
        (0.0, 0.0),
        (0.5, 2**-27),
        (0.6, 2**-27),
        (0.7, 2**-27),
        (1.0, 0.0),
        (2.0, 2**-27),
        (8, 2**-18),
    ):
        tables = powers(alpha)
        weights = weights_of(bits, tables)
        exact = 2**24 * numbers.astype(np.longdouble) ** np.longdouble(alpha)
        assert weights.min() >= 1
        fits = exact < tables.most
        assert (weights[~fits] >= tables.most * (1 - 2**-18)).all()
        assert (np.abs(weights - exact) <= exact * error + np.where(exact < 0.5, 1, 0.5))[fits].all()
        with localcontext() as context:
            context.prec = 50
            for number, weight in zip(numbers[fits][::97].tolist(), weights[fits][::97].tolist(), strict=True):
                power = 2**24 * Decimal(number) ** Decimal(alpha)
                assert abs(weight - power) <= max(power * Decimal(error) + Decimal("0.5"), 1)
    for alpha, expected in ((0.6, [0, 0, 0, 1, 2**24]), (0.0, [2**24] * 5)):
        small = np.array([0, 1, (1 << 23) - 1, 1 << 23, 127 << 23])
        assert weights_of(small, powers(alpha)).tolist() == expected


def test_weights_and_the_stream_never_change() -> None:
    bits = np.arange(1 << 16) * 32_749 % (255 << 23)
    found = [weights_of(bits, powers(alpha)) for alpha in (0.3, 0.5, 0.6, 1.5, 7.5)]
    assert hashlib.sha256(np.stack(found).astype("<i8").tobytes()).hexdigest()[:16] == "ded3faeb98a51382"
    sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
    buffer = filled(rows_of(0, 12_000), 10_000, sampler, batch_size=6, seed=7)
    buffer.update_priority(np.arange(0, 10_000, 3), np.arange(0, 10_000, 3) % 11 + 0.5)
    found = [buffer.sample() for _ in range(2)]
    assert [batch["index"].tolist() for batch in found] == GOLDEN_ROWS
    np.testing.assert_allclose(found[0]["priority_weight"], GOLDEN_WEIGHTS, rtol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 0.3, 2.0**-100, 2.0**100])
def test_eps_is_added_as_float32_does(eps: float) -> None:
    rng = np.random.default_rng(1)
    bits = ((np.arange(255)[:, None] << 23) | rng.integers(0, 1 << 23, (255, 40))).reshape(-1)
    near = np.float32(eps).view(np.int32) + rng.integers(-(1 << 25), 1 << 25, 2000)
    bits = np.concatenate([bits, near[near >= 0], [0, 127 << 23, 0x7F7FFFFF, 0x7F800000]])
    with np.errstate(over="ignore"):
        expected = (bits.astype(np.int32).view(np.float32) + np.float32(eps)).view(np.int32)
    for dtype in (np.int64, np.uint32):
        np.testing.assert_array_equal(plus_bits(bits.astype(dtype), bits_of(eps), np), expected)


def test_all_rows_together_weigh_less_than_63_bits() -> None:
    for alpha, capacity, largest in ((0.6, 10**7, 7.9e7), (1.0, 10**6, 549_755), (1.0, 3, 2.0**36), (2.0, 10**6, 741)):
        found = largest_priority(capacity, alpha, 1e-8)
        assert found == pytest.approx(largest, rel=0.01)
        weight = int(weighed(np.array([found]), capacity, alpha, 1e-8)[0])
        assert weight * capacity < 2**63
        above = np.nextafter(np.float32(found), np.float32(np.inf))
        with pytest.raises(
            DataError, match=rf"priorities up to .* for a capacity of {capacity} rows, found .* at \[1\]"
        ):
            weighed(np.array([1, above]), capacity, alpha, 1e-8)
    buffer = filled(rows_of(0, 4), 4, PrioritizedSampler(1.0, 1.0, 0.0), batch_size=50)
    buffer.update_priority(np.arange(4), np.array([2.0**36, 2.0**36, 2.0**-24, 2.0**-30]))
    assert set(buffer.sample()["index"].tolist()) == {0, 1}
    assert weights_in(buffer).tolist() == [2.0**36, 2.0**36, 2.0**-24, 2.0**-24]


class Model:
    def __init__(self, alpha: float, eps: float) -> None:
        self.alpha, self.eps, self.largest = alpha, eps, 1.0
        self.priorities: dict[int, float] = {}

    def write(self, slots: list[int]) -> None:
        self.priorities |= {slot: self.largest for slot in slots if slot >= 0}

    def update(self, slots: list[int], values: list[float]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self.priorities[slot] = value
        self.largest = max(self.largest, *values)

    def weights(self) -> np.ndarray[Any, Any]:
        return np.array([(self.priorities[slot] + self.eps) ** self.alpha for slot in range(len(self.priorities))])


def rows_of(first: int, n: int) -> dict[str, Any]:
    return {"row": np.arange(first, first + n), "done": np.arange(first, first + n) % 7 == 6}


def weights_in(buffer: ReplayBuffer) -> np.ndarray[Any, Any]:
    sampler: Any = buffer.sampler
    return np.asarray(sampler.weights_at(buffer.storage, np.arange(len(buffer))))


@given(data=st.data(), capacity=st.integers(1, 50), alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]), best=st.booleans())
def test_priorities_are_those_of_a_list(data: st.DataObject, capacity: int, alpha: float, best: bool) -> None:
    """In a ring, and where new rows lie in any slots, as MaxValueWriter puts them."""

    def make() -> ReplayBuffer:
        writer = MaxValueWriter("rank") if best else None
        sampler = PrioritizedSampler(alpha, 0.5, 1e-3)
        return ReplayBuffer(ArrayStorage(capacity), sampler, writer, batch_size=6, seed=3)

    buffer, model = make(), Model(alpha, 1e-3)
    for _ in range(data.draw(st.integers(1, 10))):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        step = data.draw(st.sampled_from(["add", "extend", "update", "change", "restore", "refused", "empty"]))
        if step == "add" or not model.priorities:
            model.write([buffer.append({"rank": rng.random()})])
        elif step == "extend":
            model.write(buffer.extend({"rank": rng.random(rng.integers(1, 2 * capacity + 2))}).tolist())
        elif step == "update":
            slots = rng.integers(0, len(buffer), 8)
            values = np.round(rng.exponential(size=8), 2) * rng.choice([1, 10])
            buffer.update_priority(slots, values)
            model.update(slots.tolist(), values.tolist())
        elif step == "change":
            slot = int(rng.integers(0, len(buffer)))
            buffer[slot] = {"rank": rng.random()}
            model.write([slot])
        elif step == "restore":
            state = buffer.state_dict()
            buffer = make()
            buffer.load_state_dict(state)
        elif step == "refused":
            for index, value, error in (
                ([0, 0], [1.0, -1.0], DataError),
                ([0, 0], [1.0, np.nan], DataError),
                ([0, 0], [np.inf, 1.0], DataError),
                ([0, len(buffer)], [5.0, 5.0], IndexError),
                ([-1, 0], [5.0, 5.0], IndexError),
                ([0, 0], [5.0, 5.0, 5.0], ConfigError),
                ([0, 0], [5.0], ConfigError),
                ([0.5], [5.0], ConfigError),
                ([0], ["much"], DataError),
            ):
                assert_raises(error, "expected", buffer.update_priority, index, value)
        else:
            buffer.empty()
            model = Model(alpha, 1e-3)
            continue
        expected = model.weights()
        batch = buffer.sample()
        np.testing.assert_allclose(weights_in(buffer), expected, rtol=2**-22, atol=2**-25)  # of float32 numbers
        expected = weights_in(buffer)
        assert buffer.sampler.max_priority == model.largest  # type: ignore[attr-defined]
        chosen = batch["index"]
        assert batch["priority_weight"].dtype == np.float32
        np.testing.assert_allclose(
            batch["priority_weight"], (expected[chosen] / expected.min()) ** -0.5, rtol=1e-6, atol=0
        )


def test_rows_come_in_proportion_but_for_those_of_priority_0() -> None:
    sampler = PrioritizedSampler(alpha=0.7, beta=0.4, eps=0.01)
    buffer = filled(rows_of(0, 55), 40, sampler, batch_size=500, seed=11)
    priorities = np.linspace(0.0, 4.0, 40)
    buffer.update_priority(np.arange(40), priorities)
    drawn = np.concatenate([buffer.sample()["index"] for _ in range(100)])
    weights = (priorities + 0.01) ** 0.7
    check_frequencies(np.bincount(drawn, minlength=40), weights / weights.sum())
    buffer = filled(rows_of(0, 3), 3, PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), batch_size=50)
    buffer.update_priority(np.arange(3), np.array([0.0, 2.0, 4.0]))
    batch = buffer.sample()
    assert set(batch["index"].tolist()) == {1, 2}
    np.testing.assert_allclose(batch["priority_weight"], np.where(batch["index"] == 1, 1.0, 0.5))
    buffer.update_priority(np.arange(3), np.zeros(3))
    assert_raises(ConfigError, "priority above 0", buffer.sample)


GOLDEN_ROWS = [[5518, 209, 9133, 8433, 6015, 2909], [5742, 5950, 921, 8390, 8457, 3606]]
GOLDEN_WEIGHTS = [0.8467453, 0.8467453, 0.8467453, 0.5220813, 0.4932864, 0.8467453]


def test_beta_follows_a_schedule() -> None:
    sampler = PrioritizedSampler(alpha=1.0, beta=LinearSchedule(0.0, 1.0, samples=4), eps=0.0)
    buffer = filled(rows_of(0, 2), 2, sampler, batch_size=8, seed=0)
    buffer.update_priority(np.array([0, 1]), np.array([1.0, 4.0]))
    for beta in (0.0, 0.25, 0.5, 0.75, 1.0, 1.0):
        batch = buffer.sample()
        expected = np.where(batch["index"] == 0, 1.0, 4.0) ** -beta
        np.testing.assert_allclose(batch["priority_weight"], expected, rtol=1e-6)
    sampler.beta = 0.5
    batch = buffer.sample()
    np.testing.assert_allclose(batch["priority_weight"], np.where(batch["index"] == 0, 1.0, 0.5), rtol=1e-6)
    sampler.beta = lambda sample: -1.0
    assert_raises(ConfigError, "beta: expected a number of 0 or more", buffer.sample)


def test_what_is_wrong_is_refused() -> None:
    for options in ({"alpha": -1}, {"beta": -0.1}, {"eps": np.nan}, {"alpha": "high"}, {"beta": np.inf}):
        assert_raises(ConfigError, "expected a number of 0 or more", PrioritizedSampler, **options)
    for wrong, words in (
        ({"alpha": 8.5}, "alpha: expected a number up to 8"),
        ({"eps": 1e-31}, r"eps: expected 0 or a"),
    ):
        assert_raises(ConfigError, words, PrioritizedSampler, **wrong)
    for arguments in ((0.0, np.inf, 3), (0.0, 1.0, 0)):
        assert_raises(ConfigError, "LinearSchedule: ", LinearSchedule, *arguments)
    buffer = ReplayBuffer(ArrayStorage(8), PrioritizedSampler(), batch_size=2)
    assert_raises(ConfigError, "found an empty buffer", buffer.sample)
    buffer.extend(rows_of(0, 8))
    sampler: Any = buffer.sampler
    state = sampler.state_dict()
    before = weights_in(buffer)
    for change in (
        {"weights": np.array([-1])},
        {"weights": np.array([1.0])},
        {"weights": np.zeros((2, 2))},
        {"max_priority": np.nan},
        {"begin": 9},
        {"end": -1},
        {"config": "PrioritizedSampler(alpha=0.5, beta=a number, eps=1e-08)"},
        {"more": 1},
    ):
        assert_raises(StateError, "sampler: expected", sampler.load_state_dict, {**state, **change})
        np.testing.assert_array_equal(weights_in(buffer), before)
    assert_raises(StateError, "sampler: expected", sampler.load_state_dict, {})
    annealed = PrioritizedSampler(beta=LinearSchedule(0.4, 1.0, samples=9))
    with pytest.raises(StateError, match=r"with the arguments .*beta=a number.*found .*beta=a schedule"):
        sampler.load_state_dict(annealed.state_dict())
    assert_raises(StateError, r"with the arguments .*beta=a schedule.*found .*beta=a", annealed.load_state_dict, state)


@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("of_an_ensemble", [False, True])
def test_what_the_mask_leaves_out_keeps_its_priority(burn_in: int, of_an_ensemble: bool) -> None:
    sampler = PrioritizedSliceSampler(sequence_length=6, burn_in=burn_in, end_key="done", alpha=1.0, eps=0.0)
    rows = filled({"done": np.arange(12) % 3 == 2}, 60, sampler, batch_size=6, generations=True)
    buffer = ReplayBufferEnsemble(rows, batch_size=6) if of_an_ensemble else rows
    batch = buffer.sample()
    there = batch["mask"]
    assert not there.all()
    # What a network says of steps that are not there means nothing, and need not be a number.
    buffer.update_priority({**batch, "td_error": np.where(there, 2.0, np.where(batch["index"] % 2, 100.0, np.nan))})
    expected = np.ones(12)
    expected[batch["index"][there]] = 2.0
    state = rows.state_dict()["sampler"]["state"]
    assert (state["weights"] / 2**24).tolist() == expected.tolist()
    assert state["max_priority"] == 2.0
    with pytest.raises(ConfigError, match=r"expected a mask of the shape of the index \[6, 6\], found \[6\]"):
        buffer.update_priority({**batch, "td_error": np.ones((6, 6)), "mask": np.ones(6, bool)})


def test_masks_of_single_rows_and_those_that_rows_have_themselves() -> None:
    masked = PrioritizedReplayBuffer(
        storage=ArrayStorage(8), transform=NextView(), batch_size=50, alpha=1.0, beta=1.0, eps=0.0
    )
    masked.extend({"obs": np.zeros(8), "reward": np.zeros(8), "done": np.zeros(8, np.int8)})
    batch = masked.sample()
    masked.update_priority({**batch, "td_error": np.full(50, 3.0)})
    drawn = set(batch["index"].tolist())
    assert 7 in drawn  # the newest row, whose next observation is not known
    assert weights_in(masked).tolist() == [3.0 if row in drawn - {7} else 1.0 for row in range(8)]
    own = PrioritizedReplayBuffer(storage=ArrayStorage(8), batch_size=50, alpha=1.0, eps=0.0)
    own.extend({"mask": np.zeros(8, bool)})
    batch = own.sample()
    own.update_priority({**batch, "td_error": np.full(50, 3.0)})
    assert set(weights_in(own)[np.unique(batch["index"])].tolist()) == {3.0}


def test_slices_come_in_proportion_to_their_first_rows() -> None:
    sampler = PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, sequence_length=3, end_key="done")
    buffer = filled(rows_of(0, 28), 28, sampler, batch_size=500, seed=4)
    begins = np.arange(28) % 7 <= 4
    priorities = np.where(begins, np.arange(28) % 5 + 2.0, 0.5)
    buffer.update_priority(np.arange(28), priorities)
    batches = [buffer.sample() for _ in range(40)]
    drawn = np.concatenate([batch["index"][:, 0] for batch in batches])
    weights = np.where(begins, priorities, 0.0)
    check_frequencies(np.bincount(drawn, minlength=28), weights / weights.sum())
    # Beside the smallest priority of rows that slices begin with.
    found = np.concatenate([batch["priority_weight"][:, 0] for batch in batches])
    np.testing.assert_allclose(found, 2.0 / priorities[drawn], rtol=1e-6)
    buffer = filled({"x": np.arange(8)}, 8, PrioritizedSampler(1.0, 0.4, 0.0), batch_size=4)
    buffer.update_priority(np.arange(8), np.arange(8.0)[:, None])
    assert buffer.sampler.weights_at(buffer.storage, slice(0, 8)).tolist() == list(range(8))  # type: ignore[attr-defined]
    buffer.update_priority(np.arange(6).reshape(3, 2), np.arange(6.0).reshape(3, 2, 1))
    assert buffer.sampler.weights_at(buffer.storage, slice(0, 6)).tolist() == list(range(6))  # type: ignore[attr-defined]
    for wrong in (np.ones((8, 2)), np.ones((1, 8)), np.ones(1)):
        assert_raises(ConfigError, "shape of the index", buffer.update_priority, np.arange(8), wrong)


def test_a_span_over_the_begin_is_refused_and_slices_take_one_priority_or_one_for_each_row() -> None:
    sampler = PrioritizedSliceSampler(alpha=1.0, beta=0.0, eps=0.0, sequence_length=3, end_key="done")
    buffer = filled(rows_of(0, 28), 28, sampler, batch_size=2, seed=4)
    index = np.array([[0, 1, 2], [7, 8, 9]])
    buffer.update_priority(index, np.array([2.0, 3.0]))
    weights = sampler.weights_at(buffer.storage, index)
    assert weights.tolist() == [[2.0] * 3, [3.0] * 3]
    buffer.update_priority(index, np.arange(6.0).reshape(2, 3))
    assert sampler.weights_at(buffer.storage, index).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert_raises(ConfigError, "span: expected False for the", PrioritizedSliceSampler, sequence_length=3, span=True)
    sampler = PrioritizedSliceSampler(1.0, 0.0, 0.0, sequence_length=3, end_key="done", span=(False, True), pad=True)
    buffer = filled(rows_of(0, 7), 7, sampler, batch_size=100)
    batch = buffer.sample()
    assert set(batch["index"][:, 0].tolist()) == set(range(7))
    assert batch["mask"].sum(axis=1).tolist() == np.minimum(3, 7 - batch["index"][:, 0]).tolist()


@pytest.mark.parametrize(
    ("strict", "span", "num_envs", "period"),
    [
        (True, False, 1, 1),
        (False, (False, 2), 1, 3),
        (True, (False, 2), 2, 3),
        (False, False, 2, 3),
        (True, False, 1, 3),
    ],
)
def test_in_a_ring_slices_begin_where_those_of_a_slice_sampler_do(
    strict: bool, span: Any, num_envs: int, period: int
) -> None:
    """Also in episodes of which the ring has only the last rows, where rows are changed, and after states."""
    options: dict[str, Any] = {"sequence_length": 4, "strict_length": strict, "span": span, "period": period}

    def made() -> list[ReplayBuffer]:
        samplers = PrioritizedSliceSampler(1.0, 0.0, 0.0, **options), SliceSampler(**options)
        return [ReplayBuffer(ArrayStorage(23 * num_envs, num_envs), sampler, batch_size=400) for sampler in samplers]

    random, buffers = np.random.default_rng(3), made()
    for turn in range(25):
        shape = (int(random.integers(1, 8)), num_envs)[:num_envs]
        done, changed, end = random.random(shape) < 0.2, random.random(), random.random() < 0.5
        before, buffers = buffers, made() if turn % 7 == 6 else buffers
        found = []
        for buffer, other in zip(buffers, before, strict=True):
            if buffer is not other:
                buffer.load_state_dict(other.state_dict())
            buffer.extend({"done": done})
            if turn % 3 == 2:
                buffer[int(changed * len(buffer))] = {"done": end}
            try:
                batch = buffer.sample()
            except ConfigError:  # no episode is long enough
                found.append(set())
                continue
            index = batch["index"]
            slices = index if index.ndim == 2 else np.split(index, np.flatnonzero(np.diff(batch["slice_id"])) + 1)
            found.append({tuple(part.tolist()) for part in slices})
        assert found[0] == found[1]


HIDDEN = np.ma.masked_array(np.arange(4), [False, True, False, False])


def test_what_a_mask_hides_is_neither_an_index_nor_a_priority_and_no_rows_are_updated() -> None:
    def made() -> PrioritizedReplayBuffer:
        buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=ArrayStorage(10), generations=True)
        buffer.extend({"a": np.arange(4.0)})
        return buffer

    buffer, rows, ones = made(), np.arange(4), np.ones(4)
    ensemble = ReplayBufferEnsemble(made(), made())
    for call in (
        lambda: buffer.update_priority(rows, HIDDEN),
        lambda: buffer.update_priority(HIDDEN, ones),
        lambda: buffer.update_if_present(HIDDEN, np.zeros(4, int), {"a": ones}),
        lambda: buffer.update_if_present(rows, HIDDEN, {"a": ones}),
        lambda: buffer.generation_of(HIDDEN),
        lambda: ensemble.update_priority({"index": rows, "buffer_ids": np.zeros(4, int), "td_error": HIDDEN}),
        lambda: ensemble.update_priority({"index": HIDDEN, "buffer_ids": np.zeros(4, int), "td_error": ones}),
    ):
        assert_raises(DataError, "expected a value, found a masked value", call)
    assert buffer[:]["a"].tolist() == [0, 1, 2, 3]
    buffer.update_priority([], [])
    assert buffer.update_if_present([], [], {"a": []}).tolist() == buffer.generation_of([]).tolist() == []
