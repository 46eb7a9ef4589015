"""Verifying recorded data: whether every byte is what was written, as far as that can be known."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import DataError
from mouse_core.files.manifest import FilesManifest, check_bytes, check_parquet_checksum, read_manifest
from mouse_core.formats import opening
from mouse_core.formats._files.parquet import has_checksums
from mouse_core.formats.base import RowStream, rows_digest
from mouse_core.formats.columns.embedding import embedded
from mouse_core.remote.clients import is_url, public_url
from mouse_core.store.disk.checking import Checked, check_store
from mouse_core.store.disk.manifest import NAME, looks_like_store

# What a format itself keeps to tell damage, which its reader compares.
_KEPT = {
    "tfds": "a checksum for every record",
    "ogbench": "a CRC-32 for every array",
    "dopamine": "a CRC-32 for every file",
}
# What these do not cover.
_NOT_COVERED = {
    "parquet": "names and footer",
    "tfds": "features.json and dataset_info.json",
}


@dataclass(frozen=True)
class Verified:
    """What was found whole.

    Args:
        path: What was asked about.
        rows: How many there are.
        digest: Of all rows; see ``rows_digest``. None where several datasets, each with its own, are verified by
            their files.
        compared: With what the data were compared, in words; empty where there was nothing, so that a changed value
            would not have been seen.
        left: What was not compared beside it, in words; empty where nothing was left.
        not_flushed: How many rows more were written to a store's folder; readers see them after the writer's next
            ``flush()``, or once the folder was opened with mode "a".
    """

    path: str
    rows: int
    digest: str | None
    compared: str
    left: str = ""
    not_flushed: int = 0


def verify(
    path: str | os.PathLike[str], *, digest: str | None = None, progress: bool = False, **options: Any
) -> Verified:
    """Read recorded data of any format to the end, and compare them with what was noted when they were written.

    ``convert`` and ``RowStream.write`` note the checksum of every file, of Parquet files in themselves: these are
    compared without looking into the files. All else is read through, so that whatever the format itself keeps is
    compared; images that rows name by path are read with it, and count in the digest as ``convert`` has it. Of the
    folder of a ``DatasetStore.open``, which may be written meanwhile, every file is held against its checksums.

    Args:
        path: A file or folder, or whatever else ``open`` takes.
        digest: What the rows' digest must be, as ``convert``, ``rows_digest`` or an earlier ``verify`` said.
        progress: Whether bars show how far it is.
        **options: As ``open`` takes them.

    Raises:
        ConfigError: As ``open``.
        DataError: Something is not what was written; the message names the file, or all of them.
    """
    root, options["format"] = opening.place(path, options.get("format"))
    if is_url(root) or looks_like_store(root):
        return _verify_store(root, digest, progress, options)
    known = _all_noted(root)
    sealed = _check_files(root, known, progress)
    stream = opening.open(root, **options)
    rows, left = stream.rows, ""
    compared, found = _by_files(stream, known, some=bool(options.get("splits")))
    if rows is None or not compared or (digest is not None and found is None):
        rows, found = _read_through(stream, progress)
    if digest is not None:
        _check_digest(path, digest, found)
        compared = compared or "the rows have the digest that was given"
    if not compared:
        compared, left = _kept_by_format(stream, sealed)
    return Verified(os.fspath(path), rows, found, compared, left)


def _verify_store(root: Any, digest: str | None, progress: bool, options: dict[str, Any]) -> Verified:
    """The same for a folder that a store writes, or one that is elsewhere."""
    shown = public_url(root) if is_url(root) else str(root)
    found = _check_elsewhere(root, progress, options) if is_url(root) else check_store(root, progress=progress)
    if found is None:
        rows, seen = _read_through(opening.open(root, **options), progress)
        if digest is not None:
            _check_digest(shown, digest, seen)
        return Verified(shown, rows, seen, "" if digest is None else "the rows have the digest that was given")
    if found.wrong:
        mend = "" if is_url(root) else f"; mouse repair {root} keeps what is whole"
        raise DataError(f"{'; '.join(found.wrong.values())}{mend}")
    rows, known = found.rows, None
    if digest is not None:
        rows, known = _read_through(opening.open(root, **options), progress)
        _check_digest(shown, digest, known)
    files = "its only file has" if found.files == 1 else f"each of {found.files} files has"
    compared = f"{files} the checksums that were noted when it was written"
    return Verified(shown, rows, known, compared, not_flushed=found.not_flushed)


def _check_digest(path: Any, digest: str, found: str | None) -> None:
    """Raise DataError unless rows have the digest that was given."""
    if found != digest.strip().lower():
        raise DataError(f"{path}: expected rows with the digest {digest}, found {found}")


def _check_elsewhere(url: str, progress: bool, options: dict[str, Any]) -> Checked | None:
    """What was found of the files of a store elsewhere; None where it is none, but a dataset."""
    from mouse_core.remote.clients import Reaching
    from mouse_core.store.remote.objects import Place
    from mouse_core.store.remote.uploading import check_elsewhere

    said = {name: options[name] for name in ("storage_options", "cache", "cache_bytes", "fail") if name in options}
    place = Place.of(url, Reaching(**said))
    return check_elsewhere(place, progress=progress) if place.client.exists(NAME) else None


def _by_files(stream: RowStream, known: dict[Path, FilesManifest], *, some: bool) -> tuple[str, str | None]:
    """What comparing files with what was noted said of all rows, and the digest noted; "" and None: of other files.

    Args:
        stream: The rows.
        known: What was noted, by folder.
        some: Whether they are those of some splits alone, whose digest is another one.
    """
    if not known or set(known) != {file.parent for file in _files(stream)}:
        return "", None
    digest = next(iter(known.values())).digest if len(known) == 1 and not some else None
    return "every file has the checksum that was noted when it was written", digest


def _check_files(root: Path, known: dict[Path, FilesManifest], progress: bool) -> set[Path]:
    """Raise DataError unless all files are as they were written, and return those that carry what their bytes are."""
    files = [file for file in _beside(root) if file.suffix == ".parquet" and file.is_file()]
    total = sum(file.bytes for about in known.values() for file in about.files.values())
    total += sum(file.stat().st_size for file in files)
    sealed = set()
    with progress_bar("verifying", total=total, unit="bytes", enabled=progress and total > 0) as advance:
        wrong = [line for folder, about in known.items() for line in check_bytes(folder, about, advance)]
        for file in files:
            try:
                if check_parquet_checksum(file, advance):
                    sealed.add(file)
            except DataError as error:
                wrong.append(str(error))
    if wrong:
        raise DataError("; ".join(wrong))
    return sealed


def _beside(root: Path) -> list[Path]:
    return [*sorted(root.iterdir()), *sorted(root.glob("data/*"))] if root.is_dir() else [root]


def _read_through(stream: RowStream, progress: bool) -> tuple[int, str]:
    """How many rows there are, and their digest."""
    rows = 0

    def count(batch: pa.RecordBatch) -> None:
        nonlocal rows
        rows += batch.num_rows
        advance(batch.num_rows)

    with progress_bar("reading", total=stream.rows, unit="rows", enabled=progress) as advance:
        digest = rows_digest(embedded(stream.watched(count), others=False))
    return rows, digest


def _files(stream: RowStream) -> list[Path]:
    """The files of rows on disk."""
    return [Path(file) for files in stream.metadata["splits"].values() for file in files]


def _kept_by_format(stream: RowStream, sealed: set[Path]) -> tuple[str, str]:
    """What the format itself keeps, and the reader has compared; and what it does not cover."""
    if stream.format == "parquet":
        if sealed.issuperset(_files(stream)):
            return "every file has the checksum that was written into it", ""
        compared = "a CRC-32 for every page" if all(map(has_checksums, _files(stream))) else ""
    else:
        compared = _KEPT.get(stream.format, "")
    return compared, _NOT_COVERED.get(stream.format, "") if compared else ""


def _all_noted(root: Path) -> dict[Path, FilesManifest]:
    """What is noted of a dataset, or of every dataset of a dict of them, by folder."""
    folders = [root] if (root / "state.json").is_file() else sorted(file.parent for file in root.glob("*/state.json"))
    found = {folder: read_manifest(folder) for folder in folders}
    return {folder: about for folder, about in found.items() if about is not None}
