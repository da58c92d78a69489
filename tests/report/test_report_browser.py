"""The report in a real browser: nothing is fetched, nothing fails, everything can be reached."""

import re
import shutil
from pathlib import Path

import pytest

from chrome import Chrome, find_chrome
from fake_runs import (
    ACTIVE_SVG,
    config_of,
    gallery_of,
    map_of,
    metrics_of,
    neighbours_of,
    result_of,
    verdict_of,
    write_figures,
    write_run,
)
from hardmix.report.page import write_report

PROGRAM = find_chrome()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None,
        reason="no browser: install chromium (apt-get install chromium), or set CHROME to one",
    ),
]
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
            results["verdict"] = verdict_of(better=bool(seed), next=[HOSTILE, "x" * 200])
            metrics = metrics_of(6, offset=offset + seed / 10)
            run = write_run(folder / f"{method} <b>{seed}", config, metrics, results)
            write_figures(run, {"gallery.json": gallery_of(CLASSES, caption=HOSTILE)})
            write_figures(run, {"embedding-map.json": map_of(CLASSES)})
            write_figures(run, {"neighbours.json": neighbours_of(["a.jpg", "b" * 80, HOSTILE])})
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
        "[...document.querySelectorAll('header *, main *')]"
        ".filter(each => !each.closest('.scroll, pre, svg'))"
        f".filter(each => each.getBoundingClientRect().right > {width} + 1)"
        ".map(each => each.outerHTML)"
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


def test_nothing_in_a_drawing_runs_or_is_fetched(chrome, tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    act = "<script>parent.document.title = 'broken in'; alert(1)</script>"
    drawing = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 9 9'>{act}{''.join(ACTIVE_SVG)}"
    )
    facts = {"title": "Spectrum", "caption": "c", "numbers": {}}
    write_figures(run, {"spectrum.svg": f"{drawing}</svg>", "spectrum.json": facts})
    attacked = write_report([run], tmp_path / "report.html")
    title = re.search("<title>(.*?)</title>", attacked.read_text())[1]
    chrome.show(attacked)
    image = "document.querySelector('#figures img[alt=Spectrum]')"
    assert chrome.run(f"{image}.decode().then(() => {image}.naturalWidth)") > 0
    assert chrome.run("document.title") == title
    assert chrome.requests() == [attacked.as_uri()]


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


def test_an_image_of_the_same_class_is_marked_in_words_and_in_grey(chrome, page):
    chrome.show(page)
    told = chrome.run(
        "(each => [each.querySelector('em').textContent,"
        " getComputedStyle(each.querySelector('img')).outlineColor])"
        "(document.querySelector('.negatives .same'))"
    )
    assert told[0] == "same class"
    red, green, blue = (int(each) for each in re.findall(r"\d+", told[1])[:3])
    assert max(red, green, blue) - min(red, green, blue) < 40


def test_thumbnails_have_at_least_the_pixels_at_which_they_are_shown(chrome, page):
    chrome.show(page)
    chrome.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    shown = chrome.run(
        "Promise.all([...document.querySelectorAll('#neighbours img')].map(each => each.decode()"
        ".then(() => [each.naturalWidth, each.clientWidth, each.clientHeight])))"
    )
    assert len(shown) == 4 * 2 * (1 + 4)
    assert {(natural, *size) for natural, *size in shown} == {(128, 128, 128), (128, 96, 96)}
    kinds = chrome.run(
        "['#neighbours img', '#gallery img'].map(each =>"
        " getComputedStyle(document.querySelector(each)).imageRendering)"
    )
    assert kinds == ["auto", "pixelated"]  # 8 pixels would be a blur


def test_the_verdict_is_seen_without_scrolling_and_its_bars_are_true(chrome, page):
    for width in (390, 1400):
        chrome.show(page, width)
        top = "document.querySelector('.verdict .sentence').getBoundingClientRect().bottom"
        assert chrome.run(top) < 900
        bars = chrome.run(
            "[...document.querySelector('.measured').querySelectorAll('i')].map(each =>"
            " each.getBoundingClientRect().width / each.parentNode.getBoundingClientRect().width)"
        )
        assert bars == pytest.approx([0.625, 0.75, 0.25, 0.3, 0.5], abs=0.01)


def test_a_table_that_is_too_wide_says_so_and_others_do_not(chrome, page):
    hints = (
        "[...document.querySelectorAll('.scroll')].filter(each => each.checkVisibility())"
        ".map(each =>"
        " [each.scrollWidth > each.clientWidth + 1,"
        " getComputedStyle(each.previousElementSibling).display !== 'none'"
        " && each.previousElementSibling.className.includes('sideways')])"
    )
    for width in (390, 1400):
        chrome.show(page, width)
        chrome.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        told = chrome.run(hints)
        assert all(wide == said for wide, said in told), told
        kinds = [wide for wide, _ in told]
        assert any(kinds) if width == 390 else not all(kinds)


def test_less_important_measures_are_folded(chrome, page):
    chrome.show(page)
    menu = "document.querySelector('.metrics')"
    seen = chrome.run(f"[...{menu}.querySelectorAll(':scope > label')].map(e => e.textContent)")
    assert seen == ["Loss", "k-NN accuracy", "Proxy accuracy"]
    assert not chrome.run(f"{menu}.querySelector('details').open")
    chrome.run(f"{menu}.querySelector('summary').click()")
    chrome.run("document.querySelector('input[value=lr]').click()")
    assert "Learning rate" in chrome.run("document.querySelector('.about').textContent")


def test_text_can_be_read_against_its_background(chrome, page):
    ratio = """(() => {
      const light = (text) => { const [r, g, b] = text.match(/\\d+/g).map((v) => { v /= 255;
        return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const paper = light(getComputedStyle(document.body).backgroundColor);
      return ['.sentence', '.measured dt', '.query figcaption', '.query em', 'nav a', 'thead th',
        '.verdict .quiet', '.sideways'].map((each) => {
          const ink = light(getComputedStyle(document.querySelector(each)).color);
          return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); });
    })()"""
    for scheme in ("light", "dark"):
        chrome.show(page, scheme=scheme)
        assert min(chrome.run(ratio)) >= 4.5


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
    for _ in range(120):
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
    assert ".png" in chrome.run(f"{card}.textContent")
    chrome.press("Escape", 27)
    assert chrome.run(f"{card}.hidden")
    box = chrome.run(
        "(box => [box.left + box.width / 2, box.top + box.height / 2])"
        "(document.querySelector('.plane image').getBoundingClientRect())"
    )
    chrome.move(*box)
    name = chrome.run("document.querySelector('.plane title').textContent")
    assert name in chrome.run(f"{card}.textContent")
    link = chrome.run("document.querySelector('.plane a').href.baseVal")
    assert link == f"file:///photos/{name}"


def test_without_javascript_table_figures_and_gallery_are_there(chrome, page):
    chrome.show(page, script=False)
    chrome.call("Emulation.setScriptExecutionDisabled", value=False)  # only to ask
    heights = chrome.run(
        "['.verdict', '#neighbours img', '.results', '#figures img', '.gallery img', '.map svg',"
        " '.map image', '#settings table']"
        ".map(each => document.querySelector(each).getBoundingClientRect().height)"
    )
    assert min(heights) > 10
    assert chrome.run("document.querySelector('#chart').getBoundingClientRect().height") == 0
