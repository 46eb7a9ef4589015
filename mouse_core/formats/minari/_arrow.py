"""Minari's Arrow and Parquet storages as pieces of episodes, straight from the files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.formats.columns.blocks import bytes_a_row, rows_at_once
from mouse_core.formats.columns.named import from_arrow
from mouse_core.formats.columns.steps import at
from mouse_core.formats.minari._pieces import BUDGET, KNOWN, Piece, picture_bytes, sampled, shaped, subspace
from mouse_core.formats.minari._spaces import is_picture
from mouse_core.formats.rows import file_batches


def arrow_pieces(
    path: Path, metadata: Mapping[str, Any], spaces: Mapping[str, Any], *, rows: int, infos: bool, sample: int = 0
) -> Iterator[Piece]:
    """Pieces of all episodes of a folder of Arrow or Parquet files; arguments as in ``h5_pieces``."""
    suffix = metadata["data_format"]
    for number in sampled(int(metadata.get("total_episodes", 0)), sample):
        folder = path / str(number)
        files = sorted(folder.glob(f"*.{suffix}"), key=lambda file: [*map(int, re.findall(r"\d+", file.name))])
        if not files:
            raise damaged(folder, f"expected a file *.{suffix}, found none", at=f"episode {number}")
        check_inside([*files, folder / "metadata.json"], path)
        about = _about(folder / "metadata.json")
        begins, before = 0, None
        for file in files:
            with reading(file):
                for batch in _record_batches(file, rows, picture_bytes(spaces)):
                    piece, before = _arrow_piece(batch, number, begins, before, spaces, infos)
                    begins += batch.num_rows
                    piece.about = about
                    yield piece
                    if sample:
                        break
            if sample:
                break
        total = about.pop("total_steps", None)
        if not sample and total is not None and begins != total + 1:
            raise damaged(folder, f"expected {total} steps, found {begins - 1}", at=f"episode {number}")


def _about(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found = read_json_object(path)
    with reading(path):
        about = {key: found[key] for key in ("seed", "total_steps") if found.get(key) is not None}
        if found.get("options"):
            about["options"] = json.dumps(found["options"], sort_keys=True)
        return about


def _record_batches(file: Path, rows: int, decoded: int) -> Iterator[pa.RecordBatch]:
    """The rows of a file, as many at a time as ``BUDGET`` bytes hold with pictures of ``decoded`` bytes a row."""
    for batch in file_batches(file, rows_at_once(decoded + 64, most=rows, budget=BUDGET)):
        step = rows_at_once(bytes_a_row(batch) + decoded, most=rows, budget=BUDGET)
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _arrow_piece(
    batch: pa.RecordBatch, number: int, begins: int, before: Any, spaces: Mapping[str, Any], infos: bool
) -> tuple[Piece, Any]:
    """A piece, and what its last row holds of the transition that leaves it."""
    missing = [name for name in KNOWN if name not in batch.schema.names]
    if missing:
        raise DataError(f"expected columns {list(KNOWN)}, found no {missing} among {batch.schema.names}")
    values = {name: _arrow_values(batch.column(name), spaces.get(name), name) for name in KNOWN}
    observations = values.pop("observations")
    arriving = {
        name: at(value, slice(None, -1)) if begins == 0 else _shift(before[name], value)
        for name, value in values.items()
    }
    last = {name: at(value, slice(-1, None)) for name, value in values.items()}
    beside: dict[str, Any] = {}
    if infos and "infos" in batch.schema.names:
        _infos(batch.column("infos"), "infos", beside)
    for name in batch.schema.names:
        if name not in KNOWN and name not in ("infos", "episode_id"):
            beside[name] = from_arrow(batch.column(name), where=name)
    return Piece(number, begins, observations, arriving, beside), last


def _arrow_values(array: Any, space: Any, where: str) -> Any:
    if pa.types.is_struct(array.type):
        parts = {}
        for child, part in zip(array.type, array.flatten(), strict=True):
            here = f"{where}/{child.name}"
            parts[child.name] = _arrow_values(part, subspace(space, child.name, here), here)
        if space is not None and space["type"] == "Tuple":
            return tuple(parts[str(index)] for index in range(len(parts)))
        return parts
    if array.null_count and _texts(array.type):
        # The last row of what leaves an observation is a filler, and null for text.
        array = array.fill_null(b"" if pa.types.is_binary(array.type) else "")
    values = from_arrow(array, where=where)
    picture = space is not None and is_picture(space, where=where)
    if picture and where.startswith("actions") and values.dtype.kind == "O":
        values = values.copy()
        values[values == b""] = values[0]
    return shaped(values, space, where=where)


def _texts(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type) or pa.types.is_large_string(data_type))


def _infos(array: Any, path: str, found: dict[str, Any]) -> None:
    for child, part in zip(array.type, array.flatten(), strict=True):
        here = f"{path}/{child.name}"
        if pa.types.is_struct(child.type):
            _infos(part, here, found)
            continue
        values = from_arrow(part, where=here)
        shape = (child.metadata or {}).get(b"shape", b"").split(b",")
        if shape != [b""]:
            values = values.reshape(len(values), *(int(size) for size in shape))
        found[here] = values


def _shift(before: Any, value: Any) -> Any:
    """``value`` one row later, with ``before`` as its first row."""
    if isinstance(value, Mapping):
        return {name: _shift(before[name], item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_shift(one, item) for one, item in zip(before, value, strict=True))
    return np.concatenate([before, value[:-1]])
