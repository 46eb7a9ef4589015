"""The page of a study: what it says of results that are known, and what hostile ones make of it."""

import dataclasses
import html
import json
import math
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

import mouse_study
from mouse_core.errors import StorageError
from mouse_study import Results, Run
from tests.browser import BROWSER, in_browser
from tests.study.planted import NASTY, planted, table_of

# Together they take many seconds.
pytestmark = pytest.mark.slow


Known = Callable[..., tuple[Results, str, "Page"]]


class Page(HTMLParser):
    """All elements with their attributes, texts, and the cells of tables by section."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.text = ""
        self._section, self._cell = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "section":
            self._section = str(dict(attrs)["id"])
        if tag == "tr":
            self.rows.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self.rows[self._section][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.rows[self._section][-1][-1] += data

    def row(self, section: str, *begin: str) -> list[str]:
        """The first row of a section that begins with these cells."""
        return next(row for row in self.rows[section] if row[: len(begin)] == list(begin))


def shown(results: Results, folder: Path) -> tuple[str, Page]:
    """The page as written, and as parsed."""
    text = mouse_study.page(results, folder / "page.html").read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Planted results by the arguments of `planted`, or `hostile` ones, with their page, which is made once."""

    @cache
    def made(**options: Any) -> tuple[Results, str, Page]:
        results = hostile() if options == {"hostile": True} else planted(**options)
        return results, *shown(results, tmp_path_factory.mktemp("page"))

    return made


def test_the_page_says_what_is_known(known: Known) -> None:
    results, _, page = known(variants=("narrow", "wide"), seeds=5)
    assert "same data: proven, for 10 pairs of runs" in page.text
    losses = results.series("loss")
    ends = [np.mean(losses[f"wide/jax/{seed}"][1][-30:]) for seed in range(5)]
    row = page.row("ends", "wide", "jax")
    assert row[2] == "5"
    assert float(row[3]) == pytest.approx(np.mean(sorted(ends)[1:-1]), rel=1e-3)
    assert [float(cell) for cell in row[5:]] == pytest.approx([min(ends), max(ends)], rel=1e-3)
    low, high = map(float, row[4].split(" to "))
    assert min(ends) <= low * 1.001
    assert high <= max(ends) * 1.001
    assert low < float(row[3]) < high
    assert page.row("ends", "all variants", "torch")[2] == "10"
    # The second evaluation table's rows are those of another name.
    assert [row[0] for row in page.rows["ends"]].count("all variants") == 4


def test_the_page_says_when_pairs_part(known: Known) -> None:
    results, _, page = known(seeds=1)
    losses = results.series("loss")
    one, other = losses["default/torch/0"][1], losses["default/jax/0"][1]
    difference = [abs(a - b) / max(abs(a), abs(b)) for a, b in zip(one, other, strict=True)]
    row = page.row("parting", "default", "0")
    assert row[3] == "300"
    for cell, tolerance in zip(row[5:10], (1e-6, 1e-5, 1e-4, 1e-3, 1e-2), strict=True):
        beyond = [step for step, apart in enumerate(difference) if apart > tolerance]
        assert cell == (str(beyond[0]) if beyond else "never")
    assert float(row[10].replace("−", "-")) == pytest.approx(max(difference), rel=0.06)


def test_the_page_says_where_time_went(known: Known) -> None:
    _, _, page = known()
    row = page.row("costs", "default", "jax")
    # 299 steps of 2 + 30 ms after the first; compiling and the rest are as planted.
    assert row[2:5] == ["3", f"{1000 / 32:.3g}", f"{100 * 2 / 32:.1f}%"]
    assert row[5:] == ["598 ms", "8.97 s", "1.7 s", "1.25 s", "18 s", "750 MiB"]
    assert page.row("costs", "default", "torch")[-3] == "–"


def test_single_runs_get_no_band_and_the_page_says_so(known: Known) -> None:
    _, _, page = known(seeds=1)
    assert "One seed: no band." in page.text
    assert page.row("ends", "default", "jax")[4] == "–"
    assert "ends above one of" not in page.text
    assert "A band of 3 seeds reaches from the lowest run to the highest" in known()[2].text


