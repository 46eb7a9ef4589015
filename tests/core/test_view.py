"""The viewer: what its server tells to whom, the list of episodes, and curves that lose no spike."""

import html
import http.client
import io
import json
import math
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import mouse_core.view
from mouse_core import BatchSource, ConfigError, DataError, DatasetStore
from mouse_core.augment import AugmentMaskProbConfig, AugmentTokensConfig
from mouse_core.cli import main
from mouse_core.images import encode_png
from mouse_core.metadata import DatasetMetadata
from mouse_core.view import Viewer, view
from mouse_core.view.answers import picture, thinned
from mouse_core.view.opening import opened_store

NASTY = '</script><script>window.evil = 1</script><img src=x onerror="window.evil = 2">'


def pictures(count: int) -> pa.Array:
    """Pictures of 4 times 6 pixels, of which the first pixel says which it is."""
    made = np.zeros((count, 4, 6, 3), np.uint8)
    made[:, 0, 0, 0] = np.arange(count)
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.array([{"bytes": encode_png(one), "path": None} for one in made], kind)


def recording(lengths: tuple[int, ...] = (5, 3, 8, 4), *, images: bool = True) -> pa.Table:
    """Episodes of some rows; the observation of row r is (r, -r, 1000 r), and the last value of row 6 is missing."""
    rows = sum(lengths)
    steps = np.concatenate([np.arange(length) for length in lengths])
    ends = np.cumsum(lengths) - 1
    done = np.zeros(rows, np.int64)
    done[ends] = np.arange(len(lengths)) % 2 + 1
    number = np.repeat(np.arange(len(lengths)), lengths)
    observation: list[Any] = [[float(row), -float(row), 1000.0 * row] for row in range(rows)]
    if rows > 6:
        observation[6][2] = math.nan
    columns: dict[str, Any] = {
        "action": np.arange(rows) % 3,
        "reward": number + 0.5,
        "done": done,
        "episode_step": steps,
        "observation": observation,
        "metadata_task": [NASTY if one % 2 else "walk" for one in number],
        "metadata_success": done == 1,
    }
    if images:
        columns["observation_image"] = pictures(rows)
    return pa.table(columns)


class Client:
    """What a page would ask."""

    def __init__(self, viewer: Viewer) -> None:
        self.url = viewer.url

    def open(self, name: str, **asked: Any) -> Any:
        return urlopen(f"{self.url}{name}?{urlencode(asked)}", timeout=30)

    def __call__(self, name: str, **asked: Any) -> Any:
        with self.open(name, **{key.replace("__", "."): value for key, value in asked.items()}) as answer:
            return json.load(answer)

    def refused(self, name: str, **asked: Any) -> tuple[int, str]:
        with pytest.raises(HTTPError) as caught:
            self(name, **asked)
        with caught.value as error:
            return error.code, json.load(error)["error"]


@pytest.fixture(scope="module")
def viewer() -> Iterator[Viewer]:
    store = DatasetStore().from_dataset(recording())
    mask = AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(reward=0.5), deliver_masks=True)
    batches = BatchSource(store, sequence_length=6, batch_size=4, boundary="episode", augment=mask, seed=1)
    around = BatchSource(store, windows={"obs_continuous": [-1, 0], "action": [0, 1, 2]}, batch_size=4)
    with view(store, batches, around, names=["recording", "batches"]) as made:
        yield made


@pytest.fixture(scope="module")
def client(viewer: Viewer) -> Client:
    return Client(viewer)


