"""RLDS datasets as TensorFlow Datasets keeps them, read without TensorFlow.

A folder holds ``dataset_info.json`` and ``features.json``, and files of records: TFRecord or ArrayRecord. A record is
an episode: a tf.train.Example with the values of all its steps one after the other.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.files.writing import making
from mouse_core.formats._files.tfrecord import READERS
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows
from mouse_core.formats.columns.named import is_image, to_batch
from mouse_core.formats.columns.steps import Stack, rlds_steps
from mouse_core.formats.pictures import IMAGE
from mouse_core.formats.rlds.reading import check_last_step, first_batch, last_step_notes, stack_rows
from mouse_core.formats.sources import episodes_of
from mouse_core.formats.tfds._features import Leaf, Split, parse_example, parse_features, parse_info
from mouse_core.formats.tfds._in_place import (
    STEPS,
    RecordFiles,
    episode_pieces,
    image_columns,
    index_records,
    is_column,
    is_encoded,
    is_of_step,
    repeatable,
)
from mouse_core.images.pixels import encode_png
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.remote.parquet import DecodedRows

__all__ = ["read_tfds", "write_tfds"]

# What is looked at to see whether a last step holds a transition.
_BROUGHT = re.compile(r"steps/(is_first|is_last|reward|action(/.*)?)$")


def read_tfds(
    path: str | os.PathLike[str],
    *,
    splits: str | Sequence[str] | None = None,
    final: str | None = None,
    last_step: str = "observation",
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read an RLDS dataset of TFDS as rows, with the columns of ``mouse_core.formats.rlds.read_rlds``.

    Pictures are decoded. The CRCs of TFRecord files are verified.

    ``to_store()`` of TFRecord files gives a store whose rows stay there: where records begin
    is found once, and kept; a record is read when a batch wants rows of it, and of its pictures those that the batch
    has, which are decoded then. The CRC of a record is compared when it is first read, for which all of it is.

    Args:
        path: The folder with ``features.json``, or a folder above it that holds no other dataset.
        splits: Names of the splits to read, in this order; by default all, one after the other.
        final: See ``read_rlds``; needed for episodes whose steps end without ``is_last``, and for transitions.
        last_step: See ``read_rlds``: "transition" if the action and the reward of the last step of an episode count.
        batch_rows: Most rows of a batch.

    Returns:
        The rows; ``metadata`` is the content of ``dataset_info.json``.

    Raises:
        ConfigError: The folder holds no RLDS dataset of TFDS, a split is unknown, or files have another format.
        DataError: A file is damaged; the message names file and record.
        ImportError: The files are ArrayRecord and its package is not installed.
    """
    check_last_step(last_step, final, where=os.fspath(path))
    check_batch_rows(batch_rows)
    folder, described, leaves, info, kind, chosen = _described(path, splits)

    def pieces(leaves: Mapping[str, Leaf] = leaves) -> Iterator[Stack]:
        return _pieces(chosen, kind, leaves, batch_rows)

    schema = first_batch(pieces(), final=final, path=str(folder), last_step=last_step).schema
    notes = _notes(described, str(info.get("name", "")))
    if last_step == "observation":
        notes += last_step_notes(pieces({name: leaf for name, leaf in leaves.items() if _BROUGHT.match(name)}))

    def batches() -> Iterator[pa.RecordBatch]:
        for columns, where in stack_rows(pieces(), final=final, path=str(folder), last_step=last_step):
            yield to_batch(columns, schema, where=where)

    lengths = [length for split in chosen for length in (split.lengths or (-1,))]
    return RowStream(
        os.fspath(path),
        "tfds",
        schema,
        batches,
        episodes=None if -1 in lengths else sum(lengths),
        notes=notes,
        metadata=info,
        opened=partial(store_of, path, splits=splits, final=final, last_step=last_step) if kind == "tfrecord" else None,
        about=About("arrived"),
    )


