"""Stores elsewhere hold what those in folders do: rows, batches, fingerprints; and say what is wrong with objects."""

import gc
import pickle
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, DatasetStore, Field, PrefetchBatchifier, formats
from mouse_core.cli import main
from mouse_core.errors import ChangedError, ConfigError, DataError, StoreWarning
from mouse_core.formats.verifying import verify
from mouse_core.images import encode_png
from mouse_core.remote import Reaching
from mouse_core.store.derived import DerivedStore, Previous
from mouse_core.store.remote import upload
from mouse_core.store.remote.files import ElsewhereSegment
from mouse_core.view.opening import opened_store
from tests.core.hub_server import READ_TOKEN, USER, File, running_hub
from tests.core.mirror_cases import is_left
from tests.core.object_server import Fault, Object, ObjectServer
from tests.waiting import wait_until

pytest.importorskip("obstore")
ROWS = 600
DERIVED = partial(DerivedStore, fields={"before": Previous("reward")})
REGULAR = ("action", "reward", "done", "observation")
FIELDS = [
    Field("flag"),
    Field("some", fill=-1),
    Field("wide", shape=(3,), pad=0),
    Field("picture", image=True, shape=(4, 4, 1)),
]


def rows(begin: int, count: int = ROWS) -> dict[str, Any]:
    """Columns of every kind: regular, boolean, with nulls, ragged, and pictures."""
    number = np.arange(begin, begin + count)
    return {
        "action": number % 5,
        "reward": number / 7,
        "done": (number % 50 == 49).astype(np.int64),
        "observation": (number[:, None] + np.arange(4)).astype(np.float32),
        "flag": number % 3 == 0,
        "some": [None if value % 4 == 1 else float(value) for value in number],
        "wide": [[float(value)] * (3 - value % 4) for value in number],
        "picture": [encode_png(np.full((4, 4, 1), value % 251, np.uint8)) for value in range(count)],
    }


def regular(begin: int) -> dict[str, Any]:
    return {name: values for name, values in rows(begin).items() if name in REGULAR}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A store of three sealed files, one of them with many record batches."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    for part in range(3):
        layout = "windows" if part == 1 else "columns"
        with DatasetStore.open(folder, "a", fields=FIELDS, layout=layout) as store:
            store.extend(rows(part * ROWS))
    return folder


def same_batches(here: DatasetStore, there: DatasetStore, **how: Any) -> None:
    sources = [BatchSource(store, 16, 8, **how) for store in (here, there)]
    assert sources[0].fingerprint == sources[1].fingerprint
    for index in (0, 1, 5):
        batches = [source[index] for source in sources]
        assert batches[0].keys() == batches[1].keys()
        for name, values in batches[0].items():
            np.testing.assert_array_equal(values, batches[1][name], err_msg=name)


def test_rows_and_batches_are_those_of_the_folder(server, options, written):
    server.put_folder("data/runs", written)
    for url in ("s3://data/runs", f"{server.url}/data/runs", f"file://{written}"):
        told = {**options, "storage_options": server.options if url.startswith("s3") else {}}
        here, there = DatasetStore.open(written), DatasetStore.open(url, **told)
        assert (len(there), there.columns, there.metadata, there.path) == (3 * ROWS, here.columns, here.metadata, url)
        assert there.snapshot().fingerprint == here.snapshot().fingerprint
        numbers = [0, 1, ROWS - 1, ROWS, 3 * ROWS - 1]
        assert there.snapshot().rows(numbers) == here.snapshot().rows(numbers)
        np.testing.assert_array_equal(there.snapshot().episode_starts, here.snapshot().episode_starts)
        same_batches(here, there)
    plain = ["action", "reward", "obs_continuous"]  # those that are copied from where they lie
    same_batches(here, there, fields=plain)
    snapshot = pickle.loads(pickle.dumps(there.snapshot()))
    assert snapshot.rows([7]) == here.snapshot().rows([7])


def test_a_store_on_the_hub_is_read_where_it_lies(options, written):
    with running_hub() as hub:
        repo = hub.create(f"{USER}/runs")
        files = [file for file in written.rglob("*") if file.suffix in (".json", ".arrow")]
        found = {f"store/{file.relative_to(written)}": File(file.read_bytes(), lfs=True) for file in files}
        repo.add("main", "a store", found)
        told = {**options, "storage_options": {"endpoint": hub.endpoint, "token": READ_TOKEN}}
        there = DatasetStore.open(f"hf://datasets/{USER}/runs/store", **told)
        assert there.snapshot().fingerprint == DatasetStore.open(written).snapshot().fingerprint
        same_batches(DatasetStore.open(written), there, fields=["reward", "obs_continuous"])


