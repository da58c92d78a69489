"""The page of `hardmix explore` in a real browser: nothing is fetched, all can be reached."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch
from PIL import Image

from chrome import Chrome, find_chrome
from hardmix.data.thumbnails import data_uri
from hardmix.explore.exploring import ExploreOptions, explore_run
from hardmix.models.backbones import build_backbone
from hardmix.report.explore_page import draw_page, page_order, shortened
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig

PROGRAM = find_chrome()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None,
        reason="no browser: install chromium (apt-get install chromium), or set CHROME to one",
    ),
]
HOSTILE = "<script>document.title = 'broken in'<\\script>.png"
ODD = ['"><img src=x onerror=1>.png', "a'b & 100%#1?.png", "two\nlines.png", "\u202egnp.exe.png"]
IMAGES = 300


def scene(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((60, 50), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Explore 300 images in two classes, with odd names, a copy, a query and a wrong label."""
    folder = tmp_path_factory.mktemp("explore")
    photos = folder / "photos & more"
    for seed in range(IMAGES):
        kind = ("cats", "<b>dogs")[seed % 2]
        name = [HOSTILE, *ODD][seed] if seed < 5 else f"{seed}.png"
        (photos / kind).mkdir(parents=True, exist_ok=True)
        scene(seed).save(photos / kind / name)
    scene(9).resize((90, 75)).save(photos / "cats" / "large-copy.png")
    scene(1000).save(folder / "query.png")
    data = DataConfig(root=str(photos), image_size=32, workers=0)
    config = PretrainConfig(
        recipe="demo",
        data=data,
        model=ModelConfig(backbone="small"),
        train=TrainConfig(device="cpu"),
    )
    torch.manual_seed(0)
    run = Run.create(folder / "run", config)
    run.write_encoder(build_backbone("small", 3).trunk, config)
    options = ExploreOptions(num_clusters=4, queries=(folder / "query.png",))
    return explore_run(run.path, data, options)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory) -> Path:
    return draw_page(found, tmp_path_factory.mktemp("page") / "explore.html")


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    assert PROGRAM is not None
    profile = tmp_path_factory.mktemp("profile")
    browser = Chrome(PROGRAM, profile)
    yield browser
    browser.close()
    shutil.rmtree(profile, ignore_errors=True)


def settled(chrome, selector="#list canvas") -> int:
    """Wait until every picture in sight is drawn; how many there are."""
    return chrome.run(
        "(async () => { let found; do { await new Promise(done => setTimeout(done, 10));"
        f" found = [...document.querySelectorAll({selector!r})]; }}"
        " while (found.some(each => each.dataset.painted === undefined)); return found.length; })()"
    )


def show(chrome, page, view="images", width=1400, scheme="light") -> None:
    chrome.show(page, width, scheme)
    chrome.run(f"document.querySelector('[data-view={view}]').click()")
    settled(chrome)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_every_view_loads_without_errors_requests_or_sideways_scrolling(
    chrome, page, width, scheme
):
    chrome.show(page, width, scheme)
    views = chrome.run("[...document.querySelectorAll('[data-view]')].map(e => e.dataset.view)")
    assert views[:4] == ["queries", "clusters", "images", "duplicates"]
    assert "unusual" in views
    for view in views:
        chrome.run(f"document.querySelector('[data-view={view}]').click()")
        assert settled(chrome) > 0, view
        tiles = "[...document.querySelectorAll('#list .tile')]"
        chrome.run(f"{tiles}.find(each => Number(each.dataset.index) < 301).click()")
        assert settled(chrome, "#detail canvas") > 20
        assert chrome.run("document.documentElement.scrollWidth") <= width
        wide = chrome.run(
            "[...document.querySelectorAll('header *, main *, #detail *')].filter(each =>"
            f" each.getBoundingClientRect().right > {width} + 1).map(each => each.outerHTML)"
        )
        assert wide == []
    assert chrome.complaints() == []
    assert chrome.requests() == [page.as_uri()]
    dark = chrome.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_names_of_files_run_nothing_and_are_shown_as_they_are(chrome, page):
    show(chrome, page)
    for name in (HOSTILE, *ODD[:2], ODD[2], "\\u202egnp.exe.png"):
        chrome.run(
            "(words => { words.value = "
            + json.dumps(name.split()[0][:12])
            + "; words.dispatchEvent(new Event('input')); })(document.getElementById('words'))"
        )
        chrome.run("new Promise(done => setTimeout(done, 200))")
        titles = chrome.run("[...document.querySelectorAll('#list .tile')].map(e => e.title)")
        assert any(title.endswith("/" + name) for title in titles), (name, titles)
        chrome.run("document.querySelector('#list .tile').click()")
    assert chrome.run("document.title") == "301 images of photos & more"
    assert (
        chrome.run("document.querySelectorAll('[onerror], #detail script, b script').length") == 0
    )
    assert chrome.complaints() == []


