"""What rollouts are worth, which are kept and which are drawn: the functions of batch makers, against plain loops."""

import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError
from mouse_core.groups import (
    DrGrpo,
    Grpo,
    GrpoBatchMaker,
    RLExample,
    Rloo,
    RolloutBuffer,
    RolloutRecord,
    RolloutStream,
    TopK,
    Turn,
    make_examples,
)
from tests.core.groups_cases import group, rollout
from tests.raising import assert_raises


def fed(rollouts: list[RolloutRecord], **options: Any) -> GrpoBatchMaker:
    maker = GrpoBatchMaker(**options)
    for item in rollouts:
        maker.add_rollout(item)
    return maker


def everything(maker: GrpoBatchMaker) -> dict[str, RLExample]:
    batch = maker.create_batch(maker.available) if maker.available else []
    assert batch is not None
    return {example.rollout_uid: example for example in batch}


def test_an_advantage_may_change_those_of_the_drawn_batch() -> None:
    class PlusPlus(DrGrpo):
        def of_batch(self, rollouts: Any, worth: Any) -> Any:
            each = np.repeat(worth, [len(one.turns[1].tokens) for one in rollouts])
            return [np.full(8, one) if n % 2 else one for n, one in enumerate((worth - each.mean()) / each.std())]

    items = [rollout(n, reward=float(n * n), tokens=5) for n in range(4)]
    found = everything(fed(items, advantage=PlusPlus()))
    worth = np.array([item.reward for item in items]) - 3.5
    for item, one in zip(items, worth / worth.std(), strict=True):
        assert not found[item.rollout_uid].advantage[:3].any(), "the prompt is worth nothing"
        np.testing.assert_allclose(found[item.rollout_uid].advantage[3:], one, rtol=1e-6)


def test_an_advantage_of_ones_own_is_asked_for_one_whole_group_at_a_time() -> None:
    items = [*group(0, 4, reward=1.0), rollout(10, example="b", reward=0.0), rollout(11, example="b", reward=1.0)]

    def centred(rewards: Any, groups: Any) -> Any:
        asked.append(sorted(rewards.tolist()))
        assert groups.tolist() == [0] * len(rewards)
        return rewards - rewards.mean()

    for equal in (True, False):
        asked: list[list[float]] = []
        maker = fed(items, advantage=centred, filter_zero_variance=equal)
        assert maker.available == 6, "what is worth 0 is drawn, too"
        found = {one.rollout_uid: float(one.advantage[-1]) for _ in range(6) for one in maker.create_batch(1) or []}
        assert found == {"r0": 0.0, "r1": 0.0, "r2": 0.0, "r3": 0.0, "r10": -0.5, "r11": 0.5}
        assert {tuple(one) for one in asked} <= {(1.0,) * 4, (0.0, 1.0)}
    middle = [rollout(number, reward=number / 2) for number in range(3)]
    assert fed(middle).available == 3, "the middle one is worth 0"


def test_an_advantage_of_ones_own() -> None:
    def above_two(rewards: Any, groups: Any) -> Any:
        assert groups.dtype == np.int64
        return rewards - 2

    found = {uid: example.advantage[-1] for uid, example in everything(fed(group(0, 4), advantage=above_two)).items()}
    assert found == {"r0": -2.0, "r1": -1.0, "r2": 0.0, "r3": 1.0}
    for wrong in (
        lambda rewards, groups: rewards[:-1],
        lambda rewards, groups: rewards * np.nan,
        lambda rewards, groups: rewards * 1e39,
    ):
        with pytest.raises(DataError, match="advantage: expected a finite float32 for each of 4 rollouts"):
            fed(group(0, 4), advantage=wrong).create_batch(1)

    class Odd:
        compares = "tokens"

        def __call__(self, rewards: Any, groups: Any) -> Any:
            return rewards

    with pytest.raises(
        ConfigError, match=r"expected an attribute compares, one of \['rewards', 'nothing'\], found 'tokens'"
    ):
        GrpoBatchMaker(advantage=Odd())


