"""Verifies recorded data: compares files and rows with the checksums that were recorded at the time of writing."""

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
from mouse_core.formats.base import RowStream, embedded, rows_digest
from mouse_core.remote.clients import is_url, public_url
from mouse_core.store.disk.checking import Checked, check_store
from mouse_core.store.disk.folder import looks_like_store

# Checksums that a format itself provides, and that its reader compares.
_KEPT = {
    "tfds": "a checksum for every record",
    "ogbench": "a CRC-32 for every array",
    "dopamine": "a CRC-32 for every file",
}
# Parts of the data that these checksums do not cover.
_NOT_COVERED = {"tfds": "features.json and dataset_info.json"}


@dataclass(frozen=True)
class Verified:
    """The result of ``verify`` for data without a fault.

    Args:
        path: The path that was verified.
        rows: Number of rows.
        digest: Digest of all rows; see ``rows_digest``. None if several datasets were verified by the checksums of
            their files, because each dataset has a separate digest.
        compared: Description of the checksums that were compared. If the text is empty, there were no checksums, and a
            changed value is not detected.
        left: Description of the data without checksums; empty if all data have checksums.
    """

    path: str
    rows: int
    digest: str | None
    compared: str
    left: str = ""


def verify(
    path: str | os.PathLike[str], *, digest: str | None = None, progress: bool = False, **options: Any
) -> Verified:
    """Read recorded data of any format completely, and compare them with recorded checksums.

    ``convert`` and ``RowStream.save`` record the checksum of every file; a Parquet file contains its own checksum. All
    bytes of such files are compared with the checksums. Other data are read completely, and the reader compares the
    checksums of the format. Images that rows name by path are also read, and are part of the digest as in ``convert``.
    In the folder of a store, which another process may be writing, every file is compared with its checksums.

    Args:
        path: A file or folder, or any other source that ``formats.open`` accepts.
        digest: The expected digest of the rows, from ``convert``, ``rows_digest`` or an earlier ``verify``.
        progress: Whether to show progress bars.
        **options: Options of ``open``.

    Raises:
        ConfigError: An error of ``open``.
        DataError: Files or rows have changed since they were written; the message names all changed files.
    """
    root, options["format"] = opening.place(path, options.get("format"))
    if is_url(root) or looks_like_store(root):
        return _verify_store(root, digest, progress, options)
    folders = [root] if (root / "state.json").is_file() else sorted(file.parent for file in root.glob("*/state.json"))
    known = {folder: noted for folder in folders if (noted := read_manifest(folder)) is not None}
    sealed = _check_files(root, known, progress)
    stream = opening.open(root, **options)
    splits = stream.format_metadata["splits"] if stream.format in ("datasets", "parquet") else {}
    files = [Path(file) for some in splits.values() for file in some]
    by_files = bool(known) and set(known) == {file.parent for file in files}
    rows, found = stream.rows, None
    if by_files and len(known) == 1 and not options.get("splits"):  # a digest covers all splits
        found = known[files[0].parent].digest
    if rows is None or not by_files or (digest is not None and found is None):
        rows, found = _read_through(stream, progress)
    _check_digest(path, digest, found)
    left = ""
    if by_files:
        compared = "every file has the checksum that was recorded when it was written"
    elif digest is not None:
        compared = "the rows have the digest that was given"
    elif stream.format == "parquet" and sealed.issuperset(files):
        compared = "every file has the checksum that was written into it"
    else:
        compared, left = _KEPT.get(stream.format, ""), _NOT_COVERED.get(stream.format, "")
    return Verified(os.fspath(path), rows, found, compared, left)


def _verify_store(root: Any, digest: str | None, progress: bool, options: dict[str, Any]) -> Verified:
    """Verify a store in a folder or at an address."""
    shown = public_url(root) if is_url(root) else str(root)
    found = _check_elsewhere(root, progress, options) if is_url(root) else check_store(root, progress=progress)
    if found.wrong:
        mend = "" if is_url(root) else f"; mouse repair {root} keeps the undamaged rows"
        raise DataError(f"{'; '.join(found.wrong.values())}{mend}")
    known = None
    if digest is not None:
        _, known = _read_through(opening.open(root, **options), progress)
        _check_digest(shown, digest, known)
    files = "its only file has" if found.files == 1 else f"each of {found.files} files has"
    compared = f"{files} the checksums that were recorded when it was written"
    return Verified(shown, found.rows, known, compared)


def _check_digest(path: Any, digest: str | None, found: str | None) -> None:
    """Raise DataError if the caller gave a digest that differs from the digest of the rows."""
    if digest is not None and found != digest.strip().lower():
        raise DataError(f"{path}: expected rows with the digest {digest}, found {found}")


def _check_elsewhere(url: str, progress: bool, options: dict[str, Any]) -> Checked:
    """Compare the files of a remote store with their checksums."""
    from mouse_core.remote.clients import Reaching
    from mouse_core.store.remote.files import Place
    from mouse_core.store.remote.uploading import check_elsewhere

    said = {name: options[name] for name in ("storage_options", "cache", "cache_bytes", "fail") if name in options}
    return check_elsewhere(Place.of(url, Reaching(**said)), progress=progress)


def _check_files(root: Path, known: dict[Path, FilesManifest], progress: bool) -> set[Path]:
    """Raise DataError if a file has changed; return the files that contain their own checksums."""
    beside = [*sorted(root.iterdir()), *sorted(root.glob("data/*"))] if root.is_dir() else [root]
    files = [file for file in beside if file.suffix == ".parquet" and file.is_file()]
    total = sum(file.bytes for manifest in known.values() for file in manifest.files.values())
    total += sum(file.stat().st_size for file in files)
    sealed = set()
    with progress_bar("verifying", total=total, unit="bytes", enabled=progress and total > 0) as advance:
        wrong = [line for folder, manifest in known.items() for line in check_bytes(folder, manifest, advance)]
        for file in files:
            try:
                if check_parquet_checksum(file, advance):
                    sealed.add(file)
            except DataError as error:
                wrong.append(str(error))
    if wrong:
        raise DataError("; ".join(wrong))
    return sealed


def _read_through(stream: RowStream, progress: bool) -> tuple[int, str]:
    """Read all rows; return the number of rows and the digest of the rows."""
    rows = 0

    def count(batch: pa.RecordBatch) -> None:
        nonlocal rows
        rows += batch.num_rows
        advance(batch.num_rows)

    with progress_bar("reading", total=stream.rows, unit="rows", enabled=progress) as advance:
        digest = rows_digest(embedded(stream.watched(count), others=False))
    return rows, digest
