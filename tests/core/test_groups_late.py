"""Columns that come later than their rollouts, and rollouts by their uids."""

import json
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, DataError, MissingRowError, TimedOutError
from mouse_core.groups import (
    GrpoBatchMaker,
    RLExample,
    RolloutBuffer,
    RolloutColumn,
    RolloutRecord,
    Turn,
    open_rollouts,
)
from tests.core.groups_cases import lose_index

COLUMNS = [
    RolloutColumn("length_penalty", per="example"),
    RolloutColumn("reference", late=True),
    RolloutColumn("judged", per="turn", shape=(2,), dtype="int16", late=True),
    RolloutColumn("reward", per="example", dtype="float64", late=True),
]
LATE = [column for column in COLUMNS if column.late]
REWARD = [RolloutColumn("reward", per="example", dtype="float64", late=True)]


class InOrder:
    """Batches of what came first."""

    def __init__(self) -> None:
        self.waiting: list[RolloutRecord] = []

    def add_rollout(self, rollout: RolloutRecord) -> None:
        self.waiting.append(rollout)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        if len(self.waiting) < batch_size:
            return None
        taken, self.waiting = self.waiting[:batch_size], self.waiting[batch_size:]
        return [
            RLExample(np.int32([1]), np.ones(1, bool), np.float32([r.reward]), np.zeros(1), rollout_uid=r.rollout_uid)
            for r in taken
        ]

    def get_batch_metadata(self, batch: list[RLExample]) -> Mapping[str, Any]:
        return {}


