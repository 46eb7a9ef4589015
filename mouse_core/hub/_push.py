"""Pushes stores as a dataset to the Hugging Face Hub, and reads named stores that were pushed.

The parts of this module in order: shards, the dataset card, a repository, a push, and reading.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mouse_core._arrow.addresses import check_rows
from mouse_core._base.checks import check_count
from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.manifest import add_parquet_checksum
from mouse_core.files.reading import yaml_object
from mouse_core.formats.base import embed, names_files, read_image
from mouse_core.formats.columns import bytes_a_row, check_size
from mouse_core.metadata import DatasetMetadata, joined, read_metadata, with_metadata
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.export import to_dataset, warn_of_joins
from mouse_core.store.snapshot import Snapshot, shows_no_join
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from datasets.splits import SplitInfo
    from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

# ---------------------------------------------------------------------- shards


def unify_features(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> Features:
    """Return the columns of all parts in order of first appearance, with a common type for each column.

    If parts store the same value type in different forms (lists of varying or fixed lengths, arrays or nested lists,
    labels or integers, images or binary), the plainer form is used. If a column is null in all rows of a part, its type
    comes from the other parts. Values are never converted.

    Args:
        parts: For each part (rows of a store): the name of the part in error messages, and its ``datasets`` features.

    Raises:
        SchemaError: A column's value types differ; the message names the column, both parts and both types.
    """
    from datasets import Features

    unified: dict[str, Any] = {}
    first: dict[str, str] = {}
    for where, features in parts:
        for name, feature in features.items():
            if name not in unified:
                unified[name], first[name] = feature, where
                continue
            common = _common_feature(unified[name], feature)
            if common is None:
                raise SchemaError(
                    f"column {name!r}: expected one value type, found {unified[name]} in {first[name]}"
                    f" and {feature} in {where}"
                )
            unified[name] = common
    return Features(unified)


def _common_feature(one: Any, other: Any) -> Any | None:
    from datasets import Image, List, Value

    if one == other:
        return one
    if Value("null") in (one, other):
        return other if one == Value("null") else one
    images = sum(isinstance(feature, Image) for feature in (one, other))
    if images and (images == 2 or Value("binary") in (one, other)):
        return Image()
    if isinstance(one, List) and isinstance(other, List):
        inner = _common_feature(one.feature, other.feature)
        return None if inner is None else List(inner, length=one.length if one.length == other.length else -1)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return None
        common = {key: _common_feature(value, other[key]) for key, value in one.items()}
        return None if None in common.values() else common
    plain = _plain_feature(one), _plain_feature(other)
    return None if plain == (one, other) else _common_feature(*plain)


def _plain_feature(feature: Any) -> Any:
    """Return a feature without its special type, so that features with the same stored values are equal."""
    from datasets import Array2D, Array3D, ClassLabel, LargeList, List, Value

    if isinstance(feature, Array2D | Array3D):
        plain: Any = Value(feature.dtype)
        for _ in feature.shape:
            plain = List(plain)
        return plain
    if isinstance(feature, LargeList):
        return List(feature.feature)
    if isinstance(feature, ClassLabel):
        return Value(feature.dtype)
    return feature


def fit_table(
    table: pa.Table, features: Features, *, where: str, first_row: int, image_roots: Sequence[str] = ()
) -> pa.Table:
    """Convert a table to the columns and types of ``features``; missing columns become null.

    Images whose paths are in rows are embedded if they lie in ``image_roots``.
    """
    from datasets import Features, Image
    from datasets.table import cast_table_to_features

    columns = []
    for column in features.arrow_schema:
        if column.name not in table.column_names:
            columns.append(_nulls(table.num_rows, column.type))
            continue
        values = table[column.name]
        if values.type != column.type:
            wanted = Features({column.name: features[column.name]})
            values = cast_table_to_features(pa.table({column.name: values}), wanted)[column.name]
        if names_files(column.type):
            image = isinstance(features[column.name], Image | dict)
            label = f"column {column.name!r} of {where}"
            read = partial(read_image, image=image, roots=image_roots, whole=True)
            values = _embed_files(values, read, where=label, first_row=first_row)
        columns.append(values)
    return pa.Table.from_arrays(columns, schema=features.arrow_schema)


def _nulls(length: int, kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.nulls(length, kind.storage_type))
    return pa.nulls(length, kind)


def _embed_files(column: pa.ChunkedArray, read: Callable[..., bytes], *, where: str, first_row: int) -> pa.Array:
    """Return a ``{bytes, path}`` column with the bytes of all files; paths are shortened to file names.

    A path is useless on another machine. ``read`` accepts only images in allowed folders, because untrusted data can
    name any file of this machine.
    """
    files = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    files = embed(files, read, where=where, first_row=first_row)
    encoded, path = pc.struct_field(files, "bytes"), pc.struct_field(files, "path")
    parts = {"bytes": encoded, "path": pc.replace_substring_regex(path, pattern=r"^.*[/\\]", replacement="")}
    kinds = list(files.type)
    return pa.StructArray.from_arrays([parts[kind.name] for kind in kinds], fields=kinds, mask=pc.is_null(files))


# A reader keeps at least one row group in memory. Row groups below a few megabytes have a noticeable overhead.
_ROW_GROUP_BYTES = 32 * 2**20
_FIRST_READ = 16
_MOST_ROWS_READ = 2**13


@dataclass(frozen=True)
class SplitPiece:
    """Rows of a store that belong to a split.

    Args:
        where: Name of the rows in error messages: the split, and the store if there are several stores.
        dataset: The rows.
        first_row: Index of the first row in its store.
        image_roots: Allowed folders of images whose paths are in rows.
    """

    where: str
    dataset: Dataset
    first_row: int = 0
    image_roots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """A Parquet file that was written, and its path in the repository."""

    path: str
    path_in_repo: str
    file_bytes: int
    data_bytes: int


def _blocks(parts: Sequence[SplitPiece], features: Features, target: int) -> Iterator[pa.Table]:
    """Yield the rows of all parts in order, as tables with the schema ``features`` and about ``target`` bytes each."""
    pending: list[pa.Table] = []
    pending_bytes = 0
    for part in parts:
        rows = part.dataset.with_format("arrow")
        start, step = 0, _FIRST_READ
        while start < len(rows):
            # A shuffled dataset has one chunk for each row. Arrow processes many small chunks slowly.
            table, first = rows[start : start + step], part.first_row + start
            check_rows(table, f"{part.where}, rows from {first} on", whole=False)
            table = table.combine_chunks()
            table = fit_table(table, features, where=part.where, first_row=first, image_roots=part.image_roots)
            per_row = bytes_a_row(table)
            start += table.num_rows
            # Rows can be far larger than the rows before them, so the table is cut to size.
            size = max(1, target // per_row)
            for piece in (table.slice(first, size) for first in range(0, table.num_rows, size)):
                pending.append(piece)
                pending_bytes += piece.nbytes
                if pending_bytes >= target:
                    yield pa.concat_tables(pending)
                    pending, pending_bytes = [], 0
            room = max(1, (target - pending_bytes) // per_row)
            step = min(room, 4 * step, _MOST_ROWS_READ)
    if pending:
        yield pa.concat_tables(pending)


def _write_files(
    blocks: Iterator[pa.Table], prefix: Path, schema: pa.Schema, job: Job, advance: Callable[[int], None]
) -> list[tuple[Path, int]]:
    """Write each block as a row group of a Parquet file; begin a new file before a size limit would be exceeded.

    Returns:
        For each file: the path, and the size of the rows in memory in bytes.
    """
    finished: list[tuple[Path, int]] = []
    block = next(blocks, None)
    while block is not None:
        path = Path(f"{prefix}-{len(finished):05d}.parquet")
        groups = rows = data_bytes = 0
        with (
            path.open("wb") as sink,
            pq.ParquetWriter(
                sink,
                schema,
                compression="zstd",
                write_page_checksum=True,
                write_page_index=True,
                # The content determines where pages end. So storage with deduplication recognises the pages of the last
                # push, and stores only new pages.
                use_content_defined_chunking=True,
            ) as writer,
        ):
            while block is not None:
                room = block.num_rows if job.max_rows is None else job.max_rows - rows
                # Encoded values are hardly ever larger than the same values in memory.
                size = sink.tell() + block.nbytes + _footer_bytes(schema, groups + 1)
                if room <= 0 or (rows and size > job.max_bytes):
                    break
                piece, block = block.slice(0, room), block.slice(room)
                writer.write_table(piece, row_group_size=piece.num_rows)
                advance(piece.num_rows)
                groups, rows, data_bytes = groups + 1, rows + piece.num_rows, data_bytes + piece.nbytes
                block = block if block.num_rows else next(blocks, None)
        add_parquet_checksum(path)
        finished.append((path, data_bytes))
    return finished


def _footer_bytes(schema: pa.Schema, groups: int) -> int:
    """Return the approximate size of a Parquet file without pages: the schema (stored twice) and the chunk headers."""
    return 256 + 2 * int(schema.serialize().size) + groups * sum(_leaves(field.type) for field in schema) * 320


def _leaves(kind: pa.DataType) -> int:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return sum(_leaves(kind.field(index).type) for index in range(kind.num_fields)) or 1


# ---------------------------------------------------------------------- the dataset card

_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)(?:\r?\n|(?<=\n))---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
CONFIG = "default"
"""Name of the configuration whose rows are directly in the folder ``data/``."""


@dataclass(frozen=True)
class Card:
    """A parsed README: the front matter, and the text below the front matter, which a push never changes.

    Args:
        metadata: The front matter.
        body: The text.
        newline: The line ending of the file.
        config: Name of the configuration to push; other configurations stay unchanged.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    body: str = ""
    newline: str = "\n"
    config: str = CONFIG


