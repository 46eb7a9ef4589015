"""Reads files of RLlib's ``JsonWriter``: each line is a batch of samples, some columns are packed (lz4, base64).

A packed column is a pickle. Such pickles are read only as arrays: functions that they name are never called.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.columns.episode_rows import Columns, done_codes
from mouse_core.episodes import step_begins
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.formats._files.npz import pickled_values
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns import (
    check_batch_rows,
    check_final,
    flatten,
    named,
    one_each,
    transition_rows,
    travels_with_action,
)

__all__ = ["read_rllib"]

_OBSERVATION, _NEXT, _ACTION, _REWARD = "obs", "new_obs", "actions", "rewards"
_ENDS = ("terminateds", "truncateds", "dones")
_PLACES = ("eps_id", "agent_index", "t")
_STEP = (_OBSERVATION, _NEXT, _ACTION, _REWARD, *_ENDS, *_PLACES)
# Columns that are not read: identifiers, texts of the environment, and copies of other columns.
_OTHERS = ("type", "unroll_id", "infos", "prev_actions", "prev_rewards", "seq_lens")
# The largest size of a line, and of an unpacked column, in bytes.
_MOST_BYTES = 1 << 30


def read_rllib(
    path: str | os.PathLike[str],
    *,
    final: str | None = None,
    batch_rows: int = BATCH_ROWS,
    policy: str | None = None,
) -> RowStream:
    """Read samples that RLlib wrote (``offline_data(output=...)``, ``JsonWriter``).

    ``done`` is 1 if ``terminateds`` is set, 2 if only ``truncateds`` is; ``dones`` of older releases count as terminal.
    A row continues an episode if ``eps_id`` and ``agent_index`` are the same, ``t`` is the next one, and its
    observation equals the previous row's ``new_obs``, if stored. An episode that is interrupted by other rows becomes
    several episodes. Other columns with numbers for every step become ``metadata_<name>``: columns whose names begin
    with ``action`` move with the action, other columns stay with their observation. Unpacked numbers are int64 or
    float64.

    Args:
        path: A file, or a folder whose files ``*.json`` are read in the order of their names.
        final: Treatment of the last transition of an episode without ``new_obs``: "drop" or "mark".
        batch_rows: Largest number of rows of a batch; each line is read completely.
        policy: The policy whose samples are read, if lines have samples of several policies.

    Raises:
        ConfigError: No file is found, or ``final`` or ``policy`` is required and missing.
        DataError: A line is damaged or was not written by RLlib, or a packed column contains anything but arrays of
            numbers. The message names the line.
        ImportError: lz4, which packed columns need, is not installed.
    """
    check_batch_rows(batch_rows)
    name = os.fspath(path)
    files = _files(Path(path))
    first = next(_batches(files, policy), None)
    if first is None:
        raise damaged(name, "expected lines with samples, found none")
    check_final(final, where=name, needed=_NEXT not in first)

    def rows() -> Iterator[Columns]:
        for columns in _rows(_batches(files, policy), final, name):
            for begin in range(0, len(columns["done"]), batch_rows):
                yield {key: values[begin : begin + batch_rows] for key, values in columns.items()}

    notes = (
        [] if "dones" not in first else ["dones do not tell terminal states from truncated episodes: all are terminal"]
    )
    if left := [key for key in first if _is_left_out(key, first)]:
        notes.append(f"Left out, as they are no numbers of a step: {', '.join(left)}.")
    return RowStream.of_columns(name, "rllib", next(_rows(iter([first]), final, name)), rows, notes=tuple(notes))


def _files(root: Path) -> list[Path]:
    found = sorted(file for file in root.glob("*.json") if not file.name.startswith(".")) if root.is_dir() else [root]
    if not found or not root.exists():
        raise ConfigError(f"{root}: expected a file of JSON lines, or a folder of such (*.json), found none")
    check_inside(found, root)
    return found


def _batches(files: list[Path], policy: str | None) -> Iterator[dict[str, Any]]:
    """Yield the columns of each line by RLlib's names; nested columns are dicts of arrays."""
    for file in files:
        with reading(file), file.open("rb") as stream:
            number = 0
            while line := stream.readline(_MOST_BYTES + 1):
                number += 1
                if not line.strip():
                    continue
                with reading(file, at=f"line {number}"):
                    yield _columns(line, policy, f"{file}, line {number}")


