"""Datasets of any size with the structure of recorded experience, written without holding them.

Every value is a pure function of its row number (`rows_of`), so whoever reads a dataset can say what must be there
without a second copy. Episodes differ in length; most end in a terminal step, the longest are truncated.
The folder is what `datasets.load_from_disk` reads.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]

ACTIONS = 18
OBSERVATION = 17
STATES = 500
EXTRA_WIDTH = 8
# Lengths of episodes, and how often they occur in a hundred: many that end early, some long ones, and truncated ones.
_LENGTHS = ((3, 5), (24, 45), (101, 30), (277, 15), (1001, 5))
_TRUNCATED_FROM = 1000
_EPISODES_IN_CYCLE = 1000
# So many values are made at a time.
_VALUES_IN_BLOCK = 1 << 21


@dataclass(frozen=True)
class Kind:
    """What a row holds."""

    name: str
    # Columns besides action, reward, done and episode_step, for row numbers int64 `[n]` and their hash.
    make: Callable[[Int64s, npt.NDArray[np.uint32]], Columns]
    values: int  # about how many numbers a row has
    batch_rows: int = 1000  # in a record batch as `datasets` writes them


# ---------------------------------------------------------------------- values as a function of the row number


@lru_cache(maxsize=1)
def _cycle() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int8]]:
    """Step within its episode and done code of the rows of a cycle of episodes."""
    rng = np.random.RandomState(7)  # a stream that NumPy promises not to change
    lengths = np.array([length for length, _ in _LENGTHS])
    often = np.array([weight for _, weight in _LENGTHS]) / 100
    chosen = lengths[rng.choice(len(lengths), _EPISODES_IN_CYCLE, p=often)]
    ends = np.cumsum(chosen)
    step = np.arange(ends[-1]) - np.repeat(ends - chosen, chosen)
    done = np.zeros(ends[-1], np.int8)
    done[ends - 1] = np.where(chosen >= _TRUNCATED_FROM, 2, 1)
    return step.astype(np.int32), done


def _hash(rows: Int64s) -> npt.NDArray[np.uint32]:
    mixed = (rows ^ (rows >> 32) * 0x9E3779B1).astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def _floats(mixed: npt.NDArray[np.uint32], width: int, stream: int) -> npt.NDArray[np.float32]:
    """Numbers in -1..1, float32 `[n, width]`, in steps that float32 holds exactly."""
    place = (np.arange(stream * 1000, stream * 1000 + width, dtype=np.uint64) * 0x9E3779B9).astype(np.uint32)
    bits = mixed[:, None] + place
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x7FEB352D)
    bits >>= np.uint32(8)
    values = bits.astype(np.float32)
    values *= np.float32(2.0**-23)
    values -= np.float32(1)
    return values


def rows_of(kind: Kind, rows: Int64s) -> Columns:
    """The values of some rows by column: `[n]`, or `[n, width]`; images as uint8 arrays or as encoded bytes."""
    steps, dones = _cycle()
    place = rows % len(steps)
    step = steps[place].astype(np.int64)
    mixed = _hash(rows)
    first = step == 0  # the row that an episode begins with: a placeholder action, reward 0
    return {
        "action": np.where(first, 0, mixed % np.uint32(ACTIONS)).astype(np.int64),
        "reward": np.where(first, np.float32(0), _floats(mixed, 1, 1)[:, 0]),
        "done": dones[place].astype(np.int64),
        "episode_step": step,
        **kind.make(rows, mixed),
    }


def _state(rows: Int64s, mixed: npt.NDArray[np.uint32]) -> Columns:
    return {
        "observation": _floats(mixed, OBSERVATION, 2),
        "metadata_q_star": _floats(mixed, ACTIONS, 3),
    }


def _discrete(rows: Int64s, mixed: npt.NDArray[np.uint32]) -> Columns:
    return {"observation_discrete": (mixed >> np.uint32(3)).astype(np.int64) % STATES}


def wide(extra: int) -> Kind:
    """State rows and `extra` further columns `extra_0`, `extra_1`, ... of eight numbers each."""

    def make(rows: Int64s, mixed: npt.NDArray[np.uint32]) -> Columns:
        more = {f"extra_{number}": _floats(mixed, EXTRA_WIDTH, 4 + number) for number in range(extra)}
        return _state(rows, mixed) | more

    return Kind("wide", make, OBSERVATION + ACTIONS + EXTRA_WIDTH * extra)


def frames(rows: Int64s, mixed: npt.NDArray[np.uint32], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Grey frames like those of an old arcade game: rows of bricks, some gone, a paddle and a ball."""
    n = len(rows)
    pixels = np.zeros((n, height, width), np.uint8)
    pixels[:, : height // 12] = 142
    pixels[:, :, : width // 20] = pixels[:, :, -(width // 20) :] = 142
    brick_height, brick_width = height // 28, width // 18
    standing = (mixed[:, None] >> np.arange(18, dtype=np.uint32)) & np.uint32(1)
    for layer in range(6):
        top = height // 4 + layer * brick_height
        colours = (np.roll(standing, layer, axis=1) * (200 - 25 * layer)).astype(np.uint8)
        line = np.repeat(colours, brick_width, axis=1)[:, : width - 2 * (width // 20)]
        pixels[:, top : top + brick_height, width // 20 : width // 20 + line.shape[1]] = line[:, None]
    columns, lines = np.arange(width), np.arange(height)
    paddle = (mixed % np.uint32(width - width // 6)).astype(np.int64)[:, None]
    at_paddle = (columns >= paddle) & (columns < paddle + width // 8)
    pixels[:, -(height // 14) : -(height // 24)] |= (at_paddle * np.uint8(200))[:, None].astype(np.uint8)
    x = ((mixed >> np.uint32(8)) % np.uint32(width - 4)).astype(np.int64)[:, None]
    y = height // 2 + ((mixed >> np.uint32(16)) % np.uint32(height // 3)).astype(np.int64)[:, None]
    ball = ((lines >= y) & (lines < y + 3))[:, :, None] & ((columns >= x) & (columns < x + 2))[:, None]
    return np.where(ball, np.uint8(236), pixels)


def raw_images(height: int, width: int) -> Kind:
    """Grey frames as `Array2D`, observation_image uint8 `[height, width]`."""

    def make(rows: Int64s, mixed: npt.NDArray[np.uint32]) -> Columns:
        return {"observation_image": frames(rows, mixed, height, width)}

    return Kind("images", make, height * width, 100)


def png_images(height: int, width: int, *, colour: bool) -> Kind:
    """Frames as PNG, grey or RGB, observation_image as bytes."""

    def make(rows: Int64s, mixed: npt.NDArray[np.uint32]) -> Columns:
        from PIL import Image

        encoded = np.empty(len(rows), object)
        for place, pixels in enumerate(frames(rows, mixed, height, width)):
            if colour:
                pixels = np.stack([pixels, pixels >> 1, 255 - pixels], axis=-1)
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, format="PNG")
            encoded[place] = stream.getvalue()
        return {"observation_image": encoded}

    return Kind("png", make, height * width * (3 if colour else 1), 100)


STATE = Kind("state", _state, OBSERVATION + ACTIONS)
DISCRETE = Kind("discrete", _discrete, 1)

# ---------------------------------------------------------------------- as `datasets` writes it


def write(kind: Kind, folder: Path, rows: int, *, files: int = 1) -> Path:
    """Write rows `0..rows - 1` into so many files below `folder`, which it returns; not again where they are."""
    if (folder / "state.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    features = _features(kind)
    schema = features.arrow_schema
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    edges = [rows * number // files for number in range(files + 1)]
    for name, begin, end in zip(names, edges[:-1], edges[1:], strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for table in _tables(kind, schema, begin, end):
                writer.write_table(table, max_chunksize=kind.batch_rows)
    info = {"citation": "", "description": "", "features": features.to_dict(), "homepage": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": f"{kind.name}-{rows}-{kind.batch_rows}-{files}",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    return folder


def _tables(kind: Kind, schema: pa.Schema, begin: int, end: int) -> Iterator[pa.Table]:
    block = max(1, _VALUES_IN_BLOCK // kind.values // kind.batch_rows) * kind.batch_rows
    for first in range(begin, end, block):
        columns = rows_of(kind, np.arange(first, min(first + block, end)))
        yield pa.table([_array(columns[field.name], field.type) for field in schema], schema=schema)


def _array(values: npt.NDArray[Any], data_type: pa.DataType) -> pa.Array:
    if values.dtype == object:
        paths = pa.nulls(len(values), pa.string())
        return pa.StructArray.from_arrays([pa.array(values, pa.binary()), paths], ["bytes", "path"])
    storage = data_type.storage_type if isinstance(data_type, pa.BaseExtensionType) else data_type
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.ListArray.from_arrays(np.arange(0, len(array) + 1, size, dtype=np.int32), array)
    array = array.cast(storage)
    return pa.ExtensionArray.from_storage(data_type, array) if storage is not data_type else array


def _features(kind: Kind) -> Any:
    import datasets

    features: dict[str, Any] = {}
    for name, values in rows_of(kind, np.zeros(1, np.int64)).items():
        if values.dtype == object:
            features[name] = datasets.Image()
        elif values.ndim == 3:
            features[name] = datasets.Array2D(values.shape[1:], str(values.dtype))
        else:
            value = datasets.Value(str(values.dtype))
            features[name] = datasets.List(value) if values.ndim == 2 else value
    return datasets.Features(features)
