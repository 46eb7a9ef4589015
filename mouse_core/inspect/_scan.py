"""Collects the counts of an inspection in a single pass over all rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.dense import plain
from mouse_core.episodes import step_begins, sums_by_episode
from mouse_core.errors import DataError, SchemaError
from mouse_core.formats.columns import MISSING, Values, read_values, step_numbers
from mouse_core.inspect.checks import Sketches, about_dimensions, about_parts, about_splits
from mouse_core.inspect.dynamics import Camera, Clock, about_dynamics, is_clock
from mouse_core.inspect.report import ActionsReport, ColumnReport, Distribution, EpisodesReport, Finding, Places, capped
from mouse_core.inspect.sampling import Bools, Floats, Int64s, RowSample, UInt64s
from mouse_core.maps.hashing import row_hash as hashes_of
from mouse_core.statistics.counting import Moments
from mouse_core.store.evidence import contradicted, flags_in

# Largest number of dimensions that are counted separately; wider rows are counted as a whole.
_MOST_PLACES = 1024
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


class ColumnCounter:
    """Counts values of a column, and computes statistics.

    Args:
        name: The column's name.
        data_type: The Arrow type of the column.
    """

    def __init__(self, name: str, data_type: pa.DataType) -> None:
        self.name = name
        self.data_type = data_type
        self.rows = self.nulls = self.nans = self.infinite = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.shapes: set[tuple[int, ...]] = set()
        self.least_length: int | None = None
        self.most_length: int | None = None
        self.constant = self.whole = True
        self.places: Moments | None = None
        self._total = Moments(1)
        self._first_hash: int | None = None
        self._kind = "other"
        self._value_type = ""

    def add(self, values: Values, hashes: UInt64s | None) -> None:
        """Count rows."""
        self._kind, self._value_type = values.kind.kind, values.kind.value_type
        self.rows += values.rows
        self.nulls += values.nulls
        if not values.rows:
            return
        if hashes is not None and self.constant:
            if self._first_hash is None:
                self._first_hash = int(hashes[0])
            self.constant = bool((hashes == np.uint64(self._first_hash)).all())
        if values.numbers is not None:
            self._add_numbers(values)

    def _add_numbers(self, values: Values) -> None:
        numbers = values.numbers
        assert numbers is not None
        if values.shape is not None:
            self.shapes.add(values.shape)
            size = int(np.prod(values.shape, dtype=np.int64))
            self._add_length(size, size)
        elif values.lengths is not None:
            there = values.lengths if values.present is None else values.lengths[values.present]
            if len(there):
                self._add_length(int(there.min()), int(there.max()))
        self._add_finite(self._finite(numbers))
        if numbers.size and values.shape is not None and len(values.shape) == 1 and values.shape[0] <= _MOST_PLACES:
            self._add_places(numbers)

    def _finite(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the finite numbers; count the NaN and the infinite numbers."""
        if numbers.dtype.kind != "f":
            return numbers
        finite = np.isfinite(numbers)
        if finite.all():
            return numbers
        nans = int(np.isnan(numbers).sum())
        self.nans += nans
        self.infinite += int((~finite).sum()) - nans
        return np.asarray(numbers[finite])

    def _add_finite(self, numbers: npt.NDArray[Any]) -> None:
        if not numbers.size:
            return
        low, high = numbers.min().item(), numbers.max().item()
        if self.whole and numbers.dtype.kind == "f":
            self.whole = bool((np.trunc(numbers) == numbers).all())
        self.low, self.high = _lower(self.low, low), _higher(self.high, high)
        flat = numbers.reshape(-1)
        if flat.dtype == np.uint8:
            # Pixels have only 256 values, and counting them is faster than adding them up.
            self._total.add_counts(np.bincount(flat, minlength=256)[None])
        else:
            self._total.add(flat[:, None])

    def _add_places(self, numbers: npt.NDArray[Any]) -> None:
        width = numbers.shape[1]
        if self.places is None:
            self.places = Moments(width)
        if len(self.places.count) == width:
            self.places.add(np.ascontiguousarray(numbers))

    def _add_length(self, least: int, most: int) -> None:
        self.least_length, self.most_length = _lower(self.least_length, least), _higher(self.most_length, most)

    def result(self) -> ColumnReport:
        """Return the counts so far."""
        if len(self.shapes) == 1 and self.least_length == self.most_length:
            shape: list[int] | str | None = list(next(iter(self.shapes)))
        elif self.least_length is not None and self._kind == "list":
            shape = f"{self.least_length} to {self.most_length} values"
        else:
            shape = [] if self._kind == "scalar" else None
        named = self._kind if self._kind in ("image", "null") else str(self.data_type)
        total = _by_place(self._total)
        return ColumnReport(
            name=self.name,
            dtype=_NAMES.get(self._value_type, self._value_type) or named,
            shape=shape,
            rows=self.rows,
            nulls=self.nulls,
            nans=self.nans,
            infinite=self.infinite,
            low=self.low,
            high=self.high,
            mean=total["mean"][0],
            deviation=total["deviation"][0],
            constant=self.constant and self.rows > 1 and self._first_hash is not None,
            whole=self.whole and self.low is not None,
            places=None if self.places is None else _by_place(self.places),
        )