def _columns(line: bytes, policy: str | None, where: str) -> dict[str, Any]:
    if len(line) > _MOST_BYTES:
        raise DataError(f"{where}: expected lines of at most {_MOST_BYTES:,} bytes, found more")
    said = json.loads(line)
    kind = said.get("type") if isinstance(said, dict) else None
    if kind == "MultiAgentBatch":
        policies = said.get("policy_batches")
        if not isinstance(policies, dict) or not policies:
            raise DataError(f"{where}: expected samples of policies, found {policies!r:.80}")
        if policy is None and len(policies) > 1:
            raise ConfigError(f"{where}: policy: expected one of {sorted(policies)[:8]}, found None")
        said = policies.get(policy if policy is not None else next(iter(policies)))
        if not isinstance(said, dict):
            raise ConfigError(f"{where}: policy: expected one of {sorted(policies)[:8]}, found {policy!r}")
    elif kind != "SampleBatch":
        raise DataError(f"{where}: expected a SampleBatch or MultiAgentBatch of RLlib, found type {kind!r:.80}")
    elif policy is not None:
        raise ConfigError(f"{where}: policy: expected None for samples of a single policy, found {policy!r}")
    return _checked({key: _value(value, f"{where}, {key}") for key, value in said.items() if key not in _OTHERS}, where)


def _checked(columns: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the columns after checking that the required columns exist and have a value for every step."""
    missing = [key for key in (_OBSERVATION, _ACTION, _REWARD) if key not in columns]
    if missing or not {*_ENDS} & columns.keys():
        raise DataError(
            f"{where}: expected obs, actions, rewards and one of {list(_ENDS)}, found {sorted(columns)[:20]}"
        )
    count = len(columns[_REWARD])
    for key in (_OBSERVATION, _NEXT, _ACTION, *_ENDS, *_PLACES):
        for leaf, values in flatten(key, columns[key]).items() if key in columns else ():
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or values.shape[:1] != (count,):
                shape = list(values.shape) if isinstance(values, np.ndarray) else type(values).__name__
                raise DataError(f"{where}, {leaf}: expected numbers for each of {count} steps, found {shape}")
    return columns


def _value(value: Any, where: str) -> Any:
    """Return the array of a column, a dict for nested columns, or any other value unchanged."""
    if isinstance(value, str):
        return pickled_values(_unpacked(value, where), where=where)
    if isinstance(value, dict):
        return {key: _value(part, f"{where}, {key}") for key, part in value.items()}
    return np.asarray(value) if isinstance(value, list) else value


def _unpacked(text: str, where: str) -> bytes:
    try:
        import lz4.frame  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"{where}: columns that RLlib packed need lz4: pip install lz4") from error
    packed = base64.b64decode(text, validate=True)
    decompressor = lz4.frame.LZ4FrameDecompressor()
    found: bytes = decompressor.decompress(packed, max_length=_MOST_BYTES)
    if not decompressor.eof:
        raise DataError(
            f"{where}: expected a complete column of at most {_MOST_BYTES:,} bytes, found a longer or truncated one"
        )
    return found


def _is_left_out(key: str, columns: Mapping[str, Any]) -> bool:
    if key in _STEP:
        return False
    values = columns[key]
    numbers = isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
    return not numbers or values.shape[:1] != (len(columns[_REWARD]),)


def _rows(batches: Iterator[dict[str, Any]], final: str | None, where: str) -> Iterator[Columns]:
    """Yield the rows of all samples."""

    def parts() -> Iterator[tuple[Any, ...]]:
        before: dict[str, int] = {}
        ended = True
        for columns in batches:
            if not len(columns[_REWARD]):
                continue
            flags = {key: one_each(columns, key) != 0 for key in _ENDS if key in columns}
            terminated = flags.get("terminateds", flags.get("dones", np.zeros(len(columns[_REWARD]), bool)))
            done = done_codes(terminated, flags.get("truncateds"))
            begins = step_begins(done != 0, ended)
            for key, step in zip(_PLACES, (0, 0, 1), strict=True):
                if key in columns:
                    place = one_each(columns, key).astype(np.int64)
                    begins |= np.diff(place, prepend=before.get(key, place[0] - step)) != step
                    before[key] = int(place[-1])
            ended = bool(done[-1])
            arriving = {**named("action", columns[_ACTION]), "reward": one_each(columns, _REWARD), "done": done}
            beside: Columns = {}
            for key in columns:
                if key not in _STEP and not _is_left_out(key, columns):
                    (arriving if travels_with_action(key) else beside)[f"metadata_{key}"] = columns[key]
            following = named("observation", columns[_NEXT]) if _NEXT in columns else None
            yield named("observation", columns[_OBSERVATION]), arriving, begins, following, beside

    return transition_rows(parts(), final=final, where=where)
