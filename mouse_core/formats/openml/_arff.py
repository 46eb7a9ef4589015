"""ARFF, the text format of OpenML: a header of each attribute's name and type, and a line of values an example."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mouse_core.errors import DataError

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_QUOTED}|[^\s{{]+)\s*(.+?)\s*", re.IGNORECASE)
_VALUE = re.compile(rf"\s*({_QUOTED}|[^,'\"]*?)\s*(?:,|$)")
_NUMERIC = ("numeric", "real", "integer")
_MOST_HEADER = _MOST_LINE = 16 << 20


@dataclass(frozen=True)
class Attribute:
    """A column of a table.

    Args:
        name: Its name.
        values: The values that it may have, in the order in which they are declared; None of numbers.
    """

    name: str
    values: tuple[str, ...] | None


def read_header(path: Path) -> list[Attribute]:
    """The attributes of a file.

    Raises:
        DataError: It is no ARFF, or has attributes that are neither numbers nor one of some values.
    """
    with _text(path) as file:
        return _header(file, path)


def read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The values of each example as texts ("?" where missing), with the number of its line."""
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


def _header(file: IO[str], path: Path) -> list[Attribute]:
    found: list[Attribute] = []
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


def _attribute(text: str, path: Path) -> Attribute:
    match = _ATTRIBUTE.fullmatch(text)
    if not match:
        raise DataError(f"{path}: expected @attribute NAME TYPE, found {text[:80]!r}")
    name, kind = _plain(match[1]), match[2]
    if kind.startswith("{") and kind.endswith("}"):
        return Attribute(name, tuple(_values(kind[1:-1].strip())))
    if kind.split()[0].lower() in _NUMERIC:
        return Attribute(name, None)
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
        found.append(_plain(match[1]))
        if match.end() == len(text) and not text.endswith(",", place):
            break
        place = match.end()
        if place == len(text):  # a comma at the end: a value that is empty
            found.append("")
            break
    return found


def _plain(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


def names_of(attributes: Sequence[Attribute]) -> list[str]:
    """The attributes' names."""
    return [attribute.name for attribute in attributes]
