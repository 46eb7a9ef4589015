"""GrpoBatchMaker against plain loops, and batches as files."""

import errno
import math
import os
import pickle
import statistics
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, MissingFieldError, StorageError
from mouse_core.groups import (
    DrGrpo,
    Grpo,
    GrpoBatchMaker,
    RLExample,
    Rloo,
    RolloutBuffer,
    RolloutColumn,
    RolloutRecord,
    Turn,
    make_examples,
)
from tests.core.groups_cases import group, lose_index, rollout
from tests.raising import assert_raises


def uids(batch: list[RLExample] | None) -> list[str]:
    assert batch is not None
    return [example.rollout_uid for example in batch]


def everything(maker: GrpoBatchMaker) -> set[str]:
    return set(uids(maker.create_batch(maker.available))) if maker.available else set()


def lose(folder: Path, kept: str) -> None:
    if kept == "no log":
        lose_index(folder)
    elif kept == "no files":
        for path in (folder / "batches").iterdir():
            path.unlink()


def by_hand(rewards: list[float], advantage: Any) -> list[float]:
    n = len(rewards)
    if n == 1 or len(set(rewards)) == 1:
        return [0.0] * n
    total, others = math.fsum(rewards), isinstance(advantage, Rloo)
    means = [math.fsum([total, -reward]) / (n - 1) if others else total / n for reward in rewards]
    result = [reward - mean for reward, mean in zip(rewards, means, strict=True)]
    if isinstance(advantage, Grpo):
        deviation = (statistics.stdev if advantage.ddof else statistics.pstdev)(rewards)
        result = [value / (max(deviation, advantage.std_floor) + advantage.eps) for value in result]
    return result


numbers = st.floats(-1e3, 1e3).map(lambda value: round(value, 3))


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.1]) | numbers, min_size=1, max_size=8), min_size=1, max_size=5),
    st.just(Rloo())
    | st.just(DrGrpo())
    | st.builds(Grpo, st.sampled_from([0, 1]), st.sampled_from([0, 1e-4, 1e-6]), st.sampled_from([0, 0.5])),
    st.randoms(use_true_random=False),
)
def test_advantages_are_those_of_a_loop(groups: list[list[float]], advantage: Any, random: Any) -> None:
    rows = [(reward, number) for number, rewards in enumerate(groups) for reward in rewards]
    expected = [value for rewards in groups for value in by_hand(rewards, advantage)]
    order = list(range(len(rows)))
    random.shuffle(order)
    found = advantage([rows[i][0] for i in order], [rows[i][1] * 7 for i in order])
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [expected[i] for i in order], rtol=1e-9, atol=1e-9)


def test_advantages_are_exact_where_that_matters() -> None:
    assert not Rloo()([0.1] * 7, [0] * 7).any()
    for advantage in (Rloo(), Grpo()):
        assert advantage([0.1, 0.2, 0.3], [0] * 3)[1] == 0.0
    assert Rloo()([3.0], [0]).tolist() == [0.0]
    assert Rloo()([], []).shape == (0,)
    for wrong in (([1, "x"], [0, 0]), ([1, 2], [0]), ([[1]], [0]), ([1, 2], [0, 0.5]), ([1, [2]], [0, 0])):
        assert_raises(DataError, r"rewards: expected (numbers|rewards)", Rloo(), *wrong)
    assert_raises(DataError, "rewards: expected finite numbers, found nan", Rloo(), [1.0, math.nan], [0, 0])
    large = Rloo()([1e9, 1e9 + 1e-3], [0, 0])
    np.testing.assert_allclose(large, [-(1e9 + 1e-3 - 1e9), 1e9 + 1e-3 - 1e9], rtol=1e-12)
    assert Grpo(eps=0, std_floor=1.0)([0, 1e-9], [0, 0]).tolist() == [-5e-10, 5e-10]


