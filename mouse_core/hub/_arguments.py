"""Checking what a push was given, before anything is written or sent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mouse_core.about.dataset import About, joined
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.formats.columns.blocks import check_size
from mouse_core.hub._shards import Part, ShardOptions
from mouse_core.store.export import to_dataset, warn_of_joins
from mouse_core.store.snapshot import Snapshot, shows_no_join

if TYPE_CHECKING:
    from mouse_core.store.views import Store

_COMPRESSIONS = ("zstd", "snappy")
_SPLIT = re.compile(r"\w+(\.\w+)*")
_CONFIG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_OID = re.compile(r"[0-9a-f]{40}")


def check_options(
    max_shard_size: int | str, max_rows: int | None, compression: str, temp_dir: str | os.PathLike[str] | None
) -> ShardOptions:
    max_bytes = check_size("max_shard_size", max_shard_size)
    if max_rows is not None and (isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1):
        raise ConfigError(f"max_rows_per_shard: expected a positive integer or None, found {max_rows!r}")
    if compression not in _COMPRESSIONS:
        raise ConfigError(f"compression: expected one of {list(_COMPRESSIONS)}, found {compression!r}")
    if temp_dir is not None and not os.path.isdir(temp_dir):
        raise ConfigError(f"temp_dir: expected an existing folder, found {os.fspath(temp_dir)!r}")
    return ShardOptions(max_bytes, max_rows, compression)


def check_names(repo_id: str, config: object, splits: object, revision: str | None, commit_message: str | None) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"repo_id: expected 'namespace/name', found {repo_id!r}: {error}") from error
    _check_config(config)
    if not isinstance(splits, Mapping) or not splits:
        raise ConfigError(f"splits: expected stores by split, such as {{'train': [store]}}, found {splits!r}")
    for split in splits:
        if not isinstance(split, str) or not _SPLIT.fullmatch(split) or split == "all":
            raise ConfigError(
                "split: expected a name of letters, digits, underscores and single dots, and not 'all',"
                f" found {split!r}"
            )
    if revision is not None and (not revision or _OID.fullmatch(revision)):
        raise ConfigError(f"revision: expected the name of a branch, found {revision!r}")
    if commit_message is not None and not commit_message.strip():
        raise ConfigError("commit_message: expected a text or None, found an empty one")


def _check_config(config: object) -> None:
    if not isinstance(config, str) or not _CONFIG.fullmatch(config) or config == "all":
        raise ConfigError(
            f"config: expected a name of letters, digits, '_', '-' and '.', and not 'all', found {config!r}"
        )


def collect_parts(
    splits: Mapping[str, Store | Sequence[Store]],
) -> tuple[str, About, dict[str, list[Part]]]:
    """The one alignment of all stores, what they say of themselves, and the rows that exist now by split."""
    from mouse_core.store.views import Store

    parts: dict[str, list[Part]] = {}
    alignments: dict[str, str] = {}
    said: list[tuple[str, About]] = []
    for split, given in splits.items():
        stores = [given] if isinstance(given, Store) else given
        if not isinstance(stores, Sequence) or not all(isinstance(store, Store) for store in stores):
            raise ConfigError(f"split {split!r}: expected DatasetStore objects, found {given!r}")
        parts[split], joins, rows, last = [], [], 0, None
        for index, store in enumerate(stores):
            where = f"split {split!r}" + (f", store {index}" if len(stores) > 1 else "")
            alignments.setdefault(store.alignment, where)
            said += [(where, store.about)] if len(store) else []
            parts[split] += _parts_of(store, where)
            snapshot = store.snapshot()
            if last is not None and snapshot.segments and shows_no_join(last, snapshot.segments[0], snapshot.config):
                joins.append(rows)
            joins += [rows + row for row in snapshot.unseen_joins()]
            rows, last = rows + len(snapshot), snapshot.segments[-1] if snapshot.segments else last
        if joins:
            warn_of_joins(f"split {split!r}", joins, stacklevel=4)
        if not parts[split]:
            raise ConfigError(f"split {split!r}: expected at least one row, found none, which nobody could load")
    if len(alignments) > 1:
        found = " and ".join(f"{alignment!r} in {where}" for alignment, where in alignments.items())
        raise SchemaError(f"alignment: expected one for the whole dataset, found {found}")
    about = joined(said)
    if any(one.alignment is None for _, one in said):
        about = about.replace(alignment=None)  # not all of the rows say it
    return next(iter(alignments)), about, parts


def _parts_of(store: Store, where: str) -> Iterator[Part]:
    """The store's rows as the datasets that they lie in, each as it is.

    ``store.to_dataset()`` would bring them to one schema in memory; here that is done while they are written.
    """
    first_row = 0
    snapshot = store.snapshot()
    if snapshot.has_shares:
        raise ConfigError(
            f"{where}: expected the members of a mixture, as in push_named_stores_to_hub(mixture.members), found "
            "the mixture, whose shares would be lost"
        )
    for segment in snapshot.segments:
        # Columns that are computed are not in the dataset that the rows lie in.
        if segment.origin is not None and segment.types.keys() <= {*segment.origin.column_names}:
            dataset = segment.origin
        else:
            try:
                dataset = to_dataset(Snapshot([segment], snapshot.config), segment.types, About())
            except (ValueError, NotImplementedError) as error:
                raise SchemaError(f"{where}: expected columns that datasets has types for: {error}") from error
        yield Part(where, dataset, first_row, segment.image_roots)
        first_row += segment.num_rows
