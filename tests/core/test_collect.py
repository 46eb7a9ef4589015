"""Rows of several processes through one writer: each once, whole, or back to who sent them."""

import errno
import json
import os
import random
import shutil
import socket
import stat
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import ClosedError, ConfigError, DataError, DatasetStore, Field, SchemaError
from mouse_core.collect import SharedStore, StoreClient, StoreServer
from mouse_core.collect.wire import MOST_BYTES, decoded, receive
from mouse_core.errors import ForkError, MouseError, StorageError
from mouse_core.images import encode_png
from mouse_core.metadata import DatasetMetadata
from mouse_core.record import Recorder, record
from mouse_core.testing import example_columns
from tests.core.killing import in_child


def numbered(first: int, n: int) -> dict[str, Any]:
    return {
        "observation": np.zeros((n, 2), np.float32),
        "action": np.zeros(n, np.int64),
        "reward": np.arange(first, first + n, dtype=np.float32),
        "done": np.zeros(n, np.int64),
    }


def rewards(store: DatasetStore) -> list[float]:
    return [row["reward"] for row in store[:]]


@pytest.fixture
def store() -> DatasetStore:
    return DatasetStore()


@pytest.fixture
def server(store: DatasetStore) -> Iterator[StoreServer]:
    with StoreServer(store) as server:
        yield server


