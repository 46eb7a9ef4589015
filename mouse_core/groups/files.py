"""The files of a rollout buffer's folder: Parquet files of groups, batches and late columns, and the declared columns.

The name of a Parquet file is a digest of its content, and every page has a checksum, so damage is found::

    <environment>/part-<uuid>.parquet            groups of one environment
    batches/batch_<uuid>_<seconds>.parquet       one batch
    .late/<column>/late-<uuid>.parquet           values of a late column
    .state/                                      logs, the owner of the folder, and columns.json
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import digest
from mouse_core.files.writing import publish, remove, remove_leftovers, storing, sync_folders, write_file
from mouse_core.groups.arrow import rollout_schema, stored, table_to_rollouts
from mouse_core.groups.columns import NO_COLUMNS, Columns, RolloutColumn
from mouse_core.groups.records import GroupKey, RolloutRecord, earned_of, nbytes_of

BATCHES = "batches"
"""The folder of stored batches."""

STATE = ".state"
"""The folder of what is not data: the logs, and who owns the folder."""

LATE = ".late"
"""The folder of columns that came later."""

_LONGEST = 200


@lru_cache(maxsize=1024)
def folder_name(environment: str) -> str:
    """Return a name for an environment's folder that is safe in paths and different for every environment.

    Letters, digits, ``_``, ``-`` and inner dots stay; all else becomes ``%XX``, byte by byte.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), environment)
    if name[0] == "." or name == BATCHES:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST:
        # "%" and no hexadecimal digit after it: no other name can look like this.
        name = f"{name[:100]}%-{hashlib.sha256(environment.encode()).hexdigest()[:32]}"
    return name


_NOTE = "columns.json"


def read_declared(root: Path) -> Columns:
    """Return the columns that are declared for a buffer's folder; none where ``columns.json`` is not there.

    Raises:
        DataError: The file is damaged, or a newer release wrote it.
        StorageError: It cannot be read.
    """
    path = root / STATE / _NOTE
    with storing(f"columns {path}"):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return NO_COLUMNS
    return Columns.from_json(text, f"columns {path}")


def refuse_missing(root: Path, declared: Columns, indexed: Columns, count: int = 0) -> None:
    """Raise DataError where a folder has columns that ``columns.json`` does not have.

    Args:
        root: The folder.
        declared: The columns of ``columns.json``.
        indexed: The columns in the index.
        count: How many columns some rollouts may have.
    """
    missing = [f"{column}" for name, column in indexed.items() if declared.get(name) != column]
    if missing or len(declared) < count:
        known = ", ".join(missing) if missing else f"{count} columns"
        raise DataError(
            f"columns {root / STATE / _NOTE}: expected {known}, as they were declared for this folder, found "
            f"{list(declared)}. Put the file back from a copy, or remove what is left of it and open the folder with a "
            "RolloutBuffer whose columns= are those that were declared"
        )


def declare(root: Path, columns: Iterable[RolloutColumn] | None, *, sync: bool) -> Columns:
    """Add ``columns`` to those of a folder, and return all of them. Only the folder's one writer may call this.

    Raises:
        ConfigError: Something else than columns, a column that the folder has otherwise, or a new late column without
            a fill where groups are sealed, which do not wait for it; nothing is changed.
        DataError: ``columns.json`` is damaged, or a newer release wrote it.
        StorageError: It cannot be read or written.
    """
    remove_leftovers(root / STATE, [_NOTE], only_writer=True)
    there = read_declared(root)
    if columns is None:
        return there
    if isinstance(columns, RolloutColumn | str):
        raise ConfigError(f"columns: expected a list of RolloutColumn, found {columns!r}")
    wanted = there.with_more(Columns(columns))
    if wanted == there:
        return wanted
    unfilled = [one.name for one in wanted.late if one.name not in (*there, "reward") and one.fill is None]
    with storing(f"folder {root}"):
        if unfilled and next(root.glob("[!.]*/part-*.parquet"), None) is not None:
            raise ConfigError(
                f"columns: expected a fill for the late column {unfilled[0]!r}, as groups of the folder are sealed and "
                "do not wait for it, found none; fill=float('nan') shows where no value came"
            )
    write_file(root / STATE / _NOTE, wanted.to_json().encode(), sync=sync)
    return wanted


