"""Fields that are computed from others, once a snapshot: returns, times, what came before, how episodes end."""

from mouse_core.store.derived.fields import (
    IsFirst,
    IsLast,
    NStepDiscount,
    NStepReturn,
    Previous,
    Return,
    Terminated,
    TimeFromStart,
    TimeToEnd,
    Truncated,
)
from mouse_core.store.derived.rows import Derivation, EpisodeRows
from mouse_core.store.derived.store import DerivedStore
from mouse_core.store.derived.sums import discounted_sums

__all__ = [
    "Derivation",
    "DerivedStore",
    "EpisodeRows",
    "IsFirst",
    "IsLast",
    "NStepDiscount",
    "NStepReturn",
    "Previous",
    "Return",
    "Terminated",
    "TimeFromStart",
    "TimeToEnd",
    "Truncated",
    "discounted_sums",
]