def _lower(one: Any, other: Any) -> Any:
    return other if one is None else min(one, other)


def _higher(one: Any, other: Any) -> Any:
    return other if one is None else max(one, other)


def _by_place(moments: Moments) -> dict[str, list[Any]]:
    """Return the lowest and the highest value, the mean and the deviation of each dimension; None if there are no
    numbers.
    """
    found = {"low": moments.low, "high": moments.high, "mean": moments.mean, "deviation": moments.deviation}
    known = moments.count > 0
    return {name: np.where(known, values, np.array(None)).tolist() for name, values in found.items()}


class EpisodeCounter:
    """Counts episodes; rows must be added in order.

    The attribute ``places`` has the episodes and steps of each anomaly.

    Args:
        arrived: Whether an episode of T transitions has T + 1 rows, and its first row belongs to no transition.
        found_by: Names of the columns that mark where episodes begin: one or more of "episode_step", the column of
            episode numbers, and "done".
    """

    def __init__(self, *, arrived: bool, found_by: str) -> None:
        self.arrived = arrived
        self.found_by = found_by
        self.transitions = self.repeated = self.repeated_once = 0
        self._repeated_last = False
        self.done_codes: Counter[int] = Counter()
        self.anomalies: Counter[str] = Counter()
        # Places of each kind of anomaly, and of a few other counts.
        self.places: defaultdict[str, Places] = defaultdict(Places)
        # Lengths, returns, last codes and hashes of finished episodes, for each batch.
        self._finished: list[tuple[npt.NDArray[Any], ...]] = [
            (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int8), np.zeros(0, np.uint64))
        ]
        # The unfinished episode: its number, rows so far, return, hash, and the last row.
        self._number = -1
        self._rows = 0
        self._return = 0.0
        self._hash = np.uint64(0)
        self._last: dict[str, Any] | None = None
        self._final_hash: np.uint64 | None = None

    def add(
        self,
        *,
        done: Int64s,
        reward: Floats,
        step: Int64s | None,
        number: UInt64s | None,
        row_hash: UInt64s,
        observation_hash: UInt64s | None,
        contradicted: Bools | None = None,
    ) -> tuple[Bools, Int64s, Int64s]:
        """Count rows; each argument is an array ``[n]``.

        Args:
            done: Done codes.
            reward: Rewards.
            step: Step within the episode; None if the data have no such column.
            number: Hash of the number or name of the episode; None if the data have no such column.
            row_hash: Hash of each row's action, reward, done and observation.
            observation_hash: Hash of the observation alone.
            contradicted: Mask of rows whose flags contradict their done codes; None if the data have no such flags.

        Returns:
            Three arrays: a mask of the rows that begin an episode, the index of each row's episode, and the index of
            each row in its episode.
        """
        known = {"done": done, "step": step, "number": number, "observation": observation_hash}
        shifted = {name: _shifted(values, self._last, name) for name, values in known.items()}
        start = self._starts(known)
        codes, counts = np.unique(done, return_counts=True)
        self.done_codes.update(dict(zip(codes.tolist(), counts.tolist(), strict=True)))
        episode = self._number + np.cumsum(start)
        step_number = step_numbers(start, self._rows)
        self._count_anomalies(start, shifted, known, reward, (episode, step_number))
        if contradicted is not None:
            self._count("done-against-flags", contradicted, (episode, step_number))
        self._finish(start, step_number, reward, row_hash, known, shifted)
        self._number = int(episode[-1])

        last = {**known, "before": shifted["observation"]}  # the values of the last counted row
        self._last = {name: None if values is None else values[-1] for name, values in last.items()}
        self._last["start"] = bool(start[-1])
        return start, episode, step_number

    def _starts(self, known: dict[str, Any]) -> Bools:
        """Return a mask of rows that begin an episode.

        ``done`` is used only if the data have neither step indices nor episode numbers.
        """
        last, numbered = self._last or {}, known["step"] is not None or known["number"] is not None
        start = step_begins(
            None if numbered else known["done"] != 0,
            None if numbered or not last else last["done"] != 0,
            ids=known["number"],
            id_before=last.get("number"),
            times=known["step"],
            time_before=last.get("step", -1),
        )
        start[0] |= self._last is None
        return start

    def _count_anomalies(
        self,
        start: Bools,
        shifted: dict[str, Any],
        known: dict[str, Any],
        reward: Floats,
        where: tuple[Int64s, Int64s],
    ) -> None:
        done, step = known["done"], known["step"]
        follows = ~start  # rows that follow a row of the same episode
        transition = follows if self.arrived else np.ones(len(done), bool)
        self.transitions += int(transition.sum())
        found = {
            "reward-at-start": start & (np.nan_to_num(reward) != 0),
            "done-at-start": start & (done != 0),
            "continues-after-terminal": follows & (shifted["done"] == 1),
            "continues-after-truncation": follows & (shifted["done"] == 2),
            "unknown-done": (done < 0) | (done > 2),
        }
        if step is not None:
            found["step-not-from-0"] = start & (step != 0)
            found["step-jumps"] = follows & (step != shifted["step"] + 1)
        if known["observation"] is not None:
            same = known["observation"] == shifted["observation"]
            self._count_repeats(same & follows, where)
            found["final-is-next-first"] = same & start
            found["final-is-next-first"][: self._last is None] = False  # no row precedes the very first
        for code, rows in found.items():
            self._count(code, rows, where)

    def _count(self, code: str, rows: Bools, where: tuple[Int64s, Int64s]) -> None:
        """Count the rows that have an anomaly, and record the episodes and steps of these rows."""
        count = int(rows.sum())
        if count:
            self.anomalies[code] += count
            self.places[code].add(where[0][rows], where[1][rows])

    def _count_repeats(self, repeats: Bools, where: tuple[Int64s, Int64s]) -> None:
        """Count the observations that equal the previous observation, and count how many of these are followed by a
        different observation.
        """
        self.repeated += int(repeats.sum())
        self.places["repeated-observation"].add(where[0][repeats], where[1][repeats])
        before = np.append(self._repeated_last, repeats[:-1])
        self.repeated_once += int((before & ~repeats).sum())
        self._repeated_last = bool(repeats[-1])

    def _finish(
        self,
        start: Bools,
        step_number: Int64s,
        reward: Floats,
        row_hash: UInt64s,
        known: dict[str, Any],
        shifted: dict[str, Any],
    ) -> None:
        """Record the episodes that end in these rows, and keep the last, unfinished episode for the next rows."""
        begins = np.flatnonzero(start)
        counted = np.where(start, 0.0, reward) if self.arrived else reward
        spread = _combined(row_hash, step_number.astype(np.uint64))
        returns, sizes = sums_by_episode(start, counted, self._return, self._rows)
        hashes, _ = sums_by_episode(start, spread, self._hash, self._rows)
        last_codes = shifted["done"][begins][self._last is None :]  # no row precedes the very first
        self._keep(sizes[:-1], returns[:-1], last_codes, hashes[:-1])
        if known["observation"] is not None and len(begins):
            self._count_finals(begins, start, shifted["observation"], sizes)
        self._rows, self._return, self._hash = int(sizes[-1]), float(returns[-1]), hashes[-1]

    def _count_finals(self, begins: Int64s, start: Bools, previous: UInt64s, sizes: Int64s) -> None:
        """Count the ended episodes whose final observation equals the previous observation, or the final observation of
        the first episode. ``previous`` has the hash of the row before each row.
        """
        ended = begins if self._last is not None else begins[1:]
        final = previous[ended]
        if not len(final):
            return
        # The row before the final one, if it belongs to the same episode: of rows -1 0 1, the final one of an episode
        # that ends at row 2 is row 1, and ``previous`` has the row before it.
        last = self._last or {"before": 0, "start": True}
        before = np.append(np.uint64(last["before"]), previous)[ended]
        inside = np.append(not last["start"], ~start)[ended]
        where = max(self._number, 0) + np.arange(len(ended)), sizes[: len(ended)] - 1
        self._count("final-repeats", inside & (before == final), where)
        self.anomalies["finals-compared"] += int(inside.sum())
        if self._final_hash is None:
            self._final_hash = final[0]
        self._count("same-final", final == self._final_hash, where)

    def _keep(self, sizes: Int64s, returns: Floats, codes: Int64s, hashes: UInt64s) -> None:
        lengths = sizes - 1 if self.arrived else sizes
        numbers = max(self._number, 0) + np.arange(len(lengths))  # the first episode was unfinished until now
        self._count("without-transitions", lengths < 1, (numbers, np.zeros_like(numbers)))
        self._finished.append((lengths, returns, np.clip(codes, -1, 3).astype(np.int8), hashes))

    def all_of_them(self) -> tuple[UInt64s, Int64s]:
        """Return two arrays: the hash of every episode, and the number of its rows.

        The last episode is included only after a call of ``result``.
        """
        lengths, *_, hashes = map(np.concatenate, zip(*self._finished, strict=True))
        return hashes, lengths + int(self.arrived)

    def result(self) -> EpisodesReport:
        """Return the counts so far. The last rows count as an episode, even if this episode has not ended."""
        if self._rows and self._last is not None:
            last = np.array([self._last["done"]], np.int64)
            self.anomalies["ends-open"] = int(last[0] == 0)
            self._keep(np.array([self._rows]), np.array([self._return]), last, np.array([self._hash], np.uint64))
            self._rows = 0
        lengths, returns, codes, hashes = map(np.concatenate, zip(*self._finished, strict=True))
        again = self._place_episodes(lengths, codes, hashes)
        return EpisodesReport(
            count=len(lengths),
            found_by=self.found_by,
            transitions=self.transitions,
            lengths=_distribution(lengths),
            returns=_distribution(returns),
            terminated=int((codes == 1).sum()),
            truncated=int((codes == 2).sum()),
            open=int((codes == 0).sum()),
            duplicates=len(hashes) - len(np.unique(hashes)),
            done_codes={str(code): count for code, count in sorted(self.done_codes.items())},
            repeated_observations=self.repeated,
            anomalies={
                **{name: count for name, count in self.anomalies.items() if count},
                "longest-duplicate": int(lengths[again].max(initial=0)),
                "come-again": len(np.unique(hashes[again])),
                "at-longest": int((lengths == lengths.max(initial=0)).sum()),
                "repeated-once": self.repeated_once + int(self._repeated_last),
            },
        )

    def _place_episodes(self, lengths: Any, codes: Any, hashes: Any) -> Int64s:
        """Record anomalies of complete episodes; return the episodes that equal an earlier episode."""
        open_ones = np.flatnonzero(codes == 0)
        last = lengths - int(not self.arrived)
        if self.anomalies["ends-open"]:
            self.places["ends-open"].add(open_ones[-1:], last[open_ones[-1:]])
            open_ones = open_ones[:-1]
        self.places["episodes-without-end"].add(open_ones, last[open_ones])
        again = np.setdiff1d(np.arange(len(hashes)), np.unique(hashes, return_index=True)[1])
        self.places["duplicate-episodes"].add(again, np.zeros_like(again))
        longest = np.flatnonzero(lengths == lengths.max(initial=0))
        self.places["at-longest"].add(longest, last[longest])
        return again


