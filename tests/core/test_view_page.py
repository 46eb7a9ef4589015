"""The page of the viewer in a real browser: clicked through from the list to a step, and beside another source."""

from collections.abc import Iterator

import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core.metadata import DatasetMetadata
from mouse_core.view import Viewer, view
from tests.browser import BROWSER, Tab, tab
from tests.core.test_view import NASTY, recording

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]

LENGTHS = (40, 3, 2500, 12)


@pytest.fixture(scope="module")
def viewer() -> Iterator[Viewer]:
    first = DatasetStore().from_dataset(recording())
    second = DatasetStore().from_dataset(recording(LENGTHS, images=False))
    odd = DatasetStore().from_dataset(recording(images=False))
    odd.describe(DatasetMetadata(dimensions={"observation": ["base", f"elbow {NASTY}", "wrist"]}))
    windows = BatchSource(second, sequence_length=16, batch_size=8)
    with view(first, second, odd, windows, names=[f"first {NASTY}", "second", "odd", "windows"]) as made:
        yield made


@pytest.fixture(scope="module")
def page(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(viewer.url, tmp_path_factory.mktemp("browser")) as opened:
        opened.call("Runtime.enable")
        opened.call("Log.enable")
        opened.until("document.querySelector('.pane h2') !== null")  # before that, the page does not follow its hash
        yield opened
        wrong = [one for one in opened.said if one["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        assert not wrong


SHOWN = "[...document.querySelectorAll('.pane')].map(p => p.querySelector('h2').textContent).join()"
ROWS = "[...document.querySelectorAll('.room .row')].map(r => r.children[0].textContent)"
STEP = "[...document.querySelectorAll('.pane')].map(p => p.querySelector('input.number').value).join()"


def hash_says(text: str) -> str:
    return f"decodeURIComponent(location.hash.replaceAll('+', ' ')).includes({text!r})"


def test_from_the_list_to_a_step_and_beside_another(page: Tab) -> None:
    page.until(f"{SHOWN} === 'Episode 0' && {ROWS}.length === 4")

    # Sorted by return, the largest first, and filtered; a row opens its episode.
    page.click(".header button:nth-child(3)")
    page.until(f"{ROWS}.join() === '2,3,1,0'")
    page.run(
        "(() => { document.querySelector('.filters').open = true;"
        " const box = document.querySelector('input[aria-label=\"low return\"]'); box.value = '2.5';"
        " box.dispatchEvent(new Event('input')); })()"
    )
    page.until(f"{ROWS}.join() === '2,3,1'")
    page.click(".room .row:nth-child(1) > span")
    page.until(f"{SHOWN} === 'Episode 2'")
    page.until(hash_says("&e=2&s=0"))

    # A box in the plot selects the episodes in it: all returns, and the first half of the numbers.
    page.click(".filters button")
    page.until(f"{ROWS}.length === 4 && document.querySelector('.side .main-svg')")
    page.until("document.querySelectorAll('.side .point').length === 4")
    page.drag_until(".side .nsewdrag", 0.0, 0.02, 0.5, 0.98, script=f"{ROWS}.length < 4 && {ROWS}.length > 0")
    page.click(".filters button")
    page.until(f"{ROWS}.length === 4")

    # The cursor: by a click into a curve, by keys, and played to the end.
    page.until("document.querySelectorAll('.chart .main-svg').length >= 10")
    assert page.run("[...document.querySelectorAll('.chart .name')].map(n => n.textContent).slice(0, 3).join()") == (
        "reward,action,observation[0]"
    )
    page.drag_until(".chart .frame", 0.5, 0.5, 0.5, 0.5, script=f"Number({STEP}) >= 2 && Number({STEP}) <= 5")
    page.press("Home")
    page.press("ArrowRight")
    page.until(f"{STEP} === '1'")
    page.until("document.querySelector('.chart:nth-child(3) .value').textContent === '9'")
    page.until("document.querySelector('.cameras img').naturalWidth === 6")
    assert "begin=9" in page.run("document.querySelector('.cameras img').src")
    page.press(" ")
    page.until(f"{STEP} === '7'")

    # The next in the list, and zoom.
    page.press("]")
    page.until(f"{SHOWN} === 'Episode 3'")
    page.press("+")
    page.until("/&z=\\d+-\\d+/.test(location.hash)")
    page.press("0")
    page.until("!location.hash.includes('z=')")

    # Beside another source, under one cursor.
    page.click("header > button")
    page.until(f"{SHOWN} === 'Episode 3,Episode 0'")
    page.until(hash_says("d2=second"))
    page.press("Home")
    page.press("ArrowRight")
    page.until(f"{STEP} === '1,1'")

    # They are zoomed together; keys are for the one that was touched last, and another episode begins at the cursor.
    page.press("+")
    page.until("/&z=\\d+-\\d+.*&z2=\\d+-\\d+/.test(location.hash)")
    page.press("0")
    page.until("!/z2?=/.test(location.hash)")
    page.click(".pane:nth-child(2) h2")
    page.press("]")
    page.until(f"{SHOWN} === 'Episode 3,Episode 1' && {STEP} === '1,1'")

    # Strings of the data are texts, and nothing of them ran.
    assert page.run("window.evil") is None
    assert page.run("document.querySelectorAll('img[onerror], .pane script').length") == 0
    assert NASTY in page.run("document.body.textContent")


def test_a_link_opens_dataset_episode_step_and_zoom(page: Tab, viewer: Viewer) -> None:
    page.run("location.hash = '#d=second&e=2&s=2100&z=2000-2200'")
    page.until(f"{SHOWN} === 'Episode 2' && {STEP} === '2100'")
    page.until("document.querySelectorAll('.chart .plot')[0].data?.[0].x[0] === 2000")
    assert page.run("document.querySelectorAll('.chart .plot')[0].data[0].x.at(-1)") == 2199
    page.press("0")
    page.until("document.querySelectorAll('.chart .plot')[0].layout.xaxis.range[1] === 2499")
    # Of 2,500 steps less than that many points are drawn, and the reward of the first step is one of them.
    assert page.run("document.querySelectorAll('.chart .plot')[0].data[0].x.length") < 2500


def test_a_link_has_the_order_and_the_filters_of_the_list(page: Tab) -> None:
    page.run(
        "location.hash = '#d=second&e=0&s=0&l=' + encodeURIComponent('sort=length&down=1&low.length=10&color=done')"
    )
    page.until(f"{ROWS}.join() === '2,0,3'")
    assert page.run("document.querySelector('select[aria-label=colours]').value") == "done"
    page.run("document.querySelector('.header button').click()")
    page.until(f"{ROWS}.join() === '0,2,3'")
    page.until(hash_says("l=low.length=10&color=done"))
    page.run("location.hash = '#d=nothing&e=1&s=0'")
    page.until("document.body.textContent.includes('\"nothing\", which is not shown here')")
    page.run("location.hash = '#d=second&e=0&s=0'")
    page.until("!document.body.textContent.includes('which is not shown here')")
    page.until(f"{ROWS}.join() === '0,1,2,3'")


def test_batches_show_windows(page: Tab) -> None:
    page.run("location.hash = '#d=windows'")
    page.until("document.querySelectorAll('.main .chart .main-svg').length > 3")
    page.until("document.querySelector('.facts').textContent.includes('begins at row')")


def test_names_of_dimensions_are_texts(page: Tab) -> None:
    page.run("location.hash = '#d=odd&e=2&s=0'")
    names = "[...document.querySelectorAll('.chart .name')].map(n => n.textContent)"
    page.until(f"{names}[3] === {f'observation[1] elbow {NASTY}'!r}")
    assert page.run("window.evil") is None
    page.run("location.hash = '#d=second&e=0&s=0'")
    page.until(f"{SHOWN} === 'Episode 0'")
