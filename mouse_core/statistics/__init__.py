"""Statistics of recorded data by field and dimension, saved beside them and counted on as rows come."""

from mouse_core.statistics.by_field import QUANTILES, FieldStatistics, Statistics, statistics

__all__ = ["QUANTILES", "FieldStatistics", "Statistics", "statistics"]