@dataclass(frozen=True, slots=True)
class GroupFile:
    """The properties of a sealed group that are known without opening its file.

    Args:
        key: The group.
        name: The file's name, in the folder of its environment.
        number: The number of groups sealed before it.
        uids: The rollouts' uids.
        created: When each rollout was created, in seconds since 1970.
        rewards: The rollouts' rewards; None: a reward that comes later.
        tokens: Tokens of each rollout, over all turns.
        turns: Turns of each rollout.
        declared: How many columns were declared when it was sealed; it waits for the late ones among these.
        nbytes: The approximate memory of its rollouts in bytes.
        untrained: The places of rollouts without a token in the loss.
        earned: Fingerprints of the rewards of each rollout's turns, as of ``earned_of``; empty where no turn has one.
        columns: Values of the columns of one number per example, as JSON: by name a list with null where a rollout has
            none; empty where no rollout has any.
        first: The number of other groups' rollouts before its own in the file.
    """

    key: GroupKey
    name: str
    number: int
    uids: tuple[str, ...]
    created: tuple[float, ...]
    rewards: tuple[float | None, ...]
    tokens: tuple[int, ...]
    turns: tuple[int, ...]
    declared: int
    nbytes: int
    untrained: tuple[int, ...]
    earned: tuple[int, ...]
    columns: str
    first: int = 0

    def column(self, name: str) -> list[float | None]:
        """Return the values of a column that came with the rollouts, None where a rollout has none."""
        found: dict[str, list[float | None]] = json.loads(self.columns) if self.columns else {}
        return found.get(name, [None] * len(self.uids))

    @property
    def place(self) -> str:
        """The group's uid: its file in the buffer's folder, and its place there."""
        place = f"{folder_name(self.key.environment)}/{self.name}"
        return f"{place}#{self.first}" if self.first else place

    def path(self, root: Path) -> Path:
        """Return the path of the file."""
        return root / folder_name(self.key.environment) / self.name


def part_of(
    rollouts: Sequence[RolloutRecord], *, name: str = "", number: int = 0, declared: int = 0, first: int = 0
) -> GroupFile:
    """Return the ``GroupFile`` of a group of these rollouts; the other arguments are those of ``GroupFile``."""
    sizes = [[len(turn.tokens) for turn in rollout.turns] for rollout in rollouts]
    trained = [sum([len(turn.tokens) for turn in rollout.turns if turn.is_trained]) for rollout in rollouts]
    earned = tuple(map(earned_of, rollouts))
    return GroupFile(
        key=rollouts[0].key,
        name=name,
        number=number,
        uids=tuple([rollout.rollout_uid for rollout in rollouts]),
        created=tuple([rollout.created for rollout in rollouts]),
        rewards=tuple([rollout.reward for rollout in rollouts]),
        tokens=tuple(map(sum, sizes)),
        turns=tuple(map(len, sizes)),
        declared=declared,
        nbytes=sum(map(nbytes_of, rollouts)),
        untrained=tuple([place for place, some in enumerate(trained) if not some]),
        earned=earned if any(earned) else (),
        columns=_numbers_of(rollouts),
        first=first,
    )


def _numbers_of(rollouts: Sequence[RolloutRecord]) -> str:
    names = {name for rollout in rollouts for name, value in rollout.columns.items() if not value.ndim}
    each = {name: [rollout.columns.get(name) for rollout in rollouts] for name in sorted(names)}
    numbers = {name: [None if one is None else one.item() for one in own] for name, own in each.items()}
    return json.dumps(numbers) if numbers else ""


# ---------------------------------------------------------------------- Parquet

# Metadata of a file of groups: how many groups were sealed before each, how many rollouts each has, and how many
# columns were declared when the groups were sealed.
_PLACES, _ROWS, _DECLARED = b"mouse_group_number", b"mouse_group_rollouts", b"mouse_group_columns"

_NUMBERS = frozenset({"tokens", "logprobs", "advantage", "generator_log_probs"})
_SHORT = frozenset({*GroupKey._fields, "rollout_uid", "role", "reward", "created", "replica_id"})
_CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")


def check_codec(compression: str) -> str:
    """Return ``compression`` if pages can be compressed so, else raise ConfigError."""
    if compression not in _CODECS or (compression != "none" and not pa.Codec.is_available(compression)):
        raise ConfigError(f"compression: expected one of {list(_CODECS)}, found {compression!r}")
    return compression