def rollout(number: int, problem: int | None = None, reward: float | None = None) -> RolloutRecord:
    """A rollout of two turns, of 2 and ``number % 3 + 1`` tokens; two of a group follow each other."""
    size = number % 3 + 1
    return RolloutRecord(
        "math",
        str(number // 2 if problem is None else problem),
        1,  # type: ignore[arg-type]
        f"r{number}",
        (Turn("?", "user", [1, 2]), Turn("4", "assistant", [3] * size, [-0.5] * size)),  # type: ignore[arg-type]
        reward,  # type: ignore[arg-type]
        float(number),
    )


def opened(root: Path, columns: list[RolloutColumn] | None = None, **options: Any) -> RolloutBuffer:
    return RolloutBuffer(root, group_size=2, seal_timeout=1e6, columns=columns, sync=False, **options)


def value(name: str, number: int) -> Any:
    """A value of a late column for ``rollout(number)``."""
    if name == "reference":
        return np.arange(2 + number % 3 + 1, dtype=np.float32) - number
    return [[number, 1], [2, 3]] if name == "judged" else number / 4


def drawn(buffer: RolloutBuffer) -> list[str]:
    """The rollouts of all batches, in order, those included that can be made now."""
    while buffer.create_and_store_batch(1):
        pass
    return [example.rollout_uid for name in buffer.batches for example in buffer.read_batch(name)]


def test_what_comes_later_is_in_the_rollouts_and_in_the_examples_made_of_them(tmp_path: Path) -> None:
    with opened(tmp_path, COLUMNS, batch_maker=GrpoBatchMaker()) as buffer:
        buffer.add_rollouts(map(rollout, range(3)))  # the third one's group is not sealed
        assert buffer.create_and_store_batch(1) is None
        for column in LATE:
            assert buffer.add_column(column.name, {f"r{n}": value(column.name, n) for n in range(3)}) == 3
        batch_id = buffer.create_and_store_batch(2)
        assert batch_id is not None
        examples = {example.rollout_uid: example for example in buffer.read_batch(batch_id)}
        waiting = buffer.rollout("r2")
        buffer.add_rollouts(map(rollout, range(4, 6)))  # sealed, and nobody has judged them
        judged = [one for one in buffer.rollouts() if one.reward is not None]
        assert [one.rollout_uid for one in judged] == ["r0", "r1"]
    for number, found in [*((n, open_rollouts(tmp_path).rollout(f"r{n}")) for n in range(2)), (2, waiting)]:
        want = value("reference", number)
        assert found.reward == found.columns["reward"] == number / 4
        assert [turn.columns["reference"].tolist() for turn in found.turns] == [want[:2].tolist(), want[2:].tolist()]
        assert [turn.columns["judged"].tolist() for turn in found.turns] == value("judged", number)
    for number in range(2):
        columns = examples[f"r{number}"].columns
        assert columns["reference"].tolist() == value("reference", number).tolist()
        assert columns["judged"].dtype == np.int16
        assert columns["judged"].tolist() == value("judged", number)
        assert [columns["reward"], columns["length_penalty"]] == [number / 4, 0]
    assert examples["r1"].advantage[-1] == 0.25  # its reward less the other one's


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, COLUMNS) as buffer:
        buffer.add_rollouts([rollout(0), rollout(1), rollout(2, reward=0.5)])
        buffer.add_column("reference", {"r0": value("reference", 0)})
        for name, values, wanted in [
            ("length_penalty", {"r0": 1.0}, r"one of \['reference', 'judged', 'reward'\], found 'length_penalty'"),
            ("length_penalty", {}, r"one of \['reference', 'judged', 'reward'\], found 'length_penalty'"),
            ("reward", [1.0], "expected a dict of values by uid"),
            ("reward", 5, "expected a dict of values by uid, found 5"),
            ("reward", None, "expected a dict of values by uid, found None"),
            ("reward", {"r0": 1.0, "nobody": 2.0}, "uids of stored rollouts, found 'nobody'"),
            (
                "reward",
                {"r0": 1.0, "r1": float("nan")},
                "rollout 'r1': expected column 'reward' as finite numbers, found",
            ),
            (
                "reference",
                {"r1": [0.0, -np.inf, 0, 0]},
                r"'r1': expected column 'reference' as finite .* -inf at \[1\]",
            ),
            ("reward", {"r0": 1.0, "r1": "good"}, "rollout 'r1'"),
            (
                "reward",
                {"r2": 0.75},
                "rollout 'r2': expected the value that was added with the rollout, 0.5, found 0.75",
            ),
            ("reference", {"r1": [1.0, 2.0]}, r"rollout 'r1': expected column .* \[4\], found shape \[2\]"),
            ("judged", {"r1": np.full((2, 2), 99999)}, "rollout 'r1': expected column 'judged' as int16"),
            ("reference", {"r1": value("reference", 1), "r0": np.ones(3)}, "rollout 'r0': expected the value that it"),
        ]:
            with pytest.raises(DataError, match=wanted):
                buffer.add_column(name, values)  # type: ignore[arg-type]
        awaited = buffer.waiting_for()
        assert {name: one.uids for name, one in awaited.items()} == {
            "reference": ("r1", "r2"),
            "judged": ("r0", "r1", "r2"),
            "reward": ("r0", "r1"),
        }
        assert (len(awaited["reference"]), awaited["reference"].oldest) == (2, 1.0)
        # What is the same is no error.
        assert buffer.add_column("reference", {"r0": value("reference", 0), "r1": value("reference", 1)}) == 1
        assert buffer.add_column("reward", {"r2": 0.5}) == buffer.add_column("reward", {}) == 0
        assert buffer.rollout("r2").columns["reward"] == 0.5
    with opened(tmp_path / "plain") as plain:
        with pytest.raises(DataError, match="rollout 'r0': expected a reward of the rollout"):
            plain.add_rollout(rollout(0))
        assert len(plain) == 0


