"""The documentation builds without a warning, names everything public, works from a folder."""

import inspect
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

import hardmix
from chrome import Chrome, find_chrome
from hardmix.commands import main as cli
from places import ROOT

sys.path.append(str(ROOT / "tools"))

import glossary_links
import reference_pages

pytestmark = pytest.mark.slow

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("experiments/*.md"),
    ROOT / "examples" / "README.md",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it; strict, so that a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser that asks for nothing outside the site's folder, if the machine has one."""
    program = find_chrome()
    if program is None:
        pytest.skip("no Chromium or Chrome is installed")
    chrome = Chrome(program, tmp_path_factory.mktemp("profile"))
    yield chrome
    chrome.close()


@cache
def generated() -> dict[str, str]:
    """Return the generated pages of the reference."""
    return reference_pages.pages()


def section(page: str, title: str) -> str:
    """Return the text under a heading of a generated page, up to the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", generated()[page], re.M | re.S)
    assert found, f"{page} has no {title}"
    return found[1]


def first_cells(text: str) -> list[str]:
    return [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]


def options(text: str) -> set[str]:
    """Return the options in a section's table, and those of the groups that it links to."""
    found = set(re.findall(r"`(--[\w.-]*\w)`", " ".join(first_cells(text))))
    for group, about in re.findall(r"^\| \[`--(\w+)\.\*`\](.*)$", text, re.M):
        without = set(re.findall(r"`(--[\w.-]*\w)`", about.partition("Without ")[2]))
        without |= {re.sub(r"\.(?=[^.]*$)", ".no-", each) for each in without}  # of switches
        title = f"class `hardmix.config.{group.capitalize()}Config`"
        found |= options(section("reference/settings.md", title)) - without
    return found


def anchors(document: Path) -> list[str]:
    """Return the names of a document's headings, by GitHub's rule, which is the site's too."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_every_public_name_is_on_the_site_with_its_docstring(site):
    for module in reference_pages.MODULES:
        page = (site / "reference" / f"{module}.html").read_text()
        text = " ".join(re.sub(r"<[^>]+>", "", page).split())
        package = attrgetter(module.partition(".")[2])(hardmix) if "." in module else hardmix
        for name in package.__all__:
            thing = getattr(package, name)
            if inspect.ismodule(thing) and name != "recipes":
                continue
            assert f'id="{module}.{name}"' in page, name
            if inspect.isroutine(thing) or inspect.isclass(thing):
                first = inspect.getdoc(thing).splitlines()[0]
                words = re.findall(r"\w{3,}", first)[:4]
                assert re.search(r"\W+(?:\w{1,2}\W+)*".join(words), text), (name, first)


def test_every_public_setting_has_a_line_with_a_meaning():
    page = generated()["reference/settings.md"]
    rows = re.findall(r"^\| (?!---).*\|$", page, re.M)
    assert len(rows) > 150
    assert [row for row in rows if not row.removesuffix(" |").rpartition(" | ")[2].strip()] == []
    for name in hardmix.config.__all__:
        kind = getattr(hardmix.config, name)
        if not hasattr(kind, "__dataclass_fields__"):
            continue
        cells = " ".join(
            first_cells(section("reference/settings.md", reference_pages.title_of(kind)))
        )
        named = re.findall(r"`(?:--)?(?:\w+\.(?!\*))?([\w-]+)(?:\.\*)?`", cells)
        assert {field.name for field in fields(kind)} <= {each.replace("-", "_") for each in named}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_commands_options_are_those_of_its_help(name, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        cli.main([name, "--help-all"])
    lines = re.findall(r"│ (--[\w.-]+(?:, --[\w.-]+)*)", capfd.readouterr().out)  # two columns
    shown = {option for line in lines for option in line.split(", ")}
    assert options(section("reference/commands.md", f"hardmix {name}")) == shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_a_page_lead_to_headings_that_exist(document):
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        if not re.fullmatch(r"L\d+", anchor):
            target = document.parent / path if path else document
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    missing = [page.name for page in ROOT.glob("docs/*.md") if f" {page.name}" not in navigation]
    assert missing == []


def navigation() -> dict[str, list[str]]:
    """Return the pages of each part of the site."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    parts = re.split(r"^  - (\w+):$", text, flags=re.M)[1:]
    return {
        name: re.findall(r": (\S+\.md)$", pages, re.M)
        for name, pages in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_pages_have_the_order_of_a_readers_questions():
    assert [*navigation()] == ["Start", "Guides", "Results", "Reference", "Background"]


@pytest.mark.parametrize("page", [*navigation()["Start"], *navigation()["Guides"]])
def test_a_guide_is_short(page):
    if page.startswith("notebooks/"):
        return
    text = (ROOT / "docs" / page).read_text()
    text = re.sub(r"^```.*?^```|^    .*?$|^\|.*?$|\]\([^)]*\)", "", text, flags=re.M | re.S)
    assert len(text.split()) <= 1000, "move measurements and histories to a page of the background"


def test_terms_are_linked_to_the_glossary_at_their_first_use(site):
    page = (site / "own-images.html").read_text()
    for term in ("verdict", "proxy-accuracy", "temperature", "queue"):
        assert page.count(f'href="glossary.html#{term}"') == 1, term
    prose = (
        "A `queue`, RUN/verdict.json and [a queue](x.md).\n\n    the queue\n\nIts queue, a queue."
    )
    linked = prose.replace("Its queue", "Its [queue](g.md#queue)")
    assert glossary_links.linked(prose, "g.md") == linked


def test_the_notebooks_are_pages_with_their_outputs(site):
    for name in ("loss", "folder", "run"):
        page = (site / "notebooks" / f"{name}.html").read_text()
        assert page.count('<div class="output">') >= 4
        assert 'href="../' in page


FIND = """(async () => {
    document.querySelector('#__search').click();
    const field = document.querySelector('.md-search__input');
    field.focus();
    field.value = 'uniformity';
    field.dispatchEvent(new Event('keyup'));
})()"""


def test_search_works_from_a_folder_and_asks_no_other_host(site, browser):
    browser.show(site / "index.html")
    browser.run(FIND)
    results, deadline = 0, time.monotonic() + 30
    while not results and time.monotonic() < deadline:
        time.sleep(0.2)
        results = browser.run("document.querySelectorAll('.md-search-result__item').length")
    assert results > 2
    assert [each for each in browser.requests() if not each.startswith("file:")] == []
    assert browser.complaints() == []


BROKEN = "[...document.images].filter(each => !each.naturalWidth).map(each => each.src).join(' ')"


def test_every_page_fits_a_telephone_and_is_whole(site, browser):
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # of a server, whose root is the site
            continue
        browser.show(page, width=390)
        assert browser.run("document.documentElement.scrollWidth") <= 390, page
        assert browser.complaints() == [], page
        assert [each for each in browser.requests() if not each.startswith("file:")] == []
        assert browser.run(BROKEN) == "", page


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_telephone_and_follow_the_colour_scheme(site, browser, width, scheme):
    for page in ("index.html", "results.html", "reference/settings.html"):
        browser.show(site / page, width=width, scheme=scheme)
        browser.run("localStorage.clear()")
        browser.show(site / page, width=width, scheme=scheme)
        assert browser.run("document.documentElement.scrollWidth") <= width, page
        wanted = {"light": "default", "dark": "slate"}[scheme]
        assert browser.run("document.body.dataset.mdColorScheme") == wanted
