"""Buffers that are closed, killed or damaged, and opened again: nothing is lost, and no damage is silent."""

import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mouse_core.errors import MouseError, StoreWarning
from mouse_core.groups import (
    DrGrpo,
    Grpo,
    GrpoBatchMaker,
    HeldRollouts,
    Rloo,
    RolloutBuffer,
    RolloutColumn,
    RolloutRecord,
    TopK,
    Turn,
    open_rollouts,
)
from tests.core.groups_cases import lose_index
from tests.programs import run_module

COLUMNS = [
    RolloutColumn("temperature", "example"),
    RolloutColumn("weights", dtype="int32"),
]


def options(rng: random.Random) -> dict[str, Any]:
    filters = rng.sample([TopK(2), lambda rows: rows.tokens <= 8], k=rng.randint(0, 2))
    functions = [lambda rows: 0.5 ** (rows.staleness / 2), lambda rows: rows.newer < 9, lambda rows: rows.age <= 30]
    retention = rng.sample(functions, k=rng.randint(0, 2))
    return {
        "rng_seed": rng.randrange(9),
        "advantage": rng.choice([Rloo(), Grpo(), DrGrpo()]),
        "retention": [*filters, *retention],
        "max_uses": rng.choice([1, 1, 2]),
        "filter_zero_variance": rng.random() < 0.7,
        "older_groups": rng.choice([None, "keep"] if retention else ["drop", "keep"]),
        "max_staleness": rng.choice([None, None, 1]),
        "pool_groups": rng.random() < 0.3,
    }


