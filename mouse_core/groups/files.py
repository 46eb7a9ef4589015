"""Parquet files of groups or of one batch: encoding, and reading what is certain to be what was written."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import digest
from mouse_core.files.writing import remove_leftovers, storing, write_file
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
    """A name that is safe in paths for an environment's folder, another one for every environment.

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


@dataclass(frozen=True, slots=True)
class GroupFile:
    """What is known of a group without opening its file.

    Args:
        key: The group.
        name: The file's name, in the folder of its environment.
        number: How many groups were sealed before it.
        uids: Of its rollouts.
        created: When they were, in seconds since 1970.
        rewards: What they earned; None: that comes later.
        tokens: How many each has, over all turns.
        turns: How many each has.
        declared: How many columns had been declared when it was sealed; the late ones of them are what it waits for.
        nbytes: About how much memory its rollouts take.
        untrained: Which of them have no token that belongs into the loss, by their places.
        earned: What the turns of each earned, as ``earned_of`` says it; empty where no turn has a reward.
        columns: What the rollouts have of columns of one number per example, as JSON: by name one for each, null where
            a rollout has none; empty where none has any.
        first: How many rollouts of other groups stand before its own in the file.
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
        """What the rollouts have of a column that came with them, one for each."""
        found: dict[str, list[float | None]] = json.loads(self.columns) if self.columns else {}
        return found.get(name, [None] * len(self.uids))

    @property
    def place(self) -> str:
        """Where the group is, in the buffer's folder: it tells the group from all others, also of the same key."""
        place = f"{folder_name(self.key.environment)}/{self.name}"
        return f"{place}#{self.first}" if self.first else place

    def path(self, root: Path) -> Path:
        """Where the file is."""
        return root / folder_name(self.key.environment) / self.name


def part_of(
    rollouts: Sequence[RolloutRecord], *, name: str = "", number: int = 0, declared: int = 0, first: int = 0
) -> GroupFile:
    """What is to be known of a group, from its rollouts; the rest as in ``GroupFile``."""
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


def parts_of(
    groups: Sequence[Sequence[RolloutRecord]], *, name: str, numbers: Sequence[int], declared: int
) -> list[GroupFile]:
    """What is to be known of the groups that a file has, one after the other."""
    firsts = accumulate(map(len, groups), initial=0)
    given = zip(groups, numbers, firsts, strict=False)
    return [part_of(own, name=name, number=n, declared=declared, first=first) for own, n, first in given]


def _numbers_of(rollouts: Sequence[RolloutRecord]) -> str:
    names = {name for rollout in rollouts for name, value in rollout.columns.items() if not value.ndim}
    each = {name: [rollout.columns.get(name) for rollout in rollouts] for name in sorted(names)}
    if not each:
        return ""
    return json.dumps({name: [None if one is None else one.item() for one in own] for name, own in each.items()})


PLACES = b"mouse_group_number"
"""In a file of groups how many were sealed before each."""

ROWS = b"mouse_group_rollouts"
"""In a file of groups how many rollouts each has."""

DECLARED = b"mouse_group_columns"
"""In a file of groups how many columns had been declared when these were sealed, if any."""

_NUMBERS = frozenset({"tokens", "logprobs", "advantage", "generator_log_probs"})
_LARGE = _NUMBERS | {"message", "loss_mask", "text", "data"}
CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")
"""How pages can be compressed."""


def check_codec(compression: str) -> str:
    """Return ``compression`` if pages can be compressed so, else raise ConfigError."""
    if compression not in CODECS or (compression != "none" and not pa.Codec.is_available(compression)):
        raise ConfigError(f"compression: expected one of {list(CODECS)}, found {compression!r}")
    return compression


def writing_options(schema: pa.Schema, compression: str, declared: Columns = NO_COLUMNS) -> dict[str, Any]:
    """How a file of these columns is written, some of which were declared.

    A file has few rows: dictionaries, statistics, and compressing what is short, would cost more than they save. The
    first bytes of numbers beside each other, then the second ones, and so on, are smaller and faster to compress.
    """
    columns = _columns(schema)
    large = [path for path, name in columns.items() if name in _LARGE or name in declared]
    return {
        "compression": dict.fromkeys(large, compression),
        "use_dictionary": False,
        "use_byte_stream_split": [path for path in large if columns[path] in _NUMBERS],
        "write_page_checksum": True,
        "data_page_version": "2.0",
        "write_statistics": False,
        "store_schema": False,
    }