def _shifted(values: npt.NDArray[Any] | None, before: dict[str, Any] | None, name: str) -> Any:
    """Return, for each row, the value of the row before it; the very first row gets its own value."""
    if values is None:
        return None
    first = values[:1] if before is None else np.array([before[name]], values.dtype)
    return np.concatenate([first, values[:-1]])


# Number of bins of a histogram, and the limit of values in histograms: the range of larger values could be infinite.
_BINS, _MOST = 24, 1e300


def _distribution(numbers: npt.NDArray[Any]) -> Distribution:
    finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind == "f" else numbers
    if not len(finite):
        return Distribution(None, None, None, None, (), (), ())
    low, high = finite.min(), finite.max()
    has_range = high / 2 - low / 2 > 1e-12 * max(abs(low), abs(high))  # halved, since a difference may overflow
    counts, edges = np.histogram(np.clip(finite, -_MOST, _MOST), _BINS if has_range else 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(finite.mean()), float(finite.std())
    return Distribution(
        low=low.item(),
        high=high.item(),
        mean=mean,
        deviation=deviation,
        quantiles=[float(value) for value in np.quantile(finite, [0.05, 0.25, 0.5, 0.75, 0.95])],
        edges=edges.tolist(),
        counts=counts.tolist(),
    )


_NUMBER_COLUMNS = ("metadata_episode_id", "metadata_episode_index", "episode_id", "episode_index", "episode")
_MOST_ACTIONS = 4096
_MOST_OF_A_CODE = 5


class Scan:
    """All counters of an inspection, and the checks that need only single rows. Rows are added block by block.

    Args:
        schema: The columns.
        arrived: Whether rows have the alignment "arrived"; see ``EpisodeCounter``.
    """

    def __init__(self, schema: pa.Schema, *, arrived: bool) -> None:
        names = schema.names
        if len(set(names)) < len(names):
            raise SchemaError(f"inspect: expected columns of different names, found {names}")
        self.schema, self.arrived = schema, arrived
        self.rows = 0
        # The places of anomalous values, by code and column.
        self.places: dict[tuple[str, str], Places] = {}
        self.columns = {
            name: ColumnCounter(name, data_type) for name, data_type in zip(names, schema.types, strict=True)
        }
        self._observations = [name for name in names if name.startswith("observation") and name != MISSING]
        scalars = {name for name in names if column_type(schema.field(name).type).kind == "scalar"}
        self._number = _number_column(schema, scalars)
        self._step = "episode_step" if "episode_step" in scalars else None
        self._flags = flags_in(scalars)
        self.episodes: EpisodeCounter | None = None
        if {"done", "reward"} <= scalars:
            found_by = " and ".join(filter(None, (self._step, self._number))) or "done"
            self.episodes = EpisodeCounter(arrived=arrived, found_by=found_by)
        self._action: ColumnCounter | None = None
        if "action" in names and column_type(schema.field("action").type).kind in ("scalar", "list"):
            self._action = ColumnCounter("action", schema.field("action").type)
        self._actions: Counter[int] | None = Counter()  # None: not discrete, or too many distinct ones
        self._sample, self._sketches = RowSample(), Sketches()
        self._clocks = {name: Clock(name) for name in names if is_clock(name)}
        self._cameras: dict[str, Camera] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Count rows. Memory grows by a few numbers for each episode.

        Raises:
            DataError: A row cannot be read.
        """
        if not rows.num_rows:
            return
        values = {name: read_values(rows.column(name)) for name in self.columns}
        hashes = {name: _row_hashes(found) for name, found in values.items()}
        before = {name: _odd(counter) for name, counter in self.columns.items()}
        missing = _missing_rows(values)
        for name, counter in self.columns.items():
            if missing is not None and name in self._observations and missing.any():  # placeholder zeros
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
        self._add_sample(values, start, episode, step, missing)
        if start is not None:
            self._add_sketches(values, start, step, missing)
        begins = np.zeros(rows.num_rows, bool) if start is None else start
        for name, clock in self._clocks.items():
            found = values[name]
            if found.numbers is not None and found.shape in ((), (1,)):
                times = found.numbers.reshape(-1).astype(np.float64)
                if missing is not None:
                    times[missing] = np.nan
                clock.add(times, begins, episode, step)
        for name in self._observations:
            others = [hashes[other] for other in self._observations if other != name]
            if others and _is_camera(values[name]):
                camera = self._cameras.setdefault(name, Camera(name))
                camera.add(hashes[name], _combined(*others), begins, episode, step)
        self.rows += rows.num_rows

    def _add_sample(
        self, values: Mapping[str, Values], start: Bools | None, episode: Int64s, step: Int64s, missing: Bools | None
    ) -> None:
        """Add actions, rewards and observations to the sample of rows."""
        numbers = {
            name: found.numbers
            for name, found in values.items()
            if found.numbers is not None
            and found.shape is not None
            and (name in self._observations or name == "reward" or name.startswith("action"))
        }
        real = {}
        if self.arrived and start is not None:  # first rows hold placeholders, since no action preceded them
            real = {name: ~start for name in numbers if name not in self._observations}
        if missing is not None:
            real |= {name: ~missing for name in numbers if name in self._observations}
        counters = self.columns | ({} if self._action is None else {"action": self._action})
        bounds = {
            name: (one.places.low, one.places.high)
            for name, one in counters.items()
            if one.places is not None and (name not in real or name == "action")
        }
        self._sample.add(numbers, row=self.rows, episode=episode, step=step, real=real, bounds=bounds)

    def _add_sketches(self, values: Mapping[str, Values], start: Bools, step: Int64s, missing: Bools | None) -> None:
        numbers: dict[str, Any] = {}
        for name, found in values.items():
            if name.startswith("observation") and found.kind.value_type in ("float", "double"):
                if found.numbers is None or found.shape is None:
                    self._sketches.usable = False
                    return
                numbers[name] = found.numbers
                if missing is not None and missing.any():
                    numbers[name] = np.where(missing.reshape(-1, *[1] * len(found.shape)), np.nan, found.numbers)
        self._sketches.add(numbers, start, step)

    def _place(self, name: str, values: Values, episode: Int64s, step: Int64s) -> None:
        """Record the episodes and steps of nulls, NaN and infinite values."""
        for code, (found, dimensions) in (("nulls", _null_rows(values)), ("not-finite", _odd_rows(values))):
            self.places.setdefault((code, name), Places()).add(episode[found], step[found], dimensions)

    def _place_negative(self, values: Values, episode: Int64s, step: Int64s) -> None:
        if self._actions is not None and values.shape == () and values.numbers is not None:
            found = np.flatnonzero(values.numbers < 0)
            self.places.setdefault(("negative-action", "action"), Places()).add(episode[found], step[found])

    def _add_episodes(
        self, counter: EpisodeCounter, rows: pa.RecordBatch, hashes: dict[str, UInt64s]
    ) -> tuple[Bools, Int64s, Int64s]:
        seen = [hashes[name] for name in self._observations]
        content = [hashes[name] for name in ("action", "reward", "done") if name in hashes] + seen
        return counter.add(
            done=_integers(rows, "done"),
            reward=_floats(rows, "reward"),
            step=_integers(rows, self._step) if self._step else None,
            number=hashes[self._number] if self._number else None,
            row_hash=_combined(*content),
            observation_hash=_combined(*seen) if seen else None,
            contradicted=contradicted(*(rows.column(name) for name in ("done", *self._flags))) if self._flags else None,
        )

    def _add_actions(self, counter: ColumnCounter, rows: pa.RecordBatch, found: Values, start: Bools | None) -> None:
        """Count the actions that were taken, without the placeholder in the first row of an episode."""
        if start is not None and self.arrived:
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
        """Return the places of anomalies, by code and column.

        The places of anomalies that concern whole episodes are complete only after a call of ``results``.
        """
        found: dict[tuple[str, str | None], Places] = dict(self.places.items())
        counted = {} if self.episodes is None else self.episodes.places
        return found | {(code, None): one for code, one in counted.items()}

    def results(self) -> tuple[list[ColumnReport], EpisodesReport | None, ActionsReport | None]:
        """Return the counts."""
        columns = [counter.result() for counter in self.columns.values()]
        actions = None
        if self._action is not None:
            taken = self._action.result()
            if self._actions is not None and not taken.places and taken.shape == []:
                counts = {str(name): count for name, count in sorted(self._actions.items())}
                actions = ActionsReport("discrete", counts, None)
            else:
                actions = ActionsReport("continuous", None, taken.places)
        return columns, None if self.episodes is None else self.episodes.result(), actions

    def at_extreme(self, finding: Finding, dimension: int | None, which: str) -> Finding:
        """Return a copy of a finding, with its place set to the row where a dimension has its lowest or highest value.
        If ``dimension`` is None, the value is the lowest or highest of all dimensions.
        """
        known = self._sample.extremes.get(finding.column or "")
        if known is None:
            return finding
        if dimension is None:
            dimension = int(known.low.argmin() if which == "low" else known.high.argmax())
        episode, step = (known.low_at if which == "low" else known.high_at)[dimension].tolist()
        place = dimension if len(known.low) > 1 else None
        return replace(finding, dimension=place, episode=episode, step=step, episodes=(episode,))

    def findings(self, names: Mapping[str, Sequence[str]], splits: Mapping[str, int]) -> Iterator[Finding]:
        """Yield the findings from the checks of rows, at most a few findings for each code and column.

        Args:
            names: Names of dimensions, by column.
            splits: Number of rows of each split, in the order of the splits in the data.
        """
        sampled = self._sample.result(self.rows, names)
        found = list(about_dimensions(sampled))
        # Episodes with outliers have a larger range, and are already reported.
        reported = {(one.column, one.dimension, "scale-by-episode") for one in found if one.code == "outlier"}
        found += (one for one in about_parts(sampled) if (one.column, one.dimension, one.code) not in reported)
        found += about_dynamics(sampled, arrived=self.arrived)
        yield from capped(found, _MOST_OF_A_CODE)
        if self.episodes is not None:
            hashes, lengths = self.episodes.all_of_them()
            yield from self._sketches.findings(hashes)
            yield from about_splits(hashes, lengths, np.cumsum(lengths) - lengths, splits)
        checks: list[Clock | Camera] = [*self._clocks.values(), *self._cameras.values()]
        for check in checks:
            yield from check.findings()


def _row_hashes(values: Values) -> UInt64s:
    """Return a hash of each row; rows with equal bytes have equal hashes."""
    if values.numbers is not None and values.shape is not None:
        return hashes_of(values.numbers)[:, 0]
    array = values.array
    if values.kind.kind == "image" and pa.types.is_struct(array.type):
        encoded = array.field("bytes")
        array = encoded if encoded.null_count < len(encoded) else array.field("path")
    is_bytes = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
    return hashes_of([(value or b"") if is_bytes else repr(value).encode() for value in array.to_pylist()])[:, 0]


def _combined(*hashes: UInt64s) -> UInt64s:
    """Combine several hashes of each row into one hash."""
    return hashes_of(np.stack(hashes, axis=1))[:, 0]


def _odd(counter: ColumnCounter) -> int:
    """Return the total number of values that are null, NaN or infinite."""
    return counter.nulls + counter.nans + counter.infinite


def _null_rows(values: Values) -> tuple[Int64s, None]:
    """Return the indices of the rows that are null, or are a list with a null."""
    rows = np.zeros(0, np.int64) if values.present is None else np.flatnonzero(~values.present)
    if values.inner_nulls and values.kind.depth == 1:
        inside = pc.list_parent_indices(values.array).filter(values.array.flatten().is_null())
        rows = np.union1d(rows, inside.to_numpy())
    return rows, None


def _odd_rows(values: Values) -> tuple[Int64s, Int64s | None]:
    """Return the indices of the rows with NaN or infinite values, and the affected dimensions if rows are vectors."""
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


def _chosen(values: Values, column: pa.Array, kept: Bools) -> Values:
    if values.shape is None or values.numbers is None:
        return read_values(column.filter(pa.array(kept)))
    return replace(values, rows=int(kept.sum()), numbers=values.numbers[kept])


def _number_column(schema: pa.Schema, scalars: set[str]) -> str | None:
    """Return the column with the number or name of each episode; None if the data have no such column."""
    name = next((name for name in _NUMBER_COLUMNS if name in schema.names), None)
    return name if name is not None and (name in scalars or _is_text(schema.field(name).type)) else None


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _integers(rows: pa.RecordBatch, name: str) -> Int64s:
    values: Any = _floats(rows, name)
    if not np.array_equal(values, np.trunc(values), equal_nan=True):
        raise DataError(f"{name}: expected whole numbers, found {values[values != np.trunc(values)][0]}")
    return np.asarray(np.nan_to_num(values, nan=-1, posinf=-1, neginf=-1).astype(np.int64))


def _floats(rows: pa.RecordBatch, name: str) -> Floats:
    column = plain(rows.column(name))
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.uint8())
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)


def _is_camera(values: Values) -> bool:
    if values.kind.kind == "image":
        return True
    return values.kind.value_type == "uint8" and values.shape is not None and len(values.shape) >= 2


def _missing_rows(values: Mapping[str, Values]) -> Bools | None:
    """Return a mask of rows whose observation the source did not store; None if the source does not mark such rows."""
    found = values.get(MISSING)
    if found is None or found.numbers is None or found.shape != ():
        return None
    return np.asarray(found.numbers != 0)