def parse_card(text: str, *, repo_id: str, config: str = CONFIG) -> Card:
    """Parse a README, for a push of a configuration.

    Raises:
        ConfigError: The front matter is not a YAML mapping, or has aliases, so it cannot be extended. Or another
            configuration is marked as default; ``datasets`` accepts only one default configuration.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    match = _FRONT_MATTER.match(text)
    if match is None:
        return Card({}, text, newline, config)
    label = f"README.md of {repo_id}"
    try:
        front = match.group(1).encode()
        metadata = yaml_object(Path(label, "front matter"), front) if front.strip() else {}
    except DataError as error:
        raise ConfigError(str(error)) from error
    configs = metadata.get("configs", [])
    if not isinstance(configs, list) or not all(isinstance(other, dict) for other in configs):
        raise ConfigError(f"{label}: expected an entry 'configs' that is a list of mappings, found {configs!r:.80}")
    card = Card(metadata, text[match.end() :], newline, config)
    for other in _configs(card, mine=False) if config == CONFIG else ():
        if other.get("default"):
            raise ConfigError(
                f"{label}: expected no default configuration except {CONFIG!r}, "
                f"found {other.get('config_name')!r} marked as default"
            )
    return card


def stale_files(card: Card, files: Iterable[str]) -> list[str]:
    """Return the old Parquet files that a push removes; files that other configurations read are not included.

    A push replaces the files directly in the configuration's folder, and the files that the card lists for the
    configuration before the push.
    """
    replaced, others = (
        [one for config in _configs(card, mine=mine) for one in _patterns(config)] for mine in (True, False)
    )
    return sorted(
        path
        for path in files
        if path.endswith(".parquet")
        and (path.rpartition("/")[0] == config_folder(card.config) or _matches(path, replaced))
        and not _matches(path, others)
    )


def config_folder(config: str) -> str:
    """Return the folder of a configuration's shards."""
    return "data" if config == CONFIG else f"data/{config}"