def test_a_folder_waits_for_what_was_declared_when_its_groups_were_sealed(tmp_path: Path) -> None:
    with opened(tmp_path, batch_maker=InOrder()) as buffer:
        buffer.add_rollouts([rollout(n, reward=1.0) for n in range(3)])
    # One group is sealed, and would have zeros that nobody said; rewards are with their rollouts.
    with pytest.raises(
        ConfigError, match=r"expected a fill for the late column 'reference', since the folder has sealed groups"
    ):
        opened(tmp_path, [RolloutColumn("reference", late=True), *REWARD])
    reference = RolloutColumn("reference", late=True, fill=float("nan"))
    for _ in range(2):
        opened(tmp_path, [reference, *REWARD]).close()
    with opened(tmp_path, batch_maker=InOrder()) as buffer:
        buffer.add_rollout(rollout(3, reward=1.0))
        assert drawn(buffer) == ["r0", "r1"]
        assert buffer.waiting_for()["reference"].uids == ("r2", "r3")
        assert buffer.add_column("reference", {f"r{n}": value("reference", n) for n in (0, 3)}) == 2
    with opened(tmp_path, batch_maker=InOrder()) as buffer:
        assert buffer.waiting_for()["reference"].uids == ("r2",)
        assert drawn(buffer) == ["r0", "r1"]
        buffer.add_column("reference", {"r2": value("reference", 2)})
        assert drawn(buffer) == ["r0", "r1", "r2", "r3"]
        assert open_rollouts(tmp_path).rollout("r0").turns[0].columns["reference"].tolist() == [0.0, 1.0]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7)),
        st.tuples(st.sampled_from(["reference", "reward"]), st.lists(st.integers(0, 7), max_size=4, unique=True)),
        st.sampled_from([("flush", 0), ("open", 0), ("batch", 0)]),
    ),
    max_size=14,
)