def test_what_is_kept_is_what_was_said(tmp_path: Path) -> None:
    items = [
        replace(item, created=100.0 * place)
        for place, environment in enumerate(["math", "math", "math", "code"])
        for item in group(100 * place, 4, example=str(place), environment=environment, version=place + 1)
    ]

    def kept(*retention: Any) -> set[str]:
        return set(everything(fed(items, retention=retention)))

    def of(*firsts: int) -> set[str]:
        return {f"r{number}" for first in firsts for number in range(first, first + 4)}

    assert kept() == of(0, 100, 200, 300)
    assert kept(lambda rows: rows.age <= 200) == of(100, 200, 300)
    assert kept(lambda rows: rows.newer < 4) == of(200, 300), "of each environment"
    assert kept(lambda rows: rows.age <= 200, lambda rows: rows.environment == 0) == of(100, 200)
    assert kept(lambda rows: rows.staleness <= 1) == of(200, 300)
    # A newer version does not throw away what is to be kept.
    same = [item for version in range(1, 5) for item in group(10 * version, 2, version=version)]
    assert len(everything(fed(same, retention=lambda rows: rows.staleness <= 2))) == 6
    assert len(everything(fed(same))) == 2
    items = [*group(0, 20, version=1), *group(100, 20, version=3)]
    maker = fed(items, retention=lambda rows: 0.5**rows.staleness, max_uses=400)
    counts = Counter(example.policy_version for _ in range(400) for example in maker.create_batch(1) or [])
    # Two versions behind: a quarter as likely, so a fifth of 400.
    assert abs(counts["1"] - 80) < 4.5 * math.sqrt(400 * 0.2 * 0.8)
    with RolloutBuffer(tmp_path, 4, batch_maker=GrpoBatchMaker(retention=TopK(2)), sync=False) as buffer:
        for first in (0, 4):
            buffer.add_rollouts(group(first, 4))
        assert set(everything(buffer.batch_maker)) == {"r2", "r3", "r6", "r7"}  # type: ignore[arg-type]


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([(0, 1 << 62), (7, 9)]),
    st.booleans(),
)
def test_filters_are_those_of_a_loop(groups: list[list[float]], k: int, lengths: tuple[int, int], above: bool) -> None:
    items = [
        rollout(10 * place + number, example=str(place), reward=reward, tokens=3 + number)
        for place, many in enumerate(groups)
        for number, reward in enumerate(many)
    ]
    filters = [
        TopK(k, above),
        lambda rows: (rows.tokens >= lengths[0]) & (rows.tokens <= lengths[1]),
        lambda rows: rows.reward >= 0.5,
    ]
    found = set(everything(fed(items, retention=filters, filter_zero_variance=False)))
    expected = set()
    for place, many in enumerate(groups):
        best = sorted(range(len(many)), key=lambda number: (-many[number], number))[:k]
        best = [number for number in best if not above or many[number] > statistics.median_low(many)]
        fits = [number for number in best if lengths[0] <= 6 + number <= lengths[1] and many[number] >= 0.5]
        expected |= {f"r{10 * place + number}" for number in fits}
    assert found == expected