def test_a_batch_is_a_sample_without_replacement_that_a_seed_repeats() -> None:
    maker = GrpoBatchMaker(rng_seed=3)
    for item in group(0, 8):
        maker.add_rollout(item)
    assert maker.available == 8
    assert maker.create_batch(9) is None
    first, second = maker.create_batch(5), maker.create_batch(3)
    assert set(uids(first)) | set(uids(second)) == {f"r{n}" for n in range(8)}
    assert maker.create_batch(1) is None
    assert first is not None
    for example in first:
        number = int(example.rollout_uid[1:])
        expected = np.float32(number - (28 - number) / 7)
        assert set(example.advantage[example.loss_mask].tolist()) == {float(expected)}
        assert example.loss_mask.tolist() == [False] * 3 + [True] * 5

    def batches(seed: int | None) -> list[list[str]]:
        maker = GrpoBatchMaker(rng_seed=seed)
        for item in group(0, 50):
            maker.add_rollout(item)
        return [uids(maker.create_batch(8)) for _ in range(3)]

    assert batches(1) == batches(1)
    assert batches(1) != batches(2)
    assert batches(None) == batches(0)
    maker = GrpoBatchMaker()
    for number, reward in ((0, 0.0), (1, 1.0)):
        maker.add_rollout(rollout(number, reward=reward))
    used = uids(maker.create_batch(1))
    maker.add_rollout(rollout(2, reward=4.0))
    batch = {example.rollout_uid: example for example in maker.create_batch(2) or []}
    assert set(batch) == {"r0", "r1", "r2"} - set(used)
    assert batch["r2"].advantage.max() == 3.5


@pytest.mark.parametrize(
    ("sealed", "turn"),
    [(False, Turn("4", "assistant", [1])), (True, Turn("4", "assistant", [], [])), (True, Turn("4", "user", [1]))],
)
def test_rollouts_without_a_token_in_the_loss_are_not_scored(turn: Turn, sealed: bool, tmp_path: Path) -> None:
    maker = GrpoBatchMaker()
    items = [RolloutRecord("math", "problem", "1", "given", (turn,), 5.0), rollout(1), rollout(3)]
    with RolloutBuffer(tmp_path, 3, batch_maker=maker, sync=False) as buffer:
        for item in items:
            (buffer if sealed else maker).add_rollout(item)
        assert {x.rollout_uid: float(x.advantage[-1]) for x in maker.create_batch(2) or []} == {"r1": -2.0, "r3": 2.0}
        assert (maker.available, maker.summary()["left/untrained"]) == (0, 1)
        # One that would end an older group does not, and one that would differ from its group does not.
        maker.add_rollout(rollout(7, example="b", version=2, reward=1.0))
        maker.add_rollout(rollout(8, example="b", version=2, reward=1.0))
        maker.add_rollout(RolloutRecord("math", "b", "2", "other", (turn,), 5.0))
        assert (maker.available, maker.summary()["left/filter_zero_variance"]) == (0, 2)
        maker.add_rollout(rollout(9, example="b", version=2, reward=0.0))
        maker.add_rollout(RolloutRecord("math", "b", "3", "newer", (turn,), 5.0))
        assert maker.available == 3


@pytest.mark.parametrize("older", [None, "drop"])
def test_a_newer_version_does_not_end_what_may_be_stale(older: str | None) -> None:
    maker = GrpoBatchMaker(max_staleness=4, older_groups=older)
    for version in range(1, 8):
        for item in group(10 * version, 2, version=version):
            maker.add_rollout(item)
    maker.add_rollout(rollout(32, version=3))  # of a group that newer ones have come behind
    assert set(maker.rows().staleness.tolist()) == (set(range(5)) if older is None else {0})
    assert maker.available == (11 if older is None else 2)


