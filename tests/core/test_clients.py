"""Clients of objects elsewhere: ranges, errors, conditions, and what they show of how they got there."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback

import pytest

from mouse_core.errors import ChangedError, ConfigError, DataError, StorageError
from mouse_core.remote.clients import StorageOptions, open_client
from mouse_core.remote.clients.objects import asked_as
from tests.core.hub_server import READ_TOKEN, USER, File, running_hub
from tests.core.object_server import Fault

pytest.importorskip("obstore")
QUICK = {"retry_config": {"max_retries": 0}, "client_options": {"timeout": "300ms"}}


@pytest.fixture
def data(server):
    content = os.urandom(100_000)
    server.objects.clear(), server.faults.clear()
    server.put("data/runs/a", content)
    server.put("data/runs/sub/b", b"hello")
    return content


def got(client, path, begins, ends, version):
    """Ranges of one object."""
    return client.get_all([(path, *one) for one in zip(begins, ends, strict=True)], {path: version})


def test_ranges_of_an_object_are_those_of_its_bytes(server, data):
    for url, options in (("s3://data/runs", server.options), (f"{server.url}/data/runs", {})):
        client = open_client(url, options)
        info = client.head("a")
        assert info.size == len(data)
        begins, ends = [0, 70_000, 99_999, 5] * 6, [1, 70_100, 100_000, 50_000] * 6
        found = got(client, "a", begins, ends, info.version)
        assert [bytes(one) for one in found] == [data[b:e] for b, e in zip(begins, ends, strict=True)]
        assert client.read("sub/b", most_bytes=5)[0] == b"hello"
        with pytest.raises(DataError, match=r"expected the bytes 99990..100009, found 10"):
            got(client, "a", [99_990], [100_010], info.version)
        with pytest.raises(DataError, match="at most 4 bytes, found 5"):
            client.read("sub/b", most_bytes=4)


def test_a_folder_is_read_like_a_bucket(tmp_path):
    (tmp_path / "a").write_bytes(b"hello")
    client = open_client(f"file://{tmp_path}")
    version = client.head("a").version
    assert bytes(got(client, "a", [1], [3], version)[0]) == b"el"
    (tmp_path / "a").write_bytes(b"hello again")
    with pytest.raises(ChangedError):
        got(client, "a", [1], [3], version)
    assert [one.path for one in client.listed()] == ["a"]


@pytest.mark.parametrize("can_condition", [True, False])
def test_an_object_that_changed_is_refused(server, data, can_condition):
    client = open_client("s3://data/runs", server.options)
    version = client.head("a").version
    server.can_condition = can_condition  # a server that looks at no condition still says what it has
    try:
        server.put("data/runs/a", b"x" * 100_000)
        with pytest.raises(ChangedError, match="s3://data/runs/a: expected the version of the object that was opened"):
            got(client, "a", [5, 70], [9, 90], version)
        with pytest.raises(ChangedError):
            got(client, "a", [5, 70, 90, 200], [9, 80, 95, 250], version)
        server.put("data/runs/a", b"x")
        with pytest.raises(ChangedError):
            got(client, "a", [5, 70, 90, 200], [9, 80, 95, 250], version)
    finally:
        server.can_condition = True


def test_what_fails_is_said_and_what_may_pass_is_tried_again(server, data):
    client = open_client("s3://data/runs", {**server.options, **QUICK})
    with pytest.raises(DataError, match="s3://data/runs/nothing: expected an object, found none"):
        client.head("nothing")
    for fault, said in (
        (Fault("runs/a", status=503), "could not be reached: 503"),
        (Fault("runs/a", status=500), "could not be reached: 500"),
        (Fault("runs/a", "stall", seconds=1), "could not be reached"),
    ):
        server.faults.append(fault)
        with pytest.raises(StorageError, match=said):
            got(client, "a", [0], [10], "")
    for status, said in (
        (403, "expected permission to read it, found none"),
        (400, "the server refused the request: 400"),
        (410, "refused the request: 410"),
    ):
        server.faults.append(Fault("runs/a", status=status))
        with pytest.raises(DataError, match=said):
            got(client, "a", [0], [10], "")
    patient = open_client("s3://data/runs", server.options)
    server.faults += [Fault("runs/a", status=503), Fault("runs/a", "drop")]
    assert bytes(got(patient, "a", [0], [100_000], "")[0]) == data


def test_objects_are_written_on_conditions(server, data):
    client = open_client("s3://data/runs", server.options)
    version = client.put("new", b"one", version="")
    with pytest.raises(ChangedError):
        client.put("new", b"two", version="")
    client.put("new", b"two", version=version)
    with pytest.raises(ChangedError):
        client.put("new", b"three", version=version)
    assert server.objects["data/runs/new"].read(0, 3) == b"two"
    assert [one.path for one in client.listed()] == ["a", "new", "sub/b"]
    assert [one.path for one in client.listed("sub")] == ["sub/b"]
    with pytest.raises(ConfigError, match="found a web server"):
        open_client(server.url + "/data").listed()


def test_nobody_is_shown_how_a_client_got_there(server, data):
    url = f"{server.url}/data/runs?signature=SECRET"
    client = open_client(url, {"client_options": {"timeout": "300ms"}, "retry_config": {"max_retries": 0}})
    client.head("a")
    assert not any("SECRET" in str(one) for one in (client.url, client, repr(client)))
    server.faults.append(Fault("runs/a", status=403))
    for path in ("a", "nothing"):
        with pytest.raises(DataError) as caught:
            got(client, path, [0], [5], "")
        assert "SECRET" not in "".join(traceback.format_exception(caught.value))
        assert caught.value.__cause__ is caught.value.__context__ is None
    with pytest.raises(ConfigError) as caught:
        open_client("s3://data/runs", {"aws_access_key_id": "SECRET_NAME"}).head("a")
    assert "SECRET" not in str(caught.value)
    for one in (client, open_client("s3://data", {**server.options, "aws_secret_access_key": "SECRET"})):
        assert b"SECRET" not in pickle.dumps(one)
    known = {"client_options": {"timeout": "9s", "default_headers": {"authorization": "SECRET"}, "proxy_url": "SECRET"}}
    secret = {"aws_endpoint_url": "http://me:SECRET@host", "AWS_SESSION_TOKEN": "SECRET", "token": "SECRET"}
    told = StorageOptions({**server.options, **secret, **known, "retry_config": {"max_retries": 1}})
    # Where and how is asked is no secret: who opens the pickle elsewhere reaches the same server.
    assert dict(pickle.loads(pickle.dumps(told))) == {
        **server.options,
        "client_options": {"timeout": "9s"},
        "retry_config": {"max_retries": 1},
    }
    assert pickle.loads(pickle.dumps(open_client("s3://data/runs", server.options))).head("a").size == len(data)
    with pytest.raises(ConfigError) as caught:
        open_client("https://me:SECRET@example.com/data")
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in repr(StorageOptions({"key": "SECRET"}))


def test_what_is_not_for_us_says_who_was_asked_and_where_keys_were_looked_for(server, data, monkeypatch):
    def refused(told):
        server.faults.append(Fault("runs/a", status=403))
        with pytest.raises(DataError, match="expected permission to read it, found none") as caught:
            got(open_client("s3://data/runs", {**server.options, **QUICK, **told}), "a", [0], [5], "")
        return str(caught.value)

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    assert f"asked {server.url} with storage_options [" in refused({})
    keys = {"aws_access_key_id": "HIDDEN", "aws_secret_access_key": "HIDDEN", "aws_skip_signature": "false"}
    assert "'aws_access_key_id', " in refused(keys)
    wanted = "asked the server of the address with storage_options none and the environment variables none"
    assert asked_as("s3://data/runs", {}) == wanted
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "HIDDEN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "HIDDEN")
    said = refused({"aws_skip_signature": "false"})
    assert "the environment variables ['AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY']" in said
    assert "HIDDEN" not in said


def _read_elsewhere(client, sender):
    with pytest.raises(DataError, match="found none"):
        client.head("nothing")
    sender.send(bytes(got(client, "a", [1], [4], client.head("a").version)[0]))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_read_what_their_parent_reads(server, data, method):
    client = open_client("s3://data/runs", server.options)
    client.head("a")  # from here on a forked process lacks threads
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_read_elsewhere, args=(client, sender))
    child.start()
    try:
        assert receiver.poll(30)
        assert receiver.recv() == data[1:4]
    finally:
        child.join()


@pytest.mark.parametrize("url", ["ftp://data/x", "data/x", "s3//x"])
def test_addresses_of_no_known_kind_are_refused(url):
    with pytest.raises(ConfigError, match="expected"):
        open_client(url)


def test_files_of_the_hub_are_those_of_one_commit():
    with running_hub() as hub:
        repo, options = hub.create(f"{USER}/runs", private=True), {"endpoint": hub.endpoint, "token": READ_TOKEN}
        content = os.urandom(5000)
        files = {"store/manifest.json": File(b"{}", lfs=False), "store/a.arrow": File(content, lfs=True)}
        repo.add("main", "first", files)
        client = open_client(f"hf://datasets/{USER}/runs/store", options)
        info = client.head("a.arrow")
        assert (info.size, [one.path for one in client.listed()]) == (5000, ["a.arrow", "manifest.json"])
        assert [bytes(one) for one in got(client, "a.arrow", [7, 90], [9, 4000], info.version)] == [
            content[7:9],
            content[90:4000],
        ]
        repo.add("main", "second", {"store/a.arrow": File(b"other", lfs=True)})
        assert bytes(got(client, "a.arrow", [0], [10], info.version)[0]) == content[:10]
        assert open_client(f"hf://datasets/{USER}/runs", options).head("store/a.arrow").version != info.version
        with pytest.raises(DataError, match="expected a file, found none"):
            client.head("nothing")
        with pytest.raises(ConfigError, match="that you may read, found") as caught:
            open_client(f"hf://datasets/{USER}/runs", {"endpoint": hub.endpoint, "token": "SECRET"}).listed()
        assert "SECRET" not in str(caught.value)
        with pytest.raises(ConfigError, match="mouse push"):
            client.put("x", b"")


_LATE = """
import os, sys, threading, time
from asyncio.selector_events import BaseSelectorEventLoop as Loop
from mouse_core.errors import ClosedError
from mouse_core.remote.clients import open_client

wake = Loop._write_to_self

def late(self):
    wake(self)
    if threading.current_thread().name not in ("MainThread", "mouse-remote"):
        time.sleep(0.3)  # a thread of the client's that the machine lets wait here

class Long:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # the interpreter takes so long to end

Loop._write_to_self, sys.at_the_end = late, Long()
client = open_client("s3://data/runs")

def given_up():
    try:
        client.get_all([("stalled", 0, 5)], {})
    except ClosedError:
        os.write(1, b"given up\\n")  # what is under way when the program ends

client.put("a", b"12345")
threading.Thread(target=given_up, daemon=True).start()
time.sleep(0.3)
print("sent", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="another kind of loop")
def test_a_program_that_ends_waits_for_the_thread_that_brought_its_last_result(server):
    told = {name.upper(): value for name, value in server.options.items()}
    server.put("data/stalled", b"12345")
    server.faults.append(Fault("stalled", "stall", seconds=60))
    done = subprocess.run(
        [sys.executable, "-c", _LATE], env={**os.environ, **told}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "sent\ngiven up\n", "")
