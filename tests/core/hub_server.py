"""A dataset Hub on the loopback interface, complete enough for the real ``huggingface_hub`` and ``datasets``.

Repositories are chains of immutable commits in memory. A test can inspect each commit, commit as another client at the
worst moment, or make any request fail. An endpoint that those clients do not call answers 404 and is in ``unknown``.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.core.object_server import Fault

WRITE_TOKEN = "hf_loopback_write"
READ_TOKEN = "hf_loopback_read"
USER = "tester"
DATE = "2026-01-01T00:00:00.000Z"


class File(NamedTuple):
    """One file in one commit; ``lfs`` is how it is stored, which decides its object id."""

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


class Commit(NamedTuple):
    oid: str
    parent: str | None
    message: str
    files: Mapping[str, File]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, message: str, files: Mapping[str, File]) -> Commit:
        parent = self.branches.get(branch)
        tree = sorted((path, file.git_oid) for path, file in files.items())
        oid = hashlib.sha1(f"{parent}{message}{tree}{len(self.commits)}".encode()).hexdigest()
        commit = self.commits[oid] = Commit(oid, parent, message, dict(files))
        self.branches[branch] = oid
        return commit

    def history(self, branch: str = "main") -> list[Commit]:
        """Every commit of a branch, the oldest first."""
        found, oid = [], self.branches.get(branch)
        while oid is not None:
            found.append(self.commits[oid])
            oid = self.commits[oid].parent
        return found[::-1]


class HubServer:
    """The server, and the state that a test may inspect or change."""

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
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"

    def fail(self, method: str, pattern: str, status: int, times: int = 1) -> None:
        with self.lock:
            self.faults.append(Fault(pattern, times=times, method=method, status=status))

    def create(self, repo_id: str, *, private: bool = False) -> Repo:
        with self.lock:
            repo = self.repos[repo_id] = Repo(private)
            attributes = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
            repo.add("main", "initial commit", {".gitattributes": File(attributes, lfs=False)})
            return repo

    def commit(self, repo_id: str, add: Mapping[str, bytes], *, delete: tuple[str, ...] = ()) -> Commit:
        """Commit as another client would, past the HTTP interface."""
        with self.lock:
            repo = self.repos[repo_id]
            kept = {path: file for path, file in repo.history()[-1].files.items() if path not in delete}
            added = {path: File(data, lfs=path.endswith(".parquet")) for path, data in add.items()}
            return repo.add("main", "somebody else", kept | added)

    def writes(self) -> list[tuple[str, str]]:
        """Requests that would change or upload something (validating a card does neither)."""
        reads = re.compile(r"^/api/(validate-yaml$|datasets/.*/paths-info/)")
        return [one for one in self.requests if one[0] in ("POST", "PUT") and not reads.search(one[1])]


@contextmanager
def running_hub() -> Iterator[HubServer]:
    hub = HubServer()
    thread = threading.Thread(target=hub.http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.http.shutdown()
        hub.http.server_close()
        thread.join()


class _Answer(Exception):
    """Ends a request with an error, shaped as the Hub shapes it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    """Answers one connection; a subclass has the ``hub``."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; ``HubServer.requests`` has everything."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = unquote(url.path)
        self.body = self._read_body()
        try:
            with self.hub.lock:
                self.hub.requests.append((self.command, path))
                for fault in self.hub.faults:
                    if fault.times and fault.method == self.command and re.search(fault.pattern, path):
                        fault.times -= 1
                        raise _Answer(fault.status, "made to fail by the test")
            # Branch names may contain slashes, which only the quoted path tells from separators.
            for methods, pattern, action in _ROUTES:
                match = re.fullmatch(pattern, url.path)
                if match and self.command in methods:
                    action(self, **{key: unquote(value) for key, value in match.groupdict().items() if value})
                    return
            with self.hub.lock:
                self.hub.unknown.append((self.command, path))
            raise _Answer(404, f"no such endpoint: {path}")
        except _Answer as answer:
            headers = {"X-Error-Message": answer.message} | ({"X-Error-Code": answer.code} if answer.code else {})
            self._json({"error": answer.message}, status=answer.status, headers=headers)

    do_HEAD = do_POST = do_PUT = do_GET

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, data: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        headers = {"Content-Type": "application/json", **(headers or {})}
        self._send(json.dumps(value).encode(), status=status, headers=headers)

    def _role(self) -> str:
        header = self.headers.get("Authorization")
        roles = {None: "nobody", f"Bearer {WRITE_TOKEN}": "write", f"Bearer {READ_TOKEN}": "read"}
        if header not in roles:
            raise _Answer(401, "Invalid credentials in Authorization header")
        return roles[header]

    def _repo(self, repo_id: str, *, write: bool = False) -> Repo:
        role = self._role()
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and role == "nobody"):
            raise _Answer(401 if role == "nobody" else 404, "Repository not found", "RepoNotFound")
        if write and role != "write":
            raise _Answer(403, "this token has no write access")
        return repo

    def _commit(self, repo_id: str, revision: str, *, write: bool = False) -> Commit:
        with self.hub.lock:
            repo = self._repo(repo_id, write=write)
            commit = repo.commits.get(repo.branches.get(revision, revision))
        if commit is None:
            raise _Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def whoami(self) -> None:
        if self._role() == "nobody":
            raise _Answer(401, "Invalid username or password.")
        self._json({"type": "user", "id": "0", "name": USER, "orgs": [], "auth": {"type": "access_token"}})

    def info(self, repo: str, revision: str = "main") -> None:
        commit = self._commit(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        found: dict[str, Any] = {"_id": "0", "id": repo, "author": repo.split("/")[0], "sha": commit.oid}
        found |= {"private": self._repo(repo).private, "gated": False, "disabled": False}
        self._json(found | {"lastModified": DATE, "createdAt": DATE, "tags": [], "siblings": siblings})

    def refs(self, repo: str) -> None:
        with self.hub.lock:
            branches = dict(self._repo(repo).branches)
        listed = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": oid} for n, oid in branches.items()]
        self._json({"branches": listed, "converts": [], "tags": []})

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        commit = self._commit(repo, revision)
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
        last = {"id": commit.oid, "title": commit.message, "date": DATE}
        listed = [entry | {"lastCommit": last} for entry in entries.values()]
        start = int(self.query.get("cursor", 0))
        stop = start + self.hub.page_size
        headers = {}
        if stop < len(listed):
            query = "&".join(f"{key}={quote(value)}" for key, value in {**self.query, "cursor": str(stop)}.items())
            headers["Link"] = f'<{self.hub.endpoint}{urlsplit(self.path).path}?{query}>; rel="next"'
        self._json(listed[start:stop], headers=headers)

    def paths_info(self, repo: str, revision: str) -> None:
        commit = self._commit(repo, revision)
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        paths = json.loads(self.body)["paths"] if is_json else parse_qs(self.body.decode())["paths"]
        answer: list[dict[str, object]] = []
        for path in paths:
            if path in commit.files:
                answer.append(commit.files[path].describe(path))
            elif any(name.startswith(path.rstrip("/") + "/") for name in commit.files):
                answer.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        self._json(answer)

    def resolve(self, repo: str, revision: str, path: str) -> None:
        commit = self._commit(repo, revision)
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

    def create_repo(self) -> None:
        if self._role() != "write":
            raise _Answer(403 if self._role() == "read" else 401, "this token may not create repositories")
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        url = f"{self.hub.endpoint}/datasets/{repo_id}"
        with self.hub.lock:
            if repo_id in self.hub.repos:
                self._json({"error": "You already created this dataset repo", "url": url}, status=409)
                return
            self.hub.create(repo_id, private=wanted.get("private") is True or wanted.get("visibility") == "private")
        self._json({"url": url, "name": repo_id, "id": "0"})

    def create_branch(self, repo: str, branch: str) -> None:
        with self.hub.lock:
            found = self._repo(repo, write=True)
            if branch in found.branches:
                raise _Answer(409, f"Reference already exists: {branch}")
            found.branches[branch] = self._commit(repo, json.loads(self.body or b"{}").get("startingPoint", "main")).oid
        self._json({})

    def validate_yaml(self) -> None:
        if not json.loads(self.body)["content"].startswith("---"):
            raise _Answer(400, "no metadata")
        self._json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        commit = self._commit(repo, revision, write=True)
        files = []
        for path in [wanted["path"] for wanted in json.loads(self.body)["files"]]:
            mode = "lfs" if path.endswith(".parquet") else "regular"
            known = {"oid": commit.files[path].etag} if path in commit.files else {}
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": path in self.hub.ignored, **known})
        self._json({"files": files})

    def lfs_batch(self, repo: str) -> None:
        self._repo(repo, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.uploads:
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
        wanted, data = json.loads(self.body), self.hub.uploads.get(oid)
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
            head = self._commit(repo, revision)
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
        elif kind == "lfsFile" and value["oid"] in self.hub.uploads:
            files[path] = File(self.hub.uploads[value["oid"]], lfs=True)
        elif kind == "deletedFile" and path in files:
            del files[path]
        else:
            raise _Answer(400, f"{kind} {path}: an unknown operation, an object that was not uploaded, or no such file")


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REV = r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("GET",), "/api/whoami-v2", Handler.whoami),
    (("POST",), "/api/repos/create", Handler.create_repo),
    (("POST",), "/api/validate-yaml", Handler.validate_yaml),
    (("GET",), f"/api/datasets/{_REPO}", Handler.info),
    (("GET",), f"/api/datasets/{_REPO}/revision/{_REV}", Handler.info),
    (("GET",), f"/api/datasets/{_REPO}/refs", Handler.refs),
    (("GET",), f"/api/datasets/{_REPO}/tree/{_REV}(?:/(?P<folder>.*))?", Handler.tree),
    (("POST",), f"/api/datasets/{_REPO}/paths-info/{_REV}", Handler.paths_info),
    (("POST",), f"/api/datasets/{_REPO}/preupload/{_REV}", Handler.preupload),
    (("POST",), f"/api/datasets/{_REPO}/commit/{_REV}", Handler.commit),
    (("POST",), f"/api/datasets/{_REPO}/branch/(?P<branch>[^/]+)", Handler.create_branch),
    (("POST",), rf"/datasets/{_REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (("PUT",), "/upload/(?P<oid>[0-9a-f]{64})", Handler.upload),
    (("POST",), "/upload/(?P<oid>[0-9a-f]{64})/verify", Handler.verify),
    (("GET", "HEAD"), f"/datasets/{_REPO}/resolve/{_REV}/(?P<path>.+)", Handler.resolve),
]