def status(viewer: Viewer, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, str, Any]:
    """Status, body and headers of what a path is answered with, sent as it is."""
    place = urlsplit(viewer.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", host or place.netloc)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(errors="replace"), answer.headers
    connection.close()
    return found


def test_only_who_knows_the_token_is_told_anything(viewer: Viewer) -> None:
    place = urlsplit(viewer.url)
    assert place.hostname == "127.0.0.1"
    token = place.path.strip("/")
    assert len(token) >= 24
    assert status(viewer, place.path)[0] == 200
    assert status(viewer, place.path, host=f"localhost:{place.port}")[0] == 200
    for path in ("/", "/sources", f"/{token[:-1]}/sources", f"/{token}x/sources", f"/x/{token}/sources", "//sources"):
        code, body, _ = status(viewer, path)
        assert code == 403, path
        assert "recording" not in body
        assert token not in body
    for host in ("example.com", f"example.com:{place.port}", "127.0.0.1", "127.0.0.1:1", " "):
        assert status(viewer, place.path, host=host)[0] == 403, "a page of another name that leads here"


def test_nothing_is_changed_and_no_file_is_read_but_ours(viewer: Viewer, tmp_path: Path) -> None:
    path = urlsplit(viewer.url).path
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert status(viewer, path + "sources", method=method)[0] == 501
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for name in (
        "../view.py",
        "..%2f..%2fview.py",
        f"/{secret}",
        f"%2f{secret}",
        "page/view.js",
        "view.js/../viewer.py",
    ):
        code, body, _ = status(viewer, path + name)
        assert code == 404, name
        assert "secret" not in body


def test_connections_that_ask_for_nothing_leave_room(client: Client, viewer: Viewer) -> None:
    place = urlsplit(viewer.url)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=30)) for _ in range(150)
        ]
        assert client("sources")
        silent[-1].sendall(f"GET http://[ HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 400")


def test_the_page_may_load_only_what_lies_here(viewer: Viewer) -> None:
    path = urlsplit(viewer.url).path
    for name in ("", "sources", "view.js", "nothing"):
        headers = status(viewer, path + name)[2]
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == "'self'"
        assert policy["connect-src"] == "'self'"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
    page = status(viewer, path)[1]
    assert "<script>" not in page
    for script in sorted(one.name for one in (Path(mouse_core.view.__file__).parent / "page").glob("*.js")):
        text = status(viewer, f"{path}{script}")[1]
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function"):
            assert unsafe not in text, "strings of the data become text, and nothing else"
    assert len(status(viewer, path + "plotly.min.js")[1]) > 1_000_000


def test_what_cannot_be_asked_is_an_error_that_says_why(client: Client) -> None:
    for name, asked, said in (
        ("episodes", {"source": 9}, "source"),
        ("episodes", {"first": "x"}, "first"),
        ("episodes", {"sort": "nothing"}, "nothing"),
        ("episodes", {"low__done": "ended"}, "one of ['alive', 'terminal', 'truncated']"),
        ("episodes", {"low__return": "much"}, "much"),
        ("curves", {"column": "observation_image"}, "observation_image"),
        ("curves", {"column": "observation", "begin": 0, "end": 999}, "end"),
        ("image", {"column": "reward"}, "reward"),
        ("image", {"column": "/etc/passwd"}, "passwd"),
        ("step", {"begin": -1}, "begin"),
        ("window", {"source": 1, "window": 99}, "window"),
        ("window", {}, "expected a source of batches, found a store"),
    ):
        code, message = client.refused(name, **asked)
        assert code == 400, name
        assert said in message
    assert client.refused("step", begin=0, generation=7)[0] == 409, "rows that were there and are others now"


