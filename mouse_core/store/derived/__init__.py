"""Fields that are computed from others, once a snapshot: returns, times, what came before, how episodes end."""

from mouse_core.store.derived.fields import (
    Derivation,
    EpisodeRows,
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
    discounted_sums,
)
from mouse_core.store.derived.store import DerivedStore

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