@settings(max_examples=12, deadline=None)
@given(steps)
def test_groups_are_ready_when_the_last_value_is_there_and_a_restart_keeps_the_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]]
) -> None:
    """An oracle in plain Python: sets of values, groups in the order in which they are complete."""
    root = tmp_path_factory.mktemp("ready")
    columns = [RolloutColumn("reference", late=True), *REWARD]
    there: dict[str, set[int]] = {"reference": set(), "reward": set()}
    unsealed: dict[int, list[int]] = {}
    sealed: list[list[int]] = []
    ready: list[int] = []

    def settle() -> None:
        for group in list(sealed):
            if all(set(group) <= numbers for numbers in there.values()):
                sealed.remove(group)
                ready.extend(group)

    buffer = opened(root, columns, batch_maker=InOrder())
    known: set[int] = set()
    for what, arg in steps:
        if what == "add":
            assert buffer.add_rollout(rollout(arg)) == (arg not in known)
            if arg not in known:
                known.add(arg)
                unsealed.setdefault(arg // 2, []).append(arg)
                if len(unsealed[arg // 2]) == 2:
                    sealed.append(unsealed.pop(arg // 2))
        elif what == "flush":
            buffer.flush()
            sealed += unsealed.values()
            unsealed = {}
        elif what == "open":
            buffer.close()
            buffer = opened(root, batch_maker=InOrder())
        elif what == "batch":
            assert drawn(buffer) == [f"r{n}" for n in ready]
        else:
            numbers = [n for n in arg if n in known]
            new = buffer.add_column(what, {f"r{n}": value(what, n) for n in numbers})
            assert new == len(set(numbers) - there[what])
            there[what].update(numbers)
        settle()
        for name, awaited in buffer.waiting_for().items():
            left = {n for group in (*sealed, *unsealed.values()) for n in group} - there[name]
            assert set(awaited.uids) == {f"r{n}" for n in left}
    assert drawn(buffer) == [f"r{n}" for n in ready]
    for n in known:
        found = buffer.rollout(f"r{n}")
        assert found.reward == (n / 4 if n in there["reward"] else None)
        assert ("reference" in found.turns[0].columns) == (n in there["reference"])
    buffer.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values of several calls, one of them large enough for files of its own; nothing is lost on the way there."""
    root = tmp_path_factory.mktemp("many")
    with opened(root, [RolloutColumn("embedding", per="example", shape=(20_000,), late=True)]) as buffer:
        buffer.add_rollouts(rollout(n, reward=1.0) for n in range(20))
        buffer.add_column("embedding", {"r0": np.full(20_000, 0.5)})
        buffer.add_column("embedding", {f"r{n}": np.full(20_000, n) for n in range(1, 20)})
    return root


def test_large_values_are_files_beside_the_log_and_damaged_ones_are_named(many: Path) -> None:
    files = list((many / ".late" / "embedding").iterdir())
    stored = open_rollouts(many)
    assert len(files) == 1
    assert [r.columns["embedding"][-1] for r in stored] == [0.5, *range(1, 20)]
    again: list[RolloutRecord] = list(pickle.loads(pickle.dumps(stored)))
    assert again[3].columns["embedding"].shape == (20_000,)
    content = files[0].read_bytes()
    try:
        files[0].write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
        with pytest.raises(DataError, match=f"{files[0].name}.*damage"):
            open_rollouts(many).rollout("r5")
    finally:
        files[0].write_bytes(content)


def test_a_log_that_grows_becomes_files_and_readers_see_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mouse_core.groups.late._LOG_BYTES", 2000)
    with opened(tmp_path, [*REWARD, RolloutColumn("reference", late=True)]) as buffer:
        buffer.add_rollouts(map(rollout, range(20)))
        for number in range(20):
            buffer.add_column("reward", {f"r{number}": number})
            assert [r.reward for r in open_rollouts(tmp_path)] == [*range(number + 1), *[None] * (19 - number)]
            buffer.add_column("reference", {f"r{number}": value("reference", number)})
        assert buffer.add_column("reward", {f"r{n}": n for n in range(20)}) == 0
    assert (tmp_path / ".state" / "late.log").stat().st_size < 4000
    assert list((tmp_path / ".late" / "reward").iterdir())
    with opened(tmp_path) as buffer:
        assert [buffer.rollout(f"r{n}").reward for n in range(20)] == list(range(20))
        assert all(not awaited.uids for awaited in buffer.waiting_for().values())


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    with opened(tmp_path, REWARD, max_ahead=4, batch_maker=GrpoBatchMaker()) as buffer:
        assert buffer.add_rollouts(map(rollout, range(4)), timeout=0) == 4
        assert buffer.num_ahead == 4
        assert buffer.create_and_store_batch(2) is None  # more rollouts are not what it lacks
        with pytest.raises(TimedOutError, match="found 4 rollouts ahead of max_ahead 4"):
            buffer.add_rollouts([rollout(4)], timeout=0)
        held: list[int] = []
        producer = threading.Thread(target=lambda: held.append(buffer.add_rollouts(map(rollout, (4, 5)))))
        producer.start()
        assert len(buffer) == 4
        buffer.add_column("reward", {"r0": 1, "r1": 0})
        producer.join()
        assert held == [2]
        assert buffer.create_and_store_batch(2) is not None


def test_what_a_judge_never_scores_can_be_given_up(tmp_path: Path) -> None:
    def judged() -> RolloutBuffer:
        return opened(tmp_path, REWARD, max_ahead=6, batch_maker=GrpoBatchMaker())

    with judged() as buffer:
        buffer.add_rollouts(map(rollout, range(5)))
        buffer.add_rollout(rollout(50, problem=0))
        buffer.flush()  # r50 is a group of its own file, and of the problem of r0 and r1
        buffer.add_column("reward", {"r0": 0.0, "r1": 1.0, "r2": 1.0})
        assert buffer.create_and_store_batch(3) is None
        with pytest.raises(MissingRowError, match="give_up: expected uids among those of 6 rollouts, found 'r9'"):
            buffer.give_up(["r3", "r9"])
        assert buffer.waiting_for()["reward"].uids == ("r3", "r4", "r50")
        assert buffer.give_up(["r3", "r50"]) == 2
        assert buffer.give_up(["r3"]) == 0
        assert buffer.waiting_for()["reward"].uids == ("r4",)
        assert buffer.num_ahead == 3  # r0, r1 and r4: r2 is alone
        assert buffer.add_rollout(rollout(5), timeout=0)
        assert buffer.add_column("reward", {"r3": 0.0, "r4": 0.5, "r5": 1.0}) == 3  # a judge that is late
        assert buffer.summary()["given_up"] == 2
        with pytest.raises(DataError, match="rollout_uids: expected several uids, found 'r1'"):
            buffer.give_up("r1")
        assert buffer.rollout("r3").reward == 0.0
    with judged() as buffer:
        assert not buffer.waiting_for()["reward"]
        assert set(drawn(buffer)) == {"r0", "r1"}
        buffer.add_rollouts(map(rollout, (6, 7, 8, 9)))
        buffer.add_column("reward", {f"r{n}": n for n in (6, 7, 8, 9)})
        assert buffer.give_up(["r6"]) == 1  # the batch maker has it already
        assert set(drawn(buffer)[2:]) == {"r8", "r9"}


def test_rollouts_are_found_by_uid_and_by_problem_without_opening_other_files(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        for n in range(7):
            buffer.add_rollout(rollout(n, reward=1.0))
        for part in open_rollouts(tmp_path, example_id=2).groups:
            part.path.write_bytes(b"damaged")
        assert buffer.rollout("r1") == rollout(1, reward=1.0)
        assert buffer.rollout("r6") == rollout(6, reward=1.0)
        assert [r.rollout_uid for r in buffer.rollouts(example_id=[0, "1"])] == ["r0", "r1", "r2", "r3"]
        stored = open_rollouts(tmp_path, environment="math", example_id="1")
        assert stored.uids == ["r2", "r3"]
        assert stored.rollout("r3") == rollout(3, reward=1.0)
        assert len(open_rollouts(tmp_path, example_id="9")) == 0
        with pytest.raises(MissingRowError, match="expected the uid of one of 2, found 'r0'"):
            stored.rollout("r0")
        with pytest.raises(MissingRowError, match="expected the uid of one of 7, found 'r9'"):
            buffer.rollout("r9")


def test_an_index_that_is_gone_is_made_anew(tmp_path: Path) -> None:
    """A folder whose log knows none of its groups has the same ones, and they wait for the same."""
    with opened(tmp_path, [*REWARD, RolloutColumn("reference", late=True)]) as buffer:
        buffer.add_rollouts(map(rollout, range(6)))
        buffer.add_column("reward", {"r2": 1.0})
        before = buffer.waiting_for()
    lose_index(tmp_path)
    with opened(tmp_path) as buffer:
        assert buffer.waiting_for() == before
        with pytest.raises(DataError, match=r"\[5\], found shape \[4\]"):
            buffer.add_column("reference", {"r5": np.zeros(4)})
    assert json.loads((tmp_path / ".state" / "columns.json").read_text())["version"] == 1


def test_producers_a_judge_and_trainers_at_once(tmp_path: Path) -> None:
    """Each on a thread of its own, producers held back by the judge; every rollout is in one batch, with its reward."""
    count, batches = 64, []
    with opened(tmp_path, REWARD, max_ahead=16, batch_maker=GrpoBatchMaker()) as buffer:

        def produce(producer: int) -> None:
            for number in range(producer * 16, producer * 16 + 16, 2):
                buffer.add_rollouts([rollout(number), rollout(number + 1)], timeout=20)

        def judge() -> None:
            while len(buffer) < count or buffer.waiting_for()["reward"]:
                for uid in buffer.waiting_for()["reward"].uids:
                    buffer.add_column("reward", {uid: float(buffer.rollout(uid).rollout_uid[1:])})

        def train() -> None:
            while 2 * len(buffer.batches) < count:
                if (batch_id := buffer.create_and_store_batch(2)) is not None:
                    batches.append(batch_id)

        threads = [threading.Thread(target=produce, args=(number,), daemon=True) for number in range(4)]
        threads += [threading.Thread(target=work, daemon=True) for work in (judge, train, train)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        examples = [example for batch_id in batches for example in buffer.read_batch(batch_id)]
    assert sorted(example.rollout_uid for example in examples) == sorted(f"r{n}" for n in range(count))
    assert all(example.columns["reward"] == int(example.rollout_uid[1:]) for example in examples)
