"""Steps of TED in whichever layout, in the order they happened, in bounded pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import SchemaError
from mouse_core.formats.base import damaged
from mouse_core.formats.columns.blocks import rows_at_once
from mouse_core.formats.ted._entries import Entries
from mouse_core.formats.ted._layouts import observation_rows
from mouse_core.formats.ted._tensordict import Key

Arrays = dict[Key, npt.NDArray[Any]]
_DONE = (("done",), ("terminated",), ("truncated",))
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class StepBlock:
    """Some steps, in the order they happened.

    Args:
        root, following: What stands at the root and in ``next``, both by the same keys.
        other: What stands at one of them alone, and the done flags of ``next``.
        begins: Whether a trajectory is known to begin with a step.
    """

    root: Arrays
    following: Arrays
    other: Arrays
    begins: npt.NDArray[np.bool_]


def pieces(entries: Entries, *, batch_rows: int) -> Iterator[StepBlock]:
    """All steps in the order they happened, environment by environment.

    Args:
        entries: Where they are.
        batch_rows: How many steps a piece has, at most.

    Raises:
        SchemaError: No steps of TED.
        DataError: Arrays of lengths that do not go together.
    """
    return _steps(entries, batch_rows) if has_next(entries) else _flat(entries, batch_rows)


def has_next(entries: Entries) -> bool:
    """Whether steps lie as they are, with what they lead to in ``next``; else every observation is there once."""
    return any(key[0] == "next" for key in entries.shapes)


def _steps(entries: Entries, batch_rows: int) -> Iterator[StepBlock]:
    keys = list(entries.shapes)
    root = {key for key in keys if key[0] != "next"}
    inside = {key[1:] for key in keys if key[0] == "next"}
    shape = _shape_of_steps(entries, keys, inside)
    lanes = math.prod(shape[1:])
    both = sorted((root & inside).difference(_DONE))
    alone = (inside - root) | inside.intersection(_DONE)
    other = [*sorted((root - inside).difference(_DONE)), *(("next", *key) for key in sorted(alone))]
    wanted = [*both, *(("next", *key) for key in both), *other]
    stretches = _in_order(entries, shape[0] if shape else 0, lanes, _piece(entries, wanted, batch_rows))
    for lane in range(lanes):
        for number, (begin, end) in enumerate(stretches):
            if len(shape) == 1:
                read = entries.read(wanted, begin, end)
            else:
                read = entries.read_lane(wanted, begin, end, len(shape), lane)
            found = dict(zip(wanted, read, strict=True))
            yield StepBlock(
                {key: found[key] for key in both},
                {key: found["next", *key] for key in both},
                {key[1:] if key[0] == "next" else key: found[key] for key in other},
                np.arange(end - begin) + number == 0,  # the first step of all
            )


def _shape_of_steps(entries: Entries, keys: Sequence[Key], inside: set[Key]) -> tuple[int, ...]:
    """``[n]``, or ``[n, environments]``: the shape of a done flag in ``next`` without the trailing 1."""
    flag = next((key for key in _DONE if key in inside), None)
    if flag is None:
        raise SchemaError(f"{entries.name}: expected next.done, found {_shown(keys)}")
    shape = entries.shapes["next", *flag]
    shape = shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
    for key in keys:
        found = entries.shapes[key]
        if found[: len(shape)] != shape:
            raise damaged(entries.name, f"{'.'.join(key)}: expected {list(shape)} steps, found {list(found)}")
    return shape


def _in_order(entries: Entries, n: int, lanes: int, size: int) -> list[tuple[int, int]]:
    """Stretches of at most ``size`` places, from the oldest step on: a full ring begins where its cursor stands.

    Of 10 places, all used, with the cursor at 4, in stretches of 3: 4..7, 7..10, 0..3, 3..4.
    """
    about = entries.about
    # TorchRL counts the places of all environments.
    length = _number(about.get("_len"), n * lanes, entries.name, "len")
    used = n if length is None else length // max(1, lanes)
    cursor = _number(about.get("_cursor"), n, entries.name, "cursor") or 0
    runs = [(cursor, used), (0, cursor)] if used == n and 0 < cursor < n else [(0, used)]
    return [(begin, min(begin + size, stop)) for first, stop in runs for begin in range(first, stop, size)]


def _flat(entries: Entries, batch_rows: int) -> Iterator[StepBlock]:
    steps = _count_steps(entries, "'next', or 'done' of the flat layout")
    n, lanes, used, full = _ring(entries, steps)
    if not used:
        return
    ends = _flat_ends(entries, n, lanes)
    ends[:, (n if full else used) - 1] = True
    both, other = _by_length(entries, steps, steps + int(ends.sum()))
    before = 0  # observations of the environments before
    for lane, lane_ends in enumerate(ends):
        rows = before + observation_rows(lane_ends)
        yield from _lane(entries, both, other, lane_ends[:used], rows, lane * n, batch_rows)
        before += n + int(lane_ends.sum())


def trajectory(entries: Entries, *, batch_rows: int) -> Iterator[StepBlock]:
    """The steps of one trajectory of the nested layout, of which every observation is there once."""
    steps = _count_steps(entries, "'done' in every trajectory")
    both, other = _by_length(entries, steps, steps + 1)
    if steps and not both:
        raise damaged(entries.name, f"expected {steps + 1} observations in a trajectory, found none")
    ends = np.arange(steps) == steps - 1
    yield from _lane(entries, both, other, ends, np.arange(steps), 0, batch_rows)


def _count_steps(entries: Entries, expected: str) -> int:
    if ("done",) not in entries.shapes:
        raise SchemaError(f"{entries.name}: expected {expected}, found {_shown(entries.shapes)}")
    return entries.shapes[("done",)][0]


def _lane(
    entries: Entries,
    both: Sequence[Key],
    other: Sequence[Key],
    ends: npt.NDArray[np.bool_],
    rows: npt.NDArray[np.int64],
    first_step: int,
    batch_rows: int,
) -> Iterator[StepBlock]:
    """The steps of one environment.

    Args:
        entries: Where they are.
        both, other: The entries that have one value an observation, and those that have one a step.
        ends: Whether a trajectory ends with a step.
        rows: Which observation each step leaves; it leads to the one behind.
        first_step: Where the environment's steps begin.
        batch_rows: How many steps a piece has, at most.
    """
    begins = np.concatenate([[True], ends[:-1]])
    size = _piece(entries, [*both, *other], batch_rows)
    for begin in range(0, len(ends), size):
        end = min(begin + size, len(ends))
        here = rows[begin:end] - rows[begin]
        seen = entries.read(both, int(rows[begin]), int(rows[end - 1]) + 2)
        rest = entries.read(other, first_step + begin, first_step + end)
        yield StepBlock(
            {key: values[here] for key, values in zip(both, seen, strict=True)},
            {key: values[here + 1] for key, values in zip(both, seen, strict=True)},
            dict(zip(other, rest, strict=True)),
            begins[begin:end],
        )


def _ring(entries: Entries, steps: int) -> tuple[int, int, int, bool]:
    """Places of an environment, environments, how many places of each are used, and whether the ring is full."""
    about = entries.about
    shape = about.get("_storage_shape") or [steps]
    shape = [shape] if isinstance(shape, int) else list(shape)
    if not all(isinstance(size, int) and size > 0 for size in shape) or math.prod(shape) != steps:
        raise damaged(entries.name, f"_storage_shape: expected the shape of {steps} steps, found {shape!r}")
    full = bool(about.get("is_full", True))
    n, lanes = shape[0], steps // shape[0]
    shift = _number(about.get("shift"), n, entries.name, "shift")
    used = n if full or shift is None else shift
    length = _number(about.get("_len"), steps, entries.name, "len")
    return n, lanes, used if length is None else min(used, length // lanes), full


def _flat_ends(entries: Entries, n: int, lanes: int) -> npt.NDArray[np.bool_]:
    """Whether a trajectory ends with a step, bool ``[lanes, n]``."""
    done = entries.read([("done",)], 0, n * lanes)[0].reshape(n * lanes, -1)
    if done.shape[1] != 1:
        raise damaged(entries.name, f"done: expected one flag a step, found {list(done.shape)}")
    return done[:, 0].astype(bool).reshape(lanes, n).copy()


def _by_length(entries: Entries, steps: int, observations: int) -> tuple[list[Key], list[Key]]:
    """The entries that have one value an observation, and those that have one a step."""
    for key, (found, *_) in entries.shapes.items():
        if found not in (steps, observations):
            raise damaged(
                entries.name,
                f"{'.'.join(key)}: expected {steps} entries, one a step, or {observations}, one an observation, "
                f"found {found}",
            )
    both = [key for key, shape in entries.shapes.items() if shape[0] == observations]
    return both, [key for key in entries.shapes if key not in both]


def _piece(entries: Entries, keys: Sequence[Key], batch_rows: int) -> int:
    """How many steps are read at a time: no more than asked for, and no more than some megabytes."""
    each = sum(8 * math.prod(entries.shapes[key][1:]) for key in keys)
    return rows_at_once(each, most=batch_rows, budget=_PIECE_BYTES)


def _number(value: Any, most: int, name: str, what: str) -> int | None:
    if value is not None and not (type(value) is int and 0 <= value <= most):
        raise damaged(name, f"{what}: expected a number in 0..{most}, found {json.dumps(value, default=str)[:50]}")
    return value


def _shown(keys: Iterable[Key]) -> list[str]:
    return [".".join(key) for key in keys]