def render_card(
    card: Card,
    *,
    repo_id: str,
    features: Features,
    splits: Sequence[SplitInfo],
    download_bytes: int,
    alignment: str | None,
) -> str:
    """Return the README after a push: the front matter describes the pushed dataset; all other text is unchanged."""
    import yaml  # type: ignore[import-untyped]

    metadata = dict(card.metadata)
    metadata["dataset_info"] = _dataset_info(card, features, splits, download_bytes)
    metadata["configs"] = _config_list(card, splits)
    body = card.body
    if not body.strip():
        metadata.setdefault("task_categories", ["reinforcement-learning"])
        body = _first_body(repo_id, card.config, splits, alignment).replace("\n", card.newline)
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=inf, line_break=card.newline)
    return f"---{card.newline}{front}---{card.newline}{body}"


def _dataset_info(card: Card, features: Features, splits: Sequence[SplitInfo], download_bytes: int) -> Any:
    from datasets import DatasetInfo
    from datasets.info import DatasetInfosDict
    from datasets.splits import SplitDict

    info = DatasetInfo(
        features=features,
        splits=SplitDict({split.name: split for split in splits}),
        download_size=download_bytes,
        dataset_size=sum(split.num_bytes for split in splits),
    )
    rendered: dict[str, Any] = {}
    DatasetInfosDict({CONFIG: info}).to_dataset_card_data(rendered)
    mine = rendered["dataset_info"]
    stored = card.metadata.get("dataset_info") or []
    stored = [stored] if isinstance(stored, dict) else stored
    others = [{"config_name": CONFIG, **entry} for entry in stored if entry.get("config_name", CONFIG) != card.config]
    return [{"config_name": card.config, **mine}, *others] if others or card.config != CONFIG else mine


def _config_list(card: Card, splits: Sequence[SplitInfo]) -> list[dict[str, Any]]:
    mine: dict[str, Any] = {"config_name": card.config}
    for config in _configs(card, mine=True):
        mine.update({key: value for key, value in config.items() if key != "data_dir"})
    folder = config_folder(card.config)
    mine["data_files"] = [{"split": split.name, "path": f"{folder}/{split.name}-*.parquet"} for split in splits]
    return [mine, *_configs(card, mine=False)]


def _configs(card: Card, *, mine: bool) -> list[dict[str, Any]]:
    """Return the card's entries about the pushed configuration, or the entries about all other configurations."""
    configs = card.metadata.get("configs") or []
    return [dict(config) for config in configs if (config.get("config_name", CONFIG) == card.config) == mine]