def store_of(
    path: str | os.PathLike[str],
    *,
    splits: str | Sequence[str] | None = None,
    final: str | None = None,
    last_step: str = "observation",
    verify: bool = True,
    make: Callable[..., DatasetStore] = DatasetStore,
    **options: Any,
) -> DatasetStore:
    """Return a store of a dataset that reads its TFRecord shards in place; see ``read_tfds``.

    Args:
        path, splits, final, last_step: See ``read_tfds``.
        verify: Whether to compare the CRC of a record when its rows are first read, which reads the whole record once.
        make: Makes the store.
        **options: Options of the store.

    Raises:
        ConfigError: As in ``read_tfds``, or the files are no TFRecord.
    """
    folder, _, leaves, _, kind, chosen = _described(path, splits)
    if kind != "tfrecord":
        raise ConfigError(
            f"{folder}: expected TFRecord files, whose rows can stay where they are, found {kind}; formats.open reads "
            "them, and mouse convert makes a store of them"
        )
    schema = read_tfds(path, splits=splits, final=final, last_step=last_step).schema
    pictures = image_columns(leaves)
    schema = pa.schema([pa.field(one.name, IMAGE) if one.name in pictures else one for one in schema])
    store = make(**options)
    files = RecordFiles(index_records(folder, chosen), leaves, schema, final, last_step, verify)
    store._rows = DecodedRows(str(folder), store._rows.schema, store._rows.budget, files, About("arrived"))
    return store


def _described(path: str | os.PathLike[str], splits: str | Sequence[str] | None) -> tuple[Any, ...]:
    """Return folder, features, features that are columns, metadata, format of files and splits of a dataset."""
    folder = _folder(Path(path))
    described = parse_features(folder / "features.json")
    leaves = {name: leaf for name, leaf in described.items() if is_column(leaf)}
    if f"{STEPS}is_first" not in leaves or f"{STEPS}reward" not in leaves:
        raise ConfigError(f"{folder}: expected an RLDS dataset with a feature 'steps', found {sorted(leaves)[:12]}")
    info, kind, found = parse_info(folder)
    return folder, described, leaves, info, kind, _chosen(found, splits, folder)


def _folders(path: Path) -> list[Path]:
    """Return the folders of datasets at or below ``path``: versions, and configurations with versions."""
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        files = sorted(path.glob(f"{depth}features.json"))
        if found := [file.parent for file in files if (file.parent / "dataset_info.json").is_file()]:
            return found
    return []


def _folder(path: Path) -> Path:
    found = _folders(path)
    if len(found) != 1:
        shown = f"{len(found)}: {[str(folder) for folder in found[:4]]}" if found else "none"
        raise ConfigError(f"{path}: expected a folder with features.json and dataset_info.json, found {shown}")
    check_inside([found[0] / "features.json", found[0] / "dataset_info.json"], path)
    return found[0]


def _chosen(found: list[Split], names: str | Sequence[str] | None, folder: Path) -> list[Split]:
    by_name = {split.name: split for split in found}
    chosen = [names] if isinstance(names, str) else list(by_name if names is None else names)
    for name in chosen:
        if name not in by_name:
            raise ConfigError(f"{folder}: splits: expected some of {list(by_name)}, found {name!r}")
    return [by_name[name] for name in chosen]


def _notes(leaves: Mapping[str, Leaf], name: str) -> tuple[str, ...]:
    notes = []
    if name.startswith("d4rl_"):
        notes.append("TFDS ends every episode of its D4RL datasets with the last observation of the whole dataset.")
    rounded = [leaf.name for leaf in leaves.values() if leaf.dtype == "float64" and not is_encoded(leaf)]
    if rounded:
        notes.append(f"TFDS stores {rounded} as 32-bit floats, though declared as float64.")
    unlike = [leaf.name for leaf in leaves.values() if not is_column(leaf)]
    if unlike:
        notes.append(f"{unlike} cannot be columns (videos, sounds, sequences in sequences): left out.")
    large = [leaf.name for leaf in leaves.values() if is_column(leaf) and not (is_of_step(leaf) or repeatable(leaf))]
    if large:
        notes.append(f"{large} belong to whole episodes and are too large to be repeated in every row: left out.")
    return tuple(notes)


def _pieces(splits: list[Split], kind: str, leaves: Mapping[str, Leaf], batch_rows: int) -> Iterator[Stack]:
    """Yield all episodes of some splits, in pieces."""
    number = 0
    for split in splits:
        for index, file in enumerate(split.files):
            count = 0
            for record, at in READERS[kind](file):
                with reading(file, at=at):
                    yield from episode_pieces(parse_example(record), number, leaves, batch_rows)
                number += 1
                count += 1
            if split.lengths is not None and count != split.lengths[index]:
                raise damaged(file, f"expected {split.lengths[index]} records, found {count}")