class Lossy:
    """A channel that loses calls and answers, and sends some again, as networks and dying actors do."""

    def __init__(self, shared: SharedStore, rng: random.Random) -> None:
        self.shared, self.rng, self.lost = shared, rng, 0

    def connect(self, timeout_s: float) -> None:
        self._maybe_lose()

    def exchange(self, call: Mapping[str, Any], parts: Sequence[memoryview]) -> Mapping[str, Any]:
        self._maybe_lose()
        body = memoryview(b"".join(parts))
        reply = self.shared.answer(dict(call), body)
        if self.rng.random() < 0.2:
            reply = self.shared.answer(dict(call), body)
        self._maybe_lose()
        return reply

    def _maybe_lose(self) -> None:
        if self.rng.random() < 0.25:
            self.lost += 1
            raise ConnectionResetError("lost")

    def close(self) -> None: ...


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_what_is_sent_again_is_written_once(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    store = DatasetStore() if where == "memory" else DatasetStore.open(tmp_path / "s", "a", sync="none")
    shared, rng = SharedStore(store), random.Random(7)
    channels = [Lossy(shared, rng) for _ in range(2)]
    clients = [StoreClient(channel, name, timeout_s=60) for channel, name in zip(channels, "ab", strict=True)]
    expected: list[float] = []
    for turn in range(60):
        n = rng.choice((1, 3, 50))
        clients[turn % 2].extend(numbered(100 * turn, n))
        expected += [100 * turn + row for row in range(n)]
        if turn % 7 == 0:
            with pytest.raises(MouseError):
                clients[turn % 2].extend({**numbered(5, 2), "odd": [1, 2]})
    assert sum(channel.lost for channel in channels) > 30
    assert rewards(store) == expected
    assert shared.counts == {"a": 30, "b": 30}
    assert [client.written for client in clients] == [30, 30]
    store.close()


def test_processes_write_to_the_store_of_another_which_writes_too(store: DatasetStore, server: StoreServer) -> None:
    children = []
    for number in range(3):
        child = os.fork()
        if not child:
            try:
                with StoreClient(server.address, f"actor-{number}") as client:
                    for turn in range(20):
                        client.extend(numbered(1000 * number + 10 * turn, 10))
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    for turn in range(20):
        store.extend(numbered(9000 + turn, 1))
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    found = rewards(store)
    assert sorted(found) == sorted([*range(200), *range(1000, 1200), *range(2000, 2200), *range(9000, 9020)])
    for number in range(3):  # in order, and those of a call together
        mine = [value for value in found if 1000 * number <= value < 1000 * number + 200]
        assert mine == sorted(mine)
    begins = [place for place, value in enumerate(found) if value % 10 == 0 and value < 9000]
    assert all(found[place : place + 10] == [found[place] + row for row in range(10)] for place in begins)
    assert server.clients == {f"actor-{number}": 20 for number in range(3)}


@pytest.mark.parametrize(
    "rows",
    [
        {**numbered(0, 3), "odd": [1, 2, 3]},
        {name: values for name, values in numbered(0, 3).items() if name != "done"},
        {**numbered(0, 3), "reward": ["a", "b", "c"]},
        {**numbered(0, 3), "action": np.array([0.5, 1, 2])},
        {**numbered(0, 3), "observation": np.zeros((3, 5), np.float32)},
        {**numbered(0, 3), "done": [0, 1]},
        [{"reward": 1.0}, {"action": 1}],
        5,
    ],
)
def test_refused_rows_come_back_to_who_sent_them(rows: Any, store: DatasetStore, server: StoreServer) -> None:
    local = DatasetStore()
    local.extend(numbered(0, 5))
    with StoreClient(server.address, "a") as client, StoreClient(server.address, "b") as other:
        client.extend(numbered(0, 5))
        with pytest.raises(MouseError) as expected:
            local.extend(rows)
        with pytest.raises(type(expected.value)) as found:
            client.extend(rows)
        if not isinstance(rows, list | int):
            assert str(found.value) == str(expected.value)
        other.extend(numbered(5, 2))
        client.extend(numbered(7, 2))
        assert rewards(store) == list(range(9))
        assert (client.written, other.written) == (2, 1)


def test_values_arrive_as_they_would_in_a_store_here(server: StoreServer, store: DatasetStore) -> None:
    local = DatasetStore()
    columns = example_columns(20)
    columns |= {
        "note": [f"é{row}" for row in range(20)],
        "picture": [encode_png(np.full((4, 4, 1), row, np.uint8)) for row in range(20)],
        "half": np.arange(20, dtype=np.float16),
        "flag": np.arange(20) % 2 == 0,
        "ragged": [list(range(row + 1)) for row in range(20)],
        "pairs": [np.array([row, 1], np.int32) for row in range(20)],
        "maybe": [None if row % 3 else row for row in range(20)],
        "deep": [{"x": row, "y": [str(row)]} for row in range(20)],
        "grid": np.arange(20 * 6).reshape(20, 2, 3)[:, ::-1],
    }
    with StoreClient(server.address, "a") as client:
        for one in (local, client):
            one.extend(columns)
            one.append({name: values[3] for name, values in columns.items()})
            one.extend([{name: values[row] for name, values in columns.items()} for row in (4, 5)])
            one.extend({name: values[:0] for name, values in columns.items()})
        assert client.written == 3
    assert store.columns == local.columns
    assert store.to_dataset().data.table.equals(local.to_dataset().data.table)
    with StoreClient(server.address, "a") as client, pytest.raises(DataError, match="column 'note': expected numbers"):
        client.extend({**columns, "note": [object()] * 20})


def test_a_mask_and_whole_numbers_arrive_as_they_are(server: StoreServer, store: DatasetStore) -> None:
    stamp = 1764345600123456789
    rows = numbered(0, 3) | {
        "observation": np.array([[stamp + number] for number in range(3)]),
        "episode_step": np.ma.masked_array(np.arange(3), [0, 1, 0]),
    }
    with StoreClient(server.address, "a") as client:
        client.extend(rows)
        hidden = np.ma.masked_array(rows["reward"], [0, 1, 0])
        part = np.ma.masked_array(np.ones((3, 2)), [[0, 0], [0, 0], [0, 1]])
        for bad in ({"reward": hidden}, {"metadata_x": part}):
            with pytest.raises(DataError, match=next(iter(bad))):
                client.extend(rows | bad)
    assert [row["observation"] for row in store] == [[stamp], [stamp + 1], [stamp + 2]]
    assert [row["episode_step"] for row in store] == [0, None, 2]


TYPED = {
    "nanoseconds": np.arange(3).astype("datetime64[ns]"),
    "seconds": np.array(["NaT", "2020-01-01", "1970-01-01"], "datetime64[s]"),
    "elapsed": np.arange(3).astype("timedelta64[us]"),
    "text": np.array(["a", "", "ü"]),
    "bytes": np.array([b"a", b"", b"bc"]),
    "whole": pa.array([1, None, 2**60 + 1]),
    "flags": pa.array([True, None, False]),
    "halves": pa.chunked_array([[0.5], [None, 1.5]], pa.float32()),
    "stamps": pa.array([0, 1, 2], pa.timestamp("ns")),
    "money": pa.array(["1.50", "2.25", "0.00"]).cast(pa.decimal128(10, 2)),
    "lists": pa.array([[1], [2, 3], []], pa.list_(pa.int32())),
}


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("many", [True, False])
def test_types_and_nulls_arrive_as_in_a_store_here(
    name: str, many: bool, server: StoreServer, store: DatasetStore
) -> None:
    here = DatasetStore()
    with StoreClient(server.address, "a") as client:
        for writer in (here, client):
            rows = {**numbered(0, 3), "metadata_x": TYPED[name]}
            if many:
                writer.extend(rows)
            else:
                for row in range(3):
                    writer.append({column: values[row] for column, values in rows.items()})
    assert store.columns == here.columns
    assert [row["metadata_x"] for row in store] == [row["metadata_x"] for row in here]


def test_what_has_no_type_in_a_store_is_refused_by_the_client(server: StoreServer, store: DatasetStore) -> None:
    offsets = pa.py_buffer(np.array([0, 1 << 30, 2, 3], np.int32))
    damaged = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    with StoreClient(server.address, "a") as client:
        for values in (np.zeros(3, [("x", "f4"), ("y", "f4")]), [2**70] * 3, damaged):
            with pytest.raises(DataError, match="column 'metadata_x': expected"):
                client.extend({**numbered(0, 3), "metadata_x": values})
    assert len(store) == 0


def test_a_client_waits_for_a_server_that_is_started_again(tmp_path: Path) -> None:
    store = DatasetStore.open(tmp_path / "s", "a")
    first = StoreServer(store)
    client = StoreClient(tmp_path / "s", "a", timeout_s=20)
    client.extend(numbered(0, 5))
    first.close()
    store.close()
    assert not (tmp_path / "s" / "server.socket").exists()
    waiting = threading.Thread(target=client.extend, args=(numbered(5, 5),))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    with DatasetStore.open(tmp_path / "s", "a") as again, StoreServer(again) as second:
        waiting.join(timeout=20)
        assert second.clients == {"a": 2}
        client.flush()
        assert rewards(DatasetStore.open(tmp_path / "s")) == list(range(10))
    client.close()


def test_a_name_is_one_client(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mouse_core.collect.server._PATIENCE_S", 0.1)
    client = StoreClient(server.address, "a")
    client.extend(numbered(0, 1))
    with pytest.raises(ConfigError, match="expected a unique name, found 'a'"):
        StoreClient(server.address, "a", timeout_s=0)
    client.close()
    with StoreClient(server.address, "a") as again:
        assert again.written == 1
    for name in ("", "x" * 300, 5):
        with pytest.raises(ConfigError, match="name: expected"):
            StoreClient(server.address, name)  # type: ignore[arg-type]


def test_who_is_not_there_or_was_closed(server: StoreServer, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"expected an answer of .* within 0 s"):
        StoreClient(tmp_path / "nobody", "a", timeout_s=0)
    with pytest.raises(ConfigError, match="address: expected"):
        StoreClient(5, "a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a free address"):
        StoreServer(DatasetStore(), server.address)
    with pytest.raises(ConfigError, match="store: expected a DatasetStore"):
        StoreServer("runs")  # type: ignore[arg-type]
    client = StoreClient(server.address, "a", timeout_s=0.1)
    child = os.fork()
    if not child:
        try:
            client.extend(numbered(0, 1))
        except ForkError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    server.close()
    with pytest.raises(StorageError, match="expected an answer"):
        client.extend(numbered(0, 1))
    client.close()
    with pytest.raises(ClosedError, match="expected an open client"):
        client.extend(numbered(0, 1))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        with StoreServer(DatasetStore(), Path(folder) / "socket") as server:
            assert stat.S_IMODE(os.stat(server.address).st_mode) == 0o600

            def connect() -> None:
                os.setuid(65_534)
                with socket.socket(socket.AF_UNIX) as other, pytest.raises(PermissionError):
                    other.connect(server.address)

            in_child(connect)


def test_only_the_socket_of_a_dead_server_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "rows"
    address.write_text("no socket")
    (tmp_path / "link").symlink_to(address)
    for other in (address, tmp_path / "link"):
        with pytest.raises(ConfigError, match="expected a free address, found a file at"):
            StoreServer(DatasetStore(), other)
    assert address.read_text() == "no socket"
    address.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(address))
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect_ex", lambda *_: errno.EACCES)  # of another user
        with pytest.raises(StorageError, match="Permission denied"):
            StoreServer(DatasetStore(), address)
    assert address.is_socket()
    with StoreServer(DatasetStore(), address), pytest.raises(ConfigError, match="found a server at"):
        StoreServer(DatasetStore(), address)


def test_a_long_path_is_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    with DatasetStore.open(folder, "a") as store, StoreServer(store), StoreClient(folder, "a") as client:
        client.extend(numbered(0, 3))
        assert len(store) == 3


def test_what_is_no_call_is_refused_and_harms_nobody(server: StoreServer, store: DatasetStore) -> None:
    rng = np.random.default_rng(3)
    with StoreClient(server.address, "a") as client:
        for turn in range(60):
            with connected(server) as raw:
                text = rng.choice([b"{}", b"[1]", b'{"call": "write"}', b'{"call": "hello", "client": 5}', b"nonsense"])
                raw.sendall(rng.bytes(int(rng.integers(60))) if turn % 2 else head(text, int(rng.integers(9))) + text)
                with suppress(ConnectionError):
                    raw.shutdown(socket.SHUT_WR)
                    while raw.recv(4096):
                        pass
        for text in (b'{"call": "hello", "client": ["a"]}', b'{"a":' * 20_000 + b"1" + b"}" * 20_000, b"[" * 4000):
            with connected(server) as raw, suppress(ConnectionError):
                raw.sendall(head(text) + text)
                while raw.recv(4096):
                    pass
            with connected(server) as raw, suppress(ConnectionError):
                said_hello(raw, f"raw {len(text)}")
                raw.sendall(head(text) + text)
                assert not raw.recv(4096)
        client.extend(numbered(0, 2))
    shared = SharedStore(DatasetStore())
    write: dict[str, Any] = {"call": "write", "client": "a", "number": 1}
    for call in (
        {},
        {"call": "write", "client": "a"},
        {**write, "columns": [["x", "array", "|O", [1], 8]]},
        {**write, "columns": [["x", "array", "<i8", [10**12], 8]]},
        {**write, "columns": [["x", "array", "<i8", [-1], 8]]},
        {**write, "columns": [["x", "array", "<i8", [10**9, 0], 0], ["y", "array", "<i8", [1], 8]]},
        {**write, "columns": [["x", "arrays", "<i8", [[10**9, 0], [1]], 8]]},
        {**write, "columns": [["x", "array", "<i8", [1] * 40, 8]]},
        {**write, "columns": [["x", "arrays", "", [1], 8]]},
        {**write, "columns": [["x", "arrow", "", [1], 8]]},
        {**write, "columns": []},
        {**write, "number": 7, "columns": [["x", "array", "<i8", [1], 8]]},
        {**write, "client": None},
    ):
        reply = shared.answer(call, memoryview(bytes(8)))
        assert reply["error"] in ("ConfigError", "DataError"), reply
    assert len(shared.store) == 0
    assert len(store) == 2


def connected(server: StoreServer) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(30)
    raw.connect(server.address)
    return raw


def head(text: bytes, nbytes: int = 0) -> bytes:
    return b"MSC1" + len(text).to_bytes(4, "little") + nbytes.to_bytes(8, "little")


def said_hello(raw: socket.socket, name: str) -> None:
    text = json.dumps({"call": "hello", "client": name, "token": name}).encode()
    raw.sendall(head(text) + text)
    assert raw.recv(4096).endswith(b'{"count": 0}')


def test_who_finds_a_full_queue_waits_as_long_as_the_time_out_says(tmp_path: Path, store: DatasetStore) -> None:
    path = str(tmp_path / "busy")
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(path)
        busy.listen(0)
        others = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for other in others:
            other.setblocking(False)
        assert [other.connect_ex(path) for other in others][-1] == errno.EAGAIN
        with pytest.raises(StorageError, match=r"expected an answer of .* within 0 s"):
            StoreClient(path, "a", timeout_s=0)
        waiting = threading.Thread(target=lambda: StoreClient(path, "a", timeout_s=30).extend(numbered(0, 3)))
        waiting.start()
        waiting.join(0.05)
    os.unlink(path)
    with StoreServer(store, path):
        waiting.join(30)
    assert rewards(store) == [0, 1, 2]


def test_a_length_that_is_announced_takes_no_memory() -> None:
    resource = pytest.importorskip("resource")
    here, there = socket.socketpair()
    with here, there:
        here.sendall(head(b"{}", MOST_BYTES) + b"{}" + bytes(100))
        here.shutdown(socket.SHUT_WR)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ConnectionResetError):
            receive(there)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_who_says_nothing_or_half_a_message_is_let_go(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreClient(server.address, "a") as client:
        monkeypatch.setattr("mouse_core.collect.server._HELLO_S", 0.05)
        monkeypatch.setattr("mouse_core.collect.server._STALL_S", 0.05)
        with connected(server) as raw:
            assert not raw.recv(1)
        with connected(server) as raw:  # nothing is announced before a hello
            raw.sendall(head(b"{}", 1 << 20))
            assert not raw.recv(1)
        with connected(server) as raw:
            said_hello(raw, "b")
            raw.sendall(head(b"{}", 1 << 20))
            assert not raw.recv(1)
        client.extend(numbered(0, 2))
        assert len(server.clients) == 1


def test_a_server_that_may_open_no_more_files_goes_on_when_it_may(
    server: StoreServer, store: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    def full(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", full)
    with StoreClient(server.address, "a"), StoreClient(server.address, "b") as client:
        client.extend(numbered(0, 2))
    assert (len(store), failures) == (2, [])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"0" * 10_000_000]),
        pa.array(["a" * 10_000]).dictionary_encode().take(pa.array([0] * 1000)),
        pa.nulls(10_000_000),
        pa.ListArray.from_arrays([0, 10_000_000], pa.nulls(10_000_000)),
        pa.FixedSizeListArray.from_arrays(pa.nulls(10_000_000), 10_000_000),
        pa.RunEndEncodedArray.from_arrays(pa.array([10_000_000]), pa.array(["a"])),
        pa.array(["a" * 10_000] * 1000, pa.string_view()),
    ],
    ids=lambda column: str(column.type),
)
def test_a_small_body_is_no_large_one(column: pa.Array) -> None:
    """What would be far larger in memory is refused before it is there."""
    batch = pa.record_batch([column], [""])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(batch)
    plain = batch.schema.serialize().to_pybytes() + batch.serialize().to_pybytes()
    bodies = [sink.getvalue().to_pybytes(), *([] if len(plain) > 1_000_000 else [plain])]
    for body in bodies:
        assert len(body) < 100_000
        described = [["x", "arrow", "", [len(column)], len(body)]]
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=r"expected|cannot decode"):
                decoded(described, memoryview(body))
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


