"""Choosing splits of a dict of datasets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mouse_core.errors import ConfigError


def select_splits(
    dataset: Any, splits: str | Sequence[str] | None, split_pattern: str | Sequence[str] | None
) -> list[tuple[str, Any]]:
    """The datasets to take, in order, and what to call each in messages; see ``DatasetStore.from_dataset``.

    Raises:
        ConfigError: Both ways of choosing, an unknown split, or a pattern that matches none.
    """
    if splits is None and split_pattern is None:
        return _named(dataset, dataset) if isinstance(dataset, Mapping) else [("dataset", dataset)]
    if splits is not None and split_pattern is not None:
        raise ConfigError("from_dataset: expected splits or split_pattern, found both")
    if not isinstance(dataset, Mapping):
        raise ConfigError(f"from_dataset: expected a dict of splits, found {type(dataset).__name__}")
    if splits is not None:
        names = [splits] if isinstance(splits, str) else list(splits)
        for name in names:
            if name not in dataset:
                raise ConfigError(f"from_dataset: expected splits among {list(dataset)}, found {name!r}")
    else:
        patterns = [split_pattern] if isinstance(split_pattern, str) else list(split_pattern or ())
        names = []
        for pattern in patterns:
            matched = [name for name in dataset if fnmatchcase(str(name), pattern)]
            if not matched:
                raise ConfigError(f"from_dataset: expected a pattern matching {list(dataset)}, found {pattern!r}")
            names.extend(name for name in matched if name not in names)
    return _named(dataset, names)


def _named(dataset: Mapping[Any, Any], names: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"split {name!r}", dataset[name]) for name in names]