def _patterns(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the file name patterns of a configuration."""
    folder = str(config.get("data_dir") or "").strip("/")
    prefix = f"{folder}/" if folder else ""
    data_files = config.get("data_files")
    if data_files is None and folder:
        yield f"{folder}/**"
    for entry in [data_files] if isinstance(data_files, str | dict) else data_files or []:
        paths = entry.get("path") if isinstance(entry, dict) else entry
        for path in [paths] if isinstance(paths, str) else paths or []:
            yield prefix + str(path)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a pattern; ``*`` matches any text, including slashes."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _first_body(repo_id: str, config: str, splits: Sequence[SplitInfo], alignment: str | None) -> str:
    name = repo_id.split("/")[-1]
    chosen = f'"{repo_id}"' if config == CONFIG else f'"{repo_id}", "{config}"'
    sizes = "\n".join(f"| {split.name} | {split.num_examples:,} |" for split in splits)
    alignment, known = alignment or "arrived", "in the rows" if alignment else "assumed: the rows do not say it"
    meaning = {
        "arrived": "led to that row's observation; the action that leaves it stands in the next row",
        "outgoing": "leave that row's observation",
    }[alignment]
    return f"""
# {name}

Recorded reinforcement learning experience, one row a step.

| split | steps |
| --- | --- |
{sizes}

A row's action, reward and done {meaning} (alignment "{alignment}", {known}).

```python
from datasets import load_dataset
from mouse_core import DatasetStore

store = DatasetStore(alignment="{alignment}")
store.from_dataset(load_dataset({chosen}, split="{splits[0].name}"))
```
"""


# ---------------------------------------------------------------------- a repository

_README = "README.md"


@dataclass(frozen=True)
class Remote:
    """The content of a repository at one commit.

    Args:
        oid: The id of the commit; None if the repository does not exist.
        private: Whether the repository is private; None if the repository does not exist.
        has_branch: Whether the branch exists. If the branch does not exist, the other attributes describe ``main``,
            from which the branch is created.
        files: A dict from the path of each file to its size and hash. The hash is sha256 for large files and git's hash
            for small files.
        readme: The text of the card; None if the repository has no card.
    """

    oid: str | None = None
    private: bool | None = None
    has_branch: bool = False
    files: Mapping[str, tuple[int, str | None]] = field(default_factory=lambda: MappingProxyType({}))
    readme: str | None = None


@dataclass(frozen=True)
class Repository:
    """A client that reads and changes a branch of a dataset repository."""

    api: HfApi
    repo_id: str
    revision: str

    def read(self) -> Remote:
        """Return the content of the repository at the newest commit."""
        from huggingface_hub import errors
        from huggingface_hub.hf_api import RepoFile

        has_branch = True
        try:
            info = self.api.dataset_info(self.repo_id, revision=self.revision)
        except errors.RevisionNotFoundError:
            if self.revision == "main":
                raise
            has_branch = False
            info = self.api.dataset_info(self.repo_id, revision="main")
        except errors.HfHubHTTPError as error:
            gone = isinstance(error, errors.RepositoryNotFoundError) or error.response.status_code == 404
            if isinstance(error, errors.GatedRepoError) or not gone:
                raise
            return Remote()
        tree = self.api.list_repo_tree(self.repo_id, recursive=True, revision=info.sha, repo_type="dataset")
        files = {
            entry.path: (entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
            for entry in tree
            if isinstance(entry, RepoFile)
        }
        readme = self._read_text(_README, info.sha) if _README in files else None
        return Remote(info.sha, info.private, has_branch, MappingProxyType(files), readme)

    def _read_text(self, path: str, revision: str | None) -> str:
        # The user's cache is only for files that the user downloads.
        with tempfile.TemporaryDirectory(prefix="mouse-card-") as folder:
            local = self.api.hf_hub_download(
                self.repo_id, path, repo_type="dataset", revision=revision, local_dir=folder
            )
            with open(local, encoding="utf-8-sig", newline="") as file:
                return file.read()

    def check_visibility(self, remote: Remote, private: bool | None) -> None:
        """Raise ConfigError if the repository exists and its visibility differs from ``private``."""
        if private is not None and remote.private not in (None, private):
            words = {True: "a private", False: "a public"}
            raise ConfigError(
                f"private: expected {self.repo_id} to be {words[private]} dataset, found {words[not private]} one"
            )

    def check_token(self) -> None:
        """Raise ConfigError if there is no token, because creating a repository requires a token."""
        from huggingface_hub import get_token

        if not isinstance(self.api.token, str) and (self.api.token is False or get_token() is None):
            raise ConfigError(
                f"token: expected a token with write access to {self.repo_id} (token=..., HF_TOKEN,"
                " or `hf auth login`), found none"
            )

    def create(self, remote: Remote, private: bool | None) -> None:
        """Create the repository and the branch if they are missing."""
        if remote.oid is None:
            self.api.create_repo(self.repo_id, repo_type="dataset", private=private, exist_ok=True)
        if not remote.has_branch and self.revision != "main" and not self.revision.startswith("refs/"):
            self.api.create_branch(self.repo_id, branch=self.revision, repo_type="dataset", exist_ok=True)

    def upload(self, files: Mapping[str, str]) -> list[CommitOperationAdd]:
        """Upload files, and return the commit operations that add them. The files become visible with the commit.

        Args:
            files: A dict from the path of each file in the repository to its local path.

        Raises:
            ConfigError: The repository's ``.gitignore`` excludes a file.
        """
        from huggingface_hub import CommitOperationAdd

        operations = [CommitOperationAdd(in_repo, path) for in_repo, path in files.items()]
        self.api.preupload_lfs_files(
            self.repo_id, operations, repo_type="dataset", revision=self.revision, free_memory=False
        )
        for operation in operations:
            if operation._should_ignore:
                raise ConfigError(
                    f".gitignore of {self.repo_id}: expected no rule for {operation.path_in_repo!r}, found one"
                )
            # The client's commit would leave out files that the server had at the time of upload. As others may remove
            # these before the commit, this commit names every file.
            operation._remote_oid = None
        return operations

    def commit(
        self,
        operations: Sequence[CommitOperationAdd],
        *,
        readme: str,
        delete: Iterable[str],
        parent: str | None,
        message: str,
    ) -> CommitInfo:
        """Add files and the card, and remove files, in one commit. ``parent`` must still be the branch's newest commit.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: The branch has a newer commit; the HTTP status is 409 or 412.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        return self.api.create_commit(
            self.repo_id,
            [
                *(CommitOperationDelete(path, is_folder=False) for path in delete),
                *operations,
                CommitOperationAdd(_README, readme.encode()),
            ],
            commit_message=message,
            repo_type="dataset",
            revision=self.revision,
            parent_commit=parent,
        )

    def commit_url(self, oid: str) -> str:
        """Return the URL of a commit's page."""
        return f"{self.api.endpoint}/datasets/{self.repo_id}/commit/{oid}"