def test_who_shows_something_else_is_told() -> None:
    with pytest.raises(ConfigError, match="found list"):
        view([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="found none"):
        view()


def test_the_list_has_what_the_store_says_of_its_episodes(client: Client) -> None:
    found = client("episodes")
    assert found["matched"] == found["total"] == 4
    assert found["columns"] == ["episode", "length", "return", "done", "metadata_task"]
    assert found["texts"] == ["metadata_task"]
    # The first reward of an episode is none of its own.
    assert found["episodes"] == [
        [0, 5, 2.0, 1, "walk"],
        [1, 3, 3.0, 2, NASTY],
        [2, 8, 17.5, 1, "walk"],
        [3, 4, 10.5, 2, NASTY],
    ]


def numbers(client: Client, **asked: Any) -> list[int]:
    return [values[0] for values in client("episodes", **asked)["episodes"]]


def test_episodes_are_sorted_and_filtered(client: Client) -> None:
    assert numbers(client, sort="return", down=1) == [2, 3, 1, 0]
    assert numbers(client, sort="metadata_task") == [1, 3, 0, 2]
    assert numbers(client, sort="length", first=1, count=2) == [3, 0]
    assert numbers(client, low__return=3, high__return=11) == [1, 3]
    assert numbers(client, has__metadata_task="WALK", sort="length", down=1) == [2, 0]
    assert numbers(client, has__metadata_task="walk", low__length=6) == [2]
    assert client("episodes", has__metadata_task="nobody")["matched"] == 0
    assert numbers(client, low__done="truncated") == numbers(client, low__done=2) == [1, 3]
    assert numbers(client, low__metadata_task="a", high__metadata_task="w") == []
    assert numbers(client, low__metadata_task="a", high__metadata_task="walk") == [0, 2]
    places = client("points", x="metadata_task", y="length")
    assert places["texts"] == {"x": [NASTY, "walk"], "y": None}
    assert places["x"] == [1, 0, 1, 0]
    points = client("points", x="length", y="return", color="metadata_task", high__done=1)
    assert (points["x"], points["y"], points["colors"]) == ([5, 8], [2, 17.5], ["walk", "walk"])


def test_rows_that_come_are_shown(tmp_path: Path) -> None:
    rows = recording(images=False)
    with DatasetStore.open(tmp_path / "store", "a") as writer:
        columns = {name: rows.column(name).to_pylist() for name in rows.column_names}
        writer.extend({name: values[:7] for name, values in columns.items()})
        writer.flush()
        with view(DatasetStore.open(tmp_path / "store"), names=["growing"]) as viewer:
            client = Client(viewer)
            assert [values[:4] for values in client("episodes")["episodes"]] == [[0, 5, 2.0, 1], [1, 2, 1.5, 0]]
            writer.extend({name: values[7:] for name, values in columns.items()})
            writer.flush()
            assert client("sources")["sources"][0]["rows"] == 20
            found = client("episodes")
            assert [values[:4] for values in found["episodes"]][1] == [1, 3, 3.0, 2]
            assert found["total"] == 4
            assert found["generation"] == 0
            assert client("episode", episode=3)["episode"]["start"] == 16
            assert client("episode", episode=4)["episode"] is None


def test_the_texts_of_tasks_stand_for_their_numbers() -> None:
    table = recording(images=False).append_column("task_index", pa.array([0] * 8 + [1] * 12))
    store = DatasetStore()
    store.describe(DatasetMetadata(tasks={0: "pick", 1: "place"}))
    with view(store.from_dataset(table)) as viewer:
        client = Client(viewer)
        found = client("episodes", has__task="pl")
        place = found["columns"].index("task")
        assert [(values[0], values[place]) for values in found["episodes"]] == [(2, "place"), (3, "place")]


def test_curves_are_those_of_the_rows_by_dimension_and_gaps_are_gaps(client: Client) -> None:
    found = client("curves", column="observation", begin=5, end=8, dims="2,0")["curves"]
    assert [one["dim"] for one in found] == [2, 0]
    assert [one["steps"] for one in found] == [[0, 1, 2], [0, 1, 2]]
    assert found[0]["values"] == [5000, None, 7000]
    assert found[1]["values"] == [5, 6, 7]
    part = client("curves", column="reward", begin=8, end=16, **{"from": 2, "to": 4})["curves"][0]
    assert part == {"dim": 0, "steps": [2, 3], "values": [2.5, 2.5]}


def test_an_observation_that_the_recording_lacks_is_a_gap() -> None:
    rows = {
        "action": [0, 1, 2, 0, 3],
        "reward": [0.0, 1, 2, 0, 3],
        "done": [0, 0, 1, 0, 2],
        "observation": [[1.0], [2.0], [0.0], [4.0], [0.0]],
        "metadata_task": ["walk", "walk", "", "sit", ""],
        "observation_missing": [0, 0, 1, 0, 1],
    }
    with view(DatasetStore().from_dataset(pa.table(rows))) as viewer:
        client = Client(viewer)
        curves = {
            name: client("curves", column=name, begin=0, end=3)["curves"][0]["values"]
            for name in ("observation", "action", "observation_missing")
        }
        assert curves == {"observation": [1, 2, None], "action": [0, 1, 2], "observation_missing": [0, 0, 1]}


def test_columns_of_all_kinds_are_numbers_for_the_eye() -> None:
    odd = {
        "ragged": pa.array([[1.0], [2.0, 3.0], None, []], pa.list_(pa.float64())),
        "nested": pa.array([[[1, 2], [3, 4]]] * 4, pa.list_(pa.list_(pa.int16(), 2), 2)),
        "flag": pa.array([True, None, False, True]),
        "half": pa.array(np.arange(4, dtype=np.float16)),
        "huge": pa.array([2**63] * 4, pa.uint64()),
        "infinite": pa.array([math.inf, 1.0, -math.inf, 2.0]),
        "word": pa.array(["a", "b", "a", None]).dictionary_encode(),
    }
    base = recording((4,), images=False)
    with view(
        DatasetStore().from_dataset(pa.table({name: base.column(name) for name in base.column_names} | odd))
    ) as made:
        client = Client(made)

        def values(name: str, dims: str = "0") -> Any:
            found = client("curves", column=name, begin=0, end=4, dims=dims)["curves"]
            return [one["values"] for one in found]

        assert values("ragged", "0,1") == [[1, 2, None, None], [None, 3, None, None]]
        assert values("nested", "1,2") == [[2] * 4, [3] * 4]
        assert values("flag") == [[1, None, 0, 1]]
        assert values("half") == [[0, 1, 2, 3]]
        assert values("huge") == [[float(2**63)] * 4]
        assert values("infinite") == [[None, 1, None, 2]]
        texts = {one["name"]: one["texts"] for one in client("step", begin=0)["values"]}
        assert texts["huge"] == [str(2**63)]
        assert texts["infinite"] == ["inf"]
        assert texts["word"] == ["a"]
        assert texts["nested"] == ["1", "2", "3", "4"]


def test_pictures_are_those_of_the_step(client: Client) -> None:
    for row in (0, 7, 19):
        with client.open("image", column="observation_image", begin=row) as answer:
            assert answer.headers["Content-Type"] == "image/png"
            pixels = np.asarray(Image.open(io.BytesIO(answer.read())))
        assert pixels.shape == (4, 6, 3)
        assert pixels[0, 0, 0] == row


def test_pictures_of_all_shapes() -> None:
    """Frames as nested lists, stacks of which the last frame is shown, and encoded ones: all to the pixel."""
    grey = np.arange(30, dtype=np.uint8).reshape(5, 6)
    stack = np.stack([grey, grey + 1, grey + 2, grey + 3], axis=2)
    colour = np.random.default_rng(1).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    two, three = pa.list_(pa.list_(pa.uint8())), pa.list_(pa.list_(pa.list_(pa.uint8())))
    for values, wanted in (
        (pa.array([grey.tolist()] * 4, two), grey),
        (pa.array([colour.tolist()] * 4, three), colour),
        (pa.array([np.moveaxis(colour, 2, 0).tolist()] * 4, three), colour),
        (pa.array([encode_png(grey)] * 4), grey),
        (pa.array([encode_png(stack)] * 4), stack),
    ):
        store = DatasetStore().from_dataset(recording((4,), images=False).append_column("camera", values))
        file, kind = picture(store.snapshot(), "camera", 1)
        assert kind == "image/png"
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), wanted), values.type
    store = DatasetStore().from_dataset(
        recording((4,), images=False).append_column("camera", pa.array([b"no picture"] * 4))
    )
    with pytest.raises(DataError, match="camera"):
        picture(store.snapshot(), "camera", 1)