def encode_part(rows: pa.Table, compression: str, metadata: Mapping[bytes, bytes]) -> tuple[uuid.UUID, memoryview]:
    """Return rows as the content of a Parquet file, with a checksum on every page, and the digest of the content.

    A file has few rows: dictionaries, statistics, and compressing what is short, would cost more than they save. The
    first bytes of numbers beside each other, then the second ones, and so on, are smaller and faster to compress.
    """
    import pyarrow.parquet as pq

    columns = {path: name for field in rows.schema for path, name in _paths(field, field.name, field.name)}
    large = [path for path, name in columns.items() if name not in _SHORT]
    options: dict[str, Any] = {
        "compression": dict.fromkeys(large, compression),
        "use_dictionary": False,
        "use_byte_stream_split": [path for path in large if columns[path] in _NUMBERS],
        "write_page_checksum": True,
        "data_page_version": "2.0",
        "write_statistics": False,
        "store_schema": False,
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **options) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata(metadata)
    content = memoryview(sink.getvalue())
    return _digest_of(content), content


def _paths(field: pa.Field, path: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each column of a file, and the name of the innermost field that has one of its own."""
    if pa.types.is_list(field.type):
        yield from _paths(field.type.value_field, f"{path}.list.element", name)
    elif pa.types.is_struct(field.type):
        for inner in field.type:
            yield from _paths(inner, f"{path}.{inner.name}", inner.name)
    else:
        yield path, name


def _digest_of(content: bytes | memoryview) -> uuid.UUID:
    """Return a UUID of version 8 (RFC 9562) made of the content; a file's name has it, so that damage is found.

    The checksums of pages leave out what describes the pages.
    """
    number = int(digest(content), 16) & ~(0xF << 76) | 8 << 76
    return uuid.UUID(int=number & ~(0x3 << 62) | 2 << 62)


def _promised(path: Path) -> uuid.UUID | None:
    """Return the digest in a file's name; None if the name has none."""
    try:
        found = uuid.UUID(path.stem.replace("_", "-").partition("-")[2][:36])
    except ValueError:
        return None
    return found if found.version == 8 else None


def _damaged(path: Path, error: object) -> DataError:
    return DataError(f"part file {path}: expected it as it was written, found damage: {error}")


def read_part(
    path: Path,
    expected: Callable[[pa.Schema, Mapping[bytes, bytes]], pa.Schema],
    columns: Sequence[str] | None = None,
    *,
    whole: bool = True,
) -> tuple[pa.Table, Mapping[bytes, bytes]]:
    """Read the rows and the metadata of a file.

    Args:
        path: The file.
        expected: From the columns that the file has, and its metadata, to the columns that it must have.
        columns: The columns to read; None: all.
        whole: Whether to read the whole file, and to compare its digest with the one in its name.

    Raises:
        DataError: The file is damaged; the message names it.
        StorageError: The file cannot be read.
    """
    import pyarrow.parquet as pq

    with storing(f"part file {path}"):
        content = path.read_bytes() if whole else b""
        source = pa.BufferReader(content) if whole else pa.OSFile(str(path))
    if whole and _promised(path) not in (None, _digest_of(content)):
        raise _damaged(path, "its digest is another")
    try:
        with source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            table, metadata = file.read(columns, use_threads=False), dict(file.metadata.metadata or {})
        schema = expected(table.schema, metadata)
        if columns is not None:
            schema = pa.schema([field for field in schema if field.name in columns])
        if not table.schema.equals(schema):
            # Other tools may have written it anew, with the same columns.
            table = table.select(schema.names).cast(schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    return table, metadata


def read_metadata(path: Path) -> Mapping[bytes, bytes]:
    """Return the metadata of a file; errors as those of ``read_part``."""
    return read_part(path, lambda found, metadata: found, [])[1]


# ---------------------------------------------------------------------- files of groups


def encode_groups(
    groups: Sequence[Sequence[RolloutRecord]],
    rows: pa.Table,
    compression: str,
    *,
    numbers: Sequence[int],
    declared: int,
) -> tuple[list[GroupFile], memoryview]:
    """Return the properties of the groups of a file, and the content of the file.

    Args:
        groups: The rollouts of each group.
        rows: All of them, as Arrow.
        compression: The codec of pages.
        numbers: How many groups were sealed before each.
        declared: How many columns were declared.
    """
    metadata = {_PLACES: " ".join(map(str, numbers)).encode(), _ROWS: " ".join(map(str, map(len, groups))).encode()}
    if declared:
        metadata[_DECLARED] = str(declared).encode()
    name, content = encode_part(rows, compression, metadata)
    return _parts_of(groups, f"part-{name}.parquet", numbers, declared), content


def _parts_of(
    groups: Sequence[Sequence[RolloutRecord]], name: str, numbers: Sequence[int], declared: int
) -> list[GroupFile]:
    firsts = accumulate(map(len, groups), initial=0)
    given = zip(groups, numbers, firsts, strict=False)
    return [part_of(own, name=name, number=n, declared=declared, first=first) for own, n, first in given]


def read_groups(parts: Sequence[GroupFile], root: Path) -> list[list[RolloutRecord]]:
    """Return the rollouts of some groups, of each in the order they have in its file. Their arrays share memory.

    Raises:
        DataError: A file is not what was written; the message names it.
        StorageError: It cannot be read.
    """
    paths = [part.path(root) for part in parts]
    declared = read_declared(root)
    files = {path: _read_unknown(path, declared) for path in dict.fromkeys(paths)}
    tables = []
    for part, path in zip(parts, paths, strict=True):
        tables.append(files[path].slice(part.first, len(part.uids)))
        if len(tables[-1]) < len(part.uids):
            raise _damaged(path, f"{len(tables[-1])} rollouts from {part.first} on, of {len(part.uids)}")
    try:
        # A call for all columns of several groups takes about as long as a call for one group.
        whole = table_to_rollouts(pa.concat_tables(tables).combine_chunks(), _known(parts), declared)
    except (pa.ArrowException, DataError):
        groups = zip(tables, parts, paths, strict=True)
        return [_rollouts_of(table, path, declared, _known([part])) for table, part, path in groups]
    ends = accumulate(map(len, tables), initial=0)
    return [whole[begin:end] for begin, end in pairwise(ends)]


def _read_unknown(path: Path, declared: Columns) -> pa.Table:
    """Return the columns of a file of groups that ``GroupFile`` does not have."""
    unknown = ["turns", "replica_id", "metadata", *(column.name for column in stored(declared, "example"))]
    # If the name has the digest, ``GroupFile`` has the same values. Otherwise another tool may have written the file.
    return read_part(path, lambda found, _: rollout_schema(found, declared), unknown if _promised(path) else None)[0]


def _known(parts: Sequence[GroupFile]) -> dict[str, list[Any]]:
    """Return the columns that ``GroupFile`` has."""
    columns: dict[str, list[Any]] = {
        name: [value for part in parts for value in [part.key[place]] * len(part.uids)]
        for place, name in enumerate(GroupKey._fields)
    }
    for name, values in (("rollout_uid", "uids"), ("created", "created"), ("reward", "rewards")):
        columns[name] = list(chain.from_iterable(getattr(part, values) for part in parts))
    columns["group_uid"] = [part.place for part in parts for _ in part.uids]
    return columns


def _rollouts_of(
    table: pa.Table, path: Path, declared: Columns, known: Mapping[str, list[Any]] | None = None
) -> list[RolloutRecord]:
    try:
        return table_to_rollouts(table, known, declared)
    except (pa.ArrowException, DataError) as error:
        raise DataError(f"part file {path}: expected rollouts, found: {error}") from error


def find_parts(path: Path, declared: Columns = NO_COLUMNS) -> list[GroupFile]:
    """Read the properties of the groups in a file from the file.

    Raises:
        DataError: The file is not one of groups.
        StorageError: It cannot be read.
    """
    table, metadata = read_part(path, lambda found, _: rollout_schema(found, declared))
    rollouts = _rollouts_of(table, path, declared)
    numbers, sizes = ([int(one) for one in metadata.get(name, b"").split()] for name in (_PLACES, _ROWS))
    if sum(sizes) != len(rollouts):  # another tool wrote it
        sizes = [len(list(own)) for _, own in groupby(rollouts, attrgetter("key"))]
    if len(numbers) != len(sizes):
        numbers = (numbers or [0])[:1] * len(sizes)
    groups = [rollouts[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
    if any(len({rollout.key for rollout in group}) != 1 for group in groups):
        raise DataError(f"part file {path}: expected rollouts group by group, {sizes} of each, found others")
    return _parts_of(groups, path.name, numbers, int(metadata.get(_DECLARED, b"0")))


# ---------------------------------------------------------------------- writing


@contextmanager
def writing_files(root: Path, folders: Sequence[str], *, sync: bool) -> Iterator[list[str]]:
    """Publish files when the block ends, all of them or none.

    The block writes each file with ``write_partial``, syncs it if need be, and appends its path to the list.

    Args:
        root: The buffer's folder, for messages.
        folders: The folders of the files, which have one writer; after an error nothing is left over in them.
        sync: Whether the names of the files must be on the disk.

    Raises:
        StorageError: The files cannot be written; none of them is there.
    """
    paths: list[str] = []
    with storing(f"files in {root}"):
        try:
            yield paths
            # From here on the values are stored: readers see the files, and a restart finds them.
            publish(paths)
            if sync:
                sync_folders(folders)
        except BaseException:
            for path in paths:
                remove(path)
            for folder in folders:
                remove_leftovers(folder, only_writer=True)
            raise