def write_tfds(
    rows: Any,
    path: str | os.PathLike[str],
    *,
    name: str = "rlds",
    version: str = "1.0.0",
    split: str = "train",
    episodes_per_file: int = 1000,
) -> None:
    """Write rows as an RLDS dataset in ArrayRecord files, through TFDS; ``tfds.builder_from_directory`` opens it.

    Pictures are written as PNG, and float64 values are encoded, so nothing is rounded.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset``, a ``pyarrow.Table``, or record batches.
        path: The folder of the dataset; nothing may exist there.
        name: Name of the dataset.
        version: Version of the dataset, three numbers.
        split: Name of the split.
        episodes_per_file: Number of episodes in a file.

    Raises:
        ConfigError: Something is at ``path``, or another process is writing it.
        StorageError: Files cannot be written; nothing is left.
        DataError: There are no rows, or values are null.
        ImportError: tensorflow-datasets or array_record is not installed.
    """
    try:
        import tensorflow_datasets as library
    except ImportError as error:
        raise ImportError("writing needs TFDS: pip install tensorflow-datasets array_record") from error
    if episodes_per_file < 1:
        raise ConfigError(f"episodes_per_file: expected a positive number, found {episodes_per_file!r}")
    with making(path, "write_tfds") as partial:
        writer = None
        names: set[str] = set()
        for number, columns in enumerate(episodes_of(rows)):
            steps, features_alone = rlds_steps(columns, number)
            about = {name: np.asarray([value]) for name, value in features_alone.items()}
            if writer is None:
                identity = library.core.dataset_info.DatasetIdentity(
                    name=name, version=library.core.Version(version), data_dir=str(partial), module_name=""
                )
                features = {"steps": library.features.Dataset(_features(library, steps)), **_features(library, about)}
                info = library.core.DatasetInfo(builder=identity, features=library.features.FeaturesDict(features))
                writer = library.core.SequentialWriter(
                    info, max_examples_per_shard=episodes_per_file, file_format="array_record"
                )
                writer.initialize_splits([split])
                names = set(about)
            elif set(about) != names:
                name = min(set(about) ^ names)
                raise DataError(
                    f"episode {number}: metadata_episode_{name}: expected it to be the same in all rows of an episode, "
                    "in every episode or in none, found some of both"
                )
            whole = {name: values[0] for name, values in _encoded(about).items()}
            writer.add_examples({split: [{"steps": _encoded(steps), **whole}]})
        if writer is None:
            raise DataError("write_tfds: expected rows, found none")
        writer.close_all()
        _finish(partial)


def _finish(folder: Path) -> None:
    """Raise DataError unless the metadata that TFDS wrote list files of episodes."""
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    if not any(split.get("shardLengths") for split in info.get("splits", ())):
        raise DataError(f"{folder}: expected files of episodes, found none")


def _features(library: Any, steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of TFDS for the steps of the first episode."""
    found: dict[str, Any] = {}
    for name, value in steps.items():
        if isinstance(value, Mapping):
            found[name] = library.features.FeaturesDict(_features(library, value))
        elif value.dtype.kind in "OSU":
            found[name] = library.features.Text()
        elif is_image(value):
            shape = value.shape[1:] if value.ndim == 4 else (*value.shape[1:], 1)
            found[name] = library.features.Image(shape=shape, dtype=np.uint8, encoding_format="png")
        else:
            encoding = "zlib" if value.dtype == np.float64 else "none"
            found[name] = library.features.Tensor(shape=value.shape[1:], dtype=value.dtype.type, encoding=encoding)
    return found


def _encoded(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return steps in the form that TFDS takes without TensorFlow: pictures as files."""
    found: dict[str, Any] = {}
    for name, value in steps.items():
        if isinstance(value, Mapping):
            found[name] = _encoded(value)
        elif value.dtype.kind not in "OSU" and is_image(value):
            found[name] = [io.BytesIO(encode_png(picture)) for picture in value]
        else:
            found[name] = list(value)
    return found
