"""What every reader of a format gives: a stream of row batches, its alignment settled and its memory bounded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError, DataError, MouseError
from mouse_core.formats._columns import MISSING
from mouse_core.formats._digest import RowDigest
from mouse_core.formats._transitions import TransitionRows, check_final, done_codes, episode_rows
from mouse_core.spec import Alignment
from mouse_core.store import DatasetStore

__all__ = [
    "BATCH_ROWS",
    "MISSING",
    "RowDigest",
    "RowStream",
    "TransitionRows",
    "check_final",
    "damaged",
    "done_codes",
    "episode_rows",
    "reading",
    "rows_digest",
]

BATCH_ROWS = 8192
"""How many rows a reader puts into a batch, at most, unless it is told another number."""


@dataclass(frozen=True)
class RowStream:
    """Recorded steps as a stream of ``pyarrow.RecordBatch``, in the convention of stores: T transitions are T+1 rows.

    Every batch has the columns ``action``, ``reward``, ``done`` (0 alive, 1 terminal, 2 truncated), ``episode_step``
    and those of observations, and ``metadata_*`` for what else there is. Iterating again reads again.

    Args:
        path: Where the data lie, or a description where they lie in no file.
        format: The format's name ("minari", "rlds", ...).
        schema: Names and Arrow types of the columns of every batch.
        batches: Gives a new iterator over the batches.
        alignment: Which transition a row's action, reward and done belong to.
        episodes: How many episodes there are, where the format says so.
        rows: How many rows there will be, where that is known before reading.
        notes: What the reader had to decide, a sentence each.
        metadata: What the format says of the whole.
    """

    path: str
    format: str
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]] = field(repr=False)
    alignment: Alignment = "arrived"
    episodes: int | None = None
    rows: int | None = None
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The columns' Arrow types by name."""
        return {column.name: column.type for column in self.schema}

    def replace(self, **changes: Any) -> RowStream:
        """The same stream with some attributes changed."""
        return replace(self, **changes)

    def to_table(self) -> pa.Table:
        """All rows, in memory."""
        return pa.Table.from_batches(list(self), schema=self.schema)

    def to_store(self, **options: Any) -> DatasetStore:
        """All rows as a store, in memory. Use ``write`` for what is larger than that.

        Args:
            **options: As ``DatasetStore`` takes them.
        """
        return DatasetStore(alignment=self.alignment, **options).from_dataset(self.to_table())

    def digest(self) -> str:
        """A digest of names, types and all values, in order; see ``rows_digest``."""
        return rows_digest(self)

    def write(self, path: str | os.PathLike[str]) -> str:
        """Write all rows to a folder that ``datasets.load_from_disk`` opens, one batch in memory at a time.

        The folder appears when it is complete.

        Args:
            path: The folder. There must be nothing yet.

        Returns:
            The digest of what was written; see ``rows_digest``.

        Raises:
            ConfigError: Something is at ``path``, or nothing can be written there.
            DataError: The source is damaged.
        """
        import datasets

        target = Path(path)
        if target.exists():
            raise ConfigError(f"write: expected a path where nothing is, found {str(target)!r}")
        features = datasets.Features.from_arrow_schema(self.schema)
        schema, digest = features.arrow_schema, RowDigest(self.schema)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.mkdir(parents=True)
            name = "data-00000-of-00001.arrow"
            with pa.OSFile(str(partial / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                for batch in self:
                    digest.update(batch)
                    writer.write_batch(batch.cast(schema) if batch.schema != schema else batch)
            described = "" if self.alignment == "arrived" else f"mouse_alignment: {self.alignment}"
            datasets.DatasetInfo(description=described, features=features).write_to_directory(str(partial))
            state: dict[str, Any] = {
                "_data_files": [{"filename": name}],
                "_fingerprint": digest.hexdigest()[:16],
                "_format_columns": None,
                "_format_kwargs": {},
                "_format_type": None,
                "_output_all_columns": False,
                "_split": None,
            }
            (partial / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
            partial.rename(target)
        except OSError as error:
            raise ConfigError(f"write: {str(target)!r}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return digest.hexdigest()


def rows_digest(batches: Any) -> str:
    """A digest of rows: column names in their order, types, and every value to the last bit.

    How rows are cut into batches, and how Arrow encodes them (fixed-size or other lists, dictionaries, buffers that are
    shared), makes no difference.

    Args:
        batches: A ``RowStream``, a ``pyarrow.Table``, or record batches of one schema.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(batches, pa.Table):
        digest = RowDigest(batches.schema)
        batches = batches.to_batches()
    elif isinstance(batches, RowStream):
        digest = RowDigest(batches.schema)
    else:
        digest = RowDigest()
    for batch in batches:
        digest.update(batch)
    return digest.hexdigest()


def damaged(path: str | os.PathLike[str], reason: object, *, at: str = "") -> DataError:
    """The error for a file that cannot be what it claims to be.

    Args:
        path: The file.
        reason: What was expected and what was found.
        at: Where in the file: an episode, an offset.
    """
    return DataError(f"{os.fspath(path)}{f', {at}' if at else ''}: {reason}")


@contextmanager
def reading(path: str | os.PathLike[str], *, at: str = "") -> Iterator[None]:
    """Turn whatever a library raises over damaged bytes into a DataError that names the file.

    Args:
        path: The file being read.
        at: Where in the file: an episode, an offset.

    Raises:
        DataError: Anything but our own errors was raised inside; those pass, with the file's name put before them if
            it is not in them.
        ConfigError: The file is not there.
    """
    name = os.fspath(path)
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"{name}: expected a file or folder, found none ({error})") from error
    except DataError as error:
        if name in str(error):
            raise
        raise damaged(name, error, at=at) from error
    except (MouseError, ImportError):
        raise
    except Exception as error:  # whatever it is that a library stumbles over
        shown = str(error).strip().splitlines()
        raise damaged(name, f"cannot be read: {shown[0] if shown else type(error).__name__}", at=at) from error
