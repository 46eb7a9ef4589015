"""Read robot recordings as rows: values of topics are columns, and ticks of a clock are steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import (
    Columns,
    named_action,
    named_observation,
    one_each,
    ordered,
    schema_of,
    to_batches,
    travels_with_action,
)
from mouse_core.formats.columns.transitions import one_later, placeholder, step_numbers
from mouse_core.formats.layouts.layout import loaded
from mouse_core.formats.robot_logs._aligning import Aligned, Column, StepBlock
from mouse_core.formats.robot_logs.layout import TopicLayout
from mouse_core.formats.robot_logs.recordings import recordings_of, topics_in

__all__ = ["read_robot_logs"]

_SHOWN = 12


def read_robot_logs(
    path: str | os.PathLike[str],
    *,
    layout: TopicLayout | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read MCAP files and bags of ROS 2 as rows, with a step for every tick of a clock.

    Messages are encoded as CDR, in the layout of ROS 1, or as JSON. An episode of T ticks is T rows: the observation at
    a tick, and the action and reward of the tick before. The action and reward of the last tick are left out, as no
    observation follows. ``metadata_timestamp`` has seconds since the episode's first step. ``done`` of the last row is
    1 if ``terminated`` is set there, 2 if ``truncated`` is set there, else the layout's ``ending``. Images are pixels,
    depth images in the recorded unit.

    Args:
        path: An MCAP file, an SQLite file of rosbag2, a folder of rosbag2 with its ``metadata.yaml``, or a folder of
            these, ordered by the numbers in their names.
        layout: A ``TopicLayout``, its arguments as a mapping, or a YAML file with them.
        batch_rows: Most rows of a batch.

    Returns:
        The rows. ``metadata["files"]`` has the recordings.

    Raises:
        ConfigError: A missing or invalid layout, or a path without recordings.
        DataError: A damaged file, messages that do not fit the layout, or a message out of tolerance; the error names
            recording, topic and time.
    """
    check_batch_rows(batch_rows)
    root = Path(path)
    if layout is None:
        topics = topics_in(root)
        shown = ", ".join(f"{one.name} ({one.type}, {one.rate:.3g} Hz)" for one in topics[:_SHOWN])
        more = f" and {len(topics) - _SHOWN} more" if len(topics) > _SHOWN else ""
        raise ConfigError(
            f"{root}: format (--format): expected a layout that says which topics are columns, found none for "
            f"{shown}{more}"
        )
    options = loaded(TopicLayout, layout)
    recordings = recordings_of(root, options.files)
    names: dict[str, tuple[str, ...]] = {}
    first = Aligned(recordings[0], options, names)
    schema = schema_of(ordered(next(_rows(first, options, 1))))

    def batches() -> Iterator[pa.RecordBatch]:
        for number, recording in enumerate(recordings):
            opened = Aligned(recording, options, names) if number else first
            yield from to_batches(_rows(opened, options, batch_rows), schema, where=str(recording.path))

    return RowStream(
        os.fspath(path),
        "robot_logs",
        schema,
        batches,
        episodes=len(first.runs) if len(recordings) == 1 else None,
        rows=len(first.ticks) - first.left_out if len(recordings) == 1 else None,
        notes=tuple(_notes(first, options)),
        metadata={"files": [str(recording.path) for recording in recordings]},
        about=About("arrived", frames_per_second=[] if options.rate is None else [options.rate]),
    )


def _notes(first: Aligned, layout: TopicLayout) -> Iterator[str]:
    clock = f"a message of {layout.clock}" if layout.clock is not None else f"a tick of {layout.rate:g} a second"
    yield f"A step is {clock}; times are those of {'headers' if layout.stamps == 'header' else 'recording'}."
    ways = {(column.match, column.tolerance) for column in first.columns}
    for match, tolerance in sorted(ways):
        paths = [
            column.place.text for column in first.columns if (column.match, column.tolerance) == (match, tolerance)
        ]
        which = "the nearest message" if match == "nearest" else "the last message before"
        yield f"{', '.join(paths)}: {which}, at most {tolerance:g} s away."
    if first.left_out:
        yield (
            f"{first.recording.path}: {first.left_out} of {len(first.ticks)} ticks are left out, at which a topic is "
            "out of tolerance or no episode runs."
        )
    if layout.reward is None:
        yield "There are no rewards: reward is 0."
    if layout.terminated is None and layout.truncated is None:
        yield f"Nothing says how episodes ended: they are taken as {layout.ending}."


def _rows(recording: Aligned, layout: TopicLayout, batch_rows: int) -> Iterator[Columns]:
    before: Columns = {}
    step = 0

    def size(row: Mapping[Column, Any]) -> int:
        return rows_at_once(sum(getattr(value, "nbytes", 64) for value in row.values()), most=batch_rows)

    for piece in recording.pieces(size):
        count = len(piece.seconds)
        begins = np.arange(count) < int(piece.begins)
        seen, leaving, arrived = _columns(piece, layout)
        rows = one_later(leaving, before, begins)
        for name, values in arrived.items():
            rows[name] = np.concatenate([placeholder(values), values[1:]]) if piece.begins else values
        rows["done"] = np.zeros(count, np.int64)
        if piece.ends:
            rows["done"][-1] = _ending(piece, layout)
        rows |= seen
        rows["episode_step"] = step_numbers(begins, step)
        step = int(rows["episode_step"][-1]) + 1
        yield ordered(rows)


def _columns(piece: StepBlock, layout: TopicLayout) -> tuple[Columns, Columns, Columns]:
    """Return the columns of the ticks' observations, of the actions that leave them, and of those that led to them."""
    by_role: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for column, values in piece.values.items():
        by_role.setdefault(column.role, {})[column.name] = _stacked(column, values)
    seen = named_observation(_alone(by_role["observation"]))
    groups: dict[bool, Columns] = {True: {}, False: {}}
    moved = layout.arrived()
    if "action" in by_role:
        groups["action" in moved] |= named_action(_alone(by_role["action"]))
    reward = by_role.get("reward", {"": np.zeros(len(piece.seconds))})
    groups["reward" in moved]["reward"] = one_each({"reward": _alone(reward)}, "reward")
    metadata = {"timestamp": piece.seconds} | by_role.get("metadata", {})
    for name, values in metadata.items():
        (groups["action" in moved] if travels_with_action(name) else seen)[f"metadata_{name}"] = values
    return seen, groups[False], groups[True]


def _alone(values: Mapping[str, Any]) -> Any:
    return values[""] if [*values] == [""] else values


def _stacked(column: Column, values: list[Any]) -> npt.NDArray[Any]:
    if any(isinstance(value, str) for value in values):
        texts = np.empty(len(values), object)
        texts[:] = values
        return texts
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise DataError(f"{column.place.text}: expected values of one shape, found {sorted(shapes)[:4]}")
    return np.stack(values)


def _ending(piece: StepBlock, layout: TopicLayout) -> int:
    for code, role in ((1, "terminated"), (2, "truncated")):
        for column, values in piece.values.items():
            if column.role == role and np.any(np.asarray(values[-1])):
                return code
    return 1 if layout.ending == "terminal" else 2
