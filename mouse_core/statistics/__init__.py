"""Statistics of recorded data by field and dimension, files with these statistics, and normalisation of fields."""

from mouse_core.statistics.by_field import QUANTILES, FieldStatistics, Statistics, statistics
from mouse_core.statistics.normalizer import Normalization, Normalizer, Scaling

__all__ = [
    "QUANTILES",
    "FieldStatistics",
    "Normalization",
    "Normalizer",
    "Scaling",
    "Statistics",
    "statistics",
]
