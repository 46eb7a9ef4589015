"""The page of `mouse inspect --html`: what it holds, and what a real browser makes of it."""

import base64
import hashlib
import json
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import ConfigError, DatasetStore
from mouse_core.cli import main
from mouse_core.images import decode_image, encode_png
from mouse_core.inspect import Finding, inspect
from mouse_core.view import Viewer, to_html
from mouse_core.view.stored import chosen, shares, spread
from tests.browser import BROWSER, tab

NASTY = '</script ><script>window.evil = 1</script><!--<script><img src="https://example.invalid/x" onerror="evil=2">'
LENGTHS = (40, 25, 900, 30, 30, 30, 30, 30, 30, 30, 30, 30)


def recording(lengths: tuple[int, ...] = LENGTHS, *, images: bool = True) -> pa.Table:
    """Episodes of some rows, each with a return of its own; in episode 2 an outlier, and a gap."""
    rng = np.random.default_rng(0)
    rows = sum(lengths)
    step = np.concatenate([np.arange(length) for length in lengths])
    number = np.repeat(np.arange(len(lengths)), lengths)
    done = np.zeros(rows, np.int64)
    done[np.cumsum(lengths) - 1] = np.arange(len(lengths)) % 2 + 1
    observation = rng.normal(size=(rows, 3))
    observation[65 + 707, 1], observation[65 + 300, 2] = 1e9, math.nan
    columns = {
        "action": rng.integers(0, 5, rows),
        "reward": np.where(step == 1, number * 1.0, 0.0),
        "done": done,
        "episode_step": step,
        "observation": observation.tolist(),
        "metadata_note": [NASTY] * rows,
    }
    if images:
        pixels = np.zeros((rows, 4, 6, 3), np.uint8)
        pixels[:, 0, 0, 0] = step % 256
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        columns["observation_image"] = pa.array([{"bytes": encode_png(one), "path": None} for one in pixels], kind)
    return pa.table(columns)


def page_of(table: pa.Table, **options: Any) -> str:
    return to_html(DatasetStore().from_dataset(table), **options)


