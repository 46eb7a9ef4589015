"""The one pass over all rows that an inspection makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.dense import plain
from mouse_core.errors import DataError, SchemaError
from mouse_core.formats.columns.named import MISSING
from mouse_core.formats.columns.values import UInt64s, Values, combined, hash_rows, read_values
from mouse_core.inspect._checks.places import Places
from mouse_core.inspect._checks.sampling import Int64s
from mouse_core.inspect._checks.watching import Watch, missing_rows
from mouse_core.inspect._columns import ColumnCounter
from mouse_core.inspect._episodes import EpisodeCounter
from mouse_core.inspect.report import ActionsReport, ColumnReport, EpisodesReport
from mouse_core.store.evidence import contradicted, flags_in

_NUMBER_COLUMNS = ("metadata_episode_id", "metadata_episode_index", "episode_id", "episode_index", "episode")
_MOST_ACTIONS = 4096


class Scan:
    """Everything that is counted, fed with one block of rows after the other.

    Args:
        schema: The columns.
        arrived: Whether rows stand as "arrived"; see ``EpisodeCounter``.
    """

    def __init__(self, schema: pa.Schema, *, arrived: bool) -> None:
        names = schema.names
        if len(set(names)) < len(names):
            raise SchemaError(f"inspect: expected columns of different names, found {names}")
        self.schema = schema
        self.rows = 0
        # Where values are odd, by code and column.
        self.places: dict[tuple[str, str], Places] = {}
        self.columns = {
            name: ColumnCounter(name, data_type, histogram=_has_histogram(name, data_type))
            for name, data_type in zip(names, schema.types, strict=True)
        }
        self._observations = [name for name in names if name.startswith("observation") and name != MISSING]
        scalars = {name for name in names if column_type(schema.field(name).type).kind == "scalar"}
        self._number = _number_column(schema, scalars)
        self._step = "episode_step" if "episode_step" in scalars else None
        self._flags = flags_in(scalars)
        self._arrived = arrived
        self.episodes: EpisodeCounter | None = None
        if {"done", "reward"} <= scalars:
            found_by = " and ".join(filter(None, (self._step, self._number))) or "done"
            self.episodes = EpisodeCounter(arrived=arrived, found_by=found_by)
        self._action: ColumnCounter | None = None
        if "action" in names and column_type(schema.field("action").type).kind in ("scalar", "list"):
            self._action = ColumnCounter("action", schema.field("action").type, histogram=True)
        self.watch = Watch(arrived=arrived)
        self._actions: Counter[int] | None = Counter()  # None where they are not discrete, or too many

    def add(self, rows: pa.RecordBatch) -> None:
        """Count some rows, which must be valid; in memory that does not grow with them.

        Raises:
            DataError: Rows that cannot be read.
        """
        values = {name: read_values(rows.column(name)) for name in self.columns}
        hashes = {name: hash_rows(found) for name, found in values.items()}
        before = {name: _odd(counter) for name, counter in self.columns.items()}
        missing = missing_rows(values)
        for name, counter in self.columns.items():
            if missing is not None and name in self._observations and missing.any():  # zeros, which nothing showed
                counter.add(_chosen(values[name], rows.column(name), ~missing), hashes[name][~missing])
            else:
                counter.add(values[name], hashes[name])
        odd = [name for name, counter in self.columns.items() if _odd(counter) != before[name]]
        start, step = None, np.arange(self.rows, self.rows + rows.num_rows)
        episode = np.zeros_like(step)
        if self.episodes is not None:
            start, episode, step = self._add_episodes(self.episodes, rows, hashes)
            for name in odd:
                self._place(name, values[name], episode, step)
        if self._action is not None:
            self._add_actions(self._action, rows, values["action"], start)
            if start is not None:
                self._place_negative(values["action"], episode, step)
        counters = self.columns | ({} if self._action is None else {"action": self._action})
        bounds = {name: (one.places.low, one.places.high) for name, one in counters.items() if one.places is not None}
        self.watch.add(values, hashes, start, episode, step, bounds)
        self.rows += rows.num_rows

    def _place(self, name: str, values: Values, episode: Int64s, step: Int64s) -> None:
        """Note where nulls, NaN and infinite values are."""
        for code, (found, dimensions) in (("nulls", _null_rows(values)), ("not-finite", _odd_rows(values))):
            self.places.setdefault((code, name), Places()).add(episode[found], step[found], dimensions)

    def _place_negative(self, values: Values, episode: Int64s, step: Int64s) -> None:
        if self._actions is not None and values.shape == () and values.numbers is not None:
            found = np.flatnonzero(values.numbers < 0)
            self.places.setdefault(("negative-action", "action"), Places()).add(episode[found], step[found])

    def _add_episodes(
        self, counter: EpisodeCounter, rows: pa.RecordBatch, hashes: dict[str, UInt64s]
    ) -> tuple[npt.NDArray[np.bool_], Int64s, Int64s]:
        seen = [hashes[name] for name in self._observations]
        content = [hashes[name] for name in ("action", "reward", "done") if name in hashes] + seen
        return counter.add(
            done=_integers(rows, "done"),
            reward=_floats(rows, "reward"),
            step=_integers(rows, self._step) if self._step else None,
            number=hashes[self._number] if self._number else None,
            row_hash=combined(content, rows.num_rows),
            observation_hash=combined(seen, rows.num_rows) if seen else None,
            contradicted=contradicted(*(rows.column(name) for name in ("done", *self._flags))) if self._flags else None,
        )

    def _add_actions(
        self, counter: ColumnCounter, rows: pa.RecordBatch, found: Values, start: npt.NDArray[np.bool_] | None
    ) -> None:
        """Actions that were taken: not the placeholder of an episode's first row."""
        if start is not None and self._arrived:
            found = _chosen(found, rows.column("action"), ~start)
        counter.add(found, None)
        if self._actions is None or found.numbers is None or not found.numbers.size:
            return
        if found.kind.kind != "scalar" or found.numbers.dtype.kind not in "iub":
            self._actions = None
            return
        names, counts = np.unique(found.numbers, return_counts=True)
        self._actions.update(dict(zip(names.astype(int).tolist(), counts.tolist(), strict=True)))
        if len(self._actions) > _MOST_ACTIONS:
            self._actions = None

    def all_places(self) -> dict[tuple[str, str | None], Places]:
        """Where what was counted is, by code and column; of episodes once there are results."""
        found: dict[tuple[str, str | None], Places] = dict(self.places.items())
        counted = {} if self.episodes is None else self.episodes.places
        return found | {(code, None): one for code, one in counted.items()}

    def results(self) -> tuple[list[ColumnReport], EpisodesReport | None, ActionsReport | None]:
        """What was counted."""
        columns = [counter.result() for counter in self.columns.values()]
        actions = None
        if self._action is not None:
            taken = self._action.result()
            if self._actions is not None and not taken.places and taken.shape == []:
                counts = {str(name): count for name, count in sorted(self._actions.items())}
                actions = ActionsReport("discrete", counts, None)
            else:
                actions = ActionsReport("continuous", None, taken.places or {"histograms": [taken.histogram]})
        return columns, None if self.episodes is None else self.episodes.result(), actions


