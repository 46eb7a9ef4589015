"""Where episodes begin and end, and what is in them: counted batch by batch, in whole arrays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.formats.columns.transitions import step_numbers
from mouse_core.formats.columns.values import UInt64s, mixed
from mouse_core.inspect._histogram import Histogram
from mouse_core.inspect.report import Distribution, EpisodesReport

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# 2**64 over the golden ratio: multiples of it lie far apart.
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


class EpisodeCounter:
    """Episodes of rows that come in order.

    Args:
        arrived: Whether an episode of T transitions is T + 1 rows, the first of which belongs to none.
        found_by: What tells where episodes begin: any of "episode_step", an episode number, and "done".
    """

    def __init__(self, *, arrived: bool, found_by: str) -> None:
        self.arrived = arrived
        self.found_by = found_by
        self.transitions = self.repeated = 0
        self.done_codes: Counter[int] = Counter()
        self.anomalies: Counter[str] = Counter()
        # Finished episodes, an array of each for every batch.
        self._lengths: list[Int64s] = []
        self._returns: list[npt.NDArray[np.float64]] = []
        self._codes: list[npt.NDArray[np.int8]] = []
        self._hashes: list[UInt64s] = []
        # The episode that goes on: its rows so far, return, hash, and the row before the next.
        self._rows = 0
        self._return = 0.0
        self._hash = np.uint64(0)
        self._last: dict[str, Any] | None = None
        self._final_hash: np.uint64 | None = None

    def add(
        self,
        *,
        done: Int64s,
        reward: npt.NDArray[np.float64],
        step: Int64s | None,
        number: UInt64s | None,
        row_hash: UInt64s,
        observation_hash: UInt64s | None,
    ) -> tuple[Bools, Int64s]:
        """Count some rows, ``[n]`` of everything.

        Args:
            done: Done codes.
            reward: Rewards.
            step: Step within the episode, where there is such a column.
            number: A hash of what names the episode, where there is such a column.
            row_hash: Of action, reward, done and observation.
            observation_hash: Of the observation alone.

        Returns:
            Which rows begin an episode, and the row's number in its episode, from 0.
        """
        known = {"done": done, "step": step, "number": number, "observation": observation_hash}
        shifted = {name: _shifted(values, self._last, name) for name, values in known.items()}
        start = self._starts(shifted, known)
        codes, counts = np.unique(done, return_counts=True)
        self.done_codes.update(dict(zip(codes.tolist(), counts.tolist(), strict=True)))
        self._count_anomalies(start, shifted, known, reward)
        step_number = step_numbers(start, self._rows)
        self._finish(start, step_number, reward, row_hash, known, shifted)

        last = {**known, "before": shifted["observation"]}  # of each, what the row before the next has
        self._last = {name: None if values is None else values[-1] for name, values in last.items()}
        self._last["start"] = bool(start[-1])
        return start, step_number

    def _starts(self, shifted: dict[str, Any], known: dict[str, Any]) -> Bools:
        step, number = known["step"], known["number"]
        if step is not None:
            start = (step == 0) | (step <= shifted["step"])
            if number is not None:
                start |= number != shifted["number"]
        elif number is not None:
            start = number != shifted["number"]
        else:
            start = shifted["done"] != 0
        start = np.array(start, bool)
        start[0] |= self._last is None
        return start

    def _count_anomalies(
        self, start: Bools, shifted: dict[str, Any], known: dict[str, Any], reward: npt.NDArray[np.float64]
    ) -> None:
        count = self.anomalies
        done, step = known["done"], known["step"]
        follows = ~start  # rows with a row of the same episode before them
        transition = follows if self.arrived else np.ones(len(done), bool)
        self.transitions += int(transition.sum())
        count["reward-at-start"] += int((np.nan_to_num(reward[start]) != 0).sum())
        count["done-at-start"] += int((done[start] != 0).sum())
        count["continues-after-terminal"] += int((follows & (shifted["done"] == 1)).sum())
        count["continues-after-truncation"] += int((follows & (shifted["done"] == 2)).sum())
        count["unknown-done"] += int(((done < 0) | (done > 2)).sum())
        if step is not None:
            count["step-not-from-0"] += int((step[start] != 0).sum())
            count["step-jumps"] += int((follows & (step != shifted["step"] + 1)).sum())
        if known["observation"] is not None:
            same = known["observation"] == shifted["observation"]
            self.repeated += int((same & follows).sum())
            count["final-is-next-first"] += int((same & start)[self._last is None :].sum())

    def _finish(
        self,
        start: Bools,
        step_number: Int64s,
        reward: npt.NDArray[np.float64],
        row_hash: UInt64s,
        known: dict[str, Any],
        shifted: dict[str, Any],
    ) -> None:
        """Close the episodes that end before a row that begins one, and keep what is open."""
        begins = np.flatnonzero(start)
        counted = np.where(start, 0.0, reward) if self.arrived else reward
        spread = mixed(row_hash ^ (step_number.astype(np.uint64) + np.uint64(1)) * _GOLDEN_RATIO)
        # The first piece goes on with the open episode; it is empty where the batch begins with a new one.
        edges = np.concatenate([[0], begins]) if not len(begins) or begins[0] != 0 else begins
        returns = np.add.reduceat(counted, edges)
        hashes = np.add.reduceat(spread, edges)
        sizes = np.diff(np.append(edges, len(start)))
        if not len(begins) or begins[0] or not self._rows:
            returns[0] += self._return
            hashes[0] += self._hash
            sizes[0] += self._rows
        else:
            returns = np.append(self._return, returns)
            hashes = np.append(self._hash, hashes)
            sizes = np.append(self._rows, sizes)
        last_codes = shifted["done"][begins][self._last is None :]  # no row comes before the very first
        self._keep(sizes[:-1], returns[:-1], last_codes, hashes[:-1])
        if known["observation"] is not None and len(begins):
            self._count_finals(begins, start, known["observation"], shifted["observation"])
        self._rows, self._return, self._hash = int(sizes[-1]), float(returns[-1]), hashes[-1]

    def _count_finals(self, begins: Int64s, start: Bools, observation_hash: UInt64s, previous: UInt64s) -> None:
        """What the last observations of the episodes that just ended look like."""
        ended = begins if self._last is not None else begins[1:]
        final = previous[ended]
        if not len(final):
            return
        # The row before the final one, where it belongs to the same episode.
        before = np.zeros(len(ended), np.uint64)
        inside = np.zeros(len(ended), bool)
        deep = ended >= 2
        before[deep], inside[deep] = observation_hash[ended[deep] - 2], ~start[ended[deep] - 1]
        if self._last is not None:
            for number in np.flatnonzero(~deep).tolist():
                if ended[number] == 1:
                    before[number], inside[number] = self._last["observation"], not start[0]
                else:
                    before[number], inside[number] = self._last["before"] or 0, not self._last["start"]
        self.anomalies["final-repeats"] += int((inside & (before == final)).sum())
        self.anomalies["finals-compared"] += int(inside.sum())
        if self._final_hash is None:
            self._final_hash = final[0]
        self.anomalies["same-final"] += int((final == self._final_hash).sum())

    def _keep(self, sizes: Int64s, returns: npt.NDArray[np.float64], codes: Int64s, hashes: UInt64s) -> None:
        lengths = sizes - 1 if self.arrived else sizes
        self.anomalies["without-transitions"] += int((lengths < 1).sum())
        self._lengths.append(lengths)
        self._returns.append(returns)
        self._codes.append(np.clip(codes, -1, 3).astype(np.int8))
        self._hashes.append(hashes)

    def all_of_them(self) -> tuple[UInt64s, Int64s]:
        """Hashes and numbers of rows of all episodes; the last is among them once there is a result."""
        hashes = np.concatenate([*self._hashes, np.zeros(0, np.uint64)])
        lengths = np.concatenate([*self._lengths, np.zeros(0, np.int64)])
        return hashes, lengths + int(self.arrived)

    def result(self) -> EpisodesReport:
        """What was counted so far; the rows that came last are an episode too, whether it has ended or not."""
        if self._rows and self._last is not None:
            last = np.array([self._last["done"]], np.int64)
            self.anomalies["ends-open"] = int(last[0] == 0)
            self._keep(np.array([self._rows]), np.array([self._return]), last, np.array([self._hash], np.uint64))
            self._rows = 0
        kept = (self._lengths, self._returns, self._codes, self._hashes)
        lengths, returns, codes, hashes = (np.concatenate(parts) if parts else np.zeros(0) for parts in kept)
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
                "at-longest": int((lengths == lengths.max(initial=0)).sum()),
            },
        )


def _shifted(values: npt.NDArray[Any] | None, before: dict[str, Any] | None, name: str) -> Any:
    """Every row's predecessor; the first row of all stands for its own."""
    if values is None:
        return None
    first = values[:1] if before is None else np.array([before[name]], values.dtype)
    return np.concatenate([first, values[:-1]])


def _distribution(numbers: npt.NDArray[Any]) -> Distribution:
    finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind == "f" else numbers
    if not len(finite):
        return Distribution(None, None, None, None, (), (), ())
    histogram = Histogram()
    histogram.add(finite)
    edges, counts = histogram.bars()
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(finite.mean()), float(finite.std())
    return Distribution(
        low=finite.min().item(),
        high=finite.max().item(),
        mean=mean,
        deviation=deviation,
        quantiles=[float(value) for value in np.quantile(finite, [0.05, 0.25, 0.5, 0.75, 0.95])],
        edges=edges,
        counts=counts,
    )
