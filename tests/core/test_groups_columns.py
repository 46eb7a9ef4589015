"""Columns that rollouts have beside those that all have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core.errors import ConfigError, DataError
from mouse_core.groups import RLExample, RolloutBuffer, RolloutColumn, RolloutRecord, Turn


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"name": "top-k"}, "expected a name of letters"),
        ({"name": "tokens"}, "expected another name"),
        ({"per": "group"}, r"expected per among \['token', 'turn', 'example'\], found 'group'"),
        ({"dtype": "str"}, "expected the dtype of numbers"),
        ({"dtype": "float33"}, "expected the dtype of numbers"),
        ({"shape": (0,)}, "expected a shape of sizes from 1"),
        ({"dtype": "uint8", "fill": 256}, "expected fill as a value of uint8, found 256"),
        ({"dtype": "uint8", "fill": "a"}, "expected fill as a value of uint8"),
        ({"dtype": "bool", "fill": 1.5}, "expected fill as a value of bool"),
    ],
)
def test_columns_that_cannot_be(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        RolloutColumn(**{"name": "x", **options})


@pytest.mark.parametrize(
    ("column", "given", "count", "wanted"),
    [
        (RolloutColumn("x"), [1.0, 2.0], 3, r"a value for each of 3 tokens, \[3\], found shape \[2\]"),
        (RolloutColumn("x", per="example", shape=(2,)), [1.0], None, r"as one value, \[2\], found shape \[1\]"),
        (RolloutColumn("x", dtype="int32"), [0.5], 1, r"as int32, found float64 \[0.5\]"),
        (RolloutColumn("x", dtype="uint8"), [-1, 3], 2, r"as uint8, found int64 \[-1, 3\]"),
        (RolloutColumn("x", dtype="float16"), [1e9], 1, "as float16"),
        (RolloutColumn("x", dtype="bool"), [2], 1, "as bool"),
    ],
)
def test_values_that_a_column_does_not_have(column: RolloutColumn, given: Any, count: int | None, wanted: str) -> None:
    with pytest.raises(DataError, match=wanted):
        column.values(given, count, "turn 1")


def test_values_are_a_columns_own() -> None:
    given = np.arange(3, dtype=np.int32)
    values = RolloutColumn("x", dtype="int32").values(given, 3, "")
    given[:] = 9
    assert values.tolist() == [0, 1, 2]
    assert not values.flags.writeable
    assert RolloutColumn("x", dtype="float16").values([1, 2], 2, "").dtype == np.float16


def test_records_hold_copies_and_compare_by_value() -> None:
    given = np.ones((2, 3), np.uint8)
    turns = [Turn("", "user", [1, 2], columns={"seen": given}) for _ in range(2)]
    assert turns[0] == turns[1]
    given[:] = 7
    assert turns[0].columns["seen"].max() == 1
    assert turns[0] != Turn("", "user", [1, 2], columns={"seen": given})
    assert RLExample([1], [True], [0.0], [0.0], columns={"x": 3}).columns["x"] == 3
    with pytest.raises(DataError, match="expected columns of numbers by name, found 'x'"):
        Turn("", "user", [1], columns={"x": ["a"]})
    with pytest.raises(DataError, match="expected columns as a dict"):
        Turn("", "user", [1], columns=[1])  # type: ignore[arg-type]


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    with RolloutBuffer(tmp_path) as buffer:
        for turn, columns in ((Turn("", "user", [1], columns={"x": [1]}), {}), (Turn("", "user", [1]), {"x": 1})):
            with pytest.raises(DataError, match=r"'u': expected columns that were declared for .*, \[\], found 'x'"):
                buffer.add_rollout(RolloutRecord("e", "1", 1, "u", [turn], 1.0, columns=columns))
        assert not len(buffer)
