"""What a store is given: the splits of a dict of datasets, and the segment of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError
from mouse_core.files.arrow import check_mapped
from mouse_core.store._segments import Segment


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
    if splits is None:
        return _named(dataset, _matching(dataset, _listed(split_pattern)))
    for name in _listed(splits):
        if name not in dataset:
            raise ConfigError(f"from_dataset: expected splits among {list(dataset)}, found {name!r}")
    return _named(dataset, _listed(splits))


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _matching(dataset: Mapping[Any, Any], patterns: Iterable[str]) -> Iterable[Any]:
    """The names that match some pattern, each once, in the order of the patterns."""
    names: dict[Any, None] = {}
    for pattern in patterns:
        matched = [name for name in dataset if fnmatchcase(str(name), pattern)]
        if not matched:
            raise ConfigError(f"from_dataset: expected a pattern matching {list(dataset)}, found {pattern!r}")
        names |= dict.fromkeys(matched)
    return names


def segment_of(part: Any, image_roots: tuple[str, ...]) -> Segment:
    """The segment of a dataset or a table, which stays where it is.

    Raises:
        ConfigError: It is neither.
        DataError: A file that it is mapped from was cut, or holds rows that its reader did not see.
    """
    if isinstance(part, pa.Table):
        return Segment(part, image_roots=image_roots)
    if isinstance(part, str | os.PathLike):
        path = os.fspath(part)
        raise ConfigError(
            f"from_dataset: expected a dataset, found the path {path!r}; open it with mouse_core.formats.open({path!r})"
            ".to_store(), which checks it first, or with datasets.load_from_disk or datasets.load_dataset"
        )
    if not hasattr(part, "_indices") or not hasattr(getattr(part, "data", None), "table"):
        raise ConfigError(
            f"from_dataset: expected a datasets.Dataset, a dict of them or a pyarrow.Table, found {type(part).__name__}"
        )
    # Rows that a damaged file no longer leads to are missed here, before anyone trains without them.
    for table in (part.data, part._indices):
        check_mapped(table)
    return Segment.from_dataset(part, image_roots)


def _named(dataset: Mapping[Any, Any], names: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"split {name!r}", dataset[name]) for name in names]