class Direct:
    """A channel that brings all, and notes what."""

    def __init__(self, shared: SharedStore) -> None:
        self.shared = shared
        self.brought: list[tuple[Mapping[str, Any], bytes]] = []

    def connect(self, timeout_s: float) -> None: ...

    def exchange(self, call: Mapping[str, Any], parts: Sequence[memoryview]) -> Mapping[str, Any]:
        self.brought.append((dict(call), b"".join(parts)))
        return self.shared.answer(call, memoryview(self.brought[-1][1]))

    def close(self) -> None: ...


@pytest.mark.parametrize("owner_writes", ["meanwhile", "after the kill"])
def test_rows_of_the_owner_are_not_taken_for_a_clients(
    owner_writes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is killed when it is known what comes, and nothing of it is there yet."""
    folder = tmp_path / "s"
    child = os.fork()
    if not child:
        try:
            store = DatasetStore.open(folder, "a")
            client = StoreClient(Direct(SharedStore(store)), "a")
            client.extend(numbered(0, 10))
            extend = store.extend

            def killed_before(columns: Any) -> None:
                if owner_writes == "meanwhile":
                    owner = threading.Thread(target=extend, args=(numbered(900, 10),), daemon=True)
                    owner.start()
                    owner.join(timeout=0.2)
                os._exit(9)

            monkeypatch.setattr(store, "extend", killed_before)
            client.extend(numbered(10, 10))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if owner_writes == "after the kill":
        for begin in (100, 200):
            with DatasetStore.open(folder, "a") as store:
                store.extend(numbered(begin, 10))
    with DatasetStore.open(folder, "a") as store:
        shared = SharedStore(store)
        assert shared.counts == {"a": 1}
        StoreClient(Direct(shared), "a").extend(numbered(10, 10))
        assert [value for value in rewards(store) if value < 100] == list(range(20))
        assert SharedStore(store).counts == {"a": 2}


def test_what_a_kill_left_of_a_write_is_gone_on_with_behind_the_owners_rows(tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path / "s", "a") as store:
        client = StoreClient(Direct(SharedStore(store)), "a")
        client.extend(numbered(0, 10))
    with DatasetStore.open(tmp_path / "killed", "a") as store:
        store.extend(numbered(0, 6))
    shutil.copy(tmp_path / "s" / "clients.log", tmp_path / "killed")
    with DatasetStore.open(tmp_path / "killed", "a") as store:
        store.extend(numbered(100, 3))
    for turn in range(2):
        with DatasetStore.open(tmp_path / "killed", "a") as store:
            shared = SharedStore(store)
            assert shared.counts == {"a": turn}
            if not turn:
                StoreClient(Direct(shared), "a").extend(numbered(0, 10))
            assert rewards(store) == [0, 1, 2, 3, 4, 5, 100, 101, 102, 6, 7, 8, 9]


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_two_clients_of_one_name_lose_nothing_silently(where: str, tmp_path: Path) -> None:
    store = DatasetStore() if where == "memory" else DatasetStore.open(tmp_path / "s", "a")
    shared = SharedStore(store)
    channel = Direct(shared)
    one, other = StoreClient(channel, "a"), StoreClient(channel, "a")
    with pytest.raises(ConfigError, match="expected a unique name, found 'a'"):
        one.extend(numbered(0, 1))
    other.extend(numbered(10, 1))
    with pytest.raises(ConfigError, match="expected a unique name"):
        one.flush()
    (hello, _) = channel.brought[0]  # it comes again
    assert shared.answer(hello, memoryview(b""))["error"] == "ConfigError"
    again = StoreClient(channel, "a")
    assert again.written == 1
    again.extend(numbered(20, 1))
    assert rewards(store) == [10, 20]
    # A new process knows of the names no more, but of the rows.
    if where == "folder":
        shared = SharedStore(store)
    (call, body) = channel.brought[-1]
    assert shared.answer(call, memoryview(body)) == {"count": 2}
    for number, rows in ((2, bytes(len(body))), (1, body), (4, body)):
        assert "another client" in shared.answer({**call, "number": number}, memoryview(rows))["message"]
    assert rewards(store) == [10, 20]
    store.close()


@pytest.mark.parametrize("damage", ["flipped", "flipped at the end", "cut", "gone"])
def test_a_damaged_log_of_clients_is_an_error(damage: str, tmp_path: Path) -> None:
    """A last record that was acknowledged is not taken for one that a crash tore: its rows would be written twice."""
    with (
        DatasetStore.open(tmp_path / "s", "a") as store,
        StoreServer(store),
        StoreClient(tmp_path / "s", "a") as client,
    ):
        for turn in range(3):
            client.extend(numbered(turn, 1))
    log = tmp_path / "s" / "clients.log"
    content = bytearray(log.read_bytes())
    if damage.startswith("flipped"):
        content[20 if damage == "flipped" else -1] ^= 1
    log.write_bytes(content[: -1 if damage == "cut" else None])
    if damage == "gone":
        log.unlink()
    with DatasetStore.open(tmp_path / "s", "a") as store, pytest.raises(DataError, match=r"clients\.log: expected"):
        SharedStore(store)


def test_rows_that_a_crash_of_the_machine_took_are_written_again(tmp_path: Path) -> None:
    """The log may have reached the disk and the rows may not: then the client's call is not there."""
    with DatasetStore.open(tmp_path / "s", "a") as store:
        shared = SharedStore(store)
        clients = [StoreClient(Lossy(shared, random.Random(50)), name) for name in "ab"]
        clients[0].extend(numbered(0, 4))
        clients[1].extend(numbered(4, 3))
        shared.close()
    other = tmp_path / "other"
    with DatasetStore.open(other, "a") as store:
        store.extend(numbered(0, 4))
        (other / "clients.log").write_bytes((tmp_path / "s" / "clients.log").read_bytes())
        shared = SharedStore(store)
        assert shared.counts == {"a": 1, "b": 0}
        client = StoreClient(Lossy(shared, random.Random(50)), "b")
        client.extend(numbered(4, 3))
        assert rewards(store) == list(range(7))
        assert SharedStore(store).counts == {"a": 1, "b": 1}


def test_a_disk_that_is_full_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log must know what was refused: rows of others come where those would have been."""
    with DatasetStore.open(tmp_path / "s", "a", sync="none") as store:
        shared = SharedStore(store)
        calm = random.Random()
        monkeypatch.setattr(calm, "random", lambda: 1.0)
        one, other = (StoreClient(Lossy(shared, calm), name, timeout_s=0) for name in "ab")
        one.extend(numbered(0, 3))
        write, left = os.pwrite, 1

        def full(file: int, content: Any, begin: int) -> int:
            nonlocal left
            if not left:
                raise OSError(28, "No space left on device")
            left -= 1
            return write(file, content, begin)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            patch.setattr(
                store, "extend", lambda columns: (_ for _ in ()).throw(StorageError("No space left on device"))
            )
            with pytest.raises(StorageError, match="No space left"):
                one.extend(numbered(3, 3))
            with pytest.raises(StorageError, match="No space left"):
                other.extend(numbered(6, 3))
        other.extend(numbered(6, 3))
        again = SharedStore(store)  # as after a crash
        assert again.counts == {"a": 1, "b": 1}
        one = StoreClient(Lossy(again, calm), "a")
        one.extend(numbered(3, 3))
        assert rewards(store) == [0, 1, 2, 6, 7, 8, 3, 4, 5]


def test_what_was_ever_written_is_known_to_readers_too(tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path / "s", "a", max_rows=100) as store:
        for turn in range(40):
            store.extend(numbered(turn * 10, 10))
            store.flush()
        store.clear()
        store.extend(numbered(0, 7))
        store.flush()
        reader = DatasetStore.open(tmp_path / "s")
        assert (store.written, reader.written, len(reader)) == (407, 407, 7)
    memory = DatasetStore()
    memory.extend(numbered(0, 7))
    memory.clear()
    memory.extend(numbered(0, 2))
    assert (memory.written, len(memory), memory.sync) == (9, 2, "none")


def test_many_calls_leave_a_short_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetStore.open(tmp_path / "s", "a", sync="none") as store:
        shared = SharedStore(store)
        client = StoreClient(Lossy(shared, random.Random(50)), "a")
        monkeypatch.setattr(random.Random, "random", lambda self: 1.0)
        monkeypatch.setattr("mouse_core.collect.shared._MOST_RECORDS", 60)
        for turn in range(70):
            client.extend(numbered(turn, 1))
        assert (tmp_path / "s" / "clients.log").stat().st_size < 60 * 200
        assert shared.counts == {"a": 70}
        assert SharedStore(store).counts == {"a": 70}


def test_a_field_of_ones_own_is_told_by_the_store(tmp_path: Path) -> None:
    store = DatasetStore(fields=[Field("level", bounds=(0, 9))])
    with StoreServer(store) as server, StoreClient(server.address, "a") as client:
        client.extend({**numbered(0, 2), "level": [1, 2]})
        with pytest.raises((DataError, SchemaError), match="level"):
            client.extend({**numbered(0, 2), "level": [1, 20]})


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
def test_recorders_write_to_a_client_what_they_write_to_a_store(alignment: Any, tmp_path: Path) -> None:
    """Rows, columns and what is said of them; of several environments the same episodes."""
    gym = pytest.importorskip("gymnasium")

    def recorded(store: Any, **options: Any) -> None:
        record(Pictures(gym), episodes=2, seed=3, store=store, infos=["steps"], **options)
        envs = gym.vector.SyncVectorEnv([lambda: Pictures(gym)] * 2)
        record(envs, episodes=3, seed=1, store=store, infos=["steps"], **options)
        env = Recorder(Pictures(gym), store, infos=["steps"], **options)
        env.reset(seed=9)
        env.step(1)
        env.close()

    known, store = DatasetStore(alignment=alignment), DatasetStore.open(tmp_path, "a", alignment=alignment)
    recorded(known, images="png")
    with StoreServer(store) as server, StoreClient(server.address, "recorder") as client:
        assert client.alignment == alignment
        recorded(client, images="png")
        assert client.columns == store.columns == known.columns
        assert client.written == 2 + 3 + 1
        with pytest.raises(SchemaError, match="alignment"):
            client.describe(DatasetMetadata(alignment="arrived" if alignment == "outgoing" else "outgoing"))
    assert store[:] == known[:]
    assert store.metadata == known.metadata
    store.close()


class Pictures:
    """An environment of gymnasium that shows pictures, made where gymnasium is there."""

    def __new__(cls, gym: Any) -> Any:
        class Shown(gym.Env):  # type: ignore[misc, name-defined]
            observation_space = gym.spaces.Dict(
                screen=gym.spaces.Box(0, 255, (4, 4, 3), np.uint8), speed=gym.spaces.Box(-1, 1, (2,))
            )
            action_space = gym.spaces.Discrete(2)
            time = 0

            def _seen(self) -> Any:
                screen = np.full((4, 4, 3), self.time, np.uint8)
                return {"screen": screen, "speed": np.full(2, self.time / 9, np.float32)}

            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                self.time = 0
                return self._seen(), {"steps": 0}

            def step(self, action: Any) -> Any:
                self.time += 1
                return self._seen(), float(action), self.time == 4, False, {"steps": self.time}

        return Shown()
