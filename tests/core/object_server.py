"""An object storage on the loopback network that is slow, drops, fails and changes as a test tells it to.

It speaks what clients of S3 use: ranges, ETags, conditions, lists by page, uploads whole and in parts. A plain HTTP
client reads the same objects. ``python -m tests.core.object_server FOLDER`` serves the files of a folder from a process
of its own, for measurements: it prints its port, and ends with the end of its standard input. Clients that look into
the environment find it by the names of ``options`` in capitals, such as ``AWS_ENDPOINT``::

    with ObjectServer(latency=0.02) as server:
        server.put("data/a.arrow", b"...")
        store = obstore.store.S3Store("data", **server.options)
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE = 1 << 16
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified", 404: "Not Found"}
DATE = "Sun, 01 Nov 2026 00:00:00 GMT"


class Object(NamedTuple):
    """Bytes under a name: their number, a function that returns some of them, and their version."""

    size: int
    read: Callable[[int, int], bytes]
    etag: str

    @classmethod
    def of(cls, data: bytes) -> Object:
        return cls(len(data), lambda begin, end: data[begin:end], hashlib.md5(data).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> Object:
        found = path.stat()
        return cls(found.st_size, partial(_read_file, path), f"{found.st_ino:x}-{found.st_mtime_ns:x}")


def _read_file(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(begin)
        return stream.read(end - begin)


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests (below 0: all) of a method for paths that match ``pattern``.

    A fault of kind "status" answers ``status``; "drop" ends the connection in the middle of the body; "stall" answers
    ``seconds`` later; "damage" changes a byte in the middle of the body. One of ``every`` requests goes wrong.
    """

    pattern: str
    kind: str = "status"
    times: int = 1
    method: str = "GET"
    status: int = 503
    seconds: float = 0.0
    every: int = 1
    met: int = 0


class Asked(NamedTuple):
    """A request: its method, the object's path, and of a GET the bytes that were sent of it."""

    method: str
    path: str
    begin: int = 0
    end: int = 0
    status: int = 200


