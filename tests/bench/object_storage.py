"""An object storage that takes little of the processor: python -m tests.bench.object_storage FOLDER.

It is ``tests.core.object_server``, but ranges of files are answered by few calls of the system: each answer is written
at the time at which its last byte would have come, or piece by piece where it is long.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.core.object_server import DATE, Connection, ObjectServer, main

# Bytes that are written at once; and from how many on the system copies them from the file itself.
_PIECE, _LONG = 1 << 18, 1 << 15
_RANGE = re.compile(rb"GET /([^ ?%]+) HTTP/1\.1\r\n(?:.*\r\n)*?range: bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)
_CONDITION = re.compile(rb"\r\nif-", re.IGNORECASE)


class _Answering(Connection):
    """A connection on which ranges of files are answered at once, and all else as by any other."""

    server: Storage

    def _next(self) -> None:
        end = self.received.find(b"\r\n\r\n")
        asked = None if end < 0 else _RANGE.match(bytes(self.received[: end + 2]))
        known = None if asked is None or _CONDITION.search(asked.string) else self.server.file(asked[1].decode())
        if asked is None or known is None or int(asked[2]) >= known[1]:
            super()._next()
            return
        file, size, head = known
        begin, behind = int(asked[2]), min(int(asked[3]) + 1, size)
        del self.received[: end + 4]
        server, loop = self.server, asyncio.get_running_loop()
        server.requests, server.nbytes = server.requests + 1, server.nbytes + behind - begin
        self.is_answering, due = True, loop.time() + server.latency
        said = b"%sContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n" % (
            head,
            behind - begin,
            begin,
            behind - 1,
            size,
        )
        for at in range(begin, behind, _PIECE):
            count = min(_PIECE, behind - at)
            if server.bandwidth:
                server.link_free = max(server.link_free, due) + count / server.bandwidth
            if server.connection_bandwidth:
                self.free = max(self.free, due) + count / server.connection_bandwidth
            when = max(due, server.link_free, self.free)
            loop.call_at(when, partial(self._write, said, file, at, count, is_last=at + count == behind))
            said = b""

    def _write(self, head: bytes, file: int, begin: int, count: int, *, is_last: bool) -> None:
        """Write some bytes of a file, behind others."""
        if self.transport.is_closing():
            return
        if count < _LONG or self.transport.get_write_buffer_size():
            self.transport.write(head + os.pread(file, count, begin))
        else:
            if head:
                self.transport.write(head)
            written = 0
            if not self.transport.get_write_buffer_size():
                try:
                    written = os.sendfile(self.transport.get_extra_info("socket").fileno(), file, begin, count)
                except BlockingIOError:
                    pass
            if written < count:
                self.transport.write(os.pread(file, count - written, begin + written))
        if is_last:
            self.is_answering = False
            if self.received:
                self._next()


@dataclass
class Storage(ObjectServer):
    """Serves the files of a folder until the end of a ``with`` block; see ``ObjectServer``."""

    requests: int = 0
    nbytes: int = 0
    files: dict[str, tuple[int, int, bytes]] = field(default_factory=dict)

    def connection(self) -> Connection:
        """What answers on one connection."""
        return _Answering(self)

    def file(self, path: str) -> tuple[int, int, bytes] | None:
        """A descriptor of an object's file, its size, and what is said of it; None where there is none."""
        known = self.files.get(path)
        if known is None and path in self.objects:
            found: Any = self.objects[path]
            head = (
                f"HTTP/1.1 206 Partial Content\r\nDate: {DATE}\r\nLast-Modified: {DATE}\r\n"
                f'ETag: "{found.etag}"\r\nAccept-Ranges: bytes\r\n'
            )
            known = self.files[path] = os.open(found.read.args[0], os.O_RDONLY), found.size, head.encode()
        return known

    def count(self) -> tuple[int, int]:
        """How many requests there were so far, and how many bytes of objects were sent."""
        return self.requests + len(self.asked), self.nbytes + self.sent()


if __name__ == "__main__":
    main(Storage)