def open_repository(
    repo_id: str, revision: str | None, *, token: str | bool | None, endpoint: str | None
) -> Repository:
    """Return a client of a repository. A name without a namespace gets the namespace of the token's owner."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token, library_name="mouse-data")
    if "/" not in repo_id:
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    return Repository(api, repo_id, revision or "main")


@contextmanager
def upload_bars(enabled: bool) -> Iterator[None]:
    """Show or hide the client's progress bars inside the context."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if enabled or are_progress_bars_disabled() or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# ---------------------------------------------------------------------- a push

Shards = Mapping[str, Sequence[Shard]]


@dataclass(frozen=True)
class Job:
    """The rows to push, by split, and the options of the push. ``Job`` makes no network requests.

    Args:
        parts: The rows of each split, in order.
        features: The schema, from ``unify_features``.
        metadata: The metadata of the dataset.
        max_bytes: Largest size of a file in bytes; a single row that is larger gets a separate file.
        max_rows: Largest number of rows of a file; None for no limit.
        progress: Whether to show a progress bar.
        config: The name of the configuration.
    """

    parts: Mapping[str, Sequence[SplitPiece]]
    features: Features
    metadata: DatasetMetadata
    max_bytes: int
    max_rows: int | None
    progress: bool
    config: str = CONFIG

    @property
    def rows(self) -> dict[str, int]:
        """How many rows each split has."""
        return {split: sum(len(part.dataset) for part in found) for split, found in self.parts.items()}

    def card(self, remote: Remote, repo_id: str) -> Card:
        """Parse the card before the push; raise ConfigError if the push cannot extend the card."""
        return parse_card(remote.readme or "", repo_id=repo_id, config=self.config)

    def write(self, folder: str) -> Shards:
        """Write the shards of all splits into a new folder inside ``folder``.

        A split becomes the Parquet files ``{split}-00000-of-00003.parquet`` and so on. The schema metadata of the files
        hold the ``datasets`` features and the metadata of the dataset; every page has a checksum. Memory holds at most
        a row group (about 32 MiB, or 1/8 of a shard) and the rows that are read for the row group.

        Raises:
            DataError: An image file that a row refers to cannot be read.
        """
        inside = Path(tempfile.mkdtemp(dir=folder))
        schema = with_metadata(self.features.arrow_schema, self.metadata)
        size = max(1, min(_ROW_GROUP_BYTES, self.max_bytes // 8))
        shards = {}
        total = sum(self.rows.values())
        with progress_bar("writing shards", total=total, unit="steps", enabled=self.progress) as advance:
            for split, parts in self.parts.items():
                files = _write_files(_blocks(parts, self.features, size), inside / split, schema, self, advance)
                name = f"{config_folder(self.config)}/{split}"
                shards[split] = [
                    Shard(str(path), f"{name}-{index:05d}-of-{len(files):05d}.parquet", path.stat().st_size, data_bytes)
                    for index, (path, data_bytes) in enumerate(files)
                ]
        return shards

    def readme(self, card: Card, shards: Shards, repo_id: str) -> str:
        """Return the card of the dataset after the push."""
        from datasets.splits import SplitInfo

        return render_card(
            card,
            repo_id=repo_id,
            features=with_metadata(self.features, self.metadata),
            splits=[
                SplitInfo(split, sum(shard.data_bytes for shard in found), self.rows[split])
                for split, found in shards.items()
            ],
            download_bytes=sum(shard.file_bytes for found in shards.values() for shard in found),
            alignment=self.metadata.alignment,
        )


_SPLIT = re.compile(r"\w+(\.\w+)*")
_CONFIG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_OID = re.compile(r"[0-9a-f]{40}")


def check_names(repo_id: str, config: object, splits: object, revision: str | None, commit_message: str | None) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"repo_id: expected 'namespace/name', found {repo_id!r}: {error}") from error
    if not isinstance(config, str) or not _CONFIG.fullmatch(config) or config == "all":
        raise ConfigError(
            f"config: expected a name of letters, digits, '_', '-' and '.', and not 'all', found {config!r}"
        )
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


def collect_parts(
    splits: Mapping[str, Store | Sequence[Store]],
) -> tuple[DatasetMetadata, dict[str, list[SplitPiece]]]:
    """Return the joined metadata of all stores, and the rows of all stores by split."""
    parts: dict[str, list[SplitPiece]] = {}
    said: list[tuple[str, DatasetMetadata]] = []
    for split, given in splits.items():
        stores = [given] if isinstance(given, Store) else given
        if not isinstance(stores, Sequence) or not all(isinstance(store, Store) for store in stores):
            raise ConfigError(f"split {split!r}: expected DatasetStore objects, found {given!r}")
        parts[split], joins, rows, last = [], [], 0, None
        for index, store in enumerate(stores):
            where = f"split {split!r}" + (f", store {index}" if len(stores) > 1 else "")
            said += [(where, store.metadata)] if len(store) else []
            parts[split] += _parts_of(store, where)
            snapshot = store.snapshot()
            if last is not None and snapshot.segments and shows_no_join(last, snapshot.segments[0], snapshot.config):
                joins.append(rows)
            joins += [rows + row for row in snapshot.unseen_joins()]
            rows, last = rows + len(snapshot), snapshot.segments[-1] if snapshot.segments else last
        if joins:
            warn_of_joins(f"split {split!r}", joins, stacklevel=4)
        if not parts[split]:
            raise ConfigError(
                f"split {split!r}: expected at least one row, found none; an empty split cannot be loaded"
            )
    return joined(said, have_rows=True), parts


def _parts_of(store: Store, where: str) -> Iterator[SplitPiece]:
    """Yield the ``datasets.Dataset`` objects that hold the rows of a store, without conversion.

    ``store.to_dataset()`` would convert the rows to a single schema in memory. A push converts the rows while it writes
    the shards.
    """
    first_row = 0
    snapshot = store.snapshot()
    if snapshot.has_shares:
        raise ConfigError(
            f"{where}: expected the members of a mixture, as in push_named_stores_to_hub(mixture.members), found "
            "a mixture; the Hub cannot store its weights"
        )
    for segment in snapshot.segments:
        # The stored dataset does not have the computed columns.
        if segment.origin is not None and segment.types.keys() <= {*segment.origin.column_names}:
            dataset = segment.origin
        else:
            try:
                dataset = to_dataset(Snapshot([segment], snapshot.config), segment.types, DatasetMetadata())
            except (ValueError, NotImplementedError) as error:
                raise SchemaError(
                    f"{where}: expected columns of types that the library datasets supports: {error}"
                ) from error
        yield SplitPiece(where, dataset, first_row, segment.image_roots)
        first_row += segment.num_rows


_ATTEMPTS = 5
_FIRST_PAUSE = 0.1
_CONFLICT = (409, 412)


@dataclass(frozen=True)
class PushResult:
    """The result of a push or, with ``dry_run=True``, the result that a real push would return.

    Args:
        repo_id: The name of the repository, with the namespace.
        revision: The branch.
        oid: The id of the commit that contains the pushed dataset; None after a dry run.
        commit_url: The URL of the commit's page; None after a dry run.
        splits: The number of rows of each pushed split.
        shards: The shards' paths in the repository, in order.
        deleted: The stale files that the commit removed. Empty after a dry run, which does not list the files of the
            repository.
        num_bytes: The size of the shards in bytes.
        alignment: "arrived" or "outgoing".
        readme: The dataset card.
    """

    repo_id: str
    revision: str
    oid: str | None
    commit_url: str | None
    splits: Mapping[str, int]
    shards: tuple[str, ...]
    deleted: tuple[str, ...]
    num_bytes: int
    alignment: str
    readme: str = field(repr=False)


def push_stores_to_hub(
    stores: Store | Sequence[Store], *, repo_id: str, split: str = "train", **options: Any
) -> PushResult:
    """Publish stores as a single split of a dataset; for the options see ``push_to_hub``.

    After the push, the dataset has only this split.
    """
    return push_to_hub({split: stores}, repo_id=repo_id, **options)


def push_named_stores_to_hub(
    stores: Mapping[str, Store | Sequence[Store]], *, repo_id: str, split: str = "train", **options: Any
) -> dict[str, PushResult]:
    """Publish named stores, such as the members of a mixture. Each name becomes a configuration, in a separate commit.

    Configurations with other names stay unchanged. After an error, configurations that were already pushed stay on the
    Hub, and a repeated call does not commit them again. ``from_hub`` reads the configurations. For the options see
    ``push_to_hub``, except that there is no ``config``.

    Raises:
        ConfigError: ``stores`` is empty, or a name is not a valid name of a configuration. For other errors see
            ``push_to_hub``.
    """
    if not isinstance(stores, Mapping) or not stores:
        raise ConfigError(f"stores: expected a dict of stores, found {stores!r:.200}")
    for name, given in stores.items():  # check all stores before the first is sent
        check_names(repo_id, name, {split: given}, options.get("revision"), options.get("commit_message"))
        collect_parts({split: given})
    return {
        name: push_to_hub({split: given}, repo_id=repo_id, config=name, **options) for name, given in stores.items()
    }


def push_to_hub(
    splits: Mapping[str, Store | Sequence[Store]],
    *,
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    max_shard_size: int | str = "500MB",
    max_rows_per_shard: int | None = None,
    config: str = CONFIG,
    endpoint: str | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> PushResult:
    """Publish stores as a dataset on the Hugging Face Hub, in one commit.

    The stores of a split are concatenated. If only some stores have a column, it is null in the rows of the other
    stores, so all splits have the same schema. If a column is null in all rows of a split, a store that is created from
    this split has no field for this column. All shards are written to the system's temporary folder first (``TMPDIR``),
    in bounded memory. The upload begins when all shards are complete. After the upload, a single commit adds the shards
    and the card, and removes stale files of the previous push. If another client commits meanwhile, the push lists the
    repository again and repeats its commit, up to five times.

    Args:
        splits: A dict from the name of each split to its stores. After the push, the configuration has exactly these
            splits.
        repo_id: ``"namespace/name"``, or ``"name"`` in the namespace of the token's owner. The repository is created if
            missing.
        private: Whether a new repository is private; by default the Hub decides. An existing repository with another
            visibility raises ConfigError.
        token: An access token with the right to write; by default the token saved by ``hf auth login``.
        revision: The branch, created from ``main`` if missing; by default ``main``.
        commit_message: The commit message; by default a list of the splits and how many steps each has.
        max_shard_size: Largest size of a Parquet file, in bytes or like ``"500MB"`` or ``"1GiB"``. A single row that is
            larger gets a separate file.
        max_rows_per_shard: Largest number of rows of a Parquet file; by default unlimited.
        config: Name of the configuration to push, as in ``load_dataset``; other configurations stay unchanged.
        endpoint: The address of the Hub; by default the environment variable ``HF_ENDPOINT``, or the public address.
        progress: Whether to show progress bars for writing and uploading.
        dry_run: Whether to only try the push: all files are written and checked without a network request. The
            result describes a push to an empty repository.

    Raises:
        ConfigError: An argument is invalid, a split has no rows, there is no token, or the card cannot be extended.
        SchemaError: Types or alignments differ; the message names the column and the splits.
        DataError: An image file that a row refers to cannot be read.
        huggingface_hub.errors.HfHubHTTPError: The token is invalid or does not permit writing, or five commits
            conflicted.
    """
    max_bytes = check_size("max_shard_size", max_shard_size)
    if max_rows_per_shard is not None:
        check_count("max_rows_per_shard", max_rows_per_shard)
    check_names(repo_id, config, splits, revision, commit_message)
    metadata, parts = collect_parts(splits)
    if metadata.videos:
        raise ConfigError(
            "push: expected rows with stored images, found frames of videos, which are not copied; `mouse "
            "convert --images png` stores images in the rows"
        )
    pieces = [part for some in parts.values() for part in some]
    typed = [(part.where, with_metadata(part.dataset.features, DatasetMetadata())) for part in pieces]
    job = Job(parts, unify_features(typed), metadata, max_bytes, max_rows_per_shard, progress, config)
    named = "" if config == CONFIG else f"{config}: "
    sizes = ", ".join(f"{split} ({count:,} steps)" for split, count in job.rows.items())
    message = commit_message or f"Push {named}{sizes}"
    with tempfile.TemporaryDirectory(prefix="mouse-push-") as folder:
        if dry_run:
            shards = job.write(folder)
            readme = job.readme(job.card(Remote(), repo_id), shards, repo_id)
            return _result(job, repo_id, revision or "main", shards, readme)
        with upload_bars(progress):
            repository = open_repository(repo_id, revision, token=token, endpoint=endpoint)
            return _send(job, repository, folder, private=private, message=message)


def _send(job: Job, repository: Repository, folder: str, *, private: bool | None, message: str) -> PushResult:
    """Upload files and commit them."""
    from huggingface_hub.errors import HfHubHTTPError

    remote = repository.read()
    repository.check_visibility(remote, private)
    job.card(remote, repository.repo_id)
    if remote.oid is None:
        repository.check_token()
    shards = job.write(folder)
    repository.create(remote, private)
    repository.check_visibility(repository.read(), private)
    operations = repository.upload({shard.path_in_repo: shard.path for found in shards.values() for shard in found})
    attempt = 0
    while True:
        remote = repository.read()
        card = job.card(remote, repository.repo_id)
        readme = job.readme(card, shards, repository.repo_id)
        added = {operation.path_in_repo for operation in operations}
        deleted = [path for path in stale_files(card, remote.files) if path not in added]
        oid, url = str(remote.oid), repository.commit_url(str(remote.oid))
        if deleted or readme != remote.readme or not _holds(remote, operations):
            try:
                commit = repository.commit(
                    operations, readme=readme, delete=deleted, parent=remote.oid, message=message
                )
            except HfHubHTTPError as error:
                _wait_for_others(error, repository, attempt)
                attempt += 1
                continue
            oid, url = commit.oid, commit.commit_url
        result = _result(job, repository.repo_id, repository.revision, shards, readme)
        return replace(result, oid=oid, commit_url=url, deleted=tuple(deleted))


def _wait_for_others(error: HfHubHTTPError, repository: Repository, attempt: int) -> None:
    """If another client committed meanwhile, wait before the next attempt.

    If the error has another cause, or this was the last attempt, raise the error.
    """
    if error.response.status_code not in _CONFLICT:
        raise error
    if attempt == _ATTEMPTS - 1:
        error.add_note(
            f"{repository.repo_id}: other clients committed during each of {_ATTEMPTS} attempts; nothing was pushed"
        )
        raise error
    time.sleep(_FIRST_PAUSE * 2**attempt)


def _holds(remote: Remote, operations: Sequence[CommitOperationAdd]) -> bool:
    """Whether the repository already has exactly the files of the push, so that a commit would be empty."""
    for operation in operations:
        info = operation.upload_info
        size, known = remote.files.get(operation.path_in_repo, (None, None))
        if size != info.size or known not in (info.sha256.hex(), _name_in_git(operation)):
            return False
    return True


def _name_in_git(operation: CommitOperationAdd) -> str:
    """Return the git blob hash of a small file; "" for a shard, because the Hub stores large files by sha256."""
    if operation.path_in_repo.endswith(".parquet"):
        return ""
    with operation.as_file() as file:
        content = file.read()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _result(job: Job, repo_id: str, revision: str, shards: Shards, readme: str) -> PushResult:
    """Return the result of a dry run."""
    written = [shard for found in shards.values() for shard in found]
    return PushResult(
        repo_id=repo_id,
        revision=revision,
        oid=None,
        commit_url=None,
        splits=job.rows,
        shards=tuple(shard.path_in_repo for shard in written),
        deleted=(),
        num_bytes=sum(shard.file_bytes for shard in written),
        alignment=job.metadata.alignment or "arrived",
        readme=readme,
    )


# ---------------------------------------------------------------------- reading

# Nested columns of rows of MOUSE, and the names of these columns in stores.
_NESTED = {
    "observation.continuous": "observation",
    "observation.discrete": "observation_discrete",
    "observation.image": "observation_image",
    "action.continuous": "action",
    "action.discrete": "action",
    "step_index": "episode_step",
}


def from_hub(
    repo_id: str,
    names: Sequence[str] | None = None,
    *,
    split: str = "train",
    revision: str | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> dict[str, DatasetStore]:
    """Return a dict from configuration names to the stores of a dataset on the Hub. The stores can be the members of a
    ``Mixture``.

    The rows were written by ``push_named_stores_to_hub`` or by MOUSE. MOUSE writes nested values:
    ``observation.continuous`` is read as ``observation``, ``action.discrete`` as ``action``, ``step_index`` as
    ``episode_step``, and so on. Values are never converted.

    Args:
        repo_id: ``"namespace/name"``, or any other argument of ``datasets.load_dataset``, such as a folder.
        names: Names of configurations, in the order of the result; None for all configurations.
        split: The split of each configuration.
        revision: A branch, tag or commit.
        token: An access token, for private datasets.
        **options: Options of ``DatasetStore``. By default, ``alignment`` is read from the metadata of the rows.

    Raises:
        ConfigError: A configuration is missing.
        SchemaError: Rows have nested actions of several kinds, or two columns get the same name.
        MissingFieldError, SchemaError, DataError: The rows do not form a store; see ``DatasetStore.from_dataset``.
    """
    import datasets

    known = datasets.get_dataset_config_names(repo_id, revision=revision, token=token)
    chosen = list(known) if names is None else list(names)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"names: expected configurations among {list(known)} of {repo_id}, found {name!r}")
    stores = {}
    for name in chosen:
        rows = _unnested(datasets.load_dataset(repo_id, name, split=split, revision=revision, token=token), name)
        said = {"alignment": read_metadata(rows, label=name).alignment} | options
        stores[name] = DatasetStore(**said).from_dataset(rows)
    return stores


def _unnested(rows: Any, name: str) -> Any:
    """Convert nested values of rows to columns with the names that a store uses; no row is copied."""
    nested = [column for column in ("observation", "action") if isinstance(rows.features.get(column), dict)]
    if not nested:
        return rows
    flat = rows.flatten()
    renamed = {column: _NESTED[column] for column in flat.column_names if column in _NESTED}
    names = [renamed.get(column, column) for column in flat.column_names]
    if len(set(names)) < len(names):
        raise SchemaError(f"{name}: expected each of the columns {sorted(set(_NESTED.values()))} once, found {names}")
    return flat.rename_columns(renamed)
