"""Sorts and filters the list of a store's episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import ConfigError
from mouse_core.spec import check_choice

Int64s = npt.NDArray[np.int64]

_ORDERS_KEPT = 8


@dataclass(frozen=True)
class Query:
    """The filter and the order of a list of episodes.

    Args:
        sort: The column by which episodes are sorted.
        down: Whether the largest values come first.
        low, high: Smallest and largest allowed value by column, as numbers or texts; for ``done``, the label of a code
            is also accepted. An episode that has no value in a filtered column does not pass the filter.
        has: A dict from column to a text that the column's value must contain; case is ignored. A number is searched in
            its shortest text form.
    """

    sort: str = "episode"
    down: bool = False
    low: Mapping[str, float | str] = field(default_factory=dict)
    high: Mapping[str, float | str] = field(default_factory=dict)
    has: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key under which the result of the query is cached."""
        limits = (tuple(sorted(one.items())) for one in (self.low, self.high, self.has))
        return (self.sort, self.down, *limits)


class EpisodeList:
    """The episodes of a store as columns for sorting and filtering.

    Args:
        table: The episodes, as ``Store.episodes`` returns them. Columns of lists, such as the returns of vector
            rewards, are left out.
        labels: The labels of done codes.
    """

    def __init__(self, table: pa.Table, labels: Sequence[str] = ()) -> None:
        self.table, self._labels = table, list(labels)
        self.names = [one.name for one in table.schema if not pa.types.is_nested(one.type)]
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._orders: dict[tuple[Any, ...], Int64s] = {}

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a column: integers, or float64 with NaN for missing values, ``[n]``; or texts ``[n]``,
        with None for missing values.

        Raises:
            ConfigError: The column does not exist.
        """
        check_choice("column", name, self.names)
        if name not in self._columns:
            self._columns[name] = _as_array(self.table.column(name).combine_chunks())
        return self._columns[name]

    def order(self, query: Query) -> Int64s:
        """Return the indices of the episodes that pass the filter of a query, in the query's order.

        Episodes without a value are last.

        Raises:
            ConfigError: A column does not exist, or a limit for a numeric column is not a number.
        """
        known = self._orders.get(query.key)
        if known is not None:
            return known
        kept = np.ones(len(self), np.bool_)
        for name, text in query.has.items():
            kept &= _contains(self.values(name), text)
        for limits, meets in ((query.low, np.greater_equal), (query.high, np.less_equal)):
            for name, limit in limits.items():
                values = self.values(name)
                if values.dtype == object:
                    shown = np.array([shortest(value) for value in values.tolist()], np.str_)
                    kept &= (shown != "") & meets(shown, str(limit))
                else:
                    kept &= meets(values, self._limit(name, limit))
        (found,) = np.nonzero(kept)
        order = _sorted(found, self.values(query.sort), query.down)
        while len(self._orders) >= _ORDERS_KEPT:
            self._orders.pop(next(iter(self._orders)))
        self._orders[query.key] = order
        return order

    def _limit(self, name: str, given: float | str) -> float:
        labels = self._labels if name == "done" else []
        try:
            return labels.index(str(given)) if given in labels else float(given)
        except ValueError:
            wanted = f"a number or one of {labels}" if labels else "a number"
            raise ConfigError(f"{name}: expected {wanted} as a limit, found {given!r:.80}") from None


def _as_array(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return np.array([None if one is None else str(one) for one in column.to_pylist()], object)


def _contains(values: npt.NDArray[Any], text: str) -> npt.NDArray[np.bool_]:
    wanted = text.casefold()
    shown = {value: wanted in shortest(value).casefold() for value in set(values.tolist())}
    return np.array([shown[value] for value in values.tolist()], np.bool_)


def shortest(value: Any) -> str:
    """Return a value as text: integers without a decimal point, missing values as an empty text."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _sorted(found: Int64s, values: npt.NDArray[Any], down: bool) -> Int64s:
    chosen = values[found]
    if chosen.dtype == object:
        missing = np.array([value is None for value in chosen.tolist()], np.bool_)
        texts = np.array(["" if value is None else value for value in chosen.tolist()], np.str_)
        _, ranks = np.unique(texts, return_inverse=True)
    else:
        missing = np.isnan(chosen) if chosen.dtype.kind == "f" else np.zeros(len(chosen), np.bool_)
        ranks = np.where(missing, 0, chosen)
    # Stable in both directions: equal episodes stay in the order of the store.
    order = np.lexsort((found, -ranks if down else ranks, missing))
    result: Int64s = found[order]
    return result
