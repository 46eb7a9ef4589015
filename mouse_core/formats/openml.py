"""Reads tables of OpenML as contextual bandits, from the cache of OpenML's client or of scikit-learn.

An example of the table is an episode of one step: its features are the observation, and its class is the action with
reward 1. No step follows, so each example is a single row with the alignment "outgoing".
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, reading
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns import check_batch_rows
from mouse_core.formats.rows import open_parquet, parquet_batches
from mouse_core.metadata import DatasetMetadata
from mouse_core.spec import check_choice

__all__ = ["read_openml"]

_DEFAULT = re.compile(r"<oml:default_target_attribute>([^<]*)</oml:default_target_attribute>")
_MISSING = "?"
_MOST_JSON = 4 << 20
_MOST_VALUES = 10_000
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_QUOTED}|[^\s{{]+)\s*(.+?)\s*", re.IGNORECASE)
_VALUE = re.compile(rf"\s*({_QUOTED}|[^,'\"]*?)\s*(?:,|$)")
_NUMERIC = ("numeric", "real", "integer")
_MOST_HEADER = _MOST_LINE = 16 << 20


def read_openml(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    missing: str | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read a table of OpenML as a contextual bandit: a row for each example, with alignment "outgoing".

    ``observation`` holds the features in the order of the table, float64. For a categorical attribute, it holds the
    index of the value among the declared values. ``action`` is the index of the class, or, for a regression, the target
    value as a vector of length 1. ``reward`` and ``done`` are 1 in every row. ``metadata`` holds the names of features
    and classes. Features are not scaled; use a ``Normalizer`` for that.

    Args:
        path: An ARFF file (gzip or not), a Parquet file, or the folder of a dataset in the cache of OpenML's client,
            which contains the table and a description. For scikit-learn's cache, pass the file below
            ``data/v1/download``.
        target: The attribute to predict. By default, it is the target in the description, or the last attribute if
            there is no description.
        missing: "drop" omits examples that lack the value of an attribute; by default such examples raise a DataError.
        batch_rows: Largest number of rows of a batch.

    Raises:
        ConfigError: No table is found, or no attribute has the name ``target``.
        DataError: A file is damaged, or a value is missing or not declared; the message names line and attribute.
    """
    check_batch_rows(batch_rows)
    if missing not in (None, "drop"):
        raise ConfigError(f"missing: expected 'drop' or nothing, found {missing!r}")
    file = _file(Path(path))
    parquet = file.suffix in (".pq", ".parquet")
    with reading(file):
        if parquet:
            attributes = _parquet_attributes(file)
        else:
            with _text(file) as text:
                attributes = _header(text, file)
    names = [attribute.name for attribute in attributes]
    said = _said(file)
    chosen = target or (said if said in names else names[-1])
    check_choice("target", chosen, names)
    place = names.index(chosen)

    def rows() -> Iterator[Columns]:
        lines = _parquet_lines(file) if parquet else _read_lines(file)
        while some := list(islice(lines, batch_rows)):
            kept = [line for line in some if missing is None or _MISSING not in line[1]]
            yield _columns(attributes, place, kept, where=str(file))

    how = "as asked for" if target else "as the description says" if said == chosen else "the last one"
    notes = [f"The class is {chosen!r}, {how}; each example is an episode of one step, whose reward is 1."]
    if missing:
        notes.append("Examples without a value for some attribute are left out.")
    features = [attribute.name for attribute in attributes[:place] + attributes[place + 1 :]]
    described = {"features": features, "target": chosen, "classes": list(attributes[place].values or ())}
    first = _columns(attributes, place, [], where=str(file))
    metadata = DatasetMetadata("outgoing")
    return RowStream.of_columns(
        path, "openml", first, rows, notes=tuple(notes), format_metadata=described, metadata=metadata
    )


@dataclass(frozen=True)
class _Attribute:
    """A column of a table.

    Args:
        name: The name of the column.
        values: The declared values of a categorical column, in order; None for numbers.
    """

    name: str
    values: tuple[str, ...] | None

    def array(self, texts: Sequence[str], lines: Sequence[int], where: str) -> npt.NDArray[Any]:
        """Convert texts to numbers, or to indices of declared values.

        Raise DataError, naming the line, for any other text.
        """
        places = {value: number for number, value in enumerate(self.values or ())}
        read: Callable[[str], float] = float if self.values is None else places.__getitem__
        found = np.empty(len(texts), np.float64 if self.values is None else np.int64)
        for row, text in enumerate(texts):
            try:
                found[row] = read(text)
            except (ValueError, KeyError):
                wanted = "a number" if self.values is None else f"one of {list(self.values[:12])}"
                hint = "; missing='drop' of read_openml leaves such examples out" if text == _MISSING else ""
                line = f"{where}, line {lines[row]} of the data: {self.name!r}"
                raise DataError(f"{line}: expected {wanted}, found {text[:40]!r}{hint}") from None
        return found


def _columns(
    attributes: Sequence[_Attribute], target: int, lines: Sequence[tuple[int, list[str]]], *, where: str
) -> Columns:
    n, numbers = len(lines), [number for number, _ in lines]
    features, action = [np.empty((n, 0))], np.empty(0)
    for place, attribute in enumerate(attributes):
        values = attribute.array([texts[place] for _, texts in lines], numbers, where)
        if place == target:
            action = values if attribute.values is not None else values[:, None]
        else:
            features.append(values[:, None])
    return {
        "action": action,
        "reward": np.ones(n),
        "done": np.ones(n, np.int64),
        "episode_step": np.zeros(n, np.int64),
        "observation": np.concatenate(features, axis=1).astype(np.float64),
    }