def test_a_picture_outside_of_the_dataset_is_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(encode_png(np.zeros((4, 6, 3), np.uint8)))
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    named = pa.array([{"bytes": None, "path": str(secret)}] * 4, kind)
    table = recording((4,), images=False).append_column("camera", named)
    with view(DatasetStore().from_dataset(table)) as viewer:
        assert Client(viewer).refused("image", column="camera", begin=0)[0] == 400
    with view(DatasetStore(image_roots=[tmp_path]).from_dataset(table)) as viewer:
        assert Client(viewer).open("image", column="camera", begin=0).status == 200


SPECIAL = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))


@given(st.lists(st.tuples(SPECIAL, SPECIAL), min_size=1, max_size=120), st.integers(1, 9), st.data())
def test_thinned_curves_keep_the_ends_of_every_stretch(rows: list[Any], buckets: int, data: st.DataObject) -> None:
    values = np.array(rows)
    begin = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(begin + 1, len(rows)))
    curves = thinned(lambda first, last: values[first:last], begin, end, buckets)
    edges = [begin + place * (end - begin) // buckets for place in range(buckets + 1)]
    for column, curve in zip(values.T, curves, strict=True):
        assert (np.diff(curve.steps) > 0).all()
        kept = column[curve.steps]
        assert np.array_equal(curve.values, np.where(np.isfinite(kept), kept, np.nan), equal_nan=True), "at their steps"
        assert len(curve.steps) <= 4 * buckets
        for low, high in pairwise(edges):
            inside = column[low:high]
            there = inside[np.isfinite(inside)]
            points = curve.values[(curve.steps >= low) & (curve.steps < high)]
            assert np.isnan(points).any() == (len(there) < len(inside)), "gaps are gaps"
            if len(there):
                assert np.nanmin(points) == there.min()
                assert np.nanmax(points) == there.max()


def test_names_of_dimensions_count_where_there_is_one_for_each() -> None:
    for names, shown in ((["base", NASTY, "wrist"], ["base", NASTY, "wrist"]), (["base"], [])):
        store = DatasetStore()
        store.describe(DatasetMetadata(dimensions={"observation": names, "reward": [], "nothing": ["x"]}))
        with view(store.from_dataset(recording((4,), images=False))) as viewer:
            (source,) = Client(viewer)("sources")["sources"]
        found = {one["name"]: one["names"] for one in source["columns"] if one["names"]}
        assert found == ({"observation": shown} if shown else {})


def test_a_window_is_what_the_batch_has(client: Client) -> None:
    store = DatasetStore().from_dataset(recording())
    mask = AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(reward=0.5), deliver_masks=True)
    source = BatchSource(store, sequence_length=6, batch_size=4, boundary="episode", augment=mask, seed=1)
    batch, plan = source[2], source.plan(2)
    client("episodes", source=1)
    for number in range(4):
        found = client("window", source=1, index=2, window=number)
        fields = {one["name"]: one for one in found["fields"]}
        assert found["start"] == plan.starts[number]
        assert found["there"] == batch["mask"][number].tolist()
        assert fields["reward"]["masked"] == batch["reward_mask"][number].tolist()
        assert fields["reward"]["values"] == [batch["reward"][number].tolist()]
        shown = np.array(fields["obs_continuous"]["values"], np.float64)
        assert np.array_equal(shown.T, batch["obs_continuous"][number], equal_nan=True)
        assert found["episode"]["step"] == store[int(plan.starts[number])]["episode_step"]
        with client.open("window-image", source=1, index=2, window=number, field="obs_image", step=1) as answer:
            pixels = np.asarray(Image.open(io.BytesIO(answer.read())))
        assert pixels.reshape(-1).tolist() == batch["obs_image"][number, 1].tolist()