def test_what_is_uploaded_later_is_seen_by_the_next_snapshot(server, options, tmp_path):
    for part in range(3):
        with DatasetStore.open(tmp_path / "store", "a", layout="windows") as store:
            store.extend(regular(part * ROWS))
        server.put_folder("data/growing", tmp_path / "store")
        if not part:
            there = DatasetStore.open("s3://data/growing", **options)
            before = there.snapshot()
        now = there.snapshot()
        assert (len(now), len(before)) == ((part + 1) * ROWS, ROWS)
        assert now.begins_as(before)
    same_batches(DatasetStore.open(tmp_path / "store"), there)
    assert before.rows([5])["action"] == [0]
    shutil.rmtree(tmp_path / "store")
    with DatasetStore.open(tmp_path / "store", "a") as store:
        store.extend(rows(0))
    server.put_folder("data/growing", tmp_path / "store")
    with pytest.raises(DataError, match="created again or repaired; open it again"):
        there.snapshot()


def test_users_in_addresses_and_objects_without_versions_are_refused(server, options, written):
    for address in ("s3://me:password@data/runs", "http://me@127.0.0.1/runs", "az://me:password@data/runs"):
        with pytest.raises(ConfigError, match=r"^\w+://[^@]*: expected an address without a user") as caught:
            DatasetStore.open(address, **options)
        assert "me:" not in str(caught.value)
        assert "password" not in str(caught.value)
    for address in ("https://host/runs?signature=password", "hf://datasets/a?token=password", "hf://me:password@a/b"):
        with pytest.raises(ConfigError) as caught:
            DatasetStore.open(address, "a" if address.startswith("https") else "r")
        assert "password" not in str(caught.value)
    server.put_folder("data/runs", written)
    signed = f"{server.url}/data/runs?signature=password"
    assert "password" not in repr(verify(signed, cache=options["cache"]))
    assert "password" not in formats.open(signed, cache=options["cache"]).path
    with opened_store(signed, cache=options["cache"]) as found:
        assert "password" not in repr(found)
    server.versions = False
    try:
        with pytest.raises(DataError, match=r"expected a server that sends the version of a file"):
            DatasetStore.open(f"{server.url}/data/runs", cache=options["cache"])
    finally:
        server.versions = True


def test_what_is_no_store_or_not_whole_is_said(server, options, written):
    with pytest.raises(ConfigError, match=r"s3://data/nothing: expected a store \(manifest.json\), found none; mouse"):
        DatasetStore.open("s3://data/nothing", **options)
    server.put("data/saved/state.json", b"{}")
    with pytest.raises(
        ConfigError, match=r"s3://data/saved: expected .*, found a folder of save_to_disk; .*load_from_"
    ):
        DatasetStore.open("s3://data/saved", **options)
    with pytest.raises(ConfigError, match="expected the mode 'r'"):
        DatasetStore.open("s3://data/runs", "a", **options)
    server.put_folder("data/runs", written)
    with pytest.raises(ConfigError, match="found a remote store; write to a folder"):
        DatasetStore.open("s3://data/runs", **options).extend(rows(0))
    path = next(path for path in server.objects if path.endswith(".arrow"))
    whole = server.objects[path].read(0, 1 << 30)
    server.put(path, whole[:-5])
    with pytest.raises(DataError, match=rf"{path[5:]}: expected {len(whole)} bytes, as written, found"):
        DatasetStore.open("s3://data/runs", **options)
    del server.objects[path]
    with pytest.raises(DataError, match="expected an object, found none"):
        DatasetStore.open("s3://data/runs", **options)
    server.put("data/runs/manifest.json", b"{}")
    with pytest.raises(DataError, match=r"s3://data/runs/manifest.json: expected the manifest .*; mouse upload"):
        DatasetStore.open("s3://data/runs", **options)


def test_rows_that_were_not_sealed_are_missed_aloud(server, options, tmp_path):
    store = DatasetStore.open(tmp_path / "store", "a", fields=FIELDS)
    store.extend(rows(0))
    store.flush()
    server.put_folder("data/open", tmp_path / "store")
    with pytest.warns(StoreWarning, match="not sealed when the folder was copied"):
        there = DatasetStore.open("s3://data/open", **options)
    assert len(there) == 0
    store.close()


