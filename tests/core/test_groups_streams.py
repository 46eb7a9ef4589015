"""Shares of batches for several ranks, and producers that are held back."""

import json
import tempfile
import threading
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core.digest import StreamDigest
from mouse_core.errors import ClosedError, ConfigError, DataError, StateError, TimedOutError
from mouse_core.groups import (
    GrpoBatchMaker,
    RLExample,
    RolloutBuffer,
    RolloutColumn,
    RolloutRecord,
    RolloutStream,
    examples_digest,
    pack,
    pad,
    plan_micro_batches,
)
from tests.core.groups_cases import group, rollout
from tests.raising import assert_raises

KINDS = [("pack", None), ("pack", 12), ("pad", 12), ("concatenate", None)]


# An example of each length that is asked for below.
OF_LENGTH = [RLExample(x, x >= 0, x * 0.0, x * 0.0) for x in map(np.arange, range(13))]


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 9), st.integers(12, 40))
def test_examples_are_shared_out_once_evenly_and_within_the_budget(
    seed: int, number: int, count: int, budget: int
) -> None:
    lengths = np.random.default_rng(seed).integers(0, 13, number).tolist()
    for (collate, length), most in product(KINDS, (None, 1, 3)):
        options: Any = {"max_tokens": budget, "collate": collate, "length": length, "max_examples": most}
        ranks = plan_micro_batches(lengths, count, **options)
        micro_batches = [places for rank in ranks for places in rank]
        assert sorted(chain.from_iterable(micro_batches)) == list(range(number))
        assert [len(rank) for rank in ranks] == [len(ranks[0])] * count
        for places in filter(None, micro_batches):
            used = len(places) * 12 if collate == "pad" else sum(lengths[place] for place in places)
            assert used <= budget
            assert len(places) <= (most or number)
            if length is not None:  # they fit as they are collated
                examples = [OF_LENGTH[lengths[place]] for place in places]
                (pad(examples, length) if collate == "pad" else pack(examples, length, num_rows=budget // length))
        tokens = np.array([[sum(lengths[place] for place in places) for places in rank] for rank in ranks])
        # What ranks work on at the same time is alike, and over a batch they do not drift apart.
        apart = np.ptp(tokens, axis=0).max()
        assert np.ptp(tokens.sum(1)) <= apart
        assert most is not None or collate == "pad" or apart <= max(lengths)


def test_micro_batches_are_few_and_those_that_cannot_be_planned_are_refused() -> None:
    lengths = np.random.default_rng(0).integers(32, 2048, 512)
    (rank,) = plan_micro_batches(lengths, 1, max_tokens=8192)
    assert len(rank) <= 1.03 * lengths.sum() / 8192
    together = plan_micro_batches([4, 4, 4, 4, 2, 2], 2, max_tokens=4, collate="pad", length=4)
    assert [len(rank) for rank in together] == [3, 3]
    with pytest.raises(DataError, match="expected at most 4 tokens, found 5 at index 1"):
        plan_micro_batches([1, 5], 2, max_tokens=8, length=4)
    for options, wanted in [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 8, "collate": "stack"}, r"expected one of \['pack', 'pad', 'concatenate'\], found 'stack'"),
        ({"max_tokens": 8, "collate": "pad"}, "length: with collate='pad', expected the number"),
        ({"max_tokens": 8, "collate": "concatenate", "length": 4}, "length: with collate='concatenate', expected None"),
        ({"max_tokens": 8, "length": 9}, "length: expected at most max_tokens, 8, found 9"),
        ({"max_tokens": 8, "max_examples": 0}, "max_examples"),
    ]:
        assert_raises(ConfigError, wanted, plan_micro_batches, [1], 1, **options)


