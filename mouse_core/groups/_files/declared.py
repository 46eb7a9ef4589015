"""The note of which columns were declared for a buffer's folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.writing import remove_leftovers, storing, write_file
from mouse_core.groups._files.names import STATE
from mouse_core.groups.types.columns import NO_COLUMNS, Columns, RolloutColumn

_NOTE = "columns.json"


def read_declared(root: Path) -> Columns:
    """The columns that were declared for a buffer's folder; none where there is no note.

    Raises:
        DataError: The note is damaged, or a newer release wrote it.
        StorageError: It cannot be read.
    """
    path = note_of(root)
    with storing(f"columns {path}"):
        try:
            said = path.read_bytes()
        except FileNotFoundError:
            return NO_COLUMNS
    return Columns.from_json(said, f"columns {path}")


def note_of(root: Path) -> Path:
    """Where it is noted which columns a folder has."""
    return root / STATE / _NOTE


def refuse_missing(root: Path, declared: Columns, noted: Columns, count: int = 0) -> None:
    """Raise DataError where a folder has columns that the note does not say.

    Args:
        root: The folder.
        declared: The columns that the note says.
        noted: Those that the index says, where it has some.
        count: How many some rollouts may have.
    """
    missing = [f"{column}" for name, column in noted.items() if declared.get(name) != column]
    if missing or len(declared) < count:
        known = ", ".join(missing) if missing else f"{count} columns"
        raise DataError(
            f"columns {note_of(root)}: expected {known}, as they were declared for this folder, found "
            f"{list(declared)}. Put the file back from a copy, or remove what is left of it and open the folder with a "
            "RolloutBuffer whose columns= are those that were declared"
        )


def declare(root: Path, columns: Iterable[RolloutColumn] | None, *, sync: bool) -> Columns:
    """Note which columns a folder has, and which they are then; None: those that it has. For the folder's one writer.

    Raises:
        ConfigError: Something else than columns, one that the folder has otherwise, or a new late one without a fill
            where groups are sealed, which do not wait for it; nothing is changed.
        DataError: The note is damaged, or a newer release wrote it.
        StorageError: It cannot be read or written.
    """
    remove_leftovers(root / STATE, [_NOTE], only_writer=True)
    there = read_declared(root)
    if columns is None:
        return there
    if isinstance(columns, RolloutColumn | str):
        raise ConfigError(f"columns: expected a list of RolloutColumn, found {columns!r}")
    wanted = there.with_more(Columns(columns))
    if wanted != there:
        _refuse_unfilled(root, [column for column in wanted.late if column.name not in there])
        write_file(root / STATE / _NOTE, wanted.to_json().encode(), sync=sync)
    return wanted


def _refuse_unfilled(root: Path, late: Sequence[RolloutColumn]) -> None:
    """Raise ConfigError where groups that are sealed would get values of late columns that nobody gave or chose."""
    unfilled = [column.name for column in late if column.fill is None and column.name != "reward"]
    with storing(f"folder {root}"):
        if unfilled and next(root.glob("[!.]*/part-*.parquet"), None) is not None:
            raise ConfigError(
                f"columns: expected a fill for the late column {unfilled[0]!r}, as groups of the folder are sealed and "
                "do not wait for it, found none; fill=float('nan') shows where no value came"
            )