def test_an_upload_sends_what_is_new_and_then_the_manifest(server, options, tmp_path):
    reaching, folder, url = Reaching(storage_options=server.options), tmp_path / "store", "s3://data/sent"
    with DatasetStore.open(folder, "a") as store:
        store.extend(regular(0))
    done = upload(folder, url, reaching=reaching)
    assert (done.rows, done.files, done.waiting) == (ROWS, 1, 0)
    there = DatasetStore.open(url, **options)
    with DatasetStore.open(folder, "a") as store:
        store.extend(regular(ROWS))
    server.asked.clear()
    # Whoever reads before the manifest is there sees the store as it was.
    server.faults.append(Fault("manifest.json", method="PUT", times=9, status=403))
    with pytest.raises(DataError, match="permission"):
        upload(folder, url, reaching=reaching)
    assert len(there.snapshot()) == ROWS
    server.faults.clear()
    again = upload(folder, url, reaching=reaching)
    assert (again.rows, again.files) == (2 * ROWS, 0)
    written = [asked.path for asked in server.asked if asked.method == "PUT" and asked.status == 200]
    assert [path.rpartition(".")[2] for path in written] == ["arrow", "json"]
    assert there.snapshot().fingerprint == DatasetStore.open(folder).snapshot().fingerprint
    assert upload(folder, url, reaching=reaching).files == 0


def test_an_upload_never_takes_the_place_of_another_store(server, options, tmp_path):
    reaching, url = Reaching(storage_options=server.options), "s3://data/taken"
    for name in ("one", "two"):
        with DatasetStore.open(tmp_path / name, "a") as store:
            store.extend(regular(0))
    upload(tmp_path / "one", url, reaching=reaching)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(ConfigError, match="found another store of 600 rows"):
        upload(tmp_path / "two", url, reaching=reaching)
    for name, first in (("one", 1), ("copy", 2)):
        with DatasetStore.open(tmp_path / name, "a") as store:
            store.extend(regular(first * ROWS))
    upload(tmp_path / "one", url, reaching=reaching)
    with pytest.raises(ConfigError, match="of two copies of a folder, only one can continue the upload"):
        upload(tmp_path / "copy", url, reaching=reaching)
    assert main(["upload", str(tmp_path / "one"), f"file://{tmp_path}/sent"]) == 0
    file = next((tmp_path / "one" / "segments").iterdir())
    file.write_bytes(file.read_bytes()[:-9] + b"\0" * 9)
    with pytest.raises(DataError, match="damaged"):
        upload(tmp_path / "one", "s3://data/damaged", reaching=reaching)
    for number, name in enumerate(("state.json", "dataset_dict.json", "part-0.parquet", "data/0.parquet")):
        server.put(f"data/beside-{number}/{name}", b"{}")
        with pytest.raises(ConfigError, match=rf"found other rows \({name}\), which readers would no longer see"):
            upload(tmp_path / "two", f"s3://data/beside-{number}", reaching=reaching)


@pytest.mark.parametrize("of", [lambda store: store.where({"episode": range(0, 20, 2)}), DERIVED])
def test_views_and_derived_fields_wait_for_the_rows_that_they_take(server, options, written, of, monkeypatch):
    server.put_folder("data/runs", written)
    there = of(DatasetStore.open("s3://data/runs", **options))
    monkeypatch.setattr(ElsewhereSegment, "table", None)  # which reads all rows
    plain = {"fields": ["action", "obs_continuous"], "seed": 3}
    same_batches(of(DatasetStore.open(written)), there, **plain)
    same_batches(of(DatasetStore.open(written)), there)
    assert there.snapshot().backings


def test_what_is_elsewhere_ends_with_its_last_reference(server, options, written, tmp_path):
    server.put_folder("data/runs", written)
    gc.collect()
    gc.disable()
    try:
        there = DatasetStore.open("s3://data/runs", fields=FIELDS, **options)
        with PrefetchBatchifier(there, 16, 8, num_workers=2) as loader:
            assert next(iter(loader))["reward"].shape == (8, 16)
        assert is_left(options["cache"])
        del there, loader
        assert wait_until(lambda: not is_left(options["cache"])), is_left(options["cache"])
        # Also where something went wrong.
        there = DatasetStore.open("s3://data/runs", **options | {"cache": tmp_path / "other"})
        for path in [path for path in server.objects if path.endswith(".arrow")]:
            server.put(path, b"another one")
        with pytest.raises(ChangedError):
            there.snapshot().rows([0])
        del there
        assert wait_until(lambda: not is_left(tmp_path)), is_left(tmp_path)
    finally:
        gc.enable()