def test_stale_rollouts_and_those_of_other_environments_are_left_out() -> None:
    maker = GrpoBatchMaker(environment_name="code")
    for item in [*group(0, 4), *group(10, 4, environment="code")]:
        maker.add_rollout(item)
    assert everything(maker) == {"r10", "r11", "r12", "r13"}
    maker = GrpoBatchMaker(max_staleness=2)
    for version in (7, 8, 10):
        for item in group(version * 10, 2, example=str(version), version=version):
            maker.add_rollout(item)
    maker.add_rollout(rollout(1, example="too late", version=7))
    assert maker.available == 4
    maker.set_policy_version(12)
    assert everything(maker) == {"r100", "r101"}
    names = GrpoBatchMaker(max_staleness=1)
    for number, version in enumerate(["step-9", "step-10", "step-50"]):
        for item in group(number * 10, 2, example=version, version=version):
            names.add_rollout(item)
    assert everything(names) == {"r10", "r11", "r20", "r21"}


def test_what_waits_is_read_back_where_memory_has_no_room(tmp_path: Path) -> None:
    """Of 5 MB of rollouts, nearly all of it a column, half one may stay in memory, sealed or not; none is lost."""
    column = RolloutColumn("seen", shape=(600,))

    def seen(number: int) -> RolloutRecord:
        item = rollout(number, example=f"{number % 50}")
        values = np.full((5, 600), number, np.float32)
        return replace(item, turns=(item.turns[0], replace(item.turns[1], columns={"seen": values})))

    def opened() -> RolloutBuffer:
        maker = GrpoBatchMaker(rng_seed=3)
        return RolloutBuffer(
            tmp_path, 8, batch_maker=maker, columns=[column], sync=False, memory_bytes=500_000, seal_timeout=1e6
        )

    def check(buffer: RolloutBuffer) -> None:
        name = buffer.create_and_store_batch(20)
        assert name is not None
        for example in buffer.read_batch(name):
            assert set(example.columns["seen"][3:].reshape(-1).tolist()) == {float(example.rollout_uid[1:])}

    buffer = opened()
    buffer.add_rollouts(map(seen, range(50)))  # what is imported on use is not counted
    buffer.create_and_store_batch(1)
    tracemalloc.start()
    try:
        for first in range(50, 350, 50):
            buffer.add_rollouts(map(seen, range(first, first + 50)))
        assert (buffer.num_waiting, buffer.num_groups) == (350, 0)
        assert buffer.rollout("r7") == seen(7)
        unsealed = tracemalloc.get_traced_memory()[0]
        buffer.close()
        buffer = opened()
        assert buffer.num_waiting == 350
        buffer.add_rollouts(map(seen, range(350, 400)))
        assert (buffer.num_waiting, buffer.num_groups) == (0, 50)
        sealed = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    with buffer:
        assert max(unsealed, sealed) < 2e6
        assert buffer.num_ahead == 400
        check(buffer)
        check(buffer)


actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 30),
            st.sampled_from(["a", "b"]),
            st.sampled_from(["x", "y"]),
            st.sampled_from([1, 2, 10]),
            st.sampled_from([0.0, 1.0, 2.0]),
        ),
        st.tuples(st.just("draw"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(
    actions,
    st.integers(1, 2),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.sampled_from(["drop", "keep"]),
)
def test_what_can_be_drawn_is_what_a_simple_model_says(
    steps: list[Any], max_uses: int, max_staleness: int | None, filtered: bool, older: str
) -> None:
    maker = GrpoBatchMaker(
        max_uses=max_uses, max_staleness=max_staleness, filter_zero_variance=filtered, older_groups=older
    )
    groups: dict[tuple[str, str], dict[int, list[RolloutRecord]]] = {}
    newest = 0
    uses: Counter[str] = Counter()
    # What is sent twice is the same.
    sent: dict[str, float] = {}

    def take(item: RolloutRecord) -> None:
        problem = groups.setdefault((item.environment, item.example_id), {})
        for version in list(problem):
            if max_staleness is not None and newest - version > max_staleness:
                del problem[version]
        own = int(item.policy_version)
        if max_staleness is not None and newest - own > max_staleness:
            return
        if own not in problem and older != "keep" and any(version > own for version in problem):
            return
        if item not in problem.setdefault(own, []):
            problem[own].append(item)
        for version in [version for version in problem if version < own]:
            if older == "drop":
                del problem[version]

    def drawable() -> set[str]:
        found = set()
        for problem in groups.values():
            for version, members in problem.items():
                if max_staleness is not None and newest - version > max_staleness:
                    continue
                differ = len({item.reward for item in members}) > 1
                for item in members:
                    if uses[item.rollout_uid] < max_uses and (not filtered or differ):
                        found.add(item.rollout_uid)
        return found

    for what, *given_ in steps:
        if what == "add":
            number, environment, example, version, reward = given_
            uid = f"r{number}{environment}{example}{version}"
            reward = sent.setdefault(uid, reward)
            item = RolloutRecord(environment, example, version, uid, rollout(0).turns, reward, created=0.0)
            maker.add_rollout(item)
            newest = max(newest, version)
            take(item)
        else:
            possible = drawable()
            batch = maker.create_batch(given_[0])
            if len(possible) < given_[0]:
                assert batch is None
            else:
                assert len(uids(batch)) == len(set(uids(batch))) == given_[0]
                assert set(uids(batch)) <= possible
                uses.update(uids(batch))
        assert maker.available == len(drawable())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(Grpo, ddof=2), "ddof: expected 0 or 1, found 2"),
        (partial(Grpo, ddof=True), "ddof: expected 0 or 1, found True"),
        (partial(Grpo, eps=-1), "eps: expected a number of 0 or more, found -1"),
        (partial(Grpo, eps="1e-4"), "eps: expected a number of 0 or more, found '1e-4'"),
        (partial(Grpo, std_floor=math.nan), "std_floor: expected a number of 0 or more, found nan"),
        (partial(GrpoBatchMaker, ""), "environment_name: expected a name or None"),
        (partial(GrpoBatchMaker, rng_seed=-1), "seed: expected an integer"),
        (partial(GrpoBatchMaker, older_groups="x"), r"older_groups: expected one of \['drop', 'keep'\], found 'x'"),
        (partial(GrpoBatchMaker, max_staleness=-1), "max_staleness: expected an integer of at least 0"),
        (partial(GrpoBatchMaker, max_uses=0), "max_uses: expected an integer of at least 1"),
        (partial(GrpoBatchMaker().create_batch, 0), "batch_size: expected an integer of at least 1, found 0"),
        (partial(GrpoBatchMaker().add_rollout, 3), "expected a RolloutRecord, found 3"),
        (partial(make_examples, [rollout(0)], [math.nan]), "finite number, or a finite number for each of 8 tokens"),
    ],
)
def test_options_and_calls_that_cannot_be(call: Any, message: str) -> None:
    assert_raises((ConfigError, DataError), message, call)


def test_a_uid_names_one_rollout_of_a_maker_that_can_be_pickled() -> None:
    maker = GrpoBatchMaker()
    for number in (0, 1, 0):
        maker.add_rollout(rollout(number))
    others = {"metadata": {"metadata": {"a": 1}}, "reward": {"reward": 2.0}, "example_id": {"example": "other"}}
    for drawn in (False, True):
        assert maker.available == (0 if drawn else 2)
        for name, changed in others.items():
            if name == "metadata" and drawn:
                continue  # which is forgotten
            found = "group" if name == "example_id" and drawn else name
            with pytest.raises(DataError, match=f"add_rollout, rollout 'r0': .* before, found different {found}"):
                maker.add_rollout(rollout(0, **changed))  # type: ignore[arg-type]
        maker.create_batch(2)
    maker.add_rollout(rollout(0))
    assert maker.available == 0
    maker = GrpoBatchMaker(rng_seed=2, max_staleness=3)
    assert len(pickle.dumps(maker)) < 50_000, "Ray sends it along with the actor, and not beside it"
    for item in group(0, 8):
        maker.add_rollout(item)
    maker.create_batch(2)
    shared: list[pickle.PickleBuffer] = []
    data = pickle.dumps(maker, protocol=5, buffer_callback=shared.append)
    other = pickle.loads(data, buffers=[bytes(one.raw()) for one in shared])  # that cannot be written to
    assert other.create_batch(4) == maker.create_batch(4)
    assert other.available == maker.available == 2


