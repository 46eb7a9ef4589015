"""Client of remote objects through the package obstore: S3, Google, Azure, web servers and folders.

The parts of this module, in order: conversion of errors; the options of obstore; a thread that runs requests; a helper
process for forked processes; and the client.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from mouse_core._base.locks import ProcessLock, forks
from mouse_core._base.memo import memo
from mouse_core.errors import ChangedError, ClosedError, ConfigError, DataError, ForkError, MouseError, StorageError
from mouse_core.files.reading import check_inside
from mouse_core.files.writing import storing
from mouse_core.remote.clients.options import ObjectInfo, StorageOptions, public_url, without_secrets

_STATUS = re.compile(r"status code: (\d{3}[ A-Za-z-]*)")
_ROLES = "169.254.169.254"
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")


class MissingObject(DataError):
    """The object does not exist."""


def imported() -> Any:
    """Return the package obstore; if it is missing, raise ImportError with the remedy."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ImportError("remote stores need obstore: pip install 'mouse-data[remote]'") from error
    return obstore


def error_of(error: Exception, shown: str, changed: str, asked: Callable[[], str]) -> MouseError:
    """Convert a client's error to an error of this package.

    Args:
        error: The error.
        shown: The address of the object.
        changed: The error message if the version of the object has changed.
        asked: Function that returns a description of the server and of the source of keys, for messages about denied
            access.
    """
    if isinstance(error, MouseError):
        return error
    exceptions = imported().exceptions
    said = _said(error)
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
        return MissingObject(f"{shown}: expected an object, found none")
    if isinstance(error, exceptions.PreconditionError | exceptions.AlreadyExistsError):
        return ChangedError(changed)
    denied = PermissionError | exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    if isinstance(error, denied) or re.match(r"401|403", said):
        return DataError(f"{shown}: expected permission to read it, found none ({said}); {asked()}")
    if isinstance(error, exceptions.NotSupportedError | NotImplementedError):
        return DataError(f"{shown}: expected a server that supports byte ranges, found a server that does not")
    if "416" in said:
        return DataError(f"{shown}: expected more bytes, found an object that ends earlier ({said})")
    if re.match(r"4\d\d(?<!408)(?<!429)", said):  # another attempt would get the same answer
        return DataError(f"{shown}: the server refused the request: {said}")
    # Without keys, obstore requests the role of the machine, which most machines lack.
    more = f"; {asked()}" if _ROLES in str(error) else ""
    return StorageError(f"{shown}: could not be reached: {said}{more}")


def _said(error: Exception) -> str:
    """Return the public part of a client's error: status and code, without credentials."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        return status[1].strip() + (f" {code[1]}" if code else "")
    lowered = text.lower()
    for sign, words in (("timed out", "no answer in time"), ("timedout", "no answer in time"), ("dns", "no such host")):
        if sign in lowered:
            return words
    if any(sign in lowered for sign in ("decoding", "end of file", "reset", "incomplete", "closed")):
        return "the connection ended in between"
    if "connect" in lowered or "sending request" in lowered:
        return "no connection"
    return f"{type(error).__name__} of the client"


def first_line(error: BaseException, hidden: set[str]) -> str:
    """Return the first line of an error's text, without the texts ``hidden``."""
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    text = without_secrets(next((line for line in lines if line), type(error).__name__))
    for one in sorted(hidden, key=len, reverse=True):
        text = text.replace(one, "...") if len(one) > 3 else text
    return text


_TIMES = {"connect_timeout": "5s", "timeout": "30s"}
# Options that are not part of obstore's configuration.
_OURS = ("client_options", "retry_config", "credential_provider")
_ENDPOINT = re.compile(r"(aws_|google_|azure_)?(storage_)?endpoint(_url)?(_s3)?$")
_HTTP = re.compile(r"(\w+_)?allow_http$", re.IGNORECASE)
# Prefixes of environment variables that clients read, by the first letter of the scheme: s3, gs; az, abfs, adl.
_VARIABLES = {"s": "AWS_", "g": "GOOGLE_", "a": "AZURE_"}


