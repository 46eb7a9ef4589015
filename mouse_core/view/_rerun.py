"""Export of episodes to Rerun's viewer, or to a file for it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError, DataError
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store
from mouse_core.view.columns import described, read_numbers
from mouse_core.view.opening import shown_of
from mouse_core.view.pictures import picture

# Number of rows that are sent together, for numbers and for images.
_ROWS, _PICTURES = 1 << 14, 64


def to_rerun(*stores: Store, names: Sequence[str] = (), path: str | os.PathLike[str] | None = None) -> None:
    """Send the episodes of stores to Rerun: start its viewer, or write a file for it.

    Every column of numbers is an entity ``name/column`` with a scalar for each dimension; every column of images is
    an entity of images. The timelines are ``row``, ``episode`` and ``step``, the step within the episode. Missing
    values are NaN; images that are missing, or cannot be decoded, are left out.

    Args:
        *stores: The stores; all of their rows are read.
        names: Names of the stores.
        path: The file to write, which must end with ``.rrd``; None: start the viewer.

    Raises:
        ConfigError: No store is given, an argument is not a store, or the file has another suffix.
        ImportError: Rerun is not installed: it comes with the extra ``rerun``.
        DataError: A value is outside the bounds of its field.
    """
    if path is not None and Path(path).suffix != ".rrd":
        raise ConfigError(f"--rerun: expected the name of a file that ends in .rrd, found {str(path)!r:.200}")
    called = [*names, *(f"store {place + 1}" for place in range(len(names), len(stores)))]
    shown = shown_of(zip(called, stores, strict=False))
    try:
        rerun: Any = importlib.import_module("rerun")
    except ImportError:
        raise ImportError("handing episodes to Rerun needs it: pip install 'mouse-data[rerun]'") from None
    recording = rerun.RecordingStream("mouse view")
    if path is None:
        recording.spawn()
    else:
        recording.save(os.fspath(path))
    for one in shown:
        while not one.episodes.is_whole:
            one.episodes.advance(1.0)
        starts = one.episodes.columns()["start"]
        columns = [column for column in described(one.snapshot) if column["kind"] != "text"]
        for column in columns:
            entity = rerun.new_entity_path([one.name, column["name"]])
            send = _numbers if column["kind"] == "numbers" else _pictures
            send(rerun, recording, entity, one.snapshot, column["name"], starts)
    recording.flush()
    recording.disconnect()


def _times(rerun: Any, rows: Any, starts: Any) -> list[Any]:
    episode = starts.searchsorted(rows, side="right") - 1
    times = {"row": rows, "episode": episode, "step": rows - starts[episode]}
    return [rerun.TimeColumn(name, sequence=values) for name, values in times.items()]


def _numbers(rerun: Any, recording: Any, entity: str, snapshot: Snapshot, name: str, starts: Any) -> None:
    for begin in range(0, snapshot.num_rows, _ROWS):
        end = min(begin + _ROWS, snapshot.num_rows)
        values = read_numbers(snapshot, name, begin, end)
        if not values.shape[1]:
            continue
        scalars = rerun.Scalars.columns(scalars=values.reshape(-1)).partition([values.shape[1]] * (end - begin))
        recording.send_columns(entity, indexes=_times(rerun, np.arange(begin, end), starts), columns=scalars)


def _pictures(rerun: Any, recording: Any, entity: str, snapshot: Snapshot, name: str, starts: Any) -> None:
    for begin in range(0, snapshot.num_rows, _PICTURES):
        found = {}
        for row in range(begin, min(begin + _PICTURES, snapshot.num_rows)):
            try:
                found[row] = picture(snapshot, name, row)
            except (ConfigError, DataError):
                continue
        if found:
            blobs = [np.frombuffer(encoded, np.uint8) for encoded, _ in found.values()]
            images = rerun.EncodedImage.columns(blob=blobs, media_type=[kind for _, kind in found.values()])
            recording.send_columns(entity, indexes=_times(rerun, np.array([*found]), starts), columns=images)
