"""Columns that were declared, of examples made of rollouts, and of arrays made of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.groups.types.columns import Columns, RolloutColumn, common_columns
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import RolloutRecord, Turn
from mouse_core.spec import check_count

Arrays = dict[str, npt.NDArray[Any]]
"""Arrays by name."""


def columns_of_examples(
    rollouts: Sequence[RolloutRecord], turns: Sequence[Turn], sizes: npt.NDArray[np.int64], declared: Columns
) -> list[Arrays]:
    """The columns of an example of each rollout; what a rollout or turn lacks is the column's fill.

    Args:
        rollouts: Which.
        turns: Of all rollouts, one after the other.
        sizes: How many tokens each of the turns has.
        declared: The columns.
    """
    found: list[Arrays] = [{} for _ in rollouts]
    counts = [len(rollout.turns) for rollout in rollouts]
    turn_ends = np.concatenate([[0], np.cumsum(counts)])
    token_ends = np.concatenate([[0], np.cumsum(sizes)])[turn_ends].tolist()
    for name, column in declared.items():
        if column.per == "example":
            for values, rollout in zip(found, rollouts, strict=True):
                values[name] = rollout.columns[name] if name in rollout.columns else column.filled()
            continue
        ends = token_ends if column.per == "token" else turn_ends.tolist()
        whole = _of_turns(column, turns, sizes)
        for values, (begin, end) in zip(found, pairwise(ends), strict=True):
            values[name] = whole[begin:end]
    return found


def _of_turns(column: RolloutColumn, turns: Sequence[Turn], sizes: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The values of all turns, or of their tokens, in one array."""
    if column.per == "turn":
        values = [turn.columns[column.name] if column.name in turn.columns else column.filled() for turn in turns]
        whole = np.stack(values)
    else:
        nothing = column.filled(int(sizes.max()))
        whole = np.concatenate(
            [
                turn.columns[column.name] if column.name in turn.columns else nothing[: len(turn.tokens)]
                for turn in turns
            ]
        )
    whole.flags.writeable = False
    return whole


def turn_ids_of(rollouts: Sequence[RolloutRecord], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Which turn of its rollout each token is of, int32, one rollout after the other."""
    numbers = np.concatenate([np.arange(len(rollout.turns), dtype=np.int32) for rollout in rollouts])
    ids = np.repeat(numbers, sizes)
    ids.flags.writeable = False
    return ids


def place_columns(
    examples: Sequence[RLExample],
    place: Callable[[Sequence[npt.NDArray[Any]], float], npt.NDArray[Any]],
    rows: int,
    row_of: npt.NDArray[np.int64],
    segment_of: npt.NDArray[np.int64] | None = None,
    *,
    max_turns: int | None = None,
    max_examples: int | None = None,
) -> Arrays:
    """The columns of examples that stand in rows, and ``turn_ids`` where there are some with a value per turn.

    Args:
        examples: ``n`` of them.
        place: Puts the values of each example's tokens where these stand, and a fill elsewhere.
        rows: How many rows there are.
        row_of: In which row an example stands, ``[n]``.
        segment_of: Which of the examples of its row it is, from 0, ``[n]``; None: each row has one.
        max_turns, max_examples: Places of a row for the values of turns and examples; None: as many as are needed.

    Raises:
        ConfigError: There are to be none.
        DataError: Examples of differing columns; more places are needed.
    """
    declared = common_columns(examples)
    arrays: Arrays = {}
    if not declared:
        return arrays
    segments = np.zeros_like(row_of) if segment_of is None else segment_of
    turns = np.array([_num_turns(example, declared) for example in examples])
    order = np.lexsort((segments, row_of))
    first = np.searchsorted(row_of[order], np.arange(rows))  # of each row the first example
    before = np.concatenate([[0], np.cumsum(turns[order])])
    begins = np.empty(len(examples), np.int64)
    begins[order] = before[:-1] - before[first[row_of[order]]]
    if declared.of("turn"):
        arrays["turn_ids"] = place(_shifted_ids(examples, begins), -1)
    for name, column in declared.items():
        own = [example.columns[name] for example in examples]
        if column.per == "token":
            arrays[name] = place(own, column.padding)
        elif column.per == "turn":
            slots = np.arange(int(turns.sum())) + np.repeat(begins - (np.cumsum(turns) - turns), turns)
            arrays[name] = _in_slots(
                column, np.concatenate(own), np.repeat(row_of, turns), slots, rows, ("max_turns", max_turns)
            )
        elif segment_of is None:
            arrays[name] = np.stack(own)
        else:
            arrays[name] = _in_slots(column, np.stack(own), row_of, segments, rows, ("max_examples", max_examples))
    return arrays


def concatenate_columns(examples: Sequence[RLExample], total: int, max_turns: int | None = None) -> Arrays:
    """The columns of examples that stand one behind the other, filled up to numbers of tokens and turns; ``turn_ids``.

    Raises:
        ConfigError: There are to be no turns.
        DataError: Examples of differing columns; more turns.
    """
    declared = common_columns(examples)
    arrays: Arrays = {}
    if declared.of("turn"):
        turns = np.array([_num_turns(example, declared) for example in examples])
        arrays["turn_ids"] = np.concatenate(_shifted_ids(examples, np.cumsum(turns) - turns))
    for name, column in declared.items():
        own = [example.columns[name] for example in examples]
        arrays[name] = np.stack(own) if column.per == "example" else np.concatenate(own)
    for name, fill in [("turn_ids", -1), *((column.name, column.padding) for column in declared.of("token"))]:
        if name in arrays and len(arrays[name]) < total:
            more = np.full((total - len(arrays[name]), *arrays[name].shape[1:]), fill, arrays[name].dtype)
            arrays[name] = np.concatenate([arrays[name], more])
    for column in declared.of("turn"):
        values = arrays[column.name]
        placed = column.filled(_places(len(values), "max_turns", max_turns))
        placed[: len(values)] = values
        arrays[column.name] = placed
    return arrays


def _places(needed: int, name: str, most: int | None) -> int:
    """How many places there are: those that are needed, or as many as were said."""
    if most is None:
        return needed
    if check_count(name, most) < needed:
        raise DataError(f"{name}: expected at least {needed} for these examples, found {most}")
    return most


def _num_turns(example: RLExample, declared: Columns) -> int:
    per_turn = declared.of("turn")
    return len(example.columns[per_turn[0].name]) if per_turn else 0


def _shifted_ids(examples: Sequence[RLExample], begins: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int32]]:
    """The turns' numbers where those of an example begin at ``begins``."""
    pairs = zip(examples, begins.tolist(), strict=True)
    return [(example.turn_ids + np.int32(begin)) for example, begin in pairs if example.turn_ids is not None]


def _in_slots(
    column: RolloutColumn,
    values: npt.NDArray[Any],
    row_of: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    rows: int,
    most: tuple[str, int | None],
) -> npt.NDArray[Any]:
    placed = column.filled(rows, _places(int(slots.max(initial=0)) + 1, *most))
    placed[row_of, slots] = values
    return placed