def buffer(folder: Path, **options: Any) -> RolloutBuffer:
    maker = options.pop("batch_maker", None) or GrpoBatchMaker(rng_seed=1)
    return RolloutBuffer(folder, 4, seal_timeout=1e6, batch_maker=maker, sync=False, **options)


def test_a_stored_batch(tmp_path: Path) -> None:
    whole = buffer(tmp_path)
    whole.add_rollouts(group(0, 7))
    assert whole.create_and_store_batch(5) is None
    batch_id = whole.create_and_store_batch(3)
    assert batch_id is not None
    assert whole.batches == [batch_id]
    (path,) = (tmp_path / "batches").iterdir()
    assert path.name.startswith(f"batch_{batch_id}_")
    assert path.name.removesuffix(".parquet").rpartition("_")[2].isdigit()
    batch = whole.read_batch(batch_id)
    assert len(batch) == 3
    same = GrpoBatchMaker(rng_seed=1)
    for item in group(0, 4):
        same.add_rollout(item)
    assert same.create_batch(3) == batch
    assert whole.batch_metadata(batch_id) == same.get_batch_metadata(batch)
    table = pq.read_table(path)
    assert table.column("tokens").type.value_type == "int32"
    assert table.column("loss_mask").type.value_type == "bool"
    assert table.column("rollout_uid").to_pylist() == uids(batch)
    assert_raises(MissingFieldError, "expected the id of one of 1 stored batches, found 'x'", whole.read_batch, "x")
    with pytest.raises(ConfigError, match="expected a buffer with a batch_maker"):
        RolloutBuffer(tmp_path / "other").create_and_store_batch(1)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert_raises(DataError, f"{path}: expected the content that was written, found damage", whole.read_batch, batch_id)


@pytest.mark.parametrize(
    ("kept", "max_uses", "older"),
    [
        *(("no log", 1, "drop"), ("no files", 1, "drop"), ("all", 2, "keep"), ("no log", 2, "keep")),
        *(pytest.param(kept, 2, "drop", marks=pytest.mark.slow) for kept in ("all", "no log", "no files")),
    ],
)
def test_a_restart_goes_on_as_if_nothing_had_happened(tmp_path: Path, kept: str, max_uses: int, older: str) -> None:
    def go(folder: Path, restart: bool) -> list[list[str]]:
        def opened() -> RolloutBuffer:
            maker = GrpoBatchMaker(rng_seed=5, max_uses=max_uses, older_groups=older)
            return buffer(folder, batch_maker=maker)

        whole = opened()
        drawn: list[list[str]] = []
        for first in range(0, 60, 10):
            for environment in ("math", "code"):
                version = 1 + first // 30
                many = group(first, 6, environment=environment, example=str(first % 30), version=version)
                whole.add_rollouts(
                    RolloutRecord(*x.key, f"{environment}{x.rollout_uid}", x.turns, x.reward, x.created) for x in many
                )
            if (batch_id := whole.create_and_store_batch(5)) is not None:
                drawn.append(uids(whole.read_batch(batch_id)))
            if restart:
                whole.close()
                lose(folder, kept)
                whole = opened()
        whole.close()
        return drawn

    assert go(tmp_path / "with", True) == go(tmp_path / "without", False)