def test_a_link_leads_to_the_file_whatever_its_name(chrome, page):
    show(chrome, page)
    chrome.run(
        "(words => { words.value = \"a'b\"; words.dispatchEvent(new Event('input')); })"
        "(document.getElementById('words'))"
    )
    chrome.run("new Promise(done => setTimeout(done, 200))")
    chrome.run("document.querySelector('#list .tile').click()")
    address = chrome.run("document.querySelector('#detail h2 a').href")
    file = Path(unquote(urlsplit(address).path))
    assert file.name == "a'b & 100%#1?.png"
    assert file.exists()


def test_a_script_that_is_not_ours_is_refused_by_the_page_itself(chrome, page, tmp_path):
    attacked = tmp_path / "attacked.html"
    script = "<script>document.title = 'broken in'</script>"
    attacked.write_text(page.read_text().replace("</footer>", f"{script}</footer>"))
    chrome.show(attacked)
    assert chrome.run("document.title").startswith("301 images")
    assert any("Content Security Policy" in str(each) for each in chrome.complaints())


def test_the_neighbours_shown_are_the_exact_ones(chrome, page, found):
    show(chrome, page)
    chrome.run("document.querySelectorAll('#list .tile')[7].click()")
    row = page_order(found)[7]
    shown = chrome.run("[...document.querySelectorAll('.near .tile')].map(each => each.title)")
    wanted = [found.name(int(other)) for other in found.neighbours.indices[row]]
    assert [Path(name).name for name in shown] == [Path(name).name for name in wanted]
    similar = chrome.run(
        "[...document.querySelectorAll('.near .tile span')].map(e => e.textContent)"
    )
    for text, value in zip(similar, found.neighbours.similarities[row], strict=True):
        assert float(text) == pytest.approx(value, abs=0.01)
    chrome.run("document.querySelector('.more').click()")
    assert settled(chrome, ".near canvas") == 20 + 48


def test_shortened_vectors_find_nearly_the_same_images():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 256, generator=generator) @ torch.diag(0.97 ** torch.arange(256.0))
    rows = torch.nn.functional.normalize(rows, dim=1)
    short, scale = shortened(rows)
    assert short.shape == (500, 64)
    near = (short.astype(np.float32) @ short.astype(np.float32).T) * scale * scale
    exact = (rows @ rows.T).numpy()
    assert np.abs(near - exact).mean() < 0.02
    best = [set(np.argsort(-each)[:50]) for each in exact]
    found = [set(np.argsort(-each)[:50]) for each in near]
    assert np.mean([len(a & b) for a, b in zip(best, found, strict=True)]) > 42


def test_only_rows_in_sight_are_in_the_page(chrome, page):
    show(chrome, page, width=390)
    count = "document.querySelectorAll('#list .tile').length"
    assert chrome.run(count) < 120
    chrome.run("scrollTo({top: 1e9, behavior: 'instant'})")
    chrome.run("new Promise(done => setTimeout(done, 100))")
    settled(chrome)
    assert chrome.run(count) < 120
    assert chrome.run(
        "[...document.querySelectorAll('#list .tile')].some(each => each.dataset.index === '300')"
    )


