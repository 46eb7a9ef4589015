"""Tables of OpenML, as scikit-learn's ``fetch_openml`` and OpenML's own client keep them, as contextual bandits.

An example is an episode of one step: its features are the observation, its class is the action whose reward is 1.
Nothing follows an example, so a row holds all of it: the alignment is "outgoing".
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside
from mouse_core.formats.base import BATCH_ROWS, RowStream, reading
from mouse_core.formats.columns.blocks import check_batch_rows
from mouse_core.formats.columns.named import Columns, ordered, schema_of, to_batches
from mouse_core.formats.openml._arff import Attribute, names_of, read_header, read_lines
from mouse_core.formats.openml._parquet import parquet_attributes, parquet_lines

__all__ = ["read_openml"]

_DEFAULT = re.compile(r"<oml:default_target_attribute>([^<]*)</oml:default_target_attribute>")
_MISSING = "?"
_MOST_JSON = 4 << 20


def read_openml(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    one_hot: bool = False,
    missing: str | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """A table of OpenML as a contextual bandit: an example a row, of alignment "outgoing".

    ``observation`` holds the features in the table's order, float64: numbers as they are, and of an attribute that has
    one of some values the place of its value among those declared, or with ``one_hot`` a 1 there. ``action`` is the
    class, its place among those declared (numbers of a regression stay what they are, a vector of one); ``reward`` is 1
    and ``done`` 1 in every row. ``metadata`` says the names of features and classes. Nothing is scaled: a
    ``Normalizer`` is for that.

    Args:
        path: A file of ARFF, packed by gzip or not, or of Parquet; or the folder of a dataset in the cache of OpenML's
            client, which also holds a description. Of scikit-learn's cache, the file below ``data/v1/download``.
        target: The attribute to predict; by default the one that the description names, else the last.
        one_hot: Whether an attribute that has one of some values becomes as many features.
        missing: What becomes of examples without a value for some attribute: "drop" leaves them out; by default they
            are an error.
        batch_rows: At most how many rows a batch has.

    Raises:
        ConfigError: Nothing of this kind there, or no such attribute.
        DataError: A damaged file, a value that is none of those declared, or one that is missing; the message names
            line and attribute.
    """
    check_batch_rows(batch_rows)
    if missing not in (None, "drop"):
        raise ConfigError(f"missing: expected 'drop' or nothing, found {missing!r}")
    file = _file(Path(path))
    parquet = file.suffix in (".pq", ".parquet")
    with reading(file):
        attributes = parquet_attributes(file) if parquet else read_header(file)
    names = names_of(attributes)
    said = _said(file)
    chosen = target or (said if said in names else names[-1])
    if chosen not in names:
        raise ConfigError(f"target: expected one of {names}, found {chosen!r}")
    table = _Table(str(file), tuple(attributes), names.index(chosen), one_hot, missing == "drop")
    schema = schema_of(ordered(_rows(table, [])))

    def batches() -> Iterator[pa.RecordBatch]:
        lines = parquet_lines(file) if parquet else read_lines(file)
        yield from to_batches(_batches(table, lines, batch_rows), schema, where=str(file))

    how = "as asked for" if target else "as the description says" if said == chosen else "the last one"
    notes = [f"The class is {chosen!r}, {how}; each example is an episode of one step, whose reward is 1."]
    if missing:
        notes.append("Examples without a value for some attribute are left out.")
    about = {"features": table.features(), "target": chosen, "classes": list(attributes[table.target].values or ())}
    return RowStream(
        os.fspath(path), "openml", schema, batches, alignment="outgoing", notes=tuple(notes), metadata=about,
        about=About("outgoing"),
    )  # fmt: skip


@dataclass(frozen=True)
class _Table:
    """How examples become rows."""

    where: str
    attributes: tuple[Attribute, ...]
    target: int
    one_hot: bool
    drop: bool

    def features(self) -> list[str]:
        names: list[str] = []
        for attribute in self._others():
            spread = attribute.values if self.one_hot and attribute.values is not None else None
            names += [f"{attribute.name}={value}" for value in spread] if spread is not None else [attribute.name]
        return names

    def _others(self) -> Sequence[Attribute]:
        return [attribute for place, attribute in enumerate(self.attributes) if place != self.target]

    def column(self, place: int, texts: Sequence[str], lines: Sequence[int]) -> npt.NDArray[Any]:
        """An attribute's values: numbers, or the places of its values among those declared."""
        attribute = self.attributes[place]
        try:
            if attribute.values is None:
                return np.array([float(text) for text in texts], np.float64)
            places = {value: number for number, value in enumerate(attribute.values)}
            return np.array([places[text] for text in texts], np.int64)
        except (ValueError, KeyError):
            for line, text in zip(lines, texts, strict=True):
                if not _holds(attribute, text):
                    wanted = "a number" if attribute.values is None else f"one of {list(attribute.values[:12])}"
                    hint = "; missing='drop' of read_openml leaves such examples out" if text == _MISSING else ""
                    raise DataError(
                        f"{self.where}, line {line} of the data: {attribute.name!r}: expected {wanted}, found "
                        f"{text[:40]!r}{hint}"
                    ) from None
            raise