def some_rollout(rng: random.Random, number: int) -> RolloutRecord:
    length = rng.randint(1, 6)
    columns = {"weights": [number] * length} if rng.random() < 0.5 else {}
    answer = Turn("", "assistant", [rng.randrange(9) for _ in range(length)], [-0.5] * length, columns=columns)
    return RolloutRecord(
        rng.choice("xy"),
        str(rng.randint(0, 2)),
        rng.randint(0, 2) + number // 20,
        f"u{number}",
        [Turn("", "user", [1]), answer],
        float(rng.randint(0, 2)),
        created=1000.0 + number,
        columns={"temperature": 0.5} if rng.random() < 0.5 else {},
    )


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 3, 4, 5))])
def test_batches_are_the_same_with_and_without_restarts(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    made = options(rng)

    def opened(name: str) -> RolloutBuffer:
        maker = GrpoBatchMaker(**made)
        memory = 2000 if name == "restarted" else 2**30
        return RolloutBuffer(
            tmp_path / name, 3, 2, 1e6, batch_maker=maker, columns=COLUMNS, sync=False, memory_bytes=memory
        )

    both = [opened("whole"), opened("restarted")]
    number, told = 0, 9
    for _ in range(50):
        what = rng.random()
        if what < 0.65:
            added = [some_rollout(rng, number + place) for place in range(rng.randint(1, 4))]
            number += len(added)
            # Those of versions that are not there yet are refused.
            added = [item for item in added if int(item.policy_version) <= told]
            for buffer in both:
                buffer.add_rollouts(added)
        elif what < 0.72:
            assert both[0].flush() == both[1].flush()
        elif what < 0.77 and number:
            told = rng.choice([number // 20, number // 20 + 2, 9])  # sometimes it goes back
            for buffer in both:
                buffer.set_policy_version(told)
        else:
            size = rng.randint(1, 3)
            ids = [buffer.create_and_store_batch(size) for buffer in both]
            if ids[0] is not None:
                assert ids[1] is not None
                assert both[0].read_batch(ids[0]) == both[1].read_batch(ids[1])
                assert both[0].batch_metadata(ids[0]) == both[1].batch_metadata(ids[1])
            else:
                assert ids[1] is None
        if rng.random() < 0.25:
            both[1].close()
            both[1] = opened("restarted")
        for buffer in both:
            summary = buffer.summary()
            left = sum(count for name, count in summary.items() if name.startswith("left/"))
            assert (
                summary["stored"]
                <= summary["received"]
                == left + sum(summary[name] for name in ("unsealed", "queued", "held", "used"))
            )
    for buffer in both:
        buffer.close()
    lose_index(tmp_path / "restarted")
    with opened("restarted") as found, opened("whole") as whole:
        by_uid = {one.rollout_uid: one for one in whole.rollouts()}
        assert {one.rollout_uid: one for one in found.rollouts()} == by_uid


def test_a_retention_of_ones_own_is_told_the_same_after_a_restart(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    def at_least_half_as_long(rows: HeldRollouts) -> npt.NDArray[Any]:
        told.append({name: np.array(values).tolist() for name, values in asdict(rows).items()})
        longest = [rows.tokens[rows.group == group].max() for group in rows.group]
        return 2 * rows.tokens >= np.array(longest, np.int64)

    def opened() -> RolloutBuffer:
        retention: Any = at_least_half_as_long
        maker = GrpoBatchMaker(rng_seed=0, retention=retention, filter_zero_variance=False, pool_groups=True)
        return RolloutBuffer(tmp_path, batch_maker=maker, sync=False)

    def come(buffer: RolloutBuffer, **lengths: int) -> None:
        for uid, length in lengths.items():
            answer = Turn("", "assistant", [1] * length, [-0.5] * length)  # type: ignore[arg-type]
            buffer.add_rollout(RolloutRecord("x", "1", 1, uid, (answer,), length, created=100.0 + length))
        buffer.flush()

    with opened() as buffer:
        come(buffer, long=9, middle=5)
        drawn = buffer.create_and_store_batch(1)
        assert drawn is not None
        assert [one.rollout_uid for one in buffer.read_batch(drawn)] == ["long"]  # the other one is as likely
        come(buffer, short=4)
        assert buffer.num_ahead == 1  # beside the one that is gone it is too short
    with opened() as buffer:
        assert buffer.num_ahead == 1
    assert told[-1] == told[-2]
    assert told[-1]["tokens"] == [9, 5, 4]


@pytest.mark.parametrize(
    ("first", "stride", "kills"),
    [
        pytest.param(3, 61, 6, marks=pytest.mark.long, id="some steps"),
        pytest.param(1, 7, 36, marks=pytest.mark.long, id="many steps"),
    ],
)
def test_nothing_acknowledged_is_lost_and_nothing_comes_twice_wherever_it_is_killed(
    tmp_path: Path, first: int, stride: int, kills: int
) -> None:
    assert int(run_module("tests.core.groups_crash", tmp_path, first, stride)) >= kills


DECLARED = [
    RolloutColumn("temperature", "example"),
    RolloutColumn("weights", dtype="int32", fill=-1),
    RolloutColumn("embedding", "example", shape=(40,)),
]
# Who owns the folder is said anew when it is reopened.
HARMLESS = {"owner", "index.log.size", "waiting.log.size"}


def rollout(number: int) -> RolloutRecord:
    answer = Turn("4", "assistant", [number, 1], [-0.5, -0.25], columns={"weights": [number, 3]})
    turns = [Turn("?", "user", [7]), answer]
    columns = {"temperature": number / 8, "embedding": np.full(40, number)}
    key = "math", str(number // 4 % 3), 1 + number // 12
    return RolloutRecord(*key, f"r{number}", turns, number * number % 5, number, columns=columns)


def reopened(folder: Path) -> RolloutBuffer:
    return RolloutBuffer(folder, 4, seal_timeout=1e6, batch_maker=GrpoBatchMaker(older_groups="keep"), sync=False)


def all_there_is(folder: Path) -> list[Any]:
    said: list[Any] = [(one, one.group_uid) for one in open_rollouts(folder)]
    with reopened(folder) as buffer:
        said += [(one, one.group_uid) for one in buffer.rollouts()]
        said += [buffer.rollout(f"r{number}") for number in range(26)]
        said += [buffer.columns, buffer.num_waiting, str(buffer.summary())]
        for name in buffer.batches:
            said += [buffer.read_batch(name), buffer.batch_metadata(name), buffer.batch_staleness(name).tolist()]
        made = buffer.create_and_store_batch(4)
        assert made is not None
        said.append(buffer.read_batch(made))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("damage") / "whole"
    maker = GrpoBatchMaker(older_groups="keep")
    with RolloutBuffer(root, 4, seal_timeout=1e6, batch_maker=maker, columns=DECLARED, sync=False) as buffer:
        buffer.set_policy_version(1)
        for numbers in (range(12), range(12, 26)):
            buffer.add_rollouts(map(rollout, numbers))
            assert buffer.create_and_store_batch(3) is not None
            buffer.set_policy_version(3)
        waiting = [replace(rollout(n), example_id="open", policy_version="1", rollout_uid=f"w{n}") for n in (1, 2)]
        buffer.add_rollouts(waiting)
        buffer.set_policy_version(2)
    return root


def damages(content: bytes, several: int) -> Iterator[tuple[str, bytes | None]]:
    yield "removed", None
    if several > 1:
        yield "emptied", b""
    rng, last = random.Random(len(content)), len(content) - 1
    for size in [last, *(rng.randrange(1, last) for _ in range(several - 1))]:
        yield f"cut to {size} of {last + 1}", content[:size]
    for place in [last - 4, *(rng.randrange(last) for _ in range(several - 1))]:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        yield f"a bit of byte {place} of {last + 1}", bytes(changed)


@pytest.mark.parametrize("several", [1, pytest.param(8, marks=pytest.mark.long)])
def test_no_damage_is_silent(several: int, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "sound")
    expected = all_there_is(tmp_path / "sound")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert {path.parts[0] for path in files} == {".state", "batches", "math"}
    assert {"columns.json", "index.log", "waiting.log"} <= {path.name for path in files}
    if several == 1:  # one of each kind
        files = list(
            {(path.parent, path.suffix, path.parent.name == ".state" and path.name): path for path in files}.values()
        )
    for file in files:
        for what, content in damages((folder / file).read_bytes(), several):
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            if content is None:
                (copy / file).unlink()
            else:
                (copy / file).write_bytes(content)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", StoreWarning)
                try:
                    said, failed = all_there_is(copy), ""
                except MouseError as error:
                    said, failed = [], str(error)
            told = "".join(str(one.message) for one in warned) + failed
            assert said == expected or file.name in told, f"{file} {what}: {told or 'silent'}"
            assert file.name not in HARMLESS or said == expected
            shutil.rmtree(copy)
