"""Rollouts to test with."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.groups import RLExample, RolloutColumn, RolloutRecord, Turn

METADATA: dict[str, Any] = {
    "nothing": None,
    "yes": True,
    "one": 1,
    "large": 2**70,
    "odd": 2**53 + 1,
    "half": 0.5,
    "minus zero": -0.0,
    "nan": math.nan,
    "infinity": math.inf,
    "text": "prüfen \n{}",
    "empty": "",
    "bytes": b"\x00\xff",
    "list": [1, [2.5, None], (), {}],
    "tuple": (True, "x"),
    "dict": {"temperature": 0.7, "stop": ["a", "b"], "": {"deep": {"er": 1}}},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "no values": np.zeros((0, 4)),
    "point": np.array(3.5),
    "number": np.float32(0.1),
}


def rollout(
    number: int,
    *,
    environment: str = "math",
    example: str = "problem",
    version: str | int = "1",
    reward: float | None = None,
    created: float | None = None,
    tokens: int = 5,
    metadata: dict[str, Any] | None = None,
) -> RolloutRecord:
    rng = np.random.default_rng(number)
    answer = rng.integers(0, 1000, tokens)
    return RolloutRecord(
        environment,
        example,
        version,  # type: ignore[arg-type]
        f"r{number}",
        (
            Turn("2 + 2 = ?", "user", rng.integers(0, 1000, 3)),
            Turn("4", "assistant", answer, -rng.random(tokens), reward=0.5),
        ),
        float(number) if reward is None else reward,
        float(number) if created is None else created,
        f"replica-{number % 3}",
        metadata or {},
    )


def group(first: int, size: int = 4, **options: Any) -> list[RolloutRecord]:
    return [rollout(number, **options) for number in range(first, first + size)]


def lose_index(folder: Path) -> None:
    """Remove a buffer's index as a user does who goes on without it: with the note of how long it is."""
    for name in ("index.log", "index.log.size"):
        (folder / ".state" / name).unlink()


DECLARED = [RolloutColumn(f"per_{per}", per, "float32", (2,)) for per in ("token", "example")]


def with_columns(length: int) -> RLExample:
    columns = {"per_token": np.ones((length, 2)), "per_example": [length, 1.0]}
    mask, nothing = np.arange(length) % 2 > 0, np.zeros(length)
    return RLExample(nothing.astype(int), mask, nothing, nothing, columns=columns, declared=DECLARED)
