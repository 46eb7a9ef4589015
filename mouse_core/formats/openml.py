"""Read tables of OpenML, from the caches of scikit-learn's ``fetch_openml`` and OpenML's client, as contextual bandits.

An example is an episode of one step: its features are the observation, its class is the action whose reward is 1.
No step follows an example, so a row holds all of it: the alignment is "outgoing".
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, reading
from mouse_core.formats._files.parquet import open_parquet, parquet_batches
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows
from mouse_core.formats.columns.named import Columns

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
    one_hot: bool = False,
    missing: str | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read a table of OpenML as a contextual bandit: an example a row, with alignment "outgoing".

    ``observation`` holds the features in the order of the table, float64. A categorical attribute is the index of its
    value among those declared, or one-hot with ``one_hot``. ``action`` is the index of the class; for a regression it
    is the number, as a vector of one. ``reward`` and ``done`` are 1 in every row. ``metadata`` has the names of
    features and classes. Features are not scaled; use a ``Normalizer`` for that.

    Args:
        path: A file of ARFF, packed by gzip or not, or of Parquet; or the folder of a dataset in the cache of OpenML's
            client, which also holds a description. Of scikit-learn's cache, the file below ``data/v1/download``.
        target: The attribute to predict; by default the one that the description names, else the last.
        one_hot: Whether a categorical attribute becomes one feature for each of its values.
        missing: "drop" leaves out examples that lack the value of an attribute; by default they raise a DataError.
        batch_rows: At most how many rows a batch has.

    Raises:
        ConfigError: No table is found, or ``target`` is no attribute.
        DataError: A file is damaged, or a value is missing or not declared; the message names line and attribute.
    """
    check_batch_rows(batch_rows)
    if missing not in (None, "drop"):
        raise ConfigError(f"missing: expected 'drop' or nothing, found {missing!r}")
    file = _file(Path(path))
    parquet = file.suffix in (".pq", ".parquet")
    with reading(file):
        attributes = _parquet_attributes(file) if parquet else _read_header(file)
    names = [attribute.name for attribute in attributes]
    said = _said(file)
    chosen = target or (said if said in names else names[-1])
    if chosen not in names:
        raise ConfigError(f"target: expected one of {names}, found {chosen!r}")
    table = _Table(str(file), tuple(attributes), names.index(chosen), one_hot, missing == "drop")

    def rows() -> Iterator[Columns]:
        return _batches(table, _parquet_lines(file) if parquet else _read_lines(file), batch_rows)

    how = "as asked for" if target else "as the description says" if said == chosen else "the last one"
    notes = [f"The class is {chosen!r}, {how}; each example is an episode of one step, whose reward is 1."]
    if missing:
        notes.append("Examples without a value for some attribute are left out.")
    about = {"features": table.features(), "target": chosen, "classes": list(attributes[table.target].values or ())}
    stream = RowStream.of_columns(path, "openml", _rows(table, []), rows, notes=tuple(notes), metadata=about)
    return stream.replace(alignment="outgoing")


@dataclass(frozen=True)
class _Table:
    """The attributes of a table, and how examples become rows."""

    where: str
    attributes: tuple[_Attribute, ...]
    target: int
    one_hot: bool
    drop: bool

    def features(self) -> list[str]:
        names: list[str] = []
        for attribute in self._others():
            spread = attribute.values if self.one_hot and attribute.values is not None else None
            names += [f"{attribute.name}={value}" for value in spread] if spread is not None else [attribute.name]
        return names

    def _others(self) -> Sequence[_Attribute]:
        return [attribute for place, attribute in enumerate(self.attributes) if place != self.target]

    def column(self, place: int, texts: Sequence[str], lines: Sequence[int]) -> npt.NDArray[Any]:
        """Values of an attribute: numbers, or indices among its declared values."""
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


def _holds(attribute: _Attribute, text: str) -> bool:
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
    """Target that a description names, beside the file (OpenML's client) or in scikit-learn's cache."""
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


# ---------------------------------------------------------------------- ARFF


@dataclass(frozen=True)
class _Attribute:
    """A column of a table.

    Args:
        name: The name of the column.
        values: The declared values of a categorical column, in order; None for numbers.
    """

    name: str
    values: tuple[str, ...] | None


def _read_header(path: Path) -> list[_Attribute]:
    """Return the attributes of an ARFF file.

    Raises:
        DataError: The file is no ARFF, or an attribute is neither numeric nor categorical.
    """
    with _text(path) as file:
        return _header(file, path)


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the values of each example as texts ("?" for a missing value)."""
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
                raise DataError(f"{path}, line {number} of the data: expected all values, found a sparse one")
            try:
                values = _values(text)
            except DataError as error:
                raise DataError(f"{path}, line {number} of the data: {error}") from None
            if len(values) != count:
                raise DataError(f"{path}, line {number} of the data: expected {count} values, found {len(values)}")
            yield number, values
        if number < 0:
            raise DataError(f"{path}: expected examples behind @data, found none")


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
            found.append(_attribute(text, path))
        elif text and not text.startswith("%") and not lower.startswith("@relation"):
            break
        if read > _MOST_HEADER:
            break
    raise DataError(
        f"{path}: expected ARFF, @relation, @attribute and @data, found {len(found)} attributes and no @data"
    )


def _attribute(text: str, path: Path) -> _Attribute:
    match = _ATTRIBUTE.fullmatch(text)
    if not match:
        raise DataError(f"{path}: expected @attribute NAME TYPE, found {text[:80]!r}")
    name, kind = _unquoted(match[1]), match[2]
    if kind.startswith("{") and kind.endswith("}"):
        return _Attribute(name, tuple(_values(kind[1:-1].strip())))
    if kind.split()[0].lower() in _NUMERIC:
        return _Attribute(name, None)
    raise DataError(f"{path}: attribute {name!r}: expected numbers or {{one, of, these}}, found {kind[:40]!r}")


def _values(text: str) -> list[str]:
    if "'" not in text and "\\" not in text:  # the csv module is fast, and knows " alone
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
        if place == len(text):  # a comma at the end: a value that is empty
            found.append("")
            break
    return found


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


# ---------------------------------------------------------------------- Parquet


def _parquet_attributes(path: Path) -> list[_Attribute]:
    """Return the attributes of a Parquet file: numbers, or the texts that occur, in alphabetical order.

    Raises:
        DataError: The file is damaged, or a column has another type.
    """
    schema = open_parquet(path).schema_arrow
    texts: dict[str, set[str]] = {field.name: set() for field in schema if _is_text(field.type, field.name, path)}
    for batch in parquet_batches(path, 1 << 16) if texts else ():
        for name, seen in texts.items():
            seen |= {str(value) for value in pc.unique(batch.column(name)).to_pylist() if value is not None}
            if len(seen) > _MOST_VALUES:
                raise DataError(f"{path}: {name!r}: expected one of some values, found more than {_MOST_VALUES}")
    return [
        _Attribute(field.name, tuple(sorted(texts[field.name])) if field.name in texts else None) for field in schema
    ]


def _parquet_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the values of each example, as ``_read_lines`` does."""
    number = 0
    for batch in parquet_batches(path, 1 << 13):
        columns = [column.to_pylist() for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield number, ["?" if value is None else str(_as_float(value)) for value in values]
            number += 1


def _as_float(value: object) -> object:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _is_text(kind: pa.DataType, name: str, path: Path) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind):
        return True
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return False
    raise DataError(f"{path}: {name!r}: expected a column of numbers or texts, found {kind}")