def client_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of obstore's HTTP client: time-outs, and whether the client may connect without TLS."""
    told = {**_TIMES, **dict(options.get("client_options", {}))}
    # In obstore, "allow_http" is an option of the client.
    allowed = [value for name, value in options.items() if _HTTP.match(name)]
    said = {**{name.lower(): value for name, value in os.environ.items()}, **options}
    endpoints = [url, *(value for name, value in said.items() if _ENDPOINT.match(name.lower()))]
    if allowed or any(str(one).startswith("http://") for one in endpoints):
        told["allow_http"] = str((allowed or [True])[0]).lower() == "true"
    return told


def asked_as(url: str, options: Mapping[str, Any]) -> str:
    """Return a text for messages that names the requested server, and the options and environment variables that the
    client reads; the text contains no values of options except the address of the server.
    """
    variables = sorted(name for name in os.environ if name.startswith(_VARIABLES.get(url[0].lower(), "\0")))
    given = {**{name: os.environ[name] for name in variables}, **options}
    named = [value for name, value in given.items() if _ENDPOINT.match(name.lower())]
    server = without_secrets(str(named[-1])) if named else "the server of the address"
    found = f"storage_options {sorted(options) or 'none'} and the environment variables {variables or 'none'}"
    return f"asked {server} with {found}"


AT_ONCE = 128
"""Largest number of concurrent requests."""

GROUP = 10
"""Largest number of ranges in one call of obstore. Calls with several ranges have a lower limit of concurrent calls
than ``AT_ONCE``.
"""

# Seconds to wait for cancelled requests, for the client's threads that run them, and for threads that deliver results.
_SECONDS, _NOTICED, _TOLD = 2.0, 0.4, 0.01

_T = TypeVar("_T")
# Number of forks that preceded the process in which the client's threads began; all clients share the threads.
_begun: list[int] = []


def is_forked() -> bool:
    """Whether this process was forked from a process that had already made requests; the client's threads are then
    missing.
    """
    return bool(_begun) and _begun[0] != forks()