# ---------------------------------------------------------------------- files


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
    """Return the target that the description states.

    The description is a file in the data's folder, or in scikit-learn's cache.
    """
    with suppress(OSError, ValueError, EOFError):
        beside = file.parent / "description.xml"
        if beside.is_file():
            match = _DEFAULT.search(beside.open(encoding="utf-8").read(_MOST_JSON))
            return match[1] if match else None
        for cache in (parent for parent in file.parents if parent.name == "openml.org"):
            for description in sorted((cache / "api" / "v1" / "json" / "data").glob("*.gz")):
                with gzip.open(description) as packed:
                    described = json.loads(packed.read(_MOST_JSON)).get("data_set_description", {})
                if str(described.get("file_id")) in file.relative_to(cache).with_suffix("").parts:
                    said = described.get("default_target_attribute")
                    return said if isinstance(said, str) else None
    return None


# ---------------------------------------------------------------------- ARFF


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number of each example, and its values as texts ("?" for a missing value)."""
    with _text(path) as file:
        count = len(_header(file, path))
        number = -1
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE), "")):
            if len(line) == _MOST_LINE:
                raise DataError(f"{path}, line {number} of the data: expected fewer than {_MOST_LINE} characters")
            text = line.strip()
            if not text or text.startswith("%"):
                continue
            if text.startswith("{"):
                raise DataError(f"{path}, line {number} of the data: expected all values, found a sparse row")
            try:
                values = _values(text)
            except DataError as error:
                raise DataError(f"{path}, line {number} of the data: {error}") from None
            if len(values) != count:
                raise DataError(f"{path}, line {number} of the data: expected {count} values, found {len(values)}")
            yield number, values
        if number < 0:
            raise DataError(f"{path}: expected examples after @data, found none")


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    way: Any = gzip.open if packed else open
    with way(path, "rt", encoding="utf-8") as text:
        yield text


def _header(file: IO[str], path: Path) -> list[_Attribute]:
    found: list[_Attribute] = []
    read = 0
    for line in iter(lambda: file.readline(_MOST_HEADER), ""):
        text, read = line.strip(), read + len(line)
        lower = text.lower()
        if lower.startswith("@data"):
            names = [attribute.name for attribute in found]
            if not found or len(set(names)) < len(names):
                raise DataError(f"{path}: expected attributes of different names, found {names[:12]}")
            return found
        if lower.startswith("@attribute"):
            match = _ATTRIBUTE.fullmatch(text)
            if not match:
                raise DataError(f"{path}: expected @attribute NAME TYPE, found {text[:80]!r}")
            name, kind = _unquoted(match[1]), match[2]
            is_numeric = kind.split()[0].lower() in _NUMERIC
            if not is_numeric and not (kind.startswith("{") and kind.endswith("}")):
                wanted = "expected numbers or {one, of, these}"
                raise DataError(f"{path}: attribute {name!r}: {wanted}, found {kind[:40]!r}")
            found.append(_Attribute(name, None if is_numeric else tuple(_values(kind[1:-1].strip()))))
        elif text and not text.startswith("%") and not lower.startswith("@relation"):
            break
        if read > _MOST_HEADER:
            break
    raise DataError(
        f"{path}: expected ARFF, @relation, @attribute and @data, found {len(found)} attributes and no @data"
    )


def _values(text: str) -> list[str]:
    if "'" not in text and "\\" not in text:  # the csv module is fast, but supports only "
        try:
            return [value.strip() for value in next(csv.reader([text], skipinitialspace=True))]
        except csv.Error as error:
            raise DataError(f"expected values with commas between them, found a {error}") from None
    found: list[str] = []
    place = 0
    while place <= len(text):
        match = _VALUE.match(text, place)
        if match is None:
            raise DataError(f"expected values with commas between them, found {text[place : place + 40]!r}")
        found.append(_unquoted(match[1]))
        if match.end() == len(text) and not text.endswith(",", place):
            break
        place = match.end()
        if place == len(text):  # a comma at the end: an empty value
            found.append("")
            break
    return found


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


# ---------------------------------------------------------------------- Parquet


def _parquet_attributes(path: Path) -> list[_Attribute]:
    """Return the attributes of a Parquet file: numbers, or categories with their texts in alphabetical order.

    Raises:
        DataError: The file is damaged, or a column has another type.
    """
    schema = open_parquet(path).schema_arrow
    texts: dict[str, set[str]] = {field.name: set() for field in schema if _is_text(field.type, field.name, path)}
    for batch in parquet_batches(path, 1 << 16) if texts else ():
        for name, seen in texts.items():
            seen |= {str(value) for value in pc.unique(batch.column(name)).to_pylist() if value is not None}
            if len(seen) > _MOST_VALUES:
                raise DataError(f"{path}: {name!r}: expected at most {_MOST_VALUES} different values, found more")
    return [
        _Attribute(field.name, tuple(sorted(texts[field.name])) if field.name in texts else None) for field in schema
    ]


def _parquet_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each example, and its values as texts, like ``_read_lines``."""
    number = 0
    for batch in parquet_batches(path, 1 << 13):
        columns = [column.to_pylist() for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield number, [_MISSING if value is None else str(value) for value in values]
            number += 1


def _is_text(kind: pa.DataType, name: str, path: Path) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind):
        return True
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return False
    raise DataError(f"{path}: {name!r}: expected a column of numbers or texts, found {kind}")