def test_runs_that_are_equal_but_for_rounding_lie_above_each_other_half_of_the_time(tmp_path: Path) -> None:
    results = planted(steps=20)  # where losses differ by 1e-7
    losses = results.series("loss")
    assert losses["default/jax/0"][1][-2:].mean() != losses["default/torch/0"][1][-2:].mean()
    _, page = shown(results, tmp_path)
    assert page.row("ends", "default", "jax", "torch")[3:] == ["50%", "9"]


def test_unfinished_runs_are_shown_and_not_counted(tmp_path: Path) -> None:
    unlike: dict[str, dict[str, Any]] = {
        "default/jax/2": {"status": "failed", "steps": 100, "error": "ValueError: expected a loss, found none"},
        "default/torch/1": {"status": "partial", "steps": 200, "digest": None},
    }
    _, page = shown(planted(unlike=unlike), tmp_path)
    assert page.row("ends", "default", "jax")[2] == "2 of 3"
    assert page.row("ends", "default", "torch")[2] == "2 of 3"
    assert "Dashed: runs that did not finish" in page.text
    assert page.row("runs", "default/jax/2")[1:] == ["100", "ValueError: expected a loss, found none"]
    assert "same data: not proven for 2 of 3 pairs" in page.text
    assert "not proven · default, seed 1: jax and torch" in page.text
    assert "no digest of what torch was given." in page.text


def test_a_run_that_went_astray_is_not_averaged_away(tmp_path: Path) -> None:
    results = planted(seeds=8)
    column = results.table["value"].to_numpy().copy()
    names, runs = results.table["name"].to_pylist(), results.table["run"].to_pylist()
    for row, (name, run) in enumerate(zip(names, runs, strict=True)):
        if name == "loss" and run == "default/jax/3":
            column[row] = math.nan
    place = results.table.schema.get_field_index("value")
    table = results.table.set_column(place, "value", [column])
    _, page = shown(dataclasses.replace(results, table=table), tmp_path)
    assert page.row("ends", "default", "jax")[3] == "not a number"
    assert page.row("parting", "default", "3")[4:6] == ["∞", "0"]


def test_the_page_needs_nothing_besides_itself(known: Known) -> None:
    _, text, page = known()
    for tag, attributes in page.found:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "script", "img", "image"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), attributes
            if name in ("src", "href", "xlink:href", "srcset", "data", "poster", "action"):
                assert str(value).startswith("#"), attributes
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_parts_of_pictures_have_names_of_their_own(known: Known) -> None:
    _, text, page = known(variants=("narrow", "wide"), seeds=5)
    names = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(names) == len(set(names))
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    assert used <= set(names)


def test_the_same_results_give_the_same_page(known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first, _ = known()
    matplotlib.use("pdf")
    before = dict(matplotlib.rcParams)
    monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 7.0)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    results = planted()
    # Written and read: the page is made of the file.
    results.write(tmp_path / mouse_study.FILE)
    assert shown(mouse_study.read(tmp_path), tmp_path)[0] == first
    monkeypatch.undo()
    assert dict(matplotlib.rcParams) == before


def test_colours_follow_the_style(known: Known) -> None:
    """In pictures stand names of colours that light and dark settle, and no colour of their own but white space."""
    _, text, _ = known()
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--c1)" in pictures
    assert not re.findall(r"(?:fill|stroke): ?#", pictures)
    assert not re.findall(r"\$", pictures)