class Asking:
    """Runs the requests of all threads in one separate thread, which starts with the first request; the number of
    concurrent requests is limited.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, ProcessLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = -1
        # Waiting tasks, and running tasks.
        self._tasks: tuple[set[Any], set[Any]] = (set(), set())
        # Set when the program ends; further requests raise errors.
        self._ended = threading.Event()
        # An entry for each thread that is currently calling the loop.
        self._telling: list[None] = []
        self._turns: tuple[asyncio.Semaphore, asyncio.Semaphore] | None = None

    def all(self, requests: Sequence[Callable[[], Awaitable[_T]]], *, in_groups: bool = False) -> list[_T]:
        """Return the results of requests in order; when a request fails, raise its error and cancel the other requests.

        Args:
            requests: Functions that each begin a request.
            in_groups: Whether each request has up to ``GROUP`` ranges.

        Raises:
            ForkError: This process was forked from a process that had made requests; see ``Helper``.
        """
        loop = self._running()
        try:
            return asyncio.run_coroutine_threadsafe(self._gather(requests, int(in_groups)), loop).result()
        except (CancelledError, asyncio.CancelledError, RuntimeError) as error:
            if loop.is_running() and not isinstance(error, CancelledError | asyncio.CancelledError):
                raise
            raise ClosedError(f"{self._name}: the program is ending, so nothing more is read") from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if is_forked():
                raise ForkError(
                    f"{self._name}: expected a process that was forked before the first request, found a process "
                    "that was forked later"
                )
            if self._loop is None:
                self._loop, self._forks = _counted(asyncio.new_event_loop(), self._telling), forks()
                _begun[:] = _begun or [self._forks]
                self._turns = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(2 * AT_ONCE // GROUP)
                threading.Thread(target=_run, args=(self._loop,), name="mouse-remote", daemon=True).start()
                weakref.finalize(self, _end, self._loop, self._forks, self._tasks, self._ended, self._telling)
            return self._loop

    async def _gather(self, requests: Sequence[Callable[[], Awaitable[_T]]], turns: int) -> list[_T]:
        tasks = [asyncio.ensure_future(self._in_turn(request, turns)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _in_turn(self, request: Callable[[], Awaitable[_T]], turns: int) -> _T:
        assert self._turns is not None
        if self._ended.is_set():
            raise asyncio.CancelledError
        waiting, under_way = self._tasks
        task = asyncio.current_task()
        waiting.add(task)
        try:
            async with self._turns[turns]:
                waiting.discard(task)
                under_way.add(task)
                return await request()
        finally:
            waiting.discard(task)
            under_way.discard(task)
            del task  # break the reference cycle between the error and this frame

    def __reduce__(self) -> tuple[Any, ...]:
        return Asking, (self._name,)


def _counted(loop: asyncio.AbstractEventLoop, telling: list[None]) -> asyncio.AbstractEventLoop:
    """Return an event loop that records, in ``telling``, each thread that is inside the loop's method
    ``call_soon_threadsafe``.

    The client's threads deliver results with ``call_soon_threadsafe``, which wakes the loop before the method returns.
    Therefore the program can get a result and end while the thread that delivered the result still waits for the
    interpreter.
    """
    tell = loop.call_soon_threadsafe

    def call_soon_threadsafe(*arguments: Any, **how: Any) -> asyncio.Handle:
        telling.append(None)
        try:
            return tell(*arguments, **how)
        finally:
            telling.pop()

    loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[assignment, method-assign]
    return loop


def _end(
    loop: asyncio.AbstractEventLoop,
    known: int,
    tasks: tuple[set[Any], set[Any]],
    ended: threading.Event,
    telling: list[None],
) -> None:
    """Cancel all requests, and wait until the client's threads have handled the cancellation.

    A client thread that returns to an ended interpreter would abort the process.
    """
    if known != forks() or not loop.is_running():
        return
    if asyncio._get_running_loop() is loop:  # a request had the last reference
        loop.stop()
        return
    ended.set()
    with suppress(Exception):
        asyncio.run_coroutine_threadsafe(_give_up(*tasks), loop).result(_SECONDS + 1)
    latest = time.monotonic() + _SECONDS
    while telling and time.monotonic() < latest:
        time.sleep(_TOLD)
    time.sleep(_TOLD)  # until these threads have left the interpreter
    loop.call_soon_threadsafe(loop.stop)


async def _give_up(waiting: Any, under_way: Any) -> None:
    # The client's threads return once for each cancelled request.
    left = [task for task in under_way if not task.done()]
    for task in list(waiting):
        task.cancel()
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_SECONDS)
        await asyncio.sleep(_NOTICED)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


# Largest number of concurrent calls in a helper process; each call may have many ranges.
_THREADS = 32


class Helper:
    """A helper process that makes the requests of a client.

    Args:
        client: The class of the client, and its arguments.
    """

    def __init__(self, *client: Any) -> None:
        command = [sys.executable, "-c", "from mouse_core.remote.clients.objects import main; main()"]
        # Answers have a separate pipe, and the helper gets the module search paths of this process.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock, self._number = threading.Lock(), 0
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._from = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._into.send((sys.path, client))
        threading.Thread(target=self._read, daemon=True, name="mouse-remote").start()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of the client in the helper process, or raise its error."""
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            self._waiting[self._number] = future
            self._into.send((self._number, method, arguments))
        return future.result()

    def _read(self) -> None:
        try:
            while True:
                number, result, error = self._from.recv()
                future = self._waiting.pop(number)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
        except (EOFError, OSError, ValueError):
            for future in list(self._waiting.values()):
                future.set_exception(StorageError("the helper process that sends requests has ended"))


def main() -> None:
    """Main function of the helper process: answer requests until the input ends."""
    requests, answers = (Connection(os.dup(stream.fileno())) for stream in (sys.stdin, sys.stdout))
    sys.path[:], (kind, url, options) = requests.recv()
    from mouse_core.remote.clients.options import StorageOptions

    client, lock = kind(url, StorageOptions(options)), threading.Lock()

    def work(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            result = getattr(client, method)(*arguments)
            if method == "get_all":
                result = [bytes(one) for one in result]
        except Exception as failed:
            error = failed
        with lock:
            answers.send((number, result, error))

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            while True:
                pool.submit(work, *requests.recv())
        except EOFError:
            pass


# Below this number of ranges, each request is conditional on the object's version, if the caller gives a version.
_FEW = 3
# Larger ranges are split into several concurrent requests.
_MOST_BYTES = 8 << 20
# The default of retries; with obstore's default of three minutes, a program would seem to hang.
_RETRY = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
}