def encode_table(
    rows: pa.Table, options: Mapping[str, Any], metadata: Mapping[bytes, bytes] | None = None
) -> memoryview:
    """Rows as the content of a Parquet file, with a checksum on every page.

    Args:
        rows: What is in it.
        options: As ``writing_options`` says.
        metadata: What else is to be known of it.
    """
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **options) as writer:
        writer.write_table(rows)
        if metadata:
            writer.add_key_value_metadata(metadata)
    return memoryview(sink.getvalue())


def _columns(schema: pa.Schema) -> dict[str, str]:
    """The columns of a file by their paths: the name of the innermost field that has one of its own."""
    found: dict[str, str] = {}

    def visit(field: pa.Field, path: str, name: str) -> None:
        if pa.types.is_list(field.type):
            visit(field.type.value_field, f"{path}.list.element", name)
        elif pa.types.is_struct(field.type):
            for inner in field.type:
                visit(inner, f"{path}.{inner.name}", inner.name)
        else:
            found[path] = name

    for field in schema:
        visit(field, field.name, field.name)
    return found


def digest_of(content: bytes | memoryview) -> uuid.UUID:
    """A UUID of version 8 (RFC 9562) made of the content; in the file's name it tells whether the file is damaged.

    The checksums of pages leave out what describes the pages.
    """
    number = int(digest(content), 16) & ~(0xF << 76) | 8 << 76
    return uuid.UUID(int=number & ~(0x3 << 62) | 2 << 62)


def _promised(path: Path) -> uuid.UUID | None:
    """The digest that a file's name promises, if it does."""
    try:
        found = uuid.UUID(path.stem.replace("_", "-").partition("-")[2][:36])
    except ValueError:
        return None
    return found if found.version == 8 else None


def read_part(path: Path) -> bytes:
    """The content of a file; DataError: its name promises another one; StorageError: it cannot be read."""
    with storing(f"part file {path}"):
        content = path.read_bytes()
    promised = _promised(path)
    if promised is not None and digest_of(content) != promised:
        raise DataError(f"part file {path}: expected it as it was written, found damage: its digest is another")
    return content


def read_table(
    path: Path,
    schema: pa.Schema | None,
    content: bytes | None = None,
    columns: Sequence[str] | None = None,
    declared: Columns = NO_COLUMNS,
) -> pa.Table:
    """A file's rows.

    Args:
        path: The file.
        schema: The columns that it must have; None: those of rollouts.
        content: The file's content, if it has been read.
        columns: Only these.
        declared: The declared columns of rollouts.

    Raises:
        DataError: The file is not what was written.
        StorageError: It cannot be read.
    """
    import pyarrow.parquet as pq

    content = read_part(path) if content is None else content
    try:
        with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            table = file.read(columns, use_threads=False)
        expected = rollout_schema(table.schema, declared) if schema is None else schema
        if columns is not None:
            expected = pa.schema([field for field in expected if field.name in columns])
        if not table.schema.equals(expected):
            # Other tools may have written it anew, with the same columns.
            table = table.select(expected.names).cast(expected)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"part file {path}: expected it as it was written, found damage: {error}") from error
    return table


def read_groups(parts: Sequence[GroupFile], root: Path) -> list[list[RolloutRecord]]:
    """The rollouts of some groups, of each in the order they have in its file. Their arrays share memory.

    Raises:
        DataError: A file is not what was written; the message names it.
        StorageError: It cannot be read.
    """
    paths = [part.path(root) for part in parts]
    declared = read_declared(root)
    files = {path: _read_unknown(path, declared) for path in dict.fromkeys(paths)}
    tables = [_rows_of(files[path], part, path) for part, path in zip(parts, paths, strict=True)]
    try:
        # Most of the time goes into calls, and one for all columns of several groups is as long as one of a group.
        whole = table_to_rollouts(pa.concat_tables(tables).combine_chunks(), _known(parts), declared)
    except (pa.ArrowException, DataError):
        return [_rollouts_of(*item, declared) for item in zip(tables, parts, paths, strict=True)]
    ends = accumulate((table.num_rows for table in tables), initial=0)
    return [whole[begin:end] for begin, end in pairwise(ends)]


