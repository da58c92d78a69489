"""The report in a real browser: nothing is fetched, nothing fails, everything can be reached."""

import shutil
from pathlib import Path

import pytest

from chrome import Chrome, find_chrome
from fake_runs import config_of, gallery_of, map_of, metrics_of, result_of, write_figures, write_run
from hardmix.report.page import write_report

PROGRAM = find_chrome()
pytestmark = pytest.mark.skipif(
    PROGRAM is None,
    reason="no browser: install chromium (apt-get install chromium), or set CHROME to one",
)
HOSTILE = "<script>document.title = 'broken in'</script>"
CLASSES = ["disc", HOSTILE, '"><img src=x onerror="document.title=1">']


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = []
    for method, offset in (("moco-v2", 0.0), ("mochi", 0.4)):
        for seed in (0, 1):
            config = config_of(method, seed, train__epochs=6)
            results = {
                name: result_of(config, 0.5 + offset / 10 + seed / 50 + extra)
                for name, extra in (("knn", 0.0), ("linear-cached", 0.2))
            }
            metrics = metrics_of(6, offset=offset + seed / 10)
            run = write_run(folder / f"{method} <b>{seed}", config, metrics, results)
            write_figures(run, {"gallery.json": gallery_of(CLASSES, caption=HOSTILE)})
            write_figures(run, {"embedding-map.json": map_of(CLASSES)})
            runs.append(run)
    return write_report(runs, folder / "report.html")


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    assert PROGRAM is not None
    profile = tmp_path_factory.mktemp("profile")
    browser = Chrome(PROGRAM, profile)
    yield browser
    browser.close()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_it_loads_without_errors_requests_or_sideways_scrolling(chrome, page, width, scheme):
    chrome.show(page, width, scheme)
    chrome.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    chrome.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert chrome.complaints() == []
    assert chrome.requests() == [page.as_uri()]
    assert chrome.run("document.documentElement.scrollWidth") <= width
    wide = chrome.run(
        "[...document.querySelectorAll('main *')].filter(each => !each.closest('.scroll, pre, svg')"
        f" && each.getBoundingClientRect().right > {width} + 1).map(each => each.outerHTML)"
    )
    assert wide == []
    dark = chrome.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_a_class_called_script_runs_nothing(chrome, page):
    chrome.show(page)
    assert chrome.run("document.title") == "MoCo-v2 and MoCHi (128, 128, 16) on shapes"
    assert HOSTILE in chrome.run("document.getElementById('gallery').textContent")
    assert chrome.run("document.querySelectorAll('script').length") == 3
    assert chrome.run("document.querySelectorAll('[onerror]').length") == 0
    chrome.run("document.querySelector('.plane').focus()")
    chrome.press("ArrowRight", 39)
    chrome.press("ArrowRight", 39)
    assert chrome.run("document.querySelectorAll('.card script').length") == 0
    assert chrome.run("document.title").startswith("MoCo-v2")


def test_a_script_that_is_not_ours_is_refused_by_the_page_itself(chrome, page, tmp_path):
    attacked = tmp_path / "attacked.html"
    text = page.read_text().replace("</footer>", f"{HOSTILE}</footer>")
    attacked.write_text(text)
    chrome.show(attacked)
    assert chrome.run("document.title").startswith("MoCo-v2")
    assert any("Content Security Policy" in str(each) for each in chrome.complaints())