@dataclass
class ObjectServer:
    """Serves objects until the end of a ``with`` block.

    Args:
        latency: Seconds before each answer.
        connection_bandwidth: Bytes a second of one connection; 0: any.
        bandwidth: Bytes a second of all; 0: any.
        can_condition: Whether conditions (``If-Match``, ``If-None-Match``) are looked at.
        versions: Whether it says which version of an object it sends.

    Attributes:
        objects: By path, bucket first.
        faults: What goes wrong next.
        asked: The requests so far; clear it as you like.
    """

    latency: float = 0.0
    connection_bandwidth: float = 0.0
    bandwidth: float = 0.0
    can_condition: bool = True
    versions: bool = True
    port: int = 0
    objects: dict[str, Object] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    link_free: float = 0.0
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where it answers plain HTTP; a path follows."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """What a client of S3 needs to be told."""
        return {"aws_endpoint": self.url, "aws_region": "none", "aws_skip_signature": "true", "aws_allow_http": "true"}

    def put(self, path: str, data: bytes | Object) -> None:
        """Have bytes under a name, bucket first; others of that name are gone."""
        with self.lock:
            self.objects[path] = data if isinstance(data, Object) else Object.of(data)

    def put_folder(self, path: str, folder: Path) -> None:
        """Have the files of a folder, as they are now, below a name."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{path}/{file.relative_to(folder).as_posix()}", Object.of_file(file))

    def connection(self) -> Connection:
        return Connection(self)

    def count(self) -> tuple[int, int]:
        """How many requests there were so far, and how many bytes of objects were sent."""
        return len(self.asked), self.sent()

    def sent(self, pattern: str = "") -> int:
        """How many bytes of objects were sent so far, of paths in which ``pattern`` is found."""
        with self.lock:
            return sum(asked.end - asked.begin for asked in self.asked if re.search(pattern, asked.path))

    def __enter__(self) -> ObjectServer:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True, name="object server")
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *details: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, ready: threading.Event) -> None:
        loop = self._loop = asyncio.new_event_loop()
        listening = loop.run_until_complete(loop.create_server(self.connection, "127.0.0.1", self.port))
        self.port = listening.sockets[0].getsockname()[1]
        ready.set()
        loop.run_forever()
        listening.close()
        loop.close()


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class Connection(asyncio.Protocol):
    """One connection, on which requests follow each other."""

    def __init__(self, server: ObjectServer) -> None:
        self.server, self.received, self.free = server, bytearray(), 0.0
        self.is_answering = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.is_answering:
            self._next()

    def _next(self) -> None:
        """Take the next request, if it is there as a whole, and answer it after the latency."""
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        first, *lines = self.received[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        if headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(self.received) < end + 4 + size:
            return
        body = bytes(self.received[end + 4 : end + 4 + size])
        del self.received[: end + 4 + size]
        method, target, _ = first.split(" ", 2)
        self.is_answering = True
        url = urlsplit(target)
        path, query = unquote(url.path).lstrip("/"), parse_qs(url.query, keep_blank_values=True)
        fault = self._fault(method, path)
        delay = self.server.latency + (fault.seconds if fault else 0.0)
        answer = partial(self._answer, method, path, {key: one[0] for key, one in query.items()}, headers, body, fault)
        if delay:
            asyncio.get_running_loop().call_later(delay, answer)
        else:
            answer()

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.server.faults:
            if fault.times and fault.method == method and re.search(fault.pattern, path):
                fault.met += 1
                if fault.met % fault.every == 0:
                    fault.times -= 1
                    return fault
        return None

    def _answer(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes, fault: Fault | None
    ) -> None:
        if self.transport.is_closing():
            return
        more: dict[str, str] = {}
        begin = end = 0
        try:
            if fault and fault.kind == "status":
                raise _Refused(fault.status, "SlowDown")
            with self.server.lock:
                status, content, more, begin, end = self._act(method, path, query, headers, body)
        except _Refused as refused:
            status = refused.status
            content = f"<Error><Code>{refused.code}</Code><Message>{refused.code}</Message></Error>".encode()
            content = b"" if method == "HEAD" else content
        with self.server.lock:
            self.server.asked.append(Asked(method, path, begin, end, status))
        length = more.pop("Content-Length", str(len(content)))
        if fault and fault.kind == "damage" and content:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        head = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}", f"Content-Length: {length}", f"Date: {DATE}"]
        head += [f"{name}: {value}" for name, value in more.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode("latin-1"))
        pieces = [content[at : at + _PIECE] for at in range(0, len(content), _PIECE)]
        if fault and fault.kind == "drop":
            self.transport.write(content[: len(content) // 2])
            asyncio.get_running_loop().call_later(0.01, self.transport.abort)
            return
        self._send(iter(pieces))

    def _send(self, pieces: Iterator[bytes]) -> None:
        """Send the pieces as fast as this connection and all together may."""
        server, loop = self.server, asyncio.get_running_loop()
        for piece in pieces:
            now = loop.time()
            if server.connection_bandwidth:
                self.free = max(now, self.free) + len(piece) / server.connection_bandwidth
            if server.bandwidth:
                server.link_free = max(now, server.link_free) + len(piece) / server.bandwidth
            wait = max(self.free if server.connection_bandwidth else now, server.link_free) - now
            self.transport.write(piece)
            if wait > 0.001:
                loop.call_later(wait, self._send, pieces)
                return
        self.is_answering = False
        self._next()

    def _act(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str], int, int]:
        """The status, the body, headers, and which bytes of an object the body is."""
        if method == "GET" and ("list-type" in query or "prefix" in query):
            return 200, self._list(path.strip("/"), query), {"Content-Type": "application/xml"}, 0, 0
        if method in ("GET", "HEAD"):
            return self._get(method, path, headers)
        if method == "PUT" and "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, 0, 0
        if method == "PUT":
            return self._put(path, body, headers)
        if method == "POST" and "uploads" in query:
            upload = f"upload-{len(self.server.uploads)}"
            self.server.uploads[upload] = {}
            answer = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return 200, answer.encode(), {}, 0, 0
        if method == "POST" and "uploadId" in query:
            parts = self.server.uploads.pop(query["uploadId"])
            _, _, found, _, _ = self._put(path, b"".join(parts[number] for number in sorted(parts)), headers)
            answer = f"<CompleteMultipartUploadResult><ETag>{found['ETag']}</ETag></CompleteMultipartUploadResult>"
            return 200, answer.encode(), {}, 0, 0
        if method == "DELETE":
            self.server.objects.pop(path, None)
            return 204, b"", {}, 0, 0
        raise _Refused(400, "InvalidRequest")

    def _get(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str], int, int]:
        found = self.server.objects.get(path)
        if found is None:
            raise _Refused(404, "NoSuchKey")
        self._hold_to(found, headers)
        more = {"Accept-Ranges": "bytes"}
        if self.server.versions:
            more |= {"ETag": f'"{found.etag}"', "Last-Modified": DATE}
        begin, end, status = 0, found.size, 200
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
        if asked:
            if asked[1]:
                begin, end = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else found.size, found.size)
            else:
                begin = max(0, found.size - int(asked[2]))
            if begin >= end:
                raise _Refused(416, "InvalidRange")
            status, more["Content-Range"] = 206, f"bytes {begin}-{end - 1}/{found.size}"
        more["Content-Length"] = str(end - begin)
        if method == "HEAD":
            return status, b"", more, 0, 0
        return status, found.read(begin, end), more, begin, end

    def _put(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str], int, int]:
        self._hold_to(self.server.objects.get(path), headers)
        self.server.put(path, body)
        return 200, b"", {"ETag": f'"{self.server.objects[path].etag}"'}, 0, 0

    def _hold_to(self, found: Object | None, headers: dict[str, str]) -> None:
        """Refuse what is asked for on a condition that does not hold."""
        if not self.server.can_condition:
            return
        wanted, unwanted = headers.get("if-match"), headers.get("if-none-match")
        etag = None if found is None else f'"{found.etag}"'
        if wanted is not None and (etag is None or wanted not in ("*", etag)):
            raise _Refused(412, "PreconditionFailed")
        if unwanted is not None and etag is not None and unwanted in ("*", etag):
            raise _Refused(412, "PreconditionFailed")

    def _list(self, bucket: str, query: dict[str, str]) -> bytes:
        """The names in a bucket below a prefix, a page of them."""
        prefix, after = query.get("prefix", ""), query.get("continuation-token") or query.get("start-after", "")
        folders: set[str] = set()
        entries, last, is_cut = [], "", False
        for path in sorted(self.server.objects):
            name = path.removeprefix(f"{bucket}/")
            if name == path or not name.startswith(prefix) or name <= after:
                continue
            if len(entries) >= int(query.get("max-keys", 1000)):
                is_cut = True
                break
            last = name
            rest = name[len(prefix) :]
            if query.get("delimiter") and query["delimiter"] in rest:
                folders.add(prefix + rest.split(query["delimiter"])[0] + query["delimiter"])
                continue
            one = self.server.objects[path]
            entries.append(
                f"<Contents><Key>{escape(quote(name) if query.get('encoding-type') else name)}</Key>"
                f"<LastModified>2026-11-01T00:00:00.000Z</LastModified><ETag>&quot;{one.etag}&quot;</ETag>"
                f"<Size>{one.size}</Size></Contents>"
            )
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if is_cut else ""
        named = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        return (
            f'<?xml version="1.0"?><ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>'
            f"<KeyCount>{len(entries)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>{more}"
            f"{''.join(entries)}{named}</ListBucketResult>"
        ).encode()


def main(kind: type[ObjectServer] = ObjectServer) -> None:
    """Serve a folder below the bucket ``data`` until the input ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--connection-bandwidth", type=float, default=0.0, help="bytes a second of one connection")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="bytes a second of all")
    told = parser.parse_args()
    server = kind(told.latency, told.connection_bandwidth, told.bandwidth)
    server.put_folder("data", told.folder)
    with server:
        print(server.port, flush=True)
        for line in sys.stdin:
            if line.strip() == "sent":
                print(*server.count(), flush=True)


if __name__ == "__main__":
    main()