def _read_unknown(path: Path, declared: Columns) -> pa.Table:
    """The columns of a file of groups that parts do not have."""
    # If the name promises the content, it is that which the part was made of. Else all of it could have been replaced.
    unknown = [*_UNKNOWN, *(column.name for column in stored(declared, "example"))]
    return read_table(path, None, columns=unknown if _promised(path) else None, declared=declared)


def _rows_of(table: pa.Table, part: GroupFile, path: Path) -> pa.Table:
    """The rows of a group, of those of its file."""
    rows = table.slice(part.first, len(part.uids))
    if rows.num_rows < len(part.uids):
        raise DataError(
            f"part file {path}: expected {len(part.uids)} rollouts from {part.first} on, found {rows.num_rows}"
        )
    return rows


_UNKNOWN = ["turns", "replica_id", "metadata"]


def _known(parts: Sequence[GroupFile]) -> dict[str, list[Any]]:
    """The columns that parts have."""
    columns: dict[str, list[Any]] = {
        name: [value for part in parts for value in [part.key[place]] * len(part.uids)]
        for place, name in enumerate(GroupKey._fields)
    }
    for name, values in (("rollout_uid", "uids"), ("created", "created"), ("reward", "rewards")):
        columns[name] = list(chain.from_iterable(getattr(part, values) for part in parts))
    columns["group_uid"] = [part.place for part in parts for _ in part.uids]
    return columns


def _rollouts_of(table: pa.Table, part: GroupFile, path: Path, declared: Columns) -> list[RolloutRecord]:
    try:
        return table_to_rollouts(table, _known([part]), declared)
    except (pa.ArrowException, DataError) as error:
        raise DataError(f"part file {path}: expected rollouts, found: {error}") from error


def find_parts(path: Path, declared: Columns = NO_COLUMNS) -> list[GroupFile]:
    """What is to be known of the groups in a file, from the file.

    Args:
        path: The file.
        declared: Columns that its rollouts may have beside those of all.

    Raises:
        DataError: The file is not one of groups.
        StorageError: It cannot be read.
    """
    content = read_part(path)
    table = read_table(path, None, content=content, declared=declared)
    try:
        rollouts = table_to_rollouts(table, declared=declared)
    except (pa.ArrowException, DataError) as error:
        raise DataError(f"part file {path}: expected rollouts, found: {error}") from error
    noted = read_metadata(path, content)
    numbers, sizes = ([int(one) for one in noted.get(name, b"").split()] for name in (PLACES, ROWS))
    if sum(sizes) != len(rollouts):  # another tool wrote it
        sizes = [len(list(own)) for _, own in groupby(rollouts, attrgetter("key"))]
    if len(numbers) != len(sizes):
        numbers = (numbers or [0])[:1] * len(sizes)
    found = [rollouts[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
    if any(len({rollout.key for rollout in own}) != 1 for own in found):
        raise DataError(f"part file {path}: expected rollouts group by group, {sizes} of each, found others")
    return parts_of(found, name=path.name, numbers=numbers, declared=int(noted.get(DECLARED, b"0")))


def read_metadata(path: Path, content: bytes | None = None) -> dict[bytes, bytes]:
    """What was written with a file's rows.

    Args:
        path: The file.
        content: The file's content, if it has been read.

    Raises:
        DataError: The file is not what was written.
        StorageError: It cannot be read.
    """
    import pyarrow.parquet as pq

    content = read_part(path) if content is None else content
    try:
        return dict(pq.read_metadata(pa.BufferReader(content)).metadata or {})
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"part file {path}: expected it as it was written, found damage: {error}") from error
