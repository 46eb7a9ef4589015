"""A dataset Hub on the loopback interface, complete enough for the real ``huggingface_hub`` and ``datasets``.

It keeps repositories as chains of immutable commits in memory, so that a test can ask what every single
commit looked like from outside, let somebody else commit at the worst moment, or make any request fail.
Only what those clients call is spoken; anything else answers 404 and is recorded in ``unknown``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

WRITE_TOKEN = "hf_loopback_write"
READ_TOKEN = "hf_loopback_read"
USER = "tester"
DATE = "2026-01-01T00:00:00.000Z"


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
            pointer = (
                f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(data)}\n"
            )
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
        oid = hashlib.sha1(f"{parent}{message}{len(self.commits)}".encode()).hexdigest()
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


class HubServer:
    """The server and what a test may look at or tamper with; see the module for what it is."""

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
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

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


_READ_ONLY_POST = re.compile(r"^/api/(validate-yaml$|datasets/.*/paths-info/)")


@contextmanager
def running_hub() -> Iterator[HubServer]:
    hub = HubServer()
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()


class _Answer(Exception):
    """Ends a request with an error, shaped as the Hub shapes it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean; ``HubServer.requests`` has everything."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = unquote(url.path)
        # Branch names may hold slashes, which only the still quoted path tells from separators.
        raw = url.path
        self.body = self._read_body()
        try:
            with self.hub.lock:
                self.hub.requests.append((self.command, path))
                for fault in self.hub.faults:
                    if fault.times and fault.method == self.command and re.search(fault.pattern, path):
                        fault.times -= 1
                        raise _Answer(fault.status, "made to fail by the test")
            for method, pattern, action in _ROUTES:
                match = re.fullmatch(pattern, raw)
                if match and self.command in method:
                    action(self, **{key: unquote(value) for key, value in match.groupdict().items() if value})
                    return
            with self.hub.lock:
                self.hub.unknown.append((self.command, path))
            raise _Answer(404, f"no such endpoint: {path}")
        except _Answer as answer:
            headers = {"X-Error-Message": answer.message}
            if answer.code:
                headers["X-Error-Code"] = answer.code
            self._json({"error": answer.message}, status=answer.status, headers=headers)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, data: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        headers = {"Content-Length": str(len(data)), **(headers or {})}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(
            json.dumps(value).encode(),
            status=status,
            headers={"Content-Type": "application/json", **(headers or {})},
        )

    # Who may do what.

    def _role(self) -> str:
        header = self.headers.get("Authorization")
        if header is None:
            return "nobody"
        role = {f"Bearer {WRITE_TOKEN}": "write", f"Bearer {READ_TOKEN}": "read"}.get(header)
        if role is None:
            raise _Answer(401, "Invalid credentials in Authorization header")
        return role

    def _repo(self, repo_id: str, *, write: bool = False) -> Repo:
        role = self._role()
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and role == "nobody"):
            raise _Answer(401 if role == "nobody" else 404, "Repository not found", "RepoNotFound")
        if write and role != "write":
            raise _Answer(403, "this token has no write access")
        return repo

    def _commit(self, repo: Repo, revision: str) -> Commit:
        commit = repo.find(revision)
        if commit is None:
            raise _Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Reading.

    def whoami(self) -> None:
        if self._role() == "nobody":
            raise _Answer(401, "Invalid username or password.")
        self._json({"type": "user", "id": "0", "name": USER, "orgs": [], "auth": {"type": "access_token"}})

    def info(self, repo: str, revision: str = "main") -> None:
        with self.hub.lock:
            found = self._repo(repo)
            commit = self._commit(found, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        author = repo.split("/")[0]
        self._json(
            {
                "_id": "0",
                "id": repo,
                "author": author,
                "sha": commit.oid,
                "private": found.private,
                "gated": False,
                "disabled": False,
                "lastModified": DATE,
                "createdAt": DATE,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": siblings,
            }
        )

    def refs(self, repo: str) -> None:
        with self.hub.lock:
            branches = dict(self._repo(repo).branches)
        listed = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": oid} for n, oid in branches.items()]
        self._json({"branches": listed, "converts": [], "tags": []})

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        with self.hub.lock:
            commit = self._commit(self._repo(repo), revision)
        prefix = folder.strip("/") + "/" if folder.strip("/") else ""
        inside = {path: file for path, file in sorted(commit.files.items()) if path.startswith(prefix)}
        if prefix and not inside:
            raise _Answer(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        recursive = self.query.get("recursive", "").lower() == "true"
        entries: dict[str, dict[str, object]] = {}
        for path, file in inside.items():
            steps = path[len(prefix) :].split("/")
            for depth in range(1, len(steps)):
                name = prefix + "/".join(steps[:depth])
                if recursive or depth == 1:
                    entries[name] = {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            if recursive or len(steps) == 1:
                entries[path] = file.describe(path)
        listed = [
            dict(entry, lastCommit={"id": commit.oid, "title": commit.message, "date": DATE})
            for entry in entries.values()
        ]
        start = int(self.query.get("cursor", 0))
        stop = start + self.hub.page_size
        headers = {}
        if stop < len(listed):
            query = "&".join(
                f"{key}={quote(value)}" for key, value in {**self.query, "cursor": str(stop)}.items()
            )
            headers["Link"] = f'<{self.hub.endpoint}{urlsplit(self.path).path}?{query}>; rel="next"'
        self._json(listed[start:stop], headers=headers)

    def paths_info(self, repo: str, revision: str) -> None:
        with self.hub.lock:
            commit = self._commit(self._repo(repo), revision)
        if self.headers.get("Content-Type", "").startswith("application/json"):
            paths = json.loads(self.body)["paths"]
        else:
            paths = parse_qs(self.body.decode())["paths"]
        answer: list[dict[str, object]] = []
        for path in paths:
            if path in commit.files:
                answer.append(commit.files[path].describe(path))
            elif any(name.startswith(path.rstrip("/") + "/") for name in commit.files):
                answer.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        self._json(answer)

    def resolve(self, repo: str, revision: str, path: str) -> None:
        with self.hub.lock:
            commit = self._commit(self._repo(repo), revision)
        file = commit.files.get(path)
        if file is None:
            raise _Answer(404, f"{path} not found in {revision}", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.lfs:
            headers |= {"X-Linked-ETag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
        data, status = file.data, 200
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted and data:
            first, last = wanted.groups()
            start = int(first) if first else max(len(data) - int(last), 0)
            stop = min(int(last) + 1, len(data)) if first and last else len(data)
            if start >= len(data):
                self._send(b"", status=416, headers={"Content-Range": f"bytes */{len(data)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        self._send(data, status=status, headers=headers)

    # Writing.

    def create_repo(self) -> None:
        if self._role() != "write":
            raise _Answer(403 if self._role() == "read" else 401, "this token may not create repositories")
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        private = wanted.get("private") is True or wanted.get("visibility") == "private"
        url = f"{self.hub.endpoint}/datasets/{repo_id}"
        with self.hub.lock:
            if repo_id in self.hub.repos:
                self._json({"error": "You already created this dataset repo", "url": url}, status=409)
                return
            self.hub.create(repo_id, private=private)
        self._json({"url": url, "name": repo_id, "id": "0"})

    def create_branch(self, repo: str, branch: str) -> None:
        with self.hub.lock:
            found = self._repo(repo, write=True)
            if branch in found.branches:
                raise _Answer(409, f"Reference already exists: {branch}")
            start = json.loads(self.body or b"{}").get("startingPoint", "main")
            found.branches[branch] = self._commit(found, start).oid
        self._json({})

    def validate_yaml(self) -> None:
        if not json.loads(self.body)["content"].startswith("---"):
            raise _Answer(400, "no metadata")
        self._json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        with self.hub.lock:
            commit = self._commit(self._repo(repo, write=True), revision)
        files = []
        for wanted in json.loads(self.body)["files"]:
            path = wanted["path"]
            entry = {
                "path": path,
                "uploadMode": "lfs" if path.endswith(".parquet") else "regular",
                "shouldIgnore": path in self.hub.ignored,
            }
            if path in commit.files:
                entry["oid"] = commit.files[path].etag
            files.append(entry)
        self._json({"files": files})

    def lfs_batch(self, repo: str) -> None:
        self._repo(repo, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            with self.hub.lock:
                known = wanted["oid"] in self.hub.uploads
            if not known:
                href = f"{self.hub.endpoint}/upload/{wanted['oid']}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Answer(400, "the body does not have the announced sha256")
        with self.hub.lock:
            self.hub.uploads[oid] = self.body
        self._send(b"")

    def verify(self, oid: str) -> None:
        wanted = json.loads(self.body)
        with self.hub.lock:
            data = self.hub.uploads.get(oid)
        if data is None or wanted["oid"] != oid or wanted["size"] != len(data):
            raise _Answer(422, "the uploaded object is not what was announced")
        self._json({})

    def commit(self, repo: str, revision: str) -> None:
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        if not lines or lines[0]["key"] != "header":
            raise _Answer(400, "the first line must be the header")
        header = lines[0]["value"]
        with self.hub.lock:
            found = self._repo(repo, write=True)
            interruptions, self.hub.before_commit[:] = list(self.hub.before_commit), []
            for interrupt in interruptions:
                interrupt()
            head = self._commit(found, revision)
            if header.get("parentCommit") not in (None, head.oid):
                raise _Answer(412, "A commit has happened since. Please refresh and try again.")
            files = dict(head.files)
            for line in lines[1:]:
                self._apply(files, line["key"], line["value"])
            commit = found.add(revision, header["summary"], files)
        url = f"{self.hub.endpoint}/datasets/{repo}/commit/{commit.oid}"
        self._json({"success": True, "commitUrl": url, "commitOid": commit.oid, "hookOutput": ""})

    def _apply(self, files: dict[str, File], kind: str, value: dict[str, str]) -> None:
        path = value["path"]
        if kind == "file":
            files[path] = File(base64.b64decode(value["content"]), lfs=False)
        elif kind == "lfsFile":
            data = self.hub.uploads.get(value["oid"])
            if data is None:
                raise _Answer(400, f"LFS pointer of {path} points at an object that was not uploaded")
            files[path] = File(data, lfs=True)
        elif kind == "deletedFile":
            if path not in files:
                raise _Answer(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            del files[path]
        else:
            raise _Answer(400, f"unknown operation {kind}")


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REV = r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), "/api/repos/create", _Handler.create_repo),
    (("POST",), "/api/validate-yaml", _Handler.validate_yaml),
    (("GET",), f"/api/datasets/{_REPO}", _Handler.info),
    (("GET",), f"/api/datasets/{_REPO}/revision/{_REV}", _Handler.info),
    (("GET",), f"/api/datasets/{_REPO}/refs", _Handler.refs),
    (("GET",), f"/api/datasets/{_REPO}/tree/{_REV}(?:/(?P<folder>.*))?", _Handler.tree),
    (("POST",), f"/api/datasets/{_REPO}/paths-info/{_REV}", _Handler.paths_info),
    (("POST",), f"/api/datasets/{_REPO}/preupload/{_REV}", _Handler.preupload),
    (("POST",), f"/api/datasets/{_REPO}/commit/{_REV}", _Handler.commit),
    (("POST",), f"/api/datasets/{_REPO}/branch/(?P<branch>[^/]+)", _Handler.create_branch),
    (("POST",), rf"/datasets/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), "/upload/(?P<oid>[0-9a-f]{64})", _Handler.upload),
    (("POST",), "/upload/(?P<oid>[0-9a-f]{64})/verify", _Handler.verify),
    (("GET", "HEAD"), f"/datasets/{_REPO}/resolve/{_REV}/(?P<path>.+)", _Handler.resolve),
]