def test_duplicates_name_the_one_to_keep(chrome, page):
    show(chrome, page, "duplicates")
    titles = chrome.run("[...document.querySelectorAll('#list .tile')].map(each => each.title)")
    assert titles == ["cats/large-copy.png", "<b>dogs/9.png"]
    assert chrome.run("document.querySelector('#list .tile b').textContent") == "keep"
    rows = list(csv.DictReader((page.parent / "explore" / "duplicates.csv").open()))
    assert [Path(row["name"]).name for row in rows] == ["large-copy.png", "9.png"]


SAVED = """
(async id => {
  const blobs = [], names = [];
  const make = URL.createObjectURL;
  URL.createObjectURL = blob => { blobs.push(blob); return make.call(URL, blob); };
  const click = HTMLAnchorElement.prototype.click;
  HTMLAnchorElement.prototype.click = function () { names.push(this.download); };
  document.getElementById(id).click();
  URL.createObjectURL = make;
  HTMLAnchorElement.prototype.click = click;
  return [names[0], await blobs[0].text()];
})
"""


def test_ticked_copies_are_moved_by_the_saved_script_and_nothing_is_deleted(
    chrome, page, found, tmp_path
):
    show(chrome, page, "duplicates")
    assert chrome.run("document.getElementById('ticked').textContent") == "1 ticked"
    assert "900" not in chrome.run("document.querySelector('#list').innerText")
    assert "90 \u00d7 75" in chrome.run("document.querySelector('#list').innerText")
    name, text = chrome.run(f"{SAVED}('save-list')")
    assert (name, text) == ("duplicates.txt", "<b>dogs/9.png\n")
    name, text = chrome.run(f"{SAVED}('save-script')")
    assert name == "move-duplicates.py"
    root = tmp_path / "photos"
    shutil.copytree(found.shared_folder, root)
    before = sorted(root.rglob("*.png"))
    script = tmp_path / name
    script.write_text(text.replace(json.dumps(found.shared_folder), repr(str(root))))
    for said in ("1 of 1 files moved", "missing"):
        done = subprocess.run([sys.executable, script], capture_output=True, text=True)
        assert said in done.stdout, done.stderr
    assert (tmp_path / "photos-duplicates" / "<b>dogs" / "9.png").exists()
    assert sorted(root.rglob("*.png")) == [file for file in before if file.name != "9.png"]
    chrome.run("document.querySelector('.ticked input').click()")
    assert chrome.run("document.getElementById('ticked').textContent") == "0 ticked"
    assert chrome.run("document.getElementById('save-script').disabled")


def test_a_slider_hides_copies_that_are_less_certain(chrome, page, found):
    show(chrome, page, "duplicates")
    certainty = float(found.duplicates.groups[0].similarities[0])
    assert 0.85 <= certainty < 1
    move = "(e => {{ e.value = {}; e.dispatchEvent(new Event('input')); }})({})"
    slider = "document.getElementById('least')"
    chrome.run(move.format(1, slider))
    assert chrome.run("document.querySelectorAll('#list .tile').length") == 0
    assert chrome.run("document.getElementById('certainty').textContent") == "1.00"
    chrome.run(move.format(0.85, slider))
    assert settled(chrome) == 2


def test_the_panel_covers_neither_the_search_nor_the_views(chrome, page):
    show(chrome, page)
    chrome.run("document.querySelector('#list .tile').click()")
    right = "Math.max(...[...document.querySelectorAll('.bar *, header *')].map(each =>"
    right += " each.getBoundingClientRect().right))"
    panel = chrome.run("document.getElementById('detail').getBoundingClientRect().left")
    assert chrome.run(right) <= panel


def test_a_count_never_stands_beside_the_sentence_that_nothing_stands_out(chrome, page, found):
    chrome.show(page)
    count = chrome.run("document.querySelector('[data-view=unusual]').textContent")
    number = found.outliers.number
    assert count == (f"Unusual{number}" if number else "Unusual")
    none = "No image stands out" in chrome.run("document.querySelector('.lead').textContent")
    assert none == (number == 0)
    names = chrome.run("JSON.parse(document.getElementById('facts').textContent).clusters")
    assert len({each["name"] for each in names}) == len(names)