def filled(root: Path, *, batches: int = 3, columns: Any = None, **options: Any) -> RolloutBuffer:
    buffer = RolloutBuffer(
        root, 8, batch_maker=GrpoBatchMaker(older_groups="keep"), columns=columns, sync=False, **options
    )
    for number in range(0, 48, 8):
        version = 1 + number // 16
        buffer.add_rollouts(
            rollout(n, example=f"p{number}", version=version, tokens=2 + n * 7 % 20) for n in range(number, number + 8)
        )
    for index in range(batches):
        assert buffer.batch_at(index, 10) == buffer.batch_at(index)
    return buffer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("streams") / "rollouts"
    with filled(root):
        yield root


@pytest.mark.parametrize(
    ("count", "collate", "length"), [(1, *KINDS[1]), (3, *KINDS[2]), (16, *KINDS[3]), (3, *KINDS[1])]
)
def test_ranks_share_the_same_batches(root: Path, count: int, collate: str, length: int | None) -> None:
    length = None if length is None else 24
    options: Any = {"collate": collate, "length": length, "max_examples": 4}
    streams = [RolloutStream(root, 50, shard=(rank, count), **options) for rank in range(count)]
    with RolloutBuffer(root) as buffer:
        whole = [buffer.read_batch(batch_id) for batch_id in buffer.batches]
    for index, batch in enumerate(whole):
        shares = [next(stream) for stream in streams]
        assert sorted(np.concatenate([share.places for share in shares]).tolist()) == list(range(10))
        assert {len(share) for share in shares} == {shares[0].report["micro_batches"]}
        assert all(share.report == shares[0].report for share in shares)
        assert shares[0].report["tokens"] == sum(map(len, batch)) == sum(shares[0].report["rank_tokens"])
        for share, tokens in zip(shares, shares[0].report["rank_tokens"], strict=True):
            assert share.examples == [batch[place] for place in share.places]
            assert sum(map(len, share.examples)) == tokens
        assert sum((share.digest for share in shares), StreamDigest()) == examples_digest(index, batch)
        # All micro-batches of all ranks have one shape, and what is in the loss is in one of them.
        arrays = [one for share in shares for one in share]
        assert len({tuple((name, a.shape) for name, a in one.items()) for one in arrays}) == 1
        assert sum(int(one["loss_mask"].sum()) for one in arrays) == shares[0].report["loss_tokens"]
        assert sum(float(one["advantage"].sum(dtype=float)) for one in arrays) == pytest.approx(
            sum(float(e.advantage.sum(dtype=float)) for e in batch)
        )


def test_an_example_that_is_too_long_can_be_passed_over(root: Path) -> None:
    assert_raises(DataError, r"at most 16 tokens, found \d+ at index \d+; a", next, RolloutStream(root, 16))
    streams = [RolloutStream(root, 16, shard=(rank, 2), skip_longer=True) for rank in range(2)]
    skipped = 0
    for stored in islice(zip(*streams, strict=True), 3):
        batch = RolloutBuffer(root).read_batch(stored[0].batch_id)
        fits = [place for place, example in enumerate(batch) if len(example) <= 16]
        assert sorted(np.concatenate([share.places for share in stored]).tolist()) == fits
        for share in stored:
            assert share.examples == [batch[place] for place in share.places]
            report = share.report
            assert (report["examples"], report["skipped"]) == (len(fits), len(batch) - len(fits))
            assert report["tokens"] == sum(report["rank_tokens"]) == sum(len(batch[place]) for place in fits)
            assert report["loss_tokens"] == sum(int(batch[place].loss_mask.sum()) for place in fits)
        skipped += stored[0].report["skipped"]
    assert skipped > 3


def test_declared_columns_are_in_micro_batches_without_examples(tmp_path: Path) -> None:
    columns = [RolloutColumn(f"per_{per}", per, "int8", (2,), fill=7) for per in ("token", "example")]
    with RolloutBuffer(tmp_path, 2, batch_maker=GrpoBatchMaker(), columns=columns, sync=False) as buffer:
        buffer.add_rollouts(group(0, 2))
        for collate, length in KINDS:
            options: Any = {"collate": collate, "length": length, "batch_size": 2}
            shares = [next(RolloutStream(buffer, 24, shard=(rank, 3), **options)) for rank in range(3)]
            (empty,) = [share for share in shares if not share.examples]
            assert set(empty[0]) == set(shares[0][0]) > {"per_token", "per_example"}
            assert not empty[0]["loss_mask"].any()
            assert empty.staleness.shape == (0,)
            assert empty[-1:][0]["tokens"].size == shares[0][0]["tokens"].size