def hostile() -> Results:
    """Results in which every text is markup."""
    runs = [
        Run(
            run=f"{NASTY}/{framework}{NASTY}/{seed}",
            variant=NASTY,
            framework=f"{framework}{NASTY}",
            seed=seed,
            status="failed" if seed == 2 else "done",
            steps=40,
            seconds=math.nan,
            first_step_seconds=math.inf,
            versions={NASTY: NASTY, "$x^2$": "\ud800\x00"},
            fingerprint=NASTY,
            digest=NASTY,
            machine={NASTY: [NASTY, {"a": NASTY}]},
            error=NASTY + "x" * 100_000,
        )
        for framework in ("_torch", "$jax$")
        for seed in range(3)
    ]
    rows = [
        (run, step, name, value)
        for run in runs
        for name in ("loss", f"evaluation{NASTY}", "_$name$")
        for step, value in enumerate([1.0, -math.inf, math.nan, 1e308, -1e308, 0.0, 5e-324] * 5)
    ]
    return Results(NASTY, 10**12, tuple(runs), table_of(rows))


def test_texts_of_the_results_stay_texts(known: Known) -> None:
    _, text, page = known(hostile=True)
    assert "<script>window.evil" not in text
    assert "<img" not in text
    assert html.escape(NASTY) in text
    assert not [attributes for _, attributes in page.found if any(name.startswith("on") for name in attributes)]
    assert len(text) < 2_000_000


@pytest.mark.parametrize(
    "results",
    [
        Results("nothing", 10, (), table_of([])),
        Results("failed", 10, (Run(run="a/b/0", variant="a", framework="b", seed=0, status="failed"),), table_of([])),
        planted(frameworks=("torch",), seeds=2, steps=1),
        planted(frameworks=tuple("abcdefgh"), seeds=1, steps=3),
    ],
    ids=["no runs", "no values", "one step", "many frameworks"],
)
def test_whatever_there_is_is_shown(results: Results, tmp_path: Path) -> None:
    _, page = shown(results, tmp_path)
    assert results.name in page.text
    assert all(run.run in page.text for run in results.runs)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    results = Results("nothing", 10, (), table_of([]))
    assert results.page(tmp_path) == tmp_path / "page.html"
    before = (tmp_path / "page.html").read_bytes()
    with pytest.raises(StorageError):
        mouse_study.page(results, tmp_path / "none" / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_bytes() == before


HARNESS = """<!doctype html><body style="margin:0"><iframe id="f" style="border:0;width:WIDTHpx;height:900px"></iframe>
<script>
const frame = document.getElementById("f"), page = PAGE, found = {errors: []};
frame.srcdoc = page;
frame.onload = async () => {
  const win = frame.contentWindow, doc = frame.contentDocument;
  try {
    found.evil = win.evil === 1;
    found.width = doc.documentElement.clientWidth;
    found.scroll = doc.documentElement.scrollWidth;
    found.sections = [...doc.querySelectorAll("section")].map(section => section.id);
    found.heights = [...doc.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().height);
    found.letters = [...doc.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height);
    found.outside = [...doc.querySelectorAll("main *, header *")].filter(item => !item.closest(".scroll, svg") &&
      item.getBoundingClientRect().right > found.width + 1).map(item => item.tagName + "#" + item.className);
    found.colours = [...doc.querySelectorAll("svg path")].map(path => win.getComputedStyle(path).stroke);
    found.loaded = win.performance.getEntriesByType("resource").map(one => one.name);
  } catch (error) { found.errors.push(String(error)); }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
};
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("width", "nasty"), [(1280, False), pytest.param(390, False, marks=pytest.mark.long), (390, True)]
)
def test_a_browser_shows_it(known: Known, width: int, nasty: bool, tmp_path: Path) -> None:
    long = ("narrow", "a-variant-whose-name-is-rather-long")
    _, text, _ = known(hostile=True) if nasty else known(variants=long)
    inside = json.dumps(text).replace("<", "\\u003c")
    found = in_browser(HARNESS.replace("WIDTH", str(width)).replace("PAGE", inside), tmp_path)
    assert found["errors"] == []
    assert not found["evil"]
    assert found["loaded"] == []
    assert found["outside"] == []
    assert found["scroll"] <= found["width"] <= width
    if not nasty:
        assert found["sections"] == ["curves", "ends", "parting", "same-data", "costs", "runs"]
        assert min(found["heights"]) > 120
        assert min(found["letters"]) > 8
        assert "rgb(46, 111, 183)" in found["colours"]  # the second framework's, in the light