def _odd(counter: ColumnCounter) -> int:
    """How many values are null, NaN or infinite."""
    return counter.nulls + counter.nans + counter.infinite


def _null_rows(values: Values) -> tuple[Int64s, None]:
    """Rows that are null, or that nulls are in, as far as these are lists of values."""
    rows = np.zeros(0, np.int64) if values.present is None else np.flatnonzero(~values.present)
    if values.inner_nulls and values.kind.depth == 1:
        inside = pc.list_parent_indices(values.array).filter(values.array.flatten().is_null())
        rows = np.union1d(rows, inside.to_numpy())
    return rows, None


def _odd_rows(values: Values) -> tuple[Int64s, Int64s | None]:
    """Rows that NaN or infinite values are in, and the dimensions of vectors that they are in."""
    numbers = values.numbers
    if numbers is None or numbers.dtype.kind != "f" or values.inner_nulls:
        return np.zeros(0, np.int64), None
    odd = ~np.isfinite(numbers)
    if values.shape is not None:
        flat = odd.reshape(values.rows, -1)
        dimensions = np.flatnonzero(flat.any(axis=0)) if len(values.shape) == 1 and flat.shape[1] > 1 else None
        return np.flatnonzero(flat.any(axis=1)), dimensions
    rows = np.arange(values.rows) if values.present is None else np.flatnonzero(values.present)
    if values.lengths is not None:
        rows = np.repeat(np.arange(values.rows), values.lengths)
    return np.unique(rows[odd]), None


def _chosen(values: Values, column: pa.Array, kept: npt.NDArray[np.bool_]) -> Values:
    if values.shape is None or values.numbers is None:
        return read_values(column.filter(pa.array(kept)))
    return replace(values, rows=int(kept.sum()), numbers=values.numbers[kept])


def _has_histogram(name: str, data_type: pa.DataType) -> bool:
    kind = column_type(data_type)
    return kind.kind == "scalar" or (kind.kind == "list" and kind.depth == 1 and not name.startswith("metadata_"))


def _number_column(schema: pa.Schema, scalars: set[str]) -> str | None:
    """The column that tells episodes apart by number or by name, if there is one."""
    name = next((name for name in _NUMBER_COLUMNS if name in schema.names), None)
    return name if name is not None and (name in scalars or _is_text(schema.field(name).type)) else None


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _integers(rows: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    values: Any = _floats(rows, name)
    if not np.array_equal(values, np.trunc(values), equal_nan=True):
        raise DataError(f"{name}: expected whole numbers, found {values[values != np.trunc(values)][0]}")
    return np.asarray(np.nan_to_num(values, nan=-1, posinf=-1, neginf=-1).astype(np.int64))


def _floats(rows: pa.RecordBatch, name: str) -> npt.NDArray[np.float64]:
    column = plain(rows.column(name))
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.uint8())
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)