@pytest.mark.parametrize("way", ["buffer", "restarted", "rollouts read back"])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_sealed_group_is_scored_by_itself(way: str, pooled: bool, tmp_path: Path) -> None:
    rewards = {"a": [0.0, 0, 0, 1], "b": [1.0, 1, 1, 0], "c": [1.0] * 4, "d": [0.0] * 4}
    items = [
        replace(rollout(n, reward=x), rollout_uid=f"{name}{n}") for name in rewards for n, x in enumerate(rewards[name])
    ]

    def opened() -> RolloutBuffer:
        return RolloutBuffer(tmp_path, 4, batch_maker=GrpoBatchMaker(pool_groups=pooled), sync=False)

    with opened() as buffer:
        for first in range(0, 16, 4):
            buffer.add_rollouts(items[first : first + 4])
        stored = buffer.rollouts()
        maker: Any = buffer.batch_maker
    if way == "restarted":
        with opened() as buffer:
            maker = buffer.batch_maker
    if way == "rollouts read back":
        maker = fed(list(stored), pool_groups=pooled)
    uids = {one.group_uid for one in stored.groups}
    assert len(uids) == 4
    assert [one.group_uid for one in stored] == [one.group_uid for one in stored.groups for _ in range(4)]
    assert maker.available == (16 if pooled else 8)
    found: dict[str, float] = {}
    while (batch := maker.create_batch(4)) is not None:
        found |= {example.rollout_uid: float(example.advantage[-1]) for example in batch}
    groups = [items] if pooled else [items[:4], items[4:8]]
    expected = {
        item.rollout_uid: worth
        for many in groups
        for item, worth in zip(many, Rloo()([item.reward for item in many], [0] * len(many)), strict=True)
    }
    assert found == pytest.approx(expected, abs=1e-6)
    summary = maker.summary()
    assert (summary["groups"], summary["left/filter_zero_variance"]) == ((1, 0) if pooled else (4, 8))


def test_a_batch_maker_of_ones_own_can_tell_groups_apart(tmp_path: Path) -> None:
    class Maker:
        def __init__(self) -> None:
            self.came: Counter[str] = Counter()

        def add_rollout(self, item: RolloutRecord) -> None:
            self.came[item.group_uid] += 1

        def create_batch(self, batch_size: int) -> list[RLExample] | None:
            return None

        def get_batch_metadata(self, batch: Any) -> dict[str, Any]:
            return {}

    for _ in range(2):
        maker = Maker()
        with RolloutBuffer(tmp_path, 4, batch_maker=maker, sync=False) as buffer:
            buffer.add_rollouts([*group(0, 4), *group(4, 4)])
            buffer.add_rollouts(replace(item, group_uid="another buffer's") for item in group(8, 5))
            assert maker.came == {one.group_uid: 4 for one in buffer.rollouts().groups}
            assert buffer.rollout("r0").group_uid == buffer.rollouts().groups[0].group_uid
            assert buffer.rollout("r12").group_uid == ""
            summary = buffer.summary()
            assert (summary["stored"], summary["held"], summary["unsealed"]) == (13, 12, 1)


Step = tuple[str, int, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "add", "draw", "tell"]), st.integers(0, 40), st.integers(0, 5))),
    st.sampled_from(["drop", "keep"]),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([(), TopK(2), [lambda rows: rows.tokens <= 9, lambda rows: rows.newer < 6]]),
    st.integers(1, 2),
    st.booleans(),
)
def test_every_rollout_that_came_is_held_was_used_or_left_for_one_reason(
    steps: list[Step], older: str, stale: int | None, retention: Any, max_uses: int, filtered: bool
) -> None:
    maker = GrpoBatchMaker(
        "math",
        older_groups=older,
        max_staleness=stale,
        retention=retention,
        max_uses=max_uses,
        filter_zero_variance=filtered,
    )
    came, refused, drawn = 0, 0, Counter[str]()
    for what, number, version in steps:
        if what == "add":
            turns = (Turn("", "assistant", [1] * (number % 4), None if number == 7 else [-0.5] * (number % 4)),)
            environment, example = ("code", "math", "math", "math")[number % 4], str(number % 3)
            uid = f"{number}-{version if number % 5 else 0}"
            item = RolloutRecord(environment, example, version, uid, turns, float(number % 3 == 0), 0.0)
            came += 1
            try:
                maker.add_rollout(item)
            except DataError:  # of a later version, or another one of its uid
                refused += 1
        elif what == "tell":
            maker.set_policy_version(version)
        elif (batch := maker.create_batch(1 + version)) is not None:
            drawn.update(example.rollout_uid for example in batch)
        summary = maker.summary()
        left = {name: count for name, count in summary.items() if name.startswith("left/")}
        assert min(left.values()) >= 0
        assert came == summary["received"] == summary["held"] + summary["used"] + sum(left.values())
        assert summary["held"] == summary["available"]
        assert summary["left/refused"] == refused
    assert maker.summary()["used"] <= len(drawn)


