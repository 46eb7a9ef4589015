"""Where episodes begin and end, and what is in them: counted batch by batch, in whole arrays."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.formats.columns.transitions import step_numbers
from mouse_core.formats.columns.values import UInt64s, mixed
from mouse_core.inspect._checks.places import Places
from mouse_core.inspect._histogram import Histogram
from mouse_core.inspect.report import Distribution, EpisodesReport

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# 2**64 over the golden ratio: multiples of it lie far apart.
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


class EpisodeCounter:
    """Episodes of rows that come in order.

    ``places`` has where each of the anomalies is.

    Args:
        arrived: Whether an episode of T transitions is T + 1 rows, the first of which belongs to none.
        found_by: What tells where episodes begin: any of "episode_step", an episode number, and "done".
    """

    def __init__(self, *, arrived: bool, found_by: str) -> None:
        self.arrived = arrived
        self.found_by = found_by
        self.transitions = self.repeated = self.repeated_once = 0
        self._repeated_last = False
        self.done_codes: Counter[int] = Counter()
        self.anomalies: Counter[str] = Counter()
        # Where each of these is, and a few other things that are counted.
        self.places: defaultdict[str, Places] = defaultdict(Places)
        # Finished episodes, an array of each for every batch.
        self._lengths: list[Int64s] = []
        self._returns: list[npt.NDArray[np.float64]] = []
        self._codes: list[npt.NDArray[np.int8]] = []
        self._hashes: list[UInt64s] = []
        # The episode that goes on: its number, rows so far, return, hash, and the row before the next.
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
        reward: npt.NDArray[np.float64],
        step: Int64s | None,
        number: UInt64s | None,
        row_hash: UInt64s,
        observation_hash: UInt64s | None,
        contradicted: Bools | None = None,
    ) -> tuple[Bools, Int64s, Int64s]:
        """Count some rows, ``[n]`` of everything.

        Args:
            done: Done codes.
            reward: Rewards.
            step: Step within the episode, where there is such a column.
            number: A hash of what names the episode, where there is such a column.
            row_hash: Of action, reward, done and observation.
            observation_hash: Of the observation alone.
            contradicted: Where flags beside the done codes say others, where there are such flags.

        Returns:
            Which rows begin an episode, the number of each row's episode, and the row's number in it, from 0.
        """
        known = {"done": done, "step": step, "number": number, "observation": observation_hash}
        shifted = {name: _shifted(values, self._last, name) for name, values in known.items()}
        start = self._starts(shifted, known)
        codes, counts = np.unique(done, return_counts=True)
        self.done_codes.update(dict(zip(codes.tolist(), counts.tolist(), strict=True)))
        episode = self._number + np.cumsum(start)
        step_number = step_numbers(start, self._rows)
        self._count_anomalies(start, shifted, known, reward, (episode, step_number))
        if contradicted is not None:
            self._count("done-against-flags", contradicted, (episode, step_number))
        self._finish(start, step_number, reward, row_hash, known, shifted)
        self._number = int(episode[-1])

        last = {**known, "before": shifted["observation"]}  # of each, what the row before the next has
        self._last = {name: None if values is None else values[-1] for name, values in last.items()}
        self._last["start"] = bool(start[-1])
        return start, episode, step_number

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
        self,
        start: Bools,
        shifted: dict[str, Any],
        known: dict[str, Any],
        reward: npt.NDArray[np.float64],
        where: tuple[Int64s, Int64s],
    ) -> None:
        done, step = known["done"], known["step"]
        follows = ~start  # rows with a row of the same episode before them
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
            found["final-is-next-first"][: self._last is None] = False  # no row comes before the very first
        for code, rows in found.items():
            self._count(code, rows, where)

    def _count(self, code: str, rows: Bools, where: tuple[Int64s, Int64s]) -> None:
        """Count rows in which something is so, by their episodes and steps."""
        count = int(rows.sum())
        if count:
            self.anomalies[code] += count
            self.places[code].add(where[0][rows], where[1][rows])

    def _count_repeats(self, repeats: Bools, where: tuple[Int64s, Int64s]) -> None:
        """Count observations that repeat the one before, and those of them that a row follows which does not."""
        self.repeated += int(repeats.sum())
        self.places["repeated-observation"].add(where[0][repeats], where[1][repeats])
        before = np.append(self._repeated_last, repeats[:-1])
        self.repeated_once += int((before & ~repeats).sum())
        self._repeated_last = bool(repeats[-1])

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
            self._count_finals(begins, start, known["observation"], shifted["observation"], sizes)
        self._rows, self._return, self._hash = int(sizes[-1]), float(returns[-1]), hashes[-1]

    def _count_finals(
        self, begins: Int64s, start: Bools, observation_hash: UInt64s, previous: UInt64s, sizes: Int64s
    ) -> None:
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
        where = max(self._number, 0) + np.arange(len(ended)), sizes[: len(ended)] - 1
        self._count("final-repeats", inside & (before == final), where)
        self.anomalies["finals-compared"] += int(inside.sum())
        if self._final_hash is None:
            self._final_hash = final[0]
        self._count("same-final", final == self._final_hash, where)

    def _keep(self, sizes: Int64s, returns: npt.NDArray[np.float64], codes: Int64s, hashes: UInt64s) -> None:
        lengths = sizes - 1 if self.arrived else sizes
        numbers = max(self._number, 0) + np.arange(len(lengths))  # the first of them is that which went on until now
        self._count("without-transitions", lengths < 1, (numbers, np.zeros_like(numbers)))
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
        """Note which episodes are odd as a whole, and return those that are the same as an earlier one."""
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
