"""The HTTP interface of the loopback Hub: the endpoints that ``huggingface_hub`` and ``datasets`` call."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.core.hub_state import DATE, READ_TOKEN, USER, WRITE_TOKEN, Commit, File, HubState, Repo


class _Answer(Exception):
    """Ends a request with an error, shaped as the Hub shapes it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    """Answers one connection; a subclass says for which ``hub``."""

    hub: HubState
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
            json.dumps(value).encode(), status=status, headers={"Content-Type": "application/json", **(headers or {})}
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
            query = "&".join(f"{key}={quote(value)}" for key, value in {**self.query, "cursor": str(stop)}.items())
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