def test_going_on_with_another_number_of_ranks_loses_and_doubles_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uids(streams: list[RolloutStream]) -> list[str]:
        return sorted(example.rollout_uid for stream in streams for example in next(stream).examples)

    def ranks(count: int) -> list[RolloutStream]:
        return [RolloutStream(root, 40, shard=(rank, count)) for rank in range(count)]

    (whole,) = ranks(1)
    expected = [uids([whole]) for _ in range(3)]
    eight, three = ranks(8), ranks(3)
    assert uids(eight) == expected[0]
    states = [json.dumps(stream.state_dict()) for stream in eight]
    assert len(set(states)) == 1
    assert uids(eight) == expected[1]  # and killed: the state is that of before
    for stream in three:
        stream.load_state_dict(json.loads(states[0]))
    assert [uids(three), uids(three)] == expected[1:]
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert RolloutStream(root, 50, shard="auto").shard == (2, 4)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=5))
@settings(max_examples=5)
def test_kills_of_ranks_and_of_the_buffer_lose_and_double_nothing(lives: list[tuple[int, int, int, bool]]) -> None:
    """Each life has some ranks, batches until its last checkpoint, batches after it that are lost, and a new buffer."""
    with tempfile.TemporaryDirectory() as folder:
        root, kept, trained = Path(folder), [filled(Path(folder), batches=0)], []
        state: Any = None
        for count, saved, lost, renewed in [*lives, (3, 4, 0, True)]:
            if renewed:  # the one before was killed, and is not closed
                kept.append(RolloutBuffer(root, 8, batch_maker=GrpoBatchMaker(older_groups="keep"), sync=False))
            sources = [(kept[-1], 8), *[(root, None)] * (count - 1)]
            streams = [
                RolloutStream(source, 60, shard=(rank, count), batch_size=size, timeout=0)
                for rank, (source, size) in enumerate(sources)
            ]
            for stream in streams if state else []:
                stream.load_state_dict(state)
            for number in range(saved + lost):
                try:
                    uids = [example.rollout_uid for stream in streams for example in next(stream).examples]
                except TimedOutError:
                    break  # all rollouts have been used
                if number < saved:
                    trained += uids
                    states = [stream.state_dict() for stream in streams]
                    assert states == states[:1] * count
                    state = states[0]
        whole = [kept[-1].read_batch(batch_id) for batch_id in kept[-1].batches]
        done = 0 if state is None else state["batch"]
        assert sorted(trained) == sorted(example.rollout_uid for batch in whole[:done] for example in batch)
        assert len(set(trained)) == len(trained) >= 4 * 8
        for buffer in kept:
            buffer.close()


def test_a_log_that_is_being_written(root: Path, tmp_path: Path) -> None:
    log = (root / ".state" / "index.log").read_bytes()
    copy = tmp_path / ".state" / "index.log"
    copy.parent.mkdir()
    copy.write_bytes(log[:-3])  # the last record is being written
    (tmp_path / "batches").symlink_to(root / "batches")
    stream = RolloutStream(tmp_path, 50, timeout=0)
    assert [share.index for share in islice(stream, 2)] == [0, 1]
    assert_raises(TimedOutError, "which has 2", next, stream)
    copy.write_bytes(log)
    assert next(stream).index == 2