def test_commands_take_addresses(server, options, written, tmp_path, monkeypatch, capsys):
    server.put_folder("data/runs", written)
    monkeypatch.setenv("MOUSE_CACHE", str(tmp_path / "cache"))
    for name, value in server.options.items():
        monkeypatch.setenv(name.upper(), value)
    url = "s3://data/runs"
    assert main(["inspect", url]) == 0
    assert main(["verify", url, "--strict"]) == 0
    assert formats.open(url).digest() == formats.open(written).digest()
    with opened_store(url) as found:
        assert len(found) == 3 * ROWS
    path = next(path for path in server.objects if path.endswith(".arrow"))
    content = server.objects[path].read(0, 1 << 30)
    server.put(path, content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    assert main(["verify", url]) == 2
    assert f"{path[5:]}: expected the" in capsys.readouterr().err


MANY, URL = 5000, "s3://data/runs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A store of two files, one of each layout."""
    made = tmp_path_factory.mktemp("stores") / "two"
    for first, layout in ((0, "columns"), (MANY, "windows")):
        number = np.arange(first, first + MANY)
        with DatasetStore.open(made, "a", layout=layout) as store:
            store.extend(
                {
                    "action": number % 5,
                    "reward": number / 7,
                    "done": (number % 50 == 49).astype(np.int64),
                    "observation": (number[:, None] + np.arange(16)).astype(np.float32),
                }
            )
    return made


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


@pytest.mark.parametrize("number", [0, 1])
def test_a_changed_byte_is_an_error_and_never_a_row(server, options, folder, number):
    server.put_folder("data/runs", folder)
    path, order = change(server, number, 0.5), {"sampling": "sequential"}  # 19 batches have every row
    right, there = BatchSource(DatasetStore.open(folder), 64, 8, **order), DatasetStore.open(URL, **options)
    for store in (there, pickle.loads(pickle.dumps(there)), DatasetStore.open(URL, verify=True, **options)):
        source, wrong = BatchSource(store, 64, 8, **order), 0
        for index in range(19):
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
        unheld = BatchSource(DatasetStore.open(URL, verify=False, **options), 64, 8, **order)
        believed = [outcome(unheld, index) for index in range(19)]
        assert not any(isinstance(one, str) for one in believed)
        assert believed != [outcome(right, index) for index in range(19)]
        assert any(isinstance(outcome(source, index), str) for index in range(19))


def test_an_object_that_was_written_anew_is_told_by_its_digests(server, options, folder, tmp_path):
    """Nobody asks which version an object has before they say that something is wrong."""
    server.put_folder("data/runs", folder)
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
    with pytest.raises(ChangedError, match="expected the version of the object that was opened"):
        _ = BatchSource(there, 16, 8)[0]


def test_what_was_damaged_on_the_way_is_asked_for_again(server, options, folder):
    server.put_folder("data/runs", folder)
    server.faults.append(Fault(r"arrow$", "damage", times=1))
    there = DatasetStore.open(URL, **options)
    right, source = (BatchSource(store, 64, 8) for store in (DatasetStore.open(folder), there))
    for index in range(5):
        assert outcome(source, index) == outcome(right, index)
    assert not server.faults[0].times
    server.asked.clear()
    again = BatchSource(DatasetStore.open(URL, **options), 64, 8)
    assert outcome(again, 3) == outcome(right, 3)
    assert server.sent("arrow$") < 100_000  # the cache has pages and checksums


def test_checksums_are_few_bytes_and_damaged_ones_in_the_cache_are_read_again(server, options, folder):
    server.put_folder("data/runs", folder)
    size = sum(one.size for path, one in server.objects.items() if path.endswith(".arrow"))
    expected = DatasetStore.open(folder).snapshot().rows([3, MANY + 3])
    server.asked.clear()
    there = DatasetStore.open(URL, **options)
    assert server.sent(r"arrow$") == 0
    assert there.snapshot().rows([3, MANY + 3]) == expected
    assert 0 < server.sent(r"arrow$") < size / 8
    kept = sorted(options["cache"].glob("trailers-*/*"))
    assert (len(kept), sum(path.stat().st_size for path in kept) < size / 100) == (2, True)
    kept[0].write_bytes(kept[1].read_bytes())
    kept[1].write_bytes(b"")
    assert DatasetStore.open(URL, **options).snapshot().rows([3, MANY + 3]) == expected
    assert len({path.read_bytes() for path in kept} - {b""}) == 2


def test_options_of_folders_and_of_addresses_are_told_apart(options, written, tmp_path):
    for name, value in {"sync": "append", "max_rows": 100, "max_bytes": 1 << 20, "layout": "windows"}.items():
        with pytest.raises(ConfigError, match=rf"rows at an address are read-only, found \['r', '{name}='\]"):
            DatasetStore.open("s3://data/runs", **{name: value}, **options)
    for told in ({"cache": tmp_path}, {"storage_options": {}}, {"cache_bytes": 1 << 22}, {"fail": "retry"}):
        with pytest.raises(ConfigError, match=f"^{next(iter(told))}=: expected an address, as s3://.*found the path"):
            DatasetStore.open(written, **told)
        with pytest.raises(ConfigError, match="expected an address"):
            formats.open(written, **told)
    for cache in ("s3://data/cache", 5):
        with pytest.raises(ConfigError, match=f"^cache: expected a folder of this machine, found .*{cache}"):
            DatasetStore.open("s3://data/runs", cache=cache)
