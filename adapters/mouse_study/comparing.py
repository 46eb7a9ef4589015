"""Pairs of runs that differ only in framework: whether they received equal data, and where their curves diverge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from mouse_study.results import Results, Run
from mouse_study.statistics import parting, relative_difference

# Largest number of runs that a line names.
_NAMED = 4


@dataclass(frozen=True)
class Evidence:
    """The result of ``same_data``: whether the records prove that two runs received the same data.

    Attributes:
        proven: Whether the digests of both runs exist and are equal, over the same number of steps.
        reason: The proof, or the reason why there is no proof.
    """

    proven: bool
    reason: str


@dataclass(frozen=True)
class Pair:
    """Two runs with the same variant and seed in two frameworks.

    Attributes:
        left: The first run of the pair.
        right: The second run of the pair.
        same_data: Whether both runs received the same data.
        steps: The steps at which both runs recorded a value, int64 ``[n]``, ascending.
        difference: The difference of the two runs' values at each step, relative to the larger value, float64 ``[n]``.
    """

    left: Run
    right: Run
    same_data: Evidence
    steps: NDArray[np.int64]
    difference: NDArray[np.float64]

    def parts(self, tolerance: float) -> int | None:
        """Return the first step at which the two runs differ by more than the tolerance; None if there is no such
        step."""
        place = parting(self.difference, tolerance)
        return None if place is None else int(self.steps[place])


def pairs(results: Results, name: str = "loss") -> tuple[Pair, ...]:
    """Return all pairs of runs that differ only in their framework.

    Args:
        results: the results of a study.
        name: the name of the values to compare, such as "loss".

    Returns:
        The pairs in the order of variants, seeds and frameworks. Variants and seeds that ran in only one framework are
        left out.
    """
    series = results.series(name)
    empty = (np.empty(0, np.int64), np.empty(0, np.float64))
    found = []
    for runs in _alike(results.runs):
        for left, right in combinations(runs, 2):
            (left_steps, left_values), (right_steps, right_values) = (
                series.get(run.run, empty) for run in (left, right)
            )
            steps, left_places, right_places = np.intersect1d(left_steps, right_steps, return_indices=True)
            difference = relative_difference(left_values[left_places], right_values[right_places])
            found.append(Pair(left, right, same_data(left, right), steps, difference))
    return tuple(found)


def _alike(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs by variant and seed."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.variant, run.seed, run.framework)):
        found.setdefault((run.variant, run.seed), []).append(run)
    return list(found.values())


def same_data(left: Run, right: Run) -> Evidence:
    """Return whether the records prove that the study delivered the same batches to two runs.

    The proof requires that both runs have a digest of their batches, that the digests are equal, and that both
    runs took the same number of steps. A digest covers the names, shapes and values of the batches of all steps, bit by
    bit, and the index of each batch in its stream. Equal fingerprints, names and seeds are no proof. The digest does
    not cover other data that a training reads, from the store or another source.

    Args:
        left: The first run of the pair.
        right: The second run of the pair.

    Returns:
        The proof, or the reason why there is no proof.
    """
    for run in (left, right):
        if not run.steps:
            return Evidence(False, f"{run.framework} took no step")
    missing = [run.framework for run in (left, right) if not run.digest]
    if missing:
        return Evidence(False, f"no digest of the batches of {' and '.join(missing)}")
    if left.steps != right.steps:
        return Evidence(
            False,
            f"{left.framework} took {left.steps:,} steps and {right.framework} {right.steps:,}; only digests of "
            "equally many steps can be compared",
        )
    if left.digest != right.digest:
        return Evidence(
            False,
            f"the digests differ ({left.framework} {left.digest}, {right.framework} {right.digest}): the batches of "
            f"{left.steps:,} steps were not equal",
        )
    reason = f"the batches of steps 0 to {left.steps - 1:,} are equal, bit by bit (digest {left.digest})"
    reason += f"; {_origin(left, right)}"
    unfinished = [run.framework for run in (left, right) if run.status != "done"]
    if unfinished:
        reason += f"; later steps are unknown, because {' and '.join(unfinished)} did not finish"
    return Evidence(True, reason)


def _origin(left: Run, right: Run) -> str:
    """Return a text that states whether two runs have equal fingerprints of data and configuration."""
    if left.fingerprint and left.fingerprint == right.fingerprint:
        return f"data and configuration have the fingerprint {left.fingerprint}"
    if left.fingerprint and right.fingerprint:
        return f"fingerprints of data and configuration differ ({left.fingerprint}, {right.fingerprint})"
    return "a fingerprint of data and configuration was not recorded"


def verdict(found: Iterable[Pair], missing: Iterable[str] = ()) -> Evidence:
    """Return whether all pairs have a proof, with one line for the reason: *same data: proven*, or the number of pairs
    without proof.

    Args:
        found: the pairs that ``pairs`` returned.
        missing: the declared runs that have not begun, ``Results.missing``.

    Returns:
        The evidence for all pairs together; ``proven`` is True only if there is at least one pair, every pair has a
        proof, and all declared runs have begun.
    """
    all_pairs, absent = list(found), sorted(missing)
    proven = sum(pair.same_data.proven for pair in all_pairs)
    if not all_pairs:
        return Evidence(False, "same data: nothing to prove, because no variant and seed ran in two frameworks")
    if proven < len(all_pairs):
        return Evidence(
            False, f"same data: not proven for {len(all_pairs) - proven} of {_count(len(all_pairs), 'pair')}"
        )
    said = f"same data: proven, for {_count(proven, 'pair')} of runs"
    if absent:
        names = ", ".join(absent[:_NAMED]) + (f" and {len(absent) - _NAMED:,} more" if len(absent) > _NAMED else "")
        return Evidence(False, f"{said}; not begun: {names}")
    complete = all(run.status == "done" for pair in all_pairs for run in (pair.left, pair.right))
    return Evidence(True, said if complete else f"{said}, for their steps so far")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