def test_what_leaves_is_counted_by_its_reason(tmp_path: Path) -> None:
    stale = fed([item for v in range(5) for item in group(10 * v, 4, example=str(v), version=v)], max_staleness=1)
    assert (stale.summary()["left/max_staleness"], stale.summary()["held"]) == (12, 8)
    with RolloutBuffer(tmp_path, 2, batch_maker=GrpoBatchMaker(max_staleness=9), sync=False) as buffer:
        buffer.add_rollouts(group(0, 5, version=3))
        buffer.add_rollouts(group(0, 5, version=3))
        buffer.set_policy_version(4)
        for refused in (group(9, 2, version=5), [rollout(0, version=3, reward=9.0)]):
            assert_raises(DataError, "expected", buffer.add_rollouts, refused)
        assert buffer.create_and_store_batch(2) is not None
        buffer.set_policy_version(2)
        summary = {name: count for name, count in buffer.summary().items() if count}
    assert {name: summary[name] for name in summary if name.startswith("left/")} == {
        "left/duplicate": 5,
        "left/refused": 3,
        "left/lost_versions": 3,
    }
    assert (summary["received"], summary["stored"], summary["used"]) == (13, 5, 2)
    for _ in range(2):  # what newer versions ended counts, also after a restart
        with RolloutBuffer(tmp_path / "summary", 4, batch_maker=GrpoBatchMaker(), sync=False) as buffer:
            for version in range(5):
                buffer.add_rollouts(group(10 * version, 4, version=version, reward=float(version == 4) or None))
            buffer.add_rollouts(group(100, 2, example="waits"))
            found = buffer.summary()
            assert (found["groups"], found["groups_equal"]) == (5, 1)
            assert (found["stored"], found["unsealed"]) == (22, 2)


@pytest.mark.parametrize("rewards", [(0.3, 0.1 + 0.2), (0.0, 0.1 + 0.2 - 0.3), (0.3, float(np.float32(0.3)))])
def test_rewards_that_differ_by_rounding_are_equal(rewards: tuple[float, float]) -> None:
    items = [rollout(number, reward=reward) for number, reward in enumerate(rewards)]
    assert fed(items).available == 0
    assert fed([*items, rollout(5, reward=0.31)]).available == 3
    assert not Grpo(eps=0)([0.3, 0.1 + 0.2, 0.3], [0] * 3).any()


def test_versions_from_the_future_change_nothing_and_the_told_one_is_the_folders(tmp_path: Path) -> None:
    maker = GrpoBatchMaker()
    with RolloutBuffer(tmp_path, 4, batch_maker=maker, sync=False) as buffer:
        buffer.set_policy_version(9)
        for version in (None, "", 2.0, True):
            with pytest.raises(DataError, match="set_policy_version: expected a non-empty str or an int, found"):
                buffer.set_policy_version(version)  # type: ignore[arg-type]
        buffer.add_rollouts(group(0, 2, version=9))
        with pytest.raises(DataError, match=r"'r8': expected a version up to '9'.*found '10'"):
            buffer.add_rollouts([rollout(7, version=9), rollout(8, version=10)])
        assert len(buffer) == 2
        buffer.set_policy_version(10)
        assert buffer.add_rollouts([rollout(7, version=9), rollout(8, version=10)]) == 2
    with RolloutBuffer(tmp_path / "told", 4, sync=False) as buffer:
        buffer.add_rollouts(group(0, 4, version=3))
        buffer.set_policy_version(5)
    with (
        RolloutBuffer(tmp_path / "told", 4, sync=False) as buffer,
        pytest.raises(DataError, match=r"up to '5', .*found '6'"),
    ):
        buffer.add_rollout(rollout(9, version=6))
    with RolloutBuffer(tmp_path / "told", 4, batch_maker=GrpoBatchMaker(), sync=False) as buffer:
        assert_raises(DataError, "expected a version up to '5'", buffer.add_rollout, rollout(9, version=6))
        share = next(RolloutStream(buffer, 64, batch_size=4))
        assert (share.report["staleness_mean"], share.report["staleness_max"]) == (2.0, 2.0)
        assert buffer.batch_metadata(share.batch_id)["staleness"] == [2] * 4


