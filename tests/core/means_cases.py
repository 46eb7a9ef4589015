"""Means by hand, for the tests of ``global_mean`` in every framework."""

from __future__ import annotations

import math
from typing import Any

#: Values, the mask if there is one, and the mean: of what is masked, not even NaN counts, and of nothing it is 0.
MEANS: list[tuple[Any, Any, float]] = [
    ([1.0, 2.0, 6.0], None, 3.0),
    ([1.0, math.nan, 3.0], [True, False, True], 2.0),
    ([[1.0, 2.0], [math.inf, 4.0]], [True, False], 1.5),
    ([[1.0, 2.0], [3.0, 4.0]], [[3, 0], [0, 1]], 1.75),
    ([1.0, 2.0], [0, 0], 0.0),
    ([], None, 0.0),
    (7.0, None, 7.0),
]