def test_a_cluster_is_opened_and_closed_again(chrome, page, found):
    show(chrome, page, "clusters")
    assert chrome.run("document.querySelectorAll('#list h3').length") >= 2
    chrome.run("document.querySelector('.whole').click()")
    assert "the most typical first" in chrome.run("document.getElementById('note').textContent")
    first = chrome.run("document.querySelector('#list .tile').title")
    assert Path(first).name == Path(found.name(int(found.clusters.members(0)[0]))).name


def test_everything_is_reached_by_keyboard(chrome, page):
    chrome.show(page)
    reached = []
    for _ in range(20):
        chrome.press("Tab", 9)
        reached.append(
            chrome.run("(e => e.id || e.dataset.view || e.className)(document.activeElement)")
        )
        if reached[-1] == "tile":
            break
    assert reached[0] == "skip"
    assert {"queries", "clusters", "images", "words", "file"} <= set(reached)
    assert reached[-1] == "tile"
    at = "document.activeElement.dataset.place"
    assert chrome.run(at) == "0/0"
    chrome.press("ArrowRight", 39)
    assert chrome.run(at) == "0/1"
    chrome.press("End", 35)
    chrome.press("Home", 36)
    chrome.press("ArrowRight", 39)
    chrome.press("Enter", 13)
    assert not chrome.run("document.getElementById('detail').hidden")
    chrome.press("Escape", 27)
    assert chrome.run("document.getElementById('detail').hidden")
    assert chrome.run(at) == "0/1"
    outline = chrome.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_arrows_walk_through_images_that_are_not_in_sight_yet(chrome, page):
    show(chrome, page)
    chrome.run("document.querySelector('#list .tile').focus()")
    chrome.press("End", 35)
    assert chrome.run("document.activeElement.dataset.index") == "300"
    chrome.press("Home", 36)
    assert chrome.run("document.activeElement.dataset.index") == "0"
    chrome.press("ArrowDown", 40)
    assert int(chrome.run("document.activeElement.dataset.index")) > 1


DROP = """
(async ([name, pixels]) => {
  const canvas = document.createElement('canvas');
  const image = new Image();
  image.src = pixels;
  await image.decode();
  canvas.width = image.width; canvas.height = image.height;
  canvas.getContext('2d').drawImage(image, 0, 0);
  const blob = await new Promise(done => canvas.toBlob(done));
  const carried = new DataTransfer();
  carried.items.add(new File([blob], name, {type: 'image/png'}));
  dispatchEvent(new DragEvent('drop', {dataTransfer: carried, cancelable: true}));
  while (!document.getElementById('heading').textContent.startsWith('Similar to'))
    await new Promise(done => setTimeout(done, 10));
  return document.getElementById('note').textContent;
})
"""


def dropped(chrome, name: str, image: Image.Image) -> str:
    return chrome.run(f"{DROP}({json.dumps([name, data_uri(np.asarray(image))])})")


def test_a_dropped_picture_of_the_set_is_found(chrome, page):
    show(chrome, page)
    assert "33.png is in this set: <b>dogs/33.png" in dropped(chrome, "33.png", scene(33))
    assert chrome.run("document.querySelector('#detail h2').textContent") == "<b>dogs/33.png"
    chrome.show(page)
    assert "other.jpg is in this set: cats/34.png" in dropped(chrome, "other.jpg", scene(34))


def test_another_dropped_picture_is_compared_by_colours_and_that_is_said(chrome, page):
    show(chrome, page)
    said = dropped(chrome, "33.png", scene(5000))
    assert "not in this set" in said
    assert "--query 33.png" in said
    assert "of the first 10 by colours and layout" in said
    assert settled(chrome) > 20
    assert chrome.run("document.getElementById('detail').hidden")


def test_without_javascript_the_page_says_what_was_found(chrome, page):
    chrome.show(page, script=False)
    chrome.call("Emulation.setScriptExecutionDisabled", value=False)  # only to ask
    text = chrome.run("document.body.innerText")
    assert "1 group of near-duplicates" in text
    assert "explore/duplicates.csv" in text