class FolderClient:
    """Reads, lists and writes the objects below an address. Several threads may use a client concurrently.

    The class of an error shows whether another attempt can succeed:

    - ``StorageError``: a temporary failure, such as a time-out, a dropped connection, status 500 or 503.
    - ``ChangedError``: the version of the object has changed.
    - ``DataError``: the object is missing, or access is denied.

    No message contains a credential, or an address with a query.

    Args:
        url: The address. The attribute ``url`` is the address without credentials, equal for all readers.
        options: The options for obstore.
    """

    def __init__(self, url: str, options: StorageOptions) -> None:
        self.url, self._query = public_url(url), "".join(url.partition("?")[1:])
        self._options = options
        self._asking = Asking(self.url)
        self._lock = ProcessLock()
        self._helper: tuple[int, Helper] | None = None
        # Objects of a local folder that were checked: they are not links to files outside the folder.
        self._inside = set[str]()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Only processes that this process starts get the signature of a signed address.
        query = StorageOptions({"query": self._query} if self._query else {})
        return _again, (type(self), self.url, query, self._options)

    # ------------------------------------------------------------------ reading

    def head(self, path: str) -> ObjectInfo:
        """Return the current size and version of an object.

        Raises:
            DataError: The object is missing, or access is denied.
            StorageError: The request failed; a later request can succeed.
        """
        return self.heads([path])[0]

    def heads(self, paths: Sequence[str]) -> list[ObjectInfo]:
        """Return the current size and version of several objects; see ``head``."""
        self._check_inside(paths)
        if is_forked():
            infos: list[ObjectInfo] = self._helped("heads", list(paths))
            return infos
        return self._ask([(path, partial(self._head, path)) for path in paths])

    def get_all(self, wanted: Sequence[tuple[str, int, int]], versions: dict[str, str]) -> list[bytes | memoryview]:
        """Return byte ranges of several objects, in memory that never changes.

        Args:
            wanted: The path, first byte and end (one past the last byte) of each range.
            versions: The versions that objects must have, by path; "" allows any version, because the caller compares
                checksums.

        Raises:
            ChangedError: An object has another version now.
            DataError: An object is missing, access is denied, or an object ends before a range does.
            StorageError: A request failed; a later request can succeed.
        """
        self._check_inside(dict.fromkeys(path for path, _, _ in wanted))
        if is_forked():
            contents: list[bytes | memoryview] = self._helped("get_all", list(wanted), versions)
            return contents
        pieces: dict[str, list[tuple[int, int, int]]] = {}
        for number, (path, begin, end) in enumerate(wanted):
            some = pieces.setdefault(path, [])
            if end - begin <= _MOST_BYTES:
                some.append((number, begin, end))
            else:
                some += [(number, low, high) for low, high in pairwise([*range(begin, end, _MOST_BYTES), end])]
        groups = [(path, some[at : at + GROUP]) for path, some in pieces.items() for at in range(0, len(some), GROUP)]
        asked = [
            (path, partial(self._get_some, path, [one[1:] for one in some], versions.get(path, "")))
            for path, some in groups
        ]
        parts: list[list[bytes | memoryview]] = [[] for _ in wanted]
        for (_, some), contents in zip(groups, self._ask(asked, in_groups=True), strict=True):
            for (number, _, _), content in zip(some, contents, strict=True):
                parts[number].append(content)
        return [part[0] if len(part) == 1 else b"".join(part) for part in parts]

    def read(self, path: str, *, most_bytes: int) -> tuple[bytes, str]:
        """Return the content of an object and its version.

        Raises:
            DataError: The object has more than ``most_bytes`` bytes, or is missing.
            StorageError: The request failed; a later request can succeed.
        """
        info = self.head(path)
        if info.size > most_bytes:
            raise DataError(f"{self.shown(path)}: expected at most {most_bytes} bytes, found {info.size}")
        if not info.size:
            return b"", info.version
        return bytes(self.get_all([(path, 0, info.size)], {path: info.version})[0]), info.version

    def exists(self, path: str) -> bool:
        """Whether the object exists."""
        try:
            self.head(path)
        except MissingObject:
            return False
        return True

    def listed(self, path: str = "") -> list[ObjectInfo]:
        """Return the objects below a folder, sorted by name.

        Raises:
            ConfigError: The server, such as a web server, cannot list objects.
            StorageError: The request failed; a later request can succeed.
        """
        if self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.shown(path)}: expected a storage that can list files, found a web server")
        if is_forked():
            infos: list[ObjectInfo] = self._helped("listed", path)
            return infos
        (found,) = self._ask([(path, partial(self._list, path))])
        return sorted(found, key=lambda one: one.path)

    @memo
    def _here(self) -> Path | None:
        """The local folder of a ``file://`` address; None for other addresses."""
        return Path(unquote(urlsplit(self.url).path)) if self.url.startswith("file://") else None

    def _check_inside(self, paths: Iterable[str]) -> None:
        """Raise DataError for an object that is a pipe, or a link to a file outside the folder."""
        if self._here is not None and (new := [path for path in paths if path not in self._inside]):
            check_inside([self._here / path for path in new], self._here)
            self._inside |= set(new)

    # ------------------------------------------------------------------ writing

    def make(self) -> None:
        """Create the folder of a ``file://`` address; do nothing for object storage."""
        if self._here is not None:
            with storing(self.url):
                self._here.mkdir(parents=True, exist_ok=True)

    def put(self, path: str, content: bytes | Path, *, version: str | None = None) -> str:
        """Write an object, completely or not at all.

        Args:
            path: The name of the object.
            content: The bytes, or a file with the bytes.
            version: The version that the replaced object must have. With "", no object may exist; with None, any object
                is replaced.

        Returns:
            The version of the new object.

        Raises:
            ChangedError: An object with another version exists.
            StorageError: The object cannot be written.
        """
        (written,) = self._ask([(path, partial(self._put, path, content, version))])
        return str(written)

    def put_all(self, files: Sequence[tuple[str, bytes | Path]]) -> None:
        """Write several objects; see ``put``."""
        self._ask([(path, partial(self._put, path, file, None)) for path, file in files])

    def shown(self, path: str) -> str:
        """Return an object's address for messages."""
        return f"{self.url}/{path}" if path else self.url

    # ------------------------------------------------------------------ obstore

    @memo
    def _store(self) -> Any:
        obstore = imported()
        # Obstore itself reads the environment.
        config = {name: value for name, value in self._options.items() if name not in _OURS and not _HTTP.match(name)}
        times = client_options(self.url, self._options)
        more: dict[str, Any] = {"retry_config": self._options.get("retry_config", _RETRY)}
        if "credential_provider" in self._options:
            more["credential_provider"] = self._options["credential_provider"]
        failed = ""
        try:
            if self.url.startswith(("http://", "https://")):
                return obstore.store.HTTPStore.from_url(self.url + self._query, client_options=times, **more)
            if self.url.startswith("file://"):
                return obstore.store.from_url(self.url)
            return obstore.store.from_url(self.url, config=config, client_options=times, **more)
        except BaseException as error:  # for invalid options, obstore raises its base class, or a panic
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            failed = first_line(error, {str(value) for value in self._options.values()})
        raise ConfigError(
            f"{self.url}: expected an address and options that obstore accepts, found the error: {failed}"
        )

    async def _head(self, path: str) -> ObjectInfo:
        found = await imported().head_async(self._store, path)
        if not _version(found):
            raise DataError(
                f"{self.shown(path)}: expected a server that sends the version of a file (ETag, Last-Modified), "
                "found none; without versions, mixed reads of two versions could not be detected"
            )
        return ObjectInfo(path, found["size"], _version(found))

    async def _get(self, path: str, begin: int, end: int, version: str) -> memoryview:
        options: dict[str, Any] = {"range": (begin, end)}
        if version.startswith('"'):
            # Weak tags and times are compared with the tag or time in the answer.
            options["if_match"] = version
        found = await imported().get_async(self._store, path, options=options)
        if version and _version(found.meta) != version:
            raise ChangedError(self._is_another(path))
        content = memoryview(await found.bytes_async())
        self._check_whole(path, content, begin, end)
        return content

    def _check_whole(self, path: str, content: memoryview, begin: int, end: int) -> None:
        if len(content) != end - begin:
            raise DataError(
                f"{self.shown(path)}: expected the bytes {begin}..{end - 1}, found {len(content)} bytes; "
                "the object ends earlier"
            )

    async def _get_some(self, path: str, ranges: Sequence[tuple[int, int]], version: str) -> list[memoryview]:
        """Return up to ``GROUP`` ranges of an object.

        One call for all ranges needs a third of the processor time of one call for each range. Such a call cannot
        require a version of the object, so the client compares the version after the call. Since different contents
        have different versions, an unchanged version shows that the ranges have this version.
        """
        if version and len(ranges) < _FEW:
            return list(await asyncio.gather(*(self._get(path, begin, end, version) for begin, end in ranges)))
        begins, ends = zip(*ranges, strict=True)
        try:
            if len(ranges) == 1:
                found = [await imported().get_range_async(self._store, path, start=begins[0], end=ends[0])]
            else:
                found = await imported().get_ranges_async(self._store, path, starts=begins, ends=ends, coalesce=0)
        finally:
            if version and (await self._head(path)).version != version:
                raise ChangedError(self._is_another(path))
        contents = [memoryview(one) for one in found]
        for content, (begin, end) in zip(contents, ranges, strict=True):
            self._check_whole(path, content, begin, end)
        return contents

    async def _list(self, path: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        async for page in imported().list(self._store, prefix=path or None):
            found += [ObjectInfo(one["path"], one["size"], _version(one)) for one in page]
        return found

    async def _put(self, path: str, content: bytes | Path, version: str | None) -> str:
        obstore = imported()
        options: dict[str, Any] = {}
        if version is not None:
            options = {"mode": "create" if not version else {"e_tag": version}, "use_multipart": False}
        try:
            done = await obstore.put_async(self._store, path, content, **options)
        except (obstore.exceptions.NotSupportedError, NotImplementedError):
            # The storage has no conditional writes, so only this check detects a second writer.
            there = ""
            try:
                there = (await self._head(path)).version
            except FileNotFoundError:
                pass
            if there != version:
                raise ChangedError(self._is_another(path)) from None
            done = await obstore.put_async(self._store, path, content)
        return str(done.get("e_tag") or "")

    def _is_another(self, path: str) -> str:
        return (
            f"{self.shown(path)}: expected the version of the object that was opened, found another version; the "
            "object was replaced after it was opened"
        )

    def _helped(self, method: str, *arguments: Any) -> Any:
        """Run a method in a helper process, because this process cannot make requests; return the result."""
        with self._lock:
            if self._helper is None or self._helper[0] != forks():
                self._helper = forks(), Helper(type(self), self.url + self._query, dict(self._options))
        return self._helper[1].call(method, *arguments)

    def _ask(
        self, requests: Sequence[tuple[str, Callable[[], Awaitable[Any]]]], *, in_groups: bool = False
    ) -> list[Any]:
        """Return the results of requests; convert errors to errors of this package, without secrets."""
        imported()
        failure: MouseError
        try:
            return self._asking.all([partial(_named, path, one) for path, one in requests], in_groups=in_groups)
        except _Failed as failed:
            changed, asked = self._is_another(failed.path), partial(asked_as, self.url, self._options)
            failure = error_of(failed.error, self.shown(failed.path), changed, asked)
            failed.__traceback__ = None  # break the reference cycle between tasks and error
        # Raised outside the except block, because the client's error contains addresses with queries.
        try:
            raise failure
        finally:
            del failure  # the traceback refers to this frame, and thus to all objects of the caller


class _Failed(Exception):
    """The error of a request, with the path of the request's object."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(path)
        self.path, self.error = path, error


async def _named(path: str, request: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await request()
    except Exception as error:
        # The client's threads may keep the error, whose traceback refers to all objects of the caller.
        raise _Failed(path, error.with_traceback(None)) from None


def _again(kind: type[FolderClient], url: str, query: StorageOptions, options: StorageOptions) -> FolderClient:
    return kind(url + str(query.get("query", "")), options)


def _version(found: Any) -> str:
    """Return the version of an object from the client's metadata; different contents have different versions."""
    if found.get("e_tag"):
        return str(found["e_tag"])
    changed = found.get("last_modified")
    # An object without a time has the time 0.
    return "" if changed is None or not changed.timestamp() else f"{changed.isoformat()} {found['size']}"
