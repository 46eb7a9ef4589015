"""The page of `mouse inspect --html`: what it holds, and what a real browser makes of it."""

from __future__ import annotations

import base64
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core.formats.base import RowStream
from mouse_core.images import decode_image, encode_png
from mouse_core.inspect import inspect, to_html
from tests.browser import BROWSER, in_browser

NASTY = '</script><script>window.evil = 1</script><img src="https://example.invalid/x.png">'


def recording(*, lengths: tuple[int, ...] = (40, 25, 250), images: bool = True, continuous: bool = False) -> RowStream:
    rng = np.random.default_rng(0)
    rows = sum(lengths) + len(lengths)
    starts = np.cumsum([0, *(length + 1 for length in lengths[:-1])])
    step = np.arange(rows) - np.repeat(starts, np.array(lengths) + 1)
    done = np.zeros(rows, np.int64)
    done[np.append(starts[1:], rows) - 1] = [1, 2] * (len(lengths) // 2) + [1] * (len(lengths) % 2)
    reward = np.where(step == 0, 0.0, rng.normal(size=rows))
    action: Any = rng.normal(size=(rows, 3)).tolist() if continuous else rng.integers(0, 5, rows)
    columns = {
        "action": action,
        "reward": reward,
        "done": done,
        "episode_step": step,
        "observation": rng.normal(size=(rows, 12)).tolist(),
        "metadata_note": [NASTY] * rows,
    }
    if images:
        pixels = rng.integers(0, 256, (rows, 40, 30, 3), dtype=np.uint8)
        columns["observation_image"] = pa.array(
            [{"bytes": encode_png(image), "path": None} for image in pixels],
            pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        )
    table = pa.table(columns)
    return RowStream(f"recordings {NASTY}", "datasets", table.schema, lambda: iter(table.to_batches(max_chunksize=64)))


class Tags(HTMLParser):
    """All elements with their attributes, and the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page() -> str:
    return to_html(inspect(recording()))


def test_the_page_needs_nothing_besides_itself(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    for tag, attributes in tags.found:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form"), tag
        assert tag != "script" or "src" not in attributes
        for name in ("src", "href", "srcset", "data", "poster", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), attributes
    style = "".join(re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL))
    assert "url(" not in style
    assert "@import" not in style
    assert "https://example.invalid/x.png" not in {attributes.get("src") for _, attributes in tags.found}


def test_texts_of_the_data_stay_texts(page: str) -> None:
    assert "<script>window.evil" not in page
    assert html.escape(NASTY) in page


def test_the_page_is_of_moderate_size() -> None:
    large = recording(lengths=(900, 500), images=False)
    assert len(to_html(inspect(large))) < 1_500_000


def test_steps_have_the_reward_so_far_also_where_some_are_left_out() -> None:
    stream = recording(lengths=(40, 25, 2500))
    table = pa.Table.from_batches(list(stream))
    data = json.loads(re.findall(r'id="steps">(.*?)</script>', to_html(inspect(stream)))[0])
    assert len(data) >= 2
    starts = {40: 0, 25: 41, 2500: 67}
    for episode in data:
        first = starts[episode["transitions"]]
        rewards = table.column("reward").to_numpy()[first : first + episode["transitions"] + 1]
        sums = np.cumsum(rewards)
        assert episode["places"][-1] == episode["transitions"]
        assert episode["sums"] == pytest.approx(sums[episode["places"]], abs=1e-3)
        assert len(episode["steps"]) == len(episode["images"]["observation_image"]) == len(episode["places"])


def episodes_of(page: str) -> Any:
    return json.loads(re.findall(r'id="steps">(.*?)</script>', page)[0])


@pytest.mark.parametrize("images", [True, False])
def test_the_curve_has_every_step_that_was_kept_and_says_which_were_not(images: bool) -> None:
    page = to_html(inspect(recording(lengths=(40, 2500), images=images)))
    for episode in episodes_of(page):
        trace, transitions = episode["trace"], episode["transitions"]
        long = transitions == 2500
        kept = [*range(160), *range(2461, 2501)] if long else list(range(transitions + 1))
        assert trace["places"] == kept
        assert len(trace["sums"]) == len(kept)
        assert ("Steps 160 to 2,460 are left out" in episode["said"]) == long
        # What is shown step by step is some of it.
        found = dict(zip(trace["places"], trace["sums"], strict=True))
        assert [found[place] for place in episode["places"]] == episode["sums"]


def test_sums_that_nobody_knows_are_not_drawn() -> None:
    table = pa.Table.from_batches(list(recording(lengths=(2500,), images=False)))
    rewards = table.column("reward").to_numpy().copy()
    rewards[0], rewards[1000] = 100.0, np.nan  # before anything was done; and where steps are left out
    table = table.set_column(table.schema.get_field_index("reward"), "reward", pa.array(rewards))
    (episode,) = episodes_of(
        to_html(inspect(RowStream("one", "datasets", table.schema, lambda: iter(table.to_batches()))))
    )
    assert episode["trace"]["sums"][:160] == pytest.approx([0, *np.cumsum(rewards[1:160])], abs=1e-3)
    assert episode["trace"]["sums"][160:] == [None] * 40


def test_rows_keep_their_numbers_when_later_ones_are_smaller() -> None:
    """A head that grew with them would take rows from behind those that the tail holds already."""
    rng = np.random.default_rng(0)
    sizes = [200_000] * 100 + [60_000] * 60 + [10] * 400
    table = pa.table(
        {
            "action": np.zeros(len(sizes), np.int64),
            "reward": np.arange(len(sizes)) * 1.0,
            "done": [*([0] * (len(sizes) - 1)), 1],
            "blob": [rng.bytes(size) for size in sizes],
        }
    )
    batches = table.to_batches(max_chunksize=20)
    (sample,) = inspect(RowStream("one", "datasets", table.schema, lambda: iter(batches))).samples
    assert sample.rows.column("reward").to_pylist() == sample.places.tolist()


def pictures(images: pa.Array) -> list[Any]:
    """What the page of one episode shows for its steps' images: pixels ``[H, W]`` or ``[H, W, C]``, None for none."""
    table = pa.table(
        {
            "action": np.zeros(len(images), np.int64),
            "reward": np.zeros(len(images)),
            "done": [0] * (len(images) - 1) + [1],
            "episode_step": np.arange(len(images)),
            "observation_image": images,
        }
    )
    page = to_html(inspect(RowStream("one", "datasets", table.schema, lambda: iter(table.to_batches()))))
    (episode,) = episodes_of(page)
    shown = episode["images"]["observation_image"]
    return [image and decode_image(base64.b64decode(image.removeprefix("data:image/png;base64,"))) for image in shown]


def test_pictures_of_all_shapes() -> None:
    """Frames as nested lists, stacks of which the last frame is shown, and encoded ones: all to the pixel."""
    grey = np.arange(30, dtype=np.uint8).reshape(5, 6)
    stack = np.stack([grey, grey + 1, grey + 2, grey + 3], axis=2)
    colour = np.random.default_rng(1).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    two, three = pa.list_(pa.list_(pa.uint8())), pa.list_(pa.list_(pa.list_(pa.uint8())))
    for values, wanted in (
        (pa.array([grey.tolist()] * 2, two), grey[:, :, None]),
        (pa.array([grey[:, :, None].tolist()] * 2, three), grey[:, :, None]),
        (pa.array([stack.tolist()] * 2, three), grey[:, :, None] + 3),
        (pa.array([np.moveaxis(stack, 2, 0).tolist()] * 2, three), grey[:, :, None] + 3),
        (pa.array([colour.tolist()] * 2, three), colour),
        (pa.array([encode_png(grey)] * 2), grey[:, :, None]),
        (pa.array([encode_png(colour)] * 2), colour),
        (pa.array([encode_png(stack)] * 2), stack),
    ):
        for found in pictures(values):
            assert np.array_equal(found, wanted), values.type


def test_what_is_no_picture_is_not_shown_and_no_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "here.png").write_bytes(encode_png(np.zeros((2, 2), np.uint8)))
    images = [
        {"bytes": None, "path": str(tmp_path / "here.png")},
        {"bytes": b"no picture", "path": None},
        {"bytes": encode_png(np.full((2, 2), 9, np.uint8)), "path": None},
    ]
    first, second, third = pictures(pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    assert (first, second) == (None, None)
    assert third.reshape(-1).tolist() == [9] * 4


def test_large_pictures_are_made_small() -> None:
    rows = np.arange(1000) // 8
    large = np.broadcast_to(rows[:, None, None], (1000, 700, 3)).astype(np.uint8)
    found = pictures(pa.array([encode_png(large)] * 2))[0]
    assert found.shape == (125, 87, 3)
    assert (found == np.arange(125)[:, None, None]).all()


# ---------------------------------------------------------------------- in a browser

# The page stands in a frame as wide as a screen; the script around it looks at it, uses it, and sends what it found.
HARNESS = """<!doctype html><body style="margin:0"><iframe id="f" style="border:0;width:WIDTHpx;height:900px"></iframe>
<script>
const frame = document.getElementById("f"), page = PAGE, found = {errors: []};
frame.srcdoc = page;
frame.onload = async () => {
  const win = frame.contentWindow, doc = frame.contentDocument, get = id => doc.getElementById(id);
  win.onerror = message => found.errors.push(String(message));
  const wait = ms => new Promise(done => setTimeout(done, ms));
  try {
    await Promise.all([...doc.images].map(image => image.decode()));
    found.evil = win.evil === 1;
    found.width = doc.documentElement.clientWidth;
    found.scroll = doc.documentElement.scrollWidth;
    found.sections = [...doc.querySelectorAll("section")].map(section => section.id);
    found.heights = [...doc.querySelectorAll("section")].map(section => section.getBoundingClientRect().height);
    found.outside = [...doc.querySelectorAll("main *, header *")].filter(item => !item.closest(".scroll, .strip") &&
      item.getBoundingClientRect().right > found.width + 1).map(item => item.tagName + "#" + item.id);
    found.letters = [...doc.querySelectorAll("svg")].filter(svg => svg.querySelector("text")).map(svg =>
      12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
    found.buttons = [...doc.querySelectorAll("button")].map(button => button.getBoundingClientRect().height);
    found.images = [...doc.images].map(image => image.naturalWidth);
    found.bars = doc.querySelectorAll("svg .bar").length;
    const facts = () => get("facts").textContent;
    const where = () => get("where").textContent;
    found.first = [where(), facts()];
    get("next").click(); get("next").click(); get("back").click();
    found.second = [where(), facts()];
    get("slide").value = get("slide").max; get("slide").dispatchEvent(new Event("input"));
    found.last = [where(), get("trace").textContent];
    const drawn = () => {
      const lines = [...get("trace").querySelectorAll(".trace")];
      const ends = lines.map(line => line.getAttribute("points").split(" ").map(point => Number(point.split(",")[0])));
      return [ends.map(x => [x[0], x[x.length - 1]]), get("trace").querySelectorAll(".gap").length,
        get("said").textContent];
    };
    found.drawn = [...get("pick").options].map((_, place) => {
      get("pick").value = String(place); get("pick").dispatchEvent(new Event("change")); return drawn();
    });
    get("pick").value = "1"; get("pick").dispatchEvent(new Event("change"));
    found.other = where();
    get("play").click(); found.playing = get("play").textContent;
    for (let turn = 0; turn < 100 && where() === found.other; turn++) await wait(100);
    get("play").click(); found.played = where();
    found.vector = get("values") ? get("values").querySelectorAll(".bar").length : 0;
    found.frames = get("frames").querySelectorAll("img").length;
    found.loaded = win.performance.getEntriesByType("resource").map(one => one.name)
      .filter(name => !name.startsWith("data:"));
  } catch (error) { found.errors.push(String(error)); }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
};
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("width", "images", "continuous"), [(1280, True, False), (390, True, False), (390, False, True)]
)
def test_a_browser_shows_it_and_steps_through(width: int, images: bool, continuous: bool, tmp_path: Path) -> None:
    page = to_html(inspect(recording(images=images, continuous=continuous)))
    inside = json.dumps(page).replace("<", "\\u003c")
    found = in_browser(HARNESS.replace("WIDTH", str(width)).replace("PAGE", inside), tmp_path)
    assert found["errors"] == []
    assert not found["evil"]
    assert found["loaded"] == []
    wanted = ["findings", "episodes", "ranges", *(["images"] if images else []), "player", "columns"]
    assert found["sections"] == wanted
    assert min(found["heights"]) > 40
    # Nothing sticks out to the right: the page does not scroll sideways.
    assert found["scroll"] <= found["width"] <= width
    assert found["outside"] == []
    assert min(found["letters"]) >= 9
    assert min(found["buttons"]) >= 40
    assert found["bars"] > 20
    assert min(found["images"], default=1) > 0
    assert len(found["images"]) > (10 if images else -1)
    assert found["first"][0] == "step 0 of 40"
    assert found["second"][0] == "step 1 of 40"
    assert found["first"][1] != found["second"][1]
    assert found["last"][0] == "step 40 of 40"
    assert found["last"][1].startswith("reward so far: ")
    assert found["other"].startswith("step 0 of ")
    assert found["playing"] == "Stop"
    assert any(gaps for _, gaps, _ in found["drawn"])
    for lines, gaps, said in found["drawn"]:
        assert len(lines) == gaps + 1
        assert ("left out" in said) == bool(gaps)
        if gaps:  # of 251 steps 160 to 210 are left out: nothing is drawn there
            assert lines[0] == pytest.approx([8, 8 + 284 * 159 / 250], abs=0.1)
            assert lines[1] == pytest.approx([8 + 284 * 211 / 250, 292], abs=0.1)
    assert found["played"] != found["other"]
    assert found["vector"] == 12
    assert found["frames"] == images
