"""A dataset repository on the Hub: its content at one commit, and one commit that changes it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from mouse_core.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi

_README = "README.md"


@dataclass(frozen=True)
class Remote:
    """The content of a repository at one commit.

    Args:
        oid: The commit; None if the repository does not exist.
        private: Whether it is private; None if it does not exist.
        has_branch: Whether the branch exists; else the other attributes describe ``main``, where the new branch begins.
        files: Size and sha256 (of small files git's hash) by path.
        readme: The text of the card; None without a card.
    """

    oid: str | None = None
    private: bool | None = None
    has_branch: bool = False
    files: Mapping[str, tuple[int, str | None]] = field(default_factory=lambda: MappingProxyType({}))
    readme: str | None = None


@dataclass(frozen=True)
class Repository:
    """One branch of one dataset repository, and a client that reads and changes it."""

    api: HfApi
    repo_id: str
    revision: str

    def read(self) -> Remote:
        """Return the present content of the repository, all at one commit."""
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

    def read_card(self) -> str | None:
        """Return the text of the card; None without a card."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return self._read_text(_README, self.revision)
        except EntryNotFoundError:
            return None

    def _read_text(self, path: str, revision: str | None) -> str:
        # The user's cache is for files that the user downloads.
        with tempfile.TemporaryDirectory(prefix="mouse-card-") as folder:
            local = self.api.hf_hub_download(
                self.repo_id, path, repo_type="dataset", revision=revision, local_dir=folder
            )
            with open(local, encoding="utf-8-sig", newline="") as file:
                return file.read()

    def check_visibility(self, remote: Remote, private: bool | None) -> None:
        """Raise ConfigError if the repository exists with another visibility than ``private``."""
        if private is not None and remote.private not in (None, private):
            words = {True: "a private", False: "a public"}
            raise ConfigError(
                f"private: expected {self.repo_id} to be {words[private]} dataset, found {words[not private]} one"
            )

    def check_token(self) -> None:
        """Raise ConfigError without a token, which creating a repository needs."""
        from huggingface_hub import get_token

        if not isinstance(self.api.token, str) and (self.api.token is False or get_token() is None):
            raise ConfigError(
                f"token: expected one with the right to write to {self.repo_id} (token=..., HF_TOKEN,"
                " or `hf auth login`), found none"
            )

    def create(self, remote: Remote, private: bool | None) -> None:
        """Create the repository and the branch if they are missing."""
        if remote.oid is None:
            self.api.create_repo(self.repo_id, repo_type="dataset", private=private, exist_ok=True)
        if not remote.has_branch and self.revision != "main" and not self.revision.startswith("refs/"):
            self.api.create_branch(self.repo_id, branch=self.revision, repo_type="dataset", exist_ok=True)

    def upload(self, files: Mapping[str, str]) -> list[CommitOperationAdd]:
        """Upload files, which stay invisible, and return the operations that make them visible.

        Args:
            files: Local path of each file by its path in the repository.

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
                raise ConfigError(f".gitignore of {self.repo_id}: expected it to admit {operation.path_in_repo!r}")
            # A commit leaves out files that the server had already at the time of upload. By the time of the commit
            # these may be gone, so the commit names every file.
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
        """Add files and card and remove files in one commit, if ``parent`` is still the newest commit of the branch.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: Status 409 or 412: the branch has another newest commit.
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
        """The page of a commit."""
        return f"{self.api.endpoint}/datasets/{self.repo_id}/commit/{oid}"


def open_repository(
    repo_id: str, revision: str | None, *, token: str | bool | None, endpoint: str | None, own: bool = True
) -> Repository:
    """Return a client of a repository; with ``own``, a name without namespace belongs to the token's owner."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token, library_name="mouse-data")
    if own and "/" not in repo_id:
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    return Repository(api, repo_id, revision or "main")


@contextmanager
def upload_bars(enabled: bool) -> Iterator[None]:
    """Show the client's progress bars, or hide them meanwhile."""
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
