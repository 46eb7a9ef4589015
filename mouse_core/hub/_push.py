"""The public functions of ``mouse_core.hub``."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from mouse_core.errors import ConfigError, StateError
from mouse_core.hub._arguments import check_names, check_options, collect_parts
from mouse_core.hub._card import ALIGNMENT_KEY, CONFIG, parse_card
from mouse_core.hub._plan import Job, Shards
from mouse_core.hub._repository import Remote, Repository, open_repository, upload_bars
from mouse_core.hub._statistics import check_statistics, write_statistics

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError

    from mouse_core.hub._shards import Part
    from mouse_core.statistics import Statistics
    from mouse_core.store.views import Store

_ATTEMPTS = 5
_FIRST_PAUSE = 0.1
_CONFLICT = (409, 412)


@dataclass(frozen=True)
class PushResult:
    """What a push did, or with ``dry_run=True`` would do.

    Args:
        repo_id: The repository, with its namespace.
        revision: The branch.
        oid: The commit at which the dataset is what was pushed; None after a dry run.
        commit_url: Its page; None after a dry run.
        splits: Rows by split, of the splits that were pushed.
        shards: The shards' paths in the repository, in order.
        deleted: The stale files that the same commit removed (a dry run does not know the repository's).
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


class PushOptions(TypedDict, total=False):
    """The keyword options of ``push_to_hub``, which says what they mean, but for ``config``."""

    private: bool | None
    token: str | bool | None
    revision: str | None
    commit_message: str | None
    max_shard_size: int | str
    max_rows_per_shard: int | None
    compression: str
    keep_other_splits: bool
    temp_dir: str | os.PathLike[str] | None
    endpoint: str | None
    progress: bool
    dry_run: bool


def push_stores_to_hub(
    stores: Store | Sequence[Store],
    *,
    repo_id: str,
    split: str = "train",
    statistics: Statistics | None = None,
    **options: Unpack[PushOptions],
) -> PushResult:
    """Publish one or more stores as one split of a dataset; the options are those of ``push_to_hub``.

    The dataset then consists of that split. To replace one split and keep the others, say
    ``keep_other_splits=True``.
    """
    return push_to_hub({split: stores}, repo_id=repo_id, statistics=statistics, **options)


def push_named_stores_to_hub(
    stores: Mapping[str, Store | Sequence[Store]],
    *,
    repo_id: str,
    split: str = "train",
    statistics: Mapping[str, Statistics] | None = None,
    **options: Unpack[PushOptions],
) -> dict[str, PushResult]:
    """Publish stores under names, such as the members of a mixture: one configuration a name, in a commit of its own.

    Configurations of other names stay as they are. What was pushed before an error stays, and makes no commit when the
    call is made again. ``from_hub`` reads them; the options are those of ``push_to_hub``, but for ``config``, and
    ``statistics`` are by name.

    Raises:
        ConfigError: No stores, or a name that is none for a configuration; else see ``push_to_hub``.
    """
    if not isinstance(stores, Mapping) or not stores:
        raise ConfigError(f"stores: expected stores by name, found {stores!r:.200}")
    known = {} if statistics is None else statistics
    if not isinstance(known, Mapping) or not known.keys() <= stores.keys():
        raise ConfigError(f"statistics: expected Statistics by name, of {list(stores)}, found {known!r:.200}")
    for name, given in stores.items():  # all of them before the first is sent
        check_names(repo_id, name, {split: given}, options.get("revision"), options.get("commit_message"))
        _, _, parts = collect_parts({split: given})
        check_statistics(known.get(name), {split: given}, _rows(parts), where=f"statistics of {name!r}")
    return {
        name: push_to_hub({split: given}, repo_id=repo_id, config=name, statistics=known.get(name), **options)
        for name, given in stores.items()
    }


def push_to_hub(
    splits: Mapping[str, Store | Sequence[Store]],
    *,
    repo_id: str,
    statistics: Statistics | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    max_shard_size: int | str = "500MB",
    max_rows_per_shard: int | None = None,
    compression: str = "zstd",
    keep_other_splits: bool = False,
    config: str = CONFIG,
    temp_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    progress: bool = True,
    dry_run: bool = False,
) -> PushResult:
    """Publish stores as a dataset on the Hugging Face Hub, in one commit.

    The stores of a split follow one another. A column that only some of them have is null in the others, so
    that all splits have one schema; reading back a split in which a column is null throughout gives its field
    as absent. All shards are first written to ``temp_dir``, streamed in bounded memory, and nothing is sent
    before that has succeeded. One commit then adds the shards, the statistics and the card and removes what is stale of
    the previous push. If somebody else commits in between, the repository is listed again and the commit made
    anew, up to five times.

    Args:
        splits: Stores by split. Without ``keep_other_splits``, these are the splits of the dataset from now
            on.
        repo_id: ``"namespace/name"``, or ``"name"`` in the namespace of the token's owner. Created if
            missing.
        statistics: Those of the split "train", or of all splits where there is none of that name; they stand beside
            the rows as ``Statistics.save`` writes them, and ``from_hub`` finds them. None: those of the push before go
            with the rows that they were of.
        private: Whether a new repository is private; by default what the Hub does. For one that exists
            already, a different visibility is an error.
        token: An access token with the right to write; by default the one saved by ``hf auth login``.
        revision: The branch, created from ``main`` if missing; by default ``main``.
        commit_message: By default the splits and their numbers of steps.
        max_shard_size: The size of a Parquet file, in bytes or like ``"500MB"`` or ``"1GiB"``. A single row
            that is larger gets a file of its own.
        max_rows_per_shard: The number of rows of a Parquet file; by default any.
        compression: ``"zstd"`` or ``"snappy"``.
        keep_other_splits: Keep the dataset's splits that ``splits`` does not name.
        config: The configuration that these are the splits of; the dataset's others stay as they are. ``load_dataset``
            takes its name.
        temp_dir: An existing folder with room for all shards; by default the system's.
        endpoint: The Hub's address; by default ``HF_ENDPOINT`` or the public one.
        progress: Whether bars show how far writing and uploading have come.
        dry_run: Write and check everything, contact nobody, and return what would be pushed to an empty
            repository.

    Raises:
        ConfigError: An argument that cannot be used, a split without rows, statistics of other rows, no token, or a
            card that cannot be extended.
        SchemaError: Types or alignments that do not go together; names the column and the splits.
        DataError: An image file that a row refers to cannot be read.
        huggingface_hub.errors.HfHubHTTPError: The Hub refused: wrong token, no right to write, five conflicts.
    """
    options = check_options(max_shard_size, max_rows_per_shard, compression, temp_dir)
    check_names(repo_id, config, splits, revision, commit_message)
    alignment, about, parts = collect_parts(splits)
    if about.videos:
        raise ConfigError(
            "push: expected rows with their pictures, found frames of videos, which stay where they are; `mouse "
            "convert --images png` has them in the rows"
        )
    rows = _rows(parts)
    check_statistics(statistics, splits, rows, where="statistics")
    named = "" if config == CONFIG else f"{config}: "
    sizes = ", ".join(f"{split} ({count:,} steps)" for split, count in rows.items())
    message = commit_message or f"Push {named}{sizes}"
    job = Job(parts, rows, alignment, about, options, keep_other_splits, progress, config)
    with tempfile.TemporaryDirectory(prefix="mouse-push-", dir=temp_dir) as folder:
        beside = write_statistics(statistics, config, folder)
        if dry_run:
            plan = job.plan(Remote(), repo_id)
            shards = job.write(plan.features, folder)
            return _result(job, repo_id, revision or "main", shards, job.readme(plan, shards, repo_id))
        with upload_bars(progress):
            repository = open_repository(repo_id, revision, token=token, endpoint=endpoint)
            return _send(job, repository, folder, beside, private=private, message=message)


def read_alignment(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None, endpoint: str | None = None
) -> str | None:
    """The alignment that the card of a dataset on the Hub states, or None if it states none or is not there.

    Args:
        repo_id: The repository.
        revision: A branch, tag or commit; by default ``main``.
        token: An access token, for private datasets; by default the one saved by ``hf auth login``.
        endpoint: The Hub's address; by default ``HF_ENDPOINT`` or the public one.

    Raises:
        ConfigError: The card's front matter cannot be read.
        huggingface_hub.errors.HfHubHTTPError: The repository or revision is missing or may not be read.
    """
    with upload_bars(False):
        repository = open_repository(repo_id, revision, token=token, endpoint=endpoint, own=False)
        readme = repository.read_card()
    alignment = parse_card(readme or "", repo_id=repo_id).metadata.get(ALIGNMENT_KEY)
    return None if alignment is None else str(alignment)


def _rows(parts: Mapping[str, Sequence[Part]]) -> dict[str, int]:
    """How many rows each split has."""
    return {split: sum(len(part.dataset) for part in found) for split, found in parts.items()}


def _send(
    job: Job, repository: Repository, folder: str, beside: Mapping[str, str], *, private: bool | None, message: str
) -> PushResult:
    """Upload and commit; ``beside`` are files that go with the shards, by their path in the repository."""
    from huggingface_hub.errors import HfHubHTTPError

    features = None
    shards: Shards = {}
    operations: Sequence[CommitOperationAdd] = ()
    for attempt in range(_ATTEMPTS):
        remote = repository.read()
        repository.check_visibility(remote, private)
        plan = job.plan(remote, repository.repo_id)
        if remote.oid is None:
            repository.check_token()
        if plan.features != features:
            # The first time round, or the splits to keep have changed their types since.
            features = plan.features
            shards = job.write(features, folder)
            repository.create(remote, private)
            repository.check_visibility(repository.read(), private)
            operations = repository.upload(
                {shard.path_in_repo: shard.path for found in shards.values() for shard in found} | dict(beside)
            )
            remote = repository.read()
            plan = job.plan(remote, repository.repo_id)
            if plan.features != features:
                continue
        readme = job.readme(plan, shards, repository.repo_id)
        added = {operation.path_in_repo for operation in operations}
        deleted = [path for path in plan.stale if path not in added]
        oid, url = str(remote.oid), repository.commit_url(str(remote.oid))
        if deleted or readme != remote.readme or not _holds(remote, operations):
            try:
                commit = repository.commit(
                    operations, readme=readme, delete=deleted, parent=remote.oid, message=message
                )
            except HfHubHTTPError as error:
                _wait_for_others(error, repository, attempt)
                continue
            oid, url = commit.oid, commit.commit_url
        result = _result(job, repository.repo_id, repository.revision, shards, readme)
        return replace(result, oid=oid, commit_url=url, deleted=tuple(deleted))
    raise StateError(
        f"{repository.repo_id}: the splits to keep changed during each of {_ATTEMPTS} attempts; nothing was changed"
    )


def _wait_for_others(error: HfHubHTTPError, repository: Repository, attempt: int) -> None:
    """Wait before the next attempt if others have committed meanwhile; else, or after the last one, raise the error."""
    if error.response.status_code not in _CONFLICT:
        raise error
    if attempt == _ATTEMPTS - 1:
        error.add_note(
            f"{repository.repo_id}: others committed during each of {_ATTEMPTS} attempts; nothing was changed"
        )
        raise error
    time.sleep(_FIRST_PAUSE * 2**attempt)


def _holds(remote: Remote, operations: Sequence[CommitOperationAdd]) -> bool:
    """Whether the repository already has exactly these files, so that a commit would be empty."""
    for operation in operations:
        info = operation.upload_info
        size, known = remote.files.get(operation.path_in_repo, (None, None))
        if size != info.size or known not in (info.sha256.hex(), _name_in_git(operation)):
            return False
    return True


def _name_in_git(operation: CommitOperationAdd) -> str:
    """What git calls the bytes of a small file; "" of a shard, which is large."""
    if operation.path_in_repo.endswith(".parquet"):
        return ""
    with operation.as_file() as file:
        content = file.read()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _result(job: Job, repo_id: str, revision: str, shards: Shards, readme: str) -> PushResult:
    """What a push does, as far as a dry run knows."""
    written = [shard for found in shards.values() for shard in found]
    return PushResult(
        repo_id=repo_id,
        revision=revision,
        oid=None,
        commit_url=None,
        splits=dict(job.rows),
        shards=tuple(shard.path_in_repo for shard in written),
        deleted=(),
        num_bytes=sum(shard.file_bytes for shard in written),
        alignment=job.alignment,
        readme=readme,
    )
