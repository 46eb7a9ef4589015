"""Whether numbers drawn have the frequencies they should have."""

from typing import Any

import numpy.typing as npt


def check_frequencies(counts: npt.NDArray[Any], probabilities: npt.NDArray[Any]) -> None:
    """Pearson's chi-square test at about one in 30,000 (Wilson and Hilferty's approximation, 1931)."""
    possible = probabilities > 0
    assert not counts[~possible].any(), "something came that never should"
    expected = probabilities[possible] * counts.sum()
    assert expected.min() >= 5, "too few draws for this test"
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    spread = 2 / (9 * freedom)
    normal = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    assert -4 < normal < 4, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"
