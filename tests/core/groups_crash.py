"""A buffer of rollouts, killed between any two of its steps, as a program of its own.

python -m tests.core.groups_crash FOLDER FIRST STRIDE
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mouse_core.groups import GrpoBatchMaker, RolloutBuffer, RolloutColumn, RolloutRecord, Turn, open_rollouts
from tests.core.killing import kill_at_every

STEPS = ("write", "pwrite", "replace", "fsync", "unlink", "ftruncate", "mkdir", "open")
COLUMNS = [RolloutColumn("reference")]
# The last ones are so many groups at once that threads write them, each of an environment of its own.
FIRST, LAST = range(24), range(50, 70)


def rollout(number: int) -> RolloutRecord:
    columns = {"reference": [number, number + 1, number + 2]}
    answer = Turn("4", "assistant", [number, 1, 2], [-0.5] * 3, columns=columns)  # type: ignore[arg-type]
    environment = f"e{number // 4}" if number in LAST else "math"
    return RolloutRecord(environment, str(number // 4), "1", f"r{number}", (answer,), float(number), float(number))


ROLLOUTS = {f"r{number}": rollout(number) for number in (*FIRST, *LAST)}


def script() -> Iterator[tuple[str, Any]]:
    numbers = list(FIRST)
    yield "add", numbers[:8]
    yield "add", [*numbers[8:14], 0]
    yield "batch", 3
    yield "flush", None  # of a group that is not full
    yield "add", numbers[12:]
    yield "batch", 5
    yield "batch", 8
    yield "add", list(LAST)
    yield "batch", 8


def opened(root: Path, *, sync: bool = False) -> RolloutBuffer:
    maker = GrpoBatchMaker(rng_seed=1)
    return RolloutBuffer(root, group_size=4, seal_timeout=1e6, batch_maker=maker, columns=COLUMNS, sync=sync)


def drawn(buffer: RolloutBuffer) -> list[list[str]]:
    return [[example.rollout_uid for example in buffer.read_batch(name)] for name in buffer.batches]


def run(root: Path, tell: Callable[..., None]) -> None:
    with opened(root, sync=True) as buffer:
        for what, given in script():
            tell(what, act(buffer, what, given))


def act(buffer: RolloutBuffer, what: str, given: Any) -> Any:
    if what == "add":
        buffer.add_rollouts(map(rollout, given))
    elif what == "flush":
        buffer.flush()
        return sorted(buffer.rollouts().uids)
    elif buffer.create_and_store_batch(given) is not None:
        return drawn(buffer)
    return given


def check(root: Path, told: list[Any], rollouts: Mapping[str, RolloutRecord] = ROLLOUTS) -> None:
    with opened(root) as buffer:
        batches = drawn(buffer)
        for what, given in told:
            if what == "add":
                assert all(f"r{number}" in buffer for number in given), f"of {given} some are lost"
            elif what == "flush":
                assert set(given) <= set(buffer.rollouts().uids), "sealed rollouts are lost"
            elif isinstance(given, list):
                assert batches[: len(given)] == given, "batches are lost or others"
        for uid, added in rollouts.items():
            if uid in buffer:
                found = buffer.rollout(uid)
                assert (found.key, found.reward, found.turns[0].message) == (added.key, added.reward, "4")
                assert found.turns[0].tokens.tolist() == added.turns[0].tokens.tolist()
                assert found.turns[0].columns["reference"].tolist() == added.turns[0].columns["reference"].tolist()
        used = Counter(uid for batch in batches for uid in batch)
        assert not used or max(used.values()) == 1, f"{used.most_common(3)} were repeated"
        assert len(buffer) == len(set(buffer.rollouts().uids)) + buffer.num_waiting


def check_end(root: Path) -> None:
    with opened(root) as buffer:
        buffer.flush()
        buffer.create_and_store_batch(4)
        told = drawn(buffer)
    with opened(root) as buffer:
        assert drawn(buffer) == told
        while buffer.create_and_store_batch(1):
            pass
        used = Counter(uid for batch in drawn(buffer) for uid in batch)
    assert used == Counter(ROLLOUTS.keys()), used
    assert sorted(open_rollouts(root).uids) == sorted(used)
    assert not list(root.rglob("*.partial"))


if __name__ == "__main__":
    folder, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(kill_at_every(folder, first, stride, steps=STEPS, run=run, check=check, check_end=check_end))