def test_states_of_others_are_refused(root: Path, tmp_path: Path) -> None:
    stream = RolloutStream(root, 50, timeout=20)
    next(stream)
    state = stream.state_dict()
    for wrong, wanted in [
        ({}, "found format None"),
        ({**state, "format": 2}, "found format 2, of a newer version"),
        ({**state, "batch": -1}, "expected batch as an integer of at least 0, found -1"),
        ({**state, "after": ""}, "expected the id of the batch before batch 1, found ''"),
    ]:
        assert_raises(StateError, wanted, stream.load_state_dict, wrong)
    assert stream.state_dict() == state
    stream.load_state_dict({**state, "after": "another"})
    assert_raises(StateError, "batch 0: expected 'another'", next, stream)
    # Nor is the next batch waited for first.
    last = sum(1 for _ in (root / "batches").iterdir())
    stream.load_state_dict({**state, "batch": last, "after": "another"})
    assert_raises(StateError, f"batch {last - 1}: expected 'another'", next, stream)
    # No batch is made for a state that other batches belong to.
    with filled(tmp_path / "other", batches=0) as buffer:
        stream = RolloutStream(buffer, 50, batch_size=4)
        stream.load_state_dict(state)
        assert_raises(ConfigError, "index: expected at most 0, the index of the next batch, found 1", next, stream)
        assert not buffer.batches


def test_batches_are_made_on_demand_and_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "rollouts"
    reader = RolloutStream(root, 100, shard=(1, 2), timeout=30)
    with pytest.raises(
        TimedOutError,
        match=r"batch 0: expected this batch within 0 s, found no such batch in the folder .*, which has 0",
    ):
        next(RolloutStream(root, 100, timeout=0))
    shares: list[Any] = []
    thread = threading.Thread(target=lambda: shares.extend(islice(reader, 3)))
    thread.start()
    with filled(root, batches=0) as buffer:
        makers = [RolloutStream(buffer, 100, shard=(0, 2), batch_size=10) for _ in range(2)]
        made = [[share.batch_id for share in islice(maker, 3)] for maker in makers]
        thread.join(30)
        assert made == [buffer.batches] * 2 == [[share.batch_id for share in shares]] * 2
        assert RolloutStream(buffer, 100).__next__().batch_id == buffer.batches[0]
        late = RolloutStream(buffer, 100, batch_size=40, timeout=0.01)
        late.load_state_dict(makers[0].state_dict())
        assert_raises(TimedOutError, r"batch 3: expected this batch within 0.01 s, found no such batch in", next, late)
    for options, wanted in [
        ({"batches": root, "batch_size": 4}, "batch_size: expected None, since only the process with the buffer"),
        ({"batches": 3}, "batches: expected a RolloutBuffer"),
        ({"batches": root, "timeout": -1}, "timeout: expected a number of seconds"),
        ({"batches": root, "shard": (2, 2)}, "shard: expected 0 <= rank < count"),
    ]:
        assert_raises(ConfigError, wanted, RolloutStream, **{"max_tokens": 8, **options})


def test_staleness_is_that_of_when_the_batch_was_made(tmp_path: Path) -> None:
    with filled(tmp_path, batches=1) as buffer:
        buffer.add_rollout(rollout(100, version=9))
        second = buffer.create_and_store_batch(10)
        stream = RolloutStream(tmp_path, 200)
        for newest, share in zip((3, 9), stream, strict=False):
            expected = [newest - int(example.policy_version) for example in share.examples]
            assert share.staleness.tolist() == expected
            assert share.report["staleness_max"] == max(expected)
            assert share.report["staleness_mean"] == pytest.approx(np.mean(expected))
        assert second is not None
        assert buffer.batch_staleness(second).max() == share.report["staleness_max"]


def test_staleness_of_versions_that_are_no_numbers_and_of_none(tmp_path: Path) -> None:
    class Maker:
        available = 0

        def __init__(self) -> None:
            self.came: list[RolloutRecord] = []

        def add_rollout(self, rollout: RolloutRecord) -> None:
            self.came.append(rollout)

        def create_batch(self, batch_size: int) -> list[RLExample]:
            versions = [rollout.policy_version for rollout in self.came[: batch_size - 1]]
            zeros = np.zeros(2, np.float32)
            return [RLExample(zeros.astype(int), zeros == 0, zeros, zeros, "", "", v) for v in [*versions, ""]]

        def get_batch_metadata(self, batch: Any) -> dict[str, Any]:
            return {"rollout_uids": [rollout.rollout_uid for rollout in self.came]}

    with RolloutBuffer(tmp_path, 1, 1, batch_maker=Maker(), sync=False) as buffer:
        for number, version in enumerate(["step-9", "step-10", "step-100"]):
            buffer.add_rollout(rollout(number, version=version, example=version))
        share = next(RolloutStream(buffer, 100, batch_size=3))
        found = dict(zip(share.places.tolist(), share.staleness.tolist(), strict=True))
        assert (found[0], found[1]) == (2.0, 1.0)
        assert np.isnan(found[2])
        assert share.report["staleness_mean"] == 1.5