@pytest.mark.parametrize("older", ["keep", "drop"])
def test_a_trainer_that_goes_back_draws_nothing_of_later_versions(older: str, tmp_path: Path) -> None:
    def opened() -> RolloutBuffer:
        maker = GrpoBatchMaker(older_groups=older, max_staleness=3)
        return RolloutBuffer(tmp_path, 4, batch_maker=maker, sync=False)

    def drawn(buffer: RolloutBuffer) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        while (name := buffer.create_and_store_batch(1)) is not None:
            about = buffer.batch_metadata(name)
            found.setdefault(*about["policy_versions"], set()).update(about["staleness"])
        return found

    buffer = opened()
    for version in (4, 5, 6, 7):
        buffer.add_rollouts(group(10 * version, 4, version=version))
        buffer.add_rollouts(group(10 * version + 5, 2, example="open", version=version))
    buffer.close()
    buffer = opened()
    buffer.set_policy_version(5)
    assert drawn(buffer) == ({"4": {1}, "5": {0}} if older == "keep" else {"5": {0}})
    buffer.add_rollouts(group(100, 4, version=5))  # those of version 7 do not make them old
    assert drawn(buffer) == {"5": {0}}
    for _ in range(2):
        buffer.set_policy_version(7)  # another one than that of the rollouts that are there
        assert drawn(buffer) == {}
        assert buffer.summary()["left/lost_versions"] == 12
        buffer.close()
        buffer = opened()
    assert buffer.num_ahead == buffer.num_waiting == 4, "those of 4 and 5 whose groups are not sealed"
    buffer.add_rollouts(group(110, 2, example="open", version=7))
    buffer.add_rollouts(group(120, 4, version=7))
    assert drawn(buffer) == {"7": {0}}
    assert buffer.num_waiting == 6, "what is lost is in no group with others"
    buffer.close()


def test_groups_of_which_nothing_can_be_drawn_take_no_time() -> None:
    """What was drawn, and what left, is not gone through again; later rollouts are scored with it all the same."""
    maker = GrpoBatchMaker(retention=lambda rows: rows.newer < 16)
    for number in range(0, 400, 4):
        for item in group(number, 4, example=str(number)):
            maker.add_rollout(item)
    assert maker.available == len(maker.rows()) == 16
    assert maker.create_batch(16) is not None
    assert len(maker.rows()) == 0
    maker.add_rollout(rollout(1000, example="396", reward=0.0))
    (example,) = maker.create_batch(1) or []
    assert example.advantage[-1] == np.float32(-(396 + 397 + 398 + 399) / 4)
    for item in group(2000, 4, example="same", reward=1.0):
        maker.add_rollout(item)
    assert len(maker.rows()) == 0, "nothing is learnt of them"
    summary = maker.summary()
    assert (summary["groups"], summary["groups_equal"], summary["rollouts"]) == (101, 1, 405)


def test_columns_that_nobody_declared_are_refused_by_name() -> None:
    maker = GrpoBatchMaker()
    seen = replace(rollout(0), columns={"top_k": np.int64(5)})
    turn = replace(rollout(1), turns=(Turn("", "assistant", [1], [-0.5], columns={"value": [1.0]}),))
    for item, wanted in (
        (seen, r"per='example', \[\], found 'top_k'"),
        (turn, r"per='token', \[\], found 'value'"),
    ):
        assert_raises(DataError, wanted, maker.add_rollout, item)
        assert_raises(DataError, wanted, make_examples, [item], [1.0])