@pytest.mark.parametrize(
    ("versions", "kept"), [(("1", "1.0", "1"), "1"), (("1", "1.0"), "1.0"), (("1.0", "1", "2", "1.5"), "2")]
)
def test_a_restart_and_versions_that_replace_each_other(tmp_path: Path, versions: tuple[str, ...], kept: str) -> None:
    drawn = []
    for restart in (False, True):
        whole = buffer(tmp_path / str(restart))
        for place, version in enumerate(versions):
            whole.add_rollouts(group(10 * place, 8, version=version))
        whole.create_and_store_batch(2)
        if restart:
            whole.close()
            whole = buffer(tmp_path / str(restart))
        while whole.create_and_store_batch(1):
            pass
        drawn.append([whole.read_batch(name) for name in whole.batches])
    assert drawn[0] == drawn[1]
    assert {example.policy_version for batch in drawn[0] for example in batch} == {kept}


def test_a_restart_reads_only_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = buffer(tmp_path)
    for version in (1, 2):
        whole.add_rollouts(
            [item for n in range(40) for item in group(1000 * version + 4 * n, example=str(n), version=version)]
        )
    assert whole.create_and_store_batch(100) is not None
    whole.close()
    opened: list[Path] = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read(path))  # type: ignore[func-returns-value]
    again = buffer(tmp_path)
    assert not [path for path in opened if path.suffix == ".parquet"]
    assert again.num_ahead == 60
    assert again.create_and_store_batch(7) is not None
    drawn = {example.rollout_uid for example in again.read_batch(again.batches[-1])}
    of = sorted({item.path for item in again.rollouts().groups if drawn.intersection(item.uids)})
    read_for_it = [path for path in opened if path.suffix == ".parquet" and path.parent.name != "batches"]
    assert sorted(read_for_it) == of, "each once"


class Queue:
    """A batch maker of no more than the protocol; ``says`` is where it names its rollouts, "both" by half."""

    def __init__(self, says: str) -> None:
        self.says = says
        self.waiting: list[RolloutRecord] = []
        self.drawn: list[list[str]] = []

    def add_rollout(self, item: RolloutRecord) -> None:
        self.waiting.append(item)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        if len(self.waiting) < batch_size:
            return None
        taken, self.waiting = self.waiting[:batch_size], self.waiting[batch_size:]
        self.drawn.append([item.rollout_uid for item in taken])
        named = {"examples": batch_size, "both": batch_size // 2}.get(self.says, 0)
        return [
            replace(example, rollout_uid=example.rollout_uid if place < named else "")
            for place, example in enumerate(make_examples(taken, np.ones(batch_size)))
        ]

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"rollout_uids": self.drawn[-1]} if self.says in ("metadata", "both") else {}


@pytest.mark.parametrize(
    ("says", "kept"), [("examples", "no files"), ("examples", "no log"), ("metadata", "no log"), ("both", "all")]
)
def test_any_maker_gets_every_rollout_once(tmp_path: Path, says: str, kept: str) -> None:
    drawn: list[str] = []
    for first in range(0, 40, 8):
        maker = Queue(says)
        whole = buffer(tmp_path, batch_maker=maker)
        whole.add_rollouts(group(first, 8))
        for size in (3, 2):
            assert whole.create_and_store_batch(size) is not None
        drawn += [uid for batch in maker.drawn for uid in batch]
        whole.close()
        lose(tmp_path, kept)
    maker = Queue(says)
    buffer(tmp_path, batch_maker=maker)
    left = [item.rollout_uid for item in maker.waiting]
    found = Counter(drawn + left)
    assert set(found) == {f"r{number}" for number in range(40)}
    assert set(found.values()) == {1}
    assert len(left) == 15


class Unsaid(Queue):
    metadata: Any = None

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        whole = super().create_batch(batch_size) or []
        return [RLExample(*(getattr(example, name)[1:] for name in ARRAYS)) for example in whole]

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> Any:
        return self.metadata


