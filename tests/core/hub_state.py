"""What a dataset Hub remembers: repositories as chains of immutable commits, in memory."""

import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WRITE_TOKEN = "hf_loopback_write"
READ_TOKEN = "hf_loopback_read"
USER = "tester"
DATE = "2026-01-01T00:00:00.000Z"


_READ_ONLY_POST = re.compile(r"^/api/(validate-yaml$|datasets/.*/paths-info/)")


@dataclass(frozen=True)
class File:
    """One file in one commit; ``lfs`` says how it was stored, which decides what its object id is."""

    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def git_oid(self) -> str:
        data = self.data
        if self.lfs:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(data)}\n"
            data = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid

    def describe(self, path: str) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(self.data), "oid": self.git_oid}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 128}
        return entry


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    message: str
    files: Mapping[str, File]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> Commit | None:
        return self.commits.get(self.branches.get(revision, revision))

    def add(self, branch: str, message: str, files: Mapping[str, File]) -> Commit:
        parent = self.branches.get(branch)
        tree = sorted((path, file.git_oid) for path, file in files.items())
        oid = hashlib.sha1(f"{parent}{message}{tree}{len(self.commits)}".encode()).hexdigest()
        commit = Commit(oid, parent, message, dict(files))
        self.commits[oid] = commit
        self.branches[branch] = oid
        return commit

    def history(self, branch: str = "main") -> list[Commit]:
        """Every commit of a branch, the oldest first."""
        found, oid = [], self.branches.get(branch)
        while oid is not None:
            found.append(self.commits[oid])
            oid = self.commits[oid].parent
        return found[::-1]


@dataclass
class Fault:
    """The next ``times`` requests whose method and path match get ``status`` instead of an answer."""

    method: str
    pattern: str
    status: int
    times: int


class HubState:
    """Everything a test may look at or tamper with."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.before_commit: list[Callable[[], object]] = []
        self.ignored: set[str] = set()
        self.page_size = 1000
        self.endpoint = ""

    def fail(self, method: str, pattern: str, status: int, times: int = 1) -> None:
        with self.lock:
            self.faults.append(Fault(method, pattern, status, times))

    def create(self, repo_id: str, *, private: bool = False) -> Repo:
        with self.lock:
            repo = self.repos[repo_id] = Repo(private)
            attributes = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
            repo.add("main", "initial commit", {".gitattributes": File(attributes, lfs=False)})
            return repo

    def commit(
        self, repo_id: str, add: Mapping[str, bytes], *, delete: tuple[str, ...] = (), branch: str = "main"
    ) -> Commit:
        """Commit as somebody else would, past the HTTP interface."""
        with self.lock:
            repo = self.repos[repo_id]
            files = dict(repo.commits[repo.branches[branch]].files)
            files.update({path: File(data, lfs=path.endswith(".parquet")) for path, data in add.items()})
            for path in delete:
                del files[path]
            return repo.add(branch, "somebody else", files)

    def writes(self) -> list[tuple[str, str]]:
        """Requests that would change or upload something (validating a card does neither)."""
        return [(m, p) for m, p in self.requests if m in ("POST", "PUT") and not _READ_ONLY_POST.search(p)]
