"""Rows elsewhere are those that were written, or an error: whatever was changed in storage or on the way."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core.errors import ChangedError, ConfigError, DataError
from mouse_core.remote import Reaching
from mouse_core.remote.clients.objects import FolderClient
from mouse_core.store.remote import objects, upload
from tests.core.object_server import Fault, Object, ObjectServer

pytest.importorskip("obstore")
ROWS, URL = 5000, "s3://data/runs"


@pytest.fixture(scope="module")
def server():
    with ObjectServer() as running:
        yield running


@pytest.fixture
def options(server, tmp_path):
    server.objects.clear()
    server.faults.clear()
    server.asked.clear()
    return {"storage_options": server.options, "cache": tmp_path / "cache", "cache_bytes": 64 << 20}


@pytest.fixture(scope="module", params=["columns", "windows"])
def folder(request, tmp_path_factory) -> Path:
    """A store of two files."""
    made = tmp_path_factory.mktemp("stores") / request.param
    for first in (0, ROWS):
        number = np.arange(first, first + ROWS)
        with DatasetStore.open(made, "a", layout=request.param) as store:
            store.extend(
                {
                    "action": number % 5,
                    "reward": number / 7,
                    "done": (number % 50 == 49).astype(np.int64),
                    "observation": (number[:, None] + np.arange(16)).astype(np.float32),
                }
            )
    return made


def send(server: ObjectServer, folder: Path, how: str) -> None:
    if how == "copied":
        server.put_folder("data/runs", folder)
    else:
        upload(folder, URL, reaching=Reaching(storage_options=server.options))


def change(server: ObjectServer, number: int, place: float) -> str:
    """Change a byte of a segment, which keeps its length and its ETag; its path."""
    path = sorted(path for path in server.objects if path.endswith(".arrow"))[number]
    found = server.objects[path]
    content = bytearray(found.read(0, found.size))
    content[int(place * found.size)] ^= 1
    data = bytes(content)
    server.objects[path] = Object(found.size, lambda begin, end: data[begin:end], found.etag)
    return path


def outcome(source: BatchSource, index: int) -> Any:
    """A batch as bytes, or the error in its place."""
    try:
        return {name: values.tobytes() for name, values in source[index].items()}
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("how", ["uploaded", "copied"])
def test_a_changed_byte_is_an_error_and_never_a_row(server, options, folder, how):
    send(server, folder, how)
    path = change(server, 1, 0.5)
    right, there = BatchSource(DatasetStore.open(folder), 16, 8), DatasetStore.open(URL, **options)
    for store in (there, pickle.loads(pickle.dumps(there)), DatasetStore.open(URL, verify=True, **options)):
        source, wrong = BatchSource(store, 16, 8), 0
        for index in range(40):
            found = outcome(source, index)
            if isinstance(found, str):
                assert f"s3://{path}: expected the " in found
                assert "damaged" in found
                wrong += 1
            else:
                assert found == outcome(right, index)
        assert wrong
    # A cache that others filled with what came as it was is no reason to believe it.
    for _ in range(2):
        unheld = BatchSource(DatasetStore.open(URL, verify=False, **options), 16, 8)
        believed = [outcome(unheld, index) for index in range(40)]
        assert not any(isinstance(one, str) for one in believed)
        assert believed != [outcome(right, index) for index in range(40)]
        assert any(isinstance(outcome(source, index), str) for index in range(40))


def test_an_object_that_was_written_anew_is_told_by_its_digests(server, options, folder, tmp_path):
    """Nobody asks which version an object has before they say that something is wrong."""
    send(server, folder, "uploaded")
    server.asked.clear()
    source = BatchSource(DatasetStore.open(URL, **options), 16, 8)
    for index in range(5):
        assert not isinstance(outcome(source, index), str)
    asked = Counter(one.method for one in server.asked if one.path.endswith(".arrow"))
    assert asked["GET"] > 2
    assert asked["HEAD"] <= 2  # each file as it is opened
    there = DatasetStore.open(URL, **options | {"cache": tmp_path / "another"})
    for path in [path for path in server.objects if path.endswith(".arrow")]:
        server.put(path, server.objects[path].read(0, 1 << 30)[::-1])
    with pytest.raises(ChangedError, match="expected the object that was there when it was opened"):
        _ = BatchSource(there, 16, 8)[0]


@pytest.mark.parametrize("how", ["uploaded", "copied"])
def test_what_was_damaged_on_the_way_is_asked_for_again(server, options, folder, how):
    send(server, folder, how)
    server.faults.append(Fault(r"arrow$", "damage", times=1))
    there = DatasetStore.open(URL, **options)
    right, source = (BatchSource(store, 64, 8) for store in (DatasetStore.open(folder), there))
    for index in range(5):
        assert outcome(source, index) == outcome(right, index)
    assert not server.faults[0].times
    server.asked.clear()
    again = BatchSource(DatasetStore.open(URL, **options), 64, 8)
    assert outcome(again, 3) == outcome(right, 3)
    assert server.sent("sums$") == 0  # which the cache has, too
    assert server.sent("arrow$") < min(one.size for path, one in server.objects.items() if path.endswith(".arrow"))


def test_digests_are_few_bytes_and_those_of_another_file_are_none(server, options, folder):
    send(server, folder, "uploaded")
    sent = {path: one for path, one in server.objects.items() if path.endswith(".sums")}
    size = sum(one.size for path, one in server.objects.items() if path.endswith(".arrow"))
    assert (len(sent), sum(one.size for one in sent.values()) < size / 500) == (2, True)
    DatasetStore.open(URL, **options).snapshot().rows([3])
    assert server.sent(r"arrow$") < size / 8
    # Those of the other file, and damaged ones, are as if there were none: the file is read as a whole.
    (one, first), (other, second) = sorted(sent.items())
    server.put(one, second)
    server.put(other, second.read(0, second.size)[:-1] + b"!")
    shutil.rmtree(options["cache"])
    server.asked.clear()
    there = DatasetStore.open(URL, **options)
    assert there.snapshot().rows([3, ROWS + 3]) == DatasetStore.open(folder).snapshot().rows([3, ROWS + 3])
    assert server.sent(r"arrow$") > size
    server.put(one, first)
    # An upload sends those that are not there.
    del server.objects[one]
    upload(folder, URL, reaching=Reaching(storage_options=server.options))
    assert server.objects[one].read(0, first.size) == first.read(0, first.size)


def test_files_without_digests_of_their_pages_are_warned_of_where_they_are_large(server, options, folder, monkeypatch):
    from mouse_core.errors import StoreWarning
    from mouse_core.store.remote import rows

    monkeypatch.setattr(rows, "_MUCH", 1000)
    send(server, folder, "copied")
    with pytest.warns(StoreWarning, match=r"each of 2 files, [\d,]+ bytes in all, is read as a whole"):
        DatasetStore.open(URL, **options)
    DatasetStore.open(URL, verify=False, **options)
    send(server, folder, "uploaded")
    DatasetStore.open(URL, **options)


def test_what_cannot_be_done_is_refused_by_name(server, options, tmp_path):
    table = pa.table({"action": [1], "reward": [0.0], "done": [1], "observation": [[0.0]]})
    pq.write_table(table, tmp_path / "part.parquet")
    server.put("data/parquet/part.parquet", (tmp_path / "part.parquet").read_bytes())
    for url in ("s3://data/parquet", "s3://data/parquet/part.parquet"):
        with pytest.raises(ConfigError, match="verify=True: expected a store, whose manifest has checksums, found P"):
            DatasetStore.open(url, verify=True, **options)
        assert len(DatasetStore.open(url, verify=False, **options)) == len(DatasetStore.open(url, **options)) == 1
    for name, value in {"sync": "append", "max_rows": 100, "max_bytes": 1 << 20, "layout": "windows"}.items():
        with pytest.raises(ConfigError, match=rf"rows at an address are only read, found \['r', '{name}='\]"):
            DatasetStore.open("s3://data/parquet", **{name: value}, **options)


def test_digests_of_several_files_are_asked_for_at_once(server, options, folder, monkeypatch):
    send(server, folder, "uploaded")
    rows, calls = DatasetStore.open(URL, **options)._rows, []
    server.asked.clear()
    get_all = FolderClient.get_all
    monkeypatch.setattr(FolderClient, "get_all", lambda self, *asked: calls.append(asked) or get_all(self, *asked))
    both = [one.sums for one in rows._files.values()]
    # One that is being found, or is known, is not asked for; nor is a single one, which finds itself.
    (path,) = (name for name in sorted(server.objects) if name.endswith("1.arrow.sums"))
    lock = threading.Thread(target=both[0]._lock.acquire)
    lock.start()
    lock.join()
    both[0].find(both)
    assert calls == []
    both[0]._lock = threading.RLock()
    both[0].find(both)
    both[1].find(both)
    assert [len(wanted) for wanted, _ in calls] == [2]
    assert [one.method for one in server.asked if one.path.endswith(".sums")] == ["GET", "GET"]
    assert both[1]() is both[1]()
    found = server.objects.pop(path)
    again = DatasetStore.open(URL, **options | {"cache": options["cache"] / "another"})._rows
    for one in again._files.values():
        assert len(one.sums()) == -(-one.info.size // 4096)
    server.objects[path] = found


def test_few_digests_stay_in_memory(server, options, folder, monkeypatch):
    monkeypatch.setattr(objects, "_MOST_KNOWN", 1)
    send(server, folder, "uploaded")
    there, here = DatasetStore.open(URL, **options), DatasetStore.open(folder)
    for row in (3, ROWS + 3, 900, ROWS + 900):
        assert there.snapshot().rows([row]) == here.snapshot().rows([row])
    assert len(there._rows._place.sums._known) == 1