def ahead(root: Path, **options: Any) -> RolloutBuffer:
    return RolloutBuffer(root, 4, batch_maker=GrpoBatchMaker(older_groups="keep"), sync=False, **options)


def test_producers_wait_for_batches(tmp_path: Path) -> None:
    with ahead(tmp_path, max_ahead=8) as buffer:
        assert buffer.add_rollouts(group(0, 4, example="a")) == 4
        assert buffer.add_rollouts(group(4, 5, example="b"), timeout=0) == 5  # what is let in is carried out whole
        assert buffer.num_ahead == 9
        with pytest.raises(TimedOutError, match=r"expected room within 0 s, found 9 waiting rollouts with max_ahead=8"):
            buffer.add_rollout(rollout(20), timeout=0)
        assert len(buffer) == 9
        assert "r20" not in buffer
        thread = threading.Thread(target=buffer.add_rollout, args=(rollout(20),))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        assert buffer.create_and_store_batch(4) is not None
        thread.join(30)
        assert "r20" in buffer
    with pytest.raises(ConfigError, match="max_ahead: expected a batch_maker with an attribute 'available'"):
        RolloutBuffer(tmp_path, max_ahead=8)
    assert_raises(ConfigError, "max_ahead", ahead, tmp_path, max_ahead=0)
    with (
        ahead(tmp_path, max_ahead=1) as buffer,
        pytest.raises(ConfigError, match="timeout: expected a number of seconds"),
    ):
        buffer.add_rollouts([rollout(0)], timeout=-1)


def test_nobody_waits_while_a_batch_lacks_rollouts(tmp_path: Path) -> None:
    """Else the trainer would wait for producers who wait for it."""
    with ahead(tmp_path, max_ahead=4) as buffer:
        buffer.add_rollouts(group(0, 4, example="a"))
        thread = threading.Thread(target=lambda: [buffer.add_rollouts(group(n, 4, example=str(n))) for n in (4, 8)])
        thread.start()
        share = next(RolloutStream(buffer, 100, batch_size=12, timeout=30))
        thread.join(30)
        assert len(share.examples) == 12
        assert buffer.num_ahead == 0
        # The same where what waits can never be drawn: rollouts that are alone with their problem.
        buffer.add_rollouts([rollout(n, example=f"alone {n}") for n in range(20, 24)])
        assert_raises(TimedOutError, "expected", buffer.add_rollouts, group(30, 4, example="c"), timeout=0)
        assert buffer.create_and_store_batch(4) is None
        buffer.add_rollouts(group(30, 4, example="c"))
        assert buffer.create_and_store_batch(4) is not None
        assert_raises(TimedOutError, "expected", buffer.add_rollout, rollout(40), timeout=0)


def test_producers_that_wait_learn_that_the_buffer_is_gone(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def add(buffer: RolloutBuffer) -> None:
        try:
            buffer.add_rollout(rollout(9))
        except ClosedError as error:
            raised.append(error)

    for taken in (False, True):
        buffer = ahead(tmp_path / str(taken), max_ahead=1)
        buffer.add_rollout(rollout(0))
        thread = threading.Thread(target=add, args=(buffer,))
        thread.start()
        thread.join(0.02)
        other = ahead(tmp_path / str(taken)) if taken else buffer
        if not taken:
            buffer.close()
        thread.join(30)
        assert "r9" not in other
        buffer.close()
        other.close()
    assert len(raised) == 2