def _holds(attribute: Attribute, text: str) -> bool:
    if attribute.values is not None:
        return text in attribute.values
    with suppress(ValueError):
        float(text)
        return True
    return False


def _batches(table: _Table, lines: Iterator[tuple[int, list[str]]], batch_rows: int) -> Iterator[Columns]:
    while some := list(islice(lines, batch_rows)):
        yield _rows(table, [line for line in some if not table.drop or _MISSING not in line[1]])


def _rows(table: _Table, lines: Sequence[tuple[int, list[str]]]) -> Columns:
    n = len(lines)
    numbers = [number for number, _ in lines]
    columns = [
        table.column(place, [values[place] for _, values in lines], numbers) for place in range(len(table.attributes))
    ]
    features: list[npt.NDArray[Any]] = []
    for place, (attribute, values) in enumerate(zip(table.attributes, columns, strict=True)):
        if place == table.target:
            continue
        if table.one_hot and attribute.values is not None:
            features.append(values[:, None] == np.arange(len(attribute.values)))
        else:
            features.append(values[:, None])
    action = columns[table.target]
    return {
        "action": action if action.dtype.kind == "i" else action[:, None],
        "reward": np.ones(n),
        "done": np.ones(n, np.int64),
        "episode_step": np.zeros(n, np.int64),
        "observation": np.concatenate([np.empty((n, 0)), *features], axis=1).astype(np.float64),
    }


# ---------------------------------------------------------------------- where it lies


def _file(root: Path) -> Path:
    if root.is_file():
        return root
    found = [root / "dataset.arff", *sorted(root.glob("dataset*.pq")), *sorted(root.glob("dataset*.arff"))]
    file = next((file for file in found if file.is_file()), None)
    if file is None:
        raise ConfigError(f"{root}: expected a file of ARFF or Parquet, or a folder with dataset.arff, found none")
    check_inside([file, root / "description.xml"], root)
    return file


def _said(file: Path) -> str | None:
    """The target that a description beside the file names: of OpenML's client, or in scikit-learn's cache."""
    with suppress(OSError, ValueError, EOFError):
        beside = file.parent / "description.xml"
        if beside.is_file():
            match = _DEFAULT.search(beside.open(encoding="utf-8").read(_MOST_JSON))
            return match[1] if match else None
        for cache in (parent for parent in file.parents if parent.name == "openml.org"):
            for description in sorted((cache / "api" / "v1" / "json" / "data").glob("*.gz")):
                with gzip.open(description) as packed:
                    about = json.loads(packed.read(_MOST_JSON)).get("data_set_description", {})
                if str(about.get("file_id")) in file.relative_to(cache).with_suffix("").parts:
                    said = about.get("default_target_attribute")
                    return said if isinstance(said, str) else None
    return None