def test_one_window_is_made_and_not_its_batch(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    gather = BatchSource.gather

    def counted(self: BatchSource, plan: Any, *given: Any, **options: Any) -> Any:
        made.append(len(plan.starts))
        return gather(self, plan, *given, **options)

    monkeypatch.setattr(BatchSource, "gather", counted)
    client("window", source=1, window=3)
    client.open("window-image", source=1, window=3, field="obs_image", step=1).close()
    assert made == [1, 1]
    monkeypatch.setattr("mouse_core.view.answers._MOST_BYTES", 100)
    assert "at most 100 bytes" in client.refused("window", source=1)[1]


def test_windows_by_field_say_their_offsets(client: Client) -> None:
    found = {one["name"]: one for one in client("window", source=2)["fields"]}
    assert found["obs_continuous"]["offsets"] == [-1, 0]
    assert found["action"]["offsets"] == [0, 1, 2]
    assert len(found["action"]["values"][0]) == len(found["action"]["masked"]) == 3


def test_the_command_serves_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        with DatasetStore.open(tmp_path / name / "runs", "a") as store:
            store.from_dataset(recording(images=False))
    found, pages = {}, list[Path]()

    def opens(address: str) -> bool:
        pages.append(Path(address.removeprefix("file://")))
        return True

    def interrupted(viewer: Viewer) -> None:
        address = capsys.readouterr().out.strip()
        found["address"] = address
        # No other user of this machine reads the token from the arguments of the browser, or from the file.
        assert html.escape(address) in pages[0].read_text()
        assert stat.S_IMODE(pages[0].parent.stat().st_mode) == 0o700
        with urlopen(Request(address.partition("#")[0] + "sources")) as answer:
            found["names"] = [one["name"] for one in json.load(answer)["sources"]]
        raise KeyboardInterrupt

    folders = [str(tmp_path / name / "runs") for name in ("one", "two")]
    with monkeypatch.context() as patched:
        patched.setattr(Viewer, "wait", interrupted)
        patched.setattr("webbrowser.open", opens)
        assert main(["view", *folders, "--at", "d=runs&e=1&s=2"]) == 0
    assert not pages[0].exists()
    assert found["names"] == ["runs", "runs (2)"]
    assert found["address"].endswith("#d=runs&e=1&s=2")
    assert main(["view", str(tmp_path / "nothing"), "--no-browser"]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal here")
def test_a_closed_terminal_ends_the_command_and_what_was_converted_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "walk.npz", observations=np.zeros((6, 2)), actions=np.zeros((6, 1)), terminals=np.ones(6))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    seen = []

    def closed(viewer: Viewer) -> None:
        seen.extend((tmp_path / "temporary").iterdir())
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(5)

    monkeypatch.setattr(Viewer, "wait", closed)
    before = signal.getsignal(signal.SIGHUP)
    assert main(["view", str(tmp_path / "walk.npz"), "--no-browser"]) == 0
    assert seen
    assert not [*(tmp_path / "temporary").iterdir()]
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_notebook_shows_the_page_in_a_frame(viewer: Viewer) -> None:
    shown = viewer._repr_html_()
    assert shown.startswith("<iframe")
    assert viewer.url in shown
    policy = status(viewer, urlsplit(viewer.url).path)[2]["Content-Security-Policy"]
    assert "frame-ancestors http://localhost:*" in policy


def test_what_can_be_read_in_place_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def converted(*given: Any, **options: Any) -> None:
        raise AssertionError("converted")

    monkeypatch.setattr("mouse_core.view.opening.convert", converted)
    rows = recording(images=False)
    with DatasetStore.open(tmp_path / "store", "a") as store:
        store.extend({name: rows.column(name).to_pylist() for name in rows.column_names})
    for name, compression in (("rows.arrow", None), ("small.arrow", "lz4")):
        with pa.ipc.new_file(
            tmp_path / name, rows.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
        ) as file:
            file.write_table(rows, max_chunksize=7)
    for name in ("store", "rows.arrow"):
        with opened_store(str(tmp_path / name)) as store, view(store) as viewer:
            assert numbers(Client(viewer), sort="return", down=1) == [2, 3, 1, 0]
    with pytest.raises(AssertionError, match="converted"), opened_store(str(tmp_path / "small.arrow")):
        pass
