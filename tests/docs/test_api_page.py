"""The reference, docs/api.md, is generated from the source, and complete."""

import inspect
import re
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path

import pytest

import hardmix
from hardmix.commands import main as cli
from places import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("experiments/*.md"),
    ROOT / "examples" / "README.md",
]


def check(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )


def section(title: str) -> str:
    """Return the text under a heading, up to the next one; a class may be marked as such."""
    found = re.search(rf"^### (?:class )?{re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    assert found, f"docs/api.md has no {title}"
    return found[1]


def first_cells(text: str) -> list[str]:
    return [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]


def options(text: str) -> set[str]:
    """Return the options in a section's table, and those of the groups that it links to."""
    found = set(re.findall(r"`(--[\w.-]*\w)`", " ".join(first_cells(text))))
    for group, about in re.findall(r"^\| \[`--(\w+)\.\*`\](.*)$", text, re.M):
        without = set(re.findall(r"`(--[\w.-]*\w)`", about.partition("Without ")[2]))
        without |= {re.sub(r"\.(?=[^.]*$)", ".no-", each) for each in without}  # of switches
        found |= options(section(f"`hardmix.config.{group.capitalize()}Config`")) - without
    return found


def anchors(document: Path) -> list[str]:
    """Return GitHub's names for the headings of a document."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_page_is_current():
    done = check(ROOT / "tools" / "api.py")
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_refused_with_the_way_out(tmp_path):
    for name in ("tools/api.py", "tools/api_settings.py", "docs/api.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    assert check(tmp_path / "tools" / "api.py").returncode == 0
    loss = tmp_path / "src" / "hardmix" / "mixing" / "loss.py"
    loss.write_text(loss.read_text().replace("Return the mean loss over", "Return the loss of"))
    done = check(tmp_path / "tools" / "api.py")
    assert done.returncode == 1
    assert done.stderr == "api.md differs from the source's docstrings: run `make docs`.\n"


NAMESPACES = ("config", "losses", "strategies")
PUBLIC = [
    *(name for name in hardmix.__all__ if name not in (*NAMESPACES, "explore", "integrations")),
    *(f"{module}.{name}" for module in NAMESPACES for name in getattr(hardmix, module).__all__),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_entry_with_its_docstring(name):
    thing = attrgetter(name)(hardmix)
    code, _, text = section(f"`hardmix.{name}`").rpartition("```\n")
    if is_dataclass(thing) and not code:  # settings: a line of the table for each
        named = re.findall(
            r"`(?:--)?(?:\w+\.(?!\*))?([\w-]+)(?:\.\*)?`", " ".join(first_cells(text))
        )
        assert {field.name for field in fields(thing)} <= {each.replace("-", "_") for each in named}
    else:
        code, text = section(f"`hardmix.{name}`").split("```\n", 1)
        assert name.rpartition(".")[2] in code
    if callable(thing):
        assert inspect.getdoc(thing).splitlines()[0] in text
    else:  # what follows a constant is prose, not the link to its file alone
        assert re.match(r"\n[A-Z].*[.]\n", text)


def test_every_field_setting_and_option_has_a_meaning():
    rows = re.findall(r"^\| (?!---).*\|$", PAGE, re.M)
    assert len(rows) > 200
    assert [row for row in rows if not row.removesuffix(" |").rpartition(" | ")[2].strip()] == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_commands_options_are_those_of_its_help(name, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        cli.main([name, "--help-all"])
    lines = re.findall(r"│ (--[\w.-]+(?:, --[\w.-]+)*)", capfd.readouterr().out)  # two columns
    shown = {option for line in lines for option in line.split(", ")}
    assert options(section(f"hardmix {name}")) == shown


def test_no_two_headings_of_the_page_have_one_anchor():
    found = anchors(ROOT / "docs" / "api.md")
    assert len(found) == len(set(found)) > 80


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_a_page_lead_to_headings_that_exist(document):
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        if not re.fullmatch(r"L\d+", anchor):
            target = document.parent / path if path else document
            assert anchor in anchors(target), f"{path}#{anchor}"