def test_the_table_shows_the_means_of_the_result_files(chrome, page):
    chrome.show(page)
    cells = chrome.run(
        "[...document.querySelectorAll('[data-evaluation=knn] tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    )
    # 0.50, 0.52 and 0.54, 0.56: the deviation of a sample of two is their distance over root two.
    assert [row[2] for row in cells] == ["51.0 ± 1.4", "55.0 ± 1.4"]
    assert [row[5] for row in cells] == ["baseline", "+4.0 ± 1.4"]


def test_the_pictures_of_the_gallery_are_decoded(chrome, page):
    chrome.show(page)
    chrome.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    sizes = chrome.run(
        "Promise.all([...document.querySelectorAll('#gallery img')]"
        ".map(each => each.decode().then(() => each.naturalWidth)))"
    )
    assert len(sizes) == 4 * 2 * (1 + 4 + 3)
    assert set(sizes) == {8}
    assert chrome.run("document.querySelectorAll('#gallery .negatives em').length") == 4 * 2


def test_a_name_in_the_legend_hides_and_shows_its_curve(chrome, page):
    chrome.show(page)
    count = "document.querySelectorAll('#chart .curve').length"
    button = "document.querySelector('.legend button')"
    assert chrome.run(count) == 4
    chrome.run(f"{button}.click()")
    assert (chrome.run(count), chrome.run(f"{button}.ariaPressed")) == (3, "false")
    chrome.run(f"{button}.click()")
    assert (chrome.run(count), chrome.run(f"{button}.ariaPressed")) == (4, "true")
    chrome.run("[...document.querySelectorAll('.reading button')][1].click()")
    assert chrome.run(count) == 0
    assert chrome.complaints() == []


def test_hovering_shows_the_numbers_of_all_runs_at_that_epoch(chrome, page):
    chrome.show(page)
    chrome.run("document.querySelector('.plot').scrollIntoView({behavior: 'instant'})")
    place = "document.querySelector('.plot').getBoundingClientRect()"
    box = [chrome.run(f"{place}.{side}") for side in ("left", "top", "width")]
    values = "[...document.querySelectorAll('.legend .value')].map(each => each.textContent)"
    reading = "document.querySelector('.reading output').textContent"
    assert chrome.run(reading) == "Last value"
    # The plot begins 52 pixels from the left and ends 14 from the right; half of 6 epochs is 3.
    chrome.move(box[0] + 52 + (box[2] - 66) / 2, box[1] + 100)
    assert chrome.run(reading) == "Epoch 3"
    assert chrome.run(values) == ["7.00", "7.10", "7.40", "7.50"]
    chrome.move(2, 2)
    assert chrome.run(reading) == "Last value"
    assert chrome.run(values) == ["6.00", "6.10", "6.40", "6.50"]


def test_every_control_is_reached_by_keyboard_and_arrows_read_the_curves(chrome, page):
    chrome.show(page)
    reached = []
    for _ in range(60):
        chrome.press("Tab", 9)
        reached.append(
            chrome.run(
                "(e => e.id || e.dataset.run || e.className || e.name || e.textContent.trim())"
                "(document.activeElement)"
            )
        )
        if reached[-1] == "plot":
            break
    assert reached[0] == "skip"
    assert "metric" in reached
    assert reached[-1] == "plot"
    chrome.press("Home", 36)
    chrome.press("ArrowRight", 39)
    assert chrome.run("document.activeElement.ariaValueText").startswith("Loss, Epoch 1: ")
    assert "7.67" in chrome.run("document.querySelector('.legend .value').textContent")
    for _ in range(4):
        chrome.press("Tab", 9)
    chrome.press("Enter", 13)
    assert chrome.run("document.activeElement.ariaPressed") == "false"
    outline = chrome.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_another_measure_is_chosen_and_its_table_follows(chrome, page):
    chrome.show(page)
    chrome.run("document.querySelector('input[value=knn]').click()")
    chrome.run("document.getElementById('curve-table').open = true")
    chrome.run("new Promise(done => setTimeout(done, 50))")
    rows = chrome.run(
        "[...document.querySelectorAll('#curve-numbers tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert rows[-1][1] == "70.0"


def test_maps_show_images_by_mouse_and_by_keyboard(chrome, page):
    chrome.show(page)
    chrome.run("document.querySelector('.plane').scrollIntoView({behavior: 'instant'})")
    card = "document.querySelector('.plane .card')"
    assert chrome.run(f"{card}.hidden")
    chrome.run("document.querySelector('.plane').focus()")
    chrome.press("ArrowRight", 39)
    assert not chrome.run(f"{card}.hidden")
    assert chrome.run(f"{card}.querySelector('img').decode().then(() => true)")
    chrome.press("Escape", 27)
    assert chrome.run(f"{card}.hidden")


def test_without_javascript_table_figures_and_gallery_are_there(chrome, page):
    chrome.show(page, script=False)
    chrome.call("Emulation.setScriptExecutionDisabled", value=False)  # only to ask
    heights = chrome.run(
        "['.results', '#figures svg', '.gallery img', '.map svg', '#settings table']"
        ".map(each => document.querySelector(each).getBoundingClientRect().height)"
    )
    assert min(heights) > 10
    assert chrome.run("document.querySelector('#chart').getBoundingClientRect().height") == 0