def stored_in(page: str) -> Any:
    """What stands in a page for its script to read."""
    (found,) = re.findall(r'<script type="application/json" id="stored">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(found)


class Tags(HTMLParser):
    """All elements with their attributes, and the texts of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def page() -> str:
    return page_of(recording(), name=f"rows {NASTY}", command="mouse view rows")


@pytest.fixture(scope="module")
def stored(page: str) -> Any:
    return stored_in(page)


def test_the_page_needs_nothing_besides_itself_and_runs_its_own_scripts_alone(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    names = [tag for tag, _ in tags.found]
    assert set(names) <= {"html", "head", "meta", "title", "style", "body", "noscript", "script"}
    assert names.count("script") == 3
    assert all("src" not in attributes for _, attributes in tags.found)
    policy = next(value["content"] for _, value in tags.found if "http-equiv" in value) or ""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in tags.scripts[1:3]]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    style = "".join(re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL))
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"^\s*(import|export)\b", tags.scripts[2], flags=re.MULTILINE)


def test_texts_of_the_data_stay_texts(page: str, stored: Any) -> None:
    assert "window.evil" not in re.sub(r'id="stored">.*?</script>|<title>.*?</title>', "", page)
    assert "<script>window.evil" not in page
    assert not set("<>&") & set(re.findall(r'id="stored">(.*?)</script>', page)[0])
    (source,) = stored["sources"]
    assert source["name"] == f"rows {NASTY}"
    at = stored["list"]["columns"].index("metadata_note")
    assert {row[at] for row in stored["list"]["episodes"]} == {NASTY[:100]}
    surrogate = page_of(recording((3, 3, 800), images=False), name="\udcff").encode()
    assert b"<title>?</title>" in surrogate


def test_the_page_stays_small_whatever_is_in_it(page: str) -> None:
    rows = 300
    table = pa.table(
        {
            "action": np.zeros(rows, np.int64),
            "reward": np.zeros(rows),
            "done": (np.arange(rows) % 50 == 49) * 1,
            "observation": pa.FixedSizeListArray.from_arrays(np.random.default_rng(0).normal(size=rows * 2000), 2000),
            **{f"metadata_{number}": ["x<" * 2000] * rows for number in range(20)},
        }
    )
    store = DatasetStore().from_dataset(table)
    large = to_html(store, inspect(DatasetStore().from_dataset(table.select(["action", "reward", "done"]))))
    assert len(large) - len(page) < 8_000_000
    found = stored_in(large)
    assert "Of observation the first" in found["sources"][0]["stored"]["said"]
    assert max(len(text) for one in found["kept"] for row in one["values"] for cell in row for text in cell) == 200


def test_without_plotly_nothing_is_read_and_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(recording(images=False), tmp_path / "rows.parquet")
    monkeypatch.setattr("mouse_core.view.viewer.find_spec", lambda name: None)
    assert main(["inspect", str(tmp_path / "rows.parquet"), "--html", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip().splitlines() == [
        "mouse inspect: the page needs Plotly, which draws its plots: pip install 'mouse-data[view]'"
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["rows.parquet"]


def test_rows_that_are_no_steps_have_a_page_of_what_is_wrong(tmp_path: Path) -> None:
    pq.write_table(pa.table({"reward": ["much", NASTY], "done": [0, 1]}), tmp_path / "rows.parquet")
    assert main(["inspect", str(tmp_path / "rows.parquet"), "--html", str(tmp_path / "page.html")]) == 0
    found = stored_in((tmp_path / "page.html").read_text())
    assert "not-numbers" in [one["code"] for one in found["findings"]["report"]["findings"]]
    assert found["kept"] == []
    assert found["sources"][0]["stored"]["said"].startswith("Episodes cannot be shown: ")
    with pytest.raises(ConfigError, match="expected a store, or only a report, found NoneType"):
        to_html(None)


def test_the_command_that_is_hinted_at_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "odd name"
    folder.mkdir()
    for split in ("train", "test"):
        pq.write_table(recording((100, 800, 100), images=False), folder / f"{split}-00000-of-00001.parquet")
    words = [str(folder), "--format", "rows", "--final", "mark", "--split", "train", "--alignment", "outgoing"]
    words += ["--image-root", str(tmp_path)]
    page = tmp_path / "page.html"
    assert main(["inspect", *words, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    (hint,) = [line.removeprefix("To see it: ") for line in out.splitlines() if line.startswith("To see it: ")]
    monkeypatch.setattr(Viewer, "wait", lambda viewer: None)
    program, *asked = shlex.split(hint)
    assert (program, asked[:2]) == ("mouse", ["view", words[0]])
    assert sorted(asked[2:-2]) == sorted(words[1:])
    assert main([*asked, "--no-browser"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"#{asked[-1]}")
    assert stored_in(page.read_text())["sources"][0]["stored"]["command"] == shlex.join([program, *asked[:-2]])


def test_a_few_episodes_stand_for_all_and_those_that_findings_name_are_there() -> None:
    lengths = np.array([5, 9, 2, 7, *[6] * 20])
    returns = np.array([1.0, np.nan, 3, 2, *[2.5] * 20])
    findings = [Finding("odd", "note", "", episode=number) for number in (3, 9, None, 8, 30, 9, 7, 6, 5)]
    assert chosen(lengths, returns, findings) == {
        0: ["first", "lowest return"],
        1: ["longest"],
        2: ["highest return", "shortest"],
        13: ["median return"],
        **{number: ["odd"] for number in (3, 9, 8, 7)},
    }
    assert chosen(np.array([3, 4, 3]), None) == {0: ["first", "shortest"], 1: ["longest"], 2: []}
    assert chosen(np.zeros(0, np.int64), np.zeros(0)) == {}
    assert spread(5, 3, [3, 9]).tolist() == [0, 2, 3, 4]
    assert shares([3, 10, 1000], 100) == [3, 10, 62]


def test_lists_curves_and_steps_are_those_of_the_rows(stored: Any) -> None:
    table = recording()
    values = {name: table[name].to_pylist() for name in table.column_names}
    starts = np.cumsum([0, *LENGTHS])
    columns, episodes = stored["list"]["columns"], stored["list"]["episodes"]
    for place, wanted in (("episode", range(12)), ("length", LENGTHS), ("return", range(12))):
        assert [row[columns.index(place)] for row in episodes] == [*wanted]
    assert [row[columns.index("warnings")] > 0 for row in episodes] == [number == 2 for number in range(12)]
    kept = {one["episode"]["episode"]: one for one in stored["kept"]}
    assert [row[1] for row in episodes if row[0] not in kept] == [None] * (12 - len(kept))
    assert kept.keys() == {0, 1, 2, 5, 11}
    assert "5 of 12 episodes are here step by step" in stored["sources"][0]["stored"]["said"]
    for number, one in kept.items():
        begin, length = int(starts[number]), LENGTHS[number]
        assert (one["episode"]["start"], one["episode"]["length"]) == (begin, length)
        for dim, curve in enumerate(one["curves"]["observation"]):
            rows = np.array([row[dim] for row in values["observation"][begin : begin + length]])
            steps = [*range(length)] if curve["steps"] is None else curve["steps"]
            found = np.array([math.nan if value is None else value for value in curve["values"]])
            assert found == pytest.approx(rows[steps], rel=1e-5, nan_ok=True)
            assert (np.nanmin(found), np.nanmax(found)) == pytest.approx((np.nanmin(rows), np.nanmax(rows)), rel=1e-5)
        steps = [*range(length)] if one["steps"] is None else one["steps"]
        assert one["columns"] == ["reward", "action", "observation", "done", "episode_step", "metadata_note"]
        assert [texts[4] for texts in one["values"]] == [[str(step)] for step in steps]
        assert [texts[2][0] for texts in one["values"]] == [
            f"{values['observation'][begin + step][0]:.7g}" for step in steps
        ]
        # The step that a finding names is there, whatever is left out.
        assert number != 2 or (707 in steps and len(steps) < length)
        strip = one["pictures"]["observation_image"]
        for step, file in zip(strip["steps"], strip["files"], strict=True):
            kind, _, encoded = file.partition(";base64,")
            assert kind == "data:image/png"
            assert decode_image(base64.b64decode(encoded))[0, 0, 0] == step % 256


def pictures(images: pa.Array) -> list[Any]:
    """What the page of one episode has of its steps' images: pixels ``[H, W, C]``, None for none."""
    rows = len(images)
    columns = {"action": np.zeros(rows, np.int64), "reward": np.zeros(rows), "done": [0] * (rows - 1) + [1]}
    (episode,) = stored_in(page_of(pa.table(columns | {"metadata_image": images})))["kept"]
    files = episode["pictures"]["metadata_image"]["files"]
    return [file and decode_image(base64.b64decode(file.partition(";base64,")[2])) for file in files]


def test_pictures_of_all_shapes() -> None:
    """Frames as nested lists, stacks of which the last frame is shown, and encoded ones: all to the pixel."""
    grey = np.arange(30, dtype=np.uint8).reshape(5, 6)
    stack = np.stack([grey, grey + 1, grey + 2, grey + 3], axis=2)
    colour = np.random.default_rng(1).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    two, three = pa.list_(pa.list_(pa.uint8())), pa.list_(pa.list_(pa.list_(pa.uint8())))
    for values, wanted in (
        (pa.array([grey.tolist()] * 2, two), grey[:, :, None]),
        (pa.array([colour.tolist()] * 2, three), colour),
        (pa.array([np.moveaxis(colour, 2, 0).tolist()] * 2, three), colour),
        (pa.array([encode_png(grey)] * 2), grey[:, :, None]),
        (pa.array([encode_png(stack)] * 2), stack),
    ):
        for found in pictures(values):
            assert np.array_equal(found, wanted), values.type


def test_what_is_no_picture_is_not_shown_and_large_ones_are_made_small() -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    large = np.broadcast_to(np.arange(1000)[:, None, None] // 8, (1000, 700, 3)).astype(np.uint8)
    images = [{"bytes": b"no picture", "path": None}, {"bytes": encode_png(large), "path": None}]
    first, second = pictures(pa.array(images, kind))
    assert first is None
    assert second.shape == (142, 100, 3)
    assert (abs(second - (np.arange(142) * 7 / 8)[:, None, None]) < 3).all()


SHOWN = "[...document.querySelectorAll('.pane')].map(p => p.querySelector('h2').textContent).join()"
ROWS = "[...document.querySelectorAll('.room .row')].map(r => r.children[0].textContent).join()"
STEP = "document.querySelector('input.number').value"
SAID = "document.querySelector('#said')"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_it_and_asks_nobody(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page)
    with tab(file.as_uri(), tmp_path) as opened:
        for domain in ("Runtime", "Log", "Network"):
            opened.call(f"{domain}.enable")
        # What was found: texts, tables, and plots.
        opened.until("document.querySelectorAll('.main .charts .main-svg').length > 3")
        assert "outlier" in opened.run("document.querySelector('.findings').textContent")
        assert opened.run("[...document.querySelectorAll('tbody')].map(t => t.children.length).join()") == "7,2"
        assert opened.run("[...document.querySelectorAll('.tabs button')].filter(b => !b.hidden).length") == 2

        # A finding leads to its step; the list has those that are kept first, and says of others where they are.
        line = "[...document.querySelectorAll('li.finding')].find(one => one.textContent.includes('outlier'))"
        opened.run(f"{line}.querySelector('a').click()")
        opened.until(f"document.querySelector('h2').textContent === 'Episode 2' && {STEP} === '707'")
        opened.until("document.querySelectorAll('.chart .plot')[3].layout?.shapes.length === 1")
        assert opened.run("document.querySelectorAll('.chart .value')[3].textContent") == "1e+09"
        assert opened.run(f"{ROWS}.startsWith('0,11,2,5,1,3,4,6')")
        opened.run("[...document.querySelectorAll('.room .row')][5].click()")
        opened.until(f"!{SAID}.hidden && {SAID}.textContent.includes('mouse view rows --at e=3')")
        opened.run("[...document.querySelectorAll('.room .row')][4].click()")
        opened.until(f"document.querySelector('h2').textContent === 'Episode 1' && {SAID}.hidden")

        # The cursor, by keys, and played; pictures and values go with it.
        opened.press("End")
        opened.until(f"{STEP} === '24' && document.querySelectorAll('dd')[4].textContent === '24'")
        opened.until("document.querySelector('.cameras img').naturalWidth === 6")
        opened.press("Home")
        opened.press("ArrowRight")
        opened.until(f"{STEP} === '1'")
        opened.press(" ")
        opened.until(f"{STEP} === '24'")

        # A long one, zoomed: the cursor goes to the steps that there are, and the spike stays.
        opened.until("location.hash.includes('e=1&s=24')")
        opened.run("location.hash = location.hash.replace('e=1&s=24', 'e=2&s=300&z=700-800')")
        opened.until("document.querySelectorAll('.chart .plot')[3].layout?.xaxis.range[0] === 700")
        assert opened.run("Math.max(...document.querySelectorAll('.chart .plot')[3].data[0].y)") == 1e9
        before = opened.run(STEP)
        opened.press("ArrowRight")
        opened.until(f"Number({STEP}) > Number({before})")

        # Sorted and filtered, and beside itself; on a phone nothing sticks out.
        opened.run("[...document.querySelectorAll('.header button')].find(b => b.textContent === 'return').click()")
        opened.until(f"{ROWS}.startsWith('11,10,9')")
        opened.run(
            "(() => { const box = document.querySelector('input[aria-label=\"high return\"]'); box.value = '2';"
            " box.dispatchEvent(new Event('input')); })()"
        )
        opened.until(f"{ROWS} === '2,1,0'")
        opened.click("header > button")
        opened.until(f"{SHOWN} === 'Episode 2,Episode 0'")
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        opened.call("Emulation.setDeviceMetricsOverride", **size)
        opened.until("innerWidth === 390 && document.documentElement.scrollWidth <= 390")

        assert opened.run("window.evil") is None
        assert NASTY in opened.run("document.body.textContent")
        asked = [one["params"] for one in opened.said if one["method"] == "Network.requestWillBeSent"]
        assert [one["request"]["url"][:40] for one in asked if not one["request"]["url"].startswith("data:")] == []
        wrong = [one for one in opened.said if one["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        assert not wrong