ARRAYS = ("tokens", "loss_mask", "advantage", "generator_log_probs")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "expected the uids of the rollouts in the batch"),
        ({"rollout_uids": []}, "expected the uids of the rollouts in the batch"),
        ({"rollout_uids": 2}, "expected the uids of the rollouts in the batch"),
        ({"rollout_uids": ["r0", ""]}, "expected the uids of the rollouts in the batch"),
        ({"rollout_uids": ["r0", "r9"]}, "expected only rollouts of this buffer in the batch, found rollout_uid 'r9'"),
        (None, "get_batch_metadata: expected a dict, found None"),
    ],
)
def test_a_batch_that_does_not_say_of_which_rollouts_is_not_stored(tmp_path: Path, metadata: Any, message: str) -> None:
    maker = Unsaid("nowhere")
    maker.metadata = metadata
    whole = buffer(tmp_path, batch_maker=maker)
    whole.add_rollouts(group(0, 4))
    for _ in range(2):
        assert_raises(DataError, message, whole.create_and_store_batch, 2)
    assert whole.batches == []
    assert not list((tmp_path / "batches").iterdir())
    maker.metadata = {"rollout_uids": ["r0", "r1"]}
    batch_id = whole.create_and_store_batch(2)
    assert batch_id is not None, "nothing was lost: the same batch is stored once it says so"
    assert len(maker.drawn) == 1
    whole.close()
    again = Unsaid("nowhere")
    buffer(tmp_path, batch_maker=again)
    assert [item.rollout_uid for item in again.waiting] == ["r2", "r3"]


def test_a_maker_may_use_rollouts_again(tmp_path: Path) -> None:
    class Again(Queue):
        def create_batch(self, batch_size: int) -> list[RLExample] | None:
            whole = list(self.waiting)
            made = super().create_batch(batch_size)
            self.waiting = whole
            return made

    whole = buffer(tmp_path, batch_maker=Again("examples"))
    whole.add_rollouts(group(0, 4))
    for _ in range(3):
        batch_id = whole.create_and_store_batch(2)
        assert batch_id is not None
        assert len(whole.read_batch(batch_id)) == 2
    assert len(whole.batches) == 3
    whole.close()
    left = Queue("examples")
    buffer(tmp_path, batch_maker=left)
    assert [item.rollout_uid for item in left.waiting] == ["r2", "r3"]


def test_a_batch_is_made_of_examples_and_metadata_may_have_numbers_of_numpy(tmp_path: Path) -> None:
    class Wrong(Queue):
        def create_batch(self, batch_size: int) -> Any:
            return ["example"]

    whole = buffer(tmp_path, batch_maker=Wrong("examples"))
    with pytest.raises(DataError, match="create_batch: expected an RLExample at index 0, found 'example'"):
        whole.create_and_store_batch(1)

    class Says(Queue):
        def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
            return {"step": np.int64(3), "mean": np.float32(0.5), "lengths": np.arange(3), "at": tmp_path}

    whole = buffer(tmp_path, batch_maker=Says("examples"))
    whole.add_rollouts(group(0, 4))
    batch_id = whole.create_and_store_batch(2)
    assert batch_id is not None
    expected = {"step": 3, "mean": 0.5, "lengths": [0, 1, 2], "at": str(tmp_path)}
    assert whole.batch_metadata(batch_id) == expected


@pytest.mark.parametrize("what", ["file", "log"])
def test_a_batch_that_could_not_be_stored_is_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    whole = buffer(tmp_path)
    whole.add_rollouts(group(0, 4))

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if what == "file" else StorageError("No space left")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "write") if what == "file" else (whole._index_log, "append")), full)
        for _ in range(2):
            assert_raises(StorageError, "No space left", whole.create_and_store_batch, 4)
    assert whole.batches == []
    assert not list((tmp_path / "batches").iterdir())
    batch_id = whole.create_and_store_batch(4)
    assert batch_id is not None
    assert sorted(uids(whole.read_batch(batch_id))) == ["r0", "r1", "r2", "r3"]
    whole.close()
    (tmp_path / "batches" / next((tmp_path / "batches").iterdir()).name).unlink()
    assert buffer(tmp_path).create_and_store_batch(1) is None
