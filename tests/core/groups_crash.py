"""A buffer of rollouts with late columns, killed between any two of its steps, as a program of its own.

python -m tests.core.groups_crash FOLDER FIRST STRIDE
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.groups import GrpoBatchMaker, RolloutBuffer, RolloutColumn, RolloutRecord, Turn, late, open_rollouts
from tests.core.killing import kill_at_every

STEPS = ("write", "pwrite", "replace", "fsync", "unlink", "ftruncate", "mkdir", "open")
# Small values go into the log, which is made files of soon; large ones are files at once.
COLUMNS = [
    RolloutColumn("reward", per="example", dtype="float64", late=True),
    RolloutColumn("reference", late=True),
    RolloutColumn("embedding", per="example", shape=(50_000,), late=True),
]
# The last ones are so many groups at once that threads write them, each of an environment of its own.
FIRST, LAST = range(24), range(50, 70)


def rollout(number: int) -> RolloutRecord:
    answer = Turn("4", "assistant", [number, 1, 2], [-0.5] * 3)  # type: ignore[arg-type]
    environment = f"e{number // 4}" if number in LAST else "math"
    return RolloutRecord(environment, str(number // 4), "1", f"r{number}", (answer,), None, float(number))


ROLLOUTS = {f"r{number}": rollout(number) for number in (*FIRST, *LAST)}


def value(name: str, number: int) -> Any:
    if name == "reward":
        return float(number)
    return np.arange(3, dtype=np.float32) + number if name == "reference" else np.full(50_000, number, np.float32)


def script() -> Iterator[tuple[str, Any]]:
    """What the process does, in order: rollouts it adds, columns it writes, and batches it asks for."""
    numbers = list(FIRST)
    yield "add", numbers[:8]
    yield "reward", numbers[:3]
    yield "embedding", numbers[:8]
    yield "reference", numbers[2:8]
    yield "add", [*numbers[8:14], 0]
    yield "reward", numbers[2:10]
    yield "reference", numbers[:2]
    yield "batch", 3
    yield "flush", None  # of a group that is not full
    yield "reference", numbers[8:14]
    yield "add", numbers[12:]
    yield "embedding", numbers[8:]
    yield "reward", numbers[10:]
    yield "batch", 5
    yield "reference", numbers[12:]
    yield "batch", 8
    yield "add", list(LAST)
    for name in ("embedding", "reference", "reward"):
        yield name, list(LAST)
    yield "batch", 8


def opened(root: Path, *, sync: bool = False) -> RolloutBuffer:
    maker = GrpoBatchMaker(rng_seed=1)
    return RolloutBuffer(root, group_size=4, seal_timeout=1e6, batch_maker=maker, columns=COLUMNS, sync=sync)


def drawn(buffer: RolloutBuffer) -> list[list[str]]:
    return [[example.rollout_uid for example in buffer.read_batch(name)] for name in buffer.batches]


def run(root: Path, tell: Callable[..., None]) -> None:
    """All steps of the script; ``tell`` is told what has been acknowledged."""
    late._LOG_BYTES = 2000
    with opened(root, sync=True) as buffer:
        for what, given in script():
            if what == "add":
                buffer.add_rollouts(map(rollout, given))
            elif what == "flush":
                buffer.flush()
                given = sorted(buffer.rollouts().uids)
            elif what != "batch":
                buffer.add_column(what, {f"r{number}": value(what, number) for number in given})
            elif buffer.create_and_store_batch(given) is not None:
                given = drawn(buffer)
            tell(what, given)


def check(root: Path, told: list[Any]) -> None:
    """What was acknowledged is there, once, and as it was; what is awaited is what is not there."""
    with opened(root) as buffer:
        batches, awaited = drawn(buffer), buffer.waiting_for()
        for what, given in told:
            if what == "add":
                assert all(f"r{number}" in buffer for number in given), f"of {given} some are lost"
            elif what == "flush":
                assert set(given) <= set(buffer.rollouts().uids), "sealed rollouts are lost"
            elif what != "batch":
                assert not {f"r{number}" for number in given}.intersection(awaited[what].uids), what
            elif isinstance(given, list):
                assert batches[: len(given)] == given, "batches are lost or others"
        for uid, added in ROLLOUTS.items():
            if uid in buffer:
                found = buffer.rollout(uid)
                there = {**found.turns[0].columns, **found.columns}
                assert (found.key, found.turns[0].message) == (added.key, "4")
                assert found.turns[0].tokens.tolist() == added.turns[0].tokens.tolist()
                for name in (column.name for column in COLUMNS):
                    assert (name in there) != (uid in awaited[name].uids), f"{name} of {uid}"
                    assert name not in there or np.array_equal(there[name], value(name, int(uid[1:]))), f"{name} {uid}"
        used = Counter(uid for batch in batches for uid in batch)
        assert not used or max(used.values()) == 1, f"{used.most_common(3)} were repeated"
        assert len(buffer) == len(set(buffer.rollouts().uids)) + buffer.num_waiting


def check_end(root: Path) -> None:
    """After the script came to its end: every rollout and value is there once, and all were drawn."""
    with opened(root) as buffer:
        buffer.flush()
        assert not any(map(len, buffer.waiting_for().values())), "values are lost"
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
